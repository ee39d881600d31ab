"""Checkpoints: asynchronous, whole or absent, checked before they are believed, and restorable on any other mesh.

Orbax writes and reads the arrays, under their paths (`params/layers/wq`, `opt_state/0/mu/…`); everything else is one JSON
object. A checkpoint holds no class, no function and no mesh: loading it runs no code, and each array is read back into
whatever sharding is asked for. The arrays are copied to the host before `save` returns, so the next step may donate them.

    <step>/           whole: state/ (orbax), metadata.json, and checksums.json: size and xxh3-128 of every other file
    .<step>.saving/   being written; renamed to <step> when all of it, checksums included, is on disk
    .<step>.deleting/ beyond `keep`: renamed first, so that half a checkpoint never stands under its number
    <step>.damaged/   its checksums did not hold; set aside for a person to look at

We commit ourselves, not by orbax's CheckpointManager: it has no checksums, and where one process fails to write, the
others wait at its barrier until it times out. Several processes share the directory; process 0 alone renames and deletes.

It must not know what the state means: any pytree of jax arrays will do.
"""

import asyncio
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from etils import epath
from jax.experimental import multihost_utils

from meshtrain.config import ConfigError

FORMAT = 2  # of the layout described above; a reader that meets a higher number refuses. 1 had no checksums.
CHECKSUMS, METADATA = "checksums.json", "metadata.json"
PEERS_TIMEOUT_S = 3600  # a process that has not written its part by then holds up nobody else
CHUNK_BYTES = 4 << 20  # read at once: larger than what keeps a disk busy, smaller than a core's share of the cache
TEXT_BYTES = 1024  # of a message from one process to all


class CheckpointError(OSError):
    """A checkpoint could not be saved. The message says which, where, and what the system said."""


class Checkpoints:
    """The checkpoints in one directory, each named by its step. Every process of a run makes one and calls it alike.

    Use it in a `with` statement: an interpreter that ends during a save gives that save up.

    every: steps between regular checkpoints, which `due` tells; 0: none are regular.
    keep: how many of the latest whole ones stay on disk; 0: all. The last is deleted only when a newer one is whole.
    read_only: for another run's directory: creates, cleans up, sets aside and saves nothing.
    tell: gets one line about each save that failed, as soon as it has (in a background thread), and each damaged checkpoint;
    None: stderr.

    Raises: ConfigError if the directory cannot be made or cleaned of what a killed run left half written.
    """

    def __init__(self, directory: str | pathlib.Path, *, every: int = 0, keep: int = 0, read_only: bool = False,
                 tell: Callable[[str], None] | None = None):
        absl.logging.set_verbosity(absl.logging.FATAL)  # orbax logs 60 lines per save, two tracebacks per full disk
        self.directory = pathlib.Path(directory).absolute()  # orbax refuses relative paths
        self.every, self.keep, self.read_only, self.tell = every, keep, read_only, tell or _tell
        # Compressed, weights would be 8 % smaller, and saving them would take two to three times as long.
        self._arrays = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._thread: threading.Thread | None = None
        self._failure: str = ""  # of the last save; what process 0 has here counts for all
        self._step, self._saves = -1, 0  # the last that was to be saved; how often anything was
        fault = ""
        if not read_only and jax.process_index() == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._clean()
            except OSError as error:
                fault = f"{self.directory} cannot hold checkpoints: {_said(error)}; give a directory that can be written"
        if fault := _gather(fault)[0]:  # and no process goes on before the leftovers are gone
            raise _of_all(ConfigError(fault))

    def due(self, step: int) -> bool:
        """Whether a regular checkpoint belongs after this step."""
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Starts saving `state` (a pytree of jax arrays) and `metadata` (JSON) as `step`; returns the seconds it blocked.

        It blocks for the copy to the host, and before that for a save still under way. A step that is saved already stays as
        it is. A save that fails is told, leaves nothing behind and stops nobody: the next may work. `wait` raises if it was
        the last.
        """
        start = time.perf_counter()
        document = json.dumps({"format": FORMAT, **metadata})
        self._join()
        if step == self._step and not _gather(self._failure)[0]:
            return time.perf_counter() - start
        self._step, self._saves = step, self._saves + 1
        copied = threading.Event()
        self._thread = threading.Thread(target=self._save, args=(step, _nested(state), document, copied))
        self._thread.start()
        copied.wait()
        return time.perf_counter() - start

    def latest(self) -> int | None:
        """The step of the latest checkpoint whose checksums hold; None without one. Waits for a save under way.

        Reads all of that checkpoint, each process a part. Damaged ones are told, set aside and not used.
        Raises: ConfigError if there are checkpoints, but none is whole: a run would start from step 1 over them.
        """
        self.wait()
        rejected: set[int] = set()
        while True:
            # Process 0 looks, for all: on a shared file system not everybody sees a rename at the same moment.
            newest = _gather(str(max(set(self._steps()) - rejected, default="")))[0]
            if not newest:
                break
            fault = next(filter(None, _gather(self._fault(int(newest)))), None)
            if fault is None:
                return int(newest)
            rejected.add(int(newest))
            if jax.process_index() == 0:
                aside = self._set_aside(newest)
                self.tell(f"checkpoint {self.directory / newest} is damaged ({fault}){aside}; trying the one before")
        damaged = {path.name for path in self.directory.glob("*.damaged*")} | {str(step) for step in self._steps()}
        if damaged := _gather(", ".join(sorted(damaged)))[0]:
            raise _of_all(ConfigError(
                f"{self.directory} holds no whole checkpoint, only damaged ones ({damaged}); restore the files of one and "
                "give it its number as name again, or remove the directory to start from step 1"))
        return None

    def metadata(self, step: int) -> dict:
        """What `save` was given, and `format`. Reads no arrays: a resume checks it before it builds anything.

        Raises: ValueError if a newer version wrote it.
        """
        self._join()
        document = json.loads((self.directory / str(step) / METADATA).read_text())
        if document["format"] > FORMAT:
            where = self.directory / str(step)
            raise ValueError(f"{where} has checkpoint format {document['format']}, this version reads up to {FORMAT}: "
                             "update meshtrain")
        return document

    def arrays(self, step: int) -> dict:
        """What `step` holds: nested dicts of jax.ShapeDtypeStruct under the names of the paths, without shardings."""
        tree = self._arrays.metadata(self._state(step)).tree
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

    def restore(self, step: int, abstract_state: Any, *, part: bool = False) -> tuple[Any, dict]:
        """The state and metadata saved as `step`, the arrays on the shardings that `abstract_state` asks for.

        abstract_state: a pytree of jax.ShapeDtypeStruct with shardings, of any mesh. Its structure is what comes back.
        part: it may lack arrays that the checkpoint has (only {"params": …}: a new run from old weights).

        Raises: ValueError that lists every array whose presence, shape or dtype differs; none is reshaped or cast in silence.
        """
        metadata = self.metadata(step)
        self._check(step, abstract_state, part)
        nested = _nested(abstract_state)
        restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
        args = ocp.args.PyTreeRestore(nested, restore_args=restore_args, partial_restore=part)
        arrays = self._arrays.restore(self._state(step), args=args)
        return jax.tree.map_with_path(lambda path, _: _at(arrays, path), abstract_state), metadata

    def wait(self) -> None:
        """Returns when nothing is being written, by any process. Raises: CheckpointError if the last save failed."""
        self._join()
        if failure := _gather(self._failure)[0]:
            raise _of_all(CheckpointError(failure))

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        # With an exception on its way the others may never come to the exchange in wait().
        self.wait() if kind is None else self._join()

    def _state(self, step):
        return epath.Path(self.directory / str(step) / "state")

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self.directory.glob("[0-9]*") if path.name.isdecimal()]

    def _join(self):
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, step, state, document, copied):
        """In the background, by every process: writes its part; process 0 then commits."""
        place, index = self.directory / f".{step}.saving", jax.process_index()
        error = None
        try:
            (place / "state").mkdir(parents=True, exist_ok=True)  # by whoever comes first
            writing = asyncio.run(self._arrays.async_save(epath.Path(place / "state"), args=ocp.args.PyTreeSave(state)))
            copied.set()
            for future in writing or ():
                future.result()
            mine = _files(place / "state" / f"ocdbt.process_{index}")
            _write(place / f"part-{index}.json", json.dumps(_checksums(place, mine, sync=True)))
        except Exception as caught:  # tensorstore reports a full disk as ValueError; nothing that goes wrong here may be lost
            error = caught
        finally:
            copied.set()
        try:
            # Whether it succeeded or not: what a process has not told by its part-….json by now, it has not got.
            ocp.multihost.get_barrier_sync_fn()(key=f"checkpoint {step} {self._saves}", timeout_ms=PEERS_TIMEOUT_S * 1000)
            if index == 0 and error is None:
                self._commit(step, place, document)
        except Exception as caught:
            error = caught
        self._failure = ""
        if error is not None:
            self._failure = f"checkpoint of step {step} not saved in {self.directory}: {_said(error)}"
            self.tell(self._failure)
        if index == 0:
            self._retire(step)

    def _commit(self, step, place, document):
        parts = [place / f"part-{index}.json" for index in range(jax.process_count())]
        if missing := [str(index) for index, part in enumerate(parts) if not part.exists()]:
            raise CheckpointError(f"process {', '.join(missing)} did not write its part (its output says why)")
        _write(place / METADATA, document)
        self._arrays.finalize(epath.Path(place / "state"))  # merges the indexes of the processes' parts
        checksums = {}
        for part in parts:
            checksums |= json.loads(part.read_text())
            part.unlink()
        files = [str(path.relative_to(place)) for path in _files(place)]
        checksums = {name: checksums[name] for name in files if name in checksums}
        checksums |= _checksums(place, (place / name for name in files if name not in checksums), sync=True)
        _write(place / CHECKSUMS, json.dumps(checksums))
        for directory in {path.parent for path in _files(place)} | {place}:
            _sync(directory)
        if not (self.directory / str(step)).exists():
            place.rename(self.directory / str(step))
            _sync(self.directory)

    def _retire(self, step):
        """Removes the checkpoints beyond `keep`, and what a failed save left behind (on a full disk: half a checkpoint)."""
        try:
            for old in sorted(self._steps())[: -self.keep] if self.keep else ():
                (self.directory / str(old)).rename(self.directory / f".{old}.deleting")
            self._clean(step)
        except OSError as error:
            self.tell(f"what is left of old checkpoints in {self.directory} cannot be removed: {_said(error)}")

    def _clean(self, up_to: int | None = None):
        """Removes what is half written (of no later step: other processes may already be writing that) or half deleted."""
        for path in self.directory.glob(".*"):
            name = re.fullmatch(r"\.(\d+)\.(saving|deleting)", path.name)
            if name and (up_to is None or int(name[1]) <= up_to):
                shutil.rmtree(path)

    def _fault(self, step: int) -> str:
        """What is wrong with this process's share of the checkpoint's files; empty if nothing."""
        place = self.directory / str(step)
        if not (place / CHECKSUMS).exists() and (place / "_CHECKPOINT_METADATA").exists():
            raise _of_all(ConfigError(f"{place} was written by an earlier version, without checksums, which this one does not "
                                      "read; finish the run with that version, or start a new one"))
        try:
            checksums = json.loads((place / CHECKSUMS).read_text())
            names = sorted(checksums)[jax.process_index():: jax.process_count()]
            found = _checksums(place, (place / name for name in names))
            wrong = (name for name in names if found[name] != checksums[name])
            return next((f"{name}: {_difference(found[name], checksums[name])}" for name in wrong), "")
        except FileNotFoundError as error:
            return f"{os.path.relpath(error.filename, place)} is missing"
        except OSError as error:
            return _said(error)
        except (ValueError, TypeError) as error:
            return f"{CHECKSUMS}: {error}"

    def _set_aside(self, name: str) -> str:
        if self.read_only:
            return ""
        for kept in (f"{name}.damaged", *(f"{name}.damaged-{i}" for i in range(2, 1000))):
            if not (self.directory / kept).exists():
                break
        try:
            (self.directory / name).rename(self.directory / kept)
        except OSError as error:
            return f", cannot be set aside: {_said(error)}"
        return f", kept as {kept}"

    def _check(self, step, abstract_state, part):
        stored = _forms(self.arrays(step))
        wanted = _forms(abstract_state)
        show = lambda entry: "absent" if entry is None else f"{entry[1]}{list(entry[0])}"
        names = wanted.keys() if part else wanted.keys() | stored.keys()
        differences = [
            f"  {name}: {show(stored.get(name))} in the checkpoint, {show(wanted.get(name))} in this run"
            for name in sorted(names)
            if stored.get(name) != wanted.get(name)
        ]
        if differences:
            where = f"{self.directory / str(step)} does not fit this run (another model or optimizer?):"
            raise ValueError("\n".join([where, *differences]))


def _files(place: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def _checksums(place: pathlib.Path, paths: Iterable[pathlib.Path], sync: bool = False) -> dict[str, list]:
    """Name within `place` -> [bytes, xxh3-128] of each file. sync: each is on the disk when this returns."""

    def checksum(path):
        digest, size = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
            if sync:
                os.fsync(file.fileno())
        return str(path.relative_to(place)), [size, digest.hexdigest()]

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(threads.map(checksum, paths))


def _difference(found, wanted) -> str:
    if isinstance(wanted, list) and found[0] != wanted[0]:
        return f"{found[0]} bytes, {wanted[0]} were written"
    return "its checksum differs"


def _write(path: pathlib.Path, text: str):
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: pathlib.Path):
    """A name is on the disk when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _said(error: BaseException) -> str:
    """An error in one line, for people: what the system said, and about which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if code := re.search(r"os_error_code='(\d+)'", text):  # tensorstore's way to report a full disk
        return os.strerror(int(code[1]))
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text[:300]}"


def _tell(text: str):
    print("\n" * sys.stdout.isatty() + text, file=sys.stderr, flush=True)  # below a progress line that stands there


def _of_all(error: Exception) -> Exception:
    """Marks an error that every process raises: process 0 tells it, and all end in order (meshtrain.processes)."""
    error.agreed = True
    return error


def _gather(text: str) -> list[str]:
    """What each process gave, the same list in all of them. Moves TEXT_BYTES per process; nothing where there is one."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"), np.uint8)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in multihost_utils.process_allgather(data)]


def _keys(path):
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _forms(tree):
    """Name -> (shape, dtype) of every array."""
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(_keys(path)): (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in leaves}


def _nested(tree):
    """The leaves of any pytree in nested dicts under the names of their paths; empty containers vanish."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        *parents, name = _keys(path)
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return nested


def _at(nested, path):
    for key in _keys(path):
        nested = nested[key]
    return nested
