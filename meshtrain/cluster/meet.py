"""Rendezvous of a run's processes at one port, before jax's own, which aborts without naming the missing processes.

Each process sends the token of its start. Processes of another start or run are reported and disconnected. The token is
no secret: whoever reaches the port can disturb the run. This module knows no run, model or data.
"""
from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from meshtrain.cluster.find import Cluster, join_address
from meshtrain.cluster.lost import PeerError
from meshtrain.units import plural

HELLO, ANSWER = b"meshtrain-process-2 ", b"meshtrain-answer-2 "
LINE_BYTES = 4096
TELL_AFTER_S, TELL_AGAIN_S = 30.0, 60.0     # report missing processes after this long, and again
MOST_LISTED = 16                # processes in a message
SHUTDOWN_TIMEOUT_S = 120        # how long finished processes wait for one that still writes


def meet(cluster: Cluster, timeout_s: float) -> None:
    """Wait until all processes of the cluster are present; then return in every process.

    No process waits longer than timeout_s (process 0: from the first arrival). Raises: PeerError that names the missing
    processes, a taken port, or contradicting processes (perhaps of an older start). The next attempt may succeed.
    """
    (_receive if cluster.index == 0 else _arrive)(cluster, timeout_s)


def start(cluster: Cluster, timeout_s: float, heartbeat_timeout_s: int) -> None:
    """Initialize jax as one process of the cluster; no backend may run yet. Raises: as `meet`.

    timeout_s: the timeout of the rendezvous, and again of jax's own service. heartbeat_timeout_s: a process without a
    heartbeat for this time is lost, and all processes end.
    """
    meet(cluster, timeout_s)
    # Its handler would replace our handler of SIGTERM. orbax works without the service.
    jax.config.update("jax_enable_preemption_service", False)
    with _without_proxy(cluster.host):
        jax.distributed.initialize(
            cluster.coordinator, cluster.count, cluster.index, cluster.local_devices,
            cluster_detection_method="deactivate",      # else Slurm's local rank replaces local_devices=None
            coordinator_bind_address=join_address(cluster.loopback, cluster.port) if cluster.loopback else None,
            initialization_timeout=max(10, int(timeout_s)),
            heartbeat_timeout_seconds=heartbeat_timeout_s, shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S)
    sys.excepthook = _end_alone


@contextlib.contextmanager
def _without_proxy(host: str) -> Iterator[None]:
    """Make gRPC connect to `host` directly during the block, whatever grpc_proxy, https_proxy and http_proxy say. jax's
    client would ask the proxy for its coordinator, and abort the process when that fails. gRPC reads the variables when
    it makes a channel. gRPC reads no_grpc_proxy instead of no_proxy; no other library reads no_grpc_proxy."""
    before = os.environ.get("no_grpc_proxy")
    excepted = before or os.environ.get("no_proxy", "")
    os.environ["no_grpc_proxy"] = f"{excepted},{host}".lstrip(",")
    try:
        yield
    finally:
        if before is None:
            del os.environ["no_grpc_proxy"]
        else:
            os.environ["no_grpc_proxy"] = before


def leave(code: int, error: BaseException) -> None:
    """Exit at once if only this one of several processes met `error`; else return, for an orderly exit. An orderly exit
    of one process would deadlock: jax waits for the other processes, which wait for this process in a collective. The
    others notice an immediate exit."""
    if jax.distributed.is_initialized() and not getattr(error, "agreed", False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_alone(kind, error, trace) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(1, error)


def _receive(cluster: Cluster, timeout_s: float) -> None:
    """Wait in process 0 for all others at the coordinator's port; then release all, or send the fault to all."""
    began = time.monotonic()
    deadline, tell_at = began + timeout_s, began + TELL_AFTER_S
    arrived: dict[int, tuple[socket.socket, dict]] = {}
    unread: dict[socket.socket, bytes] = {}
    strangers: dict[str, str] = {}      # by host and pid
    fault = None
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = stack.enter_context(_listen(cluster))
        selector.register(listener, selectors.EVENT_READ)
        while len(arrived) < cluster.count - 1 and not fault:
            now = time.monotonic()
            if now >= deadline:
                here = [_about(cluster), *(about for _, about in arrived.values())]
                fault = _missing(cluster, here, timeout_s, list(strangers.values()))
            elif now >= tell_at:
                tell_at = now + TELL_AGAIN_S
                missing = sorted(set(range(1, cluster.count)) - arrived.keys())
                _tell(f"still waiting, up to {deadline - now:.0f} s more: {name_processes(missing)} of {cluster.count} "
                      f"{'has' if len(missing) == 1 else 'have'} not connected to {cluster.coordinator} within "
                      f"{now - began:.0f} s")
            for key, _ in selector.select(max(min(deadline, tell_at) - now, 0)):
                connection: socket.socket = key.fileobj     # type: ignore[assignment]
                if connection is listener:
                    with contextlib.suppress(OSError):      # none left, or it disconnected
                        # the system queues a few thousand unaccepted connections and lets others retry
                        while True:
                            connection = stack.enter_context(listener.accept()[0])
                            connection.setblocking(False)
                            unread[connection] = b""
                            selector.register(connection, selectors.EVENT_READ)
                    continue
                received = _read(connection)
                unread[connection] += received
                about = _hello(unread[connection])
                if about is not None and about["token"] != cluster.token:
                    _report_stranger(cluster, about, strangers)
                    about = None
                if about is not None and received:
                    before = arrived.get(about["index"], (None, None))[1]
                    fault = fault or _contradiction(cluster, about, before)
                    arrived[about["index"]] = connection, about
                    deadline = min(deadline, time.monotonic() + about["left_s"])
                elif not received or not _may_become(HELLO, unread[connection]):
                    # Disconnected, or foreign (another run, a scanner, a browser). A live peer retries.
                    arrived = {index: peer for index, peer in arrived.items() if peer[0] is not connection}
                    selector.unregister(connection)
                    connection.close()
        answer = ANSWER + json.dumps({"fault": fault}).encode() + b"\n"
        for connection in unread:
            with contextlib.suppress(OSError):
                connection.send(answer)
    if fault:
        raise PeerError(fault)


def _report_stranger(cluster: Cluster, about: dict, strangers: dict[str, str]) -> None:
    """Report a process of another run, or of another start of this run. Each process is reported once, and only the
    first MOST_LISTED processes are reported."""
    if _where(about) not in strangers and len(strangers) < MOST_LISTED:
        strangers[_where(about)] = f"process {about['index']} ({_where(about)}) of {about['token'] or 'no job'}"
        _tell(f"rejected at {cluster.coordinator}: {strangers[_where(about)]}; this is {cluster.token or 'no job'}")


def _contradiction(cluster: Cluster, about: dict, before: dict | None) -> str | None:
    """Return the fault in a process's `about`, or None. before: that of a process already there with this index."""
    index, first = about["index"], _about(cluster)
    if about["count"] != cluster.count:
        return (f"process {index} ({_where(about)}) has distributed.num_processes={about['count']}, but process 0 "
                f"({_where(first)}) has {cluster.count}; start all with the same number, and check that no older start "
                f"is running")
    if index == 0 or before is not None and _where(before) != _where(about):
        return (f"two processes have distributed.process_id={index}: {_where(before or first)} and {_where(about)}; "
                f"give each process its own, 0 to {cluster.count - 1}, and check that no earlier start is running")
    return None


def _arrive(cluster: Cluster, timeout_s: float) -> None:
    """Report to process 0 and wait for its answer, which it sends when all are present. All others call it."""
    began, why, warned = time.monotonic(), "no connection", False
    deadline = began + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if cluster.index == 1 and not warned and timeout_s - left_s >= TELL_AFTER_S:      # one process reports for all
            warned = True
            _tell(f"still waiting, up to {left_s:.0f} s more: process 0 of {cluster.count} has not answered at "
                  f"{cluster.coordinator} within {timeout_s - left_s:.0f} s ({why})")
        try:
            with socket.create_connection((cluster.loopback or cluster.host, cluster.port),
                                          min(left_s, 5)) as connection:
                connection.sendall(HELLO + json.dumps(_about(cluster) | {"left_s": left_s}).encode() + b"\n")
                connection.settimeout(left_s + 5)       # process 0 keeps the time and knows the other missing processes
                line = connection.makefile("rb").readline(LINE_BYTES)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            answer = _parse(ANSWER, line)
            if answer is not None and answer["fault"]:
                raise PeerError(answer["fault"])
            if answer is not None:
                return
            why = "another program listens there" if line else "the connection was lost"
        time.sleep(min(0.2, max(deadline - time.monotonic(), 0)))
    raise PeerError(f"process 0 of {cluster.count} did not answer at {cluster.coordinator} within {timeout_s:g} s "
                    f"({why}); this is process {cluster.index} ({_where(_about(cluster))}). Check the output of "
                    "process 0, and whether it runs on that host and this host can reach the port")


def _listen(cluster: Cluster) -> socket.socket:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * cluster.count + 256        # one connection per peer here and in jax's service
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE,
                           (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    both = not cluster.loopback and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in cluster.loopback else socket.AF_INET
    try:
        listener = socket.create_server((cluster.loopback, cluster.port), family=family, backlog=cluster.count,
                                        dualstack_ipv6=both)
    except OSError as error:
        raise PeerError(f"distributed.coordinator_address={cluster.coordinator}: process 0 cannot listen there "
                        f"({error.strerror}); start again if the launcher chooses the port, or give a port that is "
                        f"free on its host, and check that no older run uses it") from None
    listener.setblocking(False)
    return listener


def _about(cluster: Cluster) -> dict:
    return {"index": cluster.index, "count": cluster.count, "token": cluster.token, "host": socket.gethostname(),
            "pid": os.getpid()}


def _where(about: dict) -> str:
    return f"{about['host']}, pid {about['pid']}"


def _read(connection: socket.socket) -> bytes:
    """Return the bytes received; empty if the peer closed the connection."""
    with contextlib.suppress(OSError):
        return connection.recv(LINE_BYTES)
    return b""


def _parse(magic: bytes, line: bytes) -> dict | None:
    """Return the JSON object that follows the magic word in a complete line; None for anything else."""
    if line.startswith(magic) and line.endswith(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(line[len(magic):])
            return said if isinstance(said, dict) else None
    return None


def _hello(line: bytes) -> dict | None:
    """Return the message in which a process describes itself; None if it is incomplete or not from meshtrain."""
    about = _parse(HELLO, line)
    kinds = {"index": int, "count": int, "pid": int, "host": str, "token": str}
    if about is None or any(type(about.get(name)) is not kind for name, kind in kinds.items()):
        return None
    left_s = about.get("left_s")
    sound = isinstance(left_s, (int, float)) and not isinstance(left_s, bool) and 0 <= left_s < float("inf")
    return about if sound and 0 <= about["index"] < about["count"] else None


def _may_become(magic: bytes, line: bytes) -> bool:
    return line[:len(magic)] == magic[:len(line)] and b"\n" not in line and len(line) <= LINE_BYTES


def _tell(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):      # the peer is gone
        print(words, file=sys.stderr, flush=True)


def _missing(cluster: Cluster, here: list[dict], timeout_s: float, strangers: list[str]) -> str:
    came = {about["index"]: f"{about['index']} ({_where(about)})" for about in here}
    missing = [str(index) for index in range(cluster.count) if index not in came]
    return (f"{name_processes(missing)} of {cluster.count} did not connect to {cluster.coordinator} within "
            f"{timeout_s:g} s; connected: {_enumerate([came[index] for index in sorted(came)])}. Read the output of "
            "the missing processes, and check that their hosts reach that address"
            + (f". Rejected, because this is {cluster.token or 'no job'}: {_enumerate(strangers)}"
               if strangers else ""))


def name_processes(indices: Sequence[int | str]) -> str:
    return f"{plural(len(indices), 'process')} {_enumerate([str(index) for index in indices])}"


def _enumerate(words: list[str]) -> str:
    if len(words) > MOST_LISTED:
        words = [*words[:MOST_LISTED], f"{len(words) - MOST_LISTED} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
