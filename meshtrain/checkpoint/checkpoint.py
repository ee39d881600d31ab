"""The checkpoints that all processes of a run share. This module decides when they are saved, which checkpoint is the
newest complete one, which checkpoints are removed, and what happens after a failed save. A store reads and writes the
bytes: see `store`, `directory` and `bucket`."""
from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import jax

from meshtrain import files
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.checkpoint.saved import FORMAT, BackgroundSaves, Saved, check_fit, part_of, tell_widened
from meshtrain.checkpoint.store import PARAMS, ArrayForm, CheckpointError, Save, Store
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.lazy import ocp
from meshtrain.run import rundir, say, trees

MOST_FAILED = 3         # training stops after this many failed saves in a row
PEERS_TIMEOUT_S = 3600  # waiting time for the writes of other processes


class Checkpoints(BackgroundSaves):
    """The checkpoints of a run in a store, named by step. All processes make the same calls. Use it in a `with`
    statement: an interpreter that exits during a save abandons the save.

    store: a directory or a bucket. every: steps between regular checkpoints; 0: none. keep: number of newest complete
    checkpoints kept; 0: all. The last checkpoint is deleted only when a newer checkpoint is complete. keep_every:
    checkpoints whose step is a multiple of keep_every are never removed. The same holds if the step was a multiple of
    keep_every in the start that saved the checkpoint. 0: keep only checkpoints of the second kind; None: keep neither
    kind. read_only: the place belongs to another run; nothing in it is changed. tell: reports each failed save at once
    (from a background thread) and each damaged checkpoint; None: stderr. check_claim: raises FileSystemError if another
    start has claimed the run's directory; called before anything is written, renamed or removed.

    Raises: ConfigError if the place cannot be written, FileSystemError if its system fails.
    """
    def __init__(self, store: Store, *, every: int = 0, keep: int = 0, keep_every: int | None = None,
                 read_only: bool = False, tell: Callable[[str], None] | None = None,
                 check_claim: Callable[[], None] = lambda: None):
        super().__init__(every, tell or say.err)
        self.store, self.place, self.read_only = store, store.place, read_only
        self.keep, self.keep_every = keep, keep_every
        self.is_needed: Callable[[int], bool] = lambda step: False     # whether a step is still needed, see `removable`
        self.fallback: LocalCheckpoints | None = None   # saves the state after a failed save
        self.check_claim, self._claimed = check_claim, False
        self._failure, self._failed = "", 0  # of the last save; consecutive failures, counted by process 0
        self._passing = False               # the last save failed in this process because a server failed
        self._saved, self._saved_s = 0, time.monotonic()    # last complete step, as process 0 knows it, and when
        self._last: tuple[Any, dict] | None = None      # state and metadata of the last save, if there is a fallback
        self._promised: dict[int, int] = {}     # step -> keep_every of the start that saved it
        self._current = Save(-1, 0, False)     # the last one that began
        self._told_wider: set[int] = set()  # steps for which `restore` has reported arrays that are widened to float32
        if not read_only:
            agree.on_first(lambda: store.prepare(self._report_leftovers))      # all wait until leftovers are removed

    def path_of(self, step: int) -> str:
        """Return the path of a step, for messages."""
        return f"{self.place}/{step}"

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving `state` (a pytree of jax arrays) and `metadata` (JSON) as `step`. Return the seconds that it
        blocked, for a save in progress and the copy to the host. A step that is already saved is kept.

        A failed save is reported and leaves no files; training continues, and `wait` raises if it was the last save.
        Raises: CheckpointError if this is the last of MOST_FAILED consecutive failures; the call waits for this save.
        If the server of the store fails, it raises only after `borne_s` without a checkpoint.
        """
        start = time.perf_counter()
        document = json.dumps({"format": FORMAT, **metadata})
        self._join()
        overdue = time.monotonic() - self._saved_s >= self.store.borne_s
        states = agree.exchange([self._failed, self._claimed, overdue, self._saved, self._passing])
        failed, lost, overdue, self._saved, _ = states[0]
        if lost:
            self.wait()     # raises
        # A step set aside since (damaged, or the run went back) is saved again.
        if step == self._current.step and not failed and agree.on_first(lambda: step in self._steps()):
            return time.perf_counter() - start
        if failed and self.fallback:
            self.fallback.save(step, state, metadata)
        self._last = (state, metadata) if self.fallback else None
        self._current = Save(step, self._current.number + 1, after_failure=bool(failed))
        copied = threading.Event()
        self._start(self._save, self._current, trees.nest(trees.leaves_of(state)), document, copied)
        copied.wait()
        if failed + 1 >= MOST_FAILED and (overdue or not any(passing for *_, passing in states)):
            self._join()
            if failure := agree.exchange(self._failure)[0]:
                raise agree.mark_agreed(CheckpointError(
                    f"{failure}; {failed + 1} saves in a row have failed, so the run stops: check {self.place} and "
                    f"start again; the run resumes from {self._describe_next_start()}"))
        return time.perf_counter() - start

    def _describe_next_start(self) -> str:
        """Return a description of the state that the next start resumes from, after failed saves."""
        if kept := self.fallback and self.fallback.last():
            return f"step {kept}, which these hosts have in {self.fallback.name}"
        return "the last checkpoint that was saved"

    def _save(self, save: Save, state: dict, document: str, copied: threading.Event) -> None:
        """Write this process's part; then process 0 commits. Runs in the background in every process. copied: set once
        the arrays are on the host."""
        index, step, error = jax.process_index(), save.step, None
        key = f"{str(self.place).rpartition('/')[2]} {step} {save.number}"
        try:
            self.check_claim()
            write = self.store.put(save, state)
            copied.set()
            write()
        except Exception as caught:     # tensorstore reports a full disk as ValueError
            error = caught
            agree.leave_word(f"{key} {index}", files.describe(error))
        finally:
            copied.set()
        try:
            # Also wait after a failure: afterwards, a part that is not handed over does not exist.
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=PEERS_TIMEOUT_S * 1000)
            if index == 0 and error is None:
                self.store.commit(save, document, lambda index: agree.word(f"{key} {index}"), self.check_claim)
        except Exception as caught:
            error = caught
        self._failure, self._failed = "", 0 if error is None else self._failed + 1
        self._passing = isinstance(error, files.FileSystemError) and not isinstance(error, CheckpointError)
        if error is None:
            self._saved, self._saved_s = step if index == 0 else self._saved, time.monotonic()
        else:
            since = f"nothing is saved since step {self._saved}" if self._saved else "nothing is saved yet"
            self._failure = f"checkpoint of step {step} not saved in {self.place}: {files.describe(error)}; {since}"
        if error is not None or index == 0:
            self._clean_after(save, index)
        if error is not None:       # after the removal: the log may be on the same full disk
            self.tell(self._failure)

    def _clean_after(self, save: Save, index: int) -> None:
        """Unless another start has the directory, remove checkpoints beyond `keep` and leftovers of failed saves."""
        try:
            self.check_claim()
            if index == 0:
                self.store.remove(self.removable(), save, self._report_leftovers, failed=self._failed > 0)
        except rundir.LostClaimError:
            self._claimed = True
        except (OSError, ValueError) as refused:
            if index == 0:
                self._report_leftovers(refused)

    def removable(self) -> list[int]:
        """Return the steps beyond `keep` that may be removed. Steps that exports still need stay, but at most `keep`
        such steps, and none after a failed save, because the next save may need the space."""
        old = [step for step in self._steps()[: -self.keep] if not self._is_kept(step)] if self.keep else []
        held = [] if self._failed else [step for step in old if self.is_needed(step)][-self.keep:]
        return [step for step in old if step not in held]

    def _is_kept(self, step: int) -> bool:
        """Return whether `keep_every` protects a step from removal."""
        if self.keep_every is None:
            return False
        if self.keep_every and step % self.keep_every == 0:
            return True
        if step not in self._promised:
            try:
                run = self.store.open(step).metadata().get("run", {})
                self._promised[step] = run.get("checkpoint", {}).get("keep_every", 0)
            except (OSError, ValueError):       # a step whose metadata cannot be read is not removed
                return True
        return self._promised[step] > 0 and step % self._promised[step] == 0

    def _report_leftovers(self, error: Exception) -> None:
        self.tell(f"files of old checkpoints in {self.place} cannot be removed: {files.describe(error)}")

    def settle(self) -> None:
        """Wait until no process is writing. A failed save raises nothing here: it was reported."""
        self._join()
        agree.exchange(None)

    @property
    def failure(self) -> str:
        """Why the last save failed in this process; empty while a save is in progress."""
        return "" if self._thread is not None and self._thread.is_alive() else self._failure

    def wait(self) -> None:
        """Wait until no process is writing. If the last save failed, the fallback saves its state, unless a later step
        has donated its buffers. Raises: CheckpointError if it failed."""
        self._join()
        there = self._last is not None and not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._last[0]))
        states = agree.exchange([self._failure, self._claimed, there])
        failure, lost, _ = states[0]
        if failure:
            kept = self.fallback.last() if self.fallback else 0
            if self.fallback and self._last and all(there for *_, there in states) and not lost and (
                    kept < self._current.step):
                self.fallback.save(self._current.step, *self._last)
                kept = self.fallback.last()
            raise agree.mark_agreed(CheckpointError(
                f"{failure}; a start on these hosts resumes from {self._describe_next_start()}" if kept else failure))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *error):
        # After an exception the others may never reach the exchange in wait().
        self.wait() if kind is None else self._join()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def newest(self, newer_in: Callable[[int], Saved | None] = lambda after: None, *,
               only_params: bool = False) -> Saved | None:
        """Open the newest undamaged checkpoint, or a newer one of `newer_in`; None if none exists. Waits for a save.

        Damaged checkpoints are reported and set aside. newer_in: step -> a checkpoint of another store that is newer
        than the step (0: any), or None. `newer_in` is called before a checkpoint is read, and again after a damaged
        checkpoint. Raises: ConfigError if all checkpoints are damaged, because the run would restart from step 1 over
        them; CheckpointError if a checkpoint cannot be read, which is left unchanged.
        """
        self.settle()
        steps, gone = self.steps(), set()
        while True:
            steps = [step for step in steps if step not in gone]
            newest = max(steps, default=0)
            if (newer := newer_in(newest)) is not None:
                self._saved = newest
                return newer
            if not steps:
                break
            fault = self.fault(newest, only_params=only_params)
            if not fault:
                self._saved = newest
                return self.open(newest)
            gone.add(newest)
            if self.read_only and newest not in (now := self.steps()):     # the run that writes here has removed it
                steps = now
                continue
            if jax.process_index() == 0:
                self.tell(f"checkpoint {self.path_of(newest)} is damaged ({fault})"
                          f"{self._set_damaged_aside(newest)}; trying the one before")
        damaged = agree.on_first(lambda: sorted(name for name in self.store.names()
                                                if name.isdecimal() or ".damaged" in name))
        if damaged:
            raise agree.mark_agreed(ConfigError(
                f"{self.place} has no intact checkpoint, only damaged ones ({', '.join(damaged)}); restore the files "
                f"of one and rename it to its step number, or remove them all to start from step 1"))
        return None

    def _set_damaged_aside(self, step: int) -> str:
        """Set a damaged checkpoint aside; return a description of the result."""
        try:
            return "" if self.read_only else f", kept as {self._set_aside(step, 'damaged')}"
        except (OSError, ValueError) as error:
            return f", cannot be set aside: {files.describe(error)}"

    def steps(self) -> list[int]:
        """Return all saved steps in order, complete or damaged. Process 0 lists them for all processes: renames on a
        shared file system are not visible everywhere at once."""
        return agree.on_first(self._steps)

    def _steps(self) -> list[int]:
        return sorted(int(name) for name in self.store.names() if name.isdecimal())

    def _set_aside(self, step: int, kind: str) -> str:
        """Rename a step, to keep it; return its new name. Process 0 calls it. kind: aside or damaged."""
        taken = self.store.names()
        name = files.free_name(f"{step}.{kind}", lambda name: name in taken)
        self.store.open(step).rename(name)
        return name

    def set_aside_after(self, step: int) -> list[str]:
        """Rename all checkpoints later than `step`, so that no run resumes from them; return their new names."""
        self._saved = step
        def set_aside() -> list[str]:
            later = [later_step for later_step in self._steps() if later_step > step]
            return [files.attempt(lambda: self._set_aside(later_step, "aside"),
                                  f"{self.path_of(later_step)} cannot be set aside",
                                  "give a directory that can be written", ConfigError) for later_step in later]
        return agree.on_first(set_aside)

    def open(self, step: int) -> Saved:
        """Open a step's checkpoint. Its metadata is that given to `save`, and `format`; no arrays are read. Raises:
        ConfigError if a newer version wrote it; CheckpointError if it cannot be read."""
        self._join()

        def metadata() -> dict:
            document = self.store.open(step).metadata()
            if document["format"] > FORMAT:
                raise ConfigError(f"{self.path_of(step)} has checkpoint format {document['format']}, this version "
                                  f"reads up to {FORMAT}: update meshtrain")
            return document
        return Saved(self, step, agree.on_first(metadata))

    def fault(self, step: int, *, only_params: bool = False) -> str:
        """Verify a step; see `StoredStep.fault`."""
        return self.store.open(step).fault(only_params=only_params)

    def forms(self, step: int, *, only_params: bool = False) -> dict[str, ArrayForm]:
        return self.store.open(step).forms(only_params=only_params)

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        stored, asked = self.store.open(step), trees.nest(trees.leaves_of(wanted)).keys()
        forms = stored.forms(only_params=part and asked <= {PARAMS})
        wider = check_fit(self.path_of(step), forms, wanted, part)
        if wider and step not in self._told_wider:
            self._told_wider.add(step)
            tell_widened(self.path_of(step), wider)
        return stored.restore(wanted, part=part or {*map(part_of, forms)} != {*asked})
