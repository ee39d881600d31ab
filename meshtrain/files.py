"""Judges errors of the file system: a mistake of the user, or a temporary failure.

A name that is wrong, or that nobody may read or write, stays so until a person changes it: exit code 2. A shared file
system that answers ESTALE after a failover, a disk that is full, or a device that fails says nothing about the run
file: the call is made again with patience, then the run ends with exit code 1, and a launcher starts it again. MISTAKES
is the whole rule.

Below: files written until they are on the disk, and their checksums, xxh3-128. An error of the file system is never
taken for damage: NFS answers ESTALE after a failover, a host may lack its mount, and what a process cannot read now
another one can. This module imports nothing of meshtrain: every room may use it.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import xxhash

# Lasting until somebody changes a name, a permission or a mount. Every other code (EIO, ESTALE, ETIMEDOUT, ENOTCONN,
# EBUSY, ENOTEMPTY, ENOSPC, EDQUOT, EMFILE, …) may be gone at the next call.
MISTAKES = frozenset({
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EROFS, errno.ELOOP,
    errno.EEXIST, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS,
    errno.ENOLCK})
PAUSES_S = (0.5, 2.0, 5.0)  # before each further try; an NFS client keeps attributes for up to 3 s (acregmin)
# Longer than a file server keeps the locks of a client that is gone: NFSv4 90 s (its lease), Lustre 100 s and more
# (eviction).
LOCK_WAIT_S, TELL_AGAIN_S = 300.0, 60.0
CHUNK_BYTES = 4 << 20  # read at once: larger than what keeps a disk busy, smaller than a core's share of the cache
Value = TypeVar("Value")

tell: Callable[[str], None] = lambda line: None     # gets what fails for a moment; commands print it
_told_at: dict[str, float] = {}     # by reason


class FileSystemError(OSError):
    """The file system refused something that is no mistake of the user's, and went on refusing it. The message says
    what."""


def is_mistake(error: OSError) -> bool:
    """Whether the same call would be refused again until a person changes something.

    True, too, for an error without a code: a library's judgement of a file's content, not the kernel's of a call.
    """
    return not isinstance(error, FileSystemError) and (error.errno is None or error.errno in MISTAKES)


def is_moment(error: BaseException) -> bool:
    """Whether the kernel refused a call on a file, and may do it at the next one."""
    return isinstance(error, OSError) and not isinstance(error, (ConnectionError, socket.gaierror)) and not is_mistake(
        error)


def patiently(act: Callable[[], Value], *, missing: bool = False) -> Value:
    """act(), again after each of PAUSES_S where the file system refuses for a moment.

    missing: also where there is no such file: on a shared file system another host's new file may not be seen yet.
    Raises: the OSError of the last try; that of the first where it is a mistake.
    """
    for pause_s in PAUSES_S:
        try:
            return act()
        except OSError as error:
            if is_mistake(error) and not (missing and isinstance(error, FileNotFoundError)):
                raise
            if is_mistake(error):
                time.sleep(pause_s)
            else:
                pause(pause_s, error.filename or "the file system", error.strerror or str(error))
    return act()


def pause(seconds: float, place: str, reason: str) -> None:
    """Wait before a retry, and tell why: each reason once in TELL_AGAIN_S. place: what failed, for the message."""
    if time.monotonic() - _told_at.get(reason, -float("inf")) >= TELL_AGAIN_S:
        _told_at[reason] = time.monotonic()
        tell(f"{place}: {reason}; retrying")
    time.sleep(seconds)


def status(path: str | os.PathLike) -> os.stat_result | None:
    """os.stat of `path`; None where nothing is there, nor can be by this name. Raises: FileSystemError; ValueError
    where the look is not permitted: neither says that nothing is there."""
    try:
        return patiently(lambda: os.stat(path))
    except OSError as error:
        if isinstance(error, PermissionError) or not is_mistake(error):
            raise judged(error, f"{path} cannot be accessed", "grant the permission, or give another path") from None
        return None
    except ValueError:      # a null in the name
        return None


def is_file(path: str | os.PathLike) -> bool:
    """Whether a regular file is there. Unlike os.path.isfile, no when the file system does not answer. Raises: see
    `status`."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_dir(path: str | os.PathLike) -> bool:
    """The same of a directory."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def judged(error: OSError, what: str, remedy: str, mistake: type[Exception] = ValueError) -> Exception:
    """What to raise for `error`, whose patience has ended: a `mistake` with the remedy, or FileSystemError, which is
    exit code 1.

    what: what could not be done, with the value: `data.paths: x.txt cannot be read`.
    """
    if isinstance(error, FileSystemError):
        return error
    reason = error.strerror or str(error)
    if is_mistake(error):
        return mistake(f"{what}: {reason}; {remedy}")
    return FileSystemError(f"{what}: {reason}; check the file system (its room, its mounts, its server) and start "
                           f"again")


def attempted(act: Callable[[], Value], what: str, remedy: str, mistake: type[Exception] = ValueError) -> Value:
    """act(), with patience. Raises: see `judged`."""
    try:
        return patiently(act)
    except OSError as error:
        raise judged(error, what, remedy, mistake) from None


class Waiting:
    """A wait for a lock that somebody else holds: told, limited, and with the owner's name. The owner may be a host
    that is lost: its locks stay until the file server lets go of them.

    what: the value and that it is in use, for messages. tell: gets a line at once and every TELL_AGAIN_S.
    """

    def __init__(self, what: str, tell: Callable[[str], None]):
        self.what, self.tell = what, tell
        self._sign: object = None
        self._since = self._told_at = -float("inf")

    def go_on(self, owner: str, sign: object = None) -> None:
        """Call it after each attempt that found the lock held: it reports a long wait. owner: in words, after `what`.
        sign: anything that changes while its owner works. Raises: FileSystemError after LOCK_WAIT_S without change."""
        now = time.monotonic()
        if self._since < 0 or sign != self._sign:
            self._sign, self._since = sign, now
        if now - self._since > LOCK_WAIT_S:
            raise FileSystemError(f"{self.what}{owner}, and did not come free within {LOCK_WAIT_S:g} s; see whether "
                                  f"that host is lost or still at work, and start again")
        if now - self._told_at >= TELL_AGAIN_S:
            self._told_at = now
            self.tell(f"{self.what}{owner}; waiting: if its host is lost, the file server frees the lock in some "
                      f"minutes")


def regular_files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def checksums(place: Path, paths: Iterable[Path], *, sync: bool = False, missing: bool = False) -> dict[str, list]:
    """Name within `place` -> [bytes, xxh3-128] of each file.

    sync: they were just written, and are on the disk when this returns; else they are read with patience.
    """

    def checksum(path):
        digest, size = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(min(CHUNK_BYTES, os.stat(path).st_size + 1)))
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
            if sync:
                os.fsync(file.fileno())
        return str(path.relative_to(place)), [size, digest.hexdigest()]

    one = checksum if sync else lambda path: patiently(lambda: checksum(path), missing=missing)
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(threads.map(one, paths))


def difference(found: list, wanted) -> str:
    """How a file differs from what was written, in words; empty if it does not."""
    if found == wanted:
        return ""
    if isinstance(wanted, list) and found[0] != wanted[0]:
        return f"{found[0]} bytes, {wanted[0]} were written"
    return "its checksum differs"


def write(path: Path, content: str | bytes) -> None:
    """The file is on the disk when this returns. Raises: OSError that names the file."""
    try:
        with open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def remove(place: Path) -> OSError | None:
    """Removes a directory, with patience, also while other processes do. Returns why some of it stays, which does no
    harm: the caller has taken its name or its index."""
    refused: list[OSError] = []

    def act():
        refused.clear()
        shutil.rmtree(place, onerror=lambda call, path, info: refused.append(info[1]))
        if faults := [error for error in refused if is_moment(error)]:
            raise faults[0]
    with contextlib.suppress(OSError):
        patiently(act)
    return next((error for error in refused if not isinstance(error, FileNotFoundError)), None)


def replace(path: Path, content: str | bytes, *, shared: bool = False) -> None:
    """The file has either its old content or, when this returns, all of the new. shared: several processes may write it
    at once; its name is on the disk, too, and a write that fails leaves nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        write(temporary, content)
        temporary.replace(path)
    finally:
        if shared:
            temporary.unlink(missing_ok=True)
    if shared:
        sync(path.parent)


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """The first of NAME, NAME-2, NAME-3, … that is free."""
    names = (f"{name}-{i}" if i > 1 else name for i in itertools.count(1))
    return next(one for one in names if not is_taken(one))


def set_aside(path: Path, suffix: str) -> str:
    """Renames a file or directory to NAME.suffix, or NAME.suffix-2 where that is taken; returns the new name."""
    kept = free_name(f"{path.name}.{suffix}", lambda name: path.with_name(name).exists())
    path.rename(path.with_name(kept))
    return kept


def sync(directory: Path) -> None:
    """A name is on the disk when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def said(error: BaseException) -> str:
    """An error in one line, for people: what the system said, and about which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if code := re.search(r"os_error_code='(\d+)'", text):  # tensorstore's way to report a full disk
        return os.strerror(int(code[1]))
    return text if type(error).__module__.startswith("meshtrain.") else f"{type(error).__name__}: {text[:300]}"


class Beat:
    """Calls `write` every `every_s` seconds, in a thread of its own, until `close`. What the file system refuses is
    left to the next call; so is any other error, which is told once. What it writes must say what the main thread has
    done: the beat goes on while that hangs."""

    def __init__(self, write: Callable[[], object], every_s: float):
        self._write, self._every_s, self._closed = write, every_s, threading.Event()
        threading.Thread(target=self._keep, daemon=True, name="beat").start()

    def _keep(self) -> None:
        told = False
        while not self._closed.wait(self._every_s):
            try:
                self._write()
            except OSError:
                pass
            except BaseException as error:      # of a library in Rust, too: its panics are no Exception
                if not told:
                    tell(f"{getattr(self._write, '__qualname__', self._write)}: {said(error)}; retrying")
                told = True

    def close(self) -> None:
        self._closed.set()
