"""Divergence of a model's next-token distribution from a teacher's, over a sharded vocabulary, chunk by chunk.

For each token, the teacher gives the k most likely next tokens and their log-probabilities. All other tokens are one
class. With this class the divergence is at most the divergence of whole distributions, grows with k, and has its
minimum where the model predicts the same as the teacher. If the k probabilities were renormalized instead, the minimum
would be elsewhere.

    forward  KL(P‖Q) = Σ P (ln P − ln Q)         its gradient by the logits: Q − P
    reverse  KL(Q‖P) = Σ Q (ln Q − ln P)         Q (ln Q − ln P − KL)

P: the teacher's k + 1 probabilities. Q: the model's k + 1 probabilities. The gradient of the class of other tokens is
divided among these tokens in proportion to the model's probabilities. As in `loss`, the whole logits are never in
memory.
"""
from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.model.execution import Execution
from meshtrain.model.loss import Chunks, LossSpec, scale_grads
from meshtrain.names import NO_TARGET
from meshtrain.sharding.mesh import on_shards

GROUP = 32          # neighbouring tokens of which the largest logit is found first
LEAST = 1e-6        # of the rest's probability, so that its logarithm is finite; float32 rounds 1 - 1e-8 to 1


def compare(reverse: bool, logp_K, logq_K):
    """Return (divergence, its gradient by the logits of the k tokens, factor of all other tokens' gradients).

    logp_K, logq_K: log-probabilities [..., k] of the teacher and of the model, both at the same tokens. The gradient by
    the logit of another token is its probability times the factor [...].
    """
    p_K, q_K = jnp.exp(logp_K), jnp.exp(logq_K)
    p_rest, q_rest = (jnp.maximum(1 - x_K.sum(-1), LEAST) for x_K in (p_K, q_K))
    apart_K, apart = logq_K - logp_K, jnp.log(q_rest) - jnp.log(p_rest)
    if not reverse:
        return -(p_K * apart_K).sum(-1) - p_rest * apart, q_K - p_K, 1 - p_rest / q_rest
    divergence = (q_K * apart_K).sum(-1) + q_rest * apart
    return divergence, q_K * (apart_K - divergence[..., None]), apart - divergence


@dataclasses.dataclass(frozen=True)
class DivergenceSpec:
    """What is minimized: weight · temperature² · divergence + (1 - weight) · nll of the targets.

    The divergence compares distributions whose logits are divided by the temperature, which makes its gradient about 1
    / temperature² as large (arXiv:1503.02531, section 2). The nll has no temperature. head: the `LossSpec` of the head,
    with the temperature.
    """
    head: LossSpec
    reverse: bool
    weight: float


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def distillation_sums(ex: Execution, spec: DivergenceSpec, x_BTD, w, targets_BT, ids_BTK, logp_BTK):
    """Return (objective, nll, divergence), float32 sums over the tokens with a target, in nats.

    The arguments before `ids` have the same meaning as in `loss.loss_sums`. ids: the teacher's k most likely tokens,
    int32, all different. logp: their log-probabilities at the temperature, float32. nll and divergence are metrics:
    only the objective's gradient with respect to x and w is defined. The computation takes 3 head matmuls.
    """
    return _sums(ex, spec, x_BTD, w, targets_BT, ids_BTK, logp_BTK, with_grads=False)[0]


def _sums_backward(ex: Execution, spec: DivergenceSpec, saved, cotangents):
    return *scale_grads(saved, cotangents[0]), None, None, None


def _sums(ex: Execution, spec: DivergenceSpec, x_BTD, w, targets_BT, ids_BTK, logp_BTK, *, with_grads: bool):
    """Return ((objective, nll, divergence), (dx_BTD, dw) or None)."""
    chunks, heat = Chunks(ex, spec.head, x_BTD, w, targets_BT), spec.head.temperature
    ids_nrsK, logp_nrsK = chunks.tokens.cut(ids_BTK), chunks.tokens.cut(logp_BTK)
    by_divergence, by_nll = spec.weight * heat * heat, 1 - spec.weight

    def visit(carry, c):
        nll, divergence, grads = carry
        x_c, t_c, logits, lse, hit_V, hit, _ = chunks.take(c)
        ids_K, has = chunks.tokens.take(ids_nrsK, c), t_c != NO_TARGET
        logq_K = pick(chunks, logits, ids_K) - lse[..., None]
        each, d_K, d_rest = compare(spec.reverse, chunks.tokens.take(logp_nrsK, c), logq_K)
        cold = lse if heat == 1 else jax.nn.logsumexp(logits * heat, -1)        # without the temperature
        nll = nll + jnp.where(has, cold - heat * hit, 0.0).sum((1, 2))
        divergence = divergence + jnp.where(has, each, 0.0).sum((1, 2))
        if with_grads:
            more_K = d_K - jnp.exp(logq_K) * d_rest[..., None]
            dl = jnp.exp(logits - lse[..., None]) * d_rest[..., None] + spread(chunks, logits, ids_K, more_K)
            dl = by_divergence * dl
            if by_nll:      # by the divided logits, too
                dl = dl + by_nll * heat * (jnp.exp(heat * logits - cold[..., None]) - hit_V.astype(jnp.float32))
            grads = chunks.add(grads, c, x_c, logits, jnp.where(has[..., None], dl, 0.0))
        return (nll, divergence, grads), None

    zero_n = jnp.zeros((chunks.tokens.n,), jnp.float32)
    (nll, divergence, grads), _ = jax.lax.scan(
        visit, (zero_n, zero_n, chunks.zeros() if with_grads else None), jnp.arange(chunks.tokens.count))
    nll, divergence = nll.sum(), divergence.sum()
    objective = by_divergence * divergence + by_nll * nll
    return (objective, nll, divergence), chunks.finish(grads) if with_grads else None


distillation_sums.defvjp(partial(_sums, with_grads=True), _sums_backward)


def top_tokens(ex: Execution, spec: LossSpec, k: int, x_BTD, w, targets_BT):
    """Return the k most likely next tokens [B, T, k], int32, and their log-probabilities, float32, most likely first.

    The other arguments have the same meaning as in `loss.loss_sums`. The function is not differentiable."""
    chunks = Chunks(ex, spec, x_BTD, w, targets_BT)

    def visit(found, c):
        _, _, logits, lse, *_ = chunks.take(c)
        top_K, ids_K = take_top(chunks, logits, k)
        return tuple(chunks.tokens.put(into, new, c) for into, new in zip(
            found, (ids_K, top_K - lse[..., None]), strict=True)), None
    shape = *chunks.targets_nrs.shape, k
    zeros = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    found, _ = jax.lax.scan(visit, zeros, jnp.arange(chunks.tokens.count))
    return tuple(map(chunks.tokens.join, found))


# ---- columns of a sharded vocabulary ---------------------------------------------------------------------------------
# XLA would gather the logits of the whole vocabulary for each of these, so all axes are manual.


def pick(chunks: Chunks, logits_nrsV, ids_nrsK):
    """Return the logits [n, r, s, k] of these tokens."""
    def local(logits, ids):
        here, held = _own(chunks, logits, ids)
        own = jnp.where(held, jnp.take_along_axis(logits, here, -1), 0.0)
        return jax.lax.psum(own, chunks.vocab_axes) if chunks.vocab_axes else own
    return _on_shards(chunks, local, (True, False), False)(logits_nrsV, ids_nrsK)


def spread(chunks: Chunks, logits_nrsV, ids_nrsK, values_nrsK):
    """Return an array like the logits: the given values at these tokens (all different), zeros elsewhere."""
    def local(logits, ids, values):
        here, held = _own(chunks, logits, ids)
        into, values = jnp.zeros_like(logits), jnp.where(held, values, 0.0)
        return jnp.vectorize(lambda row, at, new: row.at[at].add(new), signature="(v),(k),(k)->(v)")(into, here, values)
    return _on_shards(chunks, local, (True, False, False), True)(logits_nrsV, ids_nrsK, values_nrsK)


def take_top(chunks: Chunks, logits_nrsV, k: int):
    """Return the k largest logits [n, r, s, k] and their tokens, int32. Each shard selects its own k largest first."""
    def local(logits):
        top, ids = _select(logits, min(k, logits.shape[-1]))
        if not chunks.vocab_axes:
            return top, ids
        ids = ids + _first(chunks, logits)
        top, ids = (jax.lax.all_gather(x, chunks.vocab_axes, axis=3, tiled=True) for x in (top, ids))
        top, at = jax.lax.top_k(top, k)
        return top, jnp.take_along_axis(ids, at, -1)
    return _on_shards(chunks, local, (True,), (False, False))(logits_nrsV)


def _select(x, k: int):
    """Return the result of jax.lax.top_k, but equal values may be in another order. On GPUs XLA implements top_k as a
    sort with three arrays of the size of x. So this function first finds the groups with the k largest maxima, which
    contain the k largest values."""
    if x.shape[-1] % GROUP or 2 * k * GROUP > x.shape[-1]:
        return jax.lax.top_k(x, k)
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    _, largest_K = jax.lax.top_k(groups.max(-1), k)
    chosen = jnp.take_along_axis(groups, largest_K[..., None], -2)
    top_K, at_K = jax.lax.top_k(chosen.reshape(*x.shape[:-1], -1), k)
    return top_K, GROUP * jnp.take_along_axis(largest_K, at_K // GROUP, -1) + at_K % GROUP


def _own(chunks: Chunks, logits, ids):
    """Return (index of each token in this shard of the vocabulary, or 0; whether it is in this shard)."""
    here = ids - _first(chunks, logits)
    held = (here >= 0) & (here < logits.shape[-1])
    return jnp.where(held, here, 0), held


def _first(chunks: Chunks, logits):
    return jax.lax.axis_index(chunks.vocab_axes) * logits.shape[-1] if chunks.vocab_axes else 0


def _on_shards(chunks: Chunks, local, of_vocab: tuple[bool, ...], out):
    """Return `local` on the shards of its arguments. of_vocab, out: whether each array's last dim is the vocabulary."""
    def spec(whole: bool):
        return P(chunks.tokens.shards, None, None, chunks.vocab_axes if whole else None)
    return on_shards(local, tuple(map(spec, of_vocab)), jax.tree.map(spec, out))
