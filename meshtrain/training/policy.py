"""The policy-gradient loss of each sampled token, a function of its log-probability.

The loss of a step is the sum over tokens of weight · L. The weight is known before the step (`rl.answers` computes it).
The derivative of L is explicit, so that the head computes logits, loss and gradient in one pass. The loss is
elementwise, unless the ratio or the correction is computed over whole answers.

Sources: arXiv:1707.06347 (PPO's clip), 1912.09729 (dual clip), 2402.03300 (GRPO), 2503.14476 (DAPO), 2503.20783 (Dr.
GRPO), 2506.13585 (CISPO), 2507.18071 (GSPO), http://joschu.net/blog/kl-approx.html (k1, k2, k3).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Policy:
    """The keys of [rl] with the same names.

    old: the source of old log-probabilities. "current": this step, so that the ratio is 1 and only its derivative
    matters. "trainer": the trainer before the first step on these answers. "sampler": the sampler.

    The ratio is exp(log-probability - old); with "sequence", its geometric mean over an answer. With "cispo" the loss
    is -ratio · A · log-probability, where the ratio is at most 1 + clip_high and not differentiated. The correction is
    exp(old - sampled); with "sequence", its product over an answer, as in TRL. The correction multiplies all terms
    except KL and entropy, and is not differentiated.
    """
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_limit: float = 0.0
    dual_clip: float = 0.0
    kl: float = 0.0
    kl_form: str = "k3"
    entropy: float = 0.0
    correction: str = "none"
    correction_limit: float = 2.0
    old: str = "current"

    @classmethod
    def of(cls, rl) -> Policy:
        """Return the policy of the section [rl]."""
        shared = {field.name: getattr(rl, field.name) for field in dataclasses.fields(cls)}
        auto = "current" if rl.updates == 1 and rl.lag == 0 else "trainer"
        return cls(**shared | {"old": auto if rl.old == "auto" else rl.old})

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the float32 arrays [B, T] of a batch that the loss reads."""
        return ("weight", "advantage", "sampled", *["old"] * (self.old == "trainer"), *["reference"] * (self.kl > 0))

    @property
    def elementwise(self) -> bool:
        """Whether the derivative by a token's log-probability depends on that token alone."""
        return self.ratio != "sequence" and not self.correction.startswith("sequence")

    def of_token(self, logp, entropy, given):
        """Return (weighted loss, its derivative by the log-probability, its derivative by the entropy), elementwise.

        A derivative by the entropy of None means 0. given: the arrays of `reads`, or the weight and the results of
        `losses`.
        """
        loss, slope = (given["loss"], given["slope"]) if "slope" in given else self.losses(logp, given)[:2]
        if not self.entropy:
            return loss, slope, None
        bonus = self.entropy * given["weight"]
        return loss - bonus * entropy, slope, -bonus

    def losses(self, logp, given, total: Callable | None = None):
        """Return (weighted losses without entropy, the derivative of their sum by each log-probability, metrics).

        total: function x -> at each token, the sum of x over the token's answer; required if the policy is not
        `elementwise`. All arrays have the same shape. Where there is no token, arrays are finite and the weight is 0.
        metrics, for each token: ratio, clip_low, clip_high (whether its loss is clipped), kl.
        """
        weight, advantage = given["weight"], given["advantage"]
        old = {"current": logp, "trainer": given.get("old"), "sampler": given["sampled"]}[self.old]
        log_ratio = logp - old
        if self.ratio == "sequence":
            assert total is not None
            length = jnp.maximum(total(jnp.ones_like(logp)), 1)
            log_ratio = total(log_ratio) / length
        ratio = jnp.exp(log_ratio)
        loss, by_ratio, by_logp, clipped = self._gain(logp, ratio, advantage)
        if self.correction != "none":
            correction = self._correction(old - given["sampled"], total)
            loss, by_ratio, by_logp = loss * correction, by_ratio * correction, by_logp * correction
        metrics = {"ratio": ratio, **clipped}
        if self.kl:
            k, dk = self._divergence(logp, given["reference"])
            metrics["kl"] = k
            if self.kl_form == "k3_corrected":
                by_ratio = by_ratio + self.kl * ratio * k
                k, dk = ratio * k, ratio * dk
            loss, by_logp = loss + self.kl * k, by_logp + self.kl * dk
        by_ratio = weight * by_ratio
        if self.ratio == "sequence":    # the derivative of the mean by each token of an answer is 1 / length
            assert total is not None
            by_ratio = total(by_ratio) / length
        return weight * loss, by_ratio + weight * by_logp, metrics

    def _gain(self, logp, ratio, A):
        """Return (loss, its derivative by the log-ratio, its derivative by the log-probability itself, metrics)."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        nothing = jnp.zeros_like(ratio)
        above = (ratio > high) & (A > 0)
        if self.ratio == "cispo":
            slope = -jnp.minimum(ratio, high) * A
            return slope * logp, nothing, slope, {"clip_low": nothing, "clip_high": above}
        limited = self.ratio_limit > 0
        free = (jnp.minimum(ratio, self.ratio_limit) if limited else ratio) * A
        clipped = jnp.clip(ratio, low, high) * A
        loss = -jnp.minimum(free, clipped)
        inside = (ratio >= low) & (ratio <= high)
        moves = jnp.where(free < clipped, ratio < self.ratio_limit if limited else True, inside)
        slope = jnp.where(moves, -ratio * A, 0.0)
        if self.dual_clip:
            most = -self.dual_clip * A
            over = (A < 0) & (loss > most)
            loss, slope = jnp.where(over, most, loss), jnp.where(over, 0.0, slope)
        return loss, slope, nothing, {"clip_low": (ratio < low) & (A < 0), "clip_high": above}

    def _correction(self, difference, total):
        weight = jnp.exp(total(difference) if self.correction.startswith("sequence") else difference)
        if self.correction.endswith("truncate"):
            return jnp.minimum(weight, self.correction_limit)
        return jnp.where(weight > self.correction_limit, 0.0, weight)

    def _divergence(self, logp, reference):
        """Return (estimate of KL, its derivative by the log-probability)."""
        x = reference - logp
        if self.kl_form == "k1":
            return -x, jnp.ones_like(x)
        if self.kl_form == "k2":
            return x * x / 2, -x
        return jnp.exp(x) - x - 1, 1 - jnp.exp(x)
