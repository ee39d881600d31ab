"""Rotary position embedding and its frequency scaling.

Sources: arXiv:2104.09864 (rope); 2306.15595 (linear); 2309.00071 (YaRN); 2407.21783 and the published Llama 3.1 code.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rope(NamedTuple):
    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None


def of(cfg, positions_BT):
    if cfg.position != "rope":
        return {}
    return {m: Rope(*angles(cfg.of(m), positions_BT)) for m in "FW" if m in cfg.mixers}


def scaled(q, rope):
    return q


def angles(cfg, positions_BT):
    """(cos, sin), each [B, T, H/2] float32, with the config's frequency scaling."""
    half = cfg.head_dim // 2
    freq = cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scaling = cfg.rope_scaling
    if scaling.rope_type != "default":
        fast = _FAST[scaling.rope_type](cfg, freq)
        freq = freq * (fast + (1 - fast) / scaling.factor)
    angle = positions_BT[..., None].astype(jnp.float32) * freq
    if scaling.rope_type == "yarn":     # a sharper softmax: a factor on queries and keys
        sharper = 0.1 * math.log(scaling.factor) + 1
        return sharper * jnp.cos(angle), sharper * jnp.sin(angle)
    return jnp.cos(angle), jnp.sin(angle)


def _by_turns(cfg, freq):
    """Per pair: 0 slow, interpolated; 1 fast, unchanged; between, a ramp over rotations in the original length."""
    low, high = cfg.rope_scaling.low_freq_factor, cfg.rope_scaling.high_freq_factor
    turns = cfg.rope_scaling.original_max_position_embeddings * freq / (2 * jnp.pi)
    return jnp.clip((turns - low) / (high - low), 0.0, 1.0)


def _by_dims(cfg, freq):
    """As `_by_turns`, but the ramp is over pair indices, between the integers around those of the two bounds."""
    scaling = cfg.rope_scaling
    original = scaling.original_max_position_embeddings
    pair = lambda turns: freq.size * math.log(original / (2 * math.pi * turns)) / math.log(cfg.rope_theta)
    first, last = math.floor(pair(scaling.beta_fast)), math.ceil(pair(scaling.beta_slow))
    first, last = max(first, 0), min(last, cfg.head_dim - 1)
    return 1 - jnp.clip((jnp.arange(freq.size) - first) / max(last - first, 0.001), 0.0, 1.0)


_FAST = {"llama3": _by_turns, "yarn": _by_dims, "linear": lambda cfg, freq: jnp.zeros_like(freq)}


def rotate(x_BTNH, rope):
    """Rotary embedding on the two halves of H (Hugging Face's convention)."""
    cos, sin = (a[:, :, None].astype(jnp.float32) for a in rope[:2])
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTNH.dtype)
