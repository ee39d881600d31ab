"""Computes the seconds of one kernel or collective on a GPU, from the hardware table and the fractions of its peaks in
`assumptions`.

There are four formulas: a matmul, a stream of bytes, flash attention, and a collective over link domains as NCCL's
rings run it. They know neither a program nor a mesh; `roofline` applies them to a compiled schedule.
"""
from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from meshtrain import hardware
from meshtrain.cost.formulas.assumptions import Assumptions

TILE = 128 * 256        # elements of the output that one multiprocessor makes at a time, in the largest tiles of cuBLAS
US = 1e-6
# A hop of NCCL's trees over one of its rings inside a domain (1.25 of 1.9 µs) and between hosts (8.5 of 4.0), and a
# tree's share of a ring's bandwidth. Source: NVIDIA/nccl, src/graph/tuning.cc, protocol LL128.
TREE, TREE_SHARE = (1.25 / 1.9, 8.5 / 4.0), .92


@dataclasses.dataclass(frozen=True)
class Matmul:
    """`batch` products [m, k] × [k, n] in one kernel. dtype: the dtype of the wider operand, as HLO spells it."""
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

    kernel: its name in `assumptions`: rows, mosaic, or outer. The kernel outer computes the matrices' gradients, [k,
    rows] × [rows, n] for each group. rows: number of rows, including the padding of blocks. activation_bytes: HBM bytes
    of a fused activation.
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
    num_keys: float
    head_dim: int


class DeviceGroup(NamedTuple):
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
    _product_s: dict[tuple[float, float, float, str, int], float] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False)

    def peak(self, dtype: str) -> float:
        """Return the dense FLOP/s of matmuls in this dtype, or those of bfloat16 if the GPU has no rate for it."""
        return self.gpu.peak(dtype) or _known(self.gpu.peak("bfloat16"))

    def matmul_s(self, matmul: Matmul) -> float:
        a = self.assumed
        waves = matmul.batch * matmul.m * matmul.n / TILE / _known(self.gpu.num_sms)
        full = waves / (waves + a["matmul.wave"]) * matmul.k / (matmul.k + a["matmul.k0"])
        share = a["matmul.best"] * a["matmul.sustained"] * a["matmul.clock"] * self.narrow_share(matmul.dtype)
        return matmul.flops / (self.peak(matmul.dtype) * share * full)

    def product_s(self, m: float, n: float, k: float, dtype: str, itemsize: int) -> float:
        """Return the seconds of [m, k] × [k, n] with elements of `itemsize` bytes: the longer of the times for its
        FLOPs and its HBM bytes. The layouts of a search have few different products, so their times are kept."""
        key = m, n, k, dtype, itemsize
        if key not in self._product_s:
            self._product_s[key] = max(self.matmul_s(Matmul(m, n, k, 1, dtype)),
                                       self.stream_s(itemsize * (m * n + n * k + m * k)))
        return self._product_s[key]

    def narrow_share(self, dtype: str) -> float:
        """Return the fraction of its own peak that a narrow dtype reaches, divided by the fraction that bfloat16
        reaches of its peak."""
        return self.assumed["matmul.float8"] if hardware.dtype_name(dtype) == "float8" else 1.0

    def matmul_groups_s(self, grouped: GroupedMatmul) -> float:
        a = self.assumed
        outer = grouped.kernel == "outer"
        results = grouped.groups * grouped.k * grouped.n if outer else grouped.rows * grouped.n
        summed = grouped.rows / grouped.groups if outer else grouped.k
        waves = results / TILE / _known(self.gpu.num_sms)
        share = a[f"grouped.{grouped.kernel}"] * a["matmul.sustained"] * a["matmul.clock"]
        share *= self.narrow_share(grouped.dtype)
        full = waves / (waves + a["matmul.wave"]) * summed / (summed + a["matmul.k0"])
        activation_s = a["mlp.exposed"] * self.stream_s(grouped.activation_bytes)
        return grouped.flops / (self.peak(grouped.dtype) * share * full) + activation_s

    def stream_s(self, hbm_bytes: float) -> float:
        return hbm_bytes / (_known(self.gpu.hbm_bytes_per_s) * self.assumed["hbm.share"])

    def attention_s(self, kernel: AttentionKernel) -> float:
        a = self.assumed
        share = a[f"attention.{kernel.engine}_{kernel.direction}"] * a["matmul.clock"]
        share *= kernel.num_keys / (kernel.num_keys + a["attention.ramp"])
        width = min(kernel.head_dim, 128) / 128
        # Between the two widths each pair costs the same exponential, whatever its products.
        share /= 1 + (1 / a["attention.narrow"] - 1) * (1 / max(width, 0.5) - 1)
        return kernel.flops / (self.peak("bfloat16") * share)

    def collective_s(self, kind: str, array_bytes: float, group: DeviceGroup) -> float:
        """Return the seconds of a collective. array_bytes: bytes of the whole array for an all-gather, reduce-scatter
        or all-reduce; for other kinds, the bytes that one GPU sends.

        Inside a domain each GPU sends (n−1)/n of the array to its neighbour. Data enters a domain through the NICs of
        the group's members: one NIC for one GPU per host, eight for eight. A ring has n − 1 steps, and its latency
        grows with them. An all-reduce over many hosts uses a tree (NCCL, tuning.cc).
        """
        a, n = self.assumed, group.size
        if n == 1:
            return 0.0
        link = _known(self.gpu.intra_host_bytes_per_s) * a["link.share"]
        nic = _known(self.gpu.inter_host_bytes_per_s) * a["nic.share"]
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

    def host_copy_s(self, num_bytes: float) -> float:
        """Return the seconds of a copy to or from the host's memory."""
        return num_bytes / (1e9 * self.assumed["offload.gb_per_s"])

    @property
    def launch_s(self) -> float:
        return self.assumed["kernel.launch_us"] * US


def _known(value: float | None) -> float:
    """Return a number of the hardware table. Only GPUs whose speed is known have prices."""
    assert value is not None
    return value
