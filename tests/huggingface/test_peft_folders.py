"""PEFT's folders: what PEFT computes is computed here, ours come back bit for bit, and what is not read is refused."""
import json
import shutil

import jax
import numpy as np
import pytest
import sampling
from commands import call
from folders import EIGHT, GOLDENS, ONE, Loaded, contents
from peft_goldens import CASES

from meshtrain import config
from meshtrain.commands import convert
from meshtrain.config import ConfigError
from meshtrain.huggingface import safetensors
from meshtrain.huggingface.weights import peft, peft_folder
from meshtrain.huggingface.weights.ends import Ends
from meshtrain.model import params
from meshtrain.run import trees

CORE = ("patterns",)
# folder, layout, lora.targets, lora.also
OURS = [("qwen3_moe", EIGHT, ("query", "expert_gate", "expert_up", "expert_down"), ()), ("gpt_oss", ONE, ("expert_up", "expert_down"), ()),
        ("mixtral", ONE, ("expert_gate", "expert_up"), ()), ("deepseek_v3", ONE, ("up", "expert_down"), ()),
        ("phi3", ONE, ("query", "value", "down", "up"), ("head",)), ("phi3", ONE, ("query",), ()),
        ("gpt2", EIGHT, (), ()), ("llama3.2", EIGHT, (), ("embedding",)), ("qwen3_next", ONE, (), ()),
        ("deepseek_v3", EIGHT, ("query", "value", "down"), ("embedding", "head")),
        ("gemma3_wrapped", ONE, (), ("embedding",))]


def load(name: str, layout=ONE, *words) -> Loaded:
    """The base of a case with its adapters."""
    loaded = Loaded(GOLDENS / CASES[name][0], *layout, f"--lora.init_from={GOLDENS / 'peft' / name}", *words)
    found = peft_folder.open_folder(str(GOLDENS / "peft" / name), str(GOLDENS / CASES[name][0]), loaded.run.model)
    loaded.params = peft_folder.load(found, loaded.made.model, loaded.params)
    return loaded


@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=() if name in CORE and layout == ONE else sampling.GRID, id=f"{name}-{layout[0]}")
    for name in CASES for layout in (ONE, EIGHT)])
def test_adapters_compute_what_peft_computes(name, layout):
    golden = np.load(GOLDENS / "peft" / name / "golden.npz")
    np.testing.assert_allclose(load(name, layout).logits(golden["tokens"]), golden["logits"], atol=3e-5)       # float32, as of the base


@pytest.mark.parametrize("name", [pytest.param(name, marks=sampling.GRID) for name in CASES])
def test_a_merged_folder_is_what_peft_merges(name, tmp_path):
    base, _, kept = CASES[name]
    done = call(convert.main, GOLDENS / base, tmp_path / "out", "--merge", GOLDENS / "peft" / name)
    assert done.code == 0, done.err
    golden, tensors = np.load(GOLDENS / "peft" / name / "golden.npz"), contents(tmp_path / "out")
    for module in kept:
        _, shape, raw = tensors[f"{module}.weight"]
        np.testing.assert_allclose(np.frombuffer(raw, np.float32).reshape(shape), golden[module], atol=1e-6)
    np.testing.assert_allclose(Loaded(tmp_path / "out", *ONE).logits(golden["tokens"]), golden["logits"], atol=3e-5)       # float32, as of the base
    if "target_parameters" in CASES[name][1]:
        return      # a tensor of PEFT is one of each expert here
    untouched = contents(GOLDENS / base).items() - {(name, entry) for name, entry in tensors.items()}
    assert len(untouched) == len(peft_folder.open_folder(
        str(GOLDENS / "peft" / name), str(GOLDENS / base), Loaded(GOLDENS / base, *ONE).run.model).modules)


@pytest.mark.parametrize("name, layout, targets, also", [
    pytest.param(*case, marks=() if n == 0 else sampling.GRID) for n, case in enumerate(OURS)], ids=str)
def test_our_export_comes_back_bit_for_bit(name, layout, targets, also, tmp_path):
    words = ("--lora.rank=3", "--lora.alpha=7", f"--lora.targets={json.dumps(targets)}", f"--lora.also={json.dumps(also)}")
    loaded = Loaded(GOLDENS / name, *layout, *words)
    rng, model = np.random.default_rng(0), loaded.made.model
    trained, frozen = model.divide(loaded.params)
    trained = jax.tree.map(lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding), trained)
    written = trees.leaves_of(params.join(trained, frozen))
    with jax.set_mesh(loaded.made.mesh):
        peft.write(tmp_path / "out", model, written.get, dtype="float32", base="base", data={}, ends=Ends(),
                   source=GOLDENS / name)
    again = Loaded(GOLDENS / name, *layout, f"--lora.init_from={tmp_path / 'out'}")
    assert (again.run.lora.rank, again.run.lora.alpha, again.run.lora.also) == (3, 7.0, also)
    assert not targets or set(again.run.lora.targets) == set(targets)
    found = peft_folder.open_folder(str(tmp_path / "out"), str(GOLDENS / name), again.run.model)
    leaves = trees.leaves_of(peft_folder.load(found, again.made.model, again.params))
    learned = trees.leaves_of(trained)
    assert learned.keys() == trees.leaves_of(again.made.model.divide(again.params)[0]).keys()
    rows = loaded.run.model.vocab_size      # the others are padding, which is not written
    for path in learned:
        own = {"embedding/table": np.s_[:rows], "head/kernel": np.s_[:, :rows]}.get(path, ...)
        np.testing.assert_array_equal(leaves[path][own], written[path][own], path)


def change(directory, tensors=None, **keys) -> None:
    """Change keys of adapter_config.json, and names of tensors: old -> new."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    if tensors is not None:
        entries = safetensors.read_header(directory / "adapter_model.safetensors")
        safetensors.copy({tensors.get(name.split(".", 2)[2], name): entry for name, entry in entries.items()},
                         directory / "new")
        (directory / "new").replace(directory / "adapter_model.safetensors")


V_PROJ = "model.layers.1.self_attn.v_proj.lora_B.weight"
FAULTS = {
    "biases": (dict(bias="lora_only"), 'bias="lora_only" is not supported'),
    "dora": (dict(use_dora=True), "use_dora=true is not supported"),
    "pissa": (dict(init_lora_weights="pissa_niter_4"), 'init_lora_weights="pissa_niter_4" is not supported'),
    "loftq": (dict(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}), 'init_lora_weights="loftq"'),
    "olora": (dict(init_lora_weights="olora"), 'init_lora_weights="olora"'),
    "corda": (dict(init_lora_weights="corda"), 'init_lora_weights="corda"'),
    "other modules": (dict(modules_to_save=["classifier"]),
                      "modules_to_save has classifier, which is not read; only embed_tokens, lm_head are"),
    "no such tensor": (dict(modules_to_save=["lm_head"]), "but adapter_model.safetensors has no lm_head.weight"),
    "rows": (dict(trainable_token_indices=[3]), "trainable_token_indices=[3] is not supported"),
    "another method": (dict(peft_type="IA3"), 'peft_type="IA3"'),
    "another task": (dict(task_type="SEQ_CLS"), 'task_type="SEQ_CLS"'),
    "one expert": (dict(tensors={f"model.layers.1.self_attn.v_proj.lora_{one}.weight":
                                 f"base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_{one}.weight" for one in "AB"}),
                   "model.layers.1.mlp.experts.3.up_proj is not a projection that can have an adapter here"),
    "an unknown key": (dict(lora_gamma=2), "the key lora_gamma=2 is unknown here"),
    "another rank": (dict(r=8), "is [4, 32] of F32; adapter_config.json and the model require [8, 32]"),
    "no rank": (dict(r=0), "r=0 must be a number above 0, and whole"),
    "no alpha": (dict(lora_alpha="16"), 'lora_alpha="16" must be a number above 0'),
    "no pattern": (dict(rank_pattern={"(": 2}), "'(' of r is not a regular expression"),
    "a lone tensor": (dict(tensors={V_PROJ: "base_model.model.model.norm.lora_B.weight"}),
                      "model.layers.1.self_attn.v_proj.lora_A.weight is not read"),
    "an embedding": (dict(tensors={V_PROJ: "base_model.model.model.embed_tokens.lora_embedding_B"}),
                     "base_model.model.model.embed_tokens.lora_embedding_B is not read"),
}


@pytest.mark.parametrize("keys, told", FAULTS.values(), ids=FAULTS)
def test_what_is_not_read_is_refused_by_its_name(keys, told, tmp_path):
    place = shutil.copytree(GOLDENS / "peft" / "plain", tmp_path / "adapters")
    change(place, **keys)
    with pytest.raises(ConfigError) as raised:
        Loaded(GOLDENS / "llama3.2", *ONE, f"--lora.init_from={place}")
    assert told in str(raised.value) and f"lora.init_from: {place}: " in str(raised.value)


def test_folders_that_are_none_and_contradicting_keys_are_told(tmp_path):
    def told(*words) -> str:
        with pytest.raises(ConfigError) as raised:
            Loaded(GOLDENS / "llama3.2", *ONE, *words)
        return str(raised.value)
    assert "it is not a PEFT folder; give one" in told(f"--lora.init_from={tmp_path}")
    plain = GOLDENS / "peft" / "plain"
    shutil.copy(plain / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle")
    assert "adapter_model.bin is a pickle, which is not opened" in told(f"--lora.init_from={tmp_path}")
    assert "lora.rank=8 contradicts lora.init_from" in told(f"--lora.init_from={plain}", "--lora.rank=8")
    assert "whose adapters have 4; leave the key out" in told(f"--lora.init_from={plain}", "--lora.rank=8")
    more = Loaded(GOLDENS / "llama3.2", *ONE, f"--lora.init_from={plain}", '--lora.also=["embedding"]')
    assert more.run.lora.also == ("embedding",) and more.run.lora.rank == 4
    assert "lm_head.weight differs from model.embed_tokens.weight" in told(
        f"--lora.init_from={GOLDENS / 'peft' / 'saved'}")


@pytest.mark.parametrize("prefix", ["base_model.model.language_model.model.", "base_model.model.model.language_model.",
                                    "base_model.model.", "model."])
def test_the_text_model_is_found_under_all_its_prefixes(prefix, tmp_path):
    place = shutil.copytree(GOLDENS / "peft" / "plain", tmp_path / "adapters")
    names = safetensors.read_header(place / "adapter_model.safetensors")
    change(place, {name.split(".", 2)[2]: prefix + name.removeprefix("base_model.model.model.").replace(
        ".weight", ".default.weight") for name in names})
    model = config.Model(**Loaded(GOLDENS / "llama3.2", *ONE).run.model.model_dump())
    found = peft_folder.open_folder(str(place), str(GOLDENS / "llama3.2"), model)
    assert set(found.modules) == {f"model.layers.{n}.self_attn.{name}_proj.weight" for n in (0, 1) for name in "qv"}
