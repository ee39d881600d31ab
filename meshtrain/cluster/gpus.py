"""Assigns a host's GPUs to its processes, evenly. A process that its launcher bound to GPUs (`srun --gpus-per-task`)
uses all GPUs that it sees. This module starts no driver and knows no run."""
from __future__ import annotations

import collections
import glob
import re
import socket
from collections.abc import Mapping, Sequence

from meshtrain.config import ConfigError
from meshtrain.units import amount, plural


def visible(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the visible GPUs, without starting a driver; empty if they cannot be counted."""
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in environ:
            return [gpu for gpu in environ[variable].split(",") if gpu not in ("", "-1", "NoDevFiles")]
    return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def own(local_index: int, local_count: int, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the indices, among the visible GPUs, of the GPUs of process `local_index` of `local_count`; None: all.
    Raises: ConfigError if they do not divide evenly."""
    seen = len(visible(environ))
    if local_count == 1 or _is_bound(seen, local_count, environ):
        return None
    if not seen:    # unknown: one process per GPU, as jax assumes
        return (local_index,)
    if seen % local_count:
        raise ConfigError(f"{local_count} processes on {socket.gethostname()} cannot share its {seen} GPUs evenly; "
                          f"start {_divisors(seen)} per host, or make a multiple of {local_count} GPUs visible "
                          "(CUDA_VISIBLE_DEVICES)")
    each = seen // local_count
    return tuple(range(local_index * each, (local_index + 1) * each))


def divide(gpus: Sequence[str], count: int) -> list[list[str]]:
    """Return the GPUs of each of `count` processes. Raises: ConfigError if they do not divide evenly."""
    if not gpus or len(gpus) % count:
        remedy = f"use {_divisors(len(gpus))}" if gpus else "use one process"
        raise ConfigError(f"--processes {count} cannot share {len(gpus)} GPUs evenly; {remedy}, or "
                          f"mesh.simulated_devices to try it on the CPU")
    each = len(gpus) // count
    return [list(gpus[i * each:(i + 1) * each]) for i in range(count)]


def shares(taken: Sequence[tuple[str, int, int]]) -> str:
    """Return a line that says which GPUs the processes use. taken: (host, GPUs used, GPUs visible) of each process."""
    hosts: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for host, took, seen in taken:
        hosts[host].append((took, seen))
    kinds: dict[tuple, list[str]] = collections.defaultdict(list)
    for host, ones in hosts.items():
        kinds[tuple(sorted(ones))].append(host)
    return "; ".join(_share(ones, names) for ones, names in kinds.items())


def _share(ones: tuple[tuple[int, int], ...], hosts: list[str]) -> str:
    took, seen = sum(took for took, _ in ones), max(seen for _, seen in ones)
    each = " + ".join(dict.fromkeys(str(took) for took, _ in ones))
    where = hosts[0] if len(hosts) == 1 else f"each of {len(hosts)} hosts"
    idle = f"; {seen - took} of its {seen} visible GPUs stay idle" if took < seen else ""
    return (f"{amount(len(ones), 'process')} on {where} took {each} "
            f"{plural(1 if each == '1' else 2, 'GPU')} each{idle}")


def _is_bound(seen: int, local_count: int, environ: Mapping[str, str]) -> bool:
    """Return whether a launcher restricted this process to its own GPUs."""
    # the value may be a100:4
    numbers = (re.search(r"\d+$", environ.get(name, "")) for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE"))
    per_task, on_node = (int(number[0]) if number else 0 for number in numbers)
    return 0 < seen < max(local_count, on_node) or 0 < seen == per_task


def _divisors(n: int) -> str:
    return f"{' or '.join(str(i) for i in range(1, n + 1) if n % i == 0)} processes"
