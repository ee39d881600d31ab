"""Decides how many tokens of a batch come from each source of a mixture, and which rows these tokens fill. The decision
is deterministic, without sampling.

Each batch takes the next tokens of every source, in the source's own order, so that the source's total stays at its
exact share. So the proportions hold in every batch, not only on average. This module knows no documents.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from meshtrain.data.batches.order import Grid, Runs


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers that have exactly the proportions of `weights`."""
    fractions = [Fraction(weight) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def shares(weights: Sequence[int], tokens: int, quantum: int = 1) -> list[int]:
    """Return the number of tokens of each source among the first `tokens` (a multiple of quantum) tokens of a mixture.
    No number falls when `tokens` grows.

    The computation uses exact integers. The heaviest source and the rest are apportioned by weight, rounded to the
    quantum; then the next heaviest and the remaining ones, and so on.
    """
    counts, left, weight_left = [0] * len(weights), tokens // quantum, sum(weights)
    for i in _heaviest_first(weights):
        weight = weight_left - weights[i]
        rest = (2 * left * weight + weight_left) // (2 * weight_left)
        counts[i], left, weight_left = (left - rest) * quantum, rest, weight
    return counts


def deviation(weights: Sequence[int]) -> Fraction:
    """Return an upper bound of |share - weight * tokens|, in quanta: 1/2 for 2 sources, and at most (1 + 1 + 1/2 + … +
    1/(k-2)) / 2 for k.

    Division t leaves the remaining sources an error of e_t+1 = W_t+1 / W_t * e_t + 1/2, e_1 = 0, and source t gets at
    most w_t / W_t * e_t + 1/2. The closed form follows from w_t <= W_s / (t - s + 1), since weights are descending.
    """
    worst, error, left = Fraction(0), Fraction(0), sum(weights)
    for i in _heaviest_first(weights):
        rest = left - weights[i]
        rounding = Fraction(1, 2) if rest else Fraction(0)    # the last takes the remainder
        worst = max(worst, Fraction(weights[i], left) * error + rounding)
        error, left = Fraction(rest, left) * error + rounding, rest
    return worst


def _heaviest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: -weights[i])


def lay_rows(seq_len: int, grids: Sequence[tuple[Grid, ...]], before: Sequence[int],
             after: Sequence[int]) -> list[Runs]:
    """Return where the tokens before[i]..after[i]-1 of each source i are placed in the rows of a batch. grids[i]: the
    grids that cut source i into sequences.

    Whole sequences take whole rows. Rows of the sources alternate evenly, so that every host and microbatch gets all
    sources. The parts of sequences that are split across batches follow, concatenated.
    """
    whole = [np.arange(-(-(max(a, last.base) - last.base) // seq_len), max(b - last.base, 0) // seq_len)
             for (*_, last), a, b in zip(grids, before, after)]
    order = np.argsort(np.concatenate([(np.arange(len(w)) + 0.5) / max(len(w), 1) for w in whole]), kind="stable")
    row = np.empty_like(order)
    row[order] = np.arange(len(order))
    ends = np.cumsum([len(w) for w in whole])
    line = len(row) * seq_len
    runs = []
    for (*_, last), cuts, a, b, numbers, rows in zip(grids, grids, before, after, whole, np.split(row, ends[:-1])):
        parts = []
        while a < b:
            if len(numbers) and a == last.base + numbers[0] * seq_len:
                a = last.base + (int(numbers[-1]) + 1) * seq_len      # after the whole ones
                continue
            grid = next(grid for grid in cuts if grid.until is None or a < grid.until)
            take = min(b - a, grid.seq_len - (a - grid.base) % grid.seq_len, seq_len - line % seq_len)
            parts.append((a, take, line))
            a, line = a + take, line + take
        parts = np.array(parts, np.int64).reshape(-1, 3).T
        runs.append(Runs(*map(np.append, (last.base + numbers * seq_len, np.full(len(rows), seq_len),
                                          rows * seq_len), parts)))
    return runs
