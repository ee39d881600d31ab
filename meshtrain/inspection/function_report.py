"""The costs of a function of another project (`InspectedFunction`) as JSON and text."""
from __future__ import annotations

from meshtrain import hardware
from meshtrain.cost.program import audit
from meshtrain.cost.program.sources import ATTENTION
from meshtrain.inspection import report, summary, unexpected
from meshtrain.inspection.functions import InspectedFunction, Repeat
from meshtrain.units import amount, operations, size

LARGEST = 10        # arguments in the table
LABELS = {"arguments": "arguments", "outputs": "outputs that reuse no argument", "temporaries": "temporaries",
          "total": "total"}
FLOAT32 = 0.01      # share of the FLOPs from which matmuls in float32 are noted
FEWER = 0.99        # FLOPs of the program over those of the function below which a note says so


def as_json(function: InspectedFunction) -> dict:
    """Return the costs as JSON, with the keys of `inspect --json` where they mean the same. Values are per device and
    step, `matmul_flops.traced` and `arguments.bytes` those of all devices."""
    program, traced, line = function.program, function.traced, function.program.roofline
    found = program.audit
    device = program.mesh.devices.flat[0]
    return {"function": {"name": function.name, "options": dict(function.options), "tokens": program.workload.tokens},
            "mesh": summary.mesh(program.mesh, program.gpu, device.device_kind, device.platform == "cpu"),
            "memory_bytes": {"compiled": program.memory_bytes, "formula": None, "usable": program.usable_bytes},
            "arguments": [{"name": row.name, "shape": list(row.shape), "dtype": row.dtype, "bytes": row.num_bytes,
                           "copies": row.copies, "whole_on": list(row.whole_on), "donated": row.donated}
                          for row in function.arguments],
            "recomputed_by_xla": program.num_recomputed, "broken_permutes": list(found.broken_permutes),
            "collectives": {"formula": None, "compiled": audit.summarize(found.collectives)},
            "narrow_sums": audit.summarize(found.narrow_sums),
            "matmul_flops": {"formula": None, "compiled": sum(found.flops.values()), "traced": traced.total,
                             "repeated": function.repeated, "bounds": list(traced.bounds),
                             "repeats": [{"line": row.line, "times": row.times,
                                          "axes": [list(group) for group in row.axes]} for row in function.repeats]},
            "unknown_loops": list(found.unknown_loops), "uncounted": [*traced.uncounted, *found.uncounted],
            "roofline": line and line.as_json(), "warnings": warnings(function), "notes": notes(function)}


def text(function: InspectedFunction) -> str:
    """Return the costs as text."""
    program = function.program
    mesh, kind = program.mesh, program.mesh.devices.flat[0].device_kind
    larger = {axis: n for axis, n in function.sizes.items() if n > 1} or function.sizes
    axes = " × ".join(f"{axis} {n}" for axis, n in larger.items())
    simulated = " (simulated)" if not program.for_gpus else ""
    said = [*(f"warning: {line}" for line in warnings(function)), *(f"note: {line}" for line in notes(function))]
    return "\n\n".join([
        f"{function.name} on {mesh.size} × {kind}{simulated}, {axes}", memory_table(function),
        report.collectives_table(program.audit), matmuls(function), "\n".join(said),
        *([report.roofline_table(program.roofline, mesh, "assume={NAME: VALUE}")] if program.roofline else [])])


def memory_table(function: InspectedFunction) -> str:
    """Return a table of a device's memory, and one of the largest arguments."""
    program = function.program
    held = program.memory_bytes
    lines = [report.columns([("memory per device", "compiled"), *((LABELS[key], size(held[key])) for key in LABELS)])]
    if program.gpu and program.usable_bytes:
        fits = "it fits" if program.fits(held["total"]) else "IT DOES NOT FIT"
        lines += [f"of {size(program.usable_bytes)} usable on {program.gpu.name}, {hardware.memory_share():g} of its "
                  f"{size(program.gpu.hbm_bytes or 0)}: {fits}"]
    rows = sorted(function.arguments, key=lambda row: -row.num_bytes)[:LARGEST]
    if rows:
        lines += ["", report.columns([("largest arguments", "shape", "dtype", "bytes", "copies", "not split over"), *(
            (row.name, " × ".join(map(str, row.shape)) or "scalar", row.dtype, size(row.num_bytes),
             "unused" if row.copies is None else f"{row.copies:g}", ", ".join(row.whole_on)) for row in rows)])]
    if more := len(function.arguments) - len(rows):
        lines += [f"and {amount(more, 'smaller argument')}"]
    return "\n".join(lines)


def matmuls(function: InspectedFunction) -> str:
    """Return lines about the matmul FLOPs of the program and of the function."""
    lines = [report.matmuls(function.program.audit)]
    if function.repeated is not None:
        bound = "about " if function.traced.bounds else ""
        lines += [f"the function has {bound}{operations(function.traced.total)} of matmuls; its devices together "
                  f"compute {function.repeated:.2f} times as many"]
    return "\n".join(lines)


def warnings(function: InspectedFunction) -> list[str]:
    """Return a line for each fault of the program and each cost that its function does not require."""
    return [*(f"THE PROGRAM COMPUTES WRONG NUMBERS: a permute leaves devices with zeros: {line}"
              for line in function.program.audit.broken_permutes),
            *map(describe, function.repeats),
            *unexpected.find_replicated(function.logged, function.names_of)]


def describe(row: Repeat) -> str:
    """Return a sentence about a line of Python whose matmuls the devices repeat."""
    axes = " or ".join(" × ".join(group) for group in row.axes)
    what = f"{axes}" if len(row.axes) == 1 else f"one of {axes}" if axes else "a part of the mesh"
    return (f"the devices compute the matmuls of {row.line or 'a line without a name'} {row.times:.3g} times: {what} "
            "does not split them")


def notes(function: InspectedFunction) -> list[str]:
    """Return lines about what the numbers do and do not include."""
    program, traced = function.program, function.traced
    options = ", ".join(f"{name}={value}" for name, value in function.options.items())
    lines = [f"compiled with the XLA options {options}" if options else
             "compiled without XLA options; XLA_FLAGS applies as in your own program"]
    if traced.bounds:
        lines += ["repeated work cannot be detected, because the function's FLOPs are only a bound: it has "
                  f"{', '.join(traced.bounds)}"]
    elif function.repeated is not None and function.repeated < FEWER:
        lines += ["XLA computes some of the function's matmuls as other kernels, or leaves them out because nothing "
                  "uses their result"]
    if narrow := audit.summarize(program.audit.narrow_sums):
        sums = [f"{row['dtype']} over {' × '.join(row['axes'])}, {size(row['bytes'])}"
                + (f" ({row['line']})" if row["line"] else "") for row in narrow]
        lines += [f"sums over devices in {', '.join(sums)}: gradients that are summed in it lose precision"]
    if traced.uncounted:
        lines += [f"not counted as matmuls: {', '.join(traced.uncounted)}"]
    if unused := [row.name for row in function.arguments if row.copies is None]:
        lines += [f"the program does not use {', '.join(unused[:LARGEST])}" + " …" * (len(unused) > LARGEST)]
    line = program.roofline
    if line and not line.parts.get(ATTENTION) and " exponential(" in program.text:
        lines += ['attention counts as matmuls and elementwise kernels, with all pairs of positions; in '
                  'jax.named_scope("attention") it has its own share']
    in_float32 = traced.by_dtype["float32"] + traced.by_dtype["float64"]
    if line and in_float32 > FLOAT32 * traced.total:
        lines += [f"{in_float32 / traced.total:.0%} of the FLOPs are in float32, priced at full precision; by default "
                  f"XLA uses TF32 on these GPUs, which is faster (jax_default_matmul_precision)"]
    return lines
