"""A store of one's own: buckets of the scheme shelf:// are folders below SHELVES, one file an object. It has the six
methods of `meshtrain.storage.buckets.Objects` and no HTTP.

`python -m tests.shelf KILLED WORDS` trains with it, and kills itself when it writes an object whose path ends with
KILLED.
"""
import contextlib
import fcntl
import json
import os
import signal
import sys
import types
import urllib.parse
import uuid
from pathlib import Path

from meshtrain.storage import addresses

ROW = addresses.Buckets("tests.shelf:Shelf", "SHELVES", "SHELVES")


class Shelf:
    """A file has one line of JSON, {"e_tag", "attributes"}, and then the object's bytes."""
    killed = "\0"           # the process ends when it writes such a path
    refused = "\0"          # objects with this in their path are not written

    def __init__(self, bucket: str, **options):
        self.home = Path(os.environ["SHELVES"], bucket)
        self.home.mkdir(parents=True, exist_ok=True)

    def list(self, prefix=None):
        with self._lock():
            below = f"{prefix}/" if prefix else ""
            paths = sorted(urllib.parse.unquote(file.name) for file in self.home.iterdir())
            return [[self._read(path)[0] for path in paths if path.startswith(below) and path != ".lock"]]

    def list_with_delimiter(self, prefix=None):
        [entries], start = self.list(prefix), len(prefix) + 1 if prefix else 0
        return {"objects": [entry for entry in entries if "/" not in entry["path"][start:]],
                "common_prefixes": sorted({entry["path"][:entry["path"].index("/", start)] for entry in entries
                                           if "/" in entry["path"][start:]})}

    def get(self, path, *, options=None):
        with self._lock():
            (meta, content, attributes), asked = self._read(path), options or {}
        if asked.get("if_match") not in (None, meta["e_tag"]):
            raise FileExistsError(f"{path} has another e_tag")
        content = content[slice(*asked["range"])] if "range" in asked else content
        return types.SimpleNamespace(bytes=lambda: content, meta=meta, attributes=attributes)

    def put(self, path, file, *, mode="overwrite", attributes=None, **options):
        if path.endswith(self.killed):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.refused in path:
            raise PermissionError(f"{path} is refused")
        content = file.read_bytes() if isinstance(file, Path) else bytes(file)
        with self._lock():
            there = self._read(path)[0]["e_tag"] if self._file(path).exists() else None
            if mode != "overwrite" and there != (None if mode == "create" else mode["e_tag"]):
                raise FileExistsError(f"{path} has the e_tag {there}")
            made = {"e_tag": uuid.uuid4().hex, "attributes": attributes or {}}
            self._file(path).write_bytes(json.dumps(made).encode() + b"\n" + content)
        return made | {"version": None}

    def copy(self, source, target):
        self.put(target, self.get(source).bytes())

    def delete(self, paths):
        with self._lock():
            for path in paths:
                self._file(path).unlink(missing_ok=True)

    def _file(self, path):
        return self.home / urllib.parse.quote(path, safe="")

    def _read(self, path):
        head, _, content = self._file(path).read_bytes().partition(b"\n")
        head = json.loads(head)
        return {"path": path, "size": len(content), "e_tag": head["e_tag"], "version": None}, content, head["attributes"]

    @contextlib.contextmanager
    def _lock(self):
        with open(self.home / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


if __name__ == "__main__":
    from meshtrain.commands import train
    from tests import shelf     # the class that `buckets` imports is not that of __main__

    addresses.BUCKETS["shelf"], shelf.Shelf.killed = ROW, sys.argv[1]
    sys.exit(train.main(sys.argv[2:]))
