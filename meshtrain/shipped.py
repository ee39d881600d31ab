"""The files that come with meshtrain: run files, model shapes and rule files.

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


def rule_file(name: str | Path) -> str | Path:
    """Return the path of a rule file, see `find_file`. name: a path, or the bare name of a shipped one: zero3."""
    is_bare = os.sep not in str(name) and not os.path.exists(name) and str(name) in names("sharding_rules")
    return find_file(f"sharding_rules/{name}.toml" if is_bare else name)


def names(folder: str) -> dict[str, Path]:
    """Return stem -> path of the shipped TOML files in a folder."""
    return {file.stem: file for file in sorted(locate_shipped(folder).glob("*.toml"))}
