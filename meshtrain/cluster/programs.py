"""Keeps compiled programs for the next start in run.compilation_cache, a directory that only this user may write.

Only process 0 writes jax's own cache. The other processes would compile again at each start if hosts do not share the
directory, and on CPUs, where keys differ between processes. In these cases each process has its own jax cache for each
program. A program is taken from this cache only if every process has one: on GPUs a process that compiles waits for the
autotuning results of the others. A program is machine code: whoever writes one runs code in all processes that load it.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain import files, jax_private
from meshtrain.cluster import agree

FOLDER = "processes"        # in run.compilation_cache
PROFILES = "profiles"       # beside it: files that XLA reads while it compiles
MOST_KEPT = 64              # entries in each of the two folders, of all processes and runs
SUMS = "sums.json"          # of a program's files; written last


def distrust(directory: Path) -> str:
    """Create the directory for this user alone, if it does not exist. Return why other users may write to the
    directory, in words that follow its name; "" if no other user may. Raises: OSError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod 700 prevents that)"
    return ""


def compile(lowered: jax.stages.Lowered, options: dict, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Return `lowered.compile(options)`, or the same program from an earlier start. devices: the devices that run it.
    All processes call it."""
    directory = jax.config.jax_compilation_cache_dir
    if jax.process_count() == 1 or not directory or (
            devices[0].platform != "cpu" and _is_shared(Path(directory))):
        return lowered.compile(compiler_options=options)
    place = Path(directory) / FOLDER / f"{_key(lowered, options, devices)}-{jax.process_index()}"
    if all(agree.exchange(_is_whole(place))):
        with jax_private.programs_kept_in(place):
            return lowered.compile(compiler_options=options)
    files.remove(place)
    with jax_private.programs_kept_in(place):
        executable = lowered.compile(compiler_options=options)
    with contextlib.suppress(OSError):      # best effort: a start that finds no program compiles it
        files.replace(place / SUMS, json.dumps(_sums(place)))
        _drop_old(place.parent)
    return executable


def _sums(place: Path) -> dict[str, list]:
    return files.checksums(place, [path for path in place.iterdir() if path.name != SUMS])


def _is_whole(place: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        if not distrust(place.parent) and json.loads((place / SUMS).read_text(encoding="utf-8")) == _sums(place):
            os.utime(place)
            return True
    return False


def keep_profile(content: str) -> Path | None:
    """Write a profile for XLA; return its path, or None if any process cannot write it. All processes call it.

    The path is a function of the content. The path is a compiler option, and compiler options are part of the key by
    which the next start finds the compiled program.
    """
    directory = jax.config.jax_compilation_cache_dir or Path(tempfile.gettempdir()) / f"meshtrain-{os.getuid()}"
    path = Path(directory) / PROFILES / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.pbtxt"
    written = False
    with contextlib.suppress(OSError):
        if not distrust(path.parent.parent) and not distrust(path.parent):
            files.replace(path, content, shared=True)
            written = True
    _drop_old(path.parent)
    return path if all(agree.exchange(written)) else None


@functools.cache
def _is_shared(directory: Path) -> bool:
    """Return whether all processes see the same directory. All processes call it."""
    name = agree.on_first(lambda: f".{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        if jax.process_index() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()
    agree.exchange(None)
    seen = all(agree.exchange((directory / name).exists()))
    with contextlib.suppress(OSError):
        if jax.process_index() == 0:
            (directory / name).unlink()
    return seen


def _key(lowered: jax.stages.Lowered, options: dict, devices: Sequence[jax.Device]) -> str:
    """Return a hash of all that the compiled program depends on, except what jax's own keys in the directory cover."""
    parts = [lowered.as_text(), sorted((key, str(value)) for key, value in options.items()), jax.__version__,
             devices[0].client.platform_version, os.environ.get("XLA_FLAGS", "")]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _drop_old(directory: Path) -> None:
    with contextlib.suppress(OSError):
        newest_first = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in newest_first[MOST_KEPT:]:
            files.remove(old) if old.is_dir() else old.unlink(missing_ok=True)
