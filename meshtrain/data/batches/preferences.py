"""Preference pairs as batches: a sequence holds the prompt with the chosen answer, then with the rejected one.

The token cache stores them as documents 2i (chosen) and 2i + 1 (rejected), both complete (contracts.py); only answers
are targets. Batch n is a function of (seed, n): epochs of all fitting pairs, each freshly shuffled. A pair longer than
a sequence is dropped, because truncated answers are not comparable.
"""
from __future__ import annotations

import dataclasses
import functools

import numpy as np

from meshtrain.data import sources
from meshtrain.data.batches import order
from meshtrain.data.documents.contracts import Batch, Rows, Source
from meshtrain.names import CHOSEN, NO_TARGET, REJECTED

ORDER, HELD = 5, 6      # seed tags: epoch, hold-out


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Batches (contracts.py) of pairs, with the array `reference` [B] float32.

    pairs: int64, numbers of the training pairs. references: pair number -> the reference model's preference for the
    chosen answer; None: not known yet, zeros are used.
    """
    source: Source
    pairs: np.ndarray
    validation: tuple[PairValidation, ...]
    seed: int
    seq_len: int
    global_batch: int
    references: np.ndarray | None = None

    def batch(self, n: int, rows: Rows = None) -> Batch:
        if n < 0:
            raise IndexError(f"batch {n}: batches are counted from 0")
        numbers = n * self.global_batch + np.arange(self.global_batch)
        epochs, places = np.divmod(numbers, len(self.pairs))
        pairs = np.array([self._order(epoch)[place] for epoch, place in zip(epochs.tolist(), places.tolist())])
        return _rows(self, n, self.pairs[pairs], rows)

    def tokens(self, batches: int) -> int:
        return batches * self.global_batch * self.seq_len

    def position(self, batches: int) -> dict:
        return {"batches": batches, "packing": "pairs", "pairs": len(self.pairs), "global_batch": self.global_batch,
                "seq_len": self.seq_len}

    @property
    def all_pairs(self) -> np.ndarray:
        """Numbers of the training pairs, then of the held-out pairs."""
        return np.concatenate([self.pairs, *(held.pairs for held in self.validation)])

    def with_references(self, references: np.ndarray) -> Pairs:
        """Return these batches with references, by pair number."""
        held = tuple(dataclasses.replace(validation, references=references) for validation in self.validation)
        return dataclasses.replace(self, references=references, validation=held)

    @functools.lru_cache(maxsize=4)
    def _order(self, epoch: int) -> np.ndarray:
        return order.permutation(len(self.pairs), self.seed, ORDER, epoch)


@dataclasses.dataclass(frozen=True, eq=False)
class PairValidation:
    """A ValidationSet (contracts.py) of pairs."""
    source: Source
    pairs: np.ndarray
    seq_len: int
    global_batch: int
    references: np.ndarray | None = None
    name: str = ""
    weight: float = 1.0

    @property
    def num_batches(self) -> int:
        return -(-len(self.pairs) // self.global_batch)

    def batch(self, i: int, rows: Rows = None) -> Batch:
        if not 0 <= i < self.num_batches:
            raise IndexError(f"validation batch {i} of {self.num_batches}")
        pairs = self.pairs[i * self.global_batch:(i + 1) * self.global_batch]
        return _rows(self, i, np.append(pairs, np.full(self.global_batch - len(pairs), -1)), rows)


def open_pairs(data, corpus: sources.Corpus, seed: int, position: dict | None = None) -> Pairs:
    """Return the corpus of data.source = "preferences" as batches. position: the data position of the previous run, or
    None. Raises: ValueError if no pair fits, or if the previous run had other batches."""
    (source,) = corpus.sources
    fitting, shortest = _fitting(source, data.seq_len)
    if not len(fitting):
        raise ValueError(f"data.seq_len={data.seq_len} is too short for each of the {source.num_documents // 2} pairs; "
                         f"the shortest takes {shortest} tokens (both answers, each after its prompt); use more")
    held = np.zeros(0, np.int64)
    if data.validation_fraction and len(fitting) > 1:
        count = max(1, int(len(fitting) * data.validation_fraction))
        drawn = order.permutation(len(fitting), HELD)
        held, fitting = np.sort(fitting[drawn[:count]]), np.sort(fitting[drawn[count:]])
    now = Pairs(source, fitting, (PairValidation(source, held, data.seq_len, data.global_batch),) if len(held) else (),
                seed, data.seq_len, data.global_batch)
    for key, name in (("pairs", "the pairs that fit"), ("global_batch", "data.global_batch"),
                      ("seq_len", "data.seq_len")):
        if position is not None and position.get(key) != now.position(0)[key]:
            raise ValueError(f"{name} was {position.get(key)} and is {now.position(0)[key]}, but must stay the same "
                             "with preferences; use the old value, or another run.name with checkpoint.init_from")
    return now


def notes(data, corpus: sources.Corpus) -> list[str]:
    """Return messages about dropped pairs, to print before training."""
    (source,) = corpus.sources
    count = source.num_documents // 2 - len(_fitting(source, data.seq_len)[0])
    return ([f"{count} of {source.num_documents // 2} pairs are longer than data.seq_len={data.seq_len} and left out"]
            if count else [])


def _fitting(source: Source, seq_len: int) -> tuple[np.ndarray, int]:
    """Return (numbers of the pairs that fit, tokens of the shortest pair)."""
    # a complete document's first token replaces the separator
    lengths = order.lengths(source).reshape(-1, 2).sum(1)
    return np.flatnonzero(lengths <= seq_len), int(lengths.min())


def _rows(of: Pairs | PairValidation, n: int, pairs: np.ndarray, rows: Rows) -> Batch:
    """Return these rows of batch n. pairs: pair numbers; -1: padding."""
    T, every = of.seq_len, np.arange(of.global_batch)
    chosen = every if rows is None else every[rows if isinstance(rows, slice) else np.asarray(rows, np.int64)]
    shape = len(chosen), T
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    targets, reference = np.full(shape, NO_TARGET, np.int32), np.zeros(len(chosen), np.float32)
    for row, pair in enumerate(pairs[chosen].tolist()):
        begin = 0
        for segment, document in ((CHOSEN, 2 * pair), (REJECTED, 2 * pair + 1)) if pair >= 0 else ():
            length = int(order.lengths(of.source, np.array([document]))[0])
            ids, learn = of.source.read(document, -1, length), of.source.mask(document, -1, length)
            place = slice(begin, begin + length)
            tokens[row, place], segments[row, place], positions[row, place] = ids[:-1], segment, np.arange(length)
            targets[row, place] = ids[1:] if learn is None else np.where(learn[1:], ids[1:].astype(np.int32), NO_TARGET)
            begin += length
        positions[row, begin:] = np.arange(T - begin)
        if pair >= 0 and of.references is not None:
            reference[row] = of.references[pair]
    index = np.tile(np.arange(T, dtype=np.int32), (len(chosen), 1))
    sequence = ((n * of.global_batch + chosen) % 2**31).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions,
            "index": index, "sequence": sequence, "reference": reference}
