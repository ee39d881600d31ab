"""Recurrent mixers: gated delta rule (G), the same with a decay per channel (K, KDA) and Mamba-2 (M).

Each mixer projects its input, convolves over a few tokens, runs one recurrence S' = decay · S + … with a state per
value head, and then norms and gates the output. A mixer reads earlier tokens only through `ex.engines.recurrence`,
which keeps documents apart. A_log, decays and norms are float32.

Dims besides those of `layers`: K key heads (Mamba-2's groups), H their width (Mamba-2's state), N value heads, V their
width, W tokens of the convolution, R inner width of a narrow projection. Sources: arXiv:2412.06464 (gated delta rule),
2510.26692 (KDA), 2405.21060 (Mamba-2).
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.config.sections import Model
from meshtrain.model.execution import Execution, recompute
from meshtrain.model.layers import Linear, Norm, add_bias, kv_heads, repeat_heads, small, together, unit
from meshtrain.model.params import declare
from meshtrain.model.parts import Inputs

EPS = 1e-6      # added under the root in the norm of queries and keys
HEADS, KEY_HEADS = ("heads", "head_dim"), ("kv_heads", "head_dim")


class Convolution(nnx.Module):
    """The weights of a causal convolution of each channel, [W, heads, width]."""

    def __init__(self, cfg: Model, rngs: nnx.Rngs, heads: int, width: int, axes):
        dtype, W = jnp.dtype(cfg.param_dtype), cfg.linear.conv_width
        self.axes = (None, *axes)
        self.kernel = declare(rngs, dtype, (W, heads, width), self.axes, "bias", std=W ** -0.5)
        self.bias = declare(rngs, dtype, (heads, width), axes, "bias", value=0.0) if cfg.linear.conv_bias else None


class RecurrentMixer(nnx.Module):
    """A recurrent mixer. mixer: its letter, G, K or M."""
    context = cache = True

    def __init__(self, cfg: Model, rngs: nnx.Rngs, mixer: str):
        linear, D, dtype = cfg.linear, cfg.embed_dim, jnp.dtype(cfg.param_dtype)
        K, N, H, V = linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim
        self.mixer, self.num_key_heads = mixer, K
        self.beta_scale, self.steps = linear.beta_scale, (linear.step_min, linear.step_max)

        def inward(heads, width, axes):
            return Linear(cfg, rngs, "BTD,DNH->BTNH", (D, heads, width), ("embed", *axes))
        self.query, self.key = inward(K, H, KEY_HEADS), inward(K, H, KEY_HEADS)
        self.value = inward(N, V, HEADS)
        self.query_conv, self.key_conv = (Convolution(cfg, rngs, K, H, KEY_HEADS) for _ in range(2))
        self.value_conv = Convolution(cfg, rngs, N, V, HEADS)
        # narrow projections are as wide as a value, as in the published models

        def narrow(width):
            return (Linear(cfg, rngs, "BTD,DR->BTR", (D, V), ("embed", None)),
                    Linear(cfg, rngs, "BTR,RNH->BTNH", (V, N, width), (None, *HEADS)))

        def by_head():
            return Linear(cfg, rngs, "BTD,DN->BTN", (D, N), ("embed", "heads"))
        channels = mixer == "K"     # the decay has channels
        self.decay_down: Linear | None
        self.gate_down: Linear | None
        self.decay_down, self.decay = narrow(H) if channels else (None, by_head())
        self.gate_down, self.gate = narrow(V) if channels else (None, inward(N, V, HEADS))
        self.beta = None if mixer == "M" else by_head()
        # as in the published code: decay rates from 1 to 16, time steps from 0.001 to 0.1

        def spread(low, high, shape):
            by_head = jnp.exp(jnp.linspace(jnp.log(low), jnp.log(high), N))
            return by_head.reshape(N, *[1] * (len(shape) - 1)) * jnp.ones(shape)
        self.A_log = _declare_bias(jnp.log(spread(1.0, 16.0, (N,))), ("heads",))
        shape, axes = ((N, H), HEADS) if channels else ((N,), ("heads",))
        self.dt_bias = _declare_bias(jnp.log(jnp.expm1(spread(1e-3, 0.1, shape))), axes)
        self.skip = declare(rngs, dtype, (N,), ("heads",), "bias", value=1.0) if mixer == "M" else None
        shape, axes = ((N, V), HEADS) if mixer == "M" else ((V,), HEADS[1:])
        self.norm = Norm(cfg, rngs, shape, axes, eps=linear.norm_eps or cfg.norm_eps)
        self.out = Linear(cfg, rngs, "BTNH,NHD->BTD", (N, V, D), ("heads", "head_dim", "embed"),
                          std=(N * V * 2 * cfg.num_layers) ** -0.5)

    def __call__(self, ex: Execution, x_BTD, inputs: Inputs):
        repeats = kv_heads(ex.layout, self.num_key_heads) // self.num_key_heads
        inward = [(self.query, repeats), (self.key, repeats), (self.value, 1), (self.beta, 1),
                  (self.gate_down or self.gate, 1), (self.decay_down or self.decay, 1)]
        q, k, v, *beta, gate, decay = together(ex, x_BTD, *((linear, n) for linear, n in inward if linear is not None))
        if self.gate_down is not None:
            (gate,), (decay,) = together(ex, gate, (self.gate, 1)), together(ex, decay, (self.decay, 1))
        gate_BTNV = ex.layout.act(gate, "batch", "seq", "heads", "head_dim")
        q, k, v = self._convolve(ex, (q, k, v), repeats, inputs.segments_BT)
        A_log, dt_bias = (small(ex, w[...], axes).astype(jnp.float32) for w, axes in (
            (self.A_log, ("heads",)), (self.dt_bias, HEADS if self.mixer == "K" else ("heads",))))
        if self.mixer == "M":
            g, scaled_v = recompute(ex, partial(_steps, self.steps))(decay, A_log, dt_bias, v)
            o_BTNV = self._recur(ex, q, k, scaled_v, g, None, inputs)
            assert self.skip is not None
            skip = small(ex, self.skip[...], ("heads",)).astype(jnp.float32)
            o_BTNV = recompute(ex, _add_skip)(o_BTNV, v, skip)
            return self._out(ex, self._gate_first, o_BTNV, gate_BTNV)
        q, k = recompute(ex, _directions)(q, k)
        g, beta = recompute(ex, partial(_rates, self.beta_scale))(decay, A_log, dt_bias, *beta)
        o_BTNV = self._recur(ex, q, k, v, g, beta, inputs)
        return self._out(ex, self._norm_first, o_BTNV, gate_BTNV)

    def _convolve(self, ex: Execution, qkv, repeats: int, segments_BT):
        convolutions = (self.query_conv, repeats), (self.key_conv, repeats), (self.value_conv, 1)
        axes = [KEY_HEADS if repeats == 1 else HEADS] * 2 + [HEADS]
        qkv = tuple(ex.layout.act(x, "batch", "seq", *x_axes) for x, x_axes in zip(qkv, axes))
        kernels = [repeat_heads(ex, conv.kernel[...], conv.axes, n) for conv, n in convolutions]
        ws = tuple(small(ex, w, axes).astype(jnp.float32) for w, axes in kernels)
        assert ex.engines.recurrence is not None
        ys = ex.engines.recurrence.convolve(ex.layout, qkv, ws, segments_BT)
        if self.query_conv.bias is not None:
            biases = [repeat_heads(ex, conv.bias[...], conv.axes[1:], n) for conv, n in convolutions
                      if conv.bias is not None]
            ys = [add_bias(ex, axes, y, bias) for y, (bias, axes) in zip(ys, biases, strict=True)]
        return recompute(ex, lambda ys: tuple(map(jax.nn.silu, ys)))(tuple(ys))

    def _recur(self, ex: Execution, q, k, v, g, beta, inputs: Inputs):
        assert ex.engines.recurrence is not None
        with jax.named_scope("recurrence"):
            o_BTNV = ex.engines.recurrence.recur(ex.layout, q, k, v, g, beta, inputs.segments_BT)
        return ex.layout.act(o_BTNV, "batch", "seq", *HEADS)

    def _out(self, ex: Execution, normed, o_BTNV, gate_BTNV):
        o_BTNV = recompute(ex, normed)(o_BTNV, gate_BTNV, small(ex, self.norm.scale[...], self.norm.axes))
        return self.out(ex, ex.layout.act(o_BTNV, "batch", "seq", *HEADS), out_axes=("batch", "seq", None))

    def _norm_first(self, o, gate, scale):
        gating = jax.nn.sigmoid if self.mixer == "K" else jax.nn.silu
        y = unit(self.norm.eps, o.astype(jnp.float32)) * scale * gating(gate.astype(jnp.float32))
        return y.astype(o.dtype)

    def _gate_first(self, o, gate, scale):
        """Gate o, then norm the value heads of a group together."""
        y = o.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        groups = y.reshape(*y.shape[:-2], self.num_key_heads, -1)
        return (unit(self.norm.eps, groups).reshape(y.shape) * scale).astype(o.dtype)


def _declare_bias(value, axes) -> nnx.Param:
    """Return a bias with the given values, in float32 like all biases. bfloat16 would change decay rates by 1%."""
    return nnx.Param(value.astype(jnp.float32), logical_axes=axes, role="bias", fan_in_dims=1)


def _directions(q, k):
    """Return queries and keys of length 1. The queries are also divided by the square root of their width."""
    q32, k32 = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)
                for x in (q.astype(jnp.float32), k.astype(jnp.float32)))
    return (q32 * q.shape[-1] ** -0.5).astype(q.dtype), k32.astype(k.dtype)


def _rates(beta_scale: float, decay, A_log, dt_bias, beta):
    """Return (log decays of each head or channel, at most 0; update rates), float32."""
    A = jnp.exp(A_log) if decay.ndim == 3 else jnp.exp(A_log)[:, None]
    return -A * jax.nn.softplus(decay.astype(jnp.float32) + dt_bias), beta_scale * jax.nn.sigmoid(
        beta.astype(jnp.float32))


def _steps(limits: tuple[float, float], decay, A_log, dt_bias, v):
    """Return (log decays, values times the time step)."""
    steps = jax.nn.softplus(decay.astype(jnp.float32) + dt_bias)
    steps = jnp.clip(steps, limits[0], limits[1] or None)
    return -jnp.exp(A_log) * steps, (v.astype(jnp.float32) * steps[..., None]).astype(v.dtype)


def _add_skip(o, v, skip):
    return (o.astype(jnp.float32) + skip[:, None] * v.astype(jnp.float32)).astype(o.dtype)
