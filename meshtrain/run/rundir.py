"""The directory of a run: whose it is, that nobody else is in it, and that all processes see the same one.

A lock says that a run is at work here. Where a file system has no locks (Lustre without `-o flock`, FUSE), the lock file still
names its owner, and a second run on the owner's host is noticed. What a resumed run may change is the business of `resume`.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshtrain import config, files
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, Run
from meshtrain.run import disk, say

LOCK, RESTARTS = ".lock", "restarts.json"      # the second is a launcher's count
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
# What a run leaves that ended before its first step: by Ctrl-C while it compiled, by a kill, or a mistake found late.
OF_A_START = {LOCK, ".meshtrain", "rules.toml", "config.toml.tmp", "changes.jsonl.tmp", "checkpoints", "tensorboard", RESTARTS,
              f"{RESTARTS}.tmp", "last_words", "history.jsonl", ".alive", ".alive.tmp", "stacks"}


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[Path]:
    """Holds run.dir for this run alone, all its processes; yields its Path.

    Raises: ConfigError where it cannot be ours, or is not the same directory for all; touches nothing then.
    """
    with contextlib.ExitStack() as stack:
        nonce = agree.on_first(lambda: stack.enter_context(_claimed(run)))
        directory = Path(run.run.dir)
        _check_shared(directory, nonce)
        yield directory


@contextlib.contextmanager
def _claimed(run: Run) -> Iterator[str]:
    """By process 0: the directory is there and locked; yields what its lock file holds for the others to find."""
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
    locked_before = (directory / LOCK).exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / LOCK, "a+", encoding="utf-8")     # and not "w": until it is locked, what stands there is another's
    except OSError as error:
        raise ConfigError(f"run.dir={directory} cannot be written: {error.strerror}; give a directory that can") from None
    with lock:
        _lock(lock, directory)
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid()), "time": time.time(),
                 "nonce": secrets.token_hex(8)}
        try:
            _put(lock, json.dumps(owner))
        except OSError as error:
            raise ConfigError(f"run.dir={directory} cannot be written: {error.strerror}; give a directory that can") from None
        try:
            yield owner["nonce"]
        except ConfigError:     # found late, in the data: a mistake leaves nothing behind
            with contextlib.suppress(OSError):      # there is none, or not an empty one
                if not locked_before:
                    (directory / "checkpoints").rmdir()
            if not locked_before and [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                if not existing:
                    directory.rmdir()
            raise
        finally:
            with contextlib.suppress(OSError):
                _put(lock, "")


def _lock(lock, directory: Path) -> None:
    """Raises: ConfigError where another run is at work in the directory, as far as that can be told."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        raise ConfigError(f"run.dir={directory} is in use by another run{_by(_owner(lock))}; wait for it or give another "
                          "run.name") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise ConfigError(f"run.dir={directory} cannot be locked: {error.strerror}; give a directory on another file "
                              "system") from None
    owner = _owner(lock)
    if owner and owner["host"] == socket.gethostname() and owner["pid"] != os.getpid() \
            and owner["began"] == _began(owner["pid"]):
        raise ConfigError(f"run.dir={directory} is in use by another run{_by(owner)}; wait for it or give another run.name")
    say.err(f"{directory} is on a file system without locks: a second run in it would be noticed on this host alone; mount "
            f"it with locks (Lustre: -o flock) or see to it yourself{'. The last run in it' + _by(owner) if owner else ''}")


def _owner(lock) -> dict | None:
    """Who wrote the lock file; None where nobody is named."""
    try:
        lock.seek(0)
        owner = json.loads(lock.read())
        return owner if {"host", "pid", "began", "time"} <= owner.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _by(owner: dict | None) -> str:
    if not owner:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["time"]))
    return f" (pid {owner['pid']} on {owner['host']}, since {since})"


def _began(pid: int) -> str:
    """When a process of this host began, in the kernel's ticks: a pid alone may be another's by now. Empty: there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return ""


def at_work(directory: Path) -> dict | None:
    """Who the lock file says is at work: host, pid, time, and seen: whether the process was found. None: nobody, or on this
    host a process that is gone. Locks nothing, so that whoever looks never stands in a run's way."""
    try:
        with open(directory / LOCK, encoding="utf-8") as lock:
            owner = _owner(lock)
    except OSError:
        return None
    if owner is None or owner["host"] != socket.gethostname():
        return owner and owner | {"seen": False}
    return owner | {"seen": True} if owner["began"] and owner["began"] == _began(owner["pid"]) else None


def _put(lock, text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()
    os.fsync(lock.fileno())


def _check_shared(directory: Path, nonce: str) -> None:
    """Raises: ConfigError, in every process, where one does not see what process 0 has just written."""
    def look():
        with contextlib.suppress(ValueError):
            if json.loads((directory / LOCK).read_text(encoding="utf-8"))["nonce"] == nonce:
                return
        raise FileNotFoundError(errno.ENOENT, "another lock file stands there")     # perhaps what was read before

    fault = ""
    try:
        files.patiently(look, missing=True)
    except OSError as error:
        fault = error.strerror or str(error)
    found = agree.exchange([socket.gethostname(), fault])
    blind = [f"process {index} on {host} ({fault})" for index, (host, fault) in enumerate(found) if fault]
    if blind:
        raise agree.agreed(ConfigError(
            f"run.dir={directory} is not one directory for all processes: {', '.join(blind[:8])}"
            f"{f' and {len(blind) - 8} more' if len(blind) > 8 else ''} cannot see what process 0 on {found[0][0]} wrote there; "
            "give a directory on a file system that all hosts have mounted"))


def _left_by_a_start(directory: Path) -> bool:
    """Empty, or what a run of ours left that never came to its first step, or what meshtrain.tokenize wrote."""
    left = {path.name for path in directory.iterdir() if not path.name.startswith(".nfs")}   # deleted, but held open
    saved = directory / "checkpoints"
    return left <= {".meshtrain", RESTARTS} or (LOCK in left and left <= OF_A_START and not (saved.exists() and any(saved.iterdir())))


def metadata(run: Run, rules_text: str, data: dict) -> dict:
    """What travels with every checkpoint. data: of `resume.data_metadata`."""
    return {"run": settings(run), "run_file": config.dump(run), "rules": rules_text, "data": data}


def settings(run: Run) -> dict[str, dict]:
    """Section -> key -> value, as JSON."""
    return {name: section.model_dump(mode="json") for name, section in run}


def write_settings(run: Run, directory: Path, rules_text: str) -> None:
    """config.toml (resolved) and rules.toml (as used). config.toml comes last: it marks the directory as ours."""
    (directory / "rules.toml").write_text(rules_text, encoding="utf-8")
    disk.replace(directory / "config.toml", config.dump(run))
