"""checkpoint.export: exports the weights of saved steps to run.dir/export/STEP.

A failed export is reported and leaves no files; training continues. The export is repeated from its checkpoint with the
next export, at the end of the run, or when the finished run is started again. With "every", checkpoints that are still
to be exported may be kept longer than checkpoint.keep says.
"""
from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from meshtrain import files
from meshtrain.checkpoint import adapters
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.cluster import agree
from meshtrain.cluster.lost import PeerError
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.huggingface import folder, settings
from meshtrain.huggingface.weights import ends, export, new_folder, peft
from meshtrain.huggingface.weights.ends import Ends
from meshtrain.huggingface.weights.pretrained import parameter_paths
from meshtrain.model.transformer import Transformer
from meshtrain.run import contents, say
from meshtrain.run.loop import Hook
from meshtrain.run.trees import leaves_of
from meshtrain.storage import addresses, buckets, mirror, model_folder
from meshtrain.storage.addresses import Address, StorageError


class Exports:
    """The exports of one run. All processes make the same calls. wanted: the run's parameters as jax.ShapeDtypeStruct
    with shardings. Raises: ConfigError if the model cannot be exported."""

    def __init__(self, run: Run, transformer: Transformer, checkpoints: Checkpoints, wanted: dict):
        self.run, self.transformer, self.checkpoints = run, transformer, checkpoints
        self.wanted, self.directory = leaves_of(wanted), mirror.directory(run.run.dir)
        self.place, self._of_adapters = place_of(run.run.dir), run.lora.export == "adapters"
        self.failed: dict[int, str] = {}     # step -> why its export failed; made ones are removed
        with user_errors("run.dir: "):
            agree.on_first(self._clean)
        # a checkpoint that is still to be exported
        checkpoints.is_needed = lambda step: run.checkpoint.export == "every" and not self._exists(step)
        if run.checkpoint.export != "off":
            with user_errors("checkpoint.export: "):
                agree.on_first(self._check)

    def due(self, step: int, ending: bool) -> bool:
        """Return whether to export a step. ending: training ends with this step, perhaps early."""
        if self.run.checkpoint.export == "every":
            return ending or self.checkpoints.due(step)
        return self.run.checkpoint.export == "last" and step == self.run.training.steps

    def make(self, step: int, params: dict, of: Ends) -> dict:
        """Export the parameters of a step, then missing exports of earlier steps; return an empty dict of metrics.
        params: parameters of the run's state, adapters included. of: the stop tokens of the run."""
        if not self._is_exported(step):
            leaves = leaves_of(params)
            leaf = leaves.get if self._of_adapters else adapters.leaf(self.transformer, leaves)
            self._try(step, lambda: self._write(step, leaf, self.run.data.model_dump(), of))
        self._make_saved({missing for missing in (*self.failed, *self._due()) if missing < step})
        return {}

    def set_aside_after(self, step: int) -> None:
        """Rename the exports of steps later than `step`, after which the run goes on, and report the new names. All
        processes call it. Raises: ConfigError, files.FileSystemError."""
        renamed = agree.on_first(lambda: set_aside_after(self.run.run.dir, step))
        if renamed and jax.process_index() == 0:
            say.out(f"exports of later steps are kept as {', '.join(f'{contents.EXPORT}/{name}' for name in renamed)}")

    def finish(self) -> str:
        """Make missing exports of saved steps at the end of the run. Return why other exports could not be made; empty:
        all were made."""
        if self.run.checkpoint.export == "off":
            return ""
        self._make_saved({*self.failed, *self._due()})
        return "; ".join(f"{self.place / str(step)} cannot be written: {why}"
                         for step, why in sorted(self.failed.items()))

    def _due(self) -> list[int]:
        """Return the saved steps that should have an export."""
        saved = self.checkpoints.steps()
        return saved if self.run.checkpoint.export == "every" else saved[-1:]

    def _make_saved(self, steps: set[int]) -> None:
        """Export steps from their checkpoints. A step whose checkpoint is gone stays in `failed`."""
        saved = self.checkpoints.steps() if steps else []
        for step in sorted(steps):
            if self._is_exported(step):
                self.failed.pop(step, None)
            elif step in saved:
                self._try(step, lambda: self._write_saved(step))
            elif not self.failed[step].endswith(GONE):
                self.failed[step] += GONE

    def _write_saved(self, step: int) -> None:
        if fault := self.checkpoints.fault(step, only_params=True):
            raise agree.mark_agreed(CheckpointError(f"its checkpoint is damaged ({fault})"))
        saved = self.checkpoints.open(step)
        companions = find_companions(self.directory)
        with user_errors():
            of = ends.agree_on(lambda: ends.of_saved(saved, companions))
        leaf = adapters.leaf_of_saved(saved, self.wanted, merge=not self._of_adapters)
        self._write(step, leaf, saved.run["data"], of)

    def _write(self, step: int, leaf: Callable[[str], jax.Array | None], data: Mapping, of: Ends) -> None:
        run, source, place = self.run, find_companions(self.directory), self.place / str(step)
        agree.on_first(lambda: self._discard_half(step))
        if self._of_adapters:
            peft.write(place, self.transformer, leaf, dtype="float32", base=run.checkpoint.init_from, data=data,
                       source=source, ends=of)
        else:
            export.write(place, self.transformer, leaf, dtype=run.model.compute_dtype,
                         shard_bytes=export.SHARD_BYTES, data=data, ends=of, source=source)

    def _try(self, step: int, write: Callable[[], None]) -> None:
        """Call write(). An error that all processes share is reported and kept in `failed`; any other error is raised.
        """
        try:
            write()
            self.failed.pop(step, None)
        except (CheckpointError, ConfigError, PeerError, files.FileSystemError) as error:
            if jax.process_count() > 1 and not getattr(error, "agreed", False):
                raise       # a process is lost, or the others do not know of the error
            self.failed[step] = files.describe(error)
            if jax.process_index() == 0:
                say.err(f"export of step {step} failed: {self.failed[step]}; training continues, and "
                        "the export is tried again")

    def _discard_half(self, step: int) -> None:
        with contextlib.suppress(OSError, StorageError):    # the write that follows reports it
            new_folder.discard_half(self.place / str(step))

    def _is_exported(self, step: int) -> bool:
        return agree.on_first(lambda: self._exists(step))

    def _exists(self, step: int) -> bool:
        """Return whether the export exists. False if the file system fails; the write that follows reports the failure.
        """
        try:
            return new_folder.exists(self.place / str(step))
        except (OSError, StorageError):
            return False

    def _clean(self) -> None:
        """Remove leftovers of killed starts. No other start uses the run's directory."""
        if isinstance(self.place, Address):
            for step in _steps(self.place):
                new_folder.discard_half(self.place / str(step))
        else:
            for path in self.place.glob(".*.saving"):
                shutil.rmtree(path, ignore_errors=True)

    def _check(self) -> None:
        """Check before training that a Hugging Face family computes the model. Raises: ValueError if none does."""
        source = next(filter(model_folder.is_at,
                             model_folder.companion_folders(self.run.run.dir, self.run.checkpoint.init_from)), None)
        model = self.transformer.cfg
        family = settings.family_of(settings.read(source)) if source else settings.family_for(model)
        folder.rows(family, model, parameter_paths(self.transformer))


class Export(Hook):
    """Exports weights as model folders. ends: the stop tokens of answers, written into the folders."""

    def __init__(self, exports: Exports, ends: Ends):
        self.exports, self.ends = exports, ends

    def due(self, step: int, ending: bool) -> bool:
        return self.exports.due(step, ending)

    def act(self, step: int, state: Any) -> dict:
        return self.exports.make(step, state.params, self.ends)


GONE = "; and its checkpoint is no longer there"


def find_companions(run_dir: Path) -> Path | None:
    """Return the directory of companion files of the weights that a run started from; None if no such directory exists.
    """
    companions = run_dir / model_folder.KEPT
    return companions if agree.on_first(lambda: files.is_file(companions / settings.CONFIG)) else None


def place_of(run_dir: str) -> new_folder.Target:
    """Return the directory or address of a run's exports."""
    return (addresses.parse(run_dir) if addresses.is_remote(run_dir) else Path(run_dir)) / contents.EXPORT


def _steps(place: new_folder.Target) -> list[int]:
    """Return the exported steps in `place`, sorted. Raises: StorageError, OSError."""
    if isinstance(place, Address):
        names = buckets.children(place)[1]
    else:
        names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def set_aside_after(run_dir: str, step: int) -> list[str]:
    """Rename the exports of steps later than `step`; return their new names. Process 0 calls it before a run resumes
    from `step`. Raises: ConfigError, files.FileSystemError."""
    place = place_of(run_dir)
    with user_errors():
        return files.attempt(
            lambda: [new_folder.set_aside(place / str(later)) for later in _steps(place) if later > step],
            f"exports in {place} cannot be set aside", "check its permissions", ConfigError)
