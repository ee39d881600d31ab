"""Files are tokenized once: into token files, part by part, each part whole or absent whatever moment the process dies.

A part is one input file, or some text files together. Its manifest, written last, names the inputs by content and the token
files by checksum; both are held to it whenever the part is opened, so what is stale or damaged is built again. Parts live in
a directory that the tokenizer's content names, and one run at a time writes there.
This module knows no tokenizer but by `encode`, and no sources.
"""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from meshtrain.data import formats, token_files
from meshtrain.data.tokenizer import Tokenizer

DIRECTORY = ".meshtrain"
VERSION = 1    # of what a part holds: a change makes every older part a stranger
TEXT_PART_BYTES = 1 << 26
BATCH_CHARS, BATCH_PIECES = 1 << 22, 1 << 13
TELL_SECONDS = 5    # between two lines of progress where there is no terminal, and the wait that is worth a line

Tell = Callable[[str], None]


def open_tokenized(format: str, paths: Sequence[str], field: str, tokenizer: Tokenizer, directories: Sequence[Path],
                   tell: Tell) -> token_files.TokenFiles:
    """The documents of text, jsonl or parquet files as tokens, from the first of `directories` that has them or can take them.

    Raises: ValueError for a faulty input file, or where no directory can be written.
    """
    field = "" if format == "text" else field
    key = hashlib.blake2b(json.dumps([VERSION, format, field, tokenizer.key]).encode(), digest_size=8).hexdigest()
    groups = _group(format, paths)
    for directory in directories:
        home = directory / f"{format}-{key}"
        parts = [_Part(home, group) for group in groups]
        pairs = _check_all(parts, tell, quiet=True)
        if None not in pairs:
            return token_files.TokenFiles(tuple(pairs))
        try:
            home.mkdir(parents=True, exist_ok=True)
            lock = open(home / ".lock", "a")
        except OSError as error:
            refused = f"{directory} cannot be written ({error.strerror})"
            if directory != directories[-1]:
                tell(f"token cache: {refused}; using {directories[-1]}")
            continue
        with lock:
            _wait_for(lock, home, tell)
            again = [part for part, pair in zip(parts, pairs) if pair is None]    # another run may have built them meanwhile
            found = dict(zip(again, _check_all(again, tell, quiet=False)))
            missing = [part for part in again if found[part] is None]
            if missing:
                _build_all(missing, format, field, tokenizer, tell)
                found |= {part: token_files.open_pair(str(part.tokens)) for part in missing}
            pairs = [pair or found[part] for part, pair in zip(parts, pairs)]
        return token_files.TokenFiles(tuple(pairs))
    raise ValueError(f"token cache: {refused}; set data.cache to a directory that can")


def largest_id(path: str, directories: Sequence[Path], tell: Tell) -> int:
    """The largest id of a token file, -1 if it has none; found once, then remembered by size and time of change."""
    stat = os.stat(path)
    stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    notes = [directory / "ids" / f"{_name(directory, path)}.json" for directory in directories]
    for note in notes:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(note.read_text())
            if {name: known[name] for name in stamp} == stamp:
                return int(known["largest"])
    tokens, largest = token_files.open_pair(path).map(), -1
    with _Progress(f"scanning {os.path.basename(path)}", tokens.nbytes, tell) as progress:
        for start, chunk in token_files.chunks(tokens):
            largest = max(largest, int(chunk.max()))
            progress.reach(start * tokens.itemsize)
    for note in notes:
        with contextlib.suppress(OSError):    # it only saves time
            note.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(note, json.dumps(stamp | {"largest": largest}))
            break
    return largest


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Part:
    home: Path
    inputs: tuple[str, ...]

    def _file(self, suffix: str) -> Path:
        return self.home / (_name(self.home, self.inputs[0]) + suffix)

    @property
    def tokens(self) -> Path:
        return self._file(token_files.TOKENS)

    @property
    def ends(self) -> Path:
        return self._file(token_files.ENDS)

    @property
    def manifest(self) -> Path:
        return self._file(".json")


def _group(format: str, paths: Sequence[str]) -> list[tuple[str, ...]]:
    if format != "text":
        return [(path,) for path in paths]
    groups, size = [[]], 0
    for path in paths:    # a hundred thousand small texts are not to become as many parts
        groups[-1].append(path)
        size += os.stat(path).st_size
        if size >= TEXT_PART_BYTES:
            groups, size = [*groups, []], 0
    return [tuple(group) for group in groups if group]


def _name(home: Path, path: str) -> str:
    """A file's name in the cache. From where it stands to the cache, so that both can be moved together."""
    way = os.path.relpath(os.path.realpath(path), os.path.realpath(home))
    return f"{os.path.basename(path)[:100]}-{hashlib.blake2b(os.fsencode(way), digest_size=8).hexdigest()}"


def _check_all(parts: Sequence[_Part], tell: Tell, quiet: bool) -> list[token_files.Pair | None]:
    started = time.perf_counter()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        checked = list(pool.map(_check, parts))
    seconds = time.perf_counter() - started
    if seconds > TELL_SECONDS:
        size = sum(pair.stamp[1] for pair, _ in checked if pair)
        tell(f"token cache: checked {size / 1e9:.1f} GB in {seconds:.0f} s")
    for part, (_, reason) in zip(parts, checked):
        if reason and not quiet:
            tell(f"token cache: {part.inputs[0]}{' and others' if part.inputs[1:] else ''}: {reason}; tokenizing again")
    return [pair for pair, _ in checked]


def _check(part: _Part) -> tuple[token_files.Pair | None, str]:
    """(the pair, "") where it is whole and fresh, else (None, why; "" where nothing was ever built)."""
    try:
        text = part.manifest.read_text()
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError):
        return None, "its manifest cannot be read"
    try:
        manifest = json.loads(text)
        old = manifest["inputs"]
        if [one["name"] for one in old] != [os.path.basename(path) for path in part.inputs]:
            return None, "other files belong to this part now"
        new = [one if _quick(path) == (one["size"], one["mtime_ns"]) else _identify(path)
               for path, one in zip(part.inputs, old)]
        if [one["blake2b"] for one in new] != [one["blake2b"] for one in old]:
            return None, "the file has changed"
        pair = token_files.open_pair(str(part.tokens))
        tokens = pair.map()
        if (str(tokens.dtype), len(tokens), len(pair.ends)) != (manifest["dtype"], manifest["tokens"], manifest["documents"]):
            return None, "the cache is damaged (another size)"
        sums = {"tokens_crc32": token_files.checksum(tokens), "ends_crc32": token_files.checksum(pair.ends)}
        if sums != {name: manifest[name] for name in sums}:
            return None, "the cache is damaged (wrong checksum)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"the cache is damaged ({str(error) or type(error).__name__})"
    if new != old:
        with contextlib.suppress(OSError):    # touched only: spares the next run the reading
            _write_whole(part.manifest, json.dumps(manifest | {"inputs": new}))
    return pair, ""


def _quick(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def _identify(path: str) -> dict:
    size, mtime_ns = _quick(path)
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"name": os.path.basename(path), "size": size, "mtime_ns": mtime_ns, "blake2b": content}


# ---- building --------------------------------------------------------------------------------------------------------


def _wait_for(lock, home: Path, tell: Tell) -> None:
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"token cache: waiting for another run that fills {home}")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise ValueError(f"token cache: {home} cannot be locked ({error.strerror}); "
                         "set data.cache to a directory of another file system") from None


def _build_all(parts: Sequence[_Part], format: str, field: str, tokenizer: Tokenizer, tell: Tell) -> None:
    for left in parts[0].home.glob("*.tmp"):    # of a run that was killed; we hold the lock
        left.unlink(missing_ok=True)
    total = sum(os.stat(path).st_size for part in parts for path in part.inputs)
    count = sum(len(part.inputs) for part in parts)
    what = f"tokenizing {count} file{'s' * (count > 1)}"
    tell(f"token cache: {what}, {total / 1e6:,.1f} MB, into {parts[0].home}")
    with _Progress(what, total, tell) as progress:
        for part in parts:
            _build(part, format, field, tokenizer, progress)


def _build(part: _Part, format: str, field: str, tokenizer: Tokenizer, progress: _Progress) -> None:
    """Writes a part under temporary names and renames it, the manifest last. Raises: ValueError; then nothing is left."""
    inputs = [_identify_input(path) for path in part.inputs]
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    temporary = [path.with_name(path.name + ".tmp") for path in (part.tokens, part.ends)]
    writers = []
    try:
        writers += [token_files.Writer(str(path), kind) for path, kind in zip(temporary, (dtype, np.int64))]
        tokens, ends = writers
        for path, identity in zip(part.inputs, inputs):
            for batch in _batches(formats.read(format, path, field)):
                _append(tokens, ends, batch, tokenizer.encode([piece.text for piece in batch]))
                progress.reach(batch[-1].position)
            if _quick(path) != (identity["size"], identity["mtime_ns"]):
                raise ValueError(f"{path} changed while it was tokenized; start again when nobody writes it")
            progress.finish(identity["size"])
        for writer in writers:
            writer.close()
        for path, whole in zip(temporary, (part.tokens, part.ends)):
            os.replace(path, whole)
        _write_whole(part.manifest, json.dumps(
            {"inputs": inputs, "dtype": str(tokens.dtype), "tokens": tokens.count, "documents": ends.count,
             "tokens_crc32": tokens.crc, "ends_crc32": ends.crc}))
    except OSError as error:
        raise ValueError(f"token cache: {part.home} cannot be written: {error.strerror}; make room there (2 to 4 bytes a "
                         "token), or set data.cache to another directory; what is finished is kept") from None
    finally:
        for writer in writers:
            writer.abandon()
        for path in temporary:
            path.unlink(missing_ok=True)


def _identify_input(path: str) -> dict:
    try:
        return _identify(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; mend it or take it out of data.paths") from None


def _batches(pieces: Iterator[formats.Piece]) -> Iterator[list[formats.Piece]]:
    """Enough at once to keep the tokenizer's threads busy."""
    batch, chars = [], 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _append(tokens: token_files.Writer, ends: token_files.Writer, batch: Sequence[formats.Piece],
            encoded: Sequence[np.ndarray]) -> None:
    after = tokens.count + np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
    tokens.append(np.concatenate(encoded))
    ends.append(after[[piece.last for piece in batch]])


def _write_whole(path: Path, text: str) -> None:
    """A small file, whole or absent. Its temporary name is this process's: notes are written without a lock."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)    # renames are on disk once their directory is
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class _Progress:
    """A bar on a terminal; elsewhere a line now and then, and nothing about what is done at once."""

    def __init__(self, what: str, total: int, tell: Tell):
        self.what, self.total, self.done, self.tell = what, max(1, total), 0, tell
        self.started = self.told = time.monotonic()
        self.bar = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich import console, progress
            self.bar = progress.Progress(progress.TextColumn("{task.description}"), progress.BarColumn(),
                                         progress.DownloadColumn(), progress.TransferSpeedColumn(),
                                         progress.TimeRemainingColumn(), console=console.Console(stderr=True))
            self.task = self.bar.add_task(self.what, total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self.bar:
            self.bar.stop()
        elif error[0] is None and self.told > self.started:
            self.tell(f"{self.what}: done in {time.monotonic() - self.started:.0f} s")

    def reach(self, position: int) -> None:
        """`position` bytes of the present file are done."""
        done, now = self.done + position, time.monotonic()
        if self.bar:
            self.bar.update(self.task, completed=done)
        elif now - self.told > TELL_SECONDS:
            self.told = now
            self.tell(f"{self.what}: {done / self.total:.0%}, {done / 1e6 / (now - self.started):.1f} MB/s")

    def finish(self, size: int) -> None:
        self.done += size
        self.reach(0)
