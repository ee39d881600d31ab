"""Python's garbage collector, at the same steps in every process.

Left alone, each process collects when its own count of allocations says so, and each of these pauses holds up the step
of all. Inside `by_step` nothing is collected but where the loop asks, after step numbers that all processes share.
Others measured 2.5% of a step on 64 GPUs (marin-community/marin#9205).
"""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

# Steps between collections. A step leaves some hundred objects in cycles, so a hundred steps leave megabytes and their
# collection takes milliseconds. marin and Megatron's guide use the same order.
EVERY = 100


@contextlib.contextmanager
def by_step() -> Iterator[Callable[[int, bool], bool]]:
    """Turn automatic collection off; (step, whether all processes pause after it) -> whether it collected.

    Collects after every EVERY-th step, and at pauses, where all wait anyway. What is alive at the start is frozen:
    modules, jaxprs and the compiled program live as long as the loop, and no collection scans them. So each one is
    full: a younger generation's would leave what it has aged to the end of the loop. At the end, whatever ends the
    loop, the collector is as before and sees all again.
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
