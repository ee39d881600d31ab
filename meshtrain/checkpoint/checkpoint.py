"""Checkpoints: asynchronous, whole or absent, checked before they are believed, and restorable on any other mesh.

Orbax writes and reads the arrays, under their paths (`params/layers/wq`, `opt_state/0/mu/…`); everything else is one
JSON object. A checkpoint holds no class, no function and no mesh: loading it runs no code, and each array is read back
into whatever sharding is asked for. The arrays are copied to the host before `save` returns, so the next step may
donate them.

    <step>/           whole: params/ and state/ (orbax; what lies below the key params, and all else), metadata.json,
                      and checksums.json: size and xxh3-128 of every other file
    .<step>.saving/   being written, see `commit`; renamed to <step> when all of it, checksums included, is on disk
    .<step>.deleting-<hex>/  to be removed: renamed first, so that half a checkpoint never stands under its number
    <step>.damaged/   its checksums did not hold; set aside for a person to look at
    <step>.aside/     whole, and later than the step that a run was told to go on from

We commit ourselves, not by orbax's CheckpointManager: it has no checksums, and where one process fails to write, the
others wait at its barrier until it times out. Several processes share the directory; process 0 alone renames and
deletes.

Weights are read by many (generate, evaluate, convert, runs that begin from them), the optimizer's states by the run
alone: what reads only weights reads and checks only params/. Beyond that it does not know what the state means: any
pytree of jax arrays will do.
"""
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from meshtrain import files
from meshtrain.checkpoint import commit
from meshtrain.checkpoint.commit import CHECKSUMS, FOLDERS, METADATA, PARAMS, STATE
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, older
from meshtrain.run import say, trees

# Of the layout described above; a reader that meets a higher number refuses. 1 had no checksums, 2 was of runs that
# read their data in another order, 3 had all arrays in state/.
FORMAT = 4
PEERS_TIMEOUT_S = 3600  # a process that has not written its part by then holds up nobody else
MAX_FAILED_SAVES = 3  # in a row: what is trained after them would be lost too


class CheckpointError(files.FileSystemError):
    """A checkpoint could not be saved or read. The message says which, where, and what the system said."""


class Store(Protocol):
    """Where a run keeps its state: `Checkpoints` for all hosts, `local.LocalTier` on each. Every process calls it
    alike."""

    def due(self, step: int) -> bool: ...

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving `state` (a pytree of jax arrays) and `metadata` (JSON); return the seconds that it blocked."""

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """The arrays of `step` on the shardings of `wanted`, a pytree of jax.ShapeDtypeStruct. part: of those that are
        kept."""


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """A whole checkpoint in its store, opened: `metadata` was read once, by process 0 for all."""
    store: Store
    step: int
    metadata: dict

    @property
    def run(self) -> dict:
        """Section -> key -> value of the run that saved it."""
        return older.translated(self.metadata["run"], saved=True)

    def param_shapes(self) -> dict:
        """Of a checkpoint in `Checkpoints`: nested dicts of jax.ShapeDtypeStruct without shardings."""
        return self.store.arrays(self.step, only_params=True)[PARAMS]

    def restore(self, wanted: Any, *, part: bool = False) -> Any:
        return self.store.restore(self.step, wanted, part=part)


class Checkpoints:
    """The checkpoints in one directory, each named by its step. Every process of a run makes one and calls it alike.

    Use it in a `with` statement: an interpreter that ends during a save gives that save up.

    every: steps between regular checkpoints, which `due` tells; 0: none are regular.
    keep: how many of the latest whole ones stay on disk; 0: all. The last is deleted only when a newer one is whole.
    read_only: for another run's directory: creates, cleans up, sets aside and saves nothing.
    tell: gets one line about each save that failed, as soon as it has (in a background thread), and each damaged
    checkpoint; None: stderr.
    still_ours: raises FileSystemError where another start has claimed the directory. It is asked before anything is
    written, renamed or removed.

    Raises: ConfigError if the directory cannot be made, FileSystemError if the file system refuses.
    """

    def __init__(self, directory: str | pathlib.Path, *, every: int = 0, keep: int = 0, read_only: bool = False,
                 tell: Callable[[str], None] | None = None, still_ours: Callable[[], None] = lambda: None):
        # orbax logs 60 lines per save, a traceback for each array that a full disk refuses
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if not isinstance(sys.unraisablehook, _Unraisable):
            sys.unraisablehook = _Unraisable(sys.unraisablehook)
        self.directory = pathlib.Path(directory).absolute()  # orbax refuses relative paths
        self.every, self.keep, self.read_only, self.tell = every, keep, read_only, tell or say.err
        # whether something is yet to be made from a step, see `_retire`
        self.owes: Callable[[int], bool] = lambda step: False
        self.still_ours, self._lost = still_ours, False
        # Compressed, weights would be 8 % smaller, and saving them would take two to three times as long.
        self._arrays = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._thread: threading.Thread | None = None
        self._failure, self._failed = "", 0  # of the last save, and how many failed in a row; process 0's count for all
        self._step, self._saves = -1, 0  # the last that was to be saved; how often anything was
        if not read_only:
            agree.on_first(self._open)      # and no process goes on before the leftovers are gone

    def _open(self) -> None:
        files.attempted(lambda: self.directory.mkdir(parents=True, exist_ok=True),
                        f"{self.directory} cannot hold checkpoints",
                        "give a directory that can be written", ConfigError)
        try:
            self._clean()
        except OSError as error:    # it cannot be renamed: the next save would write into it
            raise files.judged(error,
                               f"{self.directory} cannot hold checkpoints: what a save left there cannot be renamed",
                               "give a directory that can be written", ConfigError) from None

    def due(self, step: int) -> bool:
        """Whether a regular checkpoint belongs after this step."""
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Starts saving `state` (a pytree of jax arrays) and `metadata` (JSON) as `step`; returns the seconds it
        blocked.

        It blocks for the copy to the host, and before that for a save still under way. A step that is saved already
        stays as it is. A save that fails is told, leaves nothing behind and stops nobody: the next may work. `wait`
        raises if it was the last.

        Raises: CheckpointError if this is the last of MAX_FAILED_SAVES in a row that failed; it waits for that one.
        """
        start = time.perf_counter()
        document = json.dumps({"format": FORMAT, **metadata})
        self._join()
        failed, lost = agree.exchange([self._failed, self._lost])[0]
        if lost:
            self.wait()     # raises
        # What was saved and has been set aside since, because it was damaged or the run went back, is saved again.
        if step == self._step and not failed and agree.on_first((self.directory / str(step)).exists):
            return time.perf_counter() - start
        self._step, self._saves = step, self._saves + 1
        # Of a save that failed tensorstore may still be writing: the next one has a directory of its own.
        place = self.directory / f".{step}.saving{f'-{self._saves}' if failed else ''}"
        copied = threading.Event()
        self._thread = threading.Thread(target=self._save,
                                        args=(step, place, trees.nested(trees.leaves_of(state)), document, copied))
        self._thread.start()
        copied.wait()
        if failed + 1 >= MAX_FAILED_SAVES:
            self._join()
            if failure := agree.exchange(self._failure)[0]:
                raise agree.agreed(CheckpointError(
                    f"{failure}; {failed + 1} saves in a row have failed, and the run stops before it loses more: see "
                    f"to {self.directory} and start again, it goes on from the last checkpoint that was saved"))
        return time.perf_counter() - start

    def latest(self, *, only_params: bool = False) -> int | None:
        """The step of the latest checkpoint whose checksums hold; None without one. Waits for a save under way.

        Reads all of that checkpoint, or its params, each process a part. Damaged ones are told, set aside and not used.
        Raises: ConfigError if there are checkpoints, but none is whole: a run would start from step 1 over them.
        CheckpointError if one cannot be read; it stays as it is.
        """
        found = self.newest(only_params=only_params)
        return found and found.step

    def newest(self, nearer: Callable[[int], Saved | None] = lambda after: None, *,
               only_params: bool = False) -> Saved | None:
        """The latest checkpoint, opened, see `latest`; or what `nearer` has.

        nearer: gives what is newer than the checkpoint of a step (0: there is none) and kept elsewhere. It is asked
        before a checkpoint is read, and again after one that was damaged.
        """
        self.settle()
        steps, gone = self.steps(), set()
        while True:
            steps = [step for step in steps if step not in gone]
            newest = max(steps, default=0)
            if (found := nearer(newest)) is not None:
                return found
            if not steps:
                break
            fault = self.fault(newest, only_params=only_params)
            if not fault:
                return self.open(newest)
            gone.add(newest)
            if self.read_only and newest not in (now := self.steps()):     # by the run that writes here: `keep`
                steps = now
                continue
            if jax.process_index() == 0:
                self.tell(f"checkpoint {self.directory / str(newest)} is damaged ({fault}){self._put_away(newest)}; "
                          "trying the one before")
        damaged = {path.name for path in self.directory.glob("*.damaged*")} | {str(step) for step in self._steps()}
        if damaged := agree.exchange(", ".join(sorted(damaged)))[0]:
            raise agree.agreed(ConfigError(
                f"{self.directory} holds no whole checkpoint, only damaged ones ({damaged}); restore the files of one "
                f"and give it its number as name again, or remove the directory to start from step 1"))
        return None

    def steps(self) -> list[int]:
        """The steps that are saved, in order, whole or damaged. Process 0 looks for all: on a shared file system not
        everybody sees a rename at the same moment."""
        return agree.on_first(lambda: sorted(self._steps()))

    def set_aside_after(self, step: int) -> list[str]:
        """Renames all checkpoints later than `step`, so that no run goes on from them; returns their new names."""
        def set_aside():
            later = [one for one in sorted(self._steps()) if one > step]
            return [files.attempted(lambda: self._set_aside(one, "aside"),
                                    f"{self.directory / str(one)} cannot be set aside",
                                    "give a directory that can be written", ConfigError) for one in later]
        return agree.on_first(set_aside)

    def open(self, step: int) -> Saved:
        """The checkpoint of a step with what `save` was given, and `format`. Reads no arrays.

        Raises: ConfigError if a newer version wrote it; CheckpointError if it cannot be read.
        """
        self._join()
        return Saved(self, step, agree.on_first(lambda: self._metadata(self.directory / str(step))))

    def _metadata(self, place: pathlib.Path) -> dict:
        with _reading(place):
            document = json.loads(files.patiently((place / METADATA).read_text, missing=True))
        if document["format"] > FORMAT:
            raise ConfigError(f"{place} has checkpoint format {document['format']}, this version reads up to {FORMAT}: "
                              f"update meshtrain")
        return document

    def arrays(self, step: int, *, only_params: bool = False) -> dict:
        """What `step` holds, or its params: nested dicts of jax.ShapeDtypeStruct under the names of the paths, without
        shardings."""
        stored = self._stored(step, only_params).values()
        return {key: tree for one in stored for key, tree in one.items()}

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """The state saved as `step`, its arrays on the shardings that `wanted` asks for.

        wanted: a pytree of jax.ShapeDtypeStruct with shardings, of any mesh. Its structure is what comes back.
        part: it may lack arrays that the checkpoint has (only {"params": …}: a new run from old weights).

        Raises: ValueError that lists every array whose presence, shape or dtype differs; none is reshaped or cast in
        silence; CheckpointError if they cannot be read.
        """
        nested, arrays = trees.nested(trees.leaves_of(wanted)), {}
        stored = self._stored(step, only_params=part and nested.keys() <= {PARAMS})
        self._check(step, stored, wanted, part)
        for folder, there in stored.items():
            if of_folder := {key: tree for key, tree in nested.items() if key in there}:
                restore_args = ocp.checkpoint_utils.construct_restore_args(of_folder)
                args = ocp.args.PyTreeRestore(of_folder, restore_args=restore_args, partial_restore=part)
                with _reading(self.directory / str(step)):
                    arrays |= self._arrays.restore(folder, args=args)
        leaves = trees.leaves_of(arrays)
        return jax.tree.map_with_path(lambda path, _: leaves[trees.name(path)], wanted)

    def settle(self) -> None:
        """Returns when nothing is being written, by any process. A save that failed was told."""
        self._join()
        agree.exchange(None)

    def wait(self) -> None:
        """Returns when nothing is being written, by any process. Raises: CheckpointError if the last save failed."""
        self._join()
        if failure := agree.exchange(self._failure)[0]:
            raise agree.agreed(CheckpointError(failure))

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        # With an exception on its way the others may never come to the exchange in wait().
        self.wait() if kind is None else self._join()

    def _stored(self, step, only_params: bool) -> dict[epath.Path, dict]:
        """Folder of `step` -> its arrays, in nested dicts of jax.ShapeDtypeStruct; where params lie apart, of them
        alone."""
        place = self.directory / str(step)
        form = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        with _reading(place):
            there = files.patiently(lambda: os.listdir(place), missing=True)
            folders = [name for name in FOLDERS if name in there]
            return {folder: jax.tree.map(form, self._arrays.metadata(folder).tree)
                    for folder in (epath.Path(place / name) for name in folders[:1 if only_params else None])}

    def _steps(self) -> list[int]:
        try:
            names = files.patiently(lambda: os.listdir(self.directory))
        except FileNotFoundError:
            return []
        except OSError as error:  # and not: no checkpoints
            raise CheckpointError(f"{self.directory} cannot be read: {files.said(error)}") from error
        return [int(name) for name in names if name.isdecimal()]

    def _join(self):
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, step, place, state, document, copied):
        """In the background, by every process: writes its part; process 0 then commits."""
        index = jax.process_index()
        key, error = f"checkpoint {step} {self._saves}", None
        try:
            self.still_ours()
            writing = asyncio.run(self._write(place, state))
            copied.set()
            for future in writing:
                future.result()
            commit.hand_over(place, index)
        except Exception as caught:     # tensorstore reports a full disk as ValueError; nothing may be lost
            error = caught
            agree.leave_word(f"{key} {index}", files.said(error))
        finally:
            copied.set()
        try:
            # Whether it succeeded or not: what a process has not handed over by now, it has not got.
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=PEERS_TIMEOUT_S * 1000)
            if index == 0 and error is None:
                self._commit(step, place, document, key)
        except Exception as caught:
            error = caught
        self._failure, self._failed = "", 0 if error is None else self._failed + 1
        if error is not None:
            self._lost = self._is_lost()
            self._failure = f"checkpoint of step {step} not saved in {self.directory}: {files.said(error)}"
        if index == 0 and not self._lost:  # before anything is said: a disk that is full may hold the log, too
            self._retire(step)
        if error is not None:
            self.tell(self._failure)

    async def _write(self, place, state) -> list:
        """Copies the arrays to the host and begins to write them; returns the futures of that."""
        writing = []
        for name, keys in ((PARAMS, {PARAMS} & state.keys()), (STATE, state.keys() - {PARAMS})):
            if keys:
                (place / name).mkdir(parents=True, exist_ok=True)   # by whoever comes first
                args = ocp.args.PyTreeSave({key: state[key] for key in state if key in keys})
                writing += await self._arrays.async_save(epath.Path(place / name), args=args) or ()
        return writing

    def _commit(self, step, place, document, key):
        merge = lambda folder: self._arrays.finalize(epath.Path(folder))    # the indexes of the processes' arrays
        commit.commit(place, jax.process_count(), document, merge, lambda index: agree.word(f"{key} {index}"))
        self.still_ours()
        if not (self.directory / str(step)).exists():
            place.rename(self.directory / str(step))
            files.sync(self.directory)

    def _is_lost(self) -> bool:
        """Whether another start has claimed the directory, as far as can be told."""
        try:
            self.still_ours()
        except files.FileSystemError:
            return True
        except OSError:
            pass
        return False

    def _retire(self, step):
        """Removes the checkpoints beyond `keep`, and what a failed save left behind (on a full disk: half a
        checkpoint).

        Those that are still owed something stay: as many as `keep`, and none once a save has failed, which may need
        their room.
        """
        try:
            self.still_ours()
            old = sorted(self._steps())[: -self.keep] if self.keep else []
            held = [] if self._failed else [one for one in old if self.owes(one)][-self.keep:]
            for one in old:
                if one not in held:
                    self._doom(self.directory / str(one), one)
            self._clean(step)
        except OSError as error:
            self._tell_left(error)

    def _clean(self, up_to: int | None = None):
        """Removes what is half written (of no later step: other processes may already be writing that) or half deleted.

        What cannot be removed is told and left: a file that is still open on NFS (.nfsXXXX), or that a process writes
        whose save failed. It has no name that a save or a start looks for. Raises: OSError where it cannot be renamed.
        """
        found = [(path, re.fullmatch(r"\.(\d+)\.(saving|deleting)(-\w+)?", path.name))
                 for path in self.directory.glob(".*")]
        for path, name in found:
            if name and (up_to is None or int(name[1]) <= up_to):
                try:
                    path = self._doom(path, int(name[1])) if name[2] == "saving" else path
                except OSError:
                    shutil.rmtree(path, ignore_errors=True)
                    if path.exists():
                        raise
                    continue
                if error := files.remove(path):
                    self._tell_left(error)

    def _doom(self, path: pathlib.Path, step: int) -> pathlib.Path:
        """Renames what is to be removed; returns its name."""
        return files.patiently(lambda: path.rename(self.directory / f".{step}.deleting-{secrets.token_hex(4)}"))

    def _tell_left(self, error: OSError) -> None:
        self.tell(f"what is left of old checkpoints in {self.directory} cannot be removed: {files.said(error)}")

    def fault(self, step: int, *, only_params: bool = False) -> str:
        """What is damaged in `step` or, where they lie apart, in its params, by what all processes find; empty if
        nothing.

        Damage is a size or a checksum that differs, or a file that process 0 misses too.
        Raises: CheckpointError where a file cannot be read, or is not there for others than process 0.
        """
        place = self.directory / str(step)
        found = agree.exchange(self._look(place, only_params))
        # Of the files that others miss, process 0 tells whether they are there.
        missing = {name: index for index, one in reversed(list(enumerate(found))) if (name := one.get("missing"))}
        there = agree.exchange(_there(place, missing) if jax.process_index() == 0 else [])[0]
        faults = {index: f"{one['file']}: {one['refused']}" for index, one in enumerate(found) if "refused" in one}
        faults |= {missing[name]: f"{name}: process 0 sees it, this host does not" for name in there}
        if faults:
            of = {index: f"process {index} ({found[index]['host']}): " if len(found) > 1 else "" for index in faults}
            raise agree.agreed(CheckpointError(
                f"{place} cannot be read, and nothing was changed: "
                f"{'; '.join(of[i] + text for i, text in faults.items())}. See that the file system is there on every "
                f"host, and that it may be read, and start again"))
        gone = [f"{name} is missing" for name in missing]
        return next((one["damaged"] for one in found if "damaged" in one), gone[0] if gone else "")

    def _look(self, place: pathlib.Path, only_params: bool) -> dict:
        """What this process finds of its share of the files: damaged, missing,
        refused (a file system that fails) or nothing."""
        first, here = jax.process_index() == 0, {"host": socket.gethostname()}
        try:
            wanted = json.loads(files.patiently((place / CHECKSUMS).read_text, missing=not first))
            if only_params and any(name.startswith(f"{PARAMS}/") for name in wanted):
                wanted = {name: entry for name, entry in wanted.items() if not name.startswith(f"{STATE}/")}
            names = sorted(wanted)[jax.process_index():: jax.process_count()]
            found = files.checksums(place, (place / name for name in names), missing=not first)
            wrong = (f"{name}: {text}" for name in names if (text := files.difference(found[name], wanted[name])))
            return here | {"damaged": text} if (text := next(wrong, "")) else here
        except FileNotFoundError as error:
            return here | {"missing": os.path.relpath(error.filename, place)}
        except OSError as error:
            file = os.path.relpath(error.filename, place) if error.filename else CHECKSUMS
            return here | {"refused": error.strerror or str(error), "file": file}
        except (ValueError, TypeError) as error:
            return here | {"damaged": f"{CHECKSUMS}: {error}"}

    def _put_away(self, step: int) -> str:
        """Sets a damaged checkpoint aside; what became of it, in words."""
        try:
            return "" if self.read_only else f", kept as {self._set_aside(step, 'damaged')}"
        except OSError as error:
            return f", cannot be set aside: {files.said(error)}"

    def _set_aside(self, step: int, suffix: str) -> str:
        """The name under which a checkpoint is kept from now on, no longer one to go on from."""
        return files.set_aside(self.directory / str(step), suffix)

    def _check(self, step, stored, abstract_state, part):
        stored = {name: form for tree in stored.values() for name, form in _forms(tree).items()}
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


class _Unraisable:
    """Python's hook, but silent about writes that end after their save has failed. tensorstore's threads answer an
    event loop that orbax made in a thread of its own, and has closed at the first failure: a traceback for each array
    that a full disk refuses. The failure itself is told by `_save`."""

    def __init__(self, before: Callable):
        self.before = before

    def __call__(self, unraisable) -> None:
        if str(getattr(unraisable, "exc_value", "")) != "Event loop is closed":
            self.before(unraisable)


@contextlib.contextmanager
def _reading(place: pathlib.Path):
    """What goes wrong while arrays are read is the disk's fault: their checksums held, and their shapes were
    compared."""
    try:
        yield
    except Exception as error:
        if not place.exists():
            raise CheckpointError(f"{place} was removed while it was read: the run that writes there keeps "
                                  f"checkpoint.keep of them; start again") from error
        raise CheckpointError(f"{place} cannot be read, and nothing was changed: {files.said(error)}") from error


def _there(place: pathlib.Path, names) -> list[str]:
    """Those of the files that this process sees, or cannot tell of."""
    def there(name):
        try:
            files.patiently(lambda: os.stat(place / name))
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True
    return [name for name in names if there(name)]


def _forms(tree):
    """Name -> (shape, dtype) of every array."""
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in trees.leaves_of(tree).items()}
