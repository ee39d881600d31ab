"""What data is to the rest of the program: a Source is documents that packing reads, Batches are what a run trains on.

A new kind of file is a new Source, a new way to make sequences is a new Batches; the loop and the
checkpoint know nothing else of data. Both are structural: nothing is inherited.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]
Rows = slice | Sequence[int] | np.ndarray | None
RUNS = 1 << 20              # of documents that are shuffled as one, at most: 96 documents each at 10**8 of them


def run_length(documents: int) -> int:
    """Neighbouring documents that are shuffled as one."""
    return max(1, -(-documents // RUNS))


def totals(num_documents: int, ends: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Source.totals, int64 [runs], by one strided pass over Source.ends."""
    run = run_length(num_documents)
    last = np.append(np.arange(run - 1, num_documents - 1, run), num_documents - 1) if num_documents else np.zeros(
        0, np.int64)
    return np.diff(ends(last), prepend=0)


class Source(Protocol):
    """Documents of tokens, in an order that is the same on every host and in every run. Called from several threads at
    once.

    Where documents end may be a file of any size: it is gathered from, never held. A source may have two more
    attributes: `complete`, true where its documents stand as they are read by a model, conversations say: no separator
    is put before them, their own first token stands in its place (at -1, and not counted), and no end behind them; and
    `masked`, true where it has `mask(document, start, stop)`, as `read`: of each token whether it is a target, or None
    where all are.
    """

    @property
    def num_documents(self) -> int: ...

    @property
    def totals(self) -> np.ndarray:
        """int64 [runs]: tokens of each run of run_length(num_documents) neighbours; the last run may be shorter."""

    def ends(self, documents: np.ndarray) -> np.ndarray:
        """int64 [any], as documents: where each ends, in tokens from the start of the source, without separators."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Integers [stop - start]: the document's tokens start..stop-1."""


class ValidationSet(Protocol):
    """The held-out documents of one source, each token once, in their own order."""
    name: str           # of the source in its mixture; "" where there is one source
    weight: float       # its share of the validation loss of all sources together; they add up to 1

    @property
    def num_batches(self) -> int: ...

    def batch(self, i: int, rows: Rows = None) -> Batch:
        """The rows of batch i, of a training batch's shape; the last is filled up with padding, which may be whole
        rows: a mean must weigh by the targets that count. Raises: IndexError."""


class Batches(Protocol):
    """What a run trains and validates on. Batch n is a function of the settings and n alone.

    `rows` are rows of the global batch, each once: a slice, indices, or None for all. A batch holds int32 arrays, B
    rows of T = seq_len:
      tokens    [B, T]
      targets   [B, T]  the next token of the document, behind its last one the end of a document; NO_TARGET: no loss
      here segments  [B, T]  the document within the row, from 1; 0 is padding (in validation, and where no document is
      cut) positions [B, T]  the place in the document; a document that an earlier sequence began restarts at 0, as its
      earlier
                        tokens cannot be attended to, and nobody has to look back
      index     [B, T]  the place in the row
      sequence  [B]     n * global_batch + row (modulo 2**31): the same number on every layout, for dropout keys
    """
    validation: Sequence[ValidationSet]     # () for none

    def batch(self, n: int, rows: Rows = None) -> Batch:
        """The rows of training batch n (from 0). Raises: IndexError."""

    def iterate(self, start: int, rows: Rows = None) -> Iterator[Batch]:
        """Training batches start, start+1, … without end, see `made_ahead`."""

    def tokens(self, batches: int) -> int:
        """Tokens in the first `batches` batches of the run, whatever their sizes were."""

    def position(self, batches: int) -> dict:
        """Where the first `batches` batches of the run leave each source: JSON, kept in a checkpoint, read when it goes
        on."""


def made_ahead(batch: Callable[[int], Batch], start: int, prefetch: int) -> Iterator[Batch]:
    """batch(start), batch(start + 1), … without end; `prefetch` of them are made ahead in threads (0: none). Closing it
    ends the threads."""
    # grain makes batches ahead in threads, in order, and hands exceptions over. Shuffling, sharding and packing are
    # ours: its shuffle and its packing hold an index or run through the data, and a restart would not find batch n by
    # itself.
    import grain  # here: it takes a second to import, and `inspect` reads no data
    batches = grain.MapDataset.range(start, 2**62).map(batch)
    reads = grain.ReadOptions(num_threads=min(prefetch, 4), prefetch_buffer_size=prefetch)
    yield from batches.to_iter_dataset(reads)  # closing a generator closes what it yields from
