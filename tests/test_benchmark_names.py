"""Scripts of benchmarks take from the program only what is there, also those that need a GPU or minutes."""
from pathlib import Path

import attributes
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))

# What these call is gone or has other parameters: to be mended, each then without its mark.
BROKEN = ("bubble.py", "experts.py", "pods.py", "weights.py")


@pytest.mark.parametrize("script", [pytest.param(
    name, marks=pytest.mark.xfail(name in BROKEN, reason="calls what is gone", strict=True)) for name in SCRIPTS])
def test_a_script_uses_what_is_there(script):
    assert attributes.faults(ROOT / "benchmarks" / script) == []


@pytest.mark.parametrize("line, said", [
    ("checkpoints.latest", "Checkpoints has no latest"), ("checkpoints.restore()", "missing a required argument"),
    ("assembly.assembled", "meshtrain.assembly has no assembled")])
def test_what_is_not_there_is_named_with_its_line(line, said, tmp_path):
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\nfrom meshtrain import assembly\nfrom meshtrain.checkpoint.checkpoint import Checkpoints\n"
        f"with Checkpoints(Path('x')) as checkpoints:\n    {line}\n")
    (found,) = attributes.faults(tmp_path / "script.py")
    assert found.startswith("script.py:5: ") and said in found


def test_checkpoints_are_measured(tmp_path, monkeypatch):
    import jax.numpy as jnp
    from benchmarks import checkpoint
    monkeypatch.setattr(checkpoint, "ROUNDS", 1)
    found = checkpoint.measure(tmp_path, {"w": jnp.ones((64, 64))})
    assert found["bytes"] == 64 * 64 * 4 and all(found[name] > 0 for name in ("saved", "verify", "restore", "on_disk"))
