"""The forward pass with a KV cache: prefill of whole prompts, then one token at a time.

The layers are those of training; `ex.attend` writes and reads the cache. All rows end at the same position: prompts are
padded on the left, padding is segment 0. A cache is, for each group of layers, (keys, values) of each layer of its
period, [repeats, B, S, K, H], sharded as rows and kv_heads; positions and windows follow from cache positions.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from meshtrain.kernels import products
from meshtrain.kernels.engine import MASKED
from meshtrain.model.layers import Execution
from meshtrain.model.loss import capped
from meshtrain.model.transformer import Transformer
from meshtrain.sharding.rules import Layout


def prefill(model: Transformer, ex: Execution, p, batch, room: int) -> tuple[jax.Array, list]:
    """(output of the last layer [B, T, D], the cache with space for `room` tokens after the prompts)."""
    def attend(kept, layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, **kind):
        kept.append(tuple(_placed(layout, jnp.pad(x, [(0, 0), (0, room), (0, 0), (0, 0)]), "batch")
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
                engine = _Reading(model.cfg, cache[i], index, at, pad_B)
                x_BTD, _ = layer.bind(weights[i])(dataclasses.replace(ex, attend=engine), x_BTD, inputs, number + i)
                cache = (*cache[:i], engine.cache, *cache[i + 1:])
            return (x_BTD, cache), None
        scanned = (model.weights(p, group), group.numbers(first), jnp.arange(group.repeats))
        (x_BTD, cache), _ = jax.lax.scan(repeat, (x_BTD, cache), scanned)
        new.append(cache)
    return x_BTD, new


class _Reading:
    """Attention of one token over the cache of a layer, after writing its key and value there."""

    def __init__(self, cfg, cache, index, at, pad_B):
        self.cfg, self.cache, self.index, self.at, self.pad_B = cfg, cache, index, at, pad_B

    def __call__(self, layout: Layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, mask, scores, sinks_N=None):
        B, T, N, H = q_BTNH.shape
        S, K = self.cache[0].shape[2:4]
        self.cache = tuple(self._written(layout, *pair) for pair in zip(self.cache, (k_BTKH, v_BTKH), strict=True))
        k_BSKH, v_BSKH = (_placed(layout, jax.lax.dynamic_index_in_dim(x, self.index, 0, keepdims=False), "batch")
                          for x in self.cache)
        place_S = jnp.arange(S)
        seen_BS = mask.sees(self.at, place_S) & (place_S >= self.pad_B[:, None])
        s = products.einsum("BTKGH,BSKH->BKGTS", q_BTNH.reshape(B, T, K, N // K, H), k_BSKH, jnp.float32)
        s = jnp.where(seen_BS[:, None, None, None],
                      capped(s * scores.scale(H), self.cfg.score_softcap), MASKED)
        o = products.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(s, -1).astype(v_BSKH.dtype), v_BSKH, jnp.float32)
        return o.reshape(B, T, N, H).astype(q_BTNH.dtype)

    def _written(self, layout: Layout, stack, new_BTKH):
        stack = jax.lax.dynamic_update_slice(stack, new_BTKH[None].astype(stack.dtype), (self.index, 0, self.at, 0, 0))
        return _placed(layout, stack, None, "batch")


def _placed(layout: Layout, x, *leading: str | None):
    return layout.act(x, *leading, None, "kv_heads", "head_dim")
