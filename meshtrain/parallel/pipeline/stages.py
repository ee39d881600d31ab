"""The requirements of pipelines: layouts they refuse, rules they relax, and notes for the user."""
from __future__ import annotations

import dataclasses
import math

from meshtrain.pattern import LONGEST_PERIOD, leading, period, staged
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.rules import Rules


def padded(cfg, virtual_stages: int) -> int:
    """Number of layers in stages, padded with identity layers to equal stages of whole periods."""
    together = max(1, period(cfg)) * virtual_stages
    return -(-staged(cfg) // together) * together


def problems(run, loaded: Rules, sizes) -> list[str]:
    """Why this run cannot be pipelined, one message each, in the run file's terms; empty if it can."""
    num_stages, chunks, first = sizes["stage"], run.pipeline.chunks, leading(run.model)
    if num_stages == 1:
        return []
    if not period(run.model):
        return [f'mesh.stage={num_stages} needs layers that repeat with a period, and model.mixers='
                f'"{run.model.mixers}" with model.mlps="{run.model.mlps}" has none of up to {LONGEST_PERIOD} layers; '
                f'set mesh.stage to 1']
    num_layers, layers = staged(run.model), f"model.num_layers={run.model.num_layers}"
    layers += f", of which the first {first} lie in no stage," if first else ""
    faults = schedules.problems(schedule_name(run), num_stages, run.training.microbatches, chunks)
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
        faults += [f"{loaded.path} [{table}] {logical}: only layers and vocab can lie along 'stage'; drop it from the "
                   f"line"
                   for logical, axes in entries.items() if "stage" in axes and logical not in ("layers", "vocab")]
    split = {table: "stage" in loaded.mesh_axes(table, "vocab") for table in loaded.tables}
    if len(set(split.values())) > 1:
        without = [f"[{table}]" for table, on in split.items() if not on]
        faults.append(f"{loaded.path}: vocab lies along 'stage' in some tables and not in {', '.join(without)}; "
                      "name it in all four, or in none")
    return faults


def fit(run, loaded: Rules, sizes, vocab: int) -> tuple[Rules, list[str]]:
    """(the rules with `stage` removed where it does not divide, notes for the user). vocab: its padded size.

    Padding with identity layers happens inside the step: only the model's layers are stored, in order.
    """
    num_stages, num_layers, drop, said = sizes["stage"], staged(run.model), set(), []
    if num_stages == 1:
        return loaded, said
    splits = [math.prod(sizes[a] for a in table["vocab"]) for table in loaded.tables.values()
              if "stage" in table.get("vocab", ())]
    together = max(1, period(run.model))        # without a period `problems` refuses
    if num_layers % (together * num_stages):
        drop.add("layers")
        each = f" in periods of {together}" if together > 1 else ""
        said.append(f"pipeline: {num_layers} layers{each} do not divide over mesh.stage={num_stages}: outside the "
                    "pipeline's loop every stage keeps the states of all of them")
    if any(vocab % num_shards for num_shards in splits):
        drop.add("vocab")
        said.append(f"pipeline: the vocabulary of {vocab} (padded) does not divide over stage and tensor: embedding "
                    "and head are split over tensor only, and every stage repeats their work")
    without = lambda axes: tuple(axis for axis in axes if axis != "stage")
    tables = {name: {k: without(axes) if k in drop else axes for k, axes in table.items()}
              for name, table in loaded.tables.items()}
    return dataclasses.replace(loaded, tables=tables), said


def notes(run, schedule: schedules.Schedule) -> list[str]:
    """Costs of this schedule besides its bubble, if any."""
    num_stages, chunks, num_layers = schedule.num_stages, schedule.num_chunks, staged(run.model)
    said, extra = [], padded(run.model, num_stages * chunks) - num_layers
    if first := leading(run.model):
        idle = -schedule.num_microbatches % num_stages
        said.append(f"pipeline: the {first} layers before the stages: every stage has them whole, with their states, "
                    f"and takes one microbatch in {num_stages} through them before the first tick and back behind the "
                    f"last one" + (
                        f"; training.microbatches={schedule.num_microbatches} leave {idle} of {num_stages} stages idle "
                        f"in the last round, a multiple of {num_stages} none" if idle else ""))
    if extra:
        said.append(f"pipeline: {num_layers} layers over mesh.stage={num_stages} × pipeline.chunks={chunks} are filled "
                    f"up with {extra} that do nothing; they cost time like the others")
    if chunks % num_stages and num_stages % chunks:
        said.append(f"pipeline: neither of pipeline.chunks={chunks} and mesh.stage={num_stages} divides the other: "
                    f"once a step "
                     "every stage gathers the layers of all, as they lie outside of the loop, to pick its own")
    return said


def schedule_name(run) -> str:
    """The schedule to check; if "auto" finds any with these chunks, it finds this one."""
    if run.pipeline.schedule != "auto":
        return run.pipeline.schedule
    return "1f1b" if run.pipeline.chunks == 1 else "interleaved"
