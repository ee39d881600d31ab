"""The files that come with meshtrain: run files, model shapes, rule files and chat templates.

In a checkout they are next to the package; in an installation they are inside it (setup.py maps them). A path given by
the user is looked up in the current directory first, so a user's file may have the name of a shipped one.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_HOME = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent


def locate_shipped(path: str | Path) -> Path:
    """Return the path of a shipped file or folder, e.g. configs/quickstart.toml. It need not exist."""
    return _HOME / path


def find_file(path: str | Path) -> str | Path:
    """Return `path` if it exists or no shipped file has this name; else the shipped file."""
    return locate_shipped(path) if not os.path.exists(path) and os.path.isfile(locate_shipped(path)) else path


def path_of(name: str, folder: str) -> str:
    """Return the path of the shipped file in `folder` with this bare name: zero3, qwen3. Any other name, and the name
    of a file or folder in the current directory, is returned unchanged."""
    found = None if os.path.exists(name) else names(folder).get(name)
    return f"{folder}/{found.name}" if found else name


def rule_file(name: str | Path) -> str | Path:
    """Return the path of a rule file, see `find_file`. name: a path, or the bare name of a shipped one: zero3."""
    return find_file(path_of(str(name), "sharding_rules"))


def names(folder: str) -> dict[str, Path]:
    """Return stem -> path of the shipped TOML files, or chat templates, in a folder."""
    files = sorted(locate_shipped(folder).glob("*.*"))
    return {file.stem: file for file in files if file.suffix in (".toml", ".jinja")}
