"""Parameters and their metadata, without arrays: shape, logical axes, role, initializer.

flax NNX modules declare parameters. Each `nnx.Param` carries `logical_axes`, `role` and `fan_in_dims`. The modules are
split once into nested dicts of arrays, for scan, vjp and shard_map. The list of `ParamInfo` serves rules, inspect, the
optimizer and checkpoints. Layers are stacked: their leaves have a leading [L].
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.names import LAYERS, LEADING, MATMUL_ROLES


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One parameter: its path, full shape (with the layers dim), and metadata for rules, optimizers and checkpoints."""
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    role: str
    fan_in_dims: int    # number of leading dims (after layers) that a matrix contracts with its input
    trainable: bool = True  # else frozen: no gradient, no optimizer state

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @functools.cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix_dims(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return (input dims, output dims) of a matrix, without dims of layers and experts; None for other roles."""
        if self.role != "matrix":
            return None
        first = sum(axis in (LAYERS, LEADING, "expert") for axis in self.axes)       # stacks of matrices
        split = first + self.fan_in_dims
        return tuple(range(first, split)), tuple(range(split, len(self.shape)))


def declare(rngs: nnx.Rngs, dtype, shape, axes, role: str, *, std: float | None = None, fan_in_dims: int = 1,
            value: float | None = None) -> nnx.Param:
    """Return a parameter: the constant `value`, or normal with `std` (default 1/sqrt(fan-in)), truncated at 3
    deviations.

    dtype: the dtype of matrices and tables. All other parameters (norms, biases, routers and their balance) are
    float32: they start at 0 or 1, change by less than bfloat16 can represent, and take few bytes.
    """
    dtype = dtype if role in MATMUL_ROLES else jnp.dtype("float32")
    if value is not None:
        array = jnp.full(shape, value, dtype)
    else:
        std = std if std is not None else math.prod(shape[:fan_in_dims]) ** -0.5
        array = (std * jax.random.truncated_normal(rngs.params(), -3, 3, shape, jnp.float32)).astype(dtype)
    return nnx.Param(array, logical_axes=tuple(axes), role=role, fan_in_dims=fan_in_dims)


class KeyStream(nnx.RngStream):
    """Draws the same keys as nnx's stream, but counts them in a Python number.

    nnx counts in an array. Under a trace, each increment raises an error that contains the printed program, and nnx
    catches this error. These errors took a third of the time to build a model.
    """

    def __init__(self, key: jax.Array | int):
        super().__init__(key, tag="params")
        self.drawn = 0

    def __call__(self) -> jax.Array:
        self.drawn += 1
        return jax.random.fold_in(self.key[...], self.drawn - 1)


def make_rngs(key: jax.Array | int) -> nnx.Rngs:
    """Return nnx's random streams for a new module: only the stream "params"."""
    rngs = nnx.Rngs(params=key)
    rngs.params = KeyStream(key)
    return rngs


class Module:
    """An NNX module class with its config. The module is traced once without arrays, then merged with arrays when
    needed."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]):
        self.make = make
        abstract = nnx.eval_shape(lambda: make(make_rngs(0)))
        self.graphdef, self.state = nnx.split(abstract, nnx.Param)
        self.infos = {tuple(map(str, path)): variable for path, variable in nnx.to_flat_state(self.state)}

    def init(self, key: jax.Array):
        """Return new parameters as a nested dict. The values depend only on the key, not on the layout."""
        return nnx.to_pure_dict(nnx.state(self.make(make_rngs(key)), nnx.Param))

    def bind(self, params) -> nnx.Module:
        """Return the module with these arrays. The module is valid inside any trace."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(jax.tree.structure(self.state), jax.tree.leaves(params)))


def infos(module: Module, prefix: tuple[str, ...] = (), num_layers: int | None = None,
          axis: str = LAYERS) -> list[ParamInfo]:
    """Return the parameters of a module.

    With num_layers, the parameters are stacked along a leading dim with the logical axis `axis`."""
    lead, lead_axes = ((num_layers,), (axis,)) if num_layers else ((), ())
    rows = []
    for path, variable in module.infos.items():
        meta = variable.get_metadata()
        if "logical_axes" not in meta:
            raise ValueError(f"the parameter {'/'.join(path)} has no logical axes; declare it by Linear or Norm of "
                             f"meshtrain.model.layers, or by declare of meshtrain.model.params")
        value = variable.get_value()
        rows.append(ParamInfo(prefix + path, lead + tuple(value.shape), jnp.dtype(value.dtype),
                              lead_axes + meta["logical_axes"], meta["role"], meta["fan_in_dims"]))
    return rows


def tree(infos: Sequence[ParamInfo], leaf: Callable[[ParamInfo], object]):
    """Return a nested dict like the parameters, with leaves `leaf(info)`."""
    out: dict = {}
    for info in infos:
        functools.reduce(lambda node, key: node.setdefault(key, {}), info.path[:-1], out)[info.path[-1]] = leaf(info)
    return out


def map_params(infos: Sequence[ParamInfo], f: Callable[[ParamInfo, object], object], params):
    """Return a nested dict like the parameters, with leaves `f(info, leaf)`."""
    return tree(infos, lambda info: f(info, functools.reduce(dict.__getitem__, info.path, params)))


class Divided(NamedTuple):
    """The parameters as two nested dicts.

    Both contain all inner dicts, even empty ones. frozen: the parameters without gradients."""
    trained: dict
    frozen: dict


def divide(infos: Sequence[ParamInfo], params: dict) -> Divided:
    trainable = {info.path: info.trainable for info in infos}

    def part(node, path, wanted):
        of = {key: (*path, key) for key in node}
        return {key: leaf if of[key] in trainable else part(leaf, of[key], wanted) for key, leaf in node.items()
                if trainable.get(of[key], wanted) == wanted}
    return Divided(part(params, (), True), part(params, (), False))


def join(a: dict, b: dict) -> dict:
    """Return the tree that `divide` split into a and b."""
    return {key: join(a[key], b[key]) if key in a and key in b else (a if key in a else b)[key] for key in a | b}
