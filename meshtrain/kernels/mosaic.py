"""Flash attention with documents and windows for Hopper GPUs, as Pallas kernels lowered through Mosaic GPU.

The tokens of a document are contiguous. A query therefore attends to one interval of keys, and one interval of queries
attends to a key. Causal masks, windows and chunk offsets only shorten the intervals. `intervals` computes them outside
the kernels, which need neither segments nor a mask. `bounds` computes the steps that a block of rows visits, and which
of them need no mask. The backward is one kernel for dq and one for dk and dv. It uses no atomics, so it is
deterministic. As with `pallas`, all mesh axes must be manual. Source: FlashAttention-3, arXiv:2407.08608. This module
knows no mesh.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from meshtrain import hardware
from meshtrain.kernels import mosaic_backward, mosaic_forward
from meshtrain.kernels.engine import Engine, Mask, Scores
from meshtrain.kernels.warpgroups import TILE, Call

NAME = "meshtrain_mosaic"               # kernel name in profiles and in the compiled program
COMPUTE_CAPABILITY = 9                  # wgmma and setmaxnreg exist on sm_90a only
AUTO_SINCE = (0, 11)                    # "auto" takes them from this jax on: the first one with a comparison on a GPU
# Padded widths of keys and values -> (block, stages) of the forward, of dq and of dkv. With widths 192 and 128, dkv
# spills 660 bytes a thread with blocks of 64. Width 256 is not here: its backward needs 266 KB of shared memory, so
# `pallas` computes it.
BLOCKS = {(64, 64): ((128, 2), (64, 2), (64, 2)), (128, 128): ((128, 2), (64, 2), (64, 2)),
          (192, 128): ((128, 2), (64, 2), (32, 2))}


def engine(scores: Scores = Scores(), interpret=False) -> Engine:
    """Return the Mosaic engine, for bfloat16 or float16.

    Keys and values have widths up to 128, or keys up to 192 with values up to 128.

    The tokens of a segment must be contiguous. Otherwise lse of a query and dk of a key are NaN. interpret: jax's
    InterpretGPUParams, for tests on CPUs.
    """
    return Engine(partial(_forward, scores=scores, interpret=interpret),
                  partial(_backward, scores=scores, interpret=interpret), partitions=False)


def runs_on(gpu: hardware.Gpu | None) -> bool:
    """Return whether this GPU can run the Mosaic kernels."""
    return gpu is not None and gpu.chip is not None and gpu.chip.compute_capability == COMPUTE_CAPABILITY


def is_taken_on(gpu: hardware.Gpu | None) -> bool:
    """Return whether Mosaic kernels are the default on this GPU with this version of jax."""
    return runs_on(gpu) and jax.__version_info__ >= AUTO_SINCE


def widths_of(head_dim: int, value_dim: int = 0) -> tuple[int, int] | None:
    """Return the widths to which keys and values are padded; None if the kernels have no such widths. value_dim: the
    width of values; 0: as keys.
    """
    return next(((H, V) for H, V in BLOCKS if head_dim <= H and (value_dim or head_dim) <= V), None)


def intervals(own_BT, other_BS, mask: Mask, own_are_queries: bool):
    """Return (low, high, single) for each token of `own`; low and high are int32, single is bool, all [B, T].

    The token attends to `other` (or is attended to by it) from low to high, exclusive. single: whether the visible
    tokens really are one interval.
    """
    T, S = own_BT.shape[1], other_BS.shape[1]
    low = jnp.zeros(own_BT.shape, jnp.int32)
    high, single = low + S, jnp.ones(own_BT.shape, bool)
    if mask.documents:      # reductions that XLA fuses; a binary search would be 13 small kernels in turn
        same, at = own_BT[:, :, None] == other_BS[:, None, :], jnp.arange(S, dtype=jnp.int32)
        low = jnp.min(jnp.where(same, at, S), -1)
        high = jnp.max(jnp.where(same, at + 1, 0), -1)
        single = jnp.sum(same, -1, dtype=jnp.int32) == jnp.maximum(high - low, 0)
    at = jnp.arange(T, dtype=jnp.int32)
    # Query t attends to key s if 0 <= t + ahead - s < window. The lower bound applies only with `causal`.
    if own_are_queries:
        high = jnp.minimum(high, at + mask.ahead + 1) if mask.causal else high
        low = jnp.maximum(low, at + mask.ahead - mask.window + 1) if mask.window else low
    else:
        low = jnp.maximum(low, at - mask.ahead) if mask.causal else low
        high = jnp.minimum(high, at - mask.ahead + mask.window) if mask.window else high
    low = jnp.clip(low, 0, S)
    return low, jnp.clip(high, low, S), single


def bounds(low, high, step: int):
    """Return int32 [B, tiles, 4]: (start, bare_start, bare_stop, stop) for each tile of `TILE` rows.

    The unit is a block of `step` tokens. All tokens visible to a tile's rows are in [start, stop). In [bare_start,
    bare_stop) every pair is visible.
    """
    low, high = (x.reshape(x.shape[0], -1, TILE) for x in (low, high))
    some = high > low
    stop = -(-jnp.where(some, high, 0).max(-1) // step)
    start = jnp.minimum(jnp.where(some, low, jnp.iinfo(jnp.int32).max).min(-1) // step, stop)
    bare_start = jnp.clip(-(-low.max(-1) // step), start, stop)
    bare_stop = jnp.clip(high.min(-1) // step, bare_start, stop)
    return jnp.stack([start, bare_start, bare_stop, stop], -1).astype(jnp.int32)


def _pad(x, axis: int, width: int = 0):
    """Return x with this axis padded with zeros to whole tiles, and heads padded to `width`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % TILE)
    if width:
        widths[3] = (0, width - x.shape[3])
    return jnp.pad(x, widths)


def _call(what: str, mask: Mask, scores: Scores, head_dim: int, blocks, interpret) -> Call:
    return Call(f"{NAME}_{what}{mask.label}", scores.scale_for(head_dim), scores.softcap, *blocks, interpret)


def _visits(own_BT, other_BS, mask: Mask, own_are_queries: bool, step: int):
    """Return ((low, high, bounds) of padded rows, `single` of `intervals`). Padding attends to nothing."""
    *ranges, single = intervals(own_BT, other_BS, mask, own_are_queries)
    low, high = (_pad(x, 1) for x in ranges)
    return (low, high, bounds(low, high, step)), single


def _forward(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, mask, *, scores, interpret):
    T, H, V = q_BTNH.shape[1], q_BTNH.shape[3], v_BSKV.shape[3]
    widths = widths_of(H, V)
    blocks = BLOCKS[widths][0]
    q, k = (_pad(x, 1, widths[0]) for x in (q_BTNH, k_BSKH))
    v = _pad(v_BSKV, 1, widths[1])
    visits, single_BT = _visits(q_segments_BT, k_segments_BS, mask, True, blocks[0])
    o, lse = mosaic_forward.forward(_call("forward", mask, scores, H, blocks, interpret), q, k, v, *visits)
    lse_BTN = lse[:, :, :T].swapaxes(1, 2)
    if mask.documents:
        lse_BTN = jnp.where(single_BT[..., None], lse_BTN, jnp.nan)
    # float32 is the engine's contract. If the caller casts back, XLA drops both casts.
    return o[:, :T, :, :V].astype(jnp.float32), lse_BTN


def _backward(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, o_BTNV, lse_BTN, do_BTNV, mask, *, scores,
              interpret):
    H, V = q_BTNH.shape[3], v_BSKV.shape[3]
    widths = widths_of(H, V)
    _, for_dq, for_dkv = BLOCKS[widths]
    delta_BTN = jnp.sum(do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32), -1)
    q, k = (_pad(x, 1, widths[0]) for x in (q_BTNH, k_BSKH))
    v, do = (_pad(x, 1, widths[1]) for x in (v_BSKV, do_BTNV.astype(q_BTNH.dtype)))
    lse, delta = (_pad(x.swapaxes(1, 2), 2) for x in (lse_BTN, delta_BTN))
    args = q, k, v, do, lse, delta
    by_query, _ = _visits(q_segments_BT, k_segments_BS, mask, True, for_dq[0])
    by_key, single_BS = _visits(k_segments_BS, q_segments_BT, mask, False, for_dkv[0])
    dq = mosaic_backward.dq_of(_call("dq", mask, scores, H, for_dq, interpret), *args, *by_query)
    dk, dv = mosaic_backward.dkv_of(_call("dkv", mask, scores, H, for_dkv, interpret), *args, *by_key)

    def cut(x, like):
        return x[:, :like.shape[1], :, :like.shape[3]].astype(jnp.float32)
    dk = cut(dk, k_BSKH)
    dk = jnp.where(single_BS[..., None, None], dk, jnp.nan) if mask.documents else dk
    return cut(dq, q_BTNH), dk, cut(dv, v_BSKV)
