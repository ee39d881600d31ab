"""Reads and writes objects of buckets: s3:// and gs:// through obstore, and the schemes of `addresses.BUCKETS`.

Credentials come from the environment (AWS_*, GOOGLE_*) and go only to the store's own host. Messages hide what may be
secret in the library's text. A request is repeated if the server fails or does not answer. This module knows no cache.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import math
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from meshtrain import files, panics
from meshtrain.storage import retries
from meshtrain.storage.addresses import BUCKETS, Address, Changed, Missing, RemoteFile, StorageError

# A server is silent while it receives an object, and the library does not report its progress. So the time limit of a
# write is its bytes / SENT_BYTES_S, at least SILENCE_S. It is repeated with limits that are LONGER times as long.
SENT_BYTES_S, LONGER = 1 << 20, (1, 4, 16)
RANGE_BYTES, RANGES = 8 << 20, 4    # bytes of one request for a part of an object; number of concurrent requests
PART_BYTES = 64 << 20   # of a multipart upload; S3 accepts 10,000 parts
MOST_REMOVED = 1000     # objects in a request
HEADERS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
WRITER = "writer"       # an attribute of an object: the ID of the write that made it
STATUS_OF = {"FileNotFoundError": 404, "FileExistsError": 412, "PermissionError": 403}
ENDPOINT = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/[!-~]*)?")
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Version:
    """The version of an object. A write that names a version is refused if the object has changed since."""
    etag: str | None
    number: str | None      # Google's generation


class Objects(Protocol):
    """One bucket. meshtrain uses only these methods of obstore's stores, and a class for another system has the same
    methods. The class is called with the bucket's name and with keyword arguments for HTTP. Several threads and
    processes use a bucket at once. Paths name objects in the bucket, and folders without a slash at the end.

    Each method may raise FileNotFoundError, PermissionError, and FileExistsError if the condition of a request does not
    hold. After any other OSError the request is repeated. Source: developmentseed.org/obstore.
    """

    def list(self, prefix: str | None = None) -> Iterable[Sequence[Mapping[str, Any]]]:
        """Yield batches of the objects below a folder, or of all: "path", "size" (bytes) and "e_tag"."""

    def list_with_delimiter(self, prefix: str | None = None) -> Mapping[str, Any]:
        """Return "objects" directly in a folder, as in `list`, and "common_prefixes", the paths of its folders."""

    def get(self, path: str, *, options: Any = None) -> Any:
        """Return an object: bytes(), its meta (as in `list`, and "version") and the attributes of its write. options:
        "range" (start, stop); "if_match", the e_tag that the object must have; "head": without the object's bytes."""

    def put(self, path: str, file: bytes | Path, *, mode: Any = "overwrite", attributes: Any = None,
            **options: Any) -> Mapping[str, Any]:
        """Write an object as a whole; return its "e_tag", which changes with each write, and "version" (or None). mode:
        "create" if the object must not exist, or the "e_tag" and "version" that the object must have. options:
        obstore's options of an upload."""

    def copy(self, source: str, target: str) -> None: ...

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects. A missing object is no error, or FileNotFoundError if all are removed."""


class _Silence(Exception):
    """The server did not answer a write within the limit."""


def list_files(folder: Address) -> list[RemoteFile]:
    """Return every file below a folder. Raises: StorageError."""
    def ask(store):
        return [entry for batch in store.list(folder.path.rstrip("/") or None) for entry in batch]
    return [_of_bucket(folder, entry) for entry in _ask(folder, ask) if not entry["path"].endswith("/")]


def look_up(address: Address) -> RemoteFile | None:
    """Return the file at an address; None if no file is there. Raises: StorageError."""
    try:
        return _of_bucket(address, _ask(address, lambda store: store.get(address.path, options={"head": True}).meta))
    except Missing:
        return None


def _of_bucket(address: Address, entry: dict) -> RemoteFile:
    return RemoteFile(address.at(entry["path"]), entry["size"], entry["e_tag"] or "")


def read_into(remote: RemoteFile, file: BinaryIO, grew: Callable[[int], None]) -> None:
    """Write the bytes of a file to an empty local file, in several requests at once. Their threads call `grew` with the
    size of each piece that is written; `grew` may raise. Raises: StorageError, OSError of the local file."""
    total = remote.size
    assert total is not None, "a bucket reports the size of every object"

    def read(start: int) -> None:
        data = memoryview(_range(remote, start, min(start + RANGE_BYTES, total)))
        size = len(data)
        while data:     # a write may be short
            written = os.pwrite(file.fileno(), data, start)
            data, start = data[written:], start + written
        grew(size)

    with concurrent.futures.ThreadPoolExecutor(RANGES) as pool:
        list(pool.map(read, range(0, total, RANGE_BYTES)))


def read_range(remote: RemoteFile, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a bucket's file. Raises: Changed if the file has changed since it was listed;
    StorageError, FileSystemError."""
    with concurrent.futures.ThreadPoolExecutor(RANGES) as pool:
        return b"".join(pool.map(lambda begin: _range(remote, begin, min(begin + RANGE_BYTES, stop)),
                                 range(start, stop, RANGE_BYTES)))


def _range(remote: RemoteFile, start: int, stop: int) -> Any:
    options = {"range": (start, stop)} | ({"if_match": remote.etag} if remote.etag else {})
    return _ask(remote.address, lambda store: store.get(remote.address.path, options=options).bytes())


def read(address: Address, start: int = 0, stop: int | None = None) -> bytes:
    """Return an object, or bytes [start, stop) of it. Raises: Missing if it does not exist; StorageError."""
    options = None if stop is None else {"range": (start, stop)}
    return _ask(address, lambda store: bytes(store.get(address.path, options=options).bytes()))


def read_versioned(address: Address) -> tuple[bytes, Version] | None:
    """Return an object and its version for `write_if`; None if it does not exist. Raises: StorageError."""
    answer = _with_attributes(address)
    return answer and answer[:2]


def _with_attributes(address: Address) -> tuple[bytes, Version, dict[str, str]] | None:
    def ask(store):
        answer = store.get(address.path)
        return bytes(answer.bytes()), Version(answer.meta["e_tag"], answer.meta["version"]), answer.attributes
    try:
        return _ask(address, ask)
    except Missing:
        return None


def write(address: Address, content: bytes | Path) -> Version:
    """Write bytes or a local file as an object of a bucket; return its version. The object is replaced as a whole, or
    stays as it was. Raises: StorageError; OSError of the local file."""
    if isinstance(content, Path) and content.stat().st_size > PART_BYTES:
        return _put(address, content, PART_BYTES, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=RANGES)
    body = content.read_bytes() if isinstance(content, Path) else content
    return _put(address, body, len(body), use_multipart=False)


def create(address: Address, path: Path) -> str:
    """Write a local file as a new object of a bucket; return its etag. Raises: Changed if the object exists;
    StorageError; OSError of the local file."""
    if path.stat().st_size > PART_BYTES:        # a multipart upload cannot be conditional
        made = None if look_up(address) else write(address, path)
    else:
        made = write_if(address, path.read_bytes(), None, patient=True)
    if made is None:
        raise Changed(f"another process also writes to {address}; wait for it, or name another folder")
    return made.etag or ""


def write_if(address: Address, content: bytes, before: Version | None, *, patient: bool = False) -> Version | None:
    """Write an object if its version is still `before` (None: if it does not exist). Return the new version, or None if
    another process has written it. patient: repeat a failed request for longer. Raises: StorageError."""
    named = {"e_tag": before.etag, "version": before.number} if before else {}
    mode = {key: value for key, value in named.items() if value is not None} or "create"
    nonce = uuid.uuid4().hex
    try:
        return _put(address, content, len(content), patient=patient, mode=mode, use_multipart=False,
                    attributes={WRITER: nonce})
    except Missing:         # it was removed
        return None
    except Changed:
        answer = _with_attributes(address)     # a try whose answer was lost may have written it
        return answer[1] if answer and answer[2].get(WRITER) == nonce else None


def _put(address: Address, body: bytes | Path, sent: int, *, patient: bool = True, **options: Any) -> Version:
    """Write an object with limits on the time of a request; return its version. sent: bytes of one request. options:
    keyword arguments of obstore's put."""
    for longer in LONGER:
        # Rounded to few values, because each needs a client of its own.
        least_s = retries.SILENCE_S
        limit_s = least_s * 2 ** math.ceil(math.log2(max(1.0, longer * sent / SENT_BYTES_S / least_s)))
        try:
            made = _ask(address, lambda store: store.put(address.path, body, **options), "written", patient=patient,
                        silence_s=limit_s)
            return Version(made["e_tag"], made["version"])
        except _Silence:
            files.pause(0.0, str(address), f"it was not written within {limit_s:g} s")
    raise files.FileSystemError(f"{address} cannot be written: the server did not answer within {limit_s:g} s; check "
                                f"the server or the network, and start again")


def copy(source: Address, target: Address) -> None:
    """Copy an object within its bucket; its bytes do not pass through this host. Raises: StorageError."""
    _ask(source, lambda store: store.copy(source.path, target.path), "copied", patient=True,
         silence_s=retries.SILENCE_S * LONGER[1])       # the server is silent while it copies


def remove(objects: Sequence[Address]) -> None:
    """Remove objects of one bucket. A missing object is no error. Raises: StorageError."""
    for start in range(0, len(objects), MOST_REMOVED):
        paths = [address.path for address in objects[start:start + MOST_REMOVED]]
        with contextlib.suppress(Missing):
            _ask(objects[start], lambda store: store.delete(paths), "removed")


def children(folder: Address) -> tuple[list[str], list[str]]:
    """Return (names of objects, names of folders) directly below a folder of a bucket. Raises: StorageError."""
    listing = _ask(folder, lambda store: store.list_with_delimiter(folder.path.rstrip("/") or None))
    paths = [entry["path"] for entry in listing["objects"]], listing["common_prefixes"]
    objects, folders = ([path.rstrip("/").rpartition("/")[2] for path in some] for some in paths)
    return objects, folders


def _check_environment(address: Address) -> None:
    """Check variables that would abort the library if they were invalid. Raises: StorageError if one is."""
    for key, value in _environment() if address.scheme == "s3" else ():
        if key.startswith("AWS_ENDPOINT") and not ENDPOINT.fullmatch(value):
            raise StorageError(f"{address}: {key} is not https://HOST[:PORT] or http://HOST[:PORT]; fix or unset it")
        if key in HEADERS and not re.fullmatch(r"[!-~]*", value):
            raise StorageError(f"{address}: {key} has a character that HTTP does not allow; fix or unset it")


def endpoints(address: Address) -> list[str]:
    """Return the servers that the environment sets for the store. Without them a bucket's name is ambiguous."""
    return [value for key, value in _environment() if key.startswith(BUCKETS[address.scheme].endpoint)]


def _environment() -> tuple[tuple[str, str], ...]:
    """Return the variables that decide how a bucket is opened. If they change, the store is opened again."""
    return tuple(sorted((key, value) for key, value in os.environ.items() if key.startswith(("AWS_", "GOOGLE_"))))


@functools.lru_cache(maxsize=16)
def _bucket(scheme: str, name: str, environment: tuple, silence_s: float) -> Objects:
    module, _, kind = BUCKETS[scheme].opened_by.partition(":")
    # max_retries: `retries.patiently` repeats requests instead. allow_http: for endpoints in the environment.
    # read_timeout: from the start of a request to its answer, then between two reads. timeout: of a whole request; it
    # has no limit.
    return getattr(importlib.import_module(module), kind)(name, retry_config={"max_retries": 0}, client_options={
        "allow_http": True, "connect_timeout": "10s", "read_timeout": f"{silence_s * 1000:.0f}ms",
        "timeout": "365days"})


def _ask(address: Address, act: Callable[[Objects], Value], verb: str = "read", *, patient: bool = False,
         silence_s: float | None = None) -> Value:
    """Return act(store), where store is obstore's store of the address's bucket. Repeat act if the server fails. verb:
    the action in messages, e.g. "read". patient: repeat for longer. silence_s: time limit of a request; None: the
    default. Raises: StorageError, FileSystemError; _Silence if a write takes too long."""
    try:
        exceptions = importlib.import_module("obstore").exceptions
    except ImportError:
        raise StorageError(f"{address} needs the package obstore, which is not installed; run pip install -e "
                           f"'.[storage]'") from None
    _check_environment(address)
    try:
        with panics.caught():
            store = _bucket(address.scheme, address.home, _environment(), silence_s or retries.SILENCE_S)
    except (exceptions.BaseError, OSError, ValueError, panics.LibraryPanic):
        # the library's text may repeat the credentials
        raise StorageError(f"{address}: the environment has credentials or an endpoint that cannot be used; check "
                           f"{BUCKETS[address.scheme].credentials}") from None

    def judge():
        try:
            with panics.caught():
                return act(store)
        except (exceptions.BaseError, OSError, panics.LibraryPanic) as error:
            raise _of_obstore(address, error, verb) from None
    return retries.patiently(address, judge, verb=verb, patient=patient)


def _of_obstore(address: Address, error: Exception, verb: str) -> Exception:
    """Return the error to raise for an error of obstore. Its text may have URLs with tokens, which are left out."""
    text, kind = str(error), type(error).__name__
    if re.search(r"https?://(169\.254\.\d+\.\d+|\[fd00:|metadata)", text):   # obstore looks for a role of the machine
        return StorageError(f"{address}: there are no credentials in the environment, and this machine has no role; "
                            f"set {BUCKETS[address.scheme].credentials}")
    if status := re.search(r"status code: (\d{3}) ?([A-Za-z ]*)", text):
        code = re.search(r"<Code>([A-Za-z.]+)</Code>", text)
        return retries.error_of_status(address, int(status[1]), code[1] if code else status[2].strip(), verb)
    if "kind: Timeout" in text:
        return _Silence() if verb == "written" else retries.Moment("the server did not answer in time")
    first = re.sub(r"//[^/\s]*@", "//…@", re.sub(r"\?\S+", "?…", text.partition("\n")[0]))[:300]
    first = re.sub(r" in [\d.]+[nµm]?s\b", "", first)      # so that equal reasons have equal texts
    if kind == "InvalidPathError":
        key = match[1] if (match := re.search(r'Path "(.*?)"', text, re.DOTALL)) else first
        return StorageError(f"{address} cannot be {verb}: the bucket has the key {key!r} there, but keys with //, . or "
                            ".. among their folders cannot be listed; rename or remove that object")
    if kind in STATUS_OF:
        return retries.error_of_status(address, STATUS_OF[kind], first, verb)
    if kind == "LibraryPanic" or isinstance(error, OSError) or re.search(
            r"HTTP error|error sending request|timed? ?out|connection|decoding", first, re.IGNORECASE):
        return retries.Moment(first)
    credentials = f" and to {BUCKETS[address.scheme].credentials}" if re.search("credential|token|sign", first) else ""
    return StorageError(f"{address} cannot be {verb}: {first}; check the address{credentials}")
