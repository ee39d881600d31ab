"""Attention as plainly as it stands, for comparison: materialized scores, autodiff."""
import jax
import jax.numpy as jnp

from meshtrain.kernels import products
from meshtrain.kernels.engine import CAUSAL, MASKED, Mask, Scores


def attend(q_BTNH, k_BSKH, v_BSKV, segments_BT, mask: Mask = CAUSAL, scores: Scores = Scores(), sinks_N=None):
    """Attention [B, T, N, V]."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = products.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, jnp.float32) * scores.scaled_for(H)
    s_BKGTS = scores.softcap * jnp.tanh(s_BKGTS / scores.softcap) if scores.softcap else s_BKGTS
    apart = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_BTS = (apart >= 0) & (apart < (mask.window or T)) & (segments_BT[:, :, None] == segments_BT[:, None, :])
    s_BKGTS = jnp.where(seen_BTS[:, None, None], s_BKGTS, MASKED)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.reshape(K, -1, 1, 1), (*s_BKGTS.shape[:4], 1))
        s_BKGTS = jnp.concatenate([s_BKGTS, sinks], -1)
    p_BKGTS = jax.nn.softmax(s_BKGTS, -1)[..., :T].astype(q_BTNH.dtype)
    return products.einsum("BKGTS,BSKV->BTKGV", p_BKGTS, v_BSKV).reshape(B, T, N, -1)
