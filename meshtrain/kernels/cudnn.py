"""cuDNN's flash attention as an engine: GPUs, bfloat16, one document per sequence."""
from __future__ import annotations

import jax.numpy as jnp

from meshtrain import jax_private
from meshtrain.kernels.engine import Engine, Scores


def engine(scores: Scores = Scores()) -> Engine | None:
    """Return the cuDNN engine, or None if this version of jax does not offer it.

    The engine needs a GPU, bfloat16, H a multiple of 8 up to 128, values of width H, and masks without documents. With
    a window, the engine also needs as many queries as keys.
    """
    kernel = jax_private.cudnn_attention()
    assert not scores.softcap, "cuDNN has none here"
    if kernel is None:
        return None

    def settings_of(mask, head_dim):
        assert not mask.documents and not mask.ahead and (mask.causal or not mask.window), mask
        return mask.causal, mask.window, scores.scale_for(head_dim)

    def forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, mask):
        o_BTNH, lse_BNT = kernel.forward(q_BTNH, k_BSKH, v_BSKH, *settings_of(mask, q_BTNH.shape[-1]))
        return o_BTNH.astype(jnp.float32), lse_BNT.swapaxes(1, 2)

    def backward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS, o_BTNH, lse_BTN, do_BTNH, mask):
        o_BTNH, do_BTNH = o_BTNH.astype(q_BTNH.dtype), do_BTNH.astype(q_BTNH.dtype)
        grads = kernel.backward(q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BTN.swapaxes(1, 2),
                                do_BTNH, *settings_of(mask, q_BTNH.shape[-1]))
        return tuple(g.astype(jnp.float32) for g in grads)

    return Engine(forward, backward, partitions=False)
