"""Collectives on small values, with which the processes of a run agree. Every process must call them in the same order.
With one process, each is a plain call. This module knows no run, model or data."""
from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain import custom, jax_private
from meshtrain.cluster import lost
from meshtrain.cluster.lost import PeerError
from meshtrain.cluster.meet import name_processes
from meshtrain.config import ConfigError

Value = TypeVar("Value")
INDEX_BITS, MOST_LATE_MS = 15, 65_535      # process and milliseconds packed into 31 bits


def on_first(function: Callable[[], Any]) -> Any:
    """Call function() in process 0 only and return its JSON-able value in every process.

    Raises: a ConfigError or ValueError of process 0, in every process (use `user_errors` if the ValueError is a mistake
    of the user's). Any other error is raised unchanged in process 0, and as PeerError in the others. `first_reports`
    and `leave` recognize these errors.
    """
    if jax.process_count() == 1:
        return function()
    outcome, raised = {}, None
    if jax.process_index() == 0:
        try:
            outcome = {"value": function()}
            json.dumps(outcome)
        except Exception as error:
            value = isinstance(error, ValueError) and not isinstance(error, (ConfigError, custom.Misuse))
            raised, outcome = error, {"kind": "ValueError", "messages": [str(error)]} if value else _outcome(error)
    outcome = _broadcast(outcome)
    if raised is not None:
        raise mark_agreed(raised)
    if "kind" in outcome:
        first = "process 0: " * (outcome["kind"] == "PeerError")
        raise _again(outcome | {"messages": [f"{first}{message}" for message in outcome["messages"]]})
    return outcome["value"]


def everywhere(function: Callable[[], Value]) -> Value:
    """Call function() in every process; each returns its own value, of any type. Raises: as `on_errors`."""
    with on_errors():
        return function()


@contextlib.contextmanager
def on_errors() -> Iterator[None]:
    """Run a block in every process. Raise an error in every process if the block raised an error in any process.

    ConfigError: every block raised a ConfigError, so the mistake is in the shared run file. PeerError that names the
    processes: only some blocks raised a ConfigError (a missing mount, an unwritable directory). Any other error is
    raised unchanged in the first process that met it, and as PeerError in the others.
    """
    if jax.process_count() == 1:
        yield
        return
    raised = None
    try:
        yield
    except Exception as error:
        raised = error
    outcomes = exchange(None if raised is None else _outcome(raised))
    failed = {index: outcome for index, outcome in enumerate(outcomes) if outcome is not None}
    if not failed:
        return
    mistake = len(failed) == len(outcomes) and all(outcome["kind"] == "ConfigError" for outcome in failed.values())
    own = next((index for index, outcome in failed.items() if outcome["kind"] != "ConfigError"), None)
    if raised is not None and jax.process_index() == own:
        raise mark_agreed(raised)
    texts: dict[tuple, list[int]] = {}
    for index, outcome in failed.items():
        texts.setdefault(tuple(outcome["messages"]), []).append(index)
    unanimous = len(texts) == 1 and len(failed) == len(outcomes)
    messages = [message if unanimous else f"{name_processes(indices)}: {message}"
                for text, indices in texts.items() for message in text]
    raise _again({"kind": "ConfigError" if mistake else "PeerError", "messages": messages}) from raised


def same_everywhere(name: str, text: str) -> None:
    """Check that all processes pass the same text. Raises: ConfigError in every process, with the differing lines."""
    holders: dict[str, list[int]] = {}
    for index, other in enumerate(exchange(text)):
        holders.setdefault(other, []).append(index)
    if len(holders) > 1:
        common = set.intersection(*(set(other.splitlines()) for other in holders))
        differing = "; ".join(
            f"{name_processes(indices)}: {', '.join(line for line in other.splitlines() if line not in common)}"
            for other, indices in holders.items())
        raise _again({"kind": "ConfigError", "messages": [
            f"{name} is not the same in every process ({differing}); give all of them the same files, flags and "
            f"environment"]})


def first_reports(error: BaseException) -> bool:
    """Return whether process 0 raised the same error, so that this process need not report the error."""
    return getattr(error, "agreed", False) and jax.process_index() != 0


def exchange(value: Any) -> list:
    """All-gather a JSON-able value. Return the values of all processes, by process index."""
    if jax.process_count() == 1:
        return [value]
    _gather()
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(text))))
    rows = multihost_utils.process_allgather(_pad(text, max(sizes)))
    return [json.loads(row.tobytes()[:size]) for row, size in zip(rows, sizes, strict=True)]


def mark_agreed(error: Exception) -> Exception:
    """Mark an error as raised by every process: process 0 reports it, and all exit in order."""
    error.agreed = True       # type: ignore[attr-defined]    # any exception may be marked
    return error


MOST_PATIENCE_S = 7 * 24 * 3600.0
# Of the process, as the keys of jax's coordination service are: the limits of the open `wait_at_most`, and the number
# of each barrier, of agreements and of `part`.
_limits_s: list[Callable[[], float]] = []
_barriers, _partings = itertools.count(1), itertools.count(1)


@contextlib.contextmanager
def wait_at_most(limit_s: Callable[[], float]) -> Iterator[None]:
    """Context: every agreement waits for missing processes at most limit_s() seconds; limit_s is called when the
    agreement begins. Outside the context, the limit is MOST_PATIENCE_S."""
    _limits_s.append(limit_s)
    try:
        yield
    finally:
        _limits_s.remove(limit_s)


def _gather() -> None:
    """Wait for all processes before a collective. The collective itself would wait forever and name no process. Raises:
    PeerError that names the missing processes."""
    number, client = next(_barriers), jax_private.coordination_client()
    limit_s = min([MOST_PATIENCE_S, *(limit() for limit in _limits_s[-1:])])
    if client is None:
        return
    try:
        client.wait_at_barrier(f"meshtrain agreement {number}", int(limit_s * 1000))
    except Exception as error:
        gone = lost.others(error)
        if not gone:
            raise
        raise PeerError(f"{name_processes(gone)} of {jax.process_count()} did not answer within {limit_s:.0f} s; "
                        f"read {'its' if len(gone) == 1 else 'their'} output") from None


def leave_word(key: str, text: str) -> None:
    """Publish a text under a key, for `word` in another process. Any thread may call it. A failure raises nothing."""
    with contextlib.suppress(Exception):
        jax_private.coordination_client().key_value_set(f"meshtrain {key}", text)


def word(key: str) -> str:
    """Return the text that a process published under this key; empty if no process did."""
    with contextlib.suppress(Exception):
        return jax_private.coordination_client().key_value_try_get(f"meshtrain {key}")
    return ""


def part(timeout_s: float = 5.0) -> None:
    """Before an immediate exit, wait for the other processes that also stop. Process 0 exits last, because jax aborts
    the others when process 0 is gone. Raises nothing; returns after timeout_s at the latest."""
    if jax.distributed.is_initialized():
        with contextlib.suppress(Exception):
            name = f"meshtrain part {next(_partings)}"
            jax_private.coordination_client().wait_at_barrier(name, int(timeout_s * 1000))
        time.sleep(0.5 * (jax.process_index() == 0))


class StopAgreement:
    """Makes all processes stop after the same step: the step that follows the first request of any process.

    Requests are read one step later, so that no process waits; cost: 12 bytes per device and step. late: (process,
    seconds), the last process to reach the step read last, and its delay behind the first; None: unknown.
    """

    def __init__(self):
        self.late: tuple[int, float] | None = None
        if jax.process_count() == 1:
            return
        self._before, self._known = None, False
        devices = np.array(jax.devices())
        mesh = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))
        self._shape, self._split = (len(devices), 3), NamedSharding(mesh, PartitionSpec("devices"))
        self._on_time = {wish: self._place(wish, 0) for wish in range(3)}
        with jax.set_mesh(mesh):        # the run's own mesh may order the devices differently
            most = jax.jit(lambda rows: jnp.max(rows, 0), out_shardings=NamedSharding(mesh, PartitionSpec()))
            self._most = most.lower(self._on_time[0]).compile()

    def _place(self, wish: int, late_ms: int) -> jax.Array:
        """Place a request and a delay on this process's devices. The maximum over all devices gives the request, the
        latest process and its delay."""
        row = np.array([[wish, late_ms << INDEX_BITS | jax.process_index() % (1 << INDEX_BITS), -late_ms]], np.int32)
        return jax.make_array_from_callback(self._shape, self._split, lambda index: row)

    def ask(self, wish: int, late_s: float | None = None) -> int:
        """Return the reason for which all processes stop now: the largest wish of the previous step; 0: go on. Every
        process calls it once per step. A single process gets its own wish. wish: 1 or 2 if this process should stop.

        late_s: seconds for which this process's devices were idle before the step; None: unknown, in all processes.
        """
        if jax.process_count() == 1:
            return wish
        late_ms = min(int(1e3 * (late_s or 0.0)), MOST_LATE_MS)
        before, known = self._before, self._known
        self._before = self._most(self._place(wish, late_ms) if late_ms else self._on_time[wish])
        self._known = late_s is not None
        if before is None:
            return False
        stop, latest, least = map(int, jax.device_get(before))
        self.late = (latest % (1 << INDEX_BITS), ((latest >> INDEX_BITS) + least) / 1000) if known else None
        return stop


def _outcome(error: Exception) -> dict:
    """Return the description of an error for the other processes."""
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "messages": error.messages}
    if told := custom.find_misuse(error):
        return {"kind": "ConfigError", "messages": [told]}
    message = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
    return {"kind": "PeerError", "messages": [message]}


def _again(outcome: dict) -> Exception:
    kinds = {"ConfigError": ConfigError, "ValueError": ValueError, "PeerError": PeerError}
    kind, messages = outcome["kind"], outcome["messages"]
    return mark_agreed(kinds[kind](*(messages if kind == "ConfigError" else ["\n".join(messages)])))


def _broadcast(value: Any) -> Any:
    """Return process 0's JSON-able value in every process."""
    _gather()
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    return json.loads(multihost_utils.broadcast_one_to_all(_pad(text[:size], size)).tobytes()[:size])


def _pad(text: np.ndarray, size: int) -> np.ndarray:
    """Pad to at least `size` bytes. The size is a power of two, so that few programs are compiled."""
    padded = np.zeros(max(64, 1 << (int(size) - 1).bit_length()), np.uint8)
    padded[:len(text)] = text
    return padded
