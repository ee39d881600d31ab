"""Error messages by which XLA, Gloo, NCCL and jax's coordination service report lost processes. The process itself and
the launchers, which read its output, share this table. This module does not import jax."""
from __future__ import annotations

import re


class PeerError(RuntimeError):
    """Processes of a run did not meet, or some processes failed alone. The message names these processes."""


# ---- in the message of an error --------------------------------------------------------------------------------------

CONNECTION = (r"Connection (?:closed|reset) by peer|stopped sending heartbeats|ncclRemoteError|ncclSystemError|"
              r"NCCL .*(?:remote process exited|connection|timed? ?out|abort)")
# Gloo over TCP on CPUs · NCCL · jax's coordination service, its barriers, its connection to process 0.
LOST = re.compile(
    rf"{CONNECTION}|Gloo .*failed|gloo/transport|Timed out waiting \d+ms|CoordinationService|coordination service|"
    r"Barrier (?:timed out|failed)|rendezvous.*(?:timed? ?out|DEADLINE)|DEADLINE_EXCEEDED|Socket closed", re.IGNORECASE)
NAMED = re.compile(r"/task:(\d+)|\bTask (\d+) heartbeat")
TIMED_OUT = re.compile(r"(?:timed out task names|stopped sending heartbeats\)):\s*\n?((?:\s*(?:\S*task:)?\d+\s*\n?)+)")


def others(error: BaseException | str) -> list[int] | None:
    """Return the processes that an error reports as lost, sorted; [] if it names none; None: another kind of error."""
    text = str(error)
    if not (isinstance(error, PeerError) or LOST.search(text)):
        return None
    indices = {int(index) for pair in NAMED.findall(text) for index in pair if index}
    for listed in TIMED_OUT.findall(text):
        indices |= {int(index) for index in re.findall(r"(\d+)\s*(?:\n|$)", listed)}
    return sorted(indices)


# ---- in a line that a process wrote ----------------------------------------------------------------------------------

# jax aborts a process that lost its peers with this and a C++ stack trace.
LOST_PEERS = b"Terminating process because the JAX distributed service detected fatal errors"
LATE = re.compile(rb"Gloo .*Timed out waiting")      # the peer may be alive
# Written by a process that ended because another failed: by libraries, and by our own rendezvous.
SECONDARY = re.compile(b"|".join([LOST_PEERS, LATE.pattern, CONNECTION.encode(), (
    rb"PeerError: | waits for the others in | has lost process \d|"
    rb"error: process(es)? [\d, and]+(of \d+ did not (connect to|answer at)|: )")]))
# Processes missing at the coordination service, or at process 0's rendezvous.
UNHEARD = re.compile(rb"\bTask (\d+) heartbeat timeout|error: process (\d+) of \d+ did not (?:connect|answer)")
# Written by process 0 if jax's service, which uses the wall clock, declares process 0 dead.
CLOCK_SET = re.compile(rb"stopped sending heartbeats\):\s+(?:\S+\n)*?(?:\S*task:)?0\n")
# Written by process 0: the reason why all processes end.
BLAMED = re.compile(rb"\berror: .* not saved in .*?: process (\d+): ")
NOT_SAVED = b" not saved in "       # one process's disk is full: the run goes on, and process 0 reports nothing
MISMATCHED = b"gloo::EnforceNotMet"     # processes of one group called different collectives
