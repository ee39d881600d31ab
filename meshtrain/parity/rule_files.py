"""Finds what a rule file leaves out: mesh axes that split nothing, and logical axes that no table names.

The linter's messages (`rules.problems`, `rules.unsplit`) for each mesh axis by itself, so that a line that is missing
is named where it is missing; and what it takes for intended.
"""
from __future__ import annotations

from meshtrain import assembly, config
from meshtrain.config import Run
from meshtrain.model import transformer
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.shipped import rule_file, shipped


def checked(small: Run, path: str) -> tuple[list[str], list[str]]:
    """(findings, notes) of a rule file beside a shrunk run. Raises: ConfigError for a file that cannot be read."""
    with config.user_errors():
        loaded = rules.load(rule_file(path), "--rules")
    model = transformer.build(small.model, small.lora)
    used = {axis for table in loaded.tables.values() for axes in table.values() for axis in axes}
    own = {axis for axis in AXES if getattr(small.mesh, axis) > 1}
    findings, notes = [], []
    for axis in AXES:
        if axis not in used | own:
            notes.append(f"{path} names {axis} in no table: no layout with it is a cell")
            continue
        sizes = dict.fromkeys(AXES, 1) | {axis: 2}
        run = small.replaced(mesh=sizes, sharding={"rules": path})
        run = run.model_copy(update=dict(pipeline=config.Pipeline(), context=config.Context()))
        _, _, faults = assembly.lay_out(run, sizes, loaded, model)
        if axis == "stage" and small.training.objective != "next_token":
            continue
        _, partly = rules.unsplit(rules.Layout(loaded, sizes), model.products())
        findings += [*faults, *(note.removeprefix("layout: ") for note in partly)]
    findings += _unnamed(small, loaded, model, used)
    return list(dict.fromkeys(findings)), notes


def _unnamed(small: Run, loaded: rules.Rules, model, used: set[str]) -> list[str]:
    """Logical axes of the model that no table names, and that ddp, which every shipped file extends, splits."""
    usual = rules.load(shipped("sharding_rules/ddp.toml"))
    tensors = assembly.tensors(small, model, rules.Layout(loaded, dict.fromkeys(AXES, 1)))
    found = []
    for logical in dict.fromkeys(name for tensor in tensors for name in tensor.axes if name):
        named = any(loaded.mesh_axes(table, logical) for table in rules.TABLES)
        tables = [table for table in rules.TABLES if logical in usual.tables[table] and (
            table in ("params", "activations"))]
        axes = [axis for table in tables for axis in usual.tables[table][logical] if axis in used]
        if axes and not named:
            of = next(tensor for tensor in tensors if logical in tensor.axes)
            found.append(f"{loaded.path}: no table names {logical!r}, which {of.name} has: it is whole on every device "
                         f"along {' and '.join(dict.fromkeys(axes))}; write {logical} in "
                         f"{' and '.join(f'[{table}]' for table in tables)}")
    return found
