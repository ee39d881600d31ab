"""The sums of gradients over microbatches: their dtype, their zeros, and how a gradient is added to one.

All code that makes, adds, counts or prices an accumulator reads the dtype from here. bfloat16 accumulators would be
rounded in every microbatch. This module knows no model and no mesh: `reduction` shards and sums them.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

DTYPE = np.dtype("float32")
ITEMSIZE = DTYPE.itemsize
HLO_DTYPE = "f32"       # its name in compiled programs


def divisor(count):
    """Return the float32 number by which the sums over a batch are divided: their count, or 1 if the count is 0. A
    count may be a sum of weights, so it may be below 1."""
    return jnp.where(count == 0, 1, count).astype(DTYPE)


def zeros(tree):
    """Return accumulators like the arrays (or ShapeDtypeStructs) of `tree`, with the sum 0."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, DTYPE), tree)


def widen(weights):
    """Cast weights to the dtype of accumulators before differentiation, so that gradients have this dtype.

    Gradients of the dtype of the weights would be rounded in every microbatch. Layers cast the weights down again, and
    XLA removes both casts. weights: arrays or ShapeDtypeStructs.
    """
    def cast(a):
        return jax.ShapeDtypeStruct(a.shape, DTYPE) if isinstance(a, jax.ShapeDtypeStruct) else a.astype(DTYPE)
    return jax.tree.map(cast, weights)


def add(totals, grads, on=None):
    """Return `totals` with `grads` added. on: a bool scalar array; if false, nothing is added; None: true."""
    def add_leaf(total, new):
        new = new.astype(DTYPE)
        return total + (new if on is None else jnp.where(on, new, 0))
    return jax.tree.map(add_leaf, totals, grads)


def add_at(totals, i, grads, on=True):
    """Return `totals` [n, …] with `grads` added to entry i if `on`.

    The addition is in place, in one kernel. XLA for GPUs fuses it so only if both slices have the same index, the index
    is an instruction outside the fusion, and there is no reshape between the slices.
    """
    i = jax.lax.optimization_barrier(i)

    def add_leaf(total, new):
        # without this barrier, cuBLAS accumulates into a copy of the entry, which is then written back
        new = jax.lax.optimization_barrier(new)
        start = i, *(0 for _ in new.shape)
        old = jax.lax.dynamic_slice(total, start, (1, *new.shape), allow_negative_indices=False)
        return jax.lax.dynamic_update_slice(total, old + jnp.where(on, new, 0)[None], start,
                                            allow_negative_indices=False)
    return jax.tree.map(add_leaf, totals, grads)
