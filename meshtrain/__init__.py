"""meshtrain: decoder-only language models on a five-axis device mesh.

`import meshtrain as mt` gives the Python interface (`meshtrain.interface`, docs/python.md): `mt.Experiment`,
`mt.compare`, `mt.plan`, `mt.inspect` and what else `dir(mt)` lists. It imports nothing before one of them is used,
starts no backend and sets no flag.

jax reports with a traceback that its CUDA plugin, which compiles for GPUs, finds no CUDA. On a machine without a GPU
that means nothing, and is not shown.
"""
import importlib
import logging
import os
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtrain.interface import (
        ConfigError, Experiment, Rules, bars, check_answer, compare, curves, inspect, mesh, plan, prove, schedule,
        shards, simulate, size,
    )  # fmt: skip

__version__ = "0.1.0"
__all__ = [
    "ConfigError", "Experiment", "Rules", "bars", "check_answer", "compare", "curves", "inspect", "mesh", "plan",
    "prove", "schedule", "shards", "simulate", "size",
]  # fmt: skip


# Of NVIDIA's driver: its device, the kernel's module (also where a container hides the device), the driver under WSL.
GPU_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of jax's log says more than that a machine without a GPU has none."""
    text = record.getMessage()
    return not (text.startswith("Jax plugin configuration error") and "xla_cuda" in text) or any(
        map(os.path.exists, GPU_DRIVER))


logging.getLogger("jax._src.xla_bridge").addFilter(_is_news)


class _Package(types.ModuleType):
    """This package. The first import of a submodule binds it to its name in the package; a function of the interface
    keeps its name: after `import meshtrain.plan` too, `mt.plan` is the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'meshtrain' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module("meshtrain.interface"), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
