"""Moves an array from one sharding to another on the same mesh. No device ever holds the whole array.

There are two moves. The first move, an all-to-all, splits each dim by its final axes and by the remaining old mesh
axes, so that no device holds more than before. The second move gathers over the remaining old axes. Without these
constraints, XLA chooses moves that send up to three times as much, or gathers whole arrays ("involuntary full
rematerialization").
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec as P

from meshtrain.sharding.rules import Layout

Split = tuple[tuple[str, ...], ...]      # for each dim, the mesh axes that split it


@dataclasses.dataclass(frozen=True)
class Moves:
    """The splits of an array before, between and after the two moves. sizes: devices by mesh axis."""
    before: Split
    between: Split
    after: Split
    sizes: Mapping[str, int]

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Mesh axes that split another dim after the first move. The first move is an all-to-all over these axes."""
        return tuple(axis for old, new in zip(self.before, self.between) for axis in old if axis not in new and any(
            axis in other for other in self.between))

    @property
    def permuted(self) -> tuple[str, ...]:
        """Mesh axes of dims from which the first move removes an axis that precedes an axis that stays.

        The first move then begins with a permute, in which each device's shard goes to another device.
        """
        axes: set[str] = set()
        for old, new in zip(self.before, self.between):
            stay = tuple(axis for axis in new if axis in old)
            axes |= set(old) if old[:len(stay)] != stay else set()
        return tuple(axis for axis in self.sizes if axis in axes)

    def spec(self, split: Split) -> P:
        return P(*(axes or None for axes in split))

    def shards(self, split: Split) -> int:
        return math.prod(self.sizes[axis] for axes in split for axis in axes)

    def collectives(self, array_bytes: float) -> list[tuple[str, tuple[str, ...], float]]:
        """Return (kind, mesh axes, bytes) of each collective for an array of this size, in their order.

        bytes: the size that a device holds before the collective; for an all-gather, after it. After a permute XLA
        exchanges over other axes of the same number.
        """
        held, collectives = array_bytes / self.shards(self.before), []

        def gather(axes: tuple[str, ...]) -> None:
            nonlocal held
            if axes:
                held *= math.prod(self.sizes[axis] for axis in axes)
                collectives.append(("all-gather", axes, held))

        def axes_of(split: Split) -> set[str]:
            return {axis for axes in split for axis in axes}
        gather(tuple(axis for axis in self.sizes if axis in axes_of(self.before) - axes_of(self.between)))
        if self.permuted:
            collectives.append(("collective-permute", self.permuted, held))
        if self.exchanged:
            collectives.append(("all-to-all", self.exchanged, held))
        held = array_bytes / self.shards(self.between)
        for axes, kept in reversed([*zip(self.between, self.after)]):     # the last dim first
            gather(tuple(axis for axis in axes if axis not in kept))
        return collectives


def moves(shape: Sequence[int], before: Split, after: Split, sizes: Mapping[str, int]) -> Moves:
    """Plan the moves.

    Mesh axes that `after` lacks stay at their dims if the dims divide evenly; otherwise the axes move to another dim.
    If there is no such dim, the array is gathered over these axes at once.
    """
    between, kept = list(after), {axis for axes in after for axis in axes}
    for dim, axes in enumerate(before):
        for axis in axes:
            if axis in kept:
                continue
            fitting = (at for at in (dim, *range(len(shape)))
                       if shape[at] % math.prod(sizes[a] for a in (*between[at], axis)) == 0)
            if (at := next(fitting, None)) is not None:
                between[at] += (axis,)
    return Moves(tuple(before), tuple(between), tuple(after), sizes)


def of_weight(shape: Sequence[int], axes: Sequence[str | None], stored: Layout, read: Layout) -> Moves:
    """Return the moves of a weight from [optimizer] of one layout to [params] of another on the same mesh.

    axes: logical axes.
    """
    def split(layout: Layout, table: str) -> Split:
        return tuple(layout.mesh_axes(table, axis) for axis in axes)
    return moves(shape, split(stored, "optimizer"), split(read, "params"), read.sizes)
