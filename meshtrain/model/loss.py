"""The head and the loss in one: cross-entropy over a split vocabulary, chunk by chunk, so whole logits never exist.

Under differentiation the chunk loop makes the gradients as well (the loss is a sum, so its cotangent is one number),
and no logits are computed twice: 3 head matmuls instead of 4 (as in Liger kernels, arXiv:2410.10989). Weight gradients
are kept apart per batch shard until the loop has ended: they cross the devices once, not once per chunk.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.layout.mesh import psum
from meshtrain.model.layers import Execution, gathered
from meshtrain.names import NO_TARGET


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def loss_sums(ex: Execution, axes, vocab_size: int, z_loss: float, chunk: int, x_BTD, w, targets_BT):
    """(objective, nll), float32 sums over all tokens with a target: objective = nll + z_loss · Σ lse².

    x_BTD: normed output of the last layer, split as the residual stream. w: [D, V] or, tied, [V, D] with logical
    `axes`; ids from vocab_size up are padding and get no probability. chunk: tokens per chunk and batch shard.
    The gradient of nll is not defined apart from the objective's: take it as a metric.
    """
    return _run(ex, axes, vocab_size, z_loss, chunk, x_BTD, w, targets_BT, with_grads=False)[0]


def _forward(ex, axes, vocab_size, z_loss, chunk, x_BTD, w, targets_BT):
    return _run(ex, axes, vocab_size, z_loss, chunk, x_BTD, w, targets_BT, with_grads=True)


def _backward(ex, axes, vocab_size, z_loss, chunk, saved, cotangents):
    dx_BTD, dw = saved
    scale = cotangents[0]
    return (dx_BTD * scale).astype(dx_BTD.dtype), dw * scale, None


loss_sums.defvjp(_forward, _backward)


def _run(ex, axes, vocab_size, z_loss, chunk, x_BTD, w, targets_BT, with_grads):
    layout, f32 = ex.layout, jnp.float32
    letters = "DV" if axes == ("embed", "vocab") else "VD"
    full = gathered(ex, w, axes)                       # once per microbatch, bf16
    seq = layout.mesh_axes("activations", "seq")
    shards = layout.batch_axes + seq                     # tokens are independent here: a share of a sequence is a shard, too
    pieces = tuple(a for a in layout.mesh_axes("activations", "residual_seq") if a not in seq)
    split = _Split(x_BTD.shape, layout.ways(layout.batch_axes), layout.ways(seq), layout.ways(pieces), chunk)
    lead = (shards or None, pieces or None)
    pin = lambda x, *spec: jax.lax.with_sharding_constraint(x, P(*spec)) if shards or pieces or layout.mesh_axes(
        "activations", "vocab") else x
    vocab = layout.mesh_axes("activations", "vocab") or None
    manual = layout.by_hand("activations", "vocab")      # in a pipeline: every stage has a part of the vocabulary
    x_nrsD = pin(split.rows(x_BTD), *lead)               # n token shards × r sequence pieces × tokens
    targets_nrs = pin(split.rows(targets_BT, fill=NO_TARGET), *lead)
    V = full.shape[letters.index("V")]
    first = jax.lax.axis_index(manual) * V if manual else 0
    real_V = first + jnp.arange(V) < vocab_size

    def visit(carry, c):
        objective, nll, dx, dw = carry
        # Sliced where it lies, then gathered: without the inner pin every chunk gathers the whole of x and slices that.
        take = lambda a: pin(jax.lax.dynamic_slice_in_dim(a, c * split.chunk, split.chunk, 2), *lead)
        # Sequence parallel: each chunk is gathered over tensor here (s·D bf16) and its dx scattered back below.
        x_c = pin(take(x_nrsD), shards or None)
        t_c = pin(take(targets_nrs), shards or None)
        logits = jnp.einsum(f"nrsD,{letters}->nrsV", x_c, full, preferred_element_type=f32)
        logits = jnp.where(real_V, pin(logits, shards or None, None, None, vocab), -jnp.inf)
        hit_V = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3) == t_c[..., None]
        hit = jnp.sum(jnp.where(hit_V, logits, 0.0), -1)
        if manual:
            # Two small all-reduces (s float32 each way), one after the other: sums under way together may pair on CPUs.
            top = jax.lax.pmax(logits.max(-1), manual)
            total, hit = jax.lax.psum((jnp.exp(logits - top[..., None]).sum(-1), hit), manual)
            lse = top + jnp.log(total)
        else:
            lse = jax.nn.logsumexp(logits, -1)
        has = (t_c != NO_TARGET).astype(f32)
        nll_c = has * (lse - hit)
        nll = nll + nll_c.sum((1, 2))
        objective = objective + (nll_c + z_loss * has * lse * lse).sum((1, 2))
        if with_grads:
            p = jnp.exp(logits - lse[..., None])
            dl = has[..., None] * (p * (1 + 2 * z_loss * lse)[..., None] - hit_V.astype(f32))
            dl = pin(dl.astype(ex.dtype), shards or None, None, None, vocab)
            dx_c = jnp.einsum(f"nrsV,{letters}->nrsD", dl, full)
            dx_c = psum(dx_c, manual) if manual else dx_c
            dx_c = pin(dx_c, *lead)
            dx = jax.lax.dynamic_update_slice_in_dim(dx, dx_c, c * split.chunk, 2)
            dw = dw + jnp.einsum(f"nrsD,nrsV->n{letters}", x_c, dl, preferred_element_type=f32)
            dw = pin(dw, shards or None, *layout.spec_in_use(axes))
        return (objective, nll, dx, dw), None

    zero_n = jnp.zeros((split.n,), f32)
    dx = dw = None
    if with_grads:
        dx = jnp.zeros_like(x_nrsD)
        dw = pin(jnp.zeros((split.n,) + full.shape, f32), shards or None,
                 *layout.spec_in_use(axes))
    (objective, nll, dx, dw), _ = jax.lax.scan(visit, (zero_n, zero_n, dx, dw), jnp.arange(split.count))
    sums = (objective.sum(), nll.sum())
    if not with_grads:
        return sums, None
    # One reduction over the batch shards, in float32: nothing may stand between the sum and the constraint.
    dw = layout.constrain("grads", dw.sum(0), axes)
    dx_BTD = layout.act(split.unrows(dx), "batch", "residual_seq", None)
    return sums, (dx_BTD, dw)


class _Split:
    """[B, T, …] as [n, r, tokens, …]: n = b · c shards of batch and sequence, each in r pieces, tokens padded to whole chunks."""

    def __init__(self, shape, b: int, c: int, r: int, chunk: int):
        self.b, self.c, self.r, self.n = b, c, r, b * c
        self.B, self.T = shape[0] // b, shape[1] // (c * r)      # of a piece
        self.tokens = self.B * self.T
        self.count = -(-self.tokens // max(1, chunk // r))
        self.chunk = -(-self.tokens // self.count)

    def rows(self, x, fill=0):
        rest = x.shape[2:]
        x = jnp.moveaxis(x.reshape(self.b, self.B, self.c, self.r, self.T, *rest), 1, 3)
        x = x.reshape(self.n, self.r, self.tokens, *rest)
        pad = [(0, 0), (0, 0), (0, self.chunk * self.count - self.tokens)] + [(0, 0)] * (x.ndim - 3)
        return jnp.pad(x, pad, constant_values=fill)

    def unrows(self, x):
        rest = x.shape[3:]
        x = x[:, :, :self.tokens].reshape(self.b, self.c, self.r, self.B, self.T, *rest)
        return jnp.moveaxis(x, 3, 1).reshape(self.b * self.B, self.c * self.r * self.T, *rest)
