"""Expected collectives and memory of a compiled step: the file that records them, and the differences from it.

The file is TOML with one line per array that a collective moves, in a stable order, so that a diff in version control
shows how a change of the code changes the program. It also records the run's settings and the versions of jax and
jaxlib, because another version of XLA may compile another program. Knows no command and compiles nothing.
"""
from __future__ import annotations

import dataclasses
import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from meshtrain.assembly import Assembly
from meshtrain.config.messages import toml
from meshtrain.cost.program import audit, carried
from meshtrain.names import LAYERS, LEADING
from meshtrain.sharding.rules import GATHERED

COMPILER = ("jax", "jaxlib")
KEYS = {"model": (), "pipeline": (), "context": (), "data": ("seq_len", "global_batch", "document_mask"),
        "training": ("microbatches", "remat", "loss_chunk", "deterministic"),
        "optimizer": ("name", "moments_dtype")}     # (): all keys of the section
NAMED = 4                   # most parameter names listed for one shape


@dataclasses.dataclass(frozen=True)
class ExpectedRow:
    """The collectives of one kind over the same axes that move arrays of one shape and dtype.

    count: their number per device and step. bytes: what a device sends in them per step. of: the parameters that have
    this shape; if none has it, the source line of the operation.
    """
    count: int
    bytes: int
    of: str


@dataclasses.dataclass(frozen=True)
class Expected:
    """The content of the file. run: settings that determine the program. compiler: package → version. memory_bytes:
    bytes per device by kind. collectives: (kind, axes, array) → row; an array is 'bf16[4096,14336]', its shape in the
    program of one device."""
    run: Mapping[str, object]
    compiler: Mapping[str, str]
    memory_bytes: Mapping[str, int]
    collectives: Mapping[tuple[str, tuple[str, ...], str], ExpectedRow]


def of(made: Assembly, program: audit.ProgramAudit, held: Mapping[str, int | None]) -> Expected:
    """Return the expectation that a compiled step fulfils. program: the audit of the step. held: its bytes per device
    by kind (`memory.measure`)."""
    run = {"devices": f"{made.mesh_spec.num_devices} × {made.mesh.devices.flat[0].device_kind}",
           "mesh": {axis: n for axis, n in made.mesh_spec.sizes.items() if n > 1},
           "placement": list(made.mesh_spec.placement),
           "rules": Path(made.layout.rules.path).name}
    for section, keys in KEYS.items():
        values = getattr(made.run, section).model_dump(exclude_defaults=True)
        run |= {f"{section}.{key}": value for key, value in values.items() if not keys or key in keys}
    named = tensors(made)
    counts: dict[tuple[str, tuple[str, ...], str], int] = defaultdict(int)
    sent: dict[tuple[str, tuple[str, ...], str], int] = defaultdict(int)
    sources: dict[tuple[str, tuple[str, ...], str], dict[str, None]] = defaultdict(dict)
    for row in program.collectives:
        for dims, payload in zip(row.arrays, _payloads(row)):
            key = row.kind, row.axes, f"{row.dtype}[{','.join(map(str, dims))}]"
            counts[key] += row.trips
            sent[key] += audit.ring_bytes(row.kind, payload * row.trips, row.group_size)
            sources[key] |= dict.fromkeys(named(dims) or [row.source])
    rows = {key: ExpectedRow(counts[key], sent[key], _list_names(list(sources[key]))) for key in sorted(counts)}
    return Expected(run, {name: version(name) for name in COMPILER},
                    {k: v for k, v in held.items() if v is not None}, rows)


def _payloads(row: audit.Collective) -> list[int]:
    """Return the bytes of each array of a collective, in one execution."""
    sizes = [math.prod(dims) for dims in row.arrays]
    return [row.payload_bytes // max(1, row.trips) * size // max(1, sum(sizes)) for size in sizes]


def tensors(made: Assembly) -> Callable[[tuple[int, ...]], list[str]]:
    """Return a function that maps dims to names of parameters. A parameter matches if its shard on one device has these
    dims when a matmul reads it, in one layer or in the stack of layers. If none matches, the order of dims is ignored,
    because XLA transposes."""
    exact, sorted_too = defaultdict(list), defaultdict(list)
    for info in made.model.parameters():
        dims = [n // made.layout.num_shards(made.layout.mesh_axes(GATHERED, axis))
                for n, axis in zip(info.shape, info.axes)]
        for shape in {_bare(dims), _bare(dims[info.axes[0] in (LAYERS, LEADING):])}:
            exact[shape].append(info.name)
            sorted_too[carried.bare(shape)].append(info.name)
    return lambda dims: exact.get(_bare(dims)) or sorted_too.get(carried.bare(dims), [])


def _bare(dims) -> tuple[int, ...]:
    """Return the dims without those of size 1, which XLA drops and adds."""
    return tuple(n for n in dims if n > 1)


def _list_names(names: list[str]) -> str:
    more = f" (+{len(names) - NAMED} more)" if len(names) > NAMED else ""
    return ", ".join(name for name in names[:NAMED] if name) + more


# ---- the file --------------------------------------------------------------------------------------------------------


def dumps(expected: Expected, command: str) -> str:
    """Return the text of the file. command: the command that checks it, printed in its first line."""
    lines = [f"# Collectives and memory of one device in a step. Checked by: {command}",
             "# The same command with --update writes this file.", "",
             "[run]", *(f"{key if key.isidentifier() else toml(key)} = {toml(value)}"
                        for key, value in expected.run.items()),
             "", "[compiler]", *(f"{key} = {toml(value)}" for key, value in expected.compiler.items()),
             "", "[memory_bytes]",
             *(f"{key} = {value}" for key, value in expected.memory_bytes.items()), "", "[step]", "collectives = ["]
    for (kind, axes, array), row in sorted(expected.collectives.items()):
        lines.append("  " + toml({"kind": kind, "axes": list(axes), "array": array,
                                  "count": row.count, "bytes": row.bytes, "of": row.of}) + ",")
    return "\n".join([*lines, "]"]) + "\n"


def loads(text: str) -> Expected:
    """Parse the text of a file that `dumps` wrote. Raises: ValueError."""
    try:
        tables = tomllib.loads(text)
        rows = {(row["kind"], tuple(row["axes"]), row["array"]): ExpectedRow(row["count"], row["bytes"], row["of"])
                for row in tables["step"]["collectives"]}
        return Expected(tables["run"], tables["compiler"], tables["memory_bytes"], rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{error} is missing or has another type") from None


# ---- what differs ----------------------------------------------------------------------------------------------------


def differences(expected: Expected, found: Expected) -> list[str]:
    """Return one line per changed collective and kind of memory, with the expected value before the arrow."""
    lines = []
    nothing = ExpectedRow(0, 0, "")
    for key in sorted({*expected.collectives, *found.collectives}):
        before, after = (side.collectives.get(key, nothing) for side in (expected, found))
        if (before.count, before.bytes) != (after.count, after.bytes):
            kind, axes, array = key
            named = f" ({after.of or before.of})" if after.of or before.of else ""
            state = "new: " if before is nothing else "gone: " if after is nothing else ""
            lines.append(f"{state}{kind} over {' × '.join(axes)} of {array}{named}: count {before.count:,} → "
                         f"{after.count:,}, bytes {before.bytes:,} → {after.bytes:,}")
    for kind in dict.fromkeys([*expected.memory_bytes, *found.memory_bytes]):
        held = [side.memory_bytes.get(kind) for side in (expected, found)]
        if held[0] != held[1]:
            words = ["none" if count is None else f"{count:,}" for count in held]
            lines.append(f"memory, {kind}: bytes {' → '.join(words)}")
    return lines


def causes(expected: Expected, found: Expected) -> list[str]:
    """Return lines about causes of differences outside the code: changed settings of the run, another compiler."""
    lines = []
    for key in sorted({*expected.run, *found.run}):
        before, after = (side.run.get(key, "default") for side in (expected, found))
        if toml(before) != toml(after):
            lines.append(f"the run differs: {key} {toml(before)} → {toml(after)}")
    versions = [" and ".join(f"{name} {value}" for name, value in side.compiler.items()) for side in (expected, found)]
    if versions[0] != versions[1]:
        lines.append(f"the compiler differs: written with {versions[0]}, compiled here with {versions[1]}")
    return lines
