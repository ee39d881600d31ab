"""Executes the notebooks of the course and saves their outputs, which are read on the web without running them:

    python tests/notebooks.py [notebooks/2_zero.ipynb …]

What is saved is the same on each machine: pictures without the text beside them, text without the directories of
files, no times and no versions. tests/whole/test_notebooks.py executes them again and compares.
"""
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 900                                     # of a cell
COLOURS = re.compile(r"\x1b\[[0-9;]*m")              # of a command that a kernel starts
# Where `mt.Rules` writes a text, and where shipped files are.
PLACES = re.compile(rf"/\S*/meshtrain-\w+/|{re.escape(str(ROOT))}/")
# What a reader may write in place of the dots of each "your turn" cell, in order.
SOLUTIONS = {
    "1_devices": ["2 * 3 / 4 * 4 * W"],
    "2_zero": ["4 * ring * 4 * (of['layers'] + of['head'])", "{'extends': 'ddp', 'grads': {'embed': 'fsdp'}}"],
    "3_tensor": ["4 * 2 * 7 / 8 * A"],
    "4_context": ["(2 * 7 + 1) * kv / 2 + 7 * 2 * kv / 2"],
    "5_pipelines": ["32", "'stage 0 F0 F1 B0 B1\\nstage 1 · F0+B0 F1+B1 ·'"],
    "6_experts": ["1.25 * K * 4 * T * (5 * D * b + 20) * (n - 1) / n"],
    "7_memory": ["12 * (16 * layer + 4 * 4 * B * S * D)"],
    "8_which_layout": ["'fsdp'"],
    "9_failures": ["sqrt(2 * 10 * MTBF / 4) / 60"],
}
NO_ANSWER = "no answer yet: put yours in place of the dots, and run this cell again\n"
DOTS = re.compile(r"^(\w+) = \.\.\.", re.MULTILINE)


def turns(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells in which the reader writes an answer."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and "mt.check_answer(" in cell.source]


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook after its last cell, run in an empty directory, in the form in which it is saved. It runs with
    SOLUTIONS, which must be right, and is saved with dots. Raises what nbclient raises where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    asked = [cell.source for cell in turns(notebook)]
    for cell, answer in zip(turns(notebook), SOLUTIONS[path.stem], strict=True):
        cell.source, count = DOTS.subn(lambda found, answer=answer: f"{found[1]} = {answer}", cell.source)
        assert count == 1, cell.source
    with tempfile.TemporaryDirectory() as empty:
        os.environ |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": empty, "TF_CPP_MIN_LOG_LEVEL": "3"}
        NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3",
                       resources={"metadata": {"path": empty}}).execute()
    for cell, source in zip(turns(notebook), asked, strict=True):
        told = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        assert told == "right\n", f"{cell.source}\n{told}"
        cell.source, cell.outputs = source, [nbformat.v4.new_output("stream", name="stdout", text=NO_ANSWER)]
    return saved_form(notebook)


def saved_form(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with what is the same on each machine alone; cells are named by their place."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                         "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for place, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{place}", {}
        if cell.cell_type == "code":
            cell.outputs = _together([kept for output in cell.outputs if (kept := _kept(output))])
    return notebook


def _together(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Prints of a cell arrive in as many pieces as there was time for; neighbours become one."""
    found = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def _kept(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """An output without what differs from machine to machine. What C++ writes to stderr is none."""
    if output.output_type == "stream":
        output.text = COLOURS.sub("", PLACES.sub("", output.text))
        return output if output.name == "stdout" else None
    picture = output.data.get("image/svg+xml")
    output.data = {"image/svg+xml": picture} if picture else {"text/plain": PLACES.sub("", output.data["text/plain"])}
    output.metadata = {}
    return output


def shown(cell: nbformat.NotebookNode) -> list[str]:
    """The outputs of a cell as a test compares them: text as it is, a picture as one word."""
    return ["picture" if "image/svg+xml" in output.get("data", {}) else output.get("text") or output.data["text/plain"]
            for output in cell.outputs]


if __name__ == "__main__":
    for file in [Path(word).resolve() for word in sys.argv[1:]] or NOTEBOOKS:
        done = executed(file)
        nbformat.write(done, file)
        print(f"{file.name}: {sum(cell.cell_type == 'code' for cell in done.cells)} code cells", flush=True)
