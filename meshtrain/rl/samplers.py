"""Samplers of a run's answers: on the mesh of the training run, between its steps, or in separate processes.

The feed of a run holds a `Sampler`: a `LocalSampler`, or with rl.lag the `orders.Orders` of separate processes. Each of
these runs a `separate.SeparateSampler`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import jax

from meshtrain import assembly, config, hardware, shipped, trained
from meshtrain.choices import experts
from meshtrain.cluster import watch
from meshtrain.config import ConfigError
from meshtrain.cost.formulas import decode
from meshtrain.cost.formulas.place import place
from meshtrain.inference import cache, placement
from meshtrain.inference.generate import Generator
from meshtrain.journal.journal import Journal
from meshtrain.model.execution import Execution
from meshtrain.rl import sync
from meshtrain.rl.groups import Completer, HeldFirst, Kept
from meshtrain.run import replicas
from meshtrain.sharding import rules
from meshtrain.trained import Compiler
from meshtrain.units import size


class SamplingWeights(NamedTuple):
    """The weights that sample a batch. checksum: None if unknown. version: number of batches that trained them."""
    checksum: str | None
    version: int


@dataclasses.dataclass(frozen=True)
class Pause:
    """The time between two steps in which a batch is sampled. journal: the run's journal. stopping: returns whether to
    stop; all processes call it together."""
    journal: Journal
    stopping: Callable[[], bool]

    @contextlib.contextmanager
    def time(self, part: str, column: str) -> Iterator[None]:
        """Count the seconds of the context in a part of the goodput account and in a column of the metrics row."""
        began = time.perf_counter()
        with self.journal.pause(part), watch.phase(part, "save"):
            yield
        self.journal.add({column: time.perf_counter() - began})


class Sampler(Protocol):
    """Samples the answers of a run's batches. All processes call its methods together.

    saves: whether answers that have arrived are on disk, so that a run that stops need not save them.
    """
    saves: bool

    def request(self, number: int, part: int, first: int, params: dict, pause: Pause) -> SamplingWeights:
        """Request batch `number`, and return the weights that sample it. part: the update of the batch that comes next.
        params: the weights before that update. first: number of prompts drawn for earlier batches."""

    def open(self, kept: Kept, weights: SamplingWeights, params: dict, pause: Pause) -> Completer:
        """Return the Completer of a requested batch. kept: its file. weights: of `request`. params: of the state."""

    def generator(self, params: dict) -> Completer:
        """Return the Completer of prompts that belong to no batch: on the run's mesh, with the weights of the state."""

    def position(self, steps: int) -> dict:
        """Return the JSON that a checkpoint after `steps` saves, for a resume."""


@dataclasses.dataclass(frozen=True, eq=False)
class LocalSampler:
    """Samples answers between two steps of a training run, on the run's mesh. One sampler serves the whole run, because
    its programs are compiled with the first answers.

    slots: number of sequences generated at a time. room: largest number of tokens of a prompt with its answer.
    """
    made: assembly.Assembly
    ex: Execution
    slots: int
    room: int
    saves = False
    _programs: dict = dataclasses.field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def compile(self) -> Compiler:
        return trained.compiler_of_run(self.made)

    @functools.cached_property
    def sync(self) -> sync.WeightSync:
        made = self.made
        return sync.WeightSync(made.model, made.mesh, made.layout, self.ex.layout, self.ex.numerics.dtype,
                               self.compile)

    def weights(self, params: dict) -> dict:
        """Return the weights of a step's state in the sampler's layout. Raises: assembly.BrokenProgramError."""
        with jax.set_mesh(self.made.mesh):
            return self.sync(params)

    def generator(self, params: dict) -> Generator:
        """Return a generator with the weights of a step's state. The generator holds the only reference to its copy.
        Raises: assembly.BrokenProgramError."""
        return Generator(self.made.model, self.ex, self.weights(params), self.compile, self.slots, self.room,
                         self._programs)

    def request(self, number: int, part: int, first: int, params: dict, pause: Pause) -> SamplingWeights:
        # Between two updates of a batch the weights are no longer those that sampled it.
        return SamplingWeights(replicas.digest(params) if part == 0 else None, number)

    def open(self, kept: Kept, weights: SamplingWeights, params: dict, pause: Pause) -> Completer:
        with pause.time("sync", "sync_s"):
            generator = self.generator(params)
            jax.block_until_ready(generator.params)
        held = kept.read_held(weights.checksum)
        return HeldFirst(held, generator) if held else generator

    def position(self, steps: int) -> dict:
        return {}

    @functools.cached_property
    def costs(self) -> decode.Sampling:
        """The costs by formulas, for all slots, including those that fill up the last shard of the batch."""
        made, room = self.made, cache.round_room(self.room)
        placed = place(made.model.parameters(), made.run.model, self.ex.layout, made.mesh_spec)
        slots = Generator(made.model, self.ex, {}, slots=self.slots).slots_for(self.slots)
        return decode.Sampling(placed, made.layout, slots, room, functools.partial(cache.places, room=room))

    def fit_slots(self) -> LocalSampler:
        """Return this sampler with as many slots as fit into memory together with the training state; unchanged if the
        GPU's memory is unknown. Raises: ConfigError if no slot fits."""
        gpu = hardware.from_device_kind(self.made.mesh.devices.flat[0].device_kind)
        if gpu is None or not gpu.hbm_bytes:
            return self
        state = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                    for leaf in jax.tree.leaves(self.made.state_shapes)) - self.made.program.step.state.host_bytes
        held, usable = state + self.costs.copy_bytes(), hardware.usable_bytes(gpu)
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
        made, by_shapes = self.made, Generator(self.made.model, self.ex, self.sync.abstract(), self.compile,
                                               self.slots, self.room)
        with jax.set_mesh(made.mesh):
            moved = self.sync.program_of(made.state_shapes.params)
            prompt = max(self.room - made.run.rl.max_tokens + 1, 1)
            return ({"sync": moved} if moved else {}) | by_shapes.programs(prompt)


def make(made: assembly.Assembly, longest: int = 0) -> LocalSampler:
    """Return the sampler of a run with [rl] on the run's devices. longest: largest number of tokens of a prompt with
    its answer; 0: data.seq_len. Raises: ConfigError with every fault of rl.rules, or if no slot fits."""
    rl = made.run.rl
    with config.user_errors():
        given = rules.load(shipped.rule_file(rl.rules), "rl.rules") if rl.rules else None
        layout = placement.beside(made.model, made.layout, given)
    if faults := experts.problems(made.run, layout):
        raise ConfigError(*faults)
    sampler = LocalSampler(made, trained.execution(made.run, made.model, layout, made.mesh),
                           rl.slots or rl.prompts * rl.samples, longest or made.run.data.seq_len)
    return sampler if rl.slots else sampler.fit_slots()
