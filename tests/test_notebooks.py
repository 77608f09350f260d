"""Notebooks are built from their sources, and say nothing of the machine that built them."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="the extra notebooks")
nbformat = pytest.importorskip("nbformat", reason="the extra notebooks")

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = [path for path in sorted(FOLDER.glob("*.py")) if path.name != "build.py"]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_committed_notebook_is_of_its_source(build, source):
    notebook = source.with_suffix(".ipynb")
    assert build.same_sources(notebook, source)
    assert notebook.stat().st_size < 1_500_000
    found = nbformat.read(notebook, as_version=4)
    nbformat.validate(found)
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert sum(bool(cell.outputs) for cell in code) > len(code) / 2
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    text = "\n".join(str(cell.outputs) for cell in code)
    assert "/root" not in text
    assert "/home/" not in text
    assert "site-packages" not in text


def test_cells_are_read_from_percent_format(build):
    text, code = build.cells("# %% [markdown]\n# # Title\n#\n# words\n\n# %%\n# %matplotlib inline\nx = 1  # %% no\n")
    assert (text.cell_type, text.source) == ("markdown", "# Title\n\nwords")
    assert (code.cell_type, code.source) == ("code", "%matplotlib inline\nx = 1  # %% no")


def test_paths_of_this_machine_are_found(build):
    output = nbformat.v4.new_output("stream", text=f"in {FOLDER.parent}/x")
    assert build.named_paths(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])]))
