"""Shows what a command is doing before it has results: compiling, reading data, saving.

On a terminal, an animated line shows the phase and its seconds until the phase ends. In a file or pipe, one line is
printed when the phase starts, and another when it ends if it took long. The animation shows only that the process is
alive; the watchdog checks that it makes progress. Imports no jax.
"""
from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator

from meshtrain.run import say

LONG_S = 5.0        # the end of a phase is printed if it took this long
FIRST_S = 0.3       # delay before the animated line appears; most phases end before
FRAME_S = 0.1
OTHERS_S = 1.0      # for this long after another live line was printed, the animated line does not replace it
FRAMES, ASCII_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"


@contextlib.contextmanager
def phase(words: str, done: str = "") -> Iterator[None]:
    """Context: show a phase. words: e.g. "compiling". done: text to print with the seconds at the end; "": the end is
    printed only if the phase took at least LONG_S."""
    if not say.is_live():
        say.out(words)
    began = time.perf_counter()
    with moving(words):
        yield
    took_s = time.perf_counter() - began
    if done or took_s >= LONG_S:
        say.out(f"{done or f'{words} took'} {took_s:.1f} s")


@contextlib.contextmanager
def moving(words: str) -> Iterator[None]:
    """Context: on a terminal, show an animated line; elsewhere print nothing. If nested, the innermost is shown."""
    if not say.is_live():
        yield
        return
    with Moving(words):
        yield


def begin(words: str) -> None:
    """On a terminal, start an animated line that runs until `end`."""
    if say.is_live():
        _begun.append(Moving(words))


def end() -> None:
    """Close the lines that `begin` started."""
    while _begun:
        _begun.pop().close()


class Moving(contextlib.AbstractContextManager):
    """An animated line, shown until it is closed. It gives way to other live lines, e.g. a count of bytes read."""

    _shown: list[Moving] = []        # open lines; the innermost is last and is the one shown

    def __init__(self, words: str):
        self._words, self._began, self._closed = words, time.monotonic(), threading.Event()
        self._shown.append(self)
        self._thread = threading.Thread(target=self._move, daemon=True, name="moving line")
        self._thread.start()

    def _move(self) -> None:
        frames = itertools.cycle(FRAMES if "utf" in (getattr(sys.stdout, "encoding", "") or "").lower()
                                 else ASCII_FRAMES)
        wait_s = FIRST_S
        while not self._closed.wait(wait_s):
            wait_s = FRAME_S
            if self._shown[-1:] == [self]:
                say.live(f"{next(frames)} {self._words} {int(time.monotonic() - self._began)} s", passing=True,
                         after_s=OTHERS_S)

    def close(self) -> None:
        """Erase the line. A second call has no effect."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(say.LOCK_S)      # limited, since the terminal may be blocked
            self._shown.remove(self)
            say.erase_passing()

    def __exit__(self, *_) -> None:
        self.close()


_begun: list[Moving] = []
