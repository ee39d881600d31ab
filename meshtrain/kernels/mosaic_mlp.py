"""An MLP's activation inside the matmuls beside it, for Hopper GPUs: Pallas kernels lowered through Mosaic GPU.

`inward` multiplies x by the gate's and the up matrix and writes both products and the activation of them. `backward`
multiplies the gradient by the outward matrix and writes the gradients of both products and the activation once more,
for the outward matrix's gradient. Apart, the activation and its gradient read and write 18 bytes a token and hidden
unit in kernels of their own.

Persistent kernels as `mosaic_grouped`: one program per multiprocessor, two warp groups that multiply 64 rows each, a
third that loads by TMA. Tiles go down SUPER row blocks before the next columns, so that what runs side by side finds
its rows and columns in L2. Knows no mesh.
"""
from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from meshtrain.kernels import warpgroups
from meshtrain.kernels.activations import SLOPES
from meshtrain.kernels.warpgroups import COMPUTE, ROWS, TILE, Call, Machine, Ring, i32

NAME = "meshtrain_mlp"
COLUMNS = 256           # of a tile's sums
HALF = COLUMNS // 2     # of gate, and of up
STEP, STAGES = 64, 3    # of the contracted dim; steps in flight
SUPER = 16              # row blocks that a column block is multiplied with before the next one
PIECE, PIECES = 32, 3   # columns of gate and up that the backward reads at a time; pieces in flight


def fits(rows: int, inner: int, outer: int) -> bool:
    """Whether the kernels support x [rows, outer] and matrices [outer, inner]."""
    return rows % TILE == 0 and inner % COLUMNS == 0 and outer % STEP == 0


class _Tiles:
    """The tiles of a program, in order, and the loops over their steps."""

    def __init__(self, rows: int, columns: int, width: int, contracted: int, programs: int):
        self.down, self.across, self.width = rows // TILE, columns // width, width
        self.steps, self.programs = contracted // STEP, programs
        self.program = lax.axis_index("program")

    def each(self, visit):
        """visit(tiles before it, its rows, its columns) of each tile."""
        trips = lax.div(i32(self.down * self.across) - self.program + i32(self.programs - 1), i32(self.programs))

        def one(i, _):
            tile = self.program + i * self.programs
            first = lax.div(tile, i32(SUPER * self.across)) * SUPER
            inside = lax.rem(tile, i32(SUPER * self.across))
            down = lax.min(i32(SUPER), i32(self.down) - first)
            row, column = first + lax.rem(inside, down), lax.div(inside, down)
            visit(i, row * TILE, column * self.width)
            return ()
        lax.fori_loop(i32(0), trips, one, ())

    def each_step(self, tile, ring: Ring, visit):
        """visit(slot, number of the step) of each step of a tile, once its slot is free."""
        def one(step, _):
            visit(ring.slot_to_load(tile * self.steps + step), step)
            return ()
        lax.fori_loop(i32(0), i32(self.steps), one, ())


def inward(x, gate, up, activation: str, programs: int, interpret=False):
    """(x · gate, x · up, the activation of both), bfloat16 [R, F]. x: [R, K]; gate, up: [K, F]; of a size that `fits`.

    programs: the GPU's number of multiprocessors. interpret: see `warpgroups.Call`.
    """
    (R, K), F, dtype = x.shape, gate.shape[1], x.dtype

    def kernel(refs, scoped):
        x_ref, gate_ref, up_ref, *out_refs = refs
        x_smem, gate_smem, up_smem, *out_smem, loaded, released = scoped
        tiles, ring, wg = _Tiles(R, F, HALF, K, programs), Ring(STAGES, loaded, released), lax.axis_index("warpgroup")

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(warpgroups.MORE, action="increase")

            def visit(tile, row, column):
                sums = ring.sums(tile * tiles.steps, tiles.steps, lambda slot: x_smem.at[slot, pl.ds(wg * ROWS, ROWS)],
                                 lambda slot: (gate_smem.at[slot], up_smem.at[slot]))
                for piece in range(0, HALF, STEP):
                    g, u = (a[:, piece:piece + STEP].astype(dtype) for a in sums)
                    h = (SLOPES[activation](g.astype(jnp.float32))[0] * u.astype(jnp.float32)).astype(dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)     # the piece before this one is on its way
                    for value, smem in zip((g, u, h), out_smem):
                        smem[wg] = value
                    plgpu.commit_smem()
                    at = pl.ds(row + wg * ROWS, ROWS), pl.ds(column + piece, STEP)
                    for smem, ref in zip(out_smem, out_refs):
                        plgpu.copy_smem_to_gmem(smem.at[wg], ref.at[at])
            tiles.each(visit)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(warpgroups.FEWER, action="decrease")

            def visit(tile, row, column):
                def load(slot, step):
                    along = pl.ds(step * STEP, STEP)
                    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, TILE), along], x_smem.at[slot], loaded.at[slot])
                    for ref, smem in ((gate_ref, gate_smem), (up_ref, up_smem)):
                        plgpu.copy_gmem_to_smem(ref.at[along, pl.ds(column, HALF)], smem.at[slot], loaded.at[slot])
                tiles.each_step(tile, ring, load)
            tiles.each(visit)

    swizzled = partial(warpgroups.swizzled, dtype=dtype)
    scratch = [swizzled((STAGES, TILE, STEP)), *[swizzled((STAGES, STEP, HALF))] * 2,
               *[swizzled((COMPUTE, ROWS, STEP))] * 3,
               warpgroups.loaded(STAGES, 3), warpgroups.released(STAGES)]
    call = Call(f"{NAME}_inward", 1.0, 0.0, STEP, STAGES, interpret)
    return warpgroups.launch(kernel, call, scratch, {"program": programs},
                             [warpgroups.shape_of(dtype, R, F)] * 3, (x, gate, up))


def backward(dy, down_t, gate, up, activation: str, programs: int, interpret=False):
    """(the gradients of gate and of up, their activation), bfloat16 [R, F], of the gradient dy [R, K] of h · down.

    down_t: [K, F], as a gather over K lays it out. gate, up: [R, F], of `inward`. programs, interpret: as there.
    """
    (R, K), F, dtype = dy.shape, down_t.shape[1], dy.dtype
    machine, pieces = Machine(bool(interpret)), COLUMNS // PIECE

    def kernel(refs, scoped):
        dy_ref, down_ref, gate_ref, up_ref, *out_refs = refs
        dy_smem, down_smem, *out_smem, loaded, released, piece_loaded, piece_released = scoped
        ring, ring_of_pieces = Ring(STAGES, loaded, released), Ring(PIECES, piece_loaded, piece_released)
        tiles, wg = _Tiles(R, F, COLUMNS, K, programs), lax.axis_index("warpgroup")

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(warpgroups.MORE, action="increase")

            def visit(tile, row, column):
                dh, = ring.sums(tile * tiles.steps, tiles.steps, lambda slot: dy_smem.at[slot, pl.ds(wg * ROWS, ROWS)],
                                lambda slot: (down_smem.at[slot],))
                for piece in range(pieces):
                    number = tile * pieces + piece
                    slot = ring_of_pieces.slot_of(number)
                    plgpu.barrier_wait(piece_loaded.at[slot])
                    own = [smem.at[slot, pl.ds(wg * ROWS, ROWS)] for smem in out_smem]
                    g, u = (machine.load(ref, warpgroups.ROW_MAJOR).astype(jnp.float32) for ref in own[:2])
                    of_g, slope = SLOPES[activation](g)
                    of_piece = dh[:, piece * PIECE:(piece + 1) * PIECE]
                    for ref, value in zip(own, (of_piece * u * slope, of_piece * of_g, of_g * u)):
                        ref[...] = value.astype(dtype)
                    plgpu.commit_smem()
                    at = pl.ds(row + wg * ROWS, ROWS), pl.ds(column + piece * PIECE, PIECE)
                    for smem, ref in zip(own, out_refs):
                        plgpu.copy_smem_to_gmem(smem, ref.at[at])
                    plgpu.wait_smem_to_gmem(3, wait_read_only=True)     # all but those three are on their way
                    behind = ring_of_pieces.slot_of(number + PIECES - 1)
                    pl.when(number > 0)(lambda: plgpu.barrier_arrive(piece_released.at[behind]))
            tiles.each(visit)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(warpgroups.FEWER, action="decrease")

            def visit(tile, row, column):
                rows = pl.ds(row, TILE)

                def load(slot, step):
                    along = pl.ds(step * STEP, STEP)
                    plgpu.copy_gmem_to_smem(dy_ref.at[rows, along], dy_smem.at[slot], loaded.at[slot])
                    plgpu.copy_gmem_to_smem(down_ref.at[along, pl.ds(column, COLUMNS)], down_smem.at[slot],
                                            loaded.at[slot])
                tiles.each_step(tile, ring, load)

                def load_piece(piece, _):
                    slot = ring_of_pieces.slot_to_load(tile * pieces + piece)
                    for ref, smem in zip((gate_ref, up_ref), out_smem):
                        plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(column + piece * PIECE, PIECE)], smem.at[slot],
                                                piece_loaded.at[slot])
                    return ()
                lax.fori_loop(i32(0), i32(pieces), load_piece, ())
            tiles.each(visit)

    swizzled = partial(warpgroups.swizzled, dtype=dtype)
    scratch = [swizzled((STAGES, TILE, STEP)), swizzled((STAGES, STEP, COLUMNS)),
               *[swizzled((PIECES, TILE, PIECE))] * 3,
               warpgroups.loaded(STAGES, 2), warpgroups.released(STAGES),
               warpgroups.loaded(PIECES, 2), warpgroups.released(PIECES)]
    call = Call(f"{NAME}_backward", 1.0, 0.0, STEP, STAGES, interpret)
    return warpgroups.launch(kernel, call, scratch, {"program": programs},
                             [warpgroups.shape_of(dtype, R, F)] * 3, (dy, down_t, gate, up))
