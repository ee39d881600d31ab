"""The layers that stages get, and the schedule that a run file names."""
from __future__ import annotations

from meshtrain.config.sections import Model, Run
from meshtrain.pattern import count_staged, period


def count_padded(cfg: Model, virtual_stages: int) -> int:
    """Return the number of layers in stages, including the identity layers that fill equal stages of whole periods."""
    together = max(1, period(cfg)) * virtual_stages
    return -(-count_staged(cfg) // together) * together


def schedule_name(run: Run) -> str:
    """Return the schedule to check. For "auto" it is the schedule that `auto` can always choose with these chunks."""
    if run.pipeline.schedule != "auto":
        return run.pipeline.schedule
    return "1f1b" if run.pipeline.chunks == 1 else "interleaved"
