"""Scripts of benchmarks take from the program only what is there, also those that need a GPU or minutes."""
from pathlib import Path

import attributes
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = sorted(str(path.relative_to(ROOT / "benchmarks")) for path in (ROOT / "benchmarks").rglob("*.py")
                 if "\nimport torch\n" not in path.read_text())  # which is installed nowhere that tests run


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_uses_what_is_there(script):
    assert attributes.faults(ROOT / "benchmarks" / script) == []


@pytest.mark.parametrize("line, said", [
    ("checkpoints.latest", "Checkpoints has no latest"), ("checkpoints.restore()", "missing a required argument"),
    ("assembly.assembled", "meshtrain.assembly has no assembled"), ("other.latest", "Checkpoints has no latest")])
def test_what_is_not_there_is_named_with_its_line(line, said, tmp_path):
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\nfrom meshtrain import assembly\nfrom meshtrain.checkpoint.checkpoint import Checkpoints\n"
        "other, number = Checkpoints(Path('y')), 1\n"
        f"with Checkpoints(Path('x')) as checkpoints:\n    {line}\n")
    (found,) = attributes.faults(tmp_path / "script.py")
    assert found.startswith("script.py:6: ") and said in found
