"""What the GPU's compiler makes of the recurrence's Pallas kernels, and where they are chosen. Their numbers:
test_recurrence. No GPU is needed; none has run them here."""
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import plain_recurrence as plain
import pytest
import sampling
from jax.sharding import PartitionSpec as P
from kernel_resources import compile_dumped, used
from test_context import laid_out

from meshtrain import config, hardware
from meshtrain.choices import recurrence as choices
from meshtrain.choices.setting import Setting
from meshtrain.cost.formulas import rates
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.program import compile, roofline
from meshtrain.kernels import recurrence, recurrence_blocks, recurrence_pallas
from meshtrain.sharding.mesh import MeshSpec

slow = partial(pytest.param, marks=sampling.GRID)


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
        return compile_dumped(lowered, folder).as_text()


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
@pytest.mark.parametrize("gpu, kind", [("h100", "delta"), slow("b200", "delta"), ("h100", "channels"),
                                       slow("b200", "channels"), slow("h100", "sum"), slow("b200", "sum")])
def test_kernels_compiled_for_a_gpu_spill_little_fit_its_shared_memory_and_are_priced(gpu, kind, tmp_path):
    text = compiled(gpu, kind, tmp_path)
    found = used(recurrence_blocks.NAME, gpu, tmp_path)
    kernels = ["forward", "reverse", "gradients"]
    if kind == "delta":
        kernels = [what + recurrence_blocks.DELTA for what in kernels] + ["inside", "inside_again", "inside_gradients"]
    if kind == "channels":
        kernels = [recurrence_pallas.CHANNELS + what for what in (
            *kernels, "inside", "inside_again", "inside_gradients")]
    assert set(found) == {f"{recurrence_blocks.NAME}_{what}" for what in kernels}
    assert all(one.spilled_bytes <= MAX_SPILLED_BYTES for one in found.values()), found
    priced = roofline.read(text, MeshSpec({}), rates.Rates(hardware.get(gpu), Assumptions(gpu, {})),
                           roofline.Workload(T, 1.0))
    (forward,) = [kernel for kernel in priced.kernels if f"{recurrence_blocks.NAME}_{kernels[0]}" in kernel.source]
    # with the state; q k^T for all columns, where another kernel has not made it
    C, columns, products = 64, 0 if kind == "channels" else V[kind] // 32, 2 if kind == "sum" else 3
    assert forward.flops == N * T * 2 * (C * H * columns + products * H * V[kind] + C * V[kind])
    assert priced.uncounted == () and sum("pallas_call" in kernel.source for kernel in priced.kernels) >= len(kernels)


def test_kernels_are_chosen_where_they_are_compiled_for_and_the_reason_is_said_elsewhere():
    run, (_, layout) = config.Run(model=dict(mixers="G", compute_dtype="bfloat16")), laid_out({})
    chosen = lambda run, platform, gpu: choices.choose(Setting(layout, platform, hardware.GPUS.get(gpu), run=run))
    engine = lambda *args: chosen(*args).value.recur.args[0].engine
    assert engine(run, "cuda", "h100").func is recurrence_pallas.engine().func
    (line,) = chosen(config.Run(model=dict(mixers="K", compute_dtype="bfloat16")), "cuda", "b200").why
    assert "Pallas" in line
    for platform, gpu, said in (("cpu", "", ""), ("cuda", "a100-80gb", "a100-80gb"), ("cuda", "", "not in the table")):
        assert engine(run, platform, gpu) is recurrence.recurrence
        assert said in "".join(chosen(run, platform, gpu).why)
