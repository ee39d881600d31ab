"""LoRA: nothing but adapters is trained; layouts: `test_cells`.

One device is compared with the model without adapters at the merged weights: by the chain rule its weights' gradients
give those of A and B.
"""
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import sampling
import traced

from meshtrain import assembly, config
from meshtrain.cost.formulas import flops, footprint, traffic
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import place
from meshtrain.inspection import memory
from meshtrain.model import lora, transformer
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout
from test_layouts import MODEL, ONE, T, run_of

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK


def lora_run(rule: str, mesh: dict, model: dict = {}, training: dict = {}, targets: tuple = (),
             **sections) -> config.Run:
    made = dict(run_of(rule, mesh, model, training))
    return config.Run(**made | dict(lora=dict(rank=RANK, alpha=ALPHA, targets=targets)) | sections)


def assert_equal_gradients(found, expected, tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), jax.tree_util.keystr(path)


def test_adapters_have_the_gradients_that_the_merged_model_gives_them():
    """dA = s dW B', dB = s A' dW of W + s A B, on one device, of all projections."""
    p, numbers, _, state = parity.one_device(lora_run("ddp", ONE, training=dict(grad_clip=0.0)).model_dump_json(), 0)
    plain = parity.compile_run(run_of("ddp", ONE, training=dict(grad_clip=0.0)))
    plain_numbers, _, plain_state = parity.train(plain, jax.device_get(without_adapters(p)), 1)
    moments, of_weights = map(parity.first_moment, (state, plain_state))
    assert abs(plain_numbers[0, 0] - numbers[0, 0]) < 2e-6 * numbers[0, 0]
    checked = 0
    for part, names in (("attention", ("query", "key", "value", "out")), ("mlp", ("gate", "up", "down"))):
        for name in names:
            a, b = (p["layers"][part][name]["lora"][one] for one in "ab")
            dw = of_weights["layers"][part][name]["kernel"].reshape(len(a), int(np.prod(a.shape[1:-1])), -1)
            a2, b2 = a.reshape(len(a), -1, RANK), b.reshape(len(b), RANK, -1)
            found = moments["layers"][part][name]["lora"]
            assert_equal_gradients(found, {"a": SCALE * np.einsum("lio,lro->lir", dw, b2).reshape(a.shape),
                                           "b": SCALE * np.einsum("lir,lio->lro", a2, dw).reshape(b.shape)}, 1e-4)
            checked += 1
    assert checked == 7 and len(jax.tree.leaves(moments)) == 14, "no other leaf is trained"


@pytest.mark.full
@pytest.mark.parametrize("tied, also", [(False, ("embedding", "head")), (False, ("head",)), (False, ("embedding",)),
                                        (True, ("embedding",))], ids=str)
def test_what_is_trained_beside_adapters_has_the_gradient_that_the_merged_model_gives_it(tied, also):
    model, unclipped = dict(tie_embeddings=tied), dict(grad_clip=0.0)
    run = lora_run("ddp", ONE, model, unclipped, lora=dict(rank=RANK, alpha=ALPHA, also=also))
    p, _, _, state = parity.one_device(run.model_dump_json(), 0)
    plain = parity.compile_run(run_of("ddp", ONE, model, unclipped))
    _, _, plain_state = parity.train(plain, jax.device_get(without_adapters(p)), 1)
    moments, expected = map(parity.first_moment, (state, plain_state))
    assert {name for name in moments if name != "layers" and jax.tree.leaves(moments[name])} == set(also)
    for name in also:
        assert_equal_gradients(moments[name], expected[name], 1e-4)
    compiled = parity.compile_run(run)
    held, found = memory.formula(compiled.made), memory.measure(compiled.made, compiled.step)
    assert [found[key] for key in ("params", "grads", "optimizer")] == [
        held[key] for key in ("params", "grads", "optimizer")]


def test_the_scale_of_adapters_is_exact_in_bfloat16():
    """4/3 rounded to bfloat16 would be 0.2% more: the mean of many products tells it from their own rounding."""
    cfg = config.Model(**MODEL | dict(compute_dtype="bfloat16"))
    model = transformer.build(cfg, config.Lora(rank=3, alpha=4.0))
    layer = model.groups[0].period[0]
    weights = jax.tree.map(np.zeros_like, jax.device_get(layer.init(jax.random.key(0))))
    adapter = weights["mlp"]["up"]["lora"]
    adapter["a"][0, 0] = adapter["b"][0, 0] = 1.0
    layout = Layout(rules.parse(""), dict.fromkeys(AXES, 1))
    ex = Execution(layout, Numerics(jnp.dtype("bfloat16")), Engines(None))
    x = np.zeros((1, 2000, cfg.embed_dim))
    x[0, :, 0] = np.random.default_rng(0).uniform(1, 2, 2000)
    x = jnp.asarray(x, jnp.bfloat16)
    got = layer.bind(weights).mlp.up.lora(ex, x, jnp.zeros((1, 2000, cfg.mlp_dim), jnp.bfloat16), 1, None)[0, :, 0]
    assert float(jnp.mean(got.astype(jnp.float32)) / jnp.mean(x[0, :, 0].astype(jnp.float32))) == pytest.approx(
        4 / 3, rel=2e-4)


def without_adapters(p: dict) -> dict:
    """The merged parameters, by the formula."""
    def visit(node):
        if not isinstance(node, dict):
            return node
        node = {key: visit(value) for key, value in node.items()}
        if "lora" in node:
            adapter = node.pop("lora")
            node["kernel"] = lora.merge(node["kernel"], adapter, SCALE)
        return node
    return visit(p)


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=sampling.GRID),
                                  pytest.param("adafactor", marks=sampling.GRID),
                                  pytest.param("lion", marks=sampling.GRID)])
def test_the_base_stays_bit_for_bit_and_only_adapters_have_a_state(name):
    compiled = parity.compile_run(lora_run("zero3", dict(fsdp=4), optimizer=dict(name=name, learning_rate=0.1)))
    made = compiled.made
    state = made.program.initialize()
    before = jax.device_get(state.params)
    for n in range(3):
        state, metrics = compiled.step(state, made.program.place(parity.batch_of(made.run, n)))
        assert not metrics["skipped"]
    (trained, frozen), (old, expected) = map(made.model.divide, (jax.device_get(state.params), before))
    jax.tree.map(np.testing.assert_array_equal, frozen, expected)
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(old),
                                              strict=True)), "every adapter moved"
    names = {"/".join(str(getattr(key, "key", key)) for key in path)
             for path, leaf in jax.tree.leaves_with_path(state.opt_state)
             if leaf.ndim > 1}
    assert names and all("/lora/" in name for name in names)
    size = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) < 2 * size + 10


@pytest.mark.long
@pytest.mark.cell
def test_the_first_step_computes_what_the_model_without_adapters_does():
    run = lora_run("ddp", ONE)
    with_adapters = parity.compile_run(run)
    state = with_adapters.made.program.initialize()
    plain = parity.compile_run(run_of("ddp", ONE)).made
    p = plain.program.initialize().params
    frozen = with_adapters.made.model.divide(state.params)[1]
    flat = dict(jax.tree.leaves_with_path(frozen))
    assert all((flat[path] == leaf).all()
               for path, leaf in jax.tree.leaves_with_path(p)), "adapters do not change the draws of the others"
    batch = plain.program.place(parity.batch_of(run, 0))
    losses = [made.program.evaluate(q, batch)[0] for made, q in ((plain, p), (with_adapters.made, state.params))]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("mesh, rule", [pytest.param(dict(data=2), "ddp", marks=sampling.GRID),
                                        (dict(stage=2), "ddp")], ids=str)
def test_no_accumulator_of_a_frozen_weight_stands_in_the_compiled_step(rule, mesh):
    compiled = parity.compile_run(lora_run(rule, mesh, targets=("query", "value")))
    made, held = compiled.made, memory.formula(compiled.made)
    trained = made.model.divide(made.program.step.state.abstract.params)[0]
    size = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert held["grads"] == 4 * size // mesh.get("stage", 1)
    assert held["optimizer"] == 2 * 4 * size // mesh.get("stage", 1) + 4
    found = memory.measure(made, compiled.step)
    assert (found["grads"], found["optimizer"]) == (held["grads"], held["optimizer"])


def test_without_remat_nothing_is_kept_for_the_gradient_of_a_frozen_weight():
    """Of attention's output and the MLP's input nothing is kept that only their own weights' gradients would read."""
    kept = {}
    for targets in ((), ("query",)):
        made = assembly.assemble(lora_run("ddp", dict(stage=2), targets=targets), jax.devices()[:2])
        split, x = traced.split_layer(made.run, made.model, made.layout, made.mesh.abstract_mesh,
                                     made.program.step.ex.engines.attention)
        kept[targets] = sum(a.size for a in sum(split.residuals, []))
    tokens = x.shape[0] * x.shape[1]
    # The normed inputs of the MLP, which gate and up alone read for their weights' gradients.
    assert kept[()] - kept[("query",)] >= tokens * MODEL["embed_dim"]


def test_the_plan_and_the_flops_count_what_is_trained():
    run = lora_run("ddp", ONE)
    with_adapters, plain = (transformer.build(run.model, section) for section in (run.lora, None))
    size = lambda infos: sum(info.size for info in infos)
    adapters = [info for info in with_adapters.parameters() if info.trainable]
    matrices = [info for info in plain.parameters() if info.role in ("matrix", "head")]
    difference = flops.model_flops_per_token(plain.parameters(), run.model, T) - flops.model_flops_per_token(
        with_adapters.parameters(), run.model, T)
    assert difference == 2 * size(matrices) - 6 * size(adapters)
    layout = Layout(rules.parse(""), dict.fromkeys(config.AXES, 1))
    placed = place(with_adapters.parameters(), run.model, layout, MeshSpec({}))
    assert placed.held.grads == placed.held.updated == size(adapters) and placed.held.stored == size(adapters) + size(
        plain.parameters())
    narrow = lora_run("ddp", ONE, dict(param_dtype="bfloat16"))
    infos = transformer.build(narrow.model, narrow.lora).parameters()
    placed = place(infos, narrow.model, layout, MeshSpec({}))
    of_base = sum(info.size * info.dtype.itemsize for info in infos)
    assert footprint.memory(placed, Options.of(narrow))["params"] == of_base < 4 * size(infos)


def test_rows_of_a_frozen_table_travel_once_and_of_a_trained_one_their_cotangents_as_well():
    def sent(run):
        mesh = MeshSpec(config.mesh_sizes(run, 4))
        layout = Layout(rules.load(run.sharding.rules), mesh.sizes)
        placed = place(transformer.build(run.model, run.lora).parameters(), run.model, layout, mesh)
        return sum(row.runs for row in traffic.of(placed, Options.of(run)) if row.kind == "all-to-all")
    frozen, trained = (sent(run) for run in (lora_run("zero3", dict(fsdp=4)), run_of("zero3", dict(fsdp=4))))
    assert 2 * frozen == trained > 0


def test_what_is_rarely_meant_is_told_once():
    told = lambda **model: " ".join(config.notes(lora_run("ddp", ONE, model)))
    assert "freezes random weights" in told() and "4 bytes each" not in told()
    assert "4 bytes each" in told(compute_dtype="bfloat16")
    assert "4 bytes each" not in told(compute_dtype="bfloat16", param_dtype="bfloat16")
    assert config.notes(run_of("ddp", ONE)) == []
