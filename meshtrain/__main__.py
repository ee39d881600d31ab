"""meshtrain COMMAND [...]: every command of the project. `python -m meshtrain.COMMAND` is the same.

    meshtrain --version             the version
    meshtrain COMMAND --help        a command's options
    meshtrain completion SHELL      what completes commands, options and keys in bash or zsh, for
                                    source <(meshtrain completion bash)
"""
from __future__ import annotations

import difflib
import importlib
import runpy
import sys
from collections.abc import Sequence

import meshtrain
from meshtrain.config import ConfigError
from meshtrain.config.messages import SECTIONS
from meshtrain.run import say
from meshtrain.run.stops import DONE, USER_ERROR

COMMANDS = {
    "train": "train a model from a run file",
    "plan": "find the layouts of a model on GPUs that fit, by time and price",
    "inspect": "tell what a run holds, sends and takes before it runs",
    "check": "tell what can be known of a run before it starts",
    "prove": "compare a layout's step with one device's",
    "report": "print what a run has measured, compared with the predictions",
    "generate": "ask a trained model, or talk to it",
    "evaluate": "measure a model's loss on files or harness tasks",
    "convert": "write a run's weights as a model folder",
    "tokenize": "tokenize a run's data before it runs",
    "slurm": "print a Slurm job for a run",
    "sample": "draw the answers of an rl run apart from its trainer",
}
LAUNCHERS = {
    "local": "start processes on this host",
    "pod": "start one process for each GPU of a pod's host",
    "ray": "start a run's processes on a Ray cluster",
    "samplers": "start samplers for an rl run",
    "restart": "tell whether, and after how long, a job starts again",
    "elastic": "tell the run file for fewer hosts",
}
SHELLS = ("bash", "zsh")

# Words come from the program's own tables of options. $1: the command, or `launch` and its launcher.
BASH = """_meshtrain() {{
    local now="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words
    [ "$command" = launch ] && command="launch ${{COMP_WORDS[2]}}"
    case "$command" in
{cases}
        *) words="" ;;
    esac
    [ "$COMP_CWORD" = 1 ] && words="{commands}"
    [ "$COMP_CWORD" = 2 ] && [ "${{COMP_WORDS[1]}}" = launch ] && words="{launchers}"
    COMPREPLY=($(compgen -W "$words" -- "$now"))
    [ ${{#COMPREPLY[@]}} = 0 ] && COMPREPLY=($(compgen -f -- "$now"))
}}
complete -o filenames -F _meshtrain meshtrain
"""


def main() -> int:
    """The console script. Returns the exit code: 2 for a word that names no command."""
    words = sys.argv[1:]
    if not words or words[0] in ("--help", "-h", "help"):
        say.answer(usage())
        return DONE
    if words[0] == "launch" and (len(words) == 1 or words[1] in ("--help", "-h")):
        say.answer(usage_of_launchers())
        return DONE
    if words[0] == "--version":
        say.answer(f"meshtrain {meshtrain.__version__}")
        return DONE
    try:
        if words[0] == "completion":
            say.answer(completion(words[1:]))
            return DONE
        module, rest = choose(words)
    except ConfigError as error:
        say.err(f"error: {error}")
        return USER_ERROR
    sys.argv[1:] = rest
    runpy.run_module(module, run_name="__main__", alter_sys=True)       # which ends the process
    return DONE


def usage_of_launchers() -> str:
    """The text of `meshtrain launch`."""
    return "\n".join(["usage: meshtrain launch LAUNCHER [...] -- [RUN.toml] [--section.key value ...]", "",
                      *(f"  {name:<10}{about}" for name, about in LAUNCHERS.items()), "",
                      "meshtrain launch LAUNCHER --help tells a launcher's options."])


def usage() -> str:
    """The text of --help."""
    lines = [*(f"  {name:<10}{about}" for name, about in COMMANDS.items()), "",
             *(f"  launch {name:<10}{about}" for name, about in LAUNCHERS.items())]
    return "\n".join(["usage: meshtrain COMMAND [...]", "", *lines, "",
                      "meshtrain COMMAND --help tells a command's options, meshtrain completion bash or zsh completes "
                      "them."])


def choose(words: Sequence[str]) -> tuple[str, list[str]]:
    """(the module of a command, its arguments). Raises: ConfigError for a word that names none."""
    table, prefix, rest = (LAUNCHERS, "meshtrain.launch", list(words[1:])) if words[0] == "launch" else (
        COMMANDS, "meshtrain", list(words))
    if not rest:
        raise ConfigError(f"launch needs the name of a launcher; use one of {', '.join(LAUNCHERS)}")
    name, *rest = rest
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(table)}"
        raise ConfigError(f"{name} is no {'launcher' if table is LAUNCHERS else 'command'}; {remedy}")
    return f"{prefix}.{name}", rest


def completion(words: Sequence[str]) -> str:
    """The script that completes commands in a shell. Raises: ConfigError."""
    if list(words) not in [[shell] for shell in SHELLS]:
        raise ConfigError(f"completion needs the name of a shell; use one of {', '.join(SHELLS)}")
    with say.without_noise():
        options = {name: _words_of(f"meshtrain.{name}") for name in COMMANDS}
        options |= {f"launch {name}": _words_of(f"meshtrain.launch.{name}") for name in LAUNCHERS}
    cases = "\n".join(f'        "{name}") words="{" ".join(some)}" ;;' for name, some in options.items())
    script = BASH.format(cases=cases, commands=" ".join([*COMMANDS, "launch", "completion"]),
                         launchers=" ".join(LAUNCHERS))
    return script if words[0] == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def _words_of(module: str) -> list[str]:
    """A command's options and, where it takes them, the keys of a run file."""
    command = getattr(importlib.import_module(module), "COMMAND", None)      # train has keys alone
    keys = [f"--{section}.{name}" for section, cls in SECTIONS.items() for name in cls.model_fields]
    if command is None:
        return keys
    return [*(f"--{name}" for name in command.options), *(keys * (command.keys and not command.launcher))]


if __name__ == "__main__":
    sys.exit(main())
