"""Names of pytree leaves by their paths, e.g. `layers/mlp/up/kernel`. Checkpoints, exports and adapters use them."""
from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax


def name(path: tuple[Any, ...]) -> str:
    """Return the path of a leaf, as jax gives it, joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return path -> leaf of any pytree."""
    return {name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def nest(leaves: Mapping[str, Any]) -> dict:
    """Return nested dicts with the leaves at their paths."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = leaf
    return tree
