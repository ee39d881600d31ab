"""Folders that are not what they say: each is refused with one message, exit 2, and nothing of it is executed or
trusted."""
import json
import math
import os
import re
import shutil
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits
from commands import call, refused
from folders import EIGHT, Loaded
from folders import ONE as ONE_DEVICE
from hypothesis import given, strategies
from hypothesis import settings as examples

from meshtrain.commands import convert
from meshtrain.config import Model
from meshtrain.config.sections import Kinds, MixerKeys, Multipliers, RopeScaling
from meshtrain.huggingface import families, folder, forms, safetensors, settings

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
WHOLE = GOLDENS / "llama2"


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entries(**given) -> bytes:
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": span}
                       for name, (dtype, shape, span) in given.items()}).encode()


GOOD = (WHOLE / "model.safetensors").read_bytes()
NAMES = list(safetensors.read_header(WHOLE / "model.safetensors"))
ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
FILES = {
    "empty": (b"", "0 bytes"),
    "7 bytes": (b"1234567", "7 bytes"),
    "a header of 2^63 bytes": (raw(b"{}", length=1 << 63), "9,223,372,036,854,775,808"),
    "a header longer than the file": (raw(b"{}", length=10**6), "1,000,000"),
    "no JSON": (raw(b"{{{{"), "its header is broken"),
    "no UTF-8": (raw(b"\xff\xfe{}"), "its header is broken"),
    "a list": (raw(b"[]"), "not a JSON object"),
    "brackets within brackets": (raw(b"[" * 200_000), "its header is broken"),
    "offsets beyond the file": (raw(entries(a=("F32", [4], [0, 16])), b"\0" * 8), "end at byte"),
    "tensors that overlap": (raw(entries(a=("F32", [2], [0, 8]), b=("F32", [2], [4, 12])), b"\0" * 12), "overlap"),
    "a hole": (raw(entries(a=("F32", [2], [0, 8]), b=("F32", [2], [12, 20])), b"\0" * 20), "hole"),
    "a shape that lies": (raw(entries(a=("F32", [1000, 1000], [0, 8])), b"\0" * 8), "'a' is broken"),
    "negative sizes": (raw(entries(a=("F32", [-2], [0, -8])), b"\0" * 8), "'a' is broken"),
    "sizes beyond 64 bits": (raw(entries(a=("F32", [1 << 40, 1 << 40], [0, 8])), b"\0" * 8), "'a' is broken"),
    "a number of 5000 digits": (raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
                                    b"\0" * 8), "is broken"),
    "ten thousand dims": (raw(entries(a=("F32", [2**62] * 10_000, [0, 8])), b"\0" * 8), "'a' is broken"),
    "true for a size": (raw(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', b"\0" * 4), "'a' is broken"),
    "an unknown dtype": (raw(entries(a=("F4", [2], [0, 8])), b"\0" * 8), "'a' is broken"),
    "bytes behind the tensors": (GOOD + b"xx", "the file has"),
    "cut off": (GOOD[:-10], "truncated"),
    "a name twice": (raw(b"{" + ONE + b"," + ONE + b"}", b"\0" * 4), "occurs twice"),
    "an entry that is no object": (raw(b'{"a":7}'), "'a' is broken"),
}
INDEXES = {
    "a file of the folder above": ({name: "../llama2/model.safetensors" for name in NAMES}, "is not opened"),
    "a file of the system": ({name: "/etc/passwd" for name in NAMES}, "is not opened"),
    "a pickle": ({name: "pytorch_model.bin" for name in NAMES}, "is not opened"),
    "a file that is not there": ({name: "b.safetensors" for name in NAMES}, "no such file"),
    "a tensor that is elsewhere": ({name: "a.safetensors" for name in NAMES} | {"x.weight": "a.safetensors"},
                                   "x.weight is not in"),
    "no map": (["a"], "no weight_map"),
    "a map to numbers": ({name: 7 for name in NAMES}, "no weight_map"),
}
CONFIGS = {
    "another width": ({"hidden_size": 128}, "requires [200, 128]"),
    "another number of layers": ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is absent"),
    "more layers than the folder has": ({"num_hidden_layers": 9999}, "more absent tensors"),
    "more layers than anything has": ({"num_hidden_layers": 10**9}, "is not a whole number from 1 to 10000"),
    "another vocabulary": ({"vocab_size": 299}, "requires [299, 32]"),
    "another architecture": ({"model_type": "mamba"}, "is not a family"),
    "an architecture nearly right": ({"model_type": "lama"}, 'did you mean "llama"?'),
    "a number as text": ({"num_attention_heads": "4"}, "is not a whole number"),
    "a width that no memory has": ({"intermediate_size": 10**12}, "is not a whole number from 1 to"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "do not divide"),
    "a tied head": ({"tie_word_embeddings": "yes"}, "is not true or false"),
    "an untied head that is not there": ({"tie_word_embeddings": None}, "is missing"),
    "quantized weights": ({"quantization_config": {"bits": 4}}, "quantized"),
    "a key that nobody knows": ({"mixture_of_depths": 3}, "mixture_of_depths=3"),
    "biases that are not there": ({"attention_bias": True}, "self_attn.o_proj.bias is absent"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "a rope of another kind": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
    "half a rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "a rope with a factor too many": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mscale": 2}},
                                      "mscale"),
    "a rope without its factor": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor=null"),
    "infinity": ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
}


# As the hub has them, but for the keys that KEYS of Llama would repeat: what their writers and trainers left in them.
LEFT = {"_name_or_path": "x", "architectures": ["X"], "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "use_cache": True,
        "bos_token_id": 1, "eos_token_id": [2, 3], "initializer_range": 0.02, "max_position_embeddings": 4096,
        "attention_dropout": 0.0}
SIZES = {"vocab_size": 32064, "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8,
         "intermediate_size": 8192, "rope_theta": 10000, "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "tie_word_embeddings": False}
WINDOWED_AT = lambda theta: Kinds(W=MixerKeys(rope_theta=theta, rope_scaling=RopeScaling()))
PUBLISHED = {
    "Llama 2": ({"model_type": "llama", "pretraining_tp": 2, "rope_scaling": None, "rms_norm_eps": 1e-06},
                {"norm_eps": 1e-6, "head_dim": 96}),
    "SmolLM 2": ({"model_type": "llama", "is_llama_config": True, "rope_interleaved": False,
                  "transformers.js_config": {}}, {}),
    "Qwen 2.5": ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072,
                  "max_window_layers": 28, "use_mrope": False,
                  "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
                 {"rope_scaling": RopeScaling(rope_type="yarn", factor=4.0,
                                                             original_max_position_embeddings=32768),
                                                             "window": 0, "attention_bias": "qkv"}),
    "Mistral 7B v0.1": ({"model_type": "mistral", "sliding_window": 4096}, {"window": 4096}),
    "Mistral 7B, said by its class": ({"model_type": "mistral", "num_key_value_heads": 8}, {"window": 4096}),
    "Mistral 7B v0.3": ({"model_type": "mistral", "sliding_window": None}, {"window": 0}),
    "Phi-3 mini": ({"model_type": "phi3", "attention_bias": False,
                    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
                    "embd_pdrop": 0.0, "original_max_position_embeddings": 4096, "sliding_window": 2047,
                    "rope_scaling": None},
                   {"window": 2047}),
    "Gemma 7B": ({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None,
                  "head_dim": 256, "rope_scaling": None},
                 {"head_dim": 256, "activation": "geglu", "norm_offset": 1.0}),
    "OLMo 3": ({"model_type": "olmo3", "sliding_window": 4096,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "num_hidden_layers": 4, "rope_scaling": {"rope_type": "yarn", "factor": 8.0,
                                                         "beta_fast": 32, "beta_slow": 1,
                                                         "original_max_position_embeddings": 8192,
                                                         "attention_factor": 1.2079441541679836}},
               {"window": 4096, "mixers": "WWWF", "kinds": WINDOWED_AT(10000.0)}),
    "Seed-OSS 36B": ({"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
                      "mlp_bias": False, "residual_dropout": 0.1, "rope_scaling": {"rope_type": "default"}},
                     {"attention_bias": "qkv", "head_dim": 128, "mlp_bias": False}),
    "Gemma 2 9B": ({"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096,
                    "cache_implementation": "hybrid", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                   {"window": 4096, "mixers": "WF", "score_softcap": 50.0, "logit_softcap": 30.0}),
    "Gemma 3 1B": ({"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
                    "query_pre_attn_scalar": 256, "head_dim": 256,
                    "sliding_window": 512, "sliding_window_pattern": 6, "rope_local_base_freq": 10000,
                    "rope_theta": 1000000,
                    "attn_logit_softcapping": None, "cache_implementation": "hybrid",
                    "hidden_act": None, "num_hidden_layers": 26, "rope_scaling": None},
                   {"window": 512, "mixers": "WWWWWF", "kinds": WINDOWED_AT(10000.0), "rope_theta": 1e6,
                    "multipliers": Multipliers(embedding=3072 ** 0.5, score=1 / 16)}),
    "OLMo 2": ({"model_type": "olmo2", "attention_bias": False, "rope_scaling": None},
               {"norm_placement": "after", "qk_norm": "all_heads"}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published_are_read(name):
    theirs, expected = PUBLISHED[name]
    config = LEFT | SIZES | theirs
    model = Model(**settings.model_keys(config, settings.family_of(config)))
    assert {key: getattr(model, key) for key in expected} == expected
    sizes = model.embed_dim, model.num_layers, model.num_kv_heads, model.rope_theta
    assert sizes == (3072, config["num_hidden_layers"], 8, config["rope_theta"])


def test_the_text_models_of_published_multimodal_models_are_read():
    """Gemma 3 4B says only what differs from its class; Mistral Small 3.1 says nothing of its head, which is there."""
    gemma = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
             "image_token_index": 262144, "mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152},
             "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                             "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                             "sliding_window": 1024}}
    model = Model(**settings.model_keys(gemma, settings.family_of(gemma)))
    assert (model.vocab_size, model.num_heads, model.num_kv_heads, model.head_dim) == (262208, 8, 4, 256)
    assert (model.num_layers, model.mlp_dim, model.tie_embeddings) == (34, 10240, True)
    assert (model.mixers, model.rope_theta, model.kinds) == ("WWWWWF", 1e6, WINDOWED_AT(1e4))
    mistral = {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"model_type": "pixtral"},
               "text_config": SIZES | {"model_type": "mistral", "head_dim": 128, "sliding_window": None}}
    del mistral["text_config"]["tie_word_embeddings"]
    assert not settings.model_keys(mistral, settings.family_of(mistral))["tie_embeddings"]
    assert settings.model_keys(mistral | {"tie_word_embeddings": True}, settings.family_of(mistral))["tie_embeddings"]


@pytest.mark.parametrize(("change", "said"), [
    ({"text_config": None}, 'model_type="gemma3" has no text_config'),
    ({"text_config": {"model_type": "llama"}}, 'model_type="llama" in text_config of model_type="gemma3" is not'),
    ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}},
     "hidden_size_per_layer_input=256 cannot be computed"),
    ({"model_type": ["gemma3"]}, "is not a family"), ({"quantization_config": {"bits": 4}}, "quantized weights")])
def test_a_multimodal_folder_that_cannot_be_read_is_refused(tmp_path, change, said):
    shutil.copytree(GOLDENS / "gemma3_wrapped", tmp_path / "bad")
    path = tmp_path / "bad" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(call(convert.main, tmp_path / "bad"), said)


@pytest.fixture
def bad(tmp_path) -> Path:
    shutil.copytree(WHOLE, tmp_path / "bad")
    return tmp_path / "bad"


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_refused(bad, name):
    content, said = FILES[name]
    (bad / "model.safetensors").write_bytes(content)
    refused(call(convert.main, bad), str(bad), said)


@pytest.mark.parametrize("name", INDEXES)
def test_a_broken_index_is_refused(bad, name):
    weight_map, said = INDEXES[name]
    (bad / "model.safetensors").rename(bad / "a.safetensors")
    (bad / folder.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(call(convert.main, bad), str(bad), said)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_the_weights_do_not_fit_is_refused(bad, name):
    change, said = CONFIGS[name]
    config = json.loads((bad / "config.json").read_text()) | change
    (bad / "config.json").write_text(json.dumps(config))
    refused(call(convert.main, bad), str(bad), said)


def test_more_experts_than_tensors_are_refused_before_their_names_are_made(tmp_path):
    """2^31 names would fill the memory."""
    shutil.copytree(GOLDENS / "mixtral", tmp_path / "bad")
    path = tmp_path / "bad" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 2**31 - 1}))
    refused(call(convert.main, tmp_path / "bad"), "config.json says 2,147,483,647 experts, but there are only")


@pytest.mark.parametrize("text", ["[]", "{nope", "\0", '{"model_type": "llama", "model_type": "gpt2"}'])
def test_a_config_that_is_no_object_is_refused(bad, text):
    (bad / "config.json").write_text(text)
    refused(call(convert.main, bad), "config.json is broken")


def test_what_is_no_file_is_not_opened(bad):
    """A pipe would be waited for, and /dev/zero never ends."""
    for name in ("config.json", "model.safetensors"):
        (bad / name).rename(bad / "kept")
        os.mkfifo(bad / name)
        refused(call(convert.main, bad), str(bad))
        (bad / name).unlink()
        (bad / name).symlink_to("/dev/zero")
        refused(call(convert.main, bad), str(bad))
        (bad / name).unlink()
        (bad / "kept").rename(bad / name)
    assert call(convert.main, bad).code == 0


def test_a_pickle_stays_closed(bad):
    (bad / "model.safetensors").unlink()
    (bad / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo opened'\ntR.")
    refused(call(convert.main, bad), "pytorch_model.bin is a pickle")


def test_links_are_followed_as_the_cache_of_the_hub_has_them(bad):
    (bad / "model.safetensors").rename(bad.parent / "blob")
    (bad / "model.safetensors").symlink_to("../blob")
    assert call(convert.main, bad).code == 0


def test_every_fault_of_a_folder_stands_in_one_message(bad):
    tensors = {name: entry for name, entry in safetensors.read_header(WHOLE / "model.safetensors").items()}
    shapes = {name: entry.shape for name, entry in tensors.items()}
    del shapes["model.norm.weight"]
    shapes["model.embed_tokens.weight"] = (200, 31)
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (4,)       # a buffer, which older files have
    shapes["model.layers.1.adapter.weight"] = (2, 2)
    text, _ = safetensors.header({name: ("F32", shape) for name, shape in shapes.items()})
    text = text.replace(b'"model.layers.0.mlp.up_proj.weight":{"dtype":"F32"',
                        b'"model.layers.0.mlp.up_proj.weight":{"dtype":"I32"')
    numbers = sum(int(np.prod(shape)) for shape in shapes.values())
    (bad / "model.safetensors").write_bytes(text + bytes(4 * numbers))
    ran = call(convert.main, bad)
    refused(ran, "model.norm.weight is absent", "model.embed_tokens.weight is [200, 31]", "requires [200, 32]",
            "model.layers.0.mlp.up_proj.weight is I32", "model.layers.1.adapter.weight is not a tensor of this model")
    assert "inv_freq" not in ran.err
    config = json.loads((bad / "config.json").read_text()) | {"hidden_act": "relu"}
    (bad / "config.json").write_text(json.dumps(config))
    (bad / "model.safetensors").write_bytes(b"")
    refused(call(convert.main, bad), "hidden_act", "has 0 bytes")       # of the two files as well


@examples(max_examples=150)
@given(strategies.one_of(
    strategies.binary(max_size=64),
    strategies.recursive(strategies.none() | strategies.booleans() | strategies.integers(-2**70,
                                                                                         2**70) | strategies.text(
                                                                                             max_size=4),
                         lambda x: strategies.lists(x, max_size=3) | strategies.dictionaries(
                             strategies.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__", "F32"]),
                             x, max_size=4),
                         max_leaves=12).map(lambda x: raw(json.dumps(x).encode(), b"\0" * 8))))
def test_any_bytes_are_a_sound_file_or_a_value_error(content):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "x.safetensors"
        path.write_bytes(content)
        try:
            found = safetensors.read_header(path)
        except ValueError:
            return
        assert all(entry.stop <= len(content) and entry.stop - entry.start >= 0 for entry in found.values())


def test_every_row_of_every_family_is_a_form_and_names_each_tensor_once():
    for family in families.FAMILIES.values():
        pieces = [text.partition(": ") for texts in family.tensors.values() for text in texts]
        for _, _, form in pieces:
            forms.parse(form)
        for name, texts in family.tensors.items():
            assert bool(folder.NUMBER.search(name)) == all(text.startswith("layers/") for text in texts)
            assert len(texts) == 1 or all("*" in text for text in texts)
        assert all(settings.WORD.fullmatch(word) for words in family.keys.values() for word in words.split())
        assert not set(family.keys) & set(family.only)


@pytest.mark.parametrize("text", ["N H D", "(N H) D -> D N", "X -> X", "D D -> D D", "*D *F -> D F", ""])
def test_what_is_no_form_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(text) or "is not a form"):
        forms.parse(text)


def test_a_form_and_its_way_back_are_the_identity():
    sizes, x = {"D": 5, "N": 2, "H": 3}, np.arange(30.0)
    form = forms.parse("D (N H) -> N H D")
    ours = form.to_ours(x.reshape(5, 6), sizes)
    assert ours.shape == form.ours.shape(sizes) == (2, 3, 5) and ours[1, 2, 4] == x.reshape(5, 6)[4, 5]
    np.testing.assert_array_equal(form.to_theirs(ours, sizes), x.reshape(5, 6))


# ---- float8 with scales by block -------------------------------------------------------------------------------------


def float8_folder(tmp_path: Path, block: tuple[int, int], scale_dtype: str = "F32") -> tuple[Path, Path]:
    """(a folder whose matrices are float8 with scales by block, the same with the products as float32 numbers)."""
    rng, folders = np.random.default_rng(0), (tmp_path / "float8", tmp_path / "plain")
    tensors = {folder: {} for folder in folders}
    for name, entry in safetensors.read_header(GOLDENS / "qwen3" / "model.safetensors").items():
        numbers = safetensors.read(entry, 0, math.prod(entry.shape)).reshape(entry.shape)
        if len(entry.shape) == 1 or "proj" not in name:
            tensors[folders[0]][name] = tensors[folders[1]][name] = "F32", numbers
            continue
        down, across = block
        small = numbers.astype(ml_dtypes.float8_e4m3fn)
        scales = np.exp2(rng.integers(-3, 3, (-(-entry.shape[0] // down), -(-entry.shape[1] // across))))
        scales = scales.astype(safetensors.READABLE[scale_dtype])
        rows, columns = np.indices(entry.shape)
        each = scales.astype(np.float32)[rows // down, columns // across]
        tensors[folders[0]] |= {name: ("F8_E4M3", small), f"{name}_scale_inv": (scale_dtype, scales)}
        tensors[folders[1]][name] = "F32", small.astype(np.float32) * each
    config = json.loads((GOLDENS / "qwen3" / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                         "weight_block_size": list(block)}}
    for folder_, more in zip(folders, (quantized, {})):
        folder_.mkdir()
        (folder_ / "config.json").write_text(json.dumps(config | more))
        at, given = 0, {}
        for name, (dtype, numbers) in tensors[folder_].items():
            given[name] = dtype, list(numbers.shape), [at, at + numbers.nbytes]
            at += numbers.nbytes
        data = b"".join(numbers.tobytes() for _, numbers in tensors[folder_].values())
        (folder_ / "model.safetensors").write_bytes(raw(entries(**given), data))
    return folders


@pytest.mark.parametrize(("block", "scale_dtype", "rule", "mesh"), [
    ((16, 16), "F32", *EIGHT), ((10, 7), "BF16", *ONE_DEVICE), ((128, 10**9), "F8_E8M0", *ONE_DEVICE)])
def test_float8_weights_with_scales_by_block_are_read_as_their_products(tmp_path, block, scale_dtype, rule, mesh):
    """Blocks that do not divide a matrix, and ones larger than it."""
    quantized, plain = float8_folder(tmp_path, block, scale_dtype)
    found, expected = (jax.device_get(Loaded(place, rule, mesh).params) for place in (quantized, plain))
    assert_same_bits(found, expected)


def test_what_is_read_from_float8_is_exported_without_it(tmp_path):
    quantized, _ = float8_folder(tmp_path, (16, 16))
    config = settings.read(quantized)
    model = Model(**settings.model_keys(config, settings.family_of(config)))
    assert "quantization_config" not in settings.config_of(model, families.FAMILIES["qwen3"], "bfloat16", 40, config)


@pytest.mark.parametrize(("change", "said"), [
    ({"weight_block_size": [16, 8]}, "a scale for each block of weight_block_size"),
    ({"weight_block_size": None}, "quantized weights must be float8"),
    ({"quant_method": "compressed-tensors"}, "quantized weights must be float8"),
    ({"fmt": "e5m2"}, "quantized weights must be float8")])
def test_float8_weights_without_the_scales_that_they_need_are_refused(tmp_path, change, said):
    quantized, _ = float8_folder(tmp_path, (16, 16))
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] |= change
    (quantized / "config.json").write_text(json.dumps(config))
    refused(call(convert.main, quantized), said)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 1 << 20])
def test_tensors_are_copied_byte_for_byte_in_whatever_chunks(chunk_bytes, tmp_path, monkeypatch):
    entries = safetensors.read_header(WHOLE / "model.safetensors")
    some = dict(sorted(entries.items(), key=lambda pair: pair[1].stop - pair[1].start)[:3])
    monkeypatch.setattr(safetensors.files, "CHUNK_BYTES", chunk_bytes)
    safetensors.copy(some, tmp_path / "copy.safetensors")
    content, copy = (WHOLE / "model.safetensors").read_bytes(), (tmp_path / "copy.safetensors").read_bytes()
    tensors = {name: content[entry.start:entry.stop] for name, entry in some.items()}
    assert copy.endswith(b"".join(tensors.values()))
    copied = safetensors.read_header(tmp_path / "copy.safetensors")
    assert {name: copy[entry.start:entry.stop] for name, entry in copied.items()} == tensors
