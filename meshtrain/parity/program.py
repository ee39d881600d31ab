"""Checks the GPU program of a run's own layout for faults that a comparison on CPUs does not show.

The program is compiled without a GPU (`cost.program.compile`) and not executed. Faults are: gradients summed in a
narrow dtype, gradient accumulators that the rules shard but the program holds whole, collectives that the layout does
not require, permutes that leave devices with zeros.
"""
from __future__ import annotations

import math
from collections import defaultdict

from meshtrain import assembly, config
from meshtrain.assembly import Assembly
from meshtrain.config import Run
from meshtrain.cost.program import audit, carried, compile as gpu_compile
from meshtrain.inspection import expect, unexpected
from meshtrain.model.params import ParamInfo
from meshtrain.names import AXES
from meshtrain.run import say
from meshtrain.training import accumulators
from meshtrain.units import size

GPU, HOST = "h100", 8


def target(run: Run) -> str:
    """Return the GPUs for the run's own mesh, as `h100:N`. N is the size of the mesh. If an axis is -1, N is
    mesh.full_devices, or else a host of 8 GPUs, with at least 2 devices on that axis."""
    sizes = [getattr(run.mesh, axis) for axis in AXES]
    fixed = math.prod(n for n in sizes if n != -1)
    count = run.mesh.full_devices or fixed * max(2, HOST // fixed) if -1 in sizes else fixed
    return f"{GPU}:{count}"


def of_run(run: Run) -> tuple[list[str], list[str]]:
    """Compile the run's program for its GPUs and check it. Return (findings, notes)."""
    gpus = target(run)
    if missing := gpu_compile.missing_wheels():
        return [], [f"the GPU program was not checked: compiling it needs {' and '.join(missing)}; run pip "
                    f"install -e '.[gpu-compile]' in a checkout of meshtrain"]
    if gpus.endswith(":1"):
        return [], ["the GPU program was not checked: the run uses one device"]
    logged: list[str] = []
    try:
        with config.user_errors(), say.without_noise(logged), gpu_compile.naming_faults("the step"):
            made = assembly.assemble(run.replace(mesh={"full_devices": 0}), gpu_compile.topology(gpus))
            text = made.program.compile().as_text()
    except (config.ConfigError, gpu_compile.NotCompiledError) as error:
        return [], [f"the GPU program was not checked: on {gpus} {error}"]
    return faults(made, text, logged), [f"the GPU program was compiled for {gpus} and checked"]


def faults(made: Assembly, text: str, logged: list[str]) -> list[str]:
    """Return a line for each fault of a compiled program. text: its HLO. logged: XLA's log lines from the compilation.
    """
    program = audit.read(text, made.mesh)
    return [*(f"a permute leaves devices with zeros: {line}" for line in program.broken_permutes),
            *unlike_sums(made, program), *whole_accumulators(made, text),
            *unexpected.warnings(made, program, logged)]


def unlike_sums(made: Assembly, program: audit.ProgramAudit) -> list[str]:
    """Return a line for each sum of a weight's gradient over devices in another dtype than [grads] names."""
    named, infos = expect.tensors(made), {info.name: info for info in made.model.parameters()}
    counts: dict = defaultdict(int)
    tokens, (dtype, _) = set(made.layout.token_axes), made.placed.reduction_dtype
    # Vectors, routers and their balance stay float32 (`sharding.reduced`); the latter two are never narrower.
    exempt = ("norm", "bias") if dtype == accumulators.HLO_DTYPE else ("norm", "bias", "balance", "router")
    others = {*audit.NARROW, accumulators.HLO_DTYPE} - {dtype}
    for row in program.collectives:
        if row.kind in audit.SUMS and row.dtype in others and set(row.axes) <= tokens:
            for dims in row.arrays:
                names = [name for name in named(dims) if infos[name].role not in exempt]
                if names:
                    counts[" or ".join(names), row.kind, row.axes, row.dtype] += row.trips
    return [f"the gradient of {names} is summed over {' × '.join(axes)} in {dtype} ({kind}, {count:,} times a step), "
            f"but [grads] of {made.layout.rules.path} reduces in {made.layout.rules.reduce}"
            for (names, kind, axes, dtype), count in counts.items()]


def whole_accumulators(made: Assembly, text: str) -> list[str]:
    """Return a line for each gradient accumulator that [grads] shards but the microbatch loop carries unsharded."""
    microbatches = made.run.training.microbatches
    if made.choice or microbatches == 1:
        return []
    in_loops = {carried.bare(dims) for loop in carried.find_arrays(text, microbatches) for dims in loop}

    def split(info: ParamInfo) -> list[int]:
        return [made.layout.num_shards(made.layout.mesh_axes("grads", axis)) for axis in info.axes]
    rightly = {carried.bare(n // by for n, by in zip(info.shape, split(info))) for info in made.model.parameters()}
    return [f"the gradient of {info.name} {list(info.shape)} is held whole on every device, "
            f"{size(accumulators.ITEMSIZE * info.size)}, but [grads] of {made.layout.rules.path} splits it "
            f"{math.prod(split(info))} ways"
            for info in made.model.parameters() if info.trainable and math.prod(split(info)) > 1
            and carried.bare(info.shape) in in_loops - rightly]
