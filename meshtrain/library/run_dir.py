"""The claimed directory of a run of `fit`, with checkpoints, metrics and history in the trainer's format.

config.toml has the keys that `meshtrain.report` reads, and [fit], so that no other command accepts the file as a run
file. A checkpoint has the facts on which the numbers depend. A later call with other facts resumes, and the change is
reported and recorded.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshtrain import config, files
from meshtrain.checkpoint import resume
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.places import SaveInRunDir
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.config.messages import toml
from meshtrain.config.sections import Run
from meshtrain.journal import goodput, history, metrics, rows
from meshtrain.journal.guards import Guard
from meshtrain.journal.journal import Flops, Journal, RowWriter
from meshtrain.journal.progress import Progress
from meshtrain.journal.rows import Row
from meshtrain.run import contents, loop, rundir, say, stops
from meshtrain.storage import addresses
from meshtrain.training.state import State

FIT = "fit"             # the table of config.toml, and of a checkpoint's metadata
Facts = Mapping[str, str | int]
KEPT = "step", "loss", "grad_norm", "learning_rate", "tokens", "skipped", "step_time_s"    # of a row, in the history


class LoopParts(NamedTuple):
    """The arguments of the loop besides step and feed."""
    journal: Journal
    hooks: Sequence[loop.Hook]
    stop: loop.Stop


@dataclasses.dataclass(frozen=True)
class RowList:
    """A writer that keeps the numbers KEPT of each row, and passes the row on."""
    taken: list[Row]
    then: RowWriter | None = None

    def write(self, row: Row) -> None:
        self.taken.append({name: row[name] for name in KEPT if name != "learning_rate" or math.isfinite(row[name])})
        if self.then is not None:
            self.then.write(row)


@contextlib.contextmanager
def open_directory(run: Run, facts: Facts, rules_text: str) -> Iterator[FitDirectory]:
    """Context: hold run.dir for this run alone. All processes enter it. Raises: ConfigError, FileSystemError."""
    if addresses.is_remote(run.run.dir):
        raise ConfigError(f"dir={run.run.dir} is not a directory of this host; give one that all processes share")
    with contextlib.ExitStack() as stack:
        try:
            claim = stack.enter_context(rundir.claim(run))
        except ConfigError as error:
            raise ConfigError(*(message.replace("run.dir=", "dir=").replace("another run.name", "another dir")
                                for message in error.messages)) from None
        _check_kind(claim.directory)
        with resume.checkpoints_of(run.run.dir, claim, every=run.checkpoint.every, keep=run.checkpoint.keep) as saves:
            yield FitDirectory(run, facts, rules_text, claim, saves)


def _check_kind(directory: Path) -> None:
    """Check the kind of run. Raises: ConfigError for the directory of another kind of run."""
    path = directory / contents.CONFIG
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if files.is_file(path) else {FIT: {}}
    except ValueError as error:     # not TOML, or not UTF-8
        raise ConfigError(f"dir={directory}: {path.name} cannot be read: {error}; remove the file: it is written again "
                          f"from the newest checkpoint") from None
    if FIT not in tables:
        raise ConfigError(f"dir={directory} holds a run of python -m meshtrain.train; give fit another directory")


@dataclasses.dataclass(frozen=True, eq=False)
class FitDirectory:
    """A claimed directory. facts: the facts on which the numbers depend. rules_text: the text of the rule file."""
    run: Run
    facts: Facts
    rules_text: str
    claim: rundir.Claim
    checkpoints: Checkpoints

    def restore(self, wanted: State) -> State | None:
        """Return the newest state, with the shardings of `wanted`; None if no state is saved. Report and record changed
        facts. Raises: ConfigError if the saved arrays differ from `wanted`."""
        saved = self.checkpoints.newest()
        before = saved.metadata[FIT] if saved else self.facts
        changes = [(name, before.get(name), value) for name, value in self.facts.items() if before.get(name) != value]
        with config.user_errors():
            state = saved.restore(wanted) if saved else None
        start = saved.step if saved else 0
        if jax.process_index() == 0:
            for name, old, new in changes:
                say.out(f"from step {start + 1} on: {name}={toml(new)} (was {toml(old)})")
        agree.on_first(lambda: files.attempt(lambda: self._begin(start, changes), f"dir={self.run.run.dir} cannot be "
                                             f"written", "give a directory that can be written", ConfigError))
        return state

    def _begin(self, start: int, changes: Sequence[tuple[str, object, object]]) -> None:
        """Write what this start changes in the directory, and drop rows of steps that are repeated."""
        directory = self.claim.directory
        (directory / contents.RULES).write_text(self.rules_text, encoding="utf-8")
        files.replace(directory / contents.CONFIG, self._format())
        resume.record_changes(directory / contents.CHANGES, start, changes)
        rows.cut_after(directory / rows.NAME, start)

    def _format(self) -> str:
        run = self.run
        tables: dict[str, Mapping[str, Any]] = {
            "run": {"name": run.run.name, "dir": run.run.dir, "seed": run.run.seed},
            "training": {"steps": run.training.steps, "microbatches": run.training.microbatches},
            "data": {"global_batch": run.data.global_batch, "seq_len": run.data.seq_len}, FIT: self.facts}
        lines = ["# A run of mt.fit. python -m meshtrain.report shows it."]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"

    @contextlib.contextmanager
    def train(self, start: int, mesh: str, guards: Sequence[Guard], taken: list[Row]) -> Iterator[LoopParts]:
        """Context of the loop after step `start`. mesh: for the history. Rows are written, and appended to `taken`."""
        directory, account = self.claim.directory, goodput.Account()

        def describe(step: int) -> dict:
            return {FIT: dict(self.facts), "run": rundir.settings(self.run), "run_file": self._format()}
        more = {"on": mesh, "processes": jax.process_count(), "cause": f"after step {start}" if start else ""}
        with history.record_attempt(directory, start, account, more) as attempt, stops.defer() as listener:
            stop = loop.Stop(listener.has_request, self.claim)
            with (metrics.open_writers(self.run, directory, start) as writers,
                  Progress(self.run.training.steps) as progress, account.count_as(goodput.LOOP)):
                journal = Journal(self.run, RowList(taken, writers), progress, Flops(0.0), account, guards=guards)
                yield LoopParts(journal, (SaveInRunDir(self.checkpoints, describe),), stop)
            self.checkpoints.wait()
            attempt.end(listener.ending(not stop.agreed), code=stops.STOPPED if stop.agreed else stops.DONE)
