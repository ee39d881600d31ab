"""What PEFT computes with adapters on the golden model folders: tests/goldens/peft.

`python tests/peft_goldens.py`, where torch, transformers and peft are installed, writes of each case a folder as
`save_pretrained` does, with random adapters, and golden.npz: tokens, the logits with the adapters, and some matrices of
`merge_and_unload`. Made with peft 0.21.2, transformers 5.24.0 and torch 2.13.0; the tests need none of them.
"""
import os
import shutil
import sys
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).resolve().parent / "goldens"
HOME = GOLDENS / "peft"
# name: (base, LoraConfig, the matrices that are kept after the merge)
CASES = {
    "plain": ("llama3.2", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
              ["model.layers.1.self_attn.v_proj"]),
    "patterns": ("llama3.2", dict(
        r=4, lora_alpha=6, use_rslora=True,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_proj": 5},
        alpha_pattern={"k_proj": 3, r"layers\.0\.self_attn\.q_proj": 10, ".*v_proj": 7}),
        ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj",
         "model.layers.0.self_attn.o_proj"]),
    "regex": ("llama3.2", dict(r=3, lora_alpha=7, target_modules=r".*\.layers\.1\.(self_attn\.o_proj|mlp\.down_proj)"),
              ["model.layers.1.mlp.down_proj"]),
    "fused": ("phi3", dict(r=4, lora_alpha=5, target_modules="all-linear"), ["model.layers.1.self_attn.qkv_proj"]),
    "conv1d": ("gpt2", dict(r=2, lora_alpha=3, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
               ["transformer.h.1.attn.c_attn", "transformer.h.0.mlp.c_proj"]),
    "saved": ("llama2", dict(r=2, lora_alpha=4, target_modules=["down_proj"],
                             modules_to_save=["embed_tokens", "lm_head"]), ["lm_head"]),
    "experts": ("qwen3_moe", dict(
        r=2, lora_alpha=5, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"mlp.experts.gate_up_proj": 3}), ["model.layers.0.self_attn.q_proj"]),
    "columns": ("gpt_oss", dict(
        r=3, lora_alpha=4, target_modules=[], use_rslora=True,
        target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]), []),
    "down": ("mixtral", dict(r=2, lora_alpha=3, target_modules=["v_proj"], target_parameters=["mlp.experts.down_proj"]),
             ["model.layers.0.self_attn.v_proj"]),
}


def write(name: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    base, settings, kept = CASES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            parameter.copy_(0.1 * torch.randn_like(parameter))
        tokens = torch.randint(0, 90, (2, 12))
        logits = model(tokens).logits
        place = HOME / name
        shutil.rmtree(place, ignore_errors=True)
        model.save_pretrained(place)
        (place / "README.md").unlink()
        merged = model.merge_and_unload()
        matrices = {module: merged.get_submodule(module).weight.numpy() for module in kept}
    np.savez_compressed(place / "golden.npz", tokens=tokens.numpy(), logits=logits.numpy(), **matrices)


if __name__ == "__main__":
    os.chdir(GOLDENS)       # adapter_config.json names the base as it was given
    for name in sys.argv[1:] or CASES:
        write(name)
