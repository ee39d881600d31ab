"""Sequences split over devices: the numbers of one device, and what the compiled program holds and sends.

Attention itself is compared with plain attention by `test_attention`; whole runs with one device by `parity`, two devices
and what stands beside them by `test_parity`.
"""
import functools
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import parity
import pytest
import sampling
import test_layouts
from hypothesis import given
from hypothesis import strategies as st
from test_layouts import MICROBATCHES, MODEL, RULES, run_of

from meshtrain import assembly, config
from meshtrain.cost.program import audit
from meshtrain.parallel.context import attention, zigzag
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec

slow = partial(pytest.param, marks=sampling.GRID)


# ---- attention over a context mesh -----------------------------------------------------------------------------------


def laid_out(sizes: dict, rule: str = "zero3", devices=None):
    """(mesh, layout) over the devices, or the first simulated ones."""
    plan = MeshSpec(sizes)
    return plan.build(devices or jax.devices()[: plan.num_devices]), rules.Layout(
        rules.load(RULES / f"{rule}.toml"), plan.sizes)


def with_gradients(attend, q, k, v, segments, do):
    """(o, (dq, dk, dv))."""
    o, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
    return o, back(do)


@given(st.integers(1, 8), st.integers(1, 5))
def test_zigzag_gives_every_device_an_early_chunk_and_its_mirror_image(cp, chunk):
    order = zigzag.order(2 * cp * chunk, cp).reshape(cp, 2, chunk)
    for i, (early, late) in enumerate(order):
        assert early.tolist() == list(range(i * chunk, (i + 1) * chunk))
        assert late.tolist() == list(range((2 * cp - 1 - i) * chunk, (2 * cp - i) * chunk))
    # Causal work is the same for all: a query at t sees t + 1 keys.
    assert len({int((device + 1).sum()) for device in order.reshape(cp, -1)}) == 1


# ---- whole runs ------------------------------------------------------------------------------------------------------


def split_run(rule: str, mesh: dict, method: str, remat: str = "none") -> config.Run:
    return run_of(rule, mesh, {}, dict(remat=remat)).model_copy(update={"context": config.Context(method=method)})


@functools.cache
def compiled(rule: str, mesh: tuple, method: str, remat: str = "none") -> parity.Compiled:
    return parity.compiled(split_run(rule, dict(mesh), method, remat))


@pytest.mark.parametrize("method, rule, mesh", [
    ("ring", "ddp", dict(context=4)),
    ("ulysses", "zero3", dict(context=4, tensor=2)),      # 2 kv heads a device: repeated
    *(slow(*case) for case in (
        ("gather", "ddp", dict(context=4)), ("ring", "ddp", dict(context=8)), ("ulysses", "ddp", dict(context=4)),
        ("ring", "zero3", dict(context=2, tensor=2, fsdp=2)))),
], ids=lambda value: "-".join(f"{k}{n}" for k, n in value.items()) if isinstance(value, dict) else value)  # fmt: skip
def test_loss_gradients_and_training_equal_one_device(method, rule, mesh):
    case = compiled(rule, tuple(mesh.items()), method)
    parity.check_equal(case)
    assert not case.audit.unknown_loops and not case.audit.partial_permutes


# ---- what the compiled program holds ---------------------------------------------------------------------------------

WIDE = dict(vocab_size=256, embed_dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=128, mlp_dim=64,
            compute_dtype="float32")    # attention's arrays are nearly all there is


@functools.cache
def long_step(length: int, cp: int, method: str = "ring"):
    """The compiled step of one sequence of `length` tokens; never run."""
    run = config.Run(mesh=dict(context=cp), sharding=dict(rules=str(RULES / "ddp.toml")), model=WIDE,
                     context=dict(method=method), data=dict(seq_len=length, global_batch=1),
                     training=dict(loss_chunk=256, remat="full"))
    program = assembly.assemble(run, jax.devices()[:cp]).program
    with jax.set_mesh(program.step.mesh):
        return program.train.lower(program.step.state.abstract, program.step.batch).compile()


def temp_bytes(length: int, cp: int, method: str = "ring") -> int:
    return long_step(length, cp, method).memory_analysis().temp_size_in_bytes


def test_temporaries_of_the_ring_fall_as_one_over_context():
    held = {cp: temp_bytes(8192, cp) for cp in (2, 4, 8)}
    for cp in (4, 8):
        # weights and their gradients stay as they are
        assert held[cp] == pytest.approx(held[2] * 2 / cp, rel=0.2), held


@pytest.mark.parametrize("cp", [slow(8), 1])
def test_temporaries_grow_linearly_in_the_sequence(cp):
    """On one device, too: the masks of all block pairs, moved out of the scan over layers, would grow as its square."""
    short, long = (temp_bytes(length, cp) for length in ((8192, 16384) if cp > 1 else (4096, 8192)))
    assert long <= 2.1 * short, (short, long)


@pytest.mark.parametrize("cp", [4, slow(2), slow(8)])
def test_ring_computes_at_most_six_tenths_of_full_attention(cp):
    """Matmuls of the causal zigzag ring, in the engine that a run gets, by full attention's / context; forward,
    backward."""
    B, T, N, K, H = 1, 4096, 8, 4, 16
    mesh, layout = laid_out({"context": cp})
    run = split_run("ddp", dict(context=cp), "ring").model_copy(update={"data": config.Data(seq_len=T, global_batch=B)})
    attend = partial(attention.choose(run, layout, "cpu")[0], layout)
    q, k = (jax.ShapeDtypeStruct((B, T, n, H), jnp.float32) for n in (N, K))
    segments = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def matmuls(f, *args):
        with jax.set_mesh(mesh):
            program = audit.read(jax.jit(f).lower(*args).compile().as_text(), mesh)
        assert not program.uncounted and not program.unknown_loops and set(program.flops) == {"f32"}
        return program.flops["f32"]

    full = 4 * B * T * T * N * H // cp                          # two products forward, five backward
    forward = matmuls(attend, q, k, k, segments)
    both = matmuls(partial(with_gradients, attend), q, k, k, segments, q)
    assert 0.5 <= forward / full <= 0.6
    assert 0.5 <= (both - forward) / (2.5 * full) <= 0.6


# ---- what the compiled program sends ---------------------------------------------------------------------------------


def permutes(program: audit.ProgramAudit, dtype: str, backward: bool) -> SimpleNamespace:
    """Arrays and bytes that a device sends on, per step."""
    found = [c for c in program.collectives if c.kind == "collective-permute" and c.dtype == dtype
             and ("transpose(" in c.source) == backward]
    assert {c.axes for c in found} <= {("context",)}
    return SimpleNamespace(count=sum(c.count for c in found), bytes=sum(c.bytes for c in found))


@pytest.mark.parametrize("cp, remat", [(4, "none"), (4, "full"), slow(8, "none"), slow(4, "selective"),
                                       slow(2, "none")])
def test_ring_sends_what_its_formula_says(cp, remat):
    """Forward (cp-1)·(K+V), backward as much again and cp·(dK+dV in float32); the recomputation sends nothing."""
    program = compiled("ddp", (("context", cp),), "ring", remat).audit
    each = 4 * test_layouts.SEQUENCES // MICROBATCHES * test_layouts.T // cp * MODEL["num_kv_heads"] * MODEL["head_dim"]
    times = 2 * MICROBATCHES * MODEL["num_layers"]              # K and V
    forward, backward = permutes(program, "f32", False), permutes(program, "f32", True)
    assert forward.count == (cp - 1) * times and backward.count == (2 * cp - 1) * times
    assert (forward.bytes, backward.bytes) == (forward.count * each, backward.count * each)
    ids = permutes(program, "s32", False).bytes + permutes(program, "s32", True).bytes
    assert 0 < ids <= (forward.bytes + backward.bytes) / 16     # [B, T] int32 beside [B, T, K, H]
    assert not program.broken_permutes and not program.partial_permutes


@pytest.mark.parametrize("method, kind", [("gather", "all-gather"), ("ulysses", "all-to-all")])
def test_gather_and_ulysses_send_no_permutes(method, kind):
    kinds = {c.kind for c in compiled("ddp", (("context", 4),), method).audit.collectives if "context" in c.axes}
    assert kind in kinds and "collective-permute" not in kinds


def test_gradients_cross_context_once_a_microbatch_and_data_once_a_step():
    case = compiled("ddp", (("context", 2), ("data", 2)), "ring")
    size = 4 * sum(info.size for info in case.made.model.parameters())
    reduced = [c for c in case.audit.collectives if c.kind == "all-reduce"]
    sent = {axis: [c for c in reduced if c.axes == (axis,)] for axis in ("context", "data")}
    total = {axis: sum(c.payload_bytes for c in rows) for axis, rows in sent.items()}
    assert size <= total["data"] <= size + test_layouts.SMALL and {c.trips for c in sent["data"]} == {1}
    # Of the table that is looked up XLA gathers the cotangents over context, and every device sums all of its gradient.
    each = MICROBATCHES * (size - 4 * sum(info.size for info in case.made.model.parameters()
                                          if info.role == "embedding"))
    assert each <= total["context"] <= each + test_layouts.SMALL
    assert all(c.trips >= MICROBATCHES for c in sent["context"] if c.payload_bytes > test_layouts.SMALL)
