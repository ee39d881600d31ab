"""Writers of metrics rows: metrics.jsonl, and the trackers that the run file configures.

metrics.jsonl is the complete record. Floats are not rounded, so runs can be compared bit for bit; a non-finite number
becomes null. Each row is passed to the kernel before the next one, so a killed run loses at most the line being
written. While the file system refuses writes, rows wait in memory and training continues.
"""
from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from meshtrain.config import Run
from meshtrain.journal import rows, trackers

# Key of a row -> its tag in trackers. Any other key is its own tag. TensorBoard groups tags by the part before "/".
TAGS = {"grad_norm": "optimizer/grad_norm", "learning_rate": "optimizer/learning_rate",
        "skipped": "optimizer/skipped", "tokens_per_s": "tokens_per_second", "val_loss": "validation/loss",
        "val_loss_ema": "validation/loss_ema",
        "step_time_s": "time/step_s", "data_wait_s": "time/data_wait_s", "checkpoint_wait_s": "time/checkpoint_wait_s",
        "elapsed_s": "time/elapsed_s", "goodput": "time/goodput"}


class Writers:
    """Passes each row to metrics.jsonl (`record`) and to the trackers (`own`), with the peak memory of `devices` as
    memory_bytes. Processes other than 0 have no writers."""

    def __init__(self, record: "MetricsWriter | None" = None, own: tuple[trackers.Tracker, ...] = (),
                 devices: Sequence[jax.Device] = ()):
        self.record, self.trackers, self.devices = record, own, devices

    def write(self, row: dict[str, Any]) -> None:
        if self.record is None:
            return
        row = row | ({"memory_bytes": held} if (held := peak_bytes(self.devices)) else {})
        self.record.write(row)
        numbers = _number_by_tag(row)
        for tracker in self.trackers:
            tracker.log(row["step"], numbers)


@contextlib.contextmanager
def open_writers(run: Run, directory: pathlib.Path, after: int, back: bool = False,
                 devices: Sequence[jax.Device] = ()) -> Iterator[Writers]:
    """Context: the writers that the run file configures. The writers are closed on exit.

    after: the step that the run resumes after; 0: a new run. Later rows have already been dropped (`rows.cut_after`).
    back: see `trackers.open_trackers`. devices: this process's devices.
    """
    if jax.process_index():
        yield Writers()
        return
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(MetricsWriter(directory / rows.NAME))
        own = [stack.enter_context(tracker) for tracker in trackers.open_trackers(run, directory, after, back)]
        yield Writers(record, tuple(own), devices)


class MetricsWriter(rows.Appended):
    """Appends rows to the file at `path`, one JSON object per line. Only one process of a run may open it.

    Rows are appended to an existing file; `rows.cut_after` has already removed an incomplete last line.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path, separator=b"\n")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. Values: numbers (also numpy and jax scalars), bools, strings, None, and lists of these."""
        line = json.dumps({key: _finite(_plain(value)) for key, value in row.items()}, allow_nan=False)
        self.append(line.encode() + b"\n")


def peak_bytes(devices: Sequence[jax.Device]) -> int:
    """Return the highest peak memory of a device since the process began, in bytes; 0 if not reported (CPUs)."""
    return max(((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices), default=0)


def _number_by_tag(row: dict[str, Any]) -> dict[str, float]:
    """Return tag -> number of a row. True becomes 1. Step and wall clock are left out: trackers have their own."""
    plain = {key: _plain(value) for key, value in row.items() if key not in ("step", "time")}
    return {TAGS.get(key, key): float(value) for key, value in plain.items() if isinstance(value, (int, float))}


def _plain(value: Any):
    return value.item() if hasattr(value, "item") else value


def _finite(value: Any):
    if isinstance(value, list):
        return [_finite(_plain(each)) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
