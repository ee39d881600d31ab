"""The decoder: tokens -> embedding -> a scan over stacked layers -> norm -> head and loss.

Llama-like by default, GPT-2-like by the same fields of `[model]`. Parameters are one nested dict:
{"embedding", "position"?, LAYERS: stacked [L, …], "final_norm", "head"?}; nothing here depends on the layout of the
run except through `ex.layout`, and initialization depends on the seed alone.
"""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.layout.rules import Tensor
from meshtrain.model import params
from meshtrain.model.layers import Embedding, Layer, Linear, Norm, Execution, dropout, rope_angles
from meshtrain.model.loss import loss_sums
from meshtrain.names import LAYERS

VOCAB_MULTIPLE = 256


class Inputs(NamedTuple):
    """What every layer sees beside the residual stream; none of it is differentiated."""
    segments_BT: jax.Array                       # document number; attention stays within one
    index_BT: jax.Array                          # index in the sequence, for dropout
    sequence_B: jax.Array                        # global sequence number, for dropout
    rope: tuple[jax.Array, jax.Array] | None     # cos, sin [B, T, H/2]
    dropout_key: jax.Array | None


class Ends(nnx.Module):
    """What stands before and after the layers."""

    def __init__(self, cfg, rngs):
        V, D = padded_vocab(cfg), cfg.embed_dim
        self.embedding = Embedding(cfg, rngs, V, ("vocab", "embed"))
        if cfg.position == "learned":
            self.position = Embedding(cfg, rngs, cfg.max_seq_len, (None, "embed"))
        self.final_norm = Norm(cfg, rngs, D, "embed")
        if not cfg.tie_embeddings:
            self.head = Linear(cfg, rngs, "BTD,DV->BTV", (D, V), ("embed", "vocab"), std=D ** -0.5, role="head")


def padded_vocab(cfg) -> int:
    """The vocabulary rounded up, the same on every layout; ids in the padding get no probability."""
    return -(-cfg.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclasses.dataclass(frozen=True, eq=False)
class Transformer:
    """The model of one `[model]` section: parameter table, initializer, loss and logits."""
    cfg: object
    ends: params.Module
    layer: params.Module

    def parameters(self) -> list[params.ParamInfo]:
        """Every parameter, in the order of the tree's leaves."""
        rows = params.infos(self.ends) + params.infos(self.layer, (LAYERS,), self.cfg.num_layers)
        return sorted(rows, key=lambda info: info.path)

    def init(self, key: jax.Array):
        """The parameters of seed `key`, float32 or [model].param_dtype."""
        ends_key, layers_key = jax.random.split(key)
        stacked = jax.vmap(self.layer.init)(jax.random.split(layers_key, self.cfg.num_layers))
        return {**self.ends.init(ends_key), LAYERS: stacked}

    # The parts that a pipeline puts together itself; p in embed and head_loss needs no "layers".

    def inputs(self, batch, dropout_key=None) -> Inputs:
        rope = rope_angles(self.cfg, batch["positions"]) if self.cfg.position == "rope" else None
        return Inputs(batch["segments"], batch["index"], batch["sequence"], rope, dropout_key)

    def embed(self, ex: Execution, p, batch, dropout_key=None):
        """The residual stream before the first layer [B, T, D]."""
        ends = self._ends(p)
        x_BTD = ends.embedding(ex, batch["tokens"])
        if self.cfg.position == "learned":
            x_BTD = x_BTD + ends.position(ex, batch["positions"])
        return dropout(ex, x_BTD, self.cfg.embedding_dropout, self.inputs(batch, dropout_key), 2 * self.cfg.num_layers)

    def block(self, ex: Execution, weights, x_BTD, inputs: Inputs, index):
        """Layer number `index` with these weights, a slice of p[LAYERS]; the backward keeps what ex.remat says."""
        def layer(weights, x_BTD, inputs, index):
            return self.layer.bind(weights)(ex, x_BTD, inputs, index)
        return rematerialized(layer, ex)(weights, x_BTD, inputs, index)

    def head_loss(self, ex: Execution, p, x_BTD, targets_BT, *, z_loss: float = 0.0, chunk: int = 1024):
        """(objective, nll) from the output of the last layer, as `loss`."""
        axes, w = self._head(p)
        x_BTD = self._normed(ex, p, x_BTD)
        return loss_sums(ex, axes, self.cfg.vocab_size, z_loss, chunk, x_BTD, w, targets_BT)

    def loss(self, ex: Execution, p, batch, *, z_loss: float = 0.0, chunk: int = 1024, dropout_key=None):
        """(objective, nll), sums in nats over the tokens of `batch` that have a target. Divide by their count."""
        x_BTD = self._through_layers(ex, p, batch, dropout_key)
        return self.head_loss(ex, p, x_BTD, batch["targets"], z_loss=z_loss, chunk=chunk)

    def _through_layers(self, ex: Execution, p, batch, dropout_key=None):
        inputs = self.inputs(batch, dropout_key)

        def layer(x_BTD, scanned):
            weights, index = scanned
            return self.block(ex, weights, x_BTD, inputs, index), None
        x_BTD = self.embed(ex, p, batch, dropout_key)
        return jax.lax.scan(layer, x_BTD, (p[LAYERS], jnp.arange(self.cfg.num_layers)))[0]

    def _normed(self, ex: Execution, p, x_BTD):
        x_BTD = self._ends(p).final_norm(ex, x_BTD)
        return ex.layout.act(x_BTD, "batch", "residual_seq", None)

    def _ends(self, p) -> Ends:
        return self.ends.bind({k: v for k, v in p.items() if k != LAYERS})

    def logits(self, ex: Execution, p, batch, at):
        """float32 logits [B, V] of the next token after position `at` of every sequence; padding removed."""
        axes, w = self._head(p)
        x_BTD = self._normed(ex, p, self._through_layers(ex, p, batch))
        x_BTD = ex.layout.act(x_BTD, "batch", "seq", None)
        x_BD = jax.lax.dynamic_index_in_dim(x_BTD, at, 1, keepdims=False)
        eq = "BD,DV->BV" if axes == ("embed", "vocab") else "BD,VD->BV"
        return jnp.einsum(eq, x_BD.astype(jnp.float32), w.astype(jnp.float32))[:, :self.cfg.vocab_size]

    def _head(self, p):
        if self.cfg.tie_embeddings:
            return ("vocab", "embed"), p["embedding"]["table"]
        return ("embed", "vocab"), p["head"]["kernel"]

    def activations(self, batch: int, seq_len: int) -> list[Tensor]:
        """The activations that rules place, with their full shapes, for the checks at load."""
        cfg = self.cfg
        rows = [("residual stream", ("batch", "residual_seq", None), (batch, seq_len, cfg.embed_dim))]
        heads = lambda n, axis: (("batch", "seq", axis, "head_dim"), (batch, seq_len, n, cfg.head_dim))
        rows += [("queries", *heads(cfg.num_heads, "heads")), ("keys", *heads(cfg.num_kv_heads, "kv_heads")),
                 ("mlp", ("batch", "seq", "mlp"), (batch, seq_len, cfg.mlp_dim)),
                 ("logits", ("batch", "seq", "vocab"), (batch, seq_len, padded_vocab(cfg)))]
        return [Tensor("activations", name, shape, axes) for name, axes, shape in rows]


def build(cfg) -> Transformer:
    return Transformer(cfg, params.Module(lambda rngs: Ends(cfg, rngs)), params.Module(lambda rngs: Layer(cfg, rngs)))


def rematerialized(layer, ex: Execution):
    """none: every intermediate is kept; selective: matmul outputs and attention's o and lse; full: only the input.

    Where sequences are split over devices, full keeps o and lse, too (B·T·N·H): the backward never runs a ring again.
    """
    policies = jax.checkpoint_policies
    if ex.remat == "none":
        return layer
    attention = policies.save_only_these_names("attention_o", "attention_lse")
    keep = attention if ex.layout.sizes["context"] > 1 else None
    if ex.remat == "selective":
        # Dots with a batch dim are attention's scores, which nobody wants to keep; the weight gathers are no dots.
        keep = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention)
    return jax.checkpoint(layer, policy=keep, prevent_cse=False)   # inside scan nothing can be merged across it
