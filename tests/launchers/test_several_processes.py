"""One run in 1, 2 and 4 real processes: the same numbers, the same files, and stops that all of them make together."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kept_programs import PROGRAMS

from meshtrain.journal.rows import MetricRows
from tests import tiny_run

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("processes")
    rng = np.random.default_rng(0)
    for i in range(4):
        (home / f"{i}.txt").write_bytes(rng.integers(97, 123, 3000, np.uint8).tobytes())
    (home / "run.toml").write_text(tiny_run.text(
        run__sample_tokens=8, mesh__fsdp=2, mesh__simulated_devices=4, sharding__rules="sharding_rules/hsdp.toml",
        training__steps=6,
        training__microbatches=2, validation__batches=2))
    return home


def command(home: Path, processes: int, directory: str, *more: str) -> list[str]:
    start = ["-m", "meshtrain.train"] if processes == 1 else ["-m", "meshtrain.launch.local", "--processes", str(processes), "--"]
    return [sys.executable, *start, str(home / "run.toml"), "--data.paths", json.dumps([str(home / "*.txt")]),
            "--run.dir", str(home / directory), "--run.compilation_cache", str(PROGRAMS), *more]


def environment() -> dict:
    return {name: value for name, value in os.environ.items() if name != "NPROC"} | {"PYTHONPATH": str(ROOT)}


def train(home: Path, processes: int, directory: str, *more: str) -> str:
    ran = subprocess.run(command(home, processes, directory, *more), env=environment(), capture_output=True, text=True,
                         timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def losses(home: Path, directory: str) -> list[float]:
    rows = [*MetricRows(home / directory / "metrics.jsonl")]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows] + [rows[-1]["val_loss"]]


@pytest.fixture(scope="module")
def trained(home) -> Path:
    """Runs `1` and `2`, named by their number of processes, and what each said beside them."""
    for processes in (1, 2):
        said = train(home, processes, str(processes), "--checkpoint.every", "3")
        (home / f"{processes}.said").write_text(said)
    return home


def test_several_processes_train_what_one_trains(trained):
    # The processes add their sums in another order than one process does: the last bits of float32.
    np.testing.assert_allclose(losses(trained, "2"), losses(trained, "1"), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_two_processes_repeat_bit_for_bit_and_four_equal_them(processes, trained):
    train(trained, processes, f"{processes} again")
    assert losses(trained, "2") == losses(trained, f"{processes} again")


@pytest.mark.long
def test_two_processes_train_the_quickstarts_layout(home):
    """Wide enough that collectives would meet in Gloo without the order of `order.after`: without it this aborts every
    time."""
    more = ("--mesh.simulated_devices", "8", "--mesh.tensor", "2", "--sharding.rules", "sharding_rules/zero3.toml",
            "--model.embed_dim", "192", "--model.num_layers", "5", "--model.num_heads",
            "4", "--model.num_kv_heads", "2",
            "--model.mlp_dim", "512", "--data.seq_len", "256", "--data.validation_fraction",
            "0.1", "--training.microbatches", "1")
    for processes in (1, 2):
        train(home, processes, f"quickstart {processes}", *more)
    np.testing.assert_allclose(losses(home, "quickstart 2"), losses(home, "quickstart 1"), rtol=0, atol=1e-5)


@pytest.mark.long
def test_a_pipeline_whose_stages_lie_in_two_processes_trains_what_one_trains(home):
    """Its mesh has the devices in another order than jax lists them."""
    more = ("--mesh.fsdp", "1", "--mesh.stage", "2", "--sharding.rules", "sharding_rules/zero1.toml",
            "--model.num_layers", "2", "--pipeline.schedule", "1f1b", "--training.steps", "2")
    for processes in (1, 2):
        train(home, processes, f"pipeline {processes}", *more)
    np.testing.assert_allclose(losses(home, "pipeline 2"), losses(home, "pipeline 1"), rtol=1e-6)


REWARD = """import os
def score(prompt, answer, line):
    if b"process_id=1" in open(f"/proc/{os.getppid()}/cmdline", "rb").read():
        raise RuntimeError("only here")
    return 1.0
"""


@pytest.mark.long
def test_rewards_that_fail_in_one_process_are_told_once_and_end_all(home):
    """Others of several processes: tests/rl/test_rl.py."""
    (home / "rewards.py").write_text(REWARD)
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i * i}: "}) + "\n" for i in range(20)))
    (home / "rl.toml").write_text(tiny_run.text(
        data__source="prompts", training__objective="rl", training__steps=3, rl__prompts=4, rl__samples=4,
        rl__max_tokens=6, rl__reward=str(home / "rewards.py:score"), rl__reward_workers=1))
    words = [word.replace("run.toml", "rl.toml").replace("*.txt", "prompts.jsonl") for word in command(home, 2, "rl")]
    ran = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    told = ran.stdout + ran.stderr
    assert ran.returncode == 1 and told.count("error: 8 of 16 answers have no reward") == 1, told
    assert "RuntimeError: only here" in told


def test_one_process_writes_and_speaks_for_all(trained):
    said = (trained / "2.said").read_text()
    told_once = ("memory per device", "step 6/6", "a sample (")
    assert [said.count(words) for words in told_once] == [1] * len(told_once), said
    assert {path.name for path in (trained / "2").iterdir()} == {path.name for path in (trained / "1").iterdir()}


def test_a_run_goes_on_with_another_number_of_processes(trained):
    shutil.copytree(trained / "2", trained / "shrinks")
    shutil.rmtree(trained / "shrinks" / "checkpoints" / "6")
    assert "resuming after step 3" in train(trained, 1, "shrinks")
    np.testing.assert_allclose(losses(trained, "shrinks"), losses(trained, "1"), rtol=1e-6)


def test_a_signal_to_one_process_stops_all_after_the_same_step(trained):
    launched = subprocess.Popen(command(trained, 2, "stopped", "--training.steps", "100000",
                                        "--run.sample_tokens", "0"),
                                env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    written, deadline = trained / "stopped" / "metrics.jsonl", time.monotonic() + 200
    while not (written.exists() and written.read_text().count("\n") > 3):
        assert launched.poll() is None and time.monotonic() < deadline, launched.communicate()[0]
        time.sleep(0.2)
    children = [int(pid) for pid in Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()]
    last = next(pid for pid in children if b"process_id=1" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(last, signal.SIGTERM)
    said, _ = launched.communicate(timeout=120)
    assert launched.returncode == 75, said
    rows = [*MetricRows(written)]
    assert f"stopped after step {rows[-1]['step']}, saved in" in said
    assert [path.name for path in (trained / "stopped" / "checkpoints").iterdir()] == [str(rows[-1]["step"])]
