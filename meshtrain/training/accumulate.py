"""The gradients of a step and the loss of an evaluation: by a scan over microbatches, or through the pipeline.

What makes ZeRO true in the compiled program, and not only intended, stands here, each constraint with its reason:
accumulators are pinned to [grads]; batch axes that [grads] does not name are reduced once per step through a vmapped
replica axis; sum and [optimizer] placement are one expression.
The loss is a sum over the step's tokens divided by their count, never a mean of means.
Sources: arXiv:1910.02054 (ZeRO); of pipelines: `parallel.schedules`.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.layout import rules
from meshtrain.layout.rules import Layout
from meshtrain.model import params, transformer
from meshtrain.model.layers import Execution
from meshtrain.model.transformer import Transformer
from meshtrain.names import LAYERS, MATMUL_ROLES, NO_TARGET
from meshtrain.parallel import pipeline, split, switch
from meshtrain.training.state import StateSpec

FIELDS = {"tokens": 1, "targets": 1, "segments": 1, "positions": 1, "index": 1, "sequence": 0}  # dims after [batch]


def scanned(run, model: Transformer, layout: Layout, ex: Execution, spec: StateSpec, once: tuple[str, ...]):
    """(`gradients`, `evaluate`), microbatch after microbatch.

    gradients: (params, batch, dropout key) -> (grads placed as [optimizer], loss, count, aux); aux: the layers' sums by name,
    divided by count. evaluate: (params, batch) -> nll sum. once: batch axes over which gradients are reduced once per step; `ex` hides them from the model.
    """
    training, inner, replicas = run.training, ex.layout, layout.ways(once)

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
        return jax.tree.map(lambda axes, g: jax.lax.with_sharding_constraint(g, spec_of(axes)), spec.axes, grads,
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
        grads = jax.tree.map(lambda axes, g: _reduce(layout, once, axes, g), spec.axes, pin(grads), is_leaf=rules.is_axes)
        return grads, nll.sum() / count, count, jax.tree.map(lambda a: a.sum((0, 1)) / count, aux)

    def evaluate(p, batch):
        def add(carry, microbatch):
            def nll(p, b):
                return model.loss(ex, p, b, chunk=training.loss_chunk)[1]
            return carry + replicated(nll)(p, microbatch).sum(), None
        return jax.lax.scan(add, jnp.float32(0), batch)[0]

    return gradients, evaluate


def pipelined(run, model: Transformer, layout: Layout, mesh, ex: Execution, spec: StateSpec, once, batch, schedule):
    """(`gradients`, `evaluate`) as those of `scanned`, through the pipeline; evaluation without chunks, whatever the schedule."""
    training, num_stages, num_layers = run.training, schedule.num_stages, run.model.num_layers
    matrices = params.tree(model.parameters(), lambda info: info.role in MATMUL_ROLES)
    staged = lambda axes: (None, LAYERS, None, *axes[1:])           # [L, …] as [V, P, n, …], filled up with zeros
    each = functools.partial(jax.tree.map, is_leaf=rules.is_axes)
    without_layers = lambda tree: {k: v for k, v in tree.items() if k != LAYERS}
    ends_axes, layers_axes = without_layers(spec.axes), spec.axes[LAYERS]
    others = tuple(a for a in layout.sizes if a != pipeline.STAGE)
    specs = dict(ends_specs=each(lambda axes: layout.spec("params", axes, drop=others), ends_axes),
                 batch_specs={name: abstract.sharding.spec for name, abstract in batch.items()})
    summed = once + layout.mesh_axes("activations", "seq")            # a share of a sequence has gradients of its own, too

    def into_loop(p, num_chunks: int):
        """(layers, ends): gathered once per step, in the compute dtype; inside the loop stands a full stage of them."""
        def cast(axes, w, matrix):
            return layout.constrain("params", w.astype(ex.dtype) if matrix else w, axes)

        def into_stages(axes, w):
            depth = -(-num_layers // (num_stages * num_chunks))
            w = jnp.pad(w, [(0, depth * num_stages * num_chunks - num_layers)] + [(0, 0)] * (w.ndim - 1))
            w = layout.constrain("params", w.reshape(num_chunks, num_stages, depth, *w.shape[1:]), staged(axes))
            return layout.in_use(w, staged(axes))

        p = each(cast, spec.axes, p, matrices)
        ends = each(lambda axes, w: layout.in_use(w, axes), ends_axes, without_layers(p))
        return each(into_stages, layers_axes, p[LAYERS]), ends

    def out_of_stages(axes, g):
        g = _reduce(layout, summed, staged(axes), g)
        return layout.constrain("optimizer", g.reshape(-1, *g.shape[3:])[:num_layers], axes)

    def layer(weights, x, numbered):
        number, inputs = numbered
        y, aux = transformer.block(ex, model.layer, weights, x, inputs, number)
        assert not aux, "the pipeline's executors carry no aux"
        return jnp.where(number < num_layers, y, x) if num_layers % (num_stages * schedule.num_chunks) else y

    def head(ends, x, microbatch, extra):
        total, nll = model.head_loss(ex, ends, x, microbatch["targets"], z_loss=training.z_loss, chunk=training.loss_chunk)
        return total / extra["count"], nll

    functions = pipeline.ModelFunctions(
        prepare=lambda microbatch, extra: model.inputs(microbatch, extra.get("key")),
        embed=lambda ends, microbatch, extra: model.embed(ex, ends, microbatch, extra.get("key")),
        layer=layer, head=head)

    def gradients(p, batch, key):
        count = jnp.maximum(jnp.sum(batch["targets"] != NO_TARGET), 1).astype(jnp.float32)
        extra = {"count": count} | ({} if key is None else {"key": key})
        executor = switch if schedule.family == "switch" else pipeline
        nll, ws, ends = executor.gradients(schedule, functions, mesh, summed, *into_loop(p, schedule.num_chunks), batch, extra, **specs)
        grads = each(lambda axes, g: _reduce(layout, summed, axes, g), ends_axes, ends)
        grads[LAYERS] = each(out_of_stages, layers_axes, ws)
        return grads, nll.sum() / count, count, {}

    def evaluate(p, batch):
        extra = {"count": jnp.float32(1)}
        return pipeline.evaluate(functions, mesh, summed, *into_loop(p, 1), batch, extra, **specs).sum()

    return gradients, evaluate


def layer_fbw(run, model: Transformer, layout: Layout, mesh, attend: Callable) -> tuple[split.FBW, jax.ShapeDtypeStruct]:
    """F, B and W of one layer as they stand in the pipeline's loop, and its input: what a microbatch leaves on a device.

    Traced, not compiled; the mesh may be abstract. Shapes are one device's, but whole over tensor, which XLA splits.
    """
    dtype, once, seq = jnp.dtype(run.model.compute_dtype), layout.batch_axes, layout.mesh_axes("activations", "seq")
    ex = Execution(layout.hide(once), dtype, attend, run.training.remat)
    sequences = run.data.global_batch // run.training.microbatches // layout.ways(once)
    sizes = (sequences, run.data.seq_len // layout.ways(seq))
    x = jax.ShapeDtypeStruct((*sizes, run.model.embed_dim), dtype)
    weights = params.tree(model.parameters(), lambda info: jax.ShapeDtypeStruct(
        info.shape[1:], dtype if info.role == "matrix" else info.dtype))[LAYERS]
    fbw = None

    def trace():
        nonlocal fbw
        key = jax.random.key(0) if drops(run) else None
        inputs = model.inputs({name: jnp.zeros(sizes[:1 + dims], jnp.int32) for name, dims in FIELDS.items()}, key)
        fbw = split.layer(lambda w, x, e: transformer.block(ex, model.layer, w, x, e[1], e[0])[0], weights, x, (jnp.int32(0), inputs))
        return jnp.int32(0)

    with jax.sharding.use_abstract_mesh(mesh):          # whatever mesh the caller has in force
        jax.eval_shape(jax.shard_map(trace, mesh=mesh, axis_names={pipeline.STAGE, *once, *seq}, in_specs=(), out_specs=P(),
                                     check_vma=False))
    return fbw, x


def drops(run) -> bool:
    """Whether anything is dropped out, so that a step needs a key."""
    return run.model.embedding_dropout > 0 or run.model.residual_dropout > 0


def _single(f):
    """vmap over a replica axis of size 1, without vmap: the same shapes, one batch dim less for the compiler."""
    def call(p, microbatch):
        out = f(p, jax.tree.map(lambda x: x[0], microbatch))
        return jax.tree.map(lambda x: x[None], out)
    return call


def _reduce(layout: Layout, once: tuple[str, ...], axes, g):
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
