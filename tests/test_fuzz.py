"""Random compositions of model, mesh, rules, schedule and optimizer compute what one device computes.

20 draws in every run of the suite, others with every commit, and 200 marked slow.
"""
import math

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling

from meshtrain import assembly, config
from meshtrain.cost import audit
from meshtrain.model import params as params_of
from meshtrain.names import AXES, NO_TARGET
from meshtrain.training.state import State

DRAWN = sampling.generator("fuzz").sample(range(10**6), 20)
STEPS = 3


def compiled(run: config.Run):
    made = assembly.assemble(run, jax.devices()[:math.prod(getattr(run.mesh, axis) for axis in AXES)])
    with jax.default_matmul_precision("highest"):
        return made, made.program.compile()


def on_one_device(run: config.Run) -> config.Run:
    return run.model_copy(update=dict(
        mesh=config.Mesh(), sharding=config.Sharding(rules=str(draws.RULES / "ddp.toml")), pipeline=config.Pipeline(),
        context=config.Context(), training=run.training.model_copy(update=dict(microbatches=1, remat="none"))))


def batch_of(run: config.Run, step: int) -> dict:
    """Packed documents, some targets missing, some sequences with hardly any or padded at the end."""
    B, T, rng = run.data.global_batch, run.data.seq_len, np.random.default_rng(step)
    starts = rng.random((B, T)) < 0.15
    starts[:, 0] = True
    index = np.tile(np.arange(T), (B, 1))
    targets = rng.integers(0, run.model.vocab_size, (B, T))
    targets[rng.random((B, T)) < rng.random((B, 1))] = NO_TARGET
    batch = {"tokens": rng.integers(0, run.model.vocab_size, (B, T)), "targets": targets, "index": index,
             "segments": np.cumsum(starts, 1), "positions": index - np.maximum.accumulate(np.where(starts, index, 0), 1),
             "sequence": step * B + np.arange(B)}  # fmt: skip
    padding = index >= T - rng.integers(0, T, (B, 1)) * (rng.random((B, 1)) < 0.3)      # where no document is cut
    batch["segments"][padding], batch["targets"][padding] = 0, NO_TARGET
    return {name: x.astype(np.int32) for name, x in batch.items()}


def trained(made, step, params, opt_state):
    """([losses, gradient norms], the optimizer's state after the first step): linear or quadratic in the gradient."""
    state = jax.device_put(State(np.int32(0), params, opt_state), made.program.spec.sharding)
    numbers, first = [], None
    for n in range(STEPS):
        state, metrics = step(state, made.program.place(batch_of(made.run, n)))
        assert not metrics["skipped"]
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        first = first or jax.device_get(state.opt_state)
    return np.array(numbers), first


def check(number: int, directory):
    run, refused = draws.run(number, directory)
    assert all(": " in message or ";" in message for message in refused), "a refusal names value, rule and remedy"
    made, step = compiled(run)
    program = audit.read(step.as_text(), made.mesh)
    assert not program.broken_permutes
    one, one_step = compiled(on_one_device(run))
    # Not the model's own start: biases and norms that are no constants show a wrong gradient of what they scale.
    rng = np.random.default_rng(number)
    # Around what a norm scales by at the start: twice as much in every norm makes gradients that differ by their rounding.
    mean = lambda info: (info.role == "norm") * (1 - run.model.norm_offset)
    params = params_of.tree(one.model.parameters(), lambda info: (
        mean(info) + rng.standard_normal(info.shape) * (0.2 if "matrix" in info.role else 0.05)).astype(info.dtype))
    opt_state = jax.device_get(jax.jit(one.program.spec.tx.init)(params))
    expected, expected_state = trained(one, one_step, params, opt_state)
    numbers, first = trained(made, step, params, opt_state)
    np.testing.assert_allclose(numbers[0][0], expected[0][0], rtol=2e-5, err_msg="loss")
    # Of a norm over six numbers some weights make a gradient whose roundings are amplified, 2.2e-5 at the most that was seen.
    np.testing.assert_allclose(numbers[0][1], expected[0][1], rtol=6e-5, err_msg="gradient norm")
    scales = [np.abs(e).max(initial=0) for e in jax.tree.leaves(expected_state)]
    for (path, a), e in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(expected_state), strict=True):
        # float32 sums in another order; a leaf whose true value is zero (the bias of a key's norm) holds the rounding of
        # what cancels in it, up to some 1e-9 of the largest.
        scale = max(np.abs(e).max(initial=0), 1e-5 * max(scales))
        assert np.abs(a - e).max(initial=0) <= 2e-4 * scale, jax.tree_util.keystr(path)
    # Later steps: Adam divides by the root of tiny moments, and lion takes signs: what is nearly zero may turn.
    np.testing.assert_allclose(numbers[:, 0], expected[:, 0], rtol=1e-3)


@pytest.mark.parametrize("number", DRAWN)
def test_a_random_composition_equals_one_device(number, tmp_path):
    check(number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_many_random_compositions_equal_one_device(number, tmp_path):
    check(number, tmp_path)


def test_a_draw_is_the_same_again(tmp_path):
    assert draws.run(5, tmp_path)[0] == draws.run(5, tmp_path)[0]
    # In every process, too: it must not follow the order of a set.
    assert [getattr(draws.run(676739, tmp_path)[0].mesh, axis) for axis in AXES] == [4, 1, 2, 1, 1]


def test_the_comparison_sees_a_wrong_gradient(tmp_path, monkeypatch):
    from meshtrain.model import layers
    right = layers.rotate
    monkeypatch.setattr(layers, "rotate", lambda x, rope: right(x, rope) * jnp.float32(1 + 1e-3))
    number = next(n for n in range(100) if (run := draws.run(n, tmp_path)[0]).model.position == "rope" and
                  not run.model.qk_norm and math.prod(getattr(run.mesh, axis) for axis in AXES) == 2)
    run, _ = draws.run(number, tmp_path)
    made, step = compiled(run)
    monkeypatch.setattr(layers, "rotate", right)
    one, one_step = compiled(on_one_device(run))
    params = jax.device_get(jax.jit(one.model.init)(jax.random.key(number)))
    opt_state = jax.device_get(jax.jit(one.program.spec.tx.init)(params))
    wrong, expected = trained(made, step, params, opt_state)[1], trained(one, one_step, params, opt_state)[1]
    assert any(np.abs(a - e).max(initial=0) > 2e-4 * np.abs(e).max(initial=0)
               for a, e in zip(jax.tree.leaves(wrong), jax.tree.leaves(expected)))
