"""A tiny run under the launcher that is hit fault after fault: the launcher restarts, nothing is lost.

Faults come at random moments: while its processes start, restore, compile, between steps and while a checkpoint is
written. When a run is through, its rows must be steps 1..N, each with the very numbers that the undisturbed run had (so
no batch was skipped or repeated), and its final state must equal the undisturbed run's bit for bit; whom the launcher
names must be the one that was hit. Runs follow until all faults are done. `python -m benchmarks.soak` does it at
length. Linux only.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np

from launch import supervise
from meshtrain.checkpoint import resume
from meshtrain.run import contents, metrics, stops
from meshtrain.storage import addresses, stores

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

# The launcher itself, but for shorter waits: those that the rule asks for would be most of the time. With an argument
# each process is a host with a name and a disk of its own.
LAUNCHER = """
import runpy, sys
from launch import restart, supervise
restart.FIRST_S = 0.2
if home := sys.argv.pop(1):
    plain, own = supervise.supervise, ("hostname node-{i} && mount --bind {home}/hosts /etc/hosts && "
                                       'mount --bind {home}/disk{i} {home}/disk && exec "$@"')
    supervise.supervise = lambda argvs, *rest, **keys: plain([
        ["unshare", "--uts", "--mount", "sh", "-c", own.format(i=i, home=home), "sh", *argv]
        for i, argv in enumerate(argvs)], *rest, **keys)
sys.argv[0] = "launch.local"
runpy.run_module("launch.local", run_name="__main__")
"""

# What a start has said last when this begins; the moments in their order.
SAYS = {"compiling": "memory per device", "stepping": "\nstep "}
MOMENTS = {"starting": 2, "compiling": 3, "stepping": 3, "saving": 6}  # how often, relative to each other
# That end a start; that the server does for so many requests, with what is told where they go on.
ENDING = ("kill", "kill all", "kill launcher", "terminate", "hang", "lose disk")
SERVER = {"500": (500, 0), "throttled": (503, 0), "reset": (0, 0), "slow": (200, 4)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """hosts: each process is a host with a disk of its own, where local checkpoints are. bucket: run.dir is there."""
    processes: int = 1
    hosts: bool = False
    bucket: str = ""
    steps: int = STEPS

    def __str__(self) -> str:
        kind = "hosts" if self.hosts else "processes" if self.processes > 1 else "process"
        return f"{self.processes} {kind}" + ", in a bucket" * bool(self.bucket)


@dataclasses.dataclass
class Met:
    """A fault that was done. after_s: seconds until the next row that counts; None: another fault came before it, or
    the run was through. named: whether the run or its launcher told it; None: nobody was left who could, or it was
    got over by asking again."""
    setting: Setting
    fault: str
    moment: str
    at: float
    half_saved: bool = False
    after_s: float | None = None
    named: bool | None = None


def torment(home: pathlib.Path, setting: Setting, faults: list[str], seed: int, server=None,
            tell=lambda text: print(text, flush=True)) -> tuple[list[Met], int]:
    """Hits runs below `home` until all faults are done and the last run has finished; (what was done, runs). server: of
    the bucket. Raises: AssertionError."""
    draw, met, finished = random.Random(seed), [], 0
    prepare(home, setting.steps)
    undisturbed = Life(home, "undisturbed", setting)
    assert undisturbed.end() == 0, undisturbed.said()
    wanted = rows(undisturbed.place), state(undisturbed.place) | exports(undisturbed.place)
    faults = list(faults)
    draw.shuffle(faults)
    while faults:
        life, done = Life(home, f"run{finished}", setting, server), []
        while faults and not life.is_through():
            if life.is_to_start():
                life.start()
            if one := hit(life, faults[-1], draw):
                faults.pop()
                done.append(one)
                tell(f"{len(met) + len(done)}, {setting}: {one.fault} while {one.moment}"
                     + ", a checkpoint half written" * one.half_saved)
        while life.end() and life.is_to_start():
            life.start()
        assert life.is_through(), life.said()
        check(life, wanted)
        for one, after in zip(done, [*done[1:], None]):
            one.after_s = life.seconds_until_back(one, after and after.at)
        met += done
        finished += 1
        life.forget()
    return met, finished


def prepare(home: pathlib.Path, steps: int = STEPS) -> None:
    """Writes run.toml, and what it reads."""
    home.mkdir(exist_ok=True)
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    quoted = {"cache": home / "cache", "rules": ROOT / "sharding_rules/zero3.toml", "corpus": home / "corpus.txt"}
    quoted = {name: json.dumps(str(path)) for name, path in quoted.items()}
    (home / "run.toml").write_text(RUN.format(**quoted, steps=steps, every=EVERY))


def check(life: "Life", wanted: tuple[list, dict]) -> None:
    got, last = (rows(life.place), state(life.place) | exports(life.place)), life.setting.steps
    assert [row["step"] for row in got[0]] == list(range(1, last + 1)), [row["step"] for row in got[0]]
    assert got[0] == wanted[0], next((a, b) for a, b in zip(got[0], wanted[0], strict=True) if a != b)
    for array, bits in wanted[1].items():       # steps at which it was stopped have an export, too
        assert got[1][array] == bits, f"{array} differs from the undisturbed run's"
    said = life.said()
    assert "damaged" not in said and "\ngiven up after" not in said and "Traceback" not in said, said


def hit(life: "Life", fault: str, draw: random.Random) -> Met | None:
    """Waits for a moment and does the fault then; None: nobody was left to be hit."""
    moment = draw.choices(list(MOMENTS), MOMENTS.values())[0]
    if not life.wait_for(lambda: len(life.children()) == life.setting.processes):
        return None
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
    children, before = life.children(), max(steps(life.place), default=0)
    if len(children) < life.setting.processes:      # it has ended meanwhile
        return None
    met, mark = Met(life.setting, fault, moment, time.monotonic()), len(life.said())
    if fault in SERVER:
        met.named = life.disturb(fault, moment, draw)
        return met
    victims = [life.process.pid] if fault in ("kill launcher", "terminate") else \
        children if fault == "kill all" else [draw.choice(children)]
    number = {"terminate": signal.SIGTERM, "hang": signal.SIGSTOP, "pause": signal.SIGSTOP}.get(fault, signal.SIGKILL)
    lost = [life.disk_of(victim) for victim in victims] if fault == "lose disk" else []
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
    met.half_saved = life.saving()
    for disk in lost:
        for one in disk.iterdir():
            shutil.rmtree(one, ignore_errors=True)
    if fault == "pause":
        time.sleep(draw.uniform(0, 3))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victims[0], signal.SIGCONT)
    else:
        met.named = life.survive(fault, victims, children, before, mark)
    return met


class Life:
    """A run under a launcher, its output in a file; another launcher goes on with it where one was killed."""

    def __init__(self, home: pathlib.Path, name: str, setting: Setting, server=None, own: tuple[str, ...] = ()):
        self.home, self.name, self.setting, self.server, self.own = home, name, setting, server, own
        self.log = home / f"{name}.log"
        self.place = f"{setting.bucket}/{name}" if setting.bucket else str(home / name)
        self.directory = home / name
        self.start_s, self.process, self.machine = 10.0, None, 0
        self._heard: list[tuple[float, str]] = []       # when it said that it compiles, and its rows
        for disk in ("disk", "disk0", "disk1") if setting.hosts else ():
            (home / disk).mkdir(exist_ok=True)
        (home / "hosts").write_text("127.0.0.1 localhost node-0 node-1\n")
        self.start()

    def start(self) -> None:
        local = ("--checkpoint.local_every", "1", "--checkpoint.local_dir", str(self.home / "disk"),
                 "--checkpoint.every", "8") if self.setting.hosts else (
            "--checkpoint.export", "every", "--checkpoint.every", "4") if self.setting.bucket else ()
        command = [sys.executable, "-c", LAUNCHER, str(self.home) if self.setting.hosts else "",
                   "--processes", str(self.setting.processes), "--max-restarts", "30", *self.own, "--",
                   str(self.home / "run.toml"), "--run.dir", self.place, *local]
        environ = {key: value for key, value in os.environ.items()
                   if key not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC")}
        environ |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        if self.setting.bucket:     # another launcher is on another machine, where nothing is left
            self.machine += 1
            environ["XDG_CACHE_HOME"] = str(self.home / f"{self.name}-machine{self.machine}")
        self.mark = len(self.said())    # where in the log the start began that is now at work
        self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, errors="replace",
                                        preexec_fn=supervise.die_with(os.getpid()))
        self._reader = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self._reader.start()

    def _listen(self, process: subprocess.Popen) -> None:
        with open(self.log, "a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if line.startswith(("step ", SAYS["compiling"])):
                    self._heard.append((time.monotonic(), line))

    def seconds_until_back(self, met: Met, until: float | None) -> float | None:
        """From a fault to the next row, of the next start where it ended one."""
        heard = [(at, line) for at, line in self._heard if at > met.at]
        if met.fault in ENDING:
            begun = next((i for i, (_, line) in enumerate(heard) if line.startswith(SAYS["compiling"])), len(heard))
            heard = heard[begun:]
        at = next((at for at, line in heard if line.startswith("step ")), None)
        return None if at is None or until is not None and at > until else at - met.at

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def reached(self, moment: str) -> bool:
        return SAYS[moment] in self.said()[self.mark:]

    def runs(self) -> bool:
        return self.process.poll() is None

    def is_through(self) -> bool:
        return not self.runs() and self.process.returncode == 0

    def is_to_start(self) -> bool:
        """Its launcher was killed, or stopped on request."""
        return not self.runs() and self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM, stops.STOPPED)

    def saving(self) -> bool:
        if not self.setting.bucket:
            return any(self.directory.glob("checkpoints/.*.saving"))
        written = next((one.path for one in reversed(self.server.log[-50:])
                        if one.method == "PUT" and f"/{self.name}/{contents.CHECKPOINTS}/" in one.path), "")
        return bool(written) and not written.rpartition("/")[2].isdecimal()     # a piece, and no marker yet

    def wait_for(self, event, limit_s: float = PATIENCE_S) -> bool:
        """Returns whether the event came before the limit and before the launcher ended."""
        deadline = time.monotonic() + limit_s
        while self.runs() and time.monotonic() < deadline:
            if event():
                return True
            time.sleep(0.005)
        return False

    def disturb(self, fault: str, moment: str, draw: random.Random) -> bool | None:
        """The server fails for some requests. Returns whether it was told; None: asking again was enough."""
        from stores import Fault
        status, seconds = SERVER[fault]
        path = f"{self.name}/{contents.CHECKPOINTS}/" if moment in ("saving", "compiling") else self.name
        mark, done = len(self.said()), Fault(path, draw.randint(1, 6), status if status != 200 else 0,
                                             draw.uniform(0.5, seconds) if seconds else 0)
        self.server.faults.append(done)
        self.wait_for(lambda: done.times <= 0, 5)
        self.server.faults.remove(done)
        told = re.search(r"cannot be (read|written)|not saved|is behind|failed first|asked again", self.said()[mark:])
        return True if told else None

    def survive(self, fault: str, victims: list[int], children: list[int], before: int, mark: int) -> bool | None:
        """After a fault that ends a start: waits until its processes have gone, and looks at what the launcher says of
        it. Returns whether it was told."""
        deadline = time.monotonic() + PATIENCE_S
        while any(os.path.exists(f"/proc/{child}") for child in children):
            assert time.monotonic() < deadline, f"{children} outlive {victims}:\n{self.said()}"
            time.sleep(0.02)
        if fault in ("kill launcher", "terminate"):
            self.process.wait(PATIENCE_S)
            self._reader.join(PATIENCE_S)
            assert fault != "terminate" or self.process.returncode in (0, stops.STOPPED, -signal.SIGTERM), self.said()
            return None if fault == "kill launcher" else "stopp" in self.said()[mark:]
        self.mark = mark
        self.wait_for(lambda: len(self.children()) == self.setting.processes)
        said = self.said()[mark:]
        named = re.search(r"^process (\d+)(?: \(pid (\d+)\))? failed first", said, re.MULTILINE)
        assert not named or not named[2] or int(named[2]) in victims, f"{victims} hit, and another is named:\n{said}"
        if again := re.search(r"starting again from step (\d+)", said):
            assert int(again[1]) >= before, said
        return bool(named)

    def disk_of(self, pid: int) -> pathlib.Path:
        """Of the host that a process is."""
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        number = next(word.partition("=")[2] for word in words if word.startswith("--distributed.process_id="))
        return self.home / f"disk{number}"

    def children(self) -> list[int]:
        try:
            return [int(child) for child in
                    pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def end(self) -> int:
        try:
            code = self.process.wait(PATIENCE_S)
            self._reader.join(PATIENCE_S)
            return code
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"hangs:\n{self.said()}") from None

    def forget(self) -> None:
        """Nothing of it is left but its log."""
        shutil.rmtree(self.directory, ignore_errors=True)
        for machine in self.home.glob(f"{self.name}-machine*"):
            shutil.rmtree(machine, ignore_errors=True)
        for disk in self.home.glob("disk[01]/*"):
            shutil.rmtree(disk, ignore_errors=True)


def steps(place: str | pathlib.Path) -> list[int]:
    return contents.steps(str(place))


def rows(place: str | pathlib.Path) -> list[dict]:
    """The rows without what depends on the machine or on where the run was interrupted."""
    if addresses.is_remote(str(place)):
        text = stores.read(addresses.parse(f"{place}/metrics.jsonl")).decode()
        found = [json.loads(line) for line in text.splitlines()]
    else:
        found = metrics.read(pathlib.Path(place) / "metrics.jsonl")
    return [{key: row.get(key) for key in EXACT} for row in found]


def state(place: str | pathlib.Path) -> dict[str, tuple]:
    """Name -> (dtype, shape, bytes) of every array of the last checkpoint: params, optimizer and step."""
    checkpoints = resume.checkpoints_of(str(place))
    last = checkpoints.newest().step
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=here), checkpoints.arrays(last))
    arrays = checkpoints.restore(last, wanted)
    named = jax.tree.leaves_with_path(jax.tree.map(np.asarray, arrays))
    return {"last": (last,)} | {jax.tree_util.keystr(path): (x.dtype, x.shape, x.tobytes()) for path, x in named}


def exports(place: str) -> dict[str, tuple]:
    """Name -> (bytes,) of every file of the exports of a run in a bucket."""
    if not addresses.is_remote(place):
        return {}
    folder = addresses.parse(place).below(contents.EXPORT)
    return {one.address.path.removeprefix(f"{folder.path}/"): (stores.read(one.address),)
            for one in stores.listed(folder)}
