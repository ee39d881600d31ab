"""Training objectives: next-token loss (pretraining, SFT) or preference loss (DPO).

An objective gives the sums of a microbatch from the last layer's output, and the count they are divided by. Source of
DPO: arXiv:2305.18290, equation 7, with the log-probabilities of answers summed, not averaged.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from meshtrain.model.layers import Execution
from meshtrain.model.transformer import Transformer
from meshtrain.names import CHOSEN, NO_TARGET, PADDING, REJECTED

# of a batch: dims after [batch]
FIELDS = {"tokens": 1, "targets": 1, "segments": 1, "positions": 1, "index": 1, "sequence": 0}


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Negative log-likelihood of the targets, plus z_loss · Σ lse²."""
    z_loss: float
    chunk: int
    fields = {name: (dims, jnp.int32) for name, dims in FIELDS.items()}

    def count(self, batch):
        return jnp.sum(batch["targets"] != NO_TARGET)

    def head(self, model: Transformer, ex: Execution, p, x_BTD, batch):
        """(objective, loss, aux), sums over the microbatch; the objective is differentiated."""
        objective, nll = model.head_loss(ex, p, x_BTD, batch["targets"], z_loss=self.z_loss, chunk=self.chunk)
        return objective, nll, {}


@dataclasses.dataclass(frozen=True)
class Preference:
    """-log sigmoid of beta times how much more the model prefers the chosen answer than the reference did.

    A sequence holds a pair: segment CHOSEN and segment REJECTED. Its `reference` is the reference's log-probability of
    the chosen answer less that of the rejected one. Sequences without a pair (padding) count for nothing.
    """
    beta: float
    chunk: int
    fields = NextToken.fields | {"reference": (0, jnp.float32)}

    def count(self, batch):
        return jnp.sum(self._pairs(batch))

    def head(self, model: Transformer, ex: Execution, p, x_BTD, batch):
        margin_B = self.beta * (self.preferred(model, ex, p, x_BTD, batch) - batch["reference"])
        real_B = self._pairs(batch)
        over = lambda values_B: jnp.sum(jnp.where(real_B, values_B, 0.0))
        loss = over(jax.nn.softplus(-margin_B))
        return loss, loss, {"reward_margin": over(margin_B), "reward_accuracy": over(margin_B > 0)}

    def preferred(self, model: Transformer, ex: Execution, p, x_BTD, batch):
        """[B]: log-probability of the chosen answer less that of the rejected one."""
        nll_BT = model.head_token_nll(ex, p, x_BTD, batch["targets"], self.chunk)
        of = lambda segment: jnp.sum(jnp.where(batch["segments"] == segment, nll_BT, 0.0), -1)
        return of(REJECTED) - of(CHOSEN)

    @staticmethod
    def _pairs(batch):
        return jnp.any(batch["segments"] == REJECTED, -1)


def tokens(batch):
    """Tokens of a step without padding. AUX_LOSS is divided by them, so that it weighs the same whatever share of
    tokens are targets."""
    return jnp.maximum(jnp.sum(batch["segments"] != PADDING), 1).astype(jnp.float32)


def of_run(training) -> NextToken | Preference:
    """training: the section [training]."""
    if training.objective == "dpo":
        return Preference(training.dpo_beta, training.loss_chunk)
    return NextToken(training.z_loss, training.loss_chunk)
