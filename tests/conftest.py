"""Eight simulated CPU devices for every test; the flags must stand before jax starts its backend."""
import contextlib
import gc
import importlib.metadata
import os
import signal
import sys
from pathlib import Path

# Bytecode is kept, whatever the environment says: hundreds of processes import the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["JAX_PLATFORMS"] = "cpu"
# The default CPU scheduler can deadlock programs whose collectives are independent of one another.
# Without LLVM's optimizations and the newer fusion emitters programs compile in a fifth of the time and run slower;
# partitioning and memory plans stay as they are. jax 0.11 has those emitters alone, and aborts at a flag that it lacks.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_force_host_platform_device_count=8", "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",     # a small program compiles in two thirds of the CPU time
    *(["--xla_cpu_use_fusion_emitters=false"] if importlib.metadata.version("jaxlib") < "0.11" else []),
    # Sums of products that are fused are wrong, or crash, on some CPUs (devices.ON_CPUS).
    *(["--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"]
      if importlib.metadata.version("jaxlib") < "0.12" else [])])
# With one thread a device, collectives under way together can block every thread of the pool.
os.environ["NPROC"] = "32"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")      # an installed CUDA plugin reports that there is no GPU
# What tests start on loopback is asked directly, behind a proxy, too.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))

# Of a suite in the background the shell has them ignored, and so would the processes that tests stop by them.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

import pytest  # noqa: E402
import sampling  # noqa: E402
import sources  # noqa: E402
import tiers  # noqa: E402
import workers  # noqa: E402
from kept_programs import GPU_PROGRAMS, PROGRAMS, PROGRAMS_BYTES, gpu_programs_in, programs_in, trim  # noqa: E402
from hypothesis import settings  # noqa: E402

# How busy the machine is says nothing about the code. A tree that passed passes again: `pytest --long` alone draws anew.
settings.register_profile("drawn anew", deadline=None)
settings.register_profile("the same draws", deadline=None, derandomize=True)

# The longest first.
LONG = [f"test_{name}.py" for name in (
    "soak", "many_processes", "slurm", "faults", "notebooks",
    "cells", "supervise", "commands", "checkpoint", "watch", "disturbed", "rl", "generate", "mistakes",
    "gpu_formulas", "gpu_programs", "samplers", "recurrence", "several_processes", "stops", "advised", "experts",
    "launchers", "chat", "export", "recurrence_pallas", "fuzz", "recurrence_context", "search",
    "first_light", "dpo_runs", "fault_table", "float8")]
MOST_WORKERS = 8
# A worker that is larger forgets the programs of the files before, which take gigabytes by the end of the suite. It forgets
# again when it has grown by half of this: what is left after the first time does not shrink.
MOST_BYTES = 2 << 30
most_bytes = MOST_BYTES


def pytest_addoption(parser):
    tiers.add_options(parser)


def pytest_configure(config):
    settings.load_profile("drawn anew" if config.option.long else "the same draws")
    config.pluginmanager.register(tiers.Selection(config), "tiers")
    config.pluginmanager.register(workers, "workers")
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        trim(PROGRAMS, PROGRAMS_BYTES)
        trim(GPU_PROGRAMS, PROGRAMS_BYTES)
        return
    import_jax_in_silence()
    kept = contextlib.ExitStack()
    config.add_cleanup(kept.close)
    kept.enter_context(programs_in(
        str(PROGRAMS), jax_compilation_cache_include_metadata_in_key=True,
        jax_persistent_cache_min_compile_time_secs=0.1))
    kept.enter_context(gpu_programs_in(GPU_PROGRAMS))


def import_jax_in_silence() -> None:
    """A CUDA plugin writes to stderr while it is loaded, whatever the settings, that there is no GPU."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        import jax
        jax.devices()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def pytest_xdist_auto_num_workers():
    """Of `-n auto`: three for two cores that this process may use, as a fifth of the time is waits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + (cores + 1) // 2, MOST_WORKERS)


def pytest_report_header():
    return f"random draws: by commit {sampling.commit()[:12]}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # A file goes to one worker: what takes minutes begins first.
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish():
    """What is there by now stays: no collection of garbage goes through it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path.parent != item.path.parent:
        sources.forget()
    global most_bytes
    if nextitem is not None and nextitem.path != item.path and "jax" in sys.modules and resident_bytes() > most_bytes:
        sys.modules["jax"].clear_caches()
        gc.collect()
        most_bytes = max(MOST_BYTES, resident_bytes() + MOST_BYTES // 2)


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
