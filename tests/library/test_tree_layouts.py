"""`mt.Layout`: where the arrays of any tree are stored, what it constrains, and every mistake with its remedy."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P

from meshtrain import config
from meshtrain.library.layouts import Layout, load_rules
from meshtrain.sharding import rules

W = {"w": np.ones((32, 64), np.float32), "b": np.ones(64, np.float32)}
AXES = {"w": ("embed", "mlp")}
OWN = '[names]\nstate_dim = "both"\npatch = "activation"\n'


def spec_of(array) -> P:
    return P(*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec)))


def test_every_form_of_rules_gives_the_same_layout(tmp_path):
    text = 'extends = "ddp"\n[params]\nembed = "fsdp"\n'
    (tmp_path / "mine.toml").write_text(text)
    forms = [text, {"extends": "ddp", "params": {"embed": "fsdp"}}, str(tmp_path / "mine.toml"), tmp_path / "mine.toml",
             rules.parse(text)]
    assert all(load_rules(one).tables == rules.parse(text).tables for one in forms)
    assert load_rules("zero3").tables["params"]["embed"] == ("data", "fsdp", "context")


def test_arrays_and_their_shapes_are_stored_as_the_optimizer_table_says():
    layout = Layout("zero1", mesh={"data": 4, "tensor": -1})
    assert layout.mesh.shape == {"stage": 1, "data": 4, "fsdp": 1, "context": 1, "tensor": 2}
    stored = layout.place(W, AXES)
    assert spec_of(stored["w"]) == P("data", "tensor") and spec_of(stored["b"]) == P(None)
    np.testing.assert_array_equal(stored["w"], W["w"])
    shapes = layout.place(jax.eval_shape(lambda: W), AXES)
    assert jax.tree.map(lambda x: x.sharding, shapes) == jax.tree.map(lambda x: x.sharding, stored)
    assert layout.shardings(W, AXES, "params")["w"].spec == P(None, "tensor")


def test_states_lie_like_their_parameters_and_a_square_one_by_its_rows():
    layout = Layout("zero1", mesh={"data": 4, "tensor": 2})
    moments = layout.states(optax.adam(1.0), W, AXES)[0]
    assert moments.mu["w"].spec == P("data", "tensor") and moments.count.spec == P()
    squares = lambda params: jax.tree.map(lambda w: [jnp.zeros((n, n)) for n in w.shape], params)
    tx = optax.GradientTransformation(squares, lambda grads, state, params=None: (grads, state))
    placed = layout.states(tx, W, AXES)["w"]
    assert [one.spec for one in placed] == [P("data", None), P("tensor", None)]
    jax.jit(tx.init, out_shardings=layout.states(tx, W, AXES))(layout.place(W, AXES))


def test_rows_are_split_over_the_batch_and_the_sequence():
    layout = Layout("ddp", mesh={"data": 2, "context": 2})
    rows = {"x": np.arange(32).reshape(4, 8), "weight": np.ones(4), "image": np.ones((4, 8, 3))}
    placed = layout.batch(rows)
    assert [spec_of(placed[name]) for name in ("x", "weight", "image")] == [
        P("data", "context"), P("data"), P("data", "context", None)]
    np.testing.assert_array_equal(placed["x"], rows["x"])
    assert spec_of(layout.batch({"image": np.ones((4, 7, 3))}, "batch")["image"]) == P("data", None, None)


def test_inside_a_step_activations_and_weights_are_constrained_with_and_without_a_mesh_in_context():
    layout = Layout("zero3", mesh={"fsdp": 4, "tensor": 2})
    stored = layout.place(W, AXES)

    @jax.jit
    def step(w, x):
        w = layout.gathered(w, AXES)
        return layout.constrain(x @ w["w"] + w["b"], "batch", "mlp"), w["w"]
    x = np.ones((8, 32), np.float32)
    y, w = step(stored, x)
    assert spec_of(y) == P("fsdp", "tensor") and spec_of(w) == P(None, "tensor")
    with jax.set_mesh(layout.mesh):
        assert spec_of(step(stored, x)[0]) == P("fsdp", "tensor")
        # the axis that is manual drops out: 2 rows divide over data 1, not over fsdp 4
        inner = jax.shard_map(lambda x: layout.constrain(x, "batch", "mlp"), axis_names={"fsdp"}, in_specs=P("fsdp"),
                              out_specs=P("fsdp"))
        assert jax.jit(inner)(np.ones((8, 64))).shape == (8, 64)
    other = jax.make_mesh((8,), ("dp",))
    with jax.set_mesh(other), pytest.raises(config.ConfigError, match="use `with jax.set_mesh.layout.mesh.:`"):
        jax.jit(lambda x: layout.constrain(x, "batch", "mlp"))(np.ones((8, 64)))


def test_the_axes_are_a_tree_or_globs_or_metadata():
    layout = Layout("zero3", mesh={"fsdp": 4, "tensor": 2})
    params = {"blocks": [{"up": np.ones((32, 64))}, {"up": np.ones((32, 64))}], "norm": np.ones(32)}
    tree = {"blocks": [{"up": ("embed", "mlp")}] * 2, "norm": ("embed",)}
    assert layout.shardings(params, tree) == layout.shardings(params, {"blocks/*/up": ("embed", "mlp"), "norm": ["embed"]})
    assert layout.shardings(params, tree | {"norm": None})["norm"].spec == P(None)
    parts, _ = toys.build_linen(layout)
    assert layout.shardings(parts.params, parts.axes)["params"]["Dense_0"]["kernel"].spec == P("fsdp", "tensor")


def test_a_container_of_vectors_may_have_none_for_each():
    layout, vector = Layout("ddp", {"data": 2}), np.ones(3, np.float32)
    for params, axes in (((vector, vector), (None, None)), ({"v": [vector, vector]}, {"v": [None, None]})):
        assert jax.tree.map(lambda a: a.sharding.spec, layout.place(params, axes)) == jax.tree.map(
            lambda _: jax.P(None), params)
    with pytest.raises(config.ConfigError, match="axes.'w'.: no parameter has this name"):
        layout.place({"v": vector}, {"w": (None,)})


def test_a_tree_is_explained_by_array_with_giants_that_stay_whole():
    rows = Layout("zero1", mesh={"data": 4, "tensor": 2}).explain({**W, "pos": np.ones((64, 32))}, {
        **AXES, "pos": (None, None)}, giant=4096)
    table = {row["name"]: row for row in rows}
    assert table["w"]["bytes"] == {"params": 4096, "grads": 4096, "optimizer": 1024}
    assert table["w"]["split"]["optimizer"] == [["data"], ["tensor"]] and table["w"]["whole_on"] == []
    assert table["pos"]["whole_on"] == ["data", "tensor"] and "note: pos (16.0 KiB) is the same" in str(rows)


def test_an_axis_that_splits_some_matmuls_is_told_once_and_one_that_splits_none_is_refused():
    params = {"up": np.ones((32, 64)), "out": np.ones((32, 16))}
    axes = {"up": ("embed", "mlp"), "out": ("embed", "head_dim")}
    layout = Layout("ddp", mesh={"data": 2, "tensor": 2})
    with pytest.warns(UserWarning, match="does not split out over tensor 2"):
        layout.shardings(params, axes)
    layout.shardings(params, axes)      # again: no warning, which pytest would make an error
    with pytest.raises(config.ConfigError, match="mesh.tensor=2: .* splits no matmul"):
        layout.shardings({"out": params["out"]}, {"out": axes["out"]})


def test_the_layers_of_a_list_are_one_row_and_a_name_of_two_sizes_is_told():
    params = {"blocks": [{"up": np.ones((32, 64)), "out": np.ones((4, 32))} for _ in range(3)]}
    axes = {"blocks/*/up": ("embed", "mlp"), "blocks/*/out": ("embed", None)}
    rows = Layout("zero1", {"data": 2}).explain(params, axes)
    assert len(rows) == 6 and "blocks/*/up × 3 " in str(rows) and "blocks/0/up" not in str(rows)
    assert "note: embed has 2 sizes: 4 in blocks/*/out, 32 in blocks/*/up" in str(rows)


def test_rows_without_data_get_their_shardings():
    layout = Layout("ddp", {"data": 4})
    rows = layout.batch({"x": jax.ShapeDtypeStruct((8, 4), jnp.int32)})
    assert rows["x"].sharding == layout.batch({"x": np.ones((8, 4), np.int32)})["x"].sharding


MISTAKES = {
    "a name of many arrays": (lambda: Layout("ddp", {}).place(
        {"blocks": [W, W]}, {"blocks/*/w": ("dim", "mlp")}), ["blocks/*/w: no rule knows the axis 'dim'"]),
    "many arrays without axes": (lambda: Layout("ddp", {}).place({"blocks": [W, W], "v": W["w"]}, {}), [
        "blocks/*/w (32, 64), v (32, 64): no logical axes; name the dims, e.g. axes={'blocks/*/w': ("]),
    "a typo, and the wrong rank, together": (lambda: Layout("ddp", {}).place(
        {**W, "down": np.ones((3, 64, 32))}, {"w": ("embd", "mlp"), "down": ("mlp", "embed")}), [
        "w: no rule knows the axis 'embd' (did you mean 'embed'?); declare it in [names] of a rule file of "
        "your own with extends = \"ddp\", e.g. embd = \"weight\"",
        "down (3, 64, 32): 3 dims, and ('mlp', 'embed') names 2"]),
    "no axes": (lambda: Layout("ddp", {}).place(W, {"b": ("mlp",)}), ["w (32, 64): no logical axes; name the dims"]),
    "axes of nothing": (lambda: Layout("ddp", {}).place(W, AXES | {"v": ("embed",)}), ["axes['v']: no parameter has this name"]),
    "a glob of nothing": (lambda: Layout("ddp", {}).place(W, AXES | {"v/*": ("embed",)}), ["axes['v/*']: no parameter"]),
    "two globs": (lambda: Layout("ddp", {}).place(W, AXES | {"*": ("mlp",)}), ["'*' and 'w' give w different axes"]),
    "a text": (lambda: Layout("ddp", {}).place(W, AXES | {"b": "mlp"}), ["axes['b'] = 'mlp' is not a tuple"]),
    "an activation's name": (lambda: Layout("ddp", {}).place(W, {"w": ("batch", None)}), [
        "w: only activations have the axis 'batch'"]),
    "no multiple": (lambda: Layout("zero3", {"fsdp": 8}).place({"w": np.ones((20, 64))}, AXES), [
        "[params] w [embed=20, mlp=64]: embed=20 does not divide over fsdp 8; make embed a multiple of 8, e.g. 24"]),
    "rows": (lambda: Layout("ddp", {"data": 8}).batch({"x": np.ones((4, 3))}), [
        "rows x [batch=4, seq=3]: batch=4 does not divide over data 8"]),
    "rows without dims": (lambda: Layout("ddp", {}).batch({"x": np.float32(1)}), ["rows: x has no dims"]),
    "an unknown activation": (lambda: Layout("ddp", {}).constrain(jnp.ones((8, 4)), "bacth", None), [
        "constrain: no rule knows the axis 'bacth' (did you mean 'batch'?)"]),
    "an activation's rank": (lambda: Layout("ddp", {}).constrain(jnp.ones((8, 4)), "batch"), [
        "constrain (8, 4): 2 dims, and ('batch',) names 1"]),
    "one row, as of an initialisation": (lambda: Layout("ddp", {"data": 8}).constrain(jnp.ones((1, 4)), "batch", None), [
        "batch=1 does not divide over data 8", "if a call initializes the model, call it with a number of rows"]),
    "gathered": (lambda: Layout("ddp", {}).gathered(W, {"w": ("embed", "mpl")}), ["gathered: w: no rule knows the axis 'mpl'"]),
    "no axes of gathered": (lambda: Layout("ddp", {}).gathered(W["w"], {}), ["gathered:  (32, 64): no logical axes"]),
    "ZeRO-3 of nothing": (lambda: Layout('extends = "zero3"\n[names]\nd = "weight"\n', {"fsdp": 8}).place(
        W, {"w": ("d", None)}), ["[params] splits embed over fsdp, but no parameter has such a dim (yours have d)"]),
    "a declared name of nothing": (lambda: Layout('extends = "ddp"\n' + OWN, {}).place(W, AXES), [
        "[names] state_dim: no parameter has this axis"]),
    "an axis of no line": (lambda: Layout('[activations]\nbatch = "data"\n', {"fsdp": 2}).place(W, AXES), ["mesh.fsdp=2, but no rule"]),
    "mesh": (lambda: Layout("ddp", {"dp": 8}), ["mesh has no axis 'dp' (did you mean 'data'?)"]),
    "mesh sizes": (lambda: Layout("ddp", {"data": 2.5, "fsdp": -1}), ["mesh['data']=2.5 is neither a whole number"]),
    "mesh of another size": (lambda: Layout("ddp", {"data": 3, "fsdp": -1}), ["data 3 × fsdp 2 is 6 devices, and there are 8"]),
    "devices": (lambda: Layout("ddp", {"data": 2}, jax.devices()[:3]), ["is 2 devices, and there are 3"]),
    "no mesh": (lambda: Layout("ddp", 8), ["mesh=8 is not a dict"]),
    "no rules": (lambda: Layout("zero4", {}), ["rules: cannot read zero4: No such file or directory (did you mean 'zero"]),
    "rules of another type": (lambda: Layout(3, {}), ["rules=3 has the wrong type"]),
    "a table": (lambda: Layout("ddp", {}).shardings(W, AXES, "activations"), ["table='activations'", "use params, grads, optimizer"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_with_name_value_and_remedy(mistake):
    call, said = MISTAKES[mistake]
    with pytest.raises(config.ConfigError) as error:
        call()
    assert [part for part in said if part not in str(error.value)] == []
    assert len(error.value.messages) <= len(said)
