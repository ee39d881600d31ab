"""Every layout computes what one device computes, and the compiled program holds what its rule file promises.

One compiled training step per layout answers everything. Models, remat and dropout on layouts: `test_parity`.
"""
import functools
import math
from pathlib import Path

import jax
import numpy as np
import parity
import pytest
import sampling

from meshtrain import config
from meshtrain.inspection import memory
from meshtrain.model import parts

RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
MICROBATCHES = 2
SEQUENCES, T = 32, 32  # of a step
MODEL = dict(vocab_size=509, embed_dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=96,
             compute_dtype="float32")
ONE = {}
SMALL = 4096  # bytes: loss and norm scalars, token ids

LAYOUTS = [
    ("zero1", dict(fsdp=8)), ("zero2", dict(fsdp=8)), ("hsdp_zero1", dict(data=2, fsdp=4)),
    ("zero3", dict(data=2, fsdp=2, tensor=2)),
]
GRID = [
    ("ddp", dict(fsdp=8)), ("zero3", dict(fsdp=8)), ("tensor", dict(data=2, fsdp=2, tensor=2)),
    ("ddp", dict(data=2, tensor=4)),
    ("ddp", dict(data=2, fsdp=4)), ("zero1", dict(data=2, fsdp=4)), ("zero2", dict(data=2, fsdp=4)),
    ("zero3", dict(data=2, fsdp=4)),
    ("hsdp", dict(data=2, fsdp=4)), ("hsdp", dict(data=4, fsdp=2)), ("tensor", dict(data=4, tensor=2)),
    ("ddp", dict(data=4, tensor=2)),
    ("ddp", dict(data=2, fsdp=2, tensor=2)), ("zero3", dict(data=4, tensor=2)),
    ("zero3", dict(fsdp=2, tensor=4)), ("hsdp_zero1", dict(data=2, fsdp=2, tensor=2)),
    ("hsdp_zero1", dict(data=2, fsdp=2, context=2)),
    ("zero1", dict(data=2, fsdp=2, context=2)), ("zero1", dict(data=2, tensor=2, context=2)),
    ("zero2", dict(data=2, tensor=2, context=2)),
    ("zero2", dict(data=2, fsdp=2, context=2)),
]  # fmt: skip


def run_of(rule: str, mesh: dict, model: dict = {}, training: dict = {}) -> config.Run:
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(RULES / f"{rule}.toml")), model=MODEL | model,
        data=dict(seq_len=T, global_batch=SEQUENCES),
        training=dict(steps=20, microbatches=MICROBATCHES, loss_chunk=24) | training,
        optimizer=dict(learning_rate=1e-3, warmup_steps=2),
    )  # fmt: skip


@functools.cache
def compiled(rule: str, mesh: tuple) -> parity.Compiled:
    return parity.compiled(run_of(rule, dict(mesh)))


def layout_id(case) -> str:
    rule, mesh = case
    return f"{rule}-" + "-".join(f"{axis}{n}" for axis, n in mesh.items())


@pytest.fixture(params=[*LAYOUTS, *(pytest.param(case, marks=sampling.GRID) for case in GRID)],
                ids=layout_id, scope="module")
def layout(request) -> parity.Compiled:
    rule, mesh = request.param
    return compiled(rule, tuple(mesh.items()))


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_loss_gradients_and_training_equal_one_device(layout):
    parity.check_equal(layout)


def test_initialization_is_the_same_bits_on_any_layout():
    made = compiled("zero3", (("data", 2), ("fsdp", 2), ("tensor", 2))).made
    with jax.set_mesh(made.mesh):
        state = made.program.initialize()
    params = jax.jit(made.model.init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(params))


# ---- what the compiled program holds ---------------------------------------------------------------------------------


def test_bytes_per_device_are_what_the_rule_file_says(layout):
    held = memory.held_by_program(layout.made, layout.step)
    ruled = memory.formula(layout.made)
    assert (held["params"], held["optimizer"]) == (ruled["params"], ruled["optimizer"])
    assert held["grads"] == ruled["grads"]


def test_collectives_stay_on_the_axes_that_the_rule_file_names(layout):
    named = {axis for table in layout.made.layout.rules.tables.values() for axes in table.values() for axis in axes}
    assert not layout.audit.unknown_loops and not layout.audit.broken_permutes
    for c in layout.audit.collectives:
        assert set(c.axes) <= named, c  # a part of an axis has another name and fails, too


def test_gradients_are_reduced_once_per_step_over_axes_that_grads_does_not_name(layout):
    """ddp, zero1, hsdp over data, tensor: one reduction of the accumulators' bytes, nothing in the microbatch loop. Of
    what the optimizer alone splits besides (zero1 over context) each device reduces its own part."""
    once, rule = set(layout.made.program.step.deferred_axes), layout.made.layout
    own = set(rule.mesh_axes("optimizer", "embed")) - set(rule.mesh_axes("grads", "embed")) - once
    over = [c for c in layout.audit.collectives if once & set(c.axes)]
    assert [c for c in over if c.trips > 1] == []
    reduced = sum(c.payload_bytes for c in over if c.kind in ("all-reduce", "reduce-scatter"))
    expected = memory.formula(layout.made)["grads"] // rule.num_shards(own) if once else 0
    assert expected <= reduced <= expected + SMALL or not once and reduced == 0


PER_PARAM = {"ddp": lambda n: 16, "zero1": lambda n: 4 + 12 / n, "zero2": lambda n: 16 / n, "zero3": lambda n: 16 / n}


@pytest.mark.parametrize("rule, n", [("zero1", 8), ("zero2", 8), *(
    pytest.param(rule, n, marks=sampling.GRID) for rule in PER_PARAM
    for n in (2, 4, 8) if (rule, n) not in (("zero1", 8), ("zero2", 8)))])
def test_zero_table_as_measured_bytes_per_parameter(rule, n):
    """float32 params 4, accumulators 4, adamw 8, params stored as adamw's moments. ZeRO-1 and ZeRO-2 read whole weights
    beside them (arXiv:1910.02054 counts these 2, gradients 2 and the split 12)."""
    case = compiled(rule, (("fsdp", n),))
    held = memory.held_by_program(case.made, case.step)
    count = sum(info.size for info in case.made.model.parameters())
    measured = (held["params"] + held["grads"] + held["optimizer"]) / count
    read = memory.read_bytes(case.made) / count
    # float32 here, else the compute dtype's bytes
    assert read == pytest.approx(4 if rule in ("zero1", "zero2") else 0)
    assert measured == pytest.approx(PER_PARAM[rule](n), rel=0.02)


# ---- parts of a microbatch -------------------------------------------------------------------------------------------

GPT2 = dict(norm="layernorm", activation="gelu", position="learned", max_seq_len=T, attention_bias="all", mlp_bias=True,
            num_kv_heads=8, tie_embeddings=True)  # fmt: skip
IN_PARTS = [
    ("zero3", dict(data=2, fsdp=2, tensor=2), {}, dict(remat="full")),
    ("ddp", dict(data=2, tensor=4), GPT2, {}),          # weights are not gathered in the loop
]
IN_PARTS_GRID = [
    ("zero3", dict(fsdp=2, stage=2, tensor=2), {}, dict(remat="selective")),
    ("zero3", dict(fsdp=4, tensor=2), GPT2, dict(remat="selective")),
    ("zero3", dict(data=2, fsdp=2, tensor=2), dict(residual_dropout=0.2), dict(remat="offload")),
    ("zero3", dict(tensor=8), {}, dict(remat="full")),          # each kv head is computed by two ranks
    ("tensor", dict(data=2, fsdp=2, tensor=2), {}, dict(remat="full")),
    ("zero2", dict(data=2, stage=2, tensor=2), {}, dict(remat="none")),
]  # fmt: skip


@pytest.mark.parametrize("rule, mesh, model, training", [
    *IN_PARTS, *(pytest.param(*case, marks=sampling.GRID) for case in IN_PARTS_GRID)])
def test_parts_of_a_microbatch_change_no_gradient(rule, mesh, model, training, monkeypatch):
    rows = SEQUENCES // MICROBATCHES // math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp"))
    counts, cut = set(), parts.cut
    monkeypatch.setattr(parts, "MIN_TOKENS", rows * T // 2)
    monkeypatch.setattr(parts, "cut", lambda a, shards, count: counts.add(count) or cut(a, shards, count))
    parity.check(run_of(rule, mesh, model, training))
    assert counts == {2}
