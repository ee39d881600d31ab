"""What the files of a model folder say differently of one thing is compared: equal is taken, different is told as
transformers 5.24 takes it, or refused by name. The choices were tried on its classes of configuration."""
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import call, refused
from corpora import write_tokenizer
from folders import GOLDENS, ONE, Loaded, run_of
from safetensors.numpy import load_file, save_file

from meshtrain import config
from meshtrain.commands import convert
from meshtrain.data.documents import tokenizer
from meshtrain.huggingface import families, folder, settings, spellings
from meshtrain.huggingface.weights import export, pretrained
from meshtrain.model import transformer

TIED, HEAD = GOLDENS / "qwen2_tied", "lm_head.weight"
TABLE = "model.embed_tokens.weight"


def copied(tmp_path: Path, source: Path = TIED, change=lambda tensors: {}, **keys) -> Path:
    """A folder with changed tensors and keys of config.json; a key that is ... is taken out."""
    home = tmp_path / "folder"
    shutil.copytree(source, home, ignore=shutil.ignore_patterns("*.npz"))
    tensors = load_file(home / "model.safetensors")
    save_file(tensors | change(tensors), home / "model.safetensors")
    said = json.loads((home / "config.json").read_text()) | keys
    (home / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))
    return home


def other(tensors, seed=0):
    return {HEAD: np.random.default_rng(seed).standard_normal(tensors[TABLE].shape).astype(np.float32)}


def test_a_head_beside_an_embedding_that_config_json_ties_is_read_where_it_differs(tmp_path):
    home = copied(tmp_path, change=other)
    loaded = Loaded(home, *ONE)
    assert loaded.run.model.tie_embeddings is False
    (note,) = loaded.found.notes
    assert f"{HEAD} differs from {TABLE}, though config.json has tie_word_embeddings=true" in note
    said = copied(tmp_path / "said", change=other, tie_word_embeddings=False)
    tokens = np.random.default_rng(1).integers(0, 100, (2, 8))
    np.testing.assert_array_equal(loaded.logits(tokens), Loaded(said, *ONE).logits(tokens))
    written = settings.config_of(loaded.run.model, loaded.found.family, "float32", 8, loaded.found.config)
    assert written["tie_word_embeddings"] is False and settings.model_keys(written, loaded.found.family)[
        "tie_embeddings"] is False
    ran = call(convert.main, home)
    assert ran.code == 0 and note in ran.err and "tie_embeddings = true" not in ran.out
    # Differs in its last number alone.
    def nearly(tensors):
        head = tensors[TABLE].copy()
        head[-1, -1] += 1
        return {HEAD: head}
    assert folder.settings_of(copied(tmp_path / "nearly", change=nearly))["tie_embeddings"] is False


@pytest.mark.parametrize("change", [
    lambda tensors: {}, lambda tensors: {HEAD: tensors[TABLE]},
    lambda tensors: {TABLE: (half := tensors[TABLE].astype(np.float16)), HEAD: half.astype(np.float32)}])
def test_a_head_that_is_a_copy_of_the_embedding_is_tied_to_it(change, tmp_path):
    loaded = Loaded(copied(tmp_path, change=change), *ONE)
    assert loaded.run.model.tie_embeddings and loaded.found.notes == () and HEAD not in {
        row.name for row in loaded.rows}


def test_a_multimodal_folder_has_the_head_of_its_text_model(tmp_path):
    source = GOLDENS / "gemma3_wrapped"
    tensors = load_file(source / "model.safetensors")
    table = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    head = ("language_model." if table.startswith("language_model.model.") else "") + HEAD
    assert folder.settings_of(source)["tie_embeddings"]
    found = folder.open_folder(copied(tmp_path, source, lambda tensors: {head: tensors[table] + 1}))
    assert found.model["tie_embeddings"] is False and HEAD in found.entries and " differs from " in found.notes[0]


def test_a_run_that_was_described_without_the_weights_is_refused_with_the_key(tmp_path):
    """As of a folder at an address, whose weights are read at the start."""
    home = copied(tmp_path, change=other)
    weights = (home / "model.safetensors").rename(tmp_path / "away")
    tied, own = (run_of(home, *ONE, *words) for words in ([], ["--model.tie_embeddings=false"]))
    weights.rename(home / "model.safetensors")
    assert (tied.model.tie_embeddings, own.model.tie_embeddings) == (True, False)
    with pytest.raises(config.ConfigError, match="set model.tie_embeddings=false"):
        pretrained.open_folder(tied, transformer.build(tied.model))
    assert pretrained.open_folder(own, transformer.build(own.model))
    with pytest.raises(config.ConfigError, match="model.tie_embeddings=true contradicts"):
        run_of(home, *ONE, "--model.tie_embeddings=true")
    with pytest.raises(config.ConfigError, match="model.tie_embeddings=false contradicts"):
        run_of(TIED, *ONE, "--model.tie_embeddings=false")


@pytest.mark.parametrize("shards, single, told", [
    (2, True, "are two sets of weights"), (2, False, ""), (0, False, "there is no such file"),
    (0, True, "model-00001-of-00002.safetensors, one of its 2 files, is missing"),
    (1, True, "model-00002-of-00002.safetensors, one of its 2 files, is missing")])
def test_of_two_sets_of_weights_the_whole_one_is_read_and_two_are_refused(shards, single, told, tmp_path):
    home = copied(tmp_path)
    tensors = load_file(home / "model.safetensors")
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    parts = [dict(list(tensors.items())[i::2]) for i in range(2)]
    (home / folder.INDEX).write_text(json.dumps({"weight_map": {
        name: file for file, part in zip(files, parts) for name in part}}))
    for file, part in list(zip(files, parts))[:shards]:
        save_file({name: x * 2 for name, x in part.items()}, home / file)
    if not single:
        (home / "model.safetensors").unlink()
    if (shards, single) in ((2, True), (0, False)):
        ran = call(convert.main, home)
        refused(ran, told, *([folder.INDEX, folder.SINGLE] if single else []))
        return
    found = folder.open_folder(home)
    assert {entry.path.name for entry in found.entries.values()} == ({folder.SINGLE} if single else set(files))
    assert told in "; ".join(found.notes) and bool(found.notes) == bool(told)


LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
          "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
# family, keys, what is refused ("!…") or told, and a key of [model] with its value
PAIRS = [
    ("llama", dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling=LINEAR),
     "rope_scaling is taken", ("rope_scaling", LINEAR)),
    ("llama", dict(rope_parameters=LINEAR | {"rope_theta": 1e4}, rope_scaling={"type": "linear", "factor": 4}), "",
     ("rope_scaling", LINEAR)),
    ("llama", dict(rope_parameters=LINEAR, rope_scaling={}), "", ("rope_scaling", LINEAR)),
    ("llama", dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_scaling=LINEAR),
     "!rope_parameters=", None),
    ("llama", dict(rope_parameters=LINEAR | {"rope_theta": 5e5}, rope_theta=1e4), "rope_theta=10000.0 and rope_theta="
     "500000.0 inside the rope; the second", ("rope_theta", 5e5)),
    ("llama", dict(rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 4.0}),
     'rope_type="linear" and type="yarn" of the rope; the first', ("rope_scaling", LINEAR)),
    ("llama", dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}, rope_scaling=LINEAR), "!rope_scaling",
     None),
    ("phi3", dict(rope_scaling=LONG | {"original_max_position_embeddings": 100}, max_position_embeddings=800,
                  original_max_position_embeddings=200), "and 100 inside the rope; 200 is taken",
     ("rope_scaling.original_max_position_embeddings", 200)),
    ("gemma3_text", dict(rope_parameters=NESTED, rope_local_base_freq=7.0, layer_types=["sliding_attention"] * 6),
     "rope_local_base_freq=7.0 and rope_theta=10000.0 inside", ("kinds.W.rope_theta", 1e4)),
    ("gemma3_text", dict(rope_parameters=NESTED, rope_scaling=LINEAR), "!for several kinds of layers", None),
    ("gemma4_text", dict(rope_scaling=LINEAR), "!does not say for which layers", None),
    ("gemma3_text", dict(layer_types=["full_attention"] * 6, sliding_window_pattern=2),
     "layer_types names other layers than sliding_window_pattern=2", ("mixers", "F")),
    ("gemma3_text", dict(layer_types=["sliding_attention", "full_attention"] * 3, _sliding_window_pattern=2), "",
     ("mixers", "WF")),
    ("gemma3_text", dict(sliding_window_pattern=2, _sliding_window_pattern=6), "!sliding_window_pattern=2 and "
     "_sliding_window_pattern=6", None),
    ("exaone4", dict(sliding_window_pattern="LGLG"), "!is not L…LG", None),
    ("exaone4", dict(sliding_window_pattern="LLG"), "", ("mixers", "WWN")),
    ("smollm3", dict(no_rope_layers=[1, 1, 1, 1, 1, 0], no_rope_layer_interval=2), "no_rope_layers is taken",
     ("mixers", "FFFFFN")),
    ("glm4", dict(partial_rotary_factor=0.25, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
     "partial_rotary_factor=0.25 and partial_rotary_factor=0.5 inside", ("rope_scaling.partial_rotary_factor", 0.5)),
    ("minimax_m2", dict(rotary_dim=8, partial_rotary_factor=1.0), "!rotary_dim=0.5 and partial_rotary_factor=1.0",
     None),
    ("minimax_m2", dict(rotary_dim=8, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0}),
     "!rotary_dim=0.5 and partial_rotary_factor of the rope=1.0", None),
    ("minimax_m2", dict(rotary_dim=64, head_dim=...), "", ("rope_scaling.partial_rotary_factor", 0.5)),    # of 128
    ("qwen3_moe", dict(num_experts=8, num_local_experts=4), "!num_experts=8 and num_local_experts=4", None),
    ("qwen3_moe", dict(num_experts=8, num_local_experts=8), "", ("num_experts", 8)),
    ("olmoe", dict(num_local_experts=4), "", ("num_experts", 4)),
    ("gpt_oss", dict(num_experts_per_tok=2, experts_per_token=1), "!num_experts_per_tok=2 and experts_per_token=1",
     None),
    ("gemma2", dict(sliding_window=8, sliding_window_size=16), "!sliding_window=8 and sliding_window_size=16", None),
    ("kimi_linear", dict(num_experts_per_token=1, num_experts_per_tok=2), "!are the same setting", None),
    ("kimi_linear", dict(linear_head_dim=4, linear_attn_config={"head_dim": 8}),
     "!linear_head_dim=4 and linear_attn_config.head_dim=8", None),
    ("kimi_linear", dict(layer_types=["full_attention"] * 2, linear_attn_config={
        "full_attn_layers": [2], "kda_layers": [1]}), "!layer_types=", None),
    ("nemotron_h", dict(layers_block_type=["mamba", "moe"], hybrid_override_pattern="ME"), "", None),
    ("nemotron_h", dict(layers_block_type=["mamba", "attention"], hybrid_override_pattern="*M"),
     "!layers_block_type=", None),
    ("nemotron_h", dict(layer_norm_epsilon=1e-5, rms_norm_eps=1e-6), "layer_norm_epsilon=1e-05 and rms_norm_eps=1e-06",
     None),
    ("gemma4_text", dict(global_head_dim=16, per_layer_config={"5": {"head_dim": 32}}),
     "!global_head_dim=16 and per_layer_config.head_dim=32", None),
    ("qwen3", dict(dtype="bfloat16", torch_dtype="float32"), "", None)]


@pytest.mark.parametrize("kind, keys, told, wanted", PAIRS)
def test_keys_that_say_one_setting_are_compared(kind, keys, told, wanted):
    family = families.FAMILIES[kind]
    usual = dict(vocab_size=64, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=2,
                 head_dim=16, intermediate_size=64, hidden_size_per_layer_input=0, sliding_window=8)
    found = {key: value for key, value in (usual | keys).items() if value is not ... and (
        key in keys or key in family.keys)} | {"model_type": kind}
    faults, notes = spellings.compare(found, family)
    if told.startswith("!"):
        assert told[1:] in "; ".join(faults) and all("; " in one or "can be computed" in one for one in faults)
        with pytest.raises(ValueError, match="config.json: ") as caught:
            settings.model_keys(found, family)
        assert told[1:] in str(caught.value)
        return
    assert faults == [] and told in "; ".join(notes) and bool(notes) == bool(told)
    if wanted:
        value = settings.model_keys(found, family)
        for part in wanted[0].split("."):
            value = value[part]
        assert value == wanted[1]


def test_no_published_config_says_a_thing_in_two_ways():
    for name, given in json.loads((GOLDENS / "published_models.json").read_text()).items():
        text, family = settings.text_of(given["config"]), settings.family_of(given["config"])
        assert spellings.compare(text, family)[0] == [], name


def test_a_rope_that_was_taken_from_rope_scaling_is_written_as_it_was_taken():
    family = families.FAMILIES["llama"]
    source = {"model_type": "llama", "rope_scaling": LINEAR, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}}
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = config.Model(**settings.model_keys(source | sizes, family))
    written = settings.config_of(model, family, "float32", 8, source | sizes)
    assert "rope_parameters" not in written and settings.model_keys(written, family)["rope_scaling"] == LINEAR


def test_an_export_has_the_files_without_which_its_tokenizer_reads_otherwise(tmp_path):
    path = Path(write_tokenizer(tmp_path / "my.json"))
    size = tokenizer.open_file(str(path)).vocab_size
    (tmp_path / "special_tokens_map.json").write_text("{}")
    for added, names in (({}, {"tokenizer.json"}), ({"<|x|>": size}, {
            "tokenizer.json", "added_tokens.json", "special_tokens_map.json"})):
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
        out = tmp_path / f"out{len(added)}"
        out.mkdir()
        export.write_companions(out, None, {"tokenizer": str(path)}, (), grown=False)
        assert {file.name for file in out.iterdir()} == names
        assert tokenizer.open_file(str(out / "tokenizer.json")).key == tokenizer.open_file(str(path)).key
