"""Stack files of a hung run: one per process in run.dir/stacks. The culprit is found from these files. Processes that
wait for others are in a collective, a barrier or an agreement. The culprit is a process that is elsewhere, or that
wrote no stacks because it is stopped. This module starts nothing.

    process-<i>.txt   the first HEAD bytes: a line of words, a line of JSON (the fields of `ProcessState`), blanks; then
                      stacks in faulthandler's format, possibly several times
    try-<k>/          the files of an earlier start of the run, the newest KEPT_TRIES of them

state: "runs": no fault is recorded; the process may have been killed or stopped, or its monitor has ended it because
the interpreter's lock was held (then stacks follow). "hangs": its watchdog fired. "ends": its watchdog fired, and it
has seen the stacks of all others. "failed": it met an error of its own, in `words`. "lost": it failed because others
were gone; `words` names them if they are known.
"""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import re
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

HEAD = 1024         # bytes: words and JSON, rewritten in place before the stacks
KEPT_TRIES = 5
# Functions in which a thread waits for other processes: (end of the file's path, function; "": any function).
WAITING = [
    *(("meshtrain/cluster/agree.py", name) for name in ("exchange", "_broadcast", "part", "ask", "_gather")),
    ("meshtrain/cluster/meet.py", ""), ("jax/experimental/multihost_utils.py", ""),
    ("orbax/checkpoint/_src/multihost/multihost.py", ""),
    ("jax/_src/array.py", "_value"), ("jax/_src/array.py", "block_until_ready"), ("jax/_src/array.py", "__array__"),
    ("jax/_src/api.py", "device_get"), ("jax/_src/api.py", "block_until_ready"),
    ("jax/_src/interpreters/pxla.py", "__call__"),
    ("jax/_src/distributed.py", "shutdown")]
JOINS = (("threading.py", "join"), ("threading.py", "_wait_for_tstate_lock"), ("threading.py", "wait"),
         ("concurrent/futures/_base.py", "result"))
THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):$")
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
FATAL = re.compile(r"^Fatal Python error: (?!Aborted)(.+)$", re.MULTILINE)      # jax aborts survivors


class StackFrame(NamedTuple):
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.split('/')[-3:])}:{self.line})"


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """One process's record. since: when its phase began, wall clock in seconds. moment: number of phases begun so far;
    among several processes, the one with the lowest number is behind. main: ident of its main thread in the stacks."""
    process: int
    count: int
    host: str
    pid: int
    attempt: str
    phase: str
    since: float
    moment: int
    main: str
    state: str = "runs"
    words: str = ""

    def head(self) -> bytes:
        line = (f"process {self.process} of {self.count} on {self.host}, pid {self.pid}: {self.phase} since "
                f"{at(self.since)}{' · ' * bool(self.words)}{self.words}")
        fields = dataclasses.asdict(self) | {"words": self.words[:200].encode("ascii", "replace").decode()}
        body = f"{line.splitlines()[0][:HEAD - 600]}\n{json.dumps(fields, ensure_ascii=True)}\n".encode()
        return body[:HEAD - 1].ljust(HEAD - 1) + b"\n"


@dataclasses.dataclass(frozen=True)
class Report:
    """The file of one process. threads: the first stacks in the file, innermost frame first; None: no stacks. fatal:
    the error of a crash. locked: whether the monitor ended the process because no Python thread could run."""
    state: ProcessState
    threads: dict[str, list[StackFrame]] | None
    fatal: str
    locked: bool

    @property
    def fired(self) -> bool:
        """Whether its watchdog or its monitor fired."""
        return self.locked or self.state.state in ("hangs", "ends")

    @property
    def main(self) -> list[StackFrame]:
        return (self.threads or {}).get(self.state.main, [])

    @property
    def waits(self) -> bool:
        """Whether the main thread, or a thread that the main thread waits for, waits for other processes."""
        if _in(WAITING, *self.main):
            return True
        return _in(JOINS, *self.main[:1]) and any(_in(WAITING, *frames) for frames in (self.threads or {}).values())

    @property
    def where(self) -> str:
        """The main thread's innermost frame that does more than wait for another thread; empty without stacks."""
        frames = [frame for frame in self.main if not _in(JOINS, frame)] or self.main
        return f" in {frames[0]}" if frames else ""

    @property
    def doing(self) -> str:
        """The state of a process, as words that follow "process 1": hangs or waits, phase, since when, where."""
        waits = self.waits and not self.locked
        holds = ", and holds the interpreter's lock" if self.locked else ""
        return (f"{'waits for the others' if waits else 'hangs'} in {self.state.phase} since "
                f"{at(self.state.since)}{self.where}{holds}")


def at(wall: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall))


def begin(directory: Path) -> str:
    """Move earlier starts' stacks away; return a name for this start. Called once, before any stacks are written."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(report.threads is not None or report.state.state != "runs" for report in read(directory).values()):
        tries = sorted((int(path.name[4:]), path) for path in directory.glob("try-*") if path.name[4:].isdecimal())
        place = directory / f"try-{tries[-1][0] + 1 if tries else 1}"
        place.mkdir()
        for path in directory.glob("process-*.txt"):
            path.rename(place / path.name)
        for _, path in tries[:max(0, len(tries) + 1 - KEPT_TRIES)]:
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob("process-*.txt"):
        path.unlink(missing_ok=True)
    return secrets.token_hex(4)


def read(directory: Path, since: float = 0.0) -> dict[int, Report]:
    """Return process -> report for the newest start. since: wall clock in seconds; older files are ignored."""
    reports = [_report_in(path, since) for path in Path(directory).glob("process-*.txt")]
    by_process = {report.state.process: report for report in reports if report}
    newest = max(by_process.values(), key=lambda report: report.state.since, default=None)
    return {index: report for index, report in by_process.items()
            if newest is not None and report.state.attempt == newest.state.attempt}


def of(directory: Path, index: int, attempt: str) -> Report | None:
    """Return the report of one process; None if the process has no report from this start."""
    report_there = _report_in(directory / f"process-{index}.txt")
    return report_there if report_there and report_there.state.attempt == attempt else None


def culprit(directory: Path | str, since: float = 0.0) -> tuple[int, str] | None:
    """Return (process, what it was doing) for the process that the others waited for or that made the others die; None:
    unknown, or all processes wait alike.

    directory: run.dir/stacks. since: wall clock in seconds, e.g. the start of this attempt; older files are ignored.
    """
    reports = read(Path(directory), since)
    crashed = [report for report in reports.values() if report.fatal]
    failed = [report for report in reports.values() if report.state.state == "failed"]
    fired = [report for report in reports.values() if report.fired]
    stuck = [report for report in fired if report.locked or not report.waits]
    silent = [report for report in reports.values() if report.threads is None
              and report.state.state == "runs"] if fired else []
    suspects = crashed or failed or stuck or silent
    if not suspects:
        return None
    first = min(suspects, key=lambda report: (report.state.moment, report.state.process))
    state = first.state
    return state.process, (
        f"crashed in {state.phase}{first.where}: {first.fatal}" if crashed else
        f"failed in {state.phase}: {state.words}" if failed else first.doing if stuck else
        f"left no stacks of {state.phase}: it is stopped, or its host is gone (pid {state.pid} on {state.host})")


def _report_in(path: Path, since: float = 0.0) -> Report | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, IndexError):     # removed, or half written
        if path.stat().st_mtime >= since:
            data = path.read_bytes()
            return report(ProcessState(**json.loads(data[:HEAD].decode().splitlines()[1])),
                          data[HEAD:].decode(errors="replace"))
    return None


def find_dead(directory: Path) -> tuple[int, str] | None:
    """Return (process, how) of a process on this host that died without a report, usually by kill -9; None if none did.

    Each live process holds a lock on its file. Other hosts are not checked: not every file system shares locks.
    """
    for index, report in sorted(read(directory).items()):
        if report.state.state == "runs" and report.threads is None and report.state.host == socket.gethostname():
            with contextlib.suppress(OSError), open(directory / f"process-{index}.txt", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return index, f"died in {report.state.phase} without a message (pid {report.state.pid}): it was killed"
    return None


def report(state: ProcessState, text: str) -> Report:
    """Return the report of a process. text: the stacks, which follow the head of the process's file."""
    fatal = FATAL.search(text)
    return Report(state, _threads(text), fatal[1] if fatal else "", text.startswith("Timeout ("))


def _threads(text: str) -> dict[str, list[StackFrame]] | None:
    """Return thread -> frames, innermost first, of the first stacks in the text; None if there are none."""
    threads: dict[str, list[StackFrame]] = {}
    frames = None
    for line in text.splitlines():
        if thread := THREAD.match(line):
            name = thread[1].lstrip("0")
            if name in threads:     # the next stacks begin
                break
            frames = threads[name] = []
        elif frames is not None and (frame := FRAME.match(line)):
            frames.append(StackFrame(*frame.groups()))
    return threads or None


def _in(functions: Sequence[tuple[str, str]], *frames: StackFrame) -> bool:
    """Return whether any of these frames is in one of the functions."""
    return any(frame.file.endswith(file) and function in ("", frame.function)
               for frame in frames for file, function in functions)


def format_stacks(threads: Sequence[tuple[int, str, FrameType | None]]) -> str:
    """Return stacks in faulthandler's format, of any number of threads: (ident, name, innermost frame) of each."""
    lines = []
    for ident, name, frame in threads:
        lines += ["", f"Thread 0x{ident:016x} [{name}] (most recent call first):"]
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
    return "\n".join([*lines[1:], ""])
