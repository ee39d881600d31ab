"""The parameters outside the layers: embeddings, final norm, head, and the depths of multi-token prediction."""
from __future__ import annotations

from collections.abc import Callable

from flax import nnx

from meshtrain.config.sections import Model
from meshtrain.model import mtp
from meshtrain.model.layers import Embedding, Linear, Norm

VOCAB_MULTIPLE = 256


class EmbeddingAndHead(nnx.Module):
    """Token and position embeddings, final norm, output head and depths of MTP: the parameters outside the layers.

    layer: the function that makes the layer of each MTP depth. Depths are initialized last, so that a seed gives the
    same other parameters with and without depths.
    """

    def __init__(self, cfg: Model, rngs: nnx.Rngs, layer: Callable[[nnx.Rngs], nnx.Module]):
        V, D = pad_vocab(cfg), cfg.embed_dim
        self.embedding = Embedding(cfg, rngs, V, ("vocab", "embed"))
        if cfg.position == "learned":
            self.position = Embedding(cfg, rngs, cfg.max_seq_len, (None, "embed"))
        self.final_norm = Norm(cfg, rngs, (D,), ("embed",))
        if not cfg.tie_embeddings:
            self.head = Linear(cfg, rngs, "BTD,DV->BTV", (D, V), ("embed", "vocab"), std=D ** -0.5, role="head")
        for k in range(1, cfg.mtp_layers + 1):
            setattr(self, mtp.name(k), mtp.Depth(cfg, rngs, layer))


def pad_vocab(cfg: Model) -> int:
    """Return the vocabulary size rounded up, the same on every layout. Padding ids have zero probability."""
    return -(-cfg.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
