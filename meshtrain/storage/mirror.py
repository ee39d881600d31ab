"""Mirrors a bucket's directory in a local directory: files are fetched when a run begins and sent when they change.

Writers and readers of a run use only directories. For an address, the directory is `directory(address)` on this host. A
`Lease` replaces the locks of a file system. This module knows no run.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshtrain import files
from meshtrain.storage import addresses, buckets, copies
from meshtrain.storage.addresses import Address, StorageError
from meshtrain.storage.buckets import Version

EVERY_S = 5.0
SLOWEST_BYTES_S = 2e6       # a file that grows is sent at most every (size / SLOWEST_BYTES_S) seconds
AT_ONCE = 8
# of logs: bytes that are compared, bytes of a piece, attempts while the log changes
OVERLAP_BYTES, PIECE_BYTES, MOST_TRIES = 1 << 16, 1 << 24, 8
RUNS, READ = "runs", "runs-read"     # folders in the directory of copies
BEAT_S, LEASE_S = 5.0, 30.0
TEMPORARY = re.compile(r".+\.tmp|\.nfs.*")


def directory(name: str) -> Path:
    """Return the local directory of a run: the path itself, or this host's directory for an address."""
    if not addresses.is_remote(name):
        return Path(name)
    return copies.home_of(RUNS, addresses.parse(name))


def read(address: Address, wanted: Callable[[str], bool], within: str = "", logs: Sequence[str] = ()) -> Path:
    """Return the local directory of a run that this process only reads, after a fetch from the bucket. wanted, within,
    logs: as in `fetch`. Raises: StorageError, FileSystemError."""
    directory = copies.home_of(READ, address)
    fetch(address, directory, wanted, within, logs=logs)
    return directory


def fetch(source: Address, target: Path, wanted: Callable[[str], bool], within: str = "",
          needed: Sequence[str] = (), logs: Sequence[str] = ()) -> None:
    """Make files in a local directory equal to those in the bucket. wanted: name within the directory -> whether to
    fetch the file; other files stay as they are. within: the folder that has all wanted files.

    needed: as in `Mirror`, for a directory that this host may have mirrored before. If no other host has written to the
    bucket since, files that the bucket lacks stay, and the next Mirror sends them. logs: names of files that
    `_fetch_log` fetches. Raises: StorageError, FileSystemError.
    """
    listed = buckets.list_files(source.below(within) if within else source)
    there = {entry.address.path.removeprefix(f"{source.path.rstrip('/')}/"): entry for entry in listed}
    with copies.writing(target), concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        target.mkdir(parents=True, exist_ok=True)
        here = set(filter(wanted, _names(target, files.refuse)))
        # a listing may lack existing objects
        unlisted = [name for name in (here | set(needed)) - there.keys() if name.isprintable()]
        looked_up = pool.map(buckets.look_up, map(source.below, unlisted))
        there |= {name: entry for name, entry in zip(unlisted, looked_up) if entry}
        sent = _read_sent(target) if needed else None
        is_newest = sent is not None and (needed[0] in sent) == (needed[0] in there) and all(
            there[name].etag == etag for name, (etag, _) in sent.items() if name in there)
        sent = sent or {}

        def is_sent(name: str) -> bool:
            with contextlib.suppress(OSError):
                return name in sent and sent[name][1] == _state(target / name)
            return True     # it is no file

        def copy(name: str) -> None:
            path = target / name
            if name in here and name in sent and sent[name][0] == there[name].etag and (is_newest or is_sent(name)):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                if name in logs:
                    _fetch_log(there[name], path)
                    return
                files.replace(path, buckets.read(there[name].address), shared=True)
                sent[name] = there[name].etag, _state(path)
            except addresses.Missing:
                path.unlink(missing_ok=True)
                sent.pop(name, None)
        if not is_newest:
            for name in here - there.keys():
                (target / name).unlink(missing_ok=True)
        list(pool.map(copy, filter(wanted, there)))
        if is_newest and (unsent := [name for name in sorted(here) if not is_sent(name)]):
            files.notices.tell(f"{source} lacks the end of {_list(unsent)}, which this host has kept and now sends")
        if needed:
            _write_sent(target, {name: sent[name] for name in there if name in sent and wanted(name)})


def _fetch_log(remote: addresses.RemoteFile, path: Path) -> None:
    """Make a local file equal to a log in the bucket, in pieces. From the second time on, only its new end is fetched.

    Every row of the log has its time, so a log that was cut and written again has other bytes. So if the end of the
    local file is equal to the same range in the bucket, all before it is equal, too. Raises: StorageError, OSError.
    """
    for _ in range(MOST_TRIES):
        with open(path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(begin := max(0, size - OVERLAP_BYTES))
            end = file.read()
            try:
                if size > (remote.size or 0) or end and buckets.read_range(remote, begin, size) != end:
                    path.unlink()       # who reads it keeps what it has opened
                    continue
                for start in range(size, remote.size or 0, PIECE_BYTES):
                    file.write(buckets.read_range(remote, start, min(start + PIECE_BYTES, remote.size or 0)))
                return
            except addresses.Changed:   # it grew meanwhile
                remote = buckets.look_up(remote.address) or remote
    raise StorageError(f"{remote.address} changed {MOST_TRIES} times while it was read; try again")


# A file beside the directory records each object in the bucket: its etag, and the state of the local file when it was
# sent. A file in another state has not been sent; another host has written an object with another etag.
Sent = dict[str, tuple[str, tuple[int, ...] | None]]


def _read_sent(directory: Path) -> Sent | None:
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        kept = json.loads(directory.with_name(f"{directory.name}.sent").read_text(encoding="utf-8"))
        return {name: (etag, state and tuple(state)) for name, (etag, state) in kept.items()}
    return None


def _write_sent(directory: Path, sent: Sent) -> None:
    files.replace(directory.with_name(f"{directory.name}.sent"), json.dumps(sent))


def _state(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file does; None if it is no regular file. Raises: OSError."""
    status = os.stat(path)
    return (status.st_mtime_ns, status.st_size, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _names(directory: Path, refused: Callable[[OSError], None]) -> Iterator[str]:
    """Yield the names of files that are not being written. refused: receives the error of an unreadable directory."""
    for at, _, names in os.walk(directory, onerror=refused):
        inside = os.path.relpath(at, directory)
        yield from (os.path.normpath(os.path.join(inside, name)) for name in names if not TEMPORARY.fullmatch(name))


class LostClaimError(files.FileSystemError):
    """Another start has claimed run.dir after this start's lock had lapsed. This start must not write there."""


class _Gone(Exception):
    """A file that was sent is no longer in the directory."""


# Of the process: the mirrors that are sending. Each enters itself here and leaves at `stop`. `remove` looks for the one
# of a file, so that its callers know no bucket.
_at_work: list[Mirror] = []


def remove(path: Path) -> None:
    """Remove a file from a run's directory, and from its bucket if this process sends it there. Raises: OSError."""
    for mirror in _at_work:
        if path.is_relative_to(mirror.source):
            mirror.forget(os.path.relpath(path, mirror.source))
    path.unlink(missing_ok=True)


class Mirror(contextlib.AbstractContextManager):
    """Sends changed files of a directory to a bucket, every few seconds and on request. One process of a run has one.

    It adds and replaces objects, and removes only those that `forget` names. The object of a file that is gone from the
    directory stays, and the file is not sent again: someone has emptied this host's cache, and later writes to the file
    are incomplete. Changes that could not be sent at the end stay in the directory; after `fetch` the next Mirror sends
    them.

    wanted: name within the directory -> whether the file is sent. needed: top-level names without which a checkpoint is
    useless; the first one is sent before all others. tell: receives the name of each file that cannot be sent and will
    be sent again. check_claim: called before anything is sent; raises LostClaimError if another start has claimed the
    run. `fetch` must have filled the directory.
    """

    def __init__(self, source: Path, target: Address, wanted: Callable[[str], bool], *, needed: Sequence[str],
                 tell: Callable[[str], None], check_claim: Callable[[], None]):
        self.source, self.target, self.wanted, self.needed, self.tell = source, target, wanted, needed, tell
        self.check_claim = check_claim
        self._forgotten, self._gone = set[str](), set[str]()
        self._sent = _read_sent(source) or {}
        self._sent_at: dict[str, float] = {}
        self._failed = set[str]()       # in the last send
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_sending, daemon=True, name="mirror")
        self._thread.start()
        _at_work.append(self)

    def send(self) -> None:
        """Send the files that have changed. Raises: LostClaimError; OSError, ValueError if the claim cannot be checked
        or a needed file cannot be sent. A file that is gone raises nothing."""
        for name, error in self._send().items():
            if not name or self._is_needed(name) and not isinstance(error, _Gone):
                raise error

    def forget(self, name: str) -> None:
        """Make the next `send` remove this file from the bucket, if the file is no longer in the directory."""
        self._forgotten.add(name)

    def _send(self, *, all_of_them: bool = True) -> dict[str, Exception]:
        """Send all changed files, or those that are due. Return name -> why the file could not be sent; the name ""
        means all files. Each reason is reported once. Raises: LostClaimError."""
        failed: dict[str, Exception] = {}

        def put(name: str) -> None:
            with _collect(failed, name), contextlib.suppress(FileNotFoundError):      # removed since it was found
                if not name.isprintable():
                    raise ValueError("its name has an unprintable character, so no object in the bucket can have it; "
                                     "rename the file")
                version = buckets.write(self.target.below(name), self.source / name)
                self._sent[name], self._sent_at[name] = (version.etag or "", states[name]), now
        with self._lock:
            before = self._sent.copy()
            with _collect(failed, ""):
                states, now = self._find(failed), time.monotonic()
                changed = [name for name, state in states.items() if self._sent.get(name, ("", None))[1] != state]
                due = [name for name in changed if all_of_them
                       or now - self._sent_at.get(name, -math.inf) >= states[name][1] / SLOWEST_BYTES_S]
                forgotten = [name for name in self._forgotten.copy() if name not in states]
                if due or forgotten:
                    self.check_claim()
                if self.needed[0] in due:
                    put(self.needed[0])
                if self.needed[0] not in failed:        # without it the others are useless
                    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
                        list(pool.map(put, [name for name in due if name != self.needed[0]]))
                buckets.remove([self.target.below(name) for name in forgotten])
                for name in forgotten:
                    self._forgotten.discard(name)
                    self._sent.pop(name, None)
            if self._sent != before:
                with contextlib.suppress(OSError):      # the next start then takes what the bucket has
                    _write_sent(self.source, self._sent)
            self._tell({name: error for name, error in failed.items() if name not in self._failed})
            self._failed = failed.keys() | self._gone
        return failed

    def _is_needed(self, name: str) -> bool:
        return name.split(os.sep)[0] in self.needed

    def _find(self, failed: dict[str, Exception]) -> dict[str, tuple]:
        """Return name -> a value that changes when the file changes. failed: receives the error of each file that is
        gone or cannot be read; the name "." means the directory."""
        states = {}

        def note(error: OSError) -> None:
            name = os.path.relpath(error.filename, self.source)
            if name == os.curdir or not isinstance(error, FileNotFoundError):
                failed[name] = error
        for name in filter(self.wanted, _names(self.source, note)):
            with _collect(failed, name), contextlib.suppress(FileNotFoundError):
                if state := _state(self.source / name):
                    states[name] = state
        unread = tuple(f"{name}/".removeprefix("./") for name, error in failed.items()
                       if not isinstance(error, FileNotFoundError))
        self._gone |= {name for name in self._sent.keys() - states.keys() - self._forgotten
                       if not f"{name}/".startswith(unread)}
        self._sent = {name: record for name, record in self._sent.items() if name not in self._gone}
        if os.curdir not in failed:
            failed |= dict.fromkeys(self._gone, _Gone("removed from that directory; the bucket keeps its copy"))
        return {name: state for name, state in states.items() if name not in self._gone}

    def _tell(self, failed: dict[str, Exception]) -> None:
        for why, some in itertools.groupby(failed, lambda name: files.describe(failed[name])):
            names = list(some)
            self.tell(f"{_list(names)} of {self.source} cannot be copied to {self.target}: {why}")

    def _keep_sending(self) -> None:
        with contextlib.suppress(LostClaimError):       # check_claim has reported it
            while not self._done.wait(EVERY_S):
                self._send(all_of_them=False)

    def undo(self) -> None:
        """Send nothing more, and remove from the bucket what was sent. Raises: StorageError, FileSystemError."""
        self.stop()
        buckets.remove([self.target.below(name) for name in self._sent.keys() | self._gone])

    def stop(self) -> None:
        if self in _at_work:
            _at_work.remove(self)
        self._done.set()
        self._thread.join()     # nothing is sent after it

    def __exit__(self, kind, *_) -> None:
        """Send the remaining changes. Raises: FileSystemError if some cannot be sent, unless the block has failed."""
        if self._done.is_set():
            return
        self.stop()
        try:
            failed = self._send()
        except LostClaimError:
            if kind is None:
                raise
            return
        lacks = [name for name, error in failed.items() if name in ("", os.curdir) or self._is_needed(name)
                 or isinstance(error, (StorageError, files.FileSystemError))]
        if lacks and kind is None:
            raise files.FileSystemError(
                f"{self.target} does not have the end of {_list(lacks)}: {files.describe(failed[lacks[0]])}. The files "
                f"in {self.source} are kept, and the next start on this host sends them")


def _list(names: Sequence[str]) -> str:
    shown = ("the files" if name in ("", os.curdir) else repr(name)[1:-1] for name in names[:3])
    return ", ".join(shown) + f" and {len(names) - 3} more" * (len(names) > 3)


@contextlib.contextmanager
def _collect(failed: dict[str, Exception], name: str) -> Iterator[None]:
    """Store an error of the block in failed[name], also a panic of obstore (no Exception). Raises: LostClaimError."""
    try:
        yield
    except LostClaimError:
        raise
    except Exception as error:
        failed[name] = error
    except BaseException as error:
        failed[name] = files.FileSystemError(files.describe(error))


@dataclasses.dataclass(eq=False)
class LeaseHeld(Exception):
    """Another process has the lease. text: its content. sign: changes as long as the owner lives."""
    text: str
    sign: object


class Lease:
    """A lock in a bucket: an object that its owner rewrites every BEAT_S, only while the object is still the owner's.

    If the object does not change for LEASE_S, another process may take it. The taker measures with its own clock,
    because clocks of hosts differ. lost: called with the text of the process that has taken the lease. tell: receives
    the reason if the object cannot be written.
    """

    def __init__(self, address: Address, *, lost: Callable[[str], None] = lambda text: None,
                 tell: Callable[[str], None] = lambda line: None):
        self.address, self.lost, self.tell = address, lost, tell
        self._version: Version | None = None
        self._done, self._told = threading.Event(), ""
        self._thread: threading.Thread | None = None
        self._seen: tuple[Version | None, float] = (None, 0.0)

    def take(self, text: str, is_dead: Callable[[str], bool]) -> None:
        """Take the lease if it is free. text: describes the owner, and differs from the texts of all others. is_dead:
        text -> whether its owner is known to have ended. Raises: LeaseHeld; StorageError, FileSystemError."""
        held = buckets.read_versioned(self.address)
        before = text_of(held[0]) if held else ""
        if held and before:
            if self._seen[0] != held[1]:
                self._seen = held[1], time.monotonic()
            if not is_dead(before) and time.monotonic() - self._seen[1] < LEASE_S:
                raise LeaseHeld(before, held[1])
        self._text = text
        self._version = buckets.write_if(self.address, self._content(), held and held[1])
        if self._version is None:
            raise LeaseHeld(before, before)
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lease")
        self._thread.start()

    def _content(self) -> bytes:
        return f"{self._text}\n{time.time()}".encode()

    def _keep(self) -> None:
        while not self._done.wait(BEAT_S):      # a request that stalls does not delay the next
            beat = threading.Thread(target=self._beat, daemon=True, name="beat of the lease")
            beat.start()
            beat.join(BEAT_S)

    def _beat(self) -> None:
        failed: dict[str, Exception] = {}
        with _collect(failed, ""):
            if (taken_by := self._renew()) is not None and not self._done.is_set():
                self._done.set()
                self.lost(taken_by)
        why = files.describe(failed[""]) if failed else ""
        if why and why != self._told:
            self.tell(f"{self.address} cannot be renewed: {why}; after {LEASE_S:g} s another start may take it over")
        self._told = why

    def _renew(self) -> str | None:
        """Rewrite the object. Return the text of another owner if there is one, else None."""
        version = buckets.write_if(self.address, self._content(), self._version)
        if version is None:     # it was removed, or another beat has written it
            held = buckets.read_versioned(self.address)
            if held and text_of(held[0]) != self._text:
                return text_of(held[0])
            version = buckets.write_if(self.address, self._content(), held and held[1])
        self._version = version or self._version
        return None

    def leave(self, *, remove: bool = False) -> None:
        """Give the lease back if it is still held, so that another process may take it. remove: remove the object."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        with contextlib.suppress(StorageError, OSError):
            held = buckets.read_versioned(self.address)
            if held and text_of(held[0]) == self._text and buckets.write_if(self.address, b"", held[1]) and remove:
                buckets.remove([self.address])


def text_of(content: bytes | None) -> str:
    """Return the text that a lease's owner wrote about itself; empty if the lease is free."""
    return (content or b"").decode(errors="replace").partition("\n")[0]
