"""The logical axes of a tree of arrays: a tree of the same form, or globs of paths. The path of a leaf is a/b/0/c."""
from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from meshtrain.run import trees
from meshtrain.sharding.logical import nearest

Axes = tuple[str | None, ...]


def list_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return path -> leaf, in the order of jax.tree.leaves. Raises: ValueError if two leaves have the same path."""
    flat = [(trees.name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]]
    if twice := [name for name, count in Counter(name for name, _ in flat).items() if count > 1]:
        raise ValueError(f"params: {twice[0]} is the path of {len(flat) - len(dict(flat)) + 1} arrays; rename one of "
                         f"their keys")
    return dict(flat)


def match(leaves: Mapping[str, Any], given: Any) -> tuple[dict[str, Axes], list[str]]:
    """Return (path -> logical axes of the leaves that `given` names, faults).

    given: a tree with the same paths whose leaves are tuples with a name or None for each dim, or a dict from globs of
    paths to such tuples; `*` stands for any text. Each entry must name a leaf, and a leaf has one entry.
    """
    flat = jax.tree_util.tree_flatten_with_path(given, is_leaf=lambda x: x is None or _is_entry(x))[0]
    entries = {trees.name(path): entry for path, entry in flat}
    is_flat = isinstance(given, Mapping) and all(isinstance(key, str) and _is_entry(one) for key, one in given.items())
    matched: dict[str, Axes] = {}
    by: dict[str, str] = {}
    faults = []
    for path, entry in entries.items():
        names = [path] if path in leaves else [name for name in leaves if fnmatch.fnmatchcase(name, path)] * is_flat
        if entry is None or not names and _is_container(path, entry, leaves):
            continue
        if not names:
            faults.append(f"axes[{path!r}]: no parameter has this name{nearest(path, leaves)}")
        elif not _is_entry(entry):
            faults.append(f"axes[{path!r}] = {entry!r} is not a tuple with a name or None for each dim; write e.g. "
                          f"(\"embed\", \"mlp\")")
            matched |= {name: (None,) * np.ndim(leaves[name]) for name in names}
        else:
            faults += [f"axes: {by[name]!r} and {path!r} give {name} different axes; give it one entry"
                       for name in names if name in matched and matched[name] != tuple(entry)]
            matched |= dict.fromkeys(names, tuple(entry))
            by |= dict.fromkeys(names, path)
    return matched, faults


def _is_container(path: str, entry: Any, leaves: Mapping[str, Any]) -> bool:
    """Return whether an entry without names is no entry but a container: empty, or with None for each of its arrays."""
    inside = leaves if not path else [name for name in leaves if name.startswith(f"{path}/")]
    return isinstance(entry, Sequence) and not any(axis is not None for axis in entry) and (not entry or bool(inside))


def find_shape_faults(leaves: Mapping[str, Any], named: Mapping[str, Axes], remedy: str = "") -> list[str]:
    """Return a fault for each kind of leaf that does not have one axis for each dim, and one fault for all leaves of
    two or more dims without axes. remedy: where to write the axes. The layers of a list are one kind."""
    bare: dict[tuple, list[str]] = {}
    wrong: dict[tuple, list[str]] = {}
    for name, leaf in leaves.items():
        shape, axes = np.shape(leaf), named.get(name)
        if axes is None and len(shape) > 1:
            bare.setdefault((fold_layers(name), shape), []).append(name)
        elif axes is not None and len(axes) != len(shape):
            wrong.setdefault((fold_layers(name), shape, axes), []).append(name)
    faults = [f"{kind if len(names) > 1 else names[0]} {shape}: {len(shape)} dims, and {axes} names {len(axes)}; give "
              f"a name or None for each dim" for (kind, shape, axes), names in wrong.items()]
    if bare:
        shapes = {kind if len(names) > 1 else names[0]: shape for (kind, shape), names in bare.items()}
        first, shape = next(iter(shapes.items()))
        faults.insert(0, f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())}: no logical axes{remedy}; "
                         f"name the dims, e.g. axes={{{first!r}: (\"embed\", \"mlp\")}}, or write "
                         f"{(None,) * len(shape)} to keep an array whole on every device")
    return faults


def fold_layers(name: str) -> str:
    """Return the path of a leaf with `*` for the numbers of its layers: "blocks/*/up" for "blocks/3/up"."""
    return "/".join("*" if part.isdecimal() else part for part in name.split("/"))


def find_sizes(leaves: Mapping[str, Any], named: Mapping[str, Axes]) -> list[str]:
    """Return a note for each logical axis whose size differs between leaves, e.g. because dims are swapped."""
    at: dict[str, dict[int, str]] = {}
    for name, leaf in leaves.items():
        for axis, n in zip(named[name], np.shape(leaf)):
            if axis not in (None, "layers"):
                at.setdefault(axis, {}).setdefault(n, fold_layers(name))
    return [f"{axis} has {len(by)} sizes: {', '.join(f'{n} in {name}' for n, name in by.items())}; give dims of "
            "different sizes different names" for axis, by in at.items() if len(by) > 1]


def _is_entry(x: Any) -> bool:
    """Return whether x is the axes of one array."""
    return isinstance(x, (tuple, list, P)) and (type(x) is not list or len(x) > 0) and all(
        axis is None or isinstance(axis, str) for axis in x)
