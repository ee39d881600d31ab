"""Names of the files in run.dir, and functions that read a run directory without claiming it.

A directory with config.toml is a run directory. The files that a start may write before config.toml are listed here, so
that the next start accepts a directory in which an earlier one ended early. Imports no jax: launchers use it.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from meshtrain import custom
from meshtrain.storage import addresses, buckets, mirror

CONFIG, RULES, LOCK, CHECKPOINTS, TENSORBOARD = "config.toml", "rules.toml", ".lock", "checkpoints", "tensorboard"
METRICS, CHANGES, REFERENCE = "metrics.jsonl", "changes.jsonl", "reference.npy"
ROLLOUTS, SAMPLERS = "rollouts", "samplers"
HISTORY, STACKS, EXPORT = "history.jsonl", "stacks", "export"
ALIVE = ".alive"                                            # heartbeat file of earlier versions
CODE = "code"                                               # copies of the run's own code, by digest
KEPT = "hf"                                                 # tokenizer and config files of the initial weights
CACHE = ".meshtrain"                                        # token cache
RESTARTS, LAST_WORDS = "restarts.json", "last_words"        # files of launchers

# Written before a run claims the directory: by a launcher, and by meshtrain.tokenize.
BEFORE_THE_CLAIM = frozenset({CACHE, RESTARTS, LAST_WORDS})
# Written by a start before its first step. In a directory without a lock file, these names are foreign files.
BEFORE_THE_FIRST_STEP = BEFORE_THE_CLAIM | {LOCK, RULES, CONFIG, CHANGES, REFERENCE, ROLLOUTS, SAMPLERS,
                                            CHECKPOINTS, TENSORBOARD, HISTORY, ALIVE, STACKS, CODE}
# Files that the mirror does not upload to a bucket: they stay on the host, or other code writes them.
NOT_SENT = BEFORE_THE_CLAIM | {CHECKPOINTS, STACKS, LOCK, EXPORT}
FILES = frozenset({CONFIG, RULES, LOCK, METRICS, CHANGES, REFERENCE})     # a run needs them as files
NEEDED = (CONFIG, METRICS, REFERENCE, KEPT)                 # no later start can rewrite these; the first marks a run
TEMPORARY = re.compile(r"(.+?)(\.\d+)?\.tmp")               # NAME.tmp or NAME.PID.tmp, left by an interrupted write


def are_left_by_starts(names: set[str], has_checkpoints: bool) -> bool:
    """Return whether a directory without config.toml holds only files of starts that ended before their first step."""
    # Temporary files count by their final names. .nfs*: deleted, but still open.
    left = {match[1] if (match := TEMPORARY.fullmatch(name)) else name for name in names if not name.startswith(".nfs")}
    return left <= BEFORE_THE_CLAIM or (LOCK in left and left <= BEFORE_THE_FIRST_STEP and not has_checkpoints)


def is_sent(name: str) -> bool:
    """Return whether a file of the run directory is uploaded to the bucket. name: path relative to run.dir."""
    return name.split(os.sep)[0] not in NOT_SENT


def is_read_by_all(name: str) -> bool:
    """Return whether all processes read this file, and not only process 0. name: relative to run.dir."""
    return name.split(os.sep)[0] in (ROLLOUTS, KEPT, REFERENCE)


def open_run(name: str) -> Path:
    """Return a local directory with the files of a run that a report reads. A run in a bucket is fetched first; of its
    metrics, only the new rows are fetched. Raises: ValueError, FileSystemError."""
    if not addresses.is_remote(name):
        return Path(name)
    address = addresses.parse(name)
    if address.scheme not in addresses.BUCKETS:
        raise addresses.StorageError(f"{name} is not a directory in a bucket; give the run.dir of a run, e.g. "
                                     f"s3://BUCKET/runs/quickstart")
    return mirror.read(address, lambda name: name.split(os.sep)[0] != TENSORBOARD and (is_sent(name) or name == LOCK),
                       logs=(METRICS,))


def open_section(run: Mapping[str, dict], section: str, name: str) -> dict:
    """Return a section of a run's checkpoint, in which paths of the run's own code name the copies in the run's
    directory. run: the saved sections; name: run.dir. Raises: as `open_run`."""
    table, code = run[section], run["run"].get("code", ())
    if custom.in_copy(table, code, Path()) == table:
        return table
    directory = Path(name) if not addresses.is_remote(name) else mirror.read(
        addresses.parse(name), lambda entry: entry.startswith(f"{CODE}/"), within=CODE)
    return custom.in_copy(table, code, directory / CODE)


def steps(name: str) -> list[int]:
    """Return the sorted steps of a run's checkpoints. name: run.dir. Raises: as `open_run`."""
    try:
        names = buckets.children(addresses.parse(name).below(CHECKPOINTS))[0] if addresses.is_remote(name) else \
            os.listdir(os.path.join(name, CHECKPOINTS))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    return sorted(int(entry) for entry in names if entry.isdecimal())


def read_run_file(name: str) -> str:
    """Return the run file saved in the newest readable checkpoint of a run; "" if none has one. name: run.dir.

    Raises: as `open_run`; OSError.
    """
    for step in reversed(steps(name)):
        with contextlib.suppress(addresses.Missing, FileNotFoundError, KeyError, TypeError, json.JSONDecodeError,
                                 UnicodeDecodeError):
            if addresses.is_remote(name):
                saved = json.loads(buckets.read(addresses.parse(name).below(f"{CHECKPOINTS}/{step}")))["metadata"]
            else:
                saved = json.loads(Path(name, CHECKPOINTS, str(step), "metadata.json").read_bytes())
            return str(saved["run_file"])
    return ""
