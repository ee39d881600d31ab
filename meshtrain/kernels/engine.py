"""The interface of all attention engines on one device, and the reference implementation they are tested against.

An engine returns (o, lse), and its backward takes o and lse over all keys, so that ring and all-gather attention can be
built from it (FlashAttention-2, arXiv:2307.08691). Knows no mesh.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.kernels import products
from meshtrain.kernels.mask import CAUSAL, Mask, Scores

MASKED = -1e30       # finite: a query without visible keys gives zeros, not NaN


class Output(NamedTuple):
    """The forward's output for some queries over all keys, local or remote, and the cotangent of o."""
    o_BTNH: jax.Array
    lse_BTN: jax.Array
    do_BTNH: jax.Array


class Engine(NamedTuple):
    """Attention of T queries to S keys within segments and a `kernels.mask.Mask`; fully masked blocks are skipped.

    forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, mask) -> o_BTNH, lse_BTN, both float32. lse is the
    natural log-sum-exp of the scores. A query without visible keys gives o = 0 and lse = MASKED.

    backward(q, k, v, q_segments, k_segments, o, lse, do, mask) -> dq, dk, dv, float32, of these pairs alone; o and lse
    are over all keys, local or remote.

    partitions: whether XLA can partition it; else all mesh axes must be manual.
    """
    forward: Callable
    backward: Callable
    partitions: bool = True


def plain(q_BTNH, k_BSKH, v_BSKH, segments_BT, mask: Mask = CAUSAL, scores: Scores = Scores()):
    """Reference for tests: materialized scores, autodiff. Returns o [B, T, N, H]."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32,
                         precision=products.precision(k_BSKH.dtype)) * scores.scale(H)
    s_BKGTS = scores.softcap * jnp.tanh(s_BKGTS / scores.softcap) if scores.softcap else s_BKGTS
    apart = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_BTS = (apart >= 0) & (apart < (mask.window or T)) & (segments_BT[:, :, None] == segments_BT[:, None, :])
    p_BKGTS = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], s_BKGTS, MASKED), -1).astype(q_BTNH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH, precision=products.precision(v_BSKH.dtype)).reshape(
        B, T, N, H)
