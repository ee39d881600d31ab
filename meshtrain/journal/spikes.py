"""Detection of loss spikes.

A loss is a spike if it is not finite, or exceeds the median of the last losses by more than training.spike_threshold
times their spread (normalized median absolute deviation). The limit of a step is computed from the losses up to two
steps before it, because these are known when the step is dispatched. So every process, layout and resume computes the
same limit. The window of losses is saved with checkpoints.
Source: PaLM rolls back and skips batches after a spike (arXiv:2204.02311, 5.1).
"""
from __future__ import annotations

import math
import statistics

import numpy as np

from meshtrain.config import Run
from meshtrain.journal.rows import Row
from meshtrain.run import say
from meshtrain.training import objective

WINDOW, FEWEST = 128, 16        # number of losses in the window; with fewer than FEWEST, no loss is a spike
LAG = 2                         # steps between the newest loss of the window and the step that it limits
TO_SIGMA = 1.4826               # standard deviation / median absolute deviation of a normal distribution
LEAST_SPREAD = 0.01             # least spread as a share of the median, for losses that no longer change
MAX_ROLLBACKS = 10              # of a run; after this many, other batches do not help


class LossSpike(RuntimeError):
    """The loss of `step` is a spike, and the step has to be rolled back. All processes raise it together."""

    def __init__(self, step: int, loss: float, limit: float):
        super().__init__(f"the loss of step {step} is {describe(loss, limit)}")
        self.step = step


class Spikes:
    """The window of the last losses, the limit for the next loss, and the guard that acts on a spike.

    saved: the result of `as_saved` in the checkpoint that the run resumes from; None: a new run. rollbacks: the number
    of rollbacks, if it is higher than the checkpoint's (a rollback goes back to an older checkpoint).
    """

    def __init__(self, run: Run, saved: dict | None = None, rollbacks: int = 0):
        self.policy = run.training.loss_spike if objective.of_run(run).spikes else "off"
        self.threshold = run.training.spike_threshold
        self.rollbacks = rollbacks or (saved["rollbacks"] if saved else 0)
        self._losses = [(step, loss) for step, loss in saved["losses"]] if saved else []

    def limit(self, step: int) -> float:
        """Return the largest loss of this step that is not a spike; infinity while the window is too short."""
        before = [loss for number, loss in self._losses if number <= step - LAG][-WINDOW:]
        if self.policy == "off" or len(before) < FEWEST:
            return math.inf
        median = statistics.median(before)
        spread = statistics.median(abs(loss - median) for loss in before)
        # The training step compares in float32.
        return float(np.float32(median + self.threshold * max(TO_SIGMA * spread, LEAST_SPREAD * abs(median))))

    def columns(self, step: int, loss: float) -> dict[str, float]:
        """Add a finite loss of a step to the window. Return the columns of its row if it is a spike: the limit."""
        limit = self.limit(step)
        if math.isfinite(loss):
            self._losses = [*self._losses, (step, loss)][-WINDOW - LAG:]
        return {"spike_limit": limit} if loss > limit else {}

    def see(self, row: Row) -> None:
        """Print the row's spike if its update was applied. Raises: LossSpike if the policy is "rollback" and the row
        has a spike or a skipped update."""
        is_spike, limit = "spike_limit" in row, row.get("spike_limit", math.inf)
        if is_spike and not row["skipped"]:
            say.out(f"step {row['step']}: a loss spike, {describe(row['loss'], limit)}")
        if self.policy == "rollback" and (is_spike or row["skipped"]):
            raise LossSpike(row["step"], row["loss"], limit)

    def as_saved(self) -> dict:
        return {"rollbacks": self.rollbacks, "losses": self._losses}


def describe(loss: float, limit: float) -> str:
    if not math.isfinite(loss):
        return f"{loss}"
    return (f"{loss:.4f}, beyond {limit:.4f} (training.spike_threshold)" if loss > limit else
            f"{loss:.4f}, with a gradient that is not finite")
