"""Gradients of any loss by a rule file: the accumulation and reduction of the trainer, without its model.

A loss returns (sum, count): a sum over its rows, and the number by which to divide the sum. The loss is called on a
part of a microbatch, so a row must not depend on another row, and the loss must not take a mean, because the sum over
all rows is not yet known. Gradients are accumulated as in [grads], reduced over the other batch axes once a step, and
placed as in [optimizer].

Source: arXiv:1910.02054 (ZeRO).
"""
from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from meshtrain import given
from meshtrain.config import ConfigError
from meshtrain.library import lookups, staged
from meshtrain.library.axes import list_leaves
from meshtrain.library.rows import check_traced, count_rows, cut, in_mesh, on_devices
from meshtrain.library.stack import Stack, check_sums
from meshtrain.library.staged import GivenSchedule, StagedStack
from meshtrain.model.stats import LayerStats
from meshtrain.parallel.pipeline import schedules
from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.sharding import rules
from meshtrain.sharding.rules import GATHERED
from meshtrain.training import accumulators, pipelined, reduction
from meshtrain.training.reduction import Backward, Reduction
from meshtrain.units import shorten

if TYPE_CHECKING:
    from meshtrain.library.layouts import TreeLayout


def gradients(layout: TreeLayout, loss: Callable, axes: Any, microbatches: int = 1, compute: str | None = None,
              schedule: Schedule | None = None) -> Callable:
    """Return f(params, rows, key=None) -> (mean loss, gradients like params, float32, placed as in [optimizer]).

    The mean is Σ sum ÷ Σ count over all rows, on every layout; Σ sum if Σ count is 0. Call f inside `jax.jit`. The
    params of f may be stored as in any table, best as in [optimizer], and are read as in [params].

    loss: a function loss(params, rows) -> (sum, count), two scalars, or a `Stack`. Its rows are a tree of arrays [b,
    …], a part of the rows [B, …] of f. With `key`, the loss gets a third argument: a key for each row [b], which
    depends only on `key` and the row's number in the batch, so dropout is the same on every layout.

    axes: a tree like params whose leaves are tuples of logical names. microbatches: number of microbatches; it must
    divide the rows of a device. compute: dtype to which floating params are cast when they are read; None: no cast.

    schedule: the pipeline schedule of a `Stack`, from `choose_schedule`. With a schedule, weights are gathered once a
    step, so a stage holds its layers whole, and gradients are reduced once a step for any [grads].

    Raises: ValueError outside jax.jit, if the loss does not return (sum, count), or if rows or layers do not divide
    evenly.
    """
    inner, mesh = layout.inner, layout.mesh.abstract_mesh
    flat = jax.tree.leaves(axes, is_leaf=rules.is_axes)
    each = ", ".join(a for a in inner.token_axes if a not in inner.find_deferred_axes(flat)) if schedule is None else ""
    if each and (dtype := inner.rules.reduce) != accumulators.DTYPE:
        raise ValueError(f'gradients: {inner.rules.path} [grads] reduce = "{dtype}" cannot be applied over {each}: '
                         "there XLA reduces the gradients of your loss in each microbatch, in the dtypes of your "
                         f"matmuls; do not split [params], [grads] or sequences over {each} (as in ddp and zero1), or "
                         "remove the line")

    def compute_gradients(params, rows, key=None):
        check_traced("gradients", params, rows)
        value, grads = compute_in_mesh(params, rows, key)
        return on_devices(layout.mesh, value), grads

    def compute_in_mesh(params, rows, key):
        if key is not None and isinstance(loss, Stack):
            raise ValueError("gradients: key= does not work with a Stack, because its layers get no rows; draw the "
                             "masks from rows, or give the loss as one function")
        with in_mesh(layout.mesh):
            weights = _read(inner, axes, params, compute)
            if isinstance(loss, Stack) and schedule is not None:
                return _run_stages(layout, loss, schedule, axes, weights, rows)
            keys = () if key is None else (key,)
            if key is not None:
                rows = rows, jnp.arange(count_rows(rows), dtype=jnp.uint32)
            deferred = inner.find_deferred_axes(flat)
            if lines := lookups.find_lookups(inner, deferred, partial(_call, loss), weights, rows, *keys):
                # Without a shard_map XLA partitions them.
                warnings.warn(f"gradients on {layout}: they are reduced over {', '.join(deferred)} in each microbatch, "
                              f"because otherwise XLA aborts at the lookup at {', '.join(lines)}; {lookups.REMEDY}",
                              stacklevel=2)
                deferred = ()
            reduced = Reduction(inner, mesh, axes, deferred)
            batch = cut(inner, deferred, rows, microbatches)
            make = partial(loss.make_backward, inner, axes) if isinstance(loss, Stack) else partial(make_backward, loss)
            grads, (total, count), _ = reduction.accumulate(reduced, make, batch, weights, keys)
            count = accumulators.divisor(count.sum())
            return total.sum() / count, jax.tree.map(lambda g: g / count, grads)
    return compute_gradients


def check_options(loss: object, microbatches: object, compute: object, chunks: object = None) -> None:
    """Check arguments of `gradients`. Raises: ConfigError with every fault."""
    faults = []
    if not callable(loss):
        faults.append(f"loss={shorten(loss)} is not a function; give loss(params, rows) -> (sum, count), or an "
                      f"mt.Stack")
    for name, value in (("microbatches", microbatches), ("chunks", 1 if chunks is None else chunks)):
        try:
            given.check_count(name, value)
        except ConfigError as error:
            faults += error.messages
    try:
        is_float = compute is None or jnp.issubdtype(jnp.dtype(compute), jnp.floating)
    except TypeError:       # not the name of a dtype
        is_float = False
    if not is_float:
        faults.append(f"compute={compute!r} is not a floating dtype; give e.g. \"bfloat16\", or leave it out to read "
                      f"weights as they are stored")
    if faults:
        raise ConfigError(*faults)


def check_trained(params: Any) -> None:
    """Check the dtypes of parameters. Raises: ConfigError for arrays without a gradient, and for complex arrays, whose
    gradients would lose their imaginary parts in float32 sums."""
    for name, leaf in list_leaves(params).items():
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            remedy = ("store its real and its imaginary part as two arrays" if is_complex else
                      "close over it, or put it into the rows; mt.unpack leaves such arrays of a dict out")
            raise ConfigError(f"params: {name} has dtype {dtype} and cannot be trained; {remedy}")


def choose_schedule(stages: int, loss: Callable, microbatches: int, schedule: GivenSchedule | None,
                    chunks: int | None) -> Schedule | None:
    """Return the schedule for this number of stages; None for one stage. Raises: ConfigError for stages without a
    `Stack` or a schedule, and for arguments that do not fit the schedule."""
    if stages == 1:
        if schedule is not None or chunks is not None:
            name, value = ("schedule", schedule) if schedule is not None else ("chunks", chunks)
            raise ConfigError(f"{name}={value!r}, but mesh.stage=1: without stages there is no pipeline; leave "
                              f"{name} out, or give the mesh a size of stage")
        return None
    if not isinstance(loss, Stack):
        raise ConfigError(f"mesh.stage={stages}: a loss as one function has no layers that stages could divide, and "
                          f"every stage would repeat the same work; give an mt.Stack, or use mesh.stage=1")
    if schedule is None:
        raise ConfigError(f"mesh.stage={stages} without a schedule; give schedule=, one of "
                          f"{', '.join(schedules.NAMES)}, a schedule table, or a result of mt.schedule")
    return staged.make_schedule(schedule, stages, microbatches, chunks)


def _run_stages(tree_layout: TreeLayout, stack: Stack, schedule: Schedule, axes: Any, params: Any,
                rows: Any) -> tuple[jax.Array, Any]:
    """Return (mean, gradients placed as in [optimizer]) by the schedule. params: weights already read by `_read`. axes:
    their axes."""
    layout, map_axes = tree_layout.inner, partial(jax.tree.map, is_leaf=rules.is_axes)
    (ends, blocks), (ends_axes, blocks_axes) = stack.divide(params), stack.divide(axes)
    layer_axes = map_axes(lambda names: names[1:], blocks_axes)
    staged_stack = StagedStack(stack, layout, tree_layout.mesh, schedule, (layer_axes, ends_axes))
    staged_stack.check(blocks, ends, rows)
    into_stages = partial(pipelined.put_into_stages, layout, schedule.num_stages, schedule.num_chunks)
    ends = map_axes(lambda names, w: layout.constrain(GATHERED, w, names), ends_axes, ends)
    weights = map_axes(into_stages, blocks_axes, blocks)
    (total, count), d_blocks, d_ends = staged_stack.differentiate(weights, ends, rows)
    summed, count = layout.batch_axes, accumulators.divisor(count)

    def place(names, g):
        g = pipelined.take_out_of_stages(layout, summed, names, g)
        return layout.constrain("optimizer", g, names)
    grads = map_axes(lambda names, g: reduction.reduce_deferred(layout, summed, names, g), ends_axes, d_ends)
    grads[stack.layers] = map_axes(place, blocks_axes, d_blocks)
    return total / count, jax.tree.map(lambda g: g / count, grads)


def make_backward(loss: Callable, weights: Any, rows: Any, key: jax.Array | None = None) -> Backward:
    """Return the `Backward` of a loss by `jax.value_and_grad`. With a key, rows are (rows, their numbers [b]).

    Gradients of a microbatch have the dtype of the weights, and are added in float32. A cast inside the differentiated
    function would change nothing: layers in a scan, and slices of one array, collect their gradients before it.
    """
    def add(sums, rows, buffers):
        differentiate = jax.value_and_grad(partial(_call, loss), has_aux=True)
        (total, count), grads = differentiate(weights, rows, *(() if key is None else (key,)))
        return accumulators.add(sums, grads), (total, count), buffers, LayerStats()
    return Backward(add, weights, loss=(0, 0))


def _call(loss: Callable, weights: Any, rows: Any, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return the loss's (sum, count). With a key, rows are (rows, their numbers [b])."""
    given = (rows,) if key is None else (rows[0], jax.vmap(jax.random.fold_in, (None, 0))(key, rows[1]))
    return check_sums(loss(weights, *given), "the loss")


def _read(inner: rules.Layout, axes: Any, params: Any, dtype: str | None):
    """Return the weights as the loop over microbatches reads them: cast on the shards of [optimizer], then [params]."""
    def read(names, w):
        if dtype is not None and jnp.issubdtype(w.dtype, jnp.floating):
            # Constrained to its stored sharding; otherwise XLA gathers float32 and casts afterwards.
            w = inner.constrain("optimizer", w.astype(dtype), names)
        return inner.constrain("params", w, names)
    return jax.tree.map(read, axes, params, is_leaf=rules.is_axes)
