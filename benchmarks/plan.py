"""python benchmarks/plan.py: the cost of a search for the best layout by number of GPUs, and the errors of the formulas
for runs that others published in 2026. Writes benchmarks/plan.md.

python benchmarks/plan.py --rows FILE: prints the comparison for other rows with the columns of
tests/goldens/published_2026.csv; nothing is fitted to them, and nothing is written.

The search is measured in CPU seconds of one process, from the parsed command to the ranked plans, without imports. The
result is the slowest of three. The model and batch of each row are typical for its number of GPUs, so that every search
has enough layouts that fit.
"""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks import machine, published_2026, words
from meshtrain.commands import plan
from meshtrain.cost.planner import search

REPEATS = 3
ROWS = (("llama3-8b", 8, 64, 8192), ("llama3-8b", 64, 512, 8192), ("llama3-70b", 512, 1024, 8192),
        ("llama3-70b", 1024, 1024, 8192),
        ("llama3-405b", 4096, 2048, 8192), ("llama3-405b", 16384, 2048, 8192), ("llama3-405b", 16384, 128, 131072))


COMPARED = """\
The error is |predicted tokens/s ÷ published tokens/s − 1|. tests/goldens/published_2026.csv has the rows with their
sources; benchmarks/published_2026.py maps them to layouts. They were run with other frameworks (Megatron-Bridge, NeMo,
AutoModel, torchtitan, MaxText). Between releases of a framework, the speed of the same layout differs by 6% in the
median.

Ten constants are fitted to all rows together: the share of its peak that Blackwell sustains, the shares for float8 and
MXFP8 on B200 and on B300, the gaps of a layer and of an expert, the rate of matmuls of many experts on Blackwell, and a
gain of 12% a year between releases in narrow dtypes. For the last two columns, the constants are fitted again without
the rows of one model, or of one source, and the errors are those of the rows that were left out.

Sources do not give all settings. If they are not given, we assume 1 microbatch, evenly busy experts and no
recomputation (for AutoModel: full recomputation if the run would not fit otherwise). These assumptions, and the
formulas for other frameworks, were chosen with all rows in view; only the constants were left out and fitted again. The
largest errors are those of early releases and of short steps (Moonlight, 0.46 s), whose time depends on the host.

There are formulas for MXFP8 and narrow experts only for this comparison: `train` does not support them, and `plan` does
not propose them.
""".rstrip().split("\n")


def searched(model: str, gpus: int, batch: int, length: int) -> tuple[float, search.Answer]:
    """Return (CPU seconds, the answer)."""
    begin = time.process_time()
    options = plan.COMMAND.read(f"{model} --gpus {gpus} --gpu h100 --global-batch {batch} --seq-len {length}".split())
    answer = search.search(plan.question_of(plan.run_of(options), options, gpus))
    return time.process_time() - begin, answer


def measure(model: str, gpus: int, batch: int, length: int) -> str:
    """Return a row of the table."""
    times, answers = zip(*(searched(model, gpus, batch, length) for _ in range(REPEATS)))
    row = (f"| {model} | {gpus:,} | {length:,} | {answers[0].tried:,} | {len(answers[0].plans):,} | "
           f"{max(times):.1f} |")
    print(row)
    return row


def main(argv) -> None:
    parser = words.Parser(__doc__)
    parser.add_argument("--rows", type=Path, default=None)
    if path := parser.parse_args(argv).rows:
        print("\n".join(published_2026.table(path)))
        return
    searched(*ROWS[0])                  # warm-up: only the first call pays for some work
    rows = [measure(*row) for row in ROWS]
    lines = ["# Searching layouts", "", "Written by `python benchmarks/plan.py`. The first lines of this script say what is measured and how.", "",
             machine.line("", "jax"), "",
             "| model | GPUs | tokens of a sequence | layouts tried | meshes and rule files that fit | CPU seconds |",
             "|---|---|---|---|---|---|", *rows]
    lines += ["", "# Published runs of 2026", "", *COMPARED, "", *published_2026.table()]
    (ROOT / "benchmarks" / "plan.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
