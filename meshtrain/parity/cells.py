"""Chooses layouts of a shrunk run that together cover every pair of choices: meshes, rule files, schedules, and so on.

A cell chooses one value for each factor. Pairs are covered greedily, so the first cells cover the most pairs. A pair of
two choices that both have an effect weighs more. Combinations that the program refuses are not cells.
"""
from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtrain import config, design, pattern
from meshtrain.config import Run
from meshtrain.model import transformer
from meshtrain.names import AXES
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding import rules
from meshtrain.shipped import find_file, locate_shipped, names
from meshtrain.training import objective

OFF = "none"
Cell = Mapping[str, str]
METHODS = ("ring", "gather", "ulysses")
# Mesh axis -> the factor that decides whether the axis is larger than 1.
SPLIT_BY = {"data": "data", "fsdp": "fsdp", "tensor": "tensor", "stage": "schedule", "context": "context"}
TRIES, MOST_AXES = 8, 3
USED = 4                         # weight of a pair of two choices that both have an effect

# Pairs of factors in which only "used or not" of one of them counts, since e.g. a rule file splits arrays independently
# of the schedule that computes them.
BY_WHETHER = {("rules", "schedule"), ("rules", "context"), ("rules", "dispatch"), ("schedule", "dispatch"),
              ("data", "remat"), ("fsdp", "remat"), ("tensor", "remat"), ("context", "remat")}
# Pairs of factors that are independent and need not be covered.
APART = {("rules", "remat"), ("rules", "microbatches")}


def factors(run: Run, rule_files: Sequence[str], num_devices: int) -> dict[str, tuple[str, ...]]:
    """Return the values that each factor may have in cells of this shrunk run. The first value of every factor but
    `rules` has no effect."""
    pipelined = objective.of_run(run).pipelined and not run.optimizer.qk_clip
    return {
        "rules": tuple(rule_files),
        "data": (OFF, "data"), "fsdp": (OFF, "fsdp"), "tensor": (OFF, "tensor"),
        "schedule": (OFF, *schedules.NAMES) if pipelined else (OFF,),
        "context": (OFF, *(METHODS if pattern.has(run.model, pattern.ATTENTION) else METHODS[:1])),
        "remat": ("none", "selective", "full", "offload"),
        "microbatches": ("1", "2", "4"),
        "dispatch": ("auto", "gather", "all_to_all") if run.model.num_experts else ("auto",),
        "longest": (OFF, *AXES) if num_devices >= 4 else (OFF,),        # the axis with four devices instead of two
    }  # fmt: skip


def run_of(run: Run, cell: Cell) -> Run:
    """Return the run with the choices of a cell."""
    sizes = {axis: (1 if cell[factor] == OFF else 4 if cell["longest"] == axis else 2)
             for axis, factor in SPLIT_BY.items()}
    interleaved = cell["schedule"] in schedules.INTERLEAVED
    return run.model_copy(update=dict(
        mesh=config.Mesh(**sizes), sharding=config.Sharding(rules=cell["rules"]),
        pipeline=config.Pipeline(schedule=cell["schedule"], chunks=1 + interleaved) if sizes["stage"] > 1 else
        config.Pipeline(),
        context=config.Context(method=cell["context"]) if sizes["context"] > 1 else config.Context(),
        training=run.training.model_copy(update=dict(microbatches=int(cell["microbatches"]), remat=cell["remat"])),
        experts=run.experts.model_copy(update=dict(dispatch=cell["dispatch"]))))


def settings(run: Run) -> dict[str, object]:
    """Return the keys of a run file that choose the run's layout, without those that have no effect."""
    values: dict[str, object] = {f"mesh.{axis}": n for axis in AXES if (n := getattr(run.mesh, axis)) > 1}
    values["sharding.rules"] = rules_name(run.sharding.rules)
    if run.mesh.stage > 1:
        values |= {"pipeline.schedule": run.pipeline.schedule, "pipeline.chunks": run.pipeline.chunks}
    if run.mesh.context > 1:
        values["context.method"] = run.context.method
    values |= {"training.microbatches": run.training.microbatches, "training.remat": run.training.remat}
    if run.experts.dispatch != "auto":
        values["experts.dispatch"] = run.experts.dispatch
    return values


def rules_name(path: str) -> str:
    """Return the name of a rule file for a run file: sharding_rules/NAME for a shipped one, else its path."""
    return f"sharding_rules/{Path(path).name}" if is_shipped(path) else path


def is_shipped(path: str) -> bool:
    return Path(path).resolve() == locate_shipped(f"sharding_rules/{Path(path).name}").resolve()


def title(run: Run) -> str:
    """Return the layout of a run as one line: `zero3 · data 2 × stage 2 · 1f1b · 2 microbatches`."""
    mesh, of = run.mesh, []
    of.append(" × ".join(f"{axis} {n}" for axis in AXES if (n := getattr(mesh, axis)) > 1) or "one device")
    of += [run.pipeline.schedule] if mesh.stage > 1 else []
    of += [run.context.method] if mesh.context > 1 else []
    of += [f"{run.training.microbatches} microbatches"] if run.training.microbatches > 1 else []
    of += [f"remat {run.training.remat}"] if run.training.remat != "none" else []
    of += [run.experts.dispatch] if run.experts.dispatch != "auto" else []
    return " · ".join([Path(run.sharding.rules).stem, *of])


def differing_rules(run: Run) -> list[str]:
    """Return the paths of the run's own rule file and of the shipped rule files that shard the run's arrays differently
    from all earlier files."""
    axes = [info.axes for info in transformer.of_run(run).parameters()]
    with config.user_errors():
        loaded = [rules.load(path) for path in dict.fromkeys([run.sharding.rules, *list_shipped_rules()])]
    return [one.path for one in distinct(loaded, axes)]


def list_shipped_rules() -> list[str]:
    return [str(find_file(f"sharding_rules/{name}.toml")) for name in names("sharding_rules")]


def distinct(loaded: Sequence[rules.Rules], weights: Sequence[tuple[str | None, ...]]) -> list[rules.Rules]:
    """Return the rule files that shard weights or activations differently from all earlier files. weights: the logical
    axes of each weight."""
    sizes, kept = dict.fromkeys(AXES, 2), dict[tuple, rules.Rules]()
    for one in loaded:
        layout = rules.Layout(one, sizes)
        splits = tuple(layout.spec(table, axes) for table in ("params", "grads", "optimizer") for axes in weights)
        kept.setdefault((splits, tuple(sorted(one.tables["activations"].items()))), one)
    return list(kept.values())


# ---- the cover -------------------------------------------------------------------------------------------------------


def cover(run: Run, found: Mapping[str, Sequence[str]], num_devices: int) -> list[Run]:
    """Return runs that cover every pair of choices that the program accepts, the run with the most weight first.

    found: the values of each factor, see `factors`.
    """
    table, made = _Choices(run, found, num_devices), []
    missing = {one for a, b in itertools.combinations(found, 2) for x in found[a] for y in found[b]
               if (one := pair(a, x, b, y))}
    missing = {one for one in missing if table.alone(one)}
    while missing:
        dearest = max(map(worth, missing))
        wanted = table.rng.choice(sorted((one for one in missing if worth(one) == dearest), key=repr))
        tried = [table.climb(wanted, missing) for _ in range(TRIES)]
        cell = max(tried, key=lambda cell: sum(map(worth, pairs(cell) & missing)))
        made.append(cell)
        missing -= pairs(cell)
    return [run_of(run, cell) for cell in made]


class _Choices:
    """Builds cells that contain a given pair of choices."""

    def __init__(self, run: Run, found: Mapping[str, Sequence[str]], num_devices: int):
        self.run, self.found, self.num_devices, self.rng = run, found, num_devices, random.Random(0)
        self.model = transformer.of_run(run)
        self.taken: dict[tuple, bool] = {}

    def alone(self, wanted: tuple) -> dict | None:
        """Return the simplest accepted cell with this pair of choices; None if the program accepts none."""
        fixed = self._choices(wanted)
        base = {name: values[0] for name, values in self.found.items()} | fixed
        axes = [{}, *({factor: self.found[factor][1]} for factor in SPLIT_BY.values() if len(self.found[factor]) > 1)]
        for more in axes:
            for count in self.found["microbatches"][::-1]:
                cell = base | more | {"microbatches": count} | fixed
                if self.possible(cell) and self.accepts(cell):
                    return cell
        return None

    def climb(self, wanted: tuple, missing: set) -> dict:
        """Return an accepted cell with this pair of choices that covers many missing pairs. It starts from `alone` and
        improves one choice at a time."""
        fixed, cell = self._choices(wanted), self.alone(wanted)
        assert cell is not None, "`cover` leaves out pairs that no accepted cell has"

        def gain(cell: dict) -> int:
            return sum(map(worth, pairs(cell) & missing))
        for name in self.rng.sample(list(cell), len(cell)) * 2:
            if name in fixed:
                continue
            others = [{**cell, name: value} for value in self.rng.sample(self.found[name], len(self.found[name]))]
            better = sorted((other for other in others if gain(other) > gain(cell)), key=gain, reverse=True)
            cell = next((other for other in better if self.possible(other) and self.accepts(other)), cell)
        return cell

    def possible(self, cell: Cell) -> bool:
        """Return whether a cell has one to three mesh axes and needs no more than the available devices."""
        axes = [axis for axis, factor in SPLIT_BY.items() if cell[factor] != OFF]
        return (1 <= len(axes) <= MOST_AXES and 2 ** (len(axes) + (cell["longest"] != OFF)) <= self.num_devices
                and cell["longest"] in (OFF, *axes))

    def accepts(self, cell: Cell) -> bool:
        """Return whether the program accepts a cell."""
        key = tuple(cell.values())
        if key not in self.taken:
            self.taken[key] = not design.refusals(run_of(self.run, cell), "cpu", None, self.model)
        return self.taken[key]

    def _choices(self, wanted: tuple) -> dict[str, str]:
        """Return a pair of `pair` as factor -> value. "True" becomes a value that has an effect, "False" one that has
        none."""
        def choice(name: str, value: str) -> str:
            return value if value in self.found[name] else self.found[name][value == "True"]
        return {name: choice(name, value) for name, value in wanted}


def pair(a: str, x: str, b: str, y: str) -> tuple:
    """Return two choices (factor a = x, factor b = y) as the cover counts them; () if the pair need not be covered."""
    if (a, b) in BY_WHETHER:
        x, y = (x, str(y != OFF and y != "auto")) if a in ("rules", "schedule") else (str(x != OFF), y)
    if b == "longest" and (x == OFF or SPLIT_BY.get(y) != a):      # four devices matter only to the axis that has them
        return ()
    return () if (a, b) in APART else ((a, x), (b, y))


def pairs(cell: Cell) -> set[tuple]:
    return {pair(*one, *other) for one, other in itertools.combinations(cell.items(), 2)} - {()}


def worth(one: tuple) -> int:
    """Return the weight of a pair in the cover: USED if both choices have an effect, else 1."""
    return 1 if any(value in (OFF, "auto", "False", "1") for _, value in one) else USED
