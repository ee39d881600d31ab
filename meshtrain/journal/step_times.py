"""Measures how long steps take, without pauses: from end to end on the device, as seen by the host."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple


class StepEnd(NamedTuple):
    """The end of a step on the device. seen: time at which the host knew of it. late_s: the largest delay in seconds
    between the end and `seen`; 0 within the clock's resolution."""
    seen: float
    late_s: float = 0.0


class SinceRow(NamedTuple):
    """Steps since the last written row: their number, tokens and seconds."""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


class StepTimes:
    """The times of steps. last_s: seconds of the last step; None: no step has ended. since_row: see `SinceRow`."""

    def __init__(self):
        self.last_s: float | None = None
        self.since_row = SinceRow()
        self._mark, self._late_s = time.perf_counter(), 0.0     # the end of the step before, and how late it was seen
        self._paused_s, self._paused_until = 0.0, 0.0

    @contextlib.contextmanager
    def pause(self, running: Future[StepEnd] | None) -> Iterator[None]:
        """Context: a pause between two steps, which begins when the step `running` ends; None: now."""
        began = time.perf_counter() if running is None else max(running.result().seen, self._paused_until)
        try:
            yield
        finally:
            self._paused_until = time.perf_counter()
            self._paused_s += self._paused_until - began

    def take_paused_s(self) -> float:
        """Return the seconds of the pauses since the last call."""
        paused_s, self._paused_s = self._paused_s, 0.0
        return paused_s

    def add_step(self, ended: StepEnd, tokens: int, paused_s: float) -> float:
        """Add the next step; return its seconds. paused_s: the pauses between the previous step and this one."""
        took_s = max(ended.seen - self._mark - paused_s, 1e-9)
        since = self.since_row
        # The step may have begun before the end of the one before was seen, unless the device paused between the two.
        early_s = self._late_s if not since.steps and not paused_s else 0.0
        self.since_row = SinceRow(since.steps + 1, since.tokens + tokens, since.seconds + took_s + early_s)
        self._mark, self._late_s, self.last_s = ended.seen, ended.late_s, took_s
        return took_s

    def begin_row(self) -> None:
        """Count from the next step on."""
        self.since_row = SinceRow()
