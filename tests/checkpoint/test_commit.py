"""The commit of a checkpoint of many processes: whole and as today's, and process 0 touches no file of another
process."""
import json
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from benchmarks import commit as benchmark
from meshtrain.checkpoint import checkpoint, commit, saved
from meshtrain.checkpoint.directory import DirectoryStore
from checkpoints import files, flip

COUNT = 64


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint directory with step 7 of 64 processes, the arrays in it, and what process 0 opened while it
    committed."""
    directory = tmp_path_factory.mktemp("many")
    place, handler, opened = directory / "7", ocp.PyTreeCheckpointHandler(use_compression=False), []
    whole = benchmark.simulate(place, COUNT, handler, arrays=5)
    for index in range(COUNT):
        commit.hand_over(place, index)
    (place / "state" / "notes").write_text("of nobody")
    with pytest.MonkeyPatch.context() as watched:
        real = commit.files.checksums
        watched.setattr(commit.files, "checksums",
                        lambda where, paths, **how: real(where, [opened.append(path) or path for path in paths], **how))
        commit.commit(place, COUNT, json.dumps({"format": saved.FORMAT}),
                      lambda folder: handler.finalize(epath.Path(folder)))
    return directory, whole, [str(path.relative_to(place)) for path in opened]


def test_what_64_processes_wrote_is_whole_and_every_file_has_its_checksum(written):
    directory, whole, _ = written
    checkpoints = checkpoint.Checkpoints(DirectoryStore(directory), read_only=True)
    assert checkpoints.newest().step == 7
    forms = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in whole.items()}
    state = checkpoints.restore(7, forms)
    for name, x in whole.items():
        np.testing.assert_array_equal(state[name], x)
    known = json.loads((directory / "7" / "checksums.json").read_text())
    assert sorted([*known, "checksums.json"]) == files(directory / "7")


def test_a_flipped_bit_in_the_files_of_any_process_is_found(written):
    directory, _, _ = written
    checkpoints = checkpoint.Checkpoints(DirectoryStore(directory), read_only=True)
    for index in (0, 31, 63):
        path = directory / "7" / "state" / f"ocdbt.process_{index}" / "manifest.ocdbt"
        flip(path)
        assert checkpoints.fault(7) == f"state/ocdbt.process_{index}/manifest.ocdbt: its checksum differs"
        flip(path)


def test_the_first_process_sums_only_files_that_belong_to_nobody(written):
    opened = written[2]
    assert "state/notes" in opened and "metadata.json" in opened and len(opened) < 10
    assert not [name for name in opened if "process_" in name], opened


def test_who_did_not_hand_over_is_named_with_its_word(tmp_path, monkeypatch):
    monkeypatch.setattr(commit.files, "PAUSES_S", (0.01,))
    for index in (0, 2):
        (tmp_path / "state").mkdir(exist_ok=True)
        commit.hand_over(tmp_path, index)
    with pytest.raises(commit.NotHandedOver) as error:
        commit.commit(tmp_path, 4, "{}", lambda: None, lambda index: "No space left on device" if index == 1 else "")
    assert str(error.value) == "process 1: No space left on device; process 3: did not write its part (its output says why)"
    assert not os.path.exists(tmp_path / "checksums.json")


def test_each_process_has_its_own_files_and_folders_on_the_disk(tmp_path, monkeypatch):
    folder, synced, real = tmp_path / "state" / "ocdbt.process_5", [], os.fsync
    (folder / "d").mkdir(parents=True)
    (folder / "manifest").write_text("m")
    (folder / "d" / "data").write_text("d")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.readlink(f"/proc/self/fd/{descriptor}")),
                                                         real(descriptor)))
    commit.hand_over(tmp_path, 5)
    assert {str(folder), *map(str, folder.rglob("*"))} <= set(synced)


@pytest.mark.parametrize("argv, code, said", [(["--help"], 0, "64, 512 and 2048"),
                                              (["0"], 2, "0 is no number of processes"), (["-4"], 2, ""),
                                              (["many"], 2, "many is no number of processes")])
def test_the_benchmark_says_what_it_takes(argv, code, said, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(argv)
    assert ended.value.code == code and said in "".join(capsys.readouterr())
