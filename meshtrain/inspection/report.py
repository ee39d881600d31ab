"""Describes a run and its costs in text and JSON, for the first lines of `train` and for `inspect`.

Functions take an assembled run (`meshtrain.assembly.Assembly`) or its compiled step (`Inspected`).
"""
from __future__ import annotations

import re
from collections.abc import Mapping

from meshtrain.assembly import Assembly
from meshtrain import hardware
from meshtrain.cost.formulas import flops
from meshtrain.cost.program import audit, roofline
from meshtrain.inspection import formula_vs_compiled, memory, summary, teacher_forward
from meshtrain.inspection.inspected import Inspected
from meshtrain.sharding.mesh import AnyMesh
from meshtrain.units import amount, operations, seconds, size

LABELS = {"params": "weights", "grads": "gradients", "optimizer": "optimizer state", "activations": "activations",
          "teacher": "teacher", "total": "total", "host": "on the host"}
LARGE = 64 * 2**20   # bytes from which a replicated parameter causes a warning


def text(step: Inspected) -> str:
    """Return the text that `inspect` prints."""
    warnings = [differences(step), *(f"warning: {line}" for line in step.warnings)]
    return "\n\n".join([
        before(step.made), params_table(step.made), memory_table(step),
        collectives_table(step.program.audit, step.formulas), matmuls(step.program.audit, step.formulas),
        "\n".join(warnings),
        *([sampling_table(step.sampling_costs)] if step.sampling_costs else []),
        *([f"rl.lag={lag}: this is the cost of sampling for validation; separate processes sample the answers for "
           f"training, and `plan` prints the cost of one such process"] if (lag := step.made.run.rl.lag) else []),
        *([roofline_table(step.program.roofline, step.made.mesh)] if step.program.roofline else []),
        *([teacher_table(forward, forward.as_json(step.program.roofline))] if (forward := step.teacher_forward)
          else [])])


def before(made: Assembly) -> str:
    """Return a text about a run before it is compiled: its size, the planned tokens and FLOPs, its layout, notes."""
    run, table = made.run, made.model.parameters()
    count = sum(info.size for info in table)
    tokens = run.training.steps * run.data.global_batch * run.data.seq_len
    per_token = teacher_forward.flops_per_token(made)
    kind = made.mesh.devices.flat[0].device_kind
    simulated = " (simulated)" if run.mesh.simulated_devices else ""
    used = sum(flops.active(info, run.model) for info in table)
    lines = [
        f"{run.run.name}: {count:,} parameters{f' ({used:,} for each token)' if used != count else ''} in "
        f"{amount(run.model.num_layers, 'layer')}, {amount(run.training.steps, 'step')} of "
        f"{run.data.global_batch} × {run.data.seq_len} tokens in {amount(run.training.microbatches, 'microbatch')}",
        f"planned: {tokens:,} tokens, {operations(per_token)} a token, {operations(tokens * per_token)} in all",
        f"layout: {made.mesh_spec} on {made.mesh_spec.num_devices} × {kind}{simulated}, {made.layout.rules.path}, "
        f"remat {run.training.remat}, {run.model.compute_dtype}"
        f"{' with float8 projections' * (run.model.matmul_dtype == 'float8')}, {run.optimizer.name}",
    ]
    return "\n".join(lines + [f"note: {note}" for note in made.notes])


def as_json(step: Inspected) -> dict:
    """Return the output of `inspect --json`. formula: null without formulas. roofline: null unless compiled for a GPU
    of known speed. differences: empty unless compiled for GPUs. sampling: null without [rl]. teacher: null without
    one."""
    formulas, program, line = step.formulas, step.program.audit, step.program.roofline
    return {"memory_bytes": {"formula": formulas.memory_bytes if formulas else memory.formula(step.made),
                             "compiled": step.memory_bytes, "usable": step.program.usable_bytes},
            "broken_permutes": list(program.broken_permutes), "recomputed_by_xla": step.program.num_recomputed,
            "collectives": {"formula": formulas and formulas.collectives,
                            "compiled": audit.summarize(program.collectives)},
            "matmul_flops": {"formula": formulas and formulas.matmul_flops,
                             "compiled": formula_vs_compiled.matmul_flops(program)},
            "differences": step.differences, "roofline": line and line.as_json(),
            "sampling": step.sampling_costs, "teacher": step.teacher_forward and step.teacher_forward.as_json(line),
            "warnings": step.warnings, **summary.of_run(step.made)}


def params_table(made: Assembly) -> str:
    """Return a table of the parameters: logical axes, spec by [params] and by [optimizer], bytes per device of the
    stored parameter and of its gradient."""
    rows, replicated, names = [], [], made.layout.rules.names
    for row in summary.parameters(made):
        axes = " ".join(f"{axis or '·'}={n}" for axis, n in zip(row["axes"], row["shape"]))
        rows.append((row["name"], axes, _spec(row["read"]), _spec(row["stored"]), size(row["stored_bytes"]),
                     size(row["grads_bytes"])))
        if made.mesh_spec.num_devices > 1 and row["stored_bytes"] == row["bytes"] >= LARGE:
            replicated.append(f"warning: {row['name']} ({size(row['stored_bytes'])}) is stored whole on every device; "
                              f"a rule for {' or '.join(repr(a) for a in row['axes'] if a in names)} in "
                              f"[params] or [optimizer] would split it")
    header = ("parameter", "logical axes", "[params] spec", "stored, by [optimizer]", "weights", "gradients")
    totals = memory.formula(made)
    opt = f"optimizer state per device ({made.run.optimizer.name}): {size(totals['optimizer'])}"
    total = ("total per device", "", "", "", size(totals["params"]), size(totals["grads"]))
    return "\n".join([columns([header, *rows, total]), opt, *replicated])


def _spec(split: list[list[str]]) -> str:
    return "(" + ", ".join("+".join(axes) or "·" for axes in split) + ")"


def collectives_table(program: audit.ProgramAudit, formulas: formula_vs_compiled.Formulas | None = None) -> str:
    """Return a table of a step's collectives: bytes sent per device by mesh axes, compiled and, if there are any, by
    formulas."""
    compiled, priced = map(audit.by_kind, (
        audit.summarize(program.collectives), formulas.collectives if formulas else []))
    rows = []
    for key in dict.fromkeys([*compiled, *priced]):
        row = compiled.get(key) or {**priced[key], "count": 0, "source": ""}
        by_formulas = (_show_sent(priced, key),) if formulas else ()
        rows.append((row["kind"], " × ".join(row["axes"]), row["dtype"], *by_formulas, _show_sent(compiled, key),
                     f"{row['count']:,}", row.get("line", ""), row["source"][:60]))
    if not rows:
        return "collectives of the compiled step: none"
    heads = ("by formulas", "compiled") if formulas else ("compiled",)
    lines = [columns([("sent per device", "axes", "dtype", *heads, "count", "line", "from"), *rows])]
    lines += [f"warning: loop of unknown length, counted once: {name}" for name in program.unknown_loops]
    if program.further_rounds:
        lines += [f"a balanced load of experts is assumed: {amount(program.further_rounds, 'loop')} of further "
                  f"rounds do not count"]
    lines += [f"error: a permute leaves devices with zeros: {text}" for text in program.broken_permutes]
    return "\n".join(lines)


def matmuls(program: audit.ProgramAudit, formulas: formula_vs_compiled.Formulas | None = None) -> str:
    """Return a line about the FLOPs of a step's matmuls on one device."""
    per_dtype = ", ".join(f"{dtype} {flops:.4g}" for dtype, flops in sorted(program.flops.items()))
    unsure = [kernel for kernel in program.uncounted if not re.search("meshtrain_(attention|mosaic)|fmha", kernel)]
    apart = "; plus attention kernels" if len(unsure) < len(program.uncounted) else ""
    apart += f"; not counted: {', '.join(unsure)}" if unsure else ""
    priced = f"; by formulas {formulas.matmul_flops:.4g} without attention" if formulas else ""
    return f"matmul FLOPs per device and step: {per_dtype or 'none'}{apart}{priced}"


def differences(step: Inspected) -> str:
    """Return lines about differences between the compiled step and the formulas."""
    if not step.formulas:
        return "not compared with formulas: there are none for float8 projections"
    if not step.program.for_gpus:
        return ("not compared with formulas: they describe GPU programs, and programs for simulated devices send more; "
                "add --topology, e.g. h100:8")
    return "\n".join(f"warning: {line}" for line in step.differences) or "the compiled step agrees with the formulas"


def memory_table(step: Inspected) -> str:
    """Return a table that compares memory by formulas with memory of the compiled step."""
    made, held, ruled = step.made, step.memory_bytes, memory.formula(step.made)
    priced: dict[str, int | None] = dict(step.formulas.memory_bytes if step.formulas else ruled)
    if held["grads"] is None:       # by formulas, too, those of embedding and head have no accumulator
        grads, lives = priced["grads"], priced["activations"]
        priced |= {"grads": None, "activations": None if lives is None else lives + (grads or 0)}
    keys = [key for key in ("params", "grads", "optimizer", "activations", "teacher", "total", "host") if key in held]
    rows = [(LABELS.get(key, key), _show_size(priced[key]), _show_size(held[key])) for key in keys]
    lines = [columns([("memory per device", "formulas", "compiled"), *rows])]
    if held["grads"] is None:
        lines += ["gradients are included in the activations, because there is one microbatch"]
    if gpu := step.program.gpu:
        usable = hardware.usable_bytes(gpu)
        whole, fits = size(gpu.hbm_bytes or 0), "it fits" if step.fits else "IT DOES NOT FIT"
        lines += [f"of {size(usable)} usable on {gpu.name}, {hardware.memory_share():g} of its {whole}: {fits}"]
    if step.program.prices and (moments := memory.host_moments(made)):
        gpus = min(made.mesh_spec.num_devices, step.program.prices.gpu.gpus_per_host)
        copies_s = 2 * step.program.prices.host_copy_s(moments)
        lines += [f"moments in host memory: {size(gpus * moments)} on each host of {amount(gpus, 'GPU')}; their copies "
                  f"take {seconds(copies_s)} of a step, if nothing hides them (assumed: offload.gb_per_s)"]
    if again := step.program.num_recomputed:
        lines += [f"note: XLA recomputes {again} values because the step is close to its memory limit; "
                  "training.remat or more devices would cost less time"]
    if made.choice:
        lines += [f"the pipeline's loop holds all weights of a stage in {made.run.model.compute_dtype}, "
                  f"{size(ruled['loop_weights'])}, and their float32 gradients, {size(ruled['loop_grads'])}. In the "
                  "row of gradients, the formulas count the gradients outside the loop, which the total leaves out; "
                  "the compiled program counts those of the loop"]
    elif memory.read_bytes(made):
        lines += ["weights are counted as stored, split by [optimizer]; the activations include the "
                  f"{size(memory.read_bytes(made))} of weights that microbatches read, split by [params]: they are "
                  f"gathered once per step, in {made.run.model.compute_dtype}"]
    return "\n".join(lines)


def sampling_table(data: dict) -> str:
    """Return the costs of sampling as text. data: the result of `SamplingCosts.as_json`."""
    held, sync, decode = data["memory_bytes"], data["sync"], data["decode"]
    fits = data["slots_that_fit"]
    lines = [f"sampling: {data['slots']:,} slots of {data['room']:,} tokens on all devices, {data['rules']}",
             columns([("memory per device during sampling", "by formulas", "compiled"),
                      *((part, _show_size(priced), _show_size(held["compiled"][part]))
                        for part, priced in held["formula"].items())]),
             f"peak of sampling and training: {size(data['peak_bytes'])}" + (
                 "" if fits is None else f"; {fits:,} slots fit" + (
                     "" if fits >= data["slots"] else f": SET rl.slots={fits}" if fits else ": NONE"))]
    if sync["time_s"] is not None:
        lines.append(f"weights to the sampler: {seconds(sync['time_s'])} by the roofline, once a batch of answers")
    ruled, compiled = (audit.by_kind(sync["collectives"][which]) for which in ("formula", "compiled"))
    if keys := dict.fromkeys([*compiled, *ruled]):
        lines.append(columns([("sent per device and sync", "axes", "dtype", "by formulas", "compiled"), *(
            (key[0], " × ".join(key[1:-1]), key[-1], _show_sent(ruled, key), _show_sent(compiled, key))
            for key in keys)]))
    if time := decode["time_s"]:
        parts = ", ".join(f"{name} {seconds(s)}" for name, s in time.items() if name != "total")
        lines.append(f"a decoding step with full slots: {seconds(time['total'])} ({parts}), "
                     f"{decode['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU; a batch of answers: at most "
                     f"{seconds(decode['batch_s_at_most'])}, if all of them have rl.max_tokens")
    return "\n".join(lines)


def _show_sent(rows: Mapping, key: tuple[str, ...]) -> str:
    return _show_size(rows[key]["bytes"] if key in rows else None)


def _show_size(value: int | None) -> str:
    return "–" if value is None else size(value)


def teacher_table(teacher: teacher_forward.TeacherForward, data: dict) -> str:
    """Return the costs of a teacher as text. data: the result of `TeacherForward.as_json`."""
    held, times = (data[key] for key in ("memory_bytes", "time_s"))
    compiled, program = held["compiled"] or {}, teacher.program
    lines = [f"teacher: {data['folder']}, {data['num_params']:,} weights, {data['rules']}; a forward before each step",
             columns([("memory per device of the teacher", "formulas", "compiled"), *(
                 (part, size(priced), size(compiled[part]) if compiled else "–")
                 for part, priced in held["formula"].items())])]
    if program:
        lines += [collectives_table(program.audit, teacher.formulas), matmuls(program.audit, teacher.formulas)]
    if times["formula"] is not None:
        lines += [f"its forward: {seconds(times['formula'])} by formulas" + (
            f", {seconds(times['compiled'])} by the roofline" if times["compiled"] is not None else "")]
    if both := data["with_step"]:
        per_gpu = both["tokens_per_s"] / teacher.made.mesh_spec.num_devices
        lines += [f"a step with it: {seconds(both['step_time_s'])}, {per_gpu:,.0f} tokens/s a GPU, "
                  f"MFU {both['mfu']:.1%}"]
    return "\n".join(lines)


COSTLIEST = 10


def roofline_table(line: roofline.Roofline, mesh: AnyMesh, change: str = "--assume NAME=VALUE") -> str:
    """Return the roofline of a step as text: step time, shares, collectives, costliest kernels, assumptions. change:
    how the reader changes an assumption."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in line.shares.items())
    domains = ", ".join(f"{axis} {n} GPUs over NVLink" if inside == n else
        f"{axis} {amount(n // inside, 'host')} with {amount(inside, 'network card')} each"
        for axis, (n, inside) in roofline.links(line.prices.gpu, mesh).items()) or "none"
    speed = f"{line.tokens_per_s / line.num_gpus:,.0f} tokens/s a GPU, " if line.workload.tokens else ""
    step = f"{line.step_s:.3f} s" if line.step_s >= 0.1 else seconds(line.step_s)
    lines = [f"roofline on {line.num_gpus} × {line.prices.gpu.name}, nothing measured: {step} a step, {speed}"
             f"MFU {line.mfu:.1%} of the {line.workload.mfu_dtype} peak",
             f"of the step: {shares}",
             "communication = time spent waiting; contention = slowdown of kernels that overlap with communication; "
             f"{seconds(line.free_matmul_s)} of matmuls overlap with no communication",
             f"links: {domains}"]
    if line.traffic:
        def longest(under: Mapping[str, float]) -> list[tuple[str, float]]:
            return sorted(under.items(), key=lambda pair: -pair[1])

        def beside(row: roofline.Traffic) -> str:
            return ", ".join(f"{part} {seconds(s)}" for part, s in longest(row.hidden_under) if s >= 5e-4)
        rows = [(row.kind, " × ".join(row.axes), f"{row.runs:,}", size(row.sent_bytes), seconds(row.seconds),
                 seconds(row.exposed_s), beside(row)) for row in line.traffic]
        lines += ["", columns([("collective", "axes", "runs", "sent", "time", "exposed", "hidden under"), *rows])]
    kernels = [(kernel.part, f"{kernel.runs:,}", seconds(kernel.seconds), f"{kernel.seconds / line.step_s:.1%}",
                kernel.bound, f"{kernel.flops / 1e12:,.1f}", size(kernel.hbm_bytes), kernel.line, kernel.source[-70:])
               for kernel in line.kernels[:COSTLIEST]]
    lines += ["", columns([("costliest kernels", "runs", "time", "of step", "bound", "TFLOP", "HBM", "line", "from"),
                           *kernels])]
    lines += [f"warning: loop of unknown length, counted once: {name}" for name in line.unknown_loops]
    lines += [f"warning: the FLOPs of {name} are unknown, so only its bytes are counted" for name in line.uncounted]
    lines += ["", f"assumptions (change one with {change}; reasons: meshtrain/cost/formulas/assumptions.py): "
              + ", ".join(
        f"{name} {value:g}" for name, value in line.prices.assumed.as_dict().items())]
    return "\n".join(lines)


def columns(rows) -> str:
    """Return rows of cells as text with left-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
