"""Scoring: the log-probability of every target, and whether it is the most likely token.

It runs the forward pass of training. The head reads a few positions of each row at a time, so the full logits never
exist.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshtrain.model import rope
from meshtrain.model.execution import Execution
from meshtrain.model.transformer import Transformer

PLACES = 256        # positions of a row whose logits exist together
TOKENS = 8192       # tokens of a batch, on each device that has its own rows


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
    """A model with its weights on the mesh that is in context. compiled: (name, jitted, its arguments) -> the compiled
    function."""
    model: Transformer
    ex: Execution
    params: dict
    mesh: jax.sharding.Mesh
    compiled: Callable = lambda name, jitted, *args: jitted
    programs: dict = dataclasses.field(default_factory=dict)

    def rows(self, length: int) -> int:
        """Return the batch size for sequences of this length."""
        return max(1, TOKENS // length) * self.ex.layout.num_shards(self.ex.layout.batch_axes)

    def score(self, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return (float32 log-probabilities in nats [B, T], whether they are the largest [B, T]) of batch["targets"].
        Both arrays are undefined where there is no target. batch: as in training, with `rows` rows."""
        return tuple(np.asarray(x) for x in self._run("the scoring of tokens", self._score, batch))

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, T, V] for the token after each token. A row is one document. All logits exist in
        memory together."""
        def whole(p, batch):
            x_BTD = self.model.through_layers(self.ex, p, batch)
            return self.model.head_logits(self.ex, p, x_BTD)
        layout = self.ex.layout
        tokens = np.pad(tokens_BT, ((0, -len(tokens_BT) % layout.num_shards(layout.batch_axes)), (0, 0)))
        place = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        batch = {"tokens": tokens.astype(np.int32), "segments": np.ones(tokens.shape, np.int32), "positions": place,
                 "index": place, "sequence": np.arange(len(tokens), dtype=np.int32)}
        return np.asarray(self._run("the logits", whole, batch))[:len(tokens_BT)]

    def _run(self, name: str, function: Callable, batch: dict[str, np.ndarray]):
        if rope.turns(self.model.cfg):
            batch = batch | {"length": _lengths(batch["segments"], batch["positions"])}
        layout, key = self.ex.layout, (name, batch["tokens"].shape)
        placed = {name: jax.device_put(x, NamedSharding(
            self.mesh, layout.spec("activations", ("batch", "seq")[:x.ndim]))) for name, x in batch.items()}
        if key not in self.programs:
            self.programs[key] = self.compiled(name, jax.jit(function), self.params, placed)
        return self.programs[key](self.params, placed)

    def _score(self, p, batch):
        x_BTD = self.model.through_layers(self.ex, p, batch)
        B, T, D = x_BTD.shape
        count = -(-T // PLACES)
        size = -(-T // count)
        pad = [(0, 0), (0, count * size - T)]

        def in_parts(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)

        def part(given):
            x_BcD, targets_Bc = given
            logits_BcV = self.model.head_logits(self.ex, p, x_BcD)
            found_Bc = jnp.take_along_axis(logits_BcV, jnp.maximum(targets_Bc, 0)[..., None], -1)[..., 0]
            return found_Bc - jax.nn.logsumexp(logits_BcV, -1), jnp.argmax(logits_BcV, -1) == targets_Bc
        scores = jax.lax.map(part, (in_parts(jnp.pad(x_BTD, [*pad, (0, 0)])), in_parts(jnp.pad(batch["targets"], pad))))
        return tuple(jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T] for x in scores)


def _lengths(segments_BT: np.ndarray, positions_BT: np.ndarray) -> np.ndarray:
    """Return int32 [B, T]: for each token, the number of tokens of its document up to its last one in the row."""
    lengths = np.zeros_like(positions_BT, np.int32)
    for row, segments, positions in zip(lengths, segments_BT, positions_BT):
        ends = np.zeros(int(segments.max(initial=0)) + 1, np.int32)
        np.maximum.at(ends, segments, positions + 1)
        row[:] = ends[segments]
    return lengths
