"""The training loop: get a batch from the feed, run a step, then call the hooks that are due.

The host waits for the device only before a hook, and to read the metrics of a step while the next one runs. Validation,
checkpoints and profiles are hooks.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from meshtrain.cluster import agree, watch
from meshtrain.journal.journal import Journal
from meshtrain.journal.step_times import StepEnd
from meshtrain.run import garbage, phases, rundir
from meshtrain.training.state import State
from meshtrain.training.step import Program


class Hook(Protocol):
    """Acts between two steps. All processes run it together, with the device idle. Its time is not step time.

    after_row: whether the row of this step is written first, which may end the run (too many skipped steps). part: the
    part of the goodput account that counts its time, see `goodput.PARTS`. The watchdog's limit is that of a save.
    """
    after_row: bool = True
    part: str = "rest"

    def due(self, step: int, ending: bool) -> bool:
        """Return whether to act. step: the step just taken. ending: whether the loop ends after this step."""

    def act(self, step: int, state: State) -> Mapping[str, float]:
        """Return numbers for the metrics row of this step, or of the next step if this row is already written."""


class StepBatch(NamedTuple):
    """The batch of a step, on the devices. tokens: number of tokens in it. paused: whether the feed made the device
    wait and has already recorded this time."""
    batch: dict
    tokens: int
    paused: bool = False


class StepFeed(Protocol):
    """The source of the loop's batches."""

    def next(self, done: int, state: State, journal: Journal, stop: Stop) -> StepBatch:
        """Return the batch of step `done` + 1. state: the state after `done` steps. journal: receives numbers of the
        metrics row and the time between two steps. stop: polled by a feed that takes long. Raises: NoBatch."""

    def tokens(self, steps: int) -> int:
        """Return the number of tokens in the run's first `steps` batches."""

    def close(self) -> None:
        """Release threads and processes. The loop calls it at its end."""


class Feed(StepFeed, Protocol):
    """A source of batches that a run can resume. evaluates: whether the validation of this feed computes losses."""
    evaluates: bool

    def position(self, steps: int) -> dict:
        """Return the position after the run's first `steps` batches: JSON for the checkpoint, used on a resume."""

    def validation(self, program: Program, stop: Stop) -> Validator:
        """Return the validation of the run. program: a program that has a compiled evaluation if `evaluates`."""


class Validator(Hook, Protocol):
    """A hook that measures validation. loss: the last value; None before the first."""
    loss: float | None


# Time between two looks of the clock at a step: this share of the step before, within these bounds in seconds.
SHARE_OF_STEP, LOOK_S = 0.05, (5e-4, 2e-2)
LOST = 2        # the vote of a process whose claim on run.dir is lost; it overrides a vote of 1, a stop request


class NoBatch(Exception):
    """The run has to stop before the feed has a batch. All processes raise it together."""


class Stop:
    """Makes all processes end the loop after the same step, once one of them got a stop request or lost its `claim` on
    run.dir. has_request: returns whether this process got a stop request."""

    def __init__(self, has_request: Callable[[], bool] = lambda: False, claim: rundir.Claim | None = None):
        self.has_request, self.claim, self.agreement, self.agreed = has_request, claim, agree.StopAgreement(), False

    def must_stop(self, late_s: float | None = None) -> bool:
        """Return whether to stop now. All processes call it at the same steps. late_s: see `agree.StopAgreement`.
        Raises: LostClaimError, in all processes."""
        lost = self.claim and self.claim.lost
        wish = self.agreed or self.agreement.ask(LOST if lost else self.has_request(), late_s)
        if wish == LOST:
            raise agree.mark_agreed(lost or rundir.LostClaimError("run.dir was taken over by another start"))
        self.agreed = bool(wish)
        watch.progress()
        return self.agreed


class StepClock(contextlib.AbstractContextManager):
    """Observes when the device ends its steps, from two threads: one waits for the step, the other one looks at it
    every few milliseconds. Both threads wake late if the host is busy, e.g. if a library that saves or logs holds the
    interpreter's lock. Then the last look that found the step running bounds the delay with which its end was seen."""

    def __init__(self):
        self._waiting, self._looking = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))
        self._seen, self._every_s = time.perf_counter(), LOOK_S[0]

    def __exit__(self, *_) -> None:
        self._waiting.shutdown()
        self._looking.shutdown()

    def observe(self, metrics: Mapping[str, jax.Array]) -> concurrent.futures.Future[StepEnd]:
        """Return the future end of the step that computes these metrics."""
        running = [time.perf_counter()]     # the last time at which the step was seen running
        self._looking.submit(self._look, metrics, running, self._every_s)
        return self._waiting.submit(self._wait, metrics, running, self._every_s)

    @staticmethod
    def _look(metrics: Mapping[str, jax.Array], running: list[float], every_s: float) -> None:
        while True:
            now = time.perf_counter()
            if all(value.is_ready() for value in metrics.values()):
                return
            running[0] = now
            time.sleep(every_s)

    def _wait(self, metrics: Mapping[str, jax.Array], running: list[float], every_s: float) -> StepEnd:
        jax.block_until_ready(metrics)
        seen = time.perf_counter()
        late_s = seen - running[0]
        self._every_s = min(max(SHARE_OF_STEP * (seen - self._seen), LOOK_S[0]), LOOK_S[1])
        self._seen = seen
        return StepEnd(seen, late_s if late_s > 2 * every_s else 0.0)


def train(limit: Callable[[float], Sequence[jax.Array]], step: Callable, state: State, feed: StepFeed, last: int,
          journal: Journal, hooks: Sequence[Hook], stop: Stop) -> tuple[State, int]:
    """Train from state.step to step `last`. Return (state, its step). After a stop request the step is below `last`.

    All processes call this together. step: the compiled training step (state, batch, *limit(loss)). limit: the largest
    loss that is no spike -> further arguments of the step, see `Program.limit`. feed: closed at the end. hooks: called
    in this order. Raises: TooManySkippedSteps, LossSpike.
    """
    done = first = int(state.step)

    def act(due: Callable[[Hook], bool]) -> bool:
        acted = False
        for hook in hooks:
            if due(hook):       # evaluated one by one: a hook may change whether the loop stops
                acted = True
                doing = f"{hook.part} after step {done}"
                with journal.pause(hook.part), watch.phase(doing, "save"), phases.moving(doing.removeprefix("rest ")):
                    if hook.after_row:
                        journal.settle()
                    journal.add(hook.act(done, state))
        return acted

    def only_at_the_end(hook: Hook) -> bool:
        """Return whether the hook is due only because the loop ends here; otherwise it has acted already."""
        return done > first and hook.due(done, True) and not hook.due(done, False)

    with contextlib.closing(feed), StepClock() as clock, garbage.by_step() as collect:
        ended = clock.observe({})       # the end of the step before
        paused = True       # whether there was a pause before this step: lateness after a pause is not measured
        while done < last and not stop.agreed:
            watch.step(done + 1)
            asked = time.perf_counter()
            try:
                batch, tokens, waited = feed.next(done, state, journal, stop)
            except NoBatch:
                act(only_at_the_end)
                break
            paused |= waited
            # If the step before still runs, the device does not wait for this batch.
            data_wait_s = max(0.0, time.perf_counter() - max(asked, ended.result().seen)
                              ) if ended.done() and not waited else 0.0
            done, came, before = done + 1, time.perf_counter(), ended
            with jax.profiler.StepTraceAnnotation("train", step_num=done):
                state, metrics = step(state, batch, *limit(journal.spikes.limit(done)))
            if not all(value.is_ready() for value in metrics.values()):     # the step was dispatched just now
                came = time.perf_counter()
            ended = clock.observe(metrics)
            journal.add_step(done, feed.tokens(done), tokens, metrics, ended)
            journal.add({"data_wait_s": data_wait_s})
            idle_s = max(0.0, came - before.result().seen) if before.done() else 0.0    # between the two steps
            stop.must_stop(None if paused else idle_s)
            journal.add_lateness(stop.agreement.late)
            paused = act(lambda hook: hook.due(done, done == last or stop.agreed))
            # Collects while the device runs the step. The pause is noted, so a long collection names no straggler.
            paused |= collect(done, paused)
        journal.settle()
    return state, done
