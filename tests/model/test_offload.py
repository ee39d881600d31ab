"""Moments in host memory: the same numbers on every layout, in checkpoints the same arrays, and clear refusals."""
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parity
import pytest
from commands import call, refused
from jax.extend.random import threefry2x32_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_moments import BF16, TINY, read, run_of

import meshtrain as mt
from meshtrain import config
from meshtrain.commands import train
from meshtrain.model.params import ParamInfo
from meshtrain.run import replicas, trees
from meshtrain.training import offload, rounding

FLOAT32 = dict(moments_dtype="float32")
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_mlp_dim=16)
LAYOUTS: dict[str, tuple[dict, str, dict, dict]] = {
    "zero3 with tensor": (dict(fsdp=2, tensor=2), "zero3", FLOAT32, {}),
    "ddp": (dict(data=2), "ddp", FLOAT32, {}),
    "zero1": (dict(fsdp=4), "zero1", FLOAT32, dict(training=dict(microbatches=2))),
    "zero2": (dict(fsdp=4), "zero2", FLOAT32, dict(training=dict(microbatches=2))),
    "stages with tensor": (dict(stage=2, data=2, tensor=2), "zero1", FLOAT32, dict(training=dict(microbatches=2))),
    "context": (dict(context=2, fsdp=2), "zero3", FLOAT32, {}),
    "experts": (dict(data=2, fsdp=2), "hsdp", FLOAT32, dict(
        model=EXPERTS | dict(mlps="deee"), experts=dict(bias_rate=0.01))),
    "lion": (dict(fsdp=4), "zero3", FLOAT32 | dict(name="lion"), {}),
    "groups, tied, odd vocabulary": (dict(fsdp=2), "zero3", FLOAT32 | dict(
        groups={"role:embedding": dict(rate=0.5, decay=0.1)}), dict(model=dict(tie_embeddings=True, num_layers=3))),
    "bfloat16 moments with tensor": (dict(fsdp=2, tensor=2), "zero3", {}, {}),
    "bfloat16 moments with stages": (dict(stage=2, data=2), "zero1", {}, dict(training=dict(microbatches=2))),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_moments_have_the_bits_that_they_have_on_the_device(name):
    """After one step. Afterwards a weight may differ in its last bit: XLA contracts a product and a sum to one
    rounding in one of the programs, and not in the other."""
    mesh, rules, optimizer, sections = LAYOUTS[name]
    cases = [parity.compile_run(run_of(mesh, rules, optimizer | dict(offload=there), **sections)) for there in (False, True)]
    params = parity.draw_parameters(cases[0].made, 0)
    (numbers, _, near), (found, _, far) = (parity.train(case, params) for case in cases)
    assert numbers[0].tolist() == found[0].tolist()
    np.testing.assert_allclose(found, numbers, rtol=2e-6)
    for (path, a), b in zip(jax.tree.leaves_with_path(near), jax.tree.leaves(far), strict=True):
        assert a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)
    spec = cases[1].made.program.step.state
    places = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(spec.abstract.opt_state)]
    assert [kind == offload.KIND for kind in places] == [owner is not None for owner in spec.offload.owners]
    trained = sum(info.size for info in cases[1].made.model.parameters())
    hosted = sum(leaf.size for leaf, kind in zip(jax.tree.leaves(far), places) if kind == offload.KIND)
    assert hosted > (0.98 if optimizer.get("name") == "lion" else 1.96) * trained


def test_a_loop_over_layers_gives_the_updates_and_the_bits_of_one_update():
    """Of sharded stacks and a sharded embedding; a norm stays on the device. The moments are bfloat16."""
    infos = [ParamInfo(tuple(name.split("/")), shape, jnp.dtype("float32"), axes, role, 1) for name, shape, axes, role in (
        ("embedding", (18, 4), ("vocab", "embed"), "embedding"), ("layers/norm", (3, 4), ("layers", "embed"), "norm"),
        ("layers/up", (3, 4, 6), ("layers", "embed", "mlp"), "matrix"))]
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    axes = dict(vocab="tensor", embed="fsdp", mlp="tensor")
    places = [NamedSharding(mesh, P(*map(axes.get, info.axes))) for info in infos]
    rng = np.random.default_rng(0)
    draw = lambda: trees.nest({info.name: rng.standard_normal(info.shape).astype(np.float32) for info in infos})
    grads, params = draw(), draw()
    tx = rounding.store_moments(optax.with_extra_args_support(optax.scale_by_adam(0.9, 0.95)), seed=7)
    state = tx.init(draw())._replace(mu=jax.tree.map(lambda g: g.astype(BF16), draw()))
    off = offload.Offload(tx, offload.find(state, params, infos), infos, places)
    assert off.owners == [None, 0, None, 2, 0, None, 2]
    split = lambda tree: jax.tree.unflatten(jax.tree.structure(tree), map(jax.device_put, jax.tree.leaves(tree), places))
    state = state._replace(mu=split(state.mu), nu=split(state.nu))
    update = jax.jit(lambda *trees, finite: off.update(*trees, step=3, finite=finite))
    wanted, kept = jax.jit(lambda *trees: tx.update(*trees, step=3))(grads, state, params)
    for finite in (True, False):
        found = update(split(grads), state, split(params), finite=finite)
        for a, b in zip(*map(jax.tree.leaves, (found, (wanted, kept if finite else state))), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=3e-7)


def test_a_window_has_the_bits_of_the_whole_array_also_beyond_32_bits():
    key = jax.random.key(3, impl="threefry2x32")
    whole = np.asarray(jax.random.bits(key, (3, 5, 7), jnp.uint32))
    found = jax.jit(lambda at: rounding._bits(key, rounding.Window((3, 5, 7), [at, 2, 0]), (1, 2, 7)))(2)
    assert np.array_equal(found, whole[2:, 2:4])
    for shape, start, size in (((80, 2**17, 2**16 - 1), (79, 2**17 - 2, 70), (1, 2, 3)), ((4, 2**31 - 1), (2, 0), (1, 4))):
        numbers = [sum((first + more) * math.prod(shape[dim + 1:]) for dim, (first, more) in enumerate(zip(start, at)))
                   for at in np.ndindex(*size)]
        high, low = (jnp.asarray(half, jnp.uint32) for half in zip(*(divmod(number, 2**32) for number in numbers)))
        one, other = threefry2x32_p.bind(*jax.random.key_data(key), high, low)
        found = jax.jit(lambda shape=shape, start=start, size=size: rounding._bits(
            key, rounding.Window(shape, start), size))()
        assert max(numbers) > 2**32 and np.array_equal(found.ravel(), one ^ other)


@pytest.mark.full
def test_a_skipped_step_keeps_every_bit_and_replicas_are_compared():
    run = mt.Experiment(settings=TINY | {"mesh.data": 2, "mesh.fsdp": 2, "optimizer.offload": True}, rules="hsdp")
    run.step(2)
    checked = replicas.Replicas(run.made.state_shapes, run.made.mesh)
    assert checked.faults(run.state) == []
    before = jax.device_get(run.state)
    run.state = dataclasses.replace(run.state, params=jax.tree.map(lambda w: w.at[...].set(jnp.nan), run.state.params))
    assert run.step()["skipped"]
    for a, b in zip(jax.tree.leaves(before.opt_state), jax.tree.leaves(jax.device_get(run.state.opt_state)), strict=True):
        assert a.tobytes() == b.tobytes()


RUN = [
    "[mesh]", "fsdp = 8", "[sharding]", 'rules = "zero3"', "[data]", 'paths = ["corpus.txt"]', "seq_len = 16",
    "global_batch = 8", "[model]", "embed_dim = 16", "num_layers = 2", "num_heads = 2", "mlp_dim = 16", "[training]",
    "steps = 4", "[validation]", "every = 0", "batches = 1", "[metrics]", "tensorboard = false", "[optimizer]",
    'schedule = "constant"', "offload = true", "[checkpoint]", "every = 2"]


@pytest.mark.full
def test_a_run_is_resumed_with_the_same_bits_and_moments_go_from_host_to_device_and_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("A line of a corpus that is long enough to be cut.\n" * 400)
    Path("run.toml").write_text("\n".join(RUN))

    def ran(name: str, *words):
        done = call(train.main, "run.toml", "--run.dir", name, *words)
        assert done.code == 0, done
        return done
    told = ran("straight").out
    assert told.count("CPU devices have no memory of their own") == 1
    ran("cut", "--training.steps", 2)
    ran("cut", "--checkpoint.local_dir", str(tmp_path / "ram"), "--checkpoint.local_every", 1, "--training.steps", 3)
    ran("cut", "--checkpoint.local_dir", str(tmp_path / "ram"), "--checkpoint.local_every", 1)
    ran("near", "--optimizer.offload", "false", "--training.steps", 2)
    ran("near")
    ran("far", "--training.steps", 2)
    ran("far", "--optimizer.offload", "false")
    wanted = read(Path("straight"))
    found = read(Path("cut"))
    for name in wanted:
        assert found[name].tobytes() == wanted[name].tobytes(), name
    for name in ("near", "far"):
        for path, leaf in read(Path(name)).items():
            np.testing.assert_allclose(leaf, wanted[path], rtol=1e-4, atol=1e-6 * np.abs(wanted[path]).max(), err_msg=path)


@pytest.mark.parametrize("settings, because", [
    (dict(optimizer=dict(name="muon")), "muon needs whole matrices"),
    (dict(optimizer=dict(groups={"layers/*": dict(rule="muon")})), "muon needs whole matrices"),
    (dict(optimizer=dict(name="adafactor")), 'optimizer.name="adafactor" has no moments of the size of the weights'),
    (dict(optimizer=dict(name="mine.py:rule")), "may read other elements of a weight"),
    (dict(lora=dict(rank=2)), "lora.rank=2 trains only adapters"),
])
def test_what_it_cannot_move_is_refused_with_the_remedy(settings, because):
    settings = settings | dict(optimizer=dict(offload=True) | settings.get("optimizer", {}))
    faults = [fault for fault in config.problems(config.Run(**settings)) if "optimizer.offload=true: " in fault]
    assert len(faults) == 1 and because in faults[0] and faults[0].endswith(", or leave offload out")


@pytest.mark.full
def test_a_refusal_is_one_message_and_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(call(train.main, "--optimizer.offload", "true", "--optimizer.name", "muon"),
            "optimizer.offload=true: muon needs whole matrices")
