"""Compiled programs that each of several processes keeps for its next start, in run.compilation_cache.

jax's own cache is written by process 0 alone: where hosts do not share the directory, and on CPUs, whose keys differ
between processes, all others would compile again at each start. There a program is taken from here, but only where
every process has its own: on GPUs a process that compiles waits for what the others tune. Only this host's user may
write there, as in jax's cache: a program is loaded as it is.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import xxhash
from jax.experimental import serialize_executable

from meshtrain import files
from meshtrain.cluster import agree

FOLDER = "processes"        # in run.compilation_cache
PROFILES = "profiles"       # beside it: files that XLA reads while it compiles
MOST_KEPT = 64              # files of each, of all processes and runs
FAST_S = 0.3                # what is compiled in less is not kept
APART = {"xla_hlo_graph_sharding_color": True}      # of drawings of the program, which nobody asks for


def compiled(lowered: jax.stages.Lowered, options: dict, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """`lowered.compile(options)`, or what an earlier start has made of the same. devices: of the program, in its order.
    All processes call it."""
    directory = jax.config.jax_compilation_cache_dir
    if jax.process_count() == 1 or not directory or (
            devices[0].platform != "cpu" and _is_shared(Path(directory))):
        return lowered.compile(compiler_options=options)
    path = Path(directory) / FOLDER / f"{_key(lowered, options, devices)}-{jax.process_index()}"
    content, loaded = _read(path), None
    if all(agree.exchange(content is not None)):
        with contextlib.suppress(Exception):       # of a version or a machine that the key does not tell apart
            loaded = serialize_executable.deserialize_and_load(
                content, lowered.in_tree, lowered.out_tree, devices[0].client, list(devices))
        if all(agree.exchange(loaded is not None)):
            return loaded
    began, limit = time.perf_counter(), jax.config.jax_persistent_cache_min_compile_time_secs
    # What jax's cache has loaded cannot be serialized again: an option by which it takes this for another program.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        executable = lowered.compile(compiler_options=options | APART)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)
    if any(agree.exchange(time.perf_counter() - began > FAST_S)):
        _keep(path, executable)
    return executable


def kept_profile(content: str) -> Path | None:
    """Write a profile for XLA to read, and return its path. All processes call it.

    The path follows from the content: it is an option of the compilation, and by its options a compiled program is
    found again at the next start. None if any process cannot write the file.
    """
    directory = jax.config.jax_compilation_cache_dir or Path(tempfile.gettempdir()) / f"meshtrain-{os.getuid()}"
    path = Path(directory) / PROFILES / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.pbtxt"
    written = False
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.replace(path, content, shared=True)
        written = True
    _drop_old(path.parent)
    return path if all(agree.exchange(written)) else None


@functools.cache
def _is_shared(directory: Path) -> bool:
    """Whether all processes see the same directory. All processes call it."""
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
    """Of all that the compiled program depends on."""
    client = devices[0].client
    host = [platform.machine(), _cpu()] if client.platform == "cpu" else []
    parts = [lowered.as_text(), sorted((key, str(value)) for key, value in options.items()),
             jax.__version__, importlib.metadata.version("jaxlib"), client.platform_version,
             os.environ.get("XLA_FLAGS", ""),
             [(device.id, device.process_index, device.device_kind) for device in devices], host,
             str(jax.config.values)]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _cpu() -> str:
    """What the processor can do, for which programs are compiled."""
    with contextlib.suppress(OSError):
        return next((line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
                     if line.startswith(("flags", "Features"))), "")
    return ""


def _read(path: Path) -> bytes | None:
    """None where there is none, or it is damaged."""
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if content[:16] == xxhash.xxh3_128_digest(content[16:]):
            os.utime(path)
            return content[16:]
    return None


def _keep(path: Path, executable: jax.stages.Compiled) -> None:
    """Best effort: a start that finds none compiles."""
    with contextlib.suppress(Exception):
        content, *_ = serialize_executable.serialize(executable)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, xxhash.xxh3_128_digest(content) + content, shared=True)
        _drop_old(path.parent)


def _drop_old(directory: Path) -> None:
    with contextlib.suppress(OSError):
        found = sorted(directory.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in found[MOST_KEPT:]:
            old.unlink(missing_ok=True)
