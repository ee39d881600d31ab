"""Names of the files in run.dir, in one table, for their writers and for the check whether a directory may become a
run's.

config.toml marks a directory as a run's. The files that a start may leave before it are listed here, so that a start
that ended early leaves nothing that the next one refuses. Imports no jax: launchers use it.
"""
from __future__ import annotations

import re
from pathlib import Path

CONFIG, RULES, LOCK, CHECKPOINTS, TENSORBOARD = "config.toml", "rules.toml", ".lock", "checkpoints", "tensorboard"
CHANGES, REFERENCE, ROLLOUTS, SAMPLERS = "changes.jsonl", "reference.npy", "rollouts", "samplers"
HISTORY, ALIVE, STACKS = "history.jsonl", ".alive", "stacks"
CACHE = ".meshtrain"                                        # of tokens
RESTARTS, LAST_WORDS = "restarts.json", "last_words"        # of launchers

# Written before a run has claimed the directory: by a launcher whose processes never met, and by meshtrain.tokenize.
BEFORE_THE_CLAIM = frozenset({CACHE, RESTARTS, LAST_WORDS})
# Written by a start that holds the lock file and has not come to its first step. Without a lock file these are a
# stranger's.
BEFORE_THE_FIRST_STEP = BEFORE_THE_CLAIM | {LOCK, RULES, CONFIG, CHANGES, REFERENCE, ROLLOUTS, SAMPLERS,
                                            CHECKPOINTS, TENSORBOARD, HISTORY, ALIVE, STACKS}
TEMPORARY = re.compile(r"(.+?)(\.\d+)?\.tmp")               # NAME.tmp or NAME.PID.tmp, of a write that was cut off


def is_left_by_starts(directory: Path) -> bool:
    """Whether a directory without config.toml holds only files of starts that ended before their first step. Raises:
    OSError."""
    # deleted, but held open
    left = {_written(path.name) for path in directory.iterdir() if not path.name.startswith(".nfs")}
    saved = directory / CHECKPOINTS
    return left <= BEFORE_THE_CLAIM or (
        LOCK in left and left <= BEFORE_THE_FIRST_STEP and not (saved.exists() and any(saved.iterdir())))


def _written(name: str) -> str:
    """The final name of a temporary file; any other name unchanged."""
    found = TEMPORARY.fullmatch(name)
    return found[1] if found else name
