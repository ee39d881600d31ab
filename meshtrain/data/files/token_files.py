"""Token files. X.tokens.npy is an array of uint16, uint32 or int32 ids. X.ends.npy (int64) has the document ends in
this array. X.mask.npy (uint8 or bool, optional) says which ids are learned; without a mask, all ids are learned. The
token cache may add X.bytes.npy (int64): the ends in bytes of the text.

Any program with numpy can write them; the token cache consists of them. Other formats (binary_files.py) become the same
`IndexedTokens`, so that there is one reader. Files are memory-mapped, within the system's limit of maps. Nothing is
held in memory per document.
"""
from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import errno
import functools
import io
import itertools
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from meshtrain import files
from meshtrain.data.documents import contracts
from meshtrain.data.documents.faulty import LeftOut

TOKENS, ENDS, MASK, BYTES = ".tokens.npy", ".ends.npy", ".mask.npy", ".bytes.npy"
CHUNK_BYTES = 1 << 26
MAX_MAPS_FILE, USUAL_MAX_MAPS = "/proc/sys/vm/max_map_count", 65_530     # memory maps per process on Linux
Stamp = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """An array in a file. `stamp` detects changes of the file since it was checked."""
    path: str
    stamp: Stamp
    size: int
    dtype: np.dtype
    offset: int              # in bytes

    def map(self) -> np.ndarray:
        """Return the array [size], memory-mapped. Raises: OSError, also if the file has changed."""
        changed = OSError(f"{self.path} has changed since the run began; do not change token files while a run reads "
                          "them")
        try:
            if stamp(self.path) != self.stamp:
                raise changed
            return map_file(self.path, self.dtype, self.offset, self.size)
        except (FileNotFoundError, ValueError):
            raise changed from None

    @property
    def array(self) -> np.ndarray:
        """The array [size], as a shared memory map that is cached within the limit of maps. Raises: as `map`."""
        return _maps()(self)

    def last(self) -> int:
        """Return the last number, 0 if empty, without a memory map. Raises: OSError."""
        if not self.size:
            return 0
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset + (self.size - 1) * self.dtype.itemsize)
            return int(np.frombuffer(file.read(self.dtype.itemsize), self.dtype)[0])


@functools.cache
def _maps() -> Callable[[Numbers], np.ndarray]:
    """Return Numbers.map with an LRU cache. There is one cache per process, because the system limits the maps of a
    process."""
    # the other half is for libraries, threads, the allocator
    return functools.lru_cache(maxsize=max_maps() // 2)(Numbers.map)


def max_maps() -> int:
    """Return the system's limit of memory maps per process."""
    try:
        with open(MAX_MAPS_FILE, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return USUAL_MAX_MAPS


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedTokens:
    """A file of token ids and a file of the document ends.

    Ends count only the documents' tokens. The file's own separators belong to no document: there are `lead` before the
    first document, and `gap` between two documents. Document d begins at id `begin(d)` and has ends[d] - ends[d - 1]
    tokens.
    """
    ids: Numbers
    ends_file: Numbers              # int64 [documents]
    num_tokens: int                 # in all documents
    lead: int = 0
    gap: int = 0
    largest: int = -1               # the largest id; -1: unknown
    mask: Numbers | None = None     # for each id in the file, whether it is learned; None: all are
    bytes_file: Numbers | None = None       # int64 [documents]: ends in bytes of text; None: unknown
    crc32: tuple[int, ...] = ()     # of the files, if these come from code of the run's own
    left_out: LeftOut | None = None     # the faulty lines, if these are left out

    @property
    def path(self) -> str:
        return self.ids.path

    @property
    def num_documents(self) -> int:
        return self.ends_file.size

    @property
    def ends(self) -> np.ndarray:
        """The document ends, int64 [documents], memory-mapped. Raises: as Numbers.map."""
        return self.ends_file.array

    def checksums(self, check_stop: Callable[[], None]) -> list[int]:
        """Return the checksums of the ids, the ends and, if present, the mask and the bytes."""
        return [checksum(numbers.map(), check_stop)
                for numbers in (self.ids, self.ends_file, self.mask, self.bytes_file) if numbers]

    def begin(self, document: int) -> int:
        """Return the index of a document's first token among the ids."""
        return (self.ends.item(document - 1) if document else 0) + document * self.gap + self.lead


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFiles:
    """A Source: the documents of many pairs in order. complete: see contracts.py."""
    pairs: tuple[IndexedTokens, ...]
    complete: bool = False

    @functools.cached_property
    def num_documents(self) -> int:
        return self._firsts[-1] + self.pairs[-1].num_documents

    @functools.cached_property
    def totals(self) -> np.ndarray:
        return contracts.totals(self.num_documents, self.ends)

    @functools.cached_property
    def _firsts(self) -> list[int]:
        """The first document of each pair; a list, because bisect is faster than numpy for one lookup."""
        return list(itertools.accumulate((pair.num_documents for pair in self.pairs[:-1]), initial=0))

    @functools.cached_property
    def _before(self) -> list[int]:
        """Number of tokens before each pair."""
        return list(itertools.accumulate((pair.num_tokens for pair in self.pairs[:-1]), initial=0))

    @functools.cached_property
    def masked(self) -> bool:
        return any(pair.mask for pair in self.pairs)

    def ends(self, documents: np.ndarray) -> np.ndarray:
        ends = self._gather(documents, self._before, [pair.ends_file for pair in self.pairs])
        return ends - documents - 1 if self.complete else ends      # without first tokens

    @functools.cached_property
    def byte_totals(self) -> np.ndarray | None:
        """See contracts.Source."""
        ends = [pair.bytes_file for pair in self.pairs if pair.bytes_file]
        if len(ends) < len(self.pairs):
            return None
        before = list(itertools.accumulate((numbers.last() for numbers in ends[:-1]), initial=0))
        return contracts.totals(self.num_documents, lambda documents: self._gather(documents, before, ends))

    def _gather(self, documents: np.ndarray, before: Sequence[int], numbers: Sequence[Numbers]) -> np.ndarray:
        """Return the ends of documents, int64, shaped as `documents`. numbers: the ends in each pair. before: for each
        pair, the sum over the pairs before it."""
        if len(self.pairs) == 1:
            return numbers[0].array[documents]
        which = np.searchsorted(np.array(self._firsts), documents, side="right") - 1
        ends, by_pair = np.empty(len(documents), np.int64), np.argsort(which, kind="stable")
        pairs, starts = np.unique(which[by_pair], return_index=True)
        for k, places in zip(pairs.tolist(), np.split(by_pair, starts[1:])):
            ends[places] = before[k] + numbers[k].array[documents[places] - self._firsts[k]]
        return ends

    def _place(self, document: int) -> tuple[int, int]:
        """Return (pair, index of the document's first token in it, after its own separator)."""
        k = bisect.bisect_right(self._firsts, document) - 1
        return k, self.pairs[k].begin(document - self._firsts[k]) + self.complete

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        k, begin = self._place(document)
        return self.pairs[k].ids.array[begin + start:begin + stop]

    def mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        k, begin = self._place(document)
        return mask.array[begin + start:begin + stop] if (mask := self.pairs[k].mask) else None


def largest(pair: IndexedTokens) -> int:
    """Return the largest id of a file; -1 without tokens. The file is read if its largest id is unknown."""
    if pair.largest >= 0:
        return pair.largest
    return max((int(chunk.max()) for _, chunk in chunks(pair.ids.map()) if len(chunk)), default=-1)


def first_beyond(pair: IndexedTokens, vocab_size: int) -> tuple[int, int]:
    """Return (document, id) of the first id beyond a vocabulary of this size. The file must have such an id."""
    for first, chunk in chunks(pair.ids.map()):
        beyond = (chunk >= vocab_size) | (chunk < 0)
        if beyond.any():
            place = first + int(np.argmax(beyond))
            document = bisect.bisect_right(range(pair.num_documents), place, key=pair.begin) - 1
            return document, int(chunk[place - first])
    raise AssertionError(f"{pair.path} has no id beyond {vocab_size}")


def ends_path(path: str) -> str:
    return path.removesuffix(TOKENS) + ENDS


def mask_path(path: str) -> str:
    """Return the path of the mask of an X.tokens.npy or X.bin."""
    return (path.removesuffix(TOKENS) if path.endswith(TOKENS) else path.removesuffix(".bin")) + MASK


def open_pair(path: str) -> IndexedTokens:
    """Open an X.tokens.npy with its X.ends.npy. `check_rising` separately checks that ends never fall. Raises:
    ValueError if the files are malformed or do not match."""
    ids = _open_numbers(path, (np.uint16, np.uint32, np.int32), "token ids are one dimension of uint16, uint32 or "
                        "int32; write np.save(path, ids.astype(np.uint32))")
    ends = open_ends(ends_path(path), path)
    last = open_checked(ends.path, lambda _: ends.last())
    if last != ids.size:
        raise ValueError(f"{ends_path(path)}: the last document ends at {last:,}, but {os.path.basename(path)} has "
                         f"{ids.size:,} tokens; the two must agree: write both again")
    return IndexedTokens(ids, ends, last)


def _open_numbers(path: str, dtypes: Sequence[type], rule: str) -> Numbers:
    """Open an .npy file of one dimension. rule: which dtypes it may have, and the remedy, for the message. Raises:
    ValueError."""
    dtype, shape, offset = open_checked(path, read_header)
    if len(shape) != 1 or dtype not in map(np.dtype, dtypes):
        raise ValueError(f"{path} holds {dtype} [{', '.join(map(str, shape))}], but {rule}")
    return Numbers(path, open_checked(path, stamp), shape[0], dtype, offset)


def open_ends(path: str, tokens: str) -> Numbers:
    """Open the file `path` with document ends, in tokens or bytes. tokens: path of the ids, for messages. Raises:
    ValueError."""
    if files.status(path) is None:
        raise ValueError(f"{path} is missing next to {os.path.basename(tokens)}; write where each document ends, in "
                         f"tokens: np.save(path, np.cumsum(lengths))")
    return _open_numbers(path, (np.int64,), "the ends of documents are one dimension of int64; write "
                         "np.save(path, np.cumsum(lengths, dtype=np.int64))")


def open_mask(path: str, tokens: str, size: int) -> Numbers:
    """Open the mask in the file `path` for `size` ids. tokens: path of the ids, for messages. Raises: ValueError."""
    mask = _open_numbers(path, (np.uint8, bool), "a mask is one dimension of uint8 or bool; write "
                         "np.save(path, mask.astype(bool))")
    if mask.size != size:
        raise ValueError(f"{path} has {mask.size:,} entries, but {os.path.basename(tokens)} has {size:,} ids, and each "
                         f"needs an entry; write both again")
    return dataclasses.replace(mask, dtype=np.dtype(np.uint8))


def check_rising(path: str, ends: np.ndarray) -> None:
    """Check that document ends never fall. Reads the file once, in chunks. Raises: ValueError for the first document
    that ends before it begins."""
    before = 0
    for first, chunk in chunks(ends):
        falls = np.diff(chunk, prepend=before) < 0
        if falls.any():
            k = int(np.argmax(falls))
            raise ValueError(f"{path}: document {first + k} (from 0) ends at {chunk[k]}, before it begins at "
                             f"{chunk[k - 1] if k else before}; ends must not fall: write np.cumsum(lengths)")
        before = int(chunk[-1])


def read_header(path: str) -> tuple[np.dtype, tuple[int, ...], int]:
    """Return (dtype, shape, data offset in bytes) of an .npy file, whose size is checked. Never unpickles. Raises:
    ValueError, OSError."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            shape, _, dtype = {(1, 0): np.lib.format.read_array_header_1_0,
                               (2, 0): np.lib.format.read_array_header_2_0}[version](file)
        except OSError:
            raise
        except Exception as error:    # numpy parses the header with Python's tokenizer, which raises many types
            raise ValueError(f"broken header ({error})") from None
        offset, size = file.tell(), os.fstat(file.fileno()).st_size
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    wanted = offset + dtype.itemsize * int(np.prod(shape, dtype=object))
    if size < wanted:
        raise ValueError(f"it ends at byte {size:,} of {wanted:,}: it was truncated")
    return dtype, shape, offset


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(length: int, descriptor: int) -> int | None:
    """Return the address of a map; None if the system refuses it (see ctypes.get_errno())."""
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    return None if address == ctypes.c_void_p(-1).value else address


def _map_error(path: str, number: int) -> OSError:
    """Return the error of a refused map, with the remedy if there are too many maps."""
    why = os.strerror(number)
    if number == errno.ENOMEM:
        with open("/proc/self/maps", "rb") as file:
            used, allowed = sum(1 for _ in file), max_maps()
        if used > 0.9 * allowed:
            why = (f"the process has {used:,} memory maps, and vm.max_map_count allows {allowed:,}; allow more, e.g. "
                   f"sysctl -w vm.max_map_count={max(4 * allowed, 1 << 20)}")
        else:
            why += f" ({used:,} memory maps of {allowed:,}; is the process's address space limited, by ulimit -v?)"
    return OSError(number, f"it cannot be mapped: {why}", path)


def map_file(path: str, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Return `count` numbers from byte `offset` of a file, memory-mapped and read-only, as a plain array. Raises:
    OSError, ValueError.

    Calls mmap(2) itself: Python's mmap keeps a file descriptor, often limited to 1024 per process, and slices of
    np.memmap cost ten times as much as those of a plain array.
    """
    dtype = np.dtype(dtype)
    length = offset + count * dtype.itemsize
    if not count:
        return np.zeros(0, dtype)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < length:    # access beyond the file's end would kill the process (SIGBUS)
            raise ValueError(f"it ends at byte {size:,} of {length:,}: it was truncated")
        address = _mmap(length, file.fileno())
        if address is None:
            _maps().cache_clear()       # arrays still in use keep their maps
            address = _mmap(length, file.fileno())
    if address is None:
        raise _map_error(path, ctypes.get_errno())
    buffer = (ctypes.c_uint8 * length).from_address(address)
    # The array holds the buffer; other threads may still read at exit.
    weakref.finalize(buffer, _libc.munmap, address, length).atexit = False
    array = np.frombuffer(buffer, dtype, count, offset)
    array.flags.writeable = False
    return array


def open_checked(path: str, open_file: Callable):
    """Return open_file(path). Raises: ValueError that names the file, for any fault of an .npy file."""
    what, remedy = f"{path} cannot be read as an .npy file", "write it again with np.save"
    try:
        return files.attempt(lambda: open_file(path), what, remedy)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(what) else f"{what}: {error}; {remedy}") from None


def stamp(path: str) -> Stamp:
    """Return (inode, bytes, mtime). A file with another stamp may have changed."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first index, part) of a 1D array, to read a memory map without holding it."""
    step = max(1, CHUNK_BYTES // array.itemsize)
    for first in range(0, len(array), step):
        yield first, array[first:first + step]


def checksum(array: np.ndarray, check_stop: Callable[[], None] = lambda: None) -> int:
    """Return the crc32 of an array's bytes. The speed is 3 to 4 GB/s a core, without the GIL."""
    crc = 0
    for _, chunk in chunks(array):
        check_stop()
        crc = zlib.crc32(np.ascontiguousarray(chunk).view(np.uint8), crc)
    return crc


class Writer:
    """A 1D .npy file that grows by `append`, as PATH.tmp. The file is complete and synced when `close` returns;
    `rename` gives the file its name. Raises: OSError."""

    def __init__(self, path: Path, dtype: type):
        self.dtype, self.count, self.crc, self.largest = np.dtype(dtype), 0, 0, -1
        self._path, self._temporary = path, path.with_name(path.name + ".tmp")
        self._file = open(self._temporary, "wb", buffering=1 << 20)
        self._header()

    def _header(self) -> None:
        header = io.BytesIO()    # size independent of the shape: numpy pads for 20 digits
        np.lib.format.write_array_header_1_0(header, {"descr": np.lib.format.dtype_to_descr(self.dtype),
                                                      "fortran_order": False, "shape": (self.count,)})
        self._file.write(header.getvalue())

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        given = np.ascontiguousarray(values, self.dtype)
        raw = given.view(np.uint8)
        self._file.write(raw)
        self.crc, self.count = zlib.crc32(raw, self.crc), self.count + len(values)
        self.largest = max(self.largest, int(given.max(initial=0)) if len(given) else -1)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def rename(self) -> None:
        os.replace(self._temporary, self._path)

    def abandon(self) -> None:
        """Close the file without errors, since flushing may fail again on a full disk; remove the temporary file."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)
