"""Dropout whose bits depend on no layout. `training.step.dropout_key` has the key of a step."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtrain.model.execution import Execution
from meshtrain.model.parts import Inputs



def dropout(ex: Execution, x_BTD, rate: float, inputs: Inputs, site):
    """Zero elements with probability `rate`.

    The bits depend on (seed, step, site, global sequence, index, feature) alone. Each token's key is hashed locally, so
    no layout, split or manual region changes them, and nothing is communicated.
    """
    if rate == 0.0 or inputs.dropout_key is None:
        return x_BTD
    key = jax.random.fold_in(inputs.dropout_key, site)
    index_BT = ex.layout.act(inputs.index_BT, "batch", "residual_seq")
    token = jax.vmap(lambda s, row: jax.vmap(lambda t: jax.random.fold_in(jax.random.fold_in(key, s), t))(row))
    keys_BT = token(inputs.sequence_B, index_BT)
    bits = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, x_BTD.shape[-1:], jnp.uint32)))(keys_BT)
    bits = ex.layout.act(bits, "batch", "residual_seq", None)
    # Divided in float32: 1 - 0.1 in bfloat16 would scale every expectation by 1.0017.
    kept = (x_BTD.astype(jnp.float32) / (1 - rate)).astype(x_BTD.dtype)
    return jnp.where(bits >= jnp.uint32(rate * 2**32), kept, 0)
