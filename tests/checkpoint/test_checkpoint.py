"""Checkpoints: bit for bit onto any mesh; whole or absent; safe against donation; and what went wrong is told in one
line, or in full where arrays do not fit."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain import files
from meshtrain.checkpoint import checkpoint, saved
from meshtrain.checkpoint.directory import DirectoryStep, DirectoryStore
from meshtrain.config import ConfigError
from meshtrain.run import rundir, trees
# noqa: F401
from checkpoints import ROOT, abstract, assert_same_bits, flip, latest, make_state, mesh, names, small_disk  # noqa: F401


def test_state_comes_back_bit_for_bit_on_another_mesh(tmp_path):
    old, new = make_state(mesh(4, 2), P("a", "b")), make_state(mesh(2, 2), P(None, ("a", "b")), seed=1)
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path / "c"))
    assert checkpoints.newest() is None
    blocked_s = checkpoints.save(7, old, {"run": "[run]\nname = 'x'", "position": 7})
    assert blocked_s > 0
    assert checkpoints.newest().step == 7

    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path / "c"), read_only=True)
    assert checkpoints.newest().step == 7
    saved = checkpoints.newest()
    state, metadata = saved.restore(abstract(new)), saved.metadata
    assert metadata == {"format": 4, "run": "[run]\nname = 'x'", "position": 7} == checkpoints.open(7).metadata
    assert_same_bits(state, old)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, new)


def test_only_the_weights_come_back_for_a_new_run(tmp_path):
    old = make_state(mesh(4, 2), P("a", "b"))
    with checkpoint.Checkpoints(DirectoryStore(tmp_path)) as checkpoints:
        checkpoints.save(7, old, {})
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), read_only=True) as checkpoints:
        part = checkpoints.restore(7, {"params": abstract(old.params)}, part=True)
        assert_same_bits(part["params"], old.params)
        with pytest.raises(ValueError, match="opt_state/0/count: .* absent in this run"):
            checkpoints.restore(7, {"params": abstract(old.params)})


def test_who_reads_only_weights_reads_and_checks_no_other_arrays(tmp_path, monkeypatch):
    old = make_state(mesh(4, 2), P("a", "b"))
    with checkpoint.Checkpoints(DirectoryStore(tmp_path)) as checkpoints:
        checkpoints.save(7, old, {})
    of_params = [str(path) for path in (tmp_path / "7" / "params").rglob("*") if path.is_file()]
    largest = max(filter(pathlib.Path.is_file, (tmp_path / "7" / "state").rglob("*")),
                  key=lambda path: path.stat().st_size)
    flip(largest)
    read, real = [], files.checksums
    monkeypatch.setattr(files, "checksums",
                        lambda place, paths, **how: real(place, [read.append(str(p)) or p for p in paths], **how))
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path), read_only=True)
    assert checkpoints.newest(only_params=True).step == 7
    assert sorted(read) == sorted([*of_params, str(tmp_path / "7" / "metadata.json")])
    part = checkpoints.restore(7, {"params": abstract(old.params)}, part=True)
    assert_same_bits(part["params"], old.params)
    assert checkpoints.fault(7) == f"{largest.relative_to(tmp_path / '7')}: its checksum differs"
    flip(next(path for path in map(pathlib.Path, of_params) if path.stat().st_size > 200))
    with pytest.raises(ConfigError, match="only damaged"):
        checkpoints.newest(only_params=True)


def test_a_checkpoint_of_format_3_that_has_all_arrays_in_one_folder_comes_back(tmp_path):
    old, place = make_state(mesh(4, 2), P("a", "b")), tmp_path / "7"
    (place / "state").mkdir(parents=True)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    handler.save(epath.Path(place / "state"), args=ocp.args.PyTreeSave(trees.nest(trees.leaves_of(old))))
    handler.finalize(epath.Path(place / "state"))
    (place / "metadata.json").write_text('{"format": 3}')
    sums = files.checksums(place, [path for path in place.rglob("*") if path.is_file()])
    (place / "checksums.json").write_text(json.dumps(sums))
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path))
    assert checkpoints.newest(only_params=True).step == checkpoints.newest().step == 7
    assert_same_bits(checkpoints.restore(7, abstract(old)), old)
    part = checkpoints.restore(7, {"params": abstract(old.params)}, part=True)
    assert_same_bits(part["params"], old.params)
    flip(place / "state" / "manifest.ocdbt")
    assert "its checksum differs" in checkpoints.fault(7, only_params=True)


@pytest.mark.parametrize("devices, spec", [(8, P("a")), (8, P()), (1, P())])
def test_a_donated_state_is_saved_as_it_was(tmp_path, devices, spec):
    sharding = NamedSharding(mesh(devices, 1), spec)
    state = jax.device_put(jnp.arange(2_000_000, dtype=jnp.float32).reshape(8, -1), sharding)
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0, out_shardings=sharding)
    state = step(state)
    want = np.array(state)
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path))
    checkpoints.save(1, {"w": state}, {})
    for _ in range(3):
        state = step(state)
    got = checkpoints.restore(1, abstract({"w": state}))
    np.testing.assert_array_equal(got["w"], want)
    again = step(got["w"])  # and what was restored can be donated in its turn
    np.testing.assert_array_equal(again, want * 2 + 1)


def test_a_mismatch_names_every_array_and_a_saved_step_is_left_alone(tmp_path):
    state = make_state(mesh(4, 2), P("a", "b"))
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path))
    checkpoints.save(7, state, {"first": True})
    checkpoints.save(7, make_state(mesh(4, 2), P("a", "b"), seed=1), {"first": False})
    restored, metadata = checkpoints.restore(7, abstract(state)), checkpoints.open(7).metadata
    assert metadata["first"] is True
    assert_same_bits(restored, state)
    other = make_state(mesh(4, 2), P("a", "b"), width=32).replace(opt_state=())
    with pytest.raises(ValueError) as error:
        checkpoints.restore(7, abstract(other))
    assert "params/layers/wq: float32[8, 16] in the checkpoint, float32[8, 32] in this run" in str(error.value)
    assert "opt_state/0/count: int32[] in the checkpoint, absent in this run" in str(error.value)
    assert "params/norm" not in str(error.value)


def test_a_mismatch_of_many_arrays_lists_the_parameters_first_and_counts_the_rest():
    stored = {f"{part}/{n:02}": ((4,), "float32") for part in ("opt_state", "params") for n in range(20)}
    with pytest.raises(ValueError, match=r"another model or optimizer\?(?s:.)*params/07: (?s:.)*and 32 more arrays") as error:
        saved.check_fit("7", stored, {}, False)
    assert len(str(error.value).splitlines()) == 10 and "opt_state" not in str(error.value)
    with pytest.raises(ValueError, match=r"another optimizer\?"):
        saved.check_fit("7", {name: form for name, form in stored.items() if "opt" in name}, {}, False)


# ---- whole or absent, and kept ---------------------------------------------------------------------------------------


def test_the_latest_are_kept_and_leftovers_are_cleaned(tmp_path):
    for leftover in (".9.saving", ".1.deleting"):
        (tmp_path / leftover / "state").mkdir(parents=True)
    (tmp_path / "7.damaged").mkdir()
    (tmp_path / "notes").mkdir()
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), every=2, keep=2) as checkpoints:
        assert names(tmp_path) == ["7.damaged", "notes"]
        assert [step for step in range(1, 7) if checkpoints.due(step)] == [2, 4, 6]
        for step in (2, 4, 6):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
    assert names(tmp_path) == ["4", "6", "7.damaged", "notes"]


def test_the_last_whole_one_stays_until_the_next_is_whole(tmp_path, monkeypatch):
    """With keep=1 there is a moment with two, and none with none: seen at every rename and removal."""
    seen = []
    for owner, name in ((pathlib.Path, "rename"), (shutil, "rmtree")):

        def watched(*args, real=getattr(owner, name), **options):
            real(*args, **options)
            seen.append([name for name in names(tmp_path) if name.isdecimal()])

        monkeypatch.setattr(owner, name, watched)
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
    assert seen == [["1"], ["1", "2"], ["2"], ["2"]]


def test_a_checkpoint_has_its_number_only_when_its_checksums_are_on_disk(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    name = lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(name(descriptor)), real(descriptor)))
    before = {}
    rename = pathlib.Path.rename

    def watched(path, target):
        before.update({"synced": list(synced), "files": {str(p) for p in path.rglob("*")} | {str(path)}})
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", watched)
    with checkpoint.Checkpoints(DirectoryStore(tmp_path)) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
    assert before["files"] <= set(before["synced"])
    assert str(tmp_path / ".1.saving" / "checksums.json") in before["files"]
    assert synced[-1] == str(tmp_path)


def test_an_exception_in_the_run_waits_for_the_save_and_is_not_replaced(tmp_path):
    with pytest.raises(KeyError, match="mine"), checkpoint.Checkpoints(DirectoryStore(tmp_path)) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        raise KeyError("mine")
    assert names(tmp_path) == ["1"]


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path))
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint, "FORMAT", 5)
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
    with pytest.raises(ValueError, match="format 5, this version reads up to 4"):
        checkpoints.open(1)


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint_or_none(tmp_path):
    program = (
        "import logging, os, sys, jax.numpy as jnp\nlogging.basicConfig(level=logging.INFO)\nfrom meshtrain.checkpoint "
        "import checkpoint\nfrom meshtrain.checkpoint.directory import DirectoryStore\n"
        "checkpoints = checkpoint.Checkpoints(DirectoryStore(sys.argv[1]))\ncheckpoints.save(1, {'w': "
        "jnp.full(8_000_000, 1.0)}, {})\ncheckpoints.wait()\ncheckpoints.save(2, {'w': jnp.full(8_000_000, 2.0)}, {})\n"
        "os._exit(9)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert "INFO:absl" not in done.stderr and not done.stdout
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path))
    step = checkpoints.newest().step
    assert step in (1, 2)
    state = checkpoints.restore(step, {"w": jax.ShapeDtypeStruct((8_000_000,), jnp.float32)})
    assert np.all(np.asarray(state["w"]) == step)
    assert names(tmp_path) == (["1"] if step == 1 else ["1", "2"])


# ---- what the disk refuses -------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_leaves_nothing_and_the_next_save_may_work(small_disk, capfd):  # noqa: F811
    random = jnp.asarray(np.random.default_rng(0).normal(size=2_000_000).astype("f4"))  # 8 MB that hardly compress
    told = []
    with checkpoint.Checkpoints(DirectoryStore(small_disk / "c"), keep=1, tell=told.append) as checkpoints:
        checkpoints.save(1, {"w": random[:1000]}, {})
        checkpoints.save(2, {"w": random}, {})
        message = f"checkpoint of step 2 not saved in {small_disk / 'c'}: No space left on device; "
        message += "nothing is saved since step 1"
        with pytest.raises(checkpoint.CheckpointError) as error:
            checkpoints.wait()
        assert told == [str(error.value)] == [message] and names(small_disk / "c") == ["1"]
        checkpoints.save(3, {"w": random}, {})  # told, and nobody is stopped: the run goes on
        checkpoints.save(4, {"w": random[:2000]}, {})
        assert checkpoints.newest().step == 4 and names(small_disk / "c") == ["4"] and len(told) == 2
        got = checkpoints.restore(4, {"w": jax.ShapeDtypeStruct((2000,), "float32")})
        np.testing.assert_array_equal(got["w"], random[:2000])
    assert "Traceback" not in "".join(capfd.readouterr())


def test_arrays_that_end_after_their_save_has_failed_print_nothing(small_disk, monkeypatch):  # noqa: F811
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    # 12.8 MB
    state = {f"w{i}": jnp.asarray(np.random.default_rng(i).normal(size=100_000).astype("f4")) for i in range(32)}
    for _ in range(4):      # which of tensorstore's threads is late is chance
        with contextlib.suppress(checkpoint.CheckpointError), checkpoint.Checkpoints(DirectoryStore(small_disk / "c"),
                                                                                     tell=lambda text: None) as checkpoints:
            checkpoints.save(1, state, {})
            checkpoints.save(2, state, {})
    assert printed == []
    sys.unraisablehook("another")
    assert printed == ["another"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("where", ["checksums", "write", "sync", "rename"])
def test_wherever_the_disk_refuses_the_last_whole_one_stays(tmp_path, monkeypatch, where, error):
    told = []
    monkeypatch.setattr(files, "PAUSES_S", (0.001,))
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=1, tell=told.append) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        with monkeypatch.context() as broken:

            def fail(*args, **kwargs):
                raise OSError(error, os.strerror(error))

            broken.setattr(*((pathlib.Path, where) if where == "rename" else (files, where)), fail)
            checkpoints.save(2, {"w": jnp.ones(3)}, {})
            with pytest.raises(checkpoint.CheckpointError,
                               match=f"step 2 not saved in {tmp_path}: {os.strerror(error)}"):
                checkpoints.wait()
        assert len(told) == 1 and names(tmp_path) == ["1"] and checkpoint.Checkpoints(DirectoryStore(tmp_path)).newest().step == 1
        checkpoints.save(3, {"w": jnp.ones(3)}, {})
    assert names(tmp_path) == ["3"]


def test_a_directory_that_went_away_is_told_and_the_run_goes_on(tmp_path):
    told = []
    with checkpoint.Checkpoints(DirectoryStore(tmp_path / "c"), tell=told.append) as checkpoints:
        (tmp_path / "c").rmdir()
        (tmp_path / "c").write_text("")
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        with pytest.raises(checkpoint.CheckpointError, match="step 1 not saved in .*/c: Not a directory"):
            checkpoints.wait()
        (tmp_path / "c").unlink()
        checkpoints.save(2, {"w": jnp.ones(3)}, {})
    assert latest(tmp_path / "c") == (2, [])
    assert len(told) == 1


def test_a_directory_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/c cannot hold checkpoints: Not a directory; give a directory"):
        checkpoint.Checkpoints(DirectoryStore(tmp_path / "file" / "c"))


def test_the_last_failed_save_raises_at_the_end(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="step 1 not saved"):
        with checkpoint.Checkpoints(DirectoryStore(tmp_path / "c")) as checkpoints:
            (tmp_path / "c").rmdir()
            (tmp_path / "c").write_text("")
            checkpoints.save(1, {"w": jnp.ones(3)}, {})


def failing_saves(monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(files, "checksums", fail)


def test_the_third_failed_save_in_a_row_stops_the_run_at_once(tmp_path, monkeypatch):
    told = []
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), tell=told.append) as checkpoints:
        for step in (1, 2):
            with monkeypatch.context() as full:     # two that fail and one that works: counted anew
                failing_saves(full)
                checkpoints.save(10 * step, {"w": jnp.ones(3)}, {})
                checkpoints.save(10 * step + 1, {"w": jnp.ones(3)}, {})
                with contextlib.suppress(checkpoint.CheckpointError):
                    checkpoints.wait()
            checkpoints.save(10 * step + 2, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        failing_saves(monkeypatch)
        for step in (30, 31):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
        with pytest.raises(checkpoint.CheckpointError,
                           match="step 32 not saved .*No space left on device; nothing is saved since step 22; 3 saves in a row"):
            checkpoints.save(32, {"w": jnp.ones(3)}, {})
        assert len(told) == 7 and names(tmp_path) == ["12", "22"]
        monkeypatch.undo()
        checkpoints.save(33, {"w": jnp.ones(3)}, {})


def test_what_a_failed_save_left_is_gone_before_it_is_told(tmp_path, monkeypatch):
    seen = []
    def tell(text):
        seen.append(names(tmp_path))
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    failing_saves(monkeypatch)
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), tell=tell) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        with pytest.raises(checkpoint.CheckpointError):
            checkpoints.wait()
        monkeypatch.undo()
        checkpoints.save(2, {"w": jnp.ones(3)}, {})
    assert seen == [[]] and names(tmp_path) == ["2"]


def test_later_checkpoints_are_set_aside_not_deleted(tmp_path):
    with checkpoint.Checkpoints(DirectoryStore(tmp_path)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        assert checkpoints.set_aside_after(1) == ["2.aside", "3.aside"] and checkpoints.steps() == [1]
        checkpoints.save(2, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        assert checkpoints.set_aside_after(1) == ["2.aside-2"] and checkpoints.newest().step == 1
    assert names(tmp_path) == ["1", "2.aside", "2.aside-2", "3.aside"]


def test_a_step_that_was_saved_and_found_damaged_is_saved_again(tmp_path):
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), tell=lambda text: None) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        flip(tmp_path / "20" / "metadata.json")
        assert checkpoints.newest().step == 10
        checkpoints.save(20, {"w": jnp.ones(3)}, {})
        assert checkpoints.newest().step == 20
    assert names(tmp_path) == ["10", "20", "20.damaged"]


def test_a_save_that_failed_does_not_hinder_the_way_back(tmp_path, monkeypatch):
    with pytest.raises(checkpoint.CheckpointError), checkpoint.Checkpoints(DirectoryStore(tmp_path),
                                                                           tell=lambda text: None) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        failing_saves(monkeypatch)
        checkpoints.save(2, {"w": jnp.ones(3)}, {})
        monkeypatch.setattr(checkpoint.Checkpoints, "fault", lambda *_, **how: "")
        assert checkpoints.newest().step == 1        # and the end of the run tells that its last save failed


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY])
def test_what_cannot_be_removed_is_told_and_in_nobodys_way(tmp_path, monkeypatch, code):
    """As on NFS, where a file that is open stays as .nfsXXXX, or where a save that failed still writes."""
    (tmp_path / ".9.saving" / "state").mkdir(parents=True)
    (tmp_path / ".9.saving" / "state" / "stale").touch()
    told = []
    def busy(path, onerror):
        onerror(os.rmdir, str(path), (OSError, OSError(code, os.strerror(code), str(path)), None))
    with monkeypatch.context() as patched:
        patched.setattr(files, "PAUSES_S", (0.001,))
        patched.setattr(shutil, "rmtree", busy)
        with checkpoint.Checkpoints(DirectoryStore(tmp_path), tell=told.append) as checkpoints:
            checkpoints.save(9, {"w": jnp.ones(3)}, {})
    assert len(told) >= 1 and os.strerror(code) in told[0] and not (tmp_path / "9" / "state" / "stale").exists()
    assert checkpoint.Checkpoints(DirectoryStore(tmp_path)).newest().step == 9 and names(tmp_path) == ["9"]      # removed by the next start


@pytest.mark.parametrize("code, kind", [(errno.EIO, files.FileSystemError), (errno.EACCES, ConfigError)])
def test_what_refuses_the_directory_is_a_moment_or_a_mistake(tmp_path, monkeypatch, code, kind):
    monkeypatch.setattr(files, "PAUSES_S", (0.001,))
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    with pytest.raises(kind, match="cannot hold checkpoints"):
        checkpoint.Checkpoints(DirectoryStore(tmp_path / "c"))


def test_a_start_that_lost_its_directory_renames_and_removes_nothing(tmp_path):
    """Its host was cut off, its lock lapsed, and its successor saves the same step."""
    lost, told = [], []
    def check_claim():
        if lost:
            raise rundir.LostClaimError("run.dir was taken over by another start")
    old = checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=1, tell=told.append, check_claim=check_claim)
    old.save(1, {"w": jnp.ones(3)}, {})
    old.wait()
    lost.append(True)
    successors = tmp_path / ".2.saving" / "state"
    successors.mkdir(parents=True)
    old.save(2, {"w": jnp.ones(3)}, {})
    with pytest.raises(checkpoint.CheckpointError, match="step 2 not saved .* taken over by another start"):
        old.save(3, {"w": jnp.ones(3)}, {})
    assert names(tmp_path) == [".2.saving", "1"] and list(successors.iterdir()) == [] and len(told) == 1


def test_a_reader_whose_checkpoint_is_retired_meanwhile_takes_the_newer_one(tmp_path, monkeypatch):
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=1) as writer:
        writer.save(1, {"w": jnp.ones(3)}, {})
        writer.wait()
        told, real = [], DirectoryStep._check_share
        reader = checkpoint.Checkpoints(DirectoryStore(tmp_path), read_only=True, tell=told.append)
        def retired(self, *how):
            if self.place.name == "1":
                writer.save(2, {"w": jnp.ones(3)}, {})
                writer.wait()
            return real(self, *how)
        monkeypatch.setattr(DirectoryStep, "_check_share", retired)
        assert reader.newest().step == 2 and told == []
        with pytest.raises(checkpoint.CheckpointError, match="1 was removed while it was read: .*checkpoint.keep"):
            reader.restore(1, {"w": jax.ShapeDtypeStruct((3,), "float32")})


def test_the_last_save_that_fails_leaves_nothing_on_the_full_disk(small_disk):  # noqa: F811
    """Also where tensorstore still writes other arrays when the first of them has failed."""
    arrays = {f"w{number}": jnp.full(1 << 16, number, jnp.float32) for number in range(40)}
    for _ in range(3):
        checkpoints = checkpoint.Checkpoints(DirectoryStore(small_disk / "c"), tell=lambda text: None)
        checkpoints.save(1, {"params": {"w": jnp.ones(3)}}, {})
        checkpoints.wait()
        for step in (2, 3):
            checkpoints.save(step, {"params": arrays, "opt": arrays}, {})
        with pytest.raises(checkpoint.CheckpointError, match="step 3 not saved"):
            checkpoints.wait()
        time.sleep(1)
        assert names(small_disk / "c") == ["1"]


def test_checkpoints_kept_for_ever_stay_with_another_keep_every_and_a_smaller_keep(tmp_path):
    of = lambda every: {"run": {"checkpoint": {"keep_every": every}}}
    for keep, every, steps, left in ((2, 4, range(2, 12, 2), [4, 8, 10]), (1, 6, range(12, 22, 2), [4, 8, 12, 18, 20]),
                                     (1, 0, range(22, 26, 2), [4, 8, 12, 18, 24])):
        with checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=keep, keep_every=every) as checkpoints:
            for step in steps:
                checkpoints.save(step, {"w": jnp.ones(3)}, of(every))
            checkpoints.wait()
            assert checkpoints.steps() == left
    (tmp_path / "8" / "metadata.json").write_text("{")
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=1, keep_every=0) as checkpoints:
        checkpoints.save(26, {"w": jnp.ones(3)}, of(0))
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8, 12, 18, 26], "nothing is removed whose promise cannot be read"
    with checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=1) as checkpoints:       # a store without promises
        checkpoints.save(28, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [28]
