"""`pipeline`: the value and the gradients of one device through every schedule, and what it refuses."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from test_ring import layout_on

from meshtrain.config import ConfigError
from meshtrain.library.layouts import Layout
from meshtrain.library.pipeline import pipeline
from meshtrain.library.stack import Stack
from meshtrain.parallel.pipeline import schedules

D, L, B = 8, 8, 16
# Sums over rows are in another order, and eight layers pass their rounding on.
CLOSE = 1e-5
EVERY = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("interleaved_zero_bubble", 2)]
MESHES = {"stage 4": dict(stage=4), "stage 4, data 2": dict(stage=4, data=2),
          "stage 2, tensor 2, data 2": dict(stage=2, tensor=2, data=2)}


def embed(ends, rows):
    return rows["x"] @ ends["in"]


def layer(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def head(ends, x, rows):
    scores = x @ ends["out"]
    nats = jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, rows["y"][..., None], -1)[..., 0]
    return nats.sum(), nats.size


STACK = Stack(embed, layer, head)


@functools.cache
def arrays(*more: int, num_layers: int = L):
    """(weights, ends, rows [B, …more, 4])."""
    rng = np.random.default_rng(0)
    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)
    weights = {"up": 0.3 * draw(num_layers, D, 2 * D), "down": 0.3 * draw(num_layers, 2 * D, D)}
    rows = {"x": draw(B, *more, 4), "y": rng.integers(0, 3, (B, *more)).astype(np.int32)}
    return weights, {"in": draw(4, D), "out": draw(D, 3)}, rows


def regularize(weights):
    return 1e-2 * sum(jnp.sum(w ** 2) for w in jax.tree.leaves(weights))


def compute(f, weights, ends, rows):
    """(value, gradients) of the mean of f and a regulariser."""
    def loss(weights, ends):
        return f(weights, ends, rows) / B + regularize(weights)
    return jax.device_get(jax.value_and_grad(loss, (0, 1))(weights, ends))


@functools.cache
def on_one_device(*more: int):
    weights, ends, rows = arrays(*more)
    return compute(jax.jit(lambda weights, ends, rows: STACK({"blocks": weights, **ends}, rows)[0]), weights, ends, rows)


def assert_equal(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a - b).max() <= CLOSE * np.abs(b).max()


def place(layout: Layout, tree):
    return jax.device_put(tree, NamedSharding(layout.mesh, P()))


def compare(sizes: dict, schedule, more=(), **options):
    layout = layout_on(sizes)
    f = jax.jit(pipeline(STACK, schedule, layout, **options))
    assert_equal(compute(f, *place(layout, arrays(*more))), on_one_device(*more))


@pytest.mark.parametrize("sizes, name, chunks", [
    pytest.param(sizes, name, chunks, id=f"{title}-{name}", marks=[] if (title, name) == (
        "stage 2, tensor 2, data 2", "interleaved_zero_bubble") else pytest.mark.full)
    for title, sizes in MESHES.items() for name, chunks in EVERY])
def test_every_schedule_gives_the_value_and_the_gradients_of_one_device(sizes, name, chunks):
    compare(sizes, name, microbatches=4, chunks=chunks)


@pytest.mark.full
def test_activations_of_any_rank_pass_and_a_schedule_table_of_ones_own():
    table = schedules.parse("F0 F1 · B0 B1\n· F0 F1+B0 B1")
    compare(dict(stage=2, data=2), table, more=(2, 3))


@pytest.mark.full
def test_bfloat16_weights_have_gradients_in_bfloat16_and_a_loss_without_ends_none():
    weights, _, rows = arrays()
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    layout = layout_on(dict(stage=2))
    stack = Stack(lambda ends, rows: jnp.tile(rows["x"], 2).astype(jnp.bfloat16), layer,
                  lambda ends, x, rows: (jnp.sum(x.astype(jnp.float32) ** 2), x.shape[0]))
    total, (d_weights, d_ends) = jax.jit(jax.value_and_grad(pipeline(stack, "1f1b", layout, 2), (0, 1)))(narrow, {}, rows)
    wanted = jax.grad(lambda w: stack({"blocks": w}, rows)[0])(narrow)
    assert d_ends == {} and total.dtype == jnp.float32 and {g.dtype.name for g in d_weights.values()} == {"bfloat16"}
    for name, g in d_weights.items():       # 8 bits of a number
        assert np.abs(np.float32(g) - np.float32(wanted[name])).max() <= 0.03 * np.abs(np.float32(wanted[name])).max()


@pytest.mark.full
def test_a_forward_mode_derivative_is_that_of_one_device():
    weights, ends, rows = arrays()
    f = pipeline(STACK, "1f1b", layout_on(dict(stage=2)), 2)
    along = jax.tree.map(jnp.ones_like, weights)
    found, wanted = (jax.jit(lambda f=f: jax.jvp(lambda w: f(w, ends, rows), (weights,), (along,)))() for f in (
        f, lambda w, ends, rows: STACK({"blocks": w, **ends}, rows)[0]))
    assert np.allclose(found, wanted, rtol=CLOSE)


def test_it_is_differentiated_without_jit_and_beside_other_operations():
    weights, ends, rows = arrays()
    layout = layout_on(dict(stage=2))
    assert_equal(compute(pipeline(STACK, "1f1b", layout, 2), *place(layout, (weights, ends, rows))), on_one_device())


def test_the_value_alone_computes_no_gradients(monkeypatch):
    monkeypatch.setattr("meshtrain.training.executor.gradients", None)
    weights, ends, rows = arrays()
    found = jax.jit(pipeline(STACK, "zero_bubble", layout_on(dict(stage=2)), 2))(weights, ends, rows)
    assert float(found) == pytest.approx(float(STACK({"blocks": weights, **ends}, rows)[0]), rel=CLOSE)


def test_other_transformations_are_refused_by_name():
    layout, (weights, ends, rows) = layout_on(dict(stage=2)), arrays()
    f = pipeline(STACK, "1f1b", layout, 2)
    def refuse(compute, said):
        with pytest.raises(ConfigError, match=said):
            jax.eval_shape(compute, weights)
    refuse(lambda w: jax.grad(lambda w: jax.grad(lambda w: f(w, ends, rows))(w)["up"].sum())(w), "only first derivatives are supported")
    refuse(lambda w: jax.vmap(lambda x: f(w, ends, {**rows, "x": x}))(jnp.stack([rows["x"]] * 2)),
           "does not work under jax.vmap")
    refuse(lambda w: jax.grad(lambda x: f(w, ends, {**rows, "x": x}))(rows["x"]), "are supported, not rows")


def test_mistakes_are_told_with_value_rule_and_remedy():
    layout, (weights, ends, rows) = layout_on(dict(stage=4)), arrays()
    def refuse(stack=STACK, schedule="1f1b", layout=layout, weights=weights, ends=ends, rows=rows, microbatches=4, **more):
        with pytest.raises(ValueError) as raised:
            jax.eval_shape(pipeline(stack, schedule, layout, microbatches, **more), weights, ends, rows)
        return str(raised.value)
    assert refuse(weights=arrays(num_layers=6)[0]) == (
        "pipeline: 6 layers do not divide over 4 stages × 1 chunks; use a multiple of 4, e.g. 8")
    assert 'schedule="1f2b" is unknown; use one of' in refuse(schedule="1f2b")
    assert 'not chunks=2; use chunks=1, or schedule="interleaved"' in refuse(chunks=2)
    assert "has stages=2, not 4" in refuse(schedule="F0 F1 · B0 B1\n· F0 F1+B0 B1", microbatches=None)
    assert "16 rows do not divide over 3 microbatches" in refuse(microbatches=3)
    assert "microbatches=0 is not a whole number" in refuse(microbatches=0)
    assert "chunks=0 is not a whole number" in refuse(chunks=0)
    assert "['ends']['table'] int32" in refuse(ends=ends | {"table": np.arange(3, dtype=np.int32)})
    assert "one array" in refuse(Stack(lambda e, r: {"x": r["x"]}, layer, head))
    assert "must keep shape and dtype" in refuse(Stack(embed, lambda w, x: x.astype(jnp.bfloat16), head))
    assert "return two scalars (sum, count)" in refuse(Stack(embed, layer, lambda *args: head(*args)[0]))
    other = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("pp", "dp"))
    assert "layout is a Mesh with the axes pp, dp; pipelines and rings take a layout" in refuse(layout=other)
