"""The depths of multi-token prediction in model folders: which tensors are read, and which depths start anew."""
from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from meshtrain.config.sections import Model
from meshtrain.huggingface import folder, settings, spellings, weight_files
from meshtrain.huggingface.families import Family
from meshtrain.names import DEPTH


def of_row(row: folder.WeightRow) -> str:
    """Return the MTP depth that a row belongs to, e.g. mtp_1; "" if the row belongs to no depth."""
    key = row.paths[0].partition("/")[0]
    return key if key.startswith(DEPTH) else ""


def take(opened: folder.Folder, model: Model, paths: folder.Paths) -> tuple[folder.Folder, folder.Paths]:
    """Return (the folder, with its MTP tensors moved into `entries`; the paths, without the depths that the folder
    lacks). Such depths start from random weights, and a note says so. Raises: ValueError if the folder's depths are
    unsupported."""
    named: dict[str, set[str]] = {}
    for row in folder.rows(opened.family, model, paths, names=opened.carried):
        if depth := of_row(row):
            named.setdefault(depth, set()).update(row.tensors(None))
    there = [k for k in range(1, 1 + len(paths.depths)) if named.get(f"{DEPTH}{k}", set()) & opened.carried.keys()]
    count, copies = len(there), [pair for k in there for pair in _copies(opened.family, model, k).items()]
    own = ["mtp_use_dedicated_embeddings=true"] * bool(
        count and settings.text_of(opened.config).get("mtp_use_dedicated_embeddings"))
    own += [f"{name} differs from {of}" for name, of in copies if name in opened.carried and not (
        of in opened.entries and weight_files.are_equal(opened.carried[name], opened.entries[of]))]
    if own:
        raise ValueError(f"{opened.directory}: {own[0]}: depths with an embedding or a head of their own are not "
                         f"supported; use model.mtp_layers=0, which exports them unchanged")
    text, expected = settings.text_of(opened.config), settings.depth_sublayers(model)
    said = text.get("mtp_hybrid_override_pattern") or text.get("mtp_layers_block_type")
    names = said if isinstance(said, (list, str)) else [said]
    if count and said and [spellings.LAYER_NAMES.get(str(name), name) for name in names] != expected:
        raise ValueError(f"{opened.directory}: a depth has the layers {spellings.quote(said)}; only depths like the "
                         f"model's last attention layer, {spellings.quote(expected)}, are supported; use "
                         f"model.mtp_layers=0, which exports them unchanged")
    note = (f"model.mtp_layers={model.mtp_layers}: {opened.directory} has {count or 'none'} of these depths; the "
            f"others start from random weights")
    notes = opened.notes + (note,) * (count < len(paths.depths))
    read = {name for k in there for name in named[f"{DEPTH}{k}"]}
    read |= {f"{name}_scale_inv" for name in read}
    entries = dict(opened.entries) | {name: opened.carried[name] for name in sorted(read & opened.carried.keys())}
    carried = {name: entry for name, entry in opened.carried.items() if name not in entries.keys() | dict(copies)}
    return dataclasses.replace(opened, entries=entries, carried=carried, notes=notes), paths._replace(
        depths=tuple(paths.depths[k - 1] for k in there))


def add_copies(rows: Sequence[folder.WeightRow], family: Family, model: Model,
               carried: Collection[str]) -> list[folder.WeightRow]:
    """Return the rows, with additional rows for a depth's copies of embedding and head. carried: names of the tensors
    of the source. If the source has a depth without a copy, the depth is written without the copy."""
    written = {name: depth for row in rows if (depth := of_row(row)) for name in row.tensors(None)}
    names = [(copy, of) for k in range(1, 1 + model.mtp_layers) if f"{DEPTH}{k}" in written.values()
             for copy, of in _copies(family, model, k).items() if copy in carried or not any(
                 depth == f"{DEPTH}{k}" and name in carried for name, depth in written.items())]
    return [each for row in rows
            for each in (row, *(dataclasses.replace(row, name=copy) for copy, of in names if of == row.name))]


def _copies(family: Family, model: Model, depth: int) -> dict[str, str]:
    """Return the names of a depth's copies of embedding and head, each with the name of the tensor that the copy
    repeats."""
    prefix = f"{family.prefix}layers.{model.num_layers + depth - 1}."
    table, head = folder.ends_of(family)
    return {f"{prefix}embed_tokens.weight": table, f"{prefix}shared_head.head.weight": head} if any(
        "{d}" in name for name in family.tensors) else {}
