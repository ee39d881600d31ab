"""Where documents come from, and which of them are held out for validation.

A source is a list of documents with known lengths that can be read anywhere: `lengths` and `read(document, start, stop)` are
the whole contract, so packing (data.py) needs no look at the text to know where every token of every epoch stands. Here a
file is a document and its bytes are its tokens; nothing is held in memory but names and lengths.
This module knows no sequences, batches, steps or hosts.
"""
from __future__ import annotations

import dataclasses
import difflib
import glob
import os
import sysconfig
from collections.abc import Sequence
from typing import Protocol

import numpy as np

NAMES = ("stdlib", "text")

# Directories of the standard library that differ between installs of one version: test suites that distributions strip,
# installed packages, and what the build wrote down about its own machine.
NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
NOT_STDLIB_PREFIXES = ("config-", "_sysconfigdata")


class Source(Protocol):
    """Documents of tokens, in an order that is the same on every host and in every run."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]: tokens in each document, without a separator."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Integers [stop - start]: the document's tokens start..stop-1. Called from several threads at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """One file, one document; one byte, one token."""
    paths: tuple[str, ...]
    lengths: np.ndarray

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        # The page cache is the cache: opening costs some 10 us, and neither descriptors nor maps pile up.
        with open(self.paths[document], "rb", buffering=0) as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise OSError(f"{self.paths[document]} had {self.lengths[document]} bytes when the run began and now ends at byte "
                          f"{start + len(data)}; training files must not change while a run reads them")
        return np.frombuffer(data, np.uint8)


def open_source(name: str, paths: Sequence[str]) -> Source:
    """The source called `name`; `paths` are the globs of a source that reads files.

    Raises: ValueError for an unknown name, a glob without a match, a path that cannot be read, or nothing but empty files.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        raise ValueError(f"data.source={name!r} is not a source; "
                         + (f"did you mean {near[0]!r}? " if near else "") + f"Use one of {', '.join(NAMES)}")
    if isinstance(paths, str):
        raise ValueError(f"data.paths={paths!r} is a string; use a list: [{paths!r}]")
    if name == "stdlib":
        if paths:
            raise ValueError(f"data.paths={list(paths)} is not read by data.source='stdlib'; "
                             "set data.source='text' or data.paths=[]")
        return open_files(list_stdlib(sysconfig.get_path("stdlib")))
    return open_files(match_globs(paths))


def open_files(paths: Sequence[str]) -> Files:
    """Takes the lengths by stat alone: no file is read before a batch needs it."""
    faults, lengths = [], []
    for path in paths:
        try:
            lengths.append(os.stat(path).st_size)
            if not os.access(path, os.R_OK):
                raise PermissionError("no permission to read it")
        except OSError as error:
            faults.append(f"{path} cannot be read: {error.strerror or error}; mend it or take it out of data.paths")
    if faults:
        raise ValueError("\n".join(faults))
    if not any(lengths):
        some = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
        raise ValueError(f"all {len(paths)} files of data.paths are empty ({some}); name files with text")
    return Files(tuple(paths), np.array(lengths, np.int64))


def match_globs(patterns: Sequence[str]) -> list[str]:
    """Every file that a glob matches, once, sorted. A name that exists is taken literally, brackets and all."""
    if not patterns:
        raise ValueError("data.source='text' has no data.paths; give at least one file or glob, e.g. [\"corpus/**/*.txt\"]")
    found, faults = {}, []
    for pattern in patterns:
        wanted = os.path.expanduser(pattern)
        matches = [wanted] if os.path.exists(wanted) else glob.glob(wanted, recursive=True)
        files = [path for path in matches if not os.path.isdir(path)]
        # Two names of one file would count it twice, and could put it in training and validation both.
        found.update((os.path.realpath(path), path) for path in files)
        if os.path.isdir(wanted):
            faults.append(f"data.paths: {pattern!r} is a directory; name its files, e.g. {os.path.join(pattern, '**', '*.txt')!r}")
        elif not files:
            faults.append(f"data.paths: {pattern!r} matches no file (relative to {os.getcwd()})")
    if faults:
        raise ValueError("\n".join(faults))
    return [found[path] for path in sorted(found)]


def list_stdlib(root: str) -> list[str]:
    """The .py files under `root`, sorted, without tests and without what differs between installs of one version."""
    def refuse(error: OSError):
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}; use data.source='text' with data.paths")

    def belongs(name: str) -> bool:
        return name not in NOT_STDLIB and not name.startswith(NOT_STDLIB_PREFIXES)

    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = filter(belongs, folders)
        # A link leads out of the library (Debian's sitecustomize.py into /etc).
        found += [os.path.join(folder, name) for name in files if name.endswith(".py") and belongs(name)
                  and not os.path.islink(os.path.join(folder, name))]
    if not found:
        raise ValueError(f"data.source='stdlib' finds no .py file under {root} (a zipped or stripped Python?); "
                         "use data.source='text' with data.paths")
    return sorted(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """The parts of documents that one split holds: tokens start..start+length-1 of `document`, int64 [spans] each."""
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray


def split(lengths: np.ndarray, validation_fraction: float) -> tuple[Spans, Spans]:
    """(train, validation) over documents of these lengths; the fraction is of tokens. Empty documents belong to neither.

    A function of the lengths alone: another seed trains on the same documents. Whole documents are held out in the order of
    a fixed hash of their index; where they cannot fill half of the wanted share (one file, a few books), every document gives
    its tail instead, a document of its own.
    """
    lengths = np.asarray(lengths, np.int64)
    wanted = int(lengths.sum() * validation_fraction)
    # PCG64's raw stream is promised never to change; Generator.permutation is not.
    rank = np.argsort(np.random.PCG64(0).random_raw(len(lengths)), kind="stable")
    # None is longer than half of what is wanted, so the first that no longer fits finds it at least half full.
    eligible = rank[(lengths[rank] > 0) & (2 * lengths[rank] <= wanted)]
    chosen = eligible[np.cumsum(lengths[eligible]) <= wanted]
    held_out = np.zeros_like(lengths)
    if 2 * lengths[chosen].sum() >= wanted:
        held_out[chosen] = lengths[chosen]
    else:
        held_out = (lengths * validation_fraction).astype(np.int64)

    def spans(start, length):
        document = np.flatnonzero(length)
        return Spans(document, start[document], length[document])

    kept = lengths - held_out
    return spans(np.zeros_like(lengths), kept), spans(kept, held_out)
