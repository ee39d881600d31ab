"""Model FLOPs: what one token needs, whatever the program executes. The numerator of MFU."""
from __future__ import annotations

from collections.abc import Iterable


def model_flops_per_token(table: Iterable, cfg, seq_len: int) -> float:
    """Forward and backward, without recomputation: 6 per matrix element, and causal attention's two products.

    table: ParamInfo rows; cfg: the [model] section. Embedding look-ups cost nothing, a tied head counts as a matrix.
    Attention: 12·L·N·H·S of which the causal half, 6·L·N·H·S (PaLM, arXiv:2204.02311, appendix B, halved for causality).
    """
    matrices = sum(info.size for info in table if info.role in ("matrix", "head"))
    if cfg.tie_embeddings:
        matrices += sum(info.size for info in table if info.path[0] == "embedding")
    return 6.0 * matrices + 6.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * seq_len
