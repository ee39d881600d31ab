"""Reads and writes safetensors files. The header is checked before any data is read.

A file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range), and the numbers, row-major,
little-endian. The safetensors library is not used, because it needs all tensors of a file in memory to write it, and
must map a file to read a part. Nothing in a file is ever executed. Source: github.com/huggingface/safetensors, the
README's "Format".
"""
from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from meshtrain import files
from meshtrain.storage import buckets, copies

MOST_HEADER_BYTES = 100_000_000     # the library's own limit
MOST_DIMS = 8       # multiplying 250,000 dims would block signals for minutes
# Readable dtypes.
DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
          "BF16": np.dtype(ml_dtypes.bfloat16)}
# float8 weights with scales by block, such scales, and bytes of MXFP4.
READABLE = DTYPES | {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
                     "U8": np.dtype(np.uint8)}
# Bytes of an element. Dtypes that are not in READABLE, of other quantized weights, are known but unsupported.
SIZES = {name: dtype.itemsize for name, dtype in READABLE.items()} | {
    "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "BOOL": 1, "F8_E5M2": 1}
NAMES = {str(dtype): name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor's location: bytes start to stop of the file, followed by the bytes of `more`."""
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    more: tuple[Entry, ...] = ()

    def part(self, number: int) -> Entry:
        """Return the entry of one of the tensors that are stacked in this one."""
        size = (self.stop - self.start) // self.shape[0]
        begin = self.start + number * size
        return Entry(self.path, self.dtype, self.shape[1:], begin, begin + size)


def read_header(path: Path) -> dict[str, Entry]:
    """Return name -> Entry of every tensor of a file. Raises: ValueError, without the file's name, if the file is
    malformed."""
    remote = copies.remote(path)
    if not remote and not files.is_file(path):         # opening a pipe or a device might block forever
        raise ValueError("is not a file" if os.path.lexists(path) else "there is no such file")

    def load() -> tuple[int, int, bytes]:
        size = remote.size if remote else os.stat(path).st_size
        if size < 8:
            raise ValueError(f"has {size} bytes, less than any header")
        length = int.from_bytes(_bytes(path, 0, 8), "little")
        if length > min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"says that its header has {length:,} bytes, but the file has {size:,}")
        return size, length, _bytes(path, 8, 8 + length)

    size, length, text = files.attempt(load, f"{path} cannot be read", "make it readable")
    header = parse_json(text, "its header")
    header.pop("__metadata__", None)
    first = 8 + length
    entries = {name: _entry(path, name, given, first) for name, given in header.items()}
    end = first
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise ValueError(f"its tensors overlap or leave a hole at byte {min(entry.start, end):,}")
        end = entry.stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end:,}, but the file has {size:,}; it is truncated or damaged")
    return entries


def parse_json(text: bytes, what: str) -> dict:
    """Return a JSON object. what: the object's name in messages. Raises: ValueError if the text is malformed or has a
    name twice."""
    def once(pairs: list[tuple[str, object]]) -> dict:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name occurs twice")
        return made
    try:
        document = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:       # invalid UTF-8 included
        raise ValueError(f"{what} is broken: {str(error)[:80]}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{what} is broken: it is not a JSON object")
    return document


def _entry(path: Path, name: str, given: Any, first: int) -> Entry:
    try:
        dtype, shape, (start, stop) = given["dtype"], given["shape"], given["data_offsets"]
        numbers = [*shape, start, stop]
        sound = (len(shape) <= MOST_DIMS and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
                 and stop - start == math.prod(shape) * SIZES[dtype])
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ValueError(f"its entry of {name[:80]!r} is broken: {str(given)[:80]}")
    return Entry(path, dtype, tuple(shape), first + start, first + stop)


def join(entries: Sequence[Entry]) -> Entry:
    """Return an entry of tensors of one dtype, concatenated along their first dim."""
    first, *more = entries
    shape = (sum(entry.shape[0] for entry in entries), *first.shape[1:])
    return dataclasses.replace(first, shape=shape, more=tuple(more))


def read(entry: Entry, start: int, stop: int) -> np.ndarray:
    """Return elements [start, stop) of a tensor in row-major order, in the file's dtype."""
    dtype = READABLE[entry.dtype]
    if entry.more:
        parts, begin = [], 0
        for tensor in (dataclasses.replace(entry, more=()), *entry.more):
            end = begin + (tensor.stop - tensor.start) // dtype.itemsize
            if max(start, begin) < min(stop, end):
                parts.append(read(tensor, max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        return np.concatenate(parts) if parts else np.empty(0, dtype)
    return np.frombuffer(_bytes(entry.path, *(entry.start + at * dtype.itemsize for at in (start, stop))), dtype)


def _bytes(path: Path, start: int, stop: int) -> bytearray | bytes:
    """Return bytes [start, stop) of a local file or of a file in a bucket. Raises: OSError, also if the file has become
    shorter; StorageError."""
    if remote := copies.remote(path):
        return buckets.read_range(remote, start, stop)
    content = bytearray(stop - start)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = memoryview(content)
        while left:
            if not (count := file.readinto(left)):
                raise OSError(None, "it is shorter than it was", str(path))
            left = left[count:]
    return content


def copy(entries: Mapping[str, Entry], path: Path) -> None:
    """Write a file with these tensors of any dtype, copied byte for byte."""
    text, _ = header({name: (entry.dtype, entry.shape) for name, entry in entries.items()})
    with open(path, "wb") as file:
        file.write(text)
        for entry in entries.values():
            for at in range(entry.start, entry.stop, files.CHUNK_BYTES):
                file.write(_bytes(entry.path, at, min(at + files.CHUNK_BYTES, entry.stop)))
        file.flush()
        os.fsync(file.fileno())


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Return (the first bytes of a file with these tensors, name -> offset of the tensor's first byte). tensors: name
    -> (dtype's name in safetensors, shape)."""
    at, entries = 0, {}
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)     # alignment
    return len(text).to_bytes(8, "little") + text, {
        name: 8 + len(text) + entry["data_offsets"][0] for name, entry in entries.items()}
