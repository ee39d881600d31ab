"""A report of a long run, whose metrics are read by a sample, beside the same report with all rows read."""
import contextlib
import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from commands import call
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pages import standing_alone

from meshtrain.commands import report
from meshtrain.inspection import compared, measured
from meshtrain.journal import rows, sample

CONFIG = "[run]\nname = 'x'\n[training]\nsteps = 100\n[data]\nglobal_batch = 2\nseq_len = 4\n"
# Files of a few kB count as long, and are read at distances of a few rows.
SHORT = {"WHOLE_BYTES": 3000, "WINDOWS": 12, "WINDOW_BYTES": 400, "ENDS_BYTES": 700, "PROBES": 20}
WHOLE = {"WHOLE_BYTES": 1 << 40}


@contextlib.contextmanager
def reading(sizes: dict[str, int]):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(sample, name, value)
        yield


def write_run(directory, lines) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.toml").write_text(CONFIG)
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


def make_row(step: int, draw: random.Random) -> dict:
    row = {"step": step, "loss": 2 + draw.random(), "tokens": 8 * step, "step_time_s": 1 + draw.random(),
           "tokens_per_s": 100 * draw.random(), "skipped": draw.random() < 0.03, "data_wait_s": 0.0,
           "pad": "p" * draw.choice([0, 0, 30, 300])}
    row |= {"loss": None} if row["skipped"] else {}
    row |= {"val_loss": 2 + draw.random()} if draw.random() < 0.03 else {}
    return row | ({"spike_limit": 3.5, "loss": 9.0 + draw.random()} if draw.random() < 0.01 else {})


def make_lines(count: int, seed: int) -> list[str]:
    """With steps taken again after a restart, gaps, damaged and empty lines, and rows of unequal length."""
    draw, lines, step = random.Random(seed), [], 0
    for k in range(count):
        step = max(1, step + draw.choice([1] * 60 + [-20, 5]))
        at_an_end = k < 3 or k >= count - 3
        row = {"step": step, "loss": 2.5, "tokens": 8 * step} if at_an_end else make_row(step, draw)
        lines.append(json.dumps(row) + "\n")
        if draw.random() < 0.02 and not at_an_end:
            lines.append(draw.choice(["\n", "what?\n", '{"step": 3, "skipped": true, "val_loss": 0.1\n',
                                      '{"step": "no", "val_loss": 0.1, "spike_limit": 1}\n', "z" * 900 + "\n"]))
    return lines


@settings(max_examples=25)
@given(st.integers(0, 400), st.integers(0, 1 << 30), st.sampled_from(["", "torn", '{"step": 999, "skipped": true, "lo']))
def test_a_sampled_report_has_the_exact_numbers_of_a_full_one(tmp_path_factory, count, seed, torn):
    run = write_run(tmp_path_factory.mktemp("run"), [*make_lines(count, seed), torn])
    with reading(WHOLE):
        whole = measured.of(run)
    with reading(SHORT):
        drawn = measured.of(run)
    if (run / "metrics.jsonl").stat().st_size <= SHORT["WHOLE_BYTES"]:
        assert drawn == whole and drawn["sampled"] is None
        return
    assert [drawn[key] for key in ("step", "tokens", "skipped")] == [whole[key] for key in ("step", "tokens", "skipped")]
    assert {key: drawn["loss"][key] for key in drawn["loss"] if key != "trend"} == {
        key: whole["loss"][key] for key in whole["loss"] if key != "trend"}

    def points(told: dict, key: str) -> list[tuple]:
        return [point for point in zip(told["rows"]["step"], told["rows"][key]) if point[1] is not None]
    assert points(drawn, "val_loss") == points(whole, "val_loss")
    assert set(points(drawn, "loss")) <= set(points(whole, "loss"))
    assert [loss for _, loss in points(drawn, "loss") if loss > 8] == [
        loss for _, loss in points(whole, "loss") if loss > 8], "no spike is lost"
    assert drawn["no_rows"] <= whole["no_rows"] and drawn["sampled"]["rows"] > 0


@settings(max_examples=25)
@given(st.integers(40, 400), st.integers(0, 1 << 30))
def test_lines_in_ranges_are_those_that_begin_there_and_lines_with_a_text_are_all_found(tmp_path_factory, count, seed):
    path, draw = tmp_path_factory.mktemp("log") / "m.jsonl", random.Random(seed)
    path.write_text("".join([*make_lines(count, seed), "torn val_"]))
    log, size = rows.MetricRows(path), path.stat().st_size
    cuts = sorted(draw.sample(range(size + 1), 8))
    ranges = list(zip(cuts[::2], cuts[1::2]))
    lines = list(log.lines())
    assert list(log.lines(ranges)) == [line for first, stop in ranges for line in lines if first <= line.start < stop]
    text = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_BYTES", draw.choice([50, 300, 5000]))
        found = log.find([b"val_", b'"skipped": true'])
    assert found[:-1] == [line.start for line in lines if any(
        each in text[line.start:line.end] for each in (b"val_", b'"skipped": true'))], "and the torn one"


def test_medians_and_trends_of_a_sample_are_near_those_of_all_rows(tmp_path):
    """Rows of the second half are three times as long, and twice as fast: a sample by bytes must not favour them."""
    draw = random.Random(0)
    lines = [json.dumps({"step": step, "loss": 4 - step / 4000 + draw.gauss(0, 0.1), "step_time_s": 2.0 - (step > 4000),
                         "tokens_per_s": draw.gauss(100 * (1 + (step > 4000)), 5), "data_wait_s": 0.1,
                         "pad": "p" * 200 * (step > 4000)}) + "\n" for step in range(1, 8001)]
    run = write_run(tmp_path / "run", lines)
    with reading(WHOLE):
        whole = measured.of(run)
    with reading({"WHOLE_BYTES": 3000, "WINDOWS": 200, "WINDOW_BYTES": 1000}):
        drawn = measured.of(run)
    low, high = drawn["speed"]["between"]
    assert low <= whole["speed"]["tokens_per_s"] <= high and drawn["speed"]["rows"] < 2000
    assert drawn["sampled"]["of"] == pytest.approx(8000, rel=0.05)
    for end in ("begins", "ends"):
        assert drawn["loss"]["trend"][end] == pytest.approx(whole["loss"]["trend"][end], abs=0.05)
    assert drawn["time_s"] == pytest.approx(whole["time_s"], rel=0.05)
    smoothed = dict(zip(drawn["rows"]["step"], drawn["rows"]["smoothed"]["loss"]))
    assert all(abs(value - (4 - step / 4000)) < 0.2 for step, value in smoothed.items() if value is not None)


def test_a_spike_between_two_windows_does_not_move_the_running_mean(tmp_path):
    lines = [json.dumps({"step": step, "loss": 2.0} | ({"loss": 1e6, "spike_limit": 3.0} if step % 37 == 5 else {})
                        ) + "\n" for step in range(1, 3001)]
    run = write_run(tmp_path / "run", lines)
    with reading(SHORT | {"WINDOW_BYTES": 30, "WINDOWS": 200}):
        told = measured.of(run)["rows"]
    assert sum(loss == 1e6 for loss in told["loss"]) == 81, "all are shown"
    means = [value for value in told["smoothed"]["loss"] if value is not None]
    assert np.mean(means) < 1e5, "a spike in 37 rows; of all that are shown it would be one in three"


def test_the_loss_after_equally_many_tokens_is_that_of_a_full_reading(tmp_path):
    lines = [json.dumps({"step": step, "loss": 9 - step / 1000, "pad": "p" * (step % 7) * 9}) + "\n"
             for step in range(1, 4001)]
    log = rows.MetricRows(write_run(tmp_path / "run", lines) / "metrics.jsonl")
    for first, last in ((1, 1), (1, 4000), (1962, 2001), (3990, 9999), (5000, 6000), (2000, 2000)):
        with reading(SHORT):
            assert [row["step"] for row in sample.find_steps(log, first, last)] == list(
                range(first, min(last, 4000) + 1))
    other = write_run(tmp_path / "other", lines[:2000])
    with reading(SHORT):
        told = compared.of([str(tmp_path / "run"), str(other)])
    with reading(WHOLE):
        assert [run["loss_at_common"] for run in told["runs"]] == [
            run["loss_at_common"] for run in compared.of([str(tmp_path / "run"), str(other)])["runs"]]


def test_a_file_that_is_cut_or_grows_while_it_is_read_has_a_report(tmp_path):
    lines = make_lines(300, 7)
    run = write_run(tmp_path / "run", lines)
    with reading(SHORT):
        read = sample.of(rows.MetricRows(run / "metrics.jsonl"))
        write_run(run, lines[:150])
        assert [line.row for line, _ in read.lines()]
        write_run(run, lines * 2)
        assert max(line.start for line, _ in read.lines()) < read.size


def test_text_page_and_message_say_that_they_come_from_a_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", ["what?\n", *make_lines(400, 3)])
    with reading(SHORT):
        ran = call(report.main, "run", "--html", "r.html")
        told = json.loads(call(report.main, "run", "--json").out)
    said = f"the first and last rows and a sample of {told['sampled']['rows']}"
    read = standing_alone(Path("r.html").read_text())
    assert ran.code == 0 and said in ran.out and said in read.words and "sampled lines of run/metrics.jsonl" in ran.err
    assert f"median of a sample of {told['sampled']['rows']} rows" in read.words


def test_the_report_of_many_rows_takes_no_memory_for_them(tmp_path):
    """Of 4,000 here, 1.6 MB of text; read as a whole they take 3 MB."""
    draw = random.Random(0)
    run = write_run(tmp_path / "run", (json.dumps(make_row(step, draw) | {"pad": "p" * 200}) + "\n"
                                       for step in range(1, 4001)))
    with reading(SHORT):
        measured.of(run)
        tracemalloc.start()
        try:
            told = measured.of(run)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert held < 1.8e6 and told["step"] == 4000 and told["sampled"], held
