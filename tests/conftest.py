"""Eight simulated CPU devices for every test; the flags must stand before jax starts its backend.

Grids (`pytest.mark.grid` beside `slow`): of each file's cells a few run in every run of the suite, by the commit's
hash; the summary names them. `-m slow --slow-minutes N` takes slow tests in an order of the commit's own until the time
is up.
"""
import contextlib
import importlib.metadata
import os
import signal
import time

os.environ["JAX_PLATFORMS"] = "cpu"
# The default CPU scheduler can deadlock programs whose collectives are independent of one another.
# Without LLVM's optimizations and the newer fusion emitters programs compile in a fifth of the time and run slower;
# partitioning and memory plans stay as they are. jax 0.11 has those emitters alone, and aborts at a flag that it lacks.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_force_host_platform_device_count=8", "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_backend_optimization_level=0",
    *(["--xla_cpu_use_fusion_emitters=false"] if importlib.metadata.version("jaxlib") < "0.11" else []),
    # Sums of products that are fused are wrong, or crash, on some CPUs (devices.ON_CPUS).
    *(["--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"]
      if importlib.metadata.version("jaxlib") < "0.12" else [])])
# With one thread a device, collectives under way together can block every thread of the pool.
os.environ["NPROC"] = "32"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")      # an installed CUDA plugin reports that there is no GPU

# Of a suite in the background the shell has them ignored, and so would the processes that tests stop by them.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

import pytest  # noqa: E402
import sampling  # noqa: E402
from kept_programs import PROGRAMS, PROGRAMS_BYTES, programs_in, trim  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("no deadline", deadline=None)     # how busy the machine is says nothing about the code
settings.load_profile("no deadline")

CELLS_OF_A_FILE = 1
# The longest first.
LONG = [f"test_{name}.py" for name in (
    "parity", "gpu_program", "rl", "generate", "several_processes", "context", "gpu_pipeline", "stops", "advised",
    "experts", "pipeline", "samplers", "recurrence_pallas", "gpu_experts", "fuzz", "commands", "recurrence_context",
    "search", "layouts", "first_light", "dpo_runs", "fault_table", "beside", "float8", "collective_order")]
STARTED = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--slow-minutes", type=float,
                     help="begin no test once this many minutes have passed, but those marked first")


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        trim(PROGRAMS, PROGRAMS_BYTES)
        return
    kept = contextlib.ExitStack()
    config.add_cleanup(kept.close)
    kept.enter_context(programs_in(
        str(PROGRAMS), jax_compilation_cache_include_metadata_in_key=True,
        jax_persistent_cache_min_compile_time_secs=0.1))


def pytest_report_header():
    return f"random draws and cells of grids: by commit {sampling.commit()[:12]}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    files = {}
    for item in items:
        if item.get_closest_marker("grid"):
            files.setdefault(item.path, []).append(item)
    for path, cells in files.items():
        for item in sampling.generator(path.name).sample(cells, min(CELLS_OF_A_FILE, len(cells))):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
            item.user_properties.append(("sampled", True))
    # A file goes to one worker: what takes minutes begins first.
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if config.option.slow_minutes:
        order = sampling.generator("slow")
        rank = {id(item): (not item.get_closest_marker("first"), order.random()) for item in items}
        items.sort(key=lambda item: rank[id(item)])


def pytest_runtest_setup(item):
    minutes = item.config.option.slow_minutes
    if minutes and time.monotonic() - STARTED > 60 * minutes and not item.get_closest_marker("first"):
        pytest.skip("the time for slow tests is up")


def pytest_terminal_summary(terminalreporter):
    sampled = [f"{outcome:8} {report.nodeid}" for outcome in ("passed", "failed", "skipped")
               for report in terminalreporter.getreports(outcome)
               if ("sampled", True) in getattr(report, "user_properties", ())
               and (report.when == "call" or outcome != "passed")]
    if sampled:
        terminalreporter.section("cells of grids in this run")
        for line in sampled:
            terminalreporter.write_line(line)
