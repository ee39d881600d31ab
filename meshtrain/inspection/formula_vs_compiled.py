"""Compares the closed formulas of an assembled run's step with its compiled program.

The formulas describe programs for GPUs; on simulated CPU devices XLA chooses other collectives. 40 layouts compiled for
GPUs stay within the tolerances. The bytes of weights, gradients and optimizer state are exact; those of temporaries
depend on XLA's schedule.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtrain import hardware
from meshtrain.assembly import Assembly
from meshtrain.cost.formulas import flops, footprint, traffic
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.program import audit, sources
from meshtrain.inspection import expect
from meshtrain.units import size

TOLERANCE = {"params": .001, "grads": .001, "optimizer": .001, "total": .1}     # of memory
WORKSPACE = 2**25           # bytes by which the total may also differ: cuBLAS's workspace
TRAFFIC, FLOPS = .02, .01
SMALL = .002                # of all bytes sent: norms, biases and statistics of the loss, which no formula counts


@dataclasses.dataclass(frozen=True)
class Formulas:
    """Costs of a step on one device by the formulas: bytes by kind, collectives as in `audit.summarize`, and FLOPs of
    matmuls without attention and recurrences."""
    memory_bytes: Mapping[str, int]
    collectives: list[dict]
    matmul_flops: int


def of(made: Assembly, ruled: Mapping[str, int]) -> Formulas | None:
    """Return the costs of a run's step by the formulas; None for float8 matmuls, which they do not cover. ruled: bytes
    by the rules (`memory.formula`)."""
    run, schedule = made.run, made.choice and made.choice.schedule
    if run.model.matmul_dtype == "float8":
        return None
    gpu = hardware.from_device_kind(made.mesh.devices.flat[0].device_kind)
    pipelined = dict(schedule=schedule.name, chunks=schedule.num_chunks) if schedule else {}
    options = Options.of(run, gpu.name if gpu else "", **pipelined)
    placed = made.placed
    lives = footprint.memory(placed, options)["activations"]
    grads = ruled["loop_grads"] if schedule else ruled["grads"]
    held = {**ruled, "activations": lives, "total": ruled["params"] + grads + ruled["optimizer"] + lives}
    sizes = made.mesh_spec.sizes
    return Formulas(held, traffic.summarize(traffic.of(placed, options), sizes),
                    round(flops.count_executed(placed, options)))


def matmul_flops(program: audit.ProgramAudit) -> int:
    """Return the matmul FLOPs of a compiled step, without those of attention and recurrences, which kernels compute in
    other programs."""
    return sum(dot.flops for dot in program.dots if not sources.scope_of(dot.source))


def differences(made: Assembly, formulas: Formulas, held: Mapping[str, int | None],
                program: audit.ProgramAudit) -> list[str]:
    """Return one line for each number beyond its tolerance, and for each collective without a formula, with the
    parameters that it moves. held: bytes of the compiled step by kind (`memory.measure`)."""
    lines = []
    for kind, tolerance in TOLERANCE.items():
        before = formulas.memory_bytes["loop_grads" if kind == "grads" and made.choice else kind]
        beyond = tolerance * (held[kind] or 0) + (WORKSPACE if kind == "total" else 0)
        if (compiled_bytes := held[kind]) is not None and abs(compiled_bytes - before) > beyond:
            lines.append(f"memory, {kind}: {_than(compiled_bytes, before)}")
    compiled, priced = map(audit.by_kind, (audit.summarize(program.collectives), formulas.collectives))
    least = SMALL * sum(row["bytes"] for row in compiled.values())
    for key in sorted({*compiled, *priced}, key=lambda key: (key not in compiled, key)):
        kind, *axes, dtype = key
        after, before = (rows[key]["bytes"] if key in rows else 0 for rows in (compiled, priced))
        if max(after, before) <= least or abs(after - before) <= TRAFFIC * after:
            continue
        what = f"{kind} over {' × '.join(axes)} in {dtype}"
        named = f": {_name_moved(made, program, key)}" if after else ""
        lines.append(f"{what}, {size(after)}, has no formula{named}" if not before
                     else f"{what}: {_than(after, before)}{named if after > before else ''}")
    compiled_flops = matmul_flops(program)
    if abs(compiled_flops - formulas.matmul_flops) > FLOPS * compiled_flops:
        lines.append(f"matmuls: {compiled_flops:.4g} FLOPs compiled, {formulas.matmul_flops:.4g} by the formulas")
    return lines


def _than(after: int, before: int) -> str:
    return f"{size(after)} compiled, {size(before)} by the formulas"


def _name_moved(made: Assembly, program: audit.ProgramAudit, key: tuple) -> str:
    """Return the names of the parameters with the shapes that the largest of these collectives moves, or its source."""
    rows = [row for row in program.collectives if (row.kind, *row.axes, row.dtype) == key]
    largest = max(rows, key=lambda row: row.bytes)
    names = [name for dims in largest.arrays for name in expect.tensors(made)(dims)]
    return ", ".join(dict.fromkeys(names)) or largest.source or "an operation without a name"
