"""Loads run files: TOML and `--section.key value` become one frozen `Run`.

`load` collects every fault (unknown names, types, ranges, contradicting keys) and raises once. If the run starts from a
model folder, the folder's config.json gives the keys of [model]. `design`, which knows the rules, checks whether the
layout fits its rule file.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from meshtrain import custom, files, pattern
from meshtrain.config import layouts, named
from meshtrain.config.checks import APART_FROM_LAYOUT, problems
from meshtrain.config.conflicts import Check, Conflict
from meshtrain.config.data_checks import check_for_source
from meshtrain.config.elsewhere import OPTIONS
from meshtrain.config.messages import (
    SECTIONS, ConfigError, join, keys_of, kind_of, toml, unknown_key, unknown_name, unknown_section,
    user_errors, with_origins, wrong_in_table, wrong_value,
)  # fmt: skip
from meshtrain.config.sections import Lora, Model, Run, WeightGroups, at_home, fill
from meshtrain.config.to_toml import ENGINES, NOT_SHAPE, USAGE, help_text
from meshtrain.huggingface import folder, weight_files
from meshtrain.shipped import find_file, locate_shipped, names, path_of, rule_file
from meshtrain.storage import addresses, copies, model_folder
from meshtrain.storage.addresses import StorageError

QUICKSTART = locate_shipped("configs/quickstart.toml")
EXTENDS = "run.extends"
MOST_BYTES = 1 << 24  # limit of a run file's size; /dev/zero, for example, never ends
NO_SETTINGS: typing.Mapping[str, object] = types.MappingProxyType({})


def load(argv: Sequence[str], usage: str = USAGE, settings: typing.Mapping[str, object] = NO_SETTINGS) -> Run:
    """Parse `argv`: an optional run file, then overrides.

    settings: section.key -> value; they replace those of the run file, and `argv` replaces them.

    Raises: ConfigError with every fault at once; SystemExit(0) after printing --help.
    """
    copies.forget()
    path, overrides, faults = _arguments(argv)
    overrides = [*((name, str(value)) for name, value in settings.items()), *overrides]
    given = dict(overrides).get(EXTENDS, "")
    tables, origins, unreadable = _read_extended(path or QUICKSTART, (given, Path()) if given else None)
    with _model_folder():
        _override(tables, overrides, path is None)
        run, wrong, reported = _build(tables)
    if not layouts.names_axis(run):
        run = run.model_copy(update={"mesh": fill(run.mesh.model_copy(), fsdp=-1)})
    if {"--help", "-h"} & set(argv):
        with contextlib.suppress(OSError):      # `--help | head`
            print(help_text(run, usage), flush=True)
        raise SystemExit(0)
    # If a file is unreadable or a key faulty, defaults replace them. Contradictions with these defaults are not
    # reported.
    contradictions = [] if unreadable else [
        message for message in [*problems(run), *check_for_source(run), *BIASES_OF_FOLDER(run),
                                           *check_teacher(run)]
        if not reported.search(message)]
    origins = {name: file for name, file in origins.items() if name not in dict(overrides)}
    if faults + unreadable + wrong + contradictions:
        raise ConfigError(*faults, *unreadable, *(with_origins(one, origins) for one in wrong + contradictions))
    return run


def resolve(tables: dict, words: Sequence[str], allowed: Sequence[str],
            command: str) -> tuple[Run, frozenset[str]]:
    """Return the run of these tables with overrides, for commands that do not train.

    Returns (the run with the overrides in `words`, the names of the overridden keys). allowed: sections ("mesh.") and
    keys that `words` may give. Only these sections are checked for contradictions. Raises: ConfigError.
    """
    path, overrides, faults = _arguments(words)
    if path is not None:
        faults.append(f"{path} is an extra name; {command} takes one directory")
    given = frozenset(name for name, _ in overrides)
    known = [f"{section}.{key}" for section, cls in SECTIONS.items() for key in cls.model_fields]
    faults += [f"{name} has no effect here; {command} reads "
               f"{join([one + '*' * one.endswith('.') for one in allowed], 'and')}"
               for name in sorted(given) if name in known and not name.startswith(tuple(allowed))]
    tables = {section: dict(table) for section, table in tables.items()}
    with _model_folder():
        _override(tables, overrides, False)
        run, wrong, reported = _build(tables)
    checked = tuple(name for name in allowed if name.endswith("."))
    contradictions = [message for message in problems(run)
                      if message.startswith(checked) and not reported.search(message)]
    if faults + wrong + contradictions:
        raise ConfigError(*faults, *wrong, *contradictions)
    return run, given


@contextlib.contextmanager
def _model_folder() -> Iterator[None]:
    """Raise ConfigError if checkpoint.init_from is an address that cannot be read. Without its config.json the values
    of [model] are unknown, so no other fault is reported."""
    try:
        yield
    except StorageError as error:
        with user_errors("checkpoint.init_from: "):
            raise error from None


def names_mesh(argv: Sequence[str]) -> bool:
    """Return whether `argv` sets a mesh: by a run file, at any position, or by a key of [mesh]."""
    path, overrides, _ = _arguments(argv)
    return path is not None or any(name.startswith("mesh.") for name, _ in overrides)


def _arguments(argv: Sequence[str]) -> tuple[str | Path | None, list[tuple[str, str]], list[str]]:
    """Return (run file or None, [(section.key, text)], faults)."""
    path, overrides, faults = None, [], []
    rest = [arg for arg in argv if arg not in ("--help", "-h")]
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("-"):
            if path is not None:
                faults.append(f"{arg} is a second run file in addition to {path}; give one, and changes as "
                              f"--section.key value")
            path = path or (arg if addresses.is_remote(arg) else Path(arg))
            continue
        name, equals, value = arg.removeprefix("--").partition("=")
        text: str | None = value
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if not arg.startswith("--") or name.count(".") != 1:
            homes = [f"--{key}" for key in keys_of(name)]
            remedy = (f"did you mean {join(homes, 'or')}?" if homes else
                      OPTIONS.get(name.lower().replace("-", "_"), "options are --section.key value"))
            faults.append(f"{arg} is not an option; {remedy}")
        elif text is None:
            faults.append(f"{arg} has no value; write {arg} VALUE or {arg}=VALUE")
        elif name == "run.code":
            faults.append(f"{arg}: the program writes this key; leave it out")
        else:
            overrides.append((name, text))
    return path, overrides, faults


def _local(path: str | Path) -> str | Path:
    """Return the local path of a run file, given as a path, a shipped file's name or an address, which is copied first.
    Raises: ConfigError."""
    if not addresses.is_remote(path):
        return find_file(path)
    with user_errors():
        return copies.copy_files([str(path)], lambda name: (), copies.Copying(copies.home()))[0]


def _read(path: Path) -> tuple[dict, list[str]]:
    """Return (the file's tables, faults)."""
    try:
        data = files.patiently(lambda: files.read_start(path, MOST_BYTES))
        if len(data) > MOST_BYTES:
            return {}, [f"{path} is larger than {MOST_BYTES:,} bytes: it is not a run file; name one"]
        # some editors on Windows write a byte order mark before the text
        return tomllib.loads(data.decode("utf-8-sig")), []
    except FileNotFoundError:
        known = {stem: f"configs/{stem}.toml" for stem in names("configs")}
        near = difflib.get_close_matches(path.stem, known, n=1)
        remedy = f"did you mean {known[near[0]]}?" if near else f"shipped are {join(known.values(), 'and')}"
        return {}, [f"{path}: there is no such run file; {remedy}"]
    except IsADirectoryError:
        return {}, [f"{path} is a directory; name the run file, e.g. {path / 'config.toml'}"]
    except OSError as e:
        if not files.is_mistake(e):
            raise files.error_to_raise(e, f"{path} cannot be read", "name a readable file") from None
        return {}, [f"{path} cannot be read: {e.strerror}; name a readable file"]
    except UnicodeDecodeError as e:
        return {}, [f"{path} is not text (byte {e.start} is not UTF-8); a run file is TOML in UTF-8"]
    except (ValueError, RecursionError) as e:  # bad TOML, a number of thousands of digits, thousands of brackets
        where = re.search(r" \(at line (\d+), column (\d+)\)$", str(e))
        place, what = (f"{path}:{where[1]}:{where[2]}", str(e)[: where.start()]) if where else (str(path), str(e))
        return {}, [f"{place}: {what}; in TOML strings take quotes, booleans are true or false, lists close with ]"]


def _read_extended(file: str | Path, base: tuple[str, Path] | None, extending: tuple[str, ...] = ()
                   ) -> tuple[dict, dict[str, str], list[str]]:
    """Return the tables of a run file. The files that it extends give the keys that it lacks.

    Returns (tables, {key: the other file that gives the key}, faults). base: (the file to extend instead of the file's
    run.extends, the file to which the name is relative); None: use run.extends. extending: the files that extend this
    one. Raises: ConfigError if an address cannot be read.
    """
    local = _local(file)
    tables, faults = _read(local)
    table = tables.get("run")
    named = table.pop("extends", "") if isinstance(table, dict) else ""
    named, beside = base or (named, file if addresses.is_remote(file) else local)
    if faults or named == "":
        return tables, {}, faults
    chain = (*extending, os.path.realpath(local))
    if not isinstance(named, str) or "\0" in named:      # no file's name has a null character
        return tables, {}, [f'{file}: {EXTENDS}={toml(named)} is not the name of one run file; use e.g. "base.toml"']
    other = _beside(named, beside)
    if (there := os.path.realpath(_local(other))) in chain:
        return tables, {}, [f"{file}: {EXTENDS}={toml(named)} leads back to {there}; a run file cannot extend itself"]
    inherited, origins, faults = _read_extended(other, None, chain)
    faults = [fault if EXTENDS in fault else f"{file}: {EXTENDS}={toml(named)}: {fault}" for fault in faults]
    if isinstance(tables.get("model"), dict) and tables["model"].get("preset"):
        _drop_shape(inherited)
    origins = {f"{section}.{key}": origins.get(f"{section}.{key}", str(other)) for section, table in inherited.items()
               for key in (table if isinstance(table, dict) else ())}
    for section, table in tables.items():
        both = isinstance(table, dict) and isinstance(inherited.get(section, {}), dict)
        inherited[section] = inherited.get(section, {}) | table if both else table
        for key in table if both else ():
            origins.pop(f"{section}.{key}", None)
    return inherited, origins, faults


def _beside(named: str, file: str | Path) -> str | Path:
    """Return the run file `named` in `file`: relative to it, or a shipped one, also by its bare name."""
    named = at_home(named)
    if addresses.is_remote(named):
        return named
    if addresses.is_remote(file):
        return f"{str(file).rpartition('/')[0]}/{named}"
    path = Path(os.path.normpath(Path(file).parent / named))
    if os.path.exists(path):
        return path
    return names("configs").get(named) or (locate_shipped(named) if os.path.isfile(locate_shipped(named)) else path)


def _drop_shape(tables: dict) -> None:
    """Remove the shape from [model], because the shape of a preset replaces it."""
    if isinstance(tables.get("model"), dict):
        tables["model"] = {key: value for key, value in tables["model"].items() if key.endswith(NOT_SHAPE)}


def _override(tables: dict, overrides: Sequence[tuple[str, str]], default: bool) -> None:
    """Write the command line's values into the tables: as text for string keys, parsed as TOML for others.

    default: True if no file was named, so that the tables are the quickstart's.
    """
    given = dict(overrides)
    # A preset on the command line replaces the file's model shape; only keys on the command line are added to it. A
    # model folder replaces the quickstart's shape, which the user did not write. In the same way data.paths replaces
    # the quickstart's source.
    if given.get("model.preset") or default and model_folder.is_at(at_home(given.get("checkpoint.init_from", ""))):
        _drop_shape(tables)
    if default and {"data.paths", "data.mixture"} & given.keys() and isinstance(tables.get("data"), dict):
        tables["data"].pop("source", None)
    other_data = {"data.source", "data.paths", "data.mixture"} & given.keys() and given.get("data.source") != "stdlib"
    if default and other_data and isinstance(tables.get("run"), dict):
        # The prompt is Python. Other data may have no Python, and their tokenizer may not encode it.
        tables["run"].pop("sample_prompt", None)
    for name, text in overrides:
        section, key = name.split(".")
        if name == EXTENDS:
            continue
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            continue  # reported as a fault of the file
        field = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
        table[key] = text
        if field is not None and kind_of(field) not in ("string", "choice"):
            try:
                parsed = tomllib.loads(f"value = {text}")
            except (ValueError, RecursionError):
                continue  # stays text, and is refused as text with its type's remedy
            table[key] = parsed["value"] if len(parsed) == 1 else text


def _build(tables: dict) -> tuple[Run, list[str], re.Pattern]:
    """Return (a run from raw tables, faults of their names and values, a pattern for the names of faulty keys).

    A faulty key takes its default, so that further faults are found.
    """
    faults, faulty = [], []
    sections: dict = {}
    for name, table in tables.items():
        if name not in SECTIONS:
            faults.append(unknown_section(name, table))
        elif not isinstance(table, dict):
            faults.append(f"{name}={toml(table)} is not a section; write [{name}] with its keys below it")
            faulty.append(name)
    for name, cls in SECTIONS.items():
        table = tables.get(name, {})
        table = dict(table) if isinstance(table, dict) else {}
        for key in [key for key in table if key not in cls.model_fields]:
            faults.append(unknown_key(name, key, table.pop(key)))
        if name == "model" and isinstance(table.get("preset"), str) and table["preset"]:
            if table["preset"] in presets():
                table = _read(presets()[table["preset"]])[0]["model"] | table
            else:
                faults.append(unknown_name("model.preset", table["preset"], presets()))
                faulty.append("model.preset")
            del table["preset"]
        if name == "model":
            table, contradictions = _with_folder(table, tables.get("checkpoint"))
            faults += contradictions
        if name == "lora" and "model" not in faulty and not any(one.startswith("model.") for one in faulty):
            table, contradictions = _with_adapters(table, sections["model"], tables.get("checkpoint"))
            faults += contradictions
        try:
            sections[name] = cls(**table)
        except ValidationError as e:
            faults += [wrong_value(name, cls, error) for error in e.errors()]
            wrong = {error["loc"][0] for error in e.errors()}
            faulty += [f"{name}.{key}" for key in wrong]
            sections[name] = cls(**{key: value for key, value in table.items() if key not in wrong})
    run = Run(**sections)
    code = custom.describe(value for _, value, _ in named.values(run))
    template = path_of(run.data.chat_template, "chat_templates")
    run = run.model_copy(update={"sharding": fill(run.sharding.model_copy(), rules=str(rule_file(run.sharding.rules))),
                                 "data": fill(run.data.model_copy(), chat_template=template),
                                 "run": fill(run.run.model_copy(), code=code)})
    grouped, wrong_base = _with_base(run.optimizer.groups)
    run = run.model_copy(update={"optimizer": fill(run.optimizer.model_copy(), groups=grouped)})
    faults += wrong_base
    faulty += ["model"] if "model.preset" in faulty else []
    return run, faults, re.compile("|".join(rf"\b{re.escape(name)}\b" for name in faulty) or "$^")


def _with_base(groups: WeightGroups) -> tuple[WeightGroups, list[str]]:
    """Return (optimizer.groups with the base's keys of [model] in place of its name, faults)."""
    name, keys = "optimizer.groups.base", groups.base
    if not keys:
        return groups, []
    if isinstance(keys, str):
        tables, _, faults = _read_extended(presets().get(keys) or _beside(keys, Path("here")), None)
        base, wrong, _ = _build({section: table for section, table in tables.items() if section != "optimizer"})
        if faults or wrong:
            return WeightGroups(), [f"{name}={toml(keys)}: {fault}" for fault in faults or wrong]
        keys = {key: value for key, value in base.model.model_dump(exclude_defaults=True).items()
                if not (key.endswith(NOT_SHAPE) or key in ENGINES)}
    try:
        faults = [f"{name}: {fault}" for fault in problems(Run(model=Model(**keys)), APART_FROM_LAYOUT)]
    except ValidationError as e:
        faults = [wrong_in_table(name, Model, error) for error in e.errors()]
    if faults:
        return WeightGroups(), faults
    return fill(groups.model_copy(), base=keys), []


def _with_folder(table: dict, checkpoint: object) -> tuple[dict, list[str]]:
    """Return (the keys of [model], faults). If checkpoint.init_from is a model folder, the shape is taken from it."""
    source = checkpoint.get("init_from") if isinstance(checkpoint, dict) else None
    if not isinstance(source, str) or not model_folder.is_at(source := at_home(source)):
        return table, []
    try:
        keys = folder.settings_of(model_folder.local_path(source))
    except ValueError as error:
        return table, [f"checkpoint.init_from: {fault}" for fault in str(error).splitlines()]
    free = {key: value for key, value in table.items() if key.endswith(NOT_SHAPE)
            or key in (*ENGINES, "embedding_std", "mtp_layers")}
    try:
        decided, given = Model(**keys), Model(**keys | table)
    except ValidationError:
        return table, []      # `_build` reports it
    # This model does not use mlp_dim, and the folders of some families do not set it.
    if not pattern.share(decided, mlps="d"):
        free |= {key: table[key] for key in ("mlp_dim",) if key in table}
    # Whether the folder has an untied head is known only when its weights are read at the start.
    if decided.tie_embeddings and "tie_embeddings" in table and not weight_files.at_hand(
            model_folder.local_path(source)):
        free |= {"tie_embeddings": table["tie_embeddings"]}
    if given.vocab_size > decided.vocab_size:       # `growth` makes the further rows
        free |= {"vocab_size": given.vocab_size}
    wrong = [key for key in table if key not in free and getattr(given, key) != getattr(decided, key)]
    return keys | free, [
        f"model.{key}={toml(table[key])} contradicts checkpoint.init_from={toml(source)}, whose config.json sets it "
        f"to {toml(getattr(decided, key))}; leave the key out" for key in wrong]


def _with_adapters(table: dict, model: Model, checkpoint: object) -> tuple[dict, list[str]]:
    """Return (the keys of [lora], faults). If lora.init_from is a PEFT folder, it gives rank, alpha and targets."""
    source, base = table.get("init_from"), checkpoint.get("init_from") if isinstance(checkpoint, dict) else None
    if not isinstance(source, str) or not source or base is not None and not isinstance(base, str):
        return table, []
    source = at_home(source)
    if "rank" in table and not addresses.is_remote(source) and not os.path.lexists(source):
        return table, []        # a run that resumes does not read it again; a new one reports it when it starts
    from meshtrain.huggingface.weights import peft_folder       # here: it imports jax, and few runs need it
    try:
        keys = dict(peft_folder.open_folder(source, at_home(base or ""), model).lora)
        decided, given = Lora(**keys), Lora(**keys | table)
    except ValidationError:
        return table, []      # `_build` reports it
    except ValueError as error:
        return table, [f"lora.init_from: {fault}" for fault in str(error).splitlines()]
    if set(decided.also) <= set(given.also):        # the run may train more
        keys["also"] = given.also
    wrong = [key for key in keys if getattr(given, key) != keys[key]]
    return table | keys, [
        f"lora.{key}={toml(table[key])} contradicts lora.init_from={toml(source)}, whose adapters have "
        f"{toml(getattr(decided, key))}; leave the key out" for key in wrong]


def _starts_without_choice_bias(run: Run) -> bool:
    """Return whether the run starts from a model folder whose routers have no biases of the choice. False if the folder
    cannot be read, which is reported elsewhere."""
    source = run.checkpoint.init_from
    try:
        return model_folder.is_at(source) and folder.settings_of(
            model_folder.local_path(source)).get("router_bias") != "choice"
    except ValueError:
        return False


BIASES_OF_FOLDER: Check = Conflict(
    lambda run: run.model.num_experts and run.experts.bias_rate and _starts_without_choice_bias(run),
    "{experts.bias_rate} moves biases of the routers, but {checkpoint.init_from}, a model folder, has none",
    "leave it out")


def check_teacher(run: Run) -> Iterator[str]:
    """Check that distill.teacher is a model folder that can be read, with the run's vocabulary."""
    source = run.distill.teacher
    if not source or run.training.objective != "distill":       # reported by `problems`
        return
    try:
        with user_errors():
            there = model_folder.is_at(source)
            size = folder.settings_of(model_folder.local_path(source))["vocab_size"] if there else 0
    except ConfigError as error:
        yield from (f"distill.teacher: {fault}" for fault in error.messages)
        return
    if not there:
        yield (f"distill.teacher={toml(source)} is not a model folder: it has no config.json; give a folder of Hugging "
               f"Face's, e.g. one that a run exported")
    elif size != run.model.vocab_size:
        yield (f"distill.teacher={toml(source)} has a vocabulary of {size}, but model.vocab_size="
               f"{run.model.vocab_size}; use a teacher with the tokens of the model")


def presets() -> dict[str, Path]:
    """Return the files of the shipped model shapes by name."""
    return names("configs/models")
