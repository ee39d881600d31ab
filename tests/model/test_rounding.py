"""Weights in bfloat16: what is rounded stochastically, by which bits, and what is float32 all the same."""
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import meshtrain as mt
from meshtrain import config, design
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.model.params import ParamInfo
from meshtrain.names import MATMUL_ROLES
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.training import rounding

BF16 = ml_dtypes.bfloat16
TINY = {"model.num_layers": 1, "model.embed_dim": 32, "model.mlp_dim": 64, "data.seq_len": 32, "model.num_experts": 4,
        "model.experts_per_token": 1, "model.expert_mlp_dim": 32, "experts.bias_rate": 0.001, "model.norm": "layernorm",
        "model.param_dtype": "bfloat16", "optimizer.learning_rate": 3e-4, "optimizer.warmup_steps": 0}


to_bfloat16 = jax.jit(rounding.to_bfloat16)


def draws(x: float, n: int = 40_000) -> np.ndarray:
    """x, rounded n times by other bits."""
    return np.asarray(to_bfloat16(np.full(n, x, np.float32), jax.random.key(1)))


@pytest.mark.parametrize("x", [1.0 + 2 ** -10, -1.0 - 2 ** -10, 0.3, -7e4, 1e-30, 3.3e38, 1.999, 2 ** -9 * 1.7])
def test_a_number_goes_to_one_of_its_neighbours_and_its_mean_stays(x):
    x = np.float32(x)
    found, counts = np.unique(draws(x).astype(np.float64), return_counts=True)
    assert len(found) == 2 and found[0] < x < found[1]
    assert np.array_equal(found, found.astype(BF16).astype(np.float64)), "numbers of bfloat16"
    gap = found[1] - found[0]
    assert gap <= 2 ** -7 * abs(found).max(), "neighbours"
    # five deviations of a mean of 40,000 draws
    assert abs(np.average(found, weights=counts) - np.float64(x)) < 5 * 0.5 * gap / np.sqrt(counts.sum())


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -0.15625, np.inf, -np.inf, np.nan, 2.0 ** -126, 2.0 ** -133, 3.3895e38])
def test_what_bfloat16_has_stays_as_it_is(x):
    """The least subnormal numbers of bfloat16, infinities and NaN as well."""
    exact = np.float32(BF16(x))
    found = draws(exact, 5000)
    assert np.array_equal(found.view(np.uint16), np.full(5000, BF16(x)).view(np.uint16)) or np.isnan(found).all() and (
        np.isnan(x))


def test_nan_with_any_bits_stays_nan_and_a_subnormal_number_goes_up_or_down():
    every = np.asarray([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    for seed in range(20):
        assert np.isnan(np.asarray(to_bfloat16(every, jax.random.key(seed)), np.float32)).all()
    between = np.uint32(0x00014000).view(np.float32)        # a quarter above 2^-133
    found, counts = np.unique(draws(between).view(np.uint16), return_counts=True)
    assert found.tolist() == [1, 2] and abs(counts[1] / counts.sum() - 0.25) < 0.02


@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P(None, None, "b")])
def test_every_layout_rounds_by_the_same_bits(spec):
    """On all devices of a mesh, replicas included, what one device makes; other parameters and steps have other bits.
    """
    info = lambda name: ParamInfo((name,), (8, 16, 12), jnp.dtype("bfloat16"), (None,) * 3, "matrix", 1)
    x = np.random.default_rng(0).normal(size=(8, 16, 12)).astype(np.float32)
    of = lambda name, step, x: rounding.round_weights([info(name)], {name: x}, 7, step)[name]
    plain = np.asarray(jax.jit(of, static_argnums=0)("w", 3, x))
    sharding = NamedSharding(jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2), spec)
    split = jax.jit(lambda step, x: of("w", step, x), in_shardings=(None, sharding), out_shardings=sharding)
    lowered = split.lower(np.int32(3), jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert "all-" not in lowered.compile().as_text() and "collective" not in lowered.compile().as_text()
    found = split(np.int32(3), x)
    for shard in found.addressable_shards:
        assert np.array_equal(np.asarray(shard.data).view(np.uint16), plain[shard.index].view(np.uint16))
    for other in (of("v", 3, x), of("w", 4, x)):
        assert 0.3 < np.mean(np.asarray(other) != plain) < 0.7


def test_matrices_and_tables_alone_are_stored_in_bfloat16():
    run = config.Run(model=dict(num_layers=1, embed_dim=32, mlp_dim=64, num_experts=4, experts_per_token=1, expert_mlp_dim=32,
                                norm="layernorm", attention_bias="qkv", param_dtype="bfloat16"), experts=dict(bias_rate=1e-3))
    dtypes = {info.role: info.dtype for info in design.make(run, MeshSpec({}), "cpu", None).model.parameters()}
    small = {"norm", "bias", "router", "balance"}
    assert dtypes.keys() > small and {dtypes[role] for role in small} == {np.dtype("float32")}
    assert {dtype for role, dtype in dtypes.items() if role not in small} == {np.dtype(BF16)}


@pytest.fixture(scope="module")
def trained():
    """(an experiment, its weights before and after 20 steps)."""
    run = mt.Experiment(settings=TINY | {"mesh.fsdp": 2, "mesh.tensor": 2}, rules="zero3")
    params = run.state.params
    params["layers"]["moe"]["bias"] = jnp.full_like(params["layers"]["moe"]["bias"], 0.6)
    run.state = dataclasses.replace(run.state, params=params)
    before = jax.device_get(run.state.params)
    run.step(20)
    return run, before, jax.device_get(run.state.params)


def test_norms_biases_routers_and_their_balance_are_float32_and_all_of_them_move(trained):
    run, before, after = trained
    small = {info.role for info in run.made.model.parameters()} - {*MATMUL_ROLES}
    assert small == {"norm", "bias", "router", "balance"}
    for info in run.made.model.parameters():
        old, new = before, after
        for key in info.path:
            old, new = old[key], new[key]
        assert old.dtype == info.dtype == (BF16 if info.role in MATMUL_ROLES else np.float32), info.name
        if info.role in small - {"balance"}:
            assert np.mean(old != new) > 0.9, info.name
    steps = np.abs(after["layers"]["moe"]["bias"] - np.float32(0.6)) / 0.001
    assert steps.max() > 5 and np.allclose(steps, np.round(steps), atol=0.01), "whole steps of the rate"


def test_matrices_move_as_far_as_in_float32(trained):
    """To the nearest, a tenth of their entries would move at this learning rate."""
    _, before, after = trained
    wide = mt.Experiment(settings=TINY | {"mesh.fsdp": 2, "model.param_dtype": "float32"}, rules="zero3")
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), before)
    wide.state = dataclasses.replace(wide.state, params=params)
    wide.step(20)
    exact = jax.device_get(wide.state.params)
    for path in (("attention", "query", "kernel"), ("attention", "out", "kernel"), ("moe", "up")):
        old, new, goal = (np.asarray(_at(tree["layers"], path), np.float64) for tree in (before, after, exact))
        moved, wanted = new - old, goal - old
        # of all entries together: the noise of single ones is larger than their way
        along = np.sum(moved * wanted) / np.sum(wanted * wanted)
        assert 0.8 < along < 1.2, (path, along)


def _at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def test_a_checkpoint_with_norms_in_bfloat16_is_read_as_float32_and_told(trained, tmp_path, capsys):
    run, _, _ = trained
    wanted = run.made.state_shapes
    narrow = lambda info: info.role not in MATMUL_ROLES
    leaves = iter(run.made.model.parameters())
    old = dataclasses.replace(run.state, params=jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if narrow(next(leaves)) else x, run.state.params))
    expected = [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.device_get(old))]
    with Checkpoints(DirectoryStore(tmp_path / "shared"), every=1) as shared:
        shared.save(20, old, {"run": {}})
        shared.wait()
        by_shared = shared.restore(20, wanted)
    local = LocalCheckpoints(str(tmp_path / "local"), 1, tmp_path, tell=print)
    local.begin(0, False)
    local.save(20, old, {"run": {}})
    local._settle()
    by_local = local.newest(0, wanted).restore(wanted)
    for found in (by_shared, by_local):
        for info, x in zip(run.made.model.parameters(), jax.tree.leaves(found.params), strict=True):
            assert x.dtype == info.dtype, info.name
        for x, y in zip(jax.tree.leaves(found), expected, strict=True):
            assert np.array_equal(np.asarray(x, np.float32), y)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "bfloat16 that are float32 in this version" in line and "final_norm" in line] == said
    assert len(said) == 2
    # the other way a number would be rounded
    narrower = dataclasses.replace(wanted, params=jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding), wanted.params))
    with Checkpoints(DirectoryStore(tmp_path / "new"), every=1) as saving:
        saving.save(20, run.state, {"run": {}})
        with pytest.raises(ValueError, match="final_norm/scale: float32.* in the checkpoint, bfloat16"):
            saving.settle()
            saving.restore(20, narrower)
