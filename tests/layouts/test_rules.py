"""Rule files: what they say, what they inherit, and every mistake told with its file, table, value and remedy."""
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from meshtrain.model import float8
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import AXES, MeshSpec
from meshtrain.sharding.rules import GATHERED, Layout, Tensor

SHIPPED = sorted((Path(__file__).parent.parent.parent / "sharding_rules").glob("*.toml"))
ONE = dict.fromkeys(AXES, 1)


def sizes(**axes: int) -> dict[str, int]:
    return ONE | axes


# ---- what a file says ------------------------------------------------------------------------------------------------

def test_grads_inherit_params_and_the_optimizer_inherits_grads():
    zero1 = rules.parse('[params]\nmlp = "tensor"\n[optimizer]\nembed = ["data", "fsdp"]\n')
    assert zero1.tables["grads"] == zero1.tables["params"] == {"mlp": ("tensor",)}
    assert zero1.tables["optimizer"] == {"mlp": ("tensor",), "embed": ("data", "fsdp")}, "line by line"
    back = rules.parse('[params]\nmlp = "tensor"\nembed = "fsdp"\n[optimizer]\nembed = []\n')
    assert back.mesh_axes("grads", "embed") == ("fsdp",) and back.mesh_axes("optimizer", "embed") == ()
    zero2 = rules.parse('[grads]\nembed = "fsdp"\n')
    assert zero2.tables["params"] == {} and zero2.tables["optimizer"] == {"embed": ("fsdp",)}
    assert zero2.tables["activations"] == {}, "activations inherit nothing"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_loads_and_says_what_it_is_for(path):
    loaded = rules.load(path)
    assert set(loaded.tables) == set(rules.TABLES)
    assert path.read_text().startswith("# ") and len(path.read_text().splitlines()) <= 20
    assert loaded.mesh_axes("activations", "batch") == ("data", "fsdp")
    assert {axis for axes in loaded.tables["activations"].values()
            for axis in axes} == set(AXES), "the mesh says which are used"


def test_the_shipped_files_are_those_of_the_contract():
    assert {path.stem for path in SHIPPED} == {"ddp", "tensor", "zero1", "zero2", "zero3",
                                               "hsdp", "hsdp_zero1", "zero3_experts_fsdp",
                                               "zero3_experts_tensor"}


# ---- a file that extends another -------------------------------------------------------------------------------------

def test_a_file_has_the_lines_of_the_one_that_it_extends_but_for_its_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "zero1"\n[activations]\nresidual_seq = "context"\n[grads]\nembed = "data"\n')
    ddp, zero1, mine = (rules.load(one) for one in (SHIPPED[0].parent / "ddp.toml",
                                                    SHIPPED[0].parent / "zero1.toml", path))
    assert mine.tables["activations"] == ddp.tables["activations"] | {"residual_seq": ("context",)}
    assert mine.tables["params"] == ddp.tables["params"] and mine.tables["optimizer"] == zero1.tables["optimizer"]
    assert mine.tables["grads"] == ddp.tables["params"] | {"embed": ("data",)}
    again = rules.parse(mine.text)      # what a run keeps as rules.toml says the same alone
    assert again.tables == mine.tables and again.text == mine.text


def test_a_file_extends_one_beside_it_before_a_shipped_one_and_may_have_a_shipped_name(tmp_path):
    (tmp_path / "ddp.toml").write_text('[activations]\nbatch = "fsdp"\n')
    (tmp_path / "a.toml").write_text('extends = "ddp.toml"\n[params]\nembed = "fsdp"\n')
    assert rules.load(tmp_path / "a.toml").tables["activations"] == {"batch": ("fsdp",)}
    (tmp_path / "hsdp.toml").write_text('extends = "hsdp"\n[params]\nmlp = []\n')
    assert rules.load(tmp_path / "hsdp.toml").mesh_axes("params", "embed") == ("fsdp", "context")
    assert rules.load(tmp_path / "hsdp.toml").mesh_axes("params", "mlp") == ()


@pytest.mark.parametrize("text, said", [
    ('extends = "zero4"', ["mine.toml: extends = 'zero4'", "no such rule file", "did you mean 'zero",
                           "zero3_experts_fsdp"]),
    ("extends = 3", ["extends = 3", 'e.g. extends = "ddp"']),
    ('extends = ["ddp", "zero1"]', ["must name one rule file"]),
    ('extends = ""', ["must name one rule file"]), ('extends = "mine"', ["leads back to", "mine.toml"]),
    ('extends = "other"', ["leads back to"]),
    ('extends = "broken"', ["broken.toml [params] embed", "unknown mesh axis 'fdsp'"]),
    ('[params]\nextends = "ddp"', ["[params] extends: unknown"]),
    ('[extend]\nembed = "fsdp"', ["did you mean 'extends'?"])])
def test_a_mistake_in_what_a_file_extends_is_told_with_its_file(tmp_path, text, said):
    (tmp_path / "mine.toml").write_text(text)
    (tmp_path / "other.toml").write_text('extends = "mine.toml"')
    (tmp_path / "broken.toml").write_text('[params]\nembed = "fdsp"')
    with pytest.raises(ValueError) as error:
        rules.load(tmp_path / "mine.toml")
    for part in said:
        assert part in str(error.value)


def test_a_file_may_lie_anywhere(tmp_path):
    path = tmp_path / "my own rules.toml"
    path.write_text('[activations]\nbatch = "data"\n')
    assert rules.load(path).path == str(path)
    assert rules.load(str(path)).mesh_axes("activations", "batch") == ("data",)


# ---- mistakes in a file ----------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown table": ('[parms]\nembed = "fsdp"', ["[parms]", "did you mean 'params'?", "[optimizer]"]),
    "no table": ('params = "fsdp"', ["params", "must be a table", "[params]"]),
    "unknown logical axis": ('[params]\nembd = "fsdp"', ["[params]", "embd", "did you mean 'embed'?", "kv_heads"]),
    "unknown mesh axis": ('[grads]\nembed = "fdsp"', ["[grads]", "embed", "'fdsp'", "did you mean 'fsdp'?"]),
    "unknown mesh axis in a list": ('[grads]\nembed = ["data", "tensr"]', ["'tensr'", "did you mean 'tensor'?"]),
    "nothing near": ('[params]\nembed = "xyz"', ["'xyz'", "data, fsdp, tensor, stage, context"]),
    "axis twice in an entry": ('[optimizer]\nembed = ["data", "data"]', ["[optimizer]", "embed", "'data'", "once"]),
    "activation's axis in params": ('[params]\nbatch = "data"', ["[params]", "batch", "[activations]"]),
    "sequence in grads": ('[grads]\nresidual_seq = "tensor"', ["[grads]", "residual_seq", "[activations]"]),
    "a number": ("[params]\nembed = 2", ["[params]", "embed = 2", '"tensor"']),
    "a list of numbers": ("[params]\nembed = [1, 2]", ["embed = [1, 2]", '["data", "fsdp"]']),
    "a nested list": ('[params]\nembed = [["data"]]', ["embed", "list"]),
    "another trainer's word": ('[params]\nembed = "tp"', ["'tp'", "did you mean 'tensor'?"]),
    "experts' axis": ('[params]\nexpert = "ep"', ["'ep'", "experts have no axis of their own", "fsdp or tensor"]),
    "no axis": ('[params]\nembed = "none"', ["'none'", "write embed = []"]),
    "no quotes": ("extends = zero3", ["not valid TOML", "put names in quotes"]),
    "bad TOML": ("[params\nembed = 2", ["not valid TOML", "line 1"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_once_with_file_value_and_remedy(mistake, tmp_path):
    text, parts = MISTAKES[mistake]
    path = tmp_path / "mine.toml"
    path.write_text(text + "\n")
    with pytest.raises(ValueError) as error:
        rules.load(path)
    message = str(error.value)
    assert message.count("\n") == 0, message
    assert [part for part in [str(path), *parts] if part not in message] == []


def test_all_mistakes_of_a_file_are_told_together():
    text = ('[parms]\nx = "y"\n[params]\nembd = "fsdp"\nbatch = "data"\nmlp = "tensr"\n[grads]\nembed = ["fsdp", '
            '"fsdp"]\n')
    with pytest.raises(ValueError) as error:
        rules.parse(text)
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    for part, line in zip(["parms", "embd", "batch", "tensr", "fsdp"], lines, strict=True):
        assert part in line


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff\xfe")],
                         ids=["missing", "directory", "binary"])
def test_a_file_that_cannot_be_read_is_told_by_name(make, tmp_path):
    path = tmp_path / "rules.toml"
    make(path)
    with pytest.raises(ValueError, match=re.escape(f"cannot read {path}")):
        rules.load(path)


# ---- mistakes on a mesh ----------------------------------------------------------------------------------------------

W_DF = Tensor("params", "layers/mlp/up", (4, 96, 320), ("layers", "embed", "mlp"))
X_BTD = Tensor("activations", "residual", (8, 32, 96), ("batch", "residual_seq", "embed"))


def faults(text: str, mesh: dict, *tensors: Tensor) -> list[str]:
    return rules.problems(rules.parse(text, "mine.toml"), mesh, tensors)


def idle(text: str, mesh: dict, *weights: Tensor) -> list[str]:
    return rules.unsplit(Layout(rules.parse(text, "mine.toml"), mesh), weights)[0]


def test_a_mesh_axis_in_two_dims_of_one_tensor_is_refused():
    text = '[params]\nembed = "tensor"\nmlp = "tensor"'
    [fault] = faults(text, sizes(tensor=2), W_DF)
    for part in ("mine.toml", "[params]", "layers/mlp/up", "embed=96", "mlp=320", "'tensor'", "mesh.tensor to 1"):
        assert part in fault
    assert faults(text, ONE, W_DF) == [], "an axis of size 1 vanishes"


def test_a_dimension_that_does_not_divide_is_refused_with_the_next_that_does():
    [fault] = faults('[params]\nmlp = ["data", "tensor"]', sizes(data=3, tensor=7), W_DF)
    for part in ("mine.toml", "[params]", "layers/mlp/up", "mlp=320", "data 3 × tensor 7 = 21", "336"):
        assert part in fault


@given(st.integers(1, 64), st.integers(1, 12), st.integers(1, 5))
def test_a_dimension_is_refused_exactly_when_it_does_not_divide(dim, data, fsdp):
    found = faults('[params]\nembed = ["data", "fsdp"]', sizes(data=data, fsdp=fsdp),
                   Tensor("params", "w", (dim,), ("embed",)))
    assert bool(found) == (dim % (data * fsdp) != 0)


def test_a_mesh_axis_that_nothing_uses_is_refused():
    [fault] = idle('[activations]\nbatch = "data"', sizes(data=2, tensor=4), W_DF)
    for part in ("mesh.tensor=4", "mine.toml", "mesh.tensor to 1", "rule file that names it"):
        assert part in fault


Q_BTNH = Tensor("activations", "queries", (8, 32, 4, 24), ("batch", "seq", "heads", "head_dim"))
W_DNH = Tensor("params", "layers/attention/query", (4, 96, 4, 24), ("layers", "embed", "heads", "head_dim"))


@pytest.mark.parametrize("table", ["params", "grads", "optimizer"])
def test_an_axis_that_is_only_stored_over_and_splits_no_work_is_refused_with_the_line_that_is_missing(table):
    """Every device along fsdp would multiply the same rows with the same weights."""
    text = f'[{table}]\nembed = ["data", "context"]\n[activations]\nbatch = "data"\nseq = "context"\n'
    assert idle(text, sizes(data=2, context=2), W_DF) == []
    text = f'[{table}]\nembed = ["data", "fsdp"]\n[activations]\nbatch = "data"\n'
    found = idle(text, sizes(data=2, fsdp=2), W_DF)
    assert len(found) == 1 and 'write batch = ["data", "fsdp"] in [activations], or set mesh.fsdp to 1' in found[0]


def test_heads_that_are_split_in_params_alone_are_refused_with_the_line_that_is_missing():
    """Queries would be gathered, and every rank of tensor compute all of attention."""
    text = '[params]\nheads = "tensor"\n[activations]\nbatch = "data"\nresidual_seq = "tensor"\n'
    [fault] = faults(text, sizes(data=2, tensor=2), W_DNH, X_BTD, Q_BTNH)
    assert "[params] splits heads over tensor" in fault and 'write heads = ["tensor"] in [activations]' in fault
    assert faults(text + 'heads = "tensor"\n', sizes(data=2, tensor=2), W_DNH, X_BTD, Q_BTNH) == []


@pytest.mark.parametrize("logical", ["heads", "kv_heads", "mlp", "vocab"])
def test_what_params_split_and_activations_do_not_is_refused(logical):
    w, x = Tensor("params", "w", (96, 320), ("embed", logical)), Tensor(
        "activations", "x", (8, 32, 320), ("batch", "seq", logical))
    text = f'[params]\n{logical} = "tensor"\n[activations]\nbatch = ["data", "tensor"]\n'
    assert faults(text, sizes(data=2, tensor=2), w, x) == [], "gathered for its use: the tokens are split"
    [fault, *_] = faults(text.replace(', "tensor"', ""), sizes(data=2, tensor=2), w, x)
    assert f'write {logical} = ["tensor"] in [activations]' in fault


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_without_one_of_its_axes_in_activations_is_refused_or_told(path):
    loaded = rules.load(path)
    model = [Tensor("params", "/".join(axes), (16,) * 3, axes)
             for axes in (("embed", "heads", "head_dim"), ("embed", "mlp", "head_dim"),
                          ("expert", "expert_embed", "expert_mlp"))]
    mesh = sizes(data=2, fsdp=2, tensor=2, context=2)
    assert rules.unsplit(Layout(loaded, mesh), model) == ([], [])
    for axis in ("data", "fsdp", "tensor", "context"):
        without = {logical: tuple(a for a in axes if a != axis)
                   for logical, axes in loaded.tables["activations"].items()}
        refused, told = rules.unsplit(Layout(rules.Rules({**loaded.tables, "activations": without}, "", "mine.toml"),
                                             mesh), model)
        # Experts are split by where they lie, and by residual_seq; nothing else is.
        assert axis in " ".join(refused or told), axis
        assert refused or axis == "tensor" or axis in loaded.tables["params"].get("expert", ()), axis


def test_what_an_axis_does_not_split_is_told_by_name():
    model = [Tensor("params", name, (96, 320), ("embed", dim))
             for name, dim in (("query", "heads"), ("up", "mlp"), ("gate", "mlp"))]
    text = '[params]\nheads = "tensor"\n[activations]\nbatch = "data"\nheads = "tensor"\n'
    refused, [told] = rules.unsplit(Layout(rules.parse(text, "mine.toml"), sizes(data=2, tensor=2)), model)
    assert refused == []
    assert "mine.toml does not split up, gate over tensor 2: every device along it repeats that work" in told
    more = rules.parse(text + 'mlp = "tensor"\n', "mine.toml")
    refused, [told] = rules.unsplit(Layout(more, sizes(data=2, tensor=2)), model)
    assert refused == [] and "splits mlp over tensor in [activations] but not in [params]" in told


def test_a_rule_for_a_dimension_that_the_model_lacks_uses_no_axis():
    [fault] = idle('[params]\nexpert = "tensor"', sizes(tensor=2), W_DF)
    assert "mesh.tensor=2" in fault


def test_all_faults_of_a_layout_are_told_together():
    text = '[params]\nembed = "tensor"\nmlp = "tensor"\n[activations]\nbatch = "data"'
    found = faults(text, sizes(data=3, tensor=2, context=2), W_DF, X_BTD)
    assert len(found) == 2
    for part in ("'tensor' shards both", "batch=8 does not divide over data 3"):
        assert any(part in fault for fault in found)


def test_an_axis_that_shards_two_dimensions_is_told_once_for_tables_that_inherit_the_rules():
    text = '[params]\nembed = "fsdp"\nmlp = "fsdp"'
    tables = [Tensor(table, name, (96, 320), axes) for table in ("params", "grads", "optimizer")
              for name, axes in (("up", ("embed", "mlp")), ("down", ("mlp", "embed")))]
    [fault] = faults(text, sizes(fsdp=2), *tables)
    assert "[params] up" in fault
    text += '\n[grads]\nmlp = ["fsdp", "data"]\n[optimizer]\nmlp = []'
    assert ["[params]" in fault or "[grads]" in fault for fault in faults(text, sizes(fsdp=2, data=2), *tables)] == [
        True, True]


def test_a_sound_layout_has_no_faults():
    text = ('[params]\nembed = ["data", "fsdp"]\nmlp = "tensor"\n[activations]\nbatch = ["data", "fsdp"]\nresidual_seq '
            '= "tensor"')
    assert faults(text, sizes(data=2, fsdp=4, tensor=2), W_DF, X_BTD) == []


# ---- what the model and the step ask for -----------------------------------------------------------------------------

TEXT = """
[params]
embed = ["data", "fsdp"]
mlp = "tensor"
[activations]
batch = ["data", "fsdp"]
residual_seq = "tensor"
"""


def layout(**axes: int) -> Layout:
    return Layout(rules.parse(TEXT), sizes(**axes))


def test_spec_drops_axes_of_size_one():
    weight = ("layers", "embed", "mlp")
    assert layout(data=2, fsdp=2, tensor=2).spec("params", weight) == P(None, ("data", "fsdp"), "tensor")
    assert layout(fsdp=8).spec("params", weight) == P(None, "fsdp", None)
    assert layout().spec("params", weight) == P(None, None, None)
    assert layout(data=2, tensor=2).spec("activations", ("batch", "residual_seq", "embed")) == P("data", "tensor", None)
    assert layout(data=2).spec("params", (None, "embed")) == P(None, "data")


def test_spec_leaves_out_what_drop_names():
    weight = ("embed", "mlp")
    assert layout(data=2, fsdp=2, tensor=2).spec("params", weight, drop=("data",)) == P("fsdp", "tensor")
    assert layout(data=2, fsdp=2, tensor=2).spec("params", weight, drop=("data", "fsdp")) == P(None, "tensor")


def test_weights_are_gathered_over_the_axes_that_split_tokens_and_experts_are_not():
    """A rule file with experts over fsdp, which splits tokens too: their embed dim is gathered over data, they are
    not."""
    text = ('[params]\nexpert = "fsdp"\nembed = ["data", "context"]\nmlp = "tensor"\n[activations]\nbatch = ["data", '
            '"fsdp"]\nseq = "context"\n')
    placed = Layout(rules.parse(text), sizes(data=2, fsdp=2, tensor=2, context=2))
    assert placed.mesh_axes(GATHERED, "expert") == ("fsdp",) and placed.mesh_axes(GATHERED, "embed") == ()
    assert placed.spec(GATHERED, ("expert", "embed", "mlp")) == P("fsdp", None, "tensor")
    assert layout(data=2, fsdp=2, tensor=2).spec(GATHERED, ("embed", "mlp")) == P(None, "tensor")
    mesh_spec = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
    with jax.set_mesh(mesh_spec.build(jax.devices())):
        w = jax.jit(lambda w: Layout(rules.parse(text),
                                     mesh_spec.sizes).constrain(GATHERED, w, ("expert", "embed", "mlp")))(
                                         np.ones((4, 8, 6)))
    assert w.sharding.shard_shape(w.shape) == (2, 8, 3)


def test_spec_leaves_out_manual_axes():
    mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
    seen = []

    def body(x):
        seen.append(layout(data=2, tensor=4).spec("params", ("embed", "mlp")))
        return x
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})).trace(
        np.ones(8))
    assert seen[0] == P(None, "tensor")


def test_the_largest_of_bfloat16_over_manual_axes_is_sought_in_float32_by_a_cpu():
    """Its compiler ends the process at a bfloat16 reduction there: float8 in pipelines needs one."""
    made = MeshSpec({"data": 2, "tensor": 4})
    seek = jax.shard_map(partial(float8.over_tokens, layout(data=2, tensor=4)), mesh=made.build(jax.devices()),
                         in_specs=P("data"), out_specs=P(),
                         axis_names={"data"}, check_vma=False)
    text = jax.jit(seek).lower(jax.ShapeDtypeStruct((2,), "bfloat16")).as_text()
    assert re.search(r'"stablehlo.all_reduce".*?\(tensor<1xf32>\) -> tensor<1xf32>', text, re.DOTALL)


def test_a_constraint_splits_the_array_as_the_rule_says():
    mesh_spec = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
    placed = Layout(rules.parse(TEXT), mesh_spec.sizes)
    with jax.set_mesh(mesh_spec.build(jax.devices())):
        x = jax.jit(lambda x: placed.act(x, "batch", "residual_seq", "embed"))(np.ones((8, 4, 16), np.float32))
    assert x.sharding.shard_shape(x.shape) == (2, 2, 16)


def test_shardings_map_a_tree_of_axes():
    mesh_spec = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
    tree = {"w": ("embed", "mlp"), "scale": ("embed",), "none": (None,), "scalar": ()}
    made = rules.shardings(Layout(rules.parse(TEXT), mesh_spec.sizes), mesh_spec.build(jax.devices()), "params", tree)
    assert {name: sharding.spec for name, sharding in made.items()} == {
        "w": P(("data", "fsdp"), "tensor"), "scale": P(("data", "fsdp")), "none": P(None), "scalar": P()}


def test_batch_axes_are_those_larger_than_one():
    one = layout(fsdp=4, tensor=2)
    assert one.batch_axes == ("fsdp",)
    assert one.num_shards(one.batch_axes) == one.num_shards(one.token_axes) == 4 and one.num_shards(()) == 1


def test_gradients_are_reduced_once_over_what_splits_neither_the_models_weights_nor_their_gradients():
    rule = rules.parse('[params]\nembed = "data"\nexpert = "fsdp"\n[grads]\nvocab = "context"\n[activations]\n'
                       'batch = ["data", "fsdp", "context"]\n')
    layout = Layout(rule, sizes(data=2, fsdp=2, context=2))
    dense, experts = ("embed", "mlp"), ("expert", "expert_embed", "expert_mlp")
    assert layout.find_deferred_axes([dense]) == ("fsdp", "context"), "a model without experts is not split by their line"
    assert layout.find_deferred_axes([dense, experts]) == ("context",)
    assert layout.find_deferred_axes([dense, ("vocab", None)]) == ("fsdp",)
