"""Bytes on one device: by the rules (formula) and in the compiled program."""
from __future__ import annotations

import math

import jax
import numpy as np

from meshtrain.cost.program import audit
from meshtrain.names import LAYERS, LEADING, MATMUL_ROLES
from meshtrain.parallel.pipeline import stages
from meshtrain.sharding.rules import GATHERED


def placed_bytes(abstract, shardings) -> int:
    """Bytes on one device of a tree of arrays with a tree of shardings."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize,
                         abstract, shardings)
    return sum(jax.tree.leaves(sizes))


def accumulator_bytes(abstract_params, grads_shardings) -> int:
    """Bytes on one device of the float32 gradient accumulators."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * 4, abstract_params, grads_shardings)
    return sum(jax.tree.leaves(sizes))


def host_bytes(run, layout) -> int:
    """Bytes of the layers' inputs that one device offloads to the host; 0 without offloading."""
    if run.training.remat != "offload":
        return 0
    tokens = run.data.global_batch // run.training.microbatches * run.data.seq_len
    num_shards = layout.num_shards(layout.mesh_axes("activations", "batch") + layout.mesh_axes(
        "activations", "residual_seq"))
    return (run.model.num_layers * tokens // num_shards * run.model.embed_dim
            * np.dtype(run.model.compute_dtype).itemsize)


def in_loop(model, layout, num_chunks: int = 1) -> list[tuple]:
    """[(ParamInfo, its shape on one device inside the pipeline's loop)], not sharded over the axes that split the
    batch.

    A stage's layers are one stack per layer of a period, with all chunks and the padding layers.
    """
    num_stages, whole = layout.sizes["stage"], model.staged[0]
    periods = stages.padded(model.cfg, num_stages * num_chunks) // len(whole.period) // num_stages
    kept = lambda axis: layout.num_shards(layout.mesh_axes(GATHERED, axis))
    found = []
    for info in model.parameters():
        shape = tuple(n // kept(axis) for n, axis in zip(info.shape, info.axes))
        if info.axes[:1] == (LAYERS,):
            if len(model.groups) > 1 and info.path[1] != whole.name:
                continue            # layers of an incomplete period are in the stacks of whole ones
            shape = (periods, *shape[1:])
        found.append((info, shape))
    return found


def loop_bytes(shapes, compute_dtype: str) -> dict:
    """Bytes on one device of `in_loop`: a stage of weights in the compute dtype, and its float32 accumulators."""
    itemsize = lambda info: np.dtype(compute_dtype if info.role in MATMUL_ROLES else info.dtype).itemsize
    return {"loop_weights": sum(math.prod(shape) * itemsize(info) for info, shape in shapes),
            "loop_grads": sum(math.prod(shape) * 4 for info, shape in shapes if info.trainable)}


def formula(state_abstract, state_shardings, trained, grads_shardings) -> dict:
    """The keys of `inspect --json`, without formulas for activations and total. trained: the trained parameters."""
    return {"params": placed_bytes(state_abstract.params, state_shardings.params),
            "grads": accumulator_bytes(trained, grads_shardings),
            "optimizer": placed_bytes(state_abstract.opt_state, state_shardings.opt_state),
            "activations": None, "total": None}


def compiled(executable, text: str, state_abstract, microbatches: int, accumulators: list[tuple[int, ...]],
             loop=None) -> dict:
    """The same keys for a compiled step: arguments as they are sharded, accumulators that the microbatch loop carries.

    accumulators: their shapes on a device. loop: `in_loop` of a pipeline; grads is None unless its loops carry an
    accumulator for each of them. activations: temporaries without the accumulators. total: arguments + temporaries
    (outputs alias donated arguments).
    """
    analysis = executable.memory_analysis()
    placed = executable.input_shardings[0][0]
    if loop is not None:
        apart = lambda wanted: [        # leading layers have their own loop
            shape for info, shape in loop if info.trainable and (info.axes[0] == LEADING) == wanted]
        found = [audit.accumulator_bytes(text, shapes) for shapes in map(apart, (False, True)) if shapes]
        grads = None if None in found else sum(found)
    else:
        grads = audit.carried_bytes(text, microbatches, accumulators) if microbatches > 1 else None
    return {"params": placed_bytes(state_abstract.params, placed.params), "grads": grads,
            "optimizer": placed_bytes(state_abstract.opt_state, placed.opt_state),
            "activations": analysis.temp_size_in_bytes - (grads or 0),
            "total": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes}
