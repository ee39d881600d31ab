"""The pipelined step as 64 H100 would run it sends what its schedule and its rule file say, and nothing else.

Compiled without a GPU. As in test_gpu_program, expected bytes come from the parameter schedule, and everything that the
program sends is compared; here also from the schedule's schedule, tick by tick. What is below SMALL per array is not
looked at: norm scales and their gradients, token and segment ids, per-token statistics of the loss, and its scalars.
"""
import functools
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
import sampling
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import assembly, config
from meshtrain.cost.program import audit, compile, hlo
from meshtrain.kernels import mosaic, pallas
from meshtrain.parallel.pipeline import pipeline, schedules
from meshtrain.sharding.mesh import MeshSpec, pmax, psum

pytestmark = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}"
)

OURS = (pallas.NAME, mosaic.NAME)
RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
SMALL = 26 * 2**10  # bytes of an array; the smallest claimed one has 32 KiB, all norms of a stage and the last one 25.5
L, M, B, T, D, F = 16, 8, 128, 256, 384, 640  # B: sequences of a step; weights have no dims in common with activations
NORMS = 4 * D * (2 * L + 1)     # bytes of the float32 gradients of all norms
MODEL = dict(vocab_size=1280, embed_dim=D, num_layers=L, num_heads=8, num_kv_heads=4, head_dim=48, mlp_dim=F)
ZERO3 = "zero3"
TENSOR, FIVE = dict(stage=4, fsdp=4, tensor=4), dict(stage=2, data=2, fsdp=2, tensor=4, context=2)
CASES = [(ZERO3, TENSOR, "interleaved_zero_bubble"), (ZERO3, FIVE, "1f1b")]
SLOW = [
    (ZERO3, dict(stage=4, fsdp=16), "1f1b"), ("ddp", dict(stage=4, fsdp=16), "1f1b"),
    ("zero1", dict(stage=4, fsdp=16), "zero_bubble"), (ZERO3, TENSOR, "1f1b"),
    (ZERO3, dict(stage=4, fsdp=16), "interleaved_zero_bubble"),
    (ZERO3, FIVE, "interleaved_zero_bubble"),
]  # fmt: skip


class Step(NamedTuple):
    made: assembly.Assembly
    schedule: schedules.Schedule
    text: str
    program: audit.ProgramAudit

    @property
    def depth(self) -> int:
        return L // (self.schedule.num_stages * self.schedule.num_chunks)

    def ticks(self, what: str) -> int:
        """How often the ends of the model work: "embed", "loss" or "embed_grad"; where no condition asks, in every
        tick, masked."""
        on = self.schedule.shared[f"{what}_on"]
        often = {"never": lambda ticks: 0, "sometimes": lambda ticks: int(on[ticks].sum()),
                 "always": lambda ticks: len(on[ticks])}
        return sum(often[getattr(run, what)](slice(run.start, run.stop))
                   for run in pipeline._phases(self.schedule, True))


@functools.cache
def gpu_step(rule: str, mesh: tuple, schedule: str, dtype: str = "bfloat16", matmul_dtype: str = "auto") -> Step:
    run = config.Run(
        mesh=dict(mesh), sharding=dict(rules=str(RULES / f"{rule}.toml")),
        model=MODEL | dict(compute_dtype=dtype, matmul_dtype=matmul_dtype),
        data=dict(seq_len=T, global_batch=B), training=dict(microbatches=M, remat="full", loss_chunk=1024),
        pipeline=dict(schedule=schedule, chunks=2 if schedule in schedules.INTERLEAVED else 1),
    )  # fmt: skip
    made = assembly.assemble(run, compile.topology("h100:64"))
    schedule = schedules.make(schedule, run.mesh.stage, M, run.pipeline.chunks)
    text = made.program.compile().as_text()
    return Step(made, schedule, text, audit.read(text, made.mesh))


def every_case(test):
    name = lambda rule, mesh, schedule: f"{rule}-" + "".join(f"{axis}{n}-" for axis, n in mesh.items()) + schedule
    params = [pytest.param((rule, tuple(mesh.items()), schedule), id=name(rule, mesh, schedule), marks=marks)
              for cases, marks in ((CASES, ()), (SLOW, sampling.GRID)) for rule, mesh, schedule in cases]
    return pytest.mark.parametrize("case", params)(test)


def traffic(step: Step) -> dict:
    """(kind, axes, dtype) -> (arrays, payload bytes) per step; a layer on its way to its stage: kind "relayout"."""
    out = defaultdict(lambda: [0, 0])
    for c in step.program.collectives:
        # one array of them or several
        norms = (c.kind, c.axes) == ("all-reduce", ("tensor",)) and c.payload_bytes <= NORMS
        if c.payload_bytes / c.count > SMALL and not norms:
            moved = c.axes[0].startswith("stage") and c.source.endswith("reshape")
            key = ("relayout", ("stage",), c.dtype) if moved else (c.kind, c.axes, c.dtype)
            out[key][0] += c.count
            out[key][1] += c.payload_bytes
    return {key: tuple(value) for key, value in out.items()}


def held(step: Step) -> dict:
    """Numbers of elements of one stage and tensor share: of the layers, and of everything."""
    schedule, sizes = step.made.model.parameters(), step.made.mesh_spec.sizes
    count = lambda *roles: sum(info.size for info in schedule if info.role in roles) // sizes["stage"] // sizes[
        "tensor"]
    return {"layers": count("matrix"), "all": count("matrix", "embedding", "head")}


def expected(rule: str, step: Step) -> dict:
    """(kind, axes, dtype) -> (arrays or None where XLA may group them, payload bytes) per step."""
    sizes, n, depth = step.made.mesh_spec.sizes, held(step), step.depth
    forward, backward = (depth * step.schedule.executed[kind] for kind in "FB")       # visits of a layer
    embed, loss, embed_grad = map(step.ticks, ("embed", "loss", "embed_grad"))
    weights = tuple(axis for axis in ("data", "fsdp", "context") if sizes[axis] > 1)
    tokens = B // M * T // (sizes["data"] * sizes["fsdp"] * sizes["context"])
    x_bytes, num_shards = 2 * tokens * D, sizes["tensor"]                                # the residual stream, bf16
    want = {
        # Every F and every B sends once. A stage that is idle sends as well: nothing diverges.
        ("collective-permute", ("stage",), "bf16"): (step.schedule.executed["F"] + step.schedule.executed["B"],
                                                     (step.schedule.executed["F"] + step.schedule.executed["B"]) * x_bytes // num_shards),
        # All stages get the last one's output and the first one's cotangent, and sum their parts of the vocabulary: the
        # embedding's rows and the loss's dx. Each is a tensor share of the residual stream, in its own dtype.
        ("all-reduce", ("stage",), "bf16"): (None, (embed + 2 * loss + embed_grad) * x_bytes // num_shards),
    }
    if rule == "ddp":
        want["all-reduce", weights, "f32"] = (None, 4 * n["all"])
    else:
        want["reduce-scatter", weights, "f32"] = (None, 4 * n["all"])
    if rule != "ddp":
        want["all-gather", weights, "bf16"] = (9, 2 * n["all"])
    if step.schedule.num_chunks > 1:
        # Of stages · chunks, chunk c is stored on stage c // chunks and worked on by stage c % stages: weights travel
        # in bf16 before the gather, gradients after the reduce-scatter. Where stages divides chunks, every stage holds
        # as many for each of them: one all-to-all. Where chunks divides stages, it holds some for its residue alone: an
        # all-to-all among as many stages as there are chunks, and a permute, each of the whole shard.
        stages, chunks = step.schedule.num_stages, step.schedule.num_chunks
        assert chunks % stages == 0 or stages % chunks == 0
        moves = (1 if chunks % stages == 0 else 2) * n["layers"] // math.prod(sizes[axis] for axis in weights)
        want["relayout", ("stage",), "bf16"] = (None, 2 * moves)
        want["relayout", ("stage",), "f32"] = (None, 4 * moves)
    if num_shards > 1:
        # A layer's as without a pipeline: 2 gathers and 2 scatters in F; in B again 2 and 1, and 2 and 2 of its own. As
        # there, too: the embedding's scatter and its cotangent's gather, the head's gather of x and scatter of dx.
        want["all-gather", ("tensor",), "bf16"] = (None, (2 * forward + 4 * backward + loss + embed_grad) * x_bytes)
        want["reduce-scatter", ("tensor",), "bf16"] = (None, (2 * forward + 3 * backward + embed + loss) * x_bytes)
    if (cp := sizes["context"]) > 1:
        # The ring: cp-1 hops of K and V each way, cp of dK and dV. Remat keeps attention's results, so no ring runs
        # twice.
        kv = tokens * MODEL["num_kv_heads"] * MODEL["head_dim"] // num_shards
        hops, sums = 2 * (cp - 1) * (forward + backward), 2 * cp * backward
        # XLA may send the last hop of dK and dV, of one of them or none, in bf16.
        last = sums - traffic(step)["collective-permute", ("context",), "f32"][0]
        assert last in (0, backward, 2 * backward)
        want["collective-permute", ("context",), "bf16"] = (hops + last, (hops + last) * 2 * kv)
        want["collective-permute", ("context",), "f32"] = (sums - last, (sums - last) * 4 * kv)
    return want


def check_traffic(got: dict, want: dict):
    assert set(got) == set(want)
    for key, (count, payload) in want.items():
        assert got[key][1] == pytest.approx(payload, rel=0.02), key
        if count:
            assert got[key][0] == count, key


@every_case
def test_it_sends_what_the_table_and_the_rules_say_and_nothing_else(case):
    step = gpu_step(*case)
    check_traffic(traffic(step), expected(case[0], step))
    assert not step.program.unknown_loops


@every_case
def test_nothing_crosses_the_batch_inside_the_loop(case):
    """Not one number: weights come before it, gradients leave behind it, and so does the loss."""
    step = gpu_step(*case)
    batch = {axis for axis in ("data", "fsdp", "context") if step.made.mesh_spec.sizes[axis] > 1}
    over = [c for c in step.program.collectives if batch & set(c.axes)]
    assert over and not [c for c in over if c.trips > 1 and (c.kind, c.axes) != ("collective-permute", ("context",))]


@every_case
def test_slots_are_written_and_read_in_place_and_layers_share_one_loop(case):
    """A copy of what all microbatches under way have saved, once a layer, would take longer than the layer. F and B of
    a tick stand in one loop over layers: as many loops hold attention's kernels as there are phases."""
    step = gpu_step(*case)
    module, schedule = hlo.parse(step.text), step.schedule
    saved = {(schedule.slots[name], step.depth) for name in ("R", "Q", "Z") if name in schedule.slots}
    copies, _ = hlo.walk(module, lambda ins: ins.op.startswith("copy") and hlo.shapes(ins.type_text)[0][1][:2] in saved)
    assert not [visit.instruction.name for visit in copies if visit.trips > 1]
    kernels, _ = hlo.walk(module, lambda ins: ins.op == "custom-call" and any(name in ins.attrs for name in OURS))
    assert len({visit.computation for visit in kernels}) == len(
        [p for p in schedule.phases() if set(p.kinds) & {"F", "B"}])


@every_case
def test_matmuls_run_in_bf16_and_no_permute_misses_a_device(case):
    program = gpu_step(*case).program
    assert set(program.flops) == {"bf16"}
    # attention's, and no others
    assert program.uncounted and all(any(name in kernel for name in OURS) for kernel in program.uncounted)
    assert not program.broken_permutes and not program.partial_permutes


def layers_held(text: str, weight: tuple[int, ...]) -> int:
    """The most layers' worth of a weight of this shape in one array that a loop carries or a collective moves.

    Dims may stand in any order. Other arrays are not looked at: a matmul's split partial sums look like a stack.
    """
    most = 0
    for line in text.splitlines():
        if re.search(r" (while|all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(", line):
            for dims in re.findall(r"\b(?:f32|bf16)\[([\d,]+)\]", line):
                rest = [int(n) for n in dims.split(",")]
                if all(rest.count(n) >= weight.count(n) for n in weight):
                    most = max(most, math.prod(rest) // math.prod(weight))
    return most


@every_case
def test_a_device_holds_the_layers_of_its_own_stage_only(case):
    """No [stages, …] array of weights or gradients: differentiating through a shard_map over stages makes one."""
    step = gpu_step(*case)
    sizes = step.made.mesh_spec.sizes
    assert layers_held(step.text, (D, F // sizes["tensor"])) == L // sizes["stage"]
    assert layers_held(step.text, (D, 8 // sizes["tensor"], 48)) == L // sizes["stage"]


def test_a_stack_of_all_stages_would_be_seen():
    text = "%loop = (s32[], f32[4,4,384,160]{3,2,1,0}, bf16[4,160,384]{2,1,0}) while(%start), body=%region_1"
    assert layers_held(text, (D, F // 4)) == 16


@pytest.mark.parametrize("gpu, dtype", [(True, "bf16"), (False, "f32")], ids=["gpu", "cpu"])
@pytest.mark.parametrize("reduced", [psum, pmax], ids=["sum", "largest"])
def test_a_reduction_by_hand_is_made_in_the_dtype_of_its_platform_without_a_condition(gpu, dtype, reduced):
    mesh = MeshSpec(dict(stage=2, tensor=2)).build(compile.topology("h100:4") if gpu else jax.devices())
    add = jax.shard_map(lambda x: reduced(x, "stage"), mesh=mesh, axis_names={"stage"},
                        in_specs=P("stage"), out_specs=P(),
                        check_vma=False)  # fmt: skip
    x = jax.ShapeDtypeStruct((2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("stage", "tensor")))
    text = jax.jit(add).lower(x).compile().as_text()
    assert [c.dtype for c in audit.read(text, mesh).collectives if c.axes == ("stage",)] == [dtype]
    assert "conditional(" not in text


@pytest.mark.long
def test_weights_that_travel_in_float32_are_rejected():
    step = gpu_step(ZERO3, (("stage", 4), ("fsdp", 16)), "1f1b", dtype="float32")
    assert set(step.program.flops) == {"f32"}
    with pytest.raises(AssertionError):
        check_traffic(traffic(step), expected(ZERO3, step))


@pytest.mark.long
@pytest.mark.cell
@pytest.mark.parametrize("rule, mesh, schedule", CASES)
def test_projections_in_float8_are_float8_matmuls_in_every_slot(rule, mesh, schedule):
    """And their scales are numbers that the devices of a stage share."""
    step = gpu_step(rule, tuple(mesh.items()), schedule, matmul_dtype="float8")
    in_float8 = [dot for dot in step.program.dots if dot.dtype.startswith("f8")]
    assert step.text.count('custom_call_target="__cublas$lt$matmul$f8"') == len(in_float8) > 0
    plain = gpu_step(rule, tuple(mesh.items()), schedule).program
    heads = sum(dot.flops for dot in plain.dots if "nrs" in dot.source)
    assert step.program.flops["bf16"] == heads and sum(step.program.flops.values()) == sum(plain.flops.values())
    scales = [c for c in step.program.collectives if c.dtype == "bf16" and c.payload_bytes < 64 * c.trips]
    assert scales and {c.kind for c in scales} == {"all-reduce"} and not any("stage" in c.axes for c in scales)
