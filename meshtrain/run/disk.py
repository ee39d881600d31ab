"""Files on a disk that may be full, shared or gone for a moment: written until they are on it, read with patience.

Checksums are xxh3-128. An error of the file system is never taken for damage: NFS answers ESTALE after a failover, a host
may lack its mount, and what a process cannot read now another one can (`meshtrain.files` says which are tried again).
This module knows no checkpoint, run or process.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterable

import xxhash

from meshtrain import files

CHUNK_BYTES = 4 << 20  # read at once: larger than what keeps a disk busy, smaller than a core's share of the cache


def regular_files(place: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def checksums(place: pathlib.Path, paths: Iterable[pathlib.Path], *, sync: bool = False, missing: bool = False) -> dict[str, list]:
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

    one = checksum if sync else lambda path: files.patiently(lambda: checksum(path), missing=missing)
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(threads.map(one, paths))


def difference(found: list, wanted) -> str:
    """How a file differs from what was written, in words; empty if it does not."""
    if found == wanted:
        return ""
    if isinstance(wanted, list) and found[0] != wanted[0]:
        return f"{found[0]} bytes, {wanted[0]} were written"
    return "its checksum differs"


def write(path: pathlib.Path, text: str) -> None:
    """The file is on the disk when this returns. Raises: OSError that names the file."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def remove(place: pathlib.Path) -> OSError | None:
    """Removes a directory, with patience, also while other processes do. Returns why some of it stays, which does no harm: the
    caller has taken its name or its index."""
    refused: list[OSError] = []

    def act():
        refused.clear()
        shutil.rmtree(place, onerror=lambda call, path, info: refused.append(info[1]))
        if faults := [error for error in refused if files.is_moment(error)]:
            raise faults[0]
    with contextlib.suppress(OSError):
        files.patiently(act)
    return next((error for error in refused if not isinstance(error, FileNotFoundError)), None)


def replace(path: pathlib.Path, text: str) -> None:
    """The file has either its old text or, when this returns, all of the new."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary, text)
    temporary.replace(path)


def set_aside(path: pathlib.Path, suffix: str) -> str:
    """Renames a file or directory to NAME.suffix, or NAME.suffix-2 where that is taken; returns the new name."""
    names = (f"{path.name}.{suffix}{more}" for more in ("", *(f"-{i}" for i in range(2, 1000))))
    kept = next(name for name in names if not path.with_name(name).exists())
    path.rename(path.with_name(kept))
    return kept


def sync(directory: pathlib.Path) -> None:
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
