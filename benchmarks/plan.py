"""python benchmarks/plan.py: what a search for the best layout costs as the number of GPUs grows. Writes
benchmarks/plan.md.

CPU seconds of one process from the parsed command to the ranked plans, imports apart: the slowest of three. Model and
batch of each row are as large as its GPUs are used for, so that no row is short for want of layouts that fit.
"""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks import machine, words
from meshtrain import plan
from meshtrain.cost.planner import search

REPEATS = 3
ROWS = (("llama3-8b", 8, 64, 8192), ("llama3-8b", 64, 512, 8192), ("llama3-70b", 512, 1024, 8192),
        ("llama3-70b", 1024, 1024, 8192),
        ("llama3-405b", 4096, 2048, 8192), ("llama3-405b", 16384, 2048, 8192), ("llama3-405b", 16384, 128, 131072))


def searched(model: str, gpus: int, batch: int, length: int) -> tuple[float, search.Answer]:
    """(CPU seconds, the answer)."""
    begin = time.process_time()
    options = plan.COMMAND.read(f"{model} --gpus {gpus} --gpu h100 --global-batch {batch} --seq-len {length}".split())
    answer = search.search(plan.question_of(plan.asked(options), options, gpus))
    return time.process_time() - begin, answer


def main(argv) -> None:
    words.Parser(__doc__).parse_args(argv)
    searched(*ROWS[0])                  # what the first call alone pays
    lines = ["# Searching layouts", "", "Written by `python benchmarks/plan.py`; what is measured stands there.", "",
             machine.line("", "jax"), "",
             "| model | GPUs | tokens of a sequence | layouts tried | meshes and rule files that fit | CPU seconds |",
             "|---|---|---|---|---|---|"]
    for row in ROWS:
        times, answers = zip(*(searched(*row) for _ in range(REPEATS)))
        model, gpus, _, length = row
        lines.append(f"| {model} | {gpus:,} | {length:,} | {answers[0].tried:,} | {len(answers[0].plans):,} | "
                     f"{max(times):.1f} |")
        print(lines[-1])
    (ROOT / "benchmarks" / "plan.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
