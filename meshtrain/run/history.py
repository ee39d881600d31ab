"""When a run began, went on and ended: run.dir/history.jsonl, a line for each start and one for each end that was orderly.

A start without an end was killed, or is at work still. What a start takes back, the steps behind the checkpoint that it goes on
from, is written down before their rows of metrics are dropped. A disk that is full ends no run.
"""
from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from meshtrain.run import disk, metrics, say

HISTORY = "history.jsonl"


@contextlib.contextmanager
def kept(directory: Path, step: int, started: Mapping) -> Iterator[Callable[[str, int], None]]:
    """Records that the run goes on after `step`; yields (how, step) → None, to be told of its end. An exception is an end, too.

    Before metrics.jsonl is cut to `step`. started: what else is to be said of the start. Only process 0 writes.
    """
    path, told = directory / HISTORY, []

    def ended(how: str, done: int | None = None) -> None:
        told.append(how)
        _append(path, {"event": "end", "time": time.time(), "how": how, "step": done})

    _append(path, {"event": "start", "time": time.time(), "step": step, **started, **taken_back(directory, step)})
    try:
        yield ended
    except BaseException as error:
        if not told:
            ended(f"failed: {disk.said(error)[:300]}")
        raise


def taken_back(directory: Path, step: int) -> dict:
    """What an earlier start left behind `step`: steps that are taken again, the seconds that they took, when its last row was
    written (None: there is none)."""
    path = directory / "metrics.jsonl"
    try:
        written, rows = path.stat().st_mtime, metrics.read(path)
    except (OSError, ValueError):       # none yet; a broken one is told by who goes on writing it
        written, rows = None, []
    later = [row for row in rows if row["step"] > step]
    again = later[-1]["step"] - step if later else 0
    again_s = again * sum(row.get("step_time_s") or 0.0 for row in later) / max(1, len(later))
    return {"steps_again": again, "again_s": again_s, "last_row": written if rows else None}


def read(directory: Path) -> list[dict]:
    """The lines, but for those that a kill or a full disk left broken."""
    try:
        lines = (directory / HISTORY).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and row.get("event") in ("start", "end") and isinstance(row.get("time"), (int, float)):
                rows.append(row)
    return rows


def _append(path: Path, row: dict) -> None:
    if jax.process_index():
        return
    try:
        torn = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"      # by a kill
        with open(path, "ab") as file:
            file.write(b"\n" * bool(torn) + json.dumps(row).encode() + b"\n")
    except OSError as error:
        say.err(f"{path} cannot be written: {error.strerror}; training goes on")
