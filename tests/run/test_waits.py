"""The waits that rows tell of, and profiles, in whole runs."""

import functools
import gzip
import json
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept_programs import programs_in

from meshtrain import assembly
from meshtrain.commands import train
from meshtrain.checkpoint import checkpoint
from meshtrain.data.batches import packing
from meshtrain.data.documents import contracts
from meshtrain.journal import metrics
from meshtrain.journal.rows import MetricRows
from meshtrain.run import hooks
from test_trackers import curves


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Overrides that turn the quickstart into a run of seconds."""
    home = tmp_path_factory.mktemp("tiny")
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    values = {
        "mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.simulated_devices": 8,
        "sharding.rules": "sharding_rules/ddp.toml",
        "optimizer.name": "adamw", "model.vocab_size": 257, "model.embed_dim": 32, "model.num_layers": 1, "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.mlp_dim": 64, "data.source": "text", "data.paths": json.dumps([str(home / "corpus.txt")]),
        "data.seq_len": 32,
        "data.global_batch": 8, "run.sample_tokens": 0, "run.compilation_cache": home / "cache",
        "validation.batches": 1,
        "optimizer.schedule": "constant"}
    with programs_in(str(home / "cache"), jax_compilation_cache_include_metadata_in_key=False):
        yield tuple(word for key, value in values.items() for word in (f"--{key}", str(value)))


def trained(tiny, directory, *overrides) -> list[dict]:
    assert train.main([*tiny, "--run.dir", str(directory), *overrides]) == 0
    return [*MetricRows(directory / "metrics.jsonl")]


def slow_data(monkeypatch, seconds: float):
    """Batches that take `seconds` to read, none of them made ahead."""
    batch = packing.Packed.batch
    monkeypatch.setattr(contracts, "iterate", functools.partial(contracts.iterate, prefetch=0))

    def wait(self, *args, **kwargs):
        time.sleep(seconds)
        return batch(self, *args, **kwargs)
    monkeypatch.setattr(packing.Packed, "batch", wait)


def slow_steps(monkeypatch, seconds: float):
    """A device that is busy for `seconds` longer than it takes, without the host waiting for it."""
    compile_step = assembly.compile_step
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
    monkeypatch.setattr(assembly, "compile_step", lambda *given: Slow(compile_step(*given)))


def test_a_step_that_waits_for_slow_data_says_how_long(tmp_path, tiny, monkeypatch):
    slow_data(monkeypatch, 0.2)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "5")
    for row in rows[1:]:
        assert 0.1 < row["data_wait_s"] < row["step_time_s"], row
    assert min(row["step_time_s"] - row["data_wait_s"] for row in rows[1:]) < 0.15, "all of the step but its own work"
    assert curves(tmp_path / "run" / "tensorboard")["time/data_wait_s"] == [
        (row["step"], np.float32(row["data_wait_s"])) for row in rows]


@pytest.mark.parametrize(("step_s", "data_s", "low", "high"), [(0.4, 0.15, 0.0, 0.05), (0.15, 0.45, 0.2, 0.4)])
def test_data_that_come_while_the_step_before_runs_are_not_waited_for(
        tmp_path, tiny, monkeypatch, step_s, data_s, low, high):
    slow_data(monkeypatch, data_s)
    slow_steps(monkeypatch, step_s)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "5")
    # A busy machine makes some steps longer; counted wrongly, the wait would be out of these bounds in all of them.
    assert any(low <= row["data_wait_s"] < high for row in rows[1:]), rows
    assert all(row["step_time_s"] > 0.8 * max(step_s, data_s) for row in rows[1:]), rows


def test_the_row_after_a_checkpoint_says_how_long_it_held_the_steps_up(tmp_path, tiny, monkeypatch):
    save = checkpoint.Checkpoints.save
    blocked = {}

    def slow(self, number, *args):
        time.sleep(0.25)
        blocked[number] = 0.25 + save(self, number, *args)
        return blocked[number]
    monkeypatch.setattr(checkpoint.Checkpoints, "save", slow)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "6", "--checkpoint.every", "2", "--metrics.every", "3")
    assert sorted(blocked) == [2, 4, 6]
    assert {row["step"]: row["checkpoint_wait_s"] for row in rows if row["checkpoint_wait_s"]} == {
        3: blocked[2], 6: blocked[4]}
    assert min(row["step_time_s"] for row in rows) < 0.2, "a step's own time has no checkpoint in it"


def test_rows_that_are_thinned_out_keep_what_the_steps_between_waited(tmp_path, tiny, monkeypatch):
    slow_data(monkeypatch, 0.1)
    rows = trained(tiny, tmp_path / "run", "--training.steps", "6", "--metrics.every", "3")
    assert [row["step"] for row in rows] == [3,
                                             6] and rows[1]["data_wait_s"] > 0.2, "about 0.1 s for each of three steps"


def profiles(directory) -> list[list[int]]:
    """The steps in each Perfetto trace below run.dir, which must be one that Perfetto and TensorBoard's plugin can
    open."""
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
    assert hooks.Trace([3, 5], directory, after=5).first == 0, "they lie behind: nothing to profile"
    assert curves(directory / "tensorboard")["loss"] == [
        (row["step"], np.float32(row["loss"])) for row in [*MetricRows(directory / "metrics.jsonl")]]


def test_a_run_that_is_stopped_while_it_profiles_keeps_the_profile(tmp_path, tiny, monkeypatch):
    write = metrics.MetricsWriter.write

    def write_and_stop(self, row):
        write(self, row)
        if row["step"] == 3:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(1)       # a thread takes the request
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
