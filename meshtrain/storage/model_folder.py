"""The place of a Hugging Face model folder, on this host or at an address, and the files that accompany its weights.

`huggingface` reads the content of the files. A run file and a checkpoint need only the place.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from meshtrain.storage import addresses, copies, mirror

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
KEPT = "hf"     # in run.dir: companion files of the initial weights
CARRIED = "carried.safetensors"     # a companion file: tensors that are not part of the text model
# Companion files, copied along with the weights.
OF_VOCABULARY = ("tokenizer.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
OF_TOKENIZER = (*OF_VOCABULARY, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                "chat_template.json")
COMPANIONS = (CONFIG, "generation_config.json", *OF_TOKENIZER, "preprocessor_config.json", "processor_config.json",
              CARRIED)


def is_at(place: str | Path) -> bool:
    """Return whether a directory or an address is a model folder, i.e. has a config.json. Our runs have no config.json.
    False for "". Raises: as `local_path`."""
    if place == "" or addresses.is_remote(place) and copies.is_run(str(place)):
        return False
    return os.path.isfile(os.path.join(local_path(place), CONFIG))


def local_path(source: str | Path, *, weights: copies.Weights = "",
               tell: Callable[[str], None] = lambda line: None) -> Path:
    """Return the directory of a model folder or a run: the path itself, or this host's copy for an address.

    weights: how weights of a model folder are read, see `copies.Weights`; "": only companion files. tell: receives a
    line if copying takes long. Raises: StorageError (a ValueError) if the folder cannot be read; FileSystemError.
    """
    if not addresses.is_remote(source):
        return Path(source)
    source = str(source)
    if copies.is_run(source):
        return mirror.read(addresses.parse(source), lambda name: name.startswith(f"{KEPT}/"), within=KEPT)
    return copies.folder(source, (*COMPANIONS, INDEX), INDEX, ".safetensors", weights=weights, tell=tell)


def companion_folders(run_dir: str, init_from: str) -> list[Path]:
    """Return folders that may have companion files of a run's model: its own, and init_from (a model folder or run)."""
    there = [local_path(init_from), local_path(init_from) / KEPT] if init_from else []
    return [mirror.directory(run_dir) / KEPT, *there]
