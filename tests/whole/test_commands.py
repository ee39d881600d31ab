"""The two commands as a stranger meets them: exit codes, messages, and what they leave on the disk.

Almost everything calls `main` in this process, whose eight simulated devices fit `mesh.simulated_devices=8`; only what
a process alone can show (imports, signals, the command line itself) starts another.
"""
import json
import os
import shutil
import signal
import time
import tomllib
from pathlib import Path

import jax
import pytest
from commands import (  # noqa: F401
    ROOT, RULES, SIX, Ran, call, home, in_a_directory_of_its_own, process, ran, refused, tiny,
)

from meshtrain import devices, process as joining
from meshtrain.commands import inspect, train
from meshtrain.journal import metrics
from meshtrain.journal.rows import MetricRows
from meshtrain.run import rundir

TIMES = ("step_time_s", "tokens_per_s", "mfu", "data_wait_s", "checkpoint_wait_s", "time", "elapsed_s", "goodput")


@pytest.fixture(scope="module")
def finished(home, tiny) -> Path:
    """run.dir of six steps in one go. Tests read it, or copy it."""
    directory = home / "finished"
    ran = call(train.main, *tiny, *SIX, "--run.dir", directory)
    assert (ran.code, ran.err) == (0, ""), ran
    (directory / "said.txt").write_text(ran.out)
    return directory


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    directory = tmp_path / "copied"
    shutil.copytree(finished, directory)
    return directory


def rows(directory: Path) -> list[dict]:
    return [*MetricRows(directory / "metrics.jsonl")]


def lasting(directory: Path) -> list[dict]:
    """The rows without times, and without the validation loss that a run has where it happened to end."""
    return [{key: value for key, value in row.items() if key not in (*TIMES, "val_loss")} for row in rows(directory)]


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory; the lock is no part of the run."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != ".lock"}


# ---- what a run leaves -----------------------------------------------------------------------------------------------

def test_a_run_says_what_it_trains_and_where_everything_is(finished):
    said = (finished / "said.txt").read_text()
    for part in ("parameters in 1 layer, 6 steps of 8 × 32 tokens", "data 8", "my rules.toml", "memory per device",
                 "compiled in", "tokens/s", "validation loss", "a sample (8 tokens, no prompt):", str(finished)):
        assert part in said


def test_a_run_leaves_its_settings_metrics_and_checkpoint(finished):
    assert {"config.toml", "rules.toml", "metrics.jsonl", "checkpoints"} <= {path.name for path in finished.iterdir()}
    assert (finished / "rules.toml").read_text() == RULES, "the user's own file, wherever it lies"
    settings = tomllib.loads((finished / "config.toml").read_text())
    assert settings["model"]["embed_dim"] == 32 and settings["training"]["steps"] == 6
    assert settings["model"]["head_dim"] == 16, "resolved: nothing is left to guess"


def test_a_row_per_step_has_the_keys_and_types_of_the_contract(finished):
    written = rows(finished)
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in written] == [8 * 32 * step for step in range(1, 7)]
    for row in written:
        assert {key: type(row[key]) for key in ("loss", "grad_norm", "learning_rate",
                                                "step_time_s", "tokens_per_s")} == \
            dict.fromkeys(("loss", "grad_norm", "learning_rate", "step_time_s", "tokens_per_s"), float)
        assert row["skipped"] is False and row["mfu"] is None, "the peak of a CPU is unknown"
        assert row["step_time_s"] > 0 and abs(row["tokens_per_s"] * row["step_time_s"] - 256) < 1e-6
    assert ["val_loss" in row for row in written] == [False] * 5 + [True]
    assert written[-1]["loss"] < written[0]["loss"]
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line) == row for line, row in zip(lines, written, strict=True))


def test_metrics_every_thins_the_rows_but_keeps_a_validation(tiny, tmp_path):
    ran = call(train.main, *tiny, *SIX, "--metrics.every", 4, "--validation.every", 3, "--run.dir", tmp_path / "thin")
    assert ran.code == 0, ran
    assert [(row["step"], "val_loss" in row) for row in rows(tmp_path / "thin")] == [(3, True), (4, False), (6, True)]


def test_the_written_settings_run_again_to_the_same_numbers(finished, tmp_path):
    ran = call(train.main, finished / "config.toml", "--run.dir", tmp_path / "again")
    assert ran.code == 0, ran
    assert lasting(tmp_path / "again") == lasting(finished)
    assert rows(tmp_path / "again")[-1]["val_loss"] == rows(finished)[-1]["val_loss"]


# ---- going on --------------------------------------------------------------------------------------------------------

def test_a_finished_run_says_so_and_changes_nothing(copied):
    before = contents(copied)
    ran = call(train.main, copied / "config.toml", "--run.dir", copied)
    assert (ran.code, ran.err) == (0, "") and "finished" in ran.out and "training.steps" in ran.out
    assert contents(copied) == before


def test_a_run_that_is_stopped_goes_on_by_the_same_command_bit_for_bit(tiny, finished, tmp_path, monkeypatch):
    command = (*tiny, *SIX, "--run.dir", tmp_path / "stopped")
    write = metrics.MetricsWriter.write

    def write_and_stop(self, row):
        write(self, row)
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)       # a thread takes the request

    with monkeypatch.context() as patched:
        patched.setattr(metrics.MetricsWriter, "write", write_and_stop)
        ran = call(train.main, *command)
    assert ran.code == 75 and "SIGTERM" in ran.out and "run the same command again" in ran.out, ran
    assert len(rows(tmp_path / "stopped")) == 3, "the step that ran when the signal came is finished"
    # What a killed run may have written after its last checkpoint is written again.
    with open(tmp_path / "stopped" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')
    ran = call(train.main, *command)
    assert ran.code == 0 and "resuming after step 3" in ran.out, ran
    assert lasting(tmp_path / "stopped") == lasting(finished)
    assert rows(tmp_path / "stopped")[-1]["val_loss"] == rows(finished)[-1]["val_loss"]


def test_more_steps_go_on_where_a_finished_run_ended(tiny, finished, tmp_path):
    command = (*tiny, "--run.sample_tokens", 0, "--run.dir", tmp_path / "parts", "--training.steps")
    assert call(train.main, *command, 3).code == 0
    assert call(train.main, *command, 6).code == 0
    assert lasting(tmp_path / "parts") == lasting(finished)


def test_other_documents_are_refused_on_resume(copied, tmp_path, home):
    text = tmp_path / "corpus.txt"
    text.write_text((home / "corpus.txt").read_text() + "one more line\n")
    ran = call(train.main, copied / "config.toml", "--run.dir", copied, "--training.steps", 9,
               "--data.paths", json.dumps([str(text)]))
    assert ran.code == 2 and "data" in ran.err and "Traceback" not in ran.err


# ---- from another run's weights --------------------------------------------------------------------------------------


def test_init_from_other_shapes_is_refused_and_the_directory_stays_usable(tiny, finished, tmp_path):
    command = (*tiny, *SIX, "--run.dir", tmp_path / "wide", "--model.mlp_dim", 32)
    refused(call(train.main, *command, "--checkpoint.init_from", finished), "init_from", "mlp")
    refused(call(train.main, *command, "--checkpoint.init_from", tmp_path), "init_from", "no complete checkpoint")
    with rundir.claim(train.run_files.load([str(word) for word in command])):
        pass


# ---- what cannot run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, mesh, parts", [
    ('[params]\nembed = "tensor"\nmlp = "tensor"\n[activations]\nbatch = "data"\n', {"data": 4, "tensor": 2},
     ["rules.toml [params]", "'tensor' shards both", "mesh.tensor to 1"]),
    ('[params]\nheads = "tensor"\n', {"data": 1, "tensor": 8}, ["heads=2 does not divide over tensor 8"]),
    ('[params]\nembed = "tensr"\n', {}, ["rules.toml [params]", "'tensr'", "did you mean 'tensor'?"]),
    ('[prams]\nembed = "fsdp"\n', {}, ["[prams]", "did you mean 'params'?"]),
], ids=["axis twice", "no divisor", "unknown axis", "unknown table"])
def test_a_mistake_in_a_rule_file_is_exit_2_with_the_rule(text, mesh, parts, tiny, tmp_path):
    (tmp_path / "rules.toml").write_text(text)
    sizes = [word for axis, n in mesh.items() for word in (f"--mesh.{axis}", n)]
    for main in (train.main, inspect.main):
        refused(call(main, *tiny, *SIX, *sizes, "--sharding.rules", "rules.toml"), *parts)


def test_a_rule_file_that_changes_under_its_name_is_told_and_recorded(tiny, tmp_path):
    words = (*tiny, "--run.dir", "ruled", "--sharding.rules", "my.toml", "--run.sample_tokens", "0", "--training.steps")
    shutil.copy(ROOT / "sharding_rules/zero1.toml", "my.toml")
    ran(*words, 2)
    assert "sharding.rules" not in ran(*words, 3).out and Path("ruled/changes.jsonl").read_text().count("rules") == 0
    shutil.copy(ROOT / "sharding_rules/zero3.toml", "my.toml")
    assert "from step 4 on: sharding.rules=\"my.toml (" in ran(*words, 4).out
    shutil.copy("my.toml", "elsewhere.toml")
    assert "sharding.rules" not in ran(*words, 5, "--sharding.rules", "elsewhere.toml").out
    change, = (json.loads(line) for line in Path("ruled/changes.jsonl").read_text().splitlines() if "rules" in line)
    assert change["step"] == 3 and change["from"] != change["to"] and change["to"].startswith("my.toml (")


def test_booleans_are_true_or_false(tiny):
    for word, value in (("true", True), ("false", False)):
        assert train.run_files.load([*tiny, "--model.tie_embeddings", word]).model.tie_embeddings is value
        assert train.run_files.load([*tiny, f"--model.tie_embeddings={word}"]).model.tie_embeddings is value


@pytest.mark.parametrize("every", [0, 1], ids=["", "validated each step"])
def test_steps_without_a_finite_loss_are_skipped_told_and_stop_the_run(every, tiny, tmp_path):
    ran = call(train.main, *tiny, "--optimizer.learning_rate", 1e38, "--optimizer.warmup_steps",
               0, "--training.steps", 9,
               "--training.max_skipped_steps", 3, "--validation.every", every, "--run.dir", tmp_path / "run")
    assert ran.code == 1 and "Traceback" not in ran.err, ran
    assert ran.err.startswith("stopped: 3 steps in a row") and "optimizer.learning_rate=1e+38" in ran.err
    assert ran.out.count("not finite, skipped") == 3
    written = rows(tmp_path / "run")
    assert [row["skipped"] for row in written] == [False, True, True, True][:len(written)] and written[-1]["skipped"]
    assert any(row["loss"] is None or row["grad_norm"] is None for row in written)
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*")), "nothing broken was saved"


# ---- processes -------------------------------------------------------------------------------------------------------

def test_importing_starts_no_backend_and_sets_no_flag():
    """jax takes another device count only while no backend runs, and none of these modules may have set one."""
    code = ("import os; before = dict(os.environ); import meshtrain, meshtrain.train, meshtrain.inspect\n"
            "assert dict(os.environ) == before; assert 'XLA_FLAGS' not in os.environ\n"
            "import jax; jax.config.update('jax_platforms', 'cpu'); jax.config.update('jax_num_cpu_devices', 3)\n"
            "assert len(jax.devices()) == 3")
    child = process("-c", code)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (0, ""), err


def test_a_typo_on_the_command_line_is_exit_2(tmp_path):
    child = process("-m", "meshtrain.train", "--trainig.steps", 6)
    out, err = child.communicate(timeout=120)
    refused(Ran(child.returncode, out, err), "trainig", "training")
    assert err.startswith("error: "), "jax's C++ says nothing before"
    assert out == "" and list(tmp_path.iterdir()) == []


def test_options_before_the_run_file_keep_its_mesh_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(devices, "gpus_expected", lambda: True)
    monkeypatch.setattr(devices, "start", lambda run, cluster: jax.devices())
    for argv, own in ((["--training.steps", "5", str(ROOT / "configs/llama3.2-1b.toml")], True),
                      (["--training.steps", "5"], False),
                      (["--training.steps", "5", "--mesh.data=2"], True)):
        run = train.run_files.load(argv)
        found, chosen = joining.start_devices(run, argv, None)
        assert len(found) == 8 and (chosen.mesh == run.mesh) is own, argv
    assert chosen == run


# ---- checkpoints -----------------------------------------------------------------------------------------------------

def test_a_failed_final_save_is_exit_1_and_a_failed_regular_one_is_told(tiny, tmp_path, monkeypatch):
    from meshtrain import files
    write = files.write

    def full(path, text):
        if path.parent.name in (".2.saving", ".6.saving") and path.name == "metadata.json":
            raise OSError(28, os.strerror(28))
        write(path, text)

    monkeypatch.setattr(files, "write", full)
    ran = call(train.main, *tiny, *SIX, "--run.dir", tmp_path / "run", "--checkpoint.every", 2)
    saved = tmp_path / "run" / "checkpoints"
    assert ran.code == 1 and "Traceback" not in ran.err
    lines = ran.err.splitlines()
    assert lines[0] == f"checkpoint of step 2 not saved in {saved}: No space left on device; nothing is saved yet"
    assert lines[1] == (f"checkpoint of step 6 not saved in {saved}: No space left on device; nothing is saved since "
                        f"step 4")
    assert lines[2].startswith(f"error: {lines[1]}") and len(lines) == 3
    assert [path.name for path in saved.iterdir()] == ["4"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    ran = call(train.main, *tiny, *SIX, "--run.dir", tmp_path / "run")
    assert ran.code == 0 and "resuming after step 4" in ran.out


def test_a_damaged_checkpoint_is_told_and_the_one_before_used(tiny, tmp_path, finished):
    ran = call(train.main, *tiny, *SIX, "--run.dir", tmp_path / "run", "--checkpoint.every", 3)
    assert ran.code == 0
    saved = tmp_path / "run" / "checkpoints"
    os.truncate(saved / "6" / "metadata.json", 5)
    ran = call(train.main, *tiny, *SIX, "--run.dir", tmp_path / "run")
    assert ran.code == 0 and "resuming after step 3" in ran.out
    assert "6 is damaged (metadata.json: 5 bytes, " in ran.err
    assert lasting(tmp_path / "run") == lasting(finished)
    for step in ("3", "6"):
        os.truncate(saved / step / "metadata.json", 5)
    first = call(train.main, *tiny, *SIX, "--run.dir", tmp_path / "run")
    assert first.code == 2 and "3 is damaged (" in first.err and "Traceback" not in first.err
    refused(call(train.main, *tiny, *SIX, "--run.dir", tmp_path / "run"),
            "only damaged ones (3.damaged, 6.damaged", "remove")
