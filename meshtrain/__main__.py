"""meshtrain COMMAND [...]: runs a command. `python -m meshtrain.COMMAND` does the same.

    meshtrain --version             print the version
    meshtrain COMMAND --help        print the options of a command
    meshtrain completion SHELL      print a script that completes commands, options and keys in bash or zsh; use it by
                                    source <(meshtrain completion bash)
"""
from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

import meshtrain
from meshtrain.commands import options
from meshtrain.config import ConfigError
from meshtrain.config.messages import SECTIONS
from meshtrain.run import say
from meshtrain.run.stops import DONE, USER_ERROR

COMMANDS = {
    "train": "train a model from a run file",
    "plan": "rank the layouts of a model on GPUs by predicted speed",
    "inspect": "print memory, communication and time of a run's step",
    "check": "check settings, data, memory and speed before a run starts",
    "prove": "test whether all layouts compute the same as one device",
    "report": "print a run's progress and speed, compared with predictions",
    "generate": "generate text with a trained model, or chat with it",
    "evaluate": "measure a model's loss on files or harness tasks",
    "convert": "write a run's weights as a model folder",
    "tokenize": "tokenize a run's data before it runs",
    "slurm": "print a Slurm job for a run",
    "sample": "sample answers for an rl run in a separate process",
}
LAUNCHERS = {
    "local": "start processes on this host",
    "pod": "start one process for each GPU of a pod's host",
    "ray": "start a run's processes on a Ray cluster",
    "samplers": "start samplers for an rl run",
    "restart": "decide whether, and after how long, a job starts again",
    "elastic": "find how many hosts can train a run",
}
SHELLS = ("bash", "zsh")
BESIDE = ("launch", "completion", "--help", "--version")       # words beside the commands

# Completion script. {cases} lists the options of each command, from its table. A word without a dash is a file.
BASH = """_meshtrain() {{
    local now="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words
    [ "$command" = launch ] && command="launch ${{COMP_WORDS[2]}}"
    case "$command" in
{cases}
        *) words="" ;;
    esac
    [[ "$now" = -* ]] || words=""
    [ "$command" = completion ] && words="{shells}"
    [ "$COMP_CWORD" = 1 ] && words="{commands}"
    [ "$COMP_CWORD" = 2 ] && [ "${{COMP_WORDS[1]}}" = launch ] && words="{launchers}"
    COMPREPLY=($(compgen -W "$words" -- "$now"))
    [ ${{#COMPREPLY[@]}} = 0 ] && COMPREPLY=($(compgen -f -- "$now"))
}}
complete -o filenames -F _meshtrain meshtrain
"""
# zsh runs bash's script on top of its own completion, which a shell without a .zshrc has not started.
ZSH = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""


def main() -> int:
    """Run the console script. Return the exit code; 2 for an unknown command."""
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
    """Return the text that `meshtrain launch` prints."""
    return "\n".join(["usage: meshtrain launch LAUNCHER [...] -- [RUN.toml] [--section.key value ...]", "",
                      *(f"  {name:<10}{about}" for name, about in LAUNCHERS.items()), "",
                      "meshtrain launch LAUNCHER --help prints the options of a launcher."])


def usage() -> str:
    """Return the text that --help prints."""
    lines = [*(f"  {name:<10}{about}" for name, about in COMMANDS.items()), "",
             *(f"  launch {name:<10}{about}" for name, about in LAUNCHERS.items())]
    return "\n".join(["usage: meshtrain COMMAND [...]", "", *lines, "",
                      "meshtrain COMMAND --help prints the options of a command. meshtrain completion bash or zsh "
                      "prints a completion script."])


def choose(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return (the module of a command, its arguments). Raises: ConfigError for an unknown command."""
    table, prefix, rest = (LAUNCHERS, "meshtrain.launch", list(words[1:])) if words[0] == "launch" else (
        COMMANDS, "meshtrain", list(words))
    if not rest:
        raise ConfigError(f"launch needs the name of a launcher; use one of {', '.join(LAUNCHERS)}")
    name, *rest = rest
    if name not in table:
        known = [*table, *([] if table is LAUNCHERS else BESIDE)]
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        raise ConfigError(f"{name} is not a {'launcher' if table is LAUNCHERS else 'command'}; {remedy}")
    return f"{prefix}.{name}", rest


def completion(words: Sequence[str]) -> str:
    """Return the script that completes commands in a shell. Raises: ConfigError."""
    if list(words) not in [[shell] for shell in SHELLS]:
        raise ConfigError(f"completion needs the name of a shell; use one of {', '.join(SHELLS)}")
    words_of = {name: _words_of(f"meshtrain.commands.{name}") for name in COMMANDS}
    words_of |= {f"launch {name}": _words_of(f"meshtrain.launch.{name}") for name in LAUNCHERS}
    cases = "\n".join(f'        "{name}") words="{" ".join(some)}" ;;' for name, some in words_of.items())
    script = BASH.format(cases=cases, commands=" ".join([*COMMANDS, "launch", "completion"]),
                         launchers=" ".join(LAUNCHERS), shells=" ".join(SHELLS))
    return script if words[0] == "bash" else ZSH + script


def _words_of(module: str) -> list[str]:
    """Return the options of a command and, if it accepts them, the keys of a run file."""
    command, _ = options.read(module)      # train has only keys
    keys = [f"--{section}.{name}" for section, cls in SECTIONS.items() for name in cls.model_fields]
    if command is None:
        return keys
    return [*(f"--{name}" for name in command.options), *(keys * (command.keys and not command.launcher))]


if __name__ == "__main__":
    sys.exit(main())
