"""Reads a run's parameters from its checkpoint with LoRA adapters merged, so that callers need not know of adapters."""
from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain.checkpoint.shared import Saved
from meshtrain.cluster import agree
from meshtrain.model import lora
from meshtrain.model.transformer import Transformer
from meshtrain.names import LORA
from meshtrain.run import say
from meshtrain.run.trees import leaves_of, nested

KERNEL = "kernel"


def section(saved: Saved) -> dict:
    """The section [lora] of the run that saved a checkpoint; empty if it trained the whole model."""
    found = saved.run.get("lora", {})
    return found if found.get("rank") else {}


def described(found: Mapping) -> str:
    """A section [lora] in the words of a message."""
    if not found.get("rank"):
        return "the whole model"
    return (f"adapters of lora.rank={found['rank']}, alpha={found['alpha']} at "
            f"{', '.join(found['targets']) or 'all projections'}")


def restore(saved: Saved, wanted: dict, dtype=None) -> dict:
    """Restore parameters of a checkpoint for a model without adapters: adapters are merged.

    wanted: nested dicts of jax.ShapeDtypeStruct with NamedShardings, all parameters or some. dtype: of the merged
    ones; None: as stored. Raises: as `Checkpoints.restore`.
    """
    kernels, found = leaves_of(wanted), section(saved)
    if found:
        stored = leaves_of(saved.param_shapes())
        for path in [path for path in kernels if _adapter_path(path, "a") in stored]:
            for one in "ab":
                adapter = _adapter_path(path, one)
                kernels[adapter] = _abstract(stored[adapter], kernels[path], one)
    taken = saved.restore({"params": nested(kernels)}, part=True)
    if not found:
        return taken["params"]
    return nested(_merged(leaves_of(taken["params"]), found["alpha"] / found["rank"], dtype))


def warn_left_out(saved: Saved, params: dict) -> None:
    """Warn of parameters of a checkpoint that `params`, initialized from it, lacks; adapters are merged."""
    paths = {path for path in leaves_of(saved.param_shapes()) if f"/{LORA}/" not in path}
    if left := sorted(paths - {path for path in leaves_of(params)}):
        say.out(f"note: the checkpoint has parameters that this model lacks; they are not loaded: {', '.join(left)}")


def leaf(transformer: Transformer, leaves: Mapping[str, jax.Array]) -> Callable[[str], jax.Array]:
    """Path -> the parameter, merged in float32 if it has an adapter. leaves: path -> parameter; each is read once."""
    scale = transformer.lora and transformer.lora.alpha / transformer.lora.rank

    def of(path: str) -> jax.Array:
        names = path, *(_adapter_path(path, one) for one in "ab")
        own = {name: leaves[name] for name in names if name in leaves}
        return _merged(own, scale, jnp.float32)[path]
    return of


def leaf_of_saved(saved: Saved, wanted: Mapping[str, jax.ShapeDtypeStruct], *,
                  merge: bool) -> Callable[[str], jax.Array | None]:
    """Path -> the parameter, read from a checkpoint; None if `wanted` lacks it. wanted: path -> form, with a
    NamedSharding. merge: adapters into their kernels, in float32."""
    def read(path: str) -> jax.Array | None:
        if path not in wanted:
            return None
        tree = nested({path: wanted[path]})
        return leaves_of(agree.everywhere(lambda: restore(saved, tree, jnp.float32) if merge
                                          else saved.restore({"params": tree}, part=True)["params"]))[path]
    return read


def _adapter_path(path: str, name: str) -> str:
    return f"{path.removesuffix(KERNEL)}{LORA}/{name}" if path.endswith(KERNEL) else ""


def _abstract(stored, kernel, name: str) -> jax.ShapeDtypeStruct:
    """Abstract A or B: rank unsharded, other dims sharded as the kernel's."""
    spec = (*kernel.sharding.spec, *[None] * len(kernel.shape))[:len(kernel.shape)]
    # first of B's dims after the rank; L and the inputs come before
    into = len(kernel.shape) - len(stored.shape) + 2
    spec = (*spec[:len(stored.shape) - 1], None) if name == "a" else (spec[0], None, *spec[into:])
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=NamedSharding(kernel.sharding.mesh, P(*spec)))


def _merged(leaves: Mapping[str, jax.Array], scale: float | None, dtype) -> dict[str, jax.Array]:
    """The leaves with adapters merged into their kernels, one at a time."""
    out = {}
    for path, kernel in leaves.items():
        if _adapter_path(path, "a") in leaves:
            kernel = _merge(kernel.sharding, dtype or kernel.dtype)(
                kernel, *(leaves[_adapter_path(path, one)] for one in "ab"), scale)
        if f"/{LORA}/" not in path:
            out[path] = kernel
    return out


def _merge(sharding, dtype):
    return jax.jit(lambda kernel, a, b, scale: lora.merged(kernel, {"a": a, "b": b}, scale).astype(dtype),
                   out_shardings=sharding)
