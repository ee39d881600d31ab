"""The work of every command: `python -m meshtrain.NAME` and `meshtrain NAME` run `commands.NAME.main`.

Commands do not import each other: what two of them need is in a room.
"""
from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import time
from typing import NoReturn

from meshtrain.run import phases, say, stops

HELP = {"--help", "-h"}


def start(name: str, level: int = 2, platform: str = "", jax: bool = True) -> NoReturn:
    """Run a command with the words of the command line, and end the process with its exit code.

    level: see `say.begin`. platform: see `command.begin`. jax: whether the command needs jax.
    """
    if HELP & set(sys.argv[1:]):
        from meshtrain.commands import options      # here: see below
        say.begin(level)
        say.answer(options.text(f"meshtrain.commands.{name}"))
        sys.exit(stops.DONE)
    gc.disable()
    if jax:
        from meshtrain.run import command       # here: it imports the configuration; `start_training` listens before
        command.begin(level, platform)      # before other modules import jax, to silence messages of its C++
    else:
        say.begin(level)
    module = importlib.import_module(f"meshtrain.commands.{name}")
    _keep_what_is_imported()
    sys.exit(module.main(sys.argv[1:]))


def start_training() -> NoReturn:
    """Run the command train as `start`. Its account of time begins here, and stop signals are handled while jax is
    imported, which takes seconds."""
    began = time.perf_counter()
    say.begin()
    stops.listen()
    if HELP & set(sys.argv[1:]):
        with contextlib.suppress(Exception):        # the command reports it, below
            importlib.import_module("meshtrain.run_files").load(sys.argv[1:])       # prints the keys and exits
    phases.begin("starting")
    gc.disable()
    with say.without_noise():
        importlib.import_module("jax")
        importlib.import_module("meshtrain.commands.train")
    _keep_what_is_imported()
    sys.exit(importlib.import_module("meshtrain.commands.train").main(sys.argv[1:], began))


def _keep_what_is_imported() -> None:
    """Enable the garbage collector, without the objects that there are now: it would go through hundreds of thousands
    of them again and again."""
    gc.freeze()
    gc.enable()
