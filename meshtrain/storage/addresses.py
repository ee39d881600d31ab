"""Addresses of files that lie in no file system: s3://, gs://, hf://, https:// and http://.

An address is written into config.toml and into messages, so it holds no secret: a password or a query, which may be a
signature, is refused, and the message hides it. Globs are those of Python's glob. This module reads nothing.
"""
from __future__ import annotations

import dataclasses
import fnmatch
import re
import urllib.parse

BUCKETS, WEB, HUB = ("s3", "gs"), ("https", "http"), "hf"
EXAMPLES = "s3://BUCKET/…, gs://BUCKET/…, hf://OWNER/NAME, hf://datasets/OWNER/NAME/… and https://HOST/…"
MAGIC = re.compile(r"[*?[]")
NAME = r"[\w.-]+"       # of an owner, a model or a data set of the hub


class StorageError(ValueError):
    """A file at an address cannot be had. The message has the address and the remedy, and no secret."""


class Refused(StorageError):
    """The credentials do not permit it. Unlike a wrong name this may end by itself: they expire, and are renewed."""


@dataclasses.dataclass(frozen=True)
class Address:
    """home: the bucket, HOST[:PORT], or [datasets/]OWNER/NAME of the hub. path: within it. revision: of the hub."""
    scheme: str
    home: str
    path: str
    revision: str = ""

    def __str__(self) -> str:
        at = f"@{urllib.parse.quote(self.revision, safe='')}" if self.revision else ""
        return f"{self.scheme}://{self.home}{at}" + (f"/{self.path}" if self.path else "")

    def at(self, path: str) -> Address:
        """Another path of the same home."""
        return dataclasses.replace(self, path=path)

    def below(self, name: str) -> Address:
        return self.at(f"{self.path.rstrip('/')}/{name}".lstrip("/"))

    __truediv__ = below     # as of a Path


def is_remote(text: object) -> bool:
    """Whether a value is an address of any scheme, rather than a path."""
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def shown(text: str) -> str:
    """An address without what may be secret: everything before an @ in its host, and its query."""
    scheme, _, rest = text.partition("://")
    host, slash, path = rest.partition("/")
    host = f"…@{host.rpartition('@')[2]}" if "@" in host else host
    query = re.search(r"[?#]", path) if scheme in WEB else None
    return f"{scheme}://{host}{slash}{path[:query.start()] + '?…' if query else path}"


def parse(text: str) -> Address:
    """Raises: StorageError if the address is of no known form, or may hold a secret."""
    scheme, _, rest = text.partition("://")
    home, _, path = rest.partition("/")
    if scheme not in (*BUCKETS, *WEB, HUB):
        raise StorageError(f"{shown(text)} is an address of {scheme}://, which cannot be read; known are {EXAMPLES}")
    if "@" in home:
        raise StorageError(f"{shown(text)} has a name or password before the host, which would be written to "
                           f"config.toml; leave it out: credentials come from the environment")
    if scheme in WEB and re.search(r"[?#]", path):
        raise StorageError(f"{shown(text)} has a query, which may hold a secret and would be written to config.toml; "
                           f"name the file without it")
    if re.search(r"[\0-\x1f\x7f]", text):
        raise StorageError(f"{shown(text)!r} has a control character; take it out")
    if {".", ".."} & set(path.split("/")):
        raise StorageError(f"{text} has . or .. among its folders; name the file itself")
    if scheme == HUB:
        return _of_hub(text, rest)
    if not home:
        raise StorageError(f"{text} names no {'bucket' if scheme in BUCKETS else 'host'}; known are {EXAMPLES}")
    return Address(scheme, home, path)


def _of_hub(text: str, rest: str) -> Address:
    kind, rest = ("datasets/", rest[len("datasets/"):]) if rest.startswith("datasets/") else ("", rest)
    found = re.fullmatch(rf"({NAME})/({NAME})(?:@([^/]+))?(?:/(.*))?", rest)
    if not found or found[1] in ("datasets", "models", "spaces"):
        raise StorageError(f"{text} is not hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://datasets/OWNER/NAME, with "
                           f"/PATH behind it; name the model or data set in full")
    return Address(HUB, f"{kind}{found[1]}/{found[2]}", (found[4] or "").rstrip("/"),
                   urllib.parse.unquote(found[3] or ""))


def folder_of(path: str) -> str:
    """The folder before a glob's first wildcard: what must be listed to find its files."""
    return MAGIC.split(path)[0].rpartition("/")[0]


def is_match(path: str, pattern: str) -> bool:
    """Whether glob.glob(pattern, recursive=True) would find the path: * and ? match within a name, ** any folders; a
    name that begins with a dot matches only where the pattern's does."""
    return _match(path.split("/"), pattern.split("/"))


def _match(names: list[str], parts: list[str]) -> bool:
    if not names or not parts:
        return not names and not parts
    is_hidden = names[0].startswith(".") and not parts[0].startswith(".")
    if parts[0] != "**":
        return not is_hidden and fnmatch.fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])
    return (_match(names, parts[1:]) or not is_hidden and (
        _match(names[1:], parts) or parts == ["**"] and len(names) == 1))
