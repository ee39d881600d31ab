"""SVG pictures of a page: a mesh on its hosts, stacked bars, curves, points, a pipeline's schedule.

Colours are classes of the style sheet (`c0` … `c7`), so that a picture follows the light and the dark theme. A drawing
is WIDTH units wide. Each picture of a page has a second layout, PHONE units wide, for screens on which the text of the
first would be too small.
"""
from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from meshtrain.names import AXES
from meshtrain.pages.skin import PHONE, WIDTH, esc

COLORS = 8


def drawing(height: float, parts: Iterable[str], label: str, width: int = WIDTH, more: str = "") -> str:
    """Return an SVG element. parts: its content. more: further attributes, as HTML."""
    return (f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{esc(label)}" '
            f'xmlns="http://www.w3.org/2000/svg"{more}>{"".join(parts)}</svg>')


def below(drawings: Sequence[str]) -> str:
    """Return one drawing with these drawings below each other."""
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

MOST_HOSTS = {WIDTH: 8, PHONE: 4}       # hosts that are drawn; of more, the first and the last half of this number
CELL, GAP, LABEL, ROW = 26, 14, 66, 19


def mesh(data: dict, width: int = WIDTH) -> str:
    """Return a drawing of the hosts side by side. Each GPU shows its coordinate on every axis larger than 1; the axis
    with the slowest link is at the top."""
    count, per_host = data["num_devices"], min(data["gpus_per_host"], data["num_devices"])
    hosts, order = -(-count // per_host), [axis for axis in data["placement"] if data["sizes"][axis] > 1]
    half = MOST_HOSTS[width] // 2
    shown = list(range(hosts)) if hosts <= 2 * half else [*range(half), *range(hosts - half, hosts)]
    cell = min(CELL, (width - LABEL) / per_host)
    a_line = max(1, int((width - LABEL) // (per_host * cell + GAP)))
    lines = [shown[k:k + a_line] for k in range(0, len(shown), a_line)]
    if hosts > 2 * half:
        lines = [part[k:k + a_line] for part in (shown[:half], shown[half:]) for k in range(0, half, a_line)]
    parts, y = [], 0.0
    for number, these in enumerate(lines):
        if number and these[0] != lines[number - 1][-1] + 1:
            left_out = these[0] - lines[number - 1][-1] - 1
            parts += [line(LABEL, y + 10, LABEL + 40, y + 10, "rule"),
                      text(LABEL + 50, y + 14, f"{left_out:,} hosts of {per_host} more" + ", in the same order" * (
                          width == WIDTH), 12, kind="soft")]
            y += 34
        parts += [text(LABEL - 10, y + 40 + ROW * k + 12, axis, 12, "end") for k, axis in enumerate(order)]
        parts += [text(LABEL - 10, y + 32, "GPU", 11, "end", "soft")]
        for k, host in enumerate(these):
            parts += _host(data, order, host, cell, (LABEL + k * (per_host * cell + GAP), y))
        y += 42 + ROW * max(1, len(order)) + 20
    return drawing(y - 8, parts, f"{mesh_words(data)} on {hosts:,} hosts of {per_host}", width)


def mesh_words(data: dict) -> str:
    return " × ".join(f"{axis} {data['sizes'][axis]}" for axis in data["placement"]
                      if data["sizes"][axis] > 1) or "one device"


def _host(data: dict, order: Sequence[str], host: int, cell: float, at: tuple[float, float]) -> list[str]:
    per_host, (x, y) = min(data["gpus_per_host"], data["num_devices"]), at
    ids = range(host * per_host, min((host + 1) * per_host, data["num_devices"]))
    parts = [text(x, y + 12, f"host {host:,}", 12), line(x, y + 18, x + cell * len(ids) - 2, y + 18, "rule")]
    def small(word: str) -> float:
        return min(11, 1.6 * cell / len(word))

    if len(str(ids[-1])) * 7 <= 1.35 * cell:
        parts += [text(x + cell * (k + 0.5) - 1, y + 32, i, small(str(i)), "middle", "soft") for k, i in enumerate(ids)]
    else:
        parts += [text(x + cell * len(ids) / 2, y + 32, f"{ids[0]:,} … {ids[-1]:,}", 11, "middle", "soft")]
    for row, axis in enumerate(order):
        top, places = y + 40 + ROW * row, [coordinate(data, axis, i) for i in ids]
        color = (AXES if axis in AXES else order).index(axis) % COLORS
        start = 0
        for k in range(1, len(places) + 1):
            if k == len(places) or places[k] != places[start]:
                shade, word = 0.2 + 0.5 * places[start] / (data["sizes"][axis] - 1), str(places[start])
                parts += [rect(x + cell * start, top, cell * (k - start) - 2, ROW - 3, f"c{color}", shade)]
                if small(word) * (k - start) >= 6.5:
                    parts += [text(x + cell * (start + k) / 2 - 1, top + 12, word, min(11, small(word) * (k - start)),
                                   "middle")]
                start = k
    return parts


def coordinate(data: dict, axis: str, device: int) -> int:
    """Return a device's coordinate on an axis. Devices are numbered in placement order, the last axis fastest."""
    order = data["placement"]
    inner = math.prod(data["sizes"][name] for name in order[order.index(axis) + 1:])
    return device // inner % data["sizes"][axis]


# ---- bars ------------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A stacked bar. parts: (colour, name, value). note: text below the label. total: shown at its end; None: the sum
    of the parts."""
    label: str
    parts: Sequence[tuple[int, str, float]]
    note: str = ""
    total: float | None = None


def bars(rows: Sequence[Bar], show: Callable[[float], str], label: str, marks: Sequence[tuple[float, str]] = (),
         most: float | None = None, legend: bool = False, width: int = WIDTH) -> str:
    """Return a drawing of stacked bars on one scale. show: formats a value. marks: (value, name) of lines across all
    bars. most: largest value of the scale. legend: whether to name the colours below the bars, for a drawing outside a
    page. In the phone layout, labels are above the bars."""
    beside = width == WIDTH
    left, right, height = (max(max(110, 7.2 * len(row.label) + 14, 5.8 * len(row.note) + 14)
                               for row in rows), WIDTH - 92, 30) if beside else (1, width - 1, 22)
    most = most or max([sum(part[2] for part in row.parts) for row in rows] + [value for value, _ in marks]) or 1.0
    scale = (right - left) / most
    above = (8.0 if beside else 16.0 * len(marks)) + 20 if marks else 4.0
    parts, y, tops = [], above, []
    for row in rows:
        x, total = left, sum(part[2] for part in row.parts) if row.total is None else row.total
        if beside:
            parts += [text(left - 12, y + (14 if row.note else 20), row.label, 12.5, "end")]
            parts += [text(left - 12, y + 28, row.note, 10.5, "end", "soft")] if row.note else []
        else:
            words = f"{row.label} · {row.note}" if row.note else row.label
            parts += [text(left, y + 11, words, 12), text(right, y + 11, show(total), 12, "end")]
            y += 17
        tops.append(y)
        parts += [rect(left, y, (right - left) if marks else 0, height, "box")] if marks else []
        for color, name, value in row.parts:
            long = value * scale
            parts += [rect(x, y, long, height, f"c{color} gap", title=f"{name}: {show(value)}")]
            if fitting := [words for words in (f"{name} {show(value)}", name) if long > 6.4 * len(words) + 8]:
                parts += [text(x + long / 2, y + height / 2 + 4.5, fitting[0], 11.5, "middle", "on")]
            x += long
        parts += [text(right + 8 if marks else x + 8, y + 20, show(total), 12)] if beside else []
        y += height + 14
    for k, (value, words) in enumerate(marks):
        x, top = left + value * scale, 20 if beside else 16 * (k + 1) + 2
        stretches = [(top, y - 10)] if beside else [(top, above), *((bar, bar + height) for bar in tops)]
        parts += [*(line(x, begin, x, end, "edge") for begin, end in stretches),
                  text(x + (4 if k and beside else -4), top - 5, words, 11, "start" if k and beside else "end", "soft")]
    if legend:
        parts += _legend([(color, name) for color, name in sorted({part[:2] for row in rows for part in row.parts})], y)
        y += 20
    return drawing(y - 4, parts, label, width)


def legend(names: Sequence[tuple[int, str]]) -> str:
    """Return a drawing of (colour, name) pairs in a line, for `below`."""
    return drawing(14, _legend(names, 0), ", ".join(name for _, name in names))


def _legend(names: Sequence[tuple[int, str]], y: float) -> list[str]:
    """Return the elements of (colour, name) pairs in a line."""
    parts, x = [], 74
    for color, name in names:
        parts += [rect(x, y, 11, 11, f"c{color}"), text(x + 17, y + 9.5, name, 11, kind="soft")]
        x += 40 + 6 * len(name)
    return parts


# ---- curves and points -----------------------------------------------------------------------------------------------


class PlotCurve(NamedTuple):
    """A curve. points: (x, y). dots: whether to draw the points without joining them. names: labels of the first dots.
    pale: whether to draw a thin, faint line, behind the smoothed curve of the same numbers."""
    color: int
    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    names: Sequence[str] = ()
    pale: bool = False


class PlotAxis(NamedTuple):
    """An axis. name: text at the axis's end. show: a function that formats a value. zero: whether the axis begins at 0.
    unit: ticks are round multiples of this number. log: whether the axis is logarithmic (positive values only)."""
    name: str
    show: Callable[[float], str]
    zero: bool = False
    unit: float = 1.0
    log: bool = False


@dataclasses.dataclass(frozen=True)
class Plot:
    """Curves in one frame. verticals, levels: (value, name) of vertical and horizontal lines. height: the height of the
    wide layout. title: (curve, point) → tooltip."""
    rows: Sequence[PlotCurve]
    x_axis: PlotAxis
    y_axis: PlotAxis
    label: str
    verticals: Sequence[tuple[float, str]] = ()
    levels: Sequence[tuple[float, str]] = ()
    height: int = 300
    title: Callable[[int, int], str] | None = None

    def draw(self, width: int = WIDTH) -> str:
        wide = width == WIDTH
        height = self.height if wide else min(self.height, 260)
        x_axis, y_axis = self.x_axis, self.y_axis
        left = 74 if wide else 14 + 6.4 * max(len(y_axis.show(y)) for y in self._ticks(y_axis, self._y_range(), 6))
        at_x = Scale(x_axis, self._x_range(), (left, width - (24 if wide else 12)))
        at_y = Scale(y_axis, self._y_range(), (height - 40, 22))
        right, (bottom, top) = at_x.places[1], at_y.places
        named = min(11.0, 1.75 * width / max(1, len(y_axis.name)))
        parts = [text(left if wide else 2, 11, y_axis.name, named, kind="soft"),
                 text(right, height - 4, x_axis.name, 11, "end", "soft")]
        for y in self._ticks(y_axis, self._y_range(), 6):
            parts += [line(left, at_y(y), right, at_y(y), "rule"),
                      text(left - 8, at_y(y) + 4, y_axis.show(y), 11, "end", "soft")]
        parts += [text(at_x(x), bottom + 18, x_axis.show(x), 11, "middle", "soft")
                  for x in self._ticks(x_axis, self._x_range(), 6 if wide else 3)]
        for value, words in self.levels:
            parts += [line(left, at_y(value), right, at_y(value), "edge"),
                      text(right, at_y(value) - 5, words, 11, "end", "soft")]
        for value, words in self.verticals:
            parts += [line(at_x(value), top, at_x(value), bottom, "mark"),
                      text(at_x(value) + 4, top + 8, words, 10.5, kind="soft")]
        taken: list[tuple[float, float]] = []
        for k, row in enumerate(self.rows):
            if row.dots or len(row.points) == 1:
                said = self.title if wide else None
                parts += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="{4.5 if wide else 3.5}" '
                          f'class="c{row.color} gap">{f"<title>{esc(said(k, i))}</title>" if said else ""}</circle>'
                          for i, (x, y) in enumerate(row.points)]
                parts += [_beside(at_x(x), at_y(y), name, taken) for (x, y), name in zip(row.points, row.names)]
            elif row.points:
                path = "L".join(f"{at_x(x):.1f} {at_y(y):.2f}"
                                for x, y in thin(row.points, MOST_POINTS if wide else MOST_POINTS // 3))
                name = "" if row.pale else f' data-name="{esc(row.name)}"'
                parts += [f'<path d="M{path}" class="curve {"pale " * row.pale}s{row.color}"{name}/>']
        return drawing(height, parts, self.label, width, _for_hover(at_x, at_y, y_axis))

    def _x_range(self) -> tuple[float, float]:
        values = [x for row in self.rows for x, _ in row.points] + [x for x, _ in self.verticals]
        low, high = min(values), max(values)
        return (low, high) if high > low else (low / 2, low * 2) if self.x_axis.log else (low - 1, low + 1)

    def _y_range(self) -> tuple[float, float]:
        values = [y for row in self.rows for _, y in row.points] + [y for y, _ in self.levels]
        low, high = 0.0 if self.y_axis.zero else min(values), max(values)
        if self.y_axis.log:
            return low / 1.1, max(high, low * 1.1) * 1.1
        if high - low <= FLAT * max(abs(low), abs(high)):      # a constant up to rounding is drawn as a flat line
            middle, half = (low + high) / 2, 0.5 * max(abs(low), abs(high)) or 1.0
            low, high = middle - half, middle + half
        spare = 0.06 * (high - low)
        return low if self.y_axis.zero else low - spare, high + spare

    @staticmethod
    def _ticks(axis: PlotAxis, within: tuple[float, float], most: int) -> list[float]:
        """Return ticks whose texts differ; fewer than `most` if `most` ticks would have equal texts."""
        found = log_ticks(*within, most) if axis.log else [
            axis.unit * tick for tick in ticks(within[0] / axis.unit, within[1] / axis.unit, most)]
        texts = {axis.show(tick): tick for tick in reversed(found)}
        return (Plot._ticks(axis, within, most - 1) if len(texts) < len(found) and most > 1 else
                list(texts.values())[::-1])


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps a value to its coordinate in a drawing. values: the range. places: the coordinates of its ends."""
    axis: PlotAxis
    values: tuple[float, float]
    places: tuple[float, float]

    def __call__(self, value: float) -> float:
        (low, high), (start, end) = self.values, self.places
        if self.axis.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return start + (value - low) / (high - low) * (end - start)


def _for_hover(at_x: Scale, at_y: Scale, y_axis: PlotAxis) -> str:
    """Return the attributes from which skin.js computes the values of curves at the pointer."""
    def words(scale) -> str:
        return " ".join(f"{value:.9g}" for value in (*scale.values, *scale.places, scale.axis.log))

    percent = ' data-percent=""' if y_axis.show(1.0).endswith("%") else ""
    return f' data-x="{words(at_x)}" data-y="{words(at_y)}" data-of="{esc(at_x.axis.name)}"{percent}'


def _beside(x: float, y: float, name: str, taken: list[tuple[float, float]]) -> str:
    """Return the label of a dot, at a position without another label. taken: positions of earlier labels; this one is
    appended."""
    around = [(dx, dy) for far in (1, 2, 3, 4) for dx, dy in ((11, 4), (-11, 4), (0, -8), (0, 16), (9, -5), (-9, -5),
                                                               (9, 13), (-9, 13)) for dx, dy in [(dx * far, dy * far)]]
    free = [(x + dx, y + dy) for dx, dy in around
            if all(abs(x + dx - a) > 15 or abs(y + dy - b) > 10 for a, b in taken)]
    to_x, to_y = (free or [(x + 11, y + 4)])[0]
    taken.append((to_x, to_y))
    far = "" if math.hypot(to_x - x, to_y - 4 - y) < 16 else line(x, y, to_x, to_y - 4, "rule")
    return far + text(to_x, to_y, name, 11, "middle")


MOST_POINTS = 1600
FLAT = 1e-6     # a curve whose range is a smaller share of its values is constant


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most about `most` points: the minimum and maximum of each interval, so that spikes remain."""
    if len(points) <= most:
        return list(points)
    step, kept = 2 * len(points) / most, []
    for k in range(most // 2):
        part = points[int(k * step):max(int((k + 1) * step), int(k * step) + 1)]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return about `most` round numbers from low to high, which are 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from low to high, both positive: powers of ten, and 2 and 5 times these if they are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    def within(of: Sequence[int], every: int = 1) -> list[float]:
        return [k * 10.0 ** power for power in powers if power % every == 0 for k in of
                if low <= k * 10.0 ** power <= high]

    for of in ((1, 2, 5), (1, 3), (1,)):
        if 2 <= len(found := within(of)) <= most + 1:
            return found
    return within((1,), -(-len(found) // most)) if len(found) > most else ticks(low, high, most)


# ---- heat ------------------------------------------------------------------------------------------------------------


def heat(rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[int], label: str,
         width: int = WIDTH) -> str:
    """Return a heat map. rows: (name, value of each column). columns: step numbers. A value of 1 is pale; the largest
    value, or 2 if that is larger, has the full colour."""
    left, right, most = 74, width - (24 if width == WIDTH else 8), max([
        2.0, *(value for _, values in rows for value in values if value is not None)])
    tall, wide = max(4.0, min(18.0, 480 / len(rows))), (right - left) / len(columns)
    every, parts = math.ceil(11 / tall), []
    for k, (name, values) in enumerate(rows):
        parts += [text(left - 8, 4 + tall * (k + 0.5) + 4, name, 11, "end", "soft")] if k % every == 0 else []
        parts += [rect(left + wide * i, 4 + tall * k, wide - min(1, wide / 4), tall - 1, "c1",
                       0.06 + 0.93 * (value - 1) / (most - 1),
                       f"{name}, step {columns[i]:,}: {value:.2f}" if width == WIDTH else "")
                       for i, value in enumerate(values) if value is not None]
    bottom = 4 + tall * len(rows)
    marked = sorted({0, len(columns) - 1, *range(0, len(columns), max(1, len(columns) // (width // 120)))})
    marked = [i for i in marked if i in (0, len(columns) - 1) or len(columns) - 1 - i >= len(columns) / 8]
    parts += [text(left + wide * (i + 0.5), bottom + 16, f"{columns[i]:,}", 11, "middle", "soft") for i in marked]
    return drawing(bottom + 34, [*parts, text(right, bottom + 31, "step", 11, "end", "soft")], label, width)


# ---- a schedule ------------------------------------------------------------------------------------------------------

KINDS = {"F": (0, "forward"), "B": (1, "input gradient"), "W": (2, "weight gradient"), "loss": (3, "head and loss")}


def kinds(data: dict) -> dict[str, tuple[int, str]]:
    """Return the kinds of ops in the schedule: {kind: (colour, name)}."""
    drawn = {op[1] for part in data["lines"] for op in part["ops"]}
    shown = {kind: words for kind, words in KINDS.items() if kind in drawn}
    return shown if data["split"] or "B" not in shown else shown | {"B": (shown["B"][0], "both gradients")}


def schedule(data: dict, heading: str = "", width: int = WIDTH) -> str:
    """Return a drawing with a row for each stage over simulated time; later chunks are lighter. data: the result of
    `inspection.chart.as_json`. heading: the heading of a drawing outside a page, which also has a legend."""
    left, named, tall = (74, "stage ", 22 if data["num_stages"] <= 16 else 13) if width == WIDTH else (
        36, "", 18 if data["num_stages"] <= 16 else 13)
    longest = max(part["end"] - part["begin"] for part in data["lines"])
    scale, y = (width - left - 20) / longest, 24.0 if heading else 4.0
    parts = [text(4, 13, heading, 11)] if heading else []
    for part in data["lines"]:
        if part["heading"]:
            parts += [text(left, y + 10, part["heading"], 11, kind="soft")]
            y += 17
        start, stop = part["begin"], part["end"]
        for s in range(data["num_stages"]):
            parts += [text(left - 10, y + tall * s + tall / 2 + 3, f"{named}{s}", 11, "end", "soft"),
                      rect(left, y + tall * s, (stop - start) * scale, tall - 2, "box")]
        for s, kind, microbatch, chunk, begin, end in part["ops"]:
            x, long = left + (max(begin, start) - start) * scale, (min(end, stop) - max(begin, start)) * scale
            shade = 1 - 0.45 * chunk / max(1, data["num_chunks"] - 1)
            parts += [rect(x, y + tall * s, long, tall - 2, f"c{KINDS[kind][0]} gap", shade)]
            if microbatch >= 0 and long > 6 * len(str(microbatch)) + 2 and begin >= start and end <= stop + 1e-6:
                parts += [text(x + long / 2, y + tall * s + tall / 2 + 3, microbatch, min(10.5, tall - 4), "middle",
                               "on" if shade > 0.8 else "")]
        middle = y + tall * data["num_stages"] / 2 + 4
        parts += [text(left - 4, middle, "…", 14, "end")] if part["more_before"] and not part["heading"] else []
        parts += [text(left + (stop - start) * scale + 4, middle, "…", 14)] if part["more_after"] else []
        y += tall * data["num_stages"] + 12
    if heading:
        lighter = " (later chunks lighter)" if data["num_chunks"] > 1 else ""
        parts += _legend([(color, name + lighter * (kind == "F")) for kind, (color, name) in kinds(data).items()], y)
        y += 20
    return drawing(y, parts, f"{data['name']}: {data['num_stages']} stages, {data['num_microbatches']} microbatches",
                   width)
