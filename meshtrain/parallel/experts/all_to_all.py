"""Token dispatch by all-to-alls of fixed size. Overflow is sent in further rounds, so no token is dropped.

Each device sends each other device a buffer of CAPACITY_FACTOR times the balanced load. A round moves
CAPACITY_FACTOR·K·T·D·(n-1)/n elements each way. This is less than an all-gather if there are more than
CAPACITY_FACTOR·K shards. All devices run as many rounds as the pair with the most tokens needs.

Sources: arXiv:2006.16668 (GShard), which drops overflow. XLA's ragged all-to-all is slow or wrong on GPUs (openxla/xla
33386, marin 8077).
"""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from meshtrain.parallel.experts.permutation import sort_by

CAPACITY_FACTOR = 1.25


class AllToAll:
    """The assignments of this device's tokens, sorted by the device of their expert.

    axes: the mesh axes that split the experts into num_shards shards of e experts each.
    """

    def __init__(self, axes: tuple[str, ...], num_shards: int, e: int, chosen_TK):
        self.axes, self.num_shards, self.one_round = axes, num_shards, False
        (self.T, self.K), self.chosen = chosen_TK.shape, chosen_TK.reshape(-1)
        count = self.chosen.size
        # padding has no expert: its device is num_shards
        self.device = jnp.where(self.chosen >= 0, self.chosen // e, num_shards)
        self.order = sort_by(self.device, num_shards)
        self.counts = jnp.sum(self.device[:, None] == jnp.arange(num_shards), 0, dtype=jnp.int32)
        self.first = jnp.cumsum(self.counts) - self.counts
        place = jnp.zeros(count, jnp.int32).at[self.order].set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)
        # the rank among the assignments to the same device
        self.rank = place - self.first[jnp.minimum(self.device, num_shards - 1)]
        self.capacity = max(1, min(count, -(-int(CAPACITY_FACTOR * count) // num_shards)))
        # the share of the buffer that a balanced load fills
        self.occupancy = count / (num_shards * self.capacity)
        self.rounds = lax.pmax(-(-self.counts.max() // self.capacity), axes)

    def round(self, n) -> Round:
        return Round(self, n)

    def has_more(self, number):
        """Return whether any device sends rows in round `number`."""
        return number < self.rounds


class Round:
    """One round of S = n · capacity rows each way, for n shards. A row without an assignment is zero."""

    def __init__(self, of: AllToAll, n):
        rank = jnp.arange(of.capacity)[None] + n * of.capacity
        self.of, self.used = of, (rank < of.counts[:, None]).reshape(-1)
        self.assignment = of.order[jnp.where(self.used, (of.first[:, None] + rank).reshape(-1), 0)]
        in_round = (of.rank // of.capacity == n) & (of.device < of.num_shards)
        self.in_round_TK = in_round.reshape(of.T, of.K)
        self.row_TK = jnp.where(in_round, of.device * of.capacity + of.rank % of.capacity, 0).reshape(of.T, of.K)

    def _swap(self, a):
        return lax.all_to_all(a, self.of.axes, 0, 0, tiled=True)

    def send(self, a_TD):
        """Send the token of each assignment to its expert's device: [T, D] -> [S, D]."""
        return self._swap(a_TD[self.assignment // self.of.K] * self.used[:, None].astype(a_TD.dtype))

    def send_chosen(self):
        """Return [S, 1]: the expert of each received row; -1 if the row has no assignment."""
        return self._swap(jnp.where(self.used, self.of.chosen[self.assignment], -1)[:, None])

    def weight(self, weight_TK):
        return self._swap(jnp.where(self.used, weight_TK.reshape(-1)[self.assignment], 0.0)[:, None])

    def send_back(self, a_SD):
        """Send the rows back to the devices of their tokens: [S, D] -> float32 [T, K, D]."""
        return self._swap(a_SD)[self.row_TK].astype(jnp.float32) * self.in_round_TK[..., None].astype(jnp.float32)
