"""Token ids in other trainers' formats: their location in the file, dtype, and document ends if the format has them.

X.bin with X.idx is Megatron's indexed dataset (version 1). X.bin that begins with a magic number of llm.c is llm.c's;
any other X.bin is nanoGPT's, uint16 without a header. The last two have no document ends; the separator's id divides
documents. Every fault of a file is one ValueError.
"""
from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterator

import numpy as np

from meshtrain import files
from meshtrain.data.files import token_files

MEGATRON_MAGIC, MEGATRON_HEADER = b"MMIDIDX\x00\x00", 34
MEGATRON_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64,
                   7: np.float32, 8: np.uint16}
# (magic number, version) of files for gpt2 and llama3 -> dtype.
LLM_C = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}
LLM_C_HEADER = 256 * 4


@dataclasses.dataclass(frozen=True, eq=False)
class IdFile:
    """The location of a file's ids. ends: yields chunks of document ends, int64; None if the format has no ends."""
    files: tuple[str, ...]        # all files read; the one with the ids first
    dtype: np.dtype
    offset: int                   # bytes before the first id
    size: int                     # ids
    ends: Callable[[], Iterator[np.ndarray]] | None
    mask: token_files.Numbers | None = None


def companions(path: str) -> list[str]:
    """Return the names of the files that may belong to an X.tokens.npy or X.bin."""
    index = token_files.ends_path(path) if path.endswith(token_files.TOKENS) else path.removesuffix(".bin") + ".idx"
    return [index, token_files.mask_path(path)] if path.endswith((token_files.TOKENS, ".bin")) else []


def open_ids(path: str) -> IdFile:
    """Return the location of the ids of an X.tokens.npy or X.bin, with X.mask.npy if present. Checks headers and sizes.
    Raises: ValueError."""
    ids, mask_file = _open_ids(path), token_files.mask_path(path)
    if not os.path.exists(mask_file):
        return ids
    mask = token_files.open_mask(mask_file, path, ids.size)
    return dataclasses.replace(ids, files=(*ids.files, mask_file), mask=mask)


def _open_ids(path: str) -> IdFile:
    if path.endswith(token_files.TOKENS):
        pair = token_files.open_pair(path)
        ends_file = token_files.ends_path(path)

        def ends() -> Iterator[np.ndarray]:
            found = pair.ends_file.map()
            token_files.check_rising(ends_file, found)
            return (chunk for _, chunk in token_files.chunks(found))

        return IdFile((path, ends_file), pair.ids.dtype, pair.ids.offset, pair.ids.size, ends)
    if not path.endswith(".bin"):
        raise ValueError(f"{path} is not named like a token file; give X{token_files.TOKENS} (ids), with "
                         f"X{token_files.ENDS} beside it, or X.bin of Megatron (with X.idx), nanoGPT or llm.c")
    try:
        index = path.removesuffix(".bin") + ".idx"
        return _open_megatron(path, index) if os.path.exists(index) else _open_bare(path)
    except OSError as error:
        raise files.error_to_raise(error, f"{error.filename or path} cannot be read",
                                   "fix it or take it out of data.paths") from None


def _open_bare(path: str) -> IdFile:
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        header = file.read(12)
    magic, version, count = struct.unpack("<3i", header) if len(header) == 12 else (0, 0, 0)
    if magic not in {known for known, _ in LLM_C}:
        if size % 2:
            raise ValueError(f"{path} has {size:,} bytes, but a .bin without X.idx and without llm.c's header holds "
                             f"uint16 ids, two bytes each; write it again, or add Megatron's X.idx")
        return IdFile((path,), np.dtype("<u2"), 0, size // 2, None)
    if (magic, version) not in LLM_C:
        raise ValueError(f"{path} begins with llm.c's magic number {magic}, but has version {version}; known versions: "
                         f"{', '.join(f'{known} of {number}' for number, known in LLM_C)}; write it again with one of "
                         f"them")
    dtype = np.dtype(LLM_C[magic, version]).newbyteorder("<")
    if size != LLM_C_HEADER + count * dtype.itemsize:
        raise ValueError(f"{path} has {size:,} bytes, but its header says {count:,} ids of {dtype.itemsize} bytes "
                         f"after {LLM_C_HEADER} bytes; it was truncated or changed, so write it again")
    return IdFile((path,), dtype, LLM_C_HEADER, count, None)


def _open_megatron(path: str, index: str) -> IdFile:
    size = os.stat(index).st_size
    with open(index, "rb") as file:
        header = file.read(MEGATRON_HEADER)
    if len(header) < MEGATRON_HEADER or not header.startswith(MEGATRON_MAGIC):
        raise ValueError(f"{index} is not an index of Megatron (it does not begin with {MEGATRON_MAGIC[:7].decode()}); "
                         f"write it again with preprocess_data.py, or remove it if X.bin is nanoGPT's or llm.c's")
    version, code, sequences, documents = struct.unpack("<QBQQ", header[9:])
    if version != 1:
        raise ValueError(f"{index} has version {version} of Megatron's index; only version 1 is read; write it again")
    dtype = np.dtype(MEGATRON_DTYPES[code]).newbyteorder("<") if code in MEGATRON_DTYPES else None
    if dtype is None or dtype.kind == "f":
        raise ValueError(f"{index} says that {os.path.basename(path)} holds {dtype or f'dtype code {code}'}, but ids "
                         f"are integers; write it again with preprocess_data.py")
    wanted = MEGATRON_HEADER + sequences * 12 + documents * 8
    if size != wanted:
        raise ValueError(f"{index} has {size:,} bytes, but its header ({sequences:,} sequences, {documents:,} document "
                         f"marks) requires {wanted:,}; it was truncated, or is of several modalities; write it again")
    written = token_files.stamp(index)
    lengths, pointers, marks = (
        token_files.Numbers(index, written, count, np.dtype(kind), MEGATRON_HEADER + offset)
        for kind, offset, count in (("<i4", 0, sequences), ("<i8", 4 * sequences, sequences),
                                    ("<i8", 12 * sequences, documents)))
    held, left = divmod(os.stat(path).st_size, dtype.itemsize)
    last = pointers.last() + lengths.last() * dtype.itemsize
    if left or last != held * dtype.itemsize:
        raise ValueError(f"{path} has {held * dtype.itemsize + left:,} bytes, but in {os.path.basename(index)} the "
                         f"last sequence ends at byte {last:,}; the two must agree: write both again")
    return IdFile((path, index), dtype, 0, held,
               lambda: _megatron_ends(index, lengths.map(), pointers.map(), marks.map(), dtype.itemsize))


def _megatron_ends(index: str, lengths: np.ndarray, pointers: np.ndarray, marks: np.ndarray,
                   itemsize: int) -> Iterator[np.ndarray]:
    """Yield document ends, after checking that sequences are contiguous, as Megatron writes them."""
    end = 0
    for first, chunk in token_files.chunks(pointers):
        part = lengths[first:first + len(chunk)].astype(np.int64)
        ends = end + np.cumsum(part) * itemsize
        wrong = (part < 0) | (chunk != ends - part * itemsize)
        if wrong.any():
            k = int(np.argmax(wrong))
            raise ValueError(f"{index}: sequence {first + k} (from 0) has {part[k]} ids at byte {chunk[k]}, but the "
                             f"one before it ends at byte {ends[k] - part[k] * itemsize}; sequences must follow each "
                             f"other without gaps: write both files again")
        end = int(ends[-1])
    faults = (len(marks) == 0 or marks[0] != 0 or marks[-1] != len(lengths))
    if faults and (len(marks) or len(lengths)):
        raise ValueError(f"{index}: its document marks are {_shorten(marks)}, but they must begin at sequence 0 and "
                         f"end with the last, {len(lengths)}; write it again")
    before = 0
    for first, chunk in token_files.chunks(marks[1:]):
        falls = np.diff(chunk, prepend=before) < 0
        if falls.any() or (chunk > len(lengths)).any():
            k = int(np.argmax(falls | (chunk > len(lengths))))
            raise ValueError(f"{index}: document {first + k} (from 0) ends at sequence {chunk[k]}, before it begins or "
                             f"after the last, {len(lengths)}; write it again")
        before = int(chunk[-1])
        last = np.maximum(chunk - 1, 0)    # the last sequence of each document, if it has any
        ends = (pointers[last] // itemsize + lengths[last]) if len(lengths) else np.zeros(len(chunk), np.int64)
        yield np.where(chunk > 0, ends, 0)


def _shorten(marks: np.ndarray) -> str:
    return f"[{', '.join(map(str, marks[:3]))}{', …, ' + str(marks[-1]) if len(marks) > 3 else ''}]"
