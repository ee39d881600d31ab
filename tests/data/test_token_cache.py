"""The token cache is whole, fresh or built again."""

import builtins
import errno
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from corpora import TEXTS, Opened, bpe, fault, section, write, write_tokenizer  # noqa: F401 (bpe is a fixture)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtrain import files
from meshtrain.data import progress, sources
from meshtrain.data.cache import parts, token_cache
from meshtrain.data.documents import formats
from meshtrain.data.files import token_files

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def counted(monkeypatch):
    """The files that are tokenized from now on."""
    read, names = formats.read, []

    def count(format, path, field):
        names.append(Path(path).name)
        return read(format, path, field)

    monkeypatch.setattr(formats, "read", count)
    return names


def cache_file(root: Path, pattern: str) -> Path:
    (path,) = root.glob(f".meshtrain/*/{pattern}")
    return path


def test_files_are_tokenized_once_and_again_only_where_their_content_changed(tmp_path, counted):
    a, b = write(tmp_path / "a.jsonl", ["one", "two"]), write(tmp_path / "b.jsonl", ["three"])
    data = section([tmp_path / "*.jsonl"])
    assert Opened(data, tmp_path).texts() == Opened(data, tmp_path).texts() == ["one", "two", "three"]
    assert counted == ["a.jsonl", "b.jsonl"]

    os.utime(a, ns=(5, 5))  # touched
    assert Opened(data, tmp_path).told == [] and counted == ["a.jsonl", "b.jsonl"]
    assert json.loads(cache_file(tmp_path, "a.jsonl-*.json").read_text())["inputs"][0]["mtime_ns"] == 5

    write(b, ["seven"])  # of one length: only the content tells
    write(tmp_path / "c.jsonl", ["new"])
    opened = Opened(data, tmp_path)
    assert opened.texts() == ["one", "two", "seven", "new"]
    assert counted[2:] == ["b.jsonl", "c.jsonl"]
    assert len(opened.told) == 1 and "b.jsonl: the file has changed" in opened.told[0]


def test_a_long_file_that_changes_at_its_end_is_tokenized_again(tmp_path, counted):
    path = write(tmp_path / "a.jsonl", ["x" * (1 << 22), "old"])
    data = section([path])
    Opened(data, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"old", b"new"))
    assert Opened(data, tmp_path).texts()[1] == "new" and counted == ["a.jsonl"] * 2


def test_a_file_that_is_written_while_it_is_tokenized_is_told(tmp_path, monkeypatch):
    path, read = write(tmp_path / "a.jsonl", ["one", "two"]), formats.read

    def written(format, name, field):
        yield from read(format, name, field)
        path.write_bytes(path.read_bytes().replace(b"two", b"six"))

    monkeypatch.setattr(formats, "read", written)
    assert "a.jsonl changed while it was tokenized; start again" in fault(section([path]), tmp_path)
    assert not list(tmp_path.glob(".meshtrain/*/*.npy*"))


def test_tokens_are_on_the_disk_before_they_have_their_name_and_the_note_comes_last(tmp_path, monkeypatch):
    done, sync, rename, replace = [], os.fsync, os.replace, files.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)), sync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(("name", Path(old).name)), rename(old, new)))
    monkeypatch.setattr(files, "replace", lambda path, *args, **options: (
        done.append(("note", path.name)), replace(path, *args, **options)))
    Opened(section([write(tmp_path / "a.jsonl", TEXTS)]), tmp_path)
    arrays = [name for what, name in done if what == "name" and name.endswith(".npy.tmp")]
    steps = [entry for entry in done if entry[1] in arrays or entry[0] == "note"]
    assert len(arrays) == 2 and steps[:-1] == [(what, name) for what in ("sync", "name") for name in arrays]
    assert steps[-1][0] == "note"


def test_documents_of_several_batches_end_where_they_end(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_PIECES", 2)
    monkeypatch.setattr(token_files, "CHUNK_BYTES", 16)
    texts = [*TEXTS, "a", "the cat"]
    data = section([write(tmp_path / "a.jsonl", texts)], tokenizer=bpe)
    assert Opened(data, tmp_path).texts() == texts
    again = Opened(data, tmp_path, verify=True)
    assert again.texts() == texts and not again.built


def test_another_field_or_tokenizer_has_a_cache_of_its_own(tmp_path, counted, bpe):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "two"}\n')
    other = write_tokenizer(tmp_path / "other.json", corpus=["two two"])
    keys = [{}, {"field": "body"}, {"tokenizer": bpe}, {"tokenizer": other}]
    for _ in range(2):
        assert [Opened(section([path], **key), tmp_path).texts() for key in keys] == [
            ["one"], ["two"], ["one"], ["one"]]
    assert len(counted) == 4
    moved = shutil.copy(bpe, tmp_path / "same.json")  # a tokenizer is its content
    Opened(section([path], tokenizer=str(moved)), tmp_path)
    assert len(counted) == 4


def test_a_corpus_that_was_moved_keeps_its_cache(tmp_path, counted):
    (tmp_path / "old").mkdir()
    write(tmp_path / "old" / "a.jsonl", TEXTS)
    Opened(section([tmp_path / "old" / "a.jsonl"]), tmp_path)
    (tmp_path / "old").rename(tmp_path / "new")
    assert Opened(section([tmp_path / "new" / "a.jsonl"]), tmp_path).texts() == TEXTS
    assert counted == ["a.jsonl"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(which=st.sampled_from(["*.tokens.npy", "*.ends.npy", "*[0-9a-f].json"]), where=st.floats(0, 1, exclude_max=True),
       bit=st.integers(0, 7), truncate=st.booleans())
def test_a_damaged_cache_is_built_again_at_a_start_where_its_size_tells_and_by_verify_always(
        which, where, bit, truncate, tmp_path_factory):
    root = tmp_path_factory.mktemp("damage")
    data = section([write(root / "a.jsonl", TEXTS)])
    Opened(data, root)
    path = cache_file(root, which)
    stat, content = path.stat(), bytearray(path.read_bytes())
    place = int(where * len(content))
    if truncate:
        del content[place:]
    else:
        content[place] ^= 1 << bit
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a failing disk leaves it
    manifest = which.endswith("json")
    silent = not truncate and place >= 128 and not manifest
    opened = Opened(data, root, verify=silent)
    assert opened.texts() == TEXTS
    if silent or truncate:
        assert any("tokenizing again" in line for line in opened.told)
    assert Opened(data, root).told == []
    assert Opened(data, root, verify=True).texts() == TEXTS


def test_a_cache_that_is_whole_is_opened_without_reading_it_and_without_a_lock(tmp_path, monkeypatch):
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    Opened(data, tmp_path)
    cache_file(tmp_path, ".lock").unlink()
    with monkeypatch.context() as unread:
        unread.setattr(token_files, "checksum", None)
        unread.setattr(token_files.Numbers, "map", lambda self, real=token_files.Numbers.map: (
            real(self) if self.path.endswith(token_files.ENDS) else None))
        assert Opened(data, tmp_path).told == []
    assert not list(tmp_path.glob(".meshtrain/*/.lock"))


def test_a_cache_that_was_copied_is_read_once_and_then_believed(tmp_path, counted, monkeypatch):
    write(tmp_path / "a.jsonl", TEXTS)
    Opened(section([tmp_path / "a.jsonl"]), tmp_path)
    read = []
    monkeypatch.setattr(token_files, "checksum", lambda *args, real=token_files.checksum: read.append(1) or real(*args))
    shutil.copytree(tmp_path, tmp_path / "copy")  # keeps times of change, not inodes
    for _ in range(2):
        assert Opened(section([tmp_path / "copy" / "a.jsonl"]), tmp_path).texts() == TEXTS
    assert (len(read), counted) == (2, ["a.jsonl"])  # tokens and ends


@pytest.mark.parametrize("pattern", ["a.jsonl-*.json", "a.jsonl-*.tokens.npy"])
def test_a_cache_that_the_file_system_refuses_to_show_is_not_built_again(pattern, tmp_path, counted, monkeypatch):
    """As NFS after a failover: ESTALE at every stat and open, then for a moment; tokenizing again could take hours."""
    monkeypatch.setattr(files, "PAUSES_S", (0.001,))
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    data = section([path])
    Opened(data, tmp_path)
    refused, refusals = cache_file(tmp_path, pattern), [10**6]
    for owner, name in ((io, "open"), (builtins, "open"), (os, "stat"), (os, "open")):
        def stale(file, *args, real=getattr(owner, name), **options):
            if not isinstance(file, int) and os.fspath(file) == str(refused) and refusals[0]:
                refusals[0] -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(file, *args, **options)
        monkeypatch.setattr(owner, name, stale)
    with pytest.raises(files.FileSystemError, match="cannot be read"):
        Opened(data, tmp_path)
    refusals[0] = 1     # of the two tries
    opened = Opened(data, tmp_path)
    assert opened.texts() == ["one", "two"] and opened.told == [] and counted == ["a.jsonl"] and refusals == [0]


def test_a_missing_file_of_a_part_is_built_again(tmp_path):
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    for pattern in ("*.tokens.npy", "*.ends.npy", "*.json"):
        Opened(data, tmp_path)
        cache_file(tmp_path, pattern).unlink()
        assert Opened(data, tmp_path).texts() == TEXTS


def test_a_directory_that_cannot_be_written_is_told_once_and_the_run_directory_used(tmp_path, counted):
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    (tmp_path / ".meshtrain").write_text("a file, so nobody can make the directory, not even root")
    opened = Opened(data, tmp_path / "run" / "cache")
    assert opened.texts() == TEXTS
    assert len(opened.told) == 1 and "cannot be written" in opened.told[0] and "run/cache" in opened.told[0]
    assert Opened(data, tmp_path / "run" / "cache").texts() == TEXTS and counted == ["a.jsonl"]
    (tmp_path / "run2").write_text("")
    assert "set data.cache" in fault(data, tmp_path / "run2" / "cache")
    named = section([tmp_path / "a.jsonl"], cache=str(tmp_path / "named"))
    assert Opened(named, tmp_path / "run2" / "cache").told == []
    assert list((tmp_path / "named").glob("*/*.tokens.npy"))


CHILD = """
import json, sys, time
from pathlib import Path
from meshtrain import config
from meshtrain.data import sources
from meshtrain.data.batches import order
from meshtrain.data.documents import tokenizer
root, stop_at = Path(sys.argv[1]), sys.argv[2]
encode = tokenizer.Bytes.encode
def wait(self, texts):
    while stop_at in texts and not (root / "go").exists():
        time.sleep(0.01)
    return encode(self, texts)
tokenizer.Bytes.encode = wait
corpus = sources.open_corpus(config.Data(source="jsonl", paths=[f"{root}/*.jsonl"]), vocab_size=512, cache_dir=root / "cache")
source = corpus.sources[0]
print(json.dumps([corpus.tokenizer.decode(source.read(d, 0, int(n))) for d, n in enumerate(order.lengths(source))]))
"""


def start_child(root: Path, stop_at: str) -> subprocess.Popen:
    """A process that opens the corpus, and comes to the document `stop_at` only once the file `go` is there."""
    return subprocess.Popen([sys.executable, "-u", "-c", CHILD, str(root), stop_at], stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_after_kill_9_finished_files_are_kept_and_the_half_written_one_is_done_again(tmp_path, counted):
    for i in range(4):
        write(tmp_path / f"{i}.jsonl", [f"text {i}"])
    child = start_child(tmp_path, stop_at="text 2")
    wait_until(lambda: list(tmp_path.glob(".meshtrain/*/2.jsonl-*.tokens.npy.tmp")))
    child.kill()
    child.communicate()
    assert Opened(section([tmp_path / "*.jsonl"]), tmp_path).texts() == [f"text {i}" for i in range(4)]
    assert counted == ["2.jsonl", "3.jsonl"]
    assert not list(tmp_path.glob(".meshtrain/*/*.tmp"))


def test_two_runs_that_fill_one_cache_divide_the_work_and_wait_for_each_other(tmp_path):
    for i in range(3):
        write(tmp_path / f"{i}.jsonl", [f"text {i}"])
    first = start_child(tmp_path, stop_at="text 1")
    wait_until(lambda: list(tmp_path.glob(".meshtrain/*/1.jsonl-*.tmp")))
    second = start_child(tmp_path, stop_at="")
    said = [second.stdout.readline() for _ in range(2)]
    assert "tokenizing 2 files" in said[0] and "in use by another process; waiting" in said[1]
    made = {path.name[0]: path.stat() for path in tmp_path.glob(".meshtrain/*/*.tokens.npy")}
    assert set(made) == {"0", "2"}  # 2 by the second, while the first had 1
    (tmp_path / "go").touch()
    outputs = [child.communicate(timeout=60)[0].splitlines() for child in (first, second)]
    assert [json.loads(lines[-1]) for lines in outputs] == [[f"text {i}" for i in range(3)]] * 2
    assert all(path.stat() == made[path.name[0]] for path in tmp_path.glob(".meshtrain/*/[02]*.tokens.npy"))


HOLDER = """
import contextlib, sys, time
from pathlib import Path
from meshtrain.data.cache import parts
parts.BEAT_SECONDS = 0
part = parts.Part()
part.home, part.inputs = Path(sys.argv[1]), [sys.argv[2]]
with contextlib.ExitStack() as stack, parts._Locks(stack).hold(part), parts._heartbeat(part, parts.Job()) as job:
    job.check_stop()
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_process_that_gives_no_sign_of_life_is_waited_for_a_while_and_named(tmp_path, monkeypatch):
    path, other = write(tmp_path / "a.jsonl", ["one"]), write(tmp_path / "b.jsonl", ["two"])
    Opened(section([other]), tmp_path)      # makes the directory
    home, = (tmp_path / ".meshtrain").iterdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, home, path], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(files, "LOCK_WAIT_S", 0.5)
        monkeypatch.setattr(parts, "POLL_SECONDS", 0.05)
        owner, told = f"process {holder.pid} on {socket.gethostname()}", []
        with pytest.raises(files.FileSystemError,
                           match=f"token cache: a.jsonl-.* in use by {owner}, which did not release it within 0.5 s; "
                                 f"check whether") as caught:
            sources.open_corpus(section([path]), vocab_size=512, cache_dir=tmp_path, tell=told.append)
        assert "\n" not in str(caught.value) and any(f"in use by {owner}; waiting" in line for line in told)
        monkeypatch.setattr(files, "LOCK_WAIT_S", 60)
        threading.Timer(0.3, holder.communicate).start()       # it ends
        assert Opened(section([path]), tmp_path).texts() == ["one"]
    finally:
        holder.kill()
    assert not list(tmp_path.rglob("*.owner"))


def test_a_long_work_gives_signs_of_life(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(parts, "BEAT_SECONDS", 0)
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    stop = lambda: bool(seen.extend(path.read_text() for path in tmp_path.rglob("*.owner")))
    described = sources.describe(data, vocab_size=512)
    described.open(tmp_path, parts.Job(lambda line: None, stop))
    assert set(seen) == {f"process {os.getpid()} on {socket.gethostname()}"} and not list(tmp_path.rglob("*.owner"))


def run_out_of_room(root: str, queue) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails as on a full disk does
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    try:
        Opened(section([Path(root) / "*.jsonl"]), Path(root))
    except OSError as error:
        queue.put(str(error))
    else:
        queue.put("no error")


def test_a_full_disk_is_told_keeps_what_is_finished_and_leaves_nothing_half(tmp_path, counted):
    texts = [["small"], ["x" * 200_000]]
    for i, some in enumerate(texts):
        write(tmp_path / f"{i}.jsonl", some)
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=run_out_of_room, args=(str(tmp_path), queue))
    child.start()
    message = queue.get(timeout=60)
    child.join()
    assert "cannot be written; finished parts are kept: File too large; check the file system (free space" in message
    assert [path.name[0] for path in tmp_path.glob(".meshtrain/*/*.npy*")] == ["0", "0"]
    assert Opened(section([tmp_path / "*.jsonl"]), tmp_path).texts() == [some[0] for some in texts]
    assert counted == ["1.jsonl"]


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "TELL_SECONDS", 0)
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    opened = Opened(data, tmp_path)
    assert re.fullmatch(rf"token cache: tokenizing 1 file, 0.0 MB, into {tmp_path}/.meshtrain/jsonl-\w+", *opened.built)
    assert any(re.fullmatch(r"tokenizing 1 file: 100%, [\d.]+ MB/s, 0:00 left", line) for line in opened.told)
    assert Opened(data, tmp_path).built == []


def test_many_small_texts_share_parts_of_the_cache_and_stay_documents(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(token_cache, "TEXT_PART_BYTES", 60)
    paths = [write(tmp_path / f"{i:02}.txt", [f"text number {i}"]) for i in range(40)]
    opened = Opened(section(paths, tokenizer=bpe), tmp_path)
    assert opened.texts() == [f"text number {i}" for i in range(40)]
    assert 2 < len(list(tmp_path.glob(".meshtrain/*/*.tokens.npy"))) < 30
    paths[7].write_text("another text")
    again = Opened(section(paths, tokenizer=bpe), tmp_path)
    assert again.texts()[6:9] == ["text number 6", "another text", "text number 8"]
    assert len(again.told) == 1 and "has changed" in again.told[0]  # one part, not all


@pytest.mark.parametrize("name", ["000.txt", "050x.txt", "zzz.txt"])
def test_one_small_text_more_is_tokenized_alone(name, tmp_path, bpe, counted, monkeypatch):
    monkeypatch.setattr(token_cache, "TEXT_PART_BYTES", 300)
    for i in range(1, 102):
        write(tmp_path / f"{i:03}.txt", [f"text number {i}"])
    data = section([tmp_path / "*.txt"], tokenizer=bpe)
    Opened(data, tmp_path)
    assert len(counted) == 101
    before = set(tmp_path.glob(".meshtrain/*/*.json"))
    assert len(before) > 2
    write(tmp_path / name, ["a new one"])
    names = sorted([name, *(f"{i:03}.txt" for i in range(1, 102))])
    assert Opened(data, tmp_path).texts() == ["a new one" if one == name else f"text number {int(one[:3])}"
                                              for one in names]
    assert counted[101:] == [name]
    assert len(set(tmp_path.glob(".meshtrain/*/*.json")) - before) <= 2  # the part it falls into, which it may divide
    (tmp_path / name).unlink()
    (tmp_path / "037.txt").unlink()
    assert Opened(data, tmp_path).texts() == [f"text number {i}" for i in range(1, 102) if i != 37]
    assert counted[102:] == []


def test_tokens_are_not_taken_from_a_damaged_part(tmp_path, bpe):
    for i in range(3):
        write(tmp_path / f"{i}.txt", [f"text number {i}"])
    data = section([tmp_path / "*.txt"], tokenizer=bpe)
    Opened(data, tmp_path)
    path = cache_file(tmp_path, "*.tokens.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    write(tmp_path / "3.txt", ["new"])
    assert Opened(data, tmp_path).texts() == ["text number 0", "text number 1", "text number 2", "new"]


def test_a_file_that_sorts_first_in_another_directory_leaves_the_cache_where_it_is(tmp_path, counted):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "b.jsonl", ["two"])
    Opened(section([tmp_path / "b" / "*.jsonl"]), tmp_path)
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "a.jsonl", ["one"])
    paths = [tmp_path / "a" / "*.jsonl", tmp_path / "b" / "*.jsonl"]
    assert Opened(section(paths), tmp_path).texts() == ["one", "two"]
    assert counted == ["b.jsonl", "a.jsonl"]
    assert len(list(tmp_path.glob("*/.meshtrain/*/*.tokens.npy"))) == 2


def test_shares_of_a_job_build_every_part_once_between_them(tmp_path, counted):
    for i in range(5):
        write(tmp_path / f"{i}.jsonl", [f"text {i}"])
    described = sources.describe(section([tmp_path / "*.jsonl"]), vocab_size=512)
    opened = [described.open(tmp_path, parts.Job(lambda line: None, share=(i, 2))) for i in (1, 0)]
    assert opened[0] == (None,) and opened[1] != (None,)
    assert counted == ["1.jsonl", "3.jsonl", "0.jsonl", "2.jsonl", "4.jsonl"]


@pytest.mark.parametrize("batches", [0, 1, 2, 5])
def test_a_stop_keeps_finished_parts_and_leaves_none_half(batches, tmp_path, counted):
    for i in range(3):
        write(tmp_path / f"{i}.jsonl", [f"text {i}"])
    data = section([tmp_path / "*.jsonl"])
    monitor = iter(range(batches))
    job = parts.Job(lambda line: None, lambda: bool(list(tmp_path.glob(".meshtrain/*/*.tmp")))
                    and next(monitor, None) is None)
    with pytest.raises(parts.Stopped):
        sources.describe(data, vocab_size=512).open(tmp_path, job)
    files = {path.name for path in tmp_path.glob(".meshtrain/*/*")}
    assert not [name for name in files if name.endswith(".tmp")]
    finished = {name[0] for name in files if name.endswith(".json")}
    assert {name[0] for name in files if name.endswith(".npy")} == finished
    before = len(counted)
    assert Opened(data, tmp_path).texts() == [f"text {i}" for i in range(3)]
    assert len(counted) - before == 3 - len(finished)
