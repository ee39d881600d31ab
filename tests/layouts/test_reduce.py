"""Gradients that a rule file reduces in bfloat16: the line, what refuses it, and what the compiled step adds in which dtype."""
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest

import meshtrain as mt
from meshtrain import config, scratch
from meshtrain.parity import compare
from meshtrain.names import AXES
from meshtrain.sharding import reduced, rules
from meshtrain.shipped import locate_shipped

NARROW = 'extends = "zero1"\n[grads]\nreduce = "bfloat16"\n'


def test_the_line_is_inherited_taken_back_and_written_down(tmp_path):
    (tmp_path / "narrow.toml").write_text(NARROW)
    of = lambda text: rules.parse(text, str(tmp_path / "mine.toml"))
    assert rules.load(locate_shipped("sharding_rules/zero1.toml")).reduce == "float32"
    mine = of('extends = "narrow"\n[grads]\nembed = "fsdp"\n')
    assert mine.reduce == "bfloat16" and mine.tables["grads"]["embed"] == ("fsdp",)
    assert of('extends = "narrow"\n[grads]\nreduce = "float32"\n').reduce == "float32"
    again = rules.parse(mine.text)
    assert (again.reduce, again.tables) == (mine.reduce, mine.tables), "the merged file that a run stores"
    assert "reduce" not in of('extends = "zero1"\n').text
    assert mt.Rules({"extends": "zero1", "grads": {"reduce": "bfloat16"}}).reduce == "bfloat16"


@pytest.mark.parametrize("text, words", [
    ('[grads]\nreduce = "bf16"', ["[grads] reduce = 'bf16'", 'write reduce = "float32" or']),
    ('[grads]\nreduce = ["bfloat16"]', ["[grads] reduce = ['bfloat16']"]),
    ('[params]\nreduce = "bfloat16"', ["[params] reduce: unknown logical axis"]),
    ('[names]\nreduce = "both"', ["reduce: every rule file has this name already (a line of [grads])"])])
def test_a_wrong_line_is_refused(text, words):
    with pytest.raises(ValueError) as refused:
        rules.parse(text)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_wrong_dtype_in_a_dict_is_refused_like_one_in_a_file():
    with pytest.raises(ValueError, match=r"rules \[grads\] reduce = 16"):
        rules.text_of({"grads": {"reduce": 16}})


@pytest.mark.parametrize("axes, dtype", [(("layers", "embed", "mlp"), "bfloat16"), (("vocab", "embed"), "bfloat16"),
                                         (("layers", "embed"), "float32"), (("leading_layers", None), "float32")])
def test_vectors_are_reduced_in_float32(axes, dtype):
    layout = rules.Layout(rules.parse(NARROW), {"data": 2})
    assert reduced.dtype_once(layout, axes) == dtype


@pytest.mark.parametrize("sizes, dtype", [({"data": 2}, "bfloat16"), ({"fsdp": 2, "tensor": 2}, "bfloat16"),
                                          ({"tensor": 2}, "float32"), ({"stage": 2}, "float32")])
def test_a_microbatchs_gradient_is_narrow_where_devices_split_its_tokens(sizes, dtype):
    assert reduced.dtype_of(rules.Layout(rules.parse(NARROW), dict.fromkeys(AXES, 1) | sizes)) == dtype


def test_summands_are_rounded_once_and_a_sum_on_one_device_not_at_all():
    g = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
    added = reduced.add(g, (0,), jnp.bfloat16)
    assert added.dtype == jnp.bfloat16
    np.testing.assert_allclose(added.astype(jnp.float32), g.sum(0), rtol=0, atol=2 ** -8 * 8 * np.abs(g).max())
    assert reduced.add(g[:1], (0,), jnp.bfloat16).dtype == jnp.float32


def linear(params, rows):
    """Its gradient is the mean of the rows, in each column of w."""
    return (rows @ params["w"]).sum() + (rows @ params["v"]).sum(), rows.shape[0]


def mean_of(rows, dtype: str):
    """The gradients of `linear` on two devices, with a microbatch for each of their rows."""
    axes = {"w": ("embed", None), "v": ("embed",)}
    layout = mt.Layout(mt.Rules({"extends": "ddp", "grads": {"reduce": dtype}}), {"data": 2})
    params = layout.place({"w": np.ones((4, 2), np.float32), "v": np.ones(4, np.float32)}, axes)
    return jax.device_get(jax.jit(layout.gradients(linear, axes, len(rows) // 2))(params, rows)[1])


@pytest.mark.parametrize("dtype, seen", [("float32", 1 + 2 ** -9), ("bfloat16", 1)])
def test_what_a_device_sends_is_rounded_and_vectors_are_not(dtype, seen):
    grads = mean_of(np.full((2, 4), 1 + 2 ** -9, np.float32), dtype)
    assert (grads["w"] == seen).all() and (grads["v"] == 1 + 2 ** -9).all()


def test_a_device_adds_its_microbatches_in_float32():
    """256 and four times 1 are 260. In bfloat16 256 and 1 are 256."""
    rows = np.ones((10, 4), np.float32)
    rows[[0, 5]] = 256
    assert (mean_of(rows, "bfloat16")["w"] == 52).all()


@pytest.mark.parametrize("rules_of, mesh, axis", [("zero3", {"fsdp": 2}, "fsdp"), ("ddp", {"context": 2}, "context")])
def test_sums_that_a_loss_of_ones_own_makes_itself_are_refused_by_name(rules_of, mesh, axis):
    layout = mt.Layout(mt.Rules({"extends": rules_of, "grads": {"reduce": "bfloat16"}}), mesh)
    axes = {"w": ("embed", None), "v": ("embed",)}
    params = {"w": np.ones((4, 2), np.float32), "v": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match=rf'reduce = "bfloat16" cannot be applied over {axis}: .*over {axis} \(as in ddp'):
        jax.jit(layout.gradients(linear, axes))(layout.place(params, axes), np.ones((2, 4), np.float32))


def test_the_norm_and_its_clipping_are_those_of_what_was_reduced():
    """A step of ZeRO-3 equals that of one device, and is not that of float32, by less than the rounding."""
    run = config.Run(
        mesh={"fsdp": 2}, sharding=dict(rules=scratch.rule_file({"extends": "zero3", "grads": {"reduce": "bfloat16"}})),
        model=dict(vocab_size=64, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, compute_dtype="float32"),
        data=dict(seq_len=16, global_batch=8), training=dict(steps=20, microbatches=2))
    case = parity.compile_run(run)
    parity.check_equal(case)
    off = compare.differences(case)
    assert max(off.leaves.values()) > parity.FLOAT32.state, "nothing was rounded"
