"""The order of a source's tokens: any position of an endless stream of shuffled epochs is found without an index of it.

Documents are cut into at most 2**20 runs of neighbours (one document each up to a million of them). An epoch shuffles
the runs, takes some of them at a time (a window: 8,192 documents from everywhere), and shuffles the documents of a
window when it is read; held are the totals of the runs and the order of an epoch, nothing per document or sequence. In
a second order sequences change places within chunks of 2**26 tokens of an epoch, lest a batch be one long document: a
keyed bijection. All is a function of (seed, position), from raw bits that numpy promises never to change;
Generator.permutation it may. This module knows no batches, mixtures, hosts or ids of separators.
"""
from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshtrain.data.documents.contracts import Source, run_length

WINDOW = 8192               # documents of a window, about
CHUNK_TOKENS = 1 << 26      # within which sequences change places
ROUNDS = 8                  # of the Feistel network
EPOCHS_HELD, WINDOWS_HELD = 3, 64


def lengths(source: Source, documents: np.ndarray | None = None) -> np.ndarray:
    """int64 [documents]: tokens of each, without separators; None for all documents."""
    documents = np.arange(source.num_documents) if documents is None else documents
    if not len(documents):
        return np.zeros(0, np.int64)
    return source.ends(documents) - np.where(documents > 0, source.ends(np.maximum(documents - 1, 0)), 0)


def permutation(count: int, *key: int) -> np.ndarray:
    """int64 [count], each of 0..count-1 once."""
    bits = np.uint64(max(count - 1, 1).bit_length())
    random = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    # No two are equal, so that every way to sort gives the same.
    placed = random >> bits << bits | np.arange(count, dtype=np.uint64)
    placed.sort()
    return (placed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def bijection(indices: np.ndarray, count: int, *key: int) -> np.ndarray:
    """int64, as indices: where each of them, 0 <= i < count, goes in a permutation that is never held.

    A Feistel network over the next power of 4; what falls outside walks on until it is inside.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    keys = np.random.PCG64(np.random.SeedSequence(key)).random_raw(ROUNDS)
    mask, down = (np.uint64(1) << half) - np.uint64(1), np.uint64(64) - half
    found = indices.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> half, found[outside] & mask
        for k in keys:
            mixed = (right + k) * np.uint64(0x9E3779B97F4A7C15)     # the finalizer of splitmix64
            mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> down)
        found[outside] = left << half | right
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class SourcePart:
    """What one split reads of a source: whole runs, or (side "head", "tail") a piece of every document.

    Every document, an empty one too, is one token longer than its text: the separator before it.
    """
    source: Source
    runs: np.ndarray        # int32 [runs], rising
    tokens: np.ndarray      # int64 [runs]: of each, separators counted
    side: str = "whole"
    fraction: float = 0.0   # of a document in its tail

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(start, length), int64 [documents]: the tokens of each that this part has."""
        length = lengths(self.source, documents)
        tail = (length * self.fraction).astype(np.int64)
        return (length - tail, tail) if self.side == "tail" else (np.zeros_like(length), length - tail)

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())


def whole(source: Source, runs: np.ndarray | None = None) -> SourcePart:
    """These runs of a source (None: all), with their documents whole."""
    run, num_runs = run_length(source.num_documents), len(source.totals)
    runs = np.arange(num_runs, dtype=np.int32) if runs is None else runs.astype(np.int32)
    documents = np.where(runs == num_runs - 1, source.num_documents - run * (num_runs - 1), run)
    return SourcePart(source, runs, source.totals[runs] + documents)


class Grid(NamedTuple):
    """The stream's tokens from `base` to `until` (None: on without end) cut into sequences."""
    base: int
    seq_len: int
    until: int | None


class Runs(NamedTuple):
    """Tokens that one source gives to a batch, int64 [runs] each: `count` from the dealt position `start` on, to the
    place `line` of the batch's rows laid end to end. A run lies within a sequence of its grid and within a row."""
    start: np.ndarray
    count: np.ndarray
    line: np.ndarray


class Pieces(NamedTuple):
    """Parts of documents, each in one place of one row; int64 [pieces] each, but for the three that are bool."""
    line: np.ndarray        # its place in the rows laid end to end
    count: np.ndarray       # tokens, the separator included
    begins: np.ndarray      # bool: the separator stands first
    goes_on: np.ndarray     # bool: the document has a token behind the piece
    empty: np.ndarray       # bool: the document has no text
    document: np.ndarray
    first: np.ndarray       # the first token of the text


class _Window(NamedTuple):
    documents: np.ndarray
    starts: np.ndarray      # the first token of each that the part has
    ends: np.ndarray        # where each ends in the epoch
    begin: int              # where the first one begins


class _Table(NamedTuple):
    """Windows side by side, by their numbers in the stream: where their documents begin and end there, int64
    [documents]."""
    numbers: frozenset[int]
    begins: np.ndarray
    ends: np.ndarray
    documents: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """A part of a source epoch after epoch, in an order of `seed`; None: in its own order. Positions count
    separators."""
    part: SourcePart
    seed: int | None
    number: int             # of the source in its mixture: each has orders of its own
    grids: tuple[Grid, ...]     # without gaps; the last has no end

    def __post_init__(self):
        tokens = self.part.num_tokens
        # those that a batch reads from, if they are few
        held = -(-CHUNK_TOKENS * self.num_windows // max(tokens, 1)) + 4
        object.__setattr__(self, "_epochs", Recent(EPOCHS_HELD))
        object.__setattr__(self, "_held", min(held, WINDOWS_HELD))
        object.__setattr__(self, "_windows", Recent(self._held))
        object.__setattr__(self, "_table", _Table(frozenset(), *np.zeros((4, 0), np.int64)))
        object.__setattr__(self, "_lock", threading.Lock())

    @functools.cached_property
    def tokens_per_epoch(self) -> int:
        return self.part.num_tokens

    @property
    def positions_per_epoch(self) -> int:
        return self.tokens_per_epoch

    @functools.cached_property
    def _width(self) -> int:
        """Runs of a window."""
        return max(1, WINDOW // run_length(self.part.source.num_documents))

    @functools.cached_property
    def num_windows(self) -> int:
        return -(-len(self.part.runs) // self._width)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order, ends): int32 [runs], and int64 [windows], where each window ends in the epoch."""
        def make():
            tokens, count = self.part.tokens, len(self.part.runs)
            order = np.arange(count) if self.seed is None else permutation(count, self.seed, self.number, 0, epoch)
            return order.astype(np.int32), np.cumsum(np.add.reduceat(tokens[order], np.arange(0, count, self._width)))
        return self._epochs.get(epoch, make)

    def window(self, epoch: int, window: int) -> _Window:
        """The documents of a window of an epoch, in their order."""
        def make():
            order, ends = self._epoch(epoch)
            run, num_documents = run_length(self.part.source.num_documents), self.part.source.num_documents
            runs = self.part.runs[order[window * self._width:(window + 1) * self._width]].astype(np.int64)
            documents = (runs[:, None] * run + np.arange(run)).ravel()
            documents = documents[documents < num_documents]
            if run > 1 and self.seed is not None:
                documents = documents[permutation(len(documents), self.seed, self.number, 1, epoch, window)]
            starts, length = self.part.spans(documents)
            begin = int(ends[window - 1]) if window else 0
            return _Window(documents, starts, begin + np.cumsum(length + 1), begin)
        return self._windows.get((epoch, window), make)

    def deal(self, positions: np.ndarray) -> np.ndarray:
        """The places in the stream of tokens in the order in which sequences are dealt, int64 [any] both.

        The sequences of a grid that begin in an epoch change places, in chunks of CHUNK_TOKENS of them.
        """
        if self.seed is None:
            return positions
        places = np.empty_like(positions)
        for grid in self.grids:
            here = positions >= grid.base
            if grid.until is not None:
                here &= positions < grid.until
            if here.any():
                places[here] = self._deal(grid, positions[here])
        return places

    def _deal(self, grid: Grid, positions: np.ndarray) -> np.ndarray:
        numbers, offsets = np.divmod(positions - grid.base, grid.seq_len)
        epochs = (grid.base + numbers * grid.seq_len) // self.tokens_per_epoch
        chunk_length = max(1, CHUNK_TOKENS // grid.seq_len)
        for epoch in np.unique(epochs).tolist():
            first, after = self._sequences(grid, epoch)
            chunks = np.where(epochs == epoch, (numbers - first) // chunk_length, -1)
            for chunk in np.unique(chunks[chunks >= 0]).tolist():
                low = first + chunk * chunk_length
                here = chunks == chunk
                epochs[here] = -1   # done: their numbers change below
                numbers[here] = low + bijection(numbers[here] - low, min(chunk_length, after - low),
                                                self.seed, self.number, 2,
                                                grid.base + low * grid.seq_len)
        return grid.base + numbers * grid.seq_len + offsets

    def _sequences(self, grid: Grid, epoch: int) -> tuple[int, int]:
        """(first, after): the numbers of the sequences of a grid that begin in an epoch."""
        first, after = (max(0, -(-(e * self.tokens_per_epoch - grid.base) // grid.seq_len)) for e in (epoch, epoch + 1))
        return first, after if grid.until is None else min(after, (grid.until - grid.base) // grid.seq_len)

    def regrid(self, position: int, seq_len: int) -> tuple[Grid, ...]:
        """Grids with which the stream goes on from a dealt position in sequences of seq_len: the chunk that was begun
        is finished in its own sequences, so that no token is lost or comes twice."""
        grid = next(grid for grid in self.grids if grid.until is None or position < grid.until)
        if grid.until is None and grid.seq_len == seq_len:
            return (grid,)
        number = (position - grid.base) // grid.seq_len
        first, after = self._sequences(grid, (grid.base + number * grid.seq_len) // self.tokens_per_epoch)
        chunk_length = max(1, CHUNK_TOKENS // grid.seq_len)
        low = first + (number - first) // chunk_length * chunk_length
        grids, end = [], grid.base + low * grid.seq_len
        if position > end:
            end = grid.base + min(low + chunk_length, after) * grid.seq_len
            grids.append(grid._replace(until=end))
        # Whole sequences from `position` on: one that is shorter stands between.
        base = position + -(-(end - position) // seq_len) * seq_len
        if base > end:
            grids.append(Grid(end, base - end, base))
        return (*grids, Grid(base, seq_len, None))

    def find(self, runs: Runs) -> Pieces:
        """The pieces of documents that runs consist of; there is at least one run."""
        start = self.deal(runs.start)
        stop = start + runs.count
        first, last = self._window_numbers(start), self._window_numbers(stop - 1)
        table = self._open(np.unique(np.minimum(first + np.arange((last - first).max() + 1)[:, None], last)).tolist())
        k = np.searchsorted(table.ends, start, side="right")
        num = np.searchsorted(table.ends, stop) + 1 - k
        run = np.repeat(np.arange(len(num)), num)
        k = np.arange(len(run)) + np.repeat(k - (np.cumsum(num) - num), num)
        begin, end, low, high = table.begins[k], table.ends[k], start[run], stop[run]
        done, left = np.maximum(low - begin, 0), np.minimum(high, end)      # the separator is token 0
        pieces = Pieces(runs.line[run] + begin + done - low, left - begin - done, done == 0,
                        left < end, end - begin == 1,
                        table.documents[k], table.starts[k] + np.maximum(done - 1, 0))
        assert pieces.count.sum() == runs.count.sum()
        return pieces

    def _open(self, numbers: list[int]) -> _Table:
        """The documents of these windows, counted through all epochs; and of others, as long as they are few."""
        with self._lock:
            table = self._table
            missing = [number for number in numbers if number not in table.numbers]
            if missing:
                kept = sorted({*numbers,
                               *table.numbers}) if len(table.numbers) + len(missing) <= self._held else numbers
                windows = [(number // self.num_windows * self.tokens_per_epoch,
                            self.window(*divmod(number, self.num_windows)))
                           for number in kept]
                ends = np.concatenate([before + window.ends for before, window in windows])
                begins = np.concatenate([before + np.append(window.begin, window.ends[:-1])
                                         for before, window in windows])
                table = _Table(frozenset(kept), begins, ends,
                               np.concatenate([window.documents for _, window in windows]),
                               np.concatenate([window.starts for _, window in windows]))
                object.__setattr__(self, "_table", table)
            return table

    def _window_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Of the windows of all epochs, counted through, those in which these places of the stream lie."""
        epochs = positions // self.tokens_per_epoch
        if self.num_windows == 1:
            return epochs
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            within = positions[here] - epoch * self.tokens_per_epoch
            windows[here] = np.searchsorted(self._epoch(epoch)[1], within, side="right")
        return epochs * self.num_windows + windows


class Recent:
    """The last things used, for several threads."""

    def __init__(self, keep: int):
        self.keep, self.made, self.lock = keep, {}, threading.Lock()

    def get(self, key, make: Callable):
        with self.lock:     # also while it is made: a large corpus is not sorted by every thread at once
            made = self.made.pop(key) if key in self.made else make()
            if len(self.made) == self.keep:
                del self.made[next(iter(self.made))]
            self.made[key] = made
            return made
