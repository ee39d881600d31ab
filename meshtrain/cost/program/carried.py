"""Finds the gradient accumulators of a compiled step among the arrays that its outermost loops carry and change."""
import math
from collections import Counter
from collections.abc import Iterable

from meshtrain.cost.program import hlo
from meshtrain.training import accumulators


def sum_bytes(text: str, trips: int, expected: Iterable[tuple[int, ...]]) -> int:
    """Return the bytes of accumulators: arrays of their dtype and the expected shapes that the outermost loop of
    `trips` iterations carries and changes.

    Shapes identify them, because the microbatch loop also carries residuals.
    """
    most: Counter[tuple[int, ...]] = Counter()
    wanted = Counter(map(bare, expected))
    for dims in find_arrays(text, trips):
        most |= Counter(map(bare, dims)) & wanted
    return sum(accumulators.ITEMSIZE * math.prod(shape) * n for shape, n in most.items())


def all_bytes(text: str, expected: Iterable[tuple[int, ...]]) -> int | None:
    """Return the bytes of the accumulators of the expected shapes that the program's outermost loops carry and change.

    Shapes identify the accumulators, because a pipeline's loops also carry activations. Return None if no loop carries
    one of the shapes.
    """
    most: Counter[tuple[int, ...]] = Counter()
    wanted = Counter(map(tuple, expected))
    for dims in find_arrays(text):
        most |= Counter(dims)
    return None if wanted - most else sum(accumulators.ITEMSIZE * math.prod(shape) * n for shape, n in wanted.items())


def bare(dims: Iterable[int]) -> tuple[int, ...]:
    """Return dims by which arrays of a compiled program are found: sorted, because XLA transposes, and without those of
    size 1, which XLA drops and adds."""
    return tuple(sorted(n for n in dims if n > 1))


def find_arrays(text: str, trips: int | None = None) -> list[list[tuple[int, ...]]]:
    """Return, for each outermost loop, the dims of the arrays with the dtype of accumulators that the loop carries and
    changes. trips: select only loops of this many iterations."""
    module = hlo.parse(text)
    return [[dims for dtype, dims in hlo.find_changed(module, ins.required("body")) if dtype == accumulators.HLO_DTYPE]
            for ins in module.computations[module.entry].values()
            if ins.op == "while" and trips in (None, hlo.find_trips(ins))]
