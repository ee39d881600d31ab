"""metrics.jsonl: exact floats, null for what is not finite, and a resume that leaves no row twice; the same rows as
TensorBoard and W&B read them."""

import contextlib
import errno
import importlib.util
import json
import os
import resource
import struct
import time
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing import event_accumulator

from meshtrain import config, train
from meshtrain.run import goodput, hooks, metrics, rows


def test_rows_are_readable_while_the_run_goes_on(tmp_path):
    writer = metrics.MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "loss": np.float32(0.1), "grad_norm": jnp.float32(2.5),
                  "skipped": np.bool_(False), "mfu": None, "tokens": 2**40})
    assert metrics.read(writer.path) == [{"step": 1, "loss": float(np.float32(0.1)),
                                          "grad_norm": 2.5, "skipped": False, "mfu": None, "tokens": 2**40}]
    writer.write({"step": 2, "loss": float("nan"), "grad_norm": jnp.inf})
    assert metrics.read(writer.path)[1] == {"step": 2, "loss": None, "grad_norm": None}
    assert writer.path.read_text().count("\n") == 2
    writer.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_not_rounded(tmp_path_factory, value):
    writer = metrics.MetricsWriter(tmp_path_factory.mktemp("m") / "m.jsonl")
    writer.write({"step": 1, "loss": value})
    rows.cut_after(writer.path, 1)
    assert metrics.read(writer.path) == [{"step": 1, "loss": value}]
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
    assert metrics.read(writer.path) == []


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
    assert [row["step"] for row in metrics.read(path)] == [1, 3, 4] and path.read_text().startswith(
        f'{{"step": 1}}\n{line}\n')
    assert list(reversed(metrics.read(path))) == list(reversed(rows.MetricRows(path)))
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
    assert "1 of the lines after step 1 are no rows of metrics; they are kept in metrics.aside.jsonl" in capsys.readouterr().err


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
        assert goodput.counted_s(rows.MetricRows(path), 8_999) == pytest.approx(
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
        assert [row["step"] for row in metrics.read(writer.path)] == [1]
        writer.write({"step": 3})
        assert [row["step"] for row in metrics.read(writer.path)] == [1, 2, 3]
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 1 and "ends early" not in told


@pytest.mark.parametrize("left", [0, 5, 12, 17])
def test_what_a_server_lost_is_told_and_the_next_row_stands_by_itself(tmp_path, left, capsys):
    with metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1})
        writer.write({"step": 2})
        os.truncate(writer.path, left)
        writer._file = Stale(writer._file, errno.ESTALE)
        for step in (3, 4):
            writer.write({"step": step})
    assert [row["step"] for row in metrics.read(writer.path)] == [1] * (left >= 12) + [3, 4]
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
            assert metrics.read(writer.path) == [{"step": 1}], "the torn line is no row yet"
        writer.write({"step": 5})
        assert metrics.read(writer.path) == [{"step": step} for step in range(1, 6)]
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 1 and "m.jsonl" in told and "training goes on" in told
    assert "ends early" not in told


def test_rows_that_never_found_room_are_told_at_the_end_and_a_resume_repairs_the_file(tmp_path, capsys):
    with disk_of(20), metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1})
        writer.write({"step": 2})
    assert "ends early: its last 12 bytes" in capsys.readouterr().err
    with disk_of(20), metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        rows.cut_after(writer.path, 1)    # needs no room
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'


def test_tensorboard_loses_no_row_to_a_full_disk_either(tmp_path, capsys):
    with contextlib.closing(metrics.TensorBoard(tmp_path / "tb", 0)) as board:
        board.write({"step": 1, "loss": 1.0})
        with disk_of(next((tmp_path / "tb").iterdir()).stat().st_size + 10):
            board.write({"step": 2, "loss": 2.0})
        board.write({"step": 3, "loss": 3.0})
    assert curves(tmp_path / "tb")["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def curves(directory) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: tag -> [(step, value)]."""
    accumulator = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_a_row_at_its_step(tmp_path):
    row = {"step": 7, "loss": np.float32(2.5), "grad_norm": jnp.float32(0.5), "learning_rate": 1e-3, "tokens": 4096,
           "step_time_s": 0.25, "tokens_per_s": 1e4, "mfu": None, "skipped": True, "data_wait_s": 0.125,
           "checkpoint_wait_s": 0.0, "val_loss": 3.5}
    with contextlib.closing(metrics.TensorBoard(tmp_path, 6)) as board:
        board.write(row)
        written = curves(tmp_path)  # while the run goes on
    assert written == {tag: [(7, np.float32(value))] for tag, value in {
        "train/loss": 2.5, "train/grad_norm": 0.5, "train/learning_rate": 1e-3, "train/tokens": 4096,
        "train/skipped": 1,
        "validation/loss": 3.5, "time/step_s": 0.25, "time/data_wait_s": 0.125, "time/checkpoint_wait_s": 0,
        "tokens_per_s": 1e4}.items()}


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_tensorboard_shows_no_step_twice_after_a_resume_from_an_earlier_one(tmp_path, torn):
    for after, upto in ((0, 5), (2, 7), (6, 8)):    # killed after 5, gone on after 2, and so on
        with contextlib.closing(metrics.TensorBoard(tmp_path, after)) as board:
            for step in range(after + 1, upto + 1):
                validation = {"val_loss": 9.0} if (after, step) == (0, 5) else {}
                board.write({"step": step, "loss": 100.0 * after + step, **validation})
        newest = max(tmp_path.iterdir())
        newest.write_bytes(newest.read_bytes() + b"\x13" * torn)    # what a kill may leave of a record
    shown = curves(tmp_path)
    assert shown["train/loss"] == [(1, 1), (2, 2), (3, 203), (4, 204), (5, 205), (6, 206), (7, 607), (8, 608)]
    assert shown.get("validation/loss", []) == [], "the one of a step that was done again is gone too"


def test_event_files_of_others_are_left_alone(tmp_path):
    for name in ("1700000000.host.profile-empty", "1700000000.host.1.0", "x", "", "²", "7"):
        (tmp_path / f"events.out.tfevents.{name}").write_bytes(b"")
    for after, number in ((0, "000001"), (1, "000002")):
        with contextlib.closing(metrics.TensorBoard(tmp_path, after)) as board:
            board.write({"step": after + 1, "loss": 2.0})
        assert (tmp_path / f"events.out.tfevents.{number}").stat().st_size
    assert curves(tmp_path)["train/loss"] == [(1, 2.0), (2, 2.0)]


def test_tensorboard_that_cannot_be_written_stops_no_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file\n")
    with metrics.open_writers(run_file(tmp_path), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1]
    assert "tensorboard/events.out.tfevents.000001 cannot be written: Not a directory" in capsys.readouterr().err


# ---- one writer, and W&B ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def wandb_in_silence(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")    # to W&B itself, over the network


def run_file(directory, *overrides):
    directory.mkdir(exist_ok=True)
    return config.load(["--run.dir", str(directory), "--run.name", "mine", *overrides])


def test_only_the_first_of_several_processes_writes(tmp_path, monkeypatch):
    run = run_file(tmp_path / "run", "--metrics.wandb", "theirs", "--metrics.profile_steps", "[1, 2]")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with metrics.open_writers(run, tmp_path / "run", 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert list((tmp_path / "run").iterdir()) == []
    assert hooks.Trace(run.metrics.profile_steps, tmp_path, 0).first == 0


def test_tensorboard_can_be_switched_off(tmp_path):
    with metrics.open_writers(run_file(tmp_path, "--metrics.tensorboard", "false"), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_wandb_without_its_package_is_refused_before_anything_is_made(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train.main(["--metrics.wandb", "theirs"]) == 2
    told = capfd.readouterr().err
    assert told.startswith('error: metrics.wandb="theirs" needs the package wandb')
    assert "pip install -e '.[wandb]'" in told
    assert list(tmp_path.iterdir()) == []


def records(path):
    """The records of a .wandb file: 7 bytes of header, then framed as a LevelDB log: crc, length, kind (1: whole)."""
    from wandb.proto import wandb_internal_pb2
    data, at = path.read_bytes(), 7
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1, "larger than this test expects"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7:at + 7 + length])
        yield record
        at += 7 + length


def test_wandb_offline_has_rows_and_settings_and_a_resume_goes_on_in_the_same_run(tmp_path, capfd):
    wandb = pytest.importorskip("wandb")
    run = run_file(tmp_path / "run", "--metrics.wandb", "theirs", "--data.seq_len", "96")
    for after, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with metrics.open_writers(run, tmp_path / "run", after) as writers:
            for step in steps:
                writers.write({"step": step, "loss": step / 4, "mfu": None})
        wandb.teardown()    # the next start of a run is another process
        time.sleep(0 if after else 1.1)   # W&B names its directories by the second
    assert "W&B" not in capfd.readouterr().err
    identity = (tmp_path / "run" / "wandb" / "run-id").read_text()
    starts = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    rows = []
    for start in starts:
        for record in records(start):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.display_name, record.run.project) == (identity, "mine", "theirs")
                settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert settings["data"]["seq_len"] == 96
            if record.HasField("history"):
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.append((row["_step"], row["train/loss"]))
                assert "mfu" not in row
    assert rows == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]


@pytest.mark.parametrize("fault", ["no server", "no key"])
def test_wandb_that_cannot_be_reached_is_told_and_written_offline(tmp_path, monkeypatch, capfd, fault):
    pytest.importorskip("wandb")
    monkeypatch.setattr(metrics, "WANDB_START_TIMEOUT_S", 0.5)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))   # nobody's own key
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if fault == "no server":
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with metrics.open_writers(run_file(tmp_path / "run", "--metrics.wandb", "theirs"), tmp_path / "run", 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert "W&B cannot be started online" in (told := capfd.readouterr().err) and "wandb sync" in told
    assert "cannot be started offline" not in told
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))) == 1


def test_wandb_online_goes_on_in_the_same_run_behind_what_it_has(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    asked, logged = [], []

    class Theirs:   # what the server says of a run that has steps up to 3
        step = 4
        log = staticmethod(lambda row, step, commit: logged.append(step))
        finish = staticmethod(lambda exit_code: logged.append(f"finished with {exit_code}"))
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "init", lambda **settings: (asked.append(settings), Theirs)[1])
    for _ in range(2):
        with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "theirs"), tmp_path, 2) as writers:
            for step in (3, 4, 5):
                writers.write({"step": step, "loss": 1.0})
    assert logged == 2 * [4, 5, "finished with 0"], "the step that is done again is not asked to be written twice"
    assert [start["resume"] for start in asked] == ["allow", "allow"] and asked[0]["id"] == asked[1]["id"] != ""


def test_an_empty_wandb_identity_is_made_anew(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run-id").write_text("")      # killed between making the file and writing it
    asked = []
    monkeypatch.setattr(wandb, "init", lambda **settings: asked.append(settings["id"])
                        or types.SimpleNamespace(step=0, finish=lambda exit_code: 0))
    for _ in range(2):
        with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "theirs"), tmp_path, 0):
            pass
    assert asked[0] == asked[1] != "" and os.listdir(tmp_path / "wandb") == ["run-id"]


def test_wandb_that_fails_in_the_middle_is_told_once_and_every_row_is_kept(tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb")

    def fail(self, *_, **__):
        raise ConnectionError("the network is down")
    monkeypatch.setattr(wandb.Run, "log", fail)
    with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "theirs"), tmp_path, 0) as writers:
        for step in (1, 2, 3):
            writers.write({"step": step, "loss": 2.0})
    assert capfd.readouterr().err.count("W&B failed at step 1: the network is down") == 1
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert len(curves(tmp_path / "tensorboard")["train/loss"]) == 3
