"""Batches of packed documents: batch n is a function of (seed, n) alone, not of hosts, mesh or restarts.

The documents of an epoch, each behind a BOS, are laid end to end in an order drawn from (seed, epoch); the epochs follow one
another in one endless stream. Sequence s is the T+1 tokens from s*T on: T inputs and, one to the right, T targets, so every
token is an input once and a target once per epoch, and the incomplete sequence at an epoch's end goes on into the next. The
sequences that begin in one epoch are dealt to steps in a second order drawn from (seed, epoch), lest a batch be one long
document. Prefix sums over the lengths find any of it directly, so a restart needs no state but n.
This module knows no devices: a host asks for its rows of the global batch.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from meshtrain.training import sources

BOS = 256    # stands before every document; bytes are 0..255
VOCAB = 257
NO_LOSS = -1

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Spans of a source laid end to end, epoch after epoch; without a seed in their own order. BOS counts as a token."""
    source: sources.Source
    spans: sources.Spans
    seed: int | None

    @functools.cached_property
    def tokens_per_epoch(self) -> int:
        return int(self.spans.length.sum()) + len(self.spans.length)


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """What a run trains and validates on. `rows` are rows of the global batch: a slice, indices, or None for all of them.

    A batch holds int32 arrays, B rows of T = seq_len:
      tokens    [B, T]
      targets   [B, T]  the next token; NO_LOSS where that is the next document's (its BOS), or padding
      segments  [B, T]  the document within the row, from 1; 0 is padding (only in validation)
      positions [B, T]  the place in the document; a document that the last sequence began restarts at 0, as its earlier
                        tokens cannot be attended to, and nobody has to look back
      index     [B, T]  the place in the row
      sequence  [B]     n * global_batch + row (modulo 2**31): the same number on every layout, for dropout keys
    Without document_mask the row is one segment, positions count along it, and targets cross into the next document.
    """
    train: Stream
    validation: Stream | None
    seq_len: int
    global_batch: int
    document_mask: bool

    def batch(self, n: int, rows: slice | Sequence[int] | np.ndarray | None = None) -> Batch:
        """The rows of training batch n (from 0)."""
        numbers = _sequence_numbers(self, n, rows)
        places = deal(self.train, self.seq_len, numbers)
        return _rows(self, self.train, places, numbers, end=None)

    def iterate(self, start: int, rows: slice | Sequence[int] | np.ndarray | None = None, prefetch: int = 2) -> Iterator[Batch]:
        """Training batches start, start+1, … without end; `prefetch` of them are made ahead in threads (0: none).

        Closing it ends the threads.
        """
        import grain  # here: it takes a second to import, and `inspect` reads no data
        # One element is one batch, not one sequence: grain's order is then the step, and it has nothing to shuffle or stack.
        batches = grain.MapDataset.range(start, 2**62).map(functools.partial(self.batch, rows=rows))
        reads = grain.ReadOptions(num_threads=min(prefetch, 4), prefetch_buffer_size=prefetch)
        yield from batches.to_iter_dataset(reads)  # closing a generator closes what it yields from

    @property
    def num_validation_batches(self) -> int:
        """Batches that hold every validation token once."""
        if self.validation is None:
            return 0
        # The last token of the stream has no successor, so it needs no place as an input.
        return -(-(self.validation.tokens_per_epoch - 1) // (self.seq_len * self.global_batch))

    def validation_batch(self, i: int, rows: slice | Sequence[int] | np.ndarray | None = None) -> Batch:
        """The rows of validation batch i, in the documents' own order; the last one is filled up with padding, which may
        be whole rows: a mean must weigh by the targets that count."""
        if i >= self.num_validation_batches:
            raise IndexError(f"validation batch {i} of {self.num_validation_batches}")
        numbers = _sequence_numbers(self, i, rows)
        return _rows(self, self.validation, numbers, numbers, end=self.validation.tokens_per_epoch)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for two runs exactly if their documents have the same lengths in the same order: what the data order
        rests on. Hosts, and a restart, compare it."""
        return hashlib.blake2b(np.asarray(self.train.source.lengths, "<i8").tobytes(), digest_size=8).hexdigest()


def build(*, source: str, paths: Sequence[str] = (), seq_len: int, global_batch: int, seed: int,
          validation_fraction: float = 0.0, document_mask: bool = True) -> Data:
    """Opens a source by name and checks that it can fill a batch. Raises: ValueError (value, rule, remedy)."""
    _check_settings(seq_len, global_batch, seed, validation_fraction)
    return pack(sources.open_source(source, paths), seq_len=seq_len, global_batch=global_batch, seed=seed,
                validation_fraction=validation_fraction, document_mask=document_mask)


def pack(source: sources.Source, *, seq_len: int, global_batch: int, seed: int, validation_fraction: float = 0.0,
         document_mask: bool = True) -> Data:
    """Any source as batches. Raises: ValueError where it is too short for one batch or one validation sequence."""
    _check_settings(seq_len, global_batch, seed, validation_fraction)
    train, held_out = sources.split(source.lengths, validation_fraction)
    data = Data(Stream(source, train, seed), Stream(source, held_out, None) if validation_fraction else None,
                seq_len, global_batch, document_mask)
    faults = []
    tokens, needed = data.train.tokens_per_epoch, seq_len * global_batch
    if tokens < needed:
        fits = [f"data.global_batch ≤ {tokens // seq_len}"] if tokens >= seq_len else []
        fits += [f"data.seq_len ≤ {tokens // global_batch}"] if tokens >= global_batch else []
        faults.append(f"data.seq_len={seq_len} × data.global_batch={global_batch} is a batch of {needed:,} tokens, and the "
                      f"training documents hold {tokens:,}: not one full batch; use {' or '.join([*fits, 'more text'])}")
    if validation_fraction and data.validation.tokens_per_epoch <= seq_len:
        held = data.validation.tokens_per_epoch
        faults.append(f"data.validation_fraction={validation_fraction} holds out {held:,} of {held + tokens:,} tokens, and one "
                      f"sequence of data.seq_len={seq_len} takes {seq_len + 1:,}; use a larger fraction, more text, a shorter "
                      "seq_len, or validation_fraction=0 for no validation")
    if faults:
        raise ValueError("\n".join(faults))
    return data


def decode(ids: Sequence[int] | np.ndarray) -> str:
    """Text of token ids [any]; BOS, padding of the vocabulary and NO_LOSS leave no trace, broken UTF-8 becomes U+FFFD."""
    ids = np.asarray(ids)
    return ids[(ids >= 0) & (ids < BOS)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


# Four epochs' worth: the prefetching threads may stand on both sides of an epoch's end, with validation between.
@functools.lru_cache(maxsize=4)
def lay_out(stream: Stream, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(order, ends), int64 [spans]: the spans of an epoch in its order, and where each ends in the epoch, BOS counted."""
    order = np.arange(len(stream.spans.length))
    if stream.seed is not None:
        order = _shuffle(len(order), stream.seed, epoch, 0)
    return order, np.cumsum(stream.spans.length[order] + 1)


def deal(stream: Stream, seq_len: int, numbers: np.ndarray) -> np.ndarray:
    """The places in the stream, in sequences, of the sequences with these numbers; int64 [B] both.

    The sequences that begin in epoch e are s with e*E <= s*T < (e+1)*E; they change places among themselves only.
    """
    epochs = numbers * seq_len // stream.tokens_per_epoch
    places = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        first, order = _deal_epoch(stream, seq_len, int(epoch))
        here = epochs == epoch
        places[here] = first + order[numbers[here] - first]
    return places


@functools.lru_cache(maxsize=4)
def _deal_epoch(stream: Stream, seq_len: int, epoch: int) -> tuple[int, np.ndarray]:
    first, after = (-(-e * stream.tokens_per_epoch // seq_len) for e in (epoch, epoch + 1))
    return first, _shuffle(after - first, stream.seed, epoch, 1)


def _shuffle(count: int, *key: int) -> np.ndarray:
    """A permutation, int64 [count]. Raw bits and a stable sort, as numpy promises both for good: a run that resumes under
    another numpy must find the same order, and Generator.permutation may change."""
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


def read(stream: Stream, start: int, tokens: np.ndarray, begins: np.ndarray) -> None:
    """Fills tokens [n] with the stream from token `start` on, and begins [n] (bool) with where documents begin."""
    epoch, offset = divmod(int(start), stream.tokens_per_epoch)
    order, ends = lay_out(stream, epoch)
    k = int(np.searchsorted(ends, offset, side="right"))
    filled = 0
    while filled < len(tokens):
        if k == len(order):
            epoch, k, offset = epoch + 1, 0, 0
            order, ends = lay_out(stream, epoch)
        span = order[k]
        length = int(stream.spans.length[span])
        done = offset - (int(ends[k]) - length - 1)  # of the span's 1 + length tokens, by the sequence before
        take = min(1 + length - done, len(tokens) - filled)
        text = filled
        if done == 0:
            tokens[filled], begins[filled] = BOS, True
            text += 1
        if filled + take > text:
            first = int(stream.spans.start[span]) + max(done - 1, 0)
            tokens[text:filled + take] = stream.source.read(int(stream.spans.document[span]), first, first + filled + take - text)
        filled, offset, k = filled + take, offset + take, k + 1


def _rows(data: Data, stream: Stream, places: np.ndarray, numbers: np.ndarray, end: int | None) -> Batch:
    """The sequences at these places of the stream; what lies at `end` or behind it is padding."""
    B, T = len(places), data.seq_len
    tokens = np.zeros((B, T + 1), np.int32)
    begins = np.zeros((B, T + 1), bool)
    real = np.full((B, 1), T + 1)
    if end is not None:
        real = np.clip(end - places[:, None] * T, 0, T + 1)
    for row, place in enumerate(places):
        count = int(real[row, 0])
        if count:
            read(stream, int(place) * T, tokens[row, :count], begins[row, :count])

    index = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    segments, positions, no_loss = np.ones((B, T), np.int32), index.copy(), index + 1 >= real
    if data.document_mask:
        no_loss |= begins[:, 1:]
        begins[:, 0] = True  # also where a document goes on from the sequence before
        segments = np.cumsum(begins[:, :-1], axis=1, dtype=np.int32)
        positions -= np.maximum.accumulate(np.where(begins[:, :-1], index, 0), axis=1)
    return {"tokens": tokens[:, :-1].copy(), "targets": np.where(no_loss, np.int32(NO_LOSS), tokens[:, 1:]),
            "segments": np.where(index < real, segments, np.int32(0)), "positions": positions,
            "index": index.copy(), "sequence": (numbers % 2**31).astype(np.int32)}


def _sequence_numbers(data: Data, n: int, rows: slice | Sequence[int] | np.ndarray | None) -> np.ndarray:
    if n < 0:
        raise IndexError(f"batch {n}: batches are counted from 0")
    every = np.arange(data.global_batch, dtype=np.int64)
    chosen = every if rows is None else every[rows if isinstance(rows, slice) else np.asarray(rows, np.int64)]
    return n * data.global_batch + chosen


def _check_settings(seq_len: int, global_batch: int, seed: int, validation_fraction: float) -> None:
    faults = [f"{name}={value} is not a positive number; use at least 1"
              for name, value in (("data.seq_len", seq_len), ("data.global_batch", global_batch)) if value < 1]
    if seed < 0:
        faults.append(f"run.seed={seed} is negative; use 0 or more")
    if not 0 <= validation_fraction < 1:
        faults.append(f"data.validation_fraction={validation_fraction} is not a share of the documents; use 0 (none) to below "
                      "1, e.g. 0.01")
    if faults:
        raise ValueError("\n".join(faults))
