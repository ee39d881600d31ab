"""python -m tests.kill [--kills N] [--processes P] [--seed S]: kill -9 a real run again and again, and miss nothing.

A tiny run is killed at random moments: while it starts, between steps, and most often while a checkpoint is being written.
The same command then starts it again. Each time it must go on from the last checkpoint that was whole when it died; when it
is through, its rows must be steps 1..N, each with the very loss that the undisturbed run had (so no batch was skipped or
repeated), and its final state must equal the undisturbed run's bit for bit. Whoever finishes early starts another run.
With several processes the launcher runs them, and either it or one process at random is killed. Linux only.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from meshtrain.run import metrics
from meshtrain.run.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, EVERY = 40, 2
PATIENCE_S = 300  # for one life of a run, on a busy machine
VARYING = ("step_time_s", "tokens_per_s", "mfu", "data_wait_s", "checkpoint_wait_s", "time", "elapsed_s", "goodput", "straggler", "straggler_s")

RUN = """
[run]
sample_tokens = 0
compilation_cache = {cache}

[mesh]
fsdp = 4
simulated_devices = 4

[sharding]
rules = {rules}

[model]
vocab_size = 257
embed_dim = 64
num_layers = 2
num_heads = 2
mlp_dim = 128
compute_dtype = "float32"

[data]
source = "text"
paths = [{corpus}]
seq_len = 32
global_batch = 8

[training]
steps = {steps}

[validation]
batches = 1

[checkpoint]
every = {every}
keep = 2
"""


@dataclasses.dataclass
class Stats:
    kills: int = 0
    mid_save: int = 0  # kills that left a checkpoint half written
    starts: int = 0
    finished: int = 0


def torment(home: pathlib.Path, kills: int, processes: int, seed: int, tell=lambda text: print(text, flush=True)) -> Stats:
    """Kills runs below `home` until `kills` kills are done and the last run has finished. Raises: AssertionError."""
    draw, stats = random.Random(seed), Stats()
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    quoted = {"cache": home / "cache", "rules": ROOT / "sharding_rules/zero3.toml", "corpus": home / "corpus.txt"}
    quoted = {name: json.dumps(str(path)) for name, path in quoted.items()}
    (home / "run.toml").write_text(RUN.format(**quoted, steps=STEPS, every=EVERY))

    tell("the undisturbed run …")
    start = time.monotonic()
    undisturbed = Life(home, "undisturbed", processes)
    undisturbed.wait_for(lambda life: life.rows() > 0)
    start_s = time.monotonic() - start
    assert undisturbed.end() == 0, undisturbed.log.read_text()
    wanted = rows(undisturbed.directory), state(undisturbed.directory)

    while stats.kills < kills:
        name = f"run{stats.finished}"
        while True:
            code = live(home, name, processes, draw if stats.kills < kills else None, start_s, stats, tell)
            if code == 0:
                break
        got = rows(home / name), state(home / name)
        assert [row["step"] for row in got[0]] == list(range(1, STEPS + 1)), [row["step"] for row in got[0]]
        assert got[0] == wanted[0], next((a, b) for a, b in zip(got[0], wanted[0], strict=True) if a != b)
        assert got[1].keys() == wanted[1].keys()
        for array, bits in wanted[1].items():
            assert got[1][array] == bits, f"{array} differs from the undisturbed run's"
        stats.finished += 1
        tell(f"{name} finished: {STEPS} rows and {len(wanted[1])} arrays equal the undisturbed run's")
    tell(f"{stats.kills} kills, {stats.mid_save} of them with a checkpoint half written; {stats.starts} starts, "
         f"{stats.finished} finished runs, all equal to the undisturbed one")  # fmt: skip
    return stats


def live(home, name, processes, draw, start_s, stats, tell) -> int | None:
    """Starts the run once, kills it at some moment (draw: None: lets it be); its exit code, None if it was killed."""
    saved = steps(home / name)
    life = Life(home, name, processes)
    stats.starts += 1
    killed = False
    if draw is not None:
        moment = draw.choices(["starting", "stepping", "saving"], [1, 2, 4])[0]
        if moment == "starting":
            life.wait_for(lambda life: life.rows() > 0, draw.uniform(0, start_s))  # of a start that had to compile
        elif moment == "stepping":
            life.wait_for(lambda life: life.rows() > 0)
            life.wait_for(lambda life: False, draw.uniform(0, 0.3))
        else:
            for _ in range(draw.randint(1, 4)):
                life.wait_for(lambda life: life.saving())
                life.wait_for(lambda life: not life.saving())
            life.wait_for(lambda life: life.saving())
            life.wait_for(lambda life: False, draw.uniform(0, 0.03))
        killed = life.kill(draw)
    code = life.end()
    said = life.log.read_text()
    assert killed or code == 0, f"{name} ended by itself with exit code {code}:\n{said}"
    if going_on := re.search(r"going on after step (\d+)", said):
        assert int(going_on[1]) == max(saved), f"it went on from step {going_on[1]}, and {saved} were whole"
    else:
        assert not saved or life.rows() == 0, f"{saved} were whole, and it began anew:\n{said}"
    assert "damaged" not in said and "not saved" not in said, said
    if not killed:
        return code
    stats.kills += 1
    left = life.saving()
    stats.mid_save += left
    tell(f"kill {stats.kills}: {name} while {moment}, after {max(steps(life.directory), default=0)} saved steps"
         f"{', a checkpoint half written' if left else ''}")  # fmt: skip
    return None


class Life:
    """One start of a run, its output in a file."""

    def __init__(self, home, name, processes):
        self.directory, self.log = home / name, home / f"{name}.log"
        command = ["-m", "meshtrain.train"] if processes == 1 else ["-m", "launch.local", "--processes", str(processes), "--"]
        command = [sys.executable, *command, str(home / "run.toml"), "--run.dir", str(self.directory)]
        environ = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC")}
        environ |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.many, self.written = processes > 1, _size(self.directory / "metrics.jsonl")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def rows(self) -> int:
        """Rows written in this life, roughly: it may first have cut off those after its checkpoint."""
        path = self.directory / "metrics.jsonl"
        size = _size(path)
        self.written = min(self.written, size)
        return path.read_bytes()[self.written:].count(b"\n") if size > self.written else 0

    def saving(self) -> bool:
        return any(self.directory.glob("checkpoints/.*.saving"))

    def wait_for(self, event, limit_s: float = PATIENCE_S) -> None:
        """Returns at the event, at the limit, or when the run has ended, whichever comes first."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and not event(self) and time.monotonic() < deadline:
            time.sleep(0.001)

    def kill(self, draw) -> bool:
        """SIGKILL to the run, or to the launcher or one of its processes; False if it had ended before."""
        children = _children(self.process.pid) if self.many else []
        victim = draw.choice([self.process.pid, *children])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        code = self.end()
        deadline = time.monotonic() + PATIENCE_S
        while any(os.path.exists(f"/proc/{child}") for child in children):  # the kernel kills them after their launcher
            assert time.monotonic() < deadline, f"{children} outlive their launcher"
            time.sleep(0.01)
        return code != 0

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"hangs:\n{self.log.read_text()}") from None


def _size(path):
    return path.stat().st_size if path.exists() else 0


def _children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def steps(directory: pathlib.Path) -> list[int]:
    return [int(path.name) for path in directory.glob("checkpoints/*") if path.name.isdecimal()]


def rows(directory: pathlib.Path) -> list[dict]:
    """The rows without what depends on the machine or on where the run was interrupted."""
    return [{key: value for key, value in row.items() if key not in VARYING} for row in metrics.read(directory / "metrics.jsonl")]


def state(directory: pathlib.Path) -> dict[str, tuple]:
    """Name -> (dtype, shape, bytes) of every array of the last checkpoint: params, optimizer and step."""
    checkpoints = Checkpoints(directory / "checkpoints", read_only=True)
    assert checkpoints.latest() == STEPS
    stored = checkpoints.arrays(STEPS)
    arrays, _ = checkpoints.restore(STEPS, stored)
    named = jax.tree.leaves_with_path(jax.tree.map(np.asarray, arrays))
    return {jax.tree_util.keystr(path): (x.dtype, x.shape, x.tobytes()) for path, x in named}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4), help="of the run (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # of this process, which only compares
    with tempfile.TemporaryDirectory() as home:
        torment(pathlib.Path(home), args.kills, args.processes, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
