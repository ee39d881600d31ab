"""metrics.jsonl: exact floats, null for what is not finite, and a resume that leaves no row twice."""

import contextlib
import errno
import json
import os
import resource
import time
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain import run_files
from meshtrain.journal import goodput, metrics, rows
from meshtrain.journal.rows import MetricRows


def run_file(directory, *overrides):
    directory.mkdir(exist_ok=True)
    return run_files.load(["--run.dir", str(directory), "--run.name", "mine", *overrides])


def test_rows_are_readable_while_the_run_goes_on(tmp_path):
    writer = metrics.MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "loss": np.float32(0.1), "grad_norm": jnp.float32(2.5),
                  "skipped": np.bool_(False), "mfu": None, "tokens": 2**40})
    assert [*MetricRows(writer.path)] == [{"step": 1, "loss": float(np.float32(0.1)),
                                          "grad_norm": 2.5, "skipped": False, "mfu": None, "tokens": 2**40}]
    writer.write({"step": 2, "loss": float("nan"), "grad_norm": jnp.inf})
    assert [*MetricRows(writer.path)][1] == {"step": 2, "loss": None, "grad_norm": None}
    assert writer.path.read_text().count("\n") == 2
    writer.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_not_rounded(tmp_path_factory, value):
    writer = metrics.MetricsWriter(tmp_path_factory.mktemp("m") / "m.jsonl")
    writer.write({"step": 1, "loss": value})
    rows.cut_after(writer.path, 1)
    assert [*MetricRows(writer.path)] == [{"step": 1, "loss": value}]
    writer.close()


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 5}', "\ufffd"])
def test_a_resume_drops_later_rows_and_a_torn_line(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (2, 4)) + torn)
    writer = metrics.MetricsWriter(path)
    rows.cut_after(writer.path, 2)
    writer.write({"step": 3})
    writer.close()
    assert path.read_text() == '{"step": 2}\n{"step": 3}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_fresh_start_empties_what_an_unsaved_run_left(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n')
    writer = metrics.MetricsWriter(tmp_path / "m.jsonl")
    rows.cut_after(writer.path, 0)
    writer.close()
    assert [*MetricRows(writer.path)] == []


NO_ROWS = ["{}", '{"loss": 2.0}', "[]", "7", "null", '"step"', '{"step": null}', '{"step": "3"}',
           '{"step": true}', '{"st', "# mine",
           '{"step": 2, "loss": "low"}', "\x00" * 5000, "[" * 100_000]


@pytest.mark.parametrize("line", [*NO_ROWS, "", "   ", "\t"])
def test_a_line_that_is_no_row_never_forbids_to_go_on(tmp_path, line, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    rows.cut_after(path, 3)
    with metrics.open_writers(run_file(tmp_path, "--metrics.tensorboard", "false"), tmp_path, 3) as writers:
        writers.write({"step": 4})
    assert [row["step"] for row in [*MetricRows(path)]] == [1, 3, 4] and path.read_text().startswith(
        f'{{"step": 1}}\n{line}\n')
    assert list(reversed([*MetricRows(path)])) == list(reversed(rows.MetricRows(path)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("line", NO_ROWS)
def test_a_line_that_would_be_dropped_with_later_rows_is_kept_beside_and_told(tmp_path, line, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": 2}}\n{line}\n{{"step": 3}}\ntorn')
    with metrics.MetricsWriter(path) as writer:
        rows.cut_after(writer.path, 1)
        writer.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics.aside.jsonl").read_text() == f'{{"step": 2}}\n{line}\n{{"step": 3}}\n'
    assert "1 of the lines after step 1 are not metrics rows; they are kept in metrics.aside.jsonl" in capsys.readouterr().err


@given(st.lists(st.one_of(st.integers(0, 9).map(lambda step: f'{{"step": {step}, "x": "{step * "y"}"}}'),
                          st.sampled_from(["", "no", "z" * 40]))),
       st.sampled_from(["", "torn", "t" * 50]), st.integers(1, 30))
def test_a_file_read_from_its_end_has_the_lines_that_it_has_from_its_beginning(tmp_path_factory, lines, torn, block):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    path.write_text("".join(line + "\n" for line in lines) + torn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_BYTES", block)
        patch.setattr(rows, "MOST_LINE_BYTES", 32)
        found = rows.MetricRows(path)
        assert list(found.lines_reversed()) == list(found.lines())[::-1]
        text, told = path.read_text(), [line for line in found.lines()]
        assert [line.empty for line in told] == [line == "" for line in lines]
        assert [text[line.start:line.end - 1] for line in told] == lines
        assert [line.row is not None for line in told] == [line.startswith("{") and len(line) < 32 for line in lines]


def test_a_million_rows_are_cut_and_told_in_bounded_memory(tmp_path):
    """Of 10,000 here: read as a whole they take 20 MB."""
    path, step = tmp_path / "m.jsonl", 10_000
    numbers = {key: 1.2345678901234567 for key in rows.NUMBERS}
    path.write_text("".join(json.dumps({"step": step, **numbers}) + "\n" for step in range(1, step + 1)))
    tracemalloc.start()
    try:
        rows.cut_after(path, 9_000)
        assert goodput.sum_steps_s(rows.MetricRows(path), 8_999) == pytest.approx(
            numbers["goodput"] * numbers["elapsed_s"])
        assert rows.set_aside_after(path, 6_000) == "m.aside.jsonl"
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 4 << 20, held
    assert next(reversed(rows.MetricRows(path)))["step"] == 9_000
    assert [row["step"] for row in rows.MetricRows(tmp_path / "m.aside.jsonl")] == list(range(6_001, 9_001))


# ---- a file system that fails ----------------------------------------------------------------------------------------


class Stale:
    """A descriptor as NFS leaves it after a failover."""

    def __init__(self, file, number):
        self.file, self.number = file, number

    def write(self, data):
        raise OSError(self.number, os.strerror(self.number))

    def close(self):
        self.file.close()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBADF, errno.EIO, errno.ENOTCONN])
def test_a_descriptor_that_went_stale_is_opened_anew(tmp_path, number, capsys):
    with metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1})
        writer._file = Stale(writer._file, number)
        writer.write({"step": 2})       # waits
        assert [row["step"] for row in [*MetricRows(writer.path)]] == [1]
        writer.write({"step": 3})
        assert [row["step"] for row in [*MetricRows(writer.path)]] == [1, 2, 3]
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 1 and "is incomplete" not in told


@pytest.mark.parametrize("left", [0, 5, 12, 17])
def test_what_a_server_lost_is_told_and_the_next_row_stands_by_itself(tmp_path, left, capsys):
    with metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1})
        writer.write({"step": 2})
        os.truncate(writer.path, left)
        writer._file = Stale(writer._file, errno.ESTALE)
        for step in (3, 4):
            writer.write({"step": step})
    assert [row["step"] for row in [*MetricRows(writer.path)]] == [1] * (left >= 12) + [3, 4]
    assert f"has lost {24 - left} bytes" in capsys.readouterr().err


def test_rows_that_wait_cost_no_more_the_more_there_are(tmp_path, monkeypatch, capsys):
    file = rows.Appended(tmp_path / "gone" / "m.jsonl")
    record, taken_s = b"x" * 400, []
    for _ in range(2):
        began = time.process_time()
        for _ in range(10_000):
            file.append(record)
        taken_s.append(time.process_time() - began)
    assert taken_s[1] < 3 * taken_s[0] + 0.1
    (tmp_path / "gone").mkdir()
    file.append(b"y")
    assert file.path.stat().st_size == 20_000 * 400 + 1
    file.close()


# ---- a full disk -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk_of(size: int):
    """No file grows beyond `size` bytes: a write beyond it is cut short, the next one fails, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield   # capsys, not capfd: the files of that would be full too
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_is_told_once_and_loses_no_row_when_there_is_room_again(tmp_path, capsys):
    with metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1})
        with disk_of(20):   # room for half of the second row
            for step in (2, 3, 4):
                writer.write({"step": step})
            assert writer.path.stat().st_size == 20
            assert [*MetricRows(writer.path)] == [{"step": 1}], "the torn line is no row yet"
        writer.write({"step": 5})
        assert [*MetricRows(writer.path)] == [{"step": step} for step in range(1, 6)]
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 1 and "m.jsonl" in told and "training continues" in told
    assert "is incomplete" not in told


def test_rows_that_never_found_room_are_told_at_the_end_and_a_resume_repairs_the_file(tmp_path, capsys):
    with disk_of(20), metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1})
        writer.write({"step": 2})
    assert "is incomplete: its last 12 bytes" in capsys.readouterr().err
    with disk_of(20), metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        rows.cut_after(writer.path, 1)    # needs no room
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
