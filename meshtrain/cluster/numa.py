"""Binds a process to the CPUs next to its GPUs: the CPUs of the GPUs' NUMA node.

The NUMA node of a GPU is read from the kernel's /proc and /sys; no driver is started and no tool is called. A process
is not bound if its GPUs cannot be determined, or if they are on several nodes (one process with all GPUs of a host). It
is also not bound if it may not run on all CPUs of its machine: then the user, Slurm or the kubelet has bound it.

Memory follows by first touch: bound threads get pages of their own node, and of another node once theirs is full. With
a strict policy (set_mempolicy), the process would be killed then.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtrain.cluster import gpus

ROOT = Path("/")


def bind(local_devices: Sequence[int] | None, environ: Mapping[str, str], root: Path = ROOT) -> str:
    """Bind all threads of this process, and so those that they start. Return a line about it; empty: nothing was bound.

    local_devices: indices of the process's GPUs among the visible ones; None: all. root: of proc, sys and dev.
    """
    try:
        cpus, node = _beside(_addresses(local_devices, environ, root), root)
        online = _numbers((root / "sys/devices/system/cpu/online").read_text(encoding="utf-8"))
    except (OSError, ValueError):       # another kernel's or driver's files
        return ""
    if not cpus or not cpus < online or os.sched_getaffinity(0) != online:
        return ""
    for thread in os.listdir("/proc/self/task"):        # affinity is set per thread, and jax has already started some
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue
        except OSError:
            return ""
    return f"this process runs on the {len(cpus)} CPUs of NUMA node {node}, where its GPUs are"


def _addresses(local_devices: Sequence[int] | None, environ: Mapping[str, str], root: Path) -> list[str]:
    """Return the PCI addresses of the process's GPUs; empty if one of them is unknown."""
    there = _find_gpus(root)
    names = gpus.visible(environ)
    if "CUDA_VISIBLE_DEVICES" not in environ:
        names = [str(index) for index in range(len(there))]
    if local_devices is not None:
        if not all(index < len(names) for index in local_devices):
            return []
        names = [names[index] for index in local_devices]
    # CUDA numbers the fastest GPU first unless CUDA_DEVICE_ORDER is set; GPUs of one model are numbered by address. It
    # accepts the begin of a UUID. Parts of a GPU (MIG-…) have other UUIDs, which are unknown here.
    counted = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({model for _, model, _ in there}) == 1
    addresses = [[address for index, (address, _, uuid) in enumerate(there)
                  if (counted and index == int(name) if name.isdecimal()
                      else name.startswith("GPU-") and uuid.startswith(name))]
                 for name in names]
    return [own for own, in addresses] if all(len(own) == 1 for own in addresses) else []


def _find_gpus(root: Path) -> list[tuple[str, str, str]]:
    """Return (PCI address, model, UUID) of the GPUs that CUDA would find, sorted by address."""
    gpus = []
    for folder in (root / "proc/driver/nvidia/gpus").iterdir():
        told = dict(re.findall(r"^([\w ]+):[ \t]*(.*?)[ \t]*$", (folder / "information").read_text(encoding="utf-8"),
                               re.MULTILINE))
        if _opens(root / f"dev/nvidia{told.get('Device Minor', '')}"):
            gpus.append((folder.name.lower(), told.get("Model", ""), told.get("GPU UUID", "")))
    return sorted(gpus)


def _opens(device: Path) -> bool:
    """Return whether this process may use a device. A container hides the others; a cgroup (Slurm) refuses them."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _beside(addresses: Sequence[str], root: Path) -> tuple[set[int], int]:
    """Return (the CPUs of the NUMA node of these PCI devices, the node); no CPUs unless all devices are on one node."""
    places = [root / "sys/bus/pci/devices" / address for address in addresses]
    nodes = {int((place / "numa_node").read_text(encoding="utf-8")) for place in places}
    if len(nodes) != 1 or min(nodes) < 0:       # -1: unknown, as on most virtual machines
        return set(), -1
    return set.union(*(_numbers((place / "local_cpulist").read_text(encoding="utf-8")) for place in places)), min(nodes)


def _numbers(text: str) -> set[int]:
    """Return the numbers in a list of ranges: '0-3,8' -> {0, 1, 2, 3, 8}."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
