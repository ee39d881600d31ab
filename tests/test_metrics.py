"""metrics.jsonl: exact floats, null for what is not finite, and a resume that leaves no row twice; the same rows as
TensorBoard and W&B read them; the waits that rows tell of, and profiles, in whole runs."""

import contextlib
import gzip
import importlib.util
import json
import re
import resource
import signal
import struct
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.compilation_cache import compilation_cache
from tensorboard.backend.event_processing import event_accumulator

from meshtrain import config, train
from meshtrain.data import packing
from meshtrain.run import checkpoint, metrics, profiling
from meshtrain.training import step


def test_rows_are_readable_while_the_run_goes_on(tmp_path):
    writer = metrics.MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "loss": np.float32(0.1), "grad_norm": jnp.float32(2.5), "skipped": np.bool_(False), "mfu": None, "tokens": 2**40})
    assert metrics.read(writer.path) == [{"step": 1, "loss": float(np.float32(0.1)), "grad_norm": 2.5, "skipped": False, "mfu": None, "tokens": 2**40}]
    writer.write({"step": 2, "loss": float("nan"), "grad_norm": jnp.inf})
    assert metrics.read(writer.path)[1] == {"step": 2, "loss": None, "grad_norm": None}
    assert writer.path.read_text().count("\n") == 2
    writer.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_not_rounded(tmp_path_factory, value):
    writer = metrics.MetricsWriter(tmp_path_factory.mktemp("m") / "m.jsonl")
    writer.write({"step": 1, "loss": value})
    writer.truncate_after(1)
    assert metrics.read(writer.path) == [{"step": 1, "loss": value}]
    writer.close()


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 5}', "\ufffd"])
def test_a_resume_drops_later_rows_and_a_torn_line(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (2, 4)) + torn)
    writer = metrics.MetricsWriter(path)
    writer.truncate_after(2)
    writer.write({"step": 3})
    writer.close()
    assert path.read_text() == '{"step": 2}\n{"step": 3}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_fresh_start_empties_what_an_unsaved_run_left(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n')
    writer = metrics.MetricsWriter(tmp_path / "m.jsonl")
    writer.truncate_after(0)
    writer.close()
    assert metrics.read(writer.path) == []


def test_a_broken_line_inside_is_an_error(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2, is not JSON"):
        metrics.read(tmp_path / "m.jsonl")


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
    assert "ends early: its last 4 bytes" in capsys.readouterr().err
    with disk_of(20), metrics.MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.truncate_after(1)    # needs no room
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
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_a_row_at_its_step(tmp_path):
    row = {"step": 7, "loss": np.float32(2.5), "grad_norm": jnp.float32(0.5), "learning_rate": 1e-3, "tokens": 4096,
           "step_time_s": 0.25, "tokens_per_s": 1e4, "mfu": None, "skipped": True, "data_wait_s": 0.125,
           "checkpoint_wait_s": 0.0, "val_loss": 3.5}
    with contextlib.closing(metrics.TensorBoard(tmp_path, 6)) as board:
        board.write(row)
        written = curves(tmp_path)  # while the run goes on
    assert written == {tag: [(7, np.float32(value))] for tag, value in {
        "train/loss": 2.5, "train/grad_norm": 0.5, "train/learning_rate": 1e-3, "train/tokens": 4096, "train/skipped": 1,
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


# ---- one writer, and W&B ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def wandb_in_silence(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")    # to W&B itself, over the network


def run_file(directory, *overrides):
    directory.mkdir(exist_ok=True)
    return config.load(["--run.dir", str(directory), "--run.name", "mine", *overrides])


def test_only_the_first_of_several_processes_writes(tmp_path, monkeypatch):
    run = run_file(tmp_path / "run", "--metrics.wandb", "offline", "--metrics.profile_steps", "[1, 2]")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with metrics.open_writers(run, tmp_path / "run", 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert list((tmp_path / "run").iterdir()) == []
    assert profiling.Trace(run.metrics.profile_steps, tmp_path, 0).first == 0


def test_tensorboard_can_be_switched_off(tmp_path):
    with metrics.open_writers(run_file(tmp_path, "--metrics.tensorboard", "false"), tmp_path, 0) as writers:
        writers.write({"step": 1, "loss": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_metrics_file_is_one_message(tmp_path):
    run = run_file(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"st\n{"step": 3}\n')
    with pytest.raises(config.ConfigError, match="metrics.jsonl, line 1, is not JSON"), metrics.open_writers(run, tmp_path, 3):
        pass


def test_wandb_without_its_package_is_refused_before_anything_is_made(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train.main(["--metrics.wandb", "offline"]) == 2
    told = capfd.readouterr().err
    assert told.startswith('error: metrics.wandb="offline" needs the package wandb') and "pip install" in told
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
    run = run_file(tmp_path / "run", "--metrics.wandb", "offline", "--metrics.wandb_project", "theirs", "--data.seq_len", "96")
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
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))   # nobody's own key
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if fault == "no server":
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with metrics.open_writers(run_file(tmp_path / "run", "--metrics.wandb", "online"), tmp_path / "run", 0) as writers:
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
    monkeypatch.setattr(wandb, "init", lambda **settings: (asked.append(settings), Theirs)[1])
    for _ in range(2):
        with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "online"), tmp_path, 2) as writers:
            for step in (3, 4, 5):
                writers.write({"step": step, "loss": 1.0})
    assert logged == 2 * [4, 5, "finished with 0"], "the step that is done again is not asked to be written twice"
    assert [start["resume"] for start in asked] == ["allow", "allow"] and asked[0]["id"] == asked[1]["id"] != ""


def test_wandb_that_fails_in_the_middle_is_told_once_and_every_row_is_kept(tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb")

    def fail(self, *_, **__):
        raise ConnectionError("the network is down")
    monkeypatch.setattr(wandb.Run, "log", fail)
    with metrics.open_writers(run_file(tmp_path, "--metrics.wandb", "offline"), tmp_path, 0) as writers:
        for step in (1, 2, 3):
            writers.write({"step": step, "loss": 2.0})
    assert capfd.readouterr().err.count("W&B failed at step 1: the network is down") == 1
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert len(curves(tmp_path / "tensorboard")["train/loss"]) == 3


# ---- waits and profiles, in whole runs -------------------------------------------------------------------------------


NO_PREFETCH = ("--data.prefetch", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Overrides that turn the quickstart into a run of seconds."""
    home = tmp_path_factory.mktemp("tiny")
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    values = {
        "mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.simulated_devices": 8,
        "sharding.rules": "sharding_rules/ddp.toml",
        "model.vocab_size": 257, "model.embed_dim": 32, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1,
        "model.mlp_dim": 64, "data.source": "text", "data.paths": json.dumps([str(home / "corpus.txt")]), "data.seq_len": 32,
        "data.global_batch": 8, "run.sample_tokens": 0, "run.compilation_cache": home / "cache", "validation.batches": 1,
        "optimizer.schedule": "constant"}
    yield tuple(word for key, value in values.items() for word in (f"--{key}", str(value)))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def trained(tiny, directory, *overrides) -> list[dict]:
    assert train.main([*tiny, "--run.dir", str(directory), *overrides]) == 0
    return metrics.read(directory / "metrics.jsonl")


def slow_data(monkeypatch, seconds: float):
    batch = packing.Data.batch

    def wait(self, *args, **kwargs):
        time.sleep(seconds)
        return batch(self, *args, **kwargs)
    monkeypatch.setattr(packing.Data, "batch", wait)


def slow_steps(monkeypatch, seconds: float):
    """A device that is busy for `seconds` longer than it takes, without the host waiting for it."""
    compile_step = step.Program.compile
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    busy = jax.jit(lambda x: jax.pure_callback(lambda x: (time.sleep(seconds), x)[1], scalar, x))

    class Slow:     # on one device, and outside the mesh that is set around the loop
        def __init__(self, compiled):
            self.compiled = compiled

        def __getattr__(self, name):
            return getattr(self.compiled, name)

        def __call__(self, state, batch):
            state, out = self.compiled(state, batch)
            with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], "one")):
                return state, {**out, "loss": busy(out["loss"].addressable_data(0))}
    monkeypatch.setattr(step.Program, "compile", lambda self: Slow(compile_step(self)))


def test_a_step_that_waits_for_slow_data_says_how_long(tmp_path, tiny, monkeypatch):
    slow_data(monkeypatch, 0.2)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "5", *NO_PREFETCH)
    for row in rows[1:]:
        assert 0.1 < row["data_wait_s"] < row["step_time_s"], row
        assert row["step_time_s"] - row["data_wait_s"] < 0.15, "all of the step but its own work"
    assert curves(tmp_path / "run" / "tensorboard")["time/data_wait_s"] == [
        (row["step"], np.float32(row["data_wait_s"])) for row in rows]


@pytest.mark.parametrize(("step_s", "data_s", "low", "high"), [(0.4, 0.15, 0.0, 0.05), (0.15, 0.45, 0.2, 0.4)])
def test_data_that_come_while_the_step_before_runs_are_not_waited_for(tmp_path, tiny, monkeypatch, step_s, data_s, low, high):
    slow_data(monkeypatch, data_s)
    slow_steps(monkeypatch, step_s)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "5", *NO_PREFETCH)
    assert sorted(low <= row["data_wait_s"] < high for row in rows[1:])[1], "one of four may meet a busy machine: " + str(rows)
    assert all(row["step_time_s"] > 0.8 * max(step_s, data_s) for row in rows[1:]), rows


@pytest.mark.parametrize(("every", "waiting"), [(1, {3: 1, 5: 1}), (3, {3: 1, 6: 1})])
def test_the_row_after_a_checkpoint_says_how_long_it_held_the_steps_up(tmp_path, tiny, monkeypatch, every, waiting):
    save = checkpoint.Checkpoints.save
    blocked = {}

    def slow(self, number, *args):
        time.sleep(0.25)
        blocked[number] = 0.25 + save(self, number, *args)
        return blocked[number]
    monkeypatch.setattr(checkpoint.Checkpoints, "save", slow)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "6", "--checkpoint.every", "2", "--metrics.every", str(every))
    assert sorted(blocked) == [2, 4, 6]
    assert {row["step"]: row["checkpoint_wait_s"] for row in rows if row["checkpoint_wait_s"]} == {
        waiting_step: blocked[2 * (1 + i)] for i, waiting_step in enumerate(waiting)}
    assert min(row["step_time_s"] for row in rows) < 0.2, "a step's own time has no checkpoint in it"


def test_rows_that_are_thinned_out_keep_what_the_steps_between_waited(tmp_path, tiny, monkeypatch):
    slow_data(monkeypatch, 0.1)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "6", "--metrics.every", "3", *NO_PREFETCH)
    assert [row["step"] for row in rows] == [3, 6] and rows[1]["data_wait_s"] > 0.2, "about 0.1 s for each of three steps"


def profiles(directory) -> list[list[int]]:
    """The steps in each Perfetto trace below run.dir, which must be one that Perfetto and TensorBoard's plugin can open."""
    found = []
    for folder in sorted((directory / "tensorboard" / "plugins" / "profile").glob("*")):
        assert [path.suffix for path in folder.glob("*.xplane.pb")] == [".pb"], "what TensorBoard's plugin reads"
        with gzip.open(folder / "perfetto_trace.json.gz") as file:
            events = json.load(file)["traceEvents"]
        steps = [event for event in events if event.get("name") == "train"]
        assert all(event["dur"] > 0 for event in steps)
        device_work = [event for event in events if "fusion" in event.get("name", "") and event.get("dur")]
        assert len(device_work) >= 8 * len(steps), "the work of the devices, not only the host's"
        found.append([int(event["args"]["step_num"]) for event in steps])
    return found


def test_a_profile_holds_the_steps_asked_for_and_a_resume_in_the_middle_takes_the_rest(tmp_path, tiny, capfd):
    directory = tmp_path / "run"
    trained(tiny, directory, "--training.steps", "6", "--metrics.profile_steps", "[3, 5]")
    assert profiles(directory) == [[3, 4, 5]]
    told = capfd.readouterr().out
    assert "profile from step 3" in told and f"tensorboard --logdir {directory}/tensorboard" in told
    assert re.search(r"(\S+perfetto_trace.json.gz)", told)[1] == str(next(directory.rglob("perfetto_trace.json.gz")))
    trained(tiny, directory, "--training.steps", "8", "--metrics.profile_steps", "[5, 8]")
    assert profiles(directory)[1:] == [[7, 8]]
    assert profiling.Trace([3, 5], directory, after=5).first == 0, "they lie behind: nothing to profile"
    assert curves(directory / "tensorboard")["train/loss"] == [
        (row["step"], np.float32(row["loss"])) for row in metrics.read(directory / "metrics.jsonl")]


def test_a_run_that_is_stopped_while_it_profiles_keeps_the_profile(tmp_path, tiny, monkeypatch):
    write = metrics.MetricsWriter.write

    def write_and_stop(self, row):
        write(self, row)
        if row["step"] == 3:
            signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(metrics.MetricsWriter, "write", write_and_stop)
    asked = ("--training.steps", "20", "--metrics.profile_steps", "[2, 20]")
    assert train.main([*tiny, "--run.dir", str(tmp_path / "run"), *asked]) == 75
    assert profiles(tmp_path / "run") == [[2, 3, 4]]


@pytest.mark.parametrize(("fails", "told"), [
    ("start_trace", "no profile can be taken"), ("stop_trace", "could not be written")])
def test_a_profile_that_fails_is_told_and_the_run_ends_well(tmp_path, tiny, monkeypatch, capfd, fails, told):
    def fail(*_, **__):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, fails, fail)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "3", "--metrics.profile_steps", "[2, 2]")
    assert len(rows) == 3 and f"{told}: CUPTI_ERROR" in capfd.readouterr().err


@pytest.mark.parametrize(("steps", "parts"), [
    ("[5]", ("[5] is not a first and a last step", "[5, 5]")),
    ("[1, 2, 3]", ("[1, 2, 3] is not a first and a last step", "[1, 1]")),
    ("[0, 2]", ("[0, 2] must be steps from 1 to training.steps=6",)),
    ("[3, 2]", ("[3, 2] must be steps", "the first not after the last")),
    ("[3, 7]", ("[3, 7] must be steps from 1 to training.steps=6", "[2, 2]")),
    ('["1", "2"]', ('profile_steps[0]="1" is not a whole number', "write e.g. 1, without quotes")),
    ("[1.0, 2]", ("profile_steps[0]=1.0 is not a whole number",)),
    ("[true, 2]", ("profile_steps[0]=true is not a whole number",)),
    ("3", ("profile_steps=3 is not a list of whole numbers", "[1, 2]")),
])
def test_profile_steps_outside_the_run_are_refused_when_it_is_loaded(steps, parts, capfd):
    assert train.main(["--training.steps", "6", "--metrics.profile_steps", steps]) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: metrics.profile_steps") and [part for part in parts if part not in told] == [], told
