"""The forward pass with a KV cache of slots.

Prompts are read and copied into slots; then each slot gets a token at a time.

The layers are those of training, whose engines write and read the cache. A slot holds one sequence,
which begins at position 0 and has its own length.

A cache is, for each group of layers, the arrays of each layer of its period, [repeats, slots, …]. Attention stores keys
and values [K, R, H], in the order in which the matmuls read them; with another order XLA would hold a second cache on
GPUs. Attention by latents stores the latents [R, C] and rotated keys [R, L]. A recurrent mixer stores the last tokens
before its convolutions [W - 1, heads, width] and its state [N, H, V], whatever the length.

The token at position p is stored at place p mod R. R is the room: the number of places of a slot, or, for a layer with
a window, the places that the window needs. A place is visible only after the sequence has written it, so a slot is
never cleared.
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
from meshtrain.model.transformer import Transformer, find_lacking
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


def places(window: int, room: int) -> int:
    """Return the number of places of a slot in a layer with this window (0: none)."""
    return min(room, round_room(window)) if window else room


def slot_bytes(cfg: Model, room: int, itemsize: int) -> int:
    """Return the bytes of the keys, values and latents of one slot.

    States of recurrent mixers are not counted, because they do not grow.
    """
    def of(mixer: str) -> int:
        keys = cfg.of(mixer)
        latent = keys.latent
        width = latent.kv_dim + latent.rope_dim if latent.kv_dim else 2 * keys.num_kv_heads * keys.head_dim
        return width * places(keys.window if pattern.mixer(mixer).windowed else 0, room)
    return itemsize * sum(of(kind.mixer) for kind in pattern.kinds(cfg) if pattern.mixer(kind.mixer).attends)


def check(cfg: Model) -> None:
    """Check that the cache has a state for every mixer. Raises: ValueError for a mixer without `cache = True`."""
    for mixer in find_lacking(cfg, "cache"):
        raise ValueError(f"{mixer} has no cache, so the model cannot generate; if it reads other tokens by one call of "
                         f"ex.engines only, give its class `cache = True`")


def empty(model: Transformer, ex: Execution, p, slots: int, room: int) -> list:
    """Return the shapes of the cache as jax.ShapeDtypeStructs. room: from `round_room`."""
    batch = {name: jax.ShapeDtypeStruct((slots, room), jnp.int32)
             for name in ("tokens", "segments", "index", "positions", "length")}
    batch["sequence"] = jax.ShapeDtypeStruct((slots,), jnp.int32)
    return jax.eval_shape(lambda p, batch: read(model, ex, p, batch), p, batch)


def constrain(layout: Layout, caches: list) -> list:
    """Return the cache with the sharding of its heads and slots."""
    return [tuple(_Layer(layout, arrays).constrain() for arrays in group) for group in caches]


def read(model: Transformer, ex: Execution, p, batch) -> list:
    """Run the prompts through the layers and return their caches.

    Prompts are padded on the left, with segment 0. The last token is at the last place.
    """
    x_BTD, inputs, caches = model.embed(ex, p, batch), model.inputs(batch), []
    for first, group in model.number_groups():
        def repeat(x_BTD, scanned, group=group):
            weights, number = scanned
            kept = [_Writing(ex) for _ in group.period]
            for i, layer in enumerate(group.period):
                bound = layer.bind(weights[i])
                x_BTD, _ = bound(_through(ex, kept[i]), x_BTD, inputs, number + i)
                if bound.mixer is not None and len(kept[i].cache) not in (2, 4):
                    raise ValueError(f"the mixer {type(bound.mixer).__name__} leaves no state in the cache, so the "
                                     f"model cannot generate: a layer calls attention, or convolve and recur, once")
            return x_BTD, tuple(layer.cache for layer in kept)
        x_BTD, cache = lax.scan(repeat, x_BTD, (model.weights(p, group), group.numbers(first)))
        caches.append(cache)
    return caches


def lay(layout: Layout, caches: list, prompts: list, source_S, tokens_S) -> list:
    """Return the cache with prompts from `read` copied into some slots.

    source_S: the number of the slot's prompt among those of its shard of the batch; with -1 the slot is unchanged.
    tokens_S: number of tokens of the prompt.
    """
    return [tuple(_Layer(layout, arrays).lay(new, source_S, tokens_S) for arrays, new in zip(group, read, strict=True))
            for group, read in zip(caches, prompts, strict=True)]


def extend(model: Transformer, ex: Execution, p, batch, caches: list, at_S, live_S) -> tuple[jax.Array, list]:
    """Run one token per slot, at its position at_S. Return (output of the last layer [S, 1, D], the cache).

    batch: as in training, with T = 1. live_S: the slots whose output is used. The loop over places does not reach
    further for the other slots.
    """
    x_BTD, inputs, new = model.embed(ex, p, batch), model.inputs(batch), []
    last = jnp.max(jnp.where(live_S, at_S, 0))
    reach = _Reach(at_S, last, jnp.where(live_S, at_S, -1) if ex.engines.by_kernels else None)
    for (first, group), cache in zip(model.number_groups(), caches, strict=True):
        def repeat(carry, scanned, group=group):
            # The cache is carried, not scanned, so that one token is written in place and nothing else moves.
            x_BTD, cache = carry
            weights, number, index = scanned
            for i, layer in enumerate(group.period):
                engine = _Reading(cache[i], index, reach)
                x_BTD, _ = layer.bind(weights[i])(_through(ex, engine), x_BTD, inputs, number + i)
                cache = (*cache[:i], engine.cache, *cache[i + 1:])
            return (x_BTD, cache), None
        scanned = (model.weights(p, group), group.numbers(first), jnp.arange(group.repeats))
        (x_BTD, cache), _ = lax.scan(repeat, (x_BTD, cache), scanned)
        new.append(cache)
    return x_BTD, new


def _through(ex: Execution, cached) -> Execution:
    recurrence = ex.engines.recurrence and ex.engines.recurrence._replace(convolve=cached.convolve, recur=cached.recur)
    return dataclasses.replace(ex, engines=dataclasses.replace(ex.engines, attention=cached.attend,
                                                               recurrence=recurrence))


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The arrays of one layer of a period: none, two of attention, or four of a recurrent mixer."""
    layout: Layout
    arrays: tuple

    @property
    def recurrent(self) -> bool:
        return len(self.arrays) > 2

    def constrain(self) -> tuple:
        if self.recurrent:
            *tails, state = self.arrays
            return (*(self.layout.act(x, None, "batch", None, axis, None)
                      for x, axis in zip(tails, CHANNEL_AXES, strict=True)),
                    self.layout.act(state, None, "batch", "heads", None, None))
        return tuple(_constrain(self.layout, x, None, "batch") for x in self.arrays)

    def lay(self, prompts: tuple, source_S, tokens_S) -> tuple:
        if not self.recurrent:
            return tuple(_constrain(self.layout, self._roll(*pair, source_S, tokens_S), None, "batch")
                         for pair in zip(self.arrays, prompts, strict=True))
        # A prompt without tokens leaves nothing in the state; the values that were read for it are padding.

        def was(x):
            return jnp.where(_over(tokens_S > 0, x), x, 0)
        new = [jnp.where(_over(source_S >= 0, x), was(self._of_slots(read, source_S)), x).astype(x.dtype)
               for x, read in zip(self.arrays, prompts, strict=True)]
        return _Layer(self.layout, tuple(new)).constrain()

    def _of_slots(self, read, source_S):
        """Return the prompt of each slot, from the slot's own shard, so that nothing crosses devices."""
        shards = self.layout.num_shards(self.layout.batch_axes)
        R, B = read.shape[:2]
        by_shard = read.reshape(R, shards, B // shards, *read.shape[2:])
        take = jax.vmap(lambda read, source: read[:, source], in_axes=(1, 0), out_axes=1)
        return take(by_shard, jnp.maximum(source_S, 0).reshape(shards, -1)).reshape(R, len(source_S), *read.shape[2:])

    def _roll(self, x, read, source_S, tokens_S):
        """Return the places of the cache, taken from prompts whose last token is at the end."""
        T, R = read.shape[-2], x.shape[-2]
        place = jnp.arange(T)
        last_S1 = tokens_S[:, None] - 1
        position = last_S1 - (last_S1 - place) % R
        mine = self._of_slots(read, source_S)
        take = jax.vmap(lambda rows, at: jnp.take(rows, at, rows.ndim - 2), in_axes=(1, 0), out_axes=1)
        mine = take(mine, jnp.clip(position + T - tokens_S[:, None], 0, T - 1))
        new = jnp.where(_over(source_S >= 0, mine), mine.astype(x.dtype), lax.slice_in_dim(x, 0, T, axis=-2))
        return lax.dynamic_update_slice(x, new, (0,) * x.ndim)


def _over(flag_S, x):
    """Reshape a flag of each slot so that it broadcasts to [repeats, slots, …]."""
    return flag_S.reshape(1, -1, *[1] * (x.ndim - 2))


class _Writing:
    """The mixer of a layer over prompts. It sets `cache`."""

    def __init__(self, ex: Execution):
        self.ex = ex
        self.cache: tuple[jax.Array, ...] = ()

    def _begin(self) -> None:
        if self.cache:
            raise ValueError("a layer reads other tokens twice, but the cache has the state of one call of ex.engines")

    def attend(self, layout: Layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, *, mask: Mask, **kind):
        self._begin()
        T = k_BTKH.shape[1]
        first = T - places(mask.window, T)
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


class _Reach(NamedTuple):
    """How far each slot has written.

    at_S: position of each slot's token. last: the largest position of a live slot. live_S: at_S, with -1 for slots that
    are done; None unless `Execution.by_kernels`.
    """
    at_S: jax.Array
    last: jax.Array
    live_S: jax.Array | None


class _Reading:
    """The mixer of a layer for one token of each slot. It writes the token into the layer's entry of the stacked cache.
    """

    def __init__(self, cache, index, reach: _Reach):
        self.cache, self.index, self.at_S, self.reach = cache, index, reach.at_S, reach

    def convolve(self, layout: Layout, xs, ws, segments_BT, axes=CHANNEL_AXES):
        """Convolve one token of each slot with the tail in the cache.

        segments are 0 for slots that are done; their output is not read.
        """
        width, ys, tails = ws[0].shape[0], [], []
        for x, w, before in zip(xs, ws, map(self._own, self.cache[:3]), strict=True):
            before = convolution.Tail(before, jnp.ones(before.shape[:2], segments_BT.dtype))
            ys.append(convolution.convolve(x, w, jnp.ones_like(segments_BT), before))
            tails.append(convolution.tail(x, segments_BT, width, before).x_BSND)
        self.cache = (*map(self._replace_token, self.cache[:3], tails), self.cache[3])
        return tuple(ys)

    def recur(self, layout: Layout, q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT):
        one_segment = jnp.ones_like(segments_BT)
        o_BTNV, S_BNHV = recurrence.step(q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, one_segment, recurrence.RecurrentState(
            self._own(self.cache[3]), one_segment[:, 0]))
        S_BNHV = layout.act(S_BNHV, "batch", "heads", None, None)
        self.cache = (*self.cache[:3], self._replace_token(self.cache[3], S_BNHV))
        return o_BTNV

    def _own(self, stack):
        return lax.dynamic_index_in_dim(stack, self.index, 0, keepdims=False)

    def _replace_token(self, stack, new):
        return lax.dynamic_update_index_in_dim(stack, new.astype(stack.dtype), self.index, 0)

    def attend(self, layout: Layout, q_BTNH, *others, mask, scores, sinks_N=None, expansion: Expansion | None = None,
               bounded: bool = False):
        """Return (attention to the cache, None). others: the arrays that the cache stores for these tokens, and their
        segments. Scores in generation are not bounded."""
        assert not bounded
        B, T, N, H = q_BTNH.shape
        if expansion is None and self.reach.live_S is not None and _in_one_kernel(layout, N, *self.cache):
            k_BTKH, v_BTKV = others[:2]
            return self._by_kernel(layout, q_BTNH, k_BTKH, v_BTKV, mask, scores, sinks_N), None
        self.cache = tuple(self._write(layout, *pair) for pair in zip(self.cache, others[:2], strict=True))
        if expansion is None:
            q_BKGH = q_BTNH.reshape(B, self.cache[0].shape[2], -1, H)

            def products_with(k_BKSH, _):
                return products.einsum("BKGH,BKSH->BKGS", q_BKGH, k_BKSH, jnp.float32)
        else:
            products_with = _against_latents(expansion, q_BTNH[:, 0])

        def values(first, second):
            return second if expansion is None else first[:, None]

        def score(*part):
            return cap(products_with(*part) * scores.scale_for(H), scores.softcap)
        o_BTNV = self._over_places(layout, N, score, values, mask, sinks_N).reshape(B, T, N, -1)
        if expansion is not None:
            value_CNV = expansion.gather(expansion.value_CNV)
            o_BTNV = products.einsum("BTNC,CNV->BTNV", o_BTNV.astype(value_CNV.dtype), value_CNV)
        return o_BTNV.astype(q_BTNH.dtype), None

    def _by_kernel(self, layout: Layout, q_BTNH, k_BTKH, v_BTKV, mask: Mask, scores, sinks_N):
        def spec(*logical):
            return layout.spec("activations", logical)
        head, kv_head, stack = (spec("batch", "heads", None), spec("batch", "kv_heads", None),
                                spec(None, "batch", "kv_heads", None, None))
        sinks = () if sinks_N is None else (sinks_N,)

        def local(token, cache, layer, at_S, *sinks):
            return decode.attend(token, cache, layer, at_S, scores, mask.window, *sinks)
        o_SNV, cache = on_shards(
            local, (decode.Token(head, kv_head, kv_head), (stack, stack), P(), spec("batch"),
                    *(spec("heads") for _ in sinks)), (head, (stack, stack)))(
            decode.Token(q_BTNH[:, 0], k_BTKH[:, 0], v_BTKV[:, 0]), self.cache, self.index, self.reach.live_S, *sinks)
        self.cache = tuple(_constrain(layout, x, None, "batch") for x in cache)
        return o_SNV[:, None]

    def _over_places(self, layout: Layout, N: int, score, values, mask: Mask, sinks_N):
        """Return [B, K, G, V]: attention to the visible places of each slot, block by block.

        A block without visible places of a slot adds exact zeros, so a slot does not depend on how far the loop runs
        for others. Source: FlashAttention, arXiv:2205.14135.
        """
        R = self.cache[0].shape[-2]
        block = min(_block(R), R)
        at_B1 = self.at_S[:, None]

        def visit(j, carry):
            most, total, o = carry
            part = [_constrain(layout, self._block_of(x, j * block, block), "batch") for x in self.cache]
            s_BKGS, v_BKSV = score(*part), values(*part)
            # The position that a place holds: the newest of the positions that map to it.
            position_BS = at_B1 - (at_B1 - (j * block + jnp.arange(block))) % R
            seen_BS = position_BS >= 0
            if mask.window:
                seen_BS &= at_B1 - position_BS < mask.window
            s_BKGS = jnp.where(seen_BS[:, None, None], s_BKGS, MASKED)
            new = jnp.maximum(most, s_BKGS.max(-1))
            p_BKGS = jnp.where(seen_BS[:, None, None], jnp.exp(s_BKGS - new[..., None]), 0.0)
            fade = jnp.exp(most - new)
            added = products.einsum("BKGS,BKSV->BKGV", p_BKGS.astype(v_BKSV.dtype), v_BKSV, jnp.float32)
            return new, total * fade + p_BKGS.sum(-1), o * fade[..., None] + added
        heads = jax.eval_shape(lambda: visit(0, (jnp.float32(MASKED), jnp.float32(0), jnp.float32(0)))[2])
        most = jnp.full(heads.shape[:3], MASKED, jnp.float32)
        total = jnp.zeros_like(most)
        if sinks_N is not None:     # a score without a value
            most = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(1, *heads.shape[1:3]), most.shape)
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
        """Return the stack with one token of each slot written at its place.

        It is written as a scatter with a batch dim, which stays on its device.
        """
        B, place = new.shape[0], stack.ndim - 2
        at = jnp.stack([jnp.broadcast_to(self.index, (B,)), self.at_S % stack.shape[place]], -1).astype(jnp.int32)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(1, new.ndim - 1)), inserted_window_dims=(0, place),
            scatter_dims_to_operand_dims=(0, place), operand_batching_dims=(1,), scatter_indices_batching_dims=(0,))
        stack = lax.scatter(stack, at, new[:, 0].astype(stack.dtype), numbers, unique_indices=True,
                            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
        return _constrain(layout, stack, None, "batch")


def _in_one_kernel(layout: Layout, N: int, keys, values) -> bool:
    """Return whether `kernels.decode` supports this layer.

    Query and KV heads must be sharded over the same mesh axes, and head_dim must not be sharded.
    """

    def split(logical):
        return layout.mesh_axes("activations", logical)
    return split("heads") == split("kv_heads") and not split("head_dim") and decode.fits(
        N // keys.shape[2], keys.shape[-1], values.shape[-1], keys.shape[-2])


def _against_latents(expansion: Expansion, q_BNH):
    """Return a function (latents, rotated keys) -> query-key products [B, 1, N, S].

    It does not expand the keys: each query is multiplied by the weight of its head's keys instead (DeepSeek-V2,
    arXiv:2405.04434, 2.1.2).
    """
    key_CNH = expansion.gather(expansion.key_CNH)
    plain = key_CNH.shape[2]
    q_BNC = products.einsum("BNH,CNH->BNC", q_BNH[..., :plain], key_CNH)

    def with_keys(c_BSC, r_BSR):
        s_BNS = products.einsum("BNC,BSC->BNS", q_BNC, c_BSC, jnp.float32)
        return (s_BNS + products.einsum("BNR,BSR->BNS", q_BNH[..., plain:], r_BSR, jnp.float32))[:, None]
    return with_keys


def _constrain(layout: Layout, x, *leading: str | None):
    heads = ("kv_heads",) if x.ndim == len(leading) + 3 else ()         # latents have no heads
    return layout.act(x, *leading, *heads, None, "head_dim" if heads else None)


def _by_head(x):
    """Return keys or values [B, T, K, H] in the cache's order."""
    return x.swapaxes(1, 2) if x.ndim == 4 else x
