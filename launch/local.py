"""Runs N processes on this machine: meshtrain launch local --processes 2 -- configs/quickstart.toml.

They connect over loopback and divide the simulated devices, or the GPUs, among them. Signals to the launcher are
forwarded to every process. Without RUN.toml the run file is configs/quickstart.toml. With rl.lag, --samplers N generate
answers in separate processes, on GPUs of their own. Linux only.

Exit codes: the run's 0, 2 or 75 if all processes agree on it; also 2 if a mistake that one process reports made the
others fail; else 1.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Mapping, Sequence

from meshtrain.launch import elastic, restart, samplers, supervise
from meshtrain import config
from meshtrain.cluster import gpus
from meshtrain.config import ConfigError, Run
from meshtrain.run import command, contents, say
from meshtrain.storage import mirror

COMMAND = config.Command("meshtrain.launch.local", {**elastic.OPTIONS, **restart.OPTIONS, **samplers.OPTIONS},
                         launcher=True)


@command.entry(COMMAND, __doc__)
def main(given: config.Arguments) -> int:
    if given["min-processes"] not in (0, given["processes"]) and given["max-restarts"] < 2:
        raise ConfigError("--min-processes needs --max-restarts of at least 2: a process is left out after it has "
                          "failed twice")
    run, rest, count = elastic.run_of(given), given.run, given["processes"]
    drawing, each = samplers.read_options(run, given)
    environ, theirs = samplers.divide_gpus(run, drawing, each, os.environ)
    environs, simulated = environments(run, count, environ), run.mesh.simulated_devices
    slots = Slots(rest, count, given["min-processes"], simulated or len(gpus.visible(environ)), bool(simulated),
                  run.mesh.full_devices)
    failures = restart.Failures(run, given["max-restarts"], restart.newest(run))
    with contextlib.ExitStack() as stack:
        if drawing:
            beside = supervise.begin([sys.executable, *samplers.words(drawing, each, rest)], theirs)
            stack.callback(samplers.end, [beside], 2 * samplers.ENDS_S)
        return _keep_running(run, rest, slots, environs, failures)


def _keep_running(run: Run, rest: Sequence[str], slots: Slots, environs: Sequence[Mapping[str, str]],
                  failures: restart.Failures) -> int:
    """Start the processes, and start them again after a failure. Return the exit code."""
    for start in itertools.count():     # each start takes a new port: an old process may still hold the last one
        words = commands([*rest, *slots.overrides()], len(slots.taken), supervise.free_port())
        outcome = supervise.supervise(words, [environs[slot] | {"MESHTRAIN_START": str(start)} for slot in slots.taken],
                                      left=mirror.directory(run.run.dir) / contents.STACKS,
                                      still_s=run.distributed.heartbeat_timeout_s)
        wait_s = None if outcome.asked else failures.wait_s(outcome.code, outcome.words)
        if wait_s is None:
            return outcome.code
        slots.after(outcome.culprit, first=len(failures.said) == 1)
        restart.wait(wait_s)


@dataclasses.dataclass
class Slots:
    """The slots of processes, 0 to count − 1, and which of them take part in the next start.

    A slot is left out if its process was the first to fail twice in a row, without a newer checkpoint in between. The
    run then continues with as many slots as can train it, at least `least`. After a newer checkpoint the next start has
    all slots again. devices: number of devices of all slots. full: number of devices that the run is meant for; 0: the
    same as `devices`.
    """
    words: Sequence[str]
    count: int
    least: int
    devices: int
    simulated: bool
    full: int = 0
    lost: set[int] = dataclasses.field(default_factory=set)
    last: int | None = None     # slot of the process that failed first last time

    def __post_init__(self):
        self.least, self.full = self.least or self.count, self.full or self.devices
        self.taken = list(range(self.count))

    def overrides(self) -> list[str]:
        return elastic.overrides(len(self.taken), self.devices // self.count, self.full, self.simulated)

    def after(self, culprit: int | None, first: bool) -> None:
        """Update the slots after a failure. culprit: index among that start's processes. first: whether a checkpoint
        was saved since the previous failure."""
        slot = None if culprit is None else self.taken[culprit]
        if first and self.lost:
            self.lost.clear()
            self.taken = list(range(self.count))
            say.err(f"the next start has all {self.count} processes again")
        elif not first and slot is not None and slot == self.last and self.least < self.count:
            self._leave_out(slot)
        self.last = slot

    def _leave_out(self, slot: int) -> None:
        there = [other for other in range(self.count) if other not in self.lost | {slot}]
        count, why = elastic.most(self.words, len(there), self.least, self.devices // self.count, self.full)
        if not count:
            say.err(f"process {slot} of {self.count} failed twice in a row, and the run cannot go on without it: {why}")
            return
        self.lost.add(slot)
        self.taken = there[:count]
        say.err(f"process {slot} of {self.count} failed twice in a row: the next start runs without it, with "
                f"{len(self.taken)} processes")


def commands(rest: Sequence[str], count: int, port: int) -> list[list[str]]:
    """Return the command line of every process. A single process is a plain run."""
    train = [sys.executable, "-m", "meshtrain.train", *rest]
    if count == 1:
        return [train]
    return [[*train, f"--distributed.coordinator_address=127.0.0.1:{port}", f"--distributed.num_processes={count}",
             f"--distributed.process_id={index}"] for index in range(count)]


def environments(run: Run, count: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of every process, with its GPUs if there are any.

    Raises: ConfigError if the run's devices cannot be divided among `count` processes.
    """
    total = run.mesh.simulated_devices
    # Unbuffered, so that the last output of a killed process is not lost.
    common = {**environ, "PYTHONUNBUFFERED": "1"}
    if total % count:
        fewer = max(n for n in range(1, count) if total % n == 0)
        more = [n for n in range(count + 1, total + 1) if total % n == 0][:1]
        raise ConfigError(f"mesh.simulated_devices={total} cannot be divided among --processes {count}; use "
                          f"{' or '.join(f'--processes {n}' for n in [fewer, *more])}, or a multiple of {count} "
                          f"devices")
    if total:
        return [common | {"CUDA_VISIBLE_DEVICES": ""}] * count
    if count == 1:
        return [common]
    return [common | {"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in gpus.divide(gpus.visible(environ), count)]


if __name__ == "__main__":
    say.begin()
    restart.leave_on_request()
    sys.exit(main(sys.argv[1:]))
