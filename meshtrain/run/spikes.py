"""Loss spikes: which loss is one, and the rollback before it.

A loss is a spike if it is not finite, or exceeds the median of the last losses by more than training.spike_threshold
times their spread (normalized median absolute deviation). The limit of a step comes from the losses up to two steps
before it, which are known when it is dispatched, so that every process, layout and resume computes the same one. The
window is saved with checkpoints.
Source: rolling back and skipping batches is PaLM's remedy (arXiv:2204.02311, 5.1).
"""
from __future__ import annotations

import math
import statistics

import numpy as np

from meshtrain.config import Run

WINDOW, FEWEST = 128, 16        # losses that the median is of; before there are so few nothing is a spike
LAG = 2                         # steps
TO_SIGMA = 1.4826               # of the median absolute deviation, where the losses are normally distributed
LEAST_SPREAD = 0.01             # of the median: a loss that has come to rest has none of its own
MAX_ROLLBACKS = 10              # of a run; by then it is no matter of batches


class LossSpike(RuntimeError):
    """A step to be rolled back. Every process raises it alike. step, loss, limit."""

    def __init__(self, step: int, loss: float, limit: float):
        super().__init__(f"the loss of step {step} is {described(loss, limit)}")
        self.step, self.loss, self.limit = step, loss, limit


class TooManyRollbacks(RuntimeError):
    """The run has reached its maximum number of rollbacks."""


class Spikes:
    """The window of losses, and the limit of the next one.

    saved: of `as_saved`, from the checkpoint that the run resumes from; None: a new run. rollbacks: how many there
    were, where that checkpoint is older than the last.
    """

    def __init__(self, run: Run, saved: dict | None = None, rollbacks: int = 0):
        # the loss of "rl" is around 0, whatever is learned
        self.policy = "off" if run.training.objective == "rl" else run.training.loss_spike
        self.threshold = run.training.spike_threshold
        self.rollbacks = rollbacks or (saved["rollbacks"] if saved else 0)
        self._losses = [tuple(one) for one in saved["losses"]] if saved else []

    def limit(self, step: int) -> float:
        """The largest loss of this step that is not a spike; infinite while the window is too short."""
        before = [loss for number, loss in self._losses if number <= step - LAG][-WINDOW:]
        if self.policy == "off" or len(before) < FEWEST:
            return math.inf
        median = statistics.median(before)
        spread = statistics.median(abs(loss - median) for loss in before)
        # As the step compares them, where it does: in float32.
        return float(np.float32(median + self.threshold * max(TO_SIGMA * spread, LEAST_SPREAD * abs(median))))

    def seen(self, step: int, loss: float) -> None:
        if math.isfinite(loss):
            self._losses = [*self._losses, (step, loss)][-WINDOW - LAG:]

    def as_saved(self) -> dict:
        return {"rollbacks": self.rollbacks, "losses": self._losses}


def described(loss: float, limit: float) -> str:
    if not math.isfinite(loss):
        return f"{loss}"
    return (f"{loss:.4f}, beyond {limit:.4f} (training.spike_threshold)" if loss > limit else
            f"{loss:.4f}, with a gradient that is not finite")
