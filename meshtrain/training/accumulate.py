"""The gradients of a step and the loss of an evaluation, by a scan over microbatches (`pipelined`: through the stages).

What makes ZeRO true in the compiled program, and not only intended, stands here, each constraint with its reason:
accumulators are pinned to [grads]; the loop runs in a shard_map that is manual over the batch axes that [grads] does not name,
so that nothing crosses them until it has ended; sum and [optimizer] placement are one expression.
The loss is a sum over the step's tokens divided by their count, never a mean of means.
Source: arXiv:1910.02054 (ZeRO).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain.model import float8, params, transformer
from meshtrain.model.layers import Execution
from meshtrain.model.loss import with_loss
from meshtrain.model.transformer import Transformer, without_layers
from meshtrain.names import AUX_LOSS
from meshtrain.parallel.experts import dispatch
from meshtrain.parallel.pipeline import layer_vjp
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import after, by_gloo
from meshtrain.sharding.rules import Layout
from meshtrain.training import objective
from meshtrain.training.state import StateSpec


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """What the gradients of a step depend on beside their arguments: what is computed, and how all of it is placed.

    once: batch axes over which gradients are reduced once per step: manual where layers run. batch: ShapeDtypeStructs
    with shardings, [microbatches, replicas, sequences, T], replicas on the axes of `once`.
    """
    run: object                 # the checked run file; its data, training and model sections are read
    model: Transformer
    layout: Layout
    mesh: jax.sharding.Mesh
    state: StateSpec
    ex: Execution
    once: tuple[str, ...]
    batch: dict


def step_spec(run, model: Transformer, layout: Layout, mesh, attend: Callable, state: StateSpec, staged: bool) -> StepSpec:
    """staged: whether the layers are pipelined, which sums gradients after its loop whatever [grads] says: that is about where
    they lie afterwards."""
    training, data = run.training, run.data
    once = layout.batch_axes if staged else layout.reduced_once(info.axes for info in model.parameters())
    replicas = layout.ways(once)
    platform = mesh.devices.flat[0].platform
    precision = float8.precision(platform) if run.model.matmul_dtype == "float8" else None
    ex = Execution(layout, jnp.dtype(run.model.compute_dtype), attend, training.remat, precision,
                   in_order=not staged and by_gloo(mesh), experts=dispatch.choose(run, layout, platform))
    batch_spec = lambda dims: P(None, once or None, *layout.spec("activations", ("batch", "seq")[:1 + dims], drop=once))
    sequences = data.global_batch // training.microbatches // replicas
    batch = {name: jax.ShapeDtypeStruct((training.microbatches, replicas, sequences) + (data.seq_len,) * dims, dtype,
                                        sharding=NamedSharding(mesh, batch_spec(dims)))
             for name, (dims, dtype) in objective.of_run(training).fields.items()}
    return StepSpec(run, model, layout, mesh, state, ex, once, batch)


def scanned(step: StepSpec):
    """(`gradients`, `evaluate`, `preferred`), microbatch after microbatch.

    gradients: (params, batch, dropout key) -> (grads placed as [optimizer], loss, count, aux), of what is trained alone; aux:
    the layers' sums by name, divided by count, AUX_LOSS by the tokens without padding, whatever the objective counts. evaluate:
    (params, batch) -> sum of the loss. preferred, of DPO: (params, batch) -> `Preference.preferred` of every sequence,
    [microbatches, replicas, sequences].
    """
    aim, added = objective.of_run(step.run.training), _by_hand(step)
    layout, once, trained_axes = step.layout, step.once, step.state.trained_axes
    as_read = partial(step.model.as_read, layout, dtype=step.ex.dtype if step.model.cast_before_loop(layout) else None)

    def replicated(f, out=P(once or None)):
        """Run f(batch, *args) on each replica's part of the batch, in a shard_map that is manual over `once`.

        f returns arrays with a dim of size 1 for its replica, the first where `out` does not say otherwise.
        """
        def of_one(batch, *args):
            return f(jax.tree.map(lambda x: x[:, 0], batch), *args)
        if not once:
            return of_one
        return lambda batch, *args: jax.shard_map(of_one, mesh=step.mesh, axis_names=set(once), check_vma=False, out_specs=out, in_specs=(
            P(None, once), *[P()] * len(args)))(batch, *args)

    def pin(grads):
        """Accumulators where [grads] says."""
        return jax.tree.map(lambda axes, g: layout.constrain("grads", g, axes), trained_axes, grads, is_leaf=rules.is_axes)

    def gradients(p, batch, key):
        p, count = step.model.divided(as_read(p)), jnp.maximum(aim.count(batch), 1).astype(jnp.float32)
        counts = count, objective.tokens(batch)
        if step.ex.in_order:
            batch = after(batch, counts)
        grads, nll, aux = replicated(unsummed)(batch, p, counts, key)
        # Pinned once more, still unsummed: otherwise propagation shards the accumulators inside the loop (ZeRO-1: 11
        # all-gathers per microbatch).
        grads = jax.tree.map(lambda axes, g: reduce_once(layout, once, axes, _unsummed(layout, once, axes, g)), trained_axes, grads,
                             is_leaf=rules.is_axes)
        return grads, nll.sum() / count, count, {name: a.sum(0) / counts[name == AUX_LOSS] for name, a in aux.items()}

    def unsummed(batch, p, counts, key):
        stacks, avals = _stacks(step, p, jax.tree.map(lambda x: x[0], batch), counts, key)

        def add(carry, microbatch):
            grads, nll, room = carry
            grads, nll_mb, room, aux = added(p, grads, microbatch, counts, key, stacks, room)
            return (pin(grads), nll + nll_mb, room), aux
        zeros = lambda tree, dtype=None: jax.tree.map(lambda a: jnp.zeros(a.shape, dtype or a.dtype), tree)
        (grads, nll, _), aux = jax.lax.scan(add, (pin(zeros(p[0], jnp.float32)), jnp.float32(0), zeros(avals)), batch)
        return jax.tree.map(lambda x: x[None], (grads, nll, jax.tree.map(lambda a: a.sum(0), aux)))

    def evaluate(p, batch):
        def losses(batch, p):
            loss = lambda b: aim.head(step.model, step.ex, p, step.model.through_layers(step.ex, p, b)[0], b)[1]
            return jax.lax.scan(lambda total, b: (total + loss(b), None), jnp.float32(0), batch)[0][None]
        return replicated(losses)(batch, as_read(p)).sum()

    def preferred(p, batch):
        def of_all(batch, p):
            of = lambda b: aim.preferred(step.model, step.ex, p, step.model.through_layers(step.ex, p, b)[0], b)
            return jax.lax.scan(lambda _, b: (None, of(b)), None, batch)[1][:, None]
        return replicated(of_all, P(None, once or None))(batch, as_read(p))

    return gradients, evaluate, preferred


def _by_hand(step: StepSpec):
    """Forward and backward of one microbatch with explicit VJPs: ((trained, frozen), grads, microbatch, counts, key, stacks, room)
    -> (grads with the microbatch's added, nll, room, aux).

    counts: the normalizers of the objective and of AUX_LOSS. stacks, room: of `_stacks`; the buffers in room are overwritten.

    Each layer's gradient is added to its accumulator as soon as it exists, so a microbatch's gradients never coexist with their
    sums: 4 bytes per accumulated parameter less. Gradients are float32, whatever the dtype of the weights.
    """
    model, ex, aim = step.model, step.ex, objective.of_run(step.run.training)

    def added(p, grads, microbatch, counts, key, stacks, room):
        (p, frozen), (count, tokens) = p, counts
        ends, e, aux, done = layer_vjp.wide(without_layers(p)), (model.inputs(microbatch, key), tokens), {}, []
        with_frozen = lambda ends: params.joined(ends, without_layers(frozen))
        x_BTD, back_of_embed = jax.vjp(lambda ends: model.embed(ex, with_frozen(ends), microbatch, key), ends)
        for layers, w, (_, group), own_room in zip(stacks, _weights(model, p, frozen), model.numbered(), room, strict=True):
            x_BTD, group_aux, saved = layers.forward(w, x_BTD, e, own_room)
            aux = transformer.add_aux(aux, group_aux)
            done.append((layers.backward, w, saved, model.weights(grads, group)))

        def head(ends, x_BTD):
            total, nll, more = aim.head(model, ex, with_frozen(ends), x_BTD, microbatch)
            return total, (nll, more)
        _, back_of_head, (nll, more) = jax.vjp(head, ends, x_BTD, has_aux=True)
        of_head, dx_BTD = back_of_head(1 / count)
        if ex.in_order:
            dx_BTD = after(dx_BTD, (of_head, nll))
        sums = []
        for backward, w, saved, total in reversed(done):
            dx_BTD, total = backward(w, e, *saved, dx_BTD, total, True)
            sums.append(total)
        if ex.in_order:     # XLA gathers token ids for the embedding's gradient, and would do so beside the loops above
            _, back_of_embed = jax.vjp(lambda ends: model.embed(ex, with_frozen(ends), after(microbatch, dx_BTD), key), ends)
        of_embed, = back_of_embed(dx_BTD)
        if ex.in_order:
            of_head, nll = after((of_head, nll), dx_BTD)
        ends_sums = _sum(without_layers(grads), jax.tree.map(jnp.add, of_head, of_embed))
        room = [own if own is None else saved for own, (_, _, saved, _) in zip(room, done)]
        return model.with_layers(ends_sums, sums[::-1]), nll, room, aux | more
    return added


def _stacks(step: StepSpec, p, microbatch, counts, key):
    """([F, B and W of each group's layers], the ShapeDtypeStructs of the residuals that their forwards keep for the backward).

    Residual buffers are carried through the scan over microbatches and overwritten: allocated inside the loop, XLA fills them with
    zeros, 3% of a step of llama3-8b. None where residuals are offloaded to the host.
    """
    (p, frozen), found = p, []

    def repeat(group: transformer.LayerGroup, trained, x_BTD, e):
        (number, frozen), (inputs, tokens) = e
        weights = tuple(map(params.joined, trained, frozen))
        y_BTD, aux = group.apply(step.ex, weights, x_BTD, (number, inputs))
        return with_loss(y_BTD, aux[AUX_LOSS] / tokens) if AUX_LOSS in aux else y_BTD, aux

    def keep(microbatch):
        e = step.model.inputs(microbatch, key), counts[1]
        x_BTD = jax.eval_shape(lambda: step.model.embed(step.ex, params.joined(p, frozen), microbatch, key))
        for (_, group), w in zip(step.model.numbered(), _weights(step.model, p, frozen), strict=True):
            found.append(layer_vjp.stack(partial(repeat, group), *w[:2], group.repeats, x_BTD, e))
        zeros = lambda avals: [jnp.zeros(a.shape, a.dtype) for a in avals]
        return [None if step.ex.remat == "offload" else (zeros(one.r), zeros(one.q)) for one in found]
    return found, jax.eval_shape(keep, microbatch)


def _weights(model: Transformer, p, frozen):
    """What the functions of each group's `layer_vjp.stack` take for w."""
    return [(model.weights(p, group), (group.numbers(first), model.weights(frozen, group)), 0) for first, group in model.numbered()]


def _sum(total, new):
    return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, new)


def drops(run) -> bool:
    """Whether anything is dropped out, so that a step needs a key."""
    return run.model.embedding_dropout > 0 or run.model.residual_dropout > 0


def _unsummed(layout: Layout, once: tuple[str, ...], axes, g):
    """[replicas, …] accumulators where [grads] says, one copy per replica."""
    if all(n == 1 for n in layout.sizes.values()):
        return g
    return jax.lax.with_sharding_constraint(g, P(once or None, *layout.spec("grads", axes, drop=once)))


def reduce_once(layout: Layout, once: tuple[str, ...], axes, g):
    """[replicas, …] accumulator -> its sum, placed as [optimizer]: a reduce-scatter where that splits over `once`.

    Sum and constraint are one expression: a [grads] constraint between them makes an all-reduce of it. Where
    [optimizer] splits over only some of the `once` axes, those are reduce-scattered first and the shards all-reduced
    over the rest ((N-1)/N of the payload, then 2(N-1)/N of a shard).
    """
    split = layout.spec("optimizer", axes)
    if not once:
        return layout.constrain("optimizer", g[0], axes)
    used = {a for entry in split if entry for a in ((entry,) if isinstance(entry, str) else entry)}
    scattered = tuple(a for a in once if a in used)
    rest = tuple(a for a in once if a not in used)
    if scattered and rest:
        pinned = layout.spec("grads", axes, drop=once)
        g = g.reshape([layout.sizes[a] for a in once] + list(g.shape[1:]))
        g = jax.lax.with_sharding_constraint(g, P(*once, *pinned))
        g = g.sum(tuple(once.index(a) for a in scattered))
        g = jax.lax.with_sharding_constraint(g, P(*rest, *split))
        return layout.constrain("optimizer", g.sum(tuple(range(len(rest)))), axes)
    if (sliced := layout.spec("optimizer", axes, drop=once)) != layout.spec("grads", axes, drop=once):
        # First a slice over what [optimizer] alone splits besides (context), or the sum becomes an all-reduce.
        g = jax.lax.with_sharding_constraint(g, P(once, *sliced))
    return layout.constrain("optimizer", g.sum(0), axes)
