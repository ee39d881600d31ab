"""Pictures of given numbers, for notebooks: bars, curves, a mesh, and the pieces of an array on each device."""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from meshtrain.config import ConfigError
from meshtrain.inspection import summary
from meshtrain.names import AXES
from meshtrain.pages import pictures
from meshtrain.pages.pictures import Bar, PlotAxis, PlotCurve
from meshtrain.pages.shards import draw_shards
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.shown import JsonTable
from meshtrain.units import seconds, size

UNITS: dict[str, Callable[[float], str]] = {"bytes": size, "s": seconds, "%": "{:.0f}%".format}


def bars(rows: Mapping[str, Mapping[str, float]], title: str = "", unit: str = "bytes") -> JsonTable:
    """Draw stacked bars, one for each label: {label: {part: value}}. A part has the same colour in every bar.

    unit: "bytes" and "s" print as 1.5 KiB and 1.5 ms, "%" as 50%; any other word is printed after the number.

    >>> mt.bars({"DDP": {"weights": 2048, "gradients": 4096}, "ZeRO-3": {"weights": 512, "gradients": 1024}})
    DDP     weights 2.0 KiB, gradients 4.0 KiB = 6.0 KiB
    ZeRO-3  weights 512 B, gradients 1.0 KiB = 1.5 KiB
    """
    if not isinstance(rows, Mapping) or not rows or not all(isinstance(parts, Mapping) for parts in rows.values()):
        raise ConfigError('bars takes a dict of dicts, {label: {part: value}}, e.g. {"DDP": {"weights": 2048}}')
    for name, parts in rows.items():
        for part, value in parts.items():
            if not hasattr(value, "__float__") or not 0 <= float(value):
                raise ConfigError(f"{name!r}: {part!r}: {value!r} is not a number of at least 0")
    show = UNITS.get(unit) or (lambda value: f"{value:g} {unit}".rstrip())
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    drawn = [Bar(str(name), [(names.index(part) % pictures.COLORS, str(part), float(value))
                             for part, value in parts.items()]) for name, parts in rows.items()]
    width = max(len(bar.label) for bar in drawn)
    lines = [f"{bar.label:{width}}  {', '.join(f'{part} {show(value)}' for _, part, value in bar.parts)}"
             + (f" = {show(sum(value for *_, value in bar.parts))}" if len(bar.parts) > 1 else "") for bar in drawn]
    return JsonTable(dict(rows), "\n".join(lines), pictures.bars(drawn, show, title, legend=True))


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], x: str = "", y: str = "", dots: Collection[str] = (),
           marks: Mapping[str, float] | None = None, unit: str = "", log: bool = False,
           hover: Mapping[str, Sequence[str]] | None = None) -> JsonTable:
    """Draw curves in one frame: {name: [(x, y), …]}. x, y: names of the axes.

    dots: names of the curves whose points are marked and not joined. marks: label -> value of x with a vertical line.
    unit: the unit of y, see `bars`. log: whether both axes are logarithmic. hover: name of a curve of dots -> a tooltip
    for each point. Points that are not finite are not drawn.

    >>> mt.curves({"loss": [(1, 6.5), (2, 6.1)]}, "step", "loss")
    loss: 2 points, the last (2, 6.1)
    """
    if not isinstance(lines, Mapping) or not lines or not all(
            len(points) and all(len(point) == 2 for point in points) for points in lines.values()):
        raise ConfigError('curves takes a dict of lists of points, {name: [(x, y), …]}, e.g. {"loss": [(1, 6.5)]}')
    show = UNITS.get(unit) or "{:,g}".format
    if log and min(min(point) for points in lines.values() for point in points) <= 0:
        raise ConfigError("log=True needs points above 0; leave log out, or drop the other points")
    at = math.log10 if log else float
    finite = {name: [k for k, point in enumerate(points) if all(map(math.isfinite, point))]
              for name, points in lines.items()}
    if not any(finite.values()):
        raise ConfigError("curves: no point is finite; give at least one point to draw")
    drawn = [PlotCurve(k % pictures.COLORS, name, [(at(points[i][0]), at(points[i][1])) for i in finite[name]],
                       name in dots) for k, (name, points) in enumerate(lines.items())]
    def axis(words: str, of: Callable[[float], str]) -> PlotAxis:
        return PlotAxis(words, lambda value: of(10 ** value if log else value))

    titles = [[words[i] for i in finite[name]] for name, points in lines.items()
              for words in [(hover or {}).get(name, [""] * len(points))]]
    last = {name: points[-1] for name, points in lines.items()}
    return JsonTable(
        {name: [list(point) for point in points] for name, points in lines.items()},
        "\n".join(f"{name}: {len(lines[name])} points, the last ({a:g}, {b:g})" for name, (a, b) in last.items()),
        pictures.below([pictures.legend([(curve.color, curve.name) for curve in drawn]), pictures.Plot(
            drawn, axis(x, "{:,.5g}".format), axis(y, show), f"{y} by {x}",
            verticals=[(at(value), words) for words, value in (marks or {}).items()],
            title=(lambda k, i: titles[k][i]) if hover else None).draw()]))


def mesh(sizes: Mapping[str, int], gpus_per_host: int = 8) -> JsonTable:
    """Draw a mesh of GPUs on their hosts, each with its coordinate on every axis. The JSON is {axis: groups of GPUs}.

    >>> mt.mesh({"data": 2, "tensor": 2})["tensor"]
    [[0, 1], [2, 3]]
    """
    if not isinstance(sizes, Mapping) or not sizes or set(sizes) - set(AXES) or not all(
            isinstance(n, int) and n > 0 for n in sizes.values()):
        raise ConfigError(f"mesh={sizes!r} is not a dict of axes and sizes; give e.g. {{\"data\": 2, \"tensor\": 4}}; "
                          f"the axes are {', '.join(AXES)}")
    spec = MeshSpec(sizes)
    data = summary.mesh(spec, None, "any") | {"gpus_per_host": gpus_per_host}
    groups = {axis: spec.groups(axis) for axis in spec.placement if spec.sizes[axis] > 1}
    text = "\n".join(f"{axis:8}{' '.join(str(group) for group in of_axis)}" for axis, of_axis in groups.items())
    return JsonTable(groups, text, pictures.mesh(data))


def shards(states: Mapping[str, Sequence[Sequence[int | str | None]]], ring: bool = False) -> JsonTable:
    """Draw the pieces of an array on each device, for several states: {"before": …, "→ after": …}. A state whose name
    begins with "→" has an arrow before it.

    A piece is the number of the device that it came from (shown by its colour), a text such as "Σ" for a sum, or None
    if the device holds nothing. ring: whether to draw the ring in which devices send to their neighbours, too.

    >>> mt.shards({"before": [[0, None], [None, 1]], "→ all-gather": [[0, 1], [0, 1]]})
    before        device 0: 0 ·, device 1: · 1
    → all-gather  device 0: 0 1, device 1: 0 1
    """
    counts = {len(rows) for rows in states.values()} if isinstance(states, Mapping) else set()
    if len(counts) != 1 or 0 in counts:
        raise ConfigError('shards takes {state: pieces of each device}, with the same devices in each state, e.g. '
                          '{"before": [[0, None], [None, 1]], "after": [[0, 1], [0, 1]]}')
    width = max(map(len, states))
    lines = [f"{name:{width}}  " + ", ".join(
        f"device {d}: {' '.join('·' if piece is None else str(piece) for piece in row)}"
        for d, row in enumerate(rows)) for name, rows in states.items()]
    return JsonTable({name: [list(row) for row in rows] for name, rows in states.items()}, "\n".join(lines),
                     draw_shards(states, ring))
