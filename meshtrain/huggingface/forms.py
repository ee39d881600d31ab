"""Forms of a tensor in Hugging Face's layout and in ours: "(N H) D -> D N H".

A word is a dim. A letter is a size of the layer (`sizes_of`), a number is itself, and 1 may be on one side only.
Parentheses flatten several dims into one, the slowest first. A star marks a part of a whole. On the left, parameters of
ours are concatenated in a Hugging Face tensor: with "D *(N H)" each has columns of its own, with "(N *H) D" rows of
every head, with "D (F *1)" every other column. On the right, parts of a Hugging Face tensor are concatenated in a
parameter of ours, in the order of the table: "(N *P) D -> D N *P" with "(N *(r 2)) D -> D N *(2 r)" turns neighbouring
pairs of the rope into halves. The functions work on numpy and jax arrays.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping

from meshtrain.config.sections import Model

# Letter -> its key of [model]. C: learned positions; W: expert width.
LETTERS = {"D": "embed_dim", "N": "num_heads", "K": "num_kv_heads", "H": "head_dim", "F": "mlp_dim", "V": "vocab_size",
           "C": "max_seq_len", "E": "num_experts", "W": "expert_mlp_dim", "S": "shared_expert_dim",
           "Q": "latent.query_dim", "L": "latent.kv_dim", "R": "latent.rope_dim",
           "k": "linear.key_heads", "n": "linear.value_heads", "d": "linear.key_dim", "v": "linear.value_dim",
           "w": "linear.conv_width"}
# Derived sizes. With latents, P: dims of a head without rope; r: pairs of dims with rope; U: width of the values. p, z:
# rotated pairs of a head, other dims; g: value heads per key head; a: inner width of low-rank projections.
# M: embed_dim, where D is the other dim.
DERIVED = {"P": "head_dim - rope_dim", "r": "rope_dim / 2", "U": "latent.value_dim or head_dim",
           "p": "rotated pairs", "z": "head_dim - 2 p", "g": "value_heads / key_heads", "a": "value_dim",
           "M": "embed_dim beside D"}
WORD = re.compile(r"\*?\((?:[^()]|\([^()]*\))*\)|\*?\w+")


def sizes_of(model: Model) -> dict[str, int]:
    """Return letter -> size. model: keys of [model] as attributes, for one mixer (`Model.of`)."""
    def value(path: str) -> int:
        return functools.reduce(getattr, path.split("."), model)
    sizes = {letter: value(path) for letter, path in LETTERS.items()}
    sizes["M"] = sizes["D"]
    pairs = int(model.head_dim * model.rope_scaling.partial_rotary_factor) // 2
    return sizes | {"P": model.head_dim - sizes["R"], "r": sizes["R"] // 2,
                    "U": model.latent.value_dim or model.head_dim, "p": pairs, "z": model.head_dim - 2 * pairs,
                    "g": sizes["n"] // max(sizes["k"], 1), "a": sizes["v"]}


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a form. dims: the words of each dim. star: (dim, first word, end) of the starred part; None: no part
    is starred."""
    dims: tuple[tuple[str, ...], ...]
    star: tuple[int, int, int] | None

    @property
    def words(self) -> tuple[str, ...]:
        """All words except 1."""
        return tuple(word for dim in self.dims for word in dim if word != "1")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(_product(dim, sizes) for dim in self.dims)

    def part(self, sizes: Mapping[str, int]) -> int:
        """Return the length of the part along the star; 0 without a star."""
        return _product(self.dims[self.star[0]][self.star[1]:self.star[2]], sizes) if self.star else 0

    def around(self, sizes: Mapping[str, int], part: int) -> tuple[int, ...]:
        """Return the shape with the dim of the star split in three: the words before the part, a part of this length,
        the words after it."""
        dim, first, end = self.star
        shape, words = self.shape(sizes), self.dims[dim]
        return (*shape[:dim], _product(words[:first], sizes), part, _product(words[end:], sizes), *shape[dim + 1:])

    def of_whole(self, sizes: Mapping[str, int], whole: int) -> tuple[int, ...]:
        """Return the shape of the whole. whole: the length of all parts together along the star."""
        if not self.star:
            return self.shape(sizes)
        dim, shape = self.star[0], self.around(sizes, whole)
        return (*shape[:dim], math.prod(shape[dim:dim + 3]), *shape[dim + 3:])

    def take(self, x, sizes: Mapping[str, int], first: int, whole: int):
        """Return the part of x that begins at `first` along the star, in this side's shape. whole: length of x along
        the star."""
        if not self.star:
            return x
        at = (slice(None),) * (self.star[0] + 1) + (slice(first, first + self.part(sizes)),)
        return x.reshape(self.around(sizes, whole))[at].reshape(self.shape(sizes))

    def join(self, parts, sizes: Mapping[str, int], concatenate):
        """Return the whole of several parts; the inverse of `take`. sizes: the sizes of the dims around the star."""
        if not self.star:
            (x,) = parts
            return x
        axis = self.star[0] + 1
        shaped = [x.reshape(self.around(sizes, -1)) for x in parts]
        return concatenate(shaped, axis).reshape(self.of_whole(sizes, sum(x.shape[axis] for x in shaped)))


@dataclasses.dataclass(frozen=True)
class Form:
    """One tensor of ours, or a part of it, within a Hugging Face tensor."""
    theirs: Side
    ours: Side

    def to_ours(self, x, sizes: Mapping[str, int]):
        return self._reshape(x, self.theirs, self.ours, sizes)

    def to_theirs(self, x, sizes: Mapping[str, int]):
        return self._reshape(x, self.ours, self.theirs, sizes)

    @staticmethod
    def _reshape(x, given: Side, wanted: Side, sizes: Mapping[str, int]):
        return x.reshape([_product((word,), sizes) for word in given.words]).transpose(
            [given.words.index(word) for word in wanted.words]).reshape(wanted.shape(sizes))


@functools.cache
def parse(text: str) -> Form:
    """Return the form of a text. Raises: ValueError for an unknown letter, a letter that is repeated or on one side
    only, or two stars."""
    left, arrow, right = text.partition("->")
    theirs, ours = _side(left), _side(right)
    words = theirs.words if theirs else ()
    known = all(word in LETTERS or word in DERIVED or word.isdecimal() for word in words)
    if not arrow or not theirs or not ours or not theirs.dims or not known or len(set(words)) != len(words) \
            or sorted(words) != sorted(ours.words):
        raise ValueError(f'"{text}" is not a form; write e.g. "(N H) D -> D N H", each of '
                         f'{", ".join([*LETTERS, *DERIVED])} at most once per side')
    return Form(theirs, ours)


def _side(text: str) -> Side | None:
    """Return a side of a form; None if the text is no list of dims or has two stars."""
    dims, stars = [], []
    for number, word in enumerate(WORD.findall(text)):
        words: list[str] = []
        for part in re.findall(r"\*\([^()]*\)|\*\w+|\w+", word[1:] if word.startswith("(") else word):
            part_words = part.strip("*()").split()
            if part.startswith("*"):
                stars.append((number, len(words), len(words) + len(part_words)))
            words += part_words
        dims.append(tuple(words))
    return None if re.sub(WORD, "", text).strip() or len(stars) > 1 else Side(tuple(dims), stars[0] if stars else None)


def _product(words: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(int(word) if word.isdecimal() else sizes[word] for word in words)
