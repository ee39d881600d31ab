"""The common parts of the recurrence's Pallas kernels: launch, matmuls, and the inverse of a chunk's matrix.

Sources: those of `recurrence_pallas`. This module knows no mesh.
"""
from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.lazy import triton

NAME = "meshtrain_recurrence"           # kernel names in profiles and in the compiled program
DELTA = "_delta"        # suffix of the names of kernels that may also run without the delta rule
CHANNELS = "channels_"  # prefix of the names of kernels with decays per channel
CHUNK = 64
COLUMNS = 32            # columns of the state in one program that visits all chunks: four programs for each head of 128
KEY_COLUMNS = 64        # columns of keys in one program of `_gradients`; with 128 it spills
ROWS = 16               # rows of a diagonal block that is inverted row by row
MIN_WIDTH = 16          # smallest width that tensor cores contract


class Launch(NamedTuple):
    """Sizes and mode of the kernels. interpret: run them by XLA on any device, for tests."""
    chunk: int = CHUNK
    columns: int = COLUMNS
    key_columns: int = KEY_COLUMNS
    interpret: bool = False


def call(launch: Launch, kernel, what: str, warps: int, stages: int, delta: bool = False, **kwargs):
    return pl.pallas_call(kernel, name=f"{NAME}_{what}{DELTA * delta}", interpret=launch.interpret,
                          compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages), **kwargs)


EXACT, CLOSE = lax.DotAlgorithmPreset.BF16_BF16_F32_X6, lax.DotAlgorithmPreset.BF16_BF16_F32_X3


def dot(x, y, of_float32=EXACT):
    """Return x y, summed in float32.

    Float32 operands are split into bfloat16 parts, whose products are exact to 2^-24, or to 2^-16 with CLOSE. Without
    the split the matmul could not use tensor cores, and the compiler would spill 19 kB a thread.
    """
    precision = of_float32 if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=precision)


def inverse(A):
    """Return (I + A)^-1 of strictly lower triangular A [C, C], float32, by substitution.

    All diagonal blocks of ROWS are inverted at once, row by row. Then blocks are merged by matmuls of whole matrices:
    if T has the inverses of blocks of size b, T - T L T has those of size 2b, where L is the part of A between the two
    blocks.
    """
    C = A.shape[0]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None, :]
    block = min(C, ROWS)
    level = block.bit_length() - 1
    own = (i >> level) == (j >> level)

    def substitute(row, T):
        now = own & ((i & block - 1) == row)        # this row of every block
        a = jnp.sum(jnp.where(now, A, 0.0), 0)
        return T - jnp.where(now, jnp.sum(a[:, None] * T, 0)[None, :], 0.0)
    T = lax.fori_loop(1, block, substitute, jnp.where(i == j, 1.0, 0.0))
    while 1 << level < C:
        between = ((i >> level + 1) == (j >> level + 1)) & ((i >> level) != (j >> level))
        T -= dot(T, dot(jnp.where(between, A, 0.0), T))
        level += 1
    return T


def split_dot(x, y):
    """Return x y of float32 x. If y's dtype is narrower, x is split into two parts of that dtype."""
    if y.dtype == jnp.float32:
        return dot(x, y)
    high = x.astype(y.dtype)
    return dot(high, y) + dot((x - high.astype(jnp.float32)).astype(y.dtype), y)


def chunks(launch: Launch, k, N: int, heads: int | None = None, blocks: int = 1):
    """Return the specs of one chunk for a grid (Z, blocks × N, B).

    The specs are: of values or keys (a function of the width), of decays, of segments, of states [Z, B, N, H, V], and
    of inverses [B, N, Z, C, C]. heads: value heads in one program; None: one head, without a dim. blocks: number of
    programs that share a head's keys.
    """
    (_, T, K, _), C, G = k.shape, launch.chunk, N // k.shape[2]
    by_chunk = pl.BlockSpec((None, T // C), lambda z, n, b: (b, 0))

    def of(width: int, key: bool = False, part: bool = False):
        group = G if key and heads is None else 1
        return pl.BlockSpec((None, C, None if key else heads, width),
                            lambda z, n, b: (b, z, n // blocks // group, n % blocks if part else 0))
    return (of, pl.BlockSpec((None, heads, C), lambda z, n, b: (b, n // blocks, z)),
            (pl.BlockSpec((None, C), lambda z, n, b: (b, z)), by_chunk, by_chunk),
            lambda H, V: pl.BlockSpec((None, None, heads, H, V), lambda z, n, b: (z, b, n // blocks, n % blocks, 0)),
            pl.BlockSpec((None, heads, None, C, C), lambda z, n, b: (b, n // blocks, z, 0, 0)))


def spec_for(x, spec):
    """Return the spec of an argument; None if the argument is None."""
    return None if x is None else spec
