"""Runs the processes of one start to their end, and reports which of them failed first.

The output of process 0 is the output of the launcher. The output of other processes is shown only if they fail, because
their peers then print pages about their own errors. If a process is stopped (SIGSTOP) or hangs, the others end first;
the process that was stopped or hung is reported as the cause. A process that is stopped for too long is killed, even if
it is the only one. This module knows no run.
"""
from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import math
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain.cluster import lost, stacks
from meshtrain.run import say, stops

AGREED = (0, 2, 75)
GRACE_S = 5.0       # time for peers of a failed process to exit by themselves, and again after SIGTERM
KILLED_GRACE_S = 0.5    # the same if the process was killed: its peers wait for it in a step that never ends
KEPT_LINES = 40
LAST_WORDS_S = 3.0  # time limit for reading the last output of ended processes, whose children may hold the pipe
LOOK_S = 1.0        # between checks for stopped processes
MOST_TOLD = 3       # processes whose last lines are shown
# Unrelated to failures: Gloo's connections, and an installed CUDA plugin that finds no GPU.
NOISE = re.compile(rb"^\[Gloo\] Rank |is connected to \d+ peer ranks|absl::InitializeLog\(\)|cudart_stub")
PR_SET_PDEATHSIG = 1
FIRST_PORT, LAST_PORT = 10_000, 29_999


@dataclasses.dataclass(frozen=True)
class LaunchOutcome:
    """How a start ended. code: exit code of the start. culprit: the process that failed first, or None. words: the
    cause in one line. secondary: whether the process ended because an unknown peer failed. asked: whether a signal
    requested the end."""
    code: int
    culprit: int | None = None
    words: str = ""
    secondary: bool = False
    asked: bool = False


@dataclasses.dataclass(eq=False)
class Child:
    """One process, its last lines and its end. code: exit code, negative for a signal; None while it runs.

    forced: whether this launcher sent the process SIGTERM or SIGKILL, usually because another process had failed.
    stopped: whether the process was stopped (SIGSTOP, a debugger) at that time. called: the name in messages; empty:
    the index is used. stood: (time since which the process is stopped, its context switches at that time); None: the
    process runs.
    """
    index: int
    process: subprocess.Popen
    pidfd: int
    lines: collections.deque[bytes] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=KEPT_LINES))
    reader: threading.Thread | None = None
    code: int | None = None
    ended_s: float = 0.0
    forced: bool = False
    stopped: bool = False
    called: str = ""
    stood: tuple[float, list[str]] | None = None

    def listen(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or self.process.stdout:
            if self.index == 0:
                with contextlib.suppress(OSError):      # stderr is closed: lines are still kept here
                    os.write(2, line.rstrip(b"\n") + b"\n")       # the last line may be incomplete
            elif lost.NOT_SAVED in line:
                say.err(f"process {self.index}: {_text(line)}")
            if not NOISE.search(line):
                self.lines.append(line)

    def send(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def lose(self) -> None:
        """Set the code of a process whose end is unknown."""
        self.code = -signal.SIGKILL

    def stands_still(self) -> bool:
        """Return whether the process is stopped now, according to the kernel."""
        return self.still_s() is not None

    def still_s(self) -> float | None:
        """Return the seconds for which the process has been stopped; None if it runs or has run since the last call."""
        stood, self.stood = self.stood, None
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
            if self.code is None and re.search(r"^State:\s+[Tt] ", status, re.MULTILINE):
                switches = re.findall(r"ctxt_switches:\s+(\d+)", status)
                self.stood = stood if stood and stood[1] == switches else (time.monotonic(), switches)
                return time.monotonic() - self.stood[0]
        return None

    @property
    def failed(self) -> bool:
        return self.code not in (0, 75)

    @property
    def killed(self) -> bool:
        """Whether SIGKILL from elsewhere ended the process: from the kernel, for lack of memory, or from a person."""
        return self.code == -signal.SIGKILL and not self.forced

    @property
    def secondary(self) -> bool:
        """Whether the process ended because another process failed."""
        return self.forced or self.code in (1, -signal.SIGABRT) and any(map(lost.SECONDARY.search, self.lines))

    @property
    def out_of_time(self) -> bool:
        """Whether the process is process 0 and ended because its clock was set."""
        return (self.name.startswith("process 0 ") and not self.forced
                and lost.CLOCK_SET.search(b"".join(self.lines)) is not None)

    @property
    def name(self) -> str:
        return f"{self.called or f'process {self.index}'} (pid {self.process.pid})"

    @property
    def ending(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by {signal.Signals(-self.code).name} (signal {-self.code})"


def supervise(argvs: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]], grace_s: float = GRACE_S,
              left: Path | None = None, called: str = "", still_s: float = math.inf) -> LaunchOutcome:
    """Run all commands until all have ended; return the outcome. Call it from the main thread. left: directory with
    stacks of hanging processes. called: the name of a process whose peers run elsewhere.

    The output of the first process is the output of the launcher. After a failure the other processes have grace_s
    seconds to exit by themselves, and again after SIGTERM. A process that is stopped for still_s seconds is killed.
    Signals are forwarded to all processes.
    """
    children: list[Child] = []
    asked: list[int] = []
    early: list[int] = []       # signals received before all were started

    def forward(number, frame):
        asked.append(number)
        if len(children) < len(argvs):
            early.append(number)
            return
        for child in children:
            child.send(number)

    old = {number: signal.signal(number, forward) for number in stops.stop_signals()}
    start, since = time.monotonic(), time.time()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [signal.signal(number, handler) for number, handler in old.items()])
        for index, (argv, environ) in enumerate(zip(argvs, environs, strict=True)):
            captured = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if index else {
                "stderr": subprocess.PIPE}
            process = begin(argv, environ, **captured)
            children.append(Child(index, process, os.pidfd_open(process.pid), called=called))
            stack.callback(os.close, children[-1].pidfd)
        for number in early:
            forward(number, None)
        for child in children:      # threads only after the last fork
            child.listen()
        poll = stack.enter_context(_polling(children))
        outcome = conclude(wait(children, poll, start, grace_s, still_s), left, since)
    return dataclasses.replace(outcome, asked=bool(asked))


def begin(argv: Sequence[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen:
    """Start a process that the kernel kills when the calling thread ends, even by a crash. The process has a session of
    its own: Ctrl-C reaches only the launcher, which forwards it once. options: keyword arguments of Popen."""
    return subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True,
                            preexec_fn=die_with(os.getpid()), **options)


def die_with(parent: int) -> Callable[[], None]:
    """Return a preexec_fn for Popen: the kernel kills the child when the parent (a pid) ends, even by a crash."""
    prctl = ctypes.CDLL(None).prctl

    def apply():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return apply


def wait(children: Sequence[Child], poll: Callable[[float], Iterable[Child]], start: float, grace_s: float,
         longest_still_s: float = math.inf, killed_s: float = math.inf) -> list[Child]:
    """Wait until all children have ended; return them in the order of their ends.

    poll: a function that waits at most the given seconds and yields the children that have ended, with their code set.
    After a failure the others have grace_s seconds (KILLED_GRACE_S if the failed one was killed) to exit by themselves,
    and again after SIGTERM. If a child still runs killed_s after SIGKILL, the function waits no longer.
    """
    ended: list[Child] = []
    measures, deadline = [signal.SIGTERM, signal.SIGKILL], math.inf
    while running := [child for child in children if child.code is None]:
        if time.monotonic() >= deadline:
            if not measures:
                for child in running:
                    child.lose()
                return ended + running
            number = measures.pop(0)
            deadline = time.monotonic() + (grace_s if measures else killed_s)
            for child in running:
                child.forced = True
                child.send(signal.SIGKILL if child.stopped else number)
        for child in running:
            if not child.stopped and (child.still_s() or 0) >= longest_still_s:
                child.forced = child.stopped = True
                _tell(f"{child.name} has been stopped for {longest_still_s:g} s (SIGSTOP, or a debugger) and is "
                      f"killed: distributed.heartbeat_timeout_s allows no more")
                child.send(signal.SIGKILL)
        for child in poll(min(LOOK_S, max(0, deadline - time.monotonic()))):
            child.ended_s = time.monotonic() - start
            ended.append(child)
            if child.failed and deadline == math.inf and measures:
                grace_s = min(grace_s, KILLED_GRACE_S) if child.killed else grace_s
                deadline = time.monotonic() + grace_s
                for other in children:
                    other.stopped |= other.code is None and other.stands_still()
    return ended


@contextlib.contextmanager
def _polling(children: Sequence[Child]) -> Iterator[Callable[[float], Iterable[Child]]]:
    """Yield the function `poll` for `wait`, for processes of this machine."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pidfd, selectors.EVENT_READ, child)

        def poll(seconds: float) -> Iterator[Child]:
            for key, _ in selector.select(seconds):
                selector.unregister(key.fileobj)
                key.data.code = key.data.process.wait()
                yield key.data

        yield poll


def conclude(ended: Sequence[Child], left: Path | None = None, since: float = 0.0) -> LaunchOutcome:
    """Return the outcome of a start. Report which process failed first, unless all ended with the same exit code of
    AGREED. If only one process saw a mistake of the user's (2) and the others failed because of it, the outcome has
    code 2, since the mistake would recur.

    left: the directory with the stacks of the processes, if any. since: wall-clock time of the start.
    """
    until = time.monotonic() + LAST_WORDS_S
    for child in ended:
        if child.reader is not None:
            child.reader.join(max(0.0, until - time.monotonic()))
    if len({child.code for child in ended}) == 1 and ended[0].code in AGREED:
        return LaunchOutcome(ended[0].code)
    in_order = sorted(ended, key=lambda child: child.index)
    stuck = stacks.culprit(left, since) if left else None
    first = _culprit(ended, stuck and stuck[0])
    if first is None:
        words = "the processes ended in different ways"
        _tell(words, *(f"{child.name}: {child.ending}" for child in in_order))
        return LaunchOutcome(1, words=words)
    if first.stopped:
        words = (f"{first.name} failed first: it was stopped (SIGSTOP, or a "
                 f"debugger){', and the others lost it' * (len(ended) > 1)}")
    elif first.out_of_time:
        words = (f"{first.name} failed first: its clock was set, or its machine was suspended, so jax, which measures "
                 "silence by this clock, declared all processes dead")
    elif first.forced or first in _find_awaited(ended):
        words = f"{first.name} failed first: the others lost contact with it"
    else:
        words = f"{first.name} failed first, {first.ended_s:.1f} s after the start: {first.ending}"
    if stuck and stuck[0] == first.index:
        words += f"; it {stuck[1]}"
    _tell(words)
    shown = [first, *(child for child in ended if child.failed and not child.secondary and child is not first)]
    # the lines of process 0 are on the screen already
    for child in [child for child in shown if child.index and child.lines][:MOST_TOLD]:
        _tell("its last lines:" if child is first else f"the last lines of {child.name}:",
              *(f"  {_text(line)}" for line in child.lines))
    mistake = first.code == stops.USER_ERROR and all(
        child.secondary or child.code == stops.USER_ERROR for child in ended)
    if any(lost.MISMATCHED in line for child in ended if child.failed for line in child.lines):
        _tell("gloo::EnforceNotMet: XLA started collectives of the simulated devices in another order in each "
              "process, but Gloo matches them by order; start one process, or use a pipeline.schedule that does not "
              "split the backward, e.g. 1f1b (docs/limits.md). GPUs are not affected")
    _tell(*(f"then {child.name}: {child.ending}" for child in in_order if child is not first))
    last = "" if first.secondary else next((_text(line) for line in reversed(first.lines) if line.strip()), "")
    return LaunchOutcome(stops.USER_ERROR if mistake else stops.FAILED, first.index,
                   f"{words}{f'; its last line: {last}' if last else ''}",
                   first.secondary and not first.stopped)


def _culprit(ended: Sequence[Child], stuck: int | None) -> Child | None:
    """Return the process that failed first, or None. ended: all processes in the order of their ends. stuck: the
    process that the stacks name."""
    failed = [child for child in ended if child.failed]
    unheard = {int(index) for child in failed for line in child.lines for match in lost.UNHEARD.findall(line)
               for index in match if index}
    blamed = {int(match[1]) for child in failed for line in child.lines if (match := lost.BLAMED.search(line))}
    return next((child for candidates in (
        # killed or lost, and not ended by this launcher
        (child for child in failed if (child.code is None or child.code < 0) and not child.secondary),
        (child for child in failed if child.index == stuck),
        (child for child in failed if child.out_of_time),
        (child for child in failed if child.index in blamed),
        (child for child in failed if not child.secondary),
        (child for child in ended if child.stopped),
        (child for child in ended if child.forced and child.index in unheard),
        _find_awaited(ended),
        failed) for child in candidates), None)


def _find_awaited(ended: Sequence[Child]) -> list[Child]:
    """Return the only process without Gloo messages, if Gloo timed out in others; else no process."""
    late = any(lost.LATE.search(line) for child in ended for line in child.lines)
    quiet = [child for child in ended if not any(b"Gloo" in line for line in child.lines)]
    return quiet if late and len(quiet) == 1 else []


def free_port(host: str = "127.0.0.1", first: int = FIRST_PORT) -> int:
    """Return a free port below the ephemeral range, where a process that retries to connect can reach itself."""
    while True:
        port = random.randint(first, LAST_PORT)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\n")


def _tell(*lines: str) -> None:
    for line in lines:
        say.err(line)
