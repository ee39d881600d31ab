"""Computes the bytes of a step on one device in two ways: from the sharding rules, and from the compiled program."""
from __future__ import annotations

import math

import jax
import numpy as np

from meshtrain import pattern
from meshtrain.config.sections import Run
from meshtrain.cost.program import carried
from meshtrain.names import LAYERS, LEADING, MATMUL_ROLES
from meshtrain.sharding.rules import GATHERED
from meshtrain.training import accumulators

OPTIMIZER = ("opt_state", "ema")        # parts of a State that are counted as the optimizer's


def bytes_on_device(abstract, shardings) -> int:
    """Return the bytes on one device of a tree of arrays with a tree of shardings."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize,
                         abstract, shardings)
    return sum(jax.tree.leaves(sizes))


def accumulator_bytes(abstract_params, grads_shardings) -> int:
    """Return the bytes on one device of the gradient accumulators."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * accumulators.ITEMSIZE, abstract_params,
                         grads_shardings)
    return sum(jax.tree.leaves(sizes))


def host_bytes(run: Run, layout) -> int:
    """Return the bytes of the layers' inputs that one device offloads to the host; 0 without offloading."""
    if run.training.remat != "offload":
        return 0
    tokens = run.data.global_batch // run.training.microbatches * run.data.seq_len
    num_shards = layout.num_shards(layout.mesh_axes("activations", "batch") + layout.mesh_axes(
        "activations", "residual_seq"))
    return (run.model.num_layers * tokens // num_shards * run.model.embed_dim
            * np.dtype(run.model.compute_dtype).itemsize)


def in_loop(model, layout, num_chunks: int = 1) -> list[tuple]:
    """Return [(ParamInfo, the parameter's shape on one device inside the pipeline's loop)]. In the loop parameters are
    not sharded over the axes that split the batch.

    A stage's layers are one stack per layer of a period. The stack has all chunks and the padding layers.
    """
    num_stages, whole = layout.sizes["stage"], model.staged[0]
    periods = pattern.count_padded(model.cfg, num_stages * num_chunks) // len(whole.period) // num_stages

    def num_shards(axis: str | None) -> int:
        return layout.num_shards(layout.mesh_axes(GATHERED, axis))
    shapes = []
    for info in model.parameters():
        shape = tuple(n // num_shards(axis) for n, axis in zip(info.shape, info.axes))
        if info.axes[:1] == (LAYERS,):
            if len(model.groups) > 1 and info.path[1] != whole.name:
                continue            # layers of an incomplete period are in the stacks of whole ones
            shape = (periods, *shape[1:])
        shapes.append((info, shape))
    return shapes


def loop_bytes(shapes, compute_dtype: str) -> dict:
    """Return the bytes on one device of the shapes of `in_loop`: a stage's weights in the compute dtype, and its
    gradient accumulators."""
    def itemsize(info) -> int:
        return np.dtype(compute_dtype if info.role in MATMUL_ROLES else info.dtype).itemsize
    return {"loop_weights": sum(math.prod(shape) * itemsize(info) for info, shape in shapes),
            "loop_grads": sum(math.prod(shape) * accumulators.ITEMSIZE for info, shape in shapes if info.trainable)}


def formula(state_abstract, state_shardings, trained, grads_shardings) -> dict:
    """Return the memory on one device by the keys of `inspect --json`, from the shardings. activations and total are
    None, because no formula here gives them. trained: the trained parameters."""
    return {"params": bytes_on_device(state_abstract.params, state_shardings.params),
            "grads": accumulator_bytes(trained, grads_shardings),
            "optimizer": sum(bytes_on_device(getattr(state_abstract, part), getattr(state_shardings, part))
                             for part in OPTIMIZER),
            "activations": None, "total": None}


def measure(executable, text: str, state_abstract, microbatches: int, shapes: list[tuple[int, ...]],
            loop=None) -> dict:
    """Return the keys of `formula` for a compiled step.

    shapes: the shapes of the gradient accumulators on one device. loop: the result of `in_loop` for a pipeline; grads
    is None unless the pipeline's loops carry an accumulator for each of these parameters. activations: temporaries
    without the accumulators. total: arguments + temporaries (outputs alias donated arguments).
    """
    analysis = executable.memory_analysis()
    placed = executable.input_shardings[0][0]
    if loop is not None:
        def shapes_of(leading: bool) -> list[tuple[int, ...]]:      # leading layers have their own loop
            return [shape for info, shape in loop if info.trainable and (info.axes[0] == LEADING) == leading]
        of_loops = [carried.all_bytes(text, of_loop) for of_loop in map(shapes_of, (False, True)) if of_loop]
        known = [grads_bytes for grads_bytes in of_loops if grads_bytes is not None]
        grads = sum(known) if len(known) == len(of_loops) else None
    else:
        grads = carried.sum_bytes(text, microbatches, shapes) if microbatches > 1 else None
    return {"params": bytes_on_device(state_abstract.params, placed.params), "grads": grads,
            "optimizer": sum(bytes_on_device(getattr(state_abstract, part), getattr(placed, part))
                             for part in OPTIMIZER),
            "activations": analysis.temp_size_in_bytes - (grads or 0),
            "total": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes}
