"""The forward pass with a KV cache: prefill of whole prompts, then one token at a time.

The layers are those of training; `ex.attend` writes and reads the cache. All rows end at the same position: prompts are
padded on the left, padding is segment 0. A cache is, for each group of layers, (keys, values) of each layer of its
period, [repeats, B, S, K, H], sharded as rows and kv_heads; of attention by latents (latents, rotated keys), [repeats,
B, S, C] and [repeats, B, S, R]. Positions and windows follow from cache positions.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from meshtrain.kernels import products
from meshtrain.kernels.engine import MASKED, Expansion
from meshtrain.model.layers import Execution
from meshtrain.model.loss import capped
from meshtrain.model.transformer import Transformer
from meshtrain.sharding.rules import Layout


def prefill(model: Transformer, ex: Execution, p, batch, room: int) -> tuple[jax.Array, list]:
    """(output of the last layer [B, T, D], the cache with space for `room` tokens after the prompts)."""
    def attend(kept, layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, **kind):
        kept.append(tuple(_placed(layout, jnp.pad(x, [(0, 0), (0, room)] + [(0, 0)] * (x.ndim - 2)), "batch")
                          for x in (k_BTKH, v_BTKH)))
        return ex.attend(layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, **kind)

    x_BTD, inputs, caches = model.embed(ex, p, batch), model.inputs(batch), []
    for first, group in model.numbered():
        def repeat(x_BTD, scanned, group=group):
            weights, number = scanned
            kept: list = []
            for i, layer in enumerate(group.period):
                attending = dataclasses.replace(ex, attend=lambda *args, **kind: attend(kept, *args, **kind))
                x_BTD, _ = layer.bind(weights[i])(attending, x_BTD, inputs, number + i)
            return x_BTD, tuple(kept)
        x_BTD, cache = jax.lax.scan(repeat, x_BTD, (model.weights(p, group), group.numbers(first)))
        caches.append(cache)
    return x_BTD, caches


def extend(model: Transformer, ex: Execution, p, batch, caches: list, at, pad_B) -> tuple[jax.Array, list]:
    """(output of the last layer [B, 1, D], the cache) of one token per row at cache position `at`.

    batch: as in training, T = 1. pad_B: number of padding positions of each row.
    """
    x_BTD, inputs, new = model.embed(ex, p, batch), model.inputs(batch), []
    for (first, group), cache in zip(model.numbered(), caches, strict=True):
        def repeat(carry, scanned, group=group):
            # The cache is carried, not scanned: one token of it is written in place, nothing else moves.
            x_BTD, cache = carry
            weights, number, index = scanned
            for i, layer in enumerate(group.period):
                engine = _Reading(cache[i], index, at, pad_B)
                x_BTD, _ = layer.bind(weights[i])(dataclasses.replace(ex, attend=engine), x_BTD, inputs, number + i)
                cache = (*cache[:i], engine.cache, *cache[i + 1:])
            return (x_BTD, cache), None
        scanned = (model.weights(p, group), group.numbers(first), jnp.arange(group.repeats))
        (x_BTD, cache), _ = jax.lax.scan(repeat, (x_BTD, cache), scanned)
        new.append(cache)
    return x_BTD, new


class _Reading:
    """Attention of one token over the cache of a layer, after writing its key and value there."""

    def __init__(self, cache, index, at, pad_B):
        self.cache, self.index, self.at, self.pad_B = cache, index, at, pad_B

    def __call__(self, layout: Layout, q_BTNH, *others, mask, scores, sinks_N=None, expansion: Expansion | None = None):
        """others: what the cache holds of these tokens, and their segments."""
        B, T, N, H = q_BTNH.shape
        self.cache = tuple(self._written(layout, *pair) for pair in zip(self.cache, others[:2], strict=True))
        k, v = (_placed(layout, jax.lax.dynamic_index_in_dim(x, self.index, 0, keepdims=False), "batch")
                for x in self.cache)
        if expansion is None:
            q_BTKGH = q_BTNH.reshape(B, T, k.shape[2], -1, H)
            s_BKGTS = products.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k, jnp.float32)
        else:
            s_BKGTS, v = _against_latents(expansion, q_BTNH, k, v), k[:, :, None]
        place_S = jnp.arange(k.shape[1])
        seen_BS = mask.sees(self.at, place_S) & (place_S >= self.pad_B[:, None])
        s_BKGTS = capped(s_BKGTS * scores.scaled_for(H), scores.softcap)
        s_BKGTS = jnp.where(seen_BS[:, None, None, None], s_BKGTS, MASKED)
        if sinks_N is not None:
            sinks = sinks_N.astype(jnp.float32).reshape(1, *s_BKGTS.shape[1:3], 1, 1)
            s_BKGTS = jnp.concatenate([s_BKGTS, jnp.broadcast_to(sinks, (*s_BKGTS.shape[:4], 1))], -1)
        p_BKGTS = jax.nn.softmax(s_BKGTS, -1)[..., :k.shape[1]].astype(v.dtype)
        o_BTNV = products.einsum("BKGTS,BSKV->BTKGV", p_BKGTS, v, jnp.float32).reshape(B, T, N, -1)
        if expansion is not None:
            value_CNV = expansion.gather(expansion.value_CNV)
            o_BTNV = products.einsum("BTNC,CNV->BTNV", o_BTNV.astype(value_CNV.dtype), value_CNV)
        return o_BTNV.astype(q_BTNH.dtype)

    def _written(self, layout: Layout, stack, new):
        start = self.index, 0, self.at, *[0] * (stack.ndim - 3)
        stack = jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), start)
        return _placed(layout, stack, None, "batch")


def _against_latents(expansion: Expansion, q_BTNH, c_BSC, r_BSR):
    """Products of queries and keys [B, 1, N, T, S] without expanding the keys: each query is multiplied by the weight
    of its head's keys instead (DeepSeek-V2, arXiv:2405.04434, 2.1.2)."""
    key_CNH = expansion.gather(expansion.key_CNH)
    plain = key_CNH.shape[2]
    q_BTNC = products.einsum("BTNH,CNH->BTNC", q_BTNH[..., :plain], key_CNH)
    s_BNTS = products.einsum("BTNC,BSC->BNTS", q_BTNC, c_BSC, jnp.float32)
    return (s_BNTS + products.einsum("BTNR,BSR->BNTS", q_BTNH[..., plain:], r_BSR, jnp.float32))[:, None]


def _placed(layout: Layout, x, *leading: str | None):
    heads = ("kv_heads", "head_dim") if x.ndim == len(leading) + 3 else (None,)         # latents have no heads
    return layout.act(x, *leading, None, *heads)
