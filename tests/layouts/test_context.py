"""Sequences split over devices: the numbers of one device, and what the compiled program holds and sends.

Attention itself is compared with plain attention by `test_attention`; whole runs with one device by `test_cells`, with
what they send.
"""
import functools
from functools import partial

import cells
import jax
import jax.numpy as jnp
import pytest
import sampling
import steps
from hypothesis import given
from hypothesis import strategies as st
from test_layouts import RULES, run_of

from meshtrain import assembly, config
from meshtrain.choices import attention as choices
from meshtrain.choices.setting import Setting
from meshtrain.cost.program import audit
from meshtrain.parallel.context import zigzag
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
    run = run_of("ddp", dict(context=cp)).replace(data=dict(seq_len=T, global_batch=B))
    engine = choices.choose(Setting(layout, "cpu", run=run)).value

    def attend(*operands):
        return engine(layout, *operands)[0]
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


def test_gradients_cross_context_once_a_microbatch_and_data_once_a_step():
    case = cells.compiled(cells.cell("dense: ddp context2 data2 ring"))
    size = 4 * sum(info.size for info in case.made.model.parameters())
    reduced = [c for c in case.audit.collectives if c.kind == "all-reduce"]
    sent = {axis: [c for c in reduced if c.axes == (axis,)] for axis in ("context", "data")}
    total = {axis: sum(c.payload_bytes for c in rows) for axis, rows in sent.items()}
    assert size <= total["data"] <= size + steps.SMALL and {c.trips for c in sent["data"]} == {1}
    # Of the table that is looked up XLA gathers the cotangents over context, and every device sums all of its gradient.
    each = case.made.run.training.microbatches * (size - 4 * sum(
        info.size for info in case.made.model.parameters() if info.role == "embedding"))
    assert each <= total["context"] <= each + steps.SMALL
    assert all(c.trips >= 2 for c in sent["context"] if c.payload_bytes > steps.SMALL)
