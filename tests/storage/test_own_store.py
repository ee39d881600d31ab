"""A store of one's own, a class of six methods and a row of `addresses.BUCKETS`, holds a run."""
import os
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT, call, home, in_a_directory_of_its_own, ran, rows, tiny  # noqa: F401

from tests import shelf, soak

pytest.importorskip("obstore", reason="buckets need pip install -e '.[storage]'")

from meshtrain.checkpoint import resume  # noqa: E402
from meshtrain.checkpoint.bucket import BucketStore  # noqa: E402
from meshtrain.checkpoint.checkpoint import Checkpoints  # noqa: E402
from meshtrain.checkpoint.store import CheckpointError, Save  # noqa: E402
from meshtrain.commands import train  # noqa: E402
from meshtrain.run import contents  # noqa: E402
from meshtrain.storage import addresses, buckets, copies, mirror, retries  # noqa: E402

THERE = "shelf://one/run"


@pytest.fixture(autouse=True)
def shelves(tmp_path, monkeypatch):
    monkeypatch.setitem(addresses.BUCKETS, "shelf", shelf.ROW)
    monkeypatch.setattr(shelf.Shelf, "refused", "\0")
    monkeypatch.setenv("SHELVES", str(tmp_path / "shelves"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    buckets._bucket.cache_clear()       # a bucket of another test's shelves


def damage(step: int) -> None:
    """Change one bit of a piece of a checkpoint."""
    folder = addresses.parse(f"{THERE}/checkpoints")
    name = next(name for name in buckets.children(folder)[1] if name.startswith(f"{step}."))
    piece = buckets.list_files(folder.below(name))[0].address
    content = bytearray(buckets.read(piece))
    content[len(content) // 2] ^= 16
    buckets.write(piece, bytes(content))


def test_a_store_of_ones_own_keeps_every_state_and_its_commit_is_exclusive():
    """As an s3:// bucket does: removal, a damaged piece, a second writer of a step."""
    place, told = addresses.parse(f"{THERE}/checkpoints"), []
    state = {"params": {"w": jnp.arange(64, dtype=jnp.float32)}}
    with Checkpoints(BucketStore(place, start="a"), keep=2, keep_every=4, tell=told.append) as saving:
        for step in (2, 4, 6, 8, 10):
            saving.save(step, state, {"number": step})
        saving.wait()
        assert saving.steps() == [4, 8, 10] and told == []
    assert {name.partition(".")[0] for name in buckets.children(place)[1]} == {"4", "8", "10"}
    damage(10)
    with Checkpoints(BucketStore(place, start="b"), tell=told.append) as again:
        newest = again.newest()
        assert newest.step == 8 and newest.metadata["number"] == 8 and again.steps() == [4, 8]
        assert len(told) == 1 and "its checksum differs" in told[0] and "kept as 10.damaged" in told[0]
        restored = newest.restore({"params": {"w": state["params"]["w"]}})
        np.testing.assert_array_equal(restored["params"]["w"], state["params"]["w"])
    second, save = BucketStore(place, start="c"), Save(8, 1, False)
    second.put(save, state)()
    with pytest.raises(CheckpointError, match="another start has saved this step"):
        second.commit(save, "{}", lambda process: "", lambda: None)


def error_of(request, *args) -> str:
    try:
        request(*args)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_request_to_a_store_of_ones_own_ends_as_one_to_a_bucket(monkeypatch):
    place, asked, real = addresses.parse("shelf://one/folder"), [], shelf.Shelf.copy
    a, b = place.below("a"), place.below("b")
    first = buckets.write_if(a, b"0123", None)
    assert buckets.write_if(a, b"x", None) is None
    assert buckets.write_if(a, b"45", buckets.Version("other", None)) is None
    assert buckets.write_if(a, b"4567", first) and buckets.read(a, 1, 3) == b"56"
    seen = buckets.look_up(a)
    assert seen and (seen.size, buckets.look_up(b)) == (4, None)
    buckets.write(a, b"8901")
    assert "Changed: shelf://one/folder/a has changed since it was listed" in error_of(buckets.read_range, seen, 0, 4)

    def copy_at_the_second_request(self, *paths):
        asked.append(paths)
        if len(asked) == 1:
            raise OSError("the shelf is busy")
        real(self, *paths)
    monkeypatch.setattr(shelf.Shelf, "copy", copy_at_the_second_request)
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,))
    assert error_of(buckets.copy, a, place.below("c/d")) == "" and len(asked) == 2
    assert buckets.children(place) == (["a"], ["c"]) and buckets.children(place.at("")) == ([], ["folder"])
    monkeypatch.setattr(shelf.Shelf, "refused", "a")
    assert "Refused: " in (error := error_of(buckets.write, a, b"")) and "set SHELVES" in error


@pytest.mark.full
def test_a_run_in_a_store_of_ones_own_is_killed_and_goes_on_bit_for_bit(tiny, tmp_path):
    six = ("--training.steps", "6", "--checkpoint.every", "2", "--run.sample_tokens", "0")
    ran(*tiny, *six, "--run.dir", "here")
    killed = subprocess.run([sys.executable, "-m", "tests.shelf", "/checkpoints/4", *tiny, *six, "--run.dir", THERE],
                            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert contents.steps(THERE) == [2] and len(buckets.children(addresses.parse(f"{THERE}/checkpoints"))[1]) == 2
    shutil.rmtree(copies.home())        # another machine
    done = ran(*tiny, *six, "--run.dir", THERE)
    assert "resuming after step 2" in done.out and contents.steps(THERE) == [4, 6]
    there = rows(mirror.directory(THERE))
    assert [(row["step"], row["loss"]) for row in there] == [(row["step"], row["loss"]) for row in rows(tmp_path / "here")]
    assert soak.state(THERE) == soak.state("here")


@pytest.mark.full
def test_a_run_whose_own_store_refuses_or_damages_a_checkpoint_uses_the_one_before(tiny, monkeypatch):
    words = (*tiny, "--checkpoint.every", "2", "--run.sample_tokens", "0", "--checkpoint.keep", "9", "--run.dir", THERE)
    monkeypatch.setattr(shelf.Shelf, "refused", "/checkpoints/4")
    done = ran(*words, "--training.steps", "6")
    assert "step 4 not saved" in done.err and contents.steps(THERE) == [2, 6]
    damage(6)
    monkeypatch.setattr(shelf.Shelf, "refused", "\0")
    again = ran(*words, "--training.steps", "8")
    assert "kept as 6.damaged" in again.err and "resuming after step 2" in again.out
    assert contents.steps(THERE) == [2, 4, 6, 8]
    monkeypatch.setattr(shelf.Shelf, "refused", "/checkpoints/")
    stopped = call(train.main, *words, "--training.steps", "14")
    assert stopped.code == 1 and "3 saves in a row have failed" in stopped.err
    assert resume.checkpoints_of(THERE).newest().step == 8
