"""python -m tests.soak [--kills N] [--stops M] [--processes P] [--seed S]: fault after fault, the launcher restarts,
nothing is lost.

A tiny run under `launch.local --max-restarts` is hit at random moments: while its processes start, restore, compile,
between steps and while a checkpoint is written. A fault is kill -9 of one process, of all or of the launcher (then the
same command is given again), or SIGSTOP of one process: for good where others can miss it, else for seconds. When a run
is through, its rows must be steps 1..N, each with the very numbers that the undisturbed run had (so no batch was
skipped or repeated), and its final state must equal the undisturbed run's bit for bit; whom the launcher names must be
the one that was hit. Runs follow until all faults are done. Linux only.
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

from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.run import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, EVERY = 24, 2
PATIENCE_S = 600  # for the next sign of life, on a busy machine
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "skipped", "val_loss")

RUN = """
[run]
compilation_cache = {cache}

[mesh]
fsdp = -1
simulated_devices = 4

[sharding]
rules = {rules}

[model]
vocab_size = 257
embed_dim = 16
num_layers = 1
num_heads = 1
mlp_dim = 16
compute_dtype = "float32"

[data]
source = "text"
paths = [{corpus}]
seq_len = 16
global_batch = 8

[training]
steps = {steps}

[validation]
batches = 1

[checkpoint]
every = {every}
keep = 2

[metrics]
tensorboard = false

[distributed]
timeout_s = 60
"""

# The launcher itself, but for shorter waits: those that the rule asks for would be most of the time.
LAUNCHER = """
import runpy, sys
from launch import restart
restart.FIRST_S = 0.2
sys.argv[0] = "launch.local"
runpy.run_module("launch.local", run_name="__main__")
"""

# What a start has said last when this begins; the moments in their order.
SAYS = {"compiling": "memory per device", "stepping": "\nstep "}
MOMENTS = {"starting": 2, "compiling": 3, "stepping": 3, "saving": 6}  # how often, relative to each other


@dataclasses.dataclass
class Stats:
    kills: int = 0
    stops: int = 0
    for_good: int = 0  # stops that were not taken back
    mid_save: int = 0  # faults that left a checkpoint half written
    named: int = 0  # faults whose victim the launcher named
    finished: int = 0
    moments: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(MOMENTS, 0))


def torment(home: pathlib.Path, kills: int, stops: int, processes: int, seed: int,
            tell=lambda text: print(text, flush=True)) -> Stats:
    """Hits runs below `home` until all faults are done and the last run has finished. Raises: AssertionError."""
    draw, stats = random.Random(seed), Stats()
    prepare(home)
    undisturbed = Life(home, "undisturbed", processes)
    assert undisturbed.end() == 0, undisturbed.said()
    wanted = rows(undisturbed.directory), state(undisturbed.directory)
    faults = ["kill"] * kills + ["stop"] * stops
    draw.shuffle(faults)
    while faults:
        life = Life(home, f"run{stats.finished}", processes)
        while life.process.poll() is None and faults:
            if hit(life, faults[-1], draw, stats, tell):
                faults.pop()
                if life.launcher_killed:
                    life = Life(home, f"run{stats.finished}", processes)
        assert life.end() == 0, life.said()
        check(life, wanted)
        stats.finished += 1
        tell(f"{life.directory.name} finished: {STEPS} rows and {len(wanted[1])} arrays equal the undisturbed run's")
    tell(f"{processes} process(es): {stats.kills} kills and {stats.stops} stops ({stats.for_good} for good), "
         f"{stats.mid_save} with a checkpoint half written, {stats.moments}; {stats.named} named; {stats.finished} "
         f"finished runs, all equal to the undisturbed one")  # fmt: skip
    return stats


def prepare(home: pathlib.Path) -> None:
    """Writes run.toml, and what it reads."""
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    quoted = {"cache": home / "cache", "rules": ROOT / "sharding_rules/zero3.toml", "corpus": home / "corpus.txt"}
    quoted = {name: json.dumps(str(path)) for name, path in quoted.items()}
    (home / "run.toml").write_text(RUN.format(**quoted, steps=STEPS, every=EVERY))


def check(life: "Life", wanted: tuple[list, dict]) -> None:
    got = rows(life.directory), state(life.directory)
    assert [row["step"] for row in got[0]] == list(range(1, STEPS + 1)), [row["step"] for row in got[0]]
    assert got[0] == wanted[0], next((a, b) for a, b in zip(got[0], wanted[0], strict=True) if a != b)
    assert got[1].keys() == wanted[1].keys()
    for array, bits in wanted[1].items():
        assert got[1][array] == bits, f"{array} differs from the undisturbed run's"
    said = life.said()
    assert "damaged" not in said and "\ngiven up after" not in said, said


def hit(life: "Life", fault: str, draw: random.Random, stats: Stats, tell) -> bool:
    """Waits for a moment and does the fault then; whether anybody was left to be hit."""
    moment = draw.choices(list(MOMENTS), MOMENTS.values())[0]
    if not life.wait_for(lambda: len(life.children()) == life.processes):
        return False
    if moment == "starting":
        life.wait_for(lambda: life.reached("compiling"), draw.uniform(0, life.start_s))
    elif moment == "compiling":     # and restoring
        life.wait_for(lambda: life.reached("compiling"))
        life.wait_for(lambda: life.reached("stepping"), draw.uniform(0, life.start_s / 2))
    else:
        life.wait_for(lambda: life.reached("stepping"))
        if moment == "stepping":
            life.wait_for(lambda: False, draw.uniform(0, 0.5))
        else:
            for _ in range(draw.randint(0, 2)):
                life.wait_for(life.saving)
                life.wait_for(lambda: not life.saving())
            life.wait_for(life.saving)
            life.wait_for(lambda: False, draw.uniform(0, 0.05))
    children, before = life.children(), steps(life.directory)
    if len(children) < life.processes:      # it has ended meanwhile
        return False
    victims, mark = _victims(draw, fault, life, children), len(life.said())
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    left = life.saving()
    if fault == "kill":
        stats.kills += 1
    else:
        stats.stops += 1
        if life.processes == 1 or draw.random() < 0.5:
            time.sleep(draw.uniform(0, 3))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victims[0], signal.SIGCONT)
            children = []
        else:
            stats.for_good += 1
    stats.mid_save += left
    stats.moments[moment] += 1
    tell(f"{fault} {stats.kills + stats.stops}: {life.directory.name} while {moment}, after {max(before, default=0)} "
         f"saved steps{', a checkpoint half written' if left else ''}")  # fmt: skip
    if children:
        life.mark = mark
        life.survive(victims, children, max(before, default=0), stats)
    return True


def _victims(draw: random.Random, fault: str, life: "Life", children: list[int]) -> list[int]:
    if fault == "kill" and draw.random() < 0.15:
        return [life.process.pid]
    if fault == "kill" and draw.random() < 0.15:
        return children
    return [draw.choice(children)]


class Life:
    """One launcher and the run under it, its output in a file."""

    def __init__(self, home, name, processes, *own):
        self.directory, self.log, self.processes = home / name, home / f"{name}.log", processes
        command = [sys.executable, "-c", LAUNCHER, "--processes", str(processes), "--max-restarts", "1000", *own, "--",
                   str(home / "run.toml"), "--run.dir", str(self.directory)]
        environ = {key: value for key, value in os.environ.items()
                   if key not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC")}
        environ |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.start_s, self.launcher_killed = 10.0, False
        self.mark = len(self.said())    # where in the log the start began that is now at work
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def reached(self, moment: str) -> bool:
        return SAYS[moment] in self.said()[self.mark:]

    def saving(self) -> bool:
        return any(self.directory.glob("checkpoints/.*.saving"))

    def wait_for(self, event, limit_s: float = PATIENCE_S) -> bool:
        """Returns whether the event came before the limit and before the launcher ended."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and time.monotonic() < deadline:
            if event():
                return True
            time.sleep(0.005)
        return False

    def survive(self, victims: list[int], children: list[int], before: int, stats: Stats) -> None:
        """After a fault that ends a start: waits until its processes have gone, and looks at what the launcher says of
        it."""
        self.launcher_killed = victims == [self.process.pid]
        deadline = time.monotonic() + PATIENCE_S
        while any(os.path.exists(f"/proc/{child}") for child in children):
            assert time.monotonic() < deadline, f"{children} outlive {victims}:\n{self.said()}"
            time.sleep(0.05)
        if self.launcher_killed:
            self.process.wait()
            return
        self.wait_for(lambda: len(self.children()) == self.processes)
        said = self.said()[self.mark:]
        if named := re.search(r"^process \d+ \(pid (\d+)\) failed first", said, re.MULTILINE):
            assert int(named[1]) in victims, f"{victims} hit, and another is named:\n{said}"
            stats.named += 1
        if again := re.search(r"starting again from step (\d+)", said):
            assert int(again[1]) >= before, said

    def children(self) -> list[int]:
        try:
            return [int(child) for child in
                    pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"hangs:\n{self.said()}") from None


def steps(directory: pathlib.Path) -> list[int]:
    return [int(path.name) for path in directory.glob("checkpoints/*") if path.name.isdecimal()]


def rows(directory: pathlib.Path) -> list[dict]:
    """The rows without what depends on the machine or on where the run was interrupted."""
    return [{key: row.get(key) for key in EXACT} for row in metrics.read(directory / "metrics.jsonl")]


def state(directory: pathlib.Path) -> dict[str, tuple]:
    """Name -> (dtype, shape, bytes) of every array of the last checkpoint: params, optimizer and step."""
    checkpoints = Checkpoints(directory / "checkpoints", read_only=True)
    assert checkpoints.newest().step == STEPS
    stored = checkpoints.arrays(STEPS)
    arrays = checkpoints.restore(STEPS, stored)
    named = jax.tree.leaves_with_path(jax.tree.map(np.asarray, arrays))
    return {jax.tree_util.keystr(path): (x.dtype, x.shape, x.tobytes()) for path, x in named}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0],
                                     allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=16, help="kill -9 (default 16)")
    parser.add_argument("--stops", type=int, default=4, help="SIGSTOP (default 4)")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4), help="of the run (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # of this process, which only compares
    with tempfile.TemporaryDirectory() as home:
        torment(pathlib.Path(home), args.kills, args.stops, args.processes, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
