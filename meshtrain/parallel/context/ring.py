"""Ring attention: keys and values rotate around `context` while each device computes its blocks (arXiv:2310.01889).

In zigzag order two pairs of chunks are visible at each step. With the keys of an earlier device j < i, the pairs are
(early q, early k) and (late q, early k). With the keys of a later device, the pairs are (late q, early k) and (late q,
late k). All pairs are whole chunk × chunk blocks. So each device computes two blocks a step, selected by `where`,
without masks, branches or idle devices.

Per layer the forward sends K and V cp-1 times. The backward sends K and V cp-1 times, and dK and dV cp times in
float32. Segment ids are not counted. If the model casts dK and dV to bf16 next, XLA on GPUs casts before the last hop,
which halves the bytes of this hop. Call the functions where `context` is manual. T is local: 2 chunks.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.kernels.engine import Engine, Mask, Output
from meshtrain.parallel.context import band
from meshtrain.parallel.context.zigzag import AXIS, choose, halves, join, merge, order

__all__ = ["backward", "forward", "order"]


def forward(engine: Engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT):
    """Return o [B, T, N, H] and lse [B, T, N] of these queries over the keys of all devices, float32."""
    cp, i = lax.axis_size(AXIS), lax.axis_index(AXIS)
    if (mask := mask.within(cp * q_BTNH.shape[1])).window:
        return band.forward(engine, mask, band.RING, q_BTNH, k_BTKH, v_BTKH, segments_BT)
    whole = mask._replace(causal=False)
    q0, q1 = halves(q_BTNH)
    s0, s1 = halves(segments_BT)

    def visit(kv, acc, t):
        """Add attention to the keys of device i-t."""
        (k0, k1), (v0, v1), (z0, z1) = map(halves, kv)
        (o0, o1), (l0, l1) = map(halves, acc)
        earlier = (i - t) % cp < i
        o1, l1 = merge(o1, l1, *engine.forward(q1, k0, v0, s1, z0, whole))
        block = choose(earlier, (q0, k0, v0, s0, z0), (q1, k1, v1, s1, z1))
        new = merge(*choose(earlier, (o0, l0), (o1, l1)), *engine.forward(*block, whole))
        (o0, l0), (o1, l1) = choose(earlier, new, (o0, l0)), choose(earlier, (o1, l1), new)
        return join(o0, o1), join(l0, l1)

    kv = _pass_on((k_BTKH, v_BTKH, segments_BT))       # overlaps with the diagonal block
    acc = engine.forward(q_BTNH, k_BTKH, v_BTKH, segments_BT, segments_BT, mask)

    def step(carry, t):
        kv, acc = carry
        return (_pass_on(kv), visit(kv, acc, t)), None

    if cp > 2:
        (kv, acc), _ = lax.scan(step, (kv, acc), jnp.arange(1, cp - 1))
    return visit(kv, acc, cp - 1)


def backward(engine: Engine, mask: Mask, q_BTNH, k_BTKH, v_BTKH, segments_BT, out: Output):
    """Return dq, dk, dv of this device's tokens, float32.

    The sums of dK and dV travel one step behind the keys, and need one more hop to return to the keys' device."""
    cp, i = lax.axis_size(AXIS), lax.axis_index(AXIS)
    if (mask := mask.within(cp * q_BTNH.shape[1])).window:
        return band.backward(engine, mask, band.RING, q_BTNH, k_BTKH, v_BTKH, segments_BT, out)
    whole = mask._replace(causal=False)
    (q0, q1), (s0, s1), (o0, o1), (l0, l1), (g0, g1) = map(halves, (q_BTNH, segments_BT, *out))

    def visit(kv, sums, t):
        (k0, k1), (v0, v1), (z0, z1) = map(halves, kv)
        dq, dkv = sums
        dk, dv = _pass_on(dkv)                # overlaps with the computation of the next summand
        earlier = (i - t) % cp < i
        dq_a, dk_a, dv_a = engine.backward(q1, k0, v0, s1, z0, o1, l1, g1, whole)
        block = choose(earlier, (q0, k0, v0, s0, z0, o0, l0, g0), (q1, k1, v1, s1, z1, o1, l1, g1))
        dq_b, dk_b, dv_b = engine.backward(*block, whole)

        def early(x):
            return jnp.where(earlier, x, 0.0)

        def late(x):
            return jnp.where(earlier, 0.0, x)
        return (dq + join(early(dq_b), dq_a + late(dq_b)),
                (dk + join(dk_a + early(dk_b), late(dk_b)), dv + join(dv_a + early(dv_b), late(dv_b))))

    kv = _pass_on((k_BTKH, v_BTKH, segments_BT))
    dq, dk, dv = engine.backward(q_BTNH, k_BTKH, v_BTKH, segments_BT, segments_BT, *out, mask)
    sums = dq, (dk, dv)

    def step(carry, t):
        kv, sums = carry
        return (_pass_on(kv), visit(kv, sums, t)), None

    if cp > 2:
        (kv, sums), _ = lax.scan(step, (kv, sums), jnp.arange(1, cp - 1))
    dq, dkv = visit(kv, sums, cp - 1)
    return dq, *_pass_on(dkv)


def _pass_on(tree):
    """Send every leaf to the next device."""
    cp = lax.axis_size(AXIS)
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % cp) for i in range(cp)]), tree)
