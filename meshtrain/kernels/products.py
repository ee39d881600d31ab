"""Matmul precision by operand dtype.

By default jax multiplies float32 as TF32 (10 bits of mantissa instead of 23) on NVIDIA GPUs. This module computes
float32 as float32, as on CPUs and in PyTorch: always for the router, and for all matmuls with compute_dtype =
"float32". Tensor cores have no float32. A float32 array times a bfloat16 array is therefore three bfloat16 products, in
which only the sums are rounded.
"""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

source_info_util.register_exclusion(__file__)       # program text names the line that calls `einsum`

PART = "P"          # the dim of parts in einsums; no array of the model has this letter
WIDE, NARROW = jnp.dtype("float32"), jnp.dtype("bfloat16")


def precision(dtype) -> lax.Precision | None:
    """Return the precision for operands of this dtype; None leaves it to XLA."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def einsum(eq: str, a, b, dtype=None):
    """Return the einsum of two arrays in the precision of the wider dtype. dtype: the dtype of sums and result; None:
    the wider dtype.

    bfloat16 × float32: the float32 array is split into three bfloat16 parts, so that products are exact and only the
    float32 sums are rounded. float32 × float32 with a bfloat16 result: each array is split into two parts, with 16 bits
    together.
    """
    operands, out = eq.split("->")
    left, right = operands.split(",")

    def narrow(eq, a, b, dtype):
        return jnp.einsum(eq, a, b, precision=precision(NARROW), preferred_element_type=dtype)
    if dtype == NARROW and a.dtype == b.dtype == WIDE:
        (a1, a2), (b1, b2) = parts(a, 2), parts(b, 2)
        stacked = jnp.stack((a1, a1, a2), -1), jnp.stack((b1, b2, b1), -1)
        return narrow(f"{left}{PART},{right}{PART}->{out}", *stacked, dtype)
    if (a.dtype, b.dtype) == (NARROW, WIDE):
        if left[0] not in out:      # sums over tokens: XLA adds the parts before it reduces over devices
            return sum(narrow(eq, a, part, WIDE) for part in parts(b, 3)).astype(dtype or WIDE)
        own = next(letter for letter in right if letter in out)     # next to it, parts are more columns of one matrix

        def with_parts(dims):
            return dims.replace(own, PART + own)
        stacked = jnp.stack(parts(b, 3), right.index(own))
        summed = narrow(f"{left},{with_parts(right)}->{with_parts(out)}", a, stacked, WIDE)
        return summed.sum(out.index(own)).astype(dtype or WIDE)
    return jnp.einsum(eq, a, b, precision=precision(b.dtype), preferred_element_type=dtype)


def parts(x, count: int) -> list:
    """Split a float32 array into `count` bfloat16 arrays that add up to it.

    Three parts are exact (each holds 8 of 24 bits), except near float32's smallest numbers. The split uses
    `reduce_precision`, because XLA removes a cast to bfloat16 and back.
    """
    pieces = []
    for _ in range(count):
        part = lax.reduce_precision(x, 8, 7)
        pieces.append(part.astype(NARROW))
        x = x - part
    return pieces
