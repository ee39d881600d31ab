"""python -m benchmarks.pictures [NAME ...]: draws the pictures of README.md and docs/README.md again.

mesh: 32 GPUs on four hosts. traffic: the bytes that one of eight GPUs sends in a step of each layout, compiled without
GPUs (takes some minutes). plan: the plans of Llama 3 70B on 64 H100, as memory against step time.
"""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import meshtrain as mt
from benchmarks import words
from meshtrain.inspection import summary
from meshtrain.pages import pictures, skin
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.units import size

DOCS = Path(__file__).resolve().parent.parent / "docs"
LAYOUTS = {"ddp": ("ddp", {"data": 8}), "zero1": ("zero1", {"fsdp": 8}), "zero3": ("zero3", {"fsdp": 8}),
           "hsdp": ("hsdp", {"data": 2, "fsdp": 4}), "zero3, tensor 2": ("zero3", {"fsdp": 4, "tensor": 2}),
           "zero3, context 2": ("zero3", {"fsdp": 4, "context": 2})}
MODEL = {"model.preset": "llama3.2-1b", "model.compute_dtype": "bfloat16", "data.seq_len": 4096, "data.global_batch": 32,
         "training.microbatches": 2, "training.remat": "selective"}
PLANNED = {"model": "llama3-70b", "gpus": 64, "gpu": "h100"}


def mesh() -> str:
    return pictures.mesh(summary.mesh(MeshSpec({"data": 2, "fsdp": 4, "tensor": 4}), None, "any"))


def traffic() -> str:
    sent = {name: mt.Experiment(settings=MODEL | {f"mesh.{axis}": n for axis, n in sizes.items()}, rules=rules).inspect(
        "h100:8").sent_bytes for name, (rules, sizes) in LAYOUTS.items()}
    kinds = list(dict.fromkeys(kind for one in sent.values() for kind in one))
    return pictures.bars([pictures.Bar(name, [(kinds.index(kind), kind, count) for kind, count in one.items()])
                          for name, one in sent.items()], size, "bytes that a GPU sends in a step", legend=True)


def plan() -> str:
    return mt.plan(**PLANNED).picture


def main(argv=None) -> int:
    drawn = {draw.__name__: draw for draw in (mesh, traffic, plan)}
    parser = words.Parser(__doc__)
    parser.add_argument("names", nargs="*", choices=[*drawn, []], metavar="NAME", help=f"{', '.join(drawn)} (all)")
    for name in parser.parse_args(argv).names or drawn:
        (DOCS / f"{name}.svg").write_text(skin.alone(drawn[name]()) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
