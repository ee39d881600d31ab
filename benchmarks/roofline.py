"""python benchmarks/roofline.py: predicted times of a step of the shipped runs on GPUs that need not be present, and of
published runs.

Each step is compiled for the GPU and priced kernel by kernel (meshtrain/cost/program/roofline.py); nothing is measured.
Needs the extra gpu-compile. There are two sets of rates: the named assumptions, which fit published runs, and flat
rates, which served to set the aims. Published runs of the same layouts are compiled with their shapes, batches and
recomputation. Writes benchmarks/roofline.md.
"""
from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks import machine, words
from meshtrain import assembly, run_files
from meshtrain import hardware
from meshtrain.cost.formulas import flops
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.cost.program import roofline
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.inspection import memory

GPUS, HOPPER = ("h100", "a100-80gb", "h200", "b200"), ("h100", "h200")
PARTS = tuple(part for part in roofline.PARTS if part != roofline.RECURRENCE)       # no shipped run has one
FLAT = {"matmul.best": .78, "matmul.sustained": 1, "matmul.clock": 1, "matmul.wave": 0, "matmul.k0": 0,
        "attention.cudnn_forward": .60, "attention.cudnn_backward": .50, "attention.pallas_forward": .38,
        "attention.pallas_backward": .28, "attention.ramp": 0, "hbm.share": .85, "link.start_us": 15,
        "link.hop_us": 0, "link.host_hop_us": 0,
        "link.contend": 0, "step.overhead": 0}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run: its file with overrides, and its number of GPUs."""
    name: str
    run_file: str
    num_gpus: int
    words: str = ""


SHIPPED = (
    Case("llama3-8b, remat full", "llama3-8b.toml", 8, "--training.remat full"),
    Case("llama3-8b, remat selective", "llama3-8b.toml", 8, "--training.remat selective"),
    Case("llama3-8b, remat selective, MLP mosaic", "llama3-8b.toml", 8,
         "--training.remat selective --model.mlp mosaic"),
    Case("llama3-8b, remat selective, float8", "llama3-8b.toml", 8,
         "--training.remat selective --model.matmul_dtype float8"),
    Case("llama3-8b, one sequence a GPU, zero3 over 64", "llama3-8b.toml", 64,
         "--training.remat selective --data.global_batch 64 --training.microbatches 1"),
    Case("llama3-70b, tensor 8 × fsdp 8", "llama3-70b.toml", 64),
    Case("llama3-70b-pipeline, stage 4 × tensor 8 × fsdp 2", "llama3-70b-pipeline.toml", 64),
)


@dataclass(frozen=True)
class Published:
    """A published run. given: assumptions that its software or network needs. apart: the difference, if our program is
    not the same."""
    case: Case
    gpu: str
    tokens_per_s: float         # per GPU
    source: str
    given: dict
    apart: str = ""


# Published runs attend to whole rows. Ours do so with the Pallas kernels as a stand-in, because cuDNN's kernels need
# its library. The stand-in is priced at the rate of the published engine; its backward has seven products instead of
# five.
WHOLE = "--data.document_mask false --model.attention pallas "
CUDNN = {"attention.pallas_forward": .58, "attention.pallas_backward": .50 * 7 / 5}
FLASH_2 = {"h100-96gb": {"attention.pallas_forward": .37, "attention.pallas_backward": .33 * 7 / 5},
           "a100": {"attention.pallas_forward": .58, "attention.pallas_backward": .50 * 7 / 5}}
SLOW_NETWORK = {"nic.share": .2}            # 400 Gb/s a host; the table has 200 Gb/s a GPU
LLAMA_3 = "--data.global_batch {} --training.microbatches 1 --training.remat {} " + WHOLE
LLAMA_2 = "--model.preset llama2-7b --data.seq_len 4096 " + LLAMA_3
PUBLISHED = (
    Published(Case("Llama 2 7B, fsdp 8, 4,096 tokens", "llama3-8b.toml", 8, LLAMA_2.format(16, "selective")),
              "h100", 11_361,
              "JAX-Toolbox, MaxText", CUDNN),
    Published(Case("Llama 3 8B, fsdp 8, remat selective", "llama3-8b.toml", 8, LLAMA_3.format(16, "selective")),
              "h100-96gb",
              6_667, "torchtitan", FLASH_2["h100-96gb"], "theirs recomputes every second matmul, ours no matmul"),
    Published(Case("Llama 3 8B, fsdp 8, remat full", "llama3-8b.toml", 8, LLAMA_3.format(16, "full")),
              "h100-96gb", 6_667,
              "torchtitan", FLASH_2["h100-96gb"], "theirs recomputes every second matmul, ours every matmul"),
    Published(Case("Llama 3 8B, fsdp 128, remat selective", "llama3-8b.toml", 128, LLAMA_3.format(256, "selective")),
              "h100-96gb", 6_514, "torchtitan", FLASH_2["h100-96gb"],
              "theirs recomputes every second matmul, ours no matmul"),
    Published(Case("Llama 2 70B, fsdp 128, 4,096 tokens", "llama3-8b.toml", 128,
                   "--model.preset llama3-70b --model.vocab_size "
                   "32000 --data.seq_len 4096 " + LLAMA_3.format(256, "full")), "a100-80gb", 410, "IBM fms-fsdp",
              FLASH_2["a100"] | SLOW_NETWORK, "gradients: theirs bfloat16, ours float32; theirs gathers "
              "the next layer while it computes one, ours waits for a fifth of the step"),
)  # fmt: skip


@functools.cache
def program(gpu: str, case: Case):
    """Return (assembled run, its compiled step)."""
    run = run_files.load([str(ROOT / "configs" / case.run_file), *case.words.split()])
    made = assembly.assemble(run, gpu_compile.topology(f"{gpu}:{case.num_gpus}"))
    return made, assembly.compile_step(made, made.program.lower_step(), refuse_broken=False)


def line_of(gpu: str, case: Case, given: Mapping[str, float] = MappingProxyType({})) -> roofline.Roofline:
    made, executable = program(gpu, case)
    return CompiledProgram.of_run(made, executable, given).roofline


def row(gpu: str, case: Case) -> list[str]:
    made, executable = program(gpu, case)
    line, flat = line_of(gpu, case), line_of(gpu, case, FLAT)
    held = memory.measure(made, executable)["total"]
    fits = "" if held <= hardware.usable_bytes(hardware.get(gpu)) else " (does not fit)"

    def percent(name: str) -> str:
        return f"{line.shares[name]:.1%}"
    print(f"{gpu} {case.name}: {line.step_s:.2f} s, MFU {line.mfu:.1%}", flush=True)
    return [gpu, case.name, f"{line.step_s:.2f}", f"{line.tokens_per_s / line.num_gpus:,.0f}", f"**{line.mfu:.1%}**",
            *map(percent, (*PARTS, roofline.COMMUNICATION, roofline.CONTENTION)),
            f"{held / 2**30:.1f}{fits}", f"{flat.step_s:.2f}", f"{flat.mfu:.1%}"]


def compared(run: Published) -> list[str]:
    line = line_of(run.gpu, run.case, run.given)
    ours = line.tokens_per_s / line.num_gpus
    print(f"{run.source} {run.case.name}: {ours:,.0f} against {run.tokens_per_s:,.0f}", flush=True)
    return [run.source, run.case.name, f"{run.case.num_gpus} × {run.gpu}", f"{run.tokens_per_s:,.0f}", f"{ours:,.0f}",
            f"**{ours / run.tokens_per_s:.2f}**", run.apart]


def table(header: tuple, rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def with_table(gpu: str, case: Case) -> str:
    """Return a sentence with the case's MFU at flat rates if it counts 6·N and N includes the embedding."""
    made, _ = program(gpu, case)
    cfg, table = made.run.model, made.model.parameters()
    counted = flops.model_flops_per_token(table, cfg, made.run.data.seq_len)
    more = 6 * sum(info.size for info in table if info.role == "embedding")
    mfu = line_of(gpu, case, FLAT).mfu
    return (f"MFU counts only matrices that are used in matmuls. If it counted 6·N, with the embedding table in N, "
            f"{case.name} on {gpu} would have {mfu * (1 + more / counted):.1%} at flat rates instead of {mfu:.1%}.")


def costliest(gpu: str, case: Case, count: int = 10) -> list[str]:
    """Return a table of the most expensive kernels, with a sentence above it."""
    line = line_of(gpu, case)
    rows = [[kernel.part, f"{kernel.runs:,}", f"{1e3 * kernel.seconds:,.0f}", f"{kernel.seconds / line.step_s:.1%}",
             kernel.bound, kernel.line, f"`{kernel.source[-60:]}`"] for kernel in line.kernels[:count]]
    return [f"The costliest kernels of {case.name} on {gpu}:", "",
            *table(("part", "runs", "ms a step", "of the step", "bound", "line", "from"), rows)]


def written() -> str:
    shipped = [row(gpu, case) for gpu in GPUS for case in SHIPPED
               if ("float8" not in case.words or not hardware.lacks_float8(hardware.get(gpu)))
               and ("mosaic" not in case.words or gpu in HOPPER)]
    lines = ["# The roofline of the shipped runs", "",
             "Written by `python benchmarks/roofline.py`. meshtrain/cost/program/roofline.py prices a step. "
             "Nothing here was measured.", "",
             machine.line("", "jax", "jaxlib"), "",
             *table(("GPU", "run", "s a step", "tokens/s a GPU", "MFU", *PARTS,
                     "communication, exposed", "contention",
                     "GiB a GPU", "s, flat rates", "MFU, flat rates"), shipped), "",
             "The shares are shares of the step time. Sequences are packed documents of 2,000 tokens on average. Flat rates "
             "are a second set of assumptions, constant fractions of the peaks: "
             + ", ".join(f"{name} {value:g}" for name, value in FLAT.items()) + ". "
             + with_table("h100", SHIPPED[1]), "",
             *costliest("h100", SHIPPED[1]), ""]
    lines += ["## Published runs", "",
              "The roofline's prediction for our program, at the published layout, batch and recomputation, compared with "
              "the published speed of another program. The ratio includes both the error of the roofline and the "
              "difference between the two programs.", "",
              *table(("from", "run", "GPUs", "published tokens/s a GPU", "predicted", "ratio", "differences"),
                     [compared(run) for run in PUBLISHED]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    words.Parser(__doc__).parse_args()
    warnings.filterwarnings("ignore")
    (ROOT / "benchmarks" / "roofline.md").write_text(written())
