"""Pipeline schedules as data: the ops, microbatches and buffer slots of each stage in every tick.

`make` builds a schedule, `cost.formulas.simulate` estimates its time, and the executor `training.executor` runs it.
tests/layouts/test_schedules.py verifies all schedules of up to 8 stages with tests/schedule_check.py. This module
imports numpy, but no jax, model or devices.

Legend: P stages, M microbatches, V chunks (a chunk is a group of consecutive layers; a stage has V of them), T ticks.
Virtual stage g = chunk · P + stage holds layers g·L/(VP) up to (g+1)·L/(VP). F is a forward, B an input gradient, W a
weight gradient. If the schedule has no W, B computes both gradients.

A tick runs F, loss, B and W in this order, each on all stages at once. Idle stages compute, too, and discard the
result. Consecutive ticks with the same ops form a phase, which is one scan. All stages have the same control flow, so
collectives may be anywhere. Sources: arXiv:1811.06965 (GPipe), arXiv:2006.09503 (1F1B), arXiv:2104.04473 (interleaved),
arXiv:2401.10241 (zero bubble).
"""
from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import re
from collections.abc import Mapping, Sequence

import numpy as np

from meshtrain.names import PIPELINE_SCHEDULES

F, B, W = 0, 1, 2
KINDS = "FBW"
# Moments inside a tick, in the order in which the executor accesses its buffers.
MOMENT = {"F": 1, "loss": 2, "B": 3, "W": 4, "arrive": 7}
TICK = 8
NAMES = tuple(PIPELINE_SCHEDULES)
INTERLEAVED = tuple(name for name, what in PIPELINE_SCHEDULES.items() if what.chunked)
SPLIT = tuple(name for name, what in PIPELINE_SCHEDULES.items() if what.split)
MOST_OPS = 200_000       # F of all microbatches, stages and chunks; larger schedules take minutes to build and compare


@dataclasses.dataclass(frozen=True)
class TickRange:
    """Ticks start … stop−1, which run the same ops and therefore are one scan.

    kinds: the letters of "FBW" that any stage runs. loss: "never", "always" or "sometimes". With "sometimes",
    `Schedule.shared["loss_on"]` says in which ticks. This column is equal on all stages, so all stages take the same
    branch of the `cond`.
    """
    start: int
    stop: int
    kinds: str
    loss: str


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A complete schedule: everything that an executor needs.

    ops [T, P, 3, 2]: (microbatch, chunk) of F, B and W; −1 if idle. Columns and slots are derived from ops.

    Buffers. `slots` has the number of entries of each buffer, the same on every stage because all stages run one
    program:

      X  stage inputs: from arrival until F has read them
      R  residuals that F saves for B
      Q  residuals that F saves for the weight gradient (in W, or in B if there is no W)
      D  cotangents of stage outputs: from arrival, or from the loss, until B has read them
      Z  values that B passes to W; only if there is a W

    columns {name: int32 [T, P]}. Slot columns are valid indices in every tick. On idle stages they point to a free
    slot, which a masked op may overwrite.

      F_on F_mb F_chunk     whether this stage runs F in this tick, its microbatch and chunk
      F_first               1: virtual stage 0. Its input is the embedding of F_mb, not X[F_x]
      F_x F_r F_q           F reads X[F_x] and writes R[F_r], Q[F_q]
      loss_here loss_d      1: F is of the last virtual stage; this tick has the loss of its output, which writes
                            D[loss_d]
      B_on B_mb B_chunk     like F
      B_first               1: virtual stage 0. The result of B is the cotangent of the embedding of B_mb
      B_r B_q B_d B_z       B reads R[B_r], Q[B_q], D[B_d] and writes Z[B_z]
      W_on W_mb W_chunk W_q W_z   like F; W reads Q[W_q], Z[W_z]
      y_out dx_out          1: stage s+1 (s−1), modulo P, needs this tick's result of F (B)
      y_in dx_in            slots X[y_in], D[dx_in] for the result of F (B) of stage s−1 (s+1) in THIS tick; written
                            after W of this tick and before F of the next
      y_in_on dx_in_on      1: this arrival is needed. 0: the output of the permute goes to a free slot and is ignored

    shared {name: int32 [T]}, equal on all stages, for the embedding and head, which all stages compute together:

      embed_on embed_mb     the microbatch whose embedding virtual stage 0 reads in this tick
      loss_on loss_mb       the microbatch whose loss is in this tick
      embed_grad_on embed_grad_mb   the microbatch for whose embedding B on stage 0 computes the cotangent in this tick

    peak [P]: the largest number of (microbatch, chunk) pairs alive on a stage, from F through their last backward op.
    Divide by V for the number of microbatches of a whole stage.
    """
    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    split: bool
    ops: np.ndarray
    peak: np.ndarray
    columns: Mapping[str, np.ndarray]
    shared: Mapping[str, np.ndarray]
    slots: Mapping[str, int]

    @property
    def num_ticks(self) -> int:
        return len(self.ops)

    @property
    def executed(self) -> dict[str, int]:
        """Executions of each op per device and step, masked or not.

        Keys: F, loss, B, W. The program also sends once to the next stage for every F, and once to the previous stage
        for every B.
        """
        ticks = (self.ops[..., 0] >= 0).any(1)
        return dict(zip(KINDS, ticks.sum(0).tolist())) | {"loss": int(self.shared["loss_on"].sum())}

    def phases(self) -> list[TickRange]:
        """The ticks in order, grouped into scans. Several consecutive ticks with a loss are a separate phase.

        Each scan is compiled separately. A `cond` around W would save one scan, but XLA copies the values that pass
        through it: on GPUs these are a stage's float32 gradients, twice a tick.
        """
        return _phases((self.ops[..., 0] >= 0).any(1), self.shared["loss_on"])


def _phases(active: np.ndarray, loss: np.ndarray) -> list[TickRange]:
    """Group ticks into phases. active [T, 3]: whether any stage runs F, B, W. loss [T]: whether the tick has a loss."""
    phases = []
    for start, stop in _equal_stretches(active):
        kinds = "".join(k for k, on in zip(KINDS, active[start]) if on)
        stretches = _equal_stretches(loss[start:stop])
        if loss[start:stop].sum() != 1 and len(stretches) <= 3 and sum(loss[start + a] for a, _ in stretches) <= 1:
            phases += [TickRange(start + a, start + b, kinds, "always" if loss[start + a] else "never")
                      for a, b in stretches]
        else:
            phases.append(TickRange(start, stop, kinds, "sometimes"))
    return phases


def often(on: np.ndarray, num_chunks: int) -> str:
    """Return how often a phase computes embeddings or their gradients, in the words of `TickRange.loss`.

    on: whether each tick of the phase needs an embedding or its gradient. Embeddings are cheap. Without chunks, or if
    at least half of the ticks need an embedding, every tick computes one and masks unneeded results.
    """
    few = num_chunks > 1 and on.mean() < 0.5
    return "never" if not on.any() else "sometimes" if few else "always"


def _equal_stretches(ticks: np.ndarray) -> list[tuple[int, int]]:
    """[(start, stop)] of the maximal runs of equal ticks [T, …]."""
    ticks = ticks.reshape(len(ticks), -1)
    cuts = [0, *(np.flatnonzero((ticks[1:] != ticks[:-1]).any(1)) + 1).tolist(), len(ticks)]
    return list(zip(cuts[:-1], cuts[1:]))


# ---- generators ------------------------------------------------------------------------------------------------------


def problems(name: str, p: int, m: int, v: int = 1) -> list[str]:
    """Return the reasons why this schedule does not exist, in the run file's terms; empty if it exists."""
    faults = []
    if name not in PIPELINE_SCHEDULES:
        faults.append(f'pipeline.schedule="{name}" is unknown; use one of {", ".join(NAMES)}')
    for key, size in (("mesh.stage", p), ("training.microbatches", m), ("pipeline.chunks", v)):
        if size < 1:
            faults.append(f"{key}={size} must be at least 1")
    if not faults and p * m * v > MOST_OPS:
        faults.append(f"training.microbatches={m} × mesh.stage={p} × pipeline.chunks={v} make a schedule of "
                      f"{p * m * v} ops, more than {MOST_OPS}; "
                      f"use fewer microbatches, at most {max(1, MOST_OPS // (p * v))}")
    if faults:
        return faults
    if v > 1 and not PIPELINE_SCHEDULES[name].chunked:
        remedy = "interleaved_zero_bubble" if PIPELINE_SCHEDULES[name].split else "interleaved"
        faults.append(f'pipeline.schedule="{name}" has one chunk of layers on each stage, not pipeline.chunks={v}; '
                      f'use pipeline.chunks=1, or pipeline.schedule="{remedy}"')
    elif v > 1 and m % p:
        near = [n for n in (m // p * p, (m // p + 1) * p) if n]
        faults.append(f"training.microbatches={m} is not a multiple of mesh.stage={p}, which pipeline.chunks={v} "
                      f"needs; use {' or '.join(map(str, near))}, or pipeline.chunks=1")
    return faults


def make(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Build the schedule `pipeline.schedule` = name for p stages, m microbatches and v chunks.

    Raises: ValueError with the value, the rule and the remedy if there is no such schedule.
    """
    faults = problems(name, p, m, v)
    if faults:
        raise ValueError("\n".join(faults))
    split = PIPELINE_SCHEDULES[name].split
    return _schedule(name, p, m, v, split, _ops(p, m, v, split, _first_b(name, p, m, v)))


def _first_b(name: str, p: int, m: int, v: int) -> int:
    """The tick of the first B: the one after the last stage's first loss."""
    return v * m + p - 1 if PIPELINE_SCHEDULES[name].forwards_first else v * p


@functools.lru_cache(maxsize=4096)
def counts(name: str, p: int, m: int, v: int = 1) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return (`executed`, `slots`) of the schedule of `make` without building it, so that thousands can be compared."""
    ops, what = m * v, PIPELINE_SCHEDULES[name]
    executed = {"F": ops + p - 1, "B": ops + p - 1, "W": ops if what.split else 0, "loss": m}
    kept = ops + 1 if what.forwards_first else min((v + 1) * p, ops + 1)
    slots = {"X": 1, "R": kept, "Q": kept, "D": m + 1 if what.forwards_first else 2}
    return executed, slots | ({"Z": min(p, ops + 1)} if what.split else {})


@functools.lru_cache(maxsize=4096)
def ends_executed(name: str, p: int, m: int, v: int = 1) -> tuple[int, int]:
    """Return (embedding lookups, embedding gradients) per step of the schedule of `make`, including masked ones.

    The schedule is not built. The ticks are those of `_ops`.
    """
    n, split, first_b = m * v, PIPELINE_SCHEDULES[name].split, _first_b(name, p, m, v)
    chunk = np.array([chunk for _, chunk in _rounds(p, m, v)])
    active, on = np.zeros((first_b + n + p - 1, 3), bool), np.zeros((3, first_b + n + p - 1), bool)
    active[:n + p - 1, F] = active[first_b:, B] = True
    active[first_b + p - 1:, W] = split
    embed, loss, embed_grad = on
    embed[:n], loss[p - 1:p - 1 + n], embed_grad[first_b + p - 1:] = chunk == 0, chunk == v - 1, chunk == v - 1

    def ticks(on, phase: TickRange) -> int:
        here = on[phase.start:phase.stop]
        return {"never": 0, "sometimes": int(here.sum()), "always": len(here)}[often(here, v)]
    phases = _phases(active, loss)
    return sum(ticks(embed, phase) for phase in phases), sum(ticks(embed_grad, phase) for phase in phases)


def _ops(p: int, m: int, v: int, split: bool, first_b: int) -> np.ndarray:
    """Return ops [T, P, 3, 2]. A neighbouring stage uses each result in the next tick, as in a systolic array.

    Stage s runs F number i in tick i + s, B number i in first_b + i + p−1−s, and W number i in first_b + i + p−1.
    """
    forward = _rounds(p, m, v)
    backward = [(i, v - 1 - chunk) for i, chunk in forward]
    n = m * v
    ops = np.full((first_b + n + p - 1, p, 3, 2), -1, np.int32)
    for s in range(p):
        ops[s:s + n, s, F] = forward
        ops[first_b + p - 1 - s:, s, B][:n] = backward
        if split:
            ops[first_b + p - 1:, s, W][:n] = backward
    return ops


def _rounds(group: int, m: int, v: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in forward order: `group` microbatches through chunk 0, then through chunk 1, …"""
    return [(i, chunk) for first in range(0, m, group) for chunk in range(v)
            for i in range(first, min(first + group, m))]


# ---- tables of one's own ---------------------------------------------------------------------------------------------

CELL = re.compile(r"([FBW])(\d{1,5})([a-z]?)")
IDLE = ("·", ".", "-", "_")


def parse(text: str, name: str = "table") -> Schedule:
    """Build a schedule from a table with a line per stage and a word per tick, as printed by `inspection.chart.text`.

    F3: the forward of microbatch 3. F3b: the forward through the stage's second chunk. B and W: the gradients. · or .
    or -: idle. F3+B0: both in one tick, which runs F before B before W. Without W, B computes both gradients.

    Raises: ValueError that lists each op that is missing, is repeated or comes before an op whose result it needs.
    """
    lines = [re.sub(r"^\s*stage\s*\d+:?", "", line).split() for line in text.splitlines() if line.strip()]
    ticks_of: dict[tuple[int, int, int], list[int]] = {}       # (kind of op, virtual stage, microbatch) -> ticks
    faults: list[str] = []
    for s, words in enumerate(lines):
        for t, word in enumerate(words):
            for cell in () if word in IDLE else word.split("+"):
                match = CELL.fullmatch(cell)
                if not match:
                    faults.append(f"stage {s}, tick {t}: {cell!r} is not an op; write F0, B12, W3, F0b, or · where "
                                  f"the stage is idle")
                    continue
                kind, i, chunk = KINDS.index(match[1]), int(match[2]), ord(match[3] or "a") - ord("a")
                ticks_of.setdefault((kind, chunk * len(lines) + s, i), []).append(t)
    if not ticks_of:
        faults = faults or ["the schedule is empty; write a line per stage with a word per tick, e.g. F0 F1 B0 B1"]
        raise ValueError("\n".join(faults))
    p, m = len(lines), 1 + max(i for _, _, i in ticks_of)
    v, split = 1 + max(g for _, g, _ in ticks_of) // p, any(kind == W for kind, _, _ in ticks_of)
    faults += _table_faults(ticks_of, p, m, v, split)
    if faults:
        raise ValueError("\n".join(faults[:MOST_FAULTS]))
    ops = np.full((max(map(len, lines)), p, 3, 2), -1, np.int32)
    for (kind, g, i), (t,) in ticks_of.items():
        ops[t, g % p, kind] = i, g // p
    return _schedule(name, p, m, v, split, ops)


MOST_FAULTS = 10


def _table_faults(ticks_of: Mapping[tuple[int, int, int], Sequence[int]], p: int, m: int, v: int, split: bool
                  ) -> list[str]:
    """Return messages about missing, repeated or early ops. ticks_of: (kind, virtual stage, microbatch) -> ticks."""
    faults = []

    def name_op(kind: int, g: int, i: int) -> str:
        return f"{KINDS[kind]}{i}{chr(ord('a') + g // p) if v > 1 else ''}"
    for i in range(m):
        for g in range(v * p):
            for kind in (F, B, W)[:2 + split]:
                ticks, op = ticks_of.get((kind, g, i), ()), name_op(kind, g, i)
                if len(ticks) != 1:
                    count = f"{len(ticks)} times" if ticks else "0 times"
                    faults.append(f"stage {g % p}: {op} appears {count}; every stage runs each op once for each "
                                  f"of {m} microbatches")
                    continue
                before = [(F, g - 1, 1)] * (g > 0) if kind == F else [(B, g, 0)] if kind == W else [
                    (F, g, 0), *[(B, g + 1, 1)] * (g < v * p - 1)]
                for needed, of, later in before:
                    at = ticks_of.get((needed, of, i), ())
                    if len(at) == 1 and ticks[0] < at[0] + later:
                        faults.append(f"stage {g % p}, tick {ticks[0]}: {op} needs {name_op(needed, of, i)} of stage "
                                      f"{of % p}, which is in tick {at[0]}; put it in tick {at[0] + later} or later")
    cells = collections.Counter((kind, g % p, t) for (kind, g, _), ticks in ticks_of.items() for t in ticks)
    faults += [f"stage {s}, tick {t}: {count} {KINDS[kind]} in one tick; a tick has at most one"
               for (kind, s, t), count in cells.items() if count > 1]
    return faults


# ---- slots -----------------------------------------------------------------------------------------------------------


def _schedule(name: str, p: int, m: int, v: int, split: bool, ops: np.ndarray) -> Schedule:
    """Build the schedule of these ops, with its columns and slots."""
    tick = _ticks(ops, p, m, v)
    last = tick[W if split else B]
    peak = np.zeros(p, np.int32)
    for s in range(p):
        change = np.zeros(len(ops) + 1, np.int32)
        np.add.at(change, tick[F, s::p].ravel(), 1)
        np.add.at(change, last[s::p].ravel() + 1, -1)
        peak[s] = change.cumsum().max()
    columns, shared = _work(ops, p, v)
    slot_columns, slots = _slots(ops, tick, p, m, v, split)
    return Schedule(name, p, m, v, split, ops, peak, columns | slot_columns, shared, slots)


def _ticks(ops: np.ndarray, p: int, m: int, v: int) -> np.ndarray:
    """[3, V·P, M]: the tick of each op, −1 if there is none."""
    tick = np.full((3, v * p, m), -1, np.int64)
    t, s, kind = np.nonzero(ops[..., 0] >= 0)
    i, chunk = ops[t, s, kind].T
    tick[kind, chunk * p + s, i] = t
    return tick


def _work(ops: np.ndarray, p: int, v: int):
    """Return (the columns that follow from ops, without slots; the shared columns)."""
    on = ops[..., 0] >= 0
    columns = {}
    for k, kind in enumerate(KINDS):
        columns[f"{kind}_on"] = on[:, :, k]
        columns[f"{kind}_mb"], columns[f"{kind}_chunk"] = np.maximum(ops[:, :, k, 0], 0), np.maximum(ops[:, :, k, 1], 0)
    virtual = ops[..., 1] * p + np.arange(p)[:, None]
    columns["F_first"], columns["B_first"] = (on[:, :, k] & (virtual[:, :, k] == 0) for k in (F, B))
    columns["loss_here"] = on[:, :, F] & (virtual[:, :, F] == v * p - 1)
    columns["y_out"], columns["dx_out"] = on[:, :, F] & ~columns["loss_here"], on[:, :, B] & ~columns["B_first"]
    columns["y_in_on"], columns["dx_in_on"] = np.roll(columns["y_out"], 1, 1), np.roll(columns["dx_out"], -1, 1)
    shared = {}
    for name, flag, kind in (("embed", "F_first", "F"), ("loss", "loss_here", "F"), ("embed_grad", "B_first", "B")):
        shared[f"{name}_on"] = columns[flag].any(1)
        shared[f"{name}_mb"] = (columns[f"{kind}_mb"] * columns[flag]).sum(1)
    return ({name: a.astype(np.int32) for name, a in columns.items()},
            {name: a.astype(np.int32) for name, a in shared.items()})


def _slots(ops: np.ndarray, tick: np.ndarray, p: int, m: int, v: int, split: bool):
    """Return (slot columns, slots of each buffer). A value takes the lowest slot that is free when it is created."""
    num_ticks, last_g = len(ops), p * v - 1
    weight_op = W if split else B

    def at(kind: int, g: int) -> list[int]:
        return (tick[kind, g] * TICK + MOMENT[KINDS[kind]]).tolist()

    def arrival(kind: int, g: int) -> list[int]:
        return (tick[kind, g] * TICK + MOMENT["arrive"]).tolist()

    def loss(g: int) -> list[int]:
        return (tick[F, g] * TICK + MOMENT["loss"]).tolist()
    # Per buffer: the columns that write it and when; the columns that read it and in which op; and the functions that
    # give the first and last moments of a virtual stage's values in it.
    buffers = {
        "X": ({"y_in": "arrive"}, {"F_x": F}, lambda g: arrival(F, g - 1) if g else [], lambda g: at(F, g)),
        "R": ({"F_r": "F"}, {"B_r": B}, lambda g: at(F, g), lambda g: at(B, g)),
        "Q": ({"F_q": "F"}, {"B_q": B} | ({"W_q": W} if split else {}), lambda g: at(F, g), lambda g: at(weight_op, g)),
        "D": ({"loss_d": "loss", "dx_in": "arrive"}, {"B_d": B},
              lambda g: loss(g) if g == last_g else arrival(B, g + 1), lambda g: at(B, g)),
    }
    if split:
        buffers["Z"] = ({"B_z": "B"}, {"W_z": W}, lambda g: at(B, g), lambda g: at(W, g))
    columns: dict[str, np.ndarray] = {}
    slots: dict[str, int] = {}
    for buffer, (written, read, born, gone) in buffers.items():
        columns |= {name: np.zeros((num_ticks, p), np.int32) for name in (*written, *read)}
        column_at = {MOMENT[moment]: columns[name] for name, moment in written.items()}
        moments = sorted(t * TICK + moment for moment in column_at for t in range(num_ticks))
        slots[buffer] = 0
        for s in range(p):
            lifetimes = sorted(each for g in range(s, p * v, p) for each in zip(born(g), gone(g), [g] * m, range(m)))
            births = {birth for birth, *_ in lifetimes}
            noise = [moment for moment in moments if moment not in births]
            taken, spare, count = _lowest_free(lifetimes, noise)
            slots[buffer] = max(slots[buffer], count)
            for moment, slot in zip(noise, spare):
                column_at[moment % TICK][moment // TICK, s] = slot
            for (birth, _, g, i), slot in zip(lifetimes, taken):
                column_at[birth % TICK][birth // TICK, s] = slot
                for name, kind in read.items():
                    columns[name][tick[kind, g, i], s] = slot
    return columns, slots


def _lowest_free(lifetimes, noise) -> tuple[list[int], list[int], int]:
    """Return (the slot of each lifetime, a free slot at each moment of noise, the number of slots needed).

    lifetimes: (birth, death, …), both inclusive. noise: moments at which a masked op writes. Both are sorted by moment.
    """
    free: list[int] = []
    held: list[tuple[int, int]] = []     # death, slot
    count, taken, spare = 0, [], []
    for moment, death in sorted([(moment, -1) for moment in noise] + [lifetime[:2] for lifetime in lifetimes]):
        while held and held[0][0] < moment:
            heapq.heappush(free, heapq.heappop(held)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        if death < 0:
            spare.append(free[0])
        else:
            slot = heapq.heappop(free)
            heapq.heappush(held, (death, slot))
            taken.append(slot)
    return taken, spare, count
