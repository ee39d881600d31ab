"""A model folder whose vocabulary grows: new rows by the formula, on any layout, in exports, and what is refused."""
import dataclasses
import json
import shutil

import numpy as np
import pytest
import sampling
import tokenizers
from commands import call, ran
from folders import EIGHT, GOLDENS, ONE, Loaded, contents

from meshtrain.commands import convert, generate
from meshtrain.config import ConfigError
from meshtrain.huggingface.weights import growth
from meshtrain.run import trees

OLD, NEW = 200, 300     # of the golden folders; of 512 padded rows


def grow(name: str, layout, *words) -> dict:
    """The embedding and head [V, D] of a folder, with rows beyond its vocabulary."""
    loaded = Loaded(GOLDENS / name, *layout, f"--model.vocab_size={NEW}", *words)
    leaves = trees.leaves_of(growth.grow(loaded.found, loaded.run, loaded.params))
    return {path: np.asarray(leaves[path]).T if path == "head/kernel" else np.asarray(leaves[path])
            for path in ("embedding/table", "head/kernel") if path in leaves}


def stored(name: str) -> dict:
    tensors = contents(GOLDENS / name)
    return {path: np.frombuffer(tensors[tensor][2], np.float32).reshape(tensors[tensor][1]) for path, tensor in (
        ("embedding/table", "model.embed_tokens.weight"), ("head/kernel", "lm_head.weight")) if tensor in tensors}


@pytest.mark.parametrize("name, layout", [("llama2", ONE), pytest.param("llama2", EIGHT, marks=sampling.GRID),
                                          pytest.param("llama3.2", EIGHT, marks=sampling.GRID)], ids=str)
def test_new_rows_are_the_mean_with_a_little_noise_and_the_old_ones_stay(name, layout):
    tables, before = grow(name, layout), stored(name)
    noises = []
    assert tables.keys() == before.keys()
    for path, table in tables.items():
        np.testing.assert_array_equal(table[:OLD], before[path])
        assert not table[NEW:].any(), "padding"
        mean, std = before[path].astype(np.float64).mean(0), before[path].astype(np.float64).std(0)
        noise = (table[OLD:NEW] - mean) / (1e-5 * std)      # float32 rounds the rows to a hundredth of the noise
        assert abs(noise.std() - 1) < 0.1 and abs(noise.mean()) < 0.1 and len(np.unique(table[OLD:NEW], axis=0)) == 100
        noises.append(noise)
    assert len(noises) == 1 or abs(np.corrcoef(noises[0].ravel(), noises[1].ravel())[0, 1]) < 0.1


@pytest.mark.long
@pytest.mark.cell
def test_new_rows_are_the_same_bits_on_any_layout_and_of_any_number_of_them():
    one, eight = grow("llama2", ONE), grow("llama2", EIGHT)
    fewer = Loaded(GOLDENS / "llama2", *ONE, f"--model.vocab_size={OLD + 5}")
    fewer = trees.leaves_of(growth.grow(fewer.found, fewer.run, fewer.params))
    for path in one:
        np.testing.assert_array_equal(one[path], eight[path])
    np.testing.assert_array_equal(np.asarray(fewer["embedding/table"])[:OLD + 5], one["embedding/table"][:OLD + 5])


def test_a_smaller_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="model.vocab_size=199 contradicts checkpoint.init_from"):
        Loaded(GOLDENS / "llama2", *ONE, "--model.vocab_size=199")


def make_tokenizer(place, size: int):
    """A tokenizer.json of words w0, w1, …, w198, a separator, and w200, … as added tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(OLD - 1)}, unk_token="w1"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>"])
    library.add_tokens([f"w{n}" for n in range(OLD, size)])
    place.mkdir(exist_ok=True)
    library.save(str(place / "tokenizer.json"))
    return place / "tokenizer.json"


def test_a_run_learns_new_tokens_and_its_exports_have_them(tmp_path):
    base = shutil.copytree(GOLDENS / "llama2", tmp_path / "base")
    make_tokenizer(base, OLD)
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    grown = make_tokenizer(tmp_path / "tokens", OLD + 3)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"w{n} w202 w{n + 1} w201" for n in range(3, 150)))
    of = ("--checkpoint.init_from", base, "--data.paths", json.dumps([str(text)]), "--data.tokenizer", grown,
          "--data.seq_len", "16", "--data.global_batch", "8", "--mesh.data", "8", "--mesh.fsdp", "1", "--mesh.tensor", "1",
          "--mesh.simulated_devices", "8", "--training.steps", "2", "--model.compute_dtype", "float32",
          "--checkpoint.every", "0", "--optimizer.learning_rate", "0.01", "--run.sample_tokens", "0",
          "--data.validation_fraction", "0", "--validation.every", "0")
    of = tuple(map(str, of))
    done = ran(*of, "--run.dir", str(tmp_path / "run"), "--model.vocab_size", "203", "--lora.rank", "2",
               "--lora.also", '["embedding", "head"]', "--checkpoint.export", "last")
    assert "ids 200 to 202 are new: their rows are the mean of the 200 rows" in done.out
    out = tmp_path / "run" / "export" / "2"
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 203
    assert (out / "tokenizer.json").read_text() == grown.read_text()
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<s>"
    tensors, before = contents(out), stored("llama2")
    for path, name in (("embedding/table", "model.embed_tokens.weight"), ("head/kernel", "lm_head.weight")):
        dtype, shape, raw = tensors[name]
        table = np.frombuffer(raw, np.float32).reshape(shape)
        assert dtype == "F32" and shape == (203, 32)
        assert abs(table[202] - before[path].mean(0)).max() > 1e-3, "it learns"
    asked = ("--max-tokens", "4", "--json")
    answer = json.loads(call(generate.main, tmp_path / "run", "--prompt", "w5 w202", *asked).out)["completions"][0]
    assert answer["prompt_ids"] == [199, 5, 202]
    exported = json.loads(call(generate.main, out, "--prompt-ids", "[199, 5, 202]", *asked).out)["completions"][0]
    assert exported["token_ids"] == answer["token_ids"]
    done = call(convert.main, tmp_path / "run", tmp_path / "adapters", "--adapters")
    assert done.code == 0, done.err
    assert (tmp_path / "adapters" / "tokenizer.json").read_text() == grown.read_text()
    assert contents(tmp_path / "adapters")["base_model.model.lm_head.weight"][1:] == tensors["lm_head.weight"][1:]
    again = Loaded(base, *ONE, "--model.vocab_size=203", f"--lora.init_from={tmp_path / 'adapters'}")
    assert again.run.lora.also == ("embedding", "head")
    with pytest.raises(ConfigError, match=r"lm_head.weight is \[203, 32\].*the model requires \[200, 32\]"):
        Loaded(base, *ONE, f"--lora.init_from={tmp_path / 'adapters'}")


def test_a_quantized_embedding_cannot_grow():
    loaded = Loaded(GOLDENS / "llama3.2", *ONE, f"--model.vocab_size={NEW}")
    entries = {name: dataclasses.replace(entry, dtype="F8_E4M3") for name, entry in loaded.found.entries.items()}
    with pytest.raises(ConfigError, match="adds rows to model.embed_tokens.weight of .* is quantized"):
        growth.grow(dataclasses.replace(loaded.found, entries=entries), loaded.run, loaded.params)


def test_frozen_new_rows_are_told(capsys):
    grow("llama3.2", ONE, "--lora.rank=2")
    assert 'note: LoRA freezes new rows; lora.also=["embedding"] trains them' in capsys.readouterr().out
