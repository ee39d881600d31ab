"""Every notebook runs from its first cell to its last in a kernel of its own, and its own assertions hold.

One of them in every run of the suite, by the commit's hash.
"""
from pathlib import Path

import nbformat
import pytest
import sampling
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", [pytest.param(path, marks=sampling.GRID, id=path.stem) for path in NOTEBOOKS])
def test_notebook_runs_to_its_end(path, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))         # nobody's own start-up files
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3",
                   resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    assert said and all(cell.execution_count for cell in said)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path):
    """They would differ from machine to machine, and with them every commit."""
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)
