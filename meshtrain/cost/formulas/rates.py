"""Computes the seconds of one kernel or collective on a GPU, from the hardware table and the fractions of its peaks in
`assumptions`.

There are four formulas: a matmul, a stream of bytes, flash attention, and a collective over link domains as NCCL's
rings run it. They know neither a program nor a mesh; `roofline` applies them to a compiled schedule.
"""
from __future__ import annotations

import dataclasses
import functools
import math

from meshtrain import hardware, pattern
from meshtrain.choices import attention
from meshtrain.choices.setting import GPU_PLATFORMS, Setting
from meshtrain.config.sections import Run
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas import flops
from meshtrain.cost.formulas.options import Attended

TILE = 128 * 256        # elements of the output that one multiprocessor makes at a time, in the largest tiles of cuBLAS
US = 1e-6
# A hop of NCCL's trees over one of its rings inside a domain (1.25 of 1.9 µs) and between hosts (8.5 of 4.0), and a
# tree's share of a ring's bandwidth. Source: NVIDIA/nccl, src/graph/tuning.cc, protocol LL128.
TREE, TREE_SHARE = (1.25 / 1.9, 8.5 / 4.0), .92


@dataclasses.dataclass(frozen=True)
class Matmul:
    """`batch` products [m, k] × [k, n] in one kernel. dtype: that of the wider operand, as HLO spells it."""
    m: float
    n: float
    k: float
    batch: float
    dtype: str

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k * self.batch


@dataclasses.dataclass(frozen=True)
class GroupedMatmul:
    """One kernel that multiplies the rows of each group by the group's matrix: [rows, k] × [groups, k, n].

    kernel: its name in `assumptions`: rows, mosaic, or outer. outer computes the matrices' gradients, [k, rows] ×
    [rows, n] for each group. rows: number of rows, including the padding of blocks. activation_bytes: HBM bytes of a
    fused activation.
    """
    rows: float
    groups: float
    k: float
    n: float
    dtype: str
    kernel: str = "rows"
    activation_bytes: float = 0

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.k * self.n


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """One flash attention kernel. flops: FLOPs of the visited pairs; skipped pairs do not count."""
    engine: str         # as `assumptions` names it: cudnn, pallas, mosaic, blockwise
    direction: str      # forward, backward
    flops: float
    num_keys: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """The devices of a collective: `size` GPUs, with `per_domain` of them in each link domain (a host or a rack)."""
    size: int
    per_domain: int

    @property
    def domains(self) -> int:
        return self.size // self.per_domain


@dataclasses.dataclass(frozen=True)
class Rates:
    gpu: hardware.Gpu
    assumed: Assumptions

    def peak(self, dtype: str) -> float:
        """Return the dense FLOP/s of matmuls in this dtype, or those of bfloat16 if the GPU has no rate for it."""
        return self.gpu.peak(dtype) or self.gpu.peak("bfloat16")

    def matmul_s(self, matmul: Matmul) -> float:
        a = self.assumed
        waves = matmul.batch * matmul.m * matmul.n / TILE / self.gpu.num_sms
        full = waves / (waves + a["matmul.wave"]) * matmul.k / (matmul.k + a["matmul.k0"])
        share = a["matmul.best"] * a["matmul.sustained"] * a["matmul.clock"] * self.narrow_share(matmul.dtype)
        return matmul.flops / (self.peak(matmul.dtype) * share * full)

    def narrow_share(self, dtype: str) -> float:
        """Return the fraction of its own peak that a narrow dtype reaches, divided by the fraction that bfloat16
        reaches of its peak."""
        return self.assumed["matmul.float8"] if hardware.is_float8(dtype) else 1.0

    def grouped_s(self, grouped: GroupedMatmul) -> float:
        a = self.assumed
        outer = grouped.kernel == "outer"
        results = grouped.groups * grouped.k * grouped.n if outer else grouped.rows * grouped.n
        summed = grouped.rows / grouped.groups if outer else grouped.k
        waves = results / TILE / self.gpu.num_sms
        share = a[f"grouped.{grouped.kernel}"] * a["matmul.sustained"] * a["matmul.clock"]
        share *= self.narrow_share(grouped.dtype)
        full = waves / (waves + a["matmul.wave"]) * summed / (summed + a["matmul.k0"])
        activation_s = a["mlp.exposed"] * self.stream_s(grouped.activation_bytes)
        return grouped.flops / (self.peak(grouped.dtype) * share * full) + activation_s

    def stream_s(self, hbm_bytes: float) -> float:
        return hbm_bytes / (self.gpu.hbm_bytes_per_s * self.assumed["hbm.share"])

    def attention_s(self, kernel: AttentionKernel) -> float:
        a = self.assumed
        share = a[f"attention.{kernel.engine}_{kernel.direction}"] * a["matmul.clock"]
        share *= kernel.num_keys / (kernel.num_keys + a["attention.ramp"])
        width = min(kernel.head_dim, 128) / 128
        # Between the two widths each pair costs the same exponential, whatever its products.
        share /= 1 + (1 / a["attention.narrow"] - 1) * (1 / max(width, 0.5) - 1)
        return kernel.flops / (self.peak("bfloat16") * share)

    def collective_s(self, kind: str, array_bytes: float, group: DeviceGroup) -> float:
        """Return the seconds of a collective. array_bytes: those of the whole array for an all-gather, reduce-scatter
        or all-reduce; for other kinds, the bytes that one GPU sends.

        Inside a domain each GPU sends (n−1)/n of the array to its neighbour. Data enters a domain through the NICs of
        the group's members: one NIC for one GPU per host, eight for eight. A ring has n − 1 steps, and its latency
        grows with them. An all-reduce over many hosts uses a tree (NCCL, tuning.cc).
        """
        a, n = self.assumed, group.size
        if n == 1:
            return 0.0
        link = self.gpu.intra_host_bytes_per_s * a["link.share"]
        nic = self.gpu.inter_host_bytes_per_s * a["nic.share"]
        crossing = group.domains > 1
        start_s, hop_s, host_hop_s = (US * a[name] for name in ("link.start_us", "link.hop_us", "link.host_hop_us"))
        once_s = start_s + (host_hop_s if crossing else hop_s)
        if kind == "collective-permute":
            return once_s + array_bytes / (nic if crossing else link)
        if kind in ("all-to-all", "ragged-all-to-all"):     # assumption: all members are reached at once
            outside = (n - group.per_domain) / n
            return once_s + array_bytes * max((group.per_domain - 1) / n / link, outside / nic)
        inside = array_bytes * (n - 1) / n / link if group.per_domain > 1 else 0.0
        between = array_bytes * (group.domains - 1) / group.domains / (group.per_domain * nic)
        round_s = max(inside, between) + (n - group.domains) * hop_s + (group.domains - 1) * host_hop_s
        if kind != "all-reduce":
            return start_s + round_s
        tree_hop_s, tree_host_hop_s = hop_s * TREE[0], host_hop_s * TREE[1]
        depth_s = (group.per_domain - 1) * tree_hop_s + math.log2(group.domains) * tree_host_hop_s
        return start_s + 2 * min(round_s, max(inside, between) / TREE_SHARE + depth_s)

    @property
    def host_bytes_per_s(self) -> float:
        """Return the bandwidth of copies between the GPU and the host's memory."""
        return 1e9 * self.assumed["offload.gb_per_s"]

    @property
    def launch_s(self) -> float:
        return self.assumed["kernel.launch_us"] * US


# ---- visited pairs of a packed row -----------------------------------------------------------------------------------

OURS = ("pallas", "mosaic")
BLOCK = 128     # assumption: tokens of a kernel's block of queries or keys; at 64 a row of 8,192 has 2% less to visit


def attended(run: Run, layout, assumed: Assumptions) -> Attended:
    """Return the attention engine of a run under this layout and the fraction of pairs that it visits. Raises:
    ValueError if the requested engine cannot run here."""
    cfg, length = run.model, run.data.seq_len
    gpu = hardware.GPUS.get(assumed.gpu_name)
    engine = attention.engine(Setting(run, layout, GPU_PLATFORMS[0], gpu, installed=False)).value
    mixers = sorted({kind.mixer for kind in pattern.kinds(cfg)} & set(pattern.ATTENTION))
    if not run.data.document_mask or engine not in OURS:        # the others mask what they have computed
        return Attended({mixer: flops.attended(cfg, mixer, length) for mixer in mixers}, engine, False)
    documents = assumed["documents.mean"], assumed["documents.sigma"]
    num_shards = layout.num_shards(layout.all_axes("activations", "seq"))

    def visited(mixer: str) -> float:
        if within := flops.window(cfg, mixer, length):
            return visited_share(length, *documents, window=within)
        return split_share(length, num_shards, run.context.method, *documents)
    return Attended({mixer: visited(mixer) for mixer in mixers}, engine, True)


@functools.lru_cache(maxsize=64)
def visited_share(length: int, mean: float, sigma: float, block: int = BLOCK, window: int = 0) -> float:
    """Return the pairs that a kernel visits in a row of packed documents, as a fraction of length²/2.

    Document lengths are log-normal. The row begins at a random token, so long documents hold a larger share of the
    tokens than of the documents. A block of queries visits the blocks of keys that begin at or after the start of its
    first query's document. P(that start is more than a tokens back) = E[max(L − a, 0)] / mean, which for a log-normal L
    is the Black–Scholes formula. window: tokens that a query attends to; 0: all.
    """
    block, reach = min(block, length), window - 1 if window else length
    visited, back, older = 0.0, 0.0, 1.0                # back: tokens between a query and the first one that it sees
    for start in range(0, length, block):
        rows = min(block, length - start)
        # A start somewhere inside a block of keys, half a block in the mean; the row's own start is a block's, and
        # where a window ends in its block is known.
        ends = older * (-reach % block) if reach < start else 0.0
        visited += rows * (back + rows + ends + (1 - older) * block / 2)
        if start < reach:
            further = min(rows, reach - start)
            before, older = older, _older(start + further, mean, sigma)
            back += further * (before + older) / 2
    return visited / (length * length / 2)


def split_share(length: int, num_shards: int, method: str, mean: float, sigma: float) -> float:
    """Return `visited_share` as if each of `num_shards` devices visited as many pairs as the busiest one. Each has two
    chunks of the row in zigzag order, except with ulysses, which splits heads."""
    if num_shards == 1 or method == "ulysses":
        return visited_share(length, mean, sigma)
    chunk = length // (2 * num_shards)
    own = lambda n: visited_share(n, mean, sigma) * n * n / 2
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
    own = lambda n: visited_share(n, mean, sigma) * n * n / 2 if n else 0.0
    apart = lambda n: min(chunk * chunk, own((n + 1) * chunk) - 2 * own(n * chunk) + own((n - 1) * chunk))
    late = 2 * num_shards - 1         # device i has the chunks i and late - i
    if method == "ring":        # at step t keys of device i - t, for its late queries and for those that they precede
        steps = (max(apart(late - i - (i - t) % num_shards) + apart(t if i >= t else num_shards - t)
                     for i in range(num_shards)) for t in range(1, num_shards))
        return sum(steps) / (2 * num_shards - 2)
    return max(sum(apart(n) for end in (i, late - i) for n in range(1, end + 1)) for i in range(num_shards)) / (
        2 * num_shards - 1)


def banded_pairs(queries: int, keys: int, ahead: int, window: int, mean: float = math.inf, sigma: float = 1.0) -> float:
    """Return the number of causal pairs that are at most window - 1 tokens apart. The queries begin `ahead` tokens
    after the keys.

    mean: mean document length; if it is finite, pairs across documents are excluded.
    """
    pairs = 0.0
    for first in range(max(0, ahead - keys + 1), min(window, ahead + queries), BLOCK):
        # distances: pairs of each, from the mean of the ends
        last = min(first + BLOCK, window, ahead + queries) - 1
        count = lambda apart: max(0, min(queries, keys + apart - ahead) - max(0, apart - ahead))
        alike = 1.0 if math.isinf(mean) else _older((first + last) / 2 or 1, mean, sigma)
        pairs += (last - first + 1) * (count(first) + count(last)) / 2 * alike
    return pairs


def _older(age: float, mean: float, sigma: float) -> float:
    """Return the probability that the document at some token began more than `age` tokens before the token."""
    normal = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    d = math.log(mean / age) / sigma + sigma / 2
    return normal(d) - age / mean * normal(d - sigma)
