"""Modules that are imported when one of their names is first used.

For libraries that few runs need: Pallas's GPU dialects on a CPU, the checkpoint library before the first checkpoint.
`tests/whole/test_start.py` names what the command train may import.
"""
from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule:
    """A module that is imported at the first use of one of its names. Raises: ImportError, at that use."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(self), name)


def load(module: LazyModule) -> None:
    """Import the module now. This is not a method, because a method would hide the module's own `load`."""
    _load(module)


def _load(module: LazyModule) -> ModuleType:
    return importlib.import_module(module._name)


plgpu = LazyModule("jax.experimental.pallas.mosaic_gpu")    # kernels of Hopper GPUs
triton = LazyModule("jax.experimental.pallas.triton")       # kernels of GPUs
ocp = LazyModule("orbax.checkpoint")                        # saves and restores
