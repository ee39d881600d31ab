"""From a run file to everything a command needs: devices, mesh, layout, model and the jitted step.

Shared by the doors, which hold no logic of their own. This is the only place that sets flags or starts a jax backend,
and where the layout of a run is checked against its rule file and model, before anything is compiled.
"""
from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax

from meshtrain import config, processes
from meshtrain.config import ConfigError, Run
from meshtrain.cost import audit, hardware, memory, simulate
from meshtrain.layout import rules
from meshtrain.layout.mesh import AXES, MeshPlan
from meshtrain.layout.rules import Layout, Tensor
from meshtrain.model import attention, transformer
from meshtrain.parallel import context, schedule_check, schedules
from meshtrain.training import accumulate, state, step

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# The concurrency-optimized CPU scheduler deadlocks programs with independent collectives (2 of 4 ZeRO-3 steps did).
SCHEDULER_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"

# The run file's key that sets the size of each logical axis, for messages.
SIZE_KEYS = {"batch": "data.global_batch / training.microbatches", "seq": "data.seq_len", "residual_seq": "data.seq_len",
             "embed": "model.embed_dim", "heads": "model.num_heads", "kv_heads": "model.num_kv_heads",
             "head_dim": "model.head_dim", "mlp": "model.mlp_dim", "vocab": "model.vocab_size (padded to 256)",
             "layers": "model.num_layers"}


# assumption: the share of a GPU's memory that there is for the state, weights and what waits for its backward. JAX takes
# 3/4 unless told otherwise; what one op needs while it runs comes out of the same.
USABLE = 0.75


@dataclasses.dataclass(frozen=True, eq=False)
class Design:
    """A run as far as it can be put together without devices, all checked. choice: None where there are no stages."""
    layout: Layout
    model: transformer.Transformer
    attend: Callable
    choice: simulate.Choice | None
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly:
    """A run put together; nothing is compiled or initialized yet. `notes`: what the user should be told once."""
    run: Run
    plan: MeshPlan
    mesh: jax.sharding.Mesh
    layout: Layout
    model: transformer.Transformer
    program: step.Program
    choice: simulate.Choice | None
    notes: tuple[str, ...]


def start_devices(run: Run, cluster: processes.Cluster | None = None) -> Sequence[jax.Device]:
    """The devices of all processes of the run; starts the jax backend. simulated_devices > 0 means that many CPU devices.

    Raises: ConfigError where a backend is already up with other devices, or the processes cannot share them out;
    PeerError that names a process that does not come.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")    # an installed CUDA plugin reports at length that there is no GPU
    if run.run.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(run.run.compilation_cache))
    total = run.mesh.simulated_devices
    num_processes = cluster.count if cluster else 1
    if total % num_processes:
        raise ConfigError(f"mesh.simulated_devices={total} is the total over all processes and cannot be shared out among "
                          f"{num_processes}; use a multiple of {num_processes}")
    count = total // num_processes
    if count:
        os.environ["XLA_FLAGS"] = _with_flags(os.environ.get("XLA_FLAGS", ""), count)
        # A collective that waits for its peers blocks a thread of the CPU client's pool, and a device may have several
        # under way: with one thread a device (the default) all of them can end up waiting for one that cannot start.
        os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))
        jax.config.update("jax_platforms", "cpu")
    elif not gpus_expected():
        # Without this an installed CUDA plugin tries to start, fails with a page of warnings, and ends on the CPU.
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    if cluster:
        processes.start(cluster)
    devices = jax.devices()
    if total and len(devices) != total:
        raise ConfigError(f"mesh.simulated_devices={total}, but this process already runs jax with {len(devices)} "
                          f"devices; start a new process, or a notebook with XLA_FLAGS={DEVICE_COUNT_FLAG}={total}")
    return devices


def gpus_expected() -> bool:
    """Whether jax will find GPUs, told without starting it: a plugin, a device node and nothing that forbids it."""
    if os.environ.get("JAX_PLATFORMS", "cuda") not in ("", "cuda", "gpu", "cuda,cpu", "rocm"):
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    plugin = any(importlib.util.find_spec(f"jax_{name}") for name in
                 ("cuda12_plugin", "cuda13_plugin", "rocm60_plugin", "rocm7_plugin"))
    return bool(plugin) and any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/kfd"))


def on_gpus(run: Run, num_gpus: int) -> Run:
    """The quickstart where there are GPUs: all on fsdp, as many as divide the model's width and the batch."""
    sequences = run.data.global_batch // run.training.microbatches
    n = max(n for n in range(1, num_gpus + 1) if run.model.embed_dim % n == 0 and sequences % n == 0)
    if n < num_gpus and jax.process_count() > 1:
        raise ConfigError(f"{num_gpus} GPUs in {jax.process_count()} processes, and only {n} divide model.embed_dim="
                          f"{run.model.embed_dim} and the batch of {sequences}; start fewer processes, or give a mesh")
    sizes = {axis: 1 for axis in AXES} | {"fsdp": n, "simulated_devices": 0}
    return run.model_copy(update={"mesh": run.mesh.model_copy(update=sizes)})


def assemble(run: Run, devices: Sequence[jax.Device]) -> Assembly:
    """Checks the layout and puts the rooms together. Raises: ConfigError with every fault of mesh and rules."""
    plan = MeshPlan(config.mesh_sizes(run, len(devices)), run.mesh.placement)
    made = design(run, plan, devices[0].platform, hardware.from_device_kind(devices[0].device_kind))
    layout, model, choice = made.layout, made.model, made.choice
    mesh = plan.build(devices)
    spec = state.describe(model, run.optimizer, run.training.steps, layout, mesh)
    split = plan.sizes["context"] > 1
    order = context.METHODS[run.context.method].order(run.data.seq_len, plan.sizes["context"]) if split else None
    program = step.build(run, model, layout, mesh, made.attend, spec, order, choice and choice.table)
    return Assembly(run, plan, mesh, layout, model, program, choice, made.notes)


def design(run: Run, plan: MeshPlan, platform: str, gpu: hardware.Gpu | None) -> Design:
    """Checks the layout and chooses what the run leaves open, the same on every process and restart.

    platform: as jax calls it. gpu: what the hardware table has of the devices. Raises: as `assemble`.
    """
    try:
        loaded = rules.load(run.sharding.rules)
    except ValueError as error:
        raise ConfigError(*str(error).splitlines()) from None
    model = transformer.build(run.model)
    fitted, notes = fit_stages(run, loaded, plan.sizes)
    layout = Layout(fitted, plan.sizes)
    # First what context asks of a length: a length that follows the rules' remedy alone would be refused again.
    # Stages have checks of their own, and what they do not divide is no longer split over them.
    faults = context_problems(run, layout) or (stage_problems(run, loaded, plan.sizes) + rules.problems(
        fitted, {**plan.sizes, "stage": 1}, tensors(run, model), SIZE_KEYS))
    if faults:
        raise ConfigError(*faults)
    attend, note = choose_attention(run, plan.sizes, platform)
    choice = choose_schedule(run, plan, model, layout, attend, gpu)
    if choice:
        notes = [f"pipeline: {choice.why}", *table_notes(run, choice.table), *notes]
    for axis, section in (("stage", run.pipeline), ("context", run.context)):
        if plan.sizes[axis] == 1 and section != type(section)():
            notes.append(f"mesh.{axis}=1: [{type(section).__name__.lower()}] is not used")
    return Design(layout, model, attend, choice, tuple(filter(None, [note, *notes])))


def compile_step(made: Assembly):
    """The compiled training step of the run, checked where its stages take different branches.

    Raises: ConfigError where such a branch holds a permute: it waits for devices that never come, or takes the numbers
    of another branch's.
    """
    executable = made.program.compile()
    if made.program.table and made.program.table.family == "switch":
        program = audit.read(executable.as_text(), made.mesh)
        if program.branch_permutes:
            raise ConfigError('pipeline.schedule="zb_h1" takes different branches on the stages, where no permute may stand, '
                              f"and XLA put {len(program.branch_permutes)} there: {'; '.join(program.branch_permutes[:3])}; "
                              'use pipeline.schedule="zero_bubble", or mesh.tensor=1')
    return executable


def stage_problems(run: Run, loaded: rules.Rules, sizes) -> list[str]:
    """What stands against this pipeline; empty where there is none. Messages in the words of the run file."""
    num_stages, chunks, num_layers = sizes["stage"], run.pipeline.chunks, run.model.num_layers
    if num_stages == 1:
        return []
    faults = schedules.problems(schedule_name(run), num_stages, run.training.microbatches, chunks)
    if schedule_name(run) == "zb_h1" and sizes["context"] > 1:
        faults.append(f'pipeline.schedule="zb_h1" cannot stand beside mesh.context={sizes["context"]}: its stages take '
                      "different branches, where permutes over context would mix; use mesh.context=1, or "
                      'pipeline.schedule="zero_bubble"')
    pieces = num_stages * chunks
    if num_layers % pieces and run.pipeline.uneven == "refuse":
        faults.append(f"model.num_layers={num_layers} cannot be split over mesh.stage={num_stages} × pipeline.chunks={chunks}; "
                      f'use a multiple of {pieces}, e.g. {-(-num_layers // pieces) * pieces}, or pipeline.uneven="pad"')
    missing = [f"[{table}]" for table in ("params", "grads", "optimizer") if loaded.mesh_axes(table, "layers") != ("stage",)]
    if missing:
        faults.append(f'mesh.stage={num_stages} needs layers = "stage" in {", ".join(missing)} of {loaded.path}; take one of '
                      "the rule files *pipeline.toml, add the line, or set mesh.stage to 1")
    for table, entries in loaded.tables.items():
        faults += [f"{loaded.path} [{table}] {logical}: only layers and vocab can lie along 'stage'; drop it from the line"
                   for logical, axes in entries.items() if "stage" in axes and logical not in ("layers", "vocab")]
    split = {table: "stage" in loaded.mesh_axes(table, "vocab") for table in loaded.tables}
    if len(set(split.values())) > 1:
        without = [f"[{table}]" for table, on in split.items() if not on]
        faults.append(f"{loaded.path}: vocab lies along 'stage' in some tables and not in {', '.join(without)}; "
                      "name it in all four, or in none")
    return faults


def fit_stages(run: Run, loaded: rules.Rules, sizes) -> tuple[rules.Rules, list[str]]:
    """The rules with `stage` taken from what it does not divide, and what to tell of that.

    Padding with layers that do nothing happens inside the step: what is stored are the layers of the model, in order.
    """
    num_stages, num_layers, drop, notes = sizes["stage"], run.model.num_layers, set(), []
    if num_stages == 1:
        return loaded, notes
    vocab = transformer.padded_vocab(run.model)
    splits = [math.prod(sizes[a] for a in table["vocab"]) for table in loaded.tables.values()
              if "stage" in table.get("vocab", ())]
    if num_layers % num_stages:
        drop.add("layers")
        notes.append(f"pipeline: {num_layers} layers do not divide over mesh.stage={num_stages}: outside the pipeline's loop "
                     "every stage keeps the states of all of them")
    if schedule_name(run) == "zb_h1":
        drop.add("vocab")
        notes.append('pipeline: schedule="zb_h1" is experimental; the first stage has the whole embedding and the last the '
                     "whole head, whatever the rules say of vocab along 'stage', and every stage keeps the states of both")
    elif any(vocab % ways for ways in splits):
        drop.add("vocab")
        notes.append(f"pipeline: the vocabulary of {vocab} (padded) does not divide over stage and tensor: embedding and head "
                     "are split over tensor only, and every stage repeats their work")
    without = lambda axes: tuple(axis for axis in axes if axis != "stage")
    tables = {name: {k: without(axes) if k in drop else axes for k, axes in table.items()}
              for name, table in loaded.tables.items()}
    return dataclasses.replace(loaded, tables=tables), notes


def table_notes(run: Run, table: schedules.Table) -> list[str]:
    """What this table costs beside its bubble, where it costs anything."""
    num_stages, chunks, num_layers = table.num_stages, table.num_chunks, run.model.num_layers
    notes, extra = [], -num_layers % (num_stages * chunks)
    if extra:
        notes.append(f"pipeline: {num_layers} layers over mesh.stage={num_stages} × pipeline.chunks={chunks} are filled up with "
                     f"{extra} that do nothing; they cost time like the others")
    if chunks % num_stages and num_stages % chunks:
        notes.append(f"pipeline: neither of pipeline.chunks={chunks} and mesh.stage={num_stages} divides the other: once a step "
                     "every stage gathers the layers of all, as they lie outside of the loop, to pick its own")
    return notes


def schedule_name(run: Run) -> str:
    """The schedule to check; where "auto" has any with these chunks, it has this one."""
    if run.pipeline.schedule != "auto":
        return run.pipeline.schedule
    return "1f1b" if run.pipeline.chunks == 1 else "interleaved"


def choose_schedule(run: Run, plan: MeshPlan, model: transformer.Transformer, layout: Layout, attend: Callable,
                    gpu: hardware.Gpu | None) -> simulate.Choice | None:
    """The table of the run's schedule, checked; None where there are no stages. "auto" goes by modelled costs and bytes
    alone, and gives the layers no more padding than pipeline.chunks does."""
    p = plan.sizes["stage"]
    if p == 1:
        return None
    rows, mesh, budget_bytes = model.table(), plan.abstract(), None
    residual_ways = layout.ways(a for a in layout.mesh_axes("activations", "residual_seq") if a == "tensor")
    costs = simulate.modelled(run, rows, plan, gpu, residual_ways)
    if gpu and gpu.hbm_bytes:
        held = state.describe(model, run.optimizer, run.training.steps, layout, mesh)
        beside = [memory.placed_bytes(held.abstract.params, held.sharding.params),
                  memory.placed_bytes(held.abstract.opt_state, held.sharding.opt_state),
                  *memory.loop_bytes(memory.in_loop(rows, layout), run.model.compute_dtype).values()]
        budget_bytes = max(0, int(USABLE * gpu.hbm_bytes) - sum(beside))
    choice = simulate.of_run(run, costs, p, slot_bytes(run, model, layout, mesh, attend, residual_ways), budget_bytes)
    schedule_check.check(choice.table)
    return choice


def slot_bytes(run: Run, model: transformer.Transformer, layout: Layout, mesh, attend: Callable,
               residual_ways: int) -> simulate.SlotBytes:
    """What a microbatch leaves in a stage, from the parts of one layer: its heads and mlp are split over tensor.

    assumption: what is as wide as the residual stream is split like it where only the inputs of layers are kept (remat
    full) and else whole, as it is where a matmul reads it: an upper bound.
    """
    parts, x = accumulate.layer_parts(run, model, layout, mesh, attend)
    wide_ways = residual_ways if run.training.remat == "full" else 1

    def held(a, stream_ways):
        ways = stream_ways if a.shape[-1] in (1, run.model.embed_dim) else layout.sizes["tensor"]
        return jax.ShapeDtypeStruct((-(-math.prod(a.shape) // ways),), a.dtype)
    parts = dataclasses.replace(parts, **{name: [held(a, wide_ways) for a in getattr(parts, name)] for name in "rqz"})
    depth = -(-run.model.num_layers // layout.sizes["stage"])
    return simulate.SlotBytes.of(parts, held(x, residual_ways), chunks=depth)


def tensors(run: Run, model: transformer.Transformer) -> list[Tensor]:
    """Everything that the rules place, with full shapes: parameters in three tables, and the activations."""
    placed = [Tensor(table, info.name, info.shape, info.axes) for table in ("params", "grads", "optimizer")
              for info in model.table()]
    return placed + model.activations(run.data.global_batch // run.training.microbatches, run.data.seq_len)


def context_problems(run: Run, layout: Layout) -> list[str]:
    """What keeps the layout from splitting sequences over mesh.context, where that is larger than 1."""
    cp, rules_file = layout.sizes["context"], layout.rules.path
    if cp == 1:
        return []
    T, method, faults = run.data.seq_len, run.context.method, []
    seq, residual = (layout.mesh_axes("activations", axis) for axis in ("seq", "residual_seq"))
    if seq != ("context",):
        faults.append(f"{rules_file} [activations] seq = {list(seq)}: mesh.context={cp} splits every sequence; write "
                      "seq = \"context\", or set mesh.context to 1")
    elif residual[:1] != ("context",):
        faults.append(f"{rules_file} [activations] residual_seq = {list(residual)} does not begin with context, which splits "
                      "seq; write residual_seq = \"context\", or [\"context\", \"tensor\"]")
    chunks = cp if method == "ulysses" else 2 * cp
    parts = math.lcm(chunks, layout.ways(residual))
    if T % parts:
        near = " or ".join(str(n) for n in (T // parts * parts, -(-T // parts) * parts) if n)
        what = "mesh.context" if method == "ulysses" else "2 × mesh.context"
        also = f" and over {' × '.join(residual)}" if parts > chunks else ""
        faults.append(f"data.seq_len={T} cannot be split into {what} = {chunks} chunks of equal length{also}; use {near}")
    ways = layout.ways(layout.mesh_axes("activations", "heads"))
    if method == "ulysses" and run.model.num_heads // ways % cp:
        each = run.model.num_heads // ways
        faults.append(f"context.method=\"ulysses\" deals {each} heads (model.num_heads={run.model.num_heads} over tensor {ways}) "
                      f"out to mesh.context={cp}, which does not divide; use ring or gather, or a mesh.context that divides {each}")
    return faults


def choose_attention(run: Run, sizes: Mapping[str, int], platform: str) -> tuple[Callable, str]:
    """The attention of the run and what to tell of the choice: cuDNN on a GPU where no document mask stands in the way."""
    cp = sizes["context"]
    reasons = _against_cudnn(run, cp) if platform in ("gpu", "cuda") else None
    note = "" if reasons is None else "attention: cuDNN" if not reasons else (
        f"attention: blockwise XLA engine, because {'; '.join(reasons)}")
    if cp == 1:
        local = partial(attention.attend, attention.Local(attention.blockwise()))
        return attention.attend_cudnn if reasons == [] else local, note
    chunk = run.data.seq_len // (2 * cp)
    # Four blocks a chunk at least: the diagonal blocks, half of them masked, are then 1/8 of a causal square of two chunks.
    block = attention.BLOCK if run.context.method == "ulysses" else min(attention.BLOCK, max(32, -(-chunk // 4)))
    engine = attention.cudnn() if reasons == [] else attention.blockwise(block)
    return partial(attention.attend, context.Split(context.METHODS[run.context.method], engine)), note


def _against_cudnn(run: Run, cp: int) -> list[str]:
    """Why cuDNN's kernel cannot serve this run; empty where it can."""
    reasons = []
    if run.data.document_mask:
        reasons.append("cuDNN's kernel has no document mask (data.document_mask=true)")
    if run.model.compute_dtype != "bfloat16":
        reasons.append(f"cuDNN's kernel takes bfloat16, not model.compute_dtype={run.model.compute_dtype}")
    if run.model.head_dim % 8 or run.model.head_dim > 128:
        reasons.append(f"cuDNN's kernel needs a head_dim that is a multiple of 8 up to 128, not {run.model.head_dim}")
    if not importlib.util.find_spec("nvidia") or not _has_cudnn():
        reasons.append("the cuDNN library is not installed (extra 'gpu')")
    elif cp > 1 and attention.cudnn() is None:
        reasons.append("this version of jax does not offer cuDNN's blocks")
    return reasons


def _has_cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False


def _with_flags(flags: str, count: int) -> str:
    """XLA_FLAGS with the simulated device count in them; whatever else stands there stays."""
    flags = re.sub(rf"{DEVICE_COUNT_FLAG}=\d+", "", flags).split()
    if not any(flag.startswith(SCHEDULER_FLAG) for flag in flags):
        flags.append(f"{SCHEDULER_FLAG}=false")
    return " ".join(flags + [f"{DEVICE_COUNT_FLAG}={count}"])
