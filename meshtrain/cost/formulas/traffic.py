"""The collectives of a step in closed formulas: what travels, over which mesh axes, how often, and beside what.

One list for bytes and seconds: `inspect` puts it beside the compiled program's, `price` takes its times from it. What
weights and gradients send comes from `placed`; what the residual stream, keys and values and the boundaries of stages
send follows from the sizes of a microbatch.
"""
from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from meshtrain.cost.formulas import flops, routed
from meshtrain.cost.formulas.placed import GATHER, SUM, Axes, Options, Placed, Practice, Product, WeightMove
from meshtrain.names import AXES
from meshtrain.sharding.rules import GATHERED

FORWARD, BACKWARD, MICROBATCH = "forward", "backward", "microbatch"             # what a collective hides behind
ONCE = "the update of other parameters"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
# what waits for tokens on their way to them, and for these
ROUTED, EXPERTS = "for experts", "for experts' weights"
FLOAT32, E4M3 = "f32", "f8e4m3fn"
# of a layer in float8, forward and backward: the largest values that devices agree on, one number each
SCALES = 12


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collectives of one kind, `runs` of them in a step.

    kind, dtype: as HLO spells them; axes: as `audit.Collective` has them. array_bytes: the whole array of an
    all-gather, reduce-scatter or all-reduce, what one GPU sends of others. waits: the name under which a step's exposed
    seconds are told. beside: the compute behind which it hides, "" where the step waits for all of it. layer: whether
    it belongs to a layer of a microbatch; else to its ends or the step. arrays: that travel one by one, equally large.
    """
    kind: str
    axes: Axes
    dtype: str
    array_bytes: float
    runs: float
    waits: str
    beside: str = ""
    layer: bool = True
    arrays: int = 1

    def ring_bytes(self, sizes: Mapping[str, int]) -> float:
        """What one GPU sends in a step, in a ring."""
        n = math.prod(sizes.get(axis) or int(axis[axis.index(":") + 1:-1]) for axis in self.axes)
        share = 1 if self.kind == "collective-permute" else (n - 1) / n * (2 if self.kind == "all-reduce" else 1)
        return self.runs * self.array_bytes * share


def of(placed: Placed, options: Options, practice: Practice = Practice()) -> list[Sent]:
    """Of a step on one device, in the words of `Sent`."""
    found = [*_tensor(placed, options, practice), *_experts(placed, options, practice),
             *_weights(placed, options, practice),
             *_context(placed, options, practice), *_stages(placed, options, practice)]
    if leading := placed.leading:
        ahead = (*_tensor(leading, options, practice), *_context(leading, options, practice))
        found += [dataclasses.replace(sent, layer=False) for sent in ahead]
    return [sent for sent in found if sent.axes and sent.array_bytes and sent.runs]


def summarized(found: list[Sent], sizes: Mapping[str, int]) -> list[dict]:
    """Merged by (kind, axes, dtype), largest first, in the form of `audit.summarize`; source: what waits for most of
    it."""
    merged = defaultdict(list)
    for sent in found:
        merged[sent.kind, sent.axes, sent.dtype].append(sent)
    rows = []
    for (kind, axes, dtype), same in merged.items():
        most = max(same, key=lambda sent: sent.ring_bytes(sizes))
        rows.append({"kind": kind, "axes": list(axes), "count": round(sum(sent.runs for sent in same)),
                     "bytes": round(sum(sent.ring_bytes(sizes) for sent in same)), "dtype": dtype,
                     "source": most.waits})
    return sorted(rows, key=lambda row: (-row["bytes"], row["kind"], row["axes"], row["dtype"]))


def by_axes(found: list[Sent], sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes that one GPU sends in a step, by mesh axes ("data+fsdp")."""
    sums = defaultdict(float)
    for sent in found:
        sums["+".join(sent.axes)] += sent.ring_bytes(sizes)
    return dict(sums)


# ---- what weights and gradients send ---------------------------------------------------------------------------------


# What waits for the weights of a part.
WAITS = {"layers": "fsdp", "experts": EXPERTS, "routers": "fsdp", "ends": "fsdp"}


def _weights(placed: Placed, options: Options, practice: Practice) -> Iterator[Sent]:
    """Gathered weights and gradients that are reduced to where [grads] has them, for every microbatch; once a step,
    gradients that [grads] leaves whole, and new weights that [optimizer] alone splits."""
    runs, grads = options.microbatches * placed.layers(options, practice), (
        "bf16" if practice.grad_bytes == 2 else FLOAT32, practice.grad_bytes)
    arrays = 1 if practice.bucketed else placed.matrices
    for move in placed.moves:
        n, layer = move.elements, move.part in ("layers", "experts", "routers")
        if move.part == "lookup":
            yield _lookup(placed, options, move)
        elif move.part == "update":
            yield _update(placed, practice, move, grads)
        elif move.kind != GATHER:
            waits = "context" if move.kind == SUM else WAITS[move.part]
            yield Sent(move.kind, move.axes, grads[0], n * grads[1], runs if layer else options.microbatches, waits,
                       BACKWARD * layer, layer, arrays if layer else 1)
        elif move.part == "routers":
            yield Sent(GATHER, move.axes, FLOAT32, 4 * n, 2 * runs, "fsdp", FORWARD)
        elif not layer:
            yield Sent(GATHER, move.axes, placed.dtype, n * placed.itemsize, options.microbatches, "fsdp", "", False)
        else:
            in_float8 = placed.float8 and move.part == "layers"
            dtype, size = (E4M3, 1) if in_float8 else (placed.dtype, placed.itemsize)
            for beside in (FORWARD, BACKWARD):
                yield Sent(GATHER, move.axes, dtype, n * size, runs, WAITS[move.part], beside, True,
                           arrays if move.part == "layers" else 1)


def _lookup(placed: Placed, options: Options, move: WeightMove) -> Sent:
    """Rows from the devices that hold columns of a table, or the cotangents of rows."""
    rows, runs = placed.tokens(options) * placed.cfg.embed_dim * placed.itemsize, options.microbatches * move.elements
    if move.kind == GATHER:
        rows *= placed.layout.num_shards(move.axes)
    return Sent(move.kind, move.axes, placed.dtype, rows, runs, "context" if move.kind == GATHER else "fsdp", "", False)


def _update(placed: Placed, practice: Practice, move: WeightMove, grads: tuple[str, int]) -> Sent:
    dtype, size = (placed.dtype, placed.itemsize) if move.kind == GATHER else grads
    beside = MICROBATCH if practice.bucketed else ONCE
    if move.kind == SUM:    # of ours XLA leaves the all-reduces to the end, one behind the other
        beside *= practice.bucketed
    return Sent(move.kind, move.axes, dtype, move.elements * size, 1, "once a step", beside, False)


# ---- what activations send -------------------------------------------------------------------------------------------


def _tensor(placed: Placed, options: Options, practice: Practice) -> Iterator[Sent]:
    """Around products whose contracted dim is split: a gather before and a reduce-scatter behind each pair, where the
    residual stream is split as well, or one all-reduce. The backward mirrors it, and does again what remat says.

    A table whose rows are split sums what devices look up, and the head what they make of its cotangent.
    """
    (forward, backward, _), (looked_up, loss, looked_up_back) = placed.visits(options, practice), placed.ends(
        options, practice)
    split = frozenset(placed.layout.mesh_axes("activations", "residual_seq"))
    stream = placed.tokens(options) * placed.cfg.embed_dim * placed.itemsize
    send = lambda kind, axes, times, layer: Sent(kind, axes, placed.dtype, stream, times, "tensor", "", layer)
    if placed.float8:
        axes = tuple(a for a in AXES if placed.layout.sizes[a] > 1)
        yield Sent("all-reduce", axes, FLOAT32, 4, SCALES * forward, "scales")
    for product in placed.layer.products:
        gathers, sums = _again(options.remat, practice, product)
        gathered, summed = (product.share * (forward + backward * (1 + again)) for again in (gathers, sums))
        if product.row and set(product.row) <= split:
            sent = send("all-gather", product.row, gathered, True)
            yield dataclasses.replace(sent, array_bytes=stream / placed.itemsize, dtype=E4M3) if placed.float8 else sent
            yield send("reduce-scatter", product.row, summed, True)
        elif product.row:
            yield send("all-reduce", product.row, summed, True)
    vocab = tuple(a for a in placed.layout.mesh_axes(GATHERED, "vocab") if a != "stage")
    # rows looked up are scattered, their cotangent gathered; of the head the reverse
    if vocab and set(vocab) <= split:
        yield send("all-gather", vocab, loss + looked_up_back, False)
        yield send("reduce-scatter", vocab, looked_up + loss, False)
    elif vocab:
        yield send("all-reduce", vocab, looked_up + loss, False)


def _experts(placed: Placed, options: Options, practice: Practice) -> Iterator[Sent]:
    """Tokens on their way to experts and back: x and y, in the backward x again, dy and dx, and which experts with
    which weights. Gathered and scattered, or exchanged in rooms of which the fullest decides how many rounds it takes:
    one, of equally busy experts."""
    found = routed.of(placed, options)
    if not found:
        return
    forward, backward = (found.share * visits for visits in placed.visits(options, practice)[:2])
    stream, choices = found.seen * found.sizes.embed_dim * placed.itemsize, found.seen * found.choices * 4
    brought, summed = found.axes
    send = lambda kind, axes, dtype, sent_bytes, runs: Sent(kind, axes, dtype, sent_bytes, runs, ROUTED)
    there, back = ("all-to-all",) * 2 if found.by_all_to_all else ("all-gather", "reduce-scatter")
    yield send(there, brought, placed.dtype, stream, forward + 2 * backward)
    yield send(back, brought, placed.dtype, stream, forward + backward)
    for dtype in ("s32", FLOAT32):
        yield send(there, brought, dtype, choices, forward + backward)
    yield send(back, brought, FLOAT32, choices, backward)
    if found.by_all_to_all:         # the number of rounds
        yield send("all-reduce", brought, "s32", 4, forward + backward)
    yield send("all-reduce", summed, placed.dtype, stream, forward + backward)
    yield send("all-reduce", summed, FLOAT32, choices, backward)


def _again(remat: str, practice: Practice, product: Product) -> tuple[float, float]:
    """How often a layer's backward does the gather before a product again, and the sum behind it."""
    if practice.recomputed is not None:
        return practice.recomputed[0], practice.recomputed[0]
    return float(remat != "none"), float(remat in ("full", "offload") and not product.unread)


def _context(placed: Placed, options: Options, practice: Practice) -> Iterator[Sent]:
    """Where sequences are split. A ring hides behind attention, the others stand before it; remat repeats neither."""
    axes = tuple(placed.layout.mesh_axes("activations", "seq"))
    c, (forward, backward, _), dtype = placed.layout.num_shards(axes), placed.visits(options, practice), placed.dtype
    if c == 1:
        return
    query, key = (placed.tokens(options) * width for width in placed.widths[:2])
    size = placed.itemsize
    send = lambda kind, elements, bytes_each, times, beside="": Sent(
        kind, axes, FLOAT32 if bytes_each == 4 else dtype, elements * bytes_each, times, "context", beside)
    if options.method == "ring":
        yield from _ring(placed, options, practice, send, 2 * key)
    elif options.method == "gather":        # whatever the window: keys and values whole, twice, and gradients back
        yield send("all-gather", 2 * c * key, size, forward + backward)
        yield send("reduce-scatter", 2 * c * key, 4, backward)
    else:                                   # q, k, v and o; in the backward as well, and do, dq, dk and dv
        yield send("all-to-all", 2 * (query + key), size, forward + 2 * backward)


def _ring(placed: Placed, options: Options, practice: Practice, send, pairs: float) -> Iterator[Sent]:
    """pairs: elements of K and V on a device; beside them travel float32 sums of their gradients."""
    c, (forward, backward, _), size = placed.num_shards("seq"), placed.visits(options, practice), placed.itemsize
    near = flops.local_layers(placed.cfg, options.seq_len)
    if near:            # `parallel.band`: as far as the window reaches, and the sums home by the shorter way
        reach = min(-(-(placed.cfg.window - 1) * 2 * c // options.seq_len), 2 * c - 1)
        home = max(reach - 1, 0) + min(reach, 2 * c - reach)
        yield send("collective-permute", pairs, size, near * forward * reach, ATTENTION)
        yield send("collective-permute", pairs, size, near * backward * reach, ATTENTION_BACKWARD)
        yield send("collective-permute", pairs, 4, near * backward * home, ATTENTION_BACKWARD)
    if near < 1:
        forward, backward = (1 - near) * forward, (1 - near) * backward
        yield send("collective-permute", pairs, size, forward * (c - 1), ATTENTION)
        yield send("collective-permute", pairs, size, backward * (c - 1), ATTENTION_BACKWARD)
        # The sums of dK and dV: float32 as long as a loop carries them, rounded before the hop behind it
        # (`parallel.ring`).
        in_float32 = c - 1 if c > 2 or placed.masked(options, practice) else 0
        yield send("collective-permute", pairs, 4, backward * in_float32, ATTENTION_BACKWARD)
        yield send("collective-permute", pairs, size, backward * (c - in_float32), ATTENTION_BACKWARD)


def _stages(placed: Placed, options: Options, practice: Practice) -> Iterator[Sent]:
    """The boundaries of stages, forward and backward. In our pipelines all stages get the last one's output and the
    cotangent of the first one's input, and where they share the vocabulary add up what is looked up and what the head's
    cotangent makes.

    A chunk of layers is stored beside those that follow it and worked on by another stage: once a step it travels
    there, split as it is stored, and its gradient back.
    """
    p, chunks, size = placed.mesh.sizes["stage"], options.chunks, placed.itemsize
    if p == 1:
        return
    boundary = size * placed.tokens(options) * placed.cfg.embed_dim / placed.stream_shards
    send = lambda kind, runs: Sent(kind, ("stage",), placed.dtype, boundary, runs, "stage", "", False)
    move = lambda kind, axis, dtype, sent_bytes: Sent(
        kind, (axis,), dtype, sent_bytes, 1, "once a step", MICROBATCH, False)
    forward, backward, _ = (chunks * visits / placed.layers(options, practice)
                            for visits in placed.visits(options, practice))
    yield send("collective-permute", forward + backward)
    if not placed.masked(options, practice):
        return
    (looked_up, loss, looked_up_back), (begun, _, begun_back) = placed.ends(options, practice), placed.begun(
        options, practice)
    shared = "stage" in placed.layout.mesh_axes(GATHERED, "vocab")
    # out of the leading layers, and back to the embedding
    beside = begun + looked_up_back if placed.leading else 0
    yield send("all-reduce", loss + begun_back + beside + shared * (looked_up + loss))
    weights, states = (placed.dtype, size * placed.held.layers_read), (FLOAT32, 4 * placed.held.layers_stored)
    for dtype, sent_bytes in (weights, states) if chunks > 1 else ():
        yield move("all-to-all", "stage" if chunks % p == 0 else f"stage:{chunks}~", dtype, sent_bytes)
        if chunks % p:
            yield move("collective-permute", "stage", dtype, sent_bytes)
