"""launch/slurm.sbatch under a real Slurm: whatever ends it, it goes on by itself from its newest checkpoint, or is over
for good.

Skipped where Slurm is not installed (tests/slurm.py says how). Every test trains; seconds are told as they were on two
busy cores.
"""
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import slurm as real
from slurm import ROOT, rows, slurm  # noqa: F401

pytestmark = pytest.mark.long

OPTIONS = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1",
           "--mem=500", "--time=60", "--signal=TERM@60",
           "-p", "low")
START_S = 400       # two processes that import, meet and compile, on a machine that has other things to do


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """A run file of two devices that takes steps of a few hundredths of a second, for as long as it is let."""
    home = tmp_path_factory.mktemp("tiny")
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    values = {"run.compilation_cache": home / "cache", "run.sample_tokens": 0, "mesh.data": 1,
              "mesh.fsdp": 2, "mesh.tensor": 1,
              "mesh.simulated_devices": 2, "sharding.rules": ROOT / "sharding_rules" / "zero3.toml",
              "optimizer.name": "adamw", "model.vocab_size": 257,
              "model.embed_dim": 32, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1,
              "model.mlp_dim": 64,
              "data.source": "text", "data.paths": json.dumps([str(home / "corpus.txt")]),
              "data.seq_len": 32, "data.global_batch": 8,
              "validation.batches": 1, "optimizer.warmup_steps": 2, "optimizer.schedule": "constant",
              "training.steps": 1_000_000, "checkpoint.every": 50, "metrics.every": 1}
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def trained(folder):
    return folder / "runs" / "tiny"


def stepping(job, beyond=0, count=20):
    """Waits until the run has written `count` rows more than `beyond`."""
    def there():
        assert job.state in ("PENDING", "COMPLETING", "RUNNING"), job.told()
        return rows(trained(job.folder)) and rows(trained(job.folder))[-1]["step"] >= beyond + count
    real.wait(lambda: f"{count} rows beyond {beyond}: {job.told()}", there, START_S)
    return rows(trained(job.folder))[-1]["step"]


def saved(job) -> int:
    return max((int(path.name) for path in (trained(job.folder) / "checkpoints").glob("[0-9]*")
                if path.name.isdecimal()), default=0)


def goes_on(job):
    """It starts again from what it had saved, and takes steps beyond it, each once."""
    step = saved(job)
    assert step > 0, job.output
    before = len(job.output)
    job.go_on()
    real.wait(lambda: f"resuming after step {step}: {job.told()}",
              lambda: f"resuming after step {step}\n" in job.output[before:], START_S)
    real.wait(lambda: f"step {step + 1}: {job.told()}", lambda: f"step {step + 1}/" in job.output[before:], START_S)
    stepping(job, step, 5)
    steps = [row["step"] for row in rows(trained(job.folder))]
    assert steps == list(range(1, steps[-1] + 1)), "a step is missing or there twice"


def submit(slurm, folder, tiny, *more, **environ):  # noqa: F811
    return slurm.submit(folder, OPTIONS, [*tiny, "--run.name", "tiny", *more], **environ)


def lose_node(job, slurm) -> None:  # noqa: F811
    """Node n2 is gone, with its daemon and all that ran there."""
    tasks = job.tasks()
    stepd = _parent(tasks[max(tasks)])
    daemon = int((slurm.home / "slurmd-n2.pid").read_text())
    for pid in (daemon, stepd, *[pid for pid in tasks.values() if _parent(pid) == stepd]):
        os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(re.search(r"^PPid:\s*(\d+)", open(f"/proc/{pid}/status").read(), re.MULTILINE)[1])


@pytest.fixture(scope="module")
def jobs():
    return []


@pytest.fixture
def job(jobs, slurm, tiny, tmp_path):  # noqa: F811
    """A job on two nodes that trains, and has saved since it was last disturbed: one for all tests, if it lives through
    them."""
    if not jobs or jobs[-1].state not in ("PENDING", "COMPLETING", "RUNNING"):
        jobs.append(submit(slurm, tmp_path, tiny))
    job = jobs[-1]
    before = saved(job)
    stepping(job, count=60)
    real.wait(lambda: f"a newer checkpoint: {job.told()}", lambda: saved(job) > before, START_S)
    return job


def stop_by_term(job):
    job.slurm("scancel", "--signal=TERM", job.number)


def come_to_the_limit(job):
    minutes, seconds = job.about()["RunTime"].split(":")[-2:]
    job.slurm("scontrol", "update", f"JobId={job.number}", f"TimeLimit={int(minutes) + 1 + (int(seconds) > 30)}")


def requeue(job):
    job.slurm("scontrol", "requeue", job.number)


def preempt(job):
    job.slurm("sbatch", "-p", "high", "-w", "n1", "--exclusive", "--mem=0", "-o", "/dev/null", "--wrap", "sleep 5")


@pytest.mark.parametrize("event", [stop_by_term, come_to_the_limit, requeue, preempt])
def test_a_job_that_is_told_to_stop_saves_goes_back_into_the_queue_and_goes_on(event, job):
    event(job)
    took_s = job.until("PENDING", 180)
    assert saved(job) == rows(trained(job.folder))[-1]["step"], "the last step is saved"
    print(f"{event.__name__}: pending after {took_s:.1f} s")
    job.slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    goes_on(job)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_job_whose_task_is_killed_or_stopped_goes_back_into_the_queue_and_goes_on(number, job):
    said, task = len(job.output), job.tasks()[1]
    os.kill(task, number)
    print(f"{number.name}: pending after {job.until('PENDING', 240):.1f} s")
    assert not os.path.exists(f"/proc/{task}"), "srun has killed what would hold the GPUs"
    assert re.search(r"\(failure 1 .*\nexit code \d+; back into the queue", job.output[said:]), job.output[said:]
    goes_on(job)


def test_a_job_that_loses_a_node_goes_back_into_the_queue_and_goes_on_when_there_is_one(job):
    lose_node(job, job.slurm)
    print(f"node lost: pending after {job.until('PENDING', 240):.1f} s")
    job.slurm.start_node(2)
    goes_on(job)


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(job):
    job.slurm("scancel", job.number)
    job.until("CANCELLED", 60)
    real.wait("the tasks are gone", lambda: not job.tasks(), 60)
    time.sleep(3)
    assert saved(job) == rows(trained(job.folder))[-1]["step"] and job.state == "CANCELLED"


def test_a_job_whose_time_limit_is_shorter_than_its_start_is_given_up(slurm, tiny, tmp_path):  # noqa: F811
    """It is stopped before the first step, again and again; the signal stands for the limit, whose minutes are too long
    here."""
    job = submit(slurm, tmp_path, tiny, MAX_RESTARTS="1")
    for start in (1, 2):
        real.wait(lambda: f"the tasks of start {start}: {job.told()}", lambda: len(job.tasks()) == 2, START_S)
        time.sleep(3)       # Python, and its handlers, are there
        stop_by_term(job)
        job.until("PENDING" if start == 1 else "FAILED", 120)
        if start == 1:
            assert "(stop 1 without a newer checkpoint; given up after 2)" in job.output and saved(job) == 0
            job.go_on()
    assert "given up after 2 failures in a row" in job.output and job.output.count("back into the queue") == 1


# noqa: F811
def test_a_job_with_a_range_of_nodes_goes_on_with_fewer_and_grows_again_with_the_same_losses(slurm, tiny, tmp_path):
    options = [*(word for word in OPTIONS if not word.startswith(("--nodes", "--ntasks", "--gpus", "--mem"))),
               "--nodes=1-2",
               "--gpus-per-node=2", "--mem=0", "--exclusive"]
    words = [*tiny, "--run.name", "tiny", "--mesh.fsdp", "-1", "--mesh.simulated_devices",
             "4", "--mesh.full_devices", "4",
             "--model.compute_dtype", "float32", "--optimizer.learning_rate", "1e-5"]
    job = slurm.submit(tmp_path, options, words)
    stepping(job, count=60)
    assert len(job.tasks()) == 4
    lose_node(job, slurm)
    print(f"node lost: pending after {job.until('PENDING', 240):.1f} s")
    said = len(job.output)
    goes_on(job)
    assert len(job.tasks()) == 2 and job.about()["NumNodes"] == "1"
    assert "2 of 4 devices: mesh.fsdp=2 (of 4), training.microbatches=2 (of 1)" in job.output[said:]
    fewer = rows(trained(job.folder))[-1]["step"]
    stepping(job, fewer, 60)
    slurm.start_node(2)
    real.wait("both nodes", lambda: slurm("sinfo", "-h", "-p", "low", "-t", "idle,mixed,allocated",
                                          "-o", "%D").strip() == "2", 60)
    requeue(job)
    job.until("PENDING", 180)
    goes_on(job)
    assert len(job.tasks()) == 4
    job.slurm("scancel", job.number)
    job.until("CANCELLED", 60)
    real.wait("the tasks are gone", lambda: not job.tasks(), 60)
    got = rows(trained(job.folder))
    last = got[-1]["step"]
    plain = subprocess.run([sys.executable, "-m", "meshtrain.train", *words, "--run.dir",
                            str(tmp_path / "plain"), "--training.steps", str(last)],
                           cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
                           text=True, timeout=START_S)
    assert plain.returncode == 0, plain.stderr
    wanted = rows(tmp_path / "plain")
    assert [(row["step"], row["tokens"]) for row in got] == [(row["step"], row["tokens"]) for row in wanted]
    # Sums in another order: the last bits of float32, which so small a learning rate does not let grow.
    np.testing.assert_allclose([row["loss"] for row in got], [row["loss"] for row in wanted], rtol=1e-6)


@pytest.mark.parametrize("more, state, said", [
    (("--training.steps", "5"), "COMPLETED", "written:"),
    (("--model.num_heads", "3"), "FAILED", "error: ")], ids=["done", "a mistake"])
def test_a_job_that_is_done_or_a_mistake_is_over(more, state, said, slurm, tiny, tmp_path):  # noqa: F811
    job = submit(slurm, tmp_path, tiny, *more)
    job.until(state, START_S)
    assert said in job.output and "back into the queue" not in job.output and job.about()["Restarts"] == "0"
