"""A window in attention: no block is visited, no chunk is sent that the band does not touch. Its numbers:
test_attention."""
import functools
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
from test_context import laid_out, with_gradients

from meshtrain import config, pattern, run_files
from meshtrain.cost.program import audit
from meshtrain.kernels import blockwise
from meshtrain.kernels.engine import CAUSAL, Mask
from meshtrain.model import transformer
from meshtrain.parallel.context import attention, band

slow = partial(pytest.param, marks=sampling.GRID)
near = lambda window: CAUSAL._replace(window=window)


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
    found = {d: of for of in band.distances(near(window), chunk, cp) for d in range(of.first, of.first + of.length)}
    for d in range(1, 2 * cp):
        nearest, furthest = (d - 1) * chunk + 1, (d + 1) * chunk - 1
        assert (d in found) == (nearest < window)
        if d in found:
            assert found[d].early == (d < cp) and bool(found[d].mask.window) == (furthest >= window)


@functools.cache
def audited(method: str, cp: int, T: int, window: int):
    """What (forward, forward and backward) of one attention compute and send."""
    mesh, layout = laid_out({"context": cp})
    attend = partial(plain_attention.by_engine, blockwise.engine(8), attention.METHODS[method], layout, mask=near(window))
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
    assert not both.broken_permutes and not both.unknown_loops


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
        run_files.load(["--model.mixers=WF"])


@pytest.mark.parametrize(("num_layers", "stages", "chunks", "padded"),
                         [(4, 2, 1, 4), (5, 2, 1, 8), (3, 2, 2, 8), (1, 2, 1, 2), (9, 4, 1, 16)])
def test_stages_hold_whole_periods(num_layers, stages, chunks, padded):
    model = dict(window=4, mixers="WF", num_layers=num_layers)
    assert pattern.count_padded(config.Model(**model), stages * chunks) == padded


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
    """Where layers do not divide into periods or stages, or a ring has four devices; `test_cells` has the rest."""
    run = test_layouts.run_of(rule, mesh, model)
    parity.check(config.Run(**run.model_dump(exclude=set(more)), **more))
