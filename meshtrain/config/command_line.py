"""Command lines: each command and launcher declares a table of options, and may also accept keys of a run file."""
from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

from meshtrain.config.messages import ConfigError, join, keys_of
from meshtrain.names import EMA, LAST

HELP_COLUMN = 29
MOST = 1 << 40


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a command.

    value: the placeholder of the option's value in the usage; "" is a flag. example: a value, for messages. parse: text
    → value; raises ValueError with the words that follow `--name text` in the message. many: the option may be
    repeated, and its value is a list. required: the reason why the option must be given; "" if it is optional.
    """
    help: str
    value: str = ""
    example: str = ""
    parse: Callable[[str], object] = str
    default: object = None
    many: bool = False
    required: str = ""


def whole(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """Return a parser for whole numbers from `least` to `most`."""
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text[:20]) <= most:
            span = f"from {least} to {most}" if most < MOST else f"of at least {least}"
            raise ValueError(f"is not a whole number {span}")
        return int(text)
    return parse


def number(what: str, least: float = 0, most: float = 1e18, positive: bool = False) -> Callable[[str], float]:
    """Return a parser for numbers from `least` to `most`, above 0 if `positive`. what: the expected value, for the
    message."""
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or positive and value <= 0:
            raise ValueError(f"is not {what}")
        return value
    return parse


def one_of(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts these names."""
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"is unknown; use one of {', '.join(names)}")
        return text
    return parse


# The options of commands on a trained model.
OF_TRAINED = {
    "step": Option("the step of a checkpoint; 0: the newest", "N", "100", whole(), 0),
    "weights": Option("which weights of a checkpoint: last, or ema, their average by training.ema", "W", "ema",
                      one_of(LAST, EMA), LAST),
    "merge": Option("folder of adapters in PEFT's format that are merged into the weights", "DIR", "adapters",
                    default="")}


@dataclasses.dataclass
class Arguments:
    """A parsed command line.

    values: of all options, with defaults. given: the options on the command line. names: positional arguments. keys:
    `--section.key value …`, for `run_files.load` and `resolve`. run: a launcher's arguments after --. words: all
    arguments, unchanged.
    """
    values: dict[str, object]
    given: set[str] = dataclasses.field(default_factory=set)
    names: list[str] = dataclasses.field(default_factory=list)
    keys: list[str] = dataclasses.field(default_factory=list)
    run: list[str] = dataclasses.field(default_factory=list)
    words: Sequence[str] = ()

    def __getitem__(self, option: str):
        return self.values[option]

    def __contains__(self, option: str) -> bool:
        return option in self.given


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line: python -m `module` `places` [options] [--section.key value ...].

    places: usage of the positional arguments, e.g. "RUN_DIR". num_places: the minimum and maximum number of positional
    arguments. keys: whether the command accepts keys of a run file. launcher: whether it accepts a run file and keys
    after --.
    """
    module: str
    options: Mapping[str, Option]
    places: str = ""
    num_places: tuple[int, int] = (0, 0)
    keys: bool = True
    launcher: bool = False

    @property
    def usage(self) -> str:
        words = [(f"--{name} {option.value}".rstrip(), option) for name, option in self.options.items()]
        words = [word if option.required else f"[{word}]{'...' * option.many}" for word, option in words]
        end = "-- [RUN.toml] [--section.key value ...]" if self.launcher else "[--section.key value ...]" * self.keys
        return " ".join(filter(None, [f"python -m {self.module}", self.places, *words, end]))

    def help(self, about: str) -> str:
        """Return the text of --help. about: the docstring of the command's module."""
        lines = [*textwrap.wrap(f"usage: {self.usage}", 120, subsequent_indent=" " * 7, break_on_hyphens=False),
                 "", inspect.cleandoc(about), ""]
        for name, option in self.options.items():
            default = f" (default {option.default})" if option.default else ""
            column = f"  --{name} {option.value}".rstrip()
            lines += textwrap.wrap(f"{option.help}{default}", 120, initial_indent=f"{column:<{HELP_COLUMN - 1}} ",
                                   subsequent_indent=" " * HELP_COLUMN)
        if self.keys:
            lines += ["", "The keys of a run file: python -m meshtrain.train --help"]
        return "\n".join(lines)

    def read(self, argv: Sequence[str]) -> Arguments:
        """Parse `argv`. A value that begins with two dashes must be written as `--name=value`. Raises: ConfigError with
        every fault."""
        words, faults, texts = [str(word) for word in argv], [], {}
        given = Arguments({name: [] if option.many else option.default for name, option in self.options.items()},
                          words=tuple(words))
        if self.launcher and "--" in words:
            at = words.index("--")
            words, given.run = words[:at], words[at + 1:]
        while words:
            word = words.pop(0)
            option, equals, value = word.partition("=")
            name = option.removeprefix("--")
            if not word:
                faults.append(f"'' names nothing; {self._see}")
            elif self.launcher and (len(given.names) == self.num_places[1] and not word.startswith("-") or "." in name):
                faults.append(f"{word} is not an option of the launcher; put the run file and its keys after --, e.g. "
                              f"python -m {self.module} --processes 2 -- {' '.join([word, *words])}")
                break
            elif not word.startswith("-"):
                given.names.append(word)
            elif "." in name and self.keys:
                takes = not equals and words and not words[0].startswith("--")
                given.keys += [word, *([words.pop(0)] if takes else [])]
            elif not option.startswith("--") or name not in self.options:
                faults.append(f"{option} is not an option; {self._remedy(name)}")
            elif not self.options[name].value:
                given.values[name] = True
                if equals:
                    faults.append(f"{option} takes no value; write {option} alone")
            else:
                if not equals:
                    value = words.pop(0) if words and not words[0].startswith("--") else ""
                texts.setdefault(name, []).append(value)
        for name, option in self.options.items():
            for text in texts.get(name, []):
                if not text:
                    faults.append(f"--{name} has no value; write e.g. --{name} {option.example}")
                    continue
                try:
                    value = option.parse(text)
                    given.values[name] = [*given[name], value] if option.many else value
                except ValueError as error:
                    remedy = "" if ";" in str(error) else f"; use e.g. --{name} {option.example}"
                    shown = (text if text.isprintable() else ascii(text))[:60]
                    faults.append(f"--{name} {shown} {error}{remedy}")
            if option.required and name not in texts:
                faults.append(f"--{name} is missing: {option.required}; add e.g. --{name} {option.example}")
        least, most = self.num_places
        if not faults and not least <= len(given.names) <= most:
            faults.append(f"{len(given.names)} names are given ({', '.join(given.names)}), but the command takes "
                          f"{self.places}; {self._see}" if given.names else
                          f"{self.places.partition(' [')[0]} is missing; {self._see}")
        if faults:
            raise ConfigError(*faults)
        given.given = {*texts, *(name for name, option in self.options.items() if not option.value and given[name])}
        return given

    def of(self, names: Sequence[str], options: Mapping[str, object], keys: Sequence[str] = ()) -> Arguments:
        """Return the arguments of a call in Python.

        options: values by name, with _ for -. None means that the option is not given. A list repeats the option. keys:
        `Arguments.keys`. Raises: ConfigError with every fault, in Python's syntax.
        """
        known = {name.replace("-", "_"): name for name, option in self.options.items() if option.value}
        given = Arguments({name: [] if option.many else option.default for name, option in self.options.items()},
                          names=list(names), keys=list(keys))
        faults = []
        for spelled, value in options.items():
            if value is None:
                continue
            if spelled not in known:
                near = difflib.get_close_matches(spelled, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"options are {join(known, 'and')}"
                faults.append(f"{spelled}={value!r} is not an option; {remedy}")
                continue
            name, option = known[spelled], self.options[known[spelled]]
            for item in value if option.many and isinstance(value, (list, tuple)) else [value]:
                try:
                    parsed = option.parse(str(item))
                    given.values[name] = [*given[name], parsed] if option.many else parsed
                except ValueError as error:
                    remedy = "" if ";" in str(error) else f"; use e.g. {spelled}={option.example}"
                    faults.append(f"{spelled}={item!r} {error}{remedy}")
            given.given.add(name)
        if faults:
            raise ConfigError(*faults)
        return given

    @property
    def _see(self) -> str:
        return f"see python -m {self.module} --help"

    def _remedy(self, name: str) -> str:
        homes = [f"--{key}" for key in keys_of(name)] * self.keys
        near = [f"--{option}" for option in difflib.get_close_matches(name, self.options, n=1)]
        return f"did you mean {join(near or homes, 'or')}?" if near or homes else self._see
