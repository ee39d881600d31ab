"""Every notebook runs from its first cell to its last in a kernel of its own, its own assertions hold, its questions
take their answers, and it says what the saved outputs say.

One of them in every run of the suite, by the commit's hash.
"""
import ast
import re
import sys

import pytest
import sampling

nbformat = pytest.importorskip("nbformat", reason="notebooks need pip install -e '.[notebook]'")
from notebooks import DOTS, NO_ANSWER, NOTEBOOKS, SOLUTIONS, executed, saved_form, shown, turns  # noqa: E402

# What a reader's own notebook may import: the interface, and what everybody knows.
IMPORTS = {"meshtrain", "jax", "numpy", "IPython"} | sys.stdlib_module_names


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", [pytest.param(path, marks=sampling.GRID, id=path.stem) for path in NOTEBOOKS])
def test_notebook_runs_to_its_end_and_says_what_is_saved(path):
    saved, again = (code(notebook) for notebook in (nbformat.read(path, as_version=4), executed(path)))
    assert [shown(cell) for cell in again] == [shown(cell) for cell in saved]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_saved_by_the_tool_after_a_whole_run(path):
    """`python tests/notebooks.py`: outputs without execution times, stderr or temporary paths, cells run in order."""
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert nbformat.writes(saved_form(notebook)) + "\n" == text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_the_form_of_the_course(path):
    """A title and what one can say afterwards, something predicted and something broken, and what to keep; few words
    between the cells."""
    cells = nbformat.read(path, as_version=4).cells
    said = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert cells[0].source.startswith(f"# {path.stem.partition('_')[0]} · ") and "minutes" in cells[0].source
    assert "## Predict" in said and "## Run" in said and "## Break" in said
    assert cells[-1].source.startswith("## What to keep") and cells[-1].source.count("\n- ") == 3
    assert 8 <= len(code(nbformat.read(path, as_version=4))) <= 22
    assert any("assert" in cell.source for cell in cells) and any("picture" in shown(c) for c in cells if "outputs" in c)
    long = [cell.source for cell in cells if cell.cell_type == "markdown" and len(cell.source) > 1200]
    assert not long


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_uses_the_interface_alone_and_asks_its_reader(path):
    """It installs what is missing, simulates devices first, has formulas and a picture, and a question of its own."""
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in code(notebook)]
    assert "find_spec(\"meshtrain\") is None" in sources[0] and "%pip install" in sources[0]
    assert "[Colab](https://colab" in notebook.cells[0].source
    assert "import meshtrain as mt" in sources[1] and ("mt.simulate(8)" in sources[1] or path.stem == "9_failures")
    trees = [ast.parse(re.sub(r"^ *%.*", "    pass", source, flags=re.MULTILINE)) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if name.split(".")[0] not in IMPORTS or name.startswith("meshtrain.")] == []
    assert any("$$" in cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert len(turns(notebook)) == len(SOLUTIONS[path.stem]) >= 1
    assert all(len(DOTS.findall(cell.source)) == 1 and shown(cell) == [NO_ANSWER] for cell in turns(notebook))


def test_the_index_leads_to_every_notebook_in_order():
    index = (NOTEBOOKS[0].parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\d_\w+\.ipynb)\)", index) == [path.name for path in NOTEBOOKS]
