"""Compares the closed formulas of an assembled run's step with its compiled program.

The formulas describe programs for GPUs; on simulated CPU devices XLA chooses other collectives. 40 layouts compiled for
GPUs keep the tolerances: states are exact, the lifetimes of temporaries in XLA's schedule are not.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtrain import hardware
from meshtrain.assembly import Assembly
from meshtrain.cost.formulas import flops, footprint, traffic
from meshtrain.cost.formulas.placed import Options
from meshtrain.cost.program import audit, sources
from meshtrain.inspection import expect
from meshtrain.units import size

TOLERANCE = {"params": .001, "grads": .001, "optimizer": .001, "total": .1}     # of memory
WORKSPACE = 2**25           # bytes beyond that which any program may hold: cuBLAS takes as much for its own
TRAFFIC, FLOPS = .02, .01
SMALL = .002                # of all bytes sent: norms, biases and statistics of the loss, which no formula counts


@dataclasses.dataclass(frozen=True)
class Formulas:
    """Of one device and step: bytes by kind, collectives as in `audit.summarize`, FLOPs of matmuls without
    attention and recurrences."""
    memory_bytes: Mapping[str, int]
    collectives: list[dict]
    matmul_flops: int


def of(made: Assembly, ruled: Mapping[str, int | None]) -> Formulas | None:
    """ruled: bytes by the rules (`memory.formula`). None for float8, which the formulas do not cover."""
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
    return Formulas(held, traffic.summarized(traffic.of(placed, options), sizes),
                    round(flops.executed(placed, options)))


def matmul_flops(program: audit.ProgramAudit) -> int:
    """Matmul FLOPs of a compiled step without those of attention and recurrences, which a kernel computes in other
    programs."""
    return sum(dot.flops for dot in program.dots if not sources.scope_of(dot.source))


def differences(made: Assembly, formulas: Formulas, held: Mapping[str, int | None],
                program: audit.ProgramAudit) -> list[str]:
    """One line for each number beyond tolerance, and for each collective without a formula, with what it moves. held:
    bytes of the compiled step by kind (`memory.held_by_program`)."""
    lines = []
    for kind, tolerance in TOLERANCE.items():
        before = formulas.memory_bytes["loop_grads" if kind == "grads" and made.choice else kind]
        beyond = tolerance * (held[kind] or 0) + (WORKSPACE if kind == "total" else 0)
        if held[kind] is not None and abs(held[kind] - before) > beyond:
            lines.append(f"memory, {kind}: {_than(held[kind], before)}")
    compiled, priced = ({(row["kind"], *row["axes"], row["dtype"]): row for row in rows}
                        for rows in (audit.summarize(program.collectives), formulas.collectives))
    least = SMALL * sum(row["bytes"] for row in compiled.values())
    for key in sorted({*compiled, *priced}, key=lambda key: (key not in compiled, key)):
        kind, *axes, dtype = key
        after, before = (rows[key]["bytes"] if key in rows else 0 for rows in (compiled, priced))
        if max(after, before) <= least or abs(after - before) <= TRAFFIC * after:
            continue
        what = f"{kind} over {' × '.join(axes)} in {dtype}"
        named = f": {_moved(made, program, key)}" if after else ""
        lines.append(f"{what}, {size(after)}, follows from no rule{named}" if not before
                     else f"{what}: {_than(after, before)}{named if after > before else ''}")
    found = matmul_flops(program)
    if abs(found - formulas.matmul_flops) > FLOPS * found:
        lines.append(f"matmuls: {found:.4g} FLOPs compiled, {formulas.matmul_flops:.4g} by the formulas")
    return lines


def _than(after: int, before: int) -> str:
    return f"{size(after)} compiled, {size(before)} by the formulas"


def _moved(made: Assembly, program: audit.ProgramAudit, key: tuple) -> str:
    """The parameters that have the shapes of the largest of these collectives, or its source."""
    rows = [row for row in program.collectives if (row.kind, *row.axes, row.dtype) == key]
    largest = max(rows, key=lambda row: row.bytes)
    names = [name for dims in largest.arrays for name in expect.tensors(made)(dims)]
    return ", ".join(dict.fromkeys(names)) or largest.source or "of no name"
