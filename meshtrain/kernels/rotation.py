"""RMSNorm over each head and its rotary embedding in one pass, as Pallas kernels lowered through Triton.

XLA compiles norm and rotation to several kernels, forward and backward, each of which reads the heads again. In a step
of Qwen3 30B-A3B's layers on an H200 XLA's kernels take about 20 ms; the kernels of this module take 9.7 ms
(benchmarks/gpu.md). The forward reads x and writes y. The backward reads x and dy and writes dx. Arrays are flattened
to one row per token and head. XLA has no partitioning rule for the kernels: as with `pallas`, all mesh axes must be
manual. This module knows no mesh.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from meshtrain.lazy import triton

NAME = "meshtrain_rotation"         # kernel name in profiles and in the compiled program
BLOCK_ELEMENTS = 8192               # elements per program, in four warps: 64 float32 a thread, for x and for dy


def fits(head_dim: int, rotated: int) -> bool:
    """Return whether the kernels support this head_dim with this many rotated dims."""
    return head_dim == rotated and 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0


class _Rows:
    """A program's block of rows, loaded as two halves of head_dim, with the cos and sin of its tokens."""

    def __init__(self, heads: int, num_rows: int, block: int, half: int):
        self.rows, self.half = pl.program_id(0) * block + jnp.arange(block), half
        self.at = jnp.broadcast_arrays(self.rows[:, None], jnp.arange(half)[None, :])
        self.tokens, self.live = self.at[0] // heads, self.at[0] < num_rows

    def halves(self, ref):
        row, column = self.at

        def load(at):
            return triton.load(ref.at[row, at], mask=self.live, other=0.0).astype(jnp.float32)
        return load(column), load(column + self.half)

    def put(self, ref, first, second):
        row, column = self.at
        for at, x in ((column, first), (column + self.half, second)):
            triton.store(ref.at[row, at], x.astype(ref.dtype), mask=self.live)

    def table(self, ref):
        return triton.load(ref.at[self.tokens, self.at[1]], mask=self.live, other=0.0)

    def scales(self, ref):
        return ref[pl.ds(0, self.half)][None, :], ref[pl.ds(self.half, self.half)][None, :]


def _mean(first, second):
    return (first.sum(1, keepdims=True) + second.sum(1, keepdims=True)) / (2 * first.shape[1])


def _forward_kernel(x_ref, scale_ref, cos_ref, sin_ref, y_ref, *, rows: partial, eps: float):
    block = rows()
    (x, x2), (scale, scale2) = block.halves(x_ref), block.scales(scale_ref)
    cos, sin = map(block.table, (cos_ref, sin_ref))
    inverse = jax.lax.rsqrt(_mean(x * x, x2 * x2) + eps)
    x, x2 = x * inverse * scale, x2 * inverse * scale2
    block.put(y_ref, x * cos - x2 * sin, x2 * cos + x * sin)


def _backward_kernel(x_ref, scale_ref, cos_ref, sin_ref, dy_ref, dx_ref, dscale_ref, *, rows: partial, eps: float):
    block = rows()
    (x, x2), (dy, dy2), (scale, scale2) = block.halves(x_ref), block.halves(dy_ref), block.scales(scale_ref)
    cos, sin = map(block.table, (cos_ref, sin_ref))
    dy, dy2 = dy * cos + dy2 * sin, dy2 * cos - dy * sin
    inverse = jax.lax.rsqrt(_mean(x * x, x2 * x2) + eps)
    x, x2 = x * inverse, x2 * inverse
    dscale_ref[pl.ds(0, block.half)] = (dy * x).sum(0)
    dscale_ref[pl.ds(block.half, block.half)] = (dy2 * x2).sum(0)
    dy, dy2 = dy * scale, dy2 * scale2
    along = _mean(dy * x, dy2 * x2)
    block.put(dx_ref, (dy - x * along) * inverse, (dy2 - x2 * along) * inverse)


def _call(kernel, name: str, x_BTNH, scale_H, cos_BTR, sin_BTR, more, eps: float, interpret: bool, sums: bool):
    *_, N, H = x_BTNH.shape
    count, block = x_BTNH.size // H, BLOCK_ELEMENTS // H
    grid = -(-count // block)

    def flat(a):
        return a.reshape(-1, a.shape[-1])
    shapes = [jax.ShapeDtypeStruct((count, H), x_BTNH.dtype)]
    specs = [pl.no_block_spec]
    if sums:
        shapes.append(jax.ShapeDtypeStruct((grid, H), jnp.float32))
        specs.append(pl.BlockSpec((None, H), lambda i: (i, 0)))
    args = flat(x_BTNH), scale_H, flat(cos_BTR), flat(sin_BTR), *map(flat, more)
    rotated = pl.pallas_call(
        partial(kernel, rows=partial(_Rows, N, count, block, H // 2), eps=eps), grid=(grid,),
        in_specs=[pl.no_block_spec] * len(args), out_specs=specs, out_shape=shapes, name=f"{NAME}_{name}",
        interpret=interpret, compiler_params=triton.CompilerParams(num_warps=4, num_stages=1))(*args)
    return [rotated[0].reshape(x_BTNH.shape), *rotated[1:]]


def forward(x_BTNH, scale_H, cos_BTR, sin_BTR, eps: float, interpret: bool = False):
    """Return y, of x's shape and dtype. scale: float32. cos, sin: float32, with R = H / 2, as in `model.rope.Rope`."""
    return _call(_forward_kernel, "forward", x_BTNH, scale_H, cos_BTR, sin_BTR, (), eps, interpret, False)[0]


def backward(x_BTNH, scale_H, cos_BTR, sin_BTR, dy_BTNH, eps: float, interpret: bool = False):
    """Return (dx of x's shape and dtype, the gradient of scale [H] float32)."""
    dx, sums = _call(_backward_kernel, "backward", x_BTNH, scale_H, cos_BTR, sin_BTR, (dy_BTNH,), eps, interpret, True)
    return dx, sums.sum(0)
