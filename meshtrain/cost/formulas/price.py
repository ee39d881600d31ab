"""Prices a layout in closed formulas: memory, traffic and time of a step. Compiles nothing.

`placed`, `traffic` and `footprint` give the sizes; `rates` gives the seconds of a matmul, a stream and a collective. A
collective hides behind a fraction of the compute that it overlaps, and slows that compute by a fraction of its own
time. The formulas were compared with 51 published runs of other frameworks, and with 166 of 2026
(benchmarks/published_2026.py); benchmarks/other_frameworks.py has subclasses for parts that other frameworks compute in
another way.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping

from meshtrain.cost.formulas import calibrations, flops, footprint, mixers, rates, traffic
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.formulas.rates import DeviceGroup, Rates
from meshtrain.cost.formulas.routed import Routed
from meshtrain.cost.formulas.simulate import Costs
from meshtrain.cost.formulas.sizes import (ATTENTION, ATTENTION_BACKWARD, BACKWARD, FORWARD, MICROBATCH, ONCE,
                                           RECURRENCE, Sent)
from meshtrain.kernels import mosaic, mosaic_grouped
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import GATHERED


@dataclasses.dataclass(frozen=True)
class Price:
    """The price of a step: step_s = compute_s + exposed (by label) + bubble_s + update_s + host_s.

    collectives: all collectives of a step. traffic_bytes: bytes that a GPU sends, by mesh axes ("data+fsdp"). links_s:
    seconds of collectives by mesh axes, hidden or not. parts: compute_s by kind; the part "teacher" is the
    forward of a teacher, with its collectives. mfu: model FLOPs utilization, which counts the causal half of attention
    and no recomputation.
    """
    memory_bytes: Mapping[str, int]
    collectives: tuple[Sent, ...]
    traffic_bytes: Mapping[str, float]
    links_s: Mapping[str, float]
    parts: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble_s: float
    update_s: float
    host_s: float
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float

    @property
    def compute_s(self) -> float:
        return sum(self.parts.values())

    @property
    def bubble(self) -> float:
        """Return bubble_s as a fraction of the step without host_s."""
        return self.bubble_s / (self.step_s - self.host_s)


class Links:
    """The device groups of collectives on a mesh, and their times."""

    def __init__(self, rates: Rates, mesh: MeshSpec):
        self.rates, self.mesh, self.domain = rates, mesh, rates.gpu.domain_gpus(mesh.num_devices)

    def group(self, axes: tuple[str, ...]) -> DeviceGroup:
        """Return the device group of a collective over these axes. A part of an axis ("tensor:2") counts as the whole
        axis."""
        whole = tuple(axis.partition(":")[0] for axis in axes)
        return DeviceGroup(*self.mesh.in_domain(whole, self.domain))

    def one_s(self, sent: Sent) -> float:
        return sent.arrays * self.rates.collective_s(sent.kind, sent.array_bytes / sent.arrays, self.group(sent.axes))


def price(placed: Placed, rated: Rates, options: Options) -> Price:
    """Return the price of one step of a model under a layout."""
    return Pricing(placed, rated, options).price()


def stage_costs(placed: Placed, rated: Rates, options: Options) -> Costs:
    """Return the seconds of one microbatch in one stage. `simulate` uses them to choose a schedule."""
    pricing, links = Pricing(placed, rated, options), Links(rated, placed.mesh)
    link_s = sum(links.one_s(sent) for sent in pricing.waits.sents if sent.label == "stage"
                 and sent.kind == "collective-permute")
    return dataclasses.replace(pricing.stage(), loss_s=pricing.head_s(), link_s=link_s)


class Pricing:
    """Adds up the seconds of one step. work: seconds of one layer and the head; waits: exposed seconds of collectives.

    A subclass prices steps that differ in time_layers, list_collectives, head_s, idle_s or update_s. A search
    compares step_s and asks for the price of its best step only.
    """

    def __init__(self, placed: Placed, rated: Rates, options: Options):
        self.placed, self.rated, self.options = placed, rated, options
        self.layers, self.num_stages = placed.layers(options), placed.mesh.sizes["stage"]
        self.work = self.time_layers(placed, options)

    @functools.cached_property
    def waits(self) -> Waits:
        """The exposed seconds of collectives."""
        return Waits(self.placed, self.rated, self.options, self.work, self.list_collectives())

    def time_layers(self, placed: Placed, options: Options) -> LayerTimes:
        """Return the seconds of one layer and of the head."""
        return LayerTimes(placed, self.rated, options)

    def list_collectives(self) -> list[Sent]:
        """Return the collectives of a step."""
        return traffic.of(self.placed, self.options)

    def on(self, mesh: MeshSpec) -> Pricing:
        """Return the same step on a mesh with its axes in another placement: only the links of collectives differ."""
        other = copy.copy(self)
        other.placed = dataclasses.replace(self.placed, mesh=mesh)
        other.waits = Waits(other.placed, self.rated, self.options, self.work, self.waits.sents)
        return other

    @functools.cached_property
    def memory_bytes(self) -> dict[str, int]:
        return footprint.memory(self.placed, self.options)

    @functools.cached_property
    def flops_per_token(self) -> float:
        """The FLOPs of the model, without recomputation."""
        placed = self.placed
        return sum(flops.model_flops_per_token(part.rows, part.cfg, self.options.seq_len)
                   for part in (placed, placed.leading, placed.depths) if part) + placed.num_depths * 6.0 * (
            placed.head.n * placed.head.k * placed.layout.num_shards(placed.layout.mesh_axes(GATHERED, "vocab")))

    def waits_s(self) -> float:
        """Return the exposed seconds of one layer and microbatch."""
        return self.waits.layer_s / (self.options.microbatches * self.layers)

    def head_s(self) -> float:
        """Return the seconds of the head for one microbatch, with the depths of MTP."""
        return sum(self.head_parts().values())

    def head_parts(self) -> dict[str, float]:
        """Return `head_s` by kind."""
        parts = {name: (1 + self.placed.num_depths) * seconds for name, seconds in self.work.head.items()}
        if depths := self.placed.depths:
            for name, seconds in self.time_layers(depths, self.options).parts.items():
                parts[name] = parts.get(name, 0.0) + depths.cfg.num_layers * seconds
        return parts

    def stage_s(self) -> float:
        """Return the seconds of a stage's layers for one microbatch, with their exposed collectives."""
        return self.layers * (self.work.forward_s + self.work.backward_s + self.waits_s())

    def stage(self) -> Costs:
        """Return the costs of a stage's ops, with half of the exposed seconds in the forward."""
        work, waits_s = self.work, self.waits_s()
        return Costs(self.layers * (work.forward_s + waits_s / 2), self.layers * (work.input_grad_s + waits_s / 2),
                     self.layers * work.weight_grad_s)

    def idle_s(self) -> float:
        """Return the seconds in which a stage waits for others or computes on masked data."""
        if self.num_stages == 1:
            return 0.0
        options = self.options
        return bubble_s(self.stage(), options.schedule, self.num_stages, options.microbatches, options.chunks)

    def update_s(self) -> float:
        """Return the seconds of the optimizer's update, and of the accumulators of a microbatch loop."""
        stored, host_bytes = self.placed.held.stored, self.options.host_bytes * self.placed.held.stored
        state_bytes = self.options.optimizer_bytes * stored + host_bytes        # read and written
        update_s = self.rated.stream_s(calibrations.UPDATE * self.placed.held.updated + 2 * state_bytes)
        update_s += 2 * self.rated.host_copy_s(host_bytes)      # to the device and back, and not hidden
        if self.num_stages > 1:
            return update_s
        return update_s + self.rated.stream_s(calibrations.ACCUMULATOR * self.placed.held.grads)

    def leading(self) -> tuple[dict[str, float], float]:
        """Return the time of the leading layers before a pipeline's stages: (seconds of a stage per microbatch by kind,
        seconds of a stage in a step)."""
        if not (leading := self.placed.leading):
            return {}, 0.0
        work = self.time_layers(leading, dataclasses.replace(self.options, schedule="gpipe"))
        share = leading.layer.depth / self.placed.layout.sizes["stage"]
        each = {name: share * seconds for name, seconds in work.parts.items()}
        return each, self.options.microbatches * share * (work.forward_s + work.backward_s)

    def _seconds(self) -> tuple[float, float, float, float]:
        """Return (idle_s, update_s, seconds without those of the host, all seconds), without a teacher."""
        m, (_, leading_s), update_s = self.options.microbatches, self.leading(), self.update_s()
        idle_s = self.idle_s() + (self.placed.rounds(self.options) * self.num_stages / m - 1) * leading_s
        busy_s = m * (self.stage_s() + self.head_s()) + leading_s + idle_s + self.waits.other_s + update_s
        return idle_s, update_s, busy_s, busy_s * (1 + self.rated.assumed["step.overhead"])

    def step_s(self) -> float:
        """Return the seconds of `price`."""
        teacher = self.options.teacher
        step_s = self._seconds()[-1]
        return step_s + teacher.beside(self.placed, self.options).seconds(self.rated) if teacher else step_s

    def least_s(self) -> float:
        """Return a lower bound of `step_s`: the seconds of a step without collectives and without a teacher."""
        alone = copy.copy(self)
        alone.waits = Waits(self.placed, self.rated, self.options, self.work, [])
        return (1 - 1e-9) * alone._seconds()[-1]        # rounding differs by less

    def price(self) -> Price:
        """Return the price of the step."""
        placed, options, work, waits = self.placed, self.options, self.work, self.waits
        m, sizes = options.microbatches, placed.mesh.sizes
        (leading, _), (idle_s, update_s, busy_s, step_s) = self.leading(), self._seconds()
        host_s, flops_per_token = step_s - busy_s, self.flops_per_token
        parts = {name: m * self.layers * seconds for name, seconds in work.parts.items()}
        for name, seconds in (*self.head_parts().items(), *leading.items()):
            parts[name] = parts.get(name, 0.0) + m * seconds
        if teacher := options.teacher:
            parts["teacher"] = teacher.beside(placed, options).seconds(self.rated)
            step_s, flops_per_token = step_s + parts["teacher"], flops_per_token + teacher.flops_per_token
        per_gpu = options.global_batch * options.seq_len / step_s / placed.mesh.num_devices
        exposed = {name: seconds for name, seconds in waits.exposed.items() if seconds}
        return Price(self.memory_bytes, tuple(waits.sents), traffic.by_axes(waits.sents, sizes),
                     waits.links_s, parts, exposed, idle_s, update_s, host_s, step_s, per_gpu,
                     per_gpu * flops_per_token / self.rated.peak(placed.cfg.compute_dtype))


class Waits:
    """Exposed seconds of a step by label. sents: the collectives of a step. layer_s: exposed seconds in layers;
    other_s: those outside layers; links_s: all seconds of collectives by mesh axes, hidden or not."""

    def __init__(self, placed: Placed, rated: Rates, options: Options, work: LayerTimes, sents: list[Sent]):
        links, assumed, layers = Links(rated, placed.mesh), rated.assumed, placed.layers(options)
        m, p = options.microbatches, placed.mesh.sizes["stage"]
        self.sents, self.layer_s = sents, 0.0
        self.links_s: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        # seconds by (label, overlapped compute, whether in a layer); `reduced`: the seconds of layers' reductions
        together: dict[tuple[str, str, bool], float] = defaultdict(float)
        reduced: dict[tuple[str, str, bool], float] = defaultdict(float)
        for sent in sents:
            one_s = links.one_s(sent)
            self.links_s["+".join(sent.axes)] += sent.runs * one_s
            # Sends between stages are hidden, except in the bubble.
            between = sent.label == "stage" and sent.kind == "collective-permute"
            together[key := (sent.label, sent.overlaps, sent.layer)] += (2 * (p - 1) if between else sent.runs) * one_s
            if sent.layer and sent.kind == "reduce-scatter" and sent.overlaps == BACKWARD:
                reduced[key] += sent.runs * one_s
            if sent.layer and sent.label == "fsdp" and sent.overlaps == BACKWARD:
                # The first layer's gather and the last one's reduction overlap nothing.
                self.exposed["fsdp"] += m * one_s
        visits = placed.visits(options)[0]
        compute = {"": 0.0, MICROBATCH: layers * (work.forward_s + work.backward_s)} | {
            overlaps: visits * seconds for overlaps, seconds in work.compute_s.items()}
        compute[ONCE] = sum(seconds for (_, of, _), seconds in together.items() if of == ONCE)
        for (name, overlaps, layer), seconds in together.items():
            near = "overlap.experts" if name == traffic.EXPERTS else "overlap.fsdp"
            hide = assumed[{MICROBATCH: "overlap.data", ONCE: "overlap.once"}.get(overlaps, near)]
            alone = (1 - assumed["overlap.reduced"]) * reduced[name, overlaps, layer]
            exposed_s = (1 - (assumed["overlap.tensor"] if name == "tensor" else 0.0)) * _waiting_s(
                seconds, alone, compute[overlaps], hide, assumed["link.contend"])
            exposed_s *= 1 - assumed["overlap.exchange"] if name == traffic.ROUTED else 1.0
            exposed_s *= m * layers / visits if layer else 1.0      # masked passes wait in the bubble
            self.exposed[name] += exposed_s
            self.layer_s += exposed_s if layer else 0.0
        if options.remat == "offload":      # each layer's input is copied to the host and back
            copy_bytes = placed.itemsize * placed.tokens(options) * placed.cfg.embed_dim / placed.stream_shards
            copy_s = rated.host_copy_s(copy_bytes)
            self.exposed["offload"] = m * layers * sum(
                max(0.0, copy_s - assumed["overlap.fsdp"] * work.compute_s[kind])
                for kind in (FORWARD, BACKWARD))
            self.layer_s += self.exposed["offload"]
        self.other_s = sum(self.exposed.values()) - self.layer_s


class LayerTimes:
    """Seconds of one layer and of the head, for one microbatch on one device.

    forward_s, input_grad_s, weight_grad_s: seconds of F, B and W. compute_s: seconds by what a collective overlaps.
    parts, head: seconds of a layer and of the head by kind. A subclass describes kernels that differ in time_experts,
    scan_bytes or eager.
    """
    eager = 1.0         # HBM bytes of elementwise work, divided by those of fused kernels

    def __init__(self, placed: Placed, rated: Rates, options: Options):
        cfg, tokens = placed.cfg, placed.tokens(options)
        matmul_s = functools.partial(rated.product_s, dtype=placed.matmul_dtype, itemsize=placed.itemsize)
        dense, routers = ([w for w in placed.layer.products if w.router == wanted and not w.expands]
                          for wanted in (False, True))
        products = [w.share * matmul_s(tokens, w.n, w.k) for w in dense]
        forward = sum(products)
        backward = sum(w.share * (matmul_s(tokens, w.k, placed.input_columns(w))
                                  + w.trained * matmul_s(w.k, w.n, tokens)) for w in dense)
        self.placed, self.rated, self.options = placed, rated, options
        routing = placed.router_parts * sum(
            w.share * rated.product_s(tokens / placed.stream_shards, w.n, w.k, cfg.compute_dtype, placed.itemsize)
            for w in routers)
        forward, backward = forward + routing, backward + 2 * routing
        attention, attention_b = mixers.seconds(placed, rated, options, ATTENTION)
        recurrence, recurrence_b = mixers.seconds(placed, rated, options, RECURRENCE)
        mixed, normed = placed.mean(lambda mixer: mixer.stream_bytes), placed.mean(lambda mixer: mixer.norm_inputs)
        fixed_bytes = 8 * placed.blocks * cfg.embed_dim / placed.stream_shards + mixed

        def moved_bytes(times: float, norm: float) -> float:
            return tokens * (fixed_bytes + times * placed.mlp_width + norm * normed)
        gated = cfg.gated
        fused = self.eager * placed.itemsize / 2
        small = fused * rated.stream_s(moved_bytes(6 if gated else 4, calibrations.QK_NORM.forward))
        small_b = fused * rated.stream_s(moved_bytes(10 if gated else 6, calibrations.QK_NORM.backward))
        if placed.float8:
            small, small_b = (each + rated.stream_s(tokens * moved)
                              for each, moved in zip((small, small_b), _float8_bytes(placed)))
        stage_f, stage_b, stage_w = map(rated.stream_s, self.scan_bytes())
        again = placed.recomputation(options)
        again_s = again.products * forward
        if again.products:      # the backward does not read the last product
            again_s -= sum(product.unread * seconds for seconds, product in zip(products, dense))
        recomputed_s = again_s + again.attention * (attention + recurrence) + again.elementwise * small
        (experts, experts_b, experts_w), (moved_f, moved_b) = self.time_experts()
        self.forward_s = forward + attention + recurrence + small + stage_f + experts + moved_f
        self.input_grad_s = (backward / 2 + attention_b + recurrence_b + small_b + recomputed_s + stage_b + experts_b
                             + moved_b)
        self.weight_grad_s = backward / 2 + stage_w + experts_w
        self.attention_s = attention, attention_b
        self.parts = {"matmul": forward + again_s + backward + experts + experts_b + experts_w,
                      ATTENTION: attention * (1 + again.attention) + attention_b,
                      "elementwise": small * (1 + again.elementwise) + small_b + stage_f + stage_b + stage_w + moved_f
                      + moved_b}
        if recurrence:
            self.parts[RECURRENCE] = recurrence * (1 + again.attention) + recurrence_b
        matmul_s = functools.partial(rated.product_s, dtype=cfg.compute_dtype, itemsize=placed.itemsize)
        n, k = placed.head.n, placed.head.k
        self.head = {} if not n else {
            "matmul": matmul_s(tokens, n, k) + matmul_s(tokens, k, n) + placed.head.trained * matmul_s(k, n, tokens),
            "elementwise": fused * rated.stream_s(calibrations.LOGIT * tokens * n)}

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s

    @property
    def compute_s(self) -> dict[str, float]:
        return {FORWARD: self.forward_s, BACKWARD: self.backward_s,
                ATTENTION: self.attention_s[0], ATTENTION_BACKWARD: self.attention_s[1]}

    def scan_bytes(self) -> tuple[float, float, float]:
        """Return the HBM bytes that the loop over layers, or a pipeline's loop, adds to F, B and W of a layer."""
        placed = self.placed
        if not placed.has_backward:
            return 0.0 if placed.by_layer else 2 * placed.itemsize * placed.layer.used, 0.0, 0.0
        return (_stage_bytes if placed.runs_masked(self.options) else _scan_bytes)(placed, self.options)

    def time_experts(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the seconds of a layer's experts: (matmuls of the forward, of the backward for inputs and for
        weights), (elementwise work of the forward, of the backward)."""
        routed = self.placed.route(self.options)
        if not routed:
            return (0.0,) * 3, (0.0,) * 2
        k, n, in_order = routed.sizes.embed_dim, routed.sizes.width, "rows"
        if self.placed.itemsize == 2 and mosaic.runs_on(self.rated.gpu) and mosaic_grouped.columns_of(k, n):
            in_order = "mosaic"
        counts = zip(routed.products, routed.in_order, ("rows", "rows", "outer"))
        products = (routed.share * ((times - ordered) * self.time_product(routed, kernel)
                                    + ordered * self.time_product(routed, in_order))
                    for times, ordered, kernel in counts)
        return tuple(products), tuple(routed.share * self.rated.stream_s(each) for each in routed.elementwise_bytes())

    def time_product(self, routed: Routed, kernel: str) -> float:
        """Return the seconds of all rows times one matrix of each expert. kernel: as in `rates.GroupedMatmul`."""
        sizes, rows, rated = routed.sizes, routed.rows.executed, self.rated
        product = rates.GroupedMatmul(rows, sizes.num_experts, sizes.embed_dim, sizes.width, self.placed.experts_dtype,
                                      kernel)
        return max(rated.matmul_groups_s(product), rated.stream_s(routed.hbm_bytes(kernel == "outer")))


def _scan_bytes(placed: Placed, options: Options) -> tuple[float, float, float]:
    """Return the HBM bytes that the scan over layers adds to one layer (forward, backward, weight gradient).

    Residuals are copied into a buffer and out, unsharded weights are sliced out of their stack, and gradients are added
    to their stack.
    """
    remat = "full" if options.remat == "offload" else options.remat         # it passes through the same buffer
    width = footprint.residual_width(placed, dataclasses.replace(options, remat=remat))
    kept = placed.itemsize * placed.tokens(options) * width
    sliced = 0 if placed.by_layer else 2 * placed.itemsize * placed.layer.used
    grads = (placed.held.grads - placed.held.ends_grads) / placed.cfg.num_layers
    return sliced + 2 * kept, sliced + 2 * kept, calibrations.STACKED_GRADIENT * grads


def _stage_bytes(placed: Placed, options: Options) -> tuple[float, float, float]:
    """Return the HBM bytes that a pipeline's loop adds to F, B and W of a layer.

    Weights are sliced out of the stage's stack, gradients are added to their stack, and residuals are copied into slots
    and out. Residuals of a separate W also pass a mask. Read off compiled programs: 8B on stage 2, 70B on tensor 8 ×
    stage 4.
    """
    size, weights = placed.itemsize, placed.layer.used
    for_backward, for_weights = (size * placed.tokens(options) * width
                                 for width in footprint.slot_widths(placed, options))
    split = calibrations.MASKED_RESIDUAL * for_weights if options.schedule in schedules.SPLIT else 0
    slice_bytes = 2 * size * weights
    grads = calibrations.STACKED_GRADIENT * weights
    return slice_bytes + 2 * for_backward, slice_bytes + 2 * for_backward + split, grads + split


def _float8_bytes(placed: Placed) -> tuple[float, float]:
    """Return the HBM bytes to convert one token's arrays in a layer to float8: (inputs of products in the forward,
    cotangents of their results in the backward). Each array is also transposed for the weight gradients; gathered
    arrays are transposed after the gather."""
    stream, products = placed.cfg.embed_dim / placed.stream_shards, [
        product for product in placed.layer.products if not product.router]
    read = sum(product.share * (product.k if product.outward else stream) for product in products)
    made = sum(product.share * (stream if product.outward else product.n) for product in products)
    gathered = 2 * placed.cfg.embed_dim * len(products) if placed.stream_shards > 1 else 0
    return calibrations.FLOAT8_CAST * read, (calibrations.FLOAT8_CAST + 1) * made + gathered


def _waiting_s(comm_s: float, alone_s: float, compute_s: float, hide: float, contend: float) -> float:
    """Return the seconds that a collective adds to the compute it overlaps: the part that is not hidden, and the
    slowdown of compute by the hidden part. alone_s: seconds of the collective that overlap nothing."""
    behind = min(comm_s - alone_s, hide * compute_s)
    return comm_s - behind + contend * behind


def bubble_s(costs: Costs, name: str, p: int, m: int, v: int) -> float:
    """Return the seconds that a pipeline's step takes beyond m microbatches on a stage that never waits. They follow
    from the schedule's op counts, and equal the bubble that `simulate` finds without link times."""
    executed, _ = schedules.counts(name, p, m, v)
    split = executed["W"] > 0
    op_s = {"F": costs.forward_s, "B": costs.input_grad_s + (0 if split else costs.weight_grad_s),
            "W": costs.weight_grad_s if split else 0}
    return sum((executed[kind] - m * v) * seconds for kind, seconds in op_s.items()) / v
