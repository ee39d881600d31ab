"""LoRA on open models: merged logits are the unmerged, and PEFT's tensors beside the folder are the merged folder."""
import json
import shutil

import jax
import numpy as np
import pytest
import sampling
from folders import EIGHT, GOLDENS, ONE, Loaded, contents

from meshtrain.checkpoint import adapters
from meshtrain.huggingface.weights import export, peft
from meshtrain.huggingface.weights.ends import Ends
from meshtrain.model import params
from meshtrain.run import trees

RANK, ALPHA = 3, 5.0
CASES = [("phi3", ONE, ("query", "down", "up")), ("qwen3_next", ONE, ())]
GRID = [("phi3", ONE, ()), ("gpt2", EIGHT, ()), ("gemma3", EIGHT, ()), ("qwen2", EIGHT, ("value", "out")),
        ("llama3.2", EIGHT, ()), ("deepseek_v3", EIGHT, ("query", "value", "down")),
        ("granitemoehybrid", ONE, ()), ("nemotron_h", ONE, ())]


def numbers(entry) -> np.ndarray:
    kind, shape, raw = entry
    assert kind == "F32"
    return np.frombuffer(raw, np.float32).reshape(shape)


def change(name: str, tensors: dict, settings: dict) -> np.ndarray | float:
    """What PEFT adds to a tensor: alpha / rank · B·A, of the module's own rank where a pattern names it."""
    module = name.removesuffix(".weight")
    beside = [tensors.get(f"base_model.model.{module}.lora_{one}.weight") for one in "AB"]
    if None in beside:
        return 0.0
    (target,) = [target for target in settings["target_modules"] if module.endswith(f".{target}")]
    rank, alpha = settings["rank_pattern"].get(target, settings["r"]), settings["alpha_pattern"].get(
        target, settings["lora_alpha"])
    a, b = map(numbers, beside)
    assert a.shape[0] == b.shape[1] == rank
    return (alpha / rank * b @ a).T if settings["fan_in_fan_out"] else alpha / rank * b @ a


@pytest.mark.parametrize("name, layout, targets",
                         [*CASES, *(pytest.param(*case, marks=sampling.GRID) for case in GRID)], ids=str)
def test_merged_logits_are_the_unmerged_and_peft_s_tensors_make_the_merged_folder(name, layout, targets, tmp_path):
    loaded = Loaded(GOLDENS / name, *layout, f"--lora.rank={RANK}", f"--lora.alpha={ALPHA}",
                    f"--lora.targets={json.dumps(targets)}")
    rng, model = np.random.default_rng(0), loaded.made.model
    trained, frozen = model.divide(loaded.params)
    trained = jax.tree.map(lambda a: jax.device_put(rng.normal(size=a.shape, scale=0.1).astype(a.dtype),
                                                    a.sharding), trained)
    loaded.params = params.join(trained, frozen)
    tokens = rng.integers(0, 90, (8, 40))
    unmerged = loaded.logits(tokens)
    merged, leaf = Loaded(GOLDENS / name, *layout), adapters.leaf(model, trees.leaves_of(loaded.params))
    merged.params = trees.nest({info.name: leaf(info.name) for info in merged.made.model.parameters()})
    np.testing.assert_allclose(merged.logits(tokens), unmerged, atol=1e-4)      # float32, as the golden families'

    source, learned = shutil.copytree(GOLDENS / name, tmp_path / "source"), tmp_path / "learned.jinja"
    beside = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "the base's"}
    for file, text in (beside | {"processor_config.json": "{}", "learned.jinja": "learned"}).items():
        (tmp_path / file if file == learned.name else source / file).write_text(text)
    with jax.set_mesh(loaded.made.mesh):
        peft.write(tmp_path / "adapters", model, trees.leaves_of(loaded.params).get, dtype="float32", base="base",
                   data={"chat_template": str(learned)}, source=source, ends=Ends((7,)))
        export.write(tmp_path / "merged", model, leaf, dtype="float32", shard_bytes=10**9, source=GOLDENS / name,
                     data={"seq_len": 40, "tokenizer": "bytes"}, ends=Ends((1,), bos=1))
    assert {path.name: path.read_text() for path in (tmp_path / "adapters").iterdir() if "adapter" not in path.name
            and path.name != "generation_config.json"} == beside | {"chat_template.jinja": "learned"}
    ends = json.loads((tmp_path / "adapters" / "generation_config.json").read_text())["eos_token_id"]
    assert ends in (7, [7, 2]), "what was taught, then the folder's"
    tensors, settings = contents(tmp_path / "adapters"), json.loads(
        (tmp_path / "adapters" / "adapter_config.json").read_text())
    base, found = ({n.removeprefix("transformer."): t for n, t in contents(place).items()}
                   for place in (GOLDENS / name, tmp_path / "merged"))
    prefix = "transformer." if name == "gpt2" else ""
    assert tensors and base.keys() == found.keys()
    for tensor, entry in found.items():
        np.testing.assert_allclose(numbers(entry),
                                   numbers(base[tensor]) + change(prefix + tensor, tensors, settings), atol=1e-6)
