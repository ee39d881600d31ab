"""Reads a run's progress, speed, time by purpose, and predicted costs from its directory.

Writes nothing. Works while the run trains, after it was stopped or killed, and before its first step. Needs none of
the run's devices, data or code.
"""
from __future__ import annotations

import array
import contextlib
import json
import math
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import files
from meshtrain.journal import goodput, history, rows, sample
from meshtrain.names import LOAD_BY_LAYER
from meshtrain.run import contents, rundir

COST = "cost.json"          # the output of `inspect --json` for the step, written by `train`
PRICED = {"run", "mesh", "parameters", "memory_bytes", "collectives", "matmul_flops",
          "differences", "roofline", "schedule", "notes", "warnings", "broken_permutes", "recomputed_by_xla"}
MOST_ROWS = 3000            # most metrics rows in the result
FIRST_STEPS = 3             # slower than later ones: memory, caches and files are new
FEWEST_ROWS = 6             # fewest rows that bound their median with 95% confidence: 6 give 1 - 2 / 2**6 = 97%, 5 94%
SMOOTHED = ("loss", "reward", "tokens_per_s", "grad_norm")      # columns that are also smoothed, over 1/40 of the rows
MOST_STRETCHES = 60         # most intervals of steps, for numbers of every layer
CURVES = ("step", "loss", "val_loss", "tokens_per_s", "mfu", "step_time_s", "grad_norm", "learning_rate", "data_wait_s",
          "expert_load_max", "expert_load_entropy", "reward", "val_reward", "answer_tokens", "entropy", "mismatch_max")
MOST_ANSWERS = 32           # most answers of the newest batch, for a run with [rl]
OF_ANSWER = {"prompt", "answer", "reward", "tokens", "stopped"}


def run_file(run_dir: str) -> dict:
    """Return the run file in a run's directory, as tables. Raises: ValueError if it is missing or cannot be read."""
    directory = contents.open_run(run_dir)
    if not files.is_dir(directory):
        raise ValueError(f"{run_dir} is not a directory; give the run.dir of a run, e.g. runs/quickstart")
    if not files.is_file(directory / "config.toml"):
        raise ValueError(f"{run_dir} is not a run directory (it has no config.toml); give the run.dir of a run, e.g. "
                         f"runs/quickstart")
    try:
        run = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
        run["run"]["name"], run["training"].get("objective")
        int(run["training"]["steps"]), int(run["data"]["global_batch"]) * int(run["data"]["seq_len"])
        return run
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / 'config.toml'} cannot be read as a run file ({type(error).__name__}: {error}); "
                         f"run the same train command again, which writes the file") from None


def of(run_dir: str) -> dict:
    """Return everything about a run as JSON. run_dir: its directory or address. Raises: ValueError if there is no run,
    or a file is damaged."""
    run, directory = run_file(run_dir := str(run_dir)), contents.open_run(run_dir)
    name, steps = run["run"]["name"], int(run["training"]["steps"])
    per_step = int(run["data"]["global_batch"]) * int(run["data"]["seq_len"])
    metric_rows = rows.MetricRows(directory / rows.NAME)
    try:
        metrics = _Metrics(sample.of(metric_rows))
        attempts = goodput.list_attempts(history.read(directory))
        changes = rows.Log(directory / contents.CHANGES, rows.is_change).read()
    except OSError as error:
        raise ValueError(f"{error.filename or metric_rows.path} cannot be read: {error.strerror}") from None
    done, time_s = metrics.last.get("step", 0), _sum_by_purpose(metrics, attempts)
    in_steps_s, total_s = time_s[goodput.PARTS["steps"]], sum(time_s.values())
    return {"name": name, "dir": run_dir, "steps": steps, "tokens_per_step": per_step, "step": done,
            "tokens": metrics.last.get("tokens", done * per_step), "state": _state(directory, attempts, done, steps),
            "objective": run["training"].get("objective", ""),
            "skipped": metrics.skipped, "loss": metrics.loss(), "reward": metrics.trend("reward"),
            "speed": metrics.speed(),
            "time_s": time_s, "goodput": in_steps_s / total_s if attempts and total_s else None, "starts": attempts,
            "changes": changes, "checkpoints": contents.steps(run_dir),
            "rows": _curves(metrics.columns, np.asarray(metrics.drawn, bool)), "experts": _experts(metrics.loads),
            "sampled": metrics.describe_sample(),
            "answers": _answers(directory, (done - 1) // run.get("rl", {}).get("updates", 1)),
            "priced": _read_price(directory),
            "no_rows": metrics.no_rows}


class _Metrics:
    """The rows of a sample as one float64 column per key. drawn: the rows that statistics use; the other rows are only
    shown. last: the last row. skipped: number of skipped steps. loads: step and expert load by layer of the rows that
    have it. no_rows: number of non-empty lines that are not rows."""

    def __init__(self, read: sample.Sample):
        self.read, self.columns = read, {key: array.array("d") for key in (*CURVES, "checkpoint_wait_s")}
        self.last, self.skipped, self.no_rows = {}, 0, 0
        self.drawn, self.loads = array.array("b"), list[dict]()
        for line, drawn in read.lines():
            if line.row is None:
                self.no_rows += not line.empty
                continue
            self.last = line.row
            self.skipped += bool(line.row.get("skipped"))
            if _has_experts(line.row):
                self.loads.append({key: line.row[key] for key in ("step", *LOAD_BY_LAYER)})
            self.drawn.append(drawn)
            for key, column in self.columns.items():
                value = line.row.get(key)
                column.append(math.nan if value is None else value)

    def points(self, key: str, sampled: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of the rows that have the key; if `sampled`, of those that were drawn."""
        steps, values = np.asarray(self.columns["step"]), np.asarray(self.columns[key])
        taken = ~np.isnan(values) & (np.asarray(self.drawn, bool) if sampled else True)
        return steps[taken], values[taken]

    def describe_sample(self) -> dict | None:
        """Return {"rows": number of drawn rows, "of": about how many rows the file has}; None if all are read."""
        count = sum(self.drawn)
        return None if self.read.is_whole else {"rows": count, "of": round(count / self.read.share)}

    def trend(self, key: str) -> dict | None:
        """Return the means of the first and the last tenth of the rows that have the key; None if no row has it."""
        values = self.points(key, sampled=True)[1]
        tenth = max(1, values.size // 10)
        return {"count": int(values.size), "begins": float(values[:tenth].mean()),
                "ends": float(values[-tenth:].mean())} if values.size else None

    def loss(self) -> dict:
        (_, losses), (steps, validated) = self.points("loss"), self.points("val_loss")
        return {"trend": self.trend("loss"), "finite": bool(self.last.get("loss") is not None or not self.last),
                "first": float(losses[0]) if losses.size else None, "last": float(losses[-1]) if losses.size else None,
                "validation": float(validated[-1]) if validated.size else None,
                "validation_step": int(steps[-1]) if steps.size else None,
                "validation_best": float(validated.min()) if validated.size else None}

    def speed(self) -> dict:
        """Return medians of step time, tokens/s and MFU; None without values. The median ignores pauses.

        rows: number of rows after the first FIRST_STEPS steps. between: bounds of the median of their tokens_per_s with
        95% confidence; None if there are too few rows.
        """
        values = {key: self.points(key, sampled=True) for key in ("step_time_s", "tokens_per_s", "mfu")}
        steps, speeds = values["tokens_per_s"]
        later = np.sort(speeds[steps > FIRST_STEPS])
        return {key: float(np.median(found)) if found.size else None for key, (_, found) in values.items()} | {
            "rows": later.size, "between": _bounds_of_median(later)}


def _bounds_of_median(values: np.ndarray) -> tuple[float, float] | None:
    """Return bounds of the median with 95% confidence for any distribution; None for fewer than FEWEST_ROWS values.

    values: sorted. All of them lie on one side of the median with probability 2 / 2**count.
    """
    if values.size < FEWEST_ROWS:
        return None
    rank = max(0, int((values.size - 1) / 2 - 0.98 * values.size**0.5))
    return float(values[rank]), float(values[-1 - rank])


def _state(directory: Path, attempts: list[dict], done: int, steps: int) -> str:
    how = attempts[-1]["how"] if attempts else ""
    if owner := rundir.at_work(directory):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner["time"]))
        return f"at work: pid {owner['pid']} on {owner['host']}, since {since}" + (
            "" if owner["seen"] else " (as its lock file says; that host cannot be seen from here)")
    if done >= steps or how == "finished":
        return "finished"
    return how or ("ended without a message, perhaps killed; run the same command again to resume"
                   if done else "has not taken a step")


def _sum_by_purpose(metrics: _Metrics, attempts: list[dict]) -> dict[str, float]:
    """Return seconds by purpose. If the run has a history, the seconds cover all the time since the first attempt
    began; without a history, they are estimated from a sample."""
    if attempts:
        return goodput.sum_parts_s(attempts)
    drawn = np.asarray(metrics.drawn, bool)
    steps, times_s = np.asarray(metrics.columns["step"])[drawn], np.asarray(metrics.columns["step_time_s"])[drawn]
    taken = float(np.nansum(times_s * np.diff(steps, prepend=0)))
    waited = {key: float(metrics.points(f"{key}_wait_s", sampled=True)[1].sum()) / metrics.read.share
              for key in ("data", "checkpoint")}
    return {goodput.PARTS["steps"]: taken - waited["data"],
            **{goodput.PARTS[key]: value for key, value in waited.items()}}


def _curves(columns: Mapping[str, Sequence[float]], drawn: np.ndarray) -> dict[str, Any]:
    """Return the columns of the curves. If there are many rows, only those with the lowest and the highest loss of each
    interval and those with a validation are kept. smoothed: running means over `window` of the `drawn` rows."""
    count, losses, validated = len(columns["step"]), columns["loss"], (columns["val_loss"], columns["val_reward"])
    kept: Sequence[int] = range(count)
    if count > MOST_ROWS:
        stretch, chosen = -(-2 * count // MOST_ROWS), set()
        for start in range(0, count, stretch):
            part = sorted(range(start, min(start + stretch, count)),
                          key=lambda k: 0.0 if math.isnan(losses[k]) else losses[k])
            chosen |= {part[0], part[-1], *(k for k in part if not all(math.isnan(values[k]) for values in validated))}
        kept = sorted(chosen)

    def plain(values) -> list[float | None]:
        return [None if math.isnan(value) else float(value) for value in values]

    def smooth(key: str) -> np.ndarray:
        values = np.full(count, np.nan)
        values[drawn] = _smooth(np.asarray(columns[key])[drawn], window)
        return values[list(kept)]

    curves = {key: plain(columns[key][k] for k in kept) for key in CURVES}
    window = int(drawn.sum()) // 40 | 1
    smoothed = {key: plain(smooth(key)) for key in SMOOTHED} if window > 1 else {}
    return curves | {"step": [int(columns["step"][k]) for k in kept], "window": window, "smoothed": smoothed}


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return running means over `window` values. NaNs are left out of the means and stay NaN."""
    there = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    at = np.arange(values.size)
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, values.size)
    means = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return np.where(there, means, np.nan)


def _has_experts(row: Mapping) -> bool:
    columns = [row.get(key) for key in LOAD_BY_LAYER]
    lengths = {len(column) if isinstance(column, list) else None for column in columns}
    return len(lengths) == 1 and None not in lengths


def _experts(loads: Sequence[Mapping]) -> dict | None:
    """Return the expert load by layer; None if no row has it. loads: step and LOAD_BY_LAYER of the rows that have it.

    layers: indices of the layers with experts. steps: the last step of each interval. max, min, entropy: [interval]
    [layer], the worst value in the interval.
    """
    if not loads:
        return None
    last = loads[-1]
    layers = [i for i, value in enumerate(last[LOAD_BY_LAYER[0]]) if value is not None]
    if not layers:
        return None
    stretch = -(-len(loads) // MOST_STRETCHES)
    load: dict[str, list] = {"layers": layers, "steps": [], "max": [], "min": [], "entropy": []}
    for number, row in enumerate(loads, -len(loads) % stretch):    # the first interval is short
        if len(row[LOAD_BY_LAYER[0]]) != len(last[LOAD_BY_LAYER[0]]):
            continue
        if number % stretch == 0 or not load["steps"]:
            load["steps"].append(row["step"])
            for name in ("max", "min", "entropy"):
                load[name].append([None] * len(layers))
        load["steps"][-1] = row["step"]
        for name, pick, key in zip(("max", "min", "entropy"), (max, min, min), LOAD_BY_LAYER):
            values = [(had, row[key][i]) for had, i in zip(load[name][-1], layers)]
            load[name][-1] = [pick((value for value in pair if value is not None), default=None) for pair in values]
    return load


def _answers(directory: Path, last: int) -> dict | None:
    """Return the newest batch of answers up to number `last` as {"batch": number, "lines": [{prompt, answer, reward,
    …}]}; None without one. Later batches are not trained on yet, or remain from before the run went back."""
    kept = directory / contents.ROLLOUTS
    with contextlib.suppress(OSError, ValueError):
        numbers = [int(path.stem) for path in kept.glob("*.jsonl") if path.stem.isdecimal()]
        batch = max(number for number in numbers if number <= last)
        # splitlines would also split at characters within answers
        text = (kept / f"{batch}.jsonl").read_text(encoding="utf-8", errors="replace")
        lines = [json.loads(line) for line in text.split("\n")[:MOST_ANSWERS] if line]
        return {"batch": batch, "lines": [line for line in lines if OF_ANSWER <= line.keys()]}
    return None


def _read_price(directory: Path) -> dict | None:
    try:
        cost = json.loads((directory / COST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cost if isinstance(cost, dict) and PRICED <= cost.keys() else None
