"""Trackers (TensorBoard, W&B, MLflow, Prometheus), which get the metrics rows during the run.

metrics.jsonl is the complete record. No tracker stops a run or delays a step.
"""
from __future__ import annotations

import bisect
import collections
import contextlib
import http.server
import importlib.util
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from meshtrain import config, files
from meshtrain.config import ConfigError, Run
from meshtrain.journal import events, rows
from meshtrain.journal.spikes import LossSpike
from meshtrain.run import contents, say

NUMBERED = re.compile(r"events\.out\.tfevents\.(\d{6,18})", re.ASCII)       # an event file that meshtrain wrote
WANDB_START_TIMEOUT_S = 30.0     # the other processes of the run wait meanwhile
UNREACHED = re.compile("deadline|retrying|dial tcp|timed out")      # W&B's service was not reached: it refused nothing
WANDB_FINISH_TIMEOUT_S = 120.0   # limit for the last upload; without a limit, a run without network would not end
MLFLOW_FINISH_S, MLFLOW_LAST_S = 60.0, 10.0     # limits for the last upload; the second if the last attempt failed
MLFLOW_PAUSE_S = 10.0                           # before a failed request is repeated
MLFLOW_ROWS, MLFLOW_NUMBERS = 10_000, 1_000     # most rows that may wait; most numbers in a request
MLFLOW_PARAMETERS, MLFLOW_TEXT = 100, 500       # most parameters in a request; most characters of one
MLFLOW_STEP = "meshtrain.step"                  # tag of an MLflow run: the last step that was sent
# No telemetry, and no retries inside MLflow: failed requests are repeated here.
MLFLOW_ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
                      "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


class Tracker(contextlib.AbstractContextManager, Protocol):
    """The interface of a tracker, which is opened before the first step and closed after the last. `log` gets the
    numbers of each row by tag (validation/loss), in the order of the steps. `log` returns at once and raises nothing; a
    failure is reported once, on stderr."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...


def check(run: Run) -> None:
    """Check that the packages of the configured trackers are installed. Raises: ConfigError."""
    for name in ("wandb", "mlflow"):
        if (value := getattr(run.metrics, name)) and importlib.util.find_spec(name) is None:
            raise ConfigError(f'metrics.{name}="{value}" needs the package {name}, which is not installed; run pip '
                              f"install -e '.[{name}]' in a checkout of meshtrain, or leave metrics.{name} out")


def open_trackers(run: Run, directory: Path, after: int, back: bool = False) -> Iterator[Tracker]:
    """Yield the trackers that the run file configures, for a run that resumes after step `after`.

    back: whether the run went back to change its course, so that the later steps that trackers already have are
    invalid. If False, these steps are repeated with the same numbers.
    """
    if run.metrics.tensorboard:
        yield TensorBoard(directory / contents.TENSORBOARD, after, config.dump(run))
    if run.metrics.prometheus:
        yield Prometheus(run.metrics.prometheus, run.run.name)
    if run.metrics.mlflow:
        yield MLflow(run, directory, after if back else None)
    if run.metrics.wandb:
        yield WandB(run, directory, after if back else None)


class TensorBoard(rows.Appended):
    """Writes scalars to a new event file in `directory`; each start of the run has its own file.

    after: the step that this start resumes after. settings: the run file, shown under Text.
    """

    def __init__(self, directory: Path, after: int, settings: str = ""):
        with contextlib.suppress(OSError):      # reported when the first event cannot be written
            directory.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names. The names are numbers: clocks of hosts may differ.
        # Other programs write here, too: the profiler leaves an events.out.tfevents.SECONDS.HOST.profile-empty.
        numbers = (NUMBERED.fullmatch(path.name) for path in directory.glob("events.out.tfevents.*"))
        number = 1 + max((int(number[1]) for number in numbers if number), default=0)
        super().__init__(directory / f"events.out.tfevents.{number:06}")
        self.append(events.version())
        self.append(events.start(after + 1))
        if settings:
            code = "\n".join(f"    {line}" for line in settings.splitlines())       # Markdown
            self.append(events.text(after + 1, "config", code))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.append(events.scalars(step, numbers))


class WandB(contextlib.AbstractContextManager):
    """Sends rows and settings to W&B; its files are in directory/wandb. A resumed run continues the same W&B run.

    If W&B cannot start online (no key, no network), it runs offline, and `wandb sync` can upload the files later. A
    later failure is reported once and ends W&B, not training. If a resume repeats steps, W&B keeps their first values.
    back: the step to which the run went back to change its course; None: the run did not go back. W&B's history is cut
    after that step (`resume_from`; offline, `wandb sync` cuts it). If the service refuses this, the new course gets its
    own W&B run in the group of the first one.
    """

    def __init__(self, run: Run, directory: Path, back: int | None = None):
        import wandb   # here: it is optional, and takes a second to import
        self._of, self._directory = run, directory
        self._kept, self._group = directory / "wandb" / "run-id", directory / "wandb" / "group"
        self._run, self._first = None, 0
        if not (identity := _read_id(self._kept)):
            identity = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)       # a sweep has named it
            files.replace(self._kept, identity)
            back = None
        for mode in dict.fromkeys((os.environ.get("WANDB_MODE", "online"), "offline")):
            try:
                self._run = self._open(mode, identity) if back is None else self._go_back(mode, identity, back)
                # The step of the next row. W&B would drop each earlier row with a warning.
                self._first = self._run.step if back is None else back + 1
                return
            except Exception as error:   # an error of W&B must not end the run
                say.err(f"W&B cannot be started {mode}: {error}; " + (
                    f"rows are written to {self._kept.parent} instead, and `wandb sync` uploads them"
                    if mode == "online" else "the run continues without it, metrics.jsonl has every row"))
                wandb.teardown()   # else W&B takes the id for one in use

    def _open(self, mode: str, identity: str, **more):
        """Start W&B. more: further arguments of wandb.init, which override the ones here."""
        import wandb
        own = {"resume": "allow" if mode == "online" and "resume_from" not in more else None}
        if group := _read_id(self._group):
            own["group"] = group
        return wandb.init(
            project=self._of.metrics.wandb, name=self._of.run.name, id=identity, dir=self._directory, mode=mode,
            config=self._of.model_dump(mode="json"),
            allow_val_change=True,   # a resume may have another mesh or more steps
            settings=wandb.Settings(console="off", init_timeout=WANDB_START_TIMEOUT_S,
                                    finish_timeout=WANDB_FINISH_TIMEOUT_S), **own | more)

    def _go_back(self, mode: str, identity: str, step: int):
        """Start W&B with a history that ends after `step`."""
        import wandb
        try:
            opened = self._open(mode, identity, resume_from=f"{identity}?_step={step}")
            if mode != "disabled":
                say.out(f"W&B: the history of run {identity} is cut after step {step}"
                        + ("" if mode == "online" else ", once `wandb sync` uploads this start"))
            return opened
        except Exception as error:
            why = " ".join(str(error).split())
            if "rewind" not in why or UNREACHED.search(why):
                raise
        wandb.teardown()
        group, new = _read_id(self._group) or os.environ.get("WANDB_RUN_GROUP") or identity, secrets.token_hex(4)
        if not _read_id(self._group):
            with contextlib.suppress(Exception):    # if this fails, the first run stays outside the group
                self._open(mode, identity, group=group).finish()
        opened = self._open(mode, new, group=group)
        files.replace(self._group, group)
        files.replace(self._kept, new)
        say.out(f"W&B does not let run {identity} go back to step {step} ({why[:200]}): the later steps are "
                f"recorded in run {new} of the group {group}")
        return opened

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._run is None or step < self._first:
            return
        try:
            self._run.log(dict(numbers), step=step, commit=True)
        except Exception as error:
            say.err(f"W&B failed at step {step}: {error}; the run continues without it, metrics.jsonl has every row")
            self._run = None

    def __exit__(self, kind, *_):
        if self._run is not None:
            try:
                self._run.finish(exit_code=int(_ends_run(kind)))
            except Exception as error:
                say.err(f"W&B could not be finished: {error}; `wandb sync` uploads what its directory has")


def _ends_run(kind: type[BaseException] | None) -> bool:
    """Return whether an exception that leaves a tracker's context ends the run. After a LossSpike the run goes on."""
    return kind is not None and not issubclass(kind, LossSpike)


def _read_id(path: Path) -> str:
    """Return the run's id at a service, which an earlier start saved in `path`; "" if no id was saved, e.g. because a
    start was killed before it wrote the file."""
    path.parent.mkdir(exist_ok=True)
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


class MLflow(contextlib.AbstractContextManager):
    """Sends rows to an MLflow run at MLFLOW_TRACKING_URI, with the run file's keys as parameters. A resumed run
    continues the same MLflow run and sends only steps that the server lacks.

    A thread sends the rows. If the server is slow or unreachable, the newest MLFLOW_ROWS rows wait in memory. back: the
    step to which the run went back to change its course; None: the run did not go back. Later steps are then sent
    again: MLflow keeps several values of a step and shows the newest.
    """

    def __init__(self, run: Run, directory: Path, back: int | None = None):
        self._run, self._kept, self._back = run, directory / "mlflow" / "run-id", back
        self._why = "importing it took too long"        # the reason if nothing is sent
        self._rows: collections.deque[tuple[int, int, Mapping[str, float]]] = collections.deque(maxlen=MLFLOW_ROWS)
        self._more, self._closing = threading.Event(), threading.Event()
        self._client, self._id, self._sent, self._failing = None, "", 0, False
        self._thread = threading.Thread(target=self._work, daemon=True, name="mlflow")
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._rows.append((step, int(time.time() * 1000), numbers))
        self._more.set()

    def _work(self) -> None:
        while not (last := self._closing.is_set()) or self._rows:
            try:
                if not self._id:
                    self._begin()
                self._more.wait()
                self._more.clear()
                while some := list(self._rows):
                    ends = list(itertools.accumulate(len(numbers) for _, _, numbers in some))
                    self._send(some[:max(1, bisect.bisect_right(ends, MLFLOW_NUMBERS))])
                self._failing = False
            except BaseException as error:      # libraries in Rust raise errors that are no Exception
                why = re.sub(r"//[^/\s]*@", "//…@", f"{type(error).__name__}: {error}")    # without passwords of URLs
                self._why = why.partition("\n")[0][:300]
                if not self._failing:
                    say.err(f"MLflow accepts no rows: {self._why}; they wait, and metrics.jsonl has every row")
                self._failing = True
                self._more.set()
                if last:
                    return
                self._closing.wait(MLFLOW_PAUSE_S)

    def _begin(self) -> None:
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow   # here: it is optional, and takes a second to import
        self._why = "the server did not answer"
        client, experiment = mlflow.MlflowClient(), self._run.metrics.mlflow
        if identity := _read_id(self._kept):
            self._sent = int(client.get_run(identity).data.tags.get(MLFLOW_STEP, 0))
            if self._back is not None and self._back < self._sent:
                client.set_tag(identity, MLFLOW_STEP, str(self._back))
                say.out(f"MLflow: run {identity} goes back to step {self._back}; the steps up to {self._sent} are sent "
                        f"again, and their last values count")
                self._sent = self._back
            client.update_run(identity, status="RUNNING")
        else:
            known = client.get_experiment_by_name(experiment)
            identity = client.create_run(known.experiment_id if known else client.create_experiment(experiment),
                                         run_name=self._run.run.name).info.run_id
            given = [mlflow.entities.Param(f"{section}.{key}", str(value)[:MLFLOW_TEXT])
                     for section, table in self._run.model_dump(mode="json").items()
                     for key, value in (table or {}).items()]
            for start in range(0, len(given), MLFLOW_PARAMETERS):
                client.log_batch(identity, params=given[start:start + MLFLOW_PARAMETERS])
            files.replace(self._kept, identity)
        self._client, self._id = client, identity

    def _send(self, some: list[tuple[int, int, Mapping[str, float]]]) -> None:
        from mlflow.entities import Metric, RunTag
        new = [row for row in some if row[0] > self._sent]
        if new:
            self._client.log_batch(
                self._id, [Metric(tag, value, at, step) for step, at, numbers in new for tag, value in numbers.items()],
                tags=[RunTag(MLFLOW_STEP, str(new[-1][0]))])
            self._sent = new[-1][0]
        for row in some:
            if self._rows and self._rows[0] is row:     # else a newer row has displaced it meanwhile
                self._rows.popleft()

    def __exit__(self, kind, *_):
        self._closing.set()     # waiting rows are sent once more, without a pause
        self._more.set()
        self._thread.join(MLFLOW_LAST_S if self._failing else MLFLOW_FINISH_S)
        if self._rows:
            say.err(f"MLflow did not get the rows from step {self._rows[0][0]} on ({self._why}); metrics.jsonl has "
                    f"them")
        elif self._id:
            with contextlib.suppress(Exception):
                self._client.set_terminated(self._id, "FAILED" if _ends_run(kind) else "FINISHED")


class Prometheus(contextlib.AbstractContextManager):
    """Serves the last row at HOST:PORT/metrics, in Prometheus' text format (0.0.4), with the run's name as a label."""

    def __init__(self, port: int, name: str):
        label = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._label, self._text, self._server = f'{{run="{label}"}}', b"", None
        tracker = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                is_metrics = self.path.partition("?")[0] == "/metrics"
                body = tracker._text if is_metrics else b"see /metrics\n"
                self.send_response(200 if is_metrics else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass
        try:
            self._server = http.server.ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            say.err(f"metrics.prometheus={port} cannot be served: {error.strerror or error}; the run continues without "
                    f"it")
            return
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True, name="prometheus").start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        named = {"meshtrain_step": step} | {
            "meshtrain_" + re.sub(r"[^a-zA-Z0-9_]", "_", tag): value for tag, value in numbers.items()}
        special = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
        self._text = "".join(f"# TYPE {name} gauge\n{name}{self._label} {special.get(repr(value), repr(value))}\n"
                             for name, value in named.items()).encode()

    def __exit__(self, *_):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
