"""Tools for equations of a jaxpr: inline calls, evaluate equations, find those on which an output depends."""
from __future__ import annotations

from collections.abc import Callable

import jax
from jax.extend.core import JaxprEqn, Literal

from meshtrain import jax_private

# Calls that are inlined, so that their equations can be split. Loops, kernels and shard_maps stay whole, in B.
INLINED = {"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"}


def inline(closed, args):
    """Return a closed jaxpr over the leaves of args with its calls inlined."""
    def flat(*leaves):
        return evaluate(closed.jaxpr, closed.consts, leaves)
    return jax.make_jaxpr(flat)(*jax.tree.leaves(args))


def evaluate(jaxpr, consts, args):
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
    env = bind(jaxpr.eqns, env, inline=True)
    return [value_of(env, v) for v in jaxpr.outvars]


def constants(closed) -> dict:
    return dict(zip(closed.jaxpr.constvars, closed.consts))


def bind(eqns, env: dict, inline: bool = False, keep: Callable | None = None) -> dict:
    """Evaluate equations. Return the values by variable: the values of env and the new values. `keep` may replace a new
    value."""
    env = dict(env)
    for eqn in eqns:
        args = [value_of(env, v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        with jax_private.as_written(eqn):
            if inline and inner is not None and eqn.primitive.name in INLINED:
                outs = evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)
            else:
                with eqn.ctx.manager:
                    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
                outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs if keep is None else map(keep, eqn.outvars, outs)))
    return env


def value_of(env, v):
    return v.val if isinstance(v, Literal) else env[v]


def is_matmul(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith(("dot_general", "ragged_dot"))


def writes_memory(eqn: JaxprEqn) -> bool:
    """Return whether XLA never fuses this equation, so that its output is in memory.

    True for matmuls, kernels, loops and shard_maps."""
    return is_matmul(eqn) or any(inner_jaxprs(eqn))


def reads_slices(eqn: JaxprEqn) -> bool:
    """Return whether this equation reads a slice of a stacked array without a copy.

    True for loops, and for kernels other than Triton's."""
    def by_triton(eqn: JaxprEqn):
        return eqn.primitive.name == "pallas_call" or any(by_triton(e) for inner in inner_jaxprs(eqn)
                                                          for e in inner.eqns)
    return writes_memory(eqn) and not by_triton(eqn)


def inner_jaxprs(eqn: JaxprEqn):
    for given in eqn.params.values():
        for inner in given if isinstance(given, (tuple, list)) else (given,):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield inner


def variables(vs):
    return {v for v in vs if not isinstance(v, Literal)}


def find_dependents(eqns, roots: set) -> set:
    """Return `roots` and all variables computed from them."""
    dependents = set(roots)
    for eqn in eqns:
        if not dependents.isdisjoint(variables(eqn.invars)):
            dependents.update(eqn.outvars)
    return dependents


def slice_for(eqns, outs, stop=frozenset()) -> list:
    """Return the equations on which `outs` depend, in order. stop: variables whose values are already known."""
    need, kept = variables(outs) - stop, []
    for eqn in reversed(eqns):
        if not need.isdisjoint(eqn.outvars):
            kept.append(eqn)
            need |= variables(eqn.invars) - stop
    return kept[::-1]
