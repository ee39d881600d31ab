"""The forward, the input gradient (B) and the weight gradient (W) of a layer as three functions.

The backward of `jax.vjp` is traced once, and its equations are split. B has the equations that the input gradient
needs. W has the other equations that the weight gradient needs. B passes values that both halves use to W. Nothing is
computed twice, and the two halves together equal the whole backward bit for bit. Residuals that depend only on the
weights or on the microbatch's inputs (casts, masks, rotations) are recomputed, not stored. A stack of layers is split
per layer, so the stack remains a scan. This module knows no model and no mesh. Source of B and W: zero bubble,
arXiv:2401.10241.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from meshtrain.training import accumulators, equations

# Primitives that only name, cast or reshape a value.
PASSING = {"name", "reduce_precision", "convert_element_type", "reshape", "squeeze", "sharding_constraint", "copy"}
IN_PLACE_SINCE = (0, 11)    # first jax with which XLA writes residuals in place; earlier ones add a copy


class StackEntry(NamedTuple):
    """A layer's index into stacked residuals, in three forms that are equal at run time but compiled differently by
    XLA."""
    counter: jax.Array      # the loop counter: XLA lets a matmul or kernel write its output there in place
    again: jax.Array        # to read that output back: XLA would fold a read at `counter` into a temporary
    listed: jax.Array       # to write a residual that is not written in place: read from the list of layer numbers


class Weights(NamedTuple):
    """The weights of one layer, or stacked weights [n, …] of several layers. Only `trained` weights get gradients.

    numbers: the layer's number.
    """
    trained: Any
    numbers: Any
    frozen: Any


class Residuals(NamedTuple):
    """What a forward saves for the backward, as lists of arrays (or of their ShapeDtypeStructs)."""
    for_inputs: list        # read by the input gradient alone
    for_weights: list       # read by the weight gradient


class SplitLayer:
    """Forward, input gradient (B) and weight gradient (W) of one layer.

    The layer is y, stats = f(weights, x, inputs), differentiated by weights.trained and x. x is one array; y is like x.
    Weight gradients have the dtype of `accumulators`. residuals, stats, passed: ShapeDtypeStructs of the values that
    the forward saves, that it reports, and that B passes to W.
    """

    def __init__(self, f: Callable, weights: Weights, x, inputs):
        """Trace f for these shapes (arrays or ShapeDtypeStructs)."""
        weights, x, inputs = jax.tree.map(_aval, (_widen(weights), x, inputs))

        def linearize(weights, x, inputs):
            """Return y, its VJP (a pytree whose leaves are the residuals) and stats."""
            return jax.vjp(lambda trained, x: f(weights._replace(trained=trained), x, inputs),
                           weights.trained, x, has_aux=True)
        given = weights, x, inputs
        closed, outputs = jax.make_jaxpr(linearize, return_shape=True)(*given)
        self._forward = _Forward(closed, outputs, given)
        self._backward = _Backward(self._forward, weights, inputs)
        self.stats = self._forward.stats_avals
        self.writes_in_place = bool(self._forward.in_place)     # some residuals, directly into their buffers
        self.residuals = self._split([_aval(v.aval) for v in self._forward.saved])
        self.passed = [_aval(v.aval) for v in self._backward.passed_on]

    def forward(self, weights: Weights, x, inputs):
        """Return y, stats, residuals."""
        y, stats, saved = self._forward.apply(_widen(weights), x, inputs)
        return y, stats, self._split(saved)

    def forward_into(self, buffers: Residuals, entry: StackEntry, weights: Weights, x, inputs):
        """Return y, stats, and the stacked `buffers` with the residuals written at `entry`."""
        y, stats, filled = self._forward.apply_into(self._merge(buffers), entry, _widen(weights), x, inputs)
        return y, stats, self._split(filled)

    def input_gradient(self, weights: Weights, inputs, saved: Residuals, dy):
        """Return dx, and the values that B passes to W."""
        return self._backward.input_half(_widen(weights), inputs, self._merge(saved), dy)

    def weight_gradient(self, weights: Weights, inputs, saved_for_weights: list, passed: list):
        """Return the gradient of weights.trained."""
        return self._backward.weight_half(_widen(weights), inputs, saved_for_weights, passed)

    def backward(self, weights: Weights, inputs, saved: Residuals, dy):
        """Return dx and the gradient of weights.trained: both halves at once."""
        return self._forward.backward(_widen(weights), inputs, self._merge(saved), dy)

    def _split(self, saved: list) -> Residuals:
        return Residuals(*([a for a, read in zip(saved, self._backward.saved_for_w) if read == by_weights]
                           for by_weights in (False, True)))

    def _merge(self, saved: Residuals) -> list:
        for_inputs, for_weights = map(iter, saved)
        return [next(for_weights if read else for_inputs) for read in self._backward.saved_for_w]


class _Forward:
    """The traced forward of a layer under `jax.vjp`: the equations of y, and which residuals are saved or recomputed.

    closed: the traced function. outputs: ShapeDtypeStructs of its results (y, the VJP, stats). given: ShapeDtypeStructs
    of its arguments (weights, x, inputs). A VJP is a pytree whose leaves are the residuals.
    """

    def __init__(self, closed: ClosedJaxpr, outputs: tuple, given: tuple):
        self.traced = equations.inline(closed, given)
        _, self.vjp_tree, self.stats_tree = map(jax.tree.structure, outputs)
        jaxpr, num_weights = self.traced.jaxpr, len(jax.tree.leaves(given[0]))
        first_stat = 1 + self.vjp_tree.num_leaves
        self.x, self.y = jaxpr.invars[num_weights], jaxpr.outvars[0]
        self.residuals, self.stats = jaxpr.outvars[1:first_stat], jaxpr.outvars[first_stat:]
        self.stats_avals = outputs[2]
        of_x = equations.find_dependents(jaxpr.eqns, {self.x})
        self.saved = list(dict.fromkeys(v for v in self.residuals if not isinstance(v, Literal) and v in of_x))
        self.eqns = equations.slice_for(jaxpr.eqns, [self.y, *self.stats, *self.saved])
        self.recomputed = equations.slice_for(
            jaxpr.eqns, [v for v in self.residuals if isinstance(v, Literal) or v not in of_x])
        self.weights_and_inputs = [v for v in jaxpr.invars if v is not self.x]
        self.in_place = self._find_in_place()

    def apply(self, weights: Weights, x, inputs, keep: Callable | None = None):
        """Return y, stats and the saved residuals.

        keep: later equations read keep(v, value) instead of the value of a variable v."""
        given = dict(zip(self.traced.jaxpr.invars, jax.tree.leaves((weights, x, inputs))))
        env = equations.constants(self.traced) | given
        env = equations.bind(self.eqns, env, keep=keep)
        stats = jax.tree.unflatten(self.stats_tree, [equations.value_of(env, v) for v in self.stats])
        return equations.value_of(env, self.y), stats, [env[v] for v in self.saved]

    def apply_into(self, buffers: list, entry: StackEntry, weights: Weights, x, inputs):
        """Return y, stats and `buffers` with the residuals written at `entry`.

        buffers: one stacked buffer for each saved residual.
        """
        buffers, number = list(buffers), {v: n for n, v in enumerate(self.saved)}

        def keep(v, value):
            n = number.get(v)
            if n is None:
                return value
            buffers[n] = put(buffers[n], value, entry.counter if v in self.in_place else entry.listed)
            if v in self.in_place:
                return take(buffers[n], entry.again)
            # The copy comes before any use, so a later matmul can accumulate into the stream's buffer.
            buffers[n], value = jax.lax.optimization_barrier((buffers[n], value))
            return value
        x = keep(self.x, x)
        y, stats, _ = self.apply(weights, x, inputs, keep)
        return y, stats, buffers

    def _find_in_place(self) -> set:
        """Return the residuals that are written in place.

        Two kinds of residuals are written in place: outputs of a matmul or kernel that are more than twice as large as
        the residual stream (an MLP's gate and up), and values that XLA computes in a fusion, if they are used only by
        kernels that read slices of a stack (rotated queries and keys).

        For smaller outputs of matmuls and kernels this does not pay: XLA's scheduler underestimates the time of an
        in-place call and hides less communication behind the call. With queries that a kernel rotates, Qwen3-30B-A3B on
        64 H100 took 2.58 s by the roofline instead of 2.53. Residuals that a matmul reads are excluded, because XLA
        would then copy the residual stream that the matmul accumulates into.
        """
        maker = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        readers: dict = {}
        for eqn in self.eqns:
            for v in equations.variables(eqn.invars):
                readers.setdefault(v, []).append(eqn)

        def source(v):
            while v in maker and maker[v].primitive.name in PASSING:
                v = maker[v].invars[0]
            return maker.get(v)

        def read_by(v):
            for eqn in readers.get(v, ()):
                yield from read_by(eqn.outvars[0]) if eqn.primitive.name in PASSING else (eqn,)

        def pays(v):
            made_by, readers_of_v = source(v), list(read_by(v))
            if made_by is None or any(map(equations.is_matmul, readers_of_v)):
                return False
            if equations.writes_memory(made_by):
                return v.aval.size > 2 * self.y.aval.size
            return bool(readers_of_v) and all(map(equations.reads_slices, readers_of_v))
        return {v for v in self.saved if pays(v)}

    def backward(self, weights: Weights, inputs, saved: list, dy):
        """Return dx and the gradient of weights.trained by the whole backward."""
        env = equations.constants(self.traced) | dict(zip(self.weights_and_inputs, jax.tree.leaves((weights, inputs))))
        env = equations.bind(self.recomputed, env) | dict(zip(self.saved, saved))
        d_trained, dx = jax.tree.unflatten(self.vjp_tree, [equations.value_of(env, v) for v in self.residuals])(dy)
        return dx, d_trained


class _Backward:
    """The traced backward of a `_Forward`, split into the equations of dx and those of the weight gradient alone."""

    def __init__(self, forward: _Forward, weights: Weights, inputs):
        self.trained_tree, num_given = jax.tree.structure(weights.trained), len(jax.tree.leaves((weights, inputs)))
        given = weights, inputs, [_aval(v.aval) for v in forward.saved], _aval(forward.y.aval)
        self.traced = equations.inline(jax.make_jaxpr(forward.backward)(*given), given)
        jaxpr = self.traced.jaxpr
        self.weights_and_inputs, self.dy = jaxpr.invars[:num_given], jaxpr.invars[-1]
        self.saved = jaxpr.invars[num_given:-1]
        self.dx, self.d_trained = jaxpr.outvars[0], jaxpr.outvars[1:]
        self.eqns_b = equations.slice_for(jaxpr.eqns, [self.dx])
        # W recomputes what does not depend on the microbatch, so B does not pass it on
        of_microbatch = equations.find_dependents(jaxpr.eqns, {*self.saved, self.dy})
        made_by_b = {v for eqn in self.eqns_b for v in eqn.outvars} & of_microbatch
        self.eqns_w = equations.slice_for(jaxpr.eqns, self.d_trained, stop=made_by_b)
        used_by_w = equations.variables(self.d_trained).union(
            *(equations.variables(eqn.invars) for eqn in self.eqns_w))
        self.passed_on = [v for eqn in self.eqns_b for v in eqn.outvars if v in made_by_b and v in used_by_w]
        self.passed_on += [self.dy] if self.dy in used_by_w else []
        self.saved_for_w = [v in used_by_w for v in self.saved]

    def input_half(self, weights: Weights, inputs, saved: list, dy):
        """Return dx and the values that B passes to W."""
        env = self._values(weights, inputs) | dict(zip(self.saved, saved)) | {self.dy: dy}
        env = equations.bind(self.eqns_b, env)
        return equations.value_of(env, self.dx), [env[v] for v in self.passed_on]

    def weight_half(self, weights: Weights, inputs, saved_for_w: list, passed_on: list):
        """Return the gradient of weights.trained."""
        saved = dict(zip((v for v, read in zip(self.saved, self.saved_for_w) if read), saved_for_w))
        env = equations.bind(self.eqns_w, self._values(weights, inputs) | saved | dict(zip(self.passed_on, passed_on)))
        return jax.tree.unflatten(self.trained_tree, [equations.value_of(env, v) for v in self.d_trained])

    def _values(self, weights: Weights, inputs) -> dict:
        return equations.constants(self.traced) | dict(zip(self.weights_and_inputs, jax.tree.leaves((weights, inputs))))


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStack:
    """`depth` layers in sequence, all like `layer`, with stacked weights [depth, …].

    The forward and the backward are scans of `SplitLayer`'s. Residuals and their structs are stacked [depth, …]; stats
    are summed over the layers. All layers share `inputs`.

    in_place: whether matmuls and kernels write large residuals directly into the buffers. XLA supports such writes on
    NVIDIA GPUs with jax `IN_PLACE_SINCE` or later; elsewhere in_place adds a copy.
    """
    layer: SplitLayer
    depth: int
    in_place: bool = False

    @property
    def residuals(self) -> Residuals:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((self.depth, *a.shape), a.dtype), self.layer.residuals)

    def forward(self, weights: Weights, x, inputs, buffers: Residuals | None = None):
        """Return y, stats, residuals.

        buffers: the residual buffers of an earlier call, which are overwritten. Without `buffers`, XLA zero-fills new
        buffers, and copies one if two are alike.
        """
        if self.in_place and buffers is not None and self.layer.writes_in_place:
            return self._forward_in_place(weights, x, inputs, buffers)

        def visit(carry, i):
            y, stats, saved = self.layer.forward(take(weights, i), carry[0], inputs)
            if buffers is None:
                return (y, None), (stats, saved)
            return (y, put(carry[1], saved, i)), (stats, None)
        (y, filled), (stats, saved) = jax.lax.scan(visit, (x, buffers), jnp.arange(self.depth))
        return y, jax.tree.map(lambda a: a.sum(0), stats), saved if buffers is None else filled

    def backward(self, weights: Weights, inputs, saved: Residuals, dy, total, on=True):
        """Return dx, and `total` [depth, …] with the gradients of weights.trained added to it if `on`.

        Gradients are added in place, because the stacked gradients of one microbatch would be as large as the total."""
        def visit(carry, entry):
            (dy, total), (i, saved_i) = carry, entry
            dx, d_trained = self.layer.backward(take(weights, i), inputs, saved_i, dy)
            return (dx, accumulators.add_at(total, i, d_trained, on)), None
        return jax.lax.scan(visit, (dy, total), (jnp.arange(self.depth), saved), reverse=True)[0]

    def _forward_in_place(self, weights: Weights, x, inputs, buffers: Residuals):
        numbers = jnp.arange(self.depth)

        def visit(i, carry):
            x, buffers, stats = carry
            entry = StackEntry(i, jnp.where(i < self.depth, i, 0),
                               jax.lax.dynamic_index_in_dim(numbers, i, keepdims=False))
            y, stats_i, buffers = self.layer.forward_into(buffers, entry, take(weights, i), x, inputs)
            return y, buffers, put(stats, stats_i, i)
        none = jax.tree.map(lambda a: jnp.zeros((self.depth, *a.shape), a.dtype), self.layer.stats)
        y, buffers, stats = jax.lax.fori_loop(0, self.depth, visit, (x, buffers, none))
        return y, jax.tree.map(lambda a: a.sum(0), stats), buffers


def of_one_layer(stacked):
    """Return the ShapeDtypeStructs of one entry of the stacked arrays [n, …]."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)


def take(tree, *at):
    """Return entry `at` of the leading dims, [n, …] -> […].

    Indices must not be negative: the handling of negative indices in jnp costs time in every loop.
    """
    def entry(a):
        sizes = (1,) * len(at) + a.shape[len(at):]
        part = jax.lax.dynamic_slice(a, _start(a, at), sizes, allow_negative_indices=False)
        return jax.lax.squeeze(part, range(len(at)))
    return jax.tree.map(entry, tree)


def put(tree, value, *at):
    """Return the tree [n, …] with entry `at` of its leading dims replaced by `value`, cast to the tree's dtype."""
    def update(a, new):
        new = jax.lax.expand_dims(new.astype(a.dtype), range(len(at)))
        return jax.lax.dynamic_update_slice(a, new, _start(a, at), allow_negative_indices=False)
    return jax.tree.map(update, tree, value)


def _start(a, at):
    return *at, *(0 for _ in a.shape[len(at):])


def _widen(weights: Weights) -> Weights:
    return weights._replace(trained=accumulators.widen(weights.trained))


def _aval(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)
