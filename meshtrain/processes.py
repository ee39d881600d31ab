"""Several processes that train as one: who they are, how they meet, and what they decide together.

`find` reads flags or a launcher's environment, `start` lets all of them meet at one port before jax does (jax aborts
without naming who is missing), and the rest are collectives on small facts: one process asks the file system and all
know, all stop after the same step, all have read the same. With one process everything here is a plain call.
This module knows no run, model or data; those who call it must do so in the same order in every process.
"""
from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import resource
import selectors
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain.config import ConfigError

HELLO, ANSWER = b"meshtrain-process-1 ", b"meshtrain-answer-1 "
LINE_BYTES = 4096
HEARTBEAT_TIMEOUT_S = 30        # jax's 100 would leave a pod idle for longer than most restarts take
SHUTDOWN_TIMEOUT_S = 120        # how long those that are done wait for one that still writes
FIRST_PORT, NUM_PORTS = 10_000, 20_000      # below 32768, where systems take ports for outgoing connections
SLURM_OWN_STEPS = 0xFFFFFFF0    # step ids from here up are Slurm's own: the batch script, salloc's shell


class PeerError(RuntimeError):
    """The processes of a run did not come together, or one of them failed alone; says which."""


# ---- who we are ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process among `count`. coordinator: "host:port" of process 0. local_devices: the GPUs of this host that are
    its own; None = all that it sees."""
    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


def find(section, environ: Mapping[str, str]) -> Cluster | None:
    """The cluster that [distributed] or, where that is empty, Open MPI or Slurm describes; None = a single process.

    section: coordinator_address, num_processes and process_id of a sound run. coordinator_address alone moves the
    meeting place of what a launcher describes. Raises: ConfigError where that cannot be told.
    """
    address = section.coordinator_address
    if section.num_processes:
        found = Cluster(address, section.num_processes, section.process_id)
    else:
        # mpirun starts its daemons by srun, so below it both environments are there, and Slurm's is that of the daemon.
        found = _open_mpi(environ, address) or _slurm(environ, address)
    if address and found is None:
        raise ConfigError(f"distributed.coordinator_address={address} is for several processes, and neither srun nor "
                          "mpirun started this one; give distributed.num_processes and distributed.process_id too")
    return found if found is not None and found.count > 1 else None


def _slurm(environ: Mapping[str, str], address: str) -> Cluster | None:
    """The tasks of one srun. A batch script and salloc's shell see most of these variables, and are not tasks."""
    step = int(environ.get("SLURM_STEP_ID", SLURM_OWN_STEPS))
    if "SLURM_PROCID" not in environ or step >= SLURM_OWN_STEPS:
        return None
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1"))
    local_count = per_node[min(int(environ.get("SLURM_NODEID", 0)), len(per_node) - 1)]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    host = "127.0.0.1" if local_count == count else _first_host(nodes)
    return Cluster(address or f"{host}:{_port(environ.get('SLURM_JOB_ID', '0') + '.' + str(step))}", count,
                   int(environ["SLURM_PROCID"]), _own_gpus(int(environ.get("SLURM_LOCALID", 0)), local_count, environ))


def _open_mpi(environ: Mapping[str, str], address: str) -> Cluster | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    count, local_count = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    own = _own_gpus(int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), local_count, environ)
    if not address:
        # Open MPI 4 tells where mpirun listens, 5 names its jobs after mpirun's host: prterun-HOST-PID@1.
        uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
        jobs = [environ[key] for key in sorted(environ) if key == "PMIX_NAMESPACE" or key.startswith("PMIX_SERVER_URI")]
        listens = re.search(r"tcp6?://(?:\[([^],]+)|([^,:]+))", uri)
        named = next(filter(None, (re.match(r"prte(?:run)?-(.+)-\d+@", job) for job in jobs)), None)
        host = "127.0.0.1" if local_count == count else listens[1] or listens[2] if listens else named[1] if named else None
        if host is None:
            raise ConfigError(f"mpirun started {count} processes and does not tell where process 0 is; "
                              "give --distributed.coordinator_address HOST:PORT, with a free port of the host of rank 0")
        job = uri.split(";")[0] or (named[0] if named else jobs[0] if jobs else "")
        address = f"{f'[{host}]' if ':' in host else host}:{_port(job)}"
    return Cluster(address, count, int(environ["OMPI_COMM_WORLD_RANK"]), own)


def _own_gpus(local_index: int, local_count: int, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """One process per GPU takes its own. One process on a host, or one that a launcher has bound already, takes all."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    bound = visible is not None and len(visible.split(",")) < local_count
    return None if local_count == 1 or bound else (local_index,)


def _first_host(nodes: str) -> str:
    """'rack[1-2]n[03,07-9],other' -> 'rack1n03'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """'4(x2),3' -> [4, 4, 3]."""
    return [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _port(job: str) -> int:
    """The same in all processes of a job, and most likely another in the next job on this host."""
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


# ---- coming together -------------------------------------------------------------------------------------------------


def meet(cluster: Cluster, timeout_s: float) -> None:
    """Returns when all processes of the cluster are there, in all of them.

    Nobody waits longer than timeout_s (process 0 goes by the one who came first).
    Raises: PeerError that names who did not come; ConfigError where the processes contradict each other or the port is
    taken.
    """
    (_receive if cluster.index == 0 else _arrive)(cluster, timeout_s)


def start(cluster: Cluster, *, timeout_s: float = 45) -> None:
    """Brings jax up as one process of the cluster, within a minute. No backend may run yet. Raises: as `meet`."""
    began = time.monotonic()
    meet(cluster, timeout_s)
    # Its handler would take SIGTERM away from ours; orbax treats it as absent.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator, cluster.count, cluster.index, cluster.local_devices,
        cluster_detection_method="deactivate",      # else Slurm's local rank replaces local_devices=None
        coordinator_bind_address=f"{_loopback(cluster)}:{cluster.port}" if cluster.on_loopback else None,
        initialization_timeout=max(10, int(timeout_s + 8 - (time.monotonic() - began))),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S, shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S)
    sys.excepthook = _end_alone


def leave(code: int, error: BaseException) -> None:
    """Ends this process at once where several run and it met `error` alone; else returns, for an orderly end.

    At an orderly end jax waits for all the others, who wait for this one in a collective; an end at once they notice.
    """
    if jax.distributed.is_initialized() and not getattr(error, "agreed", False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_alone(kind, error, trace) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(1, error)


def _receive(cluster: Cluster, timeout_s: float) -> None:
    """Process 0: waits for all others at the coordinator's port, then lets them go on together, or fail together."""
    deadline = time.monotonic() + timeout_s
    arrived: dict[int, tuple[socket.socket, dict]] = {}
    unread: dict[socket.socket, bytes] = {}
    fault = contradiction = None
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = stack.enter_context(_listen(cluster))
        selector.register(listener, selectors.EVENT_READ)
        while len(arrived) < cluster.count - 1 and not fault:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                fault = _missing(cluster, [_about(cluster), *(about for _, about in arrived.values())], timeout_s)
            for connection in [key.fileobj for key, _ in selector.select(max(left_s, 0))]:
                if connection is listener:
                    with contextlib.suppress(OSError):      # it has gone again
                        connection = stack.enter_context(listener.accept()[0])
                        connection.setblocking(False)
                        unread[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                received = _read(connection)
                unread[connection] += received
                about = _parse(HELLO, unread[connection])
                if about is not None and received:
                    before = arrived.get(about["index"], (None, None))[1]
                    fault = contradiction = fault or _contradiction(cluster, about, before)
                    arrived[about["index"]] = connection, about
                    deadline = min(deadline, time.monotonic() + about["left_s"])
                elif not received or not _may_become(HELLO, unread[connection]):
                    # It has gone, or is somebody else's: a port scanner, a browser. A peer that lives comes again.
                    arrived = {index: peer for index, peer in arrived.items() if peer[0] is not connection}
                    selector.unregister(connection)
                    connection.close()
        answer = ANSWER + json.dumps({"fault": fault, "mistake": bool(contradiction)}).encode() + b"\n"
        for connection in unread:
            with contextlib.suppress(OSError):
                connection.send(answer)
    if fault:
        raise (ConfigError if contradiction else PeerError)(fault)


def _contradiction(cluster: Cluster, about: dict, before: dict | None) -> str | None:
    """What is wrong with a process that says of itself `about`; before: the one that came under this index already."""
    index, first = about["index"], _about(cluster)
    if about["count"] != cluster.count:
        return (f"process {index} ({_where(about)}) has distributed.num_processes={about['count']}, and process 0 "
                f"({_where(first)}) has {cluster.count}; start all with the same number")
    if index == 0 or before is not None and _where(before) != _where(about):
        return (f"distributed.process_id={index} came twice: {_where(before or first)} and {_where(about)}; "
                f"give each process its own, 0 to {cluster.count - 1}")
    return None


def _arrive(cluster: Cluster, timeout_s: float) -> None:
    """Every other process: tells process 0 that it is there, and waits for all the others in its answer."""
    deadline, why = time.monotonic() + timeout_s, "no connection"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((_loopback(cluster) or cluster.host, cluster.port), min(left_s, 5)) as connection:
                connection.sendall(HELLO + json.dumps(_about(cluster) | {"left_s": left_s}).encode() + b"\n")
                connection.settimeout(left_s + 5)       # process 0 keeps the time, and knows who else is missing
                line = connection.makefile("rb").readline(LINE_BYTES)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            answer = _parse(ANSWER, line)
            if answer is not None and answer["fault"]:
                raise (ConfigError if answer["mistake"] else PeerError)(answer["fault"])
            if answer is not None:
                return
            why = "what listens there is no process of meshtrain" if line else "it was there and went away"
        time.sleep(min(0.2, max(deadline - time.monotonic(), 0)))
    raise PeerError(f"process 0 of {cluster.count} did not come to {cluster.coordinator} within {timeout_s:g} s ({why}); "
                    f"this is process {cluster.index} ({_where(_about(cluster))}). Look at what process 0 said, and whether "
                    "it runs on that host and the port can be reached from here")


def _listen(cluster: Cluster) -> socket.socket:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * cluster.count + 256        # a connection of each peer, here and in jax's own service
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    address, options = (_loopback(cluster) or "", cluster.port), {"backlog": cluster.count}
    if ":" in address[0]:
        options["family"] = socket.AF_INET6
    elif not address[0] and socket.has_dualstack_ipv6():
        options |= {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        listener = socket.create_server(address, **options)
    except OSError as error:
        raise ConfigError(f"distributed.coordinator_address={cluster.coordinator}: process 0 cannot listen there "
                          f"({error.strerror}); give a port that is free on its host, and see that no older run still "
                          "holds it") from None
    listener.setblocking(False)
    return listener


def _loopback(cluster: Cluster) -> str:
    """The address to bind and to connect to where nobody outside this machine is to get in; else empty."""
    return "" if not cluster.on_loopback else "127.0.0.1" if cluster.host == "localhost" else cluster.host


def _about(cluster: Cluster) -> dict:
    return {"index": cluster.index, "count": cluster.count, "host": socket.gethostname(), "pid": os.getpid()}


def _where(about: dict) -> str:
    return f"{about['host']}, pid {about['pid']}"


def _read(connection: socket.socket) -> bytes:
    """What has come; nothing where the other end has gone."""
    with contextlib.suppress(OSError):
        return connection.recv(LINE_BYTES)
    return b""


def _parse(magic: bytes, line: bytes) -> dict | None:
    """What stands behind the magic word in a whole line; None for anything else."""
    if line.startswith(magic) and line.endswith(b"\n"):
        with contextlib.suppress(ValueError):
            return json.loads(line[len(magic):])
    return None


def _may_become(magic: bytes, line: bytes) -> bool:
    return line[:len(magic)] == magic[:len(line)] and b"\n" not in line and len(line) <= LINE_BYTES


def _missing(cluster: Cluster, here: list[dict], timeout_s: float) -> str:
    came = {about["index"]: f"{about['index']} ({_where(about)})" for about in here}
    missing = [str(index) for index in range(cluster.count) if index not in came]
    return (f"{_processes(missing)} of {cluster.count} did not come to {cluster.coordinator} within {timeout_s:g} s; "
            f"there {'is' if len(came) == 1 else 'are'} {_listed([came[index] for index in sorted(came)])}. "
            "Look at what the missing said, and whether their hosts reach that address")


def _processes(indices: Sequence[int | str]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {_listed([str(index) for index in indices])}"


def _listed(words: list[str], most: int = 16) -> str:
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ---- deciding together -----------------------------------------------------------------------------------------------


def on_first(function: Callable):
    """function() is run by process 0 alone; every process returns its value, which must be JSON-able.

    Raises: in every process, what function() raised in process 0: ConfigError and ValueError as such, anything else as
    PeerError in the others. `told_by_first` and `leave` know such an error again.
    """
    if jax.process_count() == 1:
        return function()
    told, raised = {}, None
    if jax.process_index() == 0:
        try:
            told = {"value": function()}
            json.dumps(told)
        except Exception as error:
            raised, told = error, _outcome(error)
    told = _broadcast(told)
    if raised is not None:
        raised.agreed = True
        raise raised
    if "kind" in told:
        lone = told["kind"] == "PeerError"
        raise _again(told | {"messages": [f"process 0: {message}" if lone else message for message in told["messages"]]})
    return told["value"]


def everywhere(function: Callable):
    """function() is run by every process and each returns its own value, of any kind.

    Raises: in every process, where function() raised in some: ConfigError that names them for ConfigError and
    ValueError (without names where all say the same), PeerError for anything else.
    """
    if jax.process_count() == 1:
        return function()
    value, raised = None, None
    try:
        value = function()
    except Exception as error:
        raised = error
    outcomes = _exchange(None if raised is None else _outcome(raised))
    failed = {index: outcome for index, outcome in enumerate(outcomes) if outcome is not None}
    if not failed:
        return value
    texts: dict[tuple, list[int]] = {}
    for index, outcome in failed.items():
        texts.setdefault(tuple(outcome["messages"]), []).append(index)
    unanimous = len(texts) == 1 and len(failed) == len(outcomes)
    messages = [message if unanimous else f"{_processes(indices)}: {message}"
                for text, indices in texts.items() for message in text]
    kind = "PeerError" if any(outcome["kind"] == "PeerError" for outcome in failed.values()) else "ConfigError"
    raise _again({"kind": kind, "messages": messages}) from raised


def same_everywhere(name: str, text: str) -> None:
    """Raises: ConfigError in every process, with the lines that differ and who has which, unless all give the same text."""
    holders: dict[str, list[int]] = {}
    for index, other in enumerate(_exchange(text)):
        holders.setdefault(other, []).append(index)
    if len(holders) > 1:
        common = set.intersection(*(set(other.splitlines()) for other in holders))
        told = "; ".join(f"{_processes(indices)}: {', '.join(line for line in other.splitlines() if line not in common)}"
                         for other, indices in holders.items())
        raise _again({"kind": "ConfigError", "messages": [
            f"{name} is not the same in every process ({told}); give all of them the same files and flags"]})


def told_by_first(error: BaseException) -> bool:
    """Whether process 0 has raised the same error, so that this process (another one) need not tell it."""
    return getattr(error, "agreed", False) and jax.process_index() != 0


class StopAgreement:
    """All processes stop after the same step, the one after that in which one of them wished to.

    The wishes of a step are read a step later, when they have long arrived: nobody waits. Moves 4 bytes per device and step.
    """

    def __init__(self):
        if jax.process_count() == 1:
            return
        self._before = None
        devices = np.array(jax.devices())
        mesh = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))
        split = NamedSharding(mesh, PartitionSpec("devices"))
        self._wishes = [jax.make_array_from_callback(devices.shape, split, lambda index, wish=wish: np.full(1, wish, np.int32))
                        for wish in (0, 1)]
        with jax.set_mesh(mesh):        # the run's mesh, in force around this, may have the devices in another order
            self._any = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(self._wishes[0]).compile()

    def reached(self, wish: bool) -> bool:
        """Called by every process once a step: whether all stop now. With one process that is its wish."""
        if jax.process_count() == 1:
            return wish
        before, self._before = self._before, self._any(self._wishes[bool(wish)])
        return before is not None and bool(jax.device_get(before))


def _outcome(error: Exception) -> dict:
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "messages": error.messages}
    if isinstance(error, ValueError):
        return {"kind": "ValueError", "messages": [str(error)]}
    return {"kind": "PeerError", "messages": [f"{type(error).__name__}: {error}"]}


def _again(outcome: dict) -> Exception:
    kinds = {"ConfigError": ConfigError, "ValueError": ValueError, "PeerError": PeerError}
    messages = outcome["messages"]
    error = kinds[outcome["kind"]](*(messages if outcome["kind"] == "ConfigError" else ["\n".join(messages)]))
    error.agreed = True
    return error


def _broadcast(value):
    """Process 0's JSON-able value, in every process."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    return json.loads(multihost_utils.broadcast_one_to_all(_padded(text[:size], size)).tobytes()[:size])


def _exchange(value) -> list:
    """The JSON-able values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(text))))
    rows = multihost_utils.process_allgather(_padded(text, max(sizes)))
    return [json.loads(row.tobytes()[:size]) for row, size in zip(rows, sizes, strict=True)]


def _padded(text: np.ndarray, size: int) -> np.ndarray:
    """At least `size` bytes; powers of two, so that few programs are compiled."""
    padded = np.zeros(max(64, 1 << (int(size) - 1).bit_length()), np.uint8)
    padded[:len(text)] = text
    return padded
