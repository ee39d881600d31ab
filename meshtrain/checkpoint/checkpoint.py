"""Checkpoints: asynchronous, atomic, checksummed, and restorable on any other mesh.

Orbax writes and reads the arrays by path (`params/layers/wq`, `opt_state/0/mu/…`); everything else is one JSON object.
A checkpoint contains no class, function or mesh: loading runs no code and restores into any sharding. `save` copies
the arrays to the host before it returns, so the next step may donate them.

    <step>/           complete: params/ and state/ (orbax arrays under the key params, and all others), metadata.json,
                      and checksums.json: size and xxh3-128 of every other file
    .<step>.saving/   being written, see `commit`; renamed to <step> when everything, checksums included, is on disk
    .<step>.deleting-<hex>/  being removed: renamed first, so that no partial checkpoint has its step's name
    <step>.damaged/   its checksums did not match; kept for inspection
    <step>.aside/     complete, but later than the step from which a run was told to resume

Orbax's CheckpointManager is not used to commit: it has no checksums, and if one process fails to write, the others
wait at its barrier until the timeout. Processes share the directory; only process 0 renames and deletes. Readers of
weights (generate, evaluate, convert, init_from) read and verify only params/. The state may be any pytree of jax
arrays.
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

# Version of the layout above; readers refuse higher ones. 1 had no checksums, 2 was of runs with another data order,
# 3 had all arrays in state/.
FORMAT = 4
PEERS_TIMEOUT_S = 3600  # waiting time for other processes' writes
MAX_FAILED_SAVES = 3  # consecutive ones; then training stops


class CheckpointError(files.FileSystemError):
    """A checkpoint could not be saved or read. The message has the step, the place and the system's error."""


class Store(Protocol):
    """Where a run saves its state: `Checkpoints` (shared) or `LocalCheckpoints` (per host). All processes make the same
    calls."""

    def due(self, step: int) -> bool: ...

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving `state` (a pytree of jax arrays) and `metadata` (JSON); return the seconds that it blocked."""

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """Restore arrays of `step` to the shardings of `wanted`, a pytree of jax.ShapeDtypeStruct. part: only some of
        them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """A complete checkpoint in its store. `metadata` was read once, by process 0 for all."""
    store: Store
    step: int
    metadata: dict

    @property
    def run(self) -> dict:
        """Section -> key -> value of the run that saved it."""
        return older.translated(self.metadata["run"], saved=True)

    def param_shapes(self) -> dict:
        """Nested dicts of jax.ShapeDtypeStruct without shardings; for `Checkpoints` only."""
        return self.store.arrays(self.step, only_params=True)[PARAMS]

    def restore(self, wanted: Any, *, part: bool = False) -> Any:
        return self.store.restore(self.step, wanted, part=part)


class Checkpoints:
    """The checkpoints in one directory, named by step. All processes make the same calls. Use it in a `with`
    statement: an interpreter that exits during a save abandons it.

    every: steps between regular checkpoints; 0: none. keep: number of newest complete checkpoints kept on disk; 0:
    all. The last is deleted only when a newer one is complete. read_only: for another run's directory; changes nothing
    there. tell: reports each failed save at once (from a background thread) and each damaged checkpoint; None: stderr.
    check_claim: raises FileSystemError if another start has claimed the directory; called before anything is written,
    renamed or removed.

    Raises: ConfigError if the directory cannot be made, FileSystemError if the file system fails.
    """

    def __init__(self, directory: str | pathlib.Path, *, every: int = 0, keep: int = 0, read_only: bool = False,
                 tell: Callable[[str], None] | None = None, check_claim: Callable[[], None] = lambda: None):
        # orbax logs 60 lines per save, a traceback for each array that a full disk refuses
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if not isinstance(sys.unraisablehook, _Unraisable):
            sys.unraisablehook = _Unraisable(sys.unraisablehook)
        self.directory = pathlib.Path(directory).absolute()  # orbax refuses relative paths
        self.every, self.keep, self.read_only, self.tell = every, keep, read_only, tell or say.err
        # whether a step is still needed, see `_retire`
        self.is_needed: Callable[[int], bool] = lambda step: False
        self.check_claim, self._claimed = check_claim, False
        # Compression would save 8 % of the weights' size and take two to three times as long.
        self._arrays = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._thread: threading.Thread | None = None
        self._failure, self._failed = "", 0  # of the last save; consecutive failures, counted by process 0
        self._step, self._saves = -1, 0  # last step whose save began; number of saves
        if not read_only:
            agree.on_first(self._open)      # all wait until leftovers are removed

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
        """Whether a regular checkpoint follows this step."""
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving `state` (a pytree of jax arrays) and `metadata` (JSON) as `step`; return the seconds blocked:
        for a save in progress and the copy to the host. A step that is already saved is kept.

        A failed save is reported and leaves nothing behind; training goes on, and `wait` raises if it was the last.
        Raises: CheckpointError if this is the last of MAX_FAILED_SAVES consecutive failures; it waits for that one.
        """
        start = time.perf_counter()
        document = json.dumps({"format": FORMAT, **metadata})
        self._join()
        failed, lost = agree.exchange([self._failed, self._claimed])[0]
        if lost:
            self.wait()     # raises
        # A step set aside since (damaged, or the run went back) is saved again.
        if step == self._step and not failed and agree.on_first((self.directory / str(step)).exists):
            return time.perf_counter() - start
        self._step, self._saves = step, self._saves + 1
        # tensorstore may still write to a failed save's directory, so each save has its own.
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

    def newest(self, newer_in: Callable[[int], Saved | None] = lambda after: None, *,
               only_params: bool = False) -> Saved | None:
        """The newest checkpoint whose checksums match, opened, or a newer one that `newer_in` returns; None if there
        are no checkpoints. Waits for a save in progress.

        Reads all of it, or its params, each process a part. Damaged ones are reported and set aside. newer_in: step ->
        a checkpoint newer than it (0: any) from another store. Called before a checkpoint is read, and again after a
        damaged one. Raises: ConfigError if there are checkpoints but none is complete: a run would restart from step 1
        over them. CheckpointError if one cannot be read; it is left as is.
        """
        self.settle()
        steps, gone = self.steps(), set()
        while True:
            steps = [step for step in steps if step not in gone]
            newest = max(steps, default=0)
            if (found := newer_in(newest)) is not None:
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
                self.tell(f"checkpoint {self.directory / str(newest)} is damaged ({fault})"
                          f"{self._set_damaged_aside(newest)}; trying the one before")
        damaged = {path.name for path in self.directory.glob("*.damaged*")} | {str(step) for step in self._steps()}
        if damaged := agree.exchange(", ".join(sorted(damaged)))[0]:
            raise agree.agreed(ConfigError(
                f"{self.directory} holds no whole checkpoint, only damaged ones ({damaged}); restore the files of one "
                f"and give it its number as name again, or remove the directory to start from step 1"))
        return None

    def steps(self) -> list[int]:
        """All saved steps in order, complete or damaged. Process 0 lists for all: renames on a shared file system are
        not visible everywhere at once."""
        return agree.on_first(lambda: sorted(self._steps()))

    def set_aside_after(self, step: int) -> list[str]:
        """Rename all checkpoints later than `step`, so that no run resumes from them; return their new names."""
        def set_aside():
            later = [one for one in sorted(self._steps()) if one > step]
            return [files.attempted(lambda: files.set_aside(self.directory / str(one), "aside"),
                                    f"{self.directory / str(one)} cannot be set aside",
                                    "give a directory that can be written", ConfigError) for one in later]
        return agree.on_first(set_aside)

    def open(self, step: int) -> Saved:
        """Open a step's checkpoint: what `save` was given, and `format`; reads no arrays. Raises: ConfigError if a
        newer version wrote it; CheckpointError if it cannot be read."""
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
        """Nested dicts of jax.ShapeDtypeStruct, without shardings, of a step or its params."""
        stored = self._stored(step, only_params).values()
        return {key: tree for one in stored for key, tree in one.items()}

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """Restore the state of `step` to the shardings of `wanted`.

        wanted: a pytree of jax.ShapeDtypeStruct with shardings of any mesh; the result has its structure. part: it may
        lack arrays of the checkpoint, e.g. have only {"params": …}.

        Raises: ValueError listing every array whose presence, shape or dtype differs (no silent reshape or cast);
        CheckpointError if they cannot be read.
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
        """Wait until no process is writing. Failed saves were reported."""
        self._join()
        agree.exchange(None)

    @property
    def failure(self) -> str:
        """Why the last save failed, in this process; empty while it is under way."""
        return "" if self._thread is not None and self._thread.is_alive() else self._failure

    def wait(self) -> None:
        """Wait until no process is writing. Raises: CheckpointError if the last save failed."""
        self._join()
        if failure := agree.exchange(self._failure)[0]:
            raise agree.agreed(CheckpointError(failure))

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        # After an exception the others may never reach the exchange in wait().
        self.wait() if kind is None else self._join()

    def _stored(self, step, only_params: bool) -> dict[epath.Path, dict]:
        """Folder of `step` -> its arrays as nested dicts of jax.ShapeDtypeStruct; only params if asked and stored
        separately."""
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
        except OSError as error:  # not the same as no checkpoints
            raise CheckpointError(f"{self.directory} cannot be read: {files.said(error)}") from error
        return [int(name) for name in names if name.isdecimal()]

    def _join(self):
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, step, place, state, document, copied):
        """In the background, in every process: write its part; process 0 then commits."""
        index = jax.process_index()
        key, error = f"{self.directory.name} {step} {self._saves}", None
        try:
            self.check_claim()
            writing = asyncio.run(self._write(place, state))
            copied.set()
            for future in writing:
                future.result()
            commit.hand_over(place, index)
        except Exception as caught:     # tensorstore reports a full disk as ValueError
            error = caught
            agree.leave_word(f"{key} {index}", files.said(error))
        finally:
            copied.set()
        try:
            # Also after a failure: a part not handed over by now does not exist.
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=PEERS_TIMEOUT_S * 1000)
            if index == 0 and error is None:
                self._commit(step, place, document, key)
        except Exception as caught:
            error = caught
        self._failure, self._failed = "", 0 if error is None else self._failed + 1
        if error is not None:
            self._claimed = self._is_claimed()
            self._failure = f"checkpoint of step {step} not saved in {self.directory}: {files.said(error)}"
        if index == 0 and not self._claimed:  # before reporting: the log may be on the same full disk
            self._retire(step)
        if error is not None:
            self.tell(self._failure)

    async def _write(self, place, state) -> list:
        """Copy the arrays to the host and start writing them; return the futures."""
        writing = []
        for name, keys in ((PARAMS, {PARAMS} & state.keys()), (STATE, state.keys() - {PARAMS})):
            if keys:
                (place / name).mkdir(parents=True, exist_ok=True)   # by whoever comes first
                args = ocp.args.PyTreeSave({key: state[key] for key in state if key in keys})
                writing += await self._arrays.async_save(epath.Path(place / name), args=args) or ()
        return writing

    def _commit(self, step, place, document, key):
        merge = lambda folder: self._arrays.finalize(epath.Path(folder))    # merges the processes' array indexes
        commit.commit(place, jax.process_count(), document, merge, lambda index: agree.word(f"{key} {index}"))
        self.check_claim()
        if not (self.directory / str(step)).exists():
            place.rename(self.directory / str(step))
            files.sync(self.directory)

    def _is_claimed(self) -> bool:
        """Whether another start is known to have claimed the directory."""
        try:
            self.check_claim()
        except files.FileSystemError:
            return True
        except OSError:
            pass
        return False

    def _retire(self, step):
        """Remove checkpoints beyond `keep`, and partial ones of failed saves (on a full disk).

        Checkpoints still needed for exports stay: at most `keep`, and none after a failed save, which may need their
        space.
        """
        try:
            self.check_claim()
            old = sorted(self._steps())[: -self.keep] if self.keep else []
            held = [] if self._failed else [one for one in old if self.is_needed(one)][-self.keep:]
            for one in old:
                if one not in held:
                    self._rename_for_removal(self.directory / str(one), one)
            self._clean(step)
        except OSError as error:
            self._report_leftovers(error)

    def _clean(self, up_to: int | None = None):
        """Remove partially written checkpoints (of no later step, which other processes may be writing) and partially
        deleted ones.

        What cannot be removed is reported and left: e.g. a file still open on NFS (.nfsXXXX). Saves and restores
        ignore its name. Raises: OSError if it cannot be renamed.
        """
        found = [(path, re.fullmatch(r"\.(\d+)\.(saving|deleting)(-\w+)?", path.name))
                 for path in self.directory.glob(".*")]
        for path, name in found:
            if name and (up_to is None or int(name[1]) <= up_to):
                try:
                    path = self._rename_for_removal(path, int(name[1])) if name[2] == "saving" else path
                except OSError:
                    shutil.rmtree(path, ignore_errors=True)
                    if path.exists():
                        raise
                    continue
                if error := files.remove(path):
                    self._report_leftovers(error)

    def _rename_for_removal(self, path: pathlib.Path, step: int) -> pathlib.Path:
        """Rename a directory for removal; return its new name."""
        return files.patiently(lambda: path.rename(self.directory / f".{step}.deleting-{secrets.token_hex(4)}"))

    def _report_leftovers(self, error: OSError) -> None:
        self.tell(f"what is left of old checkpoints in {self.directory} cannot be removed: {files.said(error)}")

    def fault(self, step: int, *, only_params: bool = False) -> str:
        """What is damaged in `step` (or its params, if stored separately), over all processes; empty if nothing.

        Damage is a wrong size or checksum, or a file that process 0 misses too. Raises: CheckpointError if a file
        cannot be read, or is missing only for processes other than 0.
        """
        place = self.directory / str(step)
        found = agree.exchange(self._check_share(place, only_params))
        # Process 0 decides on files that others miss.
        missing = {name: index for index, one in reversed(list(enumerate(found))) if (name := one.get("missing"))}
        there = agree.exchange(_visible(place, missing) if jax.process_index() == 0 else [])[0]
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

    def _check_share(self, place: pathlib.Path, only_params: bool) -> dict:
        """Faults in this process's share of the files: damaged, missing, refused (file system errors)."""
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

    def _set_damaged_aside(self, step: int) -> str:
        """Set a damaged checkpoint aside; describe the result."""
        try:
            return "" if self.read_only else f", kept as {files.set_aside(self.directory / str(step), 'damaged')}"
        except OSError as error:
            return f", cannot be set aside: {files.said(error)}"

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
    """Python's hook, without the errors of writes that end after their save failed: tensorstore's threads answer
    orbax's event loop, already closed, with a traceback per array on a full disk. `_save` reports the failure itself.
    """

    def __init__(self, before: Callable):
        self.before = before

    def __call__(self, unraisable) -> None:
        if str(getattr(unraisable, "exc_value", "")) != "Event loop is closed":
            self.before(unraisable)


@contextlib.contextmanager
def _reading(place: pathlib.Path):
    """Report errors while reading arrays as disk errors: checksums matched and shapes were compared."""
    try:
        yield
    except Exception as error:
        if not place.exists():
            raise CheckpointError(f"{place} was removed while it was read: the run that writes there keeps "
                                  f"checkpoint.keep of them; start again") from error
        raise CheckpointError(f"{place} cannot be read, and nothing was changed: {files.said(error)}") from error


def _visible(place: pathlib.Path, names) -> list[str]:
    """The files that this process sees, or cannot check."""
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
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in trees.leaves_of(tree).items()}
