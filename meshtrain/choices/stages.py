"""Chooses the rules of a pipeline's layout, checks that the run can be pipelined, and describes the costs of stages."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.choices.setting import Choice
from meshtrain.config.sections import Run
from meshtrain.parallel.pipeline import schedules
from meshtrain.pattern import LONGEST_PERIOD, count_padded, count_staged, leading, period
from meshtrain.sharding.rules import Rules
from meshtrain.units import amount


def problems(run: Run, loaded: Rules, sizes: Mapping[str, int]) -> list[str]:
    """Return the reasons why this run cannot be pipelined, in the run file's terms; empty if it can."""
    num_stages, chunks, first = sizes["stage"], run.pipeline.chunks, leading(run.model)
    if num_stages == 1:
        return []
    if not period(run.model):
        return [f"mesh.stage={num_stages} needs layers that repeat with a period of up to {LONGEST_PERIOD}, but those "
                f'of model.mixers="{run.model.mixers}" with model.mlps="{run.model.mlps}" do not; set mesh.stage to 1']
    num_layers, layers = count_staged(run.model), f"model.num_layers={run.model.num_layers}"
    layers += f", of which the first {first} are in no stage," if first else ""
    # "auto" can always choose these two
    name = ("1f1b" if chunks == 1 else "interleaved") if run.pipeline.schedule == "auto" else run.pipeline.schedule
    faults = schedules.problems(name, num_stages, run.training.microbatches, chunks)
    together = period(run.model)
    most = max(1, -(-num_layers // (num_stages * together)))
    if chunks > most:
        faults.append(f"pipeline.chunks={chunks} cuts {layers} on mesh.stage={num_stages} into chunks without a "
                      f"layer; use at most {most}")
    if run.training.remat == "offload":
        faults.append(f'training.remat="offload" cannot be combined with mesh.stage={num_stages}: a pipeline '
                      f'keeps activations on the device; use training.remat="full"')
    missing = [f"[{table}]" for table in ("params", "grads", "optimizer")
               if loaded.mesh_axes(table, "layers") != ("stage",)]
    if missing:
        faults.append(f'mesh.stage={num_stages} needs layers = "stage" in {", ".join(missing)} of {loaded.path}; add '
                      'the line (the shipped rule files have it), or set mesh.stage to 1')
    for table, entries in loaded.tables.items():
        faults += [f"{loaded.path} [{table}] {logical}: only layers and vocab can be sharded over 'stage'; remove it "
                   f"from the line"
                   for logical, axes in entries.items() if "stage" in axes and logical not in ("layers", "vocab")]
    split = {table: "stage" in loaded.mesh_axes(table, "vocab") for table in loaded.tables}
    if len(set(split.values())) > 1:
        without = [f"[{table}]" for table, on in split.items() if not on]
        faults.append(f"{loaded.path}: vocab is sharded over 'stage' in some tables and not in "
                      f"{', '.join(without)}; name 'stage' in all four tables, or in none")
    return faults


def choose(run: Run, loaded: Rules, sizes: Mapping[str, int], vocab: int) -> Choice[Rules]:
    """Choose the rules without `stage` where it does not divide a dim. vocab: the padded vocabulary size.

    Identity layers are added inside the step. Only the model's own layers are stored, in their order.
    """
    num_stages, num_layers, drop, lines = sizes["stage"], count_staged(run.model), set(), []
    if num_stages == 1:
        return Choice(loaded)
    splits = [math.prod(sizes[a] for a in table["vocab"]) for table in loaded.tables.values()
              if "stage" in table.get("vocab", ())]
    together = max(1, period(run.model))        # `problems` refuses a model without a period
    if num_layers % (together * num_stages):
        drop.add("layers")
        each = f" in periods of {together}" if together > 1 else ""
        lines.append(f"pipeline: {num_layers} layers{each} do not divide over mesh.stage={num_stages}: outside the "
                    "pipeline's loop every stage keeps the states of all of them")
    if any(vocab % num_shards for num_shards in splits):
        drop.add("vocab")
        lines.append(f"pipeline: the vocabulary of {vocab} (padded) does not divide over stage and tensor: embedding "
                    "and head are split over tensor only, and every stage repeats their work")
    tables = {name: {logical: tuple(axis for axis in axes if axis != "stage" or logical not in drop)
                     for logical, axes in table.items()}
              for name, table in loaded.tables.items()}
    return Choice(dataclasses.replace(loaded, tables=tables), tuple(lines))


def costs(run: Run, schedule: schedules.Schedule) -> tuple[str, ...]:
    """Return lines for the user on the costs of this schedule besides its bubble."""
    num_stages, chunks, num_layers = schedule.num_stages, schedule.num_chunks, count_staged(run.model)
    lines, extra = [], count_padded(run.model, num_stages * chunks) - num_layers
    if first := leading(run.model):
        idle = -schedule.num_microbatches % num_stages
        lines.append(f"pipeline: every stage holds all weights and states of the {amount(first, 'layer')} before the "
                     f"stages, and computes this part for one microbatch in {num_stages}, forward before the first "
                     "tick and backward after the last" + (
                        f"; with training.microbatches={schedule.num_microbatches}, {idle} of {num_stages} stages are "
                        f"idle in the last round; use a multiple of {num_stages} to avoid this" if idle else ""))
    if extra:
        lines.append(f"pipeline: {num_layers} layers over mesh.stage={num_stages} × pipeline.chunks={chunks} are "
                    f"padded with {amount(extra, 'identity layer')}; padding takes as much time as other layers")
    if chunks % num_stages and num_stages % chunks:
        lines.append(f"pipeline: neither of pipeline.chunks={chunks} and mesh.stage={num_stages} divides the other: "
                    "once a step every stage gathers the layers of all stages and selects its own")
    return tuple(lines)
