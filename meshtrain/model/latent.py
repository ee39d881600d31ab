"""Attention by latents (MLA): queries, keys and values are products of narrow, normed latents.

Only the latent c [B, T, C] and the rotated keys r [B, T, R], which all heads share, are passed to
`ex.engines.attention`. This engine expands c and r into heads on the devices that need the heads
(`parallel.context.latents`). A cache holds only c and r. Training computes scores from expanded keys. Latents are not
sharded over tensor. The products of latents are sharded by heads. Source: arXiv:2405.04434.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.kernels.engine import Expansion, Mask, Scores
from meshtrain.model import lora, rope
from meshtrain.model.execution import Execution
from meshtrain.model.layers import Linear, Norm, gather_weight, place_gradient, together
from meshtrain.model.parts import Inputs
from meshtrain.sharding import reduced

NORM_EPS = 1e-6         # of the norms of latents in all published models; other norms may have another eps


class LatentAttention(nnx.Module):
    """Multi-head latent attention of a layer. cfg: the [model] section of this mixer."""
    context = cache = True

    def __init__(self, cfg: Model, rngs: nnx.Rngs, mixer: str):
        D, N, H, latent = cfg.embed_dim, cfg.num_heads, cfg.head_dim, cfg.latent
        Q, C, R, V = latent.query_dim, latent.kv_dim, latent.rope_dim, latent.value_dim or cfg.head_dim
        linear, biased = partial(Linear, cfg, rngs), cfg.attention_bias != "none"
        norm, by_head = partial(Norm, cfg, rngs, eps=NORM_EPS), ("embed", "heads", "head_dim")
        self.mixer, self.rope_dim = mixer, R
        self.mask = Mask(window=cfg.window if pattern.mixer(mixer).windowed else 0)
        self.scores = Scores(cfg.multipliers.score, cfg.score_softcap)
        self.query_down = linear("BTD,DQ->BTQ", (D, Q), ("embed", None), bias=biased) if Q else None
        self.query_latent_norm = norm((Q,), (None,)) if Q else None
        self.query = linear("BTD,DNH->BTNH", (Q or D, N, H), by_head, bias=biased and not Q)
        self.latent = linear("BTD,DC->BTC", (D, C), ("embed", None), bias=biased)
        self.latent_norm = norm((C,), (None,))
        self.key_rope = linear("BTD,DR->BTR", (D, R), ("embed", None), bias=biased)
        self.key = linear("BTC,CNH->BTNH", (C, N, H - R), by_head)
        self.value = linear("BTC,CNH->BTNH", (C, N, V), by_head)
        self.out = linear("BTNH,NHD->BTD", (N, V, D), ("heads", "head_dim", "embed"),
                          bias=cfg.attention_bias == "all", std=(N * V * 2 * cfg.num_layers) ** -0.5)

    def __call__(self, ex: Execution, x_BTD, inputs: Inputs):
        act = ex.layout.act
        first = self.query if self.query_down is None else self.query_down
        q, c_BTC, r_BTR = together(ex, x_BTD, (first, 1), (self.latent, 1), (self.key_rope, 1))
        if self.query_latent_norm is not None:
            q = self.query(ex, self.query_latent_norm(ex, act(q, "batch", "seq", None)))
        q_BTNH = act(q, "batch", "seq", "heads", "head_dim")
        c_BTC = act(self.latent_norm(ex, act(c_BTC, "batch", "seq", None)), "batch", "seq", None)
        if turning := inputs.rope.get(self.mixer):
            plain_BTNH, turned_BTNR = jnp.split(q_BTNH, [q_BTNH.shape[-1] - self.rope_dim], -1)
            q_BTNH = rope.scale_queries(jnp.concatenate([plain_BTNH, rope.rotate(turned_BTNR, turning)], -1), turning)
            q_BTNH = act(q_BTNH, "batch", "seq", "heads", "head_dim")
            r_BTR = rope.rotate(r_BTR[:, :, None], turning)[:, :, 0]
        r_BTR = act(r_BTR, "batch", "seq", None)
        with jax.named_scope("attention"):      # as in `block.Attention`
            o_BTNV, bound_N = ex.engines.attention(
                ex.layout, q_BTNH, c_BTC, r_BTR, inputs.segments_BT, mask=self.mask, scores=self.scores,
                expansion=self._expansion(ex), bounded=ex.bounds is not None)
        o_BTNV = act(o_BTNV, "batch", "seq", "heads", "head_dim")
        return self.out(ex, o_BTNV, out_axes=("batch", "seq", None)), bound_N

    def _expansion(self, ex: Execution) -> Expansion:
        # With adapters, use the merged weights: the engine multiplies the weights, on devices that depend on how
        # sequences are split.
        key, value = (linear.kernel[...] if linear.lora is None else lora.merge(
            linear.kernel[...][None], {"a": linear.lora.a[...][None], "b": linear.lora.b[...][None]},
            linear.lora.scale)[0] for linear in (self.key, self.value))

        def place(dw):
            return place_gradient(ex, reduced.add(dw, (0,), reduced.dtype_of(ex.layout)), self.key.axes)
        return Expansion(key, value, partial(gather_weight, ex, axes=self.key.axes), place)
