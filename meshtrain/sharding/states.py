"""The logical axes of an optimizer's state, for any optax transformation, by which [optimizer] places it."""
from __future__ import annotations

import itertools
from typing import Any

import jax
import optax


def state_axes(tx: optax.GradientTransformation, abstract_params: Any, logical_axes: Any) -> Any:
    """Return the logical axes of every leaf of the optimizer state, by which the rules' [optimizer] table shards it.

    logical_axes: a tree like params whose leaves are tuples of names. Returns the structure of `tx.init(params)` with a
    tuple per leaf, one name or None per dim. The state contains tuples itself, so map over the state first:
    `jax.tree.map(lambda leaf, axes: …, jax.eval_shape(tx.init, params), axes_tree)`.

    It works for any optimizer. `init` is traced twice on parameters in which each dim has a unique size, and a dim of
    the state is recognized by its two sizes. A dim with the same size in both traces is a constant (muon keeps three
    coefficients). A name appears once in a leaf: a second dim of the same name is None, because a mesh axis can split
    only one of them (a preconditioner [D, D] is split by rows).
    """
    axis_of_size = {}

    def probe_state(first: int):
        sizes = itertools.count(first)

        def probe(leaf, axes):
            if len(axes) != leaf.ndim:
                raise ValueError(f"logical axes {axes} do not fit a parameter of shape {leaf.shape}: one name or None "
                                 f"per dim")
            shape = tuple(itertools.islice(sizes, leaf.ndim))
            axis_of_size.update(zip(shape, axes, strict=True))
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        return jax.eval_shape(tx.init, jax.tree.map(probe, abstract_params, logical_axes))

    def name_dims(leaf, other):
        names = [None if size == again else axis_of_size.get(size) for size, again in zip(leaf.shape, other.shape)]
        return tuple(None if name in names[:dim] else name for dim, name in enumerate(names))
    return jax.tree.map(name_dims, probe_state(1009), probe_state(1_000_003))
