"""Muon where matrices lie split: the numbers of whole ones, and nothing sent but the matrices themselves, twice, in bf16.
Steps on layouts: `test_cells`, gpt2."""
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sampling
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain import assembly, config
from meshtrain.cost.program import audit, compile
from meshtrain.sharding import rules
from meshtrain.training import muon
from test_layouts import MODEL, RULES

COEFFICIENTS = jnp.array([3.4445, -4.7750, 2.0315])


def run_of(rule: str, mesh: dict, **model) -> config.Run:
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(RULES / f"{rule}.toml")), model=MODEL | model,
        data=dict(seq_len=32, global_batch=32), training=dict(steps=20, microbatches=2, loss_chunk=24),
        # eps is large: Adam would make a whole step of the rounding error where an element of the embedding has no
        # gradient.
        optimizer=dict(name="muon", learning_rate=0.02, schedule="constant", warmup_steps=0,
                       weight_decay=0.1, eps=1e-3),
    )  # fmt: skip


cell_id = lambda case: f"{case[0]}-" + "-".join(f"{axis}{n}" for axis, n in case[1].items()) + f"-{case[2]}layers"


@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24), (2, 16, 16)])
def test_whole_matrices_are_orthogonalized_as_by_optax(shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    dims = optax.contrib.MuonDimensionNumbers(1, 2)
    with jax.default_matmul_precision("highest"):
        plain = optax.contrib.scale_by_muon(beta=muon.MOMENTUM, weight_dimension_numbers=dims)
        ours = {dtype: muon.scale_by_muon(muon.MatrixDims((1,), (2,)), dtype) for dtype in ("float32", "bfloat16")}
        states = [tx.init(x) for tx in (plain, *ours.values())]
        for grads in (x, -0.5 * x[::-1]):   # the second sets the two bias corrections apart
            outputs = [tx.update(grads, state) for tx, state in zip((plain, *ours.values()), states)]
            states = [state for _, state in outputs]
    expected, exact, rounded = (update for update, _ in outputs)
    jax.tree.map(np.testing.assert_array_equal, states[1], states[0])
    error = lambda y: float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected))
    assert error(exact) < 2e-5      # float32 sums in another order, through five steps
    assert 1e-3 < error(rounded) < 3e-2     # bfloat16 has 8 bits; each of five steps rounds x once


def placed(spec: P, inputs: tuple = (1,), outputs: tuple = (2, 3)) -> muon.MatrixDims:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
    return muon.MatrixDims(inputs, outputs, NamedSharding(mesh, spec))


@pytest.mark.parametrize("of, shape", [
    (placed(P("a", "b", "c")), (6, 8, 4, 6)), (placed(P(None, ("a", "b"), None, "c")), (5, 8, 3, 6)),
    (placed(P("b", None, "a"), (3,), (0,)), (6, 3, 4, 5)), (placed(P(None, "a"), (0,), (1,)), (6, 4)),
], ids=["stage", "two axes of one dim", "dims in any order", "one matrix"])
def test_split_matrices_give_the_numbers_of_whole_ones(of, shape):
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    by = lambda of: jax.jit(lambda x: muon.orthogonalize(x, of, COEFFICIENTS, jnp.float32))
    with jax.default_matmul_precision("highest"):
        one, eight = by(muon.MatrixDims(of.inputs, of.outputs))(x), by(of)(jax.device_put(x, of.placement))
    np.testing.assert_allclose(eight, one, atol=1e-5)      # float32 sums in another order; singular values near 1


@pytest.mark.parametrize("spec", [P(), P("a"), P(("b", "a"))])
def test_matrices_that_lie_whole_get_no_constraint(spec):
    whole = jax.make_jaxpr(lambda x: muon.orthogonalize(x, placed(spec), COEFFICIENTS, jnp.float32))(
        jnp.ones((8, 4, 2, 3)))
    assert "sharding_constraint" not in str(whole) and "pad" not in str(whole)


# ---- the GPU program -------------------------------------------------------------------------------------------------

GPU_MODEL = dict(vocab_size=1024, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=512,
                 compute_dtype="bfloat16")
GPU_CELLS = [
    ("zero3", dict(fsdp=4, tensor=2), 6), ("zero3", dict(fsdp=8), 8), ("zero3", dict(fsdp=8), 5),
    ("zero3", dict(data=2, fsdp=4), 4), ("hsdp", dict(data=2, fsdp=4), 4), ("zero1", dict(fsdp=8), 8),
    ("ddp", dict(fsdp=8), 2),
    ("zero3", dict(stage=2, fsdp=4), 12),
    ("zero3", dict(stage=2, fsdp=2, tensor=2), 4), ("zero3", dict(fsdp=4, context=2), 8),
]  # fmt: skip


def moves(made) -> dict[tuple[str, ...], int]:
    """Mesh axes -> bytes of a device's part of all matrices, there and back in bf16, the layers of each part filled
    up."""
    out = {}
    for info in made.model.parameters():
        if info.role != "matrix":
            continue
        stage, *split = [made.layout.mesh_axes("optimizer", axis) for axis in info.axes]
        num_shards = made.layout.num_shards(axis for axes in split for axis in axes)
        stages = made.layout.num_shards(stage)
        layers = -(-info.shape[0] // stages // num_shards) * num_shards
        for axes in filter(None, split):
            out[axes] = out.get(axes, 0) + 2 * 2 * layers * info.size // info.shape[0] // num_shards
    return out


def newton_schulz_flops(made) -> int:
    """Of one device: five times three products, of the layers that fall to it."""
    flops = 0
    for info in made.model.parameters():
        if info.role == "matrix":
            short, long = sorted(math.prod(info.shape[dim] for dim in dims) for dims in info.matrix_dims)
            stage, *split = [made.layout.mesh_axes("optimizer", axis) for axis in info.axes]
            layers = -(-info.shape[0] // made.layout.num_shards(stage) // made.layout.num_shards(
                axis for axes in split for axis in axes))
            flops += layers * 5 * 2 * (2 * short**2 * long + short**3)
    return flops


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
@pytest.mark.parametrize("case", [
    GPU_CELLS[0], *(pytest.param(case, marks=sampling.GRID) for case in GPU_CELLS[1:])], ids=cell_id)
def test_matrices_go_to_their_device_and_back_in_bf16_and_nothing_else_is_sent(case):
    rule, mesh, num_layers = case
    run = run_of(rule, mesh, num_layers=num_layers, **GPU_MODEL)
    run = run.replace(data={"seq_len": 64})
    made = assembly.assemble(run, compile.topology("h100:8"))
    spec = made.program.step.state
    as_stored = rules.shardings(made.layout, made.mesh, "optimizer", spec.axes)
    grads = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s),
                         spec.abstract.params, as_stored)
    update = jax.jit(functools.partial(spec.tx.update, step=0), out_shardings=(as_stored, spec.sharding.opt_state))
    program = audit.read(made.program.compile_function(update, grads, spec.abstract.opt_state,
                                               grads).as_text(), made.mesh)
    sent = {}
    for c in program.collectives:
        sent[c.kind, c.axes, c.dtype] = sent.get((c.kind, c.axes, c.dtype), 0) + c.payload_bytes
    assert sent == {("all-to-all", axes, "bf16"): size for axes, size in moves(made).items()}
    assert program.flops == {"bf16": newton_schulz_flops(made)} and not program.uncounted
