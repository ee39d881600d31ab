"""python -m launch.local --processes N -- [RUN.toml] [--section.key value …]: N real processes on this machine.

They meet over loopback and train one run: simulated devices, or the GPUs, are divided among them. Signals that reach the launcher
reach every process. With --max-restarts a run that fails is started again (`launch.restart`). Linux only.
Exit codes: the run's 0, 2 or 75 where all processes agree on it, else 1.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import elastic, restart, supervise
from meshtrain import config
from meshtrain.cluster import gpus
from meshtrain.config import ConfigError, Run
from meshtrain.run import say, stops

USAGE = "python -m launch.local --processes N [--max-restarts R] [--min-processes K] -- [RUN.toml] [--section.key value ...]"


def main(argv: Sequence[str]) -> int:
    own, rest = split(argv)
    options = parse(own)
    try:
        run = config.load(rest, USAGE)
        environs = environments(run, options.processes, os.environ)
        places = Places(rest, options.processes, options.min_processes, devices_of(run, os.environ), bool(run.mesh.simulated_devices))
        if places.least < places.count:
            check_elastic(run)
    except ConfigError as error:
        say.err(f"error: {error}")
        return stops.USER_ERROR
    failures = restart.Failures(run, options.max_restarts)
    while True:     # each start at another port: an old process may still hold the last one
        words = commands([*rest, *places.overrides()], len(places.taken), free_port())
        outcome = supervise.supervise(words, [environs[place] for place in places.taken], left=Path(run.run.dir) / "stacks")
        wait_s = None if outcome.asked else failures.wait_s(outcome.code, outcome.words)
        if wait_s is None:
            return outcome.code
        places.after(outcome.culprit, first=len(failures.said) == 1)
        time.sleep(wait_s)


@dataclasses.dataclass
class Places:
    """Where processes run, from 0 to count − 1, and which of them take part in the next start.

    A place whose process failed first twice in a row, without a newer checkpoint between, is left out, and the run goes on with as
    many as can train it, at least `least`. The start after a newer checkpoint has all of them again. devices: of all places.
    """
    words: Sequence[str]
    count: int
    least: int
    devices: int
    simulated: bool
    taken: list[int] = dataclasses.field(default_factory=list)
    lost: set[int] = dataclasses.field(default_factory=set)
    last: int | None = None     # whose process failed first before

    def __post_init__(self):
        self.least = self.least or self.count
        self.taken = list(range(self.count))

    def overrides(self) -> list[str]:
        return elastic.overrides(len(self.taken), self.devices // self.count, self.devices, self.simulated)

    def after(self, culprit: int | None, first: bool) -> None:
        """After a failure. culprit: index among the processes of that start. first: there is a newer checkpoint than at the last."""
        place = None if culprit is None else self.taken[culprit]
        if first and self.lost:
            self.lost.clear()
            self.taken = list(range(self.count))
            say.err(f"the next start has all {self.count} processes again")
        elif not first and place is not None and place == self.last and self.least < self.count:
            self._leave_out(place)
        self.last = place

    def _leave_out(self, place: int) -> None:
        there = [one for one in range(self.count) if one not in self.lost | {place}]
        ran = subprocess.run([sys.executable, "-m", "launch.elastic", f"--processes={len(there)}", f"--min-processes={self.least}",
                              f"--devices={self.devices // self.count}", f"--full={self.devices}", "--", *self.words],
                             capture_output=True, text=True)
        if ran.returncode or not ran.stdout.strip().isdecimal():
            say.err(f"process {place} of {self.count} failed twice in a row, and the run cannot go on without it: "
                    f"{(ran.stderr.strip().splitlines() or ['?'])[-1].removeprefix('error: ')}")
            return
        self.lost.add(place)
        self.taken = there[:int(ran.stdout)]
        say.err(f"process {place} of {self.count} failed twice in a row: the next start is without it, in {len(self.taken)} processes")


def check_elastic(run: Run) -> None:
    """Raises: ConfigError where nothing in the run can shrink."""
    if run.mesh.full_devices:
        raise ConfigError("mesh.full_devices is set here by the launcher (--min-processes); leave it out")
    if -1 not in (run.mesh.data, run.mesh.fsdp):
        raise ConfigError("--min-processes needs an axis of the mesh that shrinks with the devices, and none is -1; use mesh.data=-1 or "
                          "mesh.fsdp=-1")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1:])


def parse(own: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.local", usage=USAGE, description=(
        "Starts one run in N processes on this machine: simulated devices, or the GPUs, are divided among them. "
        "Without RUN.toml: configs/quickstart.toml. The keys of a run: `-- --help`."), allow_abbrev=False)
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many processes, at least 1")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="R", help="a run that fails is started again from its newest "
                        "checkpoint, so many times in a row without a newer one (default 0)")
    parser.add_argument("--min-processes", type=int, default=0, metavar="K", help="goes on with fewer, down to K, where the same one "
                        "fails twice in a row; the axis of -1 shrinks, and the batch stays (default N)")
    parsed, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(f"{unknown[0]} is no option of the launcher; the run file and its options stand behind --, e.g. "
                     f"--processes {parsed.processes} -- {' '.join(unknown)}")
    if parsed.processes < 1:
        parser.error(f"--processes {parsed.processes} starts nothing; use at least 1")
    if parsed.max_restarts < 0:
        parser.error(f"--max-restarts {parsed.max_restarts} is no number of starts; use 0 for none, or e.g. 5")
    if parsed.min_processes and not 1 <= parsed.min_processes <= parsed.processes:
        parser.error(f"--min-processes {parsed.min_processes} must be from 1 to --processes {parsed.processes}")
    if parsed.min_processes not in (0, parsed.processes) and parsed.max_restarts < 2:
        parser.error("--min-processes needs --max-restarts of at least 2: a process is left out after it has failed twice")
    return parsed


def commands(rest: Sequence[str], count: int, port: int) -> list[list[str]]:
    """The command line of every process; one alone is a plain run."""
    train = [sys.executable, "-m", "meshtrain.train", *rest]
    if count == 1:
        return [train]
    return [[*train, f"--distributed.coordinator_address=127.0.0.1:{port}", f"--distributed.num_processes={count}",
             f"--distributed.process_id={index}"] for index in range(count)]


def environments(run: Run, count: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of every process: which GPUs are its own, if any.

    Raises: ConfigError where the run's devices cannot be divided among `count` processes.
    """
    given, total = run.distributed, run.mesh.simulated_devices
    if given != given.without_place():
        raise ConfigError("[distributed] is set here by the launcher; leave it out of the run file and the command line")
    # Unbuffered: what is said last is what a process that is killed has to tell.
    common = {**environ, "PYTHONUNBUFFERED": "1"}
    if total % count:
        fewer = max(n for n in range(1, count) if total % n == 0)
        more = [n for n in range(count + 1, total + 1) if total % n == 0][:1]
        raise ConfigError(f"mesh.simulated_devices={total} cannot be divided among --processes {count}; use "
                          f"{' or '.join(f'--processes {n}' for n in [fewer, *more])}, or a multiple of {count} devices")
    if total:
        return [common | {"CUDA_VISIBLE_DEVICES": ""}] * count
    if count == 1:
        return [common]
    return [common | {"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in gpus.divided(gpus.visible(environ), count)]


def devices_of(run: Run, environ: Mapping[str, str]) -> int:
    """How many devices all processes have together."""
    return run.mesh.simulated_devices or len(gpus.visible(environ))


def free_port() -> int:
    """A free port of loopback, below those that systems give to outgoing connections: a process that retries to connect
    to one of those can end up connected to itself."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _leave(number, frame) -> None:
    """A signal while nobody runs, to whom it could be passed on. Not by `say`: it may have come in the middle of a line."""
    with contextlib.suppress(OSError):
        os.write(2, f"{signal.Signals(number).name}: nothing runs; the same command starts the run, or goes on with it\n".encode())
    os._exit(stops.STOPPED)


if __name__ == "__main__":
    say.begin()
    for asked in stops.heeded():
        signal.signal(asked, _leave)
    sys.exit(main(sys.argv[1:]))
