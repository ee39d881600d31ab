"""The mesh and the rule file of a run that names neither: all devices on fsdp, by zero3.

That holds on GPUs, also on those of a topology, and on simulated devices, which stand for them: a run that is tried on
them is the run of the pod. On one device nothing is split, and the run keeps its rules.
"""
from __future__ import annotations

from pathlib import Path

from meshtrain.config.sections import Run, filled
from meshtrain.names import AXES
from meshtrain.shipped import rule_file

RULES = "zero3"


def names_axis(run: Run) -> bool:
    """Whether the run gives the size of an axis of the mesh."""
    return any(axis in run.mesh.model_fields_set for axis in AXES)


def on_devices(run: Run, num_devices: int) -> Run:
    """The run with the layout that it leaves open."""
    if names_axis(run) or run.mesh.fsdp != -1:
        return run
    mesh, sharding = filled(run.mesh.model_copy(), fsdp=num_devices), run.sharding
    if num_devices > 1 and "rules" not in sharding.model_fields_set:
        sharding = filled(sharding.model_copy(), rules=str(rule_file(RULES)))
    return run.model_copy(update={"mesh": mesh, "sharding": sharding})


def notes(run: Run) -> list[str]:
    """The line that tells what `on_devices` has chosen."""
    if names_axis(run) or run.mesh.fsdp <= 1:
        return []
    if "rules" in run.sharding.model_fields_set:
        return [f"no axis of [mesh] is given: mesh.fsdp={run.mesh.fsdp}"]
    return [f"no axis of [mesh] and no sharding.rules are given: mesh.fsdp={run.mesh.fsdp}, "
            f"sharding.rules={Path(run.sharding.rules).stem}"]
