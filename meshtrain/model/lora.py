"""LoRA: an adapted projection W computes x·W + alpha/rank · (x·A)·B. Only A and B are trained.

Adapters are added to a layer after its construction, so the layer's paths and initialization do not change. A is random
and B is zero, so the first step computes the base model. Both are float32, because Adam's steps are too small for
bfloat16. The rank is never sharded. The other dims are sharded like those of the projection. Source: arXiv:2106.09685;
the range of A is PEFT's.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.model.execution import Execution
from meshtrain.model.layers import Linear, project, repeat_heads
from meshtrain.model.params import declare
from meshtrain.model.moe import MoE
from meshtrain.names import EXPERT_AXES, LORA_EXPERTS, LORA_TARGETS


class Adapter(nnx.Module):
    """The LoRA matrices A [in…, R] and B [R, out…] of a kernel [in…, out…]."""

    def __init__(self, rngs: nnx.Rngs, linear: Linear, fan_in_dims: int, rank: int, alpha: float):
        x, w, y = linear.eq.replace("->", ",").split(",")
        self.scale, shape, axes = alpha / rank, linear.kernel.shape, linear.axes
        self.down_eq, self.up_eq = f"{x},{w[:fan_in_dims]}R->BTR", f"BTR,R{w[fan_in_dims:]}->{y}"
        self.down_axes, self.up_axes = (*axes[:fan_in_dims], None), (None, *axes[fan_in_dims:])
        std = (3 * math.prod(shape[:fan_in_dims])) ** -0.5
        self.a = declare(rngs, jnp.float32, (*shape[:fan_in_dims], rank), self.down_axes,
                         "matrix", std=std, fan_in_dims=fan_in_dims)
        self.b = declare(rngs, jnp.float32, (rank, *shape[fan_in_dims:]), self.up_axes, "matrix", value=0.0)

    def __call__(self, ex: Execution, x, y, repeats: int, out_axes):
        """Return y + alpha/rank · (x·A)·B. repeats, out_axes: the arguments of the `Linear` that computed y."""
        act = ex.layout.act
        h_BTR = project(ex, ((self.down_eq, self.down_axes),), out_axes, False, x, (self.a[...],))[0]
        # An output that goes to the residual stream is split here, before B, so that B·T·R is scattered, not B·T·D.
        h_BTR = act(h_BTR, "batch", "residual_seq" if out_axes else "seq", None)
        # In float32: 4/3 in bfloat16 is 0.2% more, and `merge` uses the exact scale.
        h_BTR = (h_BTR.astype(jnp.float32) * self.scale).astype(ex.numerics.dtype)
        b, axes = repeat_heads(ex, self.b[...], self.up_axes, repeats)
        more = project(ex, ((self.up_eq, axes),), None, False, h_BTR, (b,))[0]
        return (act(y, "batch", "residual_seq", None) if out_axes else y) + more


class ExpertAdapters(nnx.Module):
    """The LoRA matrices of routed experts: A [E, in, R] and B [E, R, out] for each adapted matrix [E, in, out].
    `parallel.experts.dispatch` multiplies by them."""

    def __init__(self, rngs: nnx.Rngs, moe: MoE, names: Iterable[str], rank: int):
        for name in names:
            E, into, out = getattr(moe, name).shape
            for matrix, shape, start in ("a", (E, into, rank), dict(std=(3 * into) ** -0.5)), (
                    "b", (E, rank, out), dict(value=0.0)):
                setattr(self, f"{name}_{matrix}", declare(
                    rngs, jnp.float32, shape, EXPERT_AXES[f"{name}_{matrix}"], "matrix", **start))


def adapt(layer: nnx.Module, rngs: nnx.Rngs, lora) -> nnx.Module:
    """Return the layer, frozen, with adapters on those of its projections that lora.targets names.

    lora: the section [lora], with rank at least 1.
    """
    for _, module in nnx.iter_modules(layer):
        if isinstance(module, Linear):
            module.frozen = True
    for name, linear in projections(layer).items():
        if name in (lora.targets or LORA_TARGETS):
            # `linear.lora` was None, which flax treats as a static attribute.
            linear.lora = nnx.data(Adapter(rngs, linear, len(linear.axes) - len(linear.bias_axes),
                                           lora.rank, lora.alpha))
    if wanted := [name for name in experts(layer) if name in lora.targets]:
        layer.moe.lora = nnx.data(ExpertAdapters(rngs, layer.moe, [LORA_EXPERTS[name] for name in wanted], lora.rank))
    return layer


def check(layers: Iterable[nnx.Module], lora) -> None:
    """Check that each name in lora.targets is a projection of some layer.

    Raises: ValueError if a name is not such a projection."""
    known = known_targets(layers)
    if missing := [name for name in lora.targets if name not in known]:
        raise ValueError(f"lora.targets names {', '.join(missing)}, but the layers of this model have only "
                         f"{', '.join(known)}; leave {'them' if len(missing) > 1 else 'it'} out")


def known_targets(layers: Iterable[nnx.Module]) -> tuple[str, ...]:
    """Return the names that lora.targets may have with these layers."""
    there = {name for layer in layers for name in (*projections(layer), *experts(layer))}
    return tuple(name for name in (*LORA_TARGETS, *LORA_EXPERTS) if name in there)


def projections(layer: nnx.Module) -> dict[str, Linear]:
    """Return a layer's projections by name, in the order of LORA_TARGETS.

    The names are query, key, value and out of the mixer, and gate, up and down of the MLP, if the layer has them. In a
    layer with experts, gate, up and down are the projections of the shared experts.
    """
    mixers, mlps = (layer.mixer,), (layer.mlp, layer.moe and layer.moe.shared)
    linears = {name: getattr(part, name, None)
               for parts, names in ((mixers, LORA_TARGETS[:4]), (mlps, LORA_TARGETS[4:]))
             for part in parts if part is not None for name in names}
    return {name: linear for name, linear in linears.items() if linear is not None}


def experts(layer: nnx.Module) -> list[str]:
    """Return the names in LORA_EXPERTS that a layer has."""
    return [name for name, own in LORA_EXPERTS.items() if getattr(layer.moe, own, None) is not None]


def merge(kernel: jax.Array, adapter: Mapping[str, jax.Array], scale: float) -> jax.Array:
    """Return kernel + scale · A·B, float32, for stacked layers [L, …] or their experts [L, E, …]."""
    a, b = adapter["a"].astype(jnp.float32), adapter["b"].astype(jnp.float32)
    stack = kernel.shape[:a.ndim + b.ndim - 2 - kernel.ndim]
    change = jnp.einsum("...IR,...RO->...IO", a.reshape(*stack, -1, a.shape[-1]), b.reshape(*stack, a.shape[-1], -1),
                        precision=jax.lax.Precision.HIGHEST)
    return kernel.astype(jnp.float32) + scale * change.reshape(kernel.shape)
