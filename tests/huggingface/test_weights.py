"""A run begins from a model folder: its logits are those that transformers computed, on any layout, and every byte is
read once."""
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling
from checkpoints import assert_same_bits
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401
from folders import EIGHT, GOLDENS, NAMES, ONE, Loaded

from meshtrain import config, run_files
from meshtrain.commands import train
from meshtrain.huggingface import families, folder, safetensors, settings
from meshtrain.huggingface.weights import pretrained
from meshtrain.model import transformer
from meshtrain.storage import model_folder

FAST = ("phi3", "llama3.1", "llama_yarn", "gemma", "olmo2", "olmo3_yarn", "deepseek_v3_fp8", "gemma4_text", "glm4",
        "gpt_oss_mxfp4", "nemotron_h", "olmo_hybrid", "qwen3_5_wrapped", "qwen3_next")
NORMALIZED = ("kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_5_wrapped", "qwen3_next")
CELLS = [pytest.param(name, *EIGHT, marks=sampling.GRID, id=f"{name}, eight devices") for name in NAMES] + [
    pytest.param(name, *ONE, marks=() if name in FAST else sampling.GRID, id=f"{name}, one device") for name in NAMES]


@pytest.mark.parametrize(("name", "rule", "mesh"), CELLS)
def test_logits_of_a_folder_equal_those_of_transformers(name, rule, mesh):
    golden = np.load(GOLDENS / name / "golden.npz")
    # Logits up to 8 or so, float32; either implementation is some 2e-5 from float64. Where a recurrence's output is
    # normalized, transformers is up to 2e-3 from its own float64 at single tokens, and ours 4e-4.
    got = Loaded(GOLDENS / name, rule, mesh).logits(golden["tokens"])
    np.testing.assert_allclose(got, golden["logits"], atol=2e-3 if name in NORMALIZED else 1e-4)
    assert np.median(np.abs(got - golden["logits"])) < 1e-5


WINDOWED = [(name, method) for name in ("mistral_window", "gemma2", "gemma3", "olmo3")
            for method in ("ring", "ulysses", "gather")]


@pytest.mark.parametrize(("name", "method"),
                         [cell if cell == ("gemma2", "ring") else pytest.param(*cell, marks=sampling.GRID)
                                              for cell in WINDOWED])
def test_logits_beyond_a_window_of_packed_documents_over_two_devices_equal_those_of_transformers(name, method):
    """Two documents of 40 tokens in a row, each beyond its window of 12 and across two chunks of 20."""
    golden = np.load(GOLDENS / name / "golden.npz")
    loaded = Loaded(GOLDENS / name, "zero3", dict(context=2, fsdp=2), f"--context.method={method}", "--data.seq_len=80")
    got = loaded.logits(golden["tokens"], documents=2)
    for document in np.split(got, 2, axis=1):
        np.testing.assert_allclose(document, golden["logits"], atol=1e-4)       # as above


@functools.cache
def plain(name: str, dtype: str = "float32") -> dict:
    """Parameters of a golden on one device, as numpy arrays."""
    return jax.device_get(Loaded(GOLDENS / name, *ONE, f"--model.param_dtype={dtype}").params)


@pytest.mark.parametrize(("name", "rule", "mesh"), [
    ("gpt2", *EIGHT), ("qwen2", "zero3", dict(fsdp=8)), ("llama2", "tensor", dict(data=2, fsdp=2, tensor=2)),
    ("phi3", "zero1", dict(fsdp=2, tensor=2, stage=2))])
def test_every_layout_reads_the_same_bits_and_each_byte_once(name, rule, mesh, monkeypatch):
    expected, spans, original = plain(name), [], safetensors.read
    monkeypatch.setattr(safetensors, "read", lambda entry, start, stop: spans.append((entry, start, stop))
                        or original(entry, start, stop))
    words = ("--training.microbatches=2", "--pipeline.schedule=1f1b") if "stage" in mesh else ()
    loaded = Loaded(GOLDENS / name, rule, mesh, *words)
    assert_same_bits(jax.device_get(loaded.params), expected)
    for wanted, leaf in zip(jax.tree.leaves(loaded.made.program.step.state.sharding.params),
                            jax.tree.leaves(loaded.params), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    read = {}
    for entry, start, stop in spans:
        read.setdefault(entry, []).append((start, stop))
    used = {loaded.found.entries[row.of_layer(layer)] for row in loaded.rows for layer in row.layers or (None,)}
    assert set(read) == used
    devices = math.prod(mesh.values())
    for entry, parts in read.items():
        count, end = math.prod(entry.shape), 0
        for start, stop in sorted(parts):
            assert start == end and stop - start <= -(-count // devices)        # an equal share of every tensor
            end = stop
        assert end == count


def test_rows_beyond_the_vocabulary_are_zeros_and_weights_may_be_stored_in_another_dtype():
    exact, rounded = plain("qwen2"), plain("qwen2", "bfloat16")
    table = exact["embedding"]["table"]
    assert table.shape[0] == 256 and not table[200:].any() and table[:200].any(1).all()
    assert not exact["head"]["kernel"][:, 200:].any()
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert np.array_equal(a.astype(b.dtype), b)
    assert rounded["head"]["kernel"].dtype == rounded["layers"]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16
    assert rounded["final_norm"]["scale"].dtype == np.float32 == rounded["layers"]["attention"]["query"]["bias"].dtype


@pytest.mark.parametrize("kind", ["F64", "F16", "BF16"])
def test_a_folder_in_another_dtype_and_several_files_is_the_same_model(kind, tmp_path):
    """All of a golden's numbers, rounded to 8 bits so that every dtype holds them, in two files with an index."""
    source = GOLDENS / "gpt2"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    entries = safetensors.read_header(source / "model.safetensors")
    names, weight_map = sorted(entries), {}
    for number, part in enumerate((names[:9], names[9:])):
        text, _ = safetensors.header({
            name.removeprefix("transformer."): (kind, entries[name].shape) for name in part})
        numbers = [safetensors.read(entries[name], 0, math.prod(entries[name].shape)) for name in part]
        rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(safetensors.DTYPES[kind]) for x in numbers]
        (tmp_path / f"{number}.safetensors").write_bytes(text + b"".join(x.tobytes() for x in rounded))
        weight_map |= {name.removeprefix("transformer."): f"{number}.safetensors" for name in part}
    (tmp_path / folder.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    got = jax.device_get(Loaded(tmp_path, *ONE).params)
    # float16 has no more than 2^-24 for the smallest of them.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(jnp.asarray(b, jnp.bfloat16), np.float32),
                                                         atol=2**-24),
                 got, plain("gpt2"))


@pytest.mark.parametrize("preset", sorted(run_files.presets()))
def test_names_and_parameters_of_every_preset_cover_each_other(preset):
    run = run_files.load([f"--model.preset={preset}"])
    infos = transformer.build(run.model).parameters()
    try:
        family = settings.family_for(run.model)
    except ValueError as error:
        assert preset == "gpt-180b", error
        return
    rows = folder.rows(family, run.model, pretrained.parameter_paths(transformer.build(run.model)))
    theirs = sum(math.prod(row.shape) * max(1, len(row.layers)) for row in rows)
    padding = (transformer.pad_vocab(run.model) - run.model.vocab_size) * run.model.embed_dim * (
        2 - run.model.tie_embeddings)
    assert theirs == sum(info.size for info in infos) - padding


# The config.json of a published model, and its number of parameters as the hub counts them.
PUBLISHED = json.loads((GOLDENS / "published_models.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_and_have_as_many_parameters_as_published(name):
    theirs, count = PUBLISHED[name]["config"], PUBLISHED[name]["parameters"]
    family = settings.family_of(theirs)
    model = config.Model(**settings.model_keys(theirs, family))
    rows = folder.rows(family, model, pretrained.parameter_paths(transformer.build(model)))
    found = sum(math.prod(row.shape) * max(1, len(row.layers)) for row in rows)
    assert found == count or isinstance(count, float) and abs(found / 1e9 - count) < 0.005 * count  # in billions, rounded


def test_every_family_has_a_published_model():
    configs = [one["config"] for one in PUBLISHED.values()]
    read = {config["model_type"] for config in (*configs, *map(settings.text_of, configs))}
    assert read == {*families.FAMILIES, *families.MULTIMODAL}


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(home) -> tuple[str, ...]:
    """Overrides that train on ids of the goldens' vocabulary."""
    ids = np.random.default_rng(0).integers(3, 200, 6000).astype(np.uint32)
    np.save(home / "ids.tokens.npy", ids)
    np.save(home / "ids.ends.npy", np.arange(100, 6001, 100))
    return ("--data.source=tokens", f"--data.paths={json.dumps([str(home / 'ids.tokens.npy')])}", "--data.bos_token=1")


def without_model(tiny) -> list[str]:
    return [word for k, word in enumerate(tiny) if not any(w.startswith("--model.") for w in (word, tiny[k - 1]))]


def test_a_run_starts_from_a_folder_and_takes_its_config_along(tiny, tokens, tmp_path):
    words = [*without_model(tiny), *tokens, "--model.compute_dtype=float32",
             f"--checkpoint.init_from={GOLDENS / 'qwen3'}",
             "--run.dir", tmp_path / "run", "--run.sample_tokens=0", "--data.validation_fraction=0"]
    ran = call(train.main, *words, "--training.steps=2")
    assert (ran.code, ran.err) == (0, ""), ran
    assert "weights from" in ran.out and "qwen3, 25 tensors" in ran.out
    kept = tmp_path / "run" / "hf"
    assert [path.name for path in kept.iterdir()] == ["config.json"]
    assert (kept / "config.json").read_bytes() == (GOLDENS / "qwen3" / "config.json").read_bytes()
    # It goes on from its own checkpoint: its config.toml names the folder and all that this decides.
    ran = call(train.main, tmp_path / "run" / "config.toml", "--training.steps=3")
    assert (ran.code, ran.err) == (0, "") and "resuming after step 2" in ran.out and "weights from" not in ran.out
    # A run that starts from this one takes them on.
    third = config.Run(checkpoint=dict(init_from=str(tmp_path / "run")))
    (tmp_path / "third").mkdir()
    pretrained.keep_companions(third, tmp_path / "third")
    assert (tmp_path / "third" / "hf" / "config.json").read_bytes() == (kept / "config.json").read_bytes()


def test_what_contradicts_a_folder_is_refused_before_anything_starts(tiny, tokens, tmp_path):
    source = GOLDENS / "mistral_window"
    words = [*without_model(tiny), *tokens, f"--checkpoint.init_from={source}", "--run.dir", tmp_path / "run"]
    ran = call(train.main, *words, "--model.embed_dim=64", "--model.rope_theta=1e6",
               "--model.num_kv_heads=2", "--model.window=13",
               "--checkpoint.init_optimizer=true")
    refused(ran, "model.embed_dim=64 contradicts", "sets it to 32", "model.rope_theta=1000000.0 contradicts",
            "model.window=13 contradicts",
            "sets it to 12", "init_optimizer")
    assert "num_kv_heads" not in ran.err and not (tmp_path / "run").exists()
    refused(call(train.main, *words, "--checkpoint.step=3"), "checkpoint.step=3", "no steps")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_bytes((source / "config.json").read_bytes())
    refused(call(train.main, *words, f"--checkpoint.init_from={tmp_path / 'empty'}"),
            "checkpoint.init_from: ", "there is no model.safetensors")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "bert"}')
    refused(call(train.main, *words, f"--checkpoint.init_from={tmp_path / 'empty'}"), 'model_type="bert"')


def test_a_folder_of_experts_is_contradicted_only_by_keys_that_it_knows():
    """Of a model whose layers all have experts config.json need not name mlp_dim, and presets do; weights that are read
    have no initial deviation."""
    words = ["configs/quickstart-experts.toml", "--model.mlp_dim=14336", "--data.source=tokens",
             '--data.paths=["x"]', f"--checkpoint.init_from={GOLDENS / 'mixtral'}"]
    shape = [f"--model.{key}={value}" for key, value in folder.settings_of(GOLDENS / "mixtral").items()
             if isinstance(value, int)
             and not isinstance(value, bool)]
    run = run_files.load([*words, *shape, "--experts.bias_rate=0", "--experts.bias_rule=sign", "--experts.bias_warmup=0"])
    assert run.model.num_experts == folder.settings_of(GOLDENS
                                                       / "mixtral")["num_experts"] and run.model.embedding_std == 1
    with pytest.raises(config.ConfigError) as told:
        run_files.load([*words, *shape, "--model.num_experts=3"])
    for part in ("model.num_experts=3 contradicts", "experts.bias_rate=0.02 moves biases of the routers"):
        assert part in str(told.value)
    assert "mlp_dim" not in str(told.value)


def test_a_run_is_the_same_in_a_directory_that_has_a_config_json(tmp_path):
    run = run_files.load([])
    # the current directory
    (tmp_path / "config.json").write_bytes((GOLDENS / "mixtral" / "config.json").read_bytes())
    assert model_folder.is_at(".") and run_files.load([]) == run == run_files.load(["--checkpoint.init_from="])


def test_lacking_families_are_not_known_ones():
    assert not set(families.LACKING) & set(families.FAMILIES)
