"""Estimates the time of a compiled GPU step. Each kernel takes the longer of the times for its FLOPs and its bytes; the
kernels run in XLA's schedule.

Nothing is measured: rates are hardware peaks (`hardware`) times assumed fractions (`assumptions`). Attention counts the
pairs that its kernel computes: cuDNN's causal half, or the visited blocks of packed documents in our kernels. A
collective runs at the rate of the links in its group. The order of the mesh's devices determines the hosts of a group.
The mesh has any axes; only the chunks of context parallelism are found by the name of their axis.
"""
from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from meshtrain import hardware
from meshtrain.cost.formulas import attention_pairs, rates
from meshtrain.cost.program import audit, hlo, timeline, work
from meshtrain.cost.program.sources import ATTENTION, OPTIMIZER, RECURRENCE, Sources
from meshtrain.scopes import HOST_MOMENTS
from meshtrain.sharding.mesh import AnyMesh

MATMUL, ELEMENTWISE = "matmul", "elementwise"
PARTS = (ATTENTION, RECURRENCE, MATMUL, ELEMENTWISE, OPTIMIZER)
COMMUNICATION, CONTENTION, HOST = "communication", "contention", "host"     # other shares of a step


@dataclass(frozen=True)
class Kernel:
    """The kernels that belong to one part of the step and one source line, summed over all runs of a step on one
    GPU."""
    name: str           # of the costliest instruction
    part: str
    source: str         # JAX path, shortened
    line: str           # 'model/layers.py:55'
    runs: int
    seconds: float
    flops: float
    hbm_bytes: int
    bound: str          # FLOPs, HBM, launch or host: what takes most of its time
    instructions: tuple[str, ...]   # all of them, as a profile names them

    def as_json(self) -> dict:
        return {"name": self.name, "part": self.part, "source": self.source, "line": self.line, "count": self.runs,
                "time_s": self.seconds, "flops": self.flops, "bytes": self.hbm_bytes, "bound": self.bound,
                "instructions": self.instructions}


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind over the same axes, on one GPU."""
    kind: str
    axes: tuple[str, ...]
    runs: int
    sent_bytes: int                 # in a ring
    seconds: float
    exposed_s: float
    hidden_under: Mapping[str, float]   # part → seconds


@dataclass(frozen=True)
class Workload:
    """What a step computes, as far as its program does not show it.

    tokens, model_flops: tokens and model FLOPs of a step on all GPUs, see `cost.formulas.flops`; tokens is 0 if
    unknown. mfu_dtype: the dtype whose peak is the reference of the MFU: the compute dtype, even with float8
    projections. packed: whether a row holds several documents. context_method: the context parallelism method.
    """
    tokens: int
    model_flops: float
    mfu_dtype: str = "bfloat16"
    packed: bool = True
    context_method: str = "ring"


@dataclass(frozen=True)
class Roofline:
    """The estimated time of a step on `num_gpus` GPUs.

    step_s = compute_s (kernels) + exposed_s (collectives) + contention_s (the slowdown of kernels that overlap
    collectives) + host_s.
    """
    prices: rates.Rates
    num_gpus: int
    workload: Workload
    exposed_s: float
    hidden_s: float
    parts: Mapping[str, float]      # seconds of kernels
    kernels: tuple[Kernel, ...]     # costliest first
    traffic: tuple[Traffic, ...]    # longest first
    unknown_loops: tuple[str, ...]  # counted once
    uncounted: tuple[str, ...]      # matmul kernels of unknown size: counted by their bytes

    @property
    def compute_s(self) -> float:
        return sum(self.parts.values())

    @property
    def contention_s(self) -> float:
        return self.prices.assumed["link.contend"] * self.hidden_s

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.exposed_s + self.contention_s

    @property
    def host_s(self) -> float:
        return self.prices.assumed["step.overhead"] * self.busy_s

    @property
    def step_s(self) -> float:
        return self.busy_s + self.host_s

    @property
    def tokens_per_s(self) -> float:
        return self.workload.tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.workload.model_flops / (self.step_s * self.num_gpus * self.prices.peak(self.workload.mfu_dtype))

    @property
    def shares(self) -> dict[str, float]:
        """Return the fractions of the step, by part; their sum is 1. Recurrences are listed only if the program has
        some."""
        seconds = {part: self.parts.get(part, 0.0) for part in PARTS if part != RECURRENCE or self.parts.get(part)}
        seconds |= {COMMUNICATION: self.exposed_s, CONTENTION: self.contention_s, HOST: self.host_s}
        return {name: value / self.step_s for name, value in seconds.items()}

    @property
    def free_matmul_s(self) -> float:
        """Return the seconds of matmuls that overlap no collective. These could hide exposed collectives."""
        return self.parts.get(MATMUL, 0.0) - sum(row.hidden_under.get(MATMUL, 0.0) for row in self.traffic)

    def as_json(self) -> dict:
        """Return the roofline in the form of `inspect --json`, in seconds of one GPU and step. The key "other" lists
        the shares whose sum is `share["other"]`."""
        other = {name: share for name, share in self.shares.items() if name not in PARTS}
        share = {part: self.shares[part] for part in PARTS if part in self.shares} | {"other": sum(other.values())}
        return {"gpu": self.prices.gpu.name, "num_gpus": self.num_gpus, "step_time_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu, "mfu_dtype": self.workload.mfu_dtype, "compute_s": self.compute_s,
            "communication_s": self.exposed_s + self.hidden_s,
            "exposed_s": self.exposed_s, "exposed_s_by_axes": self.exposed_by_axes, "hidden_s": self.hidden_s,
            "free_matmul_s": self.free_matmul_s, "share": share, "other": other,
            "traffic": [dataclasses.asdict(row) for row in self.traffic],
            "kernels": [row.as_json() for row in self.kernels], "unknown_loops": self.unknown_loops,
            "uncounted": self.uncounted, "assumed": self.prices.assumed.as_dict(),
            "reasons": self.prices.assumed.reasons()}

    @property
    def exposed_by_axes(self) -> dict[str, float]:
        """Return exposed seconds by mesh axes, for example 'fsdp' or 'data+fsdp'."""
        exposed_s: dict[str, float] = defaultdict(float)
        for row in self.traffic:
            exposed_s["+".join(row.axes)] += row.exposed_s
        return dict(exposed_s)


def gpu_of(mesh: Mesh) -> hardware.Gpu | None:
    """Return the GPU of a mesh. Return None if the hardware table lacks its memory bandwidth."""
    gpu = hardware.from_device_kind(mesh.devices.flat[0].device_kind)
    return gpu if gpu and gpu.hbm_bytes_per_s else None


def instruction_seconds(text: str, mesh: AnyMesh, prices: rates.Rates, workload: Workload) -> dict[str, float]:
    """Return the seconds of one execution of each kernel and collective in a compiled program. The keys are the names
    that XLA's scheduler uses."""
    program, played = _play(text, mesh, prices, workload)
    transfers = {key: transfer.seconds / transfer.runs for key, transfer in played.transfers.items()}
    seconds_by_name = {}
    for computation, name in (*played.kernels, *transfers):
        ins = program.module.computations[computation][name]
        scheduled = re.search(r'scheduling_name="([^"]+)"', ins.attrs)
        seconds_by_name[scheduled.group(1) if scheduled else name] = float(
            transfers.get((computation, name)) or program.kernel(computation, ins)[0])
    return seconds_by_name


def read(text: str, mesh: AnyMesh, prices: rates.Rates, workload: Workload) -> Roofline:
    """Return the roofline of a compiled program. text: `executable.as_text()`."""
    program, played = _play(text, mesh, prices, workload)
    hidden_s = sum(transfer.hidden_s for transfer in played.transfers.values())
    return Roofline(
        prices, program.device_ids.size, workload, played.exposed_s, hidden_s, dict(played.parts),
        program.kernels(played), program.traffic(played), tuple(program.unknown), tuple(sorted(program.uncounted)))


def _play(text: str, mesh: AnyMesh, prices: rates.Rates, workload: Workload):
    program = _Program(text, mesh, prices, workload)
    return program, timeline.play(program.module, program.trips, timeline.Prices(program.kernel, program.collective))


class _Program:
    """A parsed program and the costs of its instructions."""

    def __init__(self, text: str, mesh: AnyMesh, prices: rates.Rates, workload: Workload):
        self.module, self.sources, self.prices, self.workload = hlo.parse(text), Sources.of(text), prices, workload
        self.trips, self.unknown = timeline.loop_trips(self.module, prices.assumed["experts.rounds"])
        self.mesh_shape, self.device_ids = dict(mesh.shape), device_ids(mesh)
        self.uncounted: set[str] = set()
        self._work: dict = {}
        self.callers = {called: ins for body in self.module.computations.values() for ins in body.values()
                        if ins.op in ("while", "call", "conditional", "async-start") for called in ins.callees}

    # ---- kernels

    def kernel(self, computation: str, ins: hlo.Instruction) -> tuple[float, str]:
        cost = work.of(self.module, computation, ins, self._count_pairs)
        self._work[computation, ins.name] = cost
        if not cost.known:
            self.uncounted.add(f"{ins.name} ({ins.target or ins.op}) {audit.short_source(ins.op_name)}".strip())
        seconds = max(self._math_s(cost), self.prices.stream_s(cost.hbm_bytes)) + self.prices.launch_s
        seconds += self._host_copy_s(ins, cost)
        part = ATTENTION if cost.attention else self.sources.part(self._origin(computation, ins))
        return seconds, part or (MATMUL if cost.matmuls or cost.grouped else ELEMENTWISE)

    def _host_copy_s(self, ins: hlo.Instruction, cost: work.Work) -> float:
        """Return the seconds of a copy of moments from or to the host's memory, S(5) in HLO; 0 for other kernels."""
        if HOST_MOMENTS.form not in ins.op_name or "S(5)" not in ins.type_text:
            return 0.0
        return self.prices.host_copy_s(cost.hbm_bytes / 2)      # bytes are counted as read and as written

    def _math_s(self, cost: work.Work) -> float:
        seconds = sum(map(self.prices.matmul_s, cost.matmuls))
        seconds += self.prices.matmul_groups_s(cost.grouped) if cost.grouped else 0.0
        return seconds + (self.prices.attention_s(cost.attention) if cost.attention else 0.0)

    def _count_pairs(self, queries: int, keys: int, causal: bool, window: int, ahead: int) -> float:
        """Return the number of pairs of a row that a block-skipping kernel visits. If not causal, the keys are an
        earlier chunk or the chunk at the edge of a window."""
        a = self.prices.assumed
        documents, packed = (a["documents.mean"], a["documents.sigma"]), self.workload.packed
        if window and (not packed or not causal):
            return attention_pairs.band_pairs(queries, keys, ahead, window, *documents if packed else ())
        if not packed:
            return queries * keys / (2 if causal else 1)
        if causal:
            return attention_pairs.row_share(queries, *documents, window=window) * queries * queries / 2
        chunks = self.mesh_shape.get("context", 1)
        return attention_pairs.whole_pairs(queries, chunks, self.workload.context_method, *documents)

    def _origin(self, computation: str, ins: hlo.Instruction) -> hlo.Instruction:
        """Return the instruction whose metadata names a kernel's source: the first with metadata among the matmuls
        inside a fusion, the kernel itself, other fused instructions, operands and the enclosing loop."""
        scope = self.module.computations[computation]
        fused = [i for name in ins.callees for i in reversed(self.module.computations[name].values())]
        around = *(scope[name] for name in ins.operands), self.callers.get(computation, ins)
        near = *filter(work.multiplies, fused), ins, *fused, *around
        return next((i for i in near if i.op not in ("parameter", "constant")
                     and self.sources.part(i) is not None), ins)

    def kernels(self, played: timeline.Played) -> tuple[Kernel, ...]:
        """Return the simulated kernels, merged by part and source line, costliest first."""
        merged = defaultdict(list)
        for (computation, name), runs in played.kernels.items():
            ins, cost = self.module.computations[computation][name], self._work[computation, name]
            seconds, part = self.kernel(computation, ins)
            origin = self._origin(computation, ins)
            key = part, audit.short_source(origin.op_name) or name, self.sources.line(origin)
            merged[key].append((runs * seconds, runs, cost, name, runs * self._host_copy_s(ins, cost)))
        rows = []
        for (part, source, line), same in merged.items():
            runs, seconds = sum(row[1] for row in same), sum(row[0] for row in same)
            math_s, stream_s = (sum(n * price(cost) for _, n, cost, *_ in same) for price in
                                (self._math_s, lambda cost: self.prices.stream_s(cost.hbm_bytes)))
            costs = {"FLOPs": math_s, "HBM": stream_s, "launch": runs * self.prices.launch_s,
                     "host": sum(row[4] for row in same)}
            rows.append(Kernel(
                name=max(same, key=lambda row: row[0])[3], part=part, source=source,
                line=line, runs=runs, seconds=seconds,
                flops=sum(n * cost.flops for _, n, cost, *_ in same),
                hbm_bytes=sum(n * cost.hbm_bytes for _, n, cost, *_ in same), bound=max(costs, key=costs.__getitem__),
                instructions=tuple(row[3] for row in same)))
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    # ---- collectives

    def collective(self, computation: str, ins: hlo.Instruction) -> tuple[float, bool, tuple] | None:
        """Return (seconds, whether asynchronous, the rows of `audit.collective_rows`), or None if the instruction is no
        collective."""
        started = ins.op.endswith("-start")
        inside = ins.callees[0] if ins.op == "async-start" else computation      # a wrapper around the collective
        held = [ins] if inside == computation else self.module.computations[inside].values()
        core = next((i for i in held if i.op.removesuffix("-start") in audit.KINDS), None)
        if core is None:
            return None
        rows = audit.collective_rows(self.module, hlo.Visit(inside, core, 1, False), self.mesh_shape, self.sources)
        kind, group = core.op.removesuffix("-start"), self._group(core)
        seconds = self.prices.collective_s(kind, sum(row.payload_bytes for row in rows), group)
        return seconds, started and '"is_sync":true' not in ins.attrs, tuple(rows)

    def _group(self, ins: hlo.Instruction) -> rates.DeviceGroup:
        """Return the size of the collective's group and its members per link domain. A permute counts as a pair of
        devices: in one link domain, or in two if any of its pairs crosses domains."""
        ids = self.device_ids.reshape(-1)

        def domain(partitions: np.ndarray) -> np.ndarray:
            return ids[partitions] // self.prices.gpu.domain_gpus(ids.size)
        if ins.op.startswith("collective-permute"):
            pairs = domain(audit.source_target_pairs(ins.attrs))
            return rates.DeviceGroup(2, 1 if (pairs[:, 0] != pairs[:, 1]).any() else 2)
        groups = audit.replica_groups(ins.attrs, ids.size)
        domains = max(len(np.unique(row)) for row in domain(groups))
        return rates.DeviceGroup(groups.shape[1], groups.shape[1] // domains)

    def traffic(self, played: timeline.Played) -> tuple[Traffic, ...]:
        """Return the simulated collectives, merged by kind and axes, longest first."""
        merged: dict[tuple[str, tuple[str, ...]], timeline.Transfer] = defaultdict(timeline.Transfer)
        sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for (computation, name), transfer in played.transfers.items():
            priced = self.collective(computation, self.module.computations[computation][name])
            if priced and (rows := priced[2]):
                key = rows[0].kind, rows[0].axes
                merged[key].add(transfer, 1)
                sent[key] += transfer.runs * sum(row.bytes for row in rows)
        summed = [Traffic(kind, axes, total.runs, sent[kind, axes], total.seconds, total.exposed_s, dict(total.under))
                  for (kind, axes), total in merged.items()]
        return tuple(sorted(summed, key=lambda row: -row.seconds))


def device_ids(mesh: AnyMesh) -> np.ndarray:
    """Return the numbers of a mesh's devices in its shape: 0 … n−1 in the order of the devices' ids, or of the
    partitions if the mesh has no devices."""
    sizes = tuple(mesh.shape.values())
    if not isinstance(mesh, Mesh):
        return np.arange(math.prod(sizes)).reshape(sizes)
    ids = np.array([device.id for device in mesh.devices.flat])
    return np.argsort(np.argsort(ids)).reshape(sizes)


def links(gpu: hardware.Gpu, mesh: AnyMesh) -> dict[str, tuple[int, int]]:
    """Return {mesh axis: (its size, its members in one link domain)} for axes larger than 1."""
    domains = device_ids(mesh) // gpu.domain_gpus(math.prod(mesh.shape.values()))
    members = {}
    for k, (axis, size) in enumerate(mesh.shape.items()):
        most = max(len(set(group)) for group in np.moveaxis(domains, k, -1).reshape(-1, size).tolist())
        if size > 1:
            members[axis] = size, max(1, size // most)
    return members
