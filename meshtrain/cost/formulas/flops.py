"""Model FLOPs of a token, the numerator of MFU, and the matmul FLOPs that a step executes."""
from __future__ import annotations

import functools
from collections.abc import Iterable

from meshtrain import pattern
from meshtrain.cost.formulas import routed
from meshtrain.cost.formulas.placed import Options, Placed, Product


def model_flops_per_token(table: Iterable, cfg, seq_len: int) -> float:
    """Count FLOPs of forward and backward without recomputation: 6 per matrix element, 4 per frozen one, and the two
    products of causal attention.

    table: ParamInfo rows; cfg: the [model] section. Embedding look-ups count nothing, a tied head counts as a matrix,
    and only the experts that a token is routed to count. Attention: the causal half of 12·L·N·H·S, that is 6·L·N·H·S
    (PaLM, arXiv:2204.02311, appendix B, halved for causality), less what windows exclude.
    """
    multiplied = [info for info in table if info.role in ("matrix", "head", "router")
                  or cfg.tie_embeddings and info.path[0] == "embedding"]
    matrices = sum((6.0 if info.trainable else 4.0) * active(info, cfg) for info in multiplied)
    return matrices + 6.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * seq_len * attended(cfg, seq_len)


def active(info, cfg) -> int:
    """Number of elements of a parameter that one token uses."""
    return info.size * cfg.experts_per_token // cfg.num_experts if "expert" in info.axes else info.size


def local_layers(cfg, seq_len: int) -> float:
    """Fraction of the layers whose window is shorter than the sequence."""
    if not 0 < cfg.window < seq_len:
        return 0.0
    return pattern.share(cfg, mixers=pattern.WINDOWED)


def attended(cfg, seq_len: int) -> float:
    """Mean over layers of the pairs that a token of a full row attends to, as a fraction of the causal half S / 2."""
    part, within = local_layers(cfg, seq_len), cfg.window / seq_len
    return 1 - part + part * (2 - within) * within if part else 1.0


def executed(placed: Placed, options: Options) -> float:
    """Count the FLOPs of one device's matmuls in a step, without attention: the forward, its recomputation, and a
    backward of twice the forward, once for frozen matrices."""
    of = functools.partial(_elements, placed)
    layer, (_, loss, _) = sum(map(of, placed.layer.products)), placed.ends(options)
    leading = executed(placed.leading, options) if placed.leading else 0.0
    trained = sum(of(product) for product in placed.layer.products if product.trained)
    visits = forward, backward, weights = placed.visits(options)
    layers = (forward + backward) * layer + weights * trained + backward * again(placed, options)
    experts = 0.0
    if found := routed.of(placed, options):
        runs = sum(times * count for times, count in zip(visits, found.products))
        experts = 2 * found.share * runs * found.rows.executed * found.sizes.embed_dim * found.sizes.width
    head = (2 + placed.head.trained) * loss * placed.head.k * placed.head.n
    return leading + experts + 2 * placed.tokens(options) * (layers + head)


def _elements(placed: Placed, product: Product) -> float:
    """Elements of a product's matrices, per token of a device that holds whole sequences."""
    return product.share * product.k * product.n / (placed.stream_shards if product.router else 1)


def again(placed: Placed, options: Options) -> float:
    """Elements of a layer's matrices whose forward the backward recomputes. It skips the last products, whose results
    it does not read."""
    of = functools.partial(_elements, placed)
    forward = sum(map(of, placed.layer.products))
    if placed.framework:
        return placed.framework.recomputed[0] * forward
    if options.remat not in ("full", "offload"):
        return 0.0
    return forward - sum(of(product) for product in placed.layer.products if product.unread)
