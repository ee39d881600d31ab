"""`mt.unpack`: arrays, axes and the model again, of every dialect; what it refuses."""
import dataclasses
import re

import jax
import numpy as np
import pytest
import toys
from flax import linen, nnx

from meshtrain import config
from meshtrain.library.layouts import Layout
from meshtrain.library.unpack import unpack

ONE = Layout("ddp", {})


@pytest.mark.parametrize("dialect", toys.BUILD)
def test_a_model_is_arrays_with_axes_and_again_the_model(dialect):
    parts, loss = toys.BUILD[dialect](ONE)
    named = dict(zip(jax.tree.leaves(parts.axes, is_leaf=lambda x: type(x) is tuple), map(
        np.shape, jax.tree.leaves(parts.params)), strict=True))
    assert named[("vocab", "embed")] == (toys.V, toys.D)
    assert jax.tree.structure(parts.params) == jax.tree.structure(
        parts.axes, is_leaf=lambda x: type(x) is tuple)
    total, count = loss(parts.params, toys.rows(0))
    assert 3 < total / count < 6
    doubled = jax.tree.map(lambda w: 2 * w, parts.params)
    assert loss(doubled, toys.rows(0))[0] != total, "the model again has the arrays that are given"


def test_names_of_flax_are_read_where_it_does_not_shard_eagerly():
    make = lambda: nnx.Linear(4, 8, kernel_init=nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp")),
                              rngs=nnx.Rngs(0))
    with nnx.use_eager_sharding(False):
        assert unpack(make()).axes == {"kernel": ("embed", "mlp"), "bias": (None,)}
    with pytest.raises(config.ConfigError, match="use_eager_sharding.False."):
        unpack(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))


def test_given_axes_replace_metadata():
    model = nnx.Linear(4, 8, kernel_init=nnx.with_metadata(nnx.initializers.normal(), logical_axes=("embed", "mlp")),
                       rngs=nnx.Rngs(0))
    assert unpack(model, {"kernel": ("embed", "heads")}).axes["kernel"] == ("embed", "heads")


def test_what_is_no_parameter_stays_in_the_tree():
    tree = {"w": np.ones((2, 3), np.float32), "steps": np.arange(3), "act": jax.nn.relu}
    parts = unpack(tree, {"w": (None, "mlp")})
    assert parts.params == {"w": tree["w"], "steps": None, "act": None}
    again = parts.join(jax.tree.map(lambda w: w + 1, parts.params))
    assert again["act"] is jax.nn.relu and again["steps"] is tree["steps"] and again["w"][0, 0] == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """As a module of equinox: a registered class with arrays, and a function that is no array, in its tree."""
    weight: jax.Array
    act: object

    def __call__(self, x):
        return self.act(x @ self.weight)


def test_a_module_that_is_a_pytree_needs_globs_of_its_attributes():
    """No equinox is needed for it: its modules are such classes."""
    model = {"ups": [Linear(np.ones((4, 8), np.float32), jax.nn.relu) for _ in range(2)]}
    parts = unpack(model, {"ups/*/weight": ("embed", "mlp")})
    assert parts.axes["ups"][1].weight == ("embed", "mlp")
    value, grads = jax.value_and_grad(lambda p: parts.join(p)["ups"][0](np.ones((2, 4))).sum())(parts.params)
    assert value == 64 and grads["ups"][0].weight.shape == (4, 8) and grads["ups"][0].act is None
    with pytest.raises(config.ConfigError, match=re.escape("ups/*/weight (4, 8): no logical axes; name the dims")):
        unpack(model)


def test_a_module_of_equinox_is_unpacked():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    parts = unpack(model, {"layers/*/weight": ("mlp", "embed")})
    x = np.ones(4, np.float32)
    np.testing.assert_array_equal(parts.join(parts.params)(x), model(x))


class WithStatistics(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)


@pytest.mark.parametrize("make, said", [
    (lambda: WithStatistics(nnx.Rngs(0)), "norm/mean: statistics of a batch .nnx.BatchStat."),
    (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "would be the same in every step; make the module without them"),
    (lambda: linen.BatchNorm(use_running_average=False).init(jax.random.key(0), np.ones((2, 4))) | {
        "params": {"w": linen.Partitioned(np.ones((4, 4)), ("embed", "mlp"))}}, "collection 'batch_stats'"),
    (lambda: linen.Dense(2), "(?s)Dense.* has no floating-point arrays; give .* the result of a linen module's init"),
    (lambda: {"w": np.ones((2, 2))}, "no logical axes; name the dims")])
def test_what_would_be_silently_constant_or_whole_is_refused(make, said):
    with pytest.raises(config.ConfigError, match=said):
        unpack(make())
