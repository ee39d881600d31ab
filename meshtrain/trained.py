"""A trained model from a run directory or a Hugging Face folder, with its weights on a mesh.

`describe` reads everything but the weights; `Trained.place` loads them onto devices. Tokenizer, separator and stop
tokens come from the run's settings, or from the folder's own files.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from meshtrain import assembly, config, devices, files, flags, hardware, names, run_files
from meshtrain.checkpoint import adapters, resume
from meshtrain.checkpoint.saved import Saved
from meshtrain.choices import attention, experts, recurrence
from meshtrain.choices.setting import Setting
from meshtrain.config import ConfigError, Run
from meshtrain.data import sources
from meshtrain.data.documents import tokenizer
from meshtrain.huggingface import depths, folder, settings
from meshtrain.huggingface.weights import ends, peft_folder, pretrained
from meshtrain.huggingface.weights.peft_folder import PeftFolder
from meshtrain.inference import cache, placement
from meshtrain.inference.generate import Generator
from meshtrain.inference.score import Scorer
from meshtrain.model import params, transformer
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.names import AXES
from meshtrain.run import contents, say
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.order import by_gloo
from meshtrain.sharding.rules import Layout
from meshtrain.storage import addresses, copies, model_folder

KEYS = ("mesh.", "model.compute_dtype", "run.compilation_cache")      # keys that all commands on trained models accept
GEMMA = "gemma"     # begin of model_type in Gemma's families


@dataclasses.dataclass(frozen=True)
class Text:
    """Functions of a tokenizer. encode: text -> token ids. prompt: the same, with the token that begins a document.
    decode: token ids -> text. of: the tokenizer itself."""
    encode: Callable[[str], list[int]]
    prompt: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    of: object


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A trained model before its weights are loaded.

    run: its sections [model], [data] and [mesh]. given: keys that the command line sets. weights: an open model folder,
    or a checkpoint. files: the folder with config and tokenizer files in Hugging Face's format; None for a run that
    started from random weights. merged: adapters to merge into the weights.
    """
    directory: Path
    run: Run
    given: frozenset[str]
    weights: folder.Folder | Saved
    files: Path | None
    merged: PeftFolder | None = None

    @property
    def of_folder(self) -> bool:
        return isinstance(self.weights, folder.Folder)

    def longest(self) -> int:
        """Return the maximum number of tokens in a sequence; 0 for no limit. Raises: ConfigError."""
        model = self.run.model
        with config.user_errors():
            said = settings.longest(self.files) if self.files else 0
        if said and not self.of_folder:     # it may have been trained on longer ones since
            said = max(said, self.run.data.seq_len)
        return min(filter(None, (model.max_seq_len, said)), default=0) if model.position == "learned" else said

    def text(self) -> Text | None:
        """Return the functions of the tokenizer; None without one. Raises: ConfigError if it cannot be opened."""
        with config.user_errors():
            given = "data.tokenizer" in self.given
            if self.of_folder and not (given and self.run.data.tokenizer == "bytes"):
                named = self.run.data.tokenizer if given else str(self.directory / tokenizer.FILE)
                if not given and not os.path.isfile(named):
                    return None
                published = tokenizer.open_published(tokenizer.local(named))
                return Text(lambda text: published.encode(text, special=False), published.encode,
                            published.decode, published)
            reader, _ = sources.reader_of(self.run.data, vocab_size=self.run.model.vocab_size)
        if isinstance(reader, tokenizer.Ids):
            return None

        def encode(text: str) -> list[int]:
            return list(map(int, reader.encode([text])[0]))
        return Text(encode, lambda text: [reader.bos, *encode(text)], reader.decode, reader)

    @functools.cached_property
    def ends(self) -> ends.Ends:
        """The tokens that end an answer: a run's end token, then those of the folder. Raises: ConfigError."""
        with config.user_errors():
            stop_tokens = ends.of_folder(self.files) if self.of_folder else ends.of_saved(self.weights, self.files)
        if stop_tokens.note:
            say.err(f"note: {stop_tokens.note}")
        return stop_tokens

    def separator(self) -> int | None:
        """Return the token id of the separator before documents, from the folder's tokenizer, else its config.json;
        None if they name none. Raises: ConfigError."""
        if self.files is None:
            return None
        with config.user_errors():
            id = tokenizer.find_separator(path) if os.path.isfile(path := self.files / tokenizer.FILE) else None
        if id is None:
            id = settings.text_of(settings.read(self.files)).get("bos_token_id")
        return id if type(id) is int and 0 <= id < self.run.model.vocab_size else None

    def lead(self, text: Text, prefix: int) -> list[int]:
        """Return the token ids to put before a text that is no prompt.

        For a run: the separator, which begins every document in training. For a folder: the ids that its tokenizer
        adds. For Gemma's folders, if the tokenizer adds none: [prefix], without which Gemma predicts badly.
        """
        prompt, plain = text.prompt("a"), text.encode("a")
        begun = next((prompt[:i] for i in range(len(prompt)) if prompt[i:i + len(plain)] == plain), [])
        with config.user_errors():
            family = str(settings.text_of(settings.read(self.files)).get("model_type")) if self.of_folder else ""
        return begun or [prefix] * (family.startswith(GEMMA))

    def place(self) -> LoadedModel:
        """Start the backend and load the weights onto the devices of [mesh]. Raises: ConfigError, CheckpointError."""
        all_devices = devices.start(self.run)
        model = transformer.build(self.run.model)
        spec = MeshSpec(mesh_sizes(self.run, self.given, model, len(all_devices)), self.run.mesh.placement)
        with config.user_errors():
            layout = placement.command(model, spec.sizes)
        mesh = spec.build(all_devices)

        def sharding_of(info: params.ParamInfo) -> jax.sharding.NamedSharding:
            return jax.sharding.NamedSharding(mesh, layout.spec("params", info.axes))
        with jax.set_mesh(mesh):
            if self.of_folder:
                zeros = jax.jit(lambda: params.tree(model.parameters(), lambda info: jnp.zeros(info.shape, info.dtype)),
                                out_shardings=params.tree(model.parameters(), sharding_of))
                rows = folder.match(self.weights, self.run.model, pretrained.parameter_paths(model))
                weights = pretrained.load(self.weights, rows, model.places(), zeros())
            else:
                wanted = params.tree(model.parameters(), lambda info: jax.ShapeDtypeStruct(
                    info.shape, info.dtype, sharding=sharding_of(info)))
                with config.user_errors():
                    weights = adapters.restore(self.weights, wanted)
            if self.merged:
                weights = peft_folder.merge(self.merged, model, sharding_of, weights)
            return LoadedModel(model, mesh, execution(self.run, model, layout, mesh), weights,
                               Compiler(mesh, decoding_options(mesh)))


@dataclasses.dataclass(frozen=True, eq=False)
class Compiler:
    """Compiles programs for the devices of a mesh, and refuses those that would compute wrong numbers. options: XLA
    options."""
    mesh: jax.sharding.Mesh
    options: dict

    def __call__(self, name: str, jitted, *args) -> jax.stages.Compiled:
        """Return a jitted function compiled for these arguments. name: the program's name, for messages. Raises:
        assembly.BrokenProgramError."""
        return assembly.check_program(self.mesh, name, jitted.lower(*args).compile(compiler_options=self.options))


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its weights on a mesh. Callers use it inside `jax.set_mesh(mesh)`.

    params: the stored weights, with any sharding on the mesh.
    """
    model: transformer.Transformer
    mesh: jax.sharding.Mesh
    ex: Execution
    params: dict
    compile: Compiler

    @functools.cached_property
    def read(self) -> dict:
        """The weights with the sharding and dtype that matmuls read. Raises: assembly.BrokenProgramError."""
        read = jax.jit(lambda p: self.model.as_read(self.ex.layout, p, self.ex.numerics.dtype))
        return self.compile("the reading of the weights", read, self.params)(self.params)

    def generator(self, drafts: int = 0) -> Generator:
        """Return a generator of answers. drafts: number of depths of MTP that draft tokens. Raises:
        assembly.BrokenProgramError; ConfigError as `cache.check`."""
        with config.user_errors():
            cache.check(self.model.cfg)
        return Generator(self.model, self.ex, self.read, self.compile, drafts=drafts)

    def scorer(self) -> Scorer:
        """Return a scorer of texts. Raises: assembly.BrokenProgramError."""
        return Scorer(self.model, self.ex, self.read, self.mesh, self.compile)


def compiler_of_run(made: assembly.Assembly) -> Compiler:
    """Return the compiler of programs that sample or score with a training run's weights."""
    return Compiler(made.mesh, decoding_options(made.mesh) | made.program.compiler_options)


def decoding_options(mesh: jax.sharding.Mesh) -> dict:
    """Return the XLA options of programs that sample or score on a mesh."""
    return flags.options(mesh.devices.flat[0].platform, {flags.DECODING})


def wrap(made: assembly.Assembly, weights: dict) -> LoadedModel:
    """Return the model of a training run with `weights` on the run's devices. No device holds more weights than in
    training."""
    layout = placement.within(made.model, made.layout)
    return LoadedModel(made.model, made.mesh, execution(made.run, made.model, layout, made.mesh),
                       weights, compiler_of_run(made))


def execution(run: Run, model: transformer.Transformer, layout: Layout, mesh: jax.sharding.Mesh) -> Execution:
    """Return execution settings for inference: no context parallelism, any sequence length, and the blockwise engine,
    which supports every mask."""
    whole = Layout(layout.rules, {**layout.sizes, "context": 1})
    run = run.replace(model={"attention": "blockwise"}, data={"seq_len": 2**31 - 1, "document_mask": True})
    device = mesh.devices.flat[0]
    platform, gpu = device.platform, hardware.from_device_kind(device.device_kind)
    plain = Setting(whole, platform, run=run)
    engines = Engines(attention.choose(plain).value, experts.choose(Setting(layout, platform, gpu, run=run)).value,
                      recurrence=recurrence.choose(plain).value, by_kernels=hardware.runs_kernels(gpu))
    return Execution(layout, Numerics(jnp.dtype(run.model.compute_dtype)), engines, in_order=by_gloo(mesh))


def describe(directory: str, step: int, words: Sequence[str], command: str, keys: Sequence[str] = (),
             weights: str = names.LAST, merge: str = "", drafts: int = 0) -> Trained:
    """Return the model in a directory, with settings of the command line, before its weights are loaded.

    directory: a run directory or a model folder, or its address. step: the step of a run's checkpoint; 0: the newest.
    words: keys of the command line. command: the command's name, for messages. keys: keys that the command accepts
    besides KEYS, see `run_files.resolve`. weights: see `resume.source_of`. merge: PEFT folder whose adapters are merged
    into the weights; "": none. drafts: number of depths of MTP that the model has here. Raises: ConfigError.
    """
    found = _describe(directory, step, words, command, keys, weights, drafts)
    if drafts > (count := found.run.model.mtp_layers):
        raise ConfigError(f"--draft {drafts} needs as many depths of multi-token prediction, but the model in "
                          f"{directory} has {count} that can draft; use --draft {count}")
    if not merge:
        return found
    with config.user_errors("--merge: "):
        opened = peft_folder.open_folder(merge, str(found.directory), found.run.model)
    for line in peft_folder.tell(opened):
        say.err(line)
    return dataclasses.replace(found, merged=opened)


def _describe(directory: str, step: int, words: Sequence[str], command: str, keys: Sequence[str],
              weights: str, drafts: int) -> Trained:
    """Return the model without other adapters, as `describe`."""
    allowed = (*KEYS, *keys)
    copies.forget()
    with config.user_errors():
        path = model_folder.local_path(directory, weights="copied", tell=say.err)
        there = files.is_dir(path)
        of_run = copies.is_run(directory) if addresses.is_remote(directory) else files.is_dir(path / "checkpoints")
    if not there:
        raise ConfigError(f"{directory} is not a directory; give a run directory or a Hugging Face model folder")
    if not model_folder.is_at(path) and not of_run:
        raise ConfigError(f"{directory} has neither config.json nor checkpoints/: it is neither a Hugging "
                          f"Face model folder nor the directory of a run with a checkpoint; give one of them")
    if model_folder.is_at(path):
        if step:
            raise ConfigError(f"--step {step}: {directory} is a model folder, which has no steps; leave it out")
        if weights != names.LAST:
            raise ConfigError(f"--weights {weights}: {directory} is a model folder, which has one set of weights; "
                              f"leave it out")
        with config.user_errors():
            opened = folder.open_folder(path)
        for note in opened.notes:
            say.err(f"note: {note}")
        dtypes = {entry.dtype for name, entry in opened.entries.items() if not name.endswith("_scale_inv")}
        stored = "bfloat16" if dtypes <= {"BF16", "F8_E4M3"} else "float32"
        tables = {"model": {**opened.model, "compute_dtype": stored}, "data": {}}
        run, given = resolve(tables, words, allowed, command)
        # Weights are stored in the compute dtype: the further bits of a float32 copy would never be read. data.seq_len
        # does not limit a folder's model; max_seq_len is the folder's, or 0 for no limit.
        run = run.replace(model={"param_dtype": run.model.compute_dtype,
                                  "max_seq_len": opened.model.get("max_seq_len", 0), "mtp_layers": drafts})
        with config.user_errors():
            paths = pretrained.parameter_paths(transformer.build(run.model))
            opened, paths = depths.take(opened, run.model, paths) if drafts else (opened, paths)
            folder.match(opened, run.model, paths)
        run = run.replace(model={"mtp_layers": len(paths.depths)})
        return Trained(path, run, given, opened, path)
    # Opening checkpoints asks jax for the number of processes, which would start the backend with other devices.
    devices.start(resolve({}, words, allowed, command)[0])
    saved = resume.source_of(directory, step, weights)
    tables = {section: contents.open_section(saved.run, section, directory) for section in ("model", "data")}
    tables["model"] = tables["model"] | {"matmul_dtype": "auto",
                                         "mtp_layers": min(drafts, tables["model"].get("mtp_layers", 0))}
    run, given = resolve(tables, words, allowed, command)
    kept = path / pretrained.KEPT
    return Trained(path, run, given, saved, kept if model_folder.is_at(kept) else None)


def resolve(tables: Mapping, words: Sequence[str], allowed: Sequence[str],
            command: str) -> tuple[Run, frozenset[str]]:
    """Return (the run with these tables and the keys of the command line, the keys that the command line gives). The
    axis tensor takes the devices that no other axis names. See `run_files.resolve`."""
    run, given = run_files.resolve(tables, words, allowed, command)
    sized = {axis for axis in AXES if f"mesh.{axis}" in given}
    if "tensor" not in sized and not any(getattr(run.mesh, axis) == -1 for axis in sized):
        run = run.replace(mesh={"tensor": -1})
    return run, given


def mesh_sizes(run: Run, given: frozenset[str], model: transformer.Transformer, count: int) -> dict[str, int]:
    """Return the sizes of the mesh that the command line gives. If it gives no mesh key, tensor gets as many of the
    `count` devices as the model can be split over. given: the keys that the command line gives."""
    if not any(name.startswith("mesh.") for name in given):
        for n in range(count, 0, -1):
            sizes = {axis: n if axis == "tensor" else 1 for axis in AXES}
            try:
                placement.command(model, sizes)
                return sizes
            except ValueError:
                continue
    sizes = [getattr(run.mesh, axis) for axis in AXES]
    taken = math.prod(sizes)
    return config.mesh_sizes(run, taken if -1 not in sizes and 0 < taken < count else count)
