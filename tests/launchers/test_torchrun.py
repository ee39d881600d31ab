"""Processes that torchrun starts find each other, though torchrun's own store holds MASTER_PORT."""
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import soak

ROOT = Path(__file__).resolve().parent.parent.parent
# What torchrun 2.15 sets for its processes, of two on one host: https://docs.pytorch.org/docs/stable/elastic/run.html
AGENT = {
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "2",
    "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
# A process of a run up to its devices: those of both are there once they have met.
MEETS = """
import json, os
from meshtrain import devices, run_files
from meshtrain.cluster import find
run = run_files.load(["--distributed.timeout_s", "100", "--mesh.simulated_devices", "2", "--mesh.fsdp", "2", "--mesh.tensor", "1"])
found = devices.start(run, find.cluster(run.distributed, os.environ))
import jax
print(json.dumps([jax.process_index(), jax.process_count(), len(found)]))
"""


def environ(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    return ours | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"} | more


def test_two_processes_meet_beside_the_store_that_holds_their_port():
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(socket.socket(socket.AF_INET6))
        store.bind(("::", 0))
        store.listen()
        started = [stack.enter_context(subprocess.Popen([sys.executable, "-c", MEETS], cwd=ROOT, text=True, env=environ(
            **AGENT, MASTER_PORT=str(store.getsockname()[1]), RANK=str(rank), LOCAL_RANK=str(rank),
            ROLE_RANK=str(rank)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)) for rank in (0, 1)]
        for rank, child in enumerate(started):
            stack.callback(child.kill)
            out, err = child.communicate(timeout=200)
            assert child.returncode == 0 and json.loads(out.splitlines()[-1]) == [rank, 2, 2], err
        store.setblocking(False)
        with pytest.raises(BlockingIOError):
            store.accept()      # nobody took it for the meeting place


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]],
                         ids=["static", "c10d"])
def test_a_run_under_torchrun_is_trained_to_its_end(options, tmp_path):
    """pip install torch, which this project needs for nothing else."""
    torchrun = shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("torchrun is not installed")
    soak.prepare(tmp_path)
    done = subprocess.run([torchrun, *options, "--nproc-per-node=2", "--no-python", sys.executable,
                           "-m", "meshtrain.train",
                           str(tmp_path / "run.toml"), "--run.dir", str(tmp_path / "run")],
                          cwd=ROOT, env=environ(), text=True, capture_output=True, timeout=soak.PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in soak.rows(tmp_path / "run")] == list(range(1, soak.STEPS + 1))
