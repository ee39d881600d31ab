"""Sampling: greedy, or a random token after temperature, top-k, top-p and min-p, with the semantics of transformers."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.names import PRNG


@dataclasses.dataclass(frozen=True)
class Picking:
    """How a token is chosen. temperature: the temperature; 0: greedy. top_k: number of most likely tokens kept; 0: all.
    top_p: kept probability mass. min_p: minimum probability, as a share of the most likely token's."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Draw(NamedTuple):
    """The chosen token of each row.

    token_B: the token. logprob_B: the token's log-probability in nats, float32, among the tokens that may be sampled
    (greedy: from the unchanged logits). margin_B: the token's lead over the second best token, including noise. Another
    program can choose another token only if its logits differ by at least half of this margin.
    """
    token_B: jax.Array
    logprob_B: jax.Array
    margin_B: jax.Array


def key(seed, batch, row, sample):
    """Return the random key of one sample, a function of these four uint32 counters. Each draw folds in its position.
    """
    random_key = jax.random.key(seed, impl=PRNG)
    for counter in (batch, row, sample):
        random_key = jax.random.fold_in(random_key, counter)
    return random_key


def pick(how: Picking, logits_BV, keys_B) -> Draw:
    """Choose a token for each row. keys_B: a key for each row, used for this token alone. The largest of logits plus
    Gumbel noise is a sample from their softmax."""
    z_BV = (restrict(how, logits_BV) if how.temperature else logits_BV).astype(jnp.float32)
    noisy_BV = z_BV
    if how.temperature:
        # Not the default mode: for noise above 9, two programs can round the logarithm of a number near 1 differently
        # by 1e-4.
        noisy_BV += jax.vmap(lambda key: jax.random.gumbel(key, z_BV.shape[-1:], mode="high"))(keys_B)
    token_B = jnp.argmax(noisy_BV, -1).astype(jnp.int32)
    # By comparison with the token, not by top_k or a gather, because the vocabulary may be sharded.
    is_it_BV = lax.broadcasted_iota(jnp.int32, z_BV.shape, 1) == token_B[:, None]
    second_B = jnp.where(is_it_BV, -jnp.inf, noisy_BV).max(-1)
    logprob_B = jnp.where(is_it_BV, z_BV, 0).sum(-1) - jax.nn.logsumexp(z_BV, -1)
    return Draw(token_B, logprob_B, noisy_BV.max(-1) - second_B)


def restrict(how: Picking, logits_BV):
    """Return the logits divided by the temperature, with -inf for tokens that may not be sampled. The filters apply in
    the order of transformers: top-k, top-p of the remaining tokens, min-p of the remaining tokens."""
    z = logits_BV / how.temperature
    if 0 < how.top_k < z.shape[-1]:
        z = jnp.where(z < jax.lax.top_k(z, how.top_k)[0][..., -1:], -jnp.inf, z)
    if how.top_p < 1:
        falling = jnp.sort(z, -1)[..., ::-1]
        p = jax.nn.softmax(falling, -1)
        # The token with which the sum reaches top_p is kept, so at least one is kept.
        kept = (jnp.cumsum(p, -1) - p < how.top_p).at[..., 0].set(True)
        z = jnp.where(z < jnp.min(jnp.where(kept, falling, jnp.inf), -1, keepdims=True), -jnp.inf, z)
    if how.min_p > 0:
        z = jnp.where(z < z.max(-1, keepdims=True) + jnp.log(how.min_p), -jnp.inf, z)
    return z
