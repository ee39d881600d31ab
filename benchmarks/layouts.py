"""python benchmarks/layouts.py: the formulas compared with the roofline of the compiled step, by layout, in time and
memory.

Each step is compiled for H100s that need not be present; nothing is measured. Writes benchmarks/layouts.md and
tests/goldens/rooflines.toml, with which tests/cost/test_orders.py compares the formulas of every commit. Needs the
extra gpu-compile.
"""
from __future__ import annotations

import dataclasses
import math
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks import machine, words
from meshtrain import assembly
from meshtrain.commands import plan
from meshtrain import hardware
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas import attention_pairs, rates
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import place
from meshtrain.cost.formulas.price import Price, price
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.inspection import memory
from meshtrain.model import transformer
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout
from meshtrain.shipped import locate_shipped

GPU, SEQ_LEN, GIB = "h100", 8192, 2**30
GOLDEN = ROOT / "tests" / "goldens" / "rooflines.toml"


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout of a model. Only steps with the same model, batch and number of GPUs are compared."""
    model: str
    batch: int
    rule: str
    mesh: dict
    microbatches: int
    remat: str = "selective"
    schedule: str = ""
    chunks: int = 1

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def name(self) -> str:
        mesh = " × ".join(f"{axis} {n}" for axis, n in self.mesh.items())
        schedule = f", {self.schedule} × {self.chunks}" if self.schedule else ""
        return (f"{self.model}, {self.batch} sequences, {self.rule}, {mesh}, {self.microbatches} microbatches, "
                f"{self.remat}{schedule}")

    def run(self):
        options = plan.COMMAND.read(f"{self.model} --gpus {self.gpus} --gpu {GPU} --global-batch {self.batch} --seq-len "
                                   f"{SEQ_LEN}".split())
        pipeline = {"schedule": self.schedule, "chunks": self.chunks} if self.schedule else {}
        return plan.run_of(options).replace(mesh=self.mesh,
                          sharding={"rules": str(locate_shipped(f"sharding_rules/{self.rule}.toml"))},
                          model={"attention": "pallas"},        # supported by every jax
                          training={"microbatches": self.microbatches, "remat": self.remat}, pipeline=pipeline)


def _of(model: str, batch: int, microbatches: int, remat: str, *layouts: tuple[str, dict]) -> list[Case]:
    return [Case(model, batch, rule, mesh, microbatches, remat) for rule, mesh in layouts]


CASES = [
    *_of("llama3.2-1b", 512, 16, "none", *((rule, dict(fsdp=8)) for rule in ("ddp", "zero1", "zero2", "zero3")),
         ("hsdp", dict(data=2, fsdp=4)), ("zero3", dict(fsdp=4, context=2)), ("ddp", dict(data=4, tensor=2))),
    *_of("llama3-8b", 64, 1, "selective", *((rule, dict(fsdp=64)) for rule in ("zero1", "zero2", "zero3")),
         ("hsdp", dict(data=8, fsdp=8))),
    *_of("llama3-8b", 256, 4, "selective", *((rule, dict(fsdp=64)) for rule in ("zero1", "zero2", "zero3")),
         ("hsdp", dict(data=8, fsdp=8)), ("zero3", dict(fsdp=16, tensor=4))),
    Case("llama3-8b", 256, "zero1", dict(fsdp=32, stage=2), 8, "selective", "1f1b"),
]  # fmt: skip


def priced(case: Case) -> Price:
    """Return the price by the formulas."""
    run, spec = case.run(), MeshSpec(case.mesh)
    model, rated = transformer.build(run.model), rates.Rates(hardware.get(GPU), Assumptions(GPU))
    layout = Layout(rules.load(locate_shipped(f"sharding_rules/{case.rule}.toml")), spec.sizes)
    attended = attention_pairs.count(run, layout, rated.assumed)
    options = Options.of(run, rated.gpu.name, schedule=case.schedule, chunks=case.chunks, attended=attended)
    return price(place(model.parameters(), run.model, layout, spec), rated, options)


def compiled(case: Case) -> tuple[float, int]:
    """Return (seconds by the roofline, bytes of a GPU) of the compiled step."""
    made = assembly.assemble(case.run(), gpu_compile.topology(f"{GPU}:{case.gpus}"))
    executable = assembly.compile_step(made, made.program.lower_step())
    return CompiledProgram.of_run(made, executable).roofline.step_s, memory.measure(made, executable)["total"]


def measure(case: Case) -> tuple[str, str]:
    """Return a line of the record and a row of the table."""
    (step_s, held), formula = compiled(case), priced(case)
    total = formula.memory_bytes["total"]
    return (f'"{case.name}" = {{ step_s = {step_s:.4f}, bytes = {held} }}',
            f"| {case.name} | {formula.step_s:.2f} | {step_s:.2f} | {formula.step_s / step_s - 1:+.1%} | "
            f"{total / GIB:.1f} | {held / GIB:.1f} | {total / held - 1:+.1%} |")


def main(argv) -> None:
    words.Parser(__doc__).parse_args(argv)
    warnings.filterwarnings("ignore")
    golden, lines = ["# Written by benchmarks/layouts.py: of compiled steps, seconds by the roofline and bytes of a "
                     "GPU."], []
    for case in CASES:
        for kept, line in zip((golden, lines), measure(case)):
            kept.append(line)
        print(lines[-1], flush=True)
    GOLDEN.write_text("\n".join(golden) + "\n")
    (ROOT / "benchmarks" / "layouts.md").write_text("\n".join([
        "# Layouts by formula and by the roofline of the compiled step", "",
        "Written by `python benchmarks/layouts.py`. Nothing here was measured.",
        "", machine.line("", "jax"), "", f"| on {GPU} | formula, s | roofline, s | | formula, GiB | compiled, GiB | |",
        "| --- | --- | --- | --- | --- | --- | --- |", *lines]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
