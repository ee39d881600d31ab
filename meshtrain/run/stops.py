"""Stop requests by SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2.

During the training loop a request is recorded: the loop finishes the step, saves the state, and the process exits with
code 75. Outside the loop the process exits at once: files on disk are always consistent, and a long compilation would
outlast the scheduler's grace period. A thread handles the signal, because handlers in Python wait until C++ returns.
The wakeup descriptor of Python's C handler wakes this thread. Imported before jax.
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
# Schedulers send USR1 or USR2 before the time limit (sbatch --signal=USR1@120). By default they kill a Python process.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals within this time are one request: a terminal that closes sends SIGHUP twice, systemd SIGTERM and SIGHUP.
ONE_REQUEST_S = 1.0
LAST_WORDS_S = 2.0      # longest wait for a message to be printed, in case the reader is blocked
BEFORE_THE_LOOP = "stopped before the first step; run the same command again to start"


def stop_signals() -> tuple[int, ...]:
    """Return the signals that stop this process; under nohup, without SIGHUP."""
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN)


class Listener:
    """Receives stop signals of this process from its creation on. words: the text printed when a signal ends the
    process. number: the number of the signal that requested a stop; None: no request yet."""

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
            return      # e.g. a notebook's worker thread: Python allows signal handlers only in the main thread
        self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, lambda number, frame: None) for number in stop_signals()}

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._old:
            signal.set_wakeup_fd(self._old_wake)
            for number, handler in self._old.items():
                signal.signal(number, handler)
        os.close(self._wake)

    def has_request(self) -> bool:
        return self.number is not None

    def ending(self, finished: bool) -> str:
        """Return how a loop ended without an error, as text for the history. finished: all steps are done."""
        if finished:
            return "finished"
        return (f"stopped on request "
                f"({'to another process' if self.number is None else signal.Signals(self.number).name})")

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Context: record the first stop request in `number`, and end the process at the second one."""
        with self._lock:
            self._deferred, self._code = True, FAILED
        try:
            yield
            if self._speaker is not None:       # print the message before a loop that ends at once ends the process
                self._speaker.join(LAST_WORDS_S)
            self._code = DONE if self.number is None else STOPPED     # the state is saved
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
        with self._lock:        # held until the process ends, so that the loop does not begin meanwhile
            if not self._deferred:
                self._before_ending()
                self._end(f"{name}: {self.words if self._code == STOPPED and self.number is None else 'ended'}")
            if self.number is None:
                # Printed in a separate thread: a blocked reader must not delay the next signal.
                speaker = threading.Thread(target=say.out, daemon=True, args=(
                    f"{name}: finishing this step and saving; a second signal stops at once",))
                speaker.start()
                self._speaker, self._noted_at = speaker, time.monotonic()
                self.number = number        # set last: the loop may end once it is set
            elif time.monotonic() - self._noted_at > ONE_REQUEST_S:
                self._end(f"{name} again: stopped at once, without saving")

    def _end(self, words: str) -> None:
        """Print and record `words`, then call os._exit: no exception would reach the main thread while C++ runs."""
        def speak() -> None:
            say.out(words)
            say.end()
            self._record(words, self._code)
        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        os._exit(self._code)


# Of the process, as signal handlers are: only `listen` sets it. None outside commands.
_listener: Listener | None = None


def listen(words: str = BEFORE_THE_LOOP) -> None:
    """Handle stop signals from here on: the first call of a command. words: printed when a signal ends the command."""
    global _listener
    _listener = Listener(words)


def end_together(meet_the_others: Callable[[], None]) -> None:
    """Set the function that is called before a signal ends this process at once; it must return within seconds."""
    if _listener is not None:
        _listener._before_ending = meet_the_others


def record_endings(record: Callable[[str, int], None]) -> None:
    """Set the function record(words, exit code) that is called when a signal ends this process at once."""
    if _listener is not None:
        _listener._record = record


@contextlib.contextmanager
def defer() -> Iterator[Listener]:
    """Context of the training loop: yields a listener that records stop requests in `number`. Outside a command
    (notebook, test), signals are handled only inside this context."""
    listener = _listener or Listener()
    try:
        with listener.deferring():
            yield listener
    finally:
        if listener is not _listener:
            listener.close()
