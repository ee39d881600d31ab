"""The page of `prove --html`: each layout beside one device, from the dict that `--json` prints."""
from __future__ import annotations

import math
from collections.abc import Sequence

from meshtrain.pages import pictures, skin
from meshtrain.pages.skin import Cell, Column, PageSection, Tile, number
from meshtrain.units import duration

LEAST = 1e-8            # a relative difference that float32 cannot have, the palest of the picture
LABEL, ROW, HEAD = 54, 16, 18
SHOWN = (
    "Each layout's compiled training step is run for three steps from the same weights and batches as that of one "
    "device: loss, gradient norm, the gradient of every parameter as the optimizer's state has it, and three losses.",
    "The model is small and has the run's features; sizes that do not divide, and what only large numbers show, are "
    "not seen here: python -m meshtrain.inspect reads the run itself.",
    "What one device computes wrong, all layouts compute wrong alike: that the model is the one you mean is not shown.",
)


def page(data: dict) -> str:
    """data: the dict of `prove --json`."""
    sections = [PageSection("differs", "What differs", differing(data)),
                PageSection("findings", "What was found beside", skin.bullets(data["findings"], "warn")),
                PageSection("leaves", "Each layout's gradients, parameter by parameter", heat(data)),
                PageSection("cells", "The layouts", table(data)),
                PageSection("shown", "What this shows, and what not", skin.bullets([*SHOWN, *data["notes"]]))]
    return skin.document("the same on every layout?", data["name"], lead(data), skin.tiles(tiles(data)), sections, data)


def lead(data: dict) -> str:
    wrong = sum(cell["differs"] for cell in data["cells"])
    said = f"{len(data['cells']) - wrong} of {len(data['cells'])} layouts compute what one device computes"
    return f"{said}, findings: {len(data['findings'])}. On {data['devices']} devices, in {duration(data['seconds'])}."


def worst(cell: dict) -> tuple[str, float | None]:
    """The parameter whose gradient differs most; None: not finite."""
    return max(cell["leaves"].items(), key=lambda item: math.inf if item[1] is None else item[1], default=("–", None))


def tiles(data: dict) -> list[Tile]:
    cells, wrong = data["cells"], sum(cell["differs"] for cell in data["cells"])
    offs = [off for cell in cells for off in cell["leaves"].values() if off is not None]
    return [Tile("layouts", str(len(cells)), "compared with one device"),
            Tile("differ", str(wrong), "", "warn" if wrong else ""),
            Tile("largest difference", f"{max(offs, default=0):.0e}",
                 f"of a gradient; {data['tolerance']['state']:.0e} is tolerated"),
            Tile("findings", str(len(data["findings"])), "rule files, GPU program",
                 "warn" if data["findings"] else "")]


def differing(data: dict) -> str:
    wrong = [cell for cell in data["cells"] if cell["differs"]]
    file = data.get("smallest")
    smallest = skin.paragraph(f"The smallest run file that shows it: {file}") if file else ""
    return smallest + "".join(f"<h3>{skin.esc(cell['title'])}</h3>{skin.bullets(cell['wrong'])}" for cell in wrong)


def table(data: dict) -> str:
    show = "{:.1e}".format
    columns = [Column("", "n"), Column("layout", "some"), Column("loss", "n"), Column("gradient norm", "n"),
               Column("worst gradient of", "some"), Column("differs by", "n"), Column("three losses", "n"),
               Column("s", "n"), Column("")]
    rows: list[Sequence[Cell | str]] = []
    for place, cell in enumerate(data["cells"], 1):
        name, off = worst(cell)
        last = [loss for loss in cell["losses"] if loss is not None]
        rows.append((number(str, place), cell["title"], number(show, cell["loss"]), number(show, cell["grad_norm"]),
                     name, number(show, off), number(show, max(last, default=None)),
                     number("{:.1f}".format, cell["seconds"]), "DIFFERS" if cell["differs"] else "equal"))
    return skin.table(columns, rows, "layouts", search="axis, rule file, schedule …",
                      marks=["first" if cell["differs"] else "" for cell in data["cells"]])


def heat(data: dict) -> str:
    drawing = heat_drawing(data)
    key = skin.key([(0, "tolerated", f"up to {data['tolerance']['state']:.0e}"), (4, "differs", "beyond")])
    return drawing and skin.figure(drawing, "Largest difference over the gradient's largest element. Hover for layout "
                                            "and parameter.", key)


def heat_drawing(data: dict) -> str:
    """A row for each layout, a column for each parameter; darker: a larger difference. Empty without a gradient."""
    names = list(dict.fromkeys(name for cell in data["cells"] for name in cell["leaves"]))
    if not names:
        return ""
    width, most = (pictures.WIDTH - LABEL) / len(names), data["tolerance"]["state"]
    parts = []
    for row, cell in enumerate(data["cells"]):
        y = HEAD + row * ROW
        parts.append(pictures.text(LABEL - 8, y + 12, row + 1, 11, "end", "soft"))
        for column, name in enumerate(names):
            if name not in cell["leaves"]:
                continue
            off = cell["leaves"][name]
            wrong = off is None or off > most
            share = 1.0 if wrong else math.log(max(off, LEAST) / LEAST) / math.log(most / LEAST)
            said = "not finite" if off is None else f"{off:.1e}"
            parts.append(pictures.rect(LABEL + column * width, y, width - 1, ROW - 1, "c4" if wrong else "c0",
                                       0.08 + 0.8 * share, f"{cell['title']} · {name}: {said}"))
    parts.append(pictures.text(LABEL, 11, f"{names[0]} … {names[-1]}", 11, kind="soft"))
    return pictures.drawing(HEAD + len(data["cells"]) * ROW + 4, parts, "differences of gradients by layout")
