"""Matmul precision by operand dtype.

By default jax multiplies float32 as TF32 (10 bits of mantissa instead of 23) on NVIDIA GPUs. Here float32 means
float32, as on CPUs and in PyTorch: for the router always, for everything with compute_dtype = "float32".
"""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

source_info_util.register_exclusion(__file__)       # program text names the line that calls `einsum`


def precision(dtype) -> lax.Precision | None:
    """The precision for operands of this dtype; None leaves it to XLA."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def einsum(eq: str, a, b, dtype=None):
    """The product of two arrays of one dtype in its precision. dtype: of sums and result; None: that of a and b."""
    return jnp.einsum(eq, a, b, precision=precision(b.dtype), preferred_element_type=dtype)
