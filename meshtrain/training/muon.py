"""Muon: momentum in which each weight matrix is orthogonalized by five Newton–Schulz steps.

Newton–Schulz needs whole matrices, which ZeRO and tensor parallelism shard. Layers are stacked, so all-to-alls give
each device whole matrices of a few layers, and all-to-alls back shard them again, both in the compute dtype. With an 8B
model over 8 GPUs each GPU sends 2.8 GiB a step; gathers in float32 would send 236 GiB. A number of layers that the
devices do not divide is padded with zeros.

Sources: https://kellerjordan.github.io/posts/muon, arXiv:2502.16982 (Moonlight). As in optax (0.2.8), and unlike both
sources, the two terms of the Nesterov sum are bias-corrected, as in NAdam. Newton–Schulz divides out the length of the
sum, but in the first steps the newest gradient has up to twice the weight in the sum.
"""
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.kernels import products

MOMENTUM = 0.95  # value of Moonlight and of Jordan's original; cfg.b1 and cfg.b2 are for adamw
STEPS, EPSILON = 5, 1e-8


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """The matrix dims of one leaf. Dims in neither tuple are a batch of independent matrices."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    placement: NamedSharding | None = None  # sharding of its momentum; None: whole on every device


def scale_by_muon(matrices: Any, dtype: Any) -> optax.GradientTransformation:
    """Return a transformation that replaces gradients with orthogonal matrices.

    The state is optax's, float32 like the gradients.

    matrices: a tree of `MatrixDims` like params. dtype: the dtype in which matrices are sent and multiplied. Sums are
    float32.
    """
    momentum = optax.contrib.scale_by_muon(beta=MOMENTUM)

    def update(grads, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, MOMENTUM, 1)
        ahead = optax.tree.bias_correction(mu, MOMENTUM, optax.safe_increment(count))
        now = optax.tree.bias_correction(grads, MOMENTUM, count)
        nesterov = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, ahead, now)
        updates = jax.tree.map(lambda x, of: orthogonalize(x, of, state.ns_coeffs, dtype), nesterov, matrices)
        return updates, state._replace(count=count, mu=mu)

    return optax.GradientTransformation(momentum.init, update)


def orthogonalize(x: jax.Array, of: MatrixDims, coefficients: jax.Array, dtype: Any) -> jax.Array:
    """Return every matrix of `x` with its singular values near 1: float32, sharded like `x`. coefficients: [3]."""
    order = tuple(dim for dim in range(x.ndim) if dim not in of.inputs + of.outputs) + of.inputs + of.outputs
    num_batch = x.ndim - len(of.inputs) - len(of.outputs)

    def whole(x):
        lead = x.shape[: x.ndim - len(of.inputs) - len(of.outputs)]
        fan_in = math.prod(x.shape[len(lead) : len(lead) + len(of.inputs)])
        return _newton_schulz(x.reshape(*lead, fan_in, -1), coefficients).reshape(x.shape)

    y = _by_layers(whole, x.astype(dtype).transpose(order), num_batch, of.placement, order)
    return y.transpose([order.index(dim) for dim in range(x.ndim)]).astype(jnp.float32)


def _by_layers(whole, x, num_batch, placement, order):
    """Apply the function `whole` to x [layers, …] with every matrix whole on one device. The result is sharded like x.

    placement: sharding of the original array; its dims in `order` are the dims of x. XLA decides how to compute a
    matrix outside the layer stacks.
    """
    spec = (*placement.spec, *(None,) * x.ndim) if placement else (None,) * x.ndim
    entries = [spec[dim] for dim in order]
    split = [dim for dim in range(num_batch, x.ndim) if entries[dim]]
    if not split or not num_batch:
        return whole(x)

    def axes(entry):
        return entry if isinstance(entry, tuple) else (entry,) if entry else ()

    def num_shards(names):
        return math.prod(placement.mesh.shape[axis] for axis in names)

    def pin(x, entries):
        return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, P(*entries)))
    # If stages of a pipeline already split the layers, the layers stay in their stage and are padded there.
    parts, devices = num_shards(axes(entries[0])), num_shards(axis for dim in split for axis in axes(entries[dim]))
    num_layers = x.shape[0] // parts
    x = x.reshape(parts, num_layers, *x.shape[1:])
    x = jnp.pad(x, [(0, 0), (0, -num_layers % devices)] + [(0, 0)] * (x.ndim - 2))
    entries, back = [entries[0], None, *entries[1:]], []
    x = pin(x, entries)  # pinned to its present sharding; otherwise it would move before the cast
    # An all-to-all for each dim of a device's shards of the matrices. With one constraint for all dims, XLA gathers
    # them.
    for dim in split:
        back.append(entries)
        entries = [entries[0], axes(entries[1]) + axes(entries[dim + 1]), *entries[2:]]
        entries[dim + 1] = None
        x = pin(x, entries)
    y = pin(whole(x), entries)
    for entries in reversed(back):
        y = pin(y, entries)
    return y[:, :num_layers].reshape(parts * num_layers, *y.shape[2:])


def _newton_schulz(x, coefficients):
    """Return approximately U Vᵀ of the singular value decomposition of x [..., m, n], in x's dtype. Norms and sums are
    float32.

    Five times x ← (aI + bG + cG²) x with G = x xᵀ. aI is added inside the parentheses, because a·x would be a separate
    float32 array.
    """
    a, b, c = coefficients
    dtype, tall = x.dtype, x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    wide = x.astype(jnp.float32)
    x = (wide / (jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) + EPSILON)).astype(dtype)
    for _ in range(STEPS):
        gram = products.einsum("...ij,...kj->...ik", x, x)
        squared = products.einsum("...ij,...jk->...ik", gram, gram)
        step = (a * jnp.eye(x.shape[-2]) + b * gram + c * squared).astype(dtype)
        x = products.einsum("...ij,...jk->...ik", step, x)
    return x.mT if tall else x
