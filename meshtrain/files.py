"""Classifies errors of the file system as mistakes of the user or temporary failures; writes files durably.

A wrong name or a missing permission stays until a person changes it: exit code 2. Other errors (ESTALE after an NFS
failover, a full disk, a failing device) may pass: the call is retried, then the run ends with exit code 1, and a
launcher starts it again. MISTAKES lists the codes of the first class.

Files are written and synced to disk, with xxh3-128 checksums. An error of the file system never counts as damage of a
file: a host may lack a mount, and another process may be able to read the file. Imports nothing of meshtrain.
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
from typing import Any, TypeVar

import xxhash

# Errors that stay until somebody changes a name, a permission or a mount. All other codes (EIO, ESTALE, ETIMEDOUT,
# ENOTCONN, EBUSY, ENOTEMPTY, ENOSPC, EDQUOT, EMFILE, …) may pass.
MISTAKES = frozenset({
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EROFS, errno.ELOOP,
    errno.EEXIST, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS,
    errno.ENOLCK})
PAUSES_S = (0.5, 2.0, 5.0)  # before each retry; an NFS client caches attributes for up to 3 s (acregmin)
# Longer than a file server keeps the locks of a lost client: NFSv4 90 s (its lease), Lustre 100 s and more (eviction).
LOCK_WAIT_S, TELL_AGAIN_S = 300.0, 60.0
CHUNK_BYTES = 4 << 20  # bytes of a read: enough to keep a disk busy, less than a core's share of the cache
Value = TypeVar("Value")


class Notices:
    """Lines for the user about failures that may pass.

    The process has one instance, `notices`, because calls are retried in all threads and in functions that know no
    command. The lines go to the stderr of the process. `run.command.print_notices` sets `write`; without a command
    (notebook, test) the lines are dropped.
    """

    def __init__(self) -> None:
        self.write: Callable[[str], object] | None = None
        self._written_at: dict[str, float] = {}     # reason -> time of its last line

    def tell(self, line: str) -> None:
        if self.write is not None:
            self.write(line)

    def tell_reason(self, reason: str, line: str) -> None:
        """Write a line, at most once in TELL_AGAIN_S for each reason."""
        if time.monotonic() - self._written_at.get(reason, -float("inf")) >= TELL_AGAIN_S:
            self._written_at[reason] = time.monotonic()
            self.tell(line)


notices = Notices()


class FileSystemError(OSError):
    """The file system kept failing, after retries, with an error that is not a mistake of the user."""


def is_mistake(error: OSError) -> bool:
    """Return whether the same call would fail again until a person changes something.

    True also for an error without a code, which comes from a library that rejects the content of a file.
    """
    return not isinstance(error, FileSystemError) and (error.errno is None or error.errno in MISTAKES)


def is_moment(error: BaseException) -> bool:
    """Return whether an error is a temporary failure of the file system."""
    return isinstance(error, OSError) and not isinstance(error, (ConnectionError, socket.gaierror)) and not is_mistake(
        error)


def patiently(act: Callable[[], Value], *, missing: bool = False) -> Value:
    """Return act(). After a temporary failure of the file system, retry after each of PAUSES_S.

    missing: whether to retry if there is no such file: on a shared file system, another host's new file may not be
    visible yet. Raises: the OSError of the last attempt, or at once if it is a mistake (see `is_mistake`).
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
    """Wait before a retry and report the reason, each reason once in TELL_AGAIN_S. place: the file or server that
    failed, for the message."""
    notices.tell_reason(reason, f"{place}: {reason}; retrying")
    time.sleep(seconds)


def status(path: str | os.PathLike) -> os.stat_result | None:
    """Return os.stat of `path`; None if nothing exists there. Raises: FileSystemError if the file system fails;
    ValueError if access is not permitted. In both cases something may exist."""
    try:
        return patiently(lambda: os.stat(path))
    except OSError as error:
        if isinstance(error, PermissionError) or not is_mistake(error):
            raise error_to_raise(error, f"{path} cannot be accessed",
                                 "grant the permission, or give another path") from None
        return None
    except ValueError:      # a null byte in the name
        return None


def is_file(path: str | os.PathLike) -> bool:
    """Return whether `path` is a regular file. Unlike os.path.isfile, it raises if the file system fails, see `status`.
    """
    there = status(path)
    return there is not None and stat.S_ISREG(there.st_mode)


def is_dir(path: str | os.PathLike) -> bool:
    """Return whether `path` is a directory. Raises: see `status`."""
    there = status(path)
    return there is not None and stat.S_ISDIR(there.st_mode)


def error_to_raise(error: OSError, what: str, remedy: str, mistake: type[Exception] = ValueError) -> Exception:
    """Return the exception to raise for `error` after retries: a `mistake` with the remedy, or FileSystemError, which
    gives exit code 1.

    what: the failed action with its value: `data.paths: x.txt cannot be read`.
    """
    if isinstance(error, FileSystemError):
        return error
    reason = error.strerror or str(error)
    if is_mistake(error):
        return mistake(f"{what}: {reason}; {remedy}")
    return FileSystemError(f"{what}: {reason}; check the file system (free space, mounts, server) and start again")


def attempt(act: Callable[[], Value], what: str, remedy: str, mistake: type[Exception] = ValueError) -> Value:
    """Return act(), with retries. Raises: see `error_to_raise`."""
    try:
        return patiently(act)
    except OSError as error:
        raise error_to_raise(error, what, remedy, mistake) from None


def read_start(path: str | Path, limit: int) -> bytes:
    """Return the first `limit` bytes of a file, and one more byte if the file is longer."""
    with open(path, "rb") as file:
        return file.read(limit + 1)


class Waiting:
    """A limited wait for a lock that another process holds, with messages that name the owner. The owner's host may be
    lost; then the lock stays until the file server releases it.

    what: text that names the value and says that it is in use. tell: receives a line at once and every TELL_AGAIN_S.
    """

    def __init__(self, what: str, tell: Callable[[str], None]):
        self.what, self.tell = what, tell
        self._sign: object = None
        self._since = self._told_at = -float("inf")

    def go_on(self, owner: str, sign: object = None) -> None:
        """Record an attempt that found the lock held, and report a long wait. owner: a text about the owner that
        follows `what`. sign: a value that changes while the owner works. Raises: FileSystemError after LOCK_WAIT_S
        without a change."""
        now = time.monotonic()
        if self._since < 0 or sign != self._sign:
            self._sign, self._since = sign, now
        if now - self._since > LOCK_WAIT_S:
            raise FileSystemError(f"{self.what}{owner}, which did not release it within {LOCK_WAIT_S:g} s; check "
                                  f"whether that host is lost or still at work, and start again")
        if now - self._told_at >= TELL_AGAIN_S:
            self._told_at = now
            self.tell(f"{self.what}{owner}; waiting: if its host is lost, the file server releases the lock after some "
                      f"minutes")


def refuse(error: OSError) -> None:
    """Raise the error of a directory that cannot be read. This is the `onerror` of os.walk, which otherwise skips such
    a directory."""
    raise error


def checksums(place: Path, paths: Iterable[Path], *, sync: bool = False, missing: bool = False) -> dict[str, list]:
    """Return path relative to `place` -> [bytes, xxh3-128] of each file.

    sync: True for files just written, which are synced to disk; False: files are read with retries. missing: see
    `patiently`.
    """

    def checksum(path: Path) -> tuple[str, list]:
        digest, size = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(min(CHUNK_BYTES, os.stat(path).st_size + 1)))
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
            if sync:
                os.fsync(file.fileno())
        return str(path.relative_to(place)), [size, digest.hexdigest()]

    checksum_of = checksum if sync else lambda path: patiently(lambda: checksum(path), missing=missing)
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(threads.map(checksum_of, paths))


def difference(read: list, wanted: Any) -> str:
    """Return how a file differs from what was written, as text; "" if it does not. read, wanted: entries of
    `checksums`."""
    if read == wanted:
        return ""
    if isinstance(wanted, list) and read[0] != wanted[0]:
        return f"{read[0]} bytes, but {wanted[0]} were written"
    return "its checksum differs"


def write(path: Path, content: str | bytes) -> None:
    """Write a file and sync it to disk. Raises: OSError that names the file."""
    try:
        with open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def remove(place: Path) -> OSError | None:
    """Remove a directory, with retries, even while other processes remove it. Return the error if a part of the
    directory remains. The rest is harmless, because the caller has already removed the directory's name or index."""
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
    """Replace the content of a file atomically and sync it to disk.

    shared: whether several processes may write the file at the same time; if so, the directory is synced, too, and a
    failed write leaves no temporary file.
    """
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
    """Return the first of NAME, NAME-2, NAME-3, … that is not taken."""
    names = (f"{name}-{i}" if i > 1 else name for i in itertools.count(1))
    return next(candidate for candidate in names if not is_taken(candidate))


def set_aside(path: Path, suffix: str) -> str:
    """Rename a file or directory to NAME.suffix, or to NAME.suffix-2 if that is taken, and so on. Return the new name.
    """
    kept = free_name(f"{path.name}.{suffix}", lambda name: path.with_name(name).exists())
    path.rename(path.with_name(kept))
    return kept


def sync(directory: Path) -> None:
    """Sync a directory to disk, so that the names of its files are durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe(error: BaseException) -> str:
    """Return an error as one line of text: the message of the system, and the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if code := re.search(r"os_error_code='(\d+)'", text):  # tensorstore's way to report a full disk
        return os.strerror(int(code[1]))
    return text if type(error).__module__.startswith("meshtrain.") else f"{type(error).__name__}: {text[:300]}"


class Beat:
    """A thread that calls `write` every `every_s` seconds until `close`.

    An error of the file system is ignored until the next call; so is any other error, which is reported once. The
    heartbeat continues while the main thread hangs, so `write` has to write a sign of the main thread's progress.
    """

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
            except BaseException as error:      # panics of libraries in Rust are no Exception
                if not told:
                    notices.tell(f"{getattr(self._write, '__qualname__', self._write)}: {describe(error)}; retrying")
                told = True

    def close(self) -> None:
        self._closed.set()
