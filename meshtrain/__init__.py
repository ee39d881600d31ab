"""meshtrain: decoder-only language models on a five-axis device mesh.

`import meshtrain as mt` gives the Python interface (`meshtrain.interface`, docs/python.md): `mt.Experiment`,
`mt.compare`, `mt.plan`, `mt.inspect` and the other names in `dir(mt)`. The import itself imports no other module of
meshtrain and no jax; the first use of one of these names imports them.

On a machine without a GPU, jax logs a traceback because its CUDA plugin (used to compile for GPUs) finds no CUDA. The
import adds a filter that hides this log line.
"""
import importlib
import logging
import os
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtrain.interface import (
        ConfigError, Experiment, Layout, Rules, Stack, bars, check_answer, compare, curves, fit, inspect, mesh,
        pipeline, plan, prove, ring_attention, schedule, shards, simulate, size, token_order, unpack,
    )  # fmt: skip

__version__ = "0.1.0"
__all__ = [
    "ConfigError", "Experiment", "Layout", "Rules", "Stack", "bars", "check_answer", "compare", "curves", "fit",
    "inspect", "mesh", "pipeline", "plan", "prove", "ring_attention", "schedule", "shards", "simulate", "size",
    "token_order", "unpack",
]  # fmt: skip


# Files of NVIDIA's driver: its device, its kernel module (if a container hides the device), the driver under WSL.
GPU_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for jax's log line about a CUDA plugin without CUDA on a machine without a GPU, else True."""
    text = record.getMessage()
    return not (text.startswith("Jax plugin configuration error") and "xla_cuda" in text) or any(
        map(os.path.exists, GPU_DRIVER))


logging.getLogger("jax._src.xla_bridge").addFilter(_is_news)


class _Package(types.ModuleType):
    """The class of this package, which keeps the names of the interface. By default, `import meshtrain.plan` would bind
    `mt.plan` to the submodule. With this class, `mt.plan` stays the function."""

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
