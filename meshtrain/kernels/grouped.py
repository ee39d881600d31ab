"""Matmuls of rows with the matrix of their group: the experts of a mixture, each with as many rows as chose it.

Rows [R, …] lie in blocks, and all rows of a block belong to one group; a group's blocks stand together. The rows that
fill up a group's last block are zeros, and blocks behind the last used one are neither read nor written. XLA's own
`ragged_dot` is no help: on NVIDIA GPUs it multiplies every row with every group's matrix and masks (openxla/xla 40189),
so with 16 groups 16 times. Engines: `loop`, XLA's, block after block, anywhere; `triton`, Pallas kernels of which each
program takes one tile, and reads its rows from where they are taken, so that they are nowhere copied (as scattermoe
does, arXiv:2403.08245). Neither can be differentiated: whoever calls them writes both directions. Knows no experts, no
mesh.
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

from meshtrain.kernels import products, tiles


class Groups(NamedTuple):
    """Which blocks belong to which of G groups; int32."""
    owner: jax.Array      # [blocks] the group of a block, of an unused one any
    count: jax.Array      # [1] used blocks
    first: jax.Array      # [G] a group's first block
    blocks: jax.Array     # [G] how many it has


class Taken(NamedTuple):
    """Rows of an array by their numbers, zeros where one is negative: what a kernel reads as it goes, and nobody
    copies."""
    of: jax.Array         # [A, K]
    number: jax.Array     # [R] int32


class GroupedOperands(NamedTuple):
    """x_RK, or a Taken of such rows, times the matrix of each row's group. dims: the order of w's, a permutation of
    "gkn"; so a transposed w needs no copy, nor one whose groups are not its first dim."""
    x: jax.Array | Taken
    w: jax.Array
    dims: str


class GroupedEngine(NamedTuple):
    """take(a_AK, number_R) -> these rows, as `rows` and `outer` have them.

    rows(pairs, groups, then, beside) -> what `then` makes of the sum of the products, [R, N] in float32. then(sum,
    *beside) sees some rows and columns at a time, and gives a tuple: of [rows, columns], rounded to x's dtype in the
    result, or of sums over the columns, [rows] in float32. beside: arrays [R, N], or [R, 1] seen by all columns.
    outer(x_RK, y_RN, groups, dims) -> float32, of a group without rows zeros, in this order of dims. block(rows,
    groups): rows of a block where so many rows go to so many groups.
    """
    take: Callable
    rows: Callable
    outer: Callable
    block: Callable


def as_it_is(summed):
    return summed,


def groups_of(sizes_G, num_blocks: int, block: int) -> Groups:
    """sizes_G: rows of each group. At least one block is used, so that row 0 is always written."""
    blocks = (sizes_G + block - 1) // block
    blocks = blocks.at[0].add(jnp.where(blocks.sum() == 0, 1, 0))
    ends = jnp.cumsum(blocks)
    owner = jnp.sum(ends[None, :] <= jnp.arange(num_blocks)[:, None], 1)
    as_int = lambda a: a.astype(jnp.int32)
    return Groups(as_int(jnp.minimum(owner, len(sizes_G) - 1)), as_int(ends[-1:]), as_int(ends - blocks),
                  as_int(blocks))


def executed_rows(rows: float, groups: float, block: int) -> float:
    """Rows of the blocks that so many rows of equally large groups use: what fills up a group's last block is half of
    one in the mean, and no group with rows has less than one."""
    each = rows / groups
    return groups * block * (max(1.0, each / block + 0.5) if each > 1 else each)


# ---- XLA: a loop over the used blocks --------------------------------------------------------------------------------


def _block_rows(x, groups: Groups) -> int:
    return (x.number if isinstance(x, Taken) else x).shape[0] // groups.owner.shape[0]


def _copied(a, number):
    """A product, no `where`: XLA would keep [R, K] of zeros through a loop."""
    return a[jnp.maximum(number, 0)] * (number >= 0)[:, None].astype(a.dtype)


def _results(then: Callable, beside, rows: int, columns: int, dtype) -> list[jax.ShapeDtypeStruct]:
    """Of `then`, for so many rows and columns."""
    made = jax.eval_shape(then, jax.ShapeDtypeStruct((rows, columns), jnp.float32), *beside)
    return [jax.ShapeDtypeStruct(a.shape, dtype if a.ndim == 2 else jnp.float32) for a in made]


def _loop_rows(pairs, groups: Groups, then: Callable = as_it_is, beside=()):
    x, w, dims = pairs[0]
    block = _block_rows(x, groups)

    def visit(b, results):
        part, summed = lambda a: lax.dynamic_slice_in_dim(a, b * block, block, 0), 0
        for x, w, dims in pairs:
            own = lax.dynamic_index_in_dim(w, groups.owner[b], dims.index("g"), keepdims=False)
            summed += jnp.einsum(f"rk,{dims.replace('g', '')}->rn", part(x), own, preferred_element_type=jnp.float32,
                                 precision=products.precision(own.dtype))
        made = then(summed, *map(part, beside))
        return [lax.dynamic_update_slice_in_dim(whole, a.astype(whole.dtype), b * block, 0)
                for whole, a in zip(results, made, strict=True)]
    results = _results(then, beside, x.shape[0], w.shape[dims.index("n")], x.dtype)
    return lax.fori_loop(0, groups.count[0], visit, [jnp.zeros(a.shape, a.dtype) for a in results])


def _loop_outer(x, y, groups: Groups, dims: str):
    block, at = _block_rows(x, groups), dims.index("g")

    def visit(b, sums):
        part = lambda a: lax.dynamic_slice_in_dim(a, b * block, block, 0)
        own = lax.dynamic_index_in_dim(sums, groups.owner[b], at, keepdims=False)
        new = own + jnp.einsum(f"rk,rn->{dims.replace('g', '')}", part(x), part(y), preferred_element_type=jnp.float32,
                               precision=products.precision(part(y).dtype))
        return lax.dynamic_update_index_in_dim(sums, new, groups.owner[b], at)
    shape = _ordered(dims, g=len(groups.first), k=x.shape[1], n=y.shape[1])
    return lax.fori_loop(0, groups.count[0], visit, jnp.zeros(shape, jnp.float32))


def _ordered(dims: str, **of_letter) -> tuple:
    return tuple(of_letter[letter] for letter in dims)


def _loop_block(rows: int, groups: int) -> int:
    """About an eighth of what a group has, so that little is filled up: of groups of 512 blocks of 256, 128, 64 and 32
    rows took a training step 1.50, 1.47, 1.35 and 1.43 times a dense one's CPU seconds. Beyond 128 rows a product is no
    faster."""
    return 1 << max(3, min(7, (rows // (8 * max(groups, 1))).bit_length() - 1))


def loop() -> GroupedEngine:
    return GroupedEngine(_copied, _loop_rows, _loop_outer, _loop_block)


# ---- Pallas kernels for GPUs -----------------------------------------------------------------------------------------


def _dot(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=products.precision(x.dtype))


def _turned(a, dims: str):
    """A tile of "kn" as it stands in an array of `dims`, and back."""
    return a.T if dims.index("n") < dims.index("k") else a


def _reader(x_ref, at):
    """columns -> these of the rows `at`."""
    if not isinstance(x_ref, Taken):
        return lambda columns: x_ref[at, columns]
    number = x_ref.number[at][:, None]

    def read(columns):
        at = jnp.broadcast_arrays(number, (columns.start + jnp.arange(columns.size))[None, :])
        return triton.load(x_ref.of.at[*at], mask=at[0] >= 0, other=0.0)
    return read


def _array(x):
    return x.of if isinstance(x, Taken) else x


def _rows_kernel(owner_ref, count_ref, pairs, beside_refs, *result_refs, then: Callable,
                 all_dims, steps, tile: tuple[int, int]):
    """One block of rows, one tile of columns; an unused block ends at once."""
    column, b, (block, width) = pl.program_id(0), pl.program_id(1), tile

    @pl.when(b < count_ref[0])
    def _():
        own, columns, summed = owner_ref[b], pl.ds(column * width, width), jnp.zeros(tile, jnp.float32)
        for (x_ref, w_ref), dims, step in zip(pairs, all_dims, steps, strict=True):
            read = _reader(x_ref, pl.ds(b * block, block))

            def visit(i, summed):
                at = pl.ds(i * step, step)
                return summed + _dot(read(at), _turned(w_ref[_ordered(dims, g=own, k=at, n=columns)], dims))
            summed = lax.fori_loop(0, _array(x_ref).shape[1] // step, visit, summed)
        for ref, a in zip(result_refs, then(summed, *(ref[...] for ref in beside_refs)), strict=True):
            ref[...] = a.astype(ref.dtype)


def _triton_rows(pairs, groups: Groups, then: Callable = as_it_is, beside=(), *,
                 by_size: Mapping[int, tiles.GroupedTile], interpret: bool):
    (first, w, dims), all_dims = pairs[0], [dims for _, _, dims in pairs]
    of, N = by_size[_array(first).dtype.itemsize], w.shape[dims.index("n")]
    width = _tile(N, of.columns if sum(a.shape[1] > 1 for a in beside) < 2 else of.beside)
    steps = [_tile(_array(x).shape[1], of.step) for x, _, _ in pairs]
    xs = [_padded(x, step, 1) for (x, _, _), step in zip(pairs, steps)]
    ws = [_padded(_padded(w, width, dims.index("n")), step, dims.index("k"))
          for (_, w, dims), step in zip(pairs, steps)]
    beside = [a if a.shape[1] == 1 else _padded(a, width, 1) for a in beside]
    block, columns = _block_rows(first, groups), ws[0].shape[dims.index("n")]
    rows, tiled = block * len(groups.owner), columns // width
    spec = lambda columns: pl.BlockSpec((block, columns), lambda j, b: (b, 0 if columns == 1 else j))
    shapes, pairs = _results(then, beside, rows, columns, _array(first).dtype), list(zip(xs, ws))
    results = pl.pallas_call(
        partial(_rows_kernel, then=then, all_dims=all_dims, steps=steps, tile=(block, width)),
        grid=(tiled, rows // block),
        in_specs=[pl.no_block_spec, pl.no_block_spec, _whole(pairs), [spec(min(a.shape[1], width)) for a in beside]],
        out_specs=[spec(width) if a.ndim == 2 else pl.BlockSpec((None, block), lambda j, b: (j, b)) for a in shapes],
        out_shape=[a if a.ndim == 2 else jax.ShapeDtypeStruct((tiled, rows), a.dtype) for a in shapes],
        name="grouped_rows_" + dims, interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=of.warps, num_stages=of.stages))(
            groups.owner, groups.count, pairs, beside)
    return [a[:, :N] if shape.ndim == 2 else a.sum(0) for a, shape in zip(results, shapes)]


def _whole(operands):
    return jax.tree.map(lambda a: pl.no_block_spec, operands)


def _outer_kernel(first_ref, blocks_ref, x_ref, y_ref, sums_ref, *, block: int, step: int,
                  tile: tuple[int, int], dims: str):
    """One tile of one group's matrix, over all of the group's rows."""
    (height, width), group = tile, pl.program_id(2)
    columns_x, columns_y = pl.ds(pl.program_id(1) * height, height), pl.ds(pl.program_id(0) * width, width)
    start = first_ref[group] * block

    def visit(i, sums):
        at = pl.ds(start + i * step, step)
        return sums + _dot(_reader(x_ref, at)(columns_x).T, _reader(y_ref, at)(columns_y))
    trips = blocks_ref[group] * (block // step)
    sums_ref[...] = _turned(lax.fori_loop(0, trips, visit, jnp.zeros(tile, jnp.float32)), dims)


def _triton_outer(x, y, groups: Groups, dims: str, *, by_size: Mapping[int, tiles.GroupedTile], interpret: bool):
    of = by_size[_array(x).dtype.itemsize]
    K, N, G, block = _array(x).shape[1], _array(y).shape[1], len(groups.first), _block_rows(x, groups)
    height, width, step = _tile(K, of.rows), _tile(N, of.columns), min(of.step, block)
    x, y = _padded(x, height, 1), _padded(y, width, 1)
    columns_x, columns_y = _array(x).shape[1], _array(y).shape[1]
    sums = pl.pallas_call(
        partial(_outer_kernel, block=block, step=step, tile=(height, width), dims=dims),
        grid=(columns_y // width, columns_x // height, G),
        in_specs=[pl.no_block_spec, pl.no_block_spec, _whole(x), _whole(y)],
        out_specs=pl.BlockSpec(_ordered(dims, g=None, k=height, n=width),
                               lambda j, i, g: _ordered(dims, g=g, k=i, n=j)),
        out_shape=jax.ShapeDtypeStruct(_ordered(dims, g=G, k=columns_x, n=columns_y), jnp.float32),
        name=f"grouped_outer_{dims}", interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=of.warps, num_stages=of.stages))(
            groups.first, groups.blocks, x, y)
    return sums[_ordered(dims, g=slice(None), k=slice(K), n=slice(N))]


def _tile(n: int, most: int) -> int:
    """A power of two up to `most`: the largest that divides n, or, where only small ones do, one to which n is filled
    up."""
    divides = n & -n
    return min(most, divides if divides >= 32 else max(16, pl.next_power_of_2(n)))


def _padded(a, multiple: int, axis: int):
    if isinstance(a, Taken):
        return a._replace(of=_padded(a.of, multiple, axis))
    if a.shape[axis] % multiple == 0:
        return a
    return jnp.pad(a, [(0, -n % multiple if dim == axis else 0) for dim, n in enumerate(a.shape)])


def kernels(by_size: Mapping[int, tiles.GroupedTile] = tiles.GROUPED, interpret: bool = False) -> GroupedEngine:
    """by_size: tiles by the bytes of an element; all with blocks of equal rows."""
    (rows,) = {of.rows for of in by_size.values()}
    given = dict(by_size=by_size, interpret=interpret)
    return GroupedEngine(Taken, partial(_triton_rows, **given), partial(_triton_outer, **given), lambda *_: rows)
