"""A sampler's side of the exchange with the trainer: claims parts of orders, and delivers answers."""
from __future__ import annotations

import collections
import contextlib
import io
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from meshtrain import files
from meshtrain.cluster import watch
from meshtrain.inference.generate import Completion
from meshtrain.rl import exchange, groups
from meshtrain.rl.exchange import Heartbeats, Order, OtherVersionError, SamplerFiles, pack_answers
from meshtrain.rl.groups import RolloutError
from meshtrain.run import say

RENEWED_S = 5.0         # between two heartbeats
LONGER_THAN_MEDIAN = 10 # a sampler without progress for this many times the median time of its parts hangs
FIRST_S = 600.0         # limit without progress while it reads weights or samples its first part (compilation)


class WorkQueue:
    """The sampler's side of the exchange: claims parts that no other live sampler has claimed, and delivers answers."""

    def __init__(self, run_dir: Path):
        self.place = SamplerFiles(run_dir)
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.heartbeats, self._began = Heartbeats(self.place), 0.0
        self._claimed: Path | None = None
        self._orders: dict[int, tuple[int, Order]] = {}
        self._parts_s: collections.deque[float] = collections.deque(maxlen=64)
        self._work, self.slow = 0, False        # slow: while True, FIRST_S without progress are allowed
        self._since, self._looked = time.monotonic(), False
        self._left: dict[int, int] = {}         # skipped orders of other versions, with their times of change
        self._beat: files.Beat | None = None

    def begin(self) -> None:
        """Start the heartbeat, which runs until `leave`."""
        self._write()
        self._beat = files.Beat(self._write, min(RENEWED_S, exchange.LAPSED_S / 4))

    def leave(self) -> None:
        if self._beat:
            self._beat.close()
        with contextlib.suppress(OSError):
            (self.place.heartbeats / self.name).unlink(missing_ok=True)
            self.release()

    def progress(self) -> None:
        """Record progress of the main thread. A sampler without it for `most_s` counts as hanging and is ended."""
        self._work += 1
        watch.progress()

    @property
    def most_s(self) -> float:
        """The longest time without progress, in seconds, before this sampler counts as hanging."""
        if self.slow or self._claimed and not self._parts_s:
            return FIRST_S
        median_s = sorted(self._parts_s)[len(self._parts_s) // 2] if self._parts_s else 0.0
        return max(exchange.LAPSED_S, LONGER_THAN_MEDIAN * median_s)

    def _write(self) -> None:
        (self.place.heartbeats / self.name).write_text(f"{time.time():.3f} {self._work} {self.most_s:.0f}",
                                                       encoding="utf-8")

    def next(self) -> tuple[Order, int] | None:
        """Claim the first part that is neither answered nor claimed and whose weights are saved. Return (order, part);
        None if there is no such part. Raises: OtherVersionError."""
        self.progress()
        batches = sorted(int(name[:-5]) for name in os.listdir(self.place.orders) if re.fullmatch(r"\d+\.json", name))
        self._orders = {batch: entry for batch, entry in self._orders.items() if batch in batches}
        for batch in batches:
            order = self._order(batch)
            if order is None or self.place.checksum_of(order.version) != order.weights:
                continue
            for part in order.parts:
                if not self.place.answers(batch, part).exists() and self._claim(batch, part):
                    return order, part
        self._looked = True
        return None

    def _order(self, batch: int) -> Order | None:
        with contextlib.suppress(FileNotFoundError):
            changed = os.stat(self.place.order(batch)).st_mtime_ns
            if batch not in self._orders or self._orders[batch][0] != changed:
                try:
                    order = self.place.read(batch)
                except OtherVersionError as error:
                    # an order from before this start may be replaced by a trainer of this version that starts later
                    if (self._looked and self._left.get(batch) != changed
                            or time.monotonic() - self._since > exchange.LOST_S):
                        raise
                    if not self._left:
                        say.err(f"{error}; waiting for another order")
                    self._left[batch] = changed
                    return None
                if order is None:
                    return None
                self._orders[batch] = changed, order
            return self._orders[batch][1]
        return None

    def _claim(self, batch: int, part: int) -> bool:
        path = self.place.answers(batch, part).with_suffix(".claim")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self.name)
        except FileExistsError:
            if not self._take_over(path):
                return False
        self._claimed, self._began = path, time.monotonic()
        return True

    def _take_over(self, path: Path) -> bool:
        """Return whether this sampler has the claim now, because the previous owner is dead or hangs."""
        try:
            holder = files.patiently(lambda: path.read_text(encoding="utf-8"))
            # A claim is empty until its sampler has written its name. It then has the grace of a missing heartbeat.
            if self.heartbeats.alive(holder or path.name):
                return False
            # If several samplers take over a claim, the last one has it. The others generate equal answers.
            files.replace(path, self.name, shared=True)
            return path.read_text(encoding="utf-8") == self.name
        except FileNotFoundError:       # it was released meanwhile: the next look finds the part answered or free
            return False

    def release(self) -> None:
        """Give up the claimed part, so that other samplers can claim it."""
        path, self._claimed, self.slow = self._claimed, None, False
        if path is not None:
            path.unlink(missing_ok=True)

    def deliver(self, order: Order, part: int, answers: Sequence[Completion], on: str) -> None:
        """Write the answers to a part and release its claim. on: the sampler's mesh and devices, as text.

        If another sampler has delivered the part, its answers stay and are compared. Raises: RolloutError if they
        differ although `on` is the same.
        """
        self._parts_s.append(time.monotonic() - self._began)
        path, content = self.place.answers(order.batch, part), pack_answers(order, part, answers, self.name, on)
        before = groups.unpack_arrays(path)
        if before and before[0]["order"] == order.id:
            now = groups.unpack_arrays(io.BytesIO(content))
            assert now is not None
            _compare(path, before, now)
        elif self.place.has(order):
            files.patiently(lambda: files.replace(path, content, shared=True))
        self.release()


def _compare(path: Path, before: tuple[dict, dict], now: tuple[dict, dict]) -> None:
    if before[0]["lengths"] == now[0]["lengths"] and all(
            before[1][name].tobytes() == now[1][name].tobytes() for name in now[1]):
        return
    words = f"{path}: {before[0]['by']} gave other answers than {now[0]['by']} to the same request"
    if before[0]["on"] == now[0]["on"]:
        raise RolloutError(f"{words}, on equal devices ({now[0]['on']}): one of the two hosts computes wrongly; check "
                           f"both hosts. The first answers are used")
    say.err(f"{words}. They run on {before[0]['on']} and {now[0]['on']}, and meshes round differently. The first "
            f"answers are used")
