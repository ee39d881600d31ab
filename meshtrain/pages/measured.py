"""The page of `report --html`: measured and predicted numbers, from the dict of `meshtrain.inspection.measured`."""
from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence

from meshtrain.pages import layout, pictures, skin
from meshtrain.pages.pictures import Bar, Plot, PlotAxis, PlotCurve
from meshtrain.pages.skin import Cell, Column, PageSection, Tile, number, of_count, of_share
from meshtrain.units import amount, duration, many, seconds

GOOD, BAD = ("finished", "at work", "stopped on request"), "warn"
MOST_MARKS, MOST_TIMES = 40, 2.0      # most marked attempts; speeds are drawn up to this multiple of the median
LOSSES = {"dpo": "loss, a pair", "rl": "policy loss"}      # names of losses that are no likelihoods
SPEED = {"step_time_s": ("a step", seconds), "tokens_per_s": ("tokens/s", "{:,.0f}".format),
         "mfu": ("MFU", "{:.1%}".format)}


def page(data: dict) -> str:
    """Return the page as HTML. data: the dict of `measured.of`."""
    sections = [*([PageSection("rewards", "Rewards and answers", rewards(data))] if data["answers"] else []),
                PageSection("loss", "Loss", loss(data)), PageSection("speed", "Speed", speed(data)),
                *([PageSection("experts", "How busy the experts are", experts(data))] if data["experts"] else []),
                PageSection("spent", "Where the time went", draw_time(data)),
                PageSection("starts", "Starts and stops", starts(data)),
                PageSection("more", "Gradients and learning rate", more(data))]
    if data["priced"]:
        parts = [f"<h3>{skin.esc(section.heading)}</h3>{section.body}" for section in layout.sections(data["priced"])
                 if section.body]
        sections += [PageSection("priced", "Priced before the run", "".join(parts))]
    head = skin.Head("what a run did", data["name"], verdict(data), lead(data), skin.tiles(tiles(data)))
    return skin.document(head, sections, data)


def lead(data: dict) -> str:
    price = "" if data["priced"] else (
        " It has no cost.json, so there are no predictions to compare with; train writes the file when it starts.")
    return f"{data['dir']}: step {data['step']:,} of {data['steps']:,}; {data['state']}.{price}{describe_sample(data)}"


def describe_sample(data: dict) -> str:
    """Return a sentence that says what comes from a sample of the rows; "" if all rows were read."""
    drawn = data["sampled"]
    return drawn and (f" Its metrics have about {many(drawn['of'])} rows: curves, medians and trends use the first and "
                      f"last rows and a sample of {drawn['rows']:,}; every skipped step, validation and loss spike is "
                      "read.") or ""


# ---- the verdict -----------------------------------------------------------------------------------------------------

FEW, LEVEL = 5, 0.01        # fewer values have no trend; a smaller relative change is no trend
OVERFITTED = 0.02           # a validation loss that is above its best by a larger share is reported
MOST_SKIPPED = 0.01
OFTEN = 0.1                 # a part of the time with a larger share is named


def verdict(data: dict) -> str:
    """Return one sentence: whether the run is healthy, what it learned, where its time went."""
    if not data["step"]:
        return f"No step is finished yet: {data['state']}."
    judged, learned = _judge_trend(data)
    said = [learned]
    if data["skipped"]:
        said += [f"{amount(data['skipped'], 'step')} skipped"]
        judged = "to be looked at" if data["skipped"] > MOST_SKIPPED * data["step"] and judged == "healthy" else judged
    validated, best = data["loss"]["validation"], data["loss"]["validation_best"]
    if validated is not None and validated - best > OVERFITTED * abs(best):
        judged = "to be looked at" if judged == "healthy" else judged
        said += [f"validation at {validated:.3f}, above its best of {best:.3f}"]
    if data["goodput"] is not None:
        total = sum(data["time_s"].values())
        name, spent_s = max(((name, spent_s) for name, spent_s in data["time_s"].items() if name != "steps"),
                            key=lambda part: part[1], default=("", 0.0))
        often = f", {name} took {spent_s / total:.0%}" if spent_s > OFTEN * total else ""
        said += [f"{data['goodput']:.0%} of {duration(total)} in steps that count{often}"]
    if (count := len(data["starts"])) > 1:
        again = sum(one["steps_again"] for one in data["starts"])
        said += [f"{amount(count, 'start')}, {amount(again, 'step')} taken again"]
    return f"{_state_words(data, judged)}: {', '.join(said)}."


def _state_words(data: dict, judged: str) -> str:
    where = f"step {data['step']:,} of {data['steps']:,}"
    if data["state"].startswith("finished"):
        return judged[0].upper() + judged[1:]
    if data["state"].startswith("at work"):
        return f"At work at {where}, {judged}"
    if data["state"].startswith("stopped on request"):
        return f"Stopped on request after {where}, {judged}"
    killed = "Ended without a message" if data["state"].startswith("ended without a message") else "Failed"
    return f"{killed} after {where}, {judged}{'' if judged == 'diverged' else ' until then'}"


def _judge_trend(data: dict) -> tuple[str, str]:
    """Return (judgement, text about the trend of the loss or, if there are rewards, of the reward)."""
    if not data["loss"]["finite"]:
        return "diverged", "the loss of the last step is not finite"
    name, trend = ("reward", data["reward"]) if data["reward"] else ("loss", data["loss"]["trend"])
    if trend is None:
        return "diverged", "no step has a finite loss"
    begins, ends = trend["begins"], trend["ends"]
    if trend["count"] < FEW:
        return "too short to judge", f"{name} {ends:.4g} after {amount(trend['count'], 'step')}"
    change = ends - begins
    if abs(change) <= LEVEL * max(abs(begins), abs(ends)):
        return "steady", f"{name} level at {ends:.4g}"
    words = f"{name} {'rose' if change > 0 else 'fell'} from {begins:.4g} (first tenth) to {ends:.4g} (last tenth)"
    return "healthy" if (change > 0) == (name == "reward") else "getting worse", words


def tiles(data: dict) -> list[Tile]:
    curve, quick, good = data["loss"], data["speed"], data["state"].startswith(GOOD)
    share = min(1.0, data["step"] / data["steps"]) if data["steps"] else 1.0
    rows = [Tile("step", f"{data['step']:,}", f"{share:.0%} of {data['steps']:,}", "" if good else BAD),
            Tile("tokens", many(data["tokens"]), f"{data['tokens_per_step']:,} a step")]
    if curve["last"] is not None:
        rows += [Tile("loss", f"{curve['last']:.4f}", f"{curve['first']:.4f} at first")]
    if curve["validation"] is not None:
        rows += [Tile("validation", f"{curve['validation']:.4f}", f"at step {curve['validation_step']:,}")]
    if quick["tokens_per_s"]:
        rows += [Tile("tokens/s", f"{quick['tokens_per_s']:,.0f}", against_price(data, "tokens_per_s"))]
    if quick["mfu"]:
        rows += [Tile("MFU", f"{quick['mfu']:.1%}", against_price(data, "mfu"))]
    if data["goodput"] is not None:
        rows += [Tile("goodput", f"{data['goodput']:.1%}", "time in steps that counted")]
    if data["skipped"]:
        rows += [Tile("steps skipped", f"{data['skipped']:,}", "no finite loss or gradient", BAD)]
    return rows


def read_price(data: dict, key: str) -> float | None:
    line = data["priced"] and data["priced"].get("roofline")
    return line.get(key) if line else None


def against_price(data: dict, key: str) -> str:
    one, measured = read_price(data, key), data["speed"][key]
    return f"{measured / one:.0%} of what was priced" if one and measured else f"median of {_describe_steps(data)}"


def _describe_steps(data: dict) -> str:
    """Return which steps a median counts."""
    return f"a sample of {data['sampled']['rows']:,} rows" if data["sampled"] else "all steps"


# ---- sections --------------------------------------------------------------------------------------------------------


def _points(data: dict, key: str) -> list[tuple[float, float]]:
    return [(step, value) for step, value in zip(data["rows"]["step"], data["rows"][key]) if value is not None]


def _curve(data: dict, key: str, axis: PlotAxis, *, color: int = 0, levels: Sequence[tuple[float, str]] = (),
           height: int = 240, more: tuple[PlotCurve, ...] = (), most: float = math.inf) -> Plot:
    """Return a curve over steps, with lines where the run resumed, and the running mean if there are many rows. levels:
    horizontal lines. more: further curves. most: the largest drawn value; larger values are drawn there."""
    def clip(values) -> list[tuple[float, float]]:
        return [(step, min(value, most)) for step, value in zip(data["rows"]["step"], values) if value is not None]

    curves = [PlotCurve(color, axis.name, clip(data["rows"][key]))]
    if smoothed := data["rows"]["smoothed"].get(key):
        mean = PlotCurve(color, f"mean of {data['rows']['window']:,}", clip(smoothed))
        curves = [curves[0]._replace(pale=True), mean]
    values = [value for row in (*curves, *more) for _, value in row.points]
    if not axis.zero and skin.is_logarithmic(values):
        axis = axis._replace(log=True, name=f"{axis.name} (logarithmic)")
    went_on = [(one["from_step"], "") for one in data["starts"] if one["from_step"]][-MOST_MARKS:]
    return Plot([*curves, *more], PlotAxis("step", "{:,.0f}".format), axis, axis.name, height=height,
                verticals=went_on, levels=levels)


def _means(data: dict, key: str) -> str:
    """Return a sentence that explains the pale and the bold curve of a key; "" if there is one curve."""
    sampled = "sampled " * bool(data["sampled"])
    return (f" Pale: each row; bold: the mean of the {data['rows']['window']:,} {sampled}rows around it."
            if data["rows"]["smoothed"].get(key) else "")


def loss(data: dict) -> str:
    if not data["rows"]["step"]:
        return skin.paragraph(f"No step is written yet: {data['state']}.")
    validated, drawn = _points(data, "val_loss"), ""
    more = (PlotCurve(1, "validation", validated, dots=True),) if validated else ()
    if points := _points(data, "loss"):
        name = LOSSES.get(data["objective"], "loss, nats a token")
        plot = _curve(data, "loss", PlotAxis(name, "{:.3g}".format), height=340, more=more)
        key = skin.key([(0, "training", ""), *([(1, "validation", "")] if more else [])])
        again = " Vertical lines: the run resumed here." * (len(data["starts"]) > 1)
        drawn = skin.figure(plot.draw, f"{_means(data, 'loss')}{again}".strip(), key)
        if points[0][0] > 0 and points[-1][0] > skin.LOG * points[0][0]:
            over_log = dataclasses.replace(plot, x_axis=plot.x_axis._replace(log=True), verticals=[
                line for line in plot.verticals if line[0] > 0])
            drawn += skin.fold("The same over the logarithm of steps", skin.figure(over_log.draw))
    columns = [Column("validated after step", "n"), Column("loss", "n"), Column("perplexity", "n")]
    rows = [(of_count(step), Cell(f"{value:.4f}", value), Cell(f"{math.exp(min(value, 700)):,.2f}"))
            for step, value in validated]
    shown = 2 if data["objective"] in LOSSES else 3
    return drawn + skin.table(columns[:shown], [row[:shown] for row in rows], "validation", brief=True)


def rewards(data: dict) -> str:
    """Return the section of an RL run as HTML: the curve of its rewards, and the newest answers."""
    validated = _points(data, "val_reward")
    more = (PlotCurve(1, "validation", validated, dots=True),) if validated else ()
    key = skin.key([(0, "of the answers that the run trains on, mean of a batch", ""),
                    *([(1, "of an answer to each held-out prompt", "")] if more else [])])
    drawn = skin.figure(_curve(data, "reward", PlotAxis("reward", "{:.3g}".format), height=340, more=more).draw,
                        _means(data, "reward").strip(), key) if _points(data, "reward") else ""
    columns = [Column("prompt", "long"), Column("answer", "long"), Column("reward", "n"), Column("tokens", "n"),
               Column("ended by")]
    rows = [(_short(line["prompt"]), _short(line["answer"]), number("{:.3g}".format, line["reward"]),
             of_count(line["tokens"]), line.get("failure") or {"stop": "an end token or string",
                                                               "length": "rl.max_tokens"}[line["stopped"]])
            for line in data["answers"]["lines"]]
    return (drawn + _small(data, "answer_tokens", "tokens of an answer, mean of a batch", 2)
            + _small(data, "entropy", "entropy of a token, nats", 3)
            + _small(data, "mismatch_max", "log-probability of a token, sampler against trainer, largest difference", 4)
            + skin.paragraph(f"Answers of batch {data['answers']['batch']:,}, the newest:", "small")
            + skin.table(columns, rows, "answers"))


def _short(text: str, most: int = 300) -> str:
    """Return the last `most` characters of a text; answers are at the end."""
    return text if len(text) <= most else f"… {text[-most:]}"


def speed(data: dict) -> str:
    drawn, rows = "", []
    for key, (name, show) in SPEED.items():
        measured, one = data["speed"][key], read_price(data, key)
        if measured is None:
            continue
        rows.append((name, number(show, measured), number(show, one or None),
                     of_share(measured / one if one else None)))
        if key != "step_time_s":
            most = MOST_TIMES * max(measured, one or 0.0)
            above = sum(value > most for _, value in _points(data, key))
            plot = _curve(data, key, PlotAxis(name, show, zero=True), color=len(rows),
                          levels=[(one, f"priced {show(one)}")] if one else [], most=most)
            clipped = f" Values above {show(most)} are drawn at the top edge ({above} of {len(_points(data, key))})."
            drawn += skin.figure(plot.draw, (_means(data, key) + clipped * bool(above)).strip())
    columns = [Column(f"median of {_describe_steps(data)}"), Column("measured", "n"),
               Column("priced, by the roofline", "n"),
               Column("measured of it", "n")]
    shown = 2 if read_price(data, "step_time_s") is None else 4
    return drawn + skin.table(columns[:shown], [row[:shown] for row in rows], "measured")


def draw_time(data: dict) -> str:
    parts = {name: spent_s for name, spent_s in data["time_s"].items() if spent_s > 0}
    total = sum(parts.values())
    if not total:
        return ""
    rows = [(k % pictures.COLORS, name, spent_s) for k, (name, spent_s) in enumerate(parts.items())]
    bar = Bar("all of it", [row for row in rows if row[2] > layout.LEAST_SHARE * total])
    columns = [Column("what"), Column("time", "n"), Column("of all", "n")]
    table = skin.table(columns, [(name, number(duration, spent_s), of_share(spent_s / total))
                                 for _, name, spent_s in rows], "time-spent")
    words = "Only steps are shown: this directory has no history.jsonl." if data["goodput"] is None else (
        f"All the time since the first start; goodput, the share of steps that counted, is {data['goodput']:.1%}.")
    key = skin.key((color, name, f"{spent_s / total:.1%}") for color, name, spent_s in rows)
    return skin.figure(functools.partial(pictures.bars, [bar], duration, "where the time went", most=total),
                       words, key) + table


def starts(data: dict) -> str:
    def moment(when: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))

    def how(k: int, start: dict) -> str:
        return start["how"] or (data["state"] if k == len(data["starts"]) else "ended without a message")
    rows = [(of_count(k), moment(one["began"]), of_count(one["from_step"]), of_count(one["to_step"]),
             number(duration, one["run_s"]), of_count(one["steps_again"]), how(k, one),
             one["on"]) for k, one in enumerate(data["starts"], 1)]
    columns = [Column("start", "n"), Column("began", "keep"), Column("after step", "n"), Column("to step", "n"),
               Column("lasted", "n"), Column("steps taken again", "n"), Column("how it ended", "long"),
               Column("on", "some")]
    changed = [f"from step {row['step'] + 1:,} on: {row['key']} = {row['to']!r} (was {row['from']!r})"
               for row in data["changes"]]
    saved = ", ".join(f"{step:,}" for step in data["checkpoints"])
    return skin.table(columns, rows, "attempts") + skin.bullets(changed) + skin.paragraph(
        f"Saved steps: {saved}." if saved else "No checkpoint is saved.", "small")


def experts(data: dict) -> str:
    load = data["experts"]
    busiest, idlest, entropy = (load[name][-1] for name in ("max", "min", "entropy"))
    rows = [(of_count(layer), *(number("{:.2f}".format, value) for value in values))
            for layer, *values in zip(load["layers"], busiest, idlest, entropy)]
    columns = [Column("layer", "n"), Column("busiest expert, of the mean", "n"), Column("idlest, of the mean", "n"),
               Column("entropy", "n")]
    drawn = functools.partial(pictures.heat, [(f"layer {layer}", [column[k] for column in load["max"]])
                                              for k, layer in enumerate(load["layers"])],
                              load["steps"], "tokens of each layer's busiest expert by step, relative to the mean")
    worst = max((value for column in load["max"] for value in column if value is not None), default=1.0)
    caption = (f"Tokens of each layer's busiest expert relative to the mean of its experts: pale at 1, full at "
               f"{max(worst, 2):.2f}. Steps go to the right; a cell for several steps shows the worst. The table has "
               f"the last column. No token is dropped, however busy an expert is.")
    return (skin.figure(drawn, caption)
            + _small(data, "expert_load_max", "busiest expert of all layers, relative to the mean", 3)
            + _small(data, "expert_load_entropy", "entropy of the choices, mean of the layers; 1 is even", 2)
            + skin.table(columns, rows, "experts-load"))


def more(data: dict) -> str:
    return _small(data, "grad_norm", "gradient norm", 4) + _small(data, "learning_rate", "learning rate", 5)


def _small(data: dict, key: str, name: str, color: int) -> str:
    if not _points(data, key):
        return ""
    plot = _curve(data, key, PlotAxis(name, "{:.3g}".format), color=color, height=200)
    return skin.figure(plot.draw, _means(data, key).strip())
