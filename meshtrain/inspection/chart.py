"""Draws a pipeline schedule: one row per stage, time to the right, as text and as JSON for `pages.pictures`.

The JSON uses simulated time (cost.simulate), so the width of a bubble is its duration. The text uses slots of equal
width. A schedule too long for one line is divided into warm-up, one steady period and cool-down, each on its own line.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from meshtrain.cost.formulas.simulate import ChosenSchedule, Outcome, gib
from meshtrain.parallel.pipeline.schedules import F, KINDS, Schedule
from meshtrain.units import amount, plural

TEXT_COLUMNS = 180       # most characters in a line of the text form
MOST_OPS = 6000          # approximate limit of ops in a schedule's JSON


@dataclasses.dataclass(frozen=True)
class Panel:
    """Ticks start … stop−1 of a schedule, drawn on one line. anchor: which end ("start" or "stop") is kept if they do
    not fit. repeats: text about how often these ticks repeat."""
    name: str
    start: int
    stop: int
    anchor: str = "start"
    repeats: str = ""

    @property
    def heading(self) -> str:
        return f"{self.name} (ticks {self.start} to {self.stop - 1}){self.repeats}"


def title(schedule: Schedule, outcome: Outcome, memory_bytes: int | None = None) -> str:
    """Return the heading of the chart, with bubble and peak memory."""
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    stage = int(schedule.peak.argmax())
    held = f" ({gib(memory_bytes)})" if memory_bytes is not None else ""
    return (f"{schedule.name}: {amount(schedule.num_stages, 'stage')}, "
            f"{amount(schedule.num_microbatches, 'microbatch')}{chunks} · bubble {outcome.bubble:.1%} · peak memory: "
            f"activations of {outcome.peak_live:g} {plural(outcome.peak_live, 'microbatch')} on stage {stage}{held}")


def panels(schedule: Schedule) -> list[Panel]:
    """Return panels for warm-up, one steady period (at least as many ticks as stages) and cool-down; for two halves if
    nothing repeats."""
    start, stop, period = steady(schedule)
    shown = -(-schedule.num_stages // period) * period
    if stop - start <= shown:
        half = -(-schedule.num_ticks // 2)
        return [Panel("first half", 0, half), Panel("second half", half, schedule.num_ticks, "stop")]
    every = f"every {period} ticks" if period > 1 else "every tick"
    parts = [Panel("warm-up", 0, start),
             Panel("steady state", start, start + shown, repeats=f", repeated {every} until tick {stop - 1}"),
             Panel("cool-down", stop, schedule.num_ticks, "stop")]
    return [part for part in parts if part.start < part.stop]


def steady(schedule: Schedule) -> tuple[int, int, int]:
    """Return (start, stop, period): the longest range of ticks in which tick t + period repeats tick t with later
    microbatches; (0, 0, 1) if no such range covers a third of the schedule (few microbatches)."""
    microbatch, chunk = schedule.ops[..., 0], schedule.ops[..., 1]
    on, best = microbatch >= 0, (0, 0, 1)
    for period in range(1, schedule.num_ticks // 2 + 1):
        here, later = slice(None, -period), slice(period, None)
        ahead = np.where(on[here], microbatch[later] - microbatch[here], -1)
        alike = ((on[here] == on[later]) & (chunk[here] == chunk[later])).all((1, 2))
        alike &= np.where(on[here], ahead == ahead.max((1, 2), keepdims=True), True).all((1, 2))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], alike, [0]])))
        for first, end in zip(edges[::2].tolist(), edges[1::2].tolist()):
            if end - first >= period and end + period - first > best[1] - best[0]:
                best = (first, end + period, period)
    return best if 3 * (best[1] - best[0]) >= schedule.num_ticks else (0, 0, 1)


def text(schedule: Schedule) -> str:
    """Return the schedule as text: a row per stage, a column per slot. F3 is the forward of microbatch 3. With chunks,
    F3b is the forward of the second chunk. · is an idle slot. Lines are cut at TEXT_COLUMNS, with … for the rest."""
    whole = _columns(schedule, Panel("", 0, schedule.num_ticks))
    if _width(whole) <= TEXT_COLUMNS:
        return _lines(whole)
    return "\n".join(f"{panel.heading}:\n{_lines(_cut(_columns(schedule, panel), panel))}"
                     for panel in panels(schedule))


def _columns(schedule: Schedule, panel: Panel) -> list[list[str]]:
    """Return the columns of a panel: the names of the stages, then one column per slot, padded to equal width."""
    active = (schedule.ops[..., 0] >= 0).any(1)
    slots = [(t, kind) for t in range(panel.start, panel.stop) for kind in np.flatnonzero(active[t])]
    stages = range(schedule.num_stages)
    columns = [[f"stage {s}" for s in stages], *([_cell(schedule, t, s, kind) for s in stages] for t, kind in slots)]
    return [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(len(column[0]) + 1 for column in columns) - 1


def _lines(columns: Sequence[Sequence[str]]) -> str:
    return "\n".join(" ".join(row).rstrip() for row in zip(*columns))


def _cut(columns: list[list[str]], panel: Panel) -> list[list[str]]:
    """Return the columns cut to TEXT_COLUMNS characters: the names, the columns at the end of the panel that
    panel.anchor names ("start" or "stop"), and one column of … in place of the others."""
    dots = ["…"] * len(columns[0])
    names, kept = columns[:1], columns[1:]
    whole = _width(columns) <= TEXT_COLUMNS
    while not whole and _width([*names, dots, *kept]) > TEXT_COLUMNS:
        kept = kept[:-1] if panel.anchor == "start" else kept[1:]
    return columns if whole else [*names, *kept, dots] if panel.anchor == "start" else [*names, dots, *kept]


def _cell(schedule: Schedule, t: int, s: int, kind: int) -> str:
    i, chunk = schedule.ops[t, s, kind].tolist()
    if i < 0:
        return "·"
    return f"{KINDS[kind]}{i}" + (chr(ord("a") + chunk) if schedule.num_chunks > 1 else "")


def as_json(choice: ChosenSchedule) -> dict:
    """Return a run's schedule as JSON for its picture. Each line of the picture has ops [stage, kind, microbatch,
    chunk, begin, end]; times are in units of the shortest forward. Microbatch -1 is the head's loss, on all stages."""
    schedule, outcome = choice.schedule, choice.outcome
    forward_s = np.nanmin((outcome.end_s - outcome.begin_s)[..., F])
    forwards = min(60, max(16, MOST_OPS // (6 * schedule.num_stages)))
    span_s = forward_s * forwards
    parts = [Panel("", 0, schedule.num_ticks)] if outcome.makespan_s <= span_s else panels(schedule)

    def unit(time_s: float) -> float:
        return round(float(time_s) / forward_s, 4)
    lines = [{"heading": part.heading if part.name else "", "begin": unit(start_s), "end": unit(stop_s),
              "more_before": bool(start_s > 1e-9), "more_after": bool(stop_s < outcome.makespan_s * (1 - 1e-9)),
              "ops": [[s, kind, i, chunk, unit(begin_s), unit(end_s)]
                      for s, kind, i, chunk, begin_s, end_s in _ops(schedule, outcome)
                      if begin_s < stop_s and end_s > start_s]}
             for part in parts for start_s, stop_s in [_span(outcome, part, span_s)]]
    return {"name": schedule.name, "num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches,
            "num_chunks": schedule.num_chunks, "split": bool(schedule.split), "bubble": float(outcome.bubble),
            "peak_live": float(outcome.peak_live), "memory_bytes": choice.memory_bytes,
            "why": choice.why, "lines": lines}


def _ops(schedule: Schedule, outcome: Outcome) -> Iterator[tuple[int, str, int, int, float, float]]:
    """Yield (stage, kind, microbatch, chunk, begin_s, end_s) of every op; microbatch is -1 for the head's loss."""
    for t, s, k in np.argwhere(schedule.ops[..., 0] >= 0).tolist():
        i, chunk = schedule.ops[t, s, k].tolist()
        yield s, KINDS[k], i, chunk, outcome.begin_s[t, s, k], outcome.end_s[t, s, k]
    for t in np.flatnonzero(schedule.shared["loss_on"]) if outcome.loss_s else ():
        for s in range(schedule.num_stages):
            end_s = outcome.end_s[t, -1, F]
            yield s, "loss", -1, 0, end_s, end_s + outcome.loss_s


def _span(outcome: Outcome, part: Panel, most_s: float) -> tuple[float, float]:
    """Return (begin_s, end_s) of a panel's ticks in simulated time, cut to at most `most_s`."""
    start, stop = np.nanmin(outcome.begin_s[part.start:part.stop]), np.nanmax(outcome.end_s[part.start:part.stop])
    if part.start == 0:
        start = 0.0
    return (start, min(stop, start + most_s)) if part.anchor == "start" else (max(start, stop - most_s), stop)
