"""What the processes of a run decide together: collectives on small facts.

One process asks the file system and all know, all stop after the same step, all have read the same. With one process
everything here is a plain call. This module knows no run, model or data; those who call it must do so in the same order
in every process.
"""
from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain import jax_private
from meshtrain.cluster import lost
from meshtrain.cluster.lost import PeerError
from meshtrain.cluster.meet import named
from meshtrain.config import ConfigError

INDEX_BITS, MOST_LATE_MS = 15, 65_535      # a process and its milliseconds in 31 bits


def on_first(function: Callable):
    """function() is run by process 0 alone; every process returns its value, which must be JSON-able.

    Raises: in every process, what function() raised in process 0: ConfigError and ValueError as such (where a
    ValueError is meant as a mistake, `user_errors` stands around the call), anything else as PeerError in the others.
    `told_by_first` and `leave` know such an error again.
    """
    if jax.process_count() == 1:
        return function()
    told, raised = {}, None
    if jax.process_index() == 0:
        try:
            told = {"value": function()}
            json.dumps(told)
        except Exception as error:
            value = isinstance(error, ValueError) and not isinstance(error, ConfigError)
            raised, told = error, {"kind": "ValueError", "messages": [str(error)]} if value else _outcome(error)
    told = _broadcast(told)
    if raised is not None:
        raise agreed(raised)
    if "kind" in told:
        lone = told["kind"] == "PeerError"
        raise _again(told | {"messages": [f"process 0: {message}" if lone else message
                                          for message in told["messages"]]})
    return told["value"]


def everywhere(function: Callable):
    """function() is run by every process and each returns its own value, of any kind.

    Raises: in every process, where function() raised in some. ConfigError where it did in all: the mistake is in what
    they share, the run. A ConfigError of some alone is a fault of their hosts (a mount that is missing, a directory
    that cannot be written), and PeerError that names them. Anything else comes out of the first process that raised it
    as it is, with its traceback, and as PeerError of the others.
    """
    if jax.process_count() == 1:
        return function()
    value, raised = None, None
    try:
        value = function()
    except Exception as error:
        raised = error
    outcomes = exchange(None if raised is None else _outcome(raised))
    failed = {index: outcome for index, outcome in enumerate(outcomes) if outcome is not None}
    if not failed:
        return value
    mistake = len(failed) == len(outcomes) and all(outcome["kind"] == "ConfigError" for outcome in failed.values())
    own = next((index for index, outcome in failed.items() if outcome["kind"] != "ConfigError"), None)
    if raised is not None and jax.process_index() == own:
        raise agreed(raised)
    texts: dict[tuple, list[int]] = {}
    for index, outcome in failed.items():
        texts.setdefault(tuple(outcome["messages"]), []).append(index)
    unanimous = len(texts) == 1 and len(failed) == len(outcomes)
    messages = [message if unanimous else f"{named(indices)}: {message}"
                for text, indices in texts.items() for message in text]
    raise _again({"kind": "ConfigError" if mistake else "PeerError", "messages": messages}) from raised


def same_everywhere(name: str, text: str) -> None:
    """Raises: ConfigError in every process, with the lines that differ and who has which, unless all give the same
    text."""
    holders: dict[str, list[int]] = {}
    for index, other in enumerate(exchange(text)):
        holders.setdefault(other, []).append(index)
    if len(holders) > 1:
        common = set.intersection(*(set(other.splitlines()) for other in holders))
        told = "; ".join(f"{named(indices)}: {', '.join(line for line in other.splitlines() if line not in common)}"
                         for other, indices in holders.items())
        raise _again({"kind": "ConfigError", "messages": [
            f"{name} is not the same in every process ({told}); give all of them the same files and flags"]})


def told_by_first(error: BaseException) -> bool:
    """Whether process 0 has raised the same error, so that this process (another one) need not tell it."""
    return getattr(error, "agreed", False) and jax.process_index() != 0


def exchange(value) -> list:
    """The JSON-able values of all processes, in their order: the same list in every process."""
    if jax.process_count() == 1:
        return [value]
    _gather()
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(text))))
    rows = multihost_utils.process_allgather(_padded(text, max(sizes)))
    return [json.loads(row.tobytes()[:size]) for row, size in zip(rows, sizes, strict=True)]


def agreed(error: Exception) -> Exception:
    """Marks an error that every process raises: process 0 tells it, and all end in order."""
    error.agreed = True
    return error


# Seconds that an agreement waits for those that do not come; the watchdog gives it those of the phase.
patience_s: Callable[[], float] = lambda: MOST_PATIENCE_S
MOST_PATIENCE_S = 7 * 24 * 3600.0
_gathered = 0


def _gather() -> None:
    """All processes come together before they agree by collectives, which wait for ever and name nobody.

    Raises: PeerError that names who did not come.
    """
    global _gathered
    _gathered, client, limit_s = _gathered + 1, jax_private.coordination_client(), min(patience_s(), MOST_PATIENCE_S)
    if client is None:
        return
    try:
        client.wait_at_barrier(f"meshtrain agreement {_gathered}", int(limit_s * 1000))
    except Exception as error:
        gone = lost.others(error)
        if not gone:
            raise
        raise PeerError(f"{named(gone)} of {jax.process_count()} did not come to an agreement within {limit_s:.0f} s; "
                        f"look at what {'it' if len(gone) == 1 else 'they'} said") from None


def leave_word(key: str, text: str) -> None:
    """For another process to find by `word`, from any thread, whatever the others do. Raises nothing: it may not
    arrive."""
    with contextlib.suppress(Exception):
        jax_private.coordination_client().key_value_set(f"meshtrain {key}", text)


def word(key: str) -> str:
    """What a process has left under this key; empty where it has left nothing."""
    with contextlib.suppress(Exception):
        return jax_private.coordination_client().key_value_try_get(f"meshtrain {key}")
    return ""


def part(timeout_s: float = 5.0) -> None:
    """Before this process ends at once: waits for those that were told to stop as well, while all others compile or
    read.

    The moment that process 0 is gone, jax aborts the rest: it goes last. Raises nothing: alone it has waited long
    enough.
    """
    if jax.distributed.is_initialized():
        with contextlib.suppress(Exception):
            ocp.multihost.get_barrier_sync_fn()(key="part", timeout_ms=int(timeout_s * 1000))
        time.sleep(0.5 * (jax.process_index() == 0))


class StopAgreement:
    """All processes stop after the same step, the one after that in which one of them wished to;
    and they know who came last to it.

    The wishes of a step are read a step later, when they have long arrived: nobody waits. Moves 12 bytes per device and
    step. late: (process, seconds) of the step that was read last: whose host came latest, by how much more than the
    least late of all; None: not known.
    """

    def __init__(self):
        self.late: tuple[int, float] | None = None
        if jax.process_count() == 1:
            return
        self._before, self._told = None, False
        devices = np.array(jax.devices())
        mesh = Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))
        self._shape, self._split = (len(devices), 3), NamedSharding(mesh, PartitionSpec("devices"))
        self._on_time = {wish: self._placed(wish, 0) for wish in (False, True)}
        with jax.set_mesh(mesh):        # the run's mesh, in force around this, may have the devices in another order
            self._most = jax.jit(lambda rows: jnp.max(rows, 0),
                                 out_shardings=NamedSharding(mesh, PartitionSpec())).lower(
                self._on_time[False]).compile()

    def _placed(self, wish: bool, late_ms: int) -> jax.Array:
        """Of this process's devices; the maximum over all tells the wish, who is latest and by how much, and the least
        late."""
        row = np.array([[wish, late_ms << INDEX_BITS | jax.process_index() % (1 << INDEX_BITS), -late_ms]], np.int32)
        return jax.make_array_from_callback(self._shape, self._split, lambda index: row)

    def reached(self, wish: bool, late_s: float | None = None) -> bool:
        """Called by every process once a step: whether all stop now. With one process that is its wish.

        late_s: how long this process's devices had nothing to do until it came; None, in all processes alike: not
        known.
        """
        if jax.process_count() == 1:
            return wish
        late_ms = min(int(1e3 * (late_s or 0.0)), MOST_LATE_MS)
        before, told = self._before, self._told
        self._before, self._told = self._most(self._placed(wish, late_ms) if late_ms else
                                              self._on_time[bool(wish)]), late_s is not None
        if before is None:
            return False
        stop, latest, least = map(int, jax.device_get(before))
        self.late = (latest % (1 << INDEX_BITS), ((latest >> INDEX_BITS) + least) / 1000) if told else None
        return bool(stop)


def _outcome(error: Exception) -> dict:
    """What the other processes are told of it."""
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "messages": error.messages}
    told = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
    return {"kind": "PeerError", "messages": [told]}


def _again(outcome: dict) -> Exception:
    kinds = {"ConfigError": ConfigError, "ValueError": ValueError, "PeerError": PeerError}
    messages = outcome["messages"]
    return agreed(kinds[outcome["kind"]](*(messages if outcome["kind"] == "ConfigError" else ["\n".join(messages)])))


def _broadcast(value):
    """Process 0's JSON-able value, in every process."""
    _gather()
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    return json.loads(multihost_utils.broadcast_one_to_all(_padded(text[:size], size)).tobytes()[:size])


def _padded(text: np.ndarray, size: int) -> np.ndarray:
    """At least `size` bytes; powers of two, so that few programs are compiled."""
    padded = np.zeros(max(64, 1 << (int(size) - 1).bit_length()), np.uint8)
    padded[:len(text)] = text
    return padded
