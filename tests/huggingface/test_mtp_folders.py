"""The depths of model folders are read, trained and written; what no name is known for is carried, or left out and told."""
import json
import shutil

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits
from commands import call, refused
from folders import GOLDENS, ONE, Loaded, contents
from safetensors.numpy import load_file, save_file
from test_export import write

from meshtrain.commands import generate
from meshtrain.config import ConfigError
from meshtrain.huggingface import folder, safetensors, settings
from meshtrain.huggingface.weights import pretrained
from meshtrain.storage import model_folder

DEPTH, D = ("--model.mtp_layers=1",), 24
# (prefix, that of the layer, merge, norms of embedding, state and output, key of config.json)
QWEN = ("mtp.", "mtp.layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "mtp_num_hidden_layers")
DEEPSEEK = ("model.layers.4.", "model.layers.4.", "eh_proj", "enorm", "hnorm", "shared_head.norm",
            "num_nextn_predict_layers")
COPIES = {"model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
          "model.layers.4.shared_head.head.weight": "lm_head.weight"}
NAMED = dict.fromkeys(("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"), QWEN) | dict.fromkeys(
    ("deepseek_v3", "glm4_moe", "glm4_moe_lite"), DEEPSEEK)
# The last layer with attention: its mixer and its MLP are layers of their own, as those of the depth are.
NEMOTRON = {"backbone.layers.3.": "mtp.layers.0.", "backbone.layers.4.": "mtp.layers.1."}


def add_depth(name, place):
    """Copy the golden folder to `place`, with a depth whose layer is named as the last layer is."""
    where, layer, merge, embedding_norm, hidden_norm, norm, key = NAMED[name]
    shutil.copytree(GOLDENS / name, place)
    tensors, rng = load_file(place / folder.SINGLE), np.random.default_rng(0)
    last = "model.layers.3."
    new = {name.replace(last, layer): array.shape for name, array in tensors.items() if name.startswith(last)}
    new |= {f"{where}{merge}.weight": (D, 2 * D)} | {
        f"{where}{of}.weight": (D,) for of in (embedding_norm, hidden_norm, norm)}
    tensors |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in new.items()}
    tensors |= {copy: tensors[of] for copy, of in COPIES.items()} if where != "mtp." else {}
    save_file(tensors, place / folder.SINGLE, {"format": "pt"})
    set_config(place, **{key: 1})
    return place


def add_nemotron_depth(place):
    shutil.copytree(GOLDENS / "nemotron_h", place)
    tensors, rng = load_file(place / folder.SINGLE), np.random.default_rng(0)
    new = {there + name.removeprefix(theirs): array.shape for theirs, there in NEMOTRON.items()
           for name, array in tensors.items() if name.startswith(theirs)}
    new |= {"mtp.layers.0.eh_proj.weight": (D, 2 * D)} | {
        f"mtp.layers.{of}.weight": (D,) for of in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    tensors |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in new.items()}
    save_file(tensors, place / folder.SINGLE, {"format": "pt"})
    set_config(place, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    return place


@pytest.mark.full
def test_a_depth_is_a_layer_like_the_last_one_with_attention_where_mixers_and_mlps_are_layers(tmp_path):
    source = add_nemotron_depth(tmp_path / "source")
    assert len(Loaded(source, *ONE).found.carried) == sum(name.startswith("mtp.") for name in contents(source))
    loaded, tensors = Loaded(source, *ONE, *DEPTH), load_file(source / folder.SINGLE)
    depth = jax.device_get(loaded.params["mtp_1"])
    for ours, theirs in (("embedding_norm", "0.enorm"), ("hidden_norm", "0.hnorm"), ("norm", "1.final_layernorm")):
        np.testing.assert_array_equal(depth[ours]["scale"], tensors[f"mtp.layers.{theirs}.weight"])
    np.testing.assert_array_equal(depth["from_embedding"]["kernel"], tensors["mtp.layers.0.eh_proj.weight"][:, :D].T)
    np.testing.assert_array_equal(depth["layer"]["attention"]["out"]["kernel"].reshape(-1, D),
                                  tensors["mtp.layers.0.mixer.o_proj.weight"].T)
    for expert, down in enumerate(depth["layer"]["moe"]["down"]):
        np.testing.assert_array_equal(down, tensors[f"mtp.layers.1.mixer.experts.{expert}.down_proj.weight"].T)
    assert not loaded.found.carried and not loaded.found.notes
    write(loaded, tmp_path / "out", source=source)
    assert contents(tmp_path / "out") == contents(source)
    write(loaded, tmp_path / "anew")
    config = settings.read(tmp_path / "anew")
    assert (config["num_nextn_predict_layers"], config["mtp_hybrid_override_pattern"]) == (1, "*E")
    assert contents(tmp_path / "anew").keys() == contents(source).keys()
    set_config(source, mtp_hybrid_override_pattern="*-")
    with pytest.raises(ConfigError, match=r"a depth has the layers .*\*-.*use model.mtp_layers=0"):
        Loaded(source, *ONE, *DEPTH)


@pytest.fixture
def source(tmp_path):
    return add_depth("qwen3_5_text", tmp_path / "source")


def set_config(place, **keys):
    config = place / settings.CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))


@pytest.mark.parametrize("name", NAMED)
def test_a_depth_is_read_by_its_names_and_written_as_it_was(name, tmp_path):
    """The merge multiplies [embedding, state], in this order, as vLLM's does. After training the new numbers are written,
    also where the run carried the old ones."""
    where, layer, merge, embedding_norm, hidden_norm, norm, key = NAMED[name]
    source = add_depth(name, tmp_path / "source")
    loaded, tensors = Loaded(source, *ONE, *DEPTH), load_file(source / folder.SINGLE)
    depth, fc = jax.device_get(loaded.params["mtp_1"]), tensors[f"{where}{merge}.weight"]
    np.testing.assert_array_equal(depth["from_embedding"]["kernel"], fc[:, :D].T)
    np.testing.assert_array_equal(depth["from_hidden"]["kernel"], fc[:, D:].T)
    for ours, theirs in (("embedding_norm", embedding_norm), ("hidden_norm", hidden_norm), ("norm", norm)):
        np.testing.assert_array_equal(depth[ours]["scale"], tensors[f"{where}{theirs}.weight"])
    out = depth["layer"]["attention"]["out"]["kernel"]
    np.testing.assert_array_equal(out.reshape(-1, D), tensors[f"{layer}self_attn.o_proj.weight"].T)
    for expert, down in enumerate(depth["layer"]["moe"]["down"] if "moe" in depth["layer"] else ()):
        np.testing.assert_array_equal(down, tensors[f"{layer}mlp.experts.{expert}.down_proj.weight"].T)
    assert not loaded.found.carried and not loaded.found.notes
    write(loaded, tmp_path / "out", source=source)
    assert contents(tmp_path / "out") == contents(source)
    # A run whose companions carry the old tensors, too, as one that was begun without depths does.
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    pretrained.keep_companions(loaded.run, run_dir)
    assert (run_dir / model_folder.KEPT / model_folder.CARRIED).is_file()
    loaded.params = jax.tree.map(lambda a: 2 * a, loaded.params)
    write(loaded, tmp_path / "trained", source=run_dir / model_folder.KEPT)
    assert not (tmp_path / "trained" / model_folder.CARRIED).exists()
    again = Loaded(tmp_path / "trained", *ONE, *DEPTH)
    assert_same_bits(*map(jax.device_get, (again.params, loaded.params)))
    assert json.loads((tmp_path / "trained" / settings.CONFIG).read_text())[key] == 1
    written = contents(tmp_path / "trained")
    assert all(written[copy] == written[of] for copy, of in COPIES.items() if where != "mtp.")


def test_without_the_key_a_depth_is_carried(source, tmp_path):
    loaded = Loaded(source, *ONE)
    assert "mtp_1" not in loaded.params and "mtp.fc.weight" in loaded.found.carried
    write(loaded, tmp_path / "out", source=source)
    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.parametrize("name", ["qwen3_5_text", "llama3.2"])
def test_depths_that_a_folder_lacks_stay_random_and_are_told_and_so_are_those_that_a_family_cannot_name(name, tmp_path, capsys):
    loaded = Loaded(GOLDENS / name, *ONE, "--model.mtp_layers=2")
    (note,) = [note for note in loaded.found.notes if "mtp_layers" in note]
    assert "has none of these depths; the others start from random weights" in note
    assert (np.asarray(loaded.params["mtp_1"]["from_hidden"]["kernel"]) == 7).all()     # what `Loaded` begins with
    write(loaded, tmp_path / "out", source=GOLDENS / name)
    names, left = contents(tmp_path / "out").keys() - contents(GOLDENS / name).keys(), capsys.readouterr().err
    assert {name.startswith("mtp.") for name in names} == ({True} if name == "qwen3_5_text" else set())
    count = 1 if name == "qwen3_5_text" else 2
    assert f"has no names for {count} of these depths; {tmp_path / 'out'} is the model without them" in left


def test_a_depth_with_an_embedding_of_its_own_is_refused(source):
    set_config(source, mtp_use_dedicated_embeddings=True)
    assert Loaded(source, *ONE).found.carried
    with pytest.raises(ConfigError, match="mtp_use_dedicated_embeddings=true.*use model.mtp_layers=0"):
        Loaded(source, *ONE, *DEPTH)


def test_depths_that_a_folder_numbers_after_its_layers_are_each_read_and_written(tmp_path):
    source = add_depth("glm4_moe", tmp_path / "source")
    tensors = load_file(source / folder.SINGLE)
    tensors |= {name.replace("layers.4.", "layers.5."): 3 * array for name, array in tensors.items()
                if "layers.4." in name and name not in COPIES}
    save_file(tensors, source / folder.SINGLE, {"format": "pt"})
    set_config(source, num_nextn_predict_layers=2)
    loaded = Loaded(source, *ONE, "--model.mtp_layers=2")
    first, second = (jax.device_get(loaded.params[f"mtp_{k}"]) for k in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, second, jax.tree.map(lambda a: 3 * a, first))
    write(loaded, tmp_path / "out", source=source)
    assert contents(tmp_path / "out") == contents(source), "the second has no copies"
    fewer = Loaded(source, *ONE, *DEPTH).found
    assert {name.split(".")[2] for name in fewer.carried} == {"5"}


def test_a_model_that_began_without_a_folder_has_the_copies_that_engines_load(tmp_path):
    loaded = Loaded(GOLDENS / "glm4_moe", *ONE, *DEPTH)
    write(loaded, tmp_path / "out")
    assert COPIES.keys() <= contents(tmp_path / "out").keys()
    assert settings.read(tmp_path / "out")["num_nextn_predict_layers"] == 1


def test_quantized_depths_are_read_with_their_scales(tmp_path):
    place = tmp_path / "source"
    shutil.copytree(GOLDENS / "deepseek_v3_fp8", place)
    entries = safetensors.read_header(place / folder.SINGLE)
    last = "model.layers.3."
    assert any(name.startswith(last) and name.endswith("_scale_inv") for name in entries)
    raw = {name: (entry.dtype, entry.shape, (place / folder.SINGLE).read_bytes()[entry.start:entry.stop])
           for name, entry in entries.items()}
    raw |= {name.replace(last, "model.layers.4."): of for name, of in raw.items() if name.startswith(last)}
    norm = raw["model.norm.weight"]
    itemsize = len(norm[2]) // D
    raw |= {f"model.layers.4.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
    raw["model.layers.4.eh_proj.weight"] = (norm[0], (D, 2 * D), bytes(itemsize * 2 * D * D))
    header, begin = {}, 0
    for name, (dtype, shape, content) in raw.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin := begin + len(content)]}
    text = json.dumps(header).encode()
    (place / folder.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(of[2] for of in raw.values()))
    set_config(place, num_nextn_predict_layers=1)
    params = jax.device_get(Loaded(place, *ONE, *DEPTH).params)
    layers = params["layers"].get("layers", params["layers"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[-1]), params["mtp_1"]["layer"], layers)


def test_a_depth_with_a_head_of_its_own_is_refused(tmp_path):
    source = add_depth("glm4_moe", tmp_path / "source")
    tensors = load_file(source / folder.SINGLE)
    tensors["model.layers.4.shared_head.head.weight"] = 2 * tensors["lm_head.weight"]
    save_file(tensors, source / folder.SINGLE, {"format": "pt"})
    assert Loaded(source, *ONE).found.carried
    with pytest.raises(ConfigError, match="shared_head.head.weight differs from lm_head.weight: .*"
                                          "use model.mtp_layers=0"):
        Loaded(source, *ONE, *DEPTH)


def test_a_folder_with_a_depth_drafts_and_answers_as_without(source):
    """Its recurrent layers, too, whose states cannot be taken back."""
    asked = source, "--prompt-ids=[[5, 6, 7], [8, 9, 10, 11]]", "--max-tokens=40", "--json", "--mesh.tensor=1"
    plain, drafted = call(generate.main, *asked), call(generate.main, *asked, "--draft=1")
    assert (drafted.code, drafted.out) == (0, plain.out) and "of depth 1" in drafted.err
    refused(call(generate.main, *asked, "--draft=2"), "--draft 2 needs", "has 1 that can draft", "use --draft 1")
