"""Detects silent data corruption by comparing replicas, which must be bit for bit equal.

Each device computes a checksum of each of its shards: the sum modulo 2**32 of its 32-bit words, each multiplied by an
odd number that depends on its position. One flipped bit always changes the sum. The sums (4 bytes per array and device)
are all-gathered, and every process compares the sums of the same shard. The check reads the state once and makes no
copy. Arrays without replicas (most of a ZeRO-3 state) cannot be checked. Works on any pytree of jax arrays on one mesh.
"""
from __future__ import annotations

import collections
import hashlib
import json
import math
import socket
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshtrain.cluster import agree
from meshtrain.config import Run
from meshtrain.run import say, trees
from meshtrain.run.exits import RunError

MOST_NAMED = 3      # arrays named in a message
# bytes of an element -> dtype of its words; an element of 8 bytes has two words
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class ReplicasDiffer(RunError):
    """A device holds other bits than its replicas, so the state may be corrupt."""


class Replicas:
    """Checks the replicas of a state. state: a pytree of arrays or ShapeDtypeStructs with NamedShardings on `mesh`."""

    def __init__(self, state: Any, mesh: Mesh):
        self.mesh = mesh
        self.leaves = [(name, leaf, _replica_axes(leaf, mesh)) for name, leaf in trees.leaves_of(state).items()]
        specs = tuple(leaf.sharding.spec for _, leaf, axes in self.leaves if axes)
        self._abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                          for _, leaf, axes in self.leaves if axes]

        def sum_shards(*shards: jax.Array) -> jax.Array:
            return jnp.stack([checksum(shard) for shard in shards])[None]
        summed = jax.shard_map(sum_shards, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=False)

        def sum_all(*leaves: jax.Array) -> jax.Array:       # moments in the host's memory are copied to the devices
            return summed(*[jax.device_put(leaf, jax.memory.Space.Device) for leaf in leaves])
        # an all-gather, 4 bytes per array and device
        self._sums = jax.jit(sum_all, out_shardings=NamedSharding(mesh, P()))

    @property
    def any(self) -> bool:
        """Whether an array other than a scalar has replicas."""
        return any(axes and leaf.shape for _, leaf, axes in self.leaves)

    def compile(self) -> "Replicas":
        """Compile the check ahead of its first use. Return self."""
        self._sums = self._sums.lower(*self._abstract).compile()
        return self

    def check(self, step: int, state: Any) -> None:
        """Compare the replicas of a state. Raises: ReplicasDiffer, in all processes, that names arrays and devices."""
        if faults := self.faults(state):
            hosts = agree.exchange(socket.gethostname())
            named = "; ".join(f"{name}: {_words(groups, hosts)}" for name, groups in faults[:MOST_NAMED])
            more = f"; and {len(faults) - MOST_NAMED} more arrays" if len(faults) > MOST_NAMED else ""
            raise agree.mark_agreed(ReplicasDiffer(
                f"step {step}: replicas that must have the same bits differ in {named}{more}. A device computed "
                f"wrongly or lost a bit: this state is not saved. Run the same command again to resume from the last "
                f"checkpoint. Test these devices, or run without them"))

    def faults(self, state: Any) -> list[tuple[str, list[list[jax.Device]]]]:
        """Return (name of the array, device groups) for every shard whose replicas differ. The devices of a group hold
        the same bits; the largest group comes first."""
        checked = [(name, axes) for name, _, axes in self.leaves if axes]
        leaves = [leaf for leaf, (_, _, axes) in zip(jax.tree.leaves(state), self.leaves, strict=True) if axes]
        if not leaves:
            return []
        table = np.asarray(self._sums(*leaves).addressable_data(0)).reshape(*self.mesh.devices.shape, len(leaves))
        differing = []
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
                differing.append((name, sorted(groups.values(), key=len, reverse=True)))
        return differing


def of_run(run: Run, state: Any, mesh: Mesh) -> Replicas | None:
    """Return the compiled check of a run; None if not configured, or without replicas. state: see `Replicas`."""
    every = run.training.check_replicas_every
    if not every:
        return None
    replicas = Replicas(state, mesh)
    if not replicas.any:
        say.out(f"training.check_replicas_every={every}: only scalars are replicated on this mesh, so the check "
                f"is off")
        return None
    return replicas.compile()


def _replica_axes(leaf: Any, mesh: Mesh) -> tuple[str, ...]:
    split = jax.tree.leaves(tuple(leaf.sharding.spec)) if leaf.size else mesh.axis_names
    return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in split)


def checksum(array: jax.Array) -> jax.Array:
    """Return a uint32 scalar of all bits of an array and their positions, the same in every layout."""
    words = jax.lax.bitcast_convert_type(array, WORDS[array.dtype.itemsize]) if array.dtype != bool else array
    words = words.astype(jnp.uint32)
    words = words ^ words >> 15     # a bijection; without it, flipped sign bits of two elements would cancel
    place, stride = jnp.zeros((), jnp.uint32), 2
    for dim in reversed(range(words.ndim)):
        place += jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        stride *= words.shape[dim]
    return jnp.sum(words * (place + 1), dtype=jnp.uint32)


def digest(tree: Any) -> str:
    """Return a digest of all bits of a pytree of arrays, as hex text. The digest is the same in every layout."""
    sums = jax.device_get(_checksums(tree))
    return hashlib.blake2b(json.dumps([int(value) for value in sums]).encode(), digest_size=10).hexdigest()


_checksums = jax.jit(lambda tree: [checksum(leaf) for leaf in jax.tree.leaves(tree)])


def _words(groups: list[list[jax.Device]], hosts: Sequence[str]) -> str:
    said = [[f"device {device.id} (process {device.process_index} on {hosts[device.process_index]})"
             for device in group] for group in groups]
    most, others = said[0], [device for group in said[1:] for device in group]
    if len(said[1]) == len(most):     # a tie: either group may be the faulty one
        return " and ".join(map(", ".join, said))
    named = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    return f"{named} against {len(most)} others"
