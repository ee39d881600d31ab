"""A saved state of a run, and the common part of saving in the shared place and on the hosts."""
from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshtrain.checkpoint.store import OPTIONAL, PARAMS, ArrayForm, forms_of
from meshtrain.run import say, trees

# Version of a checkpoint; readers refuse higher ones. 1 has no checksums, 2 another data order, 3 all arrays in state/.
FORMAT = 4
MOST_DIFFERENCES = 8     # arrays that a message lists


class BackgroundSaves(abc.ABC):
    """Saves a run in the background: `Checkpoints`, or `LocalCheckpoints` (per host). All processes make the same
    calls. every: steps between regular saves; 0: none. tell: receives each failure at once, from any thread."""

    def __init__(self, every: int, tell: Callable[[str], None]):
        self.every, self.tell = every, tell
        self._thread: threading.Thread | None = None

    def due(self, step: int) -> bool:
        """Return whether a regular save follows this step."""
        return self.every > 0 and step % self.every == 0

    @abc.abstractmethod
    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving `state` (a pytree of jax arrays) and `metadata` (JSON); return the seconds that it blocked."""

    @abc.abstractmethod
    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """Restore the state of `step` to the shardings of `wanted`.

        wanted: a pytree of jax.ShapeDtypeStruct with shardings of any mesh; the result has its structure. part:
        `wanted` may lack arrays of the checkpoint, e.g. have only {"params": …}.

        An array that is stored in bfloat16 and wanted in float32 is read as float32, and a line reports it: earlier
        versions stored norms, biases and routers in model.param_dtype.

        Raises: ValueError that lists every array with another difference in presence, shape or dtype (there is no
        silent reshape or cast); CheckpointError if the arrays cannot be read.
        """

    @abc.abstractmethod
    def forms(self, step: int, *, only_params: bool = False) -> dict[str, ArrayForm]:
        """Return (shape, dtype) by array name for a saved step. only_params: leave out all arrays but the params."""

    def arrays(self, step: int, *, only_params: bool = False) -> dict:
        """Return a saved step, or its params, as nested dicts of jax.ShapeDtypeStruct without shardings."""
        forms = self.forms(step, only_params=only_params)
        return trees.nest({name: jax.ShapeDtypeStruct(*form) for name, form in forms.items()})

    def _start(self, act: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(target=act, args=args)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """A complete checkpoint. Process 0 has read `metadata` once, for all processes. averaged: whether readers of the
    weights take the average of the weights (training.ema)."""
    checkpoints: BackgroundSaves
    step: int
    metadata: dict
    averaged: bool = False

    @property
    def run(self) -> dict:
        """The settings of the run that saved the checkpoint: section -> key -> value."""
        return self.metadata["run"]

    def param_shapes(self) -> dict:
        """Return shapes and dtypes of the parameters: nested dicts of jax.ShapeDtypeStruct without shardings."""
        return self.checkpoints.arrays(self.step, only_params=True)[PARAMS]

    def has(self, part: str) -> bool:
        """Return whether the checkpoint has a part of the state: AVERAGE or SHARES. All processes call it."""
        return part in map(part_of, self.checkpoints.forms(self.step))

    def restore(self, wanted: Any, *, part: bool = False) -> Any:
        return self.checkpoints.restore(self.step, wanted, part=part)


def check_fit(name: str, stored: Mapping[str, ArrayForm], wanted: Any, part: bool) -> list[str]:
    """Compare stored arrays with `wanted`; return the names of those that are read with another dtype, see `widens`.

    name: the checkpoint in messages. stored: array -> (shape, dtype). part: `wanted` may lack arrays; it may always
    lack optional parts. Raises: ValueError that lists the first differences, with parameters before the optimizer."""
    needed = forms_of(wanted)
    names = needed.keys() if part else needed.keys() | {array for array in stored if part_of(array) not in OPTIONAL}
    ranked = sorted(names, key=lambda array: (_is_optimizer(array), array))
    other = [array for array in ranked if stored.get(array) != needed.get(array)]
    wider = [array for array in other if widens(stored.get(array), needed.get(array))]
    differences = [f"  {array}: {format_form(stored.get(array))} in the checkpoint, "
                   f"{format_form(needed.get(array))} in this run" for array in other if array not in wider]
    if differences:
        what = "optimizer" if all(map(_is_optimizer, other)) else "model or optimizer"
        more = len(differences) - MOST_DIFFERENCES
        raise ValueError("\n".join([f"{name} does not fit this run (another {what}?):", *differences[:MOST_DIFFERENCES],
                                    *([f"  and {more} more arrays"] if more > 0 else [])]))
    return wider


def part_of(array: str) -> str:
    """Return the part of the state that an array belongs to."""
    return array.partition("/")[0]


def _is_optimizer(array: str) -> bool:
    return array.startswith("opt_state/")


def format_form(form: ArrayForm | None) -> str:
    return "absent" if form is None else f"{form[1]}{list(form[0])}"


def widens(stored: ArrayForm | None, wanted: ArrayForm | None) -> bool:
    """Return whether an array is read with a wider dtype: bfloat16 as float32, in the same shape. None: absent."""
    return stored is not None and wanted is not None and stored[0] == wanted[0] and (
        str(stored[1]), str(wanted[1])) == ("bfloat16", "float32")


def tell_widened(where: str, names: Sequence[str]) -> None:
    if jax.process_index() == 0:
        say.out(f"{where} has arrays in bfloat16 that are float32 in this version; they are read as float32: "
                f"{', '.join(names[:3])}{' …' * (len(names) > 3)}")
