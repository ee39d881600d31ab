"""Projections as float8 matmuls: e4m3 for x and w, e5m2 for dy, each scaled by a power of two from its own largest
value.

A product is a dot of float8 operands with the scale after it: a GPU runs that as one float8 matmul, while quantising
and dequantising around a bfloat16 dot is simplified away in silence. Scales are current, so there is no state, nothing
is clipped, and they are the largest values of whole tensors, whatever the layout. The projections that read one x are
one function: x is quantised, and gathered over the sequence, once; their weights have one scale, and so have their
cotangents, whose products are summed before it is applied.
Sources: arXiv:2209.05433 (formats); tensorwise scaling as in torchao and Transformer Engine's current scaling, which do
not round the scale.
"""
from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import get_abstract_mesh

from meshtrain.sharding.mesh import pmax
from meshtrain.sharding.rules import GATHERED, Layout

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SCALE = "float8_scale"              # name of the forward's scales, which every remat policy keeps: none is sought twice
# of zeros, too: products of two scales stay above float32's smallest normal number, nearly
SMALLEST_SCALE = 2.0 ** -100


ALGORITHM = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
BY_CUBLAS = lax.Precision.HIGHEST       # cuBLASLt's sums in float32; the program is compiled without Triton's matmuls


def precision(platform: str) -> lax.DotAlgorithmPreset | lax.Precision:
    """How a float8 dot is asked for. platform: as jax calls it.

    On GPUs: cuBLASLt's, every sum in float32. The default would be a Triton kernel, or on a GPU without float8 a 16-bit
    matmul in silence, where ALGORITHM does not compile. CPUs know no such choice: theirs are exact.
    """
    if platform == "cpu":
        return lax.DotAlgorithmPreset.DEFAULT
    return ALGORITHM if _has_algorithm() else BY_CUBLAS


@functools.cache
def _has_algorithm() -> bool:
    """Whether jax can hand ALGORITHM to a GPU's compiler. 0.12 cannot: "failed to legalize operation
    'vhlo.dot_general_v2'"."""
    x = jax.ShapeDtypeStruct((16, 16), E4M3)
    dot = jax.jit(lambda a, b: jnp.einsum("MK,KN->MN", a, b, precision=ALGORITHM, preferred_element_type=jnp.bfloat16))
    try:
        jax.export.export(dot, platforms=["cuda"])(x, x)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def over_tokens(layout: Layout, largest):
    """The largest of a number over the manual axes that split tokens, by an all-reduce; over the automatic ones it is
    already."""
    manual = tuple(a for a in layout.token_axes if a in get_abstract_mesh().manual_axes)
    return pmax(largest, manual) if manual else largest


def scale_of(amax, dtype):
    """The smallest power of two s with amax / s <= LARGEST[dtype], float32; NaN where amax is not finite."""
    wanted = jnp.maximum(amax.astype(jnp.float32) / LARGEST[dtype], SMALLEST_SCALE)
    # rounded up: mantissa to zero, exponent one more if it was not
    bits = lax.bitcast_convert_type(wanted, jnp.uint32)
    scale = lax.bitcast_convert_type((bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def quantised(x, scale, dtype):
    return (x.astype(jnp.float32) / scale).astype(dtype)


def largest(arrays):
    """Of the magnitudes of all of them: over the devices that an array is split over, an all-reduce of one number."""
    return functools.reduce(jnp.maximum, [jnp.max(jnp.abs(a)) for a in arrays])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def project(ex, forms, out_axes, frozen, x, ws):
    """The products of x with each of ws, in the compute dtype; gradients as `layers.project` has them.

    forms: ((eq, logical axes of w), …). out_axes, frozen: as there, out_axes for a single projection back onto the
    residual stream; the others read x from it, as it is split over the sequence.
    """
    return _forward(ex, forms, out_axes, frozen, x, ws)[0]


def _forward(ex, forms, out_axes, frozen, x, ws):
    sx = _kept(scale_of(over_tokens(ex.layout, largest([x])), E4M3))
    qx = quantised(x, sx, E4M3)
    if not out_axes:                        # sequence parallel: (N-1)/N of B·T·D bytes, half of bfloat16's
        qx = ex.layout.act(_on_residual(ex, qx), "batch", "seq", None)
    # From the compute dtype: some layouts read weights that were cast once per step, others the master weights.
    sw = _kept(scale_of(largest([w.astype(ex.dtype) for w in ws]), E4M3))
    full = _gathered(ex, forms, ws, sw)
    ys = []
    for (eq, _), w in zip(forms, full, strict=True):
        y = _dot(ex, eq, qx, w, ex.dtype)
        ys.append(_scaled(_on_residual(ex, y) if out_axes else y, sx * sw))
    # As in `layers.project`: without remat the shard is kept, and quantised and gathered again.
    return tuple(ys), (None if frozen else qx, sx, ws if ex.remat == "none" else full, sw)


def _backward(ex, forms, out_axes, frozen, saved, dys):
    qx, sx, ws, sw = saved
    full = _gathered(ex, forms, ws, sw) if ex.remat == "none" else ws
    scale = scale_of(over_tokens(ex.layout, largest(dys)), E5M2)
    dx, dws = 0, []
    for (eq, axes), w, dy in zip(forms, full, dys, strict=True):
        dy = quantised(dy, scale, E5M2)
        if out_axes:
            # as in `layers.project`
            dy = ex.layout.act(lax.optimization_barrier(dy) if ex.layout.sequence_parallel else dy, *out_axes)
        operands, out = eq.split("->")
        left, right = operands.split(",")
        dx += _dot(ex, f"{out},{right}->{left}", dy, w, ex.dtype)
        if frozen:
            continue
        dw = _dot(ex, f"{left},{out}->{right}", qx, dy, jnp.float32)
        dws.append(_scaled(ex.layout.constrain("grads", dw, axes), sx * scale))
    # Summed over tensor before it is scaled: a scale in between would give every product an all-reduce of its own.
    return _scaled(dx if out_axes else _on_residual(ex, dx), scale * sw), tuple(dws) or (None,) * len(forms)


project.defvjp(_forward, _backward)


def _kept(scale):
    return checkpoint_name(scale, SCALE)


def _gathered(ex, forms, ws, scale):
    """The quantised weights, gathered over the axes that split tokens: (N-1)/N of a byte for each element."""
    full = []
    for (_, axes), w in zip(forms, ws, strict=True):
        w = ex.layout.constrain("params", quantised(w.astype(ex.dtype), scale, E4M3), axes)
        full.append(ex.layout.constrain(GATHERED, w, axes))
    return tuple(full)


def _dot(ex, eq, a, b, dtype):
    return jnp.einsum(eq, a, b, precision=ex.float8, preferred_element_type=dtype)


def _scaled(x, scale):
    return x * scale.astype(x.dtype)        # a power of two: exact


def _on_residual(ex, x_BTD):
    return ex.layout.act(x_BTD, "batch", "residual_seq", None)
