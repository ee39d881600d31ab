"""The Llama of torchtitan 0.2.2, its blocks compiled one by one as its `apply_compile` does.

Whole rows take torch's scaled dot-product attention, packed rows `varlen_attn`.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torchtitan.models.attention import VarlenMetadata
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from benchmarks.contenders.case import Case
from benchmarks.contenders.torch_step import SKIPPED, TorchTrainer, device, on_gpu


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1), ignore_index=SKIPPED, reduction="sum")


def bound_documents(segments: torch.Tensor) -> VarlenMetadata:
    """Return where documents begin and end. segments: [rows, T] of a microbatch."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([segments.numel()], device=segments.device)])
    longest = int(starts.diff().max())
    starts = starts.to(torch.int32)
    return VarlenMetadata(starts, starts, longest, longest)


class Trainer(TorchTrainer):
    def __init__(self, case: Case, variant: str = ""):
        super().__init__(case)
        attention = "varlen" if case.packed else "sdpa"
        args = TransformerModelArgs(
            dim=case.embed_dim, n_layers=case.num_layers, n_heads=case.num_heads, n_kv_heads=case.num_kv_heads,
            vocab_size=case.vocab_size, multiple_of=case.mlp_dim, norm_eps=case.norm_eps, rope_theta=case.rope_theta,
            ffn_dim_multiplier=case.mlp_dim / (3 * case.embed_dim),     # below one multiple: mlp_dim itself
            max_seq_len=case.seq_len, attn_type=attention, attn_mask_type="block_causal" if case.packed else "causal")
        with device():
            self.model = Transformer(args)
        with torch.no_grad():
            self.model.init_weights(device())
        self.loss = cross_entropy
        if on_gpu():
            for name, block in self.model.layers.named_children():
                self.model.layers.register_module(name, torch.compile(block, fullgraph=True))
            self.loss = torch.compile(cross_entropy)
        self.settings = f"{attention}, blocks {'compiled' if on_gpu() else 'eager'}, no checkpointing"

    def place(self, batch):
        parts, count = super().place(batch)
        for rows in parts:
            rows["bounds"] = bound_documents(rows["segments"]) if self.case.packed else None
        return parts, count

    def sum_losses(self, rows, count):
        return self.loss(self.model(rows["tokens"], rows["bounds"]), rows["targets"]) / count
