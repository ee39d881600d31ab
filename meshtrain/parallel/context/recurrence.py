"""Linear attention on a mesh: the recurrence and its short convolution, on sequences that `context` may split.

A device has runs of consecutive tokens: two in zigzag order, one in natural order. A run changes the state S to M S +
X. The matrix M and the summand X do not grow with the run's length. Each device gathers M and X of all runs and
composes the runs before its own (as in LASP-2, arXiv:2502.07563, but with M, which the delta rule needs). The
convolution needs the W - 1 tokens before each run. Forward and backward are explicit: jax differentiates no shard_map.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config.sections import Run
from meshtrain.kernels import convolution, products
from meshtrain.kernels.convolution import Tail
from meshtrain.kernels.recurrence import BEFORE_ALL, RecurrentState
from meshtrain.parallel.context.zigzag import AXIS
from meshtrain.sharding.mesh import on_shards, psum
from meshtrain.sharding.rules import Layout

CHANNEL_AXES = ("kv_heads", "kv_heads", "heads")        # of q, k and v


# ---- runs of a sequence that is split over `context` -----------------------------------------------------------------


class TokenRuns(NamedTuple):
    """The runs of consecutive tokens that each device has of a sequence.

    per_device: 0 without a context axis; 1: device i has run i; 2: device i has runs i and 2·cp-1-i (zigzag). Inside
    the recurrence each run is a row: [B, T, …] <-> [B·runs, T / runs, …].
    """
    per_device: int

    def rows(self, x):
        return x if self.per_device < 2 else x.reshape(-1, x.shape[1] // self.per_device, *x.shape[2:])

    def join_heads(self, x):
        return x if self.per_device < 2 else x.reshape(-1, x.shape[1] * self.per_device, *x.shape[2:])

    def tails_before(self, x, fill):
        """Return, for each row, the last tokens of the run before it; `fill` before the first run.

        x: the last tokens of each row [B·runs, S, …]. Each device sends S tokens to each neighbour.
        """
        if not self.per_device or not x.size:       # a convolution of one tap reads no token before its own
            return jnp.full_like(x, fill)
        cp, i = lax.axis_size(AXIS), lax.axis_index(AXIS)
        early, *late = jnp.moveaxis(self._of_runs(x), 1, 0)
        before = [jnp.where(i == 0, jnp.full_like(x[0], fill), lax.ppermute(early, AXIS, [
            (j, j + 1) for j in range(cp - 1)]))]
        # Run 2·cp-1-i follows a run of device i + 1. On the last device it follows the device's own early run.
        for own in late:
            sent = lax.ppermute(own, AXIS, [(j + 1, j) for j in range(cp - 1)])
            before.append(jnp.where(i == cp - 1, early, sent))
        return jnp.stack(before, 1).reshape(x.shape)

    def across(self, M, X, reverse: bool):
        """Return the state before each row of this device, or after it if `reverse`, float32.

        A run maps the state S to M S + X. An all-gather moves M and X of a sequence's runs: 2·cp·B·N·H·(H + V)·4 bytes
        in zigzag order, whatever the sequence's length.
        """
        cp, i = lax.axis_size(AXIS), lax.axis_index(AXIS)
        matrix = M.ndim == X.ndim
        M, X = (self._in_order(lax.all_gather(self._of_runs(x), AXIS), cp) for x in (M, X))

        def step(S, run: Run):
            M, X = run
            return (products.einsum("...hg,...gv->...hv", M, S) if matrix else M[..., None] * S) + X, S
        _, before = lax.scan(step, jnp.zeros_like(X[0]), (M, X), reverse=reverse)
        mine = [i, 2 * cp - 1 - i][:self.per_device]
        S = jnp.stack([lax.dynamic_index_in_dim(before, j, 0, keepdims=False) for j in mine], 1)
        return S.reshape(-1, *S.shape[2:])

    def _of_runs(self, x):
        return x.reshape(-1, self.per_device, *x.shape[1:])

    def _in_order(self, x, cp: int):
        """[cp, B, runs, …] of all devices -> [runs of the sequence, B, …]."""
        first, *second = jnp.moveaxis(x, 2, 0)
        return jnp.concatenate([first, *(half[::-1] for half in second)])


# ---- the convolution -------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 5))
def convolve(runs: TokenRuns, layout: Layout, xs, ws, segments_BT, axes=CHANNEL_AXES):
    """Convolve each x [B, T, heads, d] with its weights [W, heads, d], causally and within segments.

    There is no bias and no activation. axes: logical axis of each x's heads. Sums and weight gradients are float32.
    Each y has the dtype of its x.
    """
    tokens, weights, rows = _convolution_specs(layout, axes)
    return on_shards(partial(_convolve_shard, runs), (tokens, weights, rows), tokens)(xs, ws, segments_BT)


def _convolve_shard(runs, xs, ws, segments_BT):
    W, segments = ws[0].shape[0], runs.rows(segments_BT)
    segments_before = runs.tails_before(segments[:, segments.shape[1] - (W - 1):], BEFORE_ALL)
    ys = []
    for x, w in zip(xs, ws, strict=True):
        x = runs.rows(x)
        before = Tail(runs.tails_before(x[:, x.shape[1] - (W - 1):], 0), segments_before)
        ys.append(runs.join_heads(convolution.convolve(x, w, segments, before if runs.per_device else None)))
    return tuple(ys)


def _convolve_backward(runs, layout: Layout, axes, saved, dys):
    tokens, weights, rows = _convolution_specs(layout, axes)
    over = (*layout.mesh_axes("activations", "batch"), *layout.mesh_axes("activations", "seq"))

    def local(xs, ws, segments_BT, dys):
        dxs, dws = jax.vjp(lambda xs, ws: _convolve_shard(runs, xs, ws, segments_BT), xs, ws)[1](dys)
        # W·heads·d float32 numbers each. The caller of a manual region sums over its manual axes, as for all weights.
        return dxs, tuple(psum(dw, over) for dw in dws) if over else dws
    return *on_shards(local, (tokens, weights, rows, tokens), (tokens, weights))(*saved, dys), None


convolve.defvjp(lambda runs, layout, *given: (convolve(runs, layout, *given), given[:3]), _convolve_backward)


def _convolution_specs(layout: Layout, axes):
    return (tuple(layout.spec("activations", ("batch", "seq", axis)) for axis in axes),
            tuple(layout.spec("activations", (None, axis)) for axis in axes),
            layout.spec("activations", ("batch", "seq")))


# ---- the recurrence --------------------------------------------------------------------------------------------------


class Recurrence(NamedTuple):
    """The recurrence on the token runs of each device.

    engine: `kernels.recurrence.recurrence`, or a function like it.
    """
    engine: Callable
    runs: TokenRuns

    def shard(self, inputs, segments_BT, states_ZBNHV=None):
        """Return (o, the states before chunks) for this device's inputs (q, k, v, g, beta)."""
        runs, start, across = self.runs, None, None
        segments = runs.rows(segments_BT)
        if runs.per_device:
            start = RecurrentState(None, runs.tails_before(segments[:, -1], BEFORE_ALL))
            across = runs.across
        result = self.engine(*(x if x is None else runs.rows(x) for x in inputs), segments, start, across=across,
                            states_ZBNHV=states_ZBNHV)
        return runs.join_heads(result.o_BTNV), result.states_ZBNHV


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recur(of: Recurrence, layout: Layout, q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT):
    """Return o_BTNV of the recurrence over whole sequences, within segments.

    Arguments are those of `kernels.recurrence`.
    """
    return _recur_with_states(of, layout, (q_BTKH, k_BTKH, v_BTNV, g, beta_BTN), segments_BT)[0]


def _recur_with_states(of, layout: Layout, inputs, segments_BT):
    by_input, rows, heads, states = _recurrence_specs(layout)
    return on_shards(of.shard, (by_input, rows), (heads, states))(inputs, segments_BT)


def _recur_forward(of, layout: Layout, *given):
    inputs, segments_BT = given[:5], given[5]
    o_BTNV, states_ZBNHV = _recur_with_states(of, layout, inputs, segments_BT)
    # Named, so that remat can save the states. With them the backward repeats neither the scan nor its gathers.
    states_ZBNHV = checkpoint_name(states_ZBNHV, "linear_states")
    return checkpoint_name(o_BTNV, "linear_o"), (inputs, segments_BT, states_ZBNHV)


def _recur_backward(of, layout: Layout, saved, do_BTNV):
    def local(inputs, segments_BT, states_ZBNHV, do_BTNV):
        return jax.vjp(lambda inputs: of.shard(inputs, segments_BT, states_ZBNHV)[0], inputs)[1](do_BTNV)[0]
    by_input, rows, heads, states = _recurrence_specs(layout)
    return *on_shards(local, (by_input, rows, states, heads), by_input)(*saved, do_BTNV), None


recur.defvjp(_recur_forward, _recur_backward)


def _recurrence_specs(layout: Layout):
    """Return the specs of (q, k, v, g, beta), segments, o, and the states [Z, B, N, H, V]."""
    of = partial(layout.spec, "activations")
    kv, heads, rows = of(("batch", "seq", "kv_heads")), of(("batch", "seq", "heads")), of(("batch", "seq"))
    return (kv, kv, heads, heads, heads), rows, heads, of(("seq", "batch", "heads"))
