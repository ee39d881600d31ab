"""Grouped matmuls: each row times its group's matrix. The groups are the experts of an MoE layer.

Rows [R, …] are stored in blocks, and each block belongs to one group. A group's blocks are contiguous, and its last
block is padded with zeros. Blocks after the last used one are neither read nor written. `ragged_dot` is not used,
because on NVIDIA GPUs XLA multiplies every row by every group's matrix and masks the results (openxla/xla 40189).

There are two engines. `loop` is an XLA loop over blocks, on any device. `kernels` are Pallas kernels with one tile per
program, which gather their rows on the fly (as ScatterMoE, arXiv:2403.08245). On Hopper this engine uses the kernels of
`mosaic_grouped` for rows that are stored in order. Callers write the backward. This module knows no experts and no
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

from meshtrain.kernels import mosaic_grouped, products, tiles
from meshtrain.kernels.warpgroups import TILE
from meshtrain.lazy import triton


class Groups(NamedTuple):
    """The assignment of blocks to G groups; int32."""
    owner: jax.Array      # [blocks] group of each block; arbitrary if unused
    count: jax.Array      # [1] number of used blocks
    first: jax.Array      # [G] first block of each group
    blocks: jax.Array     # [G] number of blocks of each group


class Taken(NamedTuple):
    """Rows of an array by index; a negative index is a row of zeros.

    Kernels gather the rows on the fly, without a copy.
    """
    of: jax.Array         # [A, K]
    number: jax.Array     # [R] int32


class GroupedOperands(NamedTuple):
    """x_RK (or a Taken) times the matrix of each row's group.

    dims: the order of w's dims, a permutation of "gkn", so that no transposed copy of w is needed.
    """
    x: jax.Array | Taken
    w: jax.Array
    dims: str


class GroupedEngine(NamedTuple):
    """The functions of an engine.

    take(a_AK, number_R) -> the rows with these numbers, in the form that `rows` and `outer` accept.

    rows(pairs, groups, then, beside) -> the results of `then` on the sum of the products, [R, N] float32. then(sum,
    *beside) is called on tiles and returns a tuple. Each element is either [rows, columns], which is rounded to x's
    dtype in the result, or a sum over columns, [rows] float32. beside: arrays [R, N], or [R, 1], which is broadcast
    over columns.

    outer(x_RK, y_RN, groups, dims) -> the gradient of the matrices, float32, in this order of dims; zeros for groups
    without rows.

    block(rows, groups) -> rows per block.
    """
    take: Callable
    rows: Callable
    outer: Callable
    block: Callable


def as_it_is(summed):
    return summed,


def groups_of(sizes_G, num_blocks: int, block: int) -> Groups:
    """Assign blocks to groups of sizes_G rows. At least one block is used, so that row 0 is always written."""
    blocks = (sizes_G + block - 1) // block
    blocks = blocks.at[0].add(jnp.where(blocks.sum() == 0, 1, 0))
    ends = jnp.cumsum(blocks)
    owner = jnp.sum(ends[None, :] <= jnp.arange(num_blocks)[:, None], 1)

    def as_int(a):
        return a.astype(jnp.int32)
    return Groups(as_int(jnp.minimum(owner, len(sizes_G) - 1)), as_int(ends[-1:]), as_int(ends - blocks),
                  as_int(blocks))


def owners(groups: Groups, rows) -> tuple[jax.Array, jax.Array]:
    """Return ([R] the group of each of these rows, [R] whether the row's block is used)."""
    num_rows = (rows.number if isinstance(rows, Taken) else rows).shape[0]
    block = jnp.arange(num_rows) // (num_rows // groups.owner.shape[0])
    return groups.owner[block], block < groups.count[0]


def sums(x_RN, groups: Groups):
    """Return the sum of each group's rows, [G, N] float32.

    The sum is computed as a matmul, because G is small compared with a matrix's rows."""
    owner, used = owners(groups, x_RN)
    mine_RG = (owner[:, None] == jnp.arange(groups.first.shape[0])) & used[:, None]
    return products.einsum("RG,RN->GN", mine_RG.astype(x_RN.dtype), jnp.where(used[:, None], x_RN, 0), jnp.float32)


def count_executed_rows(rows: float, groups: float, block: int) -> float:
    """Return the rows in the blocks of equally large groups. On average half of a group's last block is padding.

    A group has at least one block.
    """
    each = rows / groups
    return groups * block * (max(1.0, each / block + 0.5) if each > 1 else each)


# ---- XLA: a loop over the used blocks --------------------------------------------------------------------------------


def _block_rows(x, groups: Groups) -> int:
    return (x.number if isinstance(x, Taken) else x).shape[0] // groups.owner.shape[0]


def _copy_rows(a, number):
    """Copy rows. Missing rows are multiplied by 0, because with `where` XLA carries [R, K] zeros through a loop."""
    return a[jnp.maximum(number, 0)] * (number >= 0)[:, None].astype(a.dtype)


def _results(then: Callable, beside, rows: int, columns: int, dtype) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of `then`'s results for this many rows and columns."""
    made = jax.eval_shape(then, jax.ShapeDtypeStruct((rows, columns), jnp.float32), *beside)
    return [jax.ShapeDtypeStruct(a.shape, dtype if a.ndim == 2 else jnp.float32) for a in made]


def _loop_rows(pairs, groups: Groups, then: Callable = as_it_is, beside=()):
    x, w, dims = pairs[0]
    block = _block_rows(x, groups)

    def visit(b, results):
        part, summed = lambda a: lax.dynamic_slice_in_dim(a, b * block, block, 0), 0
        for x, w, dims in pairs:
            own = lax.dynamic_index_in_dim(w, groups.owner[b], dims.index("g"), keepdims=False)
            summed += products.einsum(f"rk,{dims.replace('g', '')}->rn", part(x), own, jnp.float32)
        made = then(summed, *map(part, beside))
        return [lax.dynamic_update_slice_in_dim(whole, a.astype(whole.dtype), b * block, 0)
                for whole, a in zip(results, made, strict=True)]
    results = _results(then, beside, x.shape[0], w.shape[dims.index("n")], x.dtype)
    return lax.fori_loop(0, groups.count[0], visit, [jnp.zeros(a.shape, a.dtype) for a in results])


def _loop_outer(x, y, groups: Groups, dims: str):
    block, at = _block_rows(x, groups), dims.index("g")

    def visit(b, sums):
        def part(a):
            return lax.dynamic_slice_in_dim(a, b * block, block, 0)
        own = lax.dynamic_index_in_dim(sums, groups.owner[b], at, keepdims=False)
        new = own + products.einsum(f"rk,rn->{dims.replace('g', '')}", part(x), part(y), jnp.float32)
        return lax.dynamic_update_index_in_dim(sums, new, groups.owner[b], at)
    shape = _order_dims(dims, g=len(groups.first), k=x.shape[1], n=y.shape[1])
    return lax.fori_loop(0, groups.count[0], visit, jnp.zeros(shape, jnp.float32))


def _order_dims(dims: str, **of_letter) -> tuple:
    return tuple(of_letter[letter] for letter in dims)


def _loop_block(rows: int, groups: int) -> int:
    """Return rows per block: about an eighth of a group's rows, to limit padding.

    With 512 rows a group, a training step took 1.50, 1.47, 1.35 and 1.43 times a dense model's CPU seconds in blocks of
    256, 128, 64, 32. Matmuls of more than 128 rows are no faster.
    """
    return 1 << max(3, min(7, (rows // (8 * max(groups, 1))).bit_length() - 1))


def loop() -> GroupedEngine:
    return GroupedEngine(_copy_rows, _loop_rows, _loop_outer, _loop_block)


# ---- Pallas kernels for GPUs -----------------------------------------------------------------------------------------


def _dot(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=products.precision(x.dtype))


def _transpose(a, dims: str):
    """Transpose a "kn" tile to the order of `dims`, or back."""
    return a.T if dims.index("n") < dims.index("k") else a


def _reader(x_ref, at):
    """Return a function that maps columns to these columns of the rows `at`."""
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
    """Compute one block of rows × one tile of columns. An unused block returns at once."""
    column, b, (block, width) = pl.program_id(0), pl.program_id(1), tile

    @pl.when(b < count_ref[0])
    def _():
        own, columns, summed = owner_ref[b], pl.ds(column * width, width), jnp.zeros(tile, jnp.float32)
        for (x_ref, w_ref), dims, step in zip(pairs, all_dims, steps, strict=True):
            read = _reader(x_ref, pl.ds(b * block, block))

            def visit(i, summed):
                at = pl.ds(i * step, step)
                return summed + _dot(read(at), _transpose(w_ref[_order_dims(dims, g=own, k=at, n=columns)], dims))
            summed = lax.fori_loop(0, _array(x_ref).shape[1] // step, visit, summed)
        for ref, a in zip(result_refs, then(summed, *(ref[...] for ref in beside_refs)), strict=True):
            ref[...] = a.astype(ref.dtype)


def _triton_rows(pairs, groups: Groups, then: Callable = as_it_is, beside=(), *,
                 by_size: Mapping[int, tiles.GroupedTiles], interpret: bool):
    (first, w, dims), all_dims = pairs[0], [dims for _, _, dims in pairs]
    contracted, N = sum(_array(x).shape[1] for x, _, _ in pairs), w.shape[dims.index("n")]
    of = by_size[_array(first).dtype.itemsize].of(contracted, sum(a.shape[1] > 1 for a in beside))
    width = _tile(N, of.columns)
    steps = [_tile(_array(x).shape[1], of.step) for x, _, _ in pairs]
    xs = [_pad(x, step, 1) for (x, _, _), step in zip(pairs, steps)]
    ws = [_pad(_pad(w, width, dims.index("n")), step, dims.index("k"))
          for (_, w, dims), step in zip(pairs, steps)]
    beside = [a if a.shape[1] == 1 else _pad(a, width, 1) for a in beside]
    block, columns = _block_rows(first, groups), ws[0].shape[dims.index("n")]
    rows, tiled = block * len(groups.owner), columns // width

    def spec(columns):
        return pl.BlockSpec((block, columns), lambda j, b: (b, 0 if columns == 1 else j))
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


def _outer_kernel(first_ref, blocks_ref, x_ref, y_ref, sums_ref, *, block: int, step: int, tile: tuple[int, int]):
    """Compute one tile of one group's matrix, summed over all rows of the group."""
    (height, width), group = tile, pl.program_id(2)
    columns_x, columns_y = pl.ds(pl.program_id(1) * height, height), pl.ds(pl.program_id(0) * width, width)
    start = first_ref[group] * block

    def visit(i, sums):
        at = pl.ds(start + i * step, step)
        return sums + _dot(_reader(x_ref, at)(columns_x).T, _reader(y_ref, at)(columns_y))
    trips = blocks_ref[group] * (block // step)
    sums_ref[...] = lax.fori_loop(0, trips, visit, jnp.zeros(tile, jnp.float32))


def _triton_outer(x, y, groups: Groups, dims: str, *, by_size: Mapping[int, tiles.GroupedTiles], interpret: bool):
    if dims.index("n") < dims.index("k"):       # yᵀ · x, so that no tile is transposed
        x, y, dims = y, x, dims.translate(str.maketrans("kn", "nk"))
    of = by_size[_array(x).dtype.itemsize].outer
    K, N, G, block = _array(x).shape[1], _array(y).shape[1], len(groups.first), _block_rows(x, groups)
    height, width, step = _tile(K, of.rows), _tile(N, of.columns), min(of.step, block)
    x, y = _pad(x, height, 1), _pad(y, width, 1)
    columns_x, columns_y = _array(x).shape[1], _array(y).shape[1]
    sums = pl.pallas_call(
        partial(_outer_kernel, block=block, step=step, tile=(height, width)),
        grid=(columns_y // width, columns_x // height, G),
        in_specs=[pl.no_block_spec, pl.no_block_spec, _whole(x), _whole(y)],
        out_specs=pl.BlockSpec(_order_dims(dims, g=None, k=height, n=width),
                               lambda j, i, g: _order_dims(dims, g=g, k=i, n=j)),
        out_shape=jax.ShapeDtypeStruct(_order_dims(dims, g=G, k=columns_x, n=columns_y), jnp.float32),
        name=f"grouped_outer_{dims}", interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=of.warps, num_stages=of.stages))(
            groups.first, groups.blocks, x, y)
    return sums[_order_dims(dims, g=slice(None), k=slice(K), n=slice(N))]


def _tile(n: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides n. If only small powers of two divide n, it is one to
    which n is padded.
    """
    divides = n & -n
    return min(most, divides if divides >= 32 else max(16, pl.next_power_of_2(n)))


def _pad(a, multiple: int, axis: int):
    if isinstance(a, Taken):
        return a._replace(of=_pad(a.of, multiple, axis))
    if a.shape[axis] % multiple == 0:
        return a
    return jnp.pad(a, [(0, -n % multiple if dim == axis else 0) for dim, n in enumerate(a.shape)])


def _mosaic_rows(pairs, groups: Groups, then: Callable = as_it_is, beside=(), *, programs: int, otherwise: Callable):
    """Use `mosaic_grouped` for bfloat16 rows in order without an epilogue (`then`). Use `otherwise` for all other rows,
    and for the summands of narrow matrices (of adapters)."""
    (_, w, dims), block = pairs[0], _block_rows(pairs[0].x, groups)
    wide, narrow = ([pair for pair in pairs if (_array(pair.x).shape[1] % mosaic_grouped.STEP == 0) == wanted]
                    for wanted in (True, False))
    plain = bool(wide) and wide[0] is pairs[0] and all(
        not isinstance(x, Taken) and x.dtype == w.dtype == jnp.bfloat16 and own == dims for x, w, own in wide)
    if plain and then is as_it_is and block == TILE and mosaic_grouped.columns_of(w.shape[dims.index("n")]):
        summed = mosaic_grouped.rows([pair[:2] for pair in wide], dims, groups.owner, groups.count, programs)
        return otherwise(narrow, groups, lambda more, summed: (more + summed,), [summed]) if narrow else [summed]
    return otherwise(pairs, groups, then, beside)


def kernels(by_size: Mapping[int, tiles.GroupedTiles] = tiles.GROUPED, interpret: bool = False,
            programs: int = 0) -> GroupedEngine:
    """Return the engine of the Pallas kernels.

    by_size: tiles by bytes per element, all with the same rows per block. programs: number of programs of
    `mosaic_grouped`, for Hopper GPUs; with 0 it is not used.
    """
    (block,) = {of.rows for of in by_size.values()}
    rows = partial(_triton_rows, by_size=by_size, interpret=interpret)
    return GroupedEngine(Taken, partial(_mosaic_rows, programs=programs, otherwise=rows) if programs else rows,
                         partial(_triton_outer, by_size=by_size, interpret=interpret), lambda *_: block)
