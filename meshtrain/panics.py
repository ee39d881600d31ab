"""Converts panics of Rust libraries (tokenizers, obstore) to exceptions. A panic reaches Python as a BaseException that
`except Exception` does not catch, after the library has printed its own lines on stderr."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator


class LibraryPanic(Exception):
    """A Rust library panicked. The message is the first line of the panic's message."""


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """Context manager: convert a panic to a LibraryPanic. Other exceptions pass unchanged."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":    # each library has its own class
            raise
        raise LibraryPanic(str(error).partition("\n")[0][:300]) from None
