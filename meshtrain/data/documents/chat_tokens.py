"""Tokens of rendered conversations: finds the tokens of an answer, and separates prompts from answers.

A model is prompted with the tokens of the text before an answer. If a token of the whole text would cross from the
prompt into the answer, the two are tokenized separately, so that the model learns with the tokens that it is prompted
with. This module knows no templates and no conversations.
"""
from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.documents.tokenizer import Bytes, using

# Number of characters before an answer that are tokenized by themselves to see whether a token crosses into it. The
# first half of them is context.
WINDOW = 256
# How a prompt and its answer were separated if no token ended between them. APART: they were tokenized separately.
# CROSSED: they were not, because the tokenizer would then write another text. ELSEWHERE: an answer does not begin where
# its generation prompt ends.
APART, CROSSED, ELSEWHERE = "apart", "crossed", "elsewhere"


class Tokens(NamedTuple):
    """The tokens of a text. ids: int32 [T]. of: range (begin, end) of characters -> the tokens that contain a character
    of this range. parting: "" or one of the constants above."""
    ids: np.ndarray
    of: Callable[[int, int], slice]
    parting: str


def of_bytes(tokenizer: Bytes, replies: Sequence[dict]) -> list[Tokens]:
    """Return the byte tokens of texts. replies: the replies of rendering.py; their keys `text` and `elsewhere` are
    read."""
    encoded = tokenizer.encode([reply["text"] for reply in replies])
    return [Tokens(ids.astype(np.int32), functools.partial(_bytes_of, reply["text"]), _elsewhere(reply))
            for reply, ids in zip(replies, encoded)]


def _bytes_of(text: str, begin: int, end: int) -> slice:
    first = len(text[:begin].encode())
    return slice(first, first + len(text[begin:end].encode()))


def _elsewhere(reply: dict) -> str:
    return ELSEWHERE if reply["elsewhere"] else ""


class _Offsets(NamedTuple):
    """int32 ids [T] with the offset of each token's first character and of the character after it, both int64 [T]."""
    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    parting: str = ""

    @classmethod
    def read(cls, encoding) -> _Offsets:
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        # ascending, even if a normalizer has moved characters
        starts, stops = np.minimum.accumulate(starts[::-1])[::-1], np.maximum.accumulate(stops)
        return cls(np.array(encoding.ids, np.int32), starts, stops)

    def of(self, begin: int, end: int) -> slice:
        """Return the tokens that have one of the characters begin..end-1. A character may have several tokens."""
        return slice(np.searchsorted(self.stops, begin, side="right"), np.searchsorted(self.starts, end))


class Parted:
    """Tokenizes texts so that a token ends between a prompt and its answer. library: a tokenizers.Tokenizer. path: the
    file of the tokenizer."""

    def __init__(self, library: Any, path: str):
        self.library, self.path = library, path

    def tokenize(self, replies: Sequence[dict]) -> list[Tokens]:
        """Return the tokens of texts. replies: the replies of rendering.py; their keys `text`, `begins` and `elsewhere`
        are read. Raises: ValueError."""
        encoded = self._encode(self.library, [reply["text"] for reply in replies])
        for number, begins in enumerate(self._crossings(replies, encoded)):
            if begins:
                encoded[number] = self._part(replies[number]["text"], begins, encoded[number])
        return [Tokens(tokens.ids, tokens.of, _elsewhere(reply) or tokens.parting)
                for tokens, reply in zip(encoded, replies)]

    def _encode(self, library, texts: Sequence[str]) -> list[_Offsets]:
        with using(f"data.tokenizer={self.path!r}"):
            return [_Offsets.read(encoding) for encoding in library.encode_batch(list(texts), add_special_tokens=False)]

    def _crossings(self, replies: Sequence[dict], found: Sequence[_Offsets]) -> list[list[int]]:
        """Return, for each text, the beginnings of answers at which the tokens before the answer differ from the tokens
        of the text cut at the beginning of the answer."""
        places = [(number, begin) for number, reply in enumerate(replies) for begin in reply["begins"]]
        before = self._encode(self.library, [replies[number]["text"][max(0, begin - WINDOW):begin]
                                             for number, begin in places])
        crossings: list[list[int]] = [[] for _ in replies]
        for (number, begin), part in zip(places, before):
            first, whole = max(0, begin - WINDOW), found[number]
            left = first + WINDOW // 2 if first else 0
            mine, theirs = slice(*np.searchsorted(whole.starts, (left, begin))), part.starts + first >= left
            if whole.stops[mine].max(initial=0) > begin or not np.array_equal(whole.ids[mine], part.ids[theirs]):
                crossings[number].append(begin)
        return crossings

    def _part(self, text: str, begins: Sequence[int], whole: _Offsets) -> _Offsets:
        """Return the tokens of a text in which no token crosses `begins` (ascending). Return `whole` if the separate
        parts would decode to another text, e.g. with a space before each part."""
        mark, library = self._dividing
        pieces = [text[begin:end] for begin, end in zip([0, *begins], [*begins, len(text)])]
        (marked,) = self._encode(library, [mark.join(pieces)])
        marks = np.array(begins) + len(mark) * np.arange(len(begins))
        starts, stops = (places - len(mark) * np.searchsorted(marks, places)
                         for places in (marked.starts, marked.stops))
        written, wanted = (self.library.decode(one.ids.tolist(), skip_special_tokens=False) for one in (marked, whole))
        return _Offsets(marked.ids, starts, stops, APART) if written == wanted else whole._replace(parting=CROSSED)

    @functools.cached_property
    def _dividing(self) -> tuple[str, Any]:
        """(a text that no conversation has, a library that divides texts there and leaves it out)."""
        from tokenizers import Tokenizer, pre_tokenizers
        # Unicode's noncharacters are no letters or spaces, and normalizers keep them.
        mark = "".join(chr(0xFDD0 + secrets.randbelow(32)) for _ in range(16))
        library = Tokenizer.from_str(self.library.to_str())
        library.encode_special_tokens = False
        split, then = pre_tokenizers.Split(mark, "removed"), library.pre_tokenizer
        library.pre_tokenizer = split if then is None else pre_tokenizers.Sequence([split, then])
        return mark, library
