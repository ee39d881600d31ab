"""Causal attention without a score matrix: blocks of queries against blocks of keys, with a running softmax.

The contract of every engine is (o, lse) <- (q, k, v), and a backward that takes the o and lse of the whole row, so that a
ring or an all-gather over devices can be built from the same blocks (FlashAttention-2, arXiv:2307.08691). The list of
visited block pairs is static, on or below the diagonal alone where it is causal, so the compiled loop has a known length.
Scores are float32; every matmul takes its operands in the compute dtype, in the backward too. Knows no mesh axis.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from meshtrain import jax_private

BLOCK = 512          # tokens; the largest score block is [B, N, BLOCK, BLOCK] float32
MASKED = -1e30       # finite: a fully masked row gives zeros, not NaN


class Engine(NamedTuple):
    """Attention of T queries to S keys, within segments; causal: T = S, and query t sees keys up to t.

    forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, causal) -> o_BTNH, lse_BTN, both float32 (lse the natural
    log-sum-exp of the scaled scores; MASKED and zeros where a query sees nothing).
    backward(q, k, v, q_segments, k_segments, o, lse, do, causal) -> dq, dk, dv, float32, of these pairs alone, where o and
    lse are those of all the keys that the queries see, here or elsewhere.
    """
    forward: Callable
    backward: Callable


def plain(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """The oracle of the tests: whole scores, autodiff. Returns o [B, T, N, H]."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H ** -0.5
    seen_BTS = jnp.tril(jnp.ones((T, T), bool)) & (segments_BT[:, :, None] == segments_BT[:, None, :])
    p_BKGTS = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], s_BKGTS, MASKED), -1).astype(q_BTNH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH).reshape(B, T, N, H)


# ---- over a whole sequence -------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(method, layout, q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """Causal attention within segments: [B, T, N, H] from N query heads and K key/value heads (N a multiple of K).

    method: forward(layout, q, k, v, segments) -> o, lse and backward(layout, q, k, v, segments, o, lse, do) -> dq, dk, dv.
    """
    return method.forward(layout, q_BTNH, k_BSKH, v_BSKH, segments_BT)[0].astype(q_BTNH.dtype)


def _attend_forward(method, layout, q_BTNH, k_BSKH, v_BSKH, segments_BT):
    o_BTNH, lse_BTN = method.forward(layout, q_BTNH, k_BSKH, v_BSKH, segments_BT)
    # Named, so that selective remat keeps them and the backward never runs the forward loop again.
    o_BTNH = checkpoint_name(o_BTNH.astype(q_BTNH.dtype), "attention_o")
    lse_BTN = checkpoint_name(lse_BTN, "attention_lse")
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, segments_BT, o_BTNH, lse_BTN)


def _attend_backward(method, layout, saved, do_BTNH):
    q, k, v = saved[:3]
    dq, dk, dv = method.backward(layout, *saved, do_BTNH)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_attend_forward, _attend_backward)


class Local(NamedTuple):
    """The method where no device holds a part of a sequence: one engine, the whole square."""
    engine: Engine

    def forward(self, layout, q, k, v, segments):
        return self.engine.forward(q, k, v, segments, segments, True)

    def backward(self, layout, q, k, v, segments, o, lse, do):
        return self.engine.backward(q, k, v, segments, segments, o, lse, do, True)


def attend_cudnn(layout, q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """cuDNN's flash attention; for batches of one segment only, so segments_BT is not looked at. bfloat16, GPU."""
    del layout, segments_BT
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation="cudnn")


def cudnn() -> Engine | None:
    """cuDNN's kernels as an engine, for batches of one segment only: segments are not looked at. bfloat16, GPU, H a
    multiple of 8 up to 128; every mesh axis must be manual where it stands. None where this jax does not offer them."""
    kernel = jax_private.cudnn_attention()
    if kernel is None:
        return None

    def forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, causal):
        o_BTNH, lse_BNT = kernel.forward(q_BTNH, k_BSKH, v_BSKH, causal, q_BTNH.shape[-1] ** -0.5)
        return o_BTNH.astype(jnp.float32), lse_BNT.swapaxes(1, 2)

    def backward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, o_BTNH, lse_BTN, do_BTNH, causal):
        o_BTNH, do_BTNH = o_BTNH.astype(q_BTNH.dtype), do_BTNH.astype(q_BTNH.dtype)
        grads = kernel.backward(q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BTN.swapaxes(1, 2), do_BTNH, causal, q_BTNH.shape[-1] ** -0.5)
        return tuple(g.astype(jnp.float32) for g in grads)

    return Engine(forward, backward)


# ---- the engine that XLA compiles ------------------------------------------------------------------------------------


def blockwise(block: int = BLOCK) -> Engine:
    """The engine in blocks of at most `block` tokens. Its memory beyond arguments and results is [B, N, block, block]."""
    return Engine(partial(_forward, block=block), partial(_backward, block=block))


def _forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, causal, *, block):
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    rows, columns = _Cut(T, block), _Cut(k_BSKH.shape[1], block)
    # Differentiating a scan over layers moves out of it whatever does not depend on the layer, and keeps it: here the masks
    # of all block pairs, B·N·T·S bytes. Behind the barrier everything depends on q.
    pairs = _pairs(rows, columns, causal)
    q_BTNH, q_segments_BT, k_segments_BS, pairs = jax.lax.optimization_barrier((q_BTNH, q_segments_BT, k_segments_BS, pairs))
    q = rows.pad(q_BTNH.reshape(B, T, K, N // K, H))
    k, v = columns.pad(k_BSKH), columns.pad(v_BSKH)
    q_seg, k_seg = rows.pad(q_segments_BT, -1), columns.pad(k_segments_BS, -2)     # padding sees and is seen by nothing

    def visit(carry, pair):
        o, l, m = carry                       # unnormalised output, sum and maximum so far, float32
        i, j = pair
        k_j, v_j = columns.take(k, j), columns.take(v, j)
        s = _scores(rows.take(q, i), k_j, rows.take(q_seg, i), columns.take(k_seg, j), rows.size * (i - j) if causal else None)
        m_old, l_old, o_old = rows.take(m, i), rows.take(l, i), rows.take(o, i)
        m_new = jnp.maximum(m_old, s.max(-1).transpose(0, 3, 1, 2))
        p = jnp.exp(s - m_new.transpose(0, 2, 3, 1)[..., None])
        p = jnp.where(s > MASKED / 2, p, 0.0)
        keep = jnp.exp(m_old - m_new)
        l_new = l_old * keep + p.sum(-1).transpose(0, 3, 1, 2)
        pv = jnp.einsum("BKGTS,BSKH->BTKGH", p.astype(v.dtype), v_j, preferred_element_type=jnp.float32)
        o_new = o_old * keep[..., None] + pv
        return (rows.put(o, o_new, i), rows.put(l, l_new, i), rows.put(m, m_new, i)), None

    zeros = jnp.zeros_like(q, jnp.float32)
    start = zeros, zeros[..., 0], zeros[..., 0] + MASKED
    (o, l, m), _ = jax.lax.scan(visit, start, pairs)
    o = jnp.where(l[..., None] > 0, o / jnp.where(l > 0, l, 1.0)[..., None], 0.0)
    lse = jnp.where(l > 0, m + jnp.log(jnp.where(l > 0, l, 1.0)), MASKED)
    return o[:, :T].reshape(B, T, N, H), lse[:, :T].reshape(B, T, N)


def _backward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, o_BTNH, lse_BTN, do_BTNH, causal, *, block):
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    rows, columns = _Cut(T, block), _Cut(S, block)
    delta_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), -1)
    grouped = lambda x: rows.pad(x.reshape(B, T, K, N // K, *x.shape[3:]))
    q, do, lse, delta = grouped(q_BTNH), grouped(do_BTNH.astype(q_BTNH.dtype)), grouped(lse_BTN), grouped(delta_BTN)
    k, v = columns.pad(k_BSKH), columns.pad(v_BSKH)
    q_seg, k_seg = rows.pad(q_segments_BT, -1), columns.pad(k_segments_BS, -2)

    def visit(carry, pair):
        dq, dk, dv = carry
        i, j = pair
        q_i, do_i, k_j, v_j = rows.take(q, i), rows.take(do, i), columns.take(k, j), columns.take(v, j)
        lead = lambda x: rows.take(x, i).transpose(0, 2, 3, 1)[..., None]
        s = _scores(q_i, k_j, rows.take(q_seg, i), columns.take(k_seg, j), rows.size * (i - j) if causal else None)
        p = jnp.where(s > MASKED / 2, jnp.exp(s - lead(lse)), 0.0)
        dp = jnp.einsum("BTKGH,BSKH->BKGTS", do_i, v_j, preferred_element_type=jnp.float32)
        # Back to the compute dtype before the matmuls: a float32 cotangent would make both of them float32 dots.
        ds = (p * (dp - lead(delta)) * H ** -0.5).astype(q.dtype)
        f32 = dict(preferred_element_type=jnp.float32)
        dq = rows.put(dq, rows.take(dq, i) + jnp.einsum("BKGTS,BSKH->BTKGH", ds, k_j, **f32), i)
        dk = columns.put(dk, columns.take(dk, j) + jnp.einsum("BKGTS,BTKGH->BSKH", ds, q_i, **f32), j)
        dv = columns.put(dv, columns.take(dv, j) + jnp.einsum("BKGTS,BTKGH->BSKH", p.astype(v.dtype), do_i, **f32), j)
        return (dq, dk, dv), None

    start = tuple(jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(visit, start, _pairs(rows, columns, causal))
    return dq[:, :T].reshape(B, T, N, H), dk[:, :S], dv[:, :S]


class _Cut:
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


def _pairs(rows: _Cut, columns: _Cut, causal: bool):
    """(i, j) int32 arrays of the visited block pairs, row by row: j <= i where causal."""
    pairs = [(i, j) for i in range(rows.count) for j in range(columns.count) if not causal or j <= i]
    return tuple(jnp.asarray(column) for column in np.array(pairs, np.int32).T)


def _scores(q_i, k_j, q_seg, k_seg, ahead):
    """float32 [B, K, G, T, S] of one block pair, MASKED across documents. ahead: by how many tokens the queries begin
    after the keys, and later keys are MASKED; None: all keys are seen."""
    s = jnp.einsum("BTKGH,BSKH->BKGTS", q_i, k_j, preferred_element_type=jnp.float32) * q_i.shape[-1] ** -0.5
    seen = q_seg[:, :, None] == k_seg[:, None, :]
    if ahead is not None:
        seen &= ahead + jnp.arange(q_i.shape[1])[:, None] >= jnp.arange(k_j.shape[1])[None, :]
    return jnp.where(seen[:, None, None], s, MASKED)
