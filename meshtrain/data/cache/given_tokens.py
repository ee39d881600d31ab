"""Indexes the user's own token files: reads each file once and writes a note with the result into the cache.

The note has the largest id, a checksum, and the document ends without the file's own separators, because meshtrain adds
its own to every document. If these ends cannot be mapped from the file, an array of them is written beside the note.
This module knows only the separator's id of the tokenizer.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from meshtrain import files
from meshtrain.data.cache import parts
from meshtrain.data.cache.parts import Job
from meshtrain.data.files import binary_files, token_files
from meshtrain.data.files.binary_files import IdFile
from meshtrain.data.progress import FileProgress

VERSION = 1


def open_given(files: Sequence[tuple[str, Sequence[Path]]], separator: int, job: Job) -> list[
        token_files.IndexedTokens | None]:
    """Return an indexed file, with its largest id, for each file; None for a missing part of another share
    (`parts.open_all`).

    files: (path, candidate directories of its note). separator: the id of the separator. Raises: ValueError that lists
    every faulty file; as `parts.open_all`.
    """
    key = hashlib.blake2b(json.dumps([VERSION, separator]).encode(), digest_size=8).hexdigest()
    choices, faults = [], []
    for path, directories in files:
        try:
            ids = binary_files.open_ids(path)
            choices.append([Given(directory / f"ids-{key}", ids, separator) for directory in directories])
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return parts.open_all(choices, job)


@dataclasses.dataclass(frozen=True, eq=False)
class Given(parts.Part):
    """The note about a file of ids."""
    home: Path
    ids: IdFile
    separator: int
    verb = "scanning"

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.ids.files[:1]

    @property
    def ends(self) -> Path:
        return self.file(token_files.ENDS)

    def _look(self) -> token_files.IndexedTokens | None:
        note = self.note()
        stamps = self._stamps(note["derived"])
        return self._open(note | {"stamps": stamps}) if parts.has_stamps(note, stamps) else None

    def check(self, job: Job) -> tuple[token_files.IndexedTokens | None, str]:
        """See `parts.Part`. Raises: ValueError if the bytes changed although the file was not written."""
        pair = self.look() or parts.read_entry(self.home, lambda: self._recognize(job))
        if pair is None or not job.verify:
            return pair, ""
        checksums, wanted = pair.checksums(job.check_stop), self.note()["crc32"]
        for i, array, what in ((0, pair.ids, "ids"), (2, pair.mask, "entries")):
            if array and checksums[i] != wanted[i]:
                raise ValueError(f"{array.path} is damaged: its {what} differ from those of its first reading, but its "
                                 "size and modification time are the same; restore it, or run touch on it to have it "
                                 "read again")
        return (pair, "") if checksums[1] == wanted[1] else (None, "its documents' ends are damaged (wrong checksum)")

    def _recognize(self, job: Job) -> token_files.IndexedTokens | None:
        """Return the indexed file if its note is from a host with other inode numbers. Checks the bytes, and adds this
        host's stamps to the note."""
        note = self.note()
        stamps = self._stamps(note["derived"])
        if [stamp[1:] for stamp in stamps] != [stamp[1:] for stamp in note["stamps"]]:
            return None
        pair = self._open(note | {"stamps": stamps})
        if pair.checksums(job.check_stop) != note["crc32"]:
            return None
        self.renew_note(note, stamps)
        return pair

    def _stamps(self, derived: bool) -> list[list[int]]:
        files = [*self.ids.files, *([str(self.ends)] if derived else [])]
        return [list(token_files.stamp(path)) for path in files]

    def _open(self, note: dict) -> token_files.IndexedTokens:
        path = self.ids.files[0]
        ends = token_files.open_ends(str(self.ends) if note["derived"] else token_files.ends_path(path), path)
        if ends.size != note["documents"]:
            raise ValueError("another size")
        ids = token_files.Numbers(path, tuple(note["stamps"][0]), self.ids.size, self.ids.dtype, self.ids.offset)
        return token_files.IndexedTokens(ids, ends, ends.last(), note["lead"], note["gap"],
                                         note["largest"], self.ids.mask)

    def build(self, job: Job, progress: FileProgress) -> token_files.IndexedTokens:
        """Read the file and write its note; see `parts.Part.build`."""
        path = self.ids.files[0]
        try:
            tokens = token_files.map_file(path, self.ids.dtype, self.ids.offset, self.ids.size)
            stamps = self._stamps(derived=False)
            largest, crc = self._scan(tokens, job, progress)
            of_mask = [self._scan_mask(job)] if self.ids.mask else []
            lead, tail = self._find_separators(tokens, job)
            derived = self.ids.ends is None or bool(lead or tail) or not path.endswith(token_files.TOKENS)
            if derived:
                self._write_ends(tokens, lead, tail, job)
            if stamps != self._stamps(derived=False):
                raise ValueError(f"{path} changed while it was read; start again when no program writes to it")
            ends = token_files.open_ends(str(self.ends) if derived else token_files.ends_path(path), path)
            note = {"derived": derived, "stamps": self._stamps(derived), "largest": largest,
                    "lead": lead, "gap": lead + tail,
                    "documents": ends.size, "crc32": [crc, token_files.checksum(ends.map(), job.check_stop), *of_mask]}
            files.replace(self.manifest, json.dumps(note), shared=True)
            return self._open(note)
        except OSError as error:
            raise files.error_to_raise(error, f"token cache: {self.home} cannot be written, or {path} cannot be read",
                                       "make room (8 bytes a document), or set data.cache to another "
                                       "directory") from None

    def _scan(self, tokens: np.ndarray, job: Job, progress: FileProgress) -> tuple[int, int]:
        """Return (largest id, checksum). Raises: ValueError for a negative id."""
        largest, crc = -1, 0
        for first, chunk in token_files.chunks(tokens):
            job.check_stop()
            if chunk.dtype.kind == "i" and chunk.min() < 0:
                k = int(np.argmax(chunk < 0))
                raise ValueError(f"{self.inputs[0]}: id {first + k} (from 0) is {chunk[k]}, but ids are not negative; "
                                 "write the file again")
            largest = max(largest, int(chunk.max()))
            crc = zlib.crc32(np.ascontiguousarray(chunk).view(np.uint8), crc)
            progress.reach(first * tokens.itemsize)
        progress.finish(tokens.nbytes)
        return largest, crc

    def _scan_mask(self, job: Job) -> int:
        """Return the mask's checksum. Raises: ValueError if it is invalid, or marks no token as a target."""
        given = self.ids.mask
        assert given is not None
        mask, some, crc = given.map(), False, 0
        for first, chunk in token_files.chunks(mask):
            job.check_stop()
            if chunk.max() > 1:
                k = int(np.argmax(chunk > 1))
                raise ValueError(f"{given.path}: entry {first + k} (from 0) is {chunk[k]}, but a mask has 1 "
                                 f"for loss targets and 0 for other tokens; write the file again")
            some, crc = some or bool(chunk.any()), zlib.crc32(chunk, crc)
        if len(mask) and not some:
            raise ValueError(f"{given.path} is 0 everywhere, so {os.path.basename(self.inputs[0])} has no loss "
                             f"target; write the mask again, or remove it if all tokens are targets")
        return crc

    def _find_separators(self, tokens: np.ndarray, job: Job) -> tuple[int, int]:
        """Return (lead, tail): the number of separators at the begin and the end of each document in the file."""
        if self.ids.ends is None:
            lead = int(len(tokens) > 0 and tokens[0] == self.separator)
            return lead, 1 - lead
        documents = begin = end = short = before = 0
        for ends in self.ids.ends():
            job.check_stop()
            starts = np.concatenate([[before], ends[:-1]])
            some = ends > starts
            first, last = tokens[starts[some]] == self.separator, tokens[ends[some] - 1] == self.separator
            documents, begin, end = documents + int(some.sum()), begin + int(first.sum()), end + int(last.sum())
            short += int((ends - starts == 1).sum())
            before = int(ends[-1])
        lead = int(0 < begin == documents)
        tail = int(0 < end == documents and not (lead and short))    # a document of a single separator counts it once
        path = self.inputs[0]
        for taken, count, what in ((lead, begin, "begin"), (tail, end, "end")):
            if taken:
                job.tell(f"{path}: all documents {what} with the separator {self.separator}, which is removed, because "
                         "one is added to every document")
            elif count and not (what == "end" and lead and count == documents):
                job.tell(f"{path}: {count:,} of {documents:,} documents {what} with the separator {self.separator}, "
                         "and get a second one; write all documents without it")
        return lead, tail

    def _write_ends(self, tokens: np.ndarray, lead: int, tail: int, job: Job) -> None:
        writer = token_files.Writer(self.ends, np.int64)
        try:
            for ends in self._ends_by_separators(tokens, job) if self.ids.ends is None else self._own_ends(lead + tail):
                job.check_stop()
                writer.append(ends)
            writer.close()
            writer.rename()
        finally:
            writer.abandon()

    def _own_ends(self, separators: int) -> Iterator[np.ndarray]:
        """Yield the file's ends, without this many separators of each document. Documents that are empty in the file
        are dropped, because they have no separators."""
        assert self.ids.ends is not None
        before = count = 0
        for ends in self.ids.ends():
            if separators:
                kept = ends[np.diff(ends, prepend=before) > 0]
                before = int(ends[-1])
                ends = kept - separators * np.arange(count + 1, count + len(kept) + 1)
                count += len(kept)
            yield ends

    def _ends_by_separators(self, tokens: np.ndarray, job: Job) -> Iterator[np.ndarray]:
        """Yield the document ends that the separators mark, not counting the separators."""
        count = 0
        for first, chunk in token_files.chunks(tokens):
            places = first + np.flatnonzero(chunk == self.separator)
            ends = places - np.arange(count, count + len(places))
            count += len(places)
            yield ends[1:] if len(places) and places[0] == 0 else ends
        if len(tokens) and tokens[-1] != self.separator:
            yield np.array([len(tokens) - count])
        if len(tokens) and not count:
            job.tell(f"{self.inputs[0]}: the separator {self.separator} does not occur, so the file is one document; "
                     "set data.bos_token to the id that separates its documents")
