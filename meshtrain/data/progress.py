"""Reports the progress of a long reading of files: a line that is kept up to date on a terminal, else a line every few
seconds."""
from __future__ import annotations

import time
from collections.abc import Callable

TELL_SECONDS = 5    # time between two lines without a terminal; shorter work is not reported
SHOW_SECONDS = 0.2  # between two lines on a terminal


class FileProgress:
    """Reports progress, unless the work is short. what: e.g. "tokenizing 3 files". total: bytes. tell: prints a line.
    show: prints a line that the next one replaces; None: there is no terminal."""

    def __init__(self, what: str, total: int, tell: Callable[[str], None], show: Callable[[str], None] | None = None):
        self.what, self.total, self.done, self.tell, self.show = what, max(1, total), 0, tell, show
        self.started = self.told = time.monotonic()

    def __enter__(self) -> FileProgress:
        return self

    def __exit__(self, *error) -> None:
        now = time.monotonic()
        if error[0] is None and (now - self.started > TELL_SECONDS if self.show else self.told > self.started):
            self.tell(f"{self.what}: done in {now - self.started:.0f} s")

    def reach(self, position: int) -> None:
        """Record that `position` bytes of the present file are done."""
        done, now = self.done + position, time.monotonic()
        if now - self.told > (SHOW_SECONDS if self.show else TELL_SECONDS):
            self.told = now
            left_s = int((now - self.started) * (self.total - done) / done) if done else 0
            (self.show or self.tell)(f"{self.what}: {done / self.total:.0%}, {done / 1e6 / (now - self.started):.1f} "
                                     f"MB/s, {left_s // 60}:{left_s % 60:02} left")

    def finish(self, size: int) -> None:
        self.done += size
        self.reach(0)
