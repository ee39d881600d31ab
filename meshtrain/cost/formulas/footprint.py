"""What a step holds on one device, in closed formulas: states, weights, what a microbatch leaves, what one layer needs.

The peak of a step lies where all layers have left what their backward reads: in the loss, beside logits, or in the
backward of the last layer. What is kept follows the rematerialization of `model.transformer`; what else lives then was
read off the buffers of programs compiled for GPUs, and stands here as widths of a token.
"""
from __future__ import annotations

from meshtrain.cost.formulas import routed
from meshtrain.cost.formulas.placed import GATHER, SCATTER, Options, Placed
from meshtrain.model import parts
from meshtrain.parallel.pipeline import schedules, stages


def memory(placed: Placed, options: Options) -> dict[str, int]:
    """Bytes on one device by kind, as `inspect` has them: grads are the accumulators that a microbatch adds to,
    activations everything that lives for a while."""
    held = {"params": placed.held.stored_bytes, "grads": 4 * placed.held.grads,
            "optimizer": options.optimizer_bytes * placed.held.stored}
    if placed.mesh.sizes["stage"] > 1:
        # in the loop: of a full stage
        held |= {"grads": 4 * placed.held.trained, "activations": _in_stages(placed, options)}
    else:
        held["activations"] = _beside_stored(placed, options) + _in_layers(placed, options)
    held = {name: int(count) for name, count in held.items()}
    return held | {"total": sum(held.values())}


def _beside_stored(placed: Placed, options: Options) -> float:
    """Weights as the loop over microbatches reads them, and gradients beside the accumulators; of one microbatch those
    of the ends are made before the layers' or after them, in no accumulator."""
    alone = options.microbatches == 1
    if not placed.by_layer:          # a matrix's gradient and its sum are made outside of the accumulators
        # Where gradients are scattered XLA keeps the zeros that the head's begins with, for all microbatches.
        zeros = 4 * placed.head.n * placed.head.k * bool(placed.moving(SCATTER, "ends"))
        return (placed.itemsize * placed.held.cast + 8 * placed.layer.largest + zeros
                - 4 * placed.held.ends_grads * alone)
    # Stored as they are. XLA turns shards that it joins along their last dim.
    return placed.held.moved + placed.held.turned + placed.itemsize * placed.layer.largest


def _in_layers(placed: Placed, options: Options) -> float:
    """What a microbatch keeps of its layers, and the more of what the loss and the last layer's backward need beside
    it."""
    cfg, size, tokens = placed.cfg, placed.itemsize, placed.tokens(options)
    experts = routed.of(placed, options)
    kept = cfg.num_layers * (size * tokens * kept_width(placed, options) + (experts.saved_bytes if experts else 0))
    stream, chunk = cfg.embed_dim / placed.stream_shards, min(tokens, options.loss_chunk)
    head = placed.head.n * placed.head.k
    # Logits of a chunk in float32 and their gradient; the output, normed and its gradient; the head gathered, and
    # turned.
    loss = chunk * ((4 + size) * placed.head.n + size * cfg.embed_dim) + 3 * size * tokens * stream
    loss += 2 * size * head if placed.by_layer else 0
    # The head's gradient in float32 stays until the layers are done.
    layer = size * tokens * _working_width(placed, options) + _of_parts(placed, options)
    if experts:
        inputs, weights = (size * tokens * width for width in _beside_experts(placed, options))
        layer = max(layer, experts.inputs_bytes + inputs, experts.weights_bytes + weights)
    kept += size * tokens * _turned_width(placed, options) + _begun_early(placed)
    return kept + 4 * head * placed.head.trained + max(loss, layer)


def _begun_early(placed: Placed) -> float:
    """Bytes of the zeros that the embedding's gradient begins with, where the table is gathered over context and its
    rows are whole: XLA makes them before the layers go backward, elsewhere behind."""
    layout = placed.layout
    whole = layout.num_shards(layout.mesh_axes("params", "vocab")) == 1
    if layout.sizes["context"] == 1 or "context" not in layout.mesh_axes("params", "embed") or not whole:
        return 0
    return 4 * sum(info.size for info in placed.rows if info.role == "embedding" and info.axes[0] == "vocab"
                   and info.trainable)


def kept_width(placed: Placed, options: Options) -> float:
    """Elements of a token that a layer keeps for its backward."""
    h = placed.cfg.embed_dim
    stream, (q, kv, f) = h / placed.stream_shards, placed.widths
    gates = 2 if placed.cfg.activation != "gelu" else 1
    again = q if placed.num_shards("seq") > 1 else 0          # attention over several devices is never repeated
    beside = _routing_width(placed) / placed.stream_shards
    # norms behind attention and MLP read what their last matmuls give
    placement = placed.cfg.norm_placement
    whole, chosen = 2 * stream * (placement == "both"), stream * (placement != "before" and not placed.cfg.num_experts)
    sums = 4 * placed.cfg.num_heads / placed.num_shards("heads") / placed.itemsize     # log-sum-exps, in float32
    # Without remat what matmuls read is kept whole, and where a loop over microbatches has buffers for it what
    # attention gives twice: as attention has it, and as the matmul behind.
    twice = q * (options.microbatches > 1)
    return {"none": 2 * stream + 2 * h + 2 * q + twice + 2 * kv + gates * f + _normed_width(placed) + beside
            + whole + sums,
            "selective": 2 * stream + 2 * q + 2 * kv + gates * f + beside / 2 + chosen + sums, "full": stream + again,
            "offload": again}[options.remat]


def _turned_width(placed: Placed, options: Options) -> float:
    """Elements of a token, of all layers with experts together, that XLA copies before the backward: what they keep
    without remat of a stream that is gathered has the tokens of several rows first.
    Other layers see them so throughout (`parts.tokens_first`)."""
    cfg, rows = placed.cfg, options.global_batch / options.microbatches / placed.layout.num_shards(
        placed.layout.batch_axes)
    turned = cfg.num_experts and options.remat == "none" and placed.stream_shards > 1 and rows > 1
    return (cfg.num_layers - cfg.first_dense_layers) * (cfg.embed_dim + cfg.embed_dim / placed.stream_shards) * bool(
        turned)


def _normed_width(placed: Placed) -> float:
    """Of what norms of queries and keys read, which lies beside what attention reads where no remat makes this
    again."""
    q, kv, _ = placed.widths
    return (placed.cfg.qk_norm != "off") * (q + kv)


def _routing_width(placed: Placed) -> float:
    """Of the router's float32 logits and what the balance loss keeps of them; the mean of all layers."""
    cfg = placed.cfg
    return 2 * cfg.num_experts * (1 - cfg.first_dense_layers
                                  / cfg.num_layers) * 4 / placed.itemsize if cfg.num_experts else 0


def _working_width(placed: Placed, options: Options) -> float:
    """Elements of a token that live while a layer's attention goes backward, of one with the widest MLP. Where
    collectives run beside a layer's matmuls, XLA puts some of these off, and what they read lives longer."""
    (q, kv, _), h, f, context = placed.widths, placed.cfg.embed_dim, _widest_mlp(placed), placed.num_shards("seq")
    if context > 1:
        attention = {"ring": 12 * q + 8 * kv, "gather": 10 * q + (6 * context + 2) * kv, "ulysses": 6 * q + 6 * kv}
        return 6 * h + attention[options.method] + 4 * f
    if not any(placed.moving(kind, "layers") for kind in (GATHER, SCATTER)) and placed.num_shards("mlp") == 1:
        return 3 * h + 3 * q + 3 * kv + 2 * f
    return 4 * h + 4 * q + 4 * kv + (4 if options.remat in ("full", "offload") else 3) * f


def _widest_mlp(placed: Placed) -> float:
    """Of a token, on one device, in the layer whose MLP for all tokens is the widest."""
    cfg = placed.cfg
    dense = cfg.mlp_dim if cfg.first_dense_layers or not cfg.num_experts else 0
    return max(dense, cfg.shared_expert_dim if cfg.num_experts else 0) / placed.num_shards("mlp")


def _beside_experts(placed: Placed, options: Options) -> tuple[float, float]:
    """Elements of a token that live beside experts that go backward, while inputs
    have their gradients made and while weights have.

    The first: what attention reads and gives, as far as it was made again, and the stream and its cotangents. XLA puts
    the second off until a collective of attention's backward is under way, whose cotangents live then, and what it sums
    over the tokens of norms."""
    (q, kv, _), h = placed.widths, placed.cfg.embed_dim
    stream, remade = h / placed.stream_shards, {"none": 0, "selective": q + 2 * kv}.get(
        options.remat, h + 2 * q + 2 * kv)
    inputs = remade + 3 * stream
    gathered = 2 * h if placed.stream_shards > 1 else 0
    ring = 2 * q + 5 * kv if placed.num_shards("seq") > 1 and options.method == "ring" else 0
    return inputs, 2 * q + 2 * kv + gathered + (7 if placed.num_shards("residual_seq") > 1 else 3) * stream + ring


def _of_parts(placed: Placed, options: Options) -> float:
    """Bytes of a layer's gradient in float32, of one part of a microbatch beside the other's;
    layers with experts work on it whole."""
    cfg, rows = placed.cfg, options.global_batch // options.microbatches
    dense = not cfg.num_experts or cfg.first_dense_layers
    alone = parts.of_rows(placed.layout, (rows, options.seq_len))[1] == 1
    if not dense or alone or options.remat == "none" and placed.by_layer:
        return 0
    (q, kv, _), gates = placed.widths, 2 if cfg.activation != "gelu" else 1
    of_dense = cfg.embed_dim * (2 * q + 2 * kv + (gates + 1) * _widest_mlp(placed))
    return 4 * (of_dense if cfg.num_experts else placed.layer.used)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _in_stages(placed: Placed, options: Options) -> float:
    """A full stage of weights, the slots of the schedule, and the more of what the loss and a layer need beside
    them."""
    cfg, size, tokens = placed.cfg, placed.itemsize, placed.tokens(options)
    stream, chunk = cfg.embed_dim / placed.stream_shards, min(tokens, options.loss_chunk)
    # Logits of a chunk in float32 and their gradient; the stage's output on its way to all, normed, and its gradient.
    # Of the head and the embedding beside each other what a microbatch adds to their gradients, in float32.
    loss = chunk * ((4 + size) * placed.head.n + size * cfg.embed_dim) + 7 * size * tokens * stream
    loss += 16 * placed.head.n * placed.head.k
    # A layer of B beside one of F, with their weights out of the stack.
    layer = size * tokens * (_working_width(placed, options) + 4 * stream + 2
                             * placed.widths[2]) + size * placed.layer.used
    if experts := routed.of(placed, options):
        layer = max(layer, experts.staged_bytes + 4 * size * tokens * stream + size * placed.layer.used)
    return size * placed.held.used + slot_bytes(placed, options) + max(loss, layer)


def slot_widths(placed: Placed, options: Options) -> tuple[float, float]:
    """Elements of a token that a layer leaves in slots: for its backward, and from there for a W of its own.
    assumption: without remat, and for W, what is as wide as the residual stream lies whole on each device."""
    h, (q, kv, f) = placed.cfg.embed_dim, placed.widths
    stream, gates = h / placed.stream_shards, 2 if placed.cfg.activation != "gelu" else 1
    placement, normed = placed.cfg.norm_placement, _normed_width(placed)
    both, behind, beside = placement == "both", placement != "before", _routing_width(placed) / placed.stream_shards
    for_backward = {"none": 4 * h + stream + 2 * q + 2 * kv + gates * f + normed + 2 * h * both + beside,
                    "selective": (2 + behind * (not placed.cfg.num_experts)) * stream
                    + 2 * q + 2 * kv + gates * f + beside / 2,
                    "full": stream + (q if placed.num_shards("seq") > 1 else 0)}[options.remat]
    # What norms read and their cotangents are float32 in any case; of other float32 arrays some are the same.
    biased = placed.cfg.norm == "layernorm"     # its bias has a gradient, too
    apart = placed.itemsize == 2 or biased
    for_weights = 8 * (2 * h * (1 + both) + normed) / placed.itemsize + 2 * h * biased + {
        "none": q + 2 * kv + (gates + 1) * f + (2 * h if apart else -normed - 2 * h * both),
        "selective": q + 2 * kv + (gates + 2) * f + (2 if apart else 1 + behind) * h,
        "full": 2 * q + 2 * kv + (gates + 2 - behind) * f + 4 * h}[options.remat]
    if experts := routed.of(placed, options):
        for_weights += experts.weight_grad_bytes / placed.itemsize / placed.tokens(options)
    return for_backward, for_weights


def slot_bytes(placed: Placed, options: Options) -> float:
    """Bytes of a pipeline's slots: what microbatches leave in a stage."""
    for_backward, for_weights = slot_widths(placed, options)
    p = placed.mesh.sizes["stage"]
    _, slots = schedules.counts(options.schedule, p, options.microbatches, options.chunks)
    depth = stages.padded(placed.cfg, p * options.chunks) // (p * options.chunks)
    elements = depth * (slots["Q"] * for_backward + slots.get("Z", 0) * for_weights)
    stream = placed.cfg.embed_dim / placed.stream_shards
    elements += (slots["X"] + slots["D"]) * stream
    return placed.itemsize * placed.tokens(options) * elements + leading_bytes(placed, options)


def leading_bytes(placed: Placed, options: Options) -> float:
    """Bytes of what leading layers keep for their backward, and of what they pass to the first stage."""
    if not (leading := placed.leading):
        return 0.0
    kept = leading.layer.depth * slot_widths(leading, options)[0] + placed.cfg.embed_dim / placed.stream_shards
    return placed.itemsize * placed.tokens(options) * placed.rounds(options) * kept
