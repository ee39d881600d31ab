"""The sizes and costs of a mixer that the formulas read: `MixerCost`, the base class of all kinds.

`flops`, `footprint`, `traffic`, `price` and `decode` add up over the kinds of a model, weighted by their fractions of
the layers; they know no kind. A width is a number of elements per token.
"""
from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from meshtrain.config.sections import Model
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.rates import Rates
from meshtrain.cost.formulas.sizes import FLOAT32, Sent
from meshtrain.model import layers
from meshtrain.sharding.rules import Layout

if TYPE_CHECKING:
    from meshtrain.cost.formulas.placed import Placed


@dataclasses.dataclass(frozen=True)
class MixerCost(abc.ABC):
    """The cost of one kind of mixer. Widths are elements per token on one device.

    letter: the mixer's letter in `pattern.MIXERS`; share: fraction of the layers. heads: number of query heads, or of
    value heads in a recurrence. key_heads: number of key heads that this device computes; a head that several ranks
    compute counts on each. normed: whether queries and keys have norms. gates: width of the gate that multiplies the
    output.
    """
    letter: str
    share: float
    heads: float
    key_heads: float
    key_dim: int
    value_dim: int
    normed: bool = False
    gates: float = 0.0

    part: ClassVar[str]         # the part of a step that its seconds are

    @classmethod
    @abc.abstractmethod
    def of(cls, cfg: Model, letter: str, share: float, layout: Layout) -> MixerCost:
        """Return the cost of this kind. cfg: the [model] section with this mixer's values."""

    @classmethod
    @abc.abstractmethod
    def flops(cls, cfg: Model, letter: str, seq_len: int) -> float:
        """Return the forward's model FLOPs per token of one layer, without its weight matrices and not split."""

    # ---- arrays of a token -------------------------------------------------------------------------------------------

    @property
    def queries(self) -> float:
        return self.heads * self.key_dim

    @property
    def keys(self) -> float:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> float:
        return self.key_heads * self.value_dim

    @property
    def outputs(self) -> float:
        return self.heads * self.value_dim

    @property
    def latents(self) -> float:
        """Return the width of the latent of keys and values, and of the rotated key."""
        return 0.0

    @property
    def narrow(self) -> float:
        """Return the width of other narrow arrays that projections expand to heads."""
        return 0.0

    @property
    def inward(self) -> float:
        """Return the width of the outputs of the projections of the layer's input."""
        return self.queries + self.keys + self.values + self.gates

    @property
    def norm_inputs(self) -> float:
        """Return the width of the inputs of the query and key norms."""
        return self.normed * (self.queries + self.keys)

    @property
    @abc.abstractmethod
    def outward(self) -> float:
        """Return the width of the output projection's input if it differs from the mixer's output; otherwise 0."""

    @property
    @abc.abstractmethod
    def stream_bytes(self) -> float:
        """Return the HBM bytes per token of elementwise work on the mixer's own arrays, in the forward or in the
        backward."""

    # ---- memory ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def residual_width(self, itemsize: int) -> float:
        """Return the width of the arrays that are saved without remat, excluding log-sum-exps and states."""

    def sums_width(self, itemsize: int) -> float:
        """Return the width of attention's float32 log-sum-exps, which the backward reads, in elements of `itemsize`
        bytes."""
        return 0.0

    def states_width(self, options: Options) -> float:
        """Return the width of saved states, which no remat policy recomputes where sequences are split."""
        return 0.0

    @property
    def ring_width(self) -> float:
        """Return the width of the arrays of ring attention's backward that are live during the experts' backward. It
        is used only if a ring splits the sequences."""
        return 0.0

    @property
    def pair_width(self) -> float:
        """Return the mean width of two of the four arrays queries, keys, values and outputs. Kernels pad keys that are
        wider than values."""
        padded = pad(self.key_dim) if self.latents else self.key_dim
        return ((self.queries + self.keys) * padded / self.key_dim + self.values + self.outputs) / 2

    @abc.abstractmethod
    def backward_width(self, itemsize: int, options: Options, times: int) -> float:
        """Return the width of what lives during the backward. times: how many arrays of each operand live at once."""

    @abc.abstractmethod
    def split_backward_width(self, itemsize: int, options: Options, num_shards: int) -> float:
        """Return what `backward_width` returns, where sequences are split over `num_shards` devices."""

    def waiting_width(self, itemsize: int, options: Options) -> float:
        """Return the width of what XLA keeps of this mixer during the backward of another layer in its period."""
        return 0.0

    # ---- collectives and seconds -------------------------------------------------------------------------------------

    def reductions(self, placed: Placed, options: Options) -> Iterator[Sent]:
        """Yield the sums of the cotangents of narrow arrays that all heads read."""
        heads = tuple(placed.layout.mesh_axes("activations", "heads"))
        tokens, runs = placed.tokens(options), self.share * placed.visits(options)[1]
        yield Sent("all-reduce", heads, placed.dtype, tokens * self.narrow * placed.itemsize, runs, "tensor")
        yield Sent("all-reduce", heads, FLOAT32, tokens * self.latents * 4, runs, "tensor")

    @abc.abstractmethod
    def exchanges(self, placed: Placed, options: Options) -> Iterator[Sent]:
        """Yield the collectives of split sequences. No remat policy repeats them."""

    @abc.abstractmethod
    def seconds(self, placed: Placed, rated: Rates, options: Options) -> tuple[float, float]:
        """Return the seconds (forward, backward) between the projections, multiplied by `share`."""

    # ---- a sampler's cache -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def slot_bytes(self, num_layers: float, itemsize: int, places: Callable[[int], int]) -> float:
        """Return the cache bytes of a slot in `num_layers` layers. places: as in `decode.Sampling`."""

    @abc.abstractmethod
    def read_bytes(self, itemsize: int, length: float) -> float:
        """Return the bytes of a slot in one layer that a decoding step reads or writes. length: tokens of the slot."""

    @abc.abstractmethod
    def decode_products(self, num_layers: float, length: float) -> float:
        """Return the products of a decoding step with the cache of a slot in `num_layers` layers, elements each."""

    @abc.abstractmethod
    def reads_in_a_loop(self, by_kernels: bool) -> bool:
        """Return whether a decoding step reads its cache in a loop. by_kernels: whether our kernels run on the GPU."""


def num_shards(layout: Layout, axis: str) -> int:
    return layout.num_shards(layout.mesh_axes("activations", axis))


def key_heads(layout: Layout, count: int) -> float:
    """Return the number of key heads that a device computes, out of `count`."""
    return layers.kv_heads(layout, count) / num_shards(layout, "kv_heads")


def exchange(placed: Placed, kind: str, elements: float, itemsize: int, runs: float, overlaps: str = "") -> Sent:
    """Return a collective over the devices that split a sequence."""
    axes = tuple(placed.layout.mesh_axes("activations", "seq"))
    return Sent(kind, axes, FLOAT32 if itemsize == 4 else placed.dtype, elements * itemsize, runs, "context", overlaps)


def pad(width: int) -> int:
    """Return the smallest power of two that is at least `width`."""
    return 1 << (width - 1).bit_length()
