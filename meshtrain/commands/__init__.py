"""The work of every command: `python -m meshtrain.NAME` and `meshtrain NAME` run `commands.NAME.main`.

Commands do not import each other: what two of them need is in a room.
"""
from __future__ import annotations

import importlib
import sys
import time
from typing import NoReturn

from meshtrain.run import phases, say, stops


def start(name: str, level: int = 2, platform: str = "", jax: bool = True) -> NoReturn:
    """Run a command with the words of the command line, and end the process with its exit code.

    level: see `say.begin`. platform: see `command.begin`. jax: whether the command needs jax.
    """
    if jax:
        from meshtrain.run import command       # here: it imports the configuration; `start_training` listens before
        command.begin(level, platform)      # before other modules import jax, to silence messages of its C++
    else:
        say.begin(level)
    sys.exit(importlib.import_module(f"meshtrain.commands.{name}").main(sys.argv[1:]))


def start_training() -> NoReturn:
    """Run the command train as `start`. Its account of time begins here, and stop signals are handled while jax is
    imported, which takes seconds."""
    began = time.perf_counter()
    say.begin()
    stops.listen()
    phases.begin("starting")
    with say.without_noise():
        importlib.import_module("jax")
    sys.exit(importlib.import_module("meshtrain.commands.train").main(sys.argv[1:], began))
