"""Where a run goes on from, and what may have changed since it was saved: content counts, not spelling.

CHANGES is the whole rule, a table from keys of the run file to what a difference means. What changes the numbers is
told in a line and recorded in run.dir/changes.jsonl with the step after which it counts; config.toml has the settings
now in force. The position in the data is kept as tokens of each source, so that batches may change in size and mixture.
This module knows no model and no arrays.
"""
from __future__ import annotations

import dataclasses
import fnmatch
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax

from meshtrain import files
from meshtrain.checkpoint import exports
from meshtrain.checkpoint.checkpoint import CheckpointError, Checkpoints, Saved, Store
from meshtrain.checkpoint.local import LocalTier
from meshtrain.cluster import agree
from meshtrain.cluster.lost import PeerError
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.data.documents.contracts import Batches
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.data.sources import Corpus
from meshtrain.run import rows, rundir, say

STAYS = "stays"             # another value is another run: refused
CONTENT = "content"         # however it is spelled: what is read is compared with what was read
RECORDED = "recorded"       # counts from the next step on; told and recorded
FREE = "free"               # changes no number, or belongs to one start alone

# The first pattern that fits a key says what another value means when a run goes on.
CHANGES = (
    ("run.seed", STAYS),
    ("run.*", FREE),
    ("model.compute_dtype", RECORDED), ("model.matmul_dtype", RECORDED),
    ("model.attention", RECORDED), ("model.*_dropout", RECORDED),
    ("model.*", STAYS),
    ("data.seq_len", RECORDED), ("data.global_batch", RECORDED), ("data.document_mask", RECORDED),
    ("data.eos", RECORDED),
    ("data.loss_on", RECORDED),
    ("data.mixture", RECORDED),     # its weights; its sources are content
    ("data.packing", STAYS),
    ("data.validation_fraction", STAYS),     # what is held out is not trained on
    ("data.cache", FREE), ("data.validation_paths", FREE), ("data.validation_sources", FREE),
    ("data.skip_batches", FREE),
    ("data.*", CONTENT),
    ("optimizer.name", STAYS), ("lora.export", FREE), ("lora.*", STAYS),
    ("training.max_skipped_steps", FREE), ("training.check_replicas_every", FREE), ("training.objective", STAYS),
    ("validation.*", FREE), ("checkpoint.*", FREE), ("metrics.*", FREE), ("distributed.*", FREE),
    ("*", RECORDED),
)
RETRIED = ("optimizer.*", "data.*", "training.grad_clip", "training.z_loss")
RECORD = "changes.jsonl"


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins: behind the checkpoint that it goes on from; None: a fresh one.

    changes: (key, old, new) of what is recorded. skip_batches: of the data, from here on. back: to a step before the
    newest. rollbacks: how often the run has gone back before a loss spike, this time too.
    """
    saved: Saved | None = None
    changes: tuple[tuple[str, object, object], ...] = ()
    skip_batches: int = 0
    back: bool = False
    rollbacks: int = 0

    @property
    def step(self) -> int:
        return self.saved.step if self.saved else 0

    def kept(self, name: str):
        """What the checkpoint has under a key of its metadata; None of a fresh run."""
        return self.saved and self.saved.metadata.get(name)

    def is_of(self, store: Store) -> bool:
        """Whether the run goes on from a checkpoint of this store."""
        return self.saved is not None and self.saved.store is store

    @property
    def cause(self) -> str:
        """In words, for the history."""
        if self.saved is None:
            return "from the beginning"
        return f"back to step {self.step}" if self.back else f"going on after step {self.step}"


def rule(key: str) -> str:
    """What another value of section.key means when a run goes on."""
    return next(meaning for pattern, meaning in CHANGES if fnmatch.fnmatchcase(key, pattern))


def find(run: Run, checkpoints: Checkpoints, local: LocalTier | None = None, wanted=None) -> Start:
    """The checkpoint that the run goes on from: the newest whole one, or that of checkpoint.step; all processes call
    it.

    local: may have a newer one than the shared `checkpoints`. wanted: what is to be restored, with shardings.

    `checkpoint.step` and `data.skip_batches` are done once: a checkpoint that was saved under the same two has them
    behind it, so that the same command goes on. With another answer to the same trouble (RETRIED) the run goes back
    again.
    Raises: ConfigError where checkpoint.step is not there, or what must stay has changed.
    """
    asked, saved, newest = run.checkpoint.step, None, None
    try:
        saved = checkpoints.newest(lambda after: local and local.newest(after, wanted))
        newest = saved and saved.step
    except (CheckpointError, PeerError):
        if not asked:
            raise
    if saved is None and (not asked or run.checkpoint.init_from):
        return Start(skip_batches=run.data.skip_batches)
    again = any(fnmatch.fnmatchcase(key, pattern) for key, *_ in (_changes(run, saved.run) if saved else ())
                for pattern in RETRIED)
    if asked and (again or not _done(run, saved)):
        saved = _checked(checkpoints, asked)
    return Start(saved, _changes(run, saved.run), 0 if _done(run, saved) else run.data.skip_batches,
                 back=saved.step != newest)


def before(run: Run, start: Start, spiked: int, checkpoints: Checkpoints, local: LocalTier, wanted) -> Start:
    """Where a run goes back to that began at `start` and met a loss spike at step `spiked`: its newest checkpoint,
    which is older, without the batches up to the spike. Those that this start has left out behind the same checkpoint
    stay out."""
    new = find(run.replaced(checkpoint={"step": 0}), checkpoints, local, wanted)
    again = start.skip_batches if new.step == start.step else 0
    return dataclasses.replace(new, changes=(), skip_batches=again + spiked - new.step, back=True)


def check_tokenizer(run: Run, start: Start, tokenizer: Tokenizer) -> None:
    """Before anything is tokenized, which may take hours. Raises: ConfigError where it is not the run's."""
    if (data := start.kept("data")) and data["tokenizer"] != [tokenizer.key, tokenizer.bos]:
        raise ConfigError(f"data.tokenizer={json.dumps(run.data.tokenizer)} is not the one that the run in "
                          f"{run.run.dir} was trained with (compared by its content); give that one, or another "
                          f"run.name")


def check_data(run: Run, start: Start, fingerprint: str) -> None:
    """Raises: ConfigError where the documents are not those that the run has read."""
    if (data := start.kept("data")) and data["fingerprint"] != fingerprint:
        raise ConfigError(f"the data are not those that the run in {run.run.dir} read up to step {start.step} "
                          f"(documents were added, removed or changed in length); restore the files or start another "
                          f"run.name")


def position(start: Start, pack: Callable[[dict | None], Batches]) -> Batches:
    """The run's data from `start` on. pack: from the position of an earlier start, or None, to data."""
    data = pack(start.saved and start.saved.metadata["data"]["position"])
    if not start.skip_batches:
        return data
    ahead = data.position(start.step + start.skip_batches)
    tokens = [source["tokens"] for source in ahead["sources"]]
    return pack(ahead | {"batches": start.step, "phase": ahead["phase"] | {"batches": start.step, "tokens": tokens}})


def data_metadata(corpus: Corpus, data: Batches, step: int) -> dict:
    """What a checkpoint of `step` keeps of the data."""
    return {"fingerprint": corpus.fingerprint, "tokenizer": [corpus.tokenizer.key, corpus.tokenizer.bos],
            "position": data.position(step)}


def begin(run: Run, start: Start, checkpoints: Checkpoints, local: LocalTier | None, rules_text: str) -> None:
    """Last thing before the first step: sets aside what lies behind `start`, tells and records what has changed, and
    drops the rows of steps that are taken again.

    Raises: ConfigError or FileSystemError where run.dir cannot be written.
    """
    directory, told = Path(run.run.dir), []
    if aside := _written(directory, lambda: exports.set_aside_after(directory, start.step)):
        told = [f"exports of later steps are kept as {', '.join(f'{exports.DIRECTORY}/{name}' for name in aside)}"]
    if start.back:
        kept_rows = _written(directory, lambda: rows.set_aside_after(directory / rows.NAME, start.step))
        later = checkpoints.set_aside_after(start.step)
        kept = [f"later checkpoints are kept as {', '.join(later)}"] * bool(later)
        kept += [f"later rows in {kept_rows}"] * bool(kept_rows)
        told += [f"back to step {start.step}: {', '.join(kept) or 'nothing lies behind it'}"]
    changes = list(start.changes)
    if start.skip_batches:
        changes.append(("data.skip_batches", 0, start.skip_batches))
    told += [f"from step {start.step + 1} on: {key}={json.dumps(new)} (was {json.dumps(old)})"
             for key, old, new in changes]
    if jax.process_index() == 0:
        for line in told:
            say.out(line)
    if start.back:
        changes.append(("checkpoint.step", None, start.step))
    in_force = run.replaced(checkpoint={"step": 0})
    _written(directory, lambda: rundir.write_settings(in_force, directory, rules_text))
    _written(directory, lambda: _record(directory / RECORD, start.step, changes))
    _written(directory, lambda: rows.cut_after(directory / rows.NAME, start.step))
    if local is not None:
        local.begin(start.step, start.is_of(local))


def _written(directory: Path, write: Callable):
    """write() by process 0, with patience; every process has its value."""
    return agree.on_first(lambda: files.attempted(write, f"run.dir={directory} cannot be written",
                                                  "give a directory that can", ConfigError))


def source(directory: Path, step: int, name: str, option: str = "checkpoint.step=", *,
           only_params: bool = True) -> Saved:
    """The checkpoint of a run that its weights are taken from: of a step, or the newest. name, option: of the two,
    for messages. only_params: nothing else of it is to be read, nor checked.

    Raises: ConfigError where there is none.
    """
    saved = directory / "checkpoints"
    with user_errors():
        checkpoints = Checkpoints(saved, read_only=True) if files.is_dir(saved) else None
    if checkpoints and step:
        return _checked(checkpoints, step, option, only_params=only_params)
    newest = checkpoints.newest(only_params=only_params) if checkpoints else None
    if newest is None:
        raise ConfigError(f"{name} holds no whole checkpoint; name the run.dir of a run that has saved one")
    return newest


def _done(run: Run, saved: Saved | None) -> bool:
    """Whether this start's checkpoint.step and data.skip_batches lie behind a checkpoint already. Step 0 asks for
    nothing."""
    if saved is None:
        return False
    step, skip = (saved.run[section].get(key, 0) for section, key in (("checkpoint", "step"), ("data", "skip_batches")))
    return skip == run.data.skip_batches and run.checkpoint.step in (0, step)


def _checked(checkpoints: Checkpoints, step: int, option: str = "checkpoint.step=", *,
             only_params: bool = False) -> Saved:
    """The checkpoint that was asked for. Raises: ConfigError where it is not there, or damaged."""
    steps = checkpoints.steps()
    if step not in steps:
        there = f"has those of steps {', '.join(map(str, steps))}" if steps else "has none"
        raise agree.agreed(ConfigError(f"{option}{step} is not saved: {checkpoints.directory} {there}; name one that "
                                       "is, or 0 for the newest"))
    if fault := checkpoints.fault(step, only_params=only_params):
        raise agree.agreed(ConfigError(f"{option}{step}: {checkpoints.directory / str(step)} is damaged ({fault}); "
                                       "name another"))
    return checkpoints.open(step)


def _changes(run: Run, old: dict) -> tuple[tuple[str, object, object], ...]:
    """What is to be recorded. Raises: ConfigError with everything that had to stay."""
    refused, recorded = [], []
    for section, values in rundir.settings(run).items():
        for key, new in values.items():
            # a key that is new was at its default
            name, was = f"{section}.{key}", old.get(section, {}).get(key, new)
            if name == "data.mixture":
                was, new = ([one["weight"] for one in mixture] for mixture in (was, new))
            if was == new:
                continue
            if rule(name) == STAYS:
                refused.append(f"{name}={json.dumps(new)}, but the run in {run.run.dir} has {json.dumps(was)}; on "
                               f"resume the model, [lora], the data, optimizer.name and run.seed must stay: change it "
                               f"back, or give another run.name (checkpoint.init_from takes the weights along)")
            elif rule(name) == RECORDED:
                recorded.append((name, was, new))
    if refused:
        raise agree.agreed(ConfigError(*refused))
    return tuple(recorded)


def _record(path: Path, step: int, changes: list[tuple[str, object, object]]) -> None:
    """Appends the changes; what a start that was killed before its first checkpoint has recorded is there already."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    known = [(row["step"], row["key"], row["to"]) for row in map(json.loads, text.splitlines())]
    added = [{"step": step, "key": key, "from": old, "to": new, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            for key, old, new in changes if (step, key, new) not in known]
    if added:
        files.replace(path, text + "".join(json.dumps(row) + "\n" for row in added))
