"""How far a long reading of files is: a live line on a terminal, elsewhere a line now and then."""
from __future__ import annotations

import time
from collections.abc import Callable

TELL_SECONDS = 5    # between two lines of progress where there is no terminal, and the wait that is worth a line
LIVE_SECONDS = 0.2  # between two live lines


class FileProgress:
    """Reports nothing that is done at once. what: e.g. "tokenizing 3 files"; total: bytes. tell: prints a line; live:
    prints a line that the next one replaces, None without a terminal."""

    def __init__(self, what: str, total: int, tell: Callable[[str], None], live: Callable[[str], None] | None = None):
        self.what, self.total, self.done, self.tell, self.live = what, max(1, total), 0, tell, live
        self.started = self.told = time.monotonic()

    def __enter__(self) -> FileProgress:
        return self

    def __exit__(self, *error) -> None:
        if error[0] is None and self.told > self.started:
            self.tell(f"{self.what}: done in {time.monotonic() - self.started:.0f} s")

    def reach(self, position: int) -> None:
        """`position` bytes of the present file are done."""
        done, now = self.done + position, time.monotonic()
        if now - self.told > (LIVE_SECONDS if self.live else TELL_SECONDS):
            self.told = now
            (self.live or self.tell)(f"{self.what}: {done / self.total:.0%}, "
                                     f"{done / 1e6 / (now - self.started):.1f} MB/s")

    def finish(self, size: int) -> None:
        self.done += size
        self.reach(0)
