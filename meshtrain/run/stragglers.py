"""Finds a straggler: the process whose host dispatches late in most steps, while all devices wait for it.

Each process sends with the agreement to stop how long its own devices were idle until it came. One late step is a
hiccup (garbage collection, disk). A slow device is not found: its host is on time.
"""
from __future__ import annotations

import collections
import statistics

WINDOW, MOSTLY = 10, 8      # steps that are looked at, and of how many of them a straggler is the latest
SHARE = 0.05                # of a step's time that it costs


class Stragglers:
    """Called with every step. named: (process, seconds it costs per step, share of a step); None: no straggler."""

    def __init__(self):
        self.named: tuple[int, float, float] | None = None
        self._late: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=WINDOW)

    def step(self, late: tuple[int, float] | None, step_time_s: float) -> bool:
        """late: of `agree.StopAgreement`; where that is not known, the step says nothing.
        Returns whether somebody is named anew."""
        if late is None:
            return False
        before, self.named = self.named and self.named[0], None
        self._late.append((*late, step_time_s))
        if len(self._late) == WINDOW:
            process = collections.Counter(process for process, _, _ in self._late).most_common(1)[0][0]
            own = [late_s for index, late_s, _ in self._late if index == process]
            costs_s, step_s = statistics.median(own), statistics.median(taken for _, _, taken in self._late)
            if len(own) >= MOSTLY and costs_s > SHARE * step_s:
                self.named = process, costs_s, min(1.0, costs_s / step_s)
        return self.named is not None and self.named[0] != before
