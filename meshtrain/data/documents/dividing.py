"""Divides texts into documents at a marker, and counts the names of special tokens in texts.

Many corpora are one file whose documents are separated by the name of a token, e.g. <|endoftext|>. A tokenizer of
documents (tokenizer.py) reads that name as ordinary characters, so the file is one document unless it is divided.
"""
from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator

from meshtrain.data.documents.formats import TextPiece
from meshtrain.data.documents.tokenizer import Tokenizer, TokenizerFile
from meshtrain.units import amount, plural

SHORTEST_NAME = 3       # characters; shorter ones are found in any text
NAMES_TOLD = 4


def divide(pieces: Iterator[TextPiece], marker: str,
            count: Callable[[int], None] = lambda divisions: None) -> Iterator[TextPiece]:
    """Yield the documents, divided at every `marker`, which is removed. Documents that are only white space are left
    out. count: receives the number of new divisions after each piece."""
    held, begun = "", False     # held: a beginning of the marker, or white space; begun: a part was yielded
    for piece in pieces:
        *whole, held = (held + piece.text).split(marker)
        count(len(whole))
        if piece.last:
            whole, held = [*whole, held], ""
        for text in whole:
            if begun or text and not text.isspace():
                yield TextPiece(text, True, piece.position)
            begun = False
        if begun or held and not held.isspace():
            kept = next((n for n in range(min(len(marker) - 1, len(held)), 0, -1) if held.endswith(marker[:n])), 0)
            text, held = held[:len(held) - kept], held[len(held) - kept:]
            begun = begun or bool(text) and not text.isspace()
            if begun:
                yield TextPiece(text, False, piece.position)
            else:
                held = text + held


class Markers:
    """Divides the documents of texts at a marker (data.split_at; empty: nowhere), and counts the names of special
    tokens in them, which are ordinary characters there."""

    def __init__(self, tokenizer: Tokenizer, marker: str):
        self.marker, self.num_files, self.divisions = marker, 0, 0
        self.found: dict[str, collections.Counter] = {}     # path -> names
        names = tokenizer.library.get_added_tokens_decoder().values() if isinstance(tokenizer, TokenizerFile) else ()
        alike: dict[str, list[str]] = collections.defaultdict(list)
        for name in sorted({token.content for token in names if token.special and len(token.content) >= SHORTEST_NAME}):
            alike[name[:2]].append(name[2:])
        # Names by their first two characters, the longest first: a text without these is passed at memory speed.
        self._patterns = {begin: re.compile(re.escape(begin) + "(?:" + "|".join(
            map(re.escape, sorted(rests, key=len, reverse=True))) + ")") for begin, rests in alike.items()}

    def documents(self, path: str, pieces: Iterator[TextPiece]) -> Iterator[TextPiece]:
        """Yield the documents of a file, divided at the marker if there is one. Names of special tokens in them are
        counted."""
        self.num_files += 1
        for piece in divide(pieces, self.marker, self._count) if self.marker else pieces:
            self.count_names(path, piece.text)
            yield piece

    def count_names(self, path: str, text: str) -> None:
        """Count the names of special tokens in a text of a file."""
        for begin, pattern in self._patterns.items():
            if begin in text and (names := pattern.findall(text)):
                self.found.setdefault(path, collections.Counter()).update(names)

    def _count(self, divisions: int) -> None:
        self.divisions += divisions

    def tell(self, tell: Callable[[str], None]) -> None:
        """Report what was found. tell: prints a line."""
        if self.found:
            path, *more = self.found
            counts = sum(self.found.values(), collections.Counter()).most_common()
            names = ", ".join(f"{count:,} × {name!r}" for name, count in counts[:NAMES_TOLD])
            names += f" and {len(counts) - NAMES_TOLD} other names" if len(counts) > NAMES_TOLD else ""
            remedy = f"; documents are divided only at {self.marker!r}" if self.marker else \
                f'; data.split_at = "{counts[0][0]}" divides documents there'
            files = f" and {len(more):,} other {plural(len(more), 'file')}" if more else ""
            tell(f"{path}{files}: {names} in the text are encoded as ordinary characters{remedy}")
        if self.marker and self.num_files and not self.divisions:
            tell(f"data.split_at={self.marker!r} occurs nowhere in {amount(self.num_files, 'tokenized file')}; "
                 f"fix it, or leave it out")
