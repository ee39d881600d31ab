"""The step of a mixture of experts as 64 H100 would run it: what it sends, multiplies and holds, by formula.

Qwen3-30B-A3B's layers, experts over the 8 GPUs of a host and ZeRO-3 over all 64; compiled without a GPU.
"""
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from meshtrain import assembly, config, hardware
from meshtrain.cost.formulas import traffic
from meshtrain.cost.formulas.placed import Options, place
from meshtrain.cost.program import audit, compile, hlo
from meshtrain.kernels import mosaic, tiles
from meshtrain.parallel.experts import dispatch

pytestmark = pytest.mark.skipif(compile.missing_wheels(),
                                reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")

RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
L, M, T, D, F, E, K = 2, 2, 4096, 2048, 768, 128, 8
HOST, HOSTS = 8, 8
A = HOST * T            # tokens that a GPU's experts see: one sequence a GPU and microbatch
EXPERTS = 3 * E // HOST * D * F         # elements of a GPU's experts


@functools.cache
def assembled():
    run = config.Run(
        mesh=dict(data=HOSTS, fsdp=HOST), sharding=dict(rules=str(RULES / "zero3_experts_fsdp.toml")),
        model=dict(vocab_size=1024, embed_dim=D, num_layers=L, num_heads=8, num_kv_heads=8, head_dim=64, num_experts=E,
                   experts_per_token=K, expert_mlp_dim=F),
        data=dict(seq_len=T, global_batch=64 * M), training=dict(microbatches=M, remat="full"),
        experts=dict(dispatch="gather"))
    return assembly.assemble(run, compile.topology("h100:64"))


@functools.cache
def program():
    made = assembled()
    executable = made.program.compile()
    return executable, audit.read(executable.as_text(), made.mesh)


def sent(found, kind: str, *axes: str, dtype: str) -> int:
    rows = [row for row in audit.summarize(found.collectives) if row["kind"] == kind
            and tuple(row["axes"]) == axes and row["dtype"] == dtype]
    return sum(row["bytes"] for row in rows)


def test_tokens_are_gathered_and_scattered_in_bfloat16_and_experts_over_hosts_alone():
    _, found = program()
    runs, over = L * M, lambda n: (n - 1) / n
    # x, and in the backward x again and dy; y and dx. Choices and weights of both directions beside them, and weights'
    # gradients.
    assert sent(found, "all-gather", "fsdp", dtype="bf16") == runs * 3 * A * D * 2 * over(HOST)
    assert sent(found, "reduce-scatter", "fsdp", dtype="bf16") == runs * 2 * A * D * 2 * over(HOST)
    small = runs * A * K * 4 * over(HOST)
    assert sent(found, "all-gather", "fsdp", dtype="s32") == sent(found, "all-gather", "fsdp", dtype="f32") == 2 * small
    assert sent(found, "reduce-scatter", "fsdp", dtype="f32") == small
    # Weights forward and backward; gradients once per microbatch, in float32.
    assert sent(found, "all-gather", "data", dtype="bf16") == runs * 2 * EXPERTS * 2 * over(HOSTS)
    assert sent(found, "reduce-scatter", "data", dtype="f32") == runs * EXPERTS * 4 * over(HOSTS)


def test_the_routers_products_are_float32_by_parts_in_the_step_forward_and_backward():
    """Scores, made again under remat, of x and the router's three parts; the gradient of the router from three parts of
    the scores' gradient; that of x, which is bfloat16, from two parts of each."""
    products = [line for line in program()[0].as_text().splitlines() if re.search(r" dot\(", line)]
    routers = {form: [line for line in products if form + "/dot_general" in line.replace(")", "")]
               for form in ("BTD,DPE->BTPE", "BTEP,DEP->BTD", "BTD,BTE->DE", "DE->BTE")}
    assert [len(lines) > 0 for lines in routers.values()] == [True, True, True, False]
    assert [len(lines) for lines in routers.values()][:2] == [2, 1]
    for line in sum(routers.values(), []):
        assert "precision" not in line, line[:200]      # tensor cores: no float32 among the operands
    assert all(re.search(r"= f32\[[\d,]+\]\S* ", line) for form in ("BTD,DPE->BTPE", "BTD,BTE->DE") for line in routers[form])


def test_inspects_formulas_tell_what_the_program_sends_for_its_experts():
    made, found = assembled(), program()[1]
    placed = place(made.model.parameters(), made.run.model, made.layout, made.mesh_spec)
    told = traffic.summarized(traffic.of(placed, Options.of(made.run)), made.mesh_spec.sizes)
    for kind, axes, dtype in (("all-gather", "fsdp", "bf16"), ("reduce-scatter", "fsdp", "bf16"),
                              ("all-gather", "fsdp", "s32"),
                              ("all-gather", "fsdp", "f32"), ("reduce-scatter", "fsdp", "f32"),
                              ("all-gather", "data", "bf16"),
                              ("reduce-scatter", "data", "f32")):
        (row,) = (row for row in told if (row["kind"], row["axes"], row["dtype"]) == (kind, [axes], dtype))
        assert row["bytes"] == pytest.approx(sent(found, kind, axes, dtype=dtype)), (kind, axes, dtype)


def test_no_product_goes_over_all_experts_and_the_forward_is_not_repeated():
    executable, found = program()
    text = executable.as_text()
    # Forward gate, up and down; backward gate, up, down's and, in one kernel, their transposes, and three outer
    # products. Rounds behind the first have their own, and make gate, up and down's twice: for inputs and for weights.
    kernels = [line for line in text.splitlines() if " custom-call(" in line and re.search(r"/grouped_(\w+?)_", line)]
    assert len(kernels) == (3 + 4 + 3) + (3 + 4 + 3 + 3)
    # With Mosaic, where it is taken unasked: outward, and the gradient of x.
    ordered = sum("/grouped_mosaic_" in line for line in kernels)
    assert ordered == (2 + 2 if mosaic.is_taken_on(hardware.GPUS["h100"]) else 0)
    # What is not a kernel: attention's and the router's products, embedding and head.
    tokens = T * M
    projections, router, head = 4 * D * 512, D * E, D * 1024
    mine = 2 * tokens * (L * (4 * projections + 3 * router) + 3 * head)
    others = [dot for dot in found.dots if "grouped_" not in dot.source]
    assert sum(dot.flops for dot in others) <= 1.6 * mine < 0.2 * (6 * tokens * L * E * 3 * D * F)


def test_experts_multiply_what_their_tokens_need_the_inward_ones_twice_and_half_a_block_each():
    _, found = program()
    rows, tiles_fill = T * K, E // HOST * tiles.GROUPED[2].rows / 2
    experts = sum(dot.flops for dot in found.dots if "grouped_" in dot.source)
    # Of a row gate, up and down: forward, two products backward, and gate and up once more, which nobody keeps.
    forward, backward, again = 3, 6, 2
    assert experts == L * M * (rows + tiles_fill) * (forward + backward + again) * 2 * D * F
    assert experts <= 1.05 * L * M * rows * 22 * D * F
    assert not found.unknown_loops and all("attention" in name for name in found.uncounted)


def test_no_score_of_a_router_travels():
    """A device's own choices and weights are gathered, K of a token: of the E scores none, in float32 or else."""
    _, found = program()
    for row in found.collectives:
        for dims in row.arrays:
            assert dims[-1:] != (E,) or dims == (D, E), (row.kind, row.axes, row.dtype, dims)
    (choices,) = {dims for row in found.collectives if row.kind == "all-gather" and row.axes == ("fsdp",)
                  and row.dtype == "f32"
                  for dims in row.arrays}
    assert choices == (A, K)


def test_executed_rows_are_the_spared_share_and_the_tiles_fill():
    executable, _ = program()
    rows = -(-int(1.25 * A * K / HOST) // tiles.GROUPED[2].rows) + E // HOST
    assert f"bf16[{rows * tiles.GROUPED[2].rows},{D}]" in executable.as_text()


def test_temporaries_are_at_most_1_3_times_those_of_a_buffer_that_even_choices_fill(monkeypatch):
    """The spared buffer, and the tables and sums of the rounds that it may need."""
    spared, _ = program()
    shipped = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *args: dataclasses.replace(shipped(*args), capacity_factor=1.0))
    balanced = assembled.__wrapped__().program.compile()
    needs = lambda executable: executable.memory_analysis().temp_size_in_bytes
    assert f"bf16[{A * K // HOST + E // HOST * tiles.GROUPED[2].rows},{D}]" in balanced.as_text()
    assert needs(balanced) < needs(spared) <= 1.3 * needs(balanced)


def test_a_layers_backward_gathers_its_tokens_before_its_experts_weights():
    """Gathers queue in the order in which they start; weights first would hold up x, and what it is made of."""
    tokens, weights = (A, D), (D, E // HOST, F)
    bodies = hlo.parse(program()[0].as_text()).computations.values()
    orders = [[hlo.shapes(ins.type_text)[-1][1] for ins in body.values()
               if ins.op == "all-gather-start" and "transpose(jvp" in ins.op_name] for body in bodies]
    (order,) = (order for order in orders if weights in order)
    assert order.count(weights) == 3 and order.count(tokens) == 2       # x and dy
    assert order.index(tokens) < order.index(weights)


def test_weights_that_are_gathered_and_gradients_that_are_scattered_are_not_turned():
    """They travel along their first dim, and kernels read and write them as they lie: no pass over all of a GPU's
    experts."""
    executable, _ = program()
    whole = [line for line in executable.as_text().splitlines()
             if re.search(rf"= (bf16|f32)\[({E // HOST},{D},{F}|{E // HOST},{F},{D})\]", line)]
    assert not whole, whole[:3]
