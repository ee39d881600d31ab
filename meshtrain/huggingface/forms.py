"""Forms of a tensor in both layouts: "(N H) D -> D N H", Hugging Face's -> ours.

A letter is a model size. Parentheses flatten several of our dims into one, slowest first. A star marks the dim along
which several of our tensors are concatenated. Works on numpy and jax arrays.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

# Letter -> its key of [model]. C: learned positions; W: expert width.
LETTERS = {"D": "embed_dim", "N": "num_heads", "K": "num_kv_heads", "H": "head_dim", "F": "mlp_dim", "V": "vocab_size",
           "C": "max_seq_len", "E": "num_experts", "W": "expert_mlp_dim"}


@dataclasses.dataclass(frozen=True)
class Form:
    """One tensor of ours within a Hugging Face tensor. groups: letters of each of its dims. ours: letters of our dims,
    without layers."""
    groups: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    star: int | None

    def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.groups)

    def our_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.ours)

    def to_ours(self, x, sizes: Mapping[str, int]):
        letters = sum(self.groups, ())
        return x.reshape([sizes[letter] for letter in letters]).transpose(
            [letters.index(letter) for letter in self.ours])

    def to_theirs(self, x, sizes: Mapping[str, int]):
        letters = sum(self.groups, ())
        return x.transpose([self.ours.index(letter) for letter in letters]).reshape(self.their_shape(sizes))


@functools.cache
def parse(text: str) -> Form:
    """Raises: ValueError for an unknown letter, one that is repeated or on one side only, or two stars."""
    left, arrow, right = text.partition("->")
    words = re.findall(r"\*?\([^()]*\)|\*?\w+|\S", left)
    groups = tuple(tuple(word.strip("*()").split()) for word in words)
    stars = [i for i, word in enumerate(words) if word.startswith("*")]
    letters, ours = sum(groups, ()), tuple(right.split())
    if not arrow or not letters or set(letters) - set(LETTERS) or len(set(letters)) != len(letters) or len(stars) > 1 \
            or sorted(letters) != sorted(ours):
        raise ValueError(f'"{text}" is no form; write e.g. "(N H) D -> D N H", each of {", ".join(LETTERS)} at most '
                         f'once a side')
    return Form(groups, ours, stars[0] if stars else None)


def sizes_of(model) -> dict[str, int]:
    """Letter -> size. model: an object with the keys of [model] as attributes."""
    return {letter: getattr(model, key) for letter, key in LETTERS.items()}
