"""The dtype in which weight gradients are summed over devices: `reduce` in [grads] of a rule file.

Accumulators are always float32. A gradient that devices sum in each microbatch is rounded before this sum; a gradient
that devices sum once a step is accumulated first and then rounded. bfloat16 sends half of the bytes. Each of the n - 1
additions of a reduction over n devices may round the sum to 8 bits.
"""
from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshtrain.names import LAYERS, LEADING
from meshtrain.sharding.rules import Layout


def dtype_of(layout: Layout) -> jnp.dtype:
    """Return the dtype of the matmul that computes a weight's gradient in one microbatch.

    XLA reduces the matmul's result over devices in the same dtype. The dtype is float32 where no automatic axis splits
    tokens, because each device adds its own microbatches first.
    """
    summed = any(layout.mesh_axes("activations", name) for name in ("batch", "seq"))
    return jnp.dtype(layout.rules.reduce if summed else jnp.float32)


def place(layout: Layout, g: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Return a gradient in float32, sharded as in [grads]. Sums over devices are computed in the dtype of g."""
    return layout.constrain("grads", g, axes).astype(jnp.float32)


def dtype_once(layout: Layout, axes: Sequence[str | None]) -> jnp.dtype:
    """Return the dtype in which the sum over microbatches of a weight's gradient is reduced, once a step.

    axes: the weight's logical axes, including the axis of its layers. Vectors stay float32: they take few bytes, and
    the experts' token counts, which are summed like gradients, stay exact.
    """
    return jnp.dtype(layout.rules.reduce if sum(name not in (LAYERS, LEADING) for name in axes) > 1 else jnp.float32)


def add(g: jax.Array, dims: Sequence[int], dtype) -> jax.Array:
    """Return the sum of g over dims of which each device has one entry, reduced in `dtype`.

    XLA reduces `jnp.sum` of bfloat16 in float32. A sum on one device stays in the dtype of g.
    """
    if g.dtype == dtype or all(g.shape[dim] == 1 for dim in dims):
        return g.sum(tuple(dims))
    return jax.lax.reduce(g.astype(dtype), jnp.dtype(dtype).type(0), jax.lax.add, tuple(dims))
