"""How a command that trains nothing begins and ends. It is imported before jax."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from meshtrain.config import ConfigError
from meshtrain.files import FileSystemError
from meshtrain.run import say
from meshtrain.run.stops import DONE, FAILED, USER_ERROR


def answer(body: Callable[[list[str]], None], argv: Sequence[str], usage: str, about: str | None,
           failures: tuple[type[Exception], ...] = (), told: Callable[[Exception], bool] = lambda error: False) -> int:
    """Does what a command line asks, in words where it cannot; the exit code.

    about: what --help tells. failures: which are told in their own words, and are no mistake of the user's. told:
    whether another process says it.
    """
    words = [str(word) for word in argv]
    if {"--help", "-h"} & set(words):
        say.out(f"usage: {usage}\n\n{(about or '').rstrip()}")
        return DONE
    try:
        body(words)
        return DONE
    except ConfigError as error:
        if not told(error):
            say.err(f"error: {error}")
        return USER_ERROR
    except (FileSystemError, *failures) as error:
        say.err(f"error: {error}")
        return FAILED
