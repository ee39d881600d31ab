"""Checks of texts, paths and addresses: each value can be written to config.toml, and is of a kind that its key
permits."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from meshtrain.config.messages import toml
from meshtrain.config.sections import Component, Run, TemplateArguments
from meshtrain.storage import addresses, copies, model_folder

# Keys that name files and directories.
PATHS = ("run.dir", "run.compilation_cache", "sharding.rules", "data.paths", "data.validation_paths", "data.tokenizer",
         "data.chat_template", "data.cache", "checkpoint.init_from", "checkpoint.local_dir", "distill.teacher",
         "distill.rules", "lora.init_from", "rl.rules")
# READ: keys that may name files at addresses. WRITTEN: keys that name directories to which the run writes.
READ = ("run.dir", "data.paths", "data.validation_paths", "data.mixture", "data.validation_sources", "data.tokenizer",
        "data.chat_template", "checkpoint.init_from", "distill.teacher", "lora.init_from")
WRITTEN = ("data.cache", "checkpoint.local_dir")


def _strings(value: object) -> Iterator[str]:
    """Yield the strings of a key's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, (Component, TemplateArguments)):
        yield from _strings(dict(value))


def _list_texts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (section.key, string) for each string of a run."""
    for section, table in run:
        for key, value in table:
            for text in _strings(value):
                yield f"{section}.{key}", text


def check_texts(run: Run) -> Iterator[str]:
    """Report text that UTF-8 cannot encode, paths that this locale cannot encode, and unknown home directories."""
    encoding = sys.getfilesystemencoding()
    for name, text in _list_texts(run):
        try:
            text.encode()
        except UnicodeEncodeError:
            yield (f"{name}={ascii(text)} is not UTF-8, but config.toml must be; rename the file, or name it by a link "
                   f"or a glob" if encoding == "utf-8" else
                   f"{name}={ascii(text)} is not text in this locale ({encoding}); set PYTHONUTF8=1, or LC_ALL=C.UTF-8")
            continue
        if name not in PATHS:
            continue
        if "\0" in text:
            yield f"{name}={toml(text)} has a null character, which file names cannot contain; remove it"
            continue
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            yield (f"{name}={ascii(text)} cannot be the name of a file in this locale ({encoding}); set PYTHONUTF8=1, "
                   f"or LC_ALL=C.UTF-8")
        if text.startswith("~") and name != "run.compilation_cache" and not os.path.exists(text):
            yield (f"{name}={toml(text)} has an unknown home directory (HOME is not set, or there is no such user); "
                   f"write the full path")


def check_addresses(run: Run) -> Iterator[str]:
    """Report addresses of an unknown form, addresses with secrets, and addresses where a directory is needed."""
    for name, text in _list_texts(run):
        if name not in READ + WRITTEN:
            continue
        if correct := addresses.correct_slashes(text):
            hidden, rest = addresses.hide_secrets(correct), correct.partition("://")[2]
            given = text.removesuffix(rest) + hidden.partition("://")[2]
            yield (f"{name}={toml(given)} is not an address, which has two slashes "
                   f"after its scheme; use {toml(hidden)}, or begin with ./ for a path")
            continue
        if not addresses.is_remote(text):
            continue
        if name in WRITTEN:
            yield (f"{name}={toml(addresses.hide_secrets(text))} is an address, but must be a directory; mount it, or "
                   f"name a directory that all hosts have")
            continue
        try:
            if addresses.parse(text).scheme not in addresses.BUCKETS and name == "run.dir":
                yield (f"run.dir={toml(addresses.hide_secrets(text))} cannot be written; give a directory, or an "
                       f"address in a bucket, s3://BUCKET/… or gs://BUCKET/…")
        except addresses.StorageError as error:
            yield f"{name}: {error}"


def check_init_from(run: Run) -> Iterator[str]:
    """Check that checkpoint.init_from is a model folder or the directory of another run."""
    source = run.checkpoint.init_from
    if not source:
        return
    if addresses.is_remote(source):
        if source.rstrip("/") == run.run.dir.rstrip("/"):
            yield (f"checkpoint.init_from={toml(source)} is this run's own run.dir; give the new run another one, or "
                   f"leave init_from out to resume the old run")
        elif copies.is_run(source):
            return
        elif not model_folder.is_at(source):
            yield (f"checkpoint.init_from={toml(source)} has neither config.json nor config.toml: it is neither a "
                   f"model folder nor a run directory; give one of them")
    elif not os.path.isdir(source):
        if Path(source).parts[:1] == ("runs",):     # may not exist yet; train looks for its checkpoint
            return
        yield (f"checkpoint.init_from={toml(source)} is not a directory; give the run.dir or the model folder to "
               f"start from")
    elif Path(source).resolve() == Path(run.run.dir).resolve():
        yield (f"checkpoint.init_from={toml(source)} is this run's own run.dir={toml(run.run.dir)}; "
               "give the new run another run.name, or leave init_from out to resume the old run")
    if run.checkpoint.init_optimizer and model_folder.is_at(source):
        yield (f"checkpoint.init_optimizer=true: checkpoint.init_from={toml(source)} is a model folder, which has no "
               f"optimizer's state; leave init_optimizer out")
