"""The depths of multi-token prediction in model folders: which tensors are read, and which depths start anew."""
from __future__ import annotations

import dataclasses

from meshtrain.config.sections import Model
from meshtrain.huggingface import folder, settings
from meshtrain.names import DEPTH


def is_of_depth(row: folder.WeightRow) -> bool:
    """Return whether a row is of a depth of MTP."""
    return row.paths[0].startswith(DEPTH)


def take(opened: folder.Folder, model: Model, paths: folder.Paths) -> tuple[folder.Folder, folder.Paths]:
    """Return the folder with its tensors of MTP among the entries that are read, and the paths that it has. Depths that
    it lacks start from random weights, which a note says. Raises: ValueError if they cannot be computed."""
    named = {name for row in folder.rows(opened.family, model, paths) if is_of_depth(row) for name in row.tensors(None)}
    count = min(len(paths.depths), 1) if named & opened.carried.keys() else 0
    if count and settings.text_of(opened.config).get("mtp_use_dedicated_embeddings"):
        raise ValueError(f"{opened.directory}: {settings.CONFIG}: mtp_use_dedicated_embeddings=true: depths with an "
                         f"embedding of their own are not supported; use model.mtp_layers=0, which carries them")
    note = (f"model.mtp_layers={model.mtp_layers}: {opened.directory} has {count or 'none'} of these depths; the "
            f"others start from random weights")
    notes = opened.notes + (note,) * (count < len(paths.depths))
    entries = dict(opened.entries) | {name: opened.carried[name] for name in sorted(named & opened.carried.keys())}
    carried = {name: entry for name, entry in opened.carried.items() if name not in entries}
    return dataclasses.replace(opened, entries=entries, carried=carried, notes=notes), paths._replace(
        depths=paths.depths[:count])
