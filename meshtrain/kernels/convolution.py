"""The short causal convolution of linear attention, per channel and within documents. This module knows no mesh."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tail(NamedTuple):
    """The last W - 1 tokens before a row and their segments. The convolution of the row's first tokens reads them."""
    x_BSND: jax.Array
    segments_BS: jax.Array


def tail(x_BTND, segments_BT, width: int, before: Tail | None = None) -> Tail:
    """Return the tail for the tokens after these. width: number of taps of the weights."""
    x, segments = _prepend(x_BTND, segments_BT, width, before)
    kept = x.shape[1] - (width - 1)
    return Tail(x[:, kept:], segments[:, kept:])


def convolve(x_BTND, w_WND, segments_BT, before: Tail | None = None):
    """Return Σ_j w_j x_{t-W+1+j} over the taps in t's segment, in x's dtype. w[-1] is the tap of t itself.

    The sum is in float32, and so are the sums of both gradients. before: the tail of an earlier part of the rows; None
    if nothing precedes them.
    """
    W, T = w_WND.shape[0], x_BTND.shape[1]
    x, segments = _prepend(x_BTND, segments_BT, W, before)
    x = x.astype(jnp.float32)       # before the taps: autodiff adds the taps' gradients of x in this dtype
    y = 0.0         # W shifted products in one fusion; XLA's convolution has no document mask
    for j in range(W):
        same = segments[:, j:j + T] == segments_BT
        y += jnp.where(same[..., None, None], x[:, j:j + T], 0) * w_WND[j].astype(jnp.float32)
    return y.astype(x_BTND.dtype)


def _prepend(x_BTND, segments_BT, width: int, before: Tail | None):
    """Return x and segments with the W - 1 tokens before them. If nothing precedes them, these tokens are zeros."""
    if before is None:
        widths = [(0, 0), (width - 1, 0)]
        return jnp.pad(x_BTND, widths + [(0, 0)] * 2), jnp.pad(segments_BT, widths)
    return (jnp.concatenate([a, b.astype(a.dtype)], 1) if a.shape[1] else b
            for a, b in zip(before, (x_BTND, segments_BT)))
