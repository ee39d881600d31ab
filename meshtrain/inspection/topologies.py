"""The devices and the mesh of a run on named GPUs (`h100:64`), which this machine need not have."""
from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax

from meshtrain import config, devices, hardware
from meshtrain.config import Run
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.run import say
from meshtrain.sharding.mesh import MeshSpec


def find_devices(run: Run, topology: str) -> Sequence[jax.Device]:
    """Return the devices of `GPU:N` to compile for; this machine need not have them. Raises: ConfigError."""
    devices.own_flags(os.environ)
    devices.own_settings_told(os.environ)
    with config.user_errors(), say.without_noise():
        _sizes(run, topology)
        return gpu_compile.topology(topology)


def _sizes(run: Run, topology: str) -> dict[str, int]:
    name, count = gpu_compile.parse_topology(topology)
    return config.mesh_sizes(run, count, enough=f"--topology {name}:{{}}")


def resolve_layout(run: Run, topology: str | None) -> tuple[Run, MeshSpec, str, hardware.Gpu | None]:
    """Return (the run with its layout resolved, mesh, jax's platform name, GPU) for `GPU:N` or, if topology is None,
    for this machine.

    The GPU is None if its speed is unknown. Starts devices only if their number is needed. Raises: ConfigError.
    """
    platform, gpu = "cpu", None
    sizes = asked = {axis: getattr(run.mesh, axis) for axis in config.AXES}
    with config.user_errors():
        if topology is not None:
            platform, gpu = "gpu", hardware.get(gpu_compile.parse_topology(topology)[0])
            sizes = _sizes(run, topology)
        elif run.mesh.simulated_devices and -1 in asked.values():
            sizes = config.mesh_sizes(run, run.mesh.simulated_devices)
        elif -1 in asked.values() or not run.mesh.simulated_devices and devices.gpus_expected():
            started = devices.start(run)
            platform, gpu = started[0].platform, hardware.from_device_kind(started[0].device_kind)
            sizes = config.mesh_sizes(run, len(started)) if -1 in asked.values() else asked
    return config.on_devices(run, math.prod(sizes.values())), MeshSpec(sizes, run.mesh.placement), platform, gpu
