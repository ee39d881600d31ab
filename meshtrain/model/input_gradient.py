"""The gradient of an input that several projections multiply: one sum for each way in which their weights are split.

The terms of weights that are split by output dims are partial sums over the mesh axes that split them; those of whole
weights are complete. In one sum of both, XLA all-reduces every partial term by itself. So the partial terms are added
on each device and reduced once, and the complete terms are added to the result.
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

    They split an output dim of its weight. forms: as in `layers.project`.
    """
    return [tuple(axis for _, logical in _outputs(eq, axes) for axis in layout.mesh_axes(GATHERED, logical))
            for eq, axes in forms]


def place_cotangents(layout: Layout, forms: Forms, over: Sequence[Axes], dys: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the outputs' cotangents, those of whole weights whole if there are split weights beside them.

    Otherwise XLA would split them as their term of the gradient, over tokens, and with them what computes them. That
    moves small arrays many times. over: from `list_sum_axes`.
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
    sequence parallelism, otherwise by an all-reduce. A single sum is returned as it is: a later constraint reduces it.
    """
    if len(sums) == 1:
        return next(iter(sums.values()))
    return functools.reduce(operator.add, (layout.act(dx, "batch", "residual_seq", None) for dx in sums.values()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def branch(layout: Layout, x_BTD: jax.Array) -> jax.Array:
    """Return x for one of several functions of it, whose gradients autodiff adds.

    The gradient of each is reduced before the addition, as those of `total`.
    """
    return x_BTD


branch.defvjp(lambda layout, x: (x, None), lambda layout, _, dx: (layout.act(dx, "batch", "residual_seq", None),))
