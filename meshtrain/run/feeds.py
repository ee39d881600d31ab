"""The feed of batches that depend only on their number: documents, or pairs of answers."""
from __future__ import annotations

from meshtrain.config import Run
from meshtrain.data.documents import contracts
from meshtrain.data.documents.contracts import Batches
from meshtrain.journal.journal import Journal
from meshtrain.run.hooks import LossValidation
from meshtrain.run.loop import StepBatch, Stop
from meshtrain.training.state import State
from meshtrain.training.step import Program


class BatchFeed:
    """A loop.Feed of `data`, from step `start` on. Threads read batches ahead."""

    def __init__(self, run: Run, program: Program, data: Batches, start: int):
        self.run, self.program, self.data = run, program, data
        self.evaluates = len(data.validation) > 0
        self._batches = contracts.iterate(data, start, rows=program.rows)

    def next(self, done: int, state: State, journal: Journal, stop: Stop) -> StepBatch:
        return StepBatch(self.program.place(next(self._batches)), self.data.tokens(done + 1) - self.data.tokens(done))

    def tokens(self, steps: int) -> int:
        return self.data.tokens(steps)

    def position(self, steps: int) -> dict:
        return self.data.position(steps)

    def validation(self, program: Program, stop: Stop) -> LossValidation:
        return LossValidation(self.run, program, self.data, stop)

    def close(self) -> None:
        self._batches.close()
