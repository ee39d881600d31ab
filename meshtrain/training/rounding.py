"""Stochastic rounding of bfloat16 weights: on average an update moves a weight by its size, however small it is.

bfloat16 has 8 bits, so rounding to nearest loses an update below 1/512 of a weight. Here the float32 sum is rounded to
one of its two neighbours, to the nearer one more often, so that the expected weight equals the sum. The random bits are
a function of `run.seed`, the step, the parameter's name and an element's place in the whole array. They are the same on
every layout, in every replica and after a restart, and nothing is sent. Source: arXiv:2010.06192.
"""
from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshtrain.model.params import ParamInfo
from meshtrain.names import PRNG

TAG = 0x726F756E        # tag of these keys, larger than any number of keys that a seed is split into


def round_weights(infos: Sequence[ParamInfo], new: dict, seed: int, step) -> dict:
    """Return float32 weights in the dtypes in which they are stored.

    infos: of the leaves. step: number of steps taken before this one.
    """
    def round_leaf(info: ParamInfo, w):
        if info.dtype != jnp.bfloat16:
            return w.astype(info.dtype)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=PRNG), TAG), step)
        return to_bfloat16(w, jax.random.fold_in(key, zlib.crc32(info.name.encode())))
    return jax.tree.unflatten(jax.tree.structure(new), map(round_leaf, infos, jax.tree.leaves(new)))


def to_bfloat16(x, key):
    """Return float32 x as one of its two neighbours in bfloat16. Exact numbers, infinities and NaN are unchanged.

    A float32 is a bfloat16 and 16 further bits, which are the distance to the neighbour that is farther from zero. A
    random number below 2^16 is added to these bits, and then they are cut off.
    """
    with jax.named_scope("stochastic_rounding"):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        more = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
        cut = ((bits + more) >> 16).astype(jnp.uint16)
        return jnp.where(jnp.isnan(x), x.astype(jnp.bfloat16), jax.lax.bitcast_convert_type(cut, jnp.bfloat16))
