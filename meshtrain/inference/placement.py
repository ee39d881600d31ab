"""Sharding of weights and rows for inference: weights never move, activations do.

A token's matmuls read every weight once and multiply it with a few rows, so gathering a weight, as ZeRO-3 does, would
cost more than the product. `tensor` splits heads, MLP and vocabulary as in training; other axes split the embedding dim
of every weight, whose partial products are summed; `data` splits rows.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshtrain import pattern
from meshtrain.model.layers import kv_heads
from meshtrain.model import transformer
from meshtrain.model.transformer import Transformer
from meshtrain.sharding.rules import TABLES, Layout, Rules

NAME = "the layout of generation"
SPLIT = ("heads", "kv_heads", "mlp", "vocab")
WHAT = {"heads": "query heads", "kv_heads": "key and value heads", "mlp": "width of the MLP",
        "vocab": "padded vocabulary",
        "embed": "width"}


def command(model: Transformer, sizes: Mapping[str, int]) -> Layout:
    """The layout on a mesh of the user's: data × fsdp × tensor. Raises: ValueError with every fault."""
    faults = [f"mesh.{axis}={sizes[axis]} has no use here: a model answers without stages, and its sequences stay "
              f"whole; leave it out, and use mesh.tensor or mesh.fsdp"
              for axis in ("stage", "context") if sizes[axis] > 1]
    laid_out = lambda sizes, split: _layout(model, sizes, ("data",), ("fsdp",), split)
    layout, split = laid_out(sizes, SPLIT), SPLIT
    if _undivided(model, layout, ("kv_heads",)):
        # Whole on every device, as few as they are. A recurrent mixer's value heads lie with their key heads.
        recurrent = any(kind.mixer in pattern.RECURRENT for kind in pattern.kinds(model.cfg))
        split = tuple(logical for logical in SPLIT if logical != "kv_heads" and not (recurrent and logical == "heads"))
        layout = laid_out(sizes, split)
    if wrong := _undivided(model, layout, split):
        fitting = [n for n in range(1, sizes["tensor"] + 1)
                   if not _undivided(model, laid_out({**sizes, "tensor": n}, split), split)]
        faults.append(f"mesh.tensor={sizes['tensor']} does not divide this model's {' or '.join(wrong)}; use "
                      f"mesh.tensor={fitting[-1]}, and mesh.data or mesh.fsdp for other devices")
    if wrong := _undivided(model, layout, ("embed",)):
        faults.append(f"mesh.fsdp={sizes['fsdp']} does not divide this model's {wrong[0]}; use another, or mesh.data")
    if faults:
        raise ValueError("\n".join(faults))
    return layout


def within(model: Transformer, trained: Layout) -> Layout:
    """The layout for one row on a training mesh, in which no device holds more of the weights than in training.

    `tensor` splits the same dims; all other axes split the embedding dim as far as it divides.
    """
    split = [logical for logical in SPLIT if "tensor" in trained.rules.mesh_axes("params", logical)]
    split += [logical for logical in ("kv_heads",) if "heads" in split and logical not in split]
    embed: tuple[str, ...] = ()
    for axis in ("data", "fsdp", "context", "stage"):       # as [optimizer] lists them; stages come in by an all-to-all
        if model.cfg.embed_dim % (math.prod(trained.sizes[a] for a in embed) * trained.sizes[axis]) == 0:
            embed += (axis,)
    return _layout(model, trained.sizes, (), embed, split)


def _layout(model: Transformer, sizes: Mapping[str, int], rows: tuple[str, ...], embed: tuple[str, ...],
            split: Sequence[str]) -> Layout:
    tensor = {logical: ("tensor",) for logical in split}
    weights = tensor | {"embed": embed}
    if model.cfg.num_experts:       # tokens of all of them are here; only their width is split, where it divides
        inner = tensor.get("mlp", ()) if model.cfg.expert_mlp_dim % sizes["tensor"] == 0 else ()
        weights |= {"expert_embed": embed, "expert_mlp": inner}
    tables = {name: tensor | {"batch": rows} if name == "activations" else weights for name in TABLES}
    fitted, _ = model.fit(Rules(tables, "", NAME), sizes)
    return Layout(fitted, sizes)


def _undivided(model: Transformer, layout: Layout, logicals: Sequence[str]) -> list[str]:
    """Descriptions of the dims of weights and heads that their mesh axes do not divide."""
    dims = {(logical, dim) for info in model.parameters() for dim, logical in zip(info.shape, info.axes, strict=True)
            if logical in logicals and dim % layout.num_shards(layout.mesh_axes("params", logical))}
    for heads in (kv_heads(layout, n) for n in transformer.kv_heads_of(model.cfg).values()):
        if "kv_heads" in logicals and heads % layout.num_shards(layout.mesh_axes("activations", "kv_heads")):
            dims.add(("kv_heads", heads))
    return [f"{dim} ({WHAT[logical]})" for logical, dim in sorted(dims)]
