"""How commands begin and end. It is imported before jax."""
from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence

from meshtrain.config import Command, ConfigError, Arguments
from meshtrain.files import FileSystemError
from meshtrain.run import say, stops
from meshtrain.run.stops import DONE, FAILED, USER_ERROR


def begin(level: int = 2, platform: str = "") -> None:
    """First thing in a command that trains nothing: signals end it in order, and jax is imported without its C++
    noise. level: see `say.begin`. platform: of jax, where the environment names none."""
    say.begin(level)
    stops.listen("stopped")
    if platform:
        os.environ.setdefault("JAX_PLATFORMS", platform)
    with say.without_noise():
        importlib.import_module("jax")


def answer(command: Command, body: Callable[[Arguments], int | None], argv: Sequence[str], about: str | None,
           failures: tuple[type[Exception], ...] = (), told: Callable[[Exception], bool] = lambda error: False) -> int:
    """Runs `body` on what the command line gives; the exit code, which `body` returns or 0.

    about: the module's docstring, for --help. failures: errors that are told in their own words with exit code 1. told:
    whether another process tells this error.
    """
    words = [str(word) for word in argv]
    own = words[:words.index("--")] if command.launcher and "--" in words else words
    if {"--help", "-h"} & set(own):
        say.out(command.help(about or ""))
        return DONE
    try:
        return body(command.read(words)) or DONE
    except ConfigError as error:
        if not told(error):
            say.err(f"error: {error}")
        return USER_ERROR
    except (FileSystemError, *failures) as error:
        say.err(f"error: {error}")
        return FAILED
