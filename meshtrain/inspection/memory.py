"""Memory of an assembled run on one device: by its sharding rules, and in its compiled step."""
from __future__ import annotations

import math

import jax
import numpy as np

from meshtrain import pattern
from meshtrain.assembly import Assembly
from meshtrain.cost.program import carried
from meshtrain.names import LAYERS, LEADING, MATMUL_ROLES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import GATHERED
from meshtrain.training import accumulators
from meshtrain.training.state import State

Dims = tuple[int, ...]


def formula(made: Assembly) -> dict:
    """Return the bytes per device that follow from the rules, by the keys of `inspect --json`. activations and total
    are None, because no rule gives them. Weights and gradients in a pipeline's loop are separate entries, because
    [params] and [grads] do not shard them."""
    spec, moments = made.program.step.state, host_moments(made)
    host = host_bytes(made) + moments
    held = {"params": _bytes_on_device(spec.abstract.params, spec.sharding.params),
            "grads": sum(accumulators.ITEMSIZE * math.prod(dims) for dims in _grads_dims(made)),
            "optimizer": _optimizer_bytes(spec.abstract, spec.sharding) - moments, "activations": None, "total": None}
    held |= {"host": host} if host else {}
    if not made.choice:
        return held
    compute_dtype = made.run.model.compute_dtype

    def itemsize(info) -> int:
        return np.dtype(compute_dtype if info.role in MATMUL_ROLES else info.dtype).itemsize
    return held | {
        "loop_weights": sum(math.prod(dims) * itemsize(info) for info, dims in in_loop(made)),
        "loop_grads": sum(math.prod(dims) * accumulators.ITEMSIZE for info, dims in in_loop(made) if info.trainable)}


def read_bytes(made: Assembly) -> int:
    """Return the bytes per device of the copies of weights that the microbatch loop reads, in addition to the stored
    weights; 0 for a pipeline, whose copies are in `formula`."""
    held = made.placed.held
    return 0 if made.choice else round(held.moved if made.placed.by_layer else made.placed.itemsize * held.cast)


def measure(made: Assembly, executable, text: str | None = None) -> dict:
    """Return the bytes per device of a compiled step, by the keys of `formula`. text: its `as_text()`, if already
    available.

    grads: None unless the program's loops carry an accumulator for each parameter. activations: temporaries without the
    accumulators. total: arguments + temporaries (outputs alias donated arguments).
    """
    analysis, text = executable.memory_analysis(), text or executable.as_text()
    state, placed = made.program.step.state.abstract, executable.input_shardings[0][0]
    microbatches, grads = made.run.training.microbatches, None
    if made.choice:
        grads = _measure_loop_grads(made, text)
    elif microbatches > 1:
        grads = carried.sum_bytes(text, microbatches, _grads_dims(made))
    moments = analysis.host_argument_size_in_bytes      # as the program has them, whatever the run asks for
    held = {"params": _bytes_on_device(state.params, placed.params), "grads": grads,
            "optimizer": _optimizer_bytes(state, placed) - moments,
            "activations": analysis.temp_size_in_bytes - (grads or 0),
            "total": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes}
    return held | ({"host": analysis.host_temp_size_in_bytes + moments} if "host" in formula(made) else {})


def host_moments(made: Assembly) -> int:
    """Return the bytes of one device's moments in the host's memory; 0 on CPUs, whose memory is the host's."""
    return made.program.step.state.host_bytes if made.mesh.devices.flat[0].platform != "cpu" else 0


def in_loop(made: Assembly) -> list[tuple]:
    """Return [(ParamInfo, the parameter's dims on one device inside the pipeline's loop)]. In the loop parameters are
    not sharded over the axes that split the batch.

    A stage's layers are one stack per layer of a period. The stack has all chunks and the padding layers.
    """
    assert made.choice is not None
    model, layout, num_stages = made.model, made.layout, made.layout.sizes["stage"]
    whole, num_chunks = model.staged[0], made.choice.schedule.num_chunks
    periods = pattern.count_padded(model.cfg, num_stages * num_chunks) // len(whole.period) // num_stages
    shapes = []
    for info in model.parameters():
        dims = tuple(n // layout.num_shards(layout.mesh_axes(GATHERED, axis)) for n, axis in zip(info.shape, info.axes))
        if info.axes[:1] == (LAYERS,):
            if len(model.groups) > 1 and info.path[1] != whole.name:
                continue            # layers of an incomplete period are in the stacks of whole ones
            dims = (periods, *dims[1:])
        shapes.append((info, dims))
    return shapes


def _measure_loop_grads(made: Assembly, text: str) -> int | None:
    """Return the bytes of the accumulators in the pipeline's loops; None if one is in no loop."""
    trained = [(info.axes[0] == LEADING, dims) for info, dims in in_loop(made) if info.trainable]
    total = 0
    for leading in (False, True):       # leading layers have their own loop
        held = carried.all_bytes(text, [dims for is_leading, dims in trained if is_leading == leading])
        if held is None:
            return None
        total += held
    return total


def _grads_dims(made: Assembly) -> list[Dims]:
    """Return the dims of the gradient accumulators on one device, by [grads]."""
    state = made.program.step.state
    shardings = rules.shardings(made.layout, made.mesh, "grads", state.trained_axes)
    trained = made.model.divide(state.abstract.params)[0]
    return [sharding.shard_shape(leaf.shape)
            for leaf, sharding in zip(jax.tree.leaves(trained), jax.tree.leaves(shardings), strict=True)]


def _bytes_on_device(abstract, shardings) -> int:
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize,
                         abstract, shardings)
    return sum(jax.tree.leaves(sizes))


def _optimizer_bytes(abstract: State, shardings: State) -> int:
    return sum(_bytes_on_device(getattr(abstract, part), getattr(shardings, part)) for part in ("opt_state", "ema"))


def host_bytes(made: Assembly) -> int:
    """Return the bytes of the layers' inputs that one device offloads to the host; 0 without offloading."""
    run, layout = made.run, made.layout
    if run.training.remat != "offload":
        return 0
    tokens = run.data.global_batch // run.training.microbatches * run.data.seq_len
    num_shards = layout.num_shards(layout.mesh_axes("activations", "batch") + layout.mesh_axes(
        "activations", "residual_seq"))
    return (run.model.num_layers * tokens // num_shards * run.model.embed_dim
            * np.dtype(run.model.compute_dtype).itemsize)
