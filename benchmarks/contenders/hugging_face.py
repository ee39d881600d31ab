"""LlamaForCausalLM of transformers under torch.compile, or with Liger's kernels in its place.

Whole rows take torch's scaled dot-product attention, packed rows flex attention; transformers finds the documents by
positions that begin anew. variant: "" or "liger", whose kernels break the graphs of torch.compile.
"""
from __future__ import annotations

import torch
import transformers

from benchmarks.contenders.case import Case
from benchmarks.contenders.torch_step import TorchTrainer, device, on_gpu


class Trainer(TorchTrainer):
    def __init__(self, case: Case, variant: str = ""):
        super().__init__(case)
        if variant == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama
            apply_liger_kernel_to_llama()       # RoPE, RMSNorm, SwiGLU, the head fused with the loss
        attention = "flex_attention" if case.packed and on_gpu() else "sdpa"
        cfg = transformers.LlamaConfig(
            vocab_size=case.vocab_size, hidden_size=case.embed_dim, intermediate_size=case.mlp_dim,
            num_hidden_layers=case.num_layers, num_attention_heads=case.num_heads,
            num_key_value_heads=case.num_kv_heads, head_dim=case.head_dim, max_position_embeddings=case.seq_len,
            rms_norm_eps=case.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": case.rope_theta},
            tie_word_embeddings=False, use_cache=False, attn_implementation=attention)
        with device():
            self.model = transformers.LlamaForCausalLM(cfg).float().train()
        compiled = on_gpu() and variant != "liger"
        self.run = torch.compile(self.model) if compiled else self.model
        self.settings = f"{attention}, {variant or ('torch.compile' if compiled else 'eager')}, no checkpointing"

    def sum_losses(self, rows, count):
        positions = rows["positions"] if self.case.packed else None
        return self.run(input_ids=rows["tokens"], position_ids=positions, labels=rows["targets"],
                        shift_labels=rows["targets"], num_items_in_batch=count).loss
