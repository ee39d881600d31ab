"""Counts the model FLOPs of a token, the numerator of MFU, and the matmul FLOPs that a step executes.

Mixers count by kind. Attention counts the causal half of its two products: N·(H + V)·S in the forward for keys of width
H and values of width V (PaLM, arXiv:2204.02311, appendix B, halved for causality), less the pairs that windows exclude.
A recurrence counts the products of one token with the state of each value head, k_t u_t^T and S_t^T q_t, and with the
delta rule also S^T k_t. Each product is 2·d·V FLOPs, regardless of the chunks in which the program computes it.
Convolutions, decays and norms count nothing.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import depths, mixers
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.formulas.sizes import Product


def model_flops_per_token(table: Iterable, cfg: Model, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, without recomputation: 6 per matrix element, 4 per frozen
    matrix element, and three times the forward FLOPs of `mixers.flops`.

    table: ParamInfo rows; cfg: the [model] section. Embedding look-ups count nothing, a tied head counts as a matrix,
    and only the experts that a token is routed to count.
    """
    table, of_depths = depths.split(table, cfg)
    further = 0.0
    if of_depths and of_depths[0].trainable:
        heads = [info for info in table if info.role == "head" or cfg.tie_embeddings and info.path[0] == "embedding"]
        further = model_flops_per_token(of_depths, depths.section(cfg), seq_len) + cfg.mtp_layers * sum(
            6.0 * info.size for info in heads)
    multiplied = [info for info in table if info.role in ("matrix", "head", "router")
                  or cfg.tie_embeddings and info.path[0] == "embedding"]
    matrices = sum((6.0 if info.trainable else 4.0) * active(info, cfg) for info in multiplied)
    return further + matrices + sum(3.0 * count * mixers.flops(cfg, mixer, seq_len)
                          for mixer, count in Counter(kind.mixer for kind in pattern.kinds(cfg)).items())


def active(info, cfg: Model) -> int:
    """Return the number of elements of a parameter that one token uses."""
    return info.size * cfg.experts_per_token // cfg.num_experts if "expert" in info.axes else info.size


def count_executed(placed: Placed, options: Options) -> float:
    """Return the FLOPs of one device's matmuls in a step, without attention and recurrences.

    Counts the forward, its recomputation, and the backward. The backward costs twice the forward, or once for frozen
    matrices.
    """
    of = functools.partial(_elements, placed)
    products = [product for product in placed.layer.products if not product.expands]
    layer, (_, loss, _) = sum(map(of, products)), placed.ends(options)
    others = sum(count_executed(part, options) for part in (placed.leading, placed.depths) if part)
    trained = sum(of(product) for product in products if product.trained)
    visits = forward, backward, weights = placed.visits(options)
    skipped = sum(product.share * product.k * (product.n - placed.input_columns(product)) for product in products)
    layers = (forward + backward) * layer + weights * trained + backward * (again(placed, options) - skipped)
    experts = 0.0
    if routed := placed.route(options):
        runs = sum(times * count for times, count in zip(visits, routed.products))
        experts = 2 * routed.share * runs * routed.rows.executed * routed.sizes.embed_dim * routed.sizes.width
    head = (1 + (1 + placed.head.trained) * (backward > 0)) * loss * placed.head.k * placed.head.n
    return others + experts + 2 * placed.tokens(options) * (layers + head)


def _elements(placed: Placed, product: Product) -> float:
    """Return the matrix elements of a product, per token of a device that holds whole sequences."""
    each = product.share * product.k * product.n
    return each * placed.router_parts / placed.stream_shards if product.router else each


def again(placed: Placed, options: Options) -> float:
    """Return the number of matrix elements of a layer whose forward products the backward recomputes. The last products
    are not recomputed, because the backward does not read their results."""
    of = functools.partial(_elements, placed)
    products = [product for product in placed.layer.products if not product.expands]
    return placed.recomputation(options).products * sum((1 - product.unread) * of(product) for product in products)
