"""Splits a microbatch's rows into parts, so that one part's collectives overlap with another's matmuls.

With tensor parallelism a layer's matmuls wait for all-gathers of tokens, and later ops wait for reduce-scatters. Parts
share only the weights, so XLA's scheduler can overlap the parts. Each device splits its own rows, so no data moves.
`Inputs` are the inputs of a layer besides the residual stream. This module knows no model. Source: Domino,
arXiv:2409.15241; the implementation here uses sharding constraints in one program.
"""
from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.model import rope
from meshtrain.model.execution import Execution
from meshtrain.model.layers import gather_weight
from meshtrain.model.params import ParamInfo
from meshtrain.sharding import reduced
from meshtrain.sharding.rules import Layout

# Minimum tokens of a part in a tensor group, so a group is split from 4,096 tokens on. Below that, smaller matmuls and
# the sum of gradients cost more than the communication: two parts of 1,024 tokens took 3.80 ms instead of 3.70 for one,
# two parts of 2,048 tokens 6.71 instead of 6.90. Source: a scheduled layer of a 70B model, forward and backward, tensor
# 8 on H100.
MIN_TOKENS = 2048
# More parts take longer to compile, and summing their gradients costs more. Source: the roofline of tensor 8 on H100.
# 70B × fsdp 8: with 16 rows 20.9 s in two parts, 20.6 in four, 21.4 in sixteen; with 8 rows 22.4 s in four, 22.9 in
# eight. 8B with 8 rows: 10.1 s in four, 10.5 in eight.
MAX_PARTS = 4


def of_rows(layout: Layout, shape: tuple[int, ...], compute_dtype) -> tuple[int, int]:
    """Return (shards of the rows of a residual stream [B, T, D], parts of each shard).

    There is one part if nothing would overlap: no axis splits a layer's matmuls, or a device has one row or too few
    tokens. There is also one part if gradients are reduced in a narrower dtype than the dtype of matmuls, see `share`.
    """

    def num_shards(logical):
        return layout.num_shards(layout.mesh_axes("activations", logical))
    shards = num_shards("batch")
    rows, tokens = shape[0] // shards, shape[1] // num_shards("seq")
    if num_shards("mlp") == 1 or reduced.dtype_of(layout).itemsize < jnp.dtype(compute_dtype).itemsize:
        return shards, 1
    counts = [n for n in range(2, 2 * MAX_PARTS) if rows % n == 0 and rows * tokens >= n * MIN_TOKENS]
    # five or seven rows: one per part
    return shards, max((n for n in counts if n <= MAX_PARTS), default=min(counts, default=1))


def cut(a: jax.Array, shards: int, count: int) -> list[jax.Array]:
    """[B, …] → `count` arrays [B / count, …], each with an equal share of every shard's rows."""
    pieces = a.reshape(shards, count, -1, *a.shape[1:])
    return [pieces[:, i].reshape(-1, *a.shape[1:]) for i in range(count)]


def join(parts: list[jax.Array], shards: int) -> jax.Array:
    """Return the array that `cut` split."""
    pieces = [part.reshape(shards, -1, *part.shape[1:]) for part in parts]
    return jnp.stack(pieces, 1).reshape(-1, *parts[0].shape[1:])


def transpose(tree):
    """Transpose [B, T, …] to [T, B, …] or back, for every array of the tree."""
    return jax.tree.map(lambda a: a.swapaxes(0, 1), tree)


class Inputs(NamedTuple):
    """Inputs of every layer besides the residual stream, not differentiated."""
    # document ids; attention stays within one; tokens with PADDING go to no expert
    segments_BT: jax.Array
    index_BT: jax.Array                          # index in the sequence, for dropout
    sequence_B: jax.Array                        # global sequence number, for dropout
    rope: dict[str, rope.Rope]                   # for each mixer that rotates
    dropout_key: jax.Array | None
    shares_LE: jax.Array | None = None           # of the experts in the step before, for the balance loss
    routed_BT: jax.Array | None = None           # the tokens that go to experts; None: all without PADDING

    def transpose(self) -> Inputs:
        """Return the inputs for activations [T, B, D], without dropout.

        segments stay [B, T], because attention takes rows.
        """
        return self._replace(rope=transpose(self.rope))

    def cut(self, shards: int, count: int) -> list[Inputs]:
        """Split the rows as the function `cut` does."""
        of_rows = self._replace(dropout_key=None, shares_LE=None)
        pieces = jax.tree.map(lambda a: cut(a, shards, count), of_rows)
        whole = jax.tree.structure(of_rows)
        return [part._replace(dropout_key=self.dropout_key, shares_LE=self.shares_LE)
                for part in jax.tree.transpose(whole, jax.tree.structure([0] * count), pieces)]


def tokens_first(ex: Execution) -> Execution:
    """Return `ex` for activations [T, B, D]. Attention and recurrences still take rows.

    Collectives over tokens then act on the first dim. For collectives on the second dim, XLA copies all gathered
    activations. Queries, keys and values, which are transposed back, are smaller by the size of the tensor axis.
    """
    def attend(layout, q, k, v, segments_BT, **kind):
        o_BTNV, bound_N = ex.engines.attention(ex.layout, *transpose((q, k, v)), segments_BT, **kind)
        return transpose(o_BTNV), bound_N

    def convolve(layout, xs, ws, segments_BT, **axes):
        return transpose(ex.engines.recurrence.convolve(ex.layout, transpose(xs), ws, segments_BT, **axes))

    def recur(layout, *inputs):
        return transpose(ex.engines.recurrence.recur(ex.layout, *transpose(inputs[:-1]), inputs[-1]))
    recurrence = ex.engines.recurrence and ex.engines.recurrence._replace(convolve=convolve, recur=recur)
    return dataclasses.replace(ex, layout=dataclasses.replace(ex.layout, tokens_first=True),
                               engines=dataclasses.replace(ex.engines, attention=attend, recurrence=recurrence))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def share(ex: Execution, info: ParamInfo, w):
    """Return a layer's matrix or bias for all parts, gathered once.

    The gradients of the parts are summed and sharded as in [grads].

    Otherwise every part would gather the weight and reduce its gradient. The result has dtype float32, but a matrix is
    rounded to the compute dtype. Gradients are summed in float32, and XLA drops both casts. If [grads] reduces in
    bfloat16, a matrix and its gradient are bfloat16, and the parts' gradients are also added in bfloat16: only without
    a cast between the two can XLA add the gradients before the reduction.
    """
    if info.role != "matrix":
        return w.astype(jnp.float32)
    return gather_weight(ex, w, info.axes).astype(reduced.dtype_of(ex.layout))


share.defvjp(lambda *given: (share(*given), None), lambda ex, info, _, dw: (reduced.place(ex.layout, dw, info.axes),))
