"""The environment of processes that run code of others: reward functions and chat templates. It has no credentials."""
from __future__ import annotations

from collections.abc import Mapping

KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR")


def kept(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in KEPT if name in environ}
