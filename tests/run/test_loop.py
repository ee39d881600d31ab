"""The loop with stand-ins for model and data: what is read when, what hooks are told, and what ends a run."""
import ctypes
import dataclasses
import gc
import time
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import run_files
from meshtrain.journal.guards import TooManySkippedSteps
from meshtrain.journal.journal import Flops, Journal
from meshtrain.journal.progress import Progress
from meshtrain.run import garbage, loop
from meshtrain.run.feeds import BatchFeed
from meshtrain.run.hooks import LossValidation


@dataclasses.dataclass
class State:
    step: int


@dataclasses.dataclass
class Acting:
    """A hook of two functions."""
    due: Callable[[int, bool], bool]
    act: Callable[[int, State], Mapping[str, float]]
    after_row: bool = True
    part: str = "rest"


class Bench:
    """A loop over steps that compute nothing. events: ("step", n) when one is given to the device, ("row", n) when its
    row is written. rows: what was written."""

    def __init__(self, *words, broken=()):
        self.run = run_files.load(["--training.steps", "6", *words])
        self.broken, self.events, self.rows = broken, [], []
        self.program = SimpleNamespace(rows=None, place=lambda batch: batch, limit=lambda loss: (),
                                       evaluate=lambda p, batch: batch)
        self.data = SimpleNamespace(tokens=lambda batches: 100 * batches, validation=(),
                                    batch=lambda n, rows: n)
        self.listener = SimpleNamespace(number=None)
        self.stop = loop.Stop(lambda: self.listener.number is not None)

    def train(self, *hooks: loop.Hook, start: int = 0) -> int:
        writer = SimpleNamespace(write=lambda row: (self.rows.append(row), self.events.append(("row", row["step"]))))
        log = Journal(self.run, writer, Progress(self.run.training.steps), Flops(0.0))
        feed = BatchFeed(self.run, self.program, self.data, start)
        return loop.train(self.program.limit, self._step, State(start), feed, self.run.training.steps, log, hooks,
                          self.stop)[1]

    def _step(self, state, batch):
        number = state.step + 1
        self.events.append(("step", number))
        bad = number in self.broken
        return State(number), {"loss": jnp.float32("nan" if bad else 1.0), "grad_norm": jnp.float32(1.0),
                               "learning_rate": jnp.float32(0.1), "skipped": jnp.bool_(bad)}


def at(*steps):
    return lambda step, ending: step in steps


def test_a_row_is_read_while_the_next_step_runs():
    bench = Bench()
    assert bench.train() == 6
    assert bench.events == [("step", 1),
                            *(event for n in range(2, 7) for event in (("step", n), ("row", n - 1))), ("row", 6)]
    assert [row["tokens"] for row in bench.rows] == [100, 200, 300, 400, 500, 600]


def test_a_run_that_goes_on_begins_behind_its_step():
    bench = Bench()
    assert bench.train(start=4) == 6 and [row["step"] for row in bench.rows] == [5, 6]


def test_a_hook_acts_after_its_steps_row_and_one_that_measures_before():
    bench = Bench()
    act = lambda name, numbers: lambda step, state: (bench.events.append((name, step)), numbers)[1]
    bench.train(Acting(at(3), act("measure", {"val_loss": 7.0}), after_row=False),
                Acting(at(3), act("save", {"checkpoint_wait_s": 5.0})))
    assert bench.events[4:9] == [("row", 2), ("measure", 3), ("row", 3), ("save", 3), ("step", 4)]
    assert [row.get("val_loss") for row in bench.rows] == [None, None, 7.0, None, None, None]
    assert [row["checkpoint_wait_s"] for row in bench.rows] == [0, 0, 0, 5.0, 0, 0], "waited since the row before"


def test_waits_add_up_over_the_rows_that_are_not_written():
    bench = Bench("--metrics.every", "3")
    bench.train(Acting(at(1, 2, 4), lambda step, state: {"checkpoint_wait_s": 1.0}))
    assert [(row["step"], row["checkpoint_wait_s"]) for row in bench.rows] == [(3, 2.0), (6, 1.0)]


def test_what_a_hook_takes_is_in_no_steps_time():
    bench = Bench()
    bench.train(Acting(at(2, 4), lambda step, state: time.sleep(0.3) or {}),
                Acting(at(4), lambda step, state: time.sleep(0.3) or {}, after_row=False))
    last = bench.rows[-1]
    assert (1 - last["goodput"]) * last["elapsed_s"] >= 0.9


def test_the_last_hooks_are_told_that_the_loop_ends():
    for stop_at, ends in ((None, 6), (3, 3)):
        bench, told = Bench(), []

        def due(step, ending):
            bench.listener.number = 15 if step == stop_at else bench.listener.number
            return bool(told.append((step, ending)))

        done = bench.train(Acting(lambda step, ending: due(step, ending), lambda step, state: {}),
                           Acting(lambda step, ending: ending,
                                     lambda step, state: bench.events.append("saved") or {}))
        # A request is noted while step 3 is looked at, so that the step after it is the last.
        assert done == ends + (stop_at is not None) and told[-1] == (done, True) and not any(e for _, e in told[:-1])
        assert bench.events[-1] == "saved", "after its row"


def test_steps_that_are_skipped_in_a_row_stop_the_run_before_anything_is_saved():
    bench, saved = Bench("--training.max_skipped_steps", "2", broken=(2, 4, 5)), []
    with pytest.raises(TooManySkippedSteps) as stopped:
        bench.train(Acting(at(3, 5), lambda step, state: saved.append(step) or {}))
    assert saved == [3], "one that is followed by a good step is none in a row"
    assert [row["step"] for row in bench.rows] == [1, 2, 3, 4, 5]
    for key in ("optimizer.learning_rate=0.", "optimizer.warmup_steps=", "data.skip_batches", "checkpoint.step"):
        assert key in str(stopped.value), "all that may change on resume"


def held(name, weight, *sums):
    return SimpleNamespace(name=name, weight=weight, num_batches=len(sums), batch=lambda i, rows: sums[i])


def validated(bench, *sets):
    bench.data.validation = sets
    validation = LossValidation(bench.run, bench.program, bench.data, bench.stop)
    return validation, validation.act(3, SimpleNamespace(params=None))


def test_a_validation_loss_weighs_batches_by_their_targets_and_sources_by_their_weights(capsys):
    bench = Bench("--validation.batches", "2")
    validation, numbers = validated(bench, held("web", 0.75, (6.0, 2), (2.0, 2), (99.0, 1)),
                                    held("code", 0.25, (5.0, 5)))
    assert numbers == {"val_loss": 0.75 * 2.0 + 0.25 * 1.0, "val_loss/web": 2.0, "val_loss/code": 1.0}
    assert validation.loss == 1.75
    assert capsys.readouterr().out == "step 3: validation loss 1.7500 nats per token (web 2.0000, code 1.0000)\n"
    assert validated(Bench(), held("", 1.0, (6.0, 2)))[1] == {"val_loss": 3.0}


def test_a_validation_without_a_target_is_not_the_number_0(capsys):
    _, numbers = validated(Bench(), held("web", 0.5, (6.0, 2)), held("masked", 0.5, (0.0, 0)))
    assert numbers["val_loss/web"] == 3.0 and np.isnan([numbers["val_loss/masked"], numbers["val_loss"]]).all()
    assert "masked nan" in capsys.readouterr().out


def test_a_validation_that_fails_is_told_and_left_out(capsys):
    bench = Bench()
    bench.program.evaluate = lambda p, batch: (_ for _ in ()).throw(MemoryError("16 GiB"))
    validation, numbers = validated(bench, held("", 1.0, (1.0, 1)))
    assert (numbers, validation.loss) == ({}, None)
    assert capsys.readouterr().err == "step 3: the validation failed and is skipped: MemoryError: 16 GiB\n"


def test_a_validation_is_given_up_between_two_batches_where_a_stop_is_requested(capsys):
    bench, read = Bench(), []

    def batch(i, rows):
        read.append(i)
        bench.listener.number = 15 if i == 2 else None
        return 1.0, 1

    sets = SimpleNamespace(name="", weight=1.0, num_batches=8, batch=batch)
    validation, numbers = validated(bench, sets)
    assert (numbers, validation.loss, read) == ({}, None, [0, 1, 2]) and bench.stop.agreed
    assert "the validation was interrupted" in capsys.readouterr().out


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def collected(monkeypatch):
    """The number of steps taken at each collection, while the loop runs; automatic ones are noted as such."""
    bench, found = Bench("--training.steps", "12"), []
    monkeypatch.setattr(garbage, "EVERY", 5)

    def note(phase, info):
        taken = sum(kind == "step" for kind, _ in bench.events)
        if phase == "start" and (not gc.isenabled() or 0 < taken < 12):
            found.append("automatic" if gc.isenabled() else taken)
    gc.callbacks.append(note)
    yield bench, found
    gc.callbacks.remove(note)


def test_garbage_is_collected_at_the_same_steps_and_never_else(collected):
    """Also in a process that allocates more than its peers; what is collected depends on the step alone."""
    bench, found = collected
    kept, step = [], bench._step
    bench._step = lambda *args: (kept.extend([] for _ in range(20_000)), step(*args))[1]   # many automatic collections
    assert gc.isenabled() and bench.train(Acting(at(7), lambda step, state: {})) == 12
    assert found == [0, 5, 7, 10], "before the first step, every fifth one, and where all wait for a hook"
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_resumed_process_collects_at_the_steps_of_the_run(collected):
    bench, found = collected
    bench.train(start=4)
    assert found == [0, 1, 6], "steps 5 and 10 of the run"


def test_cycles_live_no_longer_than_until_the_next_collection(collected):
    bench, _ = collected
    cycles, alive, step = [], [], bench._step

    def leaves_a_cycle(*args):
        cycles.append(weakref.ref(Cycle()))
        alive.append(sum(one() is not None for one in cycles))
        return step(*args)
    bench._step = leaves_a_cycle
    bench.train()
    assert alive == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    gc.collect()
    assert not any(one() for one in cycles), "a loop that ends before its next collection leaves them to Python"


def test_whatever_ends_the_loop_the_collector_is_as_before():
    bench = Bench("--training.max_skipped_steps", "1", broken=(2,))
    with pytest.raises(TooManySkippedSteps):
        bench.train()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:
        Bench().train()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_end_of_a_step_that_a_busy_host_sees_late_is_known_to_be_late():
    """The host holds the interpreter's lock for 0.4 s, from the middle of a step of 0.2 s on."""
    class Value:
        def __init__(self):
            self.end = time.perf_counter() + 0.2

        def is_ready(self):
            return time.perf_counter() >= self.end

        def block_until_ready(self):
            time.sleep(max(0.0, self.end - time.perf_counter()))

    with loop.StepClock() as clock:
        punctual = clock.observe({"loss": Value()}).result()
        value = Value()
        seen = clock.observe({"loss": value})
        time.sleep(0.1)
        ctypes.PyDLL(None).usleep(400_000)
        late = seen.result()
        fast = clock.observe({}).result()
    assert late.seen >= value.end + 0.25 and late.seen - late.late_s <= value.end
    assert punctual.late_s < 0.1 and fast.late_s < 0.1, "as far as this machine allows"
