"""An assembled run as JSON: settings, the mesh on its hosts, every parameter with its shards, the pipeline's schedule.

The page of `inspect --html` shows this and the costs of the compiled step (`report.as_json`).
"""
from __future__ import annotations

import math

import numpy as np
from jax.sharding import NamedSharding

from meshtrain.assembly import Assembly
from meshtrain import hardware
from meshtrain.config import Run
from meshtrain.cost.program import roofline
from meshtrain.inspection import chart
from meshtrain.sharding.mesh import AnyMesh
from meshtrain.training import accumulators


def of_run(made: Assembly) -> dict:
    """Return a run as JSON. Bytes and links are those of one device."""
    kind, simulated = made.mesh.devices.flat[0].device_kind, bool(made.run.mesh.simulated_devices)
    on = mesh(made.mesh, roofline.gpu_of(made.mesh), kind, simulated)
    return {"run": _run(made), "mesh": on, "parameters": parameters(made),
            "schedule": made.choice and chart.as_json(made.choice), "notes": list(made.notes)}


def note_unopened(run: Run) -> str:
    """Return a note about the files of a run that only training and `check` open; "" if the run names none."""
    data = run.data
    keys = ["data.paths"] * any(one.paths for one in (data, *data.mixture)) + [
        "data.tokenizer"] * (data.tokenizer != "bytes")
    return f"the files of {' and '.join(keys)} are not opened; python -m meshtrain.check opens them" if keys else ""


def _run(made: Assembly) -> dict:
    run, rows = made.run, made.model.parameters()
    return {"name": run.run.name, "num_params": sum(info.size for info in rows), "num_layers": run.model.num_layers,
            "steps": run.training.steps, "global_batch": run.data.global_batch, "seq_len": run.data.seq_len,
            "tokens_per_step": run.data.global_batch * run.data.seq_len, "microbatches": run.training.microbatches,
            "remat": run.training.remat, "compute_dtype": run.model.compute_dtype,
            "matmul_dtype": run.model.matmul_dtype, "optimizer": run.optimizer.name,
            "context_method": run.context.method if made.mesh_spec.sizes["context"] > 1 else None,
            "rules": made.layout.rules.path, "rules_text": made.layout.rules.text}


def mesh(device_mesh: AnyMesh, gpu: hardware.Gpu | None, device: str, simulated: bool = False) -> dict:
    """Return a mesh on its hosts as JSON. links: for each axis larger than 1, its size and how many members of a group
    share a link domain. gpu: None if its speed is unknown. device: jax's name of the device kind."""
    host = gpu or hardware.GPUS["cpu"]
    sizes = dict(device_mesh.shape)
    return {"sizes": sizes, "placement": list(sizes), "num_devices": math.prod(sizes.values()),
            "device": device, "simulated": simulated, "gpu": gpu and gpu.name, "hbm_bytes": gpu and gpu.hbm_bytes,
            "gpus_per_host": host.gpus_per_host, "gpus_per_link_domain": host.gpus_per_link_domain,
            "links": {axis: {"size": n, "inside": inside}
                      for axis, (n, inside) in roofline.links(host, device_mesh).items()}}


def parameters(made: Assembly) -> list[dict]:
    """Return a row per parameter. axes: logical axes. read, stored, grads: for each dimension, the mesh axes that shard
    it by [params], [optimizer] and [grads]. stored_bytes, grads_bytes: bytes per device."""
    rows = []
    for info in made.model.parameters():
        shards = {name: NamedSharding(made.mesh, made.layout.spec(name, info.axes)) for name in
                  ("params", "optimizer", "grads")}
        held = {name: math.prod(shard.shard_shape(info.shape)) for name, shard in shards.items()}
        itemsize = np.dtype(info.dtype).itemsize
        rows.append({"name": info.name, "axes": list(info.axes), "shape": list(info.shape), "size": info.size,
                     "bytes": info.size * itemsize, "dtype": np.dtype(info.dtype).name,
                     "read": _split(shards["params"]),
                     "stored": _split(shards["optimizer"]), "grads": _split(shards["grads"]),
                     "stored_bytes": held["optimizer"] * itemsize,
                     "grads_bytes": held["grads"] * accumulators.ITEMSIZE})
    return rows


def _split(sharding: NamedSharding) -> list[list[str]]:
    return [[] if entry is None else [entry] if isinstance(entry, str) else list(entry) for entry in sharding.spec]
