"""Detects silent data corruption: replicas of one shard must be bit for bit equal.

Every device sums the 32-bit words of its shards, each times an odd number that depends on its position, modulo 2**32:
one flipped bit always changes the sum. The sums (4 bytes per array and device) are gathered, and every process compares
those of the same shard. This reads the state once and needs no second copy. Arrays without replicas (most of a ZeRO-3
state) cannot be checked. Works on any pytree of jax arrays on one mesh.
"""
from __future__ import annotations

import collections
import hashlib
import json
import math
import socket
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshtrain.cluster import agree
from meshtrain.run import trees
from meshtrain.run.loop import Hook

MOST_NAMED = 3      # arrays in a message
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}     # by bytes of an element; of 8 bytes two


class ReplicasDiffer(RuntimeError):
    """A device holds other bits than its replicas: nothing computed since can be believed."""


class Replicas:
    """The replicas of a state. state: a pytree of arrays, or ShapeDtypeStructs, with NamedShardings on `mesh`."""

    def __init__(self, state, mesh: Mesh):
        self.mesh = mesh
        self.leaves = [(name, leaf, _replicated(leaf, mesh)) for name, leaf in trees.leaves_of(state).items()]
        specs = tuple(leaf.sharding.spec for _, leaf, axes in self.leaves if axes)
        self._abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                          for _, leaf, axes in self.leaves if axes]
        local = lambda *shards: jnp.stack([checksum(shard) for shard in shards])[None]
        summed = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=False)
        # an all-gather, 4 bytes per array and device
        self._sums = jax.jit(summed, out_shardings=NamedSharding(mesh, P()))

    @property
    def any(self) -> bool:
        """Whether anything but scalars has replicas."""
        return any(axes and leaf.shape for _, leaf, axes in self.leaves)

    def compile(self) -> "Replicas":
        """Compiles the check, so that the first one takes no longer than others."""
        self._sums = self._sums.lower(*self._abstract).compile()
        return self

    def hook(self, every: int, saving: Sequence[Hook]) -> Hook:
        """Checks every `every` steps and before each hook that saves the state, so that no detectable fault is saved.
        Raises: ReplicasDiffer."""
        return Hook(lambda step, ending: step % every == 0 or any(hook.due(step, ending) for hook in saving),
                    lambda step, state: self.check(step, state) or {})

    def check(self, step: int, state) -> None:
        """Raises: ReplicasDiffer, in every process alike, naming the arrays and devices."""
        if faults := self.faults(state):
            hosts = agree.exchange(socket.gethostname())
            named = "; ".join(f"{name}: {_words(groups, hosts)}" for name, groups in faults[:MOST_NAMED])
            more = f"; and {len(faults) - MOST_NAMED} arrays more" if len(faults) > MOST_NAMED else ""
            raise agree.agreed(ReplicasDiffer(
                f"step {step}: replicas that must have the same bits differ in {named}{more}. A device computed "
                f"wrongly or lost a bit: this state is not saved. Run the same command again to resume from the last "
                f"checkpoint. Test these devices, or leave them out"))

    def faults(self, state) -> list[tuple[str, list[list[jax.Device]]]]:
        """(array, its devices grouped by the bits they hold, largest group first) of every shard whose replicas differ.
        """
        checked = [(name, axes) for name, _, axes in self.leaves if axes]
        leaves = [leaf for leaf, (_, _, axes) in zip(jax.tree.leaves(state), self.leaves, strict=True) if axes]
        if not leaves:
            return []
        table = np.asarray(self._sums(*leaves).addressable_data(0)).reshape(*self.mesh.devices.shape, len(leaves))
        found = []
        for number, (name, axes) in enumerate(checked):
            sums, along = table[..., number], tuple(self.mesh.axis_names.index(axis) for axis in axes)
            if (sums == sums.max(along, keepdims=True)).all():
                continue
            rows = np.moveaxis(sums, along, range(len(along))).reshape(math.prod(sums.shape[i] for i in along), -1)
            devices = np.moveaxis(self.mesh.devices, along, range(len(along))).reshape(rows.shape)
            for column in np.flatnonzero((rows != rows[0]).any(0)):
                groups = collections.defaultdict(list)
                for device, held in zip(devices[:, column], rows[:, column]):
                    groups[int(held)].append(device)
                found.append((name, sorted(groups.values(), key=len, reverse=True)))
        return found


def _replicated(leaf, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes over which an array has replicas."""
    split = jax.tree.leaves(tuple(leaf.sharding.spec)) if leaf.size else mesh.axis_names
    return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in split)


def checksum(array: jax.Array) -> jax.Array:
    """uint32 of an array's bits and their positions; of a global array the same in every layout."""
    words = jax.lax.bitcast_convert_type(array, WORDS[array.dtype.itemsize]) if array.dtype != bool else array
    words = words.astype(jnp.uint32)
    words = words ^ words >> 15     # one to one; or the sign bits of two elements would cancel
    place, stride = jnp.zeros((), jnp.uint32), 2
    for dim in reversed(range(words.ndim)):
        place += jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        stride *= words.shape[dim]
    return jnp.sum(words * (place + 1), dtype=jnp.uint32)


def digest(tree) -> str:
    """The digest of all bits of a tree of arrays. It is the same in every layout."""
    sums = jax.device_get(_checksums(tree))
    return hashlib.blake2b(json.dumps([int(one) for one in sums]).encode(), digest_size=10).hexdigest()


_checksums = jax.jit(lambda tree: [checksum(leaf) for leaf in jax.tree.leaves(tree)])


def _words(groups: list[list[jax.Device]], hosts: Sequence[str]) -> str:
    said = [[f"device {one.id} (process {one.process_index} on {hosts[one.process_index]})" for one in group]
            for group in groups]
    most, others = said[0], [device for group in said[1:] for device in group]
    if len(said[1]) == len(most):     # nobody knows which is right
        return " and ".join(map(", ".join, said))
    named = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    return f"{named} against {len(most)} others"
