"""Split and whole weights that read the same input: on GPUs its gradient is reduced once over the axis that splits them.

Alone, as one program of a few projections; and in whole steps with every kind of layer that has such weights.
"""
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from gpu_programs import RULES, needs_compiler
from jax.sharding import NamedSharding

from meshtrain import config
from meshtrain.cost.program import audit, compile
from meshtrain.model import float8, layers, lora
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout

pytestmark = needs_compiler

B, T, D, N, H, R = 2, 512, 256, 8, 64, 32
BY_HEAD, NARROW = ("BTD,DNH->BTNH", (D, N, H), ("embed", "heads", "head_dim")), ("BTD,DR->BTR", (D, R), ("embed", None))


class Projections(nnx.Module):
    """Two projections that are split by heads, a narrow one that is whole beside them or not, adapters on both or not."""

    def __init__(self, forms, rank: int):
        cfg, rngs = config.Run().model, nnx.Rngs(0)
        self.linears = nnx.List([layers.Linear(cfg, rngs, *form) for form in forms])
        for linear in self.linears if rank else ():
            linear.frozen, linear.lora = True, nnx.data(lora.Adapter(rngs, linear, 1, rank, 1.0))


def sent(rule: str, forms, rank: int = 0, matmul: str = "bfloat16") -> dict[str, float]:
    """What the gradients of x and of the weights send over tensor 2, by kind, as multiples of x in bfloat16."""
    spec = MeshSpec(dict(tensor=2))
    mesh = spec.build(compile.topology("h100:2"))
    layout = Layout(rules.load(RULES / f"{rule}.toml"), spec.sizes)
    precision = float8.precision("cuda") if matmul == "float8" else None
    ex = Execution(layout, Numerics(jnp.dtype("bfloat16"), "selective", precision), Engines(None))
    graph, weights = nnx.split(nnx.eval_shape(lambda: Projections(forms, rank)))

    def outputs(weights, x_BTD):
        full = x_BTD if precision else layout.act(x_BTD, "batch", "seq", None)
        ys = layers.together(ex, full, *((linear, 1) for linear in nnx.merge(graph, weights).linears))
        return [layout.act(y, "batch", "seq", *axes[1:]) for y, (_, _, axes) in zip(ys, forms)]

    def gradients(weights, x_BTD, dys):
        dws, dx_BTD = jax.vjp(outputs, weights, x_BTD)[1](dys)
        return dws, layout.act(dx_BTD, "batch", "residual_seq", None)

    def declare(shape, *axes):
        sharding = NamedSharding(mesh, layout.spec("activations", axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    x_BTD = declare((B, T, D), "batch", "residual_seq", None)
    dys = [declare((B, T, *shape[1:]), "batch", "seq", *axes[1:]) for _, shape, axes in forms]
    with jax.set_mesh(mesh):
        traced = jax.jit(gradients).trace(weights, x_BTD, dys)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    shares: Counter = Counter()
    for row in audit.read(text, mesh).collectives:
        assert row.axes == ("tensor",)
        shares[row.kind] += row.payload_bytes / (2 * B * T * D)
    return {kind: share for kind, share in shares.items() if share > 0.01}


@pytest.mark.parametrize("forms, rank, matmul, gathered", [
    ((BY_HEAD, BY_HEAD), 0, "bfloat16", 1.0), ((BY_HEAD, BY_HEAD, NARROW), 0, "bfloat16", 1.0),
    ((BY_HEAD, BY_HEAD, NARROW), 0, "float8", 0.5), ((BY_HEAD, BY_HEAD), 8, "bfloat16", 1.0),
    ((BY_HEAD, BY_HEAD), 8, "float8", 1.0)],        # the last: adapters read x in bfloat16
    ids=["split", "whole beside split", "in float8", "adapters", "adapters in float8"])
def test_an_input_s_gradient_is_reduced_once_whatever_weights_read_it(forms, rank, matmul, gathered):
    found, summed = (sent(rule, forms, rank, matmul) for rule in ("ddp", "tensor"))
    # cotangents between an adapter's matrices; in float8 the gradient of a narrow weight
    assert found.pop("all-reduce", 0.0) < 0.1 and 1 <= summed.pop("all-reduce") < 1.1
    assert found == pytest.approx({"all-gather": gathered, "reduce-scatter": 1.0}, rel=1e-3) and not summed
