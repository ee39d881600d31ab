"""Hooks of the loop between two steps: the validation loss, and a profiler trace of some steps.

The loss is the mean of nats per target token over a fixed number of held-out batches. With several sources each is
measured separately; the total is their mean by weight in the mixture. The trace is written where TensorBoard looks for
one; the device is idle at both of its ends, so it holds these steps alone, and one that fails never stops the run.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain.config import Run
from meshtrain.data.documents.contracts import Batches, ValidationSet
from meshtrain.run import say
from meshtrain.run.loop import Hook, NoBatch, Stop
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
        by_source = f" ({', '.join(f'{name} {loss:.4f}' for name, loss in each.items())})" if each else ""
        say.out(f"step {step}: validation loss {self.loss:.4f} {self.unit}{by_source}")
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


class RewardValidation(ValidationHook):
    """The mean reward of an answer to each held-out prompt. rollouts: `run.rollouts.Rollouts`. `loss` is the reward."""

    def __init__(self, run: Run, rollouts, stop: Stop):
        self.rollouts, self.sets, self.stop, self.loss = rollouts, rollouts.prompts.held, stop, None
        self.every, self.last = run.validation.every, run.training.steps

    def _act(self, step: int, state: State) -> dict[str, float]:
        try:
            numbers, count = self.rollouts.validate(state)
        except NoBatch:
            say.out(f"step {step}: its validation is given up, to stop")
            return {}
        self.loss = numbers["val_reward"]
        say.out(f"step {step}: validation reward {self.loss:.4f} ± {numbers['val_reward_error']:.4f}, of {count} "
                f"answers")
        return numbers


class Trace:
    """The trace of `steps` (first, last; from 1, both included; empty: none) of a run that resumes after step `after`.

    Written to directory/plugins/profile by the first process, of its own devices. A resume between first and last
    traces the rest. It ends with the context if the run ends before `last`.
    """

    def __init__(self, steps: Sequence[int], directory: Path, after: int):
        self.directory, self.after, self.running = directory, after, False
        self.first, self.last = max(steps[0], after + 1) if steps else 0, steps[1] if steps else 0
        if self.last < self.first or jax.process_index():
            self.first = self.last = 0

    def hook(self) -> Hook:
        return Hook(lambda step, ending: self.first > 0 and step in (self.first - 1, self.last), self._act)

    def _act(self, step: int, state: State) -> dict:
        jax.block_until_ready(state)
        (self._stop if step == self.last else self._start)()
        return {}

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # every Python call would be an event: slower steps, and a trace too long to open
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self.directory, create_perfetto_trace=True, profiler_options=options)
            self.running = True
        except Exception as error:
            say.err(f"metrics.profile_steps: no profile can be taken: {error}")

    def _stop(self) -> None:
        if not self.running:
            return
        self.running = False
        try:
            jax.profiler.stop_trace()
            where = max((self.directory / "plugins" / "profile").iterdir())   # named by their times
            say.out(f"profile from step {self.first}: tensorboard --logdir {self.directory} (with the package xprof), "
                    f"or {where}/perfetto_trace.json.gz in ui.perfetto.dev")
        except Exception as error:
            say.err(f"metrics.profile_steps: the profile could not be written: {error}")

    def __enter__(self) -> Trace:
        if self.first and self.first == self.after + 1:     # no step before it whose hook could begin it
            self._start()
        return self

    def __exit__(self, *_):
        self._stop()
