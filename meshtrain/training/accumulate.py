"""Gradients of a step and loss of an evaluation, by a scan over microbatches (`pipelined`: through pipeline stages).

The constraints that give the compiled program ZeRO's memory and collectives are here. Accumulators are sharded as in
[grads]. The scan runs in a shard_map that is manual over the batch axes that [grads] does not name, so that nothing is
reduced over them before the scan ends. The final sum and its sharding as in [optimizer] are one expression. The loss is
the sum over the step's tokens divided by their number, not a mean of means.

Source: arXiv:1910.02054 (ZeRO).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import hardware, scopes
from meshtrain.config.sections import Run
from meshtrain.model import float8, mlp, params, transformer
from meshtrain.model.layers import Execution
from meshtrain.model.loss import with_balance_loss
from meshtrain.model.stats import LayerStats, Normalizers
from meshtrain.model.transformer import Transformer, without_layers
from meshtrain.names import NO_TARGET
from meshtrain.parallel.context import attention
from meshtrain.parallel.experts import dispatch
from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import automatic_axes, by_gloo, on_shards
from meshtrain.sharding.rules import Layout
from meshtrain.training import backward, objective, qk_clip, state


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """Everything that the gradients of a step depend on, except their arguments.

    deferred_axes: batch axes over which gradients are reduced once per step. The scan over microbatches is manual over
    them. batch: ShapeDtypeStructs with shardings, [microbatches, replicas, sequences, T], where replicas is sharded
    over the deferred axes.
    """
    run: Run                    # the checked run file; its data, training and model sections are read
    model: Transformer
    layout: Layout
    mesh: jax.sharding.Mesh
    state: state.StateSpec
    ex: Execution
    deferred_axes: tuple[str, ...]
    batch: dict
    schedule: Schedule | None       # the pipeline's schedule; None without stages
    order: np.ndarray | None        # the token at each place of a sequence; None: the natural order
    in_place: bool = False          # whether residuals are written directly into their buffers, see `backward.stack`

    @property
    def objective(self) -> objective.Objective:
        return objective.of_run(self.run)


def step_spec(run: Run, model: Transformer, layout: Layout, mesh, attend: Callable, recurrence,
              schedule: Schedule | None) -> StepSpec:
    """Build the StepSpec of a run. attend, recurrence: of `Execution`.

    A pipeline sums gradients after its loop, whatever [grads] says. [grads] then shards the sums.
    """
    training, data = run.training, run.data
    deferred = layout.batch_axes if schedule else layout.deferred_axes(info.axes for info in model.parameters())
    replicas = layout.num_shards(deferred)
    device = mesh.devices.flat[0]
    platform, gpu = device.platform, hardware.from_device_kind(device.device_kind)
    precision = float8.precision(platform) if run.model.matmul_dtype == "float8" else None
    ex = Execution(layout, jnp.dtype(run.model.compute_dtype), attend, training.remat, precision,
                   in_order=not schedule and by_gloo(mesh), by_kernels=hardware.runs_kernels(gpu),
                   experts=dispatch.choose(run, layout, platform, gpu),
                   mlp=mlp.choose(run, layout, platform, gpu), recurrence=recurrence, bounds=qk_clip.bounds(run))

    def placed(dims: int) -> NamedSharding:
        logical = ("batch", "seq")[:1 + dims]
        return NamedSharding(mesh, P(None, deferred or None, *layout.spec("activations", logical, drop=deferred)))

    sequences = data.global_batch // training.microbatches // replicas
    batch = {name: jax.ShapeDtypeStruct((training.microbatches, replicas, sequences) + (data.seq_len,) * dims,
                                        dtype, sharding=placed(dims))
             for name, (dims, dtype) in objective.of_run(run).fields.items()}
    held = state.describe(model, run.optimizer, training.steps, layout, mesh, run.experts.bias_rate,
                          run.experts.bias_rule)
    return StepSpec(run, model, layout, mesh, held, ex, deferred, batch, schedule,
                    attention.token_order(run, layout.sizes),
                    in_place=ex.by_kernels and jax.__version_info__ >= backward.IN_PLACE_SINCE)


def scanned(step: StepSpec):
    """Return (`gradients`, `evaluate`, `scores`), which scan over microbatches.

    gradients: (params, batch, dropout key) -> (gradients of the trained parameters, sharded as in [optimizer]; loss;
    count; metrics). metrics: the numbers that layers and the objective report, by name.

    evaluate: (params, batch) -> sum of the loss.

    scores, for DPO and RL: (params, batch) -> `scores` of the objective. They are [microbatches, replicas, sequences]
    for DPO and [microbatches, replicas, sequences, T] for RL, with 0 in microbatches that are not computed.
    """
    goal, microbatch_gradients = step.objective, _microbatch_gradients(step)
    layout, deferred, trained_axes = step.layout, step.deferred_axes, step.state.trained_axes
    as_read = partial(step.model.as_read, layout, dtype=step.ex.dtype if step.model.cast_before_loop(layout) else None)

    def replicated(f, out=P(deferred or None)):
        """Run f(batch, *args) on each replica's part of the batch.

        It runs in a shard_map that is manual over the deferred axes. f returns arrays with a dim of size 1 for its
        replica. It is the first dim unless `out` says otherwise.
        """
        def of_one(batch, *args):
            return f(jax.tree.map(lambda x: x[:, 0], batch), *args)
        if not deferred:
            return of_one

        def of_all(batch, *args):
            specs = P(None, deferred), *[P()] * len(args)
            return jax.shard_map(of_one, mesh=step.mesh, axis_names=set(deferred), check_vma=False, out_specs=out,
                                 in_specs=specs)(batch, *args)
        return of_all

    def pin(grads):
        """Constrain accumulators to the sharding of [grads]."""
        return jax.tree.map(lambda axes, g: layout.constrain("grads", g, axes), trained_axes,
                            grads, is_leaf=rules.is_axes)

    def gradients(p, batch, key):
        weights, count = step.model.divided(as_read(p)), jnp.maximum(goal.count(batch), 1).astype(jnp.float32)
        normalizers = Normalizers(count, objective.tokens(batch))
        used = used_microbatches(step.ex.after(batch, normalizers))
        grads, nll, stats = replicated(unsummed)(step.ex.after(batch, (normalizers, used)), weights, normalizers, key,
                                               used)

        def reduced(axes, g):
            # Constrained once more, before the sum. Otherwise propagation shards the accumulators inside the loop
            # (ZeRO-1: 11 all-gathers per microbatch).
            return reduce_deferred(layout, deferred, axes, _unsummed(layout, deferred, axes, g))
        grads = jax.tree.map(reduced, trained_axes, grads, is_leaf=rules.is_axes)
        return grads, nll.sum() / count, count, stats.metrics(normalizers)

    def used_microbatches(batch):
        """Return how many microbatches are computed: up to the last one with a target. None means all."""
        if goal.fills_all:
            return None
        has_M = jnp.any(batch["targets"] != NO_TARGET, (1, 2, 3))
        return jnp.max(jnp.where(has_M, 1 + jnp.arange(len(has_M)), 0))

    def each(f, carry, batch, used):
        """Return `lax.scan` of f over the microbatches, with its stats added.

        used: if not None, scan only the first `used` microbatches.
        """
        if used is None:
            carry, stats = jax.lax.scan(f, carry, batch)
            return carry, stats.combine()
        of = lambda m: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False), batch)
        stats = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(lambda: f(carry, of(0))[1]))

        def body(m, carried):
            carry, more = f(carried[0], of(m))
            return carry, carried[1] + more
        with jax.named_scope(scopes.AT_MOST.write(step.run.training.microbatches)):
            return jax.lax.fori_loop(0, used, body, (carry, stats))

    def unsummed(batch, weights, normalizers, key, used):
        stacks, buffers = _layer_stacks(step, weights, jax.tree.map(lambda x: x[0], batch), normalizers, key)

        def add(carry, microbatch):
            grads, nll, buffers = carry
            grads, nll_mb, buffers, stats = microbatch_gradients(
                weights, grads, microbatch, normalizers, key, stacks, buffers)
            return (pin(grads), nll + nll_mb, buffers), stats

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), weights.trained)
        room = jax.tree.map(partial(_room, layout, batch["segments"].shape[1]), buffers)
        start = pin(zeros), jnp.float32(0), room
        (grads, nll, _), stats = each(add, start, batch, used)
        return jax.tree.map(lambda x: x[None], (grads, nll, stats))

    def evaluate(p, batch):
        def losses(batch, p):
            loss = lambda b: goal.head(step.model, step.ex, p, step.model.through_layers(step.ex, p, b)[0], b)[1]
            return jax.lax.scan(lambda total, b: (total + loss(b), None), jnp.float32(0), batch)[0][None]
        return replicated(losses)(batch, as_read(p)).sum()

    def scores(p, batch):
        used = used_microbatches(batch)

        def of_all(batch, p, used):
            def put(carry, microbatch):
                m, found = carry
                x_BTD, _ = step.model.through_layers(step.ex, p, microbatch)
                new = goal.scores(step.model, step.ex, p, x_BTD, microbatch)
                return (m + 1, jax.lax.dynamic_update_index_in_dim(found, new, m, 0)), LayerStats()
            B, T = batch["targets"].shape[1:]
            shape = (step.run.training.microbatches, B) + (() if goal.fills_all else (T,))
            (_, found), _ = each(put, (jnp.int32(0), jnp.zeros(shape, jnp.float32)), batch, used)
            return found[:, None]
        found = replicated(of_all, P(None, deferred or None))(
            batch if used is None else step.ex.after(batch, used), as_read(p), used)
        return found if goal.fills_all or step.order is None else found[..., np.argsort(step.order)]

    return gradients, evaluate, scores


def _microbatch_gradients(step: StepSpec):
    """Return a function for the forward and backward of one microbatch. The backward is explicit for each layer stack.

    It is (weights, grads, microbatch, normalizers, key, stacks, buffers) -> (grads with the microbatch's gradients
    added, nll, buffers, stats). Each layer's gradient is added to its accumulator as soon as it exists, so the
    gradients of a microbatch never exist beside their sums. This saves 4 bytes per accumulated parameter compared with
    `jax.grad` of the whole model. Gradients are float32, whatever the dtype of the weights. stacks, buffers: from
    `_layer_stacks`. The buffers are overwritten.
    """
    model, ex, goal = step.model, step.ex, step.objective

    def gradients(weights: params.Divided, grads, microbatch, normalizers: Normalizers, key, stacks, buffers):
        ends, layer_inputs = backward.wide(without_layers(weights.trained)), (
            model.inputs(microbatch, key), normalizers.tokens)
        frozen_ends, stats, done = without_layers(weights.frozen), LayerStats(), []

        def embed(ends, microbatch):
            return model.embed(ex, params.joined(ends, frozen_ends), microbatch, key)

        def added(totals, grads):
            return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), totals, grads)

        def head(read, x_BTD):
            total, nll, more = goal.head(model, ex, params.joined(ends | read, frozen_ends), x_BTD, microbatch)
            return total, (nll, more)

        x_BTD, embed_vjp = jax.vjp(lambda ends: embed(ends, microbatch), ends)
        for stack, w, (_, group), own in zip(stacks, _stack_weights(model, weights),
                                             model.numbered(), buffers, strict=True):
            x_BTD, of_group, residuals = stack.forward(w, x_BTD, layer_inputs, own)
            stats += of_group
            done.append((stack, w, residuals, model.weights(grads, group)))
        read = model.read_by_head(ends)
        _, head_vjp, (nll, more) = jax.vjp(head, read, x_BTD, has_aux=True)

        d_head, dx_BTD = head_vjp(1 / normalizers.targets)
        head_grads = added({name: grads[name] for name in read}, d_head)
        # Added before the layers' backward. Otherwise the head's gradient, float32 and not yet reduced, takes memory
        # during it. The norm's gradient is left out, because its reduction would come first.
        large = {name: g for name, g in head_grads.items() if name != "final_norm"}
        large, dx_BTD = jax.lax.optimization_barrier((large, dx_BTD))
        head_grads |= large
        dx_BTD = ex.after(dx_BTD, (head_grads, nll, more))
        stack_grads = []
        for stack, w, residuals, total in reversed(done):
            dx_BTD, total = stack.backward(w, layer_inputs, *residuals, dx_BTD, total, True)
            stack_grads.append(total)
        if ex.in_order:     # XLA gathers token ids for the embedding's gradient, and would do it during the loops above
            _, embed_vjp = jax.vjp(lambda ends: embed(ends, ex.after(microbatch, dx_BTD)), ends)
        d_embed, = embed_vjp(dx_BTD)
        head_grads, nll = ex.after((head_grads, nll), dx_BTD)
        ends_grads = added(without_layers(grads) | head_grads, d_embed)
        buffers = [own if own is None else residuals for own, (_, _, residuals, _) in zip(buffers, done)]
        return model.with_layers(ends_grads, stack_grads[::-1]), nll, buffers, stats | more
    return gradients


def _layer_stacks(step: StepSpec, weights: params.Divided, microbatch, normalizers: Normalizers, key):
    """Return ([F, B and W of each group's layers], the ShapeDtypeStructs of the residuals that their forwards save).

    The scan over microbatches carries the residual buffers and overwrites them. If they were allocated inside the loop,
    XLA would fill them with zeros, which takes 3% of a step of llama3-8b. Their structs are None if residuals are
    offloaded to the host.
    """
    found = []

    def repeat(group: transformer.LayerGroup, trained, x_BTD, e):
        (number, frozen), (inputs, tokens) = e
        y_BTD, stats = group.apply(step.ex, tuple(map(params.joined, trained, frozen)), x_BTD, (number, inputs))
        return with_balance_loss(y_BTD, stats, tokens), stats

    def keep(microbatch):
        layer_inputs = step.model.inputs(microbatch, key), normalizers.tokens
        x_BTD = jax.eval_shape(lambda: step.model.embed(step.ex, params.joined(*weights), microbatch, key))
        for (_, group), w in zip(step.model.numbered(), _stack_weights(step.model, weights), strict=True):
            found.append(backward.stack(partial(repeat, group), *w[:2], group.repeats, x_BTD, layer_inputs,
                                         in_place=step.in_place))
        zeros = lambda avals: [jnp.zeros(a.shape, a.dtype) for a in avals]
        return [None if step.ex.remat == "offload" else (zeros(one.r), zeros(one.q)) for one in found]
    return found, jax.eval_shape(keep, microbatch)


def _room(layout: Layout, sequences: int, a):
    """Return a residual buffer like `a` without initialization. Zeros would take 0.3% of a step of llama3-8b.

    The buffer is allocated on each device separately; otherwise XLA allocates the whole array on each. It is zeros if
    it is not [layers, sequences, …], or if axes other than those of the sequences may split it.
    """
    axes = layout.batch_axes
    if a.shape[1:2] != (sequences,) or layout.num_shards(axes) != layout.num_shards(automatic_axes()):
        return jnp.zeros(a.shape, a.dtype)
    shape = a.shape[0], sequences // layout.num_shards(axes), *a.shape[2:]
    return on_shards(lambda: jax.lax.empty(shape, a.dtype), (), P(None, axes or None))()


def _stack_weights(model: Transformer, weights: params.Divided):
    """Return for each group the argument w of its `backward.stack`: (trained, (numbers of the layers, frozen), 0)."""
    return [(model.weights(weights.trained, group), (group.numbers(first), model.weights(weights.frozen, group)), 0)
            for first, group in model.numbered()]


def drops(run: Run) -> bool:
    """Return whether the run uses dropout, so that a step needs a key."""
    return run.model.embedding_dropout > 0 or run.model.residual_dropout > 0


def _unsummed(layout: Layout, deferred: tuple[str, ...], axes, g):
    """Constrain [replicas, …] accumulators to the sharding of [grads], with one copy per replica."""
    if all(n == 1 for n in layout.sizes.values()):
        return g
    return jax.lax.with_sharding_constraint(g, P(deferred or None, *layout.spec("grads", axes, drop=deferred)))


def reduce_deferred(layout: Layout, deferred: tuple[str, ...], axes, g):
    """Sum a [replicas, …] accumulator and shard the sum as in [optimizer].

    It is a reduce-scatter where [optimizer] shards over `deferred`. Sum and constraint are one expression, because a
    [grads] constraint between them would make it an all-reduce. If [optimizer] shards over only some of the `deferred`
    axes, the sum is reduce-scattered over those first, and its shards are all-reduced over the others ((N-1)/N of the
    payload, then 2(N-1)/N of a shard).
    """
    split = layout.spec("optimizer", axes)
    if not deferred:
        return layout.constrain("optimizer", g[0], axes)
    used = {a for entry in split if entry for a in ((entry,) if isinstance(entry, str) else entry)}
    scattered = tuple(a for a in deferred if a in used)
    rest = tuple(a for a in deferred if a not in used)
    if scattered and rest:
        pinned = layout.spec("grads", axes, drop=deferred)
        g = g.reshape([layout.sizes[a] for a in deferred] + list(g.shape[1:]))
        g = jax.lax.with_sharding_constraint(g, P(*deferred, *pinned))
        g = g.sum(tuple(deferred.index(a) for a in scattered))
        g = jax.lax.with_sharding_constraint(g, P(*rest, *split))
        return layout.constrain("optimizer", g.sum(tuple(range(len(rest)))), axes)
    if (sliced := layout.spec("optimizer", axes, drop=deferred)) != layout.spec("grads", axes, drop=deferred):
        # First a slice over the axes that only [optimizer] has besides (context); otherwise the sum becomes an
        # all-reduce.
        g = jax.lax.with_sharding_constraint(g, P(deferred, *sliced))
    return layout.constrain("optimizer", g.sum(0), axes)
