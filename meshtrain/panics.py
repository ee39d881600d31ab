"""Panics of libraries in Rust (tokenizers, obstore) as errors: they reach Python as a BaseException, which no
`except Exception` catches. The library has printed its own lines to the standard error before."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator


class LibraryPanic(Exception):
    """A library in Rust failed inside. The message is the first line of its reason."""


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """Raises: LibraryPanic for a panic in the block; every other exception as it is."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":    # each library has its own class
            raise
        raise LibraryPanic(str(error).partition("\n")[0][:300]) from None
