"""Where and when a benchmark ran: the line under its title. Wall seconds mean little on a machine that others use,
too."""
from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version

LOAD_BEFORE = os.getloadavg()[0]        # when the benchmark starts: it is imported first


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def line(devices: str = "", *packages: str) -> str:
    """devices: what computes, where that is no CPU core."""
    return " · ".join([f"{datetime.date.today()}", *([devices] if devices else []),
                       f"{cores()} CPU cores ({platform.machine()}), load average {LOAD_BEFORE:.1f} before and "
                       f"{os.getloadavg()[0]:.1f} after", f"Python {platform.python_version()}",
                       *(f"{package} {version(package)}" for package in packages)])
