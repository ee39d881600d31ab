"""Opens and checks a model folder and matches it with the parameters of our model, before reading any weights.

Files are those of the index, which must be plain *.safetensors names in the folder (links are followed, as the hub's
cache has them), or model.safetensors alone. Pickles are never opened. All faults are reported together.
"""
from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from meshtrain import files
from meshtrain.huggingface import forms, safetensors, settings
from meshtrain.huggingface.families import TEXT_PREFIXES, Family

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
KEPT = "hf"     # in run.dir: companions of the initial weights
CARRIED = "carried.safetensors"     # among companions: tensors of a multimodal model beside those of its text model
MOST_INDEX_BYTES = 100_000_000
TOLD = 8        # faults of one kind reported individually
# Buffers that some writers save; not parameters.
BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
# Companion files, copied along with the weights.
COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
              "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
              "processor_config.json", CARRIED)


@dataclasses.dataclass(frozen=True)
class WeightPiece:
    """One parameter of ours within a Hugging Face tensor. first: its offset along the form's star."""
    path: str
    form: forms.Form
    first: int


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """A Hugging Face tensor (or one per layer) and its parameters of ours. Each expert has a row, though ours are
    stacked.

    kind: equal for all experts' rows. expert: its number.
    """
    name: str       # with {l} for a layer's number
    pieces: tuple[WeightPiece, ...]
    shape: tuple[int, ...]
    kind: str
    expert: int | None = None

    @property
    def stacked(self) -> bool:
        return "{l}" in self.name

    def at(self, index: int) -> tuple[int, ...]:
        """Indices of the row in our stack. index: of the layer in the stack."""
        return (index,) * self.stacked + (() if self.expert is None else (self.expert,))

    def of_layer(self, layer: int) -> str:
        return self.name.replace("{l}", str(layer))


@dataclasses.dataclass(frozen=True)
class Folder:
    """An opened folder. model: the keys of [model] that it fixes. entries: of the text model, under its family's names.
    carried: the other tensors of a multimodal model, under the folder's names."""
    directory: Path
    family: Family
    config: Mapping
    model: Mapping
    entries: Mapping[str, safetensors.Entry]
    carried: Mapping[str, safetensors.Entry]


def companions_of(run_dir: str, init_from: str) -> list[Path]:
    """Folders that may have companion files of a run's model: the run's own, and init_from (a model folder or a run).
    """
    return [Path(run_dir) / KEPT, *([Path(init_from), Path(init_from) / KEPT] if init_from else [])]


def companions(directory: Path) -> list[Path]:
    """The files of a folder that accompany its weights. Raises: ValueError if one is a link out of the folder, which
    might expose e.g. a private key; links to the blobs beside the hub cache's snapshots are allowed."""
    real, found, faults = directory.resolve(), [], []
    blobs = real.parent.parent / "blobs" if real.parent.name == "snapshots" else real
    for path in filter(Path.is_file, (directory / name for name in COMPANIONS)):
        target = path.resolve()
        if real not in target.parents and target.parent != blobs:
            faults.append(f"{path.name} is a link to {target}, outside the folder, and is not copied; put the file "
                          f"itself there")
        found.append(path)
    if faults:
        raise _at(directory, faults)
    return found


def is_one(directory: str | os.PathLike) -> bool:
    """Whether a directory looks like a model folder; our runs have no config.json. "" is no directory."""
    return directory != "" and os.path.isfile(os.path.join(directory, settings.CONFIG))


def settings_of(directory: Path) -> dict:
    """`settings.model_keys` of a folder, without looking at its weights. Raises: ValueError."""
    try:
        return settings.model_keys(config := settings.read(directory), settings.family_of(config))
    except ValueError as error:
        raise _at(directory, str(error).splitlines()) from None


def open_folder(directory: Path) -> Folder:
    """Raises: ValueError listing the faults of config.json, the index and every file's header."""
    def described():
        family = settings.family_of(config := settings.read(directory))
        return family, config, settings.model_keys(config, family)

    found, faults = [], []
    for read in (described, lambda: (_entries(directory),)):
        try:
            found += read()
        except ValueError as error:
            faults += str(error).splitlines()
    if faults:
        raise _at(directory, faults)
    family, config, model, entries = found
    carried = {}
    if settings.text_of(config) is not config:
        named = {name: _name_in_text(family, name) for name in entries}
        carried = {name: entry for name, entry in entries.items() if named[name] is None}
        entries = {named[name]: entry for name, entry in entries.items() if named[name] is not None}
    return Folder(directory, family, config, model, entries, carried)


def carried(directory: Path) -> Mapping[str, safetensors.Entry]:
    """The tensors of a multimodal folder beside those of its text model; none without weights. Raises: ValueError."""
    if not is_one(directory) or not any(os.path.lexists(directory / name) for name in (INDEX, SINGLE)):
        return {}
    config = settings.read(directory)
    return {} if settings.text_of(config) is config else open_folder(directory).carried


def prefixes_of(directory: Path) -> tuple[str, str] | None:
    """The TEXT_PREFIXES that an export takes from a multimodal folder or its companions; None: it is of text alone."""
    config, kept = settings.read(directory), directory / CARRIED
    if settings.text_of(config) is config:
        return None
    names = safetensors.read_header(kept) if files.is_file(kept) else carried(directory)
    return TEXT_PREFIXES[any(name.startswith("model.") for name in names)]


def _name_in_text(family: Family, name: str) -> str | None:
    """A tensor of a multimodal folder under its family's name; None if it is not of the text model."""
    for base, head in TEXT_PREFIXES:
        if name.startswith(base):
            return family.prefix + name.removeprefix(base)
        if name == f"{head}lm_head.weight":
            return "lm_head.weight"
    return None


def _name_in_whole(family: Family, name: str, base: str, head: str) -> str:
    """Inverse of `_name_in_text`."""
    return base + name.removeprefix(family.prefix) if name.startswith(family.prefix) else head + name


def rows(family: Family, model, paths, prefixes: tuple[str, str] | None = None) -> list[WeightRow]:
    """The tensors of a model under a family's names. model: keys of [model] as attributes. paths: its parameters.
    prefixes: of TEXT_PREFIXES, for the names in a multimodal folder.

    Raises: ValueError if the family has no name for a parameter.
    """
    sizes, found, covered = forms.sizes_of(model), [], set()
    for name, texts in family.tensors.items():
        parsed = [(path, forms.parse(form)) for path, _, form in (text.partition(": ") for text in texts)]
        if not all(path in paths for path, _ in parsed):
            continue
        star, shape = parsed[0][1].star, list(parsed[0][1].their_shape(sizes))
        lengths = [form.their_shape(sizes)[star or 0] for _, form in parsed]
        firsts = [0, *itertools.accumulate(lengths)]
        shape[star or 0] = firsts[-1] if star is not None else shape[0]
        pieces = tuple(WeightPiece(path, form, first) for (path, form), first in zip(parsed, firsts))
        named = _name_in_whole(family, name, *prefixes) if prefixes else name
        for expert in range(model.num_experts) if "{e}" in name else (None,):
            found.append(WeightRow(named.replace("{e}", str(expert)), pieces, tuple(shape), name, expert))
        covered |= {path for path, _ in parsed}
    if missing := set(paths) - covered:
        raise ValueError(f"{family.model_type} has no name for {', '.join(sorted(missing))}")
    return found


def scales_of(folder: Folder, name: str) -> safetensors.Entry | None:
    """The scales of a float8 tensor, one for each block; None: it has none."""
    return folder.entries.get(f"{name}_scale_inv") if folder.entries[name].dtype == "F8_E4M3" else None


def _has_scales(folder: Folder, name: str) -> bool:
    """Whether a float8 tensor has the scales with which it can be read."""
    entry, scales, block = folder.entries[name], scales_of(folder, name), settings.scale_block(folder.config)
    return (scales is not None and block is not None and scales.dtype in safetensors.READABLE
            and len(entry.shape) == 2 and scales.shape == tuple(-(-size // n) for size, n in zip(entry.shape, block)))


def match(folder: Folder, model, paths) -> list[WeightRow]:
    """The rows of a model, each with a tensor of the folder, under the folder's names.

    Raises: ValueError listing all missing, unexpected, misshapen tensors and unsupported dtypes.
    """
    if model.num_experts > len(folder.entries) and any("{e}" in name for name in folder.family.tensors):
        raise _at(folder.directory, [f"{settings.CONFIG} says {model.num_experts:,} experts, and there are "
                                     f"{len(folder.entries):,} tensors; an expert has at least one"])
    wanted, left = rows(folder.family, model, paths), set(folder.entries)
    if not any(name.startswith(folder.family.prefix) for name in left):     # a bare model, without head
        wanted = [dataclasses.replace(row, name=row.name.removeprefix(folder.family.prefix)) for row in wanted]
    absent, wrong, quantized = [], [], []
    # No more layers than tensors, whatever config.json says.
    layers = range(min(model.num_layers, len(left) + 1))
    for row in wanted:
        for name in map(row.of_layer, layers) if row.stacked else [row.name]:
            entry = folder.entries.get(name)
            left.discard(name)
            if entry is None:
                absent.append(name)
                continue
            if entry.dtype == "F8_E4M3":
                left.discard(f"{name}_scale_inv")
            if entry.dtype not in safetensors.DTYPES and not _has_scales(folder, name):
                quantized.append(f"{name} is {entry.dtype}; only {', '.join(safetensors.DTYPES)} are read, and F8_E4M3 "
                                 f"with {name}_scale_inv, a scale for each block of weight_block_size")
            elif entry.shape != row.shape:
                wrong.append(f"{name} is {list(entry.shape)}; {settings.CONFIG} asks for {list(row.shape)}")
    if model.tie_embeddings:
        left.discard("lm_head.weight")      # tied to the embedding
    extra = sorted(name for name in left if not BUFFERS.fullmatch(name))
    faults = [f"{name} is absent{_near(name, extra)}" for name in absent[:TOLD]] + _more(absent, "absent tensors")
    faults += wrong[:TOLD] + _more(wrong, "tensors of another shape")
    faults += quantized[:TOLD] + _more(quantized, "quantized tensors")
    faults += [f"{name} is not a tensor of this model" for name in extra[:TOLD]] + _more(extra, "superfluous tensors")
    if faults:
        raise _at(folder.directory, faults)
    return wanted


def _entries(directory: Path) -> dict[str, safetensors.Entry]:
    index = directory / INDEX
    if os.path.lexists(index):
        weight_map = _weight_map(index)
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, [SINGLE]
        if not os.path.lexists(directory / SINGLE):
            pickles = sorted(path.name for path in directory.glob("*")
                             if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
            what = (f"; {pickles[0]} is a pickle, which can run code when it is opened, and stays closed"
                    if pickles else "")
            raise ValueError(f"there is no {SINGLE} and no {INDEX}{what}; save the model as safetensors")
    entries, faults = {}, []
    for file in files:
        try:
            found = safetensors.read_header(directory / file)
        except ValueError as error:
            faults.append(f"{file}: {error}")
            continue
        if twice := sorted(entries.keys() & found.keys()):
            faults.append(f"{file}: {twice[0]} is in {entries[twice[0]].path.name}, too")
        entries |= found
    if not faults and weight_map is not None:
        elsewhere = [f"{INDEX}: {name} is not in {file}" for name, file in sorted(weight_map.items())
                     if name not in entries or entries[name].path.name != file]
        faults = elsewhere[:TOLD] + _more(elsewhere, "tensors that are not where the index says")
    if faults:
        raise ValueError("\n".join(faults))
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    if not files.is_file(index) or os.path.getsize(index) > MOST_INDEX_BYTES:
        raise ValueError(f"{INDEX} is no file of an index's size")
    text = files.attempted(index.read_bytes, f"{index} cannot be read", "let it be read")
    weight_map = safetensors.parse_json(text, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(
            isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{INDEX} has no weight_map of names to files")
    for file in weight_map.values():
        if file != os.path.basename(file) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise ValueError(f"{INDEX}: {file[:80]!r} is not the plain name of a .safetensors file beside it, and is "
                             f"not opened")
    return weight_map


def _at(directory: Path, faults: list[str]) -> ValueError:
    return ValueError("\n".join(f"{directory}: {fault}" for fault in faults))


def _near(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others[:200], n=1, cutoff=0.8)
    return f"; there is {near[0]}" if near else ""


def _more(faults: list[str], what: str) -> list[str]:
    return [f"… and {len(faults) - TOLD} more {what}"] if len(faults) > TOLD else []
