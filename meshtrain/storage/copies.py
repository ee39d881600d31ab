"""Copies of files at addresses, on this host: made once, by one of its processes, and renamed when they are whole.

A copy lies in a directory that is named by addresses, sizes and etags, of the file and of those that belong beside it:
a file that changes gets another directory, and what reads the older copy goes on with it. So a directory is never
stale, and a second run asks the store for a list alone. What this process found at addresses is kept until `forget`,
so that all of a run sees one state. The directory of all copies is given, or `home`.
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
from typing import BinaryIO, Literal

from meshtrain import files
from meshtrain.storage import addresses, stores
from meshtrain.storage.addresses import BUCKETS, HUB, MAGIC, WEB, Address, StorageError
from meshtrain.storage.stores import RemoteFile
from meshtrain.units import counted

AT_ONCE = 8     # files
POLL_S, TELL_S = 0.2, 30.0
LISTINGS, RUN_MARK = "commits", "config.toml"
COMMIT = re.compile(r"[0-9a-f]{40}")
MOST_INDEX_BYTES = 100_000_000


@dataclasses.dataclass
class _Seen:
    """What this process found: files (None: there is none), folders of which all files are known, and the digest of
    each name of the run file. remote: files of which there is no copy, by the path where it would be."""
    files: dict[str, RemoteFile | None] = dataclasses.field(default_factory=dict)
    folders: set[Address] = dataclasses.field(default_factory=set)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    remote: dict[Path, RemoteFile] = dataclasses.field(default_factory=dict)


_seen = _Seen()


def forget() -> None:
    """Look at every address anew: a run begins."""
    global _seen
    _seen = _Seen()


def identities() -> str:
    """A line for each address that this process has listed: equal in two processes that saw the same files."""
    return "\n".join(f"{name} {digest}" for name, digest in sorted(_seen.digests.items()))


def home() -> Path:
    """The directory of copies where none is given. Raises: StorageError without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise StorageError("there is no home directory for copies of files at addresses; set XDG_CACHE_HOME to a "
                           "directory of this host")
    return Path(base) / "meshtrain-files"


def is_run(name: str) -> bool:
    """Whether a run's directory is at an address. Raises: StorageError, FileSystemError."""
    place = addresses.parse(name)
    return place.scheme in BUCKETS and _file(place.below(RUN_MARK)) is not None


def named_home(kind: str, address: Address) -> Path:
    """A directory of this host for what is at an address. kind: what it is for."""
    name = os.path.basename(address.path.rstrip("/") or address.home)[:60]
    return home() / kind / f"{_digest([str(address), *stores.endpoints(address)])}-{name}"


# ---- what is there ---------------------------------------------------------------------------------------------------


def matched(pattern: str) -> list[str]:
    """The addresses of the files that a glob matches, sorted; an existing name is taken literally. Raises:
    StorageError, also where there is none."""
    wanted = addresses.parse(pattern)
    if wanted.scheme in WEB or not MAGIC.search(wanted.path) and wanted.scheme != HUB:
        found = [one] if (one := _file(wanted)) else []
    else:
        there = _listing(wanted.at(addresses.folder_of(wanted.path)))
        literal = [one for one in there if one.address.path == wanted.path]
        found = literal or [one for one in there if addresses.is_match(one.address.path, wanted.path)]
    if not found:
        hint = "https:// has no globs; name each file" if wanted.scheme in WEB else \
            f"name files, or a glob of them, e.g. {wanted.below('**/*') if not MAGIC.search(pattern) else pattern}"
        raise StorageError(f"{pattern} matches no file; {hint}")
    _note(pattern, found)
    return sorted(str(one.address) for one in found)


def _file(address: Address) -> RemoteFile | None:
    """One file; None if there is none."""
    name = str(address)
    if address.scheme == HUB and address.at("") not in _seen.folders:
        _listing(address)
    if name not in _seen.files and not any(
            folder.at("") == address.at("") and address.path.startswith(f"{folder.path}/".lstrip("/"))
            for folder in _seen.folders):
        _seen.files[name] = stores.looked_up(address)
    return _seen.files.get(name)


def _listing(folder: Address) -> list[RemoteFile]:
    """Every file below a folder."""
    if folder.scheme == HUB:
        folder = folder.at("")
    if folder not in _seen.folders:
        found = _hub_listing(folder) if folder.scheme == HUB else stores.listed(folder)
        _seen.files |= {str(one.address): one for one in found}
        _seen.folders.add(folder)
    inside = str(folder).rstrip("/") + "/"
    return [one for name, one in _seen.files.items() if one and name.startswith(inside)]


def _hub_listing(folder: Address) -> list[RemoteFile]:
    """As `stores.listed`; from the last list where the hub is not to be asked, or a commit is named."""
    kept = home() / LISTINGS / f"{_digest([stores.hub(), str(folder)])}.json"
    if is_offline() or COMMIT.fullmatch(folder.revision):
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return [RemoteFile(folder.at(path), *rest) for path, *rest in json.loads(kept.read_text(encoding="utf-8"))]
        if is_offline():
            raise StorageError(f"{folder} has not been read on this host, and HF_HUB_OFFLINE forbids to ask for it; "
                               f"start once without, or copy {home()} from a host that has it")
    found = stores.listed(folder)
    text = json.dumps([[one.address.path, one.size, one.etag, one.commit] for one in found])
    with writing(kept.parent):
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.replace(kept, text, shared=True)
    return found


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _note(name: str, found: Iterable[RemoteFile]) -> str:
    _seen.digests[name] = _digest(sorted(_identity(one) for one in found))
    return _seen.digests[name]


def _identity(found: RemoteFile) -> list:
    return [str(found.address), found.size or 0, found.etag]


def _digest(value) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


# ---- copies ----------------------------------------------------------------------------------------------------------


# Of a model folder: none, copies on this host, or read from a bucket by ranges, by whom they are asked for; others are
# copied: the hub limits its requests, and a web server may have no ranges.
Weights = Literal["", "copied", "ranges"]


@dataclasses.dataclass(frozen=True)
class Copying:
    """Where copies lie, and who hears of long work. check: is called between pieces of it, and may raise."""
    directory: Path
    tell: Callable[[str], None] = lambda line: None
    check: Callable[[], None] = lambda: None


def copied(names: Sequence[str], beside: Callable[[str], Sequence[str]], copying: Copying) -> list[Path]:
    """The local files of addresses, each with those that `beside` names for it, as far as they exist, in a directory of
    its own. Raises: StorageError, ValueError, FileSystemError; what `check` raises."""
    groups = []
    for name in names:
        group = [_file(addresses.parse(other)) for other in (name, *beside(name))]
        if group[0] is None:
            raise StorageError(f"{name} is not there; name a file that is")
        groups.append([*filter(None, group)])
    _note(f"{names[0]} and what is read with it", [one for group in groups for one in group])
    places = [copying.directory / f"{_digest([_identity(one) for one in group])}-{_name(group[0])[:60]}"
              for group in groups]
    _copy(list(zip(places, groups)), copying)
    return [place / _name(group[0]) for place, group in zip(places, groups)]


def folder(name: str, companions: Sequence[str], index: str, suffix: str, *, weights: Weights,
           tell: Callable[[str], None] = lambda line: None) -> Path:
    """The local directory of a model folder at an address.

    companions: names of small files, of which any may be missing. index: of those, the JSON whose weight_map names the
    files of weights. suffix: of the names of weights. Raises: as `copied`.
    """
    place = addresses.parse(name)
    found = _web_folder(place, companions, index, suffix) if place.scheme in WEB else [
        one for one in _listing(place) if one.address == place.below(_name(one)) and (
            _name(one) in companions or _name(one).endswith(suffix))]
    if not found:
        raise StorageError(f"{name} has no {companions[0]} and no *{suffix}; name a model folder of Hugging Face's")
    directory = home() / f"{_note(name, found)}-{os.path.basename(place.path or place.home)[:60]}"
    remote = {directory / _name(one): one for one in found if _name(one) not in companions} if (
        weights == "ranges" and place.scheme in BUCKETS) else {}
    _seen.remote |= {path: one for path, one in remote.items() if not _is_whole(path, one)}
    _copy([(directory, [one for one in found if _name(one) in companions or weights and directory / _name(one)
                        not in remote])], Copying(home(), tell))
    return directory


def remote(path: Path) -> RemoteFile | None:
    """The file of a bucket that has no copy at this path; None for any other path."""
    return _seen.remote.get(path)


def _web_folder(place: Address, companions: Sequence[str], index: str, suffix: str) -> list[RemoteFile]:
    """The files of a model folder on the web, where nothing lists them."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        found = [*filter(None, pool.map(_file, map(place.below, (*companions, f"model{suffix}"))))]
        if not any(_name(one) == index for one in found):
            return found
        (path,) = copied([str(place.below(index))], lambda name: (), Copying(home()))
        try:
            names = set(json.loads(path.read_bytes())["weight_map"].values()) if \
                path.stat().st_size < MOST_INDEX_BYTES else set()
        except (ValueError, KeyError, TypeError, AttributeError):
            return found        # whoever opens the folder says what is wrong with its index
        plain = [one for one in names if isinstance(one, str) and re.fullmatch(rf"[\w.-]+{re.escape(suffix)}", one)]
        return [*found, *filter(None, pool.map(_file, map(place.below, sorted(plain))))]


def _name(found: RemoteFile) -> str:
    return found.address.path.rpartition("/")[2]


def _copy(groups: Sequence[tuple[Path, Sequence[RemoteFile]]], copying: Copying) -> None:
    """Copies what is missing in the directories: each file is copied by one process, and the others wait for it."""
    wanted = {place / _name(one): one for place, group in groups for one in group}
    with writing(copying.directory):
        if not (left := {path: one for path, one in wanted.items() if not _is_whole(path, one)}):
            return
        if refused := [one for one in left.values() if one.address.scheme == HUB and is_offline()]:
            raise StorageError(f"{refused[0].address} has not been copied to {copying.directory}, and HF_HUB_OFFLINE "
                               f"forbids to ask for it; start once without")
        _fetch(left, copying)


def _is_whole(path: Path, found: RemoteFile) -> bool:
    try:
        return files.patiently(lambda: os.stat(path)).st_size == found.size or found.size is None
    except FileNotFoundError:
        return False


def _fetch(wanted: dict[Path, RemoteFile], copying: Copying) -> None:
    total, came = sum(one.size or 0 for one in wanted.values()), [0]
    what = f"copying {counted(len(wanted), 'file')}, {total / 1e6:,.1f} MB, from " \
           f"{next(iter(wanted.values())).address}{' and others' * (len(wanted) > 1)}"
    told, first = time.monotonic(), iter([f"{what}, to {copying.directory}"])

    def grew(count: int) -> None:
        nonlocal told
        copying.check()
        came.append(count)      # from several threads
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            copying.tell(f"{what}: {sum(came) / 1e6:,.1f} MB are there")

    def fetch(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        with _alone(temporary, copying) as file:
            try:
                if not _is_whole(path, wanted[path]):       # another process may have made it
                    for line in first:      # of all threads one gets it
                        copying.tell(line)
                    file.truncate(0)        # left by one that was killed
                    stores.read_into(wanted[path], file, grew)
                    os.fsync(file.fileno())
                    temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
    try:
        list(pool.map(fetch, wanted))
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _alone(path: Path, copying: Copying) -> Iterator[BinaryIO]:
    """A file that no other process writes: its lock is freed by the system when its owner dies. Raises: FileSystemError
    where another has the lock and the file does not change for long."""
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
    """Raises: StorageError or FileSystemError for an OSError."""
    try:
        yield
    except OSError as error:
        raise files.judged(error, f"copies of files at addresses cannot be written to {directory}",
                           "set data.cache, or XDG_CACHE_HOME, to a directory of this host with room",
                           StorageError) from None
