"""The trainer's side of the exchange with separate samplers: writes orders and weights, and reads answers."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshtrain import files
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.cluster import agree, watch
from meshtrain.config import Run
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Completion, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.rl import exchange, groups
from meshtrain.rl.exchange import (
    FROZEN, Heartbeats, Order, OtherVersionError, SamplerFiles, checksum, has_answers, pack_answers, prompts_of_part,
)
from meshtrain.rl.groups import Completer, Kept, KeptBatches, RolloutError
from meshtrain.rl.prompts import Prompts
from meshtrain.rl.samplers import LocalSampler, Pause, SamplingWeights
from meshtrain.run import contents, replicas, say
from meshtrain.run.loop import NoBatch

WAITS_S = 1.0           # wait for answers between two checks for a stop request
SAMPLE = "python -m meshtrain.sample"


@dataclasses.dataclass(frozen=True, eq=False)
class SentWeights:
    """A part of the weights (trained or untrained) that the trainer saves for samplers.

    store: saves it. cast: function from all weights of the trainer to this part, in the layout and dtype that samplers
    read. document: metadata of the checkpoints.
    """
    store: Checkpoints
    cast: Callable[[dict], dict]
    document: dict

    def save(self, step: int, params: dict, digest: str) -> None:
        """Begin to save the result of `cast`. digest: checksum, which samplers compare. Raises: FileSystemError."""
        self.store.save(step, {"params": params}, self.document | {"weights": digest})


class Orders:
    """The trainer's side of the exchange: writes orders and reads answers (samplers.Sampler). All processes call its
    methods together, and process 0 writes.

    words: the tokens and strings that end an answer. kept: the files of the run's batches. local: the sampler on the
    run's mesh for answers that belong to no batch. sent: the trained weights. frozen: the untrained weights, if there
    are any. queue: that of `position` in the checkpoint that the run resumes from.
    """
    saves = True

    def __init__(self, run: Run, prompts: Prompts, words: Words, kept: KeptBatches, local: LocalSampler,
                 sent: SentWeights, frozen: SentWeights | None = None, queue: Sequence[Sequence] = ()):
        self.run, self.rl, self.prompts, self.kept, self.local = run, run.rl, prompts, kept, local
        self.sent, self.frozen, self.directory = sent, frozen, Path(run.run.dir)
        self.place, self.batches = SamplerFiles(self.directory), -(-run.training.steps // run.rl.updates)
        self.draws = {"seed": run.run.seed, "temperature": self.rl.temperature, "max_tokens": self.rl.max_tokens,
                      "samples": self.rl.samples, "stop": list(words.stops), "stop_ids": list(words.stop_ids)}
        self.checksums = {version: weights for _, version, weights in queue}
        self.given: dict[int, Order] = {}       # by batch
        self._versions = {batch: version for batch, version, _ in queue}
        self._has_begun, self._of_frozen = False, ""
        agree.on_first(self._make_folders)
        self.heartbeats = Heartbeats(self.place)

    def _make_folders(self) -> None:
        for place in (self.place.drawn, self.place.heartbeats, self.place.orders):      # samplers wait for `orders`
            place.mkdir(parents=True, exist_ok=True)
        self.place.finished.unlink(missing_ok=True)

    def generator(self, params: dict) -> Completer:
        return self.local.generator(params)

    def position(self, steps: int) -> dict:
        """Return {"queue": [[batch, version, checksum of the weights], …]} for requested batches that are trained on
        after `steps` and sampled with earlier weights. Waits until these are on disk. Raises: FileSystemError."""
        self.sent.store.wait()
        updates = self.rl.updates
        return {"queue": [[batch, order.version, order.weights] for batch, order in sorted(self.given.items())
                          if batch >= steps // updates and order.version * updates < steps]}

    def request(self, number: int, part: int, first: int, params: dict, pause: Pause) -> SamplingWeights:
        with pause.time("sync", "sync_s"):
            self._offer(number, part, first, params)
        return SamplingWeights(self.given[number].weights, self.given[number].version)

    def _offer(self, number: int, part: int, first: int, params: dict) -> None:
        """Write the orders of batch `number` and of the rl.lag batches after it, except those already written. The
        weights are saved if an order needs them. Parameters: as of `request`. Raises: FileSystemError."""
        begins, self._has_begun = not self._has_begun, True
        if begins and self.frozen:
            self._of_frozen = self._save_frozen(self.frozen, self.frozen.cast(params))
        params = self.sent.cast(params)
        digest = checksum(params, self._of_frozen)
        if part == 0:
            self.checksums[number] = digest
        wanted = [batch for batch in range(number, min(number + self.rl.lag + 1, self.batches))
                  if batch not in self.given]
        chosen = agree.on_first(lambda: self._choose_versions(wanted, number, part, first, begins))
        is_saved = chosen["saved"] == self.checksums.get(number, digest)
        if chosen["lost"] and not is_saved:
            self.checksums[number] = digest
        self.given |= {batch: self._order(batch, version, first + (batch - number) * self.rl.prompts)
                       for batch, version in chosen["versions"]}
        if agree.on_first(lambda: self._write_orders(wanted, number, is_saved)) and not is_saved:
            self.sent.save(number, params, digest)

    def _choose_versions(self, wanted: Sequence[int], number: int, part: int, first: int, begins: bool) -> dict:
        """In process 0: choose the version of the weights for each batch of `wanted`.

        number, part, first: see `_offer`. begins: whether this is the first call after a start. Return JSON. versions:
        [batch, version]. lost: whether weights of an older version no longer exist. saved: the checksum of the saved
        weights of version `number`, or None.
        """
        for name in os.listdir(self.place.weights) if begins else ():
            if name.isdecimal() and int(name) > number:
                _remove(self.place.weights / name)
        versions, lost = [], False
        for batch in wanted:
            version = self._versions.get(batch, max(batch - self.rl.lag, 0))
            exists = version in self.checksums and (
                version == number and part == 0 or self.place.checksum_of(version) == self.checksums[version]
                or self._is_answered(self._order(batch, version, first + (batch - number) * self.rl.prompts)))
            if not exists:      # the run resumed from before the saved versions, or rl.lag was raised
                say.err(f"batch {batch} is sampled with the weights of version {number}: the weights of "
                        f"version {version} and the answers sampled with them no longer exist")
            versions.append([batch, version if exists else number])
            lost = lost or not exists
        return {"versions": versions, "lost": lost, "saved": self.place.checksum_of(number)}

    def _write_orders(self, wanted: Sequence[int], number: int, is_saved: bool) -> bool:
        """In process 0: write the orders of `wanted` that have no answers. Return whether one of them needs the weights
        of version `number`. is_saved: whether these weights are on disk; if not, remove others of this version."""
        for batch in wanted:
            if not self._is_answered(self.given[batch]):
                self._write_order(self.given[batch])
                self._copy_kept_answers(self.given[batch])
        self._drop_before(number)
        needed = any(self.given[batch].version == number and not self._is_answered(self.given[batch])
                     for batch in wanted)
        if needed and not is_saved:
            _remove(self.place.weights / str(number))
        return needed

    def _save_frozen(self, frozen: SentWeights, params: dict) -> str:
        """Save the untrained weights unless they are already saved, and wait until they are on disk. Return their
        digest. Raises: FileSystemError."""
        digest = replicas.digest(params)
        if not agree.on_first(lambda: self.place.checksum_of_frozen() == digest):
            agree.on_first(lambda: _remove(self.place.frozen / str(FROZEN)))
            frozen.save(FROZEN, params, digest)
            frozen.store.wait()
        return digest

    def _order(self, batch: int, version: int, first: int) -> Order:
        """Return the order of a batch. first: number of prompts drawn for earlier batches."""
        ids = [prompt.ids.tolist() for prompt in self.prompts.draw(first, self.rl.prompts)]
        part = prompts_of_part(self.rl)
        room = self.prompts.longest_with_answer(self.rl.max_tokens)
        return Order(batch, version, self.checksums[version], self.draws, room, part, ids)

    def _is_answered(self, order: Order) -> bool:
        return all(has_answers(self.place.answers(order.batch, part), order) for part in order.parts)

    def _write_order(self, order: Order) -> None:
        """Write the order where samplers look. Remove claims and answers of an earlier order of this batch."""
        try:
            is_new = self.place.read(order.batch) != order
        except OtherVersionError as error:
            is_new = True
            say.err(f"batch {order.batch} is requested again: {error}")
        for path in self.place.of_batch(order.batch):
            is_stale = not has_answers(path, order) if path.suffix == ".npz" else is_new
            if is_stale:
                path.unlink(missing_ok=True)
        if is_new:
            files.replace(self.place.order(order.batch), order.text)

    def _copy_kept_answers(self, order: Order) -> None:
        """Copy the answers that an earlier attempt saved in run.dir/rollouts, so that they are not sampled again."""
        if (content := self.kept.of(order.batch).find(order.weights)) is None:
            return
        every, samples = groups.unflat(*content), order.draws["samples"]
        for part in order.parts:
            rows = order.rows(part)
            files.replace(self.place.answers(order.batch, part), pack_answers(
                order, part, every[rows.start * samples:rows.stop * samples], "the trainer", ""))

    def _drop_before(self, number: int) -> None:
        """Remove orders and answers of old batches that no resume needs. Batches that the queue of a checkpoint may
        name stay, since their weights may be gone."""
        updates, lag = self.rl.updates, self.rl.lag
        kept = set(range(number - lag - 1 - self.run.checkpoint.local_every // updates, number + lag + 1))
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory / contents.CHECKPOINTS):
                if saved := re.match(r"\.?(\d+)", name):        # a leading dot: it is being written
                    step = int(saved[1])
                    kept |= set(range(step // updates, -(-step // updates) + lag))
        for directory in (self.place.orders, self.place.drawn):
            for name in os.listdir(directory):
                begin = re.match(r"\d+", name)
                if begin and (batch := int(begin[0])) not in kept and batch < number:
                    (directory / name).unlink(missing_ok=True)

    def open(self, kept: Kept, weights: SamplingWeights, params: dict, pause: Pause) -> ArrivingAnswers:
        """Return the answers of a requested batch, to be read while they arrive from the samplers."""
        order = self.given[kept.number]
        if not agree.on_first(lambda: self.place.has(order)):
            agree.on_first(lambda: self._write_order(order))
        return ArrivingAnswers(self, order, pause.stopping)


@dataclasses.dataclass(eq=False)
class ArrivingAnswers:
    """The answers to an order, read part by part as samplers deliver them. stopping: see `Pause`."""
    orders: Orders
    order: Order
    stopping: Callable[[], bool] = lambda: False

    def __post_init__(self):
        self._told = self._seen = time.monotonic()      # times of the last message, and of the last live sampler

    def complete(self, prompts: Sequence[Sequence[int]], limits: GenerationLimits, how: Picking, seed: int, *,
                 samples: Sequence[int], counters: Sequence[tuple[int, int]],
                 each: Callable[[int, Completion], None]) -> list[Completion]:
        """Return the answers (groups.Completer). The order, not the parameters, has the sampling settings.

        Raises: RolloutError if no sampler is alive for LOST_S; NoBatch if the run has to stop (answers on disk stay).
        """
        answers, missing = {}, list(self.order.parts)
        while missing:
            there = agree.on_first(lambda: self._wait_for_parts(missing))
            if not there and self.stopping():
                raise NoBatch
            for part in there:
                count = self.order.draws["samples"]
                for i, answer in enumerate(self._read(part), self.order.rows(part)[0] * count):
                    answers[i] = dataclasses.replace(answer, prompt=list(prompts[i // count]))
                    each(i, answers[i])
                missing.remove(part)
            watch.progress()
        return [answers[i] for i in sorted(answers)]

    def _wait_for_parts(self, missing: Sequence[int]) -> list[int]:
        """In process 0: wait up to WAITS_S for answers and return the parts that have arrived. Every TOLD_EVERY_S a
        message says what is missing."""
        until, batch = time.monotonic() + WAITS_S, self.order.batch
        while time.monotonic() < until:
            if failure := self.orders.sent.store.failure:
                raise files.FileSystemError(f"the weights for the samplers could not be saved: {failure}")
            if there := [part for part in missing if self.orders.place.answers(batch, part).exists()]:
                return there
            time.sleep(exchange.LOOK_S)
        if alone := not self.orders.heartbeats.any():
            if time.monotonic() - self._seen > exchange.LOST_S:
                raise RolloutError(f"no sampler was alive for {exchange.LOST_S:g} s: start {SAMPLE} "
                                   f"{self.orders.directory}, and start the run again")
        else:
            self._seen = time.monotonic()
        if time.monotonic() - self._told > exchange.TOLD_EVERY_S:
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
            if (content := groups.unpack_arrays(path)) is None:
                raise FileNotFoundError(2, "the file of answers is missing or incomplete", os.fspath(path))
            return content
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
    if path.exists():
        files.remove(path.rename(path.with_name(f".{path.name}.deleting-{secrets.token_hex(4)}")))
