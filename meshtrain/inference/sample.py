"""A sample of text from the weights at hand: whole forward passes in one compiled loop, no key/value cache."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshtrain.model.layers import Execution
from meshtrain.model.transformer import Transformer


def build(model: Transformer, ex: Execution, seq_len: int, bos: int, order: np.ndarray | None = None) -> Callable:
    """A jitted (params, count, seed) -> ids [seq_len]: bos and `count` sampled tokens, of which only those are valid.

    order: which token stands at each place of a sequence, as the training step has it.
    """
    order = np.arange(seq_len) if order is None else order
    place = jnp.asarray(np.argsort(order))
    rows = ex.layout.ways(ex.layout.batch_axes)    # every batch shard computes the same row

    @jax.jit
    def sample(p, count, seed):
        p = model.as_read(ex.layout, p, ex.dtype)
        index_BT = jnp.broadcast_to(jnp.asarray(order), (rows, seq_len))
        batch = {"segments": jnp.ones_like(index_BT), "positions": index_BT, "index": index_BT,
                 "sequence": jnp.zeros(rows, jnp.int32)}

        def extend(i, tokens_BT):
            logits_BV = model.logits(ex, p, {**batch, "tokens": tokens_BT[:, order]}, place[i])
            token = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), i), logits_BV[0] / 0.8)
            return jax.lax.dynamic_update_slice(tokens_BT, jnp.full((rows, 1), token, jnp.int32), (0, i + 1))

        start = jnp.full((rows, seq_len), bos, jnp.int32)
        # Whole on every device: each process reads it.
        return jax.lax.with_sharding_constraint(jax.lax.fori_loop(0, count, extend, start)[0], PartitionSpec())
    return sample


def text(sample: Callable, p, seq_len: int, count: int, seed: int, decode: Callable) -> str:
    """Decoded sample of at most seq_len − 1 tokens."""
    count = min(count, seq_len - 1)
    return decode(np.asarray(sample(p, np.int32(count), np.uint32(seed)))[1:count + 1])
