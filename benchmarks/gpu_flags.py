"""Compare step times and losses with settings off and on: each unproven flag of `meshtrain.flags`, garbage collection
by step, and the binding of the process to its GPUs' NUMA node. On several GPUs, also compare the step compiled without
and with a profile from the roofline. All use one 1B shape. Each row says what the table should contain.
"""
from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks import gpu_speed
from benchmarks.gpu_record import Item
from meshtrain import assembly, flags
from meshtrain.cluster import numa
from meshtrain.run import garbage

PLAN = gpu_speed.Plan(*gpu_speed.ONE, True, "selective")        # 1B, packed
STEPS, WARM = 40, 3
GAIN = 0.005        # share of a step's time; a smaller gain is noise
# Tolerance of losses over STEPS, in bfloat16: the order of sums differs. The reported corruption of training is far
# larger.
LOSS = 2e-2


def trained(made, step, around: Callable = contextlib.nullcontext) -> tuple[list[float], list[float]]:
    """Return (seconds of each step, losses). around: () -> a context around the steps; its value is called after each
    step."""
    batch, state, times, losses = made.program.place(gpu_speed.rows(made.run)), assembly.initialize(made), [], []
    with around() as after:
        for number in range(STEPS):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            if after:
                after(number, False)
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - began)
    return times[WARM:], losses


def compared(off, on, kept: str, taken: str) -> dict:
    """Return Item's results. kept, taken: the advice if `on` gains nothing, and if it gains."""
    (off_s, off_loss), (on_s, on_loss) = off, on
    before, after = statistics.median(off_s), statistics.median(on_s)
    differ = max(abs(a - b) / abs(b) for a, b in zip(on_loss, off_loss, strict=True))
    gains = 1 - after / before > GAIN and differ <= LOSS
    return {"compared": {"losses": (differ, LOSS)},
            "row": {"off, s": f"{before:.4g}", "on, s": f"{after:.4g}", "slowest off and on, s":
                    f"{max(off_s):.4g}, {max(on_s):.4g}", "gain": f"{1 - after / before:.1%}",
                    "losses differ by": f"{differ:.1g}", "so": taken if gains else kept}}


def flag(row: flags.Flag, devices, sizes: gpu_speed.Sizes) -> dict:
    made, step, _ = gpu_speed.compiled(PLAN, devices, sizes)
    given = made.program.compiler_options | {row.name: row.value}
    other = assembly.compile_step(dataclasses.replace(
        made, program=dataclasses.replace(made.program, compiler_options=given)), made.program.lower_step(), refuse_broken=False)
    return compared(trained(made, step), trained(made, other), "the table stays: never",
                    f"the table should say {row.name} = {row.value} always")


def profile(devices, sizes: gpu_speed.Sizes) -> dict:
    """Compare the step without and with a profile. Both are the same program if too little of the step waits for
    links."""
    made, step, _ = gpu_speed.compiled(PLAN, devices, sizes)
    return compared(trained(made, made.program.compile()), trained(made, step), "no gain on these GPUs",
                    "a gain: the step is compiled with the profile, as it is")


def collection(devices, sizes: gpu_speed.Sizes) -> dict:
    made, step, _ = gpu_speed.compiled(PLAN, devices, sizes)
    return compared(trained(made, step), trained(made, step, garbage.by_step),
                    "no gain in one process; it is for many", "a gain even in one process")


def binding(devices, sizes: gpu_speed.Sizes) -> dict:
    """Compare unbound with bound, for the first GPU alone: a process with GPUs of several nodes is not bound."""
    made, step, _ = gpu_speed.compiled(PLAN, devices[:1], sizes)
    unbound = trained(made, step)
    said = numa.bind((0,), os.environ)
    return compared(unbound, trained(made, step), said or "this machine does not tell, or the process is bound",
                    said or "noise: nothing was bound")


def items(devices, sizes: gpu_speed.Sizes = gpu_speed.Sizes()) -> list[Item]:
    rows = [row for row in flags.ON_GPUS if row.when == flags.NEVER and flags.is_known(row.name)]
    several = len(devices) > 1
    return [*(Item(f"flags/{row.name}", partial(flag, row, devices, sizes), 120, alone=True) for row in rows),
            *[Item("flags/profile from the roofline", partial(profile, devices, sizes), 150, alone=True)] * several,
            Item("flags/garbage collection by step", partial(collection, devices, sizes), 90, alone=True),
            Item("flags/NUMA binding", partial(binding, devices, sizes), 90, alone=True)]
