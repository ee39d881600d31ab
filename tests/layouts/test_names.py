"""Logical axes of one's own: [names] of a rule file, checked as strictly as ours."""
from pathlib import Path

import pytest

from meshtrain.sharding import rules, unmet
from meshtrain.sharding.logical import LOGICAL
from meshtrain.sharding.mesh import AXES
from meshtrain.sharding.rules import Layout, Tensor

SHIPPED = Path(__file__).parent.parent.parent / "sharding_rules"
W = [Tensor("params", "w", (64, 128), ("d_model", None))]


def sizes(**axes: int) -> dict[str, int]:
    return dict.fromkeys(AXES, 1) | axes


OWN = '[names]\nstate_dim = "both"\npatch = "activation"\nd_model = "weight"\n'


def test_a_file_has_names_of_its_own_and_those_of_the_file_that_it_extends(tmp_path):
    (tmp_path / "base.toml").write_text(OWN + '[params]\nstate_dim = "tensor"\n')
    path = tmp_path / "mine.toml"
    path.write_text('extends = "base"\n[names]\nd_ff = "both"\n[params]\nd_model = "fsdp"\n[activations]\npatch = "context"\n')
    mine = rules.load(path)
    assert mine.declared == {"state_dim": "both", "patch": "activation", "d_model": "weight", "d_ff": "both"}
    assert mine.mesh_axes("optimizer", "d_model") == ("fsdp",) and mine.mesh_axes("grads", "state_dim") == ("tensor",)
    again = rules.parse(mine.text)
    assert (again.tables, again.names) == (mine.tables, mine.names)
    assert rules.load(SHIPPED / "ddp.toml").declared == {} and rules.parse("").names == LOGICAL
    assert rules.parse(rules.text_of({"names": {"d_ff": "both"}, "params": {"d_ff": "tensor"}})).declared == {"d_ff": "both"}


def test_a_name_of_both_splits_a_matmul_and_a_weights_name_does_not():
    """As `mlp` and `embed`: a split of one in [params] alone is refused, a split of the other gathered."""
    w = Tensor("params", "w", (96, 320), ("d_model", "state_dim"))
    split = OWN + '[params]\nstate_dim = "tensor"\n[activations]\nbatch = "data"\nstate_dim = "tensor"\n'
    assert rules.unsplit(Layout(rules.parse(split), sizes(data=2, tensor=2)), [w]) == ([], [])
    x = Tensor("activations", "x", (8, 320), ("batch", "state_dim"))
    whole = rules.parse(split.replace('"data"\nstate_dim = "tensor"', '"data"'))
    [fault] = rules.problems(whole, sizes(tensor=2), [w, x])
    assert 'write state_dim = ["tensor"] in [activations]' in fault
    summed = rules.parse(OWN + '[params]\nd_model = "tensor"\n[activations]\nd_model = "tensor"\n')
    [fault], _ = rules.unsplit(Layout(summed, sizes(tensor=2)), [w])
    assert "splits no matmul" in fault


@pytest.mark.parametrize("text, said", [
    ('[names]\nfoo = "weights"', ["[names] foo = 'weights'", "did you mean 'weight'?", '"activation"']),
    ("[names]\nfoo = 3", ["foo = 3", "is not a kind"]), ('[names]\nembed = "weight"', ["embed", "already", "remove"]),
    ('[names]\n"state dim" = "both"', ["'state dim'", "e.g. state_dim"]),
    ('names = "foo"', ["names must be a table", "[names]"]),
    (OWN + '[params]\nstate_dmi = "tensor"', ["[params] state_dmi", "did you mean 'state_dim'?"]),
    (OWN + '[grads]\npatch = "tensor"', ["[grads] patch", "only activations", "[activations]"]),
    (OWN + '[params]\nd_model = "fdsp"', ["d_model", "'fdsp'", "did you mean 'fsdp'?"]),
    ('extends = "base"\n[names]\npatch = "weight"', ["patch = 'weight'", "declares it as 'activation'"]),
    ('extends = "base"\n[params]\npatch = "tensor"', ["mine.toml [params] patch", "only activations"]),
    ('[params]\nd_ff = "tensor"', ["d_ff: unknown logical axis", "[names]"])])
def test_a_mistake_with_names_is_told_with_value_and_remedy(tmp_path, text, said):
    (tmp_path / "base.toml").write_text(OWN)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError) as error:
        rules.load(tmp_path / "mine.toml")
    assert str(error.value).count("\n") == 0 and [part for part in said if part not in str(error.value)] == []
    with pytest.raises(ValueError, match="names. d_ff = 3 is not a kind"):
        rules.text_of({"names": {"d_ff": 3}})


def test_names_that_no_parameter_has_are_told():
    [fault] = unmet.find_unmet_names(rules.parse('extends = "zero3"\n' + OWN), W)
    assert "[names] state_dim: no parameter has this axis" in fault


@pytest.mark.parametrize("text, mesh, said", [
    ('extends = "zero3"\n', sizes(fsdp=8), ["[params] splits embed over fsdp", "(yours have d_model)",
                                            'd_model = "fsdp" in [params], or name your dims embed']),
    ('extends = "zero1"\n', sizes(data=4), ["[optimizer] splits embed over data"]),
    ('extends = "zero3"\n', sizes(), []), ('extends = "ddp"\n', sizes(data=4), []),
    ('extends = "zero3"\n[params]\nd_model = "fsdp"\n', sizes(fsdp=8), [])])
def test_a_table_that_shards_nothing_is_told(text, mesh, said):
    """ZeRO-3 whose lines name none of a model's dims would be a replica on every device."""
    told = unmet.find_unmet_lines(rules.parse(text + OWN), mesh, W)
    assert len(told) == bool(said) and [part for part in said if part not in "".join(told)] == []
