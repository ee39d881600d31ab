"""What is right or wrong on the GPU at hand, as `python -m benchmarks.gpu` finds it: `pytest -m gpu`.

The suite's own process simulates devices on the CPU, so the command runs in processes of its own, as a user starts it.
"""
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from meshtrain import devices

ROOT = Path(__file__).resolve().parent.parent.parent
MINUTES = 9                         # one GPU needs about five
OURS = ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC")          # set by conftest for simulated devices

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What the command has written."""
    environ = {name: value for name, value in os.environ.items() if name not in OURS}
    with mock.patch.dict(os.environ, environ, clear=True):
        if not devices.gpus_expected():
            pytest.skip("needs a GPU: jax finds none here")
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.gpu", "--checks", "--minutes", str(MINUTES), "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if ran.returncode == 2:
        pytest.skip(ran.stderr.strip().splitlines()[-1])
    return json.loads(next(out.glob("gpu-*.json"), Path(os.devnull)).read_text() or pytest.fail(ran.stderr[-2000:]))


@pytest.mark.parametrize("group", ["attention", "layout", "schedule", "deterministic"])
def test_the_gpu_computes_what_the_cpu_computes(group, found):
    items = {key: found["items"].get(key, {"status": "begun"})
             for key in found["planned"] if key.startswith(f"{group}/")}
    assert items or group == "schedule"
    if not items:
        pytest.skip("schedules need two GPUs")
    bad = {key: item.get("errors") or {what: pair for what, pair in item["compared"].items() if not pair[0] <= pair[1]}
           for key, item in items.items() if item["status"] not in ("right", "begun")}
    assert bad == {}
    if left := [key for key, item in items.items() if item["status"] == "begun"]:
        pytest.skip(f"not reached within {MINUTES} minutes: {', '.join(left)}")
