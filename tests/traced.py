"""A layer's forward and backward as a pipeline splits them, traced."""
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.model import float8, params
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.model.transformer import Transformer
from meshtrain.names import LAYERS
from meshtrain.sharding.rules import GATHERED, Layout
from meshtrain.training import backward, executor, objective
from meshtrain.training.accumulate import drops


def split_layer(run, model: Transformer, layout: Layout, mesh, attend: Callable,
              experts=None) -> tuple[backward.SplitLayer, jax.ShapeDtypeStruct]:
    """Forward, B and W of one period of layers as they stand in the pipeline's loop, and its input:
    what a microbatch leaves on a device.

    Traced, not compiled; the mesh may be abstract. Shapes are one device's, but whole over tensor, which XLA splits.
    """
    dtype, deferred, seq = jnp.dtype(run.model.compute_dtype), layout.batch_axes, layout.mesh_axes("activations", "seq")
    # of shapes no platform is asked
    precision = float8.precision("cpu") if run.model.matmul_dtype == "float8" else None
    ex = Execution(layout, Numerics(dtype, run.training.remat, precision), Engines(attend, experts))
    sequences = run.data.global_batch // run.training.microbatches // layout.num_shards(deferred)
    sizes = (sequences, run.data.seq_len // layout.num_shards(seq))
    x = jax.ShapeDtypeStruct((*sizes, run.model.embed_dim), dtype)
    # of experts
    own = lambda axis: layout.num_shards(a for a in layout.mesh_axes(GATHERED, axis) if a in (*deferred, *seq))
    weights, frozen = (model.first(part[LAYERS])
                       for part in model.divide(params.tree(model.parameters(), lambda info: jax.ShapeDtypeStruct(
        tuple(n // own(axis) for n, axis in zip(info.shape[1:], info.axes[1:])),
        dtype if info.role == "matrix" else info.dtype))))
    split = None

    def trace():
        nonlocal split
        key = jax.random.key(0) if drops(run) else None
        inputs = model.inputs({name: jnp.zeros(sizes[:1 + dims], jnp.int32)
                               for name, dims in objective.FIELDS.items()}, key)
        group = model.staged[0]
        assert group.period == model.period

        def period(w, x, inputs):
            return group.apply(ex, group.weights(params.join(w.trained, w.frozen)), x, inputs, w.numbers)
        split = backward.SplitLayer(period, backward.Weights(weights, jnp.int32(0), frozen), x, inputs)
        return jnp.int32(0)

    with jax.sharding.use_abstract_mesh(mesh):          # whatever mesh the caller has in force
        jax.eval_shape(jax.shard_map(trace, mesh=mesh, axis_names={executor.STAGE, *deferred, *seq},
                                     in_specs=(), out_specs=P(),
                                     check_vma=False))
    return split, x
