"""LoRA: each adapted projection W of the frozen model computes x·W + alpha/rank · (x·A)·B, and A and B alone are
trained.

Adapters are put onto a finished layer, so what lies below them is the layer's and its initialization is unchanged. A
starts random, B at zero: the first step computes what the model without adapters does. Both are float32, whatever the
dtype of the frozen weights, for Adam's steps are too small for bfloat16. The rank is never split; the other dims lie as
the projection's.
Source: arXiv:2106.09685; the range of A is PEFT's.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.model.layers import Execution, Linear, project, repeated
from meshtrain.model.params import declare
from meshtrain.names import LORA_TARGETS


class Adapter(nnx.Module):
    """A [in…, R] and B [R, out…] beside a kernel [in…, out…]."""

    def __init__(self, rngs, linear: Linear, fan_in_dims: int, rank: int, alpha: float):
        x, w, y = linear.eq.replace("->", ",").split(",")
        self.scale, shape, axes = alpha / rank, linear.kernel.shape, linear.axes
        self.down_eq, self.up_eq = f"{x},{w[:fan_in_dims]}R->BTR", f"BTR,R{w[fan_in_dims:]}->{y}"
        self.down_axes, self.up_axes = (*axes[:fan_in_dims], None), (None, *axes[fan_in_dims:])
        std = (3 * math.prod(shape[:fan_in_dims])) ** -0.5
        self.a = declare(rngs, jnp.float32, (*shape[:fan_in_dims], rank), self.down_axes,
                         "matrix", std=std, fan_in_dims=fan_in_dims)
        self.b = declare(rngs, jnp.float32, (rank, *shape[fan_in_dims:]), self.up_axes, "matrix", value=0.0)

    def __call__(self, ex: Execution, x, y, repeats: int, out_axes):
        """y + alpha/rank · (x·A)·B. repeats, out_axes: as of `Linear`, whose y it is."""
        act = ex.layout.act
        h_BTR = project(ex, ((self.down_eq, self.down_axes),), out_axes, False, x, (self.a[...],))[0]
        # What goes back onto the residual stream is split there before it is added: B·T·R is scattered, not B·T·D.
        h_BTR = act(h_BTR, "batch", "residual_seq" if out_axes else "seq", None)
        # In float32: 4/3 in bfloat16 is 0.2% more, and `merged` takes the exact scale.
        h_BTR = (h_BTR.astype(jnp.float32) * self.scale).astype(ex.dtype)
        b, axes = repeated(ex, self.b[...], self.up_axes, repeats)
        more = project(ex, ((self.up_eq, axes),), None, False, h_BTR, (b,))[0]
        return (act(y, "batch", "residual_seq", None) if out_axes else y) + more


def adapt(layer: nnx.Module, rngs: nnx.Rngs, lora) -> nnx.Module:
    """The layer, frozen, with adapters at its projections. lora: the section [lora], its rank at least 1.

    Raises: ValueError where it lacks one that lora.targets names.
    """
    found = projections(layer)
    if missing := [name for name in lora.targets if name not in found]:
        raise ValueError(f"lora.targets names {', '.join(missing)}, and a layer of this model has "
                         f"{', '.join(found)}; leave {'them' if len(missing) > 1 else 'it'} out"
                         + " (experts have no adapters)" * (layer.moe is not None))
    for name, linear in found.items():
        linear.frozen = True
        if name in (lora.targets or found):
            # Until here it was None, which flax takes for a static attribute.
            linear.lora = nnx.data(Adapter(rngs, linear, len(linear.axes) - len(linear.bias_axes),
                                           lora.rank, lora.alpha))
    return layer


def projections(layer: nnx.Module) -> dict[str, Linear]:
    """The projections of a layer by their names, in the order of LORA_TARGETS; of experts only those that all tokens
    share."""
    parts = [part for part in (layer.attention, layer.mlp, layer.moe and layer.moe.shared) if part is not None]
    found = {name: linear for part in parts for name, linear in vars(part).items() if isinstance(linear, Linear)}
    return {name: found[name] for name in LORA_TARGETS if name in found}


def merged(kernel: jax.Array, adapter: Mapping[str, jax.Array], scale: float) -> jax.Array:
    """kernel + scale · A·B of stacked layers [L, …], float32."""
    a, b = adapter["a"].astype(jnp.float32), adapter["b"].astype(jnp.float32)
    depth = kernel.shape[0]
    change = jnp.einsum("LIR,LRO->LIO", a.reshape(depth, -1, a.shape[-1]), b.reshape(depth, b.shape[1], -1),
                        precision=jax.lax.Precision.HIGHEST)
    return kernel.astype(jnp.float32) + scale * change.reshape(kernel.shape)
