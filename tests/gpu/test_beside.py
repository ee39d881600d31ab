"""The closed formulas and the step compiled for GPUs say the same of our own layouts: states, collectives, FLOPs and
memory."""
import dataclasses
import functools

import pytest
import sampling

from meshtrain import assembly, config
from meshtrain.cost.program import audit, compile
from meshtrain.inspection import formula_vs_compiled, memory
from meshtrain.shipped import shipped

pytestmark = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}"
)

# Few layers, as wide as bytes need to be to outweigh norms, statistics of the loss and XLA's workspaces.
MODEL = dict(vocab_size=32768, embed_dim=2048, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=5632)
GPT = dict(vocab_size=50304, embed_dim=1600, num_layers=12, num_heads=25, num_kv_heads=25, head_dim=64, mlp_dim=6400,
           norm="layernorm", activation="gelu", position="learned", attention_bias="all",
           mlp_bias=True, tie_embeddings=True)
LONG = dict(seq_len=16384, rows=1)
# Experts no power of two, and as wide as they are for products to be most of it.
EXPERTS = MODEL | dict(num_layers=4, num_experts=24, experts_per_token=3, expert_mlp_dim=768)
# Layers of several kinds: the gated delta rule beside attention with gates; latents; sinks, windows and biases.
HYBRID = MODEL | dict(num_layers=8, mixers="GGGF", qk_norm="head", attention_gate=True,
                      linear=dict(key_heads=8, value_heads=16))
WINDOWS = MODEL | dict(mixers="WWWF", window=1024)
LATENTS = EXPERTS | dict(num_kv_heads=16, head_dim=192, mlps="de*", shared_expert_dim=768, latent=dict(
    kv_dim=512, query_dim=768, rope_dim=64, value_dim=128))
SINKS = EXPERTS | dict(mixers="WF", window=1024, attention_sinks=True, attention_bias="all", mlp_bias=True,
                       router_bias="logits", activation="swiglu_clamped", num_heads=32, head_dim=64)
BEHIND_DENSE = EXPERTS | dict(num_layers=6, mlps="dde*")


@dataclasses.dataclass(frozen=True)
class Cell:
    """rows: sequences of a microbatch on each replica. memory: how far the formula's total may be off, with its
    reason."""
    rule: str
    mesh: dict
    remat: str
    microbatches: int = 4
    rows: int = 2
    seq_len: int = 4096
    method: str = "ring"
    schedule: str = "1f1b"
    chunks: int = 1
    model: dict = dataclasses.field(default_factory=lambda: MODEL)
    # XLA's order of a layer's kernels decides what lives beside what: up to 4% when this was written
    memory: float = .05
    flops: float = 1e-6

    @property
    def num_gpus(self) -> int:
        return functools.reduce(lambda a, b: a * b, self.mesh.values(), 1)


# A few hundred MiB in all, of which XLA's workspaces are a part that no formula knows.
TINY = dict(rows=1, memory=.12)
CELLS = {
    "ddp": Cell("ddp", dict(data=8), "none"),
    "zero1": Cell("zero1", dict(fsdp=8), "selective"),
    "zero1 over two axes": Cell("zero1", dict(data=2, fsdp=4), "full"),
    "zero1, one microbatch": Cell("zero1", dict(fsdp=8), "full", microbatches=1),
    # XLA makes the zeros that the head's gradient begins with once for all microbatches, and keeps them.
    "zero2": Cell("zero2", dict(fsdp=8), "full", memory=.1),
    "zero3": Cell("zero3", dict(fsdp=8), "none"),
    "zero3, norms of queries and keys": Cell("zero3", dict(fsdp=8), "none", 1, 4,
                                             model=MODEL | dict(num_heads=32, qk_norm="head")),
    "zero3, norms before and after": Cell("zero3", dict(fsdp=8), "none", 1, 4,
                                          model=MODEL | dict(norm_placement="both")),
    "zero3, norms after, selective": Cell("zero3", dict(fsdp=8), "selective", 1, 4,
                                          model=MODEL | dict(norm_placement="after")),
    "zero3, selective": Cell("zero3", dict(fsdp=8), "selective"),
    "zero3, full": Cell("zero3", dict(fsdp=8), "full"),
    "zero3, one microbatch": Cell("zero3", dict(fsdp=8), "full", microbatches=1),
    "zero3, tied": Cell("zero3", dict(fsdp=8), "selective", rows=8, seq_len=1024, model=GPT),
    "hsdp": Cell("hsdp", dict(data=2, fsdp=4), "full"),
    "tensor": Cell("tensor", dict(tensor=8), "full"),
    "tensor sequence": Cell("ddp", dict(data=2, tensor=4), "none"),
    "tensor sequence, selective": Cell("ddp", dict(data=2, tensor=4), "selective"),
    "tensor sequence, full": Cell("ddp", dict(data=2, tensor=4), "full"),
    "zero3 and tensor": Cell("zero3", dict(fsdp=4, tensor=2), "full"),
    "ring": Cell("ddp", dict(data=2, context=4), "selective", **LONG),
    "gather": Cell("ddp", dict(data=2, context=4), "full", method="gather", **LONG),
    "ulysses": Cell("ddp", dict(data=2, context=4), "none", method="ulysses", **LONG),
    # What a window's blocks leave to live XLA orders as it likes.
    "a window round a ring": Cell("ddp", dict(data=2, context=4), "selective", memory=.1,
                                  **LONG, model=MODEL | dict(window=5000)),
    # With windows more lives in a layer than round a ring without.
    "windows and global layers round a ring": Cell("zero3", dict(fsdp=2, context=4), "full", memory=.08, **LONG,
                                                   model=MODEL | dict(window=2048, mixers="WF")),
    "windows and global layers in stages": Cell("zero1", dict(stage=2, fsdp=4), "selective",
                                                8, 1, memory=.1, model=MODEL | dict(
        window=1024, mixers="WF")),
    "a window, gathered": Cell("ddp", dict(data=2, context=4), "full", method="gather",
                               memory=.1, **LONG, model=MODEL | dict(
        window=3000)),
    "zero3 and context": Cell("zero3", dict(fsdp=2, context=4), "full", **LONG),
    # A ring of two needs no loop, and less lives in it.
    "zero3, tensor and context": Cell("zero3", dict(fsdp=2, tensor=2, context=2), "full", memory=.1, **LONG),
    # Of stages the slots are counted; what is taken out of them and put in, XLA copies as it sees fit.
    "1f1b": Cell("zero1", dict(stage=4, fsdp=2), "selective", 8, 1, memory=.1),
    "gpipe": Cell("ddp", dict(stage=2, data=4), "full", 4, 1, schedule="gpipe", memory=.1),
    "interleaved": Cell("zero3", dict(stage=2, fsdp=2, tensor=2), "full", 8, 1, schedule="interleaved",
                        chunks=2, memory=.1),
    "interleaved, four chunks": Cell("zero3", dict(stage=2, fsdp=4), "full", 8, 1, schedule="interleaved",
                                     chunks=4, memory=.1),
    "zero bubble": Cell("zero1", dict(stage=4, tensor=2), "none", 8, 1, schedule="zero_bubble", memory=.1),
    "interleaved zero bubble": Cell("zero2", dict(stage=2, fsdp=2, tensor=2), "selective", 8, 1,
                                    schedule="interleaved_zero_bubble", chunks=2, memory=.1),
    "five axes on 64 GPUs": Cell("zero3", dict(stage=4, fsdp=4, context=2, tensor=2), "selective",
                                 8, 1, 8192, schedule="interleaved", chunks=2, memory=.1),
    "experts over fsdp": Cell("zero3_experts_fsdp", dict(fsdp=8), "full", model=EXPERTS),
    "experts over fsdp, the rest over data": Cell("zero3_experts_fsdp", dict(data=2, fsdp=4), "none", model=EXPERTS),
    # What a layer keeps outweighs all else: norms of queries and keys read as much as attention, and no router keeps
    # float32 of x.
    "experts over nothing, all kept": Cell("zero3", dict(fsdp=8), "none", 1, 4, model=EXPERTS | dict(
        num_layers=12, num_heads=32, qk_norm="head")),
    "experts over nothing": Cell("zero3", dict(fsdp=8), "selective", model=EXPERTS),
    "one choice, sent, and a shared expert": Cell("zero3_experts_fsdp", dict(data=2, fsdp=4),
                                                  "selective", model=EXPERTS | dict(
        experts_per_token=1, shared_expert_dim=1024)),
    # Rows of a round outweigh the sums of weights' gradients.
    "experts over tensor, many rows": Cell("zero3_experts_tensor", dict(fsdp=4, tensor=2), "full", 1, 8, model=EXPERTS),
    "experts over more of tensor": Cell("zero3_experts_tensor", dict(fsdp=2, tensor=4), "full", model=BEHIND_DENSE),
    "experts over tensor behind dense layers": Cell("zero3_experts_tensor", dict(fsdp=4, tensor=2), "selective",
                                                    model=BEHIND_DENSE),
    # Experts' layers hold less than a dense one, whose gradient is made by two parts of the microbatch.
    "experts over tensor behind a wide dense layer": Cell("zero3_experts_tensor", dict(fsdp=4, tensor=2), "full",
                                                          model=EXPERTS | dict(num_layers=5,
                                                                               mlps="de*", mlp_dim=24576)),
    # Of several rows XLA turns what all layers keep.
    "experts over tensor behind dense layers, all kept": Cell("zero3_experts_tensor", dict(fsdp=4, tensor=2), "none",
                                                              model=BEHIND_DENSE),
    "experts over tensor, all kept of one row": Cell("zero3_experts_tensor", dict(fsdp=4, tensor=2), "none", 2, 1, 8192,
                                                     model=EXPERTS),
    "experts over tensor and context": Cell("zero3_experts_tensor", dict(fsdp=2, tensor=2, context=2), "full",
                                            **LONG, model=EXPERTS),
    "experts over tensor and a longer ring": Cell("zero3_experts_tensor", dict(tensor=2, context=4), "full",
                                                  **LONG, model=EXPERTS),
    "experts on each of a ring": Cell("zero3_experts_tensor", dict(fsdp=2, context=4), "full", **LONG,
                                      model=EXPERTS),
    "experts over tensor and context, all kept": Cell("zero3_experts_tensor", dict(fsdp=2, tensor=2, context=2),
                                                      "none", **LONG, model=EXPERTS),
    "experts round Ulysses": Cell("zero3_experts_tensor", dict(fsdp=2, tensor=2, context=2), "full",
                                  method="ulysses", **LONG, model=EXPERTS),
    "experts in stages": Cell("zero3_experts_fsdp", dict(data=2, fsdp=2, stage=2), "selective",
                              8, 1, model=EXPERTS, memory=.1),
    "experts over tensor in stages": Cell("zero3_experts_tensor", dict(fsdp=2, tensor=2, stage=2), "full", 8, 1,
                                          schedule="zero_bubble", model=EXPERTS, memory=.1),
    "experts in stages behind dense layers": Cell("zero3_experts_fsdp", dict(data=2, fsdp=2, stage=2),
                                                  "selective", 8, 1,
                                                  model=BEHIND_DENSE, memory=.1),
    "experts over tensor in stages behind dense layers": Cell(
        "zero3_experts_tensor", dict(fsdp=2, tensor=2, stage=2), "full", 6, 1, schedule="interleaved_zero_bubble",
        chunks=2, model=EXPERTS | dict(num_layers=7, mlps="ddde*"), memory=.1),
    "experts in stages behind a layer with experts": Cell(
        "zero3_experts_fsdp", dict(data=2, fsdp=2, stage=2), "selective", 8, 1, memory=.1,
        model=EXPERTS | dict(num_layers=5, mixers="WF*", window=1024)),
    # What of a period's other layers lives beside one, and of kernels' padded operands, XLA orders as it likes: up to 8%.
    "the gated delta rule": Cell("zero3", dict(fsdp=8), "selective", memory=.1, model=HYBRID),
    "the gated delta rule, full": Cell("zero3", dict(fsdp=8), "full", memory=.1, model=HYBRID),
    "the gated delta rule, many rows": Cell("zero3", dict(fsdp=8), "selective", rows=4, memory=.1, model=HYBRID),
    "the gated delta rule, zero1": Cell("zero1", dict(fsdp=8), "selective", memory=.1, model=HYBRID),
    "the gated delta rule, zero1, full": Cell("zero1", dict(fsdp=8), "full", memory=.1, model=HYBRID),
    "the gated delta rule, zero1, all kept": Cell("zero1", dict(fsdp=8), "none", memory=.1, model=HYBRID),
    "windows, zero1": Cell("zero1", dict(fsdp=8), "selective", memory=.05, model=WINDOWS),
    "windows, zero1, full": Cell("zero1", dict(fsdp=8), "full", memory=.1, model=WINDOWS),
    "windows, zero1, many rows": Cell("zero1", dict(fsdp=8), "selective", rows=4, memory=.05, model=WINDOWS),
    "windows, zero3": Cell("zero3", dict(fsdp=8), "selective", memory=.1, model=WINDOWS),
    "windows, zero3, full": Cell("zero3", dict(fsdp=8), "full", memory=.1, model=WINDOWS),
    "windows, zero2": Cell("zero2", dict(fsdp=8), "selective", memory=.1, model=WINDOWS),
    "the gated delta rule over tensor": Cell("ddp", dict(data=2, tensor=4), "selective", memory=.1, model=HYBRID),
    "states of runs of tokens": Cell("ddp", dict(data=2, context=4), "full", memory=.1, **LONG, model=HYBRID),
    "the gated delta rule in stages": Cell("zero1", dict(stage=2, fsdp=4), "selective", 8, 1, memory=.1, model=HYBRID),
    "latents": Cell("zero3", dict(fsdp=8), "selective", memory=.1, model=LATENTS),
    "latents over tensor": Cell("zero3_experts_tensor", dict(fsdp=4, tensor=2), "full", memory=.1, model=LATENTS),
    "latents over context": Cell("zero3", dict(fsdp=2, context=4), "full", memory=.1, **LONG, model=LATENTS),
    "latents in stages": Cell("zero3_experts_fsdp", dict(data=2, fsdp=2, stage=2), "selective", 8, 1, memory=.1,
                              model=LATENTS | dict(num_layers=5)),
    # Sums of experts' biases are products of XLA's, 0.01% of all.
    "sinks, windows and biases of experts": Cell("zero3_experts_fsdp", dict(fsdp=8), "selective", memory=.1, flops=1e-3,
                                                 model=SINKS),
    "64 GPUs": Cell("zero3", dict(data=2, fsdp=8, tensor=4), "full", **TINY),
    "1,024 GPUs": Cell("hsdp", dict(data=128, fsdp=8), "full"),
    "1,024 GPUs, tensor": Cell("zero3", dict(fsdp=128, tensor=8), "selective", **TINY),
}  # fmt: skip
FIRST = "zero3 and tensor"


@functools.cache
def compiled(name: str):
    """(assembled run, its step's bytes by kind, the audit of the step, the formulas) of a cell."""
    cell = CELLS[name]
    batch = cell.microbatches * cell.rows * cell.mesh.get("data", 1) * cell.mesh.get("fsdp", 1)
    run = config.Run(
        mesh=cell.mesh, sharding=dict(rules=str(shipped(f"sharding_rules/{cell.rule}.toml"))),
        model=cell.model | dict(compute_dtype="bfloat16"), data=dict(seq_len=cell.seq_len, global_batch=batch),
        training=dict(microbatches=cell.microbatches, remat=cell.remat), context=dict(method=cell.method),
        pipeline=dict(schedule=cell.schedule, chunks=cell.chunks) if "stage" in cell.mesh else {})
    made = assembly.assemble(run, compile.topology(f"h100:{cell.num_gpus}"))
    executable = made.program.compile()
    return (made, memory.held_by_program(made, executable), audit.read(executable.as_text(), made.mesh),
            formula_vs_compiled.of(made, memory.formula(made)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=sampling.GRID) for name in CELLS])
def test_the_compiled_step_is_what_the_formulas_say(name):
    made, held, program, formulas = compiled(name)
    priced = formulas.memory_bytes
    grads = priced["loop_grads" if made.choice else "grads"]
    assert (priced["params"], priced["optimizer"]) == (held["params"], held["optimizer"])
    if held["grads"] is not None:
        assert grads == pytest.approx(held["grads"], rel=1e-3)                      # beside them loops carry scalars
    assert priced["total"] == pytest.approx(held["total"], rel=CELLS[name].memory)
    assert formula_vs_compiled.matmul_flops(program) == pytest.approx(formulas.matmul_flops, rel=CELLS[name].flops)
    assert formula_vs_compiled.differences(made, formulas, held, program) == []      # kinds and axes of collectives, bytes within 2%


def test_what_differs_is_named_and_what_no_rule_explains_with_its_tensor():
    made, held, program, formulas = compiled(FIRST)
    rows = {(row["kind"], *row["axes"]): row for row in formulas.collectives}
    moved = rows.pop(("reduce-scatter", "fsdp"))
    rows["all-gather", "tensor"] = rows["all-gather", "tensor"] | {"bytes": rows["all-gather", "tensor"]["bytes"] // 2}
    rows["reduce-scatter", "data"] = moved | {"axes": ["data"]}
    wrong = dataclasses.replace(formulas, collectives=list(rows.values()), matmul_flops=2 * formulas.matmul_flops,
                                memory_bytes={**formulas.memory_bytes, "params": 1, "total": 1})
    params, total, gathered, scattered, absent, matmuls = formula_vs_compiled.differences(made, wrong, held, program)
    assert params.startswith("memory, params: 244.0 MiB compiled, 1 B") and total.startswith("memory, total")
    assert gathered.startswith("all-gather over tensor in bf16: ") and "compiled" in gathered
    assert scattered.startswith("reduce-scatter over fsdp in f32, ") and "has no formula: layers/" in scattered
    assert absent.startswith("reduce-scatter over data in f32: 0 B compiled") and matmuls.startswith("matmuls: ")


def test_no_formula_reaches_float8():
    run = config.Run(model=dict(MODEL, matmul_dtype="float8", compute_dtype="bfloat16"),
                     data=dict(seq_len=4096, global_batch=2))
    made = assembly.assemble(run, compile.topology("h100:1"))
    assert formula_vs_compiled.of(made, memory.formula(made)) is None
