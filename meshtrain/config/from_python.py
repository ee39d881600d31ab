"""Turns settings from Python into arguments of a command line. Messages show the settings in Python's syntax."""
from __future__ import annotations

import os
import typing

from meshtrain.config.messages import SECTIONS, ConfigError, join, keys_of, kind_of, toml
from meshtrain.units import shorten

EXAMPLE = '{"model.num_layers": 2} or {"model": {"num_layers": 2}}'


def words(settings: typing.Mapping[str, object]) -> list[str]:
    """Return the settings as `--section.key=value`, for `load`.

    settings: keys of a run file, "section.key", or a dict for each section. Raises: ConfigError with every fault of the
    Python values. `load` finds the faults of the run file.
    """
    if not isinstance(settings, typing.Mapping):
        raise ConfigError(f"settings={shorten(settings)} is not a dict; write e.g. {EXAMPLE}")
    faults: list[str] = []
    given: dict[str, str] = {}
    for name, value in _flat(settings, faults):
        if name in given:
            faults.append(f"{name} is given twice in settings; give it once")
        given[name] = f"--{name}={_text(name, value, faults)}"
    if faults:
        raise ConfigError(*faults)
    return list(given.values())


def _flat(settings: typing.Mapping, faults: list[str]) -> typing.Iterator[tuple[str, object]]:
    """Yield each ("section.key", value). Other names are added to faults."""
    for name, value in settings.items():
        if isinstance(name, str) and "." not in name and isinstance(value, typing.Mapping):
            inner = {f"{name}.{key}": item for key, item in value.items()}
        else:
            inner = {name: value}
        for key, item in inner.items():
            if isinstance(key, str) and key.count(".") == 1 and not key.startswith("-"):
                yield key, item
            else:
                faults.append(f"settings[{shorten(key)}]={shorten(item)}: {_remedy(key)}")


def _remedy(name: object) -> str:
    bare = name.lstrip("-") if isinstance(name, str) else ""
    if bare in SECTIONS:
        first = next(iter(SECTIONS[bare].model_fields))
        return f"{bare} is a section, so its value must be a dict; write e.g. {{{bare!r}: {{{first!r}: …}}}}"
    homes = [bare] if bare.count(".") == 1 else keys_of(bare)
    return f"did you mean {join(map(repr, homes), 'or')}?" if homes else f'keys are "section.key"; write e.g. {EXAMPLE}'


def _text(name: str, value: object, faults: list[str]) -> str:
    """Return the value as text for the command line: unchanged for string keys, else as TOML."""
    section, key = name.split(".")
    field = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
    value = _plain(value)
    if value is None:
        faults.append(f"{name}=None is not a value; leave the key out to use its default")
    if isinstance(value, str) and (field is None or kind_of(field) in ("string", "choice")):
        return value
    return toml(value)


def _plain(value: object) -> object:
    """Return the value with numpy arrays, jax arrays and paths converted to plain Python."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, typing.Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
