"""The loss on the held-out split, as a hook of the loop: mean nats per target token over a fixed number of batches."""
from __future__ import annotations

import jax

from meshtrain.config import Run
from meshtrain.data.packing import Data
from meshtrain.run import say
from meshtrain.run.loop import Hook, Stop
from meshtrain.training.state import State
from meshtrain.training.step import Program


class Validation:
    """`loss` is the last one measured, None before. A validation that fails in a run of one process is told and left out."""

    def __init__(self, run: Run, program: Program, data: Data, stop: Stop):
        self.program, self.data, self.stop = program, data, stop
        self.every, self.last = run.validation.every, run.training.steps
        self.batches = min(run.validation.batches, data.num_validation_batches)
        self.loss: float | None = None

    def hook(self) -> Hook:
        return Hook(self._due, self._act, after_row=False)

    def _due(self, step: int, ending: bool) -> bool:
        regular = step == self.last or self.every > 0 and step % self.every == 0
        return regular and self.batches > 0 and not self.stop.agreed

    def _act(self, step: int, state: State) -> dict[str, float]:
        try:
            loss = self._measure(state)
        except Exception as error:
            if jax.process_count() > 1:     # alone it would wait for the others in the next step, and they for it here
                raise
            say.err(f"step {step}: the validation failed and is left out: {type(error).__name__}: {error}")
            return {}
        if loss is None:
            say.out(f"step {step}: its validation is given up, to stop")
            return {}
        self.loss = loss
        say.out(f"step {step}: validation loss {loss:.4f} nats per token")
        return {"val_loss": loss}

    def _measure(self, state: State) -> float | None:
        """None where the run is to stop before it is done."""
        total = count = 0.0
        for i in range(self.batches):
            if self.stop.reached():
                return None
            batch = self.program.place(self.data.validation_batch(i, self.program.rows))
            nll, targets = self.program.evaluate(state.params, batch)
            total, count = total + float(nll), count + int(targets)
        return total / max(count, 1)
