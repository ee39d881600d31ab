"""A sampler of an RL run in a process separate from its trainer (rl.lag): answers orders with the weights they name."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain import config, devices, run_files, trained
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.saved import Saved
from meshtrain.cluster import watch
from meshtrain.data import sources
from meshtrain.inference import placement
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Completion, GenerationLimits, Generator
from meshtrain.inference.sampling import Picking
from meshtrain.model import params, transformer
from meshtrain.model.execution import Execution
from meshtrain.rl import exchange, sync
from meshtrain.rl.exchange import Order, SamplerFiles
from meshtrain.rl.groups import RolloutError
from meshtrain.rl.work_queue import WorkQueue
from meshtrain.run import contents, replicas, say
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.trained import Compiler

COMMAND = "sample"      # the command that runs it, for messages about keys


@dataclasses.dataclass(frozen=True, eq=False)
class SeparateSampler:
    """Samples answers in a separate process on its own mesh, with each version of the weights in turn.

    sections: settings of the training run.
    """
    sections: dict
    model: transformer.Transformer
    mesh: jax.sharding.Mesh
    ex: Execution
    compile: Compiler
    _programs: dict = dataclasses.field(default_factory=dict, init=False, repr=False)

    def restore(self, saved: Saved, frozen: bool = False) -> dict:
        """Return the trained (or the frozen) weights of a checkpoint that `sync.cast` wrote, with the sharding that
        matmuls read. Raises: CheckpointError."""
        def sharding_of(info: params.ParamInfo) -> jax.sharding.NamedSharding:
            return jax.sharding.NamedSharding(self.mesh, self.ex.layout.spec("params", info.axes))
        wanted = params.tree(self.model.parameters(), lambda info: jax.ShapeDtypeStruct(
            info.shape, sync.read_dtype(info, self.ex.numerics.dtype), sharding=sharding_of(info)))
        return saved.restore({"params": self.model.divide(wanted)[1 if frozen else 0]}, part=True)["params"]

    def generator(self, weights: dict, slots: int, room: int) -> Generator:
        """Return a generator with all weights, from `restore`. Call both inside `jax.set_mesh(mesh)`."""
        return Generator(self.model, self.ex, weights, self.compile, slots, room, self._programs)

    def words(self, stops: Sequence[str], stop_ids: Sequence[int]) -> Words:
        """Return the detokenizer with these ends of answers. Raises: ConfigError if the tokenizer cannot be opened."""
        run, _ = trained.resolve({"data": self.sections["data"]}, (), trained.KEYS, COMMAND)
        with config.user_errors():
            reader, _ = sources.reader_of(run.data, vocab_size=self.sections["model"]["vocab_size"])
        return Words(reader.decode, tuple(stops), tuple(stop_ids))

    @property
    def on(self) -> str:
        """The sampler's mesh, devices and jax version. Samplers with the same text give bit-identical answers."""
        sizes = " ".join(f"{axis}={n}" for axis, n in self.ex.layout.sizes.items() if n > 1)
        return f"{self.mesh.size} × {self.mesh.devices.flat[0].device_kind} {sizes} jax {jax.__version__}"


def make(saved: Saved, run_dir: str, words: Sequence[str]) -> SeparateSampler:
    """Return a separate sampler for the run in run_dir that saved these weights. words: keys of the command line.
    Raises: ConfigError."""
    sections = saved.run
    section = contents.open_section(sections, "model", run_dir) | {"matmul_dtype": "auto"}
    tables = {"model": section, "lora": sections["lora"], "data": sections["data"]}
    run, given = trained.resolve(tables, words, trained.KEYS, COMMAND)
    here = devices.start(run)
    model = transformer.of_run(run)
    spec = MeshSpec(trained.mesh_sizes(run, given, model, len(here)), run.mesh.placement)
    with config.user_errors():
        layout = placement.command(model, spec.sizes)
    mesh = spec.build(here)
    return SeparateSampler(sections, model, mesh, trained.execution(run, model, layout, mesh),
                           Compiler(mesh, trained.decoding_options(mesh)))


class OrderSampler:
    """Samples answers, and loads other weights when an order needs them. words: keys of the command line."""

    def __init__(self, run_dir: Path, words: Sequence[str], queue: WorkQueue):
        self.run_dir, self.words, self.queue = run_dir, words, queue
        self._store: Checkpoints | None = None          # of the trained weights
        self._sampler: SeparateSampler | None = None
        self._weights = ""                              # checksum of the generator's weights
        self._generator: Generator | None = None
        self._frozen: dict = {}                         # untrained weights, and their digest
        self._frozen_digest = ""

    def answers(self, order: Order, part: int) -> tuple[list[Completion], str]:
        """Sample the answers to a part of an order. Return (answers, `SeparateSampler.on`). Raises: CheckpointError if
        the weights cannot be read; RolloutError if their checksum differs from the order's."""
        if self._store is None:
            devices.start(run_files.resolve({}, self.words, trained.KEYS, COMMAND)[0])
            self._store = Checkpoints(DirectoryStore(SamplerFiles(self.run_dir).weights), read_only=True)
        saved = self._store.open(order.version)
        if self._sampler is None:
            self._sampler = make(saved, str(self.run_dir), self.words)
            held = sum(info.size for info in self._sampler.model.parameters())
            say.out(f"sampling answers on {self._sampler.on}: {held:,} parameters")
        sampler = self._sampler
        with jax.set_mesh(sampler.mesh):
            if self._generator is None or self._weights != order.weights:
                self._weights, self._generator = "", None       # free the memory for the new weights
                self._generator = self._load(sampler, saved, order, self._store.path_of(order.version))
                self._weights = order.weights
            return self._draw(sampler, self._generator, order, part), sampler.on

    def _load(self, sampler: SeparateSampler, saved: Saved, order: Order, path: str) -> Generator:
        """Return a generator with the weights of an order. path: of the weights, for messages. Raises: as `answers`."""
        self.queue.slow = True
        with watch.phase(f"reading version {order.version}", "part", self.queue.most_s):
            weights, checksum = self._restore(sampler, saved)
        self.queue.slow = False
        if checksum != order.weights:
            raise RolloutError(f"{path} has other weights ({checksum}) than batch {order.batch} needs "
                               f"({order.weights}): nothing is sampled")
        return sampler.generator(weights, order.part * order.draws["samples"], order.room)

    def _restore(self, sampler: SeparateSampler, saved: Saved) -> tuple[dict, str]:
        """Return (all weights, their checksum) of a version. Raises: CheckpointError."""
        weights, place = sampler.restore(saved), SamplerFiles(self.run_dir)
        if not sampler.model.lora:
            return weights, exchange.checksum(weights, "")
        if not self._frozen_digest or self._frozen_digest != place.checksum_of_frozen():
            self._frozen = {}       # free the memory for the new weights
            kept = Checkpoints(DirectoryStore(place.frozen), read_only=True).open(exchange.FROZEN)
            self._frozen = sampler.restore(kept, frozen=True)
            self._frozen_digest = replicas.digest(self._frozen)
        return params.join(weights, self._frozen), exchange.checksum(weights, self._frozen_digest)

    def _draw(self, sampler: SeparateSampler, generator: Generator, order: Order, part: int) -> list[Completion]:
        draws, rows = order.draws, order.rows(part)
        ended = sampler.words(draws["stop"], draws["stop_ids"]).at_string if draws["stop"] else None
        limits = GenerationLimits(draws["max_tokens"], tuple(draws["stop_ids"]), ended=ended)
        return generator.complete(
            [order.prompts[row] for row in rows], limits, Picking(draws["temperature"]), draws["seed"],
            samples=[draws["samples"]] * len(rows), counters=[(order.batch, row) for row in rows],
            each=lambda *_: self.queue.progress())
