"""Gradients of a step and loss of an evaluation through the stages of a pipeline.

`executor` executes the schedule on the model, which is passed as functions. Before the executor's loop the weights are
gathered once per step, in the compute dtype, and stacked by stage and chunk. After the loop gradients are summed and
sharded as in [optimizer]. The gradient of the balance loss is injected in each layer, because only the last stage
computes the objective.

Sources: `parallel.pipeline.schedules`. The injection: arXiv:2401.06066 (DeepSeekMoE) and Megatron-LM's router losses.
"""
from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from meshtrain import pattern
from meshtrain.model import block, params
from meshtrain.model.loss import with_balance_loss
from meshtrain.model.stats import LayerStats, Normalizers
from meshtrain.model.transformer import without_layers
from meshtrain.names import LAYERS
from meshtrain.sharding import rules
from meshtrain.sharding.rules import GATHERED
from meshtrain.training import accumulators, executor, objective
from meshtrain.training.accumulate import LayerInputs, StepSpec
from meshtrain.training.reduction import reduce_deferred
from meshtrain.training.shard import ModelFunctions

LOSS = "loss"       # the name of the loss among the numbers of the head

_map_axes = partial(jax.tree.map, is_leaf=rules.is_axes)


def build(step: StepSpec):
    """Return (`gradients`, `evaluate`), with the interface of `accumulate`. Evaluation runs without chunks, whatever
    the schedule.
    """
    model, layout, schedule = step.model, step.layout, step.schedule
    assert schedule is not None
    num_stages = schedule.num_stages
    functions, of_evaluation = _functions(step, num_stages * schedule.num_chunks)
    ends_axes, layers_axes = without_layers(step.state.trained_axes), step.state.trained_axes[LAYERS]
    # includes `seq`, because each shard of a sequence has its own gradients
    summed = step.deferred_axes + layout.mesh_axes("activations", "seq")
    # Experts stay on their devices. Their gradients are already whole along the axes that split them.
    def whole_axes(axes):
        return tuple(tuple(a for a in layout.mesh_axes(GATHERED, axis) if a in summed) for axis in axes)

    def of_parts(subtree):
        return tuple(_map_axes(lambda axes: whole_axes(axes[1:]), subtree(part[LAYERS])) for part in axes)
    before_axes, axes = model.before(layers_axes), model.divide(step.state.axes)
    automatic = tuple(a for a in layout.sizes if a not in (executor.STAGE, *summed))
    placement = executor.Placement(
        step.mesh, summed, layer_axes=of_parts(model.first), leading_axes=of_parts(model.before),
        ends_specs=_map_axes(lambda axes: layout.spec(GATHERED, axes, drop=automatic),
                             tuple(map(without_layers, axes))),
        batch_specs={name: abstract.sharding.spec for name, abstract in step.batch.items()})

    def partial_axes(axes):
        whole = sum(whole_axes(axes), ())
        return tuple(a for a in summed if a not in whole)

    def gradients(p, batch: dict, key, shares_LE=None):
        count = accumulators.divisor(step.objective.count(batch))
        extra = {"count": count, "tokens": objective.tokens(batch)} | {
            name: value for name, value in (("key", key), ("shares", shares_LE)) if value is not None}
        weights = _into_loop(step, p, num_stages, schedule.num_chunks)
        of_head, layer_grads, ends, before, stats = executor.gradients(schedule, functions, placement, weights, batch,
                                                                    extra)
        grads = _map_axes(lambda axes, g: reduce_deferred(layout, partial_axes(axes), axes, g), ends_axes, ends)
        before = _map_axes(lambda axes, g: reduce_deferred(layout, (*partial_axes(axes), executor.STAGE), axes, g),
                           before_axes, before)
        layers = model.from_period(_map_axes(lambda axes, g: take_out_of_stages(layout, partial_axes(axes), axes, g),
                                             model.first(layers_axes), layer_grads), before)
        grads[LAYERS] = _map_axes(lambda axes, g: layout.constrain("optimizer", g, axes), layers_axes, layers)
        metrics = (stats.combine() + of_head.combine()).metrics(Normalizers(count, extra["tokens"]))
        return grads, metrics.pop(LOSS), count, metrics

    def evaluate(p, batch: dict):
        weights = _into_loop(step, p, num_stages, 1)
        return executor.evaluate(of_evaluation, placement, weights, batch,
                                 dict.fromkeys(("count", "tokens"), jnp.float32(1))).by_name[LOSS].value.sum()

    return gradients, evaluate


def _functions(step: StepSpec, virtual_stages: int) -> tuple[ModelFunctions, ModelFunctions]:
    """Return the model as functions for a pipeline: (functions of a training step, functions of an evaluation). A stage
    applies periods of layers.

    If the number of stages does not divide the number of periods, the last stages are padded with identity layers."""
    model, ex, num_layers = step.model, step.ex, step.model.cfg.num_layers
    uneven = pattern.count_padded(step.run.model, virtual_stages) > pattern.count_staged(step.run.model)
    leading = model.leading
    before = leading.num_layers if leading else 0
    goal = step.objective

    def prepare(microbatch: dict, extra):
        return LayerInputs(model.inputs(microbatch, extra.get("key"), extra.get("shares")), extra["tokens"])

    def embed(ends, frozen, microbatch: dict, extra):
        return model.embed(ex, params.join(ends, frozen), microbatch, extra.get("key"))

    def layer(module, weights, x, number, given):
        apply = block.build_block(ex, module, x.shape, given.inputs.dropout_key is not None)
        y, stats = apply(weights, x, given.inputs, number)
        if uneven:
            stats = stats.where(number < num_layers)
        y = with_balance_loss(y, stats, given.tokens)
        return jnp.where(number < num_layers, y, x) if uneven else y, stats

    def period(weights, x, given):
        stats = LayerStats()
        for i, (module, w) in enumerate(zip(model.period, model.staged[0].weights(
                params.join(weights.trained, weights.frozen)), strict=True)):
            x, of_layer = layer(module, w, x, before + weights.numbers * len(model.period) + i, given)
            stats += of_layer
        return x, stats

    def head(ends, frozen, x, microbatch: dict, extra):
        normalizers = Normalizers(extra["count"], extra["tokens"], extra.get("shares"))
        microbatch = microbatch | {"normalizers": normalizers}
        total, nll, stats = goal.head(model, ex, params.join(ends, frozen), x, microbatch)
        return total / normalizers.targets, stats | LayerStats.of("target", **{LOSS: nll})

    def loss(ends, frozen, x, microbatch: dict, extra):
        nll = goal.loss(model, ex, params.join(ends, frozen), x, microbatch)
        return nll, LayerStats.of("target", **{LOSS: nll})

    def leading_period(weights, x, given):
        joined = leading.weights(params.join(weights.trained, weights.frozen))
        y, stats = leading.apply(ex, joined, x, given.inputs, weights.numbers * len(leading.period))
        return with_balance_loss(y, stats, given.tokens), stats

    trained = ModelFunctions(prepare, embed, period, head, leading_period if leading else None)
    return trained, dataclasses.replace(trained, head=loss)


def _into_loop(step: StepSpec, p, num_stages: int, num_chunks: int):
    """Return (layers, ends, leading layers), each as (trained, frozen), gathered once per step in the compute dtype."""
    layout, model = step.layout, step.model
    periods = pattern.count_padded(step.run.model, num_stages * num_chunks) // len(model.period)

    p = model.as_read(layout, p, step.ex.numerics.dtype)
    ends = _map_axes(lambda axes, w: layout.constrain(GATHERED, w, axes), without_layers(step.state.axes),
                     without_layers(p))
    both = model.divide({**ends, LAYERS: p[LAYERS]})
    layers = tuple(_map_axes(partial(put_into_stages, layout, num_stages, num_chunks), model.first(axes[LAYERS]),
                             model.by_period(part[LAYERS], periods))
                   for axes, part in zip(model.divide(step.state.axes), both))
    before = tuple(_map_axes(lambda axes, w: layout.constrain(GATHERED, w, axes), model.before(axes[LAYERS]),
                             model.before(part[LAYERS]))
                   for axes, part in zip(model.divide(step.state.axes), both))
    return layers, tuple(map(without_layers, both)), before


def put_into_stages(layout: rules.Layout, num_stages: int, num_chunks: int, axes, w):
    """Return weights [L, …] as [V, P, n, …], sharded over the stages and gathered as a matmul takes them."""
    w = layout.constrain("params", w.reshape(num_chunks, num_stages, -1, *w.shape[1:]), _stage_axes(axes))
    return layout.constrain(GATHERED, w, _stage_axes(axes))


def take_out_of_stages(layout: rules.Layout, summed: tuple[str, ...], axes, g):
    """Sum gradients [R, V, P, n, …] over R, which is sharded over `summed`. Return them as [L, …]."""
    g = reduce_deferred(layout, summed, _stage_axes(axes), g, axes)
    return g.reshape(-1, *g.shape[3:])


def _stage_axes(axes):
    """Return the logical axes of [L, …] as [V, P, n, …]."""
    return (None, LAYERS, None, *axes[1:])
