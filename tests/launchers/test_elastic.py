"""Fewer devices than a run is meant for: the same batches in more microbatches, and launchers that go on with fewer
processes."""
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from meshtrain.launch import elastic as fewer
from meshtrain.launch import local
from meshtrain import config, elastic, run_files
from meshtrain.config import ConfigError

from tests import soak

ROOT = Path(__file__).resolve().parent.parent.parent


def run_of(**keys):
    """The quickstart on one axis of -1, with these keys (section__key) on top."""
    words = {"mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1, "sharding.rules": ROOT / "sharding_rules/ddp.toml",
             "mesh.full_devices": 8, "data.global_batch": 16, "training.microbatches": 1}
    words |= {key.replace("__", "."): value for key, value in keys.items()}
    return run_files.load([f"--{key}={value}" for key, value in words.items()])


# ---- the run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there, batch, before, after", [
    (8, 16, 1, 1), (4, 16, 1, 2), (2, 16, 1, 4), (1, 16, 1, 8), (4, 32, 2, 4), (1, 8, 1, 8),
    (4, 24, 3, 6), (6, 24, 1, 2), (3, 24, 1, 4)])
def test_no_device_holds_more_sequences_at_a_time_than_on_all_devices(there, batch, before, after):
    run, told = elastic.fit(run_of(data__global_batch=batch, training__microbatches=before), there)
    assert run.training.microbatches == after and run.data.global_batch == batch and run.mesh.full_devices == 0
    assert batch % (after * there) == 0 and batch // after // there <= max(1, batch // before // 8)
    assert bool(told) == (there < 8)
    if told:
        assert f"{there} of 8 devices" in told and f"training.microbatches={after} (of {before})" in told
        assert "\n" not in told


def test_more_devices_than_it_is_meant_for_change_nothing():
    run, told = elastic.fit(run_of(mesh__full_devices=4), 8)
    assert (run.training.microbatches, told) == (1, "")


def test_fixed_axes_keep_their_size_and_only_the_open_one_shrinks():
    run, told = elastic.fit(run_of(mesh__fsdp=2, sharding__rules=ROOT / "sharding_rules/hsdp.toml"), 4)
    assert config.mesh_sizes(run, 4)["fsdp"] == 2 and "mesh.data=2 (of 4)" in told and run.training.microbatches == 2


@pytest.mark.parametrize("keys, there, parts", [
    ({}, 3, ["data.global_batch=16", "3 devices", "e.g. 2"]),
    ({"mesh__fsdp": 2, "sharding__rules": ROOT / "sharding_rules/hsdp.toml"}, 3, ["mesh.fsdp=2", "3 devices"]),
    ({"mesh__data": 1, "mesh__tensor": -1, "sharding__rules": ROOT / "sharding_rules/tensor.toml"},
     4, ["mesh.tensor=-1", "more of the model"]),
])
def test_what_cannot_shrink_is_refused_with_its_remedy(keys, there, parts):
    with pytest.raises(ConfigError) as refused:
        elastic.fit(run_of(**keys), there)
    for part in parts:
        assert part in str(refused.value)


def test_full_devices_without_an_axis_that_shrinks_is_a_mistake():
    with pytest.raises(ConfigError, match="mesh.full_devices=8 needs an axis that can shrink .*; use mesh.data=-1"):
        run_of(mesh__data=8)


def test_what_the_model_does_not_divide_is_refused_before_anything_starts():
    run = run_of(mesh__data=1, mesh__fsdp=-1, sharding__rules=ROOT / "sharding_rules/zero3.toml",
                 data__global_batch=24, mesh__full_devices=4,
                 model__embed_dim=64, model__num_heads=4, model__num_kv_heads=4)
    assert elastic.check(run, 2) is None
    with pytest.raises(ConfigError, match="model.embed_dim"):
        elastic.check(run, 3)


# ---- the launcher's slots --------------------------------------------------------------------------------------------


def slots(count: int, least: int, monkeypatch, fits=lambda there: there) -> local.Slots:
    """Slots whose question to `launch.elastic` is answered by fits(processes there) -> processes, or 0."""
    def answer(argv, **_):
        n = fits(int(argv[3].removeprefix("--processes=")))
        return subprocess.CompletedProcess(argv, 0 if n >= least else 2, f"{n}\n" if n >= least else "",
                                           "" if n >= least else "error: why")
    monkeypatch.setattr(fewer.subprocess, "run", answer)
    return local.Slots([], count, least, 2 * count, True)


def test_a_process_that_fails_twice_in_a_row_is_left_out_and_comes_back_after_a_checkpoint(monkeypatch, capfd):
    ours = slots(4, 2, monkeypatch, lambda there: 2 if there == 3 else there)
    ours.after(3, first=True)
    assert ours.taken == [0, 1, 2, 3] and ours.overrides() == []
    ours.after(3, first=False)
    assert ours.taken == [0, 1] and ours.overrides() == ["--mesh.full_devices=8", "--mesh.simulated_devices=4"]
    ours.after(0, first=True)
    assert ours.taken == [0, 1, 2, 3]
    assert capfd.readouterr().err == ("process 3 of 4 failed twice in a row: the next start runs without it, with 2 "
                                      "processes\nthe next start has all 4 processes again\n")


def test_slots_are_counted_on_through_starts_with_fewer(monkeypatch):
    ours = slots(4, 1, monkeypatch)
    for culprit in (0, 0):
        ours.after(culprit, first=False)
    assert ours.taken == [1, 2, 3]
    for culprit in (1, 1):      # of the three that are left: slot 2
        ours.after(culprit, first=False)
    assert ours.taken == [1, 3]


def test_different_processes_and_unknown_ones_are_not_left_out(monkeypatch):
    ours = slots(4, 1, monkeypatch)
    for culprit in (0, 1, 0, None, None, 2):
        ours.after(culprit, first=False)
    assert ours.taken == [0, 1, 2, 3]


def test_where_no_fewer_can_train_it_all_start_again(monkeypatch, capfd):
    ours = slots(4, 3, monkeypatch, lambda there: 2)
    for culprit in (1, 1):
        ours.after(culprit, first=False)
    assert ours.taken == [0, 1, 2, 3] and "cannot go on without it: why" in capfd.readouterr().err


def test_what_fits_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(fewer, "LONGEST_S", 0.1)
    assert fewer.most([], 4, 2, 1, 4) == (0, "the check whether fewer processes can train the run did not end within 0.1 s")


def test_the_command_tells_how_many_processes_fit(capfd):
    words = ["--mesh.simulated_devices", "12", "--mesh.tensor", "1", "--mesh.fsdp", "-1",
             "--data.global_batch", "12", "--model.embed_dim", "48"]
    ask = lambda n, k: fewer.main([f"--processes={n}", f"--min-processes={k}", "--devices=1",
                                   "--full=12", "--", *words])
    assert (ask(11, 2), capfd.readouterr().out) == (0, "6 --mesh.full_devices=12 --mesh.simulated_devices=6\n")
    assert ask(11, 7) == 2 and "from 7 to 11" in capfd.readouterr().err


@pytest.mark.parametrize("hosts, fit", [(9, "9"), (8, "8"), (7, "4 --mesh.full_devices=64"),
                                        (3, "2 --mesh.full_devices=64")])
def test_a_run_that_says_what_it_is_meant_for_fits_on_fewer_hosts(hosts, fit, capfd):
    assert fewer.main([f"--processes={hosts}", "--devices=8", "--", str(ROOT / "configs/llama3-8b-64.toml"),
                       "--mesh.full_devices=64"]) == 0
    assert capfd.readouterr().out == f"{fit}\n"


def test_a_run_that_does_not_say_it_takes_what_is_there(capfd):
    assert fewer.main(["--processes=3", "--devices=2", "--", "--mesh.data=-1", "--mesh.simulated_devices=0"]) == 0
    assert capfd.readouterr().out == "3\n"


# ---- for real --------------------------------------------------------------------------------------------------------


def killed(life: soak.Life, processes: int, index: int) -> None:
    """kill -9 of one of so many processes, as soon as all are there; waits until all have gone."""
    def there() -> dict[int, bytes]:
        return {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in life.children()}

    assert life.wait_for(lambda: sum(b"process_id" in words for words in there().values()) == processes), life.said()
    children = there()
    os.kill(next(pid for pid, words in children.items() if f"process_id={index}\0".encode() in words), signal.SIGKILL)
    assert life.wait_for(lambda: not set(life.children()) & set(children)), life.said()


def trained_on(life: soak.Life) -> None:
    """Waits until there is a checkpoint that was not there."""
    before = max(soak.steps(life.directory), default=0)
    assert life.wait_for(lambda: max(soak.steps(life.directory), default=0) > before), life.said()


@pytest.mark.full
def test_a_run_of_four_processes_goes_on_in_two_and_then_in_four_with_the_losses_of_the_undisturbed_one(tmp_path):
    soak.prepare(tmp_path)
    undisturbed = soak.Life(tmp_path, "undisturbed", soak.Setting(4))
    assert undisturbed.end() == 0, undisturbed.said()

    life = soak.Life(tmp_path, "elastic", soak.Setting(4), own=("--min-processes", "2"))
    trained_on(life)
    killed(life, 4, 3)
    # again, and nothing was saved between: it is left out, and of three only two divide the batch
    killed(life, 4, 3)
    trained_on(life)
    killed(life, 2, 1)
    assert life.wait_for(lambda: len(life.children()) == 4), life.said()
    assert life.end() == 0, life.said()
    said = life.said()
    assert "process 3 of 4 failed twice in a row: the next start runs without it, with 2 processes" in said
    assert ("2 of 4 devices: mesh.fsdp=2 (of 4), training.microbatches=2 (of 1); the batch stays 8, 2 sequences a "
            "device at a time") in said
    assert "the next start has all 4 processes again" in said
    changes = [json.loads(line) for line in (life.directory / "changes.jsonl").read_text().splitlines()]
    assert [change["to"] for change in changes if change["key"] == "training.microbatches"] == [2, 1]

    got, wanted = soak.rows(life.directory), soak.rows(undisturbed.directory)
    assert [(row["step"], row["tokens"]) for row in got] == [(row["step"], row["tokens"]) for row in wanted]
    # Sums of other numbers of devices and microbatches: the last bits of float32.
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[key] for row in got], [row[key] for row in wanted],
                                   rtol=1e-6 if key == "loss" else 1e-5)
