"""Averages the weights of several checkpoints of one run (convert --average), one parameter at a time.

A parameter is read from one checkpoint after the other into a running mean in float32: two copies of it are in memory,
whatever the number of checkpoints. A mean of checkpoints from steps with a constant learning rate acts as a decay of
the rate: an update counts with the shares of all checkpoints after it. The last checkpoint gives the integers and the
experts' load-balancing biases, which are no weights but a controller's state. Source: arXiv:2507.17634 (WSM).
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint import adapters, resume
from meshtrain.checkpoint.saved import Saved
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.names import SQRT


def shares_of(shape: str | Sequence[float], count: int) -> tuple[float, ...]:
    """Return the share of each checkpoint, oldest first; their sum is 1.

    shape: LINEAR has equal shares, with which the updates between checkpoints count 1, 1 - 1/count, 1 - 2/count …; with
    SQRT update number j of `count` counts 1 - √(j/count). A sequence of `count` numbers is divided by its sum.
    """
    if shape == SQRT:
        counts = [1 - math.sqrt(j / count) for j in range(count + 1)]
        return tuple(earlier - later for earlier, later in itertools.pairwise(counts))
    numbers = [1.0] * count if isinstance(shape, str) else shape
    return tuple(number / sum(numbers) for number in numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointMean:
    """The mean of checkpoints of one run. saved: oldest first. shares: the share of each checkpoint; the sum is 1."""
    saved: tuple[Saved, ...]
    shares: tuple[float, ...]

    @property
    def last(self) -> Saved:
        return self.saved[-1]

    def describe(self) -> str:
        """Return the shares as text, a line for each checkpoint."""
        counts = itertools.accumulate(reversed(self.shares))
        rows = zip(self.saved, self.shares, reversed(list(counts)), strict=True)
        return "\n".join(f"step {saved.step}: share {share:.4f}; the updates up to it have the weight {count:.4f}"
                         for saved, share, count in rows)

    def leaf(self, wanted: Mapping[str, jax.ShapeDtypeStruct], *, merge: bool,
             of_last: Collection[str]) -> Callable[[str], jax.Array | None]:
        """Return a function that returns the parameter at a path, float32 if it is a mean. All processes call it.

        wanted, merge: as in `adapters.leaf_of_saved`; merged adapters are merged in each checkpoint before the mean.
        of_last: paths of parameters that the last checkpoint gives.
        """
        readers = [adapters.leaf_of_saved(saved, wanted, merge=merge) for saved in self.saved]
        begin = jax.jit(lambda x: x.astype(jnp.float32))
        step = jax.jit(lambda mean, x, part: mean + (x.astype(jnp.float32) - mean) * part, donate_argnums=0)

        def read(path: str) -> jax.Array | None:
            first, *more = readers
            if not more or path in of_last or path in wanted and not jnp.issubdtype(wanted[path].dtype, jnp.floating):
                return readers[-1](path)
            if (x := first(path)) is None:
                return None
            mean, total = begin(x), self.shares[0]
            for reader, share in zip(more, self.shares[1:], strict=True):
                total += share
                mean = step(mean, reader(path), np.float32(share / total))
            return mean
        return read


def open_last(run_dir: str, count: int, step: int, shape: str | Sequence[float]) -> CheckpointMean:
    """Return the mean of the last `count` checkpoints of a run, up to the checkpoint of `step` (0: the newest).
    Verifies the parameters of these checkpoints. shape: as in `shares_of`. All processes call it.

    Raises: ConfigError if the run has fewer checkpoints, or if one is damaged or belongs to another model;
    CheckpointError if one cannot be read.
    """
    option, there = f"--average last:{count}", resume.checkpoints_there(run_dir)
    steps = there.steps() if there else []
    if step and step not in steps:
        resume.source(run_dir, step, run_dir, "--step ")        # raises
    steps = [saved for saved in steps if not step or saved <= step]
    if there is None or len(steps) < count:
        has = f"has only {len(steps)}: steps {', '.join(map(str, steps))}" if steps else "has none"
        raise agree.mark_agreed(ConfigError(
            f"{option}: {run_dir} {has}{f' up to step {step}' * bool(step)}; average fewer, or keep more with "
            f"checkpoint.keep"))
    saved = []
    for wanted in steps[-count:]:
        checkpoints = resume.checkpoints_of(run_dir)    # each has its own, since a bucket keeps one open index
        if fault := checkpoints.fault(wanted, only_params=True):
            raise agree.mark_agreed(ConfigError(
                f"{option}: {checkpoints.path_of(wanted)} is damaged ({fault}), and the mean of the others is a "
                "different model; average the checkpoints before it (--step) or after it, or remove it"))
        saved.append(checkpoints.open(wanted))
    *others, last = saved
    for other in others:
        _check_alike(option, other, last)
    return CheckpointMean(tuple(saved), shares_of(shape, count))


def _check_alike(option: str, one: Saved, last: Saved) -> None:
    """Raises: ConfigError if the parameters of two checkpoints have other names, shapes or dtypes."""
    ours, theirs = ({name: f"{dtype}{list(shape)}" for name, (shape, dtype) in saved.checkpoints.forms(
        saved.step, only_params=True).items()} for saved in (one, last))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise agree.mark_agreed(ConfigError(
                f"{option}: {name} is {ours.get(name, 'absent')} in step {one.step} and {theirs.get(name, 'absent')} "
                f"in step {last.step}; only checkpoints of one model can be averaged: average fewer"))
