"""Trackers: the same rows as TensorBoard, W&B, MLflow and Prometheus read them, whatever fails."""

import contextlib
import importlib.util
import json
import os
import socket
import struct
import time
import types
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wandb_service
from tensorboard.backend.event_processing import event_accumulator
from test_metrics import disk_of, run_file

from meshtrain import config
from meshtrain.commands import train
from meshtrain.journal import metrics, trackers
from meshtrain.journal.rows import MetricRows
from meshtrain.journal.spikes import LossSpike
from meshtrain.run import hooks


@pytest.fixture(autouse=True)
def wandb_in_silence(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")    # to W&B itself, over the network


def test_tensorboard_loses_no_row_to_a_full_disk_either(tmp_path, capsys):
    with contextlib.closing(trackers.TensorBoard(tmp_path / "tb", 0)) as board:
        board.log(1, {"loss": 1.0})
        with disk_of(next((tmp_path / "tb").iterdir()).stat().st_size + 10):
            board.log(2, {"loss": 2.0})
        board.log(3, {"loss": 3.0})
    assert curves(tmp_path / "tb")["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def curves(directory) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: tag -> [(step, value)]."""
    accumulator = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_a_row_at_its_step(tmp_path):
    row = {"step": 7, "loss": np.float32(2.5), "grad_norm": jnp.float32(0.5), "learning_rate": 1e-3, "tokens": 4096,
           "step_time_s": 0.25, "tokens_per_s": 1e4, "mfu": 0.5, "skipped": True, "data_wait_s": 0.125,
           "checkpoint_wait_s": 0.0, "val_loss": 3.5, "reward": None}
    with metrics.open_writers(run_file(tmp_path), tmp_path, 6) as writers:
        writers.write(row)
        written = curves(tmp_path / "tensorboard")  # while the run goes on
    assert written == {tag: [(7, np.float32(value))] for tag, value in {
        "loss": 2.5, "optimizer/grad_norm": 0.5, "optimizer/learning_rate": 1e-3, "tokens": 4096,
        "optimizer/skipped": 1, "mfu": 0.5,
        "validation/loss": 3.5, "time/step_s": 0.25, "time/data_wait_s": 0.125, "time/checkpoint_wait_s": 0,
        "tokens_per_second": 1e4}.items()}
    assert min(written) == "loss", "what is looked for first stands first"


def test_tensorboard_shows_the_run_file_as_text(tmp_path):
    run = run_file(tmp_path)
    with metrics.open_writers(run, tmp_path, 6):
        accumulator = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        accumulator.Reload()
    assert accumulator.PluginTagToContent("text").keys() == {"config"}
    (event,) = accumulator.Tensors("config")
    shown = event.tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in shown.split("\n")] == config.dump(run).splitlines()


def test_a_row_has_the_peak_memory_where_the_backend_counts_it(tmp_path):
    device = lambda stats: types.SimpleNamespace(memory_stats=lambda: stats)
    counting = [device({"bytes_in_use": 5, "peak_bytes_in_use": peak}) for peak in (700, 800)]
    for step, devices in enumerate(([device(None)], [device({})], counting, jax.local_devices()), 1):
        with metrics.open_writers(run_file(tmp_path), tmp_path, step - 1, devices=devices) as writers:
            writers.write({"step": step, "loss": 2.0})
    assert [row.get("memory_bytes", "none") for row in [*MetricRows(tmp_path / "metrics.jsonl")]] == [
        "none", "none", 800, "none"]
    assert curves(tmp_path / "tensorboard")["memory_bytes"] == [(3, 800)]


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_tensorboard_shows_no_step_twice_after_a_resume_from_an_earlier_one(tmp_path, torn):
    for after, upto in ((0, 5), (2, 7), (6, 8)):    # killed after 5, gone on after 2, and so on
        with contextlib.closing(trackers.TensorBoard(tmp_path, after)) as board:
            for step in range(after + 1, upto + 1):
                validation = {"validation/loss": 9.0} if (after, step) == (0, 5) else {}
                board.log(step, {"loss": 100.0 * after + step, **validation})
        newest = max(tmp_path.iterdir())
        newest.write_bytes(newest.read_bytes() + b"\x13" * torn)    # what a kill may leave of a record
    shown = curves(tmp_path)
    assert shown["loss"] == [(1, 1), (2, 2), (3, 203), (4, 204), (5, 205), (6, 206), (7, 607), (8, 608)]
    assert shown.get("validation/loss", []) == [], "the one of a step that was done again is gone too"


def test_event_files_of_others_are_left_alone(tmp_path):
    for name in ("1700000000.host.profile-empty", "1700000000.host.1.0", "x", "", "²", "7"):
        (tmp_path / f"events.out.tfevents.{name}").write_bytes(b"")
    for after, number in ((0, "000001"), (1, "000002")):
        with contextlib.closing(trackers.TensorBoard(tmp_path, after)) as board:
            board.log(after + 1, {"loss": 2.0})
        assert (tmp_path / f"events.out.tfevents.{number}").stat().st_size
    assert curves(tmp_path)["loss"] == [(1, 2.0), (2, 2.0)]


def test_tensorboard_that_cannot_be_written_stops_no_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file\n")
    with metrics.open_writers(run_file(tmp_path), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert [row["step"] for row in [*MetricRows(tmp_path / "metrics.jsonl")]] == [1]
    assert "tensorboard/events.out.tfevents.000001 cannot be written: Not a directory" in capsys.readouterr().err


# ---- one writer, and W&B ---------------------------------------------------------------------------------------------


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
                rows.append((row["_step"], row["loss"]))
                assert "mfu" not in row
    assert rows == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]


@pytest.mark.parametrize("fault", ["no server", "no key"])
def test_wandb_that_cannot_be_reached_is_told_and_written_offline(tmp_path, monkeypatch, capfd, fault):
    pytest.importorskip("wandb")
    monkeypatch.setattr(trackers, "WANDB_START_TIMEOUT_S", 0.5)
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


@pytest.mark.parametrize("rewinds", [True, False])
def test_wandb_shows_the_course_that_a_run_has_taken_after_it_went_back(rewinds, tmp_path, monkeypatch, capfd):
    """Twice; then a plain resume. Its own client and a stand-in for its service."""
    wandb, kept = pytest.importorskip("wandb"), tmp_path / "wandb" / "run-id"
    with wandb_service.serving(rewinds) as service:
        for name, value in (("WANDB_MODE", "online"), ("WANDB_BASE_URL", service.address), ("HOME", str(tmp_path)),
                            ("WANDB_API_KEY", "a" * 40)):
            monkeypatch.setenv(name, value)
        wandb.teardown()        # what an earlier test has started knows another service
        run, ids = run_file(tmp_path, "--metrics.wandb", "theirs"), []
        for after, back, last, more in ((0, False, 6, 0), (3, True, 5, 100), (2, True, 7, 200), (5, False, 8, 200)):
            with metrics.open_writers(run, tmp_path, after, back) as writers:
                for step in range(after + 1, last + 1):
                    writers.write({"step": step, "loss": float(step + more)})
            ids.append(kept.read_text())
            wandb.teardown()
    told, now = capfd.readouterr(), [(step, step + 200.0) for step in range(3, 9)]
    assert "W&B" not in told.err
    if rewinds:
        assert set(ids) == set(service.runs) == {ids[0]} and service.steps(ids[0]) == [(1, 1.0), (2, 2.0), *now]
        assert told.out.count(f"W&B: the history of run {ids[0]} is cut after step") == 2
        return
    first, second, third, same = ids
    assert third == same and {run["group"] for run in service.runs.values()} == {first}
    assert [service.steps(one) for one in (first, second, third)] == [
        [(step, float(step)) for step in range(1, 7)], [(4, 104.0), (5, 105.0)], now]
    assert f"does not let run {first} go back to step 3" in told.out and "this account may not rewind" in told.out
    assert f"later steps are recorded in run {third} of the group {first}" in told.out


def test_wandb_offline_writes_that_its_history_is_to_be_cut(tmp_path, capfd):
    wandb = pytest.importorskip("wandb")
    for after, back in ((0, False), (2, True)):
        with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "theirs"), tmp_path, after, back) as writers:
            for step in range(after + 1, 6):
                writers.write({"step": step, "loss": 1.0})
        wandb.teardown()
        time.sleep(0 if after else 1.1)
    starts = [list(records(path)) for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))]
    cuts = [record.run.branch_point.value for start in starts for record in start
            if record.HasField("run") and record.run.HasField("branch_point")]
    assert len(starts) == 2 and set(cuts) == {2}
    assert "is cut after step 2, once `wandb sync` uploads this start" in capfd.readouterr().out


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


def test_a_run_of_a_sweep_has_the_identity_that_wandb_gave_it(tmp_path, monkeypatch):
    wandb, asked = pytest.importorskip("wandb"), []
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-sweep")
    monkeypatch.setattr(wandb, "init", lambda **settings: asked.append(settings["id"])
                        or types.SimpleNamespace(step=0, finish=lambda exit_code: 0))
    with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "theirs"), tmp_path, 0):
        assert asked == ["of-a-sweep"]


def test_wandb_that_fails_in_the_middle_is_told_once_and_every_row_is_kept(tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb")

    def fail(self, *_, **__):
        raise ConnectionError("the network is down")
    monkeypatch.setattr(wandb.Run, "log", fail)
    with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "theirs"), tmp_path, 0) as writers:
        for step in (1, 2, 3):
            writers.write({"step": step, "loss": 2.0})
    assert capfd.readouterr().err.count("W&B failed at step 1: the network is down") == 1
    assert [row["step"] for row in [*MetricRows(tmp_path / "metrics.jsonl")]] == [1, 2, 3]
    assert len(curves(tmp_path / "tensorboard")["loss"]) == 3


# ---- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """The package with its own store of files; no server."""
    found = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/theirs")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(trackers, "MLFLOW_PAUSE_S", 0.05)
    return found


def tracked(directory, after, steps):
    with metrics.open_writers(run_file(directory, "--metrics.mlflow", "theirs", "--data.seq_len", "96"), directory,
                              after) as writers:
        for step in steps:
            writers.write({"step": step, "loss": step / 4, "mfu": None, "skipped": False})


def test_mlflow_has_rows_and_keys_and_a_resume_goes_on_in_the_same_run(mlflow, tmp_path, capfd):
    tracked(tmp_path / "run", 0, range(1, 60))
    tracked(tmp_path / "run", 50, range(51, 71))
    client, identity = mlflow.MlflowClient(), (tmp_path / "run" / "mlflow" / "run-id").read_text()
    found, = client.search_runs([client.get_experiment_by_name("theirs").experiment_id])
    assert (found.info.run_id, found.info.run_name, found.info.status) == (identity, "mine", "FINISHED")
    assert found.data.params["data.seq_len"] == "96" and found.data.params["metrics.mlflow"] == "theirs"
    history = client.get_metric_history(identity, "loss")
    assert [(one.step, one.value) for one in history] == [(step, step / 4) for step in range(1, 71)]
    assert found.data.metrics["optimizer/skipped"] == 0 and "mfu" not in found.data.metrics
    assert "MLflow accepts" not in capfd.readouterr().err


def test_mlflow_gets_the_steps_again_where_a_run_goes_back(mlflow, tmp_path, capfd):
    for after, back, last, more in ((0, False, 6, 0), (3, True, 4, 100), (2, True, 7, 200), (5, False, 8, 300)):
        with metrics.open_writers(run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, after, back) as writers:
            for step in range(after + 1, last + 1):
                writers.write({"step": step, "loss": step + more})
        time.sleep(0.002)       # MLflow's clock of a row: milliseconds
    client, identity = mlflow.MlflowClient(), (tmp_path / "mlflow" / "run-id").read_text()
    newest = {}
    for one in sorted(client.get_metric_history(identity, "loss"), key=lambda one: one.timestamp):
        newest[one.step] = one.value
    assert newest == {1: 1, 2: 2, **{step: step + 200 for step in range(3, 8)}, 8: 308}
    assert client.get_run(identity).data.tags[trackers.MLFLOW_STEP] == "8"
    out = capfd.readouterr().out
    assert f"MLflow: run {identity} goes back to step 3; the steps up to 6 are sent again" in out
    assert out.count("goes back") == 2


def test_a_run_that_goes_back_before_a_spike_is_not_a_failed_one(mlflow, tmp_path):
    with contextlib.suppress(LossSpike), metrics.open_writers(
            run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
        raise LossSpike(1, 2.0, 1.0)
    assert mlflow.MlflowClient().get_run((tmp_path / "mlflow" / "run-id").read_text()).info.status == "FINISHED"


@pytest.mark.parametrize("slow, told", [("begins", "the server did not answer"), ("fails", "ValueError: no such backend")])
def test_mlflow_that_gets_no_row_says_why_also_in_a_short_run(slow, told, mlflow, tmp_path, monkeypatch, capfd):
    def create_run(*_, **__):
        if slow == "begins":
            time.sleep(2)
        raise ValueError("no such backend")
    monkeypatch.setattr(mlflow.MlflowClient, "create_run", create_run)
    monkeypatch.setattr(trackers, "MLFLOW_FINISH_S", 0.5 if slow == "begins" else 60.0)
    with metrics.open_writers(run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert f"did not get the rows from step 1 on ({told})" in capfd.readouterr().err


def test_mlflow_that_fails_for_a_while_gets_every_row_and_is_told_once(mlflow, tmp_path, monkeypatch, capfd):
    real, asked = mlflow.MlflowClient.log_batch, []

    def log_batch(self, *given, **keys):
        asked.extend([keys] * ("params" not in keys))
        if 1 <= len(asked) <= 3:
            raise ConnectionError("no route to http://name:secret@there")
        return real(self, *given, **keys)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    with metrics.open_writers(run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, 0) as writers:
        for step in (1, 2, 3):
            writers.write({"step": step, "loss": step})
        while len(asked) < 4:
            time.sleep(0.01)
    identity = (tmp_path / "mlflow" / "run-id").read_text()
    assert [one.step for one in mlflow.MlflowClient().get_metric_history(identity, "loss")] == [1, 2, 3]
    said = capfd.readouterr().err
    assert said.count("MLflow accepts no rows: ConnectionError: no route to http://…@there") == 1 and "secret" not in said


class Panic(BaseException):
    """As the errors of libraries in Rust."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), SystemExit(1)])
def test_mlflow_survives_an_error_that_is_no_exception(error, mlflow, tmp_path, monkeypatch, capfd):
    real, asked = mlflow.MlflowClient.log_batch, []

    def log_batch(self, *given, **keys):
        asked.append(keys)
        if len(asked) == 2:
            raise error
        return real(self, *given, **keys)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    with metrics.open_writers(run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, 0) as writers:
        for step in (1, 2):
            writers.write({"step": step, "loss": step})
        deadline = time.monotonic() + 30
        while len(asked) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    identity = (tmp_path / "mlflow" / "run-id").read_text()
    assert [one.step for one in mlflow.MlflowClient().get_metric_history(identity, "loss")] == [1, 2]
    assert f"MLflow accepts no rows: {type(error).__name__}" in capfd.readouterr().err


def test_rows_that_wait_are_tried_once_more_when_the_run_ends(mlflow, tmp_path, monkeypatch, capfd):
    real, asked = mlflow.MlflowClient.log_batch, []

    def log_batch(self, *given, **keys):
        asked.extend([keys] * ("params" not in keys))
        if len(asked) == 1 and "params" not in keys:
            raise ConnectionError("no route")
        return real(self, *given, **keys)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(trackers, "MLFLOW_PAUSE_S", 3600.0)
    with metrics.open_writers(run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
        while not asked:
            time.sleep(0.01)
        writers.write({"step": 2, "loss": 1.0})
    found = mlflow.MlflowClient().get_run((tmp_path / "mlflow" / "run-id").read_text())
    assert found.info.status == "FINISHED" and found.data.metrics["loss"] == 1.0
    assert "did not get" not in capfd.readouterr().err


def test_mlflow_that_is_not_there_holds_nothing_up(mlflow, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    began = time.monotonic()
    with metrics.open_writers(run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
        assert time.monotonic() - began < 10
        while "MLflow accepts no rows" not in (said := capfd.readouterr().err):
            time.sleep(0.05)
    assert "127.0.0.1" in said and "did not get the rows from step 1 on" in capfd.readouterr().err
    assert [row["step"] for row in [*MetricRows(tmp_path / "metrics.jsonl")]] == [1]


def test_only_the_newest_rows_wait(mlflow, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(trackers, "MLFLOW_ROWS", 5)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: 1 / 0)
    with metrics.open_writers(run_file(tmp_path, "--metrics.mlflow", "theirs"), tmp_path, 0) as writers:
        for step in range(1, 101):
            writers.write({"step": step, "loss": 2.0})
        while "MLflow accepts no rows: ZeroDivisionError" not in capfd.readouterr().err:
            time.sleep(0.01)
    assert "did not get the rows from step 96 on" in capfd.readouterr().err


# ---- Prometheus ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    from meshtrain.launch import supervise
    return supervise.free_port()


def scraped(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def test_prometheus_reads_the_last_row(tmp_path):
    port = free_port()
    with metrics.open_writers(run_file(tmp_path, "--metrics.prometheus", str(port)), tmp_path, 0) as writers:
        assert scraped(port) == ""
        writers.write({"step": 1, "loss": 3.0})
        writers.write({"step": 2, "loss": np.float32(0.1), "val_loss/web-1": float("nan"), "skipped": True, "mfu": None})
        told = scraped(port, "/metrics?x=1")
        with pytest.raises(urllib.error.HTTPError):
            scraped(port, "/")
    found = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    label = '{run="mine"}'
    assert found == {f"meshtrain_step{label}": "2", f"meshtrain_loss{label}": repr(float(np.float32(0.1))),
                     f"meshtrain_val_loss_web_1{label}": "NaN", f"meshtrain_optimizer_skipped{label}": "1.0"}
    assert told.count("# TYPE meshtrain_loss gauge\n") == 1
    with pytest.raises(urllib.error.URLError):
        scraped(port)


def test_a_port_that_is_taken_stops_no_run(tmp_path, capsys):
    port = free_port()
    with contextlib.closing(socket.create_server(("", port))):
        with metrics.open_writers(run_file(tmp_path, "--metrics.prometheus", str(port)), tmp_path, 0) as writers:
            writers.write({"step": 1, "loss": 3.0})
    assert f"metrics.prometheus={port} cannot be served" in capsys.readouterr().err
