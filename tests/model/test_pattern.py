"""Which layers a model has: patterns and groups."""
import pytest

from meshtrain import config, pattern, run_files


def cfg(mixers: str, mlps: str = "d", num_layers: int = 0, **more):
    experts = {"num_experts": 2} if "e" in mlps else {}
    return config.Model(mixers=mixers, mlps=mlps, num_layers=num_layers or len(mixers), **experts | more)


@pytest.mark.parametrize(("given", "length", "wanted"), [
    ("F", 3, "FFF"), ("WWF", 5, "WWFWW"), ("WWF", 2, "WW"), ("de*", 4, "deee"), ("d*", 2, "dd"), ("ddde*", 3, "ddd")])
def test_patterns_are_repeated_to_the_number_of_layers(given, length, wanted):
    assert pattern.repeat(given, length) == wanted


@pytest.mark.parametrize(("section", "wanted"), [
    (cfg("F", num_layers=4), [("layers", 1, 4, False)]),
    (cfg("WWWWWF", num_layers=26), [("periods", 6, 4, False), ("left", 1, 2, False)]),
    (cfg("GGGF", num_layers=7), [("periods", 4, 1, False), ("left", 1, 3, False)]),
    (cfg("GWFN", num_layers=7), [("periods", 4, 1, False), ("left", 3, 1, False)]),
    (cfg("F", "de*", 2), [("dense_layers", 1, 1, True), ("layers", 1, 1, False)]),
    (cfg("WWWF", "dddde*", 10), [("dense_periods", 4, 1, True), ("periods", 4, 1, False), ("left", 1, 2, False)]),
    # the pattern counts from the first layer, not from the first with experts
    (cfg("KKKF", "de*", 9), [("dense_layers", 1, 1, True), ("periods", 4, 2, False)]),
    # every other layer has experts: a period, and nothing leads
    (cfg("F", "de", 6), [("periods", 2, 3, False)]),
    # other layers lead, too, where a period then repeats
    (cfg("NFFFFFF"), [("dense_layers", 1, 1, True), ("layers", 1, 6, False)]),
])
def test_layers_are_leading_ones_a_period_and_what_is_left(section, wanted):
    found = pattern.stretches(section)
    assert [(part.name, len(part.period), part.repeats, part.leading) for part in found] == wanted
    assert sum((part.period * part.repeats for part in found), ()) == pattern.kinds(section)
    assert pattern.count_staged(section) + pattern.leading(section) == section.num_layers
    assert pattern.period(section) == next(len(part.period) for part in found if not part.leading)


@pytest.mark.parametrize(("section", "wanted"), [
    (cfg("F", "de*", 3), ("F", "e")), (cfg("GGGF", num_layers=7), ("F", "d")), (cfg("MMN.", "e.ed"), ("N", "e")),
    (cfg("FWM"), ("W", "d")), (cfg("MK", "d."), ("K", "."))])
def test_a_depth_is_of_the_kind_of_the_last_layer_with_attention(section, wanted):
    assert pattern.depth_kind(section) == wanted


def test_layers_without_a_period_are_cut_into_few_parts():
    section = cfg("MM" * 9 + "NNMNMMNMMMNM" + "F" * 9)
    parts = pattern.stretches(section)
    assert sum((part.period * part.repeats for part in parts), ()) == pattern.kinds(section)
    assert pattern.period(section) == 0 and sum(len(part.period) for part in parts) < 12
    assert len({part.name for part in parts}) == len(parts) and not any(part.leading for part in parts)


def test_a_run_file_with_patterns_is_written_and_read_again(tmp_path):
    run = run_files.load(["--model.mixers", "GWF", "--model.window", "8", "--model.linear",
                       "{key_heads = 2, value_heads = 4}", "--model.kinds", "{W = {rope_theta = 10.0}}"])
    path = tmp_path / "config.toml"
    path.write_text(config.dump(run), encoding="utf-8")
    assert run_files.load([str(path)]) == run


@pytest.mark.parametrize(("words", "said"), [
    (["--model.mixers", "GQ"], 'model.mixers="GQ" is not a pattern of'),
    (["--model.mlps", "*"], 'model.mlps="*" is not a pattern of'),
    (["--model.mixers", "G"], "give model.linear"),
    (["--model.mixers", "WF"], "no model.window"),
    (["--model.mixers", "F", "--model.window", "8"], "has no effect, because no layer"),
    (["--model.mixers", "F.", "--model.mlps", "d."], "a layer neither a mixer nor an MLP"),
    (["--model.kinds", "{W = {rope_theta = 1.0}}"], "no layer of model.mixers"),
    (["--model.kinds", "{F = {window = 8}}"], "which layers of F do not read"),
    (["--model.kinds", "{F = {rope_thet = 1.0}}"], "did you mean model.kinds.F.rope_theta?"),
    (["--model.kinds", '{F = {head_dim = "8"}}'], "model.kinds.F.head_dim"),
    (["--model.linear", "{key_heads = 2, value_heads = 3}", "--model.mixers", "G"], "a multiple of key_heads"),
    (["--model.latent", "{kv_dim = 8, rope_dim = 8}", "--model.attention_sinks", "true"], "excludes model.attention_sinks"),
    (["--model.shared_expert_gate", "true"], "model.num_experts=0"),
])
def test_what_makes_no_model_is_refused(words, said):
    with pytest.raises(config.ConfigError) as refusal:
        run_files.load(words)
    assert said in str(refusal.value)
