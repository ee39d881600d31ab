"""The device mesh, always with the same five axes, and collectives that also work on CPUs.

`placement` lists the axes from the slowest link to the fastest. With tensor last, a tensor group is a range of
neighbouring devices inside one host. XLA ignores how devices are distributed over hosts, so this order alone decides
which axis crosses hosts. No device is used before `build`.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, get_abstract_mesh

from meshtrain.names import AXES, PLACEMENT


@functools.lru_cache(maxsize=4096)
def _in_domain(sizes: tuple[int, ...], placement: tuple[str, ...], axes: tuple[str, ...],
               domain: int) -> tuple[int, int]:
    """Return `MeshSpec.in_domain`, cached. sizes: in the placement's order."""
    stride, group, within = math.prod(sizes), 1, 1
    for axis, size in zip(placement, sizes):
        stride //= size
        inside = min(size, max(1, domain // stride))
        if size % inside or domain % (stride * inside) and stride % domain:
            break       # domains begin in different places of the axis
        if axis in axes:
            group, within = group * size, within * inside
    else:
        return group, within
    spanned = [placement.index(axis) for axis in axes]
    others = [i for i in range(len(sizes)) if i not in spanned]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(others + spanned)
    ids = ids.reshape(-1, math.prod(sizes[i] for i in spanned))
    domains = np.sort(ids // domain, axis=1)
    most = int((np.diff(domains, axis=1) != 0).sum(1).max()) + 1 if domains.shape[1] > 1 else 1
    return ids.shape[1], max(1, ids.shape[1] // most)


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the five axes, and the order in which devices 0 … n−1 are assigned to them, slowest axis first.

    Raises: ValueError for an unknown axis, a size below 1, or a placement that is not a permutation of the axes.
    """
    sizes: Mapping[str, int]
    placement: Sequence[str] = PLACEMENT

    def __post_init__(self):
        unknown = [axis for axis in self.sizes if axis not in AXES]
        if unknown:
            raise ValueError(f"unknown mesh axes {unknown}; the axes are {', '.join(AXES)}")
        if sorted(self.placement) != sorted(AXES):
            raise ValueError(f"mesh.placement={list(self.placement)} must list each of {', '.join(AXES)} once")
        if bad := {axis: n for axis, n in self.sizes.items() if n < 1}:
            raise ValueError(f"mesh sizes must be at least 1, not {bad}")
        object.__setattr__(self, "sizes", {axis: self.sizes.get(axis, 1) for axis in AXES})

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def shape(self) -> dict[str, int]:
        """The sizes, slowest axis first, as in jax's Mesh. Devices and XLA's partitions 0 … n−1 are arranged in this
        order."""
        return {axis: self.sizes[axis] for axis in self.placement}

    def in_domain(self, axes: Sequence[str], domain: int) -> tuple[int, int]:
        """Return (devices in a group over these axes, how many of them share a link domain of `domain` devices)."""
        sizes = tuple(self.sizes[axis] for axis in self.placement)
        return _in_domain(sizes, tuple(self.placement), tuple(axes), domain)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the device numbers of each communication group over `axes`, sorted.

        With stage 4 × data 2 × tensor 2, `groups("tensor")` is [[0, 1], [2, 3], …], and `groups("stage", "tensor")` are
        the model replicas. Raises: ValueError for an unknown axis.
        """
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        spanned = [i for i, axis in enumerate(self.shape) if axis in axes]
        ids = np.arange(self.num_devices).reshape(list(self.shape.values()))
        groups = np.moveaxis(ids, spanned, range(-len(spanned), 0)).reshape(
            -1, math.prod(self.sizes[axis] for axis in set(axes)))
        return sorted(sorted(group) for group in groups.tolist())

    def build(self, devices: Sequence) -> Mesh:
        """Return the jax Mesh over the first num_devices of `devices`, with its axes in the order of placement.

        XLA's partitions then have the devices' order. XLA for GPUs uses a partition's number as its device number when
        it decides which groups span hosts. With the axes in another order it treated tensor groups of a pipeline as
        groups that span hosts, and llama3-70b-pipeline waited for links for 7.7% of its step instead of 3.8% (roofline,
        jax 0.12). From jax 0.11 on XLA reports that it supports no other order ("only supports IOTA device
        assignment"). Axes are Auto, because jax.make_mesh defaults to Explicit. Raises: ValueError if there are too few
        devices.
        """
        if len(devices) < self.num_devices:
            raise ValueError(f"the mesh needs {self.num_devices} devices ({self}), but there are {len(devices)}")
        placed = np.array(devices[:self.num_devices]).reshape(list(self.shape.values()))
        return Mesh(placed, tuple(self.shape), axis_types=(AxisType.Auto,) * len(AXES))

    def abstract(self) -> AbstractMesh:
        """Return the same mesh without devices, for shapes and shardings."""
        return AbstractMesh(tuple(self.shape.values()), tuple(self.shape),
                            axis_types=(AxisType.Auto,) * len(AXES))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {n}" for axis, n in self.sizes.items() if n > 1) or "one device"


AnyMesh = Mesh | AbstractMesh | MeshSpec        # with any axes. Partition i has the row-major index i over its `shape`.


def psum(x, axes):
    """Return lax.psum of an array over manual mesh axes, in the array's dtype. CPUs sum in float32.

    XLA's CPU backend crashes on a bfloat16 sum over a manual axis ("Invalid binary instruction opcode copy"). The
    choice depends on the platform for which the program is lowered. The program has no conditional.
    """
    return lax.platform_dependent(x, cpu=lambda x: lax.psum(x.astype(jnp.float32), axes).astype(x.dtype),
                                  default=lambda x: lax.psum(x, axes))


def pmax(x, axes):
    """Return lax.pmax over manual mesh axes. CPUs compute in float32, as for `psum`."""
    return lax.platform_dependent(x, cpu=lambda x: lax.pmax(x.astype(jnp.float32), axes).astype(x.dtype),
                                  default=lambda x: lax.pmax(x, axes))


def psum_scatter(x, axes, dim: int):
    """Return lax.psum_scatter (tiled) over manual mesh axes. CPUs sum in float32, as for `psum`."""
    def scatter(x):
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return lax.platform_dependent(x, cpu=lambda x: scatter(x.astype(jnp.float32)).astype(x.dtype), default=scatter)


def automatic_axes() -> tuple[str, ...]:
    """Return the mesh axes that are not manual here. XLA partitions arrays over them."""
    mesh = get_abstract_mesh()
    return tuple(a for a in mesh.axis_names if a not in mesh.manual_axes)


def on_shards(local, in_specs, out_specs):
    """Return a shard_map of `local` in which all axes are manual, including those of size 1.

    Returns `local` itself if no automatic axis is larger than 1. The result must not be differentiated: callers write
    the forward and the backward.
    """
    axes, shape = automatic_axes(), get_abstract_mesh().shape
    if all(shape[a] == 1 for a in axes):
        return local
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)
