"""What becomes of a metrics row: a line of metrics.jsonl, a point of each TensorBoard curve, and on demand W&B.

metrics.jsonl is the record: floats are not rounded, so two runs can be compared bit for bit, and a number that is not
finite becomes null, which JSON can hold. TensorBoard and W&B show the same rows; neither ever stops a run.
Each row reaches the kernel before the next step's, so a killed run loses at most the line that it was writing. While a
disk is full the rows wait in memory and training goes on: what is lost is lost only if the run ends before there is room.
"""
from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import secrets
import struct
import time
from collections.abc import Iterator
from typing import Any

import jax

from meshtrain.config import ConfigError, Run
from meshtrain.run import disk, say

# Where a row's numbers stand in TensorBoard and W&B; any other key stands under its own name.
TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate",
        "tokens": "train/tokens", "skipped": "train/skipped", "val_loss": "validation/loss", "step_time_s": "time/step_s",
        "data_wait_s": "time/data_wait_s", "checkpoint_wait_s": "time/checkpoint_wait_s", "elapsed_s": "time/elapsed_s",
        "goodput": "time/goodput"}
WANDB_START_TIMEOUT_S = 30.0     # the other processes of the run stand and wait for it
WANDB_FINISH_TIMEOUT_S = 120.0   # for uploading what is left at the end; without one, no network means no end


class Writers:
    """Hands each row to all of its writers, in their order; in every process but the first it has none."""

    def __init__(self, *writers):
        self.writers = writers

    def write(self, row: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(row)


@contextlib.contextmanager
def open_writers(run: Run, directory: pathlib.Path, after: int) -> Iterator[Writers]:
    """The writers of a run that goes on after step `after` (0: it begins), as the run file asks; closed at the end.

    Raises: ConfigError where metrics.jsonl has a broken line before the last.
    """
    if jax.process_index():
        yield Writers()
        return
    with contextlib.ExitStack() as stack:
        rows = stack.enter_context(MetricsWriter(directory / "metrics.jsonl"))
        try:
            rows.truncate_after(after)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        writers = [rows]
        if run.metrics.tensorboard:
            writers.append(stack.enter_context(contextlib.closing(TensorBoard(directory / "tensorboard", after))))
        if run.metrics.wandb != "off":
            writers.append(stack.enter_context(WandB(run, directory)))
        yield Writers(*writers)


def check_wandb(run: Run) -> None:
    """Raises: ConfigError where a run asks for W&B and the package is not there. For the doors: `inspect` needs none."""
    if run.metrics.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f'metrics.wandb="{run.metrics.wandb}" needs the package wandb, which is not installed; '
                          "pip install -e '.[wandb]' in a checkout of meshtrain, or use metrics.wandb=\"off\"")


class MetricsWriter:
    """Appends rows to the file at `path`, a JSON object per line. In a run of several processes only one may have it.

    An existing file is continued: call `truncate_after` first, with 0 for a fresh start, or a torn last line would be
    glued to the next row.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self._file = _Appended(self.path)

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row. Values: numbers, also numpy's and jax's scalars, bools, strings, None; lists of them."""
        line = json.dumps({key: _finite(_plain(value)) for key, value in row.items()}, allow_nan=False)
        self._file.append(line.encode() + b"\n")

    def truncate_after(self, step: int) -> None:
        """Drops the rows after `step` and a torn last line: a resumed run writes them again. It needs no room on the disk.

        Raises: ValueError as `read`.
        """
        kept = sum(row["step"] <= step for row in read(self.path))   # rows stand in the order of their steps
        lines = self.path.read_bytes().split(b"\n")[:kept]
        os.truncate(self.path, sum(len(line) + 1 for line in lines))

    def close(self) -> None:
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def set_aside_after(path: pathlib.Path, step: int) -> str:
    """Copies the rows after `step` to a file of their own beside `path`; its name, empty where there are none."""
    rows = [row for row in read(path) if row["step"] > step] if path.exists() else []
    if not rows:
        return ""
    names = (f"{path.stem}.aside{more}{path.suffix}" for more in ("", *(f"-{i}" for i in range(2, 1000))))
    kept = next(name for name in names if not path.with_name(name).exists())
    disk.replace(path.with_name(kept), "".join(json.dumps(row) + "\n" for row in rows))
    return kept


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line that was torn off.

    Raises: ValueError for a broken line before the last: that is no interrupted write.
    """
    *lines, torn = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    del torn  # what follows the last newline: nothing, or a line whose writing was cut
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {line[:80]!r}; remove it to go on") from error
        if not isinstance(rows[-1], dict) or type(rows[-1].get("step")) is not int:
            raise ValueError(f"{path}, line {number}, is no row of metrics with its step: {line[:80]!r}; remove it to go on")
    return rows


class TensorBoard:
    """Scalars by step, in a new event file of `directory` per start of the run, which begins after step `after`.

    tensorboardX gives the format but not the file: its own writer is a thread that holds rows back for two minutes, and
    one that meets a full disk dies and leaves `close` waiting for it.
    """

    def __init__(self, directory: pathlib.Path, after: int):
        from tensorboardX.proto import event_pb2   # here: commands that train nothing need no third of a second for it
        self._event = event_pb2.Event
        directory.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names: numbers, because clocks of two hosts may differ.
        number = 1 + max((int(path.suffix[1:]) for path in directory.glob("events.out.tfevents.*")), default=0)
        self._file = _Appended(directory / f"events.out.tfevents.{number:06}")
        self._append(file_version="brain.Event:2")
        # Of what earlier files have, TensorBoard forgets this step and all after it.
        self._append(step=after + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, row: dict[str, Any]) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in _scalars(row).items()]
        self._append(step=row["step"], summary={"value": values})

    def close(self) -> None:
        self._file.close()

    def _append(self, **event) -> None:
        from tensorboardX.record_writer import masked_crc32c
        data = self._event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.append(b"".join((length, struct.pack("<I", masked_crc32c(length)),
                                    data, struct.pack("<I", masked_crc32c(data)))))


class WandB:
    """A W&B run with the rows and the settings, its files in directory/wandb; a resumed run goes on in the same one.

    Where W&B cannot be started online (no key, no network) it is written offline, for `wandb sync` to upload; whatever
    fails later is told once and ends W&B, not the training. Of the steps that a resume does again W&B keeps the first
    account: its history cannot go back.
    """

    def __init__(self, run: Run, directory: pathlib.Path):
        import wandb   # here: it is optional, and takes a second to import
        kept = directory / "wandb" / "run-id"
        kept.parent.mkdir(exist_ok=True)
        if not kept.exists():
            kept.write_text(secrets.token_hex(4))
        self._run, self._first = None, 0
        for mode in dict.fromkeys((run.metrics.wandb, "offline")):
            try:
                self._run = wandb.init(
                    project=run.metrics.wandb_project, name=run.run.name, id=kept.read_text(), dir=directory, mode=mode,
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
            say.err(f"W&B failed at step {row['step']}: {error}; the run goes on without it, metrics.jsonl has every row")
            self._run = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self._run is not None:
            try:
                self._run.finish(exit_code=int(kind is not None))
            except Exception as error:
                say.err(f"W&B could not be finished: {error}; `wandb sync` uploads what its directory has")


class _Appended:
    """A file whose every append reaches the kernel at once. What cannot be written is told once and waits in memory, in
    its order and to the byte, so that a full disk leaves neither a gap nor a torn line in the middle."""

    def __init__(self, path: pathlib.Path):
        self._path, self._waiting, self._told = path, b"", False
        self._file = open(path, "ab", buffering=0)   # a buffer would lose track of how much of it a full disk took

    def append(self, data: bytes) -> None:
        self._waiting += data
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting):]
        except OSError as error:
            if not self._told:
                say.err(f"{self._path} cannot be written: {error.strerror}; training goes on, and the rows wait in memory "
                      "until there is room")
            self._told = True

    def close(self) -> None:
        self.append(b"")
        if self._waiting:
            say.err(f"{self._path} ends early: its last {len(self._waiting):,} bytes could not be written; make room before "
                  "you start the run again")
        self._file.close()


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """The row's numbers by tag; true is 1. Step and wall clock are no curves: both stand beside every point."""
    plain = {key: _plain(value) for key, value in row.items() if key not in ("step", "time")}
    return {TAGS.get(key, key): float(value) for key, value in plain.items() if isinstance(value, (int, float))}


def _plain(value):
    return value.item() if hasattr(value, "item") else value


def _finite(value):
    if isinstance(value, list):
        return [_finite(_plain(each)) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
