"""Progress of training: one live line on a terminal, lines at growing intervals in a file.

A month of training leaves some thousands of lines, its first minute one every few seconds. Skipped steps and
validations are always printed.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from meshtrain.run import say

LIVE_INTERVAL_S = 0.2
FIRST_LINES = 5     # steps that a file has one by one
# (until so many seconds after the first step, at least so many between two lines of a file)
INTERVALS_S = ((60, 10), (600, 30), (3600, 60), (float("inf"), 600))


class Progress:
    """Called with every step. last: the run's last step. memory: () -> bytes in use on a device, or None."""

    def __init__(self, last: int, memory: Callable[[], int | None] = lambda: None,
                 clock: Callable[[], float] = time.monotonic):
        self.last, self.memory, self.clock = last, memory, clock
        self.live = say.on_terminal()
        self.lines, self.began, self.said, self.step_time_s = 0, None, 0.0, None

    def step(self, row: Mapping) -> None:
        """Prints a line for this metrics row, if one is due."""
        time_s = row["step_time_s"]
        self.step_time_s = time_s if self.step_time_s is None else 0.9 * self.step_time_s + 0.1 * time_s
        now = self.clock()
        if self.began is None:
            self.began = now
        if not self._due(now) and row["step"] != self.last:
            return
        self.lines, self.said = self.lines + 1, now
        (say.live if self.live else say.out)(self._line(row))

    def _due(self, now: float) -> bool:
        if self.live:
            return now - self.said >= LIVE_INTERVAL_S
        interval = next(interval for until, interval in INTERVALS_S if now - self.began < until)
        return self.lines < FIRST_LINES or now - self.said >= interval

    def _line(self, row: Mapping) -> str:
        left, held = int((self.last - row["step"]) * self.step_time_s), self.memory() or 0
        memory = f"{held / 2**30:.1f} GiB" if held >= 2**30 else f"{held / 2**20:.0f} MiB"
        parts = [f"step {row['step']}/{self.last}", f"loss {row['loss']:.4f}", f"{row['tokens_per_s']:,.0f} tokens/s",
                 f"mfu {row['mfu']:.1%}" if row["mfu"] else "", memory if held else "",
                 f"{left // 3600}:{left % 3600 // 60:02}:{left % 60:02} left"]
        return "  ".join(filter(None, parts))
