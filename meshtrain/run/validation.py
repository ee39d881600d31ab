"""The validation loss, as a hook of the loop: mean nats per target token over a fixed number of held-out batches.

With several sources each is measured separately; the total is their mean by weight in the mixture.
"""
from __future__ import annotations

import jax

from meshtrain.config import Run
from meshtrain.data.documents.contracts import Batches, ValidationSet
from meshtrain.run import say
from meshtrain.run.loop import Hook, Stop
from meshtrain.training.state import State
from meshtrain.training.step import Program


class ValidationHook:
    """`loss` is the last value, None before the first. In a run of one process a validation that fails is reported and
    skipped."""

    def __init__(self, run: Run, program: Program, data: Batches, stop: Stop):
        self.program, self.sets, self.stop = program, data.validation, stop
        self.batches, self.every, self.last = run.validation.batches, run.validation.every, run.training.steps
        self.unit = "a pair" if run.training.objective == "dpo" else "nats per token"
        self.loss: float | None = None

    def hook(self) -> Hook:
        return Hook(self._due, self._act, after_row=False, part="validation")

    def _due(self, step: int, ending: bool) -> bool:
        regular = step == self.last or self.every > 0 and step % self.every == 0
        return regular and len(self.sets) > 0 and not self.stop.agreed

    def _act(self, step: int, state: State) -> dict[str, float]:
        try:
            losses = [self._measure(state, held) for held in self.sets]
        except Exception as error:
            if jax.process_count() > 1:     # alone it would wait for the others in the next step, and they for it here
                raise
            say.err(f"step {step}: the validation failed and is left out: {type(error).__name__}: {error}")
            return {}
        if None in losses:
            say.out(f"step {step}: its validation is given up, to stop")
            return {}
        self.loss = sum(held.weight * loss for held, loss in zip(self.sets, losses))
        each = {held.name: loss for held, loss in zip(self.sets, losses)} if len(self.sets) > 1 else {}
        told = f" ({', '.join(f'{name} {loss:.4f}' for name, loss in each.items())})" if each else ""
        say.out(f"step {step}: validation loss {self.loss:.4f} {self.unit}{told}")
        return {"val_loss": self.loss} | {f"val_loss/{name}": loss for name, loss in each.items()}

    def _measure(self, state: State, held: ValidationSet) -> float | None:
        """None if the run is asked to stop before it is done."""
        total = count = 0.0
        for i in range(min(self.batches, held.num_batches)):
            if self.stop.reached():
                return None
            nll, targets = self.program.evaluate(state.params, self.program.place(held.batch(i, self.program.rows)))
            total, count = total + float(nll), count + int(targets)
        return total / max(count, 1)
