"""training.ema: the average of the weights is that of the formula in numpy, on every layout, with anything trained."""
import types

import jax
import numpy as np
import parity
import pytest

from meshtrain import config
from meshtrain.model import params
from meshtrain.run import trees
from meshtrain.training import average
from meshtrain.training.state import State

STEPS, DECAY = 4, 0.3       # smaller than (1 + t) / (10 + t) from the fourth update on
MODEL = dict(vocab_size=259, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=24,
             compute_dtype="float32", norm_eps=1e-2)
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_mlp_dim=16, router_bias="choice")
LAYOUTS: dict[str, dict[str, dict]] = {
    "zero3": dict(mesh=dict(fsdp=8)),
    "zero1, two axes": dict(mesh=dict(data=2, fsdp=4), sharding=dict(rules="zero1")),
    "tensor": dict(mesh=dict(data=2, tensor=2), sharding=dict(rules="ddp"), training=dict(microbatches=2)),
    "context": dict(mesh=dict(fsdp=2, context=2)),
    "hsdp": dict(mesh=dict(data=2, fsdp=2), sharding=dict(rules="hsdp")),
    "stages": dict(mesh=dict(fsdp=2, stage=2), training=dict(microbatches=4), pipeline=dict(schedule="1f1b")),
    "zero bubble": dict(mesh=dict(tensor=2, stage=2), training=dict(microbatches=4),
                        pipeline=dict(schedule="zero_bubble")),
    "all": dict(mesh=dict(fsdp=2, tensor=2, context=2), training=dict(microbatches=2)),
}


def run_of(model=MODEL, **sections):
    rules = sections.pop("sharding", {}).get("rules", "zero3" if sections.get("mesh") else "ddp")
    return config.Run(sharding=dict(rules=f"{parity.RULES / rules}.toml"), model=model,
                      data=dict(seq_len=16, global_batch=8),
                      training=dict(steps=STEPS, loss_chunk=24, ema=DECAY) | sections.pop("training", {}),
                      # a large eps: gradients near 0, which are rounding errors, move nothing
                      optimizer=dict(learning_rate=0.01, schedule="constant", eps=0.1) | sections.pop("optimizer", {}),
                      **sections)


def stepped(run, bad=()):
    """(the weights after 0, 1, … steps, the last state) of a run that begins from drawn weights; the steps of `bad` are
    not finite."""
    assert config.problems(run) == []
    case = parity.compile_run(run)
    made, spec = case.made, case.made.program.step.state
    drawn = jax.device_put(parity.draw_parameters(made, 0), spec.sharding.params)
    if run.lora.rank:       # B, too: else the base alone would be read
        assert any("lora/b" in name for name in trees.leaves_of(drawn))
    opt_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), spec.abstract.opt_state)
    begun = jax.jit(lambda p: average.begin(made.model, p), out_shardings=spec.sharding.ema)(drawn)
    state = State(jax.device_put(np.int32(0), spec.sharding.step), drawn,
                  jax.device_put(opt_state, spec.sharding.opt_state), begun)
    weights = [trees.leaves_of(jax.device_get(state.params))]
    for n in range(STEPS):
        more = made.program.limit(-1.0 if n in bad else 1e9)
        state, metrics = case.step(state, made.program.place(parity.batch_of(run, n)), *more)
        assert bool(metrics["skipped"]) == (n in bad)
        weights.append(trees.leaves_of(jax.device_get(state.params)))
    return weights, state


def formula(weights, decay=DECAY):
    """The average of weights after 0, 1, … updates, in float64."""
    mean = {name: w.astype("float64") for name, w in weights[0].items()}
    for t, after in enumerate(weights[1:]):
        d = min(decay, (1 + t) / (10 + t))
        mean = {name: d * m + (1 - d) * after[name].astype("float64") for name, m in mean.items()}
    return mean


def check(run, bad=()):
    """Compare the state's average with that of the weights; return it."""
    weights, state = stepped(run, bad)
    got, applied = trees.leaves_of(jax.device_get(state.ema.params)), [
        w for n, w in enumerate(weights) if n - 1 not in bad]
    assert int(state.ema.count) == len(applied) - 1
    expected = formula(applied)
    assert got.keys() <= expected.keys() and len(got) > 0
    for name, mean in got.items():
        assert mean.dtype == np.float32
        np.testing.assert_allclose(mean, expected[name], rtol=2e-6, atol=1e-7, err_msg=name)
    return weights, state, got


@pytest.mark.parametrize("count, decay", [(2, 3 / 12), (500, DECAY)])
def test_a_skipped_step_leaves_the_average_and_its_count(count, decay):
    info = params.ParamInfo(("w",), (2,), np.dtype("float32"), ("embed",), "norm", 1)
    model = types.SimpleNamespace(parameters=lambda: [info])
    mean, w = np.array([1, 2], np.float32), np.array([3, -5], np.float32)
    before = average.Average(np.int32(count), {"w": mean})
    skipped, taken = (average.update(model, before, {"w": w}, DECAY, np.bool_(applied)) for applied in (False, True))
    assert int(skipped.count) == count and int(taken.count) == count + 1
    np.testing.assert_array_equal(skipped.params["w"], mean)
    np.testing.assert_allclose(taken.params["w"], decay * mean + (1 - decay) * w, rtol=1e-6)


def test_the_average_is_that_of_the_formula_and_skipped_steps_are_none():
    run = run_of(training=dict(loss_spike="skip"))
    weights, state, got = check(run, bad=(1,))
    assert got.keys() == weights[0].keys()
    assert any((got[name] != weights[-1][name]).any() for name in got)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_average_of_one_device(name, plain):
    _, state, got = check(run_of(**{key: dict(value) for key, value in LAYOUTS[name].items()}))
    for leaf, mean in got.items():
        np.testing.assert_allclose(mean, plain[leaf], rtol=1e-4, atol=2e-6, err_msg=leaf)
    for placed, stored in zip(jax.tree.leaves(state.ema.params), jax.tree.leaves(state.params), strict=True):
        assert placed.sharding == stored.sharding       # of [optimizer]


@pytest.fixture(scope="module")
def plain():
    return check(run_of())[2]


@pytest.mark.parametrize("name", ["bfloat16", "adapters", "experts"])
def test_weights_in_bfloat16_adapters_and_experts_are_averaged_in_float32(name):
    run = {"bfloat16": lambda: run_of(MODEL | dict(param_dtype="bfloat16"), mesh=dict(fsdp=2)),
           "adapters": lambda: run_of(lora=dict(rank=2), mesh=dict(fsdp=2, stage=2), training=dict(microbatches=4)),
           "experts": lambda: run_of(MODEL | EXPERTS, experts=dict(bias_rate=0.1), mesh=dict(fsdp=2, tensor=2))}[name]()
    weights, state, got = check(run)
    left = weights[0].keys() - got.keys()
    assert {"bfloat16": left == set(), "adapters": left == {leaf for leaf in weights[0] if "/lora/" not in leaf},
            "experts": left == {"layers/moe/bias"}}[name], left
    model = parity.assemble(run).model
    whole = trees.leaves_of(average.weights(model, state.ema, state.params))
    for leaf, last in weights[-1].items():
        expected = got[leaf].astype(last.dtype) if leaf in got else last
        assert whole[leaf].dtype == last.dtype and np.asarray(whole[leaf]).tobytes() == expected.tobytes(), leaf
