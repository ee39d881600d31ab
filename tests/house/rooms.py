"""The rooms of the package and what they import, as a picture: python tests/house/rooms.py writes docs/rooms.svg.

A room stands above every room that it imports. A line leads to a room that no other room on the way imports: the others follow
from these. Numbers are those of the way of a step in docs/code.md.
"""
from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import sources  # noqa: E402

PICTURE = ROOT / "docs" / "rooms.svg"

PAGE = ROOT / "docs" / "code.md"


def read_way() -> list[str]:
    """The files that a batch passes, as the numbered list of docs/code.md has them."""
    section = PAGE.read_text(encoding="utf-8").partition("## The way of a step")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. \[meshtrain/(\S+)\]", section, re.MULTILINE)


def read_modules(root: Path = ROOT) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports. A name that is imported from a package counts as a module if
    there is one."""
    files = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
             for path in sorted((root / "meshtrain").rglob("*.py"))}
    return {name: set(_imports(path, files)) - {name} for name, path in files.items()}


def _imports(path: Path, files: Mapping[str, Path]) -> Iterable[str]:
    for node in sources.nodes_of(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in files else node.module


def room_of(module: str, rooms: Iterable[str]) -> str:
    """The longest room that begins a module's path; "" for a file at the root."""
    path = module.removeprefix("meshtrain").removeprefix(".").replace(".", "/")
    return max((room for room in rooms if path == room or path.startswith(f"{room}/")), key=len, default="")


def read_rooms(rooms: Iterable[str], modules: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Room -> the rooms that it imports."""
    rooms = set(rooms)
    edges: dict[str, set[str]] = {room: set() for room in rooms}
    for module, imports in modules.items():
        if here := room_of(module, rooms):
            edges[here] |= {there for name in imports if (there := room_of(name, rooms)) and there != here}
    return edges


def reachable(edges: Mapping[str, set[str]], start: str) -> set[str]:
    """The rooms that a room imports, and those that these import."""
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting += edges[room]
    return seen


def direct(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The edges that do not follow from others."""
    beyond = {room: reachable(edges, room) for room in edges}
    return {room: {there for there in targets if not any(there in beyond[other] for other in targets - {there})}
            for room, targets in edges.items()}


def levels(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The rooms by height: each is one above the highest that it imports. Raises: ValueError for a circle."""
    height: dict[str, int] = {}

    def measure(room: str, path: tuple[str, ...]) -> int:
        if room in path:
            raise ValueError(f"rooms import in a circle: {' -> '.join((*path, room))}")
        if room not in height:
            height[room] = 1 + max((measure(there, (*path, room)) for there in edges[room]), default=-1)
        return height[room]
    for room in sorted(edges):
        measure(room, ())
    return [sorted(room for room in edges if height[room] == level) for level in range(max(height.values()) + 1)]


def ordered(rows: list[list[str]], edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Each row in the order of the middles of what its rooms import, so that lines cross little."""
    place: dict[str, float] = {}
    result = []
    for row in rows:
        def middle(room: str) -> float:
            below = [place[there] for there in edges[room] if there in place]
            return sum(below) / len(below) if below else 0.5
        arranged = sorted(row, key=lambda room: (middle(room), room))
        place |= {room: (k + 0.5) / len(arranged) for k, room in enumerate(arranged)}
        result.append(arranged)
    return result


def draw(edges: Mapping[str, set[str]], way: Mapping[str, list[int]]) -> str:
    """An SVG file. way: room -> numbers of the stations that lie in it."""
    from meshtrain.pages import pictures, skin
    lines = direct(edges)
    rows = ordered(levels(edges), lines)
    step, height, width = 74, 32, skin.WIDTH
    at: dict[str, tuple[float, float, float]] = {}
    for level, row in enumerate(reversed(rows)):
        share = width / len(row)
        for k, room in enumerate(row):
            wide = min(share - 16, 24 + 7.2 * (len(room) + 2 * len(way.get(room, ()))))
            at[room] = (share * (k + 0.5), level * step + 4, wide)
    parts = [pictures.line(at[room][0], at[room][1] + height, at[there][0], at[there][1], "rule")
             for room in sorted(lines) for there in sorted(lines[room])]
    for room, (x, y, wide) in sorted(at.items()):
        stations = "".join("①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮"[number - 1] for number in way.get(room, ()))
        parts += [pictures.rect(x - wide / 2, y, wide, height, "c0" if stations else "c7", 0.35 if stations else 0.12),
                  pictures.text(x, y + 21, f"{stations} {room}".strip(), 12, "middle")]
    return skin.alone(pictures.drawing(len(rows) * step - step + height + 8, parts, "rooms and what they import")) + "\n"


def stations(rooms: Iterable[str]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for number, path in enumerate(read_way(), 1):
        numbers.setdefault(room_of("meshtrain." + path.removesuffix(".py").replace("/", "."), rooms), []).append(number)
    return numbers


def drawn() -> str:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "house")]
    from test_house import EVERYONE, OPEN_TO
    rooms = {"data" if room.startswith("data/") else room for room in OPEN_TO}      # its folders import each other's files
    everyones = {"meshtrain." + name.replace("/", ".") for name in EVERYONE}
    modules = {module: imports - everyones for module, imports in read_modules().items()}
    return draw(read_rooms(rooms, modules), stations(rooms))


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
