"""Finds the checkpoint that a run resumes from, and checks changed settings. Content is compared, not spelling.

The table CHANGES maps keys of the run file to the meaning of a difference. Changes that affect numbers are reported
and recorded in run.dir/changes.jsonl with their step; config.toml has the current settings. The data position is
stored as tokens per source, so that batch size and mixture may change. This module knows no model and no arrays.
"""
from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from meshtrain import custom, files
from meshtrain.checkpoint.bucket import BucketStore
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.checkpoint.saved import BackgroundSaves, Saved
from meshtrain.checkpoint.store import AVERAGE, CheckpointError, Store
from meshtrain.cluster import agree
from meshtrain.cluster.lost import PeerError
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.data.documents.contracts import Batches
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.data.sources import Corpus
from meshtrain.journal import rows
from meshtrain.names import EMA, LAST
from meshtrain.run import contents, rundir, say
from meshtrain.storage import addresses, mirror, model_folder

STAYS = "stays"             # a change is refused
CONTENT = "content"         # the content read is compared, not the spelling
RECORDED = "recorded"       # valid from the next step; reported and recorded
FREE = "free"               # affects no number, or this start only

CHANGES = (     # the first matching pattern applies
    ("run.seed", STAYS), ("run.code", RECORDED),
    ("run.*", FREE),
    ("model.compute_dtype", RECORDED), ("model.matmul_dtype", RECORDED),
    ("model.attention", RECORDED), ("model.mlp", RECORDED), ("model.*_dropout", RECORDED),
    ("model.*", STAYS),
    ("data.seq_len", RECORDED), ("data.global_batch", RECORDED), ("data.document_mask", RECORDED),
    ("data.eos", RECORDED),
    ("data.loss_on", RECORDED),
    ("data.mixture", RECORDED),     # the weights; sources are content
    ("data.packing", STAYS), ("data.template_arguments", STAYS),
    ("data.validation_fraction", STAYS),     # held-out documents must stay held out
    ("data.cache", FREE), ("data.validation_paths", FREE), ("data.validation_sources", FREE),
    ("data.skip_batches", FREE),
    ("data.*", CONTENT),
    ("optimizer.name", STAYS), ("optimizer.moments_dtype", STAYS), ("optimizer.offload", FREE),
    ("lora.export", FREE), ("lora.init_from", FREE),
    ("lora.*", STAYS),
    ("training.max_skipped_steps", FREE), ("training.check_replicas_every", FREE), ("training.objective", STAYS),
    ("rl.slots", FREE), ("rl.keep", FREE), ("rl.updates", STAYS),
    ("rl.reward_failures", RECORDED), ("rl.reward_*", FREE),
    ("validation.*", FREE), ("checkpoint.*", FREE), ("metrics.*", FREE), ("distributed.*", FREE),
    ("*", RECORDED),
)
RETRIED = ("optimizer.*", "data.*", "run.code", "training.grad_clip", "training.z_loss")
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins: after the checkpoint `saved`, or from the beginning if it is None.

    changes: changed settings to record, as (key, old, new). skip_batches: number of batches to skip from here on. back:
    whether the run goes back to a step before its newest one. rollbacks: the number of times that the run has gone back
    to a step before a loss spike, including this start.
    """
    saved: Saved | None = None
    changes: tuple[tuple[str, object, object], ...] = ()
    skip_batches: int = 0
    back: bool = False
    rollbacks: int = 0

    @property
    def step(self) -> int:
        return self.saved.step if self.saved else 0

    def value_of(self, name: str) -> Any:
        """Return a value of the checkpoint's metadata; None in a fresh run."""
        return self.saved and self.saved.metadata.get(name)

    def is_of(self, checkpoints: BackgroundSaves) -> bool:
        """Return whether the run resumes from a checkpoint in `checkpoints`."""
        return self.saved is not None and self.saved.checkpoints is checkpoints

    @property
    def leaves_the_course(self) -> bool:
        """Whether the following steps may have other results than the same steps of an earlier start."""
        return self.back or self.skip_batches > 0 or any(
            fnmatch.fnmatchcase(key, pattern) for key, *_ in self.changes for pattern in RETRIED)

    @property
    def cause(self) -> str:
        """A description of the start for the history."""
        if self.saved is None:
            return "from the beginning"
        return f"back to step {self.step}" if self.back else f"resuming after step {self.step}"


def rule(key: str) -> str:
    """Return the rule for a changed section.key in a resumed run."""
    return next(meaning for pattern, meaning in CHANGES if fnmatch.fnmatchcase(key, pattern))


def find(run: Run, checkpoints: Checkpoints, local: LocalCheckpoints | None = None, wanted: object = None,
         named: Mapping[str, str] | None = None) -> Start:
    """Find the checkpoint to resume from: checkpoint.step if set, else the newest complete one. All processes call it.

    local: may have a newer checkpoint than the shared `checkpoints`. wanted: the state to restore, as a pytree of
    jax.ShapeDtypeStruct with shardings. named: file contents by the key that names the
    file, like `files` in the metadata.

    `checkpoint.step` and `data.skip_batches` take effect once. If a later checkpoint was saved with the same two
    values, the run resumes from that checkpoint, so that the command can be repeated. If a setting in RETRIED changes,
    the run goes back to checkpoint.step again. Raises: ConfigError if the requested checkpoint is missing, or if a
    setting that must not change has changed.
    """
    requested, saved, newest = run.checkpoint.step, None, None
    try:
        saved = checkpoints.newest(lambda after: local and local.newest(after, wanted))
        newest = saved and saved.step
    except (CheckpointError, PeerError):
        if not requested:
            raise
    if saved is None and (not requested or run.checkpoint.init_from):
        return Start(skip_batches=run.data.skip_batches)
    changes = changes_of(run, saved, named) if saved else ()
    goes_back_again = any(fnmatch.fnmatchcase(key, pattern) for key, *_ in changes for pattern in RETRIED)
    if requested and (goes_back_again or not _took_effect(run, saved)):
        saved = _open_verified(checkpoints, requested)
    return Start(saved, changes_of(run, saved, named), 0 if _took_effect(run, saved) else run.data.skip_batches,
                 back=saved.step != newest)


def in_force(run: Run, start: Start) -> Run:
    """Return the run with data.eos of its checkpoint if the run file names none, so that documents end as before."""
    eos = start.saved.run["data"].get("eos", "") if start.saved else ""
    return run if run.data.eos or not eos else run.replace(data={"eos": eos})


def origin(run: Run) -> Saved | None:
    """Return the checkpoint of another run that a new run takes its weights from; the checkpoint is not verified yet.
    None if the weights come from a model folder or are freshly initialized, or if the checkpoint is missing, which is
    reported when the weights are read. All processes call it."""
    where = run.checkpoint.init_from
    with user_errors():
        if not where or model_folder.is_at(where):
            return None
    if (checkpoints := checkpoints_there(where)) is None:
        return None
    steps = checkpoints.steps()
    step = run.checkpoint.step or max(steps, default=0)
    try:
        return checkpoints.open(step) if step in steps else None
    except CheckpointError:
        return None


def before_spike(run: Run, start: Start, spiked: int, checkpoints: Checkpoints, local: LocalCheckpoints,
                 wanted: object) -> Start:
    """Return the start after the newest checkpoint before a loss spike. The batches up to the spike are skipped.
    Batches that `start` skips after the same checkpoint stay skipped. start: of this run. spiked: the spike's step."""
    new = find(run.replace(checkpoint={"step": 0}), checkpoints, local, wanted)
    again = start.skip_batches if new.step == start.step else 0
    return dataclasses.replace(new, changes=(), skip_batches=again + spiked - new.step, back=True)


def check_tokenizer(run: Run, start: Start, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer is that of the run, before hours of tokenizing. Raises: ConfigError if it differs."""
    if (data := start.value_of("data")) and data["tokenizer"] != [tokenizer.key, tokenizer.bos]:
        raise ConfigError(f"data.tokenizer={json.dumps(run.data.tokenizer)} has another content than the tokenizer of "
                          f"the run in {run.run.dir}; give the run's tokenizer, or another run.name")


def check_data(run: Run, start: Start, fingerprint: str) -> None:
    """Check that the documents are those of the run. Raises: ConfigError if the documents differ."""
    if (data := start.value_of("data")) and data["fingerprint"] != fingerprint:
        raise ConfigError(f"the data differ from those that the run in {run.run.dir} read up to step {start.step} "
                          "(documents were added, removed or changed in length); restore the files or start another "
                          "run.name")


def check_prompts(run: Run, start: Start, digest: str) -> None:
    """Check that the run trains on the same prompts as before. digest: hash of the prompts to train on. Raises:
    ConfigError if the prompts differ."""
    if (data := start.value_of("data")) and data["position"].get("prompts", digest) != digest:
        raise ConfigError(f"data.validation_paths={json.dumps(list(run.data.validation_paths))} changes the training "
                          f"prompts of the run in {run.run.dir}, which is at step {start.step}: held-out prompts would "
                          "be trained on, or the reverse; restore data.validation_paths, or give another run.name with "
                          "checkpoint.init_from")


def position(start: Start, pack: Callable[[dict | None], Batches]) -> Batches:
    """Return the run's batches from `start` on. pack: data position -> batches from there; None: from the beginning."""
    data = pack(start.saved and start.saved.metadata["data"]["position"])
    if not start.skip_batches:
        return data
    skipped = data.position(start.step + start.skip_batches)
    tokens = [source["tokens"] for source in skipped["sources"]]
    phase = skipped["phase"] | {"batches": start.step, "tokens": tokens}
    return pack(skipped | {"batches": start.step, "phase": phase})


def data_metadata(corpus: Corpus, data: Batches, step: int, ends: Mapping[str, object]) -> dict:
    """Return the entry "data" of a checkpoint's metadata. ends: the stop tokens to save; not read by this package."""
    return {"fingerprint": corpus.fingerprint, "tokenizer": [corpus.tokenizer.key, corpus.tokenizer.bos],
            "position": data.position(step), "ends": dict(ends)}


def begin(run: Run, start: Start, checkpoints: Checkpoints, local: LocalCheckpoints | None,
          rules_text: str) -> None:
    """Set aside checkpoints after `start`, report and record changed settings, and drop metrics of repeated steps: the
    last action before the first step. Raises: ConfigError, FileSystemError."""
    directory, messages = mirror.directory(run.run.dir), []
    if start.back:
        kept_rows = _write(directory, lambda: rows.set_aside_after(directory / rows.NAME, start.step))
        later = checkpoints.set_aside_after(start.step)
        kept = [f"later checkpoints are kept as {', '.join(later)}"] * bool(later)
        kept += [f"later rows in {kept_rows}"] * bool(kept_rows)
        messages += [f"back to step {start.step}: {', '.join(kept) or 'there are no later steps'}"]
    changes = list(start.changes)
    if start.skip_batches:
        changes.append(("data.skip_batches", 0, start.skip_batches))
    messages += [f"from step {start.step + 1} on: {key}={json.dumps(new)} (was {json.dumps(old)})"
                 for key, old, new in changes]
    if jax.process_index() == 0:
        for line in messages:
            say.out(line)
    if start.back:
        changes.append(("checkpoint.step", None, start.step))
    _write(directory, lambda: rundir.write_settings(run.replace(checkpoint={"step": 0}), directory, rules_text))
    _write(directory, lambda: record_changes(directory / contents.CHANGES, start.step, changes))
    _write(directory, lambda: rows.cut_after(directory / rows.NAME, start.step))
    if local is not None:
        local.begin(start.step, start.is_of(local))


def _write(directory: Path, write: Callable[[], Value]) -> Value:
    """Call write() in process 0, with retries; return its value in every process."""
    return agree.on_first(lambda: files.attempt(write, f"run.dir={directory} cannot be written",
                                                "give a directory that can be written", ConfigError))


def checkpoints_of(run_dir: str, claim: rundir.Claim | None = None, **keys) -> Checkpoints:
    """Return the checkpoints of a run; without a claim they are read-only. run_dir: its directory or address. claim:
    the claim of this start on the directory. keys: keyword arguments of `Checkpoints`. All processes call it."""
    keys |= {"read_only": True} if claim is None else {"check_claim": claim.check}
    if not addresses.is_remote(run_dir):
        store: Store = DirectoryStore(Path(run_dir) / contents.CHECKPOINTS)
    else:
        place = addresses.parse(run_dir).below(contents.CHECKPOINTS)
        store = BucketStore(place) if claim is None else BucketStore(place, start=claim.nonce, before_commit=claim.send)
    return Checkpoints(store, **keys)


def checkpoints_there(run_dir: str) -> Checkpoints | None:
    """Return the checkpoints of another run; None if its directory has none."""
    with user_errors():
        there = addresses.is_remote(run_dir) or files.is_dir(Path(run_dir) / contents.CHECKPOINTS)
        return checkpoints_of(run_dir) if there else None


def source_of(run_dir: str, step: int, weights: str) -> Saved:
    """Return the checkpoint whose weights a command reads: that of `step`, or the newest if `step` is 0. weights: LAST,
    or EMA for their average. All processes call it. Raises: ConfigError if the checkpoint or its average is missing."""
    saved = source(run_dir, step, run_dir, "--step ", only_params=weights == LAST)
    if weights == EMA and not saved.has(AVERAGE):
        raise agree.mark_agreed(ConfigError(
            f"--weights ema: step {saved.step} of {run_dir} has no average of the weights, which a run keeps with "
            f"training.ema, e.g. 0.999; leave --weights out"))
    return dataclasses.replace(saved, averaged=weights == EMA)


def source(run_dir: str, step: int, name: str, option: str = "checkpoint.step=", *,
           only_params: bool = True) -> Saved:
    """Return the checkpoint of a run that provides weights: the checkpoint of `step`, or the newest if `step` is 0.
    name: the name of the run, in messages. option: the option that gives the step, in messages. only_params: read and
    verify only the parameters. Raises: ConfigError if the checkpoint is missing."""
    checkpoints = checkpoints_there(run_dir)
    if checkpoints and step:
        return _open_verified(checkpoints, step, option, only_params=only_params)
    newest = checkpoints.newest(only_params=only_params) if checkpoints else None
    if newest is None:
        raise ConfigError(f"{name} has no complete checkpoint; give the run.dir of a run that has saved one")
    return newest


def _took_effect(run: Run, saved: Saved | None) -> bool:
    """Return whether checkpoint.step and data.skip_batches have taken effect: `saved` was saved with the same values. A
    checkpoint.step of 0 requests nothing."""
    if saved is None:
        return False
    step, skip = (saved.run[section].get(key, 0) for section, key in (("checkpoint", "step"), ("data", "skip_batches")))
    return skip == run.data.skip_batches and run.checkpoint.step in (0, step)


def _open_verified(checkpoints: Checkpoints, step: int, option: str = "checkpoint.step=", *,
              only_params: bool = False) -> Saved:
    """Return the requested checkpoint. Raises: ConfigError if it is missing or damaged."""
    steps = checkpoints.steps()
    if step not in steps:
        there = f"has steps {', '.join(map(str, steps))}" if steps else "has none"
        raise agree.mark_agreed(ConfigError(f"{option}{step} is not saved: {checkpoints.place} {there}; give a saved "
                                            "step, or 0 for the newest"))
    if fault := checkpoints.fault(step, only_params=only_params):
        raise agree.mark_agreed(ConfigError(f"{option}{step}: {checkpoints.path_of(step)} is damaged ({fault}); "
                                            "name another"))
    return checkpoints.open(step)


def changes_of(run: Run, saved: Saved, named: Mapping[str, str] | None) -> tuple[tuple[str, object, object], ...]:
    """Return the changes to record. Raises: ConfigError that lists every fixed setting that has changed."""
    refused, recorded = [], []
    code_then = saved.run.get("run", {}).get("code", ())
    contents_then = {"sharding.rules": saved.metadata.get("rules"), **saved.metadata.get("files", {})}
    settings_then = _with_defaults(saved.run)
    for section, values in rundir.settings(run).items():
        for key, new in values.items():
            name, was = f"{section}.{key}", settings_then[section].get(key, new)
            if name == "data.mixture":
                was, new = ([source["weight"] for source in mixture] for mixture in (was, new))
            if named and name in named and (then := contents_then.get(name)) is not None:
                if _parse(then) == _parse(named[name]):
                    continue
                if was == new:
                    was, new = (f"{new} ({hashlib.blake2b(content.encode(), digest_size=4).hexdigest()})"
                                for content in (then, named[name]))
            if was == new or name == "data.eos" and not new:       # see `in_force`
                if name != "optimizer.groups" or list(was) == list(new):       # the first row that matches counts
                    continue
            elif custom.identify(was, code_then) == custom.identify(new, run.run.code):
                continue
            # depths of MTP that are not trained have no optimizer state
            switched = name == "training.mtp_weight" and bool(was) != bool(new)
            if switched or rule(name) == STAYS or name == "optimizer.groups" and _rules_of(was) != _rules_of(new):
                cause, remedy = _explain_derived(run, name, was)
                refused.append(f"{name}={json.dumps(new)}{cause}, but the run in {run.run.dir} has {json.dumps(was)}; "
                               "on resume the model, [lora], the data, the optimizer's name and dtype and run.seed "
                               f"must stay: {remedy}, or give another run.name (with checkpoint.init_from to keep the "
                               "weights)")
            elif rule(name) == RECORDED:
                recorded.append((name, was, new))
    if refused:
        raise agree.mark_agreed(ConfigError(*refused))
    return tuple(recorded)


def _with_defaults(sections: Mapping[str, dict]) -> Mapping[str, dict]:
    """Return a checkpoint's sections in which keys that its version of the program lacked have their defaults. Sections
    that are no run file of this version stay as they are."""
    then = {name: {key: value for key, value in sections.get(name, {}).items() if key in type(section).model_fields}
            for name, section in Run()}
    if all(then[name].keys() == type(section).model_fields.keys() for name, section in Run()):
        return then
    try:
        defaults = rundir.settings(Run.model_validate_json(json.dumps(then)))
    except ValueError:
        return then
    return {name: values | then[name] for name, values in defaults.items()}


def _explain_derived(run: Run, name: str, was: Any) -> tuple[str, str]:
    """Return (the key that the value of section.key `name` follows from, for a message; the remedy). was: the value of
    the checkpoint."""
    model, rate, seq_len = run.model, run.experts.bias_rate, run.data.seq_len
    if name == "model.router_bias" and (model.router_bias, was) == ("none", "choice"):
        return f" (with experts.bias_rate={rate:g})", 'set model.router_bias="choice" (the biases keep their values)'
    if name == "model.router_bias" and (model.router_bias, was) == ("choice", "none") and rate:
        return f" (with experts.bias_rate={rate:g})", "use experts.bias_rate=0"
    if name == "model.max_seq_len" and model.max_seq_len == seq_len != was:
        return f" (with data.seq_len={seq_len})", (
            f"set model.max_seq_len={was}" if seq_len < was else f"use at most data.seq_len={was}")
    return "", "change it back"


def _rules_of(groups: Any) -> list[tuple[str, str]]:
    """Return optimizer.groups as (pattern, rule), on which the optimizer's state depends; [] if no row has a rule."""
    chosen = [(pattern, row.get("rule", "")) for pattern, row in groups.items() if pattern not in ("preset", "base")]
    return chosen if any(rule_ for _, rule_ in chosen) else []


def _parse(content: str) -> object:
    """Return the parsed TOML of a rule file, so that its spelling does not matter; any other content as it is."""
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError:
        return content


def record_changes(path: Path, step: int, changes: Sequence[tuple[str, object, object]]) -> None:
    """Append changes (key, old, new) to the record, except those that a start killed before its first checkpoint has
    already recorded."""
    known = [(row["step"], row["key"], row["to"]) for row in rows.Log(path, rows.is_change).read()]
    added = [{"step": step, "key": key, "from": old, "to": new, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
             for key, old, new in changes if (step, key, new) not in known]
    if added:
        content = path.read_bytes() if path.exists() else b""
        content += b"\n" * (content[-1:] not in (b"", b"\n"))     # torn by a power cut
        files.replace(path, content + "".join(json.dumps(row) + "\n" for row in added).encode())
