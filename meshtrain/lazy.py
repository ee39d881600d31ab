"""Modules that are imported when one of their names is first used.

For libraries that few runs need: Pallas's GPU dialects on a CPU, the checkpoint library before the first checkpoint.
`tests/whole/test_start.py` names what the command train may import.
"""
from __future__ import annotations

import importlib
from typing import Any


class Module:
    """A module that is imported at the first use of one of its names. Raises: ImportError, at that use."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


plgpu = Module("jax.experimental.pallas.mosaic_gpu")    # kernels of Hopper GPUs
triton = Module("jax.experimental.pallas.triton")       # kernels of GPUs
ocp = Module("orbax.checkpoint")                        # saves and restores
