"""Writers of metrics rows: metrics.jsonl, TensorBoard, and W&B if configured.

metrics.jsonl is the record. Floats are not rounded, so runs can be compared bit for bit; a non-finite number becomes
null. A row reaches the kernel before the next step's, so a killed run loses at most the line being written. While the
file system refuses writes, rows wait in memory and training goes on. TensorBoard and W&B get the same rows; neither
ever stops a run.
"""
from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import re
import secrets
import struct
import time
from collections.abc import Iterator
from typing import Any

import jax

from meshtrain import files
from meshtrain.config import ConfigError, Run
from meshtrain.run import contents, rows, say

# Where a row's numbers stand in TensorBoard and W&B; any other key stands under its own name.
TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate",
        "tokens": "train/tokens", "skipped": "train/skipped", "val_loss": "validation/loss",
        "step_time_s": "time/step_s", "data_wait_s": "time/data_wait_s", "checkpoint_wait_s": "time/checkpoint_wait_s",
        "elapsed_s": "time/elapsed_s", "goodput": "time/goodput"}
NUMBERED = re.compile(r"events\.out\.tfevents\.(\d{6,18})", re.ASCII)       # an event file of ours
WANDB_START_TIMEOUT_S = 30.0     # the other processes of the run stand and wait for it
WANDB_FINISH_TIMEOUT_S = 120.0   # for uploading what is left at the end; without one, no network means no end


class Writers:
    """Passes each row to all writers, in order; in every process but the first there are none."""

    def __init__(self, *writers):
        self.writers = writers

    def write(self, row: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(row)


@contextlib.contextmanager
def open_writers(run: Run, directory: pathlib.Path, after: int) -> Iterator[Writers]:
    """The writers that the run file asks for, of a run that resumes after step `after` (0: a new run); closed on exit.

    The rows after that step were dropped before (`rows.cut_after`).
    """
    if jax.process_index():
        yield Writers()
        return
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(MetricsWriter(directory / rows.NAME))]
        if run.metrics.tensorboard:
            writers.append(stack.enter_context(TensorBoard(directory / contents.TENSORBOARD, after)))
        if run.metrics.wandb:
            writers.append(stack.enter_context(WandB(run, directory)))
        yield Writers(*writers)


def check_wandb(run: Run) -> None:
    """Raises: ConfigError where a run asks for W&B and the package is not installed. Called by commands that train."""
    if run.metrics.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f'metrics.wandb="{run.metrics.wandb}" needs the package wandb, which is not installed; '
                          "pip install -e '.[wandb]' in a checkout of meshtrain, or leave metrics.wandb out")


class MetricsWriter(rows.Appended):
    """Appends rows to the file at `path`, one JSON object per line. Only one process of a run may have it.

    An existing file is continued; `rows.cut_after` has removed a torn last line before.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path, separator=b"\n")

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row. Values: numbers (also scalars of numpy and jax), bools, strings, None; lists of them."""
        line = json.dumps({key: _finite(_plain(value)) for key, value in row.items()}, allow_nan=False)
        self.append(line.encode() + b"\n")


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """All rows of a metrics file at once; for files known to be short."""
    return list(rows.MetricRows(path))


class TensorBoard(rows.Appended):
    """Scalars by step, in a new event file of `directory` for each start of the run, which begins after step `after`.

    tensorboardX encodes the events; the file is ours, because its writer thread holds rows back for two minutes, dies
    on a full disk, and then blocks `close`.
    """

    def __init__(self, directory: pathlib.Path, after: int):
        from tensorboardX.proto import event_pb2   # here: commands that train nothing need no third of a second for it
        self._event = event_pb2.Event
        with contextlib.suppress(OSError):      # told when the first event cannot be written
            directory.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names: numbers, because clocks of two hosts may differ.
        # Others write here, too: its profiler leaves an events.out.tfevents.SECONDS.HOST.profile-empty.
        numbers = (NUMBERED.fullmatch(path.name) for path in directory.glob("events.out.tfevents.*"))
        number = 1 + max((int(found[1]) for found in numbers if found), default=0)
        super().__init__(directory / f"events.out.tfevents.{number:06}")
        self._append_event(file_version="brain.Event:2")
        # SessionLog.START makes TensorBoard drop events of earlier files from this step on.
        self._append_event(step=after + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, row: dict[str, Any]) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in _scalars(row).items()]
        self._append_event(step=row["step"], summary={"value": values})

    def _append_event(self, **event) -> None:
        from tensorboardX.record_writer import masked_crc32c
        data = self._event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        self.append(b"".join((length, struct.pack("<I", masked_crc32c(length)),
                              data, struct.pack("<I", masked_crc32c(data)))))


class WandB(contextlib.AbstractContextManager):
    """A W&B run with rows and settings, files in directory/wandb; a resumed run continues the same one.

    Where W&B cannot start online (no key, no network) it runs offline, for `wandb sync` to upload. A later failure is
    reported once and ends W&B, not training. Of steps that a resume repeats W&B keeps the first values: its history
    cannot go back.
    """

    def __init__(self, run: Run, directory: pathlib.Path):
        import wandb   # here: it is optional, and takes a second to import
        kept = directory / "wandb" / "run-id"
        kept.parent.mkdir(exist_ok=True)
        identity = kept.read_text(encoding="utf-8").strip() if kept.exists() else ""
        if not identity:        # also of a start that was killed between making the file and writing it
            files.replace(kept, identity := secrets.token_hex(4))
        self._run, self._first = None, 0
        for mode in dict.fromkeys((os.environ.get("WANDB_MODE", "online"), "offline")):
            try:
                self._run = wandb.init(
                    project=run.metrics.wandb, name=run.run.name, id=identity, dir=directory, mode=mode,
                    resume="allow" if mode == "online" else None, config=run.model_dump(mode="json"),
                    allow_val_change=True,   # a resume may have another mesh or more steps
                    settings=wandb.Settings(console="off", init_timeout=WANDB_START_TIMEOUT_S,
                                            finish_timeout=WANDB_FINISH_TIMEOUT_S))
                self._first = self._run.step    # of the next row; W&B drops what comes before, with a warning each
                return
            except Exception as error:   # whatever W&B has against it: the run is worth more
                say.err(f"W&B cannot be started {mode}: {error}; " + (
                    f"it is written to {kept.parent} instead, and `wandb sync` uploads it" if mode == "online" else
                    "the run goes on without it, metrics.jsonl has every row"))
                wandb.teardown()   # or the id would count as in use

    def write(self, row: dict[str, Any]) -> None:
        if self._run is None or row["step"] < self._first:
            return
        try:
            self._run.log(_scalars(row), step=row["step"], commit=True)
        except Exception as error:
            say.err(f"W&B failed at step {row['step']}: {error}; the run goes on without it, metrics.jsonl has every "
                    f"row")
            self._run = None

    def __exit__(self, kind, *_):
        if self._run is not None:
            try:
                self._run.finish(exit_code=int(kind is not None))
            except Exception as error:
                say.err(f"W&B could not be finished: {error}; `wandb sync` uploads what its directory has")


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """The row's numbers by tag; true is 1. Step and wall clock are left out: every event carries both."""
    plain = {key: _plain(value) for key, value in row.items() if key not in ("step", "time")}
    return {TAGS.get(key, key): float(value) for key, value in plain.items() if isinstance(value, (int, float))}


def _plain(value):
    return value.item() if hasattr(value, "item") else value


def _finite(value):
    if isinstance(value, list):
        return [_finite(_plain(each)) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
