"""The words by which a process says that it has lost others, or which one: XLA, Gloo, NCCL and jax's coordination
service tell it in words alone. One table for the process itself and for the launchers, which read what it said. No
jax."""
from __future__ import annotations

import re


class PeerError(RuntimeError):
    """The processes of a run did not come together, or one of them failed alone; says which."""


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
    """The processes that an error says are gone, in order, none where it names none; None: it is no loss of others."""
    text = str(error)
    if not (isinstance(error, PeerError) or LOST.search(text)):
        return None
    found = {int(index) for pair in NAMED.findall(text) for index in pair if index}
    for listed in TIMED_OUT.findall(text):
        found |= {int(index) for index in re.findall(r"(\d+)\s*(?:\n|$)", listed)}
    return sorted(found)


# ---- in a line that a process wrote ----------------------------------------------------------------------------------

# jax ends a process that has lost its peers with this and a C++ stack trace.
LOST_PEERS = b"Terminating process because the JAX distributed service detected fatal errors"
LATE = re.compile(rb"Gloo .*Timed out waiting")      # for one that is not dead
# By a process that ended of another's failure: from libraries, and from our own meeting.
VICTIM = re.compile(b"|".join([LOST_PEERS, LATE.pattern, CONNECTION.encode(), (
    rb"PeerError: | waits for the others in | has lost process \d|"
    rb"error: process(es)? [\d, and]+(of \d+ did not come to|: )")]))
# Whom the coordination service, or process 0 at the meeting, has not heard of.
UNHEARD = re.compile(rb"\bTask (\d+) heartbeat timeout|error: process (\d+) of \d+ did not come")
# Of process 0, where jax's service takes that very process for dead: it goes by the wall clock.
CLOCK_SET = re.compile(rb"stopped sending heartbeats\):\s+(?:\S+\n)*?(?:\S*task:)?0\n")
# By process 0, for the reason that all end with.
BLAMED = re.compile(rb"^error: .* not saved in .*?: process (\d+): ")
NOT_SAVED = b" not saved in "       # a full disk of one process: the run goes on, and process 0 has no reason to tell
MISMATCHED = b"gloo::EnforceNotMet"     # two collectives of one group met that are not the same
