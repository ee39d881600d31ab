"""What a refusal of the file system means: the user's mistake, or a moment of the file system.

A name that is wrong, or that nobody may read or write, stays so until a person changes it: exit code 2. A shared file system
that answers ESTALE after a failover, a disk that is full, or a device that fails says nothing about the run file: the call is
made again with patience, then the run ends with exit code 1, and a launcher starts it again. MISTAKES is the whole rule.
This module imports nothing of meshtrain: every room may use it.
"""
from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from typing import TypeVar

# Lasting until somebody changes a name, a permission or a mount. Every other code (EIO, ESTALE, ETIMEDOUT, ENOTCONN, EBUSY,
# ENOTEMPTY, ENOSPC, EDQUOT, EMFILE, …) may be gone at the next call.
MISTAKES = frozenset({
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EROFS, errno.ELOOP,
    errno.EEXIST, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS,
    errno.ENOLCK})
PAUSES_S = (0.5, 2.0, 5.0)  # before each further try; an NFS client keeps attributes for up to 3 s (acregmin)
# Longer than a file server keeps the locks of a client that is gone: NFSv4 90 s (its lease), Lustre 100 s and more (eviction).
LOCK_WAIT_S, TELL_AGAIN_S = 300.0, 60.0
Value = TypeVar("Value")


class FileSystemError(OSError):
    """The file system refused something that is no mistake of the user's, and went on refusing it. The message says what."""


def is_mistake(error: OSError) -> bool:
    """Whether the same call would be refused again until a person changes something.

    True, too, for an error without a code: a library's judgement of a file's content, not the kernel's of a call.
    """
    return not isinstance(error, FileSystemError) and (error.errno is None or error.errno in MISTAKES)


def is_moment(error: BaseException) -> bool:
    """Whether the kernel refused a call on a file, and may do it at the next one."""
    return isinstance(error, OSError) and not isinstance(error, (ConnectionError, socket.gaierror)) and not is_mistake(error)


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
            time.sleep(pause_s)
    return act()


def status(path: str | os.PathLike) -> os.stat_result | None:
    """os.stat of `path`; None where nothing is there, nor can be by this name. Raises: FileSystemError; ValueError where the look is
    not permitted: neither says that nothing is there."""
    try:
        return patiently(lambda: os.stat(path))
    except OSError as error:
        if isinstance(error, PermissionError) or not is_mistake(error):
            raise judged(error, f"{path} cannot be looked at", "give the permission, or name another") from None
        return None
    except ValueError:      # a null in the name
        return None


def is_file(path: str | os.PathLike) -> bool:
    """Whether a regular file is there. Unlike os.path.isfile, no when the file system does not answer. Raises: see `status`."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_dir(path: str | os.PathLike) -> bool:
    """The same of a directory."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def judged(error: OSError, what: str, remedy: str, mistake: type[Exception] = ValueError) -> Exception:
    """What to raise for `error`, whose patience has ended: a `mistake` with the remedy, or FileSystemError, which is exit code 1.

    what: what could not be done, with the value: `data.paths: x.txt cannot be read`.
    """
    if isinstance(error, FileSystemError):
        return error
    reason = error.strerror or str(error)
    if is_mistake(error):
        return mistake(f"{what}: {reason}; {remedy}")
    return FileSystemError(f"{what}: {reason}; see to the file system (its room, its mounts, its server) and start again")


def attempted(act: Callable[[], Value], what: str, remedy: str, mistake: type[Exception] = ValueError) -> Value:
    """act(), with patience. Raises: see `judged`."""
    try:
        return patiently(act)
    except OSError as error:
        raise judged(error, what, remedy, mistake) from None


class Waiting:
    """A wait for a lock that somebody else holds: told, limited, and with the owner's name. The owner may be a host that is lost:
    its locks stay until the file server lets go of them.

    what: the value and that it is in use, for messages. tell: gets a line at once and every TELL_AGAIN_S.
    """

    def __init__(self, what: str, tell: Callable[[str], None]):
        self.what, self.tell = what, tell
        self._sign: object = None
        self._since = self._told = -float("inf")

    def go_on(self, owner: str, sign: object = None) -> None:
        """After each look that found the lock held. owner: in words, to follow `what`. sign: anything that changes while its owner
        works. Raises: FileSystemError after LOCK_WAIT_S without a change."""
        now = time.monotonic()
        if self._since < 0 or sign != self._sign:
            self._sign, self._since = sign, now
        if now - self._since > LOCK_WAIT_S:
            raise FileSystemError(f"{self.what}{owner}, and did not come free within {LOCK_WAIT_S:g} s; see whether that host is lost or "
                                  "still at work, and start again")
        if now - self._told >= TELL_AGAIN_S:
            self._told = now
            self.tell(f"{self.what}{owner}; waiting: if its host is lost, the file server frees the lock in some minutes")
