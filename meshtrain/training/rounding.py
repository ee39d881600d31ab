"""Stochastic rounding of bfloat16 weights and moments: on average even a tiny update changes them by its full size.

bfloat16 has 8 bits, so rounding to nearest loses an update below 1/512 of a weight, and Adam's second moment would not
decay at all with b2 = 0.999. Here the float32 sum is rounded to one of its two neighbours, to the nearer one more
often, so that the expected value equals the sum. The random bits are a function of `run.seed`, the step, the
parameter's name and an element's place in the whole array. The bits are the same on every layout, in every replica and
after a restart, and nothing is sent. Source: arXiv:2010.06192.
"""
from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.random import threefry2x32_p

from meshtrain.model.params import ParamInfo
from meshtrain.names import PRNG

# Tags of the keys of weights and of moments, larger than any number of keys that a seed is split into.
TAG, MOMENTS = 0x726F756E, 0x6D6F6D65


def round_weights(infos: Sequence[ParamInfo], new: dict, seed: int, step) -> dict:
    """Return float32 weights in the dtypes in which they are stored.

    infos: one per leaf. step: number of steps taken before this one.
    """
    def round_leaf(info: ParamInfo, w):
        if info.dtype != jnp.bfloat16:
            return w.astype(info.dtype)
        return to_bfloat16(w, _key(TAG, seed, step, info.name))
    return jax.tree.unflatten(jax.tree.structure(new), map(round_leaf, infos, jax.tree.leaves(new)))


def store_moments(tx: optax.GradientTransformation, seed: int) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with its moments stored in bfloat16: `tx` reads them as float32, and its results are rounded.

    Moments are the float32 arrays of the state that have the path and the shape of a parameter, such as Adam's two and
    Muon's momentum. The rest of the state (Adafactor's rows and columns, counts) is unchanged.
    """
    def init(params):
        state = tx.init(params)
        return _map_moments(lambda x, name, number: x.astype(jnp.bfloat16), state, find_moments(state, params))

    def update(grads, state, params, *, step, windows: Mapping[str, Window] = MappingProxyType({}), **extra):
        forms = jax.eval_shape(tx.init, params)
        wide = jax.tree.map(lambda x, form: x.astype(form.dtype), state, forms)
        updates, new = tx.update(grads, wide, params, step=step, **extra)
        # Two moments of a parameter share a draw: 20 rounds of threefry give 32 bits, and each moment takes 16.
        draws: dict[tuple[str, int], jax.Array] = {}

        def round_moment(x, name: str, number: int):
            with jax.named_scope("stochastic_rounding"):
                draw, half = divmod(number, 2)
                if (name, draw) not in draws:
                    key = jax.random.fold_in(_key(MOMENTS, seed, step, name), draw)
                    draws[name, draw] = _bits(key, windows[name], x.shape) if name in windows else jax.random.bits(
                        key, x.shape, jnp.uint32)
                bits = draws[name, draw]
                return _cut(x, bits >> 16 if half else bits & 0xFFFF)
        return updates, _map_moments(round_moment, new, find_moments(forms, params))
    return optax.GradientTransformationExtraArgs(init, update)


class Window(NamedTuple):
    """A part of an array: the shape of the whole, and the place of the part's first element along each dim."""
    whole: Sequence[int]
    start: Sequence[Any]


def _bits(key, window: Window, shape: Sequence[int]):
    """Return a window of `jax.random.bits(key, window.whole, uint32)`: threefry of an element's place, which has 64
    bits, in the whole array. shape: of the window."""
    high = low = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(window.whole):
        # (high, low) · size + place: low in two halves of 16 bits, whose products with 16 bits of size fit into 32
        parts = [(low >> 16 * i & 0xFFFF) * (size >> 16 * j & 0xFFFF) for i in (0, 1) for j in (0, 1)]
        middle = (parts[0] >> 16) + (parts[1] & 0xFFFF) + (parts[2] & 0xFFFF)
        high = high * size + parts[3] + (parts[1] >> 16) + (parts[2] >> 16) + (middle >> 16)
        place = jnp.uint32(window.start[dim]) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        low = (low * size) + place
        high += low < place
    first, second = jax.random.key_data(key)
    one, other = threefry2x32_p.bind(first, second, high, low)
    return one ^ other


def find_moments(state: Any, params: Any) -> list[tuple[str, int] | None]:
    """Return, for each leaf of an optimizer state, (name of the parameter, number among its moments); None: not a
    moment."""
    names = {_names(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    found: list[tuple[str, int] | None] = []
    counts: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        own = _names(path)
        of = next((own[at:] for at in range(len(own)) if own[at:] in names), None)
        if of is None or leaf.shape != names[of] or leaf.dtype != jnp.float32:
            found.append(None)
            continue
        name = "/".join(of)
        found.append((name, counts.get(name, 0)))
        counts[name] = counts.get(name, 0) + 1
    return found


def _names(path: tuple) -> tuple[str, ...]:
    """Return the names of the dicts at the end of a path."""
    names = []
    for part in reversed(path):
        if not isinstance(part, jax.tree_util.DictKey):
            break
        names.append(str(part.key))
    return tuple(reversed(names))


def _map_moments(f, state, moments):
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, [leaf if moment is None else f(leaf, *moment)
                                          for leaf, moment in zip(leaves, moments, strict=True)])


def _key(tag: int, seed: int, step, name: str):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=PRNG), tag), step)
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def to_bfloat16(x, key):
    """Return float32 x as one of its two neighbours in bfloat16. Exact numbers, infinities and NaN are unchanged."""
    with jax.named_scope("stochastic_rounding"):
        return _cut(x, jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32))


def _cut(x, more):
    """Return float32 x in bfloat16, rounded away from zero if `more` (uint32 below 2^16) is large enough.

    A float32 is a bfloat16 and 16 further bits, which are the distance to the neighbour that is farther from zero.
    `more` is added to these bits, and then the bits are cut off. A finite number stays finite: above the largest
    bfloat16 it becomes the largest bfloat16.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = jnp.minimum((bits & 0x7FFFFFFF) + more >> 16, 0x7F7F) | (bits >> 16 & 0x8000)
    rounded = jax.lax.bitcast_convert_type(cut.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
