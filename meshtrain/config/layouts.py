"""The mesh and the rule file of a run that sets neither: all devices on fsdp, with the rules zero3.

This applies to GPUs, to the GPUs of a topology, and to simulated devices, so that a run on simulated devices has the
same layout as on the pod. On one device nothing is sharded, and the run keeps its rules.
"""
from __future__ import annotations

from pathlib import Path

from meshtrain.config.sections import Run, fill
from meshtrain.names import AXES
from meshtrain.shipped import rule_file

RULES = "zero3"


def names_axis(run: Run) -> bool:
    """Return whether the run sets the size of a mesh axis."""
    return any(axis in run.mesh.model_fields_set for axis in AXES)


def on_devices(run: Run, num_devices: int) -> Run:
    """Return the run with the mesh and the rules that it does not set."""
    if names_axis(run) or run.mesh.fsdp != -1:
        return run
    mesh, sharding = fill(run.mesh.model_copy(), fsdp=num_devices), run.sharding
    if num_devices > 1 and "rules" not in sharding.model_fields_set:
        sharding = fill(sharding.model_copy(), rules=str(rule_file(RULES)))
    return run.model_copy(update={"mesh": mesh, "sharding": sharding})


def notes(run: Run) -> list[str]:
    """Return the line that reports the choice of `on_devices`, or reports default rules that shard nothing over fsdp;
    empty in all other cases."""
    if names_axis(run):
        if run.mesh.fsdp == 1 or "rules" in run.sharding.model_fields_set:
            return []
        return [f"no sharding.rules are given: {Path(run.sharding.rules).stem} splits only the batch over mesh.fsdp; "
                f'sharding.rules="{RULES}" also shards weights, gradients and optimizer state']
    if run.mesh.fsdp <= 1:
        return []
    if "rules" in run.sharding.model_fields_set:
        return [f"no axis of [mesh] is given: mesh.fsdp={run.mesh.fsdp}"]
    return [f"no axis of [mesh] and no sharding.rules are given: mesh.fsdp={run.mesh.fsdp}, "
            f"sharding.rules={Path(run.sharding.rules).stem}"]
