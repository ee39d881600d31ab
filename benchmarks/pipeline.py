"""python benchmarks/pipeline.py [RUN.toml] [--section.key value …]: every pipeline schedule compared with GPipe by
autodiff.

The baseline below is the simplest pipeline: a scan over ticks with a permute, differentiated by jax. It has the same
model and the same remat. Loss and gradients must agree before anything is timed. All pipelines run in one process and
are timed in turns of one step, so that other load on the machine affects all of them equally. Simulated devices share
the cores, so their time measures work: masked ticks cost as much as others, and no bubble is visible
(benchmarks/bubble.py measures it). On GPUs it is visible. If there are GPUs, the same command uses mesh.stage of them.
Writes benchmarks/pipeline.md.
"""
from __future__ import annotations

import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks import machine
from meshtrain import assembly, config, run_files
from meshtrain import devices as local_devices
from meshtrain.config import ConfigError
from meshtrain.cost.program import audit
from meshtrain.model import block, transformer
from meshtrain.names import NO_TARGET
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding import rules

REMATS = ("none", "full")
SCHEDULES = [(name, 2 if name in schedules.INTERLEAVED else 1) for name in schedules.NAMES]
BASELINE = "autodiff GPipe"
ROUNDS, COMPILES = 5, 3
AGREE = {"float32": 1e-4, "bfloat16": 3e-2}    # relative: loss, and the norm of the difference of gradients
FLOPS_AIM, COMPILE_AIM = 1.02, 2.0
NO_SLOWER = ("1f1b", "interleaved")


# --- the baseline ----------------------------------------------------------------------------------------------------

def autodiff_gpipe(made):
    """Return a function (params, batch) -> (grads, loss). Stage s computes microbatch t − s in tick t, and jax.grad
    derives the backward.

    Embedding and head are outside the loop. They process all microbatches at once, and the partitioner shards the
    vocabulary over the stages. The layers are the model's own, with the run's remat.
    """
    run, model, ex, mesh = made.run, made.model, made.program.step.ex, made.mesh
    num_stages, M = run.mesh.stage, run.training.microbatches
    depth = run.model.num_layers // num_stages

    def stages(stage, ws, x_MBTD, batch):
        stage = stage[0]

        def tick(x, t):
            def at(a, i) -> jax.Array:
                return lax.dynamic_index_in_dim(a, jnp.clip(i, 0, M - 1), 0, keepdims=False)
            inputs = model.inputs(jax.tree.map(lambda a: at(a, t - stage), batch))

            def layer(x, scanned):
                apply = block.build_block(ex, model.period[0], x.shape, False)
                return apply(scanned[0], x, inputs, scanned[1])[0], None
            x = jnp.where(stage == 0, at(x_MBTD, t), x)
            y, _ = lax.scan(layer, x, (ws, stage * depth + jnp.arange(depth)))
            return lax.ppermute(y, "stage", [(i, (i + 1) % num_stages) for i in range(num_stages)]), y
        _, y = lax.scan(tick, jnp.zeros_like(x_MBTD[0]), jnp.arange(M + num_stages - 1))
        return y[None, num_stages - 1:]                                    # valid on the last stage

    through = jax.shard_map(stages, mesh=mesh, axis_names={"stage"}, in_specs=(P("stage"), P("stage"), P(), P()),
                            out_specs=P("stage"), check_vma=False)

    def objective(p, batch):
        batch = jax.tree.map(lambda a: a[:, 0], batch)                     # [M, 1, B, …]
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)
        x = model.embed(ex, p, flat)
        y = through(jnp.arange(num_stages), p["layers"], x.reshape(M, -1, *x.shape[1:]), batch)[-1]
        total, _ = model.head_loss(ex, p, y.reshape(x.shape), flat["targets"], chunk=run.training.loss_chunk)
        return total / jnp.maximum(jnp.sum(batch["targets"] != NO_TARGET), 1)

    def step(p, batch):
        loss, grads = jax.value_and_grad(objective)(p, batch)
        return jax.tree.map(lambda axes, g: ex.layout.constrain("optimizer", g.astype(jnp.float32), axes),
                            made.program.step.state.axes, grads, is_leaf=rules.is_axes), loss
    return step


def no_baseline(run) -> list[str]:
    """Return what the run requests and the baseline does not support; empty if they can be compared."""
    m = run.model
    odd = {f"mesh.{axis}={getattr(run.mesh, axis)}": axis != "stage" and getattr(run.mesh, axis) != 1
           for axis in config.AXES}
    odd |= {"mesh.stage below 2": run.mesh.stage < 2, "dropout": m.embedding_dropout + m.residual_dropout > 0,
            "training.z_loss": run.training.z_loss > 0,
            "a number of layers that two chunks a stage do not divide": m.num_layers % (2 * run.mesh.stage)}
    return [what for what, asked in odd.items() if asked]


# --- measurements ----------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Contestant:
    """One pipeline: step(*args) -> (grads, loss). FLOPs are those of matmuls, of one device in a step."""
    name: str
    remat: str
    step: Callable
    args: tuple                            # (params, batch)
    compile_s: float
    compile_cpu_s: float
    temp_bytes: int
    flops: float                           # of the compiled program
    table_flops: float | None              # by the ticks of its schedule
    times: list = dataclasses.field(default_factory=list)
    cpu_times: list = dataclasses.field(default_factory=list)


def contestant(name: str, made, f, args, table_flops: float | None = None) -> Contestant:
    """Compile and audit f(*args)."""
    compile_s = compile_cpu_s = math.inf
    for _ in range(COMPILES):
        jax.clear_caches()                                                # do not reuse earlier traces
        clock, cpu = time.perf_counter(), time.process_time()
        step = jax.jit(f).lower(*args).compile(made.program.compiler_options)
        compile_s = min(compile_s, time.perf_counter() - clock)
        compile_cpu_s = min(compile_cpu_s, time.process_time() - cpu)
    program = audit.read(step.as_text(), made.mesh).require_known()
    assert not program.broken_permutes
    share = 1.0 if name == BASELINE else taken(made.choice.schedule)
    flops = sum(dot.flops * (share if dot.in_branch else 1) for dot in program.dots)
    return Contestant(name, made.run.training.remat, step, args, compile_s, compile_cpu_s,
                      step.memory_analysis().temp_size_in_bytes, flops, table_flops)


def taken(schedule) -> float:
    """Return the share of ticks in which a branch with matmuls is taken; the audit counts it in all ticks.

    The branch is the loss, in phases in which only some ticks compute one.
    """
    runs = [run for run in schedule.phases() if run.loss == "sometimes"]
    return sum(schedule.shared["loss_on"][run.start:run.stop].sum() for run in runs) / max(
        1, sum(r.stop - r.start for r in runs))


def tokens_of(run) -> int:
    return run.data.global_batch * run.data.seq_len // run.training.microbatches


def head_flops(run) -> int:
    """Return the FLOPs of the head for one microbatch: logits, dx and dw."""
    return 3 * 2 * tokens_of(run) * run.model.embed_dim * transformer.pad_vocab(run.model)


def table_flops(made, forward: float, backward: float) -> float:
    """Return the FLOPs of a device by its schedule. forward, backward: those of a layer for one microbatch."""
    run, schedule, layout = made.run, made.choice.schedule, made.layout
    executed, depth = schedule.executed, run.model.num_layers // (schedule.num_stages * schedule.num_chunks)
    weight = 2 * tokens_of(run) * sum(i.size for i in made.model.parameters()
                                      if i.role == "matrix") / run.model.num_layers
    more = (executed["W"] - executed["B"]) * weight if schedule.split else 0       # W has its own, fewer ticks
    head = head_flops(run) / layout.num_shards(layout.mesh_axes("params", "vocab"))
    return depth * (executed["F"] * forward + executed["B"] * backward + more) + executed["loss"] * head


def ideal_flops(made, forward: float, backward: float) -> float:
    """Return the FLOPs of a device if all share the work and nothing is repeated or masked. forward, backward: without
    remat."""
    run = made.run
    return run.training.microbatches * (run.model.num_layers * (forward + backward) + head_flops(run)) / run.mesh.stage


def layer_flops(made, params) -> tuple[float, float]:
    """Return the matmul FLOPs of one layer and microbatch under plain autodiff: (forward, backward with the repeated
    products of remat)."""
    run, model, ex = made.run, made.model, made.program.step.ex
    shape = (tokens_of(run) // run.data.seq_len, run.data.seq_len)
    inputs = jax.eval_shape(model.inputs, dict.fromkeys(("segments", "index", "positions"), jax.ShapeDtypeStruct(
        shape, jnp.int32)) | {"sequence": jax.ShapeDtypeStruct(shape[:1], jnp.int32)})
    w = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    x = jax.ShapeDtypeStruct((*shape, run.model.embed_dim), ex.numerics.dtype)

    def forward(w, x, inputs):
        apply = block.build_block(ex, model.period[0], x.shape, False)
        return jax.vjp(lambda w, x: apply(w, x, inputs, 0)[0], w, x)
    _, vjp = jax.eval_shape(forward, w, x, inputs)

    def count(f, *args) -> float:
        return sum(audit.read(jax.jit(f).lower(*args).compile().as_text(), made.mesh).flops.values())
    return count(forward, w, x, inputs), count(lambda vjp, dy: vjp(dy), vjp, x)


def timed(c: Contestant) -> None:
    cpu, clock = time.process_time(), time.perf_counter()
    jax.block_until_ready(c.step(*c.args))
    c.times.append(time.perf_counter() - clock)
    c.cpu_times.append(time.process_time() - cpu)


def ratio(a: Contestant, b: Contestant, of: str = "times") -> float:
    """Return the median over the rounds of a's time divided by b's time in the same round."""
    return statistics.median(x / y for x, y in zip(getattr(a, of), getattr(b, of)))


# --- the run ---------------------------------------------------------------------------------------------------------

def main(argv) -> int:
    if not argv or argv[0].startswith("-"):
        argv = [str(ROOT / "benchmarks" / "pipeline.toml"), *argv]
    try:
        run = run_files.load([*argv, "--run.compilation_cache", ""], __doc__)
        if lacking := no_baseline(run):
            raise ConfigError(f"the baseline has stages only, no {', '.join(lacking)}; take another run file, or drop "
                              f"it")
        os.environ.setdefault("NPROC", "32")
        gpus = local_devices.gpus_expected() and not run.mesh.simulated_devices
        run = run.replace(mesh={"simulated_devices": 0 if gpus else run.mesh.stage})
        devices = local_devices.start(run)
        if len(devices) < run.mesh.stage:
            raise ConfigError(f"mesh.stage={run.mesh.stage} needs as many devices, there are {len(devices)}; "
                              "use --mesh.stage 2, or --mesh.simulated_devices")
        text = measure(run, devices[:run.mesh.stage])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    (ROOT / "benchmarks" / "pipeline.md").write_text(text)
    return 0


def assembled(run, devices, remat: str, schedule: str, chunks: int) -> assembly.Assembly:
    return assembly.assemble(run.replace(training={"remat": remat}, pipeline={"schedule": schedule, "chunks": chunks}), devices)


def measure(run: config.Run, devices) -> str:
    """Return the page. Raises: SystemExit if a schedule and the baseline differ in loss or gradients."""
    contestants = []
    made = assembled(run, devices, "none", "1f1b", 1)
    with jax.set_mesh(made.mesh):
        params, batch = made.program.initialize().params, made.program.place(rows(run))
        ideal = ideal_flops(made, *layer_flops(made, params))
        for remat in REMATS:
            made = assembled(run, devices, remat, "1f1b", 1)
            layer = layer_flops(made, params)
            baseline = contestant(BASELINE, made, autodiff_gpipe(made), (params, batch))
            contestants.append(baseline)
            expected = baseline.step(*baseline.args)
            for schedule, chunks in SCHEDULES:
                made = assembled(run, devices, remat, schedule, chunks)

                def step(p, b, f=made.program.gradients):
                    return f(p, b, None)[:2]
                c = contestant(schedule, made, step, (params, batch), table_flops(made, *layer))
                agree(c, expected, AGREE[run.model.compute_dtype])
                contestants.append(c)
                print(f"{schedule}, remat {remat}: compiled in {c.compile_s:.1f} s", file=sys.stderr)
            del expected
        for number in range(ROUNDS):
            for c in contestants:
                timed(c)
            print(f"round {number + 1} of {ROUNDS}: {sum(c.times[-1] for c in contestants):.1f} s", file=sys.stderr)
    return report(run, made, devices, contestants, ideal)


def rows(run) -> dict:
    """Return one step of random tokens. Each sequence is one document."""
    d, rng = run.data, np.random.default_rng(0)
    shape = (d.global_batch, d.seq_len)
    tokens, index = rng.integers(0, run.model.vocab_size, shape), np.tile(np.arange(d.seq_len), (d.global_batch, 1))
    made = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segments": np.zeros(shape), "positions": index,
            "index": index, "sequence": np.arange(d.global_batch)}
    return {name: a.astype(np.int32) for name, a in made.items()}


def agree(c: Contestant, expected, within: float) -> None:
    grads, loss = c.step(*c.args)
    difference = optax.global_norm(jax.tree.map(jnp.subtract, grads, expected[0])) / optax.global_norm(expected[0])
    if not (difference <= within and abs(loss / expected[1] - 1) <= within):
        raise SystemExit(f"error: {c.name}, remat {c.remat}: loss {loss} against {expected[1]}, gradients differ by "
                         f"{difference:.1e} of their norm: not the same model")


def report(run: config.Run, made, devices, contestants, ideal) -> str:
    on_cpu = devices[0].platform == "cpu"
    kind = "simulated devices" if on_cpu else f"× {devices[0].device_kind}"
    m, M = run.model, run.training.microbatches
    base = {c.remat: c for c in contestants if c.name == BASELINE}
    cpu_ratio = partial(ratio, of="cpu_times")
    out = ["# Pipelines against autodiff GPipe", "",
           "Written by `python benchmarks/pipeline.py`. The first lines of this script say what is measured and how.", "",
           machine.line(f"{run.mesh.stage} {kind}", "jax", "jaxlib"), "",
           f"Model: {sum(info.size for info in made.model.parameters()):,} parameters (embed {m.embed_dim}, "
           f"{m.num_layers} layers, mlp {m.mlp_dim}, vocabulary {m.vocab_size}), {m.compute_dtype}; {run.mesh.stage} "
           f"stages, {M} microbatches of {run.data.global_batch // M} sequences of {run.data.seq_len} tokens; two "
           f"chunks if the schedule is interleaved.", "",
           "| remat | schedule | step, wall | wall ÷ autodiff | CPU ÷ autodiff | FLOPs ÷ ideal | ÷ schedule | temp "
           "memory | ÷ autodiff | compile, wall | CPU ÷ autodiff |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for c in contestants:
        b = base[c.remat]
        out.append(f"| {c.remat} | {c.name} | {statistics.median(c.times) * 1e3:.0f} ms | {ratio(c, b):.2f} | "
                   f"{f'{cpu_ratio(c, b):.2f}' if on_cpu else '–'} | {c.flops / ideal:.2f} | "
                   f"{f'{c.flops / c.table_flops:.3f}' if c.table_flops else '–'} | {c.temp_bytes / 2**20:.1f} MiB | "
                   f"{c.temp_bytes / b.temp_bytes:.2f} | {c.compile_s:.1f} s | {c.compile_cpu_s / b.compile_cpu_s:.2f} "
                   f"|")
    out += ["", "| aim | worst | where | |", "|---|---|---|---|"]
    ours = [c for c in contestants if c.name != BASELINE]
    named = [c for c in ours if c.name in NO_SLOWER]
    time_ratio = cpu_ratio if on_cpu else ratio
    aims = [(f"executed FLOPs ÷ schedule's ≤ {FLOPS_AIM}", FLOPS_AIM, ours, lambda c: c.flops / c.table_flops),
            (f"compile time ÷ autodiff's ≤ {COMPILE_AIM:g} (CPU seconds)", COMPILE_AIM, ours,
             lambda c: c.compile_cpu_s / base[c.remat].compile_cpu_s),
            (f"{' and '.join(NO_SLOWER)}: time ÷ autodiff's ≤ 1{' (CPU seconds)' if on_cpu else ''}", 1, named,
             lambda c: time_ratio(c, base[c.remat])),
            (f"{' and '.join(NO_SLOWER)}: temp memory ÷ autodiff's < 1", 1, named,
             lambda c: c.temp_bytes / base[c.remat].temp_bytes)]
    for aim, limit, among, of in aims:
        worst = max(among, key=of)
        met = "met" if of(worst) <= limit else "missed"
        out.append(f"| {aim} | {of(worst):.3f} | {worst.name}, remat {worst.remat} | {met} |")
    out += ["",
            "- FLOPs: matmuls that one device executes in the compiled program. Ideal: FLOPs without recomputation and "
            "masked ticks. Table: the number of ticks of the schedule × the FLOPs that plain autodiff needs for a "
            "layer's forward and backward with this remat.",
            "- Wall: seconds of the clock. CPU: seconds of all threads. Times are medians, and ratios are medians of "
            f"{ROUNDS} rounds. Compile: tracing and compiling, the fastest of {COMPILES}.",
            "- Simulated devices share the cores. So masked ticks cost time, and a bubble costs none. Other work on the "
            "machine affects CPU seconds less than wall seconds."]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
