"""Computes the seconds and temporaries of a recurrence by its engine: `kernels.recurrence`, compiled by XLA, or its
Pallas kernels.

Few of XLA's kernels are bound by FLOPs. A step of its scan over chunks is several short kernels, with a gap after each.
All other work passes float32 arrays through memory: pairs of a chunk's tokens [N, C, C], arrays of tokens [N, V + H]
and the chunks' states [N, H, V]. Pallas kernels are bound by their products, which `kernels.recurrence_pallas` lists.

The bytes were read off programs compiled for H100 in bfloat16, with 4,096 and 8,192 tokens, head sizes of 64, 128 and
256, and 16 to 128 heads. Nothing is measured.
"""
from __future__ import annotations

import dataclasses

from meshtrain.cost.formulas.mixers import RecurrenceSizes
from meshtrain.cost.formulas.rates import Matmul, Rates
from meshtrain.kernels import recurrence, recurrence_blocks, recurrence_pallas

XLA, PALLAS = "xla", "pallas"


@dataclasses.dataclass(frozen=True)
class HbmBytes:
    """HBM bytes of a recurrence's forward or backward.

    pair: bytes for each pair of tokens in a chunk. key, value: bytes for each element of a value head's key and value.
    state: bytes for each element of the state before a chunk. step: number of kernels per chunk; once: number of the
    other kernels.
    """
    pair: float
    key: float
    value: float
    state: float
    step: float = 0
    once: float = 0

    def of(self, mixer: RecurrenceSizes, chunk: int) -> float:
        """Return the HBM bytes per token."""
        each = self.pair * chunk + self.key * mixer.key_dim + self.value * mixer.value_dim
        return mixer.heads * each + self.state * mixer.state / chunk


# by engine and mixer: forward, backward, arrays that live during the backward
MOVED = {
    (XLA, "G"): (HbmBytes(70, 39, 39, 72, 9, 44), HbmBytes(216, 61, 61, 153, 9, 78), HbmBytes(21, 11, 11, 35)),
    (XLA, "K"): (HbmBytes(50, 151, 39, 55, 9, 50), HbmBytes(170, 473, 61, 130, 9, 90), HbmBytes(12, 89, 11, 25)),
    (XLA, "M"): (HbmBytes(4, 0, 30, 40, 3, 15), HbmBytes(24, 0, 78, 56, 3, 34), HbmBytes(10, 0, 15, 4)),
    (PALLAS, "G"): (HbmBytes(0, 6, 9.4, 2, 0, 7), HbmBytes(0, 20, 23, 8, 0, 12), HbmBytes(0, 10, 12, 5)),
    (PALLAS, "K"): (HbmBytes(4, 28, 8, 2, 0, 7), HbmBytes(20, 62, 22, 10, 0, 12), HbmBytes(0, 20, 12, 5)),
    (PALLAS, "M"): (HbmBytes(0, 0, 5, 2, 0, 6), HbmBytes(0, 0, 7, 8, 0, 10), HbmBytes(0, 0, 18, 5))}
# Pallas kernels of the forward and of the backward, with the delta rule and without; for the summary of a run
KERNELS = {True: (("inside", "forward"), ("inside_again", "reverse", "gradients", "inside_gradients")),
           False: (("forward",), ("reverse", "gradients"))}
OF_SUMMARY = "summary", "reverse_end"
# HBM bytes of a channel in the convolution (forward, backward), and its kernels: small, of q, k and v
CONVOLVED, CONVOLUTIONS = (2, 10), (2, 8)
# Products in float32 in XLA: of the inverse of a chunk's pairs with values and keys; the backward makes them again, has
# two for each, and two for the inverse.
INVERTED = (1, 3)
# Products in float32, in XLA, that sum decays per channel; the backward of Pallas kernels makes them again.
SUMMED = (1, 2)
# HBM bytes of an element of a state before a chunk, for the summary of a run (forward, backward), and kernels of a step
SUMMARIZED, SUMMARY_STEP = (90, 62), 7


@dataclasses.dataclass(frozen=True)
class Scan:
    """The tokens of a layer on one device, in runs of `length` tokens whose chunks follow each other.

    parts: number of parts that are computed one after the other. split: number of devices that split a sequence, each
    with one run of it; 0 if sequences are not split. For split sequences another scan computes the effect of a run on
    any initial state, and these effects are composed.
    """
    tokens: float
    length: float
    parts: float = 1
    split: int = 0


def engine(mixer: RecurrenceSizes, asked: str) -> str:
    """Return the engine of a mixer. Pallas kernels do not support wide heads, so XLA computes those. asked: the
    requested engine."""
    return XLA if max(mixer.key_dim, mixer.value_dim) > recurrence_pallas.WIDEST else asked


def chunk(mixer: RecurrenceSizes, asked: str) -> int:
    """Return the number of tokens of a chunk. asked: the requested engine."""
    if engine(mixer, asked) == PALLAS:
        return recurrence_blocks.CHUNK
    return recurrence.SUM_CHUNK if mixer.letter == "M" else recurrence.DELTA_CHUNK


def states_width(mixer: RecurrenceSizes, asked: str) -> float:
    """Return the elements per token of the saved states. asked: the requested engine."""
    return mixer.state / chunk(mixer, asked)


def live_width(mixer: RecurrenceSizes, itemsize: int, asked: str) -> float:
    """Return the elements per token that live during the backward. asked: the requested engine."""
    return MOVED[engine(mixer, asked), mixer.letter][2].of(mixer, chunk(mixer, asked)) / itemsize


def seconds(mixer: RecurrenceSizes, rated: Rates, runs: Scan, itemsize: int, asked: str) -> tuple[float, float]:
    """Return the seconds of a layer's recurrence and its convolution (forward, backward). asked: the requested
    engine."""
    channels, found = mixer.queries + mixer.keys + mixer.values, []
    of = _in_pallas if engine(mixer, asked) == PALLAS else _in_xla
    for direction in (0, 1):
        moved = MOVED[engine(mixer, asked), mixer.letter][direction]
        one_s = runs.parts * (CONVOLUTIONS[direction] + moved.once) * rated.launch_s
        one_s += rated.stream_s(runs.tokens * itemsize / 2 * CONVOLVED[direction] * channels)
        hbm = runs.tokens * itemsize / 2 * moved.of(mixer, chunk(mixer, asked))
        found.append(one_s + of(mixer, rated, runs, direction, hbm))
    return tuple(found)


def _in_xla(mixer: RecurrenceSizes, rated: Rates, runs: Scan, direction: int, hbm: float) -> float:
    C, width = chunk(mixer, XLA), mixer.key_dim + mixer.value_dim
    steps = runs.length / C
    launches = MOVED[XLA, mixer.letter][direction].step * steps
    if runs.split:
        launches += SUMMARY_STEP * steps
        hbm += runs.tokens * SUMMARIZED[direction] * mixer.state / C
    one_s = runs.parts * (launches * rated.launch_s + _composed_s(mixer, rated, runs))
    if mixer.letter != "M":
        own, times = runs.tokens * mixer.heads * 4 * (C + 2 * width) * INVERTED[direction], INVERTED[direction]
        product = Matmul(C, width, C, max(1, round(runs.tokens * mixer.heads / C)), "float32")
        hbm, one_s = hbm - own, one_s + max(times * rated.matmul_s(product), rated.stream_s(own))
    return one_s + rated.stream_s(hbm)


def _in_pallas(mixer: RecurrenceSizes, rated: Rates, runs: Scan, direction: int, hbm: float) -> float:
    delta, count = mixer.letter != "M", round(runs.tokens * mixer.heads / recurrence_blocks.CHUNK)
    wide = lambda n: max(recurrence_pallas.MIN_WIDTH, 1 << (n - 1).bit_length())
    names = KERNELS[delta][direction] + (OF_SUMMARY[direction:direction + 1] if runs.split else ())
    products = [shape for name in names for shape in recurrence_pallas.products_of(
        recurrence_pallas.CHANNELS * mixer.by_channel + name, wide(mixer.key_dim), wide(mixer.value_dim), delta)]
    one_s, C = runs.parts * _composed_s(mixer, rated, runs), recurrence_blocks.CHUNK
    if mixer.by_channel:
        own = SUMMED[direction] * 8 * runs.tokens * mixer.keys
        product_s = rated.matmul_s(Matmul(C, mixer.key_dim, C, count, "float32"))
        one_s, hbm = one_s + max(SUMMED[direction] * product_s, rated.stream_s(own)), hbm - own
    return one_s + max(rated.stream_s(hbm), sum(
        rated.matmul_s(Matmul(*shape, count, "bfloat16")) for shape in products))


def _composed_s(mixer: RecurrenceSizes, rated: Rates, runs: Scan) -> float:
    """Return the seconds to compose the effects of all runs of a sequence on a state, one after the other, in
    float32."""
    H, V, matrix = mixer.key_dim, mixer.value_dim, mixer.letter != "M"
    product_s = rated.matmul_s(Matmul(H, V, H, round(mixer.heads), "float32")) if matrix else 0.0
    return runs.split * (SUMMARY_STEP * rated.launch_s + product_s)
