"""The run directory on a file system: claimed by one start at a time, shared by all processes. Buckets: see `bucket`.

A lock file marks a run in progress. On a file system without locks (Lustre without `-o flock`, FUSE), the lock file
still names its owner, and a second run on the owner's host is refused. `resume` decides which settings may change.
"""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeGuard

from meshtrain import config, custom, files
from meshtrain.cluster import agree, watch
from meshtrain.config import ConfigError, Run, named
from meshtrain.run import contents, say
from meshtrain.run.contents import LOCK
from meshtrain.storage.mirror import LostClaimError

NO_SIGN_S = 120.0  # readers take the owner of a lease for dead if its last renewal is older (clocks of two hosts)
LOOK_S = 1.0       # between two attempts to get a lock
REMEDY = "give a directory that can be written"
NO_CONFIG = "{} has checkpoints but no config.toml: config.toml is restored from the newest checkpoint"
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)


@dataclasses.dataclass(eq=False)
class _Held(Exception):
    """The lock is held, possibly by a host that is down. owner: see `_owner`."""
    owner: dict | None


@dataclasses.dataclass(eq=False)
class Claim:
    """This start's claim on run.dir.

    name: run.dir. directory: where this host reads and writes the files of the run. nonce: the lock contains it while
    the claim is valid. look: returns the text of the lock; None if the lock does not exist. send: uploads the files, if
    run.dir is in a bucket. lost: set once another start has taken run.dir over.
    """
    name: str
    directory: Path
    nonce: str
    look: Callable[[], str | None]
    send: Callable[[], None] = lambda: None
    lost: LostClaimError | None = None

    def check(self) -> None:
        """Check that the claim is valid, before files in run.dir are renamed or removed. Raises: LostClaimError."""
        text = None if self.lost else self.look()
        if text is not None and (owner := read_owner(text)) and owner.get("nonce") != self.nonce:
            self.lose(text)
        if self.lost:
            raise self.lost

    def lose(self, text: str) -> None:
        """Record that another start has taken run.dir over. text: the content of the lock."""
        self.lost = LostClaimError(
            f"run.dir={self.name} was taken over by another start{by(read_owner(text))}, because the lock of this "
            f"start had lapsed; this start stops and writes nothing more")


@contextlib.contextmanager
def claim(run: Run) -> Iterator[Claim]:
    """Context: hold run.dir for this run alone. All processes of the run enter it together.

    Waits for a lock whose owner is not a process of this host. Raises: ConfigError if the directory cannot be used or
    is not shared by all processes; FileSystemError if the file system fails or the lock stays held. After an error,
    nothing in the directory has changed.
    """
    directory = Path(run.run.dir)
    with contextlib.ExitStack() as stack:
        waiting = files.Waiting(f"run.dir={directory} is in use by another run", say.err)
        while (nonce := agree.on_first(lambda: _try_claim(run, stack, waiting))) is None:
            watch.progress()
        _check_shared(directory, nonce)
        yield Claim(str(directory), directory, nonce, lambda: _text(directory))


def _text(directory: Path) -> str | None:
    try:
        return files.patiently(lambda: (directory / LOCK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _try_claim(run: Run, stack: contextlib.ExitStack, waiting: files.Waiting) -> str | None:
    """Claim the directory in process 0; return the nonce, or None if another run has the lock. `stack` releases it."""
    try:
        return stack.enter_context(_claim_directory(run))
    except _Held as held:
        waiting.go_on(by(held.owner), held.owner and held.owner.get("nonce"))
        time.sleep(LOOK_S)
        return None


@contextlib.contextmanager
def _claim_directory(run: Run) -> Iterator[str]:
    """Context, in process 0: create and lock the directory. Yields the nonce in the lock file, which the other
    processes then look for. Raises: _Held, ConfigError, FileSystemError."""
    directory = Path(run.run.dir)
    refusal, existing = f"run.dir={directory} cannot be written", files.status(directory)
    run_file = check_directory(run, directory)
    locked_before = files.status(directory / LOCK) is not None

    def open_lock():
        directory.mkdir(parents=True, exist_ok=True)
        # not "w": until the file is locked, its content may be that of another run
        return open(directory / LOCK, "a+", encoding="utf-8")

    with files.attempt(open_lock, refusal, REMEDY, ConfigError) as lock:
        _lock(lock, directory)
        owner = this_process()
        files.attempt(lambda: _put(lock, json.dumps(owner)), refusal, REMEDY, ConfigError)
        if run_file:
            say.err(NO_CONFIG.format(directory))
            files.attempt(lambda: files.replace(directory / contents.CONFIG, run_file), refusal, REMEDY, ConfigError)
        try:
            yield owner["nonce"]
        except ConfigError:     # a mistake that is found late, e.g. in the data, leaves nothing behind
            with contextlib.suppress(OSError):      # the directory is missing, or not empty
                if not locked_before:
                    (directory / contents.CHECKPOINTS).rmdir()
            if not locked_before and [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                if not existing:
                    directory.rmdir()
            raise
        finally:
            with contextlib.suppress(OSError):
                if (_owner(directory) or owner).get("nonce") == owner["nonce"]:      # else a successor has the lock
                    _put(lock, "")


def check_directory(run: Run, directory: Path) -> str:
    """Check that a run may start or resume in a local run.dir; see `check_contents`."""
    existing = files.status(directory)
    if existing and not stat.S_ISDIR(existing.st_mode):
        raise ConfigError(f"run.dir={directory} is a file; give a directory that does not exist yet, or an empty one")
    refusal, saved = f"run.dir={directory} cannot be written", directory / contents.CHECKPOINTS
    names = files.attempt(lambda: set(os.listdir(directory)), refusal, REMEDY, ConfigError) if existing else set()
    for name in sorted(names & {*contents.FILES, contents.CHECKPOINTS}):
        if (found := files.status(directory / name)) and stat.S_ISDIR(found.st_mode) == (name in contents.FILES):
            kind = "directory" if name in contents.FILES else "file"
            raise ConfigError(f"run.dir={directory} is not the directory of a run: {name} in it is a {kind}; give an "
                              f"empty directory or another run.name")
    has_checkpoints = contents.CHECKPOINTS in names and files.attempt(
        lambda: any(saved.iterdir()), refusal, REMEDY, ConfigError)
    return check_contents(run, str(directory), names, has_checkpoints=has_checkpoints)


def check_contents(run: Run, name: str, names: set[str], *, has_checkpoints: bool) -> str:
    """Check that a run may start or resume in run.dir.

    names: of its files. Return the run file of the newest checkpoint if config.toml is missing, to restore it; else "".
    Raises: ConfigError if run.dir has other files, or holds a run and checkpoint.resume is "never".
    """
    has_config = contents.CONFIG in names
    saved = files.attempt(lambda: contents.read_run_file(name), f"run.dir={name} cannot be read", REMEDY, ConfigError
                          ) if has_checkpoints and not has_config else ""
    if not has_config and not saved and not contents.are_left_by_starts(names, has_checkpoints):
        raise ConfigError(f"run.dir={name} has files but is not the directory of a run (it has no config.toml); give "
                          f"an empty directory or another run.name")
    if (has_config or saved) and run.checkpoint.resume == "never":
        raise ConfigError(f"run.dir={name} already holds a run, and checkpoint.resume=\"never\"; give another run.name "
                          f"or run.dir, or resume=\"auto\" to resume it")
    return saved


def this_process() -> dict:
    """Return the owner entry that this process writes into a lock."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid()), "time": time.time(),
            "space": space(), "nonce": secrets.token_hex(8)}


def space() -> str:
    """Return an id of this boot and container; "" if unknown. Two processes with the same id can see each other."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _lock(lock: TextIO, directory: Path) -> None:
    """Lock an open lock file. Raises: ConfigError if this host uses the directory; _Held if another host may use it."""
    def flock() -> str:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "ours"
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return "held"
            if error.errno in NO_LOCKS:
                return "no locks"
            raise

    state = files.attempt(flock, f"run.dir={directory} cannot be locked", "give a directory on another file system",
                          ConfigError)
    if state == "ours":
        return
    owner = _owner(directory)
    if is_here(owner) and (state == "held" or owner["pid"] != os.getpid()):
        raise ConfigError(f"run.dir={directory} is in use by another run{by(owner)}; wait for it or give another "
                          f"run.name")
    if state == "held":
        raise _Held(owner)
    say.err(f"{directory} is on a file system without locks: a second run in it is detected only on this host; "
            f"mount it with locks (Lustre: -o flock), or make sure that no second run "
            f"starts{'. The last run in it' + by(owner) if owner else ''}")


def is_here(owner: dict | None) -> TypeGuard[dict]:
    """Return whether the owner is a live process of this host."""
    return owner is not None and owner["host"] == socket.gethostname() and owner["began"] == _began(owner["pid"]) != ""


def _owner(directory: Path) -> dict | None:
    with contextlib.suppress(OSError):
        return read_owner((directory / LOCK).read_text(encoding="utf-8"))
    return None


def read_owner(text: str) -> dict | None:
    """Return the owner that the text of a lock names, or None. A lease also gives "beat", its last renewal."""
    try:
        owner, _, beat = text.partition("\n")
        owner = json.loads(owner) | ({"beat": float(beat)} if beat else {})
        return owner if {"host", "pid", "began", "time"} <= owner.keys() else None
    except (ValueError, AttributeError):
        return None


def by(owner: dict | None) -> str:
    """Return process, host and start of an owner in parentheses, for messages; "" for None."""
    if not owner:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["time"]))
    return f" (pid {owner['pid']} on {owner['host']}, since {since})"


def _began(pid: int) -> str:
    """Return the start time of a process of this host in kernel ticks; "" if no such process exists. The time
    distinguishes processes with the same pid."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return ""


def at_work(directory: Path) -> dict | None:
    """Return the owner named in the lock file: host, pid, time, and "seen": whether its process was found on this host.

    Return None if the lock has no owner, or a dead owner. Takes no lock, so readers never block a run.
    """
    owner = _owner(directory)
    if owner is None or time.time() - owner.get("beat", math.inf) > NO_SIGN_S:
        return None
    if owner["host"] != socket.gethostname():
        return owner | {"seen": False}
    return owner | {"seen": True} if is_here(owner) else None


def _put(lock: TextIO, text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()
    os.fsync(lock.fileno())


def _check_shared(directory: Path, nonce: str) -> None:
    """Check that all processes see the lock file that process 0 has just written. Raises, in all processes: ConfigError
    if a process sees another file or no file; FileSystemError if a process cannot read the file."""
    def look():
        with contextlib.suppress(ValueError):
            if json.loads((directory / LOCK).read_text(encoding="utf-8"))["nonce"] == nonce:
                return
        raise FileNotFoundError(errno.ENOENT, "it reads another lock file")     # possibly an old cached copy

    fault, lasts = "", False
    try:
        files.patiently(look, missing=True)
    except OSError as error:
        fault, lasts = error.strerror or str(error), files.is_mistake(error)
    looks = agree.exchange([socket.gethostname(), fault, lasts])
    blind = [f"process {index} on {host} ({fault})" for index, (host, fault, _) in enumerate(looks) if fault]
    if blind:
        they = (f"{', '.join(blind[:8])}{f' and {len(blind) - 8} more' if len(blind) > 8 else ''} cannot see what "
                f"process 0 on {looks[0][0]} wrote there")
        raise agree.mark_agreed(
            ConfigError(f"run.dir={directory} is not one directory for all processes: {they}; "
                        "give a directory on a file system that all hosts have mounted")
            if any(lasts for *_, lasts in looks) else files.FileSystemError(
                f"run.dir={directory}: {they}; check the file system (mounts, server) and start again"))


def metadata(run: Run, rules_text: str, data: dict, named: Mapping[str, str] | None = None) -> dict:
    """Return the metadata saved with every checkpoint. data: from `resume.data_metadata`. named: from `resume.find`."""
    return {"run": settings(run), "run_file": config.dump(run), "rules": rules_text, "files": named or {}, "data": data}


def settings(run: Run) -> dict[str, dict]:
    """Return section -> key -> value, as JSON types."""
    return {name: section.model_dump(mode="json") for name, section in run}


def write_settings(run: Run, directory: Path, rules_text: str) -> None:
    """Write rules.toml (the rules in use) and copies of the run's own code, then config.toml (the resolved run file),
    which makes this a run directory."""
    values = [value for _, value, _ in named.values(run)]
    if custom.describe(values) != run.run.code:
        raise ConfigError(f"{' and '.join(run.run.code)} changed while the run started; start it again")
    custom.keep(values, directory / contents.CODE)
    (directory / contents.RULES).write_text(rules_text, encoding="utf-8")
    files.replace(directory / contents.CONFIG, config.dump(run))
