"""The training step of contenders in torch: microbatches under autocast, clipping, fused AdamW."""
from __future__ import annotations

import contextlib

import numpy as np
import torch

from benchmarks.contenders.case import BETAS, CLIP, DECAY, IGNORED, LEARNING_RATE, Case

SKIPPED = -100      # torch's target that the loss leaves out
SHARE = 0.5         # of the GPU's memory: meshtrain beside it reserves 0.45
INIT_STD = 0.02     # of matrices, as in LlamaConfig


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_gpu() -> bool:
    return device().type == "cuda"


class TorchTrainer:
    """The contract is `case.Trainer`. A subclass sets `model` and `settings` and has `sum_losses`."""
    model: torch.nn.Module
    settings: str
    program = mesh = None

    def __init__(self, case: Case):
        self.case = case
        if on_gpu():
            torch.cuda.set_per_process_memory_fraction(SHARE)

    def sum_losses(self, rows: dict, count: int) -> torch.Tensor:
        """Return the sum of a microbatch's losses divided by `count`."""
        raise NotImplementedError

    @property
    def num_params(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def reset(self) -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            for param in self.model.parameters():
                torch.nn.init.normal_(param, std=INIT_STD) if param.ndim > 1 else torch.nn.init.ones_(param)
        self.model.zero_grad(set_to_none=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY,
                                           fused=True)

    def place(self, batch):
        def put(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(x.astype(np.int64)).to(device())
        arrays = dict(batch) | {"targets": np.where(batch["targets"] == IGNORED, SKIPPED, batch["targets"])}
        rows = self.case.rows
        parts = [{name: put(x[first:first + rows]) for name, x in arrays.items()}
                 for first in range(0, len(batch["tokens"]), rows)]
        return parts, int((batch["targets"] != IGNORED).sum())

    def step(self, placed):
        parts, count = placed
        total = torch.zeros((), device=device())
        for rows in parts:
            with self.autocast():
                loss = self.sum_losses(rows, count)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def autocast(self):
        narrow = self.case.dtype != "float32"
        return torch.autocast(device().type, getattr(torch, self.case.dtype)) if narrow else contextlib.nullcontext()

    def wait(self) -> None:
        if on_gpu():
            torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if on_gpu() else 0
