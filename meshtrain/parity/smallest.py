"""Reduces a run whose layout differs to the smallest run file that still shows the difference (delta debugging).

A key is dropped if the difference stays without it. Sizes are not searched: `shrink` gives the same model for any size.
Candidates that shrink to the same run are computed once.
"""
from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from pydantic import ValidationError

from meshtrain import config
from meshtrain.config import Run
from meshtrain.config.messages import toml
from meshtrain.parity import cells as cells_of, compare, proof, shrink
from meshtrain.shipped import find_file

NAME = "@NAME@"
Keys = dict[str, object]        # "section.key" -> value


@dataclasses.dataclass(frozen=True)
class Smallest:
    """The smallest run file. text: its content, with NAME in place of its file name. keys: its keys. compared: number
    of layouts that the search compared."""
    text: str
    keys: Keys
    compared: int


def of(cell: proof.CellResult, devices: Sequence[jax.Device], tell: Callable[[str], None] = lambda line: None
       ) -> Smallest:
    """Return the smallest run file that shows a difference. cell: the layout that differs. tell: a function that gets a
    line for each comparison."""
    assert cell.run is not None
    tried: dict[str, proof.CellResult | None] = {}

    def compare_keys(keys: Keys) -> proof.CellResult | None:
        """Return the comparison of these keys' layout with one device if it differs, else None."""
        run = _run_of(keys, len(devices))
        if run is None:
            return None
        key = run.model_dump_json(exclude={"run"})
        if key not in tried:
            tried[key] = None
            result = proof.compare_cell(run, devices)
            tried[key] = result if result.differs else None
            tell(f"smaller: {len(keys)} keys, {cells_of.title(run)}: {'differs' if result.differs else 'equal'}")
        return tried[key]

    keys = keys_of(cell.run)
    run = _run_of(keys, len(devices))
    assert run is not None
    tried[run.model_dump_json(exclude={"run"})] = cell
    sections = dict.fromkeys(name.partition(".")[0] for name in keys)
    for section in sections:        # first whole sections, then single keys
        fewer = {name: value for name, value in keys.items() if not name.startswith(f"{section}.")}
        keys = _if(compare_keys, fewer, keys)
    before = None
    while keys != before:
        before = keys
        for left_out in list(keys):
            keys = _if(compare_keys, {name: value for name, value in keys.items() if name != left_out}, keys)
        large = [name for name, value in keys.items()
                 if name.startswith("mesh.") and isinstance(value, int) and value > 2]
        for name in large:
            keys = _if(compare_keys, keys | {name: 2}, keys)
    result = compare_keys(keys)
    assert result is not None, f"{keys} do not differ"
    return Smallest(_text(keys, result, len(devices)), keys, len(tried) - 1)


def _if(differs: Callable[[Keys], object], fewer: Keys, keys: Keys) -> Keys:
    return fewer if fewer != keys and differs(fewer) else keys


def keys_of(run: Run) -> Keys:
    """Return the keys that a run file of this run needs: those that differ from their defaults and do not follow from
    others, without those of [run]."""
    keys: Keys = {}
    for section, cls in config.SECTIONS.items():
        values, default = getattr(run, section), cls()
        keys |= {f"{section}.{name}": value for name in cls.model_fields if section != "run"
                 and (value := getattr(values, name)) != getattr(default, name)}
    keys.pop("mesh.simulated_devices", None)
    if keys.get("data.source") == "stdlib":        # `_text` adds it, and comparisons read no data
        del keys["data.source"]
    if "sharding.rules" in keys:
        keys["sharding.rules"] = cells_of.rules_name(run.sharding.rules)
    whole = read(_tables(keys))
    for name in list(keys):
        fewer = {other: value for other, value in keys.items() if other != name}
        keys = fewer if _same(fewer, whole) else keys
    return keys


def _same(keys: Keys, run: Run) -> bool:
    try:
        return read(_tables(keys)) == run
    except ValidationError:
        return False


def _run_of(keys: Keys, num_devices: int) -> Run | None:
    """Return the shrunk run of a run file with these keys; None if the program refuses it or it uses one device."""
    try:
        run = read(_tables(keys))
        if config.problems(run):
            return None
        small, _ = shrink.shrunk(run, num_devices)
        compare.check_accepted(small)
        return small if compare.num_devices(small) > 1 else None
    except (ValidationError, config.ConfigError):
        return None


def read(text: str) -> Run:
    """Return the run of a run file's text. Raises: ValidationError."""
    run = Run(**tomllib.loads(text))
    return run.replace(sharding={"rules": str(find_file(run.sharding.rules))})


def _tables(keys: Keys) -> str:
    sections: dict[str, list[str]] = {}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {toml(value)}")
    return "\n".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())


def _text(keys: Keys, result: proof.CellResult, num_devices: int) -> str:
    said = [f"# {line}" for line in (f"{result.title} differs from one device:", *result.wrong[:4])]
    more = "" if num_devices == 8 else f" --devices {num_devices}"
    again = f"# python -m meshtrain.prove {NAME}{more} shows the difference in the first layout"
    # A run file has to name its data.
    source = {} if "data.source" in keys or "data.paths" in keys else {"data.source": "stdlib"}
    return "\n".join([*said, again, "", _tables(keys | source)])


def write(smallest: Smallest, name: str) -> Path:
    """Write the run file as NAME-differs.toml, with a number if another file has this name. Return its path. Raises:
    ConfigError."""
    number = 1
    while True:
        path = Path(f"{name}-differs{f'-{number}' if number > 1 else ''}.toml")
        text = smallest.text.replace(NAME, str(path))
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
                return path
            number += 1
        except OSError as error:
            raise config.ConfigError(f"cannot write {path}: {error.strerror}; run the command in a writable "
                                     f"directory") from None
