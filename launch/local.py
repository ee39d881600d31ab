"""python -m launch.local --processes N -- [RUN.toml] [--section.key value …]: N real processes on this machine.

They meet over loopback and train one run: simulated devices, or the GPUs, are divided among them. Process 0
speaks for all; what another said is shown where it failed first, because jax lets its peers die of that with pages
about themselves. Signals that reach the launcher reach every process. Linux only.
Exit codes: the run's 0, 2 or 75 where all processes agree on it, else 1.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from meshtrain import config
from meshtrain.cluster import gpus
from meshtrain.config import ConfigError, Run
from meshtrain.run import say, stops

USAGE = "python -m launch.local --processes N -- [RUN.toml] [--section.key value ...]"
AGREED = (0, 2, 75)
GRACE_S = 5.0       # for peers of one that failed: to end by themselves, then after SIGTERM
KEPT_LINES = 40
# What says nothing of a failure: Gloo's connections, and an installed CUDA plugin that finds no GPU.
NOISE = re.compile(rb"^\[Gloo\] Rank |absl::InitializeLog\(\)|cudart_stub")
# jax ends a process that has lost its peers with this and a C++ stack trace.
LOST_PEERS = b"Terminating process because the JAX distributed service detected fatal errors"
MISMATCHED = b"gloo::EnforceNotMet"     # two collectives of one group met that are not the same
PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    own, rest = _split(argv)
    count = _parse(own).processes
    try:
        run = config.load(rest, USAGE)
        environs = environments(run, count, os.environ)
    except ConfigError as error:
        say.err(f"error: {error}")
        return 2
    return supervise(commands(rest, count, free_port()), environs)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1:])


def _parse(own: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.local", usage=USAGE, description=(
        "Starts one run in N processes on this machine: simulated devices, or the GPUs, are divided among them. "
        "Without RUN.toml: configs/quickstart.toml. The keys of a run: `-- --help`."), allow_abbrev=False)
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many processes, at least 1")
    parsed, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(f"{unknown[0]} is no option of the launcher; the run file and its options stand behind --, e.g. "
                     f"--processes {parsed.processes} -- {' '.join(unknown)}")
    if parsed.processes < 1:
        parser.error(f"--processes {parsed.processes} starts nothing; use at least 1")
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
    if given != config.Distributed(timeout_s=given.timeout_s):
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


def free_port() -> int:
    """A free port of loopback, below those that systems give to outgoing connections: a process that retries to connect
    to one of those can end up connected to itself."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


# ---- supervision -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Child:
    """One process, what it said last, and how it ended. code: subprocess's, negative for a signal; None while it runs."""
    index: int
    process: subprocess.Popen
    pidfd: int
    lines: collections.deque[bytes] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=KEPT_LINES))
    reader: threading.Thread | None = None
    code: int | None = None
    ended_s: float = 0.0

    def listen(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if not NOISE.search(line):
                self.lines.append(line)

    def send(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    @property
    def name(self) -> str:
        return f"process {self.index} (pid {self.process.pid})"

    @property
    def ending(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by {signal.Signals(-self.code).name} (signal {-self.code})"


def supervise(argvs: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]], grace_s: float = GRACE_S) -> int:
    """Runs all commands until all have ended and returns the code of the whole; call it from the main thread.

    The output of the first is the launcher's. Once one has failed, the others have grace_s seconds to end by themselves
    and as long after SIGTERM.
    """
    children: list[Child] = []
    early: list[int] = []       # signals from before all were there

    def forward(number, frame):
        if len(children) < len(argvs):
            early.append(number)
            return
        for child in children:
            child.send(number)

    old = {number: signal.signal(number, forward) for number in stops.heeded()}
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [signal.signal(number, handler) for number, handler in old.items()])
        for index, (argv, environ) in enumerate(zip(argvs, environs, strict=True)):
            captured = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if index else {}
            # A session of its own: a terminal's Ctrl-C reaches the launcher alone, which passes it on once.
            process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True,
                                       preexec_fn=_die_with(os.getpid()), **captured)
            children.append(Child(index, process, os.pidfd_open(process.pid)))
            stack.callback(os.close, children[-1].pidfd)
        for number in early:
            forward(number, None)
        for child in children[1:]:      # threads only after the last fork
            child.listen()
        ended = _wait(children, start, grace_s)
    return _conclude(ended)


def _die_with(parent: int):
    """For the child, before exec: the kernel kills it when the launcher is gone, however that died."""
    prctl = ctypes.CDLL(None).prctl

    def apply():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return apply


def _wait(children: Sequence[Child], start: float, grace_s: float) -> list[Child]:
    """The children in the order in which they ended: who failed first is the cause, the others fail of it."""
    ended: list[Child] = []
    measures, deadline = [signal.SIGTERM, signal.SIGKILL], None
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pidfd, selectors.EVENT_READ, child)
        while len(ended) < len(children):
            if deadline is not None and measures and time.monotonic() >= deadline:
                number, deadline = measures.pop(0), time.monotonic() + grace_s
                for child in children:
                    child.send(number)
            left_s = max(0, deadline - time.monotonic()) if measures and deadline is not None else None
            for key, _ in selector.select(left_s):
                child = key.data
                selector.unregister(child.pidfd)
                child.code, child.ended_s = child.process.wait(), time.monotonic() - start
                ended.append(child)
                if child.code not in (0, 75) and deadline is None:
                    deadline = time.monotonic() + grace_s
    return ended


def _conclude(ended: Sequence[Child]) -> int:
    """The code of the whole; says who failed first where they do not agree on one that a run ends with."""
    if len({child.code for child in ended}) == 1 and ended[0].code in AGREED:
        return ended[0].code
    for child in ended:
        if child.reader is not None:
            child.reader.join(1)        # not for ever: something that it started may hold the pipe
    in_order = sorted(ended, key=lambda child: child.index)
    failed = [child for child in ended if child.code not in (0, 75)]
    if failed:
        first = next((child for child in failed if not any(LOST_PEERS in line for line in child.lines)), failed[0])
        unheard = first.reader is None      # the first process speaks for itself: its lines are on the screen, not here
        _tell(f"{first.name} failed first, {first.ended_s:.1f} s after the start: {first.ending}")
        if first.lines:
            _tell("its last lines:", *("  " + line.decode(errors="replace").rstrip("\n") for line in first.lines))
        if any(MISMATCHED in line for child in failed for line in child.lines) or unheard and first.code == -signal.SIGABRT:
            _tell("where gloo::EnforceNotMet is said: XLA started collectives of the simulated devices in another order in each "
                  "process, and Gloo matches them by order; start one process, or use a pipeline.schedule that does not split "
                  "the backward, e.g. 1f1b (docs/limits.md). GPUs are not concerned")
        _tell(*(f"then {child.name}: {child.ending}" for child in in_order if child is not first))
    else:
        _tell("the processes do not agree on how the run ended", *(f"{child.name}: {child.ending}" for child in in_order))
    return 1


def _tell(*lines: str) -> None:
    for line in lines:
        say.err(line)


if __name__ == "__main__":
    say.begin()
    for asked in stops.heeded():    # until `supervise` has somebody to pass them on to
        signal.signal(asked, lambda number, frame: os._exit(stops.STOPPED))
    sys.exit(main(sys.argv[1:]))
