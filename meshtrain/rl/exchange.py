"""Exchange of RL answers between the trainer and separate sampler processes, through files in run.dir/samplers.

    weights/V/          a checkpoint of the weights of version V: the weights after training on V batches of answers
    frozen/0/           with adapters: a checkpoint of the untrained weights; weights/V/ then has the adapters alone
    orders/N.json       the order of batch N: prompts, sampling settings, version and checksum of the weights
    answers/N-P.npz     the answers to part P of the prompts of batch N
    answers/N-P.claim   the name of the sampler that generates this part; invalid if that sampler dies or hangs
    heartbeats/NAME     the heartbeat of sampler NAME: a time, a progress counter, the longest time without progress
    finished            exists if the run has taken all its steps

Every file is complete or absent, except that a claim is empty for a moment. Batch N is sampled with weights of version
N - rl.lag. Every token is a function of the order, so two samplers generate equal answers, and no locks are needed.
Clocks of hosts differ; therefore a reader measures on its own clock how long a file has not changed.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import meshtrain
from meshtrain import files
from meshtrain.config import ConfigError
from meshtrain.inference.generate import Completion
from meshtrain.rl import groups
from meshtrain.run import contents, replicas, say

FROZEN = 0              # the one step in frozen/
PARTS = 4               # parts of an order, unless rl.slots sets the number of answers of a part
LOOK_S = 0.1            # between two looks at the files
LAPSED_S = 60.0         # a sampler without a heartbeat for this long is dead; shortest time after which one hangs
MISSING_S = 10.0        # grace for a missing heartbeat file: a shared file system may show it late
TOLD_EVERY_S = 30.0     # between two messages of one that waits
LOST_S = 600.0          # the run ends after this long without any sampler


class OtherVersionError(ConfigError):
    """An order was written by another version of meshtrain or jax."""


@functools.cache
def versions() -> str:
    """Return the versions of meshtrain and jax as text. Other versions may sample other tokens."""
    return f"meshtrain {meshtrain.__version__}, jax {importlib.metadata.version('jax')}"


@dataclasses.dataclass(frozen=True)
class Order:
    """A request for one batch of answers. The answers are a function of these fields.

    version: the version of the weights to sample with. weights: the checksum of these weights. draws: seed,
    temperature, max_tokens, samples, stop, stop_ids. room: largest number of tokens of a prompt with its answer. part:
    number of prompts in each part. prompts: token ids. made_by: the software that wrote the order, see `versions`.
    """
    batch: int
    version: int
    weights: str
    draws: dict
    room: int
    part: int
    prompts: list[list[int]]
    made_by: str = dataclasses.field(default_factory=lambda: versions())

    @functools.cached_property
    def id(self) -> str:
        return hashlib.blake2b(self.text.encode(), digest_size=10).hexdigest()

    @property
    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def parts(self) -> range:
        return range(-(-len(self.prompts) // self.part))

    def rows(self, part: int) -> range:
        """Return the indices of the prompts of a part."""
        return range(part * self.part, min((part + 1) * self.part, len(self.prompts)))


def prompts_of_part(rl) -> int:
    """Return the number of prompts in a part, which a sampler answers together. rl: the section [rl]."""
    return max(1, rl.slots // rl.samples) if rl.slots else -(-rl.prompts // PARTS)


class SamplerFiles:
    """The paths in run.dir/samplers."""

    def __init__(self, run_dir: Path):
        self.directory = run_dir / contents.SAMPLERS
        self.orders, self.drawn, self.heartbeats, self.weights, self.frozen, self.finished = (
            self.directory / name for name in ("orders", "answers", "heartbeats", "weights", "frozen", "finished"))

    def order(self, batch: int) -> Path:
        return self.orders / f"{batch}.json"

    def answers(self, batch: int, part: int) -> Path:
        return self.drawn / f"{batch}-{part}.npz"

    def of_batch(self, batch: int) -> Iterator[Path]:
        """Yield the paths of a batch's answers and claims."""
        return self.drawn.glob(f"{batch}-*")

    def read(self, batch: int) -> Order | None:
        """Return the order of a batch; None if there is none. Raises: OtherVersionError."""
        try:
            fields = json.loads(files.patiently(lambda: self.order(batch).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        if (made_by := fields.get("made_by", "an earlier version")) != versions():
            raise OtherVersionError(
                f"{self.order(batch)} was written by {made_by}, and this process runs {versions()}: answers of two "
                f"versions may differ; use one version for the trainer and all samplers")
        return Order(**fields)

    def has(self, order: Order) -> bool:
        """Return whether `order` equals the order on disk; false if another version wrote the order on disk."""
        with contextlib.suppress(OtherVersionError):
            return self.read(order.batch) == order
        return False

    def checksum_of(self, version: int) -> str | None:
        """Return the checksum of the saved weights of a version; None if they are not saved."""
        return _read_checksum(self.weights / str(version))

    def checksum_of_frozen(self) -> str | None:
        """Return the checksum of the saved untrained weights; None if they are not saved."""
        return _read_checksum(self.frozen / str(FROZEN))


def _read_checksum(place: Path) -> str | None:
    try:
        return json.loads((place / "metadata.json").read_text(encoding="utf-8"))["weights"]
    except FileNotFoundError:
        return None


def checksum(trained: dict, frozen: str) -> str:
    """Return the checksum of all weights of a version. frozen: the digest of the untrained weights, "" without them."""
    return f"{replicas.digest(trained)}-{frozen}" if frozen else replicas.digest(trained)


class Heartbeats:
    """Tells which samplers are alive. A sampler is dead if its heartbeat file stops changing, and hangs if the progress
    counter in the file stops."""

    def __init__(self, place: SamplerFiles):
        self.directory = place.heartbeats
        self._seen: dict[tuple[str, str], tuple[str, float]] = {}       # (sampler, "text" or "work") -> (value, since)
        self._told: set[str] = set()        # samplers reported as hanging

    def alive(self, name: str) -> bool:
        """Return whether a sampler is alive and does not hang. The first call for a sampler returns True."""
        text = ""
        with contextlib.suppress(FileNotFoundError):
            text = (self.directory / name).read_text(encoding="utf-8")
        if self._measure_unchanged_s(name, "text", text) >= (LAPSED_S if text else min(MISSING_S, LAPSED_S)):
            return False
        _, work, most_s = text.split() if text.count(" ") == 2 else ("", "", LAPSED_S)      # partly written, or missing
        hangs = work != "" and self._measure_unchanged_s(name, "work", work) >= float(most_s)
        if hangs and name not in self._told:
            say.err(f"sampler {name} hangs: it is alive but has sampled nothing for {float(most_s):.0f} s; another "
                    f"sampler may take over its part")
        self._told = self._told | {name} if hangs else self._told - {name}
        return not hangs

    def _measure_unchanged_s(self, name: str, what: str, value: str) -> float:
        """Return for how many seconds a sampler's value has not changed, by this process's clock."""
        before, since = self._seen.get((name, what), (None, 0.0))
        if before != value:
            since = time.monotonic()
            self._seen[name, what] = value, since
        return time.monotonic() - since

    def any(self) -> bool:
        """Return whether any sampler is alive. Heartbeat files of dead samplers are removed."""
        names = os.listdir(self.directory)
        alive = [name for name in names if self.alive(name)]
        for name in names:
            if time.monotonic() - self._seen[name, "text"][1] >= LAPSED_S:
                (self.directory / name).unlink(missing_ok=True)
        return bool(alive)


def pack_answers(order: Order, part: int, answers: Sequence[Completion], by: str, on: str) -> bytes:
    """Return the content of a file of answers. by: name of the sampler. on: see `WorkQueue.deliver`."""
    told, arrays = groups.flat(answers)
    return groups.pack_arrays(told | {"order": order.id, "version": order.version, "weights": order.weights, "by": by,
                                 "made_by": versions(), "on": on}, arrays)


def has_answers(path: Path, order: Order) -> bool:
    """Return whether a file has answers to this order."""
    content = groups.unpack_arrays(path)
    return content is not None and content[0]["order"] == order.id
