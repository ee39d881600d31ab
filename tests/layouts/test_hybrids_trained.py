"""Models of several mixers with every optimizer and with LoRA: layouts compute what one device does, convolutions,
decays and sinks are neither decayed nor cast, and adapters stand wherever a layer has the projection."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import sampling
from test_hybrids import MODELS, run_of

from meshtrain import config
from meshtrain.model import lora, transformer
from meshtrain.names import AXES, MATMUL_ROLES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout

FOUR = dict(fsdp=2, tensor=2)
ALPHA, RANK = 6.0, 4
# Leaves that are no matrices, by the last parts of their paths.
SMALL = {"delta": {"A_log", "dt_bias", "query_conv/kernel", "key_conv/kernel", "value_conv/kernel", "sinks",
                   "moe/gate_bias", "moe/up_bias", "moe/down_bias", "moe/router_bias"},
         "kda": {"A_log", "dt_bias", "query_conv/kernel", "key_conv/kernel", "value_conv/kernel"},
         "mamba": {"A_log", "dt_bias", "query_conv/kernel", "key_conv/kernel", "value_conv/kernel", "skip",
                   "query_conv/bias", "key_conv/bias", "value_conv/bias"}}


@pytest.mark.parametrize("model", MODELS)
def test_matrices_are_matrices_and_all_else_is_neither_decayed_nor_cast(model):
    narrow = config.Model(**MODELS[model] | dict(param_dtype="bfloat16", compute_dtype="bfloat16"))
    built = transformer.build(narrow)
    infos = built.parameters()
    layout = Layout(rules.parse(""), dict.fromkeys(AXES, 1))
    abstract = jax.eval_shape(built.init, jax.random.key(0))
    read = jax.tree.leaves(jax.eval_shape(lambda p: built.as_read(layout, p, jnp.dtype("bfloat16")), jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), abstract)))
    for info, as_read in zip(infos, read, strict=True):
        small = any(info.name.endswith(name) for name in SMALL[model])
        matrix = info.path[-1] == "kernel" and not small or info.path[-2:] in [
            ("moe", name) for name in ("gate", "up", "down")]
        assert (info.role in MATMUL_ROLES) == (matrix or info.role == "embedding"), info.name
        assert (as_read.dtype == jnp.float32) == (info.role not in MATMUL_ROLES), info.name
        assert info.role == "bias" or not small, info.name
        assert info.dtype == (jnp.bfloat16 if info.role in MATMUL_ROLES else jnp.float32), info.name
    for name in SMALL[model]:
        assert any(info.name.endswith(name) for info in infos), name


CASES = {("delta", "muon")}


@pytest.mark.parametrize("model, name", [
    case if case in CASES else pytest.param(*case, marks=sampling.GRID)
    for case in [(model, name) for model in MODELS for name in ("muon", "adafactor", "lion", "adamw")]])
def test_with_every_optimizer_layouts_train_as_one_device_and_all_but_the_layers_scale_moves(model, name):
    run = run_of(model, FOUR)
    run = run.model_copy(update=dict(optimizer=run.optimizer.model_copy(update=dict(name=name))))
    case = parity.check(run)
    params = parity.draw_parameters(case.made, 0)
    program = case.made.program
    state = program.initialize()
    state, _ = case.step(dataclasses.replace(state, params=jax.device_put(params, program.step.state.sharding.params)),
                         program.place(parity.batch_of(run, 0)))
    for (path, new), old in zip(jax.tree.leaves_with_path(jax.device_get(state.params)), jax.tree.leaves(params),
                                strict=True):
        key = jax.tree_util.keystr(path)
        assert np.array_equal(new, old) == ("layer_scale" in key), key


@pytest.mark.parametrize("model, mesh", [("delta", FOUR), *(
    pytest.param(*case, marks=sampling.GRID) for case in (("mamba", FOUR), ("kda", FOUR), ("kda", dict(context=2))))])
def test_adapters_of_every_mixer_train_as_on_one_device(model, mesh):
    run = run_of(model, mesh, lora=dict(rank=RANK, alpha=ALPHA))
    case = parity.check(run)
    adapted = {info.path[-4:-2] for info in case.made.model.parameters() if info.trainable}
    mixers = {"delta": {"attention", "linear"}, "kda": {"attention", "linear"}, "mamba": {"attention", "linear"}}[model]
    assert {(part, name) for part in mixers for name in ("query", "key", "value", "out")} <= adapted
    assert ("mlp", "up") in adapted and (("shared", "down") in adapted) == (model == "delta")


@pytest.mark.parametrize("model", MODELS)
def test_the_merged_model_has_the_loss_of_the_adapted_one(model):
    plain, adapted = (parity.assemble(run_of(model, {}, "ddp", lora=section))
                      for section in ({}, dict(rank=RANK, alpha=ALPHA)))
    p = parity.draw_parameters(adapted, 0)
    batch = parity.batch_of(plain.run, 0)
    losses = []
    for made, weights in ((adapted, p), (plain, jax.device_get(merged(p)))):
        with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
            losses.append(float(made.program.evaluate(weights, made.program.place(batch))[0]))
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


def merged(node):
    """The parameters without adapters."""
    if not isinstance(node, dict):
        return node
    node = {key: merged(value) for key, value in node.items()}
    adapter = node.pop("lora", None)
    return node | dict(kernel=lora.merge(node["kernel"], adapter, ALPHA / RANK)) if adapter else node


def test_a_target_that_some_layers_have_is_enough():
    cfg = config.Model(**MODELS["mamba"])       # MLPs that are dense, none, and experts without shared ones
    build = lambda *targets: transformer.build(cfg, config.Lora(rank=2, targets=targets))
    adapted = {info.name for info in build("up", "query").parameters() if info.trainable}
    assert {name.split("/")[-3] for name in adapted} == {"up", "query"}
    of = lambda target: {name.split("/")[1] for name in adapted if f"/{target}/" in name}       # layers of the period
    assert of("query") == {"0", "1", "2"} and of("up") == {"0"}
    with pytest.raises(ValueError, match="lora.targets names gate, but the layers of this model have only query, key, "
                                         "value, out, up, down; leave it out"):
        build("gate", "up")
