"""A tiny run under the launcher that is hit fault after fault: the launcher restarts, nothing is lost.

Faults come at random moments: while its processes start, restore, compile, between steps and while a checkpoint is
written. When a run is through, its rows must be steps 1..N, each with the very numbers that the undisturbed run had (so
no batch was skipped or repeated), and its final state must equal the undisturbed run's bit for bit; whom the launcher
names must be the one that was hit; and no minute may pass without a line. Runs follow until all faults are done.
`python -m benchmarks.soak` does it at length. Linux only.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
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

from meshtrain.checkpoint import resume
from meshtrain.journal.rows import MetricRows
from meshtrain.launch import supervise
from meshtrain.run import contents, stops
from meshtrain.storage import addresses, buckets

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, EVERY = 24, 2
PATIENCE_S = 600  # for the next sign of life, on a busy machine
MOST_SILENT_S = 60
LIMIT_S = 15        # of every phase, where processes are stopped for longer
LAPSED_S, FIRST_S = 5, 40       # of samplers: without work, and without their first part
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

LIMITS = {"training.step_timeout_s": LIMIT_S, "training.phase_timeout_s": LIMIT_S, "distributed.timeout_s": LIMIT_S,
          "distributed.heartbeat_timeout_s": 10}

# A run that learns from rewards, whose answers are drawn by samplers apart.
REWARDED = {"training.objective": "rl", "data.source": "prompts", "data.paths": '["{home}/prompts.jsonl"]',
            "data.seq_len": 32, "rl.prompts": 4, "rl.samples": 4, "rl.max_tokens": 6, "rl.lag": 1, "rl.slots": 4,
            "rl.reward": "{home}/rewards.py:score", "rl.reward_workers": 1, "validation.every": 0,
            "optimizer.learning_rate": 0.01, "optimizer.schedule": "constant"}
REWARD = "def score(prompt, answer, example):\n    return sum(ord(one) % 2 for one in answer) / 6\n"

# A sampler with small limits, whose main thread stands still at a signal, for some seconds or for good; of others the
# command itself. All that it starts is started so, too.
SAMPLER = f"""
import random, runpy, signal, subprocess, sys, time
module, begin = sys.argv.pop(1), subprocess.Popen.__init__
def begin_so(self, argv, *rest, **keys):
    is_ours = argv[1:2] == ["-m"] and argv[2] in ("meshtrain.launch.samplers", "meshtrain.sample")
    begin(self, [argv[0], __file__, *argv[2:]] if is_ours else argv, *rest, **keys)
subprocess.Popen.__init__ = begin_so
if module == "meshtrain.launch.samplers":
    from meshtrain.launch import restart
    restart.FIRST_S = restart.LONGEST_S = 0.2
if module == "meshtrain.sample":
    from meshtrain.run import command
    command.begin()
    from meshtrain.rl import exchange, work_queue
    exchange.LAPSED_S, work_queue.FIRST_S = {LAPSED_S}, {FIRST_S}
    signal.signal(signal.SIGRTMIN + 1, lambda *_: time.sleep(random.uniform(1, {1.5 * LAPSED_S})))
    signal.signal(signal.SIGRTMIN + 2, lambda *_: time.sleep(10**6))
runpy.run_module(module, run_name="__main__")
"""

# The launcher itself, but for shorter waits: those that the rule asks for would be most of the time. With an argument
# each process is a host with a name and a disk of its own.
LAUNCHER = """
import runpy, subprocess, sys
from meshtrain.launch import restart, supervise
restart.FIRST_S = 0.2
if sampler := sys.argv.pop(1):
    begin = subprocess.Popen.__init__
    subprocess.Popen.__init__ = lambda self, argv, *rest, **keys: begin(
        self, [argv[0], sampler, *argv[2:]] if argv[1:3] == ["-m", "meshtrain.launch.samplers"] else argv, *rest, **keys)
if home := sys.argv.pop(1):
    plain, own = supervise.supervise, ("hostname node-{i} && mount --bind {home}/hosts /etc/hosts && "
                                       'mount --bind {home}/disk{i} {home}/disk && exec "$@"')
    supervise.supervise = lambda argvs, *rest, **keys: plain([
        ["unshare", "--uts", "--mount", "sh", "-c", own.format(i=i, home=home), "sh", *argv]
        for i, argv in enumerate(argvs)], *rest, **keys)
sys.argv[0] = "meshtrain.launch.local"
runpy.run_module("meshtrain.launch.local", run_name="__main__")
"""

# What a start has said last when this begins; the moments in their order.
SAYS = {"compiling": "memory per device", "stepping": "\nstep "}
MOMENTS = {"starting": 2, "compiling": 3, "stepping": 3, "saving": 6}  # how often, relative to each other
# That end a start; that the server does for so many requests; that it does once for good; to samplers.
ENDING = ("kill", "kill all", "kill launcher", "terminate", "hang", "lose disk", "empty caches", "damaged",
          "damaged for good")
SERVER = {"500": {"status": 500}, "throttled": {"status": 503}, "reset": {}, "slow": {"seconds": 4},
          "refused": {"status": 403, "code": "AccessDenied"}, "expired": {"status": 400, "code": "ExpiredToken"},
          "200 kB/s": {}}
REFUSALS = ("refused", "expired")
SAMPLERS = {"sampler killed": signal.SIGKILL, "sampler sleeps": signal.SIGRTMIN + 1,
            "sampler hangs": signal.SIGRTMIN + 2}
STOPS = ("stopped alone", "stopped with all", "stopped with its launcher")


@dataclasses.dataclass(frozen=True)
class Setting:
    """hosts: each process is a host with a disk of its own, where local checkpoints are. bucket: run.dir is there.
    limited: LIMITS. samplers: that draw its answers."""
    processes: int = 1
    hosts: bool = False
    bucket: str = ""
    steps: int = STEPS
    limited: bool = False
    samplers: int = 0

    def __str__(self) -> str:
        kind = "hosts" if self.hosts else "processes" if self.processes > 1 else "process"
        return f"{self.processes} {kind}" + ", in a bucket" * bool(self.bucket) + ", samplers" * bool(self.samplers)


@dataclasses.dataclass
class Met:
    """A fault that was done. after_s: seconds until the next row that counts; None: another fault came before it, or
    the run was through. named: whether the run or its launcher told it; None: nobody was left who could, or it was
    got over by asking again. silent_s: the longest time without a line, until then or the next fault. wrong: what was
    found of the run afterwards."""
    setting: Setting
    fault: str
    moment: str
    at: float
    half_saved: bool = False
    after_s: float | None = None
    named: bool | None = None
    silent_s: float = 0.0
    wrong: bool = False


def torment(home: pathlib.Path, setting: Setting, faults: list[str], seed: int, server=None,
            tell=lambda text: print(text, flush=True), keep=None) -> tuple[list[Met], int]:
    """Hits runs below `home` until all faults are done and the last run has finished; (what was done, runs). server: of
    the bucket. keep: is called with what was done in each run, also in one that is wrong: the next begins then. Raises:
    AssertionError, without `keep`."""
    draw, met, finished = random.Random(seed), [], 0
    prepare(home, setting.steps)
    undisturbed = Life(home, "undisturbed", dataclasses.replace(setting, limited=False))
    assert undisturbed.end() == 0, undisturbed.said()
    wanted = rows(undisturbed.place), state(undisturbed.place) | exports(undisturbed.place)
    faults = list(faults)
    draw.shuffle(faults)
    while faults:
        life, done = Life(home, f"run{finished}", setting, server), []
        try:
            while faults and not life.is_through():
                if life.is_to_start():
                    life.start()
                assert life.runs() or life.is_through(), f"ended with {life.process.returncode}:\n{life.said()}"
                if one := hit(life, faults, draw, done):
                    tell(f"{len(met) + len(done)}, {setting}: {one.fault} while {one.moment}"
                         + ", a checkpoint half written" * one.half_saved)
            while life.end() and life.is_to_start():
                life.start()
            assert life.is_through(), life.said()
            check(life, wanted, done)
        except AssertionError as error:
            if keep is None:
                raise
            for one in done[-1:]:
                one.wrong = True
            tell(f"WRONG after {[one.fault for one in done]}: {error}")
            life.process.kill()
            life.process.wait()
        for one, after in zip(done, [*done[1:], None]):
            one.after_s = life.seconds_until_back(one, after and after.at)
            one.silent_s = life.longest_silence(one, after and after.at)
        met += done
        finished += 1
        if keep:
            keep(done)
        life.forget()
    return met, finished


def prepare(home: pathlib.Path, steps: int = STEPS) -> None:
    """Writes run.toml, and what it reads."""
    home.mkdir(exist_ok=True)
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    quoted = {"cache": home / "cache", "rules": ROOT / "sharding_rules/zero3.toml", "corpus": home / "corpus.txt"}
    quoted = {name: json.dumps(str(path)) for name, path in quoted.items()}
    (home / "run.toml").write_text(RUN.format(**quoted, steps=steps, every=EVERY))
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i * i}: "}) + "\n" for i in range(21)))
    (home / "rewards.py").write_text(REWARD)
    (home / "sampler.py").write_text(SAMPLER)


def check(life: "Life", wanted: tuple[list, dict], done: list[Met]) -> None:
    got, last = (rows(life.place), state(life.place) | exports(life.place)), life.setting.steps
    assert [row["step"] for row in got[0]] == list(range(1, last + 1)), [row["step"] for row in got[0]]
    assert got[0] == wanted[0], next((a, b) for a, b in zip(got[0], wanted[0], strict=True) if a != b)
    said, refused = life.said(), any(one.fault in REFUSALS for one in done)
    for array, bits in wanted[1].items():       # steps at which it was stopped have an export, too
        if refused and re.match(rf"(?!{last}/)\d+/", array) and array not in got[1]:
            assert re.search("not saved|not exported|cannot be", said), said    # one that was refused has none
            continue
        assert got[1].get(array) == bits, f"{array} differs from the undisturbed run's, or is not there:\n{said}"
    assert "\ngiven up after" not in said and "Traceback" not in said, said
    assert "damaged" not in said or any("damaged" in one.fault for one in done), said
    assert (silent_s := life.longest_silence()) < MOST_SILENT_S, f"{silent_s:.0f} s without a line:\n{said}"


def hit(life: "Life", faults: list[str], draw: random.Random, done: list[Met]) -> Met | None:
    """Waits for a moment and does the last of the faults then, which goes over to `done`; None: nobody was left to be
    hit."""
    fault, moment = faults[-1], draw.choices(list(MOMENTS), MOMENTS.values())[0]
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
    if fault == "damaged for good":     # one of two: where it is the only one the run ends, as it should
        life.wait_for(lambda: len(steps(life.place)) > 1, MOST_SILENT_S)
    children, before = life.children(), max(steps(life.place), default=0)
    if len(children) < life.setting.processes:      # it has ended meanwhile
        return None
    met, mark = Met(life.setting, fault, moment, time.monotonic()), len(life.said())
    done.append(met)
    faults.pop()
    if fault in SERVER:
        met.named = life.disturb(fault, moment, draw)
        return met
    if fault in SAMPLERS:
        met.named = life.disturb_sampler(SAMPLERS[fault], draw)
        return met
    if fault in STOPS:
        met.named = life.stop(fault, children, draw)
        return met
    if "damaged" in fault:
        met.named = life.damage(fault, children, before)
        return met
    if fault == "empty caches":
        met.half_saved, met.named = life.saving(), life.empty_caches(children, before)
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
        self._lines: list[tuple[float, int]] = []       # of each line: when, and of which launcher
        for disk in ("disk", "disk0", "disk1") if setting.hosts else ():
            (home / disk).mkdir(exist_ok=True)
        (home / "hosts").write_text("127.0.0.1 localhost node-0 node-1\n")
        self.start()

    def start(self) -> None:
        local = ("--checkpoint.local_every", "1", "--checkpoint.local_dir", str(self.home / "disk"),
                 "--checkpoint.every", "8") if self.setting.hosts else (
            "--checkpoint.export", "every", "--checkpoint.every", "8") if self.setting.bucket else ()
        drawing = self.setting.samplers
        keys = {"training.steps": self.setting.steps} | (LIMITS if self.setting.limited else {}) | (
            REWARDED if drawing else {})
        command = [sys.executable, "-c", LAUNCHER, str(self.home / "sampler.py") if drawing else "",
                   str(self.home) if self.setting.hosts else "", "--processes", str(self.setting.processes),
                   "--max-restarts", "30", *(("--samplers", str(drawing)) if drawing else ()), *self.own, "--",
                   str(self.home / "run.toml"), "--run.dir", self.place, *local,
                   *(f"--{key}={value}".format(home=self.home) for key, value in keys.items())]
        environ = {key: value for key, value in os.environ.items()
                   if key not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC")}
        environ |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        if self.setting.bucket:     # another launcher is on another machine, where nothing is left
            self.machine += not self._is_refused()      # with new credentials the same machine goes on
            environ["XDG_CACHE_HOME"] = str(self._machine())
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
                self._lines.append((time.monotonic(), process.pid))
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

    def longest_silence(self, met: Met | None = None, until: float | None = None) -> float:
        """The longest time between two lines of a launcher: from a fault to the next row that counts, or to the next
        fault; without one of the whole run."""
        if met:
            until = met.at + met.after_s if met.after_s is not None else until
        lines = [(at, pid) for at, pid in self._lines if (not met or at >= met.at) and (until is None or at <= until)]
        begin = [(met.at, lines[0][1])] if met and lines else []
        return max((at - before for (before, pid), (at, now) in zip([*begin, *lines], [*begin, *lines][1:])
                    if pid == now), default=0.0)

    def _machine(self) -> pathlib.Path:
        return self.home / f"{self.name}-machine{self.machine}"

    def _is_refused(self) -> bool:
        """Whether its last start ended because the bucket refused it: a mistake, until somebody gives credentials."""
        said = self.said()[-2000:] if self.process else ""
        return bool(self.process and self.process.returncode == stops.USER_ERROR and re.search(
            r"error: .* is refused with 40[03]", said))

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def reached(self, moment: str) -> bool:
        return SAYS[moment] in self.said()[self.mark:]

    def runs(self) -> bool:
        return self.process.poll() is None

    def is_through(self) -> bool:
        return not self.runs() and self.process.returncode == 0

    def is_to_start(self) -> bool:
        """Its launcher was killed, or stopped on request, or the bucket refused it."""
        return not self.runs() and (self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM, stops.STOPPED)
                                    or self._is_refused())

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
        """The server fails for some requests, or the line is slow for some seconds; it refuses some requests, or all
        of a kind until saves end the run. Returns whether it was told; None: asking again was enough."""
        from stores import Fault
        if fault == "200 kB/s":
            self.server.bytes_s = 200_000
            self.wait_for(lambda: False, draw.uniform(1, 3))
            self.server.bytes_s = 0
            return None
        keys, mark = SERVER[fault], len(self.said())
        path = f"{self.name}/{contents.CHECKPOINTS}/" if moment in ("saving", "compiling") else self.name
        lasts = fault in REFUSALS and draw.random() < 0.1
        times = 10**6 if lasts else draw.randint(1, 6)
        done = Fault(path, times, **(keys | {"seconds": draw.uniform(0.5, keys["seconds"])} if "seconds" in keys
                                     else keys))
        self.server.faults.append(done)
        self.wait_for(lambda: done.times <= 0, 25 if lasts else 5)
        self.server.faults.remove(done)
        told = "cannot be |not saved|is behind|failed first|asked again|refused with|does not have the end"
        if fault in REFUSALS and done.times < times:        # nothing asks again: each must be told
            self.wait_for(lambda: re.search(told, self.said()[mark:]), MOST_SILENT_S)
            assert re.search(told, self.said()[mark:]), f"{path} was refused, and nothing is told:\n{self.said()}"
        return True if re.search(told, self.said()[mark:]) else None

    def damage(self, fault: str, children: list[int], before: int) -> bool | None:
        """The start ends, and the next reads a damaged piece, once or for good. Returns whether that was told."""
        from stores import Fault
        place, mark = f"{self.name}/{contents.CHECKPOINTS}/", len(self.said())
        done, key = Fault(place, 1, damages=True), ""
        if fault == "damaged":
            self.server.faults.append(done)
            times = done.times
        os.kill(self.process.pid, signal.SIGSTOP)       # so that nothing is saved meanwhile
        for child in children:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.2)
        if fault == "damaged for good":
            if len(there := steps(self.place)) > 1:
                key = self.server.damage(f"{addresses.parse(self.place).path}/{contents.CHECKPOINTS}/{max(there)}.")
        os.kill(self.process.pid, signal.SIGCONT)
        self.survive("kill all", children, children, before, mark)
        self.wait_for(lambda: self.reached("stepping"))
        if fault == "damaged":
            self.server.faults.remove(done)
            return True if "damaged" in self.said()[mark:] or "differ" in self.said()[mark:] else None if (
                done.times == times) else False
        told = "damaged" in self.said()[mark:]
        # a newer state that the host has kept is used without a look at it
        newer = re.search(r"resuming after step \d+, kept in", self.said()[mark:])
        assert not key or not self.reached("stepping") or told or newer, f"{key} is damaged:\n{self.said()}"
        return told or None

    def empty_caches(self, children: list[int], before: int) -> bool | None:
        """All processes are killed, and when the next start begins this host has no copies, no mirror of run.dir, no
        kept state and no compiled programs. Returns whether the kill was told."""
        mark = len(self.said())
        os.kill(self.process.pid, signal.SIGSTOP)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.2)
        for place in (self.home / "cache", *([self._machine()] if self.setting.bucket else [])):
            for one in place.glob("*"):
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        os.kill(self.process.pid, signal.SIGCONT)
        return self.survive("kill all", children, children, before, mark)

    def stop(self, fault: str, children: list[int], draw: random.Random) -> bool | None:
        """SIGSTOP for longer than every limit of the run. Returns whether its end was told; None: it went on."""
        mark = len(self.said())
        victims = [draw.choice(children)] if fault == "stopped alone" else children
        if fault == "stopped with its launcher":
            victims = [*victims, self.process.pid]
        for victim in reversed(victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGSTOP)
        deadline = time.monotonic() + LIMIT_S + 3
        self.wait_for(lambda: "failed first" in self.said()[mark:], deadline - time.monotonic())
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
        rows = len(self._heard)
        self.wait_for(lambda: len(self._heard) > rows + 1, MOST_SILENT_S)
        return True if "failed first" in self.said()[mark:] else None

    def disturb_sampler(self, number: int, draw: random.Random) -> bool:
        """A sampler is killed, or its main thread stands still: one that has claimed a part, or any. Returns whether it
        was told."""
        answers, mark = self.directory / "samplers/answers", len(self.said())
        pids: list[int] = []

        def find() -> bool:
            pids[:] = self.samplers()
            return len(pids) == self.setting.samplers
        if not self.wait_for(find):
            return True
        claimed: list[int] = []

        def look() -> bool:
            for path in answers.glob("*.claim"):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    claimed[:] = [int(path.read_text().split("-")[-2])]
            return bool(set(claimed) & set(pids))
        drawing = draw.random() < 0.8 and self.wait_for(look, 10)
        victim = claimed[0] if drawing else draw.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
        named = re.compile(rf"sampler \S*-{victim}-\w+ hangs|sampler \d+ \(pid {victim}\)")
        sleeps = number == SAMPLERS["sampler sleeps"]
        self.wait_for(lambda: named.search(self.said()[mark:]), 2 * LAPSED_S if sleeps else MOST_SILENT_S)
        if named.search(self.said()[mark:]) or sleeps:
            return True if named.search(self.said()[mark:]) else None
        with contextlib.suppress(ProcessLookupError):       # nobody waits for it
            os.kill(victim, signal.SIGKILL)
        return False if self.runs() else None

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
        number = next(word.partition("=")[2] for word in _words(pid) if word.startswith("--distributed.process_id="))
        return self.home / f"disk{number}"

    def children(self) -> list[int]:
        """The processes that train."""
        return [child for child in _children(self.process.pid) if "meshtrain.launch.samplers" not in _words(child)]

    def samplers(self) -> list[int]:
        """Those that have begun to listen to their signals."""
        of = [child for child in _children(self.process.pid) if "meshtrain.launch.samplers" in _words(child)]
        return [one for child in of for one in _children(child) if _catches(one, signal.SIGRTMIN + 2)]

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
        text = buckets.read(addresses.parse(f"{place}/metrics.jsonl")).decode()
        found = [json.loads(line) for line in text.splitlines()]
    else:
        found = [*MetricRows(pathlib.Path(place) / "metrics.jsonl")]
    return [{key: row.get(key) for key in EXACT} for row in found]


def state(place: str | pathlib.Path) -> dict[str, tuple]:
    """Name -> (dtype, shape, digest of the bytes) of every array of the last checkpoint: params, optimizer and step."""
    checkpoints = resume.checkpoints_of(str(place))
    last = checkpoints.newest().step
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=here), checkpoints.arrays(last))
    arrays = checkpoints.restore(last, wanted)
    named = jax.tree.leaves_with_path(jax.tree.map(np.asarray, arrays))
    return {"last": (last,)} | {jax.tree_util.keystr(path): (x.dtype, x.shape, hashlib.md5(x.tobytes()).hexdigest())
                                for path, x in named}


def exports(place: str) -> dict[str, tuple]:
    """Name -> (bytes,) of every file of the exports of a run in a bucket."""
    if not addresses.is_remote(place):
        return {}
    folder = addresses.parse(place).below(contents.EXPORT)
    return {one.address.path.removeprefix(f"{folder.path}/"): (buckets.read(one.address),)
            for one in buckets.list_files(folder)}


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return bool(int(re.search(r"^SigCgt:\s+(\w+)", status, re.MULTILINE)[1], 16) >> (number - 1) & 1)
    return False
