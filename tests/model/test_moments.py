"""Moments in bfloat16: rounded stochastically by bits of no layout, so that they decay and train as float32 ones do."""
import dataclasses
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import parity
import pytest
from commands import call, refused

import meshtrain as mt
from meshtrain import config, design
from meshtrain.checkpoint import resume
from meshtrain.commands import train
from meshtrain.config.unused import messages
from meshtrain.cost.program import audit
from meshtrain.run import trees
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.training import rounding, state

BF16 = ml_dtypes.bfloat16
TINY = {"model.num_layers": 2, "model.embed_dim": 32, "model.mlp_dim": 64, "data.seq_len": 32, "data.global_batch": 8,
        "optimizer.moments_dtype": "bfloat16", "optimizer.warmup_steps": 0}


def run_of(mesh: dict, rules: str = "zero3", optimizer: dict = {}, **sections) -> config.Run:
    training = dict(steps=9, loss_chunk=24) | sections.pop("training", {})
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(parity.RULES / f"{rules}.toml")), training=training,
        model=dict(vocab_size=259, embed_dim=32, num_layers=4, num_heads=4, head_dim=8, mlp_dim=48, norm_eps=1e-2,
                   compute_dtype="float32") | sections.pop("model", {}),
        data=dict(seq_len=16, global_batch=16),
        optimizer=dict(learning_rate=1e-3, moments_dtype="bfloat16") | optimizer, **sections)


def moments(opt_state) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(jax.device_get(opt_state))
            if leaf.ndim and leaf.dtype == BF16}


# ---- the rounding ----------------------------------------------------------------------------------------------------


def by_hand(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Float32 numbers, rounded away from zero where 16 random bits exceed their distance to that neighbour."""
    near = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    far = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    share = (x - near).astype(np.float64) / (far - near)
    return np.where(bits >= 65536 * (1 - share), far, near).astype(BF16)


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_two_moments_are_rounded_by_the_halves_of_one_draw_of_threefry(generator):
    """Of the seed, the step and the path of the weight, whatever generator jax has as its default."""
    grads = {"a": {"w": np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)}}
    tx = rounding.store_moments(optax.with_extra_args_support(optax.scale_by_adam(0.9, 0.95)), seed=7)
    with jax.default_prng_impl(generator):
        before = tx.init(grads)
        _, (_, mu, nu) = jax.jit(tx.update)(grads, before, grads, step=3)
    key = jax.random.key(7, impl="threefry2x32")
    for more in (0x6D6F6D65, 3, zlib.crc32(b"a/w"), 0):
        key = jax.random.fold_in(key, more)
    bits, g = np.asarray(jax.random.bits(key, (8, 24), np.uint32)), grads["a"]["w"]
    exact = np.float32(0.1) * g, np.float32(1 - 0.95) * g * g
    for found, wanted in zip((mu, nu), (by_hand(exact[0], bits & 0xFFFF), by_hand(exact[1], bits >> 16))):
        found = np.asarray(found["a"]["w"])
        # 1 - b is rounded otherwise by optax: numbers at a tie may go the other way
        assert found.dtype == BF16 and np.mean(found != wanted) < 0.03
    assert np.mean(by_hand(exact[0], bits & 0xFFFF) != by_hand(exact[0], bits >> 16)) > 0.2, "halves differ"


def test_a_finite_number_stays_finite():
    """Above the largest bfloat16, 3.3895e38, there is no neighbour."""
    x = jnp.asarray([3.4e38, -3.4e38, 3.3896e38] * 1000, jnp.float32)
    found = np.asarray(rounding.to_bfloat16(x, jax.random.key(0)), np.float32)
    assert np.array_equal(found, np.sign(x) * np.float32(BF16(3.3895e38)))


@pytest.mark.full
@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_a_second_moment_decays_as_in_float32(b2):
    """To nearest it would stay 1 with 0.999: a thousandth is less than half of the step below 1."""
    steps, n = 4 * round(1 / (1 - b2)), 1024
    rule = optax.with_extra_args_support(optax.scale_by_adam(0.9, b2))
    found = {}
    for name, tx in (("float32", rule), ("bfloat16", rounding.store_moments(rule, 0))):
        params = {"w": jnp.zeros(n)}
        begun = tx.init(params)
        begun = begun._replace(nu=jax.tree.map(jnp.ones_like, begun.nu))

        @jax.jit
        def run(begun, tx=tx, params=params):
            def step(state, number):
                grads = {"w": 0.1 * jax.random.normal(jax.random.fold_in(jax.random.key(1), number), n)}
                return tx.update(grads, state, params, step=number)[1], None
            return jax.lax.scan(step, begun, jnp.arange(steps))[0].nu["w"]
        found[name] = float(run(begun).astype(jnp.float32).mean())
    assert found["float32"] == pytest.approx(0.028, rel=0.1)
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.03)


# ---- a run -----------------------------------------------------------------------------------------------------------


LAYOUTS = {
    "zero3 with tensor": (dict(fsdp=2, tensor=2), "zero3", {}),
    "ddp": (dict(data=4), "ddp", {}),
    "zero1": (dict(fsdp=4), "zero1", dict(training=dict(microbatches=2))),
    "stages": (dict(stage=2, data=2), "zero1", dict(training=dict(microbatches=2))),
    "muon": (dict(fsdp=2, tensor=2), "zero3", dict(optimizer=dict(name="muon"))),
    "muon with stages": (dict(stage=2, fsdp=2), "zero1", dict(
        optimizer=dict(name="muon"), training=dict(microbatches=2))),
    "lion, weights in bfloat16, too": (dict(fsdp=4), "zero3", dict(
        optimizer=dict(name="lion"), model=dict(param_dtype="bfloat16"))),
    "adapters": (dict(fsdp=2, tensor=2), "zero3", dict(lora=dict(rank=2, alpha=4.0))),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (number > 0))
                                  for number, name in enumerate(LAYOUTS)])
def test_layouts_round_by_the_bits_of_one_device(name):
    """After a step, a moment differs only where the gradients' last bits lead to another rounding."""
    mesh, rules, sections = LAYOUTS[name]
    run = run_of(mesh, rules, **sections)
    assert config.problems(run) == []
    case = parity.compile_run(run)
    params, expected, _, expected_state = parity.one_device(parity.on_one_device(case.made.run).model_dump_json(), 0)
    numbers, _, found_state = parity.train(case, params)
    np.testing.assert_allclose(numbers[0], expected[0], rtol=6e-5)
    np.testing.assert_allclose(numbers[:, 0], expected[:, 0], rtol=1e-3)
    found, wanted = moments(found_state), moments(expected_state)
    trained = sum(info.size for info in case.made.model.parameters() if info.trainable)
    count = {"muon": 1, "lion": 1}.get(run.optimizer.name, 2)
    assert found.keys() == wanted.keys() and sum(leaf.size for leaf in found.values()) >= count * trained
    different = total = 0
    for path, leaf in found.items():
        a, b = leaf.astype(np.float64), wanted[path].astype(np.float64)
        different, total = different + np.sum(a != b), total + a.size
        near = np.abs(a - b) <= 2.0 ** -7 * np.maximum(np.abs(a), np.abs(b)) + 2e-4 * np.abs(b).max()
        assert near.all(), path
    # gradients differ by 1e-6 of the largest, and small elements by more of themselves; other bits would be 0.3
    assert different / total < 0.05


@pytest.mark.full
@pytest.mark.parametrize("rules, mesh", [("zero3", dict(fsdp=2, tensor=2)), ("zero1", dict(data=4))])
def test_the_rounding_sends_nothing(rules, mesh):
    sent = [audit.summarize(parity.compile_run(run_of(mesh, rules, dict(moments_dtype=dtype))).audit.collectives)
            for dtype in ("float32", "bfloat16")]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("name, wide", [("adamw", 8), ("lion", 4), ("muon", 5), ("adafactor", 0)])
def test_moments_take_half_the_bytes(name, wide):
    run = run_of({}, "ddp", dict(name=name), model=dict(embed_dim=64, mlp_dim=256))
    made = design.make(run, MeshSpec(config.mesh_sizes(run, 1), run.mesh.placement), "cpu", None)
    held = [state.optimizer_bytes(made.model, run.replace(optimizer={"moments_dtype": dtype}).optimizer, 9)["optimizer_bytes"]
            for dtype in ("float32", "bfloat16")]
    # of muon, tables have two moments
    assert held[0] == pytest.approx(wide, abs=0.6 if name == "muon" else 0.15)
    assert held[1] == pytest.approx(held[0] / (1 if name == "adafactor" else 2), rel=1e-3)


def test_rows_and_columns_of_adafactor_stay_float32_and_that_is_told():
    run = run_of({}, "ddp", dict(name="adafactor"))
    assert [line for line in messages(run) if line.startswith("optimizer.moments_dtype")] == [
        'optimizer.moments_dtype="bfloat16" has no effect here; it needs moments of the size of the weights, '
        'unlike "adafactor", which keeps rows and columns in float32']
    assert not [line for line in messages(run_of({})) if "moments" in line]
    spec = parity.assemble(run).program.step.state.abstract
    assert {leaf.dtype for leaf in jax.tree.leaves(spec.opt_state)} == {np.dtype("float32"), np.dtype("int32")}


@pytest.fixture(scope="module")
def trained():
    run = mt.Experiment(settings=TINY | {"mesh.fsdp": 2}, rules="zero3")
    run.step(2)
    return run


@pytest.mark.full
def test_a_skipped_step_keeps_the_bits_of_every_moment(trained):
    before = jax.device_get(trained.state)
    bad = jax.tree.map(lambda w: w.at[...].set(jnp.nan), trained.state.params)
    trained.state = dataclasses.replace(trained.state, params=bad)
    assert trained.step()["skipped"]
    after = jax.device_get(trained.state)
    trained.state = jax.device_put(before, trained.made.program.step.state.sharding)
    found, wanted = moments(after.opt_state), moments(before.opt_state)
    assert len(wanted) > 10 and all(np.array_equal(found[path].view(np.uint16), wanted[path].view(np.uint16))
                                    for path in wanted)


@pytest.mark.full
def test_a_thousand_steps_reach_the_loss_of_float32():
    """A small network learns another one; b2 = 0.999, where rounding to nearest keeps a second moment for ever."""
    keys, steps = jax.random.split(jax.random.key(0), 5), 1000
    draw = lambda a, b: {"up": jax.random.normal(a, (16, 64)) / 4, "down": jax.random.normal(b, (64, 16)) / 8}
    teacher, start = draw(*keys[:2]), draw(*keys[2:4])
    net = lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"]

    def loss(w, number):
        x, noise = jax.random.normal(jax.random.fold_in(keys[4], number), (2, 64, 16))
        return jnp.mean((net(w, x) - net(teacher, x) - 0.1 * noise) ** 2)

    def train_by(tx):
        def step(carry, number):
            w, state = carry
            updates, state = tx.update(jax.grad(loss)(w, number), state, w, step=number)
            rate = 3e-3 * (0.1 + 0.45 * (1 + jnp.cos(jnp.pi * number / steps)))
            return (jax.tree.map(lambda w, u: w - rate * u, w, updates), state), None
        (w, _), _ = jax.lax.scan(step, (start, tx.init(start)), jnp.arange(steps))
        return np.mean([loss(w, 10 ** 6 + n) for n in range(8)])
    rule = optax.with_extra_args_support(optax.scale_by_adam(0.9, 0.999))
    wide, narrow = (train_by(tx) for tx in (rule, rounding.store_moments(rule, 0)))
    assert 0.02 < wide < 0.05 and narrow == pytest.approx(wide, rel=5e-3)


@pytest.mark.full
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped_and_another_dtype_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("A line of a corpus that is long enough to be cut.\n" * 400)
    Path("run.toml").write_text("\n".join([
        "[mesh]", "fsdp = 8", "[sharding]", 'rules = "zero3"', "[data]",
        'paths = ["corpus.txt"]', "seq_len = 16", "global_batch = 8", "[model]", "embed_dim = 16", "num_layers = 1",
        "num_heads = 2", "mlp_dim = 16", "[training]", "steps = 4", "[validation]", "every = 0", "batches = 1",
        "[metrics]", "tensorboard = false", "[optimizer]", 'moments_dtype = "bfloat16"', 'schedule = "constant"',
        "[checkpoint]", "every = 2"]))
    ran = call(train.main, "run.toml", "--run.dir", "cut", "--training.steps", 2)
    assert ran.code == 0, ran
    refused(call(train.main, "run.toml", "--run.dir", "cut", "--optimizer.moments_dtype", "float32"),
            'optimizer.moments_dtype="float32", but the run in cut has "bfloat16"', "run.name")
    assert call(train.main, "run.toml", "--run.dir", "cut").code == 0
    assert call(train.main, "run.toml", "--run.dir", "straight").code == 0
    found, wanted = (read(Path(name)) for name in ("cut", "straight"))
    assert any(leaf.dtype == BF16 for leaf in wanted.values())
    for name in wanted:
        assert found[name].tobytes() == wanted[name].tobytes(), name


def read(directory: Path) -> dict[str, np.ndarray]:
    """The arrays of the checkpoint of step 4."""
    saved = resume.source(str(directory), 4, "the run", only_params=False)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    forms = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), saved.checkpoints.arrays(4))
    return {name: np.asarray(leaf) for name, leaf in trees.leaves_of(saved.restore(forms)).items()}


# ---- code of one's own -----------------------------------------------------------------------------------------------


def test_moments_of_an_optimizer_of_ones_own_are_found_or_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import optax, jax.numpy as jnp\n"
        "def three(cfg, roles):\n"
        "    def update(g, s, p=None):\n"
        "        return g, {'m': g, 'n': s['m'], 'o': s['n'], 'count': s['count'] + 1}\n"
        "    z = lambda p: {k: optax.tree.zeros_like(p) for k in 'mno'} | {'count': jnp.zeros((), jnp.int32)}\n"
        "    return optax.GradientTransformation(z, update)\n"
        "def none(cfg, roles): return optax.scale_by_sign()\n")
    spec = parity.assemble(run_of({}, "ddp", dict(name="mine.py:three"))).program.step.state.abstract
    assert {leaf.dtype for leaf in jax.tree.leaves(spec.opt_state)} == {np.dtype(BF16), np.dtype("int32")}
    weights, rows = {"a": {"w": jnp.zeros((3, 2))}}, {"a": {"w": jnp.zeros(3)}}
    assert rounding.find_moments((rows, weights, weights, jax.tree.map(jnp.int32, weights)), weights) == [
        None, ("a/w", 0), ("a/w", 1), None]
    with pytest.raises(config.ConfigError, match="mine.py:none.*has no float32 state with the path and shape of a weight"):
        parity.assemble(run_of({}, "ddp", dict(name="mine.py:none")))
