"""Lists the collectives of a compiled program by mesh axis, its matmul FLOPs and its faults.

`read(compiled.as_text(), mesh)` parses optimized HLO of the CPU and the GPU. All numbers are per device and step.
Counts are multiplied by loop trips, and the operands of combined collectives are counted separately. Loops of unknown
length, permutes that reach only some devices and matmuls of unknown size are listed by name.

The mesh has any axes (`sharding.mesh.AnyMesh`).
"""
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshtrain.cost.program import hlo, work
from meshtrain.cost.program.sources import Sources
from meshtrain.scopes import is_scope
from meshtrain.sharding.mesh import AnyMesh
from meshtrain.units import amount

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip


SUMS = ("all-reduce", "reduce-scatter")
NARROW = ("bf16", "f16")    # dtypes whose sums over devices lose digits of a gradient


@dataclass(frozen=True)
class Collective:
    """One collective instruction and one dtype. Bytes and counts are those of one GPU in one step."""

    kind: str  # as HLO spells it, without -start
    # mesh axes that the group spans, in mesh order; 'data:2~' = part of one, or no product of axes
    axes: tuple[str, ...]
    bytes: int  # what the GPU sends in a ring: see ring_bytes
    payload_bytes: int  # the logical arrays: the full one for all-gather, reduce-scatter and all-reduce
    dtype: str
    source: str  # shortened JAX path
    trips: int  # executions of the instruction
    group_size: int
    in_branch: bool  # inside a conditional: see `hlo.Visit`
    arrays: tuple[tuple[int, ...], ...]  # dims of each operand's full array over the group
    line: str = ""  # of Python, see `sources.line_of`

    @property
    def count(self) -> int:
        """Return the executions in a step, each operand of a combined instruction counted apart."""
        return self.trips * len(self.arrays)


@dataclass(frozen=True)
class Dot:
    """One matmul instruction."""

    dtype: str  # of its operands: what the tensor cores run in
    flops: int  # per step: 2 × output elements × contracted size × trips
    trips: int
    source: str
    in_branch: bool  # inside a conditional: see `hlo.Visit`
    line: str = ""  # of Python, see `sources.line_of`


@dataclass(frozen=True)
class ProgramAudit:
    collectives: tuple[Collective, ...]
    dots: tuple[Dot, ...]
    unknown_loops: tuple[str, ...]  # loops of unknown length around a collective or a dot: counted ONCE above
    broken_permutes: tuple[str, ...]  # permutes that leave devices with zeros for no known reason
    uncounted: tuple[str, ...]  # kernels that do matmuls of unknown size: not in dots
    further_rounds: int = 0  # number of loops that run only if experts are unbalanced; their contents are not counted

    @property
    def flops(self) -> dict[str, int]:
        """Return the matmul FLOPs per device and step, by operand dtype."""
        total: dict[str, int] = defaultdict(int)
        for dot in self.dots:
            total[dot.dtype] += dot.flops
        return dict(total)

    @property
    def narrow_sums(self) -> tuple[Collective, ...]:
        """The collectives that sum over devices in a narrower dtype than float32."""
        return tuple(row for row in self.collectives
                     if row.kind in SUMS and row.dtype in NARROW)

    def require_known(self) -> "ProgramAudit":
        """Return self if every count is exact. Raises: ValueError naming the loops of unknown length."""
        if self.unknown_loops:
            raise ValueError(
                f"{amount(len(self.unknown_loops), 'loop')} with collectives or matmuls without a "
                f"known trip count, so totals would be wrong: {'; '.join(self.unknown_loops)}. Use lax.scan or a "
                "fori_loop with constant bounds, or drop the compiler option that unrolled it."
            )
        return self


def read(text: str, mesh: AnyMesh) -> ProgramAudit:
    """Audit a compiled program. text: `compiled.as_text()`; mesh: the mesh that it was compiled for."""
    module, mesh_shape, sources = hlo.parse(text), dict(mesh.shape), Sources.of(text)
    visits, unknown = hlo.walk(module, lambda i: bool(_kind(i)) or work.multiplies(i) or i.further_rounds)
    collectives: list[Collective] = []
    dots: list[Dot] = []
    uncounted: list[str] = []
    broken: list[str] = []
    for visit in visits:
        ins = visit.instruction
        if ins.further_rounds or not (_kind(ins) or visit.trips):
            continue
        if not _kind(ins):
            if dot := _dot(module, visit, sources):
                dots.append(dot)
            else:
                uncounted.append(f"{ins.name} ({ins.target or ins.op}) {short_source(ins.op_name)}".strip())
            continue
        if visit.trips or visit.in_branch:      # of further rounds, none
            collectives += collective_rows(module, visit, mesh_shape, sources)
        if _kind(ins) == "collective-permute":
            if fault := _find_fault(ins.attrs, ins.op_name, mesh_shape):
                broken.append(f"{ins.name}: {fault} {short_source(ins.op_name)}".strip())
    return ProgramAudit(tuple(collectives), tuple(dots), tuple(unknown), tuple(broken), tuple(uncounted),
                        sum(visit.instruction.further_rounds for visit in visits))


def broken_permutes(text: str, mesh: AnyMesh) -> list[str]:
    """Return `read(text, mesh).broken_permutes`, but parse only the lines of permutes. This takes a quarter of the time
    (0.04 s for 2.4 MB)."""
    broken, mesh_shape = [], dict(mesh.shape)
    for line in _PERMUTE.finditer(text):
        op_name = re.search(r'op_name="([^"]*)"', line.group(0))
        source = op_name.group(1) if op_name else ""
        if fault := _find_fault(line.group(0), source, mesh_shape):
            broken.append(f"{line.group(1)}: {fault} {short_source(source)}".strip())
    return broken


def count_recomputed(text: str) -> int:
    """Return the number of values that XLA recomputes to stay below its memory limit."""
    return len(re.findall(r"^ *(?:ROOT )?%?\S+\.remat\d*(?:\.\d+)? = ", text, re.MULTILINE))


_PERMUTE = re.compile(r"^ *(?:ROOT )?%?(\S+) = .* collective-permute(?:-start)?\(.*$", re.MULTILINE)


def summarize(rows: Iterable[Collective]) -> list[dict]:
    """Merge rows by (kind, axes, dtype), largest first, in the form that `inspect --json` prints. source, line: those
    of the largest row."""
    merged = defaultdict(list)
    for row in rows:
        merged[row.kind, row.axes, row.dtype].append(row)
    out = []
    for (kind, axes, dtype), same in merged.items():
        same.sort(key=lambda r: -r.bytes)
        sources = list(dict.fromkeys(r.source for r in same))
        more = f" (+{len(sources) - 1} more)" if len(sources) > 1 else ""
        out.append({
            "kind": kind, "axes": list(axes), "count": sum(r.count for r in same), "bytes": sum(r.bytes for r in same),
            "dtype": dtype, "source": sources[0] + more, "line": same[0].line,
        })  # fmt: skip
    return sorted(out, key=lambda r: (-r["bytes"], r["kind"], r["axes"], r["dtype"]))


def by_kind(rows: Iterable[Mapping]) -> dict[tuple[str, ...], Mapping]:
    """Return rows of `summarize` by (kind, *axes, dtype)."""
    return {(row["kind"], *row["axes"], row["dtype"]): row for row in rows}


def short_source(op_name: str) -> str:
    """Shorten a JAX path: 'jit(step)/while/body/closed_call/transpose(jvp())/mlp/dot_general' →
    'transpose(jvp())/mlp/dot_general'."""
    noise = {"while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "jvp()", "shard_map", "pjit"}
    parts = [p for p in op_name.split("/") if p not in noise and not _JIT.fullmatch(p) and not is_scope(p)]
    return "/".join("remat" if p == "rematted_computation" else p for p in parts)


_JIT = re.compile(r"jit\([^)]*\)")       # a part of a JAX path


def _named(module: hlo.HloModule, visit: hlo.Visit) -> hlo.Instruction:
    """Return the instruction whose metadata names the source of a visited instruction: the visited instruction itself,
    or an operand if XLA dropped its metadata (reduce-scatters on GPUs)."""
    scope, near = module.computations[visit.computation], [visit.instruction]
    for _ in range(4):  # a few hops: bitcasts and fusions stand between a matmul and its reduce-scatter
        for ins in near:
            if ins.op_name:
                return ins
        near = [scope[o] for ins in near for o in ins.operands if o in scope]
    return visit.instruction


# ---- collectives -----------------------------------------------------------------------------------------------------


def _kind(ins: hlo.Instruction) -> str | None:
    kind = ins.op.removesuffix("-start")
    return kind if kind in KINDS else None


def ring_bytes(kind: str, payload_bytes: int, n: int) -> int:
    """Return the bytes that one of n GPUs sends in a ring. An all-reduce sends twice (n-1)/n, as a reduce-scatter and
    an all-gather."""
    if kind == "all-reduce":
        return payload_bytes * 2 * (n - 1) // n
    if kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return payload_bytes * (n - 1) // n
    return payload_bytes


def collective_rows(module: hlo.HloModule, visit: hlo.Visit, mesh_shape: dict[str, int],
                    sources: Sources) -> list[Collective]:
    """Return one row per operand dtype. Return [] if the group has one device, since XLA leaves such no-ops in the
    program."""
    ins, kind = visit.instruction, _kind(visit.instruction)
    assert kind is not None
    if kind == "collective-permute":
        pairs = np.stack(np.unravel_index(source_target_pairs(ins.attrs), tuple(mesh_shape.values())), -1)
        axes = tuple(a for i, a in enumerate(mesh_shape) if (pairs[:, 0, i] != pairs[:, 1, i]).any())
        n = math.prod(mesh_shape[a] for a in axes)
    else:
        groups = replica_groups(ins.attrs, math.prod(mesh_shape.values()))
        n, axes = groups.shape[1], group_axes(groups, mesh_shape)
    if n == 1:
        return []
    operands = module.operand_shapes(visit.computation, ins)
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # then: output, offsets, sizes. Assumption: the input is full
    by_dtype, arrays = defaultdict(list), defaultdict(list)
    joined = ins.ints("dimensions") if kind == "all-gather" else ()
    for shape in operands:
        by_dtype[shape[0]].append(hlo.shape_bytes(shape))
        arrays[shape[0]].append(tuple(size * n if k in joined else size for k, size in enumerate(shape[1])))
    # The tuple form of all-to-all passes one operand per peer: together they are one logical array.
    one_array = kind == "all-to-all" and not re.search(r"\bdimensions=\{\d", ins.attrs)
    rows, named = [], _named(module, visit)
    for dtype, sizes in by_dtype.items():
        payload = sum(sizes) * visit.trips * (n if kind == "all-gather" else 1)
        rows.append(Collective(
            kind=kind, axes=axes, bytes=ring_bytes(kind, payload, n),
            payload_bytes=payload, dtype=dtype, source=short_source(named.op_name), trips=visit.trips, group_size=n,
            in_branch=visit.in_branch, arrays=tuple(arrays[dtype][:1] if one_array else arrays[dtype]),
            line=sources.line(named),
        ))  # fmt: skip
    return rows


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]


def _iota(reshape: list[int], transpose: list[int]) -> np.ndarray:
    """Evaluate HLO's '<=[2,4]T(1,0)': the flat list of 0…N-1 after it is reshaped and transposed."""
    ids = np.arange(math.prod(reshape)).reshape(reshape)
    return (ids.transpose(transpose) if transpose else ids).reshape(-1)


def replica_groups(attrs: str, num_devices: int) -> np.ndarray:
    """Parse the partition ids [groups, members] from any of HLO's three spellings.

    {{0,1},{2,3}}                                       listed ({} = everyone)
    [4,2]<=[2,4]T(1,0)                                  an iota, reshaped and transposed
    mesh['a'=2,'b'=4], device_ids=([8]T(0)) {'b'}        axes of a mesh that XLA names itself; 'b':(2)2 is a part of b:
                                                        b split as (2 before, 2 inside, the rest behind)
    """
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\)(?= \{))? \{([^}]*)\}", attrs):
        return _mesh_groups(*match.groups())
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attrs):
        return _iota(_ints(match.group(2)), _ints(match.group(3))).reshape(_ints(match.group(1)))
    match = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attrs)
    if not match:
        raise ValueError(f"audit cannot parse this spelling of replica_groups: {attrs[:200]}")
    listed = [_ints(g) for g in re.findall(r"\{([\d,]*)\}", match.group(1))]
    if len({len(g) for g in listed}) > 1:
        raise ValueError(f"replica groups of unequal size: {match.group(0)[:200]}")
    return np.array(listed) if listed else np.arange(num_devices)[None]


def _mesh_groups(mesh_text: str, ids_text: str | None, picked_text: str) -> np.ndarray:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh_text)}
    ids = np.arange(math.prod(sizes.values()))
    if ids_text:
        iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids_text)
        ids = _iota(_ints(iota.group(1)), _ints(iota.group(2))) if iota else np.array(_ints(ids_text))
    parts = defaultdict(list)  # axis → [(size before, size inside)], one for each sub-axis picked
    whole = set()
    for name, before, inside in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", picked_text):
        if inside:
            parts[name].append((int(before), int(inside)))
        else:
            whole.add(name)
    dims, picked = [], []
    for name, size in sizes.items():
        done = 1
        for before, inside in sorted(parts[name]):
            dims += [before // done, inside]
            picked += [False, True]
            done = before * inside
        dims.append(size // done)
        picked.append(name in whole)
    order = sorted(range(len(dims)), key=lambda d: picked[d])  # stable: the group's dimensions go last
    members = math.prod(d for d, p in zip(dims, picked) if p)
    return ids.reshape(dims).transpose(order).reshape(-1, members)


def group_axes(groups: np.ndarray, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Return the mesh axes that the groups [groups, members] span. 'data:2~' means that they span 2 positions of data,
    or that the group is no product of axes."""
    coordinates = np.stack(np.unravel_index(groups, tuple(mesh_shape.values())), -1)  # [groups, members, axes]
    spread = np.array([[len(np.unique(c)) for c in group.T] for group in coordinates]).max(0)
    varying = {a: int(v) for a, v in zip(mesh_shape, spread) if v > 1}
    members = groups.shape[1]
    if math.prod(mesh_shape[a] for a in varying) == members:
        return tuple(varying)
    product = math.prod(varying.values()) == members
    return tuple(a if product and v == mesh_shape[a] else f"{a}:{v}~" for a, v in varying.items())


def source_target_pairs(attrs: str) -> np.ndarray:
    """Return the (source, target) pairs of a collective-permute as an array [pairs, 2]."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}", attrs)
    if not match:
        raise ValueError(f"a collective-permute without source_target_pairs: {attrs[:200]}")
    return np.array(_ints(match.group(1)), dtype=int).reshape(-1, 2)


# Operations for which XLA's partitioner makes permutes, where an array's pieces differ in size or place.
_UNEVEN = re.compile(r"(?:^|/)(?:slice|dynamic_slice|pad|concatenate|rev)$")


def _find_fault(attrs: str, op_name: str, mesh_shape: dict[str, int]) -> str:
    """Return the fault of a permute that is broken, as text; "" for others. Devices that receive nothing hold zeros,
    and XLA reports no error.

    XLA's all-gather-to-collective-permute-simplifier makes permutes without pairs on GPUs (openxla/xla #45218); these
    are broken. A shift without wrap-around is not broken. Nor is the permute of a slice of a sharded array, which sends
    parts only to the devices that hold the result.
    """
    pairs, num_devices = source_target_pairs(attrs), math.prod(mesh_shape.values())
    targets = set(pairs[:, 1].tolist())
    if not len(pairs):
        return "EMPTY source_target_pairs: its output is zeros on every device"
    if len(targets) == num_devices or _UNEVEN.search(op_name):
        return ""
    sizes = tuple(mesh_shape.values())
    source, target = (np.stack(np.unravel_index(p, sizes), -1) for p in pairs.T)
    step = (target - source)[0]
    if (target - source == step).all() and np.count_nonzero(step) == 1:
        axis = int(np.flatnonzero(step)[0])
        length = sizes[axis] - abs(int(step[axis]))
        if len(pairs) == num_devices // sizes[axis] * length:
            return ""
    return f"covers {len(targets)} of {num_devices} devices; the others receive zeros"


# ---- matmuls ---------------------------------------------------------------------------------------------------------


def _dot(module: hlo.HloModule, visit: hlo.Visit, sources: Sources) -> Dot | None:
    """Return the FLOPs of an HLO dot, a cuBLAS call or a grouped matmul. Return None if they are unknown."""
    at = module, visit.computation, visit.instruction
    product = work.matmul(*at) or work.read_grouped(*at)
    if product is None:
        return None
    named = _named(module, visit)
    return Dot(product.dtype, round(product.flops) * visit.trips, visit.trips, short_source(named.op_name),
               visit.in_branch, sources.line(named))
