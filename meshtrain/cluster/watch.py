"""A watchdog in every process. If a process makes no progress in time, it writes its stacks and exits; the process that
caused the hang is named.

Each phase has a limit. Keys of the run file set the limits of start, compile, restore and save. A step may take
LONGER_THAN_MEDIAN times the median of earlier steps, at least LEAST_STEP_S. A thread checks every LOOK_S. On a timeout
it writes all threads' stacks to run.dir/stacks (`cluster.stacks`). The other watchdogs fire at about the same time,
because all processes wait for one process. Each process waits until process 0 has seen all stacks, at most WINDOW_S,
then exits with code 1. If the interpreter's lock is held, a monitor process does that instead, a little later
(`cluster.monitor`). Time in which the process is stopped does not count; time in which it gets no CPU counts little
(`cluster.monitor.Clock`).

jax's own heartbeats come from a C++ thread: they detect a dead or stopped process, but not one whose Python or
collective is stuck. This module knows no run and no model.
"""
from __future__ import annotations

import contextlib
import collections
import dataclasses
import faulthandler
import fcntl
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshtrain import files
from meshtrain.cluster import agree, lost, stacks
from meshtrain.cluster.meet import name_processes
from meshtrain.cluster.monitor import STUCK_S, Clock, Monitor, within
from meshtrain.cluster.stacks import ProcessState
from meshtrain.config import ConfigError

LEAST_STEP_S, LONGER_THAN_MEDIAN = 60.0, 10.0
LOOK_S = 1.0
WINDOW_S = 8.0     # at most, from the first watchdog's stacks to the exit: time for the others and for the monitors
LOCK_HELD_S = 4.0   # the monitor waits this much longer, within the others' window
LISTEN_S = 0.25     # minimum time between polls for others' stacks
LAST_S = 1.0        # process 0 exits this long after it has seen all stacks, because jax then aborts the rest
NOTED_S = 10.0      # maximum age of the step in the file, which is read if Python hangs
AFTER_WATCHDOGS_S = 30.0
CLOCK_JUMP_S, CLOCK_LOOK_S = 5.0, 0.1
READERS = 2         # processes that read all stacks to name the culprit
MOST_TOLD = 1 << 18     # characters of stacks that go to other hosts


# Kind of phase -> the run file's key of its limit, or what else sets it.
KEYS = {"start": "distributed.timeout_s", "compile": "training.phase_timeout_s", "restore": "training.phase_timeout_s",
        "step": "training.step_timeout_s", "save": "training.phase_timeout_s", "part": "a sampler's limit"}
UNLIMITED = ""


@dataclasses.dataclass(frozen=True)
class PhaseLimits:
    """Seconds that each kind of phase may last; below 0: no limit. step=0: set by the median of the steps."""
    step: float = 0.0
    start: float = 300.0
    compile: float = 3600.0
    restore: float = 3600.0
    save: float = 3600.0


@dataclasses.dataclass(frozen=True)
class _Now:
    """The current phase. kind: a key of KEYS. limit_s: the limit in seconds, perhaps infinite. began: the beginning by
    the watchdog's clock. since: the beginning by the wall clock. moment: number of phases before this phase."""
    phase: str
    kind: str
    limit_s: float
    began: float
    since: float
    moment: int


class Watchdog:
    """The watchdog of one process. tell: prints a line to the user. The clock starts with the first phase."""

    def __init__(self, limits: PhaseLimits, index: int, count: int, tell: Callable[[str], None]):
        self.limits, self.index, self.count, self.tell = limits, index, count, tell
        self._file: io.FileIO | None = None     # in run.dir/stacks; None: stacks go to stderr
        self._directory: Path | None = None
        self._attempt = ""
        self._others: frozenset[int] = frozenset()      # processes on hosts with directories of their own
        self._steps_s: collections.deque[float] = collections.deque(maxlen=64)
        self._in_step = self._fired = False
        self._closed, self._firing = threading.Event(), threading.RLock()
        self._clock, self._monitor = Clock(LOOK_S), Monitor(stacks.HEAD, tell)
        self._now = _Now("start", "start", self._limit_s("start"), self._clock.now(), time.time(), 0)
        self._noted: _Now | None = self._now
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()
        self._monitor.thread = self._thread.native_id
        self._arm()
        # in a thread of its own, so that a hanging file system does not hang the watchdog
        self._beat = files.Beat(self._note, NOTED_S)
        if count > 1:
            threading.Thread(target=self._watch_clock, daemon=True, name="clock").start()

    def enter(self, phase: str, kind: str, limit_s: float | None = None) -> None:
        """Begin another phase. kind: a key of KEYS, or UNLIMITED. limit_s: in seconds; None: that of its kind."""
        before, now = self._now.kind, self._clock.now()
        if self._in_step:
            self._steps_s.append(now - self._now.began)
            self._in_step = False
        limit_s = self._limit_s(kind) if limit_s is None else limit_s
        self._now = _Now(phase, kind, limit_s, now, time.time(), self._now.moment + 1)
        if kind != before:      # else the monitor would use and report the previous phase
            self._arm()
            self._note()

    def step(self, number: int) -> None:
        """Begin another step. The first two load programs and connect devices: they have the limit of a compile."""
        self.enter(f"step {number}", "step" if len(self._steps_s) + self._in_step >= 2 else "compile")
        self._in_step = True

    def progress(self) -> None:
        """Restart the clock of a phase that consists of many parts."""
        if not self._in_step:
            self._now = dataclasses.replace(self._now, began=self._clock.now(), since=time.time(),
                                            moment=self._now.moment + 1)

    def _limit_s(self, kind: str) -> float:
        limit_s = getattr(self.limits, kind) if kind else -1
        if kind == "step" and limit_s == 0:
            return max(LEAST_STEP_S, LONGER_THAN_MEDIAN * sorted(self._steps_s)[len(self._steps_s) // 2])
        return float("inf") if limit_s < 0 else limit_s

    @contextlib.contextmanager
    def keep_in(self, directory: Path, *, apart: bool = False) -> Iterator[None]:
        """Write stacks to this directory during the block. Every process calls it. The file of a process that hangs,
        crashes or fails alone is kept. apart: each host has a directory of its own; jax's service then carries the
        stacks to other hosts."""
        self._attempt = agree.on_first(lambda: stacks.begin(directory))
        if apart:
            self._begin_apart(directory)
        path = directory / f"process-{self.index}.txt"
        with open(path, "wb+", buffering=0) as file:
            file.seek(stacks.HEAD)      # where faulthandler writes
            with contextlib.suppress(OSError):      # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)    # until this process is gone: `stacks.find_dead`
            self._directory, self._file, self._noted = directory, file, None
            self._note()
            if apart:
                for index, head in enumerate(agree.exchange(self._state().head().decode())):
                    self._keep_of(index, head)
            faulthandler.enable(file)       # crashes write stacks there
            self._arm()
            stays = False
            try:
                yield
            except Exception as error:
                stays = self._record_error(error)
                raise
            finally:
                with self._firing:      # a watchdog that has fired ends the process
                    self._file = None
                    faulthandler.disable()
                    self._arm()
                if not stays:
                    self._forget_others()
                    with contextlib.suppress(OSError):
                        path.unlink()
                        directory.rmdir()     # succeeds for the last process, without earlier attempts' stacks

    def _begin_apart(self, directory: Path) -> None:
        places = agree.exchange([socket.gethostname(), str(directory)])
        own = places[self.index]
        self._others = frozenset(index for index, place in enumerate(places) if place != own)
        # the first process of each host calls it; process 0 already has
        agree.everywhere(lambda: stacks.begin(directory) if 0 < self.index == places.index(own) else None)

    def _keep_of(self, index: int, text: str) -> None:
        """Write the file of a process on another host into this host's directory."""
        if index in self._others and text:
            temporary = self._directory / f".process-{index}.{self.index}.tmp"
            with contextlib.suppress(OSError):
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self._directory / f"process-{index}.txt")

    def _forget_others(self) -> None:
        for index in self._others:
            with contextlib.suppress(OSError):
                (self._directory / f"process-{index}.txt").unlink()

    def _fetch(self, index: int, state: str) -> None:
        """Copy the file of a process on another host, as it was when that process came to this state."""
        if index in self._others:
            self._keep_of(index, agree.word(f"stacks {self._attempt} {index} {state}"))

    def _fetch_all(self) -> None:
        for index in self._others:
            self._fetch(index, "hangs")

    def _record_error(self, error: Exception) -> bool:
        """Record an error that this process met alone in its file; return whether it did."""
        if isinstance(error, ConfigError) or getattr(error, "agreed", False):
            return False
        gone = lost.others(error)
        words = (f"{type(error).__name__}: {error}" if gone is None else
                 f"lost {name_processes(gone) if gone else 'other processes'}")
        with contextlib.suppress(OSError):
            os.pwrite(self._file.fileno(), self._state("failed" if gone is None else "lost", words).head(), 0)
            dead = stacks.culprit(self._directory) or stacks.find_dead(self._directory) if gone == [] else None
            if dead:
                self.tell(f"error: process {self.index} of {self.count} has lost process {dead[0]}: it {dead[1]}")
        return True

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        with self._firing:
            self._monitor.close()
        self._beat.close()

    def _time_left_s(self) -> float:
        return self._now.began + self._now.limit_s - self._clock.now()

    def patience_s(self) -> float:
        """Return the timeout in seconds of an agreement in this phase. By this time, all watchdogs have reported."""
        return max(self._time_left_s(), 0) + AFTER_WATCHDOGS_S

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            looked, now = self._clock.look(), self._now
            with self._firing:
                if not self._closed.is_set():
                    if looked - now.began >= now.limit_s:
                        self._fire(now, looked - now.began)
                    self._monitor.keep()
                    self._arm()

    def _watch_clock(self) -> None:
        """Warn if the wall clock is set, i.e. jumps relative to the monotonic clock. jax's service in process 0 uses
        the wall clock; after a jump, the service declares all processes dead within a second."""
        ahead_s = time.time() - time.monotonic()
        while not self._closed.wait(CLOCK_LOOK_S):
            jump_s = time.time() - time.monotonic() - ahead_s
            ahead_s += jump_s
            if abs(jump_s) > CLOCK_JUMP_S:
                self.tell(
                    f"warning: the clock of {socket.gethostname()} jumped by {jump_s:+.0f} s (it was set, or the "
                    f"machine was suspended)"
                    + ("; jax's heartbeats use this host's clock, so all processes will seem dead: slew the clock "
                       "(chrony, ntpd -x), never step it, during a run" if self.index == 0 else ""))

    def _arm(self) -> None:
        """Send the monitor the time left in this phase, and the message that it prints if this thread cannot run."""
        now = self._now
        self._await(self._time_left_s() + LOCK_HELD_S,
                    f"hangs in {now.phase} since {stacks.at(now.since)}, and holds the interpreter's lock: "
                    f"{KEYS.get(now.kind)} allows {now.limit_s:g} s")

    def _await(self, left_s: float, doing: str) -> None:
        self._monitor.expect(left_s, f"{self._name()} {doing}", str(self._path()) if self._file else "")

    def _name(self) -> str:
        return f"process {self.index} of {self.count} ({socket.gethostname()}, pid {os.getpid()})"

    def _path(self) -> Path:
        return self._directory / f"process-{self.index}.txt"

    def _fire(self, now: _Now, lasted_s: float) -> None:
        """Report the hang and exit. Each takes at most some seconds."""
        self._fired = True      # `_note` must not overwrite the state "hangs"
        self._await(_window_s(now) + 3 * STUCK_S + 5, "hangs while it writes its stacks")
        words = f"{lasted_s:.0f} s are more than {KEYS[now.kind]} allows ({now.limit_s:g} s)"
        text = self._stacks()
        report = stacks.report(self._state("hangs", words), text)
        place = f"its stacks: {self._path()}" if self._file else f"its stacks:\n{text}"
        within(STUCK_S, lambda: self._leave(report.state, text))
        within(STUCK_S, lambda: self.tell(
            f"error: {self._name()} {report.doing}: {words}; {place}"))
        deadline, heard = time.monotonic() + _window_s(now), threading.Event()
        if self.count > 1:      # a hanging file system must not hang the watchdog
            threading.Thread(target=self._listen, args=(heard, deadline), daemon=True).start()
            heard.wait(deadline - time.monotonic())
        if self.index < READERS:
            if self.index:
                within(STUCK_S, self._fetch_all)
            within(STUCK_S, self._name_culprit)
        else:       # a launcher on this host would report processes of other hosts as silent
            self._forget_others()
        if self.index == 0 and self.count > 1:
            if heard.is_set():
                within(STUCK_S, lambda: self._leave(dataclasses.replace(report.state, state="ends"), text))
            time.sleep(LAST_S)
        os._exit(1)

    def _listen(self, heard: threading.Event, deadline: float) -> None:
        """Wait until all stacks are seen and set `heard`; stop at `deadline`. Process 0 reads the files of all others.
        The others read only the file of process 0, because thousands of processes must not each read all files."""
        unheard = set(range(1, self.count)) if self.index == 0 else {0}
        while self._directory and unheard and time.monotonic() < deadline:
            began = time.monotonic()
            for index in sorted(unheard):
                self._fetch(index, "ends" if self.index else "hangs")
                report = stacks.of(self._directory, index, self._attempt)
                if report and report.fired and (self.index == 0 or report.state.state == "ends"):
                    unheard.remove(index)
            time.sleep(max(LISTEN_S, time.monotonic() - began))
        if not unheard:
            heard.set()

    def _stacks(self) -> str:
        """Return the stacks of all threads but this one, the main thread first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        del frames[threading.get_ident()]
        in_order = sorted(frames, key=lambda ident: ident != threading.main_thread().ident)
        return stacks.format_stacks([(ident, names.get(ident, ""), frames[ident]) for ident in in_order])

    def _leave(self, state: ProcessState, text: str) -> None:
        if self._others:
            agree.leave_word(f"stacks {self._attempt} {self.index} {state.state}",
                             (state.head().decode() + text)[:MOST_TOLD])
        if self._file is not None:
            os.pwrite(self._file.fileno(), state.head() + text.encode(errors="replace"), 0)
            os.fsync(self._file.fileno())       # other hosts read it

    def _name_culprit(self) -> None:
        culprit = self._directory and stacks.culprit(self._directory)
        if culprit:
            self.tell(f"error: the culprit is process {culprit[0]}: it {culprit[1]}")
        elif self._directory:
            self.tell(f"error: all processes wait for each other ({self._now.phase}); see {self._directory}")

    def _note(self) -> None:
        """Write the state into the file, unless the file already has it or the watchdog has fired."""
        before, self._noted = self._noted, self._now
        if before is not self._now and not self._fired:
            with contextlib.suppress(OSError, AttributeError):      # no file, or closed
                os.pwrite(self._file.fileno(), self._state().head(), 0)

    def _state(self, state: str = "runs", words: str = "") -> ProcessState:
        now = self._now
        return ProcessState(self.index, self.count, socket.gethostname(), os.getpid(), self._attempt, now.phase,
                            now.since, now.moment, f"{threading.main_thread().ident:x}", state, words)


def _window_s(now: _Now) -> float:
    """Return WINDOW_S plus a margin: medians of steps, and so limits, differ slightly between processes."""
    return WINDOW_S + 0.02 * now.limit_s


# ---- of a command ----------------------------------------------------------------------------------------------------

# Of the process, which it ends: only `on` sets it, and every thread may begin a phase. None outside a command.
_watchdog: Watchdog | None = None


@contextlib.contextmanager
def on(limits: PhaseLimits, index: int, count: int, tell: Callable[[str], None]) -> Iterator[Watchdog]:
    """Watch the phases of a command while it runs."""
    global _watchdog
    _watchdog = Watchdog(limits, index, count, tell)
    try:
        with agree.wait_at_most(_watchdog.patience_s):
            yield _watchdog
    finally:
        _watchdog.close()
        _watchdog = None


@contextlib.contextmanager
def phase(name: str, kind: str, limit_s: float | None = None) -> Iterator[None]:
    """Put this process into phase `name` during the block, with the limit of `kind` (a key of KEYS, or UNLIMITED) or of
    limit_s seconds; then return to the previous phase."""
    watchdog = _watchdog
    if watchdog is None:
        yield
        return
    before = watchdog._now
    watchdog.enter(name, kind, limit_s)
    yield       # an error ends the run in this phase
    watchdog.enter(before.phase, before.kind, before.limit_s)


def step(number: int) -> None:
    """Begin another step."""
    if _watchdog is not None:
        _watchdog.step(number)


def progress() -> None:
    """Restart the clock of the current phase."""
    if _watchdog is not None:
        _watchdog.progress()
