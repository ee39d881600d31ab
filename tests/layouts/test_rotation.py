"""RMSNorm and rotary embedding in one kernel: against both apart, by Pallas' interpreter; in the model, whatever splits
its heads and tokens."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import parity
import sampling
import test_layouts
from meshtrain.kernels import rotation
from meshtrain.model import rope
from meshtrain.model.layers import Execution
from meshtrain.training import accumulate


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


MODEL = dict(qk_norm="head", attention="blockwise", head_dim=16, num_heads=4, num_kv_heads=2)
LAYOUTS = {"tensor 2, fsdp 2, data 2": ("zero3", dict(tensor=2, fsdp=2, data=2), {}),
           "more ranks than kv heads, norms with an offset": ("tensor", dict(tensor=4), dict(norm_offset=1.0)),
           "a ring": ("zero3", dict(context=2, fsdp=2), {}),
           "a pipeline with W apart": ("zero1", dict(stage=2, fsdp=2), {})}


@pytest.mark.parametrize("layout", [name if name.startswith("tensor 2") else pytest.param(name, marks=sampling.GRID)
                                    for name in LAYOUTS])
def test_in_the_model_they_compute_what_one_device_computes_without_them(layout, monkeypatch):
    rule, mesh, model = LAYOUTS[layout]
    run = test_layouts.run_of(rule, mesh, MODEL | model)
    if "stage" in mesh:
        run = run.replaced(pipeline={"schedule": "zero_bubble"})
    parity.one_device(parity.on_one_device(run).model_dump_json(), 0)       # kept: without them
    calls = []
    for name in ("forward", "backward"):
        def interpreted(*args, of=getattr(rotation, name), **more):
            calls.append(of)
            return of(*args, **more, interpret=True)
        monkeypatch.setattr(rotation, name, interpreted)
    monkeypatch.setattr(accumulate, "Execution", lambda *args, **given: Execution(*args, **given | {"by_kernels": True}))
    parity.check_equal(parity.compiled(run))
    assert len(set(calls)) == 2
