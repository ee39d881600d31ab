"""Batches of packed documents: batch n is a function of (seed, n) alone, not of hosts, mesh or restarts.

A source's documents of an epoch, each behind a BOS, are laid end to end in an order drawn from (seed, epoch); the epochs
follow one another in one endless stream. Sequence s of it is the T tokens from s*T on, with the token behind each as its
target: every token is an input once and a target once per epoch, and the incomplete sequence at an epoch's end goes on into
the next. The sequences that begin in one epoch are dealt to steps in a second order drawn from (seed, epoch), lest a batch be
one long document. Prefix sums over the lengths find any of it directly, so a restart needs no state but n.
Of a mixture, a batch holds the next tokens of each source in the order that the source would have alone, as many as its
exact share of all tokens so far grows (see `shares`): nothing is drawn; the proportions hold in every batch, not on average.
Where documents are about as long as sequences, or longer, shares are whole sequences. Where they are short, shares are exact
to two tokens or so, and a sequence that is not done at a batch's end goes on in the next batch, its documents cut there.
This module knows no devices: a host asks for its rows of the global batch.
"""
from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from meshtrain.data import sources
from meshtrain.names import NO_TARGET

Batch = dict[str, np.ndarray]
Rows = slice | Sequence[int] | np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Spans of a source laid end to end, epoch after epoch; without a seed in their own order. BOS counts as a token."""
    source: sources.Source
    spans: sources.Spans
    seed: int | None
    number: int = 0     # of the source in its mixture: each has orders of its own

    def __post_init__(self):
        object.__setattr__(self, "_epochs", _Recent())

    @functools.cached_property
    def tokens_per_epoch(self) -> int:
        return int(self.spans.length.sum()) + len(self.spans.length)

    def lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order, ends), int64 [spans]: the spans of an epoch in its order, and where each ends in the epoch, BOS counted."""
        def make():
            order = np.arange(len(self.spans.length)) if self.seed is None else self._shuffle(len(self.spans.length), epoch, 0)
            return order, np.cumsum(self.spans.length[order] + 1)
        return self._epochs.get(("spans", epoch), make)

    def deal(self, seq_len: int, numbers: np.ndarray) -> np.ndarray:
        """The places in the stream, in sequences, of the sequences with these numbers; int64 [sequences] both.

        The sequences that begin in epoch e are s with e*E <= s*T < (e+1)*E; they change places among themselves only.
        """
        if self.seed is None:
            return numbers
        epochs = numbers * seq_len // self.tokens_per_epoch
        places = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            first, order = self._deal_epoch(seq_len, int(epoch))
            places[here] = first + order[numbers[here] - first]
        return places

    def _deal_epoch(self, seq_len: int, epoch: int) -> tuple[int, np.ndarray]:
        def make():
            first, after = (-(-e * self.tokens_per_epoch // seq_len) for e in (epoch, epoch + 1))
            return first, self._shuffle(after - first, epoch, 1)
        return self._epochs.get((seq_len, epoch), make)

    def _shuffle(self, count: int, epoch: int, which: int) -> np.ndarray:
        """A permutation, int64 [count]. Raw bits and a stable sort, as numpy promises both for good: a run that resumes under
        another numpy must find the same order, and Generator.permutation may change."""
        key = (self.seed, epoch, which) + ((self.number,) if self.number else ())
        return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(count), kind="stable")


class _Recent:
    """The last things made, for several threads: two epochs' worth, as those that read ahead stand on both sides of an end."""

    def __init__(self, keep: int = 4):
        self.keep, self.made, self.lock = keep, {}, threading.Lock()

    def get(self, key, make: Callable):
        with self.lock:     # also while it is made: a large corpus is not sorted by every thread at once
            if key not in self.made:
                if len(self.made) == self.keep:
                    del self.made[next(iter(self.made))]
                self.made[key] = make()
            return self.made[key]


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """What a run trains and validates on. `rows` are rows of the global batch, each once: a slice, indices, or None for all.

    A batch holds int32 arrays, B rows of T = seq_len:
      tokens    [B, T]
      targets   [B, T]  the next token; NO_TARGET where that is the next document's (its BOS), or padding
      segments  [B, T]  the document within the row, from 1; 0 is padding (only in validation)
      positions [B, T]  the place in the document; a document that an earlier sequence began restarts at 0, as its earlier
                        tokens cannot be attended to, and nobody has to look back
      index     [B, T]  the place in the row
      sequence  [B]     n * global_batch + row (modulo 2**31): the same number on every layout, for dropout keys
    Without document_mask the row is one segment, positions count along it, and targets cross into the next document of the
    same source.
    """
    train: tuple[Stream, ...]
    validation: tuple[Stream, ...]      # () for none
    weights: tuple[int, ...]            # of the sources, exactly in the proportions that were asked for
    bos: int
    seq_len: int
    global_batch: int
    document_mask: bool
    quantum: int                        # tokens: the shares of training batches are multiples of it

    def batch(self, n: int, rows: Rows = None) -> Batch:
        """The rows of training batch n (from 0)."""
        return _assemble(self, self.train, n, self.quantum, None, rows)

    def iterate(self, start: int, rows: Rows = None, prefetch: int = 2) -> Iterator[Batch]:
        """Training batches start, start+1, … without end; `prefetch` of them are made ahead in threads (0: none).

        Closing it ends the threads.
        """
        import grain  # here: it takes a second to import, and `inspect` reads no data
        # One element is one batch, not one sequence: grain's order is then the step, and it has nothing to shuffle or stack.
        batches = grain.MapDataset.range(start, 2**62).map(functools.partial(self.batch, rows=rows))
        reads = grain.ReadOptions(num_threads=min(prefetch, 4), prefetch_buffer_size=prefetch)
        yield from batches.to_iter_dataset(reads)  # closing a generator closes what it yields from

    @functools.cached_property
    def validation_tokens(self) -> int:
        """Of all sources together, mixed by their weights until the first of them runs out."""
        if not self.validation:
            return 0
        lengths = [stream.tokens_per_epoch for stream in self.validation]
        return bisect.bisect_left(range(sum(lengths)), True, key=lambda tokens: any(
            share > length for share, length in zip(shares(self.weights, tokens + 1), lengths)))

    @property
    def num_validation_batches(self) -> int:
        """Batches that hold every token of `validation_tokens` once."""
        # The last token of the stream has no successor, so it needs no place as an input.
        return max(-(-(self.validation_tokens - 1) // (self.seq_len * self.global_batch)), 0)

    def validation_batch(self, i: int, rows: Rows = None) -> Batch:
        """The rows of validation batch i, in the documents' own order; the last one is filled up with padding, which may
        be whole rows: a mean must weigh by the targets that count."""
        if i >= self.num_validation_batches:
            raise IndexError(f"validation batch {i} of {self.num_validation_batches}")
        return _assemble(self, self.validation, i, 1, self.validation_tokens, rows)


def pack(corpus: Sequence[sources.Source], weights: Sequence[float], *, bos: int, seq_len: int, global_batch: int, seed: int,
         validation_fraction: float = 0.0, document_mask: bool = True) -> Data:
    """Sources as batches, mixed in the proportions of `weights` (positive numbers of any sum; shares of the tokens).

    Raises: ValueError where a source is too short for its share of one batch, or the held-out part for one sequence.
    """
    _check_settings(seq_len, global_batch, seed, validation_fraction)
    assert len(corpus) == len(weights) > 0
    faults = [f"data.mixture[{i}].weight={weight} is not a positive number; use one, e.g. 0.3, or leave the source out"
              for i, weight in enumerate(weights) if not 0 < weight < math.inf]
    if faults:
        raise ValueError("\n".join(faults))
    train, held_out = zip(*(sources.split(source.lengths, validation_fraction) for source in corpus))
    fractions = [Fraction(weight) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = tuple(int(fraction * scale) for fraction in fractions)
    longest = 1 + max(int(spans.length.max(initial=0)) for spans in train)
    # Whole sequences, so that no batch's end cuts one, unless that would be coarser than the documents are.
    quantum = seq_len if len(corpus) > 1 and deviation(whole) * seq_len <= longest else 1
    data = Data(tuple(Stream(source, spans, seed, i) for i, (source, spans) in enumerate(zip(corpus, train))),
                tuple(Stream(source, spans, None, i) for i, (source, spans) in enumerate(zip(corpus, held_out)))
                if validation_fraction else (), whole, bos, seq_len, global_batch, document_mask, quantum)
    faults = _check_lengths(data, validation_fraction)
    if faults:
        raise ValueError("\n".join(faults))
    return data


def shares(weights: Sequence[int], tokens: int, quantum: int = 1) -> list[int]:
    """How many of the first `tokens` (a multiple of quantum) of a mixture come from each source; none ever falls as they rise.

    The heaviest source and the rest divide them by their weights, rounded to the quantum; then the next heaviest and the rest
    of that rest, and so on, in exact integers.
    """
    counts, left, weight_left = [0] * len(weights), tokens // quantum, sum(weights)
    for i in _heaviest_first(weights):
        weight = weight_left - weights[i]
        rest = (2 * left * weight + weight_left) // (2 * weight_left)
        counts[i], left, weight_left = (left - rest) * quantum, rest, weight
    return counts


def deviation(weights: Sequence[int]) -> Fraction:
    """The bound of |share - weight * tokens|, in quanta: 1/2 for 2 sources; for k at most (1 + 1 + 1/2 + … + 1/(k-2)) / 2.

    Division t leaves the sources behind it an error of e_t+1 = W_t+1 / W_t * e_t + 1/2, e_1 = 0, and source t gets one of
    w_t / W_t * e_t + 1/2 at most; the closed form follows from w_t <= W_s / (t - s + 1), the heaviest being first.
    """
    worst, error, left = Fraction(0), Fraction(0), sum(weights)
    for i in _heaviest_first(weights):
        rest = left - weights[i]
        rounding = Fraction(1, 2) if rest else Fraction(0)    # the last takes all that is left
        worst = max(worst, Fraction(weights[i], left) * error + rounding)
        error, left = Fraction(rest, left) * error + rounding, rest
    return worst


def _heaviest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: -weights[i])


class Runs(NamedTuple):
    """Tokens that one source gives to a batch, int64 [runs] each: `count` from `start` on, in the order that the source is
    dealt, to the place `line` of the batch's rows laid end to end. A run lies within a sequence and within a row."""
    start: np.ndarray
    count: np.ndarray
    line: np.ndarray


def _lay_rows(seq_len: int, before: Sequence[int], after: Sequence[int]) -> list[Runs]:
    """Where the tokens before[i]..after[i]-1 of each source i go.

    Whole sequences are whole rows, the sources evenly among them: every host and microbatch sees of all. Behind those stand,
    end to end, the parts of sequences that this batch shares with the one before it or the next.
    """
    whole = [np.arange(-(-a // seq_len), b // seq_len) for a, b in zip(before, after)]
    order = np.argsort(np.concatenate([(np.arange(len(w)) + 0.5) / len(w) for w in whole]), kind="stable")
    row = np.empty_like(order)
    row[order] = np.arange(len(order))
    ends = np.cumsum([len(w) for w in whole])
    line = len(row) * seq_len
    runs = []
    for a, b, numbers, rows in zip(before, after, whole, np.split(row, ends[:-1])):
        parts = []
        while a < b:
            if a % seq_len == 0 and b - a >= seq_len:
                a = b - b % seq_len     # past the whole ones
                continue
            take = min(b - a, seq_len - a % seq_len, seq_len - line % seq_len)
            parts.append((a, take, line))
            a, line = a + take, line + take
        parts = np.array(parts, np.int64).reshape(-1, 3).T
        runs.append(Runs(*map(np.append, (numbers * seq_len, np.full(len(rows), seq_len), rows * seq_len), parts)))
    return runs


class Pieces(NamedTuple):
    """Parts of documents, each in one place of one row; [pieces] each, int64 but for the two that are bool."""
    line: np.ndarray        # its place in the rows laid end to end
    count: np.ndarray       # tokens, BOS included
    begins: np.ndarray      # bool: a BOS stands first
    goes_on: np.ndarray     # bool: the document has a token behind the piece
    document: np.ndarray
    first: np.ndarray       # the first token of the text


def _find(stream: Stream, runs: Runs, seq_len: int) -> Pieces:
    """The pieces of a source's runs, of which there is at least one, epoch by epoch."""
    found = []
    start = stream.deal(seq_len, runs.start // seq_len) * seq_len + runs.start % seq_len
    per_epoch, spans = stream.tokens_per_epoch, stream.spans
    first, last = start // per_epoch, (start + runs.count - 1) // per_epoch
    for epoch in np.unique(np.minimum(first + np.arange((last - first).max() + 1)[:, None], last)):
        order, ends = stream.lay_out(int(epoch))
        low, high = start - epoch * per_epoch, start + runs.count - epoch * per_epoch
        run = np.flatnonzero((low < per_epoch) & (high > 0))
        first = np.searchsorted(ends, low[run], side="right")
        num = np.searchsorted(ends, np.minimum(high[run], per_epoch)) + 1 - first
        run = np.repeat(run, num)
        k = np.arange(len(run)) + np.repeat(first - (np.cumsum(num) - num), num)
        span = order[k]
        size = spans.length[span] + 1
        begin = ends[k] - size
        done, stop = np.maximum(low[run] - begin, 0), np.minimum(high[run] - begin, size)     # BOS is token 0
        found.append(Pieces(runs.line[run] + begin + done - low[run], stop - done, done == 0, stop < size,
                            spans.document[span], spans.start[span] + np.maximum(done - 1, 0)))
    pieces = Pieces(*map(np.concatenate, zip(*found)))
    assert pieces.count.sum() == runs.count.sum()
    return pieces


def _read(source: sources.Source, pieces: Pieces, tokens: np.ndarray) -> np.ndarray:
    """Puts the texts into tokens, int32 [rows laid end to end]; gives the tokens behind those that go on."""
    behind = []
    count = pieces.count - pieces.begins
    wanted = np.flatnonzero(count + pieces.goes_on)
    table = (pieces.line + pieces.begins, count, pieces.goes_on, pieces.document, pieces.first)
    for line, count, goes_on, document, first in zip(*(column[wanted].tolist() for column in table)):
        text = source.read(document, first, first + count + goes_on)
        if goes_on:
            behind.append(text[count])
            text = text[:count]
        tokens[line:line + count] = text
    return np.array(behind, np.int32)


def _assemble(data: Data, streams: Sequence[Stream], n: int, quantum: int, end: int | None, rows: Rows) -> Batch:
    """These rows of batch n; what lies at token `end` of the mixture or behind it is padding."""
    if n < 0:
        raise IndexError(f"batch {n}: batches are counted from 0")
    T, every = data.seq_len, np.arange(data.global_batch)
    chosen = every if rows is None else every[rows if isinstance(rows, slice) else np.asarray(rows, np.int64)]
    B, start, stop = len(chosen), n * data.global_batch * T, (n + 1) * data.global_batch * T
    place = np.full(data.global_batch, -1)
    place[chosen] = np.arange(B)
    assert (place >= 0).sum() == B, f"rows {rows} name a row twice"

    tokens = np.zeros((B, T), np.int32)
    found, behind = [], []
    before, after = (shares(data.weights, at, quantum) for at in (start, stop if end is None else min(stop, end)))
    for stream, runs in zip(streams, _lay_rows(T, before, after)):
        row = place[runs.line // T]
        here = row >= 0
        if here.any():
            runs = Runs(runs.start[here], runs.count[here], row[here] * T + runs.line[here] % T)
            found.append(_find(stream, runs, T))
            behind.append(_read(stream.source, found[-1], tokens.reshape(-1)))
    pieces = Pieces(*map(np.concatenate, zip(*found))) if found else Pieces(*np.zeros((6, 0), np.int64))
    begins, goes_on = pieces.begins.astype(bool), pieces.goes_on.astype(bool)
    tokens.reshape(-1)[pieces.line[begins]] = data.bos

    targets = np.empty((B, T), np.int32)
    targets[:, :-1] = tokens[:, 1:]
    last = pieces.line + pieces.count - 1
    targets.reshape(-1)[last[~goes_on]] = NO_TARGET if data.document_mask else data.bos
    targets.reshape(-1)[last[goes_on]] = np.concatenate(behind or [[]])

    index = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    real = np.full(B, T + 1) if end is None else np.clip(end - start - chosen * T, 0, T + 1)
    if data.document_mask:
        line = np.sort(np.append(pieces.line, np.flatnonzero(real == 0) * T))     # a row of padding begins something, too
        column, k = line % T, np.arange(len(line))
        segment = k + 1 - np.maximum.accumulate(np.where(column == 0, k, 0))
        count = np.diff(line, append=B * T)
        segments = np.repeat(segment.astype(np.int32), count).reshape(B, T)
        positions = index - np.repeat(column.astype(np.int32), count).reshape(B, T)
    else:
        segments, positions = np.ones((B, T), np.int32), index.copy()
    if (real <= T).any():
        segments[index >= real[:, None]] = 0
        targets[index + 1 >= real[:, None]] = NO_TARGET
    sequence = (n * data.global_batch + chosen) % 2**31
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "index": index,
            "sequence": sequence.astype(np.int32)}


def _check_lengths(data: Data, validation_fraction: float) -> list[str]:
    """What is wrong with the lengths of the sources, for this batch and this hold-out."""
    T, B, faults = data.seq_len, data.global_batch, []
    for i, (stream, weight) in enumerate(zip(data.train, data.weights)):
        part = Fraction(weight, sum(data.weights))
        tokens, needed = stream.tokens_per_epoch, math.ceil(part * T * B)
        if tokens >= needed:
            continue
        if len(data.train) == 1:
            fits = [f"data.global_batch ≤ {tokens // T}"] if tokens >= T else []
            fits += [f"data.seq_len ≤ {tokens // B}"] if tokens >= B else []
            faults.append(f"data.seq_len={T} × data.global_batch={B} is a batch of {needed:,} tokens, and the "
                          f"training documents hold {tokens:,}: not one full batch; use {' or '.join([*fits, 'more text'])}")
        else:
            faults.append(f"data.mixture[{i}] is {float(part):.3g} of the mixture, {needed:,} tokens in a batch of "
                          f"data.seq_len={T} × data.global_batch={B}, and its training documents hold {tokens:,}: they would "
                          f"come twice in one batch; use a weight ≤ {tokens / (T * B):.2g} of the sum, a smaller batch or more text")
    if not validation_fraction:
        return faults
    held, total = ([stream.tokens_per_epoch for stream in streams] for streams in (data.validation, data.train))
    if data.validation_tokens > T:
        return faults
    if len(held) == 1:
        what = f"holds out {held[0]:,} of {held[0] + total[0]:,} tokens"
    else:
        first = min(range(len(held)), key=lambda i: held[i] / data.weights[i])
        part = data.weights[first] / sum(data.weights)
        what = (f"holds out {held[first]:,} of the {held[first] + total[first]:,} tokens of data.mixture[{first}], which "
                f"end a mixture with {part:.3g} of them after {data.validation_tokens:,} tokens")
    return [*faults, f"data.validation_fraction={validation_fraction} {what}, and one sequence of data.seq_len={T} takes "
                     f"{T + 1:,}; use a larger fraction, more text, a shorter seq_len, or validation_fraction=0 for "
                     "no validation"]


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
