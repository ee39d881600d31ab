"""Log of a run's attempts, run.dir/history.jsonl.

Each attempt has a line for its start and one for its end, with the cause and the seconds by part. Between the two
lines, a heartbeat line has the seconds so far; this line is rewritten in place every few seconds. If an attempt was
killed, the next one records its end from the heartbeat line. The steps that a start repeats (after the checkpoint that
it resumes from) are counted before their metrics are dropped. A full disk ends no run.
"""
from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from meshtrain import files
from meshtrain.cluster import stacks
from meshtrain.config import ConfigError
from meshtrain.journal import goodput, rows
from meshtrain.run import say, stops
from meshtrain.run.contents import HISTORY, STACKS
from meshtrain.storage import mirror

BEAT_S = 5.0            # the recorded end of a killed attempt may be too early by this much
BEAT, BEAT_BYTES = b'{"event": "beat"', 1024        # begin and length of the heartbeat line, longer than any account
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Required fields of a line: numbers of all lines; by event, (further numbers, texts).
OF_ALL = ("time", "run_s", "step", "counted_s")
OF_EVENT = {"start": (("elapsed_s", "down_s", "again_s", "steps_again", "uptime_s"), ("boot", "on", "cause")),
            "beat": (("steps", "idle_s"), ("part",)), "end": ((), ("how",))}


class Attempt:
    """Records this attempt in the history. Only process 0 writes."""

    def __init__(self, directory: Path, account: goodput.Account):
        self.path, self.account = directory / HISTORY, account
        self.began, self._end_recorded = 0.0, False
        self._before: os.stat_result | None = None      # None: this attempt is the run's first
        self._lock, self._beat_at = threading.Lock(), 0
        self._beat: files.Beat | None = None

    def start(self, step: int, more: Mapping) -> None:
        """Record the start of this attempt, which resumes after `step`. If the previous attempt recorded no end, record
        that end, too. more: further fields of the line."""
        directory, run_s, lines = self.path.parent, time.perf_counter() - self.account.began, []
        with contextlib.suppress(OSError):
            lines = read(directory)
        metrics = _read_metrics(directory)
        if lines and lines[-1]["event"] != "end":
            began = next((line["time"] for line in reversed(lines) if line["event"] == "start"), 0.0)
            how, stuck = find_ending(directory, began)
            lines.append(goodput.end_line(lines[-1], how, stuck=stuck))
            self._append(lines[-1])
        line = {"event": "start", "time": time.time() - run_s,
                "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME) - run_s,
                "boot": BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.exists() else "",
                "host": socket.gethostname(), "pid": os.getpid(),
                "step": step, "run_s": run_s, "spent_s": self.account.snapshot()["spent_s"], **more}
        line |= goodput.derive_start(goodput.list_attempts(lines), line, lines, metrics)
        self.began = line["time"]
        self.account.elapsed_s, self.account.counted_s, self.account.step = line["elapsed_s"], line["counted_s"], step
        self._before = self.path.stat() if self.path.exists() else None
        self._append(line)
        self._beat_at = self._append(self._beat_line())
        self._beat = files.Beat(self.beat, BEAT_S)

    def go_back(self, step: int) -> None:
        """Record that this attempt goes back to `step`. Called before the rows after it are cut from metrics.jsonl."""
        self.account.go_back(step, goodput.sum_steps_s(_read_metrics(self.path.parent), step))

    def end(self, how: str, **more) -> None:
        """Record the end of this attempt. Only the first call has an effect."""
        with self._lock:
            if self._end_recorded or not self.began:
                return
            self.abandon()
        self._append(goodput.end_line(self.account.snapshot(), how, **more))

    def abandon(self) -> None:
        """Stop the heartbeat, and record no end."""
        self._end_recorded = True
        if self._beat:
            self._beat.close()

    def forget(self) -> None:
        """Remove this start from the history, because a mistake of the user was found after the start was recorded."""
        self.abandon()
        with contextlib.suppress(OSError):
            if self._before is None:
                mirror.remove(self.path)
            else:
                os.truncate(self.path, self._before.st_size)
                os.utime(self.path, ns=(self._before.st_atime_ns, self._before.st_mtime_ns))

    def describe(self) -> str:
        """Return the goodput of the run so far as a line of text; "" if the history cannot be read."""
        with contextlib.suppress(OSError):
            return goodput.describe(goodput.sum_parts_s(goodput.list_attempts(list(rows.Log(self.path, _is_line)))))
        return ""

    def beat(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self._beat_at)
            if file.read(len(BEAT)) == BEAT:        # else the file was edited by hand
                file.seek(self._beat_at)
                file.write(_encode(self._beat_line()))

    def _beat_line(self) -> dict:
        return {"event": "beat", **self.account.snapshot()}

    def _append(self, row: Mapping) -> int:
        """Append a line. Return its offset in the file; 0 if it cannot be written."""
        try:
            with open(self.path, "ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                torn = file.read() not in (b"", b"\n")      # the last write was interrupted
                file.write(b"\n" * torn + _encode(row))
                return end + torn
        except OSError as error:
            say.err(f"{self.path} cannot be written: {error.strerror}; training continues")
            return 0


def _encode(row: Mapping) -> bytes:
    return json.dumps(row).encode().ljust(BEAT_BYTES * (row["event"] == "beat") - 1) + b"\n"


@contextlib.contextmanager
def record_attempt(directory: Path, step: int, account: goodput.Account, more: Mapping) -> Iterator[Attempt]:
    """Context: record that an attempt starts after `step`, and its end. Only process 0 writes.

    The end is recorded by `Attempt.end`, or by the exception that leaves the context. The context is entered before
    metrics.jsonl is cut to `step`. more: further fields of the start line: on, cause.
    """
    attempt = Attempt(directory, account)
    if jax.process_index() == 0:
        attempt.start(step, more)
        stops.record_endings(lambda words, code: attempt.end(
            "stopped on request: " * (code == stops.STOPPED) + words, code=code))
    try:
        yield attempt
    except ConfigError:
        if attempt.began:
            attempt.forget()
        raise
    except mirror.LostClaimError:       # the history belongs to another start
        attempt.abandon()
        raise
    except BaseException as error:
        attempt.end(f"failed: {files.describe(error)[:300]}", code=stops.FAILED)
        raise
    finally:
        stops.record_endings(lambda words, code: None)


def find_ending(directory: Path, began: float) -> tuple[str, bool]:
    """Return (how an attempt ended, whether it hung), for an attempt that recorded no end.

    Both values come from the stack traces that the attempt's watchdog wrote, if it wrote any. The present start
    has already moved these files to stacks/try-*. began: when the attempt started (time.time).
    """
    places = (directory / STACKS, *(directory / STACKS).glob("try-*"))
    culprits = filter(None, (stacks.culprit(place, began) for place in places))
    for process, what in culprits:
        return f"process {process} {what}", True
    return goodput.UNKNOWN + " (killed, or a power failure)", False


def read(directory: Path) -> list[dict]:
    """Return the lines of the history. Invalid lines are reported and left out. Raises: OSError."""
    return rows.Log(directory / HISTORY, _is_line).read()


def _is_line(row: Mapping) -> bool:
    event, spent_s = row.get("event"), row.get("spent_s")
    if not isinstance(event, str) or event not in OF_EVENT or not isinstance(spent_s, dict):
        return False
    numbers, texts = OF_EVENT[event]
    values = [*(row.get(key) for key in (*OF_ALL, *numbers)), *spent_s.values()]
    return all(isinstance(value, (int, float)) and abs(value) < 1e12 for value in values) and all(
        isinstance(row.get(key), str) for key in texts)


def _read_metrics(directory: Path) -> rows.MetricRows | tuple:
    metrics = rows.MetricRows(directory / rows.NAME)
    try:
        next(reversed(metrics), None)
    except OSError:     # a wrong goodput is better than a failed start
        return ()
    return metrics
