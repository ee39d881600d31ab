"""Experts over many steps, from one layout to others, and in the parts of a pipeline's backward."""
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traced
from sampling import GRID

from meshtrain import assembly
from meshtrain.choices import experts as choice_of_experts
from meshtrain.choices.setting import Setting
from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.cost.program import audit
from meshtrain.model import moe
from meshtrain.model.stats import LayerStats
from meshtrain.training import backward
from meshtrain.training.state import State
from checkpoints import assert_same_bits
from test_experts import FOUR_LAYERS, LAYOUTS, MODEL, PIPELINES, T, V, run_of

STEPS, SEQUENCES = 20, 4
# Twenty steps of Adam, which divides by the root of tiny moments, magnify rounding of 1e-7 to some 1e-6; a token whose
# last chosen expert is that close to the next would go elsewhere, and its step be another.
LOSS, GAP = 1e-5, 5e-5
PIPELINE = "expert over fsdp, tensor beside, 1f1b"


def batch(step: int) -> dict:
    """Four different sequences, each four times: as few choices as can show a layout's fault."""
    rng = np.random.default_rng(step)
    shape = (SEQUENCES, T)
    one = {"tokens": rng.integers(0, V, shape),
           "targets": np.where(rng.random(shape) < 0.2, -1, rng.integers(0, V, shape)),
           "index": np.tile(np.arange(T), (SEQUENCES, 1)), "positions": np.tile(np.arange(T), (SEQUENCES, 1)),
           "segments": np.ones(shape, int)}
    out = {name: np.tile(a, (4, 1)).astype(np.int32) for name, a in one.items()}
    return out | {"sequence": np.arange(4 * SEQUENCES, dtype=np.int32)}


class Trained:
    """A layout's compiled step; train(state, steps) -> (state, [metrics])."""

    def __init__(self, name: str, rules_file, model: dict = {}, clip: float = 1.0):
        text, mesh, *pipe = LAYOUTS.get(name) or PIPELINES.get(name) or ("", {})
        rules_file.write_text(text)
        run = run_of(rules_file, mesh, model, dict(microbatches=4 if pipe else 2, grad_clip=clip),
                     dict(zip(("schedule", "chunks"), pipe)))
        self.made = assembly.assemble(run, jax.devices()[:math.prod(mesh.values())])
        self.spec = self.made.program.step.state
        with jax.default_matmul_precision("highest"), jax.set_mesh(self.made.mesh):
            self.step = self.made.program.compile()

    def fresh(self) -> State:
        with jax.set_mesh(self.made.mesh):
            return self.made.program.initialize()

    def train(self, state, steps) -> tuple[State, list[dict]]:
        found = []
        with jax.set_mesh(self.made.mesh):
            for n in steps:
                state, metrics = self.step(state, self.made.program.place(batch(n)))
                found.append(jax.device_get(metrics))
        return state, found


@functools.cache
def one_device():
    """20 steps on one device, with the number of choices that were close, layer by layer and token by token."""
    def watched(self, ex, x_BTD, inputs, number):
        y_BTD, stats = computed(self, ex, x_BTD, inputs, number)
        scores = self.routing.scores(self._logits(ex, x_BTD)) + self.bias[...]
        best = jax.lax.top_k(scores, self.routing.experts_per_token + 1)[0]
        close = jnp.sum(best[..., -2] - best[..., -1] < GAP, dtype=jnp.float32)
        return y_BTD, stats | LayerStats.of("target", close=close)
    computed = moe.MoE.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe.MoE, "__call__", watched)
        import tempfile
        from pathlib import Path
        with tempfile.TemporaryDirectory() as place:
            one = Trained("", Path(place) / "rules.toml")
        state, found = one.train(one.fresh(), range(STEPS))
    return jax.device_get(state), found


@pytest.mark.parametrize("layout", [pytest.param(name, marks=GRID) for name in (*LAYOUTS, PIPELINE)])
def test_twenty_steps_stay_those_of_one_device_load_and_biases_included(tmp_path, layout):
    wanted_state, wanted = one_device()
    assert sum(metrics["close"] for metrics in wanted) == 0, "data without a gap at rank K"
    trained = Trained(layout, tmp_path / "rules.toml")
    state, found = trained.train(trained.fresh(), range(STEPS))
    for n, (got, metrics) in enumerate(zip(found, wanted, strict=True)):
        assert abs(got["loss"] - metrics["loss"]) < LOSS * metrics["loss"], n
        for name in moe.LOAD_BY_LAYER:
            np.testing.assert_allclose(got[name], metrics[name], rtol=1e-6, err_msg=f"{name} of step {n}")
    biases = lambda state: jax.device_get(state.params["layers"]["moe"]["bias"])
    assert (biases(state) == biases(wanted_state)).all() and biases(state).any()      # whole multiples of the rate


def test_biases_stay_where_all_experts_are_equally_busy_however_much_is_clipped(tmp_path):
    trained = Trained("", tmp_path / "rules.toml",
                      dict(num_experts=60, experts_per_token=60, expert_mlp_dim=4, num_layers=1), clip=0.037)
    state, found = trained.train(trained.fresh(), range(6))
    assert all(metrics["grad_norm"] > 0.037 and abs(metrics["expert_load_max"] - 1) < 1e-6 for metrics in found)
    assert (jax.device_get(state.params["layers"]["moe"]["bias"]) == 0).all()


def test_biases_move_by_whole_tokens_however_much_is_clipped(tmp_path):
    """Scaled with the gradients, counts of some tokens would be none."""
    trained = Trained("", tmp_path / "rules.toml", dict(num_layers=1), clip=1e-4)
    state, (metrics,) = trained.train(trained.fresh(), range(1))
    assert metrics["grad_norm"] > 1e-3 and metrics["expert_load_max"] > 1
    biases = jax.device_get(state.params["layers"]["moe"]["bias"])
    assert (biases > 0).any() and (biases < 0).any()


OTHERS = ("expert over tensor with sequence parallelism", "expert over fsdp and tensor", "no axis of experts, zero3")


@pytest.mark.parametrize("other", [pytest.param(name, marks=GRID) for name in OTHERS])
def test_a_checkpoint_of_one_layout_of_experts_goes_on_in_others(tmp_path, other):
    first, steps = Trained("expert over fsdp", tmp_path / "rules.toml"), range(3, 6)
    state, _ = first.train(first.fresh(), range(3))
    saved = jax.device_get(state)
    with checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(3, state, {})
    _, wanted = first.train(state, steps)
    trained = Trained(other, tmp_path / "other.toml")
    restored = checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints"), read_only=True).restore(
        3, trained.spec.abstract)
    assert_same_bits(saved, jax.device_get(restored))
    _, found = trained.train(restored, steps)
    for got, metrics in zip(found, wanted, strict=True):
        assert abs(got["loss"] - metrics["loss"]) < LOSS * metrics["loss"]
        np.testing.assert_allclose(got["expert_load_max_by_layer"], metrics["expert_load_max_by_layer"], rtol=1e-6)


# ---- what a program does where ---------------------------------------------------------------------------------------


def kernels(f, *args) -> dict:
    """How often the program of f has each grouped product, apart from loops whose length it does not know: {name:
    (outside, in them)}."""
    found: dict = {}

    def visit(jaxpr, within):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                name = str(eqn.params.get("name_and_src_info", eqn.params.get("name"))).split()[0]
                found.setdefault(name, [0, 0])[within] += 1
            for inner in jax.tree.leaves(list(eqn.params.values()),
                                         is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
                if eqn.primitive.name != "pallas_call" and (hasattr(inner, "eqns") or hasattr(inner, "jaxpr")):
                    visit(getattr(inner, "jaxpr", inner), within or eqn.primitive.name == "while")
    visit(jax.make_jaxpr(f)(*args).jaxpr, 0)
    return {name: tuple(count) for name, count in found.items()}


@pytest.mark.parametrize("name", ["expert over tensor, interleaved zero bubble",
                                  "expert over fsdp, expert_embed over data, zero bubble"])
def test_the_three_products_of_experts_weight_gradients_stand_in_w_alone(tmp_path, monkeypatch, name):
    text, mesh, schedule, chunks = PIPELINES[name]
    (tmp_path / "rules.toml").write_text(text)
    run = run_of(tmp_path / "rules.toml", mesh, FOUR_LAYERS["four layers"] | dict(expert_mlp_dim=32),
                 dict(microbatches=4),
                 dict(schedule=schedule, chunks=chunks))
    made, parts = assembly.assemble(run, jax.devices()[:math.prod(mesh.values())]), {}
    split_layer = backward.SplitLayer

    def counted(f, w, x, e):
        split = split_layer(f, w, x, e)
        parts.update(F=kernels(split.forward, w, x, e), B=kernels(split.input_gradient, w, e, split.residuals, x),
                     W=kernels(split.weight_gradient, w, e, split.residuals.for_weights, split.passed))
        return split
    monkeypatch.setattr(backward, "SplitLayer", counted)
    # Pallas kernels, which have names; they are not compiled
    experts = choice_of_experts.choose(Setting(made.layout, "gpu", run=run)).value
    traced.split_layer(run, made.model, made.layout, made.mesh_spec.abstract(), made.program.step.ex.engines.attention, experts)
    # Behind the first round each of the further ones, which mostly are none, has products of its own.
    # gate and up transposed are one product of two pairs.
    assert parts["F"] == {"grouped_rows_gkn": (3, 3)}
    assert parts["W"] == {"grouped_outer_gkn": (3, 0)}
    assert parts["B"] == {"grouped_rows_gkn": (2, 2), "grouped_rows_gnk": (2, 2), "grouped_outer_gkn": (0, 3)}


@pytest.mark.parametrize("remat, again", [("none", 0), ("full", 2)])
def test_gate_and_up_are_made_again_where_remat_keeps_less_than_all(remat, again):
    run = run_of("sharding_rules/ddp.toml", {}, dict(expert_mlp_dim=32), dict(remat=remat))
    made, m = assembly.assemble(run, jax.devices()[:1]), run.model
    experts = choice_of_experts.choose(Setting(made.layout, "gpu", run=run)).value
    x_BTD, choices = jnp.ones((2, 16, m.embed_dim)), (2, 16, m.experts_per_token)
    into = jnp.ones((m.num_experts, m.embed_dim, m.expert_mlp_dim))
    weights = dict(gate=into, up=into, down=into.swapaxes(1, 2))

    def both(x_BTD, weights):
        y_BTD, back = jax.vjp(lambda x, w: experts(made.layout, x, jnp.zeros(choices, jnp.int32), jnp.ones(choices), w),
                              x_BTD, weights)
        return back(y_BTD)
    with jax.set_mesh(made.mesh):
        found = kernels(both, x_BTD, weights)
    assert found == {"grouped_rows_gkn": (3 + again, 0), "grouped_rows_gnk": (2, 0), "grouped_outer_gkn": (3, 0)}


@functools.cache
def sent_bytes(layout: str, microbatches: int, path) -> dict:
    text, mesh = LAYOUTS[layout]
    path.write_text(text)
    made = assembly.assemble(run_of(path, mesh, {}, dict(microbatches=microbatches)),
                             jax.devices()[:math.prod(mesh.values())])
    found = audit.read(made.program.compile().as_text(), made.mesh)
    sums: dict = {}
    for row in audit.summarize(found.collectives):
        for axis in row["axes"] if len(row["axes"]) == 1 else ():
            key = axis, row["kind"]
            sums[key] = sums.get(key, 0) + row["bytes"]
    return sums


@pytest.mark.parametrize("layout, once, each", [
    # What [grads] splits over no axis of the batch is summed over it once a step.
    pytest.param("expert over fsdp, data once a step", "data", "fsdp", marks=GRID),
    # Where an axis splits experts, tokens of all its devices meet in every microbatch, so it cannot be manual like
    # the axes over which nothing is sent until the step's end: over it other weights' gradients are summed in every
    # microbatch, too.
    pytest.param("expert over data, the rest once a step", "fsdp", "data", marks=GRID)])
def test_gradients_are_summed_once_a_step_over_axes_that_split_no_experts(tmp_path, layout, once, each):
    few, many = (sent_bytes(layout, n, tmp_path / "rules.toml") for n in (1, 2))
    # smaller than what is summed, larger than scalars
    gradients = 4 * MODEL["embed_dim"] * (2 * MODEL["vocab_size"])
    assert few[once, "all-reduce"] > gradients and few[once, "all-reduce"] == many[once, "all-reduce"]
    assert many[each, "all-gather"] > 1.2 * few[each, "all-gather"] or many[each, "all-reduce"] > 1.2 * few[
        each, "all-reduce"]


def test_the_router_multiplies_in_float32_whatever_the_compute_dtype(tmp_path):
    """In bfloat16 the choice would be another for one token in a hundred."""
    (tmp_path / "rules.toml").write_text("")
    made = assembly.assemble(run_of(tmp_path / "rules.toml", {}, dict(compute_dtype="bfloat16")), jax.devices()[:1])
    layer = made.model.groups[0].period[0]
    weights = layer.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, T, MODEL["embed_dim"]), jnp.bfloat16)
    with jax.set_mesh(made.mesh):
        logits = jax.jit(lambda w, x: layer.bind(w).moe._logits(made.program.step.ex, x))(weights, x)
    wanted = np.asarray(x, np.float64) @ np.asarray(weights["moe"]["router"], np.float64)
    # sums of 16 products in float32
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
