"""Counts the pairs of tokens that attention computes: those that a mask keeps, and those that a kernel visits.

A kernel visits whole blocks of pairs. Our kernels skip the blocks across documents of a packed row. Documents have
log-normal lengths, from `assumptions`.
"""
from __future__ import annotations

import functools
import math

from meshtrain import hardware, pattern
from meshtrain.choices import attention
from meshtrain.choices.setting import GPU_PLATFORMS, Setting
from meshtrain.config.sections import Model, Run
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas.options import Attended
from meshtrain.sharding.rules import Layout

OURS = ("pallas", "mosaic")
BLOCK = 128     # assumption: tokens of a kernel's block of queries or keys; at 64 a row of 8,192 has 2% less to visit


def window(cfg: Model, mixer: str, seq_len: int) -> int:
    """Return how many tokens a token attends to in layers of this mixer; 0 means the whole sequence."""
    within = cfg.of(mixer).window if pattern.mixer(mixer).windowed else 0
    return within if within < seq_len else 0


def causal_share(cfg: Model, mixer: str, seq_len: int) -> float:
    """Return how many pairs a token of a full row attends to in layers of this mixer, as a fraction of the causal half
    S / 2."""
    within = window(cfg, mixer, seq_len) / seq_len
    return (2 - within) * within if within else 1.0


# ---- visited pairs of a packed row -----------------------------------------------------------------------------------


def count(run: Run, layout: Layout, assumed: Assumptions) -> Attended:
    """Return the attention engine of a run under this layout and the fraction of pairs that it visits. Raises:
    ValueError if the requested engine cannot run here."""
    cfg, length = run.model, run.data.seq_len
    gpu = hardware.GPUS.get(assumed.gpu_name)
    setting = Setting(layout, GPU_PLATFORMS[0], gpu, installed=False, run=run)
    engine = attention.engine(setting, attention.need_of(run)).value
    mixers = sorted(letter for letter in pattern.present(cfg) if pattern.mixer(letter).attends)
    if not run.data.document_mask or engine not in OURS:        # the others mask what they have computed
        return Attended({mixer: causal_share(cfg, mixer, length) for mixer in mixers}, engine, False)
    documents = assumed["documents.mean"], assumed["documents.sigma"]
    num_shards = layout.num_shards(layout.all_axes("activations", "seq"))

    def share_of(mixer: str) -> float:
        if within := window(cfg, mixer, length):
            return row_share(length, *documents, window=within)
        return split_share(length, num_shards, run.context.method, *documents)
    return Attended({mixer: share_of(mixer) for mixer in mixers}, engine, True)


@functools.lru_cache(maxsize=64)
def row_share(length: int, mean: float, sigma: float, block: int = BLOCK, window: int = 0) -> float:
    """Return the pairs that a kernel visits in a row of packed documents, as a fraction of length²/2.

    Document lengths are log-normal. The row begins at a random token, so long documents hold a larger share of the
    tokens than of the documents. A block of queries visits the blocks of keys that begin at or after the start of its
    first query's document. The probability that this start is more than a tokens back is E[max(L − a, 0)] / mean. For a
    log-normal L, the expectation is the Black–Scholes formula. window: tokens that a query attends to; 0: all.
    """
    block, reach = min(block, length), window - 1 if window else length
    pairs, back, older = 0.0, 0.0, 1.0                # back: tokens between a query and the first one that it sees
    for start in range(0, length, block):
        rows = min(block, length - start)
        # A document starts anywhere in a block of keys, on average in its middle. The row starts where a block starts.
        # The place where a window ends in its block is known.
        ends = older * (-reach % block) if reach < start else 0.0
        pairs += rows * (back + rows + ends + (1 - older) * block / 2)
        if start < reach:
            further = min(rows, reach - start)
            before, older = older, _older(start + further, mean, sigma)
            back += further * (before + older) / 2
    return pairs / (length * length / 2)


def split_share(length: int, num_shards: int, method: str, mean: float, sigma: float) -> float:
    """Return `row_share` as if each of `num_shards` devices visited as many pairs as the busiest one. Each has two
    chunks of the row in zigzag order, except with ulysses, which splits heads."""
    if num_shards == 1 or method == "ulysses":
        return row_share(length, mean, sigma)
    chunk = length // (2 * num_shards)
    def own(n: int) -> float:
        return row_share(n, mean, sigma) * n * n / 2
    diagonal, blocks = (own(2 * chunk), 2 * num_shards - 2) if method == "ring" else (
        2 * own(chunk), 2 * num_shards - 1)
    return (diagonal + blocks * whole_pairs(chunk, num_shards, method, mean, sigma)) * num_shards / (
        length * length / 2)


@functools.lru_cache(maxsize=64)
def whole_pairs(chunk: int, num_shards: int, method: str, mean: float, sigma: float) -> float:
    """Return the pairs that a kernel visits between a chunk of queries and an earlier chunk of keys, mean over a
    layer's kernels.

    Distant chunks share few documents, so neighbouring chunks have the most pairs. The busiest device counts: in a ring
    all devices wait for it in every step.
    """
    def own(n: int) -> float:
        return row_share(n, mean, sigma) * n * n / 2 if n else 0.0

    def apart(n: int) -> float:
        return min(chunk * chunk, own((n + 1) * chunk) - 2 * own(n * chunk) + own((n - 1) * chunk))
    late = 2 * num_shards - 1         # device i has the chunks i and late - i
    if method == "ring":        # at step t keys of device i - t, for its late queries and for those that they precede
        steps = (max(apart(late - i - (i - t) % num_shards) + apart(t if i >= t else num_shards - t)
                     for i in range(num_shards)) for t in range(1, num_shards))
        return sum(steps) / (2 * num_shards - 2)
    return max(sum(apart(n) for end in (i, late - i) for n in range(1, end + 1)) for i in range(num_shards)) / (
        2 * num_shards - 1)


def band_pairs(queries: int, keys: int, ahead: int, window: int, mean: float = math.inf, sigma: float = 1.0) -> float:
    """Return the number of causal pairs that are at most window - 1 tokens apart. The queries begin `ahead` tokens
    after the keys.

    mean: mean document length; if it is finite, pairs across documents are excluded.
    """
    def pairs_at(apart: int) -> int:
        return max(0, min(queries, keys + apart - ahead) - max(0, apart - ahead))
    pairs = 0.0
    for first in range(max(0, ahead - keys + 1), min(window, ahead + queries), BLOCK):
        # distances: pairs of each, from the mean of the ends
        last = min(first + BLOCK, window, ahead + queries) - 1
        alike = 1.0 if math.isinf(mean) else _older((first + last) / 2 or 1, mean, sigma)
        pairs += (last - first + 1) * (pairs_at(first) + pairs_at(last)) / 2 * alike
    return pairs


def _older(age: float, mean: float, sigma: float) -> float:
    """Return the probability that the document at some token began more than `age` tokens before the token."""
    def normal(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))
    d = math.log(mean / age) / sigma + sigma / 2
    return normal(d) - age / mean * normal(d - sigma)
