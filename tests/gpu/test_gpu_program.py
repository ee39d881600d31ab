"""The training step as 64 H100 would run it has the collectives of each strategy's accepted form, and no others.

Compiled without a GPU. Expected bytes and counts come from the parameter table: per layer and microbatch, combined
tuples taken apart. XLA groups and splits operands differently from version to version, so counts are claimed for
jax 0.10 and bytes for every version. What is below SMALL per step is not looked at: norm scales and their gradients,
token ids, the loss's scalars and per-token statistics.
"""
import functools
from collections import defaultdict
from pathlib import Path

import jax
import pytest
import sampling

from meshtrain import assembly, config
from meshtrain.cost.program import audit, compile, hlo, memory, roofline
from meshtrain.inspection import unexpected
from meshtrain.kernels import mosaic, pallas
from meshtrain.model import parts
from meshtrain.parallel.pipeline import layer_vjp

pytestmark = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}"
)

RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
OURS = (pallas.NAME, mosaic.NAME)
EXACT_COUNTS = jax.__version__.startswith("0.10.")
SMALL = 2**20  # bytes per step; the smallest claimed payload is 4 MiB
L, M, B, T, D = 4, 4, 256, 512, 1024  # B: sequences of a step
MODEL = dict(vocab_size=8192, embed_dim=D, num_layers=L, num_heads=16, num_kv_heads=8, head_dim=64, mlp_dim=2048)
PROJECTIONS = 7  # query, key, value, out, gate, up, down
MESHES = {
    "ddp": dict(fsdp=64), "zero1": dict(fsdp=64), "zero2": dict(fsdp=64), "zero3": dict(fsdp=64),
    "hsdp": dict(data=8, fsdp=8), "hsdp_zero1": dict(data=8, fsdp=8), "ddp, tensor": dict(data=16, tensor=4),
    "zero3, tensor": dict(data=2, fsdp=8, tensor=4),
}  # fmt: skip
# What these promise the others promise apart: zero1 and zero3, all-reduces over data, zero3 with tensor.
TRIED = [pytest.param(rule, marks=sampling.GRID) if rule in ("zero2", "hsdp", "ddp, tensor") else rule
         for rule in MESHES]


def gpu_step(rule: str, remat: str = "full", dtype: str = "bfloat16", matmul_dtype: str = "auto"):
    """(assembled run, audit of its step for 64 H100)."""
    return audited(rule, remat, dtype, matmul_dtype)


def gpu_program(rule: str, remat: str = "full", dtype: str = "bfloat16", matmul_dtype: str = "auto"):
    """(assembled run, its compiled step for 64 H100)."""
    return compiled(rule, remat, dtype, matmul_dtype)


# Kept by all four values: a default that a call leaves out would be another key, and the program compiled again.
@functools.cache
def audited(*case: str):
    made, executable = compiled(*case)
    return made, audit.read(executable.as_text(), made.mesh)


@functools.cache
def compiled(rule: str, remat: str, dtype: str, matmul_dtype: str):
    run = config.Run(
        mesh=MESHES[rule], sharding=dict(rules=str(RULES / f"{rule.partition(',')[0]}.toml")),
        model=MODEL | dict(compute_dtype=dtype, matmul_dtype=matmul_dtype),
        data=dict(seq_len=T, global_batch=B), training=dict(microbatches=M, remat=remat, loss_chunk=1024),
    )  # fmt: skip
    made = assembly.assemble(run, compile.topology("h100:64"))
    return made, made.program.compile()


def traffic(program: audit.ProgramAudit) -> dict:
    """(kind, axes, dtype) -> (operands, payload bytes) per step; rows below SMALL per instruction or operand are left
    out."""
    out = defaultdict(lambda: [0, 0])
    for c in program.collectives:
        if c.payload_bytes >= SMALL:
            out[c.kind, c.axes, c.dtype][0] += c.count
            out[c.kind, c.axes, c.dtype][1] += c.payload_bytes
    return {key: tuple(value) for key, value in out.items()}


def sizes(made) -> dict:
    """Numbers of elements on a device of one layer's matrices, of the embedding, the head and everything; / tensor."""
    table, num_shards = made.model.parameters(), made.mesh_spec.sizes["tensor"]
    count = lambda role: sum(info.size for info in table if info.role == role)
    split = {role: count(role) // num_shards for role in ("matrix", "embedding", "head")}
    return {"layer": split["matrix"] // L, "embedding": split["embedding"], "head": split["head"],
            "all": sum(split.values()) + count("norm")}  # fmt: skip


def expected(rule: str, made) -> dict:
    """(kind, axes, dtype) -> (operands or None where XLA may group them, payload bytes) per step."""
    n, plan = sizes(made), made.mesh_spec.sizes
    leaves = PROJECTIONS + 2  # in the layers, stacked: projections and norms
    every_leaf = leaves + 2  # and embedding and head; the final norm's is too small to be looked at
    x_bytes = B // M // (plan["data"] * plan["fsdp"]) * T * D * 2  # a microbatch's residual stream, bf16
    weights = tuple(axis for axis in ("data", "fsdp") if plan[axis] > 1)
    want = {}
    if rule == "ddp":
        want["all-reduce", weights, "f32"] = (None, 4 * n["all"])  # XLA flattens small operands into one
    if rule == "zero1":
        want["reduce-scatter", weights, "f32"] = (every_leaf, 4 * n["all"])
    if rule in ("zero1", "zero2"):
        # Stored as [optimizer] says, read whole: one gather per step, the norms' (float32) too small to be looked at.
        want["all-gather", weights, "bf16"] = (PROJECTIONS + 2, 2 * (L * n["layer"] + n["embedding"] + n["head"]))
    if rule == "zero2":
        want["reduce-scatter", weights, "f32"] = (None, 4 * M * (L * n["layer"] + n["embedding"] + n["head"]))
    if rule in ("zero3", "hsdp", "hsdp_zero1"):
        # The embedding is not reduced: its columns lie whole on one device. Two all-to-alls carry its rows.
        want["all-to-all", ("fsdp",), "bf16"] = (2 * M, 2 * M * B // M // plan["data"] // plan["fsdp"] * T * D * 2)
        want["reduce-scatter", ("fsdp",), "f32"] = (None, 4 * M * (L * n["layer"] + n["head"]))
        want["all-gather", ("fsdp",), "bf16"] = (
            M * (2 * L * PROJECTIONS + 1), 2 * M * (2 * L * n["layer"] + n["head"]))
    if rule == "hsdp":
        want["all-reduce", ("data",), "f32"] = (None, 4 * n["all"] // plan["fsdp"])
    if rule == "hsdp_zero1":
        want["reduce-scatter", ("data",), "f32"] = (every_leaf, 4 * n["all"] // plan["fsdp"])
        want["all-gather", ("data",), "bf16"] = (
            PROJECTIONS + 2, 2 * (L * n["layer"] + n["embedding"] + n["head"]) // plan["fsdp"])
    if rule == "ddp, tensor":
        want["all-reduce", ("data",), "f32"] = (None, 4 * n["all"])
    if rule == "zero3, tensor":
        ends = n["embedding"] + n["head"]
        want["reduce-scatter", weights, "f32"] = (None, 4 * M * (L * n["layer"] + ends))
        want["all-gather", weights, "bf16"] = (M * (2 * L * PROJECTIONS + 2), 2 * M * (2 * L * n["layer"] + ends))
    if plan["tensor"] > 1:
        # A layer: 2 gathers and 2 scatters forward, 2 and 1 again for the recomputation (the last scatter feeds
        # nothing), 2 and 2 backward. Beside them the embedding's scatter forward and gather backward, and the head's
        # gather of x and scatter of dx, in chunks.
        want["all-gather", ("tensor",), "bf16"] = (None, M * (6 * L + 2) * x_bytes)
        want["reduce-scatter", ("tensor",), "bf16"] = (None, M * (5 * L + 2) * x_bytes)
    return want


def check_traffic(got: dict, want: dict):
    assert set(got) == set(want)
    for key, (count, payload) in want.items():
        assert got[key][1] == pytest.approx(payload, rel=0.02), key
        if EXACT_COUNTS and count:
            assert got[key][0] == count, key


@pytest.mark.parametrize("rule", TRIED)
def test_collectives_are_those_of_the_accepted_form(rule):
    made, program = gpu_step(rule)
    check_traffic(traffic(program), expected(rule, made))
    assert not program.unknown_loops and unexpected.gathered_in_loops(made, program) == []


@pytest.mark.parametrize("rule", TRIED)
def test_matmuls_run_in_bf16_and_no_permute_misses_a_device(rule):
    _, program = gpu_step(rule)
    assert set(program.flops) == {"bf16"}
    # attention's, and no others
    assert program.uncounted and all(any(name in kernel for name in OURS) for kernel in program.uncounted)
    assert not program.broken_permutes and not program.partial_permutes


@pytest.mark.parametrize("rule", [
    "ddp", "zero1", *(pytest.param(rule, marks=sampling.GRID) for rule in ("hsdp", "ddp, tensor"))])  # fmt: skip
def test_gradients_are_reduced_once_per_step(rule):
    made, program = gpu_step(rule)
    over = [c for c in program.collectives if set(made.program.step.deferred_axes) & set(c.axes)]
    assert over and {c.trips for c in over} == {1}


def elementwise_bytes(rule: str) -> int:
    """What the step's kernels that multiply nothing read and write, the optimizer's apart."""
    made, executable = gpu_program(rule)
    return sum(kernel.hbm_bytes for kernel in roofline.of_run(made, executable.as_text()).kernels
               if kernel.part == "elementwise")


@pytest.mark.parametrize("rule", ["zero1", pytest.param("ddp", marks=sampling.GRID)])
def test_accumulators_that_are_reduced_once_a_step_are_added_to_where_they_lie(rule):
    made, _ = gpu_program(rule)
    # More than zero2 only the accumulators: filled with zeros, added to and read by each microbatch, laid out for the
    # sum.
    whole = 4 * sizes(made)["all"]      # bytes of the accumulators
    assert elementwise_bytes(rule) <= 1.02 * (elementwise_bytes("zero2") + (3 * M + 2) * whole)


@pytest.mark.parametrize("rule, remat, gathers, scatters", [
    ("zero3, tensor", "full", 6, 5), pytest.param("ddp, tensor", "none", 4, 4, marks=sampling.GRID)])
def test_parts_of_a_microbatch_move_what_the_whole_moves(rule, remat, gathers, scatters, monkeypatch):
    """Weights are gathered once and their gradients reduced once; over tensor there is a collective for each of the
    parts."""
    want = traffic(gpu_step(rule, remat)[1])
    for kind, of_layer in (("all-gather", gathers), ("reduce-scatter", scatters)):
        count, payload = want[kind, ("tensor",), "bf16"]
        # 16 tensor groups
        want[kind, ("tensor",), "bf16"] = count + (B // M // 16 - 1) * M * L * of_layer, payload
    monkeypatch.setattr(parts, "MIN_TOKENS", T)
    made, executable = compiled.__wrapped__(rule, remat, "bfloat16", "auto")
    program = audit.read(executable.as_text(), made.mesh)
    check_traffic(traffic(program), want)
    assert set(program.flops) == {"bf16"}
    assert not program.broken_permutes and not program.partial_permutes


def test_a_stream_gathered_from_several_rows_is_not_copied():
    """Over the second dim of several rows XLA gathers into another buffer and turns it round: layers put tokens
    first."""
    made, executable = gpu_program("zero3, tensor")
    stream_bytes = B // M // 16 * T * D * 2
    kernels = roofline.of_run(made, executable.as_text()).kernels
    assert any(kernel.hbm_bytes > kernel.runs * stream_bytes for kernel in kernels)
    # What matmuls as small as these share XLA joins to one of them: no copy.
    assert [kernel.name for kernel in kernels if "sharding_constraint" in kernel.source
            and "concatenate" not in kernel.name
            and kernel.hbm_bytes > kernel.runs * stream_bytes] == []


@pytest.mark.long
def test_the_shipped_70b_run_hides_its_tensor_axis_under_the_matmuls_of_its_parts():
    """20.6 s a step, 6.1% of it exposed and 4.3% on tensor, when this was written; with whole microbatches 21.6 s and
    15.6%."""
    made = assembly.assemble(config.load([str(RULES.parent / "configs/llama3-70b.toml")]), compile.topology("h100:64"))
    line = roofline.of_run(made, made.program.compile().as_text())
    assert line.mfu > 0.35 and line.exposed_s < 0.1 * line.step_s
    assert line.exposed_by_axes["tensor"] < 0.05 * line.step_s


@pytest.mark.long
@pytest.mark.cell
def test_tensor_sequence_without_remat_moves_four_and_four_a_layer():
    made, program = gpu_step("ddp, tensor", remat="none")
    got, want = traffic(program), expected("ddp, tensor", made)
    x_bytes = want["all-gather", ("tensor",), "bf16"][1] / (M * (6 * L + 2))
    for kind in ("all-gather", "reduce-scatter"):
        assert got[kind, ("tensor",), "bf16"][1] == pytest.approx(M * (4 * L + 2) * x_bytes, rel=0.02), kind


@pytest.mark.parametrize("rule", ["ddp", "zero1"])
def test_a_microbatch_s_gradients_never_stand_beside_their_sums(rule):
    """Each layer's are added to the accumulators as they are made; autodiff's would be stacked first."""
    made, executable = gpu_program(rule)
    n = sizes(made)
    # accumulators; weights in bfloat16
    beside = executable.memory_analysis().temp_size_in_bytes - 4 * n["all"] - 2 * n["all"]
    # gradients and logits of the head; stacked ones would double it
    assert 0 < beside < 0.8 * 4 * L * n["layer"]


def test_matmuls_add_what_is_added_to_their_products():
    """Of a layer forward out and down to the residual stream; backward the products of queries, keys and values, of
    gate and up."""
    lines = gpu_program("zero3", "selective")[1].as_text().splitlines()
    adding = [line for line in lines if "__cublas$lt$matmul" in line and '"beta":1' in line]
    assert len([line for line in adding if "bf16[" in line.split("=")[1]]) >= (5 if EXACT_COUNTS else 2), len(adding)


def test_what_layers_keep_is_neither_cleared_nor_copied_in_a_microbatch():
    module = hlo.parse(gpu_program("zero3", "selective")[1].as_text())
    root = lambda ins: next(i.op for i in module.computations[ins.called[0]].values()
                            if i.is_root) if ins.op == "fusion" else ins.op
    whole = lambda ins: f"[{L},{B // 64 // M},{T},"           # of all layers: what a device keeps of its rows
    made = [(computation, root(ins)) for computation, body in module.computations.items() for ins in body.values()
            if ins.op in ("fusion", "copy", "broadcast") and whole(ins) in ins.type_text and "fused" not in computation]
    assert {op for _, op in made} >= {"dynamic-update-slice"}, "they are found"
    assert not [(computation, op) for computation, op in made if op in ("copy", "broadcast")]
    assert [ins for ins in module.computations[module.entry].values() if ins.target == "AllocateBuffer" and whole(ins)
            in ins.type_text], "nor filled with zeros"


@pytest.mark.skipif(jax.__version_info__ < layer_vjp.IN_PLACE_SINCE, reason="this jax copies")
def test_gate_up_and_rotated_heads_are_written_where_the_backward_reads_them():
    F = 8192                    # of two smaller matmuls XLA makes one, and copies its halves
    run = config.Run(mesh=dict(fsdp=8), sharding=dict(rules=str(RULES / "zero3.toml")),
                     model=MODEL | dict(num_layers=3, mlp_dim=F), data=dict(seq_len=4 * T, global_batch=32),
                     training=dict(microbatches=2, remat="selective"))
    module = hlo.parse(assembly.assemble(run, compile.topology("h100:8")).program.compile().as_text())

    def writers(*shape):
        stack = f"bf16[{','.join(map(str, (3, 2, 4 * T, *shape)))}]"
        return [module.computations[ins.called[0]].values() for body in module.computations.values()
                for ins in body.values() if ins.op.startswith("fusion") and stack in ins.type_text]
    of_matmuls = [inside for inside in writers(F) if any("cublas" in ins.target for ins in inside)]
    assert len(of_matmuls) == len(writers(F)) == 2
    of_heads = [writers(MODEL[heads], MODEL["head_dim"]) for heads in ("num_heads", "num_kv_heads")]
    rotating = [[inside for inside in each if any(ins.op == "concatenate" for ins in inside)] for each in of_heads]
    assert [len(each) for each in rotating] == [1, 1], "queries and keys"


@pytest.mark.parametrize("rule", ["zero3", pytest.param("zero1", marks=sampling.GRID)])
def test_offloaded_inputs_of_layers_lie_on_the_host_and_come_back_ahead_of_their_layer(rule):
    made, executable = gpu_program(rule, "offload")
    held = executable.memory_analysis()
    assert held.host_temp_size_in_bytes == memory.host_bytes(made.run, made.layout) == L * B // M // 64 * T * D * 2
    text, program = executable.as_text(), gpu_step(rule, "offload")[1]
    assert not program.unknown_loops
    check_traffic(traffic(program), expected(rule, made))
    fetches = [line.count("fusion-start(") for line in text.splitlines() if "dynamic-slice-start" in line
               and "S(5)" in line]
    assert sum(fetches) >= 2, "one before the loop over layers, and in it the next layer's"


def test_zero3_memory_does_not_grow_by_gathered_layers():
    """Eight layers take no more than four but for their shards and kept inputs: gathered weights are let go."""
    few, program = gpu_program("zero3")
    deeper = few.run.replaced(model={"num_layers": 2 * L})
    many = assembly.assemble(deeper, compile.topology("h100:64")).program.compile()
    temp = [executable.memory_analysis().temp_size_in_bytes for executable in (program, many)]
    shard, kept = 4 * sizes(few)["layer"] // 64, B // M // 64 * T * D * 2
    # XLA may copy one; a gathered layer would be 6 times the bound
    assert (temp[1] - temp[0]) / L < 2 * (shard + kept)


def test_without_remat_norms_and_swiglu_keep_their_inputs_and_no_matmul_is_added():
    """Temporaries: of each layer eleven arrays in bfloat16 and attention's lse, and its weights' float32 gradients."""
    run = config.Run(sharding=dict(rules=str(RULES / "ddp.toml")), model=MODEL | dict(num_heads=2, num_kv_heads=2),
                     data=dict(seq_len=T, global_batch=16), training=dict(remat="none", loss_chunk=1024))
    made = assembly.assemble(run, compile.topology("h100:1"))
    step, tokens = made.program.compile(), 16 * T
    kept = L * tokens * (2 * (4 * D + 4 * 2 * MODEL["head_dim"] + 2 * MODEL["mlp_dim"]) + 4 * 2)
    # Beside them what a layer and the loss work with. What autodiff would keep of norms and SwiGLU makes it 3.1 times
    # as much.
    assert kept < step.memory_analysis().temp_size_in_bytes - 4 * sizes(made)["all"] < 2 * kept
    dots = audit.read(step.as_text(), made.mesh).dots
    projections = sum(dot.flops for dot in dots if not any(letters in dot.source for letters in ("KG", "nrs")))
    assert projections == 3 * 2 * tokens * L * sizes(made)["layer"]


# All roles of a parameter but a projection's: norms, learned positions and biases; of heads and the router; adapters.
ROLES = {
    "biases": dict(model=dict(norm="layernorm", activation="gelu", position="learned",
                              attention_bias="all", mlp_bias=True)),
    "router": dict(model=dict(num_experts=8, experts_per_token=2, expert_mlp_dim=128, qk_norm="head")),
    "adapters": dict(model=dict(qk_norm="all_heads"), lora=dict(rank=8)),
}


@pytest.mark.parametrize("roles, rule, mesh", [
    ("router", "zero3, tensor", dict(data=2, fsdp=2, tensor=2)),
    *(pytest.param(*case, marks=sampling.GRID) for case in (
        ("adapters", "zero3, tensor", dict(data=2, fsdp=2, tensor=2)),
        ("biases", "zero3, tensor", dict(data=2, fsdp=2, tensor=2)), ("biases", "zero2", dict(fsdp=8)),
        ("biases", "zero1", dict(fsdp=4, stage=2)),
        ("router", "hsdp", dict(data=2, fsdp=4)),
        ("adapters", "zero1", dict(fsdp=8)), ("adapters", "zero3", dict(fsdp=2, context=4)))),
])  # fmt: skip
def test_gradients_of_every_role_are_reduced_in_float32_and_make_no_float32_matmul(roles, rule, mesh):
    """Over the axes of the batch nothing is reduced in bf16, however small; tensor sums activations, in bf16."""
    chosen = ROLES[roles]
    run = config.Run(
        mesh=mesh, sharding=dict(rules=str(RULES / f"{rule.partition(',')[0]}.toml")), lora=chosen.get("lora", {}),
        model=dict(vocab_size=1024, embed_dim=256, num_layers=2, num_heads=8, mlp_dim=512) | chosen["model"],
        data=dict(seq_len=128, global_batch=64), training=dict(microbatches=4, remat="full"))
    made = assembly.assemble(run, compile.topology("h100:8"))
    program = audit.read(made.program.compile().as_text(), made.mesh)
    sums = [c for c in program.collectives if c.kind in ("all-reduce", "reduce-scatter")
            and {"data", "fsdp"} & set(c.axes)]
    assert {c.dtype for c in sums} <= {"f32", "s32"}        # s32: the number of targets
    trained = sum(info.size for info in made.model.parameters() if info.trainable)
    assert sum(c.payload_bytes for c in sums) > 4 * trained // 2        # all are seen
    assert set(program.flops) == {"bf16"}       # a router's products, which are exact, too: `kernels.products`


@pytest.mark.parametrize("rule, remat", [("zero3, tensor", "full"),
                                         *(pytest.param(*case, marks=sampling.GRID) for case in (
    ("zero1", "selective"), ("zero3", "none"), ("ddp, tensor", "none"), ("hsdp", "selective")))])  # fmt: skip
def test_every_projection_in_float8_is_a_float8_matmul(rule, remat):
    """Forward, recomputed, input and weight gradient; in bfloat16 are the head's alone. XLA loses what it does not
    recognize."""
    made, executable = gpu_program(rule, remat, matmul_dtype="float8")
    program = gpu_step(rule, remat, matmul_dtype="float8")[1]
    dots = [dot for dot in program.dots if dot.dtype.startswith("f8")]
    assert executable.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') == len(dots)
    assert {dot.dtype for dot in program.dots if dot not in dots} == {"bf16"}
    assert all("nrs" in dot.source for dot in program.dots if dot not in dots)
    assert all(any(name in kernel for name in OURS) for kernel in program.uncounted)
    made_by = defaultdict(int)
    for dot in dots:
        back = "remat" if "remat" in dot.source else "backward" if "transpose" in dot.source else "forward"
        made_by[back if back != "backward" else {"f8e5m2": "dx", "f8e4m3fn": "dw"}[dot.dtype]] += dot.flops
    per_element = 2 * B * T * L // (64 // made.mesh_spec.sizes["tensor"])
    layer, down = per_element * sizes(made)["layer"], per_element * D * MODEL["mlp_dim"] // made.mesh_spec.sizes[
        "tensor"]
    again = {"remat": layer - down} if remat == "full" else {}      # down's output feeds nothing in the backward
    assert made_by == {"forward": layer, "dx": layer, "dw": layer, **again}


def test_gathers_of_weights_x_and_dy_in_float8_are_half_as_many_bytes():
    """And the scales add sixteen all-reduces of one number each, a layer and microbatch."""
    made, program = gpu_step("zero3, tensor", matmul_dtype="float8")
    want, n, plan = expected("zero3, tensor", made), sizes(made), made.mesh_spec.sizes
    weights, x_bytes = ("data", "fsdp"), B // M // (plan["data"] * plan["fsdp"]) * T * D
    want["all-gather", weights, "bf16"] = (M * 2, 2 * M * (n["embedding"] + n["head"]))
    want["all-gather", weights, "f8e4m3fn"] = (M * 2 * L * PROJECTIONS, M * 2 * L * n["layer"])
    want["all-gather", ("tensor",), "bf16"] = (None, 2 * M * 2 * x_bytes)                   # the ends
    # what attention and MLP read, twice
    want["all-gather", ("tensor",), "f8e4m3fn"] = (4 * M * L, 4 * M * L * x_bytes)
    # what they add: its cotangent
    want["all-gather", ("tensor",), "f8e5m2"] = (2 * M * L, 2 * M * L * x_bytes)
    check_traffic(traffic(program), want)
    amax = [c for c in program.collectives if c.kind == "all-reduce" and c.dtype == "bf16"]
    # For each of four groups of projections: of x forward, of dy backward, of the weights both ways, since what depends
    # on them alone is not kept; none again for the recomputation.
    assert sum(c.trips for c in amax) <= 16 * M * L and sum(c.payload_bytes for c in amax) == 16 * 2 * M * L


@pytest.mark.long
def test_gathers_in_float32_are_rejected():
    """The same comparison refuses a program whose weights travel in float32."""
    made, program = gpu_step("zero3", dtype="float32")
    assert set(program.flops) == {"f32"}
    with pytest.raises(AssertionError):
        check_traffic(traffic(program), expected("zero3", made))
