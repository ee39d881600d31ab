"""The backward kernels of `mosaic`: one for dq and one for dk and dv.

Both recompute the scores. Neither accumulates in global memory.
"""
from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels import warpgroups
from meshtrain.kernels.warpgroups import (
    BY_COLUMN, BY_ROW, COMPUTE, LOG2E, ROWS, TILE, Call, Machine, by_column, by_row, i32)
from meshtrain.lazy import plgpu


def dq_of(call: Call, q, k, v, do, lse, delta, low, high, bounds):
    """Return dq [B, T, N, H].

    do: [B, T, N, V]. lse, delta: [B, N, T], where delta = sum(do · o, -1). The other arguments are those of
    `mosaic_forward.forward`.
    """
    (B, T, N, H), (*_, K, V), dtype = q.shape, v.shape, q.dtype
    tiles, group, block, stages = T // TILE, N // K, call.block, call.stages
    machine = Machine(bool(call.interpret))

    def kernel(refs, scoped):
        q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, low_ref, high_ref, bounds_ref, dq_ref = refs
        (q_all, do_all, lse_all, delta_all, low_all, high_all, k_smem, v_smem, own_loaded, k_loaded, v_loaded,
         k_released, v_released, *scratch) = scoped
        b, n, wg = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
        i = i32(tiles - 1) - lax.axis_index("tile")         # if causal, rows with the most keys first
        limits = [bounds_ref[b, i, j] for j in range(4)]
        start, stop = limits[0], limits[3]

        def slot_of(step):
            return lax.rem(step - start, i32(stages))

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(warpgroups.MORE, action="increase")
            own, q_smem, do_smem = pl.ds(i * TILE + wg * ROWS, ROWS), q_all.at[wg], do_all.at[wg]
            low_smem, high_smem = low_all.at[wg], high_all.at[wg]
            for source, target in ((q_ref.at[b, own, n], q_smem), (do_ref.at[b, own, n], do_smem),
                                   (lse_ref.at[b, n, own], lse_all.at[wg]),
                                   (delta_ref.at[b, n, own], delta_all.at[wg]),
                                   (low_ref.at[b, own], low_smem), (high_ref.at[b, own], high_smem)):
                plgpu.copy_gmem_to_smem(source, target, own_loaded.at[wg])
            plgpu.barrier_wait(own_loaded.at[wg])
            lse, delta = machine.load(lse_all.at[wg], BY_ROW) * LOG2E, machine.load(delta_all.at[wg], BY_ROW)

            def visit(step, dq, masked):
                slot = slot_of(step)
                plgpu.barrier_wait(k_loaded.at[slot])
                plgpu.barrier_wait(v_loaded.at[slot])
                s, dp = machine.two_products(q_smem, k_smem.at[slot], do_smem, v_smem.at[slot])
                plgpu.barrier_arrive(v_released.at[slot])
                s, factor, slope = warpgroups.compute_scores(s, call)
                p = jnp.exp2(s * factor - by_row(lse, s.shape))
                if masked:
                    p = jnp.where(machine.shows(step * block, low_smem, high_smem, s.shape), p, 0.0)
                p = p if slope is None else p * slope
                ds = p * (dp - by_row(delta, s.shape))
                dq = machine.add_product(dq, ds.astype(dtype), k_smem.at[slot], scratch[0].at[wg] if scratch else None)
                plgpu.barrier_arrive(k_released.at[slot])
                return dq

            dq = warpgroups.three_loops(limits, visit, machine.full((ROWS, H), 0))
            q_smem[...] = (dq * call.scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem, dq_ref.at[b, own, n])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(warpgroups.FEWER, action="decrease")
            head = lax.div(n, i32(group))

            def load(step, _):
                slot, at = slot_of(step), (b, pl.ds(step * block, block), head)
                for ref, smem, full, empty in ((v_ref, v_smem, v_loaded, v_released),
                                               (k_ref, k_smem, k_loaded, k_released)):
                    pl.when(step - start >= stages)(partial(plgpu.barrier_wait, empty.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[at], smem.at[slot], full.at[slot])
                return ()
            lax.fori_loop(start, stop, load, ())

    row, swizzle = warpgroups.rows, partial(warpgroups.swizzle, dtype=dtype)
    scratch = [swizzle((COMPUTE, ROWS, H)), swizzle((COMPUTE, ROWS, V)), row(jnp.float32), row(jnp.float32),
               row(jnp.int32), row(jnp.int32), swizzle((stages, block, H)), swizzle((stages, block, V)),
               warpgroups.load_barriers(COMPUTE, 6), warpgroups.load_barriers(stages), warpgroups.load_barriers(stages),
               warpgroups.release_barriers(stages), warpgroups.release_barriers(stages)]
    scratch += [plgpu.SMEM((COMPUTE, ROWS, block), dtype)] * machine.interpreted
    return warpgroups.launch(kernel, call, scratch, {"head": N, "tile": tiles, "batch": B},
                             warpgroups.shape_of(dtype, *q.shape), (q, k, v, do, lse, delta, low, high, bounds))


def dkv_of(call: Call, q, k, v, do, lse, delta, low, high, bounds):
    """Return (dk [B, S, K, H], dv [B, S, K, V]).

    low, high [B, S]: the queries that attend to a key. A program has 128 keys of one head and sums over all query heads
    of its group. Scores are [keys, queries], so that p is not transposed.
    """
    (B, T, N, H), (_, S, K, V), dtype = q.shape, v.shape, q.dtype
    tiles, group, block, stages = S // TILE, N // K, call.block, call.stages
    machine = Machine(bool(call.interpret))

    def kernel(refs, scoped):
        q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, low_ref, high_ref, bounds_ref, dk_ref, dv_ref = refs
        (k_all, v_all, low_all, high_all, q_smem, do_smem, lse_smem, delta_smem, own_loaded, q_loaded, do_loaded,
         q_released, do_released, *scratch) = scoped
        b, head, wg = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
        i = lax.axis_index("tile")              # if causal, the first keys have the most queries
        limits = [bounds_ref[b, i, j] for j in range(4)]
        start, stop = limits[0], limits[3]

        def count_visited(member, step):
            """Return the number of steps of this program before this one."""
            return member * (stop - start) + step - start

        def slot_of(member, step):
            return lax.rem(count_visited(member, step), i32(stages))

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(warpgroups.MORE, action="increase")
            own, k_smem, v_smem = pl.ds(i * TILE + wg * ROWS, ROWS), k_all.at[wg], v_all.at[wg]
            low_smem, high_smem = low_all.at[wg], high_all.at[wg]
            for source, target in ((k_ref.at[b, own, head], k_smem), (v_ref.at[b, own, head], v_smem),
                                   (low_ref.at[b, own], low_smem), (high_ref.at[b, own], high_smem)):
                plgpu.copy_gmem_to_smem(source, target, own_loaded.at[wg])
            plgpu.barrier_wait(own_loaded.at[wg])
            through = scratch[0].at[wg] if scratch else None

            def visit(step, sums, masked, member):
                dk, dv = sums
                slot = slot_of(member, step)
                plgpu.barrier_wait(q_loaded.at[slot])
                s = machine.product(k_smem, q_smem.at[slot])
                plgpu.barrier_wait(do_loaded.at[slot])
                s, factor, slope = warpgroups.compute_scores(s, call)
                lse = by_column(machine.load(lse_smem.at[slot], BY_COLUMN) * LOG2E, s.shape)
                p = jnp.exp2(s * factor - lse)
                if masked:
                    p = jnp.where(machine.shows(step * block, low_smem, high_smem, s.shape), p, 0.0)
                p16 = p.astype(dtype)
                p = p if slope is None else p * slope       # before dp, so that no further array stays in registers
                dv, dp = machine.add_product_and_product(dv, p16, do_smem.at[slot], v_smem, do_smem.at[slot], through)
                ds = p * (dp - by_column(machine.load(delta_smem.at[slot], BY_COLUMN), s.shape))
                plgpu.barrier_arrive(do_released.at[slot])
                dk = machine.add_product(dk, ds.astype(dtype), q_smem.at[slot], through)
                plgpu.barrier_arrive(q_released.at[slot])
                return dk, dv

            def of_head(member, sums):
                return warpgroups.three_loops(limits, partial(visit, member=member), sums)
            zeros = machine.full((ROWS, H), 0), machine.full((ROWS, V), 0)
            dk, dv = lax.fori_loop(i32(0), i32(group), of_head, zeros) if group > 1 else of_head(i32(0), zeros)
            k_smem[...] = (dk * call.scale).astype(dtype)
            v_smem[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem, dk_ref.at[b, own, head])
            plgpu.copy_smem_to_gmem(v_smem, dv_ref.at[b, own, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(warpgroups.FEWER, action="decrease")

            def of_head(member, _):
                n = head * group + member

                def load(step, _):
                    slot, at = slot_of(member, step), pl.ds(step * block, block)
                    for ref, smem, row_ref, row_smem, full, empty in (
                            (q_ref, q_smem, lse_ref, lse_smem, q_loaded, q_released),
                            (do_ref, do_smem, delta_ref, delta_smem, do_loaded, do_released)):
                        pl.when(count_visited(member, step) >= stages)(partial(plgpu.barrier_wait, empty.at[slot]))
                        plgpu.copy_gmem_to_smem(ref.at[b, at, n], smem.at[slot], full.at[slot])
                        plgpu.copy_gmem_to_smem(row_ref.at[b, n, at], row_smem.at[slot], full.at[slot])
                    return ()
                return lax.fori_loop(start, stop, load, ())
            lax.fori_loop(i32(0), i32(group), of_head, ())

    swizzle = partial(warpgroups.swizzle, dtype=dtype, block=block)
    per_query = plgpu.SMEM((stages, block), jnp.float32)
    scratch = [swizzle((COMPUTE, ROWS, H)), swizzle((COMPUTE, ROWS, V)), warpgroups.rows(jnp.int32),
               warpgroups.rows(jnp.int32), swizzle((stages, block, H)), swizzle((stages, block, V)), per_query,
               per_query, warpgroups.load_barriers(COMPUTE, 4), warpgroups.load_barriers(stages, 2),
               warpgroups.load_barriers(stages, 2),
               warpgroups.release_barriers(stages), warpgroups.release_barriers(stages)]
    scratch += [plgpu.SMEM((COMPUTE, ROWS, block), dtype)] * machine.interpreted
    shapes = [warpgroups.shape_of(dtype, *x.shape) for x in (k, v)]
    return warpgroups.launch(kernel, call, scratch, {"head": K, "tile": tiles, "batch": B}, shapes,
                             (q, k, v, do, lse, delta, low, high, bounds))
