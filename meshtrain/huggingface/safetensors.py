"""Files of safetensors: a header that is checked before a byte of data is read, and where each tensor lies.

A file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range), and the numbers, row by row,
little-endian. The library of that name holds all tensors of a file when it writes, and cannot read part of one without
mapping it; the format is small enough to be read and written here. Nothing in a file is ever executed.
Source: github.com/huggingface/safetensors, the README's "Format".
"""
from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from meshtrain import files

MOST_HEADER_BYTES = 100_000_000     # the library's own limit
MOST_DIMS = 8       # the product of 250,000 numbers of 63 bits takes minutes, in which no signal is heard
# What can be read; each has other bits than ours, or ours.
DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
          "BF16": np.dtype(ml_dtypes.bfloat16)}
# Known and not read: quantized weights come in these.
OTHER_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1,
               "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
               "F8_E8M0": 1}
NAMES = {str(dtype): name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: bytes start to stop of the file, counted from its first byte."""
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> Entry of every tensor of a file. Raises: ValueError for a file that is not what it says, without its
    name."""
    if not files.is_file(path):         # of a pipe or a device: False, and opening one might wait for ever
        raise ValueError("is not a file" if os.path.lexists(path) else "there is no such file")
    def load() -> tuple[int, int, bytes]:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise ValueError(f"has {size} bytes, less than any header")
            if length > min(MOST_HEADER_BYTES, size - 8):
                raise ValueError(f"says that its header has {length:,} bytes, and the file has {size:,}")
            return size, length, file.read(length)

    size, length, text = files.attempted(load, f"{path} cannot be read", "let it be read")
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
        raise ValueError(f"its tensors end at byte {end:,}, and the file has {size:,}; it was cut off, or is damaged")
    return entries


def parse_json(text: bytes, what: str) -> dict:
    """An object of JSON in which no name stands twice. what: for the message. Raises: ValueError."""
    def once(pairs):
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name stands twice")
        return made
    try:
        found = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:       # not UTF-8 is a ValueError, too
        raise ValueError(f"{what} is broken: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is broken: it is no object")
    return found


def _entry(path: Path, name: str, given, first: int) -> Entry:
    try:
        dtype, shape, (start, stop) = given["dtype"], given["shape"], given["data_offsets"]
        numbers = [*shape, start, stop]
        bytes_each = DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_BYTES[dtype]
        sound = (len(shape) <= MOST_DIMS and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
                 and stop - start == math.prod(shape) * bytes_each)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ValueError(f"its entry of {name[:80]!r} is broken: {str(given)[:80]}")
    return Entry(path, dtype, tuple(shape), first + start, first + stop)


def read(entry: Entry, start: int, stop: int) -> np.ndarray:
    """Elements start to stop of a tensor, counted row by row, in the file's dtype."""
    dtype = DTYPES[entry.dtype]
    with open(entry.path, "rb", buffering=0) as file:
        found = np.fromfile(file, dtype, stop - start, offset=entry.start + start * dtype.itemsize)
    if len(found) != stop - start:
        raise OSError(None, "it is shorter than it was", str(entry.path))
    return found


def header(tensors: Mapping[str, tuple[int, ...]], dtype: str) -> tuple[bytes, dict[str, int]]:
    """(the first bytes of a file of these tensors, name -> the byte where each begins). dtype: as safetensors calls
    it."""
    at, entries = 0, {}
    for name, shape in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)     # so that the numbers are aligned
    return len(text).to_bytes(8, "little") + text, {
        name: 8 + len(text) + entry["data_offsets"][0] for name, entry in entries.items()}
