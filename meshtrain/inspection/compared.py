"""Compares runs from their directories: curves, final numbers, and what differs in their run files.

Losses are compared only if the runs have the same objective, tokenizer and vocabulary; else a note says that they are
not comparable.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from meshtrain import files
from meshtrain.inspection import measured
from meshtrain.inspection.report import columns
from meshtrain.journal import rows, sample
from meshtrain.run import contents, say
from meshtrain.units import duration, many

MOST_POINTS = 1000          # of a curve
LATEST = 0.02               # share of the steps whose mean loss is compared
EQUAL = 1.01                # ratio of speeds that count as equal
OF_RUN = ("name", "dir", "steps", "tokens_per_step", "step", "tokens", "state", "skipped", "objective", "loss",
          "reward", "speed", "time_s", "goodput")
CURVES = ("loss", "val_loss", "reward", "tokens_per_s")
OWN = ("run.name", "run.dir")       # keys that differ between any two runs
# Keys that make losses incomparable if they differ -> their plural, for notes.
CHANGE_THE_LOSS = {"training.objective": "objectives", "data.tokenizer": "tokenizers",
                   "model.vocab_size": "vocabularies"}


def of(run_dirs: Sequence[str]) -> dict:
    """Return the comparison of the runs in these directories, as JSON.

    runs: in the given order, the values of `measured.of` with a unique label, the loss after `common_tokens` and the
    curves, {key: [(step, value)]} (smoothed if there are many rows). common_tokens: number of tokens that all runs have
    trained on. differs: the keys whose values differ, with one value per run. notes: why numbers are not comparable.
    Raises: ValueError with all mistakes, one per line.
    """
    mistakes, told, run_files = _find_duplicates(run_dirs), [], []
    for run_dir in dict.fromkeys(run_dirs):
        try:
            run_files.append(_flat(measured.run_file(run_dir)))
            data = measured.of(run_dir)
            told.append({key: data[key] for key in OF_RUN} | {"curves": {key: _curve(data["rows"], key)
                                                                         for key in CURVES}})
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    common = min(run["step"] * run["tokens_per_step"] for run in told)
    for run in told:
        alike = [other for other in told if other["name"] == run["name"]]
        run |= {"label": run["name"] if len(alike) == 1 else run["dir"], "loss_at_common": _loss_at(run, common)}
    differing = _differing(run_files)
    return {"runs": told, "common_tokens": common, "differs": differing,
            "notes": [f"the {CHANGE_THE_LOSS[row['key']]} differ: losses are not comparable" for row in differing
                      if row["key"] in CHANGE_THE_LOSS]}


def _find_duplicates(run_dirs: Sequence[str]) -> list[str]:
    run_dirs_by_place: dict[str, str] = {}
    mistakes = []
    for run_dir in run_dirs:
        directory = contents.open_run(run_dir)
        place = str(directory.resolve() if files.is_dir(directory) else directory)
        if place in run_dirs_by_place:
            also = "" if run_dirs_by_place[place] == run_dir else f" (as {run_dirs_by_place[place]}, too)"
            mistakes.append(f"{run_dir} is given twice{also}; give different runs")
        run_dirs_by_place.setdefault(place, run_dir)
    return mistakes


def _flat(table: Mapping, begin: str = "") -> dict[str, object]:
    """Return nested tables as {"section.key": value}."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{begin}{key}.") if isinstance(value, dict) and value else {f"{begin}{key}": value}
    return flat


def _differing(run_files: Sequence[Mapping[str, object]]) -> list[dict]:
    keys = dict.fromkeys(key for one in run_files for key in one if key not in OWN)
    def values(key: str) -> list[str | None]:
        return [json.dumps(one[key], ensure_ascii=False, default=str) if key in one else None for one in run_files]

    return [{"key": key, "values": values(key)} for key in keys if len(set(values(key))) > 1]


def _curve(columns: Mapping, key: str) -> list[tuple[int, float]]:
    """Return the points (step, value) of a curve, at most about MOST_POINTS. columns: the rows of `measured.of`."""
    values = columns["smoothed"].get(key) or columns[key]
    points = [(step, value) for step, value in zip(columns["step"], values) if value is not None]
    every = -(-len(points) // MOST_POINTS)
    return points if every < 2 else [*points[:-1:every], points[-1]]


def _loss_at(run: Mapping, tokens: int) -> float | None:
    """Return the mean loss over the last fraction LATEST of the steps up to `tokens` tokens; None if these steps have
    no loss."""
    step = tokens // run["tokens_per_step"]
    log = rows.MetricRows(contents.open_run(run["dir"]) / rows.NAME)
    losses = [row["loss"] for row in sample.find_steps(log, math.floor((1 - LATEST) * step) + 1, step)
              if row.get("loss") is not None]
    return sum(losses) / len(losses) if losses else None


# ---- words -----------------------------------------------------------------------------------------------------------


def numbers(data: Mapping) -> list[tuple[str, list[tuple[str, float | None]]]]:
    """Return the rows of the table of numbers: (name, [(text, exact number) for each run]). A number is None if it is
    unknown. Rows without any value are left out."""
    def number(show, value):
        return ("–", None) if value is None else (show(value), value)

    loss, share = "{:.4f}".format, "{:.1%}".format
    table = [("state", [(re.split("[:;,]", run["state"])[0], None) for run in data["runs"]]),
             ("step", [(f"{run['step']:,} of {run['steps']:,}", run["step"]) for run in data["runs"]]),
             ("tokens", [(many(run["tokens"]), run["tokens"]) for run in data["runs"]])]
    of = {"loss at first": (loss, lambda run: run["loss"]["first"]),
          "loss, last": (loss, lambda run: run["loss"]["last"]),
          f"loss after {many(data['common_tokens'])} tokens": (loss, lambda run: run["loss_at_common"]),
          "validation loss, last": (loss, lambda run: run["loss"]["validation"]),
          "validation loss, best": (loss, lambda run: run["loss"]["validation_best"]),
          "reward, last tenth": ("{:.4g}".format, lambda run: run["reward"] and run["reward"]["ends"]),
          "steps skipped": ("{:,}".format, lambda run: run["skipped"] or None),
          "tokens/s, median": ("{:,.0f}".format, lambda run: run["speed"]["tokens_per_s"]),
          "MFU, median": (share, lambda run: run["speed"]["mfu"] or None),
          "goodput": (share, lambda run: run["goodput"]),
          "time in all": (duration, lambda run: sum(run["time_s"].values()) or None)}
    table += [(name, [number(show, value(run)) for run in data["runs"]]) for name, (show, value) in of.items()]
    return [row for row in table if any(text != "–" for text, _ in row[1])]


def verdict(data: Mapping) -> str:
    """Return one sentence that names the best run, as far as the runs can be compared."""
    runs, said = data["runs"], []
    if all(run["reward"] for run in runs):
        best = max(runs, key=lambda run: run["reward"]["ends"])
        said.append(f"{best['label']} has the highest reward, {best['reward']['ends']:.4g}")
    elif data["notes"]:
        said.append(data["notes"][0])
    elif losses := [(run["loss_at_common"], run["label"]) for run in runs if run["loss_at_common"] is not None]:
        (low, label), *others = sorted(losses)
        said.append(f"{label} has the lowest loss after {many(data['common_tokens'])} tokens, {low:.4f}" + (
            f" against {others[0][0]:.4f}" if others else "") if not others or others[0][0] > low else
                    f"the losses after {many(data['common_tokens'])} tokens are equal, {low:.4f}")
    if failed := [run["label"] for run in runs if not run["loss"]["finite"]]:
        said.append(f"{', '.join(failed)} diverged")
    if len(runs_with_speed := [run for run in runs if run["speed"]["tokens_per_s"]]) > 1:
        said.append(_speeds(runs_with_speed))
    text = "; ".join(said) or "the runs have too few steps to be compared"
    return f"{text[0].upper() + text[1:] if not text.startswith(tuple(run['label'] for run in runs)) else text}."


def _speeds(runs: Sequence[Mapping]) -> str:
    """Return a text about which run is fastest, or why the rows do not show it."""
    if few := [run for run in runs if run["speed"]["between"] is None]:
        counts = " and ".join(f"{run['label']} has {run['speed']['rows']}" for run in few)
        return (f"too few rows to compare speeds: {counts} after the first {measured.FIRST_STEPS} steps, but "
                f"{measured.FEWEST_ROWS} are needed")
    slowest, *_, fastest = sorted(runs, key=lambda run: run["speed"]["tokens_per_s"])
    slow, fast = slowest["speed"], fastest["speed"]
    if fast["tokens_per_s"] <= EQUAL * slow["tokens_per_s"]:
        return "all are equally fast"
    if fast["between"][0] > slow["between"][1]:
        return f"{fastest['label']} is {fast['tokens_per_s'] / slow['tokens_per_s'] - 1:.0%} faster than the slowest"
    bounds = [f"{run['label']} {run['speed']['between'][0]:,.0f} to {run['speed']['between'][1]:,.0f}"
              for run in (fastest, slowest)]
    return f"the speeds differ by less than those of one run's steps ({', '.join(bounds)} tokens/s)"


def text(data: Mapping) -> str:
    """Return the text that `report A B` prints."""
    labels = [run["label"] for run in data["runs"]]
    table = [("", *labels), *((name, *(cell for cell, _ in cells)) for name, cells in numbers(data))]
    table += [("", *[""] * len(labels)), ("differing keys", *[""] * len(labels))] if data["differs"] else []
    table += [(row["key"], *(shorten(value) for value in row["values"])) for row in data["differs"]]
    ends = [] if data["differs"] else ["", "their run files are equal except for name and directory"]
    words = columns([tuple(map(say.escape, row)) for row in table])
    return "\n".join([words, *ends, "", say.escape(verdict(data)), *(f"note: {note}" for note in data["notes"])])


def shorten(value: str | None, most: int = 60) -> str:
    """Return a value of a run file in at most `most` characters; "–" for None (the run file lacks the key)."""
    return "–" if value is None else value if len(value) <= most else f"{value[:most - 1]}…"
