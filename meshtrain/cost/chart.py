"""A pipeline schedule as people read it: one row a stage, time to the right, as text and as a picture (SVG and PNG).

The picture stands on model time (cost.simulate), so a bubble is as wide as it is long; the text on slots, each as wide as
the next. A schedule too long for one line is drawn as its warm-up, one steady period and its cool-down, one below the
other. Drawing needs matplotlib, the extra `chart`; it is imported where it is used.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from meshtrain.cost.simulate import Choice, Outcome, gib
from meshtrain.parallel.schedules import F, KINDS, Schedule

COLORS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b", "loss": "#b8a2cc", "idle": "#eeeeee"}
MEANING = {"F": "F: forward", "B": "B: input gradient", "W": "W: weight gradient", "loss": "head and loss", "idle": "idle"}
CHUNK_SHADES = 0.45      # how far the last chunk's colour goes towards white
TEXT_COLUMNS = 180       # of the text form, at most
WIDTH_IN, DPI = 32 / 3, 150      # 1,600 pixels
ROW_IN, FONT_PT = 0.3, 8
DIGIT_PT = 0.66 * FONT_PT
MOST_OPS = 6000          # of a schedule as JSON, about
MARGIN_IN = 1.0          # beside the rows: their names


@dataclasses.dataclass(frozen=True)
class Panel:
    """Ticks start … stop−1 of a schedule, on a line of their own. anchor: which end is kept where even these are too many."""
    name: str
    start: int
    stop: int
    anchor: str = "start"
    repeats: str = ""

    @property
    def heading(self) -> str:
        return f"{self.name} (ticks {self.start} to {self.stop - 1}){self.repeats}"


def title(schedule: Schedule, outcome: Outcome, memory_bytes: int | None = None) -> str:
    """What the chart shows, with bubble and peak memory."""
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    stage = int(schedule.peak.argmax())
    held = f" ({gib(memory_bytes)})" if memory_bytes is not None else ""
    return (f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches{chunks} · bubble "
            f"{outcome.bubble:.1%} · peak memory: activations of {outcome.peak_live:g} microbatches on stage {stage}{held}")


def panels(schedule: Schedule) -> list[Panel]:
    """Warm-up, one steady period (no fewer ticks than there are stages) and cool-down; two halves where nothing repeats."""
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
    """(start, stop, period): the longest stretch of ticks in which tick t + period does what t does, on later microbatches.

    (0, 0, 1) where none fills a third of the schedule: with few microbatches it never settles.
    """
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
    """A row a stage, a column a slot: F3 = forward of microbatch 3, with chunks F3b = its second chunk, · = idle.

    No line is longer than TEXT_COLUMNS: what does not fit is cut, and … stands for it.
    """
    whole = _columns(schedule, Panel("", 0, schedule.num_ticks))
    if _width(whole) <= TEXT_COLUMNS:
        return _lines(whole)
    return "\n".join(f"{panel.heading}:\n{_lines(_cut(_columns(schedule, panel), panel))}" for panel in panels(schedule))


def _columns(schedule: Schedule, panel: Panel) -> list[list[str]]:
    """[the stages' names, then a column of cells for every slot], all cells of a column as wide as each other."""
    active = (schedule.ops[..., 0] >= 0).any(1)
    slots = [(t, kind) for t in range(panel.start, panel.stop) for kind in np.flatnonzero(active[t])]
    stages = range(schedule.num_stages)
    found = [[f"stage {s}" for s in stages], *([_cell(schedule, t, s, kind) for s in stages] for t, kind in slots)]
    return [[cell.ljust(max(map(len, column))) for cell in column] for column in found]


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(len(column[0]) + 1 for column in columns) - 1


def _lines(columns: Sequence[Sequence[str]]) -> str:
    return "\n".join(" ".join(row).rstrip() for row in zip(*columns))


def _cut(columns: list[list[str]], panel: Panel) -> list[list[str]]:
    """The columns that fit on a line, those of the panel's anchor, and … for the others."""
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


def draw(schedule: Schedule, outcome: Outcome, heading: str, paths: Sequence[Path]) -> None:
    """Writes the chart to each path, in the format of its suffix: 1,600 pixels wide, every number in one size.

    Raises: ModuleNotFoundError without matplotlib; OSError where a path cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # What a line has room for: a forward must hold its microbatch's number.
    digits = len(str(schedule.num_microbatches - 1))
    forward_s = np.nanmin((outcome.end_s - outcome.begin_s)[..., F])
    parts, spans = _lines_of(schedule, outcome, forward_s * (WIDTH_IN - MARGIN_IN) * 72 / (DIGIT_PT * (digits + 0.2)))
    shown_s = max(stop - start for start, stop in spans)
    rows_in = ROW_IN * schedule.num_stages
    height = len(parts) * (rows_in + 0.45) + 0.9
    # Text as text and ids that do not change: a small file, the same for the same schedule.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "meshtrain", "font.sans-serif": ["DejaVu Sans"]}):
        figure = Figure(figsize=(WIDTH_IN, height))
        for i, (part, (start_s, stop_s)) in enumerate(zip(parts, spans)):
            bottom = 1 - (0.2 + (i + 1) * (rows_in + 0.45)) / height
            width = (WIDTH_IN - MARGIN_IN) / WIDTH_IN * (stop_s - start_s) / shown_s
            axes = figure.add_axes((0.8 * MARGIN_IN / WIDTH_IN, bottom, width, rows_in / height))
            _panel(axes, schedule, outcome, start_s, stop_s)
            if len(parts) > 1:
                axes.set_title(part.heading, loc="left", pad=3, fontsize=FONT_PT)
        axes.set_xlabel("model time →", fontsize=FONT_PT, loc="left")
        figure.suptitle(heading, fontsize=FONT_PT + 1, y=1 - 0.12 / height, va="top", wrap=True)
        figure.legend(handles=_legend(schedule, outcome), loc="lower center", ncols=5, frameon=False, fontsize=FONT_PT)
        for path in paths:
            figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)


def as_json(choice: Choice) -> dict:
    """A run's schedule for the page: each line of its chart with the ops on it, [stage, kind, microbatch, chunk, begin, end] in
    model time; microbatch -1: the head's loss, on all of them."""
    schedule, outcome = choice.schedule, choice.outcome
    forward_s = np.nanmin((outcome.end_s - outcome.begin_s)[..., F])
    forwards = min(60, max(16, MOST_OPS // (6 * schedule.num_stages)))
    parts, spans = _lines_of(schedule, outcome, forward_s * forwards)
    unit = lambda time_s: round(float(time_s) / forward_s, 4)
    lines = [{"heading": part.heading if part.name else "", "begin": unit(start_s), "end": unit(stop_s),
              "more_before": bool(start_s > 1e-9), "more_after": bool(stop_s < outcome.makespan_s * (1 - 1e-9)),
              "ops": [[s, kind, i, chunk, unit(begin_s), unit(end_s)]
                      for s, kind, i, chunk, begin_s, end_s in _ops(schedule, outcome) if begin_s < stop_s and end_s > start_s]}
             for part, (start_s, stop_s) in zip(parts, spans)]
    return {"name": schedule.name, "num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches,
            "num_chunks": schedule.num_chunks, "split": bool(schedule.split), "bubble": float(outcome.bubble),
            "peak_live": float(outcome.peak_live), "memory_bytes": choice.memory_bytes, "why": choice.why, "lines": lines}


def _lines_of(schedule: Schedule, outcome: Outcome, span_s: float) -> tuple[list[Panel], list[tuple[float, float]]]:
    """The panels of a chart whose lines have room for span_s, and the times between which each of them shows ops."""
    parts = [Panel("", 0, schedule.num_ticks)] if outcome.makespan_s <= span_s else panels(schedule)
    return parts, [_span(outcome, part, span_s) for part in parts]


def _ops(schedule: Schedule, outcome: Outcome) -> Iterator[tuple[int, str, int, int, float, float]]:
    """(stage, kind, microbatch, chunk, begin, end) of every op; of the head's loss microbatch -1."""
    for t, s, k in np.argwhere(schedule.ops[..., 0] >= 0).tolist():
        i, chunk = schedule.ops[t, s, k].tolist()
        yield s, KINDS[k], i, chunk, outcome.begin_s[t, s, k], outcome.end_s[t, s, k]
    for t in np.flatnonzero(schedule.shared["loss_on"]) if outcome.loss_s else ():
        for s in range(schedule.num_stages):
            end_s = outcome.end_s[t, -1, F]
            yield s, "loss", -1, 0, end_s, end_s + outcome.loss_s


def _span(outcome: Outcome, part: Panel, most_s: float) -> tuple[float, float]:
    """(begin, end) in model time of a panel's ticks, cut to what a line has room for."""
    start, stop = np.nanmin(outcome.begin_s[part.start:part.stop]), np.nanmax(outcome.end_s[part.start:part.stop])
    if part.start == 0:
        start = 0.0
    return (start, min(stop, start + most_s)) if part.anchor == "start" else (max(start, stop - most_s), stop)


def _panel(axes, schedule: Schedule, outcome: Outcome, start_s: float, stop_s: float) -> None:
    """The ops between two times, as rectangles with their microbatches; … where more comes before or after."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    boxes = {}      # colour -> outlines: one path for each colour keeps the file small

    def box(s, begin_s, end_s, color):
        left, right = max(begin_s, start_s), min(end_s, stop_s)
        if right > left:
            corners = [(left, s - 0.42), (right, s - 0.42), (right, s + 0.42), (left, s + 0.42), (left, s - 0.42)]
            boxes.setdefault(color, []).append(Outline(corners, closed=True))

    for s, kind, i, chunk, begin_s, end_s in _ops(schedule, outcome):
        box(s, begin_s, end_s, _shade(kind, chunk, schedule.num_chunks))
        if i >= 0 and start_s <= begin_s and end_s <= stop_s * (1 + 1e-9):
            axes.text((begin_s + end_s) / 2, s, str(i), ha="center", va="center", fontsize=FONT_PT)
    for color, outlines in boxes.items():
        axes.add_patch(PathPatch(Outline.make_compound_path(*outlines), facecolor=color, edgecolor="white", linewidth=0.6))
    axes.set(xlim=(start_s, stop_s), ylim=(schedule.num_stages - 0.5, -0.5), xticks=[], yticks=range(schedule.num_stages))
    axes.set_yticklabels([f"stage {s}" for s in range(schedule.num_stages)], fontsize=FONT_PT)
    axes.tick_params(length=0)
    axes.set_facecolor(COLORS["idle"])
    axes.spines[:].set_visible(False)
    for x, more in ((-0.002, start_s > 1e-9), (1.002, stop_s < outcome.makespan_s * (1 - 1e-9))):
        if more:
            axes.text(x, 0.5, "…", transform=axes.transAxes, ha="right" if x < 0 else "left", va="center", fontsize=FONT_PT + 4)


def _shade(kind: str, chunk: int, num_chunks: int) -> tuple[float, ...]:
    from matplotlib import colors
    towards_white = CHUNK_SHADES * chunk / max(1, num_chunks - 1)
    return tuple(c + (1 - c) * towards_white for c in colors.to_rgb(COLORS[kind]))


def _legend(schedule: Schedule, outcome: Outcome) -> list:
    from matplotlib.patches import Patch
    meaning = dict(MEANING)
    if not schedule.split:
        meaning["B"] = "B: both gradients"
        del meaning["W"]
    if not outcome.loss_s:
        del meaning["loss"]
    if schedule.num_chunks > 1:
        meaning["F"] += " (later chunks lighter)"
    return [Patch(color=COLORS[kind], label=label) for kind, label in meaning.items()]
