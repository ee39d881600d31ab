"""The environment variables of processes that run foreign code (reward functions, chat templates): no credentials."""
from __future__ import annotations

from collections.abc import Mapping

KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR")


def select(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that foreign code may see."""
    return {name: environ[name] for name in KEPT if name in environ}
