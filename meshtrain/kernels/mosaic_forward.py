"""The forward kernel of `mosaic`.

The two warp groups that compute take turns, so that the softmax of one overlaps with the matmuls of the other. Source:
FlashAttention-3, arXiv:2407.08608.
"""
from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels import warpgroups
from meshtrain.kernels.engine import MASKED
from meshtrain.kernels.warpgroups import BY_ROW, COMPUTE, LOG2E, ROWS, TILE, Call, Machine, by_row, i32
from meshtrain.lazy import plgpu

SOME = MASKED / 1e10            # a row with a larger maximum has attended to a key


def forward(call: Call, q, k, v, low, high, bounds):
    """Return (o [B, T, N, V], lse [B, N, T] float32).

    q [B, T, N, H], k [B, S, K, H] and v [B, S, K, V] are in whole tiles. low, high: from `mosaic.intervals`. bounds:
    from `mosaic.bounds`.
    """
    (B, T, N, H), (*_, K, V), dtype = q.shape, v.shape, q.dtype
    tiles, group, block, stages = T // TILE, N // K, call.block, call.stages
    machine = Machine(bool(call.interpret))

    def kernel(refs, scoped):
        q_ref, k_ref, v_ref, low_ref, high_ref, bounds_ref, o_ref, lse_ref = refs
        ((q_all, o_all), k_smem, v_smem, lse_all, low_all, high_all, own_loaded, k_loaded, v_loaded, k_released,
         v_released, turn, *scratch) = scoped
        b, n, wg = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
        i = i32(tiles - 1) - lax.axis_index("tile")         # if causal, rows with the most keys first
        limits = [bounds_ref[b, i, j] for j in range(4)]
        start, stop = limits[0], limits[3]

        def slot_of(step):
            return lax.rem(step - start, i32(stages))

        def next_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(warpgroups.MORE, action="increase")
            own, q_smem, o_smem = pl.ds(i * TILE + wg * ROWS, ROWS), q_all.at[wg], o_all.at[wg, pl.ds(0, ROWS)]
            low_smem, high_smem = low_all.at[wg], high_all.at[wg]
            for source, target in ((q_ref.at[b, own, n], q_smem), (low_ref.at[b, own], low_smem),
                                   (high_ref.at[b, own], high_smem)):
                plgpu.copy_gmem_to_smem(source, target, own_loaded.at[wg])
            plgpu.barrier_wait(own_loaded.at[wg])

            @pl.when(stop > start)
            def _first_keys():
                plgpu.barrier_wait(k_loaded.at[0])
            pl.when(wg == 1)(next_turn)

            def visit(step, carry, masked):
                o, m, l = carry                 # unnormalized output, running maximum and sum
                slot = slot_of(step)
                s = machine.product(q_smem, k_smem.at[slot], next_turn)
                plgpu.barrier_arrive(k_released.at[slot])
                s, factor, _ = warpgroups.compute_scores(s, call)
                if masked:
                    s = jnp.where(machine.shows(step * block, low_smem, high_smem, s.shape), s, MASKED)
                m_new = jnp.maximum(m, s.max(axis=1) * factor)
                # s · factor - m is one fused multiply-add. In a row without visible keys so far, its rounding error
                # (1e22 at 1e30) would be the argument of exp2. With base 0 all masked scores of the row give 0.
                base = jnp.where(m_new > SOME, m_new, 0.0) if masked else m_new
                keep = jnp.exp2(m - base)
                p = jnp.exp2(s * factor - by_row(base, s.shape))
                o *= by_row(keep, o.shape)
                l = l * keep + p.sum(axis=1)
                # No part of the softmax may move past the barrier, after which this warp group has the tensor core.
                o, l, m_new, p = lax.optimization_barrier((o, l, m_new, p.astype(dtype)))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_loaded.at[slot])
                plgpu.barrier_wait(turn)

                def next_keys():
                    @pl.when(step + 1 < stop)
                    def _():
                        plgpu.barrier_wait(k_loaded.at[slot_of(step + 1)])
                o = machine.add_product(o, p, v_smem.at[slot], scratch[0].at[wg] if scratch else None, next_keys)
                plgpu.barrier_arrive(v_released.at[slot])
                return o, m_new, l

            o, m, l = warpgroups.three_loops(limits, visit, (
                machine.full((ROWS, V), 0), machine.full((ROWS,), MASKED, BY_ROW), machine.full((ROWS,), 0, BY_ROW)))
            pl.when(wg == 0)(next_turn)
            some = m > SOME
            l = jnp.where(some, l, 1.0)
            o_smem[...] = (o * by_row(jnp.where(some, 1.0 / l, 0.0), o.shape)).astype(dtype)
            lse_all[wg] = jnp.where(some, m * (1 / LOG2E) + jnp.log(l), MASKED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_ref.at[b, own, n])
            plgpu.copy_smem_to_gmem(lse_all.at[wg], lse_ref.at[b, n, own])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(warpgroups.FEWER, action="decrease")
            head = lax.div(n, i32(group))

            def load(step, _):
                slot, at = slot_of(step), (b, pl.ds(step * block, block), head)
                for ref, smem, full, empty in ((k_ref, k_smem, k_loaded, k_released),
                                               (v_ref, v_smem, v_loaded, v_released)):
                    pl.when(step - start >= stages)(partial(plgpu.barrier_wait, empty.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[at], smem.at[slot], full.at[slot])
                return ()
            lax.fori_loop(start, stop, load, ())

    row, swizzle = warpgroups.rows, partial(warpgroups.swizzle, dtype=dtype)
    # The o of a warp group, in its first `ROWS` rows, shares memory with its q, because with keys of width 192 no
    # memory is left for o.
    own = plgpu.RefUnion(swizzle((COMPUTE, ROWS, H)), swizzle((COMPUTE, ROWS * H // V, V)))
    scratch = [own, swizzle((stages, block, H)), swizzle((stages, block, V)), row(jnp.float32), row(jnp.int32),
               row(jnp.int32), warpgroups.load_barriers(COMPUTE, 3), warpgroups.load_barriers(stages),
               warpgroups.load_barriers(stages), warpgroups.release_barriers(stages),
               warpgroups.release_barriers(stages), plgpu.Barrier(num_arrivals=COMPUTE)]
    scratch += [plgpu.SMEM((COMPUTE, ROWS, block), dtype)] * machine.interpreted
    return warpgroups.launch(
        kernel, call, scratch, {"head": N, "tile": tiles, "batch": B},
        [warpgroups.shape_of(dtype, B, T, N, V), warpgroups.shape_of(jnp.float32, B, N, T)],
        (q, k, v, low, high, bounds))
