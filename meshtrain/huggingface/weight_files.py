"""Finds the files of a folder's weights, and compares tensors in them.

The files are the files named by the index, or model.safetensors alone. The index must have plain *.safetensors names in
the folder; links are followed, as in the hub's cache. Two complete sets are refused. Pickles are never opened.
"""
from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path

import numpy as np

from meshtrain import files
from meshtrain.huggingface import safetensors
from meshtrain.storage import copies
from meshtrain.storage.model_folder import INDEX

SINGLE = "model.safetensors"
MOST_INDEX_BYTES = 100_000_000
TOLD = 8        # faults of one kind reported individually
CHUNK = 1 << 22     # numbers compared at a time


def entries(directory: Path) -> tuple[dict[str, safetensors.Entry], list[str]]:
    """Return (name -> entry of every tensor, notes). Raises: ValueError with a line for each fault."""
    index, notes = directory / INDEX, []
    weight_map = _weight_map(index) if os.path.lexists(index) else None
    files = sorted(set(weight_map.values())) if weight_map else [SINGLE]
    if weight_map and SINGLE not in files and _is_there(directory / SINGLE):
        if not (lacking := [file for file in files if not _is_there(directory / file)]):
            raise ValueError(f"{SINGLE}, and {INDEX} with its {len(files)} files, are two sets of weights; remove one "
                             f"of them (transformers reads {SINGLE})")
        notes.append(f"{SINGLE} is read instead of {INDEX}: {lacking[0]}, one of its {len(files)} files, is missing")
        weight_map, files = None, [SINGLE]
    if not weight_map and not _is_there(directory / SINGLE):
        pickles = sorted(path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        what = f"; {pickles[0]} is a pickle, which is not opened, because it can run code" if pickles else ""
        raise ValueError(f"there is no {SINGLE} and no {INDEX}{what}; save the model as safetensors")
    all_entries, faults = {}, []
    for file in files:
        try:
            here = safetensors.read_header(directory / file)
        except ValueError as error:
            faults.append(f"{file}: {error}")
            continue
        if twice := sorted(all_entries.keys() & here.keys()):
            faults.append(f"{file}: {twice[0]} is in {all_entries[twice[0]].path.name}, too")
        all_entries |= here
    if not faults and weight_map is not None:
        elsewhere = [f"{INDEX}: {name} is not in {file}" for name, file in sorted(weight_map.items())
                     if name not in all_entries or all_entries[name].path.name != file]
        faults = elsewhere[:TOLD] + and_more(elsewhere, "tensors that are not where the index says")
    if faults:
        raise ValueError("\n".join(faults))
    return all_entries, notes


def _weight_map(index: Path) -> dict[str, str]:
    if not files.is_file(index) or os.path.getsize(index) > MOST_INDEX_BYTES:
        raise ValueError(f"{INDEX} is not a file, or is larger than {MOST_INDEX_BYTES:,} bytes")
    text = files.attempt(index.read_bytes, f"{index} cannot be read", "make it readable")
    weight_map = safetensors.parse_json(text, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(
            isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{INDEX} has no weight_map, which maps names of tensors to files")
    for file in weight_map.values():
        if file != os.path.basename(file) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise ValueError(f"{INDEX}: {file[:80]!r} is not the plain name of a .safetensors file next to it, so it "
                             f"is not opened")
    return weight_map


def at_hand(directory: Path) -> bool:
    """Return whether the headers of a folder's weights can be read."""
    try:
        return bool(entries(directory))
    except ValueError:
        return False


def are_equal(one: safetensors.Entry, other: safetensors.Entry) -> bool:
    """Return whether two tensors hold the same numbers; False for quantized tensors, whose scales are separate. Reading
    stops at the first difference. Raises: ValueError if a tensor cannot be read."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= safetensors.DTYPES.keys():
        return False
    stamps = [0 if copies.remote(entry.path) else os.stat(entry.path).st_mtime_ns for entry in (one, other)]
    return files.attempt(lambda: _are_equal(one, other, *stamps), f"{one.path} cannot be read", "make it readable")


@functools.lru_cache(maxsize=8)
def _are_equal(one: safetensors.Entry, other: safetensors.Entry, *stamps: int) -> bool:
    count = math.prod(one.shape)
    for at in range(0, count, CHUNK):
        a, b = (safetensors.read(entry, at, min(at + CHUNK, count)) for entry in (one, other))
        if a.tobytes() != b.tobytes() if one.dtype == other.dtype else not np.array_equal(
                a.astype(np.float64), b.astype(np.float64)):
            return False
    return True


def _is_there(path: Path) -> bool:
    return os.path.lexists(path) or copies.remote(path) is not None


def and_more(faults: list[str], what: str) -> list[str]:
    return [f"… and {len(faults) - TOLD} more {what}"] if len(faults) > TOLD else []
