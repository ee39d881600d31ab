"""Attention without a score matrix, compiled by XLA: blocks of queries against blocks of keys, with a running softmax.

The list of visited block pairs is static, on or below the diagonal alone where it is causal and none beyond the window, so the
compiled loop has a known length. Scores are float32; every matmul takes its operands in the compute dtype, in the backward too.
Source: FlashAttention-2, arXiv:2307.08691. Knows no mesh.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.kernels.engine import MASKED, Engine

BLOCK = 512          # tokens; the largest score block is [B, N, BLOCK, BLOCK] float32


def engine(block: int = BLOCK, window: int = 0, softcap: float = 0.0) -> Engine:
    """The engine in blocks of at most `block` tokens. Its memory beyond arguments and results is [B, N, block, block].

    window: tokens that a token sees, itself among them, where it is causal, and it always must be then; 0: all before it. softcap: what tanh keeps
    scores within; 0: nothing.
    """
    options = dict(block=block, window=window, softcap=softcap)
    return Engine(partial(_forward, **options), partial(_backward, **options))


def _forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, causal, *, block, window, softcap):
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    queries, keys = _Blocks(T, block), _Blocks(k_BSKH.shape[1], block)
    # Differentiating a scan over layers moves out of it whatever does not depend on the layer, and keeps it: here the masks
    # of all block pairs, B·N·T·S bytes. Behind the barrier everything depends on q.
    pairs = _pairs(queries, keys, causal, window)
    q_BTNH, q_segments_BT, k_segments_BS, pairs = jax.lax.optimization_barrier((q_BTNH, q_segments_BT, k_segments_BS, pairs))
    q = queries.pad(q_BTNH.reshape(B, T, K, N // K, H))
    k, v = keys.pad(k_BSKH), keys.pad(v_BSKH)
    q_seg, k_seg = queries.pad(q_segments_BT, -1), keys.pad(k_segments_BS, -2)     # padding sees and is seen by nothing

    def visit(carry, pair):
        o, l, m = carry                       # unnormalised output, sum and maximum so far, float32
        i, j = pair
        k_j, v_j = keys.take(k, j), keys.take(v, j)
        s = _scores(queries.take(q, i), k_j, queries.take(q_seg, i), keys.take(k_seg, j),
                    queries.size * (i - j) if causal else None, window, softcap)
        m_old, l_old, o_old = queries.take(m, i), queries.take(l, i), queries.take(o, i)
        m_new = jnp.maximum(m_old, s.max(-1).transpose(0, 3, 1, 2))
        p = jnp.exp(s - m_new.transpose(0, 2, 3, 1)[..., None])
        p = jnp.where(s > MASKED / 2, p, 0.0)
        keep = jnp.exp(m_old - m_new)
        l_new = l_old * keep + p.sum(-1).transpose(0, 3, 1, 2)
        pv = jnp.einsum("BKGTS,BSKH->BTKGH", p.astype(v.dtype), v_j, preferred_element_type=jnp.float32)
        o_new = o_old * keep[..., None] + pv
        return (queries.put(o, o_new, i), queries.put(l, l_new, i), queries.put(m, m_new, i)), None

    zeros = jnp.zeros_like(q, jnp.float32)
    start = zeros, zeros[..., 0], zeros[..., 0] + MASKED
    (o, l, m), _ = jax.lax.scan(visit, start, pairs)
    o = jnp.where(l[..., None] > 0, o / jnp.where(l > 0, l, 1.0)[..., None], 0.0)
    lse = jnp.where(l > 0, m + jnp.log(jnp.where(l > 0, l, 1.0)), MASKED)
    return o[:, :T].reshape(B, T, N, H), lse[:, :T].reshape(B, T, N)


def _backward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, o_BTNH, lse_BTN, do_BTNH, causal, *, block, window, softcap):
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    queries, keys = _Blocks(T, block), _Blocks(S, block)
    delta_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), -1)
    grouped = lambda x: queries.pad(x.reshape(B, T, K, N // K, *x.shape[3:]))
    q, do, lse, delta = grouped(q_BTNH), grouped(do_BTNH.astype(q_BTNH.dtype)), grouped(lse_BTN), grouped(delta_BTN)
    k, v = keys.pad(k_BSKH), keys.pad(v_BSKH)
    q_seg, k_seg = queries.pad(q_segments_BT, -1), keys.pad(k_segments_BS, -2)

    def visit(carry, pair):
        dq, dk, dv = carry
        i, j = pair
        q_i, do_i, k_j, v_j = queries.take(q, i), queries.take(do, i), keys.take(k, j), keys.take(v, j)
        lead = lambda x: queries.take(x, i).transpose(0, 2, 3, 1)[..., None]
        s = _scores(q_i, k_j, queries.take(q_seg, i), keys.take(k_seg, j), queries.size * (i - j) if causal else None, window, softcap)
        p = jnp.where(s > MASKED / 2, jnp.exp(s - lead(lse)), 0.0)
        dp = jnp.einsum("BTKGH,BSKH->BKGTS", do_i, v_j, preferred_element_type=jnp.float32)
        # Back to the compute dtype before the matmuls: a float32 cotangent would make both of them float32 dots.
        slope = jnp.where(s > MASKED / 2, 1 - jnp.square(s / softcap), 0.0) if softcap else 1.0
        ds = (p * (dp - lead(delta)) * (slope * H ** -0.5)).astype(q.dtype)
        f32 = dict(preferred_element_type=jnp.float32)
        dq = queries.put(dq, queries.take(dq, i) + jnp.einsum("BKGTS,BSKH->BTKGH", ds, k_j, **f32), i)
        dk = keys.put(dk, keys.take(dk, j) + jnp.einsum("BKGTS,BTKGH->BSKH", ds, q_i, **f32), j)
        dv = keys.put(dv, keys.take(dv, j) + jnp.einsum("BKGTS,BTKGH->BSKH", p.astype(v.dtype), do_i, **f32), j)
        return (dq, dk, dv), None

    start = tuple(jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(visit, start, _pairs(queries, keys, causal, window))
    return dq[:, :T].reshape(B, T, N, H), dk[:, :S], dv[:, :S]


class _Blocks:
    """A sequence in equal blocks of at most `block` tokens, padded at its end."""

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


def _pairs(queries: _Blocks, keys: _Blocks, causal: bool, window: int):
    """(i, j) int32 arrays of the visited block pairs, by blocks of queries: j <= i where causal, and within the window."""
    assert causal or not window, "where queries and keys stand apart is not known here"
    seen = lambda i, j: not causal or j <= i and (not window or (i - j - 1) * queries.size + 1 < window)
    pairs = [(i, j) for i in range(queries.count) for j in range(keys.count) if seen(i, j)]
    return tuple(jnp.asarray(numbers) for numbers in np.array(pairs, np.int32).T)


def _scores(q_i, k_j, q_seg, k_seg, ahead, window, softcap):
    """float32 [B, K, G, T, S] of one block pair, MASKED across documents. ahead: by how many tokens the queries begin
    after the keys, and later keys are MASKED, and those beyond the window; None: all keys are seen."""
    s = jnp.einsum("BTKGH,BSKH->BKGTS", q_i, k_j, preferred_element_type=jnp.float32) * q_i.shape[-1] ** -0.5
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    seen = q_seg[:, :, None] == k_seg[:, None, :]
    if ahead is not None:
        t, s_at = ahead + jnp.arange(q_i.shape[1])[:, None], jnp.arange(k_j.shape[1])[None, :]
        seen &= t >= s_at
        if window:
            seen &= t - s_at < window
    return jnp.where(seen[:, None, None], s, MASKED)
