"""Commits a checkpoint written by up to thousands of processes. Each process syncs and checksums its own files, then
hands over one small record of these files. Process 0 reads only the records, merges the array indexes and handles all
other files. This module knows no step, no state and no run."""
from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Callable
from pathlib import Path

from meshtrain import files
from meshtrain.checkpoint.store import PARAMS

STATE, CHECKSUMS, METADATA = "state", "checksums.json", "metadata.json"
FOLDERS = (PARAMS, STATE)   # orbax writes arrays here
RECORDS = "records"     # removed at the commit
READERS = 32            # threads: each file costs a round trip or two on a shared file system


class NotHandedOver(OSError):
    """A process has not written its part of a checkpoint. The message names it and, if known, the reason."""


def hand_over(place: Path, index: int) -> None:
    """Sync the files that this process has written into FOLDERS and write a record of their checksums. Every process
    calls it after orbax has finished. place: the directory of the save. index: number of this process."""
    own = [folder for name in FOLDERS if (folder := place / name / f"ocdbt.process_{index}").exists()]
    mine = [path for folder in own for path in folder.rglob("*") if path.is_file()]
    described = [path for name in FOLDERS if (path := place / name / "array_metadatas" / f"process_{index}").exists()]
    sums = files.checksums(place, mine + described, sync=True)
    for directory in {path.parent for path in mine} | set(own):
        files.sync(directory)
    (place / RECORDS).mkdir(exist_ok=True)
    (place / RECORDS / str(index)).write_text(json.dumps(sums), encoding="utf-8")


def commit(place: Path, count: int, document: str, merge: Callable[[Path], None],
           reason: Callable[[int], str] = lambda index: "") -> None:
    """Complete a checkpoint on disk, with checksums of all files. Process 0 calls it after all `count` have finished.

    place: the directory of the save. document: the checkpoint's metadata, as JSON. merge: merges the array indexes of
    the processes in a folder. reason: process -> why it failed. Raises: NotHandedOver.
    """
    checksums = _read_records(place, count, reason)
    files.write(place / METADATA, document)
    for name in FOLDERS:
        if (place / name).exists():
            merge(place / name)
    for name in os.listdir(place / RECORDS):
        os.unlink(place / RECORDS / name)
    (place / RECORDS).rmdir()
    owned = {os.path.join(place, name, f"ocdbt.process_{index}") for name in FOLDERS for index in range(count)}
    known = {os.path.join(place, name) for name in checksums}
    directories, others = [], []
    for directory, below, names in os.walk(place, onerror=files.refuse):
        below[:] = [name for name in below if os.path.join(directory, name) not in owned]
        directories.append(directory)
        others += [Path(path) for name in names if (path := os.path.join(directory, name)) not in known]
    files.write(place / CHECKSUMS, json.dumps(checksums | files.checksums(place, others, sync=True)))
    for directory in directories:
        files.sync(directory)


def _read_records(place: Path, count: int, reason: Callable[[int], str]) -> dict[str, list]:
    """Return name -> [bytes, checksum] of the files of all processes. Raises: NotHandedOver."""
    records = place / RECORDS
    try:
        present = set(files.patiently(lambda: os.listdir(records)))
    except FileNotFoundError:
        present = set()

    def read(index: int) -> dict | None:
        if str(index) not in present and reason(index):
            return None
        try:
            return json.loads(files.patiently((records / str(index)).read_text, missing=True))
        except FileNotFoundError:
            return None
    return {name: entry for entries in collect(count, read, reason) for name, entry in entries.items()}


def collect(count: int, read: Callable[[int], dict | None], reason: Callable[[int], str]) -> list[dict]:
    """Return the records that the processes handed over, in the order of processes. read: process -> its record; None
    if no record exists. reason: process -> why the process has no record. Raises: NotHandedOver."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as threads:
        records = list(threads.map(read, range(count)))
    if missing := [index for index, record in enumerate(records) if record is None]:
        causes = [f"process {index}: {reason(index) or 'did not write its part (its output says why)'}"
                  for index in missing[:8]]
        more = f"; and {len(missing) - 8} more processes" if len(missing) > 8 else ""
        raise NotHandedOver("; ".join(causes) + more)
    return records
