"""Attention by latents: keys and values are expanded from a narrow latent by the devices that attend to them.

Each token has a latent of C numbers. Every head's key and value are products of the latent with weights. Each token
also has R rotated numbers, with which the keys of all heads end (MLA, arXiv:2405.04434).

If sequences are split, latents are gathered with every method: C + R numbers a token (576 in DeepSeek-V3) instead of
N·(H + V) (40,960). In zigzag order every device then expands the whole sequence for its queries, as in `gather`. With
`ulysses` each device expands only its own heads. The forward saves only the latents, and the backward expands them
again. dc and dr are reduce-scattered in float32. This module knows no model.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain.kernels import products
from meshtrain.kernels.engine import Engine, Mask, Output
from meshtrain.parallel.context import gather, ulysses, zigzag
from meshtrain.parallel.context.zigzag import AXIS
from meshtrain.sharding.mesh import on_shards, psum
from meshtrain.sharding.rules import Layout


class LatentMethod(NamedTuple):
    """A method for `attention.attend` whose operands are queries, latents, rotated keys, two weights and segments.

    method: a module of `attention.METHODS`; None if sequences are not split.
    """
    engine: Engine
    method: ModuleType | None
    gather: Callable
    place: Callable

    def forward(self, layout: Layout, mask: Mask, q_BTNH, c_BTC, r_BTR, key_CNH, value_CNV, segments_BT):
        local = partial(_forward, self.engine, self.method, mask)
        operands, heads, _ = self._specs(layout)
        weights = self.gather(key_CNH), self.gather(value_CNV)
        return on_shards(local, operands, (heads, heads))(q_BTNH, (c_BTC, r_BTR), weights, segments_BT)

    def backward(self, layout: Layout, mask: Mask, q_BTNH, c_BTC, r_BTR, *rest):
        *weights, segments_BT = rest[:3]
        split_heads = layout.mesh_axes("activations", "heads")

        def local(*args):
            dq, latents, weights = _backward(self.engine, self.method, mask, *args)
            # latents: only from this device's heads so far. An all-reduce sums B·T·(C + R) numbers in float32.
            latents = tuple(psum(d, split_heads) for d in latents) if split_heads else latents
            return dq, latents, tuple(dw[None] for dw in weights)
        operands, heads, weight = self._specs(layout)
        dq, latents, dws = on_shards(local, (*operands, (heads,) * 3), (*operands[:2], (weight, weight)))(
            q_BTNH, (c_BTC, r_BTR), tuple(map(self.gather, weights)), segments_BT, rest[3:])
        # Each device has one summand. XLA adds them by a reduce-scatter if `place` shards the sum.
        return dq, *latents, *map(self.place, dws)

    def _specs(self, layout: Layout):
        """Return the specs of the operands (queries, latents, weights, segments), of arrays [B, T, N, …], and of weight
        gradients with a leading dim of devices."""
        seq = None if self.method is None else "seq"

        def act(*axes: str) -> P:
            return layout.spec("activations", ("batch", seq, *axes))
        # A device multiplies whole latents with the heads of its queries. Other axes that split a weight (generation
        # splits the embedding dim) are gathered here. If [activations] alone splits heads, each device takes its slice
        # of them.
        weight = layout.spec("activations", (None, "heads", None))
        tokens = [axis for name in ("batch", seq) for axis in layout.mesh_axes("activations", name)]
        operands = act("heads"), (act(), act()), (weight, weight), act()
        return operands, act("heads"), P(tuple(tokens) or None, *weight)


# ---- one device's part -----------------------------------------------------------------------------------------------


def _expand(c_BSC, r_BSR, key_CNH, value_CNV) -> tuple[jax.Array, jax.Array]:
    """Return the keys and values of all heads that the weights have. Every key ends with the shared rotated part r."""
    k_BSNH = products.einsum("BSC,CNH->BSNH", c_BSC, key_CNH)
    r_BSNR = jnp.broadcast_to(r_BSR[:, :, None], (*k_BSNH.shape[:3], r_BSR.shape[2]))
    return jnp.concatenate([k_BSNH, r_BSNR], -1), products.einsum("BSC,CNV->BSNV", c_BSC, value_CNV)


def _contract(c_BSC, weights, dk_BSNH, dv_BSNV):
    """Return the gradients of `_expand`: (dc, dr), (dkey, dvalue), float32."""
    key_CNH, value_CNV = weights
    H, dtype = key_CNH.shape[2], c_BSC.dtype
    dr_BSR = dk_BSNH[..., H:].sum(2, dtype=jnp.float32)
    dk_BSNH, dv_BSNV = dk_BSNH[..., :H].astype(dtype), dv_BSNV.astype(dtype)    # operands in the compute dtype

    def product(eq: str, a, b):
        return products.einsum(eq, a, b, jnp.float32)
    dc_BSC = product("BSNH,CNH->BSC", dk_BSNH, key_CNH) + product("BSNV,CNV->BSC", dv_BSNV, value_CNV)
    return (dc_BSC, dr_BSR), (product("BSC,BSNH->CNH", c_BSC, dk_BSNH), product("BSC,BSNV->CNV", c_BSC, dv_BSNV))


def _own_heads(w):
    """Return the heads of w that `ulysses.whole_sequence` leaves on this device."""
    count = w.shape[1] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(w, lax.axis_index(AXIS) * count, count, 1)


def _own_tokens(every: gather.Keys) -> gather.Keys:
    """Return the part of the gathered keys that belongs to this device's tokens."""
    T = every.segments_BS.shape[1] // lax.axis_size(AXIS)
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * T, T, 1), every)


def _forward(engine: Engine, method, mask: Mask, q_BTNH, latents, weights, segments_BT):
    """Return o, lse of these queries over the keys of all devices, float32."""
    if method is None:
        k, v = _expand(*latents, *weights)
        return engine.forward(q_BTNH, k, v, segments_BT, segments_BT, mask.within(q_BTNH.shape[1]))
    *latents, segments = map(zigzag.gather, (*latents, segments_BT))
    mask = mask.within(segments.shape[1])
    if method is ulysses:
        q, (k, v) = ulysses.whole_sequence(q_BTNH), _expand(*latents, *map(_own_heads, weights))
        o, lse = engine.forward(q, k, v, segments, segments, mask)
        return ulysses.all_heads(o.astype(q.dtype)).astype(jnp.float32), ulysses.all_heads(lse)
    every = gather.Keys(*_expand(*latents, *weights), segments)
    return gather.attend_gathered(engine, mask, q_BTNH, _own_tokens(every), every)


def _backward(engine: Engine, method, mask: Mask, q_BTNH, latents, weights, segments_BT, out):
    """Return dq, (dc, dr) of this device's tokens, (dkey, dvalue) for a sum over devices. out: o, lse, do."""
    if method is None:
        k, v = _expand(*latents, *weights)
        dq, dk, dv = engine.backward(q_BTNH, k, v, segments_BT, segments_BT, *out, mask.within(q_BTNH.shape[1]))
        return dq, *_contract(latents[0], weights, dk, dv)
    *latents, segments = map(zigzag.gather, (*latents, segments_BT))
    mask = mask.within(segments.shape[1])
    if method is ulysses:
        own = tuple(map(_own_heads, weights))
        q, *out = (ulysses.whole_sequence(x) for x in (q_BTNH, *out))
        dq, dk, dv = engine.backward(q, *_expand(*latents, *own), segments, segments, *out, mask)
        dq = ulysses.all_heads(dq.astype(q.dtype))
        dlatents, dweights = _contract(latents[0], own, dk, dv)
        # zeros for the heads of other devices, which compute their own gradients
        first = lax.axis_index(AXIS) * own[0].shape[1]
        dweights = tuple(lax.dynamic_update_slice_in_dim(jnp.zeros(w.shape, jnp.float32), dw, first, 1)
                         for w, dw in zip(weights, dweights))
    else:
        every = gather.Keys(*_expand(*latents, *weights), segments)
        dq, dk, dv = gather.gradients_gathered(engine, mask, q_BTNH, _own_tokens(every), every, Output(*out))
        dlatents, dweights = _contract(latents[0], weights, dk, dv)
    return dq, tuple(map(zigzag.scatter, dlatents)), dweights
