"""The attention of a run: an engine on each device and, if sequences are split over `context`, a method.

`ring` rotates keys and values. `gather` all-gathers them. `ulysses` splits heads instead of tokens. Each is a module
with `order` (of the tokens over the devices), `forward` and `backward`. Both passes are explicit: jax differentiates
neither. `choices.attention` chooses the engine.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config.sections import Model, Run
from meshtrain.kernels.engine import CAUSAL, Engine, Expansion, Mask, Output, Scores
from meshtrain.names import PADDING
from meshtrain.parallel.context import gather, ring, ulysses
from meshtrain.parallel.context.latents import LatentMethod
from meshtrain.parallel.context.zigzag import AXIS
from meshtrain.sharding.mesh import automatic_axes
from meshtrain.sharding.rules import Layout

METHODS: dict[str, ModuleType] = {"ring": ring, "gather": gather, "ulysses": ulysses}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def attend(method, layout: Layout, mask: Mask, bounded, operands, sinks_N):
    """Return (attention [B, T, N, V] within segments and the mask, an upper bound of each head's scores [N]).

    method: forward(layout, mask, *operands) -> o, lse and backward(layout, mask, *operands, o, lse, do) -> gradients.
    operands: queries first, segments last. sinks_N: one score per head that takes part in the softmax and has no value.

    The bound is None if not `bounded`. The bound of a head is the largest log-sum-exp, without sinks, of its real
    tokens, but at least 0. It is an upper bound, because a token's log-sum-exp is at least its largest score. It is not
    differentiated.
    """
    return _attend_forward(method, layout, mask, bounded, operands, sinks_N)[0]


def _attend_forward(method, layout: Layout, mask: Mask, bounded, operands, sinks_N):
    o_BTNV, lse_BTN = method.forward(layout, mask, *operands)
    bound_N = None
    if bounded:     # over devices, an all-reduce of N numbers
        real_BT1 = operands[-1][..., None] != PADDING
        bound_N = jnp.max(jnp.where(real_BT1, lse_BTN, 0.0), (0, 1), initial=0.0)
    if sinks_N is not None:
        # The sink is a further key with value 0. The backward of a method needs only o and lse over all keys, including
        # the sink.
        sinks_N = sinks_N.astype(jnp.float32)
        o_BTNV = o_BTNV * jax.nn.sigmoid(lse_BTN - sinks_N)[..., None]
        lse_BTN = jnp.logaddexp(lse_BTN, sinks_N)
    # Named, so that selective remat saves o and lse and the backward does not repeat the forward.
    o_BTNV = checkpoint_name(o_BTNV.astype(operands[0].dtype), "attention_o")
    lse_BTN = checkpoint_name(lse_BTN, "attention_lse")
    return (o_BTNV, bound_N), (operands, sinks_N, o_BTNV, lse_BTN)


def _attend_backward(method, layout: Layout, mask: Mask, bounded, saved, cotangents):
    (operands, sinks_N, o_BTNV, lse_BTN), (do_BTNV, _) = saved, cotangents
    grads = method.backward(layout, mask, *operands, o_BTNV, lse_BTN, do_BTNV)
    dsinks_N = None
    if sinks_N is not None:
        along_BTN = jnp.sum(do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32), -1)
        dsinks_N = -jnp.sum(jnp.exp(sinks_N - lse_BTN) * along_BTN, (0, 1))
    # Gradients of weights stay float32, as in `layers.project`.
    grads = (*(grad.astype(x.dtype) for grad, x in zip(grads[:3], operands)), *grads[3:], None)
    return grads, dsinks_N


attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True, eq=False)
class RunAttention:
    """The attention of a run. Its layers may differ in widths and scores.

    engine_of: (head_dim, width of values, scores) -> Engine. method: None without context parallelism. documents:
    whether a row can have several documents.
    """
    engine_of: Callable
    method: ModuleType | None = None
    documents: bool = True

    def __call__(self, layout: Layout, *operands, mask: Mask = CAUSAL, scores: Scores = Scores(), sinks_N=None,
                 expansion: Expansion | None = None, bounded: bool = False):
        """Return the same as `attend`.

        operands: q_BTNH, k_BSKH, v_BSKV, segments_BT. With an expansion: q_BTNH, latents [B, T, C], rotated keys [B, T,
        R], segments_BT.
        """
        q_BTNH, k, v, segments_BT = operands
        mask = mask if self.documents else mask._replace(documents=False)
        if expansion is None:
            engine = self.engine_of(q_BTNH.shape[-1], v.shape[-1], scores)
            return attend(PlainMethod(engine, self.method), layout, mask, bounded, operands, sinks_N)
        key, value, *how = expansion
        latent = LatentMethod(self.engine_of(q_BTNH.shape[-1], value.shape[-1], scores), self.method, *how)
        return attend(latent, layout, mask, bounded, (q_BTNH, k, v, key, value, segments_BT), sinks_N)


class PlainMethod(NamedTuple):
    """A method for `attend` on global arrays [B, T, …]: queries, keys, values and segments.

    method: a module of METHODS; None if sequences are not split. If `context` is already manual (inside a pipeline),
    the arrays are this device's shards.
    """
    engine: Engine
    method: ModuleType | None = None

    def forward(self, layout: Layout, mask: Mask, q, k, v, segments):
        if self._takes_global_arrays():
            return _over_shards(partial(self.forward, layout, mask), layout, (q, k, v, segments))
        if self.method is None:
            return self.engine.forward(q, k, v, segments, segments, mask.within(q.shape[1]))
        return self.method.forward(self.engine, mask, q, k, v, segments)

    def backward(self, layout: Layout, mask: Mask, q, k, v, segments, *output):
        if self._takes_global_arrays():
            return _over_shards(partial(self.backward, layout, mask), layout, (q, k, v, segments, *output))
        if self.method is None:
            return self.engine.backward(q, k, v, segments, segments, *output, mask.within(q.shape[1]))
        return self.method.backward(self.engine, mask, q, k, v, segments, Output(*output))

    def _takes_global_arrays(self) -> bool:
        """Return whether an automatic axis splits the sequences of a method, or cannot be left to XLA's partitioning of
        the engine.
        """
        axes = automatic_axes()
        return bool(axes) and (not self.engine.partitions or self.method is not None and AXIS in axes)


def _over_shards(local, layout: Layout, args):
    """Call `local` in a shard_map over the layout's specs.

    `local` is (q, k, v, segments) -> o, lse or (q, k, v, segments, o, lse, do) -> dq, dk, dv.
    """
    axes = automatic_axes()     # inside a pipeline: tensor, and all of size 1
    rows, heads, kv = (layout.spec("activations", ("batch", "seq", *axis)) for axis in ((), ("heads",), ("kv_heads",)))
    in_specs = heads, kv, kv, rows, *[heads] * len(args[4:])
    # All automatic axes become manual, including those of size 1. In a partially manual region cuDNN does not compile,
    # and Pallas kernels silently compute all heads on every tensor rank. check_vma only matters for transposition,
    # which is not used.
    return jax.shard_map(local, in_specs=in_specs, out_specs=in_specs[:3] if args[4:] else (heads, heads),
                         axis_names=set(axes), check_vma=False)(*args)


def token_order(run: Run, sizes: Mapping[str, int]):
    """Return the token at each position of a sequence split over context, int64 [T]; None for the natural order."""
    cp = sizes[AXIS]
    return METHODS[run.context.method].order(run.data.seq_len, cp) if cp > 1 else None


def value_dim(cfg: Model) -> int:
    """Return the width of values of a [model] section."""
    return cfg.latent.kv_dim and cfg.latent.value_dim or cfg.head_dim
