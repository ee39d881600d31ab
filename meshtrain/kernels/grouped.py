"""Matmuls of rows with the matrix of their group: the experts of a mixture, each with as many rows as chose it.

Rows [R, …] lie in blocks, and all rows of a block belong to one group; a group's blocks stand together. The rows that fill up a
group's last block are zeros, and blocks behind the last used one are neither read nor written. XLA's own `ragged_dot` is no help:
on NVIDIA GPUs it multiplies every row with every group's matrix and masks (openxla/xla 40189), so with 16 groups 16 times.
Engines: `loop`, XLA's, block after block, anywhere; `triton`, Pallas kernels of which each program takes one tile. Neither can be
differentiated: whoever calls them writes both directions. Knows no experts, no mesh.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from meshtrain.kernels import tiles


class Groups(NamedTuple):
    """Which blocks belong to which of G groups; int32."""
    owner: jax.Array      # [blocks] the group of a block, of an unused one any
    count: jax.Array      # [1] used blocks
    first: jax.Array      # [G] a group's first block
    blocks: jax.Array     # [G] how many it has


class Engine(NamedTuple):
    """rows(x_RK, w_GKN, groups) -> [R, N], or with transpose x_RN and the same w -> [R, K], in x's dtype, summed in float32.

    outer(x_RK, y_RN, groups) -> float32 [G, K, N], of a group without rows zeros. block(rows, groups): rows of a block where so
    many rows go to so many groups.
    """
    rows: Callable
    outer: Callable
    block: Callable


def groups_of(sizes_G, num_blocks: int, block: int) -> Groups:
    """sizes_G: rows of each group. At least one block is used, so that row 0 is always written."""
    blocks = (sizes_G + block - 1) // block
    blocks = blocks.at[0].add(jnp.where(blocks.sum() == 0, 1, 0))
    ends = jnp.cumsum(blocks)
    owner = jnp.sum(ends[None, :] <= jnp.arange(num_blocks)[:, None], 1)
    as_int = lambda a: a.astype(jnp.int32)
    return Groups(as_int(jnp.minimum(owner, len(sizes_G) - 1)), as_int(ends[-1:]), as_int(ends - blocks), as_int(blocks))


def executed_rows(rows: float, groups: float, block: int) -> float:
    """Rows of the blocks that so many rows of equally large groups use: what fills up a group's last block is half of one in the
    mean, and no group with rows has less than one."""
    each = rows / groups
    return groups * block * (max(1.0, each / block + 0.5) if each > 1 else each)


# ---- XLA: a loop over the used blocks --------------------------------------------------------------------------------


def _block_rows(x, groups: Groups) -> int:
    return x.shape[0] // groups.owner.shape[0]


def _loop_rows(x, w, groups: Groups, transpose: bool = False):
    block = _block_rows(x, groups)

    def visit(b, y):
        own = lax.dynamic_index_in_dim(w, groups.owner[b], 0, keepdims=False)
        x_b = lax.dynamic_slice_in_dim(x, b * block, block, 0)
        y_b = jnp.einsum("rn,kn->rk" if transpose else "rk,kn->rn", x_b, own, preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(y, y_b.astype(x.dtype), b * block, 0)
    return lax.fori_loop(0, groups.count[0], visit, jnp.zeros((x.shape[0], w.shape[1 if transpose else 2]), x.dtype))


def _loop_outer(x, y, groups: Groups):
    block = _block_rows(x, groups)

    def visit(b, sums):
        take = lambda a: lax.dynamic_slice_in_dim(a, b * block, block, 0)
        own = lax.dynamic_index_in_dim(sums, groups.owner[b], 0, keepdims=False)
        new = own + jnp.einsum("rk,rn->kn", take(x), take(y), preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(sums, new, groups.owner[b], 0)
    return lax.fori_loop(0, groups.count[0], visit, jnp.zeros((len(groups.first), x.shape[1], y.shape[1]), jnp.float32))


def _loop_block(rows: int, groups: int) -> int:
    """About half of what a group has, so that little is filled up; 128 rows fill a core's cache line of weights."""
    return 1 << max(3, min(7, (rows // (2 * max(groups, 1))).bit_length() - 1))


def loop() -> Engine:
    return Engine(_loop_rows, _loop_outer, _loop_block)


# ---- Pallas kernels for GPUs -----------------------------------------------------------------------------------------


def _dot(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def _rows_kernel(owner_ref, count_ref, x_ref, w_ref, y_ref, *, step: int, transpose: bool):
    """One block of rows, one tile of columns; an unused block ends at once."""
    column, b = pl.program_id(0), pl.program_id(1)
    width = y_ref.shape[1]

    @pl.when(b < count_ref[0])
    def _():
        own, columns = owner_ref[b], pl.ds(column * width, width)

        def visit(i, sums):
            at = pl.ds(i * step, step)
            w = w_ref[own, columns, at].T if transpose else w_ref[own, at, columns]
            return sums + _dot(x_ref[:, at], w)
        sums = lax.fori_loop(0, x_ref.shape[1] // step, visit, jnp.zeros(y_ref.shape, jnp.float32))
        y_ref[...] = sums.astype(y_ref.dtype)


def _triton_rows(x, w, groups: Groups, transpose: bool = False, *, by_size: Mapping[int, tiles.Grouped], interpret: bool):
    of = by_size[x.dtype.itemsize]
    block, N = _block_rows(x, groups), w.shape[1 if transpose else 2]
    width, step = _tile(N, of.columns), _tile(x.shape[1], of.step)
    x, (out, into) = _padded(x, step, 1), ((1, 2) if transpose else (2, 1))
    w = _padded(_padded(w, width, out), step, into)
    rows, columns = x.shape[0], w.shape[out]
    y = pl.pallas_call(
        partial(_rows_kernel, step=step, transpose=transpose), grid=(columns // width, rows // block),
        in_specs=[pl.no_block_spec, pl.no_block_spec, pl.BlockSpec((block, x.shape[1]), lambda j, b: (b, 0)), pl.no_block_spec],
        out_specs=pl.BlockSpec((block, width), lambda j, b: (b, j)), out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        name="grouped_rows_transposed" if transpose else "grouped_rows", interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=of.warps, num_stages=of.stages))(groups.owner, groups.count, x, w)
    return y[:, :N]


def _outer_kernel(first_ref, blocks_ref, x_ref, y_ref, sums_ref, *, block: int, step: int):
    """One tile of one group's matrix, over all of the group's rows."""
    group = pl.program_id(2)
    start = first_ref[group] * block

    def visit(i, sums):
        at = pl.ds(start + i * step, step)
        return sums + _dot(x_ref[at, :].T, y_ref[at, :])
    trips = blocks_ref[group] * (block // step)
    sums_ref[...] = lax.fori_loop(0, trips, visit, jnp.zeros(sums_ref.shape, jnp.float32))


def _triton_outer(x, y, groups: Groups, *, by_size: Mapping[int, tiles.Grouped], interpret: bool):
    of = by_size[x.dtype.itemsize]
    (rows, K), N, block = x.shape, y.shape[1], _block_rows(x, groups)
    height, width, step = _tile(K, of.rows), _tile(N, of.columns), min(of.step, block)
    x, y = _padded(x, height, 1), _padded(y, width, 1)
    sums = pl.pallas_call(
        partial(_outer_kernel, block=block, step=step), grid=(y.shape[1] // width, x.shape[1] // height, len(groups.first)),
        in_specs=[pl.no_block_spec, pl.no_block_spec, pl.BlockSpec((rows, height), lambda j, i, g: (0, i)),
                  pl.BlockSpec((rows, width), lambda j, i, g: (0, j))],
        out_specs=pl.BlockSpec((None, height, width), lambda j, i, g: (g, i, j)),
        out_shape=jax.ShapeDtypeStruct((len(groups.first), x.shape[1], y.shape[1]), jnp.float32),
        name="grouped_outer", interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=of.warps, num_stages=of.stages))(groups.first, groups.blocks, x, y)
    return sums[:, :K, :N]


def _tile(n: int, most: int) -> int:
    """A power of two up to `most`: the largest that divides n, or, where only small ones do, one to which n is filled up."""
    divides = n & -n
    return min(most, divides if divides >= 32 else max(16, pl.next_power_of_2(n)))


def _padded(a, multiple: int, axis: int):
    if a.shape[axis] % multiple == 0:
        return a
    return jnp.pad(a, [(0, -n % multiple if dim == axis else 0) for dim, n in enumerate(a.shape)])


def kernels(by_size: Mapping[int, tiles.Grouped] = tiles.GROUPED, interpret: bool = False) -> Engine:
    """by_size: tiles by the bytes of an element; all with blocks of equal rows."""
    (rows,) = {of.rows for of in by_size.values()}
    return Engine(partial(_triton_rows, by_size=by_size, interpret=interpret), partial(_triton_outer, by_size=by_size, interpret=interpret),
                  lambda *_: rows)
