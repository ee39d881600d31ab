"""Bytes per device: what the rules say (formula) and what the compiled program holds."""
from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from meshtrain import hardware
from meshtrain.cost.program import audit
from meshtrain.cost.formulas.simulate import SlotBytes
from meshtrain.names import LAYERS, LEADING, MATMUL_ROLES
from meshtrain.parallel.pipeline import stages
from meshtrain.sharding.rules import GATHERED


def placed_bytes(abstract, shardings) -> int:
    """Bytes on one device of a tree of arrays under a tree of shardings of the same structure."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize,
                         abstract, shardings)
    return sum(jax.tree.leaves(sizes))


def accumulator_bytes(abstract_params, grads_shardings) -> int:
    """Bytes on one device of the float32 gradient accumulators; one copy on each device."""
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * 4, abstract_params, grads_shardings)
    return sum(jax.tree.leaves(sizes))


def read_bytes(model, layout, compute_dtype: str) -> int:
    """Bytes on one device of the weights as the loop over microbatches reads them, where that is a copy beside the
    stored ones: in another dtype, or gathered from [optimizer] to [params] once per step. What layers gather themselves
    is not held."""
    cast = model.cast_before_loop(layout)

    def held(info):
        dtype = np.dtype(compute_dtype if info.role in MATMUL_ROLES and cast else info.dtype)
        num_shards = {table: math.prod(layout.num_shards(layout.mesh_axes(table, axis)) for axis in info.axes)
                for table in ("params", "optimizer")}
        as_stored = dtype == info.dtype and num_shards["params"] == num_shards["optimizer"]
        return 0 if as_stored else info.size // num_shards["params"] * dtype.itemsize
    return sum(held(info) for info in model.parameters())


def host_bytes(run, layout) -> int:
    """Bytes on the host, of one device, of the layers' inputs that wait there for their backward; 0 where none do."""
    if run.training.remat != "offload":
        return 0
    tokens = run.data.global_batch // run.training.microbatches * run.data.seq_len
    num_shards = layout.num_shards(layout.mesh_axes("activations", "batch") + layout.mesh_axes(
        "activations", "residual_seq"))
    return (run.model.num_layers * tokens // num_shards * run.model.embed_dim
            * np.dtype(run.model.compute_dtype).itemsize)


def in_loop(model, layout, num_chunks: int = 1) -> list[tuple]:
    """[(ParamInfo, its shape on one device inside the pipeline's loop)], whole over the axes that split the batch.

    A stage's layers are one stack for each layer of a period, all its chunks
    and those layers that fill up the last one included.
    """
    num_stages, whole = layout.sizes["stage"], model.staged[0]
    periods = stages.padded(model.cfg, num_stages * num_chunks) // len(whole.period) // num_stages
    kept = lambda axis: layout.num_shards(layout.mesh_axes(GATHERED, axis))
    found = []
    for info in model.parameters():
        shape = tuple(n // kept(axis) for n, axis in zip(info.shape, info.axes))
        if info.axes[:1] == (LAYERS,):
            if len(model.groups) > 1 and info.path[1] != whole.name:
                continue            # what is left of a period is in the stacks of whole ones
            shape = (periods, *shape[1:])
        found.append((info, shape))
    return found


def loop_bytes(shapes, compute_dtype: str) -> dict:
    """Bytes on one device of `in_loop`: a full stage of weights in the compute dtype, and its float32 accumulators."""
    itemsize = lambda info: np.dtype(compute_dtype if info.role in MATMUL_ROLES else info.dtype).itemsize
    return {"loop_weights": sum(math.prod(shape) * itemsize(info) for info, shape in shapes),
            "loop_grads": sum(math.prod(shape) * 4 for info, shape in shapes if info.trainable)}


def formula(state_abstract, state_shardings, trained, grads_shardings) -> dict:
    """The keys of `inspect --json`; activations and total wait for their formulas. trained: of the parameters."""
    return {"params": placed_bytes(state_abstract.params, state_shardings.params),
            "grads": accumulator_bytes(trained, grads_shardings),
            "optimizer": placed_bytes(state_abstract.opt_state, state_shardings.opt_state),
            "activations": None, "total": None}


def compiled(executable, text: str, state_abstract, microbatches: int, accumulators: list[tuple[int, ...]],
             loop=None) -> dict:
    """The same keys from a compiled step: arguments as they are placed, accumulators that the microbatch loop carries.

    accumulators: their shapes on a device. loop: `in_loop`, where there is a pipeline: its loops must carry an
    accumulator for each of them, else grads is None.
    activations: temporaries beside the accumulators. total: arguments + temporaries (outputs alias donated arguments).
    """
    analysis = executable.memory_analysis()
    placed = executable.input_shardings[0][0]
    if loop is not None:
        apart = lambda wanted: [        # leading layers have a loop of their own
            shape for info, shape in loop if info.trainable and (info.axes[0] == LEADING) == wanted]
        found = [audit.accumulator_bytes(text, shapes) for shapes in map(apart, (False, True)) if shapes]
        grads = None if None in found else sum(found)
    else:
        grads = audit.carried_bytes(text, microbatches, accumulators) if microbatches > 1 else None
    return {"params": placed_bytes(state_abstract.params, placed.params),
            "grads": grads,
            "optimizer": placed_bytes(state_abstract.opt_state, placed.opt_state),
            "activations": analysis.temp_size_in_bytes - (grads or 0),
            "total": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes}


def slot_bytes(run, layout, fbw, x, residual_shards: int) -> SlotBytes:
    """What a microbatch leaves in a stage, from F, B and W of one period and its input: heads and mlp are split over
    tensor.

    What is as wide as the residual stream: under remat F keeps it split like the stream (layers' inputs, what attention
    adds). assumption: without remat, and in what B passes to W, it is whole, as it is where a matmul reads it: an upper
    bound.
    """
    wide_shards = {"r": 1, "q": 1, "z": 1} if run.training.remat == "none" else {
        "r": residual_shards, "q": residual_shards, "z": 1}

    def held(a, stream_shards):
        num_shards = stream_shards if a.shape[-1:] in ((), (1,), (run.model.embed_dim,)) else layout.sizes["tensor"]
        return jax.ShapeDtypeStruct((-(-math.prod(a.shape) // num_shards),), a.dtype)
    fbw = dataclasses.replace(fbw, **{name: [held(a, num_shards) for a in getattr(fbw, name)]
                                      for name, num_shards in wide_shards.items()})
    num_stages = layout.sizes["stage"]
    depth = stages.padded(run.model, num_stages) // num_stages // stages.period(run.model)
    return SlotBytes.of(fbw, held(x, residual_shards), chunks=depth)


def slot_budget_bytes(gpu, state, loop, compute_dtype: str, leading: float = 0.0) -> int | None:
    """The bytes of one GPU that are left for a schedule's slots; None where its memory is not known.

    What one op needs while it runs comes out of the same.

    state: the run's StateSpec. loop: `in_loop`. leading: bytes that layers before the stages keep
    (`footprint.leading_bytes`).
    """
    if not (gpu and gpu.hbm_bytes):
        return None
    beside = [placed_bytes(state.abstract.params, state.sharding.params),
              placed_bytes(state.abstract.opt_state, state.sharding.opt_state),
              *loop_bytes(loop, compute_dtype).values()]
    return max(0, hardware.usable_bytes(gpu) - sum(beside) - int(leading))
