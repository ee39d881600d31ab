"""Blockwise attention with an online softmax in XLA: the score matrix is never materialized.

The block pairs that are visible under the mask are a static list, so the compiled loop has a fixed length. Scores are
float32. Matmul operands have the compute dtype. Source: FlashAttention-2, arXiv:2307.08691. This module knows no mesh.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.kernels import products
from meshtrain.kernels.engine import MASKED, Engine, Mask, Scores

BLOCK = 512          # tokens; the largest score block is [B, N, BLOCK, BLOCK] float32


def engine(block: int = BLOCK, scores: Scores = Scores()) -> Engine:
    """Return the blockwise engine with at most `block` tokens per block. Temporary memory: O(B·N·block²)."""
    return Engine(partial(_forward, block=block, scores=scores), partial(_backward, block=block, scores=scores))


def _forward(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, mask, *, block, scores):
    B, T, N, H = q_BTNH.shape
    K, V = v_BSKV.shape[2:]
    queries, keys = _Blocks(T, block), _Blocks(k_BSKH.shape[1], block)
    # Without the barrier, differentiating a scan over layers hoists values that do not depend on the layer and saves
    # them. These are the masks of all block pairs: B·N·T·S bytes.
    pairs = _pairs(queries, keys, mask)
    q_BTNH, q_segments_BT, k_segments_BS, pairs = jax.lax.optimization_barrier(
        (q_BTNH, q_segments_BT, k_segments_BS, pairs))
    q = queries.pad(q_BTNH.reshape(B, T, K, N // K, H))
    k, v = keys.pad(k_BSKH), keys.pad(v_BSKV)
    q_seg, k_seg = _segments(queries, keys, q_segments_BT, k_segments_BS, mask)

    def visit(carry, pair):
        o, l, m = carry                       # unnormalized output, running sum and maximum, float32
        i, j = pair
        k_j, v_j = keys.take(k, j), keys.take(v, j)
        seen = _find_visible(queries.take(q_seg, i), keys.take(k_seg, j), queries.size * i, keys.size * j, mask)
        s = _scores(queries.take(q, i), k_j, seen, scores)
        m_old, l_old, o_old = queries.take(m, i), queries.take(l, i), queries.take(o, i)
        m_new = jnp.maximum(m_old, s.max(-1).transpose(0, 3, 1, 2))
        p = jnp.exp(s - m_new.transpose(0, 2, 3, 1)[..., None])
        p = jnp.where(s > MASKED / 2, p, 0.0)
        keep = jnp.exp(m_old - m_new)
        l_new = l_old * keep + p.sum(-1).transpose(0, 3, 1, 2)
        pv = products.einsum("BKGTS,BSKV->BTKGV", p.astype(v.dtype), v_j, jnp.float32)
        o_new = o_old * keep[..., None] + pv
        return (queries.put(o, o_new, i), queries.put(l, l_new, i), queries.put(m, m_new, i)), None

    # derived from q: under varying-axes checks (`check_vma`) the carry must vary over the same axes as the results
    zeros = jnp.zeros_like(q[..., 0], jnp.float32)
    start = jnp.broadcast_to(zeros[..., None], (*zeros.shape, V)), zeros, zeros + MASKED
    (o, l, m), _ = jax.lax.scan(visit, start, pairs)
    o = jnp.where(l[..., None] > 0, o / jnp.where(l > 0, l, 1.0)[..., None], 0.0)
    lse = jnp.where(l > 0, m + jnp.log(jnp.where(l > 0, l, 1.0)), MASKED)
    return o[:, :T].reshape(B, T, N, V), lse[:, :T].reshape(B, T, N)


def _backward(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, o_BTNV, lse_BTN, do_BTNV, mask, *, block, scores):
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    queries, keys = _Blocks(T, block), _Blocks(S, block)
    delta_BTN = jnp.sum(do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32), -1)

    def group_heads(x):
        return queries.pad(x.reshape(B, T, K, N // K, *x.shape[3:]))
    q, do, lse, delta = map(group_heads, (q_BTNH, do_BTNV.astype(q_BTNH.dtype), lse_BTN, delta_BTN))
    k, v = keys.pad(k_BSKH), keys.pad(v_BSKV)
    q_seg, k_seg = _segments(queries, keys, q_segments_BT, k_segments_BS, mask)

    def visit(carry, pair):
        dq, dk, dv = carry
        i, j = pair
        q_i, do_i, k_j, v_j = queries.take(q, i), queries.take(do, i), keys.take(k, j), keys.take(v, j)

        def lead(x):
            return queries.take(x, i).transpose(0, 2, 3, 1)[..., None]
        seen = _find_visible(queries.take(q_seg, i), keys.take(k_seg, j), queries.size * i, keys.size * j, mask)
        s = _scores(q_i, k_j, seen, scores)
        p = jnp.where(s > MASKED / 2, jnp.exp(s - lead(lse)), 0.0)
        dp = products.einsum("BTKGV,BSKV->BKGTS", do_i, v_j, jnp.float32)
        # Cast to the compute dtype: a float32 cotangent would make both matmuls float32.
        slope = jnp.where(s > MASKED / 2, 1 - jnp.square(s / scores.softcap), 0.0) if scores.softcap else 1.0
        ds = (p * (dp - lead(delta)) * (slope * scores.scale_for(H))).astype(q.dtype)

        def product(eq, a, b):
            return products.einsum(eq, a, b, jnp.float32)
        dq = queries.put(dq, queries.take(dq, i) + product("BKGTS,BSKH->BTKGH", ds, k_j), i)
        dk = keys.put(dk, keys.take(dk, j) + product("BKGTS,BTKGH->BSKH", ds, q_i), j)
        dv = keys.put(dv, keys.take(dv, j) + product("BKGTS,BTKGV->BSKV", p.astype(v.dtype), do_i), j)
        return (dq, dk, dv), None

    start = tuple(jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(visit, start, _pairs(queries, keys, mask))
    return dq[:, :T].reshape(B, T, N, H), dk[:, :S], dv[:, :S]


class _Blocks:
    """A sequence padded to equal blocks of at most `block` tokens."""

    def __init__(self, length: int, block: int):
        self.length, self.count = length, -(-length // block)
        self.size = -(-length // self.count)

    def pad(self, x, value=0):
        widths = [(0, 0), (0, self.size * self.count - self.length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths, constant_values=value)

    def take(self, x, i):
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, 1)

    def put(self, x, value, i):
        return jax.lax.dynamic_update_slice_in_dim(x, value, i * self.size, 1)


def _pairs(queries: _Blocks, keys: _Blocks, mask: Mask):
    """Return (i, j), int32 arrays of the visible block pairs, in the order of query blocks."""
    i, j = np.indices((queries.count, keys.count))
    some, _ = mask.of_blocks(i * queries.size, (i + 1) * queries.size - 1, j * keys.size, (j + 1) * keys.size - 1)
    return tuple(jnp.asarray(numbers, jnp.int32) for numbers in np.nonzero(some))


def _segments(queries: _Blocks, keys: _Blocks, q_segments_BT, k_segments_BS, mask: Mask):
    """Return the segment ids, padded so that padding matches no segment."""
    if not mask.documents:
        q_segments_BT, k_segments_BS = jnp.zeros_like(q_segments_BT), jnp.zeros_like(k_segments_BS)
    return queries.pad(q_segments_BT, -1), keys.pad(k_segments_BS, -2)


def _find_visible(q_seg, k_seg, q_first, k_first, mask: Mask):
    """Return bool [B, T, S]: the visible pairs of tokens in one block pair."""
    within = mask.sees(q_first + jnp.arange(q_seg.shape[1])[:, None], k_first + jnp.arange(k_seg.shape[1]))
    seen = q_seg[:, :, None] == k_seg[:, None, :]
    return seen if within is None else seen & within


def _scores(q_i, k_j, seen, scores: Scores):
    """Return the scores [B, K, G, T, S] of one block pair, float32; MASKED for invisible pairs."""
    s = products.einsum("BTKGH,BSKH->BKGTS", q_i, k_j, jnp.float32) * scores.scale_for(q_i.shape[-1])
    if scores.softcap:
        s = scores.softcap * jnp.tanh(s / scores.softcap)
    return jnp.where(seen[:, None, None], s, MASKED)
