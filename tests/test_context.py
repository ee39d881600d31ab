"""Sequences split over devices: the numbers of one device, and what the compiled program holds and sends.

Attention itself is compared with `attention.plain` in the natural order of tokens; whole runs with one device by
`test_layouts.check_equal`, whose rows are packed documents of random lengths and whose heads are grouped 8 to 4.
"""
import functools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from test_layouts import MICROBATCHES, MODEL, Compiled, check_equal, check_gradients, reference, run_of

from meshtrain import assembly, config
from meshtrain.cost import audit, compile
from meshtrain.layout import rules
from meshtrain.layout.mesh import MeshPlan
from meshtrain.model import attention
from meshtrain.parallel import context, zigzag

RULES = Path(__file__).resolve().parent.parent / "sharding_rules"
FAST = {"xla_backend_optimization_level": 0}    # half the compile time; partitioning and memory plans stay as they are
NOWHERE = 0                                     # the segment of padding


# ---- attention over a context mesh -----------------------------------------------------------------------------------


def laid_out(sizes: dict, rule: str = "zero3_tensor_sequence_context"):
    """(mesh, layout) over the first simulated devices."""
    plan = MeshPlan(sizes)
    return plan.build(jax.devices()[: plan.num_devices]), rules.Layout(rules.load(RULES / f"{rule}.toml"), plan.sizes)


def with_gradients(attend, q, k, v, segments, do):
    """(o, (dq, dk, dv))."""
    o, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
    return o, back(do)


@functools.cache
def both_ways(method: str, sizes: tuple, block: int, length: int):
    """Jitted (q, k, v, segments, do) in natural order -> ((o, gradients) of the method, those of plain attention)."""
    mesh, layout = laid_out(dict(sizes))
    order = context.METHODS[method].order(length, dict(sizes)["context"])
    split = context.Split(context.METHODS[method], attention.blockwise(block))

    def split_up(*args):
        out = with_gradients(partial(attention.attend, split, layout), *(x[:, order] for x in args))
        return jax.tree.map(lambda x: x[:, np.argsort(order)], out)

    run = jax.jit(lambda *args: (split_up(*args), with_gradients(attention.plain, *args)), compiler_options=FAST)

    def call(*args):
        with jax.set_mesh(mesh):
            return run(*args)
    return call


def drawn(seed: int, B: int, T: int, N: int, K: int, H: int = 8):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, T, n, H), np.float32) for n in (N, K, K, N)]


def check_attention(method, sizes, block, segments, *, K, G, seed=0, H=8):
    B, T = segments.shape
    q, k, v, do = drawn(seed, B, T, K * G, K, H)
    got, expected = both_ways(method, tuple(sizes.items()), block, T)(q, k, v, segments, do)
    # float32 sums of up to T terms, in another order.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), got, expected)


@st.composite
def documents(draw, B: int, T: int, chunk: int):
    """int32 [B, T]: documents numbered from 1, cut anywhere and often at chunk borders; at the end perhaps padding."""
    cut = st.one_of(st.integers(1, T - 1), st.integers(1, T // chunk - 1).map(lambda n: n * chunk))
    rows = np.zeros((B, T), np.int32)
    for row in rows:
        row[draw(st.lists(cut, max_size=6))] = 1
        row[:] = 1 + np.cumsum(row)
        row[T - draw(st.sampled_from([0, 0, 1, chunk, T // 2, T - 1])):] = NOWHERE
    return rows


@st.composite
def shapes(draw):
    method, cp = draw(st.sampled_from(sorted(context.METHODS))), draw(st.sampled_from([2, 4, 8]))
    chunk, K, G = draw(st.integers(1, 13)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if method == "ulysses":                     # its heads must divide
        G *= cp // math.gcd(K * G, cp)
    B, block = draw(st.integers(1, 2)), draw(st.sampled_from([3, 8, 512]))
    return method, {"context": cp}, block, draw(documents(B, 2 * cp * chunk, chunk)), K, G


def check_shapes(case):
    method, sizes, block, segments, K, G = case
    check_attention(method, sizes, block, segments, K=K, G=G)


test_attention_of_any_shape_matches_plain_attention = settings(
    max_examples=6, deadline=None, derandomize=True)(given(shapes())(check_shapes))
test_attention_of_many_more_shapes_matches_plain_attention = pytest.mark.slow(settings(
    max_examples=80, deadline=None)(given(shapes())(check_shapes)))


@pytest.mark.parametrize("method, sizes", [("ring", {"context": 4}), ("gather", {"context": 4}), ("ulysses", {"context": 4}),
                                           ("ring", {"context": 8})], ids=["ring 4", "gather 4", "ulysses 4", "ring 8"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_documents_may_end_anywhere(method, sizes, data):
    chunk = 6
    T = 2 * sizes["context"] * chunk
    check_attention(method, sizes, 4, data.draw(documents(2, T, chunk)), K=2, G=2, seed=data.draw(st.integers(0, 9)))


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_documents_that_end_at_every_chunk_border(method):
    chunk, T = 6, 48
    check_attention(method, {"context": 4}, 4, np.tile(np.arange(T, dtype=np.int32) // chunk + 1, (2, 1)), K=2, G=2)


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_rows_that_see_nothing_are_zero_and_pass_no_gradient(method):
    """An engine in which padding sees nothing, not even itself: o and gradients zero, lse MASKED, all others right."""
    engine, T, cp = attention.blockwise(4), 48, 4
    seen = lambda forward, s, z, *rest: forward(jnp.where(s == NOWHERE, -1, s), jnp.where(z == NOWHERE, -2, z), *rest)
    blind = attention.Engine(
        lambda q, k, v, s, z, causal: seen(lambda s, z: engine.forward(q, k, v, s, z, causal), s, z),
        lambda q, k, v, s, z, *rest: seen(lambda s, z: engine.backward(q, k, v, s, z, *rest), s, z))
    mesh, layout = laid_out({"context": cp})
    order = context.METHODS[method].order(T, cp)
    segments = np.ones((2, T), np.int32)
    segments[0, 20:] = NOWHERE                  # the end of a row, across chunks
    segments[1, 12:24] = NOWHERE                # two whole chunks in the middle: nothing in them sees anything
    q, k, v, do = drawn(1, 2, T, 4, 2)

    @partial(jax.jit, compiler_options=FAST)
    def split_up(q, k, v, segments, do):
        split = context.Split(context.METHODS[method], blind)
        args = [x[:, order] for x in (q, k, v, segments)]
        o, lse = split.forward(layout, *args)
        grads = split.backward(layout, *args, o, lse, do[:, order])
        return jax.tree.map(lambda x: x[:, np.argsort(order)], (o, lse, *grads))

    with jax.set_mesh(mesh):
        o, lse, dq, dk, dv = jax.device_get(split_up(q, k, v, segments, do))
    nothing = segments == NOWHERE
    for x in (o, dq, dk, dv):
        assert np.isfinite(x).all() and not x[nothing].any()
    assert (lse[nothing] <= attention.MASKED / 2).all() and (lse[~nothing] > -100).all()
    # Elsewhere plain attention is right, where padding sees padding: nothing of it reaches the rest.
    expected, (eq, ek, ev) = with_gradients(attention.plain, q, k, v, jnp.asarray(segments),
                                            np.where(nothing[..., None, None], 0, do))
    for got, want in ((o, expected), (dq, eq), (dk, ek), (dv, ev)):
        np.testing.assert_allclose(got[~nothing], want[~nothing], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_attention_inside_a_region_that_is_manual_over_context_and_data_already(method):
    """As a pipeline calls it: one shard_map outside, tensor automatic within, varying axes checked, vjp inside."""
    sizes, T = {"data": 2, "tensor": 2, "context": 2}, 24
    mesh, layout = laid_out(sizes)
    order = context.METHODS[method].order(T, 2)
    split = context.Split(context.METHODS[method], attention.blockwise(4))
    q, k, v, do = drawn(3, 4, T, 8, 4)
    segments = np.tile(np.arange(T, dtype=np.int32) // 7 + 1, (4, 1))

    def body(q, k, v, segments, do):
        pin = lambda x, axis: layout.act(x, "batch", "seq", axis, "head_dim")
        q, k, v, do = pin(q, "heads"), pin(k, "kv_heads"), pin(v, "kv_heads"), pin(do, "heads")
        return with_gradients(partial(attention.attend, split, layout), q, k, v, segments, do)

    @partial(jax.jit, compiler_options=FAST)
    def split_up(*args):
        spec = P("data", "context")
        run = jax.shard_map(body, axis_names={"data", "context"}, in_specs=(spec,) * 5, out_specs=(spec, (spec,) * 3))
        return jax.tree.map(lambda x: x[:, np.argsort(order)], run(*(x[:, order] for x in args)))

    with jax.set_mesh(mesh):
        got = split_up(q, k, v, segments, do)
    expected = with_gradients(attention.plain, q, k, v, jnp.asarray(segments), do)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), got, expected)


@given(st.integers(1, 8), st.integers(1, 5))
def test_zigzag_gives_every_device_an_early_chunk_and_its_mirror_image(cp, chunk):
    order = zigzag.order(2 * cp * chunk, cp).reshape(cp, 2, chunk)
    for i, (early, late) in enumerate(order):
        assert early.tolist() == list(range(i * chunk, (i + 1) * chunk))
        assert late.tolist() == list(range((2 * cp - 1 - i) * chunk, (2 * cp - i) * chunk))
    # Causal work is the same for all: a query at t sees t + 1 keys.
    assert len({int((device + 1).sum()) for device in order.reshape(cp, -1)}) == 1


# ---- whole runs ------------------------------------------------------------------------------------------------------


def split_run(rule: str, mesh: dict, method: str, model: dict = {}, training: dict = {}) -> config.Run:
    return run_of(rule, mesh, model, training).model_copy(update={"context": config.Context(method=method)})


@functools.cache
def compiled(rule: str, mesh: tuple, method: str) -> Compiled:
    return Compiled(split_run(rule, dict(mesh), method))


LAYOUTS = [
    ("ring", "context", dict(context=2)), ("ring", "context", dict(context=4)), ("ring", "context", dict(context=8)),
    ("gather", "context", dict(context=4)), ("ulysses", "context", dict(context=4)),
    *((method, rule, dict(context=2) | other) for method in context.METHODS for rule, other in (
        ("zero3_tensor_sequence_context", dict(tensor=2)), ("context", dict(data=2)), ("zero3_context", dict(fsdp=2)))),
    ("ulysses", "zero3_tensor_sequence_context", dict(context=4, tensor=2)),      # 2 kv heads a device: repeated
    ("ring", "zero3_tensor_sequence_context", dict(context=2, tensor=2, fsdp=2)),
]  # fmt: skip
TWENTY = {("ring", 4), ("gather", 4), ("ulysses", 4)}


@pytest.mark.parametrize("method, rule, mesh", LAYOUTS, ids=[f"{m}-{r}-" + "-".join(f"{a}{n}" for a, n in mesh.items())
                                                             for m, r, mesh in LAYOUTS])
def test_loss_gradients_and_training_equal_one_device(method, rule, mesh):
    case = compiled(rule, tuple(mesh.items()), method)
    check_equal(case, steps=20 if (method, mesh["context"]) in TWENTY else 6)
    assert not case.audit.unknown_loops and not case.audit.broken_permutes and not case.audit.partial_permutes


VARIANTS = {
    "dropout, ring": ("ring", dict(embedding_dropout=0.1, residual_dropout=0.2), dict()),
    "dropout, ulysses": ("ulysses", dict(embedding_dropout=0.1, residual_dropout=0.2), dict()),
    "z_loss, remat full, learned positions": ("ring", dict(position="learned", max_seq_len=test_layouts.T),
                                              dict(z_loss=1e-2, remat="full")),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_one_device(variant):
    method, model, training = VARIANTS[variant]
    check_equal(Compiled(split_run("context", dict(context=4), method, model, training)), model, training)


@pytest.mark.parametrize("remat", ["selective", "full"])
@pytest.mark.parametrize("method", context.METHODS)
def test_remat_changes_no_gradient(method, remat):
    params, losses, moments = reference(steps=20)
    case = Compiled(split_run("context", dict(context=4), method, {}, dict(remat=remat)))
    got, got_moments = case.train(params, 1)
    np.testing.assert_allclose(got[0], losses[0], rtol=1e-5)
    check_gradients(got_moments, moments)
