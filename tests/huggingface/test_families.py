"""Names, forms and settings of model families, without running a model: every tensor of a folder is read once and goes
round bit for bit, and config.json says what it said."""
import json
import math

import numpy as np
import pytest
from folders import GOLDENS, NAMES

from meshtrain import config
from meshtrain import pattern as pattern_module
from meshtrain.huggingface import families, folder, forms, safetensors, settings
from meshtrain.huggingface.weights import pretrained
from meshtrain.model import transformer


def opened(name: str):
    """(folder, [model], its rows)."""
    found = folder.open_folder(GOLDENS / name)
    model = config.Model(**found.model)
    return found, model, folder.match(found, model, pretrained.parameter_paths(transformer.build(model)))


def numbers(entry: safetensors.Entry) -> np.ndarray:
    return safetensors.read(entry, 0, math.prod(entry.shape)).reshape(entry.shape)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_read_once_and_goes_round(name):
    found, model, rows = opened(name)
    sizes = {info.name: info.shape for info in transformer.build(model).parameters()}
    places, spans, filled = transformer.build(model).places(), [], {}
    for row in rows:
        for layer in row.layers or (None,):
            entries = [folder.entry_of(found, row, layer), folder.scales_of(found, row, layer)]
            for entry in filter(None, entries):
                spans += [(one.path, one.start, one.stop) for one in (entry, *entry.more)]
            theirs = np.arange(math.prod(row.shape)).reshape(row.shape)
            ours = row.to_ours(theirs, np.concatenate)
            np.testing.assert_array_equal(row.to_theirs(ours, np.concatenate), theirs)
            for path, x in ours.items():
                stack, index = places[layer] if row.stacked else ("", 0)
                full = stack + path.removeprefix("layers") if row.stacked else path
                shape = sizes[full][len(row.at(index)):]
                assert x.shape == shape or x.shape < shape and model.vocab_size in x.shape
                filled.setdefault(full, set()).add(row.at(index))
    assert len(spans) == len(set(spans))
    ours = {entry.path: sum(stop - start for path, start, stop in spans if path == entry.path) for entry in
            found.entries.values()}
    assert sum(ours.values()) == sum(entry.stop - entry.start for entry in found.entries.values())
    for path, shape in sizes.items():       # every layer and expert of every parameter
        assert filled[path] == set(np.ndindex(*shape[:len(next(iter(filled[path])))]))


def test_what_is_packed_is_what_stands_apart():
    """Queries with their gates, head by head; gates and ups of an expert, column by column; q, k, v and z of a key
    head; blocks of four bits, the low half of a byte first."""
    found, model, rows = opened("qwen3_next")
    by_path = {(row.paths[-1], row.kind[-1]): row for row in rows}
    row = by_path["layers/attention/gate/kernel", "F"]
    layer, H = next(iter(row.layers)), model.head_dim
    whole = numbers(found.entries[row.of_layer(layer)])
    gate = row.to_ours(whole, np.concatenate)["layers/attention/gate/kernel"]
    np.testing.assert_array_equal(gate[:, 1], whole[3 * H:4 * H].T)     # of head 1: behind its query
    row, linear = by_path["layers/linear/gate/kernel", "G"], model.linear
    whole = numbers(found.entries[row.of_layer(0)])
    ratio = linear.value_heads // linear.key_heads
    begin = 2 * linear.key_dim + ratio * linear.value_dim               # behind q, k and v of the first key head
    gate = row.to_ours(whole, np.concatenate)["layers/linear/gate/kernel"]
    np.testing.assert_array_equal(gate[:, 1], whole[begin + linear.value_dim:begin + 2 * linear.value_dim].T)
    found, model, rows = opened("gpt_oss")
    row = next(row for row in rows if row.expert == 2 and "layers/moe/up" in row.paths)
    whole = numbers(found.entries[row.of_layer(next(iter(row.layers)))])[2]
    np.testing.assert_array_equal(row.to_ours(whole, np.concatenate)["layers/moe/up"], whole[:, 1::2])
    codes, scales = np.array([0x21, 0xf0], np.uint8).repeat(16), np.array([[1.0], [0.5]], np.float32)
    np.testing.assert_array_equal(pretrained._from_blocks(codes, scales),
                                  [[0.5, 1.0] * 16, [0.0, -3.0] * 16])


def test_pairs_of_the_rope_that_are_neighbours_become_halves():
    sizes = {"N": 1, "r": 3, "D": 1, "P": 2, "2": 2}
    pieces = [forms.parse(text) for text in ("(N *P) D -> D N *P", "(N *(r 2)) D -> D N *(2 r)")]
    theirs = np.array([10, 11, 0, 1, 2, 3, 4, 5])[:, None]
    parts = [form.to_ours(form.theirs.take(theirs, sizes, first, 8), sizes) for form, first in zip(pieces, (0, 2))]
    ours = pieces[0].ours.join(parts, sizes, np.concatenate)
    assert ours.ravel().tolist() == [10, 11, 0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_of_a_config_is_read_as_the_same_model(name):
    """With the source's other keys, and from nothing."""
    theirs = settings.read(GOLDENS / name)
    family = settings.family_of(theirs)
    keys = settings.model_keys(theirs, family)
    model = config.Model(**keys)
    for source in (theirs, {}):
        made = json.loads(json.dumps(settings.config_of(model, family, "float32", 40, source)))
        assert config.Model(**settings.model_keys(made, family)) == model
    assert settings.config_of(model, family, "float32", 40, theirs).get("vision_config") == theirs.get("vision_config")
    back = settings.model_keys(settings.config_of(model, settings.family_for(model), "float32", 40, {}),
                               settings.family_for(model))
    assert settings._deciding_values(config.Model(**back)).keys() == settings._deciding_values(model).keys()


def test_every_key_of_the_model_is_compared_or_of_no_family():
    """A key that changes what is computed would otherwise be lost where a family is looked for."""
    of_a_run = {"preset", "embedding_std", "embedding_dropout", "residual_dropout", "attention", "mlp", "param_dtype",
                "compute_dtype", "matmul_dtype"}
    by_layer = {"mixers", "mlps", "kinds", "mlp_dim", "linear", "custom", "max_seq_len",
                "mtp_layers",       # `depths`: a family without names for them has the main model alone
                *config.sections.MixerKeys.model_fields}
    compared = {*settings.COMPUTED, *settings.OF_EXPERTS, *settings.OF_ATTENTION, *by_layer}
    assert compared | of_a_run == set(config.Model.model_fields) and not compared & of_a_run


@pytest.mark.parametrize(("letters", "pattern"), [
    ("FFFF", "F"), ("WWWF" * 3, "WWWF"), ("WWWFW", "WWWF"), ("deee", "de*"), ("dddeeeeee", "ddde*"), ("de", "de"),
    ("KKKNNNN", "KKKN*")])
def test_patterns_are_said_as_shortly_as_can_be(letters, pattern):
    assert settings.shortest(letters) == pattern and pattern_module.repeat(pattern, len(letters)) == letters


CHANGED = {
    "other layers than any": ("nemotron_h", {"layers_block_type": ["linear_attention", "conv"]}, "layers_block_type="),
    "a kind that its family has not": ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types: "),
    "too few layers": ("gpt_oss", {"layer_types": ["full_attention"]}, "does not name each of 4 layers"),
    "a window of nothing": ("gpt_oss", {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
                            "sliding_window=null"),
    "per-layer embeddings": ("gemma4_text", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256"),
    "experts beside an MLP": ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block=true"),
    "narrow experts": ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size=8"),
    "softmax in groups": ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func="softmax"'),
    "halves where neighbours are": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
    "queries that grow elsewhere": ("olmo3", {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "llama_4_scaling_beta=0.1"),
    "another clamp": ("gpt_oss", {"swiglu_limit": 9.0}, "swiglu_limit=9.0"),
    "which layers are dense": ("qwen3_next", {"mlp_only_layers": 3}, "do not say which layers have experts"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_a_family_has_beyond_ours_is_refused_by_name(case):
    name, change, said = CHANGED[case]
    theirs = settings.read(GOLDENS / name) | change
    with pytest.raises(ValueError) as told:
        settings.model_keys(theirs, settings.family_of(theirs))
    assert said in str(told.value)


@pytest.mark.parametrize("kind", families.LACKING)
def test_a_family_that_is_known_and_not_computed_is_refused_with_what_it_lacks(kind):
    with pytest.raises(ValueError, match="needs .* which .model. does not have"):
        settings.family_of({"model_type": kind})


@pytest.mark.parametrize(("change", "shape"), [
    ({"shape": (4, 2, 3, 16)}, "in blocks of 32"), ({"dtype": "I8"}, "of another dtype")])
def test_blocks_that_are_no_mxfp4_are_refused(change, shape, tmp_path):
    found, model, _ = opened("gpt_oss_mxfp4")
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    entry = safetensors.dataclasses.replace(found.entries[name], **change)
    bad = folder.dataclasses.replace(found, entries={**found.entries, name: entry})
    with pytest.raises(ValueError, match=f"{name} is .* it must be MXFP4"):
        folder.match(bad, model, pretrained.parameter_paths(transformer.build(model)))
