"""The directory of a run: whose it is, whether a run goes on in it, and that nobody else is in it.

What may change on resume is everything but model, data, optimizer and seed: those make another run, whose loss curve
would be a lie under the old name.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path

from meshtrain import config
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, Run
from meshtrain.run.checkpoint import Checkpoints

# Keys of the fixed sections that change how a run is computed, not what it computes.
FREE = {"model": ("compute_dtype",), "data": ("prefetch", "cache"), "optimizer": ()}


@contextlib.contextmanager
def claimed(run: Run):
    """Holds run.dir for this run alone, all its processes; yields its Path.

    Raises: ConfigError where it cannot be ours; touches nothing then.
    """
    with contextlib.ExitStack() as stack:
        agree.on_first(lambda: stack.enter_context(_claimed(run)))
        yield Path(run.run.dir)


@contextlib.contextmanager
def _claimed(run: Run):
    directory = Path(run.run.dir)
    existing = directory.exists()
    if existing and not directory.is_dir():
        raise ConfigError(f"run.dir={directory} is a file; give a directory that does not exist yet, or an empty one")
    ours = (directory / "config.toml").is_file()
    if existing and not ours and not _left_by_a_start(directory):
        raise ConfigError(f"run.dir={directory} holds files and is not a run of ours (no config.toml); "
                          "give an empty directory or another run.name")
    if ours and run.checkpoint.resume == "never":
        raise ConfigError(f"run.dir={directory} already holds a run, and checkpoint.resume=\"never\"; give another "
                          "run.name or run.dir, or resume=\"auto\" to go on with it")
    locked_before = (directory / ".lock").exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")
    except OSError as error:
        raise ConfigError(f"run.dir={directory} cannot be written: {error.strerror}; give a directory that can") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"run.dir={directory} is in use by another run; wait for it or give another run.name") from None
        try:
            yield
        except ConfigError:     # found late, in the data: a mistake leaves nothing behind
            if not locked_before and [path.name for path in directory.iterdir()] == [".lock"]:
                (directory / ".lock").unlink()
                if not existing:
                    directory.rmdir()
            raise


def check_same_run(run: Run, metadata: dict, fingerprint: str, step: int) -> None:
    """Raises: ConfigError that lists each key of model, data, optimizer or seed that the checkpoint has otherwise."""
    old = metadata["run"]
    new = {name: section.model_dump(mode="json") for name, section in run}
    changes = []
    for section, free in FREE.items():
        for key, value in new[section].items():
            if key not in free and old[section].get(key, value) != value:
                changes.append(f"{section}.{key}={json.dumps(value)}, but the run in {run.run.dir} has "
                               f"{json.dumps(old[section][key])}")
    if old["run"]["seed"] != run.run.seed:
        changes.append(f"run.seed={run.run.seed}, but the run in {run.run.dir} has {old['run']['seed']}")
    if changes:
        raise ConfigError(*(f"{change}; on resume model, data, optimizer and seed must stay: change it back, or give "
                            "another run.name (checkpoint.init_from takes the weights along)" for change in changes))
    if metadata["data"]["fingerprint"] != fingerprint:
        raise ConfigError(f"the data are not those that the run in {run.run.dir} read up to step {step} (documents were "
                          "added, removed or changed in length); restore the files or start another run.name")


def metadata(run: Run, rules_text: str, fingerprint: str) -> dict:
    """What travels with every checkpoint. The data position is the step: batch n is a function of (seed, n) alone."""
    return {"run": {name: section.model_dump(mode="json") for name, section in run}, "run_file": config.dump(run),
            "rules": rules_text, "data": {"fingerprint": fingerprint}}


def _left_by_a_start(directory: Path) -> bool:
    """Empty, or what a run leaves that ended before its first step: by Ctrl-C while it compiled, or a mistake found late; or
    what meshtrain.tokenize wrote."""
    left = {path.name for path in directory.iterdir()}
    saved = directory / "checkpoints"
    ours = {".lock", ".meshtrain", "rules.toml", "checkpoints", "tensorboard"}
    return left <= {".meshtrain"} or (".lock" in left and left <= ours and not (saved.exists() and any(saved.iterdir())))


def write_settings(run: Run, directory: Path, rules_text: str) -> None:
    """config.toml (resolved) and rules.toml (as used). config.toml comes last: it marks the directory as ours."""
    (directory / "rules.toml").write_text(rules_text)
    temporary = directory / "config.toml.tmp"
    temporary.write_text(config.dump(run))
    temporary.replace(directory / "config.toml")


def source_weights(run: Run) -> tuple[Checkpoints, int]:
    """The newest checkpoint of checkpoint.init_from. Raises: ConfigError where there is none."""
    directory = Path(run.checkpoint.init_from) / "checkpoints"
    checkpoints = Checkpoints(directory, read_only=True) if directory.is_dir() else None
    step = checkpoints.latest() if checkpoints else None
    if step is None:
        raise ConfigError(f"checkpoint.init_from={run.checkpoint.init_from} holds no whole checkpoint; name the run.dir "
                          "of a run that has saved one")
    return checkpoints, step
