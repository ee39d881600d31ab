"""The logical axes of an optimizer's state, for any optax transformation, by which [optimizer] places it."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import optax

from meshtrain.sharding import rules


def state_axes(tx: optax.GradientTransformation, abstract_params: Any, logical_axes: Any) -> Any:
    """Return the logical axes of every leaf of the optimizer state, by which the rules' [optimizer] table shards it.

    logical_axes: a tree like params whose leaves are tuples of names. Returns the structure of `tx.init(params)` with a
    tuple per leaf, one name or None per dim. The state contains tuples itself, so map over the state first:
    `jax.tree.map(lambda leaf, axes: …, jax.eval_shape(tx.init, params), axes_tree)`.

    It works for any optimizer. `init` is traced twice on parameters in which each dim has a unique size, and a dim of
    the state is recognized by its two sizes. A dim with the same size in both traces is a constant (muon keeps three
    coefficients). If a leaf has other dims than in the traces, because its form depends on sizes (optax's adafactor
    factors the two largest dims of a large weight), `_name_by_growth` names them. A name appears once in a leaf: a
    second dim of the same name is None, because a mesh axis can split only one of them (a preconditioner [D, D] is
    split by rows).
    """
    of_size: dict[int, tuple[str | None, int]] = {}     # of the probes: logical axis, size of the parameter's dim

    def probe_state(first: int):
        sizes = itertools.count(first)

        def probe(leaf, axes):
            if len(axes) != leaf.ndim:
                raise ValueError(f"logical axes {axes} do not fit a parameter of shape {leaf.shape}: one name or None "
                                 f"per dim")
            shape = tuple(itertools.islice(sizes, leaf.ndim))
            of_size.update(zip(shape, zip(axes, leaf.shape), strict=True))
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        return jax.tree.flatten(jax.eval_shape(tx.init, jax.tree.map(probe, abstract_params, logical_axes)))

    def name_dims(leaf, probe, other):
        """Return the axes of a leaf; None if the dims of the probes are others."""
        dims = [(None, size) if size == again else of_size.get(size, (None, n))
                for n, size, again in zip(leaf.shape, probe.shape, other.shape)]
        return _keep_first([name for name, _ in dims]) if (*(n for _, n in dims),) == leaf.shape else None
    leaves, structure = jax.tree.flatten(jax.eval_shape(tx.init, abstract_params))
    (probes, as_probed), (others, _) = probe_state(1009), probe_state(1_000_003)
    named = list(map(name_dims, leaves, probes, others)) if as_probed == structure else [None] * len(leaves)
    if None in named:
        by_growth = _name_by_growth(tx, abstract_params, logical_axes)
        named = [by_growth[k] if names is None else names for k, names in enumerate(named)]
    return jax.tree.unflatten(structure, named)


def _name_by_growth(tx: optax.GradientTransformation, params: Any, logical_axes: Any) -> list[tuple[str | None, ...]]:
    """Return the axes of the leaves of the state by traces of `init` in which all dims of one name are larger by 1, or
    smaller by 1. A dim of the state has the one name with which it grows or shrinks by 1; None for no or several names.
    Both directions are traced, because another order of two dims by size may give a leaf another form."""
    flat = list(zip(jax.tree.leaves(params), jax.tree.leaves(logical_axes, is_leaf=rules.is_axes), strict=True))
    sizes = {(name, n) for leaf, axes in flat for name, n in zip(axes, leaf.shape) if name is not None}

    def trace(named: str | None, step: int):
        def resize(leaf, axes):
            shape = (n + step * (name is not None and name == named) for n, name in zip(leaf.shape, axes))
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
        return jax.tree.flatten(jax.eval_shape(tx.init, jax.tree.map(resize, params, logical_axes)))
    leaves, structure = trace(None, 0)
    resized = [(name, step, shapes) for name in dict.fromkeys(name for name, _ in sizes) for step in (1, -1)
               for shapes, as_resized in [trace(name, step)] if as_resized == structure]

    def name_dim(k: int, dim: int, n: int) -> str | None:
        names = {name for name, step, shapes in resized if (name, n) in sizes
                 and len(shapes[k].shape) == len(leaves[k].shape) and shapes[k].shape[dim] == n + step}
        return names.pop() if len(names) == 1 else None
    return [_keep_first([name_dim(k, dim, n) for dim, n in enumerate(leaf.shape)]) for k, leaf in enumerate(leaves)]


def _keep_first(names: Sequence[str | None]) -> tuple[str | None, ...]:
    return tuple(None if name in names[:dim] else name for dim, name in enumerate(names))
