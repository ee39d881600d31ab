"""The experts of one layer for a microbatch on one device, in closed formulas: rows, what is sent for them, what they
hold.

All experts are taken to be equally busy. What `parallel.experts.dispatch` and `parallel.experts.all_to_all` do with any
choices is read off them here for even ones: the buffers are as large, and no further round follows the first.
"""
from __future__ import annotations

import dataclasses
import math

from meshtrain.cost.formulas.placed import GATHER, Options, Placed
from meshtrain.kernels import grouped, tiles
from meshtrain.names import AXES
from meshtrain.parallel.experts import all_to_all, dispatch


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """A device's experts of one layer: how many, of which width there; inward: matrices beside `down`; trained: whether
    they have gradients."""
    num_experts: float
    embed_dim: int
    width: float
    inward: int
    trained: bool
    itemsize: int

    @property
    def matrix(self) -> float:
        """Elements of one matrix of each expert."""
        return self.num_experts * self.embed_dim * self.width

    @property
    def weights(self) -> float:
        """Of all of them."""
        return (self.inward + 1) * self.matrix


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """Rows of a device's experts: where experts are equally busy; that the buffer has; that the kernels multiply."""
    even: float
    held: float
    executed: float


@dataclasses.dataclass(frozen=True)
class Routed:
    """tokens: of this device. seen: those, or single choices, that are brought here, `choices` of each. further:
    whether more rounds may follow. split: whether a pipeline runs weights' gradients in W. gathered: over how many
    shards weights are gathered. saves_inward: see `dispatch`. share: of the layers that have experts."""
    by_all_to_all: bool
    region: dispatch.ManualRegion
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
    def products(self) -> tuple[int, int, int]:
        """Of the rows with one matrix each: forward, backward for the inputs, where the inward ones that are not kept
        are made again, and for weights."""
        return self.sizes.inward + 1, (1 if self.saves_inward else
                                       2) * self.sizes.inward + 1, (self.sizes.inward + 1) * self.sizes.trained

    @property
    def saved_bytes(self) -> float:
        """What waits for a layer's backward."""
        return (self.sizes.itemsize * self.sizes.inward * self.rows.held * self.sizes.width
                * self.saves_inward * self.share)

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(those over which tokens are brought together or exchanged, those over which sums are added up)."""
        ordered = lambda axes: tuple(a for a in AXES if a in axes)
        return ordered(self.region.experts if self.by_all_to_all else self.region.gathered), ordered(self.region.summed)

    @property
    def round_bytes(self) -> float:
        """Tokens and rows of a round that weights' gradients are made of."""
        return self.sizes.itemsize * (2 * self.seen * self.sizes.embed_dim + self.rows.held
                                      * (self.sizes.inward + 1) * self.sizes.width)

    @property
    def beside_width(self) -> float:
        """Of a round, beside what it passes on: its rows' gradient, or what the inward matrices gave, beside its
        gradient."""
        return max(self.sizes.embed_dim, self.sizes.inward * self.sizes.width)

    @property
    def weight_grad_bytes(self) -> float:
        """Bytes of the operands of weights' gradients (`dispatch.WeightGradOperands`): tokens, rows, and where B and W
        are split the sums of further rounds."""
        return self.sizes.trained * (self.round_bytes + (4 * self.sizes.weights if self.further and self.split else 0))

    @property
    def staged_bytes(self) -> float:
        """That live at most in a layer's B of a pipeline: a further round with what weights' gradients of it are made
        of, added to the sums that the first one passes on; beside them the zeros, of either shape, that a tick without
        work adds instead."""
        if not self.further:
            widths = self.beside_width + (self.sizes.inward + 1) * self.sizes.width
            of_round = self.rows.held * widths + 3 * self.seen * self.sizes.embed_dim + self.sizes.weights
            return max(self.sizes.itemsize * of_round,
                       self.weight_grad_bytes + 4 * self.sizes.weights * self.sizes.trained)
        sums = (self.round_bytes + 12 * self.sizes.matrix) * self.sizes.trained
        return self.weight_grad_bytes + sums + self.sizes.itemsize * (
            self.sizes.weights + 2 * self.seen * self.sizes.embed_dim)

    @property
    def inputs_bytes(self) -> float:
        """That live at most while inputs have their gradients made. What the first round passes on waits for weights'
        gradients; beside it stands the next round, with the tokens that are brought together or sent, and the sum of
        their gradients; if there is none the rows' gradient."""
        if not self.further:
            return self.weight_grad_bytes + self.sizes.itemsize * (
                self.rows.held * self.beside_width + self.sizes.inward * self.sizes.matrix)
        # Each round of those sent has its own; their sum is in float32.
        tokens = 2 * self.seen + 4 * self.tokens / self.sizes.itemsize if self.by_all_to_all else self.seen
        rows = self.rows.held * max(self.sizes.embed_dim + self.sizes.inward * self.sizes.width,
                                    (2 * self.sizes.inward + 1) * self.sizes.width)
        return self.weight_grad_bytes + self.sizes.itemsize * (
            rows + tokens * self.sizes.embed_dim + self.sizes.weights)

    @property
    def weights_bytes(self) -> float:
        """That live at most while weights have theirs: the sums over rounds and what is added to one of them, and all
        that the next round is made of; if there is none, the rows of the products that are left."""
        if not self.sizes.trained:
            return 0.0
        if not self.further:
            last = self.sizes.itemsize * (self.seen * self.sizes.embed_dim + self.rows.held
                                          * self.sizes.width) + 4 * self.sizes.weights
            return max(self.weight_grad_bytes + 4 * self.sizes.matrix, last)
        return 4 * (self.sizes.weights
                    + self.sizes.matrix) + self.weight_grad_bytes + self.sizes.itemsize * self.sizes.weights

    def elementwise_bytes(self) -> tuple[float, float]:
        """What moves through memory beside the products, forward and backward: rows summed to their tokens again,
        stored weights cast; apart, of weights' gradients the sums of rounds. Read off programs compiled for H100 and
        H200."""
        summed = self.sizes.itemsize * (self.rows.held + self.seen) * self.sizes.embed_dim
        cast = 0 if self.split else (4 + self.sizes.itemsize) * self.sizes.weights / self.gathered
        sums = 20 * self.sizes.weights * self.sizes.trained if self.further and self.split else 0
        return summed + cast, summed + cast + sums


def of(placed: Placed, options: Options) -> Routed | None:
    """None where the model has no experts."""
    cfg, layout = placed.cfg, placed.layout
    if not cfg.num_experts:
        return None
    region, K = dispatch.ManualRegion.of(layout), cfg.experts_per_token
    by_all_to_all = dispatch.dispatch(options.dispatch, K, layout)[0] == "all_to_all"
    tokens, num_shards = placed.tokens(options) / placed.stream_shards, layout.num_shards(region.experts)
    e, block = cfg.num_experts / num_shards, tiles.GROUPED[placed.itemsize].rows
    if by_all_to_all:
        seen = most = num_shards * math.ceil(all_to_all.CAPACITY_FACTOR * tokens * K / num_shards)
        even, rows, choices = tokens * K, most, 1
    else:
        seen, choices = tokens * layout.num_shards(region.gathered), K
        even, most = seen * K / num_shards, seen * min(K, e)
        rows = min(most, math.ceil(dispatch.CAPACITY_FACTOR * even))
    inward = 1 if cfg.activation == "gelu" else 2
    trained = all(info.trainable for info in placed.rows if "expert" in info.axes)
    sizes = ExpertSizes(e, cfg.embed_dim, cfg.expert_mlp_dim / layout.num_shards(region.inner), inward, trained,
                        placed.itemsize)
    counts = RowCounts(even, (math.ceil(rows / block) + e) * block, grouped.executed_rows(even, e, block))
    gathered = layout.num_shards(layout.mesh_axes("params", "expert_embed"))
    return Routed(by_all_to_all, region, tokens, seen, choices, counts, sizes, by_all_to_all or rows < most,
                  placed.mesh.sizes["stage"] > 1, gathered if placed.moving(GATHER, "experts") else 1,
                  dispatch.saves_inward(options.remat, placed.mesh.sizes["stage"]),
                  1 - cfg.first_dense_layers / cfg.num_layers)
