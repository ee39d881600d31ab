"""Divides long work on files into parts, each of which is done once. A part is complete or absent, even if the process
is killed.

token_cache.py and given_tokens.py define what a part is; this module finds and builds missing parts. Every process that
needs them takes a free part under a lock, so processes share the work without communicating. If all parts are complete,
nothing is locked and only a small note per part is read. This module knows no tokens.
"""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from meshtrain import files
from meshtrain.data import progress
from meshtrain.data.files import token_files
from meshtrain.data.files.token_files import IndexedTokens
from meshtrain.units import amount

Value = TypeVar("Value")
POLL_SECONDS = 0.2
MOST_STAMPS = 64        # stamps in a note: one per host if inodes differ
BEAT_SECONDS = 10       # heartbeat interval of a process that builds a part
OWNER = ".owner"        # suffix of the heartbeat file


class Stopped(Exception):
    """Work was stopped on request. Finished parts are kept."""


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """How to open the parts of a corpus. share (i, n): build only the parts i, i + n, … and skip the others. show:
    prints a line that the next one replaces; None: there is no terminal."""
    tell: Callable[[str], None] = print
    should_stop: Callable[[], bool] = lambda: False
    verify: bool = False    # read everything, and compare checksums
    share: tuple[int, int] = (0, 1)
    show: Callable[[str], None] | None = None

    def check_stop(self) -> None:
        """Raise `Stopped` if a stop was requested."""
        if self.should_stop():
            raise Stopped


class Part:
    """Input files and their result in the directory `home`. The manifest of the result is written last."""
    home: Path
    inputs: tuple[str, ...]
    verb: str                # e.g. "tokenizing"

    @functools.cached_property
    def name(self) -> str:
        """Name of the part's files. The name depends on the relative paths of the inputs, so that inputs and results
        can be moved together."""
        paths = "\0".join(relative_path(self.home, path) for path in self.inputs)
        digest = hashlib.blake2b(os.fsencode(paths), digest_size=8).hexdigest()
        return f"{os.path.basename(self.inputs[0])[:100]}-{digest}"

    def file(self, suffix: str) -> Path:
        return self.home / (self.name + suffix)

    @property
    def manifest(self) -> Path:
        return self.file(".json")

    def note(self) -> dict:
        return json.loads(self.manifest.read_text(encoding="utf-8"))

    def renew_note(self, note: dict, stamps: list[list[int]]) -> None:
        """Record `stamps` of unchanged content as the latest in the note, which keeps the latest MOST_STAMPS. A note
        that cannot be written stays as it is."""
        known = [note["stamps"], *note.get("of_other_hosts", [])]
        others = [other for other in known if other != stamps][:MOST_STAMPS - 1]
        with contextlib.suppress(OSError):
            files.replace(self.manifest, json.dumps(note | {"stamps": stamps, "of_other_hosts": others}), shared=True)

    def look(self) -> IndexedTokens | None:
        """Return the result if size, mtime and inode of its files are unchanged since the last verification; else None.
        """
        return read_entry(self.home, self._look)

    def _look(self) -> IndexedTokens | None:
        raise NotImplementedError

    def check(self, job: Job) -> tuple[IndexedTokens | None, str]:
        """Verify the part by content and record what was verified. Return (result, ""), or (None, reason) if the part
        is not valid; the reason is "" if there never was a result."""
        raise NotImplementedError

    def build(self, job: Job, progress: progress.FileProgress) -> IndexedTokens:
        """Build the part and return the result. Raises: ValueError, Stopped; no files are left then."""
        raise NotImplementedError


def open_all(choices: Sequence[Sequence[Part]], job: Job) -> list[IndexedTokens | None]:
    """Return one result for each choice. A choice is the same part in several directories: the first directory that has
    it or is writable is used.

    A result is None only for a missing part of another share. Raises: ValueError for a faulty file, or if no directory
    is writable; Stopped.
    """
    # With --verify, existing parts are checked again. Parts of another share are skipped.
    mine = [k % job.share[1] == job.share[0] for k in range(len(choices))]
    pairs = [None if job.verify and mine[k] else next(filter(None, map(Part.look, parts)), None)
             for k, parts in enumerate(choices)]
    left = [k for k, pair in enumerate(pairs) if pair is None and mine[k]]
    if left:
        with contextlib.ExitStack() as stack:
            _Building(choices, pairs, job, _Locks(stack)).run(left)
    return pairs


class _Building:
    """Verifies and builds the remaining parts, and waits for those that other processes build."""

    def __init__(self, choices: Sequence[Sequence[Part]], found: list[IndexedTokens | None], job: Job, locks: _Locks):
        self.choices, self.found, self.job, self.locks = choices, found, job, locks
        self.refused: set[Path] = set()
        self.refuted: dict[int, token_files.Stamp] = {}    # manifests of parts found damaged
        self.waiting = files.Waiting("", job.tell)

    def run(self, left: list[int]) -> None:
        started = time.perf_counter()
        # checksums: zlib and blake2 release the interpreter
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for k, pair in zip(left, pool.map(self._check, left)):
                self.found[k] = pair
        seconds, checked = time.perf_counter() - started, [pair for k in left if (pair := self.found[k])]
        if checked and (seconds > progress.TELL_SECONDS or self.job.verify):
            size = sum(pair.ids.stamp[1] for pair in checked)
            what = f"{len(checked):,} parts are" if len(checked) > 1 else "1 part is"
            self.job.tell(f"token cache: {what} intact ({size / 1e9:.1f} GB read in {seconds:.0f} s)")
        left = [k for k in left if self.found[k] is None]
        if left:
            self._build_all({k: self._place(self.choices[k]) for k in left})

    def _check(self, k: int) -> IndexedTokens | None:
        """Return the part if its content is complete; else None. Parts that another process has locked are left for
        later."""
        for part in self.choices[k]:
            self.job.check_stop()
            with self._hold(part) as held:
                if not held:
                    return None
                with _heartbeat(part, self.job) as job:
                    pair, reason = part.check(job)
            if pair:
                return pair
            if reason:
                self.refuted[k] = _stamp(part.manifest)
                self.job.tell(f"token cache: {part.inputs[0]}{' and others' if part.inputs[1:] else ''}: {reason}; "
                              f"{part.verb} again")
        return None

    @contextlib.contextmanager
    def _hold(self, part: Part) -> Iterator[bool]:
        try:
            self.locks.open(part.home)
        except OSError:
            yield True     # no process builds in a read-only directory
            return
        with self.locks.hold(part) as held:
            yield held

    def _place(self, parts: Sequence[Part]) -> Part:
        """Return the part in the first writable directory."""
        for part in parts:
            try:
                files.patiently(lambda: part.home.mkdir(parents=True, exist_ok=True))
                files.patiently(lambda: self.locks.open(part.home))
                return part
            except OSError as error:
                last, refused = error, f"{part.home.parent} cannot be written ({error.strerror})"
                if part.home.parent not in self.refused and part is not parts[-1]:
                    self.refused.add(part.home.parent)
                    self.job.tell(f"token cache: {refused}; using {parts[-1].home.parent}")
        raise files.error_to_raise(last, f"token cache: {parts[-1].home.parent} cannot be written",
                                   "set data.cache to a writable directory")

    def _build_all(self, missing: dict[int, Part]) -> None:
        total = sum(_size(path) for part in missing.values() for path in part.inputs)
        count = sum(len(part.inputs) for part in missing.values())
        what = f"{next(iter(missing.values())).verb} {amount(count, 'file')}"
        said = False
        with progress.FileProgress(what, total, self.job.tell, self.job.show) as bar:
            while missing:
                for k, part in list(missing.items()):
                    self.job.check_stop()
                    with self.locks.hold(part) as held:
                        if not held:
                            continue
                        self.found[k] = part.look()    # another process may have built it
                        if self.found[k] is None or _stamp(part.manifest) == self.refuted.get(k):
                            if not said:
                                said = True
                                self.job.tell(f"token cache: {what}, {total / 1e6:,.1f} MB, into {part.home}")
                            with _heartbeat(part, self.job) as job:
                                self.found[k] = part.build(job, bar)
                        else:
                            bar.finish(sum(_size(path) for path in part.inputs))
                    del missing[k]
                if missing:
                    self._wait(next(iter(missing.values())))

    def _wait(self, part: Part) -> None:
        """Wait for the process that builds a part. Raises: FileSystemError if it has had no heartbeat for too long."""
        owner, heartbeat = "another process", part.file(OWNER)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            owner = heartbeat.read_text(encoding="utf-8") or owner
        self.waiting.what = f"token cache: {part.name} in {part.home} is in use by "
        self.waiting.go_on(owner, (part.name, _stamp(heartbeat)))
        time.sleep(POLL_SECONDS)


def read_entry(home: Path, look: Callable[[], Value]) -> Value | None:
    """Return look() at a cache file, with retries; None if the file is missing or invalid. Raises: FileSystemError,
    because a part need not be rebuilt after a transient error of the file system."""
    try:
        return files.patiently(look)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if files.is_moment(error):
            raise files.error_to_raise(error, f"token cache: {home} cannot be read", "") from None
        return None


def has_stamps(note: dict, stamps: list[list[int]]) -> bool:
    """Return whether a note has these files' stamps, from any host: some file systems number inodes per host."""
    return stamps in [note["stamps"], *note.get("of_other_hosts", [])]


@contextlib.contextmanager
def _heartbeat(part: Part, job: Job) -> Iterator[Job]:
    """Yield the job with a heartbeat: a file beside the part, written every BEAT_SECONDS, for waiting processes."""
    due, path, written = time.monotonic() + BEAT_SECONDS, part.file(OWNER), False

    def should_stop() -> bool:
        nonlocal due, written
        if time.monotonic() >= due:
            due, written = time.monotonic() + BEAT_SECONDS, True
            with contextlib.suppress(OSError):
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        return job.should_stop()

    try:
        yield dataclasses.replace(job, should_stop=should_stop)
    finally:
        if written:
            with contextlib.suppress(OSError):
                path.unlink()


class _Locks:
    """A lock for each part: one byte of the file `.lock` beside the parts.

    The system owns the locks and frees them when the process dies. Closing any descriptor of the file frees all of
    them, so one descriptor stays open during the whole work.
    """

    def __init__(self, stack: contextlib.ExitStack):
        self._stack, self._opening = stack, threading.Lock()
        self._files: dict[Path, Any] = {}

    def open(self, home: Path):
        """Return the open lock file. Raises: OSError."""
        with self._opening:
            if home not in self._files:
                self._files[home] = self._stack.enter_context(open(home / ".lock", "a", encoding="utf-8"))
            return self._files[home]

    @contextlib.contextmanager
    def hold(self, part: Part) -> Iterator[bool]:
        """Lock a part during the block; yield whether the lock was free."""
        file = self.open(part.home)
        place = int.from_bytes(hashlib.blake2b(part.name.encode(), digest_size=7).digest())
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                yield False
                return
            raise files.error_to_raise(error, f"token cache: {part.home} cannot be locked",
                                       "set data.cache to a directory on another file system") from None
        try:
            yield True
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def relative_path(home: Path, path: str) -> str:
    return os.path.relpath(os.path.realpath(path), os.path.realpath(home))


def _stamp(path: Path) -> token_files.Stamp | None:
    with contextlib.suppress(OSError):
        return token_files.stamp(str(path))
    return None


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
