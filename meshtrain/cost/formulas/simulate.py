"""Prices a pipeline schedule from the costs of its ops and links, and chooses a schedule before anything runs.

Models the SPMD program. Neighbours exchange activations in every tick, so a stage waits for its neighbours in every
tick, and all stages execute an op if any stage needs it. Uses no jax and measures nothing.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from meshtrain import pattern
from meshtrain.config.sections import Run
from meshtrain.parallel.pipeline import schedules
from meshtrain.parallel.pipeline.schedules import Schedule

# The schedules from which "auto" chooses. Of equally fast ones the first is preferred.
AUTOMATIC = ("1f1b", "zero_bubble", "interleaved", "interleaved_zero_bubble", "gpipe")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds for one microbatch in one stage, over all its chunks. If the schedule has no separate W, B computes both
    gradients.

    Any other unit works if all fields share it; the defaults count in forwards.
    """
    forward_s: float = 1.0
    input_grad_s: float = 1.0     # with what it recomputes
    weight_grad_s: float = 1.0
    loss_s: float = 0.0           # head and loss of one microbatch, forward and backward, shared by all stages
    link_s: float = 0.0           # one stage's output to its neighbour

    @property
    def ideal_s(self) -> float:
        """Return the seconds of one microbatch on a stage that never waits."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s + self.loss_s


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes on one device. slots: residuals in a schedule's slots; total: the whole step."""
    slots: int
    total: int


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The simulated times of a schedule.

    begin_s, end_s [T, P, 3]: times of F, B and W where the stage has that op, else NaN. loss_s: seconds of a
    microbatch's loss after its last F. bubble: fraction of the makespan that exceeds the ideal time. peak_live: largest
    number of microbatches that are alive on a stage.
    """
    makespan_s: float
    bubble: float
    peak_live: float
    begin_s: np.ndarray
    end_s: np.ndarray
    loss_s: float


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Outcome:
    """Return the simulated times of a schedule. The loss follows F, and all stages share it."""
    back_s = costs.input_grad_s + (0 if schedule.split else costs.weight_grad_s)
    op_s = np.array([costs.forward_s, back_s, costs.weight_grad_s]) / schedule.num_chunks
    begin_s, end_s, makespan_s = _walk(schedule, op_s, costs)
    on = schedule.ops[..., 0] >= 0
    return Outcome(makespan_s, 1 - schedule.num_microbatches * costs.ideal_s / makespan_s,
                   int(schedule.peak.max()) / schedule.num_chunks, np.where(on, begin_s, np.nan),
                   np.where(on, end_s, np.nan), costs.loss_s)


def _walk(schedule: Schedule, op_s, costs: Costs):
    """Compute the begin and end of every op of the table. All stages run the same program, so one clock serves all.
    Activations and then their cotangents are sent at the end of a tick, overlapped with the loss."""
    used = (schedule.ops[..., 0] >= 0).any(1)
    begin, end = np.zeros((2, schedule.num_ticks, schedule.num_stages, 3))
    sends = sum(schedule.columns[name].any(1) * costs.link_s for name in ("y_out", "dx_out"))
    now = 0.0
    for t in range(schedule.num_ticks):
        for kind in np.flatnonzero(used[t]):
            begin[t, :, kind] = now
            now += op_s[kind]
            end[t, :, kind] = now
        now += max(sends[t], costs.loss_s * bool(schedule.shared["loss_on"][t]))
    return begin, end, float(now)


# ---- auto ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenSchedule:
    """A schedule of a run. memory_bytes: bytes of its slots; total_bytes: bytes of a step, 0 if unknown. fits: whether
    the step fits; None if the memory is unknown. why: the reason for the choice as one line for the log."""
    schedule: Schedule
    outcome: Outcome
    memory_bytes: int | None
    fits: bool | None
    why: str = ""
    total_bytes: int = 0

    @property
    def name(self) -> str:
        chunks = self.schedule.num_chunks
        return self.schedule.name if chunks == 1 else f"{self.schedule.name} of {chunks} chunks"


def choose(p: int, m: int, costs: Costs | Callable[[Schedule], Costs] = Costs(),
           memory: Callable[[Schedule], StepBytes] | None = None, usable_bytes: int | None = None,
           chunks: Iterable[int] = (1,)) -> ChosenSchedule:
    """Return the fastest schedule whose step fits into a device's memory, or the smallest one if none fits.

    p stages, m microbatches. costs: the same for all schedules, or a function of the schedule. memory: returns the
    bytes of a step on a device; usable_bytes: their limit. Without both, memory is ignored. chunks: allowed chunk
    counts.

    This is a pure function of modelled numbers, so all processes and restarts choose the same schedule. Measured times
    must not enter.

    Raises: ValueError if no schedule exists for any of the chunk counts.
    """
    chunks = sorted(set(chunks))
    tried = [_try(schedules.make(name, p, m, v), costs, memory, usable_bytes)
             for name in AUTOMATIC for v in chunks
             if (v > 1) == (name in schedules.INTERLEAVED) and not schedules.problems(name, p, m, v)]
    if not tried:
        raise ValueError("\n".join(schedules.problems("interleaved", p, m, min(chunks))))
    # Rounded, so that sums of the same costs in another order are equal and the order of AUTOMATIC decides.
    first_s = tried[0].outcome.makespan_s

    def cost(one: ChosenSchedule) -> tuple[float, int]:
        return round(one.outcome.makespan_s / first_s, 9), one.total_bytes
    fitting = [one for one in tried if one.fits is not False]
    best = min(fitting, key=cost) if fitting else min(tried, key=lambda one: (one.total_bytes, cost(one)))
    return dataclasses.replace(best, why=_why(tried, fitting, best, usable_bytes or 0))


def _try(schedule: Schedule, costs: Costs | Callable[[Schedule], Costs],
         memory: Callable[[Schedule], StepBytes] | None, usable_bytes: int | None) -> ChosenSchedule:
    outcome = simulate(schedule, costs(schedule) if callable(costs) else costs)
    if memory is None:
        return ChosenSchedule(schedule, outcome, None, None)
    needed = memory(schedule)
    fits = None if usable_bytes is None else needed.total <= usable_bytes
    return ChosenSchedule(schedule, outcome, needed.slots, fits, total_bytes=needed.total)


def _why(tried: Sequence[ChosenSchedule], fitting: Sequence[ChosenSchedule], best: ChosenSchedule, usable_bytes: int
         ) -> str:
    what = _what(best)
    if best.fits is False:
        return (f"{what}; none of {len(tried)} schedules fits into {gib(usable_bytes)}, and this one needs the "
                "least memory")
    faster = [one for one in tried if one.fits is False and one.outcome.makespan_s < best.outcome.makespan_s]
    if faster:
        first = min(faster, key=lambda one: one.outcome.makespan_s)
        return (f"{what}; {first.name} ({first.outcome.bubble:.1%}) is faster but needs "
                f"{gib(first.total_bytes)} of {gib(usable_bytes)}")
    rest = [one for one in fitting if one is not best]
    if not rest:
        return f"{what}; the only schedule {'that fits' if best.fits else 'there is'}"
    second = min(rest, key=lambda one: one.outcome.makespan_s)
    return f"{what}, the fastest of {len(fitting)} schedules; next {second.name} ({second.outcome.bubble:.1%})"


def _what(one: ChosenSchedule) -> str:
    slots = "" if one.memory_bytes is None else f", {gib(one.memory_bytes)} of activations"
    return f"{one.name}: modelled bubble {one.outcome.bubble:.1%}{slots}"


def gib(count: int) -> str:
    """Format a number of bytes in GiB, or in MiB if small."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 100 else f"{count / 2**20:.2f} MiB"


def chunk_counts(num_layers: int, p: int, most: int = 4) -> tuple[int, ...]:
    """Return the chunk counts that need no more padding layers than one chunk, and that divide p or are multiples of p.

    num_layers: number of layers, or of periods of layers that stay together. With other counts each stage's weights are
    stored on many stages, and XLA moves them ten times (8 stages of 10 chunks: 112 GiB a step of a 70B model, a third
    of the step).
    """
    def padded(v: int) -> int:
        return -(-num_layers // (p * v)) * v
    return tuple(v for v in range(1, most + 1) if padded(v) == padded(1) and (p % v == 0 or v % p == 0))


# ---- the schedule of a run -------------------------------------------------------------------------------------------


def of_run(run: Run, costs: Costs | Callable[[Schedule], Costs], p: int,
           memory: Callable[[Schedule], StepBytes] | None = None, usable_bytes: int | None = None) -> ChosenSchedule:
    """Return the schedule that the run file's [pipeline] selects on p stages. "auto" with chunks = 1 may choose more
    chunks.

    Raises: ValueError as `schedules.make` and `choose` do.
    """
    name, m, v = run.pipeline.schedule, run.training.microbatches, run.pipeline.chunks
    if name == "auto":
        counts = chunk_counts(-(-pattern.count_staged(run.model) // pattern.period(run.model)), p) if v == 1 else (v,)
        return choose(p, m, costs, memory, usable_bytes, counts)
    only = _try(schedules.make(name, p, m, v), costs, memory, usable_bytes)
    why = f"{_what(only)}, as requested"
    if only.fits is False:
        why += f"; it does not fit into {gib(usable_bytes or 0)}"
    return dataclasses.replace(only, why=why)
