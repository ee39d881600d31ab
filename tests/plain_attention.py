"""Attention as plainly as it stands, for comparison: materialized scores, autodiff."""
import jax
import jax.numpy as jnp

from meshtrain.kernels import products
from meshtrain.kernels.engine import CAUSAL, MASKED, Mask, Scores


def attend(q_BTNH, k_BSKH, v_BSKH, segments_BT, mask: Mask = CAUSAL, scores: Scores = Scores()):
    """Attention [B, T, N, H]."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = products.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, jnp.float32) * scores.scale(H)
    s_BKGTS = scores.softcap * jnp.tanh(s_BKGTS / scores.softcap) if scores.softcap else s_BKGTS
    apart = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_BTS = (apart >= 0) & (apart < (mask.window or T)) & (segments_BT[:, :, None] == segments_BT[:, None, :])
    p_BKGTS = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], s_BKGTS, MASKED), -1).astype(q_BTNH.dtype)
    return products.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH).reshape(B, T, N, H)
