"""Batches of packed documents. Batch n is a function of (seed, n) alone, not of hosts, mesh or restarts.

A source's documents, each after a separator (BOS), are concatenated in endless shuffled epochs (order.py) and cut into
sequences of T tokens. Every token is an input once per epoch; an epoch's incomplete last sequence continues in the
next. The target of a document's last token is its end (EOS; by default the separator), with or without the document
mask, so that the model learns to stop. With packing "whole" (whole.py), no document is cut and sequences are padded.

With a mixture, each batch takes tokens from every source in exact proportion to its weight (mixture.py). If documents
are about as long as a sequence or longer, it takes whole sequences. Otherwise the share is exact to about two tokens;
the sequence at a batch's end then continues in the next batch, and its documents are cut there.

A restart needs only n. With other weights, seq_len or global_batch it also needs the previous run's `position`, the
tokens that each source has given. The order continues there, so that no token is lost or repeated. This module knows no
devices: a host requests its rows of the global batch.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from fractions import Fraction

import numpy as np

from meshtrain.data import sources
from meshtrain.data.batches import holdout, mixture, order, whole
from meshtrain.data.batches.order import Grid, Pieces, Runs, TokenStream
from meshtrain.data.batches.whole import WholeStream
from meshtrain.data.documents.contracts import Batch, Rows, Source, run_length
from meshtrain.names import NO_TARGET


@dataclasses.dataclass(frozen=True)
class Packing:
    """How documents become batches.

    eos: the target after a document's last token. document_mask: False makes a row one segment with consecutive
    positions. packing: "stream", or "whole": no document is cut, and seq_len cannot change. validation_fraction: share
    of each source's tokens to hold out.
    """
    bos: int
    seq_len: int
    global_batch: int
    seed: int
    eos: int
    document_mask: bool = True
    packing: str = "stream"
    validation_fraction: float = 0.0


@dataclasses.dataclass(frozen=True)
class DataPhase:
    """A part of a run with one batch shape and mixture. The phase begins at batch `batches`, after each source has
    given `tokens` tokens."""
    batches: int
    tokens: tuple[int, ...]
    weights: tuple[int, ...]
    seq_len: int
    global_batch: int


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """Batches (contracts.py) of packed documents."""
    train: tuple[TokenStream | WholeStream, ...]
    validation: tuple[PackedValidation, ...]
    shape: Packing
    phase: DataPhase
    quantum: int            # tokens; training shares are multiples of it

    def batch(self, n: int, rows: Rows = None) -> Batch:
        if n < self.phase.batches:
            raise IndexError(f"batch {n}: " + ("batches are counted from 0" if n < 0 else
                             f"these data settings apply from batch {self.phase.batches} on"))
        runs = mixture.lay_rows(self.shape.seq_len, [stream.grids for stream in self.train],
                                self._count_given(n), self._count_given(n + 1))
        return _assemble(self.shape, self.train, n, runs, rows)

    def tokens(self, batches: int) -> int:
        return sum(self._count_given(batches))

    def position(self, batches: int) -> dict:
        """Return the tokens that each source has given, the source's further grids, and the phase. From this position,
        a resumed run with the same settings gets exactly the same batches. `pack` reads the position."""
        given = self._count_given(batches)
        return {"batches": batches, "phase": dataclasses.asdict(self.phase), "packing": self.shape.packing,
                "sources": [{"tokens": tokens, "tokens_per_epoch": stream.tokens_per_epoch,
                             "grids": [list(grid) for grid in stream.grids]}
                             for stream, tokens in zip(self.train, given)]}

    def _count_given(self, batches: int) -> list[int]:
        """Return the tokens of each source in the first `batches` batches."""
        phase = self.phase
        tokens = (batches - phase.batches) * self.shape.global_batch * self.shape.seq_len
        return [a + b for a, b in zip(phase.tokens, mixture.shares(phase.weights, tokens, self.quantum))]


@dataclasses.dataclass(frozen=True, eq=False)
class PackedValidation:
    """A ValidationSet (contracts.py)."""
    name: str
    weight: float
    stream: TokenStream | WholeStream
    shape: Packing

    @property
    def text_bytes(self) -> int | None:
        """Bytes of the documents' text before tokenizing; None: unknown."""
        return self.stream.part.text_bytes

    @property
    def begins(self) -> bool:
        """Whether this validation set has the first tokens of its documents."""
        return self.stream.part.side != "tail"

    @property
    def of_conversations(self) -> bool:
        return getattr(self.stream.part.source, "complete", False)

    @property
    def num_batches(self) -> int:
        return -(-self.stream.positions_per_epoch // (self.shape.seq_len * self.shape.global_batch))

    def batch(self, i: int, rows: Rows = None) -> Batch:
        if not 0 <= i < self.num_batches:
            raise IndexError(f"validation batch {i} of {self.num_batches}")
        size = self.shape.seq_len * self.shape.global_batch
        real = min(size, self.stream.positions_per_epoch - i * size)
        runs = mixture.lay_rows(self.shape.seq_len, [self.stream.grids], [i * size], [i * size + real])
        return _assemble(self.shape, (self.stream,), i, runs, rows)


def open_batches(data, corpus: sources.Corpus, seed: int, position: dict | None = None) -> Packed:
    """Return the run file's [data] as batches. position, errors: as in `pack`."""
    return pack(corpus.sources, corpus.weights, _shape(data, corpus, seed), corpus.names, corpus.validation,
                corpus.curves, position)


def open_whole(data, corpus: sources.Corpus, seed: int) -> tuple[PackedValidation, ...]:
    """Return validation sets of all documents of the run file's [data]: the sets that [data] names, or else one set for
    each source.

    Unlike in `open_batches`, nothing is trained on, so a source may be shorter than one sequence. Raises: ValueError if
    a source has no target.
    """
    shape = dataclasses.replace(_shape(data, corpus, seed), validation_fraction=0.0)
    parts = [(one.name, one.weight, one.source) for one in corpus.curves] or [
        *zip(corpus.names, corpus.weights, corpus.sources, strict=True)]
    kind = TokenStream if shape.packing == "stream" else WholeStream
    streams = [kind(order.whole(source), None, i, (Grid(0, shape.seq_len, None),))
               for i, (_, _, source) in enumerate(parts)]
    total = sum(weight for _, weight, _ in parts)
    sets = tuple(PackedValidation(name, weight / total, stream, shape)
                 for (name, weight, _), stream in zip(parts, streams, strict=True))
    for one in sets:
        if not one.stream.positions_per_epoch:
            raise ValueError(f"the documents{one.name and ' of '}{one.name} have no token to predict; give documents "
                             f"with text")
    return sets


def _shape(data, corpus: sources.Corpus, seed: int) -> Packing:
    same = {name: getattr(data, name) for name in ("seq_len", "global_batch", "document_mask",
                                                   "packing", "validation_fraction")}
    return Packing(corpus.tokenizer.bos, seed=seed, eos=corpus.eos, **same)


def pack(corpus: Sequence[Source], weights: Sequence[float], shape: Packing, names: Sequence[str],
         validation: Sequence[Source | None] = (), curves: Sequence[sources.ValidationSource] = (),
         position: dict | None = None) -> Packed:
    """Return the batches of sources that are mixed in the proportions of `weights` (shares of tokens; positive, any
    sum).

    names: the names of the sources. validation: a validation source for each source, used instead of held-out
    documents. curves: validation sets that are used instead of both. position: `Packed.position(n)` of the previous
    run. With equal settings all batches are bit-identical. Weights, seq_len and global_batch may differ: every source
    then continues after its last token, and the sequences of its current chunk (order.CHUNK_TOKENS) keep their order,
    but are cut at the new row ends.

    Raises: ValueError if a source is too short for its share of one batch, if its held-out part is too short for one
    sequence, or if the position belongs to other data.
    """
    if curves:
        shape = dataclasses.replace(shape, validation_fraction=0.0)
    seq_len, cut = shape.seq_len, shape.packing == "stream"
    assert len(corpus) == len(weights) > 0
    shares, grids = mixture.whole_weights(weights), (Grid(0, seq_len, None),)
    separate = list(validation) or [None] * len(corpus)
    kind = TokenStream if cut else WholeStream
    parts = [(order.whole(source), order.whole(other)) if other is not None
             else holdout.split(source, shape.validation_fraction, _may_cut(source, cut, seq_len))
             for source, other in zip(corpus, separate)]
    streams = tuple(kind(train, shape.seed, i, grids) for i, (train, _) in enumerate(parts))
    held = tuple(kind(part, None, i, grids) for i, (_, part) in enumerate(parts)) \
        if shape.validation_fraction or any(separate) else ()
    curve_streams = [(curve.name, curve.weight, kind(order.whole(curve.source), None, i, grids))
                     for i, curve in enumerate(curves)]
    faults = (_check_lengths if cut else _check_whole)(shape, shares, streams, held)
    faults += [f"data.validation_sources[{i}] holds {stream.tokens_per_epoch:,} tokens, but one sequence of "
               f"data.seq_len={seq_len} takes {seq_len:,}; use more text or a shorter seq_len"
               for i, (*_, stream) in enumerate(curve_streams) if stream.tokens_per_epoch < seq_len]
    if faults:
        raise ValueError("\n".join(faults))
    # A lower bound of the longest document's tokens; exact if runs are single documents.
    longest = max(int(stream.part.tokens.max()) // run_length(stream.part.source.num_documents) for stream in streams)
    # Whole sequences, so that no batch cuts one, unless that is coarser than the documents.
    quantum = seq_len if not cut or len(corpus) > 1 and mixture.deviation(shares) * seq_len <= longest else 1
    phase = DataPhase(0, (0,) * len(corpus), shares, seq_len, shape.global_batch)
    if position is not None:
        streams, phase = _continue_streams(streams, phase, position, shape.packing)
    curve_streams = curve_streams or list(zip(names, shares, held))
    total = sum(weight for _, weight, _ in curve_streams)
    sets = tuple(PackedValidation(name, weight / total, stream, shape) for name, weight, stream in curve_streams)
    return Packed(streams, sets, shape, phase, quantum)


def _may_cut(source: Source, stream: bool, seq_len: int) -> bool:
    """Return whether documents may give their tails to validation. Conversations may not; with packing "whole" only
    long documents may."""
    return not getattr(source, "complete", False) and (
        stream or int(source.totals.sum()) > seq_len * source.num_documents)


def _continue_streams(streams: Sequence[TokenStream | WholeStream], wanted: DataPhase, position: dict,
                      packing: str) -> tuple[tuple[TokenStream | WholeStream, ...], DataPhase]:
    """Return (streams, phase) that continue from a position. Raises: ValueError if it belongs to other data or packing.
    """
    old_packing = position.get("packing", "stream")
    if old_packing != packing:
        raise ValueError(f'data.packing="{packing}", but the checkpoint was trained with "{old_packing}"; use '
                         f'"{old_packing}", or a new run.dir with checkpoint.init_from')
    if packing == "whole" and position["phase"]["seq_len"] != wanted.seq_len:
        raise ValueError(f'data.seq_len={wanted.seq_len}, but the checkpoint was trained with '
                         f'{position["phase"]["seq_len"]}, which cannot change with data.packing="whole"; use the old '
                         'value, or a new run.dir with checkpoint.init_from')
    old = [source["tokens_per_epoch"] for source in position["sources"]]
    new = [stream.tokens_per_epoch for stream in streams]
    if old != new:
        raise ValueError(f"the checkpoint was trained on sources of {old} tokens per epoch, but these have {new}; use "
                         "the files and the data.validation_fraction of the run, or a new run.dir with "
                         "checkpoint.init_from")
    grids = [tuple(Grid(*grid) for grid in source["grids"]) for source in position["sources"]]
    streams = [dataclasses.replace(stream, grids=one) for stream, one in zip(streams, grids)]
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                              for name, value in position["phase"].items()}
    phase = DataPhase(**fields)
    if dataclasses.replace(phase, batches=0, tokens=wanted.tokens) == wanted:
        return tuple(streams), phase
    tokens = tuple(source["tokens"] for source in position["sources"])
    streams = [dataclasses.replace(stream, grids=stream.regrid(at, wanted.seq_len))
               for stream, at in zip(streams, tokens)]
    return tuple(streams), dataclasses.replace(wanted, batches=position["batches"], tokens=tokens)


def _read(stream: TokenStream | WholeStream, pieces: Pieces, tokens: np.ndarray, learn: np.ndarray | None,
          shape: Packing) -> np.ndarray:
    """Read the texts of pieces into `tokens`, int32 [concatenated rows]. Return the target after each piece, int32
    [pieces].

    learn: bool array, shaped as tokens; set to false for tokens that are no targets. The target after a document is
    eos. A piece has no target after it if the rest of the document is held out, if the document's last token is no
    target, or if the document is empty (the model must not learn an end before the beginning). A complete document
    (contracts.py) contains its end.
    """
    source, complete = stream.part.source, getattr(stream.part.source, "complete", False)
    has_separator = pieces.begins & (not complete)
    tokens[pieces.line[has_separator]] = shape.bos
    count, first = pieces.count - has_separator, pieces.first - (pieces.begins & complete)
    next_target = np.full(len(pieces.line), NO_TARGET, np.int32)
    if not complete and stream.part.side != "head":
        next_target[~pieces.empty] = shape.eos
    wanted = np.flatnonzero(count + pieces.goes_on)
    table = (pieces.line + has_separator, count, pieces.goes_on, pieces.document, first)
    masks = getattr(source, "masked", False)
    for i, line, count, goes_on, document, first in zip(
            wanted.tolist(), *(column[wanted].tolist() for column in table)):
        text = source.read(document, first, first + count + goes_on)
        if goes_on:
            next_target[i] = text[count]
            tokens[line:line + count] = text[:count]
        else:
            tokens[line:line + count] = text
        mask = source.mask(document, first, first + count + goes_on) if masks else None
        if mask is not None:
            learn[line:line + count] = mask[:count]
            if not mask[-1]:
                next_target[i] = NO_TARGET
    return next_target


def _assemble(shape: Packing, streams: Sequence[TokenStream | WholeStream], n: int, runs: Sequence[Runs],
              rows: Rows) -> Batch:
    """Return these rows of batch n, from the streams' `runs`; the rest of a row is padding."""
    T, every = shape.seq_len, np.arange(shape.global_batch)
    chosen = every if rows is None else every[rows if isinstance(rows, slice) else np.asarray(rows, np.int64)]
    B = len(chosen)
    place = np.full(shape.global_batch, -1)
    place[chosen] = np.arange(B)
    assert (place >= 0).sum() == B, f"rows {rows} name a row twice"

    tokens = np.zeros((B, T), np.int32)
    learn = np.ones((B, T), bool) if any(getattr(stream.part.source, "masked", False) for stream in streams) else None
    found, after = [], []
    for stream, given in zip(streams, runs):
        row = place[given.line // T]
        here = row >= 0
        if here.any():
            found.append(stream.find(Runs(given.start[here], given.count[here], row[here] * T + given.line[here] % T)))
            after.append(_read(stream, found[-1], tokens.reshape(-1),
                               None if learn is None else learn.reshape(-1), shape))
    pieces = Pieces(*map(np.concatenate, zip(*found))) if found else Pieces(*np.zeros((7, 0), np.int64))
    targets = np.empty((B, T), np.int32)
    targets[:, :-1] = tokens[:, 1:] if learn is None else np.where(learn[:, 1:], tokens[:, 1:], NO_TARGET)
    targets.reshape(-1)[pieces.line + pieces.count - 1] = np.concatenate(after or [[]])

    index = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    real = np.bincount(pieces.line // T, pieces.count, B).astype(np.int64)      # pieces are contiguous
    if shape.document_mask:
        # a padding row has a first token, too
        line = np.sort(np.append(pieces.line, np.flatnonzero(real == 0) * T))
        column, k = line % T, np.arange(len(line))
        segment = k + 1 - np.maximum.accumulate(np.where(column == 0, k, 0))
        count = np.diff(line, append=B * T)
        segments = np.repeat(segment.astype(np.int32), count).reshape(B, T)
        positions = index - np.repeat(column.astype(np.int32), count).reshape(B, T)
    else:
        segments, positions = np.ones((B, T), np.int32), index.copy()
    if (real < T).any():
        padding = index >= real[:, None]
        segments[padding], targets[padding] = 0, NO_TARGET
    sequence = (n * shape.global_batch + chosen) % 2**31
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "index": index,
            "sequence": sequence.astype(np.int32)}


def _check_lengths(shape: Packing, weights: Sequence[int], train: Sequence[TokenStream | WholeStream],
                   held: Sequence[TokenStream | WholeStream]) -> list[str]:
    """Return errors for sources that are too short for a batch, or for the hold-out."""
    T, B, faults = shape.seq_len, shape.global_batch, []
    for i, (stream, weight) in enumerate(zip(train, weights)):
        part = Fraction(weight, sum(weights))
        has, needed = stream.tokens_per_epoch, math.ceil(part * T * B)
        if has >= needed:
            continue
        if len(train) == 1:
            fits = [f"data.global_batch ≤ {has // T}"] if has >= T else []
            fits += [f"data.seq_len ≤ {has // B}"] if has >= B else []
            faults.append(f"data.seq_len={T} × data.global_batch={B} is a batch of {needed:,} tokens, but the training "
                          f"documents hold {has:,}, less than one batch; use {' or '.join([*fits, 'more text'])}")
        else:
            faults.append(f"data.mixture[{i}] is {float(part):.3g} of the mixture, {needed:,} tokens in a batch of "
                          f"data.seq_len={T} × data.global_batch={B}, but its training documents hold {has:,}, so they "
                          f"would repeat in one batch; use a weight ≤ {has / (T * B):.2g} of the sum, a smaller "
                          f"batch or more text")
    for i, (stream, trained) in enumerate(zip(held, train)):
        if stream.tokens_per_epoch >= T:
            continue
        where = f" of data.mixture[{i}]" if len(train) > 1 else ""
        if stream.part.source is not trained.part.source:
            faults.append(f"the validation files{where} hold {stream.tokens_per_epoch:,} tokens, but one sequence of "
                          f"data.seq_len={T} takes {T:,}; use more text or a shorter seq_len")
            continue
        faults.append(f"data.validation_fraction={shape.validation_fraction} holds out {stream.tokens_per_epoch:,} of "
                      f"{stream.tokens_per_epoch + trained.tokens_per_epoch:,} tokens{where}, but one sequence of "
                      f"data.seq_len={T} takes {T:,}; use a larger fraction, more text, a "
                      "shorter seq_len, or validation_fraction=0 for no validation")
    return faults


def _check_whole(shape: Packing, weights: Sequence[int], train: Sequence[TokenStream | WholeStream],
                 held: Sequence[TokenStream | WholeStream]) -> list[str]:
    """Return errors as `_check_lengths`, counted in sequences of whole documents."""
    B, faults = shape.global_batch, []
    for i, (stream, weight) in enumerate(zip(train, weights)):
        needed = math.ceil(Fraction(weight, sum(weights)) * B)
        if not stream.has(needed):
            where = f"data.mixture[{i}]" if len(train) > 1 else "the data"
            faults.append(f'data.packing="whole" makes {stream.num_sequences} sequences of '
                          f'data.seq_len={shape.seq_len} from {where}, but '
                          f"their share of a batch of data.global_batch={B} is {needed}; use a smaller batch, a "
                          f"shorter data.seq_len or more text")
    for i, stream in enumerate(held):
        if not stream.has(1):
            where = f" of data.mixture[{i}]" if len(held) > 1 else ""
            faults.append(f"data.validation_fraction={shape.validation_fraction} holds out no document{where}; use a "
                          f"larger fraction, more documents, or validation_fraction=0 for no validation")
    return faults


def notes(data, corpus: sources.Corpus) -> list[str]:
    """Return messages about the packing of a corpus, to print before training."""
    lines = []
    for name, source in zip(corpus.names, corpus.sources) if data.packing == "whole" else ():
        where = f'data.packing="whole"{name and f", {name}"}'
        filled, of = whole.measure_filling(source, data.seq_len)
        if filled < 0.9:
            lines.append(f"{where}: sequences of data.seq_len={data.seq_len} are {filled:.0%} full (estimated from the "
                         f"first {of:,} documents), the rest is padding; longer sequences may have less padding")
        documents, tokens = whole.too_long(source, data.seq_len)
        if documents:
            lines.append(f'{where}: {documents:,} of {source.num_documents:,} documents are longer than '
                         f"data.seq_len={data.seq_len} and are truncated; {tokens:,} of their tokens are left out")
    return lines
