"""Names of the files in run.dir, in one table, for their writers and for the check whether a directory may become a
run's.

config.toml marks a directory as a run's. The files that a start may leave before it are listed here, so that a start
that ended early leaves nothing that the next one refuses. What may be read of a run at an address without claiming it
is here, too. Imports no jax: launchers use it.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from meshtrain.storage import addresses, mirror, stores

CONFIG, RULES, LOCK, CHECKPOINTS, TENSORBOARD = "config.toml", "rules.toml", ".lock", "checkpoints", "tensorboard"
METRICS, CHANGES, REFERENCE = "metrics.jsonl", "changes.jsonl", "reference.npy"
ROLLOUTS, SAMPLERS = "rollouts", "samplers"
HISTORY, STACKS, EXPORT = "history.jsonl", "stacks", "export"
ALIVE = ".alive"                                            # of versions that had the account there
KEPT = "hf"                                                 # what accompanies the weights that it started from
CACHE = ".meshtrain"                                        # of tokens
RESTARTS, LAST_WORDS = "restarts.json", "last_words"        # of launchers

# Written before a run has claimed the directory: by a launcher whose processes never met, and by meshtrain.tokenize.
BEFORE_THE_CLAIM = frozenset({CACHE, RESTARTS, LAST_WORDS})
# Written by a start that holds the lock file and has not come to its first step. Without a lock file these are a
# stranger's.
BEFORE_THE_FIRST_STEP = BEFORE_THE_CLAIM | {LOCK, RULES, CONFIG, CHANGES, REFERENCE, ROLLOUTS, SAMPLERS,
                                            CHECKPOINTS, TENSORBOARD, HISTORY, ALIVE, STACKS}
# Of a run at an address: the host's own, or written otherwise.
NOT_SENT = BEFORE_THE_CLAIM | {CHECKPOINTS, STACKS, LOCK, EXPORT}
NEEDED = (CONFIG, METRICS, REFERENCE, KEPT)                 # what no later start can make again; the first is the mark
TEMPORARY = re.compile(r"(.+?)(\.\d+)?\.tmp")               # NAME.tmp or NAME.PID.tmp, of a write that was cut off


def are_left_by_starts(names: set[str], has_checkpoints: bool) -> bool:
    """Whether a directory without config.toml holds only files of starts that ended before their first step."""
    left = {_written(name) for name in names if not name.startswith(".nfs")}      # deleted, but held open
    return left <= BEFORE_THE_CLAIM or (LOCK in left and left <= BEFORE_THE_FIRST_STEP and not has_checkpoints)


def _written(name: str) -> str:
    """The final name of a temporary file; any other name unchanged."""
    found = TEMPORARY.fullmatch(name)
    return found[1] if found else name


def is_sent(name: str) -> bool:
    """Whether a file of the run directory, by its name within it, is in the bucket, too."""
    return name.split(os.sep)[0] not in NOT_SENT


def is_read_by_all(name: str) -> bool:
    """Whether all processes read it, and not the first alone."""
    return name.split(os.sep)[0] in (ROLLOUTS, KEPT, REFERENCE)


def opened(name: str) -> Path:
    """The directory of a run to read its files: itself, or what is at an address now, fetched. Raises: ValueError,
    FileSystemError."""
    if not addresses.is_remote(name):
        return Path(name)
    address = addresses.parse(name)
    if address.scheme not in addresses.BUCKETS:
        raise addresses.StorageError(f"{name} is no directory of a bucket; name the run.dir of a run, e.g. "
                                     f"s3://BUCKET/runs/quickstart")
    return mirror.read(address, lambda name: is_sent(name) or name == LOCK)


def steps(name: str) -> list[int]:
    """The steps that a run has saved, by the names of its checkpoints. Raises: as `opened`."""
    try:
        names = stores.children(addresses.parse(name).below(CHECKPOINTS))[0] if addresses.is_remote(name) else \
            os.listdir(os.path.join(name, CHECKPOINTS))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    return sorted(int(one) for one in names if one.isdecimal())


def saved_run_file(name: str) -> str:
    """The run file that the newest checkpoint of a place was saved with; empty where no checkpoint has one. Raises: as
    `opened`; OSError."""
    for step in reversed(steps(name)):
        with contextlib.suppress(stores.Missing, FileNotFoundError, KeyError, TypeError, json.JSONDecodeError,
                                 UnicodeDecodeError):
            if addresses.is_remote(name):
                saved = json.loads(stores.read(addresses.parse(name).below(f"{CHECKPOINTS}/{step}")))["metadata"]
            else:
                saved = json.loads(Path(name, CHECKPOINTS, str(step), "metadata.json").read_bytes())
            return str(saved["run_file"])
    return ""
