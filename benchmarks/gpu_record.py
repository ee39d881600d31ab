"""The results of the first minutes on a GPU. They are on disk after every item: the .md for readers, the .json for a
later call that continues.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CODE = ("meshtrain/**/*.py", "benchmarks/gpu*.py", "sharding_rules/*.toml", "configs/**/*.toml")
BEGUN, RIGHT, WRONG, FAILED = "begun", "right", "WRONG", "FAILED"
TOLD = ("date", "commit")       # ignored when a call continues a record: committing the record changes HEAD
GROUPS = {"attention": "Attention engines against whole scores in float32 on the CPU",
          "kernel": "Grouped matmuls and recurrences against XLA in float32 on the CPU",
          "layout": "One step of every rule file against one CPU device in float32",
          "layers": "One step of every kind of layer against one CPU device in float32",
          "schedule": "One step of every pipeline schedule against one CPU device in float32",
          "deterministic": "The same bits in every run (training.deterministic)",
          "speed": "Speed and memory",
          "sampling": "Answers between steps: Llama 3.2 1B, prompts of 129 tokens, answers of 257, 8 of a prompt",
          "engines": "Attention engines by themselves: 2 rows of 8,192 tokens, 32 heads, 8 of keys and values",
          "flags": "Flags of the table, garbage collection and NUMA binding, off against on",
          "tiles": "Tiles of the Pallas kernels, timed"}


class Choice(NamedTuple):
    """A key whose "auto" a measurement decides. of: the other values of the key, the safe one first, and the item that
    has the step time of each; these runs differ only in the value. compared: prefixes of the items that check the last
    value."""
    key: str
    of: Mapping[str, str]
    compared: tuple[str, ...]


PACKED = "speed/8B{}, packed, remat selective"
CHOICES = (Choice("attention", {"pallas": PACKED.format(""), "mosaic": PACKED.format(" mosaic")}, ("attention/mosaic",)),
           Choice("mlp", {"xla": PACKED.format(" mosaic"), "mosaic": PACKED.format(" MLP mosaic")},
                  ("kernel/MLP", "layers/MLP")))


class Item(NamedTuple):
    """One measurement. key: GROUP/…, with a group from GROUPS.

    measure() returns plain JSON. `compared` {what: (error, tolerance)} decides whether the item is right or wrong.
    `errors` {what: message} has the parts that raised. All other entries are shown. seconds: an estimate. alone:
    whether the item needs its own process, which starts with an empty GPU.
    """
    key: str
    measure: Callable[[], dict]
    seconds: float = 10
    alone: bool = False

    @property
    def group(self) -> str:
        return self.key.partition("/")[0]

    @property
    def kind(self) -> str:
        """Return the key without its dtype."""
        return self.key.removesuffix(", bfloat16").removesuffix(", float32")


def verdict(found: Mapping) -> str:
    if found.get("errors"):
        return FAILED
    right = all(error <= tolerance for error, tolerance in found.get("compared", {}).values())      # NaN is wrong
    return RIGHT if right else WRONG


def code_digest(root: Path = ROOT) -> str:
    """Return the digest of every file that affects what the items compute. It does not use git, because a copy of the
    tree may be without it."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in root.glob(pattern)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(folder: Path):
    """Hold the lock of a folder against other processes that write there."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


class Record:
    """The items of one machine and one state of the code. `of`: the machine, versions and code for which they are
    valid; a record with another `of` is ignored. Several processes may write one record."""

    def __init__(self, directory: Path, name: str, of: Mapping[str, object]):
        self.path, self.name, self.of, self.items, self.planned = (
            Path(directory) / f"gpu-{name}.json", name, dict(of), {}, [])
        self._read()

    def _read(self) -> None:
        if self.path.exists():
            old = json.loads(self.path.read_text())
            told = {name: None for name in TOLD}
            if {**old["of"], **told} == {**self.of, **told}:
                self.items, self.planned = old["items"], old["planned"]

    @property
    def left(self) -> list[str]:
        """Return the keys of items that have not ended."""
        return [key for key in self.planned if self.items.get(key, {}).get("status", BEGUN) == BEGUN]

    def open(self, items: list[Item], planned: Sequence[Item] = ()) -> list[Item]:
        """Return the items that have not ended. An item that was interrupted once comes last, because it may not be the
        cause. An item that was interrupted twice has failed. planned: all items, if `items` is only this process's
        share."""
        self.planned = [item.key for item in planned or items]
        for item in items:
            if self.items.get(item.key, {}).get("tries", 0) >= 2:
                self.fail(item.key, "did not come to an end, twice")
        return sorted((item for item in items if item.key in self.left), key=lambda item: item.key in self.items)

    def begin(self, key: str) -> None:
        self._note(key, {"status": BEGUN, "tries": self.items.get(key, {}).get("tries", 0) + 1})

    def end(self, key: str, found: Mapping, seconds: float) -> str:
        status = verdict(found)
        self._note(key, {"status": status, "seconds": round(seconds, 1), **found})
        return status

    def fail(self, key: str, error: str) -> None:
        self._note(key, {"status": FAILED, "errors": {"": error}})

    def _note(self, key: str, item: Mapping) -> None:
        """Write this process's result in addition to what other processes have written."""
        planned = self.planned
        with _locked(self.path.parent):
            self._read()
            self.items[key], self.planned = dict(item), list(dict.fromkeys([*self.planned, *planned]))
            self._write()

    def _write(self) -> None:
        for path, text in ((self.path,
                            json.dumps({"of": self.of, "planned": self.planned, "items": self.items}, indent=1)),
                           (self.path.with_suffix(".md"), page(self))):
            beside = path.with_name(path.name + ".new")
            beside.write_text(text)
            os.replace(beside, path)


# ---- the page --------------------------------------------------------------------------------------------------------


def table(header: tuple, rows: list) -> list[str]:
    return ["| " + " | ".join(str(cell) for cell in cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def page(record: Record) -> str:
    counts = {status: sum(item["status"] == status for item in record.items.values())
              for status in (RIGHT, WRONG, FAILED)}
    lines = [f"# First light: {record.of.get('count')} × {record.of.get('gpu')}", "",
             "Written by `python -m benchmarks.gpu`, after every item; the same command goes on where it was cut off.",
             "",
             " · ".join(f"{name} {value}" for name, value in record.of.items() if value), "",
             ", ".join(f"{number} {status}"
                       for status, number in counts.items()) + f", {len(record.left)} still to do.",
             *advice(record.items)]
    for group, title in GROUPS.items():
        items = {key: item for key, item in record.items.items() if key.partition("/")[0] == group
                 and item["status"] != BEGUN}
        if items:
            shown = _measured if group in ("speed", "engines", "flags", "tiles") else _checks
            lines += ["", f"## {title}", "", *shown(items)]
    failed = {key: item["errors"] for key, item in record.items.items() if item.get("errors")}
    if failed:
        lines += ["", "## Errors", ""] + [f"- `{key}`{f', {part}' if part else ''}: {' '.join(error.split())[:600]}"
                                          for key, errors in failed.items() for part, error in errors.items()]
    if record.left:
        lines += ["", "## Still to do", "", ", ".join(f"`{key}`" for key in record.left)]
    return "\n".join(lines) + "\n"


def advice(items: Mapping[str, dict]) -> list[str]:
    """Return one line for each choice: the value that "auto" should take for packed rows. No line before both values
    have run."""
    lines = []
    for choice in CHOICES:
        steps = {name: float(items[key]["row"]["step, s"].replace(",", "")) for name, key in choice.of.items()
                 if "row" in items.get(key, {})}
        if len(steps) < len(choice.of):
            continue
        (safe, _), (other, of_other) = choice.of.items()
        wrong = [key for key, item in items.items() if item["status"] != RIGHT
                 and (key == of_other or key.startswith(choice.compared))]
        best = safe if wrong else min(steps, key=steps.get)
        why = f"{other} is not right: {', '.join(wrong)}" if wrong else " and ".join(
            f"{name} {step:.4g} s a step" for name, step in steps.items())
        lines += ["", f"For packed rows `model.{choice.key} = \"auto\"` should take **{best}** here ({why})."]
    return lines


def _checks(items: Mapping[str, dict]) -> list[str]:
    """Return for each item the comparison with the largest error relative to its tolerance, or all comparisons that are
    wrong."""
    rows = []
    for key, item in items.items():
        compared = sorted(item.get("compared", {}).items(), key=lambda pair: -_excess(*pair[1]))
        shown = [pair for pair in compared if not pair[1][0] <= pair[1][1]] or compared[:1]
        worst = "; ".join(f"{what} {error:.2g} of {tolerance:.2g}" for what, (error, tolerance) in shown[:6])
        told = item.get("said", ""), item.get("seconds", "")
        rows.append((f"`{key.partition('/')[2]}`", item["status"], len(compared), worst, *told))
    return table(("item", "result", "comparisons", "worst error of its tolerance", "", "s"), rows)


def _excess(error: float, tolerance: float) -> float:
    return math.inf if math.isnan(error) else error / tolerance if tolerance else math.inf if error else 0.0


def _measured(items: Mapping[str, dict]) -> list[str]:
    """Return the tables, with a row for each item that has a `row`, and then the lines of the items."""
    lines, tables = [], {}
    for key, item in items.items():
        if "row" in item:
            tables.setdefault(tuple(item["row"]), []).append((f"`{key.partition('/')[2]}`", *item["row"].values()))
    for header, rows in tables.items():
        lines += [*table(("item", *header), rows), ""]
    for key, item in items.items():
        if item.get("lines"):
            lines += [f"### {key.partition('/')[2]}", "", *item["lines"], ""]
    return lines
