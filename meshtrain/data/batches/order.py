"""The order of a source's tokens: random access into an endless stream of shuffled epochs, without an index of the
stream.

Documents are grouped into at most 2**20 runs of neighbours (one document each up to a million). An epoch shuffles the
runs. When a window (some runs: about 8,192 documents) is read, its documents are shuffled, too. Memory holds the runs'
totals and an epoch's order, but nothing per document or sequence. A keyed bijection then permutes sequences within
chunks of 2**26 tokens, so that one long document does not fill a batch. The order is a function of (seed, position),
computed from raw bits that numpy keeps stable (Generator.permutation is not). This module knows no batches, mixtures,
hosts or separator ids.
"""
from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.documents.contracts import Source, run_length

WINDOW = 8192               # approximate documents per window
CHUNK_TOKENS = 1 << 26      # sequences are permuted within chunks of this size
ROUNDS = 8                  # of the Feistel network
EPOCHS_HELD, WINDOWS_HELD = 3, 64


def lengths(source: Source, documents: np.ndarray | None = None) -> np.ndarray:
    """Return int64 [documents]: the tokens of each document, without separators. documents: the numbers of the
    documents; None: all.
    """
    documents = np.arange(source.num_documents) if documents is None else documents
    if not len(documents):
        return np.zeros(0, np.int64)
    return source.ends(documents) - np.where(documents > 0, source.ends(np.maximum(documents - 1, 0)), 0)


def permutation(count: int, *key: int) -> np.ndarray:
    """Return a permutation of 0..count-1, int64 [count]. key: the numbers that determine the permutation."""
    bits = np.uint64(max(count - 1, 1).bit_length())
    random = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    # All are distinct, so every sorting algorithm gives the same order.
    placed = random >> bits << bits | np.arange(count, dtype=np.uint64)
    placed.sort()
    return (placed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def bijection(indices: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return the images of `indices` (0 <= i < count, int64) under a pseudorandom permutation, which is never
    materialized. The permutation is a Feistel network over the next power of 4, repeated until the result is below
    count."""
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    keys = np.random.PCG64(np.random.SeedSequence(key)).random_raw(ROUNDS)
    mask, down = (np.uint64(1) << half) - np.uint64(1), np.uint64(64) - half
    numbers = indices.astype(np.uint64)
    outside = np.arange(len(numbers))
    while len(outside):
        left, right = numbers[outside] >> half, numbers[outside] & mask
        for k in keys:
            mixed = (right + k) * np.uint64(0x9E3779B97F4A7C15)     # splitmix64's finalizer
            mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> down)
        numbers[outside] = left << half | right
        outside = outside[numbers[outside] >= count]
    return numbers.astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class SourcePart:
    """The part of a source that one split reads: whole runs, or (side "head", "tail") a piece of every document. Every
    document counts one token more than its text, even an empty one: the separator before it."""
    source: Source
    runs: np.ndarray        # int32 [runs], rising
    tokens: np.ndarray      # int64 [runs], with separators
    side: str = "whole"
    fraction: float = 0.0   # of each document

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (start, length), int64 [documents]: this part's tokens of each document."""
        length = lengths(self.source, documents)
        tail = (length * self.fraction).astype(np.int64)
        return (length - tail, tail) if self.side == "tail" else (np.zeros_like(length), length - tail)

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def text_bytes(self) -> int | None:
        """Bytes of the documents' text before tokenizing; None: unknown, or the part has a piece of every document."""
        totals = getattr(self.source, "byte_totals", None)
        return int(totals[self.runs].sum()) if totals is not None and self.side == "whole" else None


def whole(source: Source, runs: np.ndarray | None = None) -> SourcePart:
    """Return a part of a source that has these runs, with whole documents. runs: the numbers of the runs; None: all
    runs."""
    run, num_runs = run_length(source.num_documents), len(source.totals)
    runs = np.arange(num_runs, dtype=np.int32) if runs is None else runs.astype(np.int32)
    documents = np.where(runs == num_runs - 1, source.num_documents - run * (num_runs - 1), run)
    return SourcePart(source, runs, source.totals[runs] + documents)


class Grid(NamedTuple):
    """The stream's tokens from `base` to `until` (None: endless), cut into sequences."""
    base: int
    seq_len: int
    until: int | None


class Runs(NamedTuple):
    """Spans of tokens that go from one source to a batch, int64 [runs] each: `count` tokens from the shuffled position
    `start` go to offset `line` of the concatenated rows. A span lies within one sequence of its grid and one row."""
    start: np.ndarray
    count: np.ndarray
    line: np.ndarray


class Pieces(NamedTuple):
    """Parts of documents, each within one row; int64 [pieces] each, three arrays are bool."""
    line: np.ndarray        # offset in the concatenated rows
    count: np.ndarray       # tokens, with the separator
    begins: np.ndarray      # bool: the separator comes first
    goes_on: np.ndarray     # bool: the document continues after the piece
    empty: np.ndarray       # bool: the document has no text
    document: np.ndarray
    first: np.ndarray       # the first token of the text


class _Window(NamedTuple):
    documents: np.ndarray
    starts: np.ndarray      # first token of each in the part
    ends: np.ndarray        # end of each in the epoch
    begin: int              # begin of the first in the epoch


class _Table(NamedTuple):
    """Consecutive windows, by their numbers in the stream. begins, ends: the positions in the stream where the
    documents begin and end, int64 [documents]."""
    numbers: frozenset[int]
    begins: np.ndarray
    ends: np.ndarray
    documents: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(eq=False)
class TokenStream:
    """The endless sequence of a source part's tokens, epoch after epoch. `seed` shuffles it; None keeps the source's
    order. A position is a number of preceding tokens, separators included."""
    part: SourcePart
    seed: int | None
    number: int             # of the source in its mixture, part of the seed
    grids: tuple[Grid, ...]     # contiguous; the last is endless

    def __post_init__(self):
        # the windows of one batch, if they are few
        held = -(-CHUNK_TOKENS * self.num_windows // max(self.tokens_per_epoch, 1)) + 4
        self._held = min(held, WINDOWS_HELD)
        self._epochs, self._windows = Recent(EPOCHS_HELD), Recent(self._held)
        self._table = _Table(frozenset(), *np.zeros((4, 0), np.int64))
        self._lock = threading.Lock()

    @property
    def tokens_per_epoch(self) -> int:
        return self.part.num_tokens

    @property
    def positions_per_epoch(self) -> int:
        return self.tokens_per_epoch

    @functools.cached_property
    def _width(self) -> int:
        """Number of runs of neighbouring documents (see run_length) in a window."""
        return max(1, WINDOW // run_length(self.part.source.num_documents))

    @functools.cached_property
    def num_windows(self) -> int:
        return -(-len(self.part.runs) // self._width)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (order, ends): int32 [runs], and int64 [windows], the end of each window in the epoch."""
        def make():
            tokens, count = self.part.tokens, len(self.part.runs)
            order = np.arange(count) if self.seed is None else permutation(count, self.seed, self.number, 0, epoch)
            return order.astype(np.int32), np.cumsum(np.add.reduceat(tokens[order], np.arange(0, count, self._width)))
        return self._epochs.get(epoch, make)

    def window(self, epoch: int, window: int) -> _Window:
        """Return the documents of a window of an epoch, in order."""
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

    def stream_positions(self, positions: np.ndarray) -> np.ndarray:
        """Map shuffled positions to positions in the stream, int64 of any shape. The sequences of a grid that begin in
        one epoch are permuted within chunks of CHUNK_TOKENS."""
        if self.seed is None:
            return positions
        places = np.empty_like(positions)
        for grid in self.grids:
            here = positions >= grid.base
            if grid.until is not None:
                here &= positions < grid.until
            if here.any():
                places[here] = self._positions_in_grid(grid, positions[here])
        return places

    def _positions_in_grid(self, grid: Grid, positions: np.ndarray) -> np.ndarray:
        numbers, offsets = np.divmod(positions - grid.base, grid.seq_len)
        epochs = (grid.base + numbers * grid.seq_len) // self.tokens_per_epoch
        chunk_length = max(1, CHUNK_TOKENS // grid.seq_len)
        for epoch in np.unique(epochs).tolist():
            first, after = self._sequences(grid, epoch)
            chunks = np.where(epochs == epoch, (numbers - first) // chunk_length, -1)
            for chunk in np.unique(chunks[chunks >= 0]).tolist():
                low = first + chunk * chunk_length
                here = chunks == chunk
                epochs[here] = -1   # done; `numbers` changes below
                numbers[here] = low + bijection(numbers[here] - low, min(chunk_length, after - low), self.seed,
                                                self.number, 2, grid.base + low * grid.seq_len)
        return grid.base + numbers * grid.seq_len + offsets

    def _sequences(self, grid: Grid, epoch: int) -> tuple[int, int]:
        """Return (first, last + 1) of the sequences of a grid that begin in an epoch."""
        first, after = (max(0, -(-(e * self.tokens_per_epoch - grid.base) // grid.seq_len)) for e in (epoch, epoch + 1))
        return first, after if grid.until is None else min(after, (grid.until - grid.base) // grid.seq_len)

    def regrid(self, position: int, seq_len: int) -> tuple[Grid, ...]:
        """Return grids that continue from a shuffled position with sequences of seq_len. The current chunk is finished
        with its old sequences, so that no token is lost or repeated."""
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
        # A shorter sequence first, so that whole sequences follow from `position`.
        base = position + -(-(end - position) // seq_len) * seq_len
        if base > end:
            grids.append(Grid(end, base - end, base))
        return (*grids, Grid(base, seq_len, None))

    def find(self, runs: Runs) -> Pieces:
        """Return the pieces of documents in one or more runs."""
        start = self.stream_positions(runs.start)
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
                        left < end, end - begin == 1, table.documents[k], table.starts[k] + np.maximum(done - 1, 0))
        assert pieces.count.sum() == runs.count.sum()
        return pieces

    def _open(self, numbers: list[int]) -> _Table:
        """Return a table of these windows, numbered through all epochs. Windows of the last table are kept while there
        are few."""
        with self._lock:
            table = self._table
            missing = [number for number in numbers if number not in table.numbers]
            if missing:
                kept = sorted({*numbers,
                               *table.numbers}) if len(table.numbers) + len(missing) <= self._held else numbers
                windows = [(number // self.num_windows * self.tokens_per_epoch,
                            self.window(*divmod(number, self.num_windows))) for number in kept]
                ends = np.concatenate([before + window.ends for before, window in windows])
                begins = np.concatenate([before + np.append(window.begin, window.ends[:-1])
                                         for before, window in windows])
                table = _Table(frozenset(kept), begins, ends,
                               np.concatenate([window.documents for _, window in windows]),
                               np.concatenate([window.starts for _, window in windows]))
                self._table = table
            return table

    def _window_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Return the windows, numbered through all epochs, that contain these stream positions."""
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
    """A thread-safe LRU cache."""

    def __init__(self, keep: int):
        self.keep, self.lock = keep, threading.Lock()
        self.made: dict[Any, Any] = {}

    def get(self, key, make: Callable):
        with self.lock:     # also while computing: threads must not all sort a large corpus
            made = self.made.pop(key) if key in self.made else make()
            if len(self.made) == self.keep:
                del self.made[next(iter(self.made))]
            self.made[key] = made
            return made
