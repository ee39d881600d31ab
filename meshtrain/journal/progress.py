"""Prints the progress of training: lines at growing intervals and, on a terminal, a live line between them.

The first minute has a line every few seconds, a month of training some thousands of lines. Skipped steps and
validations are always printed.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from meshtrain.run import phases, say
from meshtrain.units import size

LIVE_INTERVAL_S = 0.2
FIRST_LINES = 5     # each of the first steps has a line
# (seconds after the first step up to which the interval holds, least seconds between two lines)
INTERVALS_S = ((60, 10), (600, 30), (3600, 60), (float("inf"), 600))


class Progress(contextlib.AbstractContextManager):
    """Prints lines for steps. Inside its context, a terminal shows an animated line until the first step.

    last: the run's last step. memory: returns the bytes in use on a device, or None. clock: returns seconds.
    """

    def __init__(self, last: int, memory: Callable[[], int | None] = lambda: None,
                 clock: Callable[[], float] = time.monotonic):
        self.last, self.memory, self.clock = last, memory, clock
        self.live = say.is_live()
        self.lines, self.said, self.shown = 0, 0.0, 0.0
        self.began: float | None = None
        self.step_time_s: float | None = None
        self._waiting = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        self._waiting.enter_context(phases.moving("taking the first step"))
        return self

    def __exit__(self, *_) -> None:
        self._waiting.close()

    def step(self, row: Mapping) -> None:
        """Print a line for this metrics row, if one is due; else update the live line on a terminal."""
        self._waiting.close()
        time_s = row["step_time_s"]
        self.step_time_s = time_s if self.step_time_s is None else 0.9 * self.step_time_s + 0.1 * time_s
        now = self.clock()
        if self.began is None:
            self.began = now
        interval = next(interval for until, interval in INTERVALS_S if now - self.began < until)
        if self.lines < FIRST_LINES or now - self.said >= interval or row["step"] == self.last:
            self.lines, self.said, self.shown = self.lines + 1, now, now
            say.out("  ".join(self._parts(row)))
        elif self.live and now - self.shown >= LIVE_INTERVAL_S:
            self.shown = now
            say.live(fit_width(self._parts(row), say.width()))

    def _parts(self, row: Mapping) -> list[str]:
        left, held = int((self.last - row["step"]) * self.step_time_s), self.memory() or 0
        return list(filter(None, [
            f"step {row['step']}/{self.last}", f"loss {row['loss']:.4f}",
            f"{left // 3600}:{left % 3600 // 60:02}:{left % 60:02} left",
            f"{row['tokens_per_s']:,.0f} tokens/s", f"mfu {row['mfu']:.1%}" if row["mfu"] else "",
            size(held) if held else ""]))


def fit_width(parts: list[str], width: int) -> str:
    """Return as many of the first parts as fit into `width` characters, joined; at least the first one."""
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)
