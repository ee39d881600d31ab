"""Describes the mixers of a model's layers on one device: the widths of a token's arrays in each kind of mixer, and
which arrays a layer saves for its backward.

`footprint`, `traffic` and `price` add these up over the kinds, weighted by their fractions of the layers. The saved
arrays follow `model.layers`, `model.latent` and `model.linear` with the rematerialization of `model.transformer`.
"""
from __future__ import annotations

import dataclasses
from collections import Counter

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.model import layers
from meshtrain.parallel.context.attention import value_dim
from meshtrain.sharding.rules import Layout


@dataclasses.dataclass(frozen=True)
class Mixer:
    """One kind of mixer. Widths are elements per token on one device.

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

    recurrent = False
    latents = 0.0           # the latent of keys and values, and the rotated key
    narrow = 0.0            # other narrow arrays that projections expand to heads: the latent of queries

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
    def inward(self) -> float:
        """Return the width of the outputs of the projections of the layer's input."""
        return self.queries + self.keys + self.values + self.gates

    @property
    def norm_inputs(self) -> float:
        """Return the width of the inputs of the query and key norms."""
        return self.normed * (self.queries + self.keys)

    def sums(self, itemsize: int) -> float:
        """Return the width of attention's float32 log-sum-exps, which the backward reads, in elements of `itemsize`
        bytes."""
        return 4 * self.heads / itemsize

    def outward(self) -> float:
        """Return the width of the output projection's input if it differs from the mixer's output; otherwise 0."""
        return self.gates

    @property
    def moved(self) -> float:
        """Return the HBM bytes per token of elementwise work on the mixer's own arrays (rotations, gates), in the
        forward or in the backward."""
        return 4 * (self.queries + self.keys) + 6 * self.gates

    def kept(self, itemsize: int) -> float:
        """Return the width of the arrays that are saved without remat, excluding log-sum-exps and states."""
        return (self.queries + self.keys + self.values + self.norm_inputs + self.gates + self.outputs + self.outward())


@dataclasses.dataclass(frozen=True)
class AttentionSizes(Mixer):
    """Attention with keys and values. window: tokens that a token attends to; 0: all. tied: the projected keys are also
    the values."""
    window: int = 0
    tied: bool = False

    @property
    def inward(self) -> float:
        return super().inward - self.tied * self.values


@dataclasses.dataclass(frozen=True)
class LatentSizes(AttentionSizes):
    """Attention by latents, which are not sharded. Keys and values are expanded where they are read, and not saved."""
    kv_dim: int = 0
    rope_dim: int = 0
    query_dim: int = 0

    @property
    def latents(self) -> float:
        return self.kv_dim + self.rope_dim

    @property
    def narrow(self) -> float:
        return self.query_dim

    @property
    def inward(self) -> float:
        return self.query_dim + self.queries + self.latents

    def kept(self, itemsize: int) -> float:
        narrow = 2 * self.query_dim + 2 * self.kv_dim + self.rope_dim       # before their norms and after
        return narrow + self.queries + self.outputs


@dataclasses.dataclass(frozen=True)
class RecurrenceSizes(Mixer):
    """A recurrence with a convolution. width: number of tokens in the convolution."""
    width: int = 0

    recurrent = True

    @property
    def queries(self) -> float:
        return self.keys

    @property
    def values(self) -> float:
        return self.outputs

    @property
    def by_channel(self) -> bool:
        """Whether decays differ per channel. Decays and gates then come from narrow projections."""
        return self.letter == "K"

    @property
    def rates(self) -> float:
        """Return the width of decays and update rates."""
        return self.heads * ((self.key_dim if self.by_channel else 1) + (self.letter != "M"))

    @property
    def narrow(self) -> float:
        return 2 * self.value_dim * self.by_channel

    @property
    def inward(self) -> float:
        return super().inward + self.rates + self.narrow

    @property
    def state(self) -> float:
        """Return the number of elements of one sequence's states in one layer, over all heads of the device."""
        return self.heads * self.key_dim * self.value_dim

    def sums(self, itemsize: int) -> float:
        return 0.0

    @property
    def moved(self) -> float:
        """Return the HBM bytes per token of the convolution's activations and norms, and of the output's gated norm."""
        return 8 * (self.queries + self.keys) + 4 * self.values + 6 * self.outputs

    def outward(self) -> float:
        return self.outputs

    def kept(self, itemsize: int) -> float:
        """Return the width of the arrays that are saved without remat. The convolution's inputs, its activated outputs
        and the recurrence's inputs are separate arrays."""
        delta = self.letter != "M"
        rates = self.rates * (1 + 4 / itemsize) + self.narrow
        return ((4 if delta else 3) * (self.queries + self.keys) + (3 if delta else 4) * self.values + rates
                + self.gates + (1 if delta else 2) * self.outputs + self.outward())


def of(cfg: Model, layout: Layout) -> tuple[Mixer, ...]:
    """Return the kinds of mixers of a [model] section on one device, in the order of their letters."""
    counts = Counter(kind.mixer for kind in pattern.kinds(cfg) if kind.mixer != ".")
    return tuple(_of(cfg.of(letter), letter, counts[letter] / cfg.num_layers, layout) for letter in sorted(counts))


def _of(cfg: Model, letter: str, share: float, layout: Layout) -> Mixer:
    """Return one kind of mixer. cfg: the [model] section with this mixer's values. share: fraction of the layers."""
    split = lambda axis: layout.num_shards(layout.mesh_axes("activations", axis))
    key_heads = lambda count: layers.kv_heads(layout, count) / split("kv_heads")
    if letter in pattern.RECURRENT:
        linear, heads = cfg.linear, cfg.linear.value_heads / split("heads")
        return RecurrenceSizes(letter, share, heads, key_heads(linear.key_heads), linear.key_dim, linear.value_dim,
                          gates=heads * linear.value_dim, width=linear.conv_width)
    heads, window = cfg.num_heads / split("heads"), cfg.window if letter in pattern.WINDOWED else 0
    sizes = letter, share, heads
    if latent := cfg.latent.kv_dim and cfg.latent:
        return LatentSizes(*sizes, heads, cfg.head_dim, value_dim(cfg), window=window, kv_dim=latent.kv_dim,
                       rope_dim=latent.rope_dim, query_dim=latent.query_dim)
    return AttentionSizes(*sizes, key_heads(cfg.num_kv_heads), cfg.head_dim, cfg.head_dim, cfg.qk_norm != "off",
                     heads * cfg.head_dim * cfg.attention_gate, window=window, tied=cfg.tie_values)
