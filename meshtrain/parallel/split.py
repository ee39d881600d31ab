"""F, B and W of a layer: its forward, the input half and the weight half of its backward, each a function of its own.

The backward that `jax.vjp` builds is traced once and its equations are dealt out: what the input gradient needs is B,
what else the weight gradient needs is W, and values that B makes and W uses are handed over. Nothing is computed twice
and both halves together are the unsplit backward, bit for bit. Residuals that depend on weights or on the
microbatch's own inputs alone (casts, masks, rotations) are made again, not stored. A stack of layers is split layer by
layer, so it stays a scan. Knows no model and no mesh.
Source: the idea of B and W is zero bubble's, arXiv:2401.10241.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

# Calls that are opened, so that the equations inside can be dealt out. Loops, kernels and shard_maps stay whole, in B.
OPENED = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr"}


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The parts of y = f(w, x, e), where e is never differentiated.

    forward(w, x, e) -> y, (r, q). backward_input(w, e, r, q, dy) -> dx, z. backward_weight(w, e, q, z) -> dw.
    backward(w, e, r, q, dy) -> dx, dw is both at once. r: what only B needs, q: what W needs, z: what B hands to W;
    lists of arrays whose ShapeDtypeStructs are `r`, `q` and `z`. dw is float32 whatever the dtype of w.
    """
    forward: Callable
    backward_input: Callable
    backward_weight: Callable
    backward: Callable
    r: list
    q: list
    z: list


def layer(f: Callable, w, x, e) -> Split:
    """Splits f(w, x, e) -> y for arguments of these shapes; arrays or ShapeDtypeStructs, x one array, y like x."""
    w, x, e = (jax.tree.map(_aval, tree) for tree in (wide(w), x, e))
    num_w, num_e = len(jax.tree.leaves(w)), len(jax.tree.leaves(e))
    w_tree = jax.tree.structure(w)
    vjp_tree = None

    def run(w, x, e):
        nonlocal vjp_tree
        y, vjp = jax.vjp(lambda w, x: f(w, x, e), w, x)
        leaves, vjp_tree = jax.tree.flatten(vjp)       # a VJP is a pytree: its leaves are the residuals
        return y, *leaves

    ahead = _flat(run, w, x, e)
    residuals = ahead.jaxpr.outvars[1:]
    of_x = _dependents(ahead.jaxpr.eqns, {ahead.jaxpr.invars[num_w]})
    saved = list(dict.fromkeys(v for v in residuals if not isinstance(v, Literal) and v in of_x))
    remade = [v for v in residuals if isinstance(v, Literal) or v not in of_x]
    eqns_f = _slice(ahead.jaxpr.eqns, [ahead.jaxpr.outvars[0], *saved])
    remake = _slice(ahead.jaxpr.eqns, remade)
    w_and_e = ahead.jaxpr.invars[:num_w] + ahead.jaxpr.invars[num_w + 1:]

    def both(w, e, kept, dy):
        env = dict(zip(ahead.jaxpr.constvars, ahead.consts)) | dict(zip(w_and_e, jax.tree.leaves((w, e))))
        env = _run(remake, env) | dict(zip(saved, kept))
        dw, dx = jax.tree.unflatten(vjp_tree, [_read(env, v) for v in residuals])(dy)
        return dx, dw

    y = ahead.out_avals[0]
    behind = _flat(both, w, e, [_aval(v.aval) for v in saved], _aval(y))
    jaxpr, consts = behind.jaxpr, dict(zip(behind.jaxpr.constvars, behind.consts))
    in_w, in_e = jaxpr.invars[:num_w], jaxpr.invars[num_w:num_w + num_e]
    in_saved, in_dy = jaxpr.invars[num_w + num_e:-1], jaxpr.invars[-1]
    out_x, out_w = jaxpr.outvars[0], jaxpr.outvars[1:]
    eqns_b = _slice(jaxpr.eqns, [out_x])
    per_step = _dependents(jaxpr.eqns, {*in_saved, in_dy})          # the rest is made again where it is needed
    made_by_b = {v for eqn in eqns_b for v in eqn.outvars} & per_step
    eqns_w = _slice(jaxpr.eqns, out_w, stop=made_by_b)
    used_by_w = _variables(out_w).union(*(_variables(eqn.invars) for eqn in eqns_w))
    handed = [v for eqn in eqns_b for v in eqn.outvars if v in made_by_b and v in used_by_w]
    handed += [in_dy] if in_dy in used_by_w else []
    of_w = [v in used_by_w for v in in_saved]

    def forward(w, x, e):
        env = dict(zip(ahead.jaxpr.constvars, ahead.consts)) | dict(zip(ahead.jaxpr.invars, jax.tree.leaves((wide(w), x, e))))
        env = _run(eqns_f, env)
        kept = [env[v] for v in saved]
        return (_read(env, ahead.jaxpr.outvars[0]),
                tuple([a for a, k in zip(kept, of_w) if k == want] for want in (False, True)))

    def join(r, q):
        r, q = iter(r), iter(q)
        return [next(q if k else r) for k in of_w]

    def constants(w, e):
        return consts | dict(zip(in_w, jax.tree.leaves(wide(w)))) | dict(zip(in_e, jax.tree.leaves(e)))

    def backward_input(w, e, r, q, dy):
        env = _run(eqns_b, constants(w, e) | dict(zip(in_saved, join(r, q))) | {in_dy: dy})
        return _read(env, out_x), [env[v] for v in handed]

    def backward_weight(w, e, q, z):
        env = constants(w, e) | dict(zip((v for v, k in zip(in_saved, of_w) if k), q)) | dict(zip(handed, z))
        env = _run(eqns_w, env)
        return jax.tree.unflatten(w_tree, [_read(env, v) for v in out_w])

    def backward(w, e, r, q, dy):
        return both(wide(w), e, join(r, q), dy)

    avals = [[_aval(v.aval) for v, k in zip(saved, of_w) if k == want] for want in (False, True)]
    return Split(forward, backward_input, backward_weight, backward, *avals, [_aval(v.aval) for v in handed])


def stack(f: Callable, ws, depth: int, x, e) -> Split:
    """Splits `depth` layers f(w, x, (number, e)) in a row, their weights stacked in ws [n, …], n at least `depth`.

    In the result's functions w is (ws, numbers [n], first): layers first … first + depth − 1 of the stack, so that a
    stage with several chunks needs no copy of one. e is the same for all layers. backward_weight and backward take two
    more arguments and return, for dw, `total` [n, …] with the gradients added in place where `on`: stacked, those of one
    microbatch would be as large as the total.
    """
    one = layer(f, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), ws), x,
                (jax.ShapeDtypeStruct((), jnp.int32), e))
    scan, order = jax.lax.scan, jnp.arange(depth)

    def at(w, e, i):
        weights, number = take(w[:2], w[2] + i)
        return weights, (number, e)

    def added(total, i, dw, on):
        return put(total, i, jax.tree.map(lambda t, d: t + jnp.where(on, d, 0), take(total, i), dw))

    def forward(w, x, e):
        def visit(x, i):
            w_i, e_i = at(w, e, i)
            return one.forward(w_i, x, e_i)
        return scan(visit, x, order)

    def backward_input(w, e, r, q, dy):
        return scan(lambda dy, a: one.backward_input(*at(w, e, a[0]), *a[1:], dy), dy, (order, r, q), reverse=True)

    def backward_weight(w, e, q, z, total, on):
        def visit(total, a):
            return added(total, w[2] + a[0], one.backward_weight(*at(w, e, a[0]), *a[1:]), on), None
        return scan(visit, total, (order, q, z))[0]

    def backward(w, e, r, q, dy, total, on):
        def visit(carry, a):
            dy, total = carry
            dx, dw = one.backward(*at(w, e, a[0]), *a[1:], dy)
            return (dx, added(total, w[2] + a[0], dw, on)), None
        return scan(visit, (dy, total), (order, r, q), reverse=True)[0]

    stacked = lambda avals: [jax.ShapeDtypeStruct((depth, *a.shape), a.dtype) for a in avals]
    return Split(forward, backward_input, backward_weight, backward, stacked(one.r), stacked(one.q), stacked(one.z))


def take(tree, i):
    """[n, …] -> […], entry i, which is never negative: what jnp adds for those stands in every loop and costs time."""
    index = lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(index, tree)


def put(tree, i, value):
    """The tree [n, …] with entry i replaced by `value`, cast to its dtype."""
    update = lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new.astype(a.dtype), i, 0, allow_negative_indices=False)
    return jax.tree.map(update, tree, value)


def wide(w):
    """Weights as float32 where they are differentiated, so that their gradients are: a bfloat16 weight's would be
    rounded in every microbatch. Layers cast down again, and XLA drops the pair of casts."""
    def widen(a):
        return jax.ShapeDtypeStruct(a.shape, jnp.float32) if isinstance(a, jax.ShapeDtypeStruct) else a.astype(jnp.float32)
    return jax.tree.map(widen, w)


def _aval(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _flat(f, *args):
    """The jaxpr of f over the leaves of args, its calls opened."""
    closed = jax.make_jaxpr(f)(*args)

    def opened(*leaves):
        return _evaluate(closed.jaxpr, closed.consts, leaves)
    return jax.make_jaxpr(opened)(*jax.tree.leaves(args))


def _evaluate(jaxpr, consts, args):
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
    env = _run(jaxpr.eqns, env, opening=True)
    return [_read(env, v) for v in jaxpr.outvars]


def _run(eqns, env: dict, opening: bool = False) -> dict:
    """Evaluates equations; values by variable, those of env and the new ones."""
    env = dict(env)
    for eqn in eqns:
        args = [_read(env, v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if opening and inner is not None and eqn.primitive.name in OPENED:
            outs = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)
        else:
            with eqn.ctx.manager:
                outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs))
    return env


def _read(env, v):
    return v.val if isinstance(v, Literal) else env[v]


def _variables(vs):
    return {v for v in vs if not isinstance(v, Literal)}


def _dependents(eqns, roots: set) -> set:
    """`roots` and all variables computed from them."""
    found = set(roots)
    for eqn in eqns:
        if not found.isdisjoint(_variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _slice(eqns, outs, stop=frozenset()) -> list:
    """The equations that `outs` depend on, in order; variables in `stop` are taken as given."""
    need, kept = _variables(outs) - stop, []
    for eqn in reversed(eqns):
        if not need.isdisjoint(eqn.outvars):
            kept.append(eqn)
            need |= _variables(eqn.invars) - stop
    return kept[::-1]
