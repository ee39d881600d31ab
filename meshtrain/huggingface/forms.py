"""Forms of a tensor in both layouts: "(N H) D -> D N H", Hugging Face's -> ours.

A word is a dim: a letter is a size of the layer (`sizes_of`), a number is itself, 1 may be on one side alone, and
parentheses flatten several into one, slowest first. A star marks a part of a whole. On the left our tensors are
concatenated in theirs: "D *(N H)" has columns of its own, "(N *H) D" rows of every head, "D (F *1)" every other
column. On the right their parts are concatenated in ours, in the order of the table: "(N *P) D -> D N *P" with
"(N *(r 2)) D -> D N *(2 r)" turns pairs of the rope that are neighbours into halves. Works on numpy and jax arrays.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

# Letter -> its key of [model]. C: learned positions; W: expert width.
LETTERS = {"D": "embed_dim", "N": "num_heads", "K": "num_kv_heads", "H": "head_dim", "F": "mlp_dim", "V": "vocab_size",
           "C": "max_seq_len", "E": "num_experts", "W": "expert_mlp_dim", "S": "shared_expert_dim",
           "Q": "latent.query_dim", "L": "latent.kv_dim", "R": "latent.rope_dim",
           "k": "linear.key_heads", "n": "linear.value_heads", "d": "linear.key_dim", "v": "linear.value_dim",
           "w": "linear.conv_width"}
# Derived ones. P: what latents do not rotate of a head; r: pairs that they rotate; U: width of their values; p and z:
# pairs of a head that rotate, and the rest; g: value heads of a key head; a: inner width of low-rank projections.
DERIVED = {"P": "head_dim - rope_dim", "r": "rope_dim / 2", "U": "latent.value_dim or head_dim",
           "p": "rotated pairs", "z": "head_dim - 2 p", "g": "value_heads / key_heads", "a": "value_dim"}
WORD = re.compile(r"\*?\((?:[^()]|\([^()]*\))*\)|\*?\w+")


def sizes_of(model) -> dict[str, int]:
    """Letter -> size. model: keys of [model] as attributes, those of one mixer (`Model.of`)."""
    def value(path: str) -> int:
        return functools.reduce(getattr, path.split("."), model)
    sizes = {letter: value(path) for letter, path in LETTERS.items()}
    pairs = int(model.head_dim * model.rope_scaling.partial_rotary_factor) // 2
    return sizes | {"P": model.head_dim - sizes["R"], "r": sizes["R"] // 2,
                    "U": model.latent.value_dim or model.head_dim, "p": pairs, "z": model.head_dim - 2 * pairs,
                    "g": sizes["n"] // max(sizes["k"], 1), "a": sizes["v"]}


@dataclasses.dataclass(frozen=True)
class Side:
    """The dims of a form's side. star: (dim, first word in it, end), of the part."""
    dims: tuple[tuple[str, ...], ...]
    star: tuple[int, int, int] | None

    @property
    def words(self) -> tuple[str, ...]:
        """All words but 1."""
        return tuple(word for dim in self.dims for word in dim if word != "1")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(_product(dim, sizes) for dim in self.dims)

    def part(self, sizes: Mapping[str, int]) -> int:
        """The length of the part along the star; 0 without one."""
        return _product(self.dims[self.star[0]][self.star[1]:self.star[2]], sizes) if self.star else 0

    def around(self, sizes: Mapping[str, int], part: int) -> tuple[int, ...]:
        """The shape with the dim of the star as [what is before it, a part of this length, what is after it]."""
        dim, first, end = self.star
        shape, words = self.shape(sizes), self.dims[dim]
        return (*shape[:dim], _product(words[:first], sizes), part, _product(words[end:], sizes), *shape[dim + 1:])

    def of_whole(self, sizes: Mapping[str, int], whole: int) -> tuple[int, ...]:
        """The shape of the whole, whose parts together have this length."""
        if not self.star:
            return self.shape(sizes)
        dim, shape = self.star[0], self.around(sizes, whole)
        return (*shape[:dim], math.prod(shape[dim:dim + 3]), *shape[dim + 3:])

    def taken(self, x, sizes: Mapping[str, int], first: int, whole: int):
        """The part of a whole that begins there along the star, in the shape of this side."""
        if not self.star:
            return x
        at = (slice(None),) * (self.star[0] + 1) + (slice(first, first + self.part(sizes)),)
        return x.reshape(self.around(sizes, whole))[at].reshape(self.shape(sizes))

    def joined(self, parts, sizes: Mapping[str, int], concatenate):
        """Inverse of `taken`: the whole of its parts. sizes: equal around the star."""
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
        return self._moved(x, self.theirs, self.ours, sizes)

    def to_theirs(self, x, sizes: Mapping[str, int]):
        return self._moved(x, self.ours, self.theirs, sizes)

    @staticmethod
    def _moved(x, given: Side, wanted: Side, sizes: Mapping[str, int]):
        return x.reshape([_product((word,), sizes) for word in given.words]).transpose(
            [given.words.index(word) for word in wanted.words]).reshape(wanted.shape(sizes))


@functools.cache
def parse(text: str) -> Form:
    """Raises: ValueError for an unknown letter, one that is repeated or on one side only, or two stars."""
    left, arrow, right = text.partition("->")
    theirs, ours = _side(left), _side(right)
    words = theirs.words if theirs else ()
    known = all(word in LETTERS or word in DERIVED or word.isdecimal() for word in words)
    if not arrow or not theirs or not ours or not theirs.dims or not known or len(set(words)) != len(words) \
            or sorted(words) != sorted(ours.words):
        raise ValueError(f'"{text}" is no form; write e.g. "(N H) D -> D N H", each of '
                         f'{", ".join([*LETTERS, *DERIVED])} at most once a side')
    return Form(theirs, ours)


def _side(text: str) -> Side | None:
    """None for what is no list of dims, or has two stars."""
    dims, stars = [], []
    for number, word in enumerate(WORD.findall(text)):
        words: list[str] = []
        for part in re.findall(r"\*\([^()]*\)|\*\w+|\w+", word[1:] if word.startswith("(") else word):
            found = part.strip("*()").split()
            if part.startswith("*"):
                stars.append((number, len(words), len(words) + len(found)))
            words += found
        dims.append(tuple(words))
    return None if re.sub(WORD, "", text).strip() or len(stars) > 1 else Side(tuple(dims), stars[0] if stars else None)


def _product(words, sizes: Mapping[str, int]) -> int:
    return math.prod(int(word) if word.isdecimal() else sizes[word] for word in words)
