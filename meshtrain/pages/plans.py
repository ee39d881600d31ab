"""The page of `plan --html`: the ranked plans, made from the JSON output."""
from __future__ import annotations

import functools
from collections.abc import Sequence

from meshtrain.names import AXES
from meshtrain.pages import layout, pictures, skin
from meshtrain.pages.pictures import Bar, Plot, PlotAxis, PlotCurve
from meshtrain.pages.skin import Cell, Column, PageSection, Tile, number, of_bytes, of_count, of_seconds, of_share
from meshtrain.units import many, seconds, size

STACKED = {"params": "weights", "grads": "gradients", "optimizer": "optimizer", "activations": "activations",
           "teacher": "teacher"}
COLUMNS = (Column("mesh", "keep"), Column("rules", "keep"), Column("schedule", "keep"),
           Column("micro\N{SOFT HYPHEN}batches", "n"),     # may be hyphenated: wide heading, narrow numbers
           Column("remat"), Column("memory", "n"), Column("step", "n"), Column("tokens/s a GPU", "n"))
LENGTH = {"days": ("days", "{:,.1f}".format), "gpu_hours": ("GPU hours", "{:,.0f}".format),
          "tokens_for_budget": ("tokens for it", "{:,.0f}".format)}
DRAWN = 10          # plans with a memory bar, and with a number in the drawing of the best
NEAR, FAR = 1.1, 4.0    # step times relative to the first plan's: of the drawing of the best plans, and of all of them


def page(data: dict) -> str:
    """Return the page as HTML. data: the dict of `plan --json`."""
    several = isinstance(data["gpus"], list)
    sections = [PageSection("scaling", "The best plan of each number of GPUs", scaling(data))] if several else [
        PageSection("first", "The first plan", first(data)),
        PageSection("plans", "The plans, best first", rank(data)),
        PageSection("trade", "Memory against time", trade(data)),
        PageSection("memory", "What takes the memory", memory(data)),
        PageSection("misses", "What does not fit", misses(data)),
        PageSection("compiled", "Formula beside compiled", compare_compiled(data))]
    assumed = PageSection("numbers", "What the numbers are", skin.bullets(data["caveats"]) + skin.paragraph(
        f"Attention by {data['attention']}.", "small") + skin.assumptions(data["assumed"], data["reasons"]))
    top = skin.tiles(tiles(data)) if data["first"] else ""
    head = skin.Head("which layout", data["name"], verdict(data), lead(data), top)
    return skin.document(head, [*sections, assumed], data)


def verdict(data: dict) -> str:
    plans, several = data["plans"], isinstance(data["gpus"], list)
    if several and plans:
        one, last = plans[0], plans[-1]
        if one is last:
            return f"A layout fits only on {one['gpus']:,} GPUs: {_mesh(one)} with {_rules(one)}."
        kept = last["tokens_per_s_per_gpu"] / one["tokens_per_s_per_gpu"]
        return (f"From {one['gpus']:,} to {last['gpus']:,} GPUs a GPU keeps {kept:.0%} of its speed, each time with "
                f"the best layout.")
    if several or not data["first"]:
        return "No layout fits."
    best, equal = plans[0], _equal(data)
    said = (f"{_mesh(best)} with {_rules(best)}: {seconds(best['step_time_s'])} a step, MFU {best['mfu']:.1%}, "
            f"{size(best['memory_bytes']['total'])} of the {size(data['usable_bytes'])} that a GPU has to use.")
    if len(equal) < 2:
        return said
    simplest = _simplest(equal)
    which = "this is the simplest of them" if simplest is best else (
        f"the simplest of them is number {plans.index(simplest) + 1}, {_mesh(simplest)} with {_rules(simplest)}")
    return (f"{said} The first {len(equal)} plans are equal within the formulas' error of {data['median_error']:.0%}; "
            f"{which}.")


def _equal(data: dict) -> list[dict]:
    """Return the plans of the table that are as fast as the first within the error of the formulas."""
    plans = _fitting(data)
    return [plan for plan in plans if plan["step_time_s"] <= (1 + data["median_error"]) * plans[0]["step_time_s"]]


def _simplest(plans: Sequence[dict]) -> dict:
    """Return the plan with the fewest mesh axes; among equals, one without stages, then one with memory to spare, then
    the fastest."""
    return min(plans, key=lambda plan: (sum(n > 1 for n in plan["mesh"].values()), plan["mesh"]["stage"] > 1,
                                        bool(plan["reason"])))


def lead(data: dict) -> str:
    gpus = ", ".join(f"{count:,}" for count in (data["gpus"] if isinstance(data["gpus"], list) else [data["gpus"]]))
    return (f"{many(data['num_params'])} parameters, {data['global_batch']:,} × {data['seq_len']:,} tokens a step on "
            f"{gpus} × {data['gpu']}, {size(data['usable_bytes'])} usable on each; {data['tried']:,} layouts tried.")


def tiles(data: dict) -> list[Tile]:
    plan = data["plans"][0]
    speed, held = plan["tokens_per_s_per_gpu"], plan["memory_bytes"]["total"]
    rows = [Tile("a step", seconds(plan["step_time_s"]), "by formulas"),
            Tile("tokens/s a GPU", f"{speed:,.0f}", f"{speed * data['gpus']:,.0f} in all"),
            Tile("MFU", f"{plan['mfu']:.1%}", "without recomputation"),
            Tile("memory of a GPU", size(held), plan["reason"] or f"of {size(data['usable_bytes'])} usable",
                 "warn" if plan["reason"] else "")]
    if "days" in plan:
        rows.append(Tile("training takes", f"{plan['days']:,.1f} days", f"{plan['gpu_hours']:,.0f} GPU hours"))
    if "tokens_for_budget" in plan:
        rows.append(Tile("the budget trains", f"{plan['tokens_for_budget'] / 1e9:,.1f}B", "tokens"))
    return rows


def _fitting(data: dict) -> list[dict]:
    return [plan for plan in data["plans"] if plan["fits"]]


def _mesh(plan: dict) -> str:
    method = f" {plan['context_method']}" if plan.get("context_method") else ""
    return (" × ".join(f"{axis} {plan['mesh'][axis]}" for axis in AXES if plan["mesh"][axis] > 1) or "one GPU") + method


def _rules(plan: dict) -> str:
    return plan["rules"].removeprefix("sharding_rules/").removesuffix(".toml")


# ---- sections --------------------------------------------------------------------------------------------------------


def first(data: dict) -> str:
    plan = data["first"]
    if not plan:
        return skin.paragraph("No layout fits; use more GPUs, split sequences over mesh.context, or use fewer tokens "
                              "per microbatch.", "warn")
    step_s = data["plans"][0]["step_time_s"]
    spent = {name: spent_s for name, spent_s in plan["time_s"].items() if spent_s > layout.LEAST_SHARE * step_s}
    shares = [(k % pictures.COLORS, name, spent_s) for k, (name, spent_s) in enumerate(spent.items())]
    drawing = functools.partial(pictures.bars, [Bar("a step", shares, total=step_s)], seconds,
                                "what the step consists of")
    key = skin.key((color, name, f"{spent_s / step_s:.1%}") for color, name, spent_s in shares)
    stands, *why = plan["standing"].split("\n  - ")
    sentences = [*plan["sentences"], stands] if stands else plan["sentences"]
    return ("".join(map(skin.paragraph, sentences)) + skin.bullets(why) + skin.figure(drawing, key=key) + layout.mesh(
        plan["mesh"]))


def rank(data: dict) -> str:
    plans = _fitting(data)
    columns = [Column("", "n"), *COLUMNS, Column("MFU", "n"), Column("bubble", "n"), *_length_columns(plans)]
    rows = [(of_count(k), *_cells(plan), of_share(plan["mfu"]), of_share(plan["bubble"]), *_length(plan))
            for k, plan in enumerate(plans, 1)]
    unsure = sorted({plan["reason"] for plan in plans} - {""})
    equal, groups = len(_equal(data)), {}
    if equal > 1:
        groups[0] = f"equal within the formulas' error of {data['median_error']:.0%}: take the simplest"
        groups |= {equal: "slower"} if equal < len(plans) else {}
    return skin.table(columns, rows, "ranked", search="axis, rule file, schedule …", marks=["first"],
                      groups=groups) + "".join(
        skin.paragraph(f"* {reason}.", "small") for reason in unsure)


def _cells(plan: dict) -> list[Cell | str]:
    held, chunks = plan["memory_bytes"]["total"], f" × {plan['chunks']}" * (plan["chunks"] > 1)
    return [_mesh(plan), _rules(plan), plan["schedule"] + chunks if plan["schedule"] else "–",
            of_count(plan["microbatches"]), plan["remat"], Cell(size(held) + " *" * bool(plan["reason"]), held),
            of_seconds(plan["step_time_s"]), of_count(plan["tokens_per_s_per_gpu"])]


def _length_columns(plans: Sequence[dict]) -> list[Column]:
    return [Column(words, "n") for key, (words, _) in LENGTH.items() if plans and key in plans[0]]


def _length(plan: dict) -> list[Cell]:
    return [number(show, plan[key]) for key, (_, show) in LENGTH.items() if key in plan]


def trade(data: dict) -> str:
    if not _fitting(data):
        return ""
    rows, drawn = _points(data, FAR)
    near = _points(data, NEAR)[1]
    left_out = sum(len(row.points) for row in rows) - sum(len(row.points) for row in drawn)
    caption = "Each point is the best plan of a mesh and a rule file; left and low is better." + (
        f" {left_out} plans that take more than four times as long as the best are left out." if left_out else "")
    key = skin.key((row.color, row.name, str(len(row.points))) for row in drawn if row.points)
    zoomed = ""
    if sum(len(row.points) for row in near) < sum(len(row.points) for row in drawn):
        numbered = min(DRAWN, len(_fitting(data)))
        zoomed = skin.figure(functools.partial(trade_drawing, data, near=True),
                             f"The plans that take at most {NEAR - 1:.0%} longer than the first; the {numbered} best "
                             f"have their numbers.")
    return zoomed + skin.figure(functools.partial(trade_drawing, data), caption, key)


def _points(data: dict, most: float) -> tuple[list[PlotCurve], list[PlotCurve]]:
    """Return (all plans as points, the points of plans that take at most `most` times as long as the first). Slower
    plans would compress the scale."""
    plans, missed = _fitting(data), [plan for plan in data["plans"] if not plan["fits"]]

    def point(plan: dict) -> tuple[float, int]:
        return plan["step_time_s"], plan["memory_bytes"]["total"]
    others = [(plan["step_time_s"], plan["memory_bytes"]) for plan in data["others"]]
    rows = [PlotCurve(7, "other plans that fit", others, dots=True),
            PlotCurve(4, "plans that do not fit", [point(plan) for plan in missed], dots=True),
            PlotCurve(0, "plans that fit, best in the table", [point(plan) for plan in plans], dots=True)]
    most *= plans[0]["step_time_s"]
    return rows, [row._replace(points=[place for place in row.points if place[0] <= most]) for row in rows]


def trade_drawing(data: dict, legend: bool = False, width: int = skin.WIDTH, *, near: bool = False) -> str:
    """Return a drawing of memory against step time. data: has a plan that fits. legend: whether to add a legend, for a
    drawing outside a page. near: whether to draw only the best plans, with their numbers, on their own scale."""
    rows, drawn = _points(data, NEAR if near else FAR)
    known = [data["others"], [plan for plan in data["plans"] if not plan["fits"]], _fitting(data)]
    said = [{place: f"{_mesh(plan)}, {_rules(plan)}" for place, plan in zip(row.points, of)}
            for row, of in zip(rows, known)]
    if near:
        drawn[-1] = drawn[-1]._replace(names=[str(k) for k in range(1, min(DRAWN, len(drawn[-1].points)) + 1)])
    steps = PlotAxis("step" if near else "step (logarithmic)", "{:.4g} s".format, log=not near)
    plot = Plot(drawn, steps, PlotAxis("memory of a GPU", size, zero=not near, unit=2**30), "memory against step time",
                height=380, levels=[(data["usable_bytes"], f"usable {size(data['usable_bytes'])}")],
                title=lambda k, i: said[k][drawn[k].points[i]])
    names = [(row.color, row.name) for row in drawn if row.points]
    return pictures.below([plot.draw(), pictures.legend(names)]) if legend else plot.draw(width)


def memory(data: dict) -> str:
    plans = _fitting(data)[:DRAWN]
    if not plans:
        return ""
    stacked = {part: name for part, name in STACKED.items() if part in plans[0]["memory_bytes"]}

    def parts(plan: dict) -> list[tuple[int, str, int]]:
        return [(color, stacked[part], plan["memory_bytes"][part]) for color, part in enumerate(stacked)]
    drawing = functools.partial(pictures.bars, [Bar(f"{k}", parts(plan)) for k, plan in enumerate(plans, 1)], size,
                                "memory of the best plans",
                                [(data["usable_bytes"], f"usable {size(data['usable_bytes'])}")])
    columns = [Column("", "n"), *(Column(name, "n") for name in stacked.values()), Column("in all", "n"),
               Column("sent by a GPU, by mesh axes", "long")]

    def sent(plan: dict) -> str:
        return ", ".join(f"{axes} {size(count)}" for axes, count in sorted(plan["traffic_bytes"].items())
                         if count >= 2**20) or "–"
    rows = [[of_count(k), *(of_bytes(plan["memory_bytes"][part]) for part in (*stacked, "total")), Cell(sent(plan))]
            for k, plan in enumerate(plans, 1)]
    key = skin.key((color, name, "") for color, name in enumerate(stacked.values()))
    return skin.figure(drawing, key=key) + skin.table(columns, rows, "held")


def misses(data: dict) -> str:
    columns = [Column("mesh", "keep"), Column("rules", "keep"), Column("memory", "n"),
               Column("step", "n"), Column("why", "long")]
    rows = [(_mesh(plan), _rules(plan), of_bytes(plan["memory_bytes"]["total"]), of_seconds(plan["step_time_s"]),
             plan["reason"]) for plan in data["plans"] if not plan["fits"]]
    return skin.table(columns, rows, "near-misses")


def compare_compiled(data: dict) -> str:
    columns = [Column("", "n"), Column("memory", "n"), Column("compiled", "n"), Column("step", "n"),
               Column("roofline", "n"), Column("sent by a GPU", "n"), Column("compiled", "n")]

    def sent(plan: dict) -> Cell:
        return of_bytes(sum(plan["traffic_bytes"].values()))
    rows = [(of_count(k), of_bytes(plan["memory_bytes"]["total"]), of_bytes(plan["compiled"]["memory_bytes"]["total"]),
             of_seconds(plan["step_time_s"]), of_seconds(plan["compiled"]["step_time_s"]),
             sent(plan), sent(plan["compiled"]))
            for k, plan in enumerate(data["plans"], 1) if "compiled" in plan]
    return skin.table(columns, rows, "verified")


def scaling(data: dict) -> str:
    plans = data["plans"]
    if not plans:
        return skin.paragraph("No layout fits on any of them.", "warn")
    speed = [plan["tokens_per_s_per_gpu"] / plans[0]["tokens_per_s_per_gpu"] for plan in plans]
    columns = [Column("GPUs", "n"), *COLUMNS, Column("kept", "n"), Column("MFU", "n"), *_length_columns(plans)]
    rows = [(of_count(plan["gpus"]), *_cells(plan | {"reason": ""}), of_share(kept), of_share(plan["mfu"]),
             *_length(plan)) for plan, kept in zip(plans, speed)]
    none = [f"{count:,}" for count in data["gpus"] if count not in {plan["gpus"] for plan in plans}]
    note = skin.paragraph(f"No layout fits on {', '.join(none)} GPUs.", "warn") if none else ""
    curve = PlotCurve(0, "kept", [(plan["gpus"], kept) for plan, kept in zip(plans, speed)])
    drawn = skin.figure(Plot(
        [curve, curve._replace(dots=True)], PlotAxis("GPUs", "{:,.0f}".format),
        PlotAxis("tokens/s a GPU, relative to the first row", "{:.0%}".format, zero=True), "how speed scales",
        height=260).draw,
        "With the same batch a step.") if len(plans) > 1 else ""
    return drawn + note + skin.table(columns, rows, "best")
