"""Stop requests: SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, at any moment of a command.

During the training loop a request is noted: the step finishes, the state is saved, exit code 75. Outside the loop the
process exits at once: files on disk are always consistent, and a long compilation would outlast the scheduler's grace
period. A thread does that, woken by C's handler, because Python's handlers wait until C++ returns. Imported before jax.
"""
from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from meshtrain.run import say

DONE, FAILED, USER_ERROR, DOES_NOT_FIT, STOPPED = 0, 1, 2, 3, 75     # exit codes
# USR1 and USR2: schedulers warn by them of the time limit (sbatch --signal=USR1@120); Python alone dies of them
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# a terminal that closes sends SIGHUP twice, systemd SIGTERM and SIGHUP: that is no second request
ONE_REQUEST_S = 1.0
LAST_WORDS_S = 2.0      # for a reader that is stuck
BEFORE_THE_LOOP = "stopped before the first step; the same command starts again"


def heeded() -> tuple[int, ...]:
    """The signals that stop this process; SIGHUP is not one under nohup."""
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN)


class Listener:
    """Receives this process's signals from now on. `number`: of the signal that asked for a stop; None: none has."""

    def __init__(self, words: str = BEFORE_THE_LOOP):
        self.words = words
        self.number: int | None = None
        self._noted_at = 0.0
        self._speaker: threading.Thread | None = None
        self._deferred, self._code = False, STOPPED
        self._lock = threading.Lock()
        self._before_ending: Callable[[], None] = lambda: None
        self._record: Callable[[str, int], None] = lambda words, code: None
        self._old = {}
        woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        threading.Thread(target=self._watch, args=(woken,), daemon=True, name="stops").start()
        if threading.current_thread() is not threading.main_thread():
            return      # a notebook's worker: Python allows handlers in the main thread alone
        self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, lambda number, frame: None) for number in heeded()}

    def close(self) -> None:
        """Restores the signal handlers of before."""
        if self._old:
            signal.set_wakeup_fd(self._old_wake)
            for number, handler in self._old.items():
                signal.signal(number, handler)
        os.close(self._wake)

    def ending(self, finished: bool) -> str:
        """How a loop ended that went to its end, for the history."""
        if finished:
            return "finished"
        return (f"stopped on request "
                f"({'to another process' if self.number is None else signal.Signals(self.number).name})")

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Context manager: record the first request to stop, and end the process at the second one."""
        with self._lock:
            self._deferred, self._code = True, FAILED
        try:
            yield
            if self._speaker is not None:       # or a loop that ends at once takes the words along
                self._speaker.join(LAST_WORDS_S)
            self._code = DONE if self.number is None else STOPPED     # all is saved
        finally:
            self._deferred = False

    def _watch(self, woken: int) -> None:
        while numbers := os.read(woken, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._receive(number)
        os.close(woken)

    def _receive(self, number: int) -> None:
        name = signal.Signals(number).name
        with self._lock:        # held to the end: the loop does not begin while we leave
            if not self._deferred:
                self._before_ending()
                self._end(f"{name}: {self.words if self._code == STOPPED and self.number is None else 'ended'}")
            if self.number is None:
                # In a thread of its own: a reader that is stuck must not keep the next signal waiting.
                speaker = threading.Thread(target=say.out, daemon=True, args=(
                    f"{name}: finishing this step and saving; once more stops at once",))
                speaker.start()
                self._speaker, self._noted_at = speaker, time.monotonic()
                self.number = number        # last: from here on the loop may end
            elif time.monotonic() - self._noted_at > ONE_REQUEST_S:
                self._end(f"{name} again: ended at once, without saving")

    def _end(self, words: str) -> None:
        """Ends the process. Not by an exception: nothing raised in the main thread reaches it while C++ runs."""
        speaker = threading.Thread(target=lambda: (say.out(words), say.end(), self._record(words, self._code)),
                                   daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        os._exit(self._code)


_listener: Listener | None = None      # of a command, from its beginning


def listen(words: str = BEFORE_THE_LOOP) -> None:
    """First call of a command: from here on a signal ends it in order. words: printed then."""
    global _listener
    _listener = Listener(words)


def end_together(meet_the_others: Callable[[], None]) -> None:
    """Sets what a process calls before it exits at once, now that it has peers; it must return within seconds."""
    if _listener is not None:
        _listener._before_ending = meet_the_others


def record_endings(record: Callable[[str, int], None]) -> None:
    """record: (words, exit code) -> None, called where a signal ends this process at once."""
    if _listener is not None:
        _listener._record = record


@contextlib.contextmanager
def deferred() -> Iterator[Listener]:
    """Context of the training loop: requests are noted in `number`. Outside a command (notebook, test) signals are
    handled only within it."""
    listener = _listener or Listener()
    try:
        with listener.deferring():
            yield listener
    finally:
        if listener is not _listener:
            listener.close()
