"""A directory of a bucket, as a local directory of this host: fetched when it begins, sent as its files change.

Writers and readers of a run know directories alone. For an address the directory is this host's `directory(address)`;
what a file system does by locks does a `Lease`. This module knows no run.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshtrain import files
from meshtrain.storage import addresses, copies, stores
from meshtrain.storage.addresses import Address, StorageError
from meshtrain.storage.stores import Version

EVERY_S = 5.0
SLOWEST_BYTES_S = 2e6       # a large file that grows is sent so much less often
AT_ONCE = 8
RUNS, READ = "runs", "runs-read"     # in the directory of copies
BEAT_S, LEASE_S = 5.0, 30.0
TEMPORARY = re.compile(r".+\.tmp|\.nfs.*")


def directory(name: str) -> Path:
    """The local directory of a run's directory: itself, or what stands for an address on this host."""
    if not addresses.is_remote(name):
        return Path(name)
    return copies.named_home(RUNS, addresses.parse(name))


def read(address: Address, wanted: Callable[[str], bool], within: str = "") -> Path:
    """The local directory of a run that this process only reads, with the files as they are in the bucket now. wanted,
    within: as of `fetch`. Raises: StorageError, FileSystemError."""
    directory = copies.named_home(READ, address)
    fetch(address, directory, wanted, within)
    return directory


def fetch(source: Address, target: Path, wanted: Callable[[str], bool], within: str = "") -> None:
    """Make the files in a local directory those of the bucket. wanted: by name within it; all others stay as they are.
    within: the folder in which all of them are. Raises: StorageError, FileSystemError."""
    listed = stores.listed(source.below(within) if within else source)
    there = {one.address.path.removeprefix(f"{source.path.rstrip('/')}/"): one for one in listed}
    there = {name: one for name, one in there.items() if wanted(name)}

    def copy(name: str) -> None:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.replace(path, stores.read(there[name].address), shared=True)
        except stores.Missing:
            path.unlink(missing_ok=True)
    with copies.writing(target), concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        target.mkdir(parents=True, exist_ok=True)
        for name in list(_names(target)):
            if wanted(name) and name not in there:
                (target / name).unlink(missing_ok=True)
        list(pool.map(copy, there))


def _names(directory: Path) -> Iterator[str]:
    """Of the files within, those that are being written left out."""
    for at, _, names in os.walk(directory):
        inside = os.path.relpath(at, directory)
        yield from (os.path.normpath(os.path.join(inside, name)) for name in names if not TEMPORARY.fullmatch(name))


class Mirror(contextlib.AbstractContextManager):
    """Sends what changes in a local directory to a bucket, every few seconds and on request. One process of a run has
    it.

    wanted: by name within the directory. first: the name that is sent before the others. check_claim: called before
    anything is sent; raises where another has taken the place over. What cannot be sent is told, and sent with the
    next; it stops nothing. The directory is as `fetch` has made it.
    """

    def __init__(self, source: Path, target: Address, wanted: Callable[[str], bool], *, first: str,
                 tell: Callable[[str], None], check_claim: Callable[[], None]):
        self.source, self.target, self.wanted, self.first, self.tell = source, target, wanted, first, tell
        self.check_claim = check_claim
        self._sent: dict[str, tuple[tuple, float]] = {name: (found, 0.0) for name, found in self._found().items()}
        self._lock, self._done, self._told = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._keep_sending, daemon=True, name="mirror")
        self._thread.start()

    def send(self, *, all_of_them: bool = True) -> None:
        """What has changed; or of it what is due. Raises: StorageError, FileSystemError, OSError; what was not sent is
        still to be sent then."""
        with self._lock:
            found, now = self._found(), time.monotonic()
            changed = [name for name, state in found.items() if name not in self._sent or self._sent[name][0] != state]
            due = [name for name in changed if all_of_them or self._is_due(name, found[name][1], now)]
            gone = [name for name in self._sent if name not in found]
            if not due and not gone:
                return
            self.check_claim()

            def put(name: str) -> None:
                with contextlib.suppress(FileNotFoundError):
                    stores.write(self.target.below(name), self.source / name)
                self._sent[name] = found[name], now
            for name in [self.first] * (self.first in due):
                put(name)
                due.remove(name)
            with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(put, due))
            stores.remove([self.target.below(name) for name in gone])
            for name in gone:
                del self._sent[name]

    def _is_due(self, name: str, size: int, now: float) -> bool:
        return name not in self._sent or now - self._sent[name][1] >= size / SLOWEST_BYTES_S

    def _found(self) -> dict[str, tuple]:
        """Name -> what changes with the file."""
        found = {}
        for name in filter(self.wanted, _names(self.source)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(self.source / name)
                found[name] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return found

    def _keep_sending(self) -> None:
        while not self._done.wait(EVERY_S):
            self._attempt(all_of_them=False)

    def _attempt(self, **how) -> None:
        try:
            self.send(**how)
            self._told = False
        except Exception as error:
            if not self._told:
                self.tell(f"{self.target} is behind {self.source}: {files.said(error)}; it is tried again")
            self._told = True

    def forget(self) -> None:
        """Sends nothing more, and removes what it has sent. Raises: StorageError, FileSystemError."""
        self.stop()
        stores.remove([self.target.below(name) for name in self._sent])

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def __exit__(self, kind, *_) -> None:
        if not self._done.is_set():
            self.stop()
            self._attempt(all_of_them=True)


class LeaseHeld(Exception):
    """Somebody else has the lease. text: what is in it; sign: changes as long as its owner lives."""

    def __init__(self, text: str, sign: object):
        super().__init__()
        self.text, self.sign = text, sign


class Lease:
    """An object that one process at a time has: it writes it anew every BEAT_S, each time only over its own.

    Without a sign of its owner for LEASE_S another may take it: by the taker's own clock, as clocks of hosts differ.
    """

    def __init__(self, address: Address):
        self.address = address
        self._version: Version | None = None
        self._done, self._thread = threading.Event(), None
        self._seen: tuple[Version | None, float] = (None, 0.0)

    def take(self, text: str, is_dead: Callable[[str], bool]) -> None:
        """Try to have it. text: what tells who has it; differs from all others'. is_dead: whether the owner that a text
        names is known to be gone. Raises: LeaseHeld; StorageError, FileSystemError."""
        found = stores.read_versioned(self.address)
        before = text_of(found[0]) if found else ""
        if found and before:
            if self._seen[0] != found[1]:
                self._seen = found[1], time.monotonic()
            if not is_dead(before) and time.monotonic() - self._seen[1] < LEASE_S:
                raise LeaseHeld(before, found[1])
        self._text = text
        self._version = stores.write_if(self.address, self._content(), found and found[1])
        if self._version is None:
            raise LeaseHeld(before, before)
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lease")
        self._thread.start()

    def _content(self) -> bytes:
        return f"{self._text}\n{time.time()}".encode()

    def _keep(self) -> None:
        while not self._done.wait(BEAT_S):
            with contextlib.suppress(StorageError, OSError):    # whoever looks into it sees who has it
                version = stores.write_if(self.address, self._content(), self._version)
                if version is None:
                    return
                self._version = version

    def leave(self, *, remove: bool = False) -> None:
        """Gives it back, if it is still held: the next may have it at once. remove: with the object."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        with contextlib.suppress(StorageError, OSError):
            if stores.write_if(self.address, b"", self._version) and remove:
                stores.remove([self.address])


def text_of(content: bytes | None) -> str:
    """What a lease's owner said of itself; empty: nobody has it."""
    return (content or b"").decode(errors="replace").partition("\n")[0]
