"""Errors of a process that has lost others: whoever raises one is a victim, and it may say of whom.

XLA, Gloo, NCCL and jax's coordination service tell it in words alone. This module starts nothing.
"""
from __future__ import annotations

import re

from meshtrain.cluster.meet import PeerError

# Gloo over TCP on CPUs · NCCL · jax's coordination service, its barriers, its connection to process 0.
LOST = re.compile(
    r"Gloo .*failed|gloo/transport|Connection (?:closed|reset) by peer|Timed out waiting \d+ms|"
    r"ncclRemoteError|ncclSystemError|NCCL .*(?:remote process exited|connection|timed? ?out|abort)|"
    r"CoordinationService|coordination service|Barrier (?:timed out|failed)|stopped sending heartbeats|"
    r"rendezvous.*(?:timed? ?out|DEADLINE)|DEADLINE_EXCEEDED|Socket closed", re.IGNORECASE)
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
