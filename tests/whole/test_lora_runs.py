"""Runs with LoRA, by the commands: begun from others, resumed, given back, refused."""
import json
import shutil

import jax
import numpy as np
import pytest
from commands import call, home, in_a_directory_of_its_own, tiny  # noqa: F401
from folders import contents

from meshtrain.commands import convert, evaluate, generate, train
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore

LORA = ("--lora.rank", "3", "--lora.alpha", "7", "--optimizer.learning_rate", "0.02")


def saved(directory, step):
    """The parameters of a step, on one device."""
    checkpoints = Checkpoints(DirectoryStore(directory / "checkpoints"), read_only=True)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), checkpoints.arrays(step))
    return jax.device_get(checkpoints.restore(step, wanted))


def paths(tree) -> dict:
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def ran(*words):
    done = call(train.main, *words)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def runs(home, tiny, tmp_path_factory):
    """A run of the whole model, one with adapters that starts from it, and one that goes on from that."""
    place = tmp_path_factory.mktemp("runs")
    of = lambda name: ("--run.dir", str(place / name))
    ran(*tiny, *of("base"), "--training.steps", "2")
    ran(*tiny, *of("lora"), *LORA, "--checkpoint.init_from", str(place / "base"), "--training.steps",
        "4", "--checkpoint.every", "2")
    return place


def test_a_run_with_adapters_leaves_the_weights_that_it_began_with_as_they_were(runs):
    base, (first, last) = paths(saved(runs / "base", 2)["params"]), (
        paths(saved(runs / "lora", step)["params"]) for step in (2, 4))
    adapters = first.keys() - base.keys()
    assert len(adapters) == 14 and all("/lora/" in name for name in adapters)
    for name, leaf in base.items():
        np.testing.assert_array_equal(leaf, first[name])
        np.testing.assert_array_equal(leaf, last[name])
    assert all((first[name] != last[name]).any() for name in adapters)


def test_a_merged_folder_has_the_numbers_of_the_formula_and_none_of_adapters(runs, tmp_path):
    done = call(convert.main, runs / "lora", tmp_path / "out", "--dtype", "float32", "--step", "4")
    assert done.code == 0, done.err
    p = paths(saved(runs / "lora", 4)["params"])
    tensors = contents(tmp_path / "out")
    assert not any("lora" in name for name in tensors)
    for theirs, ours in (("q_proj", "attention/query"), ("k_proj", "attention/key"),
                         ("o_proj", "attention/out"), ("down_proj", "mlp/down")):
        part = "self_attn" if "attention" in ours else "mlp"
        kernel, a, b = (p[f"layers/{ours}/{one}"][0] for one in ("kernel", "lora/a", "lora/b"))
        inputs = int(np.prod(a.shape[:-1]))
        expected = kernel.reshape(inputs,
                                  -1).astype("float64") + 7 / 3 * a.reshape(inputs, -1).astype("float64") @ b.reshape(
                                      len(b), -1)
        _, shape, raw = tensors[f"model.layers.0.{part}.{theirs}.weight"]
        # float32's rounding
        np.testing.assert_allclose(np.frombuffer(raw, "float32").reshape(shape), expected.T, rtol=1e-5, atol=1e-7)
    assert tensors["model.embed_tokens.weight"][2] == p["embedding/table"][:257].tobytes()


def test_adapters_are_written_as_peft_names_and_shapes_them(runs, tmp_path):
    """As PEFT names what get_peft_model(LlamaForCausalLM, LoraConfig(r=3)).save_pretrained writes. Source: its code,
    0.21."""
    done = call(convert.main, runs / "lora", tmp_path / "out", "--adapters", "--step", "4")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"]
    tensors, D, N, K, F = contents(tmp_path / "out"), 32, 32, 16, 64
    shapes = {"self_attn.q_proj": (D, N), "self_attn.k_proj": (D, K), "self_attn.v_proj": (D, K),
              "self_attn.o_proj": (N, D),
              "mlp.gate_proj": (D, F), "mlp.up_proj": (D, F), "mlp.down_proj": (F, D)}
    expected = {f"base_model.model.model.layers.0.{name}.lora_{one}.weight": shape for name, (i, o) in shapes.items()
                for one, shape in (("A", (3, i)), ("B", (o, 3)))}
    assert {name: shape for name, (_, shape, _) in tensors.items()} == expected
    p = paths(saved(runs / "lora", 4)["params"])
    down = np.frombuffer(tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"][2],
                         "float32").reshape(3, N)
    np.testing.assert_array_equal(down, p["layers/attention/out/lora/a"][0].reshape(N, 3).T)
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"], settings["task_type"]) == (
        3, 7.0, "LORA", "CAUSAL_LM")
    assert settings["target_modules"] == sorted(name.split(".")[1] for name in shapes) and not settings["rank_pattern"]
    assert settings["base_model_name_or_path"] == str(runs / "base")


@pytest.mark.full
def test_a_run_starts_from_a_folder_of_adapters_and_goes_on_without_it(runs, tiny, tmp_path):
    done = call(convert.main, runs / "lora", tmp_path / "adapters", "--adapters", "--step", "4")
    assert done.code == 0, done.err
    base = ("--checkpoint.init_from", str(runs / "base"), "--optimizer.learning_rate", "1e-12")
    of = ("--run.dir", str(tmp_path / "run"), *base, "--training.steps")
    said = ran(*tiny, *of, "1", "--lora.init_from", str(tmp_path / "adapters")).out
    assert "adapters of 7 modules" in said and f"they were trained on {runs / 'base'}" in said
    source, first = paths(saved(runs / "lora", 4)["params"]), paths(saved(tmp_path / "run", 1)["params"])
    assert source.keys() == first.keys()
    for name, leaf in source.items():
        np.testing.assert_allclose(first[name], leaf, rtol=0, atol=1e-9)
    answers = [call(generate.main, *words, "--prompt-ids", "[5, 6, 7]", "--max-tokens", "5", "--json") for words in (
        (runs / "lora", "--step", "4"), (runs / "base", "--merge", tmp_path / "adapters"), (runs / "base",))]
    assert answers[0].out == answers[1].out != answers[2].out, answers[1].err
    scores = [json.loads(call(evaluate.main, *words, "--json").out)["loss"] for words in (
        (runs / "lora", "--step", "4"), (runs / "base", "--merge", tmp_path / "adapters"))]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    (tmp_path / "adapters").rename(tmp_path / "gone")
    ran(str(tmp_path / "run" / "config.toml"), "--training.steps", "2")
    done = call(train.main, str(tmp_path / "run" / "config.toml"), "--run.dir", str(tmp_path / "new"))
    assert done.code == 2 and "it is not a PEFT folder" in done.err and "Traceback" not in done.err
    for words, told in ((("--merge", tmp_path / "gone"), "needs a folder to write to"),
                        ((tmp_path / "out", "--adapters", "--merge", tmp_path / "gone"), "leave --adapters or --merge out"),
                        ((tmp_path / "out", "--merge", tmp_path), "it is not a PEFT folder")):
        done = call(convert.main, runs / "base", *words)
        assert done.code == 2 and told in done.err, done.err


@pytest.mark.parametrize("words, told", [
    (("--lora.rank=-1",), "lora.rank=-1 is out of range; use at least 0"),
    (("--lora.rank=2", '--lora.targets=["q_proj"]'), 'lora.targets="q_proj" is unknown; use "query"'),
    (("--lora.rank=2", '--lora.targets=["query", "query"]'), "twice; name it once"),
    (('--lora.targets=["query"]',), "has no effect with lora.rank=0"),
    (("--lora.rank=2", "--lora.alpha=0"), "lora.alpha=0 is out of range; use more than 0"),
    (("--lora.rank=2", '--lora.targets=["gate"]', "--model.activation=gelu"),
     "lora.targets names gate, but the layers of this model have only query, key"),
    (("--lora.export=adapters",), "needs adapters, but lora.rank=0"),
    (("--lora.rank=2", '--lora.also=["lm_head"]'), 'lora.also="lm_head" is unknown; did you mean "head"?'),
    (("--lora.rank=2", '--lora.also=["head", "head"]'), "twice; name it once"),
    (('--lora.also=["head"]',), "lora.also=[\"head\"] has no effect with lora.rank=0"),
    (("--lora.rank=2", '--lora.also=["head"]', "--model.tie_embeddings=true"),
     "the head of this model is its embedding (model.tie_embeddings=true); use lora.also=[\"embedding\"]"),
])  # fmt: skip
def test_faults_are_told_by_name(tiny, words, told):
    done = call(train.main, *tiny, "--training.steps", "1", *words)
    assert done.code == 2 and told in done.err and "Traceback" not in done.err, done.err


@pytest.mark.long
@pytest.mark.cell
def test_a_run_goes_on_with_its_own_adapters_alone(runs, tiny, tmp_path):
    shutil.copytree(runs / "lora", tmp_path / "lora")
    of = ("--run.dir", str(tmp_path / "lora"), "--checkpoint.init_from", str(runs / "base"), "--training.steps", "6")
    done = call(train.main, *tiny, *of, "--lora.rank", "4")
    assert done.code == 2 and "lora.rank=4, but the run in" in done.err and "has 3" in done.err
    ran(*tiny, *of, *LORA)
    base, last = paths(saved(runs / "base", 2)["params"]), paths(saved(tmp_path / "lora", 6)["params"])
    assert all((leaf == last[name]).all() for name, leaf in base.items())


@pytest.mark.long
@pytest.mark.cell
def test_other_runs_begin_from_merged_weights_and_the_same_lora_from_the_adapters(runs, tiny, tmp_path, monkeypatch):
    of = lambda name: ("--run.dir", str(tmp_path / name), "--checkpoint.init_from", str(runs / "lora"),
                       "--training.steps", "1",
                       "--optimizer.learning_rate", "1e-12")      # a step that changes next to nothing
    source = paths(saved(runs / "lora", 4)["params"])
    ran(*tiny, *LORA[:4], *of("same"))
    same = paths(saved(tmp_path / "same", 1)["params"])
    assert source.keys() == same.keys()
    for name, leaf in source.items():
        np.testing.assert_allclose(same[name], leaf, rtol=0, atol=1e-9)
    ran(*tiny, *of("plain"))
    merged = paths(saved(tmp_path / "plain", 1)["params"])
    assert not any("lora" in name for name in merged)
    a, b = (source[f"layers/mlp/up/lora/{one}"][0] for one in "ab")
    np.testing.assert_allclose(merged["layers/mlp/up/kernel"][0],
                               source["layers/mlp/up/kernel"][0] + 7 / 3 * a @ b, atol=1e-6)
    done = call(train.main, *tiny, *of("state"), "--checkpoint.init_optimizer", "true")
    assert done.code == 2 and "trained other parameters (adapters of lora.rank=3" in done.err
    assert "leave it out" in done.err


@pytest.mark.full
def test_a_run_trains_adapters_of_routed_experts_and_its_exports_agree(tiny, tmp_path):
    """On expert layouts; resumed; merged as PEFT's formula has it; and read again."""
    of = (*tiny, "--model.num_experts", "4", "--model.experts_per_token", "2", "--model.expert_mlp_dim", "24",
          "--model.qk_norm", "head", "--training.steps", "2", "--run.sample_tokens", "0",
          "--sharding.rules", "zero3_experts_fsdp", "--mesh.data", "2", "--mesh.fsdp", "4", "--mesh.tensor", "1")
    ran(*of, "--run.dir", str(tmp_path / "base"))
    adapted = (*of, *LORA, "--lora.targets", '["query", "expert_gate", "expert_up", "expert_down"]', "--run.dir",
               str(tmp_path / "lora"), "--checkpoint.init_from", str(tmp_path / "base"), "--checkpoint.every", "2")
    ran(*adapted)
    done = ran(*adapted, "--training.steps", "4")
    assert "resuming after step 2" in done.out
    base, last = paths(saved(tmp_path / "base", 2)["params"]), paths(saved(tmp_path / "lora", 4)["params"])
    assert len(last) == len(base) + 8 and all((last[name] == base[name]).all() for name in base)
    a, b = (last[f"layers/moe/lora/down_{one}"] for one in "ab")
    assert a.shape == (1, 4, 24, 3) and b.shape == (1, 4, 3, 32) and b.any()
    for command in (("base", "plain"), ("lora", "merged"), ("lora", "adapters", "--adapters")):
        done = call(convert.main, tmp_path / command[0], tmp_path / command[1], "--dtype", "float32", *command[2:])
        assert done.code == 0, done.err
    merged = contents(tmp_path / "merged")
    (name,) = (name for name in merged if ".experts.3." in name and ("down_proj" in name or "w2" in name))
    np.testing.assert_allclose(np.frombuffer(merged[name][2], "float32").reshape(32, 24).T,
                               base["layers/moe/down"][0, 3] + 7 / 3 * a[0, 3] @ b[0, 3], rtol=1e-5, atol=1e-6)
    done = call(convert.main, tmp_path / "plain", tmp_path / "again", "--merge", tmp_path / "adapters")
    assert done.code == 0, done.err
    again = contents(tmp_path / "again")
    for name, (_, _, raw) in merged.items():
        np.testing.assert_allclose(*(np.frombuffer(one, "float32") for one in (again[name][2], raw)), rtol=1e-5, atol=1e-6)
