"""What a run file may leave out: the source of its data, its layout, and what it takes from another run file."""
import re
from pathlib import Path

import pytest

from meshtrain import config, elastic, run_files, training_data
from meshtrain.config import layouts
from meshtrain.data import globs
from meshtrain.data.documents import tokenizer

DATA = '[data]\nsource = "stdlib"\n'


def write(directory: Path, **files: str) -> Path:
    """Run files by stem, `_` for a directory."""
    for name, text in files.items():
        path = directory / f"{name.replace('_', '/')}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return directory


def refused(*argv) -> str:
    with pytest.raises(config.ConfigError) as caught:
        run_files.load([str(word) for word in argv])
    return str(caught.value)


# ---- the source of data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths, source", [
    (["a.txt"], "text"), (["**/A.TXT", "b.txt.gz"], "text"), (["a.jsonl.zst"], "jsonl"), (["d/*.parquet"], "parquet"),
    (["a.arrow"], "arrow"), (["x.tokens.npy", "y.bin"], "tokens"), (["s3://bucket/x.parquet"], "parquet"),
    (["my/train.v1_text_document"], "tokens"), (["my/train.v1_text_document", "y.bin"], "tokens")])
def test_a_source_is_that_of_its_files_suffix(tmp_path, monkeypatch, paths, source):
    monkeypatch.chdir(write(tmp_path, run=""))
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "train.v1_text_document.bin").touch()
    words = config.words({"data.paths": paths})
    assert run_files.load(["run.toml", *words]).data.source == source
    assert run_files.load(words).data.source == source      # in place of the quickstart's own
    mixed = run_files.load(["run.toml", *config.words({"data.mixture": [{"paths": paths}]})])
    assert (mixed.data.source, mixed.data.mixture[0].source) == ("mixture", source)


def test_only_the_quickstarts_own_data_have_its_prompt():
    prompt = lambda **keys: run_files.load(config.words({key.replace("_", ".", 1): value for key, value in keys.items()})
                                        ).run.sample_prompt
    assert prompt() == prompt(data_source="stdlib") == "def "
    tokens = dict(data_source="tokens", data_bos_token="0", data_paths=["a.tokens.npy"])
    assert prompt(**tokens) == prompt(data_paths=["a.txt"]) == "" and prompt(**tokens, run_sample_prompt="a") == "a"


def test_lines_of_json_are_pairs_or_prompts_by_the_objective(tmp_path):
    run = write(tmp_path, run='[data]\npaths = ["a.jsonl"]\n') / "run.toml"
    of = lambda *words: run_files.load([str(run), *words]).data.source
    assert of("--training.objective", "dpo") == "preferences" and of() == "jsonl"
    assert of("--training.objective", "rl", "--rl.reward", "exact", "--rl.max_tokens", "8") == "prompts"


@pytest.mark.parametrize("keys, message", [
    ({}, 'data.paths names no files; give some, e.g. ["data/*.jsonl"], or data.source="stdlib"'),
    ({"data.paths": ["d/*", "x.md"]}, 'has no suffix of a known format; give data.source, one of "text"'),
    ({"data.paths": ["x.md"], "model.vocab_size": 256}, "has no suffix of a known format"),
    ({"data.paths": ["a.txt", "b.jsonl"]}, "have several formats (jsonl and text)"),
    ({"data.mixture": [{"weight": 1.0}]}, "data.mixture[0].paths names no files"),
    ({"data.source": "stdlib", "data.paths": ["a.txt"]}, 'is not read by data.source="stdlib"')])
def test_a_source_that_nothing_tells_is_a_mistake_with_its_remedy(tmp_path, keys, message):
    told = refused(write(tmp_path, run="") / "run.toml", *config.words(keys))
    assert message in told and len(told.splitlines()) == 1


def test_megatrons_name_without_bin_names_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a_text_document", "b_text_document"):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").touch()
    (tmp_path / "a_text_document").mkdir()       # Megatron's cache may be beside it
    assert list(globs.match_globs(["b_text_document"], "tokens")) == ["b_text_document.bin"]
    assert list(globs.match_globs(["a_text_document", "b_text_document"], "tokens")) == [
        "a_text_document.bin", "b_text_document.bin"]
    assert list(globs.match_globs(["?_text_doc*ment"], "tokens")) == ["a_text_document.bin", "b_text_document.bin"]
    with pytest.raises(ValueError, match="b_text_document.bin exists, which data.source='tokens' reads"):
        globs.match_globs(["b_text_document"], "text")


# ---- the layout ------------------------------------------------------------------------------------------------------


def layout(run: config.Run, num_devices: int) -> tuple[dict[str, int], str, int]:
    """(mesh axes larger than 1, the rules, notes that tell a default of the layout)."""
    fitted, _ = elastic.fit(run, num_devices)
    sizes = {axis: n for axis, n in config.mesh_sizes(fitted, num_devices).items() if n > 1}
    return sizes, Path(fitted.sharding.rules).stem, len(layouts.notes(fitted))


@pytest.mark.parametrize("text, num_devices, wanted", [
    ("", 64, ({"fsdp": 64}, "zero3", 1)), ("", 1, ({}, "ddp", 0)),
    ("[mesh]\nplacement = ['stage', 'data', 'fsdp', 'context', 'tensor']\n", 8, ({"fsdp": 8}, "zero3", 1)),
    ("[mesh]\nsimulated_devices = 8\n", 8, ({"fsdp": 8}, "zero3", 1)),
    ("[sharding]\nrules = 'ddp'\n", 8, ({"fsdp": 8}, "ddp", 1)),
    ("[mesh]\nfull_devices = 16\n", 8, ({"fsdp": 8}, "zero3", 1)),
    ("[mesh]\ndata = 8\n", 8, ({"data": 8}, "ddp", 0)), ("[mesh]\ndata = 1\n", 1, ({}, "ddp", 0))])
def test_a_run_that_names_no_layout_takes_all_devices_by_zero3(tmp_path, text, num_devices, wanted):
    run = run_files.load([str(write(tmp_path, run=text + DATA) / "run.toml")])
    assert layout(run, num_devices) == wanted


def test_a_layout_that_was_left_open_is_written_with_its_sizes(tmp_path):
    run, _ = elastic.fit(run_files.load([str(write(tmp_path, run=DATA) / "run.toml")]), 8)
    again = run_files.load([str(write(tmp_path, again=config.dump(run)) / "again.toml")])
    assert again == run and "\nfsdp = 8\n" in config.dump(run) and "zero3.toml" in config.dump(run)
    assert layout(again, 8) == ({"fsdp": 8}, "zero3", 0)       # given now


def test_an_axis_that_is_given_leaves_the_others_at_one(tmp_path):
    run = run_files.load([str(write(tmp_path, run=DATA) / "run.toml"), "--mesh.tensor", "2"])
    with pytest.raises(config.ConfigError, match="mesh.tensor=2 takes 2 devices, and there are 8"):
        elastic.check(run, 8)


# ---- extends ---------------------------------------------------------------------------------------------------------


BASE = f'[run]\nname = "base"\n[model]\nnum_layers = 3\nembed_dim = 128\n{DATA}[training]\nsteps = 9\n'


def test_a_run_file_takes_from_the_one_that_it_extends_the_keys_that_it_leaves_out(tmp_path, monkeypatch):
    write(tmp_path, base=BASE, mid='[run]\nextends = "base.toml"\n[training]\nsteps = 7\n',
          sub_leaf='[run]\nextends = "../mid.toml"\nname = "leaf"\n[model]\nnum_layers = 5\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")       # a name is relative to its file
    run = run_files.load(["../sub/leaf.toml"])
    assert (run.run.name, run.model.num_layers, run.model.embed_dim, run.training.steps, run.data.source) == (
        "leaf", 5, 128, 7, "stdlib")
    assert run.run.extends == "" and run_files.load([str(write(tmp_path, again=config.dump(run)) / "again.toml")]) == run
    assert run_files.load(["../sub/leaf.toml", "--run.extends", "../base.toml"]).training.steps == 9


@pytest.mark.parametrize("name", ["quickstart", "configs/quickstart.toml"])
def test_a_run_file_may_extend_a_shipped_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(write(tmp_path, run=f'[run]\nextends = "{name}"\nname = "mine"\n'))
    run, shipped = run_files.load(["run.toml"]), run_files.load([])
    assert run.model == shipped.model and run.run.name == "mine"


def test_a_preset_replaces_the_shape_of_the_extended_file(tmp_path):
    write(tmp_path, base=BASE, run='[run]\nextends = "base.toml"\n[model]\npreset = "llama3-8b"\n')
    assert run_files.load([str(tmp_path / "run.toml")]).model.embed_dim == 4096


def test_a_mistake_names_the_file_that_gives_the_key(tmp_path):
    write(tmp_path, base=BASE.replace("9", '"x"'), mid='[run]\nextends = "base.toml"\n[model]\nnum_heads = 3\n',
          run='[run]\nextends = "mid.toml"\n[training]\nmicrobatches = 5\n')
    told = {message.partition("=")[0]: message for message in refused(tmp_path / "run.toml").splitlines()}
    assert told["training.steps"].endswith(f" ({tmp_path / 'base.toml'} gives training.steps)")
    assert "base.toml gives model.embed_dim" in told["model.embed_dim"]
    assert "mid.toml gives model.num_heads" in told["model.embed_dim"]
    assert "gives" not in told["data.global_batch"]     # keys of the run file itself
    assert "base.toml" not in refused(tmp_path / "run.toml", "--training.steps", "0").splitlines()[0]


@pytest.mark.parametrize("files, message", [
    (dict(run='[run]\nextends = "run.toml"\n'), r'run.extends="run.toml" leads back to .*run.toml; a run file cannot'),
    (dict(run='[run]\nextends = "b.toml"\n', b='[run]\nextends = "run.toml"\n'), "leads back to .*run.toml"),
    (dict(run='[run]\nextends = "nowhere.toml"\n'), 'run.toml: run.extends="nowhere.toml": .*there is no such run file'),
    (dict(run='[run]\nextends = "b.toml"\n', b="[run\n"), 'run.toml: run.extends="b.toml": .*b.toml:1:5: '),
    (dict(run='[run]\nextends = "."\n'), r'run.extends=".": .* is a directory'),
    (dict(run='[run]\nextends = ["a.toml"]\n'), "is not the name of one run file")])
def test_a_file_that_cannot_be_extended_is_one_message(tmp_path, files, message):
    told = refused(write(tmp_path, **files) / "run.toml")
    assert re.search(message, told) and len(told.splitlines()) == 1


def test_a_prompt_that_no_sample_continues_may_be_as_long_as_a_sequence():
    run = config.Run(data={"seq_len": 1}, run={"sample_prompt": "def"})
    reader = tokenizer.Bytes(257)
    assert training_data.sample_prompt(run, reader)
    with pytest.raises(ValueError, match="run.sample_prompt has 1 tokens, but data.seq_len=1"):
        training_data.sample_prompt(run.replace(run={"sample_tokens": 1, "sample_prompt": ""}), reader)
