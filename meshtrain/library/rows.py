"""Rows of a batch as microbatches, and the mesh context of the library's functions."""
from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshtrain.sharding import rules


def in_mesh(mesh: Mesh) -> AbstractContextManager:
    """Return a context with this mesh, or with the mesh that is already in context."""
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    return nullcontext() if has_mesh else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def on_devices(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Return a scalar, and name the devices of the mesh if no mesh is in context. Otherwise a program whose arguments
    are on no devices of the mesh (host arrays) would be compiled for one device."""
    if not jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))


def check_traced(name: str, *args: Any) -> None:
    """Check that a leaf of args is traced. Raises: ValueError if no leaf is: the computation needs `jax.jit`."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        raise ValueError(f"{name}: call the function inside jax.jit, e.g. jax.jit(f)(…)")


def count_rows(rows: Any) -> int:
    """Return B of a tree of arrays [B, …]. Raises: ValueError."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(rows)}
    if len(sizes) != 1 or sizes == {()}:
        shapes = ", ".join(str(jnp.shape(x)) for x in jax.tree.leaves(rows))
        raise ValueError(f"rows are {shapes or 'empty'}: each array must be [B, …] with the same number of rows B")
    return sizes.pop()[0]


def cut(layout: rules.Layout, deferred_axes: tuple[str, ...], rows: Any, microbatches: int):
    """Return rows [B, …] as [microbatches, replicas, b, …], without moving a row between devices.

    A microbatch has an equal part of the rows of every device. replicas: a dim over the deferred axes, which are some
    of the batch axes. Needs a mesh in context. Raises: ValueError if the rows do not divide evenly.
    """
    batch_axes = layout.batch_axes
    rest = tuple(axis for axis in batch_axes if axis not in deferred_axes)
    sizes, shards = [layout.sizes[axis] for axis in batch_axes], layout.num_shards(batch_axes)
    num_rows = count_rows(rows)
    if num_rows % (microbatches * shards):
        over = " × ".join(f"{axis} {layout.sizes[axis]}" for axis in batch_axes) or "1 device"
        multiple = microbatches * shards
        raise ValueError(f"{num_rows} rows do not divide over {microbatches} microbatches × {over}; use a multiple of "
                         f"{multiple}, e.g. {math.ceil(num_rows / multiple) * multiple}")
    at = [batch_axes.index(axis) for axis in (*deferred_axes, *rest)]

    def constrain(x, *spec):
        if all(n == 1 for n in layout.sizes.values()):
            return x
        free = [P.UNCONSTRAINED] * (x.ndim - len(spec))
        return jax.lax.with_sharding_constraint(x, P(*spec, *free))

    def cut(x):
        x = constrain(x, batch_axes or None)
        x = constrain(x.reshape(*sizes, microbatches, -1, *x.shape[1:]), *batch_axes)
        n = len(sizes)
        x = x.transpose(n, *at, *range(n + 1, x.ndim))
        x = x.reshape(microbatches, layout.num_shards(deferred_axes), -1, *x.shape[n + 2:])
        return constrain(x, None, deferred_axes or None, rest or None)
    return jax.tree.map(cut, rows)
