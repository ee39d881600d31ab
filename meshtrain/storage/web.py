"""Reads files of the web (https://, http://) and of the hub (hf://) through HTTP.

The credential HF_TOKEN comes from the environment and is sent only to the hub. A request is repeated if the server
fails or does not answer. This module knows no cache.
"""
from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import BinaryIO

from meshtrain.storage import retries
from meshtrain.storage.addresses import HUB, Address, Missing, RemoteFile, StorageError

MOST_LISTING_BYTES = 1 << 28        # of the hub's answer


def look_up(address: Address) -> RemoteFile | None:
    """Return a file of the web; None if the file does not exist. Raises: StorageError."""
    def ask(method: str):
        with _send_request(address, _url(address), method=method) as reply:
            size = reply.headers.get("Content-Length", "")
            etag = reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""
            packed = reply.headers.get("Content-Encoding", "identity") != "identity"
            return RemoteFile(address, int(size) if size.isdecimal() and not packed else None, etag)
    try:
        return retries.patiently(address, lambda: ask("HEAD"))
    except Missing:
        return None
    except StorageError as error:
        if not re.search(r"answers (405|501)", str(error)):
            raise
    try:
        return retries.patiently(address, lambda: ask("GET"))
    except Missing:
        return None


def _url(address: Address, commit: str = "") -> str:
    """Return the URL of the bytes of a file on the web, or on the hub at a commit."""
    if address.scheme != HUB:
        return f"{address.scheme}://{address.home}/{urllib.parse.quote(address.path, safe='/%:@!$&()*+,;=~')}"
    return f"{hub()}/{address.home}/resolve/{urllib.parse.quote(commit, safe='')}/{urllib.parse.quote(address.path)}"


def read_into(remote: RemoteFile, file: BinaryIO, grew: Callable[[int], None]) -> None:
    """Write the bytes of a file to an empty local file, in one request. After an interruption, the next request
    continues from the byte reached. `grew` is called with the size of each piece, and may raise."""
    reached = 0

    def act():
        nonlocal reached
        headers = {"Range": f"bytes={reached}-"} if reached else {}
        with _send_request(remote.address, _url(remote.address, remote.commit), headers) as reply:
            if remote.address.scheme != HUB and remote.etag not in ("", reply.headers.get("ETag"),
                                                                    reply.headers.get("Last-Modified")):
                raise retries.error_of_status(remote.address, 412, "")
            if reply.status != 206:
                reached = 0
                file.truncate(0)
            file.seek(reached)
            while chunk := _receive(reply.read1, 1 << 20):
                file.write(chunk)
                reached += len(chunk)
                grew(len(chunk))
            if remote.size is not None and reached < remote.size:
                raise retries.Moment(f"the server ended the file at byte {reached:,} of {remote.size:,}")
    retries.patiently(remote.address, act, lambda: reached)
    file.flush()


def _receive(read: Callable[[int], bytes], most: int) -> bytes:
    """Return the next bytes of an answer. Raises: retries.Moment."""
    try:
        return read(most)
    except (OSError, http.client.HTTPException) as error:
        raise retries.Moment(f"the connection broke ({type(error).__name__})") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects: to another host without the credentials, and never from https to another scheme."""

    def redirect_request(self, request, reply, code, message, headers, url):
        before, after = urllib.parse.urlsplit(request.full_url), urllib.parse.urlsplit(url)
        if after.scheme != "https" and after.scheme != before.scheme:
            raise urllib.error.URLError(f"a redirection from {before.scheme}:// to {after.scheme}://")
        made = super().redirect_request(request, reply, code, message, headers, url)
        if made is not None:
            made.method = request.get_method()      # Python 3.11 changes HEAD to GET
            if before[:2] == after[:2]:
                made.unredirected_hdrs.update(request.unredirected_hdrs)
        return made


_OPENER = urllib.request.build_opener(_Redirects)


def _send_request(address: Address, url: str, headers: dict[str, str] | None = None, *,
                  method: str = "GET") -> http.client.HTTPResponse:
    """Send a request; return the open response. Raises: retries.Moment, StorageError."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "meshtrain", **(headers or {})}, method=method)
        if address.scheme == HUB and (token := os.environ.get("HF_TOKEN", "").strip()):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        return _OPENER.open(request, timeout=retries.SILENCE_S)
    except ValueError:      # its text has the header's value
        remedy = "set HF_ENDPOINT to https://HOST and HF_TOKEN to an ASCII word, or unset both" \
            if address.scheme == HUB else "check the address"
        raise StorageError(f"{address} cannot be requested: it does not form a valid URL or header; {remedy}") from None
    except urllib.error.HTTPError as error:
        error.close()
        raise retries.error_of_status(address, error.code, http.client.responses.get(error.code, "")) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise retries.Moment(str(reason) if isinstance(reason, (str, OSError)) else type(error).__name__) from None


# ---- the hub ---------------------------------------------------------------------------------------------------------


def hub() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def list_files(folder: Address) -> list[RemoteFile]:
    """Return all files of a model or data set on the hub, at one commit. Raises: StorageError."""
    name = folder.home if folder.home.startswith("datasets/") else f"models/{folder.home}"
    revision = urllib.parse.quote(folder.revision or "main", safe="")

    def act():
        with _send_request(folder, f"{hub()}/api/{name}/revision/{revision}?blobs=true") as reply:
            return _receive(reply.read, MOST_LISTING_BYTES + 1)
    text = retries.patiently(folder, act)
    if len(text) > MOST_LISTING_BYTES:
        raise StorageError(f"{folder}: its list of files is longer than {MOST_LISTING_BYTES:,} bytes; name another one")
    try:
        answer = json.loads(text)
        commit, siblings = answer["sha"], answer["siblings"]
        return [RemoteFile(folder.at(sibling["rfilename"]), (sibling.get("lfs") or sibling).get("size"),
                           (sibling.get("lfs") or {}).get("sha256") or sibling.get("blobId") or commit, commit)
                for sibling in siblings]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise StorageError(f"{folder}: the hub's answer has no list of files; check HF_ENDPOINT") from None
