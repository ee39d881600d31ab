"""QK-Clip: after a step's update, scales down the query and key weights of heads whose attention scores are too large.

The scores then stay near a limit. A head whose largest score in a step is S is scaled by gamma = min(1, limit / S). S
is an upper bound that attention computes anyway: the largest log-sum-exp of a token's scores. This bound is at least
the largest score and at most log(keys) above the largest score, so at 128k tokens a head may be clipped while its
scores are still 12 below the limit. Source: arXiv:2507.20534 (Kimi K2, section 2.1, "MuonClip"), where S is the largest
score itself. Here any optimizer can be used.
"""
from __future__ import annotations

import jax.numpy as jnp

from meshtrain import pattern
from meshtrain.config.sections import Model, Run
from meshtrain.model.transformer import Transformer, without_layers
from meshtrain.model.stats import SCORE_BOUND


def bounds(run: Run) -> tuple[int, int] | None:
    """Return `Execution.bounds` of a run."""
    heads = [run.model.of(kind.mixer).num_heads for kind in pattern.kinds(run.model)
             if pattern.mixer(kind.mixer).attends]
    return (run.model.num_layers, max(heads)) if run.optimizer.qk_clip else None


def clip(model: Transformer, p: dict, bound_LN, limit: float) -> dict:
    """Return the parameters with the query and key weights of all attention layers scaled.

    bound_LN: the step's SCORE_BOUND."""
    gamma_LN, kinds, groups = limit / jnp.maximum(bound_LN, limit), pattern.kinds(model.cfg), []
    for first, group in model.number_groups():
        stacks = list(model.weights(p, group))
        for i, weights in enumerate(stacks):
            if pattern.mixer(letter := kinds[first + i].mixer).attends:
                cfg, gamma = model.cfg.of(letter), gamma_LN[group.numbers(first) + i]
                stacks[i] = weights | {"attention": _scale(
                    weights["attention"], (_of_latents if cfg.latent.kv_dim else _of_heads)(cfg, gamma))}
        groups.append(tuple(stacks))
    return model.with_layers(without_layers(p), groups)


def _scale(attention: dict, factors: dict) -> dict:
    """Return `attention` with its projections scaled. factors: factors by projection, [L, heads, 1 or the width]."""

    def by(part, factor):
        return factor[:, None] if part == "kernel" else factor
    return attention | {name: {part: (w * by(part, factor)).astype(w.dtype) for part, w in attention[name].items()}
                        for name, factor in factors.items()}


def _of_heads(cfg: Model, gamma_LN) -> dict:
    """Return the factors of query and key weights. Heads that share a key use their smallest gamma. If keys are also
    the values, only queries are scaled."""
    num_heads, num_kv_heads = cfg.num_heads, cfg.num_kv_heads
    worst_LK = gamma_LN[:, :num_heads].reshape(-1, num_kv_heads, num_heads // num_kv_heads).min(-1)
    key = worst_LK if cfg.tie_values else jnp.sqrt(worst_LK)
    query = jnp.repeat(key, num_heads // num_kv_heads, 1)[..., None]
    return {"query": query} | ({} if cfg.tie_values else {"key": key[..., None]})


def _of_latents(cfg: Model, gamma_LN) -> dict:
    """Return the factors of query and key weights. All heads share the rotated key, so the full gamma scales the
    rotated part of the queries instead."""
    gamma_LN1, rotated = gamma_LN[:, :cfg.num_heads, None], cfg.latent.rope_dim
    root = jnp.sqrt(gamma_LN1)
    query = jnp.concatenate([jnp.repeat(root, cfg.head_dim - rotated, -1), jnp.repeat(gamma_LN1, rotated, -1)], -1)
    return {"query": query, "key": root}


def report_bounds(metrics: dict, limit: float) -> dict:
    """Return a step's metrics with the bounds in the form that is reported.

    The bounds become two metrics: the largest bound of all heads, and the number of heads that exceed the limit."""
    if SCORE_BOUND not in metrics:
        return metrics
    bound_LN = metrics[SCORE_BOUND]
    return {name: value for name, value in metrics.items() if name != SCORE_BOUND} | {
        "score_bound_max": bound_LN.max(), "clipped_heads": jnp.sum(bound_LN > limit)}
