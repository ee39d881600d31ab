"""Finds the smallest change of a run's settings that makes a step fit into a GPU's memory, by the formulas."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshtrain import hardware
from meshtrain.config import ConfigError, problems
from meshtrain.design import Design, make, price_teacher
from meshtrain.cost.formulas import assumptions, attention_pairs, footprint
from meshtrain.cost.formulas.options import Options, StepOptions
from meshtrain.cost.formulas.rates import Rates
from meshtrain.hardware import Gpu
from meshtrain.names import REMAT
from meshtrain.shipped import rule_file
from meshtrain.training import state
from meshtrain.units import size

REPLICATING = ("ddp", "zero1", "zero2")     # shipped rules that leave weights or gradients whole on each device
MOST_DOUBLINGS = 5


def rates_of(gpu: Gpu) -> Rates:
    return Rates(gpu, assumptions.Assumptions(gpu.name))


def options_of(made: Design, gpu: Gpu | None, rated: Rates) -> Options:
    """Return a run's settings as input of the formulas. gpu: None for simulated devices."""
    run, schedule = made.run, made.choice and made.choice.schedule
    pipelined = {"schedule": schedule.name, "chunks": schedule.num_chunks} if schedule else {}
    return StepOptions.of(run, gpu.name if gpu else "", teacher=price_teacher(run, rated.assumed),
                          attended=attention_pairs.count(run, made.layout, rated.assumed),
                          **state.optimizer_bytes(made.model, run.optimizer, run.training.steps,
                                                  run.training.ema > 0), **pipelined)


def advise(made: Design, gpu: Gpu, total_bytes: int, names: Sequence[str]) -> str:
    """Return what to do about a step that does not fit: `remedy`, and the search for layouts. names: the words of the
    command line that are no options."""
    change, plan = remedy(made, gpu, total_bytes), " ".join(["python -m meshtrain.plan", *(names or ["RUN.toml"])])
    return (f"{change}; " * bool(change)
            + f"{plan} --gpus {made.mesh_spec.num_devices} --gpu {gpu.name} finds layouts that fit")


def remedy(made: Design, gpu: Gpu, total_bytes: int) -> str:
    """Return a text that names the smallest change of rules, remat and microbatches with which a step fits, or the
    smallest that also moves the moments to the host; "" if none does. total_bytes: memory of the compiled step on one
    GPU; the formulas' bytes are scaled up to them."""
    rated, usable = rates_of(gpu), hardware.usable_bytes(gpu)
    by_formula = footprint.memory(made.placed, options_of(made, gpu, rated))["total"]
    for keys, held in _changes(made, gpu, rated):
        if (needed := held * max(1.0, total_bytes / by_formula)) <= usable:
            return f"{' with '.join(f'{key}={value}' for key, value in keys.items())} fits: {size(needed)}, by formulas"
    return ""


def _cost(tried: tuple[bool, str, tuple[int, str], tuple[int, int]]) -> tuple:
    """Return the sort key of a change: those without copies of moments first, then fewer keys, then changes of rules,
    then the smaller step of each."""
    offload, rules, (level, _), (doublings, _) = tried
    return offload, bool(rules) + bool(level) + bool(doublings), not rules, level, doublings


def _changes(made: Design, gpu: Gpu, rated: Rates) -> Iterator[tuple[dict[str, object], int]]:
    """Yield (keys to change, bytes of a step with them by the formulas), the cheapest change (`_cost`) first."""
    run = made.run
    rule_files = {"": made}
    if Path(run.sharding.rules).stem in REPLICATING:
        try:
            rule_files["zero3"] = make(run.replace(sharding={"rules": str(rule_file("zero3"))}),
                                                  made.mesh_spec, "gpu", gpu)
        except ConfigError:
            pass        # the mesh or the model does not allow zero3
    remats = ["", *REMAT[REMAT.index(run.training.remat) + 1:]] if run.training.remat in REMAT else [""]
    counts = [run.training.microbatches * 2**k for k in range(MOST_DOUBLINGS + 1 if not made.choice else 1)]
    options = {(False, rules): options_of(design, gpu, rated) for rules, design in rule_files.items()}
    on_host = run.replace(optimizer={"offload": True})
    if not run.optimizer.offload and not problems(on_host):
        options |= {(True, rules): options_of(replace(design, run=on_host), gpu, rated)
                    for rules, design in rule_files.items()}
    tried = ((*key, *more) for key, more in itertools.product(
        options, itertools.product(enumerate(remats), enumerate(counts))))
    for offload, rules, (level, remat), (doublings, count) in sorted(tried, key=_cost):
        design = rule_files[rules]
        shards = design.layout.num_shards(design.layout.rules.mesh_axes("activations", "batch"))
        keys = ({"sharding.rules": rules} if rules else {}) | ({"training.remat": remat} if level else {}) | (
            {"training.microbatches": count} if doublings else {}) | ({"optimizer.offload": "true"} if offload else {})
        if keys and run.data.global_batch % (count * shards) == 0:
            changed = replace(options[offload, rules], remat=remat or run.training.remat, microbatches=count)
            yield keys, footprint.memory(design.placed, changed)["total"]
