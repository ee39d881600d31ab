"""Gradients of any loss by a rule file: the trainer's own accumulation and reduction, without its model.

A loss returns sums over the rows that it is given, and what to divide them by: (sum, count). It is called on a part of
a microbatch, so a row must not depend on another one, and a mean must not be taken before the sum over all rows is
known. Gradients are accumulated as [grads] says, reduced over the other batch axes once a step, and placed as in
[optimizer].

Source: arXiv:1910.02054 (ZeRO).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from meshtrain.library.rows import check_traced, count_rows, cut, in_mesh
from meshtrain.library.stack import Stack, check_sums
from meshtrain.model.stats import LayerStats
from meshtrain.sharding import rules
from meshtrain.training import accumulators, reduction
from meshtrain.training.reduction import Backward, Reduction

if TYPE_CHECKING:
    from meshtrain.library.layouts import TreeLayout


def gradients(layout: TreeLayout, loss: Callable, axes: Any, microbatches: int = 1,
              compute: str | None = None) -> Callable:
    """Return f(params, rows, key=None) -> (mean loss, gradients like params, float32, placed as in [optimizer]).

    The mean is Σ sum ÷ max(1, Σ count) over all rows, whatever the layout. f is to be called inside `jax.jit`; its
    params are stored by any table, best by [optimizer], and are read as in [params].

    loss(params, rows) -> (sum, count), two scalars, or a `Stack`. rows: a tree of arrays [b, …], a part of the rows of
    f, which are [B, …]. With `key` the loss is called with a third argument: a key for each row [b], which depends on
    `key` and the row's number in the batch alone, so dropout is the same on every layout.

    axes: a tree like params of tuples of logical names. microbatches: must divide the rows of a device. compute: dtype
    to which floating params are cast when they are read; None: no cast.

    Raises: ValueError outside jax.jit, if the loss returns something else than (sum, count), or if the rows do not
    divide.
    """
    inner, mesh = layout.inner, layout.mesh.abstract_mesh
    flat = jax.tree.leaves(axes, is_leaf=rules.is_axes)

    def compute_gradients(params, rows, key=None):
        check_traced("gradients", params, rows)
        if key is not None and isinstance(loss, Stack):
            raise ValueError("gradients: a Stack takes no key, because its layers get no rows; draw the masks from "
                             "rows, or give the loss as one function")
        with in_mesh(layout.mesh):
            deferred = inner.find_deferred_axes(flat)
            reduced = Reduction(inner, mesh, axes, deferred)
            weights = _read(inner, axes, params, compute)
            if key is None:
                batch, given = cut(inner, deferred, rows, microbatches), ()
            else:
                numbers = jnp.arange(count_rows(rows), dtype=jnp.uint32)
                batch, given = cut(inner, deferred, (rows, numbers), microbatches), (key,)
            make = partial(loss.make_backward, inner, axes) if isinstance(loss, Stack) else partial(make_backward, loss)
            grads, (total, count), _ = reduction.accumulate(reduced, make, batch, weights, given)
            count = jnp.maximum(count.sum(), 1)
            return total.sum() / count, jax.tree.map(lambda g: g / count, grads)
    return compute_gradients


def make_backward(loss: Callable, weights: Any, rows: Any, key: jax.Array | None = None) -> Backward:
    """Return the `Backward` of a loss by `jax.value_and_grad`. With a key, rows are (rows, their numbers [b])."""
    def differentiate(weights, rows):
        given = (rows,) if key is None else (rows[0], jax.vmap(jax.random.fold_in, (None, 0))(key, rows[1]))
        return check_sums(loss(weights, *given), "the loss")

    def add(sums, rows, buffers):
        (total, count), grads = jax.value_and_grad(differentiate, has_aux=True)(weights, rows)
        return accumulators.add(sums, grads), (total, count), buffers, LayerStats()
    return Backward(add, weights, loss=(0, 0))


def _read(inner: rules.Layout, axes: Any, params: Any, dtype: str | None):
    """Return the weights as the loop over microbatches reads them: cast on the shards of [optimizer], then [params]."""
    def read(names, w):
        if dtype is not None and jnp.issubdtype(w.dtype, jnp.floating):
            # Constrained to its stored sharding; otherwise XLA gathers float32 and casts afterwards.
            w = inner.constrain("optimizer", w.astype(dtype), names)
        return inner.constrain("params", w, names)
    return jax.tree.map(read, axes, params, is_leaf=rules.is_axes)
