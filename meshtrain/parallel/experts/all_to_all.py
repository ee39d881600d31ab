"""Tokens sent to their experts' devices one by one, by all-to-alls of fixed size; what does not fit goes in further
rounds.

Each device sends each other one room for CAPACITY times an even share of its assignments, so a round moves
CAPACITY·K·T·D·(n-1)/n elements each way: less than `expert`'s gather from n = CAPACITY·K shards on. Rounds go on until
the fullest pair of devices is empty; their number is the same on all devices that exchange, and nothing is dropped.
Sources: arXiv:2006.16668 (GShard) has the exchange, and drops what does not fit;
XLA's ragged all-to-all is slow or wrong on GPUs (openxla/xla 33386, marin 8077).
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.names import FURTHER_ROUNDS

CAPACITY = 1.25


class Exchange:
    """The assignments of this device's tokens, by the device that has their expert. axes: that split the experts into n
    shards, e each."""

    def __init__(self, axes: tuple[str, ...], num_shards: int, e: int, chosen_TK, sorted_by: Callable):
        self.axes, self.num_shards, (self.T,
                                     self.K), self.chosen = axes, num_shards, chosen_TK.shape, chosen_TK.reshape(-1)
        count = self.chosen.size
        # of padding, which has no expert, none
        self.device = jnp.where(self.chosen >= 0, self.chosen // e, num_shards)
        self.order = sorted_by(self.device, num_shards)
        self.counts = jnp.sum(self.device[:, None] == jnp.arange(num_shards), 0, dtype=jnp.int32)
        self.first = jnp.cumsum(self.counts) - self.counts
        place = jnp.zeros(count, jnp.int32).at[self.order].set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)
        self.rank = place - self.first[jnp.minimum(self.device, num_shards - 1)]      # among those for the same device
        self.room = max(1, min(count, -(-int(CAPACITY * count) // num_shards)))
        self.filled = count / (num_shards * self.room)                # of the rooms, where experts are equally busy
        self.rounds = lax.pmax(-(-self.counts.max() // self.room), axes)

    def round(self, n) -> Round:
        return Round(self, n)

    def further(self, one_round: Callable, first):
        """first + the sum of one_round(round) over the rounds behind the first."""
        step = lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], one_round(self.round(carry[0]))))
        with jax.named_scope(FURTHER_ROUNDS):
            return lax.while_loop(lambda carry: carry[0] < self.rounds, step, (jnp.int32(1), first))[1]


class Round:
    """One round: what travels, S = n · room rows each way, in which a row without an assignment is zero."""

    def __init__(self, of: Exchange, n):
        rank = jnp.arange(of.room)[None] + n * of.room
        self.of, self.here = of, (rank < of.counts[:, None]).reshape(-1)
        self.assignment = of.order[jnp.where(self.here, (of.first[:, None] + rank).reshape(-1), 0)]
        mine = (of.rank // of.room == n) & (of.device < of.num_shards)
        self.mine_TK = mine.reshape(of.T, of.K)
        self.row_TK = jnp.where(mine, of.device * of.room + of.rank % of.room, 0).reshape(of.T, of.K)

    def _swap(self, a):
        return lax.all_to_all(a, self.of.axes, 0, 0, tiled=True)

    def send(self, a_TD):
        """What the tokens have, at their experts' devices [S, D]."""
        return self._swap(a_TD[self.assignment // self.of.K] * self.here[:, None].astype(a_TD.dtype))

    def chosen(self):
        """The experts' numbers [S, 1]; -1 of a row without an assignment."""
        return self._swap(jnp.where(self.here, self.of.chosen[self.assignment], -1)[:, None])

    def weight(self, weight_TK):
        return self._swap(jnp.where(self.here, weight_TK.reshape(-1)[self.assignment], 0.0)[:, None])

    def back(self, a_SD):
        """[S, D] -> float32 [T, K, D] at the tokens' devices."""
        return self._swap(a_SD)[self.row_TK].astype(jnp.float32) * self.mine_TK[..., None].astype(jnp.float32)
