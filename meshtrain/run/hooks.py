"""Hooks of the loop between two steps: validation, traces, the check of replicas. `checkpoint.places` has those that
save, `huggingface.weights.exports` the one that exports.

The validation loss is the mean of nats per target token over a fixed number of held-out batches. With several sources,
each source is measured separately, and the total is the mean of the sources, weighted as in the mixture. The trace is
written to the place where TensorBoard's profiler plugin reads it. The device is idle when a trace begins and ends, so
the trace contains only its steps. A failed trace never stops the run.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from meshtrain import lazy
from meshtrain.config import Run
from meshtrain.data.documents.contracts import Batches, ValidationSet
from meshtrain.run import say
from meshtrain.run.loop import Hook, NoBatch, Stop
from meshtrain.run.replicas import Replicas
from meshtrain.training import average, objective
from meshtrain.training.state import State
from meshtrain.training.step import Program


class LossValidation(Hook):
    """Measures the validation loss every validation.every steps and after the last step.

    loss: the last value; None before the first. In a run of one process, a failed validation is reported and skipped.
    """

    after_row, part = False, "validation"

    def __init__(self, run: Run, program: Program, data: Batches, stop: Stop):
        self.program, self.sets, self.stop = program, data.validation, stop
        self.batches, self.every, self.last = run.validation.batches, run.validation.every, run.training.steps
        self.unit, self.averages = objective.of_run(run).unit, run.training.ema > 0
        self.loss: float | None = None

    def due(self, step: int, ending: bool) -> bool:
        regular = step == self.last or self.every > 0 and step % self.every == 0
        return regular and len(self.sets) > 0 and not self.stop.agreed

    def act(self, step: int, state: State) -> dict[str, float]:
        try:
            losses = [self._measure(state.params, held) for held in self.sets]
            if self.averages:
                assert state.ema is not None
                averaged = average.weights(self.program.step.model, state.ema, state.params)
                losses += [self._measure(averaged, held) for held in self.sets]
        except Exception as error:
            if jax.process_count() > 1:     # the other processes wait in this validation: going on would deadlock
                raise
            say.err(f"step {step}: the validation failed and is skipped: {type(error).__name__}: {error}")
            return {}
        complete = [loss for loss in losses if loss is not None]
        if len(complete) < len(losses):
            say.out(f"step {step}: the validation was interrupted, because the run is stopping")
            return {}
        self.loss, *of_average = (sum(held.weight * loss for held, loss in zip(self.sets, complete[begin:]))
                                  for begin in range(0, len(complete), len(self.sets)))
        each = {held.name: loss for held, loss in zip(self.sets, complete)} if len(self.sets) > 1 else {}
        by_source = f" ({', '.join(f'{name} {loss:.4f}' for name, loss in each.items())})" if each else ""
        beside = f", of the averaged weights {of_average[0]:.4f}" if of_average else ""
        say.out(f"step {step}: validation loss {self.loss:.4f} {self.unit}{by_source}{beside}")
        return {"val_loss": self.loss} | {f"val_loss/{name}": loss for name, loss in each.items()} | dict(
            zip(["val_loss_ema"], of_average))

    def _measure(self, params: dict, held: ValidationSet) -> float | None:
        """Return the loss on one held-out set, NaN if its batches have no target; None if the run has to stop before
        the measurement is complete."""
        total = count = 0.0
        for i in range(min(self.batches, held.num_batches)):
            if self.stop.must_stop():
                return None
            nll, targets = self.program.evaluate(params, self.program.place(held.batch(i, self.program.rows)))
            total, count = total + float(nll), count + int(targets)
        return total / count if count else math.nan


class Prepare(Hook):
    """Does once, after the first step, the work that only later steps need, so that the first loss is not delayed.

    Imports the library that saves checkpoints. compile: returns the program with a compiled evaluation, which
    `validation` needs; None: the evaluation is compiled, or there is none.
    """
    part = "compile"

    def __init__(self, validation: Any, compile: Callable[[], Program] | None):
        self.validation, self.compile, self.acted = validation, compile, False

    def due(self, step: int, ending: bool) -> bool:
        return not self.acted and not ending

    def act(self, step: int, state: State) -> dict:
        self.acted = True
        lazy.load(lazy.ocp)
        if self.compile:
            self.validation.program = self.compile()
        return {}


class RewardValidation(LossValidation):
    """Measures the mean reward (`loss`) of one answer to each held-out prompt. rollouts: `rl.rollouts.Rollouts`."""

    def __init__(self, run: Run, rollouts, stop: Stop):
        self.rollouts, self.sets, self.stop, self.loss = rollouts, rollouts.prompts.held, stop, None
        self.every, self.last = run.validation.every, run.training.steps

    def act(self, step: int, state: State) -> dict[str, float]:
        try:
            numbers, count = self.rollouts.validate(state, self.stop.must_stop)
        except NoBatch:
            say.out(f"step {step}: the validation was interrupted, because the run is stopping")
            return {}
        self.loss = numbers["val_reward"]
        say.out(f"step {step}: validation reward {self.loss:.4f} ± {numbers['val_reward_error']:.4f}, of {count} "
                f"answers")
        return numbers


class Trace(Hook):
    """Hook and context: writes a profiler trace of `steps` in a run that resumes after step `after`.

    steps: (first, last), counted from 1, both included; empty: no trace. Process 0 writes the trace of its own devices
    to directory/plugins/profile. A run that resumes between first and last traces the remaining steps. If the run ends
    before `last`, the trace ends with the context.
    """

    def __init__(self, steps: Sequence[int], directory: Path, after: int):
        self.directory, self.after, self.running = directory, after, False
        self.first, self.last = max(steps[0], after + 1) if steps else 0, steps[1] if steps else 0
        if self.last < self.first or jax.process_index():
            self.first = self.last = 0

    def due(self, step: int, ending: bool) -> bool:
        return self.first > 0 and step in (self.first - 1, self.last)

    def act(self, step: int, state: State) -> dict:
        jax.block_until_ready(state)
        (self._stop if step == self.last else self._start)()
        return {}

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # level 1 records every Python call: slower steps, and a trace too large to open
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
            where = max((self.directory / "plugins" / "profile").iterdir())   # the newest: names are times
            say.out(f"profile from step {self.first}: tensorboard --logdir {self.directory} (with the package xprof), "
                    f"or {where}/perfetto_trace.json.gz in ui.perfetto.dev")
        except Exception as error:
            say.err(f"metrics.profile_steps: the profile could not be written: {error}")

    def __enter__(self) -> Trace:
        if self.first and self.first == self.after + 1:     # the hook of an earlier step begins all other traces
            self._start()
        return self

    def __exit__(self, *_):
        self._stop()


class CheckReplicas(Hook):
    """Checks that replicas are equal, every `every` steps and before each hook of `saving`, so that no detectable fault
    is saved. Raises: ReplicasDiffer."""

    def __init__(self, replicas: Replicas, every: int, saving: Sequence[Hook]):
        self.replicas, self.every, self.saving = replicas, every, saving

    def due(self, step: int, ending: bool) -> bool:
        return step % self.every == 0 or any(hook.due(step, ending) for hook in self.saving)

    def act(self, step: int, state: State) -> dict:
        self.replicas.check(step, state)
        return {}
