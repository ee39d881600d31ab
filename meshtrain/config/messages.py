"""Error messages about a run file: each has the value, the rule and the remedy."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import json
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshtrain import files
from meshtrain.config import named
from meshtrain.config.elsewhere import find_key
from meshtrain.config.sections import Component, WeightGroup, Run
from meshtrain.storage.addresses import Refused

SECTIONS = {name: field.annotation for name, field in Run.model_fields.items()}
BARE = re.compile("[A-Za-z0-9_-]+")     # keys of TOML that need no quotes
# The number of this start, counted from 0. The launcher that started the process sets the variable.
STARTS = ("MESHTRAIN_START", "SLURM_RESTART_COUNT")


class ConfigError(ValueError):
    """All faults of a run. messages: one line for each fault."""

    def __init__(self, *messages: str):
        self.messages = list(messages)
        super().__init__("\n".join(messages))


_at_restart = contextvars.ContextVar("at_restart", default=False)


@contextlib.contextmanager
def restarting(restart: bool = True) -> Iterator[None]:
    """Context in which all work belongs to a restart by a launcher. With STARTS set, the whole process belongs to a
    restart."""
    token = _at_restart.set(restart)
    try:
        yield
    finally:
        _at_restart.reset(token)


@contextlib.contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """Turn a ValueError of the block into a ConfigError with one message per line. At a restart, refused credentials
    have worked before and have expired. The run file has no mistake, so a FileSystemError is raised instead."""
    try:
        yield
    except ConfigError:
        raise
    except Refused as error:
        if _at_restart.get() or any(os.environ.get(name, "") not in ("", "0") for name in STARTS):
            raise files.FileSystemError(f"{prefix}{error}") from None
        raise ConfigError(f"{prefix}{error}") from None
    except ValueError as error:
        raise ConfigError(*(prefix + str(error)).splitlines()) from None


def type_of(field: FieldInfo) -> typing.Any:
    """Return the type of a key. For an optional key it is the type without None."""
    of = typing.get_args(field.annotation)
    return of[0] if type(None) in of and len(of) == 2 else field.annotation


def kind_of(field: FieldInfo) -> str:
    annotation = type_of(field)
    if typing.get_origin(annotation) is typing.Literal or named.find(field):
        return "choice"
    return {bool: "boolean", int: "integer", float: "number", str: "string"}.get(annotation, "list")


def choices(field: FieldInfo) -> list[str]:
    """Return the values of a choice that a user may name, without code of the run's own."""
    one_of = named.find(field)
    return [known for known in (one_of.names if one_of else typing.get_args(field.annotation)) if known]


def wrong_value(section: str, cls, error) -> str:
    key, *index = error["loc"]
    if key not in cls.model_fields:             # a row whose name the user chose, of optimizer.groups
        row = f"{section}.{toml(key)}"
        return wrong_in_table(row, WeightGroup, {**error, "loc": tuple(index)}) if index else (
            f"{row}={toml(error['input'])} is not a table; write it as TOML, e.g. {{rate = 0.5}}")
    if index and isinstance(index[0], str):     # a key of a table
        return wrong_in_table(f"{section}.{key}", type_of(cls.model_fields[key]), {**error, "loc": tuple(index)})
    if len(index) > 1:                          # a key of a table in a list
        return wrong_in_table(f"{section}.{key}[{index[0]}]", Component, {**error, "loc": tuple(index[1:])})
    field, value, limits = cls.model_fields[key], error["input"], error.get("ctx", {})
    name = f"{section}.{key}" + "".join(f"[{i}]" for i in index)
    numbers = int in typing.get_args(field.annotation)
    kind = ("integer" if numbers else "string") if index else kind_of(field)
    if field.annotation == tuple[Component, ...]:
        kind = "component" if index else "components"
    if isinstance(type_of(field), type) and issubclass(type_of(field), BaseModel):
        kind = "table"
    if error["type"] == "base_type":
        return f'{name}={toml(value)} is not a model; use a preset such as "llama3.2-1b", a run file or a [model] table'
    example = type_of(field)(1) if field.default is None and kind in ("integer", "number") else field.default
    if error["type"] == "literal_error" and isinstance(value, str):
        own = 'code of your own, "file.py:name"'
        if not choices(field):
            return f"{name}={toml(value)} does not name {own}"
        return unknown_name(name, value, choices(field)) + (f", or {own}" if named.find(field) else "")
    bounds = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
    for limit, words in bounds.items():
        if limit in limits and error["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            return (f"{name}={toml(value)} is out of range; use {words.format(limits[limit])}, e.g. "
                    f"{toml(example)}")
    rule, remedy = {
        "boolean": ("true or false", "write true or false, without quotes"),
        "integer": ("a whole number",
                    f"write e.g. {toml(1 if index else example)}, without quotes or a decimal point"),
        "number": ("a finite number", f"write e.g. {toml(example)}, without quotes"),
        "string": ("a string", "write it in quotes"),
        "choice": ("a string", f"use {join(map(toml, choices(field)), 'or')}"),
        "list": (("a list of whole numbers", "write it as TOML, e.g. [1, 2]") if numbers else
                 ("a list of strings", 'write it as TOML, e.g. ["first", "second"]')),
        "components": ("a list of tables", 'write it as TOML, e.g. [{source="jsonl", paths=["a.jsonl"], weight=0.7}]'),
        "component": ("a table", 'write e.g. {source="jsonl", paths=["a.jsonl"], weight=0.7}'),
        "table": ("a table", f"write it as TOML, e.g. {(field.description or '').partition('e.g. ')[2] or '{…}'}"),
    }[kind]
    if error["type"] == "value_error":      # the section's own check
        return f"{name}={toml(value)} {limits['error']}"
    return f"{name}={toml(value)} is not {rule}; {remedy}"


def wrong_in_table(name: str, cls, error) -> str:
    key = error["loc"][0]
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return unknown_key(name, key, error["input"], cls)
    return wrong_value(name, cls, error)


def unknown_name(name: str, value: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    guess = f"did you mean {toml(near[0])}? There are " if near else "use "
    return f"{name}={toml(value)} is unknown; {guess}{join(map(toml, known), 'and' if near else 'or')}"


def unknown_section(name: str, value: object) -> str:
    near = difflib.get_close_matches(name, SECTIONS, n=1)
    if (keys := keys_of(name)) and not isinstance(value, dict):
        return f"{name}={toml(value)} is outside a section; did you mean {keys[0]}?"
    remedy = f"did you mean [{near[0]}]?" if near else f"the sections are {join(SECTIONS, 'and')}"
    return f"there is no section [{name}]; {remedy}"


def keys_of(word: str) -> list[str]:
    """Return each section.key whose key is `word`, or the key that other trainers call `word`."""
    homes = [f"{section}.{word}" for section, cls in SECTIONS.items() if word in cls.model_fields]
    return homes or [key for key in [find_key(word)] if key]


def unknown_key(section: str, key: str, value: object, cls=None) -> str:
    keys = (cls or SECTIONS[section]).model_fields
    near = [f"{section}.{name}" for name in difflib.get_close_matches(key, keys, n=1)]
    elsewhere = find_key(key, section)
    guesses = [elsewhere] if elsewhere else near or keys_of(key)
    remedy = f"did you mean {guesses[0]}?" if guesses else f"its keys are {join(keys, 'and')}"
    return f"{section}.{key}={toml(value)} is not a key of [{section}]; {remedy}"


def join(names: Iterable[str], word: str) -> str:
    *head, last = list(names) or ["none"]
    return f"{', '.join(head)} {word} {last}" if head else last


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """Return the message with the names of the files that set the message's keys. origins: the file of each key that an
    extended file sets."""
    extended = [name for name in origins if re.search(rf"\b{re.escape(name)}\b", message)]
    return f"{message} ({', '.join(f'{origins[name]} gives {name}' for name in extended)})" if extended else message


def toml(value: object) -> str:
    """Format a value as TOML. JSON and TOML escape strings in the same way, except for DEL."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key if BARE.fullmatch(key) else toml(key)} = {toml(item)}"
                               for key, item in value.items()) + "}"
    if isinstance(value, BaseModel):
        return toml(dict(value))
    return str(value)


def next_multiple(n: int, of: int) -> int:
    return -(-n // of) * of
