"""The interface of a place that has the checkpoints of a run. A directory and a bucket are such places.

A `Store` writes, commits, lists and removes checkpoints; a `StoredStep` is one checkpoint, and reads its content.
`checkpoint` decides when a step is saved, which one is the newest and which ones are removed.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from meshtrain import files
from meshtrain.run import trees

PARAMS, AVERAGE, SHARES = "params", "ema", "shares"     # parts of a training state
OPTIONAL = (AVERAGE, SHARES)        # a checkpoint and a state may have them or not
ArrayForm = tuple[tuple[int, ...], np.dtype]        # shape and dtype


class CheckpointError(files.FileSystemError):
    """A checkpoint could not be saved or read. The message has the step, the place and the system's error."""


@dataclasses.dataclass(frozen=True)
class Save:
    """One save of a step. All processes have equal values. number: counts the saves since this start, from 1.
    after_failure: whether the previous save failed; its threads may still write."""
    step: int
    number: int
    after_failure: bool


class StoredStep(Protocol):
    """A checkpoint in a store. Making it reads nothing."""

    def metadata(self) -> dict:
        """Return the metadata that was saved with the checkpoint. Raises: CheckpointError."""

    def forms(self, *, only_params: bool = False) -> dict[str, ArrayForm]:
        """Return array -> (shape, dtype), for all arrays or for the params. Raises: CheckpointError."""

    def fault(self, *, only_params: bool = False) -> str:
        """Verify the checkpoint over all processes (or only the params, if stored separately); return the damage, or an
        empty text. Raises: CheckpointError if the checkpoint cannot be read."""

    def restore(self, wanted: Any, *, part: bool) -> Any:
        """Return the arrays with the shardings and dtypes of `wanted`, a pytree of jax.ShapeDtypeStruct that fits
        `forms`. part: `wanted` may lack arrays. Raises: CheckpointError."""

    def rename(self, name: str) -> None:
        """Rename the checkpoint, so that it is no step any more. Process 0 calls it. Raises: OSError, ValueError."""


class Store(Protocol):
    """The complete checkpoints in one place, named by step.

    place: a directory or an address. borne_s: seconds that training goes on without a checkpoint if its server fails.
    """
    place: Any
    borne_s: float

    def prepare(self, report: Callable[[OSError], None]) -> None:
        """Create the place and remove leftovers of earlier starts. Process 0 calls it. report: receives the error of a
        leftover that stays. Raises: ConfigError if the place cannot be written, FileSystemError if its system fails."""

    def names(self) -> list[str]:
        """Return the names in the place: <step>, <step>.damaged, <step>.aside, and others. Process 0 calls it. Raises:
        OSError, ValueError."""

    def put(self, save: Save, state: dict) -> Callable[[], None]:
        """Copy this process's arrays to the host; return a function that writes them. Every process calls it."""

    def commit(self, save: Save, document: str, reason: Callable[[int], str], check_claim: Callable[[], None]) -> None:
        """Make the step a complete checkpoint. Process 0 calls it when all processes have written. document: the
        metadata, as JSON. reason: process -> why it has not written. check_claim: called before the last action; an
        exception from it prevents this action."""

    def remove(self, steps: Sequence[int], after: Save, report: Callable[[OSError], None], *, failed: bool) -> None:
        """Remove steps, and leftovers of saves and removals up to the step of `after`; other processes may be writing
        later steps. Process 0 calls it. A kill meanwhile leaves only complete checkpoints, and leftovers. report:
        see `prepare`. failed: `after` has failed."""

    def open(self, step: int) -> StoredStep: ...


def forms_of(tree: Any) -> dict[str, ArrayForm]:
    """Return array -> (shape, dtype)."""
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in trees.leaves_of(tree).items()}
