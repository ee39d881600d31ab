"""A checkpoint is believed only when its checksums hold, called damaged only when they do not, and runs no code."""

import builtins
import contextlib
import errno
import gc
import io
import json
import os
import pathlib
import pickle
import shutil
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore
import meshtrain.files
from checkpoints import abstract, files, flip, latest, make_state, mesh, names, run_processes


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory with the checkpoints 1 and 2."""
    directory = tmp_path_factory.mktemp("two")
    with checkpoint.Checkpoints(DirectoryStore(directory)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(mesh(4, 2), P("a", "b"), seed=step), {"position": step})
    return directory


@contextlib.contextmanager
def copied(two):
    """A copy of `two` for each example of a property; the arrays are small, so copying is nothing."""
    copy = two.with_name(f"copy{time.monotonic_ns()}")
    shutil.copytree(two, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def check_passed_over(directory, name, what):
    step, told = latest(directory)
    assert step == 1 and len(told) == 1
    assert told[0] == f"checkpoint {directory / '2'} is damaged ({name}{what}), kept as 2.damaged; trying the one before"
    assert names(directory) == ["1", "2.damaged"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_in_any_file_is_noticed_told_and_passed_over(two, data):
    with copied(two) as directory:
        path = directory / "2" / data.draw(st.sampled_from(
            [name for name in files(two / "2") if name != "checksums.json"]))
        flip(path, data.draw(st.integers(0, 8 * path.stat().st_size - 1)))
        check_passed_over(directory, path.relative_to(directory / "2"), ": its checksum differs")


def test_a_flipped_bit_anywhere_in_the_checksums_themselves_is_noticed(tmp_path):
    place, checksums = tmp_path / "2", tmp_path / "2" / "checksums.json"
    place.mkdir()
    for name in ("metadata.json", "manifest"):
        (place / name).write_text(name)
    checksums.write_text(json.dumps(meshtrain.files.checksums(place, [place / name for name in files(place)])))
    checkpoints, whole = checkpoint.Checkpoints(DirectoryStore(tmp_path)), checksums.read_bytes()
    assert not checkpoints.fault(2)
    for bit in range(8 * len(whole)):
        flip(checksums, bit)
        assert checkpoints.fault(2), f"bit {bit}: {checksums.read_bytes()}"
        checksums.write_bytes(whole)
    flip(checksums, 3)
    with pytest.raises(ValueError, match="only damaged"):
        latest(tmp_path)


def test_any_truncated_or_missing_file_is_noticed_told_and_passed_over(two):
    for name in files(two / "2"):
        with copied(two) as directory:
            (directory / "2" / name).unlink()
            check_passed_over(directory, name, " is missing")
        size = (two / "2" / name).stat().st_size
        if name != "checksums.json":
            with copied(two) as directory:
                os.truncate(directory / "2" / name, size - 1)
                check_passed_over(directory, name, f": {size - 1} bytes, but {size} were written")
    with copied(two) as directory:
        os.truncate(directory / "2" / "checksums.json", 100)
        assert latest(directory)[0] == 1


def test_a_file_that_is_no_part_of_it_does_not_matter(two):
    with copied(two) as directory:
        (directory / "2" / "notes.txt").write_text("keep this one")
        assert latest(directory) == (2, [])


def test_a_run_never_starts_over_checkpoints_that_are_all_damaged(two):
    with copied(two) as directory:
        for step in "12":
            flip(directory / step / "metadata.json")
        for _ in range(2):  # and the second start has not forgotten
            with pytest.raises(ValueError, match=r"only damaged ones \(1.damaged, 2.damaged\); restore .* remove"):
                latest(directory)
        shutil.copy(two / "1" / "metadata.json", directory / "1.damaged")
        (directory / "1.damaged").rename(directory / "1")
        assert latest(directory) == (1, [])


def test_a_step_that_is_damaged_twice_is_kept_twice(two):
    with copied(two) as directory:
        flip(directory / "2" / "metadata.json")
        assert latest(directory)[0] == 1
        shutil.copytree(two / "2", directory / "2")
        flip(directory / "2" / "metadata.json")
        assert latest(directory)[0] == 1
        assert names(directory) == ["1", "2.damaged", "2.damaged-2"]


def test_nothing_is_changed_in_the_directory_of_another_run(two):
    with copied(two) as directory:
        flip(directory / "2" / "metadata.json")
        (directory / ".3.saving").mkdir()
        told = []
        assert checkpoint.Checkpoints(DirectoryStore(directory), read_only=True, tell=told.append).newest().step == 1
        assert "damaged (metadata.json: its checksum differs); trying the one before" in told[0]
        assert names(directory) == [".3.saving", "1", "2"]
        flip(directory / "1" / "metadata.json")
        with pytest.raises(ValueError, match=r"only damaged ones \(1, 2\)"):
            checkpoint.Checkpoints(DirectoryStore(directory), read_only=True, tell=told.append).newest()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore's, about what is no array
def test_no_file_of_a_checkpoint_is_unpickled(two, tmp_path):
    """Each file in turn, and the names that orbax may look for, is a pickle that leaves a trace; its checksum holds."""
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace))
    pickle.loads(bomb)
    trace.unlink()  # it would have worked
    for name in [*files(two / "2"), "state/checkpoint", "state/_CHECKPOINT_METADATA", "state/checkpoint.pkl"]:
        if name == "checksums.json":
            continue
        with copied(two) as directory:
            place = directory / "2"
            (place / name).write_bytes(bomb)
            (place / "checksums.json").unlink()
            (place / "checksums.json").write_text(
                json.dumps(meshtrain.files.checksums(place, [place / n for n in files(place)])))
            checkpoints = checkpoint.Checkpoints(DirectoryStore(directory))
            assert not checkpoints.fault(2)
            for read in (checkpoints.newest,
                         lambda: checkpoints.restore(2, abstract(make_state(mesh(4, 2), P("a", "b"))))):
                with contextlib.suppress(Exception):
                    read()
            assert not trace.exists(), name
    gc.collect()  # here, where what tensorstore leaves behind is expected


# ---- files that cannot be read ---------------------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch):
    """Pauses that a test can wait for; as many as there are."""
    monkeypatch.setattr(meshtrain.files, "PAUSES_S", (0.01,) * len(meshtrain.files.PAUSES_S))


def refusing(monkeypatch, code, name, times=10**6):
    """Every open and stat of files called `name` below a checkpoint fails, the first `times` times."""
    asked = []
    for owner, call in ((builtins, "open"), (io, "open"), (os, "stat"), (os, "listdir")):
        def fails(path, *args, real=getattr(owner, call), **options):
            if isinstance(path, (str, os.PathLike)) and pathlib.Path(path).name == name and len(asked) < times:
                asked.append(path)
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *args, **options)
        monkeypatch.setattr(owner, call, fails)
    return asked


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", ["checksums.json", "metadata.json"])
def test_a_checkpoint_that_cannot_be_read_is_no_damaged_one_and_stays(two, monkeypatch, hurried, code, name):
    with copied(two) as directory:
        told = []
        checkpoints = checkpoint.Checkpoints(DirectoryStore(directory), tell=told.append)
        with monkeypatch.context() as patched:
            refusing(patched, code, name)
            with pytest.raises(checkpoint.CheckpointError,
                               match=f"2 cannot be read, .*: {name}: {os.strerror(code)}. Check that"):
                checkpoints.newest()
        assert (told, names(directory)) == ([], ["1", "2"])
        assert checkpoints.newest().step == 2


def test_a_directory_that_cannot_be_listed_holds_not_no_checkpoints(two, monkeypatch, hurried):
    with copied(two) as directory:
        checkpoints = checkpoint.Checkpoints(DirectoryStore(directory))
        refusing(monkeypatch, errno.ESTALE, directory.name)
        with pytest.raises(checkpoint.CheckpointError, match="cannot be read: Stale file handle"):
            checkpoints.newest()


def test_a_file_system_that_comes_back_within_the_tries_is_not_even_told(two, monkeypatch, hurried):
    with copied(two) as directory:
        told = []
        checkpoints = checkpoint.Checkpoints(DirectoryStore(directory), tell=told.append)
        for name in ("checksums.json", "metadata.json", directory.name):
            with monkeypatch.context() as patched:
                asked = refusing(patched, errno.ESTALE, name, times=len(meshtrain.files.PAUSES_S))
                assert checkpoints.newest().step == 2 and asked
                checkpoints.open(2)
        assert told == []


def test_arrays_that_cannot_be_read_are_no_mistake_of_the_user(two, monkeypatch):
    with copied(two) as directory:
        checkpoints = checkpoint.Checkpoints(DirectoryStore(directory))
        state = make_state(mesh(4, 2), P("a", "b"))
        def stale(*_, **__):
            raise ValueError("Error reading \"2/d/0\" [os_error_code='116'] [source locations='tensorstore/…']")
        for what in ("restore", "metadata"):    # tensorstore's errors are ValueErrors
            with monkeypatch.context() as patched:
                patched.setattr(checkpoints.store.arrays, what, stale)
                with pytest.raises(checkpoint.CheckpointError,
                                   match="2 cannot be read, and nothing was changed: Stale file"):
                    checkpoints.restore(2, abstract(state))
        assert names(directory) == ["1", "2"]


def test_what_one_of_several_processes_cannot_read_or_does_not_see_is_not_damaged(two):
    """The second process lacks a file, or cannot read it; then the first, whose word counts, misses one."""
    body = r"""
import json
import meshtrain.files
meshtrain.files.PAUSES_S = (0.01, 0.01)
real, failing = os.stat, []
def stat(path, *args, **options):
    if failing and str(path).endswith("/2/" + failing[0]):
        raise OSError(failing[1], os.strerror(failing[1]), str(path))
    return real(path, *args, **options)
os.stat = stat
checkpoints = checkpoint.Checkpoints(DirectoryStore(directory), tell=lambda text: say("told", text))
mine = sorted(json.loads(open(directory + "/2/checksums.json").read()))[index::2]
for code in (116, 2):
    failing[:] = [mine[0], code] if index == 1 else []
    try:
        say("latest", checkpoints.newest().step)
    except checkpoint.CheckpointError as error:
        say(getattr(error, "agreed", False), str(error).replace(directory, "")[:140])
failing.clear()
say("latest", checkpoints.newest().step)
failing[:] = [mine[0], 2] if index == 0 else []
say("latest", checkpoints.newest().step)
say("left", sorted(os.listdir(directory)))
"""
    with copied(two) as directory:
        inside = sorted(json.loads((directory / "2" / "checksums.json").read_text()))
        zero, one = run_processes(2, directory, body)
        host = socket.gethostname()
        stale = (f"True /2 cannot be read, and nothing was changed: process 1 ({host}): {inside[1]}: Stale file "
                 f"handle. Check that")
        unseen = (f"True /2 cannot be read, and nothing was changed: process 1 ({host}): {inside[1]}: process 0 sees "
                  f"it, this host does not. Check that")
        for said in (zero, one):
            assert said[0].startswith(stale[:130]) and said[1].startswith(unseen[:130]), said
        assert one[2:] == ["latest 2", "latest 1", "left ['1', '2.damaged']"]
        told = (f"told checkpoint {directory}/2 is damaged ({inside[0]} is missing), kept as 2.damaged; trying the one "
                f"before")
        assert zero[2:] == ["latest 2", told, *one[3:]]
