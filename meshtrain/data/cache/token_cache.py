"""Tokenizes files once into token files, part by part.

A part is one input file, or several neighbouring small text files. Its manifest is written last. The manifest
identifies the inputs by content and the token files by checksum, and has size, mtime and inode of all these files at
the last verification. While these are unchanged nothing is read again; only `meshtrain.tokenize --verify` finds silent
bit flips. The directory of parts is named after the tokenizer's content. This module uses only `encode` of a tokenizer,
and knows no sources.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshtrain import files
from meshtrain.data.cache import parts
from meshtrain.data.cache.parts import Job
from meshtrain.data.documents import formats, own, text_bytes
from meshtrain.data.documents.conversations import Chats
from meshtrain.data.documents.dividing import Markers
from meshtrain.data.documents.faulty import LeftOut
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.data.files import token_files
from meshtrain.data.progress import FileProgress

VERSION = 2    # of a part's format; a change invalidates all older parts
TEXT_PART_BYTES = 1 << 26
BATCH_CHARS, BATCH_PIECES = 1 << 22, 1 << 13


def open_tokenized(format: str, groups: Sequence[tuple[tuple[str, ...], Sequence[Path]]],
                   field: str, tokenizer: Tokenizer, job: Job, chats: Chats | None = None,
                   split_at: str = "") -> list[token_files.IndexedTokens | None]:
    """Return the tokens of the documents in text, jsonl, parquet, arrow or chat files, or of `own.OWN`, one result for
    each group; None for a missing part of another share (`parts.open_all`).

    groups: (paths, candidate cache directories) of each part, see `group`. field: the key or column of the text in
    jsonl, parquet and arrow files; the value of data.source for `own.OWN`. chats: how chat files become tokens.
    split_at: the marker at which documents of other files are divided. Raises: as `parts.open_all`.
    """
    field = chats.key if chats else "" if format == "text" else field
    content = own.identify(field) if format == own.OWN else field
    identity = [VERSION, format, content, tokenizer.key, *[split_at] * bool(split_at)]
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    choices, counted = [], chats is None and format != own.OWN and text_bytes.are_counted(tokenizer)
    earlier: dict[Path, Earlier] = {}
    markers = Markers(tokenizer, split_at)
    for paths, directories in groups:
        homes = [directory / f"{format}-{key}" for directory in directories]
        for home in homes:
            earlier.setdefault(home, Earlier(home, counted))
        choices.append([Tokenized(home, paths, format, field, tokenizer, earlier[home], markers, chats, counted)
                        for home in homes])
    pairs = parts.open_all(choices, job)
    markers.tell(job.tell)
    return pairs


def group(format: str, paths: Sequence[str], root: str) -> list[tuple[str, ...]]:
    """Group files under the directory `root` into parts: neighbouring texts together, every other file alone.

    Small texts then need no part each. Whether a file ends a part depends only on its own name and size, so that adding
    or removing one changes only its own part. Parts have TEXT_PART_BYTES on average.
    """
    if format != "text":
        return [(path,) for path in paths]
    groups, open_group = [], []
    for path in paths:
        open_group.append(path)
        name = os.fsencode(parts.relative_path(Path(root), path))
        draw = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest())
        if draw < 2**48 * os.stat(path).st_size // TEXT_PART_BYTES:
            groups.append(tuple(open_group))
            open_group = []
    return [*groups, tuple(open_group)] if open_group else groups


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenized(parts.Part):
    """The tokens of `inputs`, in order."""
    home: Path
    inputs: tuple[str, ...]
    format: str
    field: str
    tokenizer: Tokenizer
    earlier: Earlier
    markers: Markers
    chats: Chats | None = None
    counted: bool = False       # whether the bytes of documents are counted
    verb = "tokenizing"

    def files(self, manifest: dict | None = None) -> list[Path]:
        """Return the paths of the part's files: the tokens, the ends, the mask if some tokens are not learned, and the
        bytes of documents if bytes are counted. manifest: the part's manifest; an older manifest has no counted bytes.
        """
        masked = self.chats and not self.chats.learn_all
        counted = self.counted and (manifest is None or len(manifest["crc32"]) > 2)
        names = (token_files.TOKENS, token_files.ENDS, *[token_files.MASK] * bool(masked),
                 *[token_files.BYTES] * counted)
        return [self.file(name) for name in names]

    def _look(self) -> token_files.IndexedTokens | None:
        manifest = self.note()
        if not parts.has_stamps(manifest, self._stamps(manifest)):
            return None
        if any(_size_and_time(path) != (text["size"], text["mtime_ns"])
               for path, text in zip(self.inputs, manifest["inputs"])):
            return None
        return self._open(manifest)

    def check(self, job: Job) -> tuple[token_files.IndexedTokens | None, str]:
        """See `parts.Part`. Reads the cache files that have changed since the note, or with `verify` all of them.
        Raises: FileSystemError if a cache file cannot be read: an unreadable file is no reason to repeat hours of
        tokenizing."""
        return files.attempt(lambda: self._check(job), f"token cache: {self.home} cannot be read",
                             "set data.cache to another directory")

    def _check(self, job: Job) -> tuple[token_files.IndexedTokens | None, str]:
        """As `check`. Raises: OSError on a transient error of the file system."""
        try:
            text = self.manifest.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        except (OSError, UnicodeDecodeError) as error:
            if files.is_moment(error):
                raise
            return None, "its manifest cannot be read"
        try:
            manifest = json.loads(text)
            old = manifest["inputs"]
            new = [one if _size_and_time(path) == (one["size"], one["mtime_ns"]) else _identify(self.home, path, job)
                   for path, one in zip(self.inputs, old, strict=True)]
            if [one["blake2b"] for one in new] != [one["blake2b"] for one in old]:
                return None, "the file has changed"
            pair, stamps = self._open(manifest), self._stamps(manifest)
            if not parts.has_stamps(manifest, stamps) or job.verify:
                if pair.checksums(job.check_stop) != manifest["crc32"]:
                    return None, "the cache is damaged (wrong checksum)"
        except (OSError, ValueError, KeyError, TypeError) as error:
            if files.is_moment(error):
                raise
            return None, f"the cache is damaged ({str(error) or type(error).__name__})"
        if new != old or not parts.has_stamps(manifest, stamps):
            # the files were only touched or moved, or this is another host: the next run need not read them
            self.renew_note(manifest | {"inputs": new}, stamps)
        return pair, ""

    def _open(self, manifest: dict) -> token_files.IndexedTokens:
        """Return the token files of a part. Raises: OSError, ValueError, KeyError, TypeError if the files do not match
        the manifest."""
        tokens, _, *more = map(str, self.files(manifest))
        pair = token_files.open_pair(tokens)
        if (str(pair.ids.dtype), pair.ids.size, pair.num_documents) != (
                manifest["dtype"], manifest["tokens"], manifest["documents"]):
            raise ValueError("another size")
        left_out = LeftOut(self.inputs[0], **manifest["left_out"]) if "left_out" in manifest else None
        pair = dataclasses.replace(pair, largest=manifest.get("largest", -1), left_out=left_out)
        if self.format == own.OWN:
            pair = dataclasses.replace(pair, crc32=tuple(manifest["crc32"]))
        if more and self.chats:
            return dataclasses.replace(pair, mask=token_files.open_mask(*more, tokens, pair.ids.size))
        if more:
            bytes_file = token_files.open_ends(*more, tokens)
            if bytes_file.size != pair.num_documents:
                raise ValueError("another size")
            return dataclasses.replace(pair, bytes_file=bytes_file)
        return pair

    def _stamps(self, manifest: dict) -> list[list[int]]:
        return [list(token_files.stamp(str(path))) for path in self.files(manifest)]

    def build(self, job: Job, progress: FileProgress) -> token_files.IndexedTokens:
        """See `parts.Part`. Writes temporary files and renames them, the manifest last. The tokens of texts that
        another part of this directory has are copied."""
        dtype = np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32
        writers = []
        try:
            for path, kind in zip(self.files(), (dtype, np.int64, np.uint8 if self.chats else np.int64)):
                writers.append(token_files.Writer(path, kind))
            tokens, ends, *_ = writers
            left_out = LeftOut(self.inputs[0]) if self.chats and self.chats.leave_out else None
            inputs = self._fill_chats(writers, job, progress, left_out) if self.chats else \
                self._fill(writers, job, progress)
            for writer in writers:
                writer.close()
            for writer in writers:
                writer.rename()
            manifest = {"inputs": inputs, "dtype": str(tokens.dtype), "tokens": tokens.count, "documents": ends.count,
                        "largest": tokens.largest, "crc32": [writer.crc for writer in writers]}
            if left_out:
                manifest["left_out"] = left_out.as_saved()
            manifest["stamps"] = self._stamps(manifest)
            files.replace(self.manifest, json.dumps(manifest), shared=True)
            return self._open(manifest)
        except OSError as error:
            raise files.error_to_raise(error, f"token cache: {self.home} cannot be written; finished parts are kept",
                                       "set data.cache to another directory") from None
        finally:
            for writer in writers:
                writer.abandon()

    def _fill(self, writers: Sequence[token_files.Writer], job: Job, progress: FileProgress) -> list[dict]:
        """Write the tokens of the inputs; return the inputs' identities. writers: one for each of `files`."""
        batch, inputs = _Batch(writers, self.tokenizer, job), []
        for path in self.inputs:
            identity = _identify_input(self.home, path, job)
            inputs.append(identity)
            alone = self.format == "text" and not self.markers.marker       # a file is one document
            known = self.earlier.document(identity, job) if alone else None
            if known:
                batch.copy(*known)
            elif self.format == own.OWN:
                for document in own.read(self.field, path, self.tokenizer):
                    if isinstance(document, formats.TextPiece):
                        self.markers.count_names(path, document.text)
                        batch.add(document)
                    else:
                        batch.copy(document, 0)
            else:
                for piece in self.markers.documents(path, formats.read(self.format, path, self.field)):
                    if batch.add(piece):
                        progress.reach(piece.position)
            _check_unchanged(path, identity)
            progress.finish(identity["size"])
        batch.flush()
        return inputs

    def _fill_chats(self, writers: Sequence[token_files.Writer], job: Job, progress: FileProgress,
                    left_out: LeftOut | None) -> list[dict]:
        """As `_fill`, for conversations. left_out: receives the faulty lines, if these are left out."""
        tokens, ends, *mask = writers
        assert self.chats is not None
        (path,) = self.inputs
        identity = _identify_input(self.home, path, job)
        for encoded, position in self.chats.read(path, job.tell, left_out):
            job.check_stop()
            progress.reach(position)
            if not encoded:     # all lines of the batch are left out
                continue
            ends.append(tokens.count + np.cumsum([len(conversation.ids) for conversation in encoded], dtype=np.int64))
            tokens.append(np.concatenate([conversation.ids for conversation in encoded]))
            for writer in mask:
                writer.append(np.concatenate([conversation.mask for conversation in encoded]))
        _check_unchanged(path, identity)
        progress.finish(identity["size"])
        return [identity]


class _Batch:
    """Collects pieces of documents until they keep the tokenizer's threads busy."""

    def __init__(self, writers: Sequence[token_files.Writer], tokenizer: Tokenizer, job: Job):
        self.tokens, self.ends, *self.bytes = writers
        self.tokenizer, self.job = tokenizer, job
        self.pieces: list[formats.TextPiece] = []
        self.chars, self.read = 0, 0        # read: bytes of text so far

    def copy(self, ids: np.ndarray, num_bytes: int) -> None:
        """Add a document that is already tokenized."""
        self.flush()
        self.tokens.append(ids)
        self.ends.append([self.tokens.count])
        self.read += num_bytes
        for writer in self.bytes:
            writer.append([self.read])

    def add(self, piece: formats.TextPiece) -> bool:
        """Add a piece; return whether the batch was full and has been written."""
        self.pieces.append(piece)
        self.chars += len(piece.text)
        full = self.chars >= BATCH_CHARS or len(self.pieces) >= BATCH_PIECES
        if full:
            self.flush()
        return full

    def flush(self) -> None:
        self.job.check_stop()
        if self.pieces:
            encoded = self.tokenizer.encode([piece.text for piece in self.pieces])
            after = self.tokens.count + np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
            self.tokens.append(np.concatenate(encoded))
            last = [piece.last for piece in self.pieces]
            self.ends.append(after[last])
            for writer in self.bytes:
                sizes = [len(piece.text) if piece.text.isascii() else len(piece.text.encode()) for piece in self.pieces]
                read = self.read + np.cumsum(sizes, dtype=np.int64)
                writer.append(read[last])
                self.read = int(read[-1])
            self.pieces, self.chars = [], 0


class Earlier:
    """Texts in the parts of a directory, by content. Regrouped parts copy their tokens from them. counted: whether the
    bytes of documents are needed, which older parts lack."""

    def __init__(self, home: Path, counted: bool):
        self.home, self.counted = home, counted
        self._pairs: dict[Path, token_files.IndexedTokens | None] = {}

    def document(self, identity: dict, job: Job) -> tuple[np.ndarray, int] | None:
        """Return (tokens, bytes if counted) of a text; None if no complete part has it."""
        manifest, document = self._index.get(identity["blake2b"], (None, 0))
        if manifest and manifest not in self._pairs:
            self._pairs[manifest] = self._open_verified(manifest, job)
        pair = manifest and self._pairs[manifest]
        if not pair:
            return None

        def span(ends: np.ndarray) -> slice:
            return slice(int(ends[document - 1]) if document else 0, int(ends[document]))

        counted = span(pair.bytes_file.array) if pair.bytes_file else slice(0, 0)
        return pair.ids.array[span(pair.ends)], counted.stop - counted.start

    @functools.cached_property
    def _index(self) -> dict[str, tuple[Path, int]]:
        places: dict[str, tuple[Path, int]] = {}
        for manifest in self.home.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                inputs = json.loads(manifest.read_text(encoding="utf-8"))["inputs"]
                places.update((text["blake2b"], (manifest, k)) for k, text in enumerate(inputs))
        return places

    def _open_verified(self, manifest: Path, job: Job) -> token_files.IndexedTokens | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            tokens = str(manifest).removesuffix(".json") + token_files.TOKENS
            pair = token_files.open_pair(tokens)
            if self.counted:
                pair = dataclasses.replace(pair, bytes_file=token_files.open_ends(
                    tokens.removesuffix(token_files.TOKENS) + token_files.BYTES, tokens))
            if pair.checksums(job.check_stop) == json.loads(manifest.read_text(encoding="utf-8"))["crc32"]:
                return pair
        return None


def _check_unchanged(path: str, identity: dict) -> None:
    if _size_and_time(path) != (identity["size"], identity["mtime_ns"]):
        raise ValueError(f"{path} changed while it was tokenized; start again when no program writes to it")


def _size_and_time(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def _identify(home: Path, path: str, job: Job) -> dict:
    size, mtime_ns = _size_and_time(path)
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            job.check_stop()
            digest.update(chunk)
    return {"name": parts.relative_path(home, path), "size": size, "mtime_ns": mtime_ns, "blake2b": digest.hexdigest()}


def _identify_input(home: Path, path: str, job: Job) -> dict:
    return files.attempt(lambda: _identify(home, path, job), f"{path} cannot be read",
                         "fix it or take it out of data.paths")
