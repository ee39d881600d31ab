"""Tile sizes of the Pallas kernels, by GPU or its chip, and by the widths of keys and values.

No tile spills more than 128 bytes of registers per thread, except for one that was timed and is still the fastest. All
tiles fit the GPU's shared memory. `python -m benchmarks.tiles --write` times candidates on this machine's GPU and
writes the fastest into TIMED.
"""
from __future__ import annotations

from typing import NamedTuple

from meshtrain import hardware


class Blocks(NamedTuple):
    """The block of one program: `rows` (queries; in dkv: keys) and `columns` per step (keys; in dkv: queries)."""
    rows: int
    columns: int
    warps: int
    stages: int          # software pipeline depth: steps whose loads are in flight


class Tiles(NamedTuple):
    """One block for each kernel. All sizes are powers of two."""
    forward: Blocks
    dq: Blocks
    dkv: Blocks


# Keys: the largest widths of keys and values that the tiles serve. Larger backward tiles spill kilobytes (ptxas). Heads
# of 256 need twice the registers and shared memory of heads of 128.
_AMPERE = {
    (64, 64): Tiles(Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    (128, 128): Tiles(Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    # assumption, not timed: with narrow values the forward has registers for FlashAttention-2's block of 256
    (256, 128): Tiles(Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    (256, 256): Tiles(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
}
# Timed on an H200 (benchmarks/gpu.md): forward 1.18 ms, dq 1.45, dkv 3.47; Ampere's tiles take 1.45, 3.95 and 5.07. dkv
# spills 252 bytes.
_HOPPER = _AMPERE | {(256, 256): Tiles(Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(32, 64, 4, 2))}
# With two stages dkv spills 292 bytes on sm_100a, whose tensor memory holds no block of 128 keys.
_BLACKWELL = _AMPERE | {(256, 256): Tiles(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 1))}
# By the major compute capability of the GPU's chip. Compiled for sm_80, sm_90a and sm_100a. assumption: b300 and gb300
# (sm_103a) have the registers and memory of b200.
COMPILED = {8: _AMPERE, 9: _HOPPER, 10: _BLACKWELL}

# (GPU, width of keys, of values) -> the fastest tiles measured. benchmarks.tiles writes one line for each.
TIMED: dict[tuple[str, int, int], Tiles] = {
}


class GroupedBlock(NamedTuple):
    """A program of the grouped matmuls: `rows` × `columns` of the result, by steps of `step` of the contracted dim."""
    rows: int
    columns: int
    step: int
    warps: int
    stages: int


class GroupedTiles(NamedTuple):
    """The blocks of an engine's kernels.

    Matmuls of rows use `deep` if they have no epilogue and the contracted dim is at least `deep_from`. They use `small`
    if the contracted dim is smaller or the epilogue has one array, and `beside` if the epilogue has several arrays. All
    three blocks have the same `rows`, to which each group is padded. Gradients of matrices use `outer`.
    """
    deep: GroupedBlock
    small: GroupedBlock
    beside: GroupedBlock
    outer: GroupedBlock
    deep_from: int = 2048

    @property
    def rows(self) -> int:
        return self.deep.rows

    def of(self, contracted: int, num_beside: int) -> GroupedBlock:
        """Return the block for matmuls of rows.

        contracted: size of the contracted dim. num_beside: number of arrays in the epilogue.
        """
        if num_beside > 1:
            return self.beside
        return self.deep if num_beside == 0 and contracted >= self.deep_from else self.small


# By bytes per element, for all GPUs. bfloat16: two warp groups of 64 rows each (wgmma), 144 KiB of shared memory.
# Source: openxla/tokamax, autotuning of ragged_dot on H100. [8192, 4096] · [8, 4096, 14336] takes 128 × 256 × 64 with 8
# warps and reaches 0.66 of the peak. Gradients of 128 matrices of 4096 × 1536 take 128 × 256 × 32 and reach 0.60.
# [131072, 1024 and less] · [256, k, 7168] takes 128 × 128 and reaches 0.14. On an H200 (benchmarks/gpu.md) rows reach
# 0.47 to 0.59 and gradients 0.44. In its timings 128 × 128 × 64 in four warps was the fastest for gradients, both of
# Qwen3-30B-A3B and of Mixtral. With one array in the epilogue, 256 columns spill 36 bytes per thread. With two matmuls,
# 128 columns in four warps spill 576. float32 (no exact tensor cores) would spill 508 bytes with 128 columns, and a
# gated MLP's gradients 1.4 KB. These tiles do not spill on sm_80, sm_90a and sm_100a. Larger blocks would pad small
# groups more.
GROUPED = {2: GroupedTiles(GroupedBlock(128, 256, 64, 8, 3), GroupedBlock(128, 128, 64, 8, 3),
                           GroupedBlock(128, 64, 64, 8, 3), GroupedBlock(128, 128, 64, 4, 3)),
           4: GroupedTiles(GroupedBlock(128, 64, 32, 8, 2), GroupedBlock(128, 64, 32, 8, 2),
                           GroupedBlock(128, 32, 32, 8, 2), GroupedBlock(128, 64, 32, 8, 2))}

WIDTHS = tuple(keys for keys, values in _HOPPER if keys == values)
# Programs that fill a GPU: two for each of an H100's 132 SMs. With fewer programs than this, the dkv kernel does not
# sum over the query heads of a group. It then has more programs, and the float32 sums go through memory.
FULL = 264


def of(head_dim: int, gpu: str, softcap: bool = False, value_dim: int = 0) -> Tiles | None:
    """Return the tiles for this GPU and these widths; None if none is known to fit.

    gpu: the GPU's name in the hardware table. value_dim: width of values; 0: head_dim. softcap: whether scores have a
    softcap, whose derivative needs registers: at width 128, dkv spills 240 bytes in four warps and none in eight.
    """
    widths = next((row for row in _HOPPER if head_dim <= row[0] and (value_dim or head_dim) <= row[1]), (0, 0))
    chip = hardware.GPUS[gpu].chip if gpu in hardware.GPUS else None
    tiles = TIMED.get((gpu, *widths)) or (COMPILED.get(chip.compute_capability, {}).get(widths) if chip else None)
    return tiles._replace(dkv=tiles.dkv._replace(warps=8)) if tiles and softcap and widths == (128, 128) else tiles
