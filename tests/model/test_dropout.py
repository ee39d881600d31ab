"""What is dropped out keeps its expectation, and its bits belong to it alone."""
import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.model.dropout import dropout
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.model.parts import Inputs
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout
from meshtrain.training import step


def test_the_expectation_is_kept_in_bfloat16():
    """What is kept is 1 / (1 - rate), rounded once: by a rounded 1 - rate it was 1.0017 times as large."""
    ex = Execution(Layout(rules.parse(""), dict.fromkeys(AXES, 1)), Numerics(jnp.dtype("bfloat16")),
                          Engines(None))
    index_BT = jnp.zeros((1, 8), jnp.int32) + jnp.arange(8)
    inputs = Inputs(jnp.ones_like(index_BT), index_BT, jnp.zeros(1, jnp.int32), None, jax.random.key(0))
    x_BTD = jnp.tile(jnp.linspace(1.0, 2.0, 256, dtype=jnp.float32).astype(jnp.bfloat16), (1, 8, 1))
    y_BTD = np.asarray(dropout(ex, x_BTD, 0.1, inputs, 0), np.float64)
    kept = y_BTD != 0
    ratio = y_BTD[kept] / np.asarray(x_BTD, np.float64)[kept]
    assert 0.85 < kept.mean() < 0.95 and abs(ratio.mean() * 0.9 - 1) < 4e-4        # 1,800 roundings of at most 0.2%


def test_no_key_of_dropout_is_a_key_of_initialization():
    data = lambda key: tuple(np.asarray(jax.random.key_data(key)).ravel().tolist())
    seed = jax.random.key(7)
    ends, layers_key = jax.random.split(seed)
    used = {data(key) for key in (seed, ends, layers_key, *jax.random.split(layers_key, 64))}
    for number in range(4):
        key = step.dropout_key(7, number)
        assert not used & {data(key), *(data(jax.random.fold_in(key, site)) for site in range(64))}
