"""The forward pass with a KV cache: prefill of whole prompts, then one token at a time.

The layers are those of training; `ex.attend` and `ex.recurrence` write and read the cache. All rows end at the same
position: prompts are padded on the left, padding is segment 0. A cache is, for each group of layers, the arrays of each
layer of its period, [repeats, B, …]: of attention keys and values [S, K, H], sharded as rows and kv_heads; of attention
by latents these [S, C] and rotated keys [S, R]; of a recurrent mixer the last tokens before its convolutions [W - 1,
heads, width] and its state [N, H, V], whatever the length. Positions and windows follow from cache positions.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from meshtrain import pattern
from meshtrain.kernels import convolution, products, recurrence
from meshtrain.kernels.engine import MASKED, Expansion
from meshtrain.model.layers import Execution
from meshtrain.model.loss import capped
from meshtrain.model.transformer import Transformer
from meshtrain.names import PADDING
from meshtrain.sharding.rules import Layout


def token_width(cfg) -> int:
    """Numbers that the caches of all layers hold for each token; states of recurrent mixers do not grow."""
    def of(keys) -> int:
        latent = keys.latent
        return latent.kv_dim + latent.rope_dim if latent.kv_dim else 2 * keys.num_kv_heads * keys.head_dim
    return sum(of(cfg.of(kind.mixer)) for kind in pattern.kinds(cfg) if kind.mixer in pattern.ATTENTION)


def prefill(model: Transformer, ex: Execution, p, batch, room: int) -> tuple[jax.Array, list]:
    """(output of the last layer [B, T, D], the cache with space for `room` tokens after the prompts)."""
    x_BTD, inputs, caches = model.embed(ex, p, batch), model.inputs(batch), []
    for first, group in model.numbered():
        def repeat(x_BTD, scanned, group=group):
            weights, number = scanned
            kept = [_Writing(ex, room) for _ in group.period]
            for i, layer in enumerate(group.period):
                x_BTD, _ = layer.bind(weights[i])(_through(ex, kept[i]), x_BTD, inputs, number + i)
            return x_BTD, tuple(layer.cache for layer in kept)
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
                x_BTD, _ = layer.bind(weights[i])(_through(ex, engine), x_BTD, inputs, number + i)
                cache = (*cache[:i], engine.cache, *cache[i + 1:])
            return (x_BTD, cache), None
        scanned = (model.weights(p, group), group.numbers(first), jnp.arange(group.repeats))
        (x_BTD, cache), _ = jax.lax.scan(repeat, (x_BTD, cache), scanned)
        new.append(cache)
    return x_BTD, new


def _through(ex: Execution, cached) -> Execution:
    recurrence = ex.recurrence and ex.recurrence._replace(convolve=cached.convolve, recur=cached.recur)
    return dataclasses.replace(ex, attend=cached.attend, recurrence=recurrence)


class _Writing:
    """The mixer of a layer over prompts, whose `cache` it makes."""

    def __init__(self, ex: Execution, room: int):
        self.ex, self.room, self.cache = ex, room, ()

    def attend(self, layout: Layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, **kind):
        self.cache = tuple(_placed(layout, jnp.pad(x, [(0, 0), (0, self.room)] + [(0, 0)] * (x.ndim - 2)), "batch")
                           for x in (k_BTKH, v_BTKH))
        return self.ex.attend(layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, **kind)

    def convolve(self, layout: Layout, xs, ws, segments_BT):
        tails = (convolution.tail(x, segments_BT, ws[0].shape[0]) for x in xs)
        # Padding is no token of the prompt. Whatever follows is then taken as one document.
        self.cache = tuple(jnp.where((tail.segments_BS == PADDING)[..., None, None], 0, tail.x_BSND) for tail in tails)
        return self.ex.recurrence.convolve(layout, xs, ws, segments_BT)

    def recur(self, layout: Layout, *inputs):
        found = recurrence.recurrence(*inputs)
        self.cache += (layout.act(found.end_BNHV, "batch", "heads", None, None),)
        return found.o_BTNV


class _Reading:
    """The mixer of a layer for one token, which it writes into the layer's entry of the stacked cache."""

    def __init__(self, cache, index, at, pad_B):
        self.cache, self.index, self.at, self.pad_B = cache, index, at, pad_B

    def convolve(self, layout: Layout, xs, ws, segments_BT):
        """segments: of rows that are done 0, what is then computed is not read."""
        width, ys, tails = ws[0].shape[0], [], []
        for x, w, before in zip(xs, ws, map(self._own, self.cache[:3]), strict=True):
            before = convolution.Tail(before, jnp.ones(before.shape[:2], segments_BT.dtype))
            ys.append(convolution.convolve(x, w, jnp.ones_like(segments_BT), before))
            tails.append(convolution.tail(x, segments_BT, width, before).x_BSND)
        self.cache = (*map(self._replaced, self.cache[:3], tails), self.cache[3])
        return tuple(ys)

    def recur(self, layout: Layout, q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT):
        one = jnp.ones_like(segments_BT)
        o_BTNV, S_BNHV = recurrence.step(q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, one, recurrence.RecurrentState(
            self._own(self.cache[3]), one[:, 0]))
        self.cache = (*self.cache[:3], self._replaced(self.cache[3], layout.act(S_BNHV, "batch", "heads", None, None)))
        return o_BTNV

    def _own(self, stack):
        return jax.lax.dynamic_index_in_dim(stack, self.index, 0, keepdims=False)

    def _replaced(self, stack, new):
        return jax.lax.dynamic_update_index_in_dim(stack, new.astype(stack.dtype), self.index, 0)

    def attend(self, layout: Layout, q_BTNH, *others, mask, scores, sinks_N=None, expansion: Expansion | None = None):
        """others: what the cache holds of these tokens, and their segments."""
        B, T, N, H = q_BTNH.shape
        self.cache = tuple(self._written(layout, *pair) for pair in zip(self.cache, others[:2], strict=True))
        k, v = (_placed(layout, self._own(x), "batch") for x in self.cache)
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
