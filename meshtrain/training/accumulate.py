"""The gradients of a step and the loss of an evaluation, by a scan over microbatches (`pipelined`: through the stages).

What makes ZeRO true in the compiled program, and not only intended, stands here, each constraint with its reason:
accumulators are pinned to [grads]; batch axes that [grads] does not name are reduced once per step through a vmapped
replica axis; sum and [optimizer] placement are one expression.
The loss is a sum over the step's tokens divided by their count, never a mean of means.
Source: arXiv:1910.02054 (ZeRO).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain.layout import rules
from meshtrain.layout.rules import Layout
from meshtrain.model.layers import Execution
from meshtrain.model.transformer import Transformer
from meshtrain.names import NO_TARGET
from meshtrain.training.state import StateSpec

FIELDS = {"tokens": 1, "targets": 1, "segments": 1, "positions": 1, "index": 1, "sequence": 0}  # dims after [batch]


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """What the gradients of a step depend on beside their arguments: what is computed, and how all of it is placed.

    once: batch axes over which gradients are reduced once per step; `ex` hides them from the model. batch: ShapeDtypeStructs
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
    grads_axes = {axis for names in layout.rules.tables["grads"].values() for axis in names}
    once = tuple(axis for axis in layout.batch_axes if staged or axis not in grads_axes)
    replicas, inner = layout.ways(once), layout.hide(once)
    ex = Execution(inner, jnp.dtype(run.model.compute_dtype), attend, training.remat)
    batch_spec = lambda dims: P(None, once or None, *inner.spec("activations", ("batch", "seq")[:1 + dims]))
    sequences = data.global_batch // training.microbatches // replicas
    batch = {name: jax.ShapeDtypeStruct((training.microbatches, replicas, sequences) + (data.seq_len,) * dims, jnp.int32,
                                        sharding=NamedSharding(mesh, batch_spec(dims)))
             for name, dims in FIELDS.items()}
    return StepSpec(run, model, layout, mesh, state, ex, once, batch)


def scanned(step: StepSpec):
    """(`gradients`, `evaluate`), microbatch after microbatch.

    gradients: (params, batch, dropout key) -> (grads placed as [optimizer], loss, count, aux); aux: the layers' sums by name,
    divided by count. evaluate: (params, batch) -> nll sum.
    """
    model, layout, ex, once, training = step.model, step.layout, step.ex, step.once, step.run.training
    inner, replicas, param_axes = ex.layout, layout.ways(once), step.state.axes

    def replicated(f):
        """f(params, microbatch) over a leading replica axis that lies on the `once` mesh axes."""
        return jax.vmap(f, in_axes=(None, 0), spmd_axis_name=once) if once else _single(f)

    def objective(p, microbatch, count, key):
        total, nll, aux = model.loss(ex, p, microbatch, z_loss=training.z_loss, chunk=training.loss_chunk, dropout_key=key)
        return total / count, (nll, aux)

    def pin(grads):
        """Accumulators [replicas, …] where [grads] says, one copy per replica: the sum waits for the end of the loop."""
        if all(n == 1 for n in layout.sizes.values()):
            return grads
        spec_of = lambda axes: P(once or None, *inner.spec("grads", axes))
        return jax.tree.map(lambda axes, g: jax.lax.with_sharding_constraint(g, spec_of(axes)), param_axes, grads,
                            is_leaf=rules.is_axes)

    def gradients(p, batch, key):
        count = jnp.maximum(jnp.sum(batch["targets"] != NO_TARGET), 1).astype(jnp.float32)

        def add(carry, microbatch):
            grads, nll = carry
            grad = replicated(jax.value_and_grad(lambda p, b: objective(p, b, count, key), has_aux=True))
            (_, (nll_r, aux_r)), grads_r = grad(p, microbatch)
            grads = pin(jax.tree.map(lambda a, g: a + g.astype(jnp.float32), grads, grads_r))
            return (grads, nll + nll_r), aux_r

        zeros = jax.tree.map(lambda x: jnp.zeros((replicas,) + x.shape, jnp.float32), p)
        (grads, nll), aux = jax.lax.scan(add, (pin(zeros), jnp.zeros(replicas)), batch)
        # Pinned once more, still unsummed: otherwise propagation shards the accumulators inside the loop (ZeRO-1: 11
        # all-gathers per microbatch).
        grads = jax.tree.map(lambda axes, g: reduce_once(layout, once, axes, g), param_axes, pin(grads), is_leaf=rules.is_axes)
        return grads, nll.sum() / count, count, jax.tree.map(lambda a: a.sum((0, 1)) / count, aux)

    def evaluate(p, batch):
        def add(carry, microbatch):
            def nll(p, b):
                return model.loss(ex, p, b, chunk=training.loss_chunk)[1]
            return carry + replicated(nll)(p, microbatch).sum(), None
        return jax.lax.scan(add, jnp.float32(0), batch)[0]

    return gradients, evaluate


def drops(run) -> bool:
    """Whether anything is dropped out, so that a step needs a key."""
    return run.model.embedding_dropout > 0 or run.model.residual_dropout > 0


def _single(f):
    """vmap over a replica axis of size 1, without vmap: the same shapes, one batch dim less for the compiler."""
    def call(p, microbatch):
        out = f(p, jax.tree.map(lambda x: x[0], microbatch))
        return jax.tree.map(lambda x: x[None], out)
    return call


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
    return layout.constrain("optimizer", g.sum(0), axes)
