"""Writes a model folder atomically: in a directory or a bucket it appears as a whole, or not at all."""
from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from meshtrain import files
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, user_errors
from meshtrain.huggingface import settings
from meshtrain.run.rundir import NO_LOCKS
from meshtrain.storage import buckets, copies
from meshtrain.storage.addresses import Address, StorageError

ADAPTERS = "adapter_config.json"
MARKS = (settings.CONFIG, ADAPTERS)     # in a bucket one of them is written last: without it a folder is incomplete
CLAIM = ".writing"          # in a bucket the first object, removed after the mark is written: the writer's nonce
SCRATCH = "exports"         # a folder in the directory of local copies
Target = Path | Address
Value = TypeVar("Value")


def writing(target: Target) -> contextlib.AbstractContextManager[Path]:
    """Context: a temporary directory. At the end of the block its files become the files of `target`; after an
    exception, `target` gets no files.

    All processes enter the block together, and each writes files of its own. A second writer is refused: in a directory
    at once, in a bucket before the mark is written. Raises: ConfigError if `target` is not free; CheckpointError, in
    every process, if the file system or the bucket fails.
    """
    return _in_bucket(target) if isinstance(target, Address) else _in_directory(target)


@contextlib.contextmanager
def _in_directory(directory: Path) -> Iterator[Path]:
    """Write into a temporary directory and rename it at the end of the block. Process 0 holds a lock and renames."""
    place = directory.with_name(f".{directory.name}.saving")
    with contextlib.ExitStack() as held:
        on_first(directory, lambda: held.enter_context(_lock_place(directory, place)))
        try:
            yield place
            on_first(directory, lambda: _name(place, directory))
        except Exception:
            if jax.process_index() == 0:
                shutil.rmtree(place, ignore_errors=True)
            raise


@contextlib.contextmanager
def _in_bucket(target: Address) -> Iterator[Path]:
    """Write into a local directory and upload its files at the end of the block. Process 0 claims the folder, each
    process creates its objects, then process 0 creates the mark."""
    scratch = copies.home_of(SCRATCH, target) / f"process-{jax.process_index()}"
    nonce = agree.on_first(lambda: uuid.uuid4().hex)

    def claim() -> None:
        _check_free(target)
        if buckets.write_if(target.below(CLAIM), nonce.encode(), None) is None:
            raise ConfigError(f"{target} is being written by another process; wait for it, or name another folder")

    def check_claim() -> None:
        claimed = buckets.read_versioned(target.below(CLAIM))
        if claimed is None or claimed[0] != nonce.encode():
            raise ConfigError(f"another process also writes to {target}: it has replaced or removed {CLAIM}; wait "
                              f"for it, or name another folder")

    def begin() -> None:
        shutil.rmtree(scratch, ignore_errors=True)      # left by a killed export
        scratch.mkdir(parents=True)

    def send() -> dict[str, str]:
        etags = {}
        for path in sorted(scratch.iterdir()):
            if path.name not in MARKS:
                check_claim()
                etags[path.name] = buckets.create(target.below(path.name), path)
        return etags

    def commit(etags: dict[str, str]) -> None:
        check_claim()
        there = {file.address.path.rpartition("/")[2]: file.etag for file in buckets.list_files(target)}
        if lost := sorted(name for name, etag in etags.items() if there.get(name) != etag):
            raise ConfigError(f"another process also writes to {target}: it has replaced or removed "
                              f"{', '.join(lost)}; wait for it, or name another folder")
        (mark,) = [path for path in scratch.iterdir() if path.name in MARKS]
        buckets.create(target.below(mark.name), mark)
        buckets.remove([target.below(CLAIM)])

    on_first(target, claim)
    try:
        agree.everywhere(lambda: _judge(target, begin))
        yield scratch
        sent = agree.exchange(agree.everywhere(lambda: _judge(target, send)))
        on_first(target, lambda: commit({name: etag for some in sent for name, etag in some.items()}))
    except Exception:
        if jax.process_index() == 0:
            with contextlib.suppress(StorageError, OSError, ConfigError):
                check_claim()
                discard_half(target)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_free(target: Address) -> None:
    names, folders = buckets.children(target)
    if names and not {*MARKS} & {*names}:
        raise ConfigError(f"{target} has files but no {MARKS[0]}: another process is writing it, or was killed while "
                          "it did; remove the files, or name another folder")
    if names or folders:
        raise ConfigError(f"{target} exists already and is not overwritten; name another folder")


def exists(target: Target) -> bool:
    """Return whether a folder exists as a whole. Raises: StorageError, OSError."""
    if isinstance(target, Address):
        return bool({*MARKS} & {*buckets.children(target)[0]})
    return files.status(target) is not None


def discard_half(target: Target) -> None:
    """Remove the files of an incomplete folder in a bucket, which a killed writer has left. Raises: StorageError,
    OSError."""
    if isinstance(target, Address) and not exists(target):
        buckets.remove([file.address for file in buckets.list_files(target)])


def set_aside(target: Target) -> str:
    """Rename a folder; return its new name. Raises: StorageError, OSError."""
    if not isinstance(target, Address):
        return files.set_aside(target, "aside")
    parent, _, name = target.path.rpartition("/")
    taken = buckets.children(target.at(parent))[1]
    new = files.free_name(f"{name}.aside", lambda one: one in taken)
    found = sorted((one.address for one in buckets.list_files(target)), key=_is_mark)
    for one in found:       # the mark is copied last and removed first
        buckets.copy(one, target.at(f"{parent}/{new}/{one.path.removeprefix(f'{target.path}/')}"))
    buckets.remove([one for one in found if _is_mark(one)])
    buckets.remove([one for one in found if not _is_mark(one)])
    return new


def _is_mark(address: Address) -> bool:
    return address.path.rpartition("/")[2] in MARKS


def on_first(target: Target, act: Callable[[], Value]) -> Value:
    """Call act() in process 0; return its value in every process. Raises: CheckpointError if the file system or the
    bucket's server fails (PeerError in other processes); ConfigError if the bucket refuses a request."""
    return agree.on_first(lambda: _judge(target, act))


def _judge(target: Target, act: Callable[[], Value]) -> Value:
    try:
        return act()
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {files.describe(error)}") from error
    except StorageError as error:
        with user_errors():     # except credentials that are refused at a restart, which have expired
            raise error


@contextlib.contextmanager
def _lock_place(directory: Path, place: Path) -> Iterator[None]:
    """Check that `directory` is free, empty `place`, and hold a lock on `directory` until the block ends. Process 0
    calls it."""
    if files.status(directory) and not (files.is_dir(directory) and not any(directory.iterdir())):
        raise ConfigError(f"{directory} exists already and is not overwritten; name another directory")
    with contextlib.ExitStack() as held:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(_lock(directory, directory.with_name(f".{directory.name}.lock")))
            if place.exists():
                shutil.rmtree(place)        # left by a killed export
            place.mkdir()
        except OSError as error:
            if not files.is_mistake(error):
                raise
            message = f"{directory} cannot be written: {files.describe(error)}; name a writable directory"
            raise ConfigError(message) from None
        yield


@contextlib.contextmanager
def _lock(directory: Path, path: Path) -> Iterator[None]:
    """Hold a lock file until the block ends, then remove the file. A file that a killed process has left is not locked.
    On a file system without locks (Lustre without `-o flock`) a second writer is not detected."""
    while True:
        with open(path, "a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{directory} is being written by another process; wait for it, or name another "
                                  "directory") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            with contextlib.suppress(FileNotFoundError):
                # else the last holder has just removed the file: open it again
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                    try:
                        yield
                    finally:
                        with contextlib.suppress(OSError):
                            os.unlink(path)
                    return


def _name(place: Path, directory: Path) -> None:
    files.sync(place)
    place.rename(directory)         # fails unless `directory` is absent or empty
    files.sync(directory.parent)
