"""Decode attention: one query token per slot against its KV cache, as a Pallas kernel lowered through Triton.

A slot is the cache of one sequence; a place in it holds one token. The kernel also writes the token's key and value
into the cache, in place. A program computes one KV head of one slot with all query heads of this KV head, and reads
only the places that this slot has written. With few slots and heads the places are split over several programs, whose
outputs are combined by their log-sum-exp (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023). A slot's output does not
depend on the length of other slots.

XLA alone would compile two scatters and a loop over blocks up to the longest slot. An iteration of this loop has about
ten kernels, and the host must check whether the loop has ended. XLA has no partitioning rule for the kernel: as with
`pallas`, all mesh axes must be manual. This module knows no mesh.
"""
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels import tiles
from meshtrain.kernels.engine import LOG2E, MASKED, Scores
from meshtrain.kernels.pallas import MIN_WIDTH, dot, compute_scores
from meshtrain.lazy import triton

NAME = "meshtrain_decode"           # kernel name in profiles and in the compiled program
MOST_PLACES = 64                    # places per block; the number of places of a slot must be a multiple of it
BLOCK_BYTES = 2**15                 # most bytes of keys and values per block; three blocks fit in shared memory
MOST_WIDTH = 256                    # largest head_dim of keys and of values
MOST_OUTPUTS = 4096                 # a program's output elements, held in registers
MOST_SPLITS = 16                    # programs for one KV head of one slot


def fits(queries: int, key_dim: int, value_dim: int, room: int) -> bool:
    """Return whether the kernel supports these sizes.

    queries: query heads per KV head. room: places per slot.
    """
    return (max(key_dim, value_dim) <= MOST_WIDTH and _pad_rows(queries) * _pad_rows(value_dim) <= MOST_OUTPUTS
            and room % MOST_PLACES == 0)


def _pad_rows(n: int) -> int:
    return max(MIN_WIDTH, pl.next_power_of_2(n))


class Token(NamedTuple):
    """The arrays that a layer has computed for the newest token of each slot."""
    q_SNH: jax.Array
    key_SKH: jax.Array
    value_SKV: jax.Array


class _Shape(NamedTuple):
    G: int          # query heads per KV head
    H: int          # head_dim of keys
    V: int          # head_dim of values
    R: int          # places per slot
    block: int      # places per block
    splits: int     # programs per KV head and slot


def _load(ref, index, live):
    return triton.load(ref.at[index], mask=live, other=0)


def _grid(rows, columns):
    return jnp.broadcast_arrays(rows[:, None], columns[None, :])


def _kernel(layer_ref, at_ref, q_ref, key_ref, value_ref, sinks_ref, keys_ref, values_ref, o_ref, lse_ref, keys_out_ref,
            values_out_ref, *, of: _Shape, scores: Scores, window: int, sinks: bool):
    s, k, split = (pl.program_id(i) for i in range(3))
    layer, at = layer_ref[0], at_ref[s]
    rows, widths, depths = (jnp.arange(_pad_rows(n)) for n in (of.G, of.H, of.V))
    q_at, o_at = _grid(rows, widths), _grid(rows, depths)
    q = _load(q_ref, (s, k * of.G + q_at[0], q_at[1]), (q_at[0] < of.G) & (q_at[1] < of.H))

    def score(product):
        return compute_scores(product, scores.scale_for(of.H), scores.softcap)[0]

    def visit(j, carry):
        most, total, o = carry
        places = j * of.block + jnp.arange(of.block)
        at_key, at_value = _grid(places, widths), _grid(places, depths)
        keys = _load(keys_ref, (layer, s, k, *at_key), at_key[1] < of.H)
        values = _load(values_ref, (layer, s, k, *at_value), at_value[1] < of.V)
        # A place holds the newest earlier position that maps to it. back: distance of the place from the token's
        # predecessor.
        back = at - 1 - places
        seen = (back >= 0) & (lax.rem(back, jnp.int32(of.R)) + 1 < (window or of.R))
        product = jnp.where(seen[None, :], score(dot(q, keys.T)), MASKED)
        new = jnp.maximum(most, product.max(1))
        p = jnp.where(seen[None, :], jnp.exp2(product - new[:, None]), 0.0)
        fade = jnp.exp2(most - new)
        return new, total * fade + p.sum(1), o * fade[:, None] + dot(p.astype(values.dtype), values)

    blocks = (jnp.clip(at, 0, of.R) + of.block - 1) // of.block
    each = (blocks + of.splits - 1) // of.splits
    first = (split == 0) & (at >= 0)
    most = jnp.full(rows.shape, MASKED, jnp.float32)
    total = jnp.zeros(rows.shape, jnp.float32)
    o = jnp.zeros(o_at[0].shape, jnp.float32)
    if sinks:                               # attention sinks: a score without a value
        sink = _load(sinks_ref, (k * of.G + rows,), rows < of.G)
        most, total = jnp.where(first, sink * LOG2E, most), jnp.where(first, 1.0, total)
    most, total, o = lax.fori_loop(split * each, jnp.minimum((split + 1) * each, blocks), visit, (most, total, o))

    # The first split adds the token's own key and value, and stores them.
    key = _load(key_ref, (s, k, widths), widths < of.H)
    value = _load(value_ref, (s, k, depths), depths < of.V)
    own = score((q.astype(jnp.float32) * key.astype(jnp.float32)[None, :]).sum(1))
    new = jnp.where(first, jnp.maximum(most, own), most)
    p, fade = jnp.where(first, jnp.exp2(own - new), 0.0), jnp.exp2(most - new)
    total = total * fade + p
    o = o * fade[:, None] + p[:, None] * value.astype(jnp.float32)[None, :]
    place = lax.rem(jnp.maximum(at, 0), jnp.int32(of.R))
    triton.store(keys_out_ref.at[layer, s, k, place, widths], key, mask=first & (widths < of.H))
    triton.store(values_out_ref.at[layer, s, k, place, depths], value, mask=first & (depths < of.V))

    live = rows < of.G
    o = o / jnp.maximum(total, 1e-30)[:, None]
    triton.store(o_ref.at[split, s, k * of.G + o_at[0], o_at[1]], o.astype(o_ref.dtype),
                 mask=(o_at[0] < of.G) & (o_at[1] < of.V))
    triton.store(lse_ref.at[split, s, k * of.G + rows], jnp.where(total > 0, new + jnp.log2(total), MASKED), mask=live)


def attend(token: Token, cache: tuple[jax.Array, jax.Array], layer, at_S, scores: Scores, window: int = 0, sinks_N=None,
           interpret: bool = False):
    """Compute the attention of each slot's newest token.

    Return (o [S, N, V] in q's dtype, the cache with the token written).

    cache: keys [L, S, K, R, H] and values [L, S, K, R, V] of all layers. Position p is stored at place p mod R. layer:
    index into L. at_S: int32, the token's position; -1: there is no token, o is 0, and the slot's cache is unchanged.
    window: see `engine.Mask`. sinks_N: one score per query head, without a value.
    """
    (S, N, H), (keys, values) = token.q_SNH.shape, cache
    *_, K, R, V = values.shape
    place_bytes = (_pad_rows(H) + _pad_rows(V)) * keys.dtype.itemsize
    block = min(MOST_PLACES, max(MIN_WIDTH, 1 << (BLOCK_BYTES // place_bytes).bit_length() - 1))
    splits = max(1, min(MOST_SPLITS, R // block, tiles.FULL // (S * K)))
    of, dtype = _Shape(N // K, H, V, R, block, splits), token.q_SNH.dtype
    sinks = jnp.zeros(1, jnp.float32) if sinks_N is None else sinks_N.astype(jnp.float32)

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    out_shape = (jax.ShapeDtypeStruct((splits, S, N, V), dtype if splits == 1 else jnp.float32),
                 jax.ShapeDtypeStruct((splits, S, N), jnp.float32), shape(keys), shape(values))
    args = (jnp.reshape(layer, 1).astype(jnp.int32), at_S, token.q_SNH, token.key_SKH.astype(keys.dtype),
            token.value_SKV.astype(values.dtype), sinks, keys, values)
    o, lse, *cache = pl.pallas_call(
        partial(_kernel, of=of, scores=scores, window=window, sinks=sinks_N is not None), grid=(S, K, splits),
        in_specs=[pl.no_block_spec] * len(args), out_specs=[pl.no_block_spec] * 4, out_shape=out_shape,
        input_output_aliases={6: 2, 7: 3}, name=NAME, interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3))(*args)
    if splits == 1:
        return o[0], tuple(cache)
    weight = jnp.exp2(lse - lse.max(0))
    o_SNV = (weight[..., None] * o).sum(0) / weight.sum(0)[..., None]
    return o_SNV.astype(dtype), tuple(cache)
