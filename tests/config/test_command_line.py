"""The options of all commands: one table each, one way to read it, one to tell what is wrong."""
import importlib
from pathlib import Path

import pytest

from meshtrain import config
from meshtrain.config import ConfigError, Option

ROOT = Path(__file__).resolve().parent.parent.parent
# Of doors that have options of their own; train has the keys of a run file alone.
COMMANDS = [importlib.import_module(f"{room}.{path.stem}").COMMAND
            for room, folder in (("meshtrain", "meshtrain"), ("meshtrain.commands", "meshtrain/commands"),
                                 ("meshtrain.launch", "launch"))
            for path in sorted((ROOT / folder).glob("*.py")) if "COMMAND = " in path.read_text()]
EXAMPLE = config.Command("example", {
    "steps": Option("how many", "N", "8", config.whole(1, 100), 5),
    "rate": Option("a rate", "R", "0.5", config.number("a rate", 0, 1, positive=True)),
    "name": Option("a name", "NAME", "a", config.one_of("a", "b"), required="nothing says which"),
    "word": Option("words", "WORD", "x", many=True),
    "json": Option("as JSON"),
}, "DIR", (1, 1))
LAUNCHER = config.Command("starter", {"processes": Option("how many", "N", "2", config.whole(1))}, launcher=True)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.module)
def test_every_option_takes_its_own_example_and_is_in_the_help(command):
    required = [word for name, option in command.options.items() if option.required
                for word in (f"--{name}", option.example)]
    names = ["1"] * command.num_places[0]
    for name, option in command.options.items():
        example = option.example.strip("'")
        given = command.read([*names, *required, f"--{name}={example}" if option.value else f"--{name}"])
        assert name in given and given[name] not in (None, [], False) or given[name] == 0, name
        assert f"--{name}" in command.usage and option.help.split()[0] in command.help("about")
    assert command.module.split(".")[0] == "meshtrain" and len(COMMANDS) == 17


def test_values_defaults_and_what_belongs_to_the_run():
    given = EXAMPLE.read(["run", "--name=b", "--word", "x", "--word=--y", "--json", "--mesh.data", "2", "--model.a=b"])
    assert given.values == {"steps": 5, "rate": None, "name": "b", "word": ["x", "--y"], "json": True}
    assert (given.names, given.keys) == (["run"], ["--mesh.data", "2", "--model.a=b"])
    assert [name for name in EXAMPLE.options if name in given] == ["name", "word", "json"]
    given = LAUNCHER.read(["--processes", "4", "--", "run.toml", "--processes", "x"])
    assert (given["processes"], given.run) == (4, ["run.toml", "--processes", "x"])


@pytest.mark.parametrize("words, said", [
    ("run --name a --steps 0", "--steps 0 is not a whole number from 1 to 100; use e.g. --steps 8"),
    ("run --name a --steps -3", "--steps -3 is not a whole number"), ("run --name a --steps 1.5", "--steps 1.5 is not"),
    ("run --name a --rate 0", "--rate 0 is not a rate; use e.g. --rate 0.5"),
    ("run --name a --rate nan", "--rate nan is not a rate"), ("run --name a --rate 2", "--rate 2 is not a rate"),
    ("run --name c", "--name c is unknown; use one of a, b"), ("run", "--name is missing: nothing says which"),
    ("run --name", "--name has no value; write e.g. --name a"), ("run --name a --json=1", "--json takes no value"),
    ("run --name a --jsn", "--jsn is not an option; did you mean --json?"),
    ("run --name a --learning_rate 1", "did you mean --optimizer.learning_rate?"),
    ("run --name a -x", "-x is not an option; see python -m example --help"),
    ("--name a", "DIR is missing; see python -m example --help"), ("a b --name a", "2 names are given (a, b)"),
])
def test_a_mistake_is_told_with_value_rule_and_remedy(words, said):
    with pytest.raises(ConfigError, match=".") as refused:
        EXAMPLE.read(words.split())
    assert said in str(refused.value)


def test_all_mistakes_are_told_at_once_and_no_byte_reaches_the_terminal_raw():
    with pytest.raises(ConfigError) as refused:
        EXAMPLE.read(["run", "--steps", "x\x1b[31m", "--rate", "9", "--jsn"])
    for part in (r"--steps 'x\x1b[31m' is not", "--rate 9", "--jsn", "--name is missing"):
        assert part in str(refused.value)


@pytest.mark.parametrize("words", ["--processes 2 run.toml", "--processes 2 --training.steps 3"])
def test_a_launcher_says_where_the_run_stands(words):
    with pytest.raises(ConfigError, match="after --, e.g. python -m starter --processes 2 -- "):
        LAUNCHER.read(words.split())
