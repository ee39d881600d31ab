"""The depth of a Qwen3.5 folder is read, trained and written; what no name is known for is carried, or left out and told."""
import json
import shutil

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits
from folders import GOLDENS, ONE, Loaded, contents
from safetensors.numpy import load_file, save_file
from test_export import write

from meshtrain.config import ConfigError
from meshtrain.huggingface import folder, settings
from meshtrain.huggingface.weights import pretrained
from meshtrain.storage import model_folder

DEPTH = ("--model.mtp_layers=1",)


@pytest.fixture
def source(tmp_path):
    """The golden folder with a depth, whose layer is named as the last layer is."""
    place = tmp_path / "source"
    shutil.copytree(GOLDENS / "qwen3_5_text", place)
    tensors, rng = load_file(place / folder.SINGLE), np.random.default_rng(0)
    last, D = "model.layers.3.", 24
    new = {name.replace(last, "mtp.layers.0."): array.shape for name, array in tensors.items() if name.startswith(last)}
    new |= {"mtp.fc.weight": (D, 2 * D)} | {f"mtp.{name}.weight": (D,) for name in (
        "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    tensors |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in new.items()}
    save_file(tensors, place / folder.SINGLE, {"format": "pt"})
    set_config(place, mtp_num_hidden_layers=1)
    return place


def set_config(place, **keys):
    config = place / settings.CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))


def test_a_depth_is_read_by_its_names_and_written_as_it_was(source, tmp_path):
    """The merge multiplies [embedding, state], in this order, as vLLM's does. After training the new numbers are written,
    also where the run carried the old ones."""
    loaded, tensors = Loaded(source, *ONE, *DEPTH), load_file(source / folder.SINGLE)
    depth, D = jax.device_get(loaded.params["mtp_1"]), 24
    fc = tensors["mtp.fc.weight"]
    np.testing.assert_array_equal(depth["from_embedding"]["kernel"], fc[:, :D].T)
    np.testing.assert_array_equal(depth["from_hidden"]["kernel"], fc[:, D:].T)
    for ours, theirs in (("embedding_norm", "pre_fc_norm_embedding"), ("hidden_norm", "pre_fc_norm_hidden"), ("norm", "norm")):
        np.testing.assert_array_equal(depth[ours]["scale"], tensors[f"mtp.{theirs}.weight"])
    np.testing.assert_array_equal(depth["layer"]["mlp"]["down"]["kernel"], tensors["mtp.layers.0.mlp.down_proj.weight"].T)
    assert not loaded.found.carried and not loaded.found.notes
    write(loaded, tmp_path / "out", source=source)
    assert contents(tmp_path / "out") == contents(source)
    # A run whose companions carry the old tensors, too, as one that was begun without depths does.
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    pretrained.keep_companions(loaded.run, run_dir)
    assert (run_dir / model_folder.KEPT / model_folder.CARRIED).is_file()
    loaded.params["mtp_1"] = jax.tree.map(lambda a: 2 * a, loaded.params["mtp_1"])
    write(loaded, tmp_path / "trained", source=run_dir / model_folder.KEPT)
    assert not (tmp_path / "trained" / model_folder.CARRIED).exists()
    again = Loaded(tmp_path / "trained", *ONE, *DEPTH)
    assert_same_bits(*map(jax.device_get, (again.params, loaded.params)))
    assert json.loads((tmp_path / "trained" / settings.CONFIG).read_text())["mtp_num_hidden_layers"] == 1


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
