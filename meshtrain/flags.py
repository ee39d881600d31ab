"""XLA flags for the programs of a run, in one table with the evidence for each flag.

A program gets the flags whose condition holds, except those that the user sets in XLA_FLAGS and those that the
installed XLA does not know. Flags without evidence have the condition NEVER; `benchmarks.gpu` times them and compares
losses. Flags that are set before jax starts are in `devices`.
"""
from __future__ import annotations

import dataclasses
import functools
import importlib.util
import mmap
import os
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

JAXLIB = "libjax_common.so"
# XLA silently recomputes values if a program needs more than this share of a GPU's memory; its flag is a percentage of
# this share. Example: Llama 3 8B without remat on 16 A100 needs 68 of 73 GiB. By the roofline a step takes 10.8 s, and
# 8.9 s if the limit is the memory of the process.
MEMORY_SHARE = 0.80
# Conditions. SEVERAL: the run has stages or experts. CUBLAS: no axis splits a layer's matmuls or tokens, and there are
# no experts; or a dot can request float8 by its algorithm (`float8.precision`). DECODING: the program samples tokens.
# PROFILED: it is compiled with a profile of its instructions (`profile_options`). DEVICELESS: it is compiled for GPUs
# that the machine does not have. DEVICELESS_11: the same with jax 0.11. EXPERTS_OLD: the run has experts, and jax is
# older than 0.11.
ALWAYS, DETERMINISTIC, SEVERAL, EXPERTS_OLD, OFFLOAD, CUBLAS, DECODING, PROFILED, DEVICELESS, DEVICELESS_11, NEVER = (
    "always", "deterministic", "several", "experts_old", "offload", "cublas", "decoding", "profiled", "deviceless",
    "deviceless_11", "never")
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
OPTIMIZATION = "xla_backend_optimization_level"


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of XLA. value: the flag's value for programs for which the condition `when` holds; if two rows apply, the
    later row wins. default: XLA's value. since: the oldest tested jax that knows the flag (0.10 is the oldest
    tested)."""
    name: str
    value: bool | int | str
    when: str
    default: str
    since: str
    why: str
    source: str


ROOFLINE = "roofline of the compiled program"
ON_GPUS = (
    Flag("xla_gpu_enable_latency_hiding_scheduler", True, ALWAYS, "false", "0.10",
         "overlaps collectives with the matmuls that do not need them", "XLA"),
    Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", 2**20, ALWAYS, "30 MiB", "0.10",
         "reduce-scatters of weights are not merged into one that waits for the last: llama3-70b, tensor 8 × "
         "fsdp 8 on 64 H100, 24.7 to 24.2 s; elsewhere no change. Tried and left out: pipelined all-gathers "
         "(8B 7.7 to 8.5 s, 70B 24.7 to 25.7), the same threshold for all-gathers (0.3%), the analytical "
         "latency estimator (none)", ROOFLINE),
    Flag("xla_disable_hlo_passes", "all-gather-to-collective-permute-simplifier", ALWAYS, "none", "0.10",
         "the pass rewrites gather + slice into a permute that can have no pairs and then outputs zeros",
         "openxla/xla#45218, #47083"),
    Flag(MEMORY_LIMIT, 100, ALWAYS, "95", "0.10",
         "XLA recomputes above the memory that the process takes, not above 80% of a GPU; the value follows its share",
         ROOFLINE),
    Flag(OVERLAP, 4, SEVERAL, "1", "0.10",
         "F, B and W of a layer can overlap, and so can experts' gradients and the exchange of tokens; with one "
         "collective at a time, an urgent collective waits for one that is not. llama3-70b-pipeline on 64 H100: one "
         "collective 19.8 s, two 19.2, four or eight 18.9. Qwen3-30B-A3B's layers on 8 H200, zero3_experts_fsdp, data "
         "4: 460 ms, with four 446; zero3 470 and 471. Runs without stages and experts became slower (llama3-70b 22.9 "
         "to 23.5 s, llama3-8b 7.7 to 7.9)", ROOFLINE),
    Flag("xla_gpu_enable_analytical_sol_latency_estimator", False, EXPERTS_OLD, "true", "0.10",
         "jax 0.10 starts the traffic of experts too late by these estimates: qwen3-30b-a3b-64 on 64 H100 2.86 to 2.70 "
         "s, qwen3-30b-a3b on 8 H200 4.61 to 4.49, Mixtral and gpt-oss 0.6 to 0.8%. Slower without experts (llama3-8b "
         "on 8 H100 6.62 to 6.74 s, llama3-70b 20.2 to 21.3) and with jax 0.12 (Qwen 2.53 to 2.59)", ROOFLINE),
    Flag("xla_gpu_enable_pipelined_host_offloading", True, OFFLOAD, "false", "0.10",
         "a layer's input is copied back from the host during the backward of the following layer, not just before its "
         "own first matmul; the device holds one more layer input", "openxla/xla#32297"),
    Flag(OVERLAP, 1, OFFLOAD, "1", "0.10",
         "also with experts: copies to the host, the latency-hiding scheduler and a higher limit are reported to "
         "corrupt training together, though no two of them do (on GB200; not reproduced). A step slows from 446 to 460 "
         "ms",
         "marin-community/marin, experiments/grug/moe_hero_ep"),
    Flag("xla_gpu_deterministic_ops", True, DETERMINISTIC, "false", "0.10",
         "scatters add in a fixed order (the embedding's gradient: sorted first)", "XLA"),
    Flag("xla_gpu_exclude_nondeterministic_ops", True, DETERMINISTIC, "false", "0.10",
         "no kernel with atomics is taken", "XLA"),
    Flag("xla_gpu_autotune_level", 0, DETERMINISTIC, "4", "0.10",
         "kernels are not chosen by timing: two compilations may choose different kernels, which add in different "
         "orders", "XLA"),
    Flag("xla_gpu_autotune_level", 0, DEVICELESS, "4", "0.10",
         "jax 0.12 compiles the autotuner's candidates even where no GPU can time them: llama3-70b for 64 H100 takes "
         "18 s on two CPU cores, 9 s without them, and the program is the same; with jax 0.10 no change", "measured"),
    Flag("xla_gpu_enable_triton_gemm", False, DEVICELESS_11, "true", "0.10",
         "without the autotuner's candidates XLA of jax 0.11.2 has no configuration of a Triton matmul and fails (\"No "
         'supported config found") in nearly every program with stages; XLA of 0.10.2 and 0.12 has one. With '
         "candidates, llama3-70b-pipeline for 64 H100 compiled for more than 12 minutes on two busy CPU cores; with "
         "cuBLAS's matmuls, for 38 s", "measured"),
    # jax 0.12 finds no Triton configuration without timing.
    *(Flag("xla_gpu_enable_triton_gemm", False, when, "true", "0.10",
           "cuBLAS adds a summand (other products of one gradient, the residual stream) within the matmul: llama3-8b "
           "on 8 H100 7.15 to 7.07 s. With tensor 8, more of that axis' traffic is exposed (llama3-70b: 4.3 to 6.8%)",
           ROOFLINE) for when in (DETERMINISTIC, CUBLAS)),
    Flag("xla_gpu_dot_merger_threshold_mb", 0, DECODING, "32", "0.10",
         "keeps XLA from merging matmuls that share their input: in decoding it would concatenate the weights of "
         "queries, keys and values, and of gate and up, for every token and layer, which triples their bytes (Llama "
         "3.2 1B, 64 slots: 2.5 GB more a token)", ROOFLINE),
    Flag(PROFILE, "", PROFILED, "none", "0.10",
         "the latency-hiding scheduler takes the seconds of kernels and collectives from the roofline instead of its "
         "own estimates, which gather all of a layer's matrices before its first matmul: llama3-8b, zero3 on 64 H100: "
         "from 966 ms, 158 of them waiting for links, to 904, 57 waiting; 70B, tensor 8 × fsdp 8 on H200: 17.9 to 17.3 "
         "s", ROOFLINE),
    Flag("xla_gpu_pgle_accuracy_checker", "PGLE_STRICTNESS_LEVEL_OFF", PROFILED, "..._WARN", "0.10",
         "no line for each instruction that takes no time", "XLA"),
    # Reported by others; off until they are timed on a GPU.
    Flag("xla_gpu_experimental_enable_nccl_symmetric_buffers", True, NEVER, "false", "0.10",
         "NCCL's symmetric kernels: 8B, +7% in bfloat16, +8% in float8, as reported; needs NCCL 2.27, and "
         "buffers of its own", "openxla/xla#36462"),
    Flag("xla_gpu_enable_command_buffer", "", NEVER, "a set without COLLECTIVES", "0.10",
         "none, to time XLA's default set against it: kernels start as CUDA graphs, 16.47 to 16.20 s on GB200. With "
         "COLLECTIVES it hung at step 838, and collectives no longer overlap, so no row adds them",
         "marin-community/marin#8277, #5675; openxla/xla#48900"),
    Flag("xla_gpu_experimental_parallel_scale_up_collective_overlap_limit", 2, NEVER, "1", "0.12",
         "collectives over NVLink and over the network each have a limit", "openxla/xla#47467"),
    Flag("xla_gpu_experimental_enable_selective_memcpy_overlap", True, NEVER, "false", "0.12",
         "1 to 5% of a step where copies of dynamic-update-slice show, as reported", "openxla/xla#46151"),
    Flag("xla_gpu_enable_pdl_launch", True, NEVER, "false", "0.12",
         "a kernel's start overlaps the end of the one before: 1%, as reported", "openxla/xla#38544, #45001"),
)


def options(platform: str, facts: Set[str] = frozenset(), memory_share: float = MEMORY_SHARE,
            environ: Mapping[str, str] = os.environ) -> dict[str, bool | int | str]:
    """Return the XLA options of the programs of a run. platform: jax's name of the platform. facts: conditions that
    hold besides ALWAYS. memory_share: share of a GPU's memory that the process uses."""
    if platform == "cpu":
        return _choose_for_cpus(environ)
    chosen = _choose({ALWAYS, *facts}, environ)
    if MEMORY_LIMIT in chosen:
        chosen[MEMORY_LIMIT] = round(100 * memory_share / MEMORY_SHARE)
    return chosen


def _choose_for_cpus(environ: Mapping[str, str]) -> dict[str, bool | int | str]:
    """Return LLVM's optimization level 1, unless XLA_FLAGS sets a level.

    Against the default, 3, the step of the quickstart compiles in 5.1 instead of 6.4 CPU seconds with jax 0.12 (6.2
    instead of 7.5 with 0.10.2), in bfloat16 in 6.0 instead of 10.3, and takes as long (with 0.10.2 in bfloat16 7%
    longer): its time is in the matmuls of a library. Level 2 is no faster than 1. Level 0 compiles faster still, but
    its loops run five times as long.
    """
    given = re.search(rf"(?:^|\s)--{OPTIMIZATION}\b", environ.get("XLA_FLAGS", ""))
    return {} if given else {OPTIMIZATION: 1}


def profile_options(file: Path, environ: Mapping[str, str] = os.environ) -> dict[str, bool | int | str]:
    """Return the options that add a profile (`cost.program.scheduling`) to a compilation; none if XLA_FLAGS already
    names a profile, or the installed XLA does not support it. file: the profile."""
    chosen = _choose({PROFILED}, environ)
    return chosen | {PROFILE: str(file)} if PROFILE in chosen else {}


def _choose(conditions: Set[str], environ: Mapping[str, str]) -> dict[str, bool | int | str]:
    users = set(re.findall(r"(?:^|\s)--(\w+)", environ.get("XLA_FLAGS", "")))
    return {flag.name: flag.value for flag in ON_GPUS
            if flag.when in conditions and flag.name not in users and is_known(flag.name)}


def is_known(name: str) -> bool:
    """Return whether the installed XLA knows a flag of the table; True if its libraries are not found."""
    libraries = xla_libraries()
    return not libraries or name in _find_known_of_table(tuple(libraries))


@functools.cache
def _find_known_of_table(libraries: tuple[Path, ...]) -> set[str]:
    return find_known([flag.name for flag in ON_GPUS], libraries)


def find_known(names: Sequence[str], libraries: Sequence[Path] | None = None) -> set[str]:
    """Return the given flags that all XLA libraries know (jaxlib and the GPU plugin, which both read XLA_FLAGS).

    libraries: their paths; None: the installed libraries. XLA has no interface that lists its flags, so the bytes of
    the libraries are searched for the names, in 0.3 s.
    """
    libraries = xla_libraries() if libraries is None else libraries
    known = set(names) if libraries else set()
    for library in libraries:
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
            known = {name for name in known if code.find(name.removeprefix("--").encode() + b"\0") >= 0}
    return known


def xla_libraries() -> list[Path]:
    """Return the paths of the installed XLA libraries."""
    paths: list[Path] = []
    for package, pattern in (("jaxlib", JAXLIB), ("jax_plugins", "xla_*/xla_*_plugin.so")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            paths += Path(folder).glob(pattern)
    return paths
