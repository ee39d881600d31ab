"""Exports a run's weights as a Hugging Face model folder: atomically, one tensor in memory at a time, on any mesh.

For each tensor a compiled program slices the layer, casts, converts and gathers it; the process that owns the file
writes it in place. The sizes of tensors are known in advance, so the headers are written first. The index, the config
and the tokenizer files are written after the weights are synced. The folder appears as a whole or not at all: see
`new_folder`.
"""
from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import files
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.cluster import agree
from meshtrain.config import Model, user_errors
from meshtrain.data.documents import beside, tokenizer
from meshtrain.huggingface import depths, folder, safetensors, settings
from meshtrain.huggingface.families import Family
from meshtrain.huggingface.weights import new_folder
from meshtrain.huggingface.weights.ends import Ends, write_ends
from meshtrain.huggingface.weights.pretrained import copy_companions, parameter_paths, paths_of
from meshtrain.model.transformer import Transformer
from meshtrain.run import say
from meshtrain.storage import model_folder

SHARD_BYTES = 5_000_000_000     # size of one file


def write(target: new_folder.Target, transformer: Transformer, leaf: Callable[[str], jax.Array], *, dtype: str,
          shard_bytes: int, data: Mapping, ends: Ends, source: Path | None) -> int:
    """Write the folder; return the bytes of its weights. All processes make the same call.

    leaf: path -> parameter; each parameter is read once and not kept. data: the section [data] of the training. ends:
    the stop tokens of the model. source: a folder whose other settings, tokenizer and templates are copied; None: these
    files are made from `data`. Raises: ConfigError if `target` is not free or the model has no family; CheckpointError
    if a file cannot be written. After an error no files are left.
    """
    model, places = transformer.cfg, transformer.places()
    with user_errors():
        theirs, beside = agree.on_first(lambda: (settings.read(source), folder.list_carried(source)) if source
                                        else ({}, []))
        family = settings.family_of(theirs) if theirs else settings.family_for(model)
        grown = is_grown(theirs, family, model)
        theirs = theirs or {"bos_token_id": ends.bos, "eos_token_id": ends.as_json(),
                            "pad_token_id": None}       # else the class's default, which may exceed the vocabulary
        rows = folder.rows(family, model, parameter_paths(transformer), folder.prefixes_of(theirs, beside))
    rows = depths.add_copies(rows, family, model, beside)
    left = model.mtp_layers - len({*map(depths.of_row, rows)} - {""})
    if left and jax.process_index() == 0:
        say.err(f"note: model.mtp_layers={model.mtp_layers}: {family.model_type} has no names for {left} of these "
                f"depths; {target} is the model without them")
    written_names = {name for row in rows for layer in row.layers or (None,) for name in row.tensors(layer)}
    parts = _files(rows, model.num_layers, safetensors.NAMES[dtype], shard_bytes, whole=not set(beside) - written_names)
    with new_folder.writing(target) as place:
        written = Files(place, parts, safetensors.NAMES[dtype])
        for _, alike in itertools.groupby(rows, lambda row: row.kind):
            row, *more = alike      # one row per expert
            # All layers of one stack before the next, so that only one is in memory.
            for stack in dict.fromkeys(places[layer][0] for layer in row.layers) if row.stacked else [""]:
                layers = [(layer, places[layer][1]) for layer in row.layers
                          if places[layer][0] == stack] if row.stacked else [(None, 0)]
                leaves = [leaf(path) for path in paths_of(row, stack)]
                _write_rows([row, *more], leaves, layers, written)
        written.close()
        config = settings.config_of(model, family, dtype, data["seq_len"], theirs)

        def finish() -> None:
            write_companions(place, source, data, model_folder.COMPANIONS, grown)
            _drop_carried(place, written_names)
            _complete(place, parts, written.size, config)
            write_ends(place, source, ends)
        new_folder.on_first(target, finish)
    return written.size


def _write_rows(rows: list[folder.WeightRow], leaves: list[jax.Array],
                layers: Sequence[tuple[int | None, int]], written: Files) -> None:
    """Write the tensors of rows of one kind. layers: [(number of the layer, its index in the leaves)]."""
    program, before = _program(rows[0], leaves, written.dtype), None
    for (layer, index), row in itertools.product(layers, rows):
        # Overlap: write the previous tensor while this one is gathered; at most one in flight.
        now = row, layer, program(leaves, np.int32(index), np.int32(row.expert or 0))
        if before:
            _put(*before, written)
        jax.block_until_ready(now[2])
        before = now
    _put(*before, written)


def write_row(row: folder.WeightRow, leaves: list[jax.Array], name: str, written: Files) -> None:
    """Write the one tensor of a row outside the layers, under this name."""
    written.put(name, _program(row, leaves, written.dtype)(leaves, np.int32(0), np.int32(0)))


def _put(row: folder.WeightRow, layer: int | None, array: jax.Array, written: Files) -> None:
    """Write the tensor of a row. The row may be a part of a stored tensor, or may be stored as several tensors."""
    begin, tensors = 0, row.tensors(layer)
    for name, shape in tensors.items():
        if len(tensors) == 1:
            written.put(name, array, row.expert or 0 if shape != row.shape else 0)
        else:
            written.put(name, array[begin:begin + shape[0]])
            begin += shape[0]


def _program(row: folder.WeightRow, leaves: list[jax.Array], dtype: np.dtype):
    """Return a jitted function (leaves, layer, expert) -> the row's tensor, replicated on every device."""
    mesh, num_shards = leaves[0].sharding.mesh, [layer_shards(leaf) if row.stacked else 1 for leaf in leaves]

    def gather(leaves: list[jax.Array], layer: jax.Array, expert: jax.Array) -> jax.Array:
        ours = {}
        for path, leaf, over in zip(row.paths, leaves, num_shards, strict=True):
            x = layer_of(leaf, layer, over, dtype) if row.stacked else leaf.astype(dtype)
            if row.expert is not None:
                x = jax.lax.dynamic_index_in_dim(x, expert, 0, keepdims=False)
            ours[path] = x[tuple(slice(0, n) for n in row.our_shape(path))]     # strip the padding of the vocabulary
        return row.to_theirs(ours, jnp.concatenate).reshape(row.shape)
    return jax.jit(gather, out_shardings=NamedSharding(mesh, P()))


def layer_shards(leaf: jax.Array) -> int:
    """Return the number of shards of a stack's layer dim."""
    return leaf.shape[0] // leaf.sharding.shard_shape(leaf.shape)[0]


def layer_of(leaf: jax.Array, layer: jax.Array, num_shards: int, dtype: np.dtype) -> jax.Array:
    """Return one layer of a stack, cast to `dtype`. If stages hold the layers, an all-reduce of the layer's bits moves
    only that layer; indexing would gather the whole stack."""
    if num_shards == 1:
        return jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False).astype(dtype)
    each = leaf.shape[0] // num_shards
    parts = leaf.reshape(num_shards, each, *leaf.shape[1:])
    mine = jax.lax.dynamic_index_in_dim(parts, layer % each, 1, keepdims=False).astype(dtype)
    bits = jax.lax.bitcast_convert_type(mine, jnp.dtype(f"uint{8 * dtype.itemsize}"))
    owner = (jnp.arange(num_shards) == layer // each).reshape(num_shards, *[1] * (bits.ndim - 1))
    return jax.lax.bitcast_convert_type(jnp.sum(jnp.where(owner, bits, 0), 0, dtype=bits.dtype), dtype)


class Files:
    """The files of an export. Each process writes every N-th file, with N processes. Only `close` raises errors,
    because the other processes need this process for every gather until then."""

    def __init__(self, place: Path, parts: Mapping[str, Mapping[str, tuple[int, ...]]], kind: str):
        self.dtype, self.size, self.failed = safetensors.DTYPES[kind], 0, None
        self.open, self.at = {}, {}
        for number, (name, tensors) in enumerate(parts.items()):
            text, begins = safetensors.header({name: (kind, shape) for name, shape in tensors.items()})
            self.size += sum(math.prod(shape) for shape in tensors.values()) * self.dtype.itemsize
            if number % jax.process_count() == jax.process_index():
                self.at |= {tensor: (name, begin) for tensor, begin in begins.items()}
                self._try(lambda: self._create(place / name, text))

    def _create(self, path: Path, text: bytes) -> None:
        self.open[path.name] = open(path, "xb", buffering=0)
        self._write(self.open[path.name], text, 0)

    def put(self, tensor: str, array: jax.Array, part: int = 0) -> None:
        """Write a tensor, or part number `part` of a tensor that is written in equal parts."""
        if tensor in self.at and not self.failed:
            name, begin = self.at[tensor]
            numbers = np.ascontiguousarray(array.addressable_data(0))
            begin += part * numbers.nbytes
            self._try(lambda: self._write(self.open[name], memoryview(numbers.reshape(-1).view(np.uint8)), begin))

    @staticmethod
    def _write(file: BinaryIO, content: bytes | memoryview, begin: int) -> None:
        view = memoryview(content)
        while view:
            count = os.pwrite(file.fileno(), view[:files.CHUNK_BYTES], begin)
            view, begin = view[count:], begin + count

    def _try(self, what: Callable) -> None:
        try:
            what()
        except OSError as error:
            self.failed = self.failed or error

    def close(self) -> None:
        """Sync and close the files. All processes call it. Raises: CheckpointError, in every process, if any process
        could not write its files."""
        for file in self.open.values():
            self._try(lambda: os.fsync(file.fileno()))
            self._try(file.close)
        failures = agree.exchange(files.describe(self.failed) if self.failed else "")
        if faults := list(dict.fromkeys(filter(None, failures))):
            message = f"the weights could not be written: {'; '.join(faults)}"
            raise agree.mark_agreed(CheckpointError(message)) from self.failed


def _files(rows: Sequence[folder.WeightRow], num_layers: int, kind: str, shard_bytes: int,
           whole: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return file -> tensor -> shape. The order is: tensors before, in and after the layers. No tensor is split over
    files. whole: whether the folder has no other weight files."""
    first, *last = (row.tensors(None) for row in rows if not row.stacked)
    layers = (row.tensors(layer) for layer in range(num_layers) for row in rows if layer in row.layers)
    files, size = [{}], 0
    for name, shape in {name: shape for some in (first, *layers, *last) for name, shape in some.items()}.items():
        more = math.prod(shape) * safetensors.DTYPES[kind].itemsize
        if files[-1] and size + more > shard_bytes:
            files.append({})
            size = 0
        files[-1][name], size = shape, size + more
    names = [folder.SINGLE] if len(files) == 1 and whole else [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    return dict(zip(names, files, strict=True))


def is_grown(config: Mapping, family: Family, model: Model) -> bool:
    """Return whether the model has a larger vocabulary than the folder that it started from. config: the folder's
    config.json; {}: no folder. Raises: ValueError."""
    return bool(config) and settings.model_keys(config, family)["vocab_size"] < model.vocab_size


def write_companions(place: Path, source: Path | None, data: Mapping, names: Sequence[str], grown: bool) -> None:
    """Write the files of these names that `source` has, else the tokenizer of [data]; then the chat template that the
    run was trained with. grown: whether the vocabulary is larger than that of `source`; then the tokenizer of [data] is
    written. Raises: ValueError."""
    home, is_new = None, (grown or not source) and (path := tokenizer.local(data["tokenizer"])).is_file()
    if source:
        copy_companions(source, place, [name for name in names if not is_new or name not in model_folder.OF_VOCABULARY])
    if is_new:
        home = path.parent
        for file in tokenizer.files_of(path):
            shutil.copyfile(file, place / (tokenizer.FILE if file == path else file.name))
    given = data.get("chat_template", "")
    template_place = beside.local_template(given) if given else home
    if template_place and (template := beside.read_template(template_place, given)):
        files.write(place / beside.TEMPLATE, template[0])


def _drop_carried(place: Path, written: set[str]) -> None:
    """Remove tensors that the run has trained, and therefore written, from the carried ones."""
    carried = place / model_folder.CARRIED
    entries = safetensors.read_header(carried) if files.is_file(carried) else {}
    if entries.keys() & written:
        kept = {name: entry for name, entry in entries.items() if name not in written}
        if kept:
            safetensors.copy(kept, place / f"{carried.name}.tmp")
            os.replace(place / f"{carried.name}.tmp", carried)
        else:
            carried.unlink()


def _complete(place: Path, parts: Mapping[str, Mapping], size: int, config: dict) -> None:
    """Write the index and config.json."""
    if folder.SINGLE not in parts:
        weight_map = {tensor: name for name, tensors in parts.items() for tensor in tensors}
        if files.is_file(carried := place / model_folder.CARRIED):
            entries = safetensors.read_header(carried)
            weight_map |= dict.fromkeys(entries, model_folder.CARRIED)
            size += sum(entry.stop - entry.start for entry in entries.values())
        files.write(place / folder.INDEX,
                    json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1))
    files.write(place / settings.CONFIG, json.dumps(config, indent=1))
