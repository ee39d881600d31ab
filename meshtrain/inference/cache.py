"""The KV cache of slots, and the engines that write and read it: `PromptEngine`, `SlotEngine`.

A slot holds one sequence, which begins at position 0 and has its own length. `passes` runs the layers.

A cache is, for each group of layers, the arrays of each layer of its period, [repeats, slots, …]. Attention stores keys
and values [K, R, H], in the order in which the matmuls read them; with another order XLA would hold a second cache on
GPUs. Attention by latents stores the latents [R, C] and rotated keys [R, L]. A recurrent mixer stores the last tokens
before its convolutions [W - 1, heads, width] and its state [N, H, V], whatever the length.

The token at position p is stored at place p mod R. R is the room: the number of places of a slot, or, for a layer with
a window, the places that the window needs. A place is visible only after the sequence has written it, so a slot is
never cleared.

With N drafts a pass reads N + 1 tokens of a slot. The first `count` tokens stay; the others are overwritten later.
Recurrent mixers store the state after each token of the last pass, [repeats · (N + 1), slots, …]. The cache ends with
the depths of MTP as a group, and `recent`: the states after the final norm at the last 2 N positions.
"""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.kernels import convolution, decode, products, recurrence
from meshtrain.kernels.engine import MASKED, Expansion, Mask
from meshtrain.model.execution import Execution
from meshtrain.model.loss import cap
from meshtrain.model.transformer import find_lacking
from meshtrain.names import PADDING
from meshtrain.parallel.context.recurrence import CHANNEL_AXES
from meshtrain.sharding.mesh import on_shards
from meshtrain.sharding.rules import Layout

BLOCK = 64          # places per block; a room is a multiple of it
MOST_BLOCKS = 8     # most blocks in which a room is read; each is an iteration of a loop on the device


def round_room(tokens: int) -> int:
    """Return the room of slots for sequences of this many tokens: a whole number of the blocks that attention reads."""
    block = _block(max(tokens, 1))
    return -(-max(tokens, 1) // block) * block


def _block(room: int) -> int:
    return -(-room // (BLOCK * MOST_BLOCKS)) * BLOCK


def places(window: int, room: int, drafts: int = 0) -> int:
    """Return the number of places of a slot in a layer with this window (0: none). The places that the window sees stay
    intact while 2 · drafts further tokens are written."""
    return min(room, round_room(window + 2 * drafts)) if window else room


def slot_bytes(cfg: Model, room: int, itemsize: int) -> int:
    """Return the bytes of the keys, values and latents of one slot. States of recurrent mixers are not counted, because
    they do not grow."""
    def of(mixer: str) -> int:
        keys = cfg.of(mixer)
        latent = keys.latent
        width = latent.kv_dim + latent.rope_dim if latent.kv_dim else 2 * keys.num_kv_heads * keys.head_dim
        return width * places(keys.window if pattern.mixer(mixer).windowed else 0, room)
    return itemsize * sum(of(kind.mixer) for kind in pattern.kinds(cfg) if pattern.mixer(kind.mixer).attends)


def check(cfg: Model) -> None:
    """Check that the cache has a state for every mixer. Raises: ValueError for a mixer without `cache = True`."""
    for mixer in find_lacking(cfg, "cache"):
        raise ValueError(f"{mixer} has no cache, so the model cannot generate; if it reads other tokens only through "
                         "one call of ex.engines, set `cache = True` in its class")


def constrain(layout: Layout, caches: list) -> list:
    """Return the cache with the sharding of its heads and slots."""
    return [tuple(_constrain_layer(layout, arrays) for arrays in group) for group in caches]


def lay(layout: Layout, caches: list, prompts: list, source_S, tokens_S) -> list:
    """Return the cache with prompts from `read` copied into some slots. source_S: the number of the slot's prompt among
    the prompts of its shard of the batch; -1: the slot is unchanged. tokens_S: number of tokens of the prompt."""
    return [tuple(_lay_layer(layout, arrays, new, source_S, tokens_S) for arrays, new in zip(group, read, strict=True))
            for group, read in zip(caches, prompts, strict=True)]


def through(ex: Execution, cached) -> Execution:
    recurrence = ex.engines.recurrence and ex.engines.recurrence._replace(convolve=cached.convolve, recur=cached.recur)
    return dataclasses.replace(ex, engines=dataclasses.replace(ex.engines, attention=cached.attend,
                                                               recurrence=recurrence))


def _constrain_layer(layout: Layout, arrays: tuple) -> tuple:
    """Constrain the arrays of one layer of a period: none, two of attention, or four of a recurrent mixer; or `recent`
    alone."""
    if len(arrays) == 4:
        *tails, state = arrays
        return (*(layout.act(x, None, "batch", None, axis, None) for x, axis in zip(tails, CHANNEL_AXES, strict=True)),
                layout.act(state, None, "batch", "heads", None, None))
    return tuple(_constrain(layout, x, None, "batch") for x in arrays)


def _lay_layer(layout: Layout, arrays: tuple, prompts: tuple, source_S, tokens_S) -> tuple:
    if len(arrays) in (0, 2):
        return tuple(_constrain(layout, _roll(layout, *pair, source_S, tokens_S), None, "batch")
                     for pair in zip(arrays, prompts, strict=True))
    # A prompt without tokens leaves nothing in the state; the values that were read for it are padding.

    def was(x):
        return jnp.where(_over(tokens_S > 0, x), x, 0)
    new = [jnp.where(_over(source_S >= 0, x), was(_of_slots(layout, read, source_S)), x).astype(x.dtype)
           for x, read in zip(arrays, prompts, strict=True)]
    return _constrain_layer(layout, tuple(new))


def _of_slots(layout: Layout, read, source_S):
    """Return the prompt of each slot, from the slot's own shard, so that no data moves between devices."""
    shards = layout.num_shards(layout.batch_axes)
    R, B = read.shape[:2]
    by_shard = read.reshape(R, shards, B // shards, *read.shape[2:])
    take = jax.vmap(lambda read, source: read[:, source], in_axes=(1, 0), out_axes=1)
    return take(by_shard, jnp.maximum(source_S, 0).reshape(shards, -1)).reshape(R, len(source_S), *read.shape[2:])


def _roll(layout: Layout, x, read, source_S, tokens_S):
    """Return the places of the cache, taken from prompts whose last token is at the end."""
    T, R = read.shape[-2], x.shape[-2]
    place = jnp.arange(T)
    last_S1 = tokens_S[:, None] - 1
    position = last_S1 - (last_S1 - place) % R
    mine = _of_slots(layout, read, source_S)
    take = jax.vmap(lambda rows, at: jnp.take(rows, at, rows.ndim - 2), in_axes=(1, 0), out_axes=1)
    mine = take(mine, jnp.clip(position + T - tokens_S[:, None], 0, T - 1))
    new = jnp.where(_over(source_S >= 0, mine), mine.astype(x.dtype), lax.slice_in_dim(x, 0, T, axis=-2))
    return lax.dynamic_update_slice(x, new, (0,) * x.ndim)


def _over(flag_S, x):
    """Reshape a flag of each slot so that it broadcasts to [repeats, slots, …]."""
    return flag_S.reshape(1, -1, *[1] * (x.ndim - 2))


class PromptEngine:
    """The mixer of a layer over prompts. It sets `cache` to the arrays that the KV cache stores."""

    def __init__(self, ex: Execution, drafts: int):
        self.ex, self.drafts = ex, drafts
        self.cache: tuple[jax.Array, ...] = ()

    def _begin(self) -> None:
        if self.cache:
            raise ValueError("a layer reads other tokens twice, but the cache has the state of one call of ex.engines")

    def attend(self, layout: Layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, *, mask: Mask, **kind):
        self._begin()
        T = k_BTKH.shape[1]
        first = T - places(mask.window, T, self.drafts)
        self.cache = tuple(_constrain(layout, _by_head(x)[..., first:, :], "batch") for x in (k_BTKH, v_BTKH))
        return self.ex.engines.attention(layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, mask=mask, **kind)

    def convolve(self, layout: Layout, xs, ws, segments_BT, axes=CHANNEL_AXES):
        self._begin()
        tails = (convolution.tail(x, segments_BT, ws[0].shape[0]) for x in xs)
        # Padding is not part of the prompt. The tokens after it are then treated as one document.
        self.cache = tuple(jnp.where((tail.segments_BS == PADDING)[..., None, None], 0, tail.x_BSND) for tail in tails)
        assert self.ex.engines.recurrence is not None
        return self.ex.engines.recurrence.convolve(layout, xs, ws, segments_BT, axes=axes)

    def recur(self, layout: Layout, *inputs):
        recurred = recurrence.recurrence(*inputs)
        self.cache += (layout.act(recurred.end_BNHV, "batch", "heads", None, None),)
        return recurred.o_BTNV


class Reach(NamedTuple):
    """The positions up to which each slot has written.

    at_BT: positions of each slot's tokens. last: the largest position of a live slot. live_BT: at_BT, with -1 for slots
    that are done; None unless `Execution.by_kernels`. count_B: number of tokens of the previous pass that stay.
    """
    at_BT: jax.Array
    last: jax.Array
    live_BT: jax.Array | None
    count_B: jax.Array | None


def reach(ex: Execution, batch, count_B=None) -> Reach:
    at_BT, live_BT = batch["positions"], batch["segments"] != PADDING
    last = jnp.max(jnp.where(live_BT, at_BT, 0))
    return Reach(at_BT, last, jnp.where(live_BT, at_BT, -1) if ex.engines.by_kernels else None, count_B)


class SlotEngine:
    """The mixer of a layer for T tokens of each slot. It writes the tokens into the layer's entry of the stacked cache.
    """

    def __init__(self, cache, index, reach: Reach):
        self.cache, self.index, self.reach, self.T = cache, index, reach, reach.at_BT.shape[1]

    def convolve(self, layout: Layout, xs, ws, segments_BT, axes=CHANNEL_AXES):
        """Convolve the tokens of each slot with the tail in the cache. segments are 0 for slots that are done; their
        output is not read."""
        width, ys, tails = ws[0].shape[0], [], []
        for x, w, before in zip(xs, ws, map(self._own, self.cache[:3]), strict=True):
            before = convolution.Tail(before, jnp.ones(before.shape[:2], segments_BT.dtype))
            ys.append(convolution.convolve(x, w, jnp.ones_like(segments_BT), before))
            tails.append([convolution.tail(x[:, :t + 1], segments_BT[:, :t + 1], width, before).x_BSND
                          for t in range(self.T)])
        self.cache = (*map(self._replace, self.cache[:3], tails), self.cache[3])
        return tuple(ys)

    def recur(self, layout: Layout, *inputs):
        S_BNHV, one_segment = self._own(self.cache[3]), jnp.ones_like(inputs[-1][:, :1])
        os: list[jax.Array] = []
        states: list[jax.Array] = []
        for t in range(self.T):
            q, k, v, g, beta = jax.tree.map(lambda x, t=t: x[:, t:t + 1], inputs[:-1])
            before = recurrence.RecurrentState(S_BNHV, one_segment[:, 0])
            o_B1NV, S_BNHV = recurrence.step(q, k, v, g, beta, one_segment, before)
            S_BNHV = layout.act(S_BNHV, "batch", "heads", None, None)
            os, states = [*os, o_B1NV], [*states, S_BNHV]
        self.cache = (*self.cache[:3], self._replace(self.cache[3], states))
        return jnp.concatenate(os, 1)

    def _own(self, stack):
        """Return the layer's entry after the last token that stays."""
        after = lax.dynamic_slice_in_dim(stack, self.index * self.T, self.T, 0)
        own = after[:1]
        for t in range(1, self.T):
            own = jnp.where(_over(self.reach.count_B > t, own), after[t:t + 1], own)
        return own[0]

    def _replace(self, stack, after: list):
        return lax.dynamic_update_slice_in_dim(stack, jnp.stack(after).astype(stack.dtype), self.index * self.T, 0)

    def attend(self, layout: Layout, q_BTNH, *others, mask, scores, sinks_N=None, expansion: Expansion | None = None,
               bounded: bool = False):
        """Return (attention to the cache, None). others: the arrays that the cache stores for these tokens, and their
        segments. Scores in generation are not bounded."""
        assert not bounded
        B, T, N, H = q_BTNH.shape
        if expansion is None and self.reach.live_BT is not None and _in_one_kernel(layout, N, *self.cache):
            k_BTKH, v_BTKV = others[:2]
            return self._by_kernel(layout, q_BTNH, k_BTKH, v_BTKV, mask, scores, sinks_N), None
        self.cache = tuple(self._write(layout, *pair) for pair in zip(self.cache, others[:2], strict=True))
        if expansion is None:
            q_BTKGH = q_BTNH.reshape(B, T, self.cache[0].shape[2], -1, H)

            def products_with(k_BKSH, _):
                return products.einsum("BTKGH,BKSH->BKTGS", q_BTKGH, k_BKSH, jnp.float32)
        else:
            products_with = _against_latents(expansion, q_BTNH)

        def values(first, second):
            return second if expansion is None else first[:, None]

        def score(*part):
            return cap(products_with(*part) * scores.scale_for(H), scores.softcap)
        o_BTNV = self._over_places(layout, score, values, mask, sinks_N).swapaxes(1, 2).reshape(B, T, N, -1)
        if expansion is not None:
            value_CNV = expansion.gather(expansion.value_CNV)
            o_BTNV = products.einsum("BTNC,CNV->BTNV", o_BTNV.astype(value_CNV.dtype), value_CNV)
        return o_BTNV.astype(q_BTNH.dtype), None

    def _by_kernel(self, layout: Layout, q_BTNH, k_BTKH, v_BTKV, mask: Mask, scores, sinks_N):
        def spec(*logical):
            return layout.spec("activations", logical)
        head, kv_head, stack = (spec("batch", None, "heads", None), spec("batch", None, "kv_heads", None),
                                spec(None, "batch", "kv_heads", None, None))
        sinks = () if sinks_N is None else (sinks_N,)

        def local(tokens, cache, layer, at_ST, *sinks):
            os = []         # a token at a time; the next ones read what it wrote
            for t in range(self.T):
                o_SNV, cache = decode.attend(decode.Token(*(x[:, t] for x in tokens)), cache, layer, at_ST[:, t],
                                             scores, mask.window, *sinks)
                os.append(o_SNV)
            return jnp.stack(os, 1), cache
        o_STNV, cache = on_shards(
            local, (decode.Token(head, kv_head, kv_head), (stack, stack), P(), spec("batch", None),
                    *(spec("heads") for _ in sinks)), (head, (stack, stack)))(
            decode.Token(q_BTNH, k_BTKH, v_BTKV), self.cache, self.index, self.reach.live_BT, *sinks)
        self.cache = tuple(_constrain(layout, x, None, "batch") for x in cache)
        return o_STNV

    def _over_places(self, layout: Layout, score, values, mask: Mask, sinks_N):
        """Return [B, K, T, G, V]: attention to the visible places of each slot, block by block.

        A block without visible places of a slot adds exact zeros, so a slot does not depend on how far the loop runs
        for other slots. Source: FlashAttention, arXiv:2205.14135.
        """
        R = self.cache[0].shape[-2]
        block = min(_block(R), R)
        at_BT1 = self.reach.at_BT[..., None]

        def visit(j, carry):
            most, total, o = carry
            part = [_constrain(layout, self._block_of(x, j * block, block), "batch") for x in self.cache]
            s_BKTGS, v_BKSV = score(*part), values(*part)
            # The position that a place holds: the newest of the positions that map to it.
            position_BTS = at_BT1 - (at_BT1 - (j * block + jnp.arange(block))) % R
            seen_BTS = position_BTS >= 0
            if mask.window:
                seen_BTS &= at_BT1 - position_BTS < mask.window
            seen_B1T1S = seen_BTS[:, None, :, None]
            s_BKTGS = jnp.where(seen_B1T1S, s_BKTGS, MASKED)
            new = jnp.maximum(most, s_BKTGS.max(-1))
            p_BKTGS = jnp.where(seen_B1T1S, jnp.exp(s_BKTGS - new[..., None]), 0.0)
            fade = jnp.exp(most - new)
            added = products.einsum("BKTGS,BKSV->BKTGV", p_BKTGS.astype(v_BKSV.dtype), v_BKSV, jnp.float32)
            return new, total * fade + p_BKTGS.sum(-1), o * fade[..., None] + added
        heads = jax.eval_shape(lambda: visit(0, (jnp.float32(MASKED), jnp.float32(0), jnp.float32(0)))[2])
        most = jnp.full(heads.shape[:4], MASKED, jnp.float32)
        total = jnp.zeros_like(most)
        if sinks_N is not None:     # a score without a value
            K, G = heads.shape[1], heads.shape[3]
            most = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(1, K, 1, G), most.shape)
            total = jnp.ones_like(most)
        carry = most, total, jnp.zeros(heads.shape, jnp.float32)
        if block == R:
            _, total, o = visit(0, carry)
        else:
            _, total, o = lax.fori_loop(0, jnp.minimum(self.reach.last // block + 1, R // block), visit, carry)
        return o / jnp.maximum(total, 1e-30)[..., None]

    def _block_of(self, stack, at, size: int):
        start = (self.index, *[0] * (stack.ndim - 3), at, 0)
        return lax.dynamic_slice(stack, start, (1, *stack.shape[1:-2], size, stack.shape[-1]))[0]

    def _write(self, layout: Layout, stack, new):
        """Return the stack with the tokens of each slot written at their places. The write is a scatter with a batch
        dim, which stays on its device."""
        at_BT, place = self.reach.at_BT, stack.ndim - 2
        at = jnp.stack([jnp.broadcast_to(self.index, at_BT.shape), at_BT % stack.shape[place]], -1).astype(jnp.int32)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(2, new.ndim)), inserted_window_dims=(0, place),
            scatter_dims_to_operand_dims=(0, place), operand_batching_dims=(1,), scatter_indices_batching_dims=(0,))
        stack = lax.scatter(stack, at, new.astype(stack.dtype), numbers, unique_indices=True,
                            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
        return _constrain(layout, stack, None, "batch")


def _in_one_kernel(layout: Layout, N: int, keys, values) -> bool:
    """Return whether `kernels.decode` supports this layer. Query and KV heads must be sharded over the same mesh axes,
    and head_dim must not be sharded."""

    def split(logical):
        return layout.mesh_axes("activations", logical)
    return split("heads") == split("kv_heads") and not split("head_dim") and decode.fits(
        N // keys.shape[2], keys.shape[-1], values.shape[-1], keys.shape[-2])


def _against_latents(expansion: Expansion, q_BTNH):
    """Return a function (latents, rotated keys) -> query-key products [B, 1, T, N, S]. The function does not expand the
    keys: it multiplies each query by the weight of its head's keys instead (DeepSeek-V2, arXiv:2405.04434, 2.1.2)."""
    key_CNH = expansion.gather(expansion.key_CNH)
    plain = key_CNH.shape[2]
    q_BTNC = products.einsum("BTNH,CNH->BTNC", q_BTNH[..., :plain], key_CNH)

    def with_keys(c_BSC, r_BSR):
        s_BTNS = products.einsum("BTNC,BSC->BTNS", q_BTNC, c_BSC, jnp.float32)
        return (s_BTNS + products.einsum("BTNR,BSR->BTNS", q_BTNH[..., plain:], r_BSR, jnp.float32))[:, None]
    return with_keys


def _constrain(layout: Layout, x, *leading: str | None):
    heads = ("kv_heads",) if x.ndim == len(leading) + 3 else ()         # latents have no heads
    return layout.act(x, *leading, *heads, None, "head_dim" if heads else None)


def _by_head(x):
    """Return keys or values [B, T, K, H] in the cache's order."""
    return x.swapaxes(1, 2) if x.ndim == 4 else x
