"""Grouped matmul for Hopper GPUs: each row times its group's matrix, as a Pallas kernel lowered through Mosaic GPU.

The kernel is persistent, with one program per multiprocessor. Two warp groups multiply 64 rows each. A third warp group
loads the next steps by TMA, also while a tile is written. On Hopper TMA cannot gather rows by index, so rows must be
stored in order; `grouped` has kernels that gather. Measured on an H200 (benchmarks/gpu.md): 0.63 to 0.77 of the peak,
1.15 to 1.36 times as fast as the Triton kernels at Qwen3-30B-A3B's shape and 0.95 to 1.12 times at Mixtral's. This
module knows no experts and no mesh.
"""
from __future__ import annotations

from functools import partial

from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels import warpgroups
from meshtrain.kernels.warpgroups import COMPUTE, ROWS, TILE, Call, Ring, i32, transpose
from meshtrain.lazy import plgpu

STEP = 64               # elements of the contracted dim per step
# Columns of a tile -> stages. The widest tile that divides the matrix is used. It has as many stages as fit.
STAGES = {256: 3, 192: 4, 128: 6}


def columns_of(width: int, *summed: float) -> int:
    """Return the tile width for a matrix of `width` columns; 0 if none fits. summed: sizes of the contracted dims."""
    return next((columns for columns in STAGES if width % columns == 0 and not any(k % STEP for k in summed)), 0)


def rows(pairs, dims: str, owner, count, programs: int, interpret=False):
    """Return Σ x · w[owner of the row's block] over pairs (x [R, K], w with this order of dims); bfloat16 [R, N].

    owner: [blocks of TILE rows] int32. count: [1] int32; blocks from number `count` on are neither read nor written.
    programs: the GPU's number of multiprocessors. interpret: see `warpgroups.Call`.
    """
    (x, w), dtype = pairs[0], pairs[0][0].dtype
    N, R, columns = w.shape[dims.index("n")], x.shape[0], columns_of(w.shape[dims.index("n")])
    stages, tiled = STAGES[columns], N // columns
    by_column = dims.index("n") < dims.index("k")       # a column of w is contiguous
    ends = [0]              # steps before each pair, then the total
    for x, _ in pairs:
        ends.append(ends[-1] + x.shape[1] // STEP)
    steps = ends[-1]

    def kernel(refs, scoped):
        *pair_refs, owner_ref, count_ref, out_ref = refs
        x_smem, w_smem, out_smem, *barriers = scoped
        ring = Ring(stages, *barriers)
        program, wg = lax.axis_index("program"), lax.axis_index("warpgroup")
        trips = lax.div(count_ref[0] * tiled - program + i32(programs - 1), i32(programs))

        def each_tile(visit):
            def one(i, _):
                tile = program + i * programs       # neighbouring programs read the same rows
                visit(i * steps, lax.div(tile, i32(tiled)), pl.ds(lax.rem(tile, i32(tiled)) * columns, columns))
                return ()
            lax.fori_loop(i32(0), trips, one, ())

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(warpgroups.MORE, action="increase")

            def tile(before, block, to):
                y, = ring.sums(before, steps, lambda slot: x_smem.at[slot, pl.ds(wg * ROWS, ROWS)],
                                   lambda slot: (transpose(w_smem.at[slot]) if by_column else w_smem.at[slot],))
                y = y.astype(dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)         # the previous tile has left shared memory
                out_smem[wg] = y
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[pl.ds(block * TILE + wg * ROWS, ROWS), to])
            each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(warpgroups.FEWER, action="decrease")

            def tile(before, block, to):
                own, at = owner_ref[block], pl.ds(block * TILE, TILE)
                for x_ref, w_ref, first, last in zip(pair_refs[::2], pair_refs[1::2], ends, ends[1:]):
                    def load(step, _):
                        slot, along = ring.slot_to_load(before + step), pl.ds((step - first) * STEP, STEP)
                        of_letter = {"g": own, "k": along, "n": to}
                        plgpu.copy_gmem_to_smem(x_ref.at[at, along], x_smem.at[slot], ring.loaded.at[slot])
                        plgpu.copy_gmem_to_smem(w_ref.at[tuple(of_letter[letter] for letter in dims)], w_smem.at[slot],
                                                ring.loaded.at[slot])
                        return ()
                    lax.fori_loop(i32(first), i32(last), load, ())
            each_tile(tile)

    swizzle = partial(warpgroups.swizzle, dtype=dtype)
    of_w = (columns, STEP) if by_column else (STEP, columns)
    scratch = [swizzle((stages, TILE, STEP)), swizzle((stages, *of_w)), swizzle((COMPUTE, ROWS, columns)),
               warpgroups.load_barriers(stages, 2), warpgroups.release_barriers(stages)]
    call = Call(f"grouped_mosaic_{dims}", 1.0, 0.0, STEP, stages, interpret)
    return warpgroups.launch(kernel, call, scratch, {"program": programs}, warpgroups.shape_of(dtype, R, N),
                             (*(a for pair in pairs for a in pair), owner, count))
