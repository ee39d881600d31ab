"""The run directory: claimed by one start at a time, and the same for all processes. At an address: `bucket`.

A lock file marks a run in progress. Where a file system has no locks (Lustre without `-o flock`, FUSE), the lock file
still names its owner, and a second run on the owner's host is refused. What a resumed run may change is decided in
`resume`.
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

from meshtrain import config, files
from meshtrain.cluster import agree, watch
from meshtrain.config import ConfigError, Run
from meshtrain.run import contents, say
from meshtrain.run.contents import LOCK
from meshtrain.storage.mirror import LostClaimError

NO_SIGN_S = 120.0  # of an owner at an address, by the clocks of two hosts, after which readers take it for dead
LOOK_S = 1.0       # between two tries to get a lock
REMEDY = "give a directory that can"
NO_CONFIG = "{} has checkpoints but no config.toml: config.toml is restored from the newest checkpoint"
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)


class _Held(Exception):
    """The lock is held, perhaps by a host that is gone. owner: of `_owner`."""

    def __init__(self, owner: dict | None):
        super().__init__()
        self.owner = owner


@dataclasses.dataclass(eq=False)
class Claim:
    """Proof that run.dir belongs to this start. name: run.dir. directory: where this host reads and writes its files.
    nonce: in its lock as long as that is true. look: reads the lock; None: there is none. send: brings the files to
    where they are kept, if that is not the directory. lost: set once another start has taken run.dir over."""
    name: str
    directory: Path
    nonce: str
    look: Callable[[], str | None]
    send: Callable[[], None] = lambda: None
    lost: LostClaimError | None = None

    def check(self) -> None:
        """Called by any process before it renames or removes anything in run.dir. Raises: LostClaimError."""
        text = None if self.lost else self.look()
        if text is not None and (owner := named(text)) and owner.get("nonce") != self.nonce:
            self.lose(text)
        if self.lost:
            raise self.lost

    def lose(self, text: str) -> None:
        """Note that another start has taken run.dir over. text: of the lock."""
        self.lost = LostClaimError(f"run.dir={self.name} was taken over by another start{by(named(text))}, because "
                                   f"this one's lock had lapsed; this one stops and writes nothing more")


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[Claim]:
    """Context: holds run.dir for this run alone, in all its processes.

    Waits for a lock whose owner is not a process of this host. Raises: ConfigError where the directory cannot be used
    or is not shared by all processes, FileSystemError where the file system refuses or the lock stays held. Then
    nothing is changed.
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
    """In process 0: the nonce of the claim, which `stack` releases; None where the lock is still held after a while."""
    try:
        return stack.enter_context(_claimed(run))
    except _Held as held:
        waiting.go_on(by(held.owner), held.owner and held.owner.get("nonce"))
        time.sleep(LOOK_S)
        return None


@contextlib.contextmanager
def _claimed(run: Run) -> Iterator[str]:
    """In process 0: creates and locks the directory; yields the nonce in its lock file, for the others to find. Raises:
    _Held."""
    directory = Path(run.run.dir)
    existing = files.status(directory)
    if existing and not stat.S_ISDIR(existing.st_mode):
        raise ConfigError(f"run.dir={directory} is a file; give a directory that does not exist yet, or an empty one")
    refusal, saved = f"run.dir={directory} cannot be written", directory / contents.CHECKPOINTS
    names = files.attempted(lambda: set(os.listdir(directory)), refusal, REMEDY, ConfigError) if existing else set()
    has_checkpoints = contents.CHECKPOINTS in names and files.attempted(
        lambda: any(saved.iterdir()), refusal, REMEDY, ConfigError)
    run_file = check_contents(run, str(directory), names, has_checkpoints=has_checkpoints)
    locked_before = files.status(directory / LOCK) is not None

    def opened():
        directory.mkdir(parents=True, exist_ok=True)
        # and not "w": until it is locked, what stands there is another's
        return open(directory / LOCK, "a+", encoding="utf-8")

    with files.attempted(opened, refusal, REMEDY, ConfigError) as lock:
        _lock(lock, directory)
        owner = this_process()
        files.attempted(lambda: _put(lock, json.dumps(owner)), refusal, REMEDY, ConfigError)
        if run_file:
            say.err(NO_CONFIG.format(directory))
            files.attempted(lambda: files.replace(directory / contents.CONFIG, run_file), refusal, REMEDY, ConfigError)
        try:
            yield owner["nonce"]
        except ConfigError:     # found late, in the data: a mistake leaves nothing behind
            with contextlib.suppress(OSError):      # there is none, or not an empty one
                if not locked_before:
                    (directory / contents.CHECKPOINTS).rmdir()
            if not locked_before and [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                if not existing:
                    directory.rmdir()
            raise
        finally:
            with contextlib.suppress(OSError):
                if (_owner(directory) or owner).get("nonce") == owner["nonce"]:      # else a successor's stands there
                    _put(lock, "")


def check_contents(run: Run, name: str, names: set[str], *, has_checkpoints: bool) -> str:
    """Returns the run file of the newest checkpoint, to be written anew, where config.toml is gone; empty else. Raises:
    ConfigError where what is in run.dir, or that it is a run, forbids to begin or go on there."""
    has_config = contents.CONFIG in names
    saved = files.attempted(lambda: contents.saved_run_file(name), f"run.dir={name} cannot be read", REMEDY, ConfigError
                            ) if has_checkpoints and not has_config else ""
    if not has_config and not saved and not contents.are_left_by_starts(names, has_checkpoints):
        raise ConfigError(f"run.dir={name} has files and is not the directory of a run (no config.toml); give an empty "
                          f"directory or another run.name")
    if (has_config or saved) and run.checkpoint.resume == "never":
        raise ConfigError(f"run.dir={name} already holds a run, and checkpoint.resume=\"never\"; give another run.name "
                          f"or run.dir, or resume=\"auto\" to resume it")
    return saved


def this_process() -> dict:
    """The owner that this process writes into a lock."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid()), "time": time.time(),
            "space": space(), "nonce": secrets.token_hex(8)}


def space() -> str:
    """The id of this boot and container. Processes with the same id can see each other."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _lock(lock, directory: Path) -> None:
    """Raises: ConfigError where a process of this host is at work in the directory; _Held where somebody else may
    be."""
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

    found = files.attempted(flock, f"run.dir={directory} cannot be locked", "give a directory on another file system",
                            ConfigError)
    if found == "ours":
        return
    owner = _owner(directory)
    if is_here(owner) and (found == "held" or owner["pid"] != os.getpid()):
        raise ConfigError(f"run.dir={directory} is in use by another run{by(owner)}; wait for it or give another "
                          f"run.name")
    if found == "held":
        raise _Held(owner)
    say.err(f"{directory} is on a file system without locks: a second run in it is detected only on this host; "
            f"mount it with locks (Lustre: -o flock), or make sure that no second run "
            f"starts{'. The last run in it' + by(owner) if owner else ''}")


def is_here(owner: dict | None) -> bool:
    """Whether the owner is a live process of this host."""
    return bool(owner) and owner["host"] == socket.gethostname() and owner["began"] == _began(owner["pid"]) != ""


def _owner(directory: Path) -> dict | None:
    """The owner named in the lock file; None if it names none."""
    with contextlib.suppress(OSError):
        return named((directory / LOCK).read_text(encoding="utf-8"))
    return None


def named(text: str) -> dict | None:
    try:
        owner, _, beat = text.partition("\n")
        owner = json.loads(owner) | ({"beat": float(beat)} if beat else {})
        return owner if {"host", "pid", "began", "time"} <= owner.keys() else None
    except (ValueError, AttributeError):
        return None


def by(owner: dict | None) -> str:
    if not owner:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["time"]))
    return f" (pid {owner['pid']} on {owner['host']}, since {since})"


def _began(pid: int) -> str:
    """Start time of a process of this host in kernel ticks, because pids are reused. Empty: there is no such process.
    """
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return ""


def at_work(directory: Path) -> dict | None:
    """The owner that the lock file names: host, pid, time, and seen: whether its process was found. None: nobody, or a
    dead process of this host. Takes no lock, so readers never block a run."""
    owner = _owner(directory)
    if owner is None or time.time() - owner.get("beat", math.inf) > NO_SIGN_S:
        return None
    if owner["host"] != socket.gethostname():
        return owner | {"seen": False}
    return owner | {"seen": True} if is_here(owner) else None


def _put(lock, text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()
    os.fsync(lock.fileno())


def _check_shared(directory: Path, nonce: str) -> None:
    """Raises, in every process: ConfigError where one does not see what process 0 has just written, FileSystemError
    where one cannot read it."""
    def look():
        with contextlib.suppress(ValueError):
            if json.loads((directory / LOCK).read_text(encoding="utf-8"))["nonce"] == nonce:
                return
        raise FileNotFoundError(errno.ENOENT, "another lock file stands there")     # perhaps what was read before

    fault, lasts = "", False
    try:
        files.patiently(look, missing=True)
    except OSError as error:
        fault, lasts = error.strerror or str(error), files.is_mistake(error)
    found = agree.exchange([socket.gethostname(), fault, lasts])
    blind = [f"process {index} on {host} ({fault})" for index, (host, fault, _) in enumerate(found) if fault]
    if blind:
        they = (f"{', '.join(blind[:8])}{f' and {len(blind) - 8} more' if len(blind) > 8 else ''} cannot see what "
                f"process 0 on {found[0][0]} wrote there")
        raise agree.agreed(
            ConfigError(f"run.dir={directory} is not one directory for all processes: {they}; "
                        "give a directory on a file system that all hosts have mounted")
            if any(lasts for *_, lasts in found) else files.FileSystemError(
                f"run.dir={directory}: {they}; check the file system (its mounts, its server) and start again"))


def metadata(run: Run, rules_text: str, data: dict, named: Mapping[str, str] | None = None) -> dict:
    """The metadata saved with every checkpoint. data: of `resume.data_metadata`. named: of `resume.find`."""
    return {"run": settings(run), "run_file": config.dump(run), "rules": rules_text, "files": named or {}, "data": data}


def settings(run: Run) -> dict[str, dict]:
    """Section -> key -> value, as JSON."""
    return {name: section.model_dump(mode="json") for name, section in run}


def write_settings(run: Run, directory: Path, rules_text: str) -> None:
    """Writes rules.toml (as used), then config.toml (resolved), which marks the directory as a run's."""
    (directory / contents.RULES).write_text(rules_text, encoding="utf-8")
    files.replace(directory / contents.CONFIG, config.dump(run))
