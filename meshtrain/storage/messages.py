"""Small files with which launchers on several hosts exchange messages, in a run's directory or at its address.

Every function raises StorageError if the user has to change something, and FileSystemError if the directory does not
answer for a moment. Neither error means that a message is missing.
"""
from __future__ import annotations

import os
from pathlib import Path

from meshtrain import files
from meshtrain.storage import addresses, buckets
from meshtrain.storage.addresses import StorageError

REMEDY = "check it, or give another run.dir"


def read(run_dir: str, name: str) -> str | None:
    """Return the text of a message; None if the message does not exist."""
    path = Path(run_dir) / name
    try:
        if addresses.is_remote(run_dir):
            return buckets.read(addresses.parse(run_dir).below(name)).decode(errors="replace")
        return files.patiently(lambda: path.read_text(encoding="utf-8", errors="replace"))
    except (addresses.Missing, FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise files.error_to_raise(error, f"{path} cannot be read", REMEDY, StorageError) from None


def write(run_dir: str, name: str, text: str) -> None:
    if addresses.is_remote(run_dir):
        buckets.write(addresses.parse(run_dir).below(name), text.encode())
        return
    path = Path(run_dir) / name

    def act():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text)
    files.attempt(act, f"{path} cannot be written", REMEDY, StorageError)


def remove(run_dir: str, name: str) -> None:
    if addresses.is_remote(run_dir):
        return buckets.remove([addresses.parse(run_dir).below(name)])
    path = Path(run_dir) / name
    files.attempt(lambda: path.unlink(missing_ok=True), f"{path} cannot be removed", REMEDY, StorageError)


def names(run_dir: str, folder: str) -> list[str]:
    """Return the names of the messages in a folder, in the form that `read` takes."""
    path = Path(run_dir) / folder
    try:
        inside = buckets.children(addresses.parse(run_dir).below(folder))[0] if addresses.is_remote(run_dir) else \
            files.patiently(lambda: os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise files.error_to_raise(error, f"{path} cannot be listed", REMEDY, StorageError) from None
    return [f"{folder}/{name}" for name in inside]
