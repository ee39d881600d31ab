"""Matmul precision by operand dtype.

By default jax multiplies float32 as TF32 (10 bits of mantissa instead of 23) on NVIDIA GPUs. Here float32 means
float32, as on CPUs and in PyTorch: for the router always, for everything with compute_dtype = "float32". Set at each
product, so that program text still names the line that multiplies.
"""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def precision(dtype) -> lax.Precision | None:
    """The precision for operands of this dtype; None leaves it to XLA."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
