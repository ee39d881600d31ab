"""A model under a layout, as the formulas see it: the sizes on one device, and which arrays travel over which mesh
axes.

What a model is comes from its parameter table, where its tensors lie from the rules; nothing here depends on the batch.
`traffic`, `footprint` and `price` make bytes and seconds of it.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from meshtrain.model import layers
from meshtrain.names import AXES, LAYERS, LEADING, LORA, MATMUL_ROLES
from meshtrain.parallel.pipeline import schedules, stages
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import GATHERED, Layout

Axes = tuple[str, ...]
GATHER, SCATTER, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"


@dataclasses.dataclass(frozen=True)
class Practice:
    """How a framework runs a step; the defaults are this project's.

    recomputed: shares of a layer's forward products, attention and elementwise work that its backward does again; None:
    as training.remat says. shared_head: all stages work on the head; else it stands on the last. grad_bytes: of a
    gradient's element as it is reduced. bucketed: what is reduced and gathered once a step hides behind a microbatch,
    and reductions of a layer behind the next, in buckets; ours wait for the end of the loops that XLA makes.
    """
    recomputed: tuple[float, float, float] | None = None
    eager: bool = False
    user_buffers: bool = False
    shared_head: bool = True
    grad_bytes: int = 4
    bucketed: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """What of a step the layout leaves open. schedule: "" without stages."""
    seq_len: int
    global_batch: int
    microbatches: int = 1
    remat: str = "none"
    schedule: str = ""
    chunks: int = 1
    method: str = "ring"
    visited: float = 1.0        # pairs that attention's kernel visits, as a share of the causal half
    loss_chunk: int = 2048
    optimizer_bytes: float = 8  # of state for each parameter, beside the parameter
    dispatch: str = "auto"      # how tokens reach their experts
    engine: str = "cudnn"       # of attention, as `assumptions` names it

    @classmethod
    def of(cls, run, **more) -> Options:
        """Those of a run file."""
        return cls(run.data.seq_len, run.data.global_batch, run.training.microbatches, run.training.remat,
                   method=run.context.method,
                   loss_chunk=run.training.loss_chunk, dispatch=run.experts.dispatch, **more)


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrices of one layer, or the head, that multiply the same input: [tokens, k] × [k, n] with the sizes one device
    has.

    row: the mesh axes that split k, over which the result is summed. outward: the result is added to the residual
    stream. unread: nothing in the backward reads the result. trained: they have gradients. share: of the layers that
    have them. router: in float32, of tokens as the residual stream has them. Experts are none of them (`routed`).
    """
    k: float
    n: float
    row: Axes = ()
    outward: bool = False
    unread: bool = False
    trained: bool = True
    share: float = 1.0
    router: bool = False


@dataclasses.dataclass(frozen=True)
class WeightMove:
    """Elements of weights or gradients that a device's group over `axes` exchanges together.

    kind: as HLO spells it. part: "layers", "experts", "routers": elements of one layer, for each of its visits; "ends":
    of embedding and head, for each microbatch; "update": of all that a device works on, once a step, gradients that
    [grads] leaves whole and new weights; "lookup": how many tables' rows travel with every token: rows by columns
    (all-to-all), cotangents (all-gather).
    """
    kind: str
    part: str
    axes: Axes
    elements: float


@dataclasses.dataclass(frozen=True)
class Held:
    """Parameters that a device keeps.

    stored: as [optimizer] has them; stored_bytes: of all; updated: of them those that are trained; layers_stored: of
    layers. layers_read: of layers as [params] has them. grads, ends_grads: accumulated, of all and of embedding and
    head. turned: bytes of those that are gathered along any dim but their first. used: of a stage and the ends, as they
    are multiplied; trained: those of them that have gradients; cast: of those, what the microbatches read from a copy
    in the compute dtype; moved: bytes of a copy in another place.
    """
    stored: float = 0.0
    stored_bytes: float = 0.0
    updated: float = 0.0
    layers_stored: float = 0.0
    layers_read: float = 0.0
    grads: float = 0.0
    ends_grads: float = 0.0
    turned: float = 0.0
    used: float = 0.0
    trained: float = 0.0
    cast: float = 0.0
    moved: float = 0.0

    def with_leading(self, leading: Held) -> Held:
        """The sum with those of leading layers; layers_stored and layers_read stay those of the stages."""
        return Held(**{name: value + (0 if name.startswith("layers_") else getattr(leading, name))
                       for name, value in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """One layer on one device: its products; the parameters that it multiplies, of all its matrices and of the largest.
    depth: layers of a stage."""
    products: tuple[Product, ...]
    used: float
    largest: float
    depth: int


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A model under a layout: sizes on one device, and the weights and gradients that travel.

    leading: in our pipelines the layers before the stages, as a model of their own whose microbatches the stages share;
    rows, cfg and layer are then of the others, what is held and exchanged once a step of both. leads: it is such a
    model.
    """
    cfg: object                 # the [model] section
    rows: list                  # the parameter table
    layout: Layout
    mesh: MeshSpec
    layer: LayerSizes
    head: Product
    head_shards: int
    held: Held
    moves: tuple[WeightMove, ...]
    leading: Placed | None = None
    leads: bool = False

    def moving(self, kind: str, part: str) -> dict[Axes, float]:
        """The elements of these moves by their axes."""
        return {move.axes: move.elements for move in self.moves if (move.kind, move.part) == (kind, part)}

    @property
    def by_layer(self) -> bool:
        """Whether layers gather their weights."""
        return any(move.kind == GATHER and move.part in ("layers", "experts") for move in self.moves)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation, and of a weight as it is gathered."""
        return 2 if self.cfg.compute_dtype == "bfloat16" else 4

    @property
    def float8(self) -> bool:
        """Whether the layers' projections multiply in float8: what they read is gathered so, each tensor with a
        scale."""
        return self.cfg.matmul_dtype == "float8"

    @property
    def dtype(self) -> str:
        """Of the same, as HLO spells it."""
        return "bf16" if self.itemsize == 2 else "f32"

    @functools.cached_property
    def matrices(self) -> int:
        """Of a layer, experts' apart: each is gathered and reduced by a collective of its own."""
        return len({info.path[-3:] for info in self.rows
                    if info.role == "matrix" and info.axes[0] in (LAYERS, LEADING) and "expert" not in info.axes})

    def tokens(self, options: Options) -> float:
        """Of a microbatch on one device, sequences that are split counted as they lie."""
        return options.global_batch * options.seq_len / options.microbatches / self.layout.num_shards(
            self.layout.token_axes)

    def layers(self, options: Options, practice: Practice = Practice()) -> float:
        """That a stage works through for a microbatch."""
        if self.leads:
            return self.rounds(options) * self.cfg.num_layers / options.microbatches
        if practice.shared_head and self.layout.sizes["stage"] == 1:
            return self.cfg.num_layers
        if practice.shared_head:        # ours: filled up with layers that cost the same and do nothing
            return stages.padded(self.cfg, self.layout.sizes["stage"] * options.chunks) // self.layout.sizes["stage"]
        return self.cfg.num_layers / self.layout.sizes["stage"]

    def visits(self, options: Options, practice: Practice) -> tuple[float, float, float]:
        """How often a step works through a layer: forward, backward for its input, for its weights. In our pipelines
        stages that have nothing to do work masked: with the schedule also those visits count."""
        layers = self.layers(options, practice)
        if not self.masked(options, practice) or self.leads:
            return (options.microbatches * layers,) * 3
        executed, depth = self._executed(options), layers / options.chunks
        return depth * executed["F"], depth * executed["B"], depth * (executed["W"] or executed["B"])

    def rounds(self, options: Options) -> int:
        """How often a stage works through its leading layers."""
        return -(-options.microbatches // self.layout.sizes["stage"])

    def ends(self, options: Options, practice: Practice) -> tuple[int, int, int]:
        """How often a step looks up the embedding, makes the loss with its gradient, and the embedding's gradient."""
        if self.leads:
            return 0, 0, 0
        begun = self.begun(options, practice)
        all_rounds = self.rounds(options) * self.layout.sizes["stage"]
        return (all_rounds, begun[1], all_rounds) if self.leading else begun

    def begun(self, options: Options, practice: Practice) -> tuple[int, int, int]:
        """How often a step makes the first stage's input, the loss, and takes that input's cotangent: in the ticks of
        our pipelines that the executor does it in, masked or not."""
        m, p = options.microbatches, self.layout.sizes["stage"]
        if not self.masked(options, practice):
            return m, m, m
        embedded, back = schedules.ends_executed(options.schedule, p, m, options.chunks)
        return embedded, m, back

    def masked(self, options: Options, practice: Practice) -> bool:
        """Whether all stages work in every tick of a schedule."""
        return practice.shared_head and self.layout.sizes["stage"] > 1 and options.schedule != ""

    def _executed(self, options: Options) -> dict[str, int]:
        return schedules.counts(options.schedule, self.layout.sizes["stage"], options.microbatches, options.chunks)[0]

    def num_shards(self, axis: str) -> int:
        """How many devices split an activation's dim."""
        if axis not in self._num_shards:
            self._num_shards[axis] = self.layout.num_shards(self.layout.mesh_axes("activations", axis))
        return self._num_shards[axis]

    @functools.cached_property
    def _num_shards(self) -> dict[str, int]:
        return {}

    @functools.cached_property
    def stream_shards(self) -> int:
        """How many devices share a residual stream beyond those that split its sequences (sequence parallelism)."""
        context = self.layout.mesh_axes("activations", "seq")
        return self.layout.num_shards(a for a in self.layout.mesh_axes("activations", "residual_seq")
                                      if a not in context)

    @functools.cached_property
    def widths(self) -> tuple[float, float, float]:
        """Of a token's queries, of its keys, of the MLP, on one device."""
        cfg = self.cfg
        kv_heads = layers.kv_heads(self.layout, cfg.num_kv_heads) / self.num_shards("kv_heads")
        # beside experts the mean of all layers
        dense = cfg.first_dense_layers / cfg.num_layers if cfg.num_experts else 1.0
        mlp = dense * cfg.mlp_dim + (1 - dense) * cfg.shared_expert_dim
        return cfg.num_heads * cfg.head_dim / self.num_shards("heads"), kv_heads * cfg.head_dim, mlp / self.num_shards(
            "mlp")


def place(rows, cfg, layout: Layout, mesh: MeshSpec, practice: Practice = Practice()) -> Placed:
    """rows: the parameter table (ParamInfo); cfg: the [model] section; the layout has the sizes of the mesh."""
    if layout.sizes["stage"] == 1 or not cfg.first_dense_layers or not practice.shared_head:
        return _place(rows, cfg, layout, mesh, practice)
    split = {wanted: [info for info in rows if (info.axes[0] == LEADING) == wanted] for wanted in (True, False)}
    dense = dict(num_layers=cfg.first_dense_layers, num_experts=0, shared_expert_dim=0, first_dense_layers=0)
    leading = _place(split[True], cfg.model_copy(update=dense), layout, mesh, practice, leads=True)
    others = dict(num_layers=cfg.num_layers - cfg.first_dense_layers, first_dense_layers=0)
    staged = _place(split[False], cfg.model_copy(update=others), layout, mesh, practice)
    update = Counter()
    for move in (*staged.moves, *leading.moves):
        if move.part == "update":
            update[move.kind, move.part, move.axes] += move.elements
    moves = (*(move for move in staged.moves if move.part != "update"),
             *(WeightMove(*key, n) for key, n in update.items()))
    return dataclasses.replace(staged, leading=leading, held=staged.held.with_leading(leading.held), moves=moves)


def _place(rows, cfg, layout: Layout, mesh: MeshSpec, practice: Practice, leads: bool = False) -> Placed:
    """leads: these layers stand before the stages, their gradients are summed over them."""
    local, tokens = _Local(cfg, layout), frozenset(layout.token_axes) | ({"stage"} if leads else set())
    layers_with = Counter()
    for info in rows:
        layers_with[info.path[-3:]] += info.shape[0]
    travel, held, used, largest = defaultdict(float), Counter(), 0.0, 0.0
    num_stages, products, head, equal = layout.sizes["stage"], {}, (Product(0, 0), 1), {}
    stage_layers = stages.padded(cfg, num_stages) // num_stages if num_stages > 1 and not leads else cfg.num_layers
    once = tokens if num_stages > 1 else frozenset(layout.deferred_axes(info.axes for info in rows))
    # the last product of a layer is none of an adapter's
    for info in sorted(rows, key=lambda info: LORA not in info.path):
        in_use, lies = local.axes(info)
        depth = stage_layers if info.axes[0] in (LAYERS, LEADING) else 0
        whole = info.size / layout.num_shards(in_use)
        # a stage has its own layers in the loop, also where the rules cannot split them
        if depth and num_stages > 1:
            whole = info.size / cfg.num_layers * depth / layout.num_shards(in_use - {"stage"})
        held.update(_held(info, cfg, layout, lies, in_use, whole, depth))
        if depth:
            used, largest = used + whole / depth, max(largest, whole / depth * cfg.num_layers / info.shape[0])
        if num_stages > 1:              # inside the loop weights and gradients are whole: exchanged once a step
            lies |= {"params": in_use, "grads": in_use}
        uses = 1
        if info.role == "embedding":
            columns = layers.lies_by_columns(layout, info.axes)
            uses = (not columns) + (cfg.tie_embeddings and info.axes[0] == "vocab")
            travel[EXCHANGE, "lookup", _ordered(lies["params"])] += columns * (1 + info.trainable)
        beyond = {table: axes - in_use for table, axes in lies.items()}
        for key, n in _moves(layout, info, beyond, whole, depth, uses, tokens - lies["grads"] - in_use, once):
            travel[key] += n
        # Of layers that repeat with a period the matrices of one: they differ in what they attend to alone.
        first = equal.setdefault("router" if info.role == "router" else info.path[-3:], info.path) == info.path
        if info.role == "matrix" and "expert" not in info.axes and first:
            into, out = info.matrix_dims
            key = info.path[:-2], tuple(info.axes[d] for d in into)
            row = _ordered(frozenset().union(*(local.uses(info.axes[d]) for d in into)))
            n, outward = products[key].n if key in products else 0, info.axes[out[-1]] == "embed"
            products[key] = Product(local.size(info, into), n + local.size(info, out), row, outward,
                                    outward and key[1] == ("mlp",),
                                    info.trainable, layers_with[info.path[-3:]] / cfg.num_layers)
        elif info.role == "router" and first:
            products["router"] = Product(*info.shape[-2:], trained=info.trainable, router=True,
                                         share=1 - cfg.first_dense_layers / cfg.num_layers)
        elif info.axes[-2:] in (("embed", "vocab"), ("vocab", "embed")) and (info.role == "head" or cfg.tie_embeddings):
            num_shards = layout.num_shards(local.uses("vocab"))
            head = Product(cfg.embed_dim, info.size // cfg.embed_dim // num_shards, trained=info.trainable), num_shards
    moves = tuple(WeightMove(*key, n) for key, n in travel.items() if key[-1] and n)
    layer = LayerSizes(tuple(products.values()), used, largest, stage_layers)
    return Placed(cfg, rows, layout, mesh, layer, *head, Held(**held), moves, leads=leads)


def _held(info, cfg, layout: Layout, lies, in_use: frozenset, whole: float, depth: int) -> dict[str, float]:
    """What one parameter adds to `Held`. in_use: mesh axes that shard the gathered copy; depth: layers on the device, 0
    of embedding and head."""
    stored = info.size / layout.num_shards(lies["optimizer"])
    grads, read = (info.size / layout.num_shards(lies[table]) for table in ("grads", "params"))
    elsewhere = lies["params"] != lies["optimizer"]
    size = 2 if info.role in MATMUL_ROLES and cfg.compute_dtype == "bfloat16" else info.dtype.itemsize
    found = {"stored": stored, "stored_bytes": stored * info.dtype.itemsize, "updated": info.trainable * stored,
             "grads": info.trainable * grads, "used": whole, "trained": info.trainable * whole,
             "moved": elsewhere * read * size}
    if elsewhere or info.role in MATMUL_ROLES and str(info.dtype) != cfg.compute_dtype:
        found["cast"] = whole
    if not depth:
        return found | {"ends_grads": info.trainable * grads}
    gathered = "expert" in info.axes and bool(lies["params"] - in_use)
    outer = info.shape[1] // layout.num_shards(layout.mesh_axes(GATHERED, "expert")) > 1
    if info.role == "matrix" and (info.axes[-1] == "embed" or gathered and (outer or info.axes[-1] == "expert_embed")):
        found["turned"] = stored * info.dtype.itemsize
    return found | {"layers_read": read, "layers_stored": stored}


def _moves(layout: Layout, info, lies, whole: float, depth: int, uses: int, late: frozenset,
           once: frozenset) -> Iterator[tuple[tuple[str, str, Axes], float]]:
    """((kind, part, axes), elements) of one parameter, as `WeightMove`. lies: where its tables split it beyond its use;
    uses: how often the ends gather it; late: axes over which its gradient is summed that do not split it; once: axes of
    sums that wait for the end of the step."""
    n, part = (whole / depth, "experts" if "expert" in info.axes else "layers") if depth else (whole, "ends")
    params, grads = lies["params"], lies["grads"]
    yield (GATHER, "routers" if info.role == "router" else part, _ordered(params)), uses * n
    yield (GATHER, "update", _ordered(lies["optimizer"] - params)), whole / layout.num_shards(params)
    if not info.trainable:
        return
    yield (SCATTER, part, _ordered(grads)), uses * n
    into = late & once & lies["optimizer"]
    yield (SCATTER, "update", _ordered(into)), whole / layout.num_shards(grads)
    yield (SUM, "update", _ordered((late & once) - into)), whole / layout.num_shards(grads | into)
    if info.role == "embedding" and layout.num_shards(once) > 1 and layout.sizes["stage"] == 1:
        # Beside manual axes XLA gathers the cotangents of what is looked up, and each device adds up all of them.
        yield (GATHER, "lookup", _ordered(late - once)), 1
    elif info.role == "embedding":      # what its lookups leave XLA itself adds up before it sums it over devices
        yield (SUM, "update", _ordered(late - once)), whole / layout.num_shards(grads)
    else:
        yield (SUM, part, _ordered(late - once)), n / layout.num_shards(grads)


class _Local:
    """The mesh axes that the tables give to logical axes, each asked for once, and what a device has of a parameter."""

    def __init__(self, cfg, layout: Layout):
        self.layout = layout
        self.splits = functools.cache(lambda table, axis: frozenset(layout.mesh_axes(table, axis)))
        self.uses = functools.cache(lambda axis: frozenset(layout.mesh_axes(GATHERED, axis)))
        self.kv_heads = layers.kv_heads(layout, cfg.num_kv_heads) // layout.num_shards(
            layout.mesh_axes("activations", "kv_heads"))

    def axes(self, info) -> tuple[frozenset, dict[str, frozenset]]:
        """(those that split a parameter where it is used, those that split it in each table)."""
        union = lambda of: frozenset().union(*map(of, info.axes))
        tables = ("params", "grads", "optimizer")
        return union(self.uses), {table: union(functools.partial(self.splits, table)) for table in tables}

    def size(self, info, dims) -> int:
        """Elements of these dims of a matrix on one device, as it is multiplied: each device has key heads of its
        own."""
        split = lambda d: info.shape[d] // max(1, self.layout.num_shards(self.uses(info.axes[d])))
        return math.prod(self.kv_heads if info.axes[d] == "kv_heads" else split(d) for d in dims)


def _ordered(axes) -> Axes:
    return tuple(a for a in AXES if a in axes)
