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
    """rows((x_RK, …), (w, …), groups, dims) -> [R, N], the sum of each x with its w in float32, rounded to x's dtype.

    outer(x_RK, y_RN, groups, dims) -> float32, of a group without rows zeros. dims: the order of w's or the result's dims, a
    permutation of "gkn"; so a transposed w needs no copy, nor one whose groups are not its first dim. block(rows, groups): rows of a
    block where so many rows go to so many groups.
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


def _loop_rows(xs, ws, groups: Groups, dims: str):
    block, of_group = _block_rows(xs[0], groups), dims.replace("g", "")

    def visit(b, y):
        y_b = 0
        for x, w in zip(xs, ws, strict=True):
            own = lax.dynamic_index_in_dim(w, groups.owner[b], dims.index("g"), keepdims=False)
            x_b = lax.dynamic_slice_in_dim(x, b * block, block, 0)
            y_b += jnp.einsum(f"rk,{of_group}->rn", x_b, own, preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(y, y_b.astype(y.dtype), b * block, 0)
    return lax.fori_loop(0, groups.count[0], visit, jnp.zeros((xs[0].shape[0], ws[0].shape[dims.index("n")]), xs[0].dtype))


def _loop_outer(x, y, groups: Groups, dims: str):
    block, at = _block_rows(x, groups), dims.index("g")

    def visit(b, sums):
        take = lambda a: lax.dynamic_slice_in_dim(a, b * block, block, 0)
        own = lax.dynamic_index_in_dim(sums, groups.owner[b], at, keepdims=False)
        new = own + jnp.einsum(f"rk,rn->{dims.replace('g', '')}", take(x), take(y), preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(sums, new, groups.owner[b], at)
    shape = _ordered(dims, g=len(groups.first), k=x.shape[1], n=y.shape[1])
    return lax.fori_loop(0, groups.count[0], visit, jnp.zeros(shape, jnp.float32))


def _ordered(dims: str, **of_letter) -> tuple:
    return tuple(of_letter[letter] for letter in dims)


def _loop_block(rows: int, groups: int) -> int:
    """About an eighth of what a group has, so that little is filled up: of groups of 512 blocks of 256, 128, 64 and 32 rows took a
    training step 1.50, 1.47, 1.35 and 1.43 times a dense one's CPU seconds. Beyond 128 rows a product is no faster."""
    return 1 << max(3, min(7, (rows // (8 * max(groups, 1))).bit_length() - 1))


def loop() -> Engine:
    return Engine(_loop_rows, _loop_outer, _loop_block)


# ---- Pallas kernels for GPUs -----------------------------------------------------------------------------------------


def _dot(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def _turned(a, dims: str):
    """A tile of "kn" as it stands in an array of `dims`, and back."""
    return a.T if dims.index("n") < dims.index("k") else a


def _rows_kernel(owner_ref, count_ref, *refs, steps: tuple[int, ...], dims: str):
    """One block of rows, one tile of columns; an unused block ends at once."""
    column, b, *pairs, y_ref = pl.program_id(0), pl.program_id(1), *refs
    width = y_ref.shape[1]

    @pl.when(b < count_ref[0])
    def _():
        own, columns, sums = owner_ref[b], pl.ds(column * width, width), jnp.zeros(y_ref.shape, jnp.float32)
        for x_ref, w_ref, step in zip(pairs[::2], pairs[1::2], steps, strict=True):
            def visit(i, sums):
                at = pl.ds(i * step, step)
                return sums + _dot(x_ref[:, at], _turned(w_ref[_ordered(dims, g=own, k=at, n=columns)], dims))
            sums = lax.fori_loop(0, x_ref.shape[1] // step, visit, sums)
        y_ref[...] = sums.astype(y_ref.dtype)


def _triton_rows(xs, ws, groups: Groups, dims: str, *, by_size: Mapping[int, tiles.Grouped], interpret: bool):
    of, at = by_size[xs[0].dtype.itemsize], dims.index
    block, N = _block_rows(xs[0], groups), ws[0].shape[at("n")]
    width, steps = _tile(N, of.columns), tuple(_tile(x.shape[1], of.step) for x in xs)
    xs = [_padded(x, step, 1) for x, step in zip(xs, steps)]
    ws = [_padded(_padded(w, width, at("n")), step, at("k")) for w, step in zip(ws, steps)]
    rows, columns = xs[0].shape[0], ws[0].shape[at("n")]
    pairs, specs = [a for pair in zip(xs, ws, strict=True) for a in pair], []
    for x in xs:
        specs += [pl.BlockSpec((block, x.shape[1]), lambda j, b: (b, 0)), pl.no_block_spec]
    y = pl.pallas_call(
        partial(_rows_kernel, steps=steps, dims=dims), grid=(columns // width, rows // block),
        in_specs=[pl.no_block_spec, pl.no_block_spec, *specs],
        out_specs=pl.BlockSpec((block, width), lambda j, b: (b, j)), out_shape=jax.ShapeDtypeStruct((rows, columns), xs[0].dtype),
        name=f"grouped_rows_{dims}", interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=of.warps, num_stages=of.stages))(groups.owner, groups.count, *pairs)
    return y[:, :N]


def _outer_kernel(first_ref, blocks_ref, x_ref, y_ref, sums_ref, *, block: int, step: int, tile: tuple[int, int], dims: str):
    """One tile of one group's matrix, over all of the group's rows."""
    group = pl.program_id(2)
    start = first_ref[group] * block

    def visit(i, sums):
        at = pl.ds(start + i * step, step)
        return sums + _dot(x_ref[at, :].T, y_ref[at, :])
    trips = blocks_ref[group] * (block // step)
    sums_ref[...] = _turned(lax.fori_loop(0, trips, visit, jnp.zeros(tile, jnp.float32)), dims)


def _triton_outer(x, y, groups: Groups, dims: str, *, by_size: Mapping[int, tiles.Grouped], interpret: bool):
    of = by_size[x.dtype.itemsize]
    (rows, K), N, G, block = x.shape, y.shape[1], len(groups.first), _block_rows(x, groups)
    height, width, step = _tile(K, of.rows), _tile(N, of.columns), min(of.step, block)
    x, y = _padded(x, height, 1), _padded(y, width, 1)
    sums = pl.pallas_call(
        partial(_outer_kernel, block=block, step=step, tile=(height, width), dims=dims),
        grid=(y.shape[1] // width, x.shape[1] // height, G),
        in_specs=[pl.no_block_spec, pl.no_block_spec, pl.BlockSpec((rows, height), lambda j, i, g: (0, i)),
                  pl.BlockSpec((rows, width), lambda j, i, g: (0, j))],
        out_specs=pl.BlockSpec(_ordered(dims, g=None, k=height, n=width), lambda j, i, g: _ordered(dims, g=g, k=i, n=j)),
        out_shape=jax.ShapeDtypeStruct(_ordered(dims, g=G, k=x.shape[1], n=y.shape[1]), jnp.float32),
        name=f"grouped_outer_{dims}", interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=of.warps, num_stages=of.stages))(groups.first, groups.blocks, x, y)
    return sums[_ordered(dims, g=slice(None), k=slice(K), n=slice(N))]


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
