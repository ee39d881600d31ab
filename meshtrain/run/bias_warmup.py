"""Before the first step: passes over the run's first batches in which the biases of experts move, and nothing else.

The routers that a run begins with send many tokens to few experts, and the first steps would train those alone. It is
the compiled training step itself that runs, as a step before the first, when the learning rate is still 0: no further
program is compiled, and whatever the layout, the biases move by the counts of whole steps. What the optimizer's state
makes of it is dropped.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import jax
import numpy as np

from meshtrain.cluster import watch
from meshtrain.data.documents.contracts import Batches
from meshtrain.training.state import State
from meshtrain.training.step import Program


def balanced(program: Program, step: Callable, state: State, data: Batches, passes: int,
             fresh: Callable[[], State]) -> State:
    """The state before the first step, its biases moved by `passes` batches.

    step: the compiled training step; it takes the state's memory. fresh: a state whose optimizer has not begun.
    """
    params, opt_state = state.params, state.opt_state
    placed = program.step.state.sharding.step
    before_first = lambda: jax.make_array_from_callback((), placed, lambda index: np.int32(-1))
    del state
    with contextlib.closing(data.iterate(0, rows=program.rows)) as batches:
        for _ in range(passes):
            state, _ = step(State(before_first(), params, opt_state), program.place(next(batches)),
                            *program.limit(math.inf))
            params, opt_state = state.params, state.opt_state
            watch.progress()
    del state
    opt_state = None    # its memory is for that of fresh()
    begun = fresh()
    return State(begun.step, params, begun.opt_state)
