"""cuDNN's flash attention as an engine: GPUs, bfloat16, one document per sequence."""
from __future__ import annotations

import jax.numpy as jnp

from meshtrain import jax_private
from meshtrain.kernels.engine import Engine


def engine() -> Engine | None:
    """cuDNN's kernels as an engine, for batches of one segment only: segments are not looked at. bfloat16, GPU, H a
    multiple of 8 up to 128. None where this jax does not offer them."""
    kernel = jax_private.cudnn_attention()
    if kernel is None:
        return None

    def forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, causal):
        o_BTNH, lse_BNT = kernel.forward(q_BTNH, k_BSKH, v_BSKH, causal, q_BTNH.shape[-1] ** -0.5)
        return o_BTNH.astype(jnp.float32), lse_BNT.swapaxes(1, 2)

    def backward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, o_BTNH, lse_BTN, do_BTNH, causal):
        o_BTNH, do_BTNH = o_BTNH.astype(q_BTNH.dtype), do_BTNH.astype(q_BTNH.dtype)
        grads = kernel.backward(q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BTN.swapaxes(1, 2), do_BTNH, causal, q_BTNH.shape[-1] ** -0.5)
        return tuple(g.astype(jnp.float32) for g in grads)

    return Engine(forward, backward, partitions=False)
