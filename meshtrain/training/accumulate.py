"""Gradients of a step and loss of an evaluation of the transformer (`pipelined`: through pipeline stages).

`reduction` scans over microbatches, and shards and sums gradients. This module has the function that `reduction` scans:
the transformer's forward and backward of a microbatch, layer by layer. The loss is the sum over the step's tokens
divided by their number, not a mean of means.
"""
from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshtrain.config.sections import Run
from meshtrain.model import divergence, float8, params
from meshtrain.model.block import LayerGroup
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.model.loss import with_balance_loss
from meshtrain.model.parts import Inputs
from meshtrain.model.stats import LayerStats, Normalizers
from meshtrain.model.transformer import Transformer, without_layers
from meshtrain.names import NO_TARGET
from meshtrain.parallel.context import attention
from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.sharding.order import by_gloo
from meshtrain.sharding.rules import Layout
from meshtrain.training import accumulators, backward, objective, qk_clip, reduction, state
from meshtrain.training.backward import LayerStack, Residuals, SplitLayer, Weights
from meshtrain.training.reduction import Backward, Reduction


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """All settings on which the gradients of a step depend, without the arrays.

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
    in_place: bool = False          # whether residuals are written directly into their buffers (`LayerStack`)

    @property
    def reduction(self) -> Reduction:
        return Reduction(self.layout, self.mesh, self.state.trained_axes, self.deferred_axes)

    @property
    def rows(self) -> dict:
        """The arrays of `batch` that come from the data; the others are computed on the devices."""
        later = self.objective.device_fields
        return {name: of for name, of in self.batch.items() if name not in later}

    @functools.cached_property
    def objective(self) -> objective.Objective:
        return objective.of_run(self.run)


def step_spec(run: Run, model: Transformer, layout: Layout, mesh: Mesh, engines: Engines,
              schedule: Schedule | None) -> StepSpec:
    """Build the StepSpec of a run.

    A pipeline always sums gradients after its loop, for any [grads]. [grads] then shards only the sums."""
    training, data = run.training, run.data
    deferred = layout.batch_axes if schedule else layout.find_deferred_axes(info.axes for info in model.parameters())
    replicas = layout.num_shards(deferred)
    precision = float8.precision(mesh.devices.flat[0].platform) if run.model.matmul_dtype == "float8" else None
    numerics = Numerics(jnp.dtype(run.model.compute_dtype), training.remat, precision)
    ex = Execution(layout, numerics, engines, in_order=not schedule and by_gloo(mesh), bounds=qk_clip.bounds(run),
                   router_losses=(run.experts.aux_loss, run.experts.z_loss))

    def place(dims: int) -> NamedSharding:
        logical = ("batch", "seq")[:1 + dims]
        return NamedSharding(mesh, P(None, deferred or None, *layout.spec("activations", logical, drop=deferred)))

    sequences = data.global_batch // training.microbatches // replicas
    def describe(dims: int, dtype, *more: int) -> jax.ShapeDtypeStruct:
        shape = (training.microbatches, replicas, sequences) + (data.seq_len,) * dims + more
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(dims))
    goal = objective.of_run(run)
    batch = {name: describe(*of) for name, of in (goal.fields | dict(goal.device_fields)).items()}
    state_spec = state.state_spec(model, run.optimizer, training.steps, layout, mesh, run.experts, run.run.seed,
                                  training.ema > 0)
    if run.model.num_experts and run.experts.aux_loss and run.experts.balance == "batch":
        state_spec = state_spec.with_shares(model)
    return StepSpec(run, model, layout, mesh, state_spec, ex, deferred, batch, schedule,
                    attention.token_order(run, layout.sizes),
                    in_place=ex.engines.by_kernels and jax.__version_info__ >= backward.IN_PLACE_SINCE)


class LayerInputs(NamedTuple):
    """The arguments of all layers besides the residual stream. tokens: the step's tokens, by which the balance loss is
    divided."""
    inputs: Inputs
    tokens: jax.Array


def gradients(step: StepSpec, p, batch: dict, key, shares_LE=None):
    """Return (gradients of the trained parameters, sharded as in [optimizer]; loss; count; metrics of layers).

    p: parameters. key: the key of dropout, or None. shares_LE: see `Inputs`. metrics: the numbers that layers and
    the objective report, by name.
    """
    weights = step.model.divide(_read(step, p))
    count = accumulators.divisor(step.objective.count(batch))
    normalizers = Normalizers(count, objective.tokens(batch), shares_LE)
    used = _count_used(step, step.ex.after(batch, normalizers))
    grads, nll, stats = reduction.accumulate(step.reduction, partial(_make_backward, step),
                                             step.ex.after(batch, (normalizers, used)), weights, (normalizers, key),
                                             used)
    return grads, nll.sum() / count, count, stats.combine().metrics(normalizers)


def evaluate(step: StepSpec, p, batch: dict):
    """Return the sum of the loss."""
    model, loss = step.model, step.objective.loss

    def add_loss(total, microbatch: dict, p):
        x_BTD = model.through_layers(step.ex, p, microbatch)
        return total + loss(model, step.ex, p, x_BTD, microbatch), None

    def losses(batch: dict, p):
        return jax.lax.scan(partial(add_loss, p=p), jnp.float32(0), reduction.select_replica(batch))[0][None]
    return reduction.on_replicas(step.reduction, losses)(batch, _read(step, p)).sum()


def scores(step: StepSpec, p, batch: dict):
    """Return the objective's `scores`, for DPO and RL.

    Scores have shape [microbatches, replicas, sequences] for DPO and [microbatches, replicas, sequences, T] for RL,
    with 0 in microbatches that are not computed.
    """
    goal, used = step.objective, _count_used(step, batch)

    def score(batch, p, used):
        batch = reduction.select_replica(batch)

        def put(carry, microbatch):
            m, scores = carry
            x_BTD = step.model.through_layers(step.ex, p, microbatch)
            new = goal.scores(step.model, step.ex, p, x_BTD, microbatch)
            return (m + 1, jax.lax.dynamic_update_index_in_dim(scores, new, m, 0)), LayerStats()
        B, T = batch["targets"].shape[1:]
        shape = (step.run.training.microbatches, B) + (() if goal.fills_all else (T,))
        (_, scores), _ = reduction.scan_microbatches(put, (jnp.int32(0), jnp.zeros(shape, jnp.float32)), batch, used)
        return scores[:, None]
    by_token = reduction.on_replicas(step.reduction, score, P(None, step.deferred_axes or None))(
        batch if used is None else step.ex.after(batch, used), _read(step, p), used)
    return by_token if goal.fills_all or step.order is None else by_token[..., np.argsort(step.order)]


def top_tokens(step: StepSpec, k: int, temperature: float, p, batch: dict):
    """Return the model's k most likely next tokens [microbatches, replicas, sequences, T, k], int32, and their
    log-probabilities, float32. Not for a model with a pipeline schedule."""
    def find(batch, p):
        def find_in(_, microbatch: dict):
            x_BTD = step.model.through_layers(step.ex, p, microbatch)
            spec, x_BTD, w = step.model.head_inputs(step.ex, p, x_BTD, step.run.training.loss_chunk,
                                                    temperature=temperature)
            return None, divergence.top_tokens(step.ex, spec, k, x_BTD, w, microbatch["targets"])
        _, found = jax.lax.scan(find_in, None, reduction.select_replica(batch))
        return jax.tree.map(lambda x: x[:, None], found)
    return reduction.on_replicas(step.reduction, find, P(None, step.deferred_axes or None))(batch, _read(step, p))


def _read(step: StepSpec, p):
    """Return the parameters as the loop over microbatches reads them."""
    cast = step.model.cast_before_loop(step.layout)
    return step.model.as_read(step.layout, p, dtype=step.ex.numerics.dtype if cast else None)


def _count_used(step: StepSpec, batch: dict):
    """Return how many microbatches are computed: up to the last one with a target. None means all."""
    if step.objective.fills_all:
        return None
    has_M = jnp.any(batch["targets"] != NO_TARGET, (1, 2, 3))
    return jnp.max(jnp.where(has_M, 1 + jnp.arange(len(has_M)), 0))


def _microbatch_gradients(step: StepSpec, weights: params.Divided, grads, microbatch: dict, normalizers: Normalizers,
                          key, stacks: list[LayerStack], buffers: list[Residuals | None]):
    """Run the forward and backward of one microbatch. The backward is explicit for each layer stack.

    Returns (grads with the microbatch's gradients added, nll, buffers, stats). Each layer's gradient is added to its
    accumulator as soon as it exists, so the gradients of a microbatch never exist beside their sums. This saves 4 bytes
    per accumulated parameter compared with `jax.grad` of the whole model. Gradients are float32 for any dtype of the
    weights. The buffers are overwritten.
    """
    model, ex = step.model, step.ex
    ends, frozen_ends = accumulators.widen(without_layers(weights.trained)), without_layers(weights.frozen)
    layer_inputs = LayerInputs(model.inputs(microbatch, key, normalizers.shares_LE), normalizers.tokens)
    stats, saved = LayerStats(), []

    def embed(ends, microbatch: dict):
        return model.embed(ex, params.join(ends, frozen_ends), microbatch, key)

    def head(read, x_BTD):
        total, nll, of_head = step.objective.head(model, ex, params.join(ends | read, frozen_ends), x_BTD,
                                                  microbatch | {"normalizers": normalizers})
        return total, (nll, of_head)

    x_BTD, embed_vjp = jax.vjp(lambda ends: embed(ends, microbatch), ends)
    stack_weights = _stack_weights(model, weights)
    for stack, layer_weights, into in zip(stacks, stack_weights, buffers, strict=True):
        x_BTD, of_stack, residuals = stack.forward(layer_weights, x_BTD, layer_inputs, into)
        stats += of_stack
        saved.append(residuals)
    read = model.read_by_head(ends)
    _, head_vjp, (nll, of_head) = jax.vjp(head, read, x_BTD, has_aux=True)

    d_head, dx_BTD = head_vjp(1 / normalizers.targets)
    head_grads = accumulators.add({name: grads[name] for name in read}, d_head)
    # Added before the layers' backward. Otherwise the head's gradient, float32 and not yet reduced, takes memory
    # during it. The norm's gradient is left out, because its reduction would come first.
    large = {name: g for name, g in head_grads.items() if name != "final_norm"}
    large, dx_BTD = jax.lax.optimization_barrier((large, dx_BTD))
    head_grads |= large
    dx_BTD = ex.after(dx_BTD, (head_grads, nll, of_head))
    stack_grads = [model.weights(grads, group) for group in model.groups]
    for i in reversed(range(len(stacks))):
        dx_BTD, stack_grads[i] = stacks[i].backward(stack_weights[i], layer_inputs, saved[i], dx_BTD, stack_grads[i])
    if ex.in_order:     # XLA gathers token ids for the embedding's gradient, and would do it during the loops above
        _, embed_vjp = jax.vjp(lambda ends: embed(ends, ex.after(microbatch, dx_BTD)), ends)
    d_embed, = embed_vjp(dx_BTD)
    head_grads, nll = ex.after((head_grads, nll), dx_BTD)
    ends_grads = accumulators.add(without_layers(grads) | head_grads, d_embed)
    buffers = [into if into is None else residuals for into, residuals in zip(buffers, saved)]
    return model.with_layers(ends_grads, stack_grads), nll, buffers, stats + of_head


def _make_backward(step: StepSpec, weights: params.Divided, rows: dict, normalizers: Normalizers, key) -> Backward:
    """Return the forward and backward of the transformer for microbatches like `rows`.

    The buffers of the `Backward` are the residuals of each group's `LayerStack`; None if residuals are offloaded to the
    host. If the loop allocated these buffers, XLA would fill them with zeros, which takes 3% of a step of llama3-8b.
    """
    model = step.model
    inputs = LayerInputs(jax.eval_shape(lambda: model.inputs(rows, key, normalizers.shares_LE)), normalizers.tokens)
    x_BTD = jax.eval_shape(lambda: model.embed(step.ex, params.join(*weights), rows, key))
    stacks, shapes = [], jax.eval_shape(partial(_stack_weights, model), weights)
    for group, stacked in zip(model.groups, shapes, strict=True):
        layer = SplitLayer(partial(_apply_period, step, group), backward.of_one_layer(stacked), x_BTD, inputs)
        stacks.append(LayerStack(layer, group.repeats, in_place=step.in_place))

    def add(grads, microbatch: dict, buffers: list[Residuals | None]):
        return _microbatch_gradients(step, weights, grads, microbatch, normalizers, key, stacks, buffers)
    buffers = [None if step.ex.numerics.remat == "offload" else stack.residuals for stack in stacks]
    return Backward(add, weights.trained, buffers)


def _apply_period(step: StepSpec, group: LayerGroup, weights: Weights, x_BTD, given: LayerInputs):
    """Return (output, stats) of one repeat of the group's period, with the gradient of its balance loss."""
    joined = tuple(map(params.join, weights.trained, weights.frozen))
    y_BTD, stats = group.apply(step.ex, joined, x_BTD, given.inputs, weights.numbers)
    return with_balance_loss(y_BTD, stats, given.tokens), stats


def _stack_weights(model: Transformer, weights: params.Divided) -> list[Weights]:
    """Return the stacked weights of each group, in the form of the arguments of its `LayerStack`."""
    return [Weights(model.weights(weights.trained, group), group.numbers(first), model.weights(weights.frozen, group))
            for first, group in model.number_groups()]


def drops(run: Run) -> bool:
    """Return whether the run uses dropout, so that a step needs a key."""
    return run.model.embedding_dropout > 0 or run.model.residual_dropout > 0
