"""Causal attention without a score matrix: blocks of queries against blocks of keys, with a running softmax.

The contract of every engine is (o, lse) <- (q, k, v), and a backward that takes o and lse, so that a ring or an
all-gather over devices can be built from the same blocks (FlashAttention-2, arXiv:2307.08691). Only block pairs on or
below the diagonal are visited; the list of pairs is static, so the compiled loop has a known length. Scores are
float32; every matmul takes its operands in the compute dtype, in the backward too. Knows no mesh axis.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

BLOCK = 512          # tokens; the largest score block is [B, N, BLOCK, BLOCK] float32
MASKED = -1e30       # finite: a fully masked row gives zeros, not NaN


def plain(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """The oracle of the tests: whole scores, autodiff. Returns o [B, T, N, H]."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H ** -0.5
    seen_BTS = jnp.tril(jnp.ones((T, T), bool)) & (segments_BT[:, :, None] == segments_BT[:, None, :])
    p_BKGTS = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], s_BKGTS, MASKED), -1).astype(q_BTNH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH).reshape(B, T, N, H)


@jax.custom_vjp
def attend(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """Causal attention within segments: [B, T, N, H] from N query heads and K key/value heads (N a multiple of K)."""
    return forward(q_BTNH, k_BSKH, v_BSKH, segments_BT)[0]


def _attend_forward(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    o_BTNH, lse_BTN = forward(q_BTNH, k_BSKH, v_BSKH, segments_BT)
    # Named, so that selective remat keeps them and the backward never runs the forward loop again.
    o_BTNH, lse_BTN = checkpoint_name(o_BTNH, "attention_o"), checkpoint_name(lse_BTN, "attention_lse")
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, segments_BT, o_BTNH, lse_BTN)


def _attend_backward(saved, do_BTNH):
    return *backward(*saved, do_BTNH), None


def forward(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """Returns o [B, T, N, H] in the dtype of q and lse [B, T, N] float32 (natural log; MASKED where nothing is seen)."""
    B, T, N, H = q_BTNH.shape
    q, k, v, segments, pairs, block = _blocks(q_BTNH, k_BSKH, v_BSKH, segments_BT)

    def visit(carry, pair):
        o, l, m = carry                       # unnormalised output, sum and maximum so far, float32
        i, j = pair
        q_i, k_j, v_j = _take(q, i, block), _take(k, j, block), _take(v, j, block)
        s = _scores(q_i, k_j, segments, i, j, block)
        m_old, l_old, o_old = _take(m, i, block), _take(l, i, block), _take(o, i, block)
        m_new = jnp.maximum(m_old, s.max(-1).transpose(0, 3, 1, 2))
        p = jnp.exp(s - m_new.transpose(0, 2, 3, 1)[..., None])
        p = jnp.where(s > MASKED / 2, p, 0.0)
        keep = jnp.exp(m_old - m_new)
        l_new = l_old * keep + p.sum(-1).transpose(0, 3, 1, 2)
        pv = jnp.einsum("BKGTS,BSKH->BTKGH", p.astype(v.dtype), v_j, preferred_element_type=jnp.float32)
        o_new = o_old * keep[..., None] + pv
        return (_put(o, o_new, i, block), _put(l, l_new, i, block), _put(m, m_new, i, block)), None

    zeros = jnp.zeros_like(q, jnp.float32)
    (o, l, m), _ = jax.lax.scan(visit, (zeros, zeros[..., 0], zeros[..., 0] + MASKED), pairs)
    o = jnp.where(l[..., None] > 0, o / jnp.where(l > 0, l, 1.0)[..., None], 0.0)
    lse = jnp.where(l > 0, m + jnp.log(jnp.where(l > 0, l, 1.0)), MASKED)
    return o[:, :T].reshape(B, T, N, H).astype(q_BTNH.dtype), lse[:, :T].reshape(B, T, N)


def backward(q_BTNH, k_BSKH, v_BSKH, segments_BT, o_BTNH, lse_BTN, do_BTNH):
    """dq, dk, dv from the saved output and log-sum-exp; accumulated in float32, returned in the dtypes of q, k, v."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q, k, v, segments, pairs, block = _blocks(q_BTNH, k_BSKH, v_BSKH, segments_BT)
    delta_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), -1)
    grouped = lambda x: _pad(x.reshape(B, T, K, N // K, *x.shape[3:]), q.shape[1])
    do, lse, delta = grouped(do_BTNH), grouped(lse_BTN), grouped(delta_BTN)

    def visit(carry, pair):
        dq, dk, dv = carry
        i, j = pair
        q_i, do_i, k_j, v_j = _take(q, i, block), _take(do, i, block), _take(k, j, block), _take(v, j, block)
        lead = lambda x: _take(x, i, block).transpose(0, 2, 3, 1)[..., None]
        s = _scores(q_i, k_j, segments, i, j, block)
        p = jnp.where(s > MASKED / 2, jnp.exp(s - lead(lse)), 0.0)
        dp = jnp.einsum("BTKGH,BSKH->BKGTS", do_i, v_j, preferred_element_type=jnp.float32)
        # Back to the compute dtype before the matmuls: a float32 cotangent would make both of them float32 dots.
        ds = (p * (dp - lead(delta)) * H ** -0.5).astype(q.dtype)
        f32 = dict(preferred_element_type=jnp.float32)
        dq = _put(dq, _take(dq, i, block) + jnp.einsum("BKGTS,BSKH->BTKGH", ds, k_j, **f32), i, block)
        dk = _put(dk, _take(dk, j, block) + jnp.einsum("BKGTS,BTKGH->BSKH", ds, q_i, **f32), j, block)
        dv = _put(dv, _take(dv, j, block) + jnp.einsum("BKGTS,BTKGH->BSKH", p.astype(v.dtype), do_i, **f32), j, block)
        return (dq, dk, dv), None

    start = tuple(jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(visit, start, pairs)
    return (dq[:, :T].reshape(B, T, N, H).astype(q_BTNH.dtype), dk[:, :T].astype(k_BSKH.dtype),
            dv[:, :T].astype(v_BSKH.dtype))


attend.defvjp(_attend_forward, _attend_backward)


def attend_cudnn(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """cuDNN's flash attention; for batches of one segment only, so segments_BT is not looked at. bfloat16, GPU."""
    del segments_BT
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation="cudnn")


def _blocks(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """Heads grouped [B, T, K, G, H], the sequence padded to whole blocks, and the (i, j <= i) pairs, row by row."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    count = -(-T // BLOCK)
    block = -(-T // count)
    pad = functools.partial(_pad, length=block * count)
    pairs = np.array([(i, j) for i in range(count) for j in range(i + 1)], np.int32)
    return (pad(q_BTNH.reshape(B, T, K, N // K, H)), pad(k_BSKH), pad(v_BSKH), pad(segments_BT),
            (jnp.asarray(pairs[:, 0]), jnp.asarray(pairs[:, 1])), block)


def _scores(q_i, k_j, segments, i, j, block):
    """float32 [B, K, G, T, S] of one block pair, MASKED above the diagonal and across documents."""
    s = jnp.einsum("BTKGH,BSKH->BKGTS", q_i, k_j, preferred_element_type=jnp.float32) * q_i.shape[-1] ** -0.5
    index = jnp.arange(block)
    seen = (i * block + index)[:, None] >= (j * block + index)[None, :]
    seen = seen & (_take(segments, i, block)[:, :, None] == _take(segments, j, block)[:, None, :])
    return jnp.where(seen[:, None, None], s, MASKED)


def _pad(x, length: int):
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _take(x, i, block: int):
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, 1)


def _put(x, value, i, block: int):
    return jax.lax.dynamic_update_slice_in_dim(x, value, i * block, 1)
