"""Measure a training step on the GPUs of this machine: speed, memory and kernels, compared with the predictions of
`inspect` for the same program.

The tokens are synthetic, in rows of documents with the lengths that the roofline assumes. A model that does not fit
loses layers, and the table says how many; the rest of its shape stays. Compilation is measured separately. After some
warm-up steps, each step is timed until its result is ready. The result is the median.
"""
from __future__ import annotations

import dataclasses
import fcntl
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_attention, grouped_tiles
from benchmarks import tiles as tile_timing
from benchmarks.gpu_record import ROOT, Item, table
from meshtrain import assembly, config, run_files
from meshtrain import hardware
from meshtrain.cost.formulas import assumptions, attention_pairs, flops
from meshtrain.cost.formulas import rates as formula_rates
from meshtrain.cost.program import audit, roofline
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.cost.program.work import PRODUCTS
from meshtrain.inspection import memory
from meshtrain.kernels import tiles
from meshtrain.kernels.engine import CAUSAL

GIB = 2**30


class Plan(NamedTuple):
    """A run file with overrides. rows: per device and microbatch. packed: if false, every row is one document."""
    name: str
    run_file: str
    rows: int
    packed: bool
    remat: str
    overrides: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.name}, {'packed' if self.packed else 'whole rows'}, remat {self.remat}"


EIGHT, ONE = ("8B", "configs/llama3-8b.toml", 1), ("1B", "configs/llama3.2-1b.toml", 4)
IN_FLOAT8 = ("--model.matmul_dtype", "float8")
IN_MOSAIC = ("--model.attention", "mosaic")
BY_ENGINE = (Plan(*EIGHT, True, "selective"), Plan("8B mosaic", *EIGHT[1:], True, "selective", IN_MOSAIC),
             Plan("8B MLP mosaic", *EIGHT[1:], True, "selective", (*IN_MOSAIC, "--model.mlp", "mosaic")))
PLANS = (*BY_ENGINE, Plan(*EIGHT, False, "selective"), Plan(*ONE, True, "selective"),
         Plan("8B float8", *EIGHT[1:], True, "selective", IN_FLOAT8),
         Plan("30B-A3B", "configs/qwen3-30b-a3b.toml", 4, True, "selective"),
         Plan("9B hybrid", "configs/qwen3.5-9b-continue.toml", 1, True, "selective"), Plan(*EIGHT, True, "full"),
         Plan(*ONE, False, "selective"), Plan(*EIGHT, True, "none"), Plan(*ONE, True, "none"))


class Sizes(NamedTuple):
    plans: tuple[Plan, ...] = PLANS
    microbatches: int = 4
    warm: int = 2
    steps: int = 5
    profiled: int = 2
    attention_widths: tuple[tuple[int, int], ...] = ((128, 128), (64, 64), (192, 128))
    tile_widths: tuple[int, ...] = (128, 64, 256)
    tile_minutes: float = 1.5           # per width
    tile_shape: tile_timing.Shape = tile_timing.PACKED
    # without CUDA graphs: their traces name no instruction
    to_profile: Mapping[str, object] = MappingProxyType({"xla_gpu_enable_command_buffer": ""})


# ---- runs ------------------------------------------------------------------------------------------------------------

# Share of the usable memory. From about .85 on, XLA recomputes by itself, so that another program would be measured.
MARGIN = .80
BESIDE = 5 * GIB    # the logits of a microbatch and their gradient in chunks, and the current layer


def run_of(plan: Plan, count: int, microbatches: int, layers: int = 0) -> config.Run:
    """layers: 0 keeps the number in the run file."""
    given = ["--mesh.fsdp", count, "--training.remat", plan.remat, "--data.document_mask", str(plan.packed).lower(),
             "--data.global_batch", count * plan.rows * microbatches, "--training.microbatches", microbatches,
             "--optimizer.warmup_steps", 20, *plan.overrides]
    given += ["--model.num_layers", layers] if layers else []
    return run_files.load([str(ROOT / plan.run_file), *map(str, given)])


def layers_that_fit(run: config.Run, devices) -> int:
    """Return the number of layers that fit in a device's memory with remat "none". So plans that differ only in remat
    have the same layers.

    Counts state and gradients by the rules, weights in the compute dtype, and what the backward of each layer reads.
    """
    gpu, m = hardware.from_device_kind(devices[0].device_kind), run.model
    if gpu is None or not gpu.hbm_bytes:
        return m.num_layers
    tokens = run.data.global_batch // run.training.microbatches * run.data.seq_len // len(devices)
    kept = 2 * (4 * m.embed_dim + 2 * (m.num_heads + m.num_kv_heads) * m.head_dim + 2 * m.mlp_dim) + 4 * m.num_heads

    def held(layers: int) -> int:
        made = assembly.assemble(run.model_copy(update={"model": m.model_copy(update={"num_layers": layers})}), devices)
        state = sum(value for value in memory.formula(made).values() if value)
        read = 2 * sum(info.size for info in made.model.parameters()) // (
            1 if made.program.step.deferred_axes else len(devices))
        return state + read + layers * kept * tokens + BESIDE
    base, two = held(1), held(2)
    return max(1, min(m.num_layers, 1 + int((MARGIN * hardware.usable_bytes(gpu) - base) // (two - base))))


def documents(rng, rows: int, length: int) -> np.ndarray:
    """Return bool [rows, length]: where documents start. Their lengths are log-normal, as the roofline assumes."""
    mean, sigma = (assumptions.TABLE[f"documents.{name}"].of("") for name in ("mean", "sigma"))
    size = rows * length
    lengths = np.maximum(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 20 * (1 + int(size / mean)))).astype(
        np.int64)
    ends = np.cumsum(lengths)
    starts = np.zeros(size, bool)
    starts[ends[ends < size]] = True
    starts = starts.reshape(rows, length)
    starts[:, 0] = True
    return starts


def visited(starts: np.ndarray) -> float:
    """Return the pairs that a block-skipping kernel visits, for rows with these document starts, as a share of
    length²/2."""
    rows, length = starts.shape
    begins = np.maximum.accumulate(np.where(starts, np.arange(length), 0), 1)
    block = min(attention_pairs.BLOCK, length)
    ends = np.minimum(np.arange(0, length, block) + block, length)
    first = begins[:, ::block] // block * block
    return float(((ends - first) * np.diff(ends, prepend=0)).sum() / rows / (length * length / 2))


def typical(rows: int, length: int, draws: int = 64) -> np.ndarray:
    """Return the draw of documents whose visited pairs are nearest to the roofline's expectation. A few rows have few
    documents, so that one long document can double the pairs."""
    expected = attention_pairs.row_share(length, *(assumptions.TABLE[f"documents.{name}"].of("")
                                                     for name in ("mean", "sigma")))
    drawn = (documents(np.random.default_rng(seed), rows, length) for seed in range(draws))
    return min(drawn, key=lambda starts: abs(visited(starts) - expected))


def rows(run: config.Run, seed: int = 0) -> dict:
    """Return a step's packed rows of random tokens."""
    rng, (B, T) = np.random.default_rng(seed), (run.data.global_batch, run.data.seq_len)
    index, starts = np.tile(np.arange(T), (B, 1)), typical(B, T)
    if not run.data.document_mask:
        starts[:, 1:] = False
    tokens, targets = rng.integers(0, run.model.vocab_size, (2, B, T))
    out = {"tokens": tokens, "targets": targets, "index": index, "sequence": np.arange(B),
           "segments": np.cumsum(starts, 1),
           "positions": index - np.maximum.accumulate(np.where(starts, index, 0), 1)}
    return {name: x.astype(np.int32) for name, x in out.items()}


# ---- measurements ----------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    times: tuple[float, ...]            # seconds of each step
    compile_s: float
    peak_bytes: int | None              # of the process so far; None if the device does not report it
    kernels: Mapping[str, float]        # instruction → seconds a step on the first device
    losses: tuple[float, ...]
    no_profile: str = ""                # why there is no profile


def compiled(plan: Plan, devices, sizes: Sizes):
    """Return (assembled run, compiled step, seconds of compilation). It has fewer layers if the compiled program does
    not fit."""
    run = run_of(plan, len(devices), sizes.microbatches)
    layers, gpu = layers_that_fit(run, devices), hardware.from_device_kind(devices[0].device_kind)
    while True:
        made = assembly.assemble(run_of(plan, len(devices), sizes.microbatches, layers), devices)
        started = time.perf_counter()
        step = assembly.compile_step(made, made.program.lower_step())
        seconds = time.perf_counter() - started
        fits = memory.measure(made,
                                      step)["total"] <= hardware.usable_bytes(gpu) if gpu and gpu.hbm_bytes else True
        if layers == 1 or fits and not audit.count_recomputed(step.as_text()):
            return made, step, seconds
        layers = max(1, layers * 7 // 8)


_turn = None


def take_turn(folder: Path) -> None:
    """Wait for other processes that time something for this folder. Keep the turn until this process ends and its
    memory is free. Compile within the turn, because XLA times matmuls while it compiles."""
    global _turn
    if _turn is None:
        folder.mkdir(parents=True, exist_ok=True)
        _turn = os.open(folder, os.O_RDONLY)
        fcntl.flock(_turn, fcntl.LOCK_EX)


def measure(made, step, to_profile, compile_s: float, sizes: Sizes, directory: Path) -> Measured:
    """Time steps. directory: for the profile of some more steps of the program `to_profile`, and for the program's
    text."""
    batch, state = made.program.place(rows(made.run)), assembly.initialize(made)
    times, losses = [], []
    for _ in range(sizes.warm + sizes.steps):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - started)
        losses.append(float(metrics["loss"]))
    stats = made.mesh.local_devices[0].memory_stats() or {}
    try:
        (directory / "program.txt").write_text(step.as_text())
        profile, error = profiled(made, to_profile, state, batch, sizes.profiled, directory), ""
    except Exception as failure:                # keep the timings
        profile, error = {}, f"{type(failure).__name__}: {failure}"
    return Measured(tuple(times[sizes.warm:]), compile_s, stats.get("peak_bytes_in_use"), profile, tuple(losses), error)


def profiled(made, step, state, batch, steps: int, directory: Path) -> dict[str, float]:
    """Return instruction → seconds a step on the first device. Writes the profile to `directory`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(directory, profiler_options=options)
    try:
        for _ in range(steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
    finally:
        jax.profiler.stop_trace()
    newest = max(directory.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return {name: s / steps for name, s in kernels(newest, made.mesh.devices.flat[0].platform).items()}


def kernels(path: Path, platform: str) -> Counter:
    """Return the seconds of each HLO instruction on the first device, from a trace."""
    seconds = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name != ("/host:CPU" if platform == "cpu" else "/device:GPU:0"):
            continue
        for line in plane.lines:
            if platform == "cpu" or line.name.startswith("Stream"):
                for event in line.events:
                    stats = dict(event.stats)
                    if stats.get("device_ordinal", 0) == 0 and (platform != "cpu" or "hlo_op" in stats):
                        seconds[str(stats.get("hlo_op", event.name))] += event.duration_ns / 1e9
    return seconds


# ---- results ---------------------------------------------------------------------------------------------------------

COSTLIEST = 14


def told(plan: Plan, made, step, measured: Measured) -> dict:
    """Return Item's results: a row of the table, and the kernels compared with the roofline. A loss that does not fall
    is wrong, because every step trains on the same rows."""
    run, count, gpu = made.run, made.mesh_spec.num_devices, hardware.from_device_kind(
        made.mesh.devices.flat[0].device_kind)
    step_s, tokens = statistics.median(measured.times), run.data.global_batch * run.data.seq_len
    needed = tokens * flops.model_flops_per_token(made.model.parameters(), run.model, run.data.seq_len)
    peak = gpu and gpu.peak(run.model.compute_dtype)
    held, line = memory.measure(made, step)["total"], CompiledProgram.of_run(made, step).roofline
    whole = run_of(plan, count, run.training.microbatches).model.num_layers

    def gib(value: float | None) -> str:
        return "–" if value is None else f"{value / GIB:.1f}"
    microbatches = run.training.microbatches
    row = {"layers": f"{run.model.num_layers} of {whole}", "tokens": f"{microbatches} × {tokens // microbatches:,}",
           "compile, s": f"{measured.compile_s:.0f}", "step, s": f"{step_s:.4g}",
           "fastest to slowest": f"{min(measured.times):.4g} to {max(measured.times):.4g}",
           "tokens/s a GPU": f"{tokens / step_s / count:,.0f}",
           "MFU": f"**{needed / step_s / peak / count:.1%}**" if peak else "–",
           "roofline, s": f"{line.step_s:.4g}" if line else "–", "its MFU": f"{line.mfu:.1%}" if line else "–",
           "peak, GiB": gib(measured.peak_bytes), "by inspect, GiB": gib(held)}
    notes = [f"- {note}" for note in made.notes]
    lines = [*notes, "", *beside_roofline(line, measured)] if line else [*notes, "", *costliest(measured)]
    first, last = measured.losses[0], measured.losses[-1]
    errors = {"errors": {"profile": measured.no_profile}} if measured.no_profile else {}
    return {"row": row, "lines": lines, "compared": {"the last loss by the first": (last / first, 1.0)},
            "times": list(measured.times), **errors}


def costliest(measured: Measured) -> list[str]:
    kernels = {name: s for name, s in measured.kernels.items() if not name.startswith(("while", "call", "conditional"))}
    ranked = sorted(kernels.items(), key=lambda pair: -pair[1])[:COSTLIEST]
    return table(("instruction", "ms a step"), [(f"`{name}`", f"{1e3 * s:.3f}") for name, s in ranked])


def beside_roofline(line: roofline.Roofline, measured: Measured) -> list[str]:
    """Return the parts of the step, and then the kernels that lose the most time against the roofline."""
    owner = {name: kernel for kernel in line.kernels for name in kernel.instructions}
    seconds, others = Counter(), Counter()
    for name, s in measured.kernels.items():
        if name in owner:
            seconds[owner[name]] += s
        else:
            others[name] += s
    by_part = Counter()
    for kernel, s in seconds.items():
        by_part[kernel.part] += s

    def ms(s: float) -> str:
        return f"{1e3 * s:,.1f}"
    parts = [(part, ms(by_part[part]), ms(line.parts.get(part, 0.0))) for part in roofline.PARTS]
    parts += [("collectives, copies and what has no instruction", ms(others.total()),
               ms(line.exposed_s + line.hidden_s))]
    ranked = sorted(line.kernels, key=lambda kernel: kernel.seconds - seconds[kernel])[:COSTLIEST]

    def ratio(kernel) -> str:
        return f"{seconds[kernel] / kernel.seconds:.2f}" if kernel.seconds else "–"
    rows = [(kernel.part, ms(seconds[kernel]), ms(kernel.seconds), ratio(kernel), kernel.bound,
             kernel.line, f"`{kernel.source[-60:]}`", f"`{kernel.name}`") for kernel in ranked]
    rest = [(f"`{name[:80]}`", ms(s)) for name, s in others.most_common(6)]
    return [*table(("part", "measured, ms", "roofline, ms"), parts), "", "The kernels that lose most:", "",
            *table(("part", "measured, ms", "roofline, ms", "ratio", "bound", "line", "from", "instruction"), rows),
            *(["", "Of what has no kernel in the roofline:", "", *table(("name", "ms a step"), rest)] if rest else [])]


def speed(plan: Plan, devices, sizes: Sizes, directory: Path) -> dict:
    directory.mkdir(parents=True, exist_ok=True)
    take_turn(directory.parent)
    made, step, seconds = compiled(plan, devices, sizes)
    options = made.program.compiler_options | sizes.to_profile
    to_profile = dataclasses.replace(made.program, compiler_options=options).compile() if sizes.to_profile else step
    return told(plan, made, step, measure(made, step, to_profile, seconds, sizes, directory))


# Rows of 8,192 tokens with the heads of Llama 3 8B.
ATTENTION_ROWS, ATTENTION_LENGTH, HEADS, KV_HEADS = 2, 8192, 32, 8


def timed_attention(engine: str, make, widths: tuple[int, int], packed: bool, gpu: hardware.Gpu) -> tuple[str, ...]:
    """Return (ms, ms by the roofline, share of the peak) of an engine's forward, and the same of its backward."""
    (B, T), (H, V), rng = (ATTENTION_ROWS, ATTENTION_LENGTH), widths, np.random.default_rng(0)
    starts = typical(B, T)
    starts[:, 1:] &= packed
    segments = jnp.asarray(np.cumsum(starts, 1), jnp.int32)

    def draw(heads: int, width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((B, T, heads, width), np.float32), jnp.bfloat16)
    q, k, v, do = draw(HEADS, H), draw(KV_HEADS, H), draw(KV_HEADS, V), draw(HEADS, V)
    mask = CAUSAL._replace(documents=packed)
    made = make()
    forward, backward = (jax.jit(partial(way, mask=mask)) for way in (made.forward, made.backward))
    given = q, k, v, segments, segments
    o, lse = forward(*given)
    prices = formula_rates.Rates(gpu, assumptions.Assumptions(gpu.name, {}))
    pairs = (visited(starts) if packed else 1.0) * T * T / 2 * B * HEADS
    row = []
    for name, function, args, of in (("forward", forward, given, ("forward",)),
                                     ("backward", backward, (*given, o.astype(q.dtype), lse, do), ("dq", "dkv"))):
        of = [PRODUCTS[kernel] for kernel in of] if engine != "cudnn" else [(1, 1) if name == "forward" else (3, 2)]
        flop = 2 * pairs * sum(keys * H + values * V for keys, values in of)
        wanted = prices.attention_s(formula_rates.AttentionKernel(engine, name, flop, T, H))
        taken = tile_timing.seconds(function, args)
        row += [f"{1e3 * taken:.3f}", f"{1e3 * wanted:.3f}", f"{flop / taken / gpu.peak('bfloat16'):.1%}"]
    return tuple(row)


def timed_engines(gpu: hardware.Gpu, sizes: Sizes, directory: Path) -> dict:
    """Return Item's results: a row for each engine, width of heads, and kind of rows."""
    take_turn(directory)
    rows, errors = [], {}
    for widths in sizes.attention_widths:
        of = gpu_attention.engines(widths, gpu.name, gpu_attention.Sizes(), False)
        for engine, packed in itertools.product(("pallas", "mosaic", "cudnn"), (True, False)):
            if engine == "cudnn" and packed:
                continue
            name = f"{engine}, {widths[0]} and {widths[1]}, {'packed' if packed else 'whole'}"
            try:
                rows += [(name, *timed_attention(engine, of[engine], widths, packed, gpu))] if engine in of else []
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
    header = ("engine, widths of keys and values, rows", *(f"{way}{what}" for way in ("forward", "backward")
                                                           for what in (", ms", " by the roofline", ", of the peak")))
    return {"lines": table(header, rows)} | ({"errors": errors} if errors else {})


def timed_tiles(width: int, gpu: str, sizes: Sizes) -> dict:
    chosen, said = tile_timing.timed(width, gpu, sizes.tile_minutes, sizes.tile_shape)
    used = tiles.of(width, gpu)
    return {"row": {"fastest": f"`{tuple(map(tuple, chosen))}`", "forward + dq + dkv": said,
                    "in use": "the same" if chosen == used else f"`{used and tuple(map(tuple, used))}`"}}


def timed_grouped(shape: grouped_tiles.Shape, seconds: float, directory: Path) -> dict:
    """Return Item's results: the fastest block of each kernel, compared with the block in use."""
    found = grouped_tiles.timed(shape, os.cpu_count() or 1, time.time() + seconds, partial(take_turn, directory))
    rows = []
    for name, (kernel, times) in found.items():
        if not times:           # the time was over
            continue
        used = getattr(tiles.GROUPED[2], kernel.kind)
        of = dict((block, taken) for taken, block in times)

        def rate(time_s: float) -> str:
            return f"{kernel.flops / time_s / 1e12:,.0f}"
        now = (f"{1e3 * of[used]:.3f}", rate(of[used])) if used in of else ("–", "–")
        rows.append((name, kernel.kind, *now, f"{1e3 * times[0][0]:.3f}", rate(times[0][0]), f"`{tuple(times[0][1])}`",
                     ", ".join(f"{tuple(block)} {1e3 * taken:.3f}" for taken, block in times[1:4])))
    header = "kernel", "block of", "in use, ms", "TFLOP/s", "fastest, ms", "TFLOP/s", "its block", "next"
    timings = {name: [(taken, list(block)) for taken, block in times] for name, (_, times) in found.items()}
    return {"lines": table(header, rows), "timings": timings}


def items(devices, directory: Path, sizes: Sizes = Sizes()) -> list[Item]:
    """Return the items, the most useful first. directory: the parent of the profiles."""
    out, gpu = [], hardware.from_device_kind(devices[0].device_kind)
    for plan in sizes.plans:
        if devices[0].platform != "cpu" and plan.overrides == IN_FLOAT8 and hardware.lacks_float8(gpu):
            continue
        if plan.overrides[:2] == IN_MOSAIC and not gpu_attention.has_mosaic(gpu):
            continue
        profile = directory / plan.key.replace(",", "").replace(" ", "-")
        out.append(Item(f"speed/{plan.key}", partial(speed, plan, devices, sizes, profile), 70, alone=True))
    if gpu and devices[0].platform != "cpu":
        out.append(Item("engines/forward and backward", partial(timed_engines, gpu, sizes, directory), 60, alone=True))
        out += [Item(f"tiles/experts as {shape.name}", partial(timed_grouped, shape, 120, directory), 60, alone=True)
                for shape in grouped_tiles.SHAPES]
    if gpu and tiles.of(128, gpu.name):
        seconds = 60 * sizes.tile_minutes + 20
        out += [Item(f"tiles/head_dim {width}", partial(timed_tiles, width, gpu.name, sizes), seconds, alone=True)
                for width in sizes.tile_widths]
    return out
