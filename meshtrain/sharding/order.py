"""Order of collectives on CPUs: simulated devices need it, GPUs do not. A reader of the model may skip every `after`:
it changes no value.

XLA's CPU backend starts an op after a loop while the loop still runs, unless the op reads a result of the loop.
Collectives in the loop then run concurrently with those after it. In one process this breaks only permutes (`on_cpus`:
a pipeline). In several processes it breaks all collectives (`by_gloo`): Gloo pairs the collectives of a group by the
order in which each device starts them. A later collective is therefore made to depend on the earlier ones.

No option of XLA or jax replaces this. Without `after`, a ZeRO-3 step in two processes of four devices aborted in the
first start under each of these: the defaults of jax 0.10 and of 0.12, xla_cpu_multi_thread_eigen=false alone and with
asynchronous dispatch off, the memory-optimized scheduler, xla_cpu_use_thunk_runtime=false, one thread per device.
"""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh


def on_cpus(mesh: Mesh) -> bool:
    """Return whether the devices of this mesh are simulated, so that permutes need an order."""
    return mesh.devices.flat[0].platform == "cpu"


def by_gloo(mesh: Mesh) -> bool:
    """Return whether collectives of this mesh use Gloo: simulated devices in several processes."""
    return on_cpus(mesh) and len({device.process_index for device in mesh.devices.flat}) > 1


def after(values: Any, done: Any) -> Any:
    """Make `values` depend on all arrays of `done` (both are pytrees), without changing them.

    XLA removes an optimization_barrier before it orders its kernels, so this adds a real data dependence. It reads one
    element of each array of `done`, which may be non-finite.
    """
    read = sum(leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(done))
    zero = jnp.minimum(lax.bitcast_convert_type(read, jnp.int32) & 1, 0)
    return jax.tree.map(lambda value: value + zero.astype(value.dtype), values)


def after_row(values: Any, done: jax.Array) -> Any:
    """Make `values` depend on the array `done`, as `after`, between the ticks of a pipeline.

    In a tree, only the integers are made dependent, because floats in a tree are not sent directly. All permutes of one
    device share a rendezvous, and XLA may start one permute during another in an independent loop. The permutes then
    pair up wrongly, and about one program in a hundred gives wrong numbers or hangs. Only the sum of one row of `done`
    is read, because `done` may be sharded over an automatic axis.
    """
    line = done[0, :, 0].sum() if done.ndim == 3 else done[0].sum() if done.ndim > 1 else done
    if isinstance(values, jax.Array):
        return after(values, line)
    return jax.tree.map(lambda a: after(a, line) if jnp.issubdtype(a.dtype, jnp.integer) else a, values)


def leave(values: Any, done: Any) -> Any:
    """Return `values` unchanged, in place of `after_row` where no order is needed."""
    return values
