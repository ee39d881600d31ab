"""SVG pictures of a page: a mesh on its hosts, stacked bars, curves, points, a pipeline's schedule.

Colours are classes of the skin (`c0` … `c7`), so that a picture follows light and dark. A drawing is 960 units wide.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from meshtrain.names import AXES
from meshtrain.pages.skin import esc

WIDTH = 960
COLORS = 8
AXIS_COLOR = {axis: k for k, axis in enumerate(AXES)}


def drawing(height: float, parts: Iterable[str], label: str) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{esc(label)}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>')


def below(drawings: Sequence[str]) -> str:
    """Drawings in one, below each other."""
    parts, y = [], 0.0
    for one in drawings:
        height = float(one.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
        parts.append(one.replace("<svg ", f'<svg y="{y:.0f}" width="{WIDTH}" height="{height:.0f}" ', 1))
        y += height + 18
    label = re.findall(r'aria-label="([^"]*)"', "".join(drawings))
    return (f'<svg viewBox="0 0 {WIDTH} {y:.0f}" role="img" aria-label="{"; ".join(label)}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>')


def text(x: float, y: float, words, size: float = 12, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{named}>{esc(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, opacity: float = 1.0, title: str = "") -> str:
    title = f"<title>{esc(title)}</title>" if title else ""
    faded = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect {place} class="{kind}"{faded}>{title}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{kind}"/>'


# ---- the mesh on its hosts -------------------------------------------------------------------------------------------

MOST_HOSTS = 8              # drawn; else the first and last four
CELL, GAP, LABEL, ROW = 26, 14, 66, 19


def mesh(data: dict) -> str:
    """Hosts side by side: each GPU with its coordinate on every axis larger than 1, slowest link at the top."""
    count, per_host = data["num_devices"], min(data["gpus_per_host"], data["num_devices"])
    hosts, order = -(-count // per_host), [axis for axis in data["placement"] if data["sizes"][axis] > 1]
    shown = list(range(hosts)) if hosts <= MOST_HOSTS else [*range(4), *range(hosts - 4, hosts)]
    width = per_host * CELL + GAP
    a_line = max(1, (WIDTH - LABEL) // width)
    lines = [shown[k:k + a_line] for k in range(0, len(shown), a_line)]
    if hosts > MOST_HOSTS:
        lines = [part[k:k + a_line] for part in (shown[:4], shown[4:]) for k in range(0, 4, a_line)]
    parts, y = [], 0.0
    for number, these in enumerate(lines):
        if number and these[0] != lines[number - 1][-1] + 1:
            left_out = these[0] - lines[number - 1][-1] - 1
            parts += [line(LABEL, y + 10, LABEL + 40, y + 10, "rule"),
                      text(LABEL + 50, y + 14, f"{left_out:,} hosts of {per_host} more, in the same order",
                           12, kind="soft")]
            y += 34
        parts += [text(LABEL - 10, y + 40 + ROW * k + 12, axis, 12, "end") for k, axis in enumerate(order)]
        parts += [text(LABEL - 10, y + 32, "GPU", 11, "end", "soft")]
        for k, host in enumerate(these):
            parts += _host(data, order, host, per_host, LABEL + k * width, y)
        y += 42 + ROW * max(1, len(order)) + 20
    return drawing(y - 8, parts, f"{mesh_words(data)} on {hosts:,} hosts of {per_host}")


def mesh_words(data: dict) -> str:
    return " × ".join(f"{axis} {data['sizes'][axis]}" for axis in data["placement"]
                      if data["sizes"][axis] > 1) or "one device"


def _host(data: dict, order: Sequence[str], host: int, per_host: int, x: float, y: float) -> list[str]:
    ids = range(host * per_host, min((host + 1) * per_host, data["num_devices"]))
    parts = [text(x, y + 12, f"host {host:,}", 12), line(x, y + 18, x + CELL * len(ids) - 2, y + 18, "rule")]
    small = lambda word: 11 if len(word) < 4 else 8.5 if len(word) < 6 else 7
    if ids[-1] < 10_000:
        parts += [text(x + CELL * (k + 0.5) - 1, y + 32, i, small(str(i)), "middle", "soft") for k, i in enumerate(ids)]
    else:
        parts += [text(x + CELL * len(ids) / 2, y + 32, f"{ids[0]:,} … {ids[-1]:,}", 11, "middle", "soft")]
    for row, axis in enumerate(order):
        top, places = y + 40 + ROW * row, [coordinate(data, axis, i) for i in ids]
        start = 0
        for k in range(1, len(places) + 1):
            if k == len(places) or places[k] != places[start]:
                shade = 0.2 + 0.5 * places[start] / (data["sizes"][axis] - 1)
                parts += [rect(x + CELL * start, top, CELL * (k - start) - 2, ROW - 3, f"c{AXIS_COLOR[axis]}", shade),
                          text(x + CELL * (start + k) / 2 - 1, top + 12, places[start],
                               small(str(places[start])), "middle")]
                start = k
    return parts


def coordinate(data: dict, axis: str, device: int) -> int:
    """A device's coordinate on an axis: devices are in placement order, its last axis fastest."""
    order = data["placement"]
    inner = math.prod(data["sizes"][name] for name in order[order.index(axis) + 1:])
    return device // inner % data["sizes"][axis]


# ---- bars ------------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """parts: (colour, name, value). total: shown at its end; None: their sum."""
    label: str
    parts: Sequence[tuple[int, str, float]]
    note: str = ""
    total: float | None = None


def bars(rows: Sequence[Bar], show: Callable[[float], str], label: str, marks: Sequence[tuple[float, str]] = (),
         most: float | None = None, legend: bool = False) -> str:
    """Stacked bars on one scale. show: formats a value. marks: (value, name) of lines across all bars. legend: names
    the colours below the bars, for a drawing that stands alone."""
    left, right, height = max(max(110, 7.2 * len(row.label) + 14, 5.8 * len(row.note) + 14)
                              for row in rows), WIDTH - 92, 30
    most = most or max([sum(part[2] for part in row.parts) for row in rows] + [value for value, _ in marks]) or 1.0
    scale = (right - left) / most
    parts, y = [], 28.0 if marks else 4.0
    for row in rows:
        x, total = left, sum(part[2] for part in row.parts) if row.total is None else row.total
        parts += [text(left - 12, y + (14 if row.note else 20), row.label, 12.5, "end")]
        parts += [text(left - 12, y + 28, row.note, 10.5, "end", "soft")] if row.note else []
        parts += [rect(left, y, (right - left) if marks else 0, height, "box")] if marks else []
        for color, name, value in row.parts:
            width = value * scale
            parts += [rect(x, y, width, height, f"c{color} gap", title=f"{name}: {show(value)}")]
            if words := [words for words in (f"{name} {show(value)}", name) if width > 6.4 * len(words) + 8]:
                parts += [text(x + width / 2, y + 19.5, words[0], 11.5, "middle", "on")]
            x += width
        parts += [text(right + 8 if marks else x + 8, y + 20, show(total), 12)]
        y += height + 14
    for k, (value, words) in enumerate(marks):
        x = left + value * scale
        parts += [line(x, 20, x, y - 10, "edge"),
                  text(x + (4 if k else -4), 15, words, 11, "start" if k else "end", "soft")]
    if legend:
        parts += _legend([(color, name) for color, name in sorted({part[:2] for row in rows for part in row.parts})], y)
        y += 20
    return drawing(y - 4, parts, label)


def legend(names: Sequence[tuple[int, str]]) -> str:
    """(colour, name) in a line, for `below`."""
    return drawing(14, _legend(names, 0), ", ".join(name for _, name in names))


def _legend(names: Sequence[tuple[int, str]], y: float, x: float = 74) -> list[str]:
    """(colour, name) in a line."""
    parts = []
    for color, name in names:
        parts += [rect(x, y, 11, 11, f"c{color}"), text(x + 17, y + 9.5, name, 11, kind="soft")]
        x += 40 + 6 * len(name)
    return parts


# ---- curves and points -----------------------------------------------------------------------------------------------


class PlotCurve(NamedTuple):
    """points: (x, y). dots: points are marked and not joined."""
    color: int
    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


class PlotAxis(NamedTuple):
    """name: at its end. show: formats a value. zero: begins at 0. unit: ticks are its round multiples."""
    name: str
    show: Callable[[float], str]
    zero: bool = False
    unit: float = 1.0


def curves(rows: Sequence[PlotCurve], x_axis: PlotAxis, y_axis: PlotAxis, label: str, *,
           verticals: Sequence[tuple[float, str]] = (), levels: Sequence[tuple[float, str]] = (), height: int = 300,
           title: Callable[[int, int], str] | None = None) -> str:
    """Curves in one frame. verticals, levels: (value, name) of lines. title: (curve, point) → its tooltip."""
    zero, unit = y_axis.zero, y_axis.unit
    points = [point for row in rows for point in row.points]
    xs, ys = [x for x, _ in points] + [x for x, _ in verticals], [y for _, y in points] + [y for y, _ in levels]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = 0.0 if zero else min(ys), max(ys)
    high_x, high_y = high_x if high_x > low_x else low_x + 1, high_y if high_y > low_y else low_y + (abs(low_y) or 1)
    spare = 0.06 * (high_y - low_y)
    low_y, high_y = low_y if zero else low_y - spare, high_y + spare
    left, right, top, bottom = 74, WIDTH - 24, 22, height - 40
    at_x = lambda x: left + (x - low_x) / (high_x - low_x) * (right - left)
    at_y = lambda y: bottom - (y - low_y) / (high_y - low_y) * (bottom - top)
    parts = [text(left, 11, y_axis.name, 11, kind="soft"), text(right, height - 4, x_axis.name, 11, "end", "soft")]
    for y in (unit * tick for tick in ticks(low_y / unit, high_y / unit)):
        parts += [line(left, at_y(y), right, at_y(y), "rule"),
                  text(left - 8, at_y(y) + 4, y_axis.show(y), 11, "end", "soft")]
    parts += [text(at_x(x), bottom + 18, x_axis.show(x), 11, "middle", "soft") for x in ticks(low_x, high_x)]
    for value, words in levels:
        parts += [line(left, at_y(value), right, at_y(value), "edge"),
                  text(right, at_y(value) - 5, words, 11, "end", "soft")]
    for value, words in verticals:
        parts += [line(at_x(value), top, at_x(value), bottom, "mark"),
                  text(at_x(value) + 4, top + 8, words, 10.5, kind="soft")]
    for k, row in enumerate(rows):
        if row.dots:
            parts += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="4.5" class="c{row.color} gap">'
                      f'{f"<title>{esc(title(k, i))}</title>" if title else ""}</circle>'
                      for i, (x, y) in enumerate(row.points)]
        else:
            path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in thinned(row.points))
            parts += [f'<path d="M{path}" class="curve s{row.color}"/>']
    return drawing(height, parts, label)


MOST_POINTS = 1600


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The minimum and maximum of each stretch of too many points, so that spikes remain."""
    if len(points) <= MOST_POINTS:
        return list(points)
    step, kept = 2 * len(points) / MOST_POINTS, []
    for k in range(MOST_POINTS // 2):
        part = points[int(k * step):max(int((k + 1) * step), int(k * step) + 1)]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, about six: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


# ---- heat ------------------------------------------------------------------------------------------------------------


def heat(rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[int], label: str) -> str:
    """A cell for each row and column. Values begin at 1 (pale); the largest, at least 2, is full. columns: their
    numbers."""
    left, right, most = 74, WIDTH - 24, max([
        2.0, *(value for _, values in rows for value in values if value is not None)])
    tall, width = max(4.0, min(18.0, 480 / len(rows))), (right - left) / len(columns)
    every, parts = math.ceil(11 / tall), []
    for k, (name, values) in enumerate(rows):
        parts += [text(left - 8, 4 + tall * (k + 0.5) + 4, name, 11, "end", "soft")] if k % every == 0 else []
        parts += [rect(left + width * i, 4 + tall * k, width - 1, tall - 1, "c1",
                       0.06 + 0.93 * (value - 1) / (most - 1),
                       f"{name}, step {columns[i]:,}: {value:.2f}")
                       for i, value in enumerate(values) if value is not None]
    bottom = 4 + tall * len(rows)
    marked = sorted({0, len(columns) - 1, *range(0, len(columns), max(1, len(columns) // 6))})
    marked = [i for i in marked if i in (0, len(columns) - 1) or len(columns) - 1 - i >= len(columns) / 8]
    parts += [text(left + width * (i + 0.5), bottom + 16, f"{columns[i]:,}", 11, "middle", "soft") for i in marked]
    return drawing(bottom + 34, [*parts, text(right, bottom + 31, "step", 11, "end", "soft")], label)


# ---- a schedule ------------------------------------------------------------------------------------------------------

KINDS = {"F": (0, "forward"), "B": (1, "input gradient"), "W": (2, "weight gradient"), "loss": (3, "head and loss")}


def kinds(data: dict) -> dict[str, tuple[int, str]]:
    """The kinds of ops in the schedule: {kind: (colour, name)}."""
    drawn = {op[1] for part in data["lines"] for op in part["ops"]}
    found = {kind: words for kind, words in KINDS.items() if kind in drawn}
    return found if data["split"] or "B" not in found else found | {"B": (found["B"][0], "both gradients")}


def schedule(data: dict, heading: str = "") -> str:
    """A row for each stage over model time; later chunks are lighter. data: of `inspection.chart.as_json`. heading: of
    a standalone drawing, which also has a legend."""
    left, tall = 74, 22 if data["num_stages"] <= 16 else 13
    longest = max(part["end"] - part["begin"] for part in data["lines"])
    scale, y = (WIDTH - left - 20) / longest, 24.0 if heading else 4.0
    parts = [text(4, 13, heading, 11)] if heading else []
    for part in data["lines"]:
        if part["heading"]:
            parts += [text(left, y + 10, part["heading"], 11, kind="soft")]
            y += 17
        start, stop = part["begin"], part["end"]
        for s in range(data["num_stages"]):
            parts += [text(left - 10, y + tall * s + tall / 2 + 3, f"stage {s}", 11, "end", "soft"),
                      rect(left, y + tall * s, (stop - start) * scale, tall - 2, "box")]
        for s, kind, microbatch, chunk, begin, end in part["ops"]:
            x, width = left + (max(begin, start) - start) * scale, (min(end, stop) - max(begin, start)) * scale
            shade = 1 - 0.45 * chunk / max(1, data["num_chunks"] - 1)
            parts += [rect(x, y + tall * s, width, tall - 2, f"c{KINDS[kind][0]} gap", shade)]
            if microbatch >= 0 and width > 6 * len(str(microbatch)) + 2 and begin >= start and end <= stop + 1e-6:
                parts += [text(x + width / 2, y + tall * s + tall / 2 + 3, microbatch, min(10.5, tall - 4), "middle",
                               "on" if shade > 0.8 else "")]
        middle = y + tall * data["num_stages"] / 2 + 4
        parts += [text(left - 4, middle, "…", 14, "end")] if part["more_before"] and not part["heading"] else []
        parts += [text(left + (stop - start) * scale + 4, middle, "…", 14)] if part["more_after"] else []
        y += tall * data["num_stages"] + 12
    if heading:
        lighter = " (later chunks lighter)" if data["num_chunks"] > 1 else ""
        parts += _legend([(color, name + lighter * (kind == "F")) for kind, (color, name) in kinds(data).items()], y)
        y += 20
    return drawing(y, parts, f"{data['name']}: {data['num_stages']} stages, {data['num_microbatches']} microbatches")
