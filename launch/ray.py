"""Runs N processes on a Ray cluster: meshtrain launch ray --processes 8 -- RUN.toml.

A placement group reserves the GPUs, and one actor per bundle starts `python -m meshtrain.train` as a child process. No
data of the run passes through Ray. The cluster is that of RAY_ADDRESS, or this machine; on KubeRay use this command in
a RayJob. meshtrain must be installed on all nodes, and all nodes must share run.dir. A failed run is restarted by the
rule of all launchers, once Ray has the resources again. With rl.lag, --samplers N are actors outside the placement
group; a lost one is started again on any node with room. Extra `ray`.

Exit codes: the run's 0, 2 or 75 if all processes agree on it, else 1.
"""
from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtrain.launch import elastic, restart, samplers, supervise
from meshtrain import config
from meshtrain.cluster import find, monitor
from meshtrain.config import ConfigError, Run
from meshtrain.run import command, contents, say, stops
from meshtrain.storage import mirror

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    ray = None

COMMAND = config.Command("meshtrain.launch.ray", {
    **elastic.OPTIONS, **restart.OPTIONS,
    "gpus-per-process": config.Option("GPUs per process, preferably all of a host (default 1; 0 for simulated devices)",
                                      "G", "8", config.whole()),
    "cpus-per-process": config.Option("cores that Ray reserves per process", "C", "4", config.whole(1), 1),
    **samplers.OPTIONS,
}, launcher=True)
FIRST_PORT = 20_000
POLL_S = 0.3
FIRST_TOLD_S = 5.0      # time until the first message that there is no room
ANSWER_S = 60.0         # time limit of an actor's answer; Ray notices a lost node after about half as long
TOLD_EVERY_S = 30.0
ROOM_S = 30.0           # with --min-processes: wait so long for missing processes before continuing with fewer


class Process:
    """The actor of one bundle. The actor runs one training process, which ends with the actor."""

    def __init__(self):
        self.child: subprocess.Popen | None = None
        self.said: list[tuple[int, bytes]] = []
        self.lock = threading.Lock()

    def place(self) -> tuple[str, list[str]]:
        """Return (address of the actor's node, names of the actor's GPUs)."""
        return ray.util.get_node_ip_address(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def port(self) -> int:
        """Return a free port of the actor's node, above the ports of Ray's workers."""
        return supervise.free_port("", FIRST_PORT)

    def run(self, words: Sequence[str], environ: dict[str, str], folder: str) -> int:
        """Run python with these words until it ends; return its exit code, negative for a signal."""
        self.child = supervise.begin([sys.executable, *words], os.environ | environ, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, cwd=folder if Path(folder).is_dir() else None)
        readers = [threading.Thread(target=self._read, args=(number, stream), daemon=True)
                   for number, stream in ((1, self.child.stdout), (2, self.child.stderr))]
        for reader in readers:
            reader.start()
        code = self.child.wait()
        for reader in readers:
            reader.join(1)      # bounded: its children may hold the pipe
        return code

    def _read(self, number: int, stream) -> None:
        for line in stream:
            with self.lock:
                self.said.append((number, line))

    def new_lines(self) -> list[tuple[int, bytes]]:
        """Return the output since the last call: (1 for stdout or 2 for stderr, a line)."""
        with self.lock:
            lines, self.said = self.said, []
        return lines

    def about(self) -> tuple[int, bool]:
        """Return (pid, whether the process is stopped (SIGSTOP))."""
        return (self.child.pid, monitor.is_stopped(self.child.pid)) if self.child else (0, False)

    def send(self, number: int) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)


@dataclasses.dataclass(eq=False)
class Member(supervise.Child):
    """One process, as seen by the driver. lost: whether its node or Ray worker is gone, with an unknown exit code."""
    actor: Any = None
    host: str = ""
    pid: int = 0
    lost: bool = False

    def lose(self) -> None:
        self.lost, self.forced, self.stopped, self.code = True, False, False, -signal.SIGKILL

    def send(self, number: int) -> None:
        if self.code is None:
            self.actor.send.remote(number)

    def still_s(self) -> float | None:
        return None

    def stands_still(self) -> bool:
        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            self.pid, still = ray.get(self.actor.about.remote(), timeout=2 * POLL_S)
            return still
        return False

    @property
    def secondary(self) -> bool:
        return not self.lost and super().secondary

    @property
    def name(self) -> str:
        return f"process {self.index} ({self.host}{f', pid {self.pid}' if self.pid else ''})"

    @property
    def ending(self) -> str:
        return "its node is lost, or the Ray worker that ran it was killed" if self.lost else super().ending


class Beside:
    """A sampler: an actor that runs `launch.samplers` for one sampler, with GPUs of its own. The sampler begins when
    the trainer has its resources. If the sampler's node is lost, Ray starts the sampler again on any node with room.
    rest: the run's words."""

    def __init__(self, index: int, gpus: int, rest: Sequence[str]):
        self.index, self.gpus, self.words = index, gpus, samplers.words(1, gpus, rest, index)
        self.actor = self.lines = None
        self.is_lost = False

    def look(self) -> None:
        """Start the sampler, or print its new messages. The launcher calls it repeatedly."""
        if self.actor is None:
            self.actor = ray.remote(num_cpus=1, num_gpus=self.gpus, max_restarts=-1, max_task_retries=-1,
                                    max_concurrency=4)(Process).remote()
            self.actor.run.remote(self.words, {"PYTHONUNBUFFERED": "1"}, os.getcwd())
        elif ray.wait([self.lines], timeout=0)[0]:
            try:
                for line in [line for number, line in ray.get(self.lines) if number == 2]:
                    if not supervise.NOISE.search(line):    # the pid is of another host
                        say.err(re.sub(r" \(pid \d+\)", "", line.decode(errors="replace").rstrip()))
                self.is_lost = False
            except ray.exceptions.RayError:
                if not self.is_lost:
                    say.err(f"sampler {self.index} is lost: its node or its Ray worker has ended. It is started again; "
                            f"meanwhile the other samplers generate its unfinished answers")
                self.is_lost = True
        else:
            return
        self.lines = self.actor.new_lines.options(max_task_retries=0).remote()

    def leave(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)        # its process dies with it


@command.entry(COMMAND, __doc__)
def main(given: config.Arguments) -> int:
    run, rest = elastic.run_of(given), given.run
    bundle, drawing = bundle_of(run, given), samplers.read_options(run, given)
    if ray is None:
        raise ConfigError("ray is not installed here; run pip install '.[ray]' in the checkout of meshtrain")
    asked: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):     # Ray takes SIGINT and SIGTERM
        signal.signal(number, lambda number, frame: sys.exit(stops.STOPPED))
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (KeyboardInterrupt, SystemExit):     # Ray's own handlers
        say.err("stopped before the first step; run the same command again to start")
        return stops.STOPPED
    except ConnectionError as error:
        say.err(f"error: no Ray cluster at RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')} ({_first_line(error)}); "
                f"give the address of a cluster that runs, or unset RAY_ADDRESS to use this machine")
        return stops.USER_ERROR
    except Exception as error:
        say.err(f"error: Ray does not start: {_first_line(error)}")
        return stops.FAILED
    for number in stops.stop_signals():       # after Ray has set its own handlers
        signal.signal(number, lambda number, frame: asked.append(number))
    room = Room(run, given, rest, bundle, asked)
    failures = restart.Failures(run, given["max-restarts"], restart.newest(run))
    room.beside = [Beside(index, drawing[1], rest) for index in range(drawing[0])]
    try:
        while room.reserve():
            outcome = life(room, [*rest, *room.overrides()], mirror.directory(run.run.dir) / contents.STACKS)
            room.starts += 1
            wait_s = None if asked else failures.wait_s(outcome.code, outcome.words)
            if wait_s is None:
                return outcome.code
            _sleep(wait_s, asked)
        return stops.STOPPED if asked else stops.FAILED
    finally:
        for beside in room.beside:
            beside.leave()
        room.leave()
        ray.shutdown()


def bundle_of(run: Run, options: config.Arguments) -> dict[str, int]:
    """Return the resources of one process: CPU, and GPU if it has any. Raises: ConfigError if the options contradict
    the run."""
    total, count = run.mesh.simulated_devices, options["processes"]
    if total % count:
        raise ConfigError(f"mesh.simulated_devices={total} cannot be divided among --processes {count}; use a multiple "
                          f"of {count}")
    gpus = options["gpus-per-process"] if "gpus-per-process" in options else 0 if total else 1
    if total and gpus:
        raise ConfigError(f"mesh.simulated_devices={total} needs no GPUs; leave out --gpus-per-process {gpus}, or "
                          f"mesh.simulated_devices")
    if not total and not gpus:
        raise ConfigError("--gpus-per-process 0 leaves the run without devices; give each process 1 or more, or set "
                          "mesh.simulated_devices")
    return {"CPU": options["cpus-per-process"]} | ({"GPU": gpus} if gpus else {})


@dataclasses.dataclass
class Room:
    """The placement group of the next start. The group has a bundle for every process or, if the cluster has no room,
    for fewer processes, at least --min-processes. asked: signals received. beside: the samplers, which run on between
    starts."""
    run: Run
    options: config.Arguments
    words: Sequence[str]
    bundle: dict[str, int]
    asked: list[int]
    group: object = None
    count: int = 0
    starts: int = 0     # number of earlier starts
    beside: list[Beside] = dataclasses.field(default_factory=list)

    @property
    def devices(self) -> int:
        """Devices of one process."""
        return self.bundle.get("GPU") or self.run.mesh.simulated_devices // self.options["processes"]

    @property
    def full(self) -> int:
        """Number of devices that the run is meant for."""
        return self.run.mesh.full_devices or self.devices * self.options["processes"]

    def overrides(self) -> list[str]:
        return elastic.overrides(self.count, self.devices, self.full, "GPU" not in self.bundle)

    def reserve(self) -> bool:
        """Wait until the cluster has room, e.g. after a lost node. Return False if the cluster has no room (after a
        message), or if a signal came."""
        most, least = self.options["processes"], self.options["min-processes"] or self.options["processes"]
        limit_s, begun, count = self.run.distributed.timeout_s, time.monotonic(), most
        while not self.asked:
            if count != self.count:     # else the bundles stay reserved between two starts
                self.leave()
                self.group, self.count = placement_group([self.bundle] * count, strategy="PACK"), count
            if self._comes(min(ROOM_S, limit_s) if least < most else limit_s):
                if count < most:
                    say.err(f"the cluster has no room for all {most} processes: this start has {count}")
                return True
            if time.monotonic() - begun > limit_s and not self.asked:
                say.err(f"error: the cluster has no room for {least} processes of {self.bundle} within "
                        f"distributed.timeout_s={limit_s:g}; free: {_free()}. Add nodes, or start fewer processes")
                return False
            count = self._fewer(min(count, most) - 1, least) or most
        return False

    def leave(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)
        self.group, self.count = None, 0

    def _comes(self, limit_s: float) -> bool:
        begun = time.monotonic()
        tell, ready = begun + FIRST_TOLD_S, self.group.ready()
        while not self.asked and time.monotonic() - begun < limit_s:
            try:
                ray.get(ready, timeout=1)
                return True
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayError:     # a node was lost meanwhile
                ready = self.group.ready()
            if time.monotonic() > tell:
                tell = time.monotonic() + TOLD_EVERY_S
                say.err(f"waiting for room for {self.count} processes of {self.bundle}; free: {_free()}")
        return False

    def _fewer(self, most: int, least: int) -> int:
        """Return how many processes, at most `most`, can train the run and have room; 0 if fewer than `least`."""
        self.leave()
        time.sleep(POLL_S)      # until partial reservations are released
        most = min([most, *(int(_free().get(kind, 0) // each) for kind, each in self.bundle.items())])
        if most < least:
            return 0
        count, why = elastic.most(self.words, most, least, self.devices, self.full)
        if not count:
            say.err(f"error: {why}")
        return count


def life(room: Room, rest: Sequence[str], left: Path) -> supervise.LaunchOutcome:
    """Run one start of all processes; return its outcome. left: the directory with stacks of hanging processes."""
    start, since = time.monotonic(), time.time()
    count, bundle = room.count, room.bundle
    # Concurrent, because it is polled while it runs the process.
    kind = ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0, max_concurrency=4)(Process)
    bundles = [PlacementGroupSchedulingStrategy(room.group, placement_group_bundle_index=i) for i in range(count)]
    actors = [kind.options(scheduling_strategy=strategy).remote() for strategy in bundles]
    try:
        places = ray.get([actor.place.remote() for actor in actors], timeout=ANSWER_S)
        # Indices follow the hosts: the last axis of the placement must stay inside a host.
        order = sorted(range(count), key=lambda i: (places[i], i))
        members = [Member(index, None, -1, actor=actors[i], host=places[i][0]) for index, i in enumerate(order)]
        place = []
        if count > 1:
            port = ray.get(members[0].actor.port.remote(), timeout=ANSWER_S)
            place = [f"--distributed.coordinator_address={find.join_address(members[0].host, port)}",
                     f"--distributed.num_processes={count}"]
        environ = {"PYTHONUNBUFFERED": "1", "MESHTRAIN_START": str(room.starts)} | (
            {} if "GPU" in bundle else {"CUDA_VISIBLE_DEVICES": ""})
        running = {member.actor.run.remote(["-m", "meshtrain.train", *rest, *place,
                                            *[f"--distributed.process_id={member.index}"] * (count > 1)],
                                           environ, os.getcwd()): member for member in members}
        ended = supervise.wait(members, _polling(running, room), start, supervise.GRACE_S, killed_s=ANSWER_S)
        return supervise.conclude(ended, left, since)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        words = f"Ray could not start the processes: {_first_line(error)}"
        say.err(words)
        return supervise.LaunchOutcome(stops.FAILED, words=words)
    finally:
        for actor in actors:
            ray.kill(actor)


def _polling(running: dict[object, Member], room: Room) -> Callable[[float], Iterable[Member]]:
    """Return a function that waits for processes to end and yields those. It also forwards their output, and signals to
    them. running: Ray's reference to the end of a process -> the process."""
    asked = room.asked
    members, passed_on = list(running.values()), 0

    def poll(seconds: float) -> Iterator[Member]:
        nonlocal passed_on
        for number in asked[passed_on:]:
            for member in members:
                member.send(number)
        passed_on = len(asked)
        for beside in room.beside:
            beside.look()
        done, _ = ray.wait([reference for reference, member in running.items() if member.code is None],
                           timeout=min(seconds, POLL_S))
        _hear([member for member in members if member.index == 0 and member.code is None])
        for reference in done:
            member = running[reference]
            try:
                member.code = ray.get(reference)
                _hear([member])
            except ray.exceptions.RayError:
                member.lose()
            yield member

    return poll


def _hear(members: Sequence[Member]) -> None:
    """Collect the output of these processes. The output of process 0 is also that of the driver."""
    for member in members:
        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            for number, line in ray.get(member.actor.new_lines.remote(), timeout=ANSWER_S):
                if not supervise.NOISE.search(line):
                    member.lines.append(line)
                if member.index == 0:
                    with contextlib.suppress(OSError):      # stdout or stderr is closed
                        os.write(number, line)


def _free() -> dict[str, float]:
    return {kind: n for kind, n in ray.available_resources().items() if kind in ("CPU", "GPU")}


def _sleep(wait_s: float, asked: list[int]) -> None:
    until = time.monotonic() + wait_s
    while time.monotonic() < until and not asked:
        time.sleep(POLL_S)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    say.begin()
    sys.exit(main(sys.argv[1:]))
