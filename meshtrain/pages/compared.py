"""The page of `report A B --html`, which compares runs; made from the dict of `meshtrain.inspection.compared`."""
from __future__ import annotations

from collections.abc import Sequence

from meshtrain.pages import skin
from meshtrain.pages.pictures import COLORS, Plot, PlotAxis, PlotCurve
from meshtrain.pages.skin import Cell, Column, PageSection
from meshtrain.units import many

LONG = 300      # most characters of a value in the table


def page(data: dict, verdict: str, rows: Sequence[tuple[str, Sequence[tuple[str, float | None]]]]) -> str:
    """Return the page as HTML. data, verdict, rows: the results of `compared.of`, `compared.verdict` and
    `compared.numbers`."""
    notes = skin.bullets(data["notes"], "warn")
    sections = [PageSection("loss", "Loss", overlaid(data, "loss", "loss", "{:.3g}".format) + notes),
                PageSection("validation", "Validation loss",
                            overlaid(data, "val_loss", "validation loss", "{:.3g}".format)),
                PageSection("reward", "Reward", overlaid(data, "reward", "reward", "{:.3g}".format)),
                PageSection("numbers", "The runs", numbers(data, rows)),
                PageSection("differs", "What differs in their run files", differs(data)),
                PageSection("speed", "Speed", overlaid(data, "tokens_per_s", "tokens/s", "{:,.0f}".format))]
    labels = ", ".join(run["label"] for run in data["runs"])
    lead = "; ".join(f"{run['label']}: {run['dir']}" for run in data["runs"] if run["label"] != run["dir"])
    return skin.document(skin.Head("runs compared", labels, verdict, lead, ""), sections, data)


def overlaid(data: dict, key: str, name: str, show) -> str:
    """Return a figure with the curves of all runs, over steps, or over tokens if their steps differ in tokens. key: the
    key of the curve. show: a function that formats a value."""
    by_tokens = len({run["tokens_per_step"] for run in data["runs"]}) > 1
    curves = []
    for k, run in enumerate(data["runs"]):
        each = run["tokens_per_step"] if by_tokens else 1
        points = [(step * each, value) for step, value in run["curves"][key]]
        curves.append(PlotCurve(k % COLORS, run["label"], points))
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    curves += [curve._replace(dots=True) for curve in curves if key == "val_loss" or len(curve.points) == 1]
    values = [value for curve in curves for _, value in curve.points]
    axis = PlotAxis(name, show, zero=key == "tokens_per_s")
    if not axis.zero and skin.is_logarithmic(values):
        axis = axis._replace(name=f"{name} (logarithmic)", log=True)
    steps = PlotAxis("tokens", lambda count: many(int(count))) if by_tokens else PlotAxis("step", "{:,.0f}".format)
    means = "If a run has many rows, each point is the mean of the rows around it." if key != "val_loss" else ""
    return skin.figure(Plot(curves, steps, axis, name, height=340).draw, means,
                       skin.key((curve.color, curve.name, "") for curve in curves if not curve.dots))


def numbers(data: dict, rows: Sequence[tuple[str, Sequence[tuple[str, float | None]]]]) -> str:
    columns = [Column(""), *(Column(run["label"], "n") for run in data["runs"])]
    return skin.table(columns, [(name, *(Cell(*cell) for cell in cells)) for name, cells in rows], "of-runs")


def differs(data: dict) -> str:
    columns = [Column("key", "keep"), *(Column(run["label"]) for run in data["runs"])]
    def show_value(value: str | None) -> str:
        return "–" if value is None else value if len(value) <= LONG else f"{value[:LONG]}…"

    rows = [(row["key"], *map(show_value, row["values"])) for row in data["differs"]]
    return skin.table(columns, rows, "keys", search="section or key" if len(rows) > 10 else "") or skin.paragraph(
        "Nothing but name and directory.")
