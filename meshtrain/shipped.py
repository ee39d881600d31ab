"""The files that come with meshtrain: run files, model shapes and rule files.

They lie beside the package in a checkout and inside it once installed (setup.py maps them). A path given by the user is
looked up in the current directory first, so a user's file may have the name of a shipped one.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_HOME = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent


def shipped(path: str | Path) -> Path:
    """The shipped file or folder of this name, e.g. configs/quickstart.toml. It need not exist."""
    return _HOME / path


def found(path: str | Path) -> str | Path:
    """`path` from the current directory, or else the shipped file of that name."""
    return shipped(path) if not os.path.exists(path) and os.path.isfile(shipped(path)) else path


def rule_file(name: str | Path) -> str | Path:
    """A rule file by its path, as `found`, or a shipped one by its bare name: zero3."""
    is_bare = os.sep not in str(name) and not os.path.exists(name) and str(name) in names("sharding_rules")
    return found(f"sharding_rules/{name}.toml" if is_bare else name)


def names(folder: str) -> dict[str, Path]:
    """The shipped TOML files of a folder, by stem."""
    return {file.stem: file for file in sorted(shipped(folder).glob("*.toml"))}
