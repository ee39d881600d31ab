"""Is a pipeline schedule sound?

Five invariants; the last three replay the columns as the executor will, with names in place of arrays, and know nothing
of how the slots were planned:
  complete  every (virtual stage, microbatch) has one F, one B and, where W is split off, one W; the columns say what
  ops says order     F after F of the virtual stage before, B after its own F and after B of the one behind, W after its
  B sends     what a tick sends was made in that tick
  slots     every send has one receive, every read finds the value it is for, no value is overwritten before its last
  read live      never more pairs alive than the declared peak, nothing alive at the end
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshtrain.parallel.pipeline.schedules import B, F, KINDS, W, Schedule

SHOWN = 5


def check(schedule: Schedule) -> None:
    """Raises: ValueError that names the broken invariants of the schedule, the first few places of each."""
    broken = list(violations(schedule))
    if broken:
        lines = [f"{invariant}: {what}" for invariant, what in broken[:SHOWN]]
        more = f"\n… and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        raise ValueError(f"schedule {schedule.name} (p={schedule.num_stages}, m={schedule.num_microbatches}, "
                         f"v={schedule.num_chunks}) cannot be executed:\n" + "\n".join(lines) + more)


def violations(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """(invariant, what is wrong where), in the order of the invariants.
    A schedule that is not complete is judged no further."""
    broken = list(_complete(schedule))
    yield from broken
    if broken:
        return
    yield from _order(schedule)
    yield from _sends(schedule)
    yield from _replay(schedule)
    yield from _live(schedule)


def _complete(schedule: Schedule) -> Iterator[tuple[str, str]]:
    p, m, v, ops = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks, schedule.ops
    on = ops[..., 0] >= 0
    strange = on & ((ops[..., 0] >= m) | (ops[..., 1] < 0) | (ops[..., 1] >= v))
    for t, s, k in np.argwhere(strange):
        yield "complete", f"tick {t}, stage {s}: {KINDS[k]} of microbatch, chunk {ops[t, s, k].tolist()} does not exist"
    t, s, k = np.nonzero(on & ~strange)
    count = np.zeros((3, v * p, m), int)
    np.add.at(count, (k, ops[t, s, k, 1] * p + s, ops[t, s, k, 0]), 1)
    expected = np.array([1, 1, int(schedule.split)])[:, None, None]
    for k, g, i in np.argwhere(count != expected):
        yield "complete", f"{KINDS[k]} of virtual stage {g}, microbatch {i} is done {count[k, g, i]} times"
    columns = schedule.columns
    for k, kind in enumerate(KINDS):
        wrong = columns[f"{kind}_on"] != on[..., k]
        for j, name in enumerate(("mb", "chunk")):
            wrong |= on[..., k] & (columns[f"{kind}_{name}"] != ops[..., k, j])
        for t, s in np.argwhere(wrong):
            yield "complete", f"tick {t}, stage {s}: the columns of {kind} do not say what ops says"
    first, last = np.arange(p) == 0, np.arange(p) == p - 1
    flags = {"F_first": on[..., F] & first & (ops[..., F, 1] == 0),
             "B_first": on[..., B] & first & (ops[..., B, 1] == 0),
             "loss_here": on[..., F] & last & (ops[..., F, 1] == v - 1)}
    for name, flag in flags.items():
        for t, s in np.argwhere(columns[name] != flag):
            yield "complete", f"tick {t}, stage {s}: {name}={columns[name][t, s]} does not say what ops says"
    for shared, flag, kind in (("embed", "F_first", F), ("loss", "loss_here", F), ("embed_grad", "B_first", B)):
        microbatch = np.where(flags[flag], ops[..., kind, 0], -1).max(1)
        said = np.where(schedule.shared[f"{shared}_on"] > 0, schedule.shared[f"{shared}_mb"], -1)
        for t, in np.argwhere(said != microbatch):
            yield "complete", f"tick {t}: {shared} of microbatch {said[t]} is shared, the stages do {microbatch[t]}"


def _tick_of_ops(schedule: Schedule) -> dict[tuple[int, int, int], int]:
    t, s, k = np.nonzero(schedule.ops[..., 0] >= 0)
    i, chunk = schedule.ops[t, s, k].T
    return dict(zip(zip(k.tolist(), (chunk * schedule.num_stages + s).tolist(), i.tolist()), t.tolist()))


def needs(kind: int, g: int, microbatch: int, num_virtual: int) -> list[tuple[int, int, int]]:
    """The (kind, virtual stage, microbatch) that an op waits for."""
    if kind == F:
        return [(F, g - 1, microbatch)] if g else []
    if kind == B:
        return [(F, g, microbatch)] + ([(B, g + 1, microbatch)] if g < num_virtual - 1 else [])
    return [(B, g, microbatch)]


def _order(schedule: Schedule) -> Iterator[tuple[str, str]]:
    ticks, p, num_virtual = _tick_of_ops(schedule), schedule.num_stages, schedule.num_stages * schedule.num_chunks
    for (kind, g, i), t in ticks.items():
        for need in needs(kind, g, i, num_virtual):
            same_tick = need[1] == g      # F, loss, B, W follow each other inside a tick
            if ticks[need] >= t + same_tick:
                yield "order", (f"{KINDS[kind]} of virtual stage {g}, microbatch {i} in tick {t} on stage {g % p} "
                                f"needs {KINDS[need[0]]} of virtual stage {need[1]}, which is in tick {ticks[need]}")


def _sends(schedule: Schedule) -> Iterator[tuple[str, str]]:
    c = schedule.columns
    for name, made, what in (("y_out", (c["F_on"] > 0) & (c["loss_here"] == 0),
                              "an output that F makes for the next stage"),
                             ("dx_out", (c["B_on"] > 0) & (c["B_first"] == 0),
                              "a cotangent B makes for the stage before")):
        for t, s in np.argwhere((c[name] > 0) & ~made):
            yield "sends", f"tick {t}, stage {s} sends ({name}) what is not {what} in that tick"
        for t, s in np.argwhere(~(c[name] > 0) & made):
            yield "sends", f"tick {t}, stage {s} does not send ({name}) {what}"


def _replay(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Replays the schedule. A value is (buffer, virtual stage, microbatch); it stands in its slot with the reads it
    awaits."""
    p = schedule.num_stages
    c = {name: column.tolist() for name, column in schedule.columns.items()}
    for name, column in schedule.columns.items():
        buffer = {"y_in": "X", "dx_in": "D"}.get(name, name.rpartition("_")[2].upper())
        if buffer in schedule.slots and not (0 <= column.min() and column.max() < schedule.slots[buffer]):
            yield "slots", f"column {name} points outside the {schedule.slots[buffer]} slots of {buffer}"
            return
    held = [{buffer: [[None, 0] for _ in range(n)] for buffer, n in schedule.slots.items()} for _ in range(p)]
    broken = []

    def write(t, s, buffer, slot, value, reads):
        entry = held[s][buffer][slot]
        if entry[1]:
            broken.append(f"tick {t}, stage {s}: {value or 'noise'} overwrites {entry[0]} in {buffer}[{slot}], "
                          f"which is still to be read")
        entry[:] = value, reads

    def read(t, s, buffer, slot, value):
        entry = held[s][buffer][slot]
        if entry[0] != value or not entry[1]:
            broken.append(f"tick {t}, stage {s} reads {value} in {buffer}[{slot}], where {entry[0] or 'noise'} is")
        entry[1] = max(0, entry[1] - 1)

    for t in range(schedule.num_ticks):
        made_y, made_dx = [None] * p, [None] * p
        for s in range(p):
            on = c["F_on"][t][s]
            g, i = c["F_chunk"][t][s] * p + s, c["F_mb"][t][s]
            if on and not c["F_first"][t][s]:
                read(t, s, "X", c["F_x"][t][s], ("x", g, i))
            write(t, s, "R", c["F_r"][t][s], ("r", g, i) if on else None, on)
            write(t, s, "Q", c["F_q"][t][s], ("q", g, i) if on else None, on * (1 + schedule.split))
            loss = c["loss_here"][t][s]
            write(t, s, "D", c["loss_d"][t][s], ("d", g, i) if loss else None, loss)
            if c["y_out"][t][s]:
                made_y[s] = ("x", g + 1, i)
            on, g, i = c["B_on"][t][s], c["B_chunk"][t][s] * p + s, c["B_mb"][t][s]
            if on:
                read(t, s, "R", c["B_r"][t][s], ("r", g, i))
                read(t, s, "D", c["B_d"][t][s], ("d", g, i))
                read(t, s, "Q", c["B_q"][t][s], ("q", g, i))
            if schedule.split:
                write(t, s, "Z", c["B_z"][t][s], ("z", g, i) if on else None, on)
            if c["dx_out"][t][s]:
                made_dx[s] = ("d", g - 1, i)
            on, g, i = c["W_on"][t][s], c["W_chunk"][t][s] * p + s, c["W_mb"][t][s]
            if on:
                read(t, s, "Q", c["W_q"][t][s], ("q", g, i))
                read(t, s, "Z", c["W_z"][t][s], ("z", g, i))
        for s in range(p):
            for buffer, column, sent in (("X", "y_in", made_y[s - 1]), ("D", "dx_in", made_dx[(s + 1) % p])):
                if bool(c[f"{column}_on"][t][s]) != (sent is not None):
                    fault = "a receive without a send" if sent is None else "a send without a receive"
                    broken.append(f"tick {t}, stage {s}: {fault} ({column})")
                write(t, s, buffer, c[column][t][s], sent, int(sent is not None))
    for what in broken:
        yield "slots", what
    for s in range(p):
        for buffer, entries in held[s].items():
            for slot, (value, reads) in enumerate(entries):
                if reads:
                    yield "live", f"stage {s}: {value} in {buffer}[{slot}] is alive at the end"


def _live(schedule: Schedule) -> Iterator[tuple[str, str]]:
    born, gone = (np.cumsum(schedule.ops[:, :, kind, 0] >= 0, axis=0) for kind in (F, W if schedule.split else B))
    # the last backward op of a tick still counts
    alive = born - np.concatenate([np.zeros_like(gone[:1]), gone[:-1]])
    for t, s in np.argwhere(alive > schedule.peak):
        yield "live", f"tick {t}, stage {s}: {alive[t, s]} pairs are alive, the declared peak is {schedule.peak[s]}"
    for s in np.flatnonzero(born[-1] != gone[-1]):
        yield "live", f"stage {s}: {born[-1, s] - gone[-1, s]} pairs are alive at the end"
