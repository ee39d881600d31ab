"""The interface of all attention engines on one device: the mask, the score function, forward and backward.

A mask depends on positions only. Documents are data, given as segment ids of queries and keys. A window means the same
as in transformers and FlashAttention: a token attends to itself and to the window - 1 tokens before it. An engine
returns (o, lse), and its backward takes o and lse over all keys, so that ring and all-gather attention can be built
from it (FlashAttention-2, arXiv:2307.08691). This module knows no mesh.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

MASKED = -1e30       # finite: a query without visible keys gives zeros, not NaN
LOG2E = math.log2(math.e)       # scores of kernels are base-2 exponents: exp2 is one instruction, exp is two


class Mask(NamedTuple):
    """Bounds on the distance t + ahead - s between query t and key s.

    causal: whether a query attends to no later key. window: number of tokens that a query attends to, including itself;
    0: all. ahead: offset of the first query from the first key, for chunks. documents: whether segment ids must be
    equal.
    """
    causal: bool = True
    window: int = 0
    ahead: int = 0
    documents: bool = True

    def within(self, length: int) -> Mask:
        """Return this mask for sequences of this length. A window that covers whole sequences is dropped."""
        return self._replace(window=self.window if self.window < length else 0)

    def sees(self, q_at, k_at):
        """Return which pairs are visible: a bool array, broadcast over positions; None if all pairs are visible."""
        # Positions are compared directly, because a difference would take a register per pair in kernels.
        late = q_at >= (k_at - self.ahead if self.ahead else k_at) if self.causal else None
        near = q_at < k_at + (self.window - self.ahead) if self.window else None
        return late & near if self.causal and self.window else late if self.causal else near

    def of_blocks(self, q_first, q_last, k_first, k_last):
        """Return (whether any pair of the two blocks is visible, whether all are). The last positions are inclusive."""
        least, most = self.ahead + q_first - k_last, self.ahead + q_last - k_first
        some = every = least <= most
        if self.causal:
            some, every = some & (most >= 0), every & (least >= 0)
        if self.window:
            some, every = some & (least < self.window), every & (most < self.window)
        return some, every

    @property
    def label(self) -> str:
        """Suffix of kernel names: "", "_causal", "_causal_window4096", "_window4096_ahead2048"."""
        return "_causal" * self.causal + (f"_window{self.window}" if self.window else "") + (
            f"_ahead{self.ahead}" if self.ahead else "")


CAUSAL, WHOLE = Mask(), Mask(causal=False)


class Scores(NamedTuple):
    """The score of a query-key product.

    scale: its factor; 0 means 1 / sqrt(head_dim). softcap: tanh bound (Gemma 2, arXiv:2408.00118); 0 means none.
    """
    scale: float = 0.0
    softcap: float = 0.0

    def scale_for(self, head_dim: int) -> float:
        """Return the factor for queries and keys of this width."""
        return self.scale or head_dim ** -0.5


class Output(NamedTuple):
    """The forward's output for some queries over all keys, local or remote, and the cotangent of o."""
    o_BTNV: jax.Array
    lse_BTN: jax.Array
    do_BTNV: jax.Array


class Expansion(NamedTuple):
    """The weights that expand latents into keys and values (`parallel.context.latents`).

    The weights are sharded as in [params]. gather(w): the weight as a matmul reads it, in the compute dtype. place(dw):
    the float32 gradient, sharded as the caller stores it.
    """
    key_CNH: jax.Array          # H without the rotated dims
    value_CNV: jax.Array
    gather: Callable
    place: Callable


class Engine(NamedTuple):
    """Attention of T queries to S keys within segments and a `Mask`. Fully masked blocks are skipped.

    forward(q_BTNH, k_BSKH, v_BSKV, q_segments_BT, k_segments_BS, mask) -> o_BTNV, lse_BTN, both float32. V is the width
    of values, here and in all attention code. lse is the natural log-sum-exp of the scores. A query without visible
    keys gives o = 0 and lse = MASKED. The maximum of each row is not returned. Ring and gather merge by lse, and
    `optimizer.qk_clip` uses lse as an upper bound of the scores, at most log(keys) above the largest score.

    backward(q, k, v, q_segments, k_segments, o, lse, do, mask) -> dq, dk, dv, float32, only from these pairs. o and lse
    are over all keys, local or remote.

    partitions: whether XLA can partition the engine. If not, all mesh axes must be manual.
    """
    forward: Callable
    backward: Callable
    partitions: bool = True
