"""A model under a layout, as the formulas read it: sizes on one device, and the weights and gradients that move over
each mesh axis. `place` makes it.

`traffic`, `footprint` and `price` turn the sizes into bytes and seconds.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import mixers, routed
from meshtrain.cost.formulas.mixer_cost import MixerCost
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.sizes import GATHER, Axes, Held, LayerSizes, Product, WeightMove
from meshtrain.model import parts
from meshtrain.model.params import ParamInfo
from meshtrain.names import LAYERS, LEADING
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout
from meshtrain.training import accumulators


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """Fractions of a layer's forward that its backward repeats: products, attention with recurrences, elementwise work,
    and gathers before products."""
    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    gathers: float = 0.0


# by remat
RECOMPUTED = {"none": Recomputed(), "selective": Recomputed(elementwise=0.6, gathers=1.0),
              "full": Recomputed(1.0, 1.0, 1.0, 1.0), "offload": Recomputed(1.0, 1.0, 1.0, 1.0)}


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A model under a layout: sizes on one device, and the weights and gradients that move.

    leading: in a pipeline, the layers before the stages, as a model of their own; None without such layers. If it is
    set, rows, cfg and layer describe only the other layers, while held and the moves of the update cover both. The
    stages share the microbatches of the leading layers. is_leading: whether this object is such a leading model.

    depths: the depths of MTP that a step computes, as a model of their own; None without depths. held and the moves of
    the update cover the depths, too. is_depths: whether this object is such a model.
    """
    cfg: Model                  # the [model] section
    rows: Sequence[ParamInfo]   # the parameter table
    layout: Layout
    mesh: MeshSpec
    layer: LayerSizes
    head: Product
    held: Held
    moves: tuple[WeightMove, ...]
    leading: Placed | None = None
    is_leading: bool = False
    depths: Placed | None = None
    is_depths: bool = False

    def moving(self, kind: str, part: str) -> dict[Axes, float]:
        """Return the elements of the moves of this kind and part, by mesh axes."""
        return {move.axes: move.elements for move in self.moves if (move.kind, move.part) == (kind, part)}

    @property
    def by_layer(self) -> bool:
        """Whether each layer gathers its own weights."""
        return any(move.kind == GATHER and move.part in ("layers", "experts") for move in self.moves)

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of activations and gathered weights."""
        return compute_itemsize(self.cfg)

    @property
    def reduction_dtype(self) -> tuple[str, int]:
        """Return the dtype in which gradients are reduced, as HLO spells it, and its bytes."""
        wide = self.layout.rules.reduce == str(accumulators.DTYPE)
        return (accumulators.HLO_DTYPE, accumulators.ITEMSIZE) if wide else ("bf16", 2)

    @property
    def float8(self) -> bool:
        """Whether the layers' projections multiply in a narrow dtype. Their inputs are then gathered in float8, each
        with a scale."""
        return self.matmul_dtype != self.cfg.compute_dtype

    @property
    def matmul_dtype(self) -> str:
        """Return the dtype in which the layers' projections are multiplied."""
        return "float8" if self.cfg.matmul_dtype == "float8" else self.cfg.compute_dtype

    @property
    def experts_dtype(self) -> str:
        """Return the dtype in which experts are multiplied, which is never a narrow one."""
        return self.cfg.compute_dtype

    @property
    def router_parts(self) -> int:
        """Return the number of matmuls in compute_dtype that one router matmul takes: three for a bfloat16 model
        (`kernels.products`)."""
        return 1 if self.cfg.compute_dtype == "float32" else 3

    @property
    def dtype(self) -> str:
        """Return the dtype of activations and gathered weights in HLO's spelling."""
        return "bf16" if self.itemsize == 2 else "f32"

    @functools.cached_property
    def matrices(self) -> float:
        """Return the number of matrices of a layer without its experts, mean over layers. Each matrix has its own
        collective."""
        return sum(info.shape[0] for info in self.rows if info.role == "matrix" and info.axes[0] in (LAYERS, LEADING)
                   and "expert" not in info.axes) / self.cfg.num_layers

    def tokens(self, options: Options) -> float:
        """Return the tokens of a microbatch on one device. A device of a sharded sequence counts its shard."""
        return options.global_batch * options.seq_len / options.microbatches / self._token_shards

    @functools.cached_property
    def _token_shards(self) -> int:
        return self.layout.num_shards(self.layout.token_axes)

    def layers(self, options: Options) -> float:
        """Return the number of layers that a stage computes for a microbatch."""
        if self.is_leading:
            return self.rounds(options) * self.cfg.num_layers / options.microbatches
        num_stages = self.layout.sizes["stage"]
        if num_stages == 1 or self.is_depths:
            return float(self.cfg.num_layers)
        # Stages are padded with layers that cost the same and do nothing.
        return pattern.count_padded(self.cfg, num_stages * options.chunks) // num_stages

    @property
    def has_backward(self) -> bool:
        """Whether a step trains the model. A teacher has only a forward."""
        return self.is_leading or self.is_depths or self.held.trained > 0

    def visits(self, options: Options) -> tuple[float, float, float]:
        """Return the passes through a layer in a step: (forward, backward for inputs, backward for weights).

        In a pipeline an idle stage computes on masked data. The numbers include these passes.
        """
        layers = self.layers(options)
        if not self.has_backward:
            return options.microbatches * layers, 0.0, 0.0
        if not self.runs_masked(options) or self.is_leading or self.is_depths:
            return (options.microbatches * layers,) * 3
        num_stages, depth = self.layout.sizes["stage"], layers / options.chunks
        executed, _ = schedules.counts(options.schedule, num_stages, options.microbatches, options.chunks)
        return depth * executed["F"], depth * executed["B"], depth * (executed["W"] or executed["B"])

    def rounds(self, options: Options) -> int:
        """Return how often a step runs the leading layers on one stage."""
        return -(-options.microbatches // self.layout.sizes["stage"])

    @property
    def num_depths(self) -> int:
        """Return the number of depths of MTP that a step computes."""
        return self.depths.cfg.num_layers if self.depths else 0

    def ends(self, options: Options) -> tuple[int, int, int]:
        """Return how often a step computes (the embedding, the loss with its gradient, the embedding's gradient). Each
        depth of MTP computes all three with the loss."""
        if self.is_leading or self.is_depths:
            return 0, 0, 0
        embedded, losses, back = self.boundaries(options)
        if self.leading:
            embedded = back = self.rounds(options) * self.layout.sizes["stage"]
        more = self.num_depths * losses
        return embedded + more, losses + more, back + more

    def boundaries(self, options: Options) -> tuple[int, int, int]:
        """Return how often a step computes (the first stage's input, the loss, the cotangent of that input). The masked
        ticks of a pipeline are included."""
        m, p = options.microbatches, self.layout.sizes["stage"]
        if not self.runs_masked(options):
            return m, m, m
        embedded, back = schedules.ends_executed(options.schedule, p, m, options.chunks)
        return embedded, m, back

    def runs_masked(self, options: Options) -> bool:
        """Whether all stages compute in every tick of the schedule."""
        return self.layout.sizes["stage"] > 1 and options.schedule != ""

    def recomputation(self, options: Options) -> Recomputed:
        """Return what the backward of a layer repeats of its forward. Context parallelism never recomputes
        attention."""
        recomputed = RECOMPUTED[options.remat]
        return dataclasses.replace(recomputed, attention=0.0) if self.num_shards("seq") > 1 else recomputed

    def row_parts(self, options: Options) -> int:
        """Return the number of parts into which a layer without experts cuts a microbatch (`model.parts`)."""
        if options.remat == "none" and self.by_layer:
            return 1
        rows = options.global_batch // options.microbatches
        return parts.of_rows(self.layout, (rows, options.seq_len), self.cfg.compute_dtype)[1]

    def route(self, options: Options) -> routed.Routed | None:
        """Return the experts of one layer and their tokens, or None if the model has no experts."""
        return routed.count(self, options) if self.cfg.num_experts else None

    def num_shards(self, axis: str) -> int:
        """Return the number of devices that shard an activation's dim. axis: the dim's logical axis."""
        if axis not in self._num_shards:
            self._num_shards[axis] = self.layout.num_shards(self.layout.mesh_axes("activations", axis))
        return self._num_shards[axis]

    @functools.cached_property
    def _num_shards(self) -> dict[str, int]:
        return {}

    @functools.cached_property
    def footprints(self) -> dict[tuple, tuple[float, float]]:
        """What `footprint` has computed for this layout, by function and by the options that it reads."""
        return {}

    @functools.cached_property
    def stream_shards(self) -> int:
        """Return the number of devices that shard the residual stream by sequence parallelism. Context parallelism is
        not counted."""
        return stream_shards(self.layout)

    def input_columns(self, product: Product) -> float:
        """Return the columns of a product that its input's gradient sums over, per token of a whole sequence."""
        return product.n - product.on_shards * (1 - 1 / self.stream_shards)

    @functools.cached_property
    def mixers(self) -> tuple[MixerCost, ...]:
        """Return the kinds of mixers that the layers use."""
        return mixers.of(self.cfg, self.layout)

    def mean(self, of: Callable[[MixerCost], float]) -> float:
        """Return the mean over layers of `of(mixer)`. Layers without a mixer count 0."""
        return sum(mixer.share * of(mixer) for mixer in self.mixers)

    @functools.cached_property
    def mlp_width(self) -> float:
        """Return the width of the MLP's hidden activations on one device without routed experts, mean over layers."""
        of = functools.partial(pattern.share, self.cfg)
        return (of(mlps="d") * self.cfg.mlp_dim + of(mlps="e") * self.cfg.shared_expert_dim) / self.num_shards("mlp")

    @functools.cached_property
    def blocks(self) -> float:
        """Return the number of mixers and MLPs that a layer adds to the residual stream, mean over layers."""
        return 2 - pattern.share(self.cfg, mixers=".") - pattern.share(self.cfg, mlps=".")


def compute_itemsize(cfg: Model) -> int:
    """Return the bytes of an element in the compute dtype."""
    return 2 if cfg.compute_dtype == "bfloat16" else 4


def stream_shards(layout: Layout) -> int:
    """Return the number of devices that shard the residual stream by sequence parallelism."""
    return layout.num_shards(stream_axes(layout))


def stream_axes(layout: Layout) -> Axes:
    """Return the mesh axes that shard the residual stream by sequence parallelism."""
    context = layout.mesh_axes("activations", "seq")
    return tuple(a for a in layout.mesh_axes("activations", "residual_seq") if a not in context)
