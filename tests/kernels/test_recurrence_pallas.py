"""The recurrence's Pallas kernels, step by step on the CPU, against token by token in float64; and what the GPU's
compiler makes of them. No GPU is needed; none has run them here."""
import functools
import re
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import plain_recurrence as plain
import pytest
import sampling
import test_recurrence_context as context
from jax.sharding import PartitionSpec as P
from test_pallas import ptxas
from test_recurrence import rounded

from meshtrain import config, hardware
from meshtrain.cost.formulas import rates
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.program import compile, roofline
from meshtrain.kernels import recurrence, recurrence_blocks, recurrence_pallas
from meshtrain.kernels.recurrence import RecurrentState
from meshtrain.kernels.recurrence_pallas import Launch
from meshtrain.parallel.context import attention
from meshtrain.parallel.context import recurrence as linear
from meshtrain.sharding.mesh import MeshSpec

slow = partial(pytest.param, marks=sampling.GRID)
SMALL = recurrence_pallas.engine(Launch(chunk=16, columns=16, key_columns=16, interpret=True))
LENGTHS = [1, 3, 20, 1, 13, 5]  # 43 tokens: no whole number of chunks


@functools.cache
def both_ways(engine):
    """Jitted (inputs, segments, do) -> o and gradients, of an engine or, if None, token by token."""
    recur = plain.recur if engine is None else lambda *args: engine(*args).o_BTNV
    return jax.jit(lambda inputs, segments, do: plain.with_gradients(recur, inputs, segments, do=do))


@pytest.mark.parametrize("kind", plain.KINDS)
@pytest.mark.parametrize("dtype, H, V, tolerance", [
    (jnp.float32, 8, 6, 2e-6),          # sums of 43 terms in another order; widths are padded to 16
    slow(jnp.float32, 32, 32, 2e-6),    # several blocks of columns
    slow(jnp.bfloat16, 32, 32, 1e-2)])  # 2^-9 for each rounding of an operand
def test_kernels_match_token_by_token(kind, dtype, H, V, tolerance):
    with jax.enable_x64(True):
        inputs = rounded(plain.drawn(kind, sum(LENGTHS), B=2, K=1, H=H, V=V), dtype)
        segments, do = plain.segments_of(LENGTHS), np.random.default_rng(9).standard_normal(inputs[2].shape)
        expected = both_ways(None)(jax.tree.map(lambda x: x.astype(jnp.float64), inputs), segments, do)
        found = both_ways(SMALL)(inputs, segments, do)
    assert max(plain.error(*pair) for pair in zip(found, expected) if pair[0] is not None) < tolerance


@pytest.mark.parametrize("kind", plain.KINDS)
@pytest.mark.parametrize("decay, tolerance", [(5.0, 2e-5), slow(0.0, 5e-6), slow(100.0, 5e-3)])
def test_weak_and_strong_decays_in_documents_cut_anywhere(kind, decay, tolerance):
    """Sums of decays of 100 are rounded to 1e-5. Then the decay's gradient, 1e-4 at most, is a difference of two sums
    of terms near 1, each rounded to 6e-8, and is 2e-3 off where their order differs."""
    rng = np.random.default_rng(3)
    segments = (1 + np.cumsum(rng.random((12, 43)) < rng.choice([0, 0.05, 0.5, 1], (12, 1)), 1)).astype(np.int32)
    segments[::3][:, :7] = 0                    # padding before the first document
    with jax.enable_x64(True):
        inputs = rounded(plain.drawn(kind, 43, B=12, K=1, H=12, V=6, decay=decay), jnp.float32)
        do = np.random.default_rng(9).standard_normal(inputs[2].shape)
        expected = both_ways(None)(jax.tree.map(lambda x: x.astype(jnp.float64), inputs), segments, do)
        found = both_ways(SMALL)(inputs, segments, do)
    assert max(plain.error(*pair) for pair in zip(found, expected) if pair[0] is not None) < tolerance


@pytest.mark.parametrize("kind", ["delta", pytest.param("channels", marks=sampling.GRID)])
def test_keys_that_repeat_lose_no_more_than_in_xla(kind):
    inputs = rounded(plain.drawn(kind, 48, decay=1e-3, alike=1.0, beta=1.9), jnp.float32)
    segments, do = plain.segments_of([20, 28]), np.ones(inputs[2].shape, np.float32)
    assert plain.error(both_ways(SMALL)(inputs, segments, do),
                       both_ways(recurrence.recurrence)(inputs, segments, do)) < 2e-4


@pytest.mark.parametrize("kind", ["sum", *(pytest.param(kind, marks=sampling.GRID) for kind in ("delta", "channels"))])
def test_rows_go_on_from_a_state(kind):
    inputs, segments = rounded(plain.drawn(kind, 37, K=1), jnp.float32), plain.segments_of([20, 17])
    do = jnp.sin(jnp.arange(inputs[2].size, dtype=jnp.float32)).reshape(inputs[2].shape)

    def of(engine, cut):
        def recur(*inputs):
            first, second = (tuple(None if x is None else x[:, part] for x in (*inputs, segments))
                             for part in (slice(cut), slice(cut, None)))
            o, end, _ = engine(*first)
            more, end, _ = engine(*second, RecurrentState(end, segments[:, cut - 1]))
            return jnp.concatenate([o, more], 1), end

        def with_gradients():
            out, back = jax.vjp(recur, *inputs)
            return out, back((do, jnp.ones_like(out[1])))
        return jax.jit(with_gradients)()
    for cut in (20, 11):
        assert plain.error(of(SMALL, cut), of(recurrence.recurrence, cut)) < 5e-6


@pytest.mark.parametrize("kind, method", [("delta", "ring"), ("channels", "ring"), slow("sum", "ring"),
                                          slow("delta", "ulysses"), slow("channels", "ulysses")])
def test_split_sequences_match_one_device(kind, method):
    mesh, layout = context.laid_out(dict(context=2, tensor=2), "ddp")
    inputs, ws, segments, do = context.drawn(kind)
    order = attention.METHODS[method].order(segments.shape[1], 2)
    turned = partial(jax.tree.map, lambda x: x[:, order])
    of = linear.Recurrence(SMALL, linear.TokenRuns(1 if method == "ulysses" else 2))
    functions = context.chosen(method, layout)._replace(recur=partial(linear.recur, of))
    with jax.set_mesh(mesh):
        o, dinputs, dws = jax.jit(partial(context.both_ways, functions, layout))(
            turned(inputs), ws, turned(segments), turned(do))
    back = partial(jax.tree.map, lambda x: x[:, np.argsort(order)])
    assert plain.error((back(o), back(dinputs), dws), context.on_one_device(kind)) < 5e-6


# ---- what the GPU's compiler makes of them ---------------------------------------------------------------------------

MAX_SPILLED_BYTES = 1024      # of a thread: 376 with jax 0.10, 800 with the Triton of jax 0.12, in gradients of a chunk


B, T, K, N, H = 1, 1024, 8, 16, 128
V = {"delta": 128, "channels": 128, "sum": 64}


def compiled(gpu: str, kind: str, folder: Path) -> str:
    """The program of forward and backward of a layer with widths as in published models; its PTX is in the folder."""
    mesh = MeshSpec({}).build(compile.topology(f"{gpu}:1"))
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P()))
    q = array(jnp.bfloat16, B, T, N if kind == "channels" else K, H)
    v, rates = array(jnp.bfloat16, B, T, N, V[kind]), array(jnp.float32, B, T, N)
    g = array(jnp.float32, B, T, N, H) if kind == "channels" else rates
    inputs = q, q, v, g, None if kind == "sum" else rates
    step = lambda inputs, segments, do: plain.with_gradients(
        lambda *args: recurrence_pallas.engine()(*args).o_BTNV, inputs, segments, do=do)
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.shard_map(step, in_specs=P(), out_specs=P(), check_vma=False)).lower(
            inputs, array(jnp.int32, B, T), v)
        return lowered.compile(compiler_options={
            "xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx", "xla_backend_optimization_level": 3}).as_text()


def resources(gpu: str, folder: Path) -> dict[str, tuple[int, int]]:
    """{kernel: (spilled bytes of a thread, shared memory of a block)}."""
    launches = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    shared = {name: int(size) for name, size in re.findall(
        rf"({recurrence_blocks.NAME}\w*) grid:.*shared_memory: (\d+) bytes", launches)}
    found, architecture = {}, {9: "sm_90a", 10: "sm_100a"}[hardware.get(gpu).chip.compute_capability]
    for path in folder.glob("*.ptx"):
        if recurrence_blocks.NAME in (text := path.read_text()):
            name = re.search(rf"\.entry ({recurrence_blocks.NAME}\w*)", text).group(1)
            said = subprocess.run([ptxas(), "-v", f"-arch={architecture}", path, "-o", "/dev/null"],
                                  capture_output=True, text=True)
            assert said.returncode == 0, said.stderr[:300]
            found[name] = int(re.search(r"(\d+) bytes spill stores", said.stderr).group(1)), shared[name]
    return found


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
@pytest.mark.parametrize("gpu, kind", [("h100", "delta"), slow("b200", "delta"), ("h100", "channels"),
                                       slow("b200", "channels"), slow("h100", "sum"), slow("b200", "sum")])
def test_kernels_compiled_for_a_gpu_spill_little_fit_its_shared_memory_and_are_priced(gpu, kind, tmp_path):
    text = compiled(gpu, kind, tmp_path)
    found = resources(gpu, tmp_path)
    kernels = ["forward", "reverse", "gradients"]
    if kind == "delta":
        kernels = [what + recurrence_blocks.DELTA for what in kernels] + ["inside", "inside_again", "inside_gradients"]
    if kind == "channels":
        kernels = [recurrence_pallas.CHANNELS + what for what in (
            *kernels, "inside", "inside_again", "inside_gradients")]
    assert set(found) == {f"{recurrence_blocks.NAME}_{what}" for what in kernels}
    for name, (spilled, shared) in found.items():
        assert spilled <= MAX_SPILLED_BYTES, (name, found)
        assert 0 < shared <= hardware.get(gpu).chip.shared_bytes_per_block, (name, found)
    priced = roofline.read(text, MeshSpec({}), rates.Rates(hardware.get(gpu), Assumptions(gpu, {})), T, 1.0)
    (forward,) = [kernel for kernel in priced.kernels if f"{recurrence_blocks.NAME}_{kernels[0]}" in kernel.source]
    # with the state; q k^T for all columns, where another kernel has not made it
    C, columns, products = 64, 0 if kind == "channels" else V[kind] // 32, 2 if kind == "sum" else 3
    assert forward.flops == N * T * 2 * (C * H * columns + products * H * V[kind] + C * V[kind])
    assert priced.uncounted == () and sum("pallas_call" in kernel.source for kernel in priced.kernels) >= len(kernels)


def test_kernels_are_chosen_where_they_are_compiled_for_and_the_reason_is_said_elsewhere():
    run, (_, layout) = config.Run(model=dict(mixers="G", compute_dtype="bfloat16")), context.laid_out({})
    engine = lambda *args: linear.choose(*args).recur.args[0].engine
    assert engine(run, layout, "cuda", "h100").func is recurrence_pallas.engine().func
    assert "Pallas" in linear.choose(config.Run(model=dict(mixers="K", compute_dtype="bfloat16")), layout, "cuda",
                                     "b200").note
    for platform, gpu, said in (("cpu", "", ""), ("cuda", "a100-80gb", "a100-80gb"), ("cuda", "", "not in the table")):
        assert engine(run, layout, platform, gpu) is recurrence.recurrence
        assert said in linear.choose(run, layout, platform, gpu).note
