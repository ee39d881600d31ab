"""Lists the collectives of a step in closed formulas: arrays, mesh axes, counts, and the compute that each overlaps.

`inspect` compares this list with the compiled program's list, and `price` computes times from it. `placed` gives the
collectives of weights and gradients; those of activations follow from the sizes of a microbatch.
"""
from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.formulas.sizes import (BACKWARD, FLOAT32, FORWARD, GATHER, MICROBATCH, ONCE, SUM, Axes, Product,
                                           Sent, WeightMove)
from meshtrain.names import AXES
from meshtrain.sharding.rules import GATHERED

# exposed seconds of the exchange of tokens, and of experts' weights
ROUTED, EXPERTS = "for experts", "for experts' weights"
E4M3 = "f8e4m3fn"
UPDATE, SCALES = "once a step", "scales"        # labels
# all-reduces of a float8 layer's maxima, forward and backward, one number each
NUM_SCALES = 12


Part = Callable[[Placed, Options], Iterator[Sent]]


def of(placed: Placed, options: Options, parts: Mapping[str, Part] | None = None) -> list[Sent]:
    """Return the collectives of a step on one device. parts: the functions that list the collectives; None: `PARTS`."""
    parts = parts or PARTS
    sents = [sent for part in parts.values() for sent in part(placed, options)]
    if leading := placed.leading:
        sents += [sent._replace(layer=False)
                  for name in IN_LAYERS for sent in parts[name](leading, options)]
    if depths := placed.depths:
        sents += [sent._replace(layer=False, overlaps="")
                  for part in (*(parts[name] for name in (*IN_LAYERS, "weights")), _merge)
                  for sent in part(depths, options)]
    return [sent for sent in sents if sent.axes and sent.array_bytes and sent.runs]


def summarize(sents: list[Sent], sizes: Mapping[str, int]) -> list[dict]:
    """Merge collectives by (kind, axes, dtype), largest first, in the form of `audit.summarize`. source: the label of
    the largest collective."""
    merged = defaultdict(list)
    for sent in sents:
        merged[sent.kind, sent.axes, sent.dtype].append(sent)
    rows = []
    for (kind, axes, dtype), same in merged.items():
        most = max(same, key=lambda sent: sent.ring_bytes(sizes))
        rows.append({"kind": kind, "axes": list(axes), "count": round(sum(sent.runs for sent in same)),
                     "bytes": round(sum(sent.ring_bytes(sizes) for sent in same)), "dtype": dtype,
                     "source": most.label})
    return sorted(rows, key=lambda row: (-row["bytes"], row["kind"], row["axes"], row["dtype"]))


def by_axes(sents: list[Sent], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes that one GPU sends in a step, by mesh axes ("data+fsdp")."""
    sums: dict[str, float] = defaultdict(float)
    for sent in sents:
        sums["+".join(sent.axes)] += sent.ring_bytes(sizes)
    return dict(sums)


# ---- weights and gradients -------------------------------------------------------------------------------------------


# Label of a part's weights.
LABELS = {"layers": "fsdp", "experts": EXPERTS, "routers": "fsdp", "merge": "fsdp", "ends": "fsdp"}
LAYER_PARTS = ("layers", "experts", "routers", "merge")     # moved in each pass through a layer


def weights(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the gathers of weights and the reductions of gradients.

    Each microbatch reduces gradients to the sharding of [grads]. Once a step, gradients that [grads] does not shard are
    reduced, and new weights that only [optimizer] shards are gathered.
    """
    runs, arrays = options.microbatches * placed.layers(options), placed.matrices
    visits = placed.visits(options)[:2]
    ends = options.microbatches * (1 + placed.num_depths)       # each depth gathers the embedding and the head again
    for move in placed.moves:
        n, layer = move.elements, move.part in LAYER_PARTS
        if move.part == "lookup":
            yield _lookup(placed, options, move)
        elif move.part == "update":
            yield _update(placed, move)
        elif move.kind != GATHER:
            label = "context" if move.kind == SUM else LABELS[move.part]
            dtype, size = placed.reduction_dtype
            yield Sent(move.kind, move.axes, dtype, n * size,
                       runs if layer else ends, label, BACKWARD * layer, layer, arrays if layer else 1)
        elif move.part == "routers":
            yield Sent(GATHER, move.axes, FLOAT32, 4 * n, sum(visits), "fsdp", FORWARD)
        elif not layer:
            yield Sent(GATHER, move.axes, placed.dtype, n * placed.itemsize, ends, "fsdp", "", False)
        else:
            in_float8 = placed.float8 and move.part == "layers"
            dtype, size = (E4M3, 1) if in_float8 else (placed.dtype, placed.itemsize)
            # Outside a layer's remat, the gathered weights of a merge are saved.
            once = move.part == "merge" and options.remat != "none"
            for overlaps, times in list(zip((FORWARD, BACKWARD), visits))[:1 if once else 2]:
                yield Sent(GATHER, move.axes, dtype, n * size, times, LABELS[move.part], overlaps, True,
                           arrays if move.part == "layers" else 1)


def _lookup(placed: Placed, options: Options, move: WeightMove) -> Sent:
    """Return the exchange of looked-up rows with the devices that hold columns of the table, or the gather of the rows'
    cotangents."""
    rows = placed.tokens(options) * placed.cfg.embed_dim * placed.itemsize
    runs = placed.ends(options)[1] * move.elements
    if move.kind == GATHER:
        rows *= placed.layout.num_shards(move.axes)
    return Sent(move.kind, move.axes, placed.dtype, rows, runs, "context" if move.kind == GATHER else "fsdp", "", False)


def _update(placed: Placed, move: WeightMove) -> Sent:
    """Return a reduction of gradients or a gather of new weights, once a step."""
    dtype, size = (placed.dtype, placed.itemsize) if move.kind == GATHER else placed.reduction_dtype
    # XLA runs all-reduces at the end, one after the other.
    overlaps = "" if move.kind == SUM else ONCE
    return Sent(move.kind, move.axes, dtype, move.elements * size, 1, UPDATE, overlaps, False)


# ---- activations -----------------------------------------------------------------------------------------------------


def tensor(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the collectives around products whose contracted dim is sharded.

    With sequence parallelism each pair of products has an all-gather before it and a reduce-scatter after it; otherwise
    it has one all-reduce. The backward mirrors them, and repeats those that remat recomputes. A table sharded by rows
    needs a sum of the looked-up rows, and the head a sum of its input's cotangent.
    """
    (forward, backward, _), (looked_up, loss, looked_up_back) = placed.visits(options), placed.ends(options)
    split = frozenset(placed.layout.mesh_axes("activations", "residual_seq"))
    stream = placed.tokens(options) * placed.cfg.embed_dim * placed.itemsize

    def send(kind: str, axes: Axes, times: float, layer: bool) -> Sent:
        return Sent(kind, axes, placed.dtype, stream, times, "tensor", "", layer)
    if placed.float8:
        axes = tuple(a for a in AXES if placed.layout.sizes[a] > 1)
        yield Sent("all-reduce", axes, FLOAT32, 4, NUM_SCALES * forward, SCALES)
    recomputed = placed.recomputation(options)
    for product in placed.layer.products:
        if product.between:
            yield from _adapter(placed, options, product)
            continue
        gathered = product.share * (forward + backward * (1 + recomputed.gathers))
        summed = product.share * (forward + backward * (1 + recomputed.products * (1 - product.unread)))
        summed -= product.share * backward * product.whole_inputs
        if product.row and set(product.row) <= split:
            sent = send("all-gather", product.row, gathered, True)
            yield sent._replace(array_bytes=stream / placed.itemsize, dtype=E4M3) if placed.float8 else sent
            yield send("reduce-scatter", product.row, summed, True)
        elif product.row:
            yield send("all-reduce", product.row, summed, True)
    for mixer in placed.mixers:
        yield from mixer.reductions(placed, options)
    vocab = tuple(a for a in placed.layout.mesh_axes(GATHERED, "vocab") if a != "stage")
    # Looked-up rows are reduce-scattered, their cotangent all-gathered; the head does the reverse.
    head_back = loss if backward else 0
    looked_up_back *= any(info.role == "embedding" and info.trainable for info in placed.rows)
    if vocab and set(vocab) <= split:
        yield send("all-gather", vocab, loss + looked_up_back, False)
        yield send("reduce-scatter", vocab, looked_up + head_back, False)
    elif vocab:
        yield send("all-reduce", vocab, looked_up + head_back, False)


def _adapter(placed: Placed, options: Options, product: Product) -> Iterator[Sent]:
    """Yield the collectives of an adapter's matrix. If the adapter's input dim is split, the array between its two
    matrices, [tokens, rank], is summed over the shards. If its columns are split, the cotangent of that array is summed
    over the shards. Sequence parallelism splits the tokens of an outward matrix, whose gradient is summed over the
    shards."""
    forward, backward, weights = placed.visits(options)
    if product.outward:
        gradient_bytes = 4 * product.k * product.n * placed.stream_shards
        yield Sent("all-reduce", product.between, FLOAT32, gradient_bytes, product.share * weights, "tensor")
        return
    width = product.n if product.row else product.k
    send = functools.partial(Sent, axes=product.between, dtype=placed.dtype, label="tensor",
                             array_bytes=placed.tokens(options) * width * placed.itemsize)
    if not product.row:
        yield send("all-reduce", runs=product.share * backward)
        return
    split = set(product.row) <= set(placed.layout.mesh_axes("activations", "residual_seq"))
    summed = product.share * (forward + backward * placed.recomputation(options).products)
    yield send("reduce-scatter" if split else "all-reduce", runs=summed)
    if split:
        yield send("all-gather", runs=product.share * backward)


def _merge(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the collectives around the merge of each depth of MTP, whose columns are split. With sequence parallelism
    both inputs are gathered, their cotangents reduce-scattered, and an all-to-all exchanges columns of the result for
    rows; otherwise the columns are gathered, and the cotangents all-reduced."""
    split = tuple(a for a in placed.layout.mesh_axes("activations", "mlp") if placed.layout.sizes[a] > 1)
    if not split:
        return
    forward, backward, _ = placed.visits(options)
    stream = placed.tokens(options) * placed.cfg.embed_dim * placed.itemsize

    def send(kind: str, array_bytes: float, runs: float) -> Sent:
        return Sent(kind, split, placed.dtype, array_bytes, runs, "tensor", "", False)
    if set(split) <= set(placed.layout.mesh_axes("activations", "residual_seq")):
        yield send("all-gather", stream, 2 * forward)
        yield send("reduce-scatter", stream, 2 * backward)
        yield send("all-to-all", stream / placed.layout.num_shards(split), forward + backward)
    else:
        yield send("all-gather", stream, forward)
        yield send("all-reduce", stream, 2 * backward)


def experts(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the exchange of tokens with experts.

    The forward exchanges x and y; the backward x, dy and dx; both exchange the choices with their weights. Tokens are
    gathered and scattered, or exchanged in buffers. Balanced experts need one round.
    """
    routed = placed.route(options)
    if not routed:
        return
    forward, backward = (routed.share * visits for visits in placed.visits(options)[:2])
    stream, choices = routed.seen * routed.sizes.embed_dim * placed.itemsize, routed.seen * routed.choices * 4
    brought, summed = routed.axes

    def send(kind: str, axes: Axes, dtype: str, sent_bytes: float, runs: float) -> Sent:
        return Sent(kind, axes, dtype, sent_bytes, runs, ROUTED)
    there, back = ("all-to-all",) * 2 if routed.by_all_to_all else ("all-gather", "reduce-scatter")
    yield send(there, brought, placed.dtype, stream, forward + 2 * backward)
    yield send(back, brought, placed.dtype, stream, forward + backward)
    for dtype in ("s32", FLOAT32):
        yield send(there, brought, dtype, choices, forward + backward)
    yield send(back, brought, FLOAT32, choices, backward)
    if routed.by_all_to_all:         # the number of rounds
        yield send("all-reduce", brought, "s32", 4, forward + backward)
    yield send("all-reduce", summed, placed.dtype, stream, forward + backward)
    yield send("all-reduce", summed, FLOAT32, choices, backward)


def _context(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the collectives of context parallelism for each kind of mixer."""
    if placed.num_shards("seq") > 1:
        for mixer in placed.mixers:
            yield from mixer.exchanges(placed, options)


def _stages(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the sends between stages, forward and backward.

    All stages receive the last stage's output and the cotangent of the first stage's input. If stages shard the
    vocabulary, they sum the looked-up rows and the head's cotangents. With several chunks, a chunk is stored on one
    stage and computed on another; once a step its weights are sent to the computing stage and its gradients back.
    """
    p, chunks, size = placed.mesh.sizes["stage"], options.chunks, placed.itemsize
    if p == 1:
        return
    boundary = size * placed.tokens(options) * placed.cfg.embed_dim / placed.stream_shards

    def send(kind: str, runs: float) -> Sent:
        return Sent(kind, ("stage",), placed.dtype, boundary, runs, "stage", "", False)

    def move(kind: str, axis: str, dtype: str, sent_bytes: float) -> Sent:
        return Sent(kind, (axis,), dtype, sent_bytes, 1, UPDATE, MICROBATCH, False)
    forward, backward, _ = (chunks * visits / placed.layers(options) for visits in placed.visits(options))
    yield send("collective-permute", forward + backward)
    if not placed.runs_masked(options):
        return
    (looked_up, loss, looked_up_back), (begun, losses, begun_back) = placed.ends(options), placed.boundaries(options)
    shared = "stage" in placed.layout.mesh_axes(GATHERED, "vocab")
    # The output of the leading layers, and its cotangent.
    leading = begun + looked_up_back - loss + losses if placed.leading else 0
    yield send("all-reduce", losses + begun_back + leading + shared * (looked_up + loss))
    weights, states = (placed.dtype, size * placed.held.layers_read), (FLOAT32, 4 * placed.held.layers_stored)
    for dtype, sent_bytes in (weights, states) if chunks > 1 else ():
        yield move("all-to-all", "stage" if chunks % p == 0 else f"stage:{chunks}~", dtype, sent_bytes)
        if chunks % p:
            yield move("collective-permute", "stage", dtype, sent_bytes)


# Which functions list the collectives of a step, and which of these are in a layer.
PARTS: dict[str, Part] = {"tensor": tensor, "experts": experts, "weights": weights, "context": _context,
                          "stages": _stages}
IN_LAYERS = ("tensor", "experts", "context")
