"""Computes the rows, traffic and memory of one layer's experts for a microbatch on one device, in closed formulas.

Assumes balanced experts. The buffers have the sizes that `parallel.experts.dispatch` and `parallel.experts.all_to_all`
give them, and one round suffices.
"""
from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from meshtrain import pattern
from meshtrain.choices import experts
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.sizes import GATHER, order
from meshtrain.kernels import grouped, tiles
from meshtrain.names import LORA
from meshtrain.parallel.experts import all_to_all, dispatch
from meshtrain.parallel.experts.region import ManualRegion

if TYPE_CHECKING:
    from meshtrain.cost.formulas.placed import Placed


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a device's experts in one layer. inward: number of matrices other than `down`; trained: whether the
    matrices have gradients; adapters: elements of an expert's adapters, relative to one of its matrices."""
    num_experts: float
    embed_dim: int
    width: float
    inward: int
    trained: bool
    itemsize: int
    adapters: float = 0.0

    @property
    def matrix(self) -> float:
        """Return the elements of one matrix, over all experts of the device."""
        return self.num_experts * self.embed_dim * self.width

    @property
    def weights(self) -> float:
        """Return the elements of all matrices, over all experts of the device."""
        return (self.inward + 1) * self.matrix


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """Row counts of a device's experts. even: rows expected if experts are balanced; held: rows of the buffer;
    executed: rows that the kernels multiply."""
    even: float
    held: float
    executed: float


@dataclasses.dataclass(frozen=True)
class Routed:
    """The routed tokens of one layer on one device.

    tokens: tokens of this device. seen: tokens, or single choices of tokens, that this device receives in a round, with
    `choices` choices each. further: whether the program has a loop of further rounds. split: whether a pipeline
    computes weight gradients in W. gathered: number of shards that weights are gathered over. saves_inward: whether the
    inward outputs are saved for the backward, see `dispatch`. share: fraction of the layers that have experts.
    """
    by_all_to_all: bool
    region: ManualRegion
    tokens: float
    seen: float
    choices: int
    rows: RowCounts
    sizes: ExpertSizes
    further: bool
    split: bool
    gathered: int
    saves_inward: bool
    share: float

    @property
    def products(self) -> tuple[float, float, float]:
        """Return how often all rows are multiplied by one matrix: (forward, backward for inputs, backward for weights).
        The backward recomputes inward products that are not saved, and those of adapters."""
        low = self.sizes.adapters
        return self.sizes.inward + 1 + low, (1 if self.saves_inward else 2) * self.sizes.inward + 1 + 2 * low, (
            (self.sizes.inward + 1) * self.sizes.trained + low)

    @property
    def in_order(self) -> tuple[int, int, int]:
        """Return how many of `products` read rows that are stored in order, and have no operation fused after the
        product."""
        return 1, self.sizes.inward, 0

    @property
    def saved_bytes(self) -> float:
        """Return the bytes that a layer saves for its backward, mean over layers."""
        return (self.sizes.itemsize * self.sizes.inward * self.rows.held * self.sizes.width
                * self.saves_inward * self.share)

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (mesh axes over which tokens are gathered or exchanged, mesh axes over which outputs are summed)."""
        return order(self.region.experts if self.by_all_to_all else self.region.gathered), order(self.region.summed)

    @property
    def round_bytes(self) -> float:
        """Return the bytes of the tokens and rows that a round's weight gradients read."""
        return self.sizes.itemsize * (2 * self.seen * self.sizes.embed_dim + self.rows.held
                                      * (self.sizes.inward + 1) * self.sizes.width)

    @property
    def temporary_width(self) -> float:
        """Return the width of a row's temporaries in a round: its gradient, or the inward outputs with their gradient,
        whichever is wider."""
        return max(self.sizes.embed_dim, self.sizes.inward * self.sizes.width)

    @property
    def weight_grad_bytes(self) -> float:
        """Return the bytes of the operands of the weight gradients (`dispatch.WeightGradOperands`): tokens and rows,
        and with a separate W the sums of further rounds."""
        sums = 4 * self.sizes.weights * self.sizes.trained if self.further and self.split else 0
        return (self.sizes.trained or self.sizes.adapters > 0) * self.round_bytes + sums

    @property
    def staged_bytes(self) -> float:
        """Return the peak bytes of a layer's B in a pipeline. The memory holds a further round with the operands of its
        weight gradients, the sums of the earlier rounds, and the zeros that a masked tick adds instead."""
        if not self.further:
            widths = self.temporary_width + (self.sizes.inward + 1) * self.sizes.width
            of_round = self.rows.held * widths + 3 * self.seen * self.sizes.embed_dim + self.sizes.weights
            return max(self.sizes.itemsize * of_round,
                       self.weight_grad_bytes + 4 * self.sizes.weights * self.sizes.trained)
        sums = (self.round_bytes + 12 * self.sizes.matrix) * self.sizes.trained
        return self.weight_grad_bytes + sums + self.sizes.itemsize * (
            self.sizes.weights + 2 * self.seen * self.sizes.embed_dim)

    @property
    def inputs_bytes(self) -> float:
        """Return the peak bytes while input gradients are computed.

        With further rounds, memory holds the first round's operands of weight gradients, and the next round with its
        tokens and the sum of their gradients. Without further rounds, memory holds the rows' gradient in place of the
        next round.
        """
        if not self.further:
            return self.weight_grad_bytes + self.sizes.itemsize * (
                self.rows.held * self.temporary_width + self.sizes.inward * self.sizes.matrix)
        # Each round of an all-to-all has tokens of its own; their sum is float32.
        tokens = 2 * self.seen + 4 * self.tokens / self.sizes.itemsize if self.by_all_to_all else self.seen
        rows = self.rows.held * max(self.sizes.embed_dim + self.sizes.inward * self.sizes.width,
                                    (2 * self.sizes.inward + 1) * self.sizes.width)
        return self.weight_grad_bytes + self.sizes.itemsize * (
            rows + tokens * self.sizes.embed_dim + self.sizes.weights)

    @property
    def weights_bytes(self) -> float:
        """Return the peak bytes while weight gradients are computed.

        With further rounds, memory holds the sums over rounds, one summand and the next round's operands. Without
        further rounds, memory holds the operands of the remaining products.
        """
        if not self.sizes.trained:
            return 0.0
        if not self.further:
            last = self.sizes.itemsize * (self.seen * self.sizes.embed_dim + self.rows.held
                                          * self.sizes.width) + 4 * self.sizes.weights
            return max(self.weight_grad_bytes + 4 * self.sizes.matrix, last)
        return 4 * (self.sizes.weights
                    + self.sizes.matrix) + self.weight_grad_bytes + self.sizes.itemsize * self.sizes.weights

    def hbm_bytes(self, outer: bool) -> float:
        """Return the HBM bytes of the rows times one matrix of each expert. outer: whether the product
        is the matrices' gradient, which is float32."""
        sizes = self.sizes
        itemsize = 4 if outer else sizes.itemsize
        return sizes.itemsize * self.rows.executed * (sizes.embed_dim + sizes.width) + itemsize * sizes.matrix

    def elementwise_bytes(self) -> tuple[float, float]:
        """Return the HBM bytes of work other than the products (forward, backward). Rows are summed to tokens, stored
        weights are cast, and weight gradients of further rounds are added. Read off programs compiled for H100 and
        H200."""
        summed = self.sizes.itemsize * (self.rows.held + self.seen) * self.sizes.embed_dim
        cast = 0 if self.split else (4 + self.sizes.itemsize) * self.sizes.weights / self.gathered
        sums = 20 * self.sizes.weights * self.sizes.trained if self.further and self.split else 0
        return summed + cast, summed + cast + sums


def count(placed: Placed, options: Options) -> Routed:
    """Return the experts of one layer on one device and their tokens. The model must have experts."""
    cfg, layout = placed.cfg, placed.layout
    region, K = ManualRegion.of(layout), cfg.experts_per_token
    by_all_to_all = experts.dispatch(options.dispatch, K, layout).value == "all_to_all"
    tokens, num_shards = placed.tokens(options) / placed.stream_shards, layout.num_shards(region.experts)
    local_experts, block = cfg.num_experts / num_shards, tiles.GROUPED[placed.itemsize].rows
    seen: float
    rows: float
    if by_all_to_all:
        rows = seen = num_shards * math.ceil(all_to_all.CAPACITY_FACTOR * tokens * K / num_shards)
        even, choices, further = tokens * K, 1, True
    else:
        seen, choices = tokens * layout.num_shards(region.gathered), K
        even, most = seen * K / num_shards, seen * min(K, local_experts)
        rows = min(most, math.ceil(dispatch.CAPACITY_FACTOR * even))
        further = rows < most
    counts = RowCounts(even, (math.ceil(rows / block) + local_experts) * block,
                       grouped.count_executed_rows(even, local_experts, block))
    num_stages = placed.mesh.sizes["stage"]
    return Routed(by_all_to_all, region, tokens, seen, choices, counts, sizes(placed, region),
                  further, num_stages > 1, weight_shards(placed), experts.saves_inward(options.remat, num_stages),
                  pattern.share(cfg, mlps="e"))


def sizes(placed: Placed, region: ManualRegion) -> ExpertSizes:
    """Return the sizes of a device's experts."""
    cfg, num_shards = placed.cfg, placed.layout.num_shards
    rows = [info for info in placed.rows if "expert" in info.axes]
    up, adapters = (sum(info.size for info in rows if name in info.path) for name in ("up", LORA))
    return ExpertSizes(cfg.num_experts / num_shards(region.experts), cfg.embed_dim,
                       cfg.expert_mlp_dim / num_shards(region.inner), 1 + cfg.gated,
                       all(info.trainable for info in rows), placed.itemsize, adapters / max(up, 1))


def weight_shards(placed: Placed) -> int:
    """Return the number of shards over which a layer gathers its experts' weights."""
    if not placed.moving(GATHER, "experts"):
        return 1
    return placed.layout.num_shards(placed.layout.mesh_axes("params", "expert_embed"))
