"""Where the seconds of a run went: exact after kills, stops, hangs, steps taken again and clocks that were set.

Runs are lived on a clock of the test's own, through the record, the rows and the history that a real run writes.
"""
import concurrent.futures
import json
import os
import shutil
import types
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain import config
from meshtrain.commands import report
from meshtrain.cluster.stacks import ProcessState
from meshtrain.config import ConfigError
from meshtrain.inspection import measured
from meshtrain.journal import goodput, history, journal, metrics, step_times
from meshtrain.journal.rows import MetricRows
from meshtrain.journal import rows as rows_of

EXACT = 1e-6    # of sums of floats near 1e9, where a wall clock's last digits lie


class Killed(BaseException):
    """The process is gone: nothing more is written."""


class Clocks:
    """A steady clock, and a wall clock that may be set."""

    def __init__(self):
        self.steady, self.wall, self.uptime, self.boot = 1000.0, 1.7e9, 5000.0, "boot 1"

    def sleep(self, seconds: float) -> None:
        self.steady, self.wall, self.uptime = self.steady + seconds, self.wall + seconds, self.uptime + seconds

    def module(self):
        return types.SimpleNamespace(perf_counter=lambda: self.steady, time=lambda: self.wall, CLOCK_BOOTTIME=7,
                                     clock_gettime=lambda _: self.uptime)


class Life:
    """Tries of one run, in a directory of their own."""

    def __init__(self, directory: Path, clocks: Clocks, every: int = 1):
        self.directory, self.clocks, self.every = directory, clocks, every
        directory.mkdir()
        (directory / "config.toml").write_text(
            '[run]\nname = "x"\n[training]\nsteps = 100\n[data]\nsource = "stdlib"\nglobal_batch = 2\nseq_len = 4\n')
        boot = directory / "boot"
        self.boot, history.BOOT_ID = boot, boot

    def try_(self, step: int, to: int, *, ends="killed", start=10.0, compile=20.0, restore=5.0,
             step_s=2.0, wait=0.5, save_every=4,
             save_s=3.0, validation_s=0.0, idle_s=0.0, at=lambda number: None):
        """A try from after `step` to the end of step `to`. ends: killed, or what it says at its end; or an exception to
        raise."""
        self.boot.write_text(self.clocks.boot)
        account, run = goodput.Account(), config.Run(metrics=dict(every=self.every), training=dict(steps=100))
        sleep = self.clocks.sleep
        sleep(start)
        killed = False
        try:
            with history.record_attempt(self.directory, step, account,
                              {"on": "here", "cause": f"from {step}", "processes": 1}) as this:
                with account.count_as("compile"):
                    sleep(compile)
                with account.count_as("restore"):
                    sleep(restore)
                try:
                    with metrics.MetricsWriter(self.directory / "metrics.jsonl") as rows, account.count_as(goodput.LOOP):
                        rows_of.cut_after(rows.path, step)
                        kept = journal.Journal(run, rows, types.SimpleNamespace(step=lambda row: None),
                                               journal.Flops(1.0), account)
                        for number in range(step + 1, to + 1):
                            sleep(step_s)
                            kept.add_step(number, number, 1,
                                          dict(loss=1.0, grad_norm=1.0, learning_rate=0.1, skipped=False),
                                          self._ended())
                            kept.add({"data_wait_s": wait})
                            kept.settle()
                            if number % save_every == 0:
                                with kept.pause("checkpoint"):
                                    sleep(save_s)
                            if validation_s:
                                with kept.pause("validation"):
                                    sleep(validation_s)
                            at(number)
                            this.beat()
                        sleep(idle_s)
                        this.beat()
                        if isinstance(ends, BaseException):
                            raise ends
                    if ends == "killed":
                        raise Killed
                    this.end(ends)
                except Killed:
                    killed = this._end_recorded = True
                    this._beat.close()
        except Exception as error:
            assert error is ends
        assert killed == (ends == "killed")

    def _ended(self):
        future = concurrent.futures.Future()
        future.set_result(step_times.StepEnd(self.clocks.steady))
        return future

    def told(self) -> dict:
        return measured.of(self.directory)


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    made = Clocks()
    for module in (goodput, history, step_times):
        monkeypatch.setattr(module, "time", made.module())
    monkeypatch.setattr(history, "BEAT_S", 3600.0)      # by the test itself
    monkeypatch.setattr(history, "BOOT_ID", history.BOOT_ID)
    return made


@pytest.fixture
def life(tmp_path, clocks) -> Life:
    return Life(tmp_path / "run", clocks)


def three_tries(life: Life) -> None:
    """0 to 7, killed; 70 s down; from the checkpoint of 4 to 10, stopped; 30 s down; from 10 to 12."""
    life.try_(0, 7)
    life.clocks.sleep(70)
    life.try_(4, 10, ends="stopped on request (SIGTERM)")
    life.clocks.sleep(30)
    life.try_(10, 12, ends="finished")


SPENT = {"steps": 12 * 1.5, "start": 30.0, "compile": 60.0, "restore": 15.0, "data": 15 * 0.5,
         "checkpoints": 3 * 3.0, "validation": 0.0, "weight sync": 0.0, "sampling": 0.0, "rewards": 0.0,
         "the rest": 0.0, "hang": 0.0, "steps taken again": 3 * 1.5, "between tries": 100.0}


def test_all_seconds_of_three_tries_are_told_apart(life):
    three_tries(life)
    told = life.told()
    assert told["time_s"] == pytest.approx(SPENT, abs=EXACT)
    assert told["goodput"] == pytest.approx(18 / sum(SPENT.values()))
    assert [(one["from_step"], one["to_step"], one["steps_again"], one["how"]) for one in told["starts"]] == [
        (0, 7, 0, f"{goodput.UNKNOWN} (killed, or a power failure)"), (4, 10, 3, "stopped on request (SIGTERM)"),
        (10, 12, 0, "finished")]
    assert [one["run_s"] for one in told["starts"]] == pytest.approx(
        [35 + 7 * 2 + 3, 35 + 6 * 2 + 3, 35 + 4 + 3], abs=EXACT)


def test_every_row_has_the_wall_clock_and_the_share_until_then(life):
    began = life.clocks.wall
    three_tries(life)
    rows = {row["step"]: row for row in [*MetricRows(life.directory / "metrics.jsonl")]}
    assert [rows[1]["time"] - began, rows[1]["elapsed_s"]] == pytest.approx([37, 37], abs=EXACT)
    assert rows[1]["goodput"] == pytest.approx(1.5 / 37)
    # Killed after 52 s; 70 s later the second try begins, whose first step ends 37 s after that. Of the steps 5 to 7
    # only one counts.
    assert rows[5]["elapsed_s"] == pytest.approx(52 + 70 + 37) and rows[5]["goodput"] == pytest.approx(
        5 * 1.5 / (52 + 70 + 37))
    assert rows[12]["goodput"] * rows[12]["elapsed_s"] == pytest.approx(12 * 1.5)


@pytest.mark.parametrize("every", [3, 5, 100])
def test_rows_that_are_thinned_out_change_no_account(tmp_path, clocks, every):
    life = Life(tmp_path / "run", clocks, every)
    three_tries(life)
    # Steps between two rows are as long as their neighbours: here all are.
    assert life.told()["time_s"] == pytest.approx(SPENT, abs=EXACT)


def test_a_run_that_goes_back_behind_several_tries_takes_all_of_their_steps_again(life):
    life.try_(0, 9)
    life.try_(8, 10)
    life.try_(4, 6, ends="stopped on request (SIGINT)")
    told = life.told()
    assert [one["steps_again"] for one in told["starts"]] == [0, 1, 6]
    assert told["time_s"]["steps"] == pytest.approx(6 * 1.5) and told["time_s"]["steps taken again"] == pytest.approx(
        7 * 1.5)
    assert sum(told["time_s"].values()) == pytest.approx(sum(one["run_s"] for one in told["starts"]))


def test_a_start_that_dies_before_its_first_step_takes_nothing_again_and_is_no_mystery(life):
    three_tries(life)
    life.try_(8, 8, step_s=0.0)     # its rows are not cut, nor its steps taken
    life.try_(8, 8, ends="finished")
    told = life.told()
    assert [one["steps_again"] for one in told["starts"]] == [0, 3, 0, 4, 0]
    assert [(one["from_step"], one["to_step"]) for one in told["starts"][3:]] == [(8, 8), (8, 8)]
    assert told["time_s"]["steps"] == pytest.approx(8 * 1.5)
    assert sum(told["time_s"].values()) == pytest.approx(sum(one["run_s"] + one["down_s"] for one in told["starts"]))


@pytest.mark.parametrize("by_s", [300.0, -86_400.0])
def test_a_wall_clock_that_is_set_within_a_try_or_between_two_moves_no_second(life, by_s):
    def set_clock(number):
        life.clocks.wall += by_s * (number == 2)
    life.try_(0, 7, at=set_clock)
    life.clocks.sleep(70)
    life.clocks.wall += by_s
    life.try_(4, 10, ends="stopped on request (SIGTERM)", at=lambda number: None)
    life.clocks.sleep(30)
    life.try_(10, 12, ends="finished")
    told = life.told()
    assert told["time_s"] == pytest.approx(SPENT, abs=EXACT)
    assert [one["clock_s"] for one in told["starts"]] == pytest.approx([by_s, 0, 0], abs=EXACT)
    assert f"the wall clock was adjusted by {by_s:+,.0f} s meanwhile" in report.summary(told)


def test_on_another_host_the_wall_clock_tells_the_time_between_tries(life):
    life.try_(0, 4)
    life.clocks.sleep(70)
    life.clocks.boot, life.clocks.uptime = "boot 2", 3.0
    life.try_(4, 8, ends="finished")
    assert life.told()["time_s"]["between tries"] == pytest.approx(70, abs=EXACT)


def test_a_clock_that_went_back_between_two_hosts_gives_no_negative_time(life):
    life.try_(0, 4)
    life.clocks.boot, life.clocks.wall = "boot 2", life.clocks.wall - 1e6
    life.try_(4, 8, ends="finished")
    told = life.told()
    assert told["time_s"]["between tries"] == 0 and min(told["time_s"].values()) >= 0 and 0 < told["goodput"] < 1


@pytest.mark.parametrize("idle_s, stacks, hang_s",
                         [(600.0, False, 600.0), (600.0, True, 600.0), (30.0, True, 30.0), (30.0, False, 0.0)])
def test_a_try_that_was_stuck_before_it_was_killed_hung(life, idle_s, stacks, hang_s):
    life.try_(0, 8, idle_s=idle_s)
    for state in ("hangs", "runs") if stacks else ("runs",):        # a process that was killed leaves a file, too
        place = life.directory / history.STACKS / ("try-1" if state == "hangs" else "")
        place.mkdir(parents=True, exist_ok=True)
        told = ProcessState(1, 2, "host", 17, "a", "step 9", life.clocks.wall - idle_s, 9, "1", state, "too long")
        (place
         / "process-1.txt").write_bytes(told.head() + b'Thread 0x0000000000000001 (most recent call first):\n  File '
                                                      b'"a.py", line 1 in f\n' * (state == "hangs"))
        os.utime(place / "process-1.txt", (life.clocks.wall, life.clocks.wall))
    life.try_(8, 9, ends="finished")
    told = life.told()
    assert told["time_s"]["hang"] == pytest.approx(hang_s) and told["time_s"]["the rest"] == pytest.approx(
        30.0 - min(hang_s, 30.0))
    how = told["starts"][0]["how"]
    assert ("process 1 hangs in step 9" in how) == stacks and ("stuck for 10.0 min after step 8" in how) == (
        hang_s == 600 and not stacks)


def test_slow_steps_are_no_hang(life):
    life.try_(0, 4, step_s=100.0, idle_s=150.0)
    life.try_(4, 5, step_s=100.0, ends="finished")
    assert life.told()["time_s"]["hang"] == 0


@pytest.mark.parametrize("error, how", [(RuntimeError("the power went"), "failed: RuntimeError: the power went")])
def test_an_error_is_the_cause_of_an_end(life, error, how):
    life.try_(0, 4)
    life.try_(4, 6, ends=error, idle_s=1.0)
    one = life.told()["starts"][-1]
    assert how in one["how"] and one["to_step"] == 6 and one["spent_s"]["steps"] == pytest.approx(2 * 1.5)


def test_a_mistake_that_is_found_late_in_the_first_start_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError), history.record_attempt(tmp_path, 0, goodput.Account(), {"on": "", "cause": ""}):
        assert (tmp_path / "history.jsonl").exists()
        raise ConfigError("no such file")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_that_is_found_late_in_a_later_start_leaves_the_history_as_it_was(tmp_path):
    log = tmp_path / "history.jsonl"
    with history.record_attempt(tmp_path, 0, goodput.Account(), {"on": "", "cause": ""}) as attempt:
        attempt.end("finished")
    before = log.read_bytes(), log.stat().st_mtime_ns
    with pytest.raises(ConfigError), history.record_attempt(tmp_path, 0, goodput.Account(), {"on": "", "cause": ""}):
        assert log.read_bytes() != before[0]
        raise ConfigError("no such file")
    assert (log.read_bytes(), log.stat().st_mtime_ns) == before


def test_a_try_that_goes_back_by_itself_takes_its_steps_again(life):
    rows = []

    def spike(number):
        if number == 7:
            this, = [one for one in rows if not one._end_recorded]
            this.go_back(4)
    real = history.Attempt.beat
    try:
        history.Attempt.beat = lambda self: (rows.append(self) if self not in rows else None, real(self))
        life.try_(0, 9, ends="finished", at=spike)
    finally:
        history.Attempt.beat = real
    spent = life.told()["time_s"]
    assert (spent["steps"], spent["steps taken again"], spent["the rest"]) == pytest.approx(
        (6 * 1.5, 3 * 1.5, 0.0), abs=EXACT)
    assert sum(spent.values()) == pytest.approx(35 + 9 * 2 + 2 * 3)


def test_validations_and_checkpoints_are_not_the_rest(life):
    life.try_(0, 8, validation_s=4.0, ends="finished")
    spent = life.told()["time_s"]
    assert (spent["validation"], spent["checkpoints"], spent["the rest"]) == pytest.approx((32.0, 6.0, 0.0), abs=EXACT)


def test_a_run_at_work_is_told_up_to_its_last_account(life, capsys):
    live = []
    life.try_(0, 7, at=lambda number: live.append(life.told()) if number == 6 else None)
    told, = live    # the last account was written after step 5
    assert told["step"] == 6 and told["starts"][0]["to_step"] == 5
    assert told["time_s"]["steps"] == pytest.approx(5 * 1.5)
    assert told["starts"][0]["run_s"] == pytest.approx(35 + 5 * 2 + 3)


@pytest.mark.parametrize("line", [
    "", "no JSON", "[]", '{"event": "start", "run_s": 1}', '{"event": "note", "text": "mine"}', '{"event": ["start"]}',
    '{"event": "end", "time": 1, "run_s": 1, "step": 1, "counted_s": 1, "spent_s": {"steps": "x"}, "how": ""}',
    '{"event": "end", "time": NaN, "run_s": 1, "step": 1, "counted_s": 1, "spent_s": {}, "how": ""}', "\x00" * 9,
    '{"a'])
def test_a_line_of_the_history_that_is_none_is_told_and_left_out_and_stays(life, line, capsys):
    life.try_(0, 7)
    with open(life.directory / "history.jsonl", "a") as file:
        file.write(line + "\n" * (line != '{"a'))
    life.clocks.sleep(70)
    life.try_(4, 10, ends="stopped on request (SIGTERM)")
    life.clocks.sleep(30)
    life.try_(10, 12, ends="finished")
    assert ("history.jsonl: this version cannot read 1 of its lines" in capsys.readouterr().err) == bool(line)
    assert life.told()["time_s"] == pytest.approx(SPENT, abs=EXACT)
    assert line in (life.directory / "history.jsonl").read_text().split("\n")
    call = report.summary(life.told())
    assert "3 starts" in call


def test_a_history_without_accounts_is_told_up_to_its_starts(life):
    """As versions left it that kept the account in a file of its own."""
    life.try_(0, 7)
    path = life.directory / "history.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"beat"' not in line))
    life.clocks.sleep(70)
    life.try_(4, 8, ends="finished")
    told = life.told()
    assert told["starts"][0]["run_s"] == pytest.approx(10) and told["starts"][0]["how"].startswith(goodput.UNKNOWN)
    assert sum(told["time_s"].values()) == pytest.approx(52 + 70 + 35 + 4 * 2 + 3, abs=1e-3)


def test_an_account_is_not_written_over_what_somebody_has_edited(life):
    path = life.directory / "history.jsonl"

    def edit(number):
        if number == 3:
            path.write_text('{"event": "note"}\n' + path.read_text())
    life.try_(0, 7, at=edit, ends="finished")
    kinds = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert kinds == ["note", "start", "beat", "end"]


def test_rows_alone_tell_of_steps_and_name_no_share(life):
    three_tries(life)
    (life.directory / "history.jsonl").unlink()
    told = life.told()
    assert told["goodput"] is None and told["time_s"] == pytest.approx(
        {"steps": 12 * 1.5, "data": 6.0, "checkpoints": 0.0})
    assert "time: steps" in report.summary(told) and "goodput" not in report.summary(told)


def test_the_line_at_the_end_names_what_took_the_rest_largest_first(life):
    three_tries(life)
    words = goodput.describe(life.told()["time_s"])
    assert words.startswith("of 4.1 min, 18.0 s were steps; between tries 100.0 s, compile 60.0 s, start 30.0 s, restore "
                            "15.0 s, checkpoints 9.0 s"), words
    assert words in report.summary(life.told()) and goodput.describe({}) == ""


def test_ten_minutes_and_more_have_a_share():
    spent = dict.fromkeys(goodput.PARTS.values(), 0.0) | {"steps": 540.0, "compile": 59.0, "restore": 0.2}
    assert goodput.describe(spent) == "of 10.0 min, 9.0 min were steps; compile 59.0 s"
    assert goodput.describe(spent | {"compile": 60.0}) == "goodput 90.0% of 10.0 min; compile 10.0%"


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with history.record_attempt(tmp_path, 0, goodput.Account(), {}) as this:
        this.end("finished")
    assert list(tmp_path.iterdir()) == [] and this.describe() == ""


def test_a_report_reads_and_touches_nothing(life, tmp_path):
    three_tries(life)
    shutil.copytree(life.directory, tmp_path / "copy")
    life.told()
    assert {path.name: path.read_bytes() for path in life.directory.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}


def summed_from_the_beginning(rows, step):
    """What `sum_steps_s` says, by reading all rows forward."""
    total, before = 0.0, 0
    for row in rows:
        if "goodput" not in row:
            continue
        until_s = row["goodput"] * row["elapsed_s"]
        if row["step"] > step:
            return total + (until_s - total) * (step - before) / (row["step"] - before)
        total, before = until_s, row["step"]
    return total * step / before if before else 0.0


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 9), st.booleans()), max_size=9),
       st.integers(0, 30), st.booleans())
def test_seconds_up_to_a_step_are_the_same_read_from_either_end(gaps, step, one_more):
    rows, number, elapsed_s = [], 0, 0.0
    for gap, time_s, accounted in gaps:
        number, elapsed_s = number + gap, elapsed_s + 2 * time_s
        rows.append({"step": number} | ({"goodput": 0.5, "elapsed_s": elapsed_s} if accounted else {}))
    unwritten = [{"step": number + 1, "goodput": 1.0, "elapsed_s": elapsed_s}] * one_more
    assert goodput.sum_steps_s(rows, step, unwritten) == pytest.approx(
        summed_from_the_beginning([*rows, *unwritten], step), abs=1e-9)
