"""Reads a run's parameters from its checkpoint and merges LoRA adapters into them. Callers need not know of
adapters."""
from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

from meshtrain.checkpoint.saved import Saved
from meshtrain.checkpoint.store import AVERAGE, PARAMS
from meshtrain.cluster import agree
from meshtrain.config import Lora
from meshtrain.model import lora
from meshtrain.model.transformer import Transformer
from meshtrain.names import LORA
from meshtrain.run import say
from meshtrain.run.trees import leaves_of, nest

KERNEL = "kernel"


def section(saved: Saved) -> dict:
    """Return the section [lora] of the run that saved a checkpoint; empty if the run trained the whole model."""
    adapters = saved.run.get("lora", {})
    return adapters if adapters.get("rank") else {}


def describe(adapters: Mapping) -> str:
    """Return a description of a section [lora] for messages: rank, alpha and targets, or "the whole model"."""
    if not adapters.get("rank"):
        return "the whole model"
    also = "".join(f", and the {name}" for name in adapters.get("also", ()))
    return (f"adapters of lora.rank={adapters['rank']}, alpha={adapters['alpha']} at "
            f"{', '.join(adapters['targets']) or 'all projections'}{also}")


def are_kept(before: Mapping, lora: Lora) -> bool:
    """Return whether a run with the section `lora` takes over the adapters of a run with the section `before`."""
    return not lora.init_from and Lora(**{**before, "init_from": "", "export": lora.export}) == lora


def restore(saved: Saved, wanted: dict, dtype: DTypeLike | None = None) -> dict:
    """Restore parameters of a checkpoint for a model without adapters. Adapters of the checkpoint are merged.

    wanted: nested dicts of jax.ShapeDtypeStruct with NamedShardings, for all parameters or some. dtype: dtype of the
    merged kernels; None: the stored dtype. Raises: as `Checkpoints.restore`.
    """
    kernels, adapters = leaves_of(wanted), section(saved)
    if adapters:
        stored = leaves_of(saved.param_shapes())
        for path in [path for path in kernels if adapter_path(path, "a") in stored]:
            pair = {matrix: adapter_path(path, matrix) for matrix in "ab"}
            stack = sum(len(stored[name].shape) for name in pair.values()) - 2 - len(kernels[path].shape)
            kernels |= {name: _abstract(stored[name], kernels[path], stack, matrix) for matrix, name in pair.items()}
    taken = _read(saved, kernels)
    if dtype is None:
        taken = {path: x.astype(kernels[path].dtype) for path, x in taken.items()}     # an average is float32
    if not adapters:
        return nest(taken)
    return nest(merge_all(taken, adapters["alpha"] / adapters["rank"], dtype))


def _read(saved: Saved, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return path -> parameter of a checkpoint, or its average (float32) if `saved` asks for averages and has one."""
    averages = {}
    if saved.averaged:
        stored = saved.checkpoints.forms(saved.step)
        averages = {path: jax.ShapeDtypeStruct(form.shape, jnp.float32, sharding=form.sharding)
                    for path, form in wanted.items() if f"{AVERAGE}/{PARAMS}/{path}" in stored}
    trees = {PARAMS: nest({path: form for path, form in wanted.items() if path not in averages}),
             AVERAGE: {PARAMS: nest(averages)}}
    taken = saved.restore({name: tree for name, tree in trees.items() if leaves_of(tree)}, part=True)
    return leaves_of(taken.get(PARAMS, {})) | leaves_of(taken.get(AVERAGE, {}).get(PARAMS, {}))


def warn_left_out(saved: Saved, params: dict) -> None:
    """Print a note that lists the parameters of a checkpoint that `params` lacks. Adapters are not listed, because they
    are merged. params: the parameters initialized from the checkpoint."""
    paths = {path for path in leaves_of(saved.param_shapes()) if f"/{LORA}/" not in path}
    if left := sorted(paths - {path for path in leaves_of(params)}):
        say.out(f"note: the checkpoint has parameters that this model lacks; they are not loaded: {', '.join(left)}")


def leaf(transformer: Transformer, leaves: Mapping[str, jax.Array]) -> Callable[[str], jax.Array]:
    """Return a function that maps a path to its parameter. An adapter is merged into the parameter in float32. leaves:
    path -> parameter; each parameter is read once."""
    scale = transformer.lora and transformer.lora.alpha / transformer.lora.rank

    def of(path: str) -> jax.Array:
        names = path, *(adapter_path(path, matrix) for matrix in "ab")
        own = {name: leaves[name] for name in names if name in leaves}
        return merge_all(own, scale, jnp.float32)[path]
    return of


def leaf_of_saved(saved: Saved, wanted: Mapping[str, jax.ShapeDtypeStruct], *,
                  merge: bool) -> Callable[[str], jax.Array | None]:
    """Return a function that reads the parameter at a path from a checkpoint; None if `wanted` lacks the path.

    wanted: path -> shape and dtype, with a NamedSharding. merge: merge adapters into their kernels, in float32.
    """
    def read(path: str) -> jax.Array | None:
        if path not in wanted:
            return None
        tree = nest({path: wanted[path]})
        return leaves_of(agree.everywhere(lambda: restore(saved, tree, jnp.float32) if merge
                                          else _read(saved, leaves_of(tree))))[path]
    return read


def target_of(path: str) -> str:
    """Return the name in lora.targets of a projection's kernel or of a matrix of experts."""
    *_, home, name = path.split("/")
    return home if name == KERNEL else f"expert_{name}"


def adapter_path(path: str, matrix: str) -> str:
    """Return the path of the adapter of a projection's kernel or of a matrix of experts. matrix: a or b."""
    home, _, name = path.rpartition("/")
    return f"{home}/{LORA}/{matrix if name == KERNEL else f'{name}_{matrix}'}"


def _abstract(stored: jax.ShapeDtypeStruct, kernel: jax.ShapeDtypeStruct, stack: int,
              name: str) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an adapter's A or B. The rank is not sharded; the other dims are sharded as
    in the kernel. stack: number of leading dims, of layers and experts."""
    spec = (*kernel.sharding.spec, *[None] * len(kernel.shape))[:len(kernel.shape)]
    outputs = len(stored.shape) - 1 - stack     # of B: the last dims of the kernel
    spec = (*spec[:len(stored.shape) - 1], None) if name == "a" else (*spec[:stack], None, *spec[len(spec) - outputs:])
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=NamedSharding(kernel.sharding.mesh, P(*spec)))


def merge_all(leaves: Mapping[str, jax.Array], scale: float | None, dtype: DTypeLike | None) -> dict[str, jax.Array]:
    """Return the leaves with adapters merged into their kernels. One kernel is merged at a time."""
    out = {}
    for path, kernel in leaves.items():
        if adapter_path(path, "a") in leaves:
            merge = jax.jit(lambda *given: lora.merge(*given).astype(dtype or given[0].dtype),
                            out_shardings=kernel.sharding)
            kernel = merge(kernel, {matrix: leaves[adapter_path(path, matrix)] for matrix in "ab"}, scale)
        if f"/{LORA}/" not in path:
            out[path] = kernel
    return out
