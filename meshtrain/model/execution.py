"""How layers are computed: their numerics, their engines, their layout, and what they save for the backward.

Layers read an `Execution`. An `Execution` does not change their formulas. This module knows no layer."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.model import float8
from meshtrain.model.fused_mlp import FusedMLP
from meshtrain.sharding import order
from meshtrain.sharding.rules import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Numerics:
    """The dtypes in which layers compute, and what layers save for the backward.

    float8: the precision of float8 projections; None: projections use `dtype`.
    """
    dtype: jnp.dtype
    remat: str = "none"     # none, selective, full, offload
    float8: jax.lax.DotAlgorithmPreset | None = None


class LinearAttention(NamedTuple):
    """The functions that recurrent mixers call.

    convolve(layout, xs, ws, segments_BT, axes=CHANNEL_AXES) -> ys. recur(layout, q_BTKH, k_BTKH, v_BTNV, g, beta_BTN,
    segments_BT) -> o_BTNV. Both are in `parallel.context.recurrence`.
    """
    convolve: Callable
    recur: Callable


@dataclasses.dataclass(frozen=True, eq=False)
class Engines:
    """The functions that depend on devices and on how sequences and experts are split.

    attention: (layout, q_BTNH, k_BSKH, v_BSKV, segments_BT, mask=, scores=, sinks_N=, bounded=) -> (o_BTNV, an upper
    bound of each head's scores [N] if bounded, else None). experts: `parallel.experts.dispatch.RoutedExperts`, or a
    function like it. by_kernels: whether `kernels.rotation` norms and rotates queries and keys, and `kernels.decode`
    attends to the cache.
    """
    attention: Callable
    experts: Callable | None = None         # None: no experts
    mlp: FusedMLP | None = None             # None: XLA's matmuls
    recurrence: LinearAttention | None = None    # None: no recurrent mixers
    by_kernels: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """How the model is computed: where arrays lie, in which numerics, by which engines."""
    layout: Layout
    numerics: Numerics
    engines: Engines
    in_order: bool = False  # whether collectives outside a loop must not overlap with those in it (`sharding.order`)
    in_parts: bool = False  # the layer sees one part of a microbatch, and its weights are `parts.share`
    # (number of layers, most heads of a layer): the stats of a layer have SCORE_BOUND; None: they do not
    bounds: tuple[int, int] | None = None
    router_losses: tuple[float, float] = (0.0, 0.0)     # weights of the experts' balance loss and of the z-loss

    def after(self, values, done):
        """Return `values`, which depend on `done` if the order of collectives matters. Both are pytrees."""
        return order.after(values, done) if self.in_order else values


def with_numerics(ex: Execution, **changed) -> Execution:
    """Return `ex` with the fields `changed` of its numerics replaced."""
    return dataclasses.replace(ex, numerics=dataclasses.replace(ex.numerics, **changed))


def recompute(ex: Execution, f: Callable) -> Callable:
    """Return f with only its inputs saved. The backward recomputes casts and elementwise ops of f, but no matmul.

    Under remat, f is returned unchanged, because the remat policy decides what is saved."""
    keep = jax.checkpoint_policies.save_only_these_names(float8.SCALE)
    # CSE cannot merge across a scan
    return jax.checkpoint(f, policy=keep, prevent_cse=False) if ex.numerics.remat == "none" else f
