"""RMSNorm and rotary embedding in one kernel: against both apart, by Pallas' interpreter. In the model, on layouts:
`test_cells`, kernels."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.kernels import rotation
from meshtrain.model import rope


def apart(x, scale, cos, sin, eps=1e-6):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps) * scale
    return rope.rotate(y, rope.Rope(cos, sin)).astype(x.dtype)


def drawn(B: int, T: int, N: int, H: int, dtype="float32"):
    rng = np.random.default_rng(B + T + N + H)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    angle = normal(B, T, H // 2)
    x, dy = (normal(B, T, N, H).astype(dtype) for _ in range(2))
    return x, normal(H), jnp.cos(angle), jnp.sin(angle), dy


# Rows that fill no block, several blocks, one head, a head of 16; with YaRN's factor the tables are no rotation.
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("shape", [(2, 37, 3, 32), (1, 200, 4, 128), (1, 5, 1, 64), (2, 33, 40, 16), (1, 9, 5, 256)])
def test_forward_and_backward_are_those_of_norm_and_rotation_apart(shape, dtype, tolerance):
    x, scale, cos, sin, dy = drawn(*shape, dtype)
    wide = x.astype(jnp.float32)
    y, back = jax.vjp(lambda x, scale: apart(x, scale, 1.3 * cos, 1.3 * sin), wide, scale)
    dx, dscale = back(dy.astype(jnp.float32))
    found = rotation.forward(x, scale, 1.3 * cos, 1.3 * sin, 1e-6, True), *rotation.backward(
        x, scale, 1.3 * cos, 1.3 * sin, dy, 1e-6, True)
    assert found[0].dtype == found[1].dtype == x.dtype and found[2].dtype == jnp.float32
    for got, want in zip(found, (y, dx, dscale), strict=True):
        assert np.abs(np.float32(got) - np.float32(want)).max() <= tolerance * np.abs(want).max()


def test_a_row_of_zeros_and_heads_of_other_widths():
    x, scale, cos, sin, dy = drawn(1, 4, 2, 32)
    x = x.at[0, 1].set(0)
    found = rotation.forward(x, scale, cos, sin, 1e-6, True), *rotation.backward(x, scale, cos, sin, dy, 1e-6, True)
    assert all(np.isfinite(a).all() for a in found) and not found[0][0, 1].any()
    assert [rotation.fits(*of) for of in ((128, 128), (64, 32), (96, 96), (512, 512), (8, 8))] == [
        True, False, False, False, False]
