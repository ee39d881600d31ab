"""Describes a model under a layout for the formulas: array sizes on one device, and the weights and gradients that move
over each mesh axis.

The parameter table gives the arrays, and the rules give their sharding. Nothing here depends on the batch. `traffic`,
`footprint` and `price` turn the sizes into bytes and seconds.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from meshtrain import pattern
from meshtrain.config.sections import Model, Run
from meshtrain.cost.formulas import mixers
from meshtrain.model import layers
from meshtrain.names import AXES, LAYERS, LEADING, LORA, MATMUL_ROLES
from meshtrain.parallel.context import recurrence
from meshtrain.parallel.pipeline import schedules, stages
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import GATHERED, Layout

Axes = tuple[str, ...]
GATHER, SCATTER, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"


@dataclasses.dataclass(frozen=True)
class Framework:
    """Describes how another framework runs a step, to price its published runs.

    Each of its pipeline stages runs a program of its own, with the head on the last stage. It reduces gradients in
    buckets, overlapped with the backward.

    recomputed: fractions of a layer's forward matmuls, attention and elementwise work that the backward recomputes.
    eager: elementwise work is not fused. grad_bytes: bytes of a gradient element in a reduction. narrow: dtype of the
    products of layers and experts if it is not compute_dtype: float8 (one scale per tensor) or mxfp8 (one scale per 32
    elements); [model] supports neither mxfp8 nor narrow experts. copies: how often a token is sent if it is sent once
    to each device or host that holds its experts; 0 means once to each expert. spreads_head: the stages have unequal
    numbers of layers, so the head's time is shared by all stages.
    """
    recomputed: tuple[float, float, float]
    eager: bool = False
    grad_bytes: int = 4
    narrow: str = ""
    copies: float = 0.0
    spreads_head: bool = False


@dataclasses.dataclass(frozen=True)
class Attended:
    """The work of a run's attention.

    visited: pairs that kernels visit as a fraction of the causal half, by mixer; mixers that are not listed have 1.
    engine: the attention engine, by its name in `assumptions`. documents: whether pairs across documents are skipped.
    """
    visited: Mapping[str, float]
    engine: str
    documents: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of a step other than the layout. schedule: the pipeline schedule; "" without stages."""
    seq_len: int
    global_batch: int
    microbatches: int = 1
    remat: str = "none"
    schedule: str = ""
    chunks: int = 1
    method: str = "ring"
    attended: Attended = dataclasses.field(default_factory=lambda: Attended({}, "cudnn"))
    loss_chunk: int = 2048
    optimizer_bytes: float = 8  # optimizer state per parameter
    dispatch: str = "auto"      # how tokens reach their experts
    recurrence: str = "xla"     # engine of recurrences: xla, pallas

    @classmethod
    def of(cls, run: Run, gpu: str = "", **more) -> Options:
        """Return the options of a run file. gpu: the GPU's name in the hardware table, which determines the engine of
        recurrences."""
        return cls(run.data.seq_len, run.data.global_batch, run.training.microbatches, run.training.remat,
                   method=run.context.method, loss_chunk=run.training.loss_chunk, dispatch=run.experts.dispatch,
                   recurrence=recurrence.engine_name(run, gpu), **more)


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrices of one layer, or the head, that multiply the same input: [tokens, k] × [k, n], in sizes of one device.
    The products of experts are in `routed`.

    row: mesh axes that shard k; the result is summed over them. outward: the result is added to the residual stream.
    unread: fraction of these layers whose backward does not read the result. trained: the matrices have gradients.
    share: fraction of the layers that have them. router: computed in float32, on tokens sharded as the residual stream.
    expands: attention expands latents with these matrices, in the forward and again in the backward. whole_inputs: the
    cotangent of the mixer's input is not sharded, because the mixer's inward matrices are not.
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


@dataclasses.dataclass(frozen=True)
class WeightMove:
    """Elements of weights or gradients in one collective over `axes`.

    kind: the collective, as HLO spells it. part: "layers", "experts" or "routers": elements of one layer, moved in each
    pass through it. "ends": elements of embedding and head, moved in each microbatch. "update": elements moved once a
    step: gradients that [grads] does not shard, and new weights. "lookup": number of tables whose rows are exchanged
    with every token (all-to-all), or whose cotangents are gathered (all-gather).
    """
    kind: str
    part: str
    axes: Axes
    elements: float


@dataclasses.dataclass(frozen=True)
class Held:
    """Numbers of elements of parameters on one device, or of bytes where a field's name or text says so.

    stored: sharded as [optimizer]; updated: the trained ones among them; layers_stored: those of layers. layers_read:
    elements of layers, sharded as [params]. grads: gradient accumulators of all parameters; ends_grads: those of
    embedding and head. transposed: bytes of weights that XLA transposes because they are not gathered along their first
    dim. used: elements that the matmuls of a stage, embedding and head read; trained: the trained ones among them;
    cast: those that microbatches read from a copy in the compute dtype. moved: bytes of the copy that [params] shards
    differently from [optimizer].
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
        """Return the sum of these and the leading layers' numbers. layers_stored and layers_read remain those of the
        stages."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A model under a layout: sizes on one device, and the weights and gradients that move.

    leading: in this project's pipelines, the layers before the stages, as a model of their own; None without such
    layers. If it is set, rows, cfg and layer describe only the other layers, while held and the moves of the update
    cover both. The stages share the microbatches of the leading layers. is_leading: whether this object is such a
    leading model.
    """
    cfg: Model                  # the [model] section
    rows: list                  # the parameter table
    layout: Layout
    mesh: MeshSpec
    layer: LayerSizes
    head: Product
    held: Held
    moves: tuple[WeightMove, ...]
    leading: Placed | None = None
    is_leading: bool = False
    framework: Framework | None = None      # None: this project

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
        return 2 if self.cfg.compute_dtype == "bfloat16" else 4

    @property
    def float8(self) -> bool:
        """Whether the layers' projections multiply in a narrow dtype. Their inputs are then gathered in float8, each
        with a scale."""
        return self.matmul_dtype != self.cfg.compute_dtype

    @property
    def matmul_dtype(self) -> str:
        """Return the dtype in which the layers' projections are multiplied."""
        if self.framework and self.framework.narrow:
            return self.framework.narrow
        return "float8" if self.cfg.matmul_dtype == "float8" else self.cfg.compute_dtype

    @property
    def experts_dtype(self) -> str:
        """Return the dtype in which experts are multiplied. This project's experts are never in a narrow dtype."""
        return self.matmul_dtype if self.framework else self.cfg.compute_dtype

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
        return options.global_batch * options.seq_len / options.microbatches / self.layout.num_shards(
            self.layout.token_axes)

    def layers(self, options: Options) -> float:
        """Return the number of layers that a stage computes for a microbatch."""
        if self.is_leading:
            return self.rounds(options) * self.cfg.num_layers / options.microbatches
        num_stages = self.layout.sizes["stage"]
        if num_stages == 1 or self.framework:
            return self.cfg.num_layers / num_stages
        # Our stages are padded with layers that cost the same and do nothing.
        return stages.padded(self.cfg, num_stages * options.chunks) // num_stages

    def visits(self, options: Options) -> tuple[float, float, float]:
        """Return the passes through a layer in a step: (forward, backward for inputs, backward for weights).

        In this project's pipelines an idle stage computes on masked data. The numbers include these passes.
        """
        layers = self.layers(options)
        if not self.masked(options) or self.is_leading:
            return (options.microbatches * layers,) * 3
        num_stages, depth = self.layout.sizes["stage"], layers / options.chunks
        executed, _ = schedules.counts(options.schedule, num_stages, options.microbatches, options.chunks)
        return depth * executed["F"], depth * executed["B"], depth * (executed["W"] or executed["B"])

    def rounds(self, options: Options) -> int:
        """Return how often a step runs the leading layers on one stage."""
        return -(-options.microbatches // self.layout.sizes["stage"])

    def ends(self, options: Options) -> tuple[int, int, int]:
        """Return how often a step computes (the embedding, the loss with its gradient, the embedding's gradient)."""
        if self.is_leading:
            return 0, 0, 0
        boundaries = self.boundaries(options)
        all_rounds = self.rounds(options) * self.layout.sizes["stage"]
        return (all_rounds, boundaries[1], all_rounds) if self.leading else boundaries

    def boundaries(self, options: Options) -> tuple[int, int, int]:
        """Return how often a step computes (the first stage's input, the loss, the cotangent of that input). The masked
        ticks of this project's pipelines are included."""
        m, p = options.microbatches, self.layout.sizes["stage"]
        if not self.masked(options):
            return m, m, m
        embedded, back = schedules.ends_executed(options.schedule, p, m, options.chunks)
        return embedded, m, back

    def masked(self, options: Options) -> bool:
        """Whether all stages compute in every tick of the schedule."""
        return not self.framework and self.layout.sizes["stage"] > 1 and options.schedule != ""

    def num_shards(self, axis: str) -> int:
        """Return the number of devices that shard an activation's dim. axis: the dim's logical axis."""
        if axis not in self._num_shards:
            self._num_shards[axis] = self.layout.num_shards(self.layout.mesh_axes("activations", axis))
        return self._num_shards[axis]

    @functools.cached_property
    def _num_shards(self) -> dict[str, int]:
        return {}

    @functools.cached_property
    def stream_shards(self) -> int:
        """Return the number of devices that shard the residual stream by sequence parallelism. Context parallelism is
        not counted."""
        return _stream_shards(self.layout)

    @functools.cached_property
    def mixers(self) -> tuple[mixers.Mixer, ...]:
        """Return the kinds of mixers that the layers use."""
        return mixers.of(self.cfg, self.layout)

    def mean(self, of: Callable[[mixers.Mixer], float]) -> float:
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


def _stream_shards(layout: Layout) -> int:
    context = layout.mesh_axes("activations", "seq")
    return layout.num_shards(a for a in layout.mesh_axes("activations", "residual_seq") if a not in context)


def place(rows, cfg: Model, layout: Layout, mesh: MeshSpec) -> Placed:
    """Return the sizes and moves of a model under a layout.

    rows: the parameter table (ParamInfo); cfg: the [model] section; the layout's sizes must be those of the mesh.
    """
    first = pattern.leading(cfg)
    if layout.sizes["stage"] == 1 or not first:
        return _place(rows, cfg, layout, mesh)
    split = {wanted: [info for info in rows if (info.axes[0] == LEADING) == wanted] for wanted in (True, False)}
    leading = _place(split[True], _cut(cfg, slice(first)), layout, mesh, is_leading=True)
    staged = _place(split[False], _cut(cfg, slice(first, None)), layout, mesh)
    update = Counter()
    for move in (*staged.moves, *leading.moves):
        if move.part == "update":
            update[move.kind, move.part, move.axes] += move.elements
    moves = (*(move for move in staged.moves if move.part != "update"),
             *(WeightMove(*key, n) for key, n in update.items()))
    return dataclasses.replace(staged, leading=leading, held=staged.held.with_leading(leading.held), moves=moves)


def _cut(cfg: Model, part: slice):
    """Return the [model] section for a part of the layers."""
    kinds = pattern.kinds(cfg)[part]
    mixers, mlps = ("".join(letters) for letters in zip(*kinds))
    without = {} if "e" in mlps else dict(num_experts=0, shared_expert_dim=0)
    return cfg.model_copy(update=dict(num_layers=len(kinds), mixers=mixers, mlps=mlps) | without)


def _place(rows, cfg: Model, layout: Layout, mesh: MeshSpec, is_leading: bool = False) -> Placed:
    """Return the sizes and moves of layers of one kind of placement. is_leading: these layers run before the stages,
    and their gradients are summed over the stages."""
    local, tokens = _Local(layout), frozenset(layout.token_axes) | ({"stage"} if is_leading else set())
    travel, held, used, largest = defaultdict(float), Counter(), 0.0, 0.0
    num_stages, head, matrices = layout.sizes["stage"], Product(0, 0), _Matrices(cfg, rows, local)
    stage_layers = stages.padded(cfg, num_stages) // num_stages if num_stages > 1 and not is_leading else cfg.num_layers
    once = tokens if num_stages > 1 else frozenset(layout.deferred_axes(info.axes for info in rows))
    # Adapters first: the last product of a layer must not be one of theirs.
    for info in sorted(rows, key=lambda info: LORA not in info.path):
        in_use, by_table = local.axes(info)
        depth = stage_layers if info.axes[0] in (LAYERS, LEADING) else 0
        whole = info.size / layout.num_shards(in_use)
        # In the loop a stage has only its own layers, even if the rules cannot shard the stack.
        if depth and num_stages > 1:
            whole = info.size / cfg.num_layers * depth / layout.num_shards(in_use - {"stage"})
        held.update(_held(info, cfg, layout, by_table, in_use, whole, depth))
        if depth:
            used, largest = used + whole / depth, max(largest, whole / depth * cfg.num_layers / info.shape[0])
        if num_stages > 1:              # the loop has unsharded weights and gradients, exchanged once a step
            by_table |= {"params": in_use, "grads": in_use}
        uses = 1
        if info.role == "embedding":
            columns = layers.lies_by_columns(layout, info.axes)
            uses = (not columns) + (cfg.tie_embeddings and info.axes[0] == "vocab")
            travel[EXCHANGE, "lookup", ordered(by_table["params"])] += columns * (1 + info.trainable)
        beyond = {table: axes - in_use for table, axes in by_table.items()}
        for key, n in _moves(layout, info, beyond, whole, depth, uses, tokens - by_table["grads"] - in_use, once):
            travel[key] += n
        if info.role in ("matrix", "router") and "expert" not in info.axes or info.path[-1] == OUTPUT_BIASES:
            matrices.add(info)
        elif info.axes[-2:] in (("embed", "vocab"), ("vocab", "embed")) and (info.role == "head" or cfg.tie_embeddings):
            num_shards = layout.num_shards(local.uses("vocab"))
            head = Product(cfg.embed_dim, info.size // cfg.embed_dim // num_shards, trained=info.trainable)
    moves = tuple(WeightMove(*key, n) for key, n in travel.items() if key[-1] and n)
    layer = LayerSizes(tuple(matrices.products.values()), used, largest, stage_layers)
    return Placed(cfg, rows, layout, mesh, layer, head, Held(**held), moves, is_leading=is_leading)


def _held(info, cfg: Model, layout: Layout, by_table, in_use: frozenset, whole: float, depth: int) -> dict[str, float]:
    """Return what one parameter adds to the fields of `Held`. in_use: mesh axes that shard the gathered copy; depth:
    number of layers on the device, 0 for embedding and head."""
    stored = info.size / layout.num_shards(by_table["optimizer"])
    grads, read = (info.size / layout.num_shards(by_table[table]) for table in ("grads", "params"))
    elsewhere = by_table["params"] != by_table["optimizer"]
    size = 2 if info.role in MATMUL_ROLES and cfg.compute_dtype == "bfloat16" else info.dtype.itemsize
    found = {"stored": stored, "stored_bytes": stored * info.dtype.itemsize, "updated": info.trainable * stored,
             "grads": info.trainable * grads, "used": whole, "trained": info.trainable * whole,
             "moved": elsewhere * read * size}
    if elsewhere or info.role in MATMUL_ROLES and str(info.dtype) != cfg.compute_dtype:
        found["cast"] = whole
    if not depth:
        return found | {"ends_grads": info.trainable * grads}
    gathered = "expert" in info.axes and bool(by_table["params"] - in_use)
    outer = info.shape[1] // layout.num_shards(layout.mesh_axes(GATHERED, "expert")) > 1
    if info.role == "matrix" and (info.axes[-1] == "embed" or gathered and (outer or info.axes[-1] == "expert_embed")):
        found["transposed"] = stored * info.dtype.itemsize
    return found | {"layers_read": read, "layers_stored": stored}


def _moves(layout: Layout, info, beyond, whole: float, depth: int, uses: int, late: frozenset,
           once: frozenset) -> Iterator[tuple[tuple[str, str, Axes], float]]:
    """Yield ((kind, part, axes), elements) for the moves of one parameter, see `WeightMove`.

    beyond: for each table, the axes that shard the parameter in the table but not in use. uses: how often embedding and
    head gather it. late: axes that do not shard its gradient but over which the gradient is summed. once: axes whose
    sums are deferred to the end of the step.
    """
    n, part = (whole / depth, "experts" if "expert" in info.axes else "layers") if depth else (whole, "ends")
    params, grads = beyond["params"], beyond["grads"]
    yield (GATHER, "routers" if info.role == "router" else part, ordered(params)), uses * n
    yield (GATHER, "update", ordered(beyond["optimizer"] - params)), whole / layout.num_shards(params)
    if not info.trainable:
        return
    yield (SCATTER, part, ordered(grads)), uses * n
    into = late & once & beyond["optimizer"]
    yield (SCATTER, "update", ordered(into)), whole / layout.num_shards(grads)
    yield (SUM, "update", ordered((late & once) - into)), whole / layout.num_shards(grads | into)
    if info.role == "embedding" and layout.num_shards(once) > 1 and layout.sizes["stage"] == 1:
        # With manual axes XLA all-gathers the cotangents of looked-up rows, and each device sums all of them.
        yield (GATHER, "lookup", ordered(late - once)), 1
    elif info.role == "embedding":      # XLA sums the gradients of look-ups per device before the all-reduce
        yield (SUM, "update", ordered(late - once)), whole / layout.num_shards(grads)
    else:
        yield (SUM, part, ordered(late - once)), n / layout.num_shards(grads)


class _Local:
    """Computes sizes of parameters on one device. Caches the mesh axes of each logical axis."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.splits = functools.cache(lambda table, axis: frozenset(layout.mesh_axes(table, axis)))
        self.uses = functools.cache(lambda axis: frozenset(layout.mesh_axes(GATHERED, axis)))

    def axes(self, info) -> tuple[frozenset, dict[str, frozenset]]:
        """Return (mesh axes that shard a parameter in use, {table: mesh axes that shard it in that table})."""
        union = lambda of: frozenset().union(*map(of, info.axes))
        tables = ("params", "grads", "optimizer")
        return union(self.uses), {table: union(functools.partial(self.splits, table)) for table in tables}

    def split(self, info, dims) -> Axes:
        """Return the mesh axes that shard these dims of a matrix in use."""
        return ordered(frozenset().union(*(self.uses(info.axes[d]) for d in dims)))

    def size(self, info, dims) -> int:
        """Return the elements of these dims of a matrix on one device, as it is multiplied. Key heads are replicated if
        there are fewer of them than devices."""
        split = lambda d: info.shape[d] // max(1, self.layout.num_shards(self.uses(info.axes[d])))
        heads = lambda d: layers.kv_heads(self.layout, info.shape[d]) // self.layout.num_shards(
            self.layout.mesh_axes("activations", "kv_heads"))
        return math.prod(heads(d) if info.axes[d] == "kv_heads" else split(d) for d in dims)


class _Matrices:
    """The products of a layer. Equal matrices of different layers are one entry, with the fraction of the layers that
    have it. Matrices that multiply the same input are one product."""

    def __init__(self, cfg: Model, rows, local: _Local):
        self.num_layers, self.local, self.products = cfg.num_layers, local, {}
        self.query_latents = bool(cfg.latent.kv_dim and cfg.latent.query_dim)
        self.before_mlps = {_layer(info) for info in rows if _part(info) in ("mlp", "moe")}
        self.count, self.last, self.first = Counter(), Counter(), {}
        for info in rows:
            key = self._key(info)
            self.first.setdefault(key, info.path)
            self.count[key] += info.shape[0]
            gated = cfg.shared_expert_gate and "shared" in info.path
            last = info.axes[-2:] == ("mlp", "embed") and not gated or _layer(info) not in self.before_mlps
            self.last[key] += info.shape[0] * last

    def add(self, info) -> None:
        key = self._key(info)
        if self.first[key] != info.path:
            return
        share, local = self.count[key] / self.num_layers, self.local
        if info.role == "router":
            self.products[key] = Product(*info.shape[-2:], trained=info.trainable, router=True, share=share)
            return
        if info.path[-1] == OUTPUT_BIASES:      # weighted and summed in a product, on tokens sharded as the stream
            n = info.shape[-1] / _stream_shards(local.layout)
            self.products[key] = Product(info.shape[-2], n, unread=1.0, trained=info.trainable, share=share)
            return
        into, out = info.matrix_dims
        axes = tuple(info.axes[d] for d in into)
        same = info.path[:-2], axes, tuple(info.shape[d] for d in into), share
        outward = info.axes[out[-1]] == "embed"
        expands = _part(info) == "attention" and info.path[-2] in ("key", "value") and "kv_heads" not in info.axes
        n = self.products[same].n if same in self.products else 0
        self.products[same] = Product(local.size(info, into), n + local.size(info, out), local.split(info, into),
                                      outward, outward * self.last[key] / self.count[key], info.trainable, share,
                                      expands=expands, whole_inputs=self.query_latents and _part(info) == "attention")

    @staticmethod
    def _key(info):
        return info.path[-3:], info.shape[1:]


MODULES = ("attention", "linear", "mlp", "moe")
OUTPUT_BIASES = "down_bias"     # of experts


def _part(info) -> str:
    """Return the module of a layer that has this parameter; "" for norms, embedding and head."""
    return next((name for name in info.path if name in MODULES), "")


def _layer(info) -> tuple[str, ...]:
    """Return the path of the layers of a period that have this parameter."""
    return info.path[:info.path.index(_part(info))] if _part(info) else info.path


def ordered(axes) -> Axes:
    return tuple(a for a in AXES if a in axes)
