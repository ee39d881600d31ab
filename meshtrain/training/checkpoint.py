"""Checkpoints: asynchronous, whole or absent, and restorable on any other mesh. A thin layer over orbax.

A checkpoint is the state's arrays under their paths (`params/layers/wq`, `opt_state/0/mu/…`) and one JSON object. It holds no
class, no function and no mesh: loading it runs no code, and each array is read back into whatever sharding is asked for.
The arrays are copied to the host before `save` returns, so the next step may donate them; writing goes on in the background
into a temporary directory, which is renamed when all of it is on disk.

It must not know what the state means: any pytree of jax arrays will do.
"""

import pathlib
import time
from typing import Any

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp

FORMAT = 1  # of the layout described above; a reader that meets a higher number refuses


class Checkpoints:
    """The checkpoints in one directory, each named by its step. Every process of a run makes one and calls it alike.

    Use it in a `with` statement: an interpreter that ends during a save gives that save up.

    every: steps between regular checkpoints, which `due` tells; 0: none are regular.
    keep: how many of the latest stay on disk; 0: all.
    read_only: for another run's directory: creates, cleans up and saves nothing.
    """

    def __init__(self, directory: str | pathlib.Path, *, every: int = 0, keep: int = 0, read_only: bool = False):
        absl.logging.set_verbosity(absl.logging.WARNING)  # where a program shows INFO, orbax fills the log: 60 lines per save
        self.directory = pathlib.Path(directory).absolute()  # orbax refuses relative paths
        self.every = every
        policies = ocp.checkpoint_managers.preservation_policy
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={"state": ocp.PyTreeCheckpointHandler(), "metadata": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.LatestN(keep) if keep else policies.PreserveAll(),
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,  # what a killed run left half written
            ),
        )

    def due(self, step: int) -> bool:
        """Whether a regular checkpoint belongs after this step."""
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Starts saving `state` (a pytree of jax arrays) and `metadata` (JSON) as `step`; returns the seconds it blocked.

        It blocks for the copy to the host, and before that for a save still under way. A step that is saved already stays as it is.
        Raises: what went wrong in the save before, if it failed in the background.
        """
        start = time.perf_counter()
        if step not in self._manager.all_steps():
            document = {"format": FORMAT, **metadata}
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(_nested(state)), metadata=ocp.args.JsonSave(document))
            self._manager.save(step, args=args, force=True)
        return time.perf_counter() - start

    def latest(self) -> int | None:
        """The step of the latest whole checkpoint; None without one. Waits for a save under way."""
        self.wait()
        return self._manager.latest_step()

    def metadata(self, step: int) -> dict:
        """What `save` was given, and `format`. Reads no arrays: a resume checks it before it builds anything.

        Raises: ValueError if a newer version wrote it.
        """
        self.wait()
        document = self._manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore()))["metadata"]
        if document["format"] > FORMAT:
            where = self.directory / str(step)
            raise ValueError(f"{where} has checkpoint format {document['format']}, this version reads up to {FORMAT}: update meshtrain")
        return document

    def restore(self, step: int, abstract_state: Any, *, part: bool = False) -> tuple[Any, dict]:
        """The state and metadata saved as `step`, the arrays on the shardings that `abstract_state` asks for.

        abstract_state: a pytree of jax.ShapeDtypeStruct with shardings, of any mesh. Its structure is what comes back.
        part: it may lack arrays that the checkpoint has (only {"params": …}: a new run from old weights).

        Raises: ValueError that lists every array whose presence, shape or dtype differs; nothing is reshaped or cast in silence.
        """
        metadata = self.metadata(step)
        self._check(step, abstract_state, part)
        nested = _nested(abstract_state)
        args = ocp.args.PyTreeRestore(nested, restore_args=ocp.checkpoint_utils.construct_restore_args(nested), partial_restore=part)
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]
        return jax.tree.map_with_path(lambda path, _: _at(arrays, path), abstract_state), metadata

    def wait(self) -> None:
        """Returns when nothing is being written. Raises what went wrong in the background."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends the background threads."""
        self._manager.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _check(self, step, abstract_state, part):
        stored = _forms(self._manager.item_metadata(step)["state"].tree)
        wanted = _forms(abstract_state)
        show = lambda entry: "absent" if entry is None else f"{entry[1]}{list(entry[0])}"
        names = wanted.keys() if part else wanted.keys() | stored.keys()
        differences = [
            f"  {name}: {show(stored.get(name))} in the checkpoint, {show(wanted.get(name))} in this run"
            for name in sorted(names)
            if stored.get(name) != wanted.get(name)
        ]
        if differences:
            where = f"{self.directory / str(step)} does not fit this run (another model or optimizer?):"
            raise ValueError("\n".join([where, *differences]))


def _keys(path):
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _forms(tree):
    """Name -> (shape, dtype) of every array."""
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(_keys(path)): (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in leaves}


def _nested(tree):
    """The leaves of any pytree in nested dicts under the names of their paths; empty containers vanish."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        *parents, name = _keys(path)
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return nested


def _at(nested, path):
    for key in _keys(path):
        nested = nested[key]
    return nested
