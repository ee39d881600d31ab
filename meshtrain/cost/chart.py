"""A pipeline schedule as people read it: one row a stage, time to the right, as text and as a picture (SVG and PNG).

The picture stands on model time (cost.simulate), so a bubble is as wide as it is long; the text on slots, each as wide as
the next. Drawing needs matplotlib, the extra `chart`; it is imported where it is used.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshtrain.cost.simulate import Outcome, gib
from meshtrain.parallel.schedules import F, KINDS, Schedule

COLORS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b", "loss": "#b8a2cc", "idle": "#eeeeee"}
MEANING = {"F": "F: forward", "B": "B: input gradient", "W": "W: weight gradient", "loss": "head and loss", "idle": "idle"}
CHUNK_SHADES = 0.45      # how far the last chunk's colour goes towards white


def title(schedule: Schedule, outcome: Outcome, memory_bytes: int | None = None) -> str:
    """What the chart shows, with bubble and peak memory."""
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    stage = int(schedule.peak.argmax())
    held = f" ({gib(memory_bytes)})" if memory_bytes is not None else ""
    return (f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches{chunks} · bubble "
            f"{outcome.bubble:.1%} · peak memory: activations of {outcome.peak_live:g} microbatches on stage {stage}{held}")


def text(schedule: Schedule) -> str:
    """A row a stage, a column a slot: F3 = forward of microbatch 3, with chunks F3b = its second chunk, · = idle."""
    active = (schedule.ops[..., 0] >= 0).any(1)
    slots = [(t, kinds) for t in range(schedule.num_ticks) for kinds in (
        np.flatnonzero(active[t])[:, None] if schedule.family == "phase" else [range(3)])]
    rows = [[f"stage {s}", *(_cell(schedule, t, s, kinds) for t, kinds in slots)] for s in range(schedule.num_stages)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(" ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _cell(schedule: Schedule, t: int, s: int, kinds: Sequence[int]) -> str:
    for kind in kinds:
        i, chunk = schedule.ops[t, s, kind].tolist()
        if i >= 0:
            return f"{KINDS[kind]}{i}" + (chr(ord("a") + chunk) if schedule.num_chunks > 1 else "")
    return "·"


def draw(schedule: Schedule, outcome: Outcome, heading: str, paths: Sequence[Path]) -> None:
    """Writes the chart to each path, in the format of its suffix.

    Raises: ModuleNotFoundError without matplotlib; OSError where a path cannot be written.
    """
    from matplotlib import colors
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    v, makespan_s = schedule.num_chunks, outcome.makespan_s
    width = float(np.clip(0.28 * schedule.num_microbatches * v * (3 if schedule.split else 2) + 2, 9, 40))
    figure = Figure(figsize=(width, 0.55 * schedule.num_stages + 1.6), layout="constrained")
    axes = figure.subplots()
    points_per_s = 72 * (width - 1.2) / makespan_s

    def shade(kind, chunk):
        towards_white = CHUNK_SHADES * chunk / max(1, v - 1)
        return tuple(c + (1 - c) * towards_white for c in colors.to_rgb(COLORS[kind]))

    for t, s, k in np.argwhere(schedule.ops[..., 0] >= 0):
        i, chunk = schedule.ops[t, s, k].tolist()
        begin_s, end_s = outcome.begin_s[t, s, k], outcome.end_s[t, s, k]
        axes.broken_barh([(begin_s, end_s - begin_s)], (s - 0.4, 0.8), facecolor=shade(KINDS[k], chunk),
                         edgecolor="white", linewidth=0.6)
        size = min(9.0, 1.4 * points_per_s * (end_s - begin_s) / len(str(i)))
        if size >= 3:
            axes.text((begin_s + end_s) / 2, s, str(i), ha="center", va="center", fontsize=size, color="black")
    if outcome.loss_s:
        for t in np.flatnonzero(schedule.shared["loss_on"]):
            for s in range(schedule.num_stages) if schedule.family == "phase" else [schedule.num_stages - 1]:
                axes.broken_barh([(outcome.end_s[t, -1, F], outcome.loss_s)], (s - 0.4, 0.8), facecolor=COLORS["loss"])
    axes.set(xlim=(0, makespan_s), ylim=(schedule.num_stages - 0.5, -0.5), yticks=range(schedule.num_stages),
             yticklabels=[f"stage {s}" for s in range(schedule.num_stages)], xlabel="model time")
    axes.set_facecolor(COLORS["idle"])
    axes.spines[:].set_visible(False)
    axes.set_title(heading, fontsize=10, wrap=True)
    meaning = dict(MEANING)
    if not schedule.split:
        meaning["B"] = "B: both gradients"
        del meaning["W"]
    if not outcome.loss_s:
        del meaning["loss"]
    if v > 1:
        meaning["F"] += " (later chunks lighter)"
    patches = [Patch(color=COLORS[kind], label=label) for kind, label in meaning.items()]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=len(patches), frameon=False,
                fontsize=8)
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
