"""Checkpoints in a directory: asynchronous, atomic, checksummed, and restorable on any other mesh.

Orbax writes and reads the arrays by path (`params/layers/wq`, `opt_state/0/mu/…`); everything else is one JSON object.
A checkpoint contains no class, function or mesh: loading runs no code and restores into any sharding. `save` copies the
arrays to the host before it returns, so the next step may donate them.

    <step>/           complete: params/ and state/ (orbax arrays under the key params, and all others), metadata.json,
                      and checksums.json: size and xxh3-128 of every other file
    .<step>.saving/   being written, see `commit`; renamed to <step> when everything, checksums included, is on disk
    .<step>.deleting-<hex>/  being removed: renamed first, so that no partial checkpoint has its step's name
    <step>.damaged/   its checksums did not match; kept for inspection
    <step>.aside/     complete, but later than the step (checkpoint.step) that a run resumed from

Orbax's CheckpointManager is not used to commit: it has no checksums, and if one process fails to write, the others wait
at its barrier until the timeout. Processes share the directory; only process 0 renames and deletes. Readers of weights
(generate, evaluate, convert, init_from) read and verify only params/. The state is any pytree of arrays.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from meshtrain import files
from meshtrain.checkpoint import commit
from meshtrain.checkpoint.commit import CHECKSUMS, FOLDERS, METADATA, STATE
from meshtrain.checkpoint.store import PARAMS, ArrayForm, CheckpointError, Save, forms_of
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.lazy import ocp
from meshtrain.run import trees

DAMAGED, MISSING, REFUSED = "damaged", "missing", "refused"
WRITERS_END_S = 10.0    # a failed save does not end tensorstore's threads; after this long they create no more files


class DirectoryStore:
    """The checkpoints in one directory, which all processes share. A `Store`."""
    borne_s = 0.0

    def __init__(self, directory: str | pathlib.Path):
        # orbax logs 60 lines per save, and on a full disk one traceback per array
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if not isinstance(sys.unraisablehook, _Unraisable):
            sys.unraisablehook = _Unraisable(sys.unraisablehook)
        self.place = pathlib.Path(directory).absolute()     # orbax refuses relative paths

    @functools.cached_property
    def arrays(self):
        """Orbax's reader and writer of arrays. Created at its first use: importing orbax takes half a second."""
        # Compression would save 8 % of the weights' size and take two to three times as long.
        return ocp.PyTreeCheckpointHandler(use_compression=False)

    def open(self, step: int) -> DirectoryStep:
        return DirectoryStep(self.place / str(step), self)

    def prepare(self, report: Callable[[OSError], None]) -> None:
        def make_and_clean() -> None:
            self.place.mkdir(parents=True, exist_ok=True)
            self._clean(None, report)       # the next save would write into leftovers that cannot be renamed
        files.attempt(make_and_clean, f"{self.place} cannot hold checkpoints",
                      "give a directory that can be written", ConfigError)

    def names(self) -> list[str]:
        try:
            return files.patiently(lambda: os.listdir(self.place))
        except FileNotFoundError:
            return []
        except OSError as error:  # an unreadable directory may have checkpoints
            raise CheckpointError(f"{self.place} cannot be read: {files.describe(error)}") from error

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _saving(self, save: Save) -> pathlib.Path:
        # tensorstore may still write to a failed save's directory: the next has its own.
        return self.place / f".{save.step}.saving{f'-{save.number}' if save.after_failure else ''}"

    def put(self, save: Save, state: dict) -> Callable[[], None]:
        place = self._saving(save)
        futures = asyncio.run(self._begin_writing(place, state))

        def write() -> None:
            for future in futures:
                future.result()
            commit.hand_over(place, jax.process_index())
        return write

    async def _begin_writing(self, place: pathlib.Path, state: dict) -> list:
        """Copy the arrays to the host and start writing them; return the futures."""
        futures: list = []
        for name, keys in ((PARAMS, {PARAMS} & state.keys()), (STATE, state.keys() - {PARAMS})):
            if keys:
                (place / name).mkdir(parents=True, exist_ok=True)   # the first process makes it
                args = ocp.args.PyTreeSave({key: state[key] for key in state if key in keys})
                futures += await self.arrays.async_save(epath.Path(place / name), args=args) or ()
        return futures

    def commit(self, save: Save, document: str, reason: Callable[[int], str], check_claim: Callable[[], None]) -> None:
        def merge(folder: pathlib.Path) -> None:
            self.arrays.finalize(epath.Path(folder))    # merges the processes' array indexes
        place, final = self._saving(save), self.place / str(save.step)
        commit.commit(place, jax.process_count(), document, merge, reason)
        check_claim()
        if not final.exists():
            place.rename(final)
            files.sync(self.place)

    # ---- removing ----------------------------------------------------------------------------------------------------

    def remove(self, steps: Sequence[int], after: Save, report: Callable[[OSError], None], *, failed: bool) -> None:
        for step in steps:
            self._rename_for_removal(self.place / str(step), step)
        until = time.monotonic() + WRITERS_END_S
        while self._clean(after.step, report) and failed and time.monotonic() < until:
            time.sleep(WRITERS_END_S / 20)

    def _clean(self, up_to: int | None, report: Callable[[OSError], None]) -> bool:
        """Remove partially written and partially deleted checkpoints; return whether one was removed.

        up_to: the last step whose leftovers are removed; None: all. A leftover that cannot be removed is reported and
        left, e.g. a file that is still open on NFS (.nfsXXXX). Saves and restores ignore its name. Raises: OSError if a
        leftover can be neither renamed nor removed.
        """
        leftovers = [(path, re.fullmatch(r"\.(\d+)\.(saving|deleting)(-\w+)?", path.name))
                     for path in self.place.glob(".*")]
        removed = False
        for path, name in leftovers:
            if name and (up_to is None or int(name[1]) <= up_to):
                try:
                    path = self._rename_for_removal(path, int(name[1])) if name[2] == "saving" else path
                except OSError:
                    shutil.rmtree(path, ignore_errors=True)
                    if path.exists():
                        raise
                    continue
                if error := files.remove(path):
                    report(error)
                removed = True
        return removed

    def _rename_for_removal(self, path: pathlib.Path, step: int) -> pathlib.Path:
        return files.patiently(lambda: path.rename(self.place / f".{step}.deleting-{secrets.token_hex(4)}"))


class DirectoryStep:
    """A checkpoint in a directory. A `StoredStep`."""

    def __init__(self, place: pathlib.Path, store: DirectoryStore):
        self.place, self._store = place, store
        self._forms: dict[bool, dict[str, dict[str, ArrayForm]]] = {}

    def metadata(self) -> dict:
        with _reading(self.place):
            return json.loads(files.patiently((self.place / METADATA).read_text, missing=True))

    def rename(self, name: str) -> None:
        self.place.rename(self.place.with_name(name))

    def forms(self, *, only_params: bool = False) -> dict[str, ArrayForm]:
        return {name: form for forms in self._forms_of_folders(only_params).values() for name, form in forms.items()}

    def _forms_of_folders(self, only_params: bool) -> dict[str, dict[str, ArrayForm]]:
        """Return folder -> array -> (shape, dtype). only_params: without other arrays that have their own folder."""
        if only_params not in self._forms:
            with _reading(self.place):
                names = files.patiently(lambda: os.listdir(self.place), missing=True)
                folders = [name for name in FOLDERS if name in names]
                self._forms[only_params] = {
                    folder: forms_of(self._store.arrays.metadata(epath.Path(self.place / folder)).tree)
                    for folder in folders[:1 if only_params else None]}
        return self._forms[only_params]

    def restore(self, wanted: Any, *, part: bool) -> Any:
        nested = trees.nest(trees.leaves_of(wanted))
        leaves: dict[str, jax.Array] = {}
        for folder, forms in self._forms_of_folders(part and nested.keys() <= {PARAMS}).items():
            keys = {name.partition("/")[0] for name in forms}
            if of_folder := {key: tree for key, tree in nested.items() if key in keys}:
                restore_args = ocp.checkpoint_utils.construct_restore_args(of_folder)
                args = ocp.args.PyTreeRestore(of_folder, restore_args=restore_args, partial_restore=part)
                with _reading(self.place):
                    leaves |= trees.leaves_of(self._store.arrays.restore(epath.Path(self.place / folder), args=args))
        return jax.tree.map_with_path(lambda path, _: leaves[trees.name(path)], wanted)

    def fault(self, *, only_params: bool = False) -> str:
        """Verify the whole checkpoint; each process reads a share of the files.

        A checkpoint is damaged if a file has a wrong size or checksum, or if process 0 misses a file. Raises:
        CheckpointError also if only processes other than 0 miss a file.
        """
        faults = [_Fault(*values) for values in agree.exchange(self._check_share(only_params))]
        # Process 0 decides on files that others miss.
        visible = agree.on_first(lambda: [fault.file for fault in faults
                                          if fault.kind == MISSING and _is_visible(self.place / fault.file)])
        refused = [(f"process {index} ({fault.host}): " if len(faults) > 1 else "") + fault.file
                   + (": process 0 sees it, this host does not" if fault.kind == MISSING else fault.text)
                   for index, fault in enumerate(faults)
                   if fault.kind == REFUSED or fault.kind == MISSING and fault.file in visible]
        if refused:
            raise agree.mark_agreed(CheckpointError(
                f"{self.place} cannot be read, and nothing was changed: {'; '.join(refused)}. Check that every host "
                f"has mounted the file system and may read it, and start again"))
        return next((f"{fault.file}{fault.text}" for kind in (DAMAGED, MISSING) for fault in faults
                     if fault.kind == kind), "")

    def _check_share(self, only_params: bool) -> _Fault:
        """Return the first fault in this process's share of the files."""
        place, first, host = self.place, jax.process_index() == 0, socket.gethostname()
        try:
            wanted = json.loads(files.patiently((place / CHECKSUMS).read_text, missing=not first))
            if only_params and any(name.startswith(f"{PARAMS}/") for name in wanted):
                wanted = {name: entry for name, entry in wanted.items() if not name.startswith(f"{STATE}/")}
            names = sorted(wanted)[jax.process_index():: jax.process_count()]
            there = files.checksums(place, (place / name for name in names), missing=not first)
            if wrong := [name for name in names if files.difference(there[name], wanted[name])]:
                return _Fault(DAMAGED, wrong[0], f": {files.difference(there[wrong[0]], wanted[wrong[0]])}", host)
        except FileNotFoundError as error:
            return _Fault(MISSING, os.path.relpath(error.filename, place), " is missing", host)
        except OSError as error:
            file = os.path.relpath(error.filename, place) if error.filename else CHECKSUMS
            return _Fault(REFUSED, file, f": {error.strerror or error}", host)
        except (ValueError, TypeError) as error:
            return _Fault(DAMAGED, CHECKSUMS, f": {error}", host)
        return _Fault("", "", "", host)


class _Fault(NamedTuple):
    """The fault that a process met in its share of the files. kind: REFUSED is an error of the file system, DAMAGED and
    MISSING are faults of the checkpoint; empty: no fault. text: follows the name of the file."""
    kind: str
    file: str
    text: str
    host: str


class _Unraisable:
    """A hook for sys.unraisablehook that ignores writes which end after their save has failed. On a full disk,
    tensorstore's threads call orbax's closed event loop, and Python would print one traceback per array. `Checkpoints`
    reports the failure."""

    def __init__(self, before: Callable):
        self.before = before

    def __call__(self, unraisable) -> None:
        if str(getattr(unraisable, "exc_value", "")) != "Event loop is closed":
            self.before(unraisable)


@contextlib.contextmanager
def _reading(place: pathlib.Path):
    """Raise all errors of the block as CheckpointError: checksums and shapes fit, so the file system is the cause."""
    try:
        yield
    except Exception as error:
        if not place.exists():
            raise CheckpointError(f"{place} was removed while it was read: the run that writes there keeps only "
                                  f"checkpoint.keep checkpoints; start again") from error
        raise CheckpointError(f"{place} cannot be read, and nothing was changed: {files.describe(error)}") from error


def _is_visible(path: pathlib.Path) -> bool:
    """Return whether this process sees a file; True if it cannot check."""
    try:
        return files.status(path) is not None
    except (OSError, ValueError):
        return True
