"""Records of what one device holds, multiplies and moves, in elements. `place` fills them; they are independent of the
batch. `Sent` is the record of a collective.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from meshtrain.names import AXES

Axes = tuple[str, ...]
FORWARD, BACKWARD, MICROBATCH = "forward", "backward", "microbatch"             # what a collective overlaps
ONCE = "the update of other parameters"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
RECURRENCE = "recurrence"       # a part of a step, as ATTENTION is
FLOAT32 = "f32"
GATHER, SCATTER, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrices of one layer, or the head, that multiply the same input: [tokens, k] × [k, n], in sizes of one device.
    The products of experts are in `routed`.

    row: mesh axes that shard k; the result is summed over them. outward: whether the result is added to the residual
    stream. unread: fraction of these layers whose backward does not recompute the result, because it is not read, or is
    saved. trained: whether the matrices have gradients. share: fraction of the layers that have these matrices. router:
    whether the product is computed in float32, on tokens sharded as the residual stream. expands: whether attention
    expands latents with these matrices, in the forward and again in the backward. whole_inputs: whether the cotangent
    of the mixer's input is not sharded, because the mixer's inward matrices are not. on_shards: columns of n whose
    input gradient each device computes for its shard of the residual stream alone: the columns of unsharded matrices
    beside sharded matrices, and of adapters. between: for an adapter's matrix, the mesh axes over which the array
    between its two matrices is summed: in the forward if they are `row`, otherwise in the backward; for an outward
    adapter's matrix, the axes over which its gradient is summed.
    """
    k: float
    n: float
    row: Axes = ()
    outward: bool = False
    unread: float = 0.0
    trained: bool = True
    share: float = 1.0
    router: bool = False
    expands: bool = False
    whole_inputs: bool = False
    on_shards: float = 0.0
    between: Axes = ()


class WeightMove(NamedTuple):
    """Elements of weights or gradients in one collective over `axes`.

    kind: the collective, as HLO spells it. part: "layers", "experts" or "routers": elements of one layer, moved in each
    pass through it. "merge": elements of the merge of a depth of MTP. "ends": elements of embedding and head, moved in
    each microbatch. "update": elements moved once a step: gradients that [grads] does not shard, and new weights.
    "lookup": number of tables whose rows are exchanged with every token (all-to-all), or whose cotangents are gathered
    (all-gather).
    """
    kind: str
    part: str
    axes: Axes
    elements: float


class Sent(NamedTuple):
    """`runs` equal collectives of a step.

    kind, dtype: as HLO spells them; axes: as in `audit.Collective`. array_bytes: bytes of the whole array for an
    all-gather, reduce-scatter or all-reduce; for other kinds, the bytes that one GPU sends. label: the name under which
    exposed seconds are counted. overlaps: the compute that hides it; "" if the step waits for all of it. layer: whether
    it belongs to a layer of a microbatch. arrays: number of equal arrays that are sent one by one.
    """
    kind: str
    axes: Axes
    dtype: str
    array_bytes: float
    runs: float
    label: str
    overlaps: str = ""
    layer: bool = True
    arrays: float = 1

    def ring_bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes that one GPU sends in a step, in a ring."""
        n = math.prod(sizes.get(axis) or int(axis[axis.index(":") + 1:-1]) for axis in self.axes)
        share = 1 if self.kind == "collective-permute" else (n - 1) / n * (2 if self.kind == "all-reduce" else 1)
        return self.runs * self.array_bytes * share


@dataclasses.dataclass(frozen=True)
class Held:
    """Numbers of elements of parameters on one device, or of bytes where a field's name or text says so.

    stored: elements sharded as [optimizer]; updated: the trained elements among them; layers_stored: the elements of
    layers among them. layers_read: elements of layers, sharded as [params]. grads: gradient accumulators of all
    parameters; ends_grads: those of embedding and head. transposed: bytes of weights that XLA transposes because they
    are not gathered along their first dim. used: elements that the matmuls of a stage, embedding and head read;
    trained: the trained elements among them; cast: the elements that microbatches read from a copy in the compute
    dtype. moved: bytes of the copy that [params] shards differently from [optimizer].
    """
    stored: float = 0.0
    stored_bytes: float = 0.0
    updated: float = 0.0
    layers_stored: float = 0.0
    layers_read: float = 0.0
    grads: float = 0.0
    ends_grads: float = 0.0
    transposed: float = 0.0
    used: float = 0.0
    trained: float = 0.0
    cast: float = 0.0
    moved: float = 0.0

    def with_leading(self, leading: Held) -> Held:
        """Return the sum of these numbers and the leading layers' numbers. layers_stored and layers_read remain those
        of the stages."""
        return Held(**{name: value + (0 if name.startswith("layers_") else getattr(leading, name))
                       for name, value in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer on one device: its products, the elements of its parameters and of its largest matrix.
    depth: number of layers in a stage."""
    products: tuple[Product, ...]
    used: float
    largest: float
    depth: int


@functools.cache
def order(axes: frozenset[str] | Axes) -> Axes:
    """Return mesh axes in the order of the mesh."""
    return tuple(a for a in AXES if a in axes)
