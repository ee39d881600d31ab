"""A stand-in for W&B's service, for its own client: what a run's history is after several starts. It answers the
requests that wandb 0.31 makes; a history line at an offset replaces what is there, as at W&B's file stream."""
import contextlib
import gzip
import http.server
import json
import threading

PROJECT = {"id": "p", "name": "theirs", "entity": {"id": "e", "name": "me"}}


class Service:
    """runs: id -> {"history": lines, "group"}. rewinds: whether a history may be cut."""

    def __init__(self, rewinds: bool = True):
        self.rewinds, self.runs = rewinds, {}

    def steps(self, name: str) -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in self.runs[name]["history"]]
        return [(row["_step"], row["loss"]) for row in rows]

    def answer(self, query: str, given: dict) -> dict | None:
        name = given.get("name") or given.get("runName") or given.get("id")
        run = self.runs.get(name)
        about = {"id": name, "name": name, "displayName": "mine", "description": "", "config": "{}", "sweepName": None,
                 "project": PROJECT, "historyLineCount": len(run["history"]) if run else 0}
        if "RunResumeStatus" in query:
            last = run["history"][-1] if run and run["history"] else "{}"
            return {"model": PROJECT | {"bucket": run and about | {
                "summaryMetrics": last, "logLineCount": 0, "eventsLineCount": 0, "historyTail": json.dumps([last]),
                "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}'}}}
        if "rewindRun" in query:
            if not self.rewinds:
                return None
            run["history"] = [line for line in run["history"] if json.loads(line)["_step"] <= given["metricValue"]]
            return {"rewindRun": {"rewoundRun": about | {"historyLineCount": len(run["history"])}}}
        if "upsertBucket" in query:
            own = self.runs.setdefault(name, {"history": [], "group": None})
            own["group"] = given.get("groupName") or own["group"]
            return {"upsertBucket": {"bucket": about, "inserted": run is None}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": [
                {"name": file, "uploadUrl": f"{self.address}/upload"} for file in given.get("files", [])]}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}",
                               "teams": {"edges": []}}}
        return {"serverInfo": {"features": [], "cliVersionInfo": {"max_cli_version": "0.99.0"}}} \
            if "serverInfo" in query else {}

    def receive(self, path: str, body: dict) -> dict:
        if path.endswith("graphql"):
            found = self.answer(body["query"], body.get("variables") or {})
            return {"data": found} if found is not None else {"errors": [{"message": "this account may not rewind"}]}
        if path.endswith("file_stream"):
            part = (body.get("files") or {}).get("wandb-history.jsonl", {"content": []})
            if part["content"]:
                history, at = self.runs[path.split("/")[-2]]["history"], part["offset"]
                history[at:at + len(part["content"])] = part["content"]
            return {"exitcode": None, "limits": {}}
        return {}


@contextlib.contextmanager
def serving(rewinds: bool = True):
    service = Service(rewinds)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            said = service.receive(self.path, json.loads(body)) if self.command == "POST" else {}
            data = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = reply

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
