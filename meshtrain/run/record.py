"""Reads the metrics of every step and writes their rows.

A step's metrics are read while the next step runs, so the device never waits for the host. A step's time is measured on
the device, from the end of the step before to its own, without pauses.
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
from meshtrain.names import MISMATCH_MAX
from meshtrain.run import goodput, say
from meshtrain.run.metrics import Writers
from meshtrain.run.progress import Progress
from meshtrain.run.spikes import LossSpike, Spikes, described
from meshtrain.training.policy import Policy

WAITS = ("data_wait_s", "checkpoint_wait_s")    # seconds, since the row before
WINDOW, MOSTLY = 10, 8      # steps that are looked at, and of how many of them a straggler is the latest
SHARE = 0.05                # of a step's time that it costs
# What rounding does not exceed, of the log-probabilities of drawn tokens by the sampler and by the step. In float32 on
# CPUs the largest difference is 2e-6 to 1e-5. In bfloat16 it is 0.04 and more, with experts 0.4, since a token may have
# others; the mean is 0.002 to 0.004. No GPU has shown its float32.
LARGEST_IN_FLOAT32, MEAN = 1e-3, 0.05


class TooManySkippedSteps(RuntimeError):
    """The run stopped because step after step had no finite loss or gradient."""


# of every model; more come from its layers
STEP_METRICS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped")
# means over the drawn tokens that are learned: null where a batch has none
OF_DRAWN = ("ratio", "clip_low", "clip_high", "kl", "entropy", "mismatch_mean", MISMATCH_MAX)


def mismatch_limit(run: Run) -> tuple[str, float]:
    """(column, value above which the sampler computes something else than the step). Infinite where they have other
    weights, or products in float8."""
    rl, model = run.rl, run.model
    same = not rl.lag and (rl.updates == 1 or Policy.of(rl).old == "trainer")
    if run.training.objective != "rl" or not same or model.matmul_dtype == "float8":
        return MISMATCH_MAX, math.inf
    exact = model.compute_dtype == "float32" and jax.default_backend() == "cpu" and not model.num_experts
    return (MISMATCH_MAX, LARGEST_IN_FLOAT32) if exact else ("mismatch_mean", MEAN)


class _Step(NamedTuple):
    """A dispatched step. tokens: of the run so far. own: of the step. ended: time at which the device finished it.
    paused_s: pauses between the step before and this one."""
    number: int
    tokens: int
    own: int
    metrics: dict
    ended: Future
    paused_s: float


class Stragglers:
    """Finds a straggler: the process whose host dispatches late in most steps, while all devices wait for it. One late
    step is a hiccup (garbage collection, disk). A slow device is not found: its host is on time.

    named: (process, seconds it costs per step, share of a step); None: no straggler.
    """

    def __init__(self):
        self.named: tuple[int, float, float] | None = None
        self._late: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=WINDOW)

    def step(self, late: tuple[int, float] | None, step_time_s: float) -> bool:
        """Called with every step. late: of `agree.StopAgreement`; None: unknown, and the step does not count.
        Returns whether another process is named than before."""
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

    flops_per_step: of the model. peak_flops: FLOP/s of all devices together; None: mfu is null. account: the goodput
    account. spikes: the losses so far. hosts: names, by process.
    """

    def __init__(self, run: Run, writer: Writers, progress: Progress, flops_per_step: float, peak_flops: float | None,
                 account: goodput.Account | None = None, spikes: Spikes | None = None, hosts: Sequence[str] = ()):
        self.every, self.max_skipped = run.metrics.every, run.training.max_skipped_steps
        self.optimizer, self.samples = run.optimizer, run.training.objective == "rl"
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
        self._waited_s = 0.0        # for data, since the step before
        self.stragglers, self.hosts, self._step_time_s = Stragglers(), hosts, None

    def dispatched(self, number: int, tokens: int, own: int, metrics: dict, ended: Future) -> None:
        """A step was given to the device: writes the row of the one before while this one runs. tokens: of the run so
        far; own: of the step."""
        paused_s, self._paused_s = self._paused_s, 0.0
        self.settle()
        self._pending = _Step(number, tokens, own, metrics, ended, paused_s)

    def settle(self) -> None:
        """Waits for the step under way, reads its metrics and writes its row; does nothing if that is already done.

        Raises: TooManySkippedSteps, LossSpike.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        metrics = jax.device_get(step.metrics)
        loss, limit = float(metrics["loss"]), self.spikes.limit(step.number)
        self.spikes.seen(step.number, loss)
        if spike := loss > limit:
            self._extra["spike_limit"] = limit      # this row is written whatever metrics.every says
        row = self._row(step, metrics)
        if step.number % self.every == 0 or self._extra.keys() - WAITS:
            self.writer.write(row)
            self._extra = {}
        self.progress.step(row)
        if spike and not row["skipped"]:
            say.out(f"step {step.number}: a loss spike, {described(loss, limit)}")
        self._check_mismatch(row)
        self._count_skipped(row, limit)
        if self.spikes.policy == "rollback" and (spike or row["skipped"]):
            raise LossSpike(step.number, loss, limit)

    @contextlib.contextmanager
    def paused(self, part: str = "rest"):
        """Context between two steps: its time belongs to no step. part: of the goodput account."""
        began = time.perf_counter() if self._pending is None else max(self._pending.ended.result(), self._paused_until)
        try:
            with self.account.to(part):
                yield
        finally:
            self._paused_until = time.perf_counter()
            self._paused_s += self._paused_until - began

    def late(self, late: tuple[int, float] | None) -> None:
        """Record which process reached a step last, and by how much; see `Stragglers`."""
        if self._step_time_s is not None and self.stragglers.step(late, self._step_time_s):
            process, late_s, share = self.stragglers.named
            host = f" on {self.hosts[process]}" if process < len(self.hosts) else ""
            say.out(f"process {process}{host} delays the others: its host is {late_s:.3f} s late per step, "
                    f"{share:.0%} of the step")

    def add(self, numbers: Mapping[str, float]) -> None:
        """Adds numbers to the next row to be written; seconds of WAITS are summed."""
        self._waited_s += numbers.get("data_wait_s", 0.0)
        for name, value in numbers.items():
            self._extra[name] = self._extra.get(name, 0.0) + value

    def _row(self, step: _Step, metrics: dict) -> dict:
        ended = step.ended.result()
        step_time_s = max(ended - self._mark - step.paused_s, 1e-9)
        self._mark, waited_s, self._waited_s = ended, self._waited_s, 0.0
        self._step_time_s, named = step_time_s, self.stragglers.named
        self.account.took(step.number, step_time_s, min(waited_s, step_time_s))
        flops = self.flops_per_step * step.own / self.tokens_per_step
        nothing = self.samples and not step.own
        return {"step": step.number, **{name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")},
                "tokens": step.tokens,
                "step_time_s": step_time_s, "tokens_per_s": step.own / step_time_s,
                "mfu": flops / step_time_s / self.peak_flops if self.peak_flops else None,
                "skipped": bool(metrics["skipped"]), **({"train_s": step_time_s, "kl": None} if self.samples else {}),
                **{name: None if nothing and name in OF_DRAWN else _listed(value)
                   for name, value in metrics.items() if name not in STEP_METRICS},
                **dict.fromkeys(WAITS, 0.0), **self._extra, **self.account.at(ended),
                **({"straggler": named[0], "straggler_s": named[1]} if named else {})}

    def _check_mismatch(self, row: dict) -> None:
        """Warns, once, that the sampler computes something else than the step."""
        column, limit = self.mismatch_limit
        if not (row.get(column) or 0.0) > limit:
            return
        if jax.process_index() == 0:
            say.err(f"step {row['step']}: {column}={row[column]:.2g}, where rounding makes at most {limit:g}: the "
                    f"sampler computes other probabilities than the step, and the answers are not the policy's. Look "
                    f"at {column} in metrics.jsonl: large from the first step on, the two programs differ; growing, "
                    f"the sampler has old weights")
        self.mismatch_limit = column, math.inf

    def _count_skipped(self, row: dict, limit: float) -> None:
        if not row["skipped"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        why = "a loss spike, " + described(row["loss"], limit) if row["loss"] > limit else "not finite"
        say.out(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}: {why}, skipped "
                f"({self.skipped_in_a_row} in a row, the run stops at {self.max_skipped})")
        if self.skipped_in_a_row >= self.max_skipped:
            raise TooManySkippedSteps(
                f"{self.skipped_in_a_row} steps in a row, the last of them {row['step']}, had no finite loss or "
                f"gradient norm, or a loss spike; none of them was applied. Lower "
                f"optimizer.learning_rate={self.optimizer.learning_rate}, lengthen "
                f"optimizer.warmup_steps={self.optimizer.warmup_steps}, leave these batches out by data.skip_batches, "
                f"or continue from an earlier checkpoint (checkpoint.step); all four are allowed on resume")


def _listed(value):
    """A number, or a list of them: of layers there are many, and the shortest digits that say a float32 are half as
    many."""
    return [float(str(each)) for each in value] if value.ndim else value.item()
