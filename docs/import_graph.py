"""Draws which package imports which, as `import-graph.svg`: `make graph`.

An arrow that others imply is left out. Layers are those that pyproject.toml's contract holds the packages to.
"""

import itertools
import tomllib
from pathlib import Path

import grimp
import networkx as nx

HERE = Path(__file__).parent
FILE = HERE / "import-graph.svg"
ROOT = "mesh, program, errors, files…"
WIDTH, BOX, HEIGHT, STEP = 760, 108, 30, 66


def layers() -> list[list[str]]:
    """Packages from the roof down; the modules at the root are one."""
    contracts = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = [[each.strip(" ()") for each in layer.replace("|", ":").split(":")] for layer in contracts[0]["layers"]]
    return [*found[:-1], [ROOT]]


def packages(rows: list[list[str]]) -> nx.DiGraph:
    """What imports what."""
    known = {*itertools.chain(*rows)}

    def package(module: str) -> str:
        name = module.split(".")[1]
        return name if name in known else ROOT

    graph = grimp.build_graph("autoshard")
    found = nx.DiGraph()
    for one in graph.modules - {"autoshard", "autoshard.__main__"}:
        found.add_edges_from((package(one), package(to)) for to in graph.find_modules_directly_imported_by(one))
    found.remove_edges_from(list(nx.selfloop_edges(found)))
    return nx.transitive_reduction(found)


def drawn() -> str:
    """The drawing: packages of a layer beside one another, layers of one to the left and right in turn."""
    rows = layers()
    centre = {}
    for number, row in enumerate(rows):
        for place, name in enumerate(row):
            right = (2 * place + 1) / (2 * len(row)) if len(row) > 1 or row == [ROOT] else (3 + 2 * (number % 2)) / 8
            centre[name] = (round(WIDTH * right), 10 + STEP * number)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {STEP * len(rows)}" font-size="13"']
    lines += ['  font-family="sans-serif" text-anchor="middle" stroke-width="1.2">']
    for one, to in sorted(packages(rows).edges):
        (x, y), (u, v) = centre[one], centre[to]
        bend = (v - y - HEIGHT) // 2
        lines.append(f'<path d="M{x},{y + HEIGHT} C{x},{y + HEIGHT + bend} {u},{v - bend} {u},{v}" fill="none"')
        lines.append(f'  stroke="#888"><title>{one} imports {to}</title></path>')
    for name, (x, y) in centre.items():
        width = BOX if name != ROOT else 2 * BOX
        lines.append(f'<rect x="{x - width // 2}" y="{y}" width="{width}" height="{HEIGHT}" rx="5" fill="#eef3fa"')
        lines.append(f'  stroke="#4477aa"/><text x="{x}" y="{y + 20}" fill="#000">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    FILE.write_text(drawn())
