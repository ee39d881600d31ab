"""The contract of every attention engine on one device, and the plain computation that all are compared with.

(o, lse) <- (q, k, v), and a backward that takes the o and lse over all keys, so that a ring or an all-gather over devices
can be built from the same blocks (FlashAttention-2, arXiv:2307.08691). Knows no mesh.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30       # finite: a query that sees no key gives zeros, not NaN


class Engine(NamedTuple):
    """Attention of T queries to S keys, within segments; causal: T = S, and query t sees keys up to t.

    forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, causal) -> o_BTNH, lse_BTN, both float32 (lse the natural
    log-sum-exp of the scaled scores; MASKED and zeros where a query sees nothing).
    backward(q, k, v, q_segments, k_segments, o, lse, do, causal) -> dq, dk, dv, float32, of these pairs alone, where o and
    lse are those of all the keys that the queries see, here or elsewhere.
    partitions: whether XLA can split it over mesh axes; else every axis must be manual where it stands.
    """
    forward: Callable
    backward: Callable
    partitions: bool = True


def plain(q_BTNH, k_BSKH, v_BSKH, segments_BT, window: int = 0, softcap: float = 0.0):
    """The oracle of the tests: whole scores, autodiff. window: tokens that a token sees; 0: all. softcap: of scores. Returns o [B, T, N, H]."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H ** -0.5
    s_BKGTS = softcap * jnp.tanh(s_BKGTS / softcap) if softcap else s_BKGTS
    within = jnp.tril(jnp.ones((T, T), bool)) & ~jnp.tril(jnp.ones((T, T), bool), -(window or T))
    seen_BTS = within & (segments_BT[:, :, None] == segments_BT[:, None, :])
    p_BKGTS = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], s_BKGTS, MASKED), -1).astype(q_BTNH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH).reshape(B, T, N, H)
