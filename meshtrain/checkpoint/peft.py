"""Exports a run's adapters as a PEFT folder (adapter_model.safetensors, adapter_config.json), atomically.

PEFT's lora_A is [rank, in] and lora_B [out, rank], named after the family's modules. For a fused module (Phi-3's
qkv_proj, GPT-2's c_attn) the A's are concatenated and the B's block-diagonal: the same product, with the sum of the
ranks. Written as `run.export` writes a model.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import files
from meshtrain.checkpoint import export
from meshtrain.checkpoint.pretrained import paths_of
from meshtrain.cluster import agree
from meshtrain.config import user_errors
from meshtrain.huggingface import folder, forms, safetensors, settings
from meshtrain.huggingface.families import TEXT_PREFIXES
from meshtrain.model.transformer import Transformer
from meshtrain.names import LORA

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def write(directory: Path, transformer: Transformer, leaf: Callable[[str], jax.Array | None], *, dtype: str, base: str,
          source: Path | None) -> int:
    """Write the folder; return the bytes of its weights. All processes make the same call.

    leaf: path of an adapter's A or B -> parameter; None if the projection has no adapter. base: name or path of the
    base model. source: a folder that gives its family. Raises: as `export.write`.
    """
    model, places, of, sizes = transformer.cfg, transformer.places(), transformer.lora, forms.sizes_of(transformer.cfg)
    with user_errors():
        theirs = agree.on_first(lambda: settings.read(source) if source else {})
        family = settings.family_of(theirs) if theirs else settings.family_for(model)
        # a multimodal model's modules, as transformers names them in memory
        prefixes = None if settings.text_of(theirs) is theirs else TEXT_PREFIXES[1]
        rows = [row for row in folder.rows(family, model, transformer.names(), prefixes) if _adapted(transformer, row)]
    ranks = {row.name: of.rank * len(_adapted(transformer, row)) for row in rows}
    module = lambda row: row.name.removesuffix(".weight")
    tensors = {PREFIX + module(row).replace("{l}", str(layer)) + f".lora_{one}.weight": shape
               for layer in range(model.num_layers) for row in rows
               for one, shape in zip("AB", _shapes(row, ranks[row.name], sizes))}
    names = {row.name: _short(module(row), [module(other) for other in rows]) for row in rows}
    config = _config(of, base, {names[name]: rank for name, rank in ranks.items()}, conv1d=family.model_type == "gpt2")
    with export.new_folder(directory) as place:
        written = export.Files(place, {WEIGHTS: tensors}, safetensors.NAMES[dtype])
        for row in rows:
            for stack in dict.fromkeys(name for name, _ in places):
                leaves = [(leaf(_path(path, "a")), leaf(_path(path, "b"))) for path in paths_of(row, stack)]
                program = _program(row, leaves, sizes, written.dtype)
                for layer, index in [(layer, index) for layer, (name, index) in enumerate(places) if name == stack]:
                    for one, array in zip("AB", program(leaves, np.int32(index)), strict=True):
                        written.put(PREFIX + module(row).replace("{l}", str(layer)) + f".lora_{one}.weight", array)
        written.close()
        export.on_first(directory, lambda: files.write(place / CONFIG, json.dumps(config, indent=1)))
    return written.size


def _adapted(transformer: Transformer, row: folder.WeightRow) -> list[str]:
    """The parameters of a row that have adapters."""
    found = {info.name for info in transformer.parameters() if info.trainable}
    stacks = dict.fromkeys(name for name, _ in transformer.places())
    return [path for stack in list(stacks)[:1] if row.stacked for path in paths_of(row, stack)
            if path.endswith("/kernel") and _path(path, "a") in found]


def _path(kernel: str, name: str) -> str:
    return f"{kernel.rpartition('/')[0]}/{LORA}/{name}"


def _shapes(row: folder.WeightRow, rank: int, sizes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a row's lora_A and lora_B."""
    form = row.pieces[0].form
    inputs = _num_inputs(form, sizes)
    return (rank, inputs), (int(np.prod(row.shape)) // inputs, rank)


def _num_inputs(form: forms.Form, sizes) -> int:
    """Input size of a matrix: the dim of theirs that is the first of ours."""
    (group,) = [group for group in form.groups if form.ours[0] in group]
    return int(np.prod([sizes[letter] for letter in group]))


def _program(row: folder.WeightRow, leaves, sizes, dtype: np.dtype):
    """Jitted (leaves, layer) -> (lora_A, lora_B), replicated on every device. leaves: (A, B) or (None, None) per
    piece."""
    arrays = jax.tree.leaves(leaves)
    num_shards = {export.layer_shards(array) for array in arrays}
    assert len(num_shards) == 1, "all of a stack lie alike over the stages"
    one = lambda leaf, layer: export.layer_of(leaf, layer, min(num_shards), dtype)
    widths = [int(np.prod(piece.form.our_shape(sizes))) // _num_inputs(piece.form, sizes) for piece in row.pieces]

    def both(leaves, layer):
        downs, ups = [], []
        total = sum(a.shape[-1] for a, _ in leaves if a is not None)
        for (a, b), width in zip(leaves, widths, strict=True):
            before = sum(down.shape[0] for down in downs)
            if a is None:
                ups.append(jnp.zeros((width, total), dtype))
                continue
            rank = a.shape[-1]
            downs.append(one(a, layer).reshape(-1, rank).T)
            ups.append(jnp.pad(one(b, layer).reshape(rank, -1).T, [(0, 0), (before, total - before - rank)]))
        return jnp.concatenate(downs), jnp.concatenate(ups)
    return jax.jit(both, out_shardings=NamedSharding(arrays[0].sharding.mesh, P()))


def _short(module: str, modules: list[str]) -> str:
    """A module's short name, as PEFT's users write it; one component longer if ambiguous."""
    last = module.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in modules) == 1 else ".".join(module.split(".")[-2:])


def _config(of, base: str, ranks: dict[str, int], conv1d: bool) -> dict:
    """Ranks other than lora.rank are written as patterns, with alphas that keep alpha / rank."""
    others = {name: rank for name, rank in ranks.items() if rank != of.rank}
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "r": of.rank, "lora_alpha": of.alpha,
            "target_modules": sorted(ranks), "rank_pattern": others,
            "alpha_pattern": {name: of.alpha * rank / of.rank for name, rank in others.items()},
            "fan_in_fan_out": conv1d,
            "bias": "none", "lora_dropout": 0.0, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
            "modules_to_save": None, "inference_mode": True, "revision": None}
