"""Sequences of whole documents: no document is cut at a sequence's end, and the rest of a sequence is padding.

The documents of a window (order.py: about 8,192) are packed best fit decreasing, in the same way in every epoch; the
order of windows and of their sequences is shuffled. A document longer than a sequence is split, and each piece but the
last fills a sequence. A conversation or a masked document is truncated instead, because an answer without its question
teaches nothing. Memory holds a number per window and the last windows. The location of a sequence follows from (seed,
number of the sequence). To find this location, the sequences before it in the first epoch are counted, which takes 1 us
a document.

Source: Johnson 1973 (best fit decreasing); arXiv:2404.10830 (for packing).
"""
from __future__ import annotations

import dataclasses
import functools
import threading
from typing import NamedTuple

import numpy as np

from meshtrain.data.batches import order
from meshtrain.data.batches.order import Grid, SourcePart, Pieces, Runs, TokenStream
from meshtrain.data.documents.contracts import Source

PASS_DOCUMENTS = 1 << 20        # number of lengths read at a time
WINDOWS_HELD = 8                # windows kept in memory


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (bin, offset in it, number of bins); the first two are int64 [documents]. lengths: the length of each
    document, 1 to capacity. Open bins are indexed by free space; the bits of one integer say which free spaces occur.
    """
    bins, places, count = [0] * len(lengths), [0] * len(lengths), 0
    bins_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0
    descending = np.argsort(-lengths, kind="stable")
    for document, length in zip(descending.tolist(), lengths[descending].tolist()):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            chosen = bins_by_space[space].pop()
            if not bins_by_space[space]:
                spaces ^= 1 << space
        else:
            space, chosen, count = capacity, count, count + 1
        bins[document], places[document] = chosen, capacity - space
        left = space - length
        if left:
            if not bins_by_space[left]:
                spaces |= 1 << left
            bins_by_space[left].append(chosen)
    return np.array(bins, np.int64), np.array(places, np.int64), count


class _PackedWindow(NamedTuple):
    """The sequences of a window and their documents or pieces, in order."""
    firsts: np.ndarray      # int64 [sequences + 1]: the first piece of each
    pieces: Pieces          # line: offset in its sequence


@dataclasses.dataclass(eq=False)
class WholeStream:
    """A stream like `order.TokenStream`, but of whole-document sequences. Positions include padding. seed: the seed of
    the shuffle; None: the source's own order."""
    part: SourcePart
    seed: int | None
    number: int             # of the source in its mixture
    grids: tuple[Grid, ...]

    def __post_init__(self):
        self._order = TokenStream(self.part, self.seed, self.number, ())
        self._windows, self._epochs = order.Recent(WINDOWS_HELD), order.Recent(order.EPOCHS_HELD)
        self._counts = np.zeros(self._order.num_windows + 1, np.int64)      # sequences before each window
        self._counted = 0       # number of windows counted so far
        self._lock = threading.Lock()

    @property
    def seq_len(self) -> int:
        return self.grids[0].seq_len

    @property
    def tokens_per_epoch(self) -> int:
        return self.part.num_tokens

    @functools.cached_property
    def num_sequences(self) -> int:
        """The number of sequences in an epoch. Counting them reads all lengths."""
        self.has(1 << 62)
        return int(self._counts[-1])

    @property
    def positions_per_epoch(self) -> int:
        return self.num_sequences * self.seq_len

    def has(self, sequences: int) -> bool:
        """Return whether an epoch has this many sequences. Counts no further than needed."""
        with self._lock:
            while self._counts[self._counted] < sequences and self._counted < self._order.num_windows:
                before, count = self._counts[self._counted], len(self._window(self._counted).firsts) - 1
                self._counts[self._counted + 1] = before + count
                self._counted += 1
            return bool(self._counts[self._counted] >= sequences)

    def regrid(self, position: int, seq_len: int) -> tuple[Grid, ...]:
        assert seq_len == self.seq_len
        return self.grids

    def find(self, runs: Runs) -> Pieces:
        """Return the documents of whole sequences, one run each."""
        assert (runs.start % self.seq_len == 0).all() and (runs.count == self.seq_len).all()
        sequences, parts = runs.start // self.seq_len, []
        epochs = np.zeros_like(sequences)
        if not self.has(int(sequences.max()) + 1):
            epochs, sequences = np.divmod(sequences, self.num_sequences)
        for epoch in np.unique(epochs).tolist():
            windows, counts = self._epoch(epoch) if epoch else (None, self._counts[:self._counted + 1])
            here = epochs == epoch
            place = np.searchsorted(counts, sequences[here], side="right") - 1
            for k in np.unique(place).tolist():
                some, first = place == k, int(counts[k])
                window = k if windows is None else int(windows[k])
                rows = sequences[here][some] - first
                if self.seed is not None:
                    rows = order.bijection(rows, int(counts[k + 1]) - first, self.seed, self.number, 4, epoch, window)
                parts.append(self._pieces_at(window, rows, runs.line[here][some]))
        return Pieces(*map(np.concatenate, zip(*parts)))

    def _pieces_at(self, window: int, rows: np.ndarray, lines: np.ndarray) -> Pieces:
        """Return the pieces of these sequences (`rows`) of a window, placed at these offsets (`lines`)."""
        held = self._window(window)
        first, num = held.firsts[rows], held.firsts[rows + 1] - held.firsts[rows]
        own = np.arange(num.sum()) + np.repeat(first - (np.cumsum(num) - num), num)
        pieces = Pieces(*(column[own] for column in held.pieces))
        return pieces._replace(line=pieces.line + np.repeat(lines, num))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (order of the windows, number of sequences before each and in total) of an epoch after the first."""
        def make():
            counts = np.diff(self._counts)      # complete after the first epoch
            windows = np.arange(len(counts)) if self.seed is None else \
                order.permutation(len(counts), self.seed, self.number, 3, epoch)
            return windows, np.append(0, np.cumsum(counts[windows]))
        return self._epochs.get(epoch, make)

    def _window(self, window: int) -> _PackedWindow:
        def make():
            own = self._order.window(0, window)
            pieces = self._split_long(own.documents, own.starts, np.diff(own.ends, prepend=own.begin))
            bins, columns, count = best_fit(pieces.count, self.seq_len)
            together = np.lexsort((columns, bins))
            firsts = np.searchsorted(bins[together], np.arange(count + 1))
            return _PackedWindow(firsts, Pieces(*(column[together] for column in pieces._replace(line=columns))))
        return self._windows.get(window, make)

    def _split_long(self, documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Pieces:
        """Split documents into pieces that fit a sequence. lengths: the lengths of the documents, separators included.
        `line` of the result is not set yet."""
        T = self.seq_len
        num = np.ones_like(lengths) if ends_with_sequence(self.part.source) else -(-lengths // T)
        which = np.repeat(np.arange(len(documents)), num)
        offset = (np.arange(len(which)) - np.repeat(np.cumsum(num) - num, num)) * T
        count = np.minimum(lengths[which] - offset, T)
        return Pieces(offset, count, offset == 0, offset + count < lengths[which], lengths[which] == 1,
                      documents[which], starts[which] + np.maximum(offset - 1, 0))


def ends_with_sequence(source: Source) -> bool:
    """Return whether a source's documents are truncated at a sequence's end."""
    return getattr(source, "complete", False) or getattr(source, "masked", False)


def measure_filling(source: Source, seq_len: int) -> tuple[float, int]:
    """Return (share of sequences that is not padding, documents sampled), for the first window of the source's own
    order."""
    documents = np.arange(min(source.num_documents, order.WINDOW))
    lengths = order.lengths(source, documents) + 1
    full, rest = np.divmod(np.minimum(lengths, seq_len) if ends_with_sequence(source) else lengths, seq_len)
    sequences = int(full.sum()) + best_fit(rest[rest > 0], seq_len)[2]
    return int((full * seq_len + rest).sum()) / (sequences * seq_len), len(documents)


def too_long(source: Source, seq_len: int) -> tuple[int, int]:
    """Return (documents longer than a sequence, tokens truncated). Reads all lengths if documents are truncated."""
    separators = 1      # or the first token of complete documents
    documents = tokens = 0
    for first in range(0, source.num_documents, PASS_DOCUMENTS) if ends_with_sequence(source) else ():
        lengths = order.lengths(source,
                                np.arange(first, min(first + PASS_DOCUMENTS, source.num_documents))) + separators
        beyond = lengths[lengths > seq_len]
        documents, tokens = documents + len(beyond), tokens + int((beyond - seq_len).sum())
    return documents, tokens
