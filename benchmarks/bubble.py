"""python benchmarks/bubble.py: the measured idle time of pipeline stages, compared with the simulator's.

The stages sleep instead of computing. F, B and W of a layer each wait for the same time in a callback on the host.
Sleeping needs no core, so four simulated devices overlap on any machine as four real devices would. The benchmark
measures the program that the executor builds from a schedule: its order, its permutes and its scans. Writes
benchmarks/bubble.md.
"""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks import machine, words
from meshtrain import config
from meshtrain import devices as local_devices
from meshtrain.cost.formulas import simulate
from meshtrain.model.stats import LayerStats
from meshtrain.parallel.pipeline import schedules
from meshtrain.training import executor, shard

STAGES, MICROBATCHES = 4, 8
CASES = [(name, 2 if name in schedules.INTERLEAVED else 1) for name in schedules.NAMES]
# Duration of the shortest op, which is that of one of two chunks. It is long compared with what a busy machine adds.
CHUNK_S = 0.2
STAGE_S = 2 * CHUNK_S
REPEATS = 3
WITHIN = 0.05                       # largest difference from the simulator's bubble
AT_MOST = {"interleaved_zero_bubble": 0.16}


def sleeper(op: str, seconds: float, slept: list):
    """Return a function x -> 0.0 that takes `seconds`."""
    def sleep(_):
        time.sleep(seconds)
        slept.append(op)
        return np.zeros((), np.float32)
    return lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x.ravel()[0])


def sleeping_layer(seconds: float, slept: list):
    """Return a layer y = x with the costs F:B:W = 1:1:1. Different callbacks compute its gradients, so a schedule can
    split them."""
    forward, input_grad, weight_grad = (sleeper(op, seconds, slept) for op in "FBW")
    layer = jax.custom_vjp(lambda w, x: x + forward(x))

    def backward(w, dy):
        dx = dy + input_grad(dy)
        return w * 0 + weight_grad(dx), dx          # dx comes first: without a split the two must not overlap
    layer.defvjp(lambda w, x: (layer(w, x), w), backward)
    return layer


def compiled_step(schedule: schedules.Schedule, mesh, slept: list):
    """Compile the step of a model whose stages only sleep. A chunk is one layer; embedding and head cost nothing."""
    layer = sleeping_layer(STAGE_S / schedule.num_chunks, slept)
    model = shard.ModelFunctions(
        prepare=lambda microbatch, extra: (),
        embed=lambda ends, frozen, microbatch, extra: microbatch + ends,
        layer=lambda weights, x, e: (layer(weights.trained, x), LayerStats()),
        head=lambda ends, frozen, x, microbatch, extra: (
            jnp.sum(x * ends), LayerStats.of("target", nll=jnp.float32(0))))
    ws = jnp.zeros((schedule.num_chunks, schedule.num_stages, 1))
    batch = jnp.ones((schedule.num_microbatches, 1, 1, 4, 8))

    placement = executor.Placement(mesh, summed_axes=(), layer_axes=((), {}), leading_axes=({}, {}), ends_specs=(P(), {}),
                           batch_specs=P())

    def step(ws, batch):
        return executor.gradients(schedule, model, placement, ((ws, {}), (jnp.ones(()), {}), ({}, {})), batch, ())
    with jax.set_mesh(mesh):
        return jax.jit(step).lower(ws, batch).compile(), (ws, batch)


def sleeps(schedule: schedules.Schedule) -> dict[str, int]:
    """Count how often all stages together execute each op in a step."""
    on = schedule.ops[..., 0] >= 0                                     # [T, P, op]
    on = on | on.any(1, keepdims=True)                                 # a stage without work executes the op masked
    if not schedule.split:
        on[..., schedules.W] = on[..., schedules.B]                    # B includes W
    return dict(zip(schedules.KINDS, on.sum((0, 1)).tolist()))


def apart(schedule: schedules.Schedule) -> float:
    """Return the bubble of Megatron-LM's order of this schedule, for F = B = W. There every stage runs its own program
    and continues as soon as its inputs arrive. Sources: arXiv:2104.04473; arXiv:2401.10241 (ZB-H1)."""
    waits = (schedule.num_stages - 1) / schedule.num_chunks * (1 if schedule.split else 3)
    return waits / (3 * schedule.num_microbatches + waits)


def measure(schedule: schedules.Schedule, mesh) -> float:
    """Return the share of the step in which a stage does not work on its microbatches, for the fastest of REPEATS
    steps."""
    slept = []
    step, args = compiled_step(schedule, mesh, slept)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(step(*args))
        times.append(time.perf_counter() - started)
    ops = {op: slept.count(op) for op in "FBW"}
    expected = {op: REPEATS * n for op, n in sleeps(schedule).items()}
    assert ops == expected, f"{schedule.name} slept {ops}, its schedule says {expected}"
    return 1 - 3 * STAGE_S * schedule.num_microbatches / min(times)


def main(argv) -> int:
    words.Parser(__doc__).parse_args(argv)
    os.environ.setdefault("NPROC", "32")               # a sleeping callback occupies a thread of the CPU client's pool
    devices = local_devices.start(config.Run(mesh=dict(stage=STAGES, simulated_devices=STAGES)))
    mesh = jax.make_mesh((STAGES,), (executor.STAGE,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    rows, missed = [], []
    for name, chunks in CASES:
        schedule = schedules.make(name, STAGES, MICROBATCHES, chunks)
        modelled = simulate.simulate(schedule).bubble
        measured = measure(schedule, mesh)
        aim = AT_MOST.get(name, modelled + WITHIN)
        ok = abs(measured - modelled) <= WITHIN and measured <= aim
        missed += [] if ok else [name]
        rows.append(f"| {name} | {chunks} | {measured:.3f} | {modelled:.3f} | {aim:.2f} | {apart(schedule):.3f} |")
        print(rows[-1], file=sys.stderr)
    out = ["# The bubble that really happens", "",
           "Written by `python benchmarks/bubble.py`. The first lines of this script say what is measured and how.", "",
           machine.line("", "jax"), "",
           f"{STAGES} stages, {MICROBATCHES} microbatches. The forward (F), input gradient (B) and weight gradient (W) of a "
           f"stage sleep {STAGE_S * 1e3:.0f} ms each; those of a chunk sleep their share of it. Wall seconds, fastest "
           f"of {REPEATS} steps.", "",
           "| schedule | chunks | bubble measured | simulated | at most | a runtime with one program per stage |",
           "|---|---|---|---|---|---|", *rows, "",
           "Bubble: the share of the step in which a stage does not work on its microbatches. The last column is the "
           "closed form of Megatron-LM's order (for zero_bubble, that of ZB-H1), in which each stage continues as soon "
           "as its inputs have arrived."]
    text = "\n".join(out) + "\n"
    print(text)
    (ROOT / "benchmarks" / "bubble.md").write_text(text)
    if missed:
        print(f"error: bubble beyond its aim: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
