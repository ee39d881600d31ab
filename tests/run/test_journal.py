"""What the journal makes of a step: times without pauses, tokens per second, MFU, waits that add up, skips in a row."""
import concurrent.futures
import math
import time
import types

import numpy as np
import pytest

from meshtrain import config
from meshtrain.journal import guards, journal, step_times
from meshtrain.journal.step_times import StepEnd


class Kept:
    """A writer and a line of progress that keep their rows."""

    def __init__(self):
        self.rows, self.shown = [], []
        self.write, self.step = self.rows.append, self.shown.append


def journal_of(**training):
    run = config.Run(data=dict(seq_len=32, global_batch=4), training=training,
                     metrics=dict(every=training.pop("every", 1)))
    kept = Kept()
    return kept, journal.Journal(run, kept, kept, journal.Flops(6e12, 4e12))


def ended(at: float, late_s: float = 0.0) -> concurrent.futures.Future:
    future = concurrent.futures.Future()
    future.set_result(StepEnd(at, late_s))
    return future


def metrics(loss=2.0, skipped=False) -> dict:
    return {"loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": skipped}


def test_a_row_has_the_steps_own_time_and_rates_and_pauses_are_in_none(monkeypatch):
    kept, steps = journal_of()
    begin = steps.times._mark
    steps.add_step(1, 128, 128, metrics(), ended(begin + 2))
    steps.settle()
    clock = iter([begin + 2.5, begin + 7.5])
    monkeypatch.setattr(step_times, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    with steps.pause():        # 5 s
        pass
    steps.add_step(2, 256, 128, metrics(), ended(begin + 10))      # 8 s after the one before
    steps.settle()
    first, second = kept.rows
    assert (first["step"], first["tokens"], second["step"], second["tokens"]) == (1, 128, 2, 256)
    assert (first["step_time_s"], second["step_time_s"]) == pytest.approx((2, 3))
    assert (first["tokens_per_s"], second["tokens_per_s"]) == pytest.approx((64, 128 / 3))
    assert (first["mfu"], second["mfu"]) == pytest.approx((6 / 2 / 4, 6 / 3 / 4))


def test_a_second_pause_after_a_step_begins_where_the_first_ended(monkeypatch):
    """A validation leaves the step's row to the checkpoint's hook, and neither counts the other's time."""
    kept, steps = journal_of()
    begin = steps.times._mark
    steps.add_step(1, 128, 128, metrics(), ended(begin + 2))
    clock = iter([begin + 6, begin + 7])
    monkeypatch.setattr(step_times, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    with steps.pause("validation"):        # 4 s
        pass
    with steps.pause("checkpoint"):        # 1 s
        steps.settle()
    steps.add_step(2, 256, 128, metrics(), ended(begin + 10))
    steps.settle()
    assert [row["step_time_s"] for row in kept.rows] == pytest.approx([2, 3])


def test_a_step_that_is_seen_late_leaves_the_next_row_no_speed_that_it_had_not():
    """Four steps of 2 s. The second is seen 1.5 s late: its row has them, and the next begins where it may have."""
    kept, steps = journal_of()
    begin = steps.times._mark
    for number, (at, late_s) in enumerate(((2, 0), (5.5, 1.6), (6, 0), (8, 0)), 1):
        steps.add_step(number, number * 128, 128, metrics(), ended(begin + at, late_s))
        steps.settle()
    assert [row["step_time_s"] for row in kept.rows] == pytest.approx([2, 3.5, 0.5 + 1.6, 2])
    assert max(row["tokens_per_s"] for row in kept.rows) == pytest.approx(64)
    assert steps.account.counted_s == pytest.approx(8), "each second once"


def test_after_a_pause_a_step_began_behind_it_however_late_the_one_before_was_seen(monkeypatch):
    kept, steps = journal_of()
    begin = steps.times._mark
    steps.add_step(1, 128, 128, metrics(), ended(begin + 3, 1.0))
    monkeypatch.setattr(step_times, "time", types.SimpleNamespace(perf_counter=lambda: begin + 7))
    with steps.pause():
        steps.settle()
    steps.add_step(2, 256, 128, metrics(), ended(begin + 9))
    steps.settle()
    assert [row["step_time_s"] for row in kept.rows] == pytest.approx([3, 2])


def test_a_row_has_the_mean_of_the_steps_since_the_row_before():
    kept, steps = journal_of(every=3)
    begin = steps.times._mark
    for number, (at, own, late_s) in enumerate(((1, 128, 0), (4, 64, 2), (4.5, 128, 0), (6, 128, 0), (7, 128, 0),
                                                (8, 0, 0)), 1):
        steps.add_step(number, number * 128, own, metrics(), ended(begin + at, late_s))
        steps.settle()
    assert [(row["step"], row["step_time_s"], row["tokens_per_s"]) for row in kept.rows] == [
        (3, pytest.approx(1.5), pytest.approx(320 / 4.5)), (6, pytest.approx(3.5 / 3), pytest.approx(256 / 3.5))]
    assert [row["mfu"] for row in kept.rows] == pytest.approx([6 * 2.5 / 4.5 / 4, 6 * 2 / 3.5 / 4])


def test_waits_of_rows_that_are_not_written_add_up_and_other_numbers_ask_for_a_row():
    kept, steps = journal_of(every=3)
    for number in (1, 2, 3, 4):
        steps.add_step(number, number * 128, 128, metrics(), ended(time.perf_counter()))
        steps.add({"data_wait_s": 0.5} | ({"val_loss": 1.5} if number == 4 else {}))
        steps.settle()
    assert [(row["step"], row["data_wait_s"], row.get("val_loss")) for row in kept.rows] == [
        (3, 1.5, None), (4, 0.5, 1.5)]
    assert [row["step"] for row in kept.shown] == [1, 2, 3, 4]


def test_only_skips_in_a_row_end_a_run(capsys):
    kept, steps = journal_of(max_skipped_steps=2)
    for number, (skipped, in_a_row) in enumerate(((True, 1), (False, 0), (True, 1)), 1):
        steps.add_step(number, number * 128, 128, metrics(float("nan") if skipped else 2.0, skipped),
                         ended(time.perf_counter()))
        steps.settle()
        assert steps.guards[1].in_a_row == in_a_row
    assert [row["skipped"] for row in kept.rows] == [True, False,
                                                     True] and "not finite, skipped" in capsys.readouterr().out
    steps.add_step(4, 512, 128, metrics(float("nan"), True), ended(time.perf_counter()))
    with pytest.raises(guards.TooManySkippedSteps, match="2 steps in a row, up to step 4"):
        steps.settle()
    assert kept.rows[-1]["step"] == 4, "the row stands, and tells why"


@pytest.mark.parametrize("column, limit, keys", [
    ("max", 1e-3, {}), ("max", 1e-3, dict(rl=dict(updates=2))), ("mean", 0.05, dict(model=dict(num_experts=4))),
    ("mean", 0.05, dict(model=dict(compute_dtype="bfloat16"))), ("max", math.inf, dict(rl=dict(lag=1))),
    ("max", math.inf, dict(rl=dict(updates=2, old="sampler"))),
    ("max", math.inf, dict(model=dict(matmul_dtype="float8"))),
    ("max", math.inf, dict(training=dict(objective="next_token")))])
def test_a_sampler_that_differs_by_more_than_rounding_is_told_once(column, limit, keys, capsys):
    """Where it has the same weights as the step."""
    run = config.Run(data=dict(seq_len=32, global_batch=4), training=dict(objective="rl"),
                     model=dict(compute_dtype="float32")).replace(**keys)
    kept = Kept()
    steps = journal.Journal(run, kept, kept, journal.Flops(6e12, 4e12))
    for number, apart in enumerate((limit / 2, 2 * limit, 3 * limit), 1):
        told = metrics() | {"mismatch_max": np.float32(1), f"mismatch_{column}": np.float32(apart)}
        steps.add_step(number, 128, 128, told, ended(steps.times._mark + number))
        steps.settle()
    told = capsys.readouterr().err
    assert told.count("the sampler computes other probabilities than the training step") == (limit < math.inf)
    assert limit == math.inf or f"step 2: mismatch_{column}={2 * limit:.2g}, but rounding" in told
