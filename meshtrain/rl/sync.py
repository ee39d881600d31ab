"""The weights of a training run as its sampler reads them: cast, and moved from one layout to another.

Both layouts are on the same mesh. Every array is cast where it is stored, before it moves, and moves as
`sharding.moves` plans. An array that already has the final sharding and dtype is not copied. Adapters are not merged:
rounding the merged weights would give the sampler another policy.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshtrain.model.params import ParamInfo, map_params, tree
from meshtrain.model.transformer import Transformer
from meshtrain.names import MATMUL_ROLES
from meshtrain.sharding import moves
from meshtrain.sharding.rules import Layout

# Names of the programs.
TRAINED = "the transfer of the weights to the sampler"
FROZEN = "the transfer of the frozen weights to the sampler"


def read_dtype(info: ParamInfo, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of a weight for samplers. dtype: the dtype of matmul weights."""
    return dtype if info.role in MATMUL_ROLES else info.dtype


def cast(model: Transformer, params: dict, dtype: jnp.dtype) -> dict:
    """Return the weights in the dtypes that samplers read, in the sharding in which they are stored."""
    def cast_one(info: ParamInfo, w: Any) -> jax.Array:
        return w.astype(read_dtype(info, dtype))
    return map_params(model.parameters(), cast_one, params)


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSync:
    """Moves weights from the trainer's layout to the sampler's.

    stored: the layout whose [optimizer] shards the stored weights. read: the layout whose [params] shards the weights
    that the sampler reads. dtype: the sampler's dtype of matmul weights. compiled: see `Generator`.
    """
    model: Transformer
    mesh: jax.sharding.Mesh
    stored: Layout
    read: Layout
    dtype: jnp.dtype
    compiled: Callable
    _frozen: dict = dataclasses.field(default_factory=dict, init=False, repr=False)
    _programs: dict = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __call__(self, params: dict) -> dict:
        """Return the sampler's weights. Frozen weights are moved at the first call, and kept. Raises: as `compiled`."""
        leaves = {info: functools.reduce(dict.__getitem__, info.path, params) for info in self.model.parameters()}
        moving = [info for info in leaves if self.moves(info)]
        if not self._frozen:
            self._frozen.update(self._move(FROZEN, [
                info for info in moving if not info.trainable], leaves))
        moved = self._move(TRAINED, [info for info in moving if info.trainable], leaves)
        return tree(self.model.parameters(), (leaves | self._frozen | moved).__getitem__)

    def moves(self, info: ParamInfo) -> moves.Moves | None:
        """Return the moves of a weight; None if the sampler reads the stored array."""
        planned = moves.of_weight(info.shape, info.axes, self.stored, self.read)
        return None if planned.before == planned.after and info.dtype == read_dtype(info, self.dtype) else planned

    def program(self, infos: Sequence[ParamInfo]):
        """Return a jitted function that maps the stored arrays to the sampler's weights."""
        way = {info: planned for info in infos if (planned := self.moves(info))}

        def sharding_of(info: ParamInfo, split: moves.Split) -> NamedSharding:
            return NamedSharding(self.mesh, way[info].spec(split))

        def moved(arrays: list) -> list:
            weights = []
            for (info, along), w in zip(way.items(), arrays, strict=True):
                w = w.astype(read_dtype(info, self.dtype))
                for split in (along.before, along.between):
                    w = jax.lax.with_sharding_constraint(w, sharding_of(info, split))
                weights.append(w)
            return weights
        return jax.jit(moved, in_shardings=([sharding_of(info, along.before) for info, along in way.items()],),
                       out_shardings=[sharding_of(info, along.after) for info, along in way.items()])

    def abstract(self) -> dict:
        """Return the weights as ShapeDtypeStructs with shardings."""
        return tree(self.model.parameters(), lambda info: jax.ShapeDtypeStruct(
            info.shape, read_dtype(info, self.dtype),
            sharding=NamedSharding(self.mesh, self.read.spec("params", info.axes))))

    def program_of(self, stored: dict):
        """Return the compiled program that moves the trained weights, from shapes alone; None if nothing moves.

        stored: ShapeDtypeStructs.
        """
        infos = [info for info in self.model.parameters() if info.trainable and self.moves(info)]
        arrays = [functools.reduce(dict.__getitem__, info.path, stored) for info in infos]
        return self.compiled(TRAINED, self.program(infos), arrays) if infos else None

    def _move(self, name: str, infos: Sequence[ParamInfo], leaves: dict) -> dict:
        if not infos:
            return {}
        arrays = [leaves[info] for info in infos]
        if name not in self._programs:
            self._programs[name] = self.compiled(name, self.program(infos), arrays)
        return dict(zip(infos, self._programs[name](arrays), strict=True))
