"""The places of a run's state: its claimed directory, the checkpoints there, and the checkpoints on the hosts; and the
hooks of the loop that save there."""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from meshtrain.checkpoint import resume
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.checkpoint.saved import BackgroundSaves
from meshtrain.cluster.watch import Watchdog
from meshtrain.config import Run
from meshtrain.run import bucket, contents, rundir
from meshtrain.run.loop import Hook
from meshtrain.storage import addresses, copies, mirror
from meshtrain.training.state import State


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where a run saves. claim: the claim on run.dir. checkpoints: those in run.dir. local: those on hosts' disks."""
    claim: rundir.Claim
    checkpoints: Checkpoints
    local: LocalCheckpoints

    @property
    def directory(self) -> Path:
        return self.claim.directory


@contextlib.contextmanager
def claim(run: Run, watchdog: Watchdog) -> Iterator[Places]:
    """Context: claim run.dir, so that only this start and its watchdog write there. All processes call it.

    Raises: ConfigError if another start has claimed it.
    """
    directory, remote = mirror.directory(run.run.dir), addresses.is_remote(run.run.dir)
    claiming = bucket.claim if remote else rundir.claim
    with claiming(run) as held, watchdog.keep_in(directory / contents.STACKS, apart=remote), resume.checkpoints_of(
            run.run.dir, held, every=run.checkpoint.every, keep=run.checkpoint.keep,
            keep_every=run.checkpoint.keep_every) as checkpoints:
        fallback = copies.home_of("states", addresses.parse(run.run.dir)) if remote else None
        local = LocalCheckpoints(run.checkpoint.local_dir, run.checkpoint.local_every, directory, fallback=fallback)
        checkpoints.fallback = local if remote else None
        yield Places(held, checkpoints, local)


class SaveInRunDir(Hook):
    """Saves the state in run.dir, regularly and at the end. metadata: step -> the metadata of the step's checkpoint."""
    part = "checkpoint"

    def __init__(self, checkpoints: BackgroundSaves, metadata: Callable[[int], dict]):
        self.checkpoints, self.metadata = checkpoints, metadata

    def due(self, step: int, ending: bool) -> bool:
        return ending or self.checkpoints.due(step)

    def act(self, step: int, state: State) -> dict[str, float]:
        return {"checkpoint_wait_s": self.checkpoints.save(step, state, self.metadata(step))}


class SaveOnHosts(SaveInRunDir):
    """Saves the state on the hosts, at steps that `shared` does not save."""

    def __init__(self, checkpoints: BackgroundSaves, metadata: Callable[[int], dict], shared: SaveInRunDir):
        super().__init__(checkpoints, metadata)
        self.shared = shared

    def due(self, step: int, ending: bool) -> bool:
        return self.checkpoints.due(step) and not self.shared.due(step, ending)
