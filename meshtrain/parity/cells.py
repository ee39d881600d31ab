"""Layouts of a shrunk run that together hold every pair of choices: meshes, rule files, schedules, context methods, ...

A cell chooses a value of each factor. The cover is greedy, so the first cells hold the most pairs, and of these the
pairs that are both used weigh most. What the program refuses is no cell.
"""
from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtrain import config, pattern
from meshtrain.config import Run
from meshtrain.model import transformer
from meshtrain.names import AXES
from meshtrain.parallel.pipeline import schedules
from meshtrain.parity import compare
from meshtrain.sharding import rules
from meshtrain.shipped import found as found_file
from meshtrain.shipped import names, shipped

OFF = "none"
Cell = Mapping[str, str]
METHODS = ("ring", "gather", "ulysses")
# Mesh axis: the factor that splits it.
SPLIT_BY = {"data": "data", "fsdp": "fsdp", "tensor": "tensor", "stage": "schedule", "context": "context"}
TRIES, COMPLETIONS, MOST_AXES = 12, 40, 3
USED = 4                        # weight of a pair of two choices that both do something

# Beside the first the second counts only by whether it is used: a rule file splits arrays, however they are computed.
BY_WHETHER = {("rules", "schedule"), ("rules", "context"), ("rules", "dispatch"), ("schedule", "dispatch"),
              ("data", "remat"), ("fsdp", "remat"), ("tensor", "remat"), ("context", "remat")}
# Not counted together.
APART = {("rules", "remat"), ("rules", "microbatches")}


def factors(run: Run, rule_files: Sequence[str], num_devices: int) -> dict[str, tuple[str, ...]]:
    """The values that each factor may have in cells of this shrunk run; the first does nothing."""
    chunked = run.training.objective != "next_token" or run.optimizer.qk_clip > 0      # no pipelines
    found = {
        "rules": tuple(rule_files),
        "data": (OFF, "data"), "fsdp": (OFF, "fsdp"), "tensor": (OFF, "tensor"),
        "schedule": (OFF,) if chunked else (OFF, *schedules.NAMES),
        "context": (OFF, *(METHODS if pattern.share(run.model, pattern.ATTENTION) else METHODS[:1])),
        "remat": ("none", "selective", "full", "offload"),
        "microbatches": ("1", "2", "4"),
        "dispatch": ("auto", "gather", "all_to_all") if run.model.num_experts else ("auto",),
        "longest": (OFF, *AXES) if num_devices >= 4 else (OFF,),        # the axis of four devices, not two
    }  # fmt: skip
    return found


def run_of(run: Run, cell: Cell) -> Run:
    """The run of a cell."""
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
    """The keys of a run that choose its layout, those that do something."""
    found: dict[str, object] = {f"mesh.{axis}": n for axis in AXES if (n := getattr(run.mesh, axis)) > 1}
    found["sharding.rules"] = named_rules(run.sharding.rules)
    if run.mesh.stage > 1:
        found |= {"pipeline.schedule": run.pipeline.schedule, "pipeline.chunks": run.pipeline.chunks}
    if run.mesh.context > 1:
        found["context.method"] = run.context.method
    found |= {"training.microbatches": run.training.microbatches, "training.remat": run.training.remat}
    if run.experts.dispatch != "auto":
        found["experts.dispatch"] = run.experts.dispatch
    return found


def named_rules(path: str) -> str:
    """A shipped rule file as every directory finds it, another as it is."""
    name = f"sharding_rules/{Path(path).name}"
    return name if Path(path).resolve() == shipped(name).resolve() else path


def title(run: Run) -> str:
    """A cell in one line: `zero3 · data 2 × stage 2 · 1f1b · 2 microbatches`."""
    mesh, of = run.mesh, []
    of.append(" × ".join(f"{axis} {n}" for axis in AXES if (n := getattr(mesh, axis)) > 1) or "one device")
    of += [run.pipeline.schedule] if mesh.stage > 1 else []
    of += [run.context.method] if mesh.context > 1 else []
    of += [f"{run.training.microbatches} microbatches"] if run.training.microbatches > 1 else []
    of += [f"remat {run.training.remat}"] if run.training.remat != "none" else []
    of += [run.experts.dispatch] if run.experts.dispatch != "auto" else []
    return " · ".join([Path(run.sharding.rules).stem, *of])


def differing_rules(run: Run) -> list[str]:
    """The run's own rule file and the shipped ones that split its arrays otherwise than those before them."""
    infos = transformer.build(run.model, run.lora).parameters()
    sizes, seen, kept = {axis: 2 for axis in AXES}, set(), []
    every = [str(found_file(f"sharding_rules/{name}.toml")) for name in names("sharding_rules")]
    for path in dict.fromkeys([run.sharding.rules, *every]):
        with config.user_errors():
            loaded = rules.load(path)
        layout = rules.Layout(loaded, sizes)
        splits = tuple(layout.spec(table, info.axes) for table in ("params", "grads", "optimizer") for info in infos)
        acts = tuple(sorted((name, axes) for name, axes in loaded.tables["activations"].items()))
        if (splits, acts) not in seen:
            seen.add((splits, acts))
            kept.append(path)
    return kept


# ---- the cover -------------------------------------------------------------------------------------------------------


def cover(run: Run, found: Mapping[str, Sequence[str]], num_devices: int) -> list[Run]:
    """The runs of cells that hold every pair of choices that the program takes, the most valuable first."""
    rng, made = random.Random(0), []
    names_, taken = list(found), {}
    missing = {pair(a, x, b, y) for a, b in itertools.combinations(names_, 2) for x in found[a] for y in found[b]}
    missing -= {()}

    def possible(cell: dict) -> bool:
        axes = [axis for axis, factor in SPLIT_BY.items() if cell[factor] != OFF]
        devices = 2 ** (len(axes) + (cell["longest"] != OFF))
        return (1 <= len(axes) <= MOST_AXES and devices <= num_devices
                and (cell["longest"] == OFF or cell["longest"] in axes))

    def accepted(cell: dict) -> bool:
        key = tuple(cell.values())
        if key not in taken:
            try:
                compare.accepted(run_of(run, cell))
                taken[key] = True
            except config.ConfigError:
                taken[key] = False
        return taken[key]

    def gain(cell: dict) -> int:
        return sum(worth(one) for one in pairs(cell) & missing) if possible(cell) else -1

    def climbed(wanted: tuple) -> dict:
        """A random cell with these choices, improved a choice at a time."""
        fixed = dict(wanted)
        cell = {name: fixed.get(name) or rng.choice(found[name]) for name in names_}
        if not possible(cell):
            free = [name for name in (*SPLIT_BY.values(), "longest") if name not in fixed]
            cell |= {name: OFF for name in free}
            rng.shuffle(free)
            while not possible(cell) and free:
                name = free.pop()
                if name != "longest" and len(found[name]) > 1:
                    cell[name] = rng.choice(found[name][1:])
        for name in rng.sample(names_, len(names_)) * 2:
            if name not in fixed:
                cell = max(({**cell, name: value} for value in found[name]), key=gain)
        return cell

    while missing:
        tried = sorted((climbed(()) for _ in range(TRIES)), key=gain, reverse=True)
        best = next((cell for cell in tried if gain(cell) > 0 and accepted(cell)), None)
        if best is None or gain(best) < 3 * USED:       # what is left is found pair by pair
            wanted = min(missing, key=repr)
            chosen = _choices(wanted, found)
            tried = sorted((climbed(chosen) for _ in range(COMPLETIONS)), key=gain, reverse=True)
            best = next((cell for cell in tried if gain(cell) > 0 and accepted(cell)), None)
            if best is None or wanted not in pairs(best):
                missing.discard(wanted)
                if best is None:
                    continue
        made.append(run_of(run, best))
        missing -= pairs(best)
    return made


def _choices(wanted: tuple, found: Mapping[str, Sequence[str]]) -> tuple:
    """A pair of `pair` as choices: a used one for True."""
    return tuple((name, value if value in found[name] else found[name][value == "True"]) for name, value in wanted)


def pair(a: str, x: str, b: str, y: str) -> tuple:
    """Two choices as the cover counts them; () where they are not."""
    if (a, b) in BY_WHETHER:
        x, y = (x, str(y != OFF and y != "auto")) if a in ("rules", "schedule") else (str(x != OFF), y)
    if b == "longest" and (x == OFF or SPLIT_BY.get(y) != a):      # four devices matter to what is split over them
        return ()
    return () if (a, b) in APART else ((a, x), (b, y))


def pairs(cell: Cell) -> set[tuple]:
    return {pair(*one, *other) for one, other in itertools.combinations(cell.items(), 2)} - {()}


def worth(one: tuple) -> int:
    """Of a pair of choices."""
    return 1 if any(value in (OFF, "auto", "False", "1") for _, value in one) else USED
