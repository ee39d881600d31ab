"""Compiles the real GPU program on a machine without a GPU.

XLA compiles for a described GPU instead of a present one: `topology("h100:64")` returns devices for a mesh, and
`jax.jit(step).lower(*abstract).compile()` over them returns the program that 64 H100 would run, with its HLO (`audit`)
and its `memory_analysis()`. It cannot be executed, nothing is autotuned, and XLA reports no out-of-memory: compare with
`hardware.Gpu.hbm_bytes`. The division of GPUs into hosts does not change the program.

Needs the extra gpu-compile, `pip install -e '.[gpu-compile]'` (the CUDA plugin of jax and NVIDIA's ptxas), no driver
and no toolkit; cuDNN attention also needs the cuDNN wheel. This is the only file that uses jax's unstable topology API,
which works only where jax runs on the CPU: see `require_cpu_backend`.
"""
import contextlib
import importlib.util
import os
import pathlib
import re
import warnings

import jax

from meshtrain import hardware, jax_private

TRIED = "0.10.2, 0.11.2 and 0.12"     # tests/run/test_versions.py
FAULT_CHARACTERS = 300      # most characters of XLA's message, which may repeat the whole instruction
MAX_GPUS = 65536  # assumption: beyond what anyone inspects; 16,384 was compiled


def targets() -> list[str]:
    """Return the names of the GPUs that XLA can compile for here: the GPUs whose chip is in the hardware table."""
    return [name for name, gpu in hardware.GPUS.items() if gpu.can_be_compiled_for]


def target_spec(name: str) -> str:
    """Return XLA's GpuTargetConfigProto of a GPU, as text.

    The number of NVLinks is omitted. With it, the compiler of jax 0.12 uses a kernel for small all-reduces that it
    fails to compile for a scalar ("size mismatch when packing elements for LLVM struct"), and it aborts the process.
    """
    gpu = hardware.get(name)
    chip = gpu.chip
    assert chip is not None and chip.compute_capability is not None
    # sm_90a, not sm_90: warp-group matmuls
    features = "ACCELERATED_FEATURES" if chip.compute_capability >= 9 else "NONE"
    return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {chip.compute_capability} feature_extension: {features} }}
  core_count: {chip.num_sms}
  fpus_per_core: {chip.fpus_per_core}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {gpu.hbm_bytes}
  memory_bandwidth: {gpu.hbm_bytes_per_s:.0f}
  l2_cache_size: {chip.l2_bytes}
  shared_memory_per_core: {chip.shared_bytes_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_bytes_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.device_kind}"
"""


def parse_topology(text: str) -> tuple[str, int]:
    """Parse 'h100:64' into ('h100', 64). Needs no GPU software. Raises: ValueError for an unknown GPU or an invalid
    count."""
    name, colon, count = text.partition(":")
    if not colon or not re.fullmatch(r"[0-9]+", count):
        raise ValueError(f"topology {text!r} must be NAME:N, a GPU and a number of GPUs, e.g. h100:64")
    gpu, num_gpus = hardware.get(name), int(count)
    if not gpu.can_be_compiled_for:
        raise ValueError(f"programs for {name!r} cannot be compiled; use one of {', '.join(targets())}")
    if not 1 <= num_gpus <= MAX_GPUS:
        raise ValueError(f"topology {text!r}: the number of GPUs must be 1 to {MAX_GPUS}")
    host = gpu.gpus_per_host
    if num_gpus > host and num_gpus % host:
        below, above = num_gpus // host * host, -(-num_gpus // host) * host
        raise ValueError(
            f"topology {text!r}: hosts of {name} hold {host} GPUs, and {num_gpus} does not fill them; use {below} or "
            f"{above}"
        )
    return name, num_gpus


def topology(name_and_count: str) -> list:
    """Return devices that describe absent GPUs, for a mesh to compile for. Puts jax on its CPU backend.

    name_and_count: for example 'h100:64'. Fewer GPUs than a host has are one smaller host. Raises: ValueError for an
    unknown name or number, or missing wheels.
    """
    name, num_gpus = parse_topology(name_and_count)
    if missing := missing_wheels():
        raise ValueError(f"compiling for {name} needs {' and '.join(missing)}: "
                         "run pip install -e '.[gpu-compile]' in a checkout of meshtrain")
    require_cpu_backend()
    # jax keeps these programs, cannot load them again without a GPU, and compiles anew
    warnings.filterwarnings("ignore", message="Error reading persistent compilation cache.*PjRtCompiler must be")
    from jax.experimental import topologies  # unstable API: only here

    per_host = min(num_gpus, hardware.get(name).gpus_per_host)
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name=name,
        topology=f"1x{num_gpus // per_host}x{per_host}",  # partitions × hosts × GPUs
        target_config=target_spec(name),
    )
    return list(description.devices)


class NotCompiledError(RuntimeError):
    """XLA cannot compile a program for the described GPUs."""


@contextlib.contextmanager
def naming_faults(what: str):
    """Turn an error that XLA's compiler raises inside the context into a NotCompiledError, and that of jax about Python
    functions which absent GPUs would call. what: the name of the program, for the message."""
    try:
        yield
    except RuntimeError as error:
        message = " ".join(str(error).split())
        if "Unknown backend: 'gpu'" in message:     # jax looks for the process that would run the function
            raise NotCompiledError(
                f"{what}: a call of a Python function on the host (jax.debug.print, jax.debug.callback, "
                f"jax.pure_callback, io_callback) cannot be compiled for absent GPUs; leave it out") from None
        if not isinstance(error, jax.errors.JaxRuntimeError):
            raise
        cut = message[:FAULT_CHARACTERS] + " …" * (len(message) > FAULT_CHARACTERS)
        flags = " ".join(re.findall(r"--xla_gpu\S*", os.environ.get("XLA_FLAGS", "")))
        raise NotCompiledError(
            f"XLA of jax {jax.__version__} cannot compile {what}: {cut}; "
            + ("leave this option out" if "No such compile option" in message else
               (f"leave {flags} out of XLA_FLAGS, or " if flags else "")
               + f"use another version of jax ({TRIED} were tried), another mesh or another rule file")) from None


def require_cpu_backend() -> None:
    """Put jax on its CPU backend if no backend has started. Raises: ValueError if another backend has started.

    With no platform chosen, jax tries the CUDA plugin, fails without a driver and then knows no GPU topologies.
    """
    if not jax_private.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    elif (jax.config.jax_platforms or "").split(",")[0] != "cpu":
        raise ValueError(
            f"jax already runs on its {jax.default_backend()!r} backend, chosen by jax_platforms="
            f"{jax.config.jax_platforms!r}; to compile for GPUs start with JAX_PLATFORMS=cpu"
        )


def missing_wheels() -> list[str]:
    """List the missing wheels that compiling for GPUs needs.

    ptxas and libdevice must come from wheels. A CUDA toolkit on the developer's machine would hide that they are
    missing until the program runs on a machine without one.
    """
    plugins = [v for v in ("12", "13") if _find(f"jax_plugins.xla_cuda{v}")]
    if not plugins:
        return ["the CUDA plugin of jax (jax-cuda12-plugin or jax-cuda13-plugin)"]
    package, nvcc, nvvm = {
        "12": ("nvidia.cuda_nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc-cu12"),
        "13": ("nvidia.cu13", "nvidia-cuda-nvcc", "nvidia-nvvm"),
    }[plugins[-1]]
    roots = _find(package)
    if not any((root / "bin" / "ptxas").is_file() for root in roots):
        return [f"ptxas ({nvcc})"]
    if not any((root / "nvvm" / "libdevice" / "libdevice.10.bc").is_file() for root in roots):
        return [f"libdevice ({nvvm})"]
    return []


def _find(module: str) -> list[pathlib.Path]:
    """Return the folders of an installed package without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return []
    return [pathlib.Path(p) for p in spec.submodule_search_locations or ()] if spec else []
