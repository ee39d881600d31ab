"""Loads a model folder's weights into a run's parameters, for any layout, number of processes and stages.

Every device reads an equal, contiguous share of each tensor, in the file's dtype: each byte is read once. A compiled
program per kind of tensor gathers, converts, casts and writes it into place. A host holds its devices' shares of one
tensor; a device holds one whole tensor besides its parameters. Devices do not read their shards directly, because such
reads are strided: to read an eighth of a matrix's columns, the whole matrix is read from disk.
"""
from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import files
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.huggingface import depths, folder, safetensors, settings
from meshtrain.huggingface.families import MTP
from meshtrain.model.transformer import Transformer
from meshtrain.names import LAYERS
from meshtrain.run import say, trees
from meshtrain.storage import model_folder
from meshtrain.storage.addresses import StorageError
from meshtrain.storage.model_folder import KEPT
from meshtrain.units import amount

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)    # code -> value
FolderWeights = tuple[folder.Folder, list[folder.WeightRow]]      # an opened model folder, and what it has of a run


def parameter_paths(transformer: Transformer) -> folder.Paths:
    """Return the paths of a Transformer's parameters, by layer."""
    return folder.Paths.of([info.name for info in transformer.parameters()], transformer.places())


def open_folder(run: Run, transformer: Transformer) -> FolderWeights | None:
    """Return the model folder of checkpoint.init_from and its rows; None if checkpoint.init_from is not a model folder.
    Raises: ConfigError that lists every fault of the folder."""
    source = run.checkpoint.init_from
    if not source or not model_folder.is_at(source):
        return None
    if run.checkpoint.step:
        raise ConfigError(f"checkpoint.step={run.checkpoint.step}: checkpoint.init_from={source} is a model folder, "
                          f"which has no steps; leave checkpoint.step out")
    with user_errors("checkpoint.init_from: "):
        # Each of several processes reads its shares of every tensor, so no host copies the whole folder of a bucket.
        directory = model_folder.local_path(source, weights="copied" if jax.process_count() == 1 else "ranges",
                                            tell=say.out)
        opened, paths = folder.open_folder(directory), parameter_paths(transformer)
        if paths.depths:
            opened, paths = depths.take(opened, run.model, paths)
        folder.companions(directory)        # checked now rather than after the compile
        # Rows beyond the folder's vocabulary are made by `growth`.
        own = run.model.model_copy(update={"vocab_size": opened.model["vocab_size"]})
        return opened, folder.match(opened, own, paths)


def load(source: folder.Folder, rows: Sequence[folder.WeightRow], places: Sequence[tuple[str, int]],
         params: dict) -> dict:
    """Return the parameters with the folder's values; `params` is donated.

    places: stack and index of each layer, as `Transformer.places`. params: nested dicts of arrays on one mesh, which
    give shape, dtype and sharding. Raises: CheckpointError if a file cannot be read.
    """
    leaves = trees.leaves_of(params)
    (mesh,) = {leaf.sharding.mesh for leaf in leaves.values()}
    shares, block = NamedSharding(mesh, P(mesh.axis_names)), settings.scale_block(source.config)
    programs: dict = {}         # kind of row -> program
    for row in rows:
        programs = {key: program for key, program in programs.items() if key[0] == row.kind}
        for layer in row.layers or (None,):
            stack, index = places[layer] if row.stacked else ("", 0)
            paths = paths_of(row, stack)
            place = programs.setdefault((row.kind, stack), _program(row, [leaves[path] for path in paths], mesh, block))
            flat, scales = _shares(folder.entry_of(source, row, layer), shares), folder.scales_of(source, row, layer)
            whole = scales and _whole(scales, NamedSharding(mesh, P()))
            # Wait for the previous tensor, to bound memory and order the collectives.
            stacks = jax.block_until_ready([leaves[path] for path in paths])
            leaves |= zip(paths, place(stacks, flat, np.array(row.at(index), np.int32), whole), strict=True)
    return trees.nest(jax.block_until_ready(leaves))


def paths_of(row: folder.WeightRow, stack: str) -> list[str]:
    """Return the paths of a row's parameters. stack: the path of the stack that has the layer, if the row belongs to
    layers."""
    return [stack + path.removeprefix(LAYERS) if row.stacked else path for path in row.paths]


def keep_companions(run: Run, directory: Path) -> None:
    """Copy config, tokenizer and templates of the initial weights (of a model folder or another run) to run.dir/hf.
    Process 0 copies."""
    source = model_folder.local_path(run.checkpoint.init_from)
    source = source if model_folder.is_at(source) else source / KEPT
    if run.checkpoint.init_from and source.is_dir():
        agree.on_first(lambda: copy_companions(source, directory / KEPT))


def copy_companions(source: Path, target: Path, names: Sequence[str] = model_folder.COMPANIONS) -> None:
    """Copy a folder's companion files of these names to `target`, which is created if needed. Raises: ValueError.
    Tensors of the folder that the text model does not use are copied to one more file, model_folder.CARRIED."""
    copies = {path.name: partial(shutil.copyfile, path) for path in folder.companions(source) if path.name in names}
    if model_folder.CARRIED in {*names} - copies.keys() and (carried := folder.read_carried(source)):
        copies[model_folder.CARRIED] = partial(safetensors.copy, carried)
    target.mkdir(exist_ok=True)
    for name, copy in copies.items():
        copy(target / f"{name}.tmp")
        os.replace(target / f"{name}.tmp", target / name)
    files.sync(target)


def tell(source: folder.Folder) -> None:
    for note in source.notes:
        say.out(f"note: {note}")
    files = {entry.path for entry in source.entries.values()}
    further = " (modules that predict further tokens are not trained with the model)" if any(
        name.startswith(MTP) or ".layers." in name and name.startswith(source.family.prefix) and "visual" not in name
        for name in source.carried) else ""
    size = sum(entry.stop - entry.start for entry in source.entries.values())
    say.out(f"weights from {source.directory}: {source.family.model_type}, {amount(len(source.entries), 'tensor')} of "
            f"{size / 1e9:.2f} GB in {amount(len(files), 'file')}"
            + (f"; exports also have {amount(len(source.carried), 'tensor')} beside the text model{further}"
               if source.carried else ""))


def _shares(entry: safetensors.Entry, sharding: NamedSharding) -> jax.Array:
    """Return the elements of a tensor, flat and padded to equal shares on all devices."""
    count, num_shards = int(np.prod(entry.shape, dtype=np.int64)), sharding.mesh.size
    each = -(-count // num_shards)
    # jax has no float64 here.
    dtype = np.float32 if entry.dtype == "F64" else safetensors.READABLE[entry.dtype]

    def share(index):
        start = index[0].start or 0
        numbers = np.zeros(each, dtype)
        stop = min(start + each, count)
        if stop > start:
            numbers[:stop - start] = read(entry, start, stop)
        return numbers
    return jax.make_array_from_callback((each * num_shards,), sharding, share)


def _whole(entry: safetensors.Entry, sharding: NamedSharding) -> jax.Array:
    """Return a small tensor in float32, replicated; every process reads it."""
    numbers = read(entry, 0, math.prod(entry.shape))
    if entry.dtype == "U8":     # exponents
        numbers = numbers.view(safetensors.READABLE["F8_E8M0"])
    numbers = numbers.astype(np.float32).reshape(entry.shape)
    return jax.make_array_from_callback(entry.shape, sharding, lambda index: numbers[index])


def read(entry: safetensors.Entry, start: int, stop: int) -> np.ndarray:
    try:
        return files.patiently(lambda: safetensors.read(entry, start, stop))
    except (OSError, StorageError) as error:
        raise CheckpointError(f"{entry.path} cannot be read: {files.describe(error)}") from error


def _program(row: folder.WeightRow, stacks, mesh, block: tuple[int, int] | None):
    """Return a jitted function (stacks, shares of the row's tensor, index in the stacks, scales by block or None) ->
    stacks with the tensor in place."""
    count, shardings = math.prod(row.shape) // (2 if row.in_blocks else 1), tuple(stack.sharding for stack in stacks)

    lead = len(row.at(0))

    def place(stacks, flat, at, scales):
        # One all-gather in the file's dtype; the rest is local.
        whole = jax.lax.with_sharding_constraint(flat, NamedSharding(mesh, P()))[:count]
        if row.in_blocks:
            whole = _from_blocks(whole, scales)
        whole = whole.reshape(row.shape)
        if scales is not None and not row.in_blocks:
            (rows, columns), (down, across) = row.shape, map(min, row.shape, block)     # a block may be larger
            scales = scales.reshape(-(-rows // down), -(-columns // across))
            each = jnp.repeat(jnp.repeat(scales, down, 0)[:rows], across, 1)[:, :columns]
            whole = whole.astype(jnp.float32) * each
        ours = row.to_ours(whole, jnp.concatenate)
        return tuple(put(stack, ours[path], at) for path, stack in zip(row.paths, stacks, strict=True))

    def put(stack: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
        x, shape = x.astype(stack.dtype), stack.shape[lead:]
        if shape != x.shape:    # pad the vocabulary
            x = jnp.pad(x, [(0, ours - theirs) for ours, theirs in zip(shape, x.shape, strict=True)])
        begin = (*at, *(0 for _ in shape))
        return jax.lax.dynamic_update_slice(stack, x.reshape((1,) * lead + shape), begin) if lead else x

    return jax.jit(place, donate_argnums=0, out_shardings=shardings)


def _from_blocks(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return MXFP4 numbers in float32. codes: two numbers a byte, the low half first. scales: one for each
    `folder.BLOCK` numbers. Source: OCP Microscaling Formats 1.0, E2M1."""
    halves = jnp.stack([codes & 15, codes >> 4], -1).reshape(-1, folder.BLOCK)
    return jnp.asarray(E2M1)[halves] * scales.reshape(-1, 1)
