"""The page of `prove --html`: each layout compared with one device, made from the JSON output."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from meshtrain.pages import pictures, skin
from meshtrain.pages.skin import Cell, Column, PageSection, Tile, number
from meshtrain.units import amount, duration, plural

LEAST = 1e-8            # smaller than any relative difference of float32: the palest colour of the picture
LABEL, ROW, HEAD, NAME = 54, 16, 18, 15
SHOWN = (
    "The command runs the compiled training step of each layout for three steps, from the same weights and batches as "
    "on one device. It compares the loss, the gradient norm, the gradient of every parameter (in the optimizer state), "
    "and the losses of all three steps.",
    "The model is small and has the run's features. Sizes that do not divide, and faults that only large sizes show, "
    "are not tested; python -m meshtrain.inspect checks the run itself.",
    "An error that one device also makes is not found. Whether the model is the one that you intended is not tested.",
)


def page(data: dict) -> str:
    """Return the page as HTML. data: the dict of `prove --json`."""
    sections = [PageSection("differs", "What differs", differing(data)),
                PageSection("findings", "Other findings", skin.bullets(data["findings"], "warn")),
                PageSection("leaves", "Each layout's gradients, parameter by parameter", heat(data)),
                PageSection("cells", "The layouts", table(data)),
                PageSection("shown", "What is tested, and what is not", skin.bullets([*SHOWN, *data["notes"]]))]
    head = skin.Head("the same on every layout?", data["name"], verdict(data), lead(data), skin.tiles(tiles(data)))
    return skin.document(head, sections, data)


def verdict(data: dict) -> str:
    cells, wrong = len(data["cells"]), sum(cell["differs"] for cell in data["cells"])
    count = amount(len(data["findings"]), "finding")
    findings = f"{count} about rule files or the GPU program" if data["findings"] else ""
    if not cells:
        return "No layout was compared" + (f"; {findings}." if findings else ".")
    several = plural(cells, "layout")
    if wrong:
        said = (f"No: {wrong} of {cells} {several} {'does' if wrong == 1 else 'do'} not compute what one device "
                "computes")
        return said + (f", and {findings}." if findings else ".")
    said = ("Yes: the one layout computes what one device computes" if cells == 1 else
            f"Yes: all {cells} layouts compute what one device computes")
    return said + (f"; but {findings}." if findings else ".")


def lead(data: dict) -> str:
    return f"{data['devices']} devices, float32, {duration(data['seconds'])}."


def worst(cell: dict) -> tuple[str, float | None]:
    """Return (name, difference) of the parameter whose gradient differs most. None: the difference is not finite."""
    return max(cell["leaves"].items(), key=lambda item: math.inf if item[1] is None else item[1], default=("–", None))


def tiles(data: dict) -> list[Tile]:
    cells, wrong = data["cells"], sum(cell["differs"] for cell in data["cells"])
    offs = [off for cell in cells for off in cell["leaves"].values() if off is not None]
    return [Tile("layouts", str(len(cells)), "compared with one device"),
            Tile("differ", str(wrong), "from one device", "warn" if wrong else ""),
            Tile("largest difference", f"{max(offs, default=0):.0e}",
                 f"of a gradient; {data['tolerance']['state']:.0e} is tolerated"),
            Tile("findings", str(len(data["findings"])), "rule files, GPU program",
                 "warn" if data["findings"] else "")]


def differing(data: dict) -> str:
    wrong = [cell for cell in data["cells"] if cell["differs"]]
    file = data.get("smallest")
    smallest = skin.paragraph(f"The smallest run file that shows the difference: {file}") if file else ""
    return smallest + "".join(f"<h3>{skin.esc(cell['title'])}</h3>{skin.bullets(cell['wrong'])}" for cell in wrong)


def table(data: dict) -> str:
    show = "{:.1e}".format
    columns = [Column("", "n"), Column("result", "keep"), Column("layout", "long"), Column("loss", "n"),
               Column("gradient norm", "n"), Column("worst gradient of", "some"), Column("differs by", "n"),
               Column("three losses", "n"), Column("s", "n")]
    rows: list[Sequence[Cell | str]] = []
    for place, cell in enumerate(data["cells"], 1):
        name, off = worst(cell)
        last = [loss for loss in cell["losses"] if loss is not None]
        rows.append((number(str, place), "DIFFERS" if cell["differs"] else "equal", cell["title"],
                     number(show, cell["loss"]), number(show, cell["grad_norm"]),
                     name, number(show, off), number(show, max(last, default=None)),
                     number("{:.1f}".format, cell["seconds"])))
    return skin.table(columns, rows, "layouts", search="axis, rule file, schedule …",
                      marks=["first" if cell["differs"] else "" for cell in data["cells"]])


def heat(data: dict) -> str:
    key = skin.key([(0, "tolerated", f"up to {data['tolerance']['state']:.0e}"), (4, "differs", "beyond")])
    caption = ("The largest difference of each gradient, divided by its largest element. The stronger the "
               "colour, the larger. The layouts have the numbers of the table below.")
    return skin.figure(functools.partial(heat_drawing, data), caption, key) if _names(data) else ""


def _names(data: dict) -> list[str]:
    """Return the names of the compared leaves. Leaves that belong to no parameter (a step count of the optimizer) are
    left out if they are equal everywhere."""
    worst: dict[str, float] = {}
    for cell in data["cells"]:
        for name, off in cell["leaves"].items():
            worst[name] = max(worst.get(name, 0.0), math.inf if off is None else off)
    return [name for name, off in worst.items() if off or not name.startswith("[")]


def heat_drawing(data: dict, width: int = skin.WIDTH) -> str:
    """Return a drawing with a row for each layout and a column for each parameter (transposed in the phone layout).
    Darker means a larger difference. Return "" without gradients."""
    names, cells = _names(data), data["cells"]
    if not names:
        return ""
    turned, longest = width < skin.WIDTH, max(map(len, names))
    left, head = (min(width / 2, 5.6 * longest + 10), HEAD) if turned else (LABEL, 4.2 * longest + 14)
    if turned:
        wide, tall = (width - left) / len(cells), NAME
    else:
        wide, tall = min(40.0, (width - LABEL - 4.2 * longest) / len(names)), ROW
    parts = _labels(names, [str(k) for k in range(1, len(cells) + 1)], turned, (left, head, wide, tall))
    for row, cell in enumerate(cells):
        for column, name in enumerate(names):
            if name not in cell["leaves"]:
                continue
            x, y = (row, column) if turned else (column, row)
            shade, kind, said = _shade(cell["leaves"][name], data["tolerance"]["state"])
            parts.append(pictures.rect(left + x * wide, head + y * tall, wide - min(1, wide / 4), tall - 1, kind, shade,
                                       "" if turned else f"{cell['title']} · {name}: {said}"))
    return pictures.drawing(head + (len(names) if turned else len(cells)) * tall + 4, parts,
                            "differences of gradients by layout", width)


def _shade(off: float | None, most: float) -> tuple[float, str, str]:
    """Return (opacity, class, text) of a difference. off: None if not finite. most: the tolerance."""
    if off is None or off > most:
        return 0.88, "c4", "not finite" if off is None else f"{off:.1e}"
    return 0.08 + 0.8 * math.log(max(off, LEAST) / LEAST) / math.log(most / LEAST), "c0", f"{off:.1e}"


def _labels(names: Sequence[str], numbers: Sequence[str], turned: bool,
            at: tuple[float, float, float, float]) -> list[str]:
    """Return the labels of columns and rows, as many as fit. at: left, top, width and height of a cell."""
    left, head, wide, tall = at
    def some(words: Sequence[str], room: float) -> list[tuple[int, str]]:
        return [(k, word) for k, word in enumerate(words) if k % max(1, math.ceil(room)) == 0]

    if turned:
        most = int((left - 8) / 5.6)
        cut = [name if len(name) <= most else f"…{name[1 - most:]}" for name in names]
        return [*(pictures.text(left - 8, head + k * tall + 11, name, 10.5, "end", "soft")
                  for k, name in enumerate(cut)),
                *(pictures.text(left + (k + 0.5) * wide, 11, word, 11, "middle", "soft")
                  for k, word in some(numbers, 20 / wide))]
    def up(x: float, word: str) -> str:
        return (f'<text transform="translate({x:.1f} {head - 6:.1f}) rotate(-45)" font-size="11" '
                f'class="soft">{skin.esc(word)}</text>')

    return [*(up(left + (k + 0.6) * wide, name) for k, name in some(names, 13 / wide)),
            *(pictures.text(left - 8, head + k * tall + 12, word, 11, "end", "soft")
              for k, word in enumerate(numbers))]
