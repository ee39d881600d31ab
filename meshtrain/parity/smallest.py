"""Shrinks a layout that differs to the smallest run file that shows it (delta debugging over keys).

A key is dropped where the difference stays without it. Sizes need no search: `shrink` makes the same model of any, and
candidates that shrink to the same run are computed once.
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
from meshtrain.parity import cells as cells_of
from meshtrain.parity import compare, proof, shrink

NAME = "@NAME@"
Keys = dict[str, object]        # "section.key" -> value


@dataclasses.dataclass(frozen=True)
class Smallest:
    """text: of a run file whose own layout differs, NAME for the file's name. keys: as in it. result: that layout
    beside one device. compared: layouts that it took."""
    text: str
    keys: Keys
    result: proof.CellResult
    compared: int


def of(cell: proof.CellResult, devices: Sequence[jax.Device], tell: Callable[[str], None] = lambda line: None
       ) -> Smallest:
    """cell: one that differs. tell: gets a line a comparison."""
    tried: dict[str, proof.CellResult | None] = {}

    def shown(keys: Keys) -> proof.CellResult | None:
        """The layout of these keys beside one device, if it differs."""
        run = _run_of(keys, len(devices))
        if run is None:
            return None
        key = run.model_dump_json(exclude={"run"})
        if key not in tried:
            tried[key] = None
            found = proof.compared(run, devices)
            tried[key] = found if found.differs else None
            tell(f"smaller: {len(keys)} keys, {cells_of.title(run)}: {'differs' if found.differs else 'equal'}")
        return tried[key]

    keys = keys_of(cell.run)
    tried[_run_of(keys, len(devices)).model_dump_json(exclude={"run"})] = cell
    sections = dict.fromkeys(name.partition(".")[0] for name in keys)
    for section in sections:        # all of a section at once, then one key after another
        keys = _if(shown, {name: value for name, value in keys.items() if not name.startswith(f"{section}.")}, keys)
    before = None
    while keys != before:
        before = keys
        for left_out in list(keys):
            keys = _if(shown, {name: value for name, value in keys.items() if name != left_out}, keys)
        for name in [name for name in keys if name.startswith("mesh.") and keys[name] > 2]:
            keys = _if(shown, keys | {name: 2}, keys)
    result = shown(keys)
    assert result is not None, f"{keys} do not differ"
    return Smallest(_text(keys, result, len(devices)), keys, result, len(tried) - 1)


def _if(shown: Callable[[Keys], object], fewer: Keys, keys: Keys) -> Keys:
    return fewer if fewer != keys and shown(fewer) else keys


def keys_of(run: Run) -> Keys:
    """The keys that a run file of this run needs: those that are not their defaults and do not follow from others,
    without those of [run]."""
    found: Keys = {}
    for section, cls in config.SECTIONS.items():
        values, default = getattr(run, section), cls()
        found |= {f"{section}.{name}": value for name in cls.model_fields if section != "run"
                  and (value := getattr(values, name)) != getattr(default, name)}
    found.pop("mesh.simulated_devices", None)
    if found.get("data.source") == "stdlib":        # `_text` says so, and no comparison reads it
        del found["data.source"]
    if "sharding.rules" in found:
        found["sharding.rules"] = cells_of.named_rules(run.sharding.rules)
    whole = read(_tables(found))
    for name in list(found):
        fewer = {other: value for other, value in found.items() if other != name}
        found = fewer if _same(fewer, whole) else found
    return found


def _same(keys: Keys, run: Run) -> bool:
    try:
        return read(_tables(keys)) == run
    except ValidationError:
        return False


def _run_of(keys: Keys, num_devices: int) -> Run | None:
    """The shrunk run of a run file with these keys; None where the program refuses it, or on one device."""
    try:
        run = read(_tables(keys))
        if config.problems(run):
            return None
        small, _ = shrink.shrunk(run, num_devices)
        compare.accepted(small)
        return small if compare.num_devices(small) > 1 else None
    except (ValidationError, config.ConfigError):
        return None


def read(text: str) -> Run:
    """The run of a run file's text."""
    run = Run(**tomllib.loads(text))
    return run.replaced(sharding={"rules": str(cells_of.found_file(run.sharding.rules))})


def _tables(keys: Keys) -> str:
    sections: dict[str, list[str]] = {}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {toml(value)}")
    return "\n".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())


def _text(keys: Keys, result: proof.CellResult, num_devices: int) -> str:
    said = [f"# {line}" for line in (f"{result.title} is not what one device computes:", *result.wrong[:4])]
    more = "" if num_devices == 8 else f" --devices {num_devices}"
    again = f"# python -m meshtrain.prove {NAME}{more} shows it in the first layout"
    # A run file names its data.
    source = {} if "data.source" in keys or "data.paths" in keys else {"data.source": "stdlib"}
    return "\n".join([*said, again, "", _tables(keys | source)])


def written(found: Smallest, name: str) -> Path:
    """Write the run file as NAME-differs.toml, with a number where another file has the name. Raises: ConfigError."""
    number = 1
    while True:
        path = Path(f"{name}-differs{f'-{number}' if number > 1 else ''}.toml")
        text = found.text.replace(NAME, str(path))
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
                return path
            number += 1
        except OSError as error:
            raise config.ConfigError(f"cannot write {path}: {error.strerror}; go to a directory that can be "
                                     f"written") from None
