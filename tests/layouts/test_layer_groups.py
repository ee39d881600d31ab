"""Layers that differ, and what layers return beside the residual stream: groups with a period compute what their layers
compute one by one, and aux losses have the gradients of a sum written out by hand, in microbatches and through a
pipeline.
"""
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import sampling
from flax import nnx

from meshtrain import config
from meshtrain import pattern
from meshtrain.choices import stages
from meshtrain.kernels import blockwise
from meshtrain.model import params, transformer
from meshtrain.model.block import Attention, Layer, LayerGroup
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.model.mlp import MLP
from meshtrain.model.stats import AUX_LOSS, LayerStats
from meshtrain.names import AXES, LAYERS
from meshtrain.parallel.context import attention
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout
from meshtrain.training import optimizer
from test_layouts import MODEL, run_of


def execution(remat: str = "none") -> Execution:
    one = Layout(rules.parse(""), dict.fromkeys(AXES, 1))
    attend = attention.RunAttention(lambda H, V, scores: blockwise.engine(scores=scores))
    return Execution(one, Numerics(jnp.dtype("float32"), remat), Engines(attend))


def batch_of(sequences: int = 4) -> dict:
    run = run_of("ddp", {}).replace(data={"global_batch": sequences})
    return {name: jnp.asarray(x) for name, x in parity.batch_of(run, 0).items()}


class Plain(Layer):
    def __init__(self, cfg, rngs, *kind):
        super().__init__(cfg, rngs, ("attention", lambda *args: Attention(*args, "F")), ("mlp", MLP))


class Wide(Plain):
    """Another kind of layer: an MLP of twice the size, and two sums beside the stream."""

    def __init__(self, cfg, rngs, *kind):
        super().__init__(cfg, rngs)
        self.mlp = MLP(cfg.model_copy(update={"mlp_dim": 2 * cfg.mlp_dim}), rngs)

    def __call__(self, ex, x_BTD, inputs, number):
        x_BTD, _ = super().__call__(ex, x_BTD, inputs, number)
        squares = jnp.sum(jnp.square(x_BTD.astype(jnp.float32)))
        return x_BTD, LayerStats.of("token", aux_loss=1e-2 * squares) | LayerStats.of(
            "target", last_layer=jnp.where(number >= 2, squares, 0.0))


# ---- groups ----------------------------------------------------------------------------------------------------------


def model_of(*groups: tuple[str, tuple, int]) -> transformer.Transformer:
    cfg = config.Run(model=MODEL | dict(num_layers=sum(len(kinds) * n for _, kinds, n in groups))).model
    module = lambda kind: params.Module(lambda rngs: kind(cfg, rngs))
    return transformer.Transformer(cfg, params.Module(lambda rngs: transformer.EmbeddingAndHead(cfg, rngs, nnx.Module)), tuple(
        LayerGroup(name, tuple(map(module, kinds)), n) for name, kinds, n in groups), None)


def loss(model, ex, p, batch, dropout_key=None, **head):
    """(objective, nll, sums by name) of all layers at once; head: of `Transformer.head_loss`."""
    inputs, x_BTD, stats = model.inputs(batch, dropout_key), model.embed(ex, p, batch, dropout_key), LayerStats()
    for first, group in model.number_groups():
        def repeat(x_BTD, scanned, group=group):
            return group.apply(ex, scanned[0], x_BTD, inputs, scanned[1])
        x_BTD, by_repeat = jax.lax.scan(repeat, x_BTD, (model.weights(p, group), group.numbers(first)))
        stats += by_repeat.combine()
    x_BTD = model.through_layers(ex, p, batch) if dropout_key is None else x_BTD
    objective, nll = model.head_loss(ex, p, x_BTD, batch["targets"], **head)
    sums = {name: stat.value for name, stat in stats.by_name.items()}
    return objective + sums.get(AUX_LOSS, 0.0), nll, sums


def one_by_one(model, ex, p, batch, layers):
    """The same by definition: layers [(module, its weights)] applied in turn."""
    inputs, x_BTD, sums = model.inputs(batch), model.embed(ex, p, batch), {AUX_LOSS: 0.0, "last_layer": 0.0}
    for number, (layer, weights) in enumerate(layers):
        x_BTD, stats = layer.bind(weights)(ex, x_BTD, inputs, number)
        sums |= {name: sums[name] + stat.value for name, stat in stats.by_name.items()}
    objective, nll = model.head_loss(ex, p, x_BTD, batch["targets"])
    return objective + sums[AUX_LOSS], (nll, sums)


PERIOD = (("layers", (Plain, Wide), 2),)
LEADING = (("dense", (Plain,), 2), ("others", (Wide, Plain), 1))


@pytest.mark.parametrize("groups, paths", [
    (PERIOD, [("0", 0), ("1", 0), ("0", 1), ("1", 1)]),
    pytest.param(LEADING, [("dense", 0), ("dense", 1), ("others/0", 0), ("others/1", 0)], marks=sampling.GRID),
], ids=["a period of two", "leading layers"])  # fmt: skip
def test_groups_compute_what_their_layers_compute_one_by_one(groups, paths):
    model, ex = model_of(*groups), execution("full")
    p, batch = model.init(jax.random.key(0)), batch_of()
    kinds = [kind for _, period, n in groups for kind in period * n]
    modules = {layer.graphdef: layer for group in model.groups for layer in group.period}
    order = [layer for group in model.groups for layer in group.period * group.repeats]
    assert len(order) == len(kinds) == len(paths) and len(modules) == 2

    def by_hand(p):
        take = lambda path, i: jax.tree.map(lambda a: a[i], functools.reduce(dict.get, path.split("/"), p[LAYERS]))
        return one_by_one(model, ex, p, batch, [(layer, take(*path)) for layer, path in zip(order, paths)])

    def at_once(p):
        objective, *sums = loss(model, ex, p, batch)
        return objective, tuple(sums)

    with jax.default_matmul_precision("highest"):
        got, grads = jax.jit(jax.value_and_grad(at_once, has_aux=True))(p)
        expected, expected_grads = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(p)
    np.testing.assert_allclose(*map(jax.tree.leaves, (got, expected)), rtol=1e-6)
    assert got[1][1]["last_layer"] > 0
    parity.check_leaves(grads, expected_grads)


def test_parameters_are_listed_as_the_tree_has_its_leaves_in_a_period_of_eleven():
    """A step pairs the two: roles with gradients. "10" stands before "2"."""
    model = model_of(("layers", (Plain,) * 11, 1))
    p = jax.eval_shape(model.init, jax.random.key(0))
    leaves = [tuple(key.key for key in path) for path, _ in jax.tree.leaves_with_path(p)]
    assert leaves == [info.path for info in model.parameters()] and (LAYERS,
                                                                     "10") < (LAYERS,
                                                                              "2") and leaves[0][0] == "embedding"
    of = {info.path: info.role for info in model.parameters()}
    assert [of[path] for path in leaves] == [info.role for info in model.parameters()] and len(set(of.values())) > 3


@pytest.mark.parametrize("groups", [PERIOD, LEADING], ids=["a period of two", "leading layers"])
def test_parameter_table_of_groups_is_that_of_their_tree(groups):
    """What rules, checkpoints and optimizers read: every leaf in its order, with its stacked dim."""
    model = model_of(*groups)
    table, p = model.parameters(), model.init(jax.random.key(0))
    leaves = jax.tree.leaves_with_path(p)
    assert [info.name for info in table] == [jax.tree_util.keystr(path, simple=True, separator="/")
                                             for path, _ in leaves]
    assert [info.shape for info in table] == [leaf.shape for _, leaf in leaves]
    assert all((info.axes[0] == LAYERS) == (info.path[0] == LAYERS) for info in table)
    for name in ("adamw", "muon", "adafactor"):
        tx = optimizer.build(config.Run(optimizer=dict(name=name)).optimizer, 10, params.tree(table, lambda i: i.role),
                             params.tree(table, lambda i: i.matrix_dims))
        jax.eval_shape(tx.init, p)


def test_equal_layers_stand_in_the_tree_as_one_stack():
    model = transformer.build(config.Run(model=MODEL).model)
    stacked = model.init(jax.random.key(0))[LAYERS]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(stacked)} == {MODEL["num_layers"]}
    assert set(stacked) == {"attention", "attention_norm", "mlp", "mlp_norm"}


def test_layers_without_a_period_are_refused_by_a_pipeline_and_computed_without_stages():
    """Layers without a period: parts that repeat are groups of their own."""
    mixers = "FFNFNNFFFNNNFNFFNN"
    run = run_of("ddp", {}, dict(num_layers=18, mixers=mixers))
    groups = transformer.build(run.model).groups
    assert "".join(kind.mixer for part in pattern.stretches(run.model) for kind in part.period * part.repeats) == mixers
    assert sum(group.num_layers for group in groups) == 18 and sum(len(group.period) for group in groups) < 12
    faults = stages.problems(run, rules.load(run.sharding.rules), dict.fromkeys(AXES, 1) | dict(stage=2))
    assert len(faults) == 1 and "set mesh.stage to 1" in faults[0]
    with pytest.raises(config.ConfigError, match="layers that repeat with a period"):
        parity.check_accepted(run.replace(mesh=dict(stage=2)))


# ---- aux -------------------------------------------------------------------------------------------------------------


def run_with(mesh: dict, rule: str = "ddp", microbatches: int = 1, **pipeline):
    run = run_of(rule, mesh, dict(num_layers=4), dict(microbatches=microbatches, remat="full"))
    return run.model_copy(update={"pipeline": config.Pipeline(**pipeline)})


def first_step(run):
    """(metrics, first moments) of one step from the parameters of seed 0."""
    case = parity.compile_run(run)
    state, metrics = case.step(case.made.program.initialize(), case.made.program.place(parity.batch_of(run, 0)))
    return jax.device_get(metrics), jax.device_get(parity.first_moment(state.opt_state))


@pytest.fixture(scope="module")
def by_hand():
    """Objective's gradient and sums of one step of Wide layers, from `one_by_one`."""
    run = run_with({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "Layer", Wide)
        model = transformer.build(run.model)
        p = model.init(jax.random.key(0))
    ex, batch = execution(), batch_of(run.data.global_batch)
    count, tokens = (int(of.sum()) for of in (batch["targets"] >= 0, batch["segments"] != 0))

    def objective(p):
        layers = [(model.period[0], jax.tree.map(lambda a: a[i], p[LAYERS])) for i in range(4)]
        total, (_, sums) = one_by_one(model, ex, p, batch, layers)
        aux_loss = sums[AUX_LOSS] / tokens
        return (total - sums[AUX_LOSS]) / count + aux_loss, aux_loss
    with jax.default_matmul_precision("highest"):
        (_, aux_loss), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(p)
    norm = math.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(grads)))
    scale = (1 - run.optimizer.b1) * min(1.0, run.training.grad_clip / norm)
    return float(aux_loss), jax.tree.map(lambda g: scale * np.asarray(g), grads), tokens / count


CASES = {
    "one microbatch": ({}, "ddp", 1, {}),
    "four microbatches": ({}, "ddp", 4, {}),
    "sharded": (dict(data=2, fsdp=2, tensor=2), "zero3", 2, {}),
    "gpipe": (dict(stage=2), "ddp", 4, dict(schedule="gpipe")),
    "1f1b, layers that do not divide, and data": (dict(stage=3, data=2), "zero1", 4, dict(schedule="1f1b")),
    "zero bubble in chunks": (dict(stage=2), "ddp", 4, dict(schedule="interleaved_zero_bubble", chunks=2)),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case.startswith("1f1b") else sampling.GRID)
                                  for case in CASES])
def test_aux_loss_has_the_gradient_of_a_sum_over_layers_and_microbatches(case, by_hand, monkeypatch):
    monkeypatch.setattr(transformer, "Layer", Wide)
    mesh, rule, microbatches, pipeline = CASES[case]
    metrics, moments = first_step(run_with(mesh, rule, microbatches, **pipeline))
    aux_loss, expected, tokens_per_target = by_hand
    assert metrics[AUX_LOSS] == pytest.approx(aux_loss, rel=1e-5)
    # the one is divided by the targets
    assert 0 < 1e-2 * metrics["last_layer"] < metrics[AUX_LOSS] * tokens_per_target
    parity.check_leaves(moments, expected)
