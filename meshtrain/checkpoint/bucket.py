"""Checkpoints in a bucket: all processes write from memory, one object commits, and any mesh reads the ranges it needs.

    checkpoints/<step>              the checkpoint: its metadata, and the location and checksum of each piece of each
                                    array. Written last, and only if no object has that name: this is the commit
    checkpoints/<step>.<save>/      the objects that it refers to: <process>-<n> has the bytes of pieces
    checkpoints/<step>.damaged, .aside   as in a directory

No object is written twice: each save has its own names. A folder that no checkpoint refers to is left from a failed
save or a removal; the next save removes it. Sizes and checksums of the objects are verified before a checkpoint is
used. The checksum of each piece is verified again when it is restored. Listings may be stale: the code requests an
object by its name before it concludes that the object is absent.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshtrain import files
from meshtrain.checkpoint import commit, pieces
from meshtrain.checkpoint.pieces import Index
from meshtrain.checkpoint.store import PARAMS, ArrayForm, CheckpointError, Save
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.storage import addresses, buckets
from meshtrain.storage.addresses import Address, StorageError

AT_ONCE = 16                # concurrent requests of one process
SERVER_FAILS_S = 3600.0     # training stops after this long without a checkpoint if the server fails


class BucketStore:
    """The checkpoints of a run whose directory is in a bucket (s3:// or gs://). A `Store`.

    start: an ID of this start of the run, equal in all its processes; each save has it in its name. before_commit:
    process 0 calls it before it commits a checkpoint. An exception from it fails the save.
    """
    borne_s = SERVER_FAILS_S

    def __init__(self, place: Address, *, start: str = "", before_commit: Callable[[], None] = lambda: None):
        self.place, self.start, self.before_commit = place, start, before_commit
        self.known: tuple[int, dict] = (-1, {})         # (step, content of its object) read last
        self._folders: dict[str, str] = {}              # object -> the folder that it refers to

    def open(self, step: int) -> BucketStep:
        return BucketStep(self, step)

    def prepare(self, report: Callable[[OSError], None]) -> None:
        with _judge_errors(f"{self.place} cannot hold checkpoints"):
            self._clean()

    def names(self) -> list[str]:
        return self._children()[0]

    def _children(self) -> tuple[list[str], list[str]]:
        """Return (names of objects, names of folders)."""
        with _judge_errors(f"{self.place} cannot be read"):
            return buckets.children(self.place)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _folder(self, save: Save) -> Address:
        return self.place.below(f"{save.step}.{self.start}-{save.number}")

    def put(self, save: Save, state: dict) -> Callable[[], None]:
        folder, me = self._folder(save), jax.process_index()
        index, own = Index.begin(state), list(pieces.own(state))

        def send(numbers: range) -> None:
            name = f"{me}-{numbers.start}"
            buckets.write(folder.below(name), b"".join(index.add(name, own[numbers.start:numbers.stop])))

        def write() -> None:
            with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(send, pieces.batch_ranges([data.nbytes for *_, data in own])))
            buckets.write(folder.below(f"{me}.json"), json.dumps(index.as_json()).encode())
        return write

    def commit(self, save: Save, document: str, reason: Callable[[int], str], check_claim: Callable[[], None]) -> None:
        folder, name = self._folder(save), str(save.step)

        def read(process: int) -> dict | None:
            with contextlib.suppress(addresses.Missing):
                return None if reason(process) else _read(folder.below(f"{process}.json"))
        parts = commit.collect(jax.process_count(), read, reason)
        index = Index.merge([Index.read(part) for part in parts])
        marker = {"metadata": json.loads(document), "folder": folder.path.rpartition("/")[2], **index.as_json()}
        self.before_commit()
        check_claim()
        if buckets.write_if(self.place.below(name), json.dumps(marker).encode(), None, patient=True) is None:
            raise CheckpointError("another start has saved this step")
        self._folders[name] = marker["folder"]
        buckets.remove([folder.below(f"{process}.json") for process in range(len(parts))])

    # ---- removing ----------------------------------------------------------------------------------------------------

    def remove(self, steps: Sequence[int], after: Save, report: Callable[[OSError], None], *, failed: bool) -> None:
        self.remove_steps(steps)
        self._clean(after.step)

    def remove_steps(self, steps: Sequence[int]) -> None:
        buckets.remove([self.place.below(str(step)) for step in steps])
        self.known = (-1, {})
        for step in steps:
            self._folders.pop(str(step), None)

    def _clean(self, up_to: int | None = None) -> None:
        """Remove folders that no checkpoint refers to. up_to: the last step whose folders are removed; None: all."""
        markers, folders = self._children()
        for name in folders:
            step, _, _ = name.partition(".")
            if not re.fullmatch(r"\d+\.[\w-]+", name) or up_to is not None and int(step) > up_to:
                continue
            listed = {marker for marker in markers if marker.partition(".")[0] == step}
            if all(self._folder_of(marker) != name for marker in sorted(
                    listed | {step, *(f"{step}.{kind}" for kind in ("aside", "damaged"))})):
                buckets.remove([file.address for file in buckets.list_files(self.place.below(name))])

    def _folder_of(self, marker: str) -> str:
        """Return the folder that an object refers to; empty if there is no such object."""
        if marker not in self._folders:
            try:
                self._folders[marker] = _read(self.place.below(marker))["folder"]
            except addresses.Missing:
                return ""
        return self._folders[marker]


class BucketStep:
    """A checkpoint in a bucket. A `StoredStep`."""

    def __init__(self, store: BucketStore, step: int):
        self.store, self.step = store, step
        self.address = store.place.below(str(step))

    def _marker(self) -> dict:
        """Return the content of the object that commits the step. Every process reads it."""
        known = self.store.known      # a save in the background may replace it
        if known[0] != self.step:
            with _judge_errors(f"{self.address} cannot be read"):
                try:
                    known = self.store.known = self.step, _read(self.address)
                except addresses.Missing:
                    raise CheckpointError(f"{self.address} was removed while it was read: the run that writes "
                                          f"there keeps only checkpoint.keep checkpoints; start again") from None
                except _BROKEN as error:
                    raise CheckpointError(f"{self.address} is damaged: {files.describe(error)}") from None
        return known[1]

    def metadata(self) -> dict:
        return self._marker()["metadata"]

    def forms(self, *, only_params: bool = False) -> dict[str, ArrayForm]:
        return {name: form for name, form in Index.read(self._marker()).forms().items()
                if not only_params or name.startswith(f"{PARAMS}/")}

    def rename(self, name: str) -> None:
        buckets.write(self.store.place.below(name), buckets.read(self.address))
        self.store.remove_steps([self.step])

    def fault(self, *, only_params: bool = False) -> str:
        """Verify the whole checkpoint; each process reads a share of the objects."""
        def look() -> str:
            try:
                self.store.known = self.step, (marker := _read(self.address))
                index, folder = Index.read(marker), marker["folder"]
                entries = index.by_object()
                names = [name for name in sorted(index.objects)
                         if not only_params or any(array.startswith(f"{PARAMS}/") for array, *_ in entries[name])]

                def check(name: str) -> str:
                    try:
                        content = memoryview(buckets.read(self.store.place.below(f"{folder}/{name}")))
                    except addresses.Missing:
                        return f"{folder}/{name} is missing"
                    difference = index.fault(name, content, entries[name])
                    return difference and f"{folder}/{name}{difference}"
                own = names[jax.process_index()::jax.process_count()]
                with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
                    return next(filter(None, list(pool.map(check, own))), "")
            except (*_BROKEN, AttributeError) as error:
                return files.describe(error)
            except addresses.Missing:
                return "it does not exist"

        with agree.on_errors(), _judge_errors(f"{self.address} cannot be read"):
            fault = look() and look()       # the transfer may have damaged what was read first
        return next(filter(None, agree.exchange(fault)), "")

    def restore(self, wanted: Any, *, part: bool) -> Any:
        marker = self._marker()
        index = Index.read(marker)

        def read(name: str, start: int, stop: int) -> bytes:
            return buckets.read(self.store.place.below(f"{marker['folder']}/{name}"), start, stop)
        with _judge_errors(f"{self.address} cannot be read"):
            try:
                return pieces.restore(wanted, index.by_array(), index.forms(), read, AT_ONCE)
            except addresses.Missing as error:
                raise CheckpointError(f"{error}; the run that writes there may have removed it, since it keeps only "
                                      f"checkpoint.keep checkpoints; start again") from None
            except StorageError:
                raise
            except (pieces.DamagedPiece, ValueError) as error:
                raise CheckpointError(f"{self.address} is damaged ({files.describe(error)}); start again: if it "
                                      f"is still damaged, the run resumes from the checkpoint before it") from None


_BROKEN = (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError)


def _read(address: Address) -> dict:
    return json.loads(buckets.read(address))


@contextlib.contextmanager
def _judge_errors(what: str) -> Iterator[None]:
    """A rejected request raises ConfigError, since the user can correct it; a failing server raises CheckpointError."""
    try:
        yield
    except (addresses.Missing, CheckpointError):
        raise
    except StorageError as error:
        raise ConfigError(f"{what}: {error}") from None
    except files.FileSystemError as error:
        raise CheckpointError(f"{what}: {error}") from None
