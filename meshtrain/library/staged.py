"""A `Stack` through the stages of a mesh, by the trainer's executor: its arguments and its results.

`pipeline` turns it into a function for `jax.grad`. `gradients` computes with it the gradients of a step by a rule file.
"""
from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from meshtrain.config import ConfigError
from meshtrain.library import lookups
from meshtrain.library.rows import cut
from meshtrain.library.stack import Stack, check_sums
from meshtrain.model.stats import LayerStats
from meshtrain.parallel.pipeline import schedules
from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.sharding import rules
from meshtrain.sharding.rules import GATHERED
from meshtrain.shown import DrawnSchedule
from meshtrain.training import backward, executor
from meshtrain.training.executor import STAGE, Placement
from meshtrain.training.shard import ModelFunctions

GivenSchedule: TypeAlias = str | Schedule | DrawnSchedule
# Keys of run files in the messages of `schedules` -> the words of a caller from Python.
WORDS = {"pipeline.schedule=": "schedule=", "training.microbatches=": "microbatches=", "pipeline.chunks=": "chunks="}


@dataclasses.dataclass(frozen=True, eq=False)
class StagedStack:
    """A stack and the schedule by which a mesh with stages runs it. Call its methods in the mesh, inside `jax.jit`.

    axes: logical axes of (one layer, ends), as trees like these weights; the stack then gets weights gathered for
    matmuls. None: XLA chooses the shardings.

    In the methods, weights are stacked [V, P, n, …], with P sharded over the stages. ends: whole weights, or split over
    axes that do not split a batch. rows: arrays [B, …]. sums: float32 [2], the head's (sum, count). R: the shards of
    the batch.
    """
    stack: Stack
    layout: rules.Layout
    mesh: Mesh | AbstractMesh
    schedule: Schedule
    axes: tuple[Any, Any] | None = None

    def evaluate(self, weights: Any, ends: Any, rows: Any) -> jax.Array:
        """Return the sums over all rows, by forward ticks alone. weights: one chunk, V = 1."""
        return executor.evaluate(*self._list_arguments(weights, ends, rows)).combine().by_name["sums"].value

    def differentiate(self, weights: Any, ends: Any, rows: Any) -> tuple[jax.Array, Any, Any]:
        """Return (the sums over all rows; the sum's gradients with respect to weights [R, V, P, n, …] and ends [R, …]).
        The gradients are float32 and not yet added over R, which is sharded over the axes of the batch."""
        sums, d_weights, d_ends, *_ = executor.gradients(self.schedule, *self._list_arguments(weights, ends, rows))
        return sums.combine().by_name["sums"].value, d_weights, d_ends

    def check(self, weights: Any, ends: Any, rows: Any) -> None:
        """Check the arguments. weights: [L, …]. Raises: ConfigError for layers that do not divide or have no gradients;
        ValueError as `Stack.check`."""
        x = jax.eval_shape(self.stack.embed, ends, rows)
        self.stack.check(weights, x)
        stages, chunks = self.schedule.num_stages, self.schedule.num_chunks
        faults, num_layers = [], jax.tree.leaves(weights)[0].shape[0]
        if num_layers % (stages * chunks):
            multiple = stages * chunks
            faults.append(f"pipeline: {num_layers} layers do not divide over {stages} stages × {chunks} chunks; use a "
                          f"multiple of {multiple}, e.g. {-(-num_layers // multiple) * multiple}")
        if wrong := [f"{jax.tree_util.keystr(path)} {leaf.dtype.name}" for path, leaf in
                     jax.tree.leaves_with_path({"weights": weights, "ends": ends})
                     if not jnp.issubdtype(leaf.dtype, jnp.floating)]:
            faults.append(f"pipeline: {', '.join(wrong)} cannot be differentiated; weights and ends are floating, and "
                          f"whole numbers belong to the rows")
        if not faults and (lines := lookups.find_lookups(self.layout, (STAGE, *self.layout.batch_axes), self.stack, {
                **ends, self.stack.layers: weights}, rows)):
            faults.append(f"pipeline: XLA aborts at the lookup at {', '.join(lines)} in a pipeline on a mesh with "
                          f"context and tensor; {lookups.REMEDY}")
        if faults:
            raise ConfigError(*faults)

    def _list_arguments(self, weights: Any, ends: Any, rows: Any) -> tuple:
        """Return the arguments of the executor besides the schedule."""
        summed = self.layout.batch_axes
        batch = cut(self.layout, summed, rows, self.schedule.num_microbatches)
        placement = Placement(
            self.mesh, summed, layer_axes=(jax.tree.map(lambda w: ((),) * (w.ndim - 3), weights), {}),
            leading_axes=({}, {}), ends_specs=(jax.tree.map(lambda _: P(), ends), {}),
            batch_specs=jax.tree.map(lambda _: P(None, summed or None), batch))
        return self._list_functions(weights, ends), placement, ((weights, {}), (ends, {}), ({}, {})), batch, {}

    def _list_functions(self, weights: Any, of_ends: Any) -> ModelFunctions:
        """Return the stack as the functions that the executor calls with float32 weights. The stack gets them in the
        dtypes of `weights` and `of_ends`. XLA removes the two casts."""
        stack = self.stack

        def narrow(wide, like, axes):
            wide = jax.tree.map(lambda w, of: w.astype(of.dtype), wide, like)
            # Without constraints XLA keeps the weights whole in branches of a conditional, and each device along tensor
            # would compute the whole head.
            return wide if axes is None else jax.tree.map(
                lambda names, w: self.layout.constrain(GATHERED, w, names), axes, wide, is_leaf=rules.is_axes)
        of_layer, at_ends = self.axes or (None, None)

        def prepare(rows, extra):
            return ()

        def embed(ends, frozen, rows, extra):
            return stack.embed(narrow(ends, of_ends, at_ends), rows)

        def layer(w: backward.Weights, x, inputs):
            return stack.layer(narrow(w.trained, weights, of_layer), x), LayerStats()

        def head(ends, frozen, x, rows, extra):
            sums = stack.head(narrow(ends, of_ends, at_ends), x, rows)
            total, count = check_sums(sums, "the head of the Stack")
            return total, LayerStats.of("target", sums=jnp.stack([total, count]))
        return ModelFunctions(prepare, embed, layer, head)


def is_table(schedule: str) -> bool:
    """Return whether a text is a schedule table rather than a name."""
    return "\n" in schedule or " " in schedule


def make_schedule(given: GivenSchedule, stages: int, microbatches: int | None, chunks: int | None) -> Schedule:
    """Return the schedule for this number of stages. If it is given by name, `microbatches` is required. Raises:
    ConfigError."""
    if isinstance(given, DrawnSchedule):
        given = given.of
    try:
        if isinstance(given, str) and not is_table(given):
            assert microbatches is not None
            return schedules.make(given, stages, microbatches, chunks or 1)
        made = schedules.parse(given) if isinstance(given, str) else given
    except ValueError as error:
        message = str(error)
        for key, word in WORDS.items():
            message = message.replace(key, word)
        raise ConfigError(*message.splitlines()) from None
    wanted = {"stages": (made.num_stages, stages), "microbatches": (made.num_microbatches, microbatches),
              "chunks": (made.num_chunks, chunks)}
    if faults := [f"pipeline: this schedule has {name}={has}, not {asked}; write a schedule of {name}={asked}, or "
                  f"change {'the mesh' if name == 'stages' else name}"
                  for name, (has, asked) in wanted.items() if asked not in (None, has)]:
        raise ConfigError(*faults)
    return made
