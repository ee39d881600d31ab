"""What every contender of benchmarks/peers.py trains: one Llama, the same tokens, the same precision.

Imports neither jax nor torch, so that each contender's process loads its own library alone.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

LEARNING_RATE, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
IGNORED = -1            # target of a position that the loss leaves out
ARRAYS = ("tokens", "targets", "positions", "segments")


@dataclasses.dataclass(frozen=True)
class Case:
    """A Llama, and one step of one device: `microbatches` of `rows` rows of `seq_len` tokens. packed: rows hold several
    documents, and no token attends to another document than its own. dtype: of matmuls; weights, gradients and the
    states of AdamW are float32."""
    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float
    norm_eps: float
    seq_len: int
    microbatches: int
    rows: int
    dtype: str
    packed: bool

    @property
    def num_params(self) -> int:
        """Two vocabularies, the layers, three kinds of norms."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.embed_dim
        layer = attention + 3 * self.embed_dim * self.mlp_dim + 2 * self.embed_dim
        return 2 * self.vocab_size * self.embed_dim + self.num_layers * layer + self.embed_dim

    @property
    def tokens(self) -> int:
        """Of a step of one device."""
        return self.microbatches * self.rows * self.seq_len

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Trainer(Protocol):
    """What a contender's file has, made by `Trainer(case, variant)`. program and mesh: what the roofline reads, of a
    contender in JAX; else None. settings: what a reader of the table must know."""
    num_params: int
    settings: str
    program: Any
    mesh: Any

    def reset(self) -> None:
        """Set weights and optimizer to their values before the first step, always the same."""
        ...

    def place(self, batch: Mapping[str, np.ndarray]) -> Any:
        """Put int32 [microbatches × rows, seq_len] arrays, named by ARRAYS, on the device."""
        ...

    def step(self, placed: Any) -> Any:
        """Take one optimizer step. Return the mean loss over all targets that are not IGNORED, which need not be
        computed yet."""
        ...

    def wait(self) -> None:
        """Wait until all steps are computed."""
        ...

    def peak_bytes(self) -> int:
        """The largest memory of the device so far; 0 where it does not tell."""
        ...


def draw(case: Case, starts: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw a step's rows. starts: bool [rows, T], where documents begin. A target is the next token, also across the
    end of a document, so that all contenders have the same."""
    count, T = starts.shape
    drawn = np.random.default_rng(seed).integers(0, case.vocab_size, (count, T + 1))
    index = np.tile(np.arange(T), (count, 1))
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), 1)
    out = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:], "positions": positions, "segments": np.cumsum(starts, 1)}
    return {name: np.ascontiguousarray(x, np.int32) for name, x in out.items()}


def halve(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two batches of rows of two documents each. Only the second document has targets, and only the first one's tokens
    differ: a contender that keeps documents apart has the same loss on both."""
    count, T = case.microbatches * case.rows, case.seq_len
    starts = np.zeros((count, T), bool)
    starts[:, [0, T // 2]] = True
    one = draw(case, starts)
    one["targets"][:, :T // 2] = IGNORED
    other = {name: x.copy() for name, x in one.items()}
    other["tokens"][:, :T // 2] = draw(case, starts, seed=1)["tokens"][:, :T // 2]
    return one, other


def save(path: Path, batch: Mapping[str, np.ndarray]) -> None:
    np.savez(path, **batch)


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in ARRAYS}
