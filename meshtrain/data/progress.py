"""How far a long reading of files is: a bar on a terminal, elsewhere a line now and then."""
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

TELL_SECONDS = 5    # between two lines of progress where there is no terminal, and the wait that is worth a line


class FileProgress:
    """Reports nothing that is done at once. what: e.g. "tokenizing 3 files"; total: bytes. tell: prints a line."""

    def __init__(self, what: str, total: int, tell: Callable[[str], None]):
        self.what, self.total, self.done, self.tell = what, max(1, total), 0, tell
        self.started = self.told = time.monotonic()
        self.bar = None

    def __enter__(self) -> FileProgress:
        if sys.stderr.isatty():
            from rich import console, progress
            self.bar = progress.Progress(progress.TextColumn("{task.description}"), progress.BarColumn(),
                                         progress.DownloadColumn(), progress.TransferSpeedColumn(),
                                         progress.TimeRemainingColumn(), console=console.Console(stderr=True))
            self.task = self.bar.add_task(self.what, total=self.total)
            with contextlib.suppress(Exception):
                self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self.bar:
            with contextlib.suppress(Exception):    # the terminal has gone
                self.bar.stop()
        elif error[0] is None and self.told > self.started:
            self.tell(f"{self.what}: done in {time.monotonic() - self.started:.0f} s")

    def reach(self, position: int) -> None:
        """`position` bytes of the present file are done."""
        done, now = self.done + position, time.monotonic()
        if self.bar:
            with contextlib.suppress(Exception):
                self.bar.update(self.task, completed=done)
        elif now - self.told > TELL_SECONDS:
            self.told = now
            self.tell(f"{self.what}: {done / self.total:.0%}, {done / 1e6 / (now - self.started):.1f} MB/s")

    def finish(self, size: int) -> None:
        self.done += size
        self.reach(0)
