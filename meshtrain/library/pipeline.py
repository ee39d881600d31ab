"""Pipelines of anybody's layers: a `Stack` run by the trainer's executor, as a function that `jax.grad` differentiates.

The executor makes the gradients itself, in the ticks of a schedule (`training.executor`). So the function's derivative
is a product of these gradients and the tangents, which `jax.grad` transposes. The value alone runs forward ticks.
The loss is inside, because a stage cannot begin its backward before the loss of its microbatch.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from meshtrain.config import ConfigError
from meshtrain.library.layouts import Layout
from meshtrain.library.ring import check_layout
from meshtrain.library.rows import check_traced, cut, in_mesh
from meshtrain.library.stack import Stack, check_sums
from meshtrain.model.stats import LayerStats
from meshtrain.parallel.pipeline import schedules
from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.shown import DrawnSchedule
from meshtrain.training import backward, executor
from meshtrain.training.executor import STAGE, Placement
from meshtrain.training.shard import ModelFunctions

# Keys of run files in the messages of `schedules` -> the words of a caller from Python.
WORDS = {"pipeline.schedule=": "schedule=", "training.microbatches=": "microbatches=", "pipeline.chunks=": "chunks="}
MICROBATCHES = 8        # of a schedule that is given by its name, by default


def pipeline(stack: Stack, schedule: str | Schedule | DrawnSchedule, layout: Layout, microbatches: int | None = None,
             chunks: int | None = None) -> Callable:
    """Return f(weights, ends, rows) -> the sum of the head's sums over all rows, float32, computed by a pipeline.

    weights: the layers of the stack, [L, …]; L is a multiple of stages × chunks. ends: the weights of embedding and
    head. rows: a tree of arrays [B, …]. Each stage of the mesh has an equal part of the layers, in order. All stages
    compute embedding and head. A stage holds its layers whole, without the axes that split a batch, and float32 sums of
    their gradients.

    schedule: a name of `pipeline.schedule`, the text of a schedule table, or a result of `mt.schedule`. microbatches,
    chunks: of a name; default: 8 and 1.

    `jax.grad` and `jax.jvp` take f, once and in weights and ends only. Raises: ConfigError for a schedule, layers or
    weights that do not fit, for second derivatives and for jax.vmap; ValueError for rows that do not divide, and for
    functions that a stack cannot have, see `Stack`.

    >>> stack = mt.Stack(lambda ends, rows: rows, lambda w, x: w * x, lambda ends, x, rows: (x.sum(), x.size))
    >>> f = mt.pipeline(stack, "1f1b", mt.Layout("ddp", {"stage": 2}), microbatches=2)
    >>> jax.jit(jax.grad(f))(jnp.array([2.0, 3.0]), {}, jnp.ones((4, 1))).tolist()
    [12.0, 8.0]
    """
    check_layout(layout, "pipeline")
    made, inner = _make_schedule(schedule, layout, microbatches, chunks), layout.inner

    def place(num_chunks: int, weights: Any, ends: Any, rows: Any):
        """Return the arguments of the executor for layers in this many chunks a stage."""
        _check_arguments(stack, made, weights, ends, rows)
        def divide(w):
            w = w.reshape(num_chunks, made.num_stages, -1, *w.shape[1:])
            # Other dims stay as the caller has split them, e.g. over tensor.
            return jax.lax.with_sharding_constraint(w, P(None, STAGE, *[P.UNCONSTRAINED] * (w.ndim - 2)))
        summed = inner.batch_axes
        batch = cut(inner, summed, rows, made.num_microbatches)
        placement = Placement(
            layout.mesh, summed, layer_axes=(jax.tree.map(lambda w: ((),) * (w.ndim - 1), weights), {}),
            leading_axes=({}, {}), ends_specs=(jax.tree.map(lambda _: P(), ends), {}),
            batch_specs=jax.tree.map(lambda _: P(None, summed or None), batch))
        return placement, ((jax.tree.map(divide, weights), {}), (ends, {}), ({}, {})), batch, {}

    def evaluate(weights, ends, rows):
        return executor.evaluate(_functions(stack, weights, ends), *place(1, weights, ends, rows)).sum()

    def differentiate(weights, ends, rows):
        """Return (the sum, its gradients in weights and ends, float32)."""
        total, d_weights, d_ends, *_ = executor.gradients(
            made, _functions(stack, weights, ends), *place(made.num_chunks, weights, ends, rows))

        def sum_replicas(g, w):
            return g.sum(0).reshape(w.shape)
        return total.sum(), jax.tree.map(sum_replicas, (d_weights, d_ends), (weights, ends))

    differentiate = _refuse_derivatives(_refuse_vmap(differentiate))
    compute = jax.custom_jvp(_refuse_vmap(evaluate))

    def push_forward(primals, tangents):
        """Return (the sum, its tangent): the product of gradients and tangents, which jax.grad transposes."""
        *tangents, of_rows = tangents
        if any(not _is_zero(t) for t in jax.tree.leaves(of_rows, is_leaf=_is_zero)):
            raise ConfigError("pipeline: its derivatives are those in weights and ends; rows have none")
        total, grads = differentiate(*primals)
        products = [jnp.sum(g * t.astype(jnp.float32)) for g, t in zip(
            jax.tree.leaves(grads), jax.tree.leaves(tangents, is_leaf=_is_zero), strict=True) if not _is_zero(t)]
        return total, sum(products, jnp.float32(0))
    compute.defjvp(push_forward, symbolic_zeros=True)

    def sum_over_rows(weights, ends, rows):
        check_traced("pipeline", weights, ends, rows)
        with in_mesh(layout.mesh):
            return compute(weights, ends, rows)
    return sum_over_rows


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _make_schedule(given: str | Schedule | DrawnSchedule, layout: Layout, microbatches: int | None,
                   chunks: int | None) -> Schedule:
    """Return the schedule for the mesh's stages. Raises: ConfigError."""
    stages = layout.inner.sizes[STAGE]
    if isinstance(given, DrawnSchedule):
        given = given.of
    try:
        if isinstance(given, str) and not ("\n" in given or " " in given):
            return schedules.make(given, stages, microbatches or MICROBATCHES, chunks or 1)
        made = schedules.parse(given) if isinstance(given, str) else given
    except ValueError as error:
        message = str(error)
        for key, word in WORDS.items():
            message = message.replace(key, word)
        raise ConfigError(*message.splitlines()) from None
    wanted = {"stages": (made.num_stages, stages), "microbatches": (made.num_microbatches, microbatches),
              "chunks": (made.num_chunks, chunks)}
    if faults := [f"pipeline: this schedule has {name}={has}, not {asked}; write a schedule of {name}={asked}, or "
                  f"change {'the mesh' if name == 'stages' else name}"
                  for name, (has, asked) in wanted.items() if asked not in (None, has)]:
        raise ConfigError(*faults)
    return made


def _functions(stack: Stack, weights: Any, of_ends: Any) -> ModelFunctions:
    """Return the stack as the functions that the executor calls, which passes float32 weights.

    The stack gets them in the dtypes of `weights` and `of_ends`. XLA removes the two casts.
    """
    def narrow(wide, like):
        return jax.tree.map(lambda w, of: w.astype(of.dtype), wide, like)

    def prepare(rows, extra):
        return ()

    def embed(ends, frozen, rows, extra):
        return stack.embed(narrow(ends, of_ends), rows)

    def layer(w: backward.Weights, x, inputs):
        return stack.layer(narrow(w.trained, weights), x), LayerStats()

    def head(ends, frozen, x, rows, extra):
        total, _ = check_sums(stack.head(narrow(ends, of_ends), x, rows), "the head of the Stack")
        return total, total
    return ModelFunctions(prepare, embed, layer, head)


def _check_arguments(stack: Stack, made: Schedule, weights: Any, ends: Any, rows: Any) -> None:
    """Raises: ConfigError for layers that do not divide or have no gradients; ValueError as `Stack.check`."""
    x = jax.eval_shape(stack.embed, ends, rows)
    stack.check(weights, x)
    faults, virtual = [], made.num_stages * made.num_chunks
    num_layers = jax.tree.leaves(weights)[0].shape[0]
    if num_layers % virtual:
        faults.append(f"pipeline: {num_layers} layers do not divide over {made.num_stages} stages × {made.num_chunks} "
                      f"chunks; use a multiple of {virtual}, e.g. {-(-num_layers // virtual) * virtual}")
    if wrong := [f"{jax.tree_util.keystr(path)} {leaf.dtype.name}" for path, leaf in
                 jax.tree.leaves_with_path({"weights": weights, "ends": ends})
                 if not jnp.issubdtype(leaf.dtype, jnp.floating)]:
        faults.append(f"pipeline: {', '.join(wrong)} cannot be differentiated; weights and ends are floating, and "
                      f"whole numbers belong to the rows")
    if faults:
        raise ConfigError(*faults)


def _refuse_vmap(compute: Callable) -> Callable:
    """Return `compute`, which raises a ConfigError under jax.vmap."""
    whole = jax.custom_batching.custom_vmap(compute)

    @whole.def_vmap
    def refuse(axis_size, in_batched, *args):
        raise ConfigError("pipeline: jax.vmap cannot take it, because its microbatches are the batch; give all rows at "
                          "once")
    return whole


def _refuse_derivatives(compute: Callable) -> Callable:
    """Return `compute`, which raises a ConfigError if jax would differentiate its ticks."""
    once = jax.custom_jvp(compute)

    @once.defjvp
    def refuse(primals, tangents):
        raise ConfigError("pipeline: it has first derivatives only, and no second ones")
    return once
