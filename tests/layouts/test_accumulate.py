"""Gradients that are added to their accumulators layer by layer are those that autodiff makes of the whole loss."""
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling

from meshtrain import config
from meshtrain.model import transformer
from meshtrain.model.stats import Normalizers
from meshtrain.training import accumulate, objective
from test_layer_groups import LEADING, Wide, batch_of, execution, loss, model_of
from test_layouts import MODEL


def model_with_aux(monkeypatch, **model):
    """Every layer adds to the objective beside the stream."""
    monkeypatch.setattr(transformer, "Layer", Wide)
    return transformer.build(config.Run(model=MODEL | model).model)


@pytest.mark.parametrize("remat, model", [
    ("selective", None), pytest.param("none", dict(tie_embeddings=True), marks=sampling.GRID),
    pytest.param("full", dict(residual_dropout=0.2), marks=sampling.GRID),
    ("offload", dict()),
], ids=["two groups", "tied", "dropout", "offload"])  # fmt: skip
def test_gradients_added_layer_by_layer_are_those_of_autodiff(remat, model, monkeypatch):
    model = model_of(*LEADING) if model is None else model_with_aux(monkeypatch, **model)
    step = types.SimpleNamespace(model=model, ex=execution(remat), objective=objective.NextToken(1e-2, 24),
                                 in_place=remat == "selective")
    p, batch, count = model.init(jax.random.key(0)), batch_of(), jnp.float32(100)
    before = jax.tree.map(lambda w: 1e-3 * jnp.ones_like(w), p)

    def by_autodiff(p):
        def loss_of(p):
            total, nll, aux = loss(model, step.ex, p, batch, jax.random.key(5), z_loss=1e-2, chunk=24)
            return total / count, (nll, aux)
        new, sums = jax.grad(loss_of, has_aux=True)(p)
        return jax.tree.map(jnp.add, before, new), *sums

    @jax.jit
    def both(p):
        made = accumulate._make_backward(step, model.divide(p), batch, Normalizers(count, count), jax.random.key(5))
        # of an earlier microbatch: nobody reads it
        room = jax.tree.map(lambda a: jnp.full(a.shape, 3, a.dtype), made.buffers)
        return by_autodiff(p), made.add(before, batch, room)
    with jax.default_matmul_precision("highest"):
        (expected, *expected_sums), (got, nll, _, stats) = both(p)
    sums = [nll, {name: stat.value for name, stat in stats.by_name.items()}]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), sums, expected_sums)
    for (path, e), g in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        assert np.abs(e - 1e-3).max() > 0, path
        # The same sums in the same order; what is made again may be fused with other neighbours: a few roundings.
        assert np.linalg.norm(g - e) <= 1e-6 * np.linalg.norm(e - 1e-3), jax.tree_util.keystr(path)
