"""What training steps compiled for GPUs send, multiply and hold: rows of gpu_programs, and properties that are asked of
them.

Expected bytes come from the parameter table and the schedule: per layer and microbatch, combined tuples taken apart. XLA
groups and splits operands differently from version to version, so counts are claimed for jax 0.10 and bytes for every
version.
"""
import dataclasses
import math
import re
from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import ATTENTION, EXACT_COUNTS, RULES, Step, assembled, needs_compiler, rows, step
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import assembly, hardware, run_files
from meshtrain.cost.program import audit, compile, hlo, memory, roofline
from meshtrain.inspection import formula_vs_compiled, unexpected
from meshtrain.inspection import memory as held_memory
from meshtrain.kernels import mosaic, pallas, tiles
from meshtrain.sharding.mesh import MeshSpec, pmax, psum
from meshtrain.training import backward, executor

pytestmark = needs_compiler
ZERO3_TENSOR, DDP_TENSOR = "dense zero3 data2 fsdp8 tensor4", "dense ddp data16 tensor4"
DENSE = ("dense ddp fsdp64", "dense zero1 fsdp64", "dense zero2 fsdp64", "dense zero3 fsdp64", "dense hsdp_zero1 data8 fsdp8",
         ZERO3_TENSOR)
# What these promise the others promise apart.
DENSE_CELLS = ("dense hsdp data8 fsdp8", DDP_TENSOR)
SELECTIVE, OFFLOAD = "dense zero3 fsdp64 selective", "dense zero3 fsdp64 offload"
STAGED = ("staged zero3 stage4 fsdp4 tensor4 interleaved_zero_bubble2",
          "staged zero3 data2 fsdp2 tensor4 stage2 context2 1f1b", "staged zero1 stage4 fsdp16 1f1b")
STAGED_CELLS = (
    "staged zero3 stage4 fsdp16 1f1b", "staged ddp stage4 fsdp16 1f1b", "staged zero1 stage4 fsdp16 zero_bubble",
    "staged zero3 stage4 fsdp4 tensor4 1f1b", "staged zero3 stage4 fsdp16 interleaved_zero_bubble2",
    "staged zero3 data2 fsdp2 tensor4 stage2 context2 interleaved_zero_bubble2")
ROUTED = "routed zero3_experts_fsdp data8 fsdp8"
RINGED = "ringed zero3 fsdp2 context4 full"
every_staged = rows(*STAGED, cells=STAGED_CELLS)


# ---- every step ------------------------------------------------------------------------------------------------------


@rows(*DENSE, SELECTIVE, OFFLOAD, *STAGED, RINGED, ROUTED, cells=(
    *DENSE_CELLS, *STAGED_CELLS, "ringed zero3 fsdp2 context4 none", DDP_TENSOR + " none"))
def test_matmuls_run_in_bf16_loops_are_counted_and_no_permute_misses_a_device(name):
    program = step(name).program
    assert set(program.flops) == {"bf16"} and not program.unknown_loops
    # attention's, and no others
    assert all(any(kernel in uncounted for kernel in ATTENTION) for uncounted in program.uncounted)
    assert program.uncounted
    assert not program.broken_permutes and not program.partial_permutes


# ---- what is sent ----------------------------------------------------------------------------------------------------


def expected(step: Step) -> dict:
    """(kind, axes, dtype) -> (operands or None where XLA may group them, payload bytes) per step."""
    rule, cfg, sizes = step.name.split()[1], step.run.model, step.sizes
    L, M, weights, tensor = cfg.num_layers, step.run.training.microbatches, step.batch_axes, sizes["tensor"]
    matrices, embedding, head = (step.count(role) for role in ("matrix", "embedding", "head"))
    everything, norms = matrices + embedding + head, step.count("norm") * tensor
    projections = 7             # query, key, value, out, gate, up, down
    leaves = projections + 2    # in the layers, stacked: projections and norms
    x_bytes = step.tokens * cfg.embed_dim * 2       # a microbatch's residual stream, bf16
    want = {}
    if rule == "ddp":
        want["all-reduce", weights, "f32"] = (None, 4 * (everything + norms))   # XLA flattens small operands into one
    if rule == "zero1":
        # and embedding and head; the final norm's is too small to be looked at
        want["reduce-scatter", weights, "f32"] = (leaves + 2, 4 * (everything + norms))
    if rule in ("zero1", "zero2"):
        # Stored as [optimizer] says, read whole: one gather per step, the norms' (float32) too small to be looked at.
        want["all-gather", weights, "bf16"] = (leaves, 2 * everything)
    if rule == "zero2":
        want["reduce-scatter", weights, "f32"] = (None, 4 * M * everything)
    if rule in ("zero3", "hsdp", "hsdp_zero1") and tensor == 1:
        # The embedding is not reduced: its columns lie whole on one device. Two all-to-alls carry its rows.
        want["all-to-all", ("fsdp",), "bf16"] = (2 * M, 2 * M * x_bytes)
        want["reduce-scatter", ("fsdp",), "f32"] = (None, 4 * M * (matrices + head))
        want["all-gather", ("fsdp",), "bf16"] = (M * (2 * L * projections + 1), 2 * M * (2 * matrices + head))
    if rule == "hsdp":
        want["all-reduce", ("data",), "f32"] = (None, 4 * (everything + norms) // sizes["fsdp"])
    if rule == "hsdp_zero1":
        want["reduce-scatter", ("data",), "f32"] = (leaves + 2, 4 * (everything + norms) // sizes["fsdp"])
        want["all-gather", ("data",), "bf16"] = (leaves, 2 * everything // sizes["fsdp"])
    if rule == "zero3" and tensor > 1:
        want["reduce-scatter", weights, "f32"] = (None, 4 * M * everything)
        want["all-gather", weights, "bf16"] = (M * (2 * L * projections + 2), 2 * M * (2 * matrices + embedding + head))
    if tensor > 1:
        # A layer: 2 gathers and 2 scatters forward, 2 and 1 again for the recomputation (the last scatter feeds
        # nothing), 2 and 2 backward. Beside them the embedding's scatter forward and gather backward, and the head's
        # gather of x and scatter of dx, in chunks.
        gathers, scatters = TENSOR[step.run.training.remat]
        want["all-gather", ("tensor",), "bf16"] = (None, M * (gathers * L + 2) * x_bytes)
        want["reduce-scatter", ("tensor",), "bf16"] = (None, M * (scatters * L + 2) * x_bytes)
    return want


TENSOR = {"full": (6, 5), "none": (4, 4)}       # gathers and scatters of a layer


def expected_staged(step: Step) -> dict:
    """The same of a pipelined step, from its schedule tick by tick."""
    rule, cfg, sizes, schedule = step.name.split()[1], step.run.model, step.sizes, step.schedule
    depth = cfg.num_layers // (schedule.num_stages * schedule.num_chunks)
    layers, everything = step.count("matrix"), step.count("matrix", "embedding", "head")
    forward, backward = (depth * schedule.executed[kind] for kind in "FB")       # visits of a layer
    embed, loss, embed_grad = (ticks(step, what) for what in ("embed", "loss", "embed_grad"))
    weights, tensor, cp = step.batch_axes, sizes["tensor"], sizes["context"]
    x_bytes = 2 * step.tokens * cfg.embed_dim
    sends = schedule.executed["F"] + schedule.executed["B"]
    want = {
        # Every F and every B sends once. A stage that is idle sends as well: nothing diverges.
        ("collective-permute", ("stage",), "bf16"): (sends, sends * x_bytes // tensor),
        # All stages get the last one's output and the first one's cotangent, and sum their parts of the vocabulary: the
        # embedding's rows and the loss's dx. Each is a tensor share of the residual stream, in its own dtype.
        ("all-reduce", ("stage",), "bf16"): (None, (embed + 2 * loss + embed_grad) * x_bytes // tensor),
        ("all-reduce" if rule == "ddp" else "reduce-scatter", weights, "f32"): (None, 4 * everything),
    }
    if rule != "ddp":
        want["all-gather", weights, "bf16"] = (9, 2 * everything)
    if schedule.num_chunks > 1:
        # Of stages · chunks, chunk c is stored on stage c // chunks and worked on by stage c % stages: weights travel
        # in bf16 before the gather, gradients after the reduce-scatter. Where stages divides chunks, every stage holds
        # as many for each of them: one all-to-all. Where chunks divides stages, it holds some for its residue alone: an
        # all-to-all among as many stages as there are chunks, and a permute, each of the whole shard.
        stages, chunks = schedule.num_stages, schedule.num_chunks
        assert chunks % stages == 0 or stages % chunks == 0
        moves = (1 if chunks % stages == 0 else 2) * layers // math.prod(sizes[axis] for axis in weights)
        want["relayout", ("stage",), "bf16"] = (None, 2 * moves)
        want["relayout", ("stage",), "f32"] = (None, 4 * moves)
    if tensor > 1:      # as without a pipeline
        want["all-gather", ("tensor",), "bf16"] = (None, (2 * forward + 4 * backward + loss + embed_grad) * x_bytes)
        want["reduce-scatter", ("tensor",), "bf16"] = (None, (2 * forward + 3 * backward + embed + loss) * x_bytes)
    return want | (ring(step, forward, backward) if cp > 1 else {})


def ring(step: Step, forward: int, backward: int) -> dict:
    """cp-1 hops of K and V each way, cp of dK and dV in float32, of this many visits of a layer. Remat keeps attention's
    results, so no ring runs twice."""
    cp = step.sizes["context"]
    kv = step.tokens * step.run.model.num_kv_heads * step.run.model.head_dim // step.sizes["tensor"]
    hops, sums = 2 * (cp - 1) * (forward + backward), 2 * cp * backward
    # XLA may send the last hop of dK and dV, of one of them or none, in bf16.
    last = sums - step.traffic()["collective-permute", ("context",), "f32"][0]
    assert last in (0, backward, 2 * backward)
    return {("collective-permute", ("context",), "bf16"): (hops + last, (hops + last) * 2 * kv),
            ("collective-permute", ("context",), "f32"): (sums - last, (sums - last) * 4 * kv)}


def ticks(step: Step, what: str) -> int:
    """How often the ends of the model work: "embed", "loss" or "embed_grad"; where no condition asks, in every tick,
    masked."""
    on = step.schedule.shared[f"{what}_on"]
    often = {"never": lambda ticks: 0, "sometimes": lambda ticks: int(on[ticks].sum()), "always": lambda ticks: len(on[ticks])}
    return sum(often[getattr(run, what)](slice(run.start, run.stop)) for run in executor._phases(step.schedule, True))


def check_traffic(got: dict, want: dict, exact: bool = EXACT_COUNTS):
    assert set(got) == set(want)
    for key, (count, payload) in want.items():
        assert got[key][1] == pytest.approx(payload, rel=0.02), key
        if exact and count:
            assert got[key][0] == count, key


@rows(*DENSE, OFFLOAD, cells=(*DENSE_CELLS, DDP_TENSOR + " none", "dense zero1 fsdp64 offload"))
def test_collectives_are_those_of_the_accepted_form(name):
    check_traffic(step(name).traffic(), expected(step(name)))
    assert unexpected.find_gathers_in_loops(step(name).made, step(name).program) == []


@every_staged
def test_it_sends_what_the_schedule_and_the_rules_say_and_nothing_else(name):
    check_traffic(step(name).traffic(), expected_staged(step(name)), True)


@pytest.mark.long
@pytest.mark.parametrize("name, want", [("dense zero3 fsdp64 float32", expected),
                                        ("staged zero3 stage4 fsdp16 1f1b float32", expected_staged)])
def test_weights_that_travel_in_float32_are_rejected(name, want):
    assert set(step(name).program.flops) == {"f32"}
    with pytest.raises(AssertionError):
        check_traffic(step(name).traffic(), want(step(name)))


@rows("dense ddp fsdp64", "dense zero1 fsdp64", *STAGED, cells=(*DENSE_CELLS, *STAGED_CELLS))
def test_gradients_cross_the_batch_once_a_step(name):
    """Of a pipeline not one number crosses it inside the loop: weights come before, gradients leave behind, and so does the
    loss."""
    staged = step(name).sizes["stage"] > 1
    over = {*step(name).batch_axes} if staged else {*step(name).made.program.step.deferred_axes}
    found = [c for c in step(name).program.collectives if over & set(c.axes)
             and (c.kind, c.axes) != ("collective-permute", ("context",))]
    assert found and {c.trips for c in found} == {1}


@rows(ZERO3_TENSOR, cells=(DDP_TENSOR + " none",))
def test_parts_of_a_microbatch_move_what_the_whole_moves(name):
    """Weights are gathered once and their gradients reduced once; over tensor there is a collective for each of the
    parts."""
    whole, in_parts = step(name), step(name + " in_parts")
    want, M, L = whole.traffic(), whole.run.training.microbatches, whole.run.model.num_layers
    sequences = whole.tokens // whole.run.data.seq_len
    for kind, of_layer in zip(("all-gather", "reduce-scatter"), TENSOR[whole.run.training.remat]):
        count, payload = want[kind, ("tensor",), "bf16"]
        want[kind, ("tensor",), "bf16"] = count + (sequences - 1) * M * L * of_layer, payload
    check_traffic(in_parts.traffic(), want)
    assert set(in_parts.program.flops) == {"bf16"}
    assert not in_parts.program.broken_permutes and not in_parts.program.partial_permutes


@rows(RINGED, cells=("ringed zero3 fsdp2 context4 none",))
def test_a_ring_sends_keys_and_values_in_bf16_and_their_gradients_in_float32(name):
    """Weights' gradients are reduce-scattered over both axes, in float32, a microbatch at a time."""
    it, sent = step(name), defaultdict(lambda: [0, 0])
    M, L = it.run.training.microbatches, it.run.model.num_layers
    for c in it.program.collectives:
        if c.kind == "collective-permute" and c.dtype != "s32":
            assert c.dtype == "bf16" or "transpose(" in c.source
            sent[c.kind, c.axes, c.dtype][0] += c.count
            sent[c.kind, c.axes, c.dtype][1] += c.bytes
    assert {key: tuple(value) for key, value in sent.items()} == ring(it, M * L, M * L)
    assert sum(c.count for c in it.program.collectives if c.kind == "collective-permute" and c.dtype == "bf16"
               and "transpose(" not in c.source) == 2 * (it.sizes["context"] - 1) * M * L
    scattered = [c for c in it.program.collectives if c.kind == "reduce-scatter"]
    assert {(c.axes, c.dtype) for c in scattered} == {(("fsdp", "context"), "f32")}
    size = 4 * sum(info.size for info in it.made.model.parameters())
    assert sum(c.payload_bytes for c in scattered) == pytest.approx(M * size, rel=0.02)


@rows("router zero3 data2 fsdp2 tensor2", cells=(
    "adapters zero3 data2 fsdp2 tensor2", "biases zero3 data2 fsdp2 tensor2", "biases zero2 fsdp8", "biases zero1 fsdp4 stage2",
    "router hsdp data2 fsdp4", "adapters zero1 fsdp8", "adapters zero3 fsdp2 context4"))
def test_gradients_of_every_role_are_reduced_in_float32_and_make_no_float32_matmul(name):
    """Over the axes of the batch nothing is reduced in bf16, however small; tensor sums activations, in bf16."""
    program = step(name).program
    sums = [c for c in program.collectives if c.kind in ("all-reduce", "reduce-scatter") and {"data", "fsdp"} & set(c.axes)]
    assert {c.dtype for c in sums} <= {"f32", "s32"}        # s32: the number of targets
    trained = sum(info.size for info in step(name).made.model.parameters() if info.trainable)
    assert sum(c.payload_bytes for c in sums) > 4 * trained // 2        # all are seen
    assert set(program.flops) == {"bf16"}       # a router's products, which are exact, too: `kernels.products`


@rows(cells=("ddp data2 tensor8", "zero3 fsdp2 tensor8"))
def test_repeated_heads_move_no_activation_and_cost_no_matmul_more(name):
    """Against a model with as many kv heads as ranks: the same matmuls, the same traffic but for the gradients of the
    heads."""
    (shared, own), cfg = (step(f"{model} {name}").program for model in ("shared_heads", "own_heads")), step(
        f"shared_heads {name}").run
    assert shared.flops == own.flops and not shared.broken_permutes
    sent = lambda program, dtype: sum(c.payload_bytes for c in program.collectives if c.dtype == dtype and any(
        axis.startswith("tensor") for axis in c.axes))
    assert sent(shared, "bf16") == sent(own, "bf16")
    # of keys' and values' weights, per layer and microbatch
    gradients = 2 * cfg.model.num_layers * cfg.training.microbatches * cfg.model.embed_dim * 4 * 64 * 4
    assert sent(shared, "f32") - sent(own, "f32") <= 2.5 * gradients


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


@pytest.mark.long
def test_the_shipped_70b_run_hides_its_tensor_axis_under_the_matmuls_of_its_parts():
    """20.6 s a step, 6.1% of it exposed and 4.3% on tensor, when this was written; with whole microbatches 21.6 s and
    15.6%."""
    made = assembly.assemble(run_files.load([str(RULES.parent / "configs/llama3-70b.toml")]), compile.topology("h100:64"))
    line = roofline.of_run(made, made.program.compile().as_text())
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
    assert held == memory.host_bytes(it.run, it.made.layout) == it.run.model.num_layers * it.tokens * it.run.model.embed_dim * 2
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


@rows(ZERO3_TENSOR + " float8")
def test_gathers_of_weights_x_and_dy_in_float8_are_half_as_many_bytes(name):
    """And the scales add sixteen all-reduces of one number each, a layer and microbatch."""
    it, (M, L) = step(name), (step(name).run.training.microbatches, step(name).run.model.num_layers)
    want, x_bytes = expected(it), it.tokens * it.run.model.embed_dim
    want["all-gather", ("data", "fsdp"), "bf16"] = (M * 2, 2 * M * it.count("embedding", "head"))
    want["all-gather", ("data", "fsdp"), "f8e4m3fn"] = (M * 2 * L * 7, M * 2 * it.count("matrix"))
    want["all-gather", ("tensor",), "bf16"] = (None, 2 * M * 2 * x_bytes)                   # the ends
    # what attention and MLP read, twice
    want["all-gather", ("tensor",), "f8e4m3fn"] = (4 * M * L, 4 * M * L * x_bytes)
    # what they add: its cotangent
    want["all-gather", ("tensor",), "f8e5m2"] = (2 * M * L, 2 * M * L * x_bytes)
    check_traffic(it.traffic(), want)
    amax = [c for c in it.program.collectives if c.kind == "all-reduce" and c.dtype == "bf16"]
    # For each of four groups of projections: of x forward, of dy backward, of the weights both ways, since what depends
    # on them alone is not kept; none again for the recomputation.
    assert sum(c.trips for c in amax) <= 16 * M * L and sum(c.payload_bytes for c in amax) == 16 * 2 * M * L


@rows(cells=STAGED[:2])
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


@every_staged
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


@every_staged
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


def sent(it: Step, kind: str, axis: str, dtype: str) -> int:
    return sum(row["bytes"] for row in audit.summarize(it.program.collectives)
               if (row["kind"], tuple(row["axes"]), row["dtype"]) == (kind, (axis,), dtype))


def shapes_of(it: Step) -> tuple[int, int, int, int, int]:
    """(tokens that a GPU's experts see, choices of a token, experts of a GPU, embed_dim, expert_mlp_dim)"""
    cfg, gpus = it.run.model, it.sizes["fsdp"]
    return gpus * it.tokens, cfg.experts_per_token, cfg.num_experts // gpus, cfg.embed_dim, cfg.expert_mlp_dim


@rows(ROUTED)
def test_tokens_are_gathered_and_scattered_in_bfloat16_and_experts_over_hosts_alone(name):
    it, (A, K, E, D, F) = step(name), shapes_of(step(name))
    runs, over = it.run.model.num_layers * it.run.training.microbatches, 7 / 8        # of 8 hosts, of 8 GPUs a host
    # x, and in the backward x again and dy; y and dx. Choices and weights of both directions beside them, and weights'
    # gradients.
    assert sent(it, "all-gather", "fsdp", "bf16") == runs * 3 * A * D * 2 * over
    assert sent(it, "reduce-scatter", "fsdp", "bf16") == runs * 2 * A * D * 2 * over
    small = runs * A * K * 4 * over
    assert sent(it, "all-gather", "fsdp", "s32") == sent(it, "all-gather", "fsdp", "f32") == 2 * small
    assert sent(it, "reduce-scatter", "fsdp", "f32") == small
    # Weights forward and backward; gradients once per microbatch, in float32.
    assert sent(it, "all-gather", "data", "bf16") == runs * 2 * 3 * E * D * F * 2 * over
    assert sent(it, "reduce-scatter", "data", "f32") == runs * 3 * E * D * F * 4 * over
    told = {(row["kind"], *row["axes"], row["dtype"]): row["bytes"] for row in it.formulas.collectives}
    for key in (*(("all-gather", "fsdp", dtype) for dtype in ("bf16", "s32", "f32")), ("reduce-scatter", "fsdp", "bf16"),
                ("reduce-scatter", "fsdp", "f32"), ("all-gather", "data", "bf16"), ("reduce-scatter", "data", "f32")):
        assert told[key] == pytest.approx(sent(it, *key)), key
    # A device's own choices and weights are gathered, K of a token: of the scores none, in float32 or else.
    scores = it.run.model.num_experts
    for row in it.program.collectives:
        for dims in row.arrays:
            assert dims[-1:] != (scores,) or dims == (D, scores), (row.kind, row.axes, row.dtype, dims)
    assert {dims for row in it.program.collectives for dims in row.arrays
            if (row.kind, row.axes, row.dtype) == ("all-gather", ("fsdp",), "f32")} == {(A, K)}


@rows(ROUTED)
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


@rows(ROUTED)
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


@rows(ROUTED)
def test_executed_rows_are_the_spared_share_and_the_tiles_fill(name):
    """Temporaries are at most 1.3 times those of a buffer that even choices fill: the spared buffer, and the tables and sums
    of the rounds that it may need."""
    (A, K, E, D, _), rows = shapes_of(step(name)), tiles.GROUPED[2].rows
    assert f"bf16[{(-(-int(1.25 * A * K / 8) // rows) + E) * rows},{D}]" in step(name).text
    even = step(name + " even")
    assert f"bf16[{A * K // 8 + E * rows},{D}]" in even.text
    assert even.temp_bytes < step(name).temp_bytes <= 1.3 * even.temp_bytes


@rows(ROUTED)
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


# ---- formulas beside the compiled step -------------------------------------------------------------------------------

# A row, and how far the formula's total memory may be off, 5% unless it is said: XLA's order of a layer's kernels decides
# what lives beside what, up to 4%.
BESIDE = """
wide ddp data8 none
wide zero1 fsdp8 selective
wide zero1 data2 fsdp4 full
wide zero1 fsdp8 full 1x2
wide zero2 fsdp8 full ±.1               # the zeros that the head's gradient begins with are made once, and kept
wide zero3 fsdp8 none
wide_heads zero3 fsdp8 none 1x4
wide_norms zero3 fsdp8 none 1x4
wide_norms_after zero3 fsdp8 selective 1x4
wide zero3 fsdp8 selective
wide zero3 fsdp8 full
wide zero3 fsdp8 full 1x2
gpt zero3 fsdp8 selective 4x8 T1024
wide hsdp data2 fsdp4 full
wide tensor tensor8 full
wide ddp data2 tensor4 none
wide ddp data2 tensor4 selective
wide ddp data2 tensor4 full
wide zero3 fsdp4 tensor2 full
wide ddp data2 context4 selective ring 4x1 T16384
wide ddp data2 context4 full gather 4x1 T16384
wide ddp data2 context4 none ulysses 4x1 T16384
window_5000 ddp data2 context4 selective ring 4x1 T16384 ±.1        # what a window's blocks leave to live
window_2048 zero3 fsdp2 context4 full ring 4x1 T16384 ±.08          # more lives in a layer than without windows
window_1024 zero1 stage2 fsdp4 selective 8x1 1f1b ±.1
window_3000 ddp data2 context4 full gather 4x1 T16384 ±.1
wide zero3 fsdp2 context4 full ring 4x1 T16384
wide zero3 fsdp2 tensor2 context2 full ring 4x1 T16384 ±.1          # a ring of two needs no loop: less lives in it
wide zero1 stage4 fsdp2 selective 8x1 1f1b ±.1      # slots are counted; what is taken out and put in, XLA copies
wide ddp stage2 data4 full 4x1 gpipe ±.1
wide zero3 stage2 fsdp2 tensor2 full 8x1 interleaved2 ±.1
wide zero3 stage2 fsdp4 full 8x1 interleaved4 ±.1
wide zero1 stage4 tensor2 none 8x1 zero_bubble ±.1
wide zero2 stage2 fsdp2 tensor2 selective 8x1 interleaved_zero_bubble2 ±.1
wide zero3 stage4 fsdp4 context2 tensor2 selective 8x1 T8192 interleaved2 ±.1
experts zero3_experts_fsdp fsdp8 full
experts zero3_experts_fsdp data2 fsdp4 none
experts_12 zero3 fsdp8 none 1x4         # what a layer keeps outweighs all else, and no router keeps float32 of x
experts zero3 fsdp8 selective
one_choice zero3_experts_fsdp data2 fsdp4 selective
experts zero3_experts_tensor fsdp4 tensor2 full 1x8     # rows of a round outweigh the sums of weights' gradients
behind_dense zero3_experts_tensor fsdp2 tensor4 full
behind_dense zero3_experts_tensor fsdp4 tensor2 selective
behind_wide zero3_experts_tensor fsdp4 tensor2 full     # the dense layer's gradient is made by two parts of the microbatch
behind_dense zero3_experts_tensor fsdp4 tensor2 none    # of several rows XLA turns what all layers keep
experts zero3_experts_tensor fsdp4 tensor2 none 2x1 T8192
experts zero3_experts_tensor fsdp2 tensor2 context2 full ring 4x1 T16384
experts zero3_experts_tensor tensor2 context4 full ring 4x1 T16384
experts zero3_experts_tensor fsdp2 context4 full ring 4x1 T16384
experts zero3_experts_tensor fsdp2 tensor2 context2 none ring 4x1 T16384
experts zero3_experts_tensor fsdp2 tensor2 context2 full ulysses 4x1 T16384
experts zero3_experts_fsdp data2 fsdp2 stage2 selective 8x1 1f1b ±.1
experts zero3_experts_tensor fsdp2 tensor2 stage2 full 8x1 zero_bubble ±.1
behind_dense zero3_experts_fsdp data2 fsdp2 stage2 selective 8x1 1f1b ±.1
behind_three zero3_experts_tensor fsdp2 tensor2 stage2 full 6x1 interleaved_zero_bubble2 ±.1
behind_experts zero3_experts_fsdp data2 fsdp2 stage2 selective 8x1 1f1b ±.1
hybrid zero3 fsdp8 selective ±.1        # of a period's other layers, and of kernels' padded operands: up to 8%
hybrid zero3 fsdp8 full ±.1
hybrid zero3 fsdp8 selective 4x4 ±.1
hybrid zero1 fsdp8 selective ±.1
hybrid zero1 fsdp8 full ±.1
hybrid zero1 fsdp8 none ±.1
windows zero1 fsdp8 selective
windows zero1 fsdp8 full ±.1
windows zero1 fsdp8 selective 4x4
windows zero3 fsdp8 selective ±.1
windows zero3 fsdp8 full ±.1
windows zero2 fsdp8 selective ±.1
hybrid ddp data2 tensor4 selective ±.1
hybrid ddp data2 context4 full ring 4x1 T16384 ±.1
hybrid zero1 stage2 fsdp4 selective 8x1 1f1b ±.1
latents zero3 fsdp8 selective ±.1
latents zero3_experts_tensor fsdp4 tensor2 full ±.1
latents zero3 fsdp2 context4 full ring 4x1 T16384 ±.1
latents_5 zero3_experts_fsdp data2 fsdp2 stage2 selective 8x1 1f1b ±.1
sinks zero3_experts_fsdp fsdp8 selective ±.1
wide zero3 data2 fsdp8 tensor4 full 4x1 ±.12    # a few hundred MiB, of which no formula knows XLA's workspaces
wide hsdp data128 fsdp8 full
wide zero3 fsdp128 tensor8 selective 4x1 ±.12
"""
TOLERANCES = {name.strip(): float(tolerance or .05) for line in BESIDE.strip().splitlines()
              for name, _, tolerance in [line.partition("#")[0].partition("±")]}
FIRST = "wide zero3 fsdp4 tensor2 full"


@rows(cells=TOLERANCES)
def test_the_compiled_step_is_what_the_formulas_say(name):
    """States, collectives, FLOPs and memory."""
    it, held, priced = step(name), step(name).memory_bytes, step(name).formulas.memory_bytes
    assert (priced["params"], priced["optimizer"]) == (held["params"], held["optimizer"])
    if held["grads"] is not None:
        grads = priced["loop_grads" if it.made.choice else "grads"]
        assert grads == pytest.approx(held["grads"], rel=1e-3)                      # beside them loops carry scalars
    assert priced["total"] == pytest.approx(held["total"], rel=TOLERANCES[name])
    # Sums of experts' biases are products of XLA's, 0.01% of all.
    flops = 1e-3 if name.startswith("sinks") else 1e-6
    assert formula_vs_compiled.matmul_flops(it.program) == pytest.approx(it.formulas.matmul_flops, rel=flops)
    # kinds and axes of collectives, bytes within 2%
    assert formula_vs_compiled.differences(it.made, it.formulas, held, it.program) == []


@rows(*DENSE, ROUTED)
def test_formulas_tell_what_a_program_sends_and_multiplies(name):
    it = step(name)
    assert formula_vs_compiled.differences(it.made, it.formulas, it.memory_bytes | {"total": None}, it.program) == []


@rows(FIRST)
def test_what_differs_is_named_and_what_no_rule_explains_with_its_tensor(name):
    it, formulas = step(name), step(name).formulas
    by_kind = {(row["kind"], *row["axes"]): row for row in formulas.collectives}
    moved, gathers = by_kind.pop(("reduce-scatter", "fsdp")), by_kind["all-gather", "tensor"]
    by_kind["all-gather", "tensor"] = gathers | {"bytes": gathers["bytes"] // 2}
    by_kind["reduce-scatter", "data"] = moved | {"axes": ["data"]}
    wrong = dataclasses.replace(formulas, collectives=list(by_kind.values()), matmul_flops=2 * formulas.matmul_flops,
                                memory_bytes={**formulas.memory_bytes, "params": 1, "total": 1})
    params, total, gathered, scattered, absent, matmuls = formula_vs_compiled.differences(it.made, wrong, it.memory_bytes, it.program)
    assert params.startswith("memory, params: 244.0 MiB compiled, 1 B") and total.startswith("memory, total")
    assert gathered.startswith("all-gather over tensor in bf16: ") and "compiled" in gathered
    assert scattered.startswith("reduce-scatter over fsdp in f32, ") and "has no formula: layers/" in scattered
    assert absent.startswith("reduce-scatter over data in f32: 0 B compiled") and matmuls.startswith("matmuls: ")


def test_no_formula_reaches_float8():
    made = assembled("wide ddp 1x2 float8")
    assert formula_vs_compiled.of(made, held_memory.formula(made)) is None
