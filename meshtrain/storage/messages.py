"""Small files by which launchers on several hosts tell each other something: in a run's directory, or at its address.
"""
from __future__ import annotations

import contextlib
import os
from pathlib import Path

from meshtrain import files
from meshtrain.storage import addresses, stores


def read(run_dir: str, name: str) -> str | None:
    """None where there is none, or none can be read."""
    with contextlib.suppress(OSError, ValueError):
        if addresses.is_remote(run_dir):
            return stores.read(addresses.parse(run_dir).below(name)).decode()
        return (Path(run_dir) / name).read_text(encoding="utf-8")
    return None


def write(run_dir: str, name: str, text: str) -> None:
    """Raises: OSError, StorageError."""
    if addresses.is_remote(run_dir):
        stores.write(addresses.parse(run_dir).below(name), text.encode())
        return
    path = Path(run_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    files.patiently(lambda: files.replace(path, text))


def remove(run_dir: str, name: str) -> None:
    """Raises: OSError, StorageError."""
    if addresses.is_remote(run_dir):
        stores.remove([addresses.parse(run_dir).below(name)])
    else:
        (Path(run_dir) / name).unlink(missing_ok=True)


def names(run_dir: str, folder: str) -> list[str]:
    """Of the messages in a folder, as `read` takes them; empty where it cannot be listed."""
    found: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        found = stores.children(addresses.parse(run_dir).below(folder))[0] if addresses.is_remote(run_dir) else \
            os.listdir(Path(run_dir) / folder)
    return [f"{folder}/{name}" for name in found]
