"""Forward, B and W of a layer are its forward and its backward, bit for bit, and keep no more than they must."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling
from jax.experimental import pallas as pl

from meshtrain import config
from meshtrain.kernels import blockwise
from meshtrain.model import block, transformer
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.parallel.context import attention
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout
from meshtrain.training import accumulators, backward
from meshtrain.training.backward import LayerStack, Weights
from test_layouts import MODEL, T


def layer_case(remat: str, dtype: str = "float32", **model):
    """(f, stacked weights, x, e, dy) of a stack of layers."""
    cfg = config.Run(model=MODEL | dict(num_layers=3, compute_dtype=dtype, residual_dropout=0.1) | model).model
    model = transformer.build(cfg)
    one = Layout(rules.parse(""), dict.fromkeys(("data", "fsdp", "tensor", "stage", "context"), 1))
    attend = attention.RunAttention(lambda H, V, scores: blockwise.engine(scores=scores))
    ex = Execution(one, Numerics(jnp.dtype(dtype), remat), Engines(attend))
    ids = jnp.tile(jnp.arange(T), (2, 1))
    batch = {"segments": ids // 9, "positions": ids, "index": ids, "sequence": jnp.arange(2)}
    e = model.inputs(batch, jax.random.key(3))
    x, dy = (jax.random.normal(jax.random.key(k), (2, T, cfg.embed_dim)).astype(dtype) for k in (1, 2))
    weights = jax.tree.map(lambda a: a.astype(dtype), model.init(jax.random.key(0))["layers"])

    def layer(w, x, inputs):
        apply = block.build_block(ex, model.period[0], x.shape, inputs.dropout_key is not None)
        return apply(w.trained, x, inputs, w.numbers)
    return layer, weights, x, e, dy


def stack_of(f, ws, x, e, **more):
    """(a stack of layers f, its weights, numbered)."""
    weights = Weights(ws, jnp.arange(len(jax.tree.leaves(ws)[0])), None)
    return LayerStack(backward.SplitLayer(f, backward.of_one_layer(weights), x, e), 3, **more), weights


def input_gradient(stack, weights, inputs, saved, dy):
    """(dx, the values that W needs), layer by layer as the executor of pipelines has them."""
    def visit(dy, entry):
        i, saved_i = entry
        return stack.layer.input_gradient(backward.take(weights, i), inputs, saved_i, dy)
    return jax.lax.scan(visit, dy, (jnp.arange(stack.depth), saved), reverse=True)


def weight_gradient(stack, weights, inputs, saved_for_weights, passed, total, on):
    def visit(total, entry):
        i, saved_i, passed_i = entry
        d_trained = stack.layer.weight_gradient(backward.take(weights, i), inputs, saved_i, passed_i)
        return accumulators.add_at(total, i, d_trained, on), None
    return jax.lax.scan(visit, total, (jnp.arange(stack.depth), saved_for_weights, passed))[0]


@pytest.mark.parametrize("remat",
                         ["full", *(pytest.param(remat, marks=sampling.GRID) for remat in ("none", "selective"))])
def test_split_backward_is_the_backward_bit_for_bit(remat):
    f, ws, x, e, dy = layer_case(remat)
    numbers = jnp.arange(3)
    (parts, w), zeros = stack_of(f, ws, x, e), jax.tree.map(jnp.zeros_like, ws)

    @jax.jit
    def plain():
        y, vjp = jax.vjp(lambda ws, x: jax.lax.scan(lambda x, a: (f(a, x, e)[0], None),
                                                    x, Weights(ws, numbers, None))[0], ws, x)
        dw, dx = vjp(dy)
        return y, dx, dw

    @jax.jit
    def halves():
        y, _, saved = parts.forward(w, x, e)
        dx, z = input_gradient(parts, w, e, saved, dy)
        return y, dx, weight_gradient(parts, w, e, saved.for_weights, z, zeros, True)

    @jax.jit
    def whole():
        y, _, saved = parts.forward(w, x, e)
        return y, *parts.backward(w, e, saved, dy, zeros, True)

    expected = plain()
    # float32; XLA may sum in another order in a kernel that does more: a matmul whose result is added to something, or,
    # without YNNPACK's fusions, a sum of what selective remat computes again.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close if remat == "selective" else np.testing.assert_array_equal, halves(), expected)
    jax.tree.map(close, whole(), expected)


def filled_buffers(parts):
    return jax.tree.map(lambda a: jnp.full(a.shape, 7, a.dtype), parts.residuals)


@pytest.mark.parametrize("remat", ["selective", pytest.param("none", marks=sampling.GRID)])
def test_residuals_written_in_place_are_the_residuals(remat):
    f, ws, x, e, _ = layer_case(remat, mlp_dim=160)
    made = []
    for in_place in (False, True):
        parts, w = stack_of(f, ws, x, e, in_place=in_place)
        made.append(jax.jit(parts.forward)(w, x, e, filled_buffers(parts)))
    # XLA fuses other operations, which round otherwise
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *made)


@pytest.mark.parametrize("remat, width, count", [("selective", 160, 2), ("selective", 128, 0), ("full", 160, 0)])
def test_gate_and_up_are_written_in_place_where_they_are_wide(remat, width, count):
    f, ws, x, e, _ = layer_case(remat, mlp_dim=width)
    found = stack_of(f, ws, x, e)[0].layer._forward.in_place
    assert [v.aval.shape for v in found] == [(2, T, width)] * count


def sine(kernel):
    """The sine, from a kernel, which XLA does not fuse; keeps its input."""
    @jax.custom_vjp
    def found(q):
        return kernel(jnp.sin, q)
    found.defvjp(lambda q: (found(q), q), lambda q, dy: (in_a_loop(lambda d: d * jnp.cos(q), dy),))
    return found


def in_a_loop(f, q):
    return jax.lax.fori_loop(0, 1, lambda i, y: f(y), q)


def by_triton(f, q):
    def kernel(q_ref, y_ref):
        y_ref[...] = f(q_ref[...])
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype), interpret=True)(q)


@pytest.mark.parametrize("fused, kernel, read_elsewhere", [
    (True, in_a_loop, False), (False, in_a_loop, False), (True, in_a_loop, True), (True, by_triton, False)])
def test_what_a_fusion_makes_for_kernels_alone_is_written_in_place(fused, kernel, read_elsewhere):
    def f(w, x, e):
        q = jnp.cos(x @ w.trained) if fused else x @ w.trained
        y = sine(kernel)(q)
        return (y * q if read_elsewhere else y), {}
    ws, x, dy = (jax.random.normal(jax.random.key(k), s) for k, s in enumerate([(3, 8, 8), (2, 8), (2, 8)]))
    made = []
    for in_place in (False, True):
        parts, w = stack_of(f, ws, x, None, in_place=in_place)
        y, _, saved = jax.jit(parts.forward)(w, x, None, filled_buffers(parts))
        made.append((y, *jax.jit(parts.backward)(w, None, saved, dy, jnp.zeros_like(ws), True)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *made)
    found = parts.layer._forward.in_place
    assert len(found) == (fused and kernel is in_a_loop and not read_elsewhere)


def test_weight_gradients_of_bfloat16_weights_are_float32():
    f, ws, x, e, dy = layer_case("full", "bfloat16")
    parts, w = stack_of(f, ws, x, e)
    y, _, saved = parts.forward(w, x, e)
    dx, z = input_gradient(parts, w, e, saved, dy)
    dw = weight_gradient(parts, w, e, saved.for_weights, z, jax.tree.map(lambda a: jnp.zeros(a.shape), ws), True)
    assert dx.dtype == y.dtype == jnp.bfloat16 and {a.dtype for a in jax.tree.leaves(dw)} == {jnp.dtype("float32")}
    kernel = dw["mlp"]["down"]["kernel"]
    assert (kernel != kernel.astype(jnp.bfloat16)).any(), "not rounded on the way"


def test_weight_gradients_are_added_only_where_they_count():
    f, ws, x, e, dy = layer_case("none")
    (parts, w), ones = stack_of(f, ws, x, e), jax.tree.map(jnp.ones_like, ws)
    y, _, saved = parts.forward(w, x, e)
    dx, z = input_gradient(parts, w, e, saved, dy)
    for on in (True, False):
        halves = weight_gradient(parts, w, e, saved.for_weights, z, ones, on)
        _, whole = parts.backward(w, e, saved, dy, ones, on)
        for total in jax.tree.leaves((halves, whole)):
            assert all((layer == 1).all() == (not on) for layer in total)


def test_weights_and_inputs_are_not_kept_for_the_backward():
    """Every microbatch in flight would have its own copy."""
    f, ws, x, e, dy = layer_case("full")
    parts, _ = stack_of(f, ws, x, e)
    assert [(a.shape, a.dtype) for a in sum(parts.residuals, [])] == [((3, *x.shape), x.dtype)]


def test_under_selective_remat_the_stream_behind_attention_is_kept_not_what_attention_added():
    f, ws, x, e, _ = layer_case("selective")
    w = Weights(jax.tree.map(lambda a: a[0], ws), jnp.int32(0), None)
    _, _, (r, q) = backward.SplitLayer(f, w, x, e).forward(w, x, e)
    before, behind = sorted((a for a in r + q if a.shape == x.shape), key=lambda a: float(jnp.abs(a - x).max()))
    assert (before == x).all()
    assert 0.05 < float((behind == x).mean()) < 0.15, "a tenth of what attention added is dropped out"


@pytest.mark.parametrize("remat", ["none", "selective"])
def test_a_layer_keeps_what_matmuls_attention_and_norms_read_in_bfloat16(remat):
    """Norms and SwiGLU are made again from their inputs: nothing of them is kept in float32, and not their product
    either. Of what attention adds to the stream the sum is kept, which the norm behind it reads."""
    f, ws, x, e, _ = layer_case(remat, "bfloat16")
    parts, (B, S, D) = stack_of(f, ws, x, e)[0].layer, x.shape
    N, K, H, F = (MODEL[key] for key in ("num_heads", "num_kv_heads", "head_dim", "mlp_dim"))
    # before each norm and, without remat, behind it
    streams = {"none": 4, "selective": 2}[remat]
    read = [(D,)] * streams + [(N, H), (K, H), (K, H), (N, H)] + [(F,)] * 2         # q, k, v, o; gate, up
    # and attention's lse
    expected = [((B, S, *shape), jnp.bfloat16) for shape in read] + [((B, S, N), jnp.float32)]
    kept = [(a.shape, a.dtype) for a in sum(parts.residuals, [])]
    assert sorted(kept, key=str) == sorted(((shape, jnp.dtype(dtype)) for shape, dtype in expected), key=str)
