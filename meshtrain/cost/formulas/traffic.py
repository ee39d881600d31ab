"""Lists the collectives of a step in closed formulas: arrays, mesh axes, counts, and the compute that each overlaps.

`inspect` compares this list with the compiled program's list, and `price` computes times from it. `placed` gives the
collectives of weights and gradients; those of activations follow from the sizes of a microbatch.
"""
from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.formulas.sizes import GATHER, SUM, Axes, WeightMove
from meshtrain.names import AXES
from meshtrain.sharding.rules import GATHERED

FORWARD, BACKWARD, MICROBATCH = "forward", "backward", "microbatch"             # what a collective overlaps
ONCE = "the update of other parameters"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
# exposed seconds of the exchange of tokens, and of experts' weights
ROUTED, EXPERTS = "for experts", "for experts' weights"
FLOAT32, E4M3 = "f32", "f8e4m3fn"
UPDATE, SCALES = "once a step", "scales"        # labels
# all-reduces of a float8 layer's maxima, forward and backward, one number each
NUM_SCALES = 12


@dataclasses.dataclass(frozen=True)
class Sent:
    """`runs` equal collectives of a step.

    kind, dtype: as HLO spells them; axes: as in `audit.Collective`. array_bytes: bytes of the whole array for an
    all-gather, reduce-scatter or all-reduce; for other kinds, the bytes that one GPU sends. label: the name under which
    exposed seconds are counted. overlaps: the compute that hides it; "" if the step waits for all of it. layer: whether
    it belongs to a layer of a microbatch. arrays: number of equal arrays that are sent one by one.
    """
    kind: str
    axes: Axes
    dtype: str
    array_bytes: float
    runs: float
    label: str
    overlaps: str = ""
    layer: bool = True
    arrays: int = 1

    def ring_bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes that one GPU sends in a step, in a ring."""
        n = math.prod(sizes.get(axis) or int(axis[axis.index(":") + 1:-1]) for axis in self.axes)
        share = 1 if self.kind == "collective-permute" else (n - 1) / n * (2 if self.kind == "all-reduce" else 1)
        return self.runs * self.array_bytes * share


Part = Callable[[Placed, Options], Iterator[Sent]]


def of(placed: Placed, options: Options, parts: Mapping[str, Part] | None = None) -> list[Sent]:
    """Return the collectives of a step on one device. parts: functions that list them, `PARTS` if None."""
    parts = parts or PARTS
    sents = [sent for part in parts.values() for sent in part(placed, options)]
    if leading := placed.leading:
        sents += [dataclasses.replace(sent, layer=False)
                  for name in IN_LAYERS for sent in parts[name](leading, options)]
    return [sent for sent in sents if sent.axes and sent.array_bytes and sent.runs]


def summarized(found: list[Sent], sizes: Mapping[str, int]) -> list[dict]:
    """Merge collectives by (kind, axes, dtype), largest first, in the form of `audit.summarize`. source: the label of
    the largest one."""
    merged = defaultdict(list)
    for sent in found:
        merged[sent.kind, sent.axes, sent.dtype].append(sent)
    rows = []
    for (kind, axes, dtype), same in merged.items():
        most = max(same, key=lambda sent: sent.ring_bytes(sizes))
        rows.append({"kind": kind, "axes": list(axes), "count": round(sum(sent.runs for sent in same)),
                     "bytes": round(sum(sent.ring_bytes(sizes) for sent in same)), "dtype": dtype,
                     "source": most.label})
    return sorted(rows, key=lambda row: (-row["bytes"], row["kind"], row["axes"], row["dtype"]))


def by_axes(found: list[Sent], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes that one GPU sends in a step, by mesh axes ("data+fsdp")."""
    sums = defaultdict(float)
    for sent in found:
        sums["+".join(sent.axes)] += sent.ring_bytes(sizes)
    return dict(sums)


# ---- weights and gradients -------------------------------------------------------------------------------------------


# Label of a part's weights.
LABELS = {"layers": "fsdp", "experts": EXPERTS, "routers": "fsdp", "ends": "fsdp"}
LAYER_PARTS = ("layers", "experts", "routers")      # moved in each pass through a layer


def weights(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the gathers of weights and the reductions of gradients.

    Each microbatch reduces gradients to the sharding of [grads]. Once a step, gradients that [grads] does not shard are
    reduced, and new weights that only [optimizer] shards are gathered.
    """
    runs, arrays = options.microbatches * placed.layers(options), placed.matrices
    for move in placed.moves:
        n, layer = move.elements, move.part in LAYER_PARTS
        if move.part == "lookup":
            yield _lookup(placed, options, move)
        elif move.part == "update":
            yield _update(placed, move)
        elif move.kind != GATHER:
            label = "context" if move.kind == SUM else LABELS[move.part]
            yield Sent(move.kind, move.axes, FLOAT32, n * 4, runs if layer else options.microbatches, label,
                       BACKWARD * layer, layer, arrays if layer else 1)
        elif move.part == "routers":
            yield Sent(GATHER, move.axes, FLOAT32, 4 * n, 2 * runs, "fsdp", FORWARD)
        elif not layer:
            yield Sent(GATHER, move.axes, placed.dtype, n * placed.itemsize, options.microbatches, "fsdp", "", False)
        else:
            in_float8 = placed.float8 and move.part == "layers"
            dtype, size = (E4M3, 1) if in_float8 else (placed.dtype, placed.itemsize)
            for overlaps in (FORWARD, BACKWARD):
                yield Sent(GATHER, move.axes, dtype, n * size, runs, LABELS[move.part], overlaps, True,
                           arrays if move.part == "layers" else 1)


def _lookup(placed: Placed, options: Options, move: WeightMove) -> Sent:
    """Return the exchange of looked-up rows with the devices that hold columns of the table, or the gather of the rows'
    cotangents."""
    rows, runs = placed.tokens(options) * placed.cfg.embed_dim * placed.itemsize, options.microbatches * move.elements
    if move.kind == GATHER:
        rows *= placed.layout.num_shards(move.axes)
    return Sent(move.kind, move.axes, placed.dtype, rows, runs, "context" if move.kind == GATHER else "fsdp", "", False)


def _update(placed: Placed, move: WeightMove) -> Sent:
    """Return a reduction of gradients or a gather of new weights, once a step."""
    dtype, size = (placed.dtype, placed.itemsize) if move.kind == GATHER else (FLOAT32, 4)
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
    send = lambda kind, axes, times, layer: Sent(kind, axes, placed.dtype, stream, times, "tensor", "", layer)
    if placed.float8:
        axes = tuple(a for a in AXES if placed.layout.sizes[a] > 1)
        yield Sent("all-reduce", axes, FLOAT32, 4, NUM_SCALES * forward, SCALES)
    recomputed = placed.recomputed(options)
    for product in placed.layer.products:
        gathered = product.share * (forward + backward * (1 + recomputed.gathers))
        summed = product.share * (forward + backward * (1 + recomputed.products * (1 - product.unread)))
        summed -= product.share * backward * product.whole_inputs
        if product.row and set(product.row) <= split:
            sent = send("all-gather", product.row, gathered, True)
            yield dataclasses.replace(sent, array_bytes=stream / placed.itemsize, dtype=E4M3) if placed.float8 else sent
            yield send("reduce-scatter", product.row, summed, True)
        elif product.row:
            yield send("all-reduce", product.row, summed, True)
    heads = tuple(placed.layout.mesh_axes("activations", "heads"))
    for mixer in placed.mixers:         # cotangents of narrow arrays that all heads read
        tokens, runs = placed.tokens(options), mixer.share * backward
        yield Sent("all-reduce", heads, placed.dtype, tokens * mixer.narrow * placed.itemsize, runs, "tensor")
        yield Sent("all-reduce", heads, FLOAT32, tokens * mixer.latents * 4, runs, "tensor")
    vocab = tuple(a for a in placed.layout.mesh_axes(GATHERED, "vocab") if a != "stage")
    # Looked-up rows are reduce-scattered, their cotangent all-gathered; the head does the reverse.
    if vocab and set(vocab) <= split:
        yield send("all-gather", vocab, loss + looked_up_back, False)
        yield send("reduce-scatter", vocab, looked_up + loss, False)
    elif vocab:
        yield send("all-reduce", vocab, looked_up + loss, False)


def experts(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the exchange of tokens with experts.

    The forward exchanges x and y; the backward x, dy and dx; both exchange the choices with their weights. Tokens are
    gathered and scattered, or exchanged in buffers. Balanced experts need one round.
    """
    found = placed.routed(options)
    if not found:
        return
    forward, backward = (found.share * visits for visits in placed.visits(options)[:2])
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


def _context(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the collectives of context parallelism for each kind of mixer. A ring overlaps attention; other methods
    overlap nothing. No remat policy repeats them."""
    axes = tuple(placed.layout.mesh_axes("activations", "seq"))
    if (c := placed.layout.num_shards(axes)) == 1:
        return
    tokens, size, dtype = placed.tokens(options), placed.itemsize, placed.dtype
    send = lambda kind, elements, bytes_each, times, overlaps="": Sent(
        kind, axes, FLOAT32 if bytes_each == 4 else dtype, elements * bytes_each, times, "context", overlaps)
    for mixer in placed.mixers:
        forward, backward = (mixer.share * visits for visits in placed.visits(options)[:2])
        if mixer.recurrent:
            yield from _states(mixer, placed, options, send)
        elif mixer.latents:     # with any method, and again in the backward; their gradients are float32
            yield send("all-gather", c * tokens * mixer.latents, size, forward + backward)
            yield send("reduce-scatter", c * tokens * mixer.latents, 4, backward)
            if options.method == "ulysses":     # q and o; q, o, do and dq
                yield send("all-to-all", tokens * (mixer.queries + mixer.outputs), size, forward + 2 * backward)
        elif options.method == "ring":
            yield from _ring(mixer, placed, options, send)
        elif options.method == "gather":        # at any window: whole keys and values, twice, and their gradients
            yield send("all-gather", c * tokens * (mixer.keys + mixer.values), size, forward + backward)
            yield send("reduce-scatter", c * tokens * (mixer.keys + mixer.values), 4, backward)
        else:                                   # q, k, v and o, again in the backward; do, dq, dk and dv
            both = mixer.queries + mixer.keys + mixer.values + mixer.outputs
            yield send("all-to-all", tokens * both, size, forward + 2 * backward)


def _states(mixer, placed: Placed, options: Options, send) -> Iterator[Sent]:
    """Yield the collectives of recurrences whose sequences are split (`parallel.context.recurrence`). All devices
    gather the effect of each device's tokens on a state, forward and backward, and the last tokens of each device for
    the convolution."""
    c, runs = placed.num_shards("seq"), 1 if options.method == "ulysses" else 2
    forward, backward = (mixer.share * visits for visits in placed.visits(options)[:2])
    rows = placed.tokens(options) * c / options.seq_len * runs
    matrix = mixer.heads * (mixer.key_dim ** 2 if mixer.letter != "M" else 1)
    yield send("all-gather", c * rows * (mixer.state + matrix), 4, forward + backward)
    tails = rows * (mixer.width - 1) * (mixer.queries + mixer.keys + mixer.values)
    yield send("collective-permute", tails / runs, placed.itemsize, runs * (forward + 2 * backward))


def _ring(mixer, placed: Placed, options: Options, send) -> Iterator[Sent]:
    """Yield the hops of K and V around the ring, and those of the float32 sums of their gradients."""
    c, size = placed.num_shards("seq"), placed.itemsize
    forward, backward = (mixer.share * visits for visits in placed.visits(options)[:2])
    pairs = placed.tokens(options) * (mixer.keys + mixer.values)
    if 0 < mixer.window < options.seq_len:
        # `parallel.band`: hops within the window, and gradients back the shorter way
        reach = min(-(-(mixer.window - 1) * 2 * c // options.seq_len), 2 * c - 1)
        home = max(reach - 1, 0) + min(reach, 2 * c - reach)
        yield send("collective-permute", pairs, size, forward * reach, ATTENTION)
        yield send("collective-permute", pairs, size, backward * reach, ATTENTION_BACKWARD)
        yield send("collective-permute", pairs, 4, backward * home, ATTENTION_BACKWARD)
        return
    yield send("collective-permute", pairs, size, forward * (c - 1), ATTENTION)
    yield send("collective-permute", pairs, size, backward * (c - 1), ATTENTION_BACKWARD)
    # The loop sends sums of dK and dV in float32, the last hop in the compute dtype (`parallel.ring`).
    in_float32 = c - 1 if c > 2 or placed.masked(options) else 0
    yield send("collective-permute", pairs, 4, backward * in_float32, ATTENTION_BACKWARD)
    yield send("collective-permute", pairs, size, backward * (c - in_float32), ATTENTION_BACKWARD)


def _stages(placed: Placed, options: Options) -> Iterator[Sent]:
    """Yield the sends between stages, forward and backward.

    All stages receive the last stage's output and the cotangent of the first stage's input.
    If stages shard the vocabulary, they sum the looked-up rows and the head's cotangents. With several chunks, a chunk
    is stored on another stage than the one that computes it; once a step its weights are sent to the computing stage
    and its gradients back.
    """
    p, chunks, size = placed.mesh.sizes["stage"], options.chunks, placed.itemsize
    if p == 1:
        return
    boundary = size * placed.tokens(options) * placed.cfg.embed_dim / placed.stream_shards
    send = lambda kind, runs: Sent(kind, ("stage",), placed.dtype, boundary, runs, "stage", "", False)
    move = lambda kind, axis, dtype, sent_bytes: Sent(
        kind, (axis,), dtype, sent_bytes, 1, UPDATE, MICROBATCH, False)
    forward, backward, _ = (chunks * visits / placed.layers(options) for visits in placed.visits(options))
    yield send("collective-permute", forward + backward)
    if not placed.masked(options):
        return
    (looked_up, loss, looked_up_back), (begun, _, begun_back) = placed.ends(options), placed.boundaries(options)
    shared = "stage" in placed.layout.mesh_axes(GATHERED, "vocab")
    # The output of the leading layers, and its cotangent.
    leading = begun + looked_up_back if placed.leading else 0
    yield send("all-reduce", loss + begun_back + leading + shared * (looked_up + loss))
    weights, states = (placed.dtype, size * placed.held.layers_read), (FLOAT32, 4 * placed.held.layers_stored)
    for dtype, sent_bytes in (weights, states) if chunks > 1 else ():
        yield move("all-to-all", "stage" if chunks % p == 0 else f"stage:{chunks}~", dtype, sent_bytes)
        if chunks % p:
            yield move("collective-permute", "stage", dtype, sent_bytes)


# Which functions list the collectives of a step, and which of these are in a layer.
PARTS: dict[str, Part] = {"tensor": tensor, "experts": experts, "weights": weights, "context": _context,
                          "stages": _stages}
IN_LAYERS = ("tensor", "experts", "context")
