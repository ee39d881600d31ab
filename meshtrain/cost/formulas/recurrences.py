"""Seconds and temporaries of a recurrence as `kernels.recurrence` computes it: what XLA makes of its chunks.

Few of its kernels are bound by FLOPs. A step of the scan from chunk to chunk is several short kernels, each with its
gap; all else passes float32 arrays through memory: pairs of a chunk's tokens [N, C, C], the widths of tokens [N, V + H]
and the chunks' states [N, H, V]. The numbers were read off programs compiled for H100 in bfloat16, of 4,096 and 8,192
tokens, heads of 64, 128 and 256, and 16 to 128 heads; they are no measurement.
"""
from __future__ import annotations

import dataclasses

from meshtrain.cost.formulas.mixers import Recurrence
from meshtrain.cost.formulas.rates import Matmul, Rates


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of a direction: for each pair of a token with those of its chunk, for each element of a value head's key,
    of its value, and of its state before a chunk. step, once: number of kernels of a chunk, and of the rest."""
    pair: float
    key: float
    value: float
    state: float
    step: float = 0
    once: float = 0

    def of(self, mixer: Recurrence) -> float:
        """Bytes of a token."""
        each = self.pair * mixer.chunk + self.key * mixer.key_dim + self.value * mixer.value_dim
        return mixer.heads * each + self.state * mixer.state / mixer.chunk


# by mixer: forward, backward, what lives in the backward
MOVED = {"G": (Traffic(70, 39, 39, 72, 9, 44), Traffic(216, 61, 61, 153, 9, 78), Traffic(21, 11, 11, 35)),
         "K": (Traffic(50, 151, 39, 55, 9, 50), Traffic(170, 473, 61, 130, 9, 90), Traffic(12, 89, 11, 25)),
         "M": (Traffic(4, 0, 30, 40, 3, 15), Traffic(24, 0, 78, 56, 3, 34), Traffic(10, 0, 15, 4))}
# HBM bytes of a channel in the convolution (forward, backward), and its kernels: small, of q, k and v
CONVOLVED, CONVOLUTIONS = (2, 10), (2, 8)
# Products in float32: of the inverse of a chunk's pairs with values and keys; the backward makes them again, has two for
# each, and two for the inverse.
INVERTED = (1, 3)
# HBM bytes of an element of a state before a chunk, for the summary of a run (forward, backward), and kernels of a step.
SUMMARIZED, SUMMARY_STEP = (90, 62), 7


@dataclasses.dataclass(frozen=True)
class Runs:
    """Tokens of a layer on one device: in runs of `length`, whose chunks follow each other. parts: computed one after
    the other. split: number of runs of a sequence that several devices have, else 0. What a run does to any state is
    then found by another scan, and what they all do composed."""
    tokens: float
    length: float
    parts: float = 1
    split: int = 0


def seconds(mixer: Recurrence, rated: Rates, runs: Runs, itemsize: int) -> tuple[float, float]:
    """Seconds of a layer's recurrence and its convolution (forward, backward)."""
    channels, found = mixer.queries + mixer.keys + mixer.values, []
    for moved, convolved, kernels, inverted, summary in zip(MOVED[mixer.letter], CONVOLVED, CONVOLUTIONS, INVERTED,
                                                            SUMMARIZED):
        steps = runs.length / mixer.chunk
        launches = kernels + moved.once + moved.step * steps + (SUMMARY_STEP * (steps + runs.split) if runs.split else 0)
        hbm = runs.tokens * itemsize / 2 * (moved.of(mixer) + convolved * channels)
        hbm += runs.tokens * summary * mixer.state / mixer.chunk * bool(runs.split)
        one_s = runs.parts * launches * rated.launch_s
        if mixer.letter != "M":
            C, width = mixer.chunk, mixer.key_dim + mixer.value_dim
            own = runs.tokens * mixer.heads * 4 * (C + 2 * width) * inverted
            product = Matmul(C, width, C, round(runs.tokens * mixer.heads / C), "float32")
            hbm, one_s = hbm - own, one_s + max(inverted * rated.matmul_s(product), rated.stream_s(own))
        found.append(one_s + rated.stream_s(hbm))
    return tuple(found)


def live_width(mixer: Recurrence, itemsize: int) -> float:
    """Elements of a token that live in the backward."""
    return MOVED[mixer.letter][2].of(mixer) / itemsize
