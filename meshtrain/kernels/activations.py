"""Activations of MLPs and experts by their names in `model.activation`.

An activation is a function of the inward projections: (gate, up), or up alone.
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshtrain import custom
from meshtrain.config.sections import ACTIVATION

SLOPE, LIMIT = 1.702, 7.0      # of swiglu_clamped


def _swiglu_clamped(gate, up):
    """Return SwiGLU of clamped inputs: (up + 1) · gate · sigmoid(1.702 gate) (gpt-oss, arXiv:2508.10925)."""
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(SLOPE * gate)


# Sources: GLU variants arXiv:2002.05202, relu2 arXiv:2109.08668. Every GELU is the tanh approximation.
ACTIVATIONS = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "swiglu_clamped": _swiglu_clamped,
    "gelu": jax.nn.gelu,
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
}


def find(name: str) -> Callable:
    """Return the activation for a value of `model.activation`. Raises: ValueError if the run's own code is not an
    activation."""
    if not custom.is_path(name):
        return ACTIVATIONS[name]
    function, x = custom.load(name), jax.ShapeDtypeStruct((2, 3, 4), jnp.bfloat16)
    try:
        y = jax.eval_shape(function, *[x] * (2 if custom.count_arguments(name) == 2 else 1))
    except custom.ERRORS as error:
        raise custom.refuse("model.activation", name, ACTIVATION, f"raised {custom.tell(error)}") from error
    if (getattr(y, "shape", None), getattr(y, "dtype", None)) != (x.shape, x.dtype):
        raise custom.refuse("model.activation", name, ACTIVATION, f"returned {y} for {x}")
    return function


def _silu(gate):
    half = jax.nn.sigmoid(gate)
    return gate * half, half * (1 + gate * (1 - half))


def _gelu(gate):
    scale, cubic = (2 / jnp.pi) ** 0.5, 0.044715
    along = jnp.tanh(scale * (gate + cubic * gate * gate * gate))
    return gate * 0.5 * (1 + along), 0.5 * (1 + along + gate * (1 - along * along) * scale * (
        1 + 3 * cubic * gate * gate))


# Activations of the form f(gate) · up, for kernels: gate -> (f(gate), f'(gate)).
SLOPES = {"swiglu": _silu, "geglu": _gelu}
