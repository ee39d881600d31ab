"""Interfaces of the data. A Source has documents, which packing reads; Batches are what a run trains on.

A new file format is a new Source; a new way to make sequences is a new Batches. The training loop and the checkpoint
use only these. Both are structural types (Protocol).
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeAlias

import numpy as np

Batch = dict[str, np.ndarray]
Rows: TypeAlias = slice | Sequence[int] | np.ndarray | None
RUNS = 1 << 20              # maximum number of runs; 10**8 documents give runs of 96


def run_length(documents: int) -> int:
    """Return the number of neighbouring documents that are shuffled as one run."""
    return max(1, -(-documents // RUNS))


def totals(num_documents: int, ends: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return Source.totals, int64 [runs], by one strided pass over Source.ends."""
    run = run_length(num_documents)
    last = np.minimum(np.arange(run - 1, num_documents + run - 1, run), num_documents - 1)
    return np.diff(ends(last), prepend=0)


class Source(Protocol):
    """Documents of tokens, in the same order on every host and in every run. Several threads may call it at once.

    Document ends may be a file of any size: they are read by gathers and never held in memory. Optional attributes:
    `complete`: documents contain everything that a model reads (conversations), so no separator or end is added. Their
    first token, at index -1 and not counted, takes the separator's place. `masked`: there is `mask(document, start,
    stop)`, like `read`: whether each token is a target; None: all are. `byte_totals`: like `totals`, but UTF-8 bytes of
    the documents' text before tokenizing; None: unknown.
    """

    @property
    def num_documents(self) -> int: ...

    @property
    def totals(self) -> np.ndarray:
        """The number of tokens in each run of neighbouring documents, int64 [runs]. A run has
        run_length(num_documents) documents; the last may have fewer."""

    def ends(self, documents: np.ndarray) -> np.ndarray:
        """Return the end of each document, int64, shaped as documents: in tokens from the start of the source, without
        separators."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the document's tokens start..stop-1: integers [stop - start]."""


class ValidationSet(Protocol):
    """The held-out documents of one source; each token occurs once, in the source's own order."""

    @property
    def name(self) -> str:
        """The name of the source in its mixture; "" if it is the only one."""

    @property
    def weight(self) -> float:
        """The weight in the validation loss of all sources; the weights add up to 1."""

    @property
    def num_batches(self) -> int: ...

    def batch(self, i: int, rows: Rows = None) -> Batch:
        """Return rows of batch i, shaped as a training batch. The last batch is padded, perhaps by whole rows, so means
        must be weighted by the number of targets. Raises: IndexError."""


class Batches(Protocol):
    """The batches that a run trains and validates on. Batch n is a function of the settings and n alone.

    `rows` selects rows of the global batch, each once: a slice, indices, or None for all. A batch holds int32 arrays,
    B rows of T = seq_len:
          tokens    [B, T]
          targets   [B, T]  the document's next token, then its end; NO_TARGET: no loss here
          segments  [B, T]  number of the document in the row, from 1; 0: padding (validation, or packing "whole")
          positions [B, T]  position in the document; a document continued from an earlier sequence restarts at 0,
                            because its earlier tokens cannot be attended to
          index     [B, T]  position in the row
          sequence  [B]     n * global_batch + row (modulo 2**31): the same on every layout, for dropout keys
    """

    @property
    def validation(self) -> Sequence[ValidationSet]:
        """The held-out documents of each source; () for none."""

    def batch(self, n: int, rows: Rows = None) -> Batch:
        """Return rows of training batch n (from 0). Raises: IndexError."""

    def tokens(self, batches: int) -> int:
        """Return the number of tokens in the run's first `batches` batches, whatever their sizes were."""

    def position(self, batches: int) -> dict:
        """Return the position of each source after the run's first `batches` batches: JSON for the checkpoint, used on
        a resume."""


def iterate(data: Batches, start: int, rows: Rows = None, prefetch: int = 4) -> Generator[Batch, None, None]:
    """Yield training batches start, start + 1, … without end. Threads prefetch `prefetch` of them (0: none) until the
    iterator is closed."""
    # grain prefetches in threads, in order, and passes exceptions on. Shuffling, sharding and packing are ours: its
    # shuffle and packing hold an index or run through the data, without random access to batch n.
    import grain  # takes a second, and `inspect` reads no data
    batches = grain.MapDataset.range(start, 2**62).map(functools.partial(data.batch, rows=rows))
    reads = grain.ReadOptions(num_threads=min(prefetch, 4), prefetch_buffer_size=prefetch)
    yield from batches.to_iter_dataset(reads)  # closed with this generator
