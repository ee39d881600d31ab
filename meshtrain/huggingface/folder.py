"""Opens and checks a model folder and matches it with our model's parameters, before reading any weights.

Contradictions between its files are resolved or reported here: a head beside an embedding that config.json ties, keys
of config.json (`spellings`), two sets of weights (`weight_files`). All faults are reported together.
"""
from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meshtrain import files, pattern
from meshtrain.config.sections import Model
from meshtrain.huggingface import forms, safetensors, settings, spellings, weight_files
from meshtrain.huggingface.families import MTP, TEXT_PREFIXES, Family
from meshtrain.huggingface.weight_files import SINGLE, TOLD, and_more
from meshtrain.names import DEPTH, LAYERS, LORA
from meshtrain.storage import model_folder
from meshtrain.storage.model_folder import CARRIED, COMPANIONS, INDEX

BLOCKS, SCALES, BLOCK = "_blocks", "_scales", 32    # MXFP4: suffixes of names; numbers of a row that share a scale
# Buffers that some writers save; not parameters.
BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias|.*\.activation_scale")


class Paths(NamedTuple):
    """The paths of our model's parameters. ends: the paths outside the layers. layers: the paths of each layer, as
    LAYERS/… depths: the paths of each MTP depth."""
    ends: frozenset[str]
    layers: tuple[frozenset[str], ...]
    depths: tuple[frozenset[str], ...] = ()

    @staticmethod
    def of(names: Collection[str], places: Sequence[tuple[str, int]]) -> Paths:
        """Return the paths by layer. names: paths of all parameters. places: stack and index of each layer, as
        `Transformer.places`."""
        names = [name for name in names if f"/{LORA}/" not in name]
        stacks = {stack: frozenset(LAYERS + name.removeprefix(stack) for name in names if name.startswith(f"{stack}/"))
                  for stack, _ in dict.fromkeys(places)}
        ends: list[str] = []
        depths: dict[str, list[str]] = {}
        for name in names:
            if name.startswith(DEPTH):
                depths.setdefault(name.partition("/")[0], []).append(name)
            elif not name.startswith(f"{LAYERS}/"):
                ends.append(name)
        return Paths(frozenset(ends), tuple(stacks[stack] for stack, _ in places),
                     tuple(frozenset(depths[key]) for key in sorted(depths)))


@dataclasses.dataclass(frozen=True)
class WeightPiece:
    """A parameter of ours, or a part of it, within a Hugging Face tensor. first: the piece's offset in the Hugging Face
    tensor, along the star of the form. our_first: the piece's offset in our parameter."""
    path: str
    form: forms.Form
    first: int
    our_first: int


@dataclasses.dataclass(frozen=True, eq=False)
class WeightRow:
    """A Hugging Face tensor (or one per layer) and our parameters that it holds. Each expert has a row, although our
    parameters stack the experts.

    name: the tensor's name, with {l}, {m} or {f} for a layer's number. layers: each of our layers that has the tensor
    -> the number in the name; empty outside the layers. shape: the shape of the tensor, or of one expert's part if a
    tensor has all experts. kind: equal for the rows of all experts. expert: the expert's number. sizes: letter -> size,
    as from `forms.sizes_of`.
    """
    name: str
    pieces: tuple[WeightPiece, ...]
    shape: tuple[int, ...]
    kind: str
    layers: Mapping[int, int]
    sizes: Mapping[str, int]
    expert: int | None = None

    @property
    def stacked(self) -> bool:
        return bool(self.layers)

    @property
    def paths(self) -> list[str]:
        """The paths of our parameters, each once."""
        return list(dict.fromkeys(piece.path for piece in self.pieces))

    @property
    def in_blocks(self) -> bool:
        """Whether the tensor is read from MXFP4."""
        return self.name.removesuffix("[{e}]").endswith(BLOCKS)

    def at(self, index: int) -> tuple[int, ...]:
        """Return the indices of the row in our stack. index: the layer's index in the stack."""
        return (index,) * self.stacked + (() if self.expert is None else (self.expert,))

    def of_layer(self, layer: int | None) -> str:
        name = self.name.removesuffix("[{e}]")
        return NUMBER.sub(str(self.layers[layer]), name) if self.layers else name

    def tensors(self, layer: int | None) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the tensors of a layer, mostly of one tensor."""
        name = self.of_layer(layer)
        if "{qkv}" in name:
            return {name.replace("{qkv}", letter): piece.form.theirs.shape(self.sizes)
                    for letter, piece in zip("qkv", self.pieces, strict=True)}
        sliced = self.name.endswith("[{e}]")
        return {name: (self.sizes["E"], *self.shape) if sliced else self.shape}

    def to_ours(self, whole, concatenate) -> dict:
        """Return path -> our parameter. whole: the Hugging Face tensor. concatenate: numpy's or jax's."""
        parts_by_path: dict = {path: [] for path in self.paths}
        length = sum(piece.form.theirs.part(self.sizes) for piece in self.pieces)
        for piece in self.pieces:
            part = piece.form.theirs.take(whole, self.sizes, piece.first, length)
            parts_by_path[piece.path].append((piece.form, piece.form.to_ours(part, self.sizes)))
        return {path: parts[0][0].ours.join([x for _, x in parts], self.sizes, concatenate)
                for path, parts in parts_by_path.items()}

    def to_theirs(self, arrays: Mapping, concatenate):
        """Return the Hugging Face tensor; the inverse of `to_ours`."""
        parts = []
        for piece in self.pieces:
            whole = sum(other.form.ours.part(self.sizes) for other in self.pieces if other.path == piece.path)
            parts.append(piece.form.to_theirs(
                piece.form.ours.take(arrays[piece.path], self.sizes, piece.our_first, whole), self.sizes))
        return self.pieces[0].form.theirs.join(parts, self.sizes, concatenate)

    def our_shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a parameter of ours for one layer and expert, without the padding of the vocabulary."""
        pieces = [piece for piece in self.pieces if piece.path == path]
        side = pieces[0].form.ours
        return side.of_whole(self.sizes, sum(piece.form.ours.part(self.sizes) for piece in pieces))


NUMBER = re.compile(r"\{[lmf]\}")


@dataclasses.dataclass(frozen=True)
class Folder:
    """An opened folder. model: the keys of [model] that it fixes. entries: tensors of the text model, under its
    family's names. carried: the other tensors, of a multimodal model or for predicting further tokens, under the
    folder's names. notes: lines for the user about files that contradict each other."""
    directory: Path
    family: Family
    config: Mapping
    model: Mapping
    entries: Mapping[str, safetensors.Entry]
    carried: Mapping[str, safetensors.Entry]
    notes: tuple[str, ...] = ()


def companions(directory: Path) -> list[Path]:
    """Return the companion files of a folder's weights. Raises: ValueError if a file is a link out of the folder, which
    might expose e.g. a private key. Links to the blobs of the hub's cache are allowed."""
    real, paths, faults = directory.resolve(), [], []
    blobs = real.parent.parent / "blobs" if real.parent.name == "snapshots" else real
    for path in filter(Path.is_file, (directory / name for name in COMPANIONS)):
        target = path.resolve()
        if real not in target.parents and target.parent != blobs:
            faults.append(f"{path.name} is a link to {target}, outside the folder, and is not copied; put the file "
                          f"itself there")
        paths.append(path)
    if faults:
        raise _at(directory, faults)
    return paths


def settings_of(directory: Path) -> dict:
    """Return `settings.model_keys` of a folder. If the weights can be read, tie_embeddings also depends on the weights.
    Raises: ValueError."""
    try:
        model = settings.model_keys(config := settings.read(directory), family := settings.family_of(config))
    except ValueError as error:
        raise _at(directory, str(error).splitlines()) from None
    try:
        entries, _ = weight_files.entries(directory) if model["tie_embeddings"] else ({}, [])
    except ValueError:
        return model        # missing or faulty weights are reported when they are opened
    named = _names_in_family(family, config, model, entries)
    return _untie(family, model, {named[name]: entry for name, entry in entries.items()})[0]


def open_folder(directory: Path) -> Folder:
    """Open a model folder. Raises: ValueError that lists the faults of config.json, the index and every file's header.
    """
    def describe() -> tuple[Family, dict, dict]:
        family = settings.family_of(config := settings.read(directory))
        return family, config, settings.model_keys(config, family)

    contents, faults = [], []
    for read in (describe, lambda: weight_files.entries(directory)):
        try:
            contents += read()
        except ValueError as error:
            faults += str(error).splitlines()
    if faults:
        raise _at(directory, faults)
    family, config, model, entries, notes = contents
    named = _names_in_family(family, config, model, entries)
    carried = {name: entry for name, entry in entries.items() if named[name] is None}
    entries = {named[name]: entry for name, entry in entries.items() if named[name] is not None}
    model, untied = _untie(family, model, entries)
    notes = [*notes, *untied, *spellings.compare(settings.text_of(config), family)[1]]
    return Folder(directory, family, config, model, entries, carried, tuple(f"{directory}: {note}" for note in notes))


def ends_of(family: Family) -> tuple[str, str]:
    """Return the names of the embedding and of the head."""
    named = {texts[0].partition(":")[0]: name for name, texts in family.tensors.items()}
    return named["embedding/table"], named["head/kernel"]


def _untie(family: Family, model: dict, entries: Mapping[str, safetensors.Entry]) -> tuple[dict, list[str]]:
    """Return (the keys of [model], notes). tie_embeddings is set to false if the folder has a head that is no copy of
    the embedding."""
    table, head = ends_of(family)
    if not model["tie_embeddings"] or not {table, head} <= entries.keys() or weight_files.are_equal(
            entries[table], entries[head]):
        return model, []
    return {**model, "tie_embeddings": False}, [
        f"{head} differs from {table}, though {settings.CONFIG} has tie_word_embeddings=true; as in transformers, it "
        "is used as the head, and the embedding is not tied"]


def read_carried(directory: Path) -> Mapping[str, safetensors.Entry]:
    """Return the tensors of a folder that are not part of its text model; none if it has no weights. Raises:
    ValueError."""
    if not model_folder.is_at(directory) or not any(os.path.lexists(directory / name) for name in (INDEX, SINGLE)):
        return {}
    return open_folder(directory).carried


def list_carried(directory: Path) -> list[str]:
    """Return the names of the tensors in `carried`, of a model folder or of companion files."""
    kept = directory / CARRIED
    return list(safetensors.read_header(kept) if files.is_file(kept) else read_carried(directory))


def prefixes_of(config: Mapping, carried: Collection[str]) -> tuple[str, str] | None:
    """Return the TEXT_PREFIXES of an export with these carried tensors; None if the model is text only."""
    if settings.text_of(config) is config:
        return None
    return TEXT_PREFIXES[any(name.startswith("model.") for name in carried)]


def _names_in_family(family: Family, config: Mapping, model: Mapping, names: Collection[str]) -> dict[str, str | None]:
    """Return name in the folder -> name in the family; None for tensors that are not part of the text model."""
    if settings.text_of(config) is not config:
        names_in_family = {name: name_in_text(family, name) for name in names}
    elif not any(name.startswith(family.prefix) for name in names):     # a bare model, without head
        names_in_family = {name: name if name == "lm_head.weight" else family.prefix + name for name in names}
    else:
        names_in_family = {name: None if name.startswith(MTP) else name for name in names}
    first, count = model["num_layers"], min(settings.further_layers(config), 100)
    further = () if family.has_sublayers else tuple(f"{family.prefix}layers.{first + i}." for i in range(count))
    return {name: None if named and named.startswith(further) else named for name, named in names_in_family.items()}


def name_in_text(family: Family, name: str) -> str | None:
    """Return the family's name of a tensor in a multimodal folder; None if it is not part of the text model."""
    for base, head in TEXT_PREFIXES:
        if name.startswith(base):
            return family.prefix + name.removeprefix(base)
        if name == f"{head}lm_head.weight":
            return "lm_head.weight"
    return None


def name_in_whole(family: Family, name: str, base: str, head: str) -> str:
    """Return the name in a multimodal folder of a tensor of the family; the inverse of `name_in_text`."""
    return base + name.removeprefix(family.prefix) if name.startswith(family.prefix) else head + name


def rows(family: Family, model: Model, paths: Paths, prefixes: tuple[str, str] | None = None,
         names: Collection[str] = ()) -> list[WeightRow]:
    """Return the rows of a model under a family's names. model: the section [model]. paths: paths of our parameters.
    prefixes: an entry of TEXT_PREFIXES, for the names in a multimodal folder. names: the names of a folder's tensors,
    which decide the name to use if a parameter has several names. A depth of MTP without names has no rows.

    Raises: ValueError if the family has no name for a parameter.
    """
    numbers = dict.fromkeys("lmf", list(range(model.num_layers)))
    if family.has_sublayers:
        numbers |= zip("mf", settings.sublayers(model))
    there = {re.sub(r"\.\d+\.", ".#.", name) for name in names}
    tensors = _with_depths(family, model)
    alike = {name: re.sub(r"\.(\{[lmfe]\}|\d+)\.", ".#.", name).replace("{qkv}", "q").removesuffix("[{e}]")
             for name in tensors}
    table = sorted(tensors.items(), key=lambda row: alike[row[0]] not in there)
    kinds: dict = {}        # (mixer, its parameters) -> layers
    for layer, (kind, have) in enumerate(zip(pattern.kinds(model), paths.layers, strict=True)):
        kinds.setdefault((kind.mixer, have), []).append(layer)
    sizes = {mixer: forms.sizes_of(model.of(mixer)) for mixer in {mixer for mixer, _ in kinds} | {""}}
    made_rows: dict = {}        # (name, mixer) -> [row, its layers]
    last = pattern.depth_kind(model).mixer
    covered = {kind: set() for kind in (*kinds, ("", paths.ends), *((last, have) for have in paths.depths))}
    for name, texts in table:
        for (mixer, have), done in covered.items():
            paths_here = {text.partition(": ")[0] for text in texts}
            if paths_here <= have and not paths_here & done and (row := _row(name, texts, sizes[mixer])):
                done |= paths_here
                layers = kinds.get((mixer, have), ())
                made_rows.setdefault((name, mixer), (row, {}))[1].update(
                    {layer: numbers[NUMBER.search(name)[0][1]][layer] for layer in layers})
    if missing := {path for (_, have), done in covered.items() for path in have - done
                   if done or have not in paths.depths}:
        raise ValueError(f"{family.model_type} has no name for {', '.join(sorted(missing))}")
    made = []
    order = list(tensors)
    for (name, mixer), (row, layers) in sorted(made_rows.items(), key=lambda item: order.index(item[0][0])):
        named = name_in_whole(family, name, *prefixes) if prefixes else name
        row = dataclasses.replace(row, name=named, layers=layers, kind=f"{name} {mixer}")
        made += [row] if "{e}" not in name else [
            dataclasses.replace(row, name=re.sub(r"\{e\}(?!\])", str(expert), named), expert=expert)
            for expert in range(model.num_experts)]
    return made


def _with_depths(family: Family, model: Model) -> dict[str, tuple[str, ...]]:
    """Return the tensors of a family, with a line for each depth of MTP where a name has {d}."""
    tensors = {}
    for name, texts in family.tensors.items():
        for k in range(1, 1 + model.mtp_layers) if "{d}" in name else (1,):
            tensors[name.replace("{d}", str(model.num_layers + k - 1))] = tuple(
                text.replace(f"{DEPTH}1/", f"{DEPTH}{k}/") for text in texts)
    return tensors


def _row(name: str, texts: tuple[str, ...], sizes: Mapping[str, int]) -> WeightRow | None:
    """Return the row for a line of a family's table; None if the tensor would be empty."""
    pieces: list[WeightPiece] = []
    for path, _, text in (text.partition(": ") for text in texts):
        form = forms.parse(text)
        pieces.append(WeightPiece(path, form, sum(piece.form.theirs.part(sizes) for piece in pieces), sum(
            piece.form.ours.part(sizes) for piece in pieces if piece.path == path)))
    shape = pieces[0].form.theirs.of_whole(sizes, sum(piece.form.theirs.part(sizes) for piece in pieces))
    return WeightRow(name, tuple(pieces), shape, name, {}, sizes) if all(shape) else None


def entry_of(folder: Folder, row: WeightRow, layer: int | None) -> safetensors.Entry:
    """Return the entry that a row reads for a layer: one tensor, several joined tensors, or one expert's part."""
    names = list(row.tensors(layer))
    if len(names) > 1:
        return safetensors.join([folder.entries[name] for name in names])
    entry = folder.entries[names[0]]
    return entry.part(row.expert) if row.name.endswith("[{e}]") else entry


def scales_of(folder: Folder, row: WeightRow, layer: int | None) -> safetensors.Entry | None:
    """Return the scales of a quantized tensor, one for each block; None if the tensor has no scales."""
    (name, *_) = row.tensors(layer)
    if row.in_blocks:
        return folder.entries[name.removesuffix(BLOCKS) + SCALES].part(row.expert)
    return folder.entries.get(f"{name}_scale_inv") if folder.entries[name].dtype == "F8_E4M3" else None


def _has_scales(folder: Folder, name: str) -> bool:
    """Return whether a float8 tensor has the scales that are needed to read it."""
    entry, block, scales = folder.entries[name], settings.scale_block(folder.config), folder.entries.get(
        f"{name}_scale_inv")
    if entry.dtype != "F8_E4M3" or scales is None or block is None or scales.dtype not in safetensors.READABLE:
        return False
    shape = tuple(-(-size // n) for size, n in zip(entry.shape, block))
    return len(entry.shape) == 2 and (scales.shape == shape or scales.shape in ((), (1,)) and shape == (1, 1))


def _are_blocks(folder: Folder, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor and its scales are MXFP4 of this shape."""
    *lead, columns = shape
    scales = folder.entries.get(name.removesuffix(BLOCKS) + SCALES)
    wanted = (*lead, columns // BLOCK)
    return columns % BLOCK == 0 and scales is not None and scales.dtype == folder.entries[name].dtype == "U8" \
        and scales.shape == wanted and folder.entries[name].shape == (*wanted, BLOCK // 2)


def match(folder: Folder, model: Model, paths: Paths) -> list[WeightRow]:
    """Return the rows of a model; the folder has the tensors of each. paths: paths of our parameters. Raises:
    ValueError that lists all missing, unexpected and misshapen tensors, and unsupported dtypes."""
    most = max([len(folder.entries), *(max(entry.shape, default=0) for entry in folder.entries.values())])
    if model.num_experts > most:
        raise _at(folder.directory, [f"{settings.CONFIG} says {model.num_experts:,} experts, but there are only "
                                     f"{len(folder.entries):,} tensors"])
    wanted, left = rows(folder.family, model, paths, names=folder.entries), set(folder.entries)
    absent, wrong, quantized = [], [], []
    for row in wanted:
        if row.expert and row.name.endswith("[{e}]"):
            continue        # checked with expert 0, which is in the same tensor
        for layer in row.layers or (None,):
            tensors = row.tensors(layer)
            left -= tensors.keys()
            if missing := [name for name in tensors if name not in folder.entries]:
                absent += missing
                continue
            entries = [folder.entries[name] for name in tensors]
            (name, shape), *more = tensors.items()
            if row.in_blocks:
                left.discard(name.removesuffix(BLOCKS) + SCALES)
                if not _are_blocks(folder, name, shape):
                    wrong.append(f"{name} is {list(entries[0].shape)} of {entries[0].dtype}; with its {SCALES} it must "
                                 f"be MXFP4 of {list(shape)}")
                continue
            if entries[0].dtype == "F8_E4M3":
                left.discard(f"{name}_scale_inv")
            if entries[0].dtype not in safetensors.DTYPES and not _has_scales(folder, name):
                quantized.append(f"{name} is {entries[0].dtype}; supported are {', '.join(safetensors.DTYPES)}, and "
                                 f"F8_E4M3 with {name}_scale_inv, a scale for each block of weight_block_size")
            elif more and ({entry.dtype for entry in entries} != {entries[0].dtype} or {
                    entry.shape[1:] for entry in entries} != {shape[1:]}
                    or sum(entry.shape[0] for entry in entries) != row.shape[0]):
                wrong.append(f"{', '.join(tensors)} are {', '.join(str(list(entry.shape)) for entry in entries)}; "
                             f"{settings.CONFIG} requires {list(row.shape)} for all of them together")
            elif not more and entries[0].shape != shape:
                wrong.append(f"{name} is {list(entries[0].shape)}; {settings.CONFIG} requires {list(shape)}")
    table, head = ends_of(folder.family)
    own = head in left and not folder.model["tie_embeddings"] and model.tie_embeddings
    if model.tie_embeddings:
        left.discard(head)      # a copy of the embedding
    extra = sorted(name for name in left if not BUFFERS.fullmatch(name))
    faults = [f"{head} differs from {table}, but the run ties them, because {settings.CONFIG} was read before the "
              "weights were available; set model.tie_embeddings=false"] * own
    faults += [f"{name} is absent{_near(name, extra)}" for name in absent[:TOLD]] + and_more(absent, "absent tensors")
    faults += wrong[:TOLD] + and_more(wrong, "tensors of another shape")
    faults += quantized[:TOLD] + and_more(quantized, "quantized tensors")
    faults += [f"{name} is not a tensor of this model" for name in extra[:TOLD]]
    faults += and_more(extra, "superfluous tensors")
    if faults:
        raise _at(folder.directory, faults)
    return wanted


def _at(directory: Path, faults: list[str]) -> ValueError:
    return ValueError("\n".join(f"{directory}: {fault}" for fault in faults))


def _near(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others[:200], n=1, cutoff=0.8)
    return f"; a similar name is {near[0]}" if near else ""
