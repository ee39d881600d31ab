"""meshtrain as its run file configures it: the contract of benchmarks/contenders/case.py."""
from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from benchmarks.contenders.case import BETAS, CLIP, DECAY, LEARNING_RATE, Case
from meshtrain import assembly, config, run_files

ROOT = Path(__file__).resolve().parent.parent.parent


def run_of(case: Case, count: int, *more: str) -> config.Run:
    """Return the run of a case on `count` devices, ZeRO-3 over all of them. more: further keys and values."""
    shape = {name: getattr(case, name) for name in ("vocab_size", "embed_dim", "num_layers", "num_heads",
                                                    "num_kv_heads", "head_dim", "mlp_dim", "rope_theta", "norm_eps")}
    given = {f"model.{name}": value for name, value in shape.items()} | {
        "model.compute_dtype": case.dtype, "mesh.fsdp": count, "data.seq_len": case.seq_len,
        "data.global_batch": case.rows * case.microbatches * count, "data.document_mask": str(case.packed).lower(),
        "training.microbatches": case.microbatches, "training.remat": "selective", "training.grad_clip": CLIP,
        "optimizer.learning_rate": LEARNING_RATE, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0,
        "optimizer.b1": BETAS[0], "optimizer.b2": BETAS[1], "optimizer.weight_decay": DECAY}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return run_files.load([str(ROOT / "configs" / "llama3-8b.toml"), *words, *more])


class Trainer:
    """The contract is `case.Trainer`."""

    def __init__(self, case: Case, variant: str = ""):
        self.made = assembly.assemble(run_of(case, 1), jax.devices()[:1])
        self.mesh, self.num_params = self.made.mesh, sum(info.size for info in self.made.model.parameters())
        self.settings = "; ".join(["remat selective", *self.made.notes])
        self.program = assembly.compile_step(self.made, self.made.program.lower_step())

    def reset(self) -> None:
        self.state = None
        self.state = assembly.initialize(self.made)

    def place(self, batch):
        count, T = batch["tokens"].shape
        further = {"index": np.tile(np.arange(T, dtype=np.int32), (count, 1)),
                   "sequence": np.arange(count, dtype=np.int32)}
        return self.made.program.place(dict(batch) | further)

    def step(self, placed):
        self.state, metrics = self.program(self.state, placed)
        return metrics["loss"]

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def peak_bytes(self) -> int:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
