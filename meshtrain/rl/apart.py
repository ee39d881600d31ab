"""Exchange of RL answers between the trainer and separate sampler processes, through files in run.dir/samplers.

    weights/V/          a checkpoint of the weights of version V: the weights after training on V batches of answers
    frozen/0/           with adapters: a checkpoint of the untrained weights; weights/V/ then has the adapters alone
    orders/N.json       the order of batch N: prompts, sampling settings, version and checksum of the weights
    answers/N-P.npz     the answers to part P of the prompts of batch N
    answers/N-P.claim   the name of the sampler that generates this part; invalid if that sampler dies or hangs
    heartbeats/NAME     the heartbeat of sampler NAME: a time, a progress counter, the longest time without progress
    finished            exists if the run has taken all its steps

Every file is complete or absent. Batch N is sampled with weights of version N - rl.lag. Every token is a function of
the order, so two samplers generate equal answers, and no locks are needed. Clocks of hosts differ; therefore a reader
measures on its own clock how long a file has not changed.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import meshtrain
from meshtrain import files
from meshtrain.cluster import agree, watch
from meshtrain.config import ConfigError, Run
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Completion
from meshtrain.rl import groups
from meshtrain.rl.groups import Kept, RolloutError
from meshtrain.rl.prompts import Prompts
from meshtrain.run import contents, replicas, say
from meshtrain.run.loop import NoBatch

FROZEN = 0              # the one step in frozen/
PARTS = 4               # parts of an order, unless rl.slots sets the number of answers of a part
LOOK_S, WAITS_S, RENEWED_S = 0.1, 1.0, 5.0
LAPSED_S = 60.0         # a sampler without a heartbeat for this long is dead; shortest time after which one hangs
LONGER_THAN_MEDIAN = 10 # a sampler without progress for this many times the median time of its parts hangs
FIRST_S = 600.0         # limit without progress while it reads weights or samples its first part (compilation)
MISSING_S = 10.0        # grace for a missing heartbeat file: a shared file system may show it late
TOLD_EVERY_S = 30.0
LOST_S = 600.0          # the run ends after this long without any sampler
SAMPLE = "python -m meshtrain.sample"


class OtherVersionError(ConfigError):
    """An order was written by another version of meshtrain or jax."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A request for one batch of answers. The answers are a function of these fields.

    version: of the weights to sample with. weights: their checksum. draws: seed, temperature, max_tokens, samples,
    stop, stop_ids. room: largest number of tokens of a prompt with its answer. part: number of prompts in each part.
    prompts: token ids. made_by: the software that wrote the order, see `versions`.
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


@functools.cache
def versions() -> str:
    """Return the versions of meshtrain and jax as text. Other versions may sample other tokens."""
    return f"meshtrain {meshtrain.__version__}, jax {importlib.metadata.version('jax')}"


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
        """Return whether `order` equals the order on disk. It does not if another version wrote that one."""
        with contextlib.suppress(OtherVersionError):
            return self.read(order.batch) == order
        return False

    def checksum_of(self, version: int) -> str | None:
        """Return the checksum of the saved weights of a version; None if they are not saved."""
        return _saved_checksum(self.weights / str(version))

    def checksum_of_frozen(self) -> str | None:
        """Return the checksum of the saved untrained weights; None if they are not saved."""
        return _saved_checksum(self.frozen / str(FROZEN))


def _saved_checksum(place: Path) -> str | None:
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
        if self._unchanged_s(name, "text", text) >= (LAPSED_S if text else min(MISSING_S, LAPSED_S)):
            return False
        _, work, most_s = text.split() if text.count(" ") == 2 else ("", "", LAPSED_S)      # partly written, or missing
        hangs = work != "" and self._unchanged_s(name, "work", work) >= float(most_s)
        if hangs and name not in self._told:
            say.err(f"sampler {name} hangs: it is alive but has sampled nothing for {float(most_s):.0f} s; another "
                    f"sampler may take over its part")
        self._told = self._told | {name} if hangs else self._told - {name}
        return not hangs

    def _unchanged_s(self, name: str, what: str, value: str) -> float:
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


# ---- the trainer -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class SentWeights:
    """A part of the weights (trained or untrained) that the trainer saves for samplers.

    store: the `Checkpoints` that saves it. cast: function from all weights of the trainer to this part, in the layout
    and dtype that samplers read.
    """
    store: Any
    cast: Callable[[dict], dict]


class Orders:
    """The trainer's side of the exchange: writes orders and reads answers. All processes call its methods together, and
    process 0 writes.

    words: the tokens and strings that end an answer. sent: the trained weights. document: metadata of their
    checkpoints. queue: the result of `queue` that was saved in the checkpoint that the run resumes from. frozen: the
    untrained weights, if there are any.
    """

    def __init__(self, run: Run, prompts: Prompts, words: Words, sent: SentWeights, document: dict,
                 queue: Sequence[Sequence] = (), frozen: SentWeights | None = None):
        self.run, self.rl, self.prompts, self.cast, self.frozen = run, run.rl, prompts, sent.cast, frozen
        self.store, self.document = sent.store, document
        self.directory = Path(run.run.dir)
        self.place, self.batches = SamplerFiles(self.directory), -(-run.training.steps // run.rl.updates)
        self.draws = {"seed": run.run.seed, "temperature": self.rl.temperature, "max_tokens": self.rl.max_tokens,
                      "samples": self.rl.samples, "stop": list(words.stops), "stop_ids": list(words.stop_ids)}
        self.stopping: Callable[[], bool] = lambda: False       # whether to stop; set by `Rollouts.begin`
        self.checksums = {version: weights for _, version, weights in queue}
        self.given: dict[int, Order] = {}       # by batch
        self._versions = {batch: version for batch, version, _ in queue}
        self._begun, self._of_frozen = False, ""
        agree.on_first(self._open)
        self.heartbeats = Heartbeats(self.place)

    def _open(self) -> None:
        for place in (self.place.drawn, self.place.heartbeats, self.place.orders):      # samplers wait for `orders`
            place.mkdir(parents=True, exist_ok=True)
        self.place.finished.unlink(missing_ok=True)

    def queue(self, steps: int) -> list:
        """Return [batch, version, checksum of the weights] for the requested batches that are trained on after `steps`
        and sampled with weights from before. A checkpoint saves this list. Waits until these weights are on disk.
        Raises: FileSystemError."""
        self.store.wait()
        updates = self.rl.updates
        return [[batch, one.version, one.weights] for batch, one in sorted(self.given.items())
                if batch >= steps // updates and one.version * updates < steps]

    def offer(self, number: int, part: int, first: int, params: dict, key_of: Callable[[int], str]) -> None:
        """Write the orders of batch `number` and of the rl.lag batches after it, except those already written.

        The weights are saved if an order needs them. part: the update of the batch that comes next. params: the weights
        before that update. first: number of prompts drawn for earlier batches. key_of: returns the key of a batch, see
        `Kept`. Raises: FileSystemError.
        """
        begins, self._begun = not self._begun, True
        if begins and self.frozen:
            self._of_frozen = self._save_frozen(self.frozen.cast(params))
        params = self.cast(params)
        now = checksum(params, self._of_frozen)
        if part == 0:
            self.checksums[number] = now
        wanted = [batch for batch in range(number, min(number + self.rl.lag + 1, self.batches))
                  if batch not in self.given]
        order = lambda batch, version: self._order(batch, version, first + (batch - number) * self.rl.prompts)

        def chosen() -> dict:
            """Choose a version for each batch. "lost": whether older weights are missing. "there": whether the current
            weights are saved."""
            if begins:
                self._remove_weights_after(number)
            found, lost = {}, False
            for batch in wanted:
                version = self._versions.get(batch, max(batch - self.rl.lag, 0))
                there = version in self.checksums and (
                    version == number and part == 0 or self.place.checksum_of(version) == self.checksums[version]
                    or self._answered(order(batch, version)))
                if not there:       # the run resumed from before the saved versions, or rl.lag was raised
                    say.err(f"batch {batch} is sampled with the weights of version {number}: those of version "
                            f"{version} and their answers no longer exist")
                found[batch], lost = version if there else number, lost or not there
            return {"versions": list(found.items()), "lost": lost,
                    "there": self.place.checksum_of(number) == self.checksums.get(number, now)}

        chose = agree.on_first(chosen)
        if chose["lost"] and not chose["there"]:
            self.checksums[number] = now
        self.given |= {batch: order(batch, version) for batch, version in chose["versions"]}

        def gave() -> bool:
            """Write the orders. Return whether one of them needs the current weights."""
            for batch in wanted:
                if not self._answered(self.given[batch]):
                    self._give(self.given[batch])
                    self._take_over(self.given[batch], key_of(batch))
            self._drop_before(number)
            needed = any(self.given[batch].version == number and not self._answered(self.given[batch])
                         for batch in wanted)
            if needed and not chose["there"]:
                _remove(self.place.weights / str(number))
            return needed
        if agree.on_first(gave) and not chose["there"]:
            self.store.save(number, {"params": params}, self.document | {"weights": now})

    def _save_frozen(self, params: dict) -> str:
        """Save the untrained weights unless they are already saved, and wait until they are on disk. Return their
        digest. Raises: FileSystemError."""
        found, store = replicas.digest(params), self.frozen.store
        if not agree.on_first(lambda: self.place.checksum_of_frozen() == found):
            agree.on_first(lambda: _remove(self.place.frozen / str(FROZEN)))
            store.save(FROZEN, {"params": params}, self.document | {"weights": found})
            store.wait()
        return found

    def _order(self, batch: int, version: int, first: int) -> Order:
        """Return the order of a batch. first: number of prompts drawn for earlier batches."""
        ids = [one.ids.tolist() for one in self.prompts.draw(first, self.rl.prompts)]
        part = prompts_of_part(self.rl)
        room = self.prompts.longest_with_answer(self.rl.max_tokens)
        return Order(batch, version, self.checksums[version], self.draws, room, part, ids)

    def _answered(self, order: Order) -> bool:
        """Return whether the answers to all parts of an order are on disk."""
        return all(_answers(self.place.answers(order.batch, part), order) for part in order.parts)

    def _give(self, order: Order) -> None:
        try:
            replaced = self.place.read(order.batch) != order
        except OtherVersionError as error:
            replaced = True
            say.err(f"batch {order.batch} is requested again: {error}")
        for path in self.place.of_batch(order.batch):
            if replaced if path.suffix != ".npz" else not _answers(path, order):
                path.unlink(missing_ok=True)
        if replaced:
            files.replace(self.place.order(order.batch), order.text)

    def _take_over(self, order: Order, key: str) -> None:
        """Copy the answers that an earlier attempt saved in run.dir/rollouts, so that they are not sampled again."""
        kept = Kept(self.directory / contents.ROLLOUTS, order.batch, key)
        if (found := kept.found(order.weights)) is None:
            return
        every, samples = groups.unflat(*found), order.draws["samples"]
        for part in order.parts:
            rows = order.rows(part)
            files.replace(self.place.answers(order.batch, part), _content(
                order, part, every[rows.start * samples:rows.stop * samples], "the trainer", ""))

    def _remove_weights_after(self, number: int) -> None:
        for name in os.listdir(self.place.weights):
            if name.isdecimal() and int(name) > number:
                _remove(self.place.weights / name)

    def _drop_before(self, number: int) -> None:
        """Remove orders and answers of old batches that no resume needs. Batches that the queue of a checkpoint may
        name stay, since their weights may be gone."""
        updates, lag = self.rl.updates, self.rl.lag
        kept = set(range(number - lag - 1 - self.run.checkpoint.local_every // updates, number + lag + 1))
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory / contents.CHECKPOINTS):
                if found := re.match(r"\.?(\d+)", name):        # a leading dot: it is being written
                    step = int(found[1])
                    kept |= set(range(step // updates, -(-step // updates) + lag))
        for directory in (self.place.orders, self.place.drawn):
            for name in os.listdir(directory):
                if (batch := int(re.match(r"\d*", name)[0] or number)) not in kept and batch < number:
                    (directory / name).unlink(missing_ok=True)

    def answers(self, number: int) -> ArrivingAnswers:
        """Return the answers of batch `number`, to be read while they arrive from the samplers."""
        order = self.given[number]
        agree.on_first(lambda: self.place.has(order) or self._give(order))
        return ArrivingAnswers(self, order)

    def finish(self) -> None:
        """Tell samplers that no further batch is requested."""
        agree.on_first(lambda: files.replace(self.place.finished, ""))


@dataclasses.dataclass(eq=False)
class ArrivingAnswers:
    """The answers to an order, read part by part as samplers deliver them."""
    orders: Orders
    order: Order

    def __post_init__(self):
        self._told = self._seen = time.monotonic()      # times of the last message, and of the last live sampler

    def complete(self, prompts: Sequence[Sequence[int]], *_, each: Callable[[int, Completion], None],
                 **__) -> list[Completion]:
        """Return the answers, with the interface of `Generator.complete`; sampling settings come from the order.

        Raises: RolloutError if no sampler is alive for LOST_S; NoBatch if the run has to stop (answers on disk stay).
        """
        found, missing = {}, list(self.order.parts)
        while missing:
            there = agree.on_first(lambda: self._arrived(missing))
            if not there and self.orders.stopping():
                raise NoBatch
            for part in there:
                samples = self.order.draws["samples"]
                for i, one in enumerate(self._read(part), self.order.rows(part)[0] * samples):
                    found[i] = dataclasses.replace(one, prompt=list(prompts[i // samples]))
                    each(i, found[i])
                missing.remove(part)
            watch.progress()
        return [found[i] for i in sorted(found)]

    def _arrived(self, missing: Sequence[int]) -> list[int]:
        """In process 0: wait up to WAITS_S for answers and return the parts that have arrived. Every TOLD_EVERY_S a
        message says what is missing."""
        until, batch = time.monotonic() + WAITS_S, self.order.batch
        while time.monotonic() < until:
            if failure := self.orders.store.failure:
                raise files.FileSystemError(f"the weights for the samplers could not be saved: {failure}")
            if there := [part for part in missing if self.orders.place.answers(batch, part).exists()]:
                return there
            time.sleep(LOOK_S)
        if alone := not self.orders.heartbeats.any():
            if time.monotonic() - self._seen > LOST_S:
                raise RolloutError(f"no sampler was alive for {LOST_S:g} s: start {SAMPLE} {self.orders.directory}, "
                                   f"and start the run again")
        else:
            self._seen = time.monotonic()
        if time.monotonic() - self._told > TOLD_EVERY_S:
            self._told = time.monotonic()
            waits = f"waiting for {len(missing)} of {len(self.order.parts)} parts of the answers of batch {batch}"
            if alone:
                say.err(f"{waits}, and no sampler is alive: start {SAMPLE} {self.orders.directory}")
            else:
                say.out(waits)
        return []

    def _read(self, part: int) -> list[Completion]:
        path = self.orders.place.answers(self.order.batch, part)

        def read():
            if (found := groups.unpacked(path)) is None:
                raise FileNotFoundError(2, "the file of answers is missing or incomplete", os.fspath(path))
            return found
        told, arrays = files.patiently(read, missing=True)
        if told["order"] != self.order.id:
            raise RolloutError(
                f"{path} answers another request and is not used for training. It was sampled with version "
                f"{told['version']} ({told['weights']}) of the weights by {told['by']} "
                f"({told.get('made_by', 'an earlier version')}). Batch {self.order.batch} must be sampled with version "
                f"{self.order.version} ({self.order.weights}) by {self.order.made_by}. Run the same command again; it "
                f"removes the file")
        return groups.unflat(told, arrays)


def _remove(path: Path) -> None:
    """Remove a checkpoint, if it exists."""
    if path.exists():
        files.remove(path.rename(path.with_name(f".{path.name}.deleting-{secrets.token_hex(4)}")))


def _content(order: Order, part: int, found: Sequence[Completion], by: str, on: str) -> bytes:
    """Return the content of a file of answers. by: name of the sampler. on: see `WorkQueue.deliver`."""
    told, arrays = groups.flat(found)
    return groups.packed(told | {"order": order.id, "version": order.version, "weights": order.weights, "by": by,
                                 "made_by": versions(), "on": on}, arrays)


def _answers(path: Path, order: Order) -> bool:
    found = groups.unpacked(path)
    return found is not None and found[0]["order"] == order.id


# ---- a sampler -------------------------------------------------------------------------------------------------------


class WorkQueue:
    """The sampler's side of the exchange: claims parts that no other live sampler has claimed, and delivers answers."""

    def __init__(self, run_dir: Path):
        self.place = SamplerFiles(run_dir)
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.heartbeats, self._claimed, self._began = Heartbeats(self.place), None, 0.0
        self._orders: dict[int, tuple[int, Order]] = {}
        self._parts_s: collections.deque[float] = collections.deque(maxlen=64)
        self._work, self.slow = 0, False        # slow: while True, FIRST_S without progress are allowed
        self._since, self._looked, self._left = time.monotonic(), False, {}     # left: skipped orders of other versions
        self._beat: files.Beat | None = None

    def begin(self) -> None:
        """Start the heartbeat, which runs until `leave`."""
        self._write()
        self._beat = files.Beat(self._write, min(RENEWED_S, LAPSED_S / 4))

    def leave(self) -> None:
        if self._beat:
            self._beat.close()
        with contextlib.suppress(OSError):
            (self.place.heartbeats / self.name).unlink(missing_ok=True)
            self.release()

    def progress(self) -> None:
        """Record progress of the main thread. A sampler without progress for `most_s` counts as hanging and is ended.
        """
        self._work += 1
        watch.progress()

    @property
    def most_s(self) -> float:
        """The longest time without progress, in seconds, before this sampler counts as hanging."""
        if self.slow or self._claimed and not self._parts_s:
            return FIRST_S
        median_s = sorted(self._parts_s)[len(self._parts_s) // 2] if self._parts_s else 0.0
        return max(LAPSED_S, LONGER_THAN_MEDIAN * median_s)

    def _write(self) -> None:
        (self.place.heartbeats / self.name).write_text(f"{time.time():.3f} {self._work} {self.most_s:.0f}",
                                                       encoding="utf-8")

    def next(self) -> tuple[Order, int] | None:
        """Claim the first part that is neither answered nor claimed and whose weights are saved. Return (order, part);
        None if there is no such part. Raises: OtherVersionError."""
        self.progress()
        batches = sorted(int(name[:-5]) for name in os.listdir(self.place.orders) if re.fullmatch(r"\d+\.json", name))
        self._orders = {batch: one for batch, one in self._orders.items() if batch in batches}
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
                            or time.monotonic() - self._since > LOST_S):
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
            if self.heartbeats.alive(files.patiently(lambda: path.read_text(encoding="utf-8"), missing=True)):
                return False
            # If several samplers take over a claim, the last one has it. The others generate equal answers.
            files.replace(path, self.name, shared=True)
            if path.read_text(encoding="utf-8") != self.name:
                return False
        self._claimed, self._began = path, time.monotonic()
        return True

    def release(self) -> None:
        """Give up the claimed part, so that other samplers can claim it."""
        path, self._claimed, self.slow = self._claimed, None, False
        if path is not None:
            path.unlink(missing_ok=True)

    def wanted(self, order: Order) -> bool:
        """Return whether the order is still on disk unchanged."""
        return self.place.has(order)

    def deliver(self, order: Order, part: int, found: Sequence[Completion], on: str) -> None:
        """Write the answers to a part and release its claim. on: the sampler's mesh and devices, as text.

        If another sampler has delivered the part, its answers stay and are compared. Raises: RolloutError if they
        differ although `on` is the same.
        """
        self._parts_s.append(time.monotonic() - self._began)
        path, content = self.place.answers(order.batch, part), _content(order, part, found, self.name, on)
        before = groups.unpacked(path)
        if before and before[0]["order"] == order.id:
            _compare(path, before, groups.unpacked(io.BytesIO(content)))
        elif self.wanted(order):
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
