"""python benchmarks/experts.py [step] [dispatch] [balance] [learning]: cost, traffic and benefit of experts, compared
with a dense model.

step: a training step with experts and one of a dense model with the same number of active parameters, timed in turns in
one run. On GPUs: as many layers of Qwen3-30B-A3B as fit in memory, and their MFU by active parameters.
dispatch: the bytes that a layer sends and holds, by method and number of shards, from programs compiled for H100. Needs
the extra gpu-compile and no GPU. Also draws benchmarks/experts.svg: bytes sent by formula over the tokens of a GPU.
balance: the roofline of the shipped runs on 64 H100, from programs compiled for them. In one case all experts are
equally busy. In the other cases the router prefers some experts.
learning: configs/quickstart-experts.toml, and the same file with a dense MLP as wide as all experts of one token, for
three seeds: the loss on held-out text after the same number of steps. Takes tens of CPU minutes.
Without arguments: step, and also dispatch if there is no GPU. Each writes its own section of benchmarks/experts.md and
keeps the other sections.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_speed, machine, step, words
from benchmarks.gpu_record import table
from meshtrain import assembly, config, run_files
from meshtrain import devices as local_devices
from meshtrain.cost.formulas import flops
from meshtrain.cost.program import audit
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.cost.program import roofline
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.data import sources
from meshtrain.data.batches import packing
from meshtrain.scopes import BALANCED_ROWS
from meshtrain.pages import pictures, skin
from meshtrain.parallel.experts import all_to_all, dispatch
from meshtrain.parallel.experts.region import ManualRegion

PAGE, PICTURE = ROOT / "benchmarks" / "experts.md", ROOT / "benchmarks" / "experts.svg"
MIB, GIB = 2**20, 2**30


# ---- step: a training step -------------------------------------------------------------------------------------------

MLP_DIM = 704                                       # of the dense model, and of all K experts of a token
CHOICES = ((8, 2), (32, 4))                         # E, K
AIM, MFU_AIM = 1.35, .35
ROUNDS, STEPS = 5, 2


def step_section() -> list[str]:
    if not local_devices.gpus_expected():
        return on_cpu()
    return on_gpus(local_devices.start(config.Run()))


def narrow(*overrides: str) -> config.Run:
    given = ["--run.compilation_cache", "", "--data.validation_fraction", "0", "--model.mlp_dim",
             str(MLP_DIM), *overrides]
    return run_files.load([str(ROOT / "benchmarks" / "step.toml"), *given])


def with_experts(E: int, K: int, width: int) -> tuple[str, ...]:
    """Return overrides for E experts, of which K together are as wide as an MLP of `width`."""
    return ("--model.num_experts", str(E), "--model.experts_per_token", str(K), "--model.expert_mlp_dim",
            str(width // K))


def on_cpu() -> list[str]:
    dense = narrow()
    runs = {"dense": dense} | {f"{E} experts, {K} a token": narrow(*with_experts(E, K, MLP_DIM)) for E, K in CHOICES}
    devices = local_devices.start(dense)
    with tempfile.TemporaryDirectory() as scratch:
        read = sources.open_corpus(dense.data, vocab_size=dense.model.vocab_size, cache_dir=Path(scratch))
        rows = packing.open_batches(dense.data, read, dense.run.seed).batch(0)
    made = {name: assembly.assemble(run, devices[:1]) for name, run in runs.items()}
    contestants = []
    for name in runs:
        print(f"compiling {name} …", file=sys.stderr)
        contestants.append(step.ours(name, made[name], rows)[0])
    step.take_turns(contestants, ROUNDS, STEPS)
    base, out = contestants[0], []
    for c in contestants:
        parameters = made[c.name].model.parameters()
        ratios = ("–", "–") if c is base else (f"**{step.ratio(c, base, 'cpu_times'):.2f}**",
                                               f"{step.ratio(c, base):.2f}")
        took = (f"{statistics.median(times) * 1e3:,.0f} ms" for times in (c.cpu_times, c.times))
        out.append((c.name, f"{sum(info.size for info in parameters):,}", f"{active(made[c.name]):,}", *took, *ratios,
                    f"{c.peak_bytes / MIB:.0f} MiB", f"{c.compile_s:.1f} s"))
    m, d = dense.model, dense.data
    return [f"Measured on one CPU device in {m.compute_dtype}, with embed {m.embed_dim}, {m.num_layers} layers and "
            f"{d.global_batch} sequences of {d.seq_len} tokens. The dense MLP has width {MLP_DIM}; the experts of a token together have the same "
            f"width. The models run in turns, {STEPS} steps each; values are medians of {ROUNDS} rounds. The aim is at "
            f"most {AIM} times the CPU seconds of the dense model. The optimizer updates all parameters, active or not.", "",
            *table(("model", "parameters", "active", "step, CPU", "step, wall", "÷ dense, CPU",
                    "÷ dense, wall", "memory",
                    "compile"), out)]


A3B, A3B_SIZES = gpu_speed.Plan("experts", "configs/qwen3-30b-a3b.toml", 8, False,
                                "selective"), gpu_speed.Sizes(microbatches=2)
NO_EXPERTS = ("--model.num_experts", "0", "--model.experts_per_token", "0", "--model.expert_mlp_dim",
              "0", "--experts.aux_loss",
              "0.01", "--sharding.rules", str(ROOT / "sharding_rules" / "zero3.toml"))


def on_gpus(devices, plan: gpu_speed.Plan = A3B, sizes: gpu_speed.Sizes = A3B_SIZES) -> list[str]:
    """Time a step with experts and a step of a dense model. plan: the run with experts; each GPU has 16 sequences in a
    step, and pairs of GPUs share the experts, as in its run file. The dense model has the same number of layers, and
    its MLP of mlp_dim is as wide as all experts of one token."""
    if len(devices) % 2 == 0:
        plan = plan._replace(overrides=(*plan.overrides, "--mesh.fsdp", "2"))
    bare = plan._replace(name="dense", overrides=plan.overrides + NO_EXPERTS)
    made, compiled, compile_s = gpu_speed.compiled(plan, devices, sizes)
    layers, rows, seconds = made.run.model.num_layers, [], []
    for of in (plan, bare):
        if of is bare:
            made = assembly.assemble(gpu_speed.run_of(bare, len(devices), sizes.microbatches, layers), devices)
            compiled = assembly.compile_step(made, made.program.lower_step())
        with tempfile.TemporaryDirectory() as directory:
            measured = gpu_speed.measure(made, compiled, compiled, compile_s, sizes, Path(directory))
        row = gpu_speed.told(of, made, compiled, measured)["row"]
        seconds.append(statistics.median(measured.times))
        rows.append((of.name, f"{active(made):,}", *(row[name] for name in ROW)))
    return [f"{len(devices)} × {devices[0].device_kind}: layers of {Path(plan.run_file).stem}, and dense ones with an "
            f"MLP of {made.run.model.mlp_dim}; remat {plan.remat}. Experts ÷ dense: **{seconds[0] / seconds[1]:.2f}**, "
            f"aim ≤ {AIM}; MFU by active parameters, aim ≥ {MFU_AIM:.0%}.", "",
            *table(("model", "active parameters", *ROW), rows)]


ROW = ("layers", "tokens", "step, s", "tokens/s a GPU", "MFU", "peak, GiB", "by inspect, GiB")


def active(made) -> int:
    """Count the parameters that one token uses, including the whole embedding."""
    return sum(flops.active(info, made.run.model) for info in made.model.parameters())


# ---- dispatch: what a layer sends and holds --------------------------------------------------------------------------

TOKENS = 4096                   # per GPU and microbatch


class Shape(NamedTuple):
    """The experts of a layer, and the numbers of GPUs for which they are compiled."""
    name: str
    D: int
    F: int
    E: int
    K: int
    num_shards: tuple[int, ...]


LAYERS = (Shape("Mixtral 8x7B", 4096, 14336, 8, 2, (2, 8)), Shape("Qwen3-30B-A3B", 2048, 768, 128, 8, (16,)))
DEPTH = 2                       # with a single layer, XLA keeps the gathered weights and gathers them only once
MOVES = ("all-gather", "reduce-scatter", "all-to-all")
METHODS = {"gather": "expert", "all_to_all": "expert", "zero3": "expert_embed"}     # dim that is split over GPUs


def dispatch_section() -> list[str]:
    if missing := gpu_compile.missing_wheels():
        print(f"error: dispatch compiles for GPUs that are not here: pip install -e '.[gpu-compile]' (no {missing})",
              file=sys.stderr)
        raise SystemExit(2)
    local_devices.start(config.Run())
    PICTURE.write_text(picture())
    rows = []
    for shape in LAYERS:
        for num_shards in shape.num_shards:
            for method in METHODS:
                rows.append((shape.name, num_shards, method, *measured(shape, num_shards, method)))
                print(" · ".join(map(str, rows[-1])), file=sys.stderr)
    return [f"Values are for one of {DEPTH} layers, forward and backward with remat full, {TOKENS:,} tokens a GPU in bfloat16, compiled "
            "for H100. Experts are split over `fsdp`; all other weights are whole on every GPU. With `zero3`, the "
            "experts' matrices are gathered, and no token is sent. Sent: the bytes that a GPU sends for tokens, choices, "
            "and the weights and gradients of experts, if one round is enough. The formula is that of "
            "[docs/experts.md](../docs/experts.md). Temporaries are those of the whole step.", "",
            *table(("layer", "shards", "method", "sent, MiB", "by formula, MiB", "temporaries, MiB"), rows)]


def measured(shape: Shape, num_shards: int, method: str) -> tuple[str, ...]:
    made = assembled(shape, num_shards, method, TOKENS, gpu_compile.topology(f"h100:{num_shards}"))
    program = made.program.compile()
    moved = [c for c in audit.read(program.as_text(), made.mesh).collectives if c.kind in MOVES]
    # One round: the loop over further rounds has no known count, and none is assumed.
    sent = sum(c.bytes for c in moved) / DEPTH
    by_formula = formula(shape, num_shards, method, TOKENS)
    return tuple(f"{count / MIB:,.0f}" for count in (sent, by_formula, program.memory_analysis().temp_size_in_bytes))


def assembled(shape: Shape, num_shards: int, method: str, tokens: int, devices):
    """Assemble a model of DEPTH layers whose experts alone are split. All-reduces sum the gradients of all other
    weights."""
    with tempfile.TemporaryDirectory() as scratch:
        rules = Path(scratch) / "rules.toml"
        rules.write_text(f'[params]\n{METHODS[method]} = "fsdp"\n[activations]\nbatch = "fsdp"\n')
        run = config.Run(
            mesh=dict(fsdp=num_shards), sharding=dict(rules=str(rules)),
            data=dict(seq_len=tokens, global_batch=num_shards),
            model=dict(vocab_size=1024, embed_dim=shape.D, num_layers=DEPTH, num_heads=8, num_kv_heads=8, head_dim=64,
                       mlp_dim=shape.F, num_experts=shape.E, experts_per_token=shape.K, expert_mlp_dim=shape.F),
            training=dict(remat="full"), experts=dict(dispatch="auto" if method == "zero3" else method))
        return assembly.assemble(run, devices)


def formula(shape: Shape, num_shards: int, method: str, tokens: int) -> float:
    """Return the bytes that a GPU sends: tokens five times in bfloat16, or weights twice in bfloat16 and their
    gradients in float32.

    Choices and their weights travel with the tokens: there, and there again in the backward. The gradient of a weight
    travels back.
    """
    over, choices = (num_shards - 1) / num_shards, shape.K * tokens
    if method == "zero3":
        return over * 3 * shape.E * shape.D * shape.F * (2 * 2 + 4)
    if method == "gather":
        return (num_shards - 1) * (5 * tokens * shape.D * 2 + 5 * choices * 4)
    return over * all_to_all.CAPACITY_FACTOR * (5 * choices * shape.D * 2 + 5 * choices * 4)


def picture() -> str:
    """Draw an SVG of the bytes that a GPU sends for a layer of Qwen3-30B-A3B, over the GPU's tokens."""
    shape, most = LAYERS[1], 40960
    cases = [(num_shards, method) for num_shards in (8, 16) for method in ("gather", "all_to_all")]
    names = [f"{method}, {num_shards} shards" for num_shards, method in cases]
    rows = [pictures.PlotCurve(k, name, [(tokens, formula(shape, *case, tokens) / GIB) for tokens in (0, most)])
            for k, (case, name) in enumerate(zip(cases, names))]
    weights = formula(shape, cases[0][0], "zero3", 0)
    rows = [row._replace(points=within(row.points, 1.6 * weights / GIB)) for row in rows]
    drawn = pictures.Plot(
        rows, pictures.PlotAxis("tokens of a GPU and microbatch", "{:,.0f}".format),
        pictures.PlotAxis("GiB that a GPU sends for a layer", "{:g}".format, zero=True),
        f"What a GPU sends for the experts of a layer of {shape.name}",
        levels=[(weights / GIB, "zero3: the experts' weights travel")]).draw()
    legend = [pictures.rect(92, 30 + 18 * k, 12, 12, f"c{k}") + pictures.text(110, 40 + 18 * k, name)
              for k, name in enumerate(names)]
    return skin.alone(drawn.replace("</svg>", "".join(legend) + "</svg>")) + "\n"


def within(points, most: float):
    """Cut a line from (0, 0) off where it exceeds `most`."""
    (x0, y0), (x1, y1) = points
    return [(x0, y0), (x1 * most / y1, most) if y1 > most else (x1, y1)]


# ---- balance: the cost of experts that are not equally busy ----------------------------------------------------------

BALANCED, LOADS = ("qwen3-30b-a3b-64", "mixtral-8x7b-64"), (1.1, dispatch.CAPACITY_FACTOR)


def balance_section() -> list[str]:
    if missing := gpu_compile.missing_wheels():
        print(f"error: balance compiles for GPUs that are not here: pip install -e '.[gpu-compile]' (no {missing})",
              file=sys.stderr)
        raise SystemExit(2)
    rows = [balanced(name) for name in BALANCED]
    return ["Predictions of the roofline for 64 H100s: seconds of a step, MFU, and the share of the step that waits for "
            'links. No router was trained at this size. "Equal" means that all experts are equally busy. The other '
            "columns give the number of rows of the busiest GPU's experts divided by their even share; the other GPUs "
            f"wait for this GPU. {LOADS[0]:g} is the largest value with random routing over 16 of 128 experts. "
            f"{LOADS[1]:g} is the capacity of a GPU's buffer; beyond it all experts take an additional round. If every "
            "GPU has all experts, the router does not change its number of rows.", "",
            *table(("run", "equal", *(f"{load:g}" for load in LOADS), f"up to {2 * LOADS[1]:g}"), rows)]


def balanced(name: str) -> list[str]:
    made = assembly.assemble(run_files.load([str(ROOT / "configs" / f"{name}.toml")]), gpu_compile.topology("h100:64"))
    program = CompiledProgram.of_run(made, assembly.compile_step(made, made.program.lower_step(), refuse_broken=False))
    further = dataclasses.replace(program, assumed={"experts.rounds": 1})
    priced = [program.roofline]
    if ManualRegion.of(made.layout).own:
        priced += [roofline.read(loaded(program.text, load), made.mesh, priced_as.prices, program.workload)
                   for load, priced_as in [*((load, program) for load in LOADS), (LOADS[-1], further)]]
    cells = [f"{line.step_s:.2f} s, **{line.mfu:.1%}**, {line.exposed_s / line.step_s:.1%}" for line in priced]
    print(name, *cells, file=sys.stderr)
    return [name, *cells, *["the same"] * (2 + len(LOADS) - len(cells))]


def loaded(text: str, load: float) -> str:
    """Return a program's text with the rows in its scopes multiplied by `load`, as for the busiest GPU."""
    return BALANCED_ROWS.pattern.sub(lambda found: BALANCED_ROWS.write(round(load * int(found[1]))), text)


# ---- learning: the loss after equal steps ----------------------------------------------------------------------------

SEEDS = (0, 1, 2)
SMALL = tuple("--model.embed_dim 96 --model.num_layers 3 --training.steps 480 --data.global_batch 8 "
              "--model.embedding_std 1 --optimizer.warmup_steps 60".split())
BOUND = 2           # limit for the load
RUNS = {"dense": ("configs/quickstart.toml", (*SMALL, "--model.mlp_dim", "256")),
        "8 experts, 2 a token": ("configs/quickstart-experts.toml", (*SMALL, "--model.expert_mlp_dim", "128"))}
ALONE = tuple("--mesh.data 1 --mesh.fsdp 1 --mesh.tensor 1 --mesh.simulated_devices 0 --sharding.rules "
              "sharding_rules/ddp.toml --run.sample_tokens 0 --metrics.tensorboard false --checkpoint.every 0".split())


def learning_section() -> list[str]:
    found = {name: [trained(file, seed, given) for seed in SEEDS] for name, (file, given) in RUNS.items()}

    def mean(rows: Iterable[dict]) -> float:
        return statistics.mean(row["loss"] for row in rows)
    out = [(name, *(f"{row['loss']:.4f}" for row in rows), f"**{mean(rows):.4f}**",
            *(max(row[key] for row in rows) if rows[0]["load"] else "–" for key in ("load", "late", "above", "last")))
           for name, rows in found.items()]
    return [f"The two models are `{'` and `'.join(file for file, _ in RUNS.values())}` with `{' '.join(SMALL)}` and an MLP of width "
            f"256, or experts of width 128. Both have the same data, steps, learning rates and embedding. Their active "
            f"parameters are equal except for the routers. They ran on one device, because the loss is the same on any "
            f"layout. The seed columns have the loss on held-out text in nats per byte. The load is the number of tokens "
            f"of the busiest expert of the worst layer, divided by the mean; the columns have its maximum over all steps "
            f"and over their second half, the number of steps with a load above {BOUND}, and the last such step, each "
            f"for the worst seed.", "",
            *table(("model", *(f"seed {seed}" for seed in SEEDS), "mean", "load", "load, second half",
                    f"steps above {BOUND}", f"last step above {BOUND}"), out)]


def trained(file: str, seed: int, given: tuple[str, ...] = ()) -> dict:
    """Return the `outcome` of a run on one device."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "meshtrain.train", str(ROOT / file), "--run.dir",
                   directory, "--run.seed", str(seed),
                   *ALONE, *given]
        # XLA_FLAGS of a caller that simulates devices, such as a test, must not reach this run.
        env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=True)
        found = outcome(Path(directory))
    print(f"{file}, seed {seed}: {found}", file=sys.stderr)
    return found


def outcome(directory: Path) -> dict:
    """Read the results of a run. loss: on held-out text after the last step. load: the largest; late: the largest in
    the second half of the steps. above: the number of steps with a load above BOUND; last: the last such step. Loads
    are 0 without experts."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    load = [row.get("expert_load_max", 0) for row in rows]
    above = [row["step"] for row, found in zip(rows, load) if found > BOUND]
    return {"loss": rows[-1]["val_loss"], "load": round(max(load), 2), "late": round(max(load[len(rows) // 2:]), 2),
            "above": len(above),
            "last": max(above, default=0)}


# ---- the page --------------------------------------------------------------------------------------------------------

SECTIONS = {"step": ("A training step", step_section), "dispatch": ("What tokens send", dispatch_section),
            "balance": ("What a router costs", balance_section), "learning": ("What is learned", learning_section)}


def written(page: str, name: str, lines: list[str]) -> str:
    """Return the page with this section replaced. The other sections stay, in the order of SECTIONS."""
    kept = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", page, re.MULTILINE))
    kept[SECTIONS[name][0]] = "\n".join(["", *lines, ""])
    parts = ["# Experts\n\nWritten by `python benchmarks/experts.py`. The first lines of this script say what is measured and how.\n"]
    return "\n".join(parts + [f"## {title}\n{kept[title].rstrip()}\n"
                              for title, _ in SECTIONS.values() if title in kept])


def _section(text: str) -> str:
    if text not in SECTIONS:
        raise argparse.ArgumentTypeError(f"{text}: give any of {', '.join(SECTIONS)}, or nothing")
    return text


def main(argv) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("sections", nargs="*", type=_section, metavar="SECTION", help=f"any of {', '.join(SECTIONS)}")
    for name in parser.parse_args(argv).sections or ("step", "dispatch")[:1 if local_devices.gpus_expected() else 2]:
        lines = SECTIONS[name][1]()
        lines = [machine.line("", "jax", "jaxlib"), "", *lines]
        print("\n".join(lines))
        PAGE.write_text(written(PAGE.read_text() if PAGE.exists() else "", name, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
