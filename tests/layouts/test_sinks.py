"""Attention whose values have another width than its keys, and attention sinks: every engine and method against whole
scores, with all gradients."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
import sampling
from jax.sharding import PartitionSpec as P
from test_context import laid_out

from meshtrain.kernels import blockwise, pallas
from meshtrain.kernels.engine import CAUSAL, Engine, Scores
from meshtrain.kernels.tiles import Blocks, Tiles
from meshtrain.parallel.context import attention

slow = partial(pytest.param, marks=sampling.GRID)
SCORES = Scores(scale=0.21, softcap=3.0)
NOWHERE = 0


def engine_of(name: str, head_dim: int, value_dim: int, scores: Scores) -> Engine:
    if name == "pallas":
        return pallas.engine(Tiles(*[Blocks(16, 16, 4, 2)] * 3), scores, interpret=True)
    return blockwise.engine(8, scores)


def blind(engine: Engine) -> Engine:
    """An engine in which segment 0 sees nothing, not even itself."""
    hidden = lambda s, to: jnp.where(s == NOWHERE, to, s)
    return engine._replace(
        forward=lambda q, k, v, s, z, mask: engine.forward(q, k, v, hidden(s, -1), hidden(z, -2), mask),
        backward=lambda q, k, v, s, z, *rest: engine.backward(q, k, v, hidden(s, -1), hidden(z, -2), *rest))


def drawn(T: int, N: int, K: int, H: int, V: int, seed: int = 0) -> list:
    """q, k, v, segments with padding at the end, sinks, do."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    segments = 1 + np.cumsum(rng.random((2, T)) < 0.1, 1).astype(np.int32)
    segments[1, -T // 4:] = NOWHERE
    return [draw(2, T, N, H), draw(2, T, K, H), draw(2, T, K, V), segments, draw(N), draw(2, T, N, V)]


def with_gradients(attend, q, k, v, segments, sinks, do):
    """(o, (dq, dk, dv, dsinks))."""
    o, back = jax.vjp(lambda q, k, v, sinks: attend(q, k, v, segments, sinks_N=sinks), q, k, v, sinks)
    return o, back(do)


def plain(window: int, q, k, v, segments, sinks, do):
    """Whole scores. Rows of padding see nothing: their o is masked, and no cotangent reaches them."""
    alive = jnp.asarray(segments != NOWHERE)[..., None, None]
    mask = CAUSAL._replace(window=window)
    attend = lambda *args, **more: jnp.where(
        alive, plain_attention.attend(*args, mask=mask, scores=SCORES, **more), 0.0)
    return with_gradients(attend, q, k, v, jnp.asarray(segments), sinks, do)


def check(name: str, method: str, sizes: dict, window: int = 0, manual: tuple = (), T: int = 48):
    mesh, layout = laid_out(sizes)
    cp = sizes.get("context", 1)
    order = attention.METHODS[method].order(T, cp) if method else np.arange(T)
    attend = attention.RunAttention(lambda *shape: blind(engine_of(name, *shape)), attention.METHODS.get(method))
    attend = partial(attend, layout, scores=SCORES, mask=CAUSAL._replace(window=window))
    q, k, v, segments, sinks, do = drawn(T, 8, 4, 24, 12)

    def body(q, k, v, segments, sinks, do):
        pin = lambda x, axis: layout.act(x, "batch", "seq", axis, "head_dim")
        o, (*grads, dsinks) = with_gradients(attend, pin(q, "heads"), pin(k, "kv_heads"), pin(v, "kv_heads"), segments,
                                             sinks, pin(do, "heads"))
        return o, grads, jax.lax.psum(dsinks, manual) if manual else dsinks

    @jax.jit
    def run(q, k, v, segments, sinks, do):
        rows = P(None, "context")
        specs = dict(in_specs=(rows,) * 4 + (P(), rows), out_specs=(rows, [rows] * 3, P()))
        inside = jax.shard_map(body, axis_names=set(manual), check_vma=False, **specs) if manual else body
        o, grads, dsinks = inside(*(x[:, order] for x in (q, k, v, segments)), sinks, do[:, order])
        back = lambda x: x[:, np.argsort(order)]
        return back(o), (*map(back, grads), dsinks)

    with jax.set_mesh(mesh):
        got = run(q, k, v, segments, sinks, do)
    o, _ = got
    assert not np.asarray(o)[segments == NOWHERE].any()
    # float32 sums of up to 96 terms, in another order.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-5), got, plain(
        window, q, k, v, segments, sinks, do))


@pytest.mark.parametrize(("name", "method", "sizes", "window"), [
    ("blockwise", "", {}, 0), ("pallas", "", {}, 0), ("blockwise", "", dict(data=2, tensor=2), 13),
    ("blockwise", "ring", dict(context=4), 0), ("blockwise", "gather", dict(context=2, tensor=2), 0),
    ("blockwise", "ulysses", dict(context=2), 0), ("blockwise", "ring", dict(context=2), 17),
    *(slow(*cell) for cell in (
        ("pallas", "", dict(tensor=2), 13), ("pallas", "ring", dict(context=2, tensor=2), 0),
        ("pallas", "ulysses", dict(context=4), 0), ("blockwise", "gather", dict(context=4), 17),
        ("blockwise", "ulysses", dict(context=2, tensor=2), 17)))])
def test_sinks_and_values_of_another_width_equal_whole_scores(name, method, sizes, window):
    """Heads of 24, values of 12; rows that see nothing give zeros and no gradient to the sinks."""
    check(name, method, sizes, window)


def test_sinks_inside_a_region_that_is_manual_over_context_already():
    check("blockwise", "ring", dict(context=2, tensor=2), manual=("context",))


def test_a_run_chooses_an_engine_for_each_width_and_score():
    asked = []

    def made(*shape):
        asked.append(shape)
        return blockwise.engine(8, shape[2])
    attend, layout = attention.RunAttention(made), laid_out({})[1]
    for H, V, scores in ((24, 12, Scores()), (8, 8, Scores(0.5))):
        q, k, v, segments, *_ = drawn(16, 4, 2, H, V)
        expected = plain_attention.attend(q, k, v, jnp.asarray(segments), scores=scores)
        np.testing.assert_allclose(attend(layout, q, k, v, segments, scores=scores), expected, rtol=1e-4, atol=1e-5)
    assert asked == [(24, 12, Scores()), (8, 8, Scores(0.5))]
