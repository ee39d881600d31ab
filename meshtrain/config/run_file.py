"""The run file: from TOML and `--section.key value` to one frozen `Run`, or one message with everything that is wrong.

`load` gathers every fault it can find (unknown names, types, ranges, keys that do not agree) before it raises, because
a queue for a pod is a slow way to find them one by one. `dump` writes a run back as a file that needs no preset.
This module knows no jax: whether a layout fits its rule file is asked where the rules are known.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import tomllib
import typing
from pathlib import Path

from pydantic import ValidationError

from meshtrain import files
from meshtrain.config import older
from meshtrain.config.checks import problems
from meshtrain.config.messages import (
    SECTIONS, ConfigError, join, kind_of, toml, unknown_key, unknown_name, unknown_section, wrong_value,
)  # fmt: skip
from meshtrain.config.sections import Model, Run, Sharding, at_home
from meshtrain.huggingface import folder
from meshtrain.shipped import found, names, shipped

QUICKSTART = shipped("configs/quickstart.toml")
USAGE = "python -m meshtrain.train [RUN.toml] [--section.key value ...]"
MOST_BYTES = 1 << 24  # of a run file: /dev/zero has no end
NOT_SHAPE = ("_dtype", "_dropout")  # model keys that no preset sets


def load(argv: typing.Sequence[str], usage: str = USAGE) -> Run:
    """The run that `argv` asks for: an optional run file, then overrides.

    Raises: ConfigError with every fault at once; SystemExit(0) after printing --help.
    """
    path, overrides, faults = _arguments(argv)
    tables, unreadable = _read(found(path) if path else QUICKSTART)
    _override(tables, overrides, path is None)
    run, wrong, told = _build(tables)
    if {"--help", "-h"} & set(argv):
        with contextlib.suppress(OSError):      # `--help | head`
            print(help_text(run, usage), flush=True)
        raise SystemExit(0)
    # Without the file its keys are defaults, and a replaced key is one too: what follows from those is no second fault.
    contradictions = [] if unreadable else [message for message in problems(run) if not told.search(message)]
    if faults + unreadable + wrong + contradictions:
        raise ConfigError(*faults, *unreadable, *wrong, *contradictions)
    return run


def resolve(tables: dict, words: typing.Sequence[str], allowed: typing.Sequence[str],
            command: str) -> tuple[Run, frozenset[str]]:
    """(the run of these tables with overrides, the names of the keys that `words` give), for a command that trains
    nothing.

    allowed: sections ("mesh.") and keys; no other may be given, and only of these sections contradictions are told.
    Raises: ConfigError.
    """
    path, overrides, faults = _arguments(words)
    if path is not None:
        faults.append(f"{path} is one name too many; {command} takes one directory")
    given = frozenset(name for name, _ in overrides)
    known = [f"{section}.{key}" for section, cls in SECTIONS.items() for key in cls.model_fields]
    faults += [f"{name} changes nothing here; {command} reads "
               f"{join([one + '*' * one.endswith('.') for one in allowed], 'and')}"
               for name in sorted(given) if name in known and not name.startswith(tuple(allowed))]
    tables = {section: dict(table) for section, table in tables.items()}
    _override(tables, overrides, False)
    run, wrong, told = _build(tables)
    checked = tuple(name for name in allowed if name.endswith("."))
    contradictions = [message for message in problems(run) if message.startswith(checked) and not told.search(message)]
    if faults + wrong + contradictions:
        raise ConfigError(*faults, *wrong, *contradictions)
    return run, given


def names_mesh(argv: typing.Sequence[str]) -> bool:
    """Whether a mesh was asked for: by a run file, wherever it stands among the options, or by a key of [mesh]."""
    path, overrides, _ = _arguments(argv)
    return path is not None or any(name.startswith("mesh.") for name, _ in overrides)


def _arguments(argv):
    """(run file or None, [(section.key, text)], faults)."""
    path, overrides, faults = None, [], []
    rest = [arg for arg in argv if arg not in ("--help", "-h")]
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("-"):
            if path is not None:
                faults.append(f"{arg} is a second run file beside {path}; give one, and changes as --section.key value")
            path = path or Path(arg)
            continue
        name, equals, text = arg.removeprefix("--").partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if not arg.startswith("--") or name.count(".") != 1:
            homes = [f"--{section}.{name}" for section, cls in SECTIONS.items() if name in cls.model_fields]
            remedy = f"did you mean {join(homes, 'or')}?" if homes else "options are --section.key value"
            faults.append(f"{arg} is not an option; {remedy}")
        elif text is None:
            faults.append(f"{arg} has no value; write {arg} VALUE or {arg}=VALUE")
        else:
            overrides.append((name, text))
    return path, overrides, faults


def _first_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(MOST_BYTES + 1)


def _read(path: Path) -> tuple[dict, list[str]]:
    """(the file's tables, faults)."""
    try:
        data = files.patiently(lambda: _first_bytes(path))
        if len(data) > MOST_BYTES:
            return {}, [f"{path} is larger than {MOST_BYTES:,} bytes: it is no run file; name one"]
        # Windows puts a byte order mark before it
        return older.translated(tomllib.loads(data.decode("utf-8-sig"))), []
    except FileNotFoundError:
        known = {stem: f"configs/{stem}.toml" for stem in names("configs")}
        near = difflib.get_close_matches(path.stem, known, n=1)
        remedy = f"did you mean {known[near[0]]}?" if near else f"shipped are {join(known.values(), 'and')}"
        return {}, [f"{path}: there is no such run file; {remedy}"]
    except IsADirectoryError:
        return {}, [f"{path} is a directory; name the run file, e.g. {path / 'config.toml'}"]
    except OSError as e:
        if not files.is_mistake(e):
            raise files.judged(e, f"{path} cannot be read", "name a file that can") from None
        return {}, [f"{path} cannot be read: {e.strerror}; name a file that can"]
    except UnicodeDecodeError as e:
        return {}, [f"{path} is not text (byte {e.start} is not UTF-8); a run file is TOML in UTF-8"]
    except (ValueError, RecursionError) as e:  # bad TOML, a number of thousands of digits, thousands of brackets
        where = re.search(r" \(at line (\d+), column (\d+)\)$", str(e))
        place, what = (f"{path}:{where[1]}:{where[2]}", str(e)[: where.start()]) if where else (str(path), str(e))
        return {}, [f"{place}: {what}; in TOML strings take quotes, booleans are true or false, lists close with ]"]


def _override(tables: dict, overrides, default: bool) -> None:
    """Put the command line's values into the tables: bare text where the key is a string, else a TOML value.

    default: the tables are those of the quickstart, since no file was named.
    """
    given = dict(overrides)
    # A preset on the command line replaces the shape in the file; only a key on the command line stands beside it.
    # So does a model folder that of the quickstart, which nobody has written.
    replaced = given.get("model.preset") or default and folder.is_one(at_home(given.get("checkpoint.init_from", "")))
    if replaced and isinstance(tables.get("model"), dict):
        tables["model"] = {key: value for key, value in tables["model"].items() if key.endswith(NOT_SHAPE)}
    for name, text in overrides:
        section, key = name.split(".")
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            continue  # already a fault of the file
        field = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
        table[key] = text
        if field is not None and kind_of(field) not in ("string", "choice"):
            try:
                parsed = tomllib.loads(f"value = {text}")
            except (ValueError, RecursionError):
                continue  # stays text, and is refused as text with its type's remedy
            table[key] = parsed["value"] if len(parsed) == 1 else text


def _build(tables: dict) -> tuple[Run, list[str], re.Pattern]:
    """A run from raw tables, what is wrong with their names and values, and a pattern of the names already told.

    A faulty key takes its default, so that the search can go on.
    """
    faults, faulty, sections = [], [], {}
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
        try:
            sections[name] = cls(**table)
        except ValidationError as e:
            faults += [wrong_value(name, cls, error) for error in e.errors()]
            wrong = {error["loc"][0] for error in e.errors()}
            faulty += [f"{name}.{key}" for key in wrong]
            sections[name] = cls(**{key: value for key, value in table.items() if key not in wrong})
    run = Run(**sections)
    run = run.model_copy(update={"sharding": Sharding(rules=str(found(run.sharding.rules)))})
    faulty += ["model"] if "model.preset" in faulty else []
    return run, faults, re.compile("|".join(rf"\b{re.escape(name)}\b" for name in faulty) or "$^")


def _with_folder(table: dict, checkpoint) -> tuple[dict, list[str]]:
    """(the keys of [model], of which checkpoint.init_from decides the shape where it is a model folder; faults)."""
    source = checkpoint.get("init_from") if isinstance(checkpoint, dict) else None
    if not isinstance(source, str) or not folder.is_one(source := at_home(source)):
        return table, []
    try:
        keys = folder.settings_of(Path(source))
    except ValueError as error:
        return table, [f"checkpoint.init_from: {fault}" for fault in str(error).splitlines()]
    free = {key: value for key, value in table.items() if key.endswith(NOT_SHAPE)
            or key in ("attention", "embedding_std")}
    try:
        decided, given = Model(**keys), Model(**keys | table)
    except ValidationError:
        return table, []      # told by whoever builds the section
    # no layer has an MLP of this width, and some families name none
    if decided.num_experts and not decided.first_dense_layers:
        free |= {key: table[key] for key in ("mlp_dim",) if key in table}
    wrong = [key for key in table if key not in free and getattr(given, key) != getattr(decided, key)]
    return keys | free, [
        f"model.{key}={toml(table[key])} contradicts checkpoint.init_from={toml(source)}, whose config.json makes it "
        f"{toml(getattr(decided, key))}; leave the key out" for key in wrong]


# ---- out -------------------------------------------------------------------------------------------------------------


def presets() -> dict[str, Path]:
    """The shipped model shapes by name."""
    return names("configs/models")


def dump(run: Run) -> str:
    """The run as TOML that loads to the same run and needs no preset."""
    path = f"{run.run.dir}/config.toml"
    lines = [f"# python -m meshtrain.train {shlex.quote(path) if path.isprintable() else toml(path)}"]
    for name, section in run:
        lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in section)]
    return "\n".join(lines) + "\n"


def shape_table(model: Model) -> str:
    """The keys of [model] that make its shape, as TOML; those at their defaults are left out, but for sizes."""
    default = Model()
    keys = [key for key, value in model if not (key.endswith(NOT_SHAPE) or key in ("preset", "attention"))
            and (type(value) is int and value or value != getattr(default, key))]
    return "\n".join(["[model]", *(f"{key} = {toml(getattr(model, key))}" for key in keys)])


def help_text(run: Run, usage: str = USAGE) -> str:
    """Every key with its value in `run` and its description."""
    lines = [f"usage: {usage}", "", "Without RUN.toml: configs/quickstart.toml. Strings are bare, lists are TOML."]
    for name, section in run:
        lines += ["", type(section).__doc__]
        for key, field in type(section).model_fields.items():
            choices = f" ({', '.join(typing.get_args(field.annotation))})" if kind_of(field) == "choice" else ""
            lines.append(f"  {f'--{name}.{key} {toml(getattr(section, key))}':<47} {field.description}{choices}")
    return "\n".join(lines)
