"""Reads the sizes of a model under a layout off the parameter table and the rules: `place` makes a `Placed`.

The parameter table gives the arrays, and the rules give their sharding. Nothing here depends on the batch.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import depths
from meshtrain.cost.formulas.placed import Placed, stream_axes, stream_shards
from meshtrain.cost.formulas.sizes import (EXCHANGE, GATHER, SCATTER, SUM, Axes, Held, LayerSizes, Product, WeightMove,
                                           order)
from meshtrain.model import layers
from meshtrain.model.params import ParamInfo
from meshtrain.names import LAYERS, LEADING, LORA, MATMUL_ROLES
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import GATHERED, Layout

TABLES = ("params", "grads", "optimizer")
MODULES = ("attention", "linear", "mlp", "moe")
OUTPUT_BIASES = "down_bias"     # of experts


def place(rows: Sequence[ParamInfo], cfg: Model, layout: Layout, mesh: MeshSpec) -> Placed:
    """Return the sizes and moves of a model under a layout.

    rows: the parameter table; cfg: the [model] section; the layout's sizes must be those of the mesh.
    """
    return ModelWeights(rows, cfg, layout).place(mesh)


class ModelWeights:
    """The weights of a model under a layout. A search drops most layouts because of `held` alone, without `place`."""

    def __init__(self, rows: Sequence[ParamInfo], cfg: Model, layout: Layout):
        self.cfg, self.layout = cfg, layout
        rows, of_depths = depths.split(rows, cfg)
        first = pattern.leading(cfg) if layout.sizes["stage"] > 1 else 0
        of_leading, of_others = ([info for info in rows if (info.axes[0] == LEADING) == wanted]
                                 for wanted in (True, False))
        self.leading = _Placement(of_leading, _cut(cfg, slice(first)), layout, is_leading=True) if first else None
        self.others = _Placement(of_others, _cut(cfg, slice(first, None)), layout) if first else (
            _Placement(rows, cfg, layout))
        self.depths = _Placement(of_depths, depths.section(cfg), layout, is_depths=True) if of_depths else None

    @functools.cached_property
    def held(self) -> Held:
        """The numbers of elements on one device."""
        held = self.others.held
        if self.leading:
            held = held.with_leading(self.leading.held)
        if self.depths:     # the head's backward gives their gradients, too
            held = held.with_leading(dataclasses.replace(self.depths.held, ends_grads=self.depths.held.grads))
        return held

    def place(self, mesh: MeshSpec) -> Placed:
        """Return the sizes and moves."""
        placed = dataclasses.replace(self.others.place(mesh), held=self.held)
        if self.leading:
            leading = self.leading.place(mesh)
            in_loop = [move for move in placed.moves if move.part != "update"]
            update = [move for move in (*placed.moves, *leading.moves) if move.part == "update"]
            placed = dataclasses.replace(placed, leading=leading, moves=(*in_loop, *_merge(update)))
        if not self.depths or not self.depths.rows[0].trainable:
            return placed
        further = self.depths.place(mesh)
        once, in_each = ([move for move in further.moves if (move.part == "update") == wanted]
                         for wanted in (True, False))
        return dataclasses.replace(placed, moves=_merge((*placed.moves, *once)),
                                   depths=dataclasses.replace(further, moves=tuple(in_each)))


def _cut(cfg: Model, part: slice) -> Model:
    """Return the [model] section for a part of the layers."""
    kinds = pattern.kinds(cfg)[part]
    mixers, mlps = ("".join(letters) for letters in zip(*kinds))
    without = {} if "e" in mlps else dict(num_experts=0, shared_expert_dim=0)
    return cfg.model_copy(update=dict(num_layers=len(kinds), mixers=mixers, mlps=mlps) | without)


@dataclasses.dataclass(frozen=True, eq=False)
class _Placement:
    """Layers of one kind of placement, with embedding and head if their rows are given. is_leading: whether the layers
    run before the stages, so that their gradients are summed over the stages. is_depths: whether the layers are the
    depths of MTP."""
    rows: Sequence[ParamInfo]
    cfg: Model
    layout: Layout
    is_leading: bool = False
    is_depths: bool = False

    @functools.cached_property
    def num_layers(self) -> int:
        """The number of layers on one device."""
        num_stages = self.layout.sizes["stage"]
        if num_stages == 1 or self.is_leading or self.is_depths:
            return self.cfg.num_layers
        return pattern.count_padded(self.cfg, num_stages) // num_stages

    @functools.cached_property
    def weights(self) -> list[_Weight]:
        """The parameters on one device. Adapters come first: the last product of a layer must not be one of theirs."""
        local = _Local(self.layout)
        return [local.weight(info, self.cfg, self.num_layers if info.axes[0] in (LAYERS, LEADING) else 0)
                for info in sorted(self.rows, key=lambda info: LORA not in info.path)]

    @functools.cached_property
    def held(self) -> Held:
        """The numbers of elements on one device."""
        held: dict[str, float] = defaultdict(float)
        for weight in self.weights:
            for name, value in weight.count_held(self.cfg).items():
                held[name] += value
        return Held(**held)

    def place(self, mesh: MeshSpec) -> Placed:
        """Return the sizes and moves of these layers."""
        rows, cfg, layout = self.rows, self.cfg, self.layout
        local, tokens = _Local(layout), frozenset(layout.token_axes) | ({"stage"} if self.is_leading else frozenset())
        num_stages, head, matrices = layout.sizes["stage"], Product(0, 0), _Matrices(cfg, rows, local)
        deferred = tokens if num_stages > 1 else frozenset(layout.find_deferred_axes(info.axes for info in rows))
        moves: list[WeightMove] = []
        used, largest = 0.0, 0.0
        for weight in self.weights:
            info = weight.info
            if weight.depth:
                used += weight.layer
                largest = max(largest, weight.layer * cfg.num_layers / info.shape[0])
            if num_stages > 1:      # in the loop weights and gradients are gathered, and exchanged once a step
                weight = weight._replace(tables={**weight.tables, "params": weight.in_use, "grads": weight.in_use})
            moves += weight.moves(tokens, deferred, cfg.tie_embeddings)
            if info.role in ("matrix", "router") and "expert" not in info.axes or info.path[-1] == OUTPUT_BIASES:
                matrices.add(info)
            elif info.axes[-2:] in (("embed", "vocab"), ("vocab", "embed")) and (
                    info.role == "head" or cfg.tie_embeddings):
                num_shards = layout.num_shards(local.axes_in_use("vocab"))
                head = Product(cfg.embed_dim, info.size // cfg.embed_dim // num_shards, trained=info.trainable)
        layer = LayerSizes(tuple(matrices.products.values()), used, largest, self.num_layers)
        return Placed(cfg, rows, layout, mesh, layer, head, self.held, _merge(moves), is_leading=self.is_leading,
                      is_depths=self.is_depths)


def _merge(moves: Iterable[WeightMove]) -> tuple[WeightMove, ...]:
    """Return the moves with the elements of equal collectives added up, without moves of nothing or over no axes."""
    elements: dict[tuple[str, str, Axes], float] = defaultdict(float)
    for move in moves:
        elements[move.kind, move.part, move.axes] += move.elements
    return tuple(WeightMove(*key, count) for key, count in elements.items() if key[-1] and count)


class _Weight(NamedTuple):
    """One parameter on one device.

    in_use: mesh axes that shard the gathered copy. tables: for each rule table, the mesh axes that shard it there.
    whole: elements of the gathered copy. depth: number of layers on the device, 0 for embedding and head.
    """
    info: ParamInfo
    layout: Layout
    in_use: frozenset[str]
    tables: Mapping[str, frozenset[str]]
    whole: float
    depth: int

    @property
    def layer(self) -> float:
        """Return the elements of one layer."""
        return self.whole / self.depth

    def count_held(self, cfg: Model) -> dict[str, float]:
        """Return what this weight adds to the fields of `Held`."""
        info, layout = self.info, self.layout
        params, grads, stored = (info.size / layout.num_shards(self.tables[table]) for table in TABLES)
        elsewhere = self.tables["params"] != self.tables["optimizer"]
        itemsize = 2 if info.role in MATMUL_ROLES and cfg.compute_dtype == "bfloat16" else info.dtype.itemsize
        added = {"stored": stored, "stored_bytes": stored * info.dtype.itemsize, "updated": info.trainable * stored,
                 "grads": info.trainable * grads, "used": self.whole, "trained": info.trainable * self.whole,
                 "moved": elsewhere * params * itemsize}
        if elsewhere or info.role in MATMUL_ROLES and str(info.dtype) != cfg.compute_dtype:
            added["cast"] = self.whole
        if not self.depth:
            return added | {"ends_grads": info.trainable * grads}
        gathered = "expert" in info.axes and bool(self.tables["params"] - self.in_use)
        outer = info.shape[1] // layout.num_shards(layout.mesh_axes(GATHERED, "expert")) > 1
        by_last_dim = info.axes[-1] == "embed" or gathered and (outer or info.axes[-1] == "expert_embed")
        if info.role == "matrix" and by_last_dim:
            added["transposed"] = stored * info.dtype.itemsize
        return added | {"layers_read": params, "layers_stored": stored}

    def moves(self, tokens: frozenset[str], deferred: frozenset[str], tied: bool) -> Iterator[WeightMove]:
        """Yield the moves of this weight and of its gradient. tokens: axes over which gradients are summed; deferred:
        axes whose sums are deferred to the end of the step; tied: whether the embedding is also the head."""
        info, num_shards = self.info, self.layout.num_shards
        of_layer = "experts" if "expert" in info.axes else "layers" if _part(info) or info.role == "norm" else "merge"
        part, count = (of_layer, self.layer) if self.depth else ("ends", self.whole)
        uses = 1        # how often a microbatch gathers embedding and head
        if info.role == "embedding":
            columns = layers.lies_by_columns(self.layout, info.axes)
            uses = (not columns) + (tied and info.axes[0] == "vocab")
            yield WeightMove(EXCHANGE, "lookup", order(self.tables["params"]), columns * (1 + info.trainable))
        params, grads, optimizer = (self.tables[table] - self.in_use for table in TABLES)
        yield WeightMove(GATHER, "routers" if info.role == "router" else part, order(params), uses * count)
        yield WeightMove(GATHER, "update", order(optimizer - params), self.whole / num_shards(params))
        if not info.trainable:
            return
        yield WeightMove(SCATTER, part, order(grads), uses * count)
        whole_grads = tokens - self.tables["grads"] - self.in_use       # summed over these axes, not sharded by them
        scattered = whole_grads & deferred & optimizer
        yield WeightMove(SCATTER, "update", order(scattered), self.whole / num_shards(grads))
        yield WeightMove(SUM, "update", order((whole_grads & deferred) - scattered),
                         self.whole / num_shards(grads | scattered))
        each = order(whole_grads - deferred)      # summed in each microbatch
        if info.role == "embedding" and num_shards(deferred) > 1 and self.layout.sizes["stage"] == 1:
            # With manual axes XLA all-gathers the cotangents of looked-up rows, and each device sums all of them.
            yield WeightMove(GATHER, "lookup", each, 1)
        elif info.role == "embedding":      # XLA sums the gradients of look-ups per device before the all-reduce
            yield WeightMove(SUM, "update", each, self.whole / num_shards(grads))
        else:
            yield WeightMove(SUM, part, each, count / num_shards(grads))


class _Local:
    """Computes sizes of parameters on one device. Caches the mesh axes of each logical axis."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.axes_of = functools.cache(lambda table, axis: frozenset(layout.mesh_axes(table, axis)))

    def axes_in_use(self, *axes: str | None) -> frozenset[str]:
        """Return the mesh axes that shard these logical axes of a matrix as it is multiplied."""
        return frozenset().union(*[self.axes_of(GATHERED, axis) for axis in axes])

    def weight(self, info: ParamInfo, cfg: Model, depth: int) -> _Weight:
        """Return a parameter on one device. depth: number of layers on the device, 0 for embedding and head."""
        in_use, *tables = [frozenset().union(*[self.axes_of(table, axis) for axis in info.axes])
                           for table in (GATHERED, *TABLES)]
        whole = info.size / self.layout.num_shards(in_use)
        # In the loop a stage has only its own layers, even if the rules cannot shard the stack.
        if depth and self.layout.sizes["stage"] > 1:
            whole = info.size / cfg.num_layers * depth / self.layout.num_shards(in_use - {"stage"})
        return _Weight(info, self.layout, in_use, dict(zip(TABLES, tables)), whole, depth)

    def split(self, info: ParamInfo, dims: Iterable[int]) -> Axes:
        """Return the mesh axes that shard these dims of a matrix in use."""
        return order(self.axes_in_use(*(info.axes[dim] for dim in dims)))

    def size(self, info: ParamInfo, dims: Iterable[int]) -> int:
        """Return the elements of these dims of a matrix on one device, as it is multiplied."""
        return math.prod(self._dim(info, dim) for dim in dims)

    def _dim(self, info: ParamInfo, dim: int) -> int:
        """Return the size of one dim on one device. Key heads are replicated if they are fewer than devices."""
        axis, size = info.axes[dim], info.shape[dim]
        if axis == "kv_heads":
            split = self.layout.num_shards(self.layout.mesh_axes("activations", "kv_heads"))
            return layers.kv_heads(self.layout, size) // split
        return size // max(1, self.layout.num_shards(self.axes_in_use(axis)))


class _Matrices:
    """The products of a layer. Equal matrices of different layers are one entry, with the fraction of the layers that
    have it. Matrices that multiply the same input are one product."""

    def __init__(self, cfg: Model, rows: Iterable[ParamInfo], local: _Local):
        self.num_layers, self.local = cfg.num_layers, local
        self.products: dict[tuple, Product] = {}
        # columns of the matrices that multiply the same input, by the mesh axes that shard them
        self.columns: dict[tuple, Counter[Axes]] = defaultdict(Counter)
        self.query_latents = bool(cfg.latent.kv_dim and cfg.latent.query_dim)
        before_mlps = {_layer(info) for info in rows if _part(info) in ("mlp", "moe")}
        # by key: the path of the first of equal matrices, how many layers have one, in how many it is the last product
        self.first: dict[tuple, tuple[str, ...]] = {}
        self.count: Counter[tuple] = Counter()
        self.last: Counter[tuple] = Counter()
        for info in rows:
            key = self._key(info)
            self.first.setdefault(key, info.path)
            self.count[key] += info.shape[0]
            gated = cfg.shared_expert_gate and "shared" in info.path
            last = info.axes[-2:] == ("mlp", "embed") and not gated or _layer(info) not in before_mlps
            self.last[key] += info.shape[0] * last

    def add(self, info: ParamInfo) -> None:
        """Add a matrix, a router or the output biases of experts to the products."""
        key = self._key(info)
        if self.first[key] != info.path:
            return
        share, local = self.count[key] / self.num_layers, self.local
        if info.role == "router":
            self.products[key] = Product(info.shape[-2], info.shape[-1], trained=info.trainable, share=share,
                                         router=True)
            return
        if info.path[-1] == OUTPUT_BIASES:      # weighted and summed in a product, on tokens sharded as the stream
            self.products[key] = Product(info.shape[-2], info.shape[-1] / stream_shards(local.layout), unread=1.0,
                                         trained=info.trainable, share=share)
            return
        assert info.matrix_dims is not None
        into, out = info.matrix_dims
        axes = tuple(info.axes[dim] for dim in into)
        same_input = info.path[:-2], axes, tuple(info.shape[dim] for dim in into), share
        outward = info.axes[out[-1]] == "embed"
        expands = _part(info) == "attention" and info.path[-2] in ("key", "value") and "kv_heads" not in info.axes
        self.columns[same_input][local.split(info, out)] += local.size(info, out)
        columns, adapter = self.columns[same_input], LORA in info.path
        reads_stream = adapter and "embed" in axes
        row, n = local.split(info, into), float(sum(columns.values()))
        between: Axes = ()
        if adapter:     # its last matrix works on tokens sharded as the stream that it adds to
            n = n / stream_shards(local.layout) if outward else n
            between = stream_axes(local.layout) if outward else row or local.split(info, out)
        self.products[same_input] = Product(
            local.size(info, into), n, row, outward,
            outward * self.last[key] / self.count[key] if _part(info) else 1.0, info.trainable, share, expands=expands,
            whole_inputs=self.query_latents and _part(info) == "attention",
            on_shards=columns[()] if reads_stream or len(columns) > 1 else 0,
            between=between)

    @staticmethod
    def _key(info: ParamInfo) -> tuple:
        return info.path[-3:], info.shape[1:]


def _part(info: ParamInfo) -> str:
    """Return the module of a layer that has this parameter; "" for norms, embedding and head."""
    return next((name for name in info.path if name in MODULES), "")


def _layer(info: ParamInfo) -> tuple[str, ...]:
    """Return the path of the layers of a period that have this parameter."""
    return info.path[:info.path.index(_part(info))] if _part(info) else info.path
