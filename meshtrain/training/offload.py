"""Moments in the host's memory: a step copies a piece of them to the device, updates it, and copies it back.

The moments of matrices, embedding and head keep their shapes [L, …] and their shards. One loop passes over the layers:
it slices one layer out of the host's arrays, applies the optimizer's rule, and writes the new moments back in place. So
the device holds the moments of one layer. XLA copies slices asynchronously within a loop's body. It cannot start these
copies before the loop; copies of whole arrays it starts early, and they then lie on the device during the backward. The
loop runs on a device's own shards (shard_map), so nothing is sent. The rule must be elementwise (`config.conflicts`).
"""
from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain.model.params import ParamInfo
from meshtrain.names import LAYERS, LEADING, MATMUL_ROLES
from meshtrain.scopes import HOST_MOMENTS
from meshtrain.training import rounding

KIND = "pinned_host"        # jax's name of the memory from which a GPU copies without the CPU
MOST_PIECES = 16            # of an embedding and a head, which have no layers
Numbered = dict[int, Any]        # number of a leaf -> array


@dataclasses.dataclass(frozen=True, eq=False)
class Offload:
    """An optimizer of which most moments are in the host's memory.

    owners: for each leaf of the state, the number of its parameter; None: the leaf stays on the device. infos, places:
    the trained parameters, and the shardings of their gradients and moments.
    """
    tx: optax.GradientTransformationExtraArgs
    owners: Sequence[int | None]
    infos: Sequence[ParamInfo]
    places: Sequence[NamedSharding]

    def map_moments(self, f: Callable, state):
        """Return the state with f(moment) in place of each moment that is in the host's memory."""
        leaves, structure = jax.tree.flatten(state)
        return jax.tree.unflatten(structure, [leaf if owner is None else f(leaf)
                                              for leaf, owner in zip(leaves, self.owners, strict=True)])

    def host_bytes(self, state) -> int:
        """Return the bytes of one device's moments in the host's memory. state: abstract arrays with shardings."""
        sizes: list[int] = []
        self.map_moments(lambda a: sizes.append(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize), state)
        return sum(sizes)

    def update(self, grads, state, params, *, step, finite) -> tuple[Any, optax.OptState]:
        """Return what `tx.update` returns, but the old state unless `finite`."""
        trees = grads, params, state
        gs, ps, leaves = (dict(enumerate(jax.tree.leaves(tree))) for tree in trees)
        hosted = {number: to_host(leaf) for number, leaf in leaves.items() if self.owners[number] is not None}
        near = _without(leaves, hosted)
        moved = dict.fromkeys(self._owner(number) for number in hosted)
        spec = {number: self.places[number].spec for number in moved}
        host_spec = {number: spec[self._owner(number)] for number in hosted}
        counts = {number: leaf for number, leaf in near.items() if leaf.ndim == 0}
        updated, hosted = jax.shard_map(
            lambda *of_shard: self._update_shard(trees, *of_shard), mesh=self.places[0].mesh, check_vma=False,
            in_specs=(spec, spec, host_spec, P(), P(), P()), out_specs=(spec, host_spec))(
                _pick(gs, moved), _pick(ps, moved), hosted, counts, step, finite)
        updates, new = self._call(trees, _without(gs, moved), _without(ps, moved), near, step=step)
        kept = {number: jnp.where(finite, new[number], leaf) for number, leaf in near.items()} | hosted
        return (jax.tree.unflatten(jax.tree.structure(grads), [(updates | updated)[number] for number in gs]),
                jax.tree.unflatten(jax.tree.structure(state), [kept[number] for number in leaves]))

    def _update_shard(self, trees: tuple, gs: Numbered, ps: Numbered, hosted: Numbered, counts: Numbered, step, finite
                      ) -> tuple[Numbered, Numbered]:
        """Return (updates, new moments) of a device's shards. Updates take the memory of the gradients."""
        for count, members in self._pieces({number: g.shape for number, g in gs.items()}).items():
            def update_piece(at, carry, count=count, members=members):
                gs, moments = carry

                def cut(array):
                    size = len(array) // count
                    return jax.lax.dynamic_slice_in_dim(array, at * size, size)

                def put(array, piece):
                    return jax.lax.dynamic_update_slice_in_dim(array, piece, at * len(piece), 0)
                with jax.named_scope(HOST_MOMENTS.form):
                    old = {number: jax.device_put(cut(leaf), jax.memory.Space.Device)
                           for number, leaf in moments.items()}
                updates, new = self._call(
                    trees, jax.tree.map(cut, gs), jax.tree.map(cut, _pick(ps, members)), counts | old, step=step,
                    windows={self.infos[number].name: self._window(number, gs[number].shape, at, count)
                             for number in members})
                kept = {number: jnp.where(finite, new[number], leaf) for number, leaf in old.items()}
                with jax.named_scope(HOST_MOMENTS.form):
                    written = {number: put(leaf, to_host(kept[number])) for number, leaf in moments.items()}
                return {number: put(g, updates[number]) for number, g in gs.items()}, written
            own = _pick(gs, members), {
                number: leaf for number, leaf in hosted.items() if self.owners[number] in members}
            updates, moments = jax.lax.fori_loop(0, count, update_piece, own)
            gs, hosted = gs | updates, hosted | moments
        return gs, hosted

    def _call(self, trees: tuple, gs: Numbered, ps: Numbered, leaves: Numbered, **more) -> tuple[Numbered, Numbered]:
        """Return the updates and the new leaves of some parameters. Arrays without elements stand for the others.
        trees: gradients, parameters and state, for their structures and dtypes."""
        def fill(numbered: Numbered, tree):
            return jax.tree.unflatten(jax.tree.structure(tree), [
                numbered.get(number, jnp.zeros(0, leaf.dtype)) for number, leaf in enumerate(jax.tree.leaves(tree))])
        full_grads, full_params, full_state = map(fill, (gs, ps, leaves), trees)
        updates, new = self.tx.update(full_grads, full_state, full_params, **more)
        return dict(enumerate(jax.tree.leaves(updates))), dict(enumerate(jax.tree.leaves(new)))

    def _owner(self, number: int) -> int:
        owner = self.owners[number]
        assert owner is not None
        return owner

    def _pieces(self, shapes: Mapping[int, Sequence[int]]) -> Mapping[int, list[int]]:
        """Return number of pieces -> the parameters that are cut into so many along their first dim. shapes: of the
        parameters' shards."""
        members = defaultdict(list)
        for number, (size, *_) in shapes.items():
            stacked = self.infos[number].axes[0] in (LAYERS, LEADING)
            members[size if stacked else max(n for n in range(1, MOST_PIECES + 1) if size % n == 0)].append(number)
        return members

    def _window(self, number: int, shape: Sequence[int], at, count: int) -> rounding.Window:
        """Return the place of piece `at` of `count` in the whole parameter. shape: of the device's shard."""
        spec = self.places[number].spec
        first = [jax.lax.axis_index(axes) * size if axes else 0
                 for axes, size in zip([*spec, *[None] * (len(shape) - len(spec))], shape, strict=True)]
        return rounding.Window(self.infos[number].shape, [first[0] + at * (shape[0] // count), *first[1:]])


def to_host(array):
    """Return an array in the host's memory, inside a program."""
    return jax.device_put(array, jax.memory.Space.Host)


def put(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return an abstract moment with a sharding in the host's memory. On devices that the machine does not have, jax
    drops the memory's kind; `Program.lower_step` writes it into the program."""
    assert isinstance(leaf.sharding, NamedSharding)
    place = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec, memory_kind=KIND)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _pick(numbered: Numbered, numbers: Iterable[int]) -> Numbered:
    return {number: numbered[number] for number in numbers}


def _without(numbered: Numbered, numbers: Container[int]) -> Numbered:
    return {number: leaf for number, leaf in numbered.items() if number not in numbers}


def find(state: Any, params: Any, infos: Sequence[ParamInfo]) -> list[int | None]:
    """Return, for each leaf of an optimizer's state, the number of its parameter; None: it stays on the device, as
    counts and the moments of norms, biases and routers do, which are small.

    state, params: trees of abstract arrays. infos: one for each parameter."""
    numbers = {info.name: number for number, info in enumerate(infos) if info.role in MATMUL_ROLES}
    wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), state)
    return [moment and numbers.get(moment[0]) for moment in rounding.find_moments(wide, params)]
