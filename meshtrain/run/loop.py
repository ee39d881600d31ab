"""The training loop: a batch of the feed, a step, then the hooks that are due.

The host waits for the device only to read the metrics of the step before, while the next one runs, and before a hook.
Validation, checkpoints and profiles are hooks.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from meshtrain.cluster import agree, watch
from meshtrain.data.documents import contracts
from meshtrain.data.documents.contracts import Batches
from meshtrain.run import garbage, phases, rundir
from meshtrain.run.record import Record
from meshtrain.run.stops import Listener
from meshtrain.training.state import State
from meshtrain.training.step import Program


@dataclasses.dataclass(frozen=True, eq=False)
class Hook:
    """A callback between two steps. All processes run it together, with the device idle; its time is not counted as
    step time.

    due: (step just taken, whether the loop ends after it) -> whether to act. act: (step, state) -> numbers for the
    metrics: of this step's row, or of the next where this one is already written. after_row: write this step's row
    first, which may end the run (too many skipped steps). part: its part of the goodput account, see `goodput.PARTS`;
    the watchdog allows it the time of a save.
    """
    due: Callable[[int, bool], bool]
    act: Callable[[int, State], Mapping[str, float]]
    after_row: bool = True
    part: str = "rest"


class StepBatch(NamedTuple):
    """The batch of a step, on the devices. tokens: in it. paused: whether the device waited for it, as told to the
    record."""
    batch: dict
    tokens: int
    paused: bool = False


class Feed(Protocol):
    """The source of the loop's batches."""

    def next(self, done: int, state: State) -> StepBatch:
        """The batch of the step after `done` steps, which have made `state`. Raises: NoBatch."""

    def tokens(self, steps: int) -> int:
        """Tokens in the run's first `steps` batches."""

    def close(self) -> None: ...


LOST = 2        # a wish to stop that outweighs a request: another start has the run's directory


class NoBatch(Exception):
    """A feed was to stop, in all processes, before it had a batch."""


class Stream:
    """A feed of batches that are a function of their number: threads read them ahead."""

    def __init__(self, program: Program, data: Batches, start: int):
        self.program, self.data = program, data
        self._batches = contracts.iterate(data, start, rows=program.rows)

    def next(self, done: int, state: State) -> StepBatch:
        return StepBatch(self.program.place(next(self._batches)), self.data.tokens(done + 1) - self.data.tokens(done))

    def tokens(self, steps: int) -> int:
        return self.data.tokens(steps)

    def close(self) -> None:
        self._batches.close()


class Stop:
    """Agreement of all processes to end the loop after the same step, when one of them was asked to (`listener`), or
    has lost its `claim`."""

    def __init__(self, listener: Listener, claim: rundir.Claim | None = None):
        self.listener, self.claim, self.agreement, self.agreed = listener, claim, agree.StopAgreement(), False

    def reached(self, late_s: float | None = None) -> bool:
        """Whether to stop now; every process calls it at the same steps. late_s: of a step, see `agree.StopAgreement`.
        Raises: LostClaimError, in all of them."""
        lost = self.claim and self.claim.lost
        wish = self.agreed or self.agreement.reached(LOST if lost else self.listener.number is not None, late_s)
        if wish == LOST:
            raise agree.agreed(lost or rundir.LostClaimError("run.dir was taken over by another start"))
        self.agreed = bool(wish)
        watch.progress()
        return self.agreed


def train(program: Program, step: Callable, state: State, feed: Feed, last: int, record: Record,
          hooks: Sequence[Hook], stop: Stop) -> tuple[State, int]:
    """Trains from state.step to step `last`. Returns (state, number of steps the run has taken), fewer than `last`
    after a stop.

    Every process calls it alike. step: the compiled training step. feed: is closed. hooks: in the order in which they
    act. Raises: TooManySkippedSteps, LossSpike.
    """
    done = first = int(state.step)

    def act(due: Callable[[Hook], bool]) -> bool:
        acted = False
        for hook in hooks:
            if due(hook):       # a hook, too, may find that the loop is to stop
                acted = True
                doing = f"{hook.part} after step {done}"
                with record.paused(hook.part), watch.phase(doing, "save"), phases.moving(doing.removeprefix("rest ")):
                    if hook.after_row:
                        record.settle()
                    record.add(hook.act(done, state))
        return acted

    with contextlib.closing(feed), concurrent.futures.ThreadPoolExecutor(1) as clock, garbage.by_step() as collect:
        ended = clock.submit(_time_when_ready, ())      # when the device ended the step before
        paused = True       # before this step: its host comes as late as what was done meanwhile took
        while done < last and not stop.agreed:
            watch.step(done + 1)
            asked = time.perf_counter()
            try:
                batch, tokens, waited = feed.next(done, state)
            except NoBatch:
                act(lambda hook: done > first and hook.due(done, True) and not hook.due(done, False))
                break
            paused |= waited
            # While the step before still runs, nobody waits for the batch of the next.
            data_wait_s = max(0.0, time.perf_counter() - max(asked, ended.result())
                              ) if ended.done() and not waited else 0.0
            done, came, before = done + 1, time.perf_counter(), ended
            with jax.profiler.StepTraceAnnotation("train", step_num=done):
                state, metrics = step(state, batch, *program.limit(record.spikes.limit(done)))
            if not all(value.is_ready() for value in metrics.values()):     # until now the device was given nothing
                came = time.perf_counter()
            ended = clock.submit(_time_when_ready, metrics)
            record.dispatched(done, feed.tokens(done), tokens, metrics, ended)
            record.add({"data_wait_s": data_wait_s})
            stop.reached(None if paused else _late_s(before, came))
            record.late(stop.agreement.late)
            paused = act(lambda hook: hook.due(done, done == last or stop.agreed))
            # while the device takes the step; if it takes longer than that, no host is a straggler for it
            paused |= collect(done, paused)
        record.settle()
    return state, done


def _late_s(before: concurrent.futures.Future, came: float) -> float:
    """Seconds that the device was idle after the step before until the host dispatched the next."""
    return max(0.0, came - before.result()) if before.done() else 0.0


def _time_when_ready(arrays) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()
