"""A window in attention: the numbers of whole scores with a band, and no block is visited that the band does not touch."""
from functools import partial

import jax
import numpy as np
import pytest
import sampling
import test_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_context import drawn, laid_out, with_gradients

from meshtrain import assembly, config
from meshtrain.kernels import blockwise, engine
from meshtrain.model import transformer
from meshtrain.parallel import attention


def documents(rng, B: int, T: int) -> np.ndarray:
    return np.cumsum(rng.random((B, T)) < 0.08, 1).astype(np.int32) + 1


def check(split, layout, mesh, T: int, window: int, seed: int, softcap: float = 0.0):
    segments = documents(np.random.default_rng(seed), 2, T)
    q, k, v, do = drawn(seed, 2, T, 4, 2)
    ours = jax.jit(partial(with_gradients, partial(attention.attend, split, layout)))
    plain = jax.jit(partial(with_gradients, partial(engine.plain, window=window, softcap=softcap)))
    with jax.set_mesh(mesh):
        got = ours(q, k, v, segments, do)
    # float32 sums of up to T terms, in another order.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), got, plain(q, k, v, segments, do))


@pytest.mark.parametrize(("T", "block", "window"), [
    (40, 16, 12), (64, 16, 16), (64, 16, 17), (64, 16, 1), (50, 16, 33), (40, 512, 12), (64, 16, 63)])
def test_blocks_with_a_window_equal_plain_attention(T, block, window):
    mesh, layout = laid_out({})
    check(attention.Local(blockwise.engine(block, window)), layout, mesh, T, window, seed=T + window)


def test_scores_within_a_softcap_equal_plain_attention():
    mesh, layout = laid_out({})
    check(attention.Local(blockwise.engine(16, 12, 0.7)), layout, mesh, 40, 12, seed=1, softcap=0.7)


def test_the_heads_of_two_devices_see_the_whole_sequence_and_its_window():
    mesh, layout = laid_out(dict(context=2))
    check(attention.ContextParallel(attention.METHODS["ulysses"], blockwise.engine(16, 12)), layout, mesh, 48, 12, seed=3)


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 70))
def test_exactly_the_blocks_that_the_window_touches_are_visited(length, block, window):
    blocks = blockwise._Blocks(length, block)
    visited = set(zip(*(np.asarray(numbers).tolist() for numbers in blockwise._pairs(blocks, blocks, True, window))))
    t, s = np.arange(blocks.size * blocks.count)[:, None], np.arange(blocks.size * blocks.count)[None]
    live = (t >= s) & ((t - s < window) | (window == 0))
    touched = {(i // blocks.size, j // blocks.size) for i, j in np.argwhere(live).tolist()}
    assert visited == touched


def test_kernels_without_a_window_and_rings_are_not_taken_where_one_is_shorter_than_the_sequence():
    run = config.Run(model=dict(window=16, attention="pallas"), data=dict(seq_len=32, global_batch=2))
    with pytest.raises(config.ConfigError, match=r"the kernels have no window \(model.window=16\)"):
        assembly.assemble(run, jax.devices()[:1])
    run = test_layouts.run_of("zero3_context", dict(context=2), dict(window=16))
    for method in ("ring", "gather"):
        with pytest.raises(config.ConfigError, match=f'context.method="{method}" has no window, .* use context.method="ulysses"'):
            assembly.assemble(run.model_copy(update={"context": config.Context(method=method)}), jax.devices()[:2])
    long = run.model_copy(update={"model": run.model.model_copy(update={"window": test_layouts.T})})
    assert attention.window(long) == 0 and attention.window(run) == 16      # no token of theirs is further back


EVERY = dict(window=12, global_every=2, local_rope_theta=100.0, attention_scale_dim=16)


@pytest.mark.parametrize(("num_layers", "rule", "mesh"), [pytest.param(*cell, marks=sampling.GRID) for cell in (
    (2, "zero3_tensor_sequence", dict(data=2, fsdp=2, tensor=2)), (3, "zero3", dict(fsdp=4)), (5, "zero2", dict(fsdp=2)))])
def test_layers_with_and_without_a_window_equal_one_device(num_layers, rule, mesh):
    """Whole periods of two, and what is left of three and of five layers."""
    model = EVERY | dict(num_layers=num_layers)
    case = test_layouts.Compiled(test_layouts.run_of(rule, mesh, model))
    assert len(case.made.model.groups) == 1 + num_layers % 2
    params, losses, moments = test_layouts.reference(tuple(model.items()), steps=2)
    got, got_moments = case.train(params, 2)
    np.testing.assert_allclose(got, losses, rtol=2e-5)        # as in test_layouts
    test_layouts.check_gradients(got_moments, moments)


def test_places_name_every_stack_once_and_stages_are_refused():
    for num_layers, expected in ((4, ["layers/0", "layers/1"] * 2), (3, ["layers/periods/0", "layers/periods/1", "layers/left"]),
                                 (1, ["layers"])):
        model = transformer.build(config.Model(**EVERY, num_layers=num_layers))
        assert [name for name, _ in model.places()] == expected
        assert model.places()[-1][1] == (num_layers - 1) // 2 * (num_layers % 2 == 0)
        paths = {name + path.removeprefix("layers") for name, _ in model.places() for path in model.names() if path.startswith("layers/")}
        assert paths == {info.name for info in model.parameters() if info.name.startswith("layers/")}
    run = test_layouts.run_of("zero3_tensor_sequence_pipeline", dict(stage=2), EVERY)
    with pytest.raises(config.ConfigError, match="model.global_every=2 makes layers of two kinds, .* set mesh.stage to 1"):
        assembly.assemble(run, jax.devices()[:2])
    with pytest.raises(config.ConfigError, match="model.global_every=2 has no model.window"):
        config.load(["--model.global_every=2"])


@pytest.mark.parametrize(("rule", "mesh", "more"), [
    pytest.param("zero3_context", dict(context=2, fsdp=2), dict(context=dict(method="ulysses")), marks=sampling.GRID),
    pytest.param("zero3_tensor_sequence_pipeline", dict(stage=2, fsdp=2, tensor=2), dict(pipeline=dict(schedule="1f1b")), marks=sampling.GRID),
    pytest.param("zero3_tensor_sequence", dict(data=2, fsdp=2, tensor=2), {}, marks=sampling.GRID)])
def test_layouts_with_a_window_equal_one_device(rule, mesh, more):
    model = dict(window=12)
    run = test_layouts.run_of(rule, mesh, model)
    run = config.Run(**run.model_dump(exclude=set(more)), **more)
    case = test_layouts.Compiled(run)
    params, losses, moments = test_layouts.reference(tuple(model.items()), steps=2)
    got, got_moments = case.train(params, 2)
    np.testing.assert_allclose(got, losses, rtol=2e-5)        # float32 sums in another order, as in test_layouts
    test_layouts.check_gradients(got_moments, moments)
    assert abs(losses[0] - test_layouts.reference(steps=2)[1][0]) > 1e-5      # or it would agree without a window, too
