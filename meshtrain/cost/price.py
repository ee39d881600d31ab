"""The price of one layout, in closed formulas: memory, traffic, time of a step; nothing is compiled.

What a model is comes from its parameter table, where its tensors lie from the rules, the order of a pipeline from its schedule
table; `rates` says how long a product, a stream and a collective take. A collective is hidden behind a share of the compute
that stands beside it, and slows that by a share of its own time; each step says what of it is exposed. The formulas met 51
published runs of other frameworks, whose ways to run a step are a `Practice`.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from meshtrain.cost import flops, rates
from meshtrain.cost.rates import Group, Matmul, Rates
from meshtrain.cost.simulate import Costs
from meshtrain.layout.mesh import MeshSpec
from meshtrain.layout.rules import Layout
from meshtrain.names import LAYERS
from meshtrain.parallel import schedules

BACKWARD = 2.5              # FLOPs of attention's backward over its forward's: the scores again, then four products for two
LOGIT_BYTES = 14            # what a logit moves through memory, forward and backward
UPDATE_BYTES = 30           # what a stored parameter moves in the optimizer's update
FULL, SELECTIVE = (1.0, 1.0, 1.0), (0.0, 0.0, 0.6)


@dataclasses.dataclass(frozen=True)
class Practice:
    """How a framework runs a step; the defaults are this project's.

    recomputed: shares of a layer's forward products, attention and elementwise work that its backward does again; None: as
    training.remat says. shared_head: all stages work on the head; else it stands on the last. short_ends: the first and last
    stage have one layer less than the others. grad_bytes: of a gradient's element as it is reduced.
    """
    engine: str = "cudnn"
    recomputed: tuple[float, float, float] | None = None
    eager: bool = False
    user_buffers: bool = False
    overlaps: bool = True
    shared_head: bool = True
    short_ends: bool = False
    grad_bytes: int = 4


RECOMPUTED = {"none": (0.0, 0.0, 0.0), "selective": SELECTIVE, "full": FULL, "offload": FULL}


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrices of one layer, or the head, that multiply the same input: [tokens, k] × [k, n] with the sizes one device has.

    row: the mesh axes that split k, over which the result is summed.
    """
    k: int
    n: int
    row: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A model under a layout, as far as it does not depend on the batch: sizes on one device, and who exchanges what.

    products, head: of one layer, and of the head. Elements by mesh axes: gathered, scattered: of one layer's weights each
    microbatch; ends_*: of embedding and head; reduced: summed once a step, sharded where the optimizer's state is; regathered:
    of new weights once a step. stored, grads: parameters that a device keeps; used: of its stage and the ends,
    as they are multiplied; layer_used: of one layer.
    """
    layout: Layout
    mesh: MeshSpec
    products: tuple[Product, ...]
    head: Product
    head_ways: int
    gathered: Mapping[tuple[str, ...], float]
    scattered: Mapping[tuple[str, ...], float]
    ends_gathered: Mapping[tuple[str, ...], float]
    ends_scattered: Mapping[tuple[str, ...], float]
    reduced: Mapping[tuple[tuple[str, ...], bool], float]
    regathered: Mapping[tuple[str, ...], float]
    stored: float
    grads: float
    used: float
    layer_used: float
    depth: int                  # layers of a stage


def place(rows, cfg, layout: Layout, mesh: MeshSpec) -> Placed:
    """rows: the parameter table (ParamInfo); cfg: the [model] section; the layout has the sizes of the mesh."""
    pipelined = layout.sizes["stage"] > 1
    depth = -(-cfg.num_layers // layout.sizes["stage"])
    sums = {name: defaultdict(float) for name in
            ("gathered", "scattered", "ends_gathered", "ends_scattered", "reduced", "regathered")}
    stored = grads = used = layer_used = 0.0
    products: dict = {}
    head = None
    splits = functools.cache(lambda table, axis: frozenset(layout.mesh_axes(table, axis)))
    uses = functools.cache(lambda axis: frozenset(layout.axes_in_use(axis)))
    tokens = frozenset(layout.token_axes)
    order = lambda axes: tuple(a for a in mesh.placement if a in axes)
    for info in rows:
        in_use = frozenset().union(*(uses(axis) for axis in info.axes))
        lies = {table: frozenset().union(*(splits(table, axis) for axis in info.axes))
                for table in ("params", "grads", "optimizer")}
        stacked = info.axes[:1] == (LAYERS,)
        whole = info.size / layout.ways(in_use)
        if stacked and pipelined:       # a stage has its own layers in the loop, also where the rules cannot split them
            whole = info.size / cfg.num_layers * depth / layout.ways(in_use - {"stage"})
        stored += info.size / layout.ways(lies["optimizer"])
        grads += info.size / layout.ways(lies["grads"])
        used += whole
        by_layer = {table: axes - in_use for table, axes in lies.items()}
        if pipelined:           # inside the loop weights and gradients are whole: exchanged once a step
            by_layer |= {"params": frozenset(), "grads": frozenset()}
        once = whole / layout.ways(by_layer["grads"])
        late = tokens - by_layer["grads"] - in_use
        sums["reduced"][order(late), bool(late & by_layer["optimizer"])] += once
        sums["regathered"][order(by_layer["optimizer"] - by_layer["params"])] += whole / layout.ways(by_layer["params"])
        part, of = ("", whole / depth) if stacked else ("ends_", whole)
        sums[part + "gathered"][order(by_layer["params"])] += of
        sums[part + "scattered"][order(by_layer["grads"])] += of
        layer_used += whole / depth if stacked else 0
        if info.role == "matrix":
            into, out = info.matrix_dims
            local = lambda dims: math.prod(info.shape[d] // max(1, layout.ways(uses(info.axes[d]))) for d in dims)
            row = order(frozenset().union(*(uses(info.axes[d]) for d in into)))
            key = info.path[:-2], tuple(info.axes[d] for d in into)
            products.setdefault(key, [local(into), 0, row])[1] += local(out)
        elif info.axes[-2:] in (("embed", "vocab"), ("vocab", "embed")) and (info.role == "head" or cfg.tie_embeddings):
            ways = layout.ways(uses("vocab"))
            head = Product(cfg.embed_dim, info.size // cfg.embed_dim // ways, ()), ways
    clean = lambda name: {axes: n for axes, n in sums[name].items() if (axes[0] if name == "reduced" else axes)}
    return Placed(layout, mesh, tuple(Product(*p) for p in products.values()), *head, *map(clean, sums), stored, grads, used,
                  layer_used, depth)


@functools.lru_cache(maxsize=4096)
def group(sizes: tuple[int, ...], placement: tuple[str, ...], axes: tuple[str, ...], domain: int) -> Group:
    """The GPUs of a group that spans these axes, and how many of it share a link domain. sizes: in the placement's order."""
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    inside = [placement.index(axis) for axis in axes]
    others = [i for i in range(len(sizes)) if i not in inside]
    ids = ids.transpose(others + inside).reshape(-1, math.prod(sizes[i] for i in inside))
    domains = np.sort(ids // domain, axis=1)
    most = int((np.diff(domains, axis=1) != 0).sum(1).max()) + 1 if domains.shape[1] > 1 else 1
    return Group(ids.shape[1], max(1, ids.shape[1] // most))


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
    optimizer_bytes: int = 8    # of state for each parameter, beside the parameter


@dataclasses.dataclass(frozen=True)
class Price:
    """A step on `num_gpus`: step_s = compute_s + exposed (by what is waited for) + bubble_s + update_s + host_s.

    traffic_bytes: what a GPU sends in a step, by mesh axes ("data+fsdp"). parts: compute_s by kind. links_s: seconds that
    each axes' collectives take, hidden or not. mfu: the causal half of attention counted, nothing recomputed.
    """
    num_gpus: int
    memory_bytes: Mapping[str, int]
    traffic_bytes: Mapping[str, float]
    links_s: Mapping[str, float]
    parts: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble: float
    bubble_s: float
    update_s: float
    host_s: float
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float

    @property
    def compute_s(self) -> float:
        return sum(self.parts.values())


class _Links:
    """Collectives over mesh axes: seconds, and a tally of bytes and seconds."""

    def __init__(self, rates: Rates, mesh: MeshSpec):
        self.rates, self.mesh = rates, mesh
        self.sizes = tuple(mesh.sizes[a] for a in mesh.placement)
        # assumption: a job takes equally many GPUs of each link domain, 64 of a rack's 72 where it has 128
        num_gpus, most = mesh.num_devices, rates.gpu.gpus_per_link_domain
        self.domain = next(n for n in range(min(num_gpus, most), 0, -1) if num_gpus % n == 0)
        self.sent, self.seconds = defaultdict(float), defaultdict(float)

    def over(self, axes, kind: str, array_bytes: float, runs: float) -> float:
        """Seconds of one; `runs` of them are tallied."""
        if not axes or not array_bytes:
            return 0.0
        of = group(self.sizes, tuple(self.mesh.placement), tuple(axes), self.domain)
        seconds = self.rates.collective_s(kind, array_bytes, of)
        ways = 1 if kind == "collective-permute" else (of.size - 1) / of.size * (2 if kind == "all-reduce" else 1)
        name = "+".join(axes)
        self.sent[name] += runs * array_bytes * ways
        self.seconds[name] += runs * seconds
        return seconds


def price(placed: Placed, cfg, rows, rated: Rates, options: Options, practice: Practice = Practice()) -> Price:
    """cfg, rows: as in `place`."""
    assumed, layout, sizes = rated.assumed, placed.layout, placed.mesh.sizes
    p, m, num_gpus = sizes["stage"], options.microbatches, placed.mesh.num_devices
    tokens = options.global_batch * options.seq_len / m / layout.ways(layout.token_axes)
    links = _Links(rated, placed.mesh)
    work = _Work(placed, cfg, rated, options, practice, tokens)
    layers = (cfg.num_layers + 2 * practice.short_ends) / p
    if practice.shared_head:            # ours: filled up with layers that cost the same and do nothing
        layers = -(-cfg.num_layers // (p * options.chunks)) * options.chunks
    runs = m * layers
    tensor_f, tensor_b = _tensor(placed, links, cfg, tokens, work.again[0], runs)
    hidden = assumed["overlap.user_buffers"] if practice.user_buffers else assumed["overlap.tensor"]
    tensor_s = (1 - hidden) * (tensor_f + tensor_b)
    sharded_s, sharded_ends_s = _sharded(placed, links, cfg, assumed, work, practice, m, runs)
    context_s = _context(placed, links, cfg, assumed, work, options.method, tokens, runs)
    head_s = sum(work.head.values())
    layer_s = work.forward_s + work.backward_s
    waits = {"tensor": tensor_s, "fsdp": sharded_s, "context": context_s}
    waits_s = sum(waits.values())
    stage_s = layers * (layer_s + waits_s)
    ends_s = sharded_ends_s if placed.gathered or placed.scattered else 0.0
    idle_s, send_s = 0.0, 0.0
    if p > 1:
        boundary_bytes = itemsize(cfg) * tokens * cfg.embed_dim / stream_ways(layout)
        send_s = links.over(("stage",), "collective-permute", boundary_bytes, 2 * m * options.chunks)
        if practice.shared_head:
            costs = Costs(layers * (work.forward_s + waits_s / 2), layers * (work.input_grad_s + waits_s / 2),
                          layers * work.weight_grad_s)
            idle_s = bubble_s(costs, options.schedule, p, m, options.chunks)
        else:                           # of runtimes with one program a stage: 1F1B and its interleaved form
            idle_s = (p - 1) / options.chunks * stage_s
    last_layers = layers - 1 if practice.short_ends else layers
    if p > 1 and not practice.shared_head:
        steady = max(stage_s, last_layers * (layer_s + waits_s) + head_s)
    else:
        steady = stage_s + head_s
    once_s = _once(placed, links, cfg, assumed, practice, layers * layer_s)
    update_s = rated.stream_s(UPDATE_BYTES * placed.stored)
    busy = m * (steady + ends_s) + idle_s + 2 * (p - 1) * send_s + once_s + update_s
    step_s = busy * (1 + assumed["step.overhead"])
    parts = {name: m * layers * seconds for name, seconds in work.parts.items()}
    for name, seconds in work.head.items():
        parts[name] += m * seconds
    exposed = {name: m * layers * seconds for name, seconds in waits.items() if seconds}
    exposed["fsdp"] = exposed.get("fsdp", 0.0) + m * ends_s
    exposed |= {"stage": 2 * (p - 1) * send_s, "once a step": once_s}
    per_gpu = options.global_batch * options.seq_len / step_s / num_gpus
    model_flops = flops.model_flops_per_token(rows, cfg, options.seq_len)
    return Price(num_gpus, memory(placed, cfg, options, tokens), dict(links.sent), dict(links.seconds), parts,
                 {name: s for name, s in exposed.items() if s}, idle_s / busy, idle_s, update_s, step_s - busy, step_s,
                 per_gpu, per_gpu * model_flops / rated.peak(cfg.compute_dtype))


class _Work:
    """Seconds of one layer and of the head for one microbatch on one device."""

    def __init__(self, placed: Placed, cfg, rated: Rates, options: Options, practice: Practice, tokens: float):
        matmul = functools.partial(_matmul_s, rated, cfg.compute_dtype, itemsize(cfg))
        forward = sum(matmul(tokens, w.n, w.k) for w in placed.products)
        backward = sum(matmul(tokens, w.k, w.n) + matmul(w.k, w.n, tokens) for w in placed.products)
        heads = placed.layout.ways(placed.layout.mesh_axes("activations", "heads"))
        width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        pairs = 2 * tokens * options.seq_len * options.visited * width / heads
        attend = lambda direction, flop: rated.attention_s(
            rates.Attention(practice.engine, direction, flop, options.seq_len, cfg.head_dim))
        attention, attention_b = attend("forward", pairs), attend("backward", BACKWARD * pairs)
        layout = placed.layout
        stream = stream_ways(layout)
        mlp = layout.ways(layout.mesh_axes("activations", "mlp"))
        beside = 16 * cfg.embed_dim / stream + 4 * (width + kv_width) / heads
        moved = lambda times: tokens * (beside + times * cfg.mlp_dim / mlp)
        gated = cfg.activation == "swiglu"
        fused = rated.assumed["elementwise.eager"] if practice.eager else 1.0
        fused *= itemsize(cfg) / 2
        small = fused * rated.stream_s(moved(6 if gated else 4))
        small_b = fused * rated.stream_s(moved(10 if gated else 6))
        self.again = practice.recomputed or RECOMPUTED[options.remat]
        self.recomputed_s = sum(a * b for a, b in zip(self.again, (forward, attention, small)))
        self.forward_s = forward + attention + small
        self.input_grad_s = backward / 2 + attention_b + small_b + self.recomputed_s
        self.weight_grad_s = backward / 2
        self.backward_s = self.input_grad_s + self.weight_grad_s
        self.attention_s, self.attention_b_s = attention, attention_b
        again = self.again
        self.parts = {"matmul": forward * (1 + again[0]) + backward, "attention": attention * (1 + again[1]) + attention_b,
                      "elementwise": small * (1 + again[2]) + small_b}
        n, k = placed.head.n, placed.head.k
        if not practice.shared_head and options.schedule:
            n = n * placed.head_ways // max(1, layout.ways(a for a in layout.axes_in_use("vocab") if a != "stage"))
        self.head = {"matmul": matmul(tokens, n, k) + matmul(tokens, k, n) + matmul(k, n, tokens),
                     "elementwise": fused * rated.stream_s(LOGIT_BYTES * tokens * n)}


def _matmul_s(rated: Rates, dtype: str, size: int, m: float, n: float, k: float) -> float:
    return max(rated.matmul_s(Matmul(m, n, k, 1, dtype)), rated.stream_s(size * (m * n + n * k + m * k)))


def _beside(comm_s: float, compute_s: float, hide: float, contend: float) -> float:
    """What a collective adds to the compute beside it: what sticks out, and by what it slows the rest."""
    behind = min(comm_s, hide * compute_s)
    return comm_s - behind + contend * behind


def _tensor(placed: Placed, links: _Links, cfg, tokens: float, again: float, runs: float) -> tuple[float, float]:
    """Seconds of a layer's collectives around products whose contracted dim is split: forward, and backward with what it
    recomputes. A gather before and a reduce-scatter behind each pair, or one all-reduce: the same bytes."""
    forward = 0.0
    split = placed.layout.mesh_axes("activations", "residual_seq")
    for product in placed.products:
        if product.row:
            whole = tokens * product.n * itemsize(cfg)
            times = runs * (2 + again)
            if set(product.row) <= set(split):
                forward += sum(links.over(product.row, kind, whole, times) for kind in ("all-gather", "reduce-scatter"))
            else:
                forward += links.over(product.row, "all-reduce", whole, times)
    return forward, forward * (1 + again)


def _sharded(placed: Placed, links: _Links, cfg, assumed, work: _Work, practice: Practice, m: int,
             runs: float) -> tuple[float, float]:
    """(exposed seconds of a layer, of the ends of a microbatch) where layers gather weights and scatter gradients."""
    over = lambda table, kind, itemsize, times: sum(
        links.over(axes, kind, n * itemsize, times) for axes, n in table.items())
    gather = over(placed.gathered, "all-gather", itemsize(cfg), 2 * runs)
    scatter = over(placed.scattered, "reduce-scatter", practice.grad_bytes, runs)
    ends = (over(placed.ends_gathered, "all-gather", itemsize(cfg), m)
            + over(placed.ends_scattered, "reduce-scatter", practice.grad_bytes, m))
    hide = assumed["overlap.fsdp"] if practice.overlaps else 0.0
    beside = lambda comm, compute: _beside(comm, compute, hide, assumed["link.contend"])
    return beside(gather, work.forward_s) + beside(gather + scatter, work.backward_s), gather + scatter + ends


def _context(placed: Placed, links: _Links, cfg, assumed, work: _Work, method: str, tokens: float,
             runs: float) -> float:
    """Exposed seconds of a layer where sequences are split. A ring hides behind attention, the others stand before it."""
    axes = placed.layout.mesh_axes("activations", "seq")
    c = placed.layout.ways(axes)
    if c == 1:
        return 0.0
    heads = placed.layout.ways(placed.layout.mesh_axes("activations", "heads"))
    kv_bytes = itemsize(cfg) * 2 * tokens * cfg.num_kv_heads * cfg.head_dim / min(heads, cfg.num_kv_heads)
    if method == "ring":
        hop = links.over(axes, "collective-permute", kv_bytes, 3 * (c - 1) * runs)
        beside = lambda comm, compute: _beside(comm, compute, assumed["overlap.fsdp"], assumed["link.contend"])
        return beside((c - 1) * hop, work.attention_s) + beside(2 * (c - 1) * hop, work.attention_b_s)
    if method == "gather":      # keys and values whole, again in the backward, and their gradients in float32 back
        return (2 * links.over(axes, "all-gather", c * kv_bytes, 2 * runs)
                + links.over(axes, "reduce-scatter", 2 * c * kv_bytes, runs))
    each = kv_bytes + itemsize(cfg) * 2 * tokens * cfg.num_heads * cfg.head_dim / heads
    return 2 * links.over(axes, "all-to-all", each, 2 * runs)


def bubble_s(costs: Costs, name: str, p: int, m: int, v: int) -> float:
    """What a phase schedule takes beyond m microbatches on a stage that never waits: as `simulate` finds without links."""
    executed, _ = schedules.counts(name, p, m, v)
    split = executed["W"] > 0
    op_s = {"F": costs.forward_s, "B": costs.input_grad_s + (0 if split else costs.weight_grad_s),
            "W": costs.weight_grad_s if split else 0}
    return sum((executed[kind] - m * v) * seconds for kind, seconds in op_s.items()) / v


def _once(placed: Placed, links: _Links, cfg, assumed, practice: Practice, microbatch_s: float) -> float:
    """Exposed seconds of what is exchanged once a step, hidden behind one microbatch."""
    seconds = sum(links.over(axes, "reduce-scatter" if sharded else "all-reduce", n * practice.grad_bytes, 1)
                  for (axes, sharded), n in placed.reduced.items())
    seconds += sum(links.over(axes, "all-gather", n * itemsize(cfg), 1) for axes, n in placed.regathered.items())
    if not practice.overlaps:
        return seconds
    return _beside(seconds, microbatch_s, assumed["overlap.data"], assumed["link.contend"])


def memory(placed: Placed, cfg, options: Options, tokens: float) -> dict[str, int]:
    """Bytes on one device by kind, as `inspect` has them: grads are the accumulators that a microbatch adds to, activations
    everything that lives for a while. tokens: of a microbatch on one device."""
    layout, p = placed.layout, placed.mesh.sizes["stage"]
    context = layout.ways(layout.mesh_axes("activations", "seq"))
    stream = cfg.embed_dim / stream_ways(layout)
    heads, mlp = (layout.ways(layout.mesh_axes("activations", axis)) for axis in ("heads", "mlp"))
    q, kv = cfg.num_heads * cfg.head_dim / heads, cfg.num_kv_heads * cfg.head_dim / heads
    gates, f = 2 if cfg.activation == "swiglu" else 1, cfg.mlp_dim / mlp
    size = itemsize(cfg)
    layer = size * tokens * {"none": 4 * stream + 2 * q + 2 * kv + (gates + 1) * f, "full": stream, "offload": 0.0,
                          "selective": 2 * stream + 2 * q + 2 * kv + gates * f}[options.remat]
    # One layer's differentiation; in a scan over layers what is as wide as the residual stream lies whole where matmuls read it.
    working = 2 * size * tokens * (4 * (stream if p > 1 else cfg.embed_dim) + 2 * q + 2 * kv + 3 * f)
    working += 8 * min(tokens, options.loss_chunk) * placed.head.n          # logits and their gradient in float32
    if context > 1:             # keys and values under way, and their gradients in float32; or all heads' for a while
        working += size * tokens * kv * {"ring": 6, "gather": 6 * context, "ulysses": 4}[options.method]
    if p > 1:
        kept = slot_bytes(placed, cfg, options, tokens)
        # A full stage in the loop. assumption: of [grads] behind it half lies in the place of what is reduced.
        grads, weights = 4 * placed.used, size * placed.used + 2 * placed.grads
    else:
        kept, grads = cfg.num_layers * layer, 4 * placed.grads
        weights = size * (2 * placed.layer_used if placed.gathered else placed.used)     # two gathered layers; or a copy of all
    held = {"params": 4 * placed.stored, "grads": grads, "optimizer": options.optimizer_bytes * placed.stored,
            "activations": weights + kept + working}
    held = {name: int(count) for name, count in held.items()}
    return held | {"total": sum(held.values())}


def slot_bytes(placed: Placed, cfg, options: Options, tokens: float) -> float:
    """Bytes of a pipeline's slots: what microbatches leave in a stage. assumption, as in `memory.slot_bytes`: without remat, and
    in what B leaves for a W of its own, what is as wide as the residual stream lies whole on each device."""
    layout = placed.layout
    heads, mlp = (layout.ways(layout.mesh_axes("activations", axis)) for axis in ("heads", "mlp"))
    h, stream = cfg.embed_dim, cfg.embed_dim / stream_ways(layout)
    q, kv, f = cfg.num_heads * cfg.head_dim / heads, cfg.num_kv_heads * cfg.head_dim / heads, cfg.mlp_dim / mlp
    gates = 2 if cfg.activation == "swiglu" else 1
    for_backward = {"none": 4 * h + stream + 2 * q + 2 * kv + gates * f, "selective": 2 * stream + 2 * q + 2 * kv + gates * f,
                    "full": stream}[options.remat]
    for_weights = {"none": 10 * h + q + 2 * kv + (gates + 1) * f, "selective": 10 * h + q + 2 * kv + (gates + 2) * f,
                   "full": 12 * h + 2 * q + 2 * kv + (gates + 2) * f}[options.remat]
    p = placed.mesh.sizes["stage"]
    _, slots = schedules.counts(options.schedule, p, options.microbatches, options.chunks)
    depth = -(-cfg.num_layers // (p * options.chunks))
    elements = depth * (slots["Q"] * for_backward + slots.get("Z", 0) * for_weights) + (slots["X"] + slots["D"]) * stream
    return itemsize(cfg) * tokens * elements


def itemsize(cfg) -> int:
    """Bytes of an activation, and of a weight as it is gathered."""
    return 2 if cfg.compute_dtype == "bfloat16" else 4


def stream_ways(layout: Layout) -> int:
    """How many devices share a microbatch's residual stream beyond those that split its sequences (sequence parallelism)."""
    context = layout.mesh_axes("activations", "seq")
    return layout.ways(a for a in layout.mesh_axes("activations", "residual_seq") if a not in context)
