"""The words of a command that has options of its own beside the keys of a run file."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence

from meshtrain.config.messages import SECTIONS, join


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """values: of each option that was given, in order. names: words that belong to no option. keys: `--section.key
    value …` as they stand, and --help, for `config.load` and `config.resolve`. faults: a message each, for the command
    to add its own to."""

    values: dict[str, list[str]]
    flags: frozenset[str]
    names: list[str]
    keys: list[str]
    faults: list[str]

    def last(self, option: str, default: str | None = None) -> str | None:
        """What an option was given, the last time."""
        return self.values.get(option, [default])[-1]


def split(argv: Iterable[str], usage: str, values: Mapping[str, str], flags: Sequence[str] = ()) -> CommandLine:
    """The words of `argv`. values: options that take one, as `--name VALUE` or `--name=VALUE`, each with an example;
    flags: those that take none.

    A value that begins with two dashes is written with `=`.
    """
    found, given, names, keys, faults = {}, set(), [], [], []
    left = [str(word) for word in argv]
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        name = option.removeprefix("--")
        if not word:
            faults.append(f"'' names nothing; the usage is {usage}")
        elif not word.startswith("-"):
            names.append(word)
        elif "." in name or word in ("--help", "-h"):
            takes = "." in name and not equals and left and not left[0].startswith("--")
            keys += [word, *([left.pop(0)] if takes else [])]
        elif option.startswith("--") and name in flags:
            given.add(name)
            if equals:
                faults.append(f"{option} takes no value; write {option} alone")
        elif option.startswith("--") and name in values:
            if not equals:
                value = left.pop(0) if left and not left[0].startswith("--") else ""
            if not value:
                faults.append(f"{option} has no value; write e.g. {option} {values[name]}")
            found.setdefault(name, []).append(value)
        else:
            faults.append(f"{option} is not an option; {_remedy(name, [*values, *flags], usage)}")
    return CommandLine(found, frozenset(given), names, keys, faults)


def _remedy(name: str, known: Sequence[str], usage: str) -> str:
    homes = [f"--{section}.{name}" for section, cls in SECTIONS.items() if name in cls.model_fields]
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {join([f'--{one}' for one in near] or homes, 'or')}?" if near
            or homes else f"the usage is {usage}")
