"""Mixture of experts: a float32 router, routed experts and shared experts instead of the MLP.

Experts are parameters [E, D, F]. `ex.engines.experts` decides where they are computed (`parallel.experts.dispatch`).
Both balance losses are sums over tokens and sequences, independent of layout and microbatches. The balance loss of
whole batches (experts.balance = "batch", global-batch load balancing) uses the shares f of the previous step. The
shares of the present step are known only after the last microbatch, when the backward of the first microbatch has
already run. Megatron-LM sums f up to the present microbatch instead, which depends on the number of microbatches.
Padding (segment 0) goes to no expert and is not counted: all padding tokens are equal, so they would fill the same K
experts and dominate the balance. A softmax over only the chosen scores equals a softmax over all scores with
`router_normalize`.

Sources: sequence-wise balance: arXiv:2412.19437 (eq. 17 to 20); of the batch: 2501.11873; z-loss: 2202.08906 (ST-MoE);
the bias: 2408.15664.
"""
from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshtrain.config.sections import Model
from meshtrain.model.execution import Execution, recompute, with_numerics
from meshtrain.model.layers import Linear, add_bias, apply_gate, project
from meshtrain.model.mlp import MLP
from meshtrain.model.params import declare
from meshtrain.model.parts import Inputs
from meshtrain.model.stats import AUX_LOSS, EXPERT_LOAD, LayerStats
from meshtrain.names import EXPERT_AXES, LOAD_BY_LAYER, PADDING
from meshtrain.sharding.mesh import on_shards
from meshtrain.sharding.rules import Layout

ROUTER_AXES = ("embed", None)
DOWN_BIAS_AXES = (None, "embed")        # not sharded over experts: the bias is added outside the region of the experts
TINY = 1e-20        # added to a sum of sigmoids, which may be zero; as in the published code


@dataclasses.dataclass(frozen=True)
class Routing:
    """The settings by which the router of `[model]` turns logits into choices and weights."""
    num_experts: int
    experts_per_token: int
    score: str
    normalize: bool
    scale: float
    groups: int
    group_limit: int

    @classmethod
    def of(cls, cfg: Model) -> Routing:
        return cls(cfg.num_experts, cfg.experts_per_token, cfg.router_score, cfg.router_normalize, cfg.router_scale,
                   *(cfg.router_groups or (0, 0)))

    def scores(self, logits):
        return jax.nn.softmax(logits, -1) if self.score == "softmax" else jax.nn.sigmoid(logits)

    def select(self, scores, bias_E):
        """Return the chosen experts [..., K].

        If scores are equal, the expert with the lower index is chosen. The bias affects only the choice."""
        scores = scores if bias_E is None else scores + bias_E
        if self.groups > 1:
            by_group = scores.reshape(*scores.shape[:-1], self.groups, -1)
            best = lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(-1)
            kept = jax.nn.one_hot(lax.top_k(best, self.group_limit)[1], self.groups, dtype=bool).any(-2)
            scores = jnp.where(kept[..., None], by_group, -jnp.inf).reshape(scores.shape)
        return lax.top_k(scores, self.experts_per_token)[1].astype(jnp.int32)

    def weigh(self, scores, chosen):
        """Return the weights of the chosen experts; 0 where none is chosen (-1)."""
        weight = jnp.take_along_axis(scores, jnp.maximum(chosen, 0), -1)
        if self.normalize:
            weight = weight / (weight.sum(-1, keepdims=True) + (TINY if self.score == "sigmoid" else 0.0))
        return jnp.where(chosen >= 0, weight * self.scale, 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def route(layout: Layout, routing: Routing, logits_BTE, bias_E, real_BT):
    """Return (chosen experts [B, T, K] int32, their weights, choices of each expert per sequence [B, E]), float32.

    logits and real_BT are sharded like the residual stream. Padding tokens (real_BT is false) choose -1: no expert. The
    "gradient" of the bias is the number of tokens per expert, which is reduced over microbatches and devices like other
    gradients and is the input of the bias update. All mesh axes are manual, because XLA would gather the scores of all
    tokens for top_k.
    """
    axes = layout.all_axes("activations", "residual_seq")       # the axes that split a sequence

    def local(logits, bias, real):
        scores = routing.scores(logits)
        chosen = jnp.where(real[..., None], routing.select(scores, bias), -1)
        counts = _counts(routing, chosen, (1, 2))
        return chosen, routing.weigh(scores, chosen), lax.psum(counts, axes) if axes else counts
    tokens, bias = layout.spec("activations", ("batch", "residual_seq", None)), None if bias_E is None else P()
    out = tokens, tokens, layout.spec("activations", ("batch", None))
    return on_shards(local, (tokens, bias, P(*tokens[:2])), out)(logits_BTE, bias_E, real_BT)


def _route_forward(layout: Layout, routing, logits_BTE, bias_E, real_BT):
    out = route(layout, routing, logits_BTE, bias_E, real_BT)
    return out, (logits_BTE, out[0], bias_E)


def _route_backward(layout: Layout, routing, saved, cotangents):
    logits_BTE, chosen_BTK, bias_E = saved
    # The caller reduces over the axes that are already manual, as for any gradient of a weight.
    axes = layout.mesh_axes("activations", "batch") + layout.mesh_axes("activations", "residual_seq")

    def local(logits, chosen, dweight, bias):
        _, back = jax.vjp(lambda logits: routing.weigh(routing.scores(logits), chosen), logits)
        if bias is None:
            return back(dweight)[0], None
        counts = _counts(routing, chosen, (0, 1, 2))
        return back(dweight)[0], (lax.psum(counts, axes) if axes else counts).astype(bias.dtype)
    tokens, bias = layout.spec("activations", ("batch", "residual_seq", None)), None if bias_E is None else P()
    args = logits_BTE, chosen_BTK, cotangents[1], bias_E
    return *on_shards(local, (tokens, tokens, tokens, bias), (tokens, bias))(*args), None


route.defvjp(_route_forward, _route_backward)


def _counts(routing: Routing, chosen, dims):
    """Return the choices of each expert, summed over dims of [B, T, K]; float32, exact below 2^24."""
    return jnp.sum(chosen[..., None] == jnp.arange(routing.num_experts), dims, dtype=jnp.float32)


def balance_loss(routing: Routing, aux_loss: float, z_loss: float, logits_BTE, counts_BE, real_BT, f_E=None):
    """Return aux_loss · Σ_sequences T·E·Σ_e f_e·P_e + z_loss · Σ_tokens lse².

    Both terms are sums; the caller divides them by the tokens of the step. T: tokens of the sequence without padding.
    f: each expert's share of the sequence's choices, or f_E for all sequences; not differentiated. P: mean score.
    counts_BE: the counts of whole sequences. If manual axes split sequences, the result is this shard's part of the
    loss.
    """
    loss = jnp.float32(0)
    if aux_loss:
        scores = routing.scores(logits_BTE)
        share = scores if routing.score == "softmax" else scores / (scores.sum(-1, keepdims=True) + TINY)
        counts_BE = lax.stop_gradient(counts_BE)
        f_BE = counts_BE / jnp.maximum(counts_BE.sum(-1, keepdims=True), 1) if f_E is None else f_E
        loss += aux_loss * routing.num_experts * jnp.sum(f_BE * jnp.sum(share * real_BT[..., None], 1))
    if z_loss:
        loss += z_loss * jnp.sum(real_BT * jax.nn.logsumexp(logits_BTE, -1) ** 2)
    return loss


class MoE(nnx.Module):
    """The MoE block of one layer, with its shared experts."""

    def __init__(self, cfg: Model, rngs: nnx.Rngs):
        D, E, F, dtype = cfg.embed_dim, cfg.num_experts, cfg.expert_mlp_dim, jnp.dtype(cfg.param_dtype)
        self.routing, self.num_layers = Routing.of(cfg), cfg.num_layers + cfg.mtp_layers
        self.router = declare(rngs, dtype, (D, E), ROUTER_AXES, "router", std=D ** -0.5)
        self.bias = declare(rngs, dtype, (E,), (None,), "balance", value=0.0) if cfg.router_bias == "choice" else None
        self.router_bias = declare(rngs, dtype, (E,), (None,), "bias",
                                   value=0.0) if cfg.router_bias == "logits" else None

        def inward(name):
            return declare(rngs, dtype, (E, D, F), EXPERT_AXES[name], "matrix", std=D ** -0.5)

        def bias(size, axes, wanted=True):
            wanted = wanted and cfg.mlp_bias
            return declare(rngs, dtype, (E, size), axes, "bias", value=0.0) if wanted else None
        self.gate = inward("gate") if cfg.gated else None
        self.up = inward("up")
        self.down = declare(rngs, dtype, (E, F, D), EXPERT_AXES["down"], "matrix", std=(F * 2 * cfg.num_layers) ** -0.5)
        self.gate_bias, self.up_bias = bias(F, EXPERT_AXES["gate_bias"], cfg.gated), bias(F, EXPERT_AXES["up_bias"])
        self.down_bias = bias(D, DOWN_BIAS_AXES)
        self.shared = MLP(cfg, rngs, cfg.shared_expert_dim) if cfg.shared_expert_dim else None
        self.lora = None
        self.shared_gate = Linear(cfg, rngs, "BTD,DX->BTX", (D, 1), ROUTER_AXES) if cfg.shared_expert_gate else None

    def __call__(self, ex: Execution, x_BTD, inputs: Inputs, number):
        """Return (y, stats). x and y are sharded like the residual stream. stats: the experts' load, and the router's
        loss if its weight is not 0. number: the layer's number; depths of MTP are numbered after the layers."""
        logits_BTE = self._logits(ex, x_BTD)
        bias_E = None if self.bias is None else self.bias[...]
        real_BT = inputs.segments_BT != PADDING if inputs.routed_BT is None else inputs.routed_BT
        real_BT = ex.layout.act(real_BT, "batch", "residual_seq")
        chosen_BTK, weight_BTK, counts_BE = route(ex.layout, self.routing, logits_BTE, bias_E, real_BT)
        weights = {name: param[...] for home in (self, self.lora) for name in EXPERT_AXES
                   if (param := getattr(home, name, None)) is not None}
        assert ex.engines.experts is not None
        y_BTD = ex.engines.experts(ex.layout, x_BTD, chosen_BTK, weight_BTK, weights)
        if self.down_bias is not None:
            y_BTD = y_BTD + self._down_biases(ex, chosen_BTK, weight_BTK)
        if self.shared is not None:
            whole_BTD = x_BTD if ex.numerics.float8 else ex.layout.act(x_BTD, "batch", "seq", None)
            shared_BTD = ex.layout.act(self.shared(ex, whole_BTD), "batch", "residual_seq", None)
            if self.shared_gate is not None:
                gate_BT1 = self.shared_gate(with_numerics(ex, float8=None), x_BTD)
                shared_BTD = recompute(ex, apply_gate)(shared_BTD, gate_BT1)
            y_BTD = y_BTD + shared_BTD
        layer = jnp.arange(self.num_layers)[:, None] == number
        # divided by the number of devices that share a sequence over manual axes, because these are summed later
        load_E = counts_BE.sum(0) / ex.layout.num_shards(ex.layout.manual_axes("activations", "residual_seq"))
        stats = LayerStats.of("target", **{EXPERT_LOAD: jnp.where(layer, load_E, 0.0)})
        if any(ex.router_losses):
            f_E = None if inputs.shares_LE is None else inputs.shares_LE[number]
            loss = balance_loss(self.routing, *ex.router_losses, logits_BTE, counts_BE, real_BT, f_E)
            stats |= LayerStats.of("token", **{AUX_LOSS: loss})
        return y_BTD, stats

    def _down_biases(self, ex: Execution, chosen_BTK, weight_BTK):
        """Return Σ_k weight · bias of the expert, by one small matmul besides those of the experts."""
        experts = jnp.arange(self.routing.num_experts)
        weight_BTE = jnp.sum(jnp.where(chosen_BTK[..., None] == experts, weight_BTK[..., None], 0.0), 2)
        weight_BTE = ex.layout.act(weight_BTE, "batch", "residual_seq", None).astype(ex.numerics.dtype)
        assert self.down_bias is not None
        y_BTD = project(ex, (("BTE,ED->BTD", DOWN_BIAS_AXES),), None, False, weight_BTE, (self.down_bias[...],))[0]
        return ex.layout.act(y_BTD, "batch", "residual_seq", None)

    def _logits(self, ex: Execution, x_BTD):
        """Return float32 logits, from a float32 matmul. bfloat16 would change the choice of one token in a hundred."""
        wide = with_numerics(ex, dtype=jnp.dtype("float32"))
        (logits_BTE,) = project(wide, (("BTD,DE->BTE", ROUTER_AXES),), None, False, x_BTD, (self.router[...],))
        if self.router_bias is not None:
            logits_BTE = add_bias(wide, (None,), logits_BTE, self.router_bias[...])
        return checkpoint_name(ex.layout.act(logits_BTE, "batch", "residual_seq", None), "router_logits")


def shares(load_LE):
    """Return each expert's share of its layer's choices [L, E]; 0 in layers without experts."""
    return load_LE / jnp.maximum(load_LE.sum(-1, keepdims=True), TINY)


def report_load(metrics: dict) -> dict:
    """Return a step's metrics with the experts' load in the form that is reported.

    The load becomes several metrics. Per layer [L] (NaN without experts): the largest and the smallest load relative to
    the mean, and the entropy relative to a uniform load. For the model: the largest load of any layer and the mean
    entropy.
    """
    if EXPERT_LOAD not in metrics:
        return metrics
    load_LE = metrics[EXPERT_LOAD]
    num_experts, total_L = load_LE.shape[-1], load_LE.sum(-1)
    share_LE = shares(load_LE)
    entropy_L = -jnp.sum(jax.scipy.special.xlogy(share_LE, share_LE),
                         -1) / math.log(num_experts) if num_experts > 1 else jnp.ones_like(total_L)
    by_layer = [jnp.where(total_L > 0, a, jnp.nan)
                for a in (share_LE.max(-1) * num_experts, share_LE.min(-1) * num_experts, entropy_L)]
    return {name: value for name, value in metrics.items() if name != EXPERT_LOAD} | {
        "expert_load_max": jnp.nanmax(by_layer[0]), "expert_load_entropy": jnp.nanmean(by_layer[2])} | dict(
            zip(LOAD_BY_LAYER, by_layer))
