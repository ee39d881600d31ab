"""Gradients over microbatches: accumulated as in [grads], reduced once, and placed as in [optimizer].

This module has the sharding constraints that give the compiled program ZeRO's memory and collectives. The scan over
microbatches runs in a shard_map that is manual over the batch axes that [grads] does not name, so that nothing is
reduced over these axes before the scan ends. The final sum and its sharding as in [optimizer] are one expression. The
computation of a microbatch is a `Backward`: of the transformer (`accumulate`), of a stack or of any loss
(`meshtrain.library`). This module knows no model. Source: arXiv:1910.02054 (ZeRO).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from meshtrain import scopes
from meshtrain.sharding import reduced, rules
from meshtrain.sharding.mesh import automatic_axes, on_shards
from meshtrain.sharding.rules import Layout
from meshtrain.training import accumulators


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """Where the gradients of a step are summed.

    axes: logical axes of the weights with gradients, a tree like these weights. deferred_axes: the batch axes over
    which gradients are reduced once per step (`Layout.find_deferred_axes`). The scan over microbatches is manual over
    them.
    """
    layout: Layout
    mesh: Mesh | AbstractMesh
    axes: Any
    deferred_axes: tuple[str, ...]


class Backward(NamedTuple):
    """Forward and backward of one microbatch.

    add(sums, rows, buffers) -> (sums with the microbatch's gradients added, loss, buffers, stats). loss: the sum over
    the microbatch, or a tree of sums. stats: a `LayerStats`.

    trained: the weights with gradients (arrays or ShapeDtypeStructs), a tree like sums. buffers: ShapeDtypeStructs of
    the arrays that `add` overwrites in each microbatch, None where there is no array. loss: 0 for each sum of `loss`.
    """
    add: Callable
    trained: Any
    buffers: Any = ()
    loss: Any = 0


def accumulate(reduction: Reduction, make: Callable[..., Backward], batch, weights, given: tuple = (), used=None):
    """Return (gradients summed over the batch, sharded as in [optimizer]; loss [replicas]; stats [replicas, …]).

    make(weights, rows, *given) returns the `Backward` of microbatches like `rows`. It is called inside the shard_map.

    batch: arrays [microbatches, replicas, rows, …], with replicas sharded over the deferred axes. weights: the weights
    as the loop reads them, placed as in [params]. used: if not None, only the first `used` microbatches are computed.
    """
    layout, deferred = reduction.layout, reduction.deferred_axes

    def constrain(grads):
        """Constrain accumulators to the sharding of [grads]."""
        return jax.tree.map(lambda axes, g: layout.constrain("grads", g, axes), reduction.axes, grads,
                            is_leaf=rules.is_axes)

    def accumulate_replica(batch, weights, given: tuple, used):
        """Return (gradients, loss, stats) of a replica's part of the batch, each with a leading dim of size 1."""
        batch = select_replica(batch)
        backward = make(weights, jax.tree.map(lambda x: x[0], batch), *given)

        def add(carry, rows):
            grads, loss, buffers = carry
            grads, new, buffers, stats = backward.add(grads, rows, buffers)
            return (constrain(grads), jax.tree.map(jnp.add, loss, new), buffers), stats

        zeros, rows = accumulators.zeros(backward.trained), jax.tree.leaves(batch)[0].shape[1]
        buffers = jax.tree.map(partial(residual_buffer, layout, rows), backward.buffers)
        start = constrain(zeros), jax.tree.map(jnp.float32, backward.loss), buffers
        (grads, loss, _), stats = scan_microbatches(add, start, batch, used)
        return jax.tree.map(lambda x: x[None], (grads, loss, stats))

    def reduce(axes, g):
        # Constrained once more, before the sum. Otherwise propagation shards the accumulators inside the loop
        # (ZeRO-1: 11 all-gathers per microbatch).
        return reduce_deferred(layout, deferred, axes, _constrain_unsummed(layout, deferred, axes, g))
    grads, loss, stats = on_replicas(reduction, accumulate_replica)(batch, weights, given, used)
    return jax.tree.map(reduce, reduction.axes, grads, is_leaf=rules.is_axes), loss, stats


def on_replicas(reduction: Reduction, f: Callable, out: P | None = None) -> Callable:
    """Return f(batch, *args) run on each replica's part of the batch, [microbatches, 1, …].

    f runs in a shard_map that is manual over the deferred axes. f returns arrays with a dim of size 1 for its replica,
    the first dim unless `out` says otherwise.
    """
    deferred = reduction.deferred_axes
    if not deferred:
        return f

    def on_all(batch, *args):
        specs = P(None, deferred), *[P()] * len(args)
        return jax.shard_map(f, mesh=reduction.mesh, axis_names=set(deferred), check_vma=False,
                             out_specs=P(deferred) if out is None else out, in_specs=specs)(batch, *args)
    return on_all


def select_replica(batch):
    """Return [microbatches, …], the only replica's part of the batch [microbatches, 1, …]."""
    return jax.tree.map(lambda x: x[:, 0], batch)


def scan_microbatches(f: Callable, carry, batch, used=None):
    """Return (carry, stats added) of `lax.scan` of f over the microbatches.

    used: if not None, scan only the first `used` microbatches.
    """
    if used is None:
        carry, stats = jax.lax.scan(f, carry, batch)
        return carry, stats.combine()

    def microbatch(m):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False), batch)
    stats = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(lambda: f(carry, microbatch(0))[1]))

    def body(m, carried):
        carry, more = f(carried[0], microbatch(m))
        return carry, carried[1] + more
    with jax.named_scope(scopes.AT_MOST.write(len(jax.tree.leaves(batch)[0]))):
        return jax.lax.fori_loop(0, used, body, (carry, stats))


def residual_buffer(layout: Layout, rows: int, like):
    """Return a residual buffer like `like` without initialization. Zeros would take 0.3% of a step of llama3-8b.

    Each device allocates its own shard of the buffer; otherwise XLA allocates the whole array on each device. The
    buffer is zeros if its shape is not [layers, rows, …], or if axes other than those of the rows may split it.
    """
    axes = layout.batch_axes
    if like.shape[1:2] != (rows,) or layout.num_shards(axes) != layout.num_shards(automatic_axes()):
        return jnp.zeros(like.shape, like.dtype)
    shape = like.shape[0], rows // layout.num_shards(axes), *like.shape[2:]
    return on_shards(lambda: jax.lax.empty(shape, like.dtype), (), P(None, axes or None))()


def _constrain_unsummed(layout: Layout, deferred: tuple[str, ...], axes, g):
    """Constrain [replicas, …] accumulators to the sharding of [grads], with one copy per replica."""
    if all(n == 1 for n in layout.sizes.values()):
        return g
    return jax.lax.with_sharding_constraint(g, P(deferred or None, *layout.spec("grads", axes, drop=deferred)))


def reduce_deferred(layout: Layout, deferred: tuple[str, ...], axes, g, weight_axes=None):
    """Return the float32 sum of a [replicas, …] accumulator over replicas, sharded as in [optimizer].

    weight_axes: the weight's logical axes, if `axes` belong to a reshaped form of the weight.

    The sum is a reduce-scatter where [optimizer] shards over `deferred`. Sum and constraint are one expression, because
    a [grads] constraint between them would cause an all-reduce. If [optimizer] shards over only some of the `deferred`
    axes, the sum is reduce-scattered over these axes first, and its shards are all-reduced over the others ((N-1)/N of
    the payload, then 2(N-1)/N of a shard).
    """
    split = layout.spec("optimizer", axes)

    def add(g, dims):
        return reduced.add(g, dims, reduced.dtype_once(layout, weight_axes or axes))

    def place(g):
        return layout.constrain("optimizer", g, axes).astype(accumulators.DTYPE)
    if not deferred:
        return layout.constrain("optimizer", g[0], axes)
    used = {a for entry in split if entry for a in ((entry,) if isinstance(entry, str) else entry)}
    scattered = tuple(a for a in deferred if a in used)
    rest = tuple(a for a in deferred if a not in used)
    if scattered and rest:
        pinned = layout.spec("grads", axes, drop=deferred)
        g = g.reshape([layout.sizes[a] for a in deferred] + list(g.shape[1:]))
        g = jax.lax.with_sharding_constraint(g, P(*deferred, *pinned))
        g = add(g, tuple(deferred.index(a) for a in scattered))
        g = jax.lax.with_sharding_constraint(g, P(*rest, *split))
        return place(add(g, tuple(range(len(rest)))))
    if (sliced := layout.spec("optimizer", axes, drop=deferred)) != layout.spec("grads", axes, drop=deferred):
        # First a slice over the axes that only [optimizer] has besides (context); otherwise the sum becomes an
        # all-reduce.
        g = jax.lax.with_sharding_constraint(g, P(deferred, *sliced))
    return place(add(g, (0,)))
