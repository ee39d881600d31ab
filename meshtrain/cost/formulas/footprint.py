"""Computes the memory of a step on one device in closed formulas: states, weights, residuals of a microbatch, and
temporaries of one layer.

The peak is reached when all layers have saved their residuals: in the loss, which holds logits, or in the backward of
the last layer. Which arrays are saved follows the rematerialization of `model.block`. The widths of other
temporaries were read off the buffers of programs compiled for GPUs. A width is a number of elements per token.
"""
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

from meshtrain import pattern
from meshtrain.cost.formulas import calibrations
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import ModelWeights
from meshtrain.cost.formulas.placed import Placed, compute_itemsize
from meshtrain.cost.formulas.sizes import GATHER, SCATTER
from meshtrain.parallel.pipeline import schedules
from meshtrain.training import accumulators


Widths = tuple[float, float]


# The options that the functions kept below do not read. A search compares many schedules for each layout.
NOT_READ = {"schedule", "chunks", "attended", "optimizer_bytes"}
_read_options = operator.attrgetter(*sorted({field.name for field in dataclasses.fields(Options)} - NOT_READ))


def _keep(compute: Callable[[Placed, Options], Widths]) -> Callable[[Placed, Options], Widths]:
    """Cache the values of a function in the layout, by all options except those of `NOT_READ`."""
    @functools.wraps(compute)
    def read(placed: Placed, options: Options) -> Widths:
        key = (compute.__name__, *_read_options(options))
        if key not in placed.footprints:
            placed.footprints[key] = compute(placed, options)
        return placed.footprints[key]
    return read


def memory(placed: Placed, options: Options) -> dict[str, int]:
    """Return the bytes on one device by kind, with the keys of `inspect`. grads: the gradient accumulators of the
    microbatch loop. activations: all temporaries. teacher: see `TeacherCost.add`."""
    held = _states(placed, options)
    if placed.mesh.sizes["stage"] > 1:
        weights, temporaries = _beside_slots(placed, options)
        held["activations"] = weights + slot_bytes(placed, options) + temporaries
    else:
        held["activations"] = _weights_and_grads(placed, options) + _in_layers(placed, options)
    whole = {name: int(count) for name, count in held.items()}
    whole |= {"total": sum(whole.values())}
    whole |= {"host": int(options.host_bytes * placed.held.stored)} if options.host_bytes else {}
    return options.teacher.beside(placed, options).add(whole) if options.teacher else whole


def least_bytes(weights: ModelWeights, options: Options) -> float:
    """Return a lower bound of the total of `memory` for any microbatches, schedule and remat: the bytes of states, and
    the weights of a stage."""
    states = _states(weights, options)
    if weights.layout.sizes["stage"] > 1:
        return sum(states.values()) + compute_itemsize(weights.cfg) * weights.held.used
    return states["params"] + states["optimizer"]


def _states(model: Placed | ModelWeights, options: Options) -> dict[str, float]:
    """Return the bytes of parameters, gradient accumulators and optimizer. A pipeline's loop has the accumulators of a
    full stage."""
    held = model.held
    return {"params": held.stored_bytes,
            "grads": accumulators.ITEMSIZE * (held.trained if model.layout.sizes["stage"] > 1 else held.grads),
            "optimizer": options.optimizer_bytes * held.stored}


def _weights_and_grads(placed: Placed, options: Options) -> float:
    """Return the bytes of the weights that the microbatch loop reads, and of gradients outside the accumulators.

    With one microbatch the gradients of embedding and head need no accumulator, because they are computed before or
    after the gradients of the layers.
    """
    alone = options.microbatches == 1
    if not placed.by_layer:          # a matrix's gradient and its sum live outside the accumulators
        # Where gradients are reduce-scattered, XLA keeps the initial zeros of the head's gradient for all microbatches.
        zeros = accumulators.ITEMSIZE * placed.head.n * placed.head.k * bool(placed.moving(SCATTER, "ends"))
        return (placed.itemsize * placed.held.cast + 2 * accumulators.ITEMSIZE * placed.layer.largest + zeros
                - accumulators.ITEMSIZE * placed.held.ends_grads * alone)
    # XLA transposes shards that it concatenates along their last dim.
    return placed.held.moved + placed.held.transposed + placed.itemsize * placed.layer.largest


def _in_layers(placed: Placed, options: Options) -> float:
    """Return the bytes of the layers' residuals plus the larger of two temporaries: those of the loss and those of the
    last layer's backward."""
    cfg, size, tokens = placed.cfg, placed.itemsize, placed.tokens(options)
    experts = placed.route(options)
    kept = cfg.num_layers * (size * tokens * residual_width(placed, options) + (experts.saved_bytes if experts else 0))
    stream, chunk = cfg.embed_dim / placed.stream_shards, min(tokens, options.loss_chunk)
    head = placed.head.n * placed.head.k
    # A chunk's float32 logits and their gradient; the output, normed, and its gradient; the gathered head.
    loss = chunk * ((4 + size) * placed.head.n + size * cfg.embed_dim) + 3 * size * tokens * stream
    loss += size * head if placed.by_layer else 0
    loss += 4 * chunk * placed.head.n if options.teacher else 0     # the gradient at the teacher's tokens is added
    # The head's gradient, which is added to the sum before the layers' backward.
    gradient = accumulators.ITEMSIZE * head * placed.head.trained
    layer = size * tokens * _working_width(placed, options) + _part_grads_bytes(placed, options)
    layer = max(layer, _of_experts(placed, options))
    kept += size * tokens * _transpose_width(placed, options)
    alone = options.microbatches == 1 and not placed.by_layer       # the sum is the gradient, not yet reduced
    saved, backward = _depth_bytes(placed, options)
    in_loss = saved + (1 + placed.num_depths) * gradient
    return kept + max(loss + in_loss, backward + in_loss, layer + gradient * alone + _early_zeros(placed))


def _of_experts(placed: Placed, options: Options) -> float:
    """Return the temporaries of the backward of a layer's experts; 0 without experts."""
    if not (experts := placed.route(options)):
        return 0.0
    each = placed.itemsize * placed.tokens(options)
    inputs, weights = (each * width for width in _expert_backward_widths(placed, options))
    return each * _period_width(placed, options) + max(experts.inputs_bytes + inputs, experts.weights_bytes + weights)


def _depth_bytes(placed: Placed, options: Options) -> tuple[float, float]:
    """Return (the bytes that the depths of MTP save for their backward, the temporaries of that backward). Both are in
    memory during the loss, while the residuals of all layers are held."""
    if not (depths := placed.depths):
        return 0.0, 0.0
    each, stream = placed.itemsize * placed.tokens(options), placed.cfg.embed_dim / placed.stream_shards
    # The inputs of the merge, whole and before their norms; the normed output and its cotangent.
    width = residual_width(depths, options) + 2 * placed.cfg.embed_dim + 4 * stream
    experts = depths.route(options)
    saved = placed.num_depths * (each * width + (experts.saved_bytes if experts else 0.0))
    return saved, accumulators.ITEMSIZE * depths.held.grads + max(
        each * _working_width(depths, options), _of_experts(depths, options))


def _early_zeros(placed: Placed) -> float:
    """Return the bytes of the zeros that initialize the embedding's gradient, if XLA allocates them before the layers'
    backward. XLA does so where the table is gathered over context and its rows are not split; elsewhere XLA allocates
    the zeros later."""
    layout = placed.layout
    whole = layout.num_shards(layout.mesh_axes("params", "vocab")) == 1
    if layout.sizes["context"] == 1 or "context" not in layout.mesh_axes("params", "embed") or not whole:
        return 0
    return accumulators.ITEMSIZE * sum(info.size for info in placed.rows if info.role == "embedding"
                                       and info.axes[0] == "vocab" and info.trainable)


def residual_width(placed: Placed, options: Options) -> float:
    """Return the elements per token that a layer saves for its backward, mean over layers."""
    cfg, h, size = placed.cfg, placed.cfg.embed_dim, placed.itemsize
    stream, f, blocks = h / placed.stream_shards, placed.mlp_width, placed.blocks
    gates, again = 1 + cfg.gated, _never_again(placed, options)
    sums = placed.mean(lambda mixer: mixer.sums_width(size)) + _states_width(placed, options)
    if options.remat in ("full", "offload"):
        return stream + again if options.remat == "full" else again
    routing = _routing_width(placed) / placed.stream_shards
    # Norms after attention and MLP read the outputs of their last matmuls.
    placement = cfg.norm_placement
    whole, chosen = 2 * stream * (placement == "both"), stream * (placement != "before" and not cfg.num_experts)
    if options.remat == "selective":
        mixers = placed.mean(lambda mixer: mixer.inward + mixer.outputs) + sums
        return blocks * stream + mixers + gates * f + routing / 2 + chosen
    # Without remat the inputs of matmuls are saved whole. The buffers of the microbatch loop hold attention's output
    # twice: in its own layout and in that of the matmul after it.
    twice = placed.mean(lambda mixer: mixer.outputs * (not mixer.outward)) * (options.microbatches > 1)
    mixers = placed.mean(lambda mixer: mixer.residual_width(size)) + sums
    return blocks * (stream + h) + mixers + twice + gates * f + routing + whole


def _never_again(placed: Placed, options: Options) -> float:
    """Return the elements per token that no remat policy recomputes. These are the outputs and states of mixers that
    need the whole sequence, where sequences are split; otherwise 0."""
    if placed.num_shards("seq") == 1:
        return 0.0
    return placed.mean(lambda mixer: mixer.outputs) + _states_width(placed, options)


def _states_width(placed: Placed, options: Options) -> float:
    """Return the elements per token of the recurrences' saved states, mean over layers."""
    return placed.mean(lambda mixer: mixer.states_width(options))


def _transpose_width(placed: Placed, options: Options) -> float:
    """Return the elements per token that XLA transposes before the backward, summed over all layers with experts.

    This happens without remat, where residuals are gathered from a sharded residual stream of several rows: these
    residuals have the tokens first. Layers without experts use that order throughout (`parts.tokens_first`).
    """
    cfg, layout = placed.cfg, placed.layout
    rows = options.global_batch / options.microbatches / layout.num_shards(layout.batch_axes)
    if not cfg.num_experts or options.remat != "none" or placed.stream_shards == 1 or rows <= 1:
        return 0
    return cfg.num_layers * pattern.share(cfg, mlps="e") * (cfg.embed_dim + cfg.embed_dim / placed.stream_shards)


def _routing_width(placed: Placed) -> float:
    """Return the width of the router's float32 logits and of the arrays that the balance loss saves of them, mean over
    layers."""
    cfg = placed.cfg
    return 2 * cfg.num_experts * pattern.share(cfg, mlps="e") * 4 / placed.itemsize


def _working_width(placed: Placed, options: Options) -> float:
    """Return the elements per token that live during a mixer's backward, in the layer with the widest arrays.

    Where collectives overlap a layer's matmuls, XLA delays some of the matmuls, so their operands live longer.
    """
    h, f, context = placed.cfg.embed_dim, _widest_mlp(placed), placed.num_shards("seq")
    if context > 1:
        return 6 * h + 4 * f + _period_width(placed, options, 2) + max((
            mixer.split_backward_width(placed.itemsize, options, context) for mixer in placed.mixers), default=0)
    moving = any(placed.moving(kind, "layers") for kind in (GATHER, SCATTER)) or placed.num_shards("mlp") > 1
    times = 4 if moving else 3
    mixers = max((mixer.backward_width(placed.itemsize, options, times) for mixer in placed.mixers), default=0)
    mlp = (4 if options.remat in ("full", "offload") else 3) if moving else 2
    return times * h + mixers + mlp * f + _others_width(placed, options, moving)


def _others_width(placed: Placed, options: Options, moving: bool) -> float:
    """Return what `_period_width` returns, for sequences that are not split. moving: whether collectives overlap a
    layer's matmuls.

    Values for layers that are split over data alone were read off programs compiled for 8 H100 with microbatches of 1,
    2 and 4 rows.
    """
    stretch = max(pattern.stretches(placed.cfg), key=lambda stretch: stretch.num_layers)
    if placed.mesh.sizes["stage"] > 1 or placed.cfg.num_experts or placed.num_shards("mlp") > 1:
        return moving * _period_width(placed, options)
    stream, f, others = placed.cfg.embed_dim / placed.stream_shards, _widest_mlp(placed), len(stretch.period) - 1
    if moving and options.remat == "selective":
        return others * (f + 3 * stream)
    if moving:
        return others * (3 * f + 4 * stream)
    # Their weights' gradients wait for those of the whole microbatch; recurrences recompute beside each other.
    grads = placed.layer.used / placed.tokens(options)
    return others * (3 * f + stream + grads) + _waiting_width(placed, options, stretch)


def _period_width(placed: Placed, options: Options, counted: int = 1) -> float:
    """Return the elements per token that live in the other layers of a period while one layer's backward runs. The
    layers of a period are one loop's body.

    XLA delays the weight gradients of these layers, their float32 norm gradients, and parts of their recurrences.
    counted: number of layers that other terms already include. Read off compiled programs.
    """
    stretch = max(pattern.stretches(placed.cfg), key=lambda stretch: stretch.num_layers)
    stream = placed.cfg.embed_dim / placed.stream_shards
    return (max(0, len(stretch.period) - counted) * (3 * _widest_mlp(placed) + 8 / placed.itemsize * stream)
            + _waiting_width(placed, options, stretch))


def _waiting_width(placed: Placed, options: Options, stretch) -> float:
    """Return the elements per token that live in a period's other recurrences during the first one's backward."""
    waiting = [width for mixer in placed.mixers for kind in stretch.period if kind.mixer == mixer.letter
               and (width := mixer.waiting_width(placed.itemsize, options))]
    return calibrations.WAITING_RECURRENCE * sum(waiting[1:])


def _widest_mlp(placed: Placed) -> float:
    """Return the largest MLP width on one device, without routed experts."""
    cfg = placed.cfg
    dense = cfg.mlp_dim if pattern.share(cfg, mlps="d") else 0
    return max(dense, cfg.shared_expert_dim if cfg.num_experts else 0) / placed.num_shards("mlp")


def _expert_backward_widths(placed: Placed, options: Options) -> tuple[float, float]:
    """Return the elements per token that live beside the experts' backward: (while input gradients are computed, while
    weight gradients are computed).

    The first includes recomputed inputs and outputs of attention, and the residual stream with its cotangents. XLA
    delays weight gradients until a collective of attention's backward is in flight. The second therefore includes the
    cotangents of attention and the sums of the norms' gradients.
    """
    h, layers = placed.cfg.embed_dim, []
    for mixer in placed.mixers:
        stream, inward = h / placed.stream_shards, mixer.inward
        remade = {"none": 0, "selective": mixer.queries / 2 + mixer.outputs / 2 + mixer.keys + mixer.values}.get(
            options.remat, h + mixer.outputs + inward)
        gathered = 2 * h if placed.stream_shards > 1 else 0
        ring = mixer.ring_width if placed.num_shards("seq") > 1 and options.method == "ring" else 0
        beside = 2 * mixer.pair_width + gathered + (7 if placed.num_shards("residual_seq") > 1 else 3) * stream + ring
        layers.append((remade + 3 * stream, beside))
    return tuple(map(max, zip(*layers))) if layers else (h, h)


def _part_grads_bytes(placed: Placed, options: Options) -> float:
    """Return the bytes of a layer's float32 gradient from one part of a microbatch, which lives together with that of
    the other part. Layers with experts are not cut into parts."""
    cfg = placed.cfg
    if not pattern.share(cfg, mlps="d") or placed.row_parts(options) == 1:
        return 0
    gates = 1 + cfg.gated
    mixers = placed.mean(lambda mixer: mixer.inward + mixer.outputs)
    of_dense = cfg.embed_dim * (mixers + (gates + 1) * _widest_mlp(placed))
    return accumulators.ITEMSIZE * (of_dense if cfg.num_experts else placed.layer.used)


# ---- pipelines -------------------------------------------------------------------------------------------------------


@_keep
def _beside_slots(placed: Placed, options: Options) -> Widths:
    """Return (the bytes of a stage's weights, the larger of two temporaries: those of the loss and those of a layer).
    """
    cfg, size, tokens = placed.cfg, placed.itemsize, placed.tokens(options)
    stream, chunk = cfg.embed_dim / placed.stream_shards, min(tokens, options.loss_chunk)
    # A chunk's float32 logits and their gradient; the stage's output as it is broadcast, normed, and its gradient. The
    # float32 gradients of head and embedding from one microbatch live together.
    loss = chunk * ((4 + size) * placed.head.n + size * cfg.embed_dim) + 7 * size * tokens * stream
    loss += (4 + placed.num_depths) * accumulators.ITEMSIZE * placed.head.n * placed.head.k
    saved, backward = _depth_bytes(placed, options)
    loss = max(loss, backward) + saved
    # A layer of B and one of F, with their weights sliced out of the stack.
    layer = size * tokens * (_working_width(placed, options) + 4 * stream + 2
                             * placed.mlp_width) + size * placed.layer.used
    if experts := placed.route(options):
        layer = max(layer, experts.staged_bytes + 4 * size * tokens * stream + size * placed.layer.used)
    layer += _period_bytes(placed, options)
    return size * placed.held.used, max(loss, layer)


def _period_bytes(placed: Placed, options: Options) -> float:
    """Return the bytes of the other layers of a period, all of which one tick computes. These are residuals read from
    the slots, float32 gradients, and temporaries that live during a layer's backward."""
    others = len(max(pattern.stretches(placed.cfg), key=lambda stretch: stretch.num_layers).period) - 1
    if others <= 0:
        return 0.0
    kept = slot_widths(placed, options)[0] + _period_width(placed, options) / others
    return others * (placed.itemsize * placed.tokens(options) * kept + 4 * placed.layer.used)


@_keep
def slot_widths(placed: Placed, options: Options) -> Widths:
    """Return the elements per token that a layer saves in slots: (F saves for B, B saves for a separate W).

    assumption: without remat, and for W, arrays as wide as the residual stream are not sharded.
    """
    h, f, size, blocks = placed.cfg.embed_dim, placed.mlp_width, placed.itemsize, placed.blocks
    stream, gates = h / placed.stream_shards, 1 + placed.cfg.gated
    placement, normed = placed.cfg.norm_placement, placed.mean(lambda mixer: mixer.norm_inputs)
    both, after, routing = placement == "both", placement != "before", _routing_width(placed) / placed.stream_shards
    kept, inward, outputs = (placed.mean(of) for of in (
        lambda mixer: mixer.residual_width(size), lambda mixer: mixer.inward, lambda mixer: mixer.outputs))
    states = _states_width(placed, options)
    for_backward = {"none": 2 * blocks * h + stream + kept + states + gates * f + 2 * h * both + routing,
                    "selective": (blocks + after * (not placed.cfg.num_experts)) * stream
                    + inward + outputs + states + gates * f + routing / 2,
                    "full": stream + _never_again(placed, options)}[options.remat]
    # Inputs of norms and their cotangents are always float32; some other float32 arrays are the same ones.
    biased = placed.cfg.norm == "layernorm"     # the bias has a gradient too
    apart = size == 2 or biased
    again = placed.mean(lambda mixer: mixer.outward)      # recomputed from saved arrays
    for_weights = 8 * (blocks * h * (1 + both) + normed) / size + blocks * h * biased + {
        "none": inward + (gates + 1) * f + (2 * h if apart else -normed - 2 * h * both),
        "selective": inward + again + (gates + 2) * f + (2 if apart else 1 + after) * h,
        "full": inward + outputs + again + (gates + 2 - after) * f + 4 * h}[options.remat]
    if experts := placed.route(options):
        for_weights += experts.weight_grad_bytes / placed.itemsize / placed.tokens(options)
    return for_backward, for_weights


def slot_bytes(placed: Placed, options: Options) -> float:
    """Return the bytes of a pipeline's slots, which hold the residuals of microbatches in a stage."""
    return slot_bytes_by_schedule(placed, options)(options.schedule, options.chunks)


def slot_bytes_by_schedule(placed: Placed, options: Options) -> Callable[[str, int], float]:
    """Return `slot_bytes` as a function of (schedule, chunks), which replace those of the options."""
    (for_backward, for_weights), p, m = slot_widths(placed, options), placed.mesh.sizes["stage"], options.microbatches
    stream, element_bytes = placed.cfg.embed_dim / placed.stream_shards, placed.itemsize * placed.tokens(options)
    leading = leading_bytes(placed, options)

    def of(schedule: str, chunks: int) -> float:
        _, slots = schedules.counts(schedule, p, m, chunks)
        depth = pattern.count_padded(placed.cfg, p * chunks) // (p * chunks)
        elements = depth * (slots["Q"] * for_backward + slots.get("Z", 0) * for_weights)
        elements += (slots["X"] + slots["D"]) * stream
        return element_bytes * elements + leading
    return of


def leading_bytes(placed: Placed, options: Options) -> float:
    """Return the bytes that the leading layers save for their backward, plus their outputs to the first stage."""
    if not (leading := placed.leading):
        return 0.0
    kept = leading.layer.depth * slot_widths(leading, options)[0] + placed.cfg.embed_dim / placed.stream_shards
    return placed.itemsize * placed.tokens(options) * placed.rounds(options) * kept
