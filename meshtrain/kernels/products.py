"""The precision that a product asks for: that of its operands' dtype.

On NVIDIA GPUs jax multiplies float32 as TF32 unless it is asked not to: 10 bits of mantissa instead of 23. Who writes
float32 (the router always, all of a run with compute_dtype = "float32") gets float32, as on CPUs and as PyTorch does by
default. Other dtypes are left to XLA. Asked at each product, so that a program's text still names the line that
multiplies.
"""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def precision(dtype) -> lax.Precision | None:
    """What a product of operands of this dtype asks for."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
