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

Orbax's CheckpointManager is not used to commit: it has no checksums, and if one process fails to write, the others
wait at its barrier until the timeout. Processes share the directory; only process 0 renames and deletes. Readers of
weights (generate, evaluate, convert, init_from) read and verify only params/. The state may be any pytree of jax
arrays.
"""
from __future__ import annotations

import asyncio
import contextlib
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
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from meshtrain import files
from meshtrain.checkpoint import commit
from meshtrain.checkpoint.commit import CHECKSUMS, FOLDERS, METADATA, STATE
from meshtrain.checkpoint.shared import PARAMS, CheckpointError, SharedCheckpoints, forms
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.run import trees

DAMAGED, MISSING, REFUSED = "damaged", "missing", "refused"
WRITERS_END_S = 10.0    # a failed save does not end tensorstore's threads; after this long they create no more files


class Checkpoints(SharedCheckpoints):
    """The checkpoints in one directory, which all processes share."""

    def __init__(self, directory: str | pathlib.Path, **keys):
        # orbax logs 60 lines per save, and on a full disk one traceback per array
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if not isinstance(sys.unraisablehook, _Unraisable):
            sys.unraisablehook = _Unraisable(sys.unraisablehook)
        self.directory = pathlib.Path(directory).absolute()  # orbax refuses relative paths
        # Compression would save 8 % of the weights' size and take two to three times as long.
        self._arrays = ocp.PyTreeCheckpointHandler(use_compression=False)
        super().__init__(self.directory, **keys)

    def _open(self) -> None:
        def make_and_clean() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clean()       # the next save would write into leftovers that cannot be renamed
        files.attempted(make_and_clean, f"{self.directory} cannot hold checkpoints",
                        "give a directory that can be written", ConfigError)

    def _names(self) -> list[str]:
        try:
            return files.patiently(lambda: os.listdir(self.directory))
        except FileNotFoundError:
            return []
        except OSError as error:  # an unreadable directory may have checkpoints
            raise CheckpointError(f"{self.directory} cannot be read: {files.said(error)}") from error

    def _rename(self, step: int, name: str) -> None:
        (self.directory / str(step)).rename(self.directory / name)

    def _metadata(self, step: int) -> dict:
        place = self.directory / str(step)
        with _reading(place):
            return json.loads(files.patiently((place / METADATA).read_text, missing=True))

    def arrays(self, step: int, *, only_params: bool = False) -> dict:
        stored = self._stored(step, only_params).values()
        return {key: tree for one in stored for key, tree in one.items()}

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        nested, arrays = trees.nested(trees.leaves_of(wanted)), {}
        stored = self._stored(step, only_params=part and nested.keys() <= {PARAMS})
        self._check(step, {name: form for tree in stored.values() for name, form in forms(tree).items()}, wanted, part)
        for folder, there in stored.items():
            if of_folder := {key: tree for key, tree in nested.items() if key in there}:
                restore_args = ocp.checkpoint_utils.construct_restore_args(of_folder)
                args = ocp.args.PyTreeRestore(of_folder, restore_args=restore_args, partial_restore=part)
                with _reading(self.directory / str(step)):
                    arrays |= self._arrays.restore(folder, args=args)
        leaves = trees.leaves_of(arrays)
        return jax.tree.map_with_path(lambda path, _: leaves[trees.name(path)], wanted)

    def _stored(self, step, only_params: bool) -> dict[epath.Path, dict]:
        """Return folder of `step` -> its arrays as nested dicts of jax.ShapeDtypeStruct. only_params: leave out the
        other arrays if they have a folder of their own."""
        place = self.directory / str(step)
        form = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        with _reading(place):
            there = files.patiently(lambda: os.listdir(place), missing=True)
            folders = [name for name in FOLDERS if name in there]
            return {folder: jax.tree.map(form, self._arrays.metadata(folder).tree)
                    for folder in (epath.Path(place / name) for name in folders[:1 if only_params else None])}

    def _saving(self, step: int) -> pathlib.Path:
        # tensorstore may still write to a failed save's directory: the next has its own.
        return self.directory / f".{step}.saving{f'-{self._saves}' if self._after_failure else ''}"

    def _copied(self, step: int, state: dict) -> Callable[[], None]:
        place = self._saving(step)
        writing = asyncio.run(self._write(place, state))

        def write():
            for future in writing:
                future.result()
            commit.hand_over(place, jax.process_index())
        return write

    async def _write(self, place, state) -> list:
        """Copy the arrays to the host and start writing them; return the futures."""
        writing = []
        for name, keys in ((PARAMS, {PARAMS} & state.keys()), (STATE, state.keys() - {PARAMS})):
            if keys:
                (place / name).mkdir(parents=True, exist_ok=True)   # the first process makes it
                args = ocp.args.PyTreeSave({key: state[key] for key in state if key in keys})
                writing += await self._arrays.async_save(epath.Path(place / name), args=args) or ()
        return writing

    def _commit(self, step: int, document: str, reason: Callable[[int], str]) -> None:
        place = self._saving(step)
        merge = lambda folder: self._arrays.finalize(epath.Path(folder))    # merges the processes' array indexes
        commit.commit(place, jax.process_count(), document, merge, reason)
        self.check_claim()
        if not (self.directory / str(step)).exists():
            place.rename(self.directory / str(step))
            files.sync(self.directory)

    def _remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            self._rename_for_removal(self.directory / str(step), step)

    def _clean(self, up_to: int | None = None) -> None:
        until = time.monotonic() + WRITERS_END_S
        while self._clean_once(up_to) and self._failed and time.monotonic() < until:
            time.sleep(WRITERS_END_S / 20)

    def _clean_once(self, up_to: int | None) -> bool:
        """Remove partially written and partially deleted checkpoints; return whether one was removed.

        up_to: the last step whose leftovers are removed, since other processes may be writing later steps; None: all. A
        leftover that cannot be removed is reported and left, e.g. a file that is still open on NFS (.nfsXXXX). Saves
        and restores ignore its name. Raises: OSError if a leftover can be neither renamed nor removed.
        """
        found = [(path, re.fullmatch(r"\.(\d+)\.(saving|deleting)(-\w+)?", path.name))
                 for path in self.directory.glob(".*")]
        removed = False
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
                removed = True
        return removed

    def _rename_for_removal(self, path: pathlib.Path, step: int) -> pathlib.Path:
        """Rename a directory for removal; return its new name."""
        return files.patiently(lambda: path.rename(self.directory / f".{step}.deleting-{secrets.token_hex(4)}"))

    def fault(self, step: int, *, only_params: bool = False) -> str:
        """Verify the whole checkpoint; each process reads a share of the files.

        A checkpoint is damaged if a file has a wrong size or checksum, or if process 0 misses a file. Raises:
        CheckpointError also if only processes other than 0 miss a file.
        """
        place = self.directory / str(step)
        found = agree.exchange(self._check_share(place, only_params))
        # Process 0 decides on files that others miss.
        seen = agree.on_first(lambda: [file for kind, file, _, _ in found
                                       if kind == MISSING and _is_visible(place / file)])
        refused = [(f"process {index} ({host}): " if len(found) > 1 else "") + file
                   + (": process 0 sees it, this host does not" if kind == MISSING else text)
                   for index, (kind, file, text, host) in enumerate(found)
                   if kind == REFUSED or kind == MISSING and file in seen]
        if refused:
            raise agree.agreed(CheckpointError(
                f"{place} cannot be read, and nothing was changed: {'; '.join(refused)}. Check that every host has "
                f"mounted the file system and may read it, and start again"))
        return next((f"{file}{text}" for wanted in (DAMAGED, MISSING) for kind, file, text, _ in found
                     if kind == wanted), "")

    def _check_share(self, place: pathlib.Path, only_params: bool) -> list[str]:
        """Return the first fault in this process's share of the files: [kind, file, text, host]. REFUSED is an error of
        the file system; DAMAGED and MISSING are faults of the checkpoint."""
        kind, file, text, first = "", "", "", jax.process_index() == 0
        try:
            wanted = json.loads(files.patiently((place / CHECKSUMS).read_text, missing=not first))
            if only_params and any(name.startswith(f"{PARAMS}/") for name in wanted):
                wanted = {name: entry for name, entry in wanted.items() if not name.startswith(f"{STATE}/")}
            names = sorted(wanted)[jax.process_index():: jax.process_count()]
            found = files.checksums(place, (place / name for name in names), missing=not first)
            if wrong := [name for name in names if files.difference(found[name], wanted[name])]:
                kind, file, text = DAMAGED, wrong[0], f": {files.difference(found[wrong[0]], wanted[wrong[0]])}"
        except FileNotFoundError as error:
            kind, file, text = MISSING, os.path.relpath(error.filename, place), " is missing"
        except OSError as error:
            file = os.path.relpath(error.filename, place) if error.filename else CHECKSUMS
            kind, text = REFUSED, f": {error.strerror or error}"
        except (ValueError, TypeError) as error:
            kind, file, text = DAMAGED, CHECKSUMS, f": {error}"
        return [kind, file, text, socket.gethostname()]


class _Unraisable:
    """A hook for sys.unraisablehook that ignores writes which end after their save has failed. On a full disk,
    tensorstore's threads call orbax's closed event loop, and Python would print one traceback per array. `_save`
    reports the failure."""

    def __init__(self, before: Callable):
        self.before = before

    def __call__(self, unraisable) -> None:
        if str(getattr(unraisable, "exc_value", "")) != "Event loop is closed":
            self.before(unraisable)


@contextlib.contextmanager
def _reading(place: pathlib.Path):
    """Raise every error of the block as CheckpointError. Checksums and shapes were compared before, so the file system
    is the cause."""
    try:
        yield
    except Exception as error:
        if not place.exists():
            raise CheckpointError(f"{place} was removed while it was read: the run that writes there keeps only "
                                  f"checkpoint.keep checkpoints; start again") from error
        raise CheckpointError(f"{place} cannot be read, and nothing was changed: {files.said(error)}") from error


def _is_visible(path: pathlib.Path) -> bool:
    """Return whether this process sees a file; True if it cannot check."""
    try:
        return files.status(path) is not None
    except (OSError, ValueError):
        return True
