"""A server on loopback that is a bucket (moto's S3, also by the requests that obstore makes of gs://), a hub and the
web, keeps a log of its requests, and fails as it is told."""
import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import create_backend_app
from werkzeug.serving import make_server
from werkzeug.wsgi import get_input_stream

from meshtrain.storage import retries

PIECE = re.compile(r"/checkpoints/\d+\.[\w-]+/[\d-]+$")      # an object of a checkpoint, not the one that commits it
BUCKET, TOKEN, SECRET = "bucket", "hf_token-of-the-test", "aws-secret-of-the-test"
SIGNED = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass
class Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.method} {self.path}" + f"?{self.query}" * bool(self.query)


@dataclasses.dataclass
class Fault:
    """The next `times` requests of paths with `path` in them. status: the answer; 0: the body is cut in half, unless
    the request waits: seconds, and before them until `until` says yes. code: in the answer, as S3 names it. damages:
    nothing fails, and pieces of checkpoints that are read have one bit changed."""
    path: str
    times: int
    status: int = 0
    seconds: float = 0.0
    until: Callable[[], bool] = lambda: True
    code: str = "SlowDown"
    damages: bool = False

    def meets(self, request: Request) -> bool:
        return self.times > 0 and self.path in request.path and (
            not self.damages or request.method == "GET" and bool(PIECE.search(request.path)))


class Server:
    """hub: "models/OWNER/NAME" or "datasets/OWNER/NAME" -> folder. web: folder of https:// files (here http://)."""

    def __init__(self):
        logging.getLogger("werkzeug").setLevel("ERROR")
        self.log: list[Request] = []
        self._generations: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.bytes_s = 0            # of the line to all buckets, each way; 0: no limit
        self._lock, self._line = threading.Lock(), threading.Lock()
        self.hub: dict[str, Path] = {}
        self.web = Path("/nowhere")
        self.private = False        # the hub asks for the token
        self._buckets = create_backend_app("s3")
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.port}"
        self.url = f"http://{self.host}"
        self._client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="id",
                                    aws_secret_access_key=SECRET)
        if BUCKET not in [one["Name"] for one in self._client.list_buckets()["Buckets"]]:
            self._client.create_bucket(Bucket=BUCKET)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def put(self, key: str, content: bytes | Path) -> str:
        """Write an object; its address."""
        body = content.read_bytes() if isinstance(content, Path) else content
        self._client.put_object(Bucket=BUCKET, Key=key, Body=body)
        return f"s3://{BUCKET}/{key}"

    def asked(self, method: str = "", path: str = "") -> list[str]:
        """The requests since `forget` with this method and text in their path."""
        return [str(one) for one in self.log if one.method.startswith(method) and path in one.path]

    def of_content(self) -> list[str]:
        """The requests that read files: no lists and no heads."""
        return [one for one in self.asked("GET") if "list-type" not in one and "/api/" not in one]

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, environ: dict, start: Callable) -> Iterator[bytes]:
        headers = {key[5:].replace("_", "-").title(): value for key, value in environ.items()
                   if key.startswith("HTTP_")}
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""), headers)
        self.log.append(request)
        with self._lock:        # two threads that take the last time would make it -1, which never ends
            fault = next((one for one in self.faults if one.meets(request)), None)
            if fault:
                fault.times -= 1
        if fault:
            while not fault.until():
                time.sleep(0.02)
            time.sleep(fault.seconds)
            if fault.status:
                return _plain(start, fault.status, f"<Error><Code>{fault.code}</Code></Error>".encode())
        found = self._of_hub(request, start) or self._of_web(request, start)
        if found is None:
            # moto has no anonymous requests, as obstore's of gs:// are here
            environ.setdefault("HTTP_AUTHORIZATION", SIGNED)
            found = self._of_bucket(request, environ, start)
        if fault and fault.damages:
            return [_change_bit(b"".join(found))]
        return _cut(found) if fault and not fault.status and not fault.seconds else found

    def _of_bucket(self, request: Request, environ: dict, start: Callable):
        """As moto says, with the generations by which Google's writes are conditional; one request at a time, since
        moto looks whether an object is there and writes it in two steps."""
        body = get_input_stream(environ).read()      # it has come before the others wait
        self._carry(body)
        environ["wsgi.input"] = io.BytesIO(body)
        environ |= {name.replace("X_GOOG_META", "X_AMZ_META"): value for name, value in environ.items()
                    if name.startswith("HTTP_X_GOOG_META")}
        with self._lock:
            now, asked = self._generations.get(request.path, "0"), request.headers.get("X-Goog-If-Generation-Match")
            if asked not in (None, now):
                return _plain(start, 412, b"")
            if request.method == "PUT":
                now = self._generations[request.path] = str(time.time_ns())
            elif request.method == "DELETE":
                now = self._generations.pop(request.path, "0")

            def told(status, headers, *rest):
                attributes = [(name.lower().replace("x-amz-meta", "x-goog-meta"), value) for name, value in headers
                              if name.lower().startswith("x-amz-meta")]
                return start(status, [*headers, *attributes, ("x-goog-generation", now)], *rest)
            answer = list(self._buckets(environ, told))
        self._carry(*answer)
        return answer

    def _carry(self, *some: bytes) -> None:
        """Takes the time that bytes take on the line, one request after another."""
        if bytes_s := self.bytes_s:
            with self._line:
                time.sleep(sum(map(len, some)) / bytes_s)

    def damage(self, prefix: str) -> str:
        """Change one bit of the newest piece of a checkpoint below a prefix, in the bucket; its key, or "" without
        one."""
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        pieces = sorted((one["LastModified"], one["Key"]) for one in found if PIECE.search(one["Key"]))
        if pieces:
            body = self._client.get_object(Bucket=BUCKET, Key=pieces[-1][1])["Body"].read()
            self.put(pieces[-1][1], _change_bit(body))
        return pieces[-1][1] if pieces else ""

    def _of_hub(self, request: Request, start: Callable):
        parts = request.path.strip("/").split("/")
        if parts[0] == "cdn":       # where the hub sends who asks for a large file
            return _file(start, Path("/" + "/".join(parts[1:])), request)
        if parts[0] == "api" and len(parts) >= 6:
            name, revision = "/".join(parts[1:4]), "/".join(parts[5:])
            if refusal := self._refusal(request, name, revision):
                return _plain(start, refusal, b"")
            siblings = [self._sibling(path, self.hub[name]) for path in sorted(self.hub[name].rglob("*"))
                        if path.is_file()]
            return _plain(start, 200, json.dumps({"sha": COMMIT, "siblings": siblings}).encode())
        if "resolve" not in parts:
            return None
        at = parts.index("resolve")
        name = "/".join(parts[:at] if parts[0] == "datasets" else ["models", *parts[:at]])
        if refusal := self._refusal(request, name, parts[at + 1]):
            return _plain(start, refusal, b"")
        path = self.hub[name].joinpath(*parts[at + 2:])
        if path.suffix == ".safetensors":       # another host, which must not see the token
            return _plain(start, 302, b"", Location=f"http://localhost:{self._server.port}/cdn{path}")
        return _file(start, path, request)

    def _refusal(self, request: Request, name: str, revision: str) -> int:
        if self.private and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401
        return 0 if name in self.hub and revision in ("main", COMMIT) else 404

    @staticmethod
    def _sibling(path: Path, home: Path) -> dict:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found = {"rfilename": path.relative_to(home).as_posix(), "size": path.stat().st_size, "blobId": digest[:40]}
        return found | ({"lfs": {"sha256": digest, "size": found["size"]}} if path.suffix == ".safetensors" else {})

    def _of_web(self, request: Request, start: Callable):
        if request.path.startswith("/moved/"):
            return _plain(start, 302, b"", Location=f"{self.url}/web/{request.path.removeprefix('/moved/')}")
        if not request.path.startswith("/web/"):
            return None
        return _file(start, self.web / request.path.removeprefix("/web/"), request)


def _plain(start: Callable, status: int, body: bytes, **headers: str) -> list[bytes]:
    start(f"{status} told", [("Content-Length", str(len(body))), *headers.items()])
    return [body]


def _file(start: Callable, path: Path, request: Request) -> list[bytes]:
    if not path.is_file():
        return _plain(start, 404, b"")
    body, status = path.read_bytes(), 200
    headers = {"ETag": f'"{hashlib.md5(body).hexdigest()}"', "Accept-Ranges": "bytes"}
    if first := request.headers.get("Range", "").removeprefix("bytes=").rstrip("-"):
        headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        body, status = body[int(first):], 206
    if request.method == "HEAD":
        start("200 told", [("Content-Length", str(len(body))), *headers.items()])
        return [b""]
    return _plain(start, status, body, **headers)


def _change_bit(content: bytes) -> bytes:
    """In its middle."""
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 16]) + content[half + 1:] if content else content


def _cut(body) -> Iterator[bytes]:
    """Half of an answer, then the connection's end."""
    whole = b"".join(body)
    yield whole[:len(whole) // 2]
    raise ConnectionAbortedError


class SlowLine:
    """A proxy before the server that passes `bytes_s` bytes a second each way; 0: it reads, and says nothing."""

    def __init__(self, server: Server, bytes_s: int):
        self._to, self._bytes_s = server.host.split(":"), bytes_s
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):      # closed
            while True:
                near = self._socket.accept()[0]
                far = socket.create_connection(self._to)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if self._bytes_s:
                    time.sleep(len(data) / self._bytes_s)
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def environment(server: Server, home: Path) -> dict[str, str]:
    """Variables by which a command reads from the server, with its copies in `home`."""
    account = home / "account.json"
    account.write_text(json.dumps({"gcs_base_url": server.url, "disable_oauth": True, "client_email": "",
                                   "private_key": "", "private_key_id": ""}))
    return {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url, "GOOGLE_SERVICE_ACCOUNT": str(account), "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN, "XDG_CACHE_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"}


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def surroundings(server, tmp_path, monkeypatch):
    """The environment of a command, an empty log, and no waits; none goes on writing its lease."""
    (tmp_path / "copies").mkdir()
    for key, value in environment(server, tmp_path / "copies").items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(retries, "PAUSES_S", (0.01,) * 4)
    server.log.clear()
    server.faults.clear()
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "lease"]
