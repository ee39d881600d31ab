"""Prices the steps of meshtrain, plain flax and MaxText for GPUs that are not here, by the same XLA and roofline.

Llama 3 8B over 8 or 64 H100. Without cuDNN's library no program with its attention can be compiled. Then kernels of
meshtrain stand in for it in every program of whole rows, priced at cuDNN's rates. peers.json keeps the seconds of each
part. A ratio to meshtrain that falls by FALL fails, and the part that moved is named.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.contenders import max_text, ours, plain_flax
from benchmarks.contenders.case import Case
from meshtrain import assembly, run_files
from meshtrain.cost.formulas import assumptions, flops
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.cost.program.roofline import Workload
from meshtrain.kernels import pallas, tiles
from meshtrain.kernels.engine import Mask
from meshtrain.model import transformer

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).resolve().parent / "peers.json"
FALL = 0.02         # of a ratio
OURS, PACKED, PLAIN, MAXTEXT, LOOKUP = (
    "meshtrain", "meshtrain, packed rows", "plain flax", "MaxText", "MaxText, embedding looked up")
PEERS = (PLAIN, MAXTEXT, LOOKUP)
# Number of GPUs -> microbatches and rows of a GPU: the fastest that fit. 65,536 tokens a GPU on 8, 8,192 on 64.
SHAPES = {8: dict.fromkeys((OURS, PACKED), (4, 2)) | dict.fromkeys(PEERS, (8, 1)),
          64: dict.fromkeys((OURS, PACKED, *PEERS), (1, 1))}


@dataclasses.dataclass(frozen=True)
class Priced:
    """A step on one GPU: seconds by part, PFLOP of matmuls and of attention, GiB that elementwise kernels move, that
    the GPU holds and that it sends; CPU seconds of the compilation."""
    seconds: dict[str, float]
    mfu: float
    matmul_pflop: float
    attention_pflop: float
    elementwise_gib: float
    held_gib: float
    fits: bool
    sent_gib: float
    cpu_s: float

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def case_of(microbatches: int, rows: int, packed: bool = False, **changed) -> Case:
    """Llama 3 8B, with some fields changed."""
    model = run_files.load([str(ROOT / "configs" / "llama3-8b.toml")]).model
    names = {field.name for field in dataclasses.fields(Case)} & set(type(model).model_fields)
    given = {name: getattr(model, name) for name in names} | {"seq_len": 8192, "dtype": model.compute_dtype}
    return Case(**given | {"microbatches": microbatches, "rows": rows, "packed": packed} | changed)


def count_flops(case: Case, count: int) -> float:
    """FLOPs of the model in a step on `count` devices, the same formula for every contender."""
    run = ours.run_of(case, count)
    table = transformer.build(run.model, run.lora).parameters()
    return case.tokens * count * flops.model_flops_per_token(table, run.model, case.seq_len)


# ---- programs --------------------------------------------------------------------------------------------------------


def has_cudnn() -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec("nvidia.cudnn") is not None
    return False


def missing(name: str) -> str:
    """Return why a program cannot be compiled here; "" if it can."""
    if name in (MAXTEXT, LOOKUP):
        if importlib.util.find_spec("maxtext") is None:
            return "maxtext is not installed (pip install maxtext==0.2.5, Python 3.12)"
        return "" if has_cudnn() else "its attention needs cuDNN's library (pip install nvidia-cudnn-cu13)"
    return ""


def stand_in(mesh, gpu: str):
    """Return attention of whole rows by meshtrain's Pallas kernels, for a program that splits the batch over `fsdp`."""
    sizes, mask = tiles.of(128, gpu), Mask(documents=False)
    assert sizes is not None
    kernel = pallas.engine(sizes)

    def segments(q):
        return jnp.zeros(q.shape[:2], jnp.int32)

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        o, lse = kernel.forward(q, k, v, segments(q), segments(k), mask)
        return o.astype(q.dtype), (q, k, v, o.astype(q.dtype), lse)

    def backward(kept, do):
        q, k, v, o, lse = kept
        grads = kernel.backward(q, k, v, segments(q), segments(k), o, lse, do, mask)
        return tuple(grad.astype(q.dtype) for grad in grads)
    attend.defvjp(forward, backward)
    split = jax.sharding.PartitionSpec("fsdp")
    return jax.shard_map(attend, mesh=mesh, in_specs=(split,) * 3, out_specs=split, check_vma=False)


def rates_of_stand_in(gpu: str) -> dict[str, float]:
    """Return assumptions by which the stand-in takes as long as cuDNN: its backward has seven products, cuDNN's has
    five."""
    forward, backward = (assumptions.TABLE[f"attention.cudnn_{way}"].of(gpu) for way in ("forward", "backward"))
    return {"attention.pallas_forward": forward, "attention.pallas_backward": backward * 7 / 5}


def compile_program(name: str, case: Case, devices: Sequence, gpu: str):
    """Return (executable, its mesh)."""
    if name in (OURS, PACKED):
        more = () if case.packed or has_cudnn() else ("--model.attention", "pallas")
        made = assembly.assemble(ours.run_of(case, len(devices), *more), devices)
        return assembly.compile_step(made, made.program.lower_step()), made.mesh
    if name == PLAIN:
        mesh = plain_flax.mesh_of(devices)
        attend = plain_flax.attend_by("cudnn") if has_cudnn() else stand_in(mesh, gpu)
        step, _, args = plain_flax.build(case, mesh, attend)
        return step.trace(*args).lower(lowering_platforms=("cuda",)).compile(), mesh
    step, args, kwargs, mesh, enter, _ = max_text.build(case, devices, "lookup" if name == LOOKUP else "")
    with enter():
        return step.trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).compile(), mesh


def price(name: str, topology: str, **changed) -> Priced:
    """Compile one program and read its roofline. changed: fields of the case. Raises: ValueError for a loop of unknown
    length or a matmul that was not counted, whose price would be too low."""
    gpu, count = gpu_compile.parse_topology(topology)
    case = case_of(*SHAPES.get(count, SHAPES[8])[name], packed=name == PACKED, **changed)
    begun = time.process_time()
    executable, mesh = compile_program(name, case, gpu_compile.topology(topology), gpu)
    cpu_s = time.process_time() - begun
    workload = Workload(case.tokens * count, count_flops(case, count), case.dtype, case.packed)
    assumed = {} if has_cudnn() else rates_of_stand_in(gpu)
    program = CompiledProgram(executable, mesh, workload, assumed)
    line = program.roofline
    assert line is not None
    if line.unknown_loops or line.uncounted:
        raise ValueError(f"{name}: not priced in full: {', '.join((*line.unknown_loops, *line.uncounted))}")
    held = program.memory_bytes["total"]
    seconds = {part: value * line.step_s for part, value in line.shares.items()}

    def total(part: str, field: str) -> float:
        return sum(getattr(kernel, field) for kernel in line.kernels if kernel.part == part)
    return Priced(seconds, line.mfu, total("matmul", "flops") / 1e15, total("attention", "flops") / 1e15,
                  total("elementwise", "hbm_bytes") / 2**30, held / 2**30, program.fits(held),
                  sum(row.sent_bytes for row in line.traffic) / 2**30, cpu_s)


# ---- the table and what is kept --------------------------------------------------------------------------------------


def tell(found: Mapping[str, Priced]) -> list[str]:
    """Return the rows of a table; ratios are to meshtrain's step of whole rows."""
    ours_s = found[OURS].step_s
    parts = list(dict.fromkeys(part for one in found.values() for part in one.seconds))
    rows = [("program", "s a step", "MFU", "÷ meshtrain", *(f"{part}, s" for part in parts), "PFLOP of matmuls",
             "GiB elementwise", "GiB a GPU", "GiB sent", "CPU s to compile")]
    rows.append(("---",) * len(rows[0]))
    for name, one in found.items():
        fits = "" if one.fits else " (does not fit)"
        rows.append((name, f"{one.step_s:.3g}", f"**{one.mfu:.1%}**", f"{one.step_s / ours_s:.3f}",
                     *(f"{one.seconds.get(part, 0):.3f}" for part in parts), f"{one.matmul_pflop:.3g}",
                     f"{one.elementwise_gib:,.0f}", f"{one.held_gib:.1f}{fits}", f"{one.sent_gib:.0f}",
                     f"{one.cpu_s:.0f}"))
    return ["| " + " | ".join(row) + " |" for row in rows]


def key_of(topology: str) -> str:
    """Return the key of kept ratios. It has what they depend on: the versions, and the attention that could be
    compiled."""
    version = ".".join(jax.__version__.split(".")[:2])
    return f"{topology}, jax {version}, attention by {'cuDNN' if has_cudnn() else 'the stand-in'}"


def read_kept() -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def keep(topology: str, found: Mapping[str, Priced]) -> None:
    """Write the seconds of each part to peers.json."""
    kept = read_kept() | {key_of(topology): {name: {part: round(value, 5) for part, value in one.seconds.items()}
                                             for name, one in found.items()}}
    lines = [f"  {json.dumps(key)}: {{\n" + ",\n".join(f"    {json.dumps(name)}: {json.dumps(parts)}"
                                                       for name, parts in programs.items()) + "\n  }"
             for key, programs in sorted(kept.items())]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare(kept: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each program whose ratio to meshtrain has fallen by FALL or more. kept, found: seconds by
    program and part."""
    lines = []
    for name in (name for name in (PACKED, *PEERS) if name in kept and name in found):
        pair = (name, OURS) if name != PACKED else (PLAIN, PACKED)
        if not all(one in kept and one in found for one in pair):
            continue
        peer, own = pair
        before, after = (sum(each[peer].values()) / sum(each[own].values()) for each in (kept, found))
        if after > before * (1 - FALL):
            continue
        moved = {(one, part): sign * (found[one].get(part, 0.0) - kept[one].get(part, 0.0)) / sum(kept[one].values())
                 for one, sign in ((own, 1), (peer, -1)) for part in {*kept[one], *found[one]}}
        program, part = max(moved, key=moved.__getitem__)
        lines.append(f"{peer} ÷ {own} fell from {before:.3f} to {after:.3f}: {part} of {program} went from "
                     f"{kept[program].get(part, 0.0):.3f} to {found[program].get(part, 0.0):.3f} s")
    return lines
