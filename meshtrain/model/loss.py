"""Fused linear cross-entropy over a sharded vocabulary, chunk by chunk, without materializing the logits.

When differentiated, the forward loop also computes the gradients, because the loss is a sum and its cotangent is one
number. This takes 3 head matmuls instead of 4 (as in Liger kernels, arXiv:2410.10989). Weight gradients are accumulated
per batch shard, so they are reduced over devices once, not once per chunk.
"""
from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.kernels import products
from meshtrain.model.execution import Execution
from meshtrain.model.layers import gather_weight
from meshtrain.model.stats import AUX_LOSS, LayerStats
from meshtrain.names import NO_TARGET
from meshtrain.sharding import reduced
from meshtrain.sharding.mesh import psum
from meshtrain.sharding.rules import GATHERED, Layout


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """Settings of the loss.

    axes: logical axes of the head's weight. Ids from vocab_size on are padding with zero probability. z_loss: weight of
    lse². chunk: tokens per chunk and batch shard.
    """
    axes: tuple[str, str]
    vocab_size: int
    z_loss: float
    chunk: int
    softcap: float = 0.0        # tanh bound of the logits; 0: none
    frozen: bool = False        # the weight has no gradient
    temperature: float = 1.0    # divides the logits, after the softcap
    counts_hits: bool = False   # `loss_sums` also counts the targets that have the largest logit


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss_sums(ex: Execution, spec: LossSpec, x_BTD, w, targets_BT):
    """Return (objective, nll), float32 sums over all tokens with a target, where objective = nll + z_loss · Σ lse².

    x_BTD: normed output of the last layer, sharded like the residual stream. w: [D, V] or, if tied, [V, D]. nll is a
    metric: only the objective's gradient is defined. With spec.counts_hits, nll is the array [nll, number of hits].
    """
    return _sums(ex, spec, x_BTD, w, targets_BT, with_grads=False)[0]


def _loss_backward(ex: Execution, spec: LossSpec, saved, cotangents):
    return *scale_grads(saved, cotangents[0]), None


def scale_grads(grads, scale):
    """Return (dx_BTD, dw), each times the objective's cotangent `scale`. dw is None if the weight is frozen."""
    dx_BTD, dw = grads
    return (dx_BTD * scale).astype(dx_BTD.dtype), None if dw is None else dw * scale


def _sums(ex: Execution, spec: LossSpec, x_BTD, w, targets_BT, with_grads: bool):
    """Return ((objective, nll), (dx_BTD, dw) or None)."""
    f32, chunks = jnp.float32, Chunks(ex, spec, x_BTD, w, targets_BT)

    def visit(carry, c):
        objective, nll, grads = carry
        x_c, t_c, logits, lse, hit_V, hit, top = chunks.take(c)
        has = (t_c != NO_TARGET).astype(f32)
        nll_c = has * (lse - hit)
        metric_c = jnp.stack([nll_c, has * (hit >= top)]) if spec.counts_hits else nll_c
        nll = nll + metric_c.sum((-2, -1))
        objective = objective + (nll_c + spec.z_loss * has * lse * lse).sum((1, 2))
        if with_grads:
            p = jnp.exp(logits - lse[..., None])
            dl = has[..., None] * (p * (1 + 2 * spec.z_loss * lse)[..., None] - hit_V.astype(f32))
            grads = chunks.add(grads, c, x_c, logits, dl)
        return (objective, nll, grads), None

    zero_n = jnp.zeros((chunks.tokens.n,), f32)
    zero_metric = jnp.stack([zero_n] * 2) if spec.counts_hits else zero_n
    start = zero_n, zero_metric, chunks.zeros() if with_grads else None
    (objective, nll, grads), _ = jax.lax.scan(visit, start, jnp.arange(chunks.tokens.count))
    return (objective.sum(), nll.sum(-1)), chunks.finish(grads) if with_grads else None


loss_sums.defvjp(partial(_sums, with_grads=True), _loss_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_nll(ex: Execution, spec: LossSpec, x_BTD, w, targets_BT):
    """Return the nll of each token [B, T], float32, 0 without a target.

    Like `loss_sums`, the function is differentiable with respect to x and w.

    Objectives that are not sums over tokens use this function. They know the weight of a token's nll only after the
    forward, so the backward recomputes the logits (4 head matmuls instead of 3).
    """
    chunks = Chunks(ex, spec, x_BTD, w, targets_BT)

    def visit(nll, c):
        _, t_c, _, lse, _, hit, _ = chunks.take(c)
        return chunks.tokens.put(nll, jnp.where(t_c != NO_TARGET, lse - hit, 0.0), c), None
    zeros = jnp.zeros(chunks.targets_nrs.shape, jnp.float32)
    return chunks.tokens.join(jax.lax.scan(visit, zeros, jnp.arange(chunks.tokens.count))[0])


def _nll_backward(ex: Execution, spec: LossSpec, saved, d_BT):
    chunks = Chunks(ex, spec, *saved)
    d_nrs = chunks.tokens.cut(d_BT)

    def visit(grads, c):
        x_c, t_c, logits, lse, hit_V, _, _ = chunks.take(c)
        weight = jnp.where(t_c != NO_TARGET, chunks.tokens.take(d_nrs, c), 0.0)
        dl = weight[..., None] * (jnp.exp(logits - lse[..., None]) - hit_V.astype(jnp.float32))
        return chunks.add(grads, c, x_c, logits, dl), None
    grads, _ = jax.lax.scan(visit, chunks.zeros(), jnp.arange(chunks.tokens.count))
    return *chunks.finish(grads), None


token_nll.defvjp(lambda ex, spec, *given: (token_nll(ex, spec, *given), given), _nll_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def token_losses(ex: Execution, spec: LossSpec, of_token, x_BTD, w, targets_BT, given):
    """Return (sum of the losses of the tokens with a target, log-probability [B, T], entropy [B, T]), float32.

    Log-probability and entropy are 0 where there is no target. of_token: an elementwise function (log-probability,
    entropy, given) -> (loss, its derivative by the log-probability, its derivative by the entropy; None means 0).
    given: arrays [B, T] by name; places without a target are not read. Only the sum's gradient with respect to x and w
    is defined. Like `loss_sums`, the function takes 3 head matmuls.
    """
    return _token_losses(ex, spec, of_token, x_BTD, w, targets_BT, given, with_grads=False)[0]


def _token_losses_backward(ex: Execution, spec: LossSpec, of_token, saved, cotangents):
    return *_loss_backward(ex, spec, saved, cotangents), None


def _token_losses(ex: Execution, spec: LossSpec, of_token, x_BTD, w, targets_BT, given, with_grads: bool):
    """Return (the result of `token_losses`, (dx_BTD, dw) or None)."""
    f32, chunks = jnp.float32, Chunks(ex, spec, x_BTD, w, targets_BT)
    assert not chunks.manual        # the sums over the vocabulary below are not those of a pipeline
    given_nrs = {name: chunks.tokens.cut(x) for name, x in given.items()}

    def visit(carry, c):
        total, logps, entropies, grads = carry
        x_c, t_c, logits, lse, hit_V, hit, _ = chunks.take(c)
        has, p = t_c != NO_TARGET, jnp.exp(logits - lse[..., None])

        def at_target(x):
            return jnp.where(has, x, 0.0)
        logits_or_0 = jnp.where(logits > -jnp.inf, logits, 0.0)
        mean = jnp.sum(p * logits_or_0, -1)
        logp, entropy = at_target(hit - lse), at_target(lse - mean)
        loss, by_logp, by_entropy = of_token(
            logp, entropy, {name: at_target(chunks.tokens.take(x, c)) for name, x in given_nrs.items()})
        total = total + at_target(loss).sum((1, 2))
        if with_grads:
            dl = at_target(by_logp)[..., None] * (hit_V.astype(f32) - p)
            if by_entropy is not None:
                dl = dl - at_target(by_entropy)[..., None] * p * (logits_or_0 - mean[..., None])
            grads = chunks.add(grads, c, x_c, logits, dl)
        return (total, chunks.tokens.put(logps, logp, c), chunks.tokens.put(entropies, entropy, c), grads), None

    zeros = jnp.zeros(chunks.targets_nrs.shape, f32)
    start = jnp.zeros((chunks.tokens.n,), f32), zeros, zeros, chunks.zeros() if with_grads else None
    (total, logps, entropies, grads), _ = jax.lax.scan(visit, start, jnp.arange(chunks.tokens.count))
    outputs = total.sum(), chunks.tokens.join(logps), chunks.tokens.join(entropies)
    return outputs, chunks.finish(grads) if with_grads else None


token_losses.defvjp(partial(_token_losses, with_grads=True), _token_losses_backward)


def largest_and_sum(x):
    """Return (max of x, sum of exp(x - max)) over the last dim.

    The function takes one pass, except on CPUs, where XLA merges element by element and one pass is seven times slower.
    """
    return jax.lax.platform_dependent(x, cpu=in_two_passes, default=in_one_pass)


def in_two_passes(x):
    top = x.max(-1)
    return top, jnp.exp(x - jnp.where(top > -jnp.inf, top, 0.0)[..., None]).sum(-1)     # a shard may be all padding


def in_one_pass(x):
    """Return (max of x, sum of exp(x - max)) over the last dim in one pass. Source: arXiv:1805.02867."""
    def merge(a, b):
        (top_a, sum_a), (top_b, sum_b) = a, b
        scale = jnp.where(top_a == top_b, 1.0, jnp.exp(-jnp.abs(top_a - top_b)))      # both may be -inf
        total = jnp.where(top_a > top_b, sum_a + scale * sum_b, scale * sum_a + sum_b)
        return jnp.maximum(top_a, top_b), total
    zero = jnp.float32(-jnp.inf), jnp.float32(0)
    return jax.lax.reduce((x, jnp.ones_like(x)), zero, merge, (x.ndim - 1,))


def cap(logits, softcap: float):
    """Return the logits bounded to ±softcap by tanh; unchanged if softcap is 0."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


class Chunks:
    """The tokens in chunks, and the logits of each chunk, sharded over the vocabulary V.

    Automatic mesh axes shard V by constraints. Manual axes (the stages of a pipeline) shard V by explicit collectives.
    """

    def __init__(self, ex: Execution, spec: LossSpec, x_BTD, w, targets_BT):
        self.ex, self.spec = ex, spec
        self.full = gather_weight(ex, w, spec.axes)               # once per microbatch, bf16
        self.tokens = _TokenChunks(ex.layout, x_BTD.shape, spec.chunk)
        self.letters = "DV" if spec.axes == ("embed", "vocab") else "VD"
        self.vocab_axes = ex.layout.mesh_axes("activations", "vocab") or None
        self.manual = ex.layout.manual_axes("activations", "vocab")
        V = self.full.shape[self.letters.index("V")]
        self.first = jax.lax.axis_index(self.manual) * V if self.manual else 0
        self.real_V = self.first + jnp.arange(V) < spec.vocab_size
        self.x_nrsD, self.targets_nrs = self.tokens.cut(x_BTD), self.tokens.cut(targets_BT, fill=NO_TARGET)

    def take(self, c):
        """Return x, targets, logits, log-sum-exp, one-hot targets, the target's logit and the largest one, for chunk c.

        All but the first two are float32. Logits and one-hot targets are [n, r, s, V]; log-sum-exp, the target's and
        the largest logit are [n, r, s]. With sequence parallelism each chunk is gathered over tensor here (s·D bf16),
        and its dx is scattered when it is stored.
        """
        x_c, t_c = self.tokens.take(self.x_nrsD, c), self.tokens.take(self.targets_nrs, c)
        logits = self._pin(products.einsum(f"nrsD,{self.letters}->nrsV", x_c, self.full, jnp.float32))
        logits = jnp.where(self.real_V, cap(logits, self.spec.softcap) / self.spec.temperature, -jnp.inf)
        hit_V = self.first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3) == t_c[..., None]
        hit = jnp.sum(jnp.where(hit_V, logits, 0.0), -1)
        top, total = largest_and_sum(logits)
        if self.manual:
            # Two small all-reduces (s float32 each way), in sequence. Concurrent all-reduces may pair up wrongly on
            # CPUs.
            own, top = top, jax.lax.pmax(top, self.manual)
            total, hit = jax.lax.psum((jnp.exp(own - top) * total, hit), self.manual)
        return x_c, t_c, logits, top + jnp.log(total), hit_V, hit, top

    def zeros(self):
        """Return (dx, dw) before the first chunk. dw is None if the weight is frozen."""
        dx = jnp.zeros_like(self.x_nrsD)
        return dx, None if self.spec.frozen else self._pin_dw(
            jnp.zeros((self.tokens.n,) + self.full.shape, jnp.float32))

    def add(self, grads, c, x_c, logits, dl):
        """Return (dx, dw) with the gradients of chunk c added. dl: the cotangent of the chunk's logits."""
        dx, dw = grads
        if self.spec.softcap:        # at padding dl is 0, and the logit has no derivative
            bent = logits * self.spec.temperature / self.spec.softcap
            dl = dl * jnp.where(logits > -jnp.inf, 1 - jnp.square(bent), 0.0)
        dl = self._pin((dl / self.spec.temperature).astype(self.ex.numerics.dtype))
        dx_c = products.einsum(f"nrsV,{self.letters}->nrsD", dl, self.full)
        dx = self.tokens.put(dx, psum(dx_c, self.manual) if self.manual else dx_c, c)
        if dw is not None:
            dw = self._pin_dw(dw + products.einsum(f"nrsD,nrsV->n{self.letters}", x_c, dl, jnp.float32))
        return dx, dw

    def finish(self, grads):
        """Return (dx_BTD, dw) after the last chunk."""
        dx, dw = grads
        layout = self.ex.layout
        # One reduction over batch shards. No op may come between the sum and the constraint.
        dw = None if dw is None else reduced.place(
            layout, reduced.add(dw, (0,), reduced.dtype_of(layout)), self.spec.axes)
        return layout.act(self.tokens.join(dx), "batch", "residual_seq", None), dw

    def _pin(self, x_nrsV):
        return self.tokens.pin(x_nrsV, self.tokens.shards, None, None, self.vocab_axes)

    def _pin_dw(self, dw):
        return self.tokens.pin(dw, self.tokens.shards, *self.ex.layout.spec(GATHERED, self.spec.axes))


class _TokenChunks:
    """[B, T, …] as [n, r, tokens, …]: n token shards × r shards of the residual stream, padded to whole chunks.

    n = b · c shards of batch and sequence. The loss treats tokens independently, so both kinds of shards are treated
    alike.
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
        """Return chunk c, gathered over the shards of the residual stream.

        The inner sharding constraint makes XLA slice before the gather. Without this constraint, every chunk gathers
        all of x and then slices it.
        """
        x_c = jax.lax.dynamic_slice_in_dim(x, c * self.chunk, self.chunk, 2)
        return self.pin(self.pin(x_c, self.shards, self.residual), self.shards)

    def put(self, x, value, c):
        return jax.lax.dynamic_update_slice_in_dim(x, self.pin(value, self.shards, self.residual), c * self.chunk, 2)


@jax.custom_vjp
def with_loss(y, loss):
    """Return y. In the backward, `loss` gets the cotangent 1, as if it were added to the objective."""
    del loss
    return y


with_loss.defvjp(lambda y, loss: (y, None), lambda _, dy: (dy, jnp.float32(1)))


def with_balance_loss(y, stats: LayerStats, tokens):
    """Return y. In the backward, the objective also has the balance loss of `stats`, divided by the step's tokens."""
    balance = stats.by_name.get(AUX_LOSS)
    return y if balance is None else with_loss(y, balance.value / tokens)
