"""Samples answers for an RL run in a process separate from its trainer (rl.lag): python -m meshtrain.sample RUN_DIR.

Reads orders in RUN_DIR/samplers and writes answers there until the run has all its steps. Start any number of samplers,
before or after the trainer. If one ends, start it again; meanwhile the others sample its part, with the same tokens.
--mesh.data, --mesh.fsdp, --mesh.tensor N: the sampler's own mesh, in one process; default: all devices on tensor. Exit
codes: 0 the run is finished · 1 any other failure · 2 a mistake in the settings · 75 stopped on request.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from meshtrain import assembly, config, files, run_files, trained
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.cluster import watch
from meshtrain.files import FileSystemError
from meshtrain.rl import exchange, separate, work_queue
from meshtrain.rl.groups import RolloutError
from meshtrain.run import command, say, stops

BUSY_S = 5.0        # a sampler looks for orders at short intervals for this long after its last part
COMMAND = config.Command("meshtrain.sample", {}, "RUN_DIR", (1, 1))


@command.entry(COMMAND, __doc__, (assembly.BrokenProgramError, RolloutError))
def main(given: config.Arguments) -> int:
    directory = Path(given.names[0])
    run_files.resolve({}, given.keys, trained.KEYS, separate.COMMAND)      # reports mistakes before the run has begun
    with watch.on(watch.PhaseLimits(), 0, 1, say.err), watch.phase("waiting for orders", watch.UNLIMITED):
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
            return _answer_orders(queue, separate.OrderSampler(run_dir, words, queue), waiting)
    except OSError as error:
        if isinstance(error, FileSystemError):
            raise
        raise FileSystemError(f"{place.directory} cannot be used: {files.describe(error)}; check the file system and "
                              f"start again") from error
    finally:
        queue.leave()


def _answer_orders(queue: work_queue.WorkQueue, sampler: separate.OrderSampler, waiting: _Waiting) -> int:
    place = queue.place
    done, old, since = 0, place.finished.exists(), time.monotonic()
    while True:
        if place.finished.exists():
            if not old or time.monotonic() - since > exchange.LOST_S:
                say.out(f"{sampler.run_dir} is finished: {done} parts of its answers were sampled here")
                return stops.DONE
        else:
            old = False
        if (taken := queue.next()) is None:
            waiting.pause()
            continue
        order, part = taken
        with watch.phase(f"part {part} of batch {order.batch}", "part", queue.most_s):
            try:
                answers, on = sampler.answers(order, part)
            except CheckpointError:     # the weights were removed, because all their orders are answered
                if place.has(order) and place.checksum_of(order.version) == order.weights:
                    raise
                queue.release()
                continue
            queue.deliver(order, part, answers, on)
        done, waiting.since = done + 1, time.monotonic()
        say.out(f"batch {order.batch}, part {part + 1} of {len(order.parts)}: {len(answers)} answers with version "
                f"{order.version} of the weights, {sum(len(answer.tokens) for answer in answers)} tokens")


class _Waiting:
    """Prints a line now and then while there is nothing to do. since: when there was work last (time.monotonic)."""

    def __init__(self, words: str):
        self.words, self.since = words, time.monotonic()

    def pause(self) -> None:
        if time.monotonic() - self.since > exchange.TOLD_EVERY_S:
            self.since = time.monotonic()
            say.out(self.words)
        time.sleep(exchange.LOOK_S if time.monotonic() - self.since < BUSY_S else 5 * exchange.LOOK_S)
