"""The common parts of the Mosaic attention kernels: matmuls of a warp group, tiles in shared memory, loops over steps.

Two warp groups compute 64 rows each, and a third loads by TMA (Hopper's wgmma takes 64 rows of a warp group of 128
threads). `Machine` hides what jax's interpreter of GPU kernels lacks: layouts, operands in registers, and accumulators
that begin with a value. Source: FlashAttention-3, arXiv:2407.08608.
"""
from __future__ import annotations

import functools
import inspect
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels.engine import LOG2E
from meshtrain.lazy import plgpu

ROWS = 64                               # rows of a warp group
COMPUTE = 2                             # warp groups that compute; the next one loads
TILE = COMPUTE * ROWS                   # rows of a program
# Registers per thread. setmaxnreg moves them from the warp group that loads to those that compute.
MORE, FEWER = 240, 24
# Layouts of accumulators, of a number per row and of a number per column; see `_layout`.
ROW_MAJOR, BY_ROW, BY_COLUMN = "row major", "by row", "by column"


@functools.cache
def _layout(name: str):
    """Return the layout of registers in Pallas's terms. It is not made at import, because every run imports this
    module."""
    whole = plgpu.Layout.WGMMA
    return {ROW_MAJOR: whole, BY_ROW: whole.reduce(1), BY_COLUMN: whole.reduce(0)}[name]


@functools.cache
def _load_takes_index() -> bool:
    return "idx" in inspect.signature(plgpu.load).parameters       # jax 0.10


class Call(NamedTuple):
    """Static arguments of a kernel.

    name: the kernel's name in profiles and in the compiled program. block: rows of the operand that is loaded step by
    step. stages: number of steps in flight. interpret: False, or the parameters of jax's interpreter.
    """
    name: str
    scale: float
    softcap: float
    block: int
    stages: int
    interpret: object = False


class Machine(NamedTuple):
    """A GPU, or Pallas's interpreter. The interpreter reads the operands of matmuls from memory only."""
    interpreted: bool

    def cast(self, x, layout: str):
        return x if self.interpreted else plgpu.layout_cast(x, _layout(layout))

    def full(self, shape, value, layout: str = ROW_MAJOR):
        return self.cast(jnp.full(shape, value, jnp.float32), layout)

    def load(self, ref, layout: str):
        if self.interpreted:
            return ref[...]
        index = [()] if _load_takes_index() else []
        return plgpu.load(ref, *index, layout=_layout(layout), optimized=False)

    def columns(self, shape):
        """Return the column of each element, int32."""
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, 1)
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_layout(ROW_MAJOR))

    def shows(self, first, low_ref, high_ref, shape):
        """Return whether column `first` + i is in the interval of its row, bool."""
        at = self.columns(shape) + first
        low, high = self.load(low_ref, BY_ROW), self.load(high_ref, BY_ROW)
        return (at >= by_row(low, shape)) & (at < by_row(high, shape))

    def product(self, a, b, meanwhile=lambda: None):
        """Return a · bᵀ of refs. meanwhile() runs after the tensor core has started."""
        def body(sum_ref):
            plgpu.wgmma(sum_ref, a, transpose(b))
            meanwhile()
            return sum_ref[...]
        return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))

    def two_products(self, a, b, c, d):
        """Return (a · bᵀ, c · dᵀ) of refs, computed together."""
        def body(one_ref, other_ref):
            plgpu.wgmma(one_ref, a, transpose(b))
            plgpu.wgmma(other_ref, c, transpose(d))
            return one_ref[...], other_ref[...]
        return pl.run_scoped(body, *(plgpu.ACC((x.shape[0], y.shape[0]), jnp.float32) for x, y in ((a, b), (c, d))))

    def add_product(self, total, a, b, scratch, meanwhile=lambda: None):
        """Return total + a · b, where b is a ref. scratch: memory for a, used only by the interpreter."""
        def start(sum_ref, a):
            plgpu.wgmma(sum_ref, a, b)
            meanwhile()
        if not self.interpreted:
            return pl.run_state(partial(start, a=a))(plgpu.ACC.init(total))
        scratch[...] = a
        plgpu.commit_smem()

        def body(sum_ref):
            start(sum_ref, scratch)
            return sum_ref[...]
        return total + pl.run_scoped(body, plgpu.ACC(total.shape, jnp.float32))

    def add_product_and_product(self, total, a, b, c, d, scratch):
        """Return (total + a · b, c · dᵀ), computed together."""
        if self.interpreted:
            return self.add_product(total, a, b, scratch), self.product(c, d)

        def both(refs):
            plgpu.wgmma(refs[0], a, b)
            plgpu.wgmma(refs[1], c, transpose(d))
        return pl.run_state(both)((plgpu.ACC.init(total), plgpu.ACC.init(self.full((c.shape[0], d.shape[0]), 0))))


def transpose(ref):
    return plgpu.transpose_ref(ref, (1, 0))


def by_row(x, shape):
    return lax.broadcast_in_dim(x, shape, (0,))


def by_column(x, shape):
    return lax.broadcast_in_dim(x, shape, (1,))


def compute_scores(product, call: Call):
    """Return (x, factor, derivative of x by the scaled product), where x · factor are the scores in base 2.

    A derivative of None is 1.
    """
    if not call.softcap:
        return product, call.scale * LOG2E, None
    capped = jnp.tanh(product * (call.scale / call.softcap))
    return capped, call.softcap * LOG2E, 1.0 - capped * capped


def swizzle(shape, dtype, block: int = TILE):
    """Return shared memory in the layout that TMA writes and wgmma reads without bank conflicts.

    block: rows of the steps over which a matmul sums. wgmma takes as many rows at a time as a swizzled row has
    elements.
    """
    width = min(128, min(shape[-1], block) * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))


def rows(dtype):
    """Return shared memory for one number per row of a program."""
    return plgpu.SMEM((COMPUTE, ROWS), dtype)


def load_barriers(stages: int, arrays: int = 1):
    """Return barriers that TMA completes after `arrays` copies each."""
    return plgpu.Barrier(num_arrivals=arrays, num_barriers=stages)


def release_barriers(stages: int):
    """Return barriers at which the warp groups that compute release a stage."""
    return plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages)


class Ring(NamedTuple):
    """A circular buffer of tiles in shared memory. One warp group loads the slots while the others compute from them.

    loaded, released: a barrier per slot.
    """
    stages: int
    loaded: object
    released: object

    def slot_of(self, step):
        return lax.rem(step, i32(self.stages))

    def sums(self, before, steps: int, rows_of, matrices_of):
        """Multiply a warp group's rows by each matrix and sum over `steps` slots.

        Return float32 accumulators [ROWS, columns].

        before: the number of steps that this program has already run. rows_of(slot), matrices_of(slot): operands in
        shared memory.
        """
        def products(*sum_refs):
            def visit(step, _):
                slot = self.slot_of(before + step)
                plgpu.barrier_wait(self.loaded.at[slot])
                for sum_ref, matrix in zip(sum_refs, matrices_of(slot), strict=True):
                    plgpu.wgmma(sum_ref, rows_of(slot), matrix)
                plgpu.wgmma_wait(len(sum_refs))         # the previous step has been read
                behind = self.slot_of(before + step + self.stages - 1)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(self.released.at[behind]))
                return ()
            lax.fori_loop(i32(0), i32(steps), visit, ())
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.released.at[self.slot_of(before + steps - 1)])
            return tuple(sum_ref[...] for sum_ref in sum_refs)
        columns = [matrix.shape[1] for matrix in matrices_of(0)]
        return pl.run_scoped(products, *(plgpu.ACC((ROWS, width), jnp.float32) for width in columns))

    def slot_to_load(self, step):
        """Wait until the slot for this step is free, and return it."""
        slot = self.slot_of(step)
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.released.at[slot]))
        return slot


def three_loops(bounds, visit, carry):
    """Scan visit(step, carry, masked) over the steps of a row of `bounds`."""
    start, bare_start, bare_stop, stop = bounds
    for first, last, masked in ((start, bare_start, True), (bare_start, bare_stop, False), (bare_stop, stop, True)):
        carry = lax.fori_loop(first, last, partial(visit, masked=masked), carry)
    return carry


def launch(kernel, call: Call, scratch, grid: dict[str, int], out_type, args):
    """Run kernel(refs of args and results, refs of scratch) on a grid. The first axis varies fastest."""
    def entry(*refs):
        pl.run_scoped(lambda *scoped: kernel(refs, scoped), *scratch, collective_axes="warpgroup")

    return plgpu.kernel(
        entry, out_type=out_type, grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=COMPUTE + 1,
        thread_name="warpgroup", compiler_params=plgpu.CompilerParams(approx_math=True), kernel_name=call.name,
        interpret=call.interpret or None)(*args)


def i32(x):
    return jnp.array(x, jnp.int32)


def shape_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)
