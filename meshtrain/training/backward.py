"""F, B and W of a layer as three functions: the forward, the input gradient and the weight gradient.

The backward of `jax.vjp` is traced once and its equations are split. B has the equations that the input gradient needs.
W has the others that the weight gradient needs. B passes the values that both use to W. Nothing is computed twice, and
both halves together equal the whole backward bit for bit. Residuals that depend only on the weights or on the
microbatch's inputs (casts, masks, rotations) are recomputed, not stored. A stack of layers is split per layer, so it
remains a scan. This module knows no model and no mesh. Source of B and W: zero bubble, arXiv:2401.10241.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from meshtrain import jax_private

# Calls that are inlined, so that their equations can be split. Loops, kernels and shard_maps stay whole, in B.
INLINED = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call",
           "custom_vjp_call", "custom_vjp_call_jaxpr"}

# Primitives that only name, cast or reshape a value.
PASSING = {"name", "reduce_precision", "convert_element_type", "reshape", "squeeze", "sharding_constraint", "copy"}
IN_PLACE_SINCE = (0, 11)    # first jax with which XLA writes residuals in place; earlier ones add a copy


class StackEntry(NamedTuple):
    """A layer's index into stacked residuals, in three forms: equal at run time, but XLA compiles each differently."""
    counter: jax.Array      # the loop counter: XLA lets a matmul or kernel write its output there in place
    again: jax.Array        # to read that output back; a read at `counter` would be folded into a temporary
    listed: jax.Array       # to read the output back; XLA would fold a read at `counter` into a temporary


@dataclasses.dataclass(frozen=True, eq=False)
class FBW:
    """F, B and W of y, stats = f(w, x, e), where e and stats are not differentiated.

    forward(w, x, e) -> y, stats, (r, q).

    forward_into(room, entry, w, x, e) -> y, stats, room. It writes the residuals into the stacked buffers room = (r, q)
    at a `StackEntry`. It is None if no residual can be written in place.

    backward_input(w, e, r, q, dy) -> dx, z. backward_weight(w, e, q, z) -> dw.

    backward(w, e, r, q, dy) -> dx, dw: both at once.

    r: residuals that B alone reads. q: residuals that W reads. z: values that B passes to W. All three are lists of
    arrays; the fields `r`, `q` and `z` are their ShapeDtypeStructs. stats: a tree like the field `stats`. dw is always
    float32.
    """
    forward: Callable
    forward_into: Callable | None
    backward_input: Callable
    backward_weight: Callable
    backward: Callable
    stats: Any
    r: list
    q: list
    z: list


def layer(f: Callable, w, x, e) -> FBW:
    """Return F, B and W of f(w, x, e) -> (y, stats) for these shapes (arrays or ShapeDtypeStructs).

    x is one array; y is like x.
    """
    w, x, e = (jax.tree.map(_aval, tree) for tree in (wide(w), x, e))
    ahead = _Forward(f, w, x, e)
    behind = _Backward(ahead, w, e)
    of_w = behind.saved_for_w                        # for each saved residual: whether W needs it (q) or B alone (r)

    def forward(w, x, e):
        y, stats, saved = ahead.apply(wide(w), x, e)
        return y, stats, divided(saved)

    def forward_into(room, entry, w, x, e):
        y, stats, room = ahead.apply_into(merged(*room), entry, wide(w), x, e)
        return y, stats, divided(room)

    def divided(saved):
        return tuple([a for a, k in zip(saved, of_w) if k == want] for want in (False, True))

    def merged(r, q):
        r, q = iter(r), iter(q)
        return [next(q if k else r) for k in of_w]

    def backward_input(w, e, r, q, dy):
        return behind.input_half(wide(w), e, merged(r, q), dy)

    def backward_weight(w, e, q, z):
        return behind.weight_half(wide(w), e, q, z)

    def backward(w, e, r, q, dy):
        return ahead.backward(wide(w), e, merged(r, q), dy)

    r, q = ([_aval(v.aval) for v, k in zip(ahead.saved, of_w) if k == want] for want in (False, True))
    return FBW(forward, forward_into if ahead.in_place else None, backward_input, backward_weight, backward,
               ahead.stats_avals, r, q, [_aval(v.aval) for v in behind.passed_on])


class _Forward:
    """The traced forward of f under `jax.vjp`: the equations of y, and which residuals are saved or recomputed."""

    def __init__(self, f: Callable, w, x, e):
        self.num_w = num_w = len(jax.tree.leaves(w))

        def with_residuals(w, x, e):
            y, vjp, stats = jax.vjp(lambda w, x: f(w, x, e), w, x, has_aux=True)
            stats, self.stats_tree = jax.tree.flatten(stats)
            leaves, self.vjp_tree = jax.tree.flatten(vjp)       # a VJP is a pytree whose leaves are the residuals
            return y, stats, leaves

        self.traced = _inlined(with_residuals, w, x, e)
        jaxpr = self.traced.jaxpr
        num_stats = self.stats_tree.num_leaves
        self.y, self.stats = jaxpr.outvars[0], jaxpr.outvars[1:1 + num_stats]
        self.residuals = jaxpr.outvars[1 + num_stats:]
        self.stats_avals = jax.tree.unflatten(self.stats_tree, [_aval(v.aval) for v in self.stats])
        of_x = _dependents(jaxpr.eqns, {jaxpr.invars[num_w]})
        self.saved = list(dict.fromkeys(v for v in self.residuals if not isinstance(v, Literal) and v in of_x))
        self.eqns = _slice(jaxpr.eqns, [self.y, *self.stats, *self.saved])
        self.recomputed = _slice(jaxpr.eqns, [v for v in self.residuals if isinstance(v, Literal) or v not in of_x])
        self.w_and_e = jaxpr.invars[:num_w] + jaxpr.invars[num_w + 1:]
        self.in_place = self._in_place()

    def apply(self, w, x, e, keep: Callable | None = None):
        """Return y, stats and the saved residuals.

        Later equations read keep(v, value) for the variable v instead of its value.
        """
        env = _constants(self.traced) | dict(zip(self.traced.jaxpr.invars, jax.tree.leaves((w, x, e))))
        env = _bind(self.eqns, env, keep=keep)
        stats = jax.tree.unflatten(self.stats_tree, [_value(env, v) for v in self.stats])
        return _value(env, self.y), stats, [env[v] for v in self.saved]

    def apply_into(self, room: list, entry: StackEntry, w, x, e):
        """Return y, stats and `room` with the residuals written at `entry`.

        room: one stacked buffer for each saved residual.
        """
        room, number = list(room), {v: n for n, v in enumerate(self.saved)}

        def keep(v, value):
            n = number.get(v)
            if n is None:
                return value
            room[n] = put(room[n], value, entry.counter if v in self.in_place else entry.listed)
            if v in self.in_place:
                return take(room[n], entry.again)
            # The copy comes before any use, so a later matmul can accumulate into the stream's buffer.
            room[n], value = jax.lax.optimization_barrier((room[n], value))
            return value
        x = keep(self.traced.jaxpr.invars[self.num_w], x)
        y, stats, _ = self.apply(w, x, e, keep)
        return y, stats, room

    def _in_place(self) -> set:
        """Return the residuals that are written in place.

        These are outputs of a matmul or kernel that are more than twice as large as the residual stream (an MLP's gate
        and up). So are values that XLA computes in a fusion, if only kernels that read slices of a stack use them
        (rotated queries and keys).

        Smaller outputs of matmuls and kernels do not pay: XLA's scheduler underestimates an in-place call and hides
        less communication behind it. With queries that a kernel rotates, Qwen3-30B-A3B on 64 H100 took 2.58 s by the
        roofline instead of 2.53. Residuals that a matmul reads are excluded, because XLA would then copy the residual
        stream that the matmul accumulates into.
        """
        maker, readers = {v: eqn for eqn in self.eqns for v in eqn.outvars}, {}
        for eqn in self.eqns:
            for v in _variables(eqn.invars):
                readers.setdefault(v, []).append(eqn)

        def source(v):
            while v in maker and maker[v].primitive.name in PASSING:
                v = maker[v].invars[0]
            return maker.get(v)

        def read_by(v):
            for eqn in readers.get(v, ()):
                yield from read_by(eqn.outvars[0]) if eqn.primitive.name in PASSING else (eqn,)

        def pays(v):
            made_by, read = source(v), list(read_by(v))
            if made_by is None or any(map(_is_matmul, read)):
                return False
            if _writes_memory(made_by):
                return v.aval.size > 2 * self.y.aval.size
            return bool(read) and all(map(_reads_slices, read))
        return {v for v in self.saved if pays(v)}

    def backward(self, w, e, saved, dy):
        """Return dx, dw by the whole backward."""
        env = _constants(self.traced) | dict(zip(self.w_and_e, jax.tree.leaves((w, e))))
        env = _bind(self.recomputed, env) | dict(zip(self.saved, saved))
        dw, dx = jax.tree.unflatten(self.vjp_tree, [_value(env, v) for v in self.residuals])(dy)
        return dx, dw


class _Backward:
    """The traced backward of a `_Forward`, split into the equations of dx and those of dw alone."""

    def __init__(self, ahead: _Forward, w, e):
        num_w, num_e = len(jax.tree.leaves(w)), len(jax.tree.leaves(e))
        self.w_tree = jax.tree.structure(w)
        self.traced = _inlined(ahead.backward, w, e, [_aval(v.aval) for v in ahead.saved], _aval(ahead.y.aval))
        jaxpr = self.traced.jaxpr
        self.w_and_e, self.saved, self.dy = jaxpr.invars[:num_w + num_e], jaxpr.invars[num_w + num_e:-1], jaxpr.invars[
            -1]
        self.dx, self.dw = jaxpr.outvars[0], jaxpr.outvars[1:]
        self.eqns_b = _slice(jaxpr.eqns, [self.dx])
        # W recomputes what does not depend on the microbatch, so B does not pass it on
        of_microbatch = _dependents(jaxpr.eqns, {*self.saved, self.dy})
        made_by_b = {v for eqn in self.eqns_b for v in eqn.outvars} & of_microbatch
        self.eqns_w = _slice(jaxpr.eqns, self.dw, stop=made_by_b)
        used_by_w = _variables(self.dw).union(*(_variables(eqn.invars) for eqn in self.eqns_w))
        self.passed_on = [v for eqn in self.eqns_b for v in eqn.outvars if v in made_by_b and v in used_by_w]
        self.passed_on += [self.dy] if self.dy in used_by_w else []
        self.saved_for_w = [v in used_by_w for v in self.saved]

    def input_half(self, w, e, saved, dy):
        """Return dx and the values that are passed on to W."""
        env = self._given(w, e) | dict(zip(self.saved, saved)) | {self.dy: dy}
        env = _bind(self.eqns_b, env)
        return _value(env, self.dx), [env[v] for v in self.passed_on]

    def weight_half(self, w, e, saved_for_w, passed_on):
        """Return dw."""
        saved = dict(zip((v for v, k in zip(self.saved, self.saved_for_w) if k), saved_for_w))
        env = _bind(self.eqns_w, self._given(w, e) | saved | dict(zip(self.passed_on, passed_on)))
        return jax.tree.unflatten(self.w_tree, [_value(env, v) for v in self.dw])

    def _given(self, w, e):
        return _constants(self.traced) | dict(zip(self.w_and_e, jax.tree.leaves((w, e))))


def stack(f: Callable, ws, own, depth: int, x, e, in_place: bool = False) -> FBW:
    """Return F, B and W of `depth` layers f(w, x, (own, e)) -> (x, stats) in sequence. stats is summed over the layers.

    ws: stacked weights [n, …], where n is at least `depth`. own: stacked inputs of each layer that are not
    differentiated (its number, frozen weights).

    The returned functions take w = (ws, own, first) and use layers first … first + depth − 1, so a stage with several
    chunks copies no weights. All layers share e. backward_weight and backward also take `total` [n, …] and `on`. As dw
    they return `total`; if `on`, the gradients are added to it in place, because the stacked gradients of one
    microbatch would be as large as the total. forward also takes `room`, the (r, q) buffers of an earlier call, and
    overwrites them. Without `room`, XLA zero-fills new buffers, and copies one if two are alike. in_place: matmuls and
    kernels write large residuals directly into `room`. Set it only where XLA supports that (NVIDIA GPUs, jax
    `IN_PLACE_SINCE` or later); elsewhere it adds a copy.
    """
    one, scan = layer_of(f, ws, own, x, e), jax.lax.scan

    def order():
        # made on use: these functions may be made in one trace and called in another
        return jnp.arange(depth)

    def at(w, e, i):
        weights, own = take(w[:2], w[2] + i)
        return weights, (own, e)

    def forward_in_place(w, x, e, room):
        numbers = order()

        def visit(i, carry):
            x, room, stats = carry
            w_i, e_i = at(w, e, i)
            entry = StackEntry(i, jnp.where(i < depth, i, 0), jax.lax.dynamic_index_in_dim(numbers, i, keepdims=False))
            y, stats_i, room = one.forward_into(room, entry, w_i, x, e_i)
            return y, room, put(stats, stats_i, i)
        none = jax.tree.map(lambda a: jnp.zeros((depth, *a.shape), a.dtype), one.stats)
        y, room, stats = jax.lax.fori_loop(0, depth, visit, (x, room, none))
        return y, jax.tree.map(lambda a: a.sum(0), stats), room

    def forward(w, x, e, room=None):
        if in_place and room is not None and one.forward_into:
            return forward_in_place(w, x, e, room)

        def visit(carry, i):
            w_i, e_i = at(w, e, i)
            y, stats, saved = one.forward(w_i, carry[0], e_i)
            return (y, None if room is None else put(carry[1], saved, i)), (stats, saved if room is None else None)
        (y, kept), (stats, saved) = scan(visit, (x, room), order())
        return y, jax.tree.map(lambda a: a.sum(0), stats), saved if room is None else kept

    def backward_input(w, e, r, q, dy):
        return scan(lambda dy, a: one.backward_input(*at(w, e, a[0]), *a[1:], dy), dy, (order(), r, q), reverse=True)

    def backward_weight(w, e, q, z, total, on):
        def visit(total, a):
            return added(total, w[2] + a[0], one.backward_weight(*at(w, e, a[0]), *a[1:]), on), None
        return scan(visit, total, (order(), q, z))[0]

    def backward(w, e, r, q, dy, total, on):
        def visit(carry, a):
            dy, total = carry
            dx, dw = one.backward(*at(w, e, a[0]), *a[1:], dy)
            return (dx, added(total, w[2] + a[0], dw, on)), None
        return scan(visit, (dy, total), (order(), r, q), reverse=True)[0]

    of_all = lambda avals: [jax.ShapeDtypeStruct((depth, *a.shape), a.dtype) for a in avals]
    return FBW(forward, None, backward_input, backward_weight, backward, one.stats,
               *map(of_all, (one.r, one.q, one.z)))


def layer_of(f: Callable, ws, own, x, e) -> FBW:
    """Return `layer` for one of the stacked [n, …] layers f(w, x, (own, e))."""
    w, own = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), (ws, own))
    return layer(f, w, x, (own, e))


def added(total, i, new, on):
    """Return `total` [n, …] with `new` added to entry i if `on`.

    The addition is in place, in one kernel. XLA for GPUs fuses it so only if both slices have the same index, the index
    is an instruction outside the fusion, and there is no reshape between the slices.
    """
    i = jax.lax.optimization_barrier(i)

    def add(t, d):
        # without this barrier, cuBLAS accumulates into a copy of the entry, which is then written back
        d = jax.lax.optimization_barrier(d)
        at = _start(t, (i,))
        old = jax.lax.dynamic_slice(t, at, (1, *t.shape[1:]), allow_negative_indices=False)
        return jax.lax.dynamic_update_slice(t, old + jnp.where(on, d, 0)[None], at, allow_negative_indices=False)
    return jax.tree.map(add, total, new)


def take(tree, *at):
    """Return entry `at` of the leading dims, [n, …] -> […].

    Indices must not be negative: the handling of negative indices in jnp costs time in every loop.
    """
    def entry(a):
        sizes = (1,) * len(at) + a.shape[len(at):]
        found = jax.lax.dynamic_slice(a, _start(a, at), sizes, allow_negative_indices=False)
        return jax.lax.squeeze(found, range(len(at)))
    return jax.tree.map(entry, tree)


def put(tree, value, *at):
    """Return the tree [n, …] with entry `at` of its leading dims replaced by `value`, cast to the tree's dtype."""
    def update(a, new):
        new = jax.lax.expand_dims(new.astype(a.dtype), range(len(at)))
        return jax.lax.dynamic_update_slice(a, new, _start(a, at), allow_negative_indices=False)
    return jax.tree.map(update, tree, value)


def _start(a, at):
    return *at, *(0 for _ in a.shape[len(at):])


def wide(w):
    """Cast weights to float32 before differentiation, so that their gradients are float32.

    bfloat16 gradients would be rounded in every microbatch. Layers cast the weights down again, and XLA removes both
    casts.
    """
    def widen(a):
        return jax.ShapeDtypeStruct(a.shape, jnp.float32) if isinstance(a, jax.ShapeDtypeStruct) else a.astype(
            jnp.float32)
    return jax.tree.map(widen, w)


def _aval(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _inlined(f, *args):
    """Return the closed jaxpr of f over the leaves of args, with calls inlined."""
    closed = jax.make_jaxpr(f)(*args)

    def flat(*leaves):
        return _evaluate(closed.jaxpr, closed.consts, leaves)
    return jax.make_jaxpr(flat)(*jax.tree.leaves(args))


def _evaluate(jaxpr, consts, args):
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
    env = _bind(jaxpr.eqns, env, inline=True)
    return [_value(env, v) for v in jaxpr.outvars]


def _constants(closed) -> dict:
    return dict(zip(closed.jaxpr.constvars, closed.consts))


def _bind(eqns, env: dict, inline: bool = False, keep: Callable | None = None) -> dict:
    """Evaluate equations. Return values by variable: those of env, and the new ones. `keep` may replace a new value."""
    env = dict(env)
    for eqn in eqns:
        args = [_value(env, v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        with jax_private.as_written(eqn):
            if inline and inner is not None and eqn.primitive.name in INLINED:
                outs = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)
            else:
                with eqn.ctx.manager:
                    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
                outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs if keep is None else map(keep, eqn.outvars, outs)))
    return env


def _value(env, v):
    return v.val if isinstance(v, Literal) else env[v]


def _is_matmul(eqn) -> bool:
    return eqn.primitive.name.startswith(("dot_general", "ragged_dot"))


def _writes_memory(eqn) -> bool:
    """Return whether XLA never fuses this equation, so that its output is in memory.

    This holds for matmuls, kernels, loops and shard_maps.
    """
    return _is_matmul(eqn) or any(_inner_jaxprs(eqn))


def _reads_slices(eqn) -> bool:
    """Return whether this equation reads a slice of a stacked array without a copy.

    This holds for loops, and for kernels other than Triton's.
    """
    def by_triton(eqn):
        return eqn.primitive.name == "pallas_call" or any(by_triton(e) for inner in _inner_jaxprs(eqn)
                                                          for e in inner.eqns)
    return _writes_memory(eqn) and not by_triton(eqn)


def _inner_jaxprs(eqn):
    for given in eqn.params.values():
        for inner in given if isinstance(given, (tuple, list)) else (given,):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield inner


def _variables(vs):
    return {v for v in vs if not isinstance(v, Literal)}


def _dependents(eqns, roots: set) -> set:
    """Return `roots` and all variables computed from them."""
    found = set(roots)
    for eqn in eqns:
        if not found.isdisjoint(_variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _slice(eqns, outs, stop=frozenset()) -> list:
    """Return the equations that `outs` depend on, in order. The values of variables in `stop` are known already."""
    need, kept = _variables(outs) - stop, []
    for eqn in reversed(eqns):
        if not need.isdisjoint(eqn.outvars):
            kept.append(eqn)
            need |= _variables(eqn.invars) - stop
    return kept[::-1]
