"""Reads a PEFT folder: adapters that a LoRA run starts from, or that are merged into a model. The inverse of `peft`.

The tensors decide which projections of which layers have adapters; adapter_config.json gives their scales. Adapters of
a run have one rank and one scale. So smaller ranks are padded with zeros, layers without tensors are zero, and the
run's scale is the scale of the module with the largest rank; other scales are folded into B. The result is what PEFT
computes. A fused module (Phi-3's qkv_proj) has one A for several projections: each gets a copy. If B is block-diagonal,
as written by `peft`, each projection gets its block of the rank. An embedding and a head that were trained whole become
lora.also.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshtrain import files
from meshtrain.checkpoint import adapters
from meshtrain.config import Lora, Model
from meshtrain.huggingface import folder, safetensors, settings, weight_files
from meshtrain.huggingface.families import Family
from meshtrain.huggingface.weight_files import TOLD, and_more
from meshtrain.huggingface.weights import peft, pretrained
from meshtrain.model import lora, transformer
from meshtrain.model.params import ParamInfo
from meshtrain.model.transformer import Transformer
from meshtrain.names import LORA, LORA_ALSO, LORA_EXPERTS, LORA_TARGETS
from meshtrain.run import trees
from meshtrain.storage import addresses, copies, model_folder

PICKLE = "adapter_model.bin"
MATRIX = re.compile(r"(.+)\.lora_([AB])(\.[^.]+)?\.weight")      # older files have the adapter's name, .default
# Key of adapter_config.json -> the values that compute what is computed here; "" and null are among them.
ONLY: Mapping[str, tuple] = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM",), "bias": ("none",),
    # Other names change the weights of the base model before training.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
} | dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication",
                   "trainable_token_indices", "alora_invocation_tokens", "arrow_config",
                   "kasa_config", "velora_config", "monteclora_config", "loftq_config", "corda_config",
                   "lora_ga_config"), (False, [], {}))
NOT_READ = frozenset("""
    base_model_name_or_path revision auto_mapping peft_version inference_mode lora_dropout megatron_config megatron_core
    exclude_modules layers_pattern layers_to_transform target_modules target_parameters fan_in_fan_out
    qalora_group_size eva_config runtime_config ensure_weight_tying modules_to_save r lora_alpha rank_pattern
    alpha_pattern use_rslora
""".split())


@dataclasses.dataclass(frozen=True)
class AdaptedModule:
    """The adapter of one module of a layer. down: lora_A [rank, in]. up: lora_B [out, rank]. The module adds
    alpha / rank · up·down."""
    down: safetensors.Entry
    up: safetensors.Entry
    rank: int
    alpha: float


@dataclasses.dataclass(frozen=True, eq=False)
class PeftFolder:
    """An opened PEFT folder. rows: the rows of the base model whose modules may have adapters. modules: name of a
    tensor of the base model -> its adapter. blocks: kind of a row -> path of our parameter -> (block of the rank that
    the projection has, number of blocks). whole: the embedding and head that were trained whole. lora: the keys of
    [lora] that the folder decides. base: the name of the model that the adapters were trained on."""
    directory: Path
    rows: Sequence[folder.WeightRow]
    modules: Mapping[str, AdaptedModule]
    blocks: Mapping[str, Mapping[str, tuple[int, int]]]
    whole: folder.Folder
    lora: Mapping
    base: str
    notes: tuple[str, ...]


def local_path(place: str) -> Path:
    """Return the directory of a PEFT folder: the path itself, or this host's copy for an address. Raises: StorageError,
    a ValueError."""
    if not addresses.is_remote(place):
        return Path(place)
    address = addresses.parse(place)
    (copy,) = copies.copy_files([str(address / peft.CONFIG)], lambda name: [str(address / peft.WEIGHTS)],
                                copies.Copying(copies.home()))
    return copy.parent


def open_folder(place: str, base: str, model: Model) -> PeftFolder:
    """Open a PEFT folder for a model. base: the model folder or run.dir of the base model, which names its modules; "":
    the first family that computes the model names them. Raises: ValueError that lists every fault of the folder."""
    directory = local_path(place)
    given, entries = _read(directory)
    with _naming(directory):
        alphas = _Alphas(given)
    homes = [model_folder.local_path(base), model_folder.local_path(base) / model_folder.KEPT] if base else []
    home = next(filter(model_folder.is_at, homes), None)
    family = settings.family_of(settings.read(home)) if home else settings.family_for(model)
    plain = transformer.build(model)
    probe = transformer.build(model, Lora(rank=1, targets=lora.known_targets(
        layer.bind(layer.state) for group in plain.groups for layer in group.period)))
    every = peft.name_rows(family, model, probe)
    rows = {row.kind: row for row in every if row.stacked and not row.expert and _adapted_paths(probe, row)}
    named = {row.of_layer(layer): row for row in rows.values() for layer in row.layers}
    pairs, others = _pair(entries)
    pairs = {_name_parameter(module, pairs, given): pair for module, pair in pairs.items()}
    whole, others, faults = _find_whole(family, model, {name: entries[name] for name in others}, given)
    modules, faults = {}, _find_faults(given) + faults
    faults += [f"{name} is not read, only lora_A and lora_B of projections are" for name in others[:TOLD]]
    faults += and_more(others, "tensors that are not read")
    for module, pair in pairs.items():
        name = _name_in_family(family, module, named)
        if name is None or name in modules:
            faults.append(f"{module} is named twice" if name else
                          f"{module} is not a projection that can have an adapter here "
                          f"({', '.join((*LORA_TARGETS, *LORA_EXPERTS))})")
            continue
        modules[name] = AdaptedModule(*pair, *alphas.of(module))
        faults += [f"{module}.lora_{letter} is {list(entry.shape)} of {entry.dtype}; {peft.CONFIG} and the model "
                   f"require {list(shape)} of {', '.join(safetensors.DTYPES)}"
                   for entry, letter, shape in zip(pair, "AB", peft.shapes(named[name], modules[name].rank))
                   if entry.shape != shape or entry.dtype not in safetensors.DTYPES]
    if not pairs and not faults:
        faults.append(f"{peft.WEIGHTS} has no adapter")
    used = [row for row in rows.values() if any(row.of_layer(layer) in modules for layer in row.layers)]
    with _naming(directory):
        if faults:
            raise ValueError("\n".join(faults))
        blocks = {row.kind: _find_blocks(row, _adapted_paths(probe, row), modules, alphas.rank) for row in used}
    section = _section(used, modules, blocks) | {"also": tuple(
        part for part, name in zip(LORA_ALSO, folder.ends_of(family)) if name in whole)}
    return PeftFolder(directory, used + [row for row in every if row.name in whole], modules, blocks,
                      folder.Folder(directory, family, {}, {}, whole, {}), section,
                      str(given.get("base_model_name_or_path") or ""), tuple(_notes(given, pairs)))


@contextlib.contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Put the directory before each line of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError("\n".join(f"{directory}: {line}" for line in str(error).splitlines())) from None


def _adapted_paths(model: Transformer, row: folder.WeightRow) -> list[str]:
    """Return those of a row's paths that have adapters."""
    stack = model.places()[next(iter(row.layers))][0]
    own = peft.adapter_paths(model, row)
    return [path for path, of_stack in zip(row.paths, pretrained.paths_of(row, stack)) if of_stack in own]


def tell(found: PeftFolder) -> list[str]:
    """Return the lines for the user about a folder whose adapters are used."""
    size = sum(entry.stop - entry.start for entry in (
        *(entry for one in found.modules.values() for entry in (one.down, one.up)), *found.whole.entries.values()))
    also = "".join(f", and the {name}" for name in found.lora["also"])
    of = f"; they were trained on {found.base}" if found.base else ""
    return [*(f"note: {found.directory}: {note}" for note in found.notes),
            f"adapters of {len(found.modules)} modules{also} from {found.directory}, rank {found.lora['rank']}, "
            f"{size / 1e6:.2f} MB{of}"]


def load(found: PeftFolder, model: Transformer, weights: dict) -> dict:
    """Return the weights with the folder's adapters. All processes read all of them. weights: nested dicts of arrays
    with the adapters of `found.lora`. Raises: CheckpointError if a file cannot be read."""
    places = model.places()
    weights = pretrained.load(found.whole, [row for row in found.rows if not row.stacked], places, weights)
    leaves = trees.leaves_of(weights)
    left = {path for path in leaves if f"/{LORA}/" in path}
    for row in found.rows:
        for stack in dict.fromkeys(places[layer][0] for layer in row.layers):
            own = dict(zip(row.paths, pretrained.paths_of(row, stack)))
            arrays = {path: np.zeros(leaves[path].shape, np.float32) for kernel in own.values() for letter in "ab"
                      if (path := adapters.adapter_path(kernel, letter)) in left}
            for layer in row.layers:
                if places[layer][0] != stack or not (module := found.modules.get(row.of_layer(layer))):
                    continue
                for expert, matrices in enumerate(_read_module(found, row, module)):
                    at = places[layer][1] if row.expert is None else (places[layer][1], expert)
                    for path, (a, b) in matrices.items():
                        to_a, to_b = (arrays[adapters.adapter_path(own[path], letter)][at] for letter in "ab")
                        to_a[..., :len(b)] = a.reshape(*to_a.shape[:-1], -1)
                        to_b[:len(b)] = b.reshape(-1, *to_b.shape[1:])
            leaves |= {path: _place(array, leaves[path]) for path, array in arrays.items()}
            left -= arrays.keys()
    leaves |= {path: _place(np.zeros(leaves[path].shape, np.float32), leaves[path]) for path in left}
    return trees.nest(leaves)


def _place(array: np.ndarray, like) -> jax.Array:
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index].astype(like.dtype))


def merge(found: PeftFolder, base: Transformer, sharding_of: Callable[[ParamInfo], NamedSharding],
          weights: dict) -> dict:
    """Return the weights of a model without adapters, with the folder's adapters merged into their kernels in float32.
    base: the model. sharding_of: sharding of a parameter."""
    model = transformer.build(base.cfg, Lora(**found.lora))
    own = {info.name: jnp.zeros(info.shape, info.dtype, device=sharding_of(info))
           for info in model.parameters() if LORA in info.path}
    leaves = trees.leaves_of(load(found, model, trees.nest(trees.leaves_of(weights) | own)))
    return trees.nest(adapters.merge_all(leaves, found.lora["alpha"] / found.lora["rank"], None))


# ---- the files -------------------------------------------------------------------------------------------------------


def _read(directory: Path) -> tuple[dict, dict[str, safetensors.Entry]]:
    """Return (adapter_config.json, the entries of the weights). Raises: ValueError."""
    if not files.is_file(directory / peft.CONFIG):
        raise ValueError(f"{directory} has no {peft.CONFIG}, so it is not a PEFT folder; give one, as PEFT's "
                         "save_pretrained or meshtrain.convert RUN_DIR OUT --adapters writes it")
    if not files.is_file(directory / peft.WEIGHTS):
        pickle = f"; {PICKLE} is a pickle, which is not opened, because it can run code" if os.path.lexists(
            directory / PICKLE) else ""
        raise ValueError(f"{directory} has no {peft.WEIGHTS}{pickle}; save the adapters as safetensors")
    given = settings.read(directory, peft.CONFIG)
    try:
        return given, safetensors.read_header(directory / peft.WEIGHTS)
    except ValueError as error:
        raise ValueError(f"{directory / peft.WEIGHTS} {error}") from None


def _find_faults(given: Mapping) -> list[str]:
    """Return the keys of adapter_config.json that change the computation and are not supported."""
    faults = []
    for key, value in given.items():
        allowed = ONLY.get(key)
        # 1 == True in Python, but not here
        if value is None or value in ("", [], {}) or any(type(value) is type(one) and value == one
                                                         for one in allowed or ()):
            continue
        if allowed:
            faults.append(f"{peft.CONFIG}: {key}={json.dumps(value)} is not supported; merge these adapters with PEFT, "
                          f"and use the merged model")
        elif key not in NOT_READ and value is not False:
            faults.append(f"{peft.CONFIG}: the key {key}={json.dumps(value)} is unknown here")
    if not given.get("peft_type"):
        faults.append(f'{peft.CONFIG}: there is no peft_type; only "LORA" is read')
    return faults


class _Alphas:
    """The ranks and alphas of modules. Raises: ValueError if those of adapter_config.json are no numbers."""

    def __init__(self, given: Mapping):
        self.rank, self.alpha = given.get("r", 8), given.get("lora_alpha", 8)       # PEFT's defaults
        self.ranks, self.alphas = (given.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
        self.root = bool(given.get("use_rslora"))
        for key, kind, default, patterns in (("r", int, self.rank, self.ranks),
                                             ("lora_alpha", (int, float), self.alpha, self.alphas)):
            if not isinstance(patterns, dict):
                raise ValueError(f"{peft.CONFIG}: the patterns of {key} are not a table: {json.dumps(patterns)}")
            for name, value in {key: default, **patterns}.items():
                if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= 2**20:
                    raise ValueError(f"{peft.CONFIG}: {name}={json.dumps(value)} must be a number above 0"
                                     + ", and whole" * (kind is int))
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{peft.CONFIG}: the pattern {pattern!r} of {key} is not a regular expression: "
                                     f"{error}") from None

    def of(self, module: str) -> tuple[int, float]:
        """Return (rank, alpha) of a module. The first pattern that matches applies, as in PEFT. The scale of the module
        is alpha / rank."""
        def of_patterns(patterns: Mapping, default):
            return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
        rank, alpha = of_patterns(self.ranks, self.rank), of_patterns(self.alphas, self.alpha)
        return rank, alpha * math.sqrt(rank) if self.root else float(alpha)


def _pair(entries: Mapping[str, safetensors.Entry]) -> tuple[
        dict[str, tuple[safetensors.Entry, safetensors.Entry]], list[str]]:
    """Return (module -> its lora_A and lora_B, names of other tensors)."""
    matrices: dict[str, dict[str, safetensors.Entry]] = {}
    names: dict[str, str] = {}
    for name, entry in entries.items():
        if (match := MATRIX.fullmatch(name.removeprefix(peft.PREFIX))) and match[2] not in matrices.get(match[1], ()):
            matrices.setdefault(match[1], {})[match[2]] = entry
            names[name] = match[1]
    pairs = {module: (pair["A"], pair["B"]) for module, pair in matrices.items() if len(pair) == 2}
    return pairs, sorted(name for name in entries if names.get(name) not in pairs)


def _name_parameter(module: str, modules: Collection[str], given: Mapping) -> str:
    """Return the name of the experts' tensor that an adapter of target_parameters adapts; for any other module, the
    module's name.

    If both tensors have adapters, the module has the adapter of down_proj, and its base_layer has the adapter of
    gate_up_proj.
    """
    home = module.removesuffix(".base_layer")
    if not home.endswith(".experts"):
        return module
    names = {"gate_up_proj", "down_proj"} & {
        str(name).rpartition(".")[2] for name in given.get("target_parameters") or ()}
    if f"{home}.base_layer" in modules:
        names &= {"gate_up_proj"} if module != home else {"down_proj"}
    return f"{home}.{names.pop()}" if len(names) == 1 else module


def _name_in_family(family: Family, module: str, known: Collection[str]) -> str | None:
    """Return the family's name of a module's weight; None if the name is not in `known`. transformers has had different
    names for the text model in a multimodal model, and a model without a head has no prefix."""
    name = module if ".experts." in module else f"{module}.weight"
    return next((own for own in (name, folder.name_in_text(family, name), family.prefix + name) if own in known), None)


def _find_whole(family: Family, model: Model, others: Mapping[str, safetensors.Entry],
                given: Mapping) -> tuple[dict[str, safetensors.Entry], list[str], list[str]]:
    """Return (the family's name of the embedding or head -> its tensor, names of the other tensors, faults).

    others: the tensors that are no adapters. PEFT saves a changed embedding even if modules_to_save does not name the
    embedding.
    """
    table, head = ends = folder.ends_of(family)
    whole: dict[str, safetensors.Entry] = {}
    left: list[str] = []
    for name, entry in others.items():
        module = name.removeprefix(peft.PREFIX).replace(".modules_to_save.default", "").removesuffix(".weight")
        own = _name_in_family(family, module, ends)
        left += [] if own else [name]
        whole |= {own: entry} if own else {}
    short = {own.removesuffix(".weight").rpartition(".")[2]: own for own in ends}
    faults = []
    for name in given.get("modules_to_save") or ():
        own = short.get(str(name).rpartition(".")[2])
        if own not in whole:
            faults.append(f"{peft.CONFIG}: modules_to_save has {name}, " + (
                f"but {peft.WEIGHTS} has no {own}" if own else f"which is not read; only {', '.join(short)} are"))
    shape = (model.vocab_size, model.embed_dim)
    faults += [f"{own} is {list(entry.shape)} of {entry.dtype}; the model requires {list(shape)}"
               for own, entry in whole.items() if entry.shape != shape or entry.dtype not in safetensors.DTYPES]
    if model.tie_embeddings and (own_head := whole.pop(head, None)) and not faults:
        if table not in whole or not weight_files.are_equal(whole[table], own_head):
            faults.append(f"{head} differs from {table}, which the model ties to it; merge these adapters with PEFT, "
                          "and use the merged model")
    return whole, left, faults


def _notes(given: Mapping, pairs: Mapping) -> Iterator[str]:
    if given.get("lora_dropout"):
        yield f"lora_dropout={given['lora_dropout']}, used in its training, is not applied here"
    targets = given.get("target_modules")
    if isinstance(targets, list):
        absent = sorted(str(name) for name in targets if not any(
            module == name or module.endswith(f".{name}") for module in pairs))
        if absent:
            yield f"target_modules names {', '.join(absent[:TOLD])}, for which there are no tensors"


# ---- the matrices ----------------------------------------------------------------------------------------------------


def _find_blocks(row: folder.WeightRow, adapted: Sequence[str], modules: Mapping[str, AdaptedModule],
                 rank: int) -> dict[str, tuple[int, int]]:
    """Return path -> (block of the rank that the projection has, number of blocks) of a row.

    A projection whose part of B is zero in every layer has no adapter. adapted: the paths that may have adapters. rank:
    r of adapter_config.json. Raises: ValueError if another part of B is not zero.
    """
    if len(row.paths) == 1:
        return {adapted[0]: (0, 1)}
    here = [modules[name] for layer in row.layers if (name := row.of_layer(layer)) in modules]
    # path -> for each layer, the columns of B that are not zero
    columns = {path: [parts[path].any(1) for module in here for parts in _parts_of_up(row, module)]
               for path in row.paths}
    learned = [path for path in row.paths if any(map(np.any, columns[path]))]
    if foreign := [path for path in learned if path not in adapted]:
        raise ValueError(f"{row.name.removesuffix('.weight')} also adapts {', '.join(foreign)}, which can have no "
                         f"adapter here")
    parts = learned or list(adapted)
    count, ranks = len(parts), {module.rank for module in here}
    in_blocks = all(n % count == 0 for n in ranks) and all(
        not np.delete(own.reshape(count, -1), i, 0).any() for i, path in enumerate(parts) for own in columns[path])
    # Where nothing is learned yet, only the rank tells that `peft` wrote the blocks.
    if in_blocks and (learned or ranks == {rank * count}):
        return {path: (i, count) for i, path in enumerate(parts)}
    return dict.fromkeys(parts, (0, 1))


def _section(rows: Sequence[folder.WeightRow], modules: Mapping[str, AdaptedModule],
             blocks: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict:
    """Return rank, alpha and targets of [lora]."""
    shares = [(module.rank // count, module.alpha / count) for row in rows for layer in row.layers
              if (module := modules.get(row.of_layer(layer))) for _, count in blocks[row.kind].values()]
    rank = max(rank for rank, _ in shares)
    alphas = [alpha for of, alpha in shares if of == rank]
    names = {adapters.target_of(path) for of in blocks.values() for path in of}
    return {"rank": rank, "alpha": max(alphas, key=alphas.count),
            "targets": tuple(name for name in (*LORA_TARGETS, *LORA_EXPERTS) if name in names)}


def _read_module(found: PeftFolder, row: folder.WeightRow,
                 module: AdaptedModule) -> Iterator[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield path -> (A [in, rank], B [rank, out…]) of a module's projections (of each expert), with the run's scale."""
    factor = module.alpha / module.rank / (found.lora["alpha"] / found.lora["rank"])
    for down, ups in zip(_numbers(module.down).reshape(-1, module.rank, row.shape[peft.input_dim(row)]),
                         _parts_of_up(row, module), strict=True):
        matrices = {}
        for path, (block, count) in found.blocks[row.kind].items():
            each = module.rank // count
            here = slice(block * each, (block + 1) * each)
            b = ups[path][here]
            # Equal scales may differ in their last bits.
            b = b if abs(factor - 1) < 1e-12 else (b * np.float64(factor)).astype(np.float32)
            matrices[path] = down[here].T, b
        yield matrices


def _parts_of_up(row: folder.WeightRow, module: AdaptedModule) -> Iterator[dict[str, np.ndarray]]:
    """Yield path -> B [rank, out…] of each projection in a module; of each expert."""
    up, small = _numbers(module.up), peft.of_rank(row, module.rank)
    for each in np.moveaxis(up.reshape(len(up), module.rank, -1), 2, 0):
        yield {path: b.reshape(module.rank, -1) for path, b in small.to_ours(
            each if peft.input_dim(row) else each.T, np.concatenate).items()}


def _numbers(entry: safetensors.Entry) -> np.ndarray:
    return pretrained.read(entry, 0, math.prod(entry.shape)).astype(np.float32).reshape(entry.shape)
