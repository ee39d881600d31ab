"""What is written to buckets: the mirror of a directory, and the lease that is a run's lock."""
import contextlib
import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="buckets need pip install -e '.[storage]'")
pytest.importorskip("moto", reason="the S3 server on loopback needs pip install -e '.[ci]'")

from stores import BUCKET, Fault, server, surroundings  # noqa: E402, F401

from meshtrain import files  # noqa: E402
from meshtrain.run.rundir import LostClaimError  # noqa: E402
from meshtrain.storage import addresses, buckets, mirror, retries# noqa: E402
from meshtrain.storage.addresses import Address  # noqa: E402


# ---- the mirror ------------------------------------------------------------------------------------------------------


def sent(target: Address) -> dict[str, bytes]:
    found = {one.address.path.removeprefix(f"{target.path}/"): buckets.read_versioned(one.address)
             for one in buckets.list_files(target)}
    return {name: one[0] for name, one in found.items() if one}


def test_a_directory_is_in_the_bucket_as_it_changes_and_comes_back(tmp_path, server, monkeypatch):
    target, here, there = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/run"), tmp_path / "here", tmp_path / "there"
    (here / "sub").mkdir(parents=True)
    told, wanted = [], lambda name: not name.startswith("own")
    monkeypatch.setattr(mirror, "EVERY_S", 0.05)
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,))
    with mirror.Mirror(here, target, wanted, needed=("marks",), tell=told.append, check_claim=lambda: None) as sender:
        for name, text in (("a.jsonl", "1\n"), ("sub/b", "x"), ("marks", "m"), ("own", "0"), ("c.tmp", "half")):
            (here / name).write_text(text)
        sender.send()
        assert sent(target) == {"a.jsonl": b"1\n", "marks": b"m", "sub/b": b"x"}
        assert [line for line in server.asked("PUT") if tmp_path.name in line][0].endswith("/marks")
        with open(here / "a.jsonl", "a") as file:
            file.write("2\n")
        mirror.remove(here / "sub" / "b")
        _until(lambda: sent(target) == {"a.jsonl": b"1\n2\n", "marks": b"m"})
        server.faults += [Fault("/d", 10**6, 503)]
        (here / "d").write_text("late")
        _until(lambda: told)
        assert f"d of {here} cannot be copied to {target}: " in told[0] and "503" in told[0]
        server.faults.clear()
        _until(lambda: "d" in sent(target))
    assert len(told) == 1
    (there / "sub").mkdir(parents=True)
    for name in ("sub/old", "own", "a.jsonl"):
        (there / name).write_text("of another start")
    mirror.fetch(target, there, wanted)
    assert {path.relative_to(there).as_posix(): path.read_bytes() for path in there.rglob("*") if path.is_file()} == {
        "a.jsonl": b"1\n2\n", "marks": b"m", "d": b"late", "own": b"of another start"}

def test_a_large_file_that_grows_is_sent_less_often(tmp_path, monkeypatch):
    target = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/run")
    monkeypatch.setattr(mirror, "SLOWEST_BYTES_S", 1.0)
    with mirror.Mirror(tmp_path, target, lambda name: True, needed=("",), tell=print,
                       check_claim=lambda: None) as sender:
        (tmp_path / "rows").write_text("0123456789")
        sender._send(all_of_them=False)
        (tmp_path / "rows").write_text("0123456789+")
        sender._send(all_of_them=False)
        assert sent(target)["rows"] == b"0123456789"
        sender.send()
        assert sent(target)["rows"] == b"0123456789+"


@pytest.fixture
def mirrored(tmp_path, monkeypatch):
    """A function: begins a mirror of a directory with four files; what it tells is in `told`."""
    monkeypatch.setattr(mirror, "EVERY_S", 0.02)
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,))
    here, target = tmp_path / "here", addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/run")
    (here / "sub").mkdir(parents=True)

    def begin(check_claim=lambda: None):
        sender = mirror.Mirror(here, target, lambda name: True, needed=("marks", "rows"), tell=begin.told.append,
                               check_claim=check_claim)
        for name in ("marks", "rows", "other", "sub/events"):
            (here / name).write_text(name)
        sender.send()
        return sender
    begin.here, begin.target, begin.told = here, target, []
    return begin


FOUR = {"marks": b"marks", "rows": b"rows", "other": b"other", "sub/events": b"sub/events"}


@pytest.mark.parametrize(("loss", "needed"), [
    (lambda here: (here / "rows").unlink(), True), (lambda here: shutil.rmtree(here / "sub"), False),
    (shutil.rmtree, True), (lambda here: here.rename(here.with_name("elsewhere")), True),
    (lambda here: [path.unlink() for path in here.rglob("*") if path.is_file()], True)],
    ids=["a file", "a folder", "the directory", "renamed", "all files"])
def test_what_somebody_removes_from_the_directory_stays_in_the_bucket_and_is_told_once(loss, needed, mirrored):
    with pytest.raises(files.FileSystemError, match="does not have the end of") if needed else contextlib.nullcontext():
        with mirrored() as sender:
            loss(mirrored.here)
            _until(lambda: mirrored.told)
            for _ in range(3):
                sender.send()       # a checkpoint is saved without it
            mirrored.here.mkdir(exist_ok=True)
            if needed:
                (mirrored.here / "rows").write_text("half of it")
            sender.send()
    assert sent(mirrored.target) == FOUR and str(mirrored.here) in mirrored.told[0]
    # A file that is removed while others are sent has a line of its own.
    assert len(set(mirrored.told)) == len(mirrored.told) <= len(FOUR) + 1


@pytest.mark.parametrize("where", ["", "sub"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_directory_that_cannot_be_read_is_told_and_takes_nothing_from_the_bucket(where, code, mirrored, monkeypatch):
    real, refused = os.scandir, []

    def scandir(path):
        if refused and os.fspath(path) == os.path.join(mirrored.here, where).rstrip("/"):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path)
    monkeypatch.setattr(os, "scandir", scandir)
    with mirrored() as sender:
        refused.append(True)
        (mirrored.here / "rows").write_text("more")
        _until(lambda: mirrored.told)
        sender.send()
        assert sent(mirrored.target) == FOUR | ({"rows": b"more"} if where else {})
        refused.clear()
        sender.send()
    assert sent(mirrored.target) == FOUR | {"rows": b"more"}
    assert [os.strerror(code) in line for line in mirrored.told] == [True], mirrored.told


def refuse_to_read(path: Path, monkeypatch) -> None:
    """As a file of another user."""
    real = Path.read_bytes

    def read_bytes(self):
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(self)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)


@pytest.mark.parametrize("name", ["other", "new\nline", "\udcff", "sub/escape\x1b[m", "pipe", "dangling"])
def test_a_file_that_cannot_be_sent_is_told_by_name_and_holds_up_no_checkpoint(name, mirrored, monkeypatch):
    with mirrored() as sender:
        refuse_to_read(mirrored.here / "other", monkeypatch)        # before it changes: the mirror sends beside the test
        if name == "pipe":
            os.mkfifo(mirrored.here / name)
        elif name == "dangling":
            (mirrored.here / name).symlink_to("nowhere")
        else:
            (mirrored.here / name).write_text("new")
        (mirrored.here / "rows").write_text("more")
        for _ in range(2):
            sender.send()
    assert sent(mirrored.target) == FOUR | {"rows": b"more"}
    assert len(mirrored.told) == (name not in ("pipe", "dangling")), mirrored.told
    assert all(repr(name)[1:-1] in line for line in mirrored.told)


def test_a_checkpoint_waits_for_the_mark_and_the_rows(mirrored, server, monkeypatch):
    with mirrored() as sender:
        with monkeypatch.context() as patched:
            refuse_to_read(mirrored.here / "rows", patched)
            (mirrored.here / "rows").write_text("more")
            with pytest.raises(PermissionError):
                sender.send()
        for fault, error in ((403, addresses.StorageError), (503, files.FileSystemError)):
            server.faults += [Fault("/run/", 10**6, fault)]
            (mirrored.here / "rows").write_text(f"more {fault}")
            with pytest.raises(error, match=str(fault)):
                sender.send()
            server.faults.clear()


def test_what_the_bucket_refuses_at_the_end_is_an_error(mirrored, server):
    with pytest.raises(files.FileSystemError, match="does not have the end of other: .*403"):
        with mirrored():
            server.faults += [Fault("/run/other", 10**6, 403)]
            (mirrored.here / "other").write_text("the end")
    server.faults.clear()
    with pytest.raises(KeyError, match="first"):        # it hides no other error
        with mirrored():
            server.faults += [Fault("/run/other", 10**6, 403)]
            (mirrored.here / "other").write_text("another end")
            raise KeyError("first")


def refused_at_the_end(mirrored, server) -> None:
    """The bucket does not get more rows, nor a new file."""
    with pytest.raises(files.FileSystemError, match="the next start on this host sends them"):
        with mirrored():
            server.faults += [Fault("/run/", 10**6, 403)]
            (mirrored.here / "rows").write_text("rows and more")
            (mirrored.here / "sub/new").write_text("new")
    server.faults.clear()


def fetch(mirrored) -> dict[str, bytes]:
    mirror.fetch(mirrored.target, mirrored.here, lambda name: True, needed=("marks", "rows"))
    return {path.relative_to(mirrored.here).as_posix(): path.read_bytes() for path in mirrored.here.rglob("*")
            if path.is_file()}


UNSENT = FOUR | {"rows": b"rows and more", "sub/new": b"new"}


def test_what_the_bucket_refused_is_kept_and_sent_by_the_next_start(mirrored, server, monkeypatch):
    told = []
    monkeypatch.setattr(files.notices, "write", told.append)
    refused_at_the_end(mirrored, server)
    assert fetch(mirrored) == UNSENT and sent(mirrored.target) == FOUR
    assert told == [f"{mirrored.target} lacks the end of rows, sub/new, which this host has kept and now sends"]
    server.log.clear()
    with mirror.Mirror(mirrored.here, mirrored.target, lambda name: True, needed=("marks",), tell=told.append,
                       check_claim=lambda: None) as sender:
        sender.send()
        assert sent(mirrored.target) == UNSENT and len(server.asked("PUT")) == 2
    assert fetch(mirrored) == UNSENT and len(told) == 1


@pytest.mark.parametrize("name", ["rows", "marks", "sub/events"])
def test_nothing_that_another_host_wrote_is_replaced_by_what_this_host_did_not_send(name, mirrored, server):
    refused_at_the_end(mirrored, server)
    buckets.write(mirrored.target.below(name), b"of another host")
    assert fetch(mirrored) == sent(mirrored.target) == FOUR | {name: b"of another host"}


def test_of_a_run_that_somebody_removed_from_the_bucket_nothing_is_kept(mirrored, server):
    refused_at_the_end(mirrored, server)
    buckets.remove([mirrored.target.below(name) for name in FOUR])
    assert fetch(mirrored) == {}


def test_without_knowledge_of_what_was_sent_the_bucket_is_right(mirrored, server):
    refused_at_the_end(mirrored, server)
    mirrored.here.with_name("here.sent").unlink()
    assert fetch(mirrored) == FOUR


def test_what_came_back_after_the_cache_was_emptied_is_not_sent(mirrored):
    """It is not whole."""
    with pytest.raises(files.FileSystemError, match="does not have the end of"):
        with mirrored() as sender:
            (mirrored.here / "rows").unlink()
            sender.send()
            (mirrored.here / "rows").write_text("half of it")
    assert fetch(mirrored) == FOUR


@pytest.mark.parametrize("unlisted", [{"rows"}, {"marks"}, {"rows", "marks", "sub/events"}])
@pytest.mark.parametrize("here", [True, False])
def test_a_list_that_lacks_a_file_removes_nothing(unlisted, here, mirrored, server, monkeypatch):
    """And what no start can make again is fetched all the same."""
    refused_at_the_end(mirrored, server)
    real = buckets.list_files
    monkeypatch.setattr(buckets, "list_files", lambda folder: [
        one for one in real(folder) if one.address.path.removeprefix(f"{mirrored.target.path}/") not in unlisted])
    if here:
        assert fetch(mirrored) == UNSENT
    else:
        shutil.rmtree(mirrored.here)
        assert fetch(mirrored) == {name: text for name, text in FOUR.items() if name != "sub/events" or name not in unlisted}


class Panic(BaseException):
    """As pyo3 raises it."""


def test_a_panic_of_the_library_is_a_failure_that_is_told(mirrored, quick, monkeypatch, tmp_path):
    real, panics = buckets.write, []

    def write(address, content):
        if panics:
            raise Panic("called `Option::unwrap()` on a `None` value")
        return real(address, content)
    monkeypatch.setattr(buckets, "write", write)
    with mirrored() as sender:
        panics.append(True)
        (mirrored.here / "other").write_text("more")
        _until(lambda: mirrored.told)
        panics.clear()
        _until(lambda: sent(mirrored.target)["other"] == b"more")
        assert sender._thread.is_alive() and "unwrap" in mirrored.told[0]
    told, renew = [], mirror.Lease._renew
    lease = mirror.Lease(addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/.lock"), tell=told.append)
    lease.take("one", lambda text: False)
    monkeypatch.setattr(mirror.Lease, "_renew", lambda self: write("", b""))
    panics.append(True)
    _until(lambda: told)
    monkeypatch.setattr(mirror.Lease, "_renew", renew)
    before = buckets.read(lease.address)
    _until(lambda: buckets.read(lease.address) != before)
    lease.leave()
    assert len(told) == 1 and "unwrap" in told[0] and "another start may take it over" in told[0]


def test_who_lost_the_place_sends_nothing_and_promises_nothing(mirrored):
    lost = []

    def check_claim():
        if lost:
            raise LostClaimError("run.dir was taken over by another start")
    with mirrored(check_claim) as sender:
        lost.append(True)
        (mirrored.here / "rows").write_text("more")
        sender._thread.join(10)
        with pytest.raises(LostClaimError):
            sender.send()
        (mirrored.here / "rows").write_text("rows")
        sender._sent["rows"] = "", sender._find({})["rows"]
    assert sent(mirrored.target) == FOUR and mirrored.told == []


def _until(true) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


# ---- the lease -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(mirror, "BEAT_S", 0.05)
    monkeypatch.setattr(mirror, "LEASE_S", 0.5)


def test_a_lease_has_one_owner_until_it_gives_no_sign(tmp_path, quick, server):
    place = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/.lock")
    one, two, three = (mirror.Lease(place) for _ in range(3))
    nobody_is = lambda text: False
    one.take("one", nobody_is)
    for _ in range(20):     # longer than a lease
        with pytest.raises(mirror.LeaseHeld) as held:
            two.take("two", nobody_is)
        assert held.value.text == "one"
        time.sleep(0.05)
    one._done.set()         # it stands still, or its host is lost
    one._thread.join()
    _until(lambda: _taken(two, "two"))
    assert mirror.text_of(buckets.read(place)) == "two"
    two.leave()
    three.take("three", nobody_is)      # at once
    four = mirror.Lease(place)
    four.take("four", lambda text: text == "three")     # a process of the same host, which is seen to be gone
    _until(lambda: not three._thread.is_alive())        # its next sign is refused
    assert mirror.text_of(buckets.read(place)) == "four"
    four.leave(remove=True)
    assert buckets.read_versioned(place) is None


def test_a_lease_outlives_requests_that_stall_and_an_object_that_is_removed(tmp_path, quick, monkeypatch):
    place, lost = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/.lock"), []
    one, two = mirror.Lease(place, lost=lost.append), mirror.Lease(place)
    one.take("one", lambda text: False)
    real, stalls = buckets.write_if, [1.5, 1.0]      # LEASE_S is 0.5

    def write_if(*args):
        if stalls and threading.current_thread() is not threading.main_thread():
            time.sleep(stalls.pop())
        return real(*args)
    monkeypatch.setattr(buckets, "write_if", write_if)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        with pytest.raises(mirror.LeaseHeld):
            two.take("two", lambda text: False)
        time.sleep(0.05)
    buckets.remove([place])
    _until(lambda: buckets.read_versioned(place) is not None)
    assert mirror.text_of(buckets.read(place)) == "one" and lost == []
    one.leave()
    assert buckets.read(place) == b"" and not one._thread.is_alive()


def test_who_loses_its_lease_is_told_who_has_it(tmp_path, quick):
    place, lost = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/.lock"), []
    one, two = mirror.Lease(place, lost=lost.append), mirror.Lease(place)
    one.take("one", lambda text: False)
    _until(lambda: _taken(two, "two", is_dead=True))
    _until(lambda: lost)
    time.sleep(0.2)
    one.leave()
    assert lost == ["two"] and mirror.text_of(buckets.read(place)) == "two"
    two.leave()


def _taken(lease: mirror.Lease, text: str, is_dead: bool = False) -> bool:
    try:
        lease.take(text, lambda text: is_dead)
        return True
    except mirror.LeaseHeld:
        return False


def test_of_many_that_come_at_once_one_has_the_lease(tmp_path, quick):
    place, had = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/.lock"), {}
    leases = [mirror.Lease(place) for _ in range(8)]
    take = lambda lease: had.__setitem__(lease, _taken(lease, str(id(lease))))
    threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owner, = (lease for lease in leases if had[lease])
    assert mirror.text_of(buckets.read(place)) == str(id(owner))
    owner.leave()


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_an_answer_that_is_lost_does_not_lose_the_lease(scheme, tmp_path, server):
    """The server has written it, and the connection breaks before it says so. What another has written is its own, also
    where it is the same."""
    place = addresses.parse(f"{scheme}://{BUCKET}/{tmp_path.name}/{scheme}")
    server.faults += [Fault(place.path, 1)]
    made = buckets.write_if(place, b"one", None)
    assert made is not None and buckets.read(place) == b"one"
    server.faults += [Fault(place.path, 1)]
    assert buckets.write_if(place, json.dumps({"pid": os.getpid()}).encode(), made) is not None
    assert buckets.write_if(place, b"stale", made) is None and buckets.write_if(place, b"new", None) is None
    content, version = buckets.read_versioned(place)
    assert buckets.write_if(place, content, made) is None and buckets.write_if(place, content, None) is None
    assert buckets.read_versioned(place) == (content, version)
