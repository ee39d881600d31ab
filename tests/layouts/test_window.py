"""A window in attention: the numbers of whole scores with a band, on one device and over several, and no block is
visited, no chunk is sent that the band does not touch."""
import functools
import math
from functools import partial

import jax
import numpy as np
import parity
import plain_attention
import pytest
import sampling
import test_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from test_context import drawn, laid_out, with_gradients

from meshtrain import config
from meshtrain.cost.program import audit
from meshtrain.kernels import blockwise
from meshtrain.kernels.engine import CAUSAL, Mask, Scores
from meshtrain.model import transformer
from meshtrain.parallel.context import attention, band
from meshtrain.parallel.pipeline import stages as parallel_stages

slow = partial(pytest.param, marks=sampling.GRID)
near = lambda window: CAUSAL._replace(window=window)


def documents(rng, B: int, T: int) -> np.ndarray:
    return np.cumsum(rng.random((B, T)) < 0.08, 1).astype(np.int32) + 1


@functools.cache
def programs(method: str, sizes: tuple, T: int, block: int, mask: Mask, scores: Scores, manual: tuple = ()):
    """Jitted (q, k, v, segments, do) in natural order -> ((o, gradients) of the method, those of plain attention)."""
    mesh, layout = laid_out(dict(sizes))
    own = blockwise.engine(block, scores)
    split = attention.ContextParallel(attention.METHODS[method], own) if method else attention.Local(own)
    order = attention.METHODS[method].order(T, dict(sizes)["context"]) if method else np.arange(T)

    def body(*args):
        return with_gradients(partial(attention.attend, split, layout, mask=mask), *args)

    def both(*args):
        spec = P(None, "context")
        inside = jax.shard_map(body, axis_names=set(manual), in_specs=(spec,) * 5,
                               out_specs=(spec, (spec,) * 3)) if manual else body
        out = inside(*(x[:, order] for x in args))
        return jax.tree.map(lambda x: x[:, np.argsort(order)], out), with_gradients(
            partial(plain_attention.attend, mask=mask, scores=scores), *args)

    run = jax.jit(both)

    def call(*args):
        with jax.set_mesh(mesh):
            return run(*args)
    return call


def check(method: str, cp: int, T: int, window: int, *, block: int = 16, segments=None,
          seed: int = 0, scores=Scores(), heads=(4, 2), **more):
    segments = documents(np.random.default_rng(seed), 2, T) if segments is None else segments
    q, k, v, do = drawn(seed, 2, T, *heads)
    sizes = (("context", cp),) if method else ()
    got, expected = programs(method, sizes, T, block, near(window), scores, **more)(q, k, v, segments, do)
    # float32 sums of up to T terms, in another order.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), got, expected)


@pytest.mark.parametrize(("T", "block", "window"), [
    (40, 16, 12), (64, 16, 16), (64, 16, 17), (64, 16, 1), (50, 16, 33), (40, 512, 12), (64, 16, 63)])
def test_blocks_with_a_window_equal_plain_attention(T, block, window):
    check("", 1, T, window, block=block, seed=T + window)


def test_scores_of_another_scale_within_a_softcap_equal_plain_attention():
    check("", 1, 40, 12, scores=Scores(0.6, 0.7))


# A window of one token, within a chunk, of a chunk and one more, odd ones over several chunks, and nearly the whole
# sequence.
@pytest.mark.parametrize(("method", "cp", "window"), [
    ("ring", 2, 31), ("ring", 4, 9), ("gather", 4, 22), ("ulysses", 2, 12), *(
        slow(method, cp, window) for method in ("ring", "gather") for cp in (2, 4)
        for window in (1, 2, 5, 6, 7, 12, 13, 25, 37, 12 * cp - 1) if (method, cp, window) != ("gather", 4, 22))])
def test_windows_over_chunks_equal_plain_attention(method, cp, window):
    """Chunks of six tokens, blocks of four; documents end anywhere."""
    T = 12 * cp
    if window < T:
        check(method, cp, T, window, block=4, seed=window)


@st.composite
def windowed(draw):
    method, cp = draw(st.sampled_from(sorted(attention.METHODS))), draw(st.sampled_from([2, 3, 4, 8]))
    chunk, K, G = draw(st.integers(1, 9)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    if method == "ulysses":
        G *= cp // math.gcd(K * G, cp)
    T = 2 * cp * chunk
    return method, cp, T, draw(st.integers(1, T + 2)), draw(st.sampled_from([3, 512])), (K * G, K), draw(
        st.integers(0, 99))


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(windowed())
def test_windows_of_any_length_over_any_chunks_equal_plain_attention(case):
    method, cp, T, window, block, heads, seed = case
    check(method, cp, T, window, block=block, heads=heads, seed=seed)


@pytest.mark.parametrize("method", ["ring", slow("gather")])
def test_a_window_inside_a_region_that_is_manual_over_context_already(method):
    """As a pipeline calls it, varying axes checked; a window of three chunks and a token."""
    check(method, 2, 24, 19, block=4, manual=("context",))


@pytest.mark.parametrize("documents", [False, slow(True)])
def test_rows_of_one_document_are_not_looked_at_for_others(documents):
    """Segments that say otherwise change nothing where the mask has no documents."""
    T = 24
    q, k, v, do = drawn(0, 2, T, 4, 2)
    segments = np.tile(np.arange(T, dtype=np.int32) // 5, (2, 1))
    of = lambda segments, documents: programs(
        "ring", (("context", 2),), T, 4, near(9)._replace(documents=documents), Scores())(
        q, k, v, segments, do)
    got, _ = of(segments, documents)
    _, expected = of(segments if documents else np.zeros_like(segments), True)
    # Two programs, which may round differently; a token of another document changes the first digit.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, expected)


# ---- what is visited and sent ----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20), st.integers(0, 70),
       st.integers(0, 90), st.booleans())
def test_exactly_the_blocks_that_the_mask_touches_are_visited(T, S, block, window, ahead, causal):
    queries, keys = blockwise._Blocks(T, block), blockwise._Blocks(S, block)
    mask = Mask(causal, window, ahead)
    visited = set(zip(*(np.asarray(numbers).tolist() for numbers in blockwise._pairs(queries, keys, mask))))
    apart = ahead + np.arange(queries.size * queries.count)[:, None] - np.arange(keys.size * keys.count)
    live = ((apart >= 0) | (not causal)) & ((apart < window) | (window == 0))
    assert visited == {(i // queries.size, j // keys.size) for i, j in np.argwhere(live).tolist()}


@given(st.integers(1, 200), st.integers(1, 20), st.integers(2, 8))
def test_distances_are_those_at_which_a_window_reaches_a_chunk_and_whole_ones_need_no_mask(window, chunk, cp):
    found = {d: of for of in band.distances(near(window), chunk, cp) for d in range(of.first, of.first + of.count)}
    for d in range(1, 2 * cp):
        nearest, furthest = (d - 1) * chunk + 1, (d + 1) * chunk - 1
        assert (d in found) == (nearest < window)
        if d in found:
            assert found[d].early == (d < cp) and bool(found[d].mask.window) == (furthest >= window)


@functools.cache
def audited(method: str, cp: int, T: int, window: int):
    """What (forward, forward and backward) of one attention compute and send."""
    mesh, layout = laid_out({"context": cp})
    split = attention.ContextParallel(attention.METHODS[method], blockwise.engine(8))
    attend = partial(attention.attend, split, layout, mask=near(window))
    q, k = (jax.ShapeDtypeStruct((1, T, n, 8), np.float32) for n in (4, 2))
    segments = jax.ShapeDtypeStruct((1, T), np.int32)

    def read(f, *args):
        with jax.set_mesh(mesh):
            return audit.read(jax.jit(f).lower(*args).compile().as_text(), mesh)
    return read(attend, q, k, k, segments), read(partial(with_gradients, attend), q, k, k, segments, q)


@pytest.mark.parametrize(("window", "hops", "home"), [(40, 2, 2), slow(1, 0, 0), slow(33, 1, 1), slow(200, 7, 1)])
def test_a_windowed_ring_sends_its_chunks_no_further_than_the_window(window, hops, home):
    """Chunks of 32 at context 4. K and V of both chunks go on once a distance, their sums as often, and home the
    shorter way."""
    forward, both = audited("ring", 4, 256, window)
    permutes = lambda program: sum(c.count for c in program.collectives if c.kind == "collective-permute"
                                   and c.dtype == "f32")
    # where the last hop is for late chunks alone, K and V of early ones stay
    assert permutes(forward) in (4 * hops, 4 * hops - 2)
    sums = 4 * (max(hops - 1, 0) + home)
    assert permutes(forward) + sums <= permutes(both) <= 8 * hops + sums        # XLA may share what both send alike
    assert not both.broken_permutes and not both.partial_permutes and not both.unknown_loops


@pytest.mark.parametrize("method", ["ring", slow("gather")])
def test_a_window_over_chunks_multiplies_little_more_than_it_sees(method):
    """A window of 64 in 1,024 tokens, chunks of 128, blocks of 8 tokens: the pairs seen, the rims of blocks, and a
    distance of whose chunks the first has nothing before it."""
    forward, both = audited(method, 4, 1024, 64)
    pairs = 1024 * 64 / 4
    assert 1 <= forward.flops["f32"] / (4 * pairs * 4 * 8) <= 1.35
    assert 1 <= (both.flops["f32"] - forward.flops["f32"]) / (10 * pairs * 4 * 8) <= 1.35


# ---- whole runs ------------------------------------------------------------------------------------------------------

EVERY = dict(window=12, mixers="WF", kinds=dict(W=dict(rope_theta=100.0)), multipliers=dict(score=0.25))


def test_places_name_every_stack_once():
    for num_layers, expected in ((4, ["layers/0", "layers/1"] * 2),
                                 (3, ["layers/periods/0", "layers/periods/1", "layers/left"]),
                                 (1, ["layers"])):
        model = transformer.build(config.Model(**EVERY, num_layers=num_layers))
        assert [name for name, _ in model.places()] == expected
        assert model.places()[-1][1] == (num_layers - 1) // 2 * (num_layers % 2 == 0)
        layers = [info.name for info in model.parameters() if info.name.startswith("layers/")]
        assert {name for name in expected if any(path.startswith(f"{name}/attention/") for path in layers)} == set(
            expected) and all(path.startswith(tuple(f"{name}/" for name in expected)) for path in layers)
    with pytest.raises(config.ConfigError, match="and no model.window"):
        config.load(["--model.mixers=WF"])


@pytest.mark.parametrize(("num_layers", "stages", "chunks", "padded"),
                         [(4, 2, 1, 4), (5, 2, 1, 8), (3, 2, 2, 8), (1, 2, 1, 2), (9, 4, 1, 16)])
def test_stages_hold_whole_periods(num_layers, stages, chunks, padded):
    model = dict(window=4, mixers="WF", num_layers=num_layers)
    assert parallel_stages.padded(config.Model(**model), stages * chunks) == padded


RING, ULYSSES = (dict(context=dict(method=method)) for method in ("ring", "ulysses"))
staged = lambda schedule, chunks=1: dict(pipeline=dict(schedule=schedule, chunks=chunks))


@pytest.mark.parametrize(("rule", "mesh", "model", "more"), [
    # Whole periods of two in each stage, and what is left of them, filled up.
    ("zero1", dict(stage=2, fsdp=2), EVERY | dict(num_layers=3), staged("1f1b")),
    *(slow(*cell) for cell in (
        ("zero3", dict(fsdp=4), EVERY | dict(num_layers=3), {}),
        ("zero2", dict(fsdp=2), EVERY | dict(num_layers=5), {}),
        ("zero1", dict(stage=2, tensor=2), EVERY | dict(num_layers=5), staged("zero_bubble")),
        ("ddp", dict(stage=2), EVERY | dict(num_layers=5), staged("interleaved", 2)),
        ("ddp", dict(stage=4, data=2), EVERY | dict(num_layers=5), staged("auto")),
        ("ddp", dict(stage=2), EVERY | dict(num_layers=1), staged("1f1b")),
        ("zero3", dict(stage=2, context=2, tensor=2), EVERY | dict(num_layers=6), staged("1f1b")),
        ("zero3", dict(context=4, fsdp=2), dict(window=7), RING),
        ("zero3", dict(context=2, fsdp=2), EVERY | dict(score_softcap=2.0), ULYSSES),
        ("ddp", dict(context=4), dict(window=11, position="learned", max_seq_len=test_layouts.T), RING)))])
def test_layouts_with_a_window_equal_one_device(rule, mesh, model, more):
    """Where layers do not divide into periods or stages, or a ring has four devices; `test_parity` has the rest."""
    run = test_layouts.run_of(rule, mesh, model)
    parity.check(config.Run(**run.model_dump(exclude=set(more)), **more))
