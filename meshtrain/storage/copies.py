"""Copies files at addresses to this host. One process makes each copy, and renames it when it is complete.

The name of a copy's directory depends on addresses, sizes and etags of the file and its companion files. A changed file
gets another directory, and readers of the older copy can go on. So a directory is never stale, and a second run only
requests a listing from the store. The files that this process found at addresses are remembered until `forget`, so that
a run sees one state of them. The caller gives the directory of all copies, or `home` is used.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal

from meshtrain import files
from meshtrain.storage import addresses, buckets, web
from meshtrain.storage.addresses import BUCKETS, HUB, MAGIC, WEB, Address, RemoteFile, StorageError
from meshtrain.units import amount

AT_ONCE = 8     # files copied at the same time
POLL_S, TELL_S = 0.2, 30.0
LISTINGS, RUN_MARK = "commits", "config.toml"
COMMIT = re.compile(r"[0-9a-f]{40}")
MOST_INDEX_BYTES = 100_000_000


@dataclasses.dataclass
class _Seen:
    """The files that this process found. files: address -> file; None: no file is there. folders: completely listed
    folders. digests: name in the run file -> digest of its files. remote: files without a copy, by the copy's path."""
    files: dict[str, RemoteFile | None] = dataclasses.field(default_factory=dict)
    folders: set[Address] = dataclasses.field(default_factory=set)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    remote: dict[Path, RemoteFile] = dataclasses.field(default_factory=dict)


# Of the process: a run sees one state of each address, whichever thread or room asks. Only `forget` sets it.
_seen = _Seen()


def forget() -> None:
    """Forget the files that this process found. Called when a run begins."""
    global _seen
    _seen = _Seen()


def identities() -> str:
    """Return a line for each address that this process has listed, equal in two processes that saw the same files."""
    return "\n".join(f"{name} {digest}" for name, digest in sorted(_seen.digests.items()))


def home() -> Path:
    """Return the default directory of copies. Raises: StorageError if the user has no home directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise StorageError("there is no home directory for copies of files at addresses; set XDG_CACHE_HOME to a "
                           "directory of this host")
    return Path(base) / "meshtrain-files"


def is_run(name: str) -> bool:
    """Return whether a run's directory is at an address. Raises: StorageError, FileSystemError."""
    place = addresses.parse(name)
    return place.scheme in BUCKETS and _file(place.below(RUN_MARK)) is not None


def home_of(kind: str, address: Address) -> Path:
    """Return a directory of this host for files of an address. kind: the purpose of the files, a folder in `home`."""
    name = os.path.basename(address.path.rstrip("/") or address.home)[:60]
    return home() / kind / f"{_digest([str(address), *buckets.endpoints(address)])}-{name}"


# ---- listings --------------------------------------------------------------------------------------------------------


def match(pattern: str) -> list[str]:
    """Return the addresses of the files that a glob matches, sorted. The name of an existing file is taken literally.
    Raises: StorageError, also if no file matches."""
    wanted = addresses.parse(pattern)
    if wanted.scheme in WEB or not MAGIC.search(wanted.path) and wanted.scheme != HUB:
        matching = [entry] if (entry := _file(wanted)) else []
    else:
        there = _listing(wanted.at(MAGIC.split(wanted.path)[0].rpartition("/")[0]))     # before the first wildcard
        literal = [entry for entry in there if entry.address.path == wanted.path]
        matching = literal or [entry for entry in there if addresses.is_match(entry.address.path, wanted.path)]
    if not matching:
        hint = "https:// addresses cannot be globs; name each file" if wanted.scheme in WEB else \
            f"name files, or a glob of them, e.g. {wanted.below('**/*') if not MAGIC.search(pattern) else pattern}"
        raise StorageError(f"{pattern} matches no file; {hint}")
    _note(pattern, matching)
    return sorted(str(entry.address) for entry in matching)


def _file(address: Address) -> RemoteFile | None:
    name = str(address)
    if address.scheme == HUB and address.at("") not in _seen.folders:
        _listing(address)
    if name not in _seen.files and not any(
            folder.at("") == address.at("") and address.path.startswith(f"{folder.path}/".lstrip("/"))
            for folder in _seen.folders):
        _seen.files[name] = _protocol(address).look_up(address)
    return _seen.files.get(name)


def _listing(folder: Address) -> list[RemoteFile]:
    if folder.scheme == HUB:
        folder = folder.at("")
    if folder not in _seen.folders:
        listing = _hub_listing(folder) if folder.scheme == HUB else buckets.list_files(folder)
        _seen.files |= {str(entry.address): entry for entry in listing}
        _seen.folders.add(folder)
    inside = str(folder).rstrip("/") + "/"
    return [entry for name, entry in _seen.files.items() if entry and name.startswith(inside)]


def _hub_listing(folder: Address) -> list[RemoteFile]:
    """Return every file of a model or data set on the hub. If HF_HUB_OFFLINE is set or the revision is a commit, the
    listing that this host has kept is used."""
    kept = home() / LISTINGS / f"{_digest([web.hub(), str(folder)])}.json"
    if is_offline() or COMMIT.fullmatch(folder.revision):
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return [RemoteFile(folder.at(path), *rest) for path, *rest in json.loads(kept.read_text(encoding="utf-8"))]
        if is_offline():
            raise StorageError(f"{folder} has not been read on this host, and HF_HUB_OFFLINE forbids a request; start "
                               f"once without HF_HUB_OFFLINE, or copy {home()} from a host that has it")
    listing = web.list_files(folder)
    text = json.dumps([[entry.address.path, entry.size, entry.etag, entry.commit] for entry in listing])
    with writing(kept.parent):
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.replace(kept, text, shared=True)
    return listing


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _note(name: str, entries: Iterable[RemoteFile]) -> str:
    _seen.digests[name] = _digest(sorted(_identity(entry) for entry in entries))
    return _seen.digests[name]


def _identity(entry: RemoteFile) -> list:
    return [str(entry.address), entry.size or 0, entry.etag]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


# ---- copies ----------------------------------------------------------------------------------------------------------


# How weights of a model folder are read: not at all, from copies on this host, or as ranges of a bucket's objects when
# they are needed. Weights outside buckets are copied: the hub limits requests, and a web server may have no ranges.
Weights = Literal["", "copied", "ranges"]


@dataclasses.dataclass(frozen=True)
class Copying:
    """The directory of copies, and callbacks during long work. tell: receives a line on the progress. check: called
    between pieces of work; may raise."""
    directory: Path
    tell: Callable[[str], None] = lambda line: None
    check: Callable[[], None] = lambda: None


def copy_files(names: Sequence[str], beside: Callable[[str], Sequence[str]], copying: Copying) -> list[Path]:
    """Copy files at addresses to this host; return the local files. beside: name -> names of its companion files. Those
    that exist are copied into the same directory, which no other file of `names` shares. Raises: StorageError,
    ValueError, FileSystemError; any exception of `check`."""
    groups = []
    for name in names:
        group = [_file(addresses.parse(other)) for other in (name, *beside(name))]
        if group[0] is None:
            raise StorageError(f"{name} does not exist; name an existing file")
        groups.append([*filter(None, group)])
    _note(f"{names[0]} and the files read with it", [entry for group in groups for entry in group])
    places = [copying.directory / f"{_digest([_identity(entry) for entry in group])}-{_name(group[0])[:60]}"
              for group in groups]
    _copy(list(zip(places, groups)), copying)
    return [place / _name(group[0]) for place, group in zip(places, groups)]


def folder(name: str, companions: Sequence[str], index: str, suffix: str, *, weights: Weights,
           tell: Callable[[str], None] = lambda line: None) -> Path:
    """Return the local directory of a model folder at an address.

    companions: names of small files, any of which may be missing. index: the companion whose weight_map names the
    weight files, in JSON. suffix: of weight files. weights: see `Weights`. Raises: as `copy_files`.
    """
    place = addresses.parse(name)
    entries = _web_folder(place, companions, index, suffix) if place.scheme in WEB else [
        entry for entry in _listing(place) if entry.address == place.below(_name(entry)) and (
            _name(entry) in companions or _name(entry).endswith(suffix))]
    if not entries:
        raise StorageError(f"{name} has no {companions[0]} and no *{suffix}; name a model folder of Hugging Face's")
    directory = home() / f"{_note(name, entries)}-{os.path.basename(place.path or place.home)[:60]}"
    remote = {directory / _name(entry): entry for entry in entries if _name(entry) not in companions} if (
        weights == "ranges" and place.scheme in BUCKETS) else {}
    _seen.remote |= {path: entry for path, entry in remote.items() if not _is_whole(path, entry)}
    _copy([(directory, [entry for entry in entries if _name(entry) in companions or weights and directory / _name(entry)
                        not in remote])], Copying(home(), tell))
    return directory


def remote(path: Path) -> RemoteFile | None:
    """Return the file of a bucket that is read by ranges instead of a copy at this path; None for any other path."""
    return _seen.remote.get(path)


def _web_folder(place: Address, companions: Sequence[str], index: str, suffix: str) -> list[RemoteFile]:
    """Return the files of a model folder on a web server, which cannot list them."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        entries = [*filter(None, pool.map(_file, map(place.below, (*companions, f"model{suffix}"))))]
        if not any(_name(entry) == index for entry in entries):
            return entries
        (path,) = copy_files([str(place.below(index))], lambda name: (), Copying(home()))
        try:
            names = set(json.loads(path.read_bytes())["weight_map"].values()) if \
                path.stat().st_size < MOST_INDEX_BYTES else set()
        except (ValueError, KeyError, TypeError, AttributeError):
            return entries        # the fault of the index is reported when the folder is opened
        plain = [name for name in names
                 if isinstance(name, str) and re.fullmatch(rf"[\w.-]+{re.escape(suffix)}", name)]
        return [*entries, *filter(None, pool.map(_file, map(place.below, sorted(plain))))]


def _name(entry: RemoteFile) -> str:
    return entry.address.path.rpartition("/")[2]


def _copy(groups: Sequence[tuple[Path, Sequence[RemoteFile]]], copying: Copying) -> None:
    """Copy the files that are missing in the directories. One process copies each file, and the others wait for it."""
    wanted = {place / _name(entry): entry for place, group in groups for entry in group}
    with writing(copying.directory):
        if not (left := {path: entry for path, entry in wanted.items() if not _is_whole(path, entry)}):
            return
        if refused := [entry for entry in left.values() if entry.address.scheme == HUB and is_offline()]:
            raise StorageError(f"{refused[0].address} has not been copied to {copying.directory}, and HF_HUB_OFFLINE "
                               f"forbids a request; start once without HF_HUB_OFFLINE")
        _fetch(left, copying)


def _is_whole(path: Path, entry: RemoteFile) -> bool:
    try:
        return files.patiently(lambda: os.stat(path)).st_size == entry.size or entry.size is None
    except FileNotFoundError:
        return False


def _fetch(wanted: dict[Path, RemoteFile], copying: Copying) -> None:
    total, came = sum(entry.size or 0 for entry in wanted.values()), [0]
    what = f"copying {amount(len(wanted), 'file')}, {total / 1e6:,.1f} MB, from " \
           f"{next(iter(wanted.values())).address}{' and others' * (len(wanted) > 1)}"
    told, first = time.monotonic(), iter([f"{what}, to {copying.directory}"])

    def grew(count: int) -> None:
        nonlocal told
        copying.check()
        came.append(count)      # from several threads
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            copying.tell(f"{what}: {sum(came) / 1e6:,.1f} MB copied")

    def fetch(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        with _alone(temporary, copying) as file:
            try:
                if not _is_whole(path, wanted[path]):       # another process may have made it
                    for line in first:      # one of the threads prints it
                        copying.tell(line)
                    file.truncate(0)        # bytes that a killed process has left
                    _read_into(wanted[path], file, grew)
                    os.fsync(file.fileno())
                    temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(fetch, wanted))


def _read_into(entry: RemoteFile, file: BinaryIO, grew: Callable[[int], None]) -> None:
    """Write a remote file to an empty local file. `grew` is called with the size of each piece, and may raise.

    Raises: StorageError, also if the file has changed since it was listed; OSError of the local file.
    """
    _protocol(entry.address).read_into(entry, file, grew)
    size = file.seek(0, os.SEEK_END)
    if entry.size is not None and size != entry.size:
        raise StorageError(f"{entry.address} has {size:,} bytes, but its server reported {entry.size:,}; "
                           f"start again when no program writes to it")


def _protocol(address: Address) -> ModuleType:
    return buckets if address.scheme in BUCKETS else web


@contextlib.contextmanager
def _alone(path: Path, copying: Copying) -> Iterator[BinaryIO]:
    """Yield a file that no other process writes. The system frees its lock when its owner dies. Raises: FileSystemError
    if another process has the lock and the file does not change for long."""
    waiting = files.Waiting(f"{path} is being written by ", copying.tell)
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                now = files.status(path)
                if now and os.path.samestat(now, os.fstat(file.fileno())):      # else its owner has just renamed it
                    yield file
                    return
            except BlockingIOError:
                now = os.fstat(file.fileno())
                waiting.go_on("another process", (now.st_size, now.st_mtime_ns))
                copying.check()
                time.sleep(POLL_S)


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Convert an OSError of the block. Raises: StorageError if the user can correct it, else FileSystemError."""
    try:
        yield
    except OSError as error:
        raise files.error_to_raise(error, f"copies of files at addresses cannot be written to {directory}",
                                   "set data.cache, or XDG_CACHE_HOME, to a directory of this host with room",
                                   StorageError) from None
