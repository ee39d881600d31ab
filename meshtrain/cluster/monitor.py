"""A small monitor process beside each process of a run. The monitor ends the watched process if no Python code can run
there because a call holds the interpreter's lock. Then no thread of the watched process can end the process.

A timer of wall time must not end a process: a process that was stopped (SIGSTOP, scontrol suspend, docker pause, a
debugger) would end when it is continued. So the monitor counts only seconds in which the watched process was not
stopped and the monitor itself ran. faulthandler writes the stacks in a signal handler, which does not need the lock.
The monitor sends the signal only before it ends the process, because walking the frames of running threads can crash.
The exit code is 1: glibc calls _exit as soon as a byte arrives in a pipe. This file is also the monitor's program; it
imports only the standard library.
"""
from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

LOOK_S = 1.0
SLOWEST = 20        # the clock of a starved process runs at least at 1 / SLOWEST of its speed
STACKS_S = 2.0      # time limit of the signal handler
STACKS = signal.SIGRTMIN + 9        # the signal
STUCK_S = 3.0       # time limit for a write to a file system or a terminal that may hang
EXIT_S = 2.0        # from the byte to SIGKILL
MOST_STACKS = 1 << 20
SIGEV_THREAD = 2
SET_PARENT_DEATH_SIGNAL = 1     # of prctl
TIMEOUT = b"Timeout (no thread of Python runs)!\n"      # begins like faulthandler's own line, see `stacks`


class Clock:
    """Counts the seconds in which this process runs. A thread must call `look` every `look_s` seconds. A longer time
    between two calls counts as 2 * look_s, because the process was stopped or starved. If the process used a CPU for
    less than half of the time, and another of its threads is ready to run, only the CPU time counts, but at least
    1 / SLOWEST of the time."""

    def __init__(self, look_s: float):
        self.most_s = 2 * look_s
        self._last, self._cpu_s = (0.0, time.monotonic()), time.process_time()

    def now(self) -> float:
        """Return the counted seconds since the clock was made."""
        counted, looked = self._last
        return counted + min(time.monotonic() - looked, self.most_s)

    def look(self) -> float:
        at, cpu_s = time.monotonic(), time.process_time()
        passed, ran = min(at - self._last[1], self.most_s), cpu_s - self._cpu_s
        if ran < passed / 2 and other_thread_is_ready():
            passed = max(ran, passed / SLOWEST)
        self._last, self._cpu_s = (self._last[0] + passed, at), cpu_s
        return self._last[0]


def other_thread_is_ready() -> bool:
    """Return whether another thread of this process has a CPU or waits for one; False if the kernel does not tell."""
    with contextlib.suppress(OSError):      # Linux only
        for thread in set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}:
            if _state(f"self/task/{thread}") == "R":
                return True
    return False


def within(limit_s: float, function: Callable[[], object]) -> None:
    """Call function() in a thread and wait at most limit_s seconds. Its exceptions are ignored."""
    def quietly():
        with contextlib.suppress(Exception):
            function()
    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(limit_s)


# ---- in the watched process ------------------------------------------------------------------------------------------


class Monitor:
    """The watched process's side of its monitor. head: bytes before the stacks in a stack file. tell: prints a line."""

    def __init__(self, head: int, tell: Callable[[str], None]):
        self.head, self.tell = head, tell
        self._stacks = tempfile.TemporaryFile()     # faulthandler writes it, the monitor reads it
        # gets the signal, which interrupts the thread's system call
        self.thread: int | None = threading.get_native_id()
        faulthandler.register(STACKS, self._stacks)
        self._process: subprocess.Popen | None = None
        self._target: int | None = -1
        self._last = b""
        self.keep()

    def keep(self) -> None:
        """Start the monitor if it is not running."""
        if self._target is None or self._process and self._process.poll() is None:
            return
        try:
            source, target = os.pipe()
            os.set_blocking(target, False)
            before, self._target = self._target, target
            with contextlib.suppress(OSError):
                os.close(before)
            self._send()        # waits in the pipe: a hang while the monitor starts is noticed, too
            with os.fdopen(source):
                passed = [source, self._stacks.fileno(), _exit_pipe()[0]]
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, *map(str, (os.getpid(), *passed, self.head))],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed, start_new_session=True)
        except OSError as error:        # no process can be started
            self._target = None
            self.tell(f"warning: the monitor of this process cannot be started ({error}): a hang that holds the "
                      f"interpreter's lock will not end the process")

    def expect(self, left_s: float, words: str, path: str) -> None:
        """End this process unless the next call comes within left_s seconds (inf: never). words: a description of the
        hang for the terminal. path: the file for the stacks; empty: the stacks also go to the terminal."""
        if self._stacks.closed:     # a thread has outlived the command
            return
        self._last = json.dumps([left_s, words, path, self.thread]).encode() + b"\n"
        self._send()

    def _send(self) -> None:
        with contextlib.suppress(OSError, TypeError):      # the pipe is full, or the monitor has died
            os.write(self._target, self._last)

    def close(self) -> None:
        faulthandler.unregister(STACKS)
        self._stacks.close()
        if self._target is not None:
            os.close(self._target)
        self._target = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
            self._process.kill()
            self._process.wait()


class _Sigevent(ctypes.Structure):
    """struct sigevent of glibc on 64-bit machines."""
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
                ("function", ctypes.c_void_p), ("rest", ctypes.c_char * 40)]


class _Aiocb(ctypes.Structure):
    _fields_ = [("fildes", ctypes.c_int), ("opcode", ctypes.c_int), ("priority", ctypes.c_int),
                ("buffer", ctypes.c_void_p), ("nbytes", ctypes.c_size_t), ("event", _Sigevent),
                ("rest", ctypes.c_char * 128)]


@functools.cache
def _exit_pipe() -> tuple[int, object]:
    """Return (the writing end of a pipe, memory that must stay allocated). A byte in the pipe ends this process with
    exit code 1, even while the interpreter's lock is held. Both ends stay open. Without glibc nothing reads the pipe,
    and SIGKILL ends the process."""
    source, target = os.pipe()
    buffer = ctypes.create_string_buffer(1)
    request = _Aiocb(fildes=source, buffer=ctypes.addressof(buffer), nbytes=1)
    if platform.libc_ver()[0] == "glibc" and sys.maxsize > 2**32:
        libc = ctypes.CDLL(None)
        request.event = _Sigevent(value=1, notify=SIGEV_THREAD, function=ctypes.cast(libc._exit, ctypes.c_void_p))
        libc.aio_read(ctypes.byref(request))
    return target, (request, buffer)


# ---- the monitor's process -------------------------------------------------------------------------------------------


def main(parent: int, source: int, stacks: int, ending: int, head: int) -> None:
    with contextlib.suppress(AttributeError):       # Linux only: a stopped monitor cannot see that its parent ended
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)       # it ends with the watched process
    poll, clock, received = select.poll(), Clock(LOOK_S), b""
    poll.register(source, select.POLLIN)
    left_s, words, path, thread = float("inf"), "", "", parent
    while os.getppid() == parent:
        began = clock.look()
        if poll.poll(1000 * max(min(LOOK_S, left_s), 0.01)):
            if not (data := os.read(source, 1 << 16)):
                return
            *lines, received = (received + data).split(b"\n")
            if lines:
                left_s, words, path, thread = json.loads(lines[-1])
        elif not is_stopped(parent):
            left_s -= clock.look() - began
            if left_s <= 0:
                end(parent, _stacks_of(parent, thread, stacks), words, path, ending, head)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped now (SIGSTOP, a debugger), according to the kernel."""
    return _state(str(pid)) in ("T", "t")


def _state(of: str) -> str:
    """Return the state of a process or thread as a letter (R, S, T); "" if the kernel does not tell. of: in /proc."""
    with contextlib.suppress(OSError), open(f"/proc/{of}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _stacks_of(parent: int, thread: int, stacks: int) -> bytes:
    """Return the stacks that faulthandler writes in a thread of the watched process, after the line TIMEOUT."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):         # glibc from 2.30 on
        libc.tgkill(parent, thread, int(STACKS))
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, STACKS)
    text, until = b"", time.monotonic() + STACKS_S
    while time.monotonic() < until:
        time.sleep(0.1)
        before, text = text, os.pread(stacks, MOST_STACKS, 0)
        if text and text == before:
            break
    return TIMEOUT + text


def end(parent: int, stacks: bytes, words: str, path: str, ending: int, head: int) -> None:
    """End the watched process. Print `words`, and write the stacks to `path`; if `path` is empty, print them, too."""
    def speak():
        place = path if path else "\n" + stacks.decode(errors="replace")
        os.write(2, f"error: {words}; its stacks: {place}\n".encode())

    def write():
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), stacks, head)
            os.fsync(file.fileno())         # other hosts read it
    for act in (write, speak) if path else (speak,):
        within(STUCK_S, act)
    os.write(ending, b"x")
    time.sleep(EXIT_S)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
