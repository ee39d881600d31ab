"""Start and end of every command: signals, streams, exit codes. Imported before jax."""
from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from meshtrain import custom, files
from meshtrain.config import Arguments, Command, ConfigError
from meshtrain.files import FileSystemError
from meshtrain.run import say, stops
from meshtrain.run.stops import DONE, FAILED, USER_ERROR


JSON = "--json"     # with this option, a command prints only JSON on stdout


def begin(level: int = 2, platform: str = "") -> None:
    """Install signal handlers and silence jax's C++ logs. This is the first call of a command that does not train.

    level: see `say.begin`. platform: the value of JAX_PLATFORMS if the environment does not set it.
    """
    say.begin(level)
    if JSON in sys.argv[1:]:
        say.keep_stdout()
    stops.listen("stopped")
    if platform:
        os.environ.setdefault("JAX_PLATFORMS", platform)
    with say.without_noise():
        importlib.import_module("jax")


def print_notices() -> None:
    """Print the lines of `files.notices` on stderr. Every command calls it."""
    files.notices.write = say.err


def entry(command: Command, about: str | None, failures: tuple[type[Exception], ...] = (),
          reported: Callable[[Exception], bool] = lambda error: False):
    """Return a decorator that turns `body(arguments)` into `main(argv)`, which parses argv and returns the exit code.

    body returns an exit code, or None for 0. about: the module's docstring, shown by --help. failures: exceptions that
    are printed without a traceback, with exit code 1. reported: returns whether another process prints this exception.
    """
    expected: tuple[type[Exception], ...] = (FileSystemError, *failures)

    def decorate(body: Callable[[Arguments], int | None]) -> Callable[[Sequence[str]], int]:
        @functools.wraps(body)
        def main(argv: Sequence[str]) -> int:
            words = [str(word) for word in argv]
            own = words[:words.index("--")] if command.launcher and "--" in words else words
            if {"--help", "-h"} & set(own):
                say.answer(command.help(about or ""))
                return DONE
            print_notices()
            try:
                with say.reserve_stdout(JSON in own):
                    return body(command.read(words)) or DONE
            except ConfigError as error:
                if not reported(error):
                    say.err(f"error: {error}")
                return USER_ERROR
            except expected as error:
                say.err(f"error: {error}")
                return FAILED
            except Exception as error:
                if not (told := custom.find_misuse(error)):
                    raise
                say.err(f"error: {told}")
                return USER_ERROR
        return main
    return decorate
