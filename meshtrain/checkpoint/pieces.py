"""Cuts arrays into pieces, decides which process writes which piece, and restores arrays of any sharding from pieces.

A piece is a region of one array, cut along its first dims into at most PIECE_BYTES, so that another mesh reads little
that it does not need. Pieces are stored one after another in objects: files, or objects of a bucket. A JSON index has
the location and checksum of each piece:

    {"arrays": {name: [shape, dtype]}, "objects": {name: bytes}, "pieces": [[array, region, object, offset, xxh3-64]]}

This module does not know whether an object is a file.
"""
from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from meshtrain.checkpoint.store import ArrayForm
from meshtrain.run import trees

PIECE_BYTES = 64 << 20
AHEAD_BYTES = 2 << 30       # pieces are read ahead of the array that is being assembled, up to this size
Region = tuple[tuple[int, int], ...]        # [start, stop) along each dim; empty for a scalar
Read = Callable[[str, int, int], bytes]     # (object, start, stop)


class Piece(NamedTuple):
    """The location of the bytes of a region. sum: the xxh3-64 of the bytes."""
    region: Region
    object: str
    offset: int
    sum: str


class DamagedPiece(Exception):
    """The bytes of a piece are not those that were written."""


@dataclasses.dataclass(frozen=True)
class Index:
    """The arrays of a checkpoint, and where the bytes of their pieces are. Buckets and hosts store it as JSON.

    arrays: name -> [shape, dtype]. objects: name -> bytes. pieces: [array, region, object, offset, xxh3-64]; the pieces
    of an object are in the order of their offsets.
    """
    arrays: dict[str, list]
    objects: dict[str, int]
    pieces: list[list]

    @classmethod
    def begin(cls, state: Any) -> Index:
        """Return the index of a pytree of arrays, without objects."""
        return cls({name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in trees.leaves_of(state).items()}, {}, [])

    @classmethod
    def read(cls, document: Mapping) -> Index:
        """Return the index in a JSON object, which may also have other entries. Raises: KeyError, TypeError."""
        return cls(document["arrays"], document["objects"], document["pieces"])

    @classmethod
    def merge(cls, parts: Sequence[Index]) -> Index:
        """Return the index of what several processes have written."""
        return cls(parts[0].arrays, {name: size for part in parts for name, size in part.objects.items()},
                   [piece for part in parts for piece in part.pieces])

    def as_json(self) -> dict:
        return {"arrays": self.arrays, "objects": self.objects, "pieces": self.pieces}

    def add(self, name: str, some: Iterable[tuple[str, Region, np.ndarray]]) -> list[memoryview]:
        """Add an object; return its bytes. some: the object's pieces, as from `own`. Threads may add to one index."""
        content: list[memoryview] = []
        offset = 0
        for array, region, data in some:
            content.append(as_bytes(data))
            self.pieces.append([array, region, name, offset, xxhash.xxh3_64_hexdigest(content[-1])])
            offset += len(content[-1])
        self.objects[name] = offset
        return content

    def forms(self) -> dict[str, ArrayForm]:
        """Return array -> (shape, dtype)."""
        return {name: (tuple(shape), jnp.dtype(dtype)) for name, (shape, dtype) in self.arrays.items()}

    def by_array(self, folder: str = "") -> dict[str, list[Piece]]:
        """Return array -> its pieces. folder: a prefix for the names of objects."""
        by_name: dict[str, list[Piece]] = {name: [] for name in self.arrays}
        for name, region, holder, offset, checksum in self.pieces:
            by_name[name].append(Piece(tuple(map(tuple, region)), f"{folder}{holder}", offset, checksum))
        return by_name

    def by_object(self) -> dict[str, list[list]]:
        """Return object -> its entries of `pieces`."""
        by_name = collections.defaultdict(list)
        for entry in self.pieces:
            by_name[entry[2]].append(entry)
        return by_name

    def fault(self, name: str, content: memoryview, entries: Sequence[list]) -> str:
        """Return how the content of an object differs from the written content; empty if both are equal. entries: the
        object's pieces, from `by_object`."""
        size = self.objects[name]
        if len(content) != size:
            return f" has {len(content)} bytes, but {size} were written"
        ends = [*(entry[3] for entry in entries[1:]), size]
        wrong = [start for (_, _, _, start, checksum), end in zip(entries, ends)
                 if xxhash.xxh3_64_hexdigest(content[start:end]) != checksum]
        return f": its checksum differs at byte {wrong[0]:,}" if wrong else ""


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    return tuple((range(size)[part].start, range(size)[part].stop) for part, size in zip(index, shape, strict=True))


def intersection(a: Region, b: Region) -> Region | None:
    """Return the intersection of two regions; None if it is empty. A scalar has the empty region, of volume 1."""
    both = tuple((max(lo, start), min(hi, stop)) for (lo, hi), (start, stop) in zip(a, b, strict=True))
    return None if any(lo >= hi for lo, hi in both) else both


def volume(region: Region | None) -> int:
    return 0 if region is None else math.prod(hi - lo for lo, hi in region)


def slices(region: Region, within: Region) -> tuple[slice, ...]:
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(region, within))


def shape_of(region: Region) -> list[int]:
    return [hi - lo for lo, hi in region]


def as_bytes(data: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def cut(region: Region, itemsize: int, most: int = PIECE_BYTES) -> list[Region]:
    """Cut a region along its first dims into regions of at most `most` bytes (or one element), in order."""
    if volume(region) * itemsize <= most or not region:
        return [region]
    (start, stop), *rest = region
    of_one = volume(tuple(rest)) * itemsize
    if of_one > most:
        return [((at, at + 1), *piece) for at in range(start, stop) for piece in cut(tuple(rest), itemsize, most)]
    rows = most // of_one
    return [((at, min(at + rows, stop)), *rest) for at in range(start, stop, rows)]


def own(state: Any, *, copies: bool = False) -> Iterator[tuple[str, Region, np.ndarray]]:
    """Yield (array, region, data on the host) of the pieces of a pytree of jax arrays that this process writes. Each
    element is written by one process. copies: yield everything on this process's devices instead."""
    me = jax.process_index()
    arrays = []
    for name, leaf in trees.leaves_of(state).items():
        holders = collections.defaultdict(set)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            holders[region_of(index, leaf.shape)].add(device.process_index)
        shards = {region_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        first = zlib.crc32(name.encode())      # a small array has one piece; this spreads them over the processes
        for region, data in shards.items():
            among = [me] if copies else sorted(holders[region])
            mine = [piece for number, piece in enumerate(cut(region, leaf.dtype.itemsize))
                    if among[(first + number) % len(among)] == me]
            if mine:
                data.copy_to_host_async()
                arrays.append((name, region, mine, data))
    for name, region, mine, data in arrays:
        whole = np.array(data)      # the next step may donate the buffer
        yield from ((name, piece, whole[slices(piece, region)]) for piece in mine)


def regions_here(leaf: jax.ShapeDtypeStruct) -> set[Region]:
    """Return the regions of an array that are on this process's devices."""
    return {region_of(index, leaf.shape)
            for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}


def select_needed(some: Iterable[Piece], leaf: jax.ShapeDtypeStruct) -> list[Piece]:
    """Return the pieces of an array that this process's devices need."""
    asked = regions_here(leaf)
    return [piece for piece in some
            if any(intersection(piece.region, region) is not None for region in asked)]


def fetch(piece: Piece, dtype: np.dtype, read: Read) -> np.ndarray:
    """Read and verify a piece; return its data in the shape of its region. Raises: DamagedPiece; as `read`."""
    size = volume(piece.region) * dtype.itemsize
    for _ in range(2):      # a second read if the transfer damaged the first
        data = read(piece.object, piece.offset, piece.offset + size)
        if len(data) == size and xxhash.xxh3_64_hexdigest(data) == piece.sum:
            return np.frombuffer(data, dtype).reshape(shape_of(piece.region))
    raise DamagedPiece(f"{piece.object}: its checksum differs at byte {piece.offset:,}")


def restore(wanted: Any, pieces: Mapping[str, Sequence[Piece]], forms: Mapping[str, ArrayForm], read: Read,
            at_once: int) -> Any:
    """Return arrays with the shardings and dtypes of `wanted`, a pytree of jax.ShapeDtypeStruct. pieces: array -> its
    pieces. forms: array -> (shape, dtype), as stored. read: called in several threads. at_once: number of threads.
    Raises: DamagedPiece; ValueError if elements are missing; any exception of `read`."""
    leaves = [(trees.name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)]
    arrays = []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        try:
            arrays.extend(_arrays(leaves, pieces, forms, read, pool))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def _arrays(leaves: Sequence[tuple[str, jax.ShapeDtypeStruct]], pieces: Mapping[str, Sequence[Piece]],
            forms: Mapping[str, ArrayForm], read: Read, pool: concurrent.futures.Executor) -> Iterator[jax.Array]:
    """Yield the arrays in order; meanwhile the pieces of the following arrays are read."""
    waiting, ahead, rest = collections.deque(), 0, iter(leaves)
    while True:
        while ahead < AHEAD_BYTES and (more := next(rest, None)):
            name, leaf = more
            dtype = forms[name][1]
            some = select_needed(pieces[name], leaf)
            size = sum(volume(piece.region) for piece in some) * dtype.itemsize
            waiting.append((name, leaf, size, [(piece, pool.submit(fetch, piece, dtype, read)) for piece in some]))
            ahead += size
        if not waiting:
            return
        name, leaf, size, coming = waiting.popleft()
        yield _array(name, leaf, [(piece.region, future.result()) for piece, future in coming])
        ahead -= size


def _array(name: str, leaf: jax.ShapeDtypeStruct, found: Sequence[tuple[Region, np.ndarray]]) -> jax.Array:
    def region(index):
        asked = region_of(index, leaf.shape)
        whole, filled = np.empty(shape_of(asked), leaf.dtype), 0
        for held, data in found:
            if (common := intersection(held, asked)) is not None:
                whole[slices(common, asked)] = data[slices(common, held)]
                filled += volume(common)
        if filled != volume(asked):     # pieces are disjoint
            raise ValueError(f"{name}: {volume(asked) - filled} of its elements are in no piece")
        return whole
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, region)


def batch_ranges(sizes: Sequence[int], most: int = PIECE_BYTES) -> Iterator[range]:
    """Yield ranges of consecutive sizes whose sum is at most `most`. A larger size has a range of its own."""
    start = held = 0
    for number, size in enumerate(itertools.chain(sizes, [math.inf])):
        if number > start and held + size > most:
            yield range(start, number)
            start, held = number, 0
        held += size
