"""Numbers that layers and objectives report beside their output, and how they become metrics of a step."""
from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

AUX_LOSS = "aux_loss"           # the balance loss of experts: the only number that is added to the objective, too
EXPERT_LOAD = "expert_load"     # tokens by layer, then depth of MTP, and expert [L, E]
# With optimizer.qk_clip: [L, N], by layer and head, zero in rows of other layers. It bounds the attention scores: the
# largest log-sum-exp of a token, at least 0.
SCORE_BOUND = "score_bound"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stat:
    """One number or array, float32.

    per: "token" or "target" for a sum over a microbatch's tokens: the metric is a mean over the step's tokens without
    padding ("token") or over the objective's count ("target"). "step" for a maximum, at least 0, which is not divided.
    """
    value: jax.Array
    per: Literal["token", "target", "step"] = dataclasses.field(metadata=dict(static=True), default="target")

    def __add__(self, other: Stat) -> Stat:
        combine = jnp.maximum if self.per == "step" else jnp.add
        return dataclasses.replace(self, value=combine(self.value, other.value))

    def where(self, on: jax.Array) -> Stat:
        return dataclasses.replace(self, value=jnp.where(on, self.value, 0))

    def combine(self) -> Stat:
        """Return the sum over the leading dim, or the maximum for "step"."""
        return dataclasses.replace(self, value=self.value.max(0) if self.per == "step" else self.value.sum(0))


class Normalizers(NamedTuple):
    """The numbers by which the sums of a step are divided.

    targets: the objective's own count. tokens: tokens without padding. shares_LE: see `Inputs`.
    """
    targets: jax.Array
    tokens: jax.Array
    shares_LE: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerStats:
    """The numbers of layers, microbatches or replicas by name. A missing name counts as zero.

    The set of names is open: every number that a layer or an objective reports becomes a column of the metrics."""
    by_name: dict[str, Stat] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, per: Literal["token", "target", "step"], **values: jax.Array) -> LayerStats:
        """Return the values with these names, all with the same `per`."""
        return cls({name: Stat(value, per) for name, value in values.items()})

    def __add__(self, other: LayerStats) -> LayerStats:
        return self | LayerStats({name: self.by_name[name] + stat if name in self.by_name else stat
                                  for name, stat in other.by_name.items()})

    def __or__(self, other: LayerStats) -> LayerStats:
        return LayerStats(self.by_name | other.by_name)

    def combine(self) -> LayerStats:
        """Return each number combined over its leading dim."""
        return LayerStats({name: stat.combine() for name, stat in self.by_name.items()})

    def where(self, on: jax.Array) -> LayerStats:
        """Return the numbers if `on`, else zeros."""
        return LayerStats({name: stat.where(on) for name, stat in self.by_name.items()})

    def metrics(self, normalizers: Normalizers) -> dict[str, jax.Array]:
        """Return a step's metrics: each number divided by the normalizer that its `per` names."""
        divisors = {"token": normalizers.tokens, "target": normalizers.targets, "step": 1}
        return {name: stat.value / divisors[stat.per] for name, stat in self.by_name.items()}
