"""Warms up the routers' load-balancing biases (experts.bias_warmup) before the first step.

A fresh router sends most tokens to few experts, and the first steps would train only those. Each pass runs the compiled
training step at learning rate 0, so no further program is compiled. The biases move by the token counts of whole steps,
so the result is the same in every layout. Only the biases are kept; the optimizer state is initialized again.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np

from meshtrain.cluster import watch
from meshtrain.data.documents import contracts
from meshtrain.run.feeds import BatchFeed
from meshtrain.training.state import State


def balance(feed: BatchFeed, step: Callable, state: State, passes: int, fresh: Callable[[], State]) -> State:
    """Return the state before the first step, with biases adjusted by the first `passes` batches.

    feed: of the run; its own position does not change. step: the compiled training step; it donates the state. fresh:
    returns a state with a new optimizer state.
    """
    program = feed.program
    params, opt_state, ema, shares = state.params, state.opt_state, state.ema, state.shares
    placed = program.step.state.sharding.step
    del state
    with contextlib.closing(contracts.iterate(feed.data, 0, rows=program.rows)) as batches:
        for _ in range(passes):
            before = jax.make_array_from_callback((), placed, lambda index: np.int32(-1))
            state, _ = step(State(before, params, opt_state, ema, shares), feed.place(next(batches)),
                            *program.limit(math.inf))
            params, opt_state, ema, shares = state.params, state.opt_state, state.ema, state.shares
            watch.progress()
    del state
    opt_state = None    # frees its memory for the state of fresh()
    begun = fresh()
    if ema is not None and begun.ema is not None:       # the weights, and so their average, are as they were
        ema = dataclasses.replace(ema, count=begun.ema.count)
    return State(begun.step, params, begun.opt_state, ema, shares)
