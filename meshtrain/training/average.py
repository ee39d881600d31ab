"""The exponential moving average of the trained weights (training.ema), a part of the training state.

The average is float32 for any dtype of the weights: in bfloat16 an average with a decay of 0.99 or more never moves.
The average is placed as in [optimizer], takes 4 bytes a parameter, and begins as a copy of the weights. Update number
t, counted from 0, decays by min(decay, (1 + t) / (10 + t)), so that the initial weights do not linger: with decay
0.9999 they would still be 82 % of the average after 2,000 updates. Skipped steps are not updates. Frozen parameters and
the balance biases of experts, which are a controller's state, have no average: the averaged model has their last
values. With LoRA, A and B are averaged separately.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from meshtrain.model import params
from meshtrain.model.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average:
    """count: int32 scalar, the number of updates in the average. params: nested dicts like the weights that are
    averaged."""
    count: jax.Array
    params: dict


def divide(model: Transformer, p: dict) -> params.Divided:
    """Return the parameters that are averaged, and the other parameters. p: a tree like the parameters."""
    table = [dataclasses.replace(info, trainable=info.trainable and info.role != "balance"
                                 and jnp.issubdtype(info.dtype, jnp.floating)) for info in model.parameters()]
    return params.divide(table, p)


def begin(model: Transformer, p: dict) -> Average:
    """Return an average without updates: a copy of the weights. Call this in a jitted function, because the step
    donates the weights and the average as separate buffers."""
    return Average(jnp.int32(0), jax.tree.map(lambda w: jnp.copy(w).astype(jnp.float32), divide(model, p)[0]))


def update(model: Transformer, average: Average, p: dict, decay: float, applied: jax.Array) -> Average:
    """Return the average with the weights after a step. applied: whether the step was an update; if not, nothing
    changes.
    """
    t = average.count.astype(jnp.float32)
    rate = jnp.where(applied, 1 - jnp.minimum(decay, (1 + t) / (10 + t)), 0.0)
    moved = jax.tree.map(lambda mean, w: mean + rate * (w.astype(jnp.float32) - mean), average.params,
                         divide(model, p)[0])
    return Average(average.count + applied, moved)


def weights(model: Transformer, average: Average, p: dict) -> dict:
    """Return `p` with each averaged parameter replaced by its average, in the dtypes of `p`."""
    averaged, others = divide(model, p)
    return params.join(jax.tree.map(lambda mean, w: mean.astype(w.dtype), average.params, averaged), others)
