"""Models of other libraries as a tree of arrays, their logical axes, and a function that puts arrays back.

Flax's nnx and linen keep logical names in metadata, which this module reads. Any other pytree (a dict, a module of
equinox) needs the names as an argument. Only flax is imported: a module of equinox is a pytree, and its leaves that are
not parameters (functions, integers) stay in it.
"""
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from meshtrain import config
from meshtrain.library import axes as axes_of
from meshtrain.library.axes import Axes
from meshtrain.units import shorten

# Metadata of an nnx variable that may have its logical axes, in this order: ours, then those of flax's versions.
METADATA = ("logical_axes", "out_sharding", "sharding_names", "sharding")
NNX_REMEDY = (" in its metadata: nnx.with_metadata(init, logical_axes=(…)), or nnx.with_partitioning(init, (…)) and "
              "the module made in `with nnx.use_eager_sharding(False):`, because flax takes these names for mesh axes "
              "otherwise")
LINEN_REMEDY = " in its metadata: nn.with_logical_partitioning(init, (…))"


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A model as arrays. params: the tree of trained arrays. axes: a tree like params with a tuple of logical axes for
    each array. join: a function params -> the original model with these arrays."""
    params: Any
    axes: Any
    join: Callable[[Any], Any]


def unpack(module: Any, axes: Any = None) -> Parts:
    """Return the parameters of a model, their logical axes, and the function that rebuilds the model from parameters.

    module: an nnx module, linen's variables (the result of `init`), a module of equinox, or any tree of arrays. The
    trained arrays are nnx's Params, or the floating-point arrays of a tree. axes: replaces the metadata: a tree like
    the parameters with a tuple for each array (a name or None for each dim), or {"glob of a path": tuple}, where each
    glob must match. Arrays of fewer than two dims need no axes and stay whole. Raises: ConfigError with every fault.

    >>> parts = mt.unpack({"up": np.ones((32, 64)), "steps": 3}, {"up": ("embed", "mlp")})
    >>> parts.axes["up"], parts.join(parts.params)["steps"]
    (('embed', 'mlp'), 3)
    """
    if isinstance(module, nnx.Module):
        return _unpack_nnx(module, axes)
    if any(map(_is_box, jax.tree.leaves(module, is_leaf=_is_box))):
        return _unpack_linen(module, axes)

    def select(leaf):
        is_array = isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
        return leaf if is_array and jnp.issubdtype(leaf.dtype, jnp.inexact) else None

    def join(params):
        return jax.tree.map(lambda new, old: old if new is None else new, params, module, is_leaf=lambda x: x is None)
    params = jax.tree.map(select, module)
    if not jax.tree.leaves(params):
        raise config.ConfigError(f"{shorten(module)} has no floating-point arrays; give a model with its arrays: a "
                                 f"tree, an nnx module, or the result of a linen module's init")
    return Parts(params, _name(params, {}, axes, ""), join)


def _unpack_nnx(module: nnx.Module, axes: Any) -> Parts:
    graph, trained, rest = nnx.split(module, nnx.Param, ...)
    others = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(rest)}
    if states := [name for name, variable in others.items() if isinstance(variable, nnx.BatchStat)]:
        raise config.ConfigError(f"{states[0]}: statistics of a batch (nnx.BatchStat) are not a function of "
                                 f"parameters and rows; use a norm without them, e.g. nnx.LayerNorm")
    if keys := [name for name, variable in others.items() if isinstance(variable, nnx.RngState)]:
        raise config.ConfigError(f"{keys[0]}: random numbers that a module keeps (nnx.Rngs) would be the same in every "
                                 f"step; make the module without them, and pass rngs when it is called")
    flat = list(nnx.to_flat_state(trained))
    metadata = {"/".join(map(str, path)): found for path, variable in flat
                if (found := _read_metadata(variable.get_metadata())) is not None}
    params: dict = {}
    for path, variable in flat:
        home = functools.reduce(lambda tree, key: tree.setdefault(key, {}), path[:-1], params)
        home[path[-1]] = variable.get_value()

    def join(params):
        state = [(path, variable.replace(functools.reduce(operator.getitem, path, params))) for path, variable in flat]
        return nnx.merge(graph, nnx.from_flat_state(state), rest)
    return Parts(params, _name(params, metadata, axes, NNX_REMEDY), join)


def _unpack_linen(variables: Any, axes: Any) -> Parts:
    if isinstance(variables, Mapping) and "params" in variables and (
            other := [name for name in variables if name != "params"]):
        raise config.ConfigError(f"variables have the collection {other[0]!r} beside 'params', which is not a "
                                 f"function of parameters and rows; unpack {{'params': …}} alone")
    boxes = axes_of.list_leaves(variables, _is_box)
    metadata = {name: found for name, box in boxes.items()
                if (found := _read_metadata({"sharding": getattr(box, "names", None)})) is not None}
    params = jax.tree.map(lambda x: x.value if _is_box(x) else x, variables, is_leaf=_is_box)
    return Parts(params, _name(params, metadata, axes, LINEN_REMEDY), lambda params: params)


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _read_metadata(metadata: Mapping[str, Any]) -> Axes | None:
    """Return the logical axes in an array's metadata; None if there are none."""
    return next((tuple(metadata[name]) for name in METADATA if metadata.get(name) is not None), None)


def _name(params: Any, metadata: Mapping[str, Axes], given: Any, remedy: str) -> Any:
    """Return the tree of the axes of params. given: axes that replace metadata. Raises: ConfigError with every fault.
    """
    with config.user_errors():
        leaves = axes_of.list_leaves(params)
        matched, faults = axes_of.match(leaves, given) if given is not None else ({}, [])
        named = {**metadata, **matched}
        faults += axes_of.find_shape_faults(leaves, named, remedy)
        if faults:
            raise config.ConfigError(*faults)
    full = [named.get(name, (None,) * np.ndim(leaf)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(params), full)
