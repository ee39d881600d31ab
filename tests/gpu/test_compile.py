"""GPU programs are compiled without a GPU, and a topology that cannot be is refused by name."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain import hardware
from meshtrain.cost.program import audit, compile

needs_wheels = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}"
)


@pytest.mark.parametrize("text, expected", [("h100:64", ("h100", 64)), ("a100-80gb:4", ("a100-80gb", 4)),
                                            ("gb200:12", ("gb200", 12))])
def test_topology_text_is_name_and_count(text, expected):
    assert compile.parse_topology(text) == expected


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("h100", "NAME:N"),
        ("h100:many", "NAME:N"),
        ("h100:-8", "NAME:N"),
        ("h100:8:8", "NAME:N"),
        ("", "NAME:N"),
        ("h1000:8", "unknown GPU 'h1000'; did you mean 'h100'"),
        ("cpu:8", "programs for 'cpu' cannot be compiled"),
        ("mi300x:8", "programs for 'mi300x' cannot be compiled"),
        ("h100:0", "1 to"),
        ("h100:1000000", "1 to"),
        ("h100:12", "use 8 or 16"),
        ("gb200:6", "use 4 or 8"),
    ],
)
def test_impossible_topology_is_refused_by_name(text, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        compile.topology(text)


def test_missing_wheels_name_the_extra(monkeypatch):
    monkeypatch.setattr(compile, "missing_wheels", lambda: ["ptxas (nvidia-cuda-nvcc)"])
    with pytest.raises(ValueError,
                       match=re.escape("needs ptxas (nvidia-cuda-nvcc): run pip install -e '.[gpu-compile]'")):
        compile.topology("h100:8")


def test_missing_plugin_or_ptxas_is_noticed_even_with_a_cuda_toolkit(monkeypatch):
    found = {}
    monkeypatch.setattr(compile, "_find", lambda module: found.get(module, []))
    assert "CUDA plugin" in compile.missing_wheels()[0]
    found["jax_plugins.xla_cuda12"] = ["/somewhere"]
    assert compile.missing_wheels() == ["ptxas (nvidia-cuda-nvcc-cu12)"]


@pytest.mark.parametrize("name", compile.targets())
def test_spec_takes_memory_from_the_hardware_table(name):
    spec = compile.target_spec(name)
    assert f"device_memory_size: {hardware.get(name).hbm_bytes}\n" in spec
    assert re.search(r"memory_bandwidth: \d+\n", spec)


def test_backend_that_started_without_the_cpu_chosen_is_refused():
    jax.devices()
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", "cuda,cpu")
        with pytest.raises(ValueError, match="start with JAX_PLATFORMS=cpu"):
            compile.require_cpu_backend()
    finally:
        jax.config.update("jax_platforms", before)
    compile.require_cpu_backend()


@needs_wheels
@pytest.mark.parametrize("name", ["h100:64", "a100-40gb:4"])
def test_devices_are_as_many_and_of_the_kind_asked_for(name):
    devices = compile.topology(name)
    gpu, count = compile.parse_topology(name)
    assert len(devices) == len({d.id for d in devices}) == count
    assert hardware.from_device_kind(devices[0].device_kind) is hardware.get(gpu)
    per_host = min(count, hardware.get(gpu).gpus_per_host)
    assert [d.process_index for d in devices] == [i // per_host for i in range(count)]


@needs_wheels
def test_row_parallel_matmul_on_64_h100_is_one_bf16_matmul_and_two_all_reduces():
    """y = x·w, contracted over tensor (8), summed over the batch on data (8): GPU collectives in bf16, none
    promoted."""
    mesh = Mesh(np.array(compile.topology("h100:64")).reshape(8, 8), ("data", "tensor"),
                axis_types=(AxisType.Auto,) * 2)
    B, D, F = 256, 512, 128

    def f(x_BD, w_DF):
        def local(x, w):
            y = jax.lax.psum(x @ w, "tensor")
            return jax.lax.psum(y.astype(jnp.float32).sum(0), "data")

        return jax.shard_map(local, mesh=mesh, in_specs=(P("data", "tensor"), P("tensor")), out_specs=P())(x_BD, w_DF)

    args = [
        jax.ShapeDtypeStruct((B, D), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "tensor"))),
        jax.ShapeDtypeStruct((D, F), jnp.bfloat16, sharding=NamedSharding(mesh, P("tensor"))),
    ]
    compiled = jax.jit(f).lower(*args).compile()
    program = audit.read(compiled.as_text(), mesh)
    rows = {r.axes: r for r in program.collectives}
    payload = (B // 8) * F * 2
    assert set(rows) == {("tensor",), ("data",)} and len(program.collectives) == 2
    assert (rows["tensor",].dtype, rows["tensor",].payload_bytes, rows["tensor",].bytes) == (
        "bf16", payload, payload * 14 // 8)
    assert (rows["data",].dtype, rows["data",].payload_bytes) == ("f32", F * 4)
    assert program.flops == {"bf16": 2 * (B // 8) * (D // 8) * F}
    assert not program.unknown_loops and not program.broken_permutes and not program.uncounted
    # Argument sizes are exact: both arrays, split.
    assert compiled.memory_analysis().argument_size_in_bytes == (B // 8) * (D // 8) * 2 + (D // 8) * F * 2
