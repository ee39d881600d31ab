"""The zigzag order of a sequence over devices: of 2·cp chunks, device i holds chunks i and 2·cp-1-i.

Causal attention then costs every device the same, and off the diagonal no block is half masked (arXiv:2404.10830 names
the order; Megatron and Llama 3 use it). Done once, where a batch is placed: tokens, targets, positions and segment ids
take the same permutation, and nothing downstream knows.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def order(length: int, cp: int) -> np.ndarray:
    """int64 [length]: which token of the sequence stands at each place. length is a multiple of 2·cp."""
    chunks = np.arange(length).reshape(2 * cp, -1)
    return np.concatenate([chunks[[i, 2 * cp - 1 - i]].ravel() for i in range(cp)])


def halves(x):
    """The early and the late chunk [B, c, …] of what a device holds [B, 2c, …]."""
    c = x.shape[1] // 2
    return x[:, :c], x[:, c:]


def join(early, late):
    return jnp.concatenate([early, late], 1)


def merge(o1, lse1, o2, lse2):
    """Attention to two sets of keys from that to each: o [B, T, N, H], lse [B, T, N], float32."""
    lse = jnp.logaddexp(lse1, lse2)
    return o1 * jnp.exp(lse1 - lse)[..., None] + o2 * jnp.exp(lse2 - lse)[..., None], lse


def choose(condition, these, those):
    """`these` where the condition holds, else `those`; trees of arrays of the same shapes, without a branch."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), these, those)
