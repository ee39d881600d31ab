"""`mt.prove` of a loss: every layout computes what one device computes, and the mistakes of a loss are found."""
import jax
import jax.numpy as jnp
import pytest
import small_models
from small_models import AXES, STACK, draw_params, draw_rows

import meshtrain as mt

PARAMS, ROWS = draw_params(D=16, F=32), draw_rows(16)


def prove(loss, rules=("zero1", "zero3"), cells=2, **more):
    return mt.prove(loss, PARAMS, AXES, rules=list(rules), rows=ROWS, cells=cells, **more)


def test_a_loss_and_its_gradients_are_those_of_one_device():
    found = prove(small_models.loss, cells=1)
    assert not found["failed"] and len(found["cells"]) == 1, str(found)
    assert set(found["cells"][0]["leaves"]) == {"blocks/up", "blocks/down", "table", "out"}
    assert "equal; loss" in str(found)


@pytest.mark.full
def test_a_stack_is_also_proved_with_stages():
    found = mt.prove(STACK, PARAMS, AXES, rules=["ddp"], rows=ROWS)
    assert not found["failed"], str(found)
    assert any("mesh.stage" in cell["settings"] for cell in found["cells"])
    assert not any("mesh.context" in cell["settings"] for cell in found["cells"])


@pytest.mark.full
def test_a_loss_that_knows_its_layout_is_also_proved_with_split_sequences():
    def make(layout):
        def loss(params, rows):
            # XLA aborts at lookups of split tokens in a split dim.
            x_BTV, y_BTV = (jax.nn.one_hot(rows[name], small_models.V) for name in "xy")
            x = layout.constrain(x_BTV @ params["table"], "batch", "seq", None)
            x = small_models.layer({name: w[0] for name, w in params["blocks"].items()}, x)
            logits = layout.constrain(x @ params["out"], "batch", "seq", "vocab")
            nats = -(jax.nn.log_softmax(logits) * y_BTV).sum(-1)
            return jnp.sum(nats * rows["real"]), rows["real"].sum()
        return loss
    found = prove(make, rules=["ddp"], cells=None)
    assert not found["failed"] and any("mesh.context" in cell["settings"] for cell in found["cells"]), str(found)


def mean(params, rows):
    total, count = small_models.loss(params, rows)
    return total / count, 1


def centre(params, rows):
    """Batch statistics."""
    def head(ends, x, rows):
        return small_models.head(ends, x - x.mean(0), rows)
    return mt.Stack(small_models.embed, small_models.layer, head)(params, rows)


def weigh_by_place(params, rows):
    weight = jnp.linspace(0, 1, rows["x"].shape[0])[:, None]
    return small_models.loss(params, rows | {"real": rows["real"] * weight})


@pytest.mark.parametrize("loss, said", [
    (mean, "the loss is a mean, or a row depends on other rows"),
    *(pytest.param(*one, marks=pytest.mark.full) for one in (
        (centre, "or a row depends on other rows"), (weigh_by_place, "it depends on the order of rows")))])
def test_the_mistakes_of_a_loss_are_found(loss, said):
    found = prove(loss, cells=1)
    assert found["failed"] and any(said in finding for finding in found["findings"]), str(found)
    assert found["cells"][0]["differs"]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.full)])
def test_dropout_is_proved_and_a_key_that_rows_share_is_found(shared):
    def drop(params, rows, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, rows["real"].shape[1:]))(keys)
        return small_models.loss(params, rows | {"real": rows["real"] * (kept[:1] if shared else kept)})
    found = prove(drop, cells=1)
    assert found["failed"] == shared and found["cells"][0]["differs"] == shared, str(found)
    assert any("draw by each row's own key" in finding for finding in found["findings"]) == shared


def test_what_cannot_be_proved_is_told():
    for loss, more, said in (
            (lambda p, r: small_models.loss(p, r)[0], {}, "return two scalars"),
            (lambda p, r: (small_models.loss(p, r)[0] * jnp.nan, 1), {}, "prove: blocks/down and 4 more: not finite on one device"),
            (small_models.loss, dict(rules=("nothing",)), "nothing")):
        with pytest.raises(ValueError, match=said):
            prove(loss, **more)
    with pytest.raises(mt.ConfigError, match="params: n has dtype int32 and cannot be trained"):
        mt.prove(small_models.loss, PARAMS | {"n": jnp.arange(2)}, AXES | {"n": (None,)}, rows=ROWS)
    with pytest.raises(mt.ConfigError, match=r"w: \(32, 32\) is not \(shape, logical axes\); write e.g."):
        mt.prove(model=lambda w, x: x @ w["w"], parameters={"w": (32, 32)})
    with pytest.raises(mt.ConfigError, match="rows="):
        mt.prove(small_models.loss, PARAMS, AXES)
    with pytest.raises(mt.ConfigError, match="axes= and rows= are for a loss"):
        mt.prove("configs/quickstart.toml", {}, ["ddp"])
