"""Bytes per device: what the rules say (formula) and what the compiled program holds."""
from __future__ import annotations

import math

import jax
import numpy as np

from meshtrain.cost import audit


def placed_bytes(abstract, shardings) -> int:
    """Bytes on one device of a tree of arrays under a tree of shardings of the same structure."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize, abstract, shardings)
    return sum(jax.tree.leaves(sizes))


def accumulator_bytes(abstract_params, grads_shardings) -> int:
    """Bytes on one device of the float32 gradient accumulators; their replica axis puts one copy on each device."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * 4, abstract_params, grads_shardings)
    return sum(jax.tree.leaves(sizes))


def formula(state_abstract, state_shardings, grads_shardings) -> dict:
    """The keys of `inspect --json`; activations and total wait for their formulas."""
    return {"params": placed_bytes(state_abstract.params, state_shardings.params),
            "grads": accumulator_bytes(state_abstract.params, grads_shardings),
            "optimizer": placed_bytes(state_abstract.opt_state, state_shardings.opt_state),
            "activations": None, "total": None}


def compiled(executable, state_abstract, microbatches: int) -> dict:
    """The same keys from a compiled step: arguments as they are placed, accumulators that the microbatch loop carries.

    activations: temporaries beside the accumulators. total: arguments + temporaries (outputs alias donated arguments).
    """
    analysis = executable.memory_analysis()
    placed = executable.input_shardings[0][0]
    grads = audit.carried_bytes(executable.as_text(), microbatches) if microbatches > 1 else None
    return {"params": placed_bytes(state_abstract.params, placed.params),
            "grads": grads,
            "optimizer": placed_bytes(state_abstract.opt_state, placed.opt_state),
            "activations": analysis.temp_size_in_bytes - (grads or 0),
            "total": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes}
