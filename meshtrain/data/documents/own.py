"""Reads the documents that code of the run's own yields, "file.py:name" in data.source: texts, or token ids.

The function takes the path of a file, or no argument, and yields each document once, in the same order at every call.
The token cache calls it once for each file and each content of the code. So the function needs no code for batches,
resumes, several hosts or mixtures. Every fault is a ValueError with file, document and remedy. This module knows no
cache.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from meshtrain import custom
from meshtrain.config.sections import DOCUMENTS
from meshtrain.data.documents import formats
from meshtrain.data.documents.tokenizer import Ids, Tokenizer

OWN = "own"


def identify(source: str) -> str:
    """Return what the documents depend on besides their files: the digest of the code, and the name of the function."""
    path, name = custom.split(source)
    return f"{custom.digest(path)}:{name}"


def read(source: str, path: str, reader: Tokenizer) -> Iterator[formats.TextPiece | np.ndarray]:
    """Yield the documents of a file: pieces of texts, and integers [tokens] for a document of ids. Raises: ValueError.
    """
    yielded = custom.call("data.source", source, DOCUMENTS, *[path] * bool(custom.count_arguments(source)))
    if isinstance(yielded, (str, bytes, dict)) or not isinstance(yielded, Iterable):
        raise custom.refuse("data.source", source, DOCUMENTS, f"returned a {type(yielded).__name__}")
    documents, number = iter(yielded), 0
    while True:
        place = f"document {number} (from 0) of {source}"
        try:
            document = next(documents)
        except StopIteration:
            return
        except custom.ERRORS as error:
            raise formats.fault(path, place, f"raised {custom.tell(error)}", "fix the code or the file") from error
        if not isinstance(document, str):
            yield _check_ids(path, place, document, reader.vocab_size)
        elif isinstance(reader, Ids):
            raise formats.fault(path, place, "is text, but with data.bos_token and no data.tokenizer, documents must "
                                             "be ids", "yield ids, or name a tokenizer.json")
        else:
            yield from formats.pieces_of(path, place, document)
        number += 1


def _check_ids(path: str, place: str, document: object, vocab_size: int) -> np.ndarray:
    """Return a document as ids, integers [tokens]. Raises: ValueError."""
    try:
        ids = np.asarray(document)
    except ValueError as error:     # lists of unequal lengths
        raise formats.fault(path, place, f"is not a list of ids ({error})", "yield a str, or token ids") from None
    if not ids.size and ids.ndim == 1:
        return ids.astype(np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        is_array = ids.ndim and ids.dtype.kind in "iufb"
        what = f"has {ids.dtype}{list(ids.shape)}" if is_array else f"is a {type(document).__name__}"
        raise formats.fault(path, place, what, "yield a str, or token ids: a list or an array of whole numbers")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise formats.fault(path, place, f"has the id {wrong}, but data.tokenizer has 0 to {vocab_size - 1}",
                            "yield ids of this tokenizer; without one, give data.bos_token the id before a document")
    return ids
