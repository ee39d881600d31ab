"""The feed of batches that depend only on their number: documents, or pairs of answers."""
from __future__ import annotations

from collections.abc import Callable

from meshtrain.config import Run
from meshtrain.data.documents import contracts
from meshtrain.data.documents.contracts import Batches
from meshtrain.journal.journal import Journal
from meshtrain.run.hooks import LossValidation
from meshtrain.run.loop import StepBatch, Stop
from meshtrain.training.state import State
from meshtrain.training.step import Program


class BatchFeed:
    """A loop.Feed of `data`, from step `start` on. Threads read batches ahead. complete: adds the arrays of a batch
    that are computed on the devices."""

    def __init__(self, run: Run, program: Program, data: Batches, start: int,
                 complete: Callable[[dict], dict] = lambda batch: batch):
        self.run, self.program, self.data, self.complete = run, program, data, complete
        self.evaluates = len(data.validation) > 0
        self._batches = contracts.iterate(data, start, rows=program.rows)

    def next(self, done: int, state: State, journal: Journal, stop: Stop) -> StepBatch:
        return StepBatch(self.place(next(self._batches)), self.data.tokens(done + 1) - self.data.tokens(done))

    def restart(self, data: Batches, start: int) -> BatchFeed:
        """Return a feed of `data`, from step `start` on, that completes batches in the same way."""
        return BatchFeed(self.run, self.program, data, start, self.complete)

    def place(self, rows: dict) -> dict:
        """Put this process's rows of a batch on its devices, and add the arrays that are computed there."""
        return self.complete(self.program.place(rows))

    def tokens(self, steps: int) -> int:
        return self.data.tokens(steps)

    def position(self, steps: int) -> dict:
        return self.data.position(steps)

    def validation(self, program: Program, stop: Stop) -> LossValidation:
        return LossValidation(self.run, program, self.data, stop)

    def close(self) -> None:
        self._batches.close()
