"""Float8 matmuls for projections: e4m3 for x and w, e5m2 for dy, each with a power-of-two scale from its current amax.

A product is a dot of float8 operands, scaled afterwards. GPUs run it as one float8 matmul, whereas XLA silently removes
quantize-dequantize pairs around a bfloat16 dot. Current scaling needs no state and clips nothing. On every layout, amax
is the maximum of the whole tensor. Projections of the same x are one function, which quantizes x and gathers it over
the sequence once. The weights of these projections share a scale. Their cotangents share a scale as well, and the
products of the cotangents are summed before scaling. Sources: arXiv:2209.05433 (formats); tensorwise scaling as in
torchao and in Transformer Engine's current scaling, which do not round the scale.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import get_abstract_mesh

from meshtrain.model import input_gradient
from meshtrain.sharding import reduced
from meshtrain.sharding.mesh import pmax
from meshtrain.sharding.rules import GATHERED, Layout

if TYPE_CHECKING:
    from meshtrain.model.execution import Execution

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SCALE = "float8_scale"              # name of the forward's scales; every remat policy saves them
# also for tensors of zeros; a product of two scales stays near or above float32's smallest normal number
SMALLEST_SCALE = 2.0 ** -100

ALGORITHM = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
BY_CUBLAS = lax.Precision.HIGHEST  # cuBLASLt accumulates in float32; the program is compiled without Triton matmuls


def precision(platform: str) -> lax.DotAlgorithmPreset | lax.Precision:
    """Return the `precision` argument that requests a float8 dot. platform: jax's name of the platform.

    On GPUs this precision selects cuBLASLt, with float32 accumulation. The default precision would select a Triton
    kernel. On a GPU without float8, the default would silently become a 16-bit matmul, whereas ALGORITHM does not
    compile. CPUs have only one choice, which is exact.
    """
    if platform == "cpu":
        return lax.DotAlgorithmPreset.DEFAULT
    return ALGORITHM if _has_algorithm() else BY_CUBLAS


@functools.cache
def _has_algorithm() -> bool:
    """Return whether jax can lower ALGORITHM for GPUs.

    jax 0.12 cannot: "failed to legalize operation 'vhlo.dot_general_v2'".
    """
    x = jax.ShapeDtypeStruct((16, 16), E4M3)
    dot = jax.jit(lambda a, b: jnp.einsum("MK,KN->MN", a, b, precision=ALGORITHM, preferred_element_type=jnp.bfloat16))
    try:
        jax.export.export(dot, platforms=["cuda"])(x, x)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def over_tokens(layout: Layout, largest):
    """Return the maximum over manual axes that split tokens, by an all-reduce. It includes automatic axes already."""
    manual = tuple(a for a in layout.token_axes if a in get_abstract_mesh().manual_axes)
    return pmax(largest, manual) if manual else largest


def scale_of(amax, dtype):
    """Return the smallest power of two s with amax / s <= LARGEST[dtype], float32; NaN if amax is not finite."""
    wanted = jnp.maximum(amax.astype(jnp.float32) / LARGEST[dtype], SMALLEST_SCALE)
    # round up: clear the mantissa, and increment the exponent if it was not zero
    bits = lax.bitcast_convert_type(wanted, jnp.uint32)
    scale = lax.bitcast_convert_type((bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def quantize(x, scale, dtype):
    return (x.astype(jnp.float32) / scale).astype(dtype)


def largest(arrays):
    """Return amax over all arrays. This takes an all-reduce of one number over the devices that shard the arrays."""
    return functools.reduce(jnp.maximum, [jnp.max(jnp.abs(a)) for a in arrays])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def project(ex: Execution, forms, out_axes, frozen, x, ws):
    """Return the products of x with each of ws, in the compute dtype. Gradients are as in `layers.project`.

    forms: ((eq, logical axes of w), …). out_axes, frozen: as in `layers.project`. Without out_axes, x is part of the
    residual stream and sharded over the sequence.
    """
    return _forward(ex, forms, out_axes, frozen, x, ws)[0]


def _forward(ex: Execution, forms, out_axes, frozen, x, ws):
    sx = checkpoint_name(scale_of(over_tokens(ex.layout, largest([x])), E4M3), SCALE)
    qx = quantize(x, sx, E4M3)
    if not out_axes:                        # sequence parallel: (N-1)/N of B·T·D bytes, half of bfloat16's
        qx = ex.layout.act(_on_residual(ex, qx), "batch", "seq", None)
    # Cast to the compute dtype first, because some layouts read weights that were cast once per step, others the master
    # weights.
    sw = checkpoint_name(scale_of(largest([w.astype(ex.numerics.dtype) for w in ws]), E4M3), SCALE)
    full = _gather_quantized(ex, forms, ws, sw)
    ys = []
    for (eq, _), w in zip(forms, full, strict=True):
        y = _dot(ex, eq, qx, w, ex.numerics.dtype)
        ys.append(_rescale(_on_residual(ex, y) if out_axes else y, sx * sw))
    # As in `layers.project`: without remat the shard is saved. The backward quantizes and gathers it again.
    return tuple(ys), (None if frozen else qx, sx, ws if ex.numerics.remat == "none" else full, sw)


def _backward(ex: Execution, forms, out_axes, frozen, saved, dys):
    qx, sx, ws, sw = saved
    full = _gather_quantized(ex, forms, ws, sw) if ex.numerics.remat == "none" else ws
    scale = scale_of(over_tokens(ex.layout, largest(dys)), E5M2)
    over = input_gradient.list_sum_axes(ex.layout, forms)
    dys = input_gradient.place_cotangents(ex.layout, forms, over, [quantize(dy, scale, E5M2) for dy in dys])
    dx: input_gradient.Sums = {}
    dws = []
    for (eq, axes), w, dy, summed in zip(forms, full, dys, over, strict=True):
        if out_axes:
            # as in `layers.project`
            dy = ex.layout.act(lax.optimization_barrier(dy) if ex.layout.sequence_parallel else dy, *out_axes)
        operands, out = eq.split("->")
        left, right = operands.split(",")
        product = _dot(ex, f"{out},{right}->{left}", dy, w, ex.numerics.dtype)
        dx = input_gradient.add(dx, summed, product)
        if frozen:
            continue
        dw = _dot(ex, f"{left},{out}->{right}", qx, dy, reduced.dtype_of(ex.layout))
        dws.append(_rescale(reduced.place(ex.layout, dw, axes), sx * scale))
    # Reduced over tensor before scaling; otherwise every product would have its own all-reduce.
    dx_BTD = input_gradient.total(ex.layout, dx)
    return _rescale(dx_BTD if out_axes else _on_residual(ex, dx_BTD), scale * sw), tuple(dws) or (None,) * len(forms)


project.defvjp(_forward, _backward)


def _gather_quantized(ex: Execution, forms, ws, scale):
    """Return the quantized weights, gathered over the axes that split tokens: (N-1)/N bytes per element."""
    full = []
    for (_, axes), w in zip(forms, ws, strict=True):
        w = ex.layout.constrain("params", quantize(w.astype(ex.numerics.dtype), scale, E4M3), axes)
        full.append(ex.layout.constrain(GATHERED, w, axes))
    return tuple(full)


def _dot(ex: Execution, eq, a, b, dtype):
    return jnp.einsum(eq, a, b, precision=ex.numerics.float8, preferred_element_type=dtype)


def _rescale(x, scale):
    return x * scale.astype(x.dtype)        # a power of two: exact


def _on_residual(ex: Execution, x_BTD):
    return ex.layout.act(x_BTD, "batch", "residual_seq", None)
