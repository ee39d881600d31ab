"""What a run's directory tells of it: how far it is, how fast, what took the time, and what was priced before it began.

Reads, and writes nothing: of a run that goes on, that was stopped or killed, or that has not taken a step yet. Needs none of
the run's devices, data or code.
"""
from __future__ import annotations

import contextlib
import json
import statistics
import time
import tomllib
from pathlib import Path

from meshtrain.names import LOAD_BY_LAYER
from meshtrain.run import goodput, history, metrics, rundir

COST = "cost.json"          # what `inspect --json` prints of the step, written by `train`
PRICED = {"run", "mesh", "parameters", "memory_bytes", "collectives", "matmul_flops", "differences", "roofline", "schedule", "notes",
          "warnings", "broken_permutes", "recomputed_by_xla"}
MOST_ROWS = 3000            # of metrics in the answer
MOST_STRETCHES = 60         # of steps, for numbers of every layer
CURVES = ("step", "loss", "val_loss", "tokens_per_s", "mfu", "step_time_s", "grad_norm", "learning_rate", "data_wait_s",
          "expert_load_max", "expert_load_entropy")


def of(directory: Path) -> dict:
    """Everything, as JSON. Raises: ValueError where the directory holds no run, or a file of it is broken."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; name the run.dir of a run, e.g. runs/quickstart")
    if not (directory / "config.toml").is_file():
        raise ValueError(f"{directory} is no run directory (no config.toml); name the run.dir of a run, e.g. runs/quickstart")
    try:
        run = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
        name, steps, batch, seq_len = run["run"]["name"], run["training"]["steps"], run["data"]["global_batch"], run["data"]["seq_len"]
        steps, per_step = int(steps), int(batch) * int(seq_len)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / 'config.toml'} cannot be read as a run file ({type(error).__name__}: {error}); train writes "
                         "one, the same command again") from None
    path = directory / "metrics.jsonl"
    try:
        rows = metrics.read(path) if path.exists() else []
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    done = rows[-1]["step"] if rows else 0
    attempts = goodput.tries(history.read(directory), history.beat(directory), rows, path.stat().st_mtime if rows else None)
    state = _state(directory, attempts, done, steps)
    saved = directory / "checkpoints"
    return {"name": name, "dir": str(directory), "steps": steps, "tokens_per_step": per_step, "step": done,
            "tokens": rows[-1].get("tokens", done * per_step) if rows else 0, "state": state,
            "skipped": sum(bool(row.get("skipped")) for row in rows), "loss": _loss(rows), "speed": _speed(rows),
            "time_s": _spent(rows, attempts), "goodput": _goodput(attempts), "starts": attempts, "changes": _changes(directory),
            "checkpoints": sorted(int(entry.name) for entry in saved.glob("*") if entry.name.isdecimal()) if saved.is_dir() else [],
            "rows": _curves(rows), "experts": _experts(rows), "priced": _priced(directory)}


def _state(directory: Path, attempts: list[dict], done: int, steps: int) -> str:
    """In words."""
    how = attempts[-1]["how"] if attempts else ""
    if owner := rundir.at_work(directory):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner["time"]))
        return f"at work: pid {owner['pid']} on {owner['host']}, since {since}" + (
            "" if owner["seen"] else " (as its lock file says; that host cannot be seen from here)")
    if done >= steps or how == "finished":
        return "finished"
    return how or ("ended without a word, perhaps killed; the same command goes on" if done else "has not taken a step")


def _loss(rows: list[dict]) -> dict:
    known = [row for row in rows if row.get("loss") is not None]
    validated = [row for row in rows if row.get("val_loss") is not None]
    return {"first": known[0]["loss"] if known else None, "last": known[-1]["loss"] if known else None,
            "validation": validated[-1]["val_loss"] if validated else None,
            "validation_step": validated[-1]["step"] if validated else None,
            "validation_best": min((row["val_loss"] for row in validated), default=None)}


def _speed(rows: list[dict]) -> dict:
    """Medians, which the first step and pauses do not move; None where there is none."""
    values = {key: [row[key] for row in rows if row.get(key) is not None] for key in ("step_time_s", "tokens_per_s", "mfu")}
    return {key: statistics.median(found) if found else None for key, found in values.items()}


def _spent(rows: list[dict], attempts: list[dict]) -> dict[str, float]:
    """Seconds, by what they went into. With a history they are all the time since the first try began."""
    if attempts:
        return goodput.spent_s(attempts)
    before = [0, *(row["step"] for row in rows)]
    taken = sum((row.get("step_time_s") or 0.0) * (row["step"] - last) for row, last in zip(rows, before))
    waited = {key: sum(row.get(f"{key}_wait_s") or 0.0 for row in rows) for key in ("data", "checkpoint")}
    return {goodput.PARTS["steps"]: taken - waited["data"], **{goodput.PARTS[key]: value for key, value in waited.items()}}


def _goodput(attempts: list[dict]) -> float | None:
    """Share of all the time that went into steps that count; None where that is not known."""
    spent = goodput.spent_s(attempts)
    return spent[goodput.PARTS["steps"]] / total if (total := sum(spent.values())) else None


def _changes(directory: Path) -> list[dict]:
    """What was changed when the run went on: [{step, key, from, to}]."""
    found = []
    with contextlib.suppress(OSError):
        for line in (directory / "changes.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [row for row in found if isinstance(row, dict) and {"step", "key", "from", "to"} <= row.keys()
            and type(row["step"]) is int]


def _curves(rows: list[dict]) -> dict[str, list]:
    """Columns; of too many rows those with the lowest and the highest loss of each stretch, and all that were validated."""
    if len(rows) > MOST_ROWS:
        stretch, kept = -(-2 * len(rows) // MOST_ROWS), set()
        for start in range(0, len(rows), stretch):
            part = sorted(range(start, min(start + stretch, len(rows))), key=lambda k: rows[k].get("loss") or 0.0)
            kept |= {part[0], part[-1], *(k for k in part if rows[k].get("val_loss") is not None)}
        rows = [rows[k] for k in sorted(kept)]
    return {key: [row.get(key) for row in rows] for key in CURVES}


def _experts(rows: list[dict]) -> dict | None:
    """How busy experts are, by layer: {"layers": those that have any, "steps": the last of each stretch, "max", "min",
    "entropy": [stretch][layer], the worst of the stretch}. None where no row has it."""
    rows = [row for row in rows if all(isinstance(row.get(key), list) for key in LOAD_BY_LAYER)]
    rows = [row for row in rows if len({len(row[key]) for key in LOAD_BY_LAYER} | {len(rows[-1][LOAD_BY_LAYER[0]])}) == 1]
    layers = [i for i, value in enumerate(rows[-1][LOAD_BY_LAYER[0]]) if value is not None] if rows else []
    if not layers:
        return None
    stretch = -(-len(rows) // MOST_STRETCHES)
    parts = [rows[max(0, stop - stretch):stop] for stop in range(len(rows), 0, -stretch)][::-1]
    worst = lambda pick, key, part, i: pick((row[key][i] for row in part if row[key][i] is not None), default=None)
    found = {name: [[worst(pick, key, part, i) for i in layers] for part in parts]
             for name, pick, key in zip(("max", "min", "entropy"), (max, min, min), LOAD_BY_LAYER)}
    return {"layers": layers, "steps": [part[-1]["step"] for part in parts]} | found


def _priced(directory: Path) -> dict | None:
    try:
        told = json.loads((directory / COST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and PRICED <= told.keys() else None
