"""The gradient of an input that several projections share: one sum for each way in which the weights are split.

Each projection contributes one term. If output dims of its weight are split, the term is a partial sum over the mesh
axes that split these dims; otherwise the term is complete. In one sum of both kinds, XLA all-reduces each partial term
separately. So each device adds the partial terms first, the result is reduced once, and the complete terms are added
last.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax

from meshtrain.sharding.rules import GATHERED, Layout

Axes = tuple[str, ...]
Forms = Sequence[tuple[str, Sequence[str | None]]]
Sums = dict[Axes, jax.Array]     # by the mesh axes over which an array is a partial sum


def list_sum_axes(layout: Layout, forms: Forms) -> list[Axes]:
    """Return, for each form, the mesh axes over which its term of the gradient is a partial sum.

    These axes split an output dim of the form's weight. forms: as in `layers.project`."""
    return [tuple(axis for _, logical in _outputs(eq, axes) for axis in layout.mesh_axes(GATHERED, logical))
            for eq, axes in forms]


def place_cotangents(layout: Layout, forms: Forms, over: Sequence[Axes], dys: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the outputs' cotangents. Beside split weights, the cotangents of whole weights are made whole.

    Otherwise XLA would split these cotangents over tokens, like their term of the gradient, and would split the ops
    that compute the cotangents as well. Small arrays would then move many times. over: from `list_sum_axes`.
    """
    if len(set(over)) == 1:
        return list(dys)
    return [dy if summed else layout.act(dy, "batch", "seq", *(axis for _, axis in _outputs(eq, axes)))
            for (eq, axes), summed, dy in zip(forms, over, dys, strict=True)]


def add(sums: Sums, over: Axes, product: jax.Array) -> Sums:
    """Add a product to the sums. over: the axes to sum it over, from `list_sum_axes`."""
    # new matmul first, so that cuBLAS accumulates into it
    return sums | {over: product + sums[over] if over in sums else product}


def _outputs(eq: str, axes: Sequence[str | None]) -> list[tuple[str, str | None]]:
    """Return the output dims of a weight, with their logical axes."""
    x_dims, w_dims = eq.split("->")[0].split(",")
    return [(dim, logical) for dim, logical in zip(w_dims, axes, strict=True) if dim not in x_dims]


def total(layout: Layout, sums: Sums) -> jax.Array:
    """Return the gradient.

    Several sums [B, T, D] are reduced to the shards of the residual stream, in B·T·D bytes: by a reduce-scatter with
    sequence parallelism, otherwise by an all-reduce. A single sum is returned unreduced, because a later constraint
    reduces it.
    """
    if len(sums) == 1:
        return next(iter(sums.values()))
    return functools.reduce(operator.add, (layout.act(dx, "batch", "residual_seq", None) for dx in sums.values()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def branch(layout: Layout, x_BTD: jax.Array) -> jax.Array:
    """Return x for one of several functions of it, whose gradients autodiff adds.

    The gradient of each function is reduced before the addition, as in `total`."""
    return x_BTD


branch.defvjp(lambda layout, x: (x, None), lambda layout, _, dx: (layout.act(dx, "batch", "residual_seq", None),))
