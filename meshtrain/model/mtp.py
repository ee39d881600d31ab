"""Multi-token prediction (MTP): depth k predicts the token k + 1 places ahead, with the model's embedding and head.

Depth k merges the normed state of depth k - 1 with the normed embedding of the token k places ahead, and runs one more
layer of the same kind as the model's last layer with attention. Depth 1 reads the model's state after the final norm,
and each depth passes on its state after its own norm. If the token k places ahead is in another document, no place with
a loss reads the result at this place.

Source: arXiv:2412.19437 (DeepSeek-V3), equations 21 to 25. The paper does not say whether depth 1 reads the state
before or after the final norm; vLLM, SGLang, transformers and Megatron-Core use the state after it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx

from meshtrain.config.sections import Model
from meshtrain.model.execution import Execution
from meshtrain.model.layers import Linear, Norm
from meshtrain.names import DEPTH, NO_TARGET, PADDING


class Depth(nnx.Module):
    """The parameters of one depth. The published matrix [2D, D] of the merge is two matrices here, so that the states
    need not be concatenated.

    layer: the function that makes the decoder layer. norm: the norm before the shared head."""

    def __init__(self, cfg: Model, rngs: nnx.Rngs, layer: Callable[[nnx.Rngs], nnx.Module]):
        D = cfg.embed_dim

        def norm():
            return Norm(cfg, rngs, (D,), ("embed",))

        def half():     # columns over tensor, as those of an MLP; otherwise every rank would multiply all of them
            return Linear(cfg, rngs, "BTD,DF->BTF", (D, D), ("embed", "mlp"), std=(2 * D) ** -0.5)
        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.from_embedding, self.from_hidden = half(), half()
        self.layer = layer(rngs)

    def merge(self, ex: Execution, e_BTD, h_BTD):
        """Return the layer's input, sharded like the residual stream.

        e_BTD: the embeddings of the tokens ahead. h_BTD: the state of the previous depth. With sequence parallelism
        both are gathered over tensor (B·T·D each), and an all-to-all exchanges columns of the result for its rows.
        """
        def project(norm: Norm, linear: Linear, x_BTD):
            x_BTD = ex.layout.act(norm(ex, x_BTD), "batch", "residual_seq", None)
            return linear(ex, x_BTD if ex.numerics.float8 else ex.layout.act(x_BTD, "batch", "seq", None))
        x_BTD = (project(self.embedding_norm, self.from_embedding, e_BTD)
                 + project(self.hidden_norm, self.from_hidden, h_BTD))
        return ex.layout.act(ex.layout.act(x_BTD, "batch", "seq", "mlp"), "batch", "residual_seq", None)


def name(depth: int) -> str:
    """Return the name of a depth, counted from 1, in the parameter tree."""
    return f"{DEPTH}{depth}"


def of_depth(path: tuple[str, ...]) -> bool:
    """Return whether a parameter belongs to a depth."""
    return path[0].startswith(DEPTH)


def shift(rows: Mapping[str, np.ndarray], num_depths: int) -> dict[str, np.ndarray]:
    """Return tokens_k and targets_k [B, T], int32, of every depth k: the arrays `tokens` and `targets` k places ahead.

    rows: whole sequences in their natural order. At places without such a token in the same document, both arrays have
    NO_TARGET. The last target of a document belongs only to its last token, so depth k has k targets fewer per
    document.
    """
    segments, shifted = np.asarray(rows["segments"]), {}
    for k in range(1, num_depths + 1):
        inside = (segments[:, k:] == segments[:, :-k]) & (segments[:, k:] != PADDING)
        for array in ("tokens", "targets"):
            ahead = np.full(segments.shape, NO_TARGET, np.int32)
            ahead[:, :inside.shape[1]] = np.where(inside, rows[array][:, k:], NO_TARGET)
            shifted[f"{array}_{k}"] = ahead
    return shifted


def report(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the metrics of a step with mtp_loss_k and mtp_accept_k converted from a mean per target of the model to a
    mean per target of depth k. mtp_accept_k: share of the targets that have the largest logit."""
    by_depth = [key.removeprefix("mtp_targets_") for key in metrics if key.startswith("mtp_targets_")]
    counts = {f"mtp_{what}_{k}": metrics[f"mtp_targets_{k}"] for k in by_depth for what in ("loss", "accept")}
    return {key: value / counts[key] if key in counts else value for key, value in metrics.items()
            if not key.startswith("mtp_targets_")}
