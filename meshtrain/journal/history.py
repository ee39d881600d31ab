"""Log of a run's attempts, run.dir/history.jsonl.

Each attempt has a line for its start and one for its end, with the cause and the seconds by part. Between them a
heartbeat line has the seconds so far; it is rewritten in place every few seconds. If an attempt was killed, the next
one records its end from the heartbeat line. The steps that a start repeats (after the checkpoint that it resumes from)
are counted before their metrics are dropped. A full disk ends no run.
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


class Try:
    """Records this attempt in the history. Only process 0 writes."""

    def __init__(self, directory: Path, account: goodput.Account):
        self.path, self.account = directory / HISTORY, account
        self.first, self.began, self._end_recorded = not self.path.exists(), 0.0, False
        self._lock, self._beat_at, self._beat = threading.Lock(), 0, None

    def start(self, step: int, more: Mapping) -> None:
        """Record the start of this attempt, which resumes after `step`. If the attempt before recorded no end, record
        that, too. more: further fields of the line."""
        directory, run_s, lines = self.path.parent, time.perf_counter() - self.account.began, []
        with contextlib.suppress(OSError):
            lines = read(directory)
        metrics = _rows(directory)
        if lines and lines[-1]["event"] != "end":
            began = next((line["time"] for line in reversed(lines) if line["event"] == "start"), 0.0)
            how, stuck = unsaid(directory, began)
            lines.append(goodput.ended(lines[-1], how, stuck=stuck))
            self._append(lines[-1])
        own = {"event": "start", "time": time.time() - run_s,
               "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME) - run_s,
               "boot": BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.exists() else "",
               "host": socket.gethostname(), "pid": os.getpid(),
               "step": step, "run_s": run_s, "spent_s": self.account.so_far()["spent_s"], **more}
        own |= goodput.began_after(goodput.tries(lines), own, lines, metrics)
        self.began = own["time"]
        self.account.elapsed_s, self.account.counted_s, self.account.step = own["elapsed_s"], own["counted_s"], step
        self._size = self.path.stat().st_size if self.path.exists() else 0
        self._append(own)
        self._beat_at = self._append(self._account())
        self._beat = files.Beat(self.beat, BEAT_S)

    def goes_back(self, step: int) -> None:
        """Record that this attempt goes back to `step`. Called before the rows after it are cut from metrics.jsonl."""
        self.account.goes_back(step, goodput.counted_s(_rows(self.path.parent), step))

    def ended(self, how: str, **more) -> None:
        """Record the end of this attempt. Only the first call has an effect."""
        with self._lock:
            if self._end_recorded or not self.began:
                return
            self.abandon()
        self._append(goodput.ended(self.account.so_far(), how, **more))

    def abandon(self) -> None:
        """Stop the heartbeat, and record no end."""
        self._end_recorded = True
        if self._beat:
            self._beat.close()

    def forget(self) -> None:
        """Remove this start from the history, because a mistake of the user was found after it was recorded."""
        self.abandon()
        with contextlib.suppress(OSError):
            mirror.remove(self.path) if self.first else os.truncate(self.path, self._size)

    def line(self) -> str:
        """Return the goodput of the run so far as a line of text; "" if the history cannot be read."""
        with contextlib.suppress(OSError):
            return goodput.line(goodput.spent_s(goodput.tries(list(_log(self.path.parent)))))
        return ""

    def beat(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self._beat_at)
            if file.read(len(BEAT)) == BEAT:        # else the file was edited by hand
                file.seek(self._beat_at)
                file.write(_text(self._account()))

    def _account(self) -> dict:
        return {"event": "beat", **self.account.so_far()}

    def _append(self, row: Mapping) -> int:
        """Append a line. Return its offset in the file; 0 if it cannot be written."""
        try:
            with open(self.path, "ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                torn = file.read() not in (b"", b"\n")      # the last write was interrupted
                file.write(b"\n" * torn + _text(row))
                return end + torn
        except OSError as error:
            say.err(f"{self.path} cannot be written: {error.strerror}; training continues")
            return 0


def _text(row: Mapping) -> bytes:
    line = json.dumps(row).encode()
    return line.ljust(BEAT_BYTES * (row["event"] == "beat") - 1) + b"\n"


@contextlib.contextmanager
def kept(directory: Path, step: int, account: goodput.Account, more: Mapping) -> Iterator[Try]:
    """Context: record that an attempt starts after `step`, and its end. Only process 0 writes.

    The end is recorded by `Try.ended`, or by the exception that leaves the context. Entered before metrics.jsonl is cut
    to `step`. more: further fields of the start line: on, cause.
    """
    this = Try(directory, account)
    if jax.process_index() == 0:
        this.start(step, more)
        stops.record_endings(lambda words, code: this.ended(
            "stopped on request: " * (code == stops.STOPPED) + words, code=code))
    try:
        yield this
    except ConfigError:
        if this.began:
            this.forget()
        raise
    except mirror.LostClaimError:       # the history belongs to another start
        this.abandon()
        raise
    except BaseException as error:
        this.ended(f"failed: {files.said(error)[:300]}", code=stops.FAILED)
        raise
    finally:
        stops.record_endings(lambda words, code: None)


def unsaid(directory: Path, began: float) -> tuple[str, bool]:
    """Return (how an attempt ended that recorded no end, whether it hung).

    Both come from the stack traces that a watchdog wrote, if there are any. This start has already moved them into
    stacks/try-*. began: when that attempt started (time.time).
    """
    places = (directory / STACKS, *(directory / STACKS).glob("try-*"))
    if found := next(filter(None, (stacks.culprit(place, began) for place in places)), None):
        return f"process {found[0]} {found[1]}", True
    return goodput.UNKNOWN + " (killed, or the power went)", False


def read(directory: Path) -> list[dict]:
    """Return the lines of the history. Invalid lines are reported and left out. Raises: OSError."""
    return _log(directory).read()


def _log(directory: Path) -> rows.Log:
    return rows.Log(directory / HISTORY, _is_line)


def _is_line(row: Mapping) -> bool:
    event, spent_s = row.get("event"), row.get("spent_s")
    if not isinstance(event, str) or event not in OF_EVENT or not isinstance(spent_s, dict):
        return False
    numbers, texts = OF_EVENT[event]
    values = [*(row.get(key) for key in (*OF_ALL, *numbers)), *spent_s.values()]
    return all(isinstance(value, (int, float)) and abs(value) < 1e12 for value in values) and all(
        isinstance(row.get(key), str) for key in texts)


def _rows(directory: Path) -> rows.MetricRows | tuple:
    found = rows.MetricRows(directory / rows.NAME)
    try:
        next(reversed(found), None)
    except OSError:     # a wrong goodput is better than a failed start
        return ()
    return found
