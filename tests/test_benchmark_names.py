"""Scripts of benchmarks take from the program only what is there, also those that need a GPU or minutes; some are run,
tiny."""
import os
import subprocess
import sys
from pathlib import Path

import attributes
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


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


def test_checkpoints_are_measured(tmp_path, monkeypatch):
    import jax.numpy as jnp
    from benchmarks import checkpoint
    monkeypatch.setattr(checkpoint, "ROUNDS", 1)
    found = checkpoint.measure(tmp_path, {"w": jnp.ones((64, 64))})
    assert found["bytes"] == 64 * 64 * 4 and all(found[name] > 0 for name in ("saved", "verify", "restore", "on_disk"))


def test_a_pipeline_of_sleeping_stages_is_measured(monkeypatch):
    """Each op sleeps as often as the schedule says: `measure` asserts it."""
    import jax
    from benchmarks import bubble
    from meshtrain.parallel.pipeline import pipeline, schedules
    monkeypatch.setattr(bubble, "REPEATS", 1)
    mesh = jax.make_mesh((2,), (pipeline.STAGE,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    assert 0 < bubble.measure(schedules.make("1f1b", 2, 2, 1), mesh) < 1


def test_calls_of_the_watchdog_are_measured(monkeypatch):
    from benchmarks import pods
    monkeypatch.setattr(pods, "STEP_S", 0.01)
    assert set(pods.watched()) == {"watchdog: a step's calls", "watchdog: its thread, in a step"}


WEIGHTS = """
import pathlib, sys
from benchmarks import weights
weights.MODEL |= dict(vocab_size=512, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48)
weights.FILE_BYTES = 40_000
print(weights.measure("float32", 2, pathlib.Path(sys.argv[1])))
"""


def test_weights_are_measured_out_and_in(tmp_path):
    """`measure` compares what comes back."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", WEIGHTS, str(tmp_path)], cwd=ROOT, env=environment, text=True,
                          capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith("| float32 | 2 |"), done.stderr[-600:]
