"""Samples answers for an RL run in a process separate from its trainer (rl.lag): python -m meshtrain.sample RUN_DIR.

Reads orders in RUN_DIR/samplers and writes answers there until the run has all its steps. Start any number of samplers,
before or after the trainer. If one ends, start it again; meanwhile the others sample its part, with the same tokens.
--mesh.data, --mesh.fsdp, --mesh.tensor N: the sampler's own mesh, in one process; default: all devices on tensor. Exit
codes: 0 the run is finished · 1 any other failure · 2 a mistake in the settings · 75 stopped on request.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from meshtrain.run import command, say, stops

if __name__ == "__main__":      # before jax is imported, to silence messages of its C++
    command.begin()

import jax

from meshtrain import assembly, config, devices, files, trained
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.saved import Saved
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.cluster import watch
from meshtrain.files import FileSystemError
from meshtrain.inference.generate import Completion, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.model import params
from meshtrain.rl import exchange, samplers, work_queue
from meshtrain.rl.groups import RolloutError
from meshtrain.run import replicas

BUSY_S = 5.0        # a sampler looks for orders at short intervals for this long after its last part
COMMAND = config.Command("meshtrain.sample", {}, "RUN_DIR", (1, 1))


@command.entry(COMMAND, __doc__, (assembly.BrokenProgramError, RolloutError))
def main(given: config.Arguments) -> int:
    directory = Path(given.names[0])
    config.resolve({}, given.keys, trained.KEYS, "sample")      # reports mistakes before the run has begun
    with watch.on(watch.PhaseLimits(), 0, 1, say.err):
        with watch.phase("waiting for orders", watch.UNLIMITED):
            return serve(directory, given.keys)


def serve(run_dir: Path, words: Sequence[str]) -> int:
    """Sample answers until the run is finished. Return the exit code. words: keys of the command line."""
    place, waiting = exchange.SamplerFiles(run_dir), _Waiting(f"waiting for orders in {run_dir}")
    while not place.orders.is_dir():
        waiting.pause()
    queue = work_queue.WorkQueue(run_dir)
    stops.end_together(queue.leave)
    queue.begin()
    try:
        # a long limit: while the sampler has no part, no other process waits for it
        with watch.phase("waiting for orders", "part", work_queue.FIRST_S):
            return _draw(queue, _Drawing(run_dir, words, queue), waiting)
    except OSError as error:
        if isinstance(error, FileSystemError):
            raise
        raise FileSystemError(f"{place.directory} cannot be used: {files.describe(error)}; check the file system and "
                              f"start again") from error
    finally:
        queue.leave()


def _draw(queue: work_queue.WorkQueue, drawing: _Drawing, waiting: _Waiting) -> int:
    place = queue.place
    done, old, since = 0, place.finished.exists(), time.monotonic()
    while True:
        if place.finished.exists():
            if not old or time.monotonic() - since > exchange.LOST_S:
                say.out(f"{drawing.run_dir} is finished: {done} parts of its answers were sampled here")
                return stops.DONE
        else:
            old = False
        if (taken := queue.next()) is None:
            waiting.pause()
            continue
        order, part = taken
        with watch.phase(f"part {part} of batch {order.batch}", "part", queue.most_s):
            try:
                found = drawing.answers(order, part)
            except CheckpointError:     # the weights were removed, because all their orders are answered
                if queue.wanted(order) and place.checksum_of(order.version) == order.weights:
                    raise
                found = None
            if found is None:
                queue.release()
                continue
            queue.deliver(order, part, found, drawing.sampler.on)
        done, waiting.since = done + 1, time.monotonic()
        say.out(f"batch {order.batch}, part {part + 1} of {len(order.parts)}: {len(found)} answers with version "
                f"{order.version} of the weights, {sum(len(one.tokens) for one in found)} tokens")


class _Waiting:
    """Prints a line now and then while there is nothing to do. since: when there was work last (time.monotonic)."""

    def __init__(self, words: str):
        self.words, self.since = words, time.monotonic()

    def pause(self) -> None:
        if time.monotonic() - self.since > exchange.TOLD_EVERY_S:
            self.since = time.monotonic()
            say.out(self.words)
        time.sleep(exchange.LOOK_S if time.monotonic() - self.since < BUSY_S else 5 * exchange.LOOK_S)


class _Drawing:
    """Samples answers with the weights of the last order, and loads other weights when an order needs them."""

    def __init__(self, run_dir: Path, words: Sequence[str], queue: work_queue.WorkQueue):
        self.run_dir, self.words, self.queue = run_dir, words, queue
        self.sampler: samplers.SeparateSampler | None = None
        self.store: Checkpoints | None = None
        self._weights, self._generator = "", None
        self._frozen, self._of_frozen = {}, ""      # untrained weights, and their digest

    def answers(self, order: exchange.Order, part: int) -> list[Completion] | None:
        """Sample the answers to a part of an order; None if it is no longer wanted. Raises: CheckpointError if the
        weights cannot be read; RolloutError if their checksum is not that of the order."""
        if self.store is None:
            devices.start(config.resolve({}, self.words, trained.KEYS, "sample")[0])
            self.store = Checkpoints(DirectoryStore(exchange.SamplerFiles(self.run_dir).weights), read_only=True)
        saved = self.store.open(order.version)
        if self.sampler is None:
            self.sampler = samplers.make_separate(saved, self.words, "sample")
            held = sum(info.size for info in self.sampler.model.parameters())
            say.out(f"sampling answers on {self.sampler.on}: {held:,} parameters")
        with jax.set_mesh(self.sampler.mesh):
            slots = order.part * order.draws["samples"]
            if self._weights != order.weights:
                self._weights, self._generator = "", None       # free the memory for the new weights
                self.queue.slow = True
                with watch.phase(f"reading version {order.version}", "part", self.queue.most_s):
                    weights, found = self._restored(saved)
                self.queue.slow = False
                if found != order.weights:
                    raise RolloutError(f"{self.store.named(order.version)} has other weights ({found}) than "
                                       f"batch {order.batch} needs ({order.weights}): nothing is sampled")
                self._generator = self.sampler.generator(weights, slots, order.room)
                self._weights = order.weights
            return self._drawn(order, part)

    def _restored(self, saved: Saved) -> tuple[dict, str]:
        """Return (all weights, their checksum) of a version. Raises: CheckpointError."""
        trained, place = self.sampler.restore(saved), exchange.SamplerFiles(self.run_dir)
        if not self.sampler.model.lora:
            return trained, exchange.checksum(trained, "")
        if not self._of_frozen or self._of_frozen != place.checksum_of_frozen():
            self._frozen = {}       # free the memory for the new weights
            kept = Checkpoints(DirectoryStore(place.frozen), read_only=True).open(exchange.FROZEN)
            self._frozen = self.sampler.restore(kept, frozen=True)
            self._of_frozen = replicas.digest(self._frozen)
        return params.joined(trained, self._frozen), exchange.checksum(trained, self._of_frozen)

    def _drawn(self, order: exchange.Order, part: int) -> list[Completion]:
        draws, rows = order.draws, order.rows(part)
        ended = self.sampler.words(draws["stop"], draws["stop_ids"]).at_string if draws["stop"] else None
        limits = GenerationLimits(draws["max_tokens"], tuple(draws["stop_ids"]), ended=ended)
        return self._generator.complete(
            [order.prompts[row] for row in rows], limits, Picking(draws["temperature"]), draws["seed"],
            samples=[draws["samples"]] * len(rows), counters=[(order.batch, row) for row in rows],
            each=lambda *_: self.queue.progress())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
