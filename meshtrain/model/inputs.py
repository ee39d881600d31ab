"""Per-batch inputs of every layer besides the residual stream: segment ids, positions, rotary tables, dropout key."""
from __future__ import annotations

from typing import NamedTuple

import jax

from meshtrain.model import parts


class Inputs(NamedTuple):
    """Inputs of every layer besides the residual stream. Not differentiated."""
    # document ids; attention stays within one. PADDING goes to no expert
    segments_BT: jax.Array
    index_BT: jax.Array                          # index in the sequence, for dropout
    sequence_B: jax.Array                        # global sequence number, for dropout
    rope: tuple[jax.Array, jax.Array] | None     # cos, sin [B, T, H/2]
    dropout_key: jax.Array | None
    local_rope: tuple[jax.Array, jax.Array] | None = None    # of sliding-window layers, if they differ

    def turned(self) -> Inputs:
        """For activations [T, B, D]: segments stay [B, T], for attention, which takes rows; without dropout."""
        return self._replace(rope=parts.turned(self.rope), local_rope=parts.turned(self.local_rope))

    def cut(self, shards: int, count: int) -> list[Inputs]:
        """Split the rows as `parts.cut` does."""
        pieces = jax.tree.map(lambda a: parts.cut(a, shards, count), self._replace(dropout_key=None))
        whole = jax.tree.structure(self._replace(dropout_key=None))
        return [part._replace(dropout_key=self.dropout_key)
                for part in jax.tree.transpose(whole, jax.tree.structure([0] * count), pieces)]
