"""What the linters do not hold: no circles, imports inside functions at borders alone, nothing too long."""

import ast
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest

import autoshard
from docs import import_graph

PACKAGE = Path(autoshard.__file__).parent
HEAVY = {"jax", "jaxlib", "numba", "ortools", "torch", "torch_xla", "torchax", "transformers"}
BORDERS = ("autoshard.cli.", "autoshard.api")
"""Commands and public functions import what they need; the methods of a Plan hand on to what lowers and shows it."""
LINES, MODULES = 80, 25


@pytest.fixture(scope="module")
def imports():
    """What imports what as it is imported, and what does so inside a function."""
    top, inside = nx.DiGraph(), nx.DiGraph()
    for path in PACKAGE.rglob("*.py"):
        importer = _module(path)
        for name, function in _imported(ast.parse(path.read_text())):
            (inside if function else top).add_edge(importer, _module_of(name))
    return top, inside


def _module(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _module_of(name):
    """The module that holds a name, if it is ours; else the package."""
    path = PACKAGE.parent / Path(*name.split("."))
    there = path.with_suffix(".py").exists() or path.is_dir()
    return name.partition(".")[0] if not name.startswith("autoshard") else name if there else name.rpartition(".")[0]


def _imported(tree, function=False):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, function) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{each.name}", function) for each in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _imported(node, function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_module_imports_itself_through_others(imports):
    everything = nx.compose(*imports)
    circles = [sorted(each) for each in nx.strongly_connected_components(everything) if len(each) > 1]
    assert circles == []


def test_imports_inside_functions_keep_something_heavy_out(imports):
    top, inside = imports
    heavy = {module: HEAVY & nx.descendants(top, module) for module in top}
    ours = [pair for pair in inside.edges if pair[1].startswith("autoshard") and not pair[0].startswith(BORDERS)]
    assert [(importer, module) for importer, module in ours if heavy.get(module, set()) <= heavy[importer]] == []


def test_functions_are_short():
    functions = [
        (_module(path), node.name, node.end_lineno - node.lineno + 1)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [each for each in functions if each[2] > LINES] == []


def test_folders_are_small():
    counts = Counter(path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MODULES} == {}


def test_the_drawing_in_the_docs_is_of_these_imports():
    assert import_graph.FILE.read_text() == import_graph.drawn(), "make graph"
