"""Finds the files of a source: matches globs, lists the standard library, and reads the sizes of files."""
from __future__ import annotations

import functools
import glob
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meshtrain import custom, files
from meshtrain.data.files import token_files
from meshtrain.shipped import find_file
from meshtrain.storage import addresses, copies

EXAMPLES = {"text": "corpus/**/*.txt", "jsonl": "corpus/*.jsonl.gz", "parquet": "corpus/*.parquet",
            "arrow": "corpus/*.arrow", "tokens": "corpus/*.tokens.npy", "chat": "chats/*.jsonl",
            "preferences": "pairs/*.jsonl", "prompts": "prompts/*.jsonl"}

OWN = "corpus/*"        # for code of the run's own

# Directories of the standard library that differ between installs of one version: tests that distributions strip,
# installed packages, and the build's configuration.
NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
NOT_STDLIB_PREFIXES = ("config-", "_sysconfigdata")


def list_paths(name: str, paths: Sequence[str], where: str) -> dict[str, str]:
    """Return the files of the source `name`, in document order: path -> searched directory. If the run's own code reads
    no files, the only path is the file of the code."""
    if custom.is_path(name) and not custom.count_arguments(name):
        file, _ = custom.split(name)
        return {str(file): ""}
    if name == "stdlib":
        root = sysconfig.get_path("stdlib")
        return dict.fromkeys(list_stdlib(root), root)
    return match_globs(paths, name, where)


def file_sizes(paths: Sequence[str], where: str) -> np.ndarray:
    """Return int64 [files], the size of each file in bytes. Raises: ValueError that lists every unreadable file."""
    faults, sizes = [], []
    for path in paths:
        try:
            sizes.append(files.attempt(lambda: _readable_size(path), f"{path} cannot be read",
                                       f"fix it or take it out of {where}.paths"))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return np.array(sizes, np.int64)


def _readable_size(path: str) -> int:
    """Return the bytes of a file that can be read. Raises: OSError."""
    size = os.stat(path).st_size
    if not os.access(path, os.R_OK):    # opening the file raises an error with the reason
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    return size


def match_globs(patterns: Sequence[str], name: str = "text", where: str = "data", key: str = "paths") -> dict[str, str]:
    """Return the files that globs match: path -> the directory before the glob's first wildcard, each file once,
    sorted. The name of an existing file is taken literally, brackets included. An address stays an address. name: the
    name of the source. where, key: section and key of the run file that has the globs."""
    if not patterns:
        raise ValueError(f"{where}.source={name!r} has no {where}.paths; give at least one file or glob, "
                         f'e.g. ["{EXAMPLES.get(name, OWN)}"]')
    found: dict[str, tuple[str, str]] = {}
    faults, real = [], resolver()
    for pattern in patterns:
        if addresses.is_remote(pattern):
            whole = name != "tokens" or pattern.endswith((".bin", token_files.TOKENS)) or glob.has_magic(pattern)
            try:
                found |= {path: (path, "") for path in copies.match(pattern if whole else f"{pattern}.bin")}
            except addresses.Refused as error:
                raise addresses.Refused(f"{where}.{key}: {error}") from None
            except addresses.StorageError as error:
                faults.append(f"{where}.{key}: {error}")
            continue
        wanted = str(find_file(os.path.expanduser(pattern)))
        literal = files.status(wanted) is not None
        # A file under two names would count twice, perhaps in both training and validation.
        root = os.path.dirname(wanted if literal else re.split(r"[*?[]", wanted)[0]) or "."
        matches = {}
        for path in [wanted] if literal else expand(wanted):
            if (target := real(path)) is not None:
                matches[target] = path, root
        if not matches:
            prefixed = {target: (path, root) for path in expand(f"{wanted}.bin") if (target := real(path)) is not None}
            matches = prefixed if name == "tokens" else {}      # Megatron names X.bin and X.idx by X
        found |= matches
        if matches:
            continue
        if files.is_dir(wanted):
            faults.append(f"{where}.{key}: {pattern!r} is a directory; name its files, e.g. "
                          f"{os.path.join(pattern, '**', os.path.basename(EXAMPLES.get(name, OWN)))!r}")
        else:
            near = "".join(f"; {path} exists, which {where}.source='tokens' reads" for path, _ in prefixed.values())
            faults.append(f"{where}.{key}: {pattern!r} matches no file (relative to {os.getcwd()}){near}")
    if faults:
        raise ValueError("\n".join(faults))
    return dict(found[path] for path in sorted(found))


def resolver() -> Callable[[str], str | None]:
    """Return a function like os.path.realpath for many files: None for a directory; an address is returned as it is.
    The function resolves each directory once, and then makes one system call per file."""
    directory = functools.cache(os.path.realpath)

    def resolve(path: str) -> str | None:
        if addresses.is_remote(path):
            return path
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            mode = 0        # removed since: reported when its size is read
        link = stat.S_ISLNK(mode)
        if stat.S_ISDIR(mode) or link and os.path.isdir(path):
            return None
        folder, name = os.path.split(path)
        return os.path.realpath(path) if link or name in ("", ".", "..") else os.path.join(directory(folder), name)
    return resolve


def expand(pattern: str) -> Iterator[str]:
    """Yield the same as glob.iglob(pattern, recursive=True), but visit each directory once: glob follows circular links
    40 levels deep, and two of them in a directory almost endlessly."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    place = parts.index("**")
    before, behind = os.sep.join(parts[:place]) + (os.sep if place else ""), os.sep.join(parts[place + 1:])
    for base in glob.iglob(before) if glob.has_magic(before) else [before] if os.path.isdir(before or ".") else []:
        for folder in _folders(base, frozenset()):
            yield from expand(os.path.join(glob.escape(folder), behind or "*"))


def _folders(folder: str, above: frozenset) -> Iterator[str]:
    """Yield a directory and those below it, except hidden ones and those in `above`."""
    try:
        status = os.stat(folder or ".")
        key = status.st_dev, status.st_ino
        if key in above:
            return
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return      # as glob does
    yield folder
    for name in names:
        yield from _folders(os.path.join(folder, name), above | {key})


def list_stdlib(root: str) -> list[str]:
    """Return the .py files under `root`, sorted, without tests and without files that differ between installs of one
    version."""
    def refuse(error: OSError):
        raise files.error_to_raise(error, f"{error.filename} cannot be read", "use data.source='text' with data.paths")

    def belongs(name: str) -> bool:
        return name not in NOT_STDLIB and not name.startswith(NOT_STDLIB_PREFIXES)

    paths = []
    for folder, folders, found_here in os.walk(root, onerror=refuse):
        folders[:] = filter(belongs, folders)
        # Skip links out of the library (Debian's sitecustomize.py into /etc).
        paths += [os.path.join(folder, name) for name in found_here if name.endswith(".py") and belongs(name)
                  and not os.path.islink(os.path.join(folder, name))]
    if not paths:
        raise ValueError(f"data.source='stdlib' finds no .py file under {root} (a zipped or stripped Python?); "
                         "use data.source='text' with data.paths")
    return sorted(paths)
