"""Grows the vocabulary of a model folder: rows of the embedding and head for ids that the folder does not have.

A new row is the mean of the folder's rows plus a little noise: 1e-5 of their standard deviation. A new token then has
about the probability of an average token, and the loss on old text rises by less than ln(1 + new / old) (Hewitt 2021,
"Initializing new word embeddings"). Equal rows would get equal gradients from the head; the noise separates them. The
noise depends on run.seed and the id, and the mean is taken over the file in float64, so no layout changes a bit.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.config import ConfigError, Run
from meshtrain.config.messages import toml
from meshtrain.huggingface import folder, safetensors
from meshtrain.huggingface.weights import pretrained
from meshtrain.names import LORA_ALSO, PRNG
from meshtrain.run import say, trees

NOISE = 1e-5
CHUNK_ROWS = 4096


def grow(source: folder.Folder, run: Run, weights: dict) -> dict:
    """Return the weights, with new rows for the ids that the folder lacks, and print a line about the new rows, if
    there are any. All processes call it.

    weights: nested dicts of arrays, loaded from the folder; embedding and head are donated. Raises: ConfigError if
    embedding or head is quantized; CheckpointError if a file cannot be read.
    """
    old, new, leaves = source.model["vocab_size"], run.model.vocab_size, trees.leaves_of(weights)
    if new <= old:
        return weights
    ids, ends = np.arange(old, new), dict(zip(LORA_ALSO, folder.ends_of(source.family)))
    for number, (part, name) in enumerate(ends.items()):
        if part not in weights:
            continue        # the head is the embedding
        entry, path = source.entries[name], "embedding/table" if part == "embedding" else "head/kernel"
        if entry.dtype not in safetensors.DTYPES:
            raise ConfigError(f"model.vocab_size={new} adds rows to {name} of {source.directory}, which is quantized "
                              f"({entry.dtype}); leave model.vocab_size out")
        place = jax.jit(partial(_place, ids=ids, dim=path.count("kernel")), donate_argnums=0,
                        out_shardings=leaves[path].sharding)
        key = jax.random.fold_in(jax.random.key(run.run.seed, impl=PRNG), number)
        leaves[path] = place(leaves[path], *_moments(entry, old), key)
    say.out(f"ids {old} to {new - 1} are new: their rows are the mean of the {old} rows of {source.directory}, with "
            f"noise of {NOISE:g} standard deviations")
    parts = tuple(part for part in LORA_ALSO if part in weights)
    if run.lora.rank and set(parts) - set(run.lora.also):
        say.out(f"note: LoRA freezes new rows; lora.also={toml(parts)} trains them")
    return trees.nest(leaves)


def _place(leaf: jax.Array, mean: jax.Array, std: jax.Array, key: jax.Array, *, ids: np.ndarray, dim: int):
    """Return a table [V, D], or a head [D, V] (dim 1), with the rows of new ids."""
    noise_VD = jax.vmap(lambda id: jax.random.normal(jax.random.fold_in(key, id), mean.shape, jnp.float32))(ids)
    rows_VD = (mean + NOISE * std * noise_VD).astype(leaf.dtype)
    return jax.lax.dynamic_update_slice_in_dim(leaf, rows_VD.T if dim else rows_VD, int(ids[0]), dim)


def _moments(entry: safetensors.Entry, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, standard deviation) of the rows of a matrix [rows, D], float32."""
    width = entry.shape[1]
    total, squares = np.zeros((2, width))
    for begin in range(0, rows, CHUNK_ROWS):
        end = min(begin + CHUNK_ROWS, rows)
        part = pretrained.read(entry, begin * width, end * width).astype(np.float64).reshape(end - begin, width)
        total, squares = total + part.sum(0), squares + np.square(part).sum(0)
    mean = total / rows
    return mean.astype(np.float32), np.sqrt(np.maximum(squares / rows - mean**2, 0)).astype(np.float32)
