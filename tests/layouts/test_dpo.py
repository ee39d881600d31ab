"""DPO: loss and gradients are those of a plain implementation with whole logits, on every layout."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import reference
import sampling

from meshtrain import assembly, config
from meshtrain.training.state import State
from test_layouts import MODEL, ONE, T, run_of
from test_lora import assert_equal_gradients

BETA, PAIRS = 0.3, 16
DPO = dict(objective="dpo", dpo_beta=BETA, grad_clip=0.0)
MESHES = [("zero3", dict(data=2, fsdp=2, tensor=2))]
GRID = [("zero1", dict(fsdp=4)), ("ddp", dict(data=2)), ("zero3", dict(fsdp=8)), ("tensor", dict(tensor=4)),
        ("zero3", dict(fsdp=2, context=2)),
        ("zero3", dict(tensor=2, context=2))]


def pairs() -> dict:
    """Rows of a pair each, of many lengths; the last of them is padding."""
    rng = np.random.default_rng(3)
    index = np.tile(np.arange(T), (PAIRS, 1))
    ends = np.sort(rng.integers(4, T - 1, (PAIRS, 2)), 1)
    ends[:, 1] = np.maximum(ends[:, 1], ends[:, 0] + 3)
    segments = np.where(index < ends[:, :1], 1, np.where(index < ends[:, 1:], 2, 0))
    positions = np.where(segments == 2, index - ends[:, :1], index)
    tokens, targets = (rng.integers(0, MODEL["vocab_size"], index.shape) for _ in range(2))
    targets[(positions < 2) | (segments == 0)] = -1        # a prompt's
    segments[-1], targets[-1] = 0, -1
    found = {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions,
             "index": index, "sequence": np.arange(PAIRS)}
    return {name: x.astype(np.int32) for name, x in found.items()} | {"reference": np.zeros(PAIRS, np.float32)}


def dpo_run(rule, mesh) -> config.Run:
    run = run_of(rule, mesh, training=DPO)
    return run.replace(data={"global_batch": PAIRS})


def plain(p, settings: dict, batch: dict):
    """(loss, margins) of DPO, from whole logits: log pi of both answers of each pair, then the paper's equation."""
    log_p = jax.nn.log_softmax(reference.logits(settings, p, batch), -1)
    of_target = jnp.take_along_axis(log_p, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    answer = lambda segment: jnp.sum(of_target * ((batch["segments"] == segment) & (batch["targets"] >= 0)), -1)
    margins = BETA * (answer(1) - answer(2) - batch["reference"])[:-1]
    return -jnp.mean(jnp.log(jax.nn.sigmoid(margins))), margins


def moments_of(compiled: parity.Compiled, p, batch):
    """(metrics of a step from these host parameters, its gradients: adamw's first moment / (1 - b1))."""
    made, spec = compiled.made, compiled.made.program.step.state
    opt_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), spec.abstract.opt_state)
    state = jax.device_put(State(np.int32(0), p, opt_state), spec.sharding)
    state, metrics = compiled.step(state, made.program.place(batch))
    return jax.device_get(metrics), jax.tree.map(lambda m: m / (1 - made.run.optimizer.b1),
                                                 jax.device_get(parity.first_moment(state.opt_state)))


@functools.cache
def expected():
    made = assembly.assemble(dpo_run("ddp", ONE), jax.devices()[:1])
    p = jax.device_get(made.model.init(jax.random.key(0)))
    settings = made.run.model.model_dump()
    make = jax.jit(jax.value_and_grad(lambda p, batch: plain(p, settings, batch), has_aux=True))
    with jax.default_matmul_precision("highest"):
        # A reference from which the model has departed by margins around 0.
        (_, whole), _ = make(p, pairs())
        batch = pairs()
        batch["reference"][:-1] = whole / BETA - np.random.default_rng(4).normal(size=PAIRS - 1, scale=3)
        (loss, margins), grads = make(p, batch)
    return p, batch, float(loss), np.asarray(margins), jax.device_get(grads)


@pytest.mark.long
@pytest.mark.cell
def test_the_balance_of_experts_weighs_as_much_beside_preferences_as_beside_the_next_token():
    """Per token with a target: divided by the count of pairs it would outweigh any preference."""
    experts = dict(num_experts=4, num_layers=1)

    def made(objective: str, weight: float):
        run = run_of("ddp", ONE, experts, DPO if objective == "dpo" else dict(grad_clip=0.0))
        return run.replace(data={"global_batch": PAIRS}, experts={"aux_loss": weight, "z_loss": weight})
    p, made_by = None, {}
    for objective in ("dpo", "next_token"):
        of_weight = []
        for weight in (0.0, 0.5):
            compiled = parity.compile_run(made(objective, weight))
            p = jax.device_get(compiled.made.model.init(jax.random.key(0))) if p is None else p
            of_weight.append(moments_of(compiled, p, pairs()))
        made_by[objective] = of_weight[1][1]["layers"]["moe"]["router"] - of_weight[0][1]["layers"]["moe"]["router"]
        assert of_weight[1][0]["aux_loss"] > 0
    want = made_by["next_token"]
    assert np.abs(made_by["dpo"] - want).max() < 1e-4 * np.abs(want).max()      # differences of sums in float32


@pytest.mark.parametrize("rule, mesh",
                         [("ddp", ONE), *MESHES, *(pytest.param(*case, marks=sampling.GRID) for case in GRID)], ids=str)
def test_loss_and_every_gradient_are_those_of_the_papers_equation(rule, mesh):
    p, batch, loss, margins, grads = expected()
    metrics, found = moments_of(parity.compile_run(dpo_run(rule, mesh)), p, batch)
    assert abs(metrics["loss"] - loss) < 1e-5 * loss                # float32 sums in another order
    assert abs(metrics["reward_accuracy"] - np.mean(margins > 0)) < 1e-6 and 0.2 < np.mean(margins > 0) < 0.8
    assert abs(metrics["reward_margin"] - margins.mean()) < 1e-4
    assert_equal_gradients(found, grads, 2e-5)
