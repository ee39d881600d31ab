"""Model FLOPs, the numerator of MFU: what one token needs, whatever is executed. And what the matmuls of a step
execute."""
from __future__ import annotations

import functools
from collections.abc import Iterable

from meshtrain.cost.formulas import routed
from meshtrain.cost.formulas.placed import Options, Placed, Practice, Product


def model_flops_per_token(table: Iterable, cfg, seq_len: int) -> float:
    """Forward and backward, without recomputation: 6 per matrix element, 4 of a frozen one,
    and causal attention's two products.

    table: ParamInfo rows; cfg: the [model] section. Embedding look-ups cost nothing, a tied head counts as a matrix, of
    experts only those that a token goes to.
    Attention: 12·L·N·H·S of which the causal half, 6·L·N·H·S (PaLM, arXiv:2204.02311, appendix B, halved for
    causality), and of that half what a layer's window leaves.
    """
    multiplied = [info for info in table if info.role in ("matrix", "head", "router")
                  or cfg.tie_embeddings and info.path[0] == "embedding"]
    matrices = sum((6.0 if info.trainable else 4.0) * active(info, cfg) for info in multiplied)
    return matrices + 6.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * seq_len * attended(cfg, seq_len)


def active(info, cfg) -> int:
    """Elements of a parameter that one token uses."""
    return info.size * cfg.experts_per_token // cfg.num_experts if "expert" in info.axes else info.size


def local_layers(cfg, seq_len: int) -> float:
    """The share of the layers that have a window shorter than the sequence."""
    if not 0 < cfg.window < seq_len:
        return 0.0
    return 1 - (cfg.num_layers // cfg.global_every if cfg.global_every else 0) / cfg.num_layers


def attended(cfg, seq_len: int) -> float:
    """Pairs that a token of a whole row attends to, as a share of the causal half, S / 2, in the mean of all layers."""
    part, within = local_layers(cfg, seq_len), cfg.window / seq_len
    return 1 - part + part * (2 - within) * within if part else 1.0


def executed(placed: Placed, options: Options, practice: Practice = Practice()) -> float:
    """FLOPs of one device's matmuls in a step, attention's apart: forward, twice as much backward, of what is frozen
    once, and what remat does again."""
    of = functools.partial(_elements, placed)
    layer, (_, loss, _) = sum(map(of, placed.layer.products)), placed.ends(options, practice)
    ahead = executed(placed.leading, options, practice) if placed.leading else 0.0
    trained = sum(of(product) for product in placed.layer.products if product.trained)
    visits = forward, backward, weights = placed.visits(options, practice)
    layers = (forward + backward) * layer + weights * trained + backward * again(placed, options, practice)
    experts = 0.0
    if found := routed.of(placed, options):
        runs = sum(times * count for times, count in zip(visits, found.products))
        experts = 2 * found.share * runs * found.rows.executed * found.sizes.embed_dim * found.sizes.width
    head = (2 + placed.head.trained) * loss * placed.head.k * placed.head.n
    return ahead + experts + 2 * placed.tokens(options) * (layers + head)


def _elements(placed: Placed, product: Product) -> float:
    """Of a product's matrices for a token that a device has where its sequence is whole."""
    return product.share * product.k * product.n / (placed.stream_shards if product.router else 1)


def again(placed: Placed, options: Options, practice: Practice = Practice()) -> float:
    """Elements of a layer's matrices whose products its backward does again: but for what the last of them adds to the
    residual stream, which nothing there reads."""
    of = functools.partial(_elements, placed)
    forward = sum(map(of, placed.layer.products))
    if practice.recomputed is not None:
        return practice.recomputed[0] * forward
    if options.remat not in ("full", "offload"):
        return 0.0
    return forward - sum(of(product) for product in placed.layer.products if product.unread)
