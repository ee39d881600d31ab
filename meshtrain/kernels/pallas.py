"""Flash attention with documents and windows as Pallas GPU kernels, lowered through Triton.

A block of queries visits only the key blocks that its documents and window reach: about 0.57 of the causal square for
documents of 2,000 tokens in rows of 8,192. `spans` computes these blocks outside the kernels, as the bounds of two
loops: one with masks, and one without for fully visible blocks. The backward is one kernel for dq and one for dk and
dv. It uses no atomics, so it is deterministic. XLA has no partitioning rule for the kernels: along a mesh axis that is
not manual, every device silently computes all heads. Source: FlashAttention-2, arXiv:2307.08691. This module knows no
mesh.
"""
from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels import tiles as tile_table
from meshtrain.kernels.engine import LOG2E, MASKED, Engine, Mask, Scores
from meshtrain.kernels.tiles import Blocks, Tiles
from meshtrain.lazy import triton

LAST = jnp.iinfo(jnp.int32).max
MIN_WIDTH = 16                          # smallest head_dim that tensor cores contract
NAME = "meshtrain_attention"            # kernel name in profiles and in the compiled program


def engine(tiles: Tiles, scores: Scores = Scores(), full: int = tile_table.FULL, interpret: bool = False) -> Engine:
    """Return the Pallas engine with these tiles, for bfloat16 or float16. It also supports float32, but slowly.

    The widths of keys and of values are padded to powers of two, each to its own. full: number of programs that fill
    the GPU. interpret: run the kernels by XLA on any device, for tests.
    """
    return Engine(partial(_forward, tiles=tiles, scores=scores, interpret=interpret),
                  partial(_backward, tiles=tiles, scores=scores, full=full, interpret=interpret), partitions=False)


def spans(own_BT, other_BS, block: int, step: int, mask: Mask, own_are_queries: bool):
    """Return int32 [B, blocks, 4]: (start, bare_start, bare_stop, stop) for each block of `own`, in steps of `other`.

    own, other: segments of queries and keys, or of keys and queries, in whole blocks. [start, stop) covers all steps
    with a visible pair. If segment ids ascend along a row, this range contains no other steps. In [bare_start,
    bare_stop) all pairs are visible.
    """
    # Segment 0 follows the last document, and negative ids are padding. Without this mapping, a block with the end of a
    # document and padding would start at the beginning of the row.

    def at_end(x):
        return jnp.where(x <= 0, LAST + x, x)

    def cut(x, n):
        return at_end(x).reshape(x.shape[0], -1, n)
    own, other = cut(own_BT, block), cut(other_BS, step)
    low, high = own.min(-1)[:, :, None], own.max(-1)[:, :, None]
    other_low, other_high = other.min(-1)[:, None, :], other.max(-1)[:, None, :]
    count, steps = own.shape[1], other.shape[1]
    i, j = jnp.arange(count)[:, None], jnp.arange(steps)[None, :]
    live = (other_high >= low) & (other_low <= high)
    bare = (low == high) & (other_low == other_high) & (low == other_low)
    own_at, other_at = (i * block, (i + 1) * block - 1), (j * step, (j + 1) * step - 1)
    some, every = mask.of_blocks(*own_at, *other_at) if own_are_queries else mask.of_blocks(*other_at, *own_at)
    live &= some
    bare &= live & every
    start = jnp.where(live.any(-1), jnp.argmax(live, -1), 0)
    stop = jnp.where(live.any(-1), steps - jnp.argmax(live[..., ::-1], -1), 0)
    bare_start = jnp.where(bare.any(-1), jnp.argmax(bare, -1), stop)
    first_not_bare = jnp.min(jnp.where(bare | (j < bare_start[..., None]), steps, j), -1)
    bare_stop = jnp.clip(first_not_bare, bare_start, stop)
    return jnp.stack([start, bare_start, bare_stop, stop], -1).astype(jnp.int32)


# ---- shared by the kernels: refs are one block of one head; a row of spans_ref is a row of `spans` -------------------


def _visit_all(spans_ref, i, masked, bare, carry):
    """Scan masked(step, carry) or bare(step, carry) over the steps of block i."""
    start, bare_start, bare_stop, stop = (spans_ref[i, n] for n in range(4))
    before = bare_start - start
    carry = lax.fori_loop(bare_start, bare_stop, bare, carry)

    def step(n):
        return jnp.where(n < before, start + n, bare_stop + n - before)
    return lax.fori_loop(0, before + stop - bare_stop, lambda n, carry: masked(step(n), carry), carry)


def dot(x, y):
    return triton.dot(x, y, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def _visible(q_segments, k_segments, q_at, k_at, mask: Mask):
    """Return whether the pairs are visible: bool [queries, keys], or the shape to which the arguments broadcast."""
    seen, within = q_segments == k_segments, mask.sees(q_at, k_at)
    return seen if within is None else seen & within


def compute_scores(product, scale: float, softcap: float):
    """Return (scores × LOG2E, derivative of the softcap) of query-key products. Without a softcap the derivative is
    None."""
    if not softcap:
        return product * (scale * LOG2E), None
    capped = jnp.tanh(product * (scale / softcap))
    return capped * (softcap * LOG2E), 1 - capped * capped


def _call(kernel, what: str, mask: Mask, blocks: Blocks, interpret: bool, **kwargs):
    compiler_params = triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages)
    return pl.pallas_call(partial(kernel, mask=mask), name=f"{NAME}_{what}{mask.label}",
                          compiler_params=compiler_params,
                          interpret=interpret, **kwargs)


def _pad(x, multiple: int, axis: int, value=0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value)


def _pad_operands(q, k, v, q_segments, k_segments, mask: Mask, rows: int, columns: int):
    """Pad lengths to whole blocks and heads to a power of two. The padding matches no segment."""
    if not mask.documents:
        q_segments, k_segments = jnp.ones_like(q_segments), jnp.ones_like(k_segments)
    return (_pad_heads(q, rows), _pad_heads(k, columns), _pad_heads(v, columns),
            _pad(q_segments, rows, 1, -1), _pad(k_segments, columns, 1, -2))


def _pad_heads(x, multiple: int):
    return _pad(_pad(x, multiple, 1), max(MIN_WIDTH, pl.next_power_of_2(x.shape[3])), 3)


def _over_queries(kernel, what: str, mask: Mask, blocks: Blocks, interpret: bool, out_shape, q, k, v, q_segments,
                  k_segments, *more):
    """Run a kernel in which each program has one block of queries of one head, and all keys. Return its results.

    Arguments in `more` and results are arrays like q, of any width, or [B, N, T].
    """
    (B, T, N, _), S = q.shape, k.shape[1]
    block, step = blocks[:2]
    count, group = T // block, N // k.shape[2]
    # if causal, the longest rows first, so that no program runs alone at the end

    def flip(i):
        return count - 1 - i

    def own(x):
        return pl.BlockSpec((None, block, None, x.shape[3]), lambda i, n, b: (b, flip(i), n, 0))
    row = pl.BlockSpec((None, None, block), lambda i, n, b: (b, n, flip(i)))

    def whole(x):
        return pl.BlockSpec((None, S, None, x.shape[3]), lambda i, n, b: (b, 0, n // group, 0))

    def of(x):
        return own(x) if len(x.shape) == 4 else row
    return _call(
        partial(kernel, step=step), what, mask, blocks, interpret, grid=(count, N, B),
        in_specs=[pl.BlockSpec((None, count, 4), lambda i, n, b: (b, 0, 0)), own(q), whole(k), whole(v),
                  pl.BlockSpec((None, block), lambda i, n, b: (b, flip(i))),
                  pl.BlockSpec((None, S), lambda i, n, b: (b, 0)), *map(of, more)],
        out_specs=jax.tree.map(of, out_shape), out_shape=out_shape,
    )(spans(q_segments, k_segments, block, step, mask, True), q, k, v, q_segments, k_segments, *more)


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward_kernel(spans_ref, q_ref, k_ref, v_ref, q_segments_ref, k_segments_ref, o_ref,
                    lse_ref, *, mask, scale, softcap, step):
    block, V = o_ref.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    q, q_segments = q_ref[...], q_segments_ref[...]
    q_at = i * block + jnp.arange(block)

    def visit(j, carry, masked):
        o, l, m = carry                                 # unnormalized output, running sum and maximum, float32
        keys = pl.ds(j * step, step)
        s, _ = compute_scores(dot(q, k_ref[keys, :].T), scale, softcap)
        if masked:
            k_at = j * step + jnp.arange(step)
            seen = _visible(q_segments[:, None], k_segments_ref[keys][None, :], q_at[:, None], k_at[None, :], mask)
            s = jnp.where(seen, s, MASKED)
        m_new = jnp.maximum(m, s.max(1))
        p = jnp.exp2(s - m_new[:, None])
        keep = jnp.exp2(m - m_new)
        v = v_ref[keys, :]
        return o * keep[:, None] + dot(p.astype(v.dtype), v), l * keep + p.sum(1), m_new

    start = jnp.zeros((block, V), jnp.float32), jnp.zeros(block, jnp.float32), jnp.full(block, MASKED, jnp.float32)
    o, l, m = _visit_all(spans_ref, i, partial(visit, masked=True), partial(visit, masked=False), start)
    some = m > MASKED / 2           # a row without visible keys has summed exp2(0)
    l = jnp.where(some, l, 1.0)
    o_ref[...] = jnp.where(some[:, None], o / l[:, None], 0.0).astype(o_ref.dtype)
    lse_ref[...] = jnp.where(some, m / LOG2E + jnp.log(l), MASKED)


def _forward(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, mask, *, tiles, scores, interpret):
    (B, T, N, H), V = q_BTNH.shape, v_BSKV.shape[3]
    q, k, v, *segments = _pad_operands(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, mask, *tiles.forward[:2])
    shapes = [jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
              jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32)]
    o, lse = _over_queries(
        partial(_forward_kernel, scale=scores.scale_for(H), softcap=scores.softcap), "forward", mask, tiles.forward,
        interpret, shapes, q, k, v, *segments)
    # float32 is the engine's contract. If the caller casts back, XLA drops both casts.
    return o[:, :T, :, :V].astype(jnp.float32), lse[:, :, :T].swapaxes(1, 2)


# ---- backward --------------------------------------------------------------------------------------------------------


def _dq_kernel(spans_ref, q_ref, k_ref, v_ref, q_segments_ref, k_segments_ref, do_ref, lse_ref, delta_ref, dq_ref, *,
               mask, scale, softcap, step):
    block = q_ref.shape[0]
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    q, do, q_segments = q_ref[...], do_ref[...], q_segments_ref[...]
    lse, delta = lse_ref[...] * LOG2E, delta_ref[...]
    q_at = i * block + jnp.arange(block)

    def visit(j, dq, masked):
        keys = pl.ds(j * step, step)
        k, v = k_ref[keys, :], v_ref[keys, :]
        s, slope = compute_scores(dot(q, k.T), scale, softcap)
        s -= lse[:, None]
        if masked:
            k_at = j * step + jnp.arange(step)
            seen = _visible(q_segments[:, None], k_segments_ref[keys][None, :], q_at[:, None], k_at[None, :], mask)
            s = jnp.where(seen, s, MASKED)
        ds = jnp.exp2(s) * (dot(do, v.T) - delta[:, None])
        ds = ds if slope is None else ds * slope
        return dq + dot(ds.astype(k.dtype), k)

    zeros = jnp.zeros(q_ref.shape, jnp.float32)
    dq = _visit_all(spans_ref, i, partial(visit, masked=True), partial(visit, masked=False), zeros)
    dq_ref[...] = (dq * scale).astype(dq_ref.dtype)


def _dkv_kernel(spans_ref, q_ref, k_ref, v_ref, q_segments_ref, k_segments_ref, do_ref,
                lse_ref, delta_ref, dk_ref, dv_ref, *,
                mask, scale, softcap, step, heads):
    """Compute dk and dv of one block of keys. Scores are [keys, queries]: the matmuls with q and do transpose no p."""
    block = k_ref.shape[0]
    j = pl.program_id(0)                    # if causal, the first keys have the most queries
    k, v, k_segments = k_ref[...], v_ref[...], k_segments_ref[...]
    k_at = j * block + jnp.arange(block)

    def head(n, sums):
        def visit(i, sums, masked):
            dk, dv = sums
            queries = pl.ds(i * step, step)
            q, do = q_ref[queries, n, :], do_ref[queries, n, :]
            lse, delta = lse_ref[n, queries] * LOG2E, delta_ref[n, queries]
            s, slope = compute_scores(dot(k, q.T), scale, softcap)
            s -= lse[None, :]
            if masked:
                q_at = i * step + jnp.arange(step)
                seen = _visible(q_segments_ref[queries][None, :], k_segments[:, None],
                                q_at[None, :], k_at[:, None], mask)
                s = jnp.where(seen, s, MASKED)
            p = jnp.exp2(s)
            dv += dot(p.astype(do.dtype), do)
            ds = p * (dot(v, do.T) - delta[None, :])
            ds = ds if slope is None else ds * slope
            return dk + dot(ds.astype(q.dtype), q), dv
        return _visit_all(spans_ref, j, partial(visit, masked=True), partial(visit, masked=False), sums)

    zeros = jnp.zeros(k_ref.shape, jnp.float32), jnp.zeros(v_ref.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, heads, head, zeros) if heads > 1 else head(0, zeros)
    dk_ref[...] = (dk * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _backward(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, o_BTNV, lse_BTN,
              do_BTNV, mask, *, tiles, scores, full, interpret):
    H = q_BTNH.shape[3]
    delta_BTN = jnp.sum(do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32), -1)
    # The same padding serves both kernels.
    rows, columns = math.lcm(tiles.dq.rows, tiles.dkv.columns), math.lcm(tiles.dq.columns, tiles.dkv.rows)
    q, k, v, q_segments, k_segments = _pad_operands(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, mask, rows,
                                                    columns)
    do = _pad_heads(do_BTNV.astype(q.dtype), rows)
    lse, delta = (_pad(x.swapaxes(1, 2), rows, 2) for x in (lse_BTN, delta_BTN))
    args = q, k, v, q_segments, k_segments, do, lse, delta
    common = dict(mask=mask, scale=scores.scale_for(H), softcap=scores.softcap, interpret=interpret)
    dq = dq_of(*args, blocks=tiles.dq, **common)
    dk, dv = dkv_of(*args, blocks=tiles.dkv, full=full, **common)

    def cut(x, like):
        return x[:, :like.shape[1], :, :like.shape[3]].astype(jnp.float32)
    return cut(dq, q_BTNH), cut(dk, k_BSKH), cut(dv, v_BSKV)


def dq_of(q, k, v, q_segments, k_segments, do, lse, delta, *, mask, scale, softcap=0.0,
          blocks: Blocks, interpret=False):
    """Return dq, padded like q.

    The arguments are padded to whole blocks. lse, delta: [B, N, T], where delta = sum(do · o, -1).
    """
    return _over_queries(partial(_dq_kernel, scale=scale, softcap=softcap), "dq", mask, blocks, interpret,
                         jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v, q_segments, k_segments, do, lse, delta)


def dkv_of(q, k, v, q_segments, k_segments, do, lse, delta, *, mask, scale, softcap=0.0,
           blocks: Blocks, full: int, interpret=False):
    """Return (dk, dv), padded like k and v. The arguments are those of `dq_of`."""
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    block, step = blocks[:2]
    count = S // block
    heads = N // K if B * K * count >= full else 1      # query heads per program
    outer = N // heads
    per_kv = outer // K

    def own(x):
        return pl.BlockSpec((None, block, None, x.shape[3]), lambda j, n, b: (b, j, n // per_kv, 0))

    def whole(x):
        return pl.BlockSpec((None, T, heads, x.shape[3]), lambda j, n, b: (b, 0, n, 0))
    row = pl.BlockSpec((None, heads, T), lambda j, n, b: (b, n, 0))

    def out(x):
        return pl.BlockSpec((None, block, None, x.shape[3]), lambda j, n, b: (b, j, n, 0))

    def shape(x):
        return jax.ShapeDtypeStruct((B, S, outer, x.shape[3]), k.dtype if per_kv == 1 else jnp.float32)
    dk, dv = _call(
        partial(_dkv_kernel, scale=scale, softcap=softcap, step=step, heads=heads), "dkv", mask, blocks, interpret,
        grid=(count, outer, B),
        in_specs=[pl.BlockSpec((None, count, 4), lambda j, n, b: (b, 0, 0)), whole(q), own(k), own(v),
                  pl.BlockSpec((None, T), lambda j, n, b: (b, 0)), pl.BlockSpec((None, block), lambda j, n, b: (b, j)),
                  whole(do), row, row],
        out_specs=[out(k), out(v)], out_shape=[shape(k), shape(v)],
    )(spans(k_segments, q_segments, block, step, mask, False), q, k, v, q_segments, k_segments, do, lse, delta)
    return (dk, dv) if per_kv == 1 else tuple(x.reshape(B, S, K, per_kv, -1).sum(3) for x in (dk, dv))
