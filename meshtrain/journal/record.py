"""Reads the metrics of every step and writes them as rows.

A step's metrics are read while the next step runs, so the device never waits for the host. A row's step_time_s is the
mean of the steps since the row before: from end to end on the device, as far as the host saw the ends, without pauses.
"""
from __future__ import annotations

import collections
import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax

from meshtrain.config import Run
from meshtrain.journal import goodput
from meshtrain.journal.metrics import Writers
from meshtrain.journal.progress import Progress
from meshtrain.journal.spikes import LossSpike, Spikes, describe
from meshtrain.names import MISMATCH_MAX
from meshtrain.run import say
from meshtrain.training import objective
from meshtrain.training.policy import Policy

WAITS = ("data_wait_s", "checkpoint_wait_s")    # seconds, summed since the row before
WINDOW, MOSTLY = 10, 8      # a straggler is the latest process in at least MOSTLY of the last WINDOW steps
SHARE = 0.05                # a straggler costs more than this share of a step's time
# Limits for the difference between the log-probabilities of a sampled token by the sampler and by the training step,
# if only rounding differs. In float32 on CPUs the largest difference is 2e-6 to 1e-5. In bfloat16 the largest is 0.04
# or more, with experts 0.4 (a token may be routed to other experts), and the mean is 0.002 to 0.004. Float32 on GPUs
# is not measured.
LARGEST_IN_FLOAT32, MEAN = 1e-3, 0.05


class TooManySkippedSteps(RuntimeError):
    """The run stops because training.max_skipped_steps steps in a row were skipped."""


# metrics of every model; layers add more
STEP_METRICS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped")
# means over the sampled tokens that are trained on; null for a batch without any
OF_DRAWN = ("ratio", "clip_low", "clip_high", "kl", "entropy", "mismatch_mean", MISMATCH_MAX)


def mismatch_limit(run: Run) -> tuple[str, float]:
    """Return (column, limit): a larger value in this column shows that sampler and training step compute different
    probabilities. The limit is infinite if their weights differ (rl.lag, rl.updates) or matmuls are in float8."""
    rl, model = run.rl, run.model
    same = not rl.lag and (rl.updates == 1 or Policy.of(rl).old == "trainer")
    if not objective.of_run(run).samples or not same or model.matmul_dtype == "float8":
        return MISMATCH_MAX, math.inf
    exact = model.compute_dtype == "float32" and jax.default_backend() == "cpu" and not model.num_experts
    return (MISMATCH_MAX, LARGEST_IN_FLOAT32) if exact else ("mismatch_mean", MEAN)


class StepEnd(NamedTuple):
    """The end of a step on the device. seen: time at which the host knew of it. late_s: how much sooner it may have
    been; 0 within the clock's resolution."""
    seen: float
    late_s: float = 0.0


class _Step(NamedTuple):
    """A dispatched step. tokens: of the run so far. own: of the step. ended: its end on the device. paused_s: pauses
    between the step before and this one."""
    number: int
    tokens: int
    own: int
    metrics: dict
    ended: Future[StepEnd]
    paused_s: float


class _SinceRow(NamedTuple):
    """Steps since the last written row: their number, tokens and seconds."""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Stragglers:
    """Finds a straggler: a process whose host dispatches last in most steps, so that all devices wait for it. Single
    late steps (garbage collection, disk) do not count. A slow device is not found, because its host is on time.

    named: (process, seconds it costs per step, share of a step's time); None: no straggler.
    """

    def __init__(self):
        self.named: tuple[int, float, float] | None = None
        self._late: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=WINDOW)

    def step(self, late: tuple[int, float] | None, step_time_s: float) -> bool:
        """Record a step. Return whether it names a straggler other than the one before.

        late: (process that came last, seconds), see `agree.StopAgreement`; None: unknown, and the step does not count.
        """
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


class Record:
    """Writes metrics rows and progress lines, and counts skipped steps.

    flops_per_step: FLOPs of the model in a full step. peak_flops: FLOP/s of all devices together; None: mfu is null.
    account: counts goodput. spikes: the losses so far. hosts: the host name of each process.
    """

    def __init__(self, run: Run, writer: Writers, progress: Progress, flops_per_step: float, peak_flops: float | None,
                 account: goodput.Account | None = None, spikes: Spikes | None = None, hosts: Sequence[str] = ()):
        self.every, self.max_skipped = run.metrics.every, run.training.max_skipped_steps
        self.optimizer, self.samples = run.optimizer, objective.of_run(run).samples
        self.tokens_per_step = run.data.global_batch * run.data.seq_len
        self.writer, self.progress = writer, progress
        self.flops_per_step, self.peak_flops = flops_per_step, peak_flops
        self.account = account or goodput.Account()
        self.spikes = spikes or Spikes(run)
        self.skipped_in_a_row, self.mismatch_limit = 0, mismatch_limit(run)
        self._pending: _Step | None = None
        self._mark, self._paused_s = time.perf_counter(), 0.0
        self._paused_until = 0.0
        self._extra: dict[str, float] = {}
        self._waited_s = 0.0        # seconds of waits for data since the step before
        self.stragglers, self.hosts = Stragglers(), hosts
        self._step_time_s: float | None = None
        self._since, self._late_s = _SinceRow(), 0.0     # the latter: of the end of the step before

    def dispatched(self, number: int, tokens: int, own: int, metrics: dict,
                   ended: Future[StepEnd]) -> None:
        """Record a dispatched step, and write the row of the step before while this one runs.

        tokens: of the run up to this step. own: tokens of the step alone. metrics: still being computed. ended: the
        time at which the device finishes the step. Raises: as `settle`.
        """
        paused_s, self._paused_s = self._paused_s, 0.0
        self.settle()
        self._pending = _Step(number, tokens, own, metrics, ended, paused_s)

    def settle(self) -> None:
        """Wait for the dispatched step, read its metrics and write its row. A second call does nothing.

        Raises: TooManySkippedSteps, LossSpike.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        metrics = jax.device_get(step.metrics)
        loss, limit = float(metrics["loss"]), self.spikes.limit(step.number)
        self.spikes.add(step.number, loss)
        if spike := loss > limit:
            self._extra["spike_limit"] = limit      # has the row written even if metrics.every skips it
        row = self._row(step, metrics)
        if step.number % self.every == 0 or self._extra.keys() - WAITS:
            self.writer.write(row)
            self._extra, self._since = {}, _SinceRow()
        self.progress.step(row)
        if spike and not row["skipped"]:
            say.out(f"step {step.number}: a loss spike, {describe(loss, limit)}")
        self._check_mismatch(row)
        self._count_skipped(row, limit)
        if self.spikes.policy == "rollback" and (spike or row["skipped"]):
            raise LossSpike(step.number, loss, limit)

    @contextlib.contextmanager
    def paused(self, part: str = "rest"):
        """Context between two steps: its time is not counted as step time. part: the part of the goodput account that
        counts it."""
        began = time.perf_counter() if self._pending is None else max(
            self._pending.ended.result().seen, self._paused_until)
        try:
            with self.account.count_as(part):
                yield
        finally:
            self._paused_until = time.perf_counter()
            self._paused_s += self._paused_until - began

    def late(self, late: tuple[int, float] | None) -> None:
        """Record which process dispatched the step last and by how many seconds; print a new straggler. See
        `Stragglers.step`."""
        if self._step_time_s is not None and self.stragglers.step(late, self._step_time_s) and self.stragglers.named:
            process, late_s, share = self.stragglers.named
            host = f" on {self.hosts[process]}" if process < len(self.hosts) else ""
            say.out(f"process {process}{host} delays the others: its host is {late_s:.3f} s late per step, "
                    f"{share:.0%} of the step")

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the next row that is written. Values of one name are summed until then."""
        self._waited_s += numbers.get("data_wait_s", 0.0)
        for name, value in numbers.items():
            self._extra[name] = self._extra.get(name, 0.0) + value

    def _row(self, step: _Step, metrics: dict) -> dict:
        ended, named = step.ended.result(), self.stragglers.named
        took_s = max(ended.seen - self._mark - step.paused_s, 1e-9)
        waited_s, self._waited_s = self._waited_s, 0.0
        self.account.add_step(step.number, took_s, min(waited_s, took_s))
        since = self._since
        # The step may have begun before the end of the one before was seen, unless the device paused between the two.
        early_s = self._late_s if not since.steps and not step.paused_s else 0.0
        self._since = since = _SinceRow(since.steps + 1, since.tokens + step.own, since.seconds + took_s + early_s)
        self._mark, self._late_s, self._step_time_s = ended.seen, ended.late_s, took_s
        step_time_s = since.seconds / since.steps
        flops = self.flops_per_step * since.tokens / self.tokens_per_step
        nothing = self.samples and not step.own
        return {"step": step.number, **{name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")},
                "tokens": step.tokens,
                "step_time_s": step_time_s, "tokens_per_s": since.tokens / since.seconds,
                "mfu": flops / since.seconds / self.peak_flops if self.peak_flops else None,
                "skipped": bool(metrics["skipped"]), **({"train_s": step_time_s, "kl": None} if self.samples else {}),
                **{name: None if nothing and name in OF_DRAWN else _listed(value)
                   for name, value in metrics.items() if name not in STEP_METRICS},
                **dict.fromkeys(WAITS, 0.0), **self._extra, **self.account.columns(ended.seen),
                **({"straggler": named[0], "straggler_s": named[1]} if named else {})}

    def _check_mismatch(self, row: dict) -> None:
        """Warn once if the sampler and the training step compute different probabilities."""
        column, limit = self.mismatch_limit
        if not (row.get(column) or 0.0) > limit:
            return
        if jax.process_index() == 0:
            say.err(f"step {row['step']}: {column}={row[column]:.2g}, but rounding explains at most {limit:g}: the "
                    f"sampler computes other probabilities than the training step, so the answers are not sampled from "
                    f"the policy. Look at {column} in metrics.jsonl: if it is large from the first step on, the two "
                    f"programs differ; if it grows, the sampler has old weights")
        self.mismatch_limit = column, math.inf

    def _count_skipped(self, row: dict, limit: float) -> None:
        if not row["skipped"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        why = "a loss spike, " + describe(row["loss"], limit) if row["loss"] > limit else "not finite"
        say.out(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}: {why}, skipped "
                f"({self.skipped_in_a_row} in a row, the run stops at {self.max_skipped})")
        if self.skipped_in_a_row >= self.max_skipped:
            raise TooManySkippedSteps(
                f"{self.skipped_in_a_row} steps in a row, up to step {row['step']}, had a loss or gradient norm that "
                f"is not finite, or a loss spike; none of them was applied. Lower "
                f"optimizer.learning_rate={self.optimizer.learning_rate}, lengthen "
                f"optimizer.warmup_steps={self.optimizer.warmup_steps}, leave these batches out by data.skip_batches, "
                f"or continue from an earlier checkpoint (checkpoint.step); all four are allowed on resume")


def _listed(value):
    """Return a metric as a number or a list of numbers. In lists, which may have many layers, each float32 is rounded
    to its shortest decimal form, which halves the text."""
    return [float(str(each)) for each in value] if value.ndim else value.item()
