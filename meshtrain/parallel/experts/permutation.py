"""Sorts (token, expert) pairs by expert into fixed-size buffers for grouped matmuls.

With a balanced load, one buffer holds all pairs. Overflow is processed in further rounds, so no token is dropped. Rows
are taken from tokens and summed back with gathers only, which is deterministic. This module knows no matrices and no
mesh.

Dims: A tokens, K experts of a token, e experts of this device, R rows.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.kernels import grouped


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """The rows of a device's experts in one round.

    assignment_R: token · K + k of each row, or -1. row_AK: the row of each assignment, or -1.
    """
    groups: grouped.Groups
    assignment_R: jax.Array
    row_AK: jax.Array

    def token(self, num_choices: int):
        """Return [R]: the token of each row, or -1."""
        return jnp.where(self.assignment_R >= 0, self.assignment_R // num_choices, -1)

    def weight(self, weight_AK):
        return jnp.where(self.assignment_R >= 0, weight_AK.reshape(-1)[jnp.maximum(self.assignment_R, 0)], 0.0)[:, None]

    def sum(self, y_RD, dtype):
        """Sum each token's rows in the order of its choices, in float32. The result is deterministic.

        For a missing row, row 0 is read and multiplied by zero, so row 0 must always have finite values. A sum over [A,
        K, D] takes twice as long on CPUs.
        """
        here_KA, row_KA = self.row_AK.T >= 0, jnp.maximum(self.row_AK.T, 0)
        return sum(y_RD[row].astype(jnp.float32) * here[:, None] for row, here in zip(row_KA, here_KA)).astype(dtype)


class SortedAssignments:
    """All (token, expert) assignments, sorted by this device's experts. Assignments to other devices come last.

    `round(n)` is the n-th buffer.
    """

    def __init__(self, chosen_AK, first, e: int, num_experts: int, capacity_factor: float, block: Callable):
        """Sort the assignments.

        first: the number of this device's first expert. e: the number of its experts. capacity_factor: rows of the
        buffer divided by the balanced load; 0: the buffer has the maximum possible number of rows. block:
        `GroupedEngine.block`.
        """
        A, K = chosen_AK.shape
        local = chosen_AK.reshape(-1) - first
        key = jnp.where((local >= 0) & (local < e), local, e)
        order = sort_by(key, e)
        # The inverse permutation; the scatter writes every place once.
        numbers = jnp.arange(A * K, dtype=jnp.int32)
        self.place_AK = jnp.zeros(A * K, jnp.int32).at[order].set(numbers, unique_indices=True).reshape(A, K)
        self.order, self.sizes = order, jnp.sum(key[:, None] == jnp.arange(e), 0, dtype=jnp.int32)
        most = A * min(K, e)
        # At least K rows: a few tokens may all choose the same experts. Each of these tokens must not take a round.
        wanted = max(K, math.ceil(capacity_factor * (A * K * e // num_experts)))
        self.rows = min(most, wanted) if capacity_factor else most
        self.block = block(self.rows, e)
        self.num_blocks = -(-self.rows // self.block) + e
        self.one_round = self.rows >= most

    def round(self, n) -> ExpertRows:
        start, ends = n * self.rows, jnp.cumsum(self.sizes)
        low, high = (jnp.clip(edge - start, 0, self.rows) for edge in (ends - self.sizes, ends))
        groups = grouped.groups_of(high - low, self.num_blocks, self.block)
        at = jnp.arange(self.num_blocks * self.block)
        owner = groups.owner[at // self.block]
        within = at - groups.first[owner] * self.block
        used = (at // self.block < groups.count[0]) & (within < (high - low)[owner])
        assignment_R = jnp.where(used, self.order[jnp.where(used, low[owner] + within + start, 0)], -1)
        place = self.place_AK - start
        here = (place >= 0) & (place < self.rows) & (self.place_AK < ends[-1])
        group = jnp.minimum(jnp.sum(high[None, None] <= place[..., None], -1), len(self.sizes) - 1)
        return ExpertRows(groups, assignment_R,
                          jnp.where(here, groups.first[group] * self.block + place - low[group], -1))

    def has_more(self, number):
        """Return whether round `number` has rows."""
        return number * self.rows < self.sizes.sum()


def sort_by(key, e: int):
    """Return the permutation that sorts the keys 0 … e, stably.

    Key and index are packed into one 32-bit number if they fit.
    """
    n = key.shape[0]
    bits = max(1, (n - 1).bit_length())
    index = jnp.arange(n, dtype=jnp.uint32)
    if bits + e.bit_length() > 32:
        return lax.sort((key, index.astype(jnp.int32)), num_keys=1, is_stable=True)[1]
    return (lax.sort((key.astype(jnp.uint32) << bits) | index) & jnp.uint32((1 << bits) - 1)).astype(jnp.int32)
