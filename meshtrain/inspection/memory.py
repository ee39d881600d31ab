"""Memory of an assembled run on one device: by its sharding rules, and in its compiled step."""
from __future__ import annotations

import jax

from meshtrain.assembly import Assembly
from meshtrain.cost.program import memory as program_memory
from meshtrain.sharding import rules


def grads_shardings(made: Assembly):
    """Return the shardings of the gradient accumulators, by [grads]."""
    return rules.shardings(made.layout, made.mesh, "grads", made.program.step.state.trained_axes)


def formula(made: Assembly) -> dict:
    """Return the bytes per device by kind that follow from the rules. Weights and gradients in a pipeline's loop are
    separate entries, because [params] and [grads] do not shard them."""
    spec = made.program.step.state
    held = program_memory.formula(spec.abstract, spec.sharding, made.model.divide(spec.abstract.params)[0],
                          grads_shardings(made))
    moments = host_moments(made)
    host = program_memory.host_bytes(made.run, made.layout) + moments
    held |= {"optimizer": held["optimizer"] - moments} | ({"host": host} if host else {})
    return held | (program_memory.loop_bytes(_loop(made), made.run.model.compute_dtype) if made.choice else {})


def read_bytes(made: Assembly) -> int:
    """Return the bytes per device of the copies of weights that the microbatch loop reads, in addition to the stored
    weights; 0 for a pipeline, whose copies are in `formula`."""
    held = made.placed.held
    return 0 if made.choice else round(held.moved if made.placed.by_layer else made.placed.itemsize * held.cast)


def measure(made: Assembly, executable, text: str | None = None) -> dict:
    """Return the bytes per device by kind of a compiled step. text: its `as_text()`, if already available."""
    trained = made.model.divide(made.program.step.state.abstract.params)[0]
    shapes = jax.tree.map(lambda a, s: s.shard_shape(a.shape), trained, grads_shardings(made))
    shapes = jax.tree.leaves(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    held = program_memory.measure(executable, text or executable.as_text(), made.program.step.state.abstract,
                                   made.run.training.microbatches, shapes, _loop(made))
    analysis = executable.memory_analysis()
    moments = analysis.host_argument_size_in_bytes      # as the program has them, whatever the run asks for
    return held | {"optimizer": held["optimizer"] - moments} | (
        {"host": analysis.host_temp_size_in_bytes + moments} if "host" in formula(made) else {})


def host_moments(made: Assembly) -> int:
    """Return the bytes of one device's moments in the host's memory; 0 on CPUs, whose memory is the host's."""
    return made.program.step.state.host_bytes if made.mesh.devices.flat[0].platform != "cpu" else 0


def _loop(made: Assembly):
    """Return the parameters in the pipeline's loop; None without a pipeline."""
    return program_memory.in_loop(made.model, made.layout, made.choice.schedule.num_chunks) if made.choice else None
