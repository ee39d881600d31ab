"""Rotary position embedding, its frequency scaling, and queries that are scaled by their position.

Sources: arXiv:2104.09864 (rope); 2306.15595 (linear); 2309.00071 (YaRN); 2402.13753 (LongRoPE); 2407.21783 and the
published Llama 3.1 code; `modeling_rope_utils` of transformers for proportional, partial rotation and attention_factor.
"""
from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.kernels import rotation
from meshtrain.sharding.mesh import on_shards
from meshtrain.sharding.rules import Layout


class Rope(NamedTuple):
    """cos, sin [B, T, rotated dims / 2] float32. query_scale_BT: a factor on queries; None means 1."""
    cos: jax.Array
    sin: jax.Array
    query_scale_BT: jax.Array | None = None


def of(cfg: Model, positions_BT, length_BT=None) -> dict[str, Rope]:
    """Return the rope of each mixer that rotates, by its letter. Equal ropes share their arrays.

    cfg: the [model] section. length_BT: tokens of each token's sequence; required if `turns` is not empty.
    """
    made: dict = {}
    ropes = {}
    for mixer, section in pattern.rope_mixers(cfg).items():
        key = section.rope_theta, section.rope_scaling, pattern.rope_width(section)
        ropes[mixer] = made[key] = made.get(key) or _build(section, positions_BT, length_BT)
    return ropes


def turns(cfg: Model) -> tuple[int, ...]:
    """Return the lengths beyond which a sequence has other frequencies.

    Only longrope has such lengths, and only in a model without a fixed length (max_seq_len 0), for example a model from
    a model folder. A run has a fixed length, data.seq_len.
    """
    return () if cfg.max_seq_len else tuple(sorted({
        section.rope_scaling.original_max_position_embeddings for section in pattern.rope_mixers(cfg).values()
        if section.rope_scaling.rope_type == "longrope"}))


def _build(cfg: Model, positions_BT, length_BT) -> Rope:
    scaling, position_BT = cfg.rope_scaling, positions_BT.astype(jnp.float32)
    freq, factor = _frequencies(cfg)
    if scaling.rope_type == "longrope" and not cfg.max_seq_len:
        assert length_BT is not None, "the lengths of sequences choose the factors of longrope"
        longer_BT1 = length_BT[..., None] > scaling.original_max_position_embeddings
        freq = jnp.where(longer_BT1, _frequencies(cfg, longer=True)[0], freq)
    angle = position_BT[..., None] * freq
    beta, original = scaling.llama_4_scaling_beta, scaling.original_max_position_embeddings
    grown_BT = 1 + beta * jnp.log(1 + jnp.floor(position_BT / original)) if beta else None
    return Rope(factor * jnp.cos(angle), factor * jnp.sin(angle), grown_BT)


def _frequencies(cfg: Model, longer: bool = False):
    """Return (the angle per position of each pair of dims, the factor on cos and sin). The factor sharpens the softmax.

    longer: whether to return longrope's frequencies beyond its original length."""
    scaling, width = cfg.rope_scaling, pattern.rope_width(cfg)
    pairs, original = width // 2, scaling.original_max_position_embeddings
    freq = cfg.rope_theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    match scaling.rope_type:
        case "linear":
            return freq / scaling.factor, 1.0
        case "llama3":
            return _slow_down(freq, _by_turns(scaling, freq), scaling.factor), 1.0
        case "yarn":
            slower = _slow_down(freq, _by_dims(cfg, width), scaling.factor)
            return slower, scaling.attention_factor or _sharpness(scaling)
        case "longrope":
            # Chosen by the run's length, not by a batch's longest position, so that the model does not change from
            # batch to batch.
            divisors = scaling.long_factor if longer or cfg.max_seq_len > original else scaling.short_factor
            sharper = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
            return freq / jnp.asarray(divisors, jnp.float32), scaling.attention_factor or sharper
        case "proportional":
            turning = int(scaling.partial_rotary_factor * width // 2)
            return jnp.where(jnp.arange(pairs) < turning, freq / scaling.factor, 0.0), 1.0
    return freq, 1.0


def _sharpness(scaling) -> float:
    """Return YaRN's factor on cos and sin.

    With mscale and mscale_all_dim, the result does not contain the factor of mscale_all_dim, because
    model.multipliers.score contains this factor.
    """

    def of(weight):
        return 0.1 * weight * math.log(scaling.factor) + 1
    return of(scaling.mscale) / of(scaling.mscale_all_dim) if scaling.mscale and scaling.mscale_all_dim else of(1)


def _slow_down(freq, fast, factor: float):
    """Return the frequencies; divided by `factor` where `fast` is 0, unchanged where it is 1, interpolated between."""
    return freq * (fast + (1 - fast) / factor)


def _by_turns(scaling, freq):
    """Return a ramp over the number of rotations in the original length."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * freq / (2 * jnp.pi)
    return jnp.clip((turns - low) / (high - low), 0.0, 1.0)


def _by_dims(cfg: Model, width: int):
    """Return a ramp over pair indices, between the indices of the two bounds. With `truncate` the bounds are rounded
    outward.
    """
    scaling = cfg.rope_scaling
    original = scaling.original_max_position_embeddings

    def pair(turns):
        return width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(cfg.rope_theta))
    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return 1 - jnp.clip((jnp.arange(width // 2) - first) / max(last - first, 0.001), 0.0, 1.0)


def rotate(x_BTNH, rope: Rope):
    """Apply rotary embedding to the first dims, as two halves (Hugging Face's convention). Other dims are unchanged."""
    cos, sin = (a[:, :, None].astype(jnp.float32) for a in (rope.cos, rope.sin))
    width = 2 * cos.shape[-1]
    first, second = jnp.split(x_BTNH[..., :width].astype(jnp.float32), 2, -1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTNH.dtype)
    return turned if width == x_BTNH.shape[-1] else jnp.concatenate([turned, x_BTNH[..., width:]], -1)


def scale_queries(q_BTNH, rope: Rope):
    """Return queries times the scale of their position.

    The scale applies to the whole head, including dims that are not rotated."""
    if rope.query_scale_BT is None:
        return q_BTNH
    return (q_BTNH.astype(jnp.float32) * rope.query_scale_BT[:, :, None, None]).astype(q_BTNH.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def norm_and_rotate(layout: Layout, heads: str, eps: float, x_BTNH, scale_H, cos_BTR, sin_BTR):
    """Apply RMSNorm over each head, then rotary embedding, by `kernels.rotation`. heads: logical axis of x's heads."""
    of_x, of_tables, _ = _specs(layout, heads)
    local = partial(rotation.forward, eps=eps)
    return on_shards(local, (of_x, P(None), of_tables, of_tables), of_x)(x_BTNH, scale_H, cos_BTR, sin_BTR)


def _norm_and_rotate_backward(layout: Layout, heads, eps, given, dy_BTNH):
    of_x, of_tables, split = _specs(layout, heads)

    def local(*given):
        dx_BTNH, dscale_H = rotation.backward(*given, eps)
        return dx_BTNH, dscale_H[None]
    dx_BTNH, dscale_SH = on_shards(local, (of_x, P(None), of_tables, of_tables, of_x), (of_x, P(split)))(
        *given, dy_BTNH)
    return dx_BTNH, dscale_SH.sum(0), None, None


def _specs(layout: Layout, heads: str) -> tuple[P, P, tuple[str, ...]]:
    """Return (the spec of x, the spec of cos and sin, the mesh axes that shard x)."""
    of_x, of_tables = (layout.spec("activations", layout.in_order("batch", "seq", *axes))
                       for axes in ((heads, "head_dim"), (None,)))
    split = tuple(axis for dim in of_x if dim for axis in ((dim,) if isinstance(dim, str) else dim))
    return of_x, of_tables, split


norm_and_rotate.defvjp(lambda layout, heads, eps, *given: (norm_and_rotate(layout, heads, eps, *given), given),
                       _norm_and_rotate_backward)
