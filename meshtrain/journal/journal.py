"""The journal of a run: makes the row of every step, writes it, and shows it to the guards.

A step's metrics are read while the next step runs, so the device never waits for the host. A row's step_time_s is the
mean of the steps since the row before.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax

from meshtrain.config import Run
from meshtrain.journal import goodput
from meshtrain.journal.guards import Guard, Mismatch, SkippedSteps, Stragglers
from meshtrain.journal.rows import Row
from meshtrain.journal.spikes import Spikes
from meshtrain.journal.step_times import StepEnd, StepTimes
from meshtrain.names import MISMATCH_MAX
from meshtrain.training import objective

WAITS = ("data_wait_s", "checkpoint_wait_s")    # seconds, summed since the row before
STEP_METRICS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped")     # of every model; layers add more
# means over the sampled tokens that are trained on; null for a batch without any
OF_DRAWN = ("ratio", "clip_low", "clip_high", "kl", "entropy", "mismatch_mean", MISMATCH_MAX)


class RowWriter(Protocol):
    def write(self, row: Row) -> None: ...


class RowDisplay(Protocol):
    def step(self, row: Row) -> None: ...


class Flops(NamedTuple):
    """per_step: FLOPs of the model in a full step. peak: FLOP/s of all devices together; None: mfu is null."""
    per_step: float
    peak: float | None = None


class _Step(NamedTuple):
    """A dispatched step. tokens: number of tokens of the run so far. own: number of tokens of this step. ended: the
    time at which the device finishes the step. paused_s: pauses between the previous step and this one."""
    number: int
    tokens: int
    own: int
    metrics: dict
    ended: Future[StepEnd]
    paused_s: float


class Journal:
    """Writes metrics rows and progress lines, and calls the guards.

    account: counts goodput. spikes: the losses so far. hosts: the host name of each process. guards: replace the run's.
    """

    def __init__(self, run: Run, writer: RowWriter, progress: RowDisplay, flops: Flops,
                 account: goodput.Account | None = None, spikes: Spikes | None = None, hosts: Sequence[str] = (),
                 guards: Sequence[Guard] | None = None):
        self.every, self.samples = run.metrics.every, objective.of_run(run).samples
        self.tokens_per_step = run.data.global_batch * run.data.seq_len
        self.writer, self.progress, self.flops = writer, progress, flops
        self.account = account or goodput.Account()
        self.spikes, self.stragglers = spikes or Spikes(run), Stragglers(hosts)
        # called in this order; spikes last: a run that skipped too many steps stops instead of going back
        self.guards: tuple[Guard, ...] = (Mismatch(run), SkippedSteps.of_run(run), self.spikes
                                          ) if guards is None else tuple(guards)
        self.times = StepTimes()
        self._pending: _Step | None = None
        self._extra: dict[str, float] = {}
        self._waited_s = 0.0        # seconds of waits for data since the step before

    def add_step(self, number: int, tokens: int, own: int, metrics: dict, ended: Future[StepEnd]) -> None:
        """Add a dispatched step, and write the row of the step before while this one runs.

        tokens: number of tokens of the run up to this step. own: number of tokens of this step. metrics: the step's
        metrics, still being computed. ended: the time at which the device finishes the step. Raises: as `settle`.
        """
        paused_s = self.times.take_paused_s()
        self.settle()
        self._pending = _Step(number, tokens, own, metrics, ended, paused_s)

    def settle(self) -> None:
        """Wait for the dispatched step, if there is one, read its metrics, write its row and call the guards.

        Raises: TooManySkippedSteps, LossSpike.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        metrics = jax.device_get(step.metrics)
        self.add(self.spikes.columns(step.number, float(metrics["loss"])))
        row = self._row(step, metrics)
        # A row with other numbers than waits (a validation, a spike) is written even if metrics.every leaves it out.
        if step.number % self.every == 0 or self._extra.keys() - WAITS:
            self.writer.write(row)
            self.times.begin_row()
            self._extra = {}
        self.progress.step(row)
        for guard in self.guards:
            guard.see(row)

    @contextlib.contextmanager
    def pause(self, part: str = "rest") -> Iterator[None]:
        """Context between two steps, not counted as step time. part: the part of the goodput account that counts it."""
        with self.times.pause(self._pending and self._pending.ended), self.account.count_as(part):
            yield

    def add_lateness(self, late: tuple[int, float] | None) -> None:
        """Add the process that dispatched the step last, and its delay in seconds; see `Stragglers.add_step`."""
        if self.times.last_s is not None:
            self.stragglers.add_step(late, self.times.last_s)

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the next row that is written. Values of one name are summed until then."""
        self._waited_s += numbers.get("data_wait_s", 0.0)
        for name, value in numbers.items():
            self._extra[name] = self._extra.get(name, 0.0) + value

    def _row(self, step: _Step, metrics: dict) -> Row:
        ended = step.ended.result()
        took_s = self.times.add_step(ended, step.own, step.paused_s)
        waited_s, self._waited_s = self._waited_s, 0.0
        self.account.add_step(step.number, took_s, min(waited_s, took_s))
        row: Row = {"step": step.number,
                    **{name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")},
                    "tokens": step.tokens, **self._speed(), "skipped": bool(metrics["skipped"])}
        if self.samples:
            row |= {"train_s": row["step_time_s"], "kl": None}
        row |= {name: _to_json(value) for name, value in metrics.items() if name not in STEP_METRICS}
        if self.samples and not step.own:       # a batch without a token to train on
            row |= {name: None for name in metrics if name in OF_DRAWN}
        return row | dict.fromkeys(WAITS, 0.0) | self._extra | self.account.columns(
            ended.seen) | self.stragglers.columns()

    def _speed(self) -> dict[str, float | None]:
        since = self.times.since_row
        flops = self.flops.per_step * since.tokens / self.tokens_per_step
        return {"step_time_s": since.seconds / since.steps, "tokens_per_s": since.tokens / since.seconds,
                "mfu": flops / since.seconds / self.flops.peak if self.flops.peak else None}


def _to_json(value: Any):
    """Return a metric as a number or a list of numbers. In lists, which may have many layers, each float32 is rounded
    to its shortest decimal form, which halves the text."""
    return [float(str(each)) for each in value] if value.ndim else value.item()
