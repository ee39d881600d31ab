"""Gradients of anybody's loss, by rule files: values, placement, what is refused. What is sent: `test_gradient_bytes`."""
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import AXES, STACK, draw_params, draw_rows, head, loss, plain

from meshtrain import config
from meshtrain.library.layouts import Layout
from meshtrain.library.stack import Stack

LAYOUTS = {"one device": ("ddp", {}), "ddp": ("ddp", dict(data=8)), "zero1": ("zero1", dict(data=4, fsdp=2)),
           "zero2": ("zero2", dict(fsdp=8)), "zero3": ("zero3", dict(fsdp=8)), "hsdp": ("hsdp_zero1", dict(data=2, fsdp=4)),
           "zero3, tensor": ("zero3", dict(fsdp=4, tensor=2))}


def compute(layout: Layout, loss, rows=None, axes=AXES, microbatches=4, **given):
    rows = draw_rows() if rows is None else rows
    step = jax.jit(layout.gradients(loss, axes, microbatches, **given.pop("options", {})))
    return step(layout.place(draw_params(), axes), rows, **given)


ABORTING = {"ddp, context, tensor": ("ddp", dict(data=2, context=2, tensor=2)),
            "hsdp, tensor": ("hsdp_zero1", dict(data=2, fsdp=2, tensor=2))}     # XLA, at take_along_axis


@pytest.mark.filterwarnings("ignore:gradients on Layout")
@pytest.mark.parametrize("loss", [loss, STACK], ids=["loss", "stack"])
@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in ABORTING)])
def test_the_mean_over_masked_tokens_and_every_gradient_are_those_of_one_device(name, loss):
    layout = Layout(*(LAYOUTS | ABORTING)[name])
    with jax.default_matmul_precision("highest"):
        value, grads = compute(layout, loss)
        expected, expected_grads = plain(draw_params(), draw_rows())
    # sums of float32 in another order
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for (path, g), e, stored in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads),
                                    jax.tree.leaves(layout.shardings(draw_params(), AXES)), strict=True):
        assert np.abs(g - e).max() <= 2e-6 * np.abs(e).max(), jax.tree_util.keystr(path)
        assert g.dtype == np.float32 and g.sharding.is_equivalent_to(stored, g.ndim), "placed as [optimizer]"


def drop_out(params, rows, keys):
    """Half of each row's inputs, by a key of its own."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (rows["x"].shape[1],)))(keys)
    return loss(params, rows | {"real": rows["real"] & kept})


def test_dropout_is_that_of_one_device_and_another_in_each_row():
    key = jax.random.key(3)
    with jax.default_matmul_precision("highest"):
        found = [compute(Layout(*LAYOUTS[name]), drop_out, key=key)[0] for name in ("one device", "ddp", "zero2")]
        rows = draw_rows()
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(32, dtype=jnp.uint32))
        total, count = drop_out(draw_params(), rows, keys)
    np.testing.assert_allclose(found, total / count, rtol=1e-6)
    assert len({key.tobytes() for key in np.asarray(jax.random.key_data(keys))}) == 32


def test_weights_are_read_in_the_compute_dtype_and_gradients_are_summed_in_float32():
    seen = []

    def note(params, rows):
        seen.append(params["out"].dtype)
        return loss(params, rows)
    _, grads = compute(Layout("zero1", dict(data=2)), note, options=dict(compute="bfloat16"))
    assert {*map(str, seen)} == {"bfloat16"} and {str(g.dtype) for g in jax.tree.leaves(grads)} == {"float32"}


def mean(params, rows):
    total, count = loss(params, rows)
    return total / count


def pair(ends, x):
    return x, x


@pytest.mark.parametrize("options", [{}, dict(compute="bfloat16")])
def test_a_count_below_one_divides_the_sum_too(options):
    """Weights of tokens that add up to less than 1."""
    layout, params = Layout("zero1", dict(data=2)), {"w": np.ones((4, 2), np.float32)}
    weights = np.linspace(0, 0.02, 8, dtype=np.float32)

    def loss(p, rows):
        return jnp.sum((p["w"] ** 2).sum() * rows), rows.sum()
    value, grads = jax.jit(layout.gradients(loss, {"w": ("embed", None)}, 2, **options))(params, weights)
    np.testing.assert_allclose(value, 8, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], 2, rtol=1e-2 if options else 1e-6)     # bfloat16
    nothing = jax.jit(layout.gradients(loss, {"w": ("embed", None)}))(params, 0 * weights)
    assert nothing[0] == 0 and not nothing[1]["w"].any(), "no row counts"


@pytest.mark.parametrize("options, said", [
    (dict(microbatches=0), "microbatches=0 is not a whole number of at least 1"),
    (dict(microbatches=2.0), "microbatches=2.0 is not a whole number"),
    (dict(compute="bf16"), "compute='bf16' is not a floating dtype"),
    (dict(compute="int8"), "compute='int8' is not a floating dtype"),
    (dict(loss=3), "loss=3 is not a function")])
def test_an_argument_of_another_kind_is_refused_at_once(options, said):
    with pytest.raises(config.ConfigError, match=said):
        Layout("ddp", dict(data=2)).gradients(**dict(loss=loss, axes=AXES) | options)


@pytest.mark.parametrize("dtype, said", [("complex64", "store its real and its imaginary part"), ("int32", "close over it")])
def test_arrays_whose_gradients_would_be_lost_are_refused(dtype, said):
    layout, params = Layout("ddp", dict(data=2)), {"w": np.ones(2, dtype)}
    with pytest.raises(config.ConfigError, match=f"params: w has dtype {dtype} and cannot be trained; {said}"):
        jax.jit(layout.gradients(loss, {}))(params, np.ones(2))


REFUSED = {
    "a mean": (mean, r"the loss returned a scalar; return two scalars \(sum, count\)"),
    "an integer sum": (lambda p, rows: (loss(p, rows)[0].astype(int), 1), "a sum of dtype int32 .*; return a floating sum"),
    "a complex sum": (lambda p, rows: (loss(p, rows)[0] * 1j, 1), "a sum of dtype complex64 "),
    "a dict of counts": (lambda p, rows: (loss(p, rows)[0], {"n": 1}), "return two scalars"),
    "sums by row": (lambda p, rows: (loss(p, rows)[0] * jnp.ones(4), 1), r"the loss returned \(\(4,\), \(\)\)"),
    "a head of means": (Stack(lambda e, rows: e["table"][rows["x"]], lambda w, x: x, lambda e, x, rows: x.sum()),
                        "the head of the Stack returned a scalar"),
    "two streams": (Stack(lambda e, rows: {"a": e["table"][rows["x"]]}, lambda w, x: x, head),
                    "embed returned .*x must be one array"),
    "a layer of two": (Stack(lambda e, rows: e["table"][rows["x"]], pair, head), "layer returned .*one array like x"),
    "another dtype": (Stack(lambda e, rows: e["table"][rows["x"]], lambda w, x: x.astype(jnp.bfloat16), head),
                      r"layer turned x float32\[.*\] into bfloat16\[.*return y.astype\(x.dtype\)"),
    "other layers": (Stack(lambda e, rows: e["table"][rows["x"]], lambda w, x: x, head, layers="layers"),
                     "params have no key 'layers', .*keys: blocks, out, table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_and_no_stack_is_refused(name):
    wrong, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        compute(Layout("ddp", dict(data=2)), wrong)


@pytest.mark.parametrize("rows, message", [
    (draw_rows(24), "24 rows do not divide over 4 microbatches × data 4; use a multiple of 16, e.g. 32"),
    (draw_rows(32) | {"x": draw_rows(16)["x"]}, "must be \\[B, …\\] with the same number of rows")])
def test_rows_that_do_not_divide_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        compute(Layout("ddp", dict(data=4)), loss, rows)


def test_a_call_outside_jit_is_refused_by_name():
    layout = Layout("ddp", {})
    with pytest.raises(ValueError, match="gradients: call the function inside jax.jit"):
        layout.gradients(loss, AXES)(draw_params(), draw_rows(8))


@pytest.mark.parametrize("name", ABORTING)
def test_a_lookup_at_which_xla_aborts_is_told_with_its_line_and_one_by_all_dims_is_not(name):
    def index(ends, x, rows):
        logits = x @ ends["out"]
        picked = logits[jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1]), rows["y"]]
        return (jax.nn.logsumexp(logits, -1) - picked).sum(), picked.size
    layout = Layout(*ABORTING[name])

    def trace(loss):
        with warnings.catch_warnings(record=True) as told:
            jax.jit(layout.gradients(loss, AXES, 4)).trace(layout.place(draw_params(), AXES), draw_rows())
        return [str(one.message) for one in told if "otherwise XLA aborts" in str(one.message)]
    said = r"reduced over data in each microbatch, because otherwise XLA aborts at the lookup at library/small_models.py:\d+; "
    assert [re.search(said, message) is not None for message in trace(STACK)] == [True]
    assert trace(Stack(STACK.embed, STACK.layer, index)) == []
    assert trace(lambda p, rows: Stack(STACK.embed, STACK.layer, index)(p, rows)) == []


def test_a_pipeline_refuses_a_lookup_at_which_xla_aborts():
    layout = Layout("ddp", dict(stage=2, context=2, tensor=2))
    with pytest.raises(ValueError, match=r"pipeline: XLA aborts at the lookup at library/small_models.py:\d+ .*index all dims"):
        jax.jit(layout.gradients(STACK, AXES, 2, schedule="1f1b")).trace(layout.place(draw_params(), AXES), draw_rows())


def test_a_stack_with_a_key_is_refused():
    with pytest.raises(ValueError, match="key= does not work with a Stack"):
        compute(Layout("ddp", {}), STACK, key=jax.random.key(0))
