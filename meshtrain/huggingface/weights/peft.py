"""Exports a run's adapters as a PEFT folder (adapter_model.safetensors, adapter_config.json, and the tokenizer's files
with the chat template that the adapters learned), atomically.

The embedding and the head are written whole if they were trained, as PEFT's modules_to_save. If they are tied, both are
written, because PEFT does not tie them. PEFT's lora_A is [rank, in] and lora_B [out, rank], named after the family's
modules. A fused module (Phi-3's qkv_proj, GPT-2's c_attn) gets the concatenated A's and the block-diagonal B's: the
product is the same, and its rank is the sum of the ranks. Adapters of routed experts are written as adapters of PEFT's
target_parameters: for one tensor of all experts, lora_A [E·rank, in] and lora_B [out, rank·E]. The folder is written in
the same way as a model folder, see `export`.
"""
from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import files
from meshtrain.checkpoint.adapters import adapter_path
from meshtrain.cluster import agree
from meshtrain.config import Lora, Model, user_errors
from meshtrain.config.messages import toml
from meshtrain.huggingface import folder, safetensors, settings
from meshtrain.huggingface.families import TEXT_PREFIXES, Family
from meshtrain.huggingface.weights import export, new_folder
from meshtrain.huggingface.weights.ends import Ends, write_ends
from meshtrain.huggingface.weights.pretrained import parameter_paths, paths_of
from meshtrain.model.transformer import Transformer
from meshtrain.names import LORA_ALSO
from meshtrain.storage import addresses, model_folder

ALL = "[{e}]"       # end of the name of one expert's part of a tensor
WEIGHTS, CONFIG = "adapter_model.safetensors", new_folder.ADAPTERS
PREFIX = "base_model.model."


def write(target: new_folder.Target, transformer: Transformer, leaf: Callable[[str], jax.Array | None], *, dtype: str,
          base: str, data: Mapping, source: Path | None, ends: Ends) -> int:
    """Write the folder; return the bytes of its weights. All processes make the same call.

    leaf: path of an adapter's A or B -> parameter; None if the projection has no adapter. base: name or path of the
    base model. data: the section [data] of the training. source: a folder that gives the model's family, and whose
    tokenizer and templates are copied; None: both are made from `data`. ends: stop tokens of the model, written if the
    folder names others. Raises: as `export.write`.
    """
    model, places, of = transformer.cfg, transformer.places(), transformer.lora
    assert of is not None, "only a model with adapters exports them"
    with user_errors():
        theirs = agree.on_first(lambda: settings.read(source) if source else {})
        family = settings.family_of(theirs) if theirs else settings.family_for(model)
        grown = export.is_grown(theirs, family, model)
        # a multimodal model's modules, as transformers names them in memory
        prefixes = None if settings.text_of(theirs) is theirs else TEXT_PREFIXES[1]
        named = name_rows(family, model, transformer, prefixes)
        rows = [row for row in named if adapter_paths(transformer, row) and not row.expert]
        if apart := [row.name for row in rows if row.expert is not None and not row.name.endswith(ALL)]:
            raise ValueError(f"PEFT has no adapters for experts in the form that {family.model_type} uses "
                             f"({apart[0]}); export the merged model")
    whole = _whole_modules(of, model, family, named, prefixes)
    ranks = {row.name: of.rank * len(adapter_paths(transformer, row)) for row in rows}
    tensors: dict[str, tuple[int, ...]] = {
        _tensor_name(row, layer, matrix, rows): shape for layer in range(model.num_layers) for row in rows
        if layer in row.layers for matrix, shape in zip("AB", shapes(row, ranks[row.name]))}
    tensors |= {PREFIX + name: row.shape for name, row in whole.items()}
    modules = {row.name: row.name.removesuffix(".weight") for row in rows if row.expert is None}
    names = {name: _short(module, [*modules.values()]) for name, module in modules.items()}
    names |= {row.name: ".".join(row.name.removesuffix(ALL).split(".")[-3:]) for row in rows if row.expert == 0}
    config = _config(of, base, {names[name]: rank for name, rank in ranks.items()}, conv1d=family.model_type == "gpt2",
                     whole=[name.removesuffix(".weight").rpartition(".")[2] for name in whole])
    config["target_modules"] = sorted(names[name] for name in modules)
    if of_experts := [names[row.name] for row in rows if row.expert == 0]:
        config["target_parameters"] = of_experts
    with new_folder.writing(target) as place:
        written = export.Files(place, {WEIGHTS: tensors}, safetensors.NAMES[dtype])
        for row in rows:
            for stack in dict.fromkeys(places[layer][0] for layer in row.layers):
                leaves = [(leaf(adapter_path(path, "a")), leaf(adapter_path(path, "b")))
                          for path in paths_of(row, stack)]
                program = _program(row, leaves, written.dtype)
                for layer, index in [(layer, places[layer][1]) for layer in row.layers if places[layer][0] == stack]:
                    for matrix, array in zip("AB", program(leaves, np.int32(index)), strict=True):
                        written.put(_tensor_name(row, layer, matrix, rows), array)
        for name, row in whole.items():
            export.write_row(row, [leaf(path) for path in row.paths], PREFIX + name, written)
        written.close()

        def finish() -> None:
            files.write(place / CONFIG, json.dumps(config, indent=1))
            export.write_companions(place, source, data, model_folder.OF_TOKENIZER, grown)
            write_ends(place, source, ends)
        new_folder.on_first(target, finish)
    return written.size


def name_rows(family: Family, model: Model, transformer: Transformer,
              prefixes: tuple[str, str] | None = None) -> list[folder.WeightRow]:
    """Return the rows of a model with the names of transformers' modules in memory: one tensor for all experts, if the
    family has such a name. prefixes: as in `folder.rows`. Raises: ValueError."""
    whole = [name.removesuffix(ALL).replace("{l}", "0") for name in family.tensors if name.endswith(ALL)]
    return folder.rows(family, model, parameter_paths(transformer), prefixes, whole)


def _tensor_name(row: folder.WeightRow, layer: int, matrix: str, rows: Sequence[folder.WeightRow]) -> str:
    """Return the name of a tensor of an adapter. matrix: A or B. rows: all rows that have adapters. In PEFT, the
    experts' module has the adapter of the module's last tensor, and its base_layer has the adapters of its other
    tensors."""
    module, last = row.of_layer(layer).removesuffix(".weight"), [one.name for one in rows if one.expert == 0][-1:]
    if row.expert is not None:
        module = module.rpartition(".")[0] + ".base_layer" * ([row.name] != last)
    return f"{PREFIX}{module}.lora_{matrix}.weight"


def adapter_paths(transformer: Transformer, row: folder.WeightRow) -> list[str]:
    """Return the paths of a row's parameters that have adapters."""
    trainable = {info.name for info in transformer.parameters() if info.trainable}
    stacks = [transformer.places()[layer][0] for layer in row.layers][:1]
    return [path for stack in stacks for path in paths_of(row, stack) if adapter_path(path, "a") in trainable]


def shapes(row: folder.WeightRow, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of a row's lora_A and lora_B."""
    inputs, experts = row.shape[input_dim(row)], 1 if row.expert is None else row.sizes["E"]
    return (experts * rank, inputs), (math.prod(row.shape) // inputs, rank * experts)


def input_dim(row: folder.WeightRow) -> int:
    """Return the index of a stored matrix's input dim. The input dim contains the first dim of our parameter."""
    form = row.pieces[0].form
    return next(i for i, words in enumerate(form.theirs.dims) if form.ours.dims[0][0] in words)


def of_rank(row: folder.WeightRow, rank: int) -> folder.WeightRow:
    """Return the row of B: a matrix with `rank` inputs and the outputs of this row's matrix."""
    first, *others = row.pieces[0].form.theirs.dims[input_dim(row)]
    return dataclasses.replace(row, sizes={**row.sizes, **dict.fromkeys(others, 1), first: rank})


def _program(row: folder.WeightRow, leaves, dtype: np.dtype):
    """Return a jitted function (leaves, layer) -> (lora_A, lora_B), replicated on every device. leaves: (A, B) or
    (None, None) per parameter."""
    arrays = jax.tree.leaves(leaves)
    num_shards = {export.layer_shards(array) for array in arrays}
    assert len(num_shards) == 1, "all parameters of a stack are sharded alike over the stages"
    inputs = input_dim(row)

    def take_layer(leaves, layer):
        return jax.tree.map(lambda leaf: export.layer_of(leaf, layer, min(num_shards), dtype), leaves)

    def both(leaves):
        downs, ups = [], []
        for path, (a, b) in zip(row.paths, leaves, strict=True):
            if a is None:
                continue
            rank = a.shape[-1]
            # B, zero where other parameters are.
            small = of_rank(row, rank)
            parts = {other: jnp.zeros(small.our_shape(other), dtype) for other in row.paths}
            parts[path] = b.reshape(small.our_shape(path))
            up = small.to_theirs(parts, jnp.concatenate)
            ups.append(up if inputs else up.T)
            downs.append(a.reshape(-1, rank).T)
        return jnp.concatenate(downs), jnp.concatenate(ups, 1)

    def of_layer(leaves, layer):
        if row.expert is None:
            return both(take_layer(leaves, layer))
        downs, ups = jax.vmap(both)(take_layer(leaves, layer))       # [E, rank, in], [E, out, rank]
        return downs.reshape(-1, downs.shape[-1]), ups.transpose(1, 2, 0).reshape(ups.shape[1], -1)
    return jax.jit(of_layer, out_shardings=NamedSharding(arrays[0].sharding.mesh, P()))


def _short(module: str, modules: list[str]) -> str:
    """Return a module's short name, as written by PEFT's users, with one more component if the short name is ambiguous.
    """
    last = module.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in modules) == 1 else ".".join(module.split(".")[-2:])


def _whole_modules(of: Lora, model: Model, family: Family, rows: Sequence[folder.WeightRow],
                   prefixes: tuple[str, str] | None) -> dict[str, folder.WeightRow]:
    """Return name of a tensor -> its row, for what lora.also trains whole. Raises: ValueError for depths of MTP."""
    if "mtp" in of.also:
        raise ValueError(f"lora.also={toml(of.also)}: PEFT's format has no names for depths of multi-token prediction; "
                         f"export the merged model")
    names = dict(zip(LORA_ALSO, folder.ends_of(family)))
    if prefixes:
        names = {part: folder.name_in_whole(family, name, *prefixes) for part, name in names.items()}
    by_name = {row.name: row for row in rows}
    whole = {names[part]: by_name[names[part]] for part in of.also}
    return whole | ({names["head"]: by_name[names["embedding"]]} if whole and model.tie_embeddings else {})


def _config(of: Lora, base: str, ranks: dict[str, int], conv1d: bool, whole: list[str]) -> dict:
    """Return the content of adapter_config.json. Ranks other than lora.rank are written as patterns, with alphas that
    keep alpha / rank. A base model from the hub is given by its name and revision. whole: names of the modules that
    were trained whole."""
    revision = None
    if addresses.is_remote(base) and (parsed := addresses.parse(base)).scheme == addresses.HUB and not parsed.path:
        base, revision = parsed.home, parsed.revision or None
    others = {name: rank for name, rank in ranks.items() if rank != of.rank}
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "r": of.rank, "lora_alpha": of.alpha, "rank_pattern": others,
            "alpha_pattern": {name: of.alpha * rank / of.rank for name, rank in others.items()},
            "fan_in_fan_out": conv1d,
            "bias": "none", "lora_dropout": 0.0, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
            "modules_to_save": whole or None, "inference_mode": True, "revision": revision}
