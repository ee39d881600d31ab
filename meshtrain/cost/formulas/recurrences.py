"""The cost of recurrent mixers: one row of `KINDS` for each recurrence, and `RecurrenceCost`, which reads it.

The engine is `kernels.recurrence`, compiled by XLA, or its Pallas kernels. Few of XLA's kernels are bound by FLOPs. A
step of its scan over chunks is several short kernels, with a gap after each. All other work passes float32 arrays
through memory: pairs of a chunk's tokens [N, C, C], arrays of tokens [N, V + H] and the chunks' states [N, H, V].
Pallas kernels are bound by their products, which `kernels.recurrence_pallas` lists. The saved arrays follow
`model.linear` with the rematerialization of `model.block`.

The bytes were read off programs compiled for H100 in bfloat16, with 4,096 and 8,192 tokens, head sizes of 64, 128 and
256, and 16 to 128 heads. Nothing is measured.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.cost.formulas.mixer_cost import MixerCost, exchange, key_heads, num_shards, pad
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.rates import Matmul, Rates
from meshtrain.cost.formulas.sizes import RECURRENCE, Sent
from meshtrain.kernels import recurrence, recurrence_blocks, recurrence_pallas
from meshtrain.sharding.rules import Layout

if TYPE_CHECKING:
    from meshtrain.cost.formulas.placed import Placed

XLA, PALLAS = "xla", "pallas"


@dataclasses.dataclass(frozen=True)
class HbmBytes:
    """HBM bytes of a recurrence's forward or backward.

    pair: bytes for each pair of tokens in a chunk. key, value: bytes for each element of a value head's key and value.
    state: bytes for each element of the state before a chunk. step: number of kernels per chunk; once: number of the
    other kernels.
    """
    pair: float
    key: float
    value: float
    state: float
    step: float = 0
    once: float = 0

    def of(self, mixer: RecurrenceCost, chunk: int) -> float:
        """Return the HBM bytes per token."""
        each = self.pair * chunk + self.key * mixer.key_dim + self.value * mixer.value_dim
        return mixer.heads * each + self.state * mixer.state / chunk


@dataclasses.dataclass(frozen=True)
class EngineBytes:
    """HBM bytes of a recurrence by one engine: of its forward, of its backward, and of the arrays that live during the
    backward."""
    forward: HbmBytes
    backward: HbmBytes
    live: HbmBytes

    @property
    def passes(self) -> tuple[HbmBytes, HbmBytes]:
        return self.forward, self.backward


@dataclasses.dataclass(frozen=True)
class RecurrenceKind:
    """The properties in which recurrences differ.

    delta: whether it has the delta rule, whose update reads the state. by_channel: whether decays differ per channel;
    decays and gates then come from narrow projections. bytes: the HBM bytes by engine.
    """
    delta: bool
    by_channel: bool
    bytes: Mapping[str, EngineBytes]

    @property
    def products(self) -> int:
        """Return the number of products of a token with the state of a value head."""
        return 3 if self.delta else 2

    def chunk(self, engine: str) -> int:
        """Return the number of tokens of a chunk."""
        if engine == PALLAS:
            return recurrence_blocks.CHUNK
        return recurrence.DELTA_CHUNK if self.delta else recurrence.SUM_CHUNK


KINDS = {       # by letter
    "G": RecurrenceKind(True, False, {
        XLA: EngineBytes(HbmBytes(70, 39, 39, 72, 9, 44), HbmBytes(216, 61, 61, 153, 9, 78), HbmBytes(21, 11, 11, 35)),
        PALLAS: EngineBytes(HbmBytes(0, 6, 9.4, 2, 0, 7), HbmBytes(0, 20, 23, 8, 0, 12), HbmBytes(0, 10, 12, 5))}),
    "K": RecurrenceKind(True, True, {
        XLA: EngineBytes(HbmBytes(50, 151, 39, 55, 9, 50), HbmBytes(170, 473, 61, 130, 9, 90),
                         HbmBytes(12, 89, 11, 25)),
        PALLAS: EngineBytes(HbmBytes(4, 28, 8, 2, 0, 7), HbmBytes(20, 62, 22, 10, 0, 12), HbmBytes(0, 20, 12, 5))}),
    "M": RecurrenceKind(False, False, {
        XLA: EngineBytes(HbmBytes(4, 0, 30, 40, 3, 15), HbmBytes(24, 0, 78, 56, 3, 34), HbmBytes(10, 0, 15, 4)),
        PALLAS: EngineBytes(HbmBytes(0, 0, 5, 2, 0, 6), HbmBytes(0, 0, 7, 8, 0, 10), HbmBytes(0, 0, 18, 5))})}
# Pallas kernels of the forward and of the backward, with the delta rule and without; for the summary of a run
KERNELS = {True: (("inside", "forward"), ("inside_again", "reverse", "gradients", "inside_gradients")),
           False: (("forward",), ("reverse", "gradients"))}
OF_SUMMARY = "summary", "reverse_end"
# HBM bytes of a channel in the convolution (forward, backward), and its kernels: small, of q, k and v
CONVOLVED, CONVOLUTIONS = (2, 10), (2, 8)
# Products in float32 in XLA: the inverse of a chunk's pairs times values and keys. The backward recomputes them, and
# computes two products for each and two for the inverse.
INVERTED = (1, 3)
# Products in float32, in XLA, that sum decays per channel; the backward of Pallas kernels recomputes them.
SUMMED = (1, 2)
# HBM bytes of an element of a state before a chunk, for the summary of a run (forward, backward), and kernels of a step
SUMMARIZED, SUMMARY_STEP = (90, 62), 7


@dataclasses.dataclass(frozen=True)
class Scan:
    """The tokens of a layer on one device, in runs of `length` tokens whose chunks follow each other.

    parts: number of parts that are computed one after the other. split: number of devices that split a sequence, each
    with one run of it; 0 if sequences are not split. For split sequences another scan computes the effect of a run on
    any initial state, and these effects are composed.
    """
    tokens: float
    length: float
    parts: float = 1
    split: int = 0


@dataclasses.dataclass(frozen=True)
class RecurrenceCost(MixerCost):
    """A recurrence with a convolution. width: number of tokens in the convolution."""
    width: int = 0

    part = RECURRENCE

    @classmethod
    def of(cls, cfg: Model, letter: str, share: float, layout: Layout) -> MixerCost:
        linear, heads = cfg.linear, cfg.linear.value_heads / num_shards(layout, "heads")
        return cls(letter, share, heads, key_heads(layout, linear.key_heads), linear.key_dim, linear.value_dim,
                   gates=heads * linear.value_dim, width=linear.conv_width)

    @classmethod
    def flops(cls, cfg: Model, letter: str, seq_len: int) -> float:
        linear, products = cfg.of(letter).linear, KINDS[letter].products
        return products * 2.0 * linear.value_heads * linear.key_dim * linear.value_dim

    @property
    def kind(self) -> RecurrenceKind:
        return KINDS[self.letter]

    @property
    def queries(self) -> float:
        return self.keys

    @property
    def values(self) -> float:
        return self.outputs

    @property
    def rates(self) -> float:
        """Return the width of decays and update rates."""
        return self.heads * ((self.key_dim if self.kind.by_channel else 1) + self.kind.delta)

    @property
    def narrow(self) -> float:
        return 2 * self.value_dim * self.kind.by_channel

    @property
    def inward(self) -> float:
        return super().inward + self.rates + self.narrow

    @property
    def outward(self) -> float:
        return self.outputs

    @property
    def state(self) -> float:
        """Return the number of elements of one sequence's states in one layer, over all heads of the device."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def stream_bytes(self) -> float:
        """Return the HBM bytes per token of the convolution's activations and norms, and of the output's gated norm."""
        return 8 * (self.queries + self.keys) + 4 * self.values + 6 * self.outputs

    def residual_width(self, itemsize: int) -> float:
        """Return the width of three separate arrays: the convolution's inputs, its activated outputs and the
        recurrence's inputs."""
        delta, rates = self.kind.delta, self.rates * (1 + 4 / itemsize) + self.narrow
        return ((4 if delta else 3) * (self.queries + self.keys) + (3 if delta else 4) * self.values + rates
                + self.gates + (1 if delta else 2) * self.outputs + self.outward)

    def states_width(self, options: Options) -> float:
        """Return the width of the states, which are saved before each chunk."""
        return self.state / self._chunk(options.recurrence)

    def backward_width(self, itemsize: int, options: Options, times: int) -> float:
        return self._live_width(itemsize, options.recurrence)

    def split_backward_width(self, itemsize: int, options: Options, num_shards: int) -> float:
        return self._live_width(itemsize, options.recurrence)

    def waiting_width(self, itemsize: int, options: Options) -> float:
        return self._live_width(itemsize, options.recurrence)

    def exchanges(self, placed: Placed, options: Options) -> Iterator[Sent]:
        """Yield the gathers. All devices gather the effect of each device's tokens on a state, forward and backward,
        and the last tokens of each device for the convolution (`parallel.context.recurrence`)."""
        c, runs = placed.num_shards("seq"), 1 if options.method == "ulysses" else 2
        forward, backward = (self.share * visits for visits in placed.visits(options)[:2])
        rows = placed.tokens(options) * c / options.seq_len * runs
        matrix = self.heads * (self.key_dim ** 2 if self.kind.delta else 1)
        yield exchange(placed, "all-gather", c * rows * (self.state + matrix), 4, forward + backward)
        tails = rows * (self.width - 1) * (self.queries + self.keys + self.values)
        yield exchange(placed, "collective-permute", tails / runs, placed.itemsize, runs * (forward + 2 * backward))

    def seconds(self, placed: Placed, rated: Rates, options: Options) -> tuple[float, float]:
        """Return the seconds. If sequences are split, the scan over chunks runs a second time to summarize each
        device's tokens."""
        split, runs_of_device = placed.num_shards("seq"), 1 if options.method == "ulysses" else 2
        experts = pattern.share(placed.cfg, mlps="e")       # their layers are not computed in parts
        parts = experts + (1 - experts) * placed.row_parts(options)
        num_runs = split * runs_of_device if split > 1 else 1
        scan = Scan(placed.tokens(options), options.seq_len / num_runs, parts, num_runs if split > 1 else 0)
        forward_s, backward_s = self.scan_s(rated, scan, placed.itemsize, options.recurrence)
        return self.share * forward_s, self.share * backward_s

    def slot_bytes(self, num_layers: float, itemsize: int, places: Callable[[int], int]) -> float:
        return num_layers * self._slot_bytes(itemsize)

    def read_bytes(self, itemsize: int, length: float) -> float:
        return 2 * self._slot_bytes(itemsize)

    def _slot_bytes(self, itemsize: int) -> float:
        """Return the bytes of a slot in one layer: its float32 state, and the last tokens before its convolutions."""
        return 4 * self.state + itemsize * (self.width - 1) * (self.queries + self.keys + self.values)

    def decode_products(self, num_layers: float, length: float) -> float:
        return 0.0

    def reads_in_a_loop(self, by_kernels: bool) -> bool:
        return False

    # ---- the scan over chunks, by its engine -------------------------------------------------------------------------

    def engine(self, asked: str) -> str:
        """Return the engine. Pallas kernels do not support wide heads, so XLA computes those. asked: the requested
        engine."""
        return XLA if max(self.key_dim, self.value_dim) > recurrence_pallas.WIDEST else asked

    def _chunk(self, asked: str) -> int:
        return self.kind.chunk(self.engine(asked))

    def _live_width(self, itemsize: int, asked: str) -> float:
        """Return the elements per token that live during the backward."""
        return self.kind.bytes[self.engine(asked)].live.of(self, self._chunk(asked)) / itemsize

    def scan_s(self, rated: Rates, runs: Scan, itemsize: int, asked: str) -> tuple[float, float]:
        """Return the seconds of a layer's recurrence and its convolution (forward, backward). asked: the requested
        engine."""
        channels = self.queries + self.keys + self.values
        recur_s = self._in_pallas_s if self.engine(asked) == PALLAS else self._in_xla_s
        passes_s = []
        for direction, moved in enumerate(self.kind.bytes[self.engine(asked)].passes):
            pass_s = runs.parts * (CONVOLUTIONS[direction] + moved.once) * rated.launch_s
            pass_s += rated.stream_s(runs.tokens * itemsize / 2 * CONVOLVED[direction] * channels)
            hbm_bytes = runs.tokens * itemsize / 2 * moved.of(self, self._chunk(asked))
            passes_s.append(pass_s + recur_s(rated, runs, direction, hbm_bytes))
        forward_s, backward_s = passes_s
        return forward_s, backward_s

    def _in_xla_s(self, rated: Rates, runs: Scan, direction: int, hbm_bytes: float) -> float:
        C, width = self.kind.chunk(XLA), self.key_dim + self.value_dim
        steps = runs.length / C
        launches = self.kind.bytes[XLA].passes[direction].step * steps
        if runs.split:
            launches += SUMMARY_STEP * steps
            hbm_bytes += runs.tokens * SUMMARIZED[direction] * self.state / C
        scan_s = runs.parts * (launches * rated.launch_s + self._compose_s(rated, runs))
        if self.kind.delta:
            own, times = runs.tokens * self.heads * 4 * (C + 2 * width) * INVERTED[direction], INVERTED[direction]
            product = Matmul(C, width, C, max(1, round(runs.tokens * self.heads / C)), "float32")
            hbm_bytes -= own
            scan_s += max(times * rated.matmul_s(product), rated.stream_s(own))
        return scan_s + rated.stream_s(hbm_bytes)

    def _in_pallas_s(self, rated: Rates, runs: Scan, direction: int, hbm_bytes: float) -> float:
        C, delta, by_channel = self.kind.chunk(PALLAS), self.kind.delta, self.kind.by_channel
        count, H, V = round(runs.tokens * self.heads / C), *(
            max(recurrence_pallas.MIN_WIDTH, pad(width)) for width in (self.key_dim, self.value_dim))
        names = KERNELS[delta][direction] + (OF_SUMMARY[direction:direction + 1] if runs.split else ())
        products = [shape for name in names for shape in recurrence_pallas.products_of(
            recurrence_pallas.CHANNELS * by_channel + name, H, V, delta)]
        scan_s = runs.parts * self._compose_s(rated, runs)
        if by_channel:
            own = SUMMED[direction] * 8 * runs.tokens * self.keys
            product_s = rated.matmul_s(Matmul(C, self.key_dim, C, count, "float32"))
            scan_s += max(SUMMED[direction] * product_s, rated.stream_s(own))
            hbm_bytes -= own
        return scan_s + max(rated.stream_s(hbm_bytes), sum(
            rated.matmul_s(Matmul(*shape, count, "bfloat16")) for shape in products))

    def _compose_s(self, rated: Rates, runs: Scan) -> float:
        """Return the seconds to compose the effects of all runs of a sequence on a state, one after the other, in
        float32."""
        product = Matmul(self.key_dim, self.value_dim, self.key_dim, round(self.heads), "float32")
        product_s = rated.matmul_s(product) if self.kind.delta else 0.0
        return runs.split * (SUMMARY_STEP * rated.launch_s + product_s)
