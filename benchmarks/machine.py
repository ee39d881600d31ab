"""The line under a benchmark's title: where and when it ran. Wall seconds mean little on a machine that has other
users.
"""
from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version

LOAD_BEFORE = os.getloadavg()[0]        # load at the start of the benchmark, which imports this module first


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def line(devices: str = "", *packages: str) -> str:
    """Return the line. devices: what computes, if it is not CPU cores."""
    return " · ".join([f"{datetime.date.today()}", *([devices] if devices else []),
                       f"{cores()} CPU cores ({platform.machine()}), load average {LOAD_BEFORE:.1f} before and "
                       f"{os.getloadavg()[0]:.1f} after", f"Python {platform.python_version()}",
                       *(f"{package} {version(package)}" for package in packages)])
