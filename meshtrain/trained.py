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

from meshtrain import assembly, config, devices, files, flags, hardware, shipped
from meshtrain.checkpoint import adapters, ends, pretrained, resume
from meshtrain.checkpoint.saved import Saved
from meshtrain.choices import attention, experts, recurrence
from meshtrain.choices.setting import Setting
from meshtrain.config import ConfigError, Run
from meshtrain.cost.formulas import decode
from meshtrain.cost.formulas.place import place
from meshtrain.data import sources
from meshtrain.data.documents import tokenizer
from meshtrain.huggingface import folder, settings
from meshtrain.inference import cache, placement
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Generator
from meshtrain.inference.score import Scorer
from meshtrain.model import params, transformer
from meshtrain.model.layers import Engines, Execution, Numerics
from meshtrain.names import AXES
from meshtrain.rl import sync
from meshtrain.run import say
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec, by_gloo
from meshtrain.sharding.rules import Layout
from meshtrain.storage import addresses, copies
from meshtrain.units import size

KEYS = ("mesh.", "model.compute_dtype", "run.compilation_cache")      # keys that all commands on trained models accept
TOKENIZER = tokenizer.FILE
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
    started from random weights.
    """
    directory: Path
    run: Run
    given: frozenset[str]
    weights: folder.Folder | Saved
    files: Path | None

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
                named = self.run.data.tokenizer if given else str(self.directory / TOKENIZER)
                if not given and not os.path.isfile(named):
                    return None
                published = tokenizer.open_published(tokenizer.local(named))
                return Text(lambda text: published.encode(text, special=False), published.encode,
                            published.decode, published)
            reader, _ = sources.reader_of(self.run.data, vocab_size=self.run.model.vocab_size)
        if isinstance(reader, tokenizer.Ids):
            return None
        encode = lambda text: list(map(int, reader.encode([text])[0]))
        return Text(encode, lambda text: [reader.bos, *encode(text)], reader.decode, reader)

    @functools.cached_property
    def ends(self) -> ends.Ends:
        """The tokens that end an answer: a run's end token, then those of the folder. Raises: ConfigError."""
        with config.user_errors():
            found = ends.of_folder(self.files) if self.of_folder else ends.of_saved(self.weights, self.files)
        if found.note:
            say.err(f"note: {found.note}")
        return found

    def stop_ids(self) -> tuple[int, ...]:
        """Return the token ids that end an answer. Raises: ConfigError."""
        return self.ends.ids

    def separator(self) -> int | None:
        """Return the token id of the separator before documents, from the folder's tokenizer, else its config.json;
        None if they name none. Raises: ConfigError."""
        if self.files is None:
            return None
        with config.user_errors():
            found = tokenizer.named_separator(path) if os.path.isfile(path := self.files / TOKENIZER) else None
        if found is None:
            found = settings.text_of(settings.read(self.files)).get("bos_token_id")
        return found if type(found) is int and 0 <= found < self.run.model.vocab_size else None

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
        found = devices.start(self.run)
        model = transformer.build(self.run.model)
        spec = MeshSpec(_sizes(self.run, self.given, model, len(found)), self.run.mesh.placement)
        with config.user_errors():
            layout = placement.command(model, spec.sizes)
        mesh = spec.build(found)
        placed = lambda info: jax.sharding.NamedSharding(mesh, layout.spec("params", info.axes))
        with jax.set_mesh(mesh):
            if self.of_folder:
                zeros = jax.jit(lambda: params.tree(model.parameters(), lambda info: jnp.zeros(info.shape, info.dtype)),
                                out_shardings=params.tree(model.parameters(), placed))
                rows = folder.match(self.weights, self.run.model, pretrained.parameter_paths(model))
                weights = pretrained.load(self.weights, rows, model.places(), zeros())
            else:
                wanted = params.tree(model.parameters(),
                                     lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=placed(info)))
                with config.user_errors():
                    weights = adapters.restore(self.weights, wanted)
            options = flags.options(found[0].platform, {flags.DECODING})
            return LoadedModel(model, mesh, execution(self.run, model, layout, mesh), weights, options)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its weights on a mesh. Callers use it inside `jax.set_mesh(mesh)`.

    params: the stored weights, with any sharding on the mesh. options: XLA options of its programs.
    """
    model: transformer.Transformer
    mesh: jax.sharding.Mesh
    ex: Execution
    params: dict
    options: dict

    @functools.cached_property
    def read(self) -> dict:
        """The weights with the sharding and dtype that matmuls read. Raises: assembly.BrokenProgramError."""
        read = jax.jit(lambda p: self.model.as_read(self.ex.layout, p, self.ex.numerics.dtype))
        return self.compiled("the reading of the weights", read, self.params)(self.params)

    def generator(self) -> Generator:
        """Return a generator of answers. Raises: assembly.BrokenProgramError."""
        return Generator(self.model, self.ex, self.read, self.compiled)

    def scorer(self) -> Scorer:
        """Return a scorer of texts. Raises: assembly.BrokenProgramError."""
        return Scorer(self.model, self.ex, self.read, self.mesh, self.compiled)

    def compiled(self, name: str, jitted, *args):
        """Return a jitted function compiled for these arguments. name: for messages. Raises:
        assembly.BrokenProgramError."""
        return assembly.checked_program(self.mesh, name, jitted.lower(*args).compile(compiler_options=self.options))


def _options_beside(made: assembly.Assembly) -> dict:
    """Return the XLA options of programs that sample or score with a training run's weights."""
    platform = made.mesh.devices.flat[0].platform
    return flags.options(platform, {flags.DECODING}) | made.program.compiler_options


def within(made: assembly.Assembly, weights: dict) -> LoadedModel:
    """Return the model of a training run with `weights` on the run's devices. No device holds more weights than in
    training."""
    layout = placement.within(made.model, made.layout)
    return LoadedModel(made.model, made.mesh, execution(made.run, made.model, layout, made.mesh),
                       weights, _options_beside(made))


@dataclasses.dataclass(frozen=True, eq=False)
class Sampler:
    """Samples answers between two steps of a training run, on the run's mesh. One sampler serves the whole run, because
    its programs are compiled with the first answers.

    slots: number of sequences that are generated at the same time. room: largest number of tokens of a prompt with its
    answer.
    """
    made: assembly.Assembly
    ex: Execution
    slots: int
    room: int

    @functools.cached_property
    def sync(self) -> sync.WeightSync:
        made = self.made
        return sync.WeightSync(made.model, made.mesh, made.layout, self.ex.layout, self.ex.numerics.dtype,
                               self._compiled)

    @functools.cached_property
    def _programs(self) -> dict:
        return {}

    def weights(self, params: dict) -> dict:
        """Return the weights of a step's state in the sampler's layout. Raises: assembly.BrokenProgramError."""
        with jax.set_mesh(self.made.mesh):
            return self.sync(params)

    def generator(self, params: dict) -> Generator:
        """Return a generator with the weights of a step's state. It holds the only reference to its copy of them.
        Raises: assembly.BrokenProgramError."""
        return Generator(self.made.model, self.ex, self.weights(params), self._compiled, self.slots, self.room,
                         self._programs)

    @functools.cached_property
    def costs(self) -> decode.Sampling:
        """The costs by formulas, for all slots, including those that fill up the last shard of the batch."""
        made, room = self.made, cache.rounded_room(self.room)
        placed = place(made.model.parameters(), made.run.model, self.ex.layout, made.mesh_spec)
        slots = Generator(made.model, self.ex, {}, slots=self.slots).slots_for(self.slots)
        return decode.Sampling(placed, made.layout, slots, room, functools.partial(cache.places, room=room))

    def that_fit(self) -> Sampler:
        """Return this sampler with as many slots as fit into memory together with the training state; unchanged if the
        GPU's memory is unknown. Raises: ConfigError if no slot fits."""
        gpu = hardware.from_device_kind(self.made.mesh.devices.flat[0].device_kind)
        if gpu is None or not gpu.hbm_bytes:
            return self
        state = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                    for leaf in jax.tree.leaves(self.made.state_shapes))
        held, usable = state + self.costs.copied_bytes(), hardware.usable_bytes(gpu)
        slots = self.costs.fitting_beside(state, usable)
        if not slots:
            raise ConfigError(f"no answer can be sampled: {size(usable)} are usable on {gpu.name}. The training state "
                              f"and the sampler's weights take {size(held)}, and a slot of {self.room} tokens takes "
                              f"{size(self.costs.slot_bytes)}. Use more devices, a larger mesh.tensor, or rl.rules "
                              f"that shard the weights further")
        return dataclasses.replace(self, slots=min(self.slots, slots))

    def programs(self) -> dict[str, jax.stages.Compiled]:
        """Compile the programs for a batch of answers from shapes alone. Return name -> program: "sync" (if weights
        move), "fill", "decode". Raises: assembly.BrokenProgramError."""
        made, by_shapes = self.made, Generator(self.made.model, self.ex, self.sync.abstract(), self._compiled,
                                               self.slots, self.room)
        with jax.set_mesh(made.mesh):
            moved = self.sync.program_of(made.state_shapes.params)
            prompt = max(self.room - made.run.rl.max_tokens + 1, 1)
            return ({"sync": moved} if moved else {}) | by_shapes.programs(prompt)

    def _compiled(self, name: str, jitted, *args):
        return assembly.checked_program(self.made.mesh, name, jitted.lower(*args).compile(
            compiler_options=_options_beside(self.made)))


def beside(made: assembly.Assembly, longest: int = 0) -> Sampler:
    """Return the sampler of a run with [rl] on the run's devices. longest: largest number of tokens of a prompt with
    its answer; 0: data.seq_len. Raises: ConfigError with every fault of rl.rules, or if no slot fits."""
    rl = made.run.rl
    with config.user_errors():
        given = rules.load(shipped.rule_file(rl.rules), "rl.rules") if rl.rules else None
        layout = placement.beside(made.model, made.layout, given)
    if faults := experts.problems(made.run, layout):
        raise ConfigError(*faults)
    sampler = Sampler(made, execution(made.run, made.model, layout, made.mesh), rl.slots or rl.prompts * rl.samples,
                      longest or made.run.data.seq_len)
    return sampler if rl.slots else sampler.that_fit()


@dataclasses.dataclass(frozen=True, eq=False)
class ApartSampler:
    """Samples answers in a separate process on its own mesh, with each version of the weights in turn.

    sections: settings of the training run. options: XLA options of its programs.
    """
    sections: dict
    model: transformer.Transformer
    mesh: jax.sharding.Mesh
    ex: Execution
    options: dict
    _programs: dict = dataclasses.field(default_factory=dict, init=False, repr=False)

    def restore(self, saved: Saved, frozen: bool = False) -> dict:
        """Return the trained (or the frozen) weights of a checkpoint that `sync.cast` wrote, with the sharding that
        matmuls read. Raises: CheckpointError."""
        placed = lambda info: jax.sharding.NamedSharding(self.mesh, self.ex.layout.spec("params", info.axes))
        wanted = params.tree(self.model.parameters(), lambda info: jax.ShapeDtypeStruct(
            info.shape, sync.read_dtype(info, self.ex.numerics.dtype), sharding=placed(info)))
        return saved.restore({"params": self.model.divided(wanted)[1 if frozen else 0]}, part=True)["params"]

    def generator(self, weights: dict, slots: int, room: int) -> Generator:
        """Return a generator. weights: all weights, from `restore`. Call this and the generator inside
        `jax.set_mesh(mesh)`."""
        return Generator(self.model, self.ex, weights, self._compiled, slots, room, self._programs)

    def words(self, stops: Sequence[str], stop_ids: Sequence[int]) -> Words:
        """Return the detokenizer with these ends of answers. Raises: ConfigError if the tokenizer cannot be opened."""
        run, _ = _resolved({"data": self.sections["data"]}, (), KEYS, "sample")
        with config.user_errors():
            reader, _ = sources.reader_of(run.data, vocab_size=self.sections["model"]["vocab_size"])
        return Words(reader.decode, tuple(stops), tuple(stop_ids))

    @property
    def on(self) -> str:
        """The sampler's mesh, devices and jax version, as text. Samplers with the same text give bit-identical answers.
        """
        sizes = " ".join(f"{axis}={n}" for axis, n in self.ex.layout.sizes.items() if n > 1)
        return f"{self.mesh.size} × {self.mesh.devices.flat[0].device_kind} {sizes} jax {jax.__version__}"

    def _compiled(self, name: str, jitted, *args):
        return assembly.checked_program(self.mesh, name, jitted.lower(*args).compile(compiler_options=self.options))


def apart(saved: Saved, words: Sequence[str], command: str) -> ApartSampler:
    """Return a separate sampler for the run that saved these weights. words: keys of the command line. Raises:
    ConfigError."""
    sections = saved.run
    run, given = _resolved({"model": {**sections["model"], "matmul_dtype": "auto"}, "lora": sections["lora"],
                            "data": sections["data"]}, words, KEYS, command)
    found = devices.start(run)
    model = transformer.build(run.model, run.lora)
    spec = MeshSpec(_sizes(run, given, model, len(found)), run.mesh.placement)
    with config.user_errors():
        layout = placement.command(model, spec.sizes)
    mesh = spec.build(found)
    return ApartSampler(sections, model, mesh, execution(run, model, layout, mesh),
                        flags.options(found[0].platform, {flags.DECODING}))


def execution(run: Run, model: transformer.Transformer, layout: Layout, mesh: jax.sharding.Mesh) -> Execution:
    """Return execution settings for inference: no context parallelism, any sequence length, and the blockwise engine,
    which supports every mask."""
    whole = Layout(layout.rules, {**layout.sizes, "context": 1})
    run = run.replaced(model={"attention": "blockwise"}, data={"seq_len": 2**31 - 1, "document_mask": True})
    device = mesh.devices.flat[0]
    platform, gpu = device.platform, hardware.from_device_kind(device.device_kind)
    plain = Setting(run, whole, platform)
    engines = Engines(attention.choose(plain).value, experts.choose(Setting(run, layout, platform, gpu)).value,
                      recurrence=recurrence.choose(plain).value, by_kernels=hardware.runs_kernels(gpu))
    return Execution(layout, Numerics(jnp.dtype(run.model.compute_dtype)), engines, in_order=by_gloo(mesh))


def describe(directory: str, step: int, words: Sequence[str], command: str, keys: Sequence[str] = ()) -> Trained:
    """Return the model in a directory, with settings of the command line, before its weights are loaded.

    directory: a run directory or a model folder, or its address. step: of a run's checkpoint; 0: the newest. words:
    keys of the command line. command: for messages. keys: keys that the command accepts besides KEYS, see
    `config.resolve`. Raises: ConfigError.
    """
    allowed = (*KEYS, *keys)
    copies.forget()
    with config.user_errors():
        path = folder.local(directory, weights="copied", tell=say.err)
        there = files.is_dir(path)
        of_run = copies.is_run(directory) if addresses.is_remote(directory) else files.is_dir(path / "checkpoints")
    if not there:
        raise ConfigError(f"{directory} is not a directory; give a run directory or a Hugging Face model folder")
    if not folder.is_one(path) and not of_run:
        raise ConfigError(f"{directory} has neither config.json nor checkpoints/: it is neither a Hugging "
                          f"Face model folder nor the directory of a run with a checkpoint; give one of them")
    if folder.is_one(path):
        if step:
            raise ConfigError(f"--step {step}: {directory} is a model folder, which has no steps; leave it out")
        with config.user_errors():
            found = folder.open_folder(path)
        for note in found.notes:
            say.err(f"note: {note}")
        dtypes = {entry.dtype for name, entry in found.entries.items() if not name.endswith("_scale_inv")}
        stored = "bfloat16" if dtypes <= {"BF16", "F8_E4M3"} else "float32"
        tables = {"model": {**found.model, "compute_dtype": stored}, "data": {}}
        run, given = _resolved(tables, words, allowed, command)
        # Weights are stored in the compute dtype: the further bits of a float32 copy would never be read. data.seq_len
        # does not limit a folder's model; max_seq_len is the folder's, or 0 for no limit.
        run = run.replaced(model={"param_dtype": run.model.compute_dtype,
                                  "max_seq_len": found.model.get("max_seq_len", 0)})
        with config.user_errors():
            folder.match(found, run.model, pretrained.parameter_paths(transformer.build(run.model)))
        return Trained(path, run, given, found, path)
    # Opening checkpoints asks jax for the number of processes, which would start the backend with other devices.
    devices.start(_resolved({}, words, allowed, command)[0])
    saved = resume.source(directory, step, directory, "--step ")
    run, given = _resolved({"model": {**saved.run["model"], "matmul_dtype": "auto"}, "data": saved.run["data"]},
                           words, allowed, command)
    kept = path / pretrained.KEPT
    return Trained(path, run, given, saved, kept if folder.is_one(kept) else None)


def _resolved(tables: Mapping, words: Sequence[str], allowed: Sequence[str],
              command: str) -> tuple[Run, frozenset[str]]:
    run, given = config.resolve(tables, words, allowed, command)
    sized = {axis for axis in AXES if f"mesh.{axis}" in given}
    if "tensor" not in sized and not any(getattr(run.mesh, axis) == -1 for axis in sized):
        run = run.replaced(mesh={"tensor": -1})
    return run, given


def _sizes(run: Run, given: frozenset[str], model: transformer.Transformer, count: int) -> dict[str, int]:
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
