"""The expected collectives and memory of a compiled step: a file beside a run, and the differences from it.

The file is TOML with one line per array that a collective moves, in a stable order, so that version control shows what
a change of the program cost. It records its run and its compiler, because another version of XLA may compile another
program. Knows no command and compiles nothing.
"""
from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from meshtrain.assembly import Assembly
from meshtrain.cost.program import audit
from meshtrain.names import LAYERS, LEADING
from meshtrain.sharding.rules import GATHERED

COMPILER = ("jax", "jaxlib")
KEYS = {"model": (), "pipeline": (), "context": (), "data": ("seq_len", "global_batch", "document_mask"),
        "training": ("microbatches", "remat", "loss_chunk", "deterministic"),
        "optimizer": ("name",)}     # (): all of the section
NAMED = 4                   # names of tensors of one shape, at most


@dataclasses.dataclass(frozen=True)
class ExpectedRow:
    """Collectives of one array; count and bytes are one device's, per step. of: parameters of that shape, or the
    source."""
    count: int
    bytes: int
    of: str


@dataclasses.dataclass(frozen=True)
class Expected:
    """run: key → value of what determines the program. collectives: (kind, axes, array) → row; array: whole,
    'bf16[4096,14336]'."""
    run: Mapping[str, object]
    compiler: Mapping[str, str]
    memory_bytes: Mapping[str, int]
    collectives: Mapping[tuple[str, tuple[str, ...], str], ExpectedRow]


def of(made: Assembly, program: audit.ProgramAudit, held: Mapping[str, int | None]) -> Expected:
    """program: the compiled step, audited; held: its bytes by kind (`memory.held_by_program`)."""
    run = {"devices": f"{made.mesh_spec.num_devices} × {made.mesh.devices.flat[0].device_kind}",
           "mesh": {axis: n for axis, n in made.mesh_spec.sizes.items() if n > 1},
           "placement": list(made.mesh_spec.placement),
           "rules": Path(made.layout.rules.path).name}
    for section, keys in KEYS.items():
        values = getattr(made.run, section).model_dump(exclude_defaults=True)
        run |= {f"{section}.{key}": value for key, value in values.items() if not keys or key in keys}
    named = tensors(made)
    counts, sent, sources = defaultdict(int), defaultdict(int), defaultdict(dict)
    for row in program.collectives:
        for dims, payload in zip(row.arrays, _payloads(row)):
            key = row.kind, row.axes, f"{row.dtype}[{','.join(map(str, dims))}]"
            counts[key] += row.trips
            sent[key] += audit.ring_bytes(row.kind, payload * row.trips, row.group_size)
            sources[key] |= dict.fromkeys(named(dims) or [row.source])
    rows = {key: ExpectedRow(counts[key], sent[key], _listed(list(sources[key]))) for key in sorted(counts)}
    return Expected(run, {name: version(name) for name in COMPILER},
                    {k: v for k, v in held.items() if v is not None}, rows)


def _payloads(row: audit.Collective) -> list[int]:
    """Bytes of each of its arrays, once."""
    sizes = [math.prod(dims) for dims in row.arrays]
    return [row.payload_bytes // max(1, row.trips) * size // max(1, sum(sizes)) for size in sizes]


def tensors(made: Assembly) -> Callable[[tuple[int, ...]], list[str]]:
    """dims → the parameters that matmuls read in these dims on one device, one layer or the stack; if none, those that
    have them in another order, because XLA transposes."""
    exact, sorted_too = defaultdict(list), defaultdict(list)
    for info in made.model.parameters():
        dims = [n // made.layout.num_shards(made.layout.mesh_axes(GATHERED, axis))
                for n, axis in zip(info.shape, info.axes)]
        for shape in {_bare(dims), _bare(dims[info.axes[0] in (LAYERS, LEADING):])}:
            exact[shape].append(info.name)
            sorted_too[tuple(sorted(shape))].append(info.name)
    return lambda dims: exact.get(_bare(dims)) or sorted_too.get(tuple(sorted(_bare(dims))), [])


def _bare(dims) -> tuple[int, ...]:
    """Without dims of 1, which XLA drops and adds."""
    return tuple(n for n in dims if n > 1)


def _listed(names: list[str]) -> str:
    more = f" (+{len(names) - NAMED} more)" if len(names) > NAMED else ""
    return ", ".join(name for name in names[:NAMED] if name) + more


# ---- the file --------------------------------------------------------------------------------------------------------


def dumps(expected: Expected, command: str) -> str:
    """Write the text of the file; command: the one that checks and renews it."""
    lines = [f"# What one device sends and holds in a step. Checked by: {command}",
             "# Written by the same with --update.", "",
             "[run]", *(f"{_word(key)} = {_toml(value)}" for key, value in expected.run.items()), "", "[compiler]",
             *(f"{key} = {_toml(value)}" for key, value in expected.compiler.items()), "", "[memory_bytes]",
             *(f"{key} = {value}" for key, value in expected.memory_bytes.items()), "", "[step]", "collectives = ["]
    for (kind, axes, array), row in sorted(expected.collectives.items()):
        lines.append("  " + _toml({"kind": kind, "axes": list(axes), "array": array,
                                   "count": row.count, "bytes": row.bytes, "of": row.of}) + ",")
    return "\n".join([*lines, "]"]) + "\n"


def loads(text: str) -> Expected:
    """Raises: ValueError where it is no such file."""
    try:
        tables = tomllib.loads(text)
        rows = {(row["kind"], tuple(row["axes"]), row["array"]): ExpectedRow(row["count"], row["bytes"], row["of"])
                for row in tables["step"]["collectives"]}
        return Expected(tables["run"], tables["compiler"], tables["memory_bytes"], rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{error} is missing or of another kind") from None


def _word(key: str) -> str:
    return key if key.isidentifier() else json.dumps(key)


def _toml(value) -> str:
    """JSON's strings, numbers and lists are TOML's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_word(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- what differs ----------------------------------------------------------------------------------------------------


def differences(expected: Expected, found: Expected) -> list[str]:
    """One line per collective and kind of memory that changed, with the expected value before the arrow."""
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
        before, after = (side.memory_bytes.get(kind) for side in (expected, found))
        if before != after:
            said = ["none" if held is None else f"{held:,}" for held in (before, after)]
            lines.append(f"memory, {kind}: bytes {' → '.join(said)}")
    return lines


def causes(expected: Expected, found: Expected) -> list[str]:
    """Reasons outside the code: another run, another compiler."""
    lines = []
    for key in sorted({*expected.run, *found.run}):
        before, after = (side.run.get(key, "default") for side in (expected, found))
        if _toml(before) != _toml(after):
            lines.append(f"the run differs: {key} {_toml(before)} → {_toml(after)}")
    versions = [" and ".join(f"{name} {value}" for name, value in side.compiler.items()) for side in (expected, found)]
    if versions[0] != versions[1]:
        lines.append(f"the compiler differs: written with {versions[0]}, compiled here with {versions[1]}")
    return lines
