"""The manual region of a layer's experts: the mesh axes that split tokens and experts, and the data sent over these
axes.

`ManualRegion` sends tokens, `ExpertShards` weights and their gradients. This module knows no kernel and no order of
rows.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain.names import EXPERT_AXES
from meshtrain.sharding.mesh import psum, psum_scatter
from meshtrain.sharding.rules import Layout


@dataclasses.dataclass(frozen=True)
class ManualRegion:
    """The mesh axes of the manual region that split the experts, the width of the experts (inner) and the tokens."""
    experts: tuple[str, ...]
    inner: tuple[str, ...]
    tokens: tuple[str, ...]
    sizes: Mapping[str, int]
    received: bool = False      # tokens came by an all-to-all, so they are not gathered, scattered or summed
    occupancy: float = 1.0      # share of the rows that hold a token

    @classmethod
    def of(cls, layout: Layout) -> ManualRegion:
        tokens = layout.all_axes("activations", "batch") + layout.all_axes("activations", "residual_seq")
        return cls(layout.all_axes("params", "expert"), layout.all_axes("params", "expert_mlp"), tokens, layout.sizes)

    @property
    def own(self) -> tuple[str, ...]:
        return self.experts + self.inner

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes over which tokens are all-gathered before the experts, and outputs reduce-scattered after them."""
        return () if self.received else tuple(a for a in self.tokens if a in self.own)

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes along which tokens are replicated. Outputs are all-reduced over these axes."""
        return () if self.received else tuple(a for a in self.own if a not in self.tokens)

    @property
    def others(self) -> tuple[str, ...]:
        """Axes that split tokens but not experts. Weight gradients are summed over these axes."""
        return tuple(a for a in self.tokens if a not in self.own)

    def num_shards(self, axes) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def rows_if_balanced(self, T: int, K: int) -> int:
        """Return the number of rows of this device's experts under balanced load. T: tokens of each device."""
        shares = 1 if self.received else self.num_shards(self.experts)
        return max(1, round(T * K * self.occupancy * self.num_shards(self.gathered) / shares))

    def first_expert(self, e: int):
        """Return the number of this device's first expert. e: experts per device."""
        index = 0
        for axis in self.experts:
            index = index * self.sizes[axis] + lax.axis_index(axis)
        return index * e

    def gather_tokens(self, a):
        """All-gather [T, …] -> [A, …]."""
        return lax.all_gather(a, self.gathered, axis=0, tiled=True) if self.gathered else a

    def combine(self, a):
        """Sum over all experts, [A, …] -> [T, …]: reduce-scatter, and all-reduce where tokens are replicated."""
        a = psum_scatter(a, self.gathered, 0) if self.gathered else a
        return psum(a, self.summed) if self.summed else a


@dataclasses.dataclass(frozen=True)
class ExpertShards:
    """Shardings of the inputs and outputs of the manual region. Dicts are by name of a weight.

    tokens, stored, grads: PartitionSpecs of tokens, of weights in [params] and of their gradients. axes: logical axes
    of a weight's dims in its matmul. gathers: [(axis, mesh axes)] over which a weight is gathered. scatters: [(axis,
    mesh axes)] over which its gradient is reduce-scattered, as in [grads]. rest: the mesh axes over which the gradient
    is then all-reduced. Neither scatters nor rest has the axes over which a pipeline reduces after its loop.
    """
    region: ManualRegion
    tokens: P
    stored: dict
    grads: dict
    axes: dict
    gathers: dict
    scatters: dict
    rest: dict

    @classmethod
    def of(cls, layout: Layout, names) -> ExpertShards:
        region, axes_of = ManualRegion.of(layout), layout.mesh_axes
        automatic = {a for axis in ("batch", "residual_seq") for a in axes_of("activations", axis)}

        def by_axis(name: str, pick: Callable) -> list:
            return [(axis, axes) for axis in EXPERT_AXES[name] if (axes := pick(axis))]

        def own(axis: str | None) -> tuple[str, ...]:
            return tuple(a for a in axes_of("params", axis) if a in region.own)

        def others(axis: str | None) -> tuple[str, ...]:
            return tuple(a for a in axes_of("grads", axis) if a in region.others and a not in own(axis))

        def to_gather(axis: str | None) -> tuple[str, ...]:
            return tuple(a for a in axes_of("params", axis) if a not in region.own)

        def to_reduce(name: str) -> tuple[str, ...]:
            scattered = [a for _, axes in scatters[name] for a in axes]
            # Over the shards of the experts' width, only gradients of what is not split like it are partial sums.
            inner = () if "expert_mlp" in EXPERT_AXES[name] else axes_of("params", "expert_mlp")
            return tuple(a for a in region.others if a in automatic and a not in scattered) + inner
        scatters = {name: by_axis(name, others) for name in names}
        # A gather or scatter along any dim but the first transposes the whole weight. The gathered dim therefore goes
        # first.
        embed_first = bool(to_gather("expert_embed") or others("expert_embed"))
        return cls(
            region, layout.spec("activations", ("batch", "residual_seq", None)),
            stored={name: layout.spec("params", EXPERT_AXES[name]) for name in names},
            grads={name: P(*(own(axis) + others(axis) or None for axis in EXPERT_AXES[name])) for name in names},
            axes={name: tuple(sorted(EXPERT_AXES[name], key=lambda axis: embed_first and axis != "expert_embed"))
                  for name in names},
            gathers={name: by_axis(name, to_gather) for name in names}, scatters=scatters,
            rest={name: to_reduce(name) for name in names})

    def gather(self, weights, dtype) -> dict:
        """Cast weights to the compute dtype, then all-gather them.

        The region saves no gathered weight for the backward. Gradients stay float32.
        """
        used = {}
        for name, w in weights.items():
            used[name] = _in_order(w.astype(dtype), EXPERT_AXES[name], self.axes[name])
            for axis, axes in self.gathers[name]:
                used[name] = lax.all_gather(used[name], axes, axis=self.axes[name].index(axis), tiled=True)
        return used

    def reduce(self, dw, dtype):
        """Reduce float32 gradients over the devices that have other tokens, in `dtype`.

        The result has the dim order of stored weights.
        """
        summed = dict(dw)
        for name in dw:
            if (scatters := self.scatters[name]) or self.rest[name]:
                summed[name] = summed[name].astype(dtype)
            for axis, axes in scatters:
                summed[name] = psum_scatter(summed[name], axes, self.axes[name].index(axis))
            if self.rest[name]:
                summed[name] = psum(summed[name], self.rest[name])
        return {name: _in_order(d, self.axes[name], EXPERT_AXES[name]) for name, d in summed.items()}


def _in_order(a, axes: tuple[str | None, ...], wanted: tuple[str | None, ...]):
    return a if axes == wanted else a.transpose([axes.index(axis) for axis in wanted])
