"""Adafactor: Adam with the second moment factored into one row and one column per weight matrix.

Source: arXiv:1804.04235 (Adafactor), with the changes of arXiv:2106.04560 (section 3.4), so that Adam's learning rate
and weight decay carry over: updates are not scaled by the parameter's own size, and `b2` bounds the decay of the
average.

optax's version takes the two *largest* dims of each array as row and column. For stacked layers [L, D, N, H] these may
be L and D, which averages over layers, or D and H, which leaves a state N times larger than needed. Its update clipping
treats all layers as one block. Here the caller says which dims form the matrix, and each matrix is factored and clipped
separately. optax's version under vmap, with each matrix flattened before, gives the same updates. But the dims of its
moments are products of dims, which have no logical axis, and a row without gradient in a matrix with gradients of 1e6
becomes NaN (optax 0.2.8). Rows of tokens that do not occur have no gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

EPSILON = 1e-30  # added to the squared gradient (the paper's ε1), so that an all-zero row does not divide 0 by 0
DECAY_EXPONENT = 0.8  # β2 at step t is 1 − t^−0.8: the first step forgets the zeros it started from
CLIP_RMS = 1.0  # the paper's d: an update with a larger root mean square per matrix is scaled down to it


class Dims(NamedTuple):
    """The dims of one leaf that form a matrix. Dims in neither tuple are a batch of independent matrices.

    For a leaf that is not a matrix (a norm's gain, a bias), `inputs` is empty, the second moment is not factored, and
    `outputs` are the dims that form one block for clipping.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class AdafactorState(NamedTuple):
    count: jax.Array  # steps taken, int32
    moments: Any  # like params; each leaf is (row [batch, inputs], column [batch, outputs]) or (whole moment,)


def scale_by_factored_rms(dims_of: Callable[[Any], Any], max_decay: float) -> optax.GradientTransformation:
    """Return a transformation that divides each gradient by its factored root mean square.

    The transformation clips the result, matrix by matrix. dims_of: function from a tree of arrays like params to the
    tree of their `Dims`. max_decay: upper bound of β2.
    """

    def init(params):
        def zeros(p, d):
            if not d.inputs:
                return (jnp.zeros(p.shape, jnp.float32),)
            return (jnp.zeros(_without(p.shape, d.outputs), jnp.float32),
                    jnp.zeros(_without(p.shape, d.inputs), jnp.float32))

        return AdafactorState(jnp.zeros([], jnp.int32), jax.tree.map(zeros, params, dims_of(params)))

    def update(grads, state, params=None):
        del params
        dims = dims_of(grads)
        count = optax.safe_increment(state.count)
        decay = jnp.minimum(max_decay, 1 - count.astype(jnp.float32) ** -DECAY_EXPONENT)
        moments = jax.tree.map(lambda g, m, d: _moments(g, m, d, decay), grads, state.moments, dims)
        updates = jax.tree.map(_scale, grads, moments, dims)
        return updates, AdafactorState(count, moments)

    return optax.GradientTransformation(init, update)


def _moments(grad, old, dims, decay):
    squared = jnp.square(grad) + EPSILON
    new = (squared.mean(dims.outputs), squared.mean(dims.inputs)) if dims.inputs else (squared,)
    return tuple(decay * o + (1 - decay) * n for o, n in zip(old, new, strict=True))


def _scale(grad, moments, dims):
    if dims.inputs:
        row, column = jnp.expand_dims(moments[0], dims.outputs), jnp.expand_dims(moments[1], dims.inputs)
        # Two factors rather than rsqrt(row · column): the product of two tiny averages would underflow float32. The
        # bound is there because, next to a gradient of 1e4, the share of a row without gradient (a token that does not
        # occur) would underflow, and 0 · ∞ is NaN.
        share = jnp.maximum(row / row.mean(dims.inputs, keepdims=True), EPSILON)
        update = grad * jax.lax.rsqrt(share) * jax.lax.rsqrt(column)
    else:
        update = grad * jax.lax.rsqrt(moments[0])
    rms = jnp.sqrt(jnp.square(update).mean(dims.inputs + dims.outputs, keepdims=True))
    return update / jnp.maximum(1.0, rms / CLIP_RMS)


def _without(shape, dims):
    return tuple(size for dim, size in enumerate(shape) if dim not in dims)
