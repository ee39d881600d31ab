"""A pipeline as the run file asks for it: its schedule, what stands against it, and what does not divide over it.

Checked before anything is compiled; told in the words of the run file.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from meshtrain.config import Run
from meshtrain.cost import simulate
from meshtrain.layout.mesh import MeshPlan
from meshtrain.layout.rules import Rules, Tensor
from meshtrain.model import params, transformer
from meshtrain.parallel import schedule_check


def choose(run: Run, plan: MeshPlan, rows: Sequence[params.ParamInfo], loaded: Rules, gpu=None):
    """(faults, choice): all that stands against running this pipeline, and its schedule, a `simulate.Choice`; None: no such.

    "auto" weighs time alone, by modelled costs: every process and every restart chooses the same.
    gpu: its entry of the hardware table, or None.
    """
    sizes, num_layers = plan.sizes, run.model.num_layers
    residual = loaded.mesh_axes("activations", "residual_seq")
    costs = simulate.modelled(run, rows, plan, gpu, residual_ways=sizes["tensor"] if "tensor" in residual else 1)
    faults, choice = _rule_problems(loaded, sizes["stage"]), None
    if run.pipeline.schedule == "zb_h1":
        faults.append('pipeline.schedule="zb_h1" is not available yet; use "zero_bubble", or "interleaved_zero_bubble" '
                      "with pipeline.chunks=2, which has the same bubble")
    try:
        choice = simulate.of_run(run, costs, sizes["stage"])
        schedule_check.check(choice.table)
    except ValueError as error:
        return faults + str(error).splitlines(), None
    chunks = choice.table.num_chunks
    pieces = sizes["stage"] * chunks
    if num_layers % pieces and run.pipeline.uneven == "refuse":
        faults.append(f"model.num_layers={num_layers} cannot be split over mesh.stage={sizes['stage']} × pipeline.chunks="
                      f"{chunks}; use a multiple of {pieces}, e.g. {-(-num_layers // pieces) * pieces}, or "
                      'pipeline.uneven="pad"')
    return faults, choice


def _rule_problems(loaded: Rules, num_stages: int) -> list[str]:
    faults = [f'{loaded.path} [{table}]: mesh.stage={num_stages} needs layers = "stage" there; add the line, or take one of '
              f"the rule files *pipeline.toml"
              for table in ("params", "grads", "optimizer") if loaded.mesh_axes(table, "layers") != ("stage",)]
    for table, entries in loaded.tables.items():
        faults += [f"{loaded.path} [{table}] {logical}: only layers and vocab can lie along 'stage'; drop it from the line"
                   for logical, axes in entries.items() if "stage" in axes and logical not in ("layers", "vocab")]
    split = {table: "stage" in loaded.mesh_axes(table, "vocab") for table in loaded.tables}
    if len(set(split.values())) > 1:
        without = ", ".join(f"[{table}]" for table, on in split.items() if not on)
        faults.append(f"{loaded.path}: vocab lies along 'stage' in some tables and not in {without}; name it in all four, or "
                      "in none")
    return faults


def fit(run: Run, loaded: Rules, sizes: Mapping[str, int], choice: simulate.Choice, placed: list[Tensor]):
    """(rules without `stage` where it does not divide, tensors for the check of the file's own rules, notes).

    Filling up with layers that do nothing happens inside the step: what is stored are the model's layers, in order.
    """
    num_stages, chunks, num_layers = sizes["stage"], choice.table.num_chunks, run.model.num_layers
    vocab, ways = transformer.padded_vocab(run.model), math.prod(sizes[a] for a in loaded.mesh_axes("params", "vocab"))
    drop = {}
    notes = [f"pipeline: {choice.why}"] if run.pipeline.schedule == "auto" else []
    if extra := -num_layers % (num_stages * chunks):
        notes.append(f"pipeline: {num_layers} layers over mesh.stage={num_stages} × pipeline.chunks={chunks} are filled up with "
                     f"{extra} that do nothing; they cost time like the others")
    if num_layers % num_stages:
        drop["layers"] = num_stages
        notes.append(f"pipeline: {num_layers} layers do not divide over mesh.stage={num_stages}: outside the pipeline's loop "
                     "every stage keeps the states of all of them")
    if vocab % ways and "stage" in loaded.mesh_axes("params", "vocab"):
        drop["vocab"] = ways
        notes.append(f"pipeline: the vocabulary of {vocab} (padded) does not divide over stage and tensor: embedding and head "
                     "are split over tensor only, and every stage repeats their work")
    without = lambda axes: tuple(axis for axis in axes if axis != "stage")
    tables = {name: {k: without(axes) if k in drop else axes for k, axes in table.items()}
              for name, table in loaded.tables.items()}
    round_up = lambda n, logical: -(-n // drop[logical]) * drop[logical] if logical in drop else n
    placed = [dataclasses.replace(t, shape=tuple(map(round_up, t.shape, t.axes))) for t in placed]
    return dataclasses.replace(loaded, tables=tables), placed, notes
