"""The mixers of a model on one device: attention, attention by latents, and the class of each letter.

A new kind of mixer is a class here, and its place in `class_of`; a new recurrence is a row of `recurrences.KINDS`. The
saved arrays follow `model.block` and `model.latent` with the rematerialization of `model.block`.
"""
from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshtrain import custom, pattern
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import attention_pairs, calibrations
from meshtrain.cost.formulas.mixer_cost import MixerCost, exchange, key_heads, num_shards, pad
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.rates import AttentionKernel, Rates
from meshtrain.cost.formulas.recurrences import RecurrenceCost
from meshtrain.cost.formulas.sizes import ATTENTION, ATTENTION_BACKWARD, Sent
from meshtrain.parallel.context.attention import value_dim
from meshtrain.sharding.rules import Layout

if TYPE_CHECKING:
    from meshtrain.cost.formulas.placed import Placed


@dataclasses.dataclass(frozen=True)
class AttentionCost(MixerCost):
    """Attention with keys and values. window: tokens that a token attends to; 0: all. tied: the projected keys are also
    the values."""
    window: int = 0
    tied: bool = False

    part = ATTENTION

    @classmethod
    def of(cls, cfg: Model, letter: str, share: float, layout: Layout) -> MixerCost:
        heads = cfg.num_heads / num_shards(layout, "heads")
        return cls(letter, share, heads, key_heads(layout, cfg.num_kv_heads), cfg.head_dim, cfg.head_dim,
                   cfg.qk_norm != "off", heads * cfg.head_dim * cfg.attention_gate,
                   window=cfg.window if pattern.mixer(letter).windowed else 0, tied=cfg.tie_values)

    @classmethod
    def flops(cls, cfg: Model, letter: str, seq_len: int) -> float:
        own, share = cfg.of(letter), attention_pairs.causal_share(cfg, letter, seq_len)
        return share * seq_len * own.num_heads * (own.head_dim + value_dim(own))

    @property
    def inward(self) -> float:
        return super().inward - self.tied * self.values

    @property
    def outward(self) -> float:
        return self.gates

    @property
    def stream_bytes(self) -> float:
        """Return the HBM bytes per token of rotations and gates."""
        return 4 * (self.queries + self.keys) + 6 * self.gates

    def residual_width(self, itemsize: int) -> float:
        return self.queries + self.keys + self.values + self.norm_inputs + self.gates + self.outputs + self.outward

    def sums_width(self, itemsize: int) -> float:
        return 4 * self.heads / itemsize

    @property
    def ring_width(self) -> float:
        return self.queries + self.outputs + 2.5 * (self.keys + self.values)

    def backward_width(self, itemsize: int, options: Options, times: int) -> float:
        return times * (self.pair_width + 2 * self.gates / 3)

    def split_backward_width(self, itemsize: int, options: Options, num_shards: int) -> float:
        q, kv = (self.queries + self.outputs) / 2, (self.keys + self.values) / 2
        return 2 * self.gates + {"ring": 12 * q + 8 * kv, "gather": 10 * q + (6 * num_shards + 2) * kv,
                                 "ulysses": 6 * q + 6 * kv}[self.method(options)]

    def method(self, options: Options) -> str:
        """Return the method by which split sequences attend."""
        return options.method

    def exchanges(self, placed: Placed, options: Options) -> Iterator[Sent]:
        """Yield the collectives of the method. A ring overlaps attention; other methods overlap nothing."""
        tokens, size, c = placed.tokens(options), placed.itemsize, placed.num_shards("seq")
        forward, backward = (self.share * visits for visits in placed.visits(options)[:2])
        if options.method == "ring":
            yield from self._hops(placed, options)
        elif options.method == "gather":        # at any window: whole keys and values, twice, and their gradients
            yield exchange(placed, "all-gather", c * tokens * (self.keys + self.values), size, forward + backward)
            yield exchange(placed, "reduce-scatter", c * tokens * (self.keys + self.values), 4, backward)
        else:                                   # q, k, v and o, again in the backward; do, dq, dk and dv
            both = self.queries + self.keys + self.values + self.outputs
            yield exchange(placed, "all-to-all", tokens * both, size, forward + 2 * backward)

    def _hops(self, placed: Placed, options: Options) -> Iterator[Sent]:
        """Yield the hops of K and V around the ring, and the hops of the float32 sums of their gradients."""
        c, size = placed.num_shards("seq"), placed.itemsize
        forward, backward = (self.share * visits for visits in placed.visits(options)[:2])
        elements = placed.tokens(options) * (self.keys + self.values)
        send = functools.partial(exchange, placed, "collective-permute", elements)
        if 0 < self.window < options.seq_len:
            # `parallel.band`: hops within the window, and gradients back the shorter way
            reach = min(-(-(self.window - 1) * 2 * c // options.seq_len), 2 * c - 1)
            home = max(reach - 1, 0) + min(reach, 2 * c - reach)
            yield send(size, forward * reach, ATTENTION)
            yield send(size, backward * reach, ATTENTION_BACKWARD)
            yield send(4, backward * home, ATTENTION_BACKWARD)
            return
        yield send(size, forward * (c - 1), ATTENTION)
        yield send(size, backward * (c - 1), ATTENTION_BACKWARD)
        # The loop sends sums of dK and dV in float32, the last hop in the compute dtype (`parallel.ring`).
        in_float32 = c - 1 if c > 2 or placed.runs_masked(options) else 0
        yield send(4, backward * in_float32, ATTENTION_BACKWARD)
        yield send(size, backward * (c - in_float32), ATTENTION_BACKWARD)

    def seconds(self, placed: Placed, rated: Rates, options: Options) -> tuple[float, float]:
        engine, ours = options.attended.engine, options.attended.engine in attention_pairs.OURS
        visited = self.share * placed.tokens(options) * options.seq_len * options.attended.visited.get(self.letter, 1.0)
        H, V = (self.heads * (pad(width) if ours else width) for width in (self.key_dim, self.value_dim))

        def attend_s(direction: str, width: float) -> float:
            kernels = (AttentionKernel(engine, direction, share * visited * width, keys, self.key_dim)
                       for share, keys in self._kernels(placed, options))
            return sum(map(rated.attention_s, kernels))
        # A backward in one kernel recomputes the scores and computes four products; our two kernels both recompute the
        # scores.
        return attend_s("forward", H + V), attend_s("backward", 4 * H + 3 * V if ours else 3 * H + 2 * V)

    def _kernels(self, placed: Placed, options: Options) -> tuple[tuple[float, float], ...]:
        """Return (fraction of the pairs, keys) for each kernel of a layer. With context parallelism each device has two
        chunks of a sequence."""
        num_shards, length = placed.num_shards("seq"), options.seq_len
        if num_shards == 1 or options.method == "ulysses":
            return ((1.0, length),)
        chunk = length / (2 * num_shards)
        in_ring = (1 / num_shards, 2 * chunk), (1 - 1 / num_shards, chunk)
        return in_ring if self.method(options) == "ring" else ((1.0, chunk),)

    def token_bytes(self, itemsize: int) -> float:
        """Return the cache bytes of one token in one layer: keys and values, or latents."""
        return itemsize * (self.latents or self.keys + self.values)

    def slot_bytes(self, num_layers: float, itemsize: int, places: Callable[[int], int]) -> float:
        return num_layers * self.token_bytes(itemsize) * places(self.window)

    def read_bytes(self, itemsize: int, length: float) -> float:
        return self.token_bytes(itemsize) * self._visible(length)

    def decode_products(self, num_layers: float, length: float) -> float:
        return num_layers * (self.queries + self.outputs) * self._visible(length)

    def reads_in_a_loop(self, by_kernels: bool) -> bool:
        return bool(self.latents) or not by_kernels

    def _visible(self, length: float) -> float:
        return min(length, self.window or length)


@dataclasses.dataclass(frozen=True)
class LatentCost(AttentionCost):
    """Attention by latents, which are not sharded. Keys and values are expanded where they are read, and not saved."""
    kv_dim: int = 0
    rope_dim: int = 0
    query_dim: int = 0

    @classmethod
    def of(cls, cfg: Model, letter: str, share: float, layout: Layout) -> MixerCost:
        heads, latent = cfg.num_heads / num_shards(layout, "heads"), cfg.latent
        return cls(letter, share, heads, heads, cfg.head_dim, value_dim(cfg),
                   window=cfg.window if pattern.mixer(letter).windowed else 0, kv_dim=latent.kv_dim,
                   rope_dim=latent.rope_dim, query_dim=latent.query_dim)

    @property
    def latents(self) -> float:
        return self.kv_dim + self.rope_dim

    @property
    def narrow(self) -> float:
        """Return the width of the latent of queries."""
        return self.query_dim

    @property
    def inward(self) -> float:
        return self.query_dim + self.queries + self.latents

    def residual_width(self, itemsize: int) -> float:
        narrow = 2 * self.query_dim + 2 * self.kv_dim + self.rope_dim       # before their norms and after
        return narrow + self.queries + self.outputs

    def method(self, options: Options) -> str:
        """Return the method; latents are gathered in place of a ring."""
        return "gather" if options.method == "ring" else options.method

    def exchanges(self, placed: Placed, options: Options) -> Iterator[Sent]:
        """Yield the gathers of latents in forward and backward, with any method. Gradients of latents are float32."""
        tokens, size, c = placed.tokens(options), placed.itemsize, placed.num_shards("seq")
        forward, backward = (self.share * visits for visits in placed.visits(options)[:2])
        yield exchange(placed, "all-gather", c * tokens * self.latents, size, forward + backward)
        yield exchange(placed, "reduce-scatter", c * tokens * self.latents, 4, backward)
        if options.method == "ulysses":     # q and o; q, o, do and dq
            yield exchange(placed, "all-to-all", tokens * (self.queries + self.outputs), size, forward + 2 * backward)


@dataclasses.dataclass(frozen=True)
class UnpricedCost(MixerCost):
    """A mixer of the run's own without a class in its attribute `price`. Its weight matrices count as in other mixers;
    its other work and saved arrays count 0. `plan` refuses such a mixer, and a training run reports it."""

    part = ""

    @classmethod
    def of(cls, cfg: Model, letter: str, share: float, layout: Layout) -> MixerCost:
        return cls(letter, share, 0.0, 0.0, 1, 1)

    @classmethod
    def flops(cls, cfg: Model, letter: str, seq_len: int) -> float:
        return 0.0

    outward = stream_bytes = 0.0

    def _nothing(self, *args: object, **options: object) -> float:
        return 0.0
    residual_width = backward_width = split_backward_width = slot_bytes = read_bytes = decode_products = _nothing

    def exchanges(self, placed: Placed, options: Options) -> Iterator[Sent]:
        return iter(())

    def seconds(self, placed: Placed, rated: Rates, options: Options) -> tuple[float, float]:
        return 0.0, 0.0

    def reads_in_a_loop(self, by_kernels: bool) -> bool:
        return False


def _expansion_s(placed: Placed, rated: Rates, options: Options) -> tuple[float, float]:
    """Return the seconds in which a layer's attention expands latents (forward, backward). The backward expands them
    again. If sequences are split, each device expands the whole sequence, or with ulysses only its own heads."""
    tokens, split = placed.tokens(options), placed.num_shards("seq")
    tokens, heads = tokens * split, split if options.method == "ulysses" else 1
    product_s = functools.partial(rated.product_s, dtype=placed.experts_dtype, itemsize=placed.itemsize)
    expanding = [(w, w.n / heads) for w in placed.layer.products if w.expands]
    forward = sum(w.share * product_s(tokens, n, w.k) for w, n in expanding)
    backward = forward + sum(
        w.share * (product_s(tokens, w.k, n) + w.trained * product_s(w.k, n, tokens)) for w, n in expanding)
    moved = placed.mean(lambda mixer: tokens / heads * (mixer.keys + mixer.values) * bool(mixer.latents))
    gathered = split > 1 and options.method != "ulysses"
    each = calibrations.GATHERED_LATENT if gathered else calibrations.EXPANDED_LATENT
    return forward + rated.stream_s(each.forward * moved), backward + rated.stream_s(each.backward * moved)


# ---- the mixers of a model -------------------------------------------------------------------------------------------


def class_of(cfg: Model, letter: str) -> type[MixerCost]:
    """Return the class of a mixer. cfg: the [model] section with this mixer's values. Raises: ValueError for a mixer
    without a class."""
    family = pattern.mixer(letter).family
    if family == pattern.CUSTOM:
        value = getattr(cfg.custom, letter)
        price = getattr(custom.load(value), "price", None) or UnpricedCost
        if not (isinstance(price, type) and issubclass(price, MixerCost)):
            raise custom.refuse(f"model.custom.{letter}", value, "a subclass of "
                                "meshtrain.cost.formulas.mixer_cost.MixerCost as `price`, or no `price`",
                                f"has the `price` {price!r}")
        return price
    classes: dict[str, type[MixerCost]] = {pattern.RECURRENT: RecurrenceCost,
                                           pattern.ATTENTION: LatentCost if cfg.latent.kv_dim else AttentionCost}
    if family not in classes:
        raise ValueError(f"the mixer {letter!r} ({pattern.mixer(letter).words}) has no cost; add its class here")
    return classes[family]


def find_unpriced(cfg: Model) -> list[str]:
    """Return the letters of the model's mixers that have no price."""
    letters = sorted(pattern.present(cfg) - {"."})
    return [letter for letter in letters if class_of(cfg.of(letter), letter) is UnpricedCost]


def of(cfg: Model, layout: Layout) -> tuple[MixerCost, ...]:
    """Return the kinds of mixers of a [model] section on one device, in the order of their letters."""
    counts = Counter(kind.mixer for kind in pattern.kinds(cfg) if kind.mixer != ".")
    return tuple(class_of(cfg.of(letter), letter).of(cfg.of(letter), letter, counts[letter] / cfg.num_layers, layout)
                 for letter in sorted(counts))


def flops(cfg: Model, letter: str, seq_len: int) -> float:
    """Return the forward's model FLOPs per token of one layer of this mixer, without its weight matrices."""
    return 0.0 if letter == "." else class_of(cfg.of(letter), letter).flops(cfg, letter, seq_len)


def seconds(placed: Placed, rated: Rates, options: Options, part: str) -> tuple[float, float]:
    """Return the seconds (forward, backward) of a layer's mixers, mean over layers. part: the part of a step that they
    belong to, ATTENTION or RECURRENCE."""
    each = [mixer.seconds(placed, rated, options) for mixer in placed.mixers if mixer.part == part]
    expanded = _expansion_s(placed, rated, options) if part == ATTENTION else (0.0, 0.0)
    forward_s, backward_s = (sum(times[i] for times in each) + expanded[i] for i in (0, 1))
    return forward_s, backward_s
