"""launch/ray.py: its command line, and with Ray installed (extra `ray`) real runs: a killed worker, a killed node, a
signal.

Two raylets on this machine are the cluster; without Ray these tests are skipped.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshtrain import run_files
from meshtrain.launch import ray as launcher
from slurm import rows, wait

ROOT = Path(__file__).resolve().parent.parent.parent
# a worker of Ray's, two processes that import, meet and compile, on a machine that has other things to do
START_S = 400


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# ---- the command line ------------------------------------------------------------------------------------------------


def test_ray_that_is_not_installed_is_told_with_its_extra(capsys, monkeypatch):
    monkeypatch.setattr(launcher, "ray", None)
    assert launcher.main(["--processes", "2", "--", "--mesh.simulated_devices", "2"]) == 2
    assert "pip install '.[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("error, code, said", [
    (ConnectionError("nobody answers\nat all"), 2, "RAY_ADDRESS=a:1 (nobody answers)"), (SystemExit(15), 75, "stopped"),
    (KeyboardInterrupt(), 75, "stopped"), (Exception("the node timed out"), 1,
                                           "Ray does not start: the node timed out")])
def test_a_cluster_that_does_not_come_is_told_without_a_traceback(error, code, said, capsys, monkeypatch):
    class Ray:
        @staticmethod
        def init(**options):
            raise error

    monkeypatch.setattr(launcher, "ray", Ray)
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    assert launcher.main(["--processes", "2", "--"]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words, bundle", [
    ("", {"CPU": 1}), ("--cpus-per-process 4", {"CPU": 4}), ("-- configs/llama3-8b-64.toml", {"CPU": 1, "GPU": 1}),
    ("--gpus-per-process 8 -- configs/llama3-8b-64.toml", {"CPU": 1, "GPU": 8})])
def test_a_bundle_holds_what_a_process_takes(words, bundle, monkeypatch):
    monkeypatch.setattr(launcher, "ray", object())
    own, _, rest = f"--processes 2 {words}".partition(" -- ")
    run = run_files.load(rest.split())
    assert launcher.bundle_of(run, launcher.COMMAND.read(own.split())) == bundle


class Cores:
    """Stands for Ray where groups are asked for: `free` cores, and what each group got."""

    def __init__(self, free):
        self.free, self.groups = free, []
        self.exceptions = type("E", (), {"GetTimeoutError": TimeoutError, "RayError": RuntimeError})

    def available_resources(self):
        return {"CPU": float(self.free), "memory": 1e9}

    def group(self, bundles, strategy):
        self.groups.append(len(bundles))
        return type("Group", (), {"ready": lambda group: len(bundles)})()

    def get(self, wanted, timeout):
        if wanted > self.free:
            raise TimeoutError
        return wanted


@pytest.mark.parametrize("free, least, groups, started, said", [
    (4, 0, [4], 4, ""), (3, 2, [4, 2], 2, "no room for all 4 processes: this start has 2"),
    (1, 2, [4, 4, 4], 0, "no room for 2 processes"),
    (3, 0, [4], 0, "no room for 4 processes")])
def test_where_there_is_no_room_for_all_fewer_start_that_can_train_it(
        free, least, groups, started, said, monkeypatch, capsys):
    """How many can train it, `launch.elastic` is asked."""
    asked = []
    monkeypatch.setattr(launcher.elastic.subprocess, "run", lambda words, **options: asked.append(words)
                        or launcher.subprocess.CompletedProcess(
        words, 0, "2\n", ""))
    cores = Cores(free)
    monkeypatch.setattr(launcher, "ray", cores)
    monkeypatch.setattr(launcher, "placement_group", cores.group, raising=False)
    monkeypatch.setattr(launcher, "remove_placement_group", lambda group: None, raising=False)
    monkeypatch.setattr(launcher, "ROOM_S", 0.05)
    words = ["--mesh.data", "-1", "--mesh.fsdp", "1", "--mesh.tensor", "1", "--training.microbatches",
             "1", "--data.global_batch", "8"]
    options = launcher.COMMAND.read(["--processes", "4", "--min-processes", str(least), "--max-restarts", "2"])
    run = run_files.load([*words, "--distributed.timeout_s", "1"])
    room = launcher.Room(run, options, words, launcher.bundle_of(run, options), [])
    assert room.reserve() == bool(started)
    assert said in capsys.readouterr().err
    if started:
        assert cores.groups == groups and room.count == started
        assert len(asked) == (started == 2)
        for words in asked:
            assert words[2:7] == ["meshtrain.launch.elastic", "--processes=3", "--min-processes=2", "--devices=2", "--full=8"]
        assert room.overrides() == (["--mesh.full_devices=8", "--mesh.simulated_devices=4"] if started == 2 else [])


def test_a_lost_node_is_the_culprit_whatever_died_first_of_it(capfd):
    """Its peers' connections break at once; Ray notices half a minute later, when they have ended of it."""
    peer, lost = (launcher.Member(index, None, -1, host=f"host{index}") for index in (0, 1))
    peer.code, peer.ended_s, lost.forced = 1, 3.0, True
    lost.lose()
    peer.lines.append(b"Connection closed by peer")
    outcome = launcher.supervise.conclude([peer, lost])
    assert (outcome.code, outcome.culprit) == (1, 1)
    assert "process 1 (host1) failed first" in capfd.readouterr().err and "its node is lost" in outcome.words


# ---- a real cluster --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="extra `ray` is not installed")
    from ray.cluster_utils import Cluster
    os.environ["PYTHONPATH"] = str(ROOT)        # of the workers
    ours = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    add_node(ours)
    yield ours
    ours.shutdown()


class Driver:
    """`python -m launch.ray` and what it says."""

    def __init__(self, cluster, folder: Path, *words: str):
        self.directory, self.said = folder / "run", []
        environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshtrain.launch.ray", *words, "--run.dir", str(self.directory)], cwd=ROOT, text=True,
            env=environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stdout), daemon=True)
        self.reader.start()

    @property
    def output(self) -> str:
        return "".join(self.said)

    def stepping(self, beyond: int) -> None:
        def there():
            assert self.process.poll() is None, self.output[-3000:]
            return rows(self.directory) and rows(self.directory)[-1]["step"] > beyond
        wait(lambda: f"steps beyond {beyond}: {self.output[-3000:]}", there, START_S)

    def saved(self) -> int:
        return max((int(path.name) for path in (self.directory / "checkpoints").glob("[0-9]*")
                    if path.name.isdecimal()), default=0)

    def trains(self, index: int) -> int:
        """The pid of process `index` of the run."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode().split("\0")
            except OSError:
                continue
            given = [word for word in words if word.startswith("--distributed.process_id=")] or [
                "--distributed.process_id=0"]
            if str(self.directory) in words and "meshtrain.train" in words and given == [
                    f"--distributed.process_id={index}"]:
                return int(path.parent.name)
        return 0


@pytest.fixture
def driver(cluster, tmp_path):
    (tmp_path / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    values = {"run.compilation_cache": tmp_path.parent / "cache", "run.sample_tokens": 0,
              "mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": 1,
              "mesh.simulated_devices": 2, "sharding.rules": ROOT / "sharding_rules" / "zero3.toml",
              "optimizer.name": "adamw", "model.vocab_size": 257,
              "model.embed_dim": 32, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1,
              "model.mlp_dim": 64,
              "data.source": "text", "data.paths": json.dumps([str(tmp_path / "corpus.txt")]), "data.seq_len": 32,
              "data.global_batch": 8, "validation.batches": 1, "optimizer.warmup_steps": 2,
              "optimizer.schedule": "constant",
              "training.steps": 1_000_000, "checkpoint.every": 50}
    one = Driver(cluster, tmp_path, "--processes", "2", "--max-restarts", "4", "--min-processes", "1", "--",
                 *(word for key, value in values.items() for word in (f"--{key}", str(value))))
    yield one
    if one.process.poll() is None:
        one.process.kill()


def add_node(cluster) -> None:
    """Ray gives a raylet 30 s to start, which a busy machine does not always keep."""
    for _ in range(5):
        with contextlib.suppress(Exception):
            cluster.add_node(num_cpus=1, num_gpus=0)
            return
    pytest.skip("Ray starts no second node on this machine")


def going_on(driver, before: int, said: str) -> int:
    """Waits until the next start has taken steps; the one that it has gone on from."""
    wait(lambda: driver.output[-3000:],
         lambda: re.search(r"resuming after step (\d+)\n", driver.output[before:]), START_S)
    step = int(re.search(r"resuming after step (\d+)\n", driver.output[before:])[1])
    wait(lambda: driver.output[-3000:], lambda: f"step {step + 1}/" in driver.output[before:], START_S)
    assert said in driver.output[before:], driver.output[before:]
    return step


@pytest.mark.long
def test_a_run_outlives_a_killed_process_and_a_killed_node_with_fewer_and_stops_when_it_is_asked(driver, cluster):
    driver.stepping(60)
    wait("a checkpoint", driver.saved, 60)
    began, saved = time.monotonic(), driver.saved()
    os.kill(driver.trains(1), signal.SIGKILL)
    wait(lambda: driver.output[-3000:], lambda: "starting again from step" in driver.output, 120)
    print(f"killed process: told after {time.monotonic() - began:.1f} s")
    assert re.search(r"process 1 \(\S+\) failed first, .*SIGKILL", driver.output), driver.output[-3000:]
    assert going_on(driver, 0, "failed first") >= saved
    print(f"killed process: going on after {time.monotonic() - began:.1f} s")

    began, before = time.monotonic(), len(driver.output)
    cluster.remove_node(next(iter({node.node_id: node for node in cluster.worker_nodes}.values())),
                        allow_graceful=False)
    wait(lambda: driver.output[-3000:], lambda: "starting again from step" in driver.output[before:], 180)
    print(f"killed node: told after {time.monotonic() - began:.1f} s")
    assert re.search(r"process \d \(\S+\) failed first, .*: its node is lost",
                     driver.output[before:]), driver.output[before:]
    step = going_on(driver, before, "no room for all 2 processes: this start has 1")
    print(f"killed node: going on in one process after {time.monotonic() - began:.1f} s")

    began, before = time.monotonic(), len(driver.output)
    add_node(cluster)
    wait("a newer checkpoint", lambda: driver.saved() > step, 60)
    os.kill(driver.trains(0), signal.SIGKILL)
    going_on(driver, before, "failed first")
    assert driver.trains(1), "all processes again"
    print(f"a node has come, and a process was killed: two again after {time.monotonic() - began:.1f} s")

    driver.process.send_signal(signal.SIGTERM)
    assert driver.process.wait(120) == 75
    driver.reader.join(10)
    assert "run the same command again to resume" in driver.output and driver.saved() == rows(driver.directory)[-1][
        "step"]
    steps = [row["step"] for row in rows(driver.directory)]
    assert steps == list(range(1, steps[-1] + 1))
