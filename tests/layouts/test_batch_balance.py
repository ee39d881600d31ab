"""experts.balance = "batch": on every layout and in any number of microbatches the loss and every gradient of the plain
loop over experts with the shares of the step before; and the shares that a step leaves are those of all its tokens."""
import functools
import math

import jax
import numpy as np
import pytest
from test_experts import (BATCH, FOUR_LAYERS, LAYOUTS, MODELS, PIPELINES, STAGED, STAGED_BATCH, assert_equal, batch,
                          expected, run_of)

import experts
from meshtrain import assembly, config
from meshtrain.training.state import State


def of_batch(run: config.Run) -> config.Run:
    return run.replace(experts=dict(balance="batch"))


@functools.cache
def shares_of(num_layers: int, num_experts: int):
    drawn = np.random.default_rng(1).random((num_layers, num_experts)).astype("float32")
    return drawn / drawn.sum(-1, keepdims=True)


@functools.cache
def wanted(model: str):
    """As test_experts.expected, with shares."""
    params, *_ = expected(model)
    run = run_of("sharding_rules/ddp.toml", {}, (MODELS | FOUR_LAYERS)[model])
    dumped, shares = run.model_dump(), shares_of(run.model.num_layers, run.model.num_experts)
    return params, *experts.gradients(dumped["model"], dumped["experts"] | {"shares": shares}, params, batch())[:3]


def check(run, model, devices):
    assert_equal(of_batch(run), wanted(model), devices, shares_of(run.model.num_layers, run.model.num_experts))


def test_the_loss_is_that_of_the_shares_that_are_given_and_another_one_than_per_sequence():
    name = "sigmoid in groups, scaled, shared, a dense layer first"
    run = run_of("sharding_rules/ddp.toml", {}, MODELS[name])
    check(run, name, jax.devices()[:1])
    with pytest.raises(AssertionError):
        assert_equal(run, wanted(name), jax.devices()[:1])


@pytest.mark.parametrize("layout, microbatches", [
    ("ddp", 1), ("ddp", 4), ("expert over fsdp", 2), ("expert over fsdp and context", 2),
    ("expert over tensor with sequence parallelism", 4), ("no axis of experts, zero3 with tensor", 1),
    ("expert over data, the rest once a step", 2), ("zero1", 4)])
def test_layouts_and_microbatches_compute_what_one_device_does(tmp_path, layout, microbatches):
    text, mesh = LAYOUTS[layout]
    (tmp_path / "rules.toml").write_text(text)
    run = run_of(tmp_path / "rules.toml", mesh, training=dict(microbatches=microbatches))
    check(run, "softmax", jax.devices()[:math.prod(mesh.values())])


@pytest.mark.parametrize("name, model", [
    ("expert over fsdp, tensor beside, 1f1b", "four layers"),
    ("expert over data and expert_mlp over tensor, layers that do not divide, 1f1b", "three layers, sigmoid"),
    ("expert over context and fsdp, zero bubble", "four layers")])
def test_pipelines_compute_what_one_device_does(tmp_path, name, model):
    text, mesh, schedule, chunks = PIPELINES[name]
    (tmp_path / "rules.toml").write_text(text)
    run = run_of(tmp_path / "rules.toml", mesh, FOUR_LAYERS[model], dict(microbatches=4),
                 dict(schedule=schedule, chunks=chunks))
    check(run, model, jax.devices()[:math.prod(mesh.values())])


@pytest.mark.parametrize("mesh, microbatches", [({}, 1), (dict(data=2, fsdp=2), 4), (dict(fsdp=2, stage=2), 4)])
def test_a_step_leaves_the_shares_of_all_its_tokens_and_a_skipped_one_those_before(tmp_path, mesh, microbatches):
    params, _, _, counts = wanted("four layers")
    (tmp_path / "rules.toml").write_text(STAGED + STAGED_BATCH if "stage" in mesh else BATCH)
    run = of_batch(run_of(tmp_path / "rules.toml", mesh, FOUR_LAYERS["four layers"], dict(
        microbatches=microbatches, loss_spike="skip")))
    made = assembly.assemble(run, jax.devices()[:math.prod(mesh.values())])
    program, spec = made.program, made.program.step.state
    step = program.compile()
    begun = jax.device_get(spec.begin_shares())
    assert (begun == 1 / 8).all()

    def after(limit):
        opt_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), spec.abstract.opt_state)
        state = jax.device_put(State(np.int32(0), params, opt_state, shares=begun), spec.sharding)
        with jax.set_mesh(made.mesh):
            return jax.device_get(step(state, program.place(batch()), *program.limit(limit))[0].shares)
    np.testing.assert_allclose(after(1e9), counts / counts.sum(-1, keepdims=True), rtol=1e-6)
    assert (after(-1.0) == begun).all()
