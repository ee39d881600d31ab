"""Runs Python's garbage collector at the same steps in every process.

By default each process collects after its own number of allocations, and each such pause delays the step of all
processes. Inside `by_step` the collector runs only when the loop calls it, after the same steps in all processes.
marin measured 2.5% of a step on 64 GPUs (marin-community/marin#9205).
"""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

# Steps between collections. A step leaves a few hundred objects in cycles, so a hundred steps leave megabytes, and
# collecting them takes milliseconds. marin and Megatron's guide use intervals of the same order.
EVERY = 100


@contextlib.contextmanager
def by_step() -> Iterator[Callable[[int, bool], bool]]:
    """Context: turn automatic collection off. Yields collect(step, paused) -> whether it collected.

    paused: whether all processes pause after this step. `collect` collects after every EVERY-th step and at pauses.
    Objects that are alive at the start (modules, jaxprs, the compiled program) are frozen, so no collection scans them,
    and full collections are cheap. On exit the collector's previous state is restored.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()

    def collect(step: int, paused: bool) -> bool:
        if due := paused or step % EVERY == 0:
            gc.collect()
        return due

    try:
        yield collect
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
