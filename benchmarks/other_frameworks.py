"""Where other frameworks run a step differently from ours: subclasses of the parts of the formulas, which price
published runs.

Each of their pipeline stages runs its own program, with the head on the last stage. They reduce gradients in buckets,
overlapped with the backward. Their kernels wait for the host, and each expert has its own products. tests/published.py
and benchmarks/published_2026.py contain the runs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshtrain import pattern
from meshtrain.cost.formulas import assumptions, calibrations, price, rates, routed, traffic
from meshtrain.cost.formulas.assumptions import NARROW, Assumption
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.placed import Placed, Recomputed
from meshtrain.cost.formulas.rates import AttentionKernel, Matmul
from meshtrain.cost.formulas.sizes import MICROBATCH, SUM, Sent, WeightMove
from meshtrain.parallel.experts.region import ManualRegion

_GAP = ("microseconds, forward and backward, in which the kernels of other frameworks wait for each other and for the "
        "host; from the runs of 2026: ")
_ELSEWHERE = "fraction of the dense bf16 peak, counting the causal half; for runs of other frameworks: "

OTHERS = {row.name: row for row in (
    Assumption("matmul.mxfp8", {"": 1.0, "b3": 1.4, "gb3": 1.4}, NARROW, high=2, formula=True),
    Assumption("attention.flash2_forward", {"": .37, "a100": .58}, _ELSEWHERE + "FlashAttention-2", formula=True),
    Assumption("attention.flash2_backward", {"": .33, "a100": .50}, _ELSEWHERE + "FlashAttention-2", formula=True),
    Assumption("attention.triton_forward", {"": .21, "a100": .36}, _ELSEWHERE + "Triton of 2023, MPT at 65,536",
               formula=True),
    Assumption("attention.triton_backward", {"": .17, "a100": .32}, _ELSEWHERE + "Triton of 2023, MPT at 65,536",
               formula=True),
    Assumption("attention.scores_forward", {"": .15}, _ELSEWHERE + "scores in memory", formula=True),
    Assumption("attention.scores_backward", {"": .15}, _ELSEWHERE + "scores in memory", formula=True),
    Assumption("overlap.user_buffers", {"": .60},
               "fraction of tensor parallelism's collectives that is hidden where a framework cuts "
               "them into chunks that overlap their products (Transformer Engine's user buffers)", 0, formula=True),
    Assumption("gap.layer_us", {"": 600}, _GAP + "of a layer", 0, 1e5, formula=True),
    Assumption("gap.expert_us", {"": 250}, _GAP + "of each expert of a device and layer", 0, 1e5, formula=True),
    Assumption("gap.narrow_us", {"": 40}, _GAP + "more where experts multiply in a narrow dtype", 0, 1e5,
               formula=True),
    Assumption("experts.rate", {"": 1.0, "b": .7, "gb": .7},
               "rate of a product of many experts in other frameworks, divided by the rate of one "
               "product of the same size; Blackwell's value is from published runs of 2026", 0, 2, formula=True),
    Assumption("elementwise.eager", {"": 1.8},
               "bytes of elementwise work without a fusing compiler, divided by the bytes with "
               "one", 1, 10, formula=True),
    Assumption("overlap.reduced", {"": 1}, "largest fraction of a layer's reductions that is hidden", 0, formula=True),
)}  # fmt: skip
TABLE = assumptions.TABLE | OTHERS


class OtherAssumptions(assumptions.Assumptions):
    """The assumptions of our formulas, and those of other frameworks."""
    table = TABLE


class OtherRates(rates.Rates):
    """Rates of kernels that we do not have: products in mxfp8, attention with its scores in memory."""

    def narrow_share(self, dtype: str) -> float:
        return self.assumed["matmul.mxfp8"] if dtype == "mxfp8" else super().narrow_share(dtype)

    def attention_s(self, kernel: AttentionKernel) -> float:
        if kernel.engine != "scores":
            return super().attention_s(kernel)
        # HBM traffic limits scores for every width of heads.
        share = self.assumed[f"attention.scores_{kernel.direction}"] * self.assumed["matmul.clock"]
        share *= kernel.num_keys / (kernel.num_keys + self.assumed["attention.ramp"])
        share *= min(kernel.head_dim, 128) / 128
        return kernel.flops / (self.peak("bfloat16") * share)


@dataclasses.dataclass(frozen=True)
class Habits:
    """What differs from framework to framework and from run to run.

    recompute: fractions of a layer's forward products, attention and elementwise work that the backward recomputes.
    eager: elementwise work is not fused. grad_bytes: bytes of a gradient element in a reduction. narrow: dtype of the
    products of layers and experts if it is not compute_dtype: float8 (one scale per tensor) or mxfp8 (one scale per 32
    elements); [model] supports neither mxfp8 nor narrow experts. copies: how often a token is sent if it is sent once
    to each device or host that holds its experts; 0 means once to each expert. spreads_head: the stages have unequal
    numbers of layers, so the head's time is shared by all stages.
    """
    recompute: tuple[float, float, float]
    eager: bool = False
    grad_bytes: int = 4
    narrow: str = ""
    copies: float = 0.0
    spreads_head: bool = False


NO_HABITS = Habits((0.0, 0.0, 0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class OtherPlaced(Placed):
    """A model under a layout in another framework."""
    habits: Habits = NO_HABITS

    @classmethod
    def of(cls, ours: Placed, habits: Habits) -> OtherPlaced:
        """Return the model with other habits: each backward recomputes all products or none; cotangents of looked-up
        rows are scattered into the gradient of the table; accumulators are summed once a step."""
        fields = {field.name: getattr(ours, field.name) for field in dataclasses.fields(Placed)}
        products = tuple(dataclasses.replace(product, unread=0.0) for product in ours.layer.products)
        leading = ours.leading and cls.of(ours.leading, habits)
        other = cls(**fields | {"layer": dataclasses.replace(ours.layer, products=products), "leading": leading},
                    habits=habits)
        moves = tuple(other._at_the_end(move) for move in ours.moves if move.part != "lookup")
        return dataclasses.replace(other, moves=moves)

    def _at_the_end(self, move: WeightMove) -> WeightMove:
        """Return a move with sums of gradients moved from each microbatch to the end of the step."""
        if move.kind != SUM or move.part == "update":
            return move
        num_layers = self.cfg.num_layers / self.layout.sizes["stage"] if move.part in traffic.LAYER_PARTS else 1
        return move._replace(part="update", elements=move.elements * num_layers)

    @property
    def matmul_dtype(self) -> str:
        return self.habits.narrow or super().matmul_dtype

    @property
    def experts_dtype(self) -> str:
        return self.matmul_dtype

    @property
    def router_parts(self) -> int:
        return 1

    def layers(self, options: Options) -> float:
        if self.is_leading:
            return super().layers(options)
        return self.cfg.num_layers / self.layout.sizes["stage"]

    def runs_masked(self, options: Options) -> bool:
        return False

    def recomputation(self, options: Options) -> Recomputed:
        products, attention, elementwise = self.habits.recompute
        return Recomputed(products, attention, elementwise, gathers=products)

    def row_parts(self, options: Options) -> int:
        return 1

    def route(self, options: Options) -> routed.Routed | None:
        """Return the experts of one layer. Their rows are as many as the tokens' choices."""
        if not self.cfg.num_experts:
            return None
        region, chosen = ManualRegion.of(self.layout), self.cfg.experts_per_token
        tokens = self.tokens(options) / self.stream_shards
        even = tokens * chosen * self.layout.num_shards(region.inner)
        return routed.Routed(True, region, tokens, tokens * (self.habits.copies or chosen), 1,
                             routed.RowCounts(even, even, even), routed.sizes(self, region), True,
                             self.mesh.sizes["stage"] > 1, routed.weight_shards(self), True,
                             pattern.share(self.cfg, mlps="e"))


# ---- collectives -----------------------------------------------------------------------------------------------------


def _tensor(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the collectives around products. Others scale float8 by blocks, or by the last steps' maxima."""
    return (sent for sent in traffic.tensor(placed, options) if sent.label != traffic.SCALES)


def _weights(placed: OtherPlaced, options: Options) -> Iterator[Sent]:
    """Yield the gathers of weights and the reductions of gradients, in buckets."""
    for sent in traffic.weights(placed, options):
        if sent.kind != "all-gather" and placed.habits.grad_bytes == 2:
            sent = sent._replace(dtype="bf16", array_bytes=sent.array_bytes / 2)
        overlaps = MICROBATCH if sent.label == traffic.UPDATE else sent.overlaps
        yield sent._replace(overlaps=overlaps, arrays=1)


def _experts(placed: OtherPlaced, options: Options) -> Iterator[Sent]:
    """Yield the exchange of tokens with experts and back, and that of their gradients."""
    if not (experts := placed.route(options)):
        return
    forward, width = experts.share * placed.visits(options)[0], experts.sizes.embed_dim * placed.itemsize
    exchanged, _ = experts.axes
    yield Sent("all-to-all", exchanged, placed.dtype, experts.seen * width, 4 * forward, traffic.ROUTED)
    for kind in ("all-gather", "reduce-scatter"):         # of an expert's parts
        yield Sent(kind, experts.region.inner, placed.dtype, experts.rows.even * width, 2 * forward,
                           traffic.ROUTED)


PARTS = traffic.PARTS | {"tensor": _tensor, "experts": _experts, "weights": _weights}


# ---- seconds ---------------------------------------------------------------------------------------------------------


class OtherLayerTimes(price.LayerTimes):
    """Seconds of one layer and of the head. Kernels wait for each other and for the host."""

    def __init__(self, placed: OtherPlaced, rated: rates.Rates, options: Options):
        self.eager = rated.assumed["elementwise.eager"] if placed.habits.eager else 1.0
        super().__init__(placed, rated, options)
        forward_s, backward_s = self.gaps_s()
        self.forward_s, self.input_grad_s = self.forward_s + forward_s, self.input_grad_s + backward_s
        if forward_s + backward_s:
            recurrence = {name: self.parts.pop(name) for name in ("recurrence",) if name in self.parts}
            self.parts |= {"gaps": forward_s + backward_s} | recurrence

    def gaps_s(self) -> tuple[float, float]:
        """Return the seconds in which the kernels of a layer wait (forward, backward). Each expert of a device adds
        gaps, because its products and casts are separate kernels."""
        placed, assumed = self.placed, self.rated.assumed
        gap_us = assumed["gap.layer_us"]
        if experts := placed.route(self.options):
            narrow = placed.experts_dtype != placed.cfg.compute_dtype
            each_us = assumed["gap.expert_us"] + narrow * assumed["gap.narrow_us"]
            gap_us += experts.share * experts.sizes.num_experts * each_us
        return rates.US * gap_us / 3, 2 * rates.US * gap_us / 3

    def scan_bytes(self) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0

    def time_experts(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        experts = self.placed.route(self.options)
        if not experts:
            return (0.0,) * 3, (0.0,) * 2
        products = [experts.share * (times * self.time_product(experts, kernel))
                    for times, kernel in zip(experts.products, ("rows", "rows", "outer"))]
        moved = self._permuted_bytes(experts)
        return tuple(products), tuple(experts.share * self.rated.stream_s(each) for each in moved)

    def time_product(self, experts: routed.Routed, kernel: str) -> float:
        """Return the seconds of a product of each expert's own, several at once."""
        sizes, outer = experts.sizes, kernel == "outer"
        even, k, n = experts.rows.even / sizes.num_experts, sizes.embed_dim, sizes.width
        shape = (k, n, even) if outer else (even, n, k)
        product = Matmul(*shape, sizes.num_experts, self.placed.experts_dtype)
        product_s = self.rated.matmul_s(product) / self.rated.assumed["experts.rate"]
        return max(product_s, self.rated.stream_s(experts.hbm_bytes(outer)))

    def _permuted_bytes(self, experts: routed.Routed) -> tuple[float, float]:
        """Return the HBM bytes in addition to the experts' products (forward, backward). Rows are sorted by expert and
        back, activated and weighted, and cast to a narrow dtype."""
        sizes, n = experts.sizes, experts.sizes.width
        narrow = self.placed.experts_dtype != self.placed.cfg.compute_dtype
        moved, hidden = 4 * sizes.itemsize * sizes.embed_dim, sizes.itemsize * (sizes.inward + 1) * n
        cast = narrow * calibrations.FLOAT8_CAST * (sizes.embed_dim + n)
        cast_back = narrow * (calibrations.FLOAT8_CAST + 1) * (sizes.embed_dim + sizes.inward * n)
        return experts.rows.executed * (moved + hidden + cast), experts.rows.executed * (moved + 2 * hidden + cast_back)


class OtherPricing(price.Pricing):
    """Adds up the seconds of one step. Stages run 1F1B or interleaved 1F1B, each its own program."""

    def time_layers(self, placed: Placed, options: Options) -> price.LayerTimes:
        return OtherLayerTimes(placed, self.rated, options)

    def list_collectives(self) -> list[Sent]:
        return traffic.of(self.placed, self.options, PARTS)

    def head_s(self) -> float:
        head_s = super().head_s()
        return head_s / self.num_stages if self.placed.habits.spreads_head else head_s

    def idle_s(self) -> float:
        return (self.num_stages - 1) / self.options.chunks * self.stage_s()

    def update_s(self) -> float:
        moments_bytes = 2 * 8       # two moments of AdamW in float32, read and written
        return self.rated.stream_s((calibrations.UPDATE + moments_bytes) * self.placed.held.updated)
