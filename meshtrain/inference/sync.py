"""Weights of a training run, laid out for its sampler.

Two named moves: to the dims that the sampler splits, over as many devices as before, then gathered over the axes whose
devices have answers of their own. Asked for both at once, XLA's partitioner sends up to twice the bytes, or gathers
every weight whole on every device.
"""
from __future__ import annotations

import functools
import math

import jax
from jax.sharding import PartitionSpec as P

from meshtrain.model import params
from meshtrain.model.transformer import Transformer
from meshtrain.names import MATMUL_ROLES
from meshtrain.sharding.rules import Layout


def moved(model: Transformer, stored: Layout, sampler: Layout, p: dict, dtype) -> dict:
    """The parameters as `sampler` reads them, matmul weights in `dtype`, from shards of [optimizer] of `stored`; of the
    same mesh, which is in context. p: all of them, or a part of the tree."""
    def move(info: params.ParamInfo, w):
        # Cast and pinned where it lies, or it travels in the dtype that it is stored in.
        w = stored.constrain("optimizer", w.astype(dtype) if info.role in MATMUL_ROLES else w, info.axes)
        return sampler.constrain("params", jax.lax.with_sharding_constraint(w, between(info, stored, sampler)),
                                 info.axes)
    there = [info for info in model.parameters() if _has(p, info.path)]
    return params.mapped(there, move, p)


def between(info: params.ParamInfo, stored: Layout, sampler: Layout) -> P:
    """The layout between the two moves: the sampler's, and over what it does not use still split as stored."""
    wanted = [_axes(entry) for entry in _padded(sampler.spec("params", info.axes), len(info.shape))]
    used, found = {axis for entry in wanted for axis in entry}, []
    for dim, want, has in zip(info.shape, wanted, _padded(stored.spec("optimizer", info.axes), len(info.shape)),
                              strict=True):
        rest = tuple(axis for axis in _axes(has) if axis not in used)
        if dim % math.prod(stored.sizes[axis] for axis in want + rest):
            rest = ()
        found.append(want + rest or None)
    return P(*found)


def _axes(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _padded(spec: P, dims: int) -> tuple:
    return (*spec, *[None] * (dims - len(spec)))


def _has(tree: dict, path: tuple[str, ...]) -> bool:
    return functools.reduce(lambda node, name: node.get(name) if isinstance(node, dict) else None, path, tree) is not None
