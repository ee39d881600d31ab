"""A model of equal layers as three functions: before the layers, one layer, after the layers.

The three functions serve pipelines, and gradients layer by layer: each layer's gradient is added to its sum as soon as
it exists, and ZeRO-3 gathers one layer at a time. A loss as a single function allows neither, because `jax.grad` keeps
the gathered weights of all layers as residuals.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.model.stats import LayerStats
from meshtrain.sharding import rules
from meshtrain.sharding.rules import GATHERED
from meshtrain.training import accumulators, backward
from meshtrain.training.backward import LayerStack, SplitLayer, Weights
from meshtrain.training.reduction import Backward


@dataclasses.dataclass(frozen=True)
class Stack:
    """A loss whose params are {layers: arrays [L, …], other names: the weights of embedding and head ("ends")}.

    embed(ends, rows) -> x, the input of the first layer: one array of any shape. layer(w, x) -> x: one layer, with its
    weights w; x keeps its shape and dtype. head(ends, x, rows) -> (sum, count), like every loss. layers: the key of the
    stacked weights.

    A Stack can replace any loss: `stack(params, rows)` is (sum, count). The weights that `embed`, `layer` and `head`
    get are already gathered for matmuls, so these functions need no call of `Layout.gathered`.

    >>> stack = mt.Stack(lambda ends, rows: rows @ ends["in"], lambda w, x: x @ w,
    ...                  lambda ends, x, rows: (x.sum(), x.shape[0]))
    >>> total, count = stack({"in": jnp.ones((3, 2)), "blocks": jnp.ones((4, 2, 2))}, jnp.ones((5, 3)))
    >>> float(total), count
    (480.0, 5)
    """
    embed: Callable
    layer: Callable
    head: Callable
    layers: str = "blocks"

    def __call__(self, params: dict, rows: Any):
        """Return (sum, count) by a scan over the layers. `jax.grad` of this scan is not layer by layer."""
        ends, blocks = self.divide(params)
        x = self.embed(ends, rows)
        self.check(blocks, x)
        x, _ = jax.lax.scan(lambda x, w: (self.layer(w, x), None), x, blocks)
        return self.head(ends, x, rows)

    def divide(self, tree: dict) -> tuple[dict, Any]:
        """Return (ends, stacked layers) of params, or of a tree like them. Raises: ValueError without layers."""
        if not isinstance(tree, dict) or self.layers not in tree:
            names = ", ".join(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
            raise ValueError(f"Stack: params have no key {self.layers!r}, the weights of the layers stacked [L, …] "
                             f"(keys: {names}); give that key as layers=")
        return {name: w for name, w in tree.items() if name != self.layers}, tree[self.layers]

    def check(self, blocks: Any, x: Any) -> None:
        """Check that a layer returns one array like x. blocks: stacked weights. Raises: ValueError."""
        if not hasattr(x, "shape"):
            raise ValueError(f"Stack: embed returned {jax.tree.structure(x)}; x must be one array. Stack what belongs "
                             f"together along a dim, or keep it in rows")
        sizes = {jnp.shape(w)[:1] for w in jax.tree.leaves(blocks)}
        if len(sizes) != 1 or sizes == {()}:
            shapes = ", ".join(str(jnp.shape(w)) for w in jax.tree.leaves(blocks))
            raise ValueError(f"Stack: the weights of {self.layers!r} are {shapes or 'empty'}; all must be stacked "
                             f"[L, …] with the same number of layers L")
        y = jax.eval_shape(self.layer, backward.of_one_layer(blocks), jax.ShapeDtypeStruct(x.shape, x.dtype))
        if not hasattr(y, "shape"):
            raise ValueError(f"Stack: layer returned {jax.tree.structure(y)}; it must return one array like x")
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ValueError(f"Stack: layer turned x {x.dtype}{list(x.shape)} into {y.dtype}{list(y.shape)}; it must "
                             f"keep shape and dtype, e.g. return y.astype(x.dtype)")

    def make_backward(self, layout: rules.Layout, axes: dict, weights: dict, rows: Any) -> Backward:
        """Return the `Backward` of this stack, layer by layer. axes: logical axes, a tree like weights."""
        (ends, blocks), (ends_axes, blocks_axes) = self.divide(weights), self.divide(axes)
        layer_axes = jax.tree.map(lambda names: names[1:], blocks_axes, is_leaf=rules.is_axes)

        def gather(axes, narrow, w):
            """Return float32 weights in their own dtype, gathered. XLA removes the two casts."""
            return jax.tree.map(lambda names, like, w: layout.constrain(GATHERED, w.astype(like.dtype), names),
                                axes, narrow, w, is_leaf=rules.is_axes)

        def embed(wide, rows):
            return self.embed(gather(ends_axes, ends, wide), rows)

        def apply(w: Weights, x, inputs):
            return self.layer(gather(layer_axes, blocks, w.trained), x), LayerStats()

        def head(wide, x, rows):
            return check_sums(self.head(gather(ends_axes, ends, wide), x, rows), "the head of the Stack")

        x = jax.eval_shape(lambda ends: embed(ends, rows), ends)
        self.check(blocks, x)
        depth = jax.tree.leaves(blocks)[0].shape[0]
        stacked = Weights(blocks, jnp.arange(depth), ())
        layers = LayerStack(SplitLayer(apply, backward.of_one_layer(stacked), x, ()), depth)

        def add(sums: dict, rows, buffers):
            wide, (ends_sums, layers_sums) = accumulators.widen(ends), self.divide(sums)
            x, embed_vjp = jax.vjp(lambda wide: embed(wide, rows), wide)
            y, _, saved = layers.forward(stacked, x, (), buffers)
            total, head_vjp, count = jax.vjp(lambda wide, y: head(wide, y, rows), wide, y, has_aux=True)
            d_ends, dy = head_vjp(jnp.ones_like(total))
            ends_sums = accumulators.add(ends_sums, d_ends)
            dx, layers_sums = layers.backward(stacked, (), saved, dy, layers_sums)
            ends_sums = accumulators.add(ends_sums, embed_vjp(dx)[0])
            return {**ends_sums, self.layers: layers_sums}, (total, count), saved, LayerStats()
        return Backward(add, weights, layers.residuals, (0, 0))


def check_sums(result: Any, name: str) -> tuple[jax.Array, jax.Array]:
    """Return (sum, count) in float32. name: the name of the function that returned them. Raises: ValueError."""
    numbers = (int, float, np.generic, np.ndarray, jax.Array)
    if not isinstance(result, tuple) or len(result) != 2 or any(
            not isinstance(x, numbers) or jnp.shape(x) != () for x in result):
        returned = jax.tree.map(np.shape, result)
        returned = "a scalar" if returned == () else returned
        raise ValueError(f"{name} returned {returned}; return two scalars (sum, count): the sum over the rows, and the "
                         f"number by which the sums of all rows are divided, e.g. (nats.sum(), mask.sum()). A "
                         f"mean cannot be added to the means of other rows")
    total, count = result
    if not jnp.issubdtype(jnp.result_type(total), jnp.floating) or jnp.iscomplexobj(count):
        raise ValueError(f"{name} returned a sum of dtype {jnp.result_type(total)} and a count of dtype "
                         f"{jnp.result_type(count)}; return a floating sum, which has gradients, and a real count")
    return jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32)
