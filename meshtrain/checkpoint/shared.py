"""Checkpoints that all processes of a run share, in a directory or a bucket: when they are saved, which of them is the
newest whole one, and what a failed save does. Where the bytes lie is of `checkpoint` and `bucket`."""
from __future__ import annotations

import abc
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshtrain import files
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, older
from meshtrain.run import rundir, say, trees

# Version of what is saved; readers refuse higher ones. 1 had no checksums, 2 was of runs with another data order, 3 had
# all arrays in state/.
FORMAT = 4
PARAMS = "params"
MOST_FAILED = 3         # saves in a row; then training stops
PEERS_TIMEOUT_S = 3600  # waiting time for other processes' writes


class CheckpointError(files.FileSystemError):
    """A checkpoint could not be saved or read. The message has the step, the place and the system's error."""


class Store(abc.ABC):
    """Where a run saves its state in the background: `SharedCheckpoints`, or `LocalCheckpoints` (per host). All
    processes make the same calls. every: steps between regular saves; 0: none. tell: gets each failure at once, from
    any thread."""

    def __init__(self, every: int, tell: Callable[[str], None]):
        self.every, self.tell = every, tell
        self._thread: threading.Thread | None = None

    def due(self, step: int) -> bool:
        """Whether a regular save follows this step."""
        return self.every > 0 and step % self.every == 0

    @abc.abstractmethod
    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving `state` (a pytree of jax arrays) and `metadata` (JSON); return the seconds that it blocked."""

    @abc.abstractmethod
    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """Restore the state of `step` to the shardings of `wanted`.

        wanted: a pytree of jax.ShapeDtypeStruct with shardings of any mesh; the result has its structure. part: it may
        lack arrays of the checkpoint, e.g. have only {"params": …}.

        An array that was stored in bfloat16 and is float32 now is read as float32, and told: norms, biases and routers
        were once stored in model.param_dtype.

        Raises: ValueError listing every array whose presence, shape or dtype differs else (no silent reshape or cast);
        CheckpointError if they cannot be read.
        """

    def _start(self, act: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(target=act, args=args)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Fallback(Protocol):
    """Keeps the state while the place takes no checkpoint: `LocalCheckpoints`."""
    name: str

    def save(self, step: int, state: Any, metadata: dict) -> float: ...

    def last(self) -> int:
        """The newest step that it has from every process; 0: none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """A complete checkpoint in its store. `metadata` was read once, by process 0 for all."""
    store: Store
    step: int
    metadata: dict

    @property
    def run(self) -> dict:
        """Section -> key -> value of the run that saved it."""
        return older.translated(self.metadata["run"], saved=True)

    def param_shapes(self) -> dict:
        """Nested dicts of jax.ShapeDtypeStruct without shardings; for `SharedCheckpoints` only."""
        return self.store.arrays(self.step, only_params=True)[PARAMS]

    def restore(self, wanted: Any, *, part: bool = False) -> Any:
        return self.store.restore(self.step, wanted, part=part)


class SharedCheckpoints(Store):
    """The checkpoints in one place, named by step. All processes make the same calls. Use it in a `with` statement: an
    interpreter that exits during a save abandons it.

    place: a directory, or an address. every: steps between regular checkpoints; 0: none. keep: number of newest
    complete checkpoints kept; 0: all. The last is deleted only when a newer one is complete. keep_every: a checkpoint
    of a multiple of these steps is kept for ever, also if only the start that saved it said so; 0: none now; None:
    nor any that was saved before. read_only: for another
    run's place; changes nothing there. tell: reports each failed save at once (from a background thread) and each
    damaged checkpoint; None: stderr. check_claim: raises FileSystemError if another start has claimed the run's
    directory; called before anything is written, renamed or removed.

    Raises: ConfigError if the place cannot be written, FileSystemError if its system fails.
    """
    borne_s = 0.0       # how long saves may fail because the place's server fails, before they are counted

    def __init__(self, place, *, every: int = 0, keep: int = 0, keep_every: int | None = None, read_only: bool = False,
                 tell: Callable[[str], None] | None = None, check_claim: Callable[[], None] = lambda: None):
        super().__init__(every, tell or say.err)
        self.place, self.keep, self.keep_every, self.read_only = place, keep, keep_every, read_only
        # whether a step is still needed, see `retired`
        self.is_needed: Callable[[int], bool] = lambda step: False
        self.fallback: Fallback | None = None   # what keeps the state after a save that has failed
        self.check_claim, self._claimed = check_claim, False
        self._failure, self._failed = "", 0  # of the last save; consecutive failures, counted by process 0
        self._passing = False               # the last save failed in this process because a server did
        self._saved, self._saved_s = 0, time.monotonic()    # last complete step, as process 0 knows it, and when
        self._last: tuple[Any, dict] | None = None      # state and metadata of the last save, where there is a fallback
        self._promised: dict[int, int] = {}     # step -> keep_every of the start that saved it
        self._step, self._saves = -1, 0  # last step whose save began; number of saves
        self._after_failure = False         # the save before failed, and may still be written
        self._told_wider: set[int] = set()  # steps of which `_check` has told arrays that are float32 now
        if not read_only:
            agree.on_first(self._open)      # all wait until leftovers are removed

    # ---- the place ---------------------------------------------------------------------------------------------------

    def named(self, step: int) -> str:
        """The path of a step, for messages."""
        return f"{self.place}/{step}"

    @abc.abstractmethod
    def _open(self) -> None:
        """In process 0: make the place, and remove what saves have left there."""

    @abc.abstractmethod
    def _names(self) -> list[str]:
        """In process 0: what is there: <step>, <step>.damaged, <step>.aside, and names of others. Raises: OSError,
        ValueError."""

    @abc.abstractmethod
    def _metadata(self, step: int) -> dict:
        """In process 0: what a step was saved with. Raises: CheckpointError."""

    @abc.abstractmethod
    def _copied(self, step: int, state: dict) -> Callable[[], None]:
        """In every process: copies its arrays to the host; returns what writes them."""

    @abc.abstractmethod
    def _commit(self, step: int, document: str, reason: Callable[[int], str]) -> None:
        """In process 0, when all have written: make the step a checkpoint. reason: why a process has not."""

    @abc.abstractmethod
    def _remove(self, steps: Sequence[int]) -> None:
        """In process 0. A kill in between leaves whole checkpoints, and what `_clean` removes."""

    @abc.abstractmethod
    def _clean(self, up_to: int | None = None) -> None:
        """In process 0: remove what saves and removals have left, of no later step, which others may be writing."""

    @abc.abstractmethod
    def _rename(self, step: int, name: str) -> None:
        """In process 0. Raises: OSError, ValueError."""

    @abc.abstractmethod
    def fault(self, step: int, *, only_params: bool = False) -> str:
        """The damage in `step` (or its params, if stored separately), over all processes; empty if there is none.
        Raises: CheckpointError if it cannot be read."""

    @abc.abstractmethod
    def arrays(self, step: int, *, only_params: bool = False) -> dict:
        """Shapes and dtypes of a saved step, or of its params: nested dicts of jax.ShapeDtypeStruct without
        shardings."""

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving `state` (a pytree of jax arrays) and `metadata` (JSON) as `step`; return the seconds blocked:
        for a save in progress and the copy to the host. A step that is already saved is kept.

        A failed save is reported and leaves nothing behind; training continues, and `wait` raises if it was the last.
        Raises: CheckpointError if this is the last of MOST_FAILED consecutive failures; it waits for that one. While
        all of them are failures of the place's server, only if nothing was saved for `borne_s`.
        """
        start = time.perf_counter()
        document = json.dumps({"format": FORMAT, **metadata})
        self._join()
        overdue = time.monotonic() - self._saved_s >= self.borne_s
        states = agree.exchange([self._failed, self._claimed, overdue, self._saved, self._passing])
        failed, lost, overdue, self._saved, _ = states[0]
        if lost:
            self.wait()     # raises
        # A step set aside since (damaged, or the run went back) is saved again.
        if step == self._step and not failed and agree.on_first(lambda: step in self._steps()):
            return time.perf_counter() - start
        if failed and self.fallback:
            self.fallback.save(step, state, metadata)
        self._last = (state, metadata) if self.fallback else None
        self._step, self._saves, self._after_failure = step, self._saves + 1, bool(failed)
        copied = threading.Event()
        self._start(self._save, step, trees.nested(trees.leaves_of(state)), document, copied)
        copied.wait()
        if failed + 1 >= MOST_FAILED and (overdue or not any(passing for *_, passing in states)):
            self._join()
            if failure := agree.exchange(self._failure)[0]:
                raise agree.agreed(CheckpointError(
                    f"{failure}; {failed + 1} saves in a row have failed, so the run stops: check {self.place} and "
                    f"start again; the run resumes from {self._resumed_from()}"))
        return time.perf_counter() - start

    def _resumed_from(self) -> str:
        """The state that the next start resumes from, after failed saves."""
        if kept := self.fallback and self.fallback.last():
            return f"step {kept}, which these hosts have in {self.fallback.name}"
        return "the last checkpoint that was saved"

    def _save(self, step, state, document, copied):
        """In the background, in every process: write its part; process 0 then commits."""
        index = jax.process_index()
        key, error = f"{str(self.place).rpartition('/')[2]} {step} {self._saves}", None
        try:
            self.check_claim()
            write = self._copied(step, state)
            copied.set()
            write()
        except Exception as caught:     # tensorstore reports a full disk as ValueError
            error = caught
            agree.leave_word(f"{key} {index}", files.said(error))
        finally:
            copied.set()
        try:
            # Also after a failure: a part not handed over by now does not exist.
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=PEERS_TIMEOUT_S * 1000)
            if index == 0 and error is None:
                self._commit(step, document, lambda index: agree.word(f"{key} {index}"))
        except Exception as caught:
            error = caught
        self._failure, self._failed = "", 0 if error is None else self._failed + 1
        self._passing = isinstance(error, files.FileSystemError) and not isinstance(error, CheckpointError)
        if error is None:
            self._saved, self._saved_s = step if index == 0 else self._saved, time.monotonic()
        else:
            since = f"nothing is saved since step {self._saved}" if self._saved else "nothing is saved yet"
            self._failure = f"checkpoint of step {step} not saved in {self.place}: {files.said(error)}; {since}"
        if error is not None or index == 0:
            self._clean_after(step, index)
        if error is not None:       # after the removal: the log may be on the same full disk
            self.tell(self._failure)

    def _clean_after(self, step: int, index: int) -> None:
        """Find out whether another start has claimed the directory; if not, remove in process 0 what may go."""
        try:
            self.check_claim()
            if index == 0:
                self._retire(step)
        except rundir.LostClaimError:
            self._claimed = True
        except (OSError, ValueError) as refused:
            if index == 0:
                self._report_leftovers(refused)

    def _retire(self, step: int) -> None:
        """In process 0: remove checkpoints beyond `keep`, and what failed saves up to `step` have left."""
        self._remove(self.retired())
        self._clean(step)

    def retired(self) -> list[int]:
        """The steps beyond `keep` that may be removed. Those still needed for exports stay: at most `keep`, and none
        after a failed save, which may need their space."""
        old = [one for one in self._steps()[: -self.keep] if not self._is_kept(one)] if self.keep else []
        held = [] if self._failed else [one for one in old if self.is_needed(one)][-self.keep:]
        return [one for one in old if one not in held]

    def _is_kept(self, step: int) -> bool:
        """Whether a step is kept for ever."""
        if self.keep_every is None:
            return False
        if self.keep_every and step % self.keep_every == 0:
            return True
        if step not in self._promised:
            try:
                self._promised[step] = self._metadata(step).get("run", {}).get("checkpoint", {}).get("keep_every", 0)
            except (OSError, ValueError):       # nothing is removed whose promise cannot be read
                return True
        return self._promised[step] > 0 and step % self._promised[step] == 0

    def _report_leftovers(self, error: Exception) -> None:
        self.tell(f"files of old checkpoints in {self.place} cannot be removed: {files.said(error)}")

    def settle(self) -> None:
        """Wait until no process is writing. Failed saves were reported."""
        self._join()
        agree.exchange(None)

    @property
    def failure(self) -> str:
        """Why the last save failed, in this process; empty while it is under way."""
        return "" if self._thread is not None and self._thread.is_alive() else self._failure

    def wait(self) -> None:
        """Wait until no process is writing. If the last save failed, the fallback keeps its state, unless a later step
        has taken its buffers. Raises: CheckpointError if it failed."""
        self._join()
        there = self._last is not None and not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._last[0]))
        states = agree.exchange([self._failure, self._claimed, there])
        failure, lost, _ = states[0]
        if failure:
            kept = self.fallback and self.fallback.last()
            if all(there for *_, there in states) and not lost and kept < self._step:
                self.fallback.save(self._step, *self._last)
                kept = self.fallback.last()
            raise agree.agreed(CheckpointError(
                f"{failure}; a start on these hosts resumes from {self._resumed_from()}" if kept else failure))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *error):
        # After an exception the others may never reach the exchange in wait().
        self.wait() if kind is None else self._join()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def newest(self, newer_in: Callable[[int], Saved | None] = lambda after: None, *,
               only_params: bool = False) -> Saved | None:
        """The newest checkpoint in which nothing is damaged, opened, or a newer one that `newer_in` returns; None if
        there are no checkpoints. Waits for a save in progress.

        Damaged ones are reported and set aside. newer_in: step -> a checkpoint newer than it (0: any) from another
        store. Called before a checkpoint is read, and again after a damaged one. Raises: ConfigError if there are
        checkpoints but none is complete: a run would restart from step 1 over them. CheckpointError if one cannot be
        read; it is left as is.
        """
        self.settle()
        steps, gone = self.steps(), set()
        while True:
            steps = [step for step in steps if step not in gone]
            newest = max(steps, default=0)
            if (found := newer_in(newest)) is not None:
                self._saved = newest
                return found
            if not steps:
                break
            fault = self.fault(newest, only_params=only_params)
            if not fault:
                self._saved = newest
                return self.open(newest)
            gone.add(newest)
            if self.read_only and newest not in (now := self.steps()):     # by the run that writes here: `keep`
                steps = now
                continue
            if jax.process_index() == 0:
                self.tell(f"checkpoint {self.named(newest)} is damaged ({fault})"
                          f"{self._set_damaged_aside(newest)}; trying the one before")
        damaged = agree.on_first(lambda: sorted(name for name in self._names()
                                                if name.isdecimal() or ".damaged" in name))
        if damaged:
            raise agree.agreed(ConfigError(
                f"{self.place} has no intact checkpoint, only damaged ones ({', '.join(damaged)}); restore the files "
                f"of one and give it its number as name again, or remove them all to start from step 1"))
        return None

    def _set_damaged_aside(self, step: int) -> str:
        """Set a damaged checkpoint aside; describe the result."""
        try:
            return "" if self.read_only else f", kept as {self._set_aside(step, 'damaged')}"
        except (OSError, ValueError) as error:
            return f", cannot be set aside: {files.said(error)}"

    def steps(self) -> list[int]:
        """All saved steps in order, complete or damaged. Process 0 lists for all: renames on a shared file system are
        not visible everywhere at once."""
        return agree.on_first(self._steps)

    def _steps(self) -> list[int]:
        return sorted(int(name) for name in self._names() if name.isdecimal())

    def _set_aside(self, step: int, kind: str) -> str:
        """In process 0: keep a step under another name, which it returns. kind: aside or damaged."""
        taken = self._names()
        name = files.free_name(f"{step}.{kind}", lambda name: name in taken)
        self._rename(step, name)
        return name

    def set_aside_after(self, step: int) -> list[str]:
        """Rename all checkpoints later than `step`, so that no run resumes from them; return their new names."""
        self._saved = step
        def set_aside():
            later = [one for one in self._steps() if one > step]
            return [files.attempted(lambda: self._set_aside(one, "aside"), f"{self.named(one)} cannot be set aside",
                                    "give a directory that can be written", ConfigError) for one in later]
        return agree.on_first(set_aside)

    def open(self, step: int) -> Saved:
        """Open a step's checkpoint: what `save` was given, and `format`; reads no arrays. Raises: ConfigError if a
        newer version wrote it; CheckpointError if it cannot be read."""
        self._join()

        def metadata():
            document = self._metadata(step)
            if document["format"] > FORMAT:
                raise ConfigError(f"{self.named(step)} has checkpoint format {document['format']}, this version reads "
                                  f"up to {FORMAT}: update meshtrain")
            return document
        return Saved(self, step, agree.on_first(metadata))

    def _check(self, step: int, stored: dict[str, tuple], wanted: Any, part: bool) -> None:
        """stored: array -> its form. Raises: ValueError."""
        wanted = forms(wanted)
        show = lambda entry: "absent" if entry is None else f"{entry[1]}{list(entry[0])}"
        names = wanted.keys() if part else wanted.keys() | stored.keys()
        other = [name for name in sorted(names) if stored.get(name) != wanted.get(name)]
        wider = [name for name in other if widens(stored.get(name), wanted.get(name))]
        differences = [f"  {name}: {show(stored.get(name))} in the checkpoint, {show(wanted.get(name))} in this run"
                       for name in other if name not in wider]
        if differences:
            where = f"{self.named(step)} does not fit this run (another model or optimizer?):"
            raise ValueError("\n".join([where, *differences]))
        if wider and step not in self._told_wider:
            self._told_wider.add(step)
            tell_widened(self.named(step), wider)


def widens(stored: tuple | None, wanted: tuple | None) -> bool:
    """Whether an array of the first form is read as one of the second: the same bfloat16 numbers in float32. Forms:
    (shape, dtype)."""
    return bool(stored and wanted) and stored[0] == wanted[0] and (
        str(stored[1]), str(wanted[1])) == ("bfloat16", "float32")


def tell_widened(where: str, names: Sequence[str]) -> None:
    if jax.process_index() == 0:
        say.out(f"{where} has arrays in bfloat16 that are float32 in this version; they are read as float32: "
                f"{', '.join(names[:3])}{' …' * (len(names) > 3)}")


def forms(tree: Any) -> dict[str, tuple]:
    """Array -> (shape, dtype)."""
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in trees.leaves_of(tree).items()}
