"""Pipelines of any layers: a `Stack` run by the trainer's executor, as a function that `jax.grad` differentiates.

The executor computes the gradients itself, in the ticks of a schedule (`training.executor`). So the function's
derivative is a product of these gradients and the tangents, which `jax.grad` transposes. A call without differentiation
runs only forward ticks. The function contains the loss, because a stage cannot begin the backward of a microbatch
before its loss.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from meshtrain import given
from meshtrain.config import ConfigError
from meshtrain.library import staged
from meshtrain.library.layouts import Layout
from meshtrain.library.ring import check_layout
from meshtrain.library.rows import in_mesh, on_devices
from meshtrain.library.stack import Stack
from meshtrain.library.staged import GivenSchedule, StagedStack
from meshtrain.sharding import reduced
from meshtrain.training.executor import STAGE

MICROBATCHES = 8        # of a schedule that is given by its name, by default


def pipeline(stack: Stack, schedule: GivenSchedule, layout: Layout, microbatches: int | None = None,
             chunks: int | None = None) -> Callable:
    """Return f(weights, ends, rows) -> the head's sum over all rows, float32, computed by a pipeline.

    weights: the layers of the stack, [L, …]; L is a multiple of stages × chunks. ends: the weights of embedding and
    head. rows: a tree of arrays [B, …]. Each stage of the mesh has an equal part of the layers, in order. All stages
    compute embedding and head. A stage holds its layers whole, without the axes that split a batch, and float32 sums of
    their gradients.

    schedule: a name of `pipeline.schedule`, the text of a schedule table, or a result of `mt.schedule`. microbatches,
    chunks: options of a schedule that is given by name; default: 8 and 1.

    `jax.grad` and `jax.jvp` differentiate f once, with respect to weights and ends only. Raises: ConfigError for a
    schedule, layers or weights that do not fit, for second derivatives and for jax.vmap; ValueError for rows that do
    not divide evenly, and for functions that a stack cannot have, see `Stack`.

    >>> stack = mt.Stack(lambda ends, rows: rows, lambda w, x: w * x, lambda ends, x, rows: (x.sum(), x.size))
    >>> f = mt.pipeline(stack, "1f1b", mt.Layout("ddp", {"stage": 2}), microbatches=2)
    >>> jax.grad(f)(jnp.array([2.0, 3.0]), {}, jnp.ones((4, 1))).tolist()
    [12.0, 8.0]
    """
    check_layout(layout, "pipeline")
    stages = layout.inner.sizes[STAGE]
    written = not isinstance(schedule, str) or staged.is_table(schedule)
    for name, value in (("microbatches", microbatches), ("chunks", chunks)):
        given.check_count(name, 1 if value is None else value)
    if microbatches is None and not written:
        microbatches = MICROBATCHES
    made = staged.make_schedule(schedule, stages, microbatches, chunks)
    of = StagedStack(stack, layout.inner, layout.mesh, made)

    def divide(num_chunks: int, weights):
        """Return the weights [L, …] as [V, P, n, …]."""
        def divide_leaf(w):
            w = w.reshape(num_chunks, stages, -1, *w.shape[1:])
            # Other dims stay as the caller has split them, e.g. over tensor.
            return jax.lax.with_sharding_constraint(w, P(None, STAGE, *[P.UNCONSTRAINED] * (w.ndim - 2)))
        return jax.tree.map(divide_leaf, weights)

    def evaluate(weights, ends, rows):
        of.check(weights, ends, rows)
        return of.evaluate(divide(1, weights), ends, rows)[0]

    def differentiate(weights, ends, rows):
        """Return (the sum, its gradients with respect to weights and ends, float32)."""
        of.check(weights, ends, rows)
        sums, *grads = of.differentiate(divide(made.num_chunks, weights), ends, rows)

        def sum_replicas(stacked: bool, g, w):
            dtype = layout.rules.reduce if w.ndim - stacked > 1 else g.dtype      # as `reduced.dtype_once`
            return reduced.add(g, (0,), jnp.dtype(dtype)).astype(g.dtype).reshape(w.shape)
        d_weights, d_ends = grads
        return sums[0], (jax.tree.map(partial(sum_replicas, True), d_weights, weights),
                         jax.tree.map(partial(sum_replicas, False), d_ends, ends))

    differentiate = _refuse_derivatives(_refuse_vmap(differentiate))
    compute = jax.custom_jvp(_refuse_vmap(evaluate))

    def push_forward(primals, tangents):
        """Return (the sum, its tangent): the product of gradients and tangents, which jax.grad transposes."""
        *tangents, of_rows = tangents
        if any(not _is_zero(t) for t in jax.tree.leaves(of_rows, is_leaf=_is_zero)):
            raise ConfigError("pipeline: only derivatives with respect to weights and ends are supported, not rows")
        total, grads = differentiate(*primals)
        products = [jnp.sum(g * t.astype(jnp.float32)) for g, t in zip(
            jax.tree.leaves(grads), jax.tree.leaves(tangents, is_leaf=_is_zero), strict=True) if not _is_zero(t)]
        return total, sum(products, jnp.float32(0))
    compute.defjvp(push_forward, symbolic_zeros=True)

    @jax.jit
    def sum_over_rows(weights, ends, rows):
        with in_mesh(layout.mesh):
            total = compute(weights, ends, rows)
        return on_devices(layout.mesh, total)
    return sum_over_rows


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _refuse_vmap(compute: Callable) -> Callable:
    """Return `compute`, which raises a ConfigError under jax.vmap."""
    whole = jax.custom_batching.custom_vmap(compute)

    @whole.def_vmap
    def refuse(axis_size, in_batched, *args):
        raise ConfigError("a pipeline does not work under jax.vmap, because its microbatches are parts of the batch; "
                          "call it once with all rows")
    return whole


def _refuse_derivatives(compute: Callable) -> Callable:
    """Return `compute`, which raises a ConfigError if jax would differentiate its ticks."""
    once = jax.custom_jvp(compute)

    @once.defjvp
    def refuse(primals, tangents):
        raise ConfigError("pipeline: only first derivatives are supported")
    return once
