"""Tells what a command does while it has no results yet: it compiles, reads data, saves.

On a terminal a line with the seconds moves until the phase is over. In a file or pipe a line stands at the phase's
start, and one at its end if it took long. A line that moves says that the process runs, not that it gets on: that is
for the watchdog. Imports no jax.
"""
from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator

from meshtrain.run import say

LONG_S = 5.0        # a phase that takes as long is told at its end
FIRST_S = 0.3       # before the line of a phase begins to move: most end before
FRAME_S = 0.1
OTHERS_S = 1.0      # for which the live line of others stands
FRAMES, ASCII_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"


@contextlib.contextmanager
def phase(words: str, done: str = "") -> Iterator[None]:
    """Context: tell what is being done. words: e.g. "compiling". done: words for the end, told with the seconds however
    few they are."""
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
    """Context: on a terminal, a line that moves; elsewhere nothing is printed. Inside another, this one is shown."""
    if not say.is_live():
        yield
        return
    with Moving(words):
        yield


def begin(words: str) -> None:
    """Begin a line that moves until `end`, where there is a terminal."""
    if say.is_live():
        _begun.append(Moving(words))


def end() -> None:
    """End what `begin` has begun, if anything."""
    while _begun:
        _begun.pop().close()


class Moving(contextlib.AbstractContextManager):
    """A line that moves until it is closed. Other live lines, say of bytes that were read, stand in its place."""

    _shown: list[Moving] = []        # the innermost last

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
            if self._shown[-1:] == [self] and not say.has_live(OTHERS_S):
                say.live(f"{next(frames)} {self._words} {int(time.monotonic() - self._began)} s", passing=True)

    def close(self) -> None:
        """Erase the line. A second call has no effect."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(say.LOCK_S)      # unless the terminal takes nothing
            self._shown.remove(self)
            say.erase_passing()

    def __exit__(self, *_) -> None:
        self.close()


_begun: list[Moving] = []
