"""Reads the GPU program of a run's own layout for what no comparison on CPUs shows.

Compiled without a GPU (`cost.program.compile`), never executed: gradients that are summed in a narrow dtype,
accumulators that the rules split and the program holds whole, collectives that the layout does not ask for, permutes
that leave devices with zeros.
"""
from __future__ import annotations

import math
from collections import defaultdict

from meshtrain import assembly, config
from meshtrain.assembly import Assembly
from meshtrain.config import Run
from meshtrain.cost.program import audit
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.inspection import expect, unexpected
from meshtrain.names import AXES
from meshtrain.run import say
from meshtrain.units import size

GPU, HOST = "h100", 8
NARROW = ("bf16", "f16")


def target(run: Run) -> str:
    """The GPUs that the run's own mesh takes, whole hosts; an axis of -1 fills a host, with two or more; or
    full_devices."""
    sizes = [getattr(run.mesh, axis) for axis in AXES]
    fixed = math.prod(n for n in sizes if n != -1)
    count = run.mesh.full_devices or fixed * max(2, HOST // fixed) if -1 in sizes else fixed
    return f"{GPU}:{count}"


def of_run(run: Run) -> tuple[list[str], list[str]]:
    """(findings, notes)."""
    gpus = target(run)
    if missing := gpu_compile.missing_wheels():
        return [], [f"the GPU program was not read: it needs {' and '.join(missing)}; run pip "
                    f"install -e '.[gpu-compile]' in a checkout of meshtrain"]
    if gpus.endswith(":1"):
        return [], ["the GPU program was not read: the run is on one device"]
    logged: list[str] = []
    try:
        with config.user_errors(), say.without_noise(logged), gpu_compile.naming_faults("the step"):
            made = assembly.assemble(run.replaced(mesh={"full_devices": 0}), gpu_compile.topology(gpus))
            text = made.program.compile().as_text()
    except (config.ConfigError, gpu_compile.NotCompiledError) as error:
        return [], [f"the GPU program was not read: on {gpus} {error}"]
    return faults(made, text, logged), [f"the GPU program was read as {gpus} would run it"]


def faults(made: Assembly, text: str, logged: list[str]) -> list[str]:
    """text: of the compiled program. logged: XLA's log lines from the compilation."""
    program = audit.read(text, made.mesh)
    return [*(f"a permute leaves devices with zeros: {line}" for line in program.broken_permutes),
            *narrow_sums(made, program), *whole_accumulators(made, text),
            *unexpected.warnings(made, program, logged)]


def narrow_sums(made: Assembly, program: audit.ProgramAudit) -> list[str]:
    """Sums of weights' gradients over devices in fewer bits than float32."""
    named, infos = expect.tensors(made), {info.name: info for info in made.model.parameters()}
    found, tokens = defaultdict(int), set(made.layout.token_axes)
    for row in program.collectives:
        if row.kind in ("all-reduce", "reduce-scatter") and row.dtype in NARROW and set(row.axes) <= tokens:
            for dims in row.arrays:
                names = [name for name in named(dims) if infos[name].role not in ("norm", "bias")]
                if names:
                    found[" or ".join(names), row.kind, row.axes, row.dtype] += row.trips
    return [f"the gradient of {names} is summed over {' × '.join(axes)} in {dtype} ({kind}, {count:,} times a step), "
            f"and float32 is promised" for (names, kind, axes, dtype), count in found.items()]


def whole_accumulators(made: Assembly, text: str) -> list[str]:
    """Gradient accumulators that [grads] splits, and that a loop over microbatches carries whole."""
    microbatches = made.run.training.microbatches
    if made.choice or microbatches == 1:
        return []
    carried = {tuple(sorted(dims)) for loop in audit.carried(text, microbatches) for dims in loop}
    split = lambda info: [made.layout.num_shards(made.layout.mesh_axes("grads", axis)) for axis in info.axes]
    key = lambda dims: tuple(sorted(n for n in dims if n > 1))
    carried = {key(dims) for dims in carried}
    rightly = {key(n // by for n, by in zip(info.shape, split(info))) for info in made.model.parameters()}
    return [f"the gradient of {info.name} {list(info.shape)} is held whole on every device, {size(4 * info.size)}, and "
            f"[grads] of {made.layout.rules.path} splits it {math.prod(split(info))} ways"
            for info in made.model.parameters() if info.trainable and math.prod(split(info)) > 1
            and key(info.shape) in carried - rightly]
