"""Fused linear cross-entropy over a sharded vocabulary, chunk by chunk, without materializing the logits.

When differentiated, the forward loop also computes the gradients (the loss is a sum, so its cotangent is one number): 3
head matmuls instead of 4 (as in Liger kernels, arXiv:2410.10989). Weight gradients are accumulated per batch shard:
they are reduced over devices once, not once per chunk.
"""
from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.kernels import products
from meshtrain.model.layers import Execution, gathered
from meshtrain.names import NO_TARGET
from meshtrain.sharding.mesh import psum
from meshtrain.sharding.rules import GATHERED, Layout


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """axes: logical axes of the head's weight. Ids from vocab_size up are padding with zero probability. z_loss: weight
    of lse². chunk: tokens per chunk and batch shard."""
    axes: tuple[str, str]
    vocab_size: int
    z_loss: float
    chunk: int
    softcap: float = 0.0        # tanh bound of the logits; 0: none
    frozen: bool = False        # the weight has no gradient


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss_sums(ex: Execution, spec: LossSpec, x_BTD, w, targets_BT):
    """(objective, nll), float32 sums over all tokens with a target: objective = nll + z_loss · Σ lse².

    x_BTD: normed output of the last layer, sharded like the residual stream. w: [D, V] or, tied, [V, D]. nll is a
    metric: only the objective's gradient is defined.
    """
    return _sums(ex, spec, x_BTD, w, targets_BT, with_grads=False)[0]


def _loss_forward(ex, spec, x_BTD, w, targets_BT):
    return _sums(ex, spec, x_BTD, w, targets_BT, with_grads=True)


def _loss_backward(ex, spec, saved, cotangents):
    dx_BTD, dw = saved
    scale = cotangents[0]
    return (dx_BTD * scale).astype(dx_BTD.dtype), None if dw is None else dw * scale, None


loss_sums.defvjp(_loss_forward, _loss_backward)


def _sums(ex: Execution, spec: LossSpec, x_BTD, w, targets_BT, with_grads: bool):
    """((objective, nll), (dx_BTD, dw) or None)."""
    layout, f32, chunks = ex.layout, jnp.float32, _Chunks(ex, spec, x_BTD, w, targets_BT)
    tokens, vocab = chunks.tokens, chunks.vocab
    pin_dw = lambda dw: tokens.pin(dw, tokens.shards, *layout.spec(GATHERED, spec.axes))

    def visit(carry, c):
        objective, nll, dx, dw = carry
        x_c, t_c, logits, lse, hit_V, hit = chunks.take(c)
        has = (t_c != NO_TARGET).astype(f32)
        nll_c = has * (lse - hit)
        nll = nll + nll_c.sum((1, 2))
        objective = objective + (nll_c + spec.z_loss * has * lse * lse).sum((1, 2))
        if with_grads:
            p = jnp.exp(logits - lse[..., None])
            dl = has[..., None] * (p * (1 + 2 * spec.z_loss * lse)[..., None] - hit_V.astype(f32))
            if spec.softcap:        # at padding dl is 0, and the logit has no derivative
                dl = dl * jnp.where(logits > -jnp.inf, 1 - jnp.square(logits / spec.softcap), 0.0)
            dl = vocab.pin(dl.astype(ex.dtype))
            dx = tokens.put(dx, vocab.dx(dl), c)
        if dw is not None:
            dw = dw + jnp.einsum(f"nrsD,nrsV->n{vocab.letters}", x_c, dl, preferred_element_type=f32,
                                 precision=products.precision(dl.dtype))
            dw = pin_dw(dw)
        return (objective, nll, dx, dw), None

    zero_n = jnp.zeros((tokens.n,), f32)
    dx = dw = None
    if with_grads:
        dx = jnp.zeros_like(chunks.x_nrsD)
        dw = None if spec.frozen else pin_dw(jnp.zeros((tokens.n,) + vocab.full.shape, f32))
    (objective, nll, dx, dw), _ = jax.lax.scan(visit, (zero_n, zero_n, dx, dw), jnp.arange(tokens.count))
    sums = (objective.sum(), nll.sum())
    if not with_grads:
        return sums, None
    # One float32 reduction over batch shards: there must be nothing between the sum and the constraint.
    dw = None if dw is None else layout.constrain("grads", dw.sum(0), spec.axes)
    return sums, (layout.act(tokens.join(dx), "batch", "residual_seq", None), dw)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_nll(ex: Execution, spec: LossSpec, x_BTD, w, targets_BT):
    """nll of each token [B, T], float32, 0 without a target; differentiable in x and w as `loss_sums`.

    For objectives that are not sums over tokens: the weight of a token's nll is known only after the forward, so the
    backward recomputes the logits (4 head matmuls instead of 3).
    """
    chunks = _Chunks(ex, spec, x_BTD, w, targets_BT)

    def visit(nll, c):
        _, t_c, _, lse, _, hit = chunks.take(c)
        return chunks.tokens.put(nll, jnp.where(t_c != NO_TARGET, lse - hit, 0.0), c), None
    zeros = jnp.zeros(chunks.targets_nrs.shape, jnp.float32)
    return chunks.tokens.join(jax.lax.scan(visit, zeros, jnp.arange(chunks.tokens.count))[0])


def _nll_forward(ex, spec, x_BTD, w, targets_BT):
    return token_nll(ex, spec, x_BTD, w, targets_BT), (x_BTD, w, targets_BT)


def _nll_backward(ex, spec, saved, d_BT):
    chunks, layout = _Chunks(ex, spec, *saved), ex.layout
    tokens, vocab = chunks.tokens, chunks.vocab
    d_nrs = tokens.cut(d_BT)
    pin_dw = lambda dw: tokens.pin(dw, tokens.shards, *layout.spec(GATHERED, spec.axes))

    def visit(carry, c):
        dx, dw = carry
        x_c, t_c, logits, lse, hit_V, _ = chunks.take(c)
        weight = jnp.where(t_c != NO_TARGET, tokens.take(d_nrs, c), 0.0)
        dl = weight[..., None] * (jnp.exp(logits - lse[..., None]) - hit_V.astype(jnp.float32))
        if spec.softcap:
            dl = dl * jnp.where(logits > -jnp.inf, 1 - jnp.square(logits / spec.softcap), 0.0)
        dl = vocab.pin(dl.astype(ex.dtype))
        dx = tokens.put(dx, vocab.dx(dl), c)
        if dw is not None:
            dw = pin_dw(dw + jnp.einsum(f"nrsD,nrsV->n{vocab.letters}", x_c, dl, preferred_element_type=jnp.float32,
                                        precision=products.precision(dl.dtype)))
        return (dx, dw), None

    dw = None if spec.frozen else pin_dw(jnp.zeros((tokens.n,) + vocab.full.shape, jnp.float32))
    (dx, dw), _ = jax.lax.scan(visit, (jnp.zeros_like(chunks.x_nrsD), dw), jnp.arange(tokens.count))
    dw = None if dw is None else layout.constrain("grads", dw.sum(0), spec.axes)
    return layout.act(tokens.join(dx), "batch", "residual_seq", None), dw, None


token_nll.defvjp(_nll_forward, _nll_backward)


class _Chunks:
    """The tokens in chunks, and each chunk's logits."""

    def __init__(self, ex: Execution, spec: LossSpec, x_BTD, w, targets_BT):
        full = gathered(ex, w, spec.axes)                    # once per microbatch, bf16
        self.tokens = _TokenChunks(ex.layout, x_BTD.shape, spec.chunk)
        self.vocab = _VocabShard(ex.layout, self.tokens, spec, full)
        self.x_nrsD, self.targets_nrs = self.tokens.cut(x_BTD), self.tokens.cut(targets_BT, fill=NO_TARGET)

    def take(self, c):
        """(x, targets, logits, lse, one-hot targets, the target's logit) of chunk c.

        Sequence parallel: each chunk is gathered over tensor here (s·D bf16), and its dx scattered when it is stored.
        """
        x_c, t_c = self.tokens.take(self.x_nrsD, c), self.tokens.take(self.targets_nrs, c)
        return x_c, t_c, *self.vocab.logits(x_c, t_c)


def capped(logits, softcap: float):
    """Logits within ±softcap, by tanh; unchanged if it is 0."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


class _VocabShard:
    """Logits and their statistics with the vocabulary V sharded: by constraints over automatic axes, by explicit
    collectives over manual ones (in a pipeline, the stages)."""

    def __init__(self, layout: Layout, tokens: _TokenChunks, spec: LossSpec, full):
        self.full, self.tokens, self.softcap = full, tokens, spec.softcap
        self.letters = "DV" if spec.axes == ("embed", "vocab") else "VD"
        self.axes = layout.mesh_axes("activations", "vocab") or None
        self.manual = layout.manual_axes("activations", "vocab")
        V = full.shape[self.letters.index("V")]
        self.first = jax.lax.axis_index(self.manual) * V if self.manual else 0
        self.real_V = self.first + jnp.arange(V) < spec.vocab_size

    def pin(self, x_nrsV):
        return self.tokens.pin(x_nrsV, self.tokens.shards, None, None, self.axes)

    def logits(self, x_c, t_c):
        """(logits [n, r, s, V], log-sum-exp [n, r, s], one-hot targets [n, r, s, V], the target's logit), float32."""
        logits = jnp.einsum(f"nrsD,{self.letters}->nrsV", x_c, self.full, preferred_element_type=jnp.float32,
                            precision=products.precision(self.full.dtype))
        logits = jnp.where(self.real_V, capped(self.pin(logits), self.softcap), -jnp.inf)
        hit_V = self.first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3) == t_c[..., None]
        hit = jnp.sum(jnp.where(hit_V, logits, 0.0), -1)
        if not self.manual:
            return logits, jax.nn.logsumexp(logits, -1), hit_V, hit
        # Two small all-reduces (s float32 each way), in sequence: concurrent ones may pair up wrongly on CPUs.
        top = jax.lax.pmax(logits.max(-1), self.manual)
        total, hit = jax.lax.psum((jnp.exp(logits - top[..., None]).sum(-1), hit), self.manual)
        return logits, top + jnp.log(total), hit_V, hit

    def dx(self, dl_nrsV):
        """The cotangent of a chunk of x, summed over the vocabulary."""
        dx_c = jnp.einsum(f"nrsV,{self.letters}->nrsD", dl_nrsV, self.full,
                          precision=products.precision(self.full.dtype))
        return psum(dx_c, self.manual) if self.manual else dx_c


class _TokenChunks:
    """[B, T, …] as [n, r, tokens, …]: n token shards × r shards of the residual stream, padded to whole chunks.

    n = b · c shards of batch and sequence: tokens are independent here, so both kinds are treated alike.
    """

    def __init__(self, layout: Layout, shape, chunk: int):
        seq = layout.mesh_axes("activations", "seq")
        self.shards = layout.batch_axes + seq or None
        self.residual = tuple(a for a in layout.mesh_axes("activations", "residual_seq") if a not in seq) or None
        self.b, self.c, self.r = layout.num_shards(layout.batch_axes), layout.num_shards(seq), layout.num_shards(
            self.residual or ())
        self.n = self.b * self.c
        self.B, self.T = shape[0] // self.b, shape[1] // (self.c * self.r)      # of one shard
        self.tokens = self.B * self.T
        self.count = -(-self.tokens // max(1, chunk // self.r))
        self.chunk = -(-self.tokens // self.count)
        self.placed = bool(self.shards or self.residual or layout.mesh_axes("activations", "vocab"))

    def pin(self, x, *spec):
        return jax.lax.with_sharding_constraint(x, P(*spec)) if self.placed else x

    def cut(self, x, fill=0):
        rest = x.shape[2:]
        x = jnp.moveaxis(x.reshape(self.b, self.B, self.c, self.r, self.T, *rest), 1, 3)
        x = x.reshape(self.n, self.r, self.tokens, *rest)
        pad = [(0, 0), (0, 0), (0, self.chunk * self.count - self.tokens)] + [(0, 0)] * (x.ndim - 3)
        return self.pin(jnp.pad(x, pad, constant_values=fill), self.shards, self.residual)

    def join(self, x):
        rest = x.shape[3:]
        x = x[:, :, :self.tokens].reshape(self.b, self.c, self.r, self.B, self.T, *rest)
        return jnp.moveaxis(x, 3, 1).reshape(self.b * self.B, self.c * self.r * self.T, *rest)

    def take(self, x, c):
        """Chunk c, gathered over the shards of the residual stream. The inner pin slices before the gather; without it
        every chunk gathers all of x and slices that."""
        x_c = jax.lax.dynamic_slice_in_dim(x, c * self.chunk, self.chunk, 2)
        return self.pin(self.pin(x_c, self.shards, self.residual), self.shards)

    def put(self, x, value, c):
        return jax.lax.dynamic_update_slice_in_dim(x, self.pin(value, self.shards, self.residual), c * self.chunk, 2)


@jax.custom_vjp
def with_loss(y, loss):
    """Return y; in the backward give `loss` the cotangent 1, as if it were added to the objective."""
    del loss
    return y


with_loss.defvjp(lambda y, loss: (y, None), lambda _, dy: (dy, jnp.float32(1)))
