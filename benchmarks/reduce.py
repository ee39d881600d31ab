"""python -m benchmarks.reduce [STEPS]

Losses of a small byte model on eight simulated devices, whose gradients are summed over the devices in float32 and in
bfloat16. Four runs of STEPS (default 3,000) steps each, on the same data. Writes benchmarks/reduce.md.

float32            [grads] reduce = "float32", the default
bfloat16, ring     gradients of eight rows, rounded, and rounded again after each addition, as eight GPUs in a ring add them.
                   One device, with a microbatch for each GPU: the sum over microbatches stands for that over GPUs
bfloat16           the same as CPUs run it: gradients are rounded, added in float32, and rounded again
float32, other     float32 from other initial weights: what chance alone does
"""
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import meshtrain as mt
from benchmarks import machine, words
from meshtrain.training import accumulators

PAGE = ROOT / "benchmarks" / "reduce.md"
DEVICES = 8
SETTINGS = {
    "model": {"vocab_size": 264, "embed_dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 176,
              "compute_dtype": "float32"},
    "data": {"source": "stdlib", "seq_len": 64, "global_batch": 8},
    "optimizer": {"name": "adamw", "learning_rate": 3e-3, "warmup_steps": 100}}
NARROW = {"extends": "ddp", "grads": {"reduce": "bfloat16"}}
RUNS = {"float32": ("ddp", 0), "bfloat16, ring": ("ddp", 0), "bfloat16": (NARROW, 0), "float32, other": ("ddp", 1)}


def round_sums() -> pytest.MonkeyPatch:
    """Round every gradient of a matrix, and the sum to which it is added, to bfloat16. Return an object that reverts
    this."""
    patch, add, add_at = pytest.MonkeyPatch(), accumulators.add, accumulators.add_at

    def narrow(tree, dims: int):
        return jax.tree.map(lambda a: jax.lax.reduce_precision(a, 8, 7) if a.ndim >= dims else a, tree)

    def add_rounded(totals, grads, on=None):
        return narrow(add(totals, narrow(grads, 2), on), 2)

    def add_rounded_at(totals, i, grads, on=True):
        return narrow(add_at(totals, i, narrow(grads, 2), on), 3)
    patch.setattr(accumulators, "add", add_rounded)
    patch.setattr(accumulators, "add_at", add_rounded_at)
    return patch


def train(name: str, steps: int) -> list[float]:
    """Return the loss of each step of a run of RUNS."""
    rules, seed = RUNS[name]
    one = name == "bfloat16, ring"
    settings = {**SETTINGS, "training": {"steps": steps, "microbatches": DEVICES if one else 1}, "run": {"seed": seed}}
    patch = round_sums() if one else pytest.MonkeyPatch()
    try:
        experiment = mt.Experiment(mesh={"data": 1 if one else DEVICES}, settings=settings, rules=rules,
                                   simulated_devices=DEVICES)
        return [float(experiment.step()["loss"]) for _ in range(steps)]
    finally:
        patch.undo()


def main(argv: list[str] | None = None) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=3000)
    steps = parser.parse_args(argv).steps
    losses = {name: train(name, steps) for name in RUNS}
    PAGE.write_text("\n".join(["# Losses with gradients reduced in bfloat16", "",
                               "Written by `python -m benchmarks.reduce`. The first lines of this script say what runs and how.", "",
                               machine.line("", "jax"), "", table(losses), ""]), encoding="utf-8")
    return 0


def table(losses: Mapping[str, Sequence[float]]) -> str:
    """Return the mean losses in tenths of the steps as a table, and the differences from the first run."""
    first, *others = losses
    parts = [np.array_split(np.asarray(of_run), 10) for of_run in losses.values()]
    heads = ["steps", *losses, *(f"{name} - {first}" for name in others)]
    lines, end = [heads, ["---"] * len(heads)], 0
    for tenth in zip(*parts):
        begin, end = end, end + len(tenth[0])
        means = [part.mean() for part in tenth]
        lines.append([f"{begin + 1} to {end}", *(f"{mean:.4f}" for mean in means),
                      *(f"{mean - means[0]:+.5f}" for mean in means[1:])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
