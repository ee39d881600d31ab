"""Gated MLP with its activation fused into the matmuls, for Hopper GPUs: Pallas kernels lowered through Mosaic GPU.

`forward` computes gate = x · W_gate, up = x · W_up and h = act(gate) · up in one kernel. `backward` computes the
gradients of gate and up from the output's gradient, and recomputes h for the gradient of W_down. Without fusion, the
activation and its gradient are separate kernels that move 18 bytes of HBM per token and hidden unit in bfloat16.

Both are persistent kernels like `mosaic_grouped`: one program per multiprocessor; two warp groups multiply 64 rows
each, and a third loads tiles by TMA. Tiles are ordered in groups of SUPER row blocks, so that tiles computed at the
same time share rows and columns in L2. This module knows no mesh.
"""
from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels import warpgroups
from meshtrain.kernels.activations import SLOPES
from meshtrain.kernels.warpgroups import COMPUTE, ROWS, TILE, Call, Machine, Ring, i32
from meshtrain.lazy import plgpu

NAME = "meshtrain_mlp"
COLUMNS = 256           # of a tile's accumulators
HALF = COLUMNS // 2     # of gate, and of up, in the forward
STEP, STAGES = 64, 3    # elements of the contracted dim per step; steps in flight
SUPER = 16              # row blocks per group of tiles
PIECE, PIECES = 32, 3   # columns of gate and up that the backward's epilogue reads at a time; pieces in flight


def fits(rows: int, inner: int, outer: int) -> bool:
    """Return whether the kernels support x [rows, outer] and weights [outer, inner]."""
    return rows % TILE == 0 and inner % COLUMNS == 0 and outer % STEP == 0


class _Tiles:
    """The output tiles of one program in order, and the loop over the contracted dim."""

    def __init__(self, rows: int, columns: int, width: int, contracted: int, programs: int):
        self.down, self.across, self.width = rows // TILE, columns // width, width
        self.steps, self.programs = contracted // STEP, programs
        self.program = lax.axis_index("program")

    def each(self, visit):
        """Call visit(index of the tile in this program, first row, first column) for each tile."""
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
        """Call visit(slot, step) for each step of a tile, once the slot is free."""
        def one(step, _):
            visit(ring.slot_to_load(tile * self.steps + step), step)
            return ()
        lax.fori_loop(i32(0), i32(self.steps), one, ())


def forward(x, w_gate, w_up, activation: str, programs: int, interpret=False):
    """Return gate, up and h, each bfloat16 [R, F]. x: [R, K]; w_gate, w_up: [K, F]; sizes must satisfy `fits`.

    programs: the GPU's number of multiprocessors. interpret: see `warpgroups.Call`.
    """
    (R, K), F, dtype = x.shape, w_gate.shape[1], x.dtype

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
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)     # the previous piece has left shared memory
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

    swizzle = partial(warpgroups.swizzle, dtype=dtype)
    scratch = [swizzle((STAGES, TILE, STEP)), *[swizzle((STAGES, STEP, HALF))] * 2,
               *[swizzle((COMPUTE, ROWS, STEP))] * 3,
               warpgroups.load_barriers(STAGES, 3), warpgroups.release_barriers(STAGES)]
    call = Call(f"{NAME}_forward", 1.0, 0.0, STEP, STAGES, interpret)
    return warpgroups.launch(kernel, call, scratch, {"program": programs},
                             [warpgroups.shape_of(dtype, R, F)] * 3, (x, w_gate, w_up))


def backward(dy, w_down_t, gate, up, activation: str, programs: int, interpret=False):
    """Return dgate, dup and h, each bfloat16 [R, F]. dy: [R, K], the gradient of h · W_down; gate, up: from `forward`.

    w_down_t: W_down transposed to [K, F], the layout in which a ZeRO-3 gather leaves it. programs, interpret: as in
    `forward`.
    """
    (R, K), F, dtype = dy.shape, w_down_t.shape[1], dy.dtype
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
                    plgpu.wait_smem_to_gmem(3, wait_read_only=True)     # all but these three have left shared memory
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

    swizzle = partial(warpgroups.swizzle, dtype=dtype)
    scratch = [swizzle((STAGES, TILE, STEP)), swizzle((STAGES, STEP, COLUMNS)),
               *[swizzle((PIECES, TILE, PIECE))] * 3,
               warpgroups.load_barriers(STAGES, 2), warpgroups.release_barriers(STAGES),
               warpgroups.load_barriers(PIECES, 2), warpgroups.release_barriers(PIECES)]
    call = Call(f"{NAME}_backward", 1.0, 0.0, STEP, STAGES, interpret)
    return warpgroups.launch(kernel, call, scratch, {"program": programs},
                             [warpgroups.shape_of(dtype, R, F)] * 3, (dy, w_down_t, gate, up))
