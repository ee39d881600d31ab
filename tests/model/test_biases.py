"""Gradients of biases and norm scales are summed over the tokens in float32, whatever the compute dtype."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import config
from meshtrain.model import layers, params
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout

LAYOUT = Layout(rules.parse(""), {axis: 1 for axis in AXES})
B, T, D, H = 4, 1024, 32, 8
# Relative to the whole gradient: a float32 sum of 4,096 terms. Rounding the sum alone to bfloat16 makes 2e-3, adding in
# it percents.
TOLERANCE = 1e-5


def execution(dtype):
    return Execution(LAYOUT, Numerics(jnp.dtype(dtype)), Engines(None))


def relative_error(got, exact):
    assert got.dtype == jnp.float32
    return np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("shape, axes", [((D,), ("embed",)), ((D // H, H), ("heads", "head_dim"))])
def test_the_gradient_of_a_bias_is_the_float32_sum_of_its_cotangent(shape, axes):
    dy = 1 + jax.random.normal(jax.random.key(0), (B, T, *shape)).astype(jnp.bfloat16)
    y, bias = jax.random.normal(jax.random.key(1), dy.shape).astype(jnp.bfloat16), jnp.ones(shape)
    out, vjp = jax.vjp(lambda y, bias: layers.add_bias(execution("bfloat16"), axes, y, bias), y, bias)
    back, grad = vjp(dy)
    assert out.dtype == back.dtype == jnp.bfloat16 and jnp.array_equal(back, dy)
    np.testing.assert_array_equal(out, (np.asarray(y, np.float32) + 1).astype(jnp.bfloat16))
    assert relative_error(grad, np.asarray(dy, np.float64).sum((0, 1))) < TOLERANCE


@pytest.mark.parametrize("leaf", ["scale", "bias"])
def test_the_gradient_of_a_norm_is_the_float32_sum_of_its_cotangent(leaf):
    cfg = config.Model(norm="layernorm", embed_dim=D, num_heads=1)
    norm = params.Module(lambda rngs: layers.Norm(cfg, rngs, (D,), ("embed",)))
    x = jax.random.normal(jax.random.key(0), (B, T, D)).astype(jnp.bfloat16)
    dy = 1 + jax.random.normal(jax.random.key(1), x.shape).astype(jnp.bfloat16)
    p = norm.init(jax.random.key(2))
    grad = jax.vjp(lambda p: norm.bind(p)(execution("bfloat16"), x), p)[1](dy)[0][leaf]
    exact = np.asarray(x, np.float64)
    exact = exact - exact.mean(-1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + cfg.norm_eps)
    exact = np.asarray(dy, np.float64) * (exact if leaf == "scale" else 1)
    assert relative_error(grad, exact.sum((0, 1))) < TOLERANCE
