"""Lookups that XLA cannot partition, found before it aborts the process.

`jnp.take_along_axis` and its like are gathers with batching dims: each row of an array is indexed by its own numbers.
XLA's partitioner (jax 0.10 and 0.12) aborts the process if one automatic mesh axis splits such a batching dim, another
automatic axis splits the dim that is looked up, and the gather is inside a shard_map over a third axis. Which axes
split an array inside a loss is not known before XLA chooses them. So every such gather counts if the mesh has these
axes.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from meshtrain.cost.program import traced
from meshtrain.sharding import rules

REMEDY = ("index all dims, e.g. x[jnp.arange(B)[:, None], jnp.arange(T), ids], or multiply by jax.nn.one_hot(ids, n) "
          "and sum")


def find_lookups(layout: rules.Layout, manual_axes: Sequence[str], function: Callable, *args: Any) -> list[str]:
    """Return the lines of Python with lookups at which XLA may abort if function(*args) runs in a shard_map over
    `manual_axes`. Needs a mesh in context."""
    automatic = [axis for axis, size in layout.sizes.items() if size > 1 and axis not in manual_axes]
    if not manual_axes or len(automatic) < 2:
        return []
    return list(dict.fromkeys(_list_lines(jax.make_jaxpr(function)(*args).jaxpr, "a line without a name")))


def _list_lines(jaxpr: Jaxpr, outside: str) -> Iterator[str]:
    """Yield the line of each such gather. outside: the line of the equation that contains this jaxpr."""
    for eqn in jaxpr.eqns:
        line = traced.line_in_python(eqn) or outside
        if eqn.primitive.name == "gather" and eqn.params["dimension_numbers"].operand_batching_dims:
            yield line
        for inner in traced.list_inner(eqn.params):
            yield from _list_lines(inner, line)
