"""Sharding of weights and rows for inference: activations move, weights never do.

A token's matmuls read every weight once and multiply it with a few rows, so gathering a weight, as ZeRO-3 does, would
cost more than the matmul. `tensor` splits heads, MLP and vocabulary as in training. Other axes split the embedding dim
of every weight, whose partial products are summed. `data` splits rows.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshtrain import pattern
from meshtrain.model.layers import kv_heads
from meshtrain.model.transformer import Transformer
from meshtrain.sharding import rules
from meshtrain.sharding.rules import GATHERED, TABLES, Layout, Rules, Tensor

NAME = "the layout of generation"
SPLIT = ("heads", "kv_heads", "mlp", "vocab")
WHAT = {"heads": "query heads", "kv_heads": "key and value heads", "mlp": "width of the MLP",
        "vocab": "padded vocabulary", "embed": "width"}


def command(model: Transformer, sizes: Mapping[str, int]) -> Layout:
    """Return the layout on the user's mesh, data × fsdp × tensor. Raises: ValueError with every fault."""
    faults = [f"mesh.{axis}={sizes[axis]} has no use here: a model answers without stages, and its sequences stay "
              f"whole; leave it out, and use mesh.tensor or mesh.fsdp"
              for axis in ("stage", "context") if sizes[axis] > 1]
    def lay_out(sizes: Mapping[str, int], split: Sequence[str]) -> Layout:
        return _layout(model, sizes, ("data",), ("fsdp",), split)
    split: tuple[str, ...] = SPLIT
    layout = lay_out(sizes, split)
    if _find_undivided(model, layout, ("kv_heads",)):
        # Whole on every device, because they are few. A recurrent mixer's value heads are sharded like its key heads.
        recurrent = pattern.has(model.cfg, pattern.RECURRENT)
        split = tuple(logical for logical in SPLIT if logical != "kv_heads" and not (recurrent and logical == "heads"))
        layout = lay_out(sizes, split)
    if wrong := _find_undivided(model, layout, split):
        fitting = [n for n in range(1, sizes["tensor"] + 1)
                   if not _find_undivided(model, lay_out({**sizes, "tensor": n}, split), split)]
        faults.append(f"mesh.tensor={sizes['tensor']} does not divide this model's {' or '.join(wrong)}; use "
                      f"mesh.tensor={fitting[-1]}, and mesh.data or mesh.fsdp for other devices")
    if wrong := _find_undivided(model, layout, ("embed",)):
        faults.append(f"mesh.fsdp={sizes['fsdp']} does not divide this model's {wrong[0]}; use another, or mesh.data")
    if faults:
        raise ValueError("\n".join(faults))
    return layout


def within(model: Transformer, trained: Layout) -> Layout:
    """Return the layout for one row on a training mesh, in which no device holds more of the weights than in training.
    `tensor` splits the same dims as in training. All other axes split the embedding dim, as far as it divides."""
    split = _split_in(trained)
    embed: tuple[str, ...] = ()
    for axis in ("data", "fsdp", "context", "stage"):       # in [optimizer]'s order; stages arrive by an all-to-all
        if model.cfg.embed_dim % (math.prod(trained.sizes[a] for a in embed) * trained.sizes[axis]) == 0:
            embed += (axis,)
    return _layout(model, trained.sizes, (), embed, split)


def beside(model: Transformer, trained: Layout, given: Rules | None = None) -> Layout:
    """Return the layout for many rows on a training mesh, for example for the samples of RL.

    By default data, fsdp and context split rows, `tensor` splits the same dims as in training, and weights are
    replicated over the other axes. given: a rule file to use instead. Only its [params] and [activations] are read,
    without seq and residual_seq, because sequences grow by one token at a time. Raises: ValueError with every fault.
    """
    if trained.sizes["stage"] > 1:
        raise ValueError(f"mesh.stage={trained.sizes['stage']}: a model answers without stages; use mesh.stage=1")
    if given is None:
        split = _split_in(trained)
        rows = ("data", "fsdp", "context") if split else ("data", "fsdp", "tensor", "context")
        return _layout(model, trained.sizes, rows, (), split)
    tables = {name: {logical: axes for logical, axes in table.items() if logical not in ("seq", "residual_seq")}
              for name, table in given.tables.items()}
    given = Rules(tables, given.text, given.path, given.names)
    layout = Layout(model.fit(given, trained.sizes)[0], trained.sizes)
    tensors = [Tensor("params", info.name, info.shape, info.axes) for info in model.parameters()]
    faults = rules.problems(layout.rules, trained.sizes,
                            tensors + model.activations(layout.num_shards(layout.batch_axes), 1, layout))
    faults += _find_gathered(model, layout) + rules.unsplit(Layout(given, trained.sizes), model.products())[0]
    if faults:
        raise ValueError("\n".join(faults))
    return layout


def _find_gathered(model: Transformer, layout: Layout) -> list[str]:
    """Return faults of weights that every token would gather."""
    faults: dict[tuple[str | None, str], str] = {}
    for info in model.parameters():
        for logical in info.axes:
            split = layout.mesh_axes("params", logical)
            kept = () if logical == "expert_embed" else layout.mesh_axes(GATHERED, logical)
            if moved := [axis for axis in split if axis not in kept]:
                axes, other = ", ".join(moved), logical != "expert_embed"
                faults.setdefault((logical, axes), (
                    f"{layout.rules.path} [params] {logical} = {list(split)}: {info.name} would be gathered over "
                    f"{axes} for every token; take {axes} out of it{', or out of batch in [activations]' * other}"))
    return [*faults.values()]


def _split_in(trained: Layout) -> list[str]:
    """Return the dims of SPLIT that `tensor` splits in training."""
    split = [logical for logical in SPLIT if "tensor" in trained.rules.mesh_axes("params", logical)]
    return split + [logical for logical in ("kv_heads",) if "heads" in split and logical not in split]


def _layout(model: Transformer, sizes: Mapping[str, int], rows: tuple[str, ...], embed: tuple[str, ...],
            split: Sequence[str]) -> Layout:
    tensor = {logical: ("tensor",) for logical in split}
    weights = tensor | {"embed": embed}
    if model.cfg.num_experts:       # all tokens are on this device; only the experts' width is split, if it divides
        inner = tensor.get("mlp", ()) if model.cfg.expert_mlp_dim % sizes["tensor"] == 0 else ()
        weights |= {"expert_embed": embed, "expert_mlp": inner}
    tables = {name: tensor | {"batch": rows} if name == "activations" else weights for name in TABLES}
    fitted, _ = model.fit(Rules(tables, "", NAME), sizes)
    return Layout(fitted, sizes)


def _find_undivided(model: Transformer, layout: Layout, logicals: Sequence[str]) -> list[str]:
    """Return descriptions of the dims of weights and heads that their mesh axes do not divide."""
    dims = {(logical, dim) for info in model.parameters() for dim, logical in zip(info.shape, info.axes, strict=True)
            if logical in logicals and dim % layout.num_shards(layout.mesh_axes("params", logical))}
    for heads in (kv_heads(layout, n) for n in pattern.kv_heads_of(model.cfg).values()):
        if "kv_heads" in logicals and heads % layout.num_shards(layout.mesh_axes("activations", "kv_heads")):
            dims.add(("kv_heads", heads))
    return [f"{dim} ({WHAT[logical]})" for logical, dim in sorted(dims)]
