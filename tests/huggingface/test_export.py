"""What a run gives back is what it has: bit for bit, from any layout, whole or not there."""
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import sampling
from checkpoints import assert_same_bits, run_processes
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401
from corpora import write_tokenizer
from folders import EIGHT, GOLDENS, NAMES, ONE, ROOT, Loaded, contents

from meshtrain import config, files
from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.commands import convert, train
from meshtrain.huggingface import folder, safetensors, settings
from meshtrain.huggingface.weights import export, pretrained
from meshtrain.huggingface.weights.ends import Ends
from meshtrain.run import trees
from meshtrain.storage import model_folder

# Quantized, or stored as transformers 5.23 alone does.
WRITTEN_OTHERWISE = ("deepseek_v3_fp8", "gpt_oss_mxfp4", "kimi_linear", "olmo_hybrid")
LAYOUTS = [("zero3", dict(fsdp=8)), ("ddp", dict(data=2, tensor=4)), ("zero1", dict(fsdp=2, tensor=2, stage=2))]


def write(loaded: Loaded, out, dtype="float32", shard_bytes=30_000, source=None, **data) -> int:
    leaves = trees.leaves_of(loaded.params)
    with jax.set_mesh(loaded.made.mesh):
        return export.write(out, loaded.made.model, leaves.__getitem__, dtype=dtype, shard_bytes=shard_bytes,
                            data={"seq_len": 40, "tokenizer": "bytes"} | data, ends=Ends((1,), bos=1), source=source)


@pytest.fixture(scope="module")
def one():
    return Loaded(GOLDENS / "phi3", *ONE)


@pytest.mark.parametrize(("name", "rule", "mesh"), [
    *(pytest.param(name, *ONE, marks=sampling.GRID) for name in NAMES),
    pytest.param("gpt2", *EIGHT, id="gpt2, eight devices"),
    ("qwen3_moe", "zero3_experts_fsdp", dict(data=2, fsdp=4)), ("gpt_oss", "zero3_experts_fsdp", dict(data=2, fsdp=4)),
    ("nemotron_h", *ONE), ("olmo_hybrid", *ONE), *(("phi3", *layout) for layout in LAYOUTS)])
def test_a_folder_that_was_read_is_written_as_it_was(name, rule, mesh, tmp_path):
    words = ("--training.microbatches=2", "--pipeline.schedule=1f1b") if "stage" in mesh else ()
    write(Loaded(GOLDENS / name, rule, mesh, *words), tmp_path / "out", source=GOLDENS / name)
    if name in WRITTEN_OTHERWISE:
        assert_same_bits(*(jax.device_get(Loaded(place, *ONE).params) for place in (tmp_path / "out", GOLDENS / name)))
        return
    assert contents(tmp_path / "out") == contents(GOLDENS / name)
    written, read = (folder.settings_of(place) for place in (tmp_path / "out", GOLDENS / name))
    assert config.Model(**written) == config.Model(**read)
    index = json.loads((tmp_path / "out" / folder.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    # and its header; no tensor is split
    largest = max(len(content) for *_, content in contents(GOLDENS / name).values())
    assert max(path.stat().st_size for path in (tmp_path / "out").glob("model*.safetensors")) < max(
        30_000, largest) + 5_000


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_tensors_beside_a_multimodal_folders_text_are_carried_to_the_run_and_its_export(prefix, tmp_path):
    """Under the names of both generations of folders; the model folder may be gone by the time of the export."""
    source, run_dir, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    shutil.copytree(GOLDENS / "mistral3_wrapped", source)
    entries = safetensors.read_header(source / folder.SINGLE)
    if prefix.startswith("model."):
        entries = {(prefix + name.removeprefix("language_model.model.") if name.startswith("language_model.") else
                    f"model.{name}"): entry for name, entry in entries.items()}
        safetensors.copy(entries, tmp_path / "renamed")
        (tmp_path / "renamed").replace(source / folder.SINGLE)
    run_dir.mkdir()
    loaded, expected = Loaded(source, *ONE), contents(source)
    pretrained.keep_companions(loaded.run, run_dir)
    shutil.rmtree(source)
    write(loaded, out, source=run_dir / model_folder.KEPT)
    assert contents(out) == expected and any("vision" in name for name in expected)
    weight_map = json.loads((out / folder.INDEX).read_text())["weight_map"]
    assert weight_map.keys() == expected.keys()
    assert {name for name, file in weight_map.items() if file == model_folder.CARRIED} == {
        name for name in expected if not name.startswith(prefix)}
    # and from there to the next run
    write(Loaded(out, *ONE), tmp_path / "again", source=out)
    assert contents(tmp_path / "again") == expected


def test_layers_that_predict_further_tokens_are_carried_to_an_export(tmp_path, capsys):
    """As DeepSeek-V3 has them: a layer behind the last one, with names of its own; and as Qwen does."""
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "deepseek_v3", source)
    config_of = source / settings.CONFIG
    config_of.write_text(json.dumps(json.loads(config_of.read_text()) | {"num_nextn_predict_layers": 1}))
    entries = safetensors.read_header(source / folder.SINGLE)
    more = {name.replace("layers.3.", "layers.4."): entry for name, entry in entries.items() if ".layers.3." in name}
    more |= {"model.layers.4.eh_proj.weight": entries["lm_head.weight"], "mtp.fc.weight": entries["lm_head.weight"]}
    safetensors.copy(entries | more, tmp_path / "whole")
    (tmp_path / "whole").replace(source / folder.SINGLE)
    loaded = Loaded(source, *ONE)
    assert loaded.found.carried.keys() == more.keys()
    pretrained.tell(loaded.found)
    assert "predict further tokens are not trained" in capsys.readouterr().out
    write(loaded, tmp_path / "out", source=source)
    assert contents(tmp_path / "out") == contents(source)
    config_of.write_text(json.dumps(json.loads(config_of.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="model.layers.4.eh_proj.weight is not a tensor of this model"):
        folder.match(found := folder.open_folder(source), config.Model(**found.model), pretrained.parameter_paths(
            loaded.made.model))


@pytest.mark.parametrize(("rule", "mesh"), [ONE, *LAYOUTS])
def test_bfloat16_goes_round_without_a_change(rule, mesh, tmp_path, one):
    """float32 to bfloat16 is rounded once; from there on, through any layout, nothing is."""
    words = ("--training.microbatches=2", "--pipeline.schedule=1f1b") if "stage" in mesh else ()
    write(one, tmp_path / "first", "bfloat16")
    again = Loaded(tmp_path / "first", rule, mesh, *words)
    write(again, tmp_path / "second", "bfloat16", shard_bytes=10**9)
    assert contents(tmp_path / "first") == contents(tmp_path
                                                    / "second") and (tmp_path / "second" / folder.SINGLE).is_file()
    expected = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x).astype("bfloat16").astype("float32")),
                            jax.device_get(one.params))
    assert_same_bits(jax.device_get(again.params), expected)


def test_a_stack_over_stages_gives_its_layers_without_being_gathered():
    """Every bit, that of minus zero and of what is no number, too."""
    loaded = Loaded(GOLDENS / "phi3", *LAYOUTS[2], "--training.microbatches=2", "--pipeline.schedule=1f1b")
    leaf = loaded.params["layers"]["mlp"]["down"]["kernel"]
    numbers = np.random.default_rng(0).integers(0, 2**32, leaf.shape, np.uint32).view(np.float32)
    numbers[:, 0, 0] = -0.0
    leaf = jax.device_put(numbers, leaf.sharding)
    assert export.layer_shards(leaf) == 2
    one = jax.jit(lambda leaf, layer: export.layer_of(leaf, layer, 2, np.dtype("float32")))
    for layer in range(2):
        assert np.asarray(one(leaf, layer)).tobytes() == numbers[layer].tobytes()
    text = one.lower(leaf, 0).compile().as_text()
    stack = "x".join(map(str, leaf.sharding.shard_shape(leaf.shape)[1:]))
    assert stack and "all-gather" not in text, text


def test_the_settings_of_a_source_stay_and_ours_are_written_in_the_older_form(one, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "phi3", source)
    theirs = json.loads((source / "config.json").read_text())
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.py").write_text("raise SystemExit")
    write(one, tmp_path / "out", "bfloat16", source=source)
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ours["torch_dtype"] == "bfloat16" and ours["rope_theta"] == 10000.0 and ours["rope_scaling"] is None
    assert "rope_parameters" not in ours and "dtype" not in ours
    assert {key: ours[key] for key in theirs.keys() & ours.keys()} == {
        key: theirs[key] for key in theirs.keys() & ours.keys()}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}" and (tmp_path / "out"
                                                                          / "chat_template.jinja").is_file()
    assert not (tmp_path / "out" / "model.py").exists()


@pytest.mark.parametrize(("given", "source", "written"), [
    ("", None, "beside"), ("mine.jinja", None, "mine"), ("", "source", "theirs"), ("mine.jinja", "source", "mine"),
    ("gone.jinja", None, None), ("gone.jinja", "source", "theirs")])
def test_the_chat_template_of_an_export_is_that_of_the_training(given, source, written, one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDENS / "phi3", "source")
    Path("source/chat_template.jinja").write_text("theirs")
    Path("data").mkdir()
    Path("data/chat_template.jinja").write_text("beside")
    Path("mine.jinja").write_text("mine")
    words = write_tokenizer(Path("data/tokenizer.json"))
    write(one, tmp_path / "out", source=source and Path(source), tokenizer=words, chat_template=given)
    found = tmp_path / "out" / "chat_template.jinja"
    assert (found.read_text() if found.is_file() else None) == written


def test_a_kill_at_any_moment_leaves_nothing_under_the_name(one, tmp_path, monkeypatch):
    """Every third operation on files in turn is the last that happens; then the same export comes through."""
    class Killed(BaseException):
        pass

    left = 0

    def guard(function):
        def guarded(*args, **more):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args, **more)
        return guarded

    with monkeypatch.context() as patched:
        for place, name in ((os, "pwrite"), (os, "fsync"), (os, "replace"), (os, "mkdir"),
                            (files, "write"), (files, "sync")):
            patched.setattr(place, name, guard(getattr(place, name)))
        moments = sampling.generator("kill").randrange(3)
        while True:
            left = moments
            try:
                write(one, tmp_path / "out", source=GOLDENS / "phi3")
                break
            except Killed:
                # its name is there before the directory above is synced
                last = left == -1 and (tmp_path / "out").exists()
                assert last or not (tmp_path / "out").exists()
                if last:
                    break
            moments += 3
    assert moments > 30 and contents(tmp_path / "out") == contents(GOLDENS / "phi3")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_full_disk_is_told_and_leaves_nothing_under_the_name(one, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        write(one, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_of_no_family_is_refused():
    with pytest.raises(ValueError, match='no Hugging Face family computes this model .*model.activation="gelu"'):
        settings.family_for(config.Model(activation="gelu"))
    with pytest.raises(ValueError, match='model.router_score="softmax".*model.router_bias="choice"'):
        settings.family_for(config.Model(num_experts=8, router_bias="choice"))


# ---- the command -----------------------------------------------------------------------------------------------------


PIPELINE = ("--mesh.data=1", "--mesh.fsdp=2", "--mesh.tensor=2", "--mesh.stage=2", "--model.num_layers=3",
            "--training.microbatches=2",
            f"--sharding.rules={ROOT.parent / 'sharding_rules/zero1.toml'}", "--pipeline.schedule=1f1b")


@pytest.mark.parametrize("layout", [(), pytest.param(PIPELINE, marks=sampling.GRID, id="two stages of three layers")])
def test_what_was_trained_is_exported_by_run_and_command_and_read_back(tiny, tmp_path, layout):
    words = [*tiny, *layout, "--training.steps=2", "--model.compute_dtype=float32", "--run.sample_tokens=0",
             "--data.validation_fraction=0", "--checkpoint.export=last", "--run.dir", tmp_path / "run"]
    ran = call(train.main, *words)
    assert (ran.code, ran.err) == (0, ""), ran
    ran = call(convert.main, tmp_path / "run", tmp_path / "out", "--dtype", "float32", "--shard-gb=0.00002", "--step=2")
    assert (ran.code, ran.err) == (0, ""), ran
    assert "the weights of step 2" in ran.out
    assert contents(tmp_path / "out") == contents(tmp_path / "run" / "export" / "2")
    theirs = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (theirs["model_type"], theirs["bos_token_id"], theirs["eos_token_id"]) == ("llama", 256, 256)    # of bytes
    back = Loaded(tmp_path / "out", *EIGHT)
    checkpoints = checkpoint.Checkpoints(DirectoryStore(tmp_path / "run" / "checkpoints"), read_only=True)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
                          back.params)
    saved = checkpoints.restore(2, {"params": wanted}, part=True)
    trained = jax.tree.map(np.array, jax.device_get(saved["params"]))
    for leaf in (trained["embedding"]["table"][257:], trained["head"]["kernel"][:, 257:]):
        leaf[...] = 0       # rows beyond the vocabulary are not given away
    assert_same_bits(jax.device_get(back.params), trained)
    # What is there stays, and what cannot be meant is told.
    refused(call(convert.main, tmp_path / "run", tmp_path / "out"), "exists already")
    refused(call(convert.main, tmp_path / "run", tmp_path / "new", "--step=7"), "--step 7 is not saved",
            "has steps 2")
    refused(call(convert.main, tmp_path, tmp_path / "new"), "has no complete checkpoint")
    refused(call(convert.main, tmp_path / "run", tmp_path / "new", "--step=x", "--dtype=int8",
                 "--shard-gb=-1", "--fast"),
            "--step x", "--dtype int8", "--shard-gb -1", "--fast is not an option")
    assert not (tmp_path / "new").exists()
    # The same command does nothing more.
    assert call(train.main, *words).code == 0


TWO = r"""
sys.path[:0] = TESTS
from pathlib import Path
import folders, test_export
from meshtrain.huggingface import safetensors
count, read = 0, safetensors.read
def counted(entry, start, stop):
    global count
    count += (stop - start) * safetensors.DTYPES[entry.dtype].itemsize
    return read(entry, start, stop)
safetensors.read = counted
loaded = folders.Loaded(folders.GOLDENS / "qwen3", "zero3", dict(fsdp=2, tensor=2))
say(count)
test_export.write(loaded, Path(directory) / "out")
say("written")
"""


@pytest.mark.full
def test_two_processes_read_half_of_every_file_each_and_write_what_one_would(tmp_path):
    told = run_processes(2, tmp_path, TWO.replace("TESTS", repr([str(ROOT), str(Path(__file__).parent)])))
    size = sum(len(content) for *_, content in contents(GOLDENS / "qwen3").values())
    assert [int(said[0]) for said in told] == [size // 2, size // 2]
    assert contents(tmp_path / "out") == contents(GOLDENS / "qwen3")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["config.json", *(f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)),
                     "model.safetensors.index.json"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama3.1", "qwen3", "gemma2", "olmo2", "phi3", "mixtral"])
def test_transformers_reads_an_export_and_computes_the_same_logits(name, tmp_path):
    """From our own settings, without the folder that the weights came from."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    loaded, golden = Loaded(GOLDENS / name, *ONE), np.load(GOLDENS / name / "golden.npz")
    write(loaded, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(golden["tokens"].astype(np.int64))).logits.numpy()
    # float32, either implementation is some 2e-5 from float64.
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
