"""A layer from the outside in: groups of layers, one layer with its remat, its residual block, and its attention.

A group is a scan over a repeating period of layers. Examples: one group of leading dense layers and one of the other
layers; a period of five layers with a window and one layer without. A layer is a residual block of a mixer and an MLP.
Other mixers are in `latent` and `linear`, MLPs in `mlp` and `moe`.
"""
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain import pattern
from meshtrain.config.sections import MIXER, Model
from meshtrain.kernels.engine import Mask, Scores
from meshtrain.model import float8, params, parts
from meshtrain.model.dropout import dropout
from meshtrain.model.execution import Execution, recompute
from meshtrain.model.layers import Linear, Norm, apply_gate, kv_heads, small, together, unit
from meshtrain.model.mlp import GATE_UP
from meshtrain.model.params import declare
from meshtrain.model.parts import Inputs
from meshtrain.model.rope import scale_queries, rotate
from meshtrain.model.stats import SCORE_BOUND, LayerStats
from meshtrain.names import LAYERS, LEADING
from meshtrain.sharding.rules import GATHERED

LAYER_INPUT = "layer_input"     # the activation that remat `offload` keeps on the host


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGroup:
    """Consecutive layers: the layers of `period` in turn, `repeats` times.

    The weights of each layer of the period are stacked, [repeats, …]. A period of one layer has no level of its own in
    the parameter tree. leading: whether the layers run before the stages of a pipeline, outside all stages.
    """
    name: str
    period: tuple[params.Module, ...]
    repeats: int
    leading: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.period) * self.repeats

    def parameters(self, path: tuple[str, ...]) -> list[params.ParamInfo]:
        """Return the group's parameters. path: the path of the group's subtree."""
        axis, several = LEADING if self.leading else LAYERS, len(self.period) > 1
        paths = [(*path, str(i)) for i in range(len(self.period))] if several else [path]
        return [info for layer, path in zip(self.period, paths)
                for info in params.infos(layer, path, self.repeats, axis)]

    def init(self, keys: jax.Array) -> tuple:
        """Return new stacked weights of each layer of the period, from one key per layer."""
        return tuple(jax.vmap(layer.init)(keys[i::len(self.period)]) for i, layer in enumerate(self.period))

    def weights(self, subtree) -> tuple:
        """Return the stacked weights of each layer of the period. subtree: the group's part of the parameter tree."""
        return (subtree,) if len(self.period) == 1 else tuple(subtree[str(i)] for i in range(len(self.period)))

    def subtree(self, weights: tuple):
        """Return the group's subtree of the parameter tree. weights: a tree for each layer of the period."""
        return weights[0] if len(self.period) == 1 else {str(i): tree for i, tree in enumerate(weights)}

    def numbers(self, first: int) -> jax.Array:
        """Return [repeats]: the number of each repeat's first layer. first: the number of the group's first layer."""
        return first + len(self.period) * jnp.arange(self.repeats)

    def apply(self, ex: Execution, weights: tuple, x_BTD, inputs: Inputs, number):
        """Run one repeat of the period. Return (output, stats).

        weights: one tree per layer of the period. number: the number of the repeat's first layer in the model.
        """
        # XLA delays weight gradients to the end of a period's backward. Tried and left out: a barrier that makes the
        # cotangent wait for the weight gradients of the layer after it (all of them, or the MLP's; also one layer
        # later). By the roofline qwen3.5-9b-continue on 8 H100 took 7.50 to 7.56 s instead of 7.48, because
        # reduce-scatters were exposed. The peak memory did not change, because it is that of the loss.
        stats = LayerStats()
        for i, (layer, layer_weights) in enumerate(zip(self.period, weights, strict=True)):
            apply = build_block(ex, layer, x_BTD.shape, inputs.dropout_key is not None)
            x_BTD, of_layer = apply(layer_weights, x_BTD, inputs, number + i)
            stats += of_layer
        return x_BTD, stats


def build_block(ex: Execution, layer: params.Module, shape: tuple[int, ...], drops: bool) -> Callable:
    """Return a layer's function: (weights, x_BTD, inputs, its number) -> (output, stats).

    shape: the shape of x_BTD. drops: whether the inputs have a dropout key. ex.numerics.remat decides what is saved.
    """
    infos = params.infos(layer)
    has_experts = any("expert" in info.axes for info in infos)
    mixer = layer.bind(layer.state).mixer
    takes_rows = mixer is not None and not getattr(mixer, "context", False)     # [B, T, D], whatever the layout
    can_share = not has_experts and _can_share(ex, infos)
    shards, num_parts = parts.of_rows(ex.layout, shape, ex.numerics.dtype) if can_share else (1, 1)
    many_rows = shape[0] > num_parts * ex.layout.num_shards(ex.layout.batch_axes)
    tokens_first = ex.layout.sequence_parallel and many_rows and not (has_experts or takes_rows or drops)

    def apply(weights, x_BTD, inputs: Inputs, number):
        x_BTD, part_ex = checkpoint_name(x_BTD, LAYER_INPUT), parts.tokens_first(ex) if tokens_first else ex
        pieces = [(x_BTD, inputs)]
        if num_parts > 1:
            weights = params.map_params(
                infos, lambda info, w: w if info.role == "norm" else parts.share(ex, info, w), weights)
            part_ex = dataclasses.replace(part_ex, in_parts=True)
            pieces = list(zip(parts.cut(x_BTD, shards, num_parts), inputs.cut(shards, num_parts), strict=True))
        module, outputs, stats = layer.bind(weights), [], []
        for part_BTD, part_inputs in pieces:
            if tokens_first:
                part_BTD, part_inputs = parts.transpose(part_BTD), part_inputs.transpose()
            y_BTD, of_part = module(part_ex, part_BTD, part_inputs, number)
            outputs.append(parts.transpose(y_BTD) if tokens_first else y_BTD)
            stats.append(of_part)
        y_BTD = parts.join(outputs, shards)
        return ex.layout.act(y_BTD, "batch", "residual_seq", None), functools.reduce(operator.add, stats)
    return rematerialize(apply, ex)


def _can_share(ex: Execution, infos) -> bool:
    """Return whether parts of a microbatch can share a layer's weights.

    Parts cannot share weights in float8, because a scale belongs to the whole microbatch. Parts also cannot share
    weights if every projection's backward gathers its weight again (ZeRO-3 without remat).
    """
    kept = all(ex.layout.spec(GATHERED, info.axes) == ex.layout.spec("params", info.axes) for info in infos)
    return not ex.numerics.float8 and (kept or ex.numerics.remat != "none")


def _matmul_output(primitive, *operands, **params) -> bool:
    """Return whether this equation is a matmul with weights. This function is a remat policy.

    A dot with a batch dim computes attention scores. A dot of bfloat16 operands with a float32 result is one of several
    parts of a matmul (`products.einsum`). A gather of weights is not a dot.
    """
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params) and (
        operands[0].dtype, params["preferred_element_type"]) != (jnp.bfloat16, jnp.float32)


def rematerialize(layer: Callable, ex: Execution) -> Callable:
    """Return the layer with the remat of `ex.numerics.remat`.

    "none" saves the inputs of matmuls, norms and attention. "selective" saves matmul outputs, the queries and keys that
    attention reads, and the o and lse of attention. "full" saves only the layer's input. "offload" saves only the
    layer's input, on the host (B·T·D each way, overlapped with a layer's matmuls).

    If sequences are split over devices, "full" and "offload" also save o and lse (B·T·N·H), so that the backward
    repeats no ring. Every policy saves the float8 scales of the forward, because each scale costs a pass over a tensor
    and an all-reduce.
    """
    policies = jax.checkpoint_policies
    if ex.numerics.remat == "none":
        return layer
    names = [float8.SCALE]
    if ex.layout.sizes["context"] > 1 or ex.numerics.remat == "selective":
        names += ["attention_o", "attention_lse", "linear_o", "linear_states"]
        if ex.numerics.remat == "selective":
            names += ["attention_stream", "attention_rotated", "router_logits", GATE_UP]
    keep = policies.save_only_these_names(*names)
    if ex.numerics.remat == "offload":
        # The name must be the input's. A layer's output with this name silently stays on the device.
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=names, names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device", offload_dst="pinned_host")
    if ex.numerics.remat == "selective":
        keep = policies.save_from_both_policies(_matmul_output, keep)
    return jax.checkpoint(layer, policy=keep, prevent_cse=False)   # CSE cannot merge across a scan


class Layer(nnx.Module):
    """Residual block of a mixer and an MLP, either of which may be absent. Norms come before the two, after them, or
    both.

    mixer, mlp: (name, (cfg, rngs) -> module), or None. The name is the key in the parameter tree: attention, linear or
    custom for a mixer, mlp or moe for an MLP. The norms around any mixer are named attention_norm and
    attention_post_norm.

    Returns (x_BTD, `LayerStats` of the microbatch).
    """

    def __init__(self, cfg: Model, rngs: nnx.Rngs, mixer: tuple[str, Callable] | None,
                 mlp: tuple[str, Callable] | None):
        def norm(part, where):
            wanted = part is not None and cfg.norm_placement in (where, "both")
            return Norm(cfg, rngs, (cfg.embed_dim,), ("embed",)) if wanted else None

        def part(given, name):
            return given[1](cfg, rngs) if given and given[0] == name else None
        self.dropout, self.residual_multiplier = cfg.residual_dropout, cfg.multipliers.residual
        self.attention_norm = norm(mixer, "before")
        self.mixer_name = mixer[0] if mixer else ""
        if mixer:
            setattr(self, self.mixer_name, mixer[1](cfg, rngs))
        self.attention_post_norm = norm(mixer, "after")
        self.mlp_norm, self.mlp_post_norm = norm(mlp, "before"), norm(mlp, "after")
        self.mlp, self.moe = part(mlp, "mlp"), part(mlp, "moe")
        self.layer_scale = declare(rngs, jnp.dtype(cfg.param_dtype), (1,), (None,), "norm",
                                   value=1.0) if cfg.layer_scale else None

    @property
    def mixer(self) -> nnx.Module | None:
        return getattr(self, self.mixer_name) if self.mixer_name else None

    def __call__(self, ex: Execution, x_BTD, inputs: Inputs, number):
        def residual(y):
            return ex.layout.act(y, "batch", "residual_seq", None)

        def apply_norm(norm, x_BTD):
            return x_BTD if norm is None else norm(ex, x_BTD)
        mixer, stats = self.mixer, LayerStats()
        if mixer is not None:
            h_BTD = self._full(ex, apply_norm(self.attention_norm, x_BTD))
            y_BTD = mixer(ex, h_BTD, inputs)
            if isinstance(y_BTD, tuple):        # attention also returns the bound of its scores
                y_BTD, bound_N = y_BTD
                if bound_N is not None and ex.bounds is not None:
                    stats = LayerStats.of("step", **{SCORE_BOUND: in_row(number, bound_N, *ex.bounds)})
            if (getattr(y_BTD, "shape", 0), getattr(y_BTD, "dtype", 0)) != (h_BTD.shape, h_BTD.dtype):
                raise ValueError(f"the mixer {type(mixer).__name__} returned {y_BTD} for "
                                 f"{h_BTD.dtype}{list(h_BTD.shape)}; give {MIXER}")
            y_BTD = apply_norm(self.attention_post_norm, residual(y_BTD))
            x_BTD = residual(self._add(x_BTD, dropout(ex, y_BTD, self.dropout, inputs, 2 * number)))
            if self.attention_post_norm is None:
                x_BTD = checkpoint_name(x_BTD, "attention_stream")
        in_stages = ex.layout.sizes["stage"] > 1        # a pipeline may run all weight gradients (W) later
        if self.mlp is not None and not in_stages and not ex.in_parts and not self.mlp.down.frozen:
            x_BTD, self.mlp.down.kernel[...] = wait_for_gradient(x_BTD, self.mlp.down.kernel[...])
        if self.mlp is not None or self.moe is not None:
            h_BTD = apply_norm(self.mlp_norm, x_BTD)
            if self.mlp is not None:
                y_BTD = self.mlp(ex, self._full(ex, h_BTD))
            elif self.moe is not None:
                y_BTD, of_experts = self.moe(ex, residual(h_BTD), inputs, number)
                stats |= of_experts
            y_BTD = apply_norm(self.mlp_post_norm, residual(y_BTD))
            x_BTD = residual(self._add(x_BTD, dropout(ex, y_BTD, self.dropout, inputs, 2 * number + 1)))
        if self.layer_scale is not None:
            # A constant of the model. It gets no gradient, so no optimizer changes it.
            scale = jax.lax.stop_gradient(small(ex, self.layer_scale[...], (None,)))
            x_BTD = (x_BTD.astype(jnp.float32) * scale).astype(x_BTD.dtype)
        return x_BTD, stats

    def _add(self, x_BTD, y_BTD):
        if self.residual_multiplier == 1:
            return x_BTD + y_BTD
        # In float32: 0.22 in bfloat16 is 0.2% more.
        sum_BTD = x_BTD.astype(jnp.float32) + self.residual_multiplier * y_BTD.astype(jnp.float32)
        return sum_BTD.astype(x_BTD.dtype)

    @staticmethod
    def _full(ex: Execution, h_BTD):
        """Constrain h to the sequence shard, then to the whole sequence.

        The gather (B·T·D bytes × 2) is then in bf16, not float32. Inputs of float8 projections stay split here and are
        gathered after they are quantized.
        """
        h_BTD = ex.layout.act(h_BTD, "batch", "residual_seq", None)
        return h_BTD if ex.numerics.float8 else ex.layout.act(h_BTD, "batch", "seq", None)


@jax.custom_vjp
def wait_for_gradient(x, w):
    """Return x and w unchanged. In the backward, the gradient of x waits for the reduced gradient of w.

    Otherwise XLA delays a layer's weight gradients to the end of its backward, where the last reduce-scatter overlaps
    with nothing, and copies the residual stream's cotangent for these gradients. If the gradient of the MLP's outward
    projection is computed early, the other weight gradients are early as well, and the last one is small. By the
    roofline a step of llama3-8b on 8 H100 takes 6.47 s instead of 6.50; with remat full it takes 7.60 s instead of
    7.64.
    """
    return x, w


wait_for_gradient.defvjp(lambda x, w: ((x, w), None), lambda _, cotangents: jax.lax.optimization_barrier(cotangents))


def in_row(number, values_N, rows: int, width: int):
    """Return [rows, width]: the values in row `number`, zeros elsewhere."""
    mine = jnp.arange(rows)[:, None] == number
    return jnp.where(mine, jnp.pad(values_N, (0, width - values_N.shape[0])), 0.0)


class Attention(nnx.Module):
    """Grouped-query causal attention, by `ex.engines.attention`, with context parallelism if sequences are split.

    mixer: the letter of the layer's mixer. The gate multiplies the output before its projection (arXiv:2505.06708). A
    sink is a score that takes part in a head's softmax and has no value.
    """
    context = cache = True

    def __init__(self, cfg: Model, rngs: nnx.Rngs, mixer: str):
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.num_kv_heads, self.mixer, bias = K, mixer, cfg.attention_bias != "none"
        self.mask = Mask(window=cfg.window if pattern.mixer(mixer).windowed else 0)
        self.scores = Scores(cfg.multipliers.score, cfg.score_softcap)

        def inward(heads, axis, bias):
            axes = "embed", "heads" if axis == "N" else "kv_heads", "head_dim"
            return Linear(cfg, rngs, f"BTD,D{axis}H->BT{axis}H", (D, heads, H), axes, bias=bias)
        self.query, self.key = inward(N, "N", bias), inward(K, "K", bias)
        self.value = None if cfg.tie_values else inward(K, "K", bias)
        self.out = Linear(cfg, rngs, "BTNH,NHD->BTD", (N, H, D), ("heads", "head_dim", "embed"),
                          bias=cfg.attention_bias == "all", std=(N * H * 2 * cfg.num_layers) ** -0.5)
        self.query_norm, self.key_norm = (
            self._norm(cfg, rngs, heads, axis) for heads, axis in ((N, "heads"), (K, "kv_heads")))
        self.value_eps = cfg.norm_eps if cfg.qk_norm == "head_and_values" else 0.0
        self.gate = inward(N, "N", False) if cfg.attention_gate else None
        self.sinks = declare(rngs, jnp.dtype(cfg.param_dtype), (N,), ("heads",), "bias",
                             value=0.0) if cfg.attention_sinks else None

    @staticmethod
    def _norm(cfg: Model, rngs: nnx.Rngs, heads: int, axis: str):
        if cfg.qk_norm == "off":
            return None
        shape, axes = ((heads, cfg.head_dim), (axis, "head_dim")) if cfg.qk_norm == "all_heads" else (
            (cfg.head_dim,), ("head_dim",))
        return Norm(cfg, rngs, shape, axes)

    def __call__(self, ex: Execution, x_BTD, inputs: Inputs):
        act, repeats = ex.layout.act, kv_heads(ex.layout, self.num_kv_heads) // self.num_kv_heads
        inward = [(self.query, 1), (self.key, repeats), (self.value, repeats), (self.gate, 1)]
        q_BTNH, k_BTKH, *rest = together(ex, x_BTD, *((linear, n) for linear, n in inward if linear is not None))
        gate_BTNH = rest.pop() if self.gate is not None else None
        q_BTNH = act(q_BTNH, "batch", "seq", "heads", "head_dim")
        k_BTKH = act(k_BTKH, "batch", "seq", "kv_heads", "head_dim")
        v_BTKH = act(rest[0], "batch", "seq", "kv_heads", "head_dim") if rest else k_BTKH
        rope = inputs.rope.get(self.mixer)
        in_one = ex.engines.by_kernels and rope and self.query_norm is not None and self.query_norm.rotates(rope)
        if self.query_norm is not None and not in_one:
            over_heads = len(self.key_norm.axes) > 1
            q_BTNH, k_BTKH = self.query_norm(ex, q_BTNH), self.key_norm(ex, k_BTKH, repeats if over_heads else 1)
        if self.value_eps:
            v_BTKH = recompute(ex, partial(unit, self.value_eps))(v_BTKH)
        if rope:
            if in_one:
                q_BTNH = self.query_norm.norm_and_rotate(ex, "heads", q_BTNH, rope)
                k_BTKH = self.key_norm.norm_and_rotate(ex, "kv_heads", k_BTKH, rope)
            else:
                q_BTNH, k_BTKH = rotate(q_BTNH, rope), rotate(k_BTKH, rope)
            q_BTNH = scale_queries(q_BTNH, rope)
            q_BTNH = act(q_BTNH, "batch", "seq", "heads", "head_dim")
            k_BTKH = act(k_BTKH, "batch", "seq", "kv_heads", "head_dim")
            if self.query_norm is None:     # with a norm, remat would also keep the norm's input
                q_BTNH, k_BTKH = (checkpoint_name(x, "attention_rotated") for x in (q_BTNH, k_BTKH))
        sinks_N = None if self.sinks is None else small(ex, self.sinks[...], ("heads",)).astype(jnp.float32)
        with jax.named_scope("attention"):      # kernels of attention are found by this name in the compiled program
            o_BTNH, bound_N = ex.engines.attention(
                ex.layout, q_BTNH, k_BTKH, v_BTKH, inputs.segments_BT, mask=self.mask, scores=self.scores,
                sinks_N=sinks_N, bounded=ex.bounds is not None)
        o_BTNH = act(o_BTNH, "batch", "seq", "heads", "head_dim")
        if gate_BTNH is not None:
            gate_BTNH = act(gate_BTNH, "batch", "seq", "heads", "head_dim")
            o_BTNH = recompute(ex, apply_gate)(o_BTNH, gate_BTNH)
        return self.out(ex, o_BTNH, out_axes=("batch", "seq", None)), bound_N
