"""Addresses of files outside the file system: s3://, gs://, hf://, https:// and http://.

An address is written into config.toml and into messages, so it must hold no secret. A password, or a query, which may
be a signature, is refused, and the message hides it. Globs are those of Python's glob. This module reads no files.
"""
from __future__ import annotations

import dataclasses
import fnmatch
import re
import urllib.parse

WEB, HUB = ("https", "http"), "hf"
EXAMPLES = "s3://BUCKET/…, gs://BUCKET/…, hf://OWNER/NAME, hf://datasets/OWNER/NAME/… and https://HOST/…"
MAGIC = re.compile(r"[*?[]")
NAME = r"[\w.-]+"       # of an owner, a model or a data set of the hub


class StorageError(ValueError):
    """A file at an address cannot be read or written. The message has the address and the remedy, and no secret."""


class Refused(StorageError):
    """The credentials do not permit the request. This may be temporary: credentials expire and are renewed."""


class Missing(StorageError):
    """There is no such file."""


class Changed(StorageError):
    """The file has changed since it was listed or read."""


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The buckets of a scheme. opened_by: MODULE:CLASS of one bucket, see `buckets.Objects`. credentials: the variables
    that the user sets, for messages. endpoint: the beginning of the names of variables that give another server."""
    opened_by: str
    credentials: str
    endpoint: str


BUCKETS = {
    "s3": Buckets("obstore.store:S3Store", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for a "
                  "public bucket), AWS_REGION and AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": Buckets("obstore.store:GCSStore", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BASE_URL"),
}


@dataclasses.dataclass(frozen=True)
class Address:
    """The parts of an address. home: the bucket, HOST[:PORT], or [datasets/]OWNER/NAME on the hub. path: the path
    within `home`. revision: a revision on the hub, or ""."""
    scheme: str
    home: str
    path: str
    revision: str = ""

    def __str__(self) -> str:
        at = f"@{urllib.parse.quote(self.revision, safe='')}" if self.revision else ""
        return f"{self.scheme}://{self.home}{at}" + (f"/{self.path}" if self.path else "")

    def at(self, path: str) -> Address:
        """Return the address of another path in the same home."""
        return dataclasses.replace(self, path=path)

    def below(self, name: str) -> Address:
        return self.at(f"{self.path.rstrip('/')}/{name}".lstrip("/"))

    __truediv__ = below     # like that of Path


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file at an address. etag: changes with the content; "" if the server has none. size: bytes; None: unknown.
    commit: on the hub, or "". It has no URL: a URL from a file could name a host that must not get the credentials."""
    address: Address
    size: int | None
    etag: str
    commit: str = ""


def is_remote(text: object) -> bool:
    """Return whether a value is an address of any scheme, rather than a path."""
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def correct_slashes(text: str) -> str:
    """Return the address that a text would be with two slashes after its scheme, e.g. s3://BUCKET for s3:/BUCKET; ""
    for any other text. Without this, s3:/BUCKET would be a new directory in the current one."""
    match = re.match(rf"({'|'.join((*BUCKETS, *WEB, HUB))}):(/?(?!/)|/{{3,}})", text)
    return f"{match[1]}://{text[match.end():]}" if match and text[match.end():] else ""


def hide_secrets(text: str) -> str:
    """Return an address without the parts that may be secret: everything before an @ in its host, and its query."""
    scheme, _, rest = text.partition("://")
    host, slash, path = rest.partition("/")
    host = f"…@{host.rpartition('@')[2]}" if "@" in host else host
    query = re.search(r"[?#]", path) if scheme in WEB else None
    return f"{scheme}://{host}{slash}{path[:query.start()] + '?…' if query else path}"


def parse(text: str) -> Address:
    """Return the address that a text names. Raises: StorageError if it has no known form, or may hold a secret."""
    scheme, _, rest = text.partition("://")
    home, _, path = rest.partition("/")
    if scheme not in (*BUCKETS, *WEB, HUB):
        raise StorageError(f"{hide_secrets(text)} is an address of {scheme}://, which cannot be read; use {EXAMPLES}")
    if "@" in home:
        raise StorageError(f"{hide_secrets(text)} has a name or password before the host, which would be written to "
                           f"config.toml; leave it out: credentials come from the environment")
    if scheme in WEB and re.search(r"[?#]", path):
        raise StorageError(f"{hide_secrets(text)} has a query, which may hold a secret and would be written to "
                           f"config.toml; name the file without it")
    if re.search(r"[\0-\x1f\x7f]", text):
        raise StorageError(f"{hide_secrets(text)!r} has a control character; take it out")
    if {".", ".."} & set(path.split("/")):
        raise StorageError(f"{text} has . or .. among its folders; name the file itself")
    if scheme == HUB:
        return _of_hub(text, rest)
    if not home:
        raise StorageError(f"{text} names no {'bucket' if scheme in BUCKETS else 'host'}; use {EXAMPLES}")
    return Address(scheme, home, path)


def _of_hub(text: str, rest: str) -> Address:
    kind, rest = ("datasets/", rest[len("datasets/"):]) if rest.startswith("datasets/") else ("", rest)
    match = re.fullmatch(rf"({NAME})/({NAME})(?:@([^/]+))?(?:/(.*))?", rest)
    if not match or match[1] in ("datasets", "models", "spaces"):
        raise StorageError(f"{text} is not hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://datasets/OWNER/NAME, "
                           f"with or without /PATH; name the model or data set in full")
    return Address(HUB, f"{kind}{match[1]}/{match[2]}", (match[4] or "").rstrip("/"),
                   urllib.parse.unquote(match[3] or ""))


def is_match(path: str, pattern: str) -> bool:
    """Return whether glob.glob(pattern, recursive=True) would find the path. * and ? match within a name, ** matches
    any folders. A name that begins with a dot matches only if its part of the pattern begins with a dot, too."""
    return _match(path.split("/"), pattern.split("/"))


def _match(names: list[str], parts: list[str]) -> bool:
    if not names or not parts:
        return not names and not parts
    is_hidden = names[0].startswith(".") and not parts[0].startswith(".")
    if parts[0] != "**":
        return not is_hidden and fnmatch.fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])
    return (_match(names, parts[1:]) or not is_hidden and (
        _match(names[1:], parts) or parts == ["**"] and len(names) == 1))
