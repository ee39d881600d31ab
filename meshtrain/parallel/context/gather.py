"""All-gather attention: every device gathers K and V of the whole sequence (Llama 3, arXiv:2407.21783, 3.3.2).

In zigzag order every device has 2·cp-1 unmasked chunk × chunk blocks and two on the diagonal, so the load is balanced.
Per layer the forward gathers K and V. The backward gathers them again and reduce-scatters dK and dV in float32. K and V
of the whole sequence are held for one layer at a time. Call the functions where `context` is manual. T is local: 2
chunks.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.kernels.engine import Engine, Mask, Output
from meshtrain.parallel.context import band
from meshtrain.parallel.context.zigzag import (AXIS, add, choose, gather, halves, join, merge, order, place,
                                               scatter, take)

__all__ = ["backward", "forward", "order"]


def forward(engine: Engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT):
    """Return o [B, T, N, H] and lse [B, T, N] of these queries over the keys of all devices, float32."""
    if (mask := mask.within(lax.axis_size(AXIS) * q_BTNH.shape[1])).window:
        return band.forward(engine, mask, band.GATHERED, q_BTNH, k_BTKH, v_BTKH, segments_BT)
    own = Keys(k_BTKH, v_BTKH, segments_BT)
    return attend_gathered(engine, mask, q_BTNH, own, Keys(*map(gather, own)))


class Keys(NamedTuple):
    """Keys, values and segments of this device's tokens, or of the whole sequence in zigzag order."""
    k_BSKH: jax.Array
    v_BSKV: jax.Array
    segments_BS: jax.Array


def attend_gathered(engine: Engine, mask: Mask, q_BTNH, own: Keys, every: Keys):
    """Return the result of `forward` without a window. every: the keys of the whole sequence, already gathered."""
    i, cp, whole = lax.axis_index(AXIS), lax.axis_size(AXIS), mask._replace(causal=False)
    (q0, q1), (k0, k1), (v0, v1), (s0, s1) = map(halves, (q_BTNH, *own))
    K, V, Z = every
    early = engine.forward(q0, k0, v0, s0, s0, mask)
    late = engine.forward(q1, k1, v1, s1, s1, mask)

    def step(acc, n):
        early, late = acc
        first, at = _nth(n, i)
        block = choose(first, (q0, s0), (q1, s1))
        new = merge(*choose(first, early, late), *engine.forward(
            block[0], take(K, at), take(V, at), block[1], take(Z, at), whole))
        return (choose(first, new, early), choose(first, late, new)), None

    ((o0, l0), (o1, l1)), _ = lax.scan(step, (early, late), jnp.arange(2 * cp - 1))
    return join(o0, o1), join(l0, l1)


def backward(engine: Engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT, out: Output):
    """Return dq, dk, dv of this device's tokens, float32."""
    if (mask := mask.within(lax.axis_size(AXIS) * q_BTNH.shape[1])).window:
        return band.backward(engine, mask, band.GATHERED, q_BTNH, k_BTKH, v_BTKH, segments_BT, out)
    own = Keys(k_BTKH, v_BTKH, segments_BT)
    dq, dK, dV = gradients_gathered(engine, mask, q_BTNH, own, Keys(*map(gather, own)), out)
    return dq, scatter(dK), scatter(dV)


def gradients_gathered(engine: Engine, mask: Mask, q_BTNH, own: Keys, every: Keys, out: Output):
    """Return the gradients of `attend_gathered`, float32: dq, and dK, dV of the whole sequence from these queries."""
    i, cp, whole = lax.axis_index(AXIS), lax.axis_size(AXIS), mask._replace(causal=False)
    early, late = zip(*map(halves, (q_BTNH, own.segments_BS, *out)))
    (k0, k1), (v0, v1) = halves(own.k_BSKH), halves(own.v_BSKV)
    K, V, Z = every

    def diagonal(chunk, k, v):
        q, s, *out = chunk
        return engine.backward(q, k, v, s, s, *out, mask)

    dq0, dk0, dv0 = diagonal(early, k0, v0)
    dq1, dk1, dv1 = diagonal(late, k1, v1)
    dK, dV = jnp.zeros_like(K, jnp.float32), jnp.zeros_like(V, jnp.float32)
    for at, dk, dv in ((2 * i, dk0, dv0), (2 * i + 1, dk1, dv1)):
        dK, dV = add(dK, dk, at), add(dV, dv, at)

    def step(sums, n):
        dq0, dq1, dK, dV = sums
        first, at = _nth(n, i)
        q, s, *out = choose(first, early, late)
        dq, dk, dv = engine.backward(q, take(K, at), take(V, at), s, take(Z, at), *out, whole)
        return (dq0 + jnp.where(first, dq, 0.0), dq1 + jnp.where(first, 0.0, dq),
                add(dK, dk, at), add(dV, dv, at)), None

    (dq0, dq1, dK, dV), _ = lax.scan(step, (dq0, dq1, dK, dV), jnp.arange(2 * cp - 1))
    return join(dq0, dq1), dK, dV


def _nth(n, i):
    """Return device i's n-th of 2·cp-1 unmasked blocks: (whether its queries are early, position of its keys).

    Early queries attend to chunks 0 … i-1, late ones to 0 … 2·cp-2-i.
    """
    first = n < i
    return first, place(jnp.where(first, n, n - i))
