"""Packs generated answers, each after its prompt, into rows of batches; computes the advantages of their rewards.

Everything is a function of the answers and the settings, so that all processes make the same batch. A prompt and its
answer are one segment. The generated tokens, including the end token, are the targets.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshtrain.data.documents.contracts import Batch
from meshtrain.names import NO_TARGET

EPSILON = 1e-4              # added to deviations, as in TRL
LEFT_OUT = -1               # row number of an answer that is not in the batch
OF_TOKENS = ("advantage", "sampled", "old", "reference")


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnAnswer:
    """One generated answer. prompt, tokens: ids; the prompt has at least one. sampled: float32, the sampler's
    log-probability of each token.

    learned: false if the answer has no reward, or was truncated and truncated answers are masked. The answer is then
    not computed, and no divisor counts it. old, reference: like `sampled`, of the trainer and of the reference model;
    None: not known yet, zeros are used.
    """
    prompt: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    advantage: float
    learned: bool = True
    old: np.ndarray | None = None
    reference: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Number of positions in a row. The last token is only a target."""
        return len(self.prompt) + len(self.tokens) - 1


def advantages(rewards_PN: np.ndarray, how: str) -> np.ndarray:
    """Return the advantages, float64 [prompts, samples], by `rl.advantage`. NaN means no reward: it does not count in
    the baseline, and its advantage is 0.

    All advantages of a group are 0 if it has fewer than 2 rewards, or bitwise equal ones. Deviations are unbiased.
    """
    have = ~np.isnan(rewards_PN)
    count = have.sum(1, keepdims=True)
    rewards = np.where(have, rewards_PN, 0.0)
    mean = rewards.sum(1, keepdims=True) / np.maximum(count, 1)
    first = np.take_along_axis(rewards_PN, have.argmax(1)[:, None], 1)
    differ = (have & (rewards_PN != first)).any(1, keepdims=True)
    centred = np.where(have & differ, rewards - mean, 0.0)
    if how == "group":
        return centred
    if how == "loo":
        return centred * count / np.maximum(count - 1, 1)
    if how == "group_std":
        return centred / (np.sqrt((centred**2).sum(1, keepdims=True) / np.maximum(count - 1, 1)) + EPSILON)
    assert how == "batch_std", how
    every = rewards_PN[have]
    return centred / ((every.std(ddof=1) if len(every) > 1 else 0.0) + EPSILON)


def count_needed_rows(answers: int, longest: int, seq_len: int) -> int:
    """Return a number of rows that suffices for `answers` answers of at most `longest` positions, see `DrawnAnswer`.

    First-fit puts seq_len // longest answers or more into all rows but the last. Raises: ValueError if one is too long.
    """
    if longest > seq_len:
        raise ValueError(f"data.seq_len={seq_len} does not hold a prompt with its answer, up to {longest} tokens; use "
                         f"{longest} or more, or a smaller rl.max_tokens")
    return -(-answers // (seq_len // longest))


def pack(answers: Sequence[DrawnAnswer], rl, rows: int, seq_len: int, first: int) -> tuple[Batch, np.ndarray]:
    """Return (batch of the objective "rl" [rows, seq_len], int64 [answers, 2]: row and position of each answer's first
    target; LEFT_OUT: the answer is not in the batch).

    Answers are sorted by falling length, equal lengths by number. Each is put into the first row that has room. Left
    out are answers that are not learned, are empty, or have advantage 0 while rl.kl and rl.entropy are 0. rl: the
    section [rl]. first: number of the first row in the run. Raises: ValueError if the answers do not fit.
    """
    places = np.full((len(answers), 2), LEFT_OUT, np.int64)
    else_learned = rl.kl > 0 or rl.entropy > 0
    computed = [i for i, answer in enumerate(answers)
                if answer.learned and len(answer.tokens) and (answer.advantage or else_learned)]
    free, segment = np.full(rows, seq_len), np.zeros(rows, np.int64)
    shape = rows, seq_len
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
    batch |= {"targets": np.full(shape, NO_TARGET, np.int32)}
    batch |= {name: np.zeros(shape, np.float32) for name in ("weight", *OF_TOKENS)}
    weights = _weights(answers, rl, sum(len(answers[i].tokens) for i in computed))
    for i in sorted(computed, key=lambda i: (-answers[i].length, i)):
        answer = answers[i]
        fits = free >= answer.length
        if not fits.any():
            raise ValueError(f"{len(computed)} answers of {sum(answers[i].length for i in computed)} tokens, the "
                             f"longest of {max(answers[i].length for i in computed)}, do not fit in {rows} rows of "
                             f"data.seq_len={seq_len}; use a larger data.global_batch")
        row = int(fits.argmax())
        begin = seq_len - free[row]
        free[row] -= answer.length
        segment[row] += 1
        _write(batch, row, begin, segment[row], answer, weights[i])
        places[i] = row, begin + len(answer.prompt) - 1
    assert np.sum(batch["targets"] != NO_TARGET) == sum(len(answers[i].tokens) for i in computed)
    every = np.arange(seq_len)
    for row in range(rows):
        batch["positions"][row, seq_len - free[row]:] = every[:free[row]]
    batch["index"] = np.tile(every.astype(np.int32), (rows, 1))
    batch["sequence"] = ((first + np.arange(rows)) % 2**31).astype(np.int32)
    return batch, places


def _weights(answers: Sequence[DrawnAnswer], rl, targets: int) -> np.ndarray:
    """Return float64 [answers]: the weight of each token of an answer by `rl.aggregate`, times the step's `targets`."""
    lengths = np.array([len(answer.tokens) for answer in answers], np.float64)
    learned = np.array([answer.learned for answer in answers], bool)
    divisor = {"token": np.full(len(answers), lengths[learned].sum()),
               "sequence": learned.sum() * lengths,
               "constant": np.full(len(answers), float(learned.sum() * rl.max_tokens))}[rl.aggregate]
    return targets / np.maximum(divisor, 1)


def _write(batch: Batch, row: int, begin: int, segment: int, answer: DrawnAnswer, weight: float) -> None:
    ids, place = np.concatenate([answer.prompt, answer.tokens]), slice(begin, begin + answer.length)
    batch["tokens"][row, place], batch["segments"][row, place] = ids[:-1], segment
    batch["positions"][row, place] = np.arange(answer.length)
    drawn = slice(begin + len(answer.prompt) - 1, begin + answer.length)
    batch["targets"][row, drawn], batch["weight"][row, drawn] = answer.tokens, weight
    for name in OF_TOKENS:
        value = getattr(answer, name)
        batch[name][row, drawn] = 0.0 if value is None else value
