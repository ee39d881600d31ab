"""The data of a device in a pipelined step: its part of the model, the values that change, and their initial values."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.training import accumulators, backward
from meshtrain.training.backward import LayerStack, SplitLayer, Weights, take


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """The model as functions, all called inside the shard_map on a device's shard.

    prepare(microbatch, extra) -> e: the inputs of all layers besides the residual stream, recomputed at each use.

    embed(ends, frozen, microbatch, extra) -> x: the input of the first layer.

    layer(weights, x, e) -> (x, stats). weights: a `Weights` of one layer.

    head(ends, frozen, x, microbatch, extra) -> (objective, metric), where x is the output of the last layer. Only the
    objective is differentiated. metric: a `LayerStats` of sums over the microbatch.

    leading: like `layer`, for layers of another kind before the first stage; None if there are none.

    stats: a `LayerStats`, which is not differentiated. ends: weights of the embedding and head, which all
    stages compute together. If these weights are sharded over stages, `embed` and `head` reduce over the stages and
    return the same on every stage. frozen: weights (of a layer, or of the embedding and head) without gradients.
    """
    prepare: Callable
    embed: Callable
    layer: Callable
    head: Callable
    leading: Callable | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The values on one device that are constant during a step. The values that change are in the carry."""
    schedule: Schedule
    model: ModelFunctions
    stage: jax.Array
    layers: Weights              # of all chunks, [V·n, …]
    ends: tuple[dict, dict]      # (trained, frozen)
    leading: Weights             # of the leading layers, [n, …]
    batch: dict                  # [M, …]
    extra: dict
    x: jax.ShapeDtypeStruct      # activations between stages
    split_layer: SplitLayer | None      # None without gradients
    leading_stack: LayerStack | None    # of all leading layers, if any; None without gradients
    columns: tuple[str, ...]     # of the schedule, in the order of the numbers of a tick

    @property
    def depth(self) -> int:
        """Return n, the number of layers of a chunk."""
        return jax.tree.leaves(self.layers)[0].shape[0] // self.schedule.num_chunks

    def layer(self, chunk, i) -> Weights:
        """Return the weights of layer i of a chunk."""
        return take(self.layers, chunk * self.depth + i)

    def microbatch(self, i):
        return take(self.batch, i)

    def prepare(self, i):
        return self.model.prepare(self.microbatch(i), self.extra)

    def embed(self, ends, i):
        return self.model.embed(ends, self.ends[1], self.microbatch(i), self.extra)

    def head(self, ends, y, i):
        return self.model.head(ends, self.ends[1], y, self.microbatch(i), self.extra)

    def prepare_tick(self, numbers):
        """Return (numbers, {"F_e": prepared inputs of F's microbatch, "B_e": those of B's}).

        numbers: this stage's entries of a tick, in the order of `columns`.
        """
        kinds = "FB" if self.split_layer else "F"
        return numbers, {f"{kind}_e": self.prepare(numbers[self.columns.index(f"{kind}_mb")]) for kind in kinds}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """The values on one device that change from tick to tick. Without gradients there are only X, metric and tick.

    D, Q, R, X, Z: the buffers of the schedule, [slots, …]. D: cotangents of chunks. X: inputs of chunks. Q: residuals
    that the weight gradient reads. R: the other residuals. Z: values that B passes to W. L: see the leading layers
    below. All other fields except `tick` are sums: stats, the metric, and the gradients of layers, of embedding and
    head (end_grads), and of leading layers. tick: the numbers and inputs of the next tick.
    """
    D: Any = None
    L: Any = None
    Q: Any = None
    R: Any = None
    X: Any = None
    Z: Any = None
    stats: Any = None
    end_grads: Any = None
    leading_grads: Any = None
    metric: Any = None
    tick: Any = None
    layer_grads: Any = None


def make_shard(schedule: Schedule, model: ModelFunctions, differentiate: bool, stage, weights, batch: dict, extra):
    """Return (Shard, initial carry with zeros, numbers [T, columns] of the tick after each)."""
    stage, (layers, (ends, frozen_ends), (leading, frozen_leading)) = stage[0], weights
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    depth = jax.tree.leaves(layers)[0].shape[2]
    # [V, 1, n, …] -> [V·n, …]
    flat, frozen = jax.tree.map(lambda a: a.reshape(num_chunks * depth, *a.shape[3:]), layers)
    numbers = ((jnp.arange(num_chunks) * num_stages + stage)[:, None] * depth + jnp.arange(depth)).reshape(-1)
    batch = jax.tree.map(lambda a: a[:, 0], batch)                                      # [M, 1, …] -> [M, …]
    count = len(jax.tree.leaves((leading, frozen_leading))[0]) if model.leading else 0
    layers, leading = Weights(flat, numbers, frozen), Weights(leading, jnp.arange(count), frozen_leading)
    x = jax.eval_shape(lambda: model.embed(ends, frozen_ends, take(batch, 0), extra))
    e = jax.eval_shape(lambda: model.prepare(take(batch, 0), extra))
    one_of = backward.of_one_layer
    split_layer = SplitLayer(model.layer, one_of(layers), x, e) if differentiate else None
    leading_stack = LayerStack(SplitLayer(model.leading, one_of(leading), x, e), count) if (
        differentiate and model.leading is not None and count) else None
    columns = dict(schedule.columns) | {name: np.tile(a[:, None], num_stages) for name, a in schedule.shared.items()}
    ticks = jnp.take(np.stack(list(columns.values()), axis=2), stage, axis=1)
    this = Shard(schedule, model, stage, layers, (ends, frozen_ends), leading,
                 batch, extra, x, split_layer, leading_stack, tuple(columns))
    slots = schedule.slots

    def buffer(avals, *shape):
        return jax.tree.map(lambda a: jnp.zeros((*shape, *a.shape), a.dtype), avals)

    metric = jax.eval_shape(lambda x: model.head(ends, frozen_ends, x, take(batch, 0), extra)[1], x)
    carry = Carry(X=buffer(x, slots["X"]), metric=buffer(metric))
    if split_layer:
        saved, stats = split_layer.residuals, split_layer.stats
        carry = replace(carry, R=buffer(saved.for_inputs, slots["R"], depth), Q=buffer(
            saved.for_weights, slots["Q"], depth), D=buffer(x, slots["D"]))
        carry = replace(carry, layer_grads=accumulators.zeros(flat), end_grads=accumulators.zeros(ends),
                        leading_grads=accumulators.zeros(leading.trained),
                        stats=buffer(stats | leading_stack.layer.stats if leading_stack else stats))
        if schedule.split:
            carry = replace(carry, Z=buffer(split_layer.passed, slots["Z"], depth))
    # The numbers are in the carry, because XLA would otherwise fuse their selection into each use and repeat it per
    # element (of attention scores, too).
    return this, replace(carry, tick=this.prepare_tick(ticks[0])), jnp.roll(ticks, -1, axis=0)
