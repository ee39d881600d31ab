"""Counts the matmul FLOPs of a traced function before it is partitioned: the FLOPs that the devices of a mesh share.

A compiled program with more FLOPs on all devices together repeats work. Repeated work is the only sign of a mesh axis
that splits nothing, because such a program computes correct numbers. Knows no mesh and no model.
"""
from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from jax.extend.core import Jaxpr

from meshtrain import jax_private, scopes
from meshtrain.cost.program.sources import SourceFrame, line_of

KERNELS = ("pallas_call",)      # the compiled program does not show their matmuls, either
OTHERS = {"conv_general_dilated": "convolutions", "ragged_dot": "ragged matmuls", "ragged_dot_general":
          "ragged matmuls"}     # products that are no dot_general


@dataclasses.dataclass(frozen=True)
class TracedFlops:
    """The matmul FLOPs of a function, over all devices. products: FLOPs by (line of Python, dtype of the operands).
    bounds: why the count is only a bound: loops of unknown length and conditionals with matmuls. uncounted: other
    products, as texts."""
    products: Counter[tuple[str, str]]
    bounds: tuple[str, ...]
    uncounted: tuple[str, ...]

    @property
    def total(self) -> int:
        return self.products.total()

    @property
    def by_line(self) -> Counter[str]:
        return self._sum_by(0)

    @property
    def by_dtype(self) -> Counter[str]:
        return self._sum_by(1)

    def _sum_by(self, part: int) -> Counter[str]:
        flops: Counter[str] = Counter()
        for key, count in self.products.items():
            flops[key[part]] += count
        return flops


def count(jaxpr: Jaxpr) -> TracedFlops:
    """Count the matmul FLOPs of a jaxpr.

    The body of a scan counts once per iteration, the body of a shard_map once per position on its manual axes, the body
    of a while loop once. A conditional counts as its costliest branch. Where `scopes.TAKEN` says how often a condition
    holds, the count of the conditional is exact.
    """
    bounds: dict[str, None] = {}
    uncounted: dict[str, None] = {}

    def visit(jaxpr: Jaxpr) -> dict[tuple[str, str], Fraction]:
        flops: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name == "dot_general":
                dtype = max((operand.aval.dtype for operand in eqn.invars), key=lambda dtype: dtype.itemsize)
                flops[line_in_python(eqn), dtype.name] += _product(eqn)
            elif name in OTHERS:
                uncounted[f"{OTHERS[name]} ({line_in_python(eqn) or name})"] = None
            if name in KERNELS:
                uncounted[f"kernels ({line_in_python(eqn) or name})"] = None
                continue
            inside = [visit(inner) for inner in list_inner(eqn.params)]
            if not any(inside):
                continue
            if name == "while" or name == "cond" and not _read_share(eqn):
                kind = "a loop of unknown length" if name == "while" else "a conditional"
                bounds[f"{kind} with matmuls" + (f" ({line})" if (line := line_in_python(eqn)) else "")] = None
            if name == "cond":
                inside = [max(inside, key=lambda one: sum(one.values()))]
            for one in inside:
                for key, number in one.items():
                    flops[key] += _times(eqn) * number
        return flops
    products = Counter({key: round(number) for key, number in visit(jaxpr).items()})
    return TracedFlops(products, tuple(bounds), tuple(uncounted))


def _product(eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    first, output = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2 * math.prod(output.shape) * math.prod(first.shape[dim] for dim in contracted)


def _read_share(eqn) -> tuple[int, ...] | None:
    """Return in how many of how many executions the condition of a conditional holds; None if that is not known."""
    return scopes.TAKEN.parse(jax_private.name_stack(eqn))


def _times(eqn) -> Fraction | int:
    """Return how often an equation runs its body, over all devices, on average."""
    if eqn.primitive.name == "cond" and (taken := _read_share(eqn)):
        return Fraction(*taken)
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        sizes = dict(eqn.params["mesh"].shape)
        return math.prod(sizes[axis] for axis in jax_private.manual_axes(eqn))
    return 1


def list_inner(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """Yield the jaxprs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def line_in_python(eqn) -> str:
    """Return the line of Python that wrote an equation, "file.py:12"; "" if it is not known."""
    return line_of(SourceFrame(file, line) for file, line in jax_private.frames(eqn))
