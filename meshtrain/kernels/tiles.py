"""The tiles of the Pallas kernels: how many queries and keys a program takes at once, by GPU and width of the head.

The one table of them. What it asks of a tile: no kernel spills more than 128 bytes of registers a thread, and its
shared memory fits the GPU. `python -m benchmarks.tiles --write` times candidates on the GPU at hand and puts the
fastest into TIMED.
"""
from __future__ import annotations

from typing import NamedTuple


class Blocks(NamedTuple):
    """One kernel's program: a block of `rows` (queries; dkv: keys), `columns` (keys; dkv: queries) at a step."""
    rows: int
    columns: int
    warps: int
    stages: int          # steps whose loads are under way together


class Tiles(NamedTuple):
    """One tile for each kernel; numbers are powers of two."""
    forward: Blocks
    dq: Blocks
    dkv: Blocks


# By the largest head_dim that they serve. With larger backward tiles ptxas spills kilobytes; heads of 256 need twice
# the registers and the shared memory of 128.
_AMPERE = _HOPPER = {
    64: Tiles(Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    128: Tiles(Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    256: Tiles(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
}
# dkv with two steps under way spills 292 bytes on sm_100a, and its tensor memory holds no block of 128 keys.
_BLACKWELL = _HOPPER | {256: Tiles(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 1))}
# Compiled for sm_80, sm_90a and sm_100a. assumption: b300 and gb300 (sm_103a) have the registers and the memory of
# b200.
COMPILED = {name: tiles for names, tiles in (
    (("a100-40gb", "a100-80gb"), _AMPERE), (("h100", "h100-pcie", "h100-96gb", "h200"), _HOPPER),
    (("b200", "gb200", "b300", "gb300"), _BLACKWELL)) for name in names}

# (GPU, head_dim) -> the fastest tiles measured there; a line each, written by benchmarks.tiles.
TIMED: dict[tuple[str, int], Tiles] = {
}



class GroupedTile(NamedTuple):
    """A program of the grouped matmuls (`grouped`): `rows` × `columns` of the result, `step` of what is summed at a
    time.

    rows: of a block, too, and every group fills up its last one. beside: columns where several tiles stand beside the
    product.
    """
    rows: int
    columns: int
    beside: int
    step: int
    warps: int
    stages: int


# By bytes of an element, for all GPUs: in bfloat16 two warp groups with 64 rows each, as wgmma takes them, 96 KiB of
# shared memory for three stages; in float32, which no tensor core multiplies exactly, 128 columns would spill 508 bytes
# a thread. A gated MLP's gradients beside their product spill 1.4 KB at 128 columns. So none of them spills on sm_80,
# sm_90a and sm_100a. Larger blocks would fill up more rows of small groups.
GROUPED = {2: GroupedTile(128, 128, 64, 64, 8, 3), 4: GroupedTile(128, 64, 32, 32, 8, 2)}

WIDTHS = tuple(_HOPPER)
# Programs that fill a GPU: two for each of an H100's 132 multiprocessors. With fewer, the query heads of a group are
# not summed inside the dkv kernel but outside: more programs, and float32 sums through memory.
FULL = 264


def of(head_dim: int, gpu: str, softcap: bool = False) -> Tiles | None:
    """The tiles for heads of this width on this GPU, named as the hardware table has it; None where none are known to
    fit.

    softcap: whether scores have one. Its slope stands beside the scores: dkv at 128 spills 240 bytes in four warps,
    none in eight.
    """
    width = next((width for width in WIDTHS if head_dim <= width), None)
    found = TIMED.get((gpu, width)) or COMPILED.get(gpu, {}).get(width)
    return found._replace(dkv=found.dkv._replace(warps=8)) if found and softcap and width == 128 else found
