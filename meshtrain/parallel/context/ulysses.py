"""Ulysses attention: all-to-alls from sequence shards with all heads to whole sequences with a shard of the heads.

Another all-to-all returns the output (arXiv:2309.14509). Tokens keep their natural order. If cp does not divide the
number of K and V heads, these heads are repeated, and their gradients are summed. Per layer the forward sends (cp-1)/cp
of Q, K, V and O. The backward sends (cp-1)/cp of Q, K, V, O, dO, lse and, in the compute dtype, dQ, dK, dV. Call the
functions where `context` is manual. N and K are the heads of this tensor shard. N is a multiple of cp.
"""
from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.kernels.engine import Engine, Mask, Output
from meshtrain.parallel.context.zigzag import AXIS, gather

__all__ = ["backward", "forward", "order"]


def order(length: int, cp: int) -> np.ndarray:
    """Return the natural order, int64 [length]."""
    del cp
    return np.arange(length)


def forward(engine: Engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT):
    """Return o [B, T, N, H] and lse [B, T, N] of these queries over the keys of all devices, float32."""
    k_BTKH, v_BTKH = (_repeat(x, lax.axis_size(AXIS)) for x in (k_BTKH, v_BTKH))
    q, k, v = (whole_sequence(x) for x in (q_BTNH, k_BTKH, v_BTKH))
    segments = gather(segments_BT)
    o, lse = engine.forward(q, k, v, segments, segments, mask.within(q.shape[1]))
    return all_heads(o.astype(q.dtype)).astype(jnp.float32), all_heads(lse)


def backward(engine: Engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT, out: Output):
    """Return dq, dk, dv of this device's tokens. dk and dv are float32; dq has the compute dtype."""
    cp = lax.axis_size(AXIS)
    K = k_BTKH.shape[2]
    sent = (q_BTNH, _repeat(k_BTKH, cp), _repeat(v_BTKH, cp), *out)
    q, k, v, *whole_out = (whole_sequence(x) for x in sent)
    segments = gather(segments_BT)
    dq, dk, dv = engine.backward(q, k, v, segments, segments, *whole_out, mask.within(q.shape[1]))
    dq, dk, dv = (all_heads(x.astype(q.dtype)) for x in (dq, dk, dv))

    def sum_copies(x):
        return x.astype(jnp.float32).reshape(*x.shape[:2], K, -1, x.shape[-1]).sum(3)
    return dq, sum_copies(dk), sum_copies(dv)


def _repeat(x_BTKH, cp: int):
    """Repeat key/value heads until cp divides their number. Copies are adjacent, so query groups stay together."""
    K = x_BTKH.shape[2]
    return jnp.repeat(x_BTKH, cp // math.gcd(K, cp), axis=2)


def whole_sequence(x):
    """All-to-all [B, T, N, …] of this device's tokens -> [B, cp·T, N/cp, …] of this device's heads."""
    return lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)


def all_heads(x):
    """All-to-all [B, cp·T, N/cp, …] -> [B, T, N, …], the inverse of `whole_sequence`."""
    return lax.all_to_all(x, AXIS, split_axis=1, concat_axis=2, tiled=True)
