"""The zigzag order: device i holds chunks i and 2·cp-1-i of a sequence's 2·cp chunks.

This order balances causal attention, and only diagonal blocks are partly masked. (The name is from arXiv:2404.10830;
Megatron and Llama 3 use this order.) The order is applied once, when a batch is placed: tokens, targets, positions and
segment ids are permuted in the same way. Code after that does not depend on the order.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "context"        # the mesh axis that splits sequences


def order(length: int, cp: int) -> np.ndarray:
    """Return the token at each position, int64 [length]. length must be a multiple of 2·cp."""
    chunks = np.arange(length).reshape(2 * cp, -1)
    return np.concatenate([chunks[[i, 2 * cp - 1 - i]].ravel() for i in range(cp)])


def from_natural(x):
    """Return this device's two chunks of rows in zigzag order. x [B, 2c, …]: its chunks 2·i and 2·i + 1 in natural
    order.

    This takes two permutes of one chunk each: all chunks with even numbers go to different devices, and so do all
    chunks with odd numbers.
    """
    even, odd = (_send(chunk, homes) for chunk, homes in zip(halves(x), _homes()))
    is_even = lax.axis_index(AXIS) % 2 == 0
    return join(*choose(is_even, (even, odd), (odd, even)))


def to_natural(x):
    """Return this device's two chunks of rows in natural order, the inverse of `from_natural`."""
    early, late = halves(x)
    is_even = lax.axis_index(AXIS) % 2 == 0
    chunks = choose(is_even, (early, late), (late, early))
    return join(*(_send(chunk, np.argsort(homes)) for chunk, homes in zip(chunks, _homes())))


def _homes() -> tuple[np.ndarray, np.ndarray]:
    """Return, for the even and for the odd chunks, the device that has chunk 2·i, or 2·i + 1, in zigzag order."""
    chunks = np.arange(2 * lax.axis_size(AXIS))
    homes = np.minimum(chunks, chunks[::-1])
    return homes[::2], homes[1::2]


def _send(x, homes: np.ndarray):
    return lax.ppermute(x, AXIS, list(enumerate(homes.tolist())))


def halves(x):
    """Split a device's [B, 2c, …] into its early and late chunk, each [B, c, …]."""
    c = x.shape[1] // 2
    return x[:, :c], x[:, c:]


def join(early, late):
    return jnp.concatenate([early, late], 1)


def merge(o1, lse1, o2, lse2):
    """Merge attention over two sets of keys into attention over both: o [B, T, N, H], lse [B, T, N], float32."""
    lse = jnp.logaddexp(lse1, lse2)
    return o1 * jnp.exp(lse1 - lse)[..., None] + o2 * jnp.exp(lse2 - lse)[..., None], lse


def choose(condition, these, those):
    """Select one of two trees of equal shapes by `where`, without a branch."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), these, those)


# ---- the whole sequence on every device ------------------------------------------------------------------------------


def gather(x):
    """All-gather [B, 2c, …] -> [B, cp·2c, …], in zigzag order."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True)


def scatter(x):
    """Reduce-scatter, the inverse of `gather`."""
    return lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True)


def place(chunk):
    """Return the position of a chunk among the chunks of a gathered sequence."""
    cp = lax.axis_size(AXIS)
    return jnp.where(chunk < cp, 2 * chunk, 2 * (2 * cp - 1 - chunk) + 1)


def take(x, at):
    """Return the chunk at this position of a gathered sequence."""
    size = x.shape[1] // (2 * lax.axis_size(AXIS))
    return lax.dynamic_slice_in_dim(x, at * size, size, 1)


def add(x, summand, at):
    """Return a gathered sequence with `summand` added to the chunk at this position."""
    return lax.dynamic_update_slice_in_dim(x, take(x, at) + summand, at * summand.shape[1], 1)
