"""The page of `report --html`: measured beside predicted figures, from the dict of `meshtrain.inspection.measured`."""
from __future__ import annotations

import math
import time

from meshtrain.pages import layout, pictures, skin
from meshtrain.pages.pictures import Bar, PlotAxis, PlotCurve
from meshtrain.pages.skin import Cell, Column, PageSection, Tile, of_count, of_share
from meshtrain.units import duration, many, seconds

GOOD, BAD = ("finished", "at work", "stopped on request"), "warn"
MOST_MARKS, MOST_TIMES = 40, 2.0      # attempts marked; speeds drawn up to this multiple of the median
SPEED = {"step_time_s": ("a step", "step_time_s"), "tokens_per_s": ("tokens/s", "tokens_per_s"), "mfu": ("MFU", "mfu")}


def page(told: dict) -> str:
    """told: the dict of `measured.of`."""
    found = [PageSection("loss", "Loss", loss(told)), PageSection("speed", "Speed", speed(told)),
             *([PageSection("experts", "How busy the experts are", experts(told))] if told["experts"] else []),
             PageSection("spent", "Where the time went", spent(told)),
             PageSection("starts", "Starts and stops", starts(told)),
             PageSection("more", "Gradients and learning rate", more(told))]
    if told["priced"]:
        found += [section._replace(heading=f"Priced: {section.heading[0].lower()}{section.heading[1:]}")
                  for section in layout.sections(told["priced"])]
    else:
        found += [PageSection("priced", "Priced",
                              skin.paragraph("This run directory holds no cost.json, so no price stands beside "
                                                             "what was measured; train writes one when it starts."))]
    return skin.document("what a run did", told["name"], lead(told), skin.tiles(tiles(told)), found, told)


def lead(told: dict) -> str:
    return f"{told['dir']}: step {told['step']:,} of {told['steps']:,}; {told['state']}."


def tiles(told: dict) -> list[Tile]:
    found, quick, good = told["loss"], told["speed"], told["state"].startswith(GOOD)
    share = min(1.0, told["step"] / told["steps"]) if told["steps"] else 1.0
    rows = [Tile("step", f"{told['step']:,}", f"{share:.0%} of {told['steps']:,}", "" if good else BAD),
            Tile("tokens", many(told["tokens"]), f"{told['tokens_per_step']:,} a step")]
    if found["last"] is not None:
        rows += [Tile("loss", f"{found['last']:.4f}", f"{found['first']:.4f} at first")]
    if found["validation"] is not None:
        rows += [Tile("validation", f"{found['validation']:.4f}", f"at step {found['validation_step']:,}")]
    if quick["tokens_per_s"]:
        rows += [Tile("tokens/s", f"{quick['tokens_per_s']:,.0f}", beside(told, "tokens_per_s"))]
    if quick["mfu"]:
        rows += [Tile("MFU", f"{quick['mfu']:.1%}", beside(told, "mfu"))]
    if told["goodput"] is not None:
        rows += [Tile("goodput", f"{told['goodput']:.1%}", "time in steps that counted")]
    if told["skipped"]:
        rows += [Tile("steps skipped", f"{told['skipped']:,}", "no finite loss or gradient", BAD)]
    return rows


def priced(told: dict, key: str) -> float | None:
    line = told["priced"] and told["priced"].get("roofline")
    return line.get(SPEED[key][1]) if line else None


def beside(told: dict, key: str) -> str:
    one, measured = priced(told, key), told["speed"][key]
    return f"{measured / one:.0%} of what was priced" if one and measured else "median of all steps"


# ---- sections --------------------------------------------------------------------------------------------------------


def _points(told: dict, key: str) -> list[tuple[float, float]]:
    return [(step, value) for step, value in zip(told["rows"]["step"], told["rows"][key]) if value is not None]


def _curve(told: dict, key: str, axis: PlotAxis, *, color: int = 0, level: tuple[float, str] | None = None,
           height: int = 240, more: tuple[PlotCurve, ...] = (), most: float = math.inf) -> str:
    """A curve over steps, with lines where the run resumed. most: larger values are clipped to it."""
    points = [(step, min(value, most)) for step, value in _points(told, key)]
    went_on = [(one["from_step"], "") for one in told["starts"] if one["from_step"]][-MOST_MARKS:]
    return pictures.curves([PlotCurve(color, axis.name, points), *more], PlotAxis("step", "{:,.0f}".format), axis,
                           axis.name, height=height, verticals=went_on, levels=[level] if level else [])


def loss(told: dict) -> str:
    if not told["rows"]["step"]:
        return skin.paragraph(f"No step is written yet: {told['state']}.")
    validated = _points(told, "val_loss")
    more = (PlotCurve(1, "validation", validated, dots=True),) if validated else ()
    drawn = _curve(told, "loss", PlotAxis("loss, nats a token", "{:.3g}".format), height=340,
                   more=more) if _points(told, "loss") else ""
    key = skin.key([(0, "training", ""), *([(1, "validation", "")] if more else [])])
    columns = [Column("validated after step", "n"), Column("loss", "n"), Column("perplexity", "n")]
    rows = [(of_count(step), Cell(f"{value:.4f}", value), Cell(f"{math.exp(min(value, 700)):,.2f}"))
            for step, value in validated]
    caption = "Mean nats a target token." + " Lines across: the run went on here." * (len(told["starts"]) > 1)
    return (skin.figure(drawn, caption, key) if drawn else "") + skin.table(columns, rows, "validation")


def speed(told: dict) -> str:
    show = {"step_time_s": seconds, "tokens_per_s": "{:,.0f}".format, "mfu": "{:.1%}".format}
    drawn, rows = "", []
    for key, (name, _) in SPEED.items():
        measured, one = told["speed"][key], priced(told, key)
        if measured is None:
            continue
        rows.append((name, Cell(show[key](measured), measured), Cell(show[key](one), one) if one else "–",
                     of_share(measured / one) if one else "–"))
        if key != "step_time_s":
            most = MOST_TIMES * max(measured, one or 0.0)
            above = sum(value > most for _, value in _points(told, key))
            drawn += skin.figure(
                _curve(told, key, PlotAxis(name, show[key], zero=True), color=len(rows),
                       level=_level(told, key, show[key]), most=most),
                f"{above} steps that are above stand at the top: they ended while the clock stood." if above else "")
    columns = [Column("median of all steps"), Column("measured", "n"), Column("priced, by the roofline", "n"),
               Column("measured of it", "n")]
    return drawn + skin.table(columns, rows, "measured")


def _level(told: dict, key: str, show) -> tuple[float, str] | None:
    one = priced(told, key)
    return (one, f"priced {show(one)}") if one else None


def spent(told: dict) -> str:
    parts = {name: spent_s for name, spent_s in told["time_s"].items() if spent_s > 0}
    total = sum(parts.values())
    if not total:
        return ""
    rows = [(k % pictures.COLORS, name, spent_s) for k, (name, spent_s) in enumerate(parts.items())]
    bar = Bar("all of it", [row for row in rows if row[2] > layout.LEAST_SHARE * total])
    columns = [Column("what"), Column("time", "n"), Column("of all", "n")]
    table = skin.table(columns, [(name, Cell(duration(spent_s), spent_s), of_share(spent_s / total))
                                 for _, name, spent_s in rows],
                       "time-spent")
    words = "Of steps alone: this directory has no history.jsonl." if told["goodput"] is None else (
        f"All the time since the first start; goodput, the share of steps that counted, is {told['goodput']:.1%}.")
    key = skin.key((color, name, f"{spent_s / total:.1%}") for color, name, spent_s in rows)
    return skin.figure(pictures.bars([bar], duration, "where the time went", most=total), words, key) + table


def starts(told: dict) -> str:
    moment = lambda when: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    how = lambda k, one: one["how"] or (told["state"] if k == len(told["starts"]) else "ended without a word")
    rows = [(of_count(k), moment(one["began"]), of_count(one["from_step"]), of_count(one["to_step"]),
             Cell(duration(one["run_s"]), one["run_s"]), of_count(one["steps_again"]), how(k, one),
             one["on"]) for k, one in enumerate(told["starts"], 1)]
    columns = [Column("start", "n"), Column("began", "keep"), Column("after step", "n"), Column("to step", "n"),
               Column("lasted", "n"), Column("steps taken again", "n"), Column("how it ended"), Column("on")]
    changed = [f"from step {row['step'] + 1:,} on: {row['key']} = {row['to']!r} (was {row['from']!r})"
               for row in told["changes"]]
    saved = ", ".join(f"{step:,}" for step in told["checkpoints"])
    return skin.table(columns, rows, "attempts") + skin.bullets(changed) + skin.paragraph(
        f"Checkpoints of steps {saved}." if saved else "No checkpoint is saved.", "small")


def experts(told: dict) -> str:
    found = told["experts"]
    busiest, idlest, entropy = (found[name][-1] for name in ("max", "min", "entropy"))
    number = lambda value, show="{:.2f}": Cell("–") if value is None else Cell(show.format(value), value)
    rows = [(of_count(layer), *map(number, values))
            for layer, *values in zip(found["layers"], busiest, idlest, entropy)]
    columns = [Column("layer", "n"), Column("busiest expert, of the mean", "n"), Column("idlest, of the mean", "n"),
               Column("entropy", "n")]
    drawn = pictures.heat([(f"layer {layer}", [column[k] for column in found["max"]])
                           for k, layer in enumerate(found["layers"])],
                          found["steps"], "{:.2f}".format,
                          "tokens of each layer's busiest expert by step, relative to the mean")
    worst = max((value for column in found["max"] for value in column if value is not None), default=1.0)
    caption = (f"Tokens of each layer's busiest expert relative to the mean of its experts: pale at 1, full at "
               f"{max(worst, 2):.2f}. Steps to the right, of several steps the worst; the table has the last of them. "
               f"No token is dropped, however busy an expert is.")
    curve = lambda key, name, color, **more: skin.figure(
        _curve(told, key, PlotAxis(name, "{:.3g}".format), color=color, height=200, **more)) \
        if _points(told, key) else ""
    return (skin.figure(drawn, caption) + curve("expert_load_max", "busiest expert of all layers, of the mean", 3)
            + curve("expert_load_entropy", "entropy of the choices, mean of the layers; 1 is even", 2)
            + skin.table(columns, rows, "experts-load"))


def more(told: dict) -> str:
    return "".join(skin.figure(_curve(told, key, PlotAxis(name, "{:.3g}".format), color=color, height=200))
                   for key, name, color in
                   (("grad_norm", "gradient norm", 4), ("learning_rate", "learning rate", 5)) if _points(told, key))
