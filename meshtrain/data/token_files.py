"""Token files: X.tokens.npy, one array of uint16 or uint32 ids, and X.ends.npy, int64, where each document ends in it.

Any program with numpy writes them; the token cache is made of them too, so there is one reader. Ids are memory-mapped and
never held; of a document only its place is.
"""
from __future__ import annotations

import bisect
import dataclasses
import functools
import io
import itertools
import os
import zlib
from collections.abc import Sequence

import numpy as np

TOKENS, ENDS = ".tokens.npy", ".ends.npy"
CHUNK_BYTES = 1 << 26
# A map holds a descriptor, and a process may have only 1024 of them.
MAPS_HELD = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One pair of files, checked. `stamp` tells whether the tokens are still the file that was checked."""
    path: str
    ends: np.ndarray         # int64 [documents]
    stamp: tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFiles:
    """A Source: the documents of many pairs, one pair after another."""
    pairs: tuple[Pair, ...]

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.concatenate([np.diff(pair.ends, prepend=0) for pair in self.pairs])

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([pair.ends for pair in self.pairs]) - self.lengths

    @functools.cached_property
    def _firsts(self) -> list[int]:
        """The first document of each pair; a list, because numpy takes microseconds to search it for one."""
        return list(itertools.accumulate((len(pair.ends) for pair in self.pairs[:-1]), initial=0))

    @functools.cached_property
    def _map(self):
        return functools.lru_cache(maxsize=MAPS_HELD)(self._open)

    def _open(self, k: int) -> np.ndarray:
        pair = self.pairs[k]
        try:
            if _stamp(pair.path) == pair.stamp:
                return map_array(pair.path)
        except (OSError, ValueError):
            pass
        raise OSError(f"{pair.path} is not the file it was when the run began; token files must not change while a run reads "
                      "them")

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        k = bisect.bisect_right(self._firsts, document) - 1
        begin = int(self._starts[document])
        return self._map(k)[begin + start:begin + stop]


def ends_path(path: str) -> str:
    return path.removesuffix(TOKENS) + ENDS


def map_array(path: str) -> np.ndarray:
    """The array of an .npy file, memory-mapped, as a plain ndarray: slices of np.memmap cost ten times as much.

    Raises: ValueError, OSError. Never unpickles.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except (OSError, ValueError):
        raise
    except Exception as error:    # numpy parses the header with Python's tokenizer, whose errors are many
        raise ValueError(f"broken header ({error})") from None


def open_pair(path: str) -> Pair:
    """Raises: ValueError where the two files are not what the module says, or do not fit each other."""
    if not path.endswith(TOKENS):
        raise ValueError(f"{path} is not named as a token file; give X{TOKENS} (ids), with X{ENDS} beside it")
    stamp = _open_checked(path, "stat")
    tokens = _open_checked(path, "tokens")
    if tokens.ndim != 1 or tokens.dtype not in (np.dtype(np.uint16), np.dtype(np.uint32)):
        raise ValueError(f"{path} holds {_describe(tokens)}, and token ids are one dimension of uint16 or uint32; "
                         "write np.save(path, ids.astype(np.uint32))")
    ends_file = ends_path(path)
    if not os.path.exists(ends_file):
        raise ValueError(f"{ends_file} is missing beside {os.path.basename(path)}; write where each document ends, in tokens: "
                         "np.save(path, np.cumsum(lengths))")
    ends = _open_checked(ends_file, "ends")
    if ends.ndim != 1 or ends.dtype != np.dtype(np.int64):
        raise ValueError(f"{ends_file} holds {_describe(ends)}, and the ends of documents are one dimension of int64; "
                         "write np.save(path, np.cumsum(lengths, dtype=np.int64))")
    ends = np.array(ends)
    steps = np.diff(ends, prepend=0)
    if (steps < 0).any():
        document = int(np.argmax(steps < 0))
        raise ValueError(f"{ends_file}: document {document} (from 0) ends at {ends[document]}, before it begins at "
                         f"{ends[document - 1] if document else 0}; ends must not fall: write np.cumsum(lengths)")
    last = int(ends[-1]) if len(ends) else 0
    if last != len(tokens):
        raise ValueError(f"{ends_file}: the last document ends at {last:,}, and {os.path.basename(path)} has {len(tokens):,} "
                         "tokens; the two must agree: write both again")
    return Pair(path, ends, stamp)


def first_beyond(pair: Pair, vocab_size: int) -> tuple[int, int]:
    """(document, id) of the first id that a vocabulary of this size does not have. There must be one."""
    tokens, step = map_array(pair.path), CHUNK_BYTES // 4
    for start in range(0, len(tokens), step):
        beyond = tokens[start:start + step] >= vocab_size
        if beyond.any():
            place = start + int(np.argmax(beyond))
            return int(np.searchsorted(pair.ends, place, side="right")), int(tokens[place])
    raise AssertionError(f"{pair.path} has no id beyond {vocab_size}")


def _open_checked(path: str, what: str):
    try:
        return _stamp(path) if what == "stat" else map_array(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} cannot be read as an .npy file: {reason}; write it again with np.save") from None


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} [{', '.join(map(str, array.shape))}]"


def _stamp(path: str) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def checksum(array: np.ndarray) -> int:
    """crc32 of an array's bytes, in chunks: 3 to 4 GB/s a core, and other threads run meanwhile."""
    crc, step = 0, CHUNK_BYTES // max(1, array.itemsize)
    for start in range(0, len(array), step):
        crc = zlib.crc32(array[start:start + step].view(np.uint8), crc)
    return crc


class Writer:
    """An .npy file of one dimension that grows by `append`; whole and on disk once `close` returns. Raises: OSError."""

    def __init__(self, path: str, dtype: type):
        self.dtype, self.count, self.crc = np.dtype(dtype), 0, 0
        self._file = open(path, "wb", buffering=1 << 20)
        self._header()

    def _header(self) -> None:
        header = io.BytesIO()    # of one size whatever the shape: numpy leaves room for 20 digits
        np.lib.format.write_array_header_1_0(header, {"descr": np.lib.format.dtype_to_descr(self.dtype),
                                                      "fortran_order": False, "shape": (self.count,)})
        self._file.write(header.getvalue())

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        raw = np.ascontiguousarray(values, self.dtype).view(np.uint8)
        self._file.write(raw)
        self.crc, self.count = zlib.crc32(raw, self.crc), self.count + len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Closes without a word: the bytes still in the buffer may be those that found the disk full."""
        try:
            self._file.close()
        except OSError:
            pass
