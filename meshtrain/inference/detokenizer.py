"""Decodes answers to text: without the stop token, cut at a stop string, and streamed."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

BROKEN = "\ufffd"       # the decoder's output for bytes that do not form a character yet


@dataclasses.dataclass(frozen=True)
class Words:
    """Turns the tokens of an answer into text. decode: function ids -> text. stops: stop strings. stop_ids: stop
    tokens. ends: stop strings and stop tokens as text, for messages."""
    decode: Callable[[Sequence[int]], str]
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ends: str = ""

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer up to its stop."""
        whole = self.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens)
        return whole[:min((at for stop in self.stops if (at := whole.find(stop)) >= 0), default=len(whole))]

    @property
    def at_string(self) -> Callable[[int, list[int]], int | None] | None:
        """`find_end` as a function for `GenerationLimits.ended`; None without stop strings."""
        return (lambda _, tokens: self.find_end(tokens)) if self.stops else None

    def find_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens of an answer up to its first stop string; None if it has none."""
        def has(count: int) -> bool:
            return any(stop in self.decode(tokens[:count]) for stop in self.stops)
        if not has(len(tokens)):
            return None
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if has(middle) else (middle + 1, high)
        return low


class TextStream:
    """Streams the text of an answer. The stream holds back incomplete characters, and text that may be the start of a
    stop string."""

    def __init__(self, words: Words):
        self.words, self.told = words, ""

    def more(self, tokens: Sequence[int]) -> str:
        """Return the text that is new since the last call and that no later token can change."""
        text = self.words.text(tokens)
        sure = text.rstrip(BROKEN)
        held = max((n for stop in self.words.stops for n in range(1, len(stop)) if sure.endswith(stop[:n])), default=0)
        return self._tell(sure[:len(sure) - held])

    def rest(self, tokens: Sequence[int]) -> str:
        """Return the remaining text of a finished answer."""
        return self._tell(self.words.text(tokens))

    def _tell(self, text: str) -> str:
        # A decoder may change earlier text (for example the space before a comma). Text that was returned is not
        # changed.
        more, self.told = (text[len(self.told):], text) if len(text) > len(self.told) else ("", self.told)
        return more
