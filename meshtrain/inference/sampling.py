"""Sampling: greedy, or a draw after temperature, top-k, top-p and min-p, with the semantics of transformers."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Picking:
    """temperature: 0: greedy. top_k: number of most likely tokens kept; 0: all. top_p: kept probability mass. min_p:
    minimum share of the most likely token's probability."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def pick(how: Picking, logits_BV, keys_B):
    """int32 [B] tokens. keys_B: a key for each row, of this token alone."""
    if how.temperature == 0:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, allowed(how, logits_BV)).astype(jnp.int32)


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
