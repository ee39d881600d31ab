"""Finds what a rule file leaves out: mesh axes that shard nothing, and logical axes that no table names.

Runs the checks of rule files (`rules.problems`, `rules.unsplit`) for each mesh axis alone, so that the message names
the missing line. What looks intended becomes a note.
"""
from __future__ import annotations

from meshtrain import config, design
from meshtrain.config import Run
from meshtrain.model import transformer
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.training import objective
from meshtrain.shipped import locate_shipped, rule_file


def check(small: Run, path: str) -> tuple[list[str], list[str]]:
    """Check a rule file for a shrunk run. Return (findings, notes). Raises: ConfigError if the file cannot be read."""
    with config.user_errors():
        loaded = rules.load(rule_file(path), "--rules")
    model = transformer.of_run(small)
    used = {axis for table in loaded.tables.values() for axes in table.values() for axis in axes}
    own = {axis for axis in AXES if getattr(small.mesh, axis) > 1}
    findings, notes = [], []
    for axis in AXES:
        if axis not in used | own:
            notes.append(f"no table of {path} names {axis}: layouts with this mesh axis were not tested")
            continue
        sizes = dict.fromkeys(AXES, 1) | {axis: 2}
        run = small.replace(mesh=sizes, sharding={"rules": path})
        run = run.model_copy(update=dict(pipeline=config.Pipeline(), context=config.Context()))
        faults = design.lay_out(run, sizes, loaded, model).faults
        if axis == "stage" and not objective.of_run(small).pipelined:
            continue
        _, partly = rules.unsplit(rules.Layout(loaded, sizes), model.products())
        findings += [*faults, *(note.removeprefix("layout: ") for note in partly)]
    findings += _find_unnamed(small, loaded, model, used)
    return list(dict.fromkeys(findings)), notes


def _find_unnamed(small: Run, loaded: rules.Rules, model, used: set[str]) -> list[str]:
    """Return a line for each logical axis of the model that no table names although ddp shards it. Every shipped rule
    file extends ddp."""
    usual = rules.load(locate_shipped("sharding_rules/ddp.toml"))
    tensors = design.tensors(small, model, rules.Layout(loaded, dict.fromkeys(AXES, 1)))
    lines = []
    for logical in dict.fromkeys(name for tensor in tensors for name in tensor.axes if name):
        named = any(loaded.mesh_axes(table, logical) for table in rules.TABLES)
        tables = [table for table in rules.TABLES if logical in usual.tables[table] and (
            table in ("params", "activations"))]
        axes = [axis for table in tables for axis in usual.tables[table][logical] if axis in used]
        if axes and not named:
            of = next(tensor for tensor in tensors if logical in tensor.axes)
            lines.append(f"{loaded.path}: no table names {logical!r}, which {of.name} has: it is whole on every device "
                         f"along {' and '.join(dict.fromkeys(axes))}; write {logical} in "
                         f"{' and '.join(f'[{table}]' for table in tables)}")
    return lines
