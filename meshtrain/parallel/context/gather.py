"""All-gather attention: every device gathers K and V of the whole sequence (Llama 3, arXiv:2407.21783, 3.3.2).

In zigzag order every device has 2·cp-1 unmasked chunk × chunk blocks and two on the diagonal, so the load is balanced.
Per layer the forward gathers K and V; the backward gathers them again and reduce-scatters dK and dV in float32. K and V
of the whole sequence are held for one layer at a time. Call it where `axis` is manual. T is local: 2 chunks.
"""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from meshtrain.kernels.engine import Output
from meshtrain.kernels.mask import Mask
from meshtrain.parallel.context import band
from meshtrain.parallel.context.zigzag import choose, halves, join, merge, order

__all__ = ["backward", "forward", "order"]


def forward(engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT, axis: str = "context"):
    """o [B, T, N, H] and lse [B, T, N] of these queries over the keys of all devices, float32."""
    cp, i = lax.axis_size(axis), lax.axis_index(axis)
    if (mask := mask.within(cp * q_BTNH.shape[1])).window:
        return band.forward(engine, mask, band.gathered(axis), q_BTNH, k_BTKH, v_BTKH, segments_BT)
    whole = mask._replace(causal=False)
    chunks = _GatherChunks(q_BTNH, cp)
    (q0, q1), (s0, s1) = halves(q_BTNH), halves(segments_BT)
    K, V, Z = (_all(x, axis) for x in (k_BTKH, v_BTKH, segments_BT))
    (k0, k1), (v0, v1) = halves(k_BTKH), halves(v_BTKH)
    early = engine.forward(q0, k0, v0, s0, s0, mask)
    late = engine.forward(q1, k1, v1, s1, s1, mask)

    def step(acc, n):
        early, late = acc
        first, at = chunks.nth(n, i)
        block = choose(first, (q0, s0), (q1, s1))
        take = lambda x: chunks.take(x, at)
        new = merge(*choose(first, early, late), *engine.forward(block[0], take(K), take(V), block[1], take(Z), whole))
        return (choose(first, new, early), choose(first, late, new)), None

    ((o0, l0), (o1, l1)), _ = lax.scan(step, (early, late), jnp.arange(2 * cp - 1))
    return join(o0, o1), join(l0, l1)


def backward(engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT, out: Output, axis: str = "context"):
    """dq, dk, dv of this device's tokens, float32."""
    cp, i = lax.axis_size(axis), lax.axis_index(axis)
    if (mask := mask.within(cp * q_BTNH.shape[1])).window:
        return band.backward(engine, mask, band.gathered(axis), q_BTNH, k_BTKH, v_BTKH, segments_BT, out)
    whole = mask._replace(causal=False)
    chunks = _GatherChunks(q_BTNH, cp)
    K, V, Z = (_all(x, axis) for x in (k_BTKH, v_BTKH, segments_BT))
    early, late = zip(*map(halves, (q_BTNH, segments_BT, *out)))
    (k0, k1), (v0, v1) = halves(k_BTKH), halves(v_BTKH)

    def diagonal(chunk, k, v):
        q, s, *out = chunk
        return engine.backward(q, k, v, s, s, *out, mask)

    dq0, dk0, dv0 = diagonal(early, k0, v0)
    dq1, dk1, dv1 = diagonal(late, k1, v1)
    dK, dV = jnp.zeros_like(K, jnp.float32), jnp.zeros_like(V, jnp.float32)
    for at, dk, dv in ((2 * i, dk0, dv0), (2 * i + 1, dk1, dv1)):
        dK, dV = chunks.add(dK, dk, at), chunks.add(dV, dv, at)

    def step(sums, n):
        dq0, dq1, dK, dV = sums
        first, at = chunks.nth(n, i)
        q, s, *out = choose(first, early, late)
        take = lambda x: chunks.take(x, at)
        dq, dk, dv = engine.backward(q, take(K), take(V), s, take(Z), *out, whole)
        return (dq0 + jnp.where(first, dq, 0.0), dq1 + jnp.where(first, 0.0, dq),
                chunks.add(dK, dk, at), chunks.add(dV, dv, at)), None

    (dq0, dq1, dK, dV), _ = lax.scan(step, (dq0, dq1, dK, dV), jnp.arange(2 * cp - 1))
    home = lambda x: lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
    return join(dq0, dq1), home(dK), home(dV)


class _GatherChunks:
    """The gathered sequence [B, S, …] in chunks, in zigzag order."""

    def __init__(self, q_BTNH, cp: int):
        self.cp, self.size = cp, q_BTNH.shape[1] // 2

    def nth(self, n, i):
        """Device i's n-th unmasked block of 2·cp-1: (whether its queries are the early ones, position of its keys).

        Early queries see chunks 0 … i-1, late ones 0 … 2·cp-2-i.
        """
        first = n < i
        chunk = jnp.where(first, n, n - i)
        return first, jnp.where(chunk < self.cp, 2 * chunk, 2 * (2 * self.cp - 1 - chunk) + 1)

    def take(self, x, at):
        return lax.dynamic_slice_in_dim(x, at * self.size, self.size, 1)

    def add(self, x, summand, at):
        return lax.dynamic_update_slice_in_dim(x, self.take(x, at) + summand, at * self.size, 1)


def _all(x, axis: str):
    return lax.all_gather(x, axis, axis=1, tiled=True)
