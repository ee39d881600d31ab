"""Log of a run's attempts, run.dir/history.jsonl: one line per start and one per end, with its cause and where the
seconds went.

A start without an end was killed or still runs. A heartbeat file (.alive), rewritten every few seconds, lets the next
attempt record the end of one that was killed. The steps that a start repeats, behind the checkpoint it resumes from,
are recorded before their metrics are dropped. A full disk ends no run.
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
from meshtrain.run import goodput, rows, say, stops
from meshtrain.run.contents import ALIVE, HISTORY, STACKS

BEAT_S = 5.0            # by so much the end of a killed try may be too early
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Try:
    """This attempt, as process 0 records it; the other processes write nothing."""

    def __init__(self, directory: Path, account: goodput.Account):
        self.path, self.account = directory / HISTORY, account
        self.alive, self.beating = directory / ALIVE, directory / f"{ALIVE}.tmp"
        self.first, self.began, self._end_recorded, self._done = not self.path.exists(), 0.0, False, threading.Event()
        self._lock = threading.Lock()

    def start(self, step: int, more: Mapping) -> None:
        """Records the start of this attempt, which resumes after `step`, and the end of the one before, if that
        recorded none."""
        directory, run_s = self.path.parent, time.perf_counter() - self.account.began
        lines, metrics = read(directory), _rows(directory)
        if lines and lines[-1]["event"] == "start":
            how, stuck = unsaid(directory, lines[-1])
            lines.append(goodput.ended(goodput.last_sign(lines[-1], beat(directory), metrics), how, stuck=stuck))
            self._append(lines[-1])
        own = {"event": "start", "time": time.time() - run_s,
               "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME) - run_s,
               "boot": BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.exists() else "",
               "host": socket.gethostname(), "pid": os.getpid(),
               "step": step, "run_s": run_s, "spent_s": self.account.so_far()["spent_s"], **more}
        own |= goodput.began_after(goodput.tries(lines, None, metrics), own, lines, metrics)
        self.began = own["time"]
        self.account.elapsed_s, self.account.counted_s, self.account.step = own["elapsed_s"], own["counted_s"], step
        self._size = self.path.stat().st_size if self.path.exists() else 0
        self._append(own)
        self.beat()
        threading.Thread(target=self._keep_beating, daemon=True, name="beat").start()

    def goes_back(self, step: int) -> None:
        """Records that this attempt returns to an earlier step of its own; called before metrics.jsonl is cut there."""
        self.account.goes_back(step, goodput.counted_s(_rows(self.path.parent), step))

    def ended(self, how: str, **more) -> None:
        """Record the end of this attempt. Only the first call has an effect."""
        with self._lock:
            if self._end_recorded or not self.began:
                return
            self._end_recorded = True
        self._done.set()
        self._append(goodput.ended(self.account.so_far(), how, **more))
        self._remove_beat()

    def forget(self) -> None:
        """Removes this start from the history: the user's mistake was found after it was recorded."""
        self._end_recorded = True
        self._done.set()
        self._remove_beat()
        with contextlib.suppress(OSError):
            self.path.unlink() if self.first else os.truncate(self.path, self._size)

    def line(self) -> str:
        """The goodput of the run so far."""
        directory = self.path.parent
        return goodput.line(goodput.spent_s(goodput.tries(read(directory), beat(directory), ())))

    def beat(self) -> None:
        with contextlib.suppress(OSError):      # the next one may be written
            self.beating.write_text(json.dumps({"of": self.began, **self.account.so_far()}) + "\n", encoding="utf-8")
            self.beating.replace(self.alive)

    def _remove_beat(self) -> None:
        for path in (self.alive, self.beating):     # the second where a write was refused
            with contextlib.suppress(OSError):
                path.unlink()

    def _keep_beating(self) -> None:
        while not self._done.wait(BEAT_S):
            self.beat()

    def _append(self, row: Mapping) -> None:
        try:
            # by a kill
            torn = self.path.exists() and self.path.stat().st_size and self.path.read_bytes()[-1:] != b"\n"
            with open(self.path, "ab") as file:
                file.write(b"\n" * bool(torn) + json.dumps(row).encode() + b"\n")
        except OSError as error:
            say.err(f"{self.path} cannot be written: {error.strerror}; training goes on")


@contextlib.contextmanager
def kept(directory: Path, step: int, account: goodput.Account, more: Mapping) -> Iterator[Try]:
    """Context: records that the run resumes after `step`, and its end, by `Try.ended` or by the exception that leaves
    the context.

    Entered before metrics.jsonl is cut to `step`. more: further fields of the start: on, cause. Only process 0 writes.
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
    except BaseException as error:
        this.ended(f"failed: {files.said(error)[:300]}", code=stops.FAILED)
        raise
    finally:
        stops.record_endings(lambda words, code: None)


def unsaid(directory: Path, start: Mapping) -> tuple[str, bool]:
    """(how an attempt ended that recorded no end, whether it hung): from the stacks that a watchdog left, if there are
    any. This start has already moved those away."""
    places = (directory / STACKS, *(directory / STACKS).glob("try-*"))
    if found := next(filter(None, (stacks.culprit(place, start["time"]) for place in places)), None):
        return f"process {found[0]} {found[1]}", True
    return goodput.UNKNOWN + " (killed, or the power went)", False


def read(directory: Path) -> list[dict]:
    """The lines, without those that a kill or a full disk left incomplete."""
    try:
        lines = (directory / HISTORY).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and row.get("event") in ("start", "end") and isinstance(
                    row.get("run_s"), (int, float)):
                found.append(row)
    return found


def beat(directory: Path) -> dict | None:
    """The last heartbeat; None: there is none, or it was being written."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / ALIVE).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None


def _rows(directory: Path) -> rows.MetricRows | tuple:
    found = rows.MetricRows(directory / rows.NAME)
    try:
        next(reversed(found), None)
    except OSError:     # a wrong account is not worth a start
        return ()
    return found
