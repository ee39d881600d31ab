"""Versions of software that are known to compute wrong numbers or to hang.

A run with a version that computes wrong numbers is refused. A version that hangs causes a warning, because the watchdog
ends a hang. One table has a row with its source for each. Versions are looked up only for rows whose facts hold.
"""
from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import operator
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Set
from pathlib import Path

import jax

from meshtrain.config import ConfigError, Run
from meshtrain.kernels import mosaic

# Facts about a process that a row may require.
GPUS, PROCESSES, MOSAIC = "GPUs", "several processes", "Mosaic kernels"


@dataclasses.dataclass(frozen=True)
class KnownBad:
    """A row of the table. component: a key of FINDERS. bad: its bad versions, in pip's syntax. facts: the facts that
    must all hold for the row to apply; the result of `platform.machine` is a fact, too. wrong: whether the component
    computes wrong numbers, so that the run is refused."""
    component: str
    bad: str
    facts: frozenset[str]
    effect: str
    remedy: str
    source: str
    wrong: bool


TABLE = (
    KnownBad("jax", ">=0.11.0,<0.11.2", frozenset({GPUS}), "single operations give wrong results on GPUs",
        "install jax 0.11.2 or newer, or 0.10.2", "jax-ml/jax#40633", True),
    KnownBad("ptxas", "<12.9.86", frozenset({GPUS, MOSAIC}), "causal masks of Mosaic kernels are miscompiled",
        'install CUDA 12.9.1 or newer (nvidia-cuda-nvcc-cu12>=12.9.86) and remove older versions of ptxas from PATH, '
        'or set model.attention = "pallas" and leave model.mlp out',
        "jax's own attention_mgpu.py rejects them", True),
    KnownBad("NCCL", "<2.29.3", frozenset({GPUS, PROCESSES, "aarch64"}),
        "its proxy loses slots: a run hangs with all GPUs busy until training.step_timeout_s ends it",
        'reinstall it after torch, which pins an older one: pip install "nvidia-nccl-cu13>=2.29.3" (for CUDA 12: '
        'cu12)',
        "marin-community/marin#7344", False),
)


def facts_of(run: Run, num_processes: int) -> frozenset[str]:
    """Return the facts of a process with GPUs. The type of GPU is not known yet, so packed documents count as a use of
    Mosaic kernels if model.attention="auto" may choose them."""
    several = {PROCESSES} if num_processes > 1 else set()
    auto = run.model.attention == "auto" and run.data.document_mask and jax.__version_info__ >= mosaic.AUTO_SINCE
    asked = {MOSAIC} if auto or "mosaic" in (run.model.attention, run.model.mlp) else set()
    return frozenset({GPUS, platform.machine()} | several | asked)


def check(facts: Set[str], version: Callable[[str], str] | None = None) -> list[str]:
    """Return warnings about versions that hang. version: component -> its version, "" if absent; default:
    `read_version`.

    Raises: ConfigError for versions that compute wrong numbers.
    """
    version = version or read_version
    wrong: list[str] = []
    warnings: list[str] = []
    for row in TABLE:
        if row.facts <= facts and _is(there := version(row.component), row.bad):
            message = f"{row.component} {there}: {row.effect} ({row.source}); {row.remedy}"
            (wrong if row.wrong else warnings).append(message)
    if wrong:
        raise ConfigError(*wrong)
    return warnings


def read_version(component: str) -> str:
    """Return the installed version of a component; "" if absent."""
    return FINDERS[component](os.environ)


def _is(version: str, bad: str) -> bool:
    """Return whether a version is in a range: "<2.29.3", ">=0.11.0,<0.11.2"."""
    compare = {"<": operator.lt, ">=": operator.ge}
    return version != "" and all(compare[limit.rstrip(".0123456789")](_numbers(version), _numbers(limit))
                                 for limit in bad.split(","))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _of_package(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _nccl(environ: Mapping[str, str]) -> str:
    """Return the version of NCCL: of the library in LD_LIBRARY_PATH, else of the wheel; "" if unknown."""
    for folder in filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")):
        library = Path(folder) / "libnccl.so.2"
        if library.exists():
            match = re.search(r"\.so\.(\d+\.\d+\.\d+)$", library.resolve().name)
            return match[1] if match else ""
    cuda13 = importlib.util.find_spec("jax_cuda13_plugin")
    return _of_package(*(f"nvidia-nccl-cu{cuda}" for cuda in ((13, 12) if cuda13 else (12, 13))))


def _ptxas(environ: Mapping[str, str]) -> str:
    """Return the version of the ptxas that XLA uses: from PATH, the CUDA toolkit, or the wheel; "" if unknown."""
    places = [shutil.which("ptxas", path=environ.get("PATH")), "/usr/local/cuda/bin/ptxas"]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        places += [str(path) for name in ("cu13", "cuda_nvcc") for path in Path(folder).glob(f"{name}/bin/ptxas")]
    for place in places:
        if place and os.access(place, os.X_OK):
            try:
                printed = subprocess.run([place, "--version"], capture_output=True, text=True, timeout=30).stdout
            except (OSError, subprocess.SubprocessError):
                continue
            match = re.search(r"\bV(\d+\.\d+\.\d+)", printed)
            return match[1] if match else ""
    return ""


FINDERS: dict[str, Callable[[Mapping[str, str]], str]] = {
    "jax": lambda environ: _of_package("jax"), "NCCL": _nccl, "ptxas": _ptxas}
