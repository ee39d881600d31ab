"""Pytrees by the paths of their leaves, e.g. `layers/mlp/up/kernel`, the names in checkpoints, exports and adapters."""
from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax


def name(path) -> str:
    """The path of a leaf as jax gives it, as text."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_of(tree: Any) -> dict[str, Any]:
    """Path -> leaf of any pytree."""
    return {name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def nested(leaves: Mapping[str, Any]) -> dict:
    """Nested dicts from path -> leaf."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = leaf
    return tree
