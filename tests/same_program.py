"""Hashes of the programs that runs give XLA, to see that a change of the code changes none of them.

    python tests/same_program.py > before.txt           (minutes; on the old code)
    python tests/same_program.py > after.txt && diff before.txt after.txt

A line is a program's hash, its length and its name. The text is StableHLO without locations: names of functions and files
are not in it, nor is anything that XLA makes of it. A change that means to change a program says so in its commit.
`--only WORD` takes the runs whose name has the word. `--keep FOLDER` writes the texts, to compare two of them.
"""
import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"        # kernels carry the lines of their callers
os.environ["XLA_FLAGS"] = ("--xla_force_host_platform_device_count=8 "
                           "--xla_cpu_enable_concurrency_optimized_scheduler=false")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "gpu")]

import jax  # noqa: E402

import cells  # noqa: E402
from meshtrain import assembly, config  # noqa: E402
from meshtrain.rl import samplers  # noqa: E402

# On CPUs: every model of the table of cells, schedule, context method and kind of remat.
CELLS = (
    "dense: zero1 fsdp8", "dense: zero3 data2 fsdp2 tensor2", "dense: zero3 data2 fsdp2 tensor2 gloo",
    "dense: ddp stage4 interleaved_zero_bubble full m8", "dense: zero2 fsdp2 stage2 context2 zero_bubble gather selective m4",
    "dense: ddp stage4 gpipe m8", "dense: zero3 context4 tensor2 ulysses", "dense: ddp context4 ring",
    "dense: zero3 data2 fsdp2 tensor2 full halves", "dense: zero3 tensor2 fsdp2 data2 kernels",
    "dense_lora: hsdp data2 stage2 context2 1f1b ring",
    "gpt2: hsdp_zero1 fsdp2 stage2 context2 interleaved ulysses", "gpt2: zero3 fsdp4 tensor2",
    "gemma: zero3_experts_tensor data2 tensor2 m1", "gemma: zero1 stage2 fsdp2 1f1b",
    "olmo: tensor data2 tensor2 offload m4", "olmo: zero1 fsdp2 stage2 gpipe full m1",
    "experts: zero3_experts_fsdp data2 fsdp4 sent", "experts: zero3_experts_fsdp data2 stage2 context2 1f1b ulysses m4",
)
SMALL = dict(vocab_size=259, embed_dim=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=48)
RUNS = {
    "recurrent": dict(model=SMALL | dict(mixers="GGGF", attention_gate=True, linear=dict(key_heads=2, value_heads=4)),
                      mesh=dict(fsdp=2, tensor=2, context=2)),
    "recurrent stages": dict(model=SMALL | dict(mixers="GF", linear=dict(key_heads=2, value_heads=4)),
                             mesh=dict(fsdp=2, stage=2)),
    "latents": dict(model=SMALL | dict(num_kv_heads=4, num_experts=4, experts_per_token=2, expert_mlp_dim=24, mlps="de*",
                                       shared_expert_dim=24, latent=dict(kv_dim=16, query_dim=24, rope_dim=8, value_dim=16)),
                    mesh=dict(fsdp=4, tensor=2), training=dict(remat="selective")),
    "float8": dict(model=SMALL | dict(matmul_dtype="float8"), mesh=dict(fsdp=2, tensor=2)),
    "score bound": dict(model=SMALL, mesh=dict(data=2, fsdp=2), optimizer=dict(name="muon", qk_clip=100.0)),
    "dpo": dict(model=SMALL, mesh=dict(fsdp=2, tensor=2), training=dict(objective="dpo")),
    "rl": dict(model=SMALL, mesh=dict(fsdp=4, tensor=2), training=dict(objective="rl"),
               data=dict(source="prompts", paths=["none.jsonl"]), rl=dict(reward="exact", max_tokens=8)),
    "rl experts": dict(model=SMALL | dict(num_experts=4, experts_per_token=2, expert_mlp_dim=24), mesh=dict(fsdp=4),
                       training=dict(objective="rl"), data=dict(source="prompts", paths=["none.jsonl"]),
                       rl=dict(reward="exact", max_tokens=8, kl=0.1)),
}
# For GPUs, where jax's plugin is installed: kernels, dispatch and the order of gathers.
ROWS = (
    "dense zero3 data2 fsdp8 tensor4", "dense zero3 fsdp64 selective", "staged zero1 stage4 fsdp16 1f1b",
    "staged zero1 stage4 fsdp16 interleaved_zero_bubble2", "routed zero3_experts_fsdp data8 fsdp8",
    "mosaic zero3 fsdp8", "pallas_latents zero3 fsdp8", "ringed zero3 context4 ring", "sinks zero3_experts_fsdp fsdp8",
    "hybrid zero3 fsdp8", "wide zero3 fsdp8 float8", "adapters zero3 fsdp8",
)


def run_of(sections: dict) -> config.Run:
    data = dict(seq_len=32, global_batch=16) | sections.get("data", {})
    training = dict(steps=20, microbatches=2, loss_chunk=24) | sections.get("training", {})
    return config.Run(**sections | dict(data=data, training=training))


def programs_of(made: assembly.Assembly) -> Iterator[tuple[str, str]]:
    """The programs of a run: (what it does, its text)."""
    program, params = made.program, made.state_shapes.params
    yield "step", program.lower_step().as_text()
    yield "evaluation", program.lower(program.evaluate, params, program.step.batch).as_text()
    yield "initialization", program.lower(program.initialize).as_text()
    if program.scores is not None:
        yield "scores", program.lower(program.scores, params, program.step.batch).as_text()


def sampler_programs(made: assembly.Assembly) -> Iterator[tuple[str, str]]:
    """The programs by which a run draws answers."""
    texts: list[str] = []
    compile_lowered = jax.stages.Lowered.compile

    def note(lowered, *args, **more):
        texts.append(lowered.as_text())
        return compile_lowered(lowered, *args, **more)
    jax.stages.Lowered.compile = note
    try:
        samplers.make(made).programs()
    finally:
        jax.stages.Lowered.compile = compile_lowered
    yield from ((f"sampler {number}", text) for number, text in enumerate(texts))


def programs() -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, str]]]]]:
    """(a run's name, what traces its programs)."""
    for name in CELLS:
        def cell(name=name):
            chosen = cells.cell(name)
            run = cells.run_of(chosen)
            with cells.compiling(chosen):
                yield from programs_of(assembled(run))
        yield name, cell
    for name, sections in RUNS.items():
        def run(sections=sections):
            made = assembled(run_of(sections))
            yield from programs_of(made)
            if made.run.training.objective == "rl":
                yield from sampler_programs(made)
        yield name, run
    try:
        import gpu_programs
    except ImportError as missing:
        sys.exit(f"programs for GPUs need the extra gpu-compile: {missing}")
    for name in ROWS:
        yield f"gpu {name}", lambda name=name: programs_of(gpu_programs.assembled(name))


def assembled(run: config.Run) -> assembly.Assembly:
    sizes = [getattr(run.mesh, axis) for axis in ("data", "fsdp", "tensor", "stage", "context")]
    count = 1
    for size in sizes:
        count *= size
    return assembly.assemble(run, jax.devices()[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a word of the runs' names")
    parser.add_argument("--keep", type=Path, help="folder of the texts")
    given = parser.parse_args()
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
    for name, trace in programs():
        if given.only in name:
            for part, text in trace():
                print(hashlib.sha256(text.encode()).hexdigest()[:16], len(text), f"{name}, {part}", flush=True)
                if given.keep:
                    (given.keep / f"{name}, {part}.mlir".replace(": ", " ")).write_text(text)


if __name__ == "__main__":
    main()
