"""Sampling: greedy, or a draw after temperature, top-k, top-p and min-p, with the semantics of transformers."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.names import PRNG


@dataclasses.dataclass(frozen=True)
class Picking:
    """temperature: 0: greedy. top_k: number of most likely tokens kept; 0: all. top_p: kept probability mass. min_p:
    minimum share of the most likely token's probability."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Draw(NamedTuple):
    """Of each row: the token; its log-probability in nats, float32, among those that are drawn from (greedy: of the
    logits as they are); by how much it is ahead of the second best, noise included: a draw can differ only where logits
    differ by half of it."""
    token_B: jax.Array
    logprob_B: jax.Array
    margin_B: jax.Array


def key(seed, batch, row, sample):
    """The random key of one sample, a function of these four uint32 counters. Each draw folds in its position."""
    found = jax.random.key(seed, impl=PRNG)
    for counter in (batch, row, sample):
        found = jax.random.fold_in(found, counter)
    return found


def pick(how: Picking, logits_BV, keys_B) -> Draw:
    """keys_B: a key for each row, of this token alone. The largest of logits and Gumbel noise is a draw from their
    softmax."""
    z_BV = (allowed(how, logits_BV) if how.temperature else logits_BV).astype(jnp.float32)
    noisy_BV = z_BV
    if how.temperature:
        # Not the default mode: of noise above 9, two programs round the logarithm of a number near 1 by 1e-4 apart.
        noisy_BV += jax.vmap(lambda key: jax.random.gumbel(key, z_BV.shape[-1:], mode="high"))(keys_B)
    token_B = jnp.argmax(noisy_BV, -1).astype(jnp.int32)
    # By comparison with the token, not top_k or a gather: the vocabulary may be split.
    is_it_BV = lax.broadcasted_iota(jnp.int32, z_BV.shape, 1) == token_B[:, None]
    second_B = jnp.where(is_it_BV, -jnp.inf, noisy_BV).max(-1)
    logprob_B = jnp.where(is_it_BV, z_BV, 0).sum(-1) - jax.nn.logsumexp(z_BV, -1)
    return Draw(token_B, logprob_B, noisy_BV.max(-1) - second_B)


def allowed(how: Picking, logits_BV):
    """The logits over the temperature, -inf where a token is not drawn from. One after another, as transformers has
    them: top-k, top-p of what is left, min-p of what is left."""
    z = logits_BV / how.temperature
    if 0 < how.top_k < z.shape[-1]:
        z = jnp.where(z < jax.lax.top_k(z, how.top_k)[0][..., -1:], -jnp.inf, z)
    if how.top_p < 1:
        falling = jnp.sort(z, -1)[..., ::-1]
        p = jax.nn.softmax(falling, -1)
        # The token with which the sum reaches top_p is kept, so one always is.
        kept = (jnp.cumsum(p, -1) - p < how.top_p).at[..., 0].set(True)
        z = jnp.where(z < jnp.min(jnp.where(kept, falling, jnp.inf), -1, keepdims=True), -jnp.inf, z)
    if how.min_p > 0:
        z = jnp.where(z < z.max(-1, keepdims=True) + jnp.log(how.min_p), -jnp.inf, z)
    return z
