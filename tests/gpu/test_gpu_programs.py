"""How training steps compiled for GPUs work: the dtypes and kernels of their products, and what they hold and copy.
What they send, and formulas: test_gpu_formulas."""
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import (ATTENTION, DDP_TENSOR, DENSE_CELLS, DENSE_STEPS, EXACT_COUNTS, OFFLOAD, RINGED_STEP, ROUTED_STEP,
                          RULES, SELECTIVE, STAGED_CELLS, STAGED_STEPS, ZERO3_TENSOR, Step, needs_compiler, rows, shapes_of, step)
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import assembly, hardware, run_files
from meshtrain.cost.program import audit, compile, hlo
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.inspection import memory
from meshtrain.kernels import mosaic, pallas, rotation, tiles
from meshtrain.sharding.mesh import MeshSpec, pmax, psum
from meshtrain.training import backward

pytestmark = needs_compiler


# ---- every step ------------------------------------------------------------------------------------------------------


@rows(*DENSE_STEPS, SELECTIVE, OFFLOAD, *STAGED_STEPS, RINGED_STEP, ROUTED_STEP, cells=(
    *DENSE_CELLS, *STAGED_CELLS, "ringed zero3 fsdp2 context4 none", DDP_TENSOR + " none"))
def test_matmuls_run_in_bf16_loops_are_counted_and_no_permute_misses_a_device(name):
    program = step(name).program
    assert set(program.flops) == {"bf16"} and not program.unknown_loops
    # attention's, and no others
    assert all(any(kernel in uncounted for kernel in ATTENTION) for uncounted in program.uncounted)
    assert program.uncounted
    assert not program.broken_permutes


# ---- what is held, copied and multiplied -----------------------------------------------------------------------------


def elementwise_bytes(name: str) -> int:
    """What the step's kernels that multiply nothing read and write, the optimizer's apart."""
    return sum(kernel.hbm_bytes for kernel in step(name).priced.kernels if kernel.part == "elementwise")


@rows("dense zero1 fsdp64", cells=("dense ddp fsdp64",))
def test_accumulators_that_are_reduced_once_a_step_are_added_to_where_they_lie(name):
    # More than zero2 only the accumulators: filled with zeros, added to and read by each microbatch, laid out for the
    # sum.
    whole = 4 * step(name).count("matrix", "embedding", "head", "norm")
    times = 3 * step(name).run.training.microbatches + 2
    assert elementwise_bytes(name) <= 1.02 * (elementwise_bytes("dense zero2 fsdp64") + times * whole)


@rows("dense ddp fsdp64", "dense zero1 fsdp64")
def test_a_microbatch_s_gradients_never_stand_beside_their_sums(name):
    """Each layer's are added to the accumulators as they are made; autodiff's would be stacked first."""
    # accumulators; weights in bfloat16
    beside = step(name).temp_bytes - (4 + 2) * step(name).count("matrix", "embedding", "head", "norm")
    # gradients and logits of the head; stacked ones would double it
    assert 0 < beside < 0.8 * 4 * step(name).count("matrix")


@rows(ZERO3_TENSOR)
def test_a_stream_gathered_from_several_rows_is_not_copied(name):
    """Over the second dim of several rows XLA gathers into another buffer and turns it round: layers put tokens
    first."""
    stream_bytes, kernels = step(name).tokens * step(name).run.model.embed_dim * 2, step(name).priced.kernels
    assert any(kernel.hbm_bytes > kernel.runs * stream_bytes for kernel in kernels)
    # What matmuls as small as these share XLA joins to one of them: no copy.
    assert [kernel.name for kernel in kernels if "sharding_constraint" in kernel.source and "concatenate" not in kernel.name
            and kernel.hbm_bytes > kernel.runs * stream_bytes] == []


@rows("normed zero3 fsdp4 tensor2 none 1x2")
def test_heads_that_are_normed_tokens_first_stay_on_the_devices_of_their_rows(name):
    made = step(name).made
    evaluation = made.program.lower(made.program.evaluate, made.state_shapes.params, made.program.step.batch).compile()
    for text in (step(name).text, evaluation.as_text()):
        assert rotation.NAME in text
        assert not [row for row in audit.read(text, made.mesh).collectives if row.kind == "all-to-all"]


@pytest.mark.long
def test_the_shipped_70b_run_hides_its_tensor_axis_under_the_matmuls_of_its_parts():
    """20.6 s a step, 6.1% of it exposed and 4.3% on tensor, when this was written; with whole microbatches 21.6 s and
    15.6%."""
    made = assembly.assemble(run_files.load([str(RULES.parent / "configs/llama3-70b.toml")]), compile.topology("h100:64"))
    line = CompiledProgram.of_run(made, made.program.compile()).roofline
    assert line.mfu > 0.35 and line.exposed_s < 0.1 * line.step_s
    assert line.exposed_by_axes["tensor"] < 0.05 * line.step_s


@rows(SELECTIVE)
def test_matmuls_add_what_is_added_to_their_products(name):
    """Of a layer forward out and down to the residual stream; backward the products of queries, keys and values, of
    gate and up."""
    adding = [line for line in step(name).text.splitlines() if "__cublas$lt$matmul" in line and '"beta":1' in line]
    assert len([line for line in adding if "bf16[" in line.split("=")[1]]) >= (5 if EXACT_COUNTS else 2), len(adding)


@rows(SELECTIVE)
def test_what_layers_keep_is_neither_cleared_nor_copied_in_a_microbatch(name):
    module, cfg, seq_len = step(name).module, step(name).run.model, step(name).run.data.seq_len
    root = lambda ins: next(i.op for i in module.computations[ins.callees[0]].values()
                            if i.is_root) if ins.op == "fusion" else ins.op
    whole = f"[{cfg.num_layers},{step(name).tokens // seq_len},{seq_len},"        # what a device keeps of its rows
    made = [(computation, root(ins)) for computation, body in module.computations.items() for ins in body.values()
            if ins.op in ("fusion", "copy", "broadcast") and whole in ins.type_text and "fused" not in computation]
    assert {op for _, op in made} >= {"dynamic-update-slice"}, "they are found"
    assert not [(computation, op) for computation, op in made if op in ("copy", "broadcast")]
    assert [ins for ins in module.computations[module.entry].values() if ins.target == "AllocateBuffer"
            and whole in ins.type_text], "nor filled with zeros"


@pytest.mark.skipif(jax.__version_info__ < backward.IN_PLACE_SINCE, reason="this jax copies")
@rows("wide_mlp zero3 fsdp8 selective")
def test_gate_up_and_rotated_heads_are_written_where_the_backward_reads_them(name):
    module, cfg = step(name).module, step(name).run.model

    def writers(*shape):
        stack = f"bf16[{','.join(map(str, (cfg.num_layers, 2, step(name).run.data.seq_len, *shape)))}]"
        return [module.computations[ins.callees[0]].values() for body in module.computations.values()
                for ins in body.values() if ins.op.startswith("fusion") and stack in ins.type_text]
    of_matmuls = [inside for inside in writers(cfg.mlp_dim) if any("cublas" in ins.target for ins in inside)]
    assert len(of_matmuls) == len(writers(cfg.mlp_dim)) == 2
    rotating = [[inside for inside in writers(heads, cfg.head_dim) if any(ins.op == "concatenate" for ins in inside)]
                for heads in (cfg.num_heads, cfg.num_kv_heads)]
    assert [len(each) for each in rotating] == [1, 1], "queries and keys"


@rows(OFFLOAD, cells=("dense zero1 fsdp64 offload",))
def test_offloaded_inputs_of_layers_lie_on_the_host_and_come_back_ahead_of_their_layer(name):
    it = step(name)
    held = it.executable.memory_analysis().host_temp_size_in_bytes
    assert held == memory.host_bytes(it.made) == it.run.model.num_layers * it.tokens * it.run.model.embed_dim * 2
    fetches = [line.count("fusion-start(") for line in it.text.splitlines() if "dynamic-slice-start" in line
               and "S(5)" in line]
    assert sum(fetches) >= 2, "one before the loop over layers, and in it the next layer's"


@rows("dense zero3 fsdp64")
def test_zero3_memory_does_not_grow_by_gathered_layers(name):
    """Eight layers take no more than four but for their shards and kept inputs: gathered weights are let go."""
    few, many = step(name), step("deeper zero3 fsdp64")
    more = many.run.model.num_layers - few.run.model.num_layers
    shard, kept = 4 * (many.count("matrix") - few.count("matrix")) // more // 64, few.tokens * few.run.model.embed_dim * 2
    # XLA may copy one; a gathered layer would be 6 times the bound
    assert (many.temp_bytes - few.temp_bytes) / more < 2 * (shard + kept)


@rows("two_heads ddp none")
def test_without_remat_norms_and_swiglu_keep_their_inputs_and_no_matmul_is_added(name):
    """Temporaries: of each layer eleven arrays in bfloat16 and attention's lse, and its weights' float32 gradients."""
    it, cfg = step(name), step(name).run.model
    kept = cfg.num_layers * it.tokens * (2 * (4 * cfg.embed_dim + 4 * 2 * cfg.head_dim + 2 * cfg.mlp_dim) + 4 * 2)
    # Beside them what a layer and the loss work with. What autodiff would keep of norms and SwiGLU makes it 3.1 times
    # as much.
    assert kept < it.temp_bytes - 4 * it.count("matrix", "embedding", "head", "norm") < 2 * kept
    projections = sum(dot.flops for dot in it.program.dots if not any(letters in dot.source for letters in ("KG", "nrs")))
    assert projections == 3 * 2 * it.tokens * it.count("matrix")


@rows("small ddp full float32", cells=("small_experts ddp full float32",))
def test_a_step_in_float32_multiplies_nothing_as_tf32_or_bfloat16(name):
    """Projections, attention, router, shared expert and head, forward and backward; the code of experts' kernels is
    read by test_precision."""
    dots = [line for line in step(name).text.splitlines() if re.search(r' dot\(|target="__cublas', line)]
    highest = r'operand_precision"?[=:][{[]"?highest"?,"?highest'
    assert [line for line in dots if not re.search(highest, line.lower())] == []
    assert not re.search(r"\b(bf16|f16)\[", step(name).text)
    routing = ["BTD,DE->BTE", "BTE,DE->BTD", "BTD,BTE->DE"] if "experts" in name else []
    for letters in ("BTD,DNH->BTNH", "BTKGH,BSKH->BKGTS", "BTD,DF->BTF", "nrsD,DV->nrsV", *routing):
        assert any(letters in line for line in dots), letters


# ---- float8 ----------------------------------------------------------------------------------------------------------


def count_float8(it: Step) -> list[audit.Dot]:
    """The products in float8, all of which are cuBLAS's: XLA loses what it does not recognize."""
    dots = [dot for dot in it.program.dots if dot.dtype.startswith("f8")]
    assert it.text.count('custom_call_target="__cublas$lt$matmul$f8"') == len(dots) > 0
    return dots


@rows(ZERO3_TENSOR + " float8", cells=("dense zero1 fsdp64 selective float8", "dense zero3 fsdp64 none float8",
                                       DDP_TENSOR + " none float8", "dense hsdp data8 fsdp8 selective float8"))
def test_every_projection_in_float8_is_a_float8_matmul(name):
    """Forward, recomputed, input and weight gradient; in bfloat16 are the head's alone."""
    it, cfg = step(name), step(name).run.model
    dots, made_by = count_float8(it), Counter()
    assert {dot.dtype for dot in it.program.dots if dot not in dots} == {"bf16"}
    assert all("nrs" in dot.source for dot in it.program.dots if dot not in dots)
    assert all(any(kernel in uncounted for kernel in ATTENTION) for uncounted in it.program.uncounted)
    for dot in dots:
        made_by["remat" if "remat" in dot.source else "forward" if "transpose" not in dot.source else
                {"f8e5m2": "dx", "f8e4m3fn": "dw"}[dot.dtype]] += dot.flops
    tokens = 2 * it.tokens * it.run.training.microbatches
    layer, down = tokens * it.count("matrix"), tokens * cfg.num_layers * cfg.embed_dim * cfg.mlp_dim // it.sizes["tensor"]
    # down's output feeds nothing in the backward
    again = {"remat": layer - down} if it.run.training.remat == "full" else {}
    assert made_by == {"forward": layer, "dx": layer, "dw": layer, **again}


@rows(cells=STAGED_STEPS[:2])
def test_projections_in_float8_are_float8_matmuls_in_every_slot(name):
    """And their scales are numbers that the devices of a stage share."""
    in_float8, plain = step(name + " float8"), step(name).program
    count_float8(in_float8)
    heads = sum(dot.flops for dot in plain.dots if "nrs" in dot.source)
    assert in_float8.program.flops["bf16"] == heads
    assert sum(in_float8.program.flops.values()) == sum(plain.flops.values())
    scales = [c for c in in_float8.program.collectives if c.dtype == "bf16" and c.payload_bytes < 64 * c.trips]
    assert scales and {c.kind for c in scales} == {"all-reduce"} and not any("stage" in c.axes for c in scales)


# ---- stages ----------------------------------------------------------------------------------------------------------


@rows(*STAGED_STEPS, cells=STAGED_CELLS)
def test_slots_are_written_and_read_in_place_and_layers_share_one_loop(name):
    """A copy of what all microbatches under way have saved, once a layer, would take longer than the layer. F and B of
    a tick stand in one loop over layers: as many loops hold attention's kernels as there are phases."""
    module, schedule = step(name).module, step(name).schedule
    depth = step(name).run.model.num_layers // (schedule.num_stages * schedule.num_chunks)
    saved = {(schedule.slots[kind], depth) for kind in ("R", "Q", "Z") if kind in schedule.slots}
    copies, _ = hlo.walk(module, lambda ins: ins.op.startswith("copy") and hlo.shapes(ins.type_text)[0][1][:2] in saved)
    assert not [visit.instruction.name for visit in copies if visit.trips > 1]
    kernels, _ = hlo.walk(module, lambda ins: ins.op == "custom-call" and any(kernel in ins.attrs for kernel in ATTENTION))
    assert len({visit.computation for visit in kernels}) == len(
        [phase for phase in schedule.phases() if set(phase.kinds) & {"F", "B"}])


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


@rows(*STAGED_STEPS, cells=STAGED_CELLS)
def test_a_device_holds_the_layers_of_its_own_stage_only(name):
    """No [stages, …] array of weights or gradients: differentiating through a shard_map over stages makes one."""
    cfg, sizes = step(name).run.model, step(name).sizes
    for weight in ((cfg.mlp_dim // sizes["tensor"],), (cfg.num_heads // sizes["tensor"], cfg.head_dim)):
        assert layers_held(step(name).text, (cfg.embed_dim, *weight)) == cfg.num_layers // sizes["stage"]


def test_a_stack_of_all_stages_would_be_seen():
    text = "%loop = (s32[], f32[4,4,384,160]{3,2,1,0}, bf16[4,160,384]{2,1,0}) while(%start), body=%region_1"
    assert layers_held(text, (384, 160)) == 16


@pytest.mark.full
@pytest.mark.parametrize("gpu, dtype", [(True, "bf16"), (False, "f32")], ids=["gpu", "cpu"])
@pytest.mark.parametrize("reduced", [psum, pmax], ids=["sum", "largest"])
def test_a_reduction_by_hand_is_made_in_the_dtype_of_its_platform_without_a_condition(gpu, dtype, reduced):
    mesh = MeshSpec(dict(stage=2, tensor=2)).build(compile.topology("h100:4") if gpu else jax.devices())
    add = jax.shard_map(lambda x: reduced(x, "stage"), mesh=mesh, axis_names={"stage"}, in_specs=P("stage"), out_specs=P(),
                        check_vma=False)
    x = jax.ShapeDtypeStruct((2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("stage", "tensor")))
    text = jax.jit(add).lower(x).compile().as_text()
    assert [c.dtype for c in audit.read(text, mesh).collectives if c.axes == ("stage",)] == [dtype]
    assert "conditional(" not in text


# ---- experts ---------------------------------------------------------------------------------------------------------


@rows(ROUTED_STEP)
def test_the_routers_products_are_float32_by_parts_in_the_step_forward_and_backward(name):
    """Scores, made again under remat, of x and the router's three parts; the gradient of the router from three parts of
    the scores' gradient; that of x, which is bfloat16, from two parts of each."""
    products = [line for line in step(name).text.splitlines() if re.search(r" dot\(", line)]
    routers = {form: [line for line in products if form + "/dot_general" in line.replace(")", "")]
               for form in ("BTD,DPE->BTPE", "BTEP,DEP->BTD", "BTD,BTE->DE", "DE->BTE")}
    assert [len(lines) > 0 for lines in routers.values()] == [True, True, True, False]
    assert [len(lines) for lines in routers.values()][:2] == [2, 1]
    for line in sum(routers.values(), []):
        assert "precision" not in line, line[:200]      # tensor cores: no float32 among the operands
    assert all(re.search(r"= f32\[[\d,]+\]\S* ", line) for form in ("BTD,DPE->BTPE", "BTD,BTE->DE") for line in routers[form])


@rows(ROUTED_STEP)
def test_experts_multiply_what_their_tokens_need_and_the_forward_is_not_repeated(name):
    """No product goes over all experts; the inward ones twice, and half a block each."""
    it, (A, K, E, D, F) = step(name), shapes_of(step(name))
    cfg, T, runs = it.run.model, it.tokens, it.run.model.num_layers * it.run.training.microbatches
    # Forward gate, up and down; backward gate, up, down's and, in one kernel, their transposes, and three outer
    # products. Rounds behind the first have their own, and make gate, up and down's twice: for inputs and for weights.
    kernels = [line for line in it.text.splitlines() if " custom-call(" in line and re.search(r"/grouped_(\w+?)_", line)]
    assert len(kernels) == (3 + 4 + 3) + (3 + 4 + 3 + 3)
    # With Mosaic, where it is taken unasked: outward, and the gradient of x.
    ordered = sum("/grouped_mosaic_" in line for line in kernels)
    assert ordered == (2 + 2 if mosaic.is_taken_on(hardware.GPUS["h100"]) else 0)
    # Of a row gate, up and down: forward, two products backward, and gate and up once more, which nobody keeps.
    experts = sum(dot.flops for dot in it.program.dots if "grouped_" in dot.source)
    forward, backward, again = 3, 6, 2
    assert experts == runs * (T * K + E * tiles.GROUPED[2].rows / 2) * (forward + backward + again) * 2 * D * F
    assert experts <= 1.05 * runs * T * K * 22 * D * F
    # What is not a kernel: attention's and the router's products, embedding and head.
    projections, router, head = 4 * D * cfg.num_heads * cfg.head_dim, D * cfg.num_experts, D * cfg.vocab_size
    mine = 2 * T * (runs * (4 * projections + 3 * router) + it.run.training.microbatches * 3 * head)
    others = sum(dot.flops for dot in it.program.dots if "grouped_" not in dot.source)
    assert others <= 1.6 * mine < 0.2 * (6 * T * runs * cfg.num_experts * 3 * D * F)


@rows(ROUTED_STEP)
def test_executed_rows_are_the_spared_share_and_the_tiles_fill(name):
    """Temporaries are at most 1.3 times those of a buffer that even choices fill: the spared buffer, and the tables and sums
    of the rounds that it may need."""
    (A, K, E, D, _), rows = shapes_of(step(name)), tiles.GROUPED[2].rows
    assert f"bf16[{(-(-int(1.25 * A * K / 8) // rows) + E) * rows},{D}]" in step(name).text
    even = step(name + " even")
    assert f"bf16[{A * K // 8 + E * rows},{D}]" in even.text
    assert even.temp_bytes < step(name).temp_bytes <= 1.3 * even.temp_bytes


@rows(ROUTED_STEP)
def test_a_layers_backward_gathers_its_tokens_before_its_experts_weights_and_turns_none(name):
    """Gathers queue in the order in which they start; weights first would hold up x, and what it is made of. Weights and
    their gradients travel along their first dim, and kernels read and write them as they lie: no pass over all of a GPU's
    experts."""
    A, _, E, D, F = shapes_of(step(name))
    orders = [[hlo.shapes(ins.type_text)[-1][1] for ins in body.values() if ins.op == "all-gather-start"
               and "transpose(jvp" in ins.op_name] for body in step(name).module.computations.values()]
    (order,) = (order for order in orders if (D, E, F) in order)
    assert order.count((D, E, F)) == 3 and order.count((A, D)) == 2       # x and dy
    assert order.index((A, D)) < order.index((D, E, F))
    whole = [line for line in step(name).text.splitlines() if re.search(rf"= (bf16|f32)\[{E},({D},{F}|{F},{D})\]", line)]
    assert not whole, whole[:3]


# ---- kernels of attention --------------------------------------------------------------------------------------------


@rows("pallas zero3 fsdp4 tensor2", cells=("pallas ddp data8", "pallas hsdp data2 fsdp4"))
def test_under_selective_remat_each_layer_runs_its_forward_once_on_a_devices_own_heads_and_rows(name):
    """o and lse are kept, whichever engine made them. XLA would compute all heads on every rank where it partitions."""
    it, cfg = step(name), step(name).run.model
    shape = (it.tokens // it.run.data.seq_len, it.run.data.seq_len, cfg.num_heads // it.sizes["tensor"], cfg.head_dim)
    # few programs: of dK and dV heads of a group are summed outside
    assert it.kernels() == {(f"{kernel}_causal", shape): cfg.num_layers * it.run.training.microbatches
                            for kernel in ("forward", "dq", "dkv")}


@rows("mosaic zero3 fsdp4 tensor2 full", cells=("mosaic zero3 fsdp2 tensor2 context2 full ring",
                                                "mosaic zero3 fsdp2 tensor2 context2 full gather"))
def test_where_mosaic_is_asked_for_a_remat_of_scanned_layers_runs_its_kernels_alone(name):
    """Each layer's forward runs twice; over chunks o and lse are kept. A kernel of another engine would be a
    fallback."""
    it, cfg, found = step(name), step(name).run.model, Counter()
    assert not it.kernels() and "fmha" not in it.text
    for (kernel, (*_, heads, width)), calls in it.kernels(mosaic).items():
        assert (heads, width) == ((cfg.num_kv_heads if "dkv" in kernel else cfg.num_heads) // it.sizes["tensor"], cfg.head_dim)
        found[kernel] += calls
    # pairs of chunks of a layer: with and without a diagonal
    cp, whole = it.sizes["context"], it.sizes["context"] == 1
    near, far = (1, 0) if whole else (1, 2 * (cp - 1)) if "ring" in name else (2, 2 * cp - 1)
    visits = cfg.num_layers * it.run.training.microbatches
    assert found == Counter({kernel + label: pairs * visits * (2 if whole and kernel == "forward" else 1)
                             for kernel in ("forward", "dq", "dkv") for label, pairs in (("_causal", near), ("", far))
                             if pairs})


@rows("pallas_latents zero3 fsdp4 tensor2", cells=("pallas_latents zero3 context4 tensor2",
                                                   "mosaic_latents zero3 fsdp4 tensor2"))
def test_kernels_of_latents_have_values_of_their_own_width(name):
    """Keys of 192 are padded to 256 by Triton's kernels and to nothing by Mosaic's, values stay 128."""
    engine, other, width = (mosaic, pallas, 192) if "mosaic" in name else (pallas, mosaic, 256)
    heads = step(name).run.model.num_heads // 2
    assert {(kernel.split("_")[0], *shape[2:]) for kernel, shape in step(name).kernels(engine)} == {
        ("forward", heads, 128), ("dq", heads, width), ("dkv", heads, width)}
    assert not step(name).kernels(other)


@rows(cells=("windows_of_100 zero3 context4 fsdp2 ring", "windows_of_100 zero3 context4 fsdp2 gather"))
def test_a_window_over_chunks_runs_its_kernels_where_it_reaches_and_no_further(name):
    """Of two layers one has a window of 100 tokens over chunks of 64: itself and the two before it, for both chunks of
    a device."""
    found = Counter()
    for (kernel, _), calls in step(name).kernels().items():
        found[kernel] += calls
    near = {"_causal_window100": 2, "_window100_ahead64": 2, "_window100_ahead128": 2}
    every = {"_causal": 1, "": 6} if "ring" in name else {"_causal": 2, "": 7}
    assert found == {kernel + label: calls * step(name).run.training.microbatches for kernel in ("forward", "dq", "dkv")
                     for label, calls in (near | every).items()}


@rows(cells=("pallas zero3 stage2 fsdp2 tensor2 1f1b", "pallas zero3 stage2 tensor2 context2 zero_bubble"))
def test_in_a_pipelines_step_kernels_have_a_tensor_ranks_own_heads(name):
    found = step(name).kernels()
    assert {shape[2] for _, shape in found} == {step(name).run.model.num_heads // 2}
    assert {kernel for kernel, _ in found} >= {"forward_causal", "dq_causal", "dkv_causal"}
