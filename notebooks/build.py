"""Notebooks from their plain sources: run every cell, write the .ipynb with what it printed and drew.

`python notebooks/build.py` makes all at full size, beside their sources (minutes); with `--check`, as continuous
integration does, they run at small size, nothing is written, and the committed ones must be of the sources as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
TIMEOUT_S = 1200
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def cells(source: str) -> list[nbformat.NotebookNode]:
    """The cells of a source in percent format; `# %matplotlib` lines are magics."""
    found = []
    for number, part in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        head, _, body = part.partition("\n")
        body = body.strip("\n")
        if "[markdown]" in head:
            cell = nbformat.v4.new_markdown_cell(re.sub(r"^# ?", "", body, flags=re.MULTILINE))
        else:
            cell = nbformat.v4.new_code_cell(re.sub(r"^# (%[a-z])", r"\1", body, flags=re.MULTILINE))
        cell["id"] = f"cell-{number}"  # random ids would change with every build
        found.append(cell)
    return found


def executed(path: Path, small: bool) -> nbformat.NotebookNode:
    """The notebook of a source, run from the top in a kernel of its own."""
    notebook = nbformat.v4.new_notebook(cells=cells(path.read_text()), metadata=METADATA)
    os.environ["AUTOSHARD_NOTEBOOKS_SMALL"] = "1" if small else ""
    client = NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": HERE}})
    client.execute()
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)  # when it ran
        outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
        if "outputs" in cell:
            cell["outputs"] = outputs
    return notebook


def named_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """Directories of this machine that an output names."""
    text = "\n".join(str(output) for cell in notebook.cells for output in cell.get("outputs", []))
    return sorted({path for path in (str(HERE.parent.resolve()), str(Path.home()), sys.prefix) if path in text})


def same_sources(notebook: Path, source: Path) -> bool:
    """Whether a committed notebook was built from its source as it is now."""
    found = nbformat.read(notebook, as_version=4)
    wanted = [(cell.cell_type, cell.source) for cell in cells(source.read_text())]
    return [(cell.cell_type, cell.source) for cell in found.cells] == wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="at small size, nothing written; are all built?")
    parser.add_argument("names", nargs="*", help="default all")
    options = parser.parse_args()
    sources = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)
    status = 0
    for source in sources:
        if options.names and source.stem not in options.names:
            continue
        notebook = source.with_suffix(".ipynb")
        print(f"{source.stem} …", flush=True)
        made = executed(source, small=options.check)
        if named := named_paths(made):
            print(f"{source.stem}: an output names {', '.join(named)}", file=sys.stderr)
            status = 1
        elif not options.check:
            nbformat.write(made, notebook)
        elif not notebook.exists() or not same_sources(notebook, source):
            print(f"{notebook.name} is not of {source.name}: python notebooks/build.py {source.stem}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
