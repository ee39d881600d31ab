"""A picture of which device holds which piece of an array, before and after a collective, and of the ring of devices.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshtrain.pages.pictures import COLORS, WIDTH, drawing, line, rect, text

LEFT, TOP, PIECE, BETWEEN, RING = 70, 24, 22, 56, 220      # RING: the width of the ring's picture


def draw_shards(states: Mapping[str, Sequence[Sequence[int | str | None]]], ring: bool) -> str:
    """Return a drawing with one grid per state: a row for each device, a column for each piece. A number is the device
    that a piece came from, and gives its colour. A state whose name begins with "→" has an arrow before it. ring:
    whether to draw the ring of devices, too."""
    devices = len(next(iter(states.values())))
    columns = [max(map(len, rows)) for rows in states.values()]
    room = WIDTH - LEFT - 20 - RING * ring - BETWEEN * (len(states) - 1)
    piece = min(PIECE, room / max(1, sum(columns)))
    parts = [text(LEFT - 10, TOP + PIECE * d + 15, f"device {d}", 11, "end", "soft") for d in range(devices)]
    x = float(LEFT)
    for (name, rows), width in zip(states.items(), columns):
        if name.startswith("→"):
            middle = TOP + PIECE * devices / 2
            parts += _arrow(x - BETWEEN + 14, middle, x - 14, middle)
        parts += [text(x, TOP - 8, name.lstrip("→ "), 12)]
        for d, row in enumerate(rows):
            for p, value in enumerate(row):
                parts += _piece(x + piece * p, TOP + PIECE * d, piece - 1, value)
        x += max(piece * width, 6.6 * len(name)) + BETWEEN
    if ring:
        tall = PIECE * devices
        parts += draw_ring(devices, x - BETWEEN + RING / 2, TOP + tall / 2, min(RING, tall) / 2 - 16)
    return drawing(TOP + PIECE * devices + 8, parts, f"pieces of {devices} devices: {', '.join(states)}")


def draw_ring(devices: int, x: float, y: float, radius: float) -> list[str]:
    """Return the elements of a ring of devices around (x, y), each with an arrow to the next."""
    at = [(x + radius * math.sin(2 * math.pi * d / devices), y - radius * math.cos(2 * math.pi * d / devices))
          for d in range(devices)]
    parts = []
    for d, (x1, y1) in enumerate(at if devices > 1 else []):
        x2, y2 = at[(d + 1) % devices]
        spare = 12 / math.hypot(x2 - x1, y2 - y1)
        parts += _arrow(x1 + spare * (x2 - x1), y1 + spare * (y2 - y1), x2 - spare * (x2 - x1), y2 - spare * (y2 - y1))
    for d, (a, b) in enumerate(at):
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="10" class="c{d % COLORS} gap"/>',
                  text(a, b + 4, d, 10.5, "middle", "on")]
    return parts


def _piece(x: float, y: float, width: float, value: int | str | None) -> list[str]:
    if value is None:
        return [rect(x, y, width, PIECE - 2, "box")]
    if isinstance(value, str):
        return [rect(x, y, width, PIECE - 2, "c7", 0.35), text(x + width / 2, y + 14, value, 11, "middle")]
    return [rect(x, y, width, PIECE - 2, f"c{value % COLORS}"),
            text(x + width / 2, y + 14, value, 10.5, "middle", "on")]


def _arrow(x1: float, y1: float, x2: float, y2: float) -> list[str]:
    angle = math.atan2(y2 - y1, x2 - x1)
    head = [line(x2, y2, x2 - 5 * math.cos(angle + turn), y2 - 5 * math.sin(angle + turn), "edge")
            for turn in (0.5, -0.5)]
    return [line(x1, y1, x2, y2, "edge"), *head]
