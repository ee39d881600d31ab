"""The run file: what is written is what runs, and every mistake is told at once with its value and its remedy."""

import math
import os
import re
import string
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain import config, run_files
from meshtrain.config import elsewhere, from_python, sections

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_FILES = sorted((ROOT / "configs").glob("*.toml"))
ANY_CHARACTER = st.characters(exclude_categories=["Cs"])  # a lone surrogate is no text


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def faults(*argv: str) -> list[str]:
    with pytest.raises(config.ConfigError) as caught:
        run_files.load(list(argv))
    return caught.value.messages


STDLIB = '\n[data]\nsource = "stdlib"\n'


def write(tmp_path, text: str, encoding: str = "utf-8", name: str = "run.toml") -> str:
    """A run file, with Python's library for its data where it names none."""
    path = tmp_path / name
    path.write_text(text if "[data]" in text else text + STDLIB, encoding=encoding)
    return str(path)


# ---- what is written is what runs ------------------------------------------------------------------------------------


def test_without_a_file_the_quickstart_runs_with_overrides():
    run = run_files.load(["--training.steps", "6"])
    assert (run.run.name, run.run.dir, run.training.steps) == ("quickstart", "runs/quickstart", 6)
    assert run.optimizer.name == "muon"


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_shipped_run_file_loads_with_steps_alone(path):
    run = run_files.load([str(path), "--training.steps", "6"])
    assert run.training.steps == 6
    assert path.read_text().splitlines()[0] == f"# python -m meshtrain.train configs/{path.name}"


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_dump_stands_alone_and_loads_to_the_same_run(path, tmp_path):
    run = run_files.load([str(path)])
    text = config.dump(run)
    assert run_files.load([write(tmp_path, text)]) == run
    assert set(tomllib.loads(text)) == set(config.Run.model_fields)
    assert tomllib.loads(text)["model"]["preset"] == ""


@given(dir=st.text(ANY_CHARACTER, min_size=1), paths=st.lists(st.text(ANY_CHARACTER)))
def test_dump_keeps_any_text(dir, paths):
    text = config.dump(config.Run(run={"dir": dir}, data={"paths": paths}))
    tables = tomllib.loads(text)

    def expanded(path: str) -> str:      # no user's name has a null character, and Python refuses to look
        return path if "\0" in path.partition("/")[0] else os.path.expanduser(path)
    assert tables["run"]["dir"] == expanded(dir)
    assert tables["data"]["paths"] == [expanded(path) for path in paths]


@given(learning_rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False), steps=st.integers(1, 2**31 - 1))
def test_dump_keeps_every_bit_of_a_number(learning_rate, steps):
    text = config.dump(config.Run(optimizer={"learning_rate": learning_rate}, training={"steps": steps}))
    assert tomllib.loads(text)["optimizer"]["learning_rate"] == learning_rate
    assert tomllib.loads(text)["training"]["steps"] == steps


@pytest.mark.parametrize("words", [
    ["--data.paths", "data/*.txt"], ["--data.paths", '"data/*.txt"'], ["--data.paths", '["data/*.txt"]'], ["mine.toml"],
    from_python.words({"data.paths": "data/*.txt"}), from_python.words({"data": {"paths": ["data/*.txt"]}})])
def test_one_string_is_a_list_of_one(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[data]\npaths = "data/*.txt"\n')
    data = run_files.load(words).data
    assert (data.paths, data.source) == (("data/*.txt",), "text")


def test_default_rules_that_shard_nothing_over_fsdp_are_told(tmp_path):
    (tmp_path / "mine.toml").write_text(STDLIB)

    def told(*words):
        return [line for line in config.notes(run_files.load([str(tmp_path / "mine.toml"), *words])) if "rules" in line]
    lines = told("--mesh.fsdp", "4")
    assert len(lines) == 1 and "ddp splits only the batch over mesh.fsdp" in lines[0]
    assert 'sharding.rules="zero3" also shards' in lines[0] and told("--mesh.fsdp", "-1") == lines
    assert told("--mesh.fsdp", "4", "--sharding.rules", "ddp") == told("--mesh.data", "4") == told() == []


def test_overrides_take_every_type_in_both_spellings():
    run = run_files.load(
        "--run.name=8 --mesh.fsdp -1 --data.document_mask false --optimizer.learning_rate=1e-3 --training.grad_clip 1 "
        "--optimizer.schedule linear --training.steps=5".split() + ["--data.source", "text", "--data.paths", '["a b", "c=d.txt"]']
    )
    assert run.run.name == "8"  # bare text, not a number
    assert run.mesh.fsdp == -1
    assert run.data.document_mask is False
    assert run.optimizer.learning_rate == 1e-3
    assert run.training.grad_clip == 1.0
    assert run.optimizer.schedule == "linear"
    assert run.data.paths == ("a b", "c=d.txt")


@given(st.lists(st.builds(
    dict, source=st.sampled_from(["jsonl", "parquet", "arrow"]), paths=st.lists(st.text(ANY_CHARACTER), min_size=1),
    field=st.text(ANY_CHARACTER), weight=st.floats(min_value=0, exclude_min=True, allow_infinity=False)), min_size=1))
def test_a_mixture_is_the_same_from_a_file_the_command_line_and_a_dump(mixture):
    run = config.Run(data={"source": "mixture", "mixture": mixture})
    at_home = [one | {"paths": [sections.at_home(path) for path in one["paths"]]} for one in mixture]
    assert [one.model_dump(mode="json", exclude_unset=True) for one in run.data.mixture] == at_home
    dumped = tomllib.loads(config.dump(run))["data"]
    assert config.Data(**dumped) == run.data
    (line,) = [line for line in config.dump(run).split("\n") if line.startswith("mixture = ")]
    os.chdir(ROOT)
    loaded = run_files.load(["--data.source", "mixture", "--data.mixture", line.removeprefix("mixture = ")])
    assert loaded.data.mixture == run.data.mixture


def test_the_last_of_two_overrides_wins_and_the_file_may_stand_last():
    run = run_files.load(["--training.steps", "5", "--training.steps", "7", "configs/llama3-8b.toml"])
    assert (run.training.steps, run.run.name) == (7, "llama3-8b")


def test_derived_sizes_are_filled_in_and_frozen():
    run = config.Run(model={"embed_dim": 96, "num_heads": 3, "position": "learned"}, data={"seq_len": 33})
    assert (run.model.num_kv_heads, run.model.head_dim, run.model.max_seq_len) == (3, 32, 33)
    with pytest.raises(ValueError):
        run.model.head_dim = 16


def test_a_key_beside_a_preset_wins(tmp_path):
    path = write(tmp_path, '[model]\npreset = "llama3-8b"\nnum_layers = 2\ncompute_dtype = "float32"\n')
    model = run_files.load([path, "--model.num_heads", "16"]).model
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.embed_dim) == (2, 16, 8, 4096)


def test_a_preset_on_the_command_line_replaces_the_shape_of_the_file():
    model = run_files.load(["--model.preset", "llama3-8b", "--model.num_layers", "2"]).model
    assert (model.embed_dim, model.num_layers, model.vocab_size) == (4096, 2, 128256)
    assert model.compute_dtype == "float32"  # the quickstart's: no preset says anything about dtypes


def test_shipped_files_are_found_from_any_directory_and_paths_mean_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_files.load(["--model.preset", "qwen3-8b"])
    assert run.model.qk_norm == "head"
    assert Path(run.sharding.rules) == ROOT / "sharding_rules" / "zero3.toml"
    (tmp_path / "sharding_rules").mkdir()
    (tmp_path / "sharding_rules" / "ddp.toml").write_text("")
    assert run_files.load(["--sharding.rules", "sharding_rules/ddp.toml"]).sharding.rules == "sharding_rules/ddp.toml"
    assert run_files.load(["--sharding.rules", "ddp"]).sharding.rules == "sharding_rules/ddp.toml"
    assert Path(run_files.load(["--sharding.rules", "zero3"]).sharding.rules) == ROOT / "sharding_rules" / "zero3.toml"
    (tmp_path / "zero3").write_text("")
    assert run_files.load(["--sharding.rules", "zero3"]).sharding.rules == "zero3", "a file of one's own comes first"


def test_loading_a_run_file_imports_no_jax():
    code = "import sys; from meshtrain import run_files; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0


def test_the_axes_are_those_of_the_mesh():
    from meshtrain.sharding import mesh

    assert config.AXES == mesh.AXES
    assert config.Mesh().placement == mesh.PLACEMENT


def test_the_byte_vocabulary_is_that_of_the_data():
    from meshtrain.config import checks
    from meshtrain.data.documents import tokenizer

    assert checks.BYTE_VOCAB == tokenizer.Bytes().vocab_size


# ---- presets ---------------------------------------------------------------------------------------------------------


def letters(pattern: str, count: int) -> str:
    return (pattern[:-1] + pattern[-2] * count)[:count] if pattern.endswith("*") else (pattern * count)[:count]


def count_mixer(model: config.Model, mixer: str) -> int:
    D, N, K, H, linear, latent = (
        model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim, model.linear, model.latent)
    if mixer == "G":        # q, k; v, z and out; a and b; the convolution; A_log and dt_bias; the norm
        keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        channels = 2 * keys + values
        return (D * (2 * keys + 3 * values + 2 * linear.value_heads) + linear.conv_width * channels
                + 2 * linear.value_heads + linear.value_dim)
    if latent.kv_dim:       # the latents and their norms; what is made of them; out
        Q, C, R, V = latent.query_dim, latent.kv_dim, latent.rope_dim, latent.value_dim
        return D * (Q + C + R) + Q + C + Q * N * H + C * N * (H - R + V) + N * V * D
    biases = (model.attention_bias != "none") * H * (N + 2 * K) + (model.attention_bias == "all") * D
    return (D * H * (2 * N + 2 * K + N * model.attention_gate) + biases + (model.qk_norm != "off") * 2 * H
            + N * model.attention_sinks)


def count_mlp(model: config.Model, mlp: str) -> int:
    D, F, E, matrices = model.embed_dim, model.mlp_dim, model.num_experts, 2 if model.activation == "gelu" else 3
    if mlp == "d":
        return D * F * matrices + model.mlp_bias * (F + D)
    F = model.expert_mlp_dim
    return (E * (D + D * F * matrices + model.mlp_bias * (2 * F + D)) + E * (model.router_bias != "none")
            + 3 * D * model.shared_expert_dim)


def count_params(model: config.Model) -> int:
    """Written out from the papers, not from our model code: a second opinion on both."""
    D, L = model.embed_dim, model.num_layers
    layers = sum(map(count_mixer, [model] * L, letters(model.mixers, L)))
    layers += sum(map(count_mlp, [model] * L, letters(model.mlps, L)))
    norm = D * (2 if model.norm == "layernorm" else 1)
    tables = model.vocab_size * D * (1 if model.tie_embeddings else 2)
    positions = model.max_seq_len * D if model.position == "learned" else 0
    return layers + 2 * L * norm + norm + tables + positions


PUBLISHED = {
    "llama3.2-1b": 1.24e9, "llama3-8b": 8.03e9, "llama3-70b": 70.6e9, "llama3-405b": 405.9e9,
    "llama2-7b": 6.74e9, "qwen3-8b": 8.19e9, "gpt-180b": 180e9,
    "mixtral-8x7b": 46.7e9, "olmoe-1b-7b": 6.92e9, "qwen3-30b-a3b": 30.5e9, "qwen3-235b-a22b": 235.1e9,
    "gpt-oss-20b": 20.9e9, "qwen3.5-9b": 8.95e9, "deepseek-v3": 671.0e9, "glm-4.7-flash": 29.9e9,
}  # fmt: skip


def test_presets_are_the_published_ones():
    assert set(run_files.presets()) == set(PUBLISHED)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_parameter_count(preset):
    model = run_files.load(["--model.preset", preset]).model
    assert count_params(model) == pytest.approx(PUBLISHED[preset], rel=0.005)  # published to three digits
    assert model.num_heads % 4 == model.num_kv_heads % 4 == model.vocab_size % 8 == model.embed_dim % 64 == 0


# ---- mistakes --------------------------------------------------------------------------------------------------------

# (arguments, what the one message must contain: the value and the remedy)
MIXTURE = "--data.source mixture --data.mixture [{source"
MISTAKES = [
    ("--modle.num_layers 2", "[modle]", "did you mean [model]?"),
    ("--zzz.a 2", "[zzz]", "the sections are run, mesh"),
    ("--model.num_layer 2", "model.num_layer=", "did you mean model.num_layers?"),
    ("--dry-run", "--dry-run is not an option", "without training: python -m meshtrain.check"),
    ("--print-config", "to print every key", "python -m meshtrain.check RUN.toml --print-config"),
    ("--version", "to print the version", "python -m meshtrain --version"),
    ("--training.global_batch 2", "training.global_batch=", "did you mean data.global_batch?"),
    ("--distill.top_k 2", "distill.top_k=", "did you mean distill.top_tokens?"),
    ("--model.top_k 2", "model.top_k=", "did you mean model.experts_per_token?"),
    ("--training.qqq 2", "training.qqq=", "its keys are steps"),
    ("--data.seq-len 2", "data.seq-len=", "did you mean data.seq_len?"),
    ("--steps 2", "--steps", "did you mean --training.steps?"),
    ("-x", "-x", "--section.key value"),
    ("--run.seed", "--run.seed", "--run.seed=VALUE"),
    ("--run.seed --training.steps 6", "--run.seed", "--run.seed=VALUE"),
    ("a.toml b.toml --run.seed 1", "b.toml is a second run file in addition to a.toml", "--section.key"),
    ("--training.steps abc", 'training.steps="abc"', "e.g. 100"),
    ("--training.steps 1.5", "training.steps=1.5", "whole number"),
    ("--training.steps true", "training.steps=true", "whole number"),
    ('--training.steps "8"', 'training.steps="8"', "without quotes"),
    ("--training.steps 0", "training.steps=0", "use at least 1"),
    ("--training.steps " + "1" * 5000, "training.steps=", "whole number"),
    ("--run.seed -1", "run.seed=-1", "use at least 0"),
    ("--run.seed 4294967296", "run.seed=4294967296", "use less than 4294967296"),
    ("--optimizer.learning_rate nan", "optimizer.learning_rate=nan", "e.g. 0.0003"),
    ("--optimizer.learning_rate true", "optimizer.learning_rate=true", "e.g. 0.0003"),
    ("--optimizer.b1 1", "optimizer.b1=1", "use less than 1"),
    ("--data.document_mask True", 'data.document_mask="True"', "write true or false"),
    ("--data.document_mask 1", "data.document_mask=1", "write true or false"),
    ('--data.paths ["a.txt"', 'data.paths=', 'is not a list of strings; write it as TOML'),
    ("--data.paths 3", "data.paths=3", 'write it as TOML, e.g. ["first", "second"]'),
    ("--data.paths [1]", "data.paths[0]=1", "in quotes"),
    ("--optimizer.name adam", 'optimizer.name="adam"', 'did you mean "adamw"?'),
    ("--model.compute_dtype float16", 'model.compute_dtype="float16"', '"bfloat16"'),
    ("--model.preset llama3-8", 'model.preset="llama3-8"', 'did you mean "llama3-8b"?'),
    ("--model.preset ../quickstart", 'model.preset="../quickstart"', '"llama3-8b"'),
    ("--run.name a/b", 'run.name="a/b"', "run.dir"),
    ("--run.name ..", 'run.name=".."', "run.dir"),
    ("--mesh.data -1 --mesh.fsdp -1", "mesh.data=-1 and mesh.fsdp=-1", "give the others a size"),
    ("--mesh.data 0", "mesh.data=0", "use 1, or -1"),
    ("--mesh.data -2", "mesh.data=-2", "use at least -1"),
    ('--mesh.placement ["stage","data"]', 'mesh.placement=["stage", "data"]', '"context", "tensor"]'),
    ('--mesh.placement ["stage","data","fsdp","context","context"]', "mesh.placement=", "each axis once"),
    ("--sharding.rules sharding_rules/zero33.toml", "zero33.toml", 'did you mean "zero3"?'),
    ("--sharding.rules sharding_rules", 'sharding.rules="sharding_rules" is not a file', "zero3"),
    ("--model.num_heads 8 --model.num_kv_heads 3", "model.num_kv_heads=3", "model.num_heads=8; use 1, 2, 4 or 8"),
    ("--model.embed_dim 255", "model.embed_dim=255", "e.g. 256"),
    ("--model.head_dim 15", "model.head_dim=15", "use e.g. 16"),
    ("--model.position learned --model.max_seq_len 100", "data.seq_len=256", "model.max_seq_len=100"),
    ('--model.rope_scaling {rope_type="llama3",factor=8.0,high_freq_factor=1.0}', "high_freq_factor must be larger",
     "high_freq_factor = 4.0"),
    ('--model.rope_scaling {rope_type="yarn",factor=8.0,low_freq_factor=2.0}', "low_freq_factor, which",
     'use rope_type="llama3"'),
    ("--model.rope_scaling yarn", 'model.rope_scaling="yarn" is not a table', 'rope_type = "yarn"'),
    ("--model.rope_scaling {factor=2.0,kind=3}", "model.rope_scaling.kind=3 is not a key", "its keys are"),
    ("--metrics.wandb offline", 'metrics.wandb="offline" is the name of the project', "WANDB_MODE=offline"),
    ("--model.vocab_size 256", "model.vocab_size=256", "at least 257"),
    ("--data.source text", "data.paths", 'data.paths=["data/*.txt"]'),
    ("--data.source json", 'data.source="json"', 'did you mean "jsonl"?'),
    ("--data.source parquet", "data.paths", 'data.paths=["data/*.parquet"]'),
    ("--data.source mixture", 'data.source="mixture" has no data.mixture', 'data.mixture=[{source="jsonl"'),
    ('--data.source stdlib --data.mixture [{source="stdlib"}]', 'is not read by data.source="stdlib"', 'data.source="mixture"'),
    (f'{MIXTURE}="stdlib"}}] --data.paths ["a"]', 'data.paths=["a"] is not read', "sources of data.mixture"),
    (f'{MIXTURE}="stdlib"}}] --data.field body', 'data.field="body" is not read', "sources of data.mixture"),
    (f'{MIXTURE}="jsonl"}}]', "data.mixture[0].paths", 'data.mixture[0].paths=["data/*.jsonl"]'),
    (f'{MIXTURE}="stdlib"}},{{weight=2}}]', "data.mixture[1].paths names no files", 'data.mixture[1].source="stdlib"'),
    (f'{MIXTURE}="mixture"}}]', 'data.mixture[0].source="mixture"', '"arrow" or "tokens"'),
    (f'{MIXTURE}="stdlib",weight=0}}]', "data.mixture[0].weight=0", "more than 0"),
    (f'{MIXTURE}="stdlib",weight="1"}}]', 'data.mixture[0].weight="1"', "without quotes"),
    (f'{MIXTURE}="text",path=["a"]}}]', 'data.mixture[0].path=["a"]', "did you mean data.mixture[0].paths?"),
    (f'{MIXTURE}="text",paths=3}}]', 'data.mixture[0].paths=3', 'write it as TOML, e.g. ["first", "second"]'),
    (f'{MIXTURE}="text",paths=[1]}}]', "data.mixture[0].paths[0]=1", "in quotes"),
    ("--data.source mixture --data.mixture 5", "data.mixture=5 is not a list of tables", '[{source="jsonl"'),
    ("--data.source mixture --data.mixture [5]", "data.mixture[0]=5 is not a table", '{source="jsonl"'),
    ("--data.global_batch 16 --training.microbatches 3", "data.global_batch=16", "e.g. 18"),
    ("--data.validation_fraction 0 --validation.every 5", "validation.every=5", "validation.every=0"),
    ("--training.steps 200 --optimizer.schedule wsd", "optimizer.decay_steps=0", "use e.g. 20"),
    ("--checkpoint.init_from nowhere", 'checkpoint.init_from="nowhere"', "give the run.dir"),
    ("--checkpoint.init_from configs --run.dir configs/.", 'run.dir="configs/."', "another run.name"),
    ("--checkpoint.init_from hdfs://node/run", "checkpoint.init_from: hdfs://node/run is an address of hdfs://",
     "use s3://"),
    ("--data.tokenizer ftp://host/tokenizer.json", "data.tokenizer: ftp://host/tokenizer.json is an address of ftp://",
     "use s3://"),
    ("--data.source text --data.paths ['https://me:secret@host/a.txt']", "data.paths: https://…@host/a.txt has a name",
     "from the environment"),
    ("--data.source text --data.paths ['https://host/a.txt?signature=secret']", "data.paths: https://host/a.txt?… has",
     "without it"),
    ("--run.dir s3://me:secret@bucket/run", "run.dir: s3://…@bucket/run has a name or password", "environment"),
    ("--run.dir https://host/run", 'run.dir="https://host/run" cannot be written', "s3://BUCKET/…"),
    ("--run.dir s3:/bucket/run", 'run.dir="s3:/bucket/run" is not an address', 'use "s3://bucket/run", or begin with ./'),
    ("--data.cache gs:///bucket/run", 'data.cache="gs:///bucket/run" is not an address', 'use "gs://bucket/run"'),
    ("--data.source text --data.paths ['a.txt'] --data.field body",
     'data.field="body" is not read by data.source="text"', "or leave it out"),
    ("--data.cache hdfs://node/cache", 'data.cache="hdfs://node/cache" is an address', "mount it"),
    ("--checkpoint.init_optimizer true", "checkpoint.init_optimizer=true", "give its run.dir"),
    ("--distributed.timeout_s 0", "distributed.timeout_s=0 is out of range", "e.g. 300"),
    ("nowhere.toml", "nowhere.toml: there is no such run file", "configs/quickstart.toml"),
    ("llama3-8b", "llama3-8b: there is no such run file", "did you mean configs/llama3-8b.toml?"),
    ("configs", "configs is a directory", "name the run file"),
]


@pytest.mark.parametrize("argv, value, remedy", MISTAKES, ids=[mistake[0][:60] for mistake in MISTAKES])
def test_a_mistake_is_told_once_with_its_value_and_its_remedy(argv, value, remedy):
    messages = faults(*argv.split())
    if "a.toml b.toml" in argv:
        messages = messages[:1]  # a.toml is not there either
    assert len(messages) == 1, messages
    assert value in messages[0]
    assert remedy in messages[0]


# (run file, what the one message must contain)
FILE_MISTAKES = [
    ("[mesh]\ndata = [1\nfsdp = 2\n", ":3:"),
    ("[mesh]\ndata = 1\ndata = 2\n", ":3:"),
    ("[mesh]\ndata = yes\n", ":2:"),
    ("[mesh]\ndata = " + "1" * 5000, "run.toml"),
    ("[mesh]\nplacement = [", "run.toml"),
    ("mesh = 4\n", "mesh=4 is not a section; write [mesh]"),
    ("[[mesh]]\ndata = 1\n", "mesh=[{data = 1}] is not a section"),
    ("steps = 5\n", "did you mean training.steps?"),
    ("[mesh.sub]\ndata = 1\n", "mesh.sub={data = 1} is not a key of [mesh]"),
    ('[training]\nsteps = "8"\n', 'training.steps="8" is not a whole number'),
    ("[training]\nsteps = 8.0\n", "training.steps=8.0 is not a whole number"),
    ("[training]\nsteps = true\n", "training.steps=true is not a whole number"),
    ("[training]\nsteps = 2024-01-01\n", "training.steps=2024-01-01 is not a whole number"),
    ("[run]\nname = 5\n", "run.name=5 is not a string; write it in quotes"),
    ("[model]\nnorm = 5\n", 'model.norm=5 is not a string; use "rmsnorm" or "layernorm"'),
    ("[model]\npreset = 5\nnum_kv_heads = 3\n", "model.preset=5 is not a string"),
    ("[checkpoint]\nresume = true\n", 'checkpoint.resume=true is not a string; use "auto" or "never"'),
]


@pytest.mark.parametrize("text, part", FILE_MISTAKES, ids=[mistake[0][:30] for mistake in FILE_MISTAKES])
def test_a_mistake_in_the_file_is_told_once(text, part, tmp_path):
    messages = faults(write(tmp_path, text))
    assert len(messages) == 1, messages
    assert part in messages[0]


def test_a_file_that_is_no_text_is_told(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"[run]\nname = '\xff'\n")
    assert "UTF-8" in faults(str(path))[0]


def test_all_faults_are_told_together():
    messages = faults(
        *"--modle.a 1 --training.stepz 5 --training.steps x --data.seq_len 0 --model.num_kv_heads 3 --mesh.stage "
         "0".split(),
        *"--sharding.rules nowhere.toml --training.microbatches 5 --optimizer.name sgd --run.seed".split(),
    )
    named = "modle stepz training.steps= data.seq_len num_kv_heads mesh.stage nowhere.toml microbatches sgd run.seed"
    assert len(messages) == len(named.split())
    for name in named.split():
        assert sum(name in message for message in messages) >= 1, name


def test_faults_of_a_missing_file_and_of_the_command_line_are_told_together():
    messages = faults("nowhere.toml", "--training.steps", "x", "--data.source", "text")
    assert len(messages) == 2  # that there are no data.paths may be the missing file's doing


def test_a_wrong_value_brings_no_second_fault(tmp_path):
    path = write(tmp_path, '[model]\nnum_heads = "8"\nnum_kv_heads = 3\nembed_dim = 100\n[data]\nsource = "stdlib"\nglobal_batch = "x"\n')
    assert len(faults(path, "--training.microbatches", "3")) == 2


WORDS = st.text(string.ascii_letters + string.digits + "-_.=[]\"' ", max_size=12)
NAMES = st.sampled_from([f"--{section}.{key}" for section, cls in config.SECTIONS.items() for key in cls.model_fields])


@given(st.lists(st.one_of(NAMES, WORDS, st.integers().map(str), st.sampled_from(["true", "0", "[]", "--", "--a.b"]))))
def test_no_command_line_fails_in_another_way_than_config_error(argv):
    os.chdir(ROOT)
    try:
        run = run_files.load([arg for arg in argv if arg not in ("-h", "--help")])
    except config.ConfigError as error:
        assert error.messages and all(re.search(r"; |\?$", message) for message in error.messages)
    else:
        assert config.problems(run) == []


def test_help_names_every_key_with_the_files_value(capsys):
    with pytest.raises(SystemExit) as stop:
        run_files.load(["configs/llama3-8b.toml", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for section, cls in config.SECTIONS.items():
        for key, field in cls.model_fields.items():
            assert f"--{section}.{key} " in out
            assert field.description and field.description in out
    assert "--model.embed_dim 4096" in out


# ---- the mesh on real devices ----------------------------------------------------------------------------------------


@given(st.permutations([2, 3, 4, -1, 1]), st.integers(1, 4))
def test_the_rest_axis_fills_the_devices(sizes, rest):
    run = config.Run(mesh=dict(zip(config.AXES, sizes)))
    resolved = config.mesh_sizes(run, 24 * rest)
    assert math.prod(resolved.values()) == 24 * rest
    assert all(resolved[axis] == size for axis, size in zip(config.AXES, sizes) if size != -1)


@pytest.mark.parametrize(
    "sizes, devices, parts",
    [
        ({"data": 2, "fsdp": 4}, 4, ["mesh.data=2 × mesh.fsdp=4 takes 8", "there are 4",
                                     "mesh.fsdp=2", "simulated_devices=8"]),
        ({"tensor": 3, "fsdp": -1}, 8, ["mesh.fsdp=-1 × mesh.tensor=3", "8 devices", "e.g. 9"]),
        ({}, 8, ["a mesh of 1", "mesh.fsdp=8"]),
        ({"tensor": 8, "data": 3}, 5, ["whose product is 5"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_remedy(sizes, devices, parts):
    with pytest.raises(config.ConfigError) as caught:
        config.mesh_sizes(config.Run(mesh=sizes), devices)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# ---- what is sound and rarely meant ----------------------------------------------------------------------------------


def test_bytes_under_a_large_vocabulary_are_told():
    (told,) = config.notes(run_files.load(["configs/llama3-8b.toml"]))
    assert 'data.tokenizer="bytes" uses 257 of model.vocab_size=128256' in told and "tokenizer.json" in told
    for sound in ([], ["--model.preset", "llama3-8b", "--data.tokenizer", "tokenizer.json"],
                  ["--model.preset", "llama3-8b", "--data.source", "tokens", "--data.paths", '["a.tokens.npy"]']):
        assert config.notes(run_files.load(sound)) == []
    (unread,) = config.notes(run_files.load(["--data.cache", "elsewhere"]))
    assert unread.startswith('data.cache="elsewhere" has no effect here')
    from meshtrain import design
    from meshtrain.sharding.mesh import MeshSpec

    assert told in design.make(run_files.load(["configs/llama3-8b.toml"]), MeshSpec({"fsdp": 8}), "gpu", None).notes


@pytest.mark.parametrize("path", [path for path in RUN_FILES if path.stem.startswith("llama")],
                         ids=lambda path: path.stem)
def test_a_run_of_many_gpus_draws_no_sample_and_shows_where_its_tokenizer_goes(path):
    assert run_files.load([str(path)]).run.sample_tokens == 0
    assert '\n# tokenizer = "tokenizer.json"' in path.read_text()


# ---- names, homes and locales ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.local_dir", "data.tokenizer",
                                 "data.cache", "data.chat_template"])
def test_a_home_is_expanded_in_every_key_that_is_a_path(key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    more = ["--checkpoint.local_every", "5"] if key == "checkpoint.local_dir" else [
        "--data.source", "chat", "--data.paths", '["~/a.jsonl"]']
    run = run_files.load([f"--{key}=~/x", *more])
    section, name = key.split(".")
    assert getattr(getattr(run, section), name) == f"{tmp_path}/x"
    assert "~" not in config.dump(run).replace("~/.cache", "")


def test_a_home_is_expanded_in_lists_rules_and_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "old").mkdir()
    run = run_files.load(["--sharding.rules", "~/mine.toml", "--checkpoint.init_from", "~/old", "--data.source", "mixture",
                       "--data.mixture", '[{source="text", paths=["~/a.txt"], validation_paths=["~/b.txt"]}]'])
    assert (run.sharding.rules, run.checkpoint.init_from) == (f"{tmp_path}/mine.toml", f"{tmp_path}/old")
    assert (run.data.mixture[0].paths, run.data.mixture[0].validation_paths) == (
        (f"{tmp_path}/a.txt",), (f"{tmp_path}/b.txt",))


def test_a_home_that_is_not_known_is_refused():
    with pytest.raises(config.ConfigError,
                       match='run.dir="~nobody-of-this-name/x" has an unknown home directory'):
        run_files.load(["--run.dir", "~nobody-of-this-name/x"])


def test_a_name_that_is_not_utf8_is_refused_at_once():
    name = os.fsdecode(b"/tmp/\xff.txt")
    with pytest.raises(config.ConfigError, match=r"data.paths='/tmp/.udcff.txt' is not UTF-8"):
        run_files.load(["--data.source", "text", "--data.paths", f'["{name}"]'])
    with pytest.raises(config.ConfigError, match="run.dir=.* is not UTF-8"):
        run_files.load(["--run.dir", name])


def test_a_locale_without_utf8_is_told_with_its_remedy(tmp_path):
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
    code = ("import sys\nfrom meshtrain import config, run_files\ntry: run_files.load(sys.argv[1:])\nexcept config.ConfigError as "
            "error: print(ascii(str(error)))")
    (tmp_path / "run.toml").write_text('[data]\nsource = "text"\npaths = ["donn\u00e9es/a.txt"]\n', encoding="utf-8")
    for words in ([str(tmp_path / "run.toml")], ["--run.dir", "donn\u00e9es"]):
        ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT,
                             env=environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"})
        assert "locale (ascii); set PYTHONUTF8=1" in ran.stdout, ran


def test_a_byte_order_mark_is_no_part_of_a_run_file(tmp_path):
    assert run_files.load([write(tmp_path, "[training]\nsteps = 7\n", "utf-8-sig")]).training.steps == 7


def test_a_vocabulary_beyond_the_indices_is_refused():
    with pytest.raises(config.ConfigError, match="model.vocab_size=3000000000 is out of range; use at most 1073741824"):
        run_files.load(["--model.vocab_size", "3000000000"])


# ---- what has no effect ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, value, also", [
    ("optimizer.decay_steps", "5", []), ("optimizer.final_fraction", "0.5", ["--optimizer.schedule", "constant"]),
    ("training.spike_threshold", "5.0", ["--training.loss_spike", "off"]),
    ("data.cache", "x", []), ("lora.export", "adapters", ["--lora.rank", "4"]), ("lora.alpha", "8.0", []),
    ("model.rope_theta", "5.0", ["--model.position", "learned"]),
    ("model.rope_scaling", '{rope_type="linear", factor=4.0}', ["--model.position", "learned"])])
def test_a_key_without_effect_is_told(key, value, also):
    told = [note for note in config.notes(run_files.load([f"--{key}", value, *also])) if note.startswith(key)]
    assert len(told) == 1 and f"{key}=" in told[0] and "has no effect here; it needs " in told[0]
    assert not [note for note in config.notes(run_files.load(also)) if note.startswith(key + "=")]


@pytest.mark.parametrize("more", [
    ["--optimizer.schedule", "wsd", "--optimizer.decay_steps", "5"],
    ["--lora.rank", "4", "--lora.export", "adapters", "--checkpoint.export", "last"],
    ["--data.source", "jsonl", "--data.paths", '["a"]', "--data.field", "body", "--data.cache", "x"],
    ["--training.spike_threshold", "5.0"],
    ["--data.source", "text", "--data.paths", '["a.gz"]', "--data.cache", "x"],
    ["--model.rope_scaling", '{rope_type="yarn", factor=4.0, original_max_position_embeddings=64}']])
def test_a_key_with_effect_is_not_told(more):
    assert not [note for note in config.notes(run_files.load(more)) if "has no effect" in note]


def test_no_shipped_file_has_a_key_without_effect():
    os.chdir(ROOT)
    files = sorted((ROOT / "configs").glob("*.toml"))
    told = {}
    for path in files:
        try:
            run = run_files.load([str(path)])
        except config.ConfigError:      # of another run, or data, that is not there
            continue
        told[path.name] = [note for note in config.notes(run) if "has no effect" in note or "sets nothing" in note]
    assert len(told) > 5 and not any(told.values()), told


def test_a_file_without_a_key_is_told(tmp_path):
    empty = write(tmp_path, "")
    assert any("the run file sets nothing" in note for note in config.notes(run_files.load([empty])))
    assert not any("sets nothing" in note for note in config.notes(run_files.load([empty, "--model.num_layers", "2"])))


# ---- keys that there are not ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("old, said", [
    ("[data]\nprefetch = 8", "data.prefetch=8 is not a key"),
    ("[model]\nqk_norm = true", "model.qk_norm=true is not a string; use "),
    ("[model]\nrouter_group_limit = 2", "model.router_group_limit=2 is not a key"),
    ("[metrics]\nwandb_project = 'mine'", 'metrics.wandb_project="mine" is not a key of .metrics.; did you mean metrics.wandb'),
    ("[pipeline]\nuneven = 'refuse'", "pipeline.uneven=\"refuse\" is not a key"),
    ("[training]\nsave_timeout_s = 5\nrestore_timeout_s = 6", "training.save_timeout_s=5 is not a key")])
def test_keys_and_values_that_an_earlier_version_had_are_refused_by_name(tmp_path, old, said):
    (tmp_path / "run.toml").write_text(old)
    with pytest.raises(config.ConfigError, match=said):
        run_files.load([str(tmp_path / "run.toml")])


def test_words_of_other_trainers_mean_keys_that_there_are_and_none_of_ours():
    keys = {f"{section}.{key}" for section, cls in config.SECTIONS.items() for key in cls.model_fields}
    words = [word for words in elsewhere.WORDS.values() for word in words.split()]
    homes = [(key.partition(".")[0], word) for key, names in elsewhere.WORDS.items() for word in names.split()]
    assert set(elsewhere.WORDS) <= keys and len(homes) == len(set(homes)) > 150
    taken = {key.partition(".")[2]: key for key in keys}
    assert {word: elsewhere.find_key(word) for word in words if word in taken} == {}
    assert elsewhere.find_key("Tensor-Parallel-Degree") == "mesh.tensor" and elsewhere.find_key("steps") == ""
