"""Simulates a compiled program on one GPU with a compute stream and a communication stream, in XLA's order.

XLA's text is a schedule: instructions are in the order of issue. Kernels run one after the other. An asynchronous
collective occupies the communication stream from its start, and its done waits for it; a synchronous one blocks both
streams. A loop's body is simulated once, from empty streams, and multiplied by its trips. Not modelled: concurrent
kernels, collectives in flight when a loop with collectives begins, and devices that wait for each other.
"""
from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction

from meshtrain.cost.program import hlo, work

Key = tuple[str, str]       # (computation, instruction)


@dataclasses.dataclass
class Transfer:
    """Seconds of one collective instruction, summed over its executions."""
    runs: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0          # seconds in which the compute stream waits for it or for a later one
    under: Counter = dataclasses.field(default_factory=Counter)     # part → seconds hidden by its kernels

    def add(self, other: Transfer, times: float | Fraction) -> None:
        self.runs += times * other.runs
        self.seconds += times * other.seconds
        self.exposed_s += times * other.exposed_s
        for part, seconds in other.under.items():
            self.under[part] += times * seconds

    @property
    def hidden_s(self) -> float:
        return self.seconds - self.exposed_s


@dataclasses.dataclass
class Played:
    """The result of a simulation. seconds: the time of kernels and of waiting. parts: seconds of kernels by part."""
    seconds: float = 0.0
    parts: Counter = dataclasses.field(default_factory=Counter)
    kernels: Counter = dataclasses.field(default_factory=Counter)                   # Key → runs
    transfers: dict[Key, Transfer] = dataclasses.field(default_factory=dict)

    def add(self, other: Played, times: float | Fraction = 1) -> None:
        self.seconds += times * other.seconds
        for mine, others in ((self.parts, other.parts), (self.kernels, other.kernels)):
            for key, count in others.items():
                mine[key] += times * count
        for key, transfer in other.transfers.items():
            self.transfers.setdefault(key, Transfer()).add(transfer, times)

    @property
    def exposed_s(self) -> float:
        return sum(transfer.exposed_s for transfer in self.transfers.values())


@dataclasses.dataclass(frozen=True)
class Prices:
    """Functions that return costs of instructions.

    kernel(computation, instruction) returns (seconds, part). collective(computation, instruction) returns (seconds,
    whether it is asynchronous, its rows), or None if the instruction is no collective.
    """
    kernel: Callable[[str, hlo.Instruction], tuple[float, str]]
    collective: Callable[[str, hlo.Instruction], tuple[float, bool, tuple] | None]


def play(module: hlo.HloModule, trips: Mapping[str, float], prices: Prices) -> Played:
    """Simulate the entry computation. trips: the iterations of each loop, by the name of its `while`. A conditional
    counts its costliest branch, times the fraction of executions that run it."""
    @functools.cache
    def simulate(name: str) -> Played:
        stream = _Streams()
        for ins in module.computations[name].values():
            if not work.free(ins):
                _issue(stream, name, ins, prices, trips, simulate)
        return stream.close()

    step = simulate(module.entry)
    # Counts are fractions where a branch runs in a fraction of the executions.
    step.kernels = Counter({key: round(runs) for key, runs in step.kernels.items()})
    for transfer in step.transfers.values():
        transfer.runs = round(transfer.runs)
    return step


def loop_trips(module: hlo.HloModule, further_rounds: float = 0) -> tuple[dict[str, float], list[str]]:
    """Return (iterations of every loop by the name of its `while`, names of the loops of unknown length). A loop of
    unknown length counts once. further_rounds: iterations of a loop that runs only if experts are unbalanced."""
    visits, unknown = hlo.walk(module, lambda ins: ins.op == "while" or ins.is_root)
    runs: Counter[tuple[str, str]] = Counter()
    for visit in visits:
        runs[visit.computation, visit.instruction.name] += visit.trips
    trips = {}
    for name, body in module.computations.items():
        for ins in body.values():
            if ins.op == "while" and runs[name, ins.name]:
                inner = ins.required("body")
                root = hlo.root(module.computations[inner]).name
                trips[ins.name] = further_rounds if ins.further_rounds else runs[inner, root] // runs[name, ins.name]
    return trips, unknown


class _Streams:
    """The compute stream and the communication stream in one computation, and what they have run."""

    def __init__(self):
        self.total, self.link_free = Played(), 0.0
        self.kernels: list[tuple[float, float, dict[str, float]]] = []      # from, until, share of each part
        self.link: list[tuple[float, float, Key]] = []                      # from, until, collective
        self.flying: dict[str, float] = {}                                  # name of a -start → its end

    @property
    def clock(self) -> float:
        return self.total.seconds

    def compute(self, inner: Played, times: float | Fraction = 1) -> None:
        if not times:
            return
        begin = self.clock
        self.total.add(inner, times)
        if self.clock > begin:
            shares = {part: times * seconds / (self.clock - begin) for part, seconds in inner.parts.items()}
            self.kernels.append((begin, self.clock, shares))

    def start(self, key: Key, seconds: float) -> float:
        """Put a collective on the communication stream and return the time at which it ends."""
        begin = max(self.clock, self.link_free)
        self.link_free = begin + seconds
        self.link.append((begin, self.link_free, key))
        self.total.transfers.setdefault(key, Transfer()).add(Transfer(1, seconds), 1)
        return self.link_free

    def wait(self, end: float) -> None:
        """Block the compute stream until `end`. The time of collectives on the link meanwhile counts as exposed."""
        if end > self.clock:
            for begin, until, key in _since(self.link, self.clock):
                self.total.transfers[key].exposed_s += max(0.0, min(until, end) - max(begin, self.clock))
            self.total.seconds = end

    def close(self) -> Played:
        """Attribute the hidden seconds of each collective to the kernels that ran at the same time. Return the
        totals."""
        for begin, end, key in self.link:
            for since, until, shares in _since(self.kernels, begin):
                for part, share in shares.items():
                    if since < end:
                        self.total.transfers[key].under[part] += share * (min(until, end) - max(since, begin))
        return self.total


def _since(intervals: list, begin: float) -> list:
    """Return the intervals that end after `begin`. `intervals` is in order of time."""
    return intervals[bisect.bisect_right(intervals, begin, key=lambda interval: interval[1]):]


def _issue(streams: _Streams, name: str, ins: hlo.Instruction, prices: Prices, trips: Mapping[str, float],
           simulate: Callable[[str], Played]) -> None:
    key = name, ins.name
    if ins.op.endswith("-done"):
        for operand in ins.operands:
            streams.wait(streams.flying.pop(operand, 0.0))
    elif ins.op.endswith("-update"):
        pass
    elif transfer := prices.collective(name, ins):
        seconds, is_async, _ = transfer
        end = streams.start(key, seconds)
        if is_async:
            streams.flying[ins.name] = end
        else:
            streams.wait(end)
    elif ins.op == "while":
        streams.compute(simulate(ins.required("body")), trips.get(ins.name, 1))
    elif ins.op in ("call", "async-start"):
        streams.compute(simulate(ins.callees[0]))
    elif ins.op == "conditional":
        longest = max((simulate(branch) for branch in ins.callees), key=lambda branch: branch.seconds)
        streams.compute(longest, ins.branch_share)
    else:
        seconds, part = prices.kernel(name, ins)
        streams.compute(Played(seconds, Counter({part: seconds}), Counter({key: 1})))
