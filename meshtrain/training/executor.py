"""One executor for all schedules: a whole pipelined step inside one `shard_map`.

In a tick all stages run the same ops in the same order (receive, embedding, layers, send, loss), on the microbatch and
buffer slots that the schedule names. Idle stages also compute, and their results are masked. Control flow is therefore
the same on all devices, and collectives may be anywhere. F, B and W of a tick run layer by layer in one loop, so that
collectives of one op overlap with matmuls of the others. Consecutive ticks with the same ops are a phase: one scan.
Gradients are explicit: jax does not differentiate the executor. The model is passed as functions. Leading layers (of
another kind) run on all stages: the forward before the first tick, the backward after the last tick. Manual axes are
`stage` and the axes over which gradients are reduced once per step. The other axes are automatic. Sources: `schedules`;
arXiv:1811.06965, 2104.04473, 2401.10241.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain.parallel.pipeline import schedules
from meshtrain.parallel.pipeline.schedules import Schedule, TickRange
from meshtrain.scopes import TAKEN
from meshtrain.sharding import order
from meshtrain.sharding.mesh import psum
from meshtrain.training import accumulators
from meshtrain.training.backward import Residuals, put, take
from meshtrain.training.shard import Carry, ModelFunctions, Shard, make_shard

STAGE = "stage"


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """How the executor's arguments are sharded.

    summed_axes: the axes over which the caller sums gradients after the step: the axes of the batch and of sequences.

    layer_axes: (axes of layers, axes of frozen layers). For each leaf and each dim after n: the summed axes that shard
    this dim. The leaf's gradient is already reduced over these axes. leading_axes: the same for leading layers.

    ends_specs: (specs of embedding and head, specs of their frozen weights). ends_specs and batch_specs are
    PartitionSpecs by leaf over `stage` and the summed axes.
    """
    mesh: jax.sharding.Mesh
    summed_axes: tuple[str, ...]
    layer_axes: tuple
    leading_axes: tuple
    ends_specs: tuple
    batch_specs: dict


def gradients(schedule: Schedule, model: ModelFunctions, placement: Placement, weights, batch: dict, extra):
    """Run the schedule with its backward and return a step's metric and gradients.

    Returns (metric [R, …], gradients of layers [R, V, P, n, …], of embedding and head [R, …], of leading layers [R·P,
    n, …], stats [R·P, …]), all float32. No result is reduced over replicas. The gradients of leading layers and the
    stats are not reduced over stages either.

    weights: ((layers, frozen layers), (ends, frozen ends), (leading, frozen leading)). Layers are [V, P, n, …] with P
    sharded over stage. Layer (v, s, i) has the number (v·P + s)·n + i. leading: [n, …]. batch: [M, R, …]. extra:
    replicated. R: a dim whose size is the product of the sizes of the summed axes, sharded over these axes. If some
    summed axes already shard a leaf, R leaves these axes out for this leaf.
    """
    return _over_stages(schedule, model, True, placement, weights, batch, extra)


def evaluate(model: ModelFunctions, placement: Placement, weights, batch: dict, extra):
    """Return the metric [R, …] of `gradients` without gradients, by the forward ticks of GPipe.

    Layers are [1, P, n, …]. No residuals are saved.
    """
    microbatches, stages = jax.tree.leaves(batch)[0].shape[0], jax.tree.leaves(weights[0])[0].shape[1]
    schedule = schedules.make("gpipe", stages, microbatches)
    return _over_stages(schedule, model, False, placement, weights, batch, extra)[0]


def _over_stages(schedule: Schedule, model: ModelFunctions, differentiate: bool, placement: Placement, weights,
                 batch: dict, extra):
    """Run `_execute` on all devices. Return the same as `gradients`, or (metric,) without `differentiate`."""
    layers, _, leading = weights
    replicas, by_stage = P(placement.summed_axes or None), P((*placement.summed_axes, STAGE))

    def dims(axes):
        return (on or None for on in axes)

    def others(axes):
        return tuple(a for a in placement.summed_axes if a not in sum(axes, ()))

    def by_leaf(tree, axes, spec):
        return jax.tree.map(lambda _, axes: spec(axes), tree, axes)

    out_specs = [replicas]
    if differentiate:
        out_specs += [
            by_leaf(layers[0], placement.layer_axes[0],
                    lambda axes: P(others(axes) or None, None, STAGE, None, *dims(axes))),
            jax.tree.map(lambda spec: P(tuple(a for a in placement.summed_axes if a not in jax.tree.leaves(
                tuple(spec))) or None, *spec), placement.ends_specs[0]),
            by_leaf(leading[0], placement.leading_axes[0], lambda axes: P((*others(axes), STAGE), None, *dims(axes))),
            by_stage]
    weight_specs = (by_leaf(layers, placement.layer_axes, lambda axes: P(None, STAGE, None, *dims(axes))),
                    placement.ends_specs,
                    by_leaf(leading, placement.leading_axes, lambda axes: P(None, *dims(axes))))
    in_specs = P(STAGE), weight_specs, placement.batch_specs, jax.tree.map(lambda _: P(), extra)
    execute = partial(_execute, schedule, model, order.on_cpus(placement.mesh), differentiate)
    step = jax.shard_map(execute, mesh=placement.mesh, axis_names={STAGE, *placement.summed_axes}, in_specs=in_specs,
                         out_specs=tuple(out_specs), check_vma=False)
    return step(jnp.arange(placement.mesh.shape[STAGE]), weights, batch, extra)


# ---- the slots of a tick ---------------------------------------------------------------------------------------------
# tick: {name: value}: this stage's entry in each column of the schedule, and F_e, B_e (`Shard.prepare_tick`).


def _forward_input(this: Shard, phase: _Phase, c, tick):
    """Return the input of F: the array from the previous stage, the embedding, or the output of the leading layers."""
    x = take(c.X, tick["F_x"])
    if phase.embed == "never":
        return x
    begin = partial(_leading_output, this, c) if this.model.leading else partial(this.embed, this.ends[0])
    first = _sometimes(this, phase, "embed", tick, lambda: begin(tick["embed_mb"]), lambda: x)
    return jnp.where(tick["F_first"] > 0, first, x)


def _run_layers(this: Shard, kinds: set[str], wait: Callable, c: Carry, tick, x):
    """Return (c, y, dx) after one scan that runs the `kinds` of F (of x), B and W, with one layer of each per
    iteration.

    B and W start with the last layer. Buffer entries [slot, layer] are read and written in place.
    """
    split_layer = this.split_layer
    assert split_layer is not None
    w_e = this.prepare(tick["W_mb"]) if "W" in kinds else None
    reads = [(buffer, slot) for buffer, slot in (("R", "B_r"), ("Q", "B_q"), ("Q", "W_q"), ("Z", "W_z"))
             if slot[0] in kinds]

    def add_grads(c: Carry, kind: str, i, dw) -> Carry:
        """Add the gradient of layer i of the chunk of this B or W."""
        at, on = tick[f"{kind}_chunk"] * this.depth + i, tick[f"{kind}_on"] > 0
        return replace(c, layer_grads=accumulators.add_at(c.layer_grads, at, dw, on))

    def visit(carry, i):
        c, x, dx = carry
        back = this.depth - 1 - i
        if "F" in kinds:
            x, stats, (r, q) = split_layer.forward(this.layer(tick["F_chunk"], i), x, tick["F_e"])
            back = wait(back, x)
        saved = {slot: take(getattr(c, buffer), tick[slot], back) for buffer, slot in reads}
        if reads:          # else XLA copies buffers that it might write before they are read
            buffers, saved = lax.optimization_barrier((dict(Q=c.Q, R=c.R, Z=c.Z), saved))
            c = replace(c, **buffers)
        if "B" in kinds:
            weights, residuals = this.layer(tick["B_chunk"], back), Residuals(saved["B_r"], saved["B_q"])
            if this.schedule.split:
                dx, z = split_layer.input_gradient(weights, tick["B_e"], residuals, dx)
                c = replace(c, Z=put(c.Z, z, tick["B_z"], back))
            else:
                dx, dw = split_layer.backward(weights, tick["B_e"], residuals, dx)
                c = add_grads(c, "B", back, dw)
        if "W" in kinds:
            weights = this.layer(tick["W_chunk"], back)
            # On the first stage, W uses this tick's B. A tick with W always has B.
            z = jax.tree.map(lambda new, old: jnp.where(tick["W_z"] == tick["B_z"], new, old), z, saved["W_z"])
            dw = split_layer.weight_gradient(weights, w_e, saved["W_q"], z)
            c = add_grads(c, "W", back, dw)
        if "F" in kinds:
            c = replace(c, R=put(c.R, r, tick["F_r"], i), Q=put(c.Q, q, tick["F_q"], i),
                        stats=c.stats + stats.where(tick["F_on"] > 0))
        return (c, x, dx), None

    dx = take(c.D, tick["B_d"]) if "B" in kinds else None
    changed = Carry(Q=c.Q, R=c.R, Z=c.Z, stats=c.stats, layer_grads=c.layer_grads)
    (changed, y, dx), _ = lax.scan(visit, (changed, x, dx), jnp.arange(this.depth))
    return replace(c, Q=changed.Q, R=changed.R, Z=changed.Z, stats=changed.stats,
                   layer_grads=changed.layer_grads), y, dx


def _add_loss(this: Shard, phase: _Phase, c: Carry, tick, y):
    """Add the loss of the last stage's y to c. All stages compute it, each on its shard of the vocabulary."""
    here, on, number = tick["loss_here"], tick["loss_on"], tick["loss_mb"]

    def metric():
        return c.metric + this.head(this.ends[0], _share(y, here), number)[1].where(on > 0)

    def with_gradients():
        shared = _share(y, here)

        def head(ends, y):
            return this.head(ends, y, number)
        (_, metric), (new, dy) = jax.value_and_grad(head, (0, 1), has_aux=True)(
            accumulators.widen(this.ends[0]), shared)
        return c.metric + metric.where(on > 0), accumulators.add(c.end_grads, new, on > 0), dy

    # Only new values pass through the cond, because XLA would copy the buffers.
    if not this.split_layer:
        return replace(c, metric=_sometimes(this, phase, "loss", tick, metric, lambda: c.metric))
    metric, end_grads, dy = _sometimes(this, phase, "loss", tick, with_gradients, lambda: (c.metric, c.end_grads, y))
    return replace(c, metric=metric, end_grads=end_grads, D=put(c.D, dy, tick["loss_d"]))


def _embedding_gradient(this: Shard, c, tick, dx):
    """Return (gradients of embedding and head, unchanged with leading layers; dx of the first stage) on all stages."""
    shared = _share(dx, tick["B_first"])
    if this.model.leading:
        return c.end_grads, shared
    return _add_embedding_gradient(this, c.end_grads, tick["embed_grad_mb"], shared, tick["embed_grad_on"] > 0), shared


def _add_embedding_gradient(this: Shard, end_grads, i, dx, on):
    """Return `end_grads` with the gradients of microbatch i's embedding added if `on`. dx: its cotangent."""
    _, vjp = jax.vjp(lambda ends: this.embed(ends, i), accumulators.widen(this.ends[0]))
    return accumulators.add(end_grads, vjp(dx)[0], on)


# ---- leading layers --------------------------------------------------------------------------------------------------
# Stage s runs the leading layers for microbatches s, s + P, …, one per round: forward before the first tick, backward
# after the last. On the first stage alone, in its ticks, they would cost as much, because the others wait for it.
# Buffer L [rounds, …] holds the output of the leading layers for a microbatch until F has read it, then its cotangent.


def _leading_forward(this: Shard, c: Carry):
    """Run the leading layers. Return (c with L and their stats, their residuals for each round)."""
    num_stages = this.schedule.num_stages

    def run_round(sums, k):
        def embed_of(x, s):     # by all stages together
            return jnp.where(s == this.stage, this.embed(this.ends[0], _of_round(this, k, s)[0]), x), None
        x = lax.scan(embed_of, jnp.zeros(this.x.shape, this.x.dtype), jnp.arange(num_stages))[0]
        i, on = _of_round(this, k, this.stage)
        e = this.prepare(i)
        if this.leading_stack:
            y, stats, saved = this.leading_stack.forward(this.leading, x, e)
            return sums + stats.where(on), (y, saved)

        def through(x, weights):
            return this.model.leading(weights, x, e)[0], None
        return sums, (lax.scan(through, x, this.leading)[0], None)
    stats, (ys, saved) = lax.scan(run_round, c.stats, jnp.arange(_rounds(this)))
    return replace(c, L=ys, stats=stats if this.leading_stack else c.stats), saved


def _leading_output(this: Shard, c: Carry, i):
    """Return the output of the leading layers for microbatch i, on all stages."""
    return _share(take(c.L, lax.div(i, this.schedule.num_stages)),
                  lax.rem(i, this.schedule.num_stages) == this.stage)


def _store_leading_cotangent(this: Shard, c: Carry, tick, dx):
    """Write into L the cotangent dx of the leading layers' output for the tick's microbatch, known on all stages."""
    k, s = (of(tick["embed_grad_mb"], this.schedule.num_stages) for of in (lax.div, lax.rem))
    here = (tick["embed_grad_on"] > 0) & (s == this.stage)
    return replace(c, L=put(c.L, jnp.where(here, dx, take(c.L, k)), k))


def _leading_backward(this: Shard, c: Carry, saved):
    """Add the gradients of the leading layers, and of the embedding before them, to c."""
    def run_round(sums, visited):
        end_grads, leading_grads = sums
        k, dy, saved = visited
        i, on = _of_round(this, k, this.stage)
        dx, leading_grads = this.leading_stack.backward(this.leading, this.prepare(i), saved, dy, leading_grads, on=on)
        if not jax.tree.leaves(end_grads):
            return (end_grads, leading_grads), None

        def add_of_stage(end_grads, s):
            i, on = _of_round(this, k, s)
            return _add_embedding_gradient(this, end_grads, i, _share(dx, s == this.stage), on), None
        return (lax.scan(add_of_stage, end_grads, jnp.arange(this.schedule.num_stages))[0], leading_grads), None
    (end_grads, leading_grads), _ = lax.scan(
        run_round, (c.end_grads, c.leading_grads), (jnp.arange(_rounds(this)), c.L, saved))
    return replace(c, end_grads=end_grads, leading_grads=leading_grads)


def _rounds(this: Shard) -> int:
    return -(-this.schedule.num_microbatches // this.schedule.num_stages)


def _of_round(this: Shard, k, s):
    """Return (microbatch of stage s in round k, whether it counts). The last microbatch pads the last round."""
    i, last = k * this.schedule.num_stages + s, this.schedule.num_microbatches - 1
    return jnp.minimum(i, last), i <= last


# ---- ticks and phases ------------------------------------------------------------------------------------------------


def _tick(this: Shard, phase: _Phase, wait: Callable, c, following):
    """Run one tick of a phase and return (carry, None). following: the numbers of the next tick."""
    numbers, prepared = c.tick
    tick, num_stages = dict(zip(this.columns, numbers)) | prepared, this.schedule.num_stages

    def send(array, by: int):
        return lax.ppermute(array, STAGE, [(i, (i + by) % num_stages) for i in range(num_stages)])
    if not this.split_layer:
        def through(x, weights):
            return this.model.layer(weights, x, tick["F_e"])[0], None
        y = lax.scan(through, _forward_input(this, phase, c, tick), this.layers)[0]
    else:
        x = _forward_input(this, phase, c, tick) if "F" in phase.kinds else None
        c, y, dx = _run_layers(this, set(phase.kinds), wait, c, tick, x)
    # The sends to the neighbours overlap with the loss, if there is one.
    arrived = {}
    if "F" in phase.kinds:
        arrived["y"] = send(y, 1)
    if "B" in phase.kinds:
        arrived["dx"] = send(wait(dx, arrived["y"]) if "F" in phase.kinds else dx, -1)
    for array in arrived.values():
        tick, following = wait(tick, array), wait(following, array)
    if phase.loss != "never":
        c = _add_loss(this, phase, c, tick, y)
        total = sum(map(jnp.sum, jax.tree.leaves(c.metric)))
        tick, following = wait(tick, total), wait(following, total)
    if "B" in phase.kinds and phase.embed_grad != "never":
        grads, shared = _sometimes(this, phase, "embed_grad", tick, lambda: _embedding_gradient(this, c, tick, dx),
                                   lambda: (c.end_grads, dx))
        c, following = replace(c, end_grads=grads), wait(following, shared)
        c = _store_leading_cotangent(this, c, tick, shared) if this.model.leading else c
    # Arrivals are written after the loss. A masked loss writes into a slot of D that is free only until here.
    if "y" in arrived:
        c = replace(c, X=put(c.X, arrived["y"], tick["y_in"]))
    if "dx" in arrived:
        c = replace(c, D=put(c.D, arrived["dx"], tick["dx_in"]))
    # `prepare_tick` depends on `following` again: with one microbatch XLA drops the index, and could then send its
    # segments at any time.
    return replace(c, tick=wait(this.prepare_tick(following), following)), None


def _execute(schedule: Schedule, model: ModelFunctions, in_order: bool, differentiate: bool,
             stage, weights, batch: dict, extra):
    """Run the schedule on one device, inside the shard_map of `_over_stages`.

    Returns what `gradients` returns, as this device's part, or (metric,) without `differentiate`. stage: [1].
    in_order: collectives run in the order of the program.
    """
    this, c, following = make_shard(schedule, model, differentiate, stage, weights, batch, extra)
    wait = order.after_row if in_order else order.leave
    if model.leading:
        c, saved = _leading_forward(this, c)
    for phase in _phases(schedule, bool(jax.tree.leaves(this.ends[0]) or model.leading)):
        if not differentiate and "B" in phase.kinds:
            break
        c, _ = lax.scan(partial(_tick, this, phase, wait), c, following[phase.start:phase.stop])
    metric = jax.tree.map(lambda a: a[None], c.metric)
    if not differentiate:
        return (metric,)
    c = _leading_backward(this, c, saved) if model.leading else c
    of_replica = jax.tree.map(lambda a: a[None], (c.end_grads, c.leading_grads, c.stats))
    # [V·n, …] -> [1, V, 1, n, …], where the 1s are this device's replica and stage.
    layer_grads = jax.tree.map(lambda a: a.reshape(1, schedule.num_chunks, 1, -1, *a.shape[1:]), c.layer_grads)
    return metric, layer_grads, *of_replica


@dataclasses.dataclass(frozen=True)
class _Phase(TickRange):
    """A phase, which is one scan. embed, embed_grad: how often the phase computes embeddings and their gradients, in
    the words of `loss`.
    """
    embed: str
    embed_grad: str


def _phases(schedule: Schedule, trained_ends: bool) -> list[_Phase]:
    def often(phase: TickRange, name: str) -> str:
        return schedules.often(schedule.shared[f"{name}_on"][phase.start:phase.stop], schedule.num_chunks)
    return [_Phase(**dataclasses.asdict(phase), embed=often(phase, "embed"),
                   embed_grad=often(phase, "embed_grad") if trained_ends else "never") for phase in schedule.phases()]


def _sometimes(this: Shard, phase: _Phase, what: str, tick, then, otherwise):
    """Return then() in the ticks of the phase that have `what`, otherwise() in the others.

    what: "loss", "embed" or "embed_grad". The condition is the same on all devices, so both branches may contain
    collectives.
    """
    if getattr(phase, what) == "always":
        return then()
    on = this.schedule.shared[f"{what}_on"][phase.start:phase.stop]
    with jax.named_scope(TAKEN.write(on.sum(), len(on))):
        return lax.cond(tick[f"{what}_on"] > 0, then, otherwise)


def _share(x, here):
    """Broadcast x from the stage where `here` is set. The all-reduce over stage is exact, because all other stages add
    0.
    """
    return psum(jnp.where(here > 0, x, 0), STAGE)
